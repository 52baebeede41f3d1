//! The checks of `tcpx doctor`: one module per subject, each a pure judgement of what was read.

mod buffers;
mod gpu;
mod kernel;
mod limits;
mod machine;
mod network;
mod plugin;
mod presence;
mod transfer;

use serde::Serialize;
use tcpx::{Config, ConfigError, TransportKind, UnknownVariable};
use tcpx_bench::place::Place;
use tcpx_net::interfaces::{self, Interface};

use self::machine::Machine;
use crate::error::chain;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// Nothing to do.
    Ok,
    /// Worth knowing.
    Info,
    /// Transfers work, slower or fewer than they could be.
    Warn,
    /// Transfers will not work.
    Fail,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// A stable name: subject, dot, detail.
    pub(crate) id: &'static str,
    pub(crate) level: Level,
    /// The observation.
    pub(crate) found: String,
    /// The remedy, if there is one.
    pub(crate) advice: Option<String>,
}

impl Finding {
    fn ok(id: &'static str, found: impl Into<String>) -> Self {
        Finding {
            id,
            level: Level::Ok,
            found: found.into(),
            advice: None,
        }
    }

    fn info(id: &'static str, found: impl Into<String>) -> Self {
        Finding {
            level: Level::Info,
            ..Finding::ok(id, found)
        }
    }

    fn warn(id: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Finding {
            level: Level::Warn,
            ..Finding::ok(id, found)
        }
        .advise(advice)
    }

    fn fail(id: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Finding {
            level: Level::Fail,
            ..Finding::ok(id, found)
        }
        .advise(advice)
    }

    fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }
}

/// Runs all checks, in the order of the report; `config` is the user's configuration.
///
/// Calls `started` with the name of each check before it runs: one of them takes a moment.
pub(crate) fn examine(
    config: &Result<Config, ConfigError>,
    mut started: impl FnMut(&'static str),
) -> Vec<Finding> {
    let machine = Machine::this();
    let mut findings = vec![settings(config)];
    findings.extend(Config::unknown_variables().iter().map(unknown_variable));
    // With invalid settings, judges the machine by the defaults.
    let effective = config.clone().unwrap_or_else(|_| Config::defaults());

    started("limits and kernel");
    findings.push(limits::open_files(machine.open_files(), effective.lanes()));
    findings.push(limits::locked_memory(machine.locked_memory()));
    findings.extend(kernel::findings(&machine));

    started("interfaces");
    let found = interfaces::discover();
    findings.push(match &found {
        Ok(found) => network::selection(effective.interfaces(), found),
        Err(error) => network::undiscovered(&chain(error)),
    });
    let chosen: Vec<Interface> = found
        .ok()
        .and_then(|found| effective.interfaces().select(&found).ok())
        .unwrap_or_default();
    findings.extend(network::findings(&machine, &chosen, effective.lanes()));
    findings.extend(buffers::findings(&machine, &chosen, &effective));

    started("GPUs");
    findings.extend(gpu::findings(&machine, &chosen, &effective, config.is_ok()));
    findings.push(match effective.transport() {
        TransportKind::Tcp => presence::plugin(&machine, effective.plugin()),
        TransportKind::Plugin => plugin::finding(&effective),
    });

    if config.is_ok() {
        started("a transfer over loopback");
        findings.push(transfer::loopback(&effective, Place::Host));
    }
    findings
}

fn unknown_variable(unknown: &UnknownVariable) -> Finding {
    let advice = match unknown.suggestion {
        Some(suggestion) => format!("set {suggestion} instead, or unset {}", unknown.name),
        None => format!("unset {}; `tcpx config` lists every setting", unknown.name),
    };
    Finding::warn("config.unknown", unknown.to_string(), advice)
}

fn settings(config: &Result<Config, ConfigError>) -> Finding {
    const ID: &str = "config.settings";
    match config {
        Ok(config) => {
            let set: Vec<String> = config
                .rows()
                .into_iter()
                .filter(|row| row.source != tcpx::Source::Default)
                .map(|row| format!("{}={} ({})", row.key, row.value, row.source))
                .collect();
            match set.as_slice() {
                [] => Finding::ok(ID, "every setting has its default"),
                set => Finding::ok(ID, set.join(", ")),
            }
        }
        Err(error) => Finding::fail(
            ID,
            chain(error),
            "correct or unset it; `tcpx config` lists every setting",
        ),
    }
}
