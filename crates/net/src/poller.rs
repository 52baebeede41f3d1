//! Waits for readiness: one-shot epoll, a waker, and a descriptor for other event loops.

use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::Errno;

use crate::fork::Private;

/// The token that the waker reports; sources must not use it.
const WAKER: u64 = u64::MAX;
const BATCH: usize = 64;

/// A source that became ready, or a wake-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The source with this token is ready, has failed or was closed: the next call on it tells
    /// which.
    Ready(u64),
    /// [`Waker::wake`] was called.
    Woken,
}

/// Waits for sources to become ready. Every source reports once and is then silent until it is
/// armed again, so that a thread already working on a source is never woken for it.
#[derive(Debug)]
pub struct Poller {
    epoll: Private<OwnedFd>,
    waker: Waker,
}

impl Poller {
    /// Creates a poller with no sources.
    ///
    /// # Errors
    /// The process is out of file descriptors.
    pub fn new() -> io::Result<Self> {
        let epoll = Private::new(|| epoll::create(epoll::CreateFlags::CLOEXEC))?;
        let signal = Signal::new()?;
        let data = epoll::EventData::new_u64(WAKER);
        epoll::add(&*epoll, &signal, data, epoll::EventFlags::IN)?;
        Ok(Self {
            epoll,
            waker: Waker {
                signal: Arc::new(signal),
            },
        })
    }

    /// Returns a handle that wakes [`Poller::wait`] from any thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Adds a source that stays silent until it is armed.
    ///
    /// # Errors
    /// Fails if the source was already added, or cannot be polled.
    pub fn add(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::add(
            &*self.epoll,
            source,
            data,
            epoll::EventFlags::ONESHOT,
        )?)
    }

    /// Adds a source and reports it once when it has something to read: [`Poller::add`] and
    /// [`Poller::arm`] in one system call.
    ///
    /// # Errors
    /// Fails if the source was already added, or cannot be polled.
    pub fn add_armed(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        let flags = epoll::EventFlags::ONESHOT | epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        Ok(epoll::add(&*self.epoll, source, data, flags)?)
    }

    /// Reports the source once when it is readable or, if asked, writable.
    ///
    /// # Errors
    /// Fails if the source is not registered (it was closed or removed).
    pub fn arm(&self, source: impl AsFd, token: u64, writable: bool) -> io::Result<()> {
        let mut flags =
            epoll::EventFlags::ONESHOT | epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        if writable {
            flags |= epoll::EventFlags::OUT;
        }
        Ok(epoll::modify(
            &*self.epoll,
            source,
            epoll::EventData::new_u64(token),
            flags,
        )?)
    }

    /// Reports the source once when it is writable, even if it is readable before.
    ///
    /// # Errors
    /// Fails if the source is not registered (it was closed or removed).
    pub fn arm_for_writing(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        let flags = epoll::EventFlags::ONESHOT | epoll::EventFlags::OUT;
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::modify(&*self.epoll, source, data, flags)?)
    }

    /// Removes a source.
    pub fn remove(&self, source: impl AsFd) {
        // Fails only if the source is not registered.
        let _ = epoll::delete(&*self.epoll, source);
    }

    /// Waits until a source is ready, at most `timeout` (`None`: without limit), and appends the
    /// events.
    ///
    /// # Errors
    /// The poller itself is broken.
    pub fn wait(&self, events: &mut Vec<Event>, timeout: Option<Duration>) -> io::Result<()> {
        let mut timeout = timeout.map(|t| Timespec {
            tv_sec: t.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: t.subsec_nanos().into(),
        });
        // `epoll_wait` counts in milliseconds; finer timeouts poll the epoll descriptor itself.
        if let Some(exact) = timeout.filter(|t| t.tv_nsec % 1_000_000 != 0) {
            let mut this = [PollFd::new(&*self.epoll, PollFlags::IN)];
            match poll(&mut this, Some(&exact)) {
                Ok(0) | Err(Errno::INTR) => return Ok(()),
                Ok(_) => timeout = Some(Timespec::default()),
                Err(e) => return Err(e.into()),
            }
        }
        let mut ready = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; BATCH];
        let count = match epoll::wait(&*self.epoll, &mut ready, timeout.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(e) => return Err(e.into()),
        };
        for event in &ready[..count] {
            match event.data.u64() {
                WAKER => {
                    self.waker.clear();
                    events.push(Event::Woken);
                }
                token => events.push(Event::Ready(token)),
            }
        }
        Ok(())
    }
}

/// Makes sleeps of this thread end on time. By default the kernel may extend each by up to 50 µs,
/// to end several at once.
pub fn sleep_exactly() {
    // Refused only by kernels without this setting.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
}

/// Wakes a [`Poller`].
#[derive(Clone, Debug)]
pub struct Waker {
    signal: Arc<Signal>,
}

impl Waker {
    /// Makes the current or the next [`Poller::wait`] return.
    pub fn wake(&self) {
        self.signal.raise();
    }

    fn clear(&self) {
        self.signal.clear();
    }
}

/// A descriptor (eventfd) that is readable from [`Signal::raise`] to [`Signal::clear`]. Forked
/// children do not keep it.
#[derive(Debug)]
pub struct Signal {
    event: Private<OwnedFd>,
}

impl Signal {
    /// Makes a signal that is not raised.
    ///
    /// # Errors
    /// The process is out of file descriptors.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = Private::new(|| eventfd(0, flags))?;
        Ok(Self { event })
    }

    /// Makes the descriptor readable. Costs a system call; never blocks.
    pub fn raise(&self) {
        // The counter can only be full (WouldBlock) when the signal is raised already.
        let _ = rustix::io::write(&*self.event, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable until the signal is raised again.
    pub fn clear(&self) {
        // Fails only when there is nothing to clear.
        let _ = rustix::io::read(&*self.event, &mut [0u8; 8]);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn wait(poller: &Poller) -> Vec<Event> {
        let mut events = Vec::new();
        poller.wait(&mut events, Some(Duration::ZERO)).unwrap();
        events
    }

    #[test]
    fn a_source_reports_once_each_time_it_is_armed() {
        let poller = Poller::new().unwrap();
        let (mut near, far) = UnixStream::pair().unwrap();
        poller.add(&far, 7).unwrap();
        near.write_all(b"x").unwrap();
        assert_eq!(wait(&poller), [], "added, not armed");
        poller.arm(&far, 7, false).unwrap();
        assert_eq!(wait(&poller), [Event::Ready(7)]);
        assert_eq!(
            wait(&poller),
            [],
            "once only, though the byte is still there"
        );
        poller.arm(&far, 7, false).unwrap();
        assert_eq!(wait(&poller), [Event::Ready(7)]);
        poller.remove(&far);
        assert!(poller.arm(&far, 7, false).is_err());
        poller.add_armed(&far, 8).unwrap();
        assert_eq!(wait(&poller), [Event::Ready(8)]);
        assert_eq!(wait(&poller), []);
    }

    #[test]
    fn a_source_reports_room_to_write_if_asked() {
        let poller = Poller::new().unwrap();
        let (_near, far) = UnixStream::pair().unwrap();
        poller.add(&far, 7).unwrap();
        poller.arm(&far, 7, false).unwrap();
        assert_eq!(wait(&poller), [], "nothing to read");
        poller.arm(&far, 7, true).unwrap();
        assert_eq!(wait(&poller), [Event::Ready(7)]);
        assert_eq!(wait(&poller), []);
    }

    #[test]
    fn a_source_reports_what_there_is_to_read_while_it_cannot_write() {
        let poller = Poller::new().unwrap();
        let (mut near, far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        while (&far).write(&[0; 4096]).is_ok() {}
        poller.add(&far, 7).unwrap();
        poller.arm(&far, 7, true).unwrap();
        assert_eq!(wait(&poller), []);
        near.write_all(b"x").unwrap();
        assert_eq!(wait(&poller), [Event::Ready(7)]);
    }

    #[test]
    fn a_signal_is_readable_from_raise_to_clear_and_blocks_nobody() {
        let signal = Signal::new().unwrap();
        let is_readable = || {
            let mut this = [PollFd::new(&signal, PollFlags::IN)];
            poll(&mut this, Some(&Timespec::default())).unwrap() == 1
        };
        // A descriptor that blocks would hang `clear` here, and `raise` where its count is full.
        assert!(
            rustix::fs::fcntl_getfl(&signal)
                .unwrap()
                .contains(rustix::fs::OFlags::NONBLOCK)
        );
        assert!(
            rustix::io::fcntl_getfd(&signal)
                .unwrap()
                .contains(rustix::io::FdFlags::CLOEXEC)
        );
        assert!(!is_readable());
        signal.raise();
        signal.raise();
        assert!(is_readable());
        signal.clear();
        assert!(!is_readable());
        signal.clear();
        signal.raise();
        assert!(is_readable());
    }

    #[test]
    fn a_source_that_is_armed_for_writing_does_not_report_what_there_is_to_read() {
        let poller = Poller::new().unwrap();
        let (mut near, far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        while (&far).write(&[0; 4096]).is_ok() {}
        poller.add(&far, 7).unwrap();
        near.write_all(b"x").unwrap();
        poller.arm_for_writing(&far, 7).unwrap();
        assert_eq!(wait(&poller), []);
        near.set_nonblocking(true).unwrap();
        while near.read(&mut [0; 4096]).is_ok() {}
        assert_eq!(wait(&poller), [Event::Ready(7)]);
    }

    #[test]
    fn a_short_wait_ends_by_itself_or_with_what_is_ready() {
        let poller = Poller::new().unwrap();
        let mut events = Vec::new();
        let short = Some(Duration::from_micros(20));
        sleep_exactly();
        poller.wait(&mut events, short).unwrap();
        assert_eq!(events, []);
        poller.waker().wake();
        poller.wait(&mut events, short).unwrap();
        assert_eq!(events, [Event::Woken]);
        events.clear();
        // With whole milliseconds on top.
        let waker = poller.waker();
        let thread = std::thread::spawn(move || waker.wake());
        let long = Some(Duration::from_micros(3_600_000_500));
        poller.wait(&mut events, long).unwrap();
        assert_eq!(events, [Event::Woken]);
        thread.join().unwrap();
    }

    #[test]
    fn a_wake_up_is_never_lost_and_never_repeats() {
        let poller = Poller::new().unwrap();
        let waker = poller.waker();
        waker.wake();
        waker.wake();
        assert_eq!(wait(&poller), [Event::Woken]);
        assert_eq!(wait(&poller), []);
        let thread = std::thread::spawn(move || waker.wake());
        let mut events = Vec::new();
        poller.wait(&mut events, None).unwrap();
        assert_eq!(events, [Event::Woken]);
        thread.join().unwrap();
    }
}
