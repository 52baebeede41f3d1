//! How bytes travel: [`tcp`] between processes, with [`plugin`] beside it where a NCCL net plugin carries them, [`local`] within a session.

pub(crate) mod local;
pub(crate) mod plugin;
pub(crate) mod tcp;

use std::sync::Arc;

use tcpx_proto::frame::Status;

use crate::core::Core;
use crate::error::Error;
use crate::run::Run;
use tcp::Connection;

/// A way to a peer. Every transport offers the same few things; nothing above knows which one it is.
#[derive(Clone)]
pub(crate) enum Link {
    /// Another process, over TCP lanes.
    Tcp(Arc<Connection>),
    /// This session itself.
    Local(Arc<Core>),
}

impl Link {
    /// Starts a run; never waits.
    pub(crate) fn submit(&self, run: &Arc<Run>) {
        match self {
            Self::Tcp(connection) => connection.submit(run),
            Self::Local(core) => core.local.submit(core, run),
        }
    }

    /// Moves what can be moved for a caller who polls `run`.
    pub(crate) fn drive_for(&self, run: &Run) {
        match self {
            Self::Tcp(connection) => connection.drive_for(run),
            Self::Local(core) => {
                core.local.step(core);
            }
        }
    }

    /// Whether a caller who polls `run` keeps the peer from moving.
    pub(crate) fn needs_this_core(&self, run: &Run) -> bool {
        match self {
            Self::Tcp(connection) => connection.needs_this_core(run),
            Self::Local(_) => false,
        }
    }

    /// Moves what can be moved for a caller who waits for a small frame.
    pub(crate) fn drive_control(&self) {
        if let Self::Tcp(connection) = self {
            connection.drive_control();
        }
    }

    /// The caller who drove is going to sleep.
    pub(crate) fn hand_over(&self) {
        match self {
            Self::Tcp(connection) => connection.hand_over(),
            Self::Local(core) => core.call_any_worker(),
        }
    }

    /// Sends a notification.
    pub(crate) fn notify(&self, transfer: u64, message: &[u8]) {
        match self {
            Self::Tcp(connection) => connection.notify(transfer, message),
            Self::Local(core) => core.inbox.push(core.name(), message.to_vec()),
        }
    }

    /// Tells the sender of a tagged message how it ended.
    pub(crate) fn send_done(&self, transfer: u64, status: Status, text: &str) {
        match self {
            Self::Tcp(connection) => connection.send_done(transfer, status, text),
            Self::Local(core) => {
                let error = (status != Status::Ok).then(|| Error::PeerRefused {
                    peer: core.name().to_owned(),
                    status,
                    text: text.to_owned(),
                });
                core.own_peer().tagged.sent(transfer, error);
            }
        }
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        match self {
            Self::Tcp(connection) => &connection.core,
            Self::Local(core) => core,
        }
    }

    pub(crate) fn lanes(&self) -> usize {
        match self {
            Self::Tcp(connection) => connection.lanes.len(),
            Self::Local(_) => 1,
        }
    }

    pub(crate) fn is_dead(&self) -> bool {
        match self {
            Self::Tcp(connection) => connection.is_dead(),
            Self::Local(_) => false,
        }
    }
}
