//! `tcpx nixl`: makes an installed NIXL find the TCPX backend.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::Serialize;

use crate::Verdict;
use crate::error::Failure;
use crate::nixl::{Nixl, PLUGIN_VARIABLE, find_plugin, same};
use crate::output::{Output, Tone};

const LONG: &str = "\
NIXL loads backends from a folder beside its own libraries. `install` puts the TCPX backend there, \
beside UCX and the others; applications then choose it with backends=[\"TCPX\"] and nothing else. \
Without installing anything, NIXL_PLUGIN_DIR=$(tcpx nixl path) does the same for one process, but \
hides NIXL's own backends.";

const EXAMPLES: &str = "\
\x1b[1m\x1b[4mExamples:\x1b[0m
  tcpx nixl install
  tcpx nixl install --python /opt/vllm/bin/python
  tcpx nixl status --json
  NIXL_PLUGIN_DIR=$(tcpx nixl path) python app.py";

/// Install the NIXL backend, or say where it is
#[derive(Debug, Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Put the backend beside those of the installed NIXL
    Install(Where),
    /// Take it away again
    Uninstall(Where),
    /// Say which NIXL is there and whether it has the backend
    Status(Where),
    /// Print the folder for NIXL_PLUGIN_DIR
    Path(Plugin),
}

#[derive(Debug, Args)]
struct Where {
    /// The Python whose NIXL is meant
    #[arg(long, value_name = "PYTHON", default_value = "python3")]
    python: String,

    #[command(flatten)]
    plugin: Plugin,
}

#[derive(Debug, Args)]
struct Plugin {
    /// The backend's file, where it is not beside this command
    #[arg(long, value_name = "FILE", env = PLUGIN_VARIABLE)]
    plugin: Option<PathBuf>,
}

pub(crate) fn run(args: &Arguments, output: &mut Output) -> Result<Verdict, Failure> {
    match &args.action {
        Action::Install(place) => install(place, output),
        Action::Uninstall(place) => uninstall(place, output),
        Action::Status(place) => status(place, output),
        Action::Path(plugin) => path(plugin, output),
    }
}

#[derive(Debug, Serialize)]
struct Report {
    nixl: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    package: String,
    version: String,
    plugin: PathBuf,
    state: &'static str,
}

impl Row {
    fn new(nixl: &Nixl, state: &'static str) -> Self {
        let Nixl {
            package, version, ..
        } = nixl.clone();
        Row {
            package,
            version,
            plugin: nixl.target(),
            state,
        }
    }
}

fn install(place: &Where, output: &mut Output) -> Result<Verdict, Failure> {
    let plugin = find_plugin(place.plugin.plugin.as_deref())?;
    let mut rows = Vec::new();
    for nixl in Nixl::find(&place.python)? {
        nixl.install(&plugin)?;
        rows.push(Row::new(&nixl, "installed"));
    }
    show(rows, output)
}

fn uninstall(place: &Where, output: &mut Output) -> Result<Verdict, Failure> {
    let mut rows = Vec::new();
    for nixl in Nixl::find(&place.python)? {
        let state = if nixl.uninstall()? {
            "removed"
        } else {
            "was not installed"
        };
        rows.push(Row::new(&nixl, state));
    }
    show(rows, output)
}

fn status(place: &Where, output: &mut Output) -> Result<Verdict, Failure> {
    let ours = find_plugin(place.plugin.plugin.as_deref()).ok();
    let mut complete = true;
    let mut rows = Vec::new();
    for nixl in Nixl::find(&place.python)? {
        let state = match &ours {
            _ if !nixl.target().exists() => "not installed",
            Some(ours) if same(ours, &nixl.target()) => "installed",
            Some(_) => "installed, but another build than the one beside this command",
            None => "installed",
        };
        complete &= state != "not installed";
        rows.push(Row::new(&nixl, state));
    }
    show(rows, output)?;
    Ok(if complete {
        Verdict::Fine
    } else {
        Verdict::Problem
    })
}

fn path(plugin: &Plugin, output: &mut Output) -> Result<Verdict, Failure> {
    let file = find_plugin(plugin.plugin.as_deref())?;
    let file = std::path::absolute(&file).unwrap_or(file);
    let folder = file.parent().unwrap_or(&file);
    // Without the dots of `bin/../nixl`, so that it reads well wherever it is pasted.
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    if output.is_json() {
        output.document(&serde_json::json!({ "path": folder }))?;
    } else {
        output.line(folder.display())?;
    }
    Ok(Verdict::Fine)
}

fn show(rows: Vec<Row>, output: &mut Output) -> Result<Verdict, Failure> {
    if output.is_json() {
        output.document(&Report { nixl: rows })?;
        return Ok(Verdict::Fine);
    }
    let mut table = output.table();
    table.set_header(output.header(&["NIXL", "VERSION", "TCPX BACKEND", "FILE"]));
    for row in &rows {
        let tone = if row.state.starts_with("not") {
            Tone::Warn
        } else {
            Tone::Good
        };
        table.add_row(vec![
            output.cell(Tone::Strong, &row.package),
            output.cell(Tone::Plain, &row.version),
            output.cell(tone, row.state),
            output.cell(Tone::Dim, row.plugin.display()),
        ]);
    }
    output.show(table)?;
    Ok(Verdict::Fine)
}
