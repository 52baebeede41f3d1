//! The command line: options shared by all commands, and the list of commands.

use clap::{Args, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::commands::{bench, check, config, devices, doctor, nixl, top};

const ABOUT: &str = "Moves memory between processes and machines over plain TCP, as if by RDMA";

const LONG_ABOUT: &str = "\
Moves memory between processes and machines over plain TCP, as if by RDMA.

This command shows what a machine offers (devices, config), says whether it is fit and what to do \
about it (doctor), tests the way to another machine (check), measures how fast memory moves \
(bench) and watches applications that move it (top). Applications use the library; nothing here is needed to run them.";

const EXAMPLES: &str = "\
\x1b[1m\x1b[4mExamples:\x1b[0m
  tcpx doctor                    Is this machine fit for transfers?
  tcpx devices                   Which interfaces are there, and which ones carry lanes?
  tcpx check server              On one machine …
  tcpx check client 10.0.0.1     … and on another: does every lane work?
  tcpx bench                     How fast do two processes on this machine go?
  tcpx top                       What moves right now, how fast, and what limits it?
  tcpx config --lanes 8          Which settings apply, where from, and why?
  tcpx doctor --json | jq '.findings[] | select(.level != \"ok\")'

\x1b[1m\x1b[4mEnvironment:\x1b[0m
  TCPX_LANES              Data connections to each peer
  TCPX_CHUNK_BYTES        What one lane moves at once
  TCPX_WINDOW             Chunks in flight on each lane
  TCPX_WORKERS            Threads that move bytes
  TCPX_INTERFACES         Interfaces that carry lanes, as NCCL_SOCKET_IFNAME is written:
                          eth1,eth2 by prefix, =eth1 exactly, ^docker,lo all others
  TCPX_CONTROL_INTERFACE  Interfaces to listen on besides; lanes use them as a last resort
  TCPX_LOG                As --log
  NO_COLOR                As --color never
  `tcpx config` lists every setting with its variable, value and source.

\x1b[1m\x1b[4mExit status:\x1b[0m
  0    all is well
  1    a problem was found, or the command failed
  2    the command line or a TCPX_ variable cannot be understood
  130  a measurement was interrupted; what was measured until then is printed

With --json, an error is one document on stdout too: its kind, message and remedy.";

/// The command line of `tcpx`.
#[derive(Debug, Parser)]
#[command(
    name = "tcpx",
    version,
    about = ABOUT,
    long_about = LONG_ABOUT,
    after_long_help = EXAMPLES,
    after_help = "`tcpx --help` shows examples, environment variables and exit statuses.",
    max_term_width = 100,
    arg_required_else_help = true,
    propagate_version = true
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options that every command takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Print one JSON document instead of text
    ///
    /// A command that fails prints {"error": {"kind": ..., "message": ..., "remedy": ...}} on
    /// stdout instead, in addition to the text on stderr, and exits with a status other than 0. The
    /// remedy is null if the message contains it.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Log filter for stderr: off, error, warn, info, debug or trace
    ///
    /// Also accepts directives for single modules, such as warn,tcpx::connect=debug. The default is
    /// warn.
    #[arg(
        long,
        global = true,
        value_name = "LEVEL",
        env = "TCPX_LOG",
        hide_env = true
    )]
    pub(crate) log: Option<Filter>,

    /// When to use colours and progress bars
    #[arg(long, global = true, value_name = "WHEN", default_value_t)]
    pub(crate) color: Color,
}

/// When output is coloured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Color {
    /// On a terminal, unless NO_COLOR is set
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

impl std::fmt::Display for Color {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Color::Auto => "auto",
            Color::Always => "always",
            Color::Never => "never",
        })
    }
}

/// A parsed log filter: levels and per-module directives.
#[derive(Debug, Clone)]
pub(crate) struct Filter(pub(crate) String);

impl std::str::FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match EnvFilter::builder().parse(text) {
            Ok(_) => Ok(Filter(text.to_owned())),
            Err(error) => Err(format!(
                "{error}; expected off, error, warn, info, debug, trace, or module=level pairs"
            )),
        }
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Devices(devices::Arguments),
    Doctor(doctor::Arguments),
    Check(check::Arguments),
    Bench(Box<bench::Arguments>),
    Top(top::Arguments),
    Config(config::Arguments),
    Nixl(nixl::Arguments),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn filters_are_checked_when_they_are_typed() {
        assert!("debug".parse::<Filter>().is_ok());
        assert!("warn,tcpx::connect=trace".parse::<Filter>().is_ok());
        assert!("tcpx=loud".parse::<Filter>().is_err());
    }
}
