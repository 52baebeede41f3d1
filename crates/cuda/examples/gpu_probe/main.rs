//! Checks and measures this crate on a machine with a GPU:
//! gpu_probe [--device N] [--check-only | --batches | --leak N | --failure]
//! gpu_probe [--device N] --same-host [--check-only] [--owner-device N] [--owner-env NAME=VALUE]
//!
//! Exits with a status other than zero if any byte is wrong. `--check-only` skips the measurements,
//! for compute-sanitizer; `--batches` checks the places of memory and batches of scattered blocks
//! only. `--leak N` creates and drops everything N times and compares the memory in use.
//! `--failure` checks the state after a copy that the device refuses. `--same-host` checks and
//! measures copies between two processes, of which the second, the owner of the memory, may have
//! another device and environment.

mod batches;
mod bytes;
mod check;
mod failure;
mod leak;
mod load;
mod places;
mod rates;
mod raw;
mod rows;
mod same_host;

use std::process::ExitCode;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

struct Arguments {
    device: u32,
    check_only: bool,
    batches: bool,
    failure: bool,
    leak: Option<u32>,
    same_host: bool,
    /// Whether this is the second process of `--same-host`.
    is_owner: bool,
    owner: same_host::Options,
}

fn main() -> ExitCode {
    match arguments().and_then(|arguments| run(&arguments)) {
        Ok(()) => {
            println!("all checks passed");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn arguments() -> Outcome<Arguments> {
    let mut found = Arguments {
        device: 0,
        check_only: false,
        batches: false,
        failure: false,
        leak: None,
        same_host: false,
        is_owner: false,
        owner: same_host::Options {
            device: None,
            environment: Vec::new(),
        },
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut text = || words.next().ok_or(format!("{word} has no value"));
        let mut number = || -> Outcome<u32> { Ok(text()?.parse()?) };
        match word.as_str() {
            "--device" => found.device = number()?,
            "--leak" => found.leak = Some(number()?),
            "--same-host" => found.same_host = true,
            "--owner" => found.is_owner = true,
            "--owner-device" => found.owner.device = Some(number()?),
            "--owner-env" => found.owner.environment.push(text()?),
            "--failure" => found.failure = true,
            "--batches" => found.batches = true,
            "--check-only" => found.check_only = true,
            _ => return Err(format!("unknown argument {word}").into()),
        }
    }
    Ok(found)
}

fn run(arguments: &Arguments) -> Outcome {
    if arguments.is_owner {
        return same_host::run_owner(arguments.device);
    }
    for info in tcpx_cuda::devices()? {
        println!("{info:?}");
    }
    let device = arguments.device;
    println!("free: {} MiB", tcpx_cuda::free_bytes(device)? >> 20);
    if let Some(rounds) = arguments.leak {
        return leak::run(device, rounds);
    }
    if arguments.failure {
        return failure::run(device);
    }
    if arguments.batches {
        places::run(device)?;
        return batches::run(device);
    }
    if arguments.same_host {
        return same_host::run(device, &arguments.owner, arguments.check_only);
    }
    places::run(device)?;
    check::run(device)?;
    batches::run(device)?;
    load::run(device)?;
    if !arguments.check_only {
        rates::run(device)?;
    }
    Ok(())
}
