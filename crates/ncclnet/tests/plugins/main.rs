//! Tests the loader with real plugins: C libraries compiled here, that move real bytes over
//! loopback.

mod build;
mod flushing;
mod hot_path;
mod moving;
mod opening;
mod rules;
mod wire;
