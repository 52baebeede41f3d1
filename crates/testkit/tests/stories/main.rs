//! The stories of two or more processes, one file for each theme, in one program: it is linked once, and stories that wait
//! for something leave the processor to others.

mod attack;
mod closing;
mod connect;
mod failover;
mod failure;
mod forks;
mod insiders;
mod network;
mod notify;
mod same_host;
mod strangers;
mod tagged;
mod transfer;
mod trust;
