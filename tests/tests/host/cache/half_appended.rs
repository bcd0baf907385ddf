//! The append of a long chunk that fails half way, and chunks whose windows it may have replaced.

use dsv4_kv::device::{DeviceError, EmuOptions};
use dsv4_kv::kv_layout::geometry::LayerKind::Swa;
use dsv4_kv::layer_progress::LayerProgress;
use dsv4_kv::{Accepted, KvError, LayerId};
use dsv4_kv_tests::failing::{Failing, Failure};
use dsv4_kv_tests::fed::{Fed, Padding, Part, begin};
use dsv4_kv_tests::stories::{Story, config};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

const FORMATS: (MainFormat, IndexFormat) = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
const LAYER: LayerId = LayerId(0);
const TOKENS: usize = 8;

/// After an append that may have run, windows are refused: their oldest rows may be replaced. Only the append can be
/// repeated, and then all rows are right. After one that has certainly not run, windows are read as before.
#[test]
fn windows_are_refused_after_half_an_append() {
    let device = Failing::emulated(EmuOptions::default());
    let story = Story::random(&[Swa], TOKENS, 48);
    let mut fed = Fed::new(&device, config(&[Swa], FORMATS, 1));
    let stored = story.stored(&device, FORMATS);
    let tile = device.allocate("tile", (TOKENS * 128 * 512) as u64).unwrap();
    let lengths = device.allocate("lengths", TOKENS as u64).unwrap();
    for how in [Failure::Instead, Failure::After] {
        let id = fed.manager.admit().unwrap();
        let parts = [Part::new(id, &story, 0..TOKENS)];
        let Fed { manager, stream, inputs } = &mut fed;
        inputs.load(stream, &parts, TOKENS as u32);
        let mut step = begin(manager, stream, &parts, Padding::None).unwrap().remove(0);
        let layer = inputs.update(&mut step, LAYER).unwrap();
        layer.gather_window(0..TOKENS as u32, &tile, &lengths).unwrap();
        // Refused, since the owner of the stream captures it: nothing was queued.
        device.backend().record_streams(true);
        let refused = layer.append().unwrap_err();
        device.backend().record_streams(false);
        assert!(matches!(refused, KvError::Device(DeviceError::ForbiddenInCapture { .. })));
        assert_eq!(step.progress(LAYER).unwrap(), LayerProgress::Updated);
        let layer = inputs.resume(&mut step, LAYER).unwrap();
        layer.gather_window(0..TOKENS as u32, &tile, &lengths).unwrap();
        device.backend().fail(0, how);
        let failed = layer.append().unwrap_err();
        assert!(matches!(failed, KvError::Device(_)), "{failed}");
        assert_eq!(device.backend().failed(), Some("launch"));
        device.backend().fail_nothing();
        assert_eq!(step.progress(LAYER).unwrap(), LayerProgress::HalfAppended, "{how:?}");
        let layer = inputs.resume(&mut step, LAYER).unwrap();
        let refused = layer.gather_window(0..TOKENS as u32, &tile, &lengths).unwrap_err();
        assert!(matches!(refused, KvError::WindowOverwritten { tokens: 8, .. }), "{refused}");
        layer.append().unwrap();
        step.commit(&[Accepted::count(id, TOKENS as u32)]).unwrap();
        fed.assert_holds(id, &story, &stored, TOKENS);
        fed.manager.release(id).unwrap();
    }
}
