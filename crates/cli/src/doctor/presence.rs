//! Reports GPUs and NCCL net plugins. Transfers of host memory need neither.

use std::path::{Path, PathBuf};

use super::Finding;
use super::machine::Machine;
use crate::units::count;

/// Looks for GPUs by their device files, and for the driver's library.
pub(super) fn gpus(machine: &Machine) -> Finding {
    let devices = machine
        .names("dev")
        .into_iter()
        .filter(|name| is_gpu(name))
        .count();
    let search = search_path(std::env::var_os("LD_LIBRARY_PATH").as_deref());
    let libraries = machine.libraries(&search, |name| name == "libcuda.so.1");
    judge_gpus(devices, libraries.first().map(PathBuf::as_path))
}

fn judge_gpus(devices: usize, library: Option<&Path>) -> Finding {
    const ID: &str = "gpu.cuda";
    match (devices, library) {
        (0, None) => Finding::info(ID, "no NVIDIA GPU; host memory only"),
        (0, Some(library)) => Finding::info(
            ID,
            format!("no NVIDIA GPU, though {} is here", library.display()),
        ),
        (devices, None) => Finding::info(
            ID,
            format!("{}, but no libcuda.so.1", count(devices, "NVIDIA GPU")),
        )
        .advise("install the driver's libraries, or run the container with --gpus all"),
        (devices, Some(library)) => Finding::ok(
            ID,
            format!("{}, {}", count(devices, "NVIDIA GPU"), library.display()),
        ),
    }
}

/// `nvidia0`, not `nvidiactl` or `nvidia-uvm`.
fn is_gpu(name: &str) -> bool {
    let number = name.strip_prefix("nvidia").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Reports NCCL net plugins; `asked` is the one in the settings.
pub(super) fn plugin(machine: &Machine, asked: &str) -> Finding {
    let search = search_path(std::env::var_os("LD_LIBRARY_PATH").as_deref());
    let found = machine.libraries(&search, |name| {
        name.starts_with("libnccl-net") && name.contains(".so")
    });
    judge_plugins(asked, Path::new(asked).is_file(), &found)
}

fn judge_plugins(asked: &str, asked_is_a_file: bool, found: &[PathBuf]) -> Finding {
    const ID: &str = "plugin.nccl_net";
    let list: Vec<String> = found
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    let list = if list.is_empty() {
        "none".to_owned()
    } else {
        list.join(", ")
    };
    if asked.is_empty() {
        return Finding::info(
            ID,
            format!("NCCL net plugins found: {list}; native TCP needs none"),
        );
    }
    let names = [asked.to_owned(), format!("libnccl-net-{asked}.so")];
    let known = |path: &PathBuf| {
        path.file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|n| names.contains(&n.into()))
    };
    if asked_is_a_file || found.iter().any(known) {
        return Finding::ok(ID, format!("TCPX_PLUGIN={asked} is here"));
    }
    Finding::warn(
        ID,
        format!("TCPX_PLUGIN={asked} is neither a file nor a plugin in the loader's path: {list}"),
        "give its full path, or add its folder to LD_LIBRARY_PATH",
    )
}

fn search_path(variable: Option<&std::ffi::OsStr>) -> Vec<PathBuf> {
    let folders = variable.map(|value| std::env::split_paths(value).collect::<Vec<_>>());
    folders
        .unwrap_or_default()
        .into_iter()
        .filter(|folder| folder.is_absolute())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::super::machine::tests::Fake;
    use super::*;

    #[test]
    fn gpus_are_counted_by_their_device_files() {
        let fake = Fake::new()
            .file("dev/nvidia0", "")
            .file("dev/nvidia1", "")
            .file("dev/nvidiactl", "")
            .file("dev/nvidia-uvm", "")
            .file("usr/lib/libcuda.so.1", "");
        let finding = gpus(&fake.machine());
        assert!(
            finding.found.starts_with("2 NVIDIA GPUs, "),
            "{}",
            finding.found
        );
        assert_eq!(finding.level, Level::Ok);
        assert_eq!(judge_gpus(0, None).level, Level::Info);
        assert!(judge_gpus(1, None).advice.is_some());
    }

    #[test]
    fn a_plugin_that_was_asked_for_has_to_be_there() {
        let found = [PathBuf::from("/usr/lib/libnccl-net-emu.so")];
        assert_eq!(judge_plugins("", false, &found).level, Level::Info);
        assert_eq!(judge_plugins("emu", false, &found).level, Level::Ok);
        assert_eq!(judge_plugins("/opt/x.so", true, &[]).level, Level::Ok);
        assert_eq!(judge_plugins("other", false, &found).level, Level::Warn);
    }

    #[test]
    fn only_absolute_folders_are_searched() {
        let path = search_path(Some("/a::b:/c".as_ref()));
        assert_eq!(path, [PathBuf::from("/a"), PathBuf::from("/c")]);
    }
}
