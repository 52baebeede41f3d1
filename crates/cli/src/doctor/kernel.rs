//! Checks the kernel: zero-copy sends, device-memory TCP, large pages, cores.

use std::fmt;
use std::io;

use super::Finding;
use super::machine::Machine;
use crate::units::count;

/// Runs all checks of the kernel.
pub(super) fn findings(machine: &Machine) -> Vec<Finding> {
    let release = machine.kernel_release();
    let version = release.as_deref().and_then(Version::parse);
    let hugepages = machine.text("sys/kernel/mm/transparent_hugepage/enabled");
    vec![
        kernel(release.as_deref(), version),
        zerocopy(&machine.zerocopy()),
        device_memory(version),
        cores(machine.cores()),
        huge_pages(hugepages.as_deref()),
    ]
}

/// The two numbers of a kernel release that determine features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32);

impl Version {
    /// First release with zero-copy sends on TCP.
    const ZEROCOPY: Version = Version(4, 14);
    /// First release in which received payload can land in device memory.
    const DEVMEM_RECEIVE: Version = Version(6, 12);
    /// First release in which payload can be sent from device memory.
    const DEVMEM_SEND: Version = Version(6, 16);

    fn parse(release: &str) -> Option<Self> {
        let mut numbers = release.split(|c: char| !c.is_ascii_digit());
        Some(Version(
            numbers.next()?.parse().ok()?,
            numbers.next()?.parse().ok()?,
        ))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

fn kernel(release: Option<&str>, version: Option<Version>) -> Finding {
    const ID: &str = "kernel.version";
    match (release, version) {
        (Some(release), Some(version)) if version < Version::ZEROCOPY => Finding::warn(
            ID,
            format!("Linux {release}"),
            format!("Linux {} or later has zero-copy sends", Version::ZEROCOPY),
        ),
        (Some(release), Some(_)) => Finding::ok(ID, format!("Linux {release}")),
        (release, _) => Finding::info(
            ID,
            format!("unknown version {:?}", release.unwrap_or_default()),
        ),
    }
}

fn zerocopy(probe: &io::Result<()>) -> Finding {
    const ID: &str = "kernel.zerocopy";
    match probe {
        Ok(()) => Finding::ok(ID, "zero-copy sends (MSG_ZEROCOPY) are available"),
        Err(error) => Finding::info(ID, format!("no zero-copy sends (SO_ZEROCOPY: {error})"))
            .advise("nothing: sends are copied by the kernel, which costs CPU time only"),
    }
}

fn device_memory(version: Option<Version>) -> Finding {
    const ID: &str = "kernel.devmem";
    let Some(version) = version else {
        return Finding::info(ID, "device-memory TCP: unknown kernel version");
    };
    if version < Version::DEVMEM_RECEIVE {
        return Finding::info(
            ID,
            format!(
                "no device-memory TCP before Linux {}: GPU memory is staged through the host",
                Version::DEVMEM_RECEIVE
            ),
        );
    }
    let ways = if version < Version::DEVMEM_SEND {
        "receive"
    } else {
        "receive and send"
    };
    Finding::info(
        ID,
        format!(
            "this kernel has device-memory TCP ({ways}); it also takes a driver with header split"
        ),
    )
}

fn cores(cores: usize) -> Finding {
    const ID: &str = "machine.cores";
    let found = count(cores, "core");
    if cores < 4 {
        return Finding::info(
            ID,
            format!("{found}: the application and its lanes share them"),
        )
        .advise("more cores let more lanes run at once; a lane fills about one");
    }
    Finding::ok(ID, found)
}

/// `text` lists the modes with the active one in brackets: `always [madvise] never`.
fn huge_pages(text: Option<&str>) -> Finding {
    const ID: &str = "machine.hugepages";
    let active = text
        .and_then(|text| text.split_once('[')?.1.split_once(']'))
        .map(|(mode, _)| mode);
    match active {
        Some(mode @ ("always" | "madvise")) => {
            Finding::ok(ID, format!("transparent huge pages: {mode}"))
        }
        Some(mode) => Finding::info(ID, format!("transparent huge pages: {mode}")).advise(
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` spares large buffers \
             most of their page faults",
        ),
        None => Finding::info(ID, "transparent huge pages: not in this kernel"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::super::machine::tests::Fake;
    use super::*;

    #[test]
    fn releases_are_read_as_far_as_they_matter() {
        assert_eq!(Version::parse("6.18.44-fc-v445"), Some(Version(6, 18)));
        assert_eq!(Version::parse("5.4"), Some(Version(5, 4)));
        assert_eq!(Version::parse("4.19-rc1"), Some(Version(4, 19)));
        assert_eq!(Version::parse("unknown"), None);
        assert!(Version(6, 2) < Version(6, 12));
    }

    #[test]
    fn old_kernels_are_a_warning_and_strange_ones_a_note() {
        assert_eq!(kernel(Some("6.1.0"), Some(Version(6, 1))).level, Level::Ok);
        assert_eq!(
            kernel(Some("3.10.0"), Some(Version(3, 10))).level,
            Level::Warn
        );
        assert_eq!(kernel(None, None).level, Level::Info);
    }

    #[test]
    fn device_memory_says_which_ways() {
        assert!(device_memory(Some(Version(6, 8))).found.contains("staged"));
        assert!(
            device_memory(Some(Version(6, 12)))
                .found
                .contains("(receive)")
        );
        assert!(
            device_memory(Some(Version(6, 18)))
                .found
                .contains("(receive and send)")
        );
    }

    #[test]
    fn the_mode_in_brackets_counts() {
        assert_eq!(huge_pages(Some("always [madvise] never")).level, Level::Ok);
        assert_eq!(
            huge_pages(Some("always madvise [never]")).level,
            Level::Info
        );
        assert_eq!(huge_pages(None).level, Level::Info);
    }

    #[test]
    fn a_refused_probe_is_no_obstacle() {
        assert_eq!(zerocopy(&Ok(())).level, Level::Ok);
        assert_eq!(
            zerocopy(&Err(io::ErrorKind::Unsupported.into())).level,
            Level::Info
        );
    }

    #[test]
    fn everything_is_reported_even_when_nothing_can_be_read() {
        let ids: Vec<_> = findings(&Fake::new().machine())
            .iter()
            .map(|f| f.id)
            .collect();
        let expected = [
            "kernel.version",
            "kernel.zerocopy",
            "kernel.devmem",
            "machine.cores",
            "machine.hugepages",
        ];
        assert_eq!(ids, expected);
    }
}
