//! Messages: one side sends, the other receives, in the order of their calls on a connection.

use std::sync::Arc;

use pyo3::prelude::*;

use super::arguments::{Word, Words, same_length};
use super::endpoint::{Endpoint, Inside, failed, unknown};
use super::memory::Memory;
use super::pending::Started;

/// The side of a message.
#[derive(Clone, Copy)]
pub(super) enum Half {
    Send,
    Receive,
}

#[pymethods]
impl Endpoint {
    /// Sends a message; True once the peer has received it.
    fn send(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id: Word,
        ptr: Word,
        size: Word,
    ) -> PyResult<bool> {
        let this = self.inside()?;
        let rows = vec![(mr_id.0, ptr.0, size.0)];
        this.finish(py, this.rows(py, Half::Send, conn_id.0, rows))
    }

    /// Receives a message of at most `size` bytes.
    fn recv(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id: Word,
        ptr: Word,
        size: Word,
    ) -> PyResult<bool> {
        let this = self.inside()?;
        let rows = vec![(mr_id.0, ptr.0, size.0)];
        this.finish(py, this.rows(py, Half::Receive, conn_id.0, rows))
    }

    /// Starts sending a message.
    fn send_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id: Word,
        ptr: Word,
        size: Word,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        let rows = vec![(mr_id.0, ptr.0, size.0)];
        Ok(this.keep(this.rows(py, Half::Send, conn_id.0, rows)))
    }

    /// Starts receiving a message.
    fn recv_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id: Word,
        ptr: Word,
        size: Word,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        let rows = vec![(mr_id.0, ptr.0, size.0)];
        Ok(this.keep(this.rows(py, Half::Receive, conn_id.0, rows)))
    }

    /// Sends many messages.
    fn sendv(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id_v: Words,
        data_ptr_v: Words,
        size_v: Words,
        num_iovs: Word,
    ) -> PyResult<bool> {
        let this = self.inside()?;
        let rows = rows(mr_id_v, data_ptr_v, size_v, num_iovs)?;
        this.finish(py, this.rows(py, Half::Send, conn_id.0, rows))
    }

    /// Receives many messages.
    fn recvv(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id_v: Words,
        data_ptr_v: Words,
        size_v: Words,
        num_iovs: Word,
    ) -> PyResult<bool> {
        let this = self.inside()?;
        let rows = rows(mr_id_v, data_ptr_v, size_v, num_iovs)?;
        this.finish(py, this.rows(py, Half::Receive, conn_id.0, rows))
    }

    /// Starts sending many messages.
    fn sendv_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id_v: Words,
        data_ptr_v: Words,
        size_v: Words,
        num_iovs: Word,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        let rows = rows(mr_id_v, data_ptr_v, size_v, num_iovs)?;
        Ok(this.keep(this.rows(py, Half::Send, conn_id.0, rows)))
    }

    /// Starts receiving many messages.
    fn recvv_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id_v: Words,
        data_ptr_v: Words,
        size_v: Words,
        num_iovs: Word,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        let rows = rows(mr_id_v, data_ptr_v, size_v, num_iovs)?;
        Ok(this.keep(this.rows(py, Half::Receive, conn_id.0, rows)))
    }
}

fn rows(ids: Words, ptrs: Words, sizes: Words, count: Word) -> PyResult<Vec<(u64, u64, u64)>> {
    let lengths = [
        ("mr_id_v", ids.0.len()),
        ("data_ptr_v", ptrs.0.len()),
        ("size_v", sizes.0.len()),
    ];
    same_length(&lengths, count.0)?;
    let rows = ids.0.into_iter().zip(ptrs.0).zip(sizes.0);
    Ok(rows.map(|((id, ptr), size)| (id, ptr, size)).collect())
}

impl Inside {
    /// Starts messages over rows of (registration, address, bytes).
    fn rows(
        &self,
        py: Python<'_>,
        half: Half,
        conn_id: u64,
        rows: Vec<(u64, u64, u64)>,
    ) -> Option<Started> {
        let rows = rows.into_iter().map(|(id, address, len)| {
            let memory = self.memory.get(id);
            if memory.is_none() {
                unknown("registration", id);
            }
            Some((memory?, address, len))
        });
        self.message(py, half, conn_id, rows.collect::<Option<_>>()?)
    }

    /// Starts messages over rows.
    pub(super) fn message(
        &self,
        py: Python<'_>,
        half: Half,
        conn_id: u64,
        rows: Vec<Row>,
    ) -> Option<Started> {
        let Some(connection) = self.connections.get(conn_id) else {
            unknown("connection", conn_id);
            return None;
        };
        if let Some(error) = connection.lost() {
            failed("starting a message", &error);
            return None;
        }
        let mut parts = Vec::with_capacity(rows.len());
        for (memory, address, len) in &rows {
            let (slice, len) = (
                memory.at(*address),
                usize::try_from(*len).unwrap_or(usize::MAX),
            );
            let (session, peer) = (&self.session, &connection.peer);
            let part = py.detach(|| match half {
                Half::Send => session.send(peer, slice, len, connection.send_tag),
                Half::Receive => session.recv(peer, slice, len, connection.recv_tag),
            });
            match part {
                Ok(part) => parts.push(part),
                Err(error) => {
                    failed("starting a message", &error);
                    return None;
                }
            }
        }
        Some(Started {
            parts,
            _memory: rows.into_iter().map(|(memory, ..)| memory).collect(),
            on: Some(connection),
        })
    }
}

/// Memory, an address in it, and a length from there.
type Row = (Arc<Memory>, u64, u64);
