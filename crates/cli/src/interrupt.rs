//! SIGINT (Ctrl-C), and SIGTERM where a command is ended by it: the first asks a command to end and print what it
//! has; the second ends it at once.

use std::ffi::c_int;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::SIGINT;
use signal_hook::flag;

use crate::outcome::SIGNALLED;

/// Whether a signal has come.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes over SIGINT, for the rest of the program.
    ///
    /// # Errors
    /// If the system refuses the handler.
    pub fn listen() -> io::Result<Self> {
        Self::listen_to(&[SIGINT])
    }

    /// Takes over SIGINT and SIGTERM, by which service managers end a program.
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
            // Handlers run in this order: the first signal finds the flag unset, the second ends the program.
            flag::register_conditional_shutdown(signal, SIGNALLED + signal, interrupt.0.clone())?;
            flag::register(signal, interrupt.0.clone())?;
        }
        Ok(interrupt)
    }

    /// Whether the command should end.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
