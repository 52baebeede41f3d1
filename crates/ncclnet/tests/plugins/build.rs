//! Compiles `loop_plugin.c` in its variants. Each test has libraries of its own, because a library
//! is initialised only once in a process.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};

use libloading::os::unix::Library;

/// Every version of the API.
pub(crate) const VERSIONS: std::ops::RangeInclusive<u32> = 4..=12;

/// Builds a plugin of one version; `name` is unique among the tests.
pub(crate) fn plugin(name: &str, version: u32, options: &[&str]) -> PathBuf {
    plugins(name, &[version], options)
}

/// Builds a plugin that exports several versions.
pub(crate) fn plugins(name: &str, versions: &[u32], options: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plugins/loop_plugin.c");
    let objects: Vec<PathBuf> = versions
        .iter()
        .map(|version| {
            let object = output(&format!("{name}-{version}.o"));
            cc(&[
                &["-c", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"][..],
                &["-Wno-unused-function", &format!("-DAPI_VERSION={version}")],
                options,
                &[path(&source), "-o", path(&object)],
            ]
            .concat());
            object
        })
        .collect();
    let library = output(&format!("libnccl-net-{name}.so"));
    let mut arguments = vec!["-shared", "-pthread", "-o", path(&library)];
    arguments.extend(objects.iter().map(|object| path(object)));
    cc(&arguments);
    library
}

/// Builds an ordinary shared library.
pub(crate) fn ordinary_library(name: &str) -> PathBuf {
    let source = output(&format!("{name}.c"));
    std::fs::write(&source, "int answer(void) { return 42; }\n").unwrap();
    let library = output(&format!("{name}.so"));
    cc(&["-shared", "-fPIC", path(&source), "-o", path(&library)]);
    library
}

/// Returns a path for a file of the tests.
pub(crate) fn output(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

pub(crate) fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn cc(arguments: &[&str]) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let result = Command::new(&compiler)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("these tests need a C compiler ({compiler}): {error}"));
    assert!(
        result.status.success(),
        "{compiler} {arguments:?}:\n{}",
        String::from_utf8_lossy(&result.stderr)
    );
}

/// The counters that a loop plugin exports.
pub(crate) struct Counters(Library);

impl Counters {
    pub(crate) fn of(library: &Path) -> Self {
        // SAFETY: the plugin was built by these tests.
        let library = unsafe {
            Library::open(
                Some(library),
                libloading::os::unix::RTLD_NOW | libloading::os::unix::RTLD_LOCAL,
            )
        };
        Self(library.unwrap())
    }

    /// Returns the number of open comms, listeners, memory handles and contexts.
    pub(crate) fn live(&self) -> i32 {
        self.get("loop_plugin_live")
    }

    /// Returns how often `init` was called.
    pub(crate) fn inits(&self) -> i32 {
        self.get("loop_plugin_inits")
    }

    /// Returns the number of comms that a thread of the plugin is connecting.
    pub(crate) fn connecting(&self) -> i32 {
        self.get("loop_plugin_connecting")
    }

    fn get(&self, name: &str) -> i32 {
        let name = CString::new(name).unwrap();
        // SAFETY: all are atomic ints of the plugin, which stays loaded while `self` lives.
        unsafe {
            let counter = self.0.get::<*const AtomicI32>(name.to_bytes_with_nul());
            (**counter.unwrap()).load(Ordering::SeqCst)
        }
    }
}
