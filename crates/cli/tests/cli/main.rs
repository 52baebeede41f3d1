//! Tests the real binary, as a user or a script runs it.

mod bench;
mod beside;
mod check;
mod devices;
mod doctor;
mod help;
mod namespaces;
mod nixl;
mod support;
mod top;
