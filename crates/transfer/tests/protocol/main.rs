//! The protocol, over transports that fail in every way that is known: nothing wrong is admitted, nothing is written
//! outside of quarantine, nothing is lost.

mod faulty;
mod random;
mod transports;
mod world;
