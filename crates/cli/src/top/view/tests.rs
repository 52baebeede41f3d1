use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::super::app::Sort;
use super::super::read::Silent;
use super::super::report::Report;
use super::super::report::tests::{done, model};
use super::*;

const GB: u64 = 1_000_000_000;

fn screen(app: &App, width: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, 20)).unwrap();
    let theme = Theme { colour: false };
    terminal.draw(|frame| draw(frame, app, theme)).unwrap();
    let buffer = terminal.backend().buffer();
    let lines = buffer.content().chunks(usize::from(width));
    let line = |cells: &[ratatui::buffer::Cell]| -> String {
        cells.iter().map(ratatui::buffer::Cell::symbol).collect()
    };
    lines.map(line).collect::<Vec<_>>().join("\n")
}

fn press(app: &mut App, codes: &[KeyCode]) {
    for code in codes {
        app.press(KeyEvent::from(*code));
    }
}

/// Two seconds of a session with three peers, one of which is slow.
fn app() -> App {
    let first = ["a", "b", "c"].map(|name| done(name, 0, 1));
    let second = [
        done("a", GB, 1),
        done("b", 2 * GB, 1),
        done("c", GB / 10, 1),
    ];
    let mut app = App::default();
    app.update(Report::new(&model(&[&first, &second])));
    app
}

#[track_caller]
fn contains(screen: &str, words: &[&str]) {
    for word in words {
        assert!(screen.contains(word), "{word:?} in\n{screen}");
    }
}

#[test]
fn sessions_are_shown_with_path_rate_plot_and_limit() {
    let text = screen(&app(), 120);
    contains(
        &text,
        &[
            "tcpx top   1 session in 1 process   sent 3.10 GB/s   received 0",
            "4711",
            "decoder",
            "eth0+eth1",
            "3.10 GB/s",
            "█",
            "program python3 serve.py (tcpx 0.1.0)",
            "limits  the network or the peer",
            "slow    c is slow: 100.0 MB/s, others 1.00 GB/s",
            "q quit",
        ],
    );
}

#[test]
fn a_narrow_screen_leaves_out_what_is_told_below() {
    let text = screen(&app(), 80);
    let words = ["SESSION", "SENT", "RECEIVED", "LAST MINUTE", "3.10 GB/s"];
    contains(&text, &words);
    contains(
        &text,
        &["counts  3 in flight, 0 retries, 0 failovers, 0 failed"],
    );
    assert!(!text.contains("FAILED"), "{text}");
    assert!(screen(&app(), 120).contains("FAILED"));
    // A screen without any room must not cause a panic.
    for width in 1..40 {
        screen(&app(), width);
    }
}

#[test]
fn keys_lead_into_peers_and_lanes_and_back() {
    let mut app = app();
    press(&mut app, &[KeyCode::Enter]);
    let text = screen(&app, 120);
    contains(&text, &["decoder (process 4711) ▸ peers", "connected"]);
    let at = |text: &str, name: &str| {
        let row = format!("│{name} ");
        text.lines().position(|line| line.contains(&row)).unwrap()
    };
    assert!(at(&text, "b") < at(&text, "a") && at(&text, "a") < at(&text, "c"));
    press(&mut app, &[KeyCode::Down, KeyCode::Enter]);
    let text = screen(&app, 120);
    contains(
        &text,
        &["decoder ▸ a ▸ lanes", "10.0.1.1:4001", "eth1", "500.0 MB/s"],
    );
    press(&mut app, &[KeyCode::Enter, KeyCode::Esc]);
    assert_eq!(app.rows()[app.selected(&app.rows()).unwrap()].key, "a");
    press(&mut app, &[KeyCode::Esc, KeyCode::Esc]);
    assert_eq!(app.level, Level::Sessions);
}

#[test]
fn rows_are_ordered_as_asked_and_the_selection_stays() {
    let mut app = app();
    press(&mut app, &[KeyCode::Enter, KeyCode::End]);
    let keys = |app: &App| -> Vec<String> { app.rows().into_iter().map(|row| row.key).collect() };
    assert_eq!(keys(&app), ["b", "a", "c"]);
    press(&mut app, &[KeyCode::Char('r')]);
    assert_eq!(keys(&app), ["c", "a", "b"]);
    press(&mut app, &[KeyCode::Char('r'), KeyCode::Char('s')]);
    assert_eq!((app.sort, keys(&app).join("")), (Sort::Name, "abc".into()));
    assert_eq!(app.selected(&app.rows()), Some(2), "c, wherever it is");
    press(&mut app, &[KeyCode::Char('s'); 3]);
    assert_eq!(app.sort, Sort::Rate);
}

#[test]
fn what_is_gone_is_left() {
    let mut app = app();
    press(&mut app, &[KeyCode::Enter, KeyCode::Enter]);
    assert!(matches!(app.level, Level::Lanes(..)));
    app.update(Report::default());
    assert_eq!(app.level, Level::Sessions);
    assert!(screen(&app, 100).contains("No tcpx session of this user"));
    press(&mut app, &[KeyCode::Down, KeyCode::Enter]);
    assert_eq!(app.level, Level::Sessions);
}

#[test]
fn help_and_the_end_are_one_key_away() {
    let mut app = app();
    press(&mut app, &[KeyCode::Char('?')]);
    contains(&screen(&app, 100), &["Help", "Ctrl-C", "RETRIES"]);
    press(&mut app, &[KeyCode::Char('x')]);
    assert!(!app.shows_help && !app.is_over);
    app.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::NONE));
    assert!(!app.is_over);
    app.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
    assert!(app.is_over);
}

#[test]
fn processes_that_do_not_answer_are_named() {
    let mut app = app();
    app.report.silent.push(Silent {
        pid: 99,
        reason: "it does not answer".into(),
    });
    contains(&screen(&app, 100), &["Process 99: it does not answer"]);
}
