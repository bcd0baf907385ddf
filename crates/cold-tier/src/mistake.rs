//! Deliberate mistakes, which tests make to prove that such bugs are found. They exist only with the feature
//! `mistakes`; without it they compile to nothing.

/// A mistake in how prefixes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    Nothing,
    /// Prefixes of all salts and adapters have the same names.
    RootNotNamed,
}

dsv4_kv_prefix::mistake_switch!(Mistake);
