//! Reading and writing peers' memory.

use std::sync::Arc;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use tcpx::{Op, Segment};

use super::arguments::{Word, Words, blobs, same_length};
use super::descriptor::{Remote, XferDesc};
use super::endpoint::{Endpoint, Inside, failed, unknown};
use super::memory::Memory;
use super::pending::{Known, Started};
use crate::blocking::{self, Ended};

/// One piece of a transfer.
pub(super) struct Piece {
    pub(super) memory: Arc<Memory>,
    pub(super) address: u64,
    pub(super) remote: Remote,
    pub(super) len: u64,
}

#[pymethods]
impl Endpoint {
    /// Writes to the peer's memory; returns True once every byte has arrived.
    fn write(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id: Word,
        ptr: Word,
        size: Word,
        meta: &Bound<'_, PyBytes>,
    ) -> PyResult<bool> {
        let this = self.inside()?;
        let remote = Remote::from_blob(meta.as_bytes())?;
        let piece = (mr_id.0, ptr.0, size.0, remote);
        this.finish(py, this.one(py, Op::Write, conn_id, piece))
    }

    /// Reads from the peer's memory; returns True once every byte has arrived.
    fn read(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id: Word,
        ptr: Word,
        size: Word,
        meta: &Bound<'_, PyBytes>,
    ) -> PyResult<bool> {
        let this = self.inside()?;
        let remote = Remote::from_blob(meta.as_bytes())?;
        let piece = (mr_id.0, ptr.0, size.0, remote);
        this.finish(py, this.one(py, Op::Read, conn_id, piece))
    }

    /// Starts writing to the peer's memory.
    fn write_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id: Word,
        ptr: Word,
        size: Word,
        meta: &Bound<'_, PyBytes>,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        let remote = Remote::from_blob(meta.as_bytes())?;
        let piece = (mr_id.0, ptr.0, size.0, remote);
        Ok(this.keep(this.one(py, Op::Write, conn_id, piece)))
    }

    /// Starts reading from the peer's memory.
    fn read_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id: Word,
        ptr: Word,
        size: Word,
        meta: &Bound<'_, PyBytes>,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        let remote = Remote::from_blob(meta.as_bytes())?;
        let piece = (mr_id.0, ptr.0, size.0, remote);
        Ok(this.keep(this.one(py, Op::Read, conn_id, piece)))
    }

    /// Writes many pieces; returns True once every byte has arrived.
    #[expect(clippy::too_many_arguments, reason = "those of the interface")]
    fn writev(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id_v: Words,
        ptr_v: Words,
        size_v: Words,
        meta_blob_v: &Bound<'_, PyList>,
        num_iovs: Word,
    ) -> PyResult<bool> {
        let this = self.inside()?;
        let lists = (mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs);
        let started = this.many(py, Op::Write, conn_id, lists)?;
        this.finish(py, started)
    }

    /// Reads many pieces; returns True once every byte has arrived.
    #[expect(clippy::too_many_arguments, reason = "those of the interface")]
    fn readv(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id_v: Words,
        ptr_v: Words,
        size_v: Words,
        meta_blob_v: &Bound<'_, PyList>,
        num_iovs: Word,
    ) -> PyResult<bool> {
        let this = self.inside()?;
        let lists = (mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs);
        let started = this.many(py, Op::Read, conn_id, lists)?;
        this.finish(py, started)
    }

    /// Starts writing many pieces.
    #[expect(clippy::too_many_arguments, reason = "those of the interface")]
    fn writev_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id_v: Words,
        ptr_v: Words,
        size_v: Words,
        meta_blob_v: &Bound<'_, PyList>,
        num_iovs: Word,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        let lists = (mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs);
        Ok(this.keep(this.many(py, Op::Write, conn_id, lists)?))
    }

    /// Starts reading many pieces.
    #[expect(clippy::too_many_arguments, reason = "those of the interface")]
    fn readv_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id_v: Words,
        ptr_v: Words,
        size_v: Words,
        meta_blob_v: &Bound<'_, PyList>,
        num_iovs: Word,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        let lists = (mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs);
        Ok(this.keep(this.many(py, Op::Read, conn_id, lists)?))
    }

    /// Starts a transfer between lists of descriptors; `op_name` is "read" or "write". The local
    /// side determines the lengths.
    fn transfer(
        &self,
        py: Python<'_>,
        conn_id: Word,
        op_name: &str,
        local_desc_list: &Bound<'_, PyList>,
        remote_desc_list: &Bound<'_, PyList>,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        let op = match op_name {
            "read" => Op::Read,
            "write" => Op::Write,
            _ => {
                return Err(PyRuntimeError::new_err(format!(
                    "Invalid op_name: {op_name}"
                )));
            }
        };
        if this.connections.get(conn_id.0).is_none() {
            return Err(PyRuntimeError::new_err(format!(
                "Invalid conn_id: {}",
                conn_id.0
            )));
        }
        let count = local_desc_list.len();
        same_length(
            &[("remote_desc_list", remote_desc_list.len())],
            count as u64,
        )?;
        let mut pieces = Vec::with_capacity(count);
        for (local, remote) in local_desc_list.iter().zip(remote_desc_list.iter()) {
            let (local, remote) = (
                local.cast::<XferDesc>()?.borrow(),
                remote.cast::<XferDesc>()?.borrow(),
            );
            let memory = this
                .memory
                .get(local.mr_id)
                .filter(|memory| memory.covers(local.addr, local.size))
                .or_else(|| this.memory.find(local.addr, local.size))
                .ok_or_else(|| {
                    PyRuntimeError::new_err(format!(
                        "{} bytes at {:#x} are not registered (mr_id {})",
                        local.size, local.addr, local.mr_id
                    ))
                })?;
            pieces.push(Piece {
                memory,
                address: local.addr,
                remote: Remote::from_keys((remote.addr, local.size), &remote.lkeys, &remote.rkeys)?,
                len: local.size,
            });
        }
        Ok(this.keep(this.start(py, op, conn_id.0, pieces)))
    }

    /// Returns whether a transfer has not failed, and whether it is done. A failed one is forgotten
    /// afterwards.
    fn poll_async(&self, py: Python<'_>, transfer_id: Word) -> PyResult<(bool, bool)> {
        let this = self.inside()?;
        Ok(match py.detach(|| this.pending.poll(transfer_id.0)) {
            Known::Done => (true, true),
            Known::InFlight => (true, false),
            Known::Failed(error) => {
                failed("a transfer", &error);
                (false, true)
            }
            Known::Nothing => (false, true),
        })
    }
}

type Lists<'a, 'py> = (Words, Words, Words, &'a Bound<'py, PyList>, Word);

impl Inside {
    fn one(
        &self,
        py: Python<'_>,
        op: Op,
        conn_id: Word,
        (id, address, len, remote): (u64, u64, u64, Remote),
    ) -> Option<Started> {
        let Some(memory) = self.memory.get(id) else {
            unknown("registration", id);
            return None;
        };
        let piece = Piece {
            memory,
            address,
            remote,
            len,
        };
        self.start(py, op, conn_id.0, vec![piece])
    }

    fn many(
        &self,
        py: Python<'_>,
        op: Op,
        conn_id: Word,
        (ids, ptrs, sizes, metas, count): Lists<'_, '_>,
    ) -> PyResult<Option<Started>> {
        let lengths = [
            ("mr_id_v", ids.0.len()),
            ("ptr_v", ptrs.0.len()),
            ("size_v", sizes.0.len()),
            ("meta_blob_v", metas.len()),
        ];
        same_length(&lengths, count.0)?;
        let mut pieces = Vec::with_capacity(ids.0.len());
        for (i, meta) in blobs(metas)?.iter().enumerate() {
            let remote = Remote::from_blob(meta.as_bytes())?;
            let Some(memory) = self.memory.get(ids.0[i]) else {
                unknown("registration", ids.0[i]);
                return Ok(None);
            };
            pieces.push(Piece {
                memory,
                address: ptrs.0[i],
                remote,
                len: sizes.0[i],
            });
        }
        Ok(self.start(py, op, conn_id.0, pieces))
    }

    /// Starts a transfer; reports on stderr why it cannot.
    pub(super) fn start(
        &self,
        py: Python<'_>,
        op: Op,
        conn_id: u64,
        pieces: Vec<Piece>,
    ) -> Option<Started> {
        let Some(connection) = self.connections.get(conn_id) else {
            unknown("connection", conn_id);
            return None;
        };
        let segments = pieces.iter().map(|piece| Segment {
            local: piece.memory.at(piece.address),
            remote: piece.remote.region.at(piece.remote.offset),
            len: usize::try_from(piece.len).unwrap_or(usize::MAX),
        });
        let started = py.detach(|| {
            let transfer = self.session.prepare(op, &connection.peer, segments)?;
            transfer.post()?;
            Ok::<_, tcpx::Error>(transfer)
        });
        match started {
            Ok(transfer) => Some(Started {
                parts: vec![transfer],
                _memory: pieces.into_iter().map(|piece| piece.memory).collect(),
                on: None,
            }),
            Err(error) => {
                failed("starting a transfer", &error);
                None
            }
        }
    }

    /// Assigns a number to a started transfer.
    pub(super) fn keep(&self, started: Option<Started>) -> (bool, u64) {
        started.map_or((false, 0), |started| (true, self.pending.add(started)))
    }

    /// Waits for the end of a started transfer.
    pub(super) fn finish(&self, py: Python<'_>, started: Option<Started>) -> PyResult<bool> {
        let Some(started) = started else {
            return Ok(false);
        };
        let wait = |part: &tcpx::Transfer, slice| {
            let ended = part.wait(slice);
            match started.cut_off() {
                Some(error) if !part.poll().is_terminal() => Err(error),
                _ => ended,
            }
        };
        for part in &started.parts {
            match blocking::wait(py, None, |slice| wait(part, slice)) {
                Ok(()) => {}
                Err(Ended::Raised(raised)) => return Err(raised),
                Err(Ended::Engine(error)) => {
                    failed("a transfer", &error);
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}
