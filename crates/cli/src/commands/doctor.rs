//! `tcpx doctor`: checks whether transfers work on this machine, with advice.

use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::Verdict;
use crate::doctor::{self, Finding, Level};
use crate::error::Failure;
use crate::output::{Output, Tone};
use crate::settings::Settings;
use crate::units::count;

const LONG: &str = "\
Checks this machine: limits, kernel features, socket buffers against bandwidth × round trip, \
interfaces, GPUs and plugins, and moves 16 MiB through the engine over loopback. Says what to do \
about each finding.

  ok    as it should be
  info  worth knowing
  warn  transfers work, slower or fewer than they could be
  fail  transfers will not work";

const EXAMPLES: &str = "\
\x1b[1m\x1b[4mExamples:\x1b[0m
  tcpx doctor
  TCPX_INTERFACES=eth1,eth2 TCPX_LANES=8 tcpx doctor    As the application will run
  tcpx doctor --json | jq '.findings[] | select(.level != \"ok\")'

Exits with 0 when transfers will work, with 1 when they will not.";

/// Check this machine and say what to do about each finding
#[derive(Debug, Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(flatten)]
    settings: Settings,
}

pub(crate) fn run(args: &Arguments, output: &mut Output) -> Result<Verdict, Failure> {
    let spinner = spinner(output);
    let findings = doctor::examine(&args.settings.load(), |what| spinner.set_message(what));
    spinner.finish_and_clear();

    let report = Report::new(findings);
    if output.is_json() {
        output.document(&report)?;
    } else {
        report.print(output)?;
    }
    Ok(if report.transfers_work {
        Verdict::Fine
    } else {
        Verdict::Problem
    })
}

fn spinner(output: &Output) -> ProgressBar {
    if !output.shows_progress() {
        return ProgressBar::hidden();
    }
    let spinner = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} checking {msg}") {
        spinner.set_style(style);
    }
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

#[derive(Debug, Serialize)]
struct Report {
    transfers_work: bool,
    findings: Vec<Finding>,
}

impl Report {
    fn new(findings: Vec<Finding>) -> Self {
        let transfers_work = findings.iter().all(|finding| finding.level < Level::Fail);
        Report {
            transfers_work,
            findings,
        }
    }

    fn print(&self, output: &mut Output) -> Result<(), Failure> {
        let mut table = output.table();
        for finding in &self.findings {
            let (word, tone) = wording(finding.level);
            let text = match &finding.advice {
                Some(advice) => format!("{}\n→ {advice}", finding.found),
                None => finding.found.clone(),
            };
            table.add_row(vec![
                output.cell(tone, word),
                output.cell(Tone::Dim, finding.id),
                output.cell(Tone::Plain, text),
            ]);
        }
        output.show(table)?;
        output.line("")?;
        Ok(output.line(self.verdict(output))?)
    }

    fn verdict(&self, output: &Output) -> String {
        let number = |level| self.findings.iter().filter(|f| f.level == level).count();
        let counts = format!(
            "{} ok, {}, {}, {}",
            number(Level::Ok),
            count(number(Level::Info), "note"),
            count(number(Level::Warn), "warning"),
            count(number(Level::Fail), "failure")
        );
        let verdict = if self.transfers_work {
            output.paint(Tone::Good, "Transfers will work.")
        } else {
            output.paint(Tone::Bad, "Transfers will not work.")
        };
        format!("{verdict} ({counts})")
    }
}

fn wording(level: Level) -> (&'static str, Tone) {
    match level {
        Level::Ok => ("ok", Tone::Good),
        Level::Info => ("info", Tone::Plain),
        Level::Warn => ("warn", Tone::Warn),
        Level::Fail => ("fail", Tone::Bad),
    }
}
