//! One file per command.

pub(crate) mod bench;
pub(crate) mod check;
pub(crate) mod config;
pub(crate) mod devices;
pub(crate) mod doctor;
pub(crate) mod nixl;
pub(crate) mod top;
