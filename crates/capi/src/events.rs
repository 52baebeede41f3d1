//! Descriptors for event loops.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use tcpx::Events;

use crate::ffi::{self, Boxed, borrow, out, slice_mut, take};
use crate::session::tcpx_session;
use crate::status::tcpx_status;
use crate::transfer::{tcpx_state, tcpx_transfer};

/// A descriptor (eventfd) that becomes readable when a transfer has ended or a notification has
/// arrived, for programs with an event loop of their own: epoll, libuv, boost::asio. Transfers need
/// not be polled meanwhile.
///
/// Arm transfers (tcpx_transfer_arm) and subscribe to notifications (tcpx_session_subscribe), wait
/// until the descriptor is readable, and call tcpx_events_take. One handle serves any number of
/// sessions; use one handle per event loop.
pub struct tcpx_events {
    events: Events,
}

impl Boxed for tcpx_events {}

/// A notification has arrived; it may have been taken since.
pub const TCPX_EVENT_NOTIFIED: u32 = 1;
/// A subscribed session was closed.
pub const TCPX_EVENT_CLOSED: u32 = 2;
/// More transfers have ended than fit the array: the descriptor stays readable.
pub const TCPX_EVENT_MORE: u32 = 4;

/// Creates a descriptor with nothing armed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_events_new(events: *mut *mut tcpx_events) -> tcpx_status {
    ffi::call(|| {
        let out = out!(events)?;
        out.give(tcpx_events {
            events: Events::new()?,
        });
        Ok(())
    })
}

/// Returns the descriptor, to wait for until it is readable: neither read from it nor close it.
/// Valid until the handle is freed; remove it from the event loop before. -1 for NULL and in a
/// forked child.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_events_fd(events: *const tcpx_events) -> c_int {
    ffi::call_or(-1, || Ok(borrow!(events)?.events.as_raw_fd()))
}

/// Takes the events since the last call, and makes the descriptor unreadable. Writes the keys of up
/// to `capacity` ended transfers to `keys`, and their number to `count`; sets `flags` to any of
/// TCPX_EVENT_NOTIFIED, TCPX_EVENT_CLOSED and TCPX_EVENT_MORE. Never blocks. No event is lost: one
/// that comes meanwhile is returned, or makes the descriptor readable again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_events_take(
    events: *const tcpx_events,
    keys: *mut u64,
    capacity: usize,
    count: *mut usize,
    flags: *mut u32,
) -> tcpx_status {
    ffi::call(|| {
        let events = borrow!(events)?;
        let keys = slice_mut!(keys, capacity)?;
        let (count, flags) = (out!(count)?, out!(flags)?);
        let happened = events.events.take(capacity)?;
        for (place, key) in keys.iter_mut().zip(&happened.ended) {
            place.write(*key);
        }
        count.write(happened.ended.len());
        let flag = |yes, flag| if yes { flag } else { 0 };
        flags.write(
            flag(happened.notified, TCPX_EVENT_NOTIFIED)
                | flag(happened.closed, TCPX_EVENT_CLOSED)
                | flag(happened.more, TCPX_EVENT_MORE),
        );
        Ok(())
    })
}

/// Frees the handle and closes its descriptor, at the latest when armed transfers in flight have
/// ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_events_free(events: *mut tcpx_events) {
    ffi::end(take!(events));
}

/// Reports each notification that arrives from now on, and the end of the session, to `events`.
/// Call tcpx_session_take_notifications afterwards for notifications that have arrived already.
/// TCPX_ERROR_CLOSED once the session is closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_subscribe(
    session: *const tcpx_session,
    events: *const tcpx_events,
) -> tcpx_status {
    ffi::call(|| {
        let (session, events) = (borrow!(session)?, borrow!(events)?);
        Ok(session.session.subscribe(&events.events)?)
    })
}

/// Reports the end of this posting of the transfer to `events`, once and with `key`, however it
/// ends. Sets `state` to the state of the transfer: no event comes if it has already ended or was
/// never posted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_transfer_arm(
    transfer: *const tcpx_transfer,
    events: *const tcpx_events,
    key: u64,
    state: *mut tcpx_state,
) -> tcpx_status {
    ffi::call(|| {
        let (transfer, events, out) = (borrow!(transfer)?, borrow!(events)?, out!(state)?);
        out.write(transfer.transfer.arm(&events.events, key)?.into());
        Ok(())
    })
}
