//! `tcpx config`: prints every setting, its value, the origin of the value, and the reason.

use clap::Args;
use serde::Serialize;

use crate::Verdict;
use crate::error::Failure;
use crate::output::{Output, Tone};
use crate::settings::Settings;

const LONG: &str = "\
Prints every setting of the engine: its value, where the value came from (a default derived from \
this machine, the environment, or an option), the reason for a default, and what it does.

Unknown or bad values are errors that name the variable, the value and what was expected. Variables \
that begin with TCPX_ and are no settings are listed below the table, with what was probably meant.";

const EXAMPLES: &str = "\
\x1b[1m\x1b[4mExamples:\x1b[0m
  tcpx config
  TCPX_LANES=8 tcpx config
  tcpx config --json | jq -r '.settings[] | \"\\(.variables[0])=\\(.value)\"'";

/// Show every setting, its value, where it came from and why
#[derive(Debug, Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(flatten)]
    settings: Settings,
}

pub(crate) fn run(args: &Arguments, output: &mut Output) -> Result<Verdict, Failure> {
    let settings = args
        .settings
        .load()?
        .rows()
        .into_iter()
        .map(Row::from)
        .collect();
    let unknown = tcpx::Config::unknown_variables().into_iter();
    let unknown = unknown.map(Unknown::from).collect();
    let report = Report { settings, unknown };
    if output.is_json() {
        output.document(&report)?;
    } else {
        report.print(output)?;
    }
    Ok(Verdict::Fine)
}

#[derive(Debug, Serialize)]
struct Report {
    settings: Vec<Row>,
    /// Variables that look like settings but are none.
    unknown: Vec<Unknown>,
}

#[derive(Debug, Serialize)]
struct Unknown {
    variable: String,
    suggestion: Option<&'static str>,
    #[serde(skip)]
    text: String,
}

impl From<tcpx::UnknownVariable> for Unknown {
    fn from(unknown: tcpx::UnknownVariable) -> Self {
        Unknown {
            text: unknown.to_string(),
            variable: unknown.name,
            suggestion: unknown.suggestion,
        }
    }
}

#[derive(Debug, Serialize)]
struct Row {
    key: String,
    variables: Vec<String>,
    value: String,
    source: String,
    reason: String,
    help: String,
}

impl From<tcpx::ConfigRow> for Row {
    fn from(row: tcpx::ConfigRow) -> Self {
        Row {
            key: row.key.to_string(),
            variables: row.variables.iter().map(|&name| name.to_owned()).collect(),
            value: row.value,
            source: row.source.to_string(),
            reason: row.reason,
            help: row.help,
        }
    }
}

impl Report {
    fn print(&self, output: &mut Output) -> Result<(), Failure> {
        let mut table = output.table();
        table.set_header(output.header(&["VARIABLE", "VALUE", "SOURCE", "WHAT IT DOES, AND WHY"]));
        for row in &self.settings {
            let value = if row.value.is_empty() {
                "-"
            } else {
                &row.value
            };
            table.add_row(vec![
                output.cell(Tone::Strong, row.variables.join("\n")),
                output.cell(Tone::Good, value),
                output.cell(Tone::Plain, &row.source),
                output.cell(
                    Tone::Plain,
                    format!("{}\nDefault: {}.", row.help, row.reason),
                ),
            ]);
        }
        output.show(table)?;
        for unknown in &self.unknown {
            let word = output.paint(Tone::Warn, "warning:");
            output.line(format_args!("{word} {}", unknown.text))?;
        }
        Ok(())
    }
}
