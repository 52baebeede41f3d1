//! Formats results as data and as a page.
//!
//! A [`Report`] is a run with everything needed to read it years later: the machines, the command,
//! the settings with their origins, the date, the version. [`Report::to_json`] is for programs,
//! [`Report::to_html`] for people: one file, nothing to fetch, light and dark.

mod html;
mod plots;

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::machine::Machine;
use crate::measure::beside::BesideResult;
use crate::measure::{Bench, CaseResult};
use crate::path::Path;
use crate::place::Places;
use crate::prepare::PrepareResult;
use crate::soak::{IdlePeersResult, IdleResult, SoakResult};

/// Version of the JSON layout. A new field does not change it, a changed meaning does.
pub const SCHEMA: &str = "tcpx-bench/1";

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// The date, in UTC.
    pub date: String,
    /// Version of tcpx.
    pub version: String,
    /// The command line, word by word.
    pub command: Vec<String>,
    /// The machine of the measuring process.
    pub machine: Machine,
    /// The other machine, if there are two.
    pub target_machine: Option<Machine>,
    /// The engine's settings.
    pub settings: Vec<Setting>,
    /// Number of lanes of the engine and of streams of the floor.
    pub lanes: usize,
    /// The places of the memory. The floor always uses host memory.
    #[serde(default)]
    pub memory: Places,
    /// The path of the bytes.
    #[serde(default)]
    pub path: Path,
    /// The reason lanes carried them; `None` if they were copied directly.
    #[serde(default)]
    pub why_lanes: Option<String>,
    /// The cases, in the order of measurement.
    pub cases: Vec<CaseResult>,
    /// The speed that loads kept beside transfers.
    #[serde(default)]
    pub beside: Vec<BesideResult>,
    /// The cost of preparing.
    #[serde(default)]
    pub prepare: Vec<PrepareResult>,
    /// The cost of an idle session.
    #[serde(default)]
    pub idle: Option<IdleResult>,
    /// The cost of an idle peer.
    #[serde(default)]
    pub idle_peers: Option<IdlePeersResult>,
    /// The result of a long run.
    #[serde(default)]
    pub soak: Option<SoakResult>,
    /// Whether the user ended the run early.
    #[serde(default)]
    pub interrupted: bool,
}

/// A setting of the engine in force during the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// Its key.
    pub key: String,
    /// Its value.
    pub value: String,
    /// The origin of the value.
    pub source: String,
}

impl Report {
    /// Creates a report on a run that is about to begin, or has just ended.
    pub fn new(bench: &mut Bench, command: Vec<String>) -> Report {
        let settings = bench
            .session()
            .config()
            .rows()
            .into_iter()
            .map(|row| Setting {
                key: row.key.to_owned(),
                value: row.value,
                source: row.source.to_string(),
            })
            .collect();
        let machine = Machine::here();
        let target = bench.remote().machine().clone();
        let taken = bench.taken().clone();
        Report {
            schema: SCHEMA.to_owned(),
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            command,
            target_machine: (target != machine).then_some(target),
            machine,
            settings,
            lanes: bench.lanes(),
            memory: bench.places(),
            path: taken.path,
            why_lanes: taken.why_not,
            cases: Vec::new(),
            beside: Vec::new(),
            prepare: Vec::new(),
            idle: None,
            idle_peers: None,
            soak: None,
            interrupted: false,
        }
    }

    /// Returns one line with the path measured, and how to measure the other if there is one.
    pub fn path_line(&self) -> String {
        match (self.path, &self.why_lanes, &self.target_machine) {
            (Path::SameHost, ..) => {
                "Path: same host. Memory is copied directly, without sockets, so \
                                     there is no floor. Measure lanes with --path lanes."
                    .to_owned()
            }
            (Path::Lanes, _, Some(_)) | (Path::Lanes, None, None) => "Path: lanes.".to_owned(),
            (Path::Lanes, Some(reason), None) => format!(
                "Path: lanes ({reason}). Measure direct copies within this host with \
                 --path same-host."
            ),
        }
    }

    /// Formats the report as indented JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data with string keys")
    }

    /// Parses JSON of the same schema.
    ///
    /// # Errors
    /// The text is no report, or has another schema.
    pub fn from_json(json: &str) -> Result<Report, Error> {
        let unreadable = |error| Error::Report(format!("not a report: {error}"));
        let value: serde_json::Value = serde_json::from_str(json).map_err(unreadable)?;
        match value.get("schema").and_then(|schema| schema.as_str()) {
            Some(SCHEMA) => serde_json::from_value(value).map_err(unreadable),
            found => Err(Error::Report(format!(
                "schema {found:?}, this program reads {SCHEMA}"
            ))),
        }
    }

    /// Formats the report as one page of HTML that needs no other file.
    ///
    /// # Errors
    /// A plot could not be drawn.
    pub fn to_html(&self) -> Result<String, Error> {
        html::page(self)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;
    use crate::floor::Waiting;
    use crate::measure::FloorResult;
    use crate::measure::beside::{LoadKind, Pace};
    use crate::stats::{Measured, Round};
    use crate::suite::{Group, Options, cases};
    use crate::workload::{Layout, Op, Shape};

    /// Returns a report like that of a real run.
    pub(crate) fn sample() -> Report {
        let options = Options {
            sweep: true,
            ..Options::default()
        };
        let results = cases(&options).unwrap().into_iter().map(|case| {
            let shape = case.workload.shape;
            let (total, block) = (shape.total_bytes() as f64, shape.block_bytes() as f64);
            let per_block = if shape.op() == Op::Read {
                5.2e-7
            } else {
                4.6e-7
            };
            let floor_s = 12e-6 + total / 5.1e9 + total / block * per_block;
            let engine_s = floor_s * 1.04 + 2e-6 + total / block * 2e-8;
            let rounds = |seconds: f64, cpu: f64| -> Vec<Round> {
                (0..10)
                    .map(|n| {
                        let sample = Duration::from_secs_f64(seconds * (1.0 + 0.01 * n as f64));
                        let cpu = Duration::from_secs_f64(total * cpu / 1e9 * 10.0);
                        let mut samples = vec![sample; 10];
                        samples[9] = sample.mul_f64(1.6);
                        Round {
                            samples,
                            initiator_cpu: cpu,
                            target_cpu: cpu,
                        }
                    })
                    .collect()
            };
            let bytes = shape.total_bytes();
            let engine = Measured::new(&rounds(engine_s, 0.16), bytes).unwrap();
            let floor = Measured::new(&rounds(floor_s, 0.15), bytes).unwrap();
            CaseResult {
                name: case.name,
                group: case.group,
                shape,
                waiting: case.waiting,
                lanes: 2,
                prepare_ms: 0.4,
                floor: Some(FloorResult::new(&engine, floor, 1 << 20)),
                engine,
                limit: "this CPU".into(),
                verified: true,
            }
        });
        Report {
            schema: SCHEMA.into(),
            date: "2026-01-02T03:04:05Z".into(),
            version: "0.1.0".into(),
            command: ["tcpx", "bench", "--report", "<out>.html"]
                .map(String::from)
                .to_vec(),
            machine: Machine::here(),
            target_machine: None,
            settings: vec![Setting {
                key: "lanes".into(),
                value: "2".into(),
                source: "default".into(),
            }],
            lanes: 2,
            memory: Places::default(),
            path: Path::Lanes,
            why_lanes: Some("same_host is off".into()),
            cases: results.collect(),
            beside: Vec::new(),
            prepare: vec![PrepareResult {
                segments: 10_000,
                segment_bytes: 1024,
                prepare_ms: 1.25,
                first_post_ms: 9.5,
                repost_ms: 8.5,
                repost_call_us: 12.0,
            }],
            idle: Some(IdleResult {
                seconds: 5.0,
                initiator_cpu: 0.0001,
                target_cpu: 0.0002,
            }),
            idle_peers: Some(IdlePeersResult {
                peers: 32,
                bytes_per_peer: 98304.0,
                descriptors_per_peer: 3.0,
            }),
            soak: None,
            interrupted: false,
        }
    }

    /// Returns every load beside both operations, in three block sizes.
    pub(crate) fn sample_beside() -> Vec<BesideResult> {
        let shapes = [0, 16 << 10, 4 << 10].into_iter().flat_map(|block| {
            [Op::Write, Op::Read]
                .map(|op| Shape::new(op, 64 << 20, block, Layout::Scattered).unwrap())
        });
        let mut results = Vec::new();
        for (n, shape) in shapes.enumerate() {
            for (m, load) in LoadKind::ALL.into_iter().enumerate() {
                let keeps = 1.0 - 0.02 * n as f64 - 0.05 * m as f64;
                let pace = |per_s: f64| Pace {
                    per_s,
                    tail: 1.25,
                    rounds: vec![per_s; 3],
                };
                results.push(BesideResult {
                    load,
                    name: "64M".into(),
                    shape,
                    gb_per_s: 20.0 - n as f64,
                    keeps,
                    keeps_range: (keeps - 0.01, keeps + 0.01),
                    alone: pace(400.0),
                    beside: pace(400.0 * keeps),
                    verified: true,
                });
            }
        }
        results
    }

    #[test]
    fn loads_beside_transfers_have_a_plot_with_a_mark_for_each() {
        let mut report = sample();
        report.cases.clear();
        let without = report.to_html().unwrap();
        assert!(!without.contains("<svg") && !without.contains("that computes"));
        report.beside = sample_beside();
        let page = report.to_html().unwrap();
        assert_eq!(page.matches("<svg").count(), 1);
        let svg = &page[page.find("<svg").unwrap()..];
        // A third of the marks are circles (one block), the others paths: half of all are filled.
        assert_eq!(page.matches("<circle").count(), 6);
        assert_eq!(page.matches("<polygon").count(), 6);
        for (load, colour) in [
            ("matmul", "#1F6FEB"),
            ("copy", "#8A939F"),
            ("decode", "#E07B22"),
        ] {
            assert!(
                page.contains(&format!("</span>{load} ")),
                "no key for {load}"
            );
            let filled = format!("fill=\"{colour}\"");
            assert_eq!(svg.matches(&filled).count(), 3, "marks of {load}");
        }
        for legend in [
            "● one block",
            "■ blocks of 16 KiB",
            "▲ blocks of 4 KiB",
            "hollow: READ",
        ] {
            assert!(page.contains(legend), "no {legend}");
        }
        assert!(page.contains("transfer, GB/s") && page.contains("what the load keeps"));
        assert!(page.contains("<b>0.930</b>"), "no numbers");
        assert!(
            !page.contains("The <b>floor</b>"),
            "nothing has a floor here"
        );
        assert_eq!(Report::from_json(&report.to_json()).unwrap(), report);
    }

    #[test]
    fn json_comes_back_as_it_went() {
        let report = sample();
        assert_eq!(Report::from_json(&report.to_json()).unwrap(), report);
    }

    #[test]
    fn the_page_says_where_the_memory_lay() {
        let mut report = sample();
        assert!(!report.to_html().unwrap().contains("host memory"));
        report.memory = "vram:0,host".parse().unwrap();
        let page = report.to_html().unwrap();
        assert!(page.contains("vram:0"), "no place");
        assert!(page.contains("floor (host memory)"), "no word on the floor");
        assert_eq!(Report::from_json(&report.to_json()).unwrap(), report);
    }

    #[test]
    fn the_path_is_named_and_the_other_one_offered_where_there_is_one() {
        let mut report = sample();
        let line = report.path_line();
        assert!(
            line.contains("lanes (same_host is off)") && line.contains("--path same-host"),
            "{line}"
        );
        assert!(report.to_html().unwrap().contains(&line));
        report.target_machine = Some(Machine::here());
        assert_eq!(report.path_line(), "Path: lanes.");
        (report.path, report.why_lanes) = (Path::SameHost, None);
        let page = report.to_html().unwrap();
        assert!(page.contains("Path: same host") && page.contains("--path lanes"));
        assert!(!page.contains("The <b>floor</b>"), "sockets have no part");
        assert_eq!(Report::from_json(&report.to_json()).unwrap(), report);
        let json = report.to_json();
        assert!(json.contains(r#""path": "same-host""#), "{json}");

        let mut old: serde_json::Value = serde_json::from_str(&json).unwrap();
        old.as_object_mut().unwrap().remove("path");
        old.as_object_mut().unwrap().remove("why_lanes");
        let old = Report::from_json(&old.to_string()).unwrap();
        assert_eq!((old.path, old.why_lanes), (Path::Lanes, None));
    }

    #[test]
    fn other_json_is_refused_with_a_reason() {
        assert!(Report::from_json("{").is_err());
        let other = Report::from_json(r#"{"schema":"tcpx-bench/99"}"#)
            .unwrap_err()
            .to_string();
        assert!(
            other.contains("tcpx-bench/99") && other.contains(SCHEMA),
            "{other}"
        );
    }

    #[test]
    fn the_page_stands_alone_and_escapes_what_it_shows() {
        let mut report = sample();
        report.machine.cpu = "<script>alert(1)</script>".into();
        let page = report.to_html().unwrap();
        assert!(!page.contains("<script"));
        assert!(page.contains("&lt;script&gt;"));
        for outside in ["src=", "@import", "url(", "<link"] {
            assert!(
                !page.contains(outside),
                "the page refers to something outside: {outside}"
            );
        }
        assert!(page.matches("<svg").count() >= 4);
        assert!(page.contains("kv16k"));
    }

    #[test]
    fn a_page_without_floor_or_sweep_is_still_a_page() {
        let mut report = sample();
        report
            .cases
            .retain(|case| case.group == Group::Named && case.waiting == Waiting::Block);
        for case in &mut report.cases {
            case.floor = None;
        }
        report.prepare.clear();
        report.idle = None;
        report.idle_peers = None;
        assert!(report.to_html().unwrap().contains("one64m"));
        report.cases.clear();
        assert!(report.to_html().is_ok());
    }
}
