//! Limits of the router kernels, and the kernels that a number of experts chooses among.

/// Most experts of a layer.
pub const MAX_EXPERTS: u32 = 512;
/// The number of experts is a multiple of this: a warp holds as many in every lane.
pub const EXPERT_STEP: u32 = 32;
/// Most experts of a token.
pub const MAX_SELECTED: u32 = 8;

/// How many experts a lane of a warp holds room for: one kernel each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertWidth {
    /// 8 a lane, up to 256 experts (V4-Flash).
    W256,
    /// 12 a lane, up to 384 experts (V4-Pro).
    W384,
    /// 16 a lane, up to 512 experts.
    W512,
}

impl ExpertWidth {
    /// The narrowest one for `experts`; `None` unless they are a multiple of [`EXPERT_STEP`] from 32
    /// to [`MAX_EXPERTS`].
    #[must_use]
    pub const fn of(experts: u32) -> Option<Self> {
        if experts == 0 || !experts.is_multiple_of(EXPERT_STEP) {
            return None;
        }
        match experts {
            ..=256 => Some(Self::W256),
            ..=384 => Some(Self::W384),
            ..=MAX_EXPERTS => Some(Self::W512),
            _ => None,
        }
    }
}
