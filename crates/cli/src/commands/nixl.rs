//! `tcpx nixl`: makes an installed NIXL find the TCPX backend.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use crate::Verdict;
use crate::error::Failure;
use crate::nixl::plan::{self, UCX, Ucx, same};
use crate::nixl::versions::{self, Support};
use crate::nixl::{Nixl, NixlError, PLUGIN_VARIABLE, find_plugin, folder};
use crate::output::{Output, Tone};

const LONG: &str = "\
NIXL loads backends from a folder beside its own libraries. `install` puts the TCPX backend there, \
beside UCX and the others; applications then choose it with backends=[\"TCPX\"] and nothing else. \
For applications that request UCX and cannot be configured otherwise, `install --as UCX` makes \
TCPX answer to that name too, on every machine that takes part; NIXL's own UCX is kept and comes \
back with `uninstall`. Without installing anything, NIXL_PLUGIN_DIR=$(tcpx nixl path) does the \
same for one process: the folder has links to all of NIXL's own plugins.";

const EXAMPLES: &str = "\
\x1b[1m\x1b[4mExamples:\x1b[0m
  tcpx nixl install
  tcpx nixl install --python /opt/vllm/bin/python
  tcpx nixl install --as UCX
  tcpx nixl status --json
  NIXL_PLUGIN_DIR=$(tcpx nixl path) python app.py
  NIXL_PLUGIN_DIR=$(tcpx nixl path --as UCX) python app.py";

/// The default Python.
const PYTHON: &str = "python3";

/// Install the NIXL backend, or show where it is
#[derive(Debug, Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Put the backend beside those of the installed NIXL
    Install {
        #[command(flatten)]
        place: Where,
        #[command(flatten)]
        how: How,
    },
    /// Remove it again, and restore NIXL's own UCX
    Uninstall(Where),
    /// Show the installed NIXL and whether it has the backend
    Status(Where),
    /// Print a folder for NIXL_PLUGIN_DIR, with the backend and links to NIXL's own plugins
    Path {
        #[command(flatten)]
        place: Where,
        #[command(flatten)]
        how: How,
    },
}

#[derive(Debug, Args)]
struct Where {
    /// The Python whose NIXL is used [default: python3]
    #[arg(long, value_name = "PYTHON")]
    python: Option<String>,

    /// The backend's file, if it is not beside this command
    #[arg(long, value_name = "FILE", env = PLUGIN_VARIABLE)]
    plugin: Option<PathBuf>,

    /// A known NIXL: package, version and folder, separated by tabs. The Python package passes
    /// them, so that no other Python is started.
    #[arg(long, value_name = "NIXL", hide = true)]
    found: Vec<String>,
}

#[derive(Debug, Args)]
struct How {
    /// Answer to this backend's name too, for applications that support no other
    #[arg(long = "as", value_name = "NAME", ignore_case = true)]
    stand_in: Option<Name>,

    /// Allow a NIXL newer than the tested ones
    #[arg(long)]
    untested: bool,
}

/// The backends that TCPX can stand in for.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Name {
    #[value(name = "UCX")]
    Ucx,
}

impl Where {
    fn python(&self) -> &str {
        self.python.as_deref().unwrap_or(PYTHON)
    }

    fn find(&self) -> Result<Vec<Nixl>, NixlError> {
        let known: Vec<_> = self.found.iter().filter_map(|l| Nixl::parse(l)).collect();
        if known.is_empty() {
            Nixl::find(self.python())
        } else {
            Ok(known)
        }
    }
}

pub(crate) fn run(args: &Arguments, output: &mut Output) -> Result<Verdict, Failure> {
    match &args.action {
        Action::Install { place, how } => install(place, how, output),
        Action::Uninstall(place) => uninstall(place, output),
        Action::Status(place) => status(place, output),
        Action::Path { place, how } => path(place, how, output),
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
    /// Whether the backend works with this NIXL.
    supported: bool,
    /// The name of the backend that TCPX stands in for.
    stands_in_for: Option<&'static str>,
    /// The path at which that backend is kept.
    kept: Option<PathBuf>,
    #[serde(skip)]
    note: Option<String>,
}

impl Row {
    fn new(nixl: &Nixl, state: &'static str) -> Self {
        let ucx = nixl.ucx();
        let (is_stand_in, is_kept) = match ucx {
            Ucx::StandIn { kept } => (true, kept),
            Ucx::Upgraded | Ucx::Missing => (false, true),
            Ucx::Nixl => (false, false),
        };
        let kept = is_kept.then(|| plan::kept(&nixl.plugins));
        let Nixl {
            package, version, ..
        } = nixl.clone();
        let note = note(&package, &version, ucx, kept.as_ref());
        Row {
            supported: versions::support(&version) == Support::Yes,
            package,
            version,
            plugin: nixl.target(),
            state,
            stands_in_for: is_stand_in.then_some(UCX),
            kept,
            note,
        }
    }
}

/// Returns the warning about the name UCX, if any.
fn note(package: &str, version: &str, ucx: Ucx, kept: Option<&PathBuf>) -> Option<String> {
    let kept = kept.map(|path| path.display());
    match (ucx, kept) {
        (Ucx::Nixl, _) | (Ucx::Upgraded | Ucx::Missing, None) => None,
        (Ucx::StandIn { .. }, Some(kept)) => Some(format!(
            "*** UCX IS TCPX in {package} {version}: applications that ask NIXL for UCX get TCPX. \
             NIXL's own is kept as {kept}; `tcpx nixl uninstall` puts it back. ***"
        )),
        (Ucx::StandIn { .. }, None) => Some(format!(
            "*** UCX IS TCPX in {package} {version}: applications that ask NIXL for UCX get TCPX. \
             NIXL had none of its own; `tcpx nixl uninstall` removes it. ***"
        )),
        (Ucx::Upgraded, Some(_)) => Some(format!(
            "*** UCX is NIXL's own again in {package} {version}: NIXL was installed anew over the \
             stand-in. `tcpx nixl install --as UCX` makes it TCPX, `tcpx nixl uninstall` removes \
             what is left of it. ***"
        )),
        (Ucx::Missing, Some(kept)) => Some(format!(
            "*** There is no UCX in {package} {version}, NIXL's own is kept as {kept}: \
             `tcpx nixl uninstall` puts it back. ***"
        )),
    }
}

fn install(place: &Where, how: &How, output: &mut Output) -> Result<Verdict, Failure> {
    let plugin = find_plugin(place.plugin.as_deref())?;
    let found = place.find()?;
    // Checks everything first: nothing is changed unless everything can be.
    for nixl in &found {
        nixl.check(place.python(), how.untested)?;
    }
    let mut rows = Vec::new();
    for nixl in found {
        nixl.install(&plugin, how.stand_in.is_some())?;
        rows.push(Row::new(&nixl, "installed"));
    }
    show(rows, output)
}

fn uninstall(place: &Where, output: &mut Output) -> Result<Verdict, Failure> {
    let mut rows = Vec::new();
    for nixl in place.find()? {
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
    let ours = find_plugin(place.plugin.as_deref()).ok();
    let mut complete = true;
    let mut rows = Vec::new();
    for nixl in place.find()? {
        let target = nixl.target();
        let state = match &ours {
            _ if versions::support(&nixl.version) == Support::TooOld => {
                "not supported: this NIXL is too old"
            }
            _ if !target.exists() => "not installed",
            Some(ours) if same(ours, &target) => "installed",
            Some(_) => "installed, but another build than the one beside this command",
            None => "installed",
        };
        complete &= state.starts_with("installed");
        rows.push(Row::new(&nixl, state));
    }
    show(rows, output)?;
    Ok(if complete {
        Verdict::Fine
    } else {
        Verdict::Problem
    })
}

fn path(place: &Where, how: &How, output: &mut Output) -> Result<Verdict, Failure> {
    let plugin = find_plugin(place.plugin.as_deref())?;
    let as_ucx = how.stand_in.is_some();
    let folder = match place.find() {
        Ok(found) => {
            // The order in which NIXL itself chooses without GPUs.
            let Some(nixl) = found.iter().max_by_key(|nixl| &nixl.package) else {
                return Err(NixlError::NotInstalled {
                    python: place.python().to_owned(),
                }
                .into());
            };
            nixl.check(place.python(), how.untested)?;
            if found.len() > 1 {
                output.note(format_args!(
                    "note: there are several NIXLs, the folder is for {}",
                    nixl.package
                ));
            }
            folder::make(Some(nixl), &plugin, as_ucx)?
        }
        // With an explicit Python its NIXL is required; otherwise there may be a NIXL without any
        // Python.
        Err(error) if place.python.is_some() => return Err(error.into()),
        Err(error) => {
            output.note(format_args!(
                "note: the folder has no plugins of NIXL's own: {error}"
            ));
            if as_ucx {
                folder::make(None, &plugin, as_ucx)?
            } else {
                alone(&plugin)
            }
        }
    };
    if output.is_json() {
        output.document(&serde_json::json!({ "path": folder }))?;
    } else {
        output.line(folder.display())?;
    }
    Ok(Verdict::Fine)
}

/// Returns the folder that contains the backend.
fn alone(plugin: &std::path::Path) -> PathBuf {
    let file = std::path::absolute(plugin).unwrap_or_else(|_| plugin.to_owned());
    let folder = file.parent().unwrap_or(&file);
    // Resolves `bin/../nixl`, so that the path reads well wherever it is pasted.
    folder.canonicalize().unwrap_or_else(|_| folder.to_owned())
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
    for note in rows.iter().filter_map(|row| row.note.as_ref()) {
        output.line("")?;
        output.line(output.paint(Tone::Bad, note))?;
    }
    Ok(Verdict::Fine)
}
