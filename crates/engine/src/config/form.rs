//! Forms of setting values: the accepted range as data, and the texts derived from it.
//!
//! A [`Form`] is the only place that knows a setting's range. Parsing, the check of typed values,
//! error texts and the reference table are all derived from it.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tcpx_net::interfaces::InterfaceSelector;

use super::types::MetricsAddress;

/// The values that a setting accepts.
pub(super) trait Form: Sync {
    /// The type of the setting's values.
    type Value;

    /// Parses a value; returns `None` if the text is malformed or out of range.
    fn parse(&self, text: &str) -> Option<Self::Value> {
        let value = self.read(text.trim())?;
        self.accepts(&value).then_some(value)
    }

    /// Parses a value without checking the range.
    fn read(&self, text: &str) -> Option<Self::Value>;

    /// Returns whether a value is within the range.
    fn accepts(&self, value: &Self::Value) -> bool;

    /// Formats a value so that [`Form::parse`] accepts it.
    fn show(&self, value: &Self::Value) -> String;

    /// Formats a value for people.
    fn describe(&self, value: &Self::Value) -> String {
        self.show(value)
    }

    /// Describes the accepted values, as a continuation of "expected".
    fn expected(&self) -> String;
}

/// A whole number within limits, and optionally one value
/// outside of them that has a special meaning.
pub(super) struct Number<T> {
    /// The counted unit, such as "a whole number".
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

/// Returns the largest binary unit that divides a byte count, as power of two and letter.
fn binary_unit(bytes: usize) -> (u32, &'static str) {
    [(30, "G"), (20, "M"), (10, "K")]
        .into_iter()
        .find(|(shift, _)| bytes != 0 && bytes.is_multiple_of(1 << shift))
        .unwrap_or((0, ""))
}

/// Formats a byte count as settings accept it, such as `512K`.
fn with_suffix(bytes: usize) -> String {
    let (shift, letter) = binary_unit(bytes);
    format!("{}{letter}", bytes >> shift)
}

/// Formats a byte count for people, such as `512 KiB`.
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

/// Formats a time for people, such as `10 s`.
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

/// One of several words.
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

/// A selection of network interfaces.
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

/// The address of the metrics server, or `off`.
pub(super) struct Metrics;

impl Form for Metrics {
    type Value = Option<MetricsAddress>;

    fn read(&self, text: &str) -> Option<Option<MetricsAddress>> {
        match text {
            "" | "off" => Some(None),
            text => text.parse().ok().map(Some),
        }
    }

    fn accepts(&self, _: &Option<MetricsAddress>) -> bool {
        true
    }

    fn show(&self, value: &Option<MetricsAddress>) -> String {
        value.map_or_else(|| "off".into(), |address| address.to_string())
    }

    fn expected(&self) -> String {
        "off, a port, or an address and a port, such as 9400, 9400-9415, 127.0.0.1:9400 or \
         [::1]:9400"
            .into()
    }
}

/// A file, or none.
pub(super) struct OptionalFile;

impl Form for OptionalFile {
    type Value = Option<PathBuf>;

    fn read(&self, text: &str) -> Option<Option<PathBuf>> {
        Some(match text {
            "" | "off" => None,
            text => Some(text.into()),
        })
    }

    fn accepts(&self, _: &Option<PathBuf>) -> bool {
        true
    }

    fn show(&self, value: &Option<PathBuf>) -> String {
        let file = value.as_ref().map(|file| file.display().to_string());
        file.unwrap_or_else(|| "off".into())
    }

    fn expected(&self) -> String {
        "off, or a file such as /tmp/tcpx-%p.json, where %p is the process ID".into()
    }
}

/// Text of any length.
pub(super) struct Text {
    /// Describes the expected text.
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
        // Spaces around a name are significant.
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

/// A congestion control of this kernel, or a word that selects one.
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
