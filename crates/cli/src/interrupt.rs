//! SIGINT (Ctrl-C): the first asks a command to end and print what it has; the second ends it at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::SIGINT;
use signal_hook::flag;

use crate::outcome::INTERRUPTED;

/// Whether SIGINT has come.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes over SIGINT, for the rest of the program.
    ///
    /// # Errors
    /// If the system refuses the handler.
    pub fn listen() -> io::Result<Self> {
        let interrupt = Self::default();
        // Handlers run in this order: the first signal finds the flag unset, the second ends the program.
        flag::register_conditional_shutdown(SIGINT, INTERRUPTED.into(), interrupt.0.clone())?;
        flag::register(SIGINT, interrupt.0.clone())?;
        Ok(interrupt)
    }

    /// Whether the command should end.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
