//! Staging of memory that sockets cannot access: GPU memory passes through pinned host memory.
//!
//! Slots come from one [`Pool`] per session and have one size, independent of the chunk: a large
//! chunk passes through in parts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_cuda::{Batches, Device, StandIn};
use tcpx_net::Span;

use super::MemoryKind;
use super::nearness::Nearness;
use super::slots::{Direction, Pool, Slot};
use crate::config::{Config, StagingKind};
use crate::error::Error;
use crate::log::limited;
use crate::sync::{Mutex, Rank};
use crate::trace::Trace;

/// Copies up to this size complete sooner than switching to other work would take.
const SHORT_BYTES: usize = 16 << 10;
/// Limits how long a thread spins on a short copy.
const SHORT_WAIT: Duration = Duration::from_micros(15);

/// Spins until a short copy `is_over`, or has taken longer than a short copy should. Returns at
/// once for a long copy.
pub(crate) fn glance(bytes: usize, mut is_over: impl FnMut() -> bool) {
    if bytes > SHORT_BYTES {
        return;
    }
    let until = Instant::now() + SHORT_WAIT;
    while !is_over() && Instant::now() < until {
        std::hint::spin_loop();
    }
}

/// Returns whether two memories are in the same place: both in host memory, or on the same device.
pub(crate) fn is_same_place(a: Option<&Arc<dyn Device>>, b: Option<&Arc<dyn Device>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.is_same(b.as_ref()),
        (a, b) => a.is_none() && b.is_none(),
    }
}

/// State that a session needs to move device memory.
pub(crate) struct Staging {
    pub(crate) pool: Arc<Pool>,
    /// Stand-in for a GPU that stages host memory as well, if configured.
    host: Option<Arc<dyn Device>>,
    /// Slots pinned with the first region on a device, so that no transfer waits for pinning.
    first_slots: usize,
    /// Device memory for batches; 0 disables batches.
    device_bytes: usize,
    /// Size of a full batch: one slot of each lane, which usually come together.
    full_bytes: usize,
    /// Which interfaces are near a device.
    pub(crate) nearness: Arc<Nearness>,
    /// Devices whose kernels are loaded.
    prepared: Mutex<Vec<usize>>,
}

impl Staging {
    pub(crate) fn new(config: &Config, nearness: Nearness, trace: &Trace) -> Self {
        let slot_bytes = config.staging_slot_bytes();
        let host = match config.staging() {
            StagingKind::Auto => None,
            StagingKind::Always => Some(Arc::new(StandIn::new(1)) as Arc<dyn Device>),
        };
        Self {
            pool: Pool::traced(slot_bytes, config.staging_bytes(), trace),
            host,
            device_bytes: config.device_bytes(),
            full_bytes: slot_bytes * config.lanes(),
            first_slots: config.staging_slots_per_lane() * config.lanes(),
            nearness: Arc::new(nearness),
            prepared: Mutex::new(Rank::Staging, Vec::new()),
        }
    }

    /// Stages host memory through this device.
    #[cfg(test)]
    pub(crate) fn on(mut self, device: StandIn) -> Self {
        self.host = Some(Arc::new(device));
        self
    }

    /// Returns the device that holds the memory, if sockets cannot access it. `claimed` is the
    /// caller's information; the driver's answer takes precedence.
    pub(crate) fn device_of(
        &self,
        span: Span,
        claimed: MemoryKind,
    ) -> Result<Option<Arc<dyn Device>>, Error> {
        let mut found = tcpx_cuda::locate(span.address(), span.len())?;
        if let (None, MemoryKind::Cuda { device }) = (&found, claimed) {
            // A process that never used CUDA cannot have device memory; report what is missing.
            tcpx_cuda::device(device)?;
            found = tcpx_cuda::locate(span.address(), span.len())?;
            if found.is_none() {
                return Err(Error::NotOnDevice {
                    address: span.address(),
                    device,
                });
            }
        }
        match found {
            Some(device) => {
                self.prepare(device.as_ref())?;
                Ok(Some(device))
            }
            None => Ok(self.host.clone()),
        }
    }

    /// Returns a slot for a copy that a caller waits for:
    /// from the pool if it fits, otherwise its own.
    pub(crate) fn slot(&self, device: &dyn Device, len: usize) -> Result<Slot, Error> {
        if let Some(slot) = self.pool.take(device, Direction::Out)?
            && slot.len() >= len
        {
            return Ok(slot);
        }
        Slot::own(device, len)
    }

    /// Returns the stand-in for the device of host memory, if host memory is staged.
    pub(crate) fn host(&self) -> Option<&Arc<dyn Device>> {
        self.host.as_ref()
    }

    /// Returns whether the device is the stand-in for host memory.
    pub(crate) fn is_host(&self, device: &dyn Device) -> bool {
        self.host.as_ref().is_some_and(|host| host.is_same(device))
    }

    /// Reserves device memory in which scattered copies are batched. Without batches, each copy is
    /// a separate launch.
    fn prepare_batches(&self, device: &dyn Device) {
        if self.device_bytes == 0 || self.is_host(device) {
            return;
        }
        match Batches::new(device, self.device_bytes, self.full_bytes) {
            Ok(batches) => self.pool.add_batches(batches),
            Err(error) => limited!(
                WARN,
                %error,
                remedy = "leave TCPX_DEVICE_BYTES free on the device",
                "no device memory for batches of scattered blocks: kernels of the application will \
                 be slower while such blocks move"
            ),
        }
    }

    /// Does work that would slow down the first transfer: loads the device's kernels, pins slots.
    fn prepare(&self, device: &dyn Device) -> Result<(), Error> {
        let mut prepared = self.prepared.lock();
        if !prepared.contains(&device.identity()) {
            drop(device.queue()?);
            self.prepare_batches(device);
            prepared.push(device.identity());
        }
        if !self.pool.has_near(device) {
            self.pool.grow(device, self.first_slots)?;
        }
        Ok(())
    }
}
