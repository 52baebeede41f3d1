//! Failures affect one transfer or one peer: memory is released when the engine reports it, errors
//! say what happened, no call blocks for ever, and other peers are not affected.

mod abort;
mod chaos;
mod deregister;
mod peers;
mod unmapped;

const MIB: usize = 1 << 20;
