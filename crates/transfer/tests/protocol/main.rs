//! The protocol, over transports with all known faults: nothing wrong is admitted, nothing is written outside of
//! quarantine, and nothing is lost.
//!
//! Tests between two processes start this program again as the source.

mod admitting;
mod bound;
mod claims;
mod devices;
mod faulty;
mod fencing;
#[cfg(feature = "nixl")]
mod gpu;
#[cfg(feature = "nixl")]
mod gpus;
#[cfg(feature = "nixl")]
mod hazards;
mod leases;
#[cfg(feature = "nixl")]
mod lengths;
#[cfg(feature = "nixl")]
mod networks;
#[cfg(feature = "nixl")]
mod nixl;
#[cfg(feature = "nixl")]
mod peer;
mod pieces;
mod prefixes;
#[cfg(feature = "nixl")]
mod processes;
mod random;
mod salts;
mod streaming;
mod transports;
#[cfg(feature = "nixl")]
mod walk;
mod world;

use libtest_mimic::{Arguments, Trial};

fn main() {
    #[cfg(feature = "nixl")]
    if peer::is_source() {
        return;
    }
    let tests: Vec<(&str, fn())> = vec![
        ("admitting::a_payload_is_of_one_model", admitting::a_payload_is_of_one_model),
        (
            "admitting::a_payload_is_of_one_set_of_weights",
            admitting::a_payload_is_of_one_set_of_weights,
        ),
        ("admitting::room_is_for_one_position", admitting::room_is_for_one_position),
        ("admitting::sections_are_those_of_the_cache", admitting::sections_are_those_of_the_cache),
        ("bound::a_payload_is_of_one_position", bound::a_payload_is_of_one_position),
        ("bound::an_open_transfer_outlives_failures", bound::an_open_transfer_outlives_failures),
        ("bound::a_restart_is_seen", bound::a_sender_that_restarts_holds_nothing),
        ("bound::too_long_is_not_read", bound::a_request_that_is_too_long_is_not_read),
        ("bound::without_tokens", bound::requests_without_tokens_are_bounded),
        ("claims::a_silent_source", claims::a_silent_source_holds_nobody),
        ("claims::a_late_yes", claims::a_late_yes_is_nobodys),
        ("claims::asked_once", claims::a_payload_is_asked_for_once),
        ("claims::offer_that_comes_twice", claims::an_offer_that_comes_twice),
        ("claims::offer_that_comes_late", claims::an_offer_that_comes_again_late),
        ("claims::room_of_another_cache", claims::room_of_another_cache_is_handed_back),
        ("claims::sources_are_told", claims::sources_are_told),
        ("claims::panics", claims::a_panic_in_the_channel_loses_no_room),
        ("leases::own_transfers", leases::an_open_transfer_is_its_senders),
        ("leases::a_sender_has_a_limit", leases::a_sender_has_a_limit),
        ("leases::memory_lingers", leases::memory_lingers),
        ("leases::abandoned_memory_lingers", leases::abandoned_memory_lingers),
        ("leases::memory_that_stays", leases::memory_that_is_not_given_back_is_held),
        ("leases::offers_end", leases::offers_end_by_themselves),
        ("leases::targets_give_up", leases::targets_give_up_what_is_theirs),
        ("fencing::failed_reads", fencing::failed_reads_end_under_traffic),
        ("fencing::what_waits", fencing::what_waits_keeps_its_bytes),
        ("fencing::made_again", fencing::a_transport_is_made_again),
        ("fencing::kept_memory", fencing::kept_memory_comes_back),
        ("fencing::too_early", fencing::success_that_is_too_early),
        ("fencing::leftovers", fencing::leftovers_are_not_taken_for_bytes),
        ("fencing::not_compared", fencing::what_was_not_compared_is_not_used_again),
        ("fencing::late", fencing::what_ends_late_is_compared),
        ("fencing::names", fencing::transfers_are_of_one_receiver),
        ("fencing::panics", fencing::a_panic_loses_one_transfer),
        ("pieces::faults", pieces::a_fault_in_any_piece_is_seen),
        ("pieces::deadline", pieces::all_pieces_have_one_deadline),
        ("pieces::memory", pieces::memory_is_used_again),
        ("prefixes::come", prefixes::a_prefix_comes_to_another_tree),
        ("prefixes::read_once", prefixes::a_prefix_is_read_once),
        ("prefixes::owners", prefixes::a_prefix_is_one_owners),
        ("prefixes::kinds", prefixes::a_prefix_is_no_request),
        ("prefixes::room", prefixes::room_is_taken_whole),
        ("prefixes::captured", prefixes::a_captured_stream_evicts_nothing),
        ("streaming::while_computed", streaming::blocks_come_before_the_prompt_is_computed),
        ("streaming::a_fault_in_one_chunk_is_seen", streaming::a_fault_in_one_chunk_is_seen),
        ("streaming::silence_frees_memory", streaming::silence_and_giving_up_free_memory),
        ("streaming::an_offer_is_of_what_was_opened", streaming::an_offer_is_of_what_was_opened),
        ("streaming::what_stays_counts", streaming::memory_that_stays_with_the_transport_counts),
        ("random::nothing_wrong_is_admitted", random::nothing_wrong_is_admitted),
        ("random::a_seed_has_one_outcome", random::a_seed_has_one_outcome),
        ("random::digests_are_needed", random::without_digests_wrong_bytes_are_admitted),
        ("random::claims_are_needed", random::without_asking_again_what_was_taken_back_is_admitted),
        ("random::quarantine_is_needed", random::without_quarantine_memory_is_written_that_is_free),
        ("salts::no_manifest_is_anothers", salts::no_manifest_is_anothers),
        ("salts::no_request_is_anothers", salts::no_request_is_anothers),
        ("salts::owners_are_needed", salts::owners_that_are_ignored_are_found),
        ("devices::payloads_on_devices", devices::payloads_on_devices),
        ("devices::damage_is_found_on_devices", devices::damage_is_found_on_devices),
        ("devices::other_devices_are_copied_from", devices::other_devices_are_copied_from),
        ("transports::within_a_process", transports::within_a_process),
        ("transports::through_a_directory", transports::through_a_directory),
    ];
    let long: [(&str, fn()); 3] = [
        ("random::thousands", random::nothing_wrong_is_admitted_thousands_of_times),
        ("salts::a_million", salts::no_manifest_is_anothers_a_million_times),
        ("salts::thousands", salts::no_request_is_anothers_thousands_of_times),
    ];
    let trial = |(name, test): (&str, fn())| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let mut trials: Vec<_> = tests.into_iter().map(trial).collect();
    trials.extend(long.into_iter().map(trial).map(|trial| trial.with_ignored_flag(true)));
    #[cfg(feature = "nixl")]
    trials.extend(nixl::trials());
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
