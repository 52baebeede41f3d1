//! Registering memory, and describing it to peers.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use super::arguments::{Word, Words, bind, same_length};
use super::descriptor::{BLOB, XferDesc, blob, key_words, take_u64};
use super::endpoint::{Endpoint, Inside, failed, unknown};

#[pymethods]
impl Endpoint {
    /// Registers memory of the host or of a GPU; each call returns a new number. `floatType` is an
    /// unused hint.
    #[pyo3(signature = (ptr, size, floatType=None))]
    #[expect(non_snake_case, reason = "a keyword of the interface")]
    fn reg(
        &self,
        py: Python<'_>,
        ptr: Word,
        size: Word,
        floatType: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        let _ = floatType;
        let id = py.detach(|| this.register(ptr.0, size.0));
        Ok(id.map_or((false, 0), |id| (true, id)))
    }

    /// Registers many ranges; all or none.
    fn regv(&self, py: Python<'_>, ptrs: Words, sizes: Words) -> PyResult<(bool, Vec<u64>)> {
        let this = self.inside()?;
        same_length(&[("sizes", sizes.0.len())], ptrs.0.len() as u64)?;
        Ok(py.detach(|| {
            let mut ids = Vec::with_capacity(ptrs.0.len());
            for (ptr, size) in ptrs.0.iter().zip(&sizes.0) {
                let Some(id) = this.register(*ptr, *size) else {
                    ids.into_iter().for_each(|id| {
                        this.memory.remove(id);
                    });
                    return (false, Vec::new());
                };
                ids.push(id);
            }
            (true, ids)
        }))
    }

    /// Ends a registration; returns False if there is none of that number.
    fn dereg(&self, py: Python<'_>, mr_id: Word) -> PyResult<bool> {
        let this = self.inside()?;
        Ok(py.detach(|| this.memory.remove(mr_id.0)))
    }

    /// Registers every object that has `data_ptr()`, `numel()` and `element_size()`, as tensors
    /// have.
    fn register_memory(
        &self,
        py: Python<'_>,
        tensor_list: &Bound<'_, PyList>,
    ) -> PyResult<Vec<XferDesc>> {
        let this = self.inside()?;
        let number = |tensor: &Bound<'_, PyAny>, method: &str| -> PyResult<u64> {
            let found = tensor
                .call_method0(method)
                .and_then(|n| n.extract::<Word>());
            found.map(|word| word.0).map_err(|error| {
                PyRuntimeError::new_err(format!("register_memory: {}: {error}", tensor.get_type()))
            })
        };
        let mut descriptors = Vec::with_capacity(tensor_list.len());
        for tensor in tensor_list.iter() {
            let addr = number(&tensor, "data_ptr")?;
            let count = number(&tensor, "numel")?;
            let size = count.saturating_mul(number(&tensor, "element_size")?);
            let id = py.detach(|| this.register(addr, size));
            let memory = id.and_then(|id| this.memory.get(id));
            let keys = memory.map(|memory| key_words(&memory.region.descriptor()));
            let (lkeys, rkeys) = keys.unwrap_or_default();
            descriptors.push(XferDesc {
                addr,
                size,
                mr_id: id.unwrap_or(u64::MAX),
                lkeys,
                rkeys,
            });
        }
        Ok(descriptors)
    }

    /// Ends the registrations of descriptors.
    fn deregister_memory(&self, desc_list: &Bound<'_, PyList>) -> PyResult<()> {
        let this = self.inside()?;
        for descriptor in desc_list.iter() {
            let id = descriptor.cast::<XferDesc>()?.borrow().mr_id;
            if id != u64::MAX && !this.memory.remove(id) {
                unknown("registration", id);
            }
        }
        Ok(())
    }

    /// Serialises descriptors, for a peer.
    fn get_serialized_descs<'py>(
        &self,
        py: Python<'py>,
        desc_list: &Bound<'_, PyList>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let mut bytes = (desc_list.len() as u64).to_le_bytes().to_vec();
        for descriptor in desc_list.iter() {
            descriptor.cast::<XferDesc>()?.borrow().write_to(&mut bytes);
        }
        Ok(PyBytes::new(py, &bytes))
    }

    /// Deserialises descriptors.
    fn deserialize_descs(&self, serialized_bytes: &Bound<'_, PyBytes>) -> PyResult<Vec<XferDesc>> {
        let mut bytes = serialized_bytes.as_bytes();
        if bytes.is_empty() {
            return Ok(Vec::new());
        }
        let short = || PyRuntimeError::new_err("serialised descriptors are cut short");
        let count = take_u64(&mut bytes).ok_or_else(short)?;
        // Does not reserve memory by the count, which is not trusted.
        (0..count)
            .map(|_| XferDesc::read_from(&mut bytes).ok_or_else(short))
            .collect()
    }

    /// Returns a blob of 64 bytes with which peers read and write `size` bytes at `ptr`. Older
    /// programs pass a connection first.
    #[pyo3(signature = (*args, **kwargs))]
    fn advertise<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<(bool, Bound<'py, PyBytes>)> {
        let this = self.inside()?;
        let values = bind(args, kwargs, "conn_id", &["mr_id", "ptr", "size"])?;
        let numbers: Vec<u64> = values
            .iter()
            .map(|value| Ok(value.extract::<Word>()?.0))
            .collect::<PyResult<_>>()?;
        Ok(match this.describe(numbers[0], numbers[1], numbers[2]) {
            Some(blob) => (true, PyBytes::new(py, &blob)),
            None => (false, PyBytes::new(py, b"")),
        })
    }

    /// Does what `advertise` does, for many ranges.
    #[pyo3(signature = (*args, **kwargs))]
    fn advertisev<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<(bool, Vec<Bound<'py, PyBytes>>)> {
        let this = self.inside()?;
        let names = ["mr_id_v", "ptr_v", "size_v", "num_iovs"];
        let values = bind(args, kwargs, "conn_id", &names)?;
        let list = |at: usize| Ok::<_, PyErr>(values[at].extract::<Words>()?.0);
        let (ids, ptrs, sizes) = (list(0)?, list(1)?, list(2)?);
        let count = values[3].extract::<Word>()?.0;
        let lengths = [
            ("mr_id_v", ids.len()),
            ("ptr_v", ptrs.len()),
            ("size_v", sizes.len()),
        ];
        same_length(&lengths, count)?;
        let mut ok = true;
        let mut blobs = Vec::with_capacity(ids.len());
        for ((id, ptr), size) in ids.into_iter().zip(ptrs).zip(sizes) {
            let blob = this.describe(id, ptr, size);
            ok &= blob.is_some();
            blobs.push(PyBytes::new(py, &blob.unwrap_or([0; BLOB])));
        }
        Ok((ok, blobs))
    }
}

impl Inside {
    pub(super) fn register(&self, ptr: u64, size: u64) -> Option<u64> {
        let registered = self.memory.add(&self.session, ptr, size);
        registered
            .inspect_err(|error| failed("registering memory", error))
            .ok()
    }

    fn describe(&self, id: u64, ptr: u64, size: u64) -> Option<[u8; BLOB]> {
        let Some(memory) = self.memory.get(id) else {
            unknown("registration", id);
            return None;
        };
        Some(blob(ptr, size, &memory.region.descriptor()))
    }
}
