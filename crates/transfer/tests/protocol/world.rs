//! Requests that were computed once and leave again and again, and a cache that they come to.

use dsv4_kv::device::{Device, EmuOptions, Emulator};
use dsv4_kv::transfer::{PartLayout, Port, Positions};
use dsv4_kv::{CacheConfig, RequestId};
use dsv4_kv_tests::fed::{Fed, Padding, Part};
use dsv4_kv_tests::stories::{Story, config, tiny};
use dsv4_kv_transfer::{Expected, Fingerprint};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

/// Blocks of the target.
pub const BLOCKS: u32 = 6;

/// A request of the source: how far it is, its tokens, and its bytes.
pub struct Sample {
    pub at: Positions,
    pub tokens: Vec<u32>,
    pub payload: Vec<u8>,
}

pub struct World {
    pub samples: Vec<Sample>,
    pub fingerprint: Fingerprint,
    pub layout: PartLayout,
    pub target: Fed<Emulator>,
    pub port: Port<Emulator>,
}

fn fed(device: &Device<Emulator>, max_draft: u32) -> Fed<Emulator> {
    let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
    let config = config(&tiny(), formats, 2);
    Fed::new(device, CacheConfig { max_draft, num_blocks: BLOCKS, poison: true, ..config })
}

/// All bytes of a request.
pub fn export(fed: &mut Fed<Emulator>, port: &mut Port<Emulator>, id: RequestId) -> Vec<u8> {
    let stream = fed.stream.clone();
    let at = fed.manager.positions(id).unwrap();
    let parts = port.layout().parts(at);
    let mut payload = vec![0; parts.iter().map(|part| part.bytes as usize).sum()];
    let blocks = port.layout().blocks(at.trunk);
    let bytes = blocks as usize * port.layout().block_bytes() as usize;
    let (of_blocks, of_state) = payload.split_at_mut(bytes);
    fed.manager.export_blocks(&stream, port, (id, 0..blocks), of_blocks).unwrap();
    fed.manager.export_state(&stream, port, id, of_state).unwrap();
    payload
}

impl World {
    pub fn new() -> Self {
        let device = Device::from_backend(Emulator::new(EmuOptions::default()));
        let mut source = fed(&device, 0);
        let mut port = source.manager.open_port().unwrap();
        let story = Story::random(&tiny(), 200, 71);
        let id = source.manager.admit().unwrap();
        let mut samples = Vec::new();
        let mut done = 0;
        for end in [2, 7, 130] {
            source.step(&[Part::new(id, &story, done..end)], Padding::None);
            let at = source.manager.positions(id).unwrap();
            let payload = export(&mut source, &mut port, id);
            samples.push(Sample { at, tokens: (0..end as u32).collect(), payload });
            done = end;
        }
        let target = fed(&device, 3);
        let config = target.manager.config();
        let fingerprint = Fingerprint::new(config, b"weights", b"salt", b"");
        let (layout, port) = (PartLayout::new(config), target.manager.open_port().unwrap());
        Self { samples, fingerprint, layout, target, port }
    }

    pub fn expected(&self) -> Expected<'_> {
        Expected { fingerprint: &self.fingerprint, layout: &self.layout, tokens: None }
    }
}
