//! The forms that values of settings take: what is accepted, as data, and the text made from it.
//!
//! A [`Form`] is the only place that knows a setting's range. Parsing, the check of typed values,
//! the words of an error and the reference table all come from it.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use tcpx_net::interfaces::InterfaceSelector;

/// What a setting accepts.
pub(super) trait Form: Sync {
    /// The type of the setting's values.
    type Value;

    /// Reads a value of this form; `None` when the text is not of it or out of range.
    fn parse(&self, text: &str) -> Option<Self::Value> {
        let value = self.read(text.trim())?;
        self.accepts(&value).then_some(value)
    }

    /// Reads a value, whatever the range.
    fn read(&self, text: &str) -> Option<Self::Value>;

    /// Says whether a value is within the range.
    fn accepts(&self, value: &Self::Value) -> bool;

    /// Writes a value so that [`Form::parse`] reads it again.
    fn show(&self, value: &Self::Value) -> String;

    /// Writes a value for people.
    fn describe(&self, value: &Self::Value) -> String {
        self.show(value)
    }

    /// Describes what is accepted, to follow "expected".
    fn expected(&self) -> String;
}

/// A whole number within limits, and one more value outside of them where that has a meaning.
pub(super) struct Number<T> {
    /// What is counted, such as "a whole number".
    pub(super) what: &'static str,
    pub(super) or: Option<T>,
    pub(super) min: T,
    pub(super) max: T,
}

impl<T: Copy + Ord + FromStr + Display + Sync> Form for Number<T> {
    type Value = T;

    fn read(&self, text: &str) -> Option<T> {
        text.parse().ok()
    }

    fn accepts(&self, value: &T) -> bool {
        Some(*value) == self.or || (self.min..=self.max).contains(value)
    }

    fn show(&self, value: &T) -> String {
        value.to_string()
    }

    fn expected(&self) -> String {
        let or = self.or.map(|or| format!("{or}, or ")).unwrap_or_default();
        format!("{or}{} from {} to {}", self.what, self.min, self.max)
    }
}

/// A byte count with an optional binary suffix.
pub(super) struct Bytes {
    /// Whether 0 is accepted although it is below `min`.
    pub(super) or_zero: bool,
    pub(super) min: usize,
    pub(super) max: usize,
}

impl Form for Bytes {
    type Value = usize;

    fn read(&self, text: &str) -> Option<usize> {
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
        usize::from_str(digits).ok()?.checked_mul(scale)
    }

    fn accepts(&self, value: &usize) -> bool {
        (self.or_zero && *value == 0) || (self.min..=self.max).contains(value)
    }

    fn show(&self, value: &usize) -> String {
        value.to_string()
    }

    fn describe(&self, value: &usize) -> String {
        bytes_text(*value)
    }

    fn expected(&self) -> String {
        let or_zero = if self.or_zero { "0, or " } else { "" };
        let [min, max] = [self.min, self.max].map(with_suffix);
        format!("{or_zero}bytes from {min} to {max}, such as 1048576, 512K or 4M")
    }
}

/// The largest binary unit that divides a byte count, as its power of two and its letter.
fn binary_unit(bytes: usize) -> (u32, &'static str) {
    [(30, "G"), (20, "M"), (10, "K")]
        .into_iter()
        .find(|(shift, _)| bytes != 0 && bytes.is_multiple_of(1 << shift))
        .unwrap_or((0, ""))
}

/// Writes a byte count as settings take it, such as `512K`.
fn with_suffix(bytes: usize) -> String {
    let (shift, letter) = binary_unit(bytes);
    format!("{}{letter}", bytes >> shift)
}

/// Writes a byte count for people, such as `512 KiB`.
pub(super) fn bytes_text(bytes: usize) -> String {
    match binary_unit(bytes) {
        (_, "") => bytes.to_string(),
        (shift, letter) => format!("{} {letter}iB", bytes >> shift),
    }
}

/// A time with an optional unit; a bare number is seconds.
pub(super) struct Time {
    pub(super) min: Duration,
    pub(super) max: Duration,
}

impl Form for Time {
    type Value = Duration;

    fn read(&self, text: &str) -> Option<Duration> {
        let (digits, unit) = text.split_at(
            text.find(|c: char| !c.is_ascii_digit() && c != '.')
                .unwrap_or(text.len()),
        );
        let scale = match unit.trim() {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "" | "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        Duration::try_from_secs_f64(f64::from_str(digits).ok()? * scale).ok()
    }

    fn accepts(&self, value: &Duration) -> bool {
        (self.min..=self.max).contains(value)
    }

    fn show(&self, value: &Duration) -> String {
        format!("{value:?}")
    }

    fn describe(&self, value: &Duration) -> String {
        time_text(*value)
    }

    fn expected(&self) -> String {
        let [min, max] = [self.min, self.max].map(|time| time_text(time).replace(' ', ""));
        format!("a time from {min} to {max}, such as 10s, 500ms or 2m (a bare number is seconds)")
    }
}

/// Writes a time for people, such as `10 s`.
pub(super) fn time_text(time: Duration) -> String {
    let micros = time.as_micros();
    let units = [(3_600_000_000, "h"), (1_000_000, "s"), (1_000, "ms")];
    let whole = |(unit, _): &(u128, &str)| micros >= *unit && micros.is_multiple_of(*unit);
    let (unit, name) = units.into_iter().find(whole).unwrap_or((1, "µs"));
    format!("{} {name}", micros / unit)
}

/// A time as a bare number of microseconds.
pub(super) struct Microseconds {
    pub(super) max: u64,
}

impl Form for Microseconds {
    type Value = Duration;

    fn read(&self, text: &str) -> Option<Duration> {
        text.parse().ok().map(Duration::from_micros)
    }

    fn accepts(&self, value: &Duration) -> bool {
        *value <= Duration::from_micros(self.max)
    }

    fn show(&self, value: &Duration) -> String {
        value.as_micros().to_string()
    }

    fn expected(&self) -> String {
        format!("microseconds from 0 to {}", self.max)
    }
}

/// One of a few words.
pub(super) struct Choice<T: 'static> {
    pub(super) words: &'static [(&'static str, T)],
}

impl<T: Copy + PartialEq + Sync> Form for Choice<T> {
    type Value = T;

    fn read(&self, text: &str) -> Option<T> {
        let found = self.words.iter().find(|(word, _)| *word == text);
        found.map(|(_, value)| *value)
    }

    fn accepts(&self, value: &T) -> bool {
        self.words.iter().any(|(_, known)| known == value)
    }

    fn show(&self, value: &T) -> String {
        let found = self.words.iter().find(|(_, known)| known == value);
        found.map_or(String::new(), |(word, _)| (*word).to_owned())
    }

    fn expected(&self) -> String {
        let words: Vec<_> = self.words.iter().map(|(word, _)| *word).collect();
        words.join(" or ")
    }
}

/// A choice of network interfaces.
pub(super) struct Interfaces;

impl Form for Interfaces {
    type Value = InterfaceSelector;

    fn read(&self, text: &str) -> Option<InterfaceSelector> {
        text.parse().ok()
    }

    fn accepts(&self, _: &InterfaceSelector) -> bool {
        true
    }

    fn show(&self, value: &InterfaceSelector) -> String {
        value.to_string()
    }

    fn expected(&self) -> String {
        "names or prefixes of interfaces: eth1,eth2 for these, =eth0 for exactly this one, ^docker \
         for all others"
            .into()
    }
}

/// Text of any length.
pub(super) struct Text {
    /// Describes what the text should be.
    pub(super) what: &'static str,
}

impl Form for Text {
    type Value = String;

    fn read(&self, text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    fn accepts(&self, _: &String) -> bool {
        true
    }

    fn show(&self, value: &String) -> String {
        value.clone()
    }

    fn expected(&self) -> String {
        self.what.into()
    }
}

/// A name: text of bounded length, spaces included.
pub(super) struct Name {
    pub(super) max: usize,
}

impl Form for Name {
    type Value = String;

    fn parse(&self, text: &str) -> Option<String> {
        // Spaces around a name are part of it.
        let name = text.to_owned();
        self.accepts(&name).then_some(name)
    }

    fn read(&self, text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    fn accepts(&self, value: &String) -> bool {
        (1..=self.max).contains(&value.len())
    }

    fn show(&self, value: &String) -> String {
        value.clone()
    }

    fn expected(&self) -> String {
        format!("1 to {} bytes of text", self.max)
    }
}

/// A congestion control of this kernel, or a word for how to choose one.
pub(super) struct Congestion;

impl Form for Congestion {
    type Value = String;

    fn read(&self, text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    fn accepts(&self, value: &String) -> bool {
        value == "auto" || value == "system" || tcpx_net::has_congestion_control(value)
    }

    fn show(&self, value: &String) -> String {
        value.clone()
    }

    fn expected(&self) -> String {
        "auto, system or a congestion control of this kernel \
         (net.ipv4.tcp_available_congestion_control)"
            .into()
    }
}
