//! The `tcpx` command: shows and checks this machine, and measures how fast it moves memory.
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
mod top;
mod units;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};
use crate::error::Failure;
use crate::output::Output;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    let mut output = Output::stdout(cli.global.json, cli.global.color);
    match run(cli, &mut output) {
        Ok(Verdict::Fine) => ExitCode::SUCCESS,
        Ok(Verdict::Problem) => ExitCode::from(1),
        Ok(Verdict::Interrupted) => ExitCode::from(130),
        Err(failure) if failure.is_broken_pipe() => ExitCode::SUCCESS,
        Err(failure) => {
            // The reader of stdout may be gone as well; the exit status still reports the failure.
            let _ = output.failure(&failure);
            ExitCode::from(failure.exit_code())
        }
    }
}

/// Explains why the command line is invalid, or prints the requested help.
fn refuse(error: &clap::Error) -> ExitCode {
    // Options are not parsed yet: the word itself requests JSON.
    let json = std::env::args_os().any(|word| word == "--json");
    // The reader may be gone; the exit status still reports the failure.
    let _ = error.print();
    if json && error.use_stderr() {
        let text = error.render().to_string();
        let message = text.lines().next().unwrap_or_default();
        let message = message.strip_prefix("error: ").unwrap_or(message);
        let document = error::document("usage", message, Some("`--help` shows the options"));
        let _ = Output::stdout(true, args::Color::Never).document(&document);
    }
    // Help and version are no errors: uses clap's own statuses, 0 and 2.
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
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
        Command::Top(args) => commands::top::run(&args, output),
    }
}

/// The exit status of a command that ran to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Exit status 0.
    Fine,
    /// Exit status 1: the report names the problem.
    Problem,
    /// Exit status 130, as for a program ended by SIGINT: the report covers what was done before.
    Interrupted,
}
