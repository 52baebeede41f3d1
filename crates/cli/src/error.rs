//! Why a command could not do what it was asked to.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use tcpx_bench::Error as BenchError;
use tcpx_net::interfaces::DiscoverError;

use crate::check::CheckError;
use crate::listen::ListenError;
use crate::nixl::NixlError;

/// Why a command failed, and with it the exit status.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A setting cannot be used; the message names the variable or option and what was expected.
    #[error(transparent)]
    Config(#[from] tcpx::ConfigError),
    /// The options do not fit together.
    #[error("{0}")]
    Usage(String),
    /// The engine could not do it.
    #[error(transparent)]
    Engine(#[from] tcpx::Error),
    /// The interfaces could not be listed.
    #[error(transparent)]
    Discover(#[from] DiscoverError),
    /// The check could not be carried out.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// The measurement could not be made.
    #[error(transparent)]
    Bench(#[from] BenchError),
    /// A server could not be started.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// NIXL or its backend could not be found or changed.
    #[error(transparent)]
    Nixl(#[from] NixlError),
    /// A file could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The report could not be written.
    #[error("cannot write to stdout")]
    Output(#[from] io::Error),
}

impl Failure {
    /// Whether whoever read our output has simply seen enough.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        matches!(self, Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// 2 where the caller has to word the request differently, otherwise 1.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Failure::Config(_) | Failure::Usage(_) => 2,
            Failure::Bench(
                BenchError::Option { .. } | BenchError::Shape(_) | BenchError::Config(_),
            ) => 2,
            _ => 1,
        }
    }

    /// The error and its causes in one line.
    pub(crate) fn chain(&self) -> String {
        chain(self)
    }
}

/// An error and its causes in one line; a cause that its effect has already quoted is left out.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
