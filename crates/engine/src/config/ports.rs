//! Ports that a session may listen on: the setting `listen_port`.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use super::form::Form;

/// Ports that a session may listen on: one port, a range that the sessions of a host share, or any
/// free port.
///
/// The text of a range is `18000-18015`; 0 means any free port. A session takes one port of the
/// range and listens on it at all of its addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortRange {
    /// 0 for any free port; then `last` is 0 as well.
    first: u16,
    /// At least `first`.
    last: u16,
}

impl PortRange {
    /// Any free port.
    pub const ANY: Self = Self { first: 0, last: 0 };

    /// Makes a range of ports; returns `None` if it is empty, or contains port 0 and others.
    #[must_use]
    pub fn new(first: u16, last: u16) -> Option<Self> {
        let is_valid = first <= last && (first > 0 || last == 0);
        is_valid.then_some(Self { first, last })
    }

    /// Returns whether any free port may be taken.
    #[must_use]
    pub fn is_any(self) -> bool {
        self.first == 0
    }

    /// Returns the ports from first to last; only port 0 if any free port may be taken.
    #[must_use]
    pub fn ports(self) -> RangeInclusive<u16> {
        self.first..=self.last
    }

    /// Returns the number of ports.
    #[must_use]
    pub fn count(self) -> usize {
        self.ports().len()
    }
}

impl From<u16> for PortRange {
    fn from(port: u16) -> Self {
        Self {
            first: port,
            last: port,
        }
    }
}

impl FromStr for PortRange {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let port = |text: &str| {
            let text = text.trim();
            let is_number = text.bytes().all(|b| b.is_ascii_digit());
            let port = is_number.then(|| text.parse::<u16>().ok());
            port.flatten().ok_or(())
        };
        match text.split_once('-') {
            None => port(text).map(Self::from),
            Some((first, last)) => Self::new(port(first)?, port(last)?).ok_or(()),
        }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first == self.last {
            true => write!(f, "{}", self.first),
            false => write!(f, "{}-{}", self.first, self.last),
        }
    }
}

/// A port or a range of ports.
pub(super) struct Ports;

impl Form for Ports {
    type Value = PortRange;

    fn read(&self, text: &str) -> Option<PortRange> {
        text.parse().ok()
    }

    fn accepts(&self, _: &PortRange) -> bool {
        true
    }

    fn show(&self, value: &PortRange) -> String {
        value.to_string()
    }

    fn expected(&self) -> String {
        "a port from 0 to 65535, or a range such as 18000-18015".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_and_written() {
        for (text, first, last) in [
            ("0", 0, 0),
            ("18000", 18000, 18000),
            ("18000-18015", 18000, 18015),
            (" 7 - 9 ", 7, 9),
            ("5-5", 5, 5),
        ] {
            let range: PortRange = text.parse().unwrap();
            assert_eq!(range.ports(), first..=last, "{text}");
            assert_eq!(range.to_string().parse(), Ok(range), "{text}");
        }
        assert_eq!("18000-18015".parse::<PortRange>().unwrap().count(), 16);
        for text in [
            "", "-", "1-", "-1", "2-1", "0-9", "1-65536", "1-2-3", "a", "+1", "1,2",
        ] {
            assert_eq!(text.parse::<PortRange>(), Err(()), "{text:?}");
        }
    }
}
