//! `tcpx bench`: how fast does memory move, and how close is that to raw sockets?

mod interrupt;
mod options;
mod progress;
mod server;
mod tables;
mod timeline;

use std::path::Path;
use std::time::Duration;

use clap::{Args, Subcommand};
use tcpx::Config;
use tcpx_bench::measure::{Bench, Progress};
use tcpx_bench::peer::{Program, serve_stdin};
use tcpx_bench::report::Report;
use tcpx_bench::soak::SoakOptions;

use self::options::Measurement;
use self::server::ServerArguments;
use crate::Verdict;
use crate::error::Failure;
use crate::host::with_port;
use crate::output::Output;
use crate::settings::Settings;
use crate::units;

const LONG: &str = "\
Measures how fast memory moves, in two processes. Alone, it starts the second process on this \
machine and stays on loopback unless interfaces are chosen; across machines, run `tcpx bench \
server` on one and `tcpx bench client HOST` on the other.

Every case is measured in turns with *the floor*: a plain readv/writev loop over the same bytes, \
the same blocks and as many streams. The ratio says how much of what raw sockets give is left; the \
absolute numbers depend on the machine and the day. Before and after the rounds every byte is \
compared: wrong bytes give no result.

Processes on one machine can also copy each other's memory directly, without sockets. Alone, lanes \
are measured all the same, since the floor is about sockets: --path same-host measures direct \
copies. `tcpx bench client` uses what connecting decides. The result names the path.

With --mem, the engine moves memory of GPUs; raw sockets do not reach that, so the floor moves host \
memory in any case.";

const EXAMPLES: &str = "\
\x1b[1m\x1b[4mExamples:\x1b[0m
  tcpx bench                                  The named cases, both ways, on this machine
  tcpx bench --quick                          The same in half a minute
  tcpx bench --case kv16k --op read --lanes 4
  tcpx bench --size 1M,64M --block 4K,16K --duration 5s
  tcpx bench --quick --path same-host         Direct copies within this machine
  tcpx bench --report bench.html              Everything, as one page with plots
  tcpx bench --size 64M --iterations 5 --trace bench.json
                                              Where the time goes, for ui.perfetto.dev
  tcpx bench --mem vram:0 --quick             From GPU memory to GPU memory
  tcpx bench --mem host,vram:0                This side in host memory, the other on GPU 0
  tcpx bench --beside-compute                 What a model on GPU 0 keeps of its speed meanwhile
  tcpx bench --soak 10m                       Mixed transfers, watching memory
  tcpx bench --soak 30m --faults              The same beside processes that die, stop and flood
  tcpx bench server                           On one machine …
  tcpx bench client 10.0.0.1 --json           … and on the other

\x1b[1m\x1b[4mCases:\x1b[0m
  lat4k    round trip of one 4 KiB block; the caller polls
  one64m   64 MiB in one block
  one512m  512 MiB in one block
  kv16k    64 MiB in scattered 16 KiB blocks, as a KV cache has them
  kv4k     64 MiB in scattered 4 KiB blocks

Ctrl-C ends the case under way after its current round and prints what was measured until then; a \
second one ends the program at once.

Exits with 1 when the other side fails, when bytes are wrong, or when a soak grows, and with 130 \
after Ctrl-C.";

/// Measure throughput, latency and CPU cost, beside a raw socket loop
#[derive(Debug, Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    role: Option<Role>,

    #[command(flatten)]
    measurement: Measurement,

    #[command(flatten)]
    settings: Settings,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Serve measurements of other machines, until interrupted
    Server(ServerArguments),
    /// Measure against a server on another machine
    Client(Box<ClientArguments>),
    /// The second process of a measurement on one machine
    #[command(name = SECOND_PROCESS, hide = true)]
    Second,
}

/// How this program starts itself.
const SECOND_PROCESS: &str = "second-process";

#[derive(Debug, Args)]
struct ClientArguments {
    /// Where the server is: a name or address, with a port unless it is the default one
    #[arg(value_name = "HOST[:PORT]", value_parser = with_port)]
    host: String,

    /// How long connecting may take
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = units::parse_time)]
    timeout: Duration,

    #[command(flatten)]
    measurement: Measurement,

    #[command(flatten)]
    settings: Settings,
}

pub(crate) fn run(args: &Arguments, output: &mut Output) -> Result<Verdict, Failure> {
    match &args.role {
        None => measure(&args.measurement, output, || {
            let mut program = second_process()?;
            let timeline = args.measurement.timeline();
            program.environment.extend(timeline.map(|t| t.of_second()));
            let config = config(&args.settings, &args.measurement)?;
            Ok(Bench::spawn(&program, args.measurement.places(), config)?)
        }),
        Some(Role::Client(client)) if client.measurement.faults => Err(Failure::Usage(
            "--faults: both processes must be on this machine, without `client`".into(),
        )),
        Some(Role::Client(client)) => measure(&client.measurement, output, || {
            let config = config(&client.settings, &client.measurement)?;
            let memory = client.measurement.places();
            Ok(Bench::connect(
                &client.host,
                client.timeout,
                memory,
                config,
            )?)
        }),
        Some(Role::Server(server)) => server::run(server, output),
        Some(Role::Second) => {
            serve_stdin(Settings::default().load()?)?;
            Ok(Verdict::Fine)
        }
    }
}

/// The settings, with the path that was asked for.
fn config(settings: &Settings, measurement: &Measurement) -> Result<Config, Failure> {
    let mut config = settings.load()?;
    if let Some(path) = measurement.path() {
        config.set("same_host", path.setting())?;
    }
    match measurement.timeline() {
        Some(timeline) => Ok(timeline.set(config)?),
        None => Ok(config),
    }
}

fn measure(
    args: &Measurement,
    output: &mut Output,
    start: impl FnOnce() -> Result<Bench, Failure>,
) -> Result<Verdict, Failure> {
    let plan = args.plan()?;
    let mut bench = start()?;
    let mut report = Report::new(&mut bench, std::env::args().collect());
    let interrupted = interrupt::watch();
    let mut progress = progress::Shown::new(output, interrupted);
    match &plan.beside {
        Some(options) => report.beside = bench.run_beside(&plan.cases, options, &mut progress)?,
        None => report.cases = bench.run(&plan.cases, plan.extras, &mut progress)?,
    }
    if plan.full && !progress.is_interrupted() {
        progress.say("what preparing many segments costs");
        report.prepare = bench.run_prepare(&tcpx_bench::prepare::SEGMENTS)?;
        progress.say("what an idle session costs");
        report.idle = Some(bench.run_idle(options::IDLE)?);
        progress.say("what an idle peer costs");
        report.idle_peers = Some(bench.run_idle_peers(options::IDLE_PEERS)?);
    }
    if let Some(duration) = plan.soak
        && !progress.is_interrupted()
    {
        let options = SoakOptions {
            duration,
            sample_every: options::SOAK_SAMPLE.min(duration / 4),
        };
        progress.soak(duration);
        let mut sampled = |sample: &_| progress.sampled(sample);
        report.soak = Some(if args.faults {
            bench.run_faults(&second_process()?, &options, interrupted, &mut sampled)?
        } else {
            bench.run_soak(&options, interrupted, &mut sampled)?
        });
    }
    report.interrupted = progress.is_interrupted();
    progress.finish();
    // With the last handles the traces of both processes are complete.
    let has_second = bench.has_second();
    drop(bench);
    if report.interrupted {
        output.note("Interrupted: what was measured until then follows.");
    }

    if output.is_json() {
        output.document(&report)?;
    } else {
        tables::print(&report, output)?;
    }
    if let Some(file) = &args.trace {
        if has_second {
            args.timeline()
                .map_or(Ok(()), |timeline| timeline.join())
                .map_err(|source| Failure::Write {
                    path: file.clone(),
                    source,
                })?;
        }
        output.note(format_args!(
            "Wrote {}: open it at https://ui.perfetto.dev.",
            file.display()
        ));
    }
    if let Some(path) = &plan.page {
        write_page(&report, path)?;
        output.note(format_args!("Wrote {}.", path.display()));
    }
    let grew = report.soak.is_some_and(|soak| soak.growth.grew);
    Ok(if report.interrupted {
        Verdict::Interrupted
    } else if grew {
        Verdict::Problem
    } else {
        Verdict::Fine
    })
}

/// This program in the role of the second process.
fn second_process() -> Result<Program, Failure> {
    Ok(Program::same(["bench", SECOND_PROCESS])?)
}

fn write_page(report: &Report, path: &Path) -> Result<(), Failure> {
    std::fs::write(path, report.to_html()?).map_err(|source| Failure::Write {
        path: path.to_owned(),
        source,
    })
}
