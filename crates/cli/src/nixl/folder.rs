//! Creates a folder for `NIXL_PLUGIN_DIR`, which NIXL searches instead of its own: with the TCPX
//! backend, and with links to all of NIXL's own plugins.
//!
//! NIXL's backends find their libraries relative to themselves, `$ORIGIN/..` and
//! `$ORIGIN/../../nixl_cu12.libs`. The folder therefore lies in a copy of that part of the tree,
//! made of links. It is updated entry by entry, each atomically, whenever it is requested: it
//! follows an upgraded NIXL, and two processes that create it concurrently create the same.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use super::plan::{self, UCX, same};
use super::{Nixl, NixlError, PLUGIN_FILE};

/// Creates the folder, or updates it, and returns its path. Without a NIXL it contains only the
/// TCPX backend.
pub(crate) fn make(nixl: Option<&Nixl>, plugin: &Path, as_ucx: bool) -> Result<PathBuf, NixlError> {
    let cache = cache(|name| std::env::var_os(name))?;
    let plugin = plugin.canonicalize().unwrap_or_else(|_| plugin.to_owned());
    make_in(&cache.join("tcpx").join("nixl"), nixl, &plugin, as_ucx)
}

/// Returns the cache folder.
fn cache(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, NixlError> {
    let absolute = |name| {
        variable(name)
            .map(PathBuf::from)
            .filter(|p| p.is_absolute())
    };
    absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .ok_or(NixlError::NoCache)
}

fn make_in(
    cache: &Path,
    nixl: Option<&Nixl>,
    plugin: &Path,
    as_ucx: bool,
) -> Result<PathBuf, NixlError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| NixlError::File {
            what: "make",
            path,
            source,
        }
    };
    let tree = cache.join(name(nixl, plugin, as_ucx));
    let libs = tree.join(nixl.map_or(".libs".into(), Nixl::libs_name));
    let folder = libs.join("plugins");
    let mut builder = std::fs::DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(&folder);
    made.map_err(failed(&folder))?;
    check_owner(&tree)?;

    let mut wanted = BTreeSet::new();
    if let Some(nixl) = nixl {
        let site = nixl.site();
        let theirs = site.join(nixl.libs_name());
        let shared = format!("{}.libs", nixl.package);
        link(&site.join(&shared), &tree.join(&shared)).map_err(failed(&tree))?;
        link_all(&theirs, &libs, |name| name != "plugins").map_err(failed(&libs))?;
        let own = format!("libplugin_{UCX}.so");
        let linked = link_all(&nixl.plugins, &folder, |name| {
            name != PLUGIN_FILE && !(as_ucx && name == own.as_str())
        });
        wanted = linked.map_err(failed(&folder))?;
    }
    let ours = folder.join(PLUGIN_FILE);
    link(plugin, &ours).map_err(failed(&ours))?;
    wanted.insert(PLUGIN_FILE.into());
    if as_ucx {
        // A separate file, no link: the loader would treat both names as one library, which could
        // not tell by which name it was loaded.
        let ucx = plan::live(&folder, UCX);
        copy(plugin, &ucx).map_err(failed(&ucx))?;
        wanted.extend(ucx.file_name().map(OsStr::to_owned));
    }
    forget_others(&folder, &wanted).map_err(failed(&folder))?;
    Ok(folder)
}

/// Names the tree by everything that it is made of, except NIXL's version: an environment variable
/// that names the folder stays valid when NIXL is upgraded.
fn name(nixl: Option<&Nixl>, plugin: &Path, as_ucx: bool) -> String {
    let mut hasher = DefaultHasher::new();
    (nixl.map(|nixl| &nixl.plugins), plugin).hash(&mut hasher);
    let package = nixl.map_or("alone", |nixl| &nixl.package);
    let role = if as_ucx { "-as-UCX" } else { "" };
    format!("{package}{role}-{:016x}", hasher.finish())
}

/// Refuses a tree that others can change, since programs load its files.
fn check_owner(tree: &Path) -> Result<(), NixlError> {
    let about = tree.metadata().map_err(|source| NixlError::File {
        what: "make",
        path: tree.to_owned(),
        source,
    })?;
    let own = rustix::process::geteuid().as_raw();
    if about.uid() != own || about.mode() & 0o022 != 0 {
        return Err(NixlError::Foreign {
            path: tree.to_owned(),
        });
    }
    Ok(())
}

/// Links every entry of `from` that `choose` accepts into `to`; returns their names.
fn link_all(
    from: &Path,
    to: &Path,
    choose: impl Fn(&OsStr) -> bool,
) -> io::Result<BTreeSet<OsString>> {
    let mut linked = BTreeSet::new();
    for entry in std::fs::read_dir(from)? {
        let name = entry?.file_name();
        if choose(&name) && !name.as_encoded_bytes().starts_with(b".") {
            link(&from.join(&name), &to.join(&name))?;
            linked.insert(name);
        }
    }
    Ok(linked)
}

/// Makes `at` a link to `target`, atomically.
fn link(target: &Path, at: &Path) -> io::Result<()> {
    if std::fs::read_link(at).is_ok_and(|found| found == target) {
        return Ok(());
    }
    replace(at, |fresh| symlink(target, fresh))
}

/// Makes `at` a copy of `source`, atomically.
fn copy(source: &Path, at: &Path) -> io::Result<()> {
    let is_file = at.symlink_metadata().is_ok_and(|about| about.is_file());
    if is_file && same(source, at) {
        return Ok(());
    }
    replace(at, |fresh| std::fs::copy(source, fresh).map(drop))
}

/// Replaces `at` by what `make` creates under a name that only this process uses.
fn replace(at: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let name = at.file_name().unwrap_or_default().to_string_lossy();
    let fresh = at.with_file_name(format!(".{name}.{}", std::process::id()));
    let _ = std::fs::remove_file(&fresh);
    make(&fresh)
        .and_then(|()| std::fs::rename(&fresh, at))
        .inspect_err(|_| drop(std::fs::remove_file(&fresh)))
}

/// Removes backends that NIXL no longer has. Hidden files belong to other processes, unfinished.
fn forget_others(folder: &Path, wanted: &BTreeSet<OsString>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name();
        if !wanted.contains(&name) && !name.as_encoded_bytes().starts_with(b".") {
            match std::fs::remove_file(folder.join(&name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    struct Case {
        root: tempfile::TempDir,
        nixl: Nixl,
    }

    impl Case {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let site = root.path().join("site");
            let line = format!("nixl_cu12\t1.5.1\t{}", site.display());
            let nixl = Nixl::parse(&line).unwrap();
            std::fs::create_dir_all(&nixl.plugins).unwrap();
            std::fs::create_dir_all(site.join("nixl_cu12.libs")).unwrap();
            for file in [
                "site/nixl_cu12.libs/libucp.so",
                "site/.nixl_cu12.mesonpy.libs/libnixl.so",
                "site/.nixl_cu12.mesonpy.libs/plugins/libplugin_UCX.so",
                "site/.nixl_cu12.mesonpy.libs/plugins/libtelemetry_exporter_prometheus.so",
                "built.so",
            ] {
                std::fs::write(root.path().join(file), file).unwrap();
            }
            Case { root, nixl }
        }

        fn make(&self, as_ucx: bool) -> PathBuf {
            let plugin = self.root.path().join("built.so");
            make_in(&self.cache(), Some(&self.nixl), &plugin, as_ucx).unwrap()
        }

        fn cache(&self) -> PathBuf {
            self.root.path().join("cache")
        }
    }

    fn read(folder: &Path, file: &str) -> String {
        std::fs::read_to_string(folder.join(file)).unwrap()
    }

    #[test]
    fn nixls_own_plugins_and_their_libraries_are_found() {
        let case = Case::new();
        let folder = case.make(false);
        assert_eq!(read(&folder, PLUGIN_FILE), "built.so");
        for file in [
            "libplugin_UCX.so",
            "libtelemetry_exporter_prometheus.so",
            "../libnixl.so",
            "../../nixl_cu12.libs/libucp.so",
        ] {
            assert!(read(&folder, file).starts_with("site/"), "{file}");
        }
        assert_eq!(case.make(false), folder, "the same, once it is made");
    }

    #[test]
    fn as_ucx_it_has_two_files_and_does_not_disturb_the_other_folder() {
        let case = Case::new();
        let (plain, folder) = (case.make(false), case.make(true));
        assert_eq!(read(&folder, "libplugin_UCX.so"), "built.so");
        let inode = |name: &str| std::fs::metadata(folder.join(name)).unwrap().ino();
        assert_ne!(inode("libplugin_UCX.so"), inode(PLUGIN_FILE));
        assert!(read(&plain, "libplugin_UCX.so").starts_with("site/"));
        std::fs::write(case.root.path().join("built.so"), "rebuilt").unwrap();
        case.make(true);
        assert_eq!(read(&folder, "libplugin_UCX.so"), "rebuilt");
    }

    #[test]
    fn it_follows_an_upgraded_nixl() {
        let case = Case::new();
        let folder = case.make(false);
        let plugins = &case.nixl.plugins;
        std::fs::remove_file(plugins.join("libplugin_UCX.so")).unwrap();
        std::fs::write(plugins.join("libplugin_NEW.so"), "new").unwrap();
        let newer = Nixl {
            version: "1.6.0".into(),
            ..case.nixl.clone()
        };
        let plugin = case.root.path().join("built.so");
        assert_eq!(
            make_in(&case.cache(), Some(&newer), &plugin, false).unwrap(),
            folder
        );
        assert_eq!(read(&folder, "libplugin_NEW.so"), "new");
        assert!(folder.join("libplugin_UCX.so").symlink_metadata().is_err());
    }

    #[test]
    fn many_make_it_at_once() {
        let case = Case::new();
        let folder = case.make(true);
        std::fs::remove_dir_all(&folder).unwrap();
        let program = std::env::current_exe().unwrap();
        let children: Vec<_> = (0..8)
            .map(|_| {
                std::process::Command::new(&program)
                    .args(["--exact", "nixl::folder::tests::makes_it", "--ignored"])
                    .env("FOLDER_ROOT", case.root.path())
                    .stdout(std::process::Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        for mut child in children {
            assert!(child.wait().unwrap().success());
        }
        case.make(true);
        assert_eq!(read(&folder, "libplugin_UCX.so"), "built.so");
        let names: Vec<_> = std::fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names.len(), 3, "{names:?}");
    }

    /// Runs one of the processes of `many_make_it_at_once`.
    #[test]
    #[ignore = "run by many_make_it_at_once"]
    fn makes_it() {
        let Some(root) = std::env::var_os("FOLDER_ROOT").map(PathBuf::from) else {
            return;
        };
        let line = format!("nixl_cu12\t1.5.1\t{}", root.join("site").display());
        let nixl = Nixl::parse(&line).unwrap();
        let (cache, plugin) = (root.join("cache"), root.join("built.so"));
        for _ in 0..50 {
            let folder = make_in(&cache, Some(&nixl), &plugin, true).unwrap();
            for file in [PLUGIN_FILE, "libplugin_UCX.so"] {
                let _ = std::fs::remove_file(folder.join(file));
            }
        }
        make_in(&cache, Some(&nixl), &plugin, true).unwrap();
    }

    #[test]
    fn a_tree_that_others_can_write_is_refused() {
        let case = Case::new();
        let folder = case.make(false);
        let tree = folder.ancestors().nth(2).unwrap();
        std::fs::set_permissions(tree, PermissionsExt::from_mode(0o777)).unwrap();
        let plugin = case.root.path().join("built.so");
        let error = make_in(&case.cache(), Some(&case.nixl), &plugin, false).unwrap_err();
        assert!(matches!(error, NixlError::Foreign { .. }), "{error}");
    }

    #[test]
    fn the_cache_is_where_the_user_has_it() {
        let with = |name: &'static str, value: &'static str| {
            cache(move |asked| (asked == name).then(|| value.into()))
        };
        assert_eq!(with("XDG_CACHE_HOME", "/c").unwrap(), Path::new("/c"));
        assert_eq!(with("HOME", "/h").unwrap(), Path::new("/h/.cache"));
        assert!(with("HOME", "").is_err());
    }
}
