//! Attackers that speak the wire protocol themselves. Whatever they do, the victim ends that
//! connection with a clear reason or refuses, no byte outside granted memory changes, and an honest
//! peer is still served.

mod flooding;
mod greedy;
mod lying;
mod replaying;
mod slow;
