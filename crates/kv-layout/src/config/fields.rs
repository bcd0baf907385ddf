//! `Fields`: the fields of a `config.json`, read by name and type.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde_json::{Map, Value};

use super::ConfigError;

/// Fields that a whole file and its `text_config` both have, with different values for the same model: the inner value
/// counts.
const OF_BOTH: [&str; 5] =
    ["model_type", "architectures", "dtype", "torch_dtype", "transformers_version"];

/// A JSON object. A field that is `null` counts as absent, except for [`Self::contains`].
#[derive(Clone, Debug)]
pub struct Fields {
    /// Path of the object in the file: empty, or `section.`.
    path: String,
    object: Map<String, Value>,
}

/// A type that a field may have.
pub trait FieldValue: Sized {
    /// The name of the type, in error messages.
    const EXPECTED: &'static str;

    /// The value, if it has this type.
    fn of(value: &Value) -> Option<Self>;
}

impl FieldValue for Value {
    const EXPECTED: &'static str = "any value";

    fn of(value: &Value) -> Option<Self> {
        Some(value.clone())
    }
}

impl FieldValue for u32 {
    const EXPECTED: &'static str = "an integer from 0 to 4294967295";

    fn of(value: &Value) -> Option<Self> {
        value.as_u64()?.try_into().ok()
    }
}

impl FieldValue for i64 {
    const EXPECTED: &'static str = "an integer";

    fn of(value: &Value) -> Option<Self> {
        value.as_i64()
    }
}

impl FieldValue for f64 {
    const EXPECTED: &'static str = "a number";

    fn of(value: &Value) -> Option<Self> {
        value.as_f64()
    }
}

impl FieldValue for bool {
    const EXPECTED: &'static str = "true or false";

    fn of(value: &Value) -> Option<Self> {
        value.as_bool()
    }
}

impl FieldValue for String {
    const EXPECTED: &'static str = "a text";

    fn of(value: &Value) -> Option<Self> {
        value.as_str().map(ToOwned::to_owned)
    }
}

impl<T: FieldValue> FieldValue for Vec<T> {
    const EXPECTED: &'static str = "a list";

    fn of(value: &Value) -> Option<Self> {
        value.as_array()?.iter().map(T::of).collect()
    }
}

impl Fields {
    /// The fields of a whole file. The fields of a nested `text_config` are read as if they were not nested.
    ///
    /// # Errors
    /// [`ConfigError::Json`]; [`ConfigError::Type`] for a `text_config` that is no object; [`ConfigError::Disagree`]
    /// for a field that is inside and outside with different values.
    pub fn parse(json: &str) -> Result<Self, ConfigError> {
        let mut fields = Self { path: String::new(), object: serde_json::from_str(json)? };
        let Some(Self { object: nested, .. }) = fields.section("text_config")? else {
            return Ok(fields);
        };
        fields.object.remove("text_config");
        for (name, value) in nested {
            let outer = fields.value(&name);
            let same = outer.is_none_or(|outer| *outer == value || value.is_null());
            if !same && !OF_BOTH.contains(&name.as_str()) {
                let first = format!("text_config.{name}");
                return Err(ConfigError::Disagree { first, second: name });
            }
            if !value.is_null() || !fields.contains(&name) {
                fields.object.insert(name, value);
            }
        }
        Ok(fields)
    }

    /// The field's name, with the sections that contain it.
    #[must_use]
    pub fn path_of(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// Whether there is a field of this name, which may be `null`.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.object.contains_key(name)
    }

    /// A field that may be absent.
    ///
    /// # Errors
    /// [`ConfigError::Type`].
    pub fn find<T: FieldValue>(&self, name: &str) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        match T::of(value) {
            Some(read) => Ok(Some(read)),
            None => Err(self.wrong_type(name, value, T::EXPECTED)),
        }
    }

    /// A field that must be there.
    ///
    /// # Errors
    /// [`ConfigError::Missing`]; [`ConfigError::Type`].
    pub fn need<T: FieldValue>(&self, name: &str) -> Result<T, ConfigError> {
        self.find(name)?.ok_or_else(|| self.missing(name))
    }

    /// A count that must be there, `least..=most`.
    ///
    /// # Errors
    /// As [`Self::need`]; [`ConfigError::OutOfRange`].
    pub fn count(&self, name: &str, least: u32, most: u32) -> Result<u32, ConfigError> {
        let value: u32 = self.need(name)?;
        self.check_range(name, value.into(), least.into(), most.into())?;
        Ok(value)
    }

    /// A number that must be there, `least..=most`.
    ///
    /// # Errors
    /// As [`Self::need`]; [`ConfigError::OutOfRange`].
    pub fn number(&self, name: &str, least: f64, most: f64) -> Result<f64, ConfigError> {
        let value = self.need(name)?;
        self.check_range(name, value, least, most)?;
        Ok(value)
    }

    /// A dimension that must be there with the one value that the kernels are built for.
    ///
    /// # Errors
    /// As [`Self::need`]; [`ConfigError::BadDimension`].
    pub fn dimension(&self, name: &str, expected: u32) -> Result<(), ConfigError> {
        match self.need(name)? {
            value if value == expected => Ok(()),
            value => Err(ConfigError::BadDimension { field: self.path_of(name), value, expected }),
        }
    }

    /// A constant that, if the field is present, must have one value.
    ///
    /// # Errors
    /// [`ConfigError::Type`]; [`ConfigError::BadConstant`].
    pub fn constant(&self, name: &str, expected: f64) -> Result<(), ConfigError> {
        match self.find(name)? {
            Some(value) if value != expected => {
                Err(ConfigError::BadConstant { field: self.path_of(name), value, expected })
            }
            _ => Ok(()),
        }
    }

    /// A method that, if the field is present, must be one of those supported.
    ///
    /// # Errors
    /// [`ConfigError::Unsupported`].
    pub fn one_of(&self, name: &str, supported: &[Value]) -> Result<(), ConfigError> {
        match self.value(name) {
            Some(value) if !supported.contains(value) => Err(ConfigError::Unsupported {
                field: self.path_of(name),
                found: value.to_string(),
                expected: supported.iter().map(Value::to_string).collect::<Vec<_>>().join(" or "),
            }),
            _ => Ok(()),
        }
    }

    /// An object nested in this object.
    ///
    /// # Errors
    /// [`ConfigError::Type`].
    pub fn section(&self, name: &str) -> Result<Option<Self>, ConfigError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Object(object)) => {
                let path = format!("{}.", self.path_of(name));
                Ok(Some(Self { path, object: object.clone() }))
            }
            Some(value) => Err(self.wrong_type(name, value, "an object")),
        }
    }

    /// Refuses a field that is not in `known`, since its effect is unknown.
    ///
    /// # Errors
    /// [`ConfigError::Unsupported`].
    pub fn only(&self, known: &[&str]) -> Result<(), ConfigError> {
        for (name, value) in &self.object {
            if !known.contains(&name.as_str()) && !value.is_null() {
                let (field, found) = (self.path_of(name), value.to_string());
                let expected = format!("one of the fields {}", known.join(", "));
                return Err(ConfigError::Unsupported { field, found, expected });
            }
        }
        Ok(())
    }

    /// The error for a field that must be there.
    #[must_use]
    pub fn missing(&self, name: &str) -> ConfigError {
        ConfigError::Missing { field: self.path_of(name) }
    }

    fn value(&self, name: &str) -> Option<&Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    fn wrong_type(&self, name: &str, value: &Value, expected: &'static str) -> ConfigError {
        ConfigError::Type { field: self.path_of(name), found: value.to_string(), expected }
    }

    fn check_range(
        &self,
        name: &str,
        value: f64,
        least: f64,
        most: f64,
    ) -> Result<(), ConfigError> {
        if (least..=most).contains(&value) {
            return Ok(());
        }
        Err(ConfigError::OutOfRange { field: self.path_of(name), value, least, most })
    }
}
