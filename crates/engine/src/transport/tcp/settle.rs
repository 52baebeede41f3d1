//! What the peer's frames do to the chunks of a lane: requests to answer, answers, acknowledgements.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_proto::frame::{Header, Kind, Table};

use super::Connection;
use super::lane::{Flying, Lane};
use super::rx::Ended;
use super::tx::Response;
use crate::run::Run;

impl Lane {
    /// Queues the answer to a READ request.
    pub(super) fn respond(
        &self,
        header: &Header,
        table: &Table<'_>,
        connection: &Connection,
    ) -> Result<(), Ended> {
        let mut work = self.work.lock();
        if work.responses.len() >= connection.own_window {
            return Err(Ended::Misbehaved(format!(
                "more than {} READ requests in flight on one lane",
                connection.own_window
            )));
        }
        let mut grant = work.spare.pop().unwrap_or_default();
        let outcome = match grant.fill(&connection.core.regions, table) {
            Ok(()) => Ok(grant),
            Err(refusal) => {
                work.spare.push(grant.cleared());
                Err(refusal)
            }
        };
        work.responses.push_back(Response {
            transfer: header.transfer,
            seq: header.seq,
            bytes: header.payload,
            outcome,
        });
        drop(work);
        self.mark_dirty();
        // Also whoever only serves must notice a peer that stops reading.
        connection.core.control.stay_awake();
        Ok(())
    }

    /// The READ chunk that this frame answers: answers come in request order.
    pub(super) fn answered(&self, header: &Header) -> Result<Flying, Ended> {
        let flying = self.in_flight.lock().reads.pop_front();
        match flying {
            Some(flying)
                if flying.run.id == header.transfer
                    && flying.index == header.seq as usize
                    && (header.kind != Kind::Data
                        || flying.chunk().bytes as u64 == header.payload) =>
            {
                // The window has room again: ask for more before this answer is whole.
                self.mark_dirty();
                Ok(flying)
            }
            other => {
                // Back, so that the end of the connection settles it.
                if let Some(flying) = other {
                    self.in_flight.lock().reads.push_front(flying);
                }
                Err(Ended::Misbehaved(format!(
                    "an answer to READ {} chunk {} that is not due",
                    header.transfer, header.seq
                )))
            }
        }
    }

    /// Settles WRITE chunks up to the peer's count.
    pub(super) fn acknowledged(
        &self,
        count: u64,
        connection: &Arc<Connection>,
    ) -> Result<(), Ended> {
        let acknowledged = self.acknowledged.load(Ordering::Relaxed);
        let flying = self.in_flight.lock().writes.len() as u64;
        let new = count
            .checked_sub(acknowledged)
            .filter(|new| *new <= flying)
            .ok_or_else(|| {
                Ended::Misbehaved(format!(
                    "{count} WRITE chunks acknowledged where {} were sent",
                    acknowledged + flying
                ))
            })?;
        self.acknowledged.store(count, Ordering::Relaxed);
        for _ in 0..new {
            let flying = self.in_flight.lock().writes.pop_front();
            if let Some(flying) = flying {
                self.unload(&flying);
                connection.settle(&flying.run);
            }
        }
        if new > 0 {
            // The window has room again.
            self.mark_dirty();
        }
        Ok(())
    }

    pub(super) fn find_write(&self, transfer: u64, seq: u32) -> Result<Arc<Run>, Ended> {
        let in_flight = self.in_flight.lock();
        in_flight
            .writes
            .iter()
            .find(|f| f.run.id == transfer && f.index == seq as usize)
            .map(|f| Arc::clone(&f.run))
            .ok_or_else(|| {
                Ended::Misbehaved(format!(
                    "an error for WRITE {transfer} chunk {seq}, which is not in flight"
                ))
            })
    }

    pub(super) fn unload(&self, flying: &Flying) {
        self.load.fetch_sub(flying.chunk().bytes, Ordering::Relaxed);
    }
}
