//! Names of sessions.

use alloc::string::String;
use core::fmt::{self, Write};

/// The name of a session, for logs and error messages: 1 to 255 bytes of UTF-8.
///
/// Names identify nothing and need not be unique; a [`SessionId`](crate::info::SessionId) does.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

/// The reason a text is no valid [`Name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// Empty or too long.
    #[error("a name has 1 to {} bytes, found {len}", Name::MAX_LEN)]
    LengthOutOfRange {
        /// Length in bytes that was found.
        len: usize,
    },

    /// Not UTF-8. Only received bytes can be wrong in this way.
    #[error("a name is UTF-8, found other bytes after the first {valid}")]
    EncodingInvalid {
        /// Number of valid bytes at the start.
        valid: usize,
    },
}

impl Name {
    /// The longest name in bytes; its length is encoded in one byte.
    pub const MAX_LEN: usize = u8::MAX as usize;

    /// Creates a name of 1 to 255 bytes; fails for any other text.
    pub fn new(name: impl Into<String>) -> Result<Self, NameError> {
        let name = name.into();
        check_len(name.len())?;
        Ok(Self(name))
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Decodes a name from received bytes; reads none of them if there are too many.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, NameError> {
        check_len(bytes.len())?;
        let text = core::str::from_utf8(bytes).map_err(|error| NameError::EncodingInvalid {
            valid: error.valid_up_to(),
        })?;
        Ok(Self(text.into()))
    }

    /// Returns the length as it is encoded.
    pub(crate) fn len_u8(&self) -> u8 {
        // Never truncated: `new` and `decode` refuse longer names.
        self.0.len() as u8
    }
}

fn check_len(len: usize) -> Result<(), NameError> {
    match len {
        1..=Name::MAX_LEN => Ok(()),
        _ => Err(NameError::LengthOutOfRange { len }),
    }
}

impl fmt::Display for Name {
    /// Escapes control characters: a peer chooses the name, and it ends up in logs and on
    /// terminals. [`as_str`](Name::as_str) returns it unescaped.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c.is_control() {
            true => write!(f, "{}", c.escape_default()),
            false => f.write_char(c),
        })
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn both_edges_of_the_length() {
        assert_eq!(Name::new(""), Err(NameError::LengthOutOfRange { len: 0 }));
        assert_eq!(Name::new("x").unwrap().as_str(), "x");
        assert_eq!(Name::new("x".repeat(255)).unwrap().len_u8(), 255);
        assert_eq!(
            Name::new("x".repeat(256)),
            Err(NameError::LengthOutOfRange { len: 256 })
        );
        // Bytes count, not characters.
        assert_eq!(
            Name::new("é".repeat(128)),
            Err(NameError::LengthOutOfRange { len: 256 })
        );
    }

    #[test]
    fn a_name_cannot_play_tricks_on_a_terminal() {
        let name = Name::new("décode\n\u{1b}[2J").unwrap();
        assert_eq!(name.to_string(), "décode\\n\\u{1b}[2J");
        assert_eq!(name.as_str(), "décode\n\u{1b}[2J");
    }

    #[test]
    fn received_bytes_must_be_utf8() {
        assert_eq!(Name::decode("prefill-0".as_bytes()), Name::new("prefill-0"));
        assert_eq!(
            Name::decode(b"ab\xff"),
            Err(NameError::EncodingInvalid { valid: 2 })
        );
        assert_eq!(
            Name::decode(&[0xff; 300]),
            Err(NameError::LengthOutOfRange { len: 300 })
        );
    }
}
