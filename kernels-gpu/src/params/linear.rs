//! Scalars of products with a weight.

use bytemuck::{Pod, Zeroable};

use super::Parameters;

parameters! {
    /// Scalars of `bf16_linear_*` and of `bf16_narrow_*`.
    Bf16LinearParams {
        /// Rows of the activations, at least one.
        tokens,
        /// Rows of the weight, at least one.
        columns,
        /// Elements of a row of either, a multiple of 32.
        inner,
    }
}

parameters! {
    /// Scalars of `bf16_linear_many`.
    Bf16LinearManyParams {
        /// Rows of the activations, at least one.
        tokens,
        /// Rows of the weight, at least one.
        columns,
        /// Elements of a row of either, a multiple of 32.
        inner,
        /// Blocks that share each 192 tokens, at least one.
        splits,
    }
}

parameters! {
    /// Scalars of `bf16_index_query_*`.
    Bf16IndexQueryParams {
        /// The first query token of the launch; its query is row 0.
        first,
        /// Query tokens that the launch covers, from `first` on, at least one.
        tokens,
        /// Heads of a query, at least one, at most 64.
        heads,
        /// Elements of a row of activations, a multiple of 32.
        inner,
        /// Blocks that share each 192 tokens, at least one.
        splits,
    }
}

parameters! {
    /// Scalars of `nvfp4_linear_*`.
    Nvfp4LinearParams {
        /// Rows of the activations, at least one.
        tokens,
        /// Rows of the weight, at least one.
        columns,
        /// Elements of a row of either, a multiple of 32.
        inner,
        /// Bits of the f32 that the whole weight is multiplied by.
        scale_bits,
    }
}

parameters! {
    /// Scalars of `nvfp4_index_query_*`.
    Nvfp4IndexQueryParams {
        /// The first query token of the launch; its query is row 0.
        first,
        /// Query tokens that the launch covers, from `first` on, at least one.
        tokens,
        /// Heads of a query, at most 64.
        heads,
        /// Elements of a row of activations, a multiple of 32.
        inner,
        /// Bits of the f32 that the whole weight is multiplied by.
        scale_bits,
    }
}
