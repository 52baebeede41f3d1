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

/// Registers memory, knows peers, makes transfers. It listens, and serves its regions, from its
/// start to its end, whether or not the application does anything.
pub struct tcpx_session {
    session: Session,
    name: CString,
}

impl Boxed for tcpx_session {}

/// Receives one notification: who sent it, and the message, which may be empty and may hold any bytes. The
/// pointers are valid while the callback runs. Must not unwind.
pub type tcpx_notification_fn = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        from: *const c_char,
        from_len: usize,
        message: *const u8,
        message_len: usize,
    ),
>;

/// Starts a session. The configuration remains the caller's.
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

/// Says whether calls on the session may succeed: TCPX_ERROR_FORKED in a child of the process that
/// made it, TCPX_ERROR_CLOSED once it is closed. Never waits. Layers that hold locks of their own
/// ask before they take one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_check(session: *const tcpx_session) -> tcpx_status {
    ffi::call(|| Ok(borrow!(session)?.session.check()?))
}

/// Ends a session, and leaves the handle to be freed: calls that wait in it, on other threads, return TCPX_ERROR_CLOSED, and so do
/// all calls from now on. Waits as tcpx_session_free does. When it returns, memory that was registered is no longer touched. May
/// be called more than once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_close(session: *const tcpx_session) -> tcpx_status {
    ffi::call(|| {
        borrow!(session)?.session.close();
        Ok(())
    })
}

/// Ends a session: its connections and its threads. Waits until the peers have their notifications and know how their transfers
/// have ended, at most 5 seconds (or `peer_timeout` where that is less; on a plugin, a connection that is being made for them has
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

/// What the session calls itself; valid until the handle is freed. NULL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_session_name(session: *const tcpx_session) -> *const c_char {
    ffi::call_or(null(), || Ok(borrow!(session)?.name.as_ptr()))
}

/// What a peer needs to connect to this session. It contains the session's secret: whoever has it may
/// connect, nobody else can.
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

/// Makes a peer known by its connection info; connecting happens later. The same info again gives another
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

/// The peer of that name: one that was added, or one that has connected to us.
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

/// The peer that stands for the session itself, for transfers within it.
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

/// Forgets a peer and ends its connections. Its transfers fail. It may be added again; the handle remains
/// to be freed.
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

/// The next peer that has connected to us.
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
/// TCPX_MEMORY_CUDA and not looked at otherwise. Overlapping and
/// repeated registrations are legal. The memory must stay mapped until tcpx_region_free has
/// returned: peers who have its descriptor read and write it at any time.
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
        // SAFETY: the caller keeps the memory mapped until the region is freed, as the header asks.
        let region = unsafe { session.session.register_raw(address.cast(), len, kind) }?;
        out.give(tcpx_region { region });
        Ok(())
    })
}

/// Plans a transfer over any number of segments; `op` is a tcpx_op. Nothing moves until it is posted. The
/// array, and the handles that it points to, are not needed any more when this returns.
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
        // Once to find the bad ones, once more as the engine takes them: cheaper than a list in between.
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
/// tag are received in the order in which they were sent.
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

/// Receives the next message that the peer sends under a tag, up to `len` bytes; tcpx_transfer_received
/// tells how many it had. A longer one fails on both sides.
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

/// Sends a message on its own; it is queued when this returns. Messages to one peer arrive in order. An
/// empty message is legal. TCPX_ERROR_BUSY where the peer does not keep up, and half of queue_bytes
/// waits to be sent to it: nothing was sent then, try again later.
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

/// Hands every notification that has arrived to `callback`, with `context`, oldest first. Never waits.
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

/// Waits for the next notification and hands it to `callback`, with `context`.
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
        // SAFETY: C gave the function to be called with its context; both texts outlive the call.
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
