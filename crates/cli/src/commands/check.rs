//! `tcpx check`: does the way between two machines work, on every lane?

use std::net::TcpListener;
use std::time::Duration;

use clap::{Args, Subcommand};
use tcpx::Config;
use tcpx_bench::place::Place;
use tcpx_bench::units;

use crate::Verdict;
use crate::check::{self, Kind, MemoryPath, Report, Reverse, Speed};
use crate::error::Failure;
use crate::host::with_port;
use crate::listen::Listen;
use crate::output::{Output, Tone};
use crate::settings::Settings;
use crate::units::{count, parse_time};

const LONG: &str = "\
Tests the connection between two machines as an application would use it: `tcpx check server` on \
one, `tcpx check client HOST` on the other. The two meet on a bootstrap port, exchange connection \
infos, connect (the handshake proves on both sides that the other was given the info), then ping \
every lane and move a WRITE and a READ over all of them. Every byte is compared.

Meanwhile the server tries whether it could connect to the client: a firewall may allow one \
direction only, which is enough for transfers once the client has connected. What does not work is \
told with every address that was tried, what happened there, and a remedy.

Then the client writes for a moment, with the settings as they are, and says how fast that is and \
what limits it: the network, a CPU, the peer, pinned slots, one lane.

Where both are on one host, the client also says which path host memory and GPU memory take there, \
direct copies or lanes, and why not the better one.";

const EXAMPLES: &str = "\
\x1b[1m\x1b[4mExamples:\x1b[0m
  tcpx check server                       On the first machine …
  tcpx check client 10.0.0.1              … and on the second
  tcpx check server --keep --port 9000    For many clients, until Ctrl-C
  tcpx check client '[fd00::1]:9000' --lanes 8 --json
  tcpx check client 10.0.0.1 --mem vram:0 From and to the memory of GPU 0

The bootstrap port hands the connection info, with its secret, to whoever connects: open it on \
networks you trust, and only while you test.

Exits with 0 when every lane works, with 1 when one does not or the other side is not there.";

/// Test the connection to another machine: addresses, handshake, every lane
#[derive(Debug, Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Wait for a client, test with it, report and exit
    Server(ServerArguments),
    /// Connect to a server and test every lane
    Client(ClientArguments),
}

#[derive(Debug, Args)]
struct ServerArguments {
    #[command(flatten)]
    listen: Listen,

    /// Go on with further clients until interrupted
    #[arg(long)]
    keep: bool,

    /// Give up when no client has come for this long [default: never]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    wait: Option<Duration>,

    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct ClientArguments {
    /// Where the server is: a name or address, with a port unless it is the default one
    #[arg(value_name = "HOST[:PORT]", value_parser = with_port)]
    host: String,

    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct Common {
    /// How long each step may take, such as 500ms or 10s
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_time)]
    timeout: Duration,

    /// Where this side's memory lies: host, or vram:N for GPU N
    #[arg(long = "mem", value_name = "PLACE", default_value_t)]
    memory: Place,

    #[command(flatten)]
    settings: Settings,
}

pub(crate) fn run(args: &Arguments, output: &mut Output) -> Result<Verdict, Failure> {
    match &args.role {
        Role::Server(args) => server(args, &args.common.settings.load()?, output),
        Role::Client(args) => {
            let config = args.common.settings.load()?;
            let Common {
                timeout, memory, ..
            } = args.common;
            let report = check::client(&config, memory, &args.host, timeout)?;
            conclude(&report, output)
        }
    }
}

fn server(
    args: &ServerArguments,
    config: &Config,
    output: &mut Output,
) -> Result<Verdict, Failure> {
    let memory = args.common.memory;
    let _device = memory.open()?;
    let listener = args.listen.with(TcpListener::bind)?;
    let address = listener.local_addr()?;
    loop {
        output.note(format_args!("Waiting for a client on {address} …"));
        let outcome = check::serve(&listener, config, memory, args.wait, args.common.timeout);
        match outcome {
            Ok(report) => {
                let verdict = conclude(&report, output)?;
                if !args.keep {
                    return Ok(verdict);
                }
            }
            Err(error) if args.keep && !error.is_nobody() => output.failure(&error.into())?,
            Err(error) => return Err(error.into()),
        }
    }
}

fn conclude(report: &Report, output: &mut Output) -> Result<Verdict, Failure> {
    if output.is_json() {
        output.document(report)?;
    } else {
        print(report, output)?;
    }
    Ok(if report.ok {
        Verdict::Fine
    } else {
        Verdict::Problem
    })
}

fn print(report: &Report, output: &mut Output) -> Result<(), Failure> {
    let mut parties = output.table();
    for (word, party) in [("this side", &report.local), ("other side", &report.remote)] {
        let addresses: Vec<String> = party.addresses.iter().map(ToString::to_string).collect();
        parties.add_row(vec![
            output.cell(Tone::Dim, word),
            output.cell(Tone::Strong, &party.name),
            output.cell(Tone::Plain, addresses.join(", ")),
        ]);
    }
    output.show(parties)?;
    if let Some(seconds) = report.connect_seconds {
        output.line(format_args!(
            "Handshake and lanes took {}.",
            units::seconds(seconds)
        ))?;
    }
    output.line("")?;

    let mut lanes = output.table();
    lanes.set_header(output.header(&[
        "LANE",
        "LOCAL",
        "REMOTE",
        "ROUND TRIP",
        "SENT",
        "RECEIVED",
        "",
    ]));
    for lane in &report.lanes {
        let (verdict, tone) = if lane.ok {
            ("works", Tone::Good)
        } else {
            ("does not work", Tone::Bad)
        };
        lanes.add_row(vec![
            output.cell(Tone::Strong, lane.index),
            output.cell(Tone::Plain, lane.local),
            output.cell(Tone::Plain, lane.remote),
            output.cell(
                Tone::Plain,
                lane.round_trip_seconds.map_or("-".into(), units::seconds),
            ),
            output.cell(Tone::Plain, units::bytes(lane.bytes_sent)),
            output.cell(Tone::Plain, units::bytes(lane.bytes_received)),
            output.cell(tone, verdict),
        ]);
    }
    output.show(lanes)?;
    output.line("")?;
    // On another host lanes carry everything, which is no news.
    if check::is_local(&report.lanes) {
        for path in &report.paths {
            output.line(path_line(path))?;
        }
    }
    if let Some(speed) = &report.speed {
        output.line(speed_line(speed))?;
    }
    output.line(verdict(report, output))?;
    if let Some(text) = report.reverse.as_ref().and_then(one_way) {
        output.line(format_args!(
            "{} {text}",
            output.paint(Tone::Warn, "One way only:")
        ))?;
    }
    Ok(())
}

/// Says how fast memory moves, and what limits that.
fn speed_line(speed: &Speed) -> String {
    match (speed.bytes_per_second, &speed.limit, &speed.why_not) {
        (Some(rate), Some(limit), _) => {
            let rate = rate / 1e9;
            format!("WRITEs reach {rate:.2} GB/s. What limits: {limit}.")
        }
        (.., Some(why_not)) => format!("How fast memory moves is not known: {why_not}."),
        _ => "How fast memory moves is not known.".into(),
    }
}

/// Says what does not work where the server cannot connect to the client.
fn one_way(reverse: &Reverse) -> Option<String> {
    let remedy = reverse.remedy.as_ref()?;
    Some(format!(
        "{reverse}.\nTransfers work once this side has connected. Where the other side transfers \
         first, {remedy}."
    ))
}

/// Says what carries one kind of memory.
fn path_line(path: &MemoryPath) -> String {
    let memory = match path.memory {
        Kind::Host => "Host memory",
        Kind::Gpu => "GPU memory",
    };
    match &path.why_not {
        None => format!("{memory} is copied directly, without sockets."),
        Some(reason) => format!("{memory} goes over lanes: {reason}."),
    }
}

fn verdict(report: &Report, output: &Output) -> String {
    match &report.problem {
        None => format!(
            "{} {}, {} written and read back, every byte as it should be.",
            output.paint(Tone::Good, "The connection works:"),
            count(report.lanes.len(), "lane"),
            units::bytes(report.bytes)
        ),
        Some(problem) => {
            format!(
                "{} {problem}.",
                output.paint(Tone::Bad, "The connection does not work:")
            )
        }
    }
}
