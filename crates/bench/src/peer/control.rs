//! What the measuring process asks of the other, as JSON in the messages of a bootstrap
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

/// Both sides must agree on this: messages of another version are not understood.
pub const VERSION: u32 = 2;

/// Settings that the measuring process may choose for the other. The rest is the machine's own.
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

/// From the measuring process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// First: start a session with these settings. Answer: [`Reply::Hello`].
    Hello {
        /// [`VERSION`].
        version: u32,
        /// Keys (of [`SHARED_SETTINGS`]) and values.
        settings: Vec<(String, String)>,
        /// Where its memory shall lie. Versions that know host memory only do not say.
        #[serde(default)]
        place: Place,
    },
    /// Have registered memory for a workload, in place of the previous. Answer: [`Reply::Region`].
    Prepare {
        /// The workload.
        shape: Shape,
    },
    /// Fill the memory with the pattern of a seed.
    Fill {
        /// The seed.
        seed: u64,
    },
    /// Check that the memory holds what the other side was filled with. Answer: [`Reply::Done`] or
    /// [`Reply::Corrupt`].
    Verify {
        /// The other side's seed.
        seed: u64,
        /// Whose bytes: those that the engine has moved, or those of the floor.
        contestant: Contestant,
    },
    /// Listen for floor streams. Answer: [`Reply::Listening`].
    FloorListen,
    /// Make the comms of the floor's streams, while the client does.
    FloorPlug,
    /// Take the streams that have been opened.
    FloorAccept {
        /// How many.
        streams: usize,
        /// The congestion control they get, unless it is the system's.
        congestion_control: Option<String>,
    },
    /// Serve iterations of the floor over the prepared memory. Answered at their end.
    FloorRun {
        /// How many.
        iterations: u32,
        /// How.
        tuning: Tuning,
    },
    /// Say how much CPU time the process has used, and nothing that costs more. Answer:
    /// [`Reply::Cpu`].
    Cpu,
    /// Say what the process has used. Answer: [`Reply::Usage`].
    Usage,
    /// Start this many further sessions that do nothing, in place of the previous ones. Answer:
    /// [`Reply::Sessions`].
    Sessions {
        /// How many; none ends them.
        count: usize,
    },
    /// The measurement is over.
    Quit,
}

/// From the other process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Who I am.
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
    /// Where the floor streams go.
    Listening {
        /// The port.
        port: u16,
        /// What to say first.
        nonce: Nonce,
    },
    /// CPU time of the process.
    Cpu(Duration),
    /// What the process has used.
    Usage(Usage),
    /// Connection infos of the further sessions.
    Sessions {
        /// One each.
        infos: Vec<Vec<u8>>,
    },
    /// It is done.
    Done,
    /// The bytes are wrong.
    Corrupt(Mismatch),
    /// It could not be done.
    Failed {
        /// Why.
        message: String,
    },
}

/// Sends one message.
pub(super) fn send(channel: &mut Channel, message: &impl Serialize) -> Result<(), BootstrapError> {
    let bytes = serde_json::to_vec(message).expect("plain data with string keys");
    channel.send(&bytes)
}

/// Reads one message from the bytes of one.
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(bytes).map_err(|error| Error::Protocol {
        what: format!("a message that makes no sense: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floor::Waiting;
    use crate::workload::Op;

    #[test]
    fn messages_survive_the_wire() {
        let shape = Shape::new(Op::Read, 1 << 20, 4 << 10, true).unwrap();
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
