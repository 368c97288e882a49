//! Strict access to parsed JSON: every failure names the key path.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::Error;

/// One JSON object together with the path that leads to it.
#[derive(Clone)]
pub(crate) struct Object<'a> {
    document: &'static str,
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    /// The top level of `document`.
    pub(crate) fn root(document: &'static str, value: &'a Value) -> Result<Self, Error> {
        match value.as_object() {
            Some(map) => Ok(Self { document, path: String::new(), map }),
            None => Err(Error::Value {
                document,
                key: "(top level)".into(),
                problem: format!("must be an object, not {}", kind(value)),
            }),
        }
    }

    /// The full path of `key`.
    pub(crate) fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// An error about `key`.
    pub(crate) fn error(&self, key: &str, problem: impl Into<String>) -> Error {
        Error::Value { document: self.document, key: self.path_of(key), problem: problem.into() }
    }

    /// The value of `key`; `null` counts as absent, as it does in configuration classes with `None` defaults.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether `key` is written down at all, be it as `null`.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The keys, in order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.map.keys().map(String::as_str)
    }

    /// The object under `key`, where there is one.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Object<'a>>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_object() {
            Some(map) => Ok(Some(Object { document: self.document, path: self.path_of(key), map })),
            None => Err(self.wrong_kind(key, "an object", value)),
        }
    }

    /// Entry `index` of the list under `key`, which must be an object.
    pub(crate) fn entry(&self, key: &str, index: usize, value: &'a Value) -> Result<Object<'a>, Error> {
        let key = format!("{key}[{index}]");
        match value.as_object() {
            Some(map) => Ok(Object { document: self.document, path: self.path_of(&key), map }),
            None => Err(self.wrong_kind(&key, "an object", value)),
        }
    }

    /// The string under `key`, where there is one.
    pub(crate) fn string(&self, key: &str) -> Result<Option<&'a str>, Error> {
        self.get(key).map(|v| v.as_str().ok_or_else(|| self.wrong_kind(key, "a string", v))).transpose()
    }

    /// The truth value under `key`, where there is one.
    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        self.get(key).map(|v| v.as_bool().ok_or_else(|| self.wrong_kind(key, "true or false", v))).transpose()
    }

    /// The number under `key`, where there is one.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, Error> {
        self.get(key).map(|v| v.as_f64().ok_or_else(|| self.wrong_kind(key, "a number", v))).transpose()
    }

    /// The list under `key`, where there is one.
    pub(crate) fn list(&self, key: &str) -> Result<Option<&'a [Value]>, Error> {
        let list =
            |v: &'a Value| v.as_array().map(Vec::as_slice).ok_or_else(|| self.wrong_kind(key, "a list", v));
        self.get(key).map(list).transpose()
    }

    /// The positive whole number under `key`, at most `limit`, where there is one.
    pub(crate) fn count(&self, key: &str, limit: usize) -> Result<Option<usize>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let count = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0);
        let count = count.ok_or_else(|| self.wrong_kind(key, "a positive whole number", value))?;
        if count > limit {
            return Err(self.error(key, format!("is {count}; at most {limit} is supported")));
        }
        Ok(Some(count))
    }

    /// The whole number under `key`, zero included, at most `limit`, where there is one.
    pub(crate) fn whole(&self, key: &str, limit: usize) -> Result<Option<usize>, Error> {
        if self.get(key).and_then(Value::as_u64) == Some(0) { Ok(Some(0)) } else { self.count(key, limit) }
    }

    /// The positive whole number under `key`, which must be there.
    pub(crate) fn need(&self, key: &str, limit: usize) -> Result<usize, Error> {
        self.count(key, limit)?.ok_or_else(|| self.absent(key))
    }

    /// Refuses keys that are not in `known`: a misspelt one would be passed over silently.
    pub(crate) fn only(&self, known: &[&str]) -> Result<(), Error> {
        match self.keys().find(|key| !known.contains(key)) {
            Some(key) => {
                Err(self.error(key, format!("is not a known key; known here: {}", known.join(", "))))
            }
            None => Ok(()),
        }
    }

    /// The error for an absent `key`.
    pub(crate) fn absent(&self, key: &str) -> Error {
        self.error(key, "is absent, and no default is assumed: add it")
    }

    fn wrong_kind(&self, key: &str, wanted: &str, found: &Value) -> Error {
        self.error(key, format!("must be {wanted}, not {}", kind(found)))
    }
}

/// A whole number, however it is spelled: `2e12` is one as much as `2000000000000`.
pub(crate) fn whole(value: &Value) -> Option<u64> {
    /// Above, floats have gaps wider than one, so a whole one says little of what was meant.
    const EXACT: f64 = (1u64 << 53) as f64;
    value.as_u64().or_else(|| {
        value.as_f64().filter(|v| v.fract() == 0.0 && (0.0..=EXACT).contains(v)).map(|v| v as u64)
    })
}

/// A short description of a value for messages; long texts are cut.
pub(crate) fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(b) => b.to_string(),
        Value::Number(n) => n.to_string(),
        Value::String(s) => format!("the string {:?}", s.chars().take(40).collect::<String>()),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}

/// Parses JSON, refusing an object that holds one key twice with different values: `serde_json` would keep the last without a word.
pub(crate) fn parse(text: &str) -> serde_json::Result<Value> {
    serde_json::from_str(text).map(|Unambiguous(value)| value)
}

/// A value in which every key has one meaning.
struct Unambiguous(Value);

impl<'de> Deserialize<'de> for Unambiguous {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue).map(Unambiguous)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Unambiguous(value)) = seq.next_element()? {
            list.push(value);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some((key, Unambiguous(value))) = access.next_entry::<String, _>()? {
            if map.get(&key).is_some_and(|earlier| *earlier != value) {
                return Err(A::Error::custom(format!(
                    "the key `{key}` is there twice, with different values"
                )));
            }
            map.insert(key, value);
        }
        Ok(map.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_may_be_spelled_as_floats() {
        let read = |text: &str| whole(&parse(text).unwrap());
        for (text, found) in [
            ("2000000000000", Some(2_000_000_000_000)),
            ("2000000000000.0", Some(2_000_000_000_000)),
            ("2e12", Some(2_000_000_000_000)),
            ("18446744073709551615", Some(u64::MAX)),
            ("0.5", None),
            ("-1.0", None),
            ("1e300", None),
            ("\"1\"", None),
        ] {
            assert_eq!(read(text), found, "{text}");
        }
    }

    #[test]
    fn a_key_has_one_value() {
        let text = r#"{"a": [1, -2, 0.1, 1e300, true, null, "x\n", {"b": 18446744073709551615}], "c": {"a": 1}, "c": {"a": 1}}"#;
        assert_eq!(parse(text).unwrap(), serde_json::from_str::<Value>(text).unwrap());
        for twice in [r#"{"a": 1, "a": 2}"#, r#"{"a": [{"b": {}, "a": 1, "b": []}]}"#] {
            assert!(parse(twice).unwrap_err().to_string().contains("twice"), "{twice}");
        }
        assert!(parse(&"[".repeat(100_000)).unwrap_err().to_string().contains("recursion"));
    }
}
