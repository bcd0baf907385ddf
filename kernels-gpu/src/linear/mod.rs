//! Products of activations with a weight, for decode batches: `y[t, n] = sum over k of x[t, k] w[n, k]`.
//!
//! | file | what it holds |
//! |---|---|
//! | `weights.rs` | weights in NVFP4 and in BF16, as a lane of a product takes them |
//! | `product.rs` | the product of a block |
//! | `output.rs` | the kernels that store it |
//! | `narrow.rs` | the product with few columns, by clusters |
//! | `query.rs` | the kernel that makes queries of the indexer of it |

pub mod narrow;
pub mod output;
pub mod product;
pub mod query;
pub mod weights;
