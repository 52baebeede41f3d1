//! What goes wrong goes wrong for one transfer or one peer: memory is let go of when the engine says so, errors say
//! what happened, nobody waits for ever, and nobody else notices.

mod abort;
mod chaos;
mod deregister;
mod peers;
mod unmapped;

const MIB: usize = 1 << 20;
