//! Formats and parses numbers for people, in addition to the measuring library.

use std::time::Duration;

/// `200000` → `200 Gbit/s`, `2500` → `2.5 Gbit/s`, `100` → `100 Mbit/s`.
pub(crate) fn megabits_per_second(speed: u64) -> String {
    match speed {
        0..1000 => format!("{speed} Mbit/s"),
        _ if speed.is_multiple_of(1000) => format!("{} Gbit/s", speed / 1000),
        _ => format!("{:.1} Gbit/s", speed as f64 / 1000.0),
    }
}

/// `1 lane`, `4 lanes`.
pub(crate) fn count(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// `4096`, `64K`, `1.5MiB`, `2 GB`: units are binary, as memory is.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size; expected bytes such as 4096, 64K, 16M or 1G");
    let (number, unit) = split(text).ok_or_else(wrong)?;
    let letter = unit.to_ascii_lowercase();
    let letter = letter
        .strip_suffix("ib")
        .or(letter.strip_suffix('b'))
        .unwrap_or(&letter);
    let shift = match letter {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(wrong()),
    };
    let bytes = number * f64::from(shift).exp2();
    if bytes.fract() != 0.0 || bytes > 2f64.powi(50) {
        return Err(wrong());
    }
    Ok(bytes as u64)
}

/// `500ms`, `10s`, `2m`, `1h`; a bare number is seconds.
pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("{text:?} is not a time; expected 500ms, 10s or 2m, for example, up to a day");
    let (number, unit) = split(text).ok_or_else(wrong)?;
    let seconds = match unit {
        "ms" => number / 1e3,
        "s" | "" => number,
        "m" | "min" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(wrong()),
    };
    if seconds <= 0.0 || seconds > 86_400.0 {
        return Err(wrong());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Splits off a number that is not negative.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    Some((number.parse().ok()?, unit.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64K", 65536),
            ("1.5MiB", 3 << 19),
            ("2 GB", 2 << 30),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "-1", "1.5", "1x", "9999T", "1e3", "."] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        for (text, millis) in [
            ("500ms", 500),
            ("0.5", 500),
            ("10s", 10_000),
            ("2m", 120_000),
        ] {
            assert_eq!(
                parse_time(text),
                Ok(Duration::from_millis(millis)),
                "{text}"
            );
        }
        for text in ["", "0", "-1s", "1d", "25h", "s"] {
            assert!(parse_time(text).is_err(), "{text}");
        }
    }

    #[test]
    fn speeds_are_decimal() {
        assert_eq!(megabits_per_second(100), "100 Mbit/s");
        assert_eq!(megabits_per_second(2_500), "2.5 Gbit/s");
        assert_eq!(megabits_per_second(200_000), "200 Gbit/s");
    }

    #[test]
    fn one_is_singular() {
        assert_eq!(count(1, "lane"), "1 lane");
        assert_eq!(count(0, "lane"), "0 lanes");
    }
}
