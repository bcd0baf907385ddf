//! A source in a network namespace of its own, and the link between them.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use dsv4_kv_transfer::{Deadlines, TransferError};
use libtest_mimic::Failed;

use super::hazards::Files;
use super::peer::{Peer, receiver, wait};
use super::world::World;

/// Why there can be no namespace here; `None` if there can.
pub fn why_not() -> Option<&'static str> {
    let works = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !works("unshare", &["-n", "-m", "true"]) {
        Some("unshare -n -m does not work: network namespaces need root")
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

/// Waits until a process has a namespace of its own.
fn wait_for_namespace(process: u32) {
    let of = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).unwrap();
    while of(&process.to_string()) == of("self") {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The end of a cable that is here. Dropped, the cable is gone when the next test looks for devices: with its namespace it would
/// go some time later, and UCX ends if a device goes while it asks for it.
struct Cable(String);

impl Drop for Cable {
    fn drop(&mut self) {
        // It may have gone with the namespace.
        let _ = Command::new("ip").args(["link", "del", &self.0]).output();
        let device = Path::new("/sys/class/net").join(&self.0);
        let start = Instant::now();
        while device.exists() && start.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Two ends of a cable: one here, the other where the process is, in a subnet that no other such test has.
fn cable(process: u32) -> Cable {
    let subnet = format!("10.{}.{}", 200 + process / 250 % 50, process % 250);
    let (here, there) = (format!("kv{process}a"), format!("kv{process}b"));
    run("ip", &format!("link add {here} type veth peer name {there} netns {process}"));
    let cable = Cable(here.clone());
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

/// The link goes down before a read: an error at the deadline, and nothing is lost; when it is up again requests come.
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
        run("ip", &format!("link set {} down", link.0));
        let began = start.elapsed();
        let begun = receiver.begin(began, &offer, &world.expected());
        let error = begun.and_then(|_| wait(&mut receiver, start)).expect_err("nothing arrives");
        let took = start.elapsed() - began;
        let is_known =
            matches!(error, TransferError::Deadline { .. } | TransferError::Transport(_));
        assert!(is_known && took < read + Duration::from_millis(500), "{error} after {took:?}");
        eprintln!("link down: {error} after {took:?}");
        run("ip", &format!("link set {} up", link.0));
        while receiver.quarantined_bytes() > 0 {
            assert!(receiver.poll(start.elapsed()).is_empty());
        }
        let stats = receiver.stats();
        eprintln!("up again: {} reads ended late, {} fences", stats.ended_late, stats.fences);
        assert_eq!(receiver.taken_bytes(), 0);
    }
    Ok(())
}
