//! Mistakes that tests make on purpose, to check that the tests find them. They need the feature `mistakes`; without it
//! no mistake can be made.

/// A protection that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    Nothing,
    /// Salt and adapter of an image are not compared with those that the target expects.
    OwnerIgnored,
    /// Bytes are not compared with their digests.
    DigestIgnored,
    /// The source is not asked, before admission, whether it still holds what it offered.
    EpochIgnored,
    /// Memory whose read has missed its deadline is reused at once.
    NoQuarantine,
    /// Memory keeps the bytes of earlier payloads until others are read into it.
    LeftoversStay,
    /// Memory with bytes that were not compared with digests is reused at once.
    UncomparedReused,
    /// The offer is not compared with the opening.
    OpeningIgnored,
    /// A payload that was verified for another model or other formats is admitted.
    ShapeIgnored,
    /// A payload that was verified for other weights is admitted.
    WeightsIgnored,
    /// A payload that was verified for another layout is admitted.
    SectionsIgnored,
    /// A request is loaded into a reservation for another position.
    ReservationIgnored,
    /// The answer to a claim has no deadline.
    ClaimWithoutEnd,
    /// A source is asked for the same payload again.
    AsksAgain,
    /// An offer that arrives twice is read twice.
    OffersRepeat,
    /// A target that gives up does not tell its source.
    GivesUpSilently,
    /// A sender takes more memory than it may.
    LimitIgnored,
    /// Expired offers are kept.
    LeaseIgnored,
    /// Failed reads have no second deadline.
    FailedStay,
    /// Reads begin while the transport waits to be fenced.
    ReadsWhileDraining,
    /// The transport is fenced while reads that are still needed go on.
    FenceWithoutDraining,
    /// A transport that could not be reopened is not tried again.
    FenceOnce,
    /// Transfers of two receivers have the same id.
    IdsRepeat,
}

dsv4_kv_prefix::mistake_switch!(Mistake);
