//! The place of a measurement's memory: in the host, or on a GPU.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tcpx::cuda::Device;

/// The place of one side's memory. Written `host` or `vram:0`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Place {
    /// Ordinary memory of the process.
    #[default]
    Host,
    /// Memory of the CUDA device with this ordinal in the process.
    Vram(u32),
}

/// The places of both sides' memory. Written as one [`Place`] for both, or as two: the initiator's,
/// a comma, the target's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Places {
    /// The place of the side that starts transfers.
    pub initiator: Place,
    /// The place of the side that serves them.
    pub target: Place,
}

/// A GPU in use; `None` for host memory.
pub type Opened = Option<Arc<dyn Device>>;

/// Reports a text that is no valid [`Place`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{found:?} is not a place for memory; expected host, or vram:N for the memory of GPU N (one per side: host,vram:0)"
)]
pub struct PlaceError {
    /// The text.
    pub found: String,
}

impl Place {
    /// Checks that the memory is available: on a GPU, that the device exists and works.
    ///
    /// The device's context lives as long as the returned value, or memory there. Creating it takes
    /// a moment: code that allocates repeatedly should hold it.
    ///
    /// # Errors
    /// The driver, any GPU, or this GPU is missing.
    pub fn open(self) -> Result<Opened, tcpx::Error> {
        Ok(match self {
            Place::Host => None,
            Place::Vram(ordinal) => Some(tcpx::cuda::device(ordinal)?),
        })
    }

    /// Returns whether sockets can access the memory directly.
    pub fn is_host(self) -> bool {
        self == Place::Host
    }
}

impl Places {
    /// Uses the same place for both sides.
    pub fn both(place: Place) -> Places {
        Places {
            initiator: place,
            target: place,
        }
    }

    /// Returns whether both sides are in host memory.
    pub fn are_host(self) -> bool {
        self.initiator.is_host() && self.target.is_host()
    }
}

impl FromStr for Place {
    type Err = PlaceError;

    fn from_str(text: &str) -> Result<Place, PlaceError> {
        let wrong = || PlaceError { found: text.into() };
        match text.strip_prefix("vram:") {
            None if text == "host" => Ok(Place::Host),
            // `parse` would accept a sign.
            Some(number) if number.bytes().all(|byte| byte.is_ascii_digit()) => {
                number.parse().map(Place::Vram).map_err(|_| wrong())
            }
            _ => Err(wrong()),
        }
    }
}

impl FromStr for Places {
    type Err = PlaceError;

    fn from_str(text: &str) -> Result<Places, PlaceError> {
        match text.split_once(',') {
            None => text.parse().map(Places::both),
            Some((initiator, target)) => Ok(Places {
                initiator: initiator.trim().parse()?,
                target: target.trim().parse()?,
            }),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.pad("host"),
            Place::Vram(ordinal) => f.pad(&format!("vram:{ordinal}")),
        }
    }
}

impl fmt::Display for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.initiator == self.target {
            return self.initiator.fmt(f);
        }
        write!(f, "{},{}", self.initiator, self.target)
    }
}

impl TryFrom<String> for Place {
    type Error = PlaceError;

    fn try_from(text: String) -> Result<Place, PlaceError> {
        text.parse()
    }
}

impl From<Place> for String {
    fn from(place: Place) -> String {
        place.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_they_are_written() {
        for text in ["host", "vram:0", "vram:15", "host,vram:0", "vram:1,host"] {
            assert_eq!(text.parse::<Places>().unwrap().to_string(), text);
        }
        let places: Places = "vram:0, vram:1".parse().unwrap();
        assert_eq!(places.target, Place::Vram(1));
        assert_eq!("host,host".parse(), Ok(Places::default()));
        assert!(!places.are_host() && Places::default().are_host());
    }

    #[test]
    fn what_is_no_place_is_refused_with_what_would_be() {
        for text in [
            "",
            "gpu",
            "vram",
            "vram:",
            "vram:x",
            "vram:-1",
            "vram:+1",
            "host,",
            "host,vram:0,host",
            "vram:99999999999",
            "HOST",
        ] {
            let error = text.parse::<Places>().expect_err(text).to_string();
            assert!(error.contains("vram:N"), "{error}");
        }
    }

    #[test]
    fn json_says_what_people_say() {
        let places: Places = "host,vram:3".parse().unwrap();
        let json = serde_json::to_string(&places).unwrap();
        assert_eq!(json, r#"{"initiator":"host","target":"vram:3"}"#);
        assert_eq!(serde_json::from_str::<Places>(&json).unwrap(), places);
        assert!(serde_json::from_str::<Place>(r#""vram:x""#).is_err());
    }
}
