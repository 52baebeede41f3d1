//! Converts numbers and lists from Python: a wrong argument is always a `TypeError`.

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PySequence, PyTuple};

/// A whole number from 0 to 2^64 - 1: an int, a numpy integer, a bool.
#[derive(Clone, Copy)]
pub(super) struct Word(pub(super) u64);

impl<'py> FromPyObject<'_, 'py> for Word {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object.extract::<u64>().map(Word).map_err(|_| {
            PyTypeError::new_err(format!(
                "expected a whole number from 0 to 2**64 - 1, not {}",
                describe(&object)
            ))
        })
    }
}

/// Whole numbers in a list, a tuple, a range or a numpy array.
pub(super) struct Words(pub(super) Vec<u64>);

impl<'py> FromPyObject<'_, 'py> for Words {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        // numpy converts itself to a list much faster than element by element.
        let listed = match object.getattr_opt("tolist")? {
            Some(tolist) => tolist.call0()?,
            None => object.to_owned(),
        };
        let unfit = || {
            PyTypeError::new_err(format!(
                "expected a list of whole numbers, not {}",
                describe(&object)
            ))
        };
        if listed.is_instance_of::<PyBytes>() {
            return Err(unfit());
        }
        let numbers = listed.cast::<PySequence>().map_err(|_| unfit())?;
        let mut words = Vec::with_capacity(numbers.len()?);
        for number in numbers.try_iter()? {
            words.push(number?.extract::<Word>()?.0);
        }
        Ok(Self(words))
    }
}

fn describe(object: &Bound<'_, PyAny>) -> String {
    match object.repr() {
        Ok(text) if text.len().unwrap_or(0) < 100 => text.to_string(),
        _ => format!("{}", object.get_type()),
    }
}

/// Checks that lists have the expected length.
pub(super) fn same_length(what: &[(&str, usize)], expected: u64) -> PyResult<()> {
    for (name, len) in what {
        if *len as u64 != expected {
            return Err(PyRuntimeError::new_err(format!(
                "{name} has {len} items, expected {expected}"
            )));
        }
    }
    Ok(())
}

/// Returns the bytes of every item of a list.
pub(super) fn blobs<'a>(list: &'a Bound<'_, PyList>) -> PyResult<Vec<Bound<'a, PyBytes>>> {
    list.iter()
        .map(|item| Ok(item.cast_into::<PyBytes>()?))
        .collect()
}

/// Binds arguments by position and by name, for calls whose parameters differ between versions of
/// the interface: those in `optional_first` may be left out.
pub(super) fn bind<'py>(
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
    optional_first: &str,
    names: &[&str],
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let named = kwargs.map_or(0, |kwargs| kwargs.len());
    let with_first = args.len() + named > names.len()
        || kwargs.is_some_and(|kwargs| kwargs.contains(optional_first).unwrap_or(false));
    let mut all = Vec::with_capacity(names.len() + 1);
    all.extend(with_first.then_some(optional_first));
    all.extend(names);
    let wrong = || {
        PyTypeError::new_err(format!(
            "expected ({}), optionally with {optional_first} in front",
            names.join(", ")
        ))
    };
    if args.len() + named != all.len() {
        return Err(wrong());
    }
    let mut values = Vec::with_capacity(all.len());
    for (position, name) in all.iter().enumerate() {
        let by_name = || kwargs.and_then(|kwargs| kwargs.get_item(name).ok().flatten());
        let value = args.get_item(position).ok().or_else(by_name);
        values.push(value.ok_or_else(wrong)?);
    }
    // The leading parameter has no effect here.
    Ok(values.split_off(usize::from(with_first)))
}
