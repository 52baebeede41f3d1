//! The environment variables. One row each: name, values, meaning, parser. A test compares the
//! table in the crate's documentation with these rows.

use std::ffi::{OsStr, OsString, c_int};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::faults::{Call, InjectedError};
use crate::tables::result;

/// Prefix of every variable of the emulator.
pub const PREFIX: &str = "TCPX_EMU_";

/// Reports a variable with an invalid value, or an unknown variable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingError {
    /// The value is invalid.
    #[error("{name}={value}: expected {expected}")]
    Value {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// The allowed values.
        expected: String,
    },
    /// There is no such variable.
    #[error("{name}: there is no such setting; there are {known}")]
    Unknown {
        /// The variable.
        name: String,
        /// All known variables.
        known: String,
    },
}

/// The memory of the bounce pages, the ring and the device handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceMemory {
    /// Ordinary memory; "CUDA" pointers are host pointers that were registered as CUDA.
    Host,
    /// GPU memory, by the CUDA driver.
    Cuda,
}

/// The layout of a receive's bytes in bounce pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragments {
    /// Whole pages, the last one shorter.
    Full,
    /// Shorter ones that may start within the page; multiples of 16.
    Short,
    /// Like `Short`, but lengths and starts are odd.
    Odd,
}

/// The order within a ring slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reorder {
    /// Chunks stand in the order in which they completed.
    Nothing,
    /// Chunks are permuted, the entries of each stay in order.
    Chunks,
    /// All entries are permuted.
    Entries,
}

/// The connects that fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailConnect {
    /// None.
    Never,
    /// Each.
    Always,
    /// The n-th of the process, counted from 1.
    Nth(u64),
}

/// All settings.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each field is described by its row below")]
pub struct Settings {
    pub strict: bool,
    pub devices: usize,
    pub addresses: Vec<IpAddr>,
    pub memory: DeviceMemory,
    pub seed: u64,
    pub sockets: usize,
    pub chunk: u32,
    pub socket_buffer: usize,
    pub pages: usize,
    pub fragments: Fragments,
    pub reorder: Reorder,
    pub stale_count: bool,
    pub poison: bool,
    pub exit_on_overflow: bool,
    pub set_size: bool,
    pub pending_calls: u64,
    pub pending: Duration,
    pub connect_retries: u32,
    pub fail_connect: FailConnect,
    pub null_request_every: u64,
    pub delay: Duration,
    pub short_receive: u64,
    pub reset_after: u64,
    pub data_loss_after: Option<u64>,
    pub errors: Vec<InjectedError>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            strict: true,
            devices: 2,
            addresses: vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
            memory: DeviceMemory::Host,
            seed: 1,
            sockets: 1,
            chunk: 512 << 10,
            socket_buffer: 0,
            pages: 4096,
            fragments: Fragments::Full,
            reorder: Reorder::Nothing,
            stale_count: false,
            poison: true,
            exit_on_overflow: false,
            set_size: false,
            pending_calls: 3,
            pending: Duration::ZERO,
            connect_retries: 20_000,
            fail_connect: FailConnect::Never,
            null_request_every: 0,
            delay: Duration::ZERO,
            short_receive: 0,
            reset_after: 0,
            data_loss_after: None,
            errors: Vec::new(),
        }
    }
}

/// One variable.
pub struct Row {
    /// Without [`PREFIX`].
    pub name: &'static str,
    /// The allowed values, for messages.
    pub expected: &'static str,
    set: fn(&mut Settings, &str) -> Option<()>,
}

/// Every variable, in the order of the documentation.
pub const ROWS: &[Row] = &[
    row("STRICT", "0 or 1", |s, v| set(&mut s.strict, flag(v))),
    row("NDEV", "1 to 16", |s, v| {
        set(&mut s.devices, number(v, 1..=16).map(|n| n as usize))
    }),
    row(
        "ADDRESS",
        "an IP address, or several separated by commas",
        |s, v| {
            set(
                &mut s.addresses,
                v.split(',').map(|ip| ip.trim().parse().ok()).collect(),
            )
        },
    ),
    row("DEVMEM", "host or cuda", |s, v| {
        set(
            &mut s.memory,
            choice(
                v,
                &[("host", DeviceMemory::Host), ("cuda", DeviceMemory::Cuda)],
            ),
        )
    }),
    row("SEED", "a number", |s, v| set(&mut s.seed, v.parse().ok())),
    row("NSOCKS", "1 to 8", |s, v| {
        set(&mut s.sockets, number(v, 1..=8).map(|n| n as usize))
    }),
    row("CHUNK", "64 to 1073741824 bytes", |s, v| {
        set(&mut s.chunk, number(v, 64..=1 << 30).map(|n| n as u32))
    }),
    row(
        "SOCKET_BUFFER",
        "bytes, up to 1073741824, or 0 for the kernel's choice",
        |s, v| {
            set(
                &mut s.socket_buffer,
                number(v, 0..=1 << 30).map(|n| n as usize),
            )
        },
    ),
    row("PAGES", "1 to 1048576", |s, v| {
        set(&mut s.pages, number(v, 1..=1 << 20).map(|n| n as usize))
    }),
    row("FRAG", "full, short or odd", |s, v| {
        let choices = [
            ("full", Fragments::Full),
            ("short", Fragments::Short),
            ("odd", Fragments::Odd),
        ];
        set(&mut s.fragments, choice(v, &choices))
    }),
    row("REORDER", "0, 1 (chunks) or 2 (entries)", |s, v| {
        let choices = [
            ("0", Reorder::Nothing),
            ("1", Reorder::Chunks),
            ("2", Reorder::Entries),
        ];
        set(&mut s.reorder, choice(v, &choices))
    }),
    row("STALE_CNT", "0 or 1", |s, v| {
        set(&mut s.stale_count, flag(v))
    }),
    row("POISON", "0 or 1", |s, v| set(&mut s.poison, flag(v))),
    row("EXIT_ON_OVERFLOW", "0 or 1", |s, v| {
        set(&mut s.exit_on_overflow, flag(v))
    }),
    row("SET_SIZE", "0 or 1", |s, v| set(&mut s.set_size, flag(v))),
    row("PENDING_CALLS", "1 to 1000000", |s, v| {
        set(&mut s.pending_calls, number(v, 1..=1_000_000))
    }),
    row("PENDING_MS", "0 to 600000", |s, v| {
        set(
            &mut s.pending,
            number(v, 0..=600_000).map(Duration::from_millis),
        )
    }),
    row("CONNECT_RETRIES", "0 to 1000000", |s, v| {
        set(
            &mut s.connect_retries,
            number(v, 0..=1_000_000).map(|n| n as u32),
        )
    }),
    row(
        "FAIL_CONNECT",
        "none, all, or the number of the connect that fails, from 1",
        |s, v| {
            let value = match v {
                "none" => Some(FailConnect::Never),
                "all" => Some(FailConnect::Always),
                _ => number(v, 1..=u64::MAX).map(FailConnect::Nth),
            };
            set(&mut s.fail_connect, value)
        },
    ),
    row("NULL_REQ_EVERY", "0 (never), or 2 and more", |s, v| {
        // Every first one would mean that there are none.
        set(
            &mut s.null_request_every,
            number(v, 0..=u64::MAX).filter(|&n| n != 1),
        )
    }),
    row("DELAY_US", "0 to 60000000", |s, v| {
        set(
            &mut s.delay,
            number(v, 0..=60_000_000).map(Duration::from_micros),
        )
    }),
    row(
        "SHORT_RECV",
        "0 (none), or the number of a receive, from 1",
        |s, v| set(&mut s.short_receive, v.parse().ok()),
    ),
    row(
        "RESET",
        "0 (none), or the number of a send, from 1",
        |s, v| set(&mut s.reset_after, v.parse().ok()),
    ),
    row("DATA_LOSS", "none, hang or hang:BYTES", |s, v| {
        let value = match v.split_once(':') {
            None if v == "none" => Some(None),
            None if v == "hang" => Some(Some(0)),
            Some(("hang", bytes)) => bytes.parse().ok().map(Some),
            _ => None,
        };
        set(&mut s.data_loss_after, value)
    }),
    row(
        "ERROR",
        "CALL:NTH or CALL:NTH:CODE (codes 1 to 6), or several separated by commas",
        |s, v| set(&mut s.errors, v.split(',').map(injected).collect()),
    ),
];

const fn row(
    name: &'static str,
    expected: &'static str,
    set: fn(&mut Settings, &str) -> Option<()>,
) -> Row {
    Row {
        name,
        expected,
        set,
    }
}

impl Settings {
    /// Reads this process's environment.
    ///
    /// # Errors
    /// The first variable, in unspecified order, that is unknown or has an invalid value.
    pub fn from_env() -> Result<Self, SettingError> {
        Self::from_vars(std::env::vars_os())
    }

    /// Reads variables from any source; ignores those without [`PREFIX`].
    ///
    /// # Errors
    /// As [`Settings::from_env`].
    pub fn from_vars(
        vars: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, SettingError> {
        let mut settings = Self::default();
        for (name, value) in vars {
            let Some(key) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else {
                continue;
            };
            settings.apply(key, &value)?;
        }
        Ok(settings)
    }

    fn apply(&mut self, key: &str, value: &OsStr) -> Result<(), SettingError> {
        let name = format!("{PREFIX}{key}");
        let Some(row) = ROWS.iter().find(|row| row.name == key) else {
            let known: Vec<_> = ROWS
                .iter()
                .map(|row| format!("{PREFIX}{}", row.name))
                .collect();
            return Err(SettingError::Unknown {
                name,
                known: known.join(", "),
            });
        };
        value
            .to_str()
            .and_then(|value| (row.set)(self, value.trim()))
            .ok_or_else(|| SettingError::Value {
                name,
                value: value.to_string_lossy().into_owned(),
                expected: row.expected.to_owned(),
            })
    }
}

fn set<T>(field: &mut T, value: Option<T>) -> Option<()> {
    *field = value?;
    Some(())
}

fn flag(value: &str) -> Option<bool> {
    choice(value, &[("0", false), ("1", true)])
}

fn choice<T: Copy>(value: &str, choices: &[(&str, T)]) -> Option<T> {
    choices
        .iter()
        .find(|(name, _)| *name == value)
        .map(|(_, choice)| *choice)
}

fn number(value: &str, range: RangeInclusive<u64>) -> Option<u64> {
    value.parse().ok().filter(|number| range.contains(number))
}

fn injected(value: &str) -> Option<InjectedError> {
    let mut parts = value.trim().splitn(3, ':');
    let call = Call::from_name(parts.next()?)?;
    let nth = number(parts.next()?, 1..=u64::MAX)?;
    let code = match parts.next() {
        Some(code) => c_int::try_from(number(code, 1..=6)?).ok()?,
        None => result::INTERNAL_ERROR,
    };
    Some(InjectedError { call, nth, code })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str, value: &str) -> Result<Settings, SettingError> {
        Settings::from_vars([(OsString::from(name), OsString::from(value))])
    }

    #[test]
    fn nothing_set_is_the_default() {
        assert_eq!(Settings::from_vars([]).unwrap(), Settings::default());
        assert_eq!(parse("TCPX_EMULATOR", "x").unwrap(), Settings::default());
    }

    #[test]
    fn values_reach_their_fields() {
        assert!(!parse("TCPX_EMU_STRICT", "0").unwrap().strict);
        assert_eq!(parse("TCPX_EMU_CHUNK", " 8192 ").unwrap().chunk, 8192);
        assert_eq!(
            parse("TCPX_EMU_DATA_LOSS", "hang:77")
                .unwrap()
                .data_loss_after,
            Some(77)
        );
        assert_eq!(
            parse("TCPX_EMU_FAIL_CONNECT", "2").unwrap().fail_connect,
            FailConnect::Nth(2)
        );
        let errors = parse("TCPX_EMU_ERROR", "isend:3, test:9:2").unwrap().errors;
        assert_eq!(
            errors,
            [
                InjectedError {
                    call: Call::Isend,
                    nth: 3,
                    code: 3
                },
                InjectedError {
                    call: Call::Test,
                    nth: 9,
                    code: 2
                },
            ]
        );
    }

    #[test]
    fn bad_values_and_unknown_names_say_what_was_expected() {
        for row in ROWS {
            let error = parse(&format!("{PREFIX}{}", row.name), "nonsense").unwrap_err();
            assert!(error.to_string().contains(row.expected), "{error}");
        }
        for (name, value) in [
            ("NSOCKS", "9"),
            ("NULL_REQ_EVERY", "1"),
            ("CHUNK", "0"),
            ("PAGES", "-1"),
        ] {
            assert!(
                parse(&format!("{PREFIX}{name}"), value).is_err(),
                "{name}={value}"
            );
        }
        let error = parse("TCPX_EMU_SNEED", "1").unwrap_err().to_string();
        assert!(error.contains("TCPX_EMU_SEED"), "{error}");
    }

    #[test]
    fn the_documentation_lists_every_variable() {
        let documentation = include_str!("lib.rs");
        for row in ROWS {
            let cell = format!("//! | `{PREFIX}{}` |", row.name);
            assert!(documentation.contains(&cell), "{cell} is missing in lib.rs");
        }
    }
}
