//! A source in a process of its own. The control channel is its standard input and output.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use dsv4_kv::device::Backend;
use dsv4_kv_transfer::protocol::{Ended, Offer, Opening, Ready};
use dsv4_kv_transfer::transport::{Descriptor, Nixl, NixlOptions, Region, Registered};
use dsv4_kv_transfer::{
    Deadlines, ImageKind, Manifest, Receiver, Section, Sender, Source, TransferError, Transport,
    Verified,
};

use super::gpus::Gpu;
use super::prefixes;
use super::streaming::{Plan, Prefill};
use super::walk::Walk;
use super::world::{Answers, MAX_BYTES, Sample, Schema, World, emulated};

/// Set in the process that is the source: to `cache`, `flash`, `lingering`, `long`, `bytes` or `gpu`.
const CHILD: &str = "DSV4_NIXL_TEST_SOURCE";
/// Set for a source of kind `gpu`: `host` or `device`, the memory of its payloads.
pub const STORAGE: &str = "DSV4_NIXL_TEST_STORAGE";

/// How much later than a deadline an error may come: under other load this process may have to wait for a core.
pub const SLACK: Duration = Duration::from_secs(1);
/// Longest wait for what must come: twice the longest deadline of these tests, a [`Deadlines::quiet`] of 60 s.
pub const TIMEOUT: Duration = Duration::from_secs(120);
/// How long a source of kind `lingering` keeps the memory of an offer that ended.
pub const LINGER: Duration = Duration::from_secs(10);

/// Runs the source, if this process is one.
pub fn is_source() -> bool {
    let Some(kind) = std::env::var_os(CHILD) else { return false };
    match kind.to_str() {
        Some("cache") => cache(World::new(), Sender::new(nixl(), MAX_BYTES)),
        Some("flash") => cache(of(Schema::Flash), Sender::new(nixl(), MAX_BYTES)),
        Some("lingering") => {
            let sender = Sender::new(nixl(), MAX_BYTES).with_linger(LINGER);
            cache(of(Schema::Flash), sender);
        }
        Some("long") => cache(of(Schema::Long), Sender::new(nixl(), MAX_BYTES)),
        Some("gpu") => {
            let gpu = Gpu::open(0).unwrap();
            let storage = std::env::var(STORAGE).unwrap();
            let sender = Sender::with_storage(nixl(), (gpu.storage(&storage).unwrap(), MAX_BYTES));
            cache(World::on(&gpu.device, &gpu.device), sender);
        }
        _ => bytes_alone(),
    }
    true
}

fn of(schema: Schema) -> World {
    World::of(schema, &emulated(), &emulated())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks(2);
    digits.map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap()).collect()
}

pub fn nixl() -> Nixl {
    Nixl::open(&NixlOptions::default()).unwrap()
}

/// A source with a cache: offers samples and a prompt that it computes, and answers claims.
fn cache<B: Backend>(mut world: World<B>, mut sender: Sender<Nixl>) {
    let (mut prefill, mut prefixes, mut walk) = (None, None, Walk::default());
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        let answer = match words[..] {
            ["offer", sample] => {
                let offer = world.offer(&mut sender, sample.parse().unwrap());
                format!("{} {}", hex(&offer.manifest), hex(&offer.payload.0))
            }
            ["walk", end] => {
                let end = end.parse().unwrap();
                let id = walk.to(&mut world.source, &world.story, end);
                let offer = world.offer_walk(&mut sender, id, end);
                format!("{} {}", hex(&offer.manifest), hex(&offer.payload.0))
            }
            ["open", prompt, chunk] => {
                let plan = Plan { prompt: prompt.parse().unwrap(), chunk: chunk.parse().unwrap() };
                let of = (world.fingerprint, plan);
                let new = Prefill::planned(&mut world.source, &mut sender, of);
                let opening = prefill.insert(new).opening();
                format!("{} {}", hex(&opening.manifest), hex(&opening.payload.0))
            }
            ["step"] => {
                let prefill = prefill.as_mut().unwrap();
                let ready = prefill.step(&mut world.source, &world.story, &mut sender);
                let Ready { source: Source { epoch, lease }, bytes } = ready;
                format!("{epoch} {lease} {bytes} {}", prefill.is_whole())
            }
            ["done"] => {
                let offer = prefill.take().unwrap().offer(&mut sender);
                format!("{} {}", hex(&offer.manifest), hex(&offer.payload.0))
            }
            ["claim", epoch, lease] => {
                let (epoch, lease) = (epoch.parse().unwrap(), lease.parse().unwrap());
                sender.claim(Source { epoch, lease }).to_string()
            }
            ["prefix", tokens] => {
                let (site, prompt) = prefixes.get_or_insert_with(prefixes::computed);
                let tokens = &prompt[..tokens.parse().unwrap()];
                let offer = prefixes::offered(site, tokens, &mut sender);
                format!("{} {}", hex(&offer.manifest), hex(&offer.payload.0))
            }
            ["gives-up", epoch, lease] => {
                let (epoch, lease) = (epoch.parse().unwrap(), lease.parse().unwrap());
                sender.give_up(Source { epoch, lease }).to_string()
            }
            ["expire", seconds] => {
                sender.expire(Duration::from_secs(seconds.parse().unwrap()));
                sender.held_bytes().to_string()
            }
            ["back", lease] => sender.take_back(lease.parse().unwrap()).to_string(),
            _ => panic!("{line}"),
        };
        println!("{answer}");
    }
}

/// A source without a cache: its bytes are in memory that it registers once and reuses, as servers with a pool do.
fn bytes_alone() {
    let mut open = None;
    let mut served: HashMap<u64, Registered> = HashMap::new();
    let mut held: HashMap<u64, bool> = HashMap::new();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        // Opened at the first command, when the network exists.
        let transport = open.get_or_insert_with(nixl);
        let answer = match words[..] {
            ["serve", lease, file] => {
                let content = std::fs::read(file).unwrap();
                let mut region = Region::new(content.len()).unwrap();
                region.bytes_mut().copy_from_slice(&content);
                let memory = transport.register(region).unwrap();
                let descriptor = transport.publish(&memory).unwrap();
                let lease = lease.parse().unwrap();
                served.insert(lease, memory);
                held.insert(lease, true);
                hex(&descriptor.0)
            }
            // Reuses memory for other bytes.
            ["reuse", lease, file] => {
                let content = std::fs::read(file).unwrap();
                let lease: u64 = lease.parse().unwrap();
                held.insert(lease, false);
                let memory = served.get_mut(&lease).unwrap();
                let copy = |bytes: &mut [u8]| bytes[..content.len()].copy_from_slice(&content);
                transport.with_bytes(memory, copy).unwrap();
                "done".to_owned()
            }
            ["claim", _, lease] => {
                let is_held = held.get_mut(&lease.parse().unwrap()).unwrap();
                std::mem::take(is_held).to_string()
            }
            ["end", lease] => {
                let memory = served.remove(&lease.parse().unwrap()).unwrap();
                transport.deregister(memory).unwrap();
                "done".to_owned()
            }
            _ => panic!("{line}"),
        };
        println!("{answer}");
    }
}

/// The other process.
pub struct Peer {
    pub child: Child,
    to: ChildStdin,
    /// Its answers, which a thread reads: they may not come.
    answers: mpsc::Receiver<std::io::Result<String>>,
    lease: u64,
}

impl Peer {
    /// A source with a cache.
    pub fn cache() -> Self {
        Self::start(Command::new(std::env::current_exe().unwrap()), "cache", &[])
    }

    /// A source with a cache of V4-Flash.
    pub fn flash() -> Self {
        Self::start(Command::new(std::env::current_exe().unwrap()), "flash", &[])
    }

    /// As [`Self::flash`], over TCP, with memory that lingers for [`LINGER`].
    pub fn lingering() -> Self {
        let variables = [("UCX_TLS", "tcp")];
        Self::start(Command::new(std::env::current_exe().unwrap()), "lingering", &variables)
    }

    /// A source with a cache for prompts of 8,192 tokens.
    pub fn long() -> Self {
        Self::start(Command::new(std::env::current_exe().unwrap()), "long", &[])
    }

    /// A source with a cache on GPU 0, whose payloads are in memory of this kind.
    pub fn gpu(storage: &str) -> Self {
        Self::start(Command::new(std::env::current_exe().unwrap()), "gpu", &[(STORAGE, storage)])
    }

    /// A source without a cache, with these environment variables.
    pub fn bytes(variables: &[(&str, &str)]) -> Self {
        Self::start(Command::new(std::env::current_exe().unwrap()), "bytes", variables)
    }

    /// As [`Self::bytes`], in a separate, empty network namespace. UCX finds its devices in that namespace's `/sys`.
    pub fn apart(variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new("unshare");
        let script = "mount -t sysfs sysfs /sys && exec \"$0\"";
        command.args(["-n", "-m", "sh", "-c", script]).arg(std::env::current_exe().unwrap());
        Self::start(command, "bytes", variables)
    }

    fn start(mut command: Command, kind: &str, variables: &[(&str, &str)]) -> Self {
        let mut child = command
            .env(CHILD, kind)
            .envs(variables.iter().copied())
            // UCX writes warnings to standard output, where answers go.
            .env("UCX_LOG_FILE", "/dev/stderr")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (tell, answers) = mpsc::channel();
        // Ends with the process, or with its `Peer`.
        std::thread::spawn(move || {
            BufReader::new(from).lines().try_for_each(|line| tell.send(line))
        });
        Self { child, to, answers, lease: 0 }
    }

    pub fn ask(&mut self, question: &str) -> String {
        self.try_ask(question).unwrap()
    }

    fn try_ask(&mut self, question: &str) -> std::io::Result<String> {
        writeln!(self.to, "{question}")?;
        match self.answers.recv_timeout(TIMEOUT) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => Err(ErrorKind::TimedOut.into()),
            Err(RecvTimeoutError::Disconnected) => Err(ErrorKind::UnexpectedEof.into()),
        }
    }

    pub fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Stops the process, and waits until it is stopped.
    pub fn stop(&self) {
        self.signal("-STOP");
        let stat = format!("/proc/{}/stat", self.child.id());
        while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
            std::thread::yield_now();
        }
    }

    /// The CPU time that the process has used so far.
    pub fn cpu_time(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // After the name, which is in parentheses: utime and stime are fields 14 and 15 (proc(5)), in hundredths of a
        // second.
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        let ticks: u64 =
            fields.split(' ').skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum();
        Duration::from_millis(10 * ticks)
    }

    fn two(&mut self, question: &str) -> (Vec<u8>, Descriptor) {
        let answer = self.ask(question);
        let (manifest, payload) = answer.split_once(' ').unwrap();
        (bytes(manifest), Descriptor(bytes(payload)))
    }

    /// Asks a source with a cache for an offer of a sample.
    pub fn offer(&mut self, sample: usize) -> Offer {
        let (manifest, payload) = self.two(&format!("offer {sample}"));
        Offer { manifest, payload }
    }

    /// Asks a source with a cache for an offer of a request that it computes up to `end` tokens, and keeps.
    pub fn walk(&mut self, end: usize) -> Offer {
        let (manifest, payload) = self.two(&format!("walk {end}"));
        Offer { manifest, payload }
    }

    /// Asks a source with a cache for an offer of the cached prefix of a prompt's first `tokens` tokens.
    pub fn prefix(&mut self, tokens: usize) -> Offer {
        let (manifest, payload) = self.two(&format!("prefix {tokens}"));
        Offer { manifest, payload }
    }

    /// Asks a source with a cache for the opening of a prompt that it will compute.
    pub fn open(&mut self, Plan { prompt, chunk }: Plan) -> Opening {
        let (manifest, payload) = self.two(&format!("open {prompt} {chunk}"));
        Opening { manifest, payload }
    }

    /// Lets the source compute a chunk. Returns the ready bytes, and whether the prompt is complete.
    pub fn step(&mut self) -> (Ready, bool) {
        let answer = self.ask("step");
        let words: Vec<_> = answer.split(' ').collect();
        let number = |at: usize| words[at].parse().unwrap();
        let source = Source { epoch: number(0), lease: number(1) };
        (Ready { source, bytes: number(2) }, words[3] == "true")
    }

    /// Asks for the offer of the complete prompt.
    pub fn done(&mut self) -> Offer {
        let (manifest, payload) = self.two("done");
        Offer { manifest, payload }
    }

    /// Lets a source without a cache serve a sample, whose payload is in `file`.
    pub fn serve(&mut self, world: &World, sample: &Sample, file: &str) -> (Offer, u64) {
        self.lease += 1;
        let lease = self.lease;
        let payload = Descriptor(bytes(&self.ask(&format!("serve {lease} {file}"))));
        let mut rest = &sample.payload[..];
        let parts = world.layout.parts(sample.at).into_iter();
        let of = |part: dsv4_kv::transfer::Part| {
            Section::of(part, rest.split_off(..part.bytes as usize).unwrap())
        };
        let manifest = Manifest {
            kind: ImageKind::Request,
            fingerprint: world.fingerprint,
            at: sample.at,
            source: Source { epoch: self.child.id().into(), lease },
            tokens: sample.tokens.clone(),
            sections: parts.map(of).collect(),
        };
        (Offer { manifest: manifest.encode(), payload }, lease)
    }
}

impl Answers for Peer {
    fn claim(&mut self, source: Source) -> Result<bool, String> {
        let answer = self.try_ask(&format!("claim {} {}", source.epoch, source.lease));
        answer.map(|answer| answer == "true").map_err(|error| error.to_string())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A receiver over NIXL.
pub fn receiver(deadlines: Deadlines) -> Receiver<Nixl> {
    Receiver::new(nixl(), deadlines, 64 << 20)
}

/// Polls until the only transfer has ended.
pub fn wait<T: Transport>(
    receiver: &mut Receiver<T>,
    start: Instant,
) -> Result<Verified, TransferError> {
    wait_for_some(receiver, start).pop().expect("some have").1
}

/// Polls until transfers have ended.
pub fn wait_for_some<T: Transport>(receiver: &mut Receiver<T>, start: Instant) -> Vec<Ended> {
    let begin = Instant::now();
    loop {
        let ended = receiver.poll(start.elapsed());
        if !ended.is_empty() {
            return ended;
        }
        let (reads, stats) = (receiver.reads(), receiver.stats());
        assert!(reads > 0, "nothing is read, so that nothing ends: {stats:?}");
        assert!(begin.elapsed() < TIMEOUT, "{reads} transfers do not end: {stats:?}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Polls until `is_so`, while no transfer ends.
pub fn poll_until<T: Transport>(
    receiver: &mut Receiver<T>,
    start: Instant,
    is_so: impl Fn(&Receiver<T>) -> bool,
) {
    let begin = Instant::now();
    while !is_so(receiver) {
        if let Some((_, ended)) = receiver.poll(start.elapsed()).pop() {
            panic!("a transfer has ended: {:?}", ended.map(drop));
        }
        assert!(begin.elapsed() < TIMEOUT, "it does not come: {:?}", receiver.stats());
    }
}
