//! Checks and measures this crate on a machine with a GPU:
//! gpu_probe [--device N] [--check-only | --batches | --leak N | --failure]
//!
//! Ends with a status other than zero if any byte is wrong. `--check-only` leaves the measurements
//! out, for compute-sanitizer, `--batches` checks batches of scattered blocks alone. `--leak N`
//! makes and drops everything N times and compares the memory in use. `--failure` checks what is
//! left after a copy that the device refuses.

mod batches;
mod bytes;
mod check;
mod failure;
mod leak;
mod load;
mod places;
mod rates;
mod raw;

use std::process::ExitCode;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

struct Arguments {
    device: u32,
    check_only: bool,
    batches: bool,
    failure: bool,
    leak: Option<u32>,
}

fn main() -> ExitCode {
    match arguments().and_then(|arguments| run(&arguments)) {
        Ok(()) => {
            println!("all is well");
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
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number =
            || -> Outcome<u32> { Ok(words.next().ok_or("a number is missing")?.parse()?) };
        match word.as_str() {
            "--device" => found.device = number()?,
            "--leak" => found.leak = Some(number()?),
            "--failure" => found.failure = true,
            "--batches" => found.batches = true,
            "--check-only" => found.check_only = true,
            _ => return Err(format!("unknown argument {word}").into()),
        }
    }
    Ok(found)
}

fn run(arguments: &Arguments) -> Outcome {
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
        return batches::run(device);
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
