//! Finds the plugins folder of an installed NIXL, and the TCPX plugin.

pub(crate) mod folder;
pub(crate) mod plan;
pub(crate) mod versions;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{FlockOperation, flock};

use plan::{Step, Ucx};
use versions::Support;

/// The file name of the plugin, from which NIXL takes the backend's name.
pub(crate) const PLUGIN_FILE: &str = "libplugin_TCPX.so";

/// Variable with the plugin's file, if it is not beside the command.
pub(crate) const PLUGIN_VARIABLE: &str = "TCPX_NIXL_PLUGIN";

/// Prints one line for each NIXL: package, version, the folder that contains the package.
const FIND_PACKAGES: &str = "\
import importlib.util as u, importlib.metadata as m, os
for p in ('nixl_cu12', 'nixl_cu13'):
    s = u.find_spec(p)
    if s and s.origin:
        try: v = m.version(p.replace('_', '-'))
        except m.PackageNotFoundError: v = 'unknown'
        print(p, v, os.path.dirname(os.path.dirname(s.origin)), sep='\\t')
";

/// The reason NIXL or the plugin could not be found or changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NixlError {
    /// The given Python does not run.
    #[error("cannot run {python} (--python names another one): {source}")]
    Python {
        /// The Python, as given.
        python: String,
        /// The system's error.
        source: io::Error,
    },
    /// Python ran and failed.
    #[error("{python} failed: {message}")]
    PythonFailed {
        /// The Python, as given.
        python: String,
        /// Its output.
        message: String,
    },
    /// The Python has no NIXL.
    #[error(
        "{python} has no NIXL: `{python} -m pip install nixl` installs it, --python names another one"
    )]
    NotInstalled {
        /// The Python, as given.
        python: String,
    },
    /// The TCPX plugin is missing.
    #[error(
        "{PLUGIN_FILE} was not found in {tried}: build it with `make dist`, or name it with --plugin or {PLUGIN_VARIABLE}"
    )]
    NoPlugin {
        /// The places searched.
        tried: String,
    },
    /// The NIXL calls backends in another way.
    #[error(
        "{package} {version} is too old for the backend, which supports NIXL {} to {}: upgrade it, \
         for example with `{python} -m pip install --upgrade 'nixl>={},<={}'`",
        versions::oldest(),
        versions::newest(),
        versions::oldest(),
        versions::newest()
    )]
    TooOld {
        /// The package.
        package: String,
        /// Its version.
        version: String,
        /// The Python that has it.
        python: String,
    },
    /// The NIXL was never tested.
    #[error(
        "{package} {version} was not tested with this version of tcpx, which supports NIXL {} to {}: \
         install a newer tcpx, or use --untested. The backend compares NIXL's tables when it is \
         loaded, and refuses to work with others than it knows",
        versions::oldest(),
        versions::newest()
    )]
    Untested {
        /// The package.
        package: String,
        /// Its version.
        version: String,
    },
    /// The file could later not be distinguished from NIXL's own.
    #[error(
        "{} cannot stand in for UCX: it is not the TCPX backend, or one of an older version",
        path.display()
    )]
    NotOurs {
        /// The file.
        path: PathBuf,
    },
    /// No cache folder is available.
    #[error(
        "no folder for the links to NIXL's plugins: set XDG_CACHE_HOME or HOME to an absolute path"
    )]
    NoCache,
    /// Others can change files that programs of this user would load.
    #[error(
        "{} belongs to somebody else or can be written by others: remove it, or name another folder \
         with XDG_CACHE_HOME", path.display()
    )]
    Foreign {
        /// The folder.
        path: PathBuf,
    },
    /// A file could not be changed.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// One installed NIXL.
///
/// [`find`](Self::find) lists those of a Python, [`check`](Self::check) tells whether the backend
/// supports one; [`install`](Self::install) and [`uninstall`](Self::uninstall) change its folder of
/// plugins, [`folder::make`] creates another folder for a process instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Nixl {
    /// `nixl_cu12` or `nixl_cu13`.
    pub(crate) package: String,
    pub(crate) version: String,
    /// The folder from which it loads backends.
    pub(crate) plugins: PathBuf,
}

impl Nixl {
    /// Returns every NIXL that `python` can import.
    pub(crate) fn find(python: &str) -> Result<Vec<Nixl>, NixlError> {
        let output = Command::new(python)
            .args(["-c", FIND_PACKAGES])
            .output()
            .map_err(|source| NixlError::Python {
                python: python.to_owned(),
                source,
            })?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(NixlError::PythonFailed {
                python: python.to_owned(),
                message,
            });
        }
        let found: Vec<_> = String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(Nixl::parse)
            .collect();
        if found.is_empty() {
            return Err(NixlError::NotInstalled {
                python: python.to_owned(),
            });
        }
        Ok(found)
    }

    /// Parses a line of [`FIND_PACKAGES`].
    pub(crate) fn parse(line: &str) -> Option<Nixl> {
        let mut fields = line.split('\t');
        let (package, version, site) = (fields.next()?, fields.next()?, fields.next()?);
        // Beside the package, in the folder where the wheel's build tool keeps its libraries.
        let plugins = Path::new(site)
            .join(format!(".{package}.mesonpy.libs"))
            .join("plugins");
        Some(Nixl {
            package: package.to_owned(),
            version: version.to_owned(),
            plugins,
        })
    }

    /// Returns the folder that contains the package.
    fn site(&self) -> &Path {
        self.plugins.ancestors().nth(2).unwrap_or(&self.plugins)
    }

    /// Returns the name of the folder with NIXL's own libraries, beside the package.
    fn libs_name(&self) -> String {
        format!(".{}.mesonpy.libs", self.package)
    }

    /// Returns the path of the TCPX plugin, whether it exists or not.
    pub(crate) fn target(&self) -> PathBuf {
        self.plugins.join(PLUGIN_FILE)
    }

    /// Refuses a version that the backend does not support. `untested` allows versions newer than
    /// any tested.
    pub(crate) fn check(&self, python: &str, untested: bool) -> Result<(), NixlError> {
        let (package, version) = (self.package.clone(), self.version.clone());
        match versions::support(&self.version) {
            Support::TooOld => Err(NixlError::TooOld {
                package,
                version,
                python: python.to_owned(),
            }),
            Support::Untested if !untested => Err(NixlError::Untested { package, version }),
            Support::Yes | Support::Untested => Ok(()),
        }
    }

    /// Returns which backend answers to the name UCX.
    pub(crate) fn ucx(&self) -> Ucx {
        plan::ucx(&self.plugins)
    }

    /// Installs the plugin, with `as_ucx` in place of NIXL's UCX too. Programs that start meanwhile
    /// find the old files or the new ones.
    pub(crate) fn install(&self, plugin: &Path, as_ucx: bool) -> Result<(), NixlError> {
        // A stand-in for UCX must be recognisable, or NIXL's own could not be restored.
        if (as_ucx || matches!(self.ucx(), Ucx::StandIn { .. })) && !plan::is_ours(plugin) {
            return Err(NixlError::NotOurs {
                path: plugin.to_owned(),
            });
        }
        self.change(|folder| plan::install(folder, plugin, as_ucx))?;
        Ok(())
    }

    /// Undoes every installation, also an interrupted one; returns whether there was any.
    pub(crate) fn uninstall(&self) -> Result<bool, NixlError> {
        self.change(plan::uninstall)
    }

    /// Carries out a plan, under a lock of the folder; returns whether there was something to do.
    fn change(&self, plan: impl FnOnce(&Path) -> Vec<Step>) -> Result<bool, NixlError> {
        let folder = File::open(&self.plugins).map_err(|source| NixlError::File {
            what: "open",
            path: self.plugins.clone(),
            source,
        })?;
        // Released with the file. Network file systems may have no locks: then one of two
        // concurrent installations may have to be repeated.
        let _ = flock(&folder, FlockOperation::LockExclusive);
        let steps = plan(&self.plugins);
        for step in &steps {
            step.run()?;
        }
        Ok(!steps.is_empty())
    }
}

/// Returns the TCPX plugin: as given, or where `make dist` and the wheel put it relative to the
/// command.
pub(crate) fn find_plugin(named: Option<&Path>) -> Result<PathBuf, NixlError> {
    let candidates = match named {
        Some(path) => vec![path.to_owned()],
        None => std::env::current_exe()
            .ok()
            .and_then(|exe| exe.parent().map(candidates))
            .unwrap_or_default(),
    };
    candidates
        .iter()
        .find(|path| path.is_file())
        .cloned()
        .ok_or_else(|| {
            let tried: Vec<_> = candidates.iter().map(|p| p.display().to_string()).collect();
            NixlError::NoPlugin {
                tried: tried.join(", "),
            }
        })
}

fn candidates(bin: &Path) -> Vec<PathBuf> {
    [
        bin.join("../nixl"),
        bin.to_owned(),
        bin.join("../../dist/nixl"),
    ]
    .into_iter()
    .map(|folder| folder.join(PLUGIN_FILE))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugins_live_in_the_dotted_folder_beside_the_package() {
        let nixl = Nixl::parse("nixl_cu13\t1.5.1\t/site").unwrap();
        assert_eq!(
            nixl.plugins,
            Path::new("/site/.nixl_cu13.mesonpy.libs/plugins")
        );
        assert_eq!(nixl.version, "1.5.1");
        assert_eq!(nixl.site(), Path::new("/site"));
        assert_eq!(Nixl::parse("noise"), None);
    }

    #[test]
    fn install_replaces_and_uninstall_removes() {
        let folder = tempfile::tempdir().unwrap();
        let plugin = folder.path().join("built.so");
        std::fs::write(&plugin, "new").unwrap();
        let nixl = Nixl {
            package: "nixl_cu12".into(),
            version: "1.0.0".into(),
            plugins: folder.path().to_owned(),
        };
        std::fs::write(nixl.target(), "old").unwrap();
        nixl.install(&plugin, false).unwrap();
        assert!(plan::same(&plugin, &nixl.target()));
        assert!(nixl.uninstall().unwrap());
        assert!(!nixl.uninstall().unwrap());
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            1,
            "nothing left behind"
        );
    }

    #[test]
    fn a_missing_plugin_says_where_it_was_looked_for() {
        let error = find_plugin(Some(Path::new("/nowhere/x.so")))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("/nowhere/x.so") && error.contains("--plugin"),
            "{error}"
        );
    }

    #[test]
    fn versions_that_are_not_supported_are_refused_with_a_remedy() {
        let check = |version: &str, untested| {
            let nixl = Nixl::parse(&format!("nixl_cu12\t{version}\t/site")).unwrap();
            nixl.check("py", untested)
                .map_err(|error| error.to_string())
        };
        for untested in [false, true] {
            let error = check("0.10.1", untested).unwrap_err();
            assert!(
                error.contains("0.10.1") && error.contains("py -m pip install"),
                "{error}"
            );
            assert_eq!(check(versions::newest(), untested), Ok(()));
        }
        let error = check("99.0.0", false).unwrap_err();
        assert!(error.contains("newer tcpx") && error.contains("--untested"));
        assert_eq!(check("99.0.0", true), Ok(()));
    }
}
