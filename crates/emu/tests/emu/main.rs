//! Tests the plugin through its exported symbols, over loopback.
//!
//! Settings are read once in a process, so every test runs in a process of its own (see [`child`]).

#[macro_use]
mod child;
mod connection;
mod consume;
mod cuda;
mod faults;
mod flow;
mod fragments;
mod harness;
mod memory;
mod plain;
mod processes;
mod settings;
mod tables;
