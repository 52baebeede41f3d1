//! Peers of the second process, and notifications.

use tcpx::ErrorKind;

use super::RemoteProcess;
use crate::host::Host;
use crate::ledger::Figures;
use crate::protocol::{Command, Failure, Lane, Notice};
use crate::story::{REMOTE_GUARD, wait_until};

impl RemoteProcess {
    /// Adds the session of this process as its peer.
    pub fn knows(&self, host: &Host) {
        self.knows_info(&host.session.connection_info());
    }

    /// Adds any session as its peer.
    pub fn knows_info(&self, info: &[u8]) {
        let info = info.to_vec();
        let _: String = self.expect(Command::AddPeer { info });
    }

    /// Returns its session's statistics, which agree with the requests to it.
    pub fn figures(&self) -> Figures {
        self.expect(Command::Figures)
    }

    /// Makes it connect.
    ///
    /// # Errors
    /// The connection failed.
    pub fn connect(&self, peer: &str) -> Result<(), Failure> {
        let (peer, timeout) = (peer.to_owned(), REMOTE_GUARD);
        self.call(Command::Connect { peer, timeout })
    }

    /// Returns the name of the next peer that has connected to it.
    pub fn accept(&self) -> String {
        self.expect(Command::Accept {
            timeout: REMOTE_GUARD,
        })
    }

    /// Makes it disconnect.
    pub fn disconnect(&self, peer: &str) {
        let peer = peer.to_owned();
        self.expect(Command::Disconnect { peer })
    }

    /// Returns whether it is connected; false for an unknown peer.
    ///
    /// # Panics
    /// When the engine fails otherwise.
    pub fn is_connected(&self, peer: &str) -> bool {
        let peer = peer.to_owned();
        match self.call(Command::IsConnected { peer }) {
            Ok(connected) => connected,
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => panic!("{self:?}: {error}"),
        }
    }

    /// Returns its lanes to a peer; none for an unknown peer.
    ///
    /// # Panics
    /// When the engine fails otherwise.
    pub fn lanes(&self, peer: &str) -> Vec<Lane> {
        let peer = peer.to_owned();
        match self.call(Command::Lanes { peer }) {
            Ok(lanes) => lanes,
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => panic!("{self:?}: {error}"),
        }
    }

    /// Makes it send a notification.
    pub fn notify(&self, peer: &str, message: &[u8]) {
        let (peer, message) = (peer.to_owned(), message.to_vec());
        self.expect(Command::Notify { peer, message })
    }

    /// Returns the next notification that it gets.
    pub fn notification(&self) -> Notice {
        self.expect(Command::WaitNotification {
            timeout: REMOTE_GUARD,
        })
    }

    /// Returns the next `count` notifications that it gets.
    pub fn next_notifications(&self, count: usize) -> Vec<Notice> {
        let mut all = Vec::new();
        wait_until("all notifications are there", || {
            all.extend(self.notifications());
            all.len() >= count
        });
        all
    }

    /// Returns all notifications that it has received.
    pub fn notifications(&self) -> Vec<Notice> {
        self.expect(Command::TakeNotifications)
    }
}
