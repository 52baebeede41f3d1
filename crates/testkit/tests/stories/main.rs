//! The stories of two or more processes, one file per subject, in one program: it is linked once,
//! and waiting stories leave the processor to others.

mod attack;
mod closing;
mod connect;
mod failover;
mod failure;
mod forks;
mod insiders;
mod network;
mod notify;
mod ports;
mod same_host;
mod strangers;
mod tagged;
mod timeline;
mod transfer;
mod trust;
