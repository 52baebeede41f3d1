//! Formats numbers for people. GB/s are decimal (10^9), block sizes binary (KiB, MiB), as is usual
//! in networking.

use std::time::Duration;

/// Formats a size: `65536` → `64 KiB`, `1000` → `1000 B`, `1536` → `1.5 KiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// Formats a duration with three significant digits and a suitable unit: `13.4 µs`, `7.05 ms`.
pub fn seconds(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s < 1e-6 => (s * 1e9, "ns"),
        s if s < 1e-3 => (s * 1e6, "µs"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    let digits = match value {
        v if v < 10.0 => 2,
        v if v < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

/// Returns decimal gigabytes per second.
pub fn gigabytes_per_second(bytes: u64, elapsed: Duration) -> f64 {
    bytes as f64 / 1e9 / elapsed.as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(64 << 10), "64 KiB");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(4 << 30), "4 GiB");
    }

    #[test]
    fn times_have_three_digits() {
        assert_eq!(seconds(0.0000134), "13.4 µs");
        assert_eq!(seconds(0.00705), "7.05 ms");
        assert_eq!(seconds(0.25), "250 ms");
        assert_eq!(seconds(2.0), "2.00 s");
    }

    #[test]
    fn rates_are_decimal() {
        assert_eq!(
            gigabytes_per_second(2_000_000_000, Duration::from_secs(1)),
            2.0
        );
    }
}
