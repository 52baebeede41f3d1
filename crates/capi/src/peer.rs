//! Peers.

use std::ffi::{CString, c_char, c_void};
use std::ptr::null;
use std::time::Duration;

use tcpx::Peer;

use crate::ffi::{self, Boxed, borrow, take};
use crate::status::{Failure, c_text, tcpx_status};

/// A remote session, or the session itself.
pub struct tcpx_peer {
    pub(crate) peer: Peer,
    name: CString,
}

impl Boxed for tcpx_peer {}

impl From<Peer> for tcpx_peer {
    fn from(peer: Peer) -> Self {
        let name = c_text(peer.name());
        Self { peer, name }
    }
}

/// Returns the peer's name; valid until the handle is freed. NULL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_peer_name(peer: *const tcpx_peer) -> *const c_char {
    ffi::call_or(null(), || Ok(borrow!(peer)?.name.as_ptr()))
}

/// Returns whether the peer is connected now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_peer_is_connected(peer: *const tcpx_peer) -> bool {
    ffi::call_or(false, || Ok(borrow!(peer)?.peer.is_connected()))
}

/// Connects now instead of with the first transfer. Returns at once if a connection exists. If
/// `timeout_ms` expires first, the attempt continues in the background, up to the setting
/// connect_timeout.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_peer_connect(peer: *const tcpx_peer, timeout_ms: u64) -> tcpx_status {
    ffi::call(|| {
        let timeout = Duration::from_millis(timeout_ms);
        Ok(borrow!(peer)?.peer.connect(timeout)?)
    })
}

/// Ends all connections to the peer; its transfers fail. A later transfer reconnects.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_peer_disconnect(peer: *const tcpx_peer) -> tcpx_status {
    ffi::call(|| {
        borrow!(peer)?.peer.disconnect();
        Ok(())
    })
}

/// One lane of a connected peer; valid while the callback that received it runs.
#[repr(C)]
#[derive(Debug)]
pub struct tcpx_lane {
    /// Size of this struct in bytes; later versions add fields at its end.
    pub size: usize,
    /// This end's address and port, such as "10.0.0.1:40312".
    pub local: *const c_char,
    /// The peer's address and port.
    pub remote: *const c_char,
    /// Bytes sent on this lane, framing included.
    pub bytes_sent: u64,
    /// Bytes received on this lane, framing included.
    pub bytes_received: u64,
}

/// Receives one lane. Must not unwind.
pub type tcpx_lane_fn = Option<unsafe extern "C" fn(context: *mut c_void, lane: *const tcpx_lane)>;

/// Passes every lane of the current connection to `callback`, with `context`; none without a
/// connection.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_peer_each_lane(
    peer: *const tcpx_peer,
    callback: tcpx_lane_fn,
    context: *mut c_void,
) -> tcpx_status {
    ffi::call(|| {
        let peer = borrow!(peer)?;
        let callback = callback.ok_or(Failure::Null("callback"))?;
        for lane in peer.peer.lanes() {
            let (local, remote) = (
                c_text(&lane.local.to_string()),
                c_text(&lane.remote.to_string()),
            );
            let lane = tcpx_lane {
                size: size_of::<tcpx_lane>(),
                local: local.as_ptr(),
                remote: remote.as_ptr(),
                bytes_sent: lane.bytes_sent,
                bytes_received: lane.bytes_received,
            };
            // SAFETY: C passed the function to be called with its context; `lane` outlives the
            // call.
            unsafe { callback(context, &raw const lane) };
        }
        Ok(())
    })
}

/// The path to a peer on the same host; valid while the callback that received it runs.
#[repr(C)]
#[derive(Debug)]
pub struct tcpx_same_host {
    /// Size of this struct in bytes; later versions add fields at its end.
    pub size: usize,
    /// The reason lanes carry everything; NULL if memory is copied directly.
    pub why_not: *const c_char,
    /// Bytes that this session has copied directly, in both directions, over the current
    /// connection.
    pub bytes: u64,
}

/// Receives the path to a peer. Must not unwind.
pub type tcpx_same_host_fn =
    Option<unsafe extern "C" fn(context: *mut c_void, same_host: *const tcpx_same_host)>;

/// Reports to `callback`, with `context`, whether memory of a peer on this host is copied directly,
/// and otherwise why not. Calls it once, or not at all without a connection.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_peer_same_host(
    peer: *const tcpx_peer,
    callback: tcpx_same_host_fn,
    context: *mut c_void,
) -> tcpx_status {
    ffi::call(|| {
        let peer = borrow!(peer)?;
        let callback = callback.ok_or(Failure::Null("callback"))?;
        if let Some(info) = peer.peer.same_host() {
            let why_not = info.why_not.as_deref().map(c_text);
            let same_host = tcpx_same_host {
                size: size_of::<tcpx_same_host>(),
                why_not: why_not.as_ref().map_or(null(), |text| text.as_ptr()),
                bytes: info.bytes,
            };
            // SAFETY: C passed the function to be called with its context; `same_host` and its text
            // outlive the call.
            unsafe { callback(context, &raw const same_host) };
        }
        Ok(())
    })
}

/// Frees the handle; the session still knows the peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_peer_free(peer: *mut tcpx_peer) {
    ffi::end(take!(peer));
}
