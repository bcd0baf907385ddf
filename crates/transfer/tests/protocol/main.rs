//! The protocol, over transports that fail in every way that is known: nothing wrong is admitted, nothing is written
//! outside of quarantine, nothing is lost.
//!
//! Tests between two processes start this program again as the source.

mod bound;
mod faulty;
#[cfg(feature = "nixl")]
mod nixl;
#[cfg(feature = "nixl")]
mod processes;
mod random;
mod transports;
mod world;

use libtest_mimic::{Arguments, Trial};

fn main() {
    #[cfg(feature = "nixl")]
    if processes::is_source() {
        return processes::source();
    }
    let tests: [(&str, fn()); 9] = [
        ("bound::a_payload_is_of_one_position", bound::a_payload_is_of_one_position),
        ("bound::a_payload_is_of_one_cache", bound::a_payload_is_of_one_cache),
        ("bound::a_restart_is_seen", bound::a_sender_that_restarts_holds_nothing),
        ("random::nothing_wrong_is_admitted", random::nothing_wrong_is_admitted),
        ("random::digests_are_needed", random::without_digests_wrong_bytes_are_admitted),
        ("random::claims_are_needed", random::without_asking_again_what_was_taken_back_is_admitted),
        ("random::quarantine_is_needed", random::without_quarantine_memory_is_written_that_is_free),
        ("transports::within_a_process", transports::within_a_process),
        ("transports::through_a_directory", transports::through_a_directory),
    ];
    let trial = |(name, test): (&str, fn())| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    #[cfg_attr(not(feature = "nixl"), expect(unused_mut, reason = "others are of the feature"))]
    let mut trials: Vec<_> = tests.into_iter().map(trial).collect();
    #[cfg(feature = "nixl")]
    trials.extend(nixl::trials());
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
