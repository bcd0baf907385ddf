//! Mistakes that tests make on purpose, to see that they are found. Only with the feature `mistakes`; without it nothing of
//! them is left.

/// A protection that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    Nothing,
    /// Salt and adapter of an image are not compared with those that its target asked for.
    OwnerIgnored,
    /// Bytes are not compared with their digests.
    DigestIgnored,
    /// The source is not asked again whether it still holds what it offered.
    EpochIgnored,
    /// Memory whose read has missed its deadline is used again at once.
    NoQuarantine,
    /// What is offered in the end is not compared with what was opened.
    OpeningIgnored,
    /// What was verified for another model or other formats is admitted.
    ShapeIgnored,
    /// What was verified for other weights is admitted.
    WeightsIgnored,
    /// What was verified for another layout is admitted.
    SectionsIgnored,
    /// A request is loaded into room for another position.
    RoomIgnored,
    /// A source that does not answer is waited for without end.
    ClaimWithoutEnd,
    /// A source is asked for the same payload again.
    AsksAgain,
    /// An offer that comes twice is read twice.
    OffersRepeat,
    /// A target that gives up does not tell its source.
    GivesUpSilently,
    /// A sender takes more memory than it may.
    LimitIgnored,
    /// Offers whose time has ended stay.
    LeaseIgnored,
    /// Reads that have failed have no second deadline.
    FailedStay,
    /// Reads begin while the transport is to be ended.
    ReadsWhileDraining,
    /// The transport is ended while reads go on that somebody waits for.
    FenceWithoutDraining,
    /// A transport that could not be made again is not tried again.
    FenceOnce,
    /// Transfers of two receivers have the same name.
    IdsRepeat,
}

dsv4_kv_prefix::mistake_switch!(Mistake);
