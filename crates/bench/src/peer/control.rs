//! The requests of the measuring process to the other, as JSON in the messages of a bootstrap
//! [`Channel`].

use std::time::Duration;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::bootstrap::{BootstrapError, Channel};
use crate::error::Error;
use crate::floor::{Nonce, Tuning};
use crate::machine::Machine;
use crate::memory::Contestant;
use crate::place::Place;
use crate::usage::Usage;
use crate::workload::{Mismatch, Shape};

/// Version of the messages; both sides must have the same.
pub const VERSION: u32 = 4;

/// Settings that the measuring process may choose for the other. The rest belongs to the machine.
pub const SHARED_SETTINGS: [&str; 11] = [
    "lanes",
    "chunk_bytes",
    "window",
    "workers",
    "interfaces",
    "spin_us",
    "socket_buffer_bytes",
    "congestion",
    "staging",
    "staging_bytes",
    "same_host",
];

/// Messages of the measuring process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// First: start a session with these settings. Answer: [`Reply::Hello`].
    Hello {
        /// [`VERSION`].
        version: u32,
        /// Keys (of [`SHARED_SETTINGS`]) and values.
        settings: Vec<(String, String)>,
        /// The place of its memory. Versions that support host memory only do not send it.
        #[serde(default)]
        place: Place,
    },
    /// Allocate registered memory for a workload, replacing the previous one. Answer:
    /// [`Reply::Region`].
    Prepare {
        /// The workload.
        shape: Shape,
    },
    /// Fill the memory with the pattern of a seed.
    Fill {
        /// The seed.
        seed: u64,
    },
    /// Check that the memory has the pattern of the other side. Answer: [`Reply::Done`] or
    /// [`Reply::Corrupt`].
    Verify {
        /// The other side's seed.
        seed: u64,
        /// The contestant that has moved the bytes.
        contestant: Contestant,
    },
    /// Listen for floor streams. Answer: [`Reply::Listening`].
    FloorListen,
    /// Set up the comms of the floor's streams, while the client does.
    FloorPlug,
    /// Accept the opened streams.
    FloorAccept {
        /// Number of streams.
        streams: usize,
        /// Their congestion control, unless it is the system's.
        congestion_control: Option<String>,
    },
    /// Serve iterations of the floor over the prepared memory. Answered at their end.
    FloorRun {
        /// Number of iterations.
        iterations: u32,
        /// The parameters of the round.
        tuning: Tuning,
    },
    /// Report the CPU time of the process, and nothing that costs more. Answer: [`Reply::Cpu`].
    Cpu,
    /// Report the usage of the process. Answer: [`Reply::Usage`].
    Usage,
    /// Start this many further idle sessions, replacing the previous ones. Answer:
    /// [`Reply::Sessions`].
    Sessions {
        /// Number of sessions; 0 ends them.
        count: usize,
    },
    /// End the measurement.
    Quit,
}

/// Messages of the other process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// The description of this process.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// The machine it runs on.
        machine: Machine,
        /// Connection info of its session.
        info: Vec<u8>,
    },
    /// The descriptor of the prepared memory.
    Region {
        /// For `RemoteRegion::from_bytes`.
        descriptor: Vec<u8>,
    },
    /// The address for the floor streams.
    Listening {
        /// The port on this machine; `None` for the port of the client's connection.
        port: Option<u16>,
        /// The nonce that streams send first.
        nonce: Nonce,
    },
    /// CPU time of the process.
    Cpu(Duration),
    /// The usage of the process.
    Usage(Usage),
    /// Connection infos of the further sessions.
    Sessions {
        /// One per session.
        infos: Vec<Vec<u8>>,
    },
    /// The request succeeded.
    Done,
    /// The bytes are wrong.
    Corrupt(Mismatch),
    /// The request failed.
    Failed {
        /// The reason.
        message: String,
    },
}

/// Sends one message.
pub(super) fn send(channel: &mut Channel, message: &impl Serialize) -> Result<(), BootstrapError> {
    let bytes = serde_json::to_vec(message).expect("plain data with string keys");
    channel.send(&bytes)
}

/// Decodes one message.
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(bytes).map_err(|error| Error::Protocol {
        what: format!("a malformed message: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floor::Waiting;
    use crate::workload::{Layout, Op};

    #[test]
    fn messages_survive_the_wire() {
        let shape = Shape::new(Op::Read, 1 << 20, 4 << 10, Layout::Scattered).unwrap();
        let tuning = Tuning {
            call_bytes: 1 << 20,
            waiting: Waiting::Block,
        };
        for request in [
            Request::Hello {
                version: VERSION,
                settings: vec![("lanes".into(), "2".into())],
                place: Place::Vram(1),
            },
            Request::Prepare { shape },
            Request::Verify {
                seed: 7,
                contestant: Contestant::Floor,
            },
            Request::FloorRun {
                iterations: 3,
                tuning,
            },
            Request::Quit,
        ] {
            let bytes = serde_json::to_vec(&request).unwrap();
            assert_eq!(parse::<Request>(&bytes).unwrap(), request);
        }
    }

    #[test]
    fn the_greeting_of_an_older_version_is_understood_well_enough_to_refuse_it() {
        let greeting = br#"{"hello":{"version":1,"settings":[]}}"#;
        assert_eq!(
            parse::<Request>(greeting).unwrap(),
            Request::Hello {
                version: 1,
                settings: Vec::new(),
                place: Place::Host,
            }
        );
    }

    #[test]
    fn nonsense_is_an_error() {
        for bytes in [
            &b""[..],
            b"{",
            b"\"dance\"",
            b"{\"prepare\":{\"shape\":{}}}",
            &[0xff; 9],
        ] {
            assert!(matches!(
                parse::<Request>(bytes),
                Err(Error::Protocol { .. })
            ));
        }
    }
}
