//! Mistakes that tests make on purpose, to see that they are found. Only with the feature `mistakes`; without it nothing of
//! them is left.

/// A mistake in how prefixes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    Nothing,
    /// Prefixes of all salts and adapters have the same names.
    RootNotNamed,
}

dsv4_kv_prefix::mistake_switch!(Mistake);
