//! Peers.

use std::ffi::{CString, c_char};
use std::ptr::null;
use std::time::Duration;

use tcpx::Peer;

use crate::ffi::{self, Boxed, borrow, take};
use crate::status::{c_text, tcpx_status};

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

/// Frees the handle; the session goes on to know the peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_peer_free(peer: *mut tcpx_peer) {
    ffi::end(take!(peer));
}
