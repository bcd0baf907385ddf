//! Products of activations with a weight: `y[t, n] = sum over k of x[t, k] w[n, k]`.
//!
//! | file | what it holds |
//! |---|---|
//! | `weights.rs` | weights in NVFP4 and in BF16, as lanes load and unpack them |
//! | `product.rs` | the product of a block |
//! | `output.rs` | the kernels that store the product |
//! | `narrow.rs` | the product with few columns, by clusters |
//! | `query.rs` | the kernel that computes queries of the indexer from it |
//! | `tiled.rs` | the product of many tokens, with the same bits |
//! | `tiled_output.rs` | the kernel that stores the product of many tokens |
//! | `tiled_query.rs` | the kernel that computes queries of the indexer from it |

pub mod narrow;
pub mod output;
pub mod product;
pub mod query;
pub mod tiled;
pub mod tiled_output;
pub mod tiled_query;
pub mod weights;
