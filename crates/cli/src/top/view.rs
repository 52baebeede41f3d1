//! The screen.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Table, TableState, Wrap};

use super::app::{App, Level, Row as AppRow};
use super::report::speed;
use crate::units::count;

/// The text that is shown if there is no session.
pub(crate) const NOBODY: [&str; 4] = [
    "No tcpx session of this user runs on this machine.",
    "Sessions appear by themselves: start an application that uses tcpx, or `tcpx bench`.",
    "Not shown: sessions with TCPX_TOP=off, of other users (unless you are root), and in",
    "containers that have a /tmp and a $XDG_RUNTIME_DIR of their own.",
];

const HELP: [(&str, &str); 7] = [
    ("↑ ↓ j k", "select a row; PgUp, PgDn, Home and End too"),
    (
        "Enter →",
        "go into a session's peers, then into a peer's lanes",
    ),
    ("Esc ←", "go back"),
    ("s", "order by the next of rate, name, in flight, retries"),
    ("r", "reverse the order"),
    ("? h", "this help; any key ends it"),
    ("q Ctrl-C", "quit"),
];

const WORDS: [&str; 6] = [
    "FLIGHT    transfers that were posted and have not ended; for a lane, bytes",
    "RETRIES   chunks that were moved again because their lane was lost",
    "FAILOVER  streams of lanes that were lost while their connection stayed up",
    "FAILED    transfers that have failed",
    "RESENT    segments that the kernel has sent again",
    "limits    what keeps the session, or the peer, from being faster",
];

/// The look of the screen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Theme {
    /// Whether colours may be used.
    pub(crate) colour: bool,
}

impl Theme {
    fn bad(self) -> Style {
        match self.colour {
            true => Style::new().fg(Color::Yellow),
            false => Style::new().add_modifier(Modifier::BOLD),
        }
    }
}

/// Draws everything.
pub(crate) fn draw(frame: &mut Frame<'_>, app: &App, theme: Theme) {
    let rows = app.rows();
    let selected = app.selected(&rows);
    let details = selected.map(|at| rows[at].details.as_slice());
    let below = details.map_or(0, |details| details.len() as u16);
    let parts = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(3),
        Constraint::Length(below),
        Constraint::Length(1),
    ]);
    let [head, body, detail, foot] = parts.areas(frame.area());
    frame.render_widget(headline(app), head);
    if app.report.sessions.is_empty() {
        let lines: Vec<Line<'_>> = NOBODY.iter().map(|line| Line::from(*line)).collect();
        let text = Paragraph::new(lines).wrap(Wrap { trim: true });
        frame.render_widget(text.block(Block::bordered()), body);
    } else {
        let mut state = TableState::new().with_selected(selected);
        let table = table(app, &rows, body.width, theme);
        frame.render_stateful_widget(table, body, &mut state);
    }
    let lines = details.unwrap_or_default().iter().map(|(word, text)| {
        let style = match *word {
            "slow" => theme.bad(),
            _ => Style::new(),
        };
        let word = Span::styled(format!(" {word:8}"), Modifier::BOLD);
        Line::from(vec![word, Span::styled(text.as_str(), style)])
    });
    frame.render_widget(Paragraph::new(lines.collect::<Vec<_>>()), detail);
    frame.render_widget(footline(app, theme), foot);
    if app.shows_help {
        help(frame);
    }
}

fn headline(app: &App) -> Line<'static> {
    let report = &app.report;
    let (sent, received) = report.sessions.iter().fold((0.0, 0.0), |(sent, got), one| {
        let figures = &one.figures;
        let (out, back) = (
            figures.sent_bytes_per_second,
            figures.received_bytes_per_second,
        );
        (sent + out, got + back)
    });
    let (sessions, processes) = (report.sessions.len(), report.processes());
    let processes = match processes {
        1 => "1 process".into(),
        more => format!("{more} processes"),
    };
    let text = format!(
        "   {} in {processes}   sent {}   received {}",
        count(sessions, "session"),
        speed(sent),
        speed(received)
    );
    Line::from(vec![
        Span::styled(" tcpx top", Modifier::BOLD),
        Span::raw(text),
    ])
}

fn footline(app: &App, theme: Theme) -> Line<'static> {
    if let Some(silent) = app.report.silent.first() {
        let more = match app.report.silent.len() {
            1 => String::new(),
            all => format!(" ({} more)", all - 1),
        };
        let text = format!(" Process {}: {}{more}", silent.pid, silent.reason);
        return Line::styled(text, theme.bad());
    }
    let arrow = if app.is_reversed { "↑" } else { "↓" };
    let into = match app.level {
        Level::Sessions => "Enter peers",
        Level::Peers(_) => "Enter lanes  Esc back",
        Level::Lanes(..) => "Esc back",
    };
    let sort = app.sort.word();
    Line::styled(
        format!(" q quit  ? help  {into}  s sort: {sort} {arrow}  r reverse"),
        Modifier::DIM,
    )
}

fn table<'a>(app: &App, rows: &'a [AppRow], width: u16, theme: Theme) -> Table<'a> {
    let columns = columns(app.columns(), rows, width);
    let header = columns.iter().map(|column| Cell::from(column.name));
    let widths = columns.iter().map(|column| match column.is_flexible() {
        true => Constraint::Max(column.width),
        false => Constraint::Length(column.width),
    });
    let widths: Vec<_> = widths.collect();
    let header = Row::new(header.collect::<Vec<_>>());
    let rows = rows.iter().map(|row| {
        let cells = columns.iter().map(|column| row.cells[column.at].as_str());
        let style = if row.is_bad {
            theme.bad()
        } else {
            Style::new()
        };
        Row::new(cells.collect::<Vec<_>>()).style(style)
    });
    let title = match &app.level {
        Level::Sessions => " Sessions ".into(),
        Level::Peers(key) => match app.session(key) {
            Some(session) => format!(" {} (process {}) ▸ peers ", session.name, session.pid),
            None => String::new(),
        },
        Level::Lanes(key, peer) => match app.session(key) {
            Some(session) => format!(" {} ▸ {peer} ▸ lanes ", session.name),
            None => String::new(),
        },
    };
    Table::new(rows.collect::<Vec<_>>(), widths)
        .header(header.style(Modifier::BOLD))
        .row_highlight_style(Modifier::REVERSED)
        .column_spacing(1)
        .block(Block::bordered().title(title))
}

/// One column of the table.
struct Column {
    /// The position among all columns.
    at: usize,
    name: &'static str,
    /// The width of the longest text.
    width: u16,
}

impl Column {
    /// Returns whether the column may be cut on a narrow screen: names and paths may.
    fn is_flexible(&self) -> bool {
        matches!(self.name, "SESSION" | "PEER" | "PATH")
    }

    /// Returns the smallest useful width.
    fn least(&self) -> u16 {
        match self.is_flexible() {
            true => self.width.min(12),
            false => self.width,
        }
    }
}

/// Chooses the columns that a screen of this width has room for.
fn columns(names: &[&'static str], rows: &[AppRow], width: u16) -> Vec<Column> {
    /// The columns to leave out on a narrow screen, in this order; the line of counts repeats most.
    const LESS: [&str; 9] = [
        "FAILED",
        "FAILOVER",
        "PEERS",
        "STATE",
        "LANES",
        "RETRIES",
        "RESENT",
        "ROUND TRIP",
        "LAST MINUTE",
    ];
    let column = |(at, name): (usize, &&'static str)| {
        let cells = rows.iter().map(|row| row.cells[at].chars().count());
        let most = cells.max().unwrap_or(0).max(name.len());
        Column {
            at,
            name,
            width: u16::try_from(most).unwrap_or(u16::MAX).min(48),
        }
    };
    let mut columns: Vec<_> = names.iter().enumerate().map(column).collect();
    for less in LESS {
        let needed: u16 = columns.iter().map(|column| column.least() + 1).sum();
        // The border takes two, and the last column needs no space after it.
        if needed < width {
            break;
        }
        columns.retain(|column| column.name != less);
    }
    columns
}

fn help(frame: &mut Frame<'_>) {
    let keys = HELP.iter().map(|(key, what)| {
        let key = Span::styled(format!(" {key:10}"), Modifier::BOLD);
        Line::from(vec![key, Span::raw(*what)])
    });
    let words = WORDS.iter().map(|word| Line::from(format!(" {word}")));
    let lines: Vec<_> = keys.chain([Line::default()]).chain(words).collect();
    let (width, height) = (80, lines.len() as u16 + 2);
    let all = frame.area();
    let area = Rect {
        x: all.width.saturating_sub(width) / 2,
        y: all.height.saturating_sub(height) / 2,
        width: width.min(all.width),
        height: height.min(all.height),
    };
    frame.render_widget(Clear, area);
    let text = Paragraph::new(lines).block(Block::bordered().title(" Help "));
    frame.render_widget(text, area);
}

#[cfg(test)]
mod tests;
