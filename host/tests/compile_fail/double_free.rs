//! A block that was given back is gone.

use dsv4_kv::block::BlockPool;

fn main() {
    let mut pool = BlockPool::new(1);
    let block = pool.take().unwrap();
    pool.give_back(block);
    pool.give_back(block); //~ E0382
}
