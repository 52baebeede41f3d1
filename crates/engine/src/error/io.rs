//! Errors of the operating system.

use std::fmt;
use std::io;
use std::sync::Arc;

/// An error of the operating system. Cheap to clone.
///
/// Two errors are equal if their [`kind`](Self::kind)s are equal: a test compares with
/// `IoError::from(io::ErrorKind::ConnectionRefused)`.
#[derive(Clone)]
pub struct IoError(Arc<io::Error>);

impl IoError {
    /// Returns the category of the error.
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        self.0.kind()
    }

    /// Returns the original error.
    #[must_use]
    pub fn get(&self) -> &io::Error {
        &self.0
    }
}

impl PartialEq for IoError {
    fn eq(&self, other: &Self) -> bool {
        self.kind() == other.kind()
    }
}

impl Eq for IoError {}

impl fmt::Debug for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for IoError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

impl From<io::Error> for IoError {
    fn from(error: io::Error) -> Self {
        Self(Arc::new(error))
    }
}

impl From<io::ErrorKind> for IoError {
    fn from(kind: io::ErrorKind) -> Self {
        io::Error::from(kind).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_one_kind_are_equal_and_keep_their_texts() {
        let refused = IoError::from(io::Error::from_raw_os_error(111));
        assert_eq!(refused, io::ErrorKind::ConnectionRefused.into());
        assert_ne!(refused, io::ErrorKind::ConnectionReset.into());
        assert_eq!(refused.to_string(), "Connection refused (os error 111)");
        assert_eq!(refused.get().raw_os_error(), Some(111));
    }
}
