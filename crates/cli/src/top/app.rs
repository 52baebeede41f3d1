//! The state of the screen, and how keys change it.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::report::{Figures, Lane, Peer, Report, Session, plot, speed};

/// The level of detail of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Level {
    /// All sessions.
    Sessions,
    /// The peers of the session with this key.
    Peers(String),
    /// The lanes of a peer, by the keys of the session and the peer.
    Lanes(String, String),
}

/// The order of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    Rate,
    Name,
    InFlight,
    Retries,
}

impl Sort {
    const ALL: [Self; 4] = [Self::Rate, Self::Name, Self::InFlight, Self::Retries];

    /// Returns the word on the screen.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Rate => "rate",
            Self::Name => "name",
            Self::InFlight => "in flight",
            Self::Retries => "retries",
        }
    }

    fn next(self) -> Self {
        let at = Self::ALL.iter().position(|sort| *sort == self);
        Self::ALL[at.map_or(0, |at| (at + 1) % Self::ALL.len())]
    }
}

/// One row of the table.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    /// Identifies the row for as long as it exists.
    pub(crate) key: String,
    /// One text for each column of [`App::columns`].
    pub(crate) cells: Vec<String>,
    /// Whether something is slow, down or not connected.
    pub(crate) is_bad: bool,
    /// Lines that describe the row while it is selected: a word and a text.
    pub(crate) details: Vec<(&'static str, String)>,
    order: Order,
}

#[derive(Debug, Clone, PartialEq)]
struct Order {
    rate: f64,
    name: String,
    in_flight: u64,
    retries: u64,
}

/// The state of the screen.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) report: Report,
    pub(crate) level: Level,
    pub(crate) sort: Sort,
    pub(crate) is_reversed: bool,
    pub(crate) shows_help: bool,
    pub(crate) is_over: bool,
    /// The key of the selected row.
    selected: Option<String>,
    /// The keys of the rows that lead to the current level.
    entered: Vec<String>,
}

impl Default for App {
    fn default() -> Self {
        Self {
            report: Report::default(),
            level: Level::Sessions,
            sort: Sort::Rate,
            is_reversed: false,
            shows_help: false,
            is_over: false,
            selected: None,
            entered: Vec::new(),
        }
    }
}

impl App {
    /// Shows a new report. Leaves the view of a session or peer that is gone.
    pub(crate) fn update(&mut self, report: Report) {
        self.report = report;
        if let Level::Lanes(session, peer) = &self.level
            && self.peer(session, peer).is_none()
        {
            self.leave();
        }
        if let Level::Peers(session) = &self.level
            && self.session(session).is_none()
        {
            self.leave();
        }
    }

    pub(crate) fn session(&self, key: &str) -> Option<&Session> {
        let mut sessions = self.report.sessions.iter();
        sessions.find(|session| session_key(session) == key)
    }

    pub(crate) fn peer(&self, session: &str, peer: &str) -> Option<&Peer> {
        let session = self.session(session)?;
        session.peers.iter().find(|one| one.name == peer)
    }

    /// Returns the headings of the table.
    pub(crate) fn columns(&self) -> &'static [&'static str] {
        match self.level {
            Level::Sessions => &[
                "PID",
                "SESSION",
                "PEERS",
                "PATH",
                "SENT",
                "RECEIVED",
                "LAST MINUTE",
                "FLIGHT",
                "RETRIES",
                "FAILOVER",
                "FAILED",
            ],
            Level::Peers(_) => &[
                "PEER",
                "STATE",
                "LANES",
                "PATH",
                "SENT",
                "RECEIVED",
                "LAST MINUTE",
                "FLIGHT",
                "RETRIES",
                "FAILOVER",
                "FAILED",
            ],
            Level::Lanes(..) => &[
                "LANE",
                "LOCAL",
                "REMOTE",
                "NIC",
                "SENT",
                "RECEIVED",
                "FLIGHT",
                "ROUND TRIP",
                "RESENT",
                "FAILOVER",
            ],
        }
    }

    /// Returns the rows in order.
    pub(crate) fn rows(&self) -> Vec<Row> {
        let mut rows: Vec<Row> = match &self.level {
            Level::Sessions => self.report.sessions.iter().map(session_row).collect(),
            Level::Peers(key) => {
                let peers = self.session(key).map(|session| &session.peers);
                peers.into_iter().flatten().map(peer_row).collect()
            }
            Level::Lanes(session, peer) => {
                let lanes = self.peer(session, peer).map(|peer| &peer.lanes);
                lanes.into_iter().flatten().map(lane_row).collect()
            }
        };
        rows.sort_by(|a, b| {
            let (a, b) = (&a.order, &b.order);
            let order = match self.sort {
                Sort::Rate => b.rate.total_cmp(&a.rate),
                Sort::Name => a.name.cmp(&b.name),
                Sort::InFlight => b.in_flight.cmp(&a.in_flight),
                Sort::Retries => b.retries.cmp(&a.retries),
            };
            let order = if self.is_reversed {
                order.reverse()
            } else {
                order
            };
            order.then_with(|| a.name.cmp(&b.name))
        });
        rows
    }

    /// Returns the position of the selected row; the first if none is selected.
    pub(crate) fn selected(&self, rows: &[Row]) -> Option<usize> {
        let is_selected = |row: &Row| Some(&row.key) == self.selected.as_ref();
        let found = rows.iter().position(is_selected);
        found.or((!rows.is_empty()).then_some(0))
    }

    /// Handles a key.
    pub(crate) fn press(&mut self, key: KeyEvent) {
        if self.shows_help {
            self.shows_help = false;
            // Any key closes the help; these also end the program.
            if key.code != KeyCode::Char('q') && !is_interrupt(key) {
                return;
            }
        }
        match key.code {
            _ if is_interrupt(key) => self.is_over = true,
            KeyCode::Char('q') => self.is_over = true,
            KeyCode::Char('?' | 'h') => self.shows_help = true,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.is_reversed = !self.is_reversed,
            KeyCode::Down | KeyCode::Char('j') => self.step(1),
            KeyCode::Up | KeyCode::Char('k') => self.step(-1),
            KeyCode::PageDown => self.step(10),
            KeyCode::PageUp => self.step(-10),
            KeyCode::Home => self.step(isize::MIN),
            KeyCode::End => self.step(isize::MAX),
            KeyCode::Enter | KeyCode::Right => self.enter(),
            KeyCode::Esc | KeyCode::Backspace | KeyCode::Left => self.leave(),
            _ => {}
        }
    }

    fn step(&mut self, by: isize) {
        let rows = self.rows();
        let Some(at) = self.selected(&rows) else {
            return;
        };
        let at = at.saturating_add_signed(by).min(rows.len() - 1);
        self.selected = Some(rows[at].key.clone());
    }

    fn enter(&mut self) {
        let rows = self.rows();
        let Some(at) = self.selected(&rows) else {
            return;
        };
        let key = rows[at].key.clone();
        self.level = match &self.level {
            Level::Sessions => Level::Peers(key.clone()),
            Level::Peers(session) => Level::Lanes(session.clone(), key.clone()),
            Level::Lanes(..) => return,
        };
        self.entered.push(key);
        self.selected = None;
    }

    fn leave(&mut self) {
        self.level = match &self.level {
            Level::Sessions => return,
            Level::Peers(_) => Level::Sessions,
            Level::Lanes(session, _) => Level::Peers(session.clone()),
        };
        self.selected = self.entered.pop();
    }
}

fn is_interrupt(key: KeyEvent) -> bool {
    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL)
}

fn session_key(session: &Session) -> String {
    format!("{}/{}", session.process, session.id)
}

/// Returns the cells of a session or peer: path, rates, plot and counts follow the first three.
fn cells(first: [String; 3], figures: &Figures) -> Vec<String> {
    let mut cells = Vec::from(first);
    cells.extend([
        figures.path.clone(),
        speed(figures.sent_bytes_per_second),
        speed(figures.received_bytes_per_second),
        plot(&figures.last_minute),
        figures.transfers_in_flight.to_string(),
        figures.retried_chunks.to_string(),
        figures.failovers.to_string(),
        figures.transfers_failed.to_string(),
    ]);
    cells
}

fn details(figures: &Figures) -> Vec<(&'static str, String)> {
    let mut details = vec![(
        "limits",
        figures
            .limit
            .clone()
            .unwrap_or_else(|| "nothing is being moved".into()),
    )];
    details.extend(figures.slow.clone().map(|slow| ("slow", slow)));
    let Figures {
        transfers_in_flight,
        transfers_failed,
        retried_chunks,
        failovers,
        ..
    } = figures;
    let counts = format!(
        "{transfers_in_flight} in flight, {retried_chunks} retries, {failovers} failovers, \
         {transfers_failed} failed"
    );
    details.push(("counts", counts));
    details
}

fn order(figures: &Figures, name: &str) -> Order {
    Order {
        rate: figures.rate(),
        name: name.to_owned(),
        in_flight: figures.transfers_in_flight,
        retries: figures.retried_chunks + figures.failovers,
    }
}

fn session_row(session: &Session) -> Row {
    let first = [
        session.pid.to_string(),
        session.name.clone(),
        session.peers.len().to_string(),
    ];
    let mut details = details(&session.figures);
    let version = &session.version;
    details.insert(
        0,
        ("program", format!("{} (tcpx {version})", session.command)),
    );
    Row {
        key: session_key(session),
        cells: cells(first, &session.figures),
        is_bad: session.figures.slow.is_some(),
        details,
        order: order(&session.figures, &session.name),
    }
}

fn peer_row(peer: &Peer) -> Row {
    let state = match peer.is_connected {
        true => "connected",
        false => "not connected",
    };
    let up = peer.lanes.iter().filter(|lane| lane.is_up).count();
    let lanes = match up == peer.lanes.len() {
        true => up.to_string(),
        false => format!("{up} of {}", peer.lanes.len()),
    };
    Row {
        key: peer.name.clone(),
        cells: cells([peer.name.clone(), state.into(), lanes], &peer.figures),
        is_bad: peer.figures.slow.is_some(),
        details: details(&peer.figures),
        order: order(&peer.figures, &peer.name),
    }
}

fn lane_row(lane: &Lane) -> Row {
    let interface = lane.interface.clone();
    let round_trip = tcpx_bench::units::seconds(lane.round_trip_seconds);
    Row {
        key: lane.index.to_string(),
        cells: vec![
            lane.index.to_string(),
            lane.local.clone(),
            lane.remote.clone(),
            interface.unwrap_or_else(|| "-".into()),
            speed(lane.sent_bytes_per_second),
            speed(lane.received_bytes_per_second),
            tcpx_bench::units::bytes(lane.bytes_in_flight),
            round_trip,
            lane.retransmits.to_string(),
            lane.failovers.to_string(),
        ],
        is_bad: lane.slow.is_some(),
        details: match &lane.slow {
            Some(slow) => vec![("slow", slow.clone())],
            None => Vec::new(),
        },
        order: Order {
            rate: lane.rate(),
            name: format!("{:05}", lane.index),
            in_flight: lane.bytes_in_flight,
            retries: lane.retransmits,
        },
    }
}
