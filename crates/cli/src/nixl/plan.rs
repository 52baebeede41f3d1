//! Plans the changes of NIXL's folder that install the backend, step by step.
//!
//! A plan is computed from the content of the folder and then carried out. Each step is atomic, and
//! the next plan can start from the result of any step: there is no journal. The names identify the
//! files:
//!
//! | file | is |
//! |---|---|
//! | `libplugin_TCPX.so` | the backend |
//! | `libplugin_UCX.so` | NIXL's own UCX, or the backend; its bytes tell which |
//! | `libplugin_UCX.so.nixl` | NIXL's own UCX, kept; NIXL loads `.so` files only |
//! | `.libplugin_*.tcpx-new` | files of an unfinished installation |

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::NixlError;

/// The backend's own name.
const TCPX: &str = "TCPX";
/// The backend that TCPX can stand in for.
pub(crate) const UCX: &str = "UCX";

/// Bytes that every build of the TCPX backend contains, and nothing else does.
const MARK: &[u8] = b"tcpx-nixl-backend: this file is TCPX";

/// Suffix of the names of unfinished files.
const UNFINISHED: &str = ".tcpx-new";

/// The backend that answers to the name UCX.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ucx {
    /// NIXL's own, as it was installed, or none.
    Nixl,
    /// NIXL's own, which an upgrade has put in place of a stand-in.
    Upgraded,
    /// The TCPX backend.
    StandIn {
        /// Whether NIXL's own is kept beside it.
        kept: bool,
    },
    /// None; NIXL's own is kept beside.
    Missing,
}

/// One change, atomic except for files with unfinished names.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Copies a file to a name that nothing else uses.
    Copy { from: PathBuf, to: PathBuf },
    /// Gives a file a second name that nothing else uses.
    Link { from: PathBuf, to: PathBuf },
    /// Renames a file, over another one if needed.
    Rename { from: PathBuf, to: PathBuf },
    /// Removes a file.
    Remove(PathBuf),
}

impl Step {
    /// Carries out the step.
    pub(crate) fn run(&self) -> Result<(), NixlError> {
        let (what, path, result) = match self {
            Step::Copy { from, to } => ("write", to, copy(from, to)),
            // Some file systems have no hard links.
            Step::Link { from, to } => {
                let linked = std::fs::hard_link(from, to);
                ("write", to, linked.or_else(|_| copy(from, to)))
            }
            Step::Rename { from, to } => ("replace", to, std::fs::rename(from, to)),
            Step::Remove(path) => ("remove", path, std::fs::remove_file(path)),
        };
        result.map_err(|source| NixlError::File {
            what,
            path: path.clone(),
            source,
        })
    }
}

/// Copies a file and syncs it to disk, so that it is complete when it is renamed, whatever happens.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::copy(from, to)?;
    File::open(to)?.sync_all()
}

/// Plans to put `plugin` into NIXL's `folder`, with `as_ucx` under the name UCX too. If it already
/// stands in for UCX, both names keep the same build.
pub(crate) fn install(folder: &Path, plugin: &Path, as_ucx: bool) -> Vec<Step> {
    let mut steps = clean(folder);
    steps.extend(replace(folder, plugin, TCPX));
    let state = ucx(folder);
    if as_ucx || matches!(state, Ucx::StandIn { .. }) {
        let (live, kept) = (live(folder, UCX), kept(folder));
        let fresh = unfinished(&live);
        steps.push(Step::Copy {
            from: plugin.to_owned(),
            to: fresh.clone(),
        });
        // There is a UCX at every moment, since programs may be starting. NIXL's own has both names
        // until the backend takes the first one.
        let is_nixl = matches!(state, Ucx::Nixl | Ucx::Upgraded) && live.exists();
        if is_nixl && !same(&live, &kept) {
            let second = unfinished(&kept);
            steps.push(Step::Link {
                from: live.clone(),
                to: second.clone(),
            });
            steps.push(Step::Rename {
                from: second,
                to: kept,
            });
        }
        steps.push(Step::Rename {
            from: fresh,
            to: live,
        });
    }
    steps
}

/// Plans to restore `folder`: NIXL's own UCX under its name, and no file of TCPX.
pub(crate) fn uninstall(folder: &Path) -> Vec<Step> {
    let mut steps = clean(folder);
    let (live_ucx, kept) = (live(folder, UCX), kept(folder));
    match ucx(folder) {
        Ucx::Nixl => {}
        // Keep the newer one, which an upgrade has installed.
        Ucx::Upgraded => steps.push(Step::Remove(kept)),
        Ucx::StandIn { kept: false } => steps.push(Step::Remove(live_ucx)),
        Ucx::StandIn { kept: true } | Ucx::Missing => steps.push(Step::Rename {
            from: kept,
            to: live_ucx,
        }),
    }
    let own = live(folder, TCPX);
    if is_there(&own) {
        steps.push(Step::Remove(own));
    }
    steps
}

/// Returns which backend answers to the name UCX in `folder`.
pub(crate) fn ucx(folder: &Path) -> Ucx {
    let (live, kept) = (live(folder, UCX), is_there(&kept(folder)));
    match (is_there(&live), kept) {
        (true, kept) if is_ours(&live) => Ucx::StandIn { kept },
        (true, true) => Ucx::Upgraded,
        (false, true) => Ucx::Missing,
        (_, false) => Ucx::Nixl,
    }
}

/// Returns the file that NIXL loads as backend `name`.
pub(crate) fn live(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("libplugin_{name}.so"))
}

/// Returns the path of NIXL's own UCX, while TCPX stands in for it.
pub(crate) fn kept(folder: &Path) -> PathBuf {
    folder.join(format!("libplugin_{UCX}.so.nixl"))
}

/// Returns whether two files have the same bytes.
pub(crate) fn same(a: &Path, b: &Path) -> bool {
    matches!((std::fs::read(a), std::fs::read(b)), (Ok(a), Ok(b)) if a == b)
}

/// Returns whether a file is a build of the TCPX backend.
pub(crate) fn is_ours(file: &Path) -> bool {
    // The user may have made a link by hand.
    let target = std::fs::read_link(file).unwrap_or_default();
    let ours = format!("libplugin_{TCPX}.so");
    target.file_name() == Some(OsStr::new(&ours))
        || std::fs::read(file).is_ok_and(|bytes| bytes.windows(MARK.len()).any(|w| w == MARK))
}

/// Returns whether the path exists, even as a dangling link.
fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

fn replace(folder: &Path, plugin: &Path, name: &str) -> [Step; 2] {
    let live = live(folder, name);
    let fresh = unfinished(&live);
    [
        Step::Copy {
            from: plugin.to_owned(),
            to: fresh.clone(),
        },
        Step::Rename {
            from: fresh,
            to: live,
        },
    ]
}

fn unfinished(file: &Path) -> PathBuf {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    file.with_file_name(format!(".{name}{UNFINISHED}"))
}

/// Plans to remove files of unfinished installations.
fn clean(folder: &Path) -> Vec<Step> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with(".libplugin_") && name.ends_with(UNFINISHED)
        })
        .map(|entry| Step::Remove(entry.path()))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const NIXLS: &str = "NIXL's own UCX";
    const NEWER: &str = "UCX of a newer NIXL";

    /// A folder with NIXL's UCX, and a build of TCPX outside it.
    struct Case {
        folder: tempfile::TempDir,
        outside: tempfile::TempDir,
    }

    impl Case {
        fn new() -> Self {
            let case = Case {
                folder: tempfile::tempdir().unwrap(),
                outside: tempfile::tempdir().unwrap(),
            };
            case.build("1");
            case.write("libplugin_UCX.so", NIXLS);
            case
        }

        fn path(&self) -> &Path {
            self.folder.path()
        }

        fn plugin(&self) -> PathBuf {
            self.outside.path().join("built.so")
        }

        fn build(&self, version: &str) -> String {
            let bytes = format!("ELF {} {version}", str::from_utf8(MARK).unwrap());
            std::fs::write(self.plugin(), &bytes).unwrap();
            bytes
        }

        fn write(&self, name: &str, bytes: &str) {
            let path = self.path().join(name);
            // Replaces the file, as pip does.
            let _ = std::fs::remove_file(&path);
            std::fs::write(path, bytes).unwrap();
        }

        fn run(steps: &[Step]) {
            for step in steps {
                step.run().unwrap();
            }
        }

        fn install(&self) {
            Self::run(&install(self.path(), &self.plugin(), true));
        }

        fn uninstall(&self) {
            Self::run(&uninstall(self.path()));
        }

        fn files(&self) -> BTreeMap<String, String> {
            let entries = std::fs::read_dir(self.path()).unwrap().flatten();
            entries
                .map(|entry| {
                    let name = entry.file_name().into_string().unwrap();
                    (name, std::fs::read_to_string(entry.path()).unwrap())
                })
                .collect()
        }
    }

    fn files(list: &[(&str, &str)]) -> BTreeMap<String, String> {
        let owned = |(name, bytes): &(&str, &str)| ((*name).to_owned(), (*bytes).to_owned());
        list.iter().map(owned).collect()
    }

    fn stand_in(case: &Case, kept: &str) -> BTreeMap<String, String> {
        let ours = std::fs::read_to_string(case.plugin()).unwrap();
        files(&[
            ("libplugin_TCPX.so", &ours),
            ("libplugin_UCX.so", &ours),
            ("libplugin_UCX.so.nixl", kept),
        ])
    }

    #[test]
    fn a_stand_in_keeps_nixls_own_and_is_undone() {
        let case = Case::new();
        for _ in 0..2 {
            case.install();
            assert_eq!(case.files(), stand_in(&case, NIXLS));
            assert_eq!(ucx(case.path()), Ucx::StandIn { kept: true });
        }
        for _ in 0..2 {
            case.uninstall();
            assert_eq!(case.files(), files(&[("libplugin_UCX.so", NIXLS)]));
        }
    }

    #[test]
    fn an_installation_that_stopped_anywhere_is_undone_or_completed() {
        let steps = Case::new().installing().len();
        assert!(steps >= 6, "{steps}");
        for stopped in 0..=steps {
            for complete in [false, true] {
                let case = Case::new();
                Case::run(&case.installing()[..stopped]);
                // There is a UCX at every moment.
                assert!(case.files().contains_key("libplugin_UCX.so"), "{stopped}");
                if complete {
                    case.install();
                    assert_eq!(case.files(), stand_in(&case, NIXLS), "{stopped}");
                }
                case.uninstall();
                let own = files(&[("libplugin_UCX.so", NIXLS)]);
                assert_eq!(case.files(), own, "{stopped}");
            }
        }
    }

    #[test]
    fn an_undoing_that_stopped_anywhere_is_completed() {
        let case = Case::new();
        case.install();
        for stopped in 0..=uninstall(case.path()).len() {
            let case = Case::new();
            case.install();
            Case::run(&uninstall(case.path())[..stopped]);
            assert!(case.files().contains_key("libplugin_UCX.so"), "{stopped}");
            case.uninstall();
            assert_eq!(case.files(), files(&[("libplugin_UCX.so", NIXLS)]));
        }
    }

    #[test]
    fn a_file_that_was_half_copied_is_removed() {
        let case = Case::new();
        case.write(".libplugin_UCX.so.tcpx-new", "EL");
        case.uninstall();
        assert_eq!(case.files(), files(&[("libplugin_UCX.so", NIXLS)]));
    }

    #[test]
    fn the_ucx_of_an_upgraded_nixl_is_never_overwritten_with_the_old_one() {
        let case = Case::new();
        case.install();
        case.write("libplugin_UCX.so", NEWER);
        assert_eq!(ucx(case.path()), Ucx::Upgraded);
        case.uninstall();
        assert_eq!(case.files(), files(&[("libplugin_UCX.so", NEWER)]));

        // After another installation the newer one is kept, wherever that stops.
        for stopped in 0..=6 {
            let case = Case::new();
            case.install();
            case.write("libplugin_UCX.so", NEWER);
            let steps = case.installing();
            Case::run(&steps[..stopped.min(steps.len())]);
            case.uninstall();
            assert_eq!(case.files(), files(&[("libplugin_UCX.so", NEWER)]));
        }
    }

    #[test]
    fn a_new_build_replaces_the_stand_in_too() {
        let case = Case::new();
        case.install();
        case.build("2");
        Case::run(&install(case.path(), &case.plugin(), false));
        assert_eq!(case.files(), stand_in(&case, NIXLS));
    }

    #[test]
    fn a_nixl_without_ucx_has_none_afterwards() {
        let case = Case::new();
        std::fs::remove_file(case.path().join("libplugin_UCX.so")).unwrap();
        case.install();
        assert_eq!(ucx(case.path()), Ucx::StandIn { kept: false });
        case.uninstall();
        assert_eq!(case.files(), files(&[]));
    }

    #[test]
    fn a_link_made_by_hand_is_a_stand_in() {
        let case = Case::new();
        Case::run(&install(case.path(), &case.plugin(), false));
        let live = case.path().join("libplugin_UCX.so");
        std::fs::remove_file(&live).unwrap();
        std::os::unix::fs::symlink("libplugin_TCPX.so", live).unwrap();
        assert_eq!(ucx(case.path()), Ucx::StandIn { kept: false });
    }

    #[test]
    fn the_mark_is_what_the_backend_says() {
        let source = include_str!("../../../../plugins/nixl/plugin.cpp");
        assert!(source.contains(str::from_utf8(MARK).unwrap()));
    }

    impl Case {
        fn installing(&self) -> Vec<Step> {
            install(self.path(), &self.plugin(), true)
        }
    }
}
