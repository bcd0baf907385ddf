//! The k largest scores of a row, exactly and in order.
//!
//! | module | what it holds |
//! |---|---|
//! | [`topk`] | the kernels: a short row from registers, a long row by way of candidates |
//! | [`maxima`] | the kernel that writes the largest score of each group of 8 or 32 |
//! | [`order`] | lists the k largest scores that a block holds, in order |
//! | [`row`] | a row of scores, and the scores of it that a thread holds in registers |
//! | [`memory`] | the shared memory of a block that selects |
//! | [`bin_map`] | the bin that a score falls into |
//! | [`bins`] | counts of scores by bin, the bin of the largest first |
//! | [`candidates`] | the scores of a long row that may be among its k largest |
//! | [`extremes`] | the lowest and the highest value of a block |
//! | [`search`] | finds the k-th largest score by radix search, where bins overflow |
//! | [`list`] | records of scores in shared memory, and their bitonic sort |
//! | [`scan`] | prefix sums over a warp |

pub mod bin_map;
pub mod bins;
pub mod candidates;
pub mod extremes;
pub mod list;
pub mod maxima;
pub mod memory;
pub mod order;
pub mod row;
pub mod scan;
pub mod search;
pub mod topk;
