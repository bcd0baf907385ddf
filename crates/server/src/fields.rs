//! Reads the fields of a request one by one, so that an error can name the wrong field.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::api_error::ApiError;

/// Fields that were not read yet.
pub struct Fields(Map<String, Value>);

impl Fields {
    /// The fields of a JSON object.
    pub fn new(object: Map<String, Value>) -> Self {
        Self(object)
    }

    /// Takes a field. `null` counts as absent.
    pub fn value(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    /// Takes a field of type `T`; `what` describes the valid values in the error.
    ///
    /// # Errors
    /// [`ApiError`] for another type.
    pub fn get<T: DeserializeOwned>(
        &mut self,
        name: &'static str,
        what: &str,
    ) -> Result<Option<T>, ApiError> {
        self.value(name).map(|value| read(value, name, what)).transpose()
    }

    /// Takes a number in the range `least..=most`. An integer may be written with a fraction of 0.
    ///
    /// # Errors
    /// [`ApiError`] for another type, or a number outside the range.
    pub fn number<T: DeserializeOwned + PartialOrd + std::fmt::Display + Copy>(
        &mut self,
        name: &'static str,
        [least, most]: [T; 2],
    ) -> Result<Option<T>, ApiError> {
        let what = format!("{} from {least} to {most}", kind::<T>());
        let Some(value) = self.value(name) else { return Ok(None) };
        let given = shortened(&value);
        let number: T = read(without_fraction(value), name, &what)?;
        if number >= least && number <= most {
            return Ok(Some(number));
        }
        Err(ApiError::invalid(name, format!("`{name}` is {given}; it must be {what}")))
    }

    /// Takes a field that this server does not support. It may be absent, or have a value that changes nothing
    /// (`neutral`).
    ///
    /// # Errors
    /// [`ApiError`] for any other value.
    pub fn unsupported(&mut self, name: &'static str, neutral: &[Value]) -> Result<(), ApiError> {
        match self.value(name) {
            Some(value) if !neutral.iter().any(|neutral| is_same(neutral, &value)) => {
                let text = format!("`{name}` is not supported: leave it out");
                Err(ApiError::invalid(name, text))
            }
            _ => Ok(()),
        }
    }

    /// Refuses fields that were not read.
    ///
    /// # Errors
    /// [`ApiError`] names the first such field.
    pub fn end(self) -> Result<(), ApiError> {
        match self.0.into_iter().find(|(_, value)| !value.is_null()) {
            Some((name, _)) => {
                let bytes = name.len();
                if bytes > MAX_NAME {
                    let text =
                        format!("a field with a name of {bytes} bytes is not known: leave it out");
                    return Err(ApiError { param: None, ..ApiError::invalid("", text) });
                }
                let text = format!("`{name}` is not a field that this server knows: leave it out");
                Err(ApiError::invalid(&name, text))
            }
            None => Ok(()),
        }
    }
}

/// Most bytes of a client's string that an error repeats.
const MAX_NAME: usize = 40;

fn read<T: DeserializeOwned>(value: Value, name: &str, what: &str) -> Result<T, ApiError> {
    let given = shortened(&value);
    serde_json::from_value(value)
        .map_err(|_| ApiError::invalid(name, format!("`{name}` is {given}; it must be {what}")))
}

/// What `T` is, in an error message.
fn kind<T: DeserializeOwned>() -> &'static str {
    match serde_json::from_value::<T>(Value::from(0.5)) {
        Ok(_) => "a number",
        Err(_) => "an integer",
    }
}

/// The number 2.0 as 2, and so on. Other values stay as they are.
pub fn without_fraction(value: Value) -> Value {
    /// Up to here every integer is an `f64`.
    const MAX_EXACT: f64 = (1_u64 << 53) as f64;
    match value.as_f64() {
        Some(number) if value.is_f64() && number.fract() == 0.0 && number.abs() <= MAX_EXACT => {
            Value::from(number as i64)
        }
        _ => value,
    }
}

/// A short description of a value for error messages, whatever the client sent.
pub fn shortened(value: &Value) -> String {
    match value {
        Value::Array(_) => "an array".into(),
        Value::Object(_) => "an object".into(),
        Value::String(text) if text.len() > MAX_NAME => "a long string".into(),
        other => other.to_string(),
    }
}

/// Whether two values are equal. Numbers are equal with and without a fraction: 1 and 1.0.
fn is_same(one: &Value, other: &Value) -> bool {
    match (one.as_f64(), other.as_f64()) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    }
}
