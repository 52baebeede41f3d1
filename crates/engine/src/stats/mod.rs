//! Counters of a session: what moved on which path, how transfers ended, and what they waited for.
//!
//! | module | what it holds |
//! |---|---|
//! | `cells` | the layout of one peer's counters, and their sums |
//! | `counters` | the counters that threads write: of a lane, of a peer |
//! | `meter` | the start and the end of one transfer |
//! | `book` | the counters of all peers of a session, present and gone |
//! | `data` | the plain data that applications read |
//! | `failures` | failed transfers by cause |
//! | `route` | the way to a connected peer |
//! | `text` | statistics as lines for people |
//! | `openmetrics` | statistics as OpenMetrics text |
//! | `process` | a process as it describes itself to `tcpx top` |
//! | `serve` | the threads that hand statistics to scrapers and to `tcpx top` |
//! | `limits` | what limits a peer, in words |
//!
//! Counting takes no lock and shares no cache line between lanes. The counters of half a lane are
//! written under the lock of that half, with plain loads and stores. Counters of a whole peer are
//! spread over a few blocks, of which each thread uses one. A reader adds them up.
//!
//! Counters outlive the things that they count. A lane that goes adds its counters to those of its
//! peer; a peer that goes is kept by its name. The last 64 peers that went are kept apart, older
//! ones as one sum.

mod book;
mod cells;
mod counters;
mod data;
mod failures;
mod limits;
mod meter;
mod openmetrics;
mod process;
mod route;
mod serve;
mod text;

pub(crate) use self::book::{Book, OpenPeer};
pub(crate) use self::cells::Count;
pub(crate) use self::counters::{LaneMeter, PeerCounters};
pub use self::data::{
    Histogram, KernelStats, LaneStats, LaneWaits, Moved, Notified, PathKind, PeerStats,
    SessionStats, SizeClass, Traffic, TransferKind, TransferStats,
};
pub use self::failures::Failures;
pub use self::limits::{Limit, Sample};
pub(crate) use self::meter::{Meter, Outcome};
pub use self::openmetrics::openmetrics;
pub use self::process::{CpuTimes, Nic, ProcessStats, SessionReading};
pub use self::route::{Route, SameHostUse};
pub use self::serve::FOLDER;
pub(crate) use self::serve::{Asked, Registration, Source, register};
pub use tcpx_net::process::{MachineTime, ThreadTime};
