//! The versions of NIXL that the backend supports.

use std::cmp::Ordering;

/// The list, which scripts and tests read too.
const LIST: &str = include_str!("../../../../plugins/nixl/versions");

/// Whether the backend works with a version of NIXL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Support {
    /// The version was tested, or lies between tested versions.
    Yes,
    /// The version calls backends in another way.
    TooOld,
    /// The version was never tested, or is unknown.
    Untested,
}

/// Compares a version with the list. Patches of the newest minor version count as supported.
pub(crate) fn support(version: &str) -> Support {
    let Some(version) = parse(version) else {
        return Support::Untested;
    };
    let newest = parse(newest()).unwrap_or_default();
    match parse(oldest()).map(|oldest| version.cmp(&oldest)) {
        Some(Ordering::Less) => Support::TooOld,
        _ if version[..2] > newest[..2] => Support::Untested,
        _ => Support::Yes,
    }
}

/// Returns the oldest version that is supported.
pub(crate) fn oldest() -> &'static str {
    listed().next().unwrap_or_default()
}

/// Returns the newest version that is supported.
pub(crate) fn newest() -> &'static str {
    listed().last().unwrap_or_default()
}

fn listed() -> impl Iterator<Item = &'static str> {
    LIST.lines().filter(|line| !line.starts_with('#'))
}

/// Parses the numbers of a version; ignores a suffix such as `rc1`.
fn parse(version: &str) -> Option<[u32; 3]> {
    let mut numbers = [0; 3];
    for (number, part) in numbers.iter_mut().zip(version.split('.')) {
        let digits = part.find(|c: char| !c.is_ascii_digit());
        *number = part[..digits.unwrap_or(part.len())].parse().ok()?;
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_tried_is_supported_and_what_is_older_is_not() {
        for version in listed() {
            assert_eq!(support(version), Support::Yes, "{version}");
        }
        for version in ["0.7.1", "0.8.0", "0.10.1"] {
            assert_eq!(support(version), Support::TooOld, "{version}");
        }
        let [major, minor, patch] = parse(newest()).unwrap();
        let next = |version: String| support(&version);
        assert_eq!(
            next(format!("{major}.{minor}.{}+local", patch + 1)),
            Support::Yes
        );
        assert_eq!(next(format!("{major}.{}.0", minor + 1)), Support::Untested);
        assert_eq!(next(format!("{}.0.0", major + 1)), Support::Untested);
        assert_eq!(support("unknown"), Support::Untested);
    }
}
