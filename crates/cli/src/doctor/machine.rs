//! Reads facts about this machine: sysctls, sysfs, devices, limits. No judgement.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::process::{Resource, getrlimit};

/// A soft and a hard limit; `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) soft: Option<u64>,
    pub(crate) hard: Option<u64>,
}

/// The root folder to read from; another folder in tests.
#[derive(Debug)]
pub(crate) struct Machine {
    root: PathBuf,
}

impl Machine {
    /// Returns the machine this runs on.
    pub(crate) fn this() -> Self {
        Machine::at("/")
    }

    /// Creates a machine whose `/proc`, `/sys`, `/dev` and libraries lie below `root`.
    pub(crate) fn at(root: impl Into<PathBuf>) -> Self {
        Machine { root: root.into() }
    }

    /// Returns `RLIMIT_NOFILE`.
    pub(crate) fn open_files(&self) -> Limit {
        limit(Resource::Nofile)
    }

    /// Returns `RLIMIT_MEMLOCK`.
    pub(crate) fn locked_memory(&self) -> Limit {
        limit(Resource::Memlock)
    }

    /// Returns the kernel's release, such as `6.12.0-generic`.
    pub(crate) fn kernel_release(&self) -> Option<String> {
        self.sysctl("kernel/osrelease")
    }

    /// Returns whether the kernel lets TCP send without copying.
    pub(crate) fn zerocopy(&self) -> io::Result<()> {
        crate::sys::probe_zerocopy()
    }

    /// Returns the number of cores that this process may use.
    pub(crate) fn cores(&self) -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }

    /// Returns the text of `/proc/sys/…`.
    pub(crate) fn sysctl(&self, name: &str) -> Option<String> {
        self.text(&format!("proc/sys/{name}"))
    }

    /// Returns one number of `/proc/sys/…`.
    pub(crate) fn sysctl_number<T: FromStr>(&self, name: &str) -> Option<T> {
        self.sysctl(name)?.parse().ok()
    }

    /// Returns the third of three numbers (minimum, default, maximum), as in `tcp_rmem`.
    pub(crate) fn sysctl_most(&self, name: &str) -> Option<u64> {
        self.sysctl(name)?.split_whitespace().nth(2)?.parse().ok()
    }

    /// Returns the text of a file below the root, trimmed.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path))
            .ok()
            .map(|text| text.trim().to_owned())
    }

    /// Returns the names in a folder below the root, sorted; none if there is no such folder.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        names(&self.root.join(folder))
    }

    /// Finds shared libraries whose file name `wanted` accepts, in the loader's order.
    ///
    /// Folders of `search` come first (`LD_LIBRARY_PATH`), then the loader's cache, then its
    /// default folders. Opens no library, since loading one runs code.
    pub(crate) fn libraries(&self, search: &[PathBuf], wanted: fn(&str) -> bool) -> Vec<PathBuf> {
        const DEFAULT: [&str; 8] = [
            "lib",
            "usr/lib",
            "lib64",
            "usr/lib64",
            "lib/x86_64-linux-gnu",
            "usr/lib/x86_64-linux-gnu",
            "lib/aarch64-linux-gnu",
            "usr/lib/aarch64-linux-gnu",
        ];
        let in_folder = |folder: PathBuf| {
            names(&folder)
                .into_iter()
                .filter(|name| wanted(name))
                .map(move |name| folder.join(name))
                .collect::<Vec<_>>()
        };
        let mut found: Vec<PathBuf> = search.iter().cloned().flat_map(in_folder).collect();
        found.extend(self.cached_libraries(wanted));
        found.extend(
            DEFAULT
                .iter()
                .flat_map(|folder| in_folder(self.root.join(folder))),
        );
        let mut seen = std::collections::HashSet::new();
        found.retain(|path| {
            let real = fs::canonicalize(path);
            real.is_ok_and(|real| seen.insert(real))
        });
        found
    }

    /// Returns paths in `/etc/ld.so.cache`, which contains them as strings that end with a zero.
    fn cached_libraries(&self, wanted: fn(&str) -> bool) -> Vec<PathBuf> {
        let cache = fs::read(self.root.join("etc/ld.so.cache")).unwrap_or_default();
        cache
            .split(|&byte| byte == 0)
            .filter_map(|text| str::from_utf8(text).ok())
            .filter_map(|text| text.strip_prefix('/'))
            .filter(|text| text.rsplit('/').next().is_some_and(wanted))
            .map(|text| self.root.join(text))
            .collect()
    }
}

fn limit(resource: Resource) -> Limit {
    let limit = getrlimit(resource);
    Limit {
        soft: limit.current,
        hard: limit.maximum,
    }
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A machine in a temporary folder.
    pub(crate) struct Fake(tempfile::TempDir);

    impl Fake {
        pub(crate) fn new() -> Self {
            Fake(tempfile::tempdir().unwrap())
        }

        pub(crate) fn file(self, path: &str, bytes: impl AsRef<[u8]>) -> Self {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
            self
        }

        pub(crate) fn machine(&self) -> Machine {
            Machine::at(self.0.path())
        }
    }

    #[test]
    fn sysctls_are_read_below_the_root() {
        let fake = Fake::new()
            .file("proc/sys/net/core/somaxconn", "4096\n")
            .file("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n");
        let machine = fake.machine();
        assert_eq!(machine.sysctl_number("net/core/somaxconn"), Some(4096u64));
        assert_eq!(machine.sysctl_most("net/ipv4/tcp_rmem"), Some(6_291_456));
        assert_eq!(machine.sysctl_most("net/core/somaxconn"), None);
        assert_eq!(machine.sysctl("net/core/absent"), None);
    }

    #[test]
    fn libraries_are_found_by_folder_and_by_cache_once_each() {
        let fake = Fake::new()
            .file("opt/plugin/libnccl-net-a.so", "")
            .file("usr/lib/libnccl-net.so", "")
            .file("opt/cached/libnccl-net-b.so", "")
            .file("etc/ld.so.cache", "magic\0libnccl-net-b.so\0/opt/cached/libnccl-net-b.so\0/gone/libnccl-net-c.so\0/usr/lib/libnccl-net.so\0");
        let search = [fake.0.path().join("opt/plugin")];
        let found = fake
            .machine()
            .libraries(&search, |name| name.starts_with("libnccl-net"));
        let names: Vec<_> = found.iter().map(|path| path.file_name().unwrap()).collect();
        assert_eq!(
            names,
            ["libnccl-net-a.so", "libnccl-net-b.so", "libnccl-net.so"]
        );
    }

    #[test]
    fn this_machine_has_limits() {
        let machine = Machine::this();
        assert!(machine.cores() > 0);
        assert_ne!(machine.open_files().soft, Some(0));
    }
}
