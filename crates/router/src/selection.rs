//! The number of experts of a layer and of a token, and the sum of a token's weights.

use kv_layout::router::{EXPERT_STEP, ExpertWidth, MAX_EXPERTS, MAX_SELECTED};

use crate::error::RouterError;

/// The number of experts of a layer and of a token, and the sum of a token's weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Selection {
    experts: u32,
    selected: u32,
    scaling: f32,
    width: ExpertWidth,
}

impl Selection {
    /// `selected` of `experts` experts, with weights that add up to `scaling`.
    ///
    /// # Errors
    /// [`RouterError::Selection`] unless `experts` is a multiple of 32 up to 512, and `selected` is 1 to 8;
    /// [`RouterError::Config`] unless `scaling` is a normal number up to 2^20.
    pub fn new(experts: u32, selected: u32, scaling: f32) -> Result<Self, RouterError> {
        let refused = |what, value, multiple, most| {
            Err(RouterError::Selection { what, value, multiple, most })
        };
        let Some(width) = ExpertWidth::of(experts) else {
            return refused("experts of a layer", experts, EXPERT_STEP, MAX_EXPERTS);
        };
        if !(1..=MAX_SELECTED).contains(&selected) {
            return refused("experts of a token", selected, 1, MAX_SELECTED);
        }
        check_scaling(scaling)?;
        Ok(Self { experts, selected, scaling, width })
    }

    /// Experts of the layer.
    #[must_use]
    pub fn experts(self) -> u32 {
        self.experts
    }

    /// Experts of a token.
    #[must_use]
    pub fn selected(self) -> u32 {
        self.selected
    }

    /// The bits of the sum of a token's weights, the form in which kernels take it.
    pub(crate) fn scaling_bits(self) -> u32 {
        self.scaling.to_bits()
    }

    /// The variant of the kernels that has room for the experts.
    pub(crate) fn width(self) -> ExpertWidth {
        self.width
    }

    /// Elements of `[rows, experts]`.
    pub(crate) fn of_experts(self, rows: u32) -> u64 {
        u64::from(rows) * u64::from(self.experts)
    }

    /// Elements of `[rows, selected]`.
    pub(crate) fn of_selected(self, rows: u32) -> u64 {
        u64::from(rows) * u64::from(self.selected)
    }
}

/// Refuses a sum of weights that is not a normal number up to 2^20.
pub(crate) fn check_scaling(scaling: f32) -> Result<(), RouterError> {
    let (least, most) = (f64::from(f32::MIN_POSITIVE), f64::from(1 << 20));
    let (setting, value) = ("scaling", f64::from(scaling));
    // `contains` is false for NaN.
    if (least..=most).contains(&value) {
        Ok(())
    } else {
        Err(RouterError::Config { setting, value, least, most })
    }
}
