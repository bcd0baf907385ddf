//! Variables that switch something on.

use std::ffi::OsStr;

use dsv4_kv_tests::environment::is_on;

#[test]
fn a_flag_is_one_zero_or_refused() {
    let read = |value: Option<&str>| is_on("DSV4_REQUIRE_GPU", value.map(OsStr::new));
    assert!(read(Some("1")));
    for off in [None, Some(""), Some("0")] {
        assert!(!read(off), "{off:?}");
    }
    for unclear in ["true", "yes", "01", " 1", "2", "on"] {
        let refused = std::panic::catch_unwind(|| read(Some(unclear)));
        let message = *refused.expect_err(unclear).downcast::<String>().expect("a message");
        assert!(message.contains("DSV4_REQUIRE_GPU") && message.contains(unclear), "{message}");
    }
}
