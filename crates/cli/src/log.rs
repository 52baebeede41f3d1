//! Log lines on stderr.

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;

use crate::args::{Color, Filter};

/// Starts logging to stderr by `filter`, or warnings only.
pub(crate) fn start(filter: Option<&Filter>, color: Color) {
    let filter = filter.map_or("warn", |filter| filter.0.as_str());
    let ansi = match color {
        Color::Always => true,
        Color::Never => false,
        Color::Auto => {
            io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_writer(tcpx::log::stderr)
        .with_ansi(ansi)
        .init();
}
