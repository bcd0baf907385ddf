//! A hash of everything on which host and device must agree.

use kv_layout::format::Ue8m0;
use kv_layout::geometry::{
    BLOCK_TOKENS, CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM, NOPE_DIM, ROPE_DIM, WINDOW,
};
use kv_layout::index_row::{IndexFormat, QUERY_HEADS};
use kv_layout::linear::{GROUP, device_word, tile_scale, tile_word};
use kv_layout::main_row::{DATA_BYTES, MainFormat, ROPE_OFFSET, UE8M0_GROUP};
use kv_layout::router::{DECODE_SLICES, DECODE_TOKENS, MAX_SELECTED};
use simt::kernel::KernelInfo;

use super::KERNELS;

/// FNV-1a, 64 bits (RFC 9923).
#[derive(Clone, Copy)]
struct Hash(u64);

impl Hash {
    const EMPTY: Self = Self(0xcbf2_9ce4_8422_2325);

    const fn byte(self, byte: u8) -> Self {
        Self((self.0 ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3))
    }

    const fn number(mut self, number: u64) -> Self {
        let bytes = number.to_le_bytes();
        let mut i = 0;
        while i < bytes.len() {
            self = self.byte(bytes[i]);
            i += 1;
        }
        self
    }

    /// Without white space: compilers put it between tokens as they like.
    const fn text(mut self, text: &str) -> Self {
        let bytes = text.as_bytes();
        let mut i = 0;
        while i < bytes.len() {
            if !bytes[i].is_ascii_whitespace() {
                self = self.byte(bytes[i]);
            }
            i += 1;
        }
        // A separator between texts: no text contains this byte.
        self.byte(0xFF)
    }

    const fn kernel(mut self, kernel: &KernelInfo) -> Self {
        self = self.text(kernel.name).text(kernel.grid);
        let mut i = 0;
        while i < kernel.pointers.len() {
            let pointer = &kernel.pointers[i];
            self = self.text(pointer.name).text(pointer.element).text(pointer.extent);
            self = self.number(pointer.align as u64).number(pointer.mutable as u64);
            i += 1;
        }
        let mut i = 0;
        while i < kernel.params.len() {
            self = self.text(kernel.params[i]);
            i += 1;
        }
        self.number(kernel.params_size as u64)
            .number(kernel.params_align as u64)
            .number(kernel.block as u64)
            .number(kernel.min_blocks as u64)
            .number(kernel.shared as u64)
            .number(kernel.min_sm as u64)
            .number(kernel.cluster as u64)
            .number(kernel.waits_in_body as u64)
    }
}

/// What dimensions and grids are written with, and where things are in a row.
const LAYOUT: [u64; 30] = [
    BLOCK_TOKENS as u64,
    CSA_RATIO as u64,
    HCA_RATIO as u64,
    HEAD_DIM as u64,
    INDEX_DIM as u64,
    NOPE_DIM as u64,
    ROPE_DIM as u64,
    WINDOW as u64,
    QUERY_HEADS as u64,
    DATA_BYTES,
    ROPE_OFFSET,
    UE8M0_GROUP as u64,
    size_of::<Ue8m0>() as u64,
    MainFormat::Ue8m0.scale_bytes(),
    MainFormat::F32.scale_bytes(),
    IndexFormat::Nvfp4.code_bytes(),
    IndexFormat::Mxfp4.code_bytes(),
    IndexFormat::Fp8.code_bytes(),
    IndexFormat::Nvfp4.scale_bytes(),
    IndexFormat::Mxfp4.scale_bytes(),
    IndexFormat::Fp8.scale_bytes(),
    IndexFormat::Nvfp4.query_byte(1, 1) as u64,
    IndexFormat::Mxfp4.query_byte(1, 1) as u64,
    DECODE_SLICES as u64,
    DECODE_TOKENS as u64,
    MAX_SELECTED as u64,
    GROUP as u64,
    device_word(0x1248_8421) as u64,
    tile_word(9, 5) as u64,
    tile_scale(9, 3) as u64,
];

/// Hash of the kernel table, of the parameter structs and of the row layouts. The PTX manifest states it,
/// and the host refuses PTX of another one.
pub const ABI_HASH: u64 = {
    let mut hash = Hash::EMPTY;
    let mut i = 0;
    while i < KERNELS.len() {
        hash = hash.kernel(&KERNELS[i]);
        i += 1;
    }
    let mut i = 0;
    while i < LAYOUT.len() {
        hash = hash.number(LAYOUT[i]);
        i += 1;
    }
    hash.0
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(Hash::EMPTY.byte(b'a').0, 0xaf63_dc4c_8601_ec8c);
        assert_eq!("foobar".bytes().fold(Hash::EMPTY, Hash::byte).0, 0x8594_4171_f739_67e8);
    }

    /// Each part of a kernel counts.
    #[test]
    fn any_change_of_a_kernel_changes_it() {
        let kernel = KERNELS[0];
        let hash = |kernel: KernelInfo| Hash::EMPTY.kernel(&kernel).0;
        let changed = [
            KernelInfo { name: "other", ..kernel },
            KernelInfo { pointers: &kernel.pointers[1..], ..kernel },
            KernelInfo { params: &kernel.params[1..], ..kernel },
            KernelInfo { params_size: kernel.params_size + 4, ..kernel },
            KernelInfo { block: kernel.block + 32, ..kernel },
            KernelInfo { shared: kernel.shared + 4, ..kernel },
            KernelInfo { cluster: 2, ..kernel },
            KernelInfo { waits_in_body: !kernel.waits_in_body, ..kernel },
            KernelInfo { grid: "1, 1", ..kernel },
        ];
        for other in changed {
            assert_ne!(hash(other), hash(kernel), "{other:?}");
        }
        let spaced = KernelInfo { grid: "1,  1", ..kernel };
        assert_eq!(hash(spaced), hash(KernelInfo { grid: "1,1", ..kernel }));
    }
}
