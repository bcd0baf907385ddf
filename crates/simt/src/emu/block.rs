//! The state of a block and its threads, and the current block of each OS thread.

use std::cell::{Cell, RefCell};
use std::panic::{Location, resume_unwind};
use std::ptr;
use std::sync::Arc;

use corosensei::Yielder;

use super::barriers::NamedBarriers;
use super::collective::Operation;
use super::copies::Copies;
use super::fault::{FaultKind, Site, ThreadIndex};
use super::global_memory::GlobalMemory;
use super::launch::Launch;
use super::matrix::Fragments;
use super::operands::Operands;
use super::past::{Learned, Observer, Past};
use super::products::Products;
use super::shared_memory::SharedMemory;
use super::time::{Moment, warp_of};
use crate::limits::WARP_SIZE;

/// The state of a thread of the block.
#[derive(Clone, Copy, Debug)]
pub enum Stop {
    /// It can run.
    Ready,
    /// It waits at a collective that was called from this place.
    At(Operation, Site),
    /// It has returned from the kernel.
    Returned,
}

impl Stop {
    /// Whether two threads are at the same place.
    pub fn is_same(self, other: Self) -> bool {
        match (self, other) {
            (Self::At(a, here), Self::At(b, there)) => {
                a == b && (ptr::eq(here, there) || here == there)
            }
            (Self::Ready, Self::Ready) | (Self::Returned, Self::Returned) => true,
            _ => false,
        }
    }

    /// The collective it waits at.
    pub fn waiting(self) -> Option<(Operation, Site)> {
        match self {
            Self::At(operation, location) => Some((operation, location)),
            Self::Ready | Self::Returned => None,
        }
    }
}

/// One thread of the block. What each of its stops reads and writes comes first, in one cache line.
#[repr(C, align(64))]
pub struct Thread {
    /// Suspends the fiber it runs on. Null before it starts.
    pub yielder: Cell<*const Yielder<(), ()>>,
    /// Its state.
    pub stop: Cell<Stop>,
    /// Its operand of the collective at which it waits; afterwards the result.
    pub value: Cell<u32>,
    /// The collective's second operand.
    pub operand: Cell<u32>,
    /// Whether it has called `cluster_arrive` and not yet `cluster_wait`.
    pub left: Cell<bool>,
    /// Whether it has passed a cluster barrier, so that all blocks of the cluster have started.
    pub met: Cell<bool>,
    /// Whether it has written to another block's shared memory since it last released.
    pub wrote_peer: Cell<bool>,
    /// The past of its last fence of device or system scope, which its later relaxed atomics release.
    pub fenced: RefCell<Past>,
    /// The pasts that its relaxed atomics have read since that fence, which its next fence acquires.
    pub seen: RefCell<Past>,
    /// Copies to shared memory that it has not waited for.
    pub copies: RefCell<Copies>,
    /// Products of warpgroups that it has started.
    pub products: RefCell<Products>,
    /// The number of the product that it computes now: until that ends, it reads shared memory as operands of this
    /// product.
    pub multiplies: Cell<Option<u32>>,
    /// Its fragments of a matrix product; the result replaces C.
    pub fragments: Cell<Fragments>,
}

impl Thread {
    fn new() -> Self {
        Self {
            yielder: Cell::new(ptr::null()),
            stop: Cell::new(Stop::Ready),
            value: Cell::new(0),
            operand: Cell::new(0),
            left: Cell::new(false),
            met: Cell::new(false),
            wrote_peer: Cell::new(false),
            fenced: RefCell::default(),
            seen: RefCell::default(),
            copies: RefCell::default(),
            products: RefCell::default(),
            multiplies: Cell::new(None),
            fragments: Cell::new(Fragments::default()),
        }
    }
}

/// The lanes of a warp that have not started, in the order in which they will start.
pub struct Starting {
    first: Cell<usize>,
    order: Cell<[u8; WARP_SIZE as usize]>,
    started: Cell<usize>,
}

impl Starting {
    fn none() -> Self {
        let all = WARP_SIZE as usize;
        Self { first: Cell::new(0), order: Cell::new([0; _]), started: Cell::new(all) }
    }

    /// Starts the lanes of the warp whose first thread is `first` in this order.
    pub fn set(&self, first: usize, order: [u8; WARP_SIZE as usize]) {
        self.first.set(first);
        self.order.set(order);
        self.started.set(0);
    }

    /// Whether all have started.
    pub fn is_empty(&self) -> bool {
        self.started.get() == WARP_SIZE as usize
    }

    /// The next thread to start.
    pub fn take(&self) -> Option<ThreadIndex> {
        let started = self.started.get();
        let lane = *self.order.get().get(started)?;
        self.started.set(started + 1);
        Some(ThreadIndex(self.first.get() as u32 + u32::from(lane)))
    }
}

/// The memory order of an atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordered {
    /// It orders other accesses only together with fences around it.
    Relaxed,
    /// Accesses before it happen before those after an acquiring atomic that reads its value.
    AcquireRelease,
}

/// The block that an OS thread runs. Reused from block to block.
pub struct Block {
    /// The launch it belongs to.
    pub launch: Cell<Launch>,
    /// Its index in the grid, as (x, y), and its number in the grid, counted row by row.
    pub index: Cell<(u32, u32)>,
    pub number: Cell<u64>,
    /// Its rank in its cluster.
    pub rank: Cell<u32>,
    /// The thread that runs now.
    pub running: Cell<ThreadIndex>,
    /// The lanes that have not started, of the warp that is being started.
    pub starting: Starting,
    /// Its threads.
    pub threads: Vec<Thread>,
    /// The operands of the products that each of its warps has in flight.
    pub operands: RefCell<Vec<Operands>>,
    /// Its named barriers.
    pub barriers: RefCell<NamedBarriers>,
    /// Its shared memory.
    pub shared_memory: RefCell<SharedMemory>,
    /// The accesses of its launch to global memory.
    pub global_memory: RefCell<Option<Arc<GlobalMemory>>>,
    /// The pasts of other blocks that its threads have acquired.
    pub learned: RefCell<Vec<Learned>>,
    /// The past that its warps have released by their arrivals at the cluster barrier.
    pub arrived: RefCell<Past>,
    /// Its last access to another block's shared memory since the last cluster barrier: that block's rank, the thread
    /// that made the access, and the place.
    pub reads_peer: Cell<Option<(u32, ThreadIndex, Site)>>,
    /// Whether the kernel's body runs now, on a fiber; not so while the scheduler runs between two stops.
    pub runs_body: Cell<bool>,
    /// Set by the thread that caused a fault, just before it unwinds.
    pub fault: Cell<Option<FaultKind>>,
    /// Where the running thread panicked, from the panic hook.
    pub panic_location: Cell<Option<String>>,
}

impl Block {
    /// A block of no launch, with no threads.
    pub fn new() -> Self {
        Self {
            launch: Cell::new(Launch::NONE),
            index: Cell::new((0, 0)),
            number: Cell::new(0),
            rank: Cell::new(0),
            running: Cell::new(ThreadIndex(0)),
            starting: Starting::none(),
            threads: Vec::new(),
            operands: RefCell::default(),
            barriers: RefCell::new(NamedBarriers::new()),
            shared_memory: RefCell::new(SharedMemory::new()),
            global_memory: RefCell::default(),
            learned: RefCell::default(),
            arrived: RefCell::default(),
            reads_peer: Cell::new(None),
            runs_body: Cell::new(false),
            fault: Cell::new(None),
            panic_location: Cell::new(None),
        }
    }

    /// Makes this the block `index` of `launch`, number `number` in the grid, with rank `rank` in its cluster, before
    /// its first instruction.
    pub fn reset(
        &mut self,
        (launch, global_memory): (Launch, &Arc<GlobalMemory>),
        (index, number): ((u32, u32), u64),
        rank: u32,
    ) {
        self.launch.set(launch);
        self.index.set(index);
        self.number.set(number);
        self.global_memory.replace(Some(Arc::clone(global_memory)));
        self.learned.get_mut().clear();
        self.arrived.take();
        self.rank.set(rank);
        self.threads.resize_with(launch.block as usize, Thread::new);
        for thread in &self.threads {
            thread.stop.set(Stop::Ready);
            thread.left.set(false);
            thread.met.set(false);
            thread.wrote_peer.set(false);
            thread.fenced.take();
            thread.seen.take();
            thread.copies.take();
            thread.products.take();
            thread.multiplies.set(None);
        }
        let operands = self.operands.get_mut();
        operands.clear();
        operands.resize_with((launch.block / WARP_SIZE) as usize, Operands::default);
        self.barriers.replace(NamedBarriers::new());
        self.shared_memory.get_mut().reset(launch.shared_bytes);
        self.reads_peer.set(None);
    }

    /// Drops its data about global memory, when its cluster has ended.
    pub fn forget(&self) {
        self.global_memory.take();
        self.learned.take();
        for thread in &self.threads {
            thread.fenced.take();
            thread.seen.take();
        }
    }

    /// The running thread.
    pub fn thread(&self) -> &Thread {
        &self.threads[self.running.get().0 as usize]
    }

    /// The threads of warp `warp`.
    pub fn warp(&self, warp: u32) -> &[Thread] {
        let first = (warp * WARP_SIZE) as usize;
        &self.threads[first..first + WARP_SIZE as usize]
    }

    /// Calls `use_both` with the running thread as an observer, and with the launch's accesses to global memory.
    pub fn observe<R>(&self, use_both: impl FnOnce(Observer<'_>, &GlobalMemory) -> R) -> R {
        let (memory, learned) = (self.shared_memory.borrow(), self.learned.borrow());
        let (block, thread) = (self.number.get(), self.running.get());
        let global = self.global_memory.borrow();
        let global = global.as_ref().expect("a running block has a launch");
        use_both(Observer { block, thread, clocks: &memory.clocks, learned: &learned }, global)
    }

    /// The running thread releases: returns its own accesses and those that happen before its next one.
    fn release(&self) -> Past {
        let (thread, learned) = (self.running.get(), self.learned.borrow());
        let clocks = &mut self.shared_memory.borrow_mut().clocks;
        let mut past = Past::release_thread(self.number.get(), thread, clocks);
        let known = learned.iter().filter(|learned| clocks.orders(learned.at, thread));
        known.for_each(|learned| past.join(&learned.past));
        past
    }

    /// As [`Self::release`], for all lanes of warp `warp`, which have reached one collective.
    pub fn release_warp(&self, warp: u32) -> Past {
        let (lane, learned) = (ThreadIndex(warp * WARP_SIZE), self.learned.borrow());
        let clocks = &mut self.shared_memory.borrow_mut().clocks;
        let mut past = Past::release_warp(self.number.get(), warp, clocks);
        // Includes the pasts that single lanes of the warp have acquired.
        let is_known =
            |at: Moment| warp_of(at.thread()) == warp as usize || clocks.orders(at, lane);
        let known = learned.iter().filter(|learned| is_known(learned.at));
        known.for_each(|learned| past.join(&learned.past));
        past
    }

    /// The past that an atomic of the running thread releases.
    pub fn released(&self, ordered: Ordered) -> Past {
        match ordered {
            Ordered::AcquireRelease => self.release(),
            Ordered::Relaxed => self.thread().fenced.borrow().clone(),
        }
    }

    /// An atomic of the running thread has read the released past `seen`. The thread acquires it at once, or, if the
    /// atomic is relaxed, at the thread's next fence.
    pub fn acquire(&self, ordered: Ordered, seen: &Past) {
        match ordered {
            _ if seen.is_empty() => {}
            Ordered::AcquireRelease => self.learn_now(seen.clone()),
            Ordered::Relaxed => self.thread().seen.borrow_mut().join(seen),
        }
    }

    /// A fence of the running thread, of device or system scope.
    pub fn fence(&self) {
        let seen = self.thread().seen.take();
        if !seen.is_empty() {
            self.learn_now(seen);
        }
        self.thread().fenced.replace(self.release());
    }

    /// The running thread acquires a past now.
    fn learn_now(&self, past: Past) {
        let now = self.observe(|thread, _| thread.clocks.moment(thread.thread));
        self.learn(now, past);
    }

    /// Records that the block acquires a past at the point `at`.
    pub fn learn(&self, at: Moment, past: Past) {
        self.learned.borrow_mut().push(Learned { at, past });
    }

    /// Ends the running thread with `kind`, which the launch returns.
    pub fn fail(&self, kind: FaultKind) -> ! {
        self.fault.set(Some(kind));
        // Unwinds without the panic hook: the fault is in the launch's result.
        resume_unwind(Box::new(()))
    }

    /// Stops the running thread at `operation` until the others arrive; returns the thread's result.
    fn wait(&self, operation: Operation, value: u32, operand: u32, location: Site) -> u32 {
        let thread = self.thread();
        thread.value.set(value);
        thread.operand.set(operand);
        thread.stop.set(Stop::At(operation, location));
        // SAFETY: a running thread's yielder lives at the root of the very fiber that makes this
        // call, so it outlives the call.
        unsafe { &*thread.yielder.get() }.suspend(());
        thread.value.get()
    }
}

thread_local! {
    static CURRENT: Cell<*const Block> = const { Cell::new(ptr::null()) };
    /// All blocks of its cluster.
    static CLUSTER: Cell<*const [Block]> = const { Cell::new(ptr::slice_from_raw_parts(ptr::null(), 0)) };
}

/// Calls `run` with block `rank` of `cluster` as the current block of this OS thread.
pub fn enter<R>(cluster: &[Block], rank: usize, run: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            CURRENT.set(ptr::null());
        }
    }
    CURRENT.set(&cluster[rank]);
    CLUSTER.set(cluster);
    let _leave = Leave;
    run()
}

/// Calls `use_blocks` with the current block and block `rank` of its cluster; `None` if the cluster has no such block.
#[track_caller]
pub fn with_peer<R>(rank: u32, use_blocks: impl FnOnce(&Block, &Block) -> R) -> Option<R> {
    current(|block| {
        // SAFETY: a block is current, and `enter` borrows its cluster for as long as it is.
        let cluster = unsafe { &*CLUSTER.get() };
        cluster.get(rank as usize).map(|peer| use_blocks(block, peer))
    })
}

/// Calls `use_block` with the current block; `None` outside a launch.
pub fn try_current<R>(use_block: impl FnOnce(&Block) -> R) -> Option<R> {
    // SAFETY: `enter` borrows the block for as long as the pointer is set.
    unsafe { CURRENT.get().as_ref() }.map(use_block)
}

/// Calls `use_block` with the current block.
///
/// # Panics
/// Outside a launch.
#[track_caller]
pub fn current<R>(use_block: impl FnOnce(&Block) -> R) -> R {
    match try_current(use_block) {
        Some(result) => result,
        None => panic!("a device function was called outside a launch"),
    }
}

/// Stops the running thread at a collective that the caller's caller calls; returns the thread's result.
#[track_caller]
pub fn wait(operation: Operation, value: u32, operand: u32) -> u32 {
    let location = Location::caller();
    current(|block| block.wait(operation, value, operand, location))
}

/// [`wait`] at a matrix product; returns the thread's part of the result.
#[track_caller]
pub fn wait_product(product: Operation, fragments: Fragments) -> [u32; 4] {
    let location = Location::caller();
    current(|block| {
        let thread = block.thread();
        thread.fragments.set(fragments);
        block.wait(product, 0, 0, location);
        thread.fragments.get().c
    })
}
