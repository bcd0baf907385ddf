//! Configurations of models, as checkpoints have them.

mod fields;
mod model;
mod router;

use serde_json::Value;

/// A whole `config.json` of `tests/configs`.
fn file(name: &str) -> Value {
    let json = match name {
        "flash" => include_str!("../../../configs/flash.json"),
        "flash-0731" => include_str!("../../../configs/flash-0731.json"),
        "pro" => include_str!("../../../configs/pro.json"),
        "transformers" => include_str!("../../../configs/transformers.json"),
        _ => panic!("no file {name}"),
    };
    serde_json::from_str(json).expect("JSON")
}

/// The object with one field replaced, or removed (`Value::Null`).
fn with(object: &Value, field: &str, value: Value) -> Value {
    let mut changed = object.clone();
    let fields = changed.as_object_mut().expect("an object");
    match value {
        Value::Null => drop(fields.remove(field)),
        value => drop(fields.insert(field.to_owned(), value)),
    }
    changed
}
