//! The live view behind `tcpx top`.
//!
//! ```text
//!   sockets in the user's folders ──► read ──► model ──► report ──► view (terminal)
//!    (each process offers one)      (JSON)   (history)  (rows)  └─► text, JSON
//! ```
//!
//! `read` finds and queries the processes, `model` keeps the last minute, `report` computes the
//! rows, `view` draws them, `app` holds the state that keys change, and `screen` runs the loop.

mod app;
mod model;
mod read;
mod report;
mod screen;
mod text;
mod view;

pub(crate) use self::model::Model;
pub(crate) use self::read::{Reader, Reading};
pub(crate) use self::report::Report;
pub(crate) use self::screen::run;
pub(crate) use self::text::print;
