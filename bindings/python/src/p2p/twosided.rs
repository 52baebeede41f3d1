//! Messages: one side sends, the other receives, in the order of their calls on a connection.

use pyo3::prelude::*;

use super::arguments::{Word, Words, same_length};
use super::endpoint::{Endpoint, failed, unknown};
use super::pending::{Started, Temporary};

/// Which half of a message.
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
        let parts = [(mr_id.0, ptr.0, size.0)];
        self.finish(
            py,
            self.message(py, Half::Send, conn_id.0, &parts, Vec::new()),
        )
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
        let parts = [(mr_id.0, ptr.0, size.0)];
        self.finish(
            py,
            self.message(py, Half::Receive, conn_id.0, &parts, Vec::new()),
        )
    }

    /// Starts sending a message.
    fn send_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id: Word,
        ptr: Word,
        size: Word,
    ) -> (bool, u64) {
        let parts = [(mr_id.0, ptr.0, size.0)];
        self.keep(self.message(py, Half::Send, conn_id.0, &parts, Vec::new()))
    }

    /// Starts receiving a message.
    fn recv_async(
        &self,
        py: Python<'_>,
        conn_id: Word,
        mr_id: Word,
        ptr: Word,
        size: Word,
    ) -> (bool, u64) {
        let parts = [(mr_id.0, ptr.0, size.0)];
        self.keep(self.message(py, Half::Receive, conn_id.0, &parts, Vec::new()))
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
        let parts = rows(mr_id_v, data_ptr_v, size_v, num_iovs)?;
        self.finish(
            py,
            self.message(py, Half::Send, conn_id.0, &parts, Vec::new()),
        )
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
        let parts = rows(mr_id_v, data_ptr_v, size_v, num_iovs)?;
        self.finish(
            py,
            self.message(py, Half::Receive, conn_id.0, &parts, Vec::new()),
        )
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
        let parts = rows(mr_id_v, data_ptr_v, size_v, num_iovs)?;
        Ok(self.keep(self.message(py, Half::Send, conn_id.0, &parts, Vec::new())))
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
        let parts = rows(mr_id_v, data_ptr_v, size_v, num_iovs)?;
        Ok(self.keep(self.message(py, Half::Receive, conn_id.0, &parts, Vec::new())))
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

impl Endpoint {
    /// Starts messages over rows of (registration, address, bytes).
    pub(super) fn message(
        &self,
        py: Python<'_>,
        half: Half,
        conn_id: u64,
        parts: &[(u64, u64, u64)],
        temporary: Vec<Temporary>,
    ) -> Option<Started> {
        let Some(connection) = self.connections.get(conn_id) else {
            unknown("connection", conn_id);
            return None;
        };
        let mut started = Vec::with_capacity(parts.len());
        for (id, address, len) in parts {
            let Some(memory) = self.memory.get(*id) else {
                unknown("registration", *id);
                return None;
            };
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
                Ok(part) => started.push(part),
                Err(error) => {
                    failed("starting a message", &error);
                    return None;
                }
            }
        }
        Some(Started {
            parts: started,
            _temporary: temporary,
        })
    }
}
