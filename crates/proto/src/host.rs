//! DNS names of hosts in a connection info.

use alloc::string::String;
use core::fmt;

/// The DNS name of a host: 1 to 253 bytes, labels of 1 to 63 letters, digits, `-` and `_` between
/// single dots. A label does not begin with `-`, so that no name can be mistaken for an option or
/// an address with a sign.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName(String);

/// Reports a text that is no valid [`HostName`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a host name has up to 253 letters, digits, - and _, with single dots between them")]
pub struct HostNameInvalid;

impl HostName {
    /// The longest name in bytes, as DNS defines it.
    pub const MAX_LEN: usize = 253;

    /// Creates a name; fails for a text that cannot name a host.
    pub fn new(name: &str) -> Result<Self, HostNameInvalid> {
        let is_character = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        let is_label = |label: &str| {
            (1..=63).contains(&label.len())
                && !label.starts_with('-')
                && label.bytes().all(is_character)
        };
        match name.len() <= Self::MAX_LEN && name.split('.').all(is_label) {
            true => Ok(Self(name.into())),
            false => Err(HostNameInvalid),
        }
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Decodes a name from received bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, HostNameInvalid> {
        Self::new(core::str::from_utf8(bytes).map_err(|_| HostNameInvalid)?)
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A host and a port: the stable location of a session whose address may change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedAddress {
    /// The host. The connecting side resolves it.
    pub name: HostName,
    /// The port; not 0.
    pub port: u16,
}

impl fmt::Display for NamedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.port)
    }
}

#[cfg(test)]
mod tests {
    use alloc::format;

    use super::*;

    #[test]
    fn names_are_those_of_hosts() {
        let label = "x".repeat(63);
        let longest = format!("{label}.{label}.{label}.{}", "x".repeat(61));
        for good in ["a", "node-7.example", "_pod.svc", "127", &longest] {
            assert_eq!(HostName::new(good).unwrap().as_str(), good);
        }
        let (long, label) = (format!("{longest}x"), format!("{label}x"));
        for bad in [
            "", ".", "a.", ".a", "a..b", "-a", "a b", "a/b", "é", "a:1", &long, &label,
        ] {
            assert_eq!(HostName::new(bad), Err(HostNameInvalid), "{bad}");
        }
    }
}
