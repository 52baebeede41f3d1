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

/// What the peer calls itself; valid until the handle is freed. NULL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_peer_name(peer: *const tcpx_peer) -> *const c_char {
    ffi::call_or(null(), || Ok(borrow!(peer)?.name.as_ptr()))
}

/// Whether a connection is there now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_peer_is_connected(peer: *const tcpx_peer) -> bool {
    ffi::call_or(false, || Ok(borrow!(peer)?.peer.is_connected()))
}

/// Connects now rather than with the first transfer. Returns at once when a connection is there.
/// When `timeout_ms` runs out first the attempt goes on by itself, up to the setting connect_timeout.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_peer_connect(peer: *const tcpx_peer, timeout_ms: u64) -> tcpx_status {
    ffi::call(|| {
        let timeout = Duration::from_millis(timeout_ms);
        Ok(borrow!(peer)?.peer.connect(timeout)?)
    })
}

/// Ends all connections to the peer; its transfers fail. A later transfer connects anew.
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
    /// Bytes in this struct; later versions add fields at its end.
    pub size: usize,
    /// This end's address and port, such as "10.0.0.1:40312".
    pub local: *const c_char,
    /// The peer's.
    pub remote: *const c_char,
    /// Bytes that left on it, framing included.
    pub bytes_sent: u64,
    /// Bytes that came on it, framing included.
    pub bytes_received: u64,
}

/// Receives one lane. Must not unwind.
pub type tcpx_lane_fn = Option<unsafe extern "C" fn(context: *mut c_void, lane: *const tcpx_lane)>;

/// Hands every lane of the current connection to `callback`, with `context`; none when there is no connection.
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
            // SAFETY: C gave the function to be called with its context; `lane` outlives the call.
            unsafe { callback(context, &raw const lane) };
        }
        Ok(())
    })
}

/// How memory of a peer on the same host is moved; valid while the callback that received it runs.
#[repr(C)]
#[derive(Debug)]
pub struct tcpx_same_host {
    /// Bytes in this struct; later versions add fields at its end.
    pub size: usize,
    /// Why lanes carry everything; NULL where memory is copied directly.
    pub why_not: *const c_char,
    /// Bytes that this session has copied directly, both ways, over the current connection.
    pub bytes: u64,
}

/// Receives how memory of a peer is moved. Must not unwind.
pub type tcpx_same_host_fn =
    Option<unsafe extern "C" fn(context: *mut c_void, same_host: *const tcpx_same_host)>;

/// Tells `callback`, with `context`, whether memory of the peer is copied directly, since it is on
/// this host, and otherwise why not. Calls it once, or not at all when there is no connection.
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
            // SAFETY: C gave the function to be called with its context; `same_host` and its text
            // outlive the call.
            unsafe { callback(context, &raw const same_host) };
        }
        Ok(())
    })
}

/// Frees the handle; the session goes on to know the peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_peer_free(peer: *mut tcpx_peer) {
    ffi::end(take!(peer));
}
