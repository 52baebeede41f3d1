//! Memory that sockets cannot reach (a GPU's) on its way through pinned host memory.
//!
//! Sending: the device copies a chunk into a slot while the slot before it is being sent.
//! Receiving: the socket fills a slot, the device copies it on while the next one is being filled.
//! Small payloads that follow each other share a slot and a copy.
//! The device gathers and scatters blocks. Nobody waits for a copy: the driver of the lane asks whether
//! it is over.

mod receive;
mod send;
#[cfg(test)]
mod tests;

pub(crate) use self::receive::StagedReceive;
pub(crate) use self::send::StagedSend;
