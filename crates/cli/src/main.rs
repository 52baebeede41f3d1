//! The `tcpx` command: what this machine offers, whether it is fit, and how fast it moves memory.
//!
//! Every command is a file in `commands`: it reads its arguments, calls the library that does the
//! work, and prints a report as text or JSON. Reports go to stdout, everything else to stderr.

mod args;
mod check;
mod commands;
mod doctor;
mod error;
mod gpus;
mod host;
mod listen;
mod log;
mod nixl;
mod output;
mod settings;
mod sys;
mod units;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};
use crate::error::Failure;
use crate::output::Output;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut output = Output::stdout(cli.global.json, cli.global.color);
    match run(cli, &mut output) {
        Ok(Verdict::Fine) => ExitCode::SUCCESS,
        Ok(Verdict::Problem) => ExitCode::from(1),
        Err(failure) if failure.is_broken_pipe() => ExitCode::SUCCESS,
        Err(failure) => {
            // Whoever reads stdout may be gone as well; the exit status still tells.
            let _ = output.failure(&failure);
            ExitCode::from(failure.exit_code())
        }
    }
}

fn run(cli: Cli, output: &mut Output) -> Result<Verdict, Failure> {
    log::start(cli.global.log.as_ref(), cli.global.color);
    match cli.command {
        Command::Devices(args) => commands::devices::run(&args, output),
        Command::Doctor(args) => commands::doctor::run(&args, output),
        Command::Check(args) => commands::check::run(&args, output),
        Command::Bench(args) => commands::bench::run(&args, output),
        Command::Config(args) => commands::config::run(&args, output),
        Command::Nixl(args) => commands::nixl::run(&args, output),
    }
}

/// What a command that ran to its end has to say to the shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Exit status 0.
    Fine,
    /// Exit status 1: the report says what is wrong.
    Problem,
}
