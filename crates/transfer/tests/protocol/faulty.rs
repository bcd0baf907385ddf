//! A transport with the faults that NIXL was seen to have: it reports success with wrong bytes, stops in the middle,
//! fails with part of the bytes written, and writes after a transfer has ended.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use dsv4_kv_transfer::transport::{
    Descriptor, Fabric, InFlight, Loopback, NotPosted, Polled, Region, RegionMut, Registered,
};
use dsv4_kv_transfer::{
    Deadlines, Receiver, Sender, TransferError, TransferId, Transport, TransportError, Verified,
};

use crate::world::{MAX_BYTES, World};

/// A fault of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No fault: the read is done when it is polled.
    None,
    /// The read is done after this time; its bytes are written then.
    Delay(Duration),
    /// The read reports success, but with bytes that the source wrote for another purpose.
    Stale,
    /// The read reports success, but with half of the bytes.
    Partial,
    /// As `Partial`, and the other half is written after this time.
    Early(Duration),
    /// The read fails with half of the bytes; the other half is written after this time.
    Error(Duration),
    /// The read never ends, and writes its bytes after this time.
    Never(Duration),
    /// The transport panics when the read is polled.
    Panic,
}

/// A write that is still to come.
#[derive(Debug)]
struct Late {
    id: u64,
    at: Duration,
    start: usize,
    bytes: Vec<u8>,
    done: bool,
}

/// What a test sets and observes.
#[derive(Debug, Default)]
pub struct Plan {
    /// The current time.
    pub now: Cell<Duration>,
    /// The fault of the next read.
    pub next: Cell<Option<Fault>>,
    /// Number of reads without a fault before it.
    pub skip: Cell<u32>,
    /// Number of reads that were begun.
    pub reads: Cell<u32>,
    /// Whether memory cannot be deregistered.
    pub keeps: Cell<bool>,
    /// How often the transport fails to reopen.
    pub fences_fail: Cell<u32>,
    /// Number of writes to memory that was given back, which would hit its next owner.
    pub outside: Cell<u32>,
    /// Number of late writes.
    pub late: Cell<u32>,
    writes: RefCell<Vec<Late>>,
    faults: RefCell<HashMap<u64, Fault>>,
    began: RefCell<HashMap<u64, Duration>>,
}

impl Plan {
    /// Writes what is due by now.
    pub fn advance(&self, fabric: &Fabric, now: Duration) {
        self.now.set(now);
        for write in self.writes.borrow_mut().iter_mut() {
            if write.at <= now && !write.done {
                write.done = true;
                self.late.set(self.late.get() + 1);
                if !fabric.write(write.id, write.start, &write.bytes) {
                    self.outside.set(self.outside.get() + 1);
                }
            }
        }
        self.writes.borrow_mut().retain(|write| !write.done);
    }
}

/// A loopback with faults.
pub struct Faulty {
    inner: Loopback,
    fabric: Fabric,
    plan: Rc<Plan>,
    /// Whether it was closed, and could not be reopened.
    is_gone: bool,
}

impl Faulty {
    pub fn new(fabric: &Fabric, plan: &Rc<Plan>) -> Self {
        let (inner, fabric, plan) = (Loopback::new(fabric), fabric.clone(), Rc::clone(plan));
        Self { inner, fabric, plan, is_gone: false }
    }

    fn check(&self) -> Result<(), TransportError> {
        let why = || "no agent could be made".to_owned();
        if self.is_gone { Err(TransportError::Failed { why: why() }) } else { Ok(()) }
    }

    fn write_at(&self, id: u64, after: Duration, (start, bytes): (usize, Vec<u8>)) {
        let at = self.plan.now.get() + after;
        self.plan.writes.borrow_mut().push(Late { id, at, start, bytes, done: false });
    }
}

impl Transport for Faulty {
    fn register(&mut self, region: Region) -> Result<Registered, TransportError> {
        self.check()?;
        self.inner.register(region)
    }

    fn deregister(&mut self, memory: Registered) -> Result<Region, TransportError> {
        if self.plan.keeps.get() {
            return Err(TransportError::Failed { why: "the driver refused".to_owned() });
        }
        self.inner.deregister(memory)
    }

    fn with_region<R>(
        &mut self,
        memory: &mut Registered,
        work: impl FnOnce(RegionMut<'_>) -> R,
    ) -> Result<R, TransportError> {
        self.inner.with_region(memory, work)
    }

    fn publish(&mut self, memory: &Registered) -> Result<Descriptor, TransportError> {
        self.inner.publish(memory)
    }

    fn flush(&mut self, memory: &Registered, bytes: Range<usize>) -> Result<(), TransportError> {
        self.inner.flush(memory, bytes)
    }

    fn post(
        &mut self,
        into: Registered,
        bytes: Range<usize>,
        from: &Descriptor,
    ) -> Result<InFlight, NotPosted> {
        let skip = self.plan.skip.get();
        self.plan.skip.set(skip.saturating_sub(1));
        self.plan.reads.set(self.plan.reads.get() + 1);
        let fault =
            if skip > 0 { Fault::None } else { self.plan.next.take().unwrap_or(Fault::None) };
        let (id, start, half) = (into.id(), bytes.start, bytes.len() / 2);
        let bytes = match self.fabric.read(from, bytes) {
            Ok(bytes) => bytes,
            Err(error) => return Err(NotPosted(into, error)),
        };
        let write = |bytes: &[u8]| assert!(self.fabric.write(id, start, bytes));
        match fault {
            Fault::None | Fault::Panic => write(&bytes),
            Fault::Stale => {
                let other: Vec<_> = bytes.iter().map(|byte| byte.wrapping_add(3)).collect();
                write(&other);
            }
            Fault::Partial => write(&bytes[..half]),
            Fault::Error(after) | Fault::Early(after) => {
                write(&bytes[..half]);
                self.write_at(id, after, (start, bytes));
            }
            Fault::Delay(after) | Fault::Never(after) => self.write_at(id, after, (start, bytes)),
        }
        self.plan.faults.borrow_mut().insert(id, fault);
        self.plan.began.borrow_mut().insert(id, self.plan.now.get());
        Ok(into.in_flight())
    }

    fn poll(&mut self, read: InFlight) -> Polled {
        if let Err(error) = self.check() {
            return Polled::Failed(read, error);
        }
        let fault = self.plan.faults.borrow()[&read.id()];
        let passed = self.plan.now.get() - self.plan.began.borrow()[&read.id()];
        match fault {
            Fault::Delay(after) if passed < after => Polled::Pending(read),
            Fault::Never(_) => Polled::Pending(read),
            Fault::Panic => panic!("as the test wants"),
            Fault::Error(_) => {
                let why = "the peer has gone".to_owned();
                Polled::Failed(read, TransportError::Failed { why })
            }
            _ => self.inner.poll(read),
        }
    }

    fn fence(&mut self) -> Result<(), TransportError> {
        // Destroying the agent stops its writes.
        self.plan.writes.borrow_mut().clear();
        self.inner.fence()?;
        let failing = self.plan.fences_fail.get();
        self.is_gone = failing > 0;
        self.plan.fences_fail.set(failing.saturating_sub(1));
        self.check()
    }
}

/// A source, and a target with faults between them.
pub struct Line {
    pub world: World,
    pub fabric: Fabric,
    pub plan: Rc<Plan>,
    pub sender: Sender<Loopback>,
    pub receiver: Receiver<Faulty>,
    pub now: Duration,
}

impl Line {
    pub fn new(deadlines: Deadlines) -> Self {
        let (fabric, plan) = (Fabric::default(), Rc::new(Plan::default()));
        let receiver = Receiver::new(Faulty::new(&fabric, &plan), deadlines, MAX_BYTES);
        let sender = Sender::new(Loopback::new(&fabric), MAX_BYTES);
        Self { world: World::new(), fabric, plan, sender, receiver, now: Duration::ZERO }
    }

    /// Advances the time, and returns the transfers that have ended.
    pub fn wait(&mut self, time: Duration) -> Vec<(TransferId, Result<Verified, TransferError>)> {
        self.now += time;
        self.plan.advance(&self.fabric, self.now);
        self.receiver.poll(self.now)
    }
}
