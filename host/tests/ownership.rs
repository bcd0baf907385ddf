//! What the types forbid: `compile_fail/*.rs` do not compile, each for the reason beside it.

#[test]
fn what_must_not_compile_does_not() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
