//! What the integration tests share: a second process to talk to, memory whose bytes are known, and a
//! guard against hanging.
//!
//! Every test tells a story of two or more *real processes*: the test itself (a [`Host`]) and one
//! `tcpx-testpeer` for each [`RemoteProcess`], which does what it is told over a pipe and whose application is
//! asleep in between.
//!
//! | module | what it holds |
//! |---|---|
//! | [`pattern`] | bytes that depend on seed and offset: a block in the wrong place shows |
//! | [`memory`] | memory that is filled with patterns and compared with them |
//! | [`mapping`] | memory that is taken away while it is registered |
//! | [`setup`] | the configurations that tests run with: the one place where a transport is chosen |
//! | [`host`] | this process's side of a story |
//! | [`remote`], [`protocol`], [`serve`] | the other process: its handle, the pipe between, its inside |
//! | [`story`](mod@story) | a time limit around a test, and waiting for conditions |
//! | [`forked`] | children of the other process, which share its memory and not its threads |
//! | [`flood`] | processes that connect without end |
//! | [`raw`] | sockets that speak the protocol badly on purpose |
//! | [`attack`] | a session under attack by insiders, and what must hold then |
//! | [`netns`] | two machines in one: network namespaces with cables between them |

pub mod attack;
pub mod flood;
pub mod forked;
pub mod host;
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
pub use mapping::Access;
pub use memory::Memory;
pub use pattern::{Content, Expected};
pub use protocol::Copy;
pub use remote::{RemoteMemory, RemoteProcess, RemoteTransfer};
pub use setup::Setup;
pub use story::{GUARD, REMOTE_GUARD, story, story_within, wait_until};
