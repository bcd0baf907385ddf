//! The cache in which prompts are computed, and from which requests leave.

use std::collections::HashMap;
use std::ops::Deref;
use std::time::Duration;

use anyhow::Result;
use dsv4_kv::{Ledger, RequestId, StepRequest, TierStats};

use super::super::execute::{Execute, KernelWork};
use super::super::load::Request;
use super::super::setup::Setup;
use super::link::Link;
use super::message::ToDecode;
use super::sum;
use crate::interrupt::Interrupt;
use crate::texts::Texts;

/// A prompt whose request leaves when it is computed.
pub struct Prompted<'p> {
    /// Its index in the load.
    pub index: usize,
    /// Its handle in the cache.
    pub id: RequestId,
    /// Its tokens.
    pub tokens: &'p [u32],
    /// Number of tokens that it reuses.
    pub reused: u32,
}

/// The way in which requests leave a cache.
pub trait Mover<E> {
    /// Whether so many requests wait for the other processes that no more may leave now.
    fn is_full(&self) -> bool {
        false
    }

    /// Handles the admission of a prompt.
    fn admitted(&mut self, cache: &mut E, to: &Link, prompted: &Prompted<'_>) -> Result<()>;

    /// Handles a step in which the request took part.
    fn stepped(&mut self, cache: &mut E, to: &Link, id: RequestId) -> Result<()>;

    /// Handles the end of the request in this cache. Returns whether all of it has left.
    fn ended(&mut self, cache: &mut E, to: &Link, id: RequestId) -> Result<bool>;
}

/// The process to which a request moves.
fn link(links: &[Link], index: usize) -> &Link {
    &links[index % links.len()]
}

/// A cache, and the processes to which its requests move.
pub struct Leaving<E, M> {
    inner: E,
    mover: M,
    links: Vec<Link>,
    load: Vec<Request>,
    texts: Texts,
    /// Requests that will leave: handle, and index in the load.
    running: HashMap<RequestId, usize>,
    sent: u64,
    interrupt: Interrupt,
}

impl<E: Execute, M: Mover<E>> Leaving<E, M> {
    /// Requests of the load of `setup` leave `inner`.
    pub fn new(inner: E, mover: M, links: Vec<Link>, setup: &Setup, interrupt: &Interrupt) -> Self {
        let (load, texts, interrupt) = (setup.load.clone(), setup.texts, interrupt.clone());
        let running = HashMap::new();
        Self { inner, mover, links, load, texts, running, sent: 0, interrupt }
    }
}

impl<E: Execute, M: Mover<E>> Execute for Leaving<E, M> {
    fn admit(&mut self, index: usize, prompt: Option<&[u32]>) -> Result<(RequestId, u32)> {
        let (id, reused) = self.inner.admit(index, prompt)?;
        let Request { arrival, prompt } = &self.load[index];
        if arrival.output > 1 {
            // They wait for any of the processes. After an interrupt the replay ends with this step.
            while self.mover.is_full() && !self.interrupt.is_requested() {
                self.links.iter().try_for_each(Link::check)?;
                std::thread::sleep(Duration::from_millis(1));
            }
            let tokens = self.texts.prompt(index as u64, prompt.as_ref(), arrival.input);
            let prompted = Prompted { index, id, tokens: &tokens, reused };
            let Self { inner, mover, links, .. } = self;
            mover.admitted(inner, link(links, index), &prompted)?;
            self.running.insert(id, index);
        }
        Ok((id, reused))
    }

    fn step(&mut self, step: &[StepRequest], tokens: &[u32]) -> Result<Duration> {
        let took = self.inner.step(step, tokens)?;
        for part in step {
            if let Some(&index) = self.running.get(&part.id) {
                let Self { inner, mover, links, .. } = self;
                mover.stepped(inner, link(links, index), part.id)?;
            }
        }
        Ok(took)
    }

    fn release(&mut self, id: RequestId) -> Result<()> {
        if let Some(index) = self.running.remove(&id) {
            let Self { inner, mover, links, .. } = self;
            let has_left = mover.ended(inner, link(links, index), id)?;
            self.sent += u64::from(has_left);
        }
        self.inner.release(id)
    }

    fn ledger(&self) -> impl Deref<Target = Ledger> {
        self.inner.ledger()
    }

    fn tier(&self) -> TierStats {
        self.inner.tier()
    }

    fn kernel_ms(&self) -> f64 {
        self.inner.kernel_ms()
    }

    fn reads_tokens(&self) -> bool {
        self.inner.reads_tokens()
    }

    /// Waits for the decode processes.
    fn finish(self) -> Result<KernelWork> {
        let Self { inner, mover, mut links, sent, interrupt, .. } = self;
        let mut work = inner.finish()?;
        let stops = interrupt.is_requested();
        let mut all = Vec::new();
        for link in &links {
            link.send(if stops { &ToDecode::Stop } else { &ToDecode::End })?;
        }
        for link in &mut links {
            all.push(link.wait()?);
        }
        // The decode processes could read the mover's memory until here.
        drop(mover);
        sum::add(&mut work, sent, all);
        Ok(work)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::replay::ReplayArgs;
    use crate::replay::execute::Bookkeeping;
    use crate::replay::place::Place;

    /// A mover of which no request is ever read.
    struct Unread;

    impl Mover<Bookkeeping> for Unread {
        fn is_full(&self) -> bool {
            true
        }

        fn admitted(&mut self, _: &mut Bookkeeping, _: &Link, _: &Prompted<'_>) -> Result<()> {
            Ok(())
        }

        fn stepped(&mut self, _: &mut Bookkeeping, _: &Link, _: RequestId) -> Result<()> {
            Ok(())
        }

        fn ended(&mut self, _: &mut Bookkeeping, _: &Link, _: RequestId) -> Result<bool> {
            Ok(false)
        }
    }

    /// Admits a request to a process that runs; requests also wait for a process that has ended.
    fn admit(interrupt: &Interrupt) -> Result<()> {
        let line = "replay --execute bookkeeping --requests 8 --peers 3";
        let args = ReplayArgs::of_line(line);
        let setup = Setup::new(&args, &Place::Ledger)?;
        let moves = |of: &Request| of.arrival.output > 1;
        let index = setup.load.iter().position(moves).expect("a request with an answer");
        let link = |number, command: &mut Command| Link::of(number, command, |_| true);
        let runs = link(1, Command::new("sleep").arg("600"))?;
        let mut links = vec![runs, link(2, &mut Command::new("true"))?];
        links.rotate_right(index % 2);
        let inner = Bookkeeping::new(&setup.config)?;
        Leaving::new(inner, Unread, links, &setup, interrupt).admit(index, None).map(drop)
    }

    #[test]
    fn a_request_waits_neither_for_a_process_that_has_ended_nor_after_an_interrupt() {
        let error = admit(&Interrupt::default()).expect_err("a process has ended").to_string();
        assert_eq!(error, "decode process 2 has ended");
        admit(&Interrupt::requested()).expect("the replay goes on to its end");
    }
}
