//! A checkpoint cannot be copied: who holds it owns its storage.

use dsv4_kv::SavedCheckpoint;

fn saved_twice(saved: &SavedCheckpoint) -> SavedCheckpoint {
    *saved //~ E0507
}

fn main() {}
