//! Shared parts of the integration tests: a second process, memory with known bytes, and a guard
//! against hanging.
//!
//! Every test tells a story of two or more *real processes*: the test itself (a [`Host`]) and one
//! `tcpx-testpeer` for each [`RemoteProcess`], which executes commands from a pipe and whose
//! application sleeps in between.
//!
//! | module | what it holds |
//! |---|---|
//! | [`pattern`] | bytes that depend on seed and offset: a misplaced block is detected |
//! | [`memory`] | memory that is filled with patterns and compared with them |
//! | [`mapping`] | memory that is unmapped while it is registered |
//! | [`setup`] | the configurations of the tests: the one place where a transport is chosen |
//! | [`host`] | the session of a story in this process |
//! | [`ledger`] | the requests of a story, compared with the engine's statistics |
//! | [`remote`], [`protocol`], [`serve`] | the other process: its handle, the pipe, its main loop |
//! | [`story`](mod@story) | a time limit around a test, and waiting for conditions |
//! | [`forked`] | children of the other process, which share its memory and not its threads |
//! | [`flood`] | processes that connect repeatedly |
//! | [`raw`] | sockets that violate the protocol on purpose |
//! | [`attack`] | a session under attack by insiders, and checks that it holds |
//! | [`netns`] | two machines in one: network namespaces with cables between them |

pub mod attack;
pub mod flood;
pub mod forked;
pub mod host;
pub mod ledger;
pub mod mapping;
pub mod memory;
pub mod netns;
pub mod pattern;
pub mod protocol;
pub mod raw;
pub mod remote;
pub mod serve;
pub mod setup;
pub mod story;

pub use host::{Host, LocalMemory};
pub use ledger::Tracked;
pub use mapping::Access;
pub use memory::Memory;
pub use pattern::{Content, Expected};
pub use protocol::Copy;
pub use remote::{RemoteMemory, RemoteProcess, RemoteTransfer};
pub use setup::Setup;
pub use story::{GUARD, REMOTE_GUARD, story, story_within, wait_until};
