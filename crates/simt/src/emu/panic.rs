//! Panics of a kernel body: reported as faults, not printed.

use std::any::Any;
use std::panic;
use std::sync::Once;

use super::block;

/// Installs a panic hook. If a kernel body panics, the hook records the place and prints nothing. It passes other
/// panics, including those of the emulator itself, to the previous hook.
pub fn install_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let location = info.location().map(ToString::to_string);
            let recorded = block::try_current(|block| {
                let is_bodys = block.runs_body.get();
                if is_bodys {
                    block.panic_location.set(location);
                }
                is_bodys
            });
            if recorded != Some(true) {
                previous(info);
            }
        }));
    });
}

/// The text of a panic.
pub fn message(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "a payload that is no text".to_owned()
    }
}
