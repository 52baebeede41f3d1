//! Shows the progress of a measurement: a bar on a terminal, one line per case elsewhere, nothing
//! with JSON.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tcpx_bench::measure::beside::BesideResult;
use tcpx_bench::measure::{CaseResult, Progress, Step};
use tcpx_bench::soak::SoakSample;
use tcpx_bench::suite::Case;

use crate::output::Output;

/// The number of parts of a case on the bar.
const PARTS: u64 = 1000;

/// Progress that is shown to the user.
pub(super) struct Shown {
    bar: ProgressBar,
    /// Whether to print lines for a log, because there is no terminal.
    lines: bool,
    done: u64,
    soak: Duration,
    interrupted: &'static AtomicBool,
}

impl Shown {
    /// Shows progress until `interrupted` is set.
    pub(super) fn new(output: &Output, interrupted: &'static AtomicBool) -> Self {
        let bar = if output.shows_progress() {
            ProgressBar::new(PARTS)
        } else {
            ProgressBar::hidden()
        };
        let template = "{bar:30} {prefix}  {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("━╸ "));
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Shown {
            bar,
            lines: !output.shows_progress() && !output.is_json(),
            done: 0,
            soak: Duration::ZERO,
            interrupted,
        }
    }

    /// Announces a measurement without parts.
    pub(super) fn say(&self, what: &str) {
        self.bar.set_prefix("measuring");
        self.bar.set_message(what.to_owned());
        if self.lines {
            eprintln(format_args!("Measuring {what}."));
        }
    }

    /// Announces a soak of this length.
    pub(super) fn soak(&mut self, duration: Duration) {
        self.soak = duration;
        self.bar.set_length(PARTS);
        self.bar.set_position(0);
        self.bar.set_prefix("soak");
    }

    /// Shows a sample of a soak.
    pub(super) fn sampled(&self, sample: &SoakSample) {
        let part = sample.at_s / self.soak.as_secs_f64().max(1e-9);
        self.bar.set_position((part * PARTS as f64) as u64);
        let text = format!(
            "{:.0} s: {} transfers, {:.2} GB/s, {} and {} resident, {} descriptors, {} threads",
            sample.at_s,
            sample.transfers,
            sample.gb_per_s,
            tcpx_bench::units::bytes(sample.initiator.resident_bytes),
            tcpx_bench::units::bytes(sample.target.resident_bytes),
            sample.initiator.descriptors,
            sample.initiator.threads,
        );
        if self.lines {
            eprintln(format_args!("Soak at {text}."));
        }
        self.bar.set_message(text);
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Progress for Shown {
    fn started(&mut self, index: usize, count: usize, case: &Case) {
        self.done = index as u64 * PARTS;
        self.bar.set_length(count as u64 * PARTS);
        self.bar.set_position(self.done);
        let name = format!("{} {}", case.name, case.workload.shape.op());
        self.bar.set_prefix(format!("{}/{count} {name}", index + 1));
        self.bar.set_message("");
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Verifying => self.bar.set_message("verifying"),
            Step::WarmingUp => self.bar.set_message("warming up"),
            Step::Measuring {
                done,
                engine,
                floor,
            } => {
                self.bar
                    .set_position(self.done + (done * PARTS as f64) as u64);
                let floor = floor.map_or(String::new(), |floor| format!(", floor {floor:.2}"));
                self.bar.set_message(format!("{engine:.2} GB/s{floor}"));
            }
            Step::Computing { load, done } => {
                self.bar
                    .set_position(self.done + (done * PARTS as f64) as u64);
                self.bar.set_message(format!("beside {load}"));
            }
            _ => {}
        }
    }

    fn finished_beside(&mut self, result: &BesideResult) {
        if self.lines {
            eprintln(format_args!(
                "{} {} beside {}: {:.2} GB/s, the load keeps {:.3}",
                result.name,
                result.shape.op(),
                result.load,
                result.gb_per_s,
                result.keeps
            ));
        }
    }

    fn finished(&mut self, result: &CaseResult) {
        if self.lines {
            let ratio = result.floor.as_ref().map(|floor| floor.ratio);
            let ratio = ratio.map_or(String::new(), |r| format!(", {r:.2} of the floor"));
            let (name, op) = (&result.name, result.shape.op());
            eprintln(format_args!(
                "{name} {op}: {:.2} GB/s{ratio}",
                result.engine.gb_per_s
            ));
        }
    }
}

/// Prints a line on stderr, which may be closed.
fn eprintln(text: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{text}");
}
