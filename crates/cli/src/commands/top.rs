//! `tcpx top`: which sessions run on this machine, and how fast are they?

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;

use crate::Verdict;
use crate::error::Failure;
use crate::output::Output;
use crate::top::{Model, Reader, Report, print, run as show};
use crate::units::parse_time;

const LONG: &str = "\
Shows the tcpx sessions of this machine, live: who moves how much to whom, on which path, and what \
limits it. Applications need no setting for that: every process that has a session offers its \
statistics on a Unix socket which only its user and root can reach. Root sees the sessions of all \
users.

Enter leads from a session to its peers and on to a peer's lanes, ? shows all keys.

Nothing is sent to other machines, and watching does not slow transfers down.";

const EXAMPLES: &str = "\
\x1b[1m\x1b[4mExamples:\x1b[0m
  tcpx top                    The live view; q ends it
  tcpx top --once             What happens right now, as a table
  tcpx top --json | jq '.sessions[] | {name, limit}'
  tcpx top --pid 4711 --interval 250ms

\x1b[1m\x1b[4mWhat limits:\x1b[0m
  the network: 9.6 of 10 Gbit/s  the interfaces are full
  the network: … fill its queues the network is slower than the interfaces
  the network: it lost …         packets are lost on the way
  this CPU                       one thread, or all cores, are busy all the time
  the peer's receive window      the peer does not read fast enough
  the send buffer                net.ipv4.tcp_wmem or socket_buffer_bytes is too small
  pinned slots                   GPU memory waits for pinned slots: raise staging_bytes
  one lane                       one stream is as fast as it can be: raise lanes
  the application                lanes were idle: there was not enough to send
  copies within this host        memory is copied directly, without a network
  the plugin                     a NCCL net plugin moves the bytes

Exits with 0, even if there is no session.";

/// Watch the sessions of this machine: paths, rates, what limits them
#[derive(Debug, Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Print what happens within one interval, and exit
    ///
    /// With --json, one document.
    #[arg(long)]
    once: bool,

    /// How often to look, such as 500ms or 2s
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,

    /// Show this process only
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

/// The shortest interval: shorter ones give meaningless rates and cost CPU.
const SHORTEST: Duration = Duration::from_millis(100);

/// How long a process may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

fn interval(text: &str) -> Result<Duration, String> {
    let interval = parse_time(text)?;
    match interval < SHORTEST {
        true => Err("the shortest interval is 100ms".into()),
        false => Ok(interval),
    }
}

pub(crate) fn run(args: &Arguments, output: &mut Output) -> Result<Verdict, Failure> {
    let reader = Reader::new(args.pid, PATIENCE);
    if args.once || output.is_json() {
        let mut model = Model::default();
        model.update(reader.read());
        // Without any process, there is nothing to wait for.
        if !model.processes.is_empty() {
            std::thread::sleep(args.interval);
            model.update(reader.read());
        }
        let report = Report::new(&model);
        match output.is_json() {
            true => output.document(&report)?,
            false => print(&report, output)?,
        }
        return Ok(Verdict::Fine);
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Failure::Usage(
            "the live view needs a terminal: use --once or --json to print".into(),
        ));
    }
    show(reader, args.interval, output.shows_colour())?;
    Ok(Verdict::Fine)
}
