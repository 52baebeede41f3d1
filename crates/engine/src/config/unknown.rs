//! Environment variables that look like settings but are not.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use super::rows::ROWS;

/// Prefix of tcpx's variables.
const PREFIX: &str = "TCPX_";

/// Variables of users that other parts of tcpx read.
const OTHERS: &[&str] = &[
    "TCPX_AS_UCCL",
    "TCPX_NIXL_PLUGIN",
    "TCPX_RENDEZVOUS",
    "TCPX_RENDEZVOUS_RUN",
];

/// Variables that tests of tcpx read. They are known, but no suggestion names them.
const INTERNAL: &[&str] = &["TCPX_BENCH_TEST_PEER", "TCPX_BLESS"];

/// Prefixes of variables that the plugin emulator and tests read.
const OTHER_PREFIXES: &[&str] = &["TCPX_EMU_", "TCPX_TEST_"];

/// An environment variable that begins with `TCPX_` and that no part of tcpx reads. Typical cause:
/// a misspelt setting.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnknownVariable {
    /// The name of the variable.
    pub name: String,
    /// The variable that was probably intended.
    pub suggestion: Option<&'static str>,
}

impl fmt::Display for UnknownVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is not a setting", self.name)?;
        match self.suggestion {
            Some(suggestion) => write!(f, ": did you mean {suggestion}?"),
            None => f.write_str(": `tcpx config` lists all settings"),
        }
    }
}

/// Finds unknown variables in the environment of this process.
pub(super) fn in_environment() -> Vec<UnknownVariable> {
    among(std::env::vars_os())
}

/// Logs a warning for each unknown variable, once per process.
pub(super) fn warn() {
    static WARNED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    for unknown in in_environment() {
        let mut warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.insert(unknown.name.clone()) {
            // Logged once for each variable; the text has the remedy.
            tracing::warn!("{unknown}");
        }
    }
}

fn among(variables: impl Iterator<Item = (OsString, OsString)>) -> Vec<UnknownVariable> {
    let mut unknown: Vec<_> = variables
        .filter_map(|(name, value)| {
            let name = name.into_string().ok()?;
            let ours = name.starts_with(PREFIX) && !value.is_empty();
            let stray = ours && !is_known(&name) && !is_of_kubernetes(&name, &value);
            stray.then(|| UnknownVariable {
                suggestion: suggestion(&name),
                name,
            })
        })
        .collect();
    unknown.sort_by(|a, b| a.name.cmp(&b.name));
    unknown
}

/// Lists the variables of settings that have our prefix.
fn settings() -> impl Iterator<Item = &'static str> {
    let variables = ROWS.iter().flat_map(|row| row.variables());
    variables.copied().filter(|name| name.starts_with(PREFIX))
}

fn is_known(name: &str) -> bool {
    settings().any(|known| known == name)
        || OTHERS.contains(&name)
        || INTERNAL.contains(&name)
        || OTHER_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns whether a variable describes a Kubernetes service: a service named `tcpx` or
/// `tcpx-server` adds such variables to every pod of its namespace.
fn is_of_kubernetes(name: &str, value: &OsString) -> bool {
    let is_address = |prefix| value.to_string_lossy().starts_with(prefix);
    name.contains("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.contains("_TCP_")
        || name.contains("_UDP_")
        || is_address("tcp://")
        || is_address("udp://")
}

/// Finds the variable that was probably intended: one that differs in few letters, or that contains
/// the words of this name and more.
fn suggestion(name: &str) -> Option<&'static str> {
    let wanted = name.to_ascii_uppercase();
    let words = &wanted[PREFIX.len()..];
    let near = |known: &&'static str| {
        let distance = strsim::damerau_levenshtein(words, &known[PREFIX.len()..]);
        let is_part = !words.is_empty()
            && (known.starts_with(&format!("{wanted}_")) || known.ends_with(&format!("_{words}")));
        let limit = (words.len() / 3).max(1);
        (distance <= limit || is_part).then_some((distance, *known))
    };
    let known = settings().chain(OTHERS.iter().copied());
    let candidates = known.filter_map(|known| near(&known));
    candidates.min().map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unknown(variables: &[(&str, &str)]) -> Vec<String> {
        let variables = variables.iter().map(|(n, v)| (n.into(), v.into()));
        among(variables).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn misspelt_settings_are_found_with_a_suggestion() {
        for (name, meant) in [
            ("TCPX_LANE", "TCPX_LANES"),
            ("TCPX_LNAES", "TCPX_LANES"),
            ("TCPX_INTERFACE", "TCPX_INTERFACES"),
            ("TCPX_CHUNK", "TCPX_CHUNK_BYTES"),
            ("TCPX_PORT", "TCPX_LISTEN_PORT"),
            ("TCPX_SAMEHOST", "TCPX_SAME_HOST"),
        ] {
            let text = format!("{name} is not a setting: did you mean {meant}?");
            assert_eq!(unknown(&[(name, "3")]), [text]);
        }
        assert_eq!(
            unknown(&[("TCPX_FAVOURITE_COLOUR", "red")]),
            ["TCPX_FAVOURITE_COLOUR is not a setting: `tcpx config` lists all settings"]
        );
    }

    #[test]
    fn suggestions_name_no_variable_of_tests() {
        for name in ["TCPX_BLES", "TCPX_BLESSED", "TCPX_BENCH"] {
            let text = format!("{name} is not a setting: `tcpx config` lists all settings");
            assert_eq!(unknown(&[(name, "1")]), [text]);
        }
        assert_eq!(unknown(&[("TCPX_BLESS", "1")]), [""; 0]);
        assert_eq!(unknown(&[("TCPX_BENCH_TEST_PEER", "1")]), [""; 0]);
    }

    #[test]
    fn variables_of_other_programs_are_ignored() {
        assert_eq!(
            unknown(&[
                ("TCPX_LANES", "3"),
                ("TCPX_EMU_DEVMEM", "1"),
                ("TCPX_TEST_SEED", "1"),
                ("TCPX_AS_UCCL", "1"),
                ("TCPX_LANE", ""),
                ("NCCL_GPUDIRECTTCPX_CTRL_DEV", "eth0"),
                ("UCCL_TCPX_LANE", "3"),
                // A Kubernetes service named tcpx, and one named tcpx-server.
                ("TCPX_PORT", "tcp://10.0.0.1:80"),
                ("TCPX_PORT_80_TCP_ADDR", "10.0.0.1"),
                ("TCPX_SERVER_SERVICE_HOST", "10.0.0.1"),
                ("TCPX_SERVICE_PORT_HTTP", "80"),
            ]),
            [""; 0]
        );
    }
}
