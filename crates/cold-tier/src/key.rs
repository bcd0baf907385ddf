//! Names of objects: a digest of identity, root and all tokens of a prefix. Identity, root and tokens are also compared
//! when an object is read, so that a collision of digests causes no error.

use sha2::{Digest, Sha256};

use crate::image::BLOCK;
use crate::mistake::{Mistake, made};

/// The name of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

/// The folder of objects of this version.
pub const FOLDER: &str = "v1";

impl Key {
    /// The keys of a prefix of whole blocks: of its first block, of its first two blocks, and so on. `[blocks]` keys.
    pub fn all(identity: &[u8], root: &[u8], tokens: &[[u32; BLOCK]]) -> Vec<Self> {
        let mut digest = Sha256::new();
        let root = if made(Mistake::RootNotNamed) { &[] } else { root };
        for part in [identity, root] {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        let after = |block: &[u32; BLOCK]| {
            let mut bytes = [[0; 4]; BLOCK];
            bytes.iter_mut().zip(block).for_each(|(bytes, token)| *bytes = token.to_le_bytes());
            // At once: for each token the digest would copy four bytes into its own buffer.
            digest.update(bytes.as_flattened());
            Self(digest.clone().finalize().into())
        };
        tokens.iter().map(after).collect()
    }

    /// Name of its object.
    pub fn name(&self) -> String {
        let digits: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{FOLDER}/{digits}")
    }

    /// The key of an object by its name; `None` for a name of another form.
    pub fn of_name(name: &str) -> Option<Self> {
        let (pairs, []) = name.rsplit('/').next()?.as_bytes().as_chunks::<2>() else { return None };
        let pairs: &[[u8; 2]; 32] = pairs.try_into().ok()?;
        // Only as `Self::name` writes it: names differ in capitals, and the object of the key would be another one.
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let mut key = [0; 32];
        for (byte, &[high, low]) in key.iter_mut().zip(pairs) {
            *byte = digit(high)? << 4 | digit(low)?;
        }
        Some(Self(key))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use dsv4_kv::RootKey;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// Other tokens, owners and lengths give other names, and a name gives back its key.
    #[test]
    fn a_key_is_of_all_that_it_is_of() {
        let tokens = [[1; BLOCK], [2; BLOCK]];
        let keys = Key::all(b"ab", b"c", &tokens);
        let others =
            [Key::all(b"a", b"bc", &tokens), Key::all(b"ab", b"c", &[[1; BLOCK], [3; BLOCK]])];
        assert_eq!(keys.len(), 2);
        assert!(keys[0] != keys[1] && others[0][0] != keys[0] && others[1][1] != keys[1]);
        assert_eq!(others[1][0], keys[0], "the same first block");
        assert_eq!(Key::of_name(&keys[1].name()), Some(keys[1]));
        let zeros = "00".repeat(32);
        assert_eq!(Key::of_name(&zeros), Some(Key([0; 32])));
        let longer = [format!("{zeros}0"), format!("{zeros}00")];
        let names = ["v1/00", "x", "", &zeros[1..], &longer[0], &longer[1]].map(str::to_owned);
        // `u8::from_str_radix` takes signs and capitals.
        let digits = ["+f", "FF", "Ff", "-0", "0x", "\u{e9}"].map(|pair| pair.repeat(32));
        for name in names.iter().chain(&digits) {
            assert_eq!(Key::of_name(name), None, "{name}");
        }
    }

    /// Checks `count` pairs: the same tokens under two salts or adapters. Each name must belong to one
    /// root and one prefix.
    fn pairs(count: u64) -> Result<(), String> {
        let parts: [&[u8]; 6] = [b"", b"a", b"b", b"ab", b"\0", b"\0\0\0\0\0\0\0\x01a"];
        let roots: Vec<_> = parts
            .iter()
            .flat_map(|salt| parts.map(|adapter| RootKey::new(salt, adapter, b"model")))
            .collect();
        let mut random = SmallRng::seed_from_u64(19);
        let (mut names, mut again) = (HashMap::new(), 0_u64);
        for _ in 0..count {
            // Few prompts, many with the same beginning, so that prefixes repeat.
            let (first, second) = (random.random_range(0..64), random.random_range(0..1 << 12));
            let tokens = [[first; BLOCK], [second; BLOCK]];
            let one = random.random_range(0..roots.len());
            let two = (one + random.random_range(1..roots.len())) % roots.len();
            for root in [one, two] {
                let keys = Key::all(b"weights", roots[root].bytes(), &tokens);
                for (key, of) in
                    keys.into_iter().zip([(root, first, None), (root, first, Some(second))])
                {
                    let before = *names.entry(key.0).or_insert(of);
                    if before != of {
                        return Err(format!("{before:?} and {of:?} have one name"));
                    }
                    again += 1;
                }
            }
        }
        assert!(again - names.len() as u64 > count / 2, "the same prefix has the same name");
        println!(
            "{count} pairs, {} names, {} of them again",
            names.len(),
            again - names.len() as u64
        );
        Ok(())
    }

    #[test]
    fn another_salt_has_other_names() {
        pairs(10_000).unwrap();
    }

    #[test]
    #[ignore = "a million pairs: docs/reliability.md"]
    fn another_salt_has_other_names_a_million_times() {
        pairs(1_000_000).unwrap();
    }

    #[cfg(feature = "mistakes")]
    #[test]
    fn names_without_a_root_are_found() {
        crate::mistake::make(Mistake::RootNotNamed);
        pairs(10).unwrap_err();
        crate::mistake::make(Mistake::Nothing);
    }
}
