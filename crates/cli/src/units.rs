//! Numbers as people read them, where the measuring library has no word for them.

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

#[cfg(test)]
mod tests {
    use super::*;

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
