//! What a session needs to move memory that sockets cannot reach: a GPU's passes through pinned host
//! memory.
//!
//! Slots come from one [`Pool`] per session and have one size, whatever the size of the chunk: a large
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

/// Copies up to this size are over before anything else could be done meanwhile.
const SHORT_BYTES: usize = 16 << 10;
/// How long a short copy is looked at without doing anything else.
const SHORT_WAIT: Duration = Duration::from_micros(15);

/// Looks at a copy of `bytes` until `is_over` or until it has taken longer than a short copy should;
/// not at all at a long one.
pub(crate) fn glance(bytes: usize, mut is_over: impl FnMut() -> bool) {
    if bytes > SHORT_BYTES {
        return;
    }
    let until = Instant::now() + SHORT_WAIT;
    while !is_over() && Instant::now() < until {
        std::hint::spin_loop();
    }
}

/// Whether two memories lie in the same place: both where sockets reach them, or on the same device.
pub(crate) fn is_same_place(a: Option<&Arc<dyn Device>>, b: Option<&Arc<dyn Device>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.is_same(b.as_ref()),
        (a, b) => a.is_none() && b.is_none(),
    }
}

/// What a session needs to move memory of devices.
pub(crate) struct Staging {
    pub(crate) pool: Arc<Pool>,
    /// Stands for the device of host memory, where that is staged too.
    host: Option<Arc<dyn Device>>,
    /// Slots that are made with the first region on a device, so that no transfer waits for them.
    first_slots: usize,
    /// What batches take of a device's memory; 0 where there are to be none.
    device_bytes: usize,
    /// A batch with a slot of each lane is full: more never come together.
    full_bytes: usize,
    /// Which interfaces are near a device.
    pub(crate) nearness: Arc<Nearness>,
    /// Devices whose kernels are loaded.
    prepared: Mutex<Vec<usize>>,
}

impl Staging {
    pub(crate) fn new(config: &Config, nearness: Nearness) -> Self {
        let slot_bytes = config.staging_slot_bytes();
        let host = match config.staging() {
            StagingKind::Auto => None,
            StagingKind::Always => Some(Arc::new(StandIn::new(1)) as Arc<dyn Device>),
        };
        Self {
            pool: Pool::new(slot_bytes, config.staging_bytes()),
            host,
            device_bytes: config.device_bytes(),
            full_bytes: slot_bytes * config.lanes(),
            first_slots: config.staging_slots_per_lane() * config.lanes(),
            nearness: Arc::new(nearness),
            prepared: Mutex::new(Rank::Staging, Vec::new()),
        }
    }

    /// Takes host memory for that of this device.
    #[cfg(test)]
    pub(crate) fn on(mut self, device: StandIn) -> Self {
        self.host = Some(Arc::new(device));
        self
    }

    /// The device that memory lies on, if sockets cannot reach it. `claimed` is what the caller takes the memory for;
    /// what the driver says counts more.
    pub(crate) fn device_of(
        &self,
        span: Span,
        claimed: MemoryKind,
    ) -> Result<Option<Arc<dyn Device>>, Error> {
        let mut found = tcpx_cuda::locate(span.address(), span.len())?;
        if let (None, MemoryKind::Cuda { device }) = (&found, claimed) {
            // Whoever never used CUDA in this process cannot have memory of a device; say what is missing.
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

    /// A slot for a copy that somebody waits for: of the pool if it fits, else of its own.
    pub(crate) fn slot(&self, device: &dyn Device, len: usize) -> Result<Slot, Error> {
        if let Some(slot) = self.pool.take(device, Direction::Out)?
            && slot.len() >= len
        {
            return Ok(slot);
        }
        Slot::own(device, len)
    }

    /// What stands for the device of host memory, if that is staged too.
    pub(crate) fn host(&self) -> Option<&Arc<dyn Device>> {
        self.host.as_ref()
    }

    /// Whether this stands for the device of host memory.
    pub(crate) fn is_host(&self, device: &dyn Device) -> bool {
        self.host.as_ref().is_some_and(|host| host.is_same(device))
    }

    /// Takes the device memory in which scattered copies are batched. Without, each of them is a launch
    /// of its own.
    fn prepare_batches(&self, device: &dyn Device) {
        if self.device_bytes == 0 || self.is_host(device) {
            return;
        }
        match Batches::new(device, self.device_bytes, self.full_bytes) {
            Ok(batches) => self.pool.add_batches(batches),
            Err(error) => limited!(
                WARN,
                %error,
                "no device memory for batches of scattered blocks: kernels of the application will \
                 be slower while such blocks move. Leave TCPX_DEVICE_BYTES free on the device"
            ),
        }
    }

    /// Does what would make the first transfer slow: loads the device's kernels, makes the first slots.
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
