//! Describes the machine of a measurement: a number without its machine is not a result.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// One machine, as its kernel describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Host name.
    pub host: String,
    /// Kernel name, release and architecture.
    pub kernel: String,
    /// CPU model.
    pub cpu: String,
    /// CPUs this process may use.
    pub cores: usize,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// TCP settings that bound a stream: `tcp_rmem`, `tcp_wmem`, congestion control.
    pub tcp: Vec<(String, String)>,
    /// Models of its GPUs.
    #[serde(default)]
    pub gpus: Vec<String>,
}

impl Machine {
    /// Describes this machine.
    pub fn here() -> Machine {
        let uname = rustix::system::uname();
        let text = |field: &std::ffi::CStr| field.to_string_lossy().into_owned();
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Machine {
            host: text(uname.nodename()),
            kernel: [uname.sysname(), uname.release(), uname.machine()]
                .map(text)
                .join(" "),
            cpu: field(&cpuinfo, "model name")
                .unwrap_or("unknown")
                .to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: memory("MemTotal"),
            tcp: ["tcp_rmem", "tcp_wmem", "tcp_congestion_control"]
                .into_iter()
                .filter_map(|name| Some((name.to_owned(), sysctl(name)?)))
                .collect(),
            gpus: gpus(Path::new("/proc/driver/nvidia/gpus")),
        }
    }
}

/// Returns the bytes that can be allocated without swapping.
pub(crate) fn available_bytes() -> u64 {
    memory("MemAvailable")
}

fn memory(name: &str) -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = field(&meminfo, name).and_then(|value| value.split(' ').next()?.parse().ok());
    kib.unwrap_or(0u64) * 1024
}

fn sysctl(name: &str) -> Option<String> {
    let value = fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok()?;
    Some(value.split_ascii_whitespace().collect::<Vec<_>>().join(" "))
}

/// Lists the GPUs that the kernel driver knows, one folder each: asking CUDA would initialise it,
/// which measurements of host memory must not pay for.
fn gpus(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut gpus: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    gpus.sort();
    let model = |path: PathBuf| {
        let text = fs::read_to_string(path.join("information")).unwrap_or_default();
        field(&text, "Model").unwrap_or("unknown GPU").to_owned()
    };
    gpus.into_iter().map(model).collect()
}

/// Returns the value of a `name : value` line.
fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "MemTotal:       24576 kB\nmodel name\t: A CPU @ 2 GHz\nmodel\t: 1\n";
        assert_eq!(field(text, "model name"), Some("A CPU @ 2 GHz"));
        assert_eq!(field(text, "model"), Some("1"));
        assert_eq!(field(text, "MemTotal"), Some("24576 kB"));
        assert_eq!(field(text, "Mem"), None);
    }

    #[test]
    fn gpus_are_named_by_their_driver() {
        let folder = std::env::temp_dir().join(format!("tcpx-gpus-{}", std::process::id()));
        for (bus, text) in [
            ("0000:0a:00.0", "Model: \t\t NVIDIA H200\nIRQ: 1\n"),
            ("1", ""),
        ] {
            fs::create_dir_all(folder.join(bus)).unwrap();
            fs::write(folder.join(bus).join("information"), text).unwrap();
        }
        let found = gpus(&folder);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, ["NVIDIA H200", "unknown GPU"]);
        assert!(gpus(&folder).is_empty());
    }

    #[test]
    fn this_machine_has_a_kernel_and_cores() {
        let machine = Machine::here();
        assert!(machine.kernel.starts_with("Linux "));
        assert!(machine.cores >= 1);
        assert!(machine.memory_bytes >= available_bytes());
    }
}
