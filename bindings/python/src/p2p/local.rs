//! The calls for two processes of one host.
//!
//! These calls take addresses without a registration, so each call registers memory for as long as
//! it needs the memory. The engine chooses the path, as for all other calls: directly between processes on one
//! host where it can, and otherwise by lanes.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use tcpx::Op;

use super::arguments::{Word, Words, blobs, same_length};
use super::descriptor::{IPC_BLOB, Remote, ipc_blob};
use super::endpoint::{Endpoint, Inside, failed};
use super::memory::Memory;
use super::onesided::Piece;
use super::pending::Started;
use super::twosided::Half;

#[pymethods]
impl Endpoint {
    /// Returns a blob with which a peer reads and writes `size` bytes at `ptr`, until this
    /// endpoint's end.
    fn advertise_ipc<'py>(
        &self,
        py: Python<'py>,
        conn_id: Word,
        ptr: Word,
        size: Word,
    ) -> PyResult<(bool, Bound<'py, PyBytes>)> {
        let this = self.inside()?;
        let _ = conn_id;
        let blob = this.describe_ipc(py, ptr.0, size.0);
        let ok = blob.is_some();
        let blob = PyBytes::new(py, &blob.unwrap_or([0; IPC_BLOB]));
        Ok((ok, blob))
    }

    /// Does what `advertise_ipc` does, for many ranges.
    fn advertisev_ipc<'py>(
        &self,
        py: Python<'py>,
        conn_id: Word,
        ptr_v: Words,
        size_v: Words,
    ) -> PyResult<(bool, Vec<Bound<'py, PyBytes>>)> {
        let this = self.inside()?;
        let _ = conn_id;
        same_length(&[("size_v", size_v.0.len())], ptr_v.0.len() as u64)?;
        let mut ok = true;
        let mut blobs = Vec::with_capacity(ptr_v.0.len());
        for (ptr, size) in ptr_v.0.into_iter().zip(size_v.0) {
            let blob = this.describe_ipc(py, ptr, size);
            ok &= blob.is_some();
            blobs.push(PyBytes::new(py, &blob.unwrap_or([0; IPC_BLOB])));
        }
        Ok((ok, blobs))
    }

    /// Writes to memory that a peer of this host has advertised.
    fn write_ipc(
        &self,
        py: Python<'_>,
        conn_id: Word,
        ptr: Word,
        size: Word,
        info: &Bound<'_, PyBytes>,
    ) -> PyResult<bool> {
        let this = self.inside()?;
        let started = this.local_one(py, Op::Write, conn_id, ptr, size, info)?;
        this.finish(py, started)
    }

    /// Reads from memory that a peer of this host has advertised.
    fn read_ipc(
        &self,
        py: Python<'_>,
        conn_id: Word,
        ptr: Word,
        size: Word,
        info: &Bound<'_, PyBytes>,
    ) -> PyResult<bool> {
        let this = self.inside()?;
        let started = this.local_one(py, Op::Read, conn_id, ptr, size, info)?;
        this.finish(py, started)
    }

    /// Starts writing.
    fn write_ipc_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        ptr: Word,
        size: Word,
        info: &Bound<'_, PyBytes>,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        Ok(this.keep(this.local_one(py, Op::Write, conn_id, ptr, size, info)?))
    }

    /// Starts reading.
    fn read_ipc_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        ptr: Word,
        size: Word,
        info: &Bound<'_, PyBytes>,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        Ok(this.keep(this.local_one(py, Op::Read, conn_id, ptr, size, info)?))
    }

    /// Writes many pieces.
    fn writev_ipc(
        &self,
        py: Python<'_>,
        conn_id: Word,
        ptr_v: Words,
        size_v: Words,
        info_v: &Bound<'_, PyList>,
    ) -> PyResult<bool> {
        let this = self.inside()?;
        let started = this.local_many(py, Op::Write, conn_id, &ptr_v.0, &size_v.0, info_v)?;
        this.finish(py, started)
    }

    /// Reads many pieces.
    fn readv_ipc(
        &self,
        py: Python<'_>,
        conn_id: Word,
        ptr_v: Words,
        size_v: Words,
        info_v: &Bound<'_, PyList>,
    ) -> PyResult<bool> {
        let this = self.inside()?;
        let started = this.local_many(py, Op::Read, conn_id, &ptr_v.0, &size_v.0, info_v)?;
        this.finish(py, started)
    }

    /// Starts writing many pieces.
    fn writev_ipc_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        ptr_v: Words,
        size_v: Words,
        info_v: &Bound<'_, PyList>,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        Ok(this.keep(this.local_many(py, Op::Write, conn_id, &ptr_v.0, &size_v.0, info_v)?))
    }

    /// Starts reading many pieces.
    fn readv_ipc_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        ptr_v: Words,
        size_v: Words,
        info_v: &Bound<'_, PyList>,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        Ok(this.keep(this.local_many(py, Op::Read, conn_id, &ptr_v.0, &size_v.0, info_v)?))
    }

    /// Sends a message from memory that is not registered.
    fn send_ipc(&self, py: Python<'_>, conn_id: Word, ptr: Word, size: Word) -> PyResult<bool> {
        let this = self.inside()?;
        let started = this.local_message(py, Half::Send, conn_id, ptr, size);
        this.finish(py, started)
    }

    /// Receives a message into memory that is not registered.
    fn recv_ipc(&self, py: Python<'_>, conn_id: Word, ptr: Word, size: Word) -> PyResult<bool> {
        let this = self.inside()?;
        let started = this.local_message(py, Half::Receive, conn_id, ptr, size);
        this.finish(py, started)
    }

    /// Starts sending.
    fn send_ipc_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        ptr: Word,
        size: Word,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        Ok(this.keep(this.local_message(py, Half::Send, conn_id, ptr, size)))
    }

    /// Starts receiving.
    fn recv_ipc_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        ptr: Word,
        size: Word,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        Ok(this.keep(this.local_message(py, Half::Receive, conn_id, ptr, size)))
    }
}

impl Inside {
    fn describe_ipc(&self, py: Python<'_>, ptr: u64, size: u64) -> Option<[u8; IPC_BLOB]> {
        let memory = py.detach(|| self.memory.add_for_good(&self.session, ptr, size));
        let memory = memory.inspect_err(|error| failed("registering memory", error));
        Some(ipc_blob(ptr, size, &memory.ok()?.region.descriptor()))
    }

    /// Returns memory for one transfer.
    fn borrow(&self, ptr: u64, size: u64) -> Option<Arc<Memory>> {
        let memory = self.memory.borrow(&self.session, ptr, size);
        let memory = memory.inspect_err(|error| failed("registering memory", error));
        memory.ok()
    }

    fn local_one(
        &self,
        py: Python<'_>,
        op: Op,
        conn_id: Word,
        ptr: Word,
        size: Word,
        info: &Bound<'_, PyBytes>,
    ) -> PyResult<Option<Started>> {
        let remote = Remote::from_ipc_blob(info.as_bytes())?;
        Ok(self.local(py, op, conn_id, vec![(ptr.0, size.0, remote)]))
    }

    fn local_many(
        &self,
        py: Python<'_>,
        op: Op,
        conn_id: Word,
        ptrs: &[u64],
        sizes: &[u64],
        infos: &Bound<'_, PyList>,
    ) -> PyResult<Option<Started>> {
        let lengths = [("size_v", sizes.len()), ("info_v", infos.len())];
        same_length(&lengths, ptrs.len() as u64)?;
        let mut rows = Vec::with_capacity(ptrs.len());
        for ((ptr, size), info) in ptrs.iter().zip(sizes).zip(blobs(infos)?) {
            rows.push((*ptr, *size, Remote::from_ipc_blob(info.as_bytes())?));
        }
        Ok(self.local(py, op, conn_id, rows))
    }

    fn local(
        &self,
        py: Python<'_>,
        op: Op,
        conn_id: Word,
        rows: Vec<(u64, u64, Remote)>,
    ) -> Option<Started> {
        let mut pieces = Vec::with_capacity(rows.len());
        for (address, len, remote) in rows {
            pieces.push(Piece {
                memory: self.borrow(address, len)?,
                address,
                remote,
                len,
            });
        }
        self.start(py, op, conn_id.0, pieces)
    }

    fn local_message(
        &self,
        py: Python<'_>,
        half: Half,
        conn_id: Word,
        ptr: Word,
        size: Word,
    ) -> Option<Started> {
        let memory = self.borrow(ptr.0, size.0)?;
        self.message(py, half, conn_id.0, vec![(memory, ptr.0, size.0)])
    }
}
