//! Peers of the second process, and notifications.

use tcpx::ErrorKind;

use super::RemoteProcess;
use crate::host::Host;
use crate::protocol::{Command, Failure, Lane, Notice};
use crate::story::{REMOTE_GUARD, wait_until};

impl RemoteProcess {
    /// Tells it of the session of this process.
    pub fn knows(&self, host: &Host) {
        self.knows_info(&host.session.connection_info());
    }

    /// Tells it of any session.
    pub fn knows_info(&self, info: &[u8]) {
        let info = info.to_vec();
        let _: String = self.expect(Command::AddPeer { info });
    }

    /// Makes it connect.
    ///
    /// # Errors
    /// It could not.
    pub fn connect(&self, peer: &str) -> Result<(), Failure> {
        let (peer, timeout) = (peer.to_owned(), REMOTE_GUARD);
        self.call(Command::Connect { peer, timeout })
    }

    /// The name of the next peer that has connected to it.
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

    /// Whether it is connected. To somebody who is unknown it is not.
    ///
    /// # Panics
    /// When the engine has another objection.
    pub fn is_connected(&self, peer: &str) -> bool {
        let peer = peer.to_owned();
        match self.call(Command::IsConnected { peer }) {
            Ok(connected) => connected,
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => panic!("{self:?}: {error}"),
        }
    }

    /// Its lanes to a peer; none to somebody who is unknown.
    ///
    /// # Panics
    /// When the engine has another objection.
    pub fn lanes(&self, peer: &str) -> Vec<Lane> {
        let peer = peer.to_owned();
        match self.call(Command::Lanes { peer }) {
            Ok(lanes) => lanes,
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => panic!("{self:?}: {error}"),
        }
    }

    /// Makes it send a message on its own.
    pub fn notify(&self, peer: &str, message: &[u8]) {
        let (peer, message) = (peer.to_owned(), message.to_vec());
        self.expect(Command::Notify { peer, message })
    }

    /// The next notification that it gets.
    pub fn notification(&self) -> Notice {
        self.expect(Command::WaitNotification {
            timeout: REMOTE_GUARD,
        })
    }

    /// The next `count` notifications that it gets.
    pub fn next_notifications(&self, count: usize) -> Vec<Notice> {
        let mut all = Vec::new();
        wait_until("all notifications are there", || {
            all.extend(self.notifications());
            all.len() >= count
        });
        all
    }

    /// Whatever notifications it has got.
    pub fn notifications(&self) -> Vec<Notice> {
        self.expect(Command::TakeNotifications)
    }
}
