//! Transfers.

use std::ffi::c_void;
use std::time::Duration;

use tcpx::{LocalSlice, Op, RemoteSlice, Segment, Side, Transfer, TransferState};

use crate::ffi::{self, Boxed, borrow, out, slice, take};
use crate::region::{tcpx_region, tcpx_remote_region};
use crate::status::{Failure, tcpx_status};

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub enum tcpx_op {
    /// From the peer's memory to local memory.
    TCPX_READ = 0,
    /// From local memory to the peer's.
    TCPX_WRITE = 1,
}

/// The state of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub enum tcpx_state {
    /// Never posted.
    TCPX_PREPARED = 0,
    /// Posted; bytes may be moving.
    TCPX_IN_PROGRESS = 1,
    /// Every byte is in place.
    TCPX_DONE = 2,
    /// The transfer failed; tcpx_transfer_error returns the reason.
    TCPX_FAILED = 3,
    /// Aborted by this side; bytes already in flight may still land at the peer.
    TCPX_ABORTING = 4,
    /// Aborted, and nothing of it is in flight any more.
    TCPX_ABORTED = 5,
}

impl From<TransferState> for tcpx_state {
    fn from(state: TransferState) -> Self {
        match state {
            TransferState::Prepared => Self::TCPX_PREPARED,
            TransferState::InProgress => Self::TCPX_IN_PROGRESS,
            TransferState::Done => Self::TCPX_DONE,
            TransferState::Failed => Self::TCPX_FAILED,
            TransferState::Aborting => Self::TCPX_ABORTING,
            TransferState::Aborted => Self::TCPX_ABORTED,
        }
    }
}

/// One piece of a transfer. A READ copies from remote to local, a WRITE from local to remote. The
/// segments of a transfer move in any order: where the targets of two overlap, or a target and the
/// source of another, the content of the overlapping bytes is unspecified.
#[repr(C)]
#[derive(Debug)]
pub struct tcpx_segment {
    /// Memory of this session.
    pub local: *const tcpx_region,
    /// Address in the local region.
    pub local_address: u64,
    /// Memory of the peer.
    pub remote: *const tcpx_remote_region,
    /// Address in the remote region, at the peer.
    pub remote_address: u64,
    /// Length in bytes; 0 is legal and moves nothing.
    pub length: u64,
}

/// A READ, a WRITE, a tagged send or a tagged receive.
pub struct tcpx_transfer {
    pub(crate) transfer: Transfer,
}

impl Boxed for tcpx_transfer {}

impl From<Transfer> for tcpx_transfer {
    fn from(transfer: Transfer) -> Self {
        Self { transfer }
    }
}

/// Converts a `tcpx_op`.
pub(crate) fn op(op: u32) -> Result<Op, Failure> {
    const READ: u32 = tcpx_op::TCPX_READ as u32;
    const WRITE: u32 = tcpx_op::TCPX_WRITE as u32;
    match op {
        READ => Ok(Op::Read),
        WRITE => Ok(Op::Write),
        value => Err(Failure::BadNumber {
            name: "op",
            value,
            expected: "TCPX_READ or TCPX_WRITE",
        }),
    }
}

/// Converts a segment. The engine checks whether it fits its regions.
pub(crate) fn segment(index: usize, segment: &tcpx_segment) -> Result<Segment<'_>, Failure> {
    let (local, remote) = (segment.local, segment.remote);
    let null = |side| move |_| Failure::SegmentNull { index, side };
    let before = |side, address, start| Failure::SegmentBeforeRegion {
        index,
        side,
        address,
        start,
    };
    let local = borrow!(local).map_err(null(Side::Local))?;
    let remote = borrow!(remote).map_err(null(Side::Remote))?;

    let start = local.region.address() as u64;
    let local_offset = offset(segment.local_address, start)
        .ok_or_else(|| before(Side::Local, segment.local_address, start))?;
    let start = remote.region.address();
    let remote_offset = offset(segment.remote_address, start)
        .ok_or_else(|| before(Side::Remote, segment.remote_address, start))?;
    Ok(Segment {
        local: local.region.at(local_offset),
        remote: RemoteSlice {
            region: &remote.region,
            offset: remote_offset,
        },
        len: size(segment.length),
    })
}

/// Converts an address in a region.
pub(crate) fn local_slice(region: &tcpx_region, address: u64) -> Result<LocalSlice<'_>, Failure> {
    let start = region.region.address() as u64;
    let offset = offset(address, start).ok_or(Failure::BeforeRegion { address, start })?;
    Ok(region.region.at(offset))
}

fn offset(address: u64, start: u64) -> Option<usize> {
    address.checked_sub(start).map(size)
}

/// Converts a size; one beyond the address space becomes its maximum, which no region reaches.
fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Starts the transfer, connecting first if needed, and returns without waiting. Once it has ended
/// it may be posted again at no set-up cost. Tagged sends and receives are posted when they are
/// created.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_post(transfer: *const tcpx_transfer) -> tcpx_status {
    ffi::call(|| Ok(borrow!(transfer)?.transfer.post()?))
}

/// Does what tcpx_transfer_post does; the peer receives `message` once every byte is in place,
/// exactly once if the transfer completes while the connection lives, and not at all if it fails. A
/// transfer that fails with TCPX_ERROR_DISCONNECTED may have delivered its message, if only the
/// last acknowledgement was lost; the message is never delivered twice for one posting. It may be
/// empty. TCPX_ERROR_BUSY as for tcpx_session_notify.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_post_with_notification(
    transfer: *const tcpx_transfer,
    message: *const c_void,
    message_len: usize,
) -> tcpx_status {
    ffi::call(|| {
        let (transfer, message) = (borrow!(transfer)?, slice!(message, message_len)?);
        Ok(transfer.transfer.post_with_notification(message)?)
    })
}

/// Returns the state of the transfer. Never blocks, and may move bytes itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_poll(
    transfer: *const tcpx_transfer,
    state: *mut tcpx_state,
) -> tcpx_status {
    ffi::call(|| {
        let (transfer, out) = (borrow!(transfer)?, out!(state)?);
        out.write(transfer.transfer.poll().into());
        Ok(())
    })
}

/// Waits until the transfer has ended, and returns its state. TCPX_ERROR_TIMEOUT if it has not
/// ended by then: it continues.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_wait(
    transfer: *const tcpx_transfer,
    timeout_ms: u64,
) -> tcpx_status {
    ffi::call(|| {
        let timeout = Duration::from_millis(timeout_ms);
        Ok(borrow!(transfer)?.transfer.wait(timeout)?)
    })
}

/// Aborts the transfer. Never waits for the peer. When this returns, local memory is no longer read
/// or written for the transfer. Bytes of a WRITE that were in flight may still land at the peer, but
/// not after the bytes of a WRITE that this session posts to the same addresses of this peer
/// later, unless the connection is lost.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_abort(transfer: *const tcpx_transfer) -> tcpx_status {
    ffi::call(|| {
        borrow!(transfer)?.transfer.abort();
        Ok(())
    })
}

/// Returns the reason the transfer failed; tcpx_last_error has the message. TCPX_OK if it has not
/// failed (yet).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_error(transfer: *const tcpx_transfer) -> tcpx_status {
    ffi::call(|| match borrow!(transfer)?.transfer.error() {
        None => Ok(()),
        Some(error) => Err(error.into()),
    })
}

/// Returns the number of bytes that the transfer moves; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_bytes(transfer: *const tcpx_transfer) -> u64 {
    ffi::call_or(0, || Ok(borrow!(transfer)?.transfer.bytes()))
}

/// Returns the length of the message that a tagged receive got; 0 until it is known.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_received(transfer: *const tcpx_transfer) -> u64 {
    ffi::call_or(0, || Ok(borrow!(transfer)?.transfer.received()))
}

/// Estimates the duration of a posting from earlier transfers to the same peer, with the error of
/// the estimate; in microseconds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_estimate(
    transfer: *const tcpx_transfer,
    duration_us: *mut u64,
    margin_us: *mut u64,
) -> tcpx_status {
    ffi::call(|| {
        let transfer = borrow!(transfer)?;
        let (duration, margin) = (out!(duration_us)?, out!(margin_us)?);
        let estimate = transfer.transfer.estimate();
        let micros = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
        duration.write(micros(estimate.duration));
        margin.write(micros(estimate.margin));
        Ok(())
    })
}

/// Releases the transfer: aborts it if it is in flight, and frees it. Never waits for the peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_free(transfer: *mut tcpx_transfer) {
    ffi::end(take!(transfer));
}
