//! The path of a measurement's bytes: lanes, or direct copies within one host.

use std::fmt;

use serde::{Deserialize, Serialize};
use tcpx::SameHostInfo;

use crate::place::Places;

/// The path of a measurement's bytes. Written `lanes` or `same-host`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Path {
    /// Lanes: sockets, or comms of a plugin.
    #[default]
    Lanes,
    /// Direct copies between the memory of two processes on one host.
    SameHost,
}

impl Path {
    /// Returns the value of the setting `same_host` that allows only this path.
    pub fn setting(self) -> &'static str {
        match self {
            Path::Lanes => "off",
            Path::SameHost => "require",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Path::Lanes => "lanes",
            Path::SameHost => "same-host",
        })
    }
}

/// The path taken, and why it was not a better one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// The path.
    pub path: Path,
    /// The reason lanes carry the bytes; `None` if they are copied directly.
    pub why_not: Option<String>,
}

impl Taken {
    /// Determines the path from a connection that has carried only a transfer between `places`.
    pub(crate) fn of(info: Option<SameHostInfo>, places: Places) -> Taken {
        let info = info.unwrap_or_else(|| SameHostInfo {
            why_not: Some("the peer is not connected".into()),
            bytes: 0,
        });
        if info.bytes > 0 {
            return Taken {
                path: Path::SameHost,
                why_not: None,
            };
        }
        let mixed = places.initiator.is_host() != places.target.is_host();
        let other = if mixed {
            "between GPU memory and host memory lanes are faster"
        } else {
            "the memory of one process cannot be mapped in the other"
        };
        Taken {
            path: Path::Lanes,
            why_not: info.why_not.or_else(|| Some(other.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_were_copied_tell_the_path_and_reasons_are_kept() {
        let info = |why_not: Option<&str>, bytes| {
            let why_not = why_not.map(str::to_owned);
            Some(SameHostInfo { why_not, bytes })
        };
        let taken = |info, places: &str| Taken::of(info, places.parse().unwrap());
        let direct = taken(info(None, 4096), "host");
        assert_eq!((direct.path, direct.why_not), (Path::SameHost, None));
        let off = taken(info(Some("same_host is off"), 0), "host");
        assert_eq!(off.path, Path::Lanes);
        assert_eq!(off.why_not.as_deref(), Some("same_host is off"));
        for (places, word) in [("vram:0,host", "faster"), ("vram:0", "mapped")] {
            let lanes = taken(info(None, 0), places);
            assert_eq!(lanes.path, Path::Lanes);
            assert!(lanes.why_not.unwrap().contains(word));
        }
    }

    #[test]
    fn paths_are_written_as_they_are_typed() {
        for path in [Path::Lanes, Path::SameHost] {
            assert_eq!(serde_json::to_string(&path).unwrap(), format!("\"{path}\""));
        }
    }
}
