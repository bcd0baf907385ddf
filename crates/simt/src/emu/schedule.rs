//! Runs the fibers of a cluster's blocks from collective to collective.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult};

use super::block::{self, Block, Stop, Thread};
use super::collective::{self, Operation, RELEASES};
use super::fault::{FaultKind, LaneGroup, Site, ThreadIndex};
use super::global_memory::GlobalMemory;
use super::launch::Launch;
use super::matrix::{self, Fragments};
use super::order::Order;
use super::panic;
use super::past::Past;
use super::stacks::{Loan, Stacks};
use crate::limits::WARP_SIZE;

type Fiber = Coroutine<(), (), (), DefaultStack>;

/// The state that an OS thread reuses from cluster to cluster, to save allocations.
#[derive(Default)]
struct Worker {
    /// For each block and thread, the fiber, if the thread has started and not returned. All `None` between clusters.
    fibers: Vec<Vec<Option<Fiber>>>,
    blocks: Vec<Block>,
}

thread_local! {
    static WORKER: Cell<Option<Box<Worker>>> = const { Cell::new(None) };
}

/// Runs the `size` blocks of a cluster to their end. The first is block `index` of the grid, number
/// `number` of its launch. Waits first until enough stacks are free.
///
/// # Errors
/// The rank of a block that broke a rule, and its fault.
pub fn run_cluster(
    stacks: &Stacks,
    (launch, global_memory): (&Launch, &Arc<GlobalMemory>),
    size: u32,
    (number, index): (u64, (u32, u32)),
    body: &(dyn Fn() + Sync),
) -> Result<(), (u32, FaultKind)> {
    let stacks = stacks.lend(size * launch.block).map_err(|kind| (0, kind))?;
    let mut worker = WORKER.take().unwrap_or_default();
    let Worker { fibers, blocks } = &mut *worker;
    let count = blocks.len().max(size as usize);
    blocks.resize_with(count, Block::new);
    fibers.resize_with(count, Vec::new);
    let (blocks, fibers) = (&mut blocks[..size as usize], &mut fibers[..size as usize]);
    for (rank, (block, fibers)) in (0..).zip(blocks.iter_mut().zip(fibers.iter_mut())) {
        let at = ((index.0 + rank, index.1), number + u64::from(rank));
        block.reset((*launch, global_memory), at, rank);
        fibers.resize_with(launch.block as usize, || None);
    }
    let order = |rank| Order::new(launch.seed, number + u64::from(rank));
    let orders = (0..size).map(order).collect();
    let order = Order::new(!launch.seed, number);
    let result = Cluster { blocks, body, fibers, stacks, order, orders }.run();
    blocks.iter().for_each(Block::forget);
    WORKER.set(Some(worker));
    result
}

/// The running blocks of a cluster. When it is dropped, no fiber is left.
struct Cluster<'a> {
    blocks: &'a [Block],
    body: &'a (dyn Fn() + Sync),
    fibers: &'a mut [Vec<Option<Fiber>>],
    stacks: Loan<'a>,
    /// The order in which its blocks run, and for each block the order in which its warps and lanes run.
    order: Order,
    orders: Vec<Order>,
}

impl Drop for Cluster<'_> {
    /// Unwinds the fibers that a fault left suspended, each with its block as the current one.
    fn drop(&mut self) {
        for (rank, fibers) in self.fibers.iter_mut().enumerate() {
            block::enter(self.blocks, rank, || fibers.fill_with(|| None));
        }
    }
}

impl Cluster<'_> {
    /// Runs every block to the next cluster barrier, again and again, until all have returned.
    fn run(&mut self) -> Result<(), (u32, FaultKind)> {
        let mut start = true;
        loop {
            let mut stops = Vec::new();
            let size = self.blocks.len();
            stops.resize(size, Stop::Ready);
            for &rank in &self.order.shuffled(size as u32)[..size] {
                let stop = self.run_block(rank.into(), start);
                stops[usize::from(rank)] = stop.map_err(|kind| (u32::from(rank), kind))?;
            }
            start = false;
            if let Some(rank) = stops.iter().position(|stop| !stop.is_same(stops[0])) {
                return Err((rank as u32, diverged_blocks(&[stops[0], stops[rank]])));
            }
            if let Stop::Returned = stops[0] {
                return self.check_peers();
            }
            self.exchange_pasts();
            for block in self.blocks {
                release(block);
                block.shared_memory.borrow_mut().clocks.synchronize_cluster();
                block.reads_peer.set(None);
            }
        }
    }

    /// At a cluster barrier each block acquires the pasts that all blocks have released.
    fn exchange_pasts(&self) {
        if self.blocks.len() == 1 {
            return;
        }
        let mut all = Past::new();
        self.blocks.iter().for_each(|block| all.join(&released_by(block)));
        for block in self.blocks {
            let at = block.shared_memory.borrow().clocks.before_cluster();
            block.learn(at, all.clone());
        }
    }

    /// Checks that a cluster barrier followed every access to another block's shared memory.
    fn check_peers(&self) -> Result<(), (u32, FaultKind)> {
        let unfinished = |block: &Block| {
            let (rank, thread, location) = block.reads_peer.get()?;
            Some((block.rank.get(), FaultKind::PeerMayReturn { rank, thread, location }))
        };
        self.blocks.iter().find_map(unfinished).map_or(Ok(()), Err)
    }

    /// Runs a block until its threads are at a cluster barrier or have returned.
    fn run_block(&mut self, rank: usize, start: bool) -> Result<Stop, FaultKind> {
        let Self { blocks, body, fibers, stacks, orders, .. } = self;
        block::enter(blocks, rank, || {
            let (block, order) = (&blocks[rank], &mut orders[rank]);
            Schedule { block, body: *body, fibers: &mut fibers[rank], stacks, order }.run(start)
        })
    }
}

/// The past that a block has released at the cluster barrier: by the arrivals of its warps if they called
/// `cluster_arrive` or `cluster_arrive_release`, or now by all warps if they called `sync_cluster`.
fn released_by(block: &Block) -> Past {
    let mut past = block.arrived.take();
    if !block.shared_memory.borrow().clocks.has_left() {
        (0..block.launch.get().block / WARP_SIZE)
            .for_each(|warp| past.join(&block.release_warp(warp)));
    }
    past
}

/// Makes the threads of a block ready to run again, after a barrier that all of them have reached.
fn release(block: &Block) {
    block.threads.iter().for_each(|thread| thread.stop.set(Stop::Ready));
}

/// The fault of a rule that `thread` broke, which the emulator finds outside the kernel's body.
fn misuse(message: String, thread: u32, location: Option<Site>) -> FaultKind {
    let location = location.map(ToString::to_string);
    FaultKind::Panic { message, thread: ThreadIndex(thread), location }
}

/// Checks that a block which has returned leaves no arrivals at named barriers.
fn check_barriers(block: &Block) -> Result<(), FaultKind> {
    let Some((number, arrived)) = block.barriers.borrow().unfinished() else { return Ok(()) };
    let message = format!("barrier {number} is not complete when its block returns");
    Err(misuse(message, arrived.trailing_zeros() * WARP_SIZE, None))
}

/// Checks that a thread which returns has waited for its products.
fn check_products(block: &Block) {
    let products = block.thread().products.borrow();
    if let Some(product) = products.oldest() {
        let (message, thread) =
            ("a product is in flight when its thread returns", block.running.get());
        block.fail(misuse(message.to_owned(), thread.0, Some(product.location)));
    }
}

/// Checks that all threads of each warpgroup of a block which has returned started the same products and made the same
/// waits, in the same places and in the same order.
fn check_warpgroups(block: &Block) -> Result<(), FaultKind> {
    let size = (4 * WARP_SIZE) as usize;
    for (first, warpgroup) in (0..).step_by(size).zip(block.threads.chunks(size)) {
        let products = warpgroup[0].products.borrow();
        let differs = |thread: &Thread| !products.is_same(&thread.products.borrow());
        let message = if let Some(other) = warpgroup.iter().position(differs) {
            let others = warpgroup[other].products.borrow().started();
            format!(
                "threads {first} and {} of a warpgroup do not have the same products and waits: {} and {others} products",
                first + other,
                products.started()
            )
        } else if products.started() > 0 && warpgroup.len() < size {
            format!("a product of {} threads: a warpgroup has {size}", warpgroup.len())
        } else {
            continue;
        };
        return Err(misuse(message, first as u32, None));
    }
    Ok(())
}

/// For a block which has returned: checks the copies that were never waited for. No thread may have accessed their
/// words since they were started.
fn check_copies(block: &Block) -> Result<(), FaultKind> {
    let memory = block.shared_memory.borrow();
    block.threads.iter().try_for_each(|thread| {
        thread
            .copies
            .borrow()
            .all()
            .try_for_each(|copy| memory.check_copy(copy.to, copy.words as usize, copy.in_flight))
    })
}

/// The fault of two blocks of a cluster whose threads are at different places. It names thread 0 of each.
fn diverged_blocks(stops: &[Stop]) -> FaultKind {
    let group = |stop: &Stop| LaneGroup { threads: vec![0], waiting: stop.waiting() };
    FaultKind::Divergence { groups: stops.iter().map(group).collect() }
}

struct Schedule<'a, 'b> {
    block: &'a Block,
    body: &'a (dyn Fn() + Sync),
    fibers: &'a mut Vec<Option<Fiber>>,
    stacks: &'a mut Loan<'b>,
    order: &'a mut Order,
}

impl Schedule<'_, '_> {
    /// Starts or resumes the block, and runs it until its threads are at a cluster barrier or have
    /// returned.
    fn run(&mut self, mut start: bool) -> Result<Stop, FaultKind> {
        let warps = self.block.launch.get().block / WARP_SIZE;
        loop {
            let order = self.order.shuffled(warps);
            for &warp in &order[..warps as usize] {
                if start || self.is_ready(u32::from(warp)) {
                    self.run_warp(u32::from(warp), start)?;
                }
            }
            start = false;
            if (0..warps).any(|warp| self.is_ready(warp)) {
                continue;
            }
            let threads = self.block.threads.len();
            match common_stop(self.block, 0, threads)? {
                Stop::At(Operation::SyncThreads, _) => {
                    release(self.block);
                    self.block.shared_memory.borrow_mut().clocks.synchronize_block();
                }
                // All threads wait at named barriers, so that no warp is left to complete one.
                Stop::At(Operation::BarrierSync, _) => {
                    return Err(diverged(&self.block.threads, 0));
                }
                stop => {
                    if let Stop::Returned = stop {
                        check_barriers(self.block)?;
                        check_warpgroups(self.block)?;
                        check_copies(self.block)?;
                    }
                    return Ok(stop);
                }
            }
        }
    }

    /// Whether the warp can continue.
    fn is_ready(&self, warp: u32) -> bool {
        matches!(self.block.warp(warp)[0].stop.get(), Stop::Ready)
    }

    /// Runs a warp until all its lanes wait for other warps or have returned.
    fn run_warp(&mut self, warp: u32, start: bool) -> Result<(), FaultKind> {
        let first = (warp * WARP_SIZE) as usize;
        if start {
            self.start_lanes(first)?;
        } else {
            self.resume_lanes(first)?;
        }
        loop {
            match common_stop(self.block, first, WARP_SIZE as usize)? {
                Stop::At(Operation::SyncThreads | Operation::SyncCluster, _) | Stop::Returned => {
                    return Ok(());
                }
                Stop::At(Operation::BarrierSync, _) => {
                    self.arrive(warp, true)?;
                    if !self.is_ready(warp) {
                        return Ok(());
                    }
                }
                Stop::At(Operation::BarrierArrive, _) => self.arrive(warp, false)?,
                Stop::At(operation, _) => self.complete(warp, operation),
                Stop::Ready => {}
            }
            self.resume_lanes(first)?;
        }
    }

    /// A warp arrives at the named barrier that its lanes have as operands. If this completes the barrier, the warps
    /// that waited at it become ready; a warp that does not wait becomes ready at once.
    fn arrive(&self, warp: u32, waits: bool) -> Result<(), FaultKind> {
        let lanes = self.block.warp(warp);
        let operands = |thread: &Thread| (thread.value.get(), thread.operand.get());
        let barrier = operands(&lanes[0]);
        let arrived = if lanes.iter().all(|lane| operands(lane) == barrier) {
            let mut memory = self.block.shared_memory.borrow_mut();
            self.block.barriers.borrow_mut().arrive(barrier, warp, waits, &mut memory.clocks)
        } else {
            Err("the lanes of a warp arrive at different barriers".to_owned())
        };
        let location = lanes[0].stop.get().waiting().map(|(_, location)| location);
        let released = arrived.map_err(|message| misuse(message, warp * WARP_SIZE, location))?;
        let goes_on = |other: &u32| released >> other & 1 != 0 || !waits && *other == warp;
        for other in (0..WARP_SIZE).filter(goes_on) {
            self.block.warp(other).iter().for_each(|thread| thread.stop.set(Stop::Ready));
        }
        Ok(())
    }

    /// Starts every lane of a warp and runs it to its first stop.
    ///
    /// When a lane returns, its fiber runs the next lane that has not started, so that lanes without collectives share
    /// one fiber. All lanes have started when this returns, so that a fiber which is resumed later finds no other lane
    /// to run.
    fn start_lanes(&mut self, first: usize) -> Result<(), FaultKind> {
        let (block, body) = (self.block, self.body);
        block.starting.set(first, self.order.shuffled(WARP_SIZE));
        while !block.starting.is_empty() {
            let stack = self.stacks.take()?;
            // SAFETY: the closure borrows the block and the body, which outlive the `Cluster`. The fiber does not: it
            // is dropped in this call, or is in the cluster's `fibers`, which the cluster empties when it is dropped,
            // also by a panic. None is forgotten.
            let mut fiber = unsafe {
                Fiber::with_stack_unchecked(stack, move |yielder, ()| {
                    while let Some(thread) = block.starting.take() {
                        block.running.set(thread);
                        let state = &block.threads[thread.0 as usize];
                        state.yielder.set(yielder);
                        body();
                        check_products(block);
                        state.stop.set(Stop::Returned);
                    }
                })
            };
            if resume(self.block, &mut fiber)? {
                self.stacks.put(fiber.into_stack());
            } else {
                self.fibers[block.running.get().0 as usize] = Some(fiber);
            }
        }
        Ok(())
    }

    /// Runs every waiting lane of a warp to its next stop.
    fn resume_lanes(&mut self, first: usize) -> Result<(), FaultKind> {
        for lane in self.order.shuffled(WARP_SIZE) {
            let thread = first + usize::from(lane);
            let Some(fiber) = &mut self.fibers[thread] else { continue };
            self.block.running.set(ThreadIndex(thread as u32));
            if resume(self.block, fiber)? {
                let ended = self.fibers[thread].take();
                ended.into_iter().for_each(|fiber| self.stacks.put(fiber.into_stack()));
            }
        }
        Ok(())
    }

    /// Gives each lane of a warp its result of `operation`.
    fn complete(&self, warp: u32, operation: Operation) {
        let threads = self.block.warp(warp);
        let values = std::array::from_fn(|lane| threads[lane].value.get());
        let operands = std::array::from_fn(|lane| threads[lane].operand.get());
        let results = collective::results(operation, &values, &operands);
        for (thread, result) in threads.iter().zip(results) {
            thread.value.set(result);
            thread.stop.set(Stop::Ready);
        }
        match operation {
            Operation::SyncWarp => {
                self.block.shared_memory.borrow_mut().clocks.synchronize_warp(warp)
            }
            Operation::ClusterArrive => {
                let releases = operands.contains(&RELEASES);
                if releases {
                    self.block.arrived.borrow_mut().join(&self.block.release_warp(warp));
                }
                self.block.shared_memory.borrow_mut().clocks.leave(warp, releases);
            }
            Operation::MmaBf16 => multiply(threads, matrix::multiply_bf16),
            Operation::MmaS8 => multiply(threads, matrix::multiply_s8),
            _ => {}
        }
    }
}

/// Gives each lane of a warp its part of `product`.
fn multiply<const LANES: usize>(
    threads: &[Thread],
    product: fn(&[Fragments; LANES]) -> [[u32; 4]; LANES],
) {
    let fragments = std::array::from_fn(|lane| threads[lane].fragments.get());
    for (thread, c) in threads.iter().zip(product(&fragments)) {
        thread.fragments.set(Fragments { c, ..thread.fragments.get() });
    }
}

/// Runs a fiber to its next stop; returns whether it ended.
fn resume(block: &Block, fiber: &mut Fiber) -> Result<bool, FaultKind> {
    block.runs_body.set(true);
    let stopped = catch_unwind(AssertUnwindSafe(|| fiber.resume(())));
    block.runs_body.set(false);
    match stopped {
        Ok(CoroutineResult::Yield(())) => Ok(false),
        Ok(CoroutineResult::Return(())) => Ok(true),
        Err(payload) => Err(block.fault.take().unwrap_or_else(|| FaultKind::Panic {
            message: panic::message(&*payload),
            thread: block.running.get(),
            location: block.panic_location.take(),
        })),
    }
}

/// The common state of the `count` threads from `first` on, or, if they differ, the divergence fault.
fn common_stop(block: &Block, first: usize, count: usize) -> Result<Stop, FaultKind> {
    let threads = &block.threads[first..first + count];
    let stop = threads[0].stop.get();
    if threads.iter().all(|thread| thread.stop.get().is_same(stop)) {
        return Ok(stop);
    }
    Err(diverged(threads, first as u32))
}

/// The divergence fault of threads, numbered from `first` on, that are at different places, or that wait at a barrier
/// which cannot complete.
fn diverged(threads: &[Thread], first: u32) -> FaultKind {
    let mut groups: Vec<(Stop, LaneGroup)> = Vec::new();
    for (thread, index) in threads.iter().zip(first..) {
        let stop = thread.stop.get();
        match groups.iter_mut().find(|(other, _)| other.is_same(stop)) {
            Some((_, group)) => group.threads.push(index),
            None => {
                groups.push((stop, LaneGroup { threads: vec![index], waiting: stop.waiting() }));
            }
        }
    }
    FaultKind::Divergence { groups: groups.into_iter().map(|(_, group)| group).collect() }
}
