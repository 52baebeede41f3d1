//! Transfers and tagged messages of the second process.

use tcpx::{Op, RemoteRegion, TransferState};

use super::{Pending, RemoteMemory, RemoteProcess};
use crate::protocol::{Command, Copy, Failure, Hex, Piece, state_named};
use crate::setup::Setup;
use crate::story::REMOTE_GUARD;

/// A transfer of a [`RemoteProcess`].
#[derive(Clone, Copy, Debug)]
pub struct RemoteTransfer<'a> {
    process: &'a RemoteProcess,
    id: u64,
}

impl<'a> RemoteTransfer<'a> {
    /// Posts it.
    ///
    /// # Errors
    /// The engine's error.
    pub fn post(&self) -> Result<(), Failure> {
        self.begin_post(None).result()
    }

    /// Posts it with a notification.
    ///
    /// # Errors
    /// The engine's error.
    pub fn post_with_notification(&self, message: &[u8]) -> Result<(), Failure> {
        self.begin_post(Some(message)).result()
    }

    /// Posts it without waiting for the answer.
    pub fn begin_post(&self, notification: Option<&[u8]>) -> Pending<'a, ()> {
        self.process.begin(Command::Post {
            transfer: self.id,
            notification: notification.map(|m| Hex(m.to_vec())),
        })
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// The reason it failed.
    pub fn wait(&self) -> Result<(), Failure> {
        self.begin_wait().result()
    }

    /// Waits for its end, without waiting for the answer.
    pub fn begin_wait(&self) -> Pending<'a, ()> {
        let (transfer, timeout) = (self.id, REMOTE_GUARD);
        self.process.begin(Command::Wait { transfer, timeout })
    }

    /// Returns its state.
    pub fn state(&self) -> TransferState {
        let name: String = self.process.expect(Command::Poll { transfer: self.id });
        state_named(&name)
    }

    /// Aborts it.
    pub fn abort(&self) {
        self.process.expect(Command::Abort { transfer: self.id })
    }

    /// Drops it.
    pub fn release(self) {
        self.process.expect(Command::Release { transfer: self.id })
    }

    /// Returns the length of the message that a tagged receive got.
    pub fn received(&self) -> u64 {
        self.process.expect(Command::Received { transfer: self.id })
    }
}

impl RemoteProcess {
    /// Prepares a transfer between its memory and memory of a peer.
    pub fn transfer(
        &self,
        op: Op,
        peer: &str,
        memory: &RemoteMemory,
        target: &RemoteRegion,
        copies: &[Copy],
    ) -> RemoteTransfer<'_> {
        self.transfer_repeated(op, peer, memory, target, copies, 1)
    }

    /// Prepares a transfer that repeats `copies` and ends only by interference.
    pub fn endless(
        &self,
        op: Op,
        peer: &str,
        memory: &RemoteMemory,
        target: &RemoteRegion,
        chunk_bytes: usize,
    ) -> RemoteTransfer<'_> {
        let len = memory.len.min(target.len());
        let repeat = (Setup::ENDLESS_CHUNKS * chunk_bytes).div_ceil(len);
        self.transfer_repeated(op, peer, memory, target, &[Copy::new(0, 0, len)], repeat)
    }

    fn transfer_repeated(
        &self,
        op: Op,
        peer: &str,
        memory: &RemoteMemory,
        target: &RemoteRegion,
        copies: &[Copy],
        repeat: usize,
    ) -> RemoteTransfer<'_> {
        let pieces = copies.iter().map(|copy| Piece {
            region: memory.region_id(),
            descriptor: 0,
            copy: *copy,
        });
        let id = self.expect(Command::Prepare {
            write: op == Op::Write,
            peer: peer.to_owned(),
            descriptors: vec![Hex(target.to_bytes())],
            pieces: pieces.collect(),
            repeat,
        });
        RemoteTransfer { process: self, id }
    }

    /// Makes it send a tagged message.
    pub fn send(
        &self,
        peer: &str,
        memory: &RemoteMemory,
        offset: usize,
        len: usize,
        tag: u64,
    ) -> RemoteTransfer<'_> {
        let (peer, region) = (peer.to_owned(), memory.region_id());
        let id = self.expect(Command::Send {
            peer,
            region,
            offset,
            len,
            tag,
        });
        RemoteTransfer { process: self, id }
    }

    /// Makes it wait for a tagged message.
    pub fn recv(
        &self,
        peer: &str,
        memory: &RemoteMemory,
        offset: usize,
        len: usize,
        tag: u64,
    ) -> RemoteTransfer<'_> {
        let (peer, region) = (peer.to_owned(), memory.region_id());
        let id = self.expect(Command::Receive {
            peer,
            region,
            offset,
            len,
            tag,
        });
        RemoteTransfer { process: self, id }
    }
}
