//! Sessions.

use std::ffi::{CString, c_char, c_void};
use std::ptr::null;
use std::time::Duration;

use tcpx::{Error, Notification, Session};

use crate::bytes::tcpx_bytes;
use crate::config::tcpx_config;
use crate::ffi::{self, Boxed, borrow, out, slice, take, text};
use crate::log;
use crate::peer::tcpx_peer;
use crate::region::{memory_kind, tcpx_region};
use crate::status::{Failure, c_text, tcpx_status};
use crate::transfer::{local_slice, op, segment, tcpx_segment, tcpx_transfer};

/// Registers memory, knows peers, makes transfers. A session listens, and serves its regions, from
/// its creation to its end, without any action of the application.
pub struct tcpx_session {
    pub(crate) session: Session,
    name: CString,
}

impl Boxed for tcpx_session {}

/// Receives one notification: its sender, and the message, which may be empty and contain any
/// bytes. The pointers are valid while the callback runs. Must not unwind.
pub type tcpx_notification_fn = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        from: *const c_char,
        from_len: usize,
        message: *const u8,
        message_len: usize,
    ),
>;

/// Starts a session. The caller keeps the configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_new(
    config: *const tcpx_config,
    session: *mut *mut tcpx_session,
) -> tcpx_status {
    ffi::call(|| {
        let (config, out) = (borrow!(config)?, out!(session)?);
        log::start(config.config.log())?;
        let session = Session::new(config.config.clone())?;
        let name = c_text(session.name());
        out.give(tcpx_session { session, name });
        Ok(())
    })
}

/// Returns whether calls on the session may succeed: TCPX_ERROR_FORKED in a child of the process
/// that created it, TCPX_ERROR_CLOSED once it is closed. Never blocks. Layers with locks of their
/// own call it before they take one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_check(session: *const tcpx_session) -> tcpx_status {
    ffi::call(|| Ok(borrow!(session)?.session.check()?))
}

/// Ends a session, but does not free the handle: blocked calls on other threads return
/// TCPX_ERROR_CLOSED, and so do all calls from now on. Waits as tcpx_session_free does. When it
/// returns, registered memory is no longer accessed. May be called more than once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_close(session: *const tcpx_session) -> tcpx_status {
    ffi::call(|| {
        borrow!(session)?.session.close();
        Ok(())
    })
}

/// Ends a session with its connections and threads, and frees the handle. Waits until the peers
/// have their notifications and know how their transfers have ended, at most 5 seconds (or
/// `peer_timeout` if that is less; on a plugin, a connection being made for them has
/// `connect_timeout` first). Transfers in flight fail, here and at the peers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_free(session: *mut tcpx_session) {
    ffi::call_or((), || {
        if let Some(session) = take!(session) {
            session.session.close();
        }
        Ok(())
    });
}

/// Returns the session's name; valid until the handle is freed. NULL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_name(session: *const tcpx_session) -> *const c_char {
    ffi::call_or(null(), || Ok(borrow!(session)?.name.as_ptr()))
}

/// Returns the connection info that a peer needs to connect. It contains the session's secret: its
/// holders may connect, nobody else can.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_connection_info(
    session: *const tcpx_session,
    info: *mut tcpx_bytes,
) -> tcpx_status {
    ffi::call(|| {
        let (session, out) = (borrow!(session)?, out!(info)?);
        out.write(session.session.connection_info().into());
        Ok(())
    })
}

/// Adds a peer by its connection info; connecting happens later. The same info again gives another
/// handle to the same peer; info of a new session under a known name replaces the old session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_add_peer(
    session: *const tcpx_session,
    info: *const c_void,
    info_len: usize,
    peer: *mut *mut tcpx_peer,
) -> tcpx_status {
    ffi::call(|| {
        let (session, info) = (borrow!(session)?, slice!(info, info_len)?);
        let out = out!(peer)?;
        out.give(session.session.add_peer(info)?.into());
        Ok(())
    })
}

/// Returns the peer of that name: added before, or connected to this session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_find_peer(
    session: *const tcpx_session,
    name: *const c_char,
    peer: *mut *mut tcpx_peer,
) -> tcpx_status {
    ffi::call(|| {
        let (session, name, out) = (borrow!(session)?, text!(name)?, out!(peer)?);
        let found = session.session.peer(name);
        out.give(found.ok_or_else(|| Error::UnknownPeer(name.into()))?.into());
        Ok(())
    })
}

/// Returns the peer that represents the session itself, for transfers within it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_own_peer(
    session: *const tcpx_session,
    peer: *mut *mut tcpx_peer,
) -> tcpx_status {
    ffi::call(|| {
        let (session, out) = (borrow!(session)?, out!(peer)?);
        out.give(session.session.own_peer().into());
        Ok(())
    })
}

/// Removes a peer and ends its connections. Its transfers fail. It may be added again; the handle
/// must still be freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_remove_peer(
    session: *const tcpx_session,
    peer: *const tcpx_peer,
) -> tcpx_status {
    ffi::call(|| {
        let (session, peer) = (borrow!(session)?, borrow!(peer)?);
        Ok(session.session.remove(&peer.peer)?)
    })
}

/// Waits for the next peer that connects to this session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_accept(
    session: *const tcpx_session,
    timeout_ms: u64,
    peer: *mut *mut tcpx_peer,
) -> tcpx_status {
    ffi::call(|| {
        let (session, out) = (borrow!(session)?, out!(peer)?);
        let timeout = Duration::from_millis(timeout_ms);
        out.give(session.session.accept(timeout)?.into());
        Ok(())
    })
}

/// Registers memory: `kind` is a tcpx_memory, `device` the number of the CUDA device for
/// TCPX_MEMORY_CUDA and ignored otherwise. Overlapping and repeated registrations are legal. The
/// memory must stay mapped until tcpx_region_free has returned: peers with its descriptor read and
/// write it at any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_register(
    session: *const tcpx_session,
    address: *mut c_void,
    len: usize,
    kind: u32,
    device: u32,
    region: *mut *mut tcpx_region,
) -> tcpx_status {
    ffi::call(|| {
        let (session, out) = (borrow!(session)?, out!(region)?);
        let kind = memory_kind(kind, device)?;
        if address.is_null() {
            return Err(Failure::Null("address"));
        }
        // SAFETY: the caller keeps the memory mapped until the region is freed, as the header
        // requires.
        let region = unsafe { session.session.register_raw(address.cast(), len, kind) }?;
        out.give(tcpx_region { region });
        Ok(())
    })
}

/// Prepares a transfer over any number of segments; `op` is a tcpx_op. Nothing moves until it is
/// posted. The array, and the handles in it, are not needed after this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_prepare(
    session: *const tcpx_session,
    op: u32,
    peer: *const tcpx_peer,
    segments: *const tcpx_segment,
    segment_count: usize,
    transfer: *mut *mut tcpx_transfer,
) -> tcpx_status {
    ffi::call(|| {
        let (session, peer) = (borrow!(session)?, borrow!(peer)?);
        let segments: &[tcpx_segment] = slice!(segments, segment_count)?;
        let (op, out) = (self::op(op)?, out!(transfer)?);
        // One pass to find invalid segments, one to convert them: cheaper than a list in between.
        for (index, s) in segments.iter().enumerate() {
            segment(index, s)?;
        }
        let segments = segments.iter().enumerate();
        let segments = segments.map(|(index, s)| segment(index, s).expect("checked above"));
        out.give(session.session.prepare(op, &peer.peer, segments)?.into());
        Ok(())
    })
}

/// Sends `len` bytes to the peer under a tag. Done when the peer has received them. Messages of one
/// tag are received in the order of sending.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_send(
    session: *const tcpx_session,
    peer: *const tcpx_peer,
    region: *const tcpx_region,
    address: u64,
    len: usize,
    tag: u64,
    transfer: *mut *mut tcpx_transfer,
) -> tcpx_status {
    ffi::call(|| {
        let (session, peer) = (borrow!(session)?, borrow!(peer)?);
        let (source, out) = (local_slice(borrow!(region)?, address)?, out!(transfer)?);
        let sent = session.session.send(&peer.peer, source, len, tag)?;
        out.give(sent.into());
        Ok(())
    })
}

/// Receives the peer's next message under a tag, up to `len` bytes; tcpx_transfer_received returns
/// its length. A longer one fails on both sides.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_recv(
    session: *const tcpx_session,
    peer: *const tcpx_peer,
    region: *const tcpx_region,
    address: u64,
    len: usize,
    tag: u64,
    transfer: *mut *mut tcpx_transfer,
) -> tcpx_status {
    ffi::call(|| {
        let (session, peer) = (borrow!(session)?, borrow!(peer)?);
        let (target, out) = (local_slice(borrow!(region)?, address)?, out!(transfer)?);
        let posted = session.session.recv(&peer.peer, target, len, tag)?;
        out.give(posted.into());
        Ok(())
    })
}

/// Sends a notification; it is queued when this returns. Notifications to one peer arrive in order.
/// An empty message is legal. TCPX_ERROR_BUSY, and nothing is sent, if the peer does not keep up
/// and half of queue_bytes waits to be sent to it: try again later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_notify(
    session: *const tcpx_session,
    peer: *const tcpx_peer,
    message: *const c_void,
    message_len: usize,
) -> tcpx_status {
    ffi::call(|| {
        let (session, peer) = (borrow!(session)?, borrow!(peer)?);
        let message = slice!(message, message_len)?;
        Ok(session.session.notify(&peer.peer, message)?)
    })
}

/// Passes every notification that has arrived to `callback`, with `context`, oldest first. Never
/// blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_take_notifications(
    session: *const tcpx_session,
    callback: tcpx_notification_fn,
    context: *mut c_void,
) -> tcpx_status {
    ffi::call(|| {
        let session = borrow!(session)?;
        let deliver = deliver(callback, context)?;
        session.session.notifications().iter().for_each(deliver);
        Ok(())
    })
}

/// Waits for the next notification and passes it to `callback`, with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_wait_notification(
    session: *const tcpx_session,
    timeout_ms: u64,
    callback: tcpx_notification_fn,
    context: *mut c_void,
) -> tcpx_status {
    ffi::call(|| {
        let session = borrow!(session)?;
        let deliver = deliver(callback, context)?;
        let timeout = Duration::from_millis(timeout_ms);
        deliver(&session.session.wait_notification(timeout)?);
        Ok(())
    })
}

fn deliver(
    callback: tcpx_notification_fn,
    context: *mut c_void,
) -> Result<impl Fn(&Notification), Failure> {
    let callback = callback.ok_or(Failure::Null("callback"))?;
    Ok(move |notification: &Notification| {
        let (from, message) = (&notification.from, &notification.message);
        // SAFETY: C passed the function to be called with its context; both texts outlive the call.
        unsafe {
            callback(
                context,
                from.as_ptr().cast(),
                from.len(),
                message.as_ptr(),
                message.len(),
            );
        }
    })
}
