//! Statistics of sessions.

use std::ptr::copy_nonoverlapping;

use tcpx::stats::{TransferKind, openmetrics};

use crate::bytes::tcpx_bytes;
use crate::ffi::{self, borrow, borrow_mut, out};
use crate::session::tcpx_session;
use crate::status::{Failure, tcpx_status};

/// Statistics of a session since its creation, over all peers. Transfers are counted by the session
/// that posted them; tcpx_session_metrics has the values per peer, lane and path.
///
/// The caller sets `size` to sizeof(tcpx_stats) before the call, so that a library with more fields
/// does not write those that the caller does not know; one with fewer sets `size` to the size it
/// has filled in.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct tcpx_stats {
    /// Size of this struct in bytes.
    pub size: usize,
    /// Payload bytes sent and in place: WRITEs of this session, and READs of peers.
    pub bytes_sent: u64,
    /// Payload bytes received and in place: READs of this session, and WRITEs of peers.
    pub bytes_received: u64,
    /// Transfers posted, tagged messages included.
    pub transfers_started: u64,
    /// Transfers completed.
    pub transfers_completed: u64,
    /// Transfers failed.
    pub transfers_failed: u64,
    /// Transfers aborted.
    pub transfers_aborted: u64,
    /// Transfers in flight.
    pub transfers_in_flight: u64,
    /// Bytes of completed transfers.
    pub transfer_bytes: u64,
    /// Notifications sent.
    pub notifications_sent: u64,
    /// Notifications received.
    pub notifications_received: u64,
    /// Connections established.
    pub connections: u64,
    /// Connections ended.
    pub connections_lost: u64,
    /// Streams lost while their connection continued.
    pub lanes_lost: u64,
    /// Bytes sent again after their lane was lost.
    pub retried_bytes: u64,
    /// Number of times that chunks waited for the window.
    pub window_waits: u64,
    /// Number of times that payload waited for a pinned slot.
    pub slot_waits: u64,
}

impl From<&tcpx::SessionStats> for tcpx_stats {
    fn from(stats: &tcpx::SessionStats) -> Self {
        let total = stats.total();
        let transfers = TransferKind::ALL.map(|kind| stats.transfers(kind));
        let transfers =
            |get: fn(&tcpx::stats::TransferStats) -> u64| transfers.iter().map(get).sum();
        let peers = |get: fn(&tcpx::PeerStats) -> u64| stats.all().map(get).sum();
        Self {
            size: size_of::<Self>(),
            bytes_sent: total.sent().bytes,
            bytes_received: total.received().bytes,
            transfers_started: transfers(|t| t.started),
            transfers_completed: transfers(|t| t.completed),
            transfers_failed: stats.failed(),
            transfers_aborted: transfers(|t| t.aborted),
            transfers_in_flight: stats.in_flight(),
            transfer_bytes: transfers(|t| t.bytes),
            notifications_sent: peers(|p| p.notifications_sent.count),
            notifications_received: peers(|p| p.notifications_received.count),
            connections: peers(|p| p.connections),
            connections_lost: peers(|p| p.connections_lost),
            lanes_lost: peers(|p| p.lanes_lost),
            retried_bytes: peers(|p| p.retried.bytes),
            window_waits: peers(|p| p.waits.window),
            slot_waits: stats.slot_waits,
        }
    }
}

/// Reads the statistics of a session. `stats->size` must be set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_stats(
    session: *const tcpx_session,
    stats: *mut tcpx_stats,
) -> tcpx_status {
    ffi::call(|| {
        let session = borrow!(session)?;
        // A caller that knows fewer fields provides less memory: only the size is read.
        let size = stats.cast::<usize>();
        let size = borrow_mut!(size).map_err(|_| Failure::Null("stats"))?;
        let mut read = tcpx_stats::from(&session.session.stats());
        let known = (*size).min(size_of::<tcpx_stats>());
        if known < size_of::<usize>() {
            return Err(Failure::BadNumber {
                name: "stats->size",
                value: known as u32,
                expected: "sizeof(tcpx_stats)",
            });
        }
        read.size = known;
        // SAFETY: C provides `*size` bytes there, and no more than those are written; `read` has
        // `known`.
        unsafe { copy_nonoverlapping((&raw const read).cast::<u8>(), stats.cast::<u8>(), known) };
        Ok(())
    })
}

/// Writes the statistics of a session as OpenMetrics text, per peer, lane and path, with the
/// kernel's statistics of each lane. The text is UTF-8, does not end with NUL and is freed by
/// tcpx_bytes_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_metrics(
    session: *const tcpx_session,
    text: *mut tcpx_bytes,
) -> tcpx_status {
    ffi::call(|| {
        let (session, out) = (borrow!(session)?, out!(text)?);
        let text = openmetrics(&[session.session.stats_with_kernel()]);
        out.write(text.into_bytes().into());
        Ok(())
    })
}
