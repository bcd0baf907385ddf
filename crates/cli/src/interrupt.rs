//! SIGINT (Ctrl-C), and also SIGTERM for commands that handle it. The first signal asks a command to end and print its
//! result so far; the second ends it at once.

use std::ffi::c_int;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::SIGINT;
use signal_hook::flag;

use crate::outcome::SIGNALLED;

/// Whether a signal has arrived.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Handles SIGINT for the rest of the program.
    ///
    /// # Errors
    /// If the system refuses the handler.
    pub fn listen() -> io::Result<Self> {
        Self::listen_to(&[SIGINT])
    }

    /// Handles SIGINT and SIGTERM. Service managers send SIGTERM to end a program.
    ///
    /// # Errors
    /// If the system refuses a handler.
    #[cfg(feature = "serve")]
    pub fn listen_to_both() -> io::Result<Self> {
        Self::listen_to(&[SIGINT, signal_hook::consts::SIGTERM])
    }

    fn listen_to(signals: &[c_int]) -> io::Result<Self> {
        let interrupt = Self::default();
        for &signal in signals {
            // Handlers run in this order: at the first signal the flag is not set yet, the second ends the program.
            flag::register_conditional_shutdown(signal, SIGNALLED + signal, interrupt.0.clone())?;
            flag::register(signal, interrupt.0.clone())?;
        }
        Ok(interrupt)
    }

    /// An interrupt that has arrived.
    #[cfg(test)]
    #[must_use]
    pub fn requested() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }

    /// Whether the command should end.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
