//! The terminal: draws until the user ends the program.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use ratatui::crossterm::event::{self, Event, KeyEventKind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::app::App;
use super::model::Model;
use super::read::Reader;
use super::report::Report;
use super::view::{self, Theme};

/// How soon a reading or a signal is noticed; keys are noticed at once.
const LOOK: Duration = Duration::from_millis(200);

/// Set by a signal that requests the end of the program.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Restores the terminal when the program ends: by an error, a signal or a panic.
struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Shows the sessions until a key or a signal ends the program.
pub(crate) fn run(reader: Reader, interval: Duration, colour: bool) -> io::Result<()> {
    let mut app = App::default();
    app.update(first(&reader));
    watch_signals();
    // `try_init` also makes panics restore the terminal before they print.
    let mut terminal = ratatui::try_init()?;
    let _restored = Restored;
    let theme = Theme { colour };
    let readings = read_every(reader, interval);
    let mut model = Model::default();
    let mut is_changed = true;
    while !app.is_over && !IS_OVER.load(Ordering::Relaxed) {
        if is_changed {
            terminal.draw(|frame| view::draw(frame, &app, theme))?;
        }
        is_changed = false;
        if is_hung_up(LOOK) {
            break;
        }
        is_changed |= handle_events(&mut app, next_event)?;
        for reading in readings.try_iter() {
            model.update(reading);
            app.update(Report::new(&model));
            is_changed = true;
        }
    }
    Ok(())
}

/// Handles all events that have arrived, as [`next_event`] returns them, or those up to the end of
/// the program. Returns whether there were any.
///
/// `crossterm` reads the bytes of several keys at once and keeps the events: none may be left to
/// [`is_hung_up`], which sees only bytes that were not read.
fn handle_events(
    app: &mut App,
    mut next: impl FnMut() -> io::Result<Option<Event>>,
) -> io::Result<bool> {
    let mut is_changed = false;
    while !app.is_over
        && let Some(event) = next()?
    {
        match event {
            Event::Key(key) if key.kind == KeyEventKind::Press => app.press(key),
            _ => {}
        }
        is_changed = true;
    }
    Ok(is_changed)
}

/// Returns the next event that has arrived, without waiting.
fn next_event() -> io::Result<Option<Event>> {
    match event::poll(Duration::ZERO) {
        Ok(true) => event::read().map(Some),
        Ok(false) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
        Err(error) => Err(error),
    }
}

/// Waits for a key, a signal or the end of `time`. Returns whether the terminal is gone;
/// `crossterm` would read from it without end.
fn is_hung_up(time: Duration) -> bool {
    let stdin = io::stdin();
    let mut watched = [PollFd::new(&stdin, PollFlags::IN)];
    let time = Timespec::try_from(time).ok();
    let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    poll(&mut watched, time.as_ref()).is_ok() && watched[0].revents().intersects(gone)
}

/// Returns the first report, without rates, so that the screen shows rows at once.
fn first(reader: &Reader) -> Report {
    let mut model = Model::default();
    model.update(reader.read());
    Report::new(&model)
}

/// Queries processes on a thread of its own, so that a process that does not answer delays no key.
fn read_every(reader: Reader, interval: Duration) -> mpsc::Receiver<super::Reading> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        // The loop ends when the receiver is dropped.
        while sender.send(reader.read()).is_ok() {
            std::thread::sleep(interval);
        }
    });
    receiver
}

/// Records signals instead of ending the process, so that the terminal is restored first. SIGHUP is
/// left alone: the terminal is gone then, and the process ends at once.
fn watch_signals() {
    extern "C" fn note(_: libc::c_int) {
        IS_OVER.store(true, Ordering::Relaxed);
    }
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: all zeroes are a valid `sigaction`, and the handler only stores to an atomic.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note as *const () as usize;
            // The next signal ends the process at once.
            action.sa_flags = libc::SA_RESETHAND;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use ratatui::crossterm::event::{KeyCode, KeyEvent};

    use super::*;
    use crate::top::app::Sort;

    #[test]
    fn keys_that_arrive_together_are_handled_together() {
        let key = |key| Event::Key(KeyEvent::from(KeyCode::Char(key)));
        let mut events = ['s', 's', 'r'].map(key).into_iter();
        let mut app = App::default();
        assert!(handle_events(&mut app, || Ok(events.next())).unwrap());
        assert_eq!((app.sort, app.is_reversed), (Sort::InFlight, true));
        assert!(!handle_events(&mut app, || Ok(None)).unwrap());
        // Keys after the end of the program change nothing.
        let mut events = ['q', 'r'].map(key).into_iter();
        assert!(handle_events(&mut app, || Ok(events.next())).unwrap());
        assert!(app.is_over && app.is_reversed);
    }
}
