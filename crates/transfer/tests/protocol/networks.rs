//! A source in a network namespace of its own, and the link between them.

use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use dsv4_kv_transfer::{Deadlines, TransferError};
use libtest_mimic::Failed;

use super::hazards::Files;
use super::peer::{Peer, SLACK, receiver, wait, wait_for_some};
use super::world::World;

/// Longest wait for what must come.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Why network namespaces cannot be used here; `None` if they can.
pub fn why_not() -> Option<&'static str> {
    let works = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !works("unshare", &["-n", "-m", "mount", "-t", "sysfs", "sysfs", "/sys"]) {
        Some("unshare -n -m with a /sys of its own does not work: network namespaces need root")
    } else if !works("ip", &["link", "show"]) {
        Some("there is no ip (iproute2)")
    } else {
        None
    }
}

fn run(program: &str, arguments: &str) {
    let output = Command::new(program).args(arguments.split(' ')).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments}: {said}");
}

/// Waits until a process has its own network namespace.
fn wait_for_namespace(process: u32) {
    let of = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).unwrap();
    let start = Instant::now();
    while of(&process.to_string()) == of("self") {
        assert!(start.elapsed() < TIMEOUT, "unshare does nothing");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A virtual cable (veth pair): its two ends and their subnet. Dropping it waits until the device is gone, so that the
/// next test does not see it. Otherwise it would vanish some time later with its namespace, and UCX aborts if a device
/// vanishes while UCX queries it.
struct Cable {
    here: String,
    there: String,
    subnet: String,
}

impl Drop for Cable {
    fn drop(&mut self) {
        // It may have vanished with the namespace.
        let _ = Command::new("ip").args(["link", "del", &self.here]).output();
        let device = Path::new("/sys/class/net").join(&self.here);
        let start = Instant::now();
        while device.exists() && start.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Creates a cable from here to the namespace of a process, in a subnet that no other such test uses.
fn cable(process: u32) -> Cable {
    let subnet = format!("10.{}.{}", 200 + process / 250 % 50, process % 250);
    let (here, there) = (format!("kv{process}a"), format!("kv{process}b"));
    run("ip", &format!("link add {here} type veth peer name {there} netns {process}"));
    let cable = Cable { here, there, subnet };
    let Cable { here, there, subnet } = &cable;
    run("ip", &format!("addr add {subnet}.1/24 dev {here}"));
    run("ip", &format!("link set {here} up"));
    let inside = |command: &str| run("nsenter", &format!("-t {process} -n ip {command}"));
    inside("link set lo up");
    inside(&format!("addr add {subnet}.2/24 dev {there}"));
    inside(&format!("link set {there} up"));
    // UCX may connect from the address of another device.
    inside(&format!("route add default via {subnet}.1"));
    cable
}

/// Removes the address at the other end, while packets still arrive there: connections to it get no answer.
fn silence(cable: &Cable, process: u32) {
    let Cable { here, there, subnet } = cable;
    let address = format!("/proc/{process}/root/sys/class/net/{there}/address");
    let mac = std::fs::read_to_string(address).unwrap();
    run("ip", &format!("neigh replace {subnet}.2 lladdr {} dev {here}", mac.trim()));
    run("nsenter", &format!("-t {process} -n ip addr flush dev {there}"));
    let address: SocketAddr = format!("{subnet}.2:9").parse().unwrap();
    let error = TcpStream::connect_timeout(&address, Duration::from_millis(300)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "neither refused nor unreachable");
}

/// A source that was never connected to becomes unreachable without any sign: an error at the deadline, and a fence at
/// the second one. Another source is served meanwhile and afterwards.
pub fn an_address_that_is_silent() -> Result<(), Failed> {
    let world = World::new();
    let files = Files::new(&world);
    let [read, fence] = [1000, 2500].map(Duration::from_millis);
    let mut receiver = receiver(Deadlines { read, fence, quiet: fence });
    let mut other = Peer::bytes(&[]);
    // Opens its agent. The connection to it is made while the read of the other source waits.
    let (_, lease) = other.serve(&world, &world.samples[0], files.of(0));
    other.ask(&format!("end {lease}"));
    let mut peer = Peer::apart(&[("UCX_TLS", "tcp")]);
    let process = peer.child.id();
    wait_for_namespace(process);
    let link = cable(process);
    let (offer, _) = peer.serve(&world, &world.samples[2], files.of(2));
    silence(&link, process);
    let (start, mut served) = (Instant::now(), 0);
    let silent = receiver.begin(start.elapsed(), &offer, &world.expected())?;
    let connected = start.elapsed();
    // If the call itself connected, it would take minutes, as long as the system tries.
    assert!(connected < SLACK, "the call took {connected:?}");
    let mut error = None;
    while error.is_none() {
        let (offer, lease) = other.serve(&world, &world.samples[0], files.of(0));
        receiver.begin(start.elapsed(), &offer, &world.expected())?;
        let mut is_served = false;
        while !is_served {
            for (id, ended) in wait_for_some(&mut receiver, start) {
                if id == silent {
                    error = Some((ended.expect_err("nobody answers"), start.elapsed()));
                } else {
                    assert_eq!(ended?.payload(), world.samples[0].payload);
                    is_served = true;
                    served += u32::from(error.is_none());
                }
            }
        }
        other.ask(&format!("end {lease}"));
    }
    let Some((error, took)) = error else { unreachable!("it has come") };
    assert!(matches!(error, TransferError::Deadline { .. }), "{error}");
    assert!(took < read + SLACK, "{error} after {took:?}");
    assert!(served > 0, "another is served meanwhile");
    while receiver.quarantined_bytes() > 0 {
        assert!(start.elapsed() < TIMEOUT, "quarantine does not end");
        receiver.poll(start.elapsed());
    }
    let ended = start.elapsed();
    assert!(ended < fence + SLACK, "quarantine ended after {ended:?}");
    eprintln!(
        "silent: {error} after {took:?}; {served} others meanwhile; quarantine until {ended:?}"
    );
    assert_eq!((receiver.stats().fences, receiver.taken_bytes()), (1, 0));
    let (offer, _) = other.serve(&world, &world.samples[2], files.of(2));
    receiver.begin(start.elapsed(), &offer, &world.expected())?;
    assert_eq!(wait(&mut receiver, start)?.payload(), world.samples[2].payload);
    Ok(())
}

/// The link goes down before a read: an error at the deadline, and nothing is lost. When the link is up again, requests
/// arrive.
pub fn a_link_that_goes_down() -> Result<(), Failed> {
    let world = World::new();
    let files = Files::new(&world);
    let mut peer = Peer::apart(&[("UCX_TLS", "tcp")]);
    wait_for_namespace(peer.child.id());
    let link = cable(peer.child.id());
    let [read, fence] = [500, 1500].map(Duration::from_millis);
    let mut receiver = receiver(Deadlines { read, fence, quiet: fence });
    let start = Instant::now();
    for _ in 0..2 {
        let (offer, lease) = peer.serve(&world, &world.samples[2], files.of(2));
        receiver.begin(start.elapsed(), &offer, &world.expected())?;
        let verified = wait(&mut receiver, start)?;
        assert_eq!(verified.payload(), world.samples[2].payload, "over the link");
        drop(verified);
        peer.ask(&format!("end {lease}"));
        let (offer, _) = peer.serve(&world, &world.samples[2], files.of(2));
        run("ip", &format!("link set {} down", link.here));
        let began = start.elapsed();
        let begun = receiver.begin(began, &offer, &world.expected());
        let error = begun.and_then(|_| wait(&mut receiver, start)).expect_err("nothing arrives");
        let took = start.elapsed() - began;
        let is_known =
            matches!(error, TransferError::Deadline { .. } | TransferError::Transport(_));
        assert!(is_known && took < read + SLACK, "{error} after {took:?}");
        eprintln!("link down: {error} after {took:?}");
        run("ip", &format!("link set {} up", link.here));
        while receiver.quarantined_bytes() > 0 {
            assert!(start.elapsed() - began < TIMEOUT, "quarantine does not end");
            assert!(receiver.poll(start.elapsed()).is_empty());
        }
        let stats = receiver.stats();
        eprintln!("up again: {} reads ended late, {} fences", stats.ended_late, stats.fences);
        assert_eq!(receiver.taken_bytes(), 0);
    }
    Ok(())
}
