//! The engine's settings as options, shared by every command that uses them.

use clap::Args;
use tcpx::{Config, ConfigError};

/// Settings of the engine; each overrides its variable.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Engine settings (each overrides its TCPX_ variable)")]
pub(crate) struct Settings {
    /// Data connections to each peer
    #[arg(long, value_name = "N")]
    lanes: Option<String>,

    /// Bytes one lane moves at once
    #[arg(long = "chunk", value_name = "BYTES")]
    chunk_bytes: Option<String>,

    /// Chunks in flight on each lane
    #[arg(long, value_name = "N")]
    window: Option<String>,

    /// Threads that move bytes
    #[arg(long, value_name = "N")]
    workers: Option<String>,

    /// Interfaces that carry lanes
    ///
    /// In the syntax of NCCL_SOCKET_IFNAME: a comma-separated list of name prefixes; a leading =
    /// requires exact names, a leading ^ selects every usable interface but these.
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    interfaces: Option<String>,

    /// Additional interfaces to listen on; lanes use them as a last resort
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    control_interface: Option<String>,

    /// Any other setting, by its variable; `tcpx config` lists them
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = key_value)]
    others: Vec<(String, String)>,
}

impl Settings {
    /// Loads defaults, then the environment, then these options.
    ///
    /// # Errors
    ///
    /// The first invalid value, with its name and what was expected.
    pub(crate) fn load(&self) -> Result<Config, ConfigError> {
        let mut config = Config::from_env()?;
        for (key, value) in self.given() {
            config.set(key, value)?;
        }
        Ok(config)
    }

    /// Returns the given options, as keys and values of [`Config::set`].
    pub(crate) fn given(&self) -> impl Iterator<Item = (&str, &str)> {
        let named = [
            ("lanes", &self.lanes),
            ("chunk_bytes", &self.chunk_bytes),
            ("window", &self.window),
            ("workers", &self.workers),
            ("interfaces", &self.interfaces),
            ("control_interface", &self.control_interface),
        ];
        let named = named
            .into_iter()
            .filter_map(|(key, value)| Some((key, value.as_deref()?)));
        named.chain(
            self.others
                .iter()
                .map(|(key, value)| (key.as_str(), value.as_str())),
        )
    }
}

fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => Ok((key.trim().into(), value.into())),
        _ => Err("expected KEY=VALUE, such as TCPX_PEER_TIMEOUT=10s".into()),
    }
}
