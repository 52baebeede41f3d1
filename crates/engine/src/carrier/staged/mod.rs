//! Staging: memory that sockets cannot access (GPU memory) passes through pinned host memory.
//!
//! Sending: the device copies a chunk into a slot while the previous slot is being sent. Receiving:
//! the socket fills a slot, and the device copies it on while the next slot is being filled.
//! Consecutive small payloads share a slot and a copy. The device gathers and scatters blocks. No
//! thread waits for a copy: the driver of the lane polls it.

mod receive;
mod send;
#[cfg(test)]
mod tests;

pub(crate) use self::receive::StagedReceive;
pub(crate) use self::send::StagedSend;
