//! Counters: what a session has moved, on which path, how it ended and what it waited for.
//!
//! | module | what it holds |
//! |---|---|
//! | `cells` | the layout of one peer's counters, and their sums |
//! | `counters` | the counters that threads write: of a lane, of a peer |
//! | `meter` | what one transfer is counted by |
//! | `book` | the counters of all peers of a session, present and gone |
//! | `data` | the plain data that applications read |
//! | `failures` | failed transfers by cause |
//! | `route` | the way to a connected peer |
//! | `text` | the same as lines for people |
//! | `openmetrics` | the same as OpenMetrics text |
//! | `process` | a process as it describes itself to `tcpx top` |
//! | `serve` | the threads that hand statistics to scrapers and to `tcpx top` |
//! | `limits` | what limits a peer, in words |
//!
//! Counting takes no lock and shares no cache line between lanes: the counters of a lane's half are
//! written by the holder of that half's lock, with plain loads and stores; what belongs to a whole
//! peer is spread over a few blocks, of which each thread uses one. Reading adds them up.
//!
//! Counters outlive what they count. A lane that goes adds its counters to its peer's, and a peer
//! that goes is kept by its name; of peers that are gone only the last 64 are kept apart.

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
