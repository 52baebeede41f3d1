//! The control socket of a receive comm: a stream of 16-byte records.

use crate::comm::Context;
use crate::error::Error;
use crate::socket::{Progress, Socket};
use crate::wire::{RECORD_BYTES, Record};

/// Maximum records read by one system call.
const BATCH: usize = 64;

/// Reads records, many at a time.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    socket: Socket,
    buffer: [u8; BATCH * RECORD_BYTES],
    start: usize,
    end: usize,
}

impl ControlSocket {
    pub(crate) fn new(socket: Socket) -> Self {
        Self {
            socket,
            buffer: [0; BATCH * RECORD_BYTES],
            start: 0,
            end: 0,
        }
    }

    /// Returns the next record, if it has arrived. Called only while a receive waits for one.
    pub(crate) fn record(
        &mut self,
        sockets: usize,
        context: &Context,
    ) -> Result<Option<Record>, Error> {
        if self.end - self.start < RECORD_BYTES {
            self.fill(context)?;
        }
        match self.buffer[self.start..self.end].first_chunk::<RECORD_BYTES>() {
            Some(bytes) => {
                let record = Record::decode(bytes, sockets)?;
                self.start += RECORD_BYTES;
                Ok(Some(record))
            }
            None => Ok(None),
        }
    }

    fn fill(&mut self, context: &Context) -> Result<(), Error> {
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let what = match self.socket.receive(&mut self.buffer[self.end..]) {
            Ok(Progress::Moved(n)) => {
                self.end += n;
                return Ok(());
            }
            Ok(Progress::Blocked) => return Ok(()),
            Ok(Progress::Closed) => "it was closed while a receive waits",
            Err(_) => "it was reset while a receive waits",
        };
        Err(context.lost(what))
    }
}
