//! Converts Python arguments, with errors that name the argument and the expected type.

use std::ops::Deref;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyInt, PyMemoryView};

use crate::native::{Events, Peer, Region, RemoteRegion};

/// Defines conversions for arguments, by name, for `#[pyo3(from_py_with = ...)]`. PyO3's own errors
/// put the name into a note, which Python 3.10 does not have and `str` does not show.
macro_rules! arguments {
    ($($(#[$doc:meta])* $function:ident($name:literal) -> $type:ty;)*) => {$(
        $(#[$doc])*
        pub(crate) fn $function<'py>(object: &Bound<'py, PyAny>) -> PyResult<$type> {
            named($name, object)
        }
    )*};
}

arguments! {
    /// A peer.
    peer("peer") -> Bound<'py, Peer>;
    /// A local region.
    region("region") -> Bound<'py, Region>;
    /// A local region.
    local("local") -> Bound<'py, Region>;
    /// A peer's region.
    remote("remote") -> Bound<'py, RemoteRegion>;
    /// A descriptor of an event loop.
    events("events") -> Bound<'py, Events>;
    /// Connection info.
    info("info") -> Bytes<'py>;
    /// A region descriptor.
    descriptor("descriptor") -> Bytes<'py>;
    /// A message.
    message("message") -> Bytes<'py>;
    /// A message, or none.
    notify("notify") -> Option<Bytes<'py>>;
    /// A text.
    op("op") -> String;
    /// A text, or none.
    optional_name("name") -> Option<String>;
    /// A text.
    name("name") -> String;
    /// Bytes.
    nbytes("nbytes") -> usize;
    /// A number of bytes, or all.
    optional_nbytes("nbytes") -> Option<usize>;
    /// An offset in bytes.
    offset("offset") -> usize;
    /// A tag.
    tag("tag") -> u64;
    /// A key of the caller's.
    key("key") -> u64;
    /// A maximum number, or all.
    limit("limit") -> Option<usize>;
    /// Seconds, or no limit.
    timeout("timeout") -> Option<f64>;
}

/// A type that can be converted from an argument.
pub(crate) trait Argument<'py>: Sized {
    /// The expected type in error messages.
    const EXPECTED: &'static str;
    /// Returns `None` if the object is of another type.
    fn convert(object: &Bound<'py, PyAny>) -> Option<Self>;
}

macro_rules! argument {
    ($($type:ty, $expected:literal, $convert:expr;)*) => {$(
        impl<'py> Argument<'py> for $type {
            const EXPECTED: &'static str = $expected;
            fn convert(object: &Bound<'py, PyAny>) -> Option<Self> {
                let convert: fn(&Bound<'py, PyAny>) -> Option<Self> = $convert;
                convert(object)
            }
        }
    )*};
}

argument! {
    Bound<'py, Peer>, "a tcpx.Peer", |object| object.cast().ok().cloned();
    Bound<'py, Region>, "a tcpx.Region", |object| object.cast().ok().cloned();
    Bound<'py, RemoteRegion>, "a tcpx.RemoteRegion", |object| object.cast().ok().cloned();
    Bound<'py, Events>, "a tcpx.Events", |object| object.cast().ok().cloned();
    Bytes<'py>, "bytes, a bytearray or a memoryview", Bytes::new;
    String, "a str", |object| object.extract().ok();
    usize, "a whole number, 0 or more", |object| object.extract().ok();
    u64, "a whole number from 0 to 2**64 - 1", |object| object.extract().ok();
    f64, "a number of seconds, or None", |object| object.extract().ok();
}

impl<'py, T: Argument<'py>> Argument<'py> for Option<T> {
    const EXPECTED: &'static str = T::EXPECTED;
    fn convert(object: &Bound<'py, PyAny>) -> Option<Self> {
        match object.is_none() {
            true => Some(None),
            false => T::convert(object).map(Some),
        }
    }
}

/// Converts an argument. A whole number out of range has the right type and a wrong value.
fn named<'py, T: Argument<'py>>(name: &str, object: &Bound<'py, PyAny>) -> PyResult<T> {
    T::convert(object).ok_or_else(|| {
        let text = format!("{name}: expected {}, got {}", T::EXPECTED, describe(object));
        match object.is_instance_of::<PyInt>() && T::EXPECTED.starts_with("a whole") {
            true => PyValueError::new_err(text),
            false => PyTypeError::new_err(text),
        }
    })
}

/// Bytes as `bytes`, a `bytearray`, a `memoryview` or any other buffer. All but `bytes` are copied.
pub(crate) struct Bytes<'py>(Bound<'py, PyBytes>);

impl<'py> Bytes<'py> {
    fn new(object: &Bound<'py, PyAny>) -> Option<Self> {
        if let Ok(bytes) = object.cast::<PyBytes>() {
            return Some(Self(bytes.clone()));
        }
        let view = PyMemoryView::from(object).ok()?;
        let copied = view.call_method0("tobytes").ok()?;
        copied.cast_into().ok().map(Self)
    }
}

impl Deref for Bytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// Converts offsets from a list, a tuple, a range or an array of whole numbers; errors name the
/// argument and the wrong element. Arrays are converted to lists first, which is many times faster
/// than reading one element after the other.
pub(crate) fn offsets(name: &str, numbers: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let listed = match numbers.getattr_opt("tolist")? {
        Some(tolist) => tolist.call0()?,
        None => numbers.clone(),
    };
    let is_mask = |first: PyResult<Bound<'_, PyAny>>| {
        first.is_ok_and(|first| first.is_instance_of::<PyBool>())
    };
    if let Ok(offsets) = listed.extract()
        && !is_mask(listed.get_item(0))
    {
        return Ok(offsets);
    }
    Err(wrong_offset(name, numbers, &listed)?)
}

/// Builds the error that names the wrong offset.
fn wrong_offset(
    name: &str,
    numbers: &Bound<'_, PyAny>,
    listed: &Bound<'_, PyAny>,
) -> PyResult<PyErr> {
    let expected = "expected a sequence of offsets (whole numbers, 0 or more)";
    let Ok(items) = listed.try_iter() else {
        let got = describe(numbers);
        return Ok(PyTypeError::new_err(format!(
            "{name}: {expected}, got {got}"
        )));
    };
    for (index, item) in items.enumerate() {
        let item = item?;
        let is_whole = !item.is_instance_of::<PyBool>() && item.hasattr("__index__")?;
        let text = format!("{name}[{index}]: {expected}, got {}", describe(&item));
        if !is_whole {
            return Ok(PyTypeError::new_err(text));
        }
        if item.extract::<usize>().is_err() {
            return Ok(PyValueError::new_err(text));
        }
    }
    let got = describe(numbers);
    Ok(PyTypeError::new_err(format!(
        "{name}: {expected}, got {got}"
    )))
}

/// Formats a value for error messages: itself if it is short, else its type.
pub(crate) fn describe(object: &Bound<'_, PyAny>) -> String {
    let kind = object.get_type();
    let kind = kind
        .qualname()
        .map_or_else(|_| "?".into(), |name| name.to_string());
    match object.repr() {
        Ok(text) if text.len().unwrap_or(usize::MAX) <= 60 => format!("{text} ({kind})"),
        _ => kind,
    }
}
