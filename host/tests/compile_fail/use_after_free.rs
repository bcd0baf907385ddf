//! A block that was given back cannot be looked at.

use dsv4_kv::block::BlockPool;

fn main() {
    let mut pool = BlockPool::new(1);
    let block = pool.take().unwrap();
    pool.give_back(block);
    println!("{:?}", block.id()); //~ E0382
}
