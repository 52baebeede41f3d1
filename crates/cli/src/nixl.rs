//! Where an installed NIXL looks for backend plugins, and where ours is.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The file name is the backend's name: NIXL knows plugins by it.
pub(crate) const PLUGIN_FILE: &str = "libplugin_TCPX.so";

/// Names the plugin's file where it is not beside the command.
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

/// Why NIXL or the plugin could not be found or changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NixlError {
    /// The Python that was named does not run.
    #[error("cannot run {python} (--python names another one): {source}")]
    Python {
        /// As it was given.
        python: String,
        /// What the system said.
        source: io::Error,
    },
    /// Python ran and failed.
    #[error("{python} failed: {message}")]
    PythonFailed {
        /// As it was given.
        python: String,
        /// What it printed.
        message: String,
    },
    /// No NIXL there.
    #[error(
        "{python} has no NIXL: `{python} -m pip install nixl` installs it, --python names another one"
    )]
    NotInstalled {
        /// As it was given.
        python: String,
    },
    /// Our own plugin is not where it should be.
    #[error(
        "{PLUGIN_FILE} was not found in {tried}: build it with `make dist`, or name it with --plugin or {PLUGIN_VARIABLE}"
    )]
    NoPlugin {
        /// Where it was looked for.
        tried: String,
    },
    /// A file could not be changed.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// What was to be done.
        what: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// One installed NIXL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Nixl {
    /// `nixl_cu12` or `nixl_cu13`.
    pub(crate) package: String,
    pub(crate) version: String,
    /// The folder that it loads backends from.
    pub(crate) plugins: PathBuf,
}

impl Nixl {
    /// Every NIXL that `python` can import.
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

    /// From a line of [`FIND_PACKAGES`].
    fn parse(line: &str) -> Option<Nixl> {
        let mut fields = line.split('\t');
        let (package, version, site) = (fields.next()?, fields.next()?, fields.next()?);
        // Beside the package, in the folder that the wheel's build tool keeps its libraries in.
        let plugins = Path::new(site)
            .join(format!(".{package}.mesonpy.libs"))
            .join("plugins");
        Some(Nixl {
            package: package.to_owned(),
            version: version.to_owned(),
            plugins,
        })
    }

    /// Where our plugin is, or would be.
    pub(crate) fn target(&self) -> PathBuf {
        self.plugins.join(PLUGIN_FILE)
    }

    /// Puts the plugin there; replaces an older one in one step.
    pub(crate) fn install(&self, plugin: &Path) -> Result<(), NixlError> {
        let target = self.target();
        let fresh = self
            .plugins
            .join(format!(".{PLUGIN_FILE}.{}", std::process::id()));
        let result = std::fs::copy(plugin, &fresh).and_then(|_| std::fs::rename(&fresh, &target));
        result.map_err(|source| {
            let _ = std::fs::remove_file(&fresh);
            NixlError::File {
                what: "install",
                path: target,
                source,
            }
        })
    }

    /// Removes the plugin; says whether it was there.
    pub(crate) fn uninstall(&self) -> Result<bool, NixlError> {
        match std::fs::remove_file(self.target()) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(NixlError::File {
                what: "remove",
                path: self.target(),
                source,
            }),
        }
    }
}

/// Our plugin: as it was named, or where `make dist` and the wheel put it relative to the command.
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

/// Whether two files have the same bytes.
pub(crate) fn same(a: &Path, b: &Path) -> bool {
    matches!((std::fs::read(a), std::fs::read(b)), (Ok(a), Ok(b)) if a == b)
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
        nixl.install(&plugin).unwrap();
        assert!(same(&plugin, &nixl.target()));
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
}
