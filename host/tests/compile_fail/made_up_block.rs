//! Only a pool makes blocks.

use dsv4_kv::BlockId;
use dsv4_kv::block::{Block, BlockPool};

fn main() {
    let mut pool = BlockPool::new(1);
    pool.give_back(Block { 0: BlockId(0) }); //~ E0451
}
