//! Signals that a thread handles do not break its waits. A process of its own, because a handler
//! holds for the whole process.

use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::time::Duration;

use tcpx_net::{Event, Poller};

extern "C" fn ignore(_: libc::c_int) {}

/// Applications have handlers of their own (SIGCHLD, SIGINT), which run on any of their threads.
#[test]
fn a_signal_ends_a_wait_without_an_error() {
    // SAFETY: the handler does nothing, and all-zero is a valid `sigaction`.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut())
    };
    assert_eq!(result, 0);
    // Whole milliseconds, and a remainder, for which the poller waits by other means.
    for timeout in [None, Some(Duration::from_micros(3_600_000_500))] {
        let poller = Arc::new(Poller::new().unwrap());
        let thread = std::thread::spawn({
            let poller = Arc::clone(&poller);
            move || {
                let mut events: Vec<Event> = Vec::new();
                poller.wait(&mut events, timeout).map(|()| events)
            }
        });
        while !thread.is_finished() {
            // SAFETY: the thread is not joined yet, so its handle is valid.
            unsafe { libc::pthread_kill(thread.as_pthread_t(), libc::SIGUSR1) };
            std::thread::yield_now();
        }
        assert_eq!(thread.join().unwrap().unwrap(), []);
    }
}
