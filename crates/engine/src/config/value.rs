//! Values of settings, as people write them.

use std::str::FromStr;
use std::time::Duration;

/// A count within limits.
pub(super) fn number(text: &str, min: usize, max: usize) -> Option<usize> {
    usize::from_str(text)
        .ok()
        .filter(|n| (min..=max).contains(n))
}

/// A byte count with an optional binary suffix.
pub(super) fn bytes(text: &str, min: usize, max: usize) -> Option<usize> {
    let (digits, unit) = text.split_at(
        text.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len()),
    );
    let scale = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        _ => return None,
    };
    let count = usize::from_str(digits).ok()?.checked_mul(scale)?;
    (min..=max).contains(&count).then_some(count)
}

/// A time with an optional unit; a bare number is seconds.
pub(super) fn duration(text: &str, min: Duration) -> Option<Duration> {
    let (digits, unit) = text.split_at(
        text.find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len()),
    );
    let scale = match unit.trim() {
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return None,
    };
    let value = Duration::try_from_secs_f64(f64::from_str(digits).ok()? * scale).ok()?;
    (min..=Duration::from_secs(3600))
        .contains(&value)
        .then_some(value)
}
