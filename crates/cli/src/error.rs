//! Failures of commands.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use tcpx_bench::Error as BenchError;
use tcpx_net::interfaces::DiscoverError;

use crate::check::CheckError;
use crate::listen::ListenError;
use crate::nixl::NixlError;

/// The reason a command failed, which determines the exit status.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A setting is invalid; the message names the variable or option and what was expected.
    #[error(transparent)]
    Config(#[from] tcpx::ConfigError),
    /// The options contradict each other.
    #[error("{0}")]
    Usage(String),
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] tcpx::Error),
    /// The interfaces could not be listed.
    #[error(transparent)]
    Discover(#[from] DiscoverError),
    /// The check could not be performed.
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
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The report could not be written.
    #[error("cannot write to stdout")]
    Output(#[from] io::Error),
}

impl Failure {
    /// Returns whether the reader of stdout has closed it.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        matches!(self, Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Returns 2 if the caller must change the request, otherwise 1.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Failure::Config(_) | Failure::Usage(_) => 2,
            Failure::Bench(
                BenchError::Option { .. } | BenchError::Shape(_) | BenchError::Config(_),
            ) => 2,
            _ => 1,
        }
    }

    /// Returns a stable word for the kind of failure: the engine's, if it has one.
    pub(crate) fn kind(&self) -> String {
        let engine = match self {
            Failure::Engine(error) | Failure::Bench(BenchError::Engine(error)) => {
                Some(error.kind())
            }
            Failure::Check(error) => error.kind(),
            _ => None,
        };
        if let Some(kind) = engine {
            return snake_case(&format!("{kind:?}"));
        }
        match self {
            Failure::Config(_) | Failure::Bench(BenchError::Config(_)) => "config",
            _ if self.exit_code() == 2 => "usage",
            Failure::Check(CheckError::Bootstrap(_)) | Failure::Bench(BenchError::Bootstrap(_)) => {
                "bootstrap"
            }
            Failure::Check(_) => "check",
            Failure::Bench(_) => "bench",
            Failure::Discover(_) | Failure::Engine(_) => "environment",
            Failure::Listen(_) => "listen",
            Failure::Nixl(_) => "nixl",
            Failure::Usage(_) => "usage",
            Failure::Write { .. } | Failure::Output(_) => "write",
        }
        .to_owned()
    }

    /// Returns the remedy, if it is known.
    pub(crate) fn remedy(&self) -> Option<String> {
        match self {
            Failure::Config(_) | Failure::Bench(BenchError::Config(_)) => {
                Some("`tcpx config` lists every setting and what it accepts".into())
            }
            Failure::Usage(_) => Some("`--help` shows the options".into()),
            Failure::Engine(error) | Failure::Bench(BenchError::Engine(error)) => error.remedy(),
            Failure::Check(error) => error.remedy(),
            Failure::Bench(BenchError::Bootstrap(error)) => error.remedy(),
            Failure::Listen(_) => Some("choose another port with --port".into()),
            _ => None,
        }
    }

    /// Returns the failure as the JSON document of `--json`.
    pub(crate) fn document(&self) -> serde_json::Value {
        document(&self.kind(), &self.chain(), self.remedy().as_deref())
    }

    /// Returns the error and its causes in one line.
    pub(crate) fn chain(&self) -> String {
        chain(self)
    }
}

/// Returns the document of an error: `{"error": {"kind", "message", "remedy"}}`.
pub(crate) fn document(kind: &str, message: &str, remedy: Option<&str>) -> serde_json::Value {
    serde_json::json!({ "error": { "kind": kind, "message": message, "remedy": remedy } })
}

/// Converts `InvalidArgument` to `invalid_argument`.
fn snake_case(name: &str) -> String {
    let mut text = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.extend(c.to_lowercase());
    }
    text
}

/// Returns an error and its causes in one line; leaves out a cause that is already quoted.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
