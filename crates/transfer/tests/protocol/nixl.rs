//! NIXL: typed errors without its library; with `DSV4_NIXL`, requests move between two processes.

use dsv4_kv_transfer::TransportError;
use dsv4_kv_transfer::transport::{Nixl, NixlOptions};
use libtest_mimic::{Failed, Trial};

use super::{gpu, gpus, hazards, lengths, networks, processes};

fn options(library: &str) -> NixlOptions {
    NixlOptions { library: library.into(), ..NixlOptions::default() }
}

fn a_missing_library_is_an_error() -> Result<(), Failed> {
    let error = Nixl::open(&options("/nowhere/libnixl_capi.so")).unwrap_err();
    assert!(matches!(error, TransportError::NoLibrary { .. }), "{error}");
    assert!(error.to_string().contains("DSV4_NIXL"), "{error}");
    Ok(())
}

fn another_library_lacks_a_symbol() -> Result<(), Failed> {
    let error = Nixl::open(&options("libc.so.6")).unwrap_err();
    let is_first =
        matches!(error, TransportError::NoSymbol { symbol: "nixl_capi_create_configured_agent" });
    assert!(is_first, "{error}");
    Ok(())
}

/// A test and its name.
type Test = (&'static str, fn() -> Result<(), Failed>);

/// All tests. Without the library those that need it are ignored.
pub fn trials() -> impl Iterator<Item = Trial> {
    let is_there = std::env::var_os("DSV4_NIXL").is_some();
    let kind = if is_there { "" } else { "DSV4_NIXL is not set" };
    let alone: [Test; 2] = [
        ("nixl::a_missing_library_is_an_error", a_missing_library_is_an_error),
        ("nixl::another_library_lacks_a_symbol", another_library_lacks_a_symbol),
    ];
    let between: [Test; 18] = [
        ("nixl::requests_move_between_processes", processes::requests_move),
        ("nixl::prefixes_move_between_processes", processes::prefixes_move),
        ("nixl::prompts_stream_between_processes", processes::prompts_stream),
        ("nixl::most_of_a_prompt_comes_early", processes::most_of_a_prompt_comes_early),
        ("nixl::a_thousand_lengths", lengths::a_thousand_lengths),
        ("nixl::lengths_of_flash", lengths::lengths_of_flash),
        ("nixl::memory_comes_and_goes", processes::memory_comes_and_goes),
        ("nixl::an_idle_source_sleeps", processes::an_idle_source_sleeps),
        ("nixl::a_source_that_is_stopped", processes::stopped_sources),
        ("nixl::prompts_outlive_the_agent", processes::prompts_outlive_the_agent),
        ("nixl::a_source_that_is_killed", hazards::killed_sources),
        ("nixl::given_up_while_read", hazards::given_up_while_read),
        ("nixl::memory_that_is_reused", hazards::memory_that_is_reused),
        ("nixl::digests_are_needed", hazards::digests_are_needed),
        ("nixl::claims_are_needed", hazards::claims_are_needed),
        ("nixl::late_bytes_stay_in_quarantine", hazards::late_bytes_stay_in_quarantine),
        ("nixl::quarantine_is_needed", hazards::quarantine_is_needed),
        ("nixl::emulated_memory_is_refused", gpu::emulated_memory_is_refused),
    ];
    let no_gpu = if is_there && gpus::gpus() == 0 { "there is no GPU" } else { kind };
    let on_gpus = Trial::test("gpu::requests_move_between_processes", gpu::requests_move)
        .with_kind(no_gpu)
        .with_ignored_flag(!no_gpu.is_empty());
    let no_network = if is_there { networks::why_not().unwrap_or_default() } else { kind };
    let apart: [Test; 2] = [
        ("nixl::a_link_that_goes_down", networks::a_link_that_goes_down),
        ("nixl::an_address_that_is_silent", networks::an_address_that_is_silent),
    ];
    let apart = apart.into_iter().map(move |(name, test)| {
        let is_ignored = !no_network.is_empty();
        Trial::test(name, test).with_kind(no_network).with_ignored_flag(is_ignored)
    });
    let alone = alone.into_iter().map(|(name, test)| Trial::test(name, test));
    let between = between.into_iter().map(move |(name, test)| {
        Trial::test(name, test).with_kind(kind).with_ignored_flag(!is_there)
    });
    alone.chain(between).chain(apart).chain([on_gpus])
}
