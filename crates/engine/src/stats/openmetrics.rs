//! Statistics as OpenMetrics text, which Prometheus and others scrape.

use std::fmt::{Display, Write};
use std::time::Duration;

use super::data::{
    Histogram, LaneStats, PathKind, PeerStats, SessionStats, SizeClass, TransferKind,
};
use super::failures::Failures;
use crate::config::TransportKind;

/// Writes the statistics of sessions as OpenMetrics 1.0 text.
///
/// Each sample has the label `session`, and `peer` if it belongs to one. Peers that went away long
/// ago are summed up as one with an empty name. That sum grows by all counts of a peer at once, so
/// leave it out of rates. Paths and size classes that were never used have no samples.
#[must_use]
pub fn openmetrics(sessions: &[SessionStats]) -> String {
    let mut out = Page::default();
    let sessions = with_labels(sessions);
    let peers: Vec<Labelled<'_>> = sessions.iter().flat_map(peers_of).collect();
    let lanes: Vec<_> = peers.iter().flat_map(lanes_of).collect();
    out.family("tcpx_build", "info", None, "The version of tcpx.");
    let version = env!("CARGO_PKG_VERSION");
    out.sample("tcpx_build_info", &format!("version=\"{version}\""), "", 1);
    routes(&mut out, &peers);
    traffic(&mut out, &peers);
    transfers(&mut out, &peers);
    latency(&mut out, &peers);
    events(&mut out, &peers);
    connections(&mut out, &peers);
    let what = "Times that a payload had to wait for a pinned slot.";
    out.family("tcpx_slot_waits", "counter", None, what);
    for (labels, session) in &sessions {
        out.sample("tcpx_slot_waits_total", labels, "", session.slot_waits);
    }
    lane_gauges(&mut out, &lanes);
    kernel(&mut out, &lanes);
    out.text.push_str("# EOF\n");
    out.text
}

/// The text that is being written.
#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn family(&mut self, name: &str, kind: &str, unit: Option<&str>, help: &str) {
        let _ = writeln!(self.text, "# TYPE {name} {kind}");
        if let Some(unit) = unit {
            let _ = writeln!(self.text, "# UNIT {name} {unit}");
        }
        let _ = writeln!(self.text, "# HELP {name} {help}");
    }

    /// Writes a sample; `more` labels begin with a comma.
    fn sample(&mut self, name: &str, labels: &str, more: &str, value: impl Display) {
        self.text.push_str(name);
        self.text.push('{');
        self.text.push_str(labels);
        self.text.push_str(more);
        self.text.push_str("} ");
        let _ = writeln!(self.text, "{value}");
    }
}

/// A peer, and the labels of its samples.
type Labelled<'a> = (String, &'a PeerStats);

/// Escapes a label's value.
fn escaped(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    for char in value.chars() {
        match char {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            char => out.push(char),
        }
    }
    out
}

/// Gives each session a label of its own, even if several sessions have the same name.
fn with_labels(sessions: &[SessionStats]) -> Vec<(String, &SessionStats)> {
    let label = |(index, session): (usize, &SessionStats)| {
        let earlier = sessions[..index].iter();
        let name = escaped(&session.name);
        match earlier.filter(|other| other.name == session.name).count() {
            0 => format!("session=\"{name}\""),
            others => format!("session=\"{name}#{}\"", others + 1),
        }
    };
    let sessions = sessions.iter();
    sessions
        .clone()
        .enumerate()
        .map(label)
        .zip(sessions)
        .collect()
}

fn peers_of<'a>((labels, session): &(String, &'a SessionStats)) -> Vec<Labelled<'a>> {
    let all = session.all();
    all.map(|peer| (format!("{labels},peer=\"{}\"", escaped(&peer.name)), peer))
        .collect()
}

fn lanes_of<'a>((labels, peer): &Labelled<'a>) -> Vec<(String, &'a LaneStats)> {
    let lanes = peer.lanes.iter();
    lanes
        .map(|lane| {
            let LaneStats {
                index,
                local,
                remote,
                ..
            } = lane;
            let (local, remote) = (local.ip(), remote.ip());
            let own = format!("lane=\"{index}\",local=\"{local}\",remote=\"{remote}\"");
            (format!("{labels},{own}"), lane)
        })
        .collect()
}

fn routes(out: &mut Page, peers: &[Labelled<'_>]) {
    let help = "How payload travels to a connected peer.";
    out.family("tcpx_peer", "info", None, help);
    for (labels, peer) in peers {
        let Some(route) = peer.route else { continue };
        let transport = match route.transport {
            TransportKind::Tcp => "tcp",
            TransportKind::Plugin => "plugin",
        };
        let same_host = route.same_host.label();
        let more = format!(",transport=\"{transport}\",same_host=\"{same_host}\"");
        out.sample("tcpx_peer_info", labels, &more, 1);
    }
}

/// Direction and initiator of moved payload, in the order of the fields of
/// [`Traffic`](super::Traffic).
const SIDES: [(&str, &str); 4] = [
    ("sent", "self"),
    ("received", "self"),
    ("received", "peer"),
    ("sent", "peer"),
];

fn side_labels(path: PathKind, (direction, initiator): (&str, &str)) -> String {
    let path = path.label();
    format!(",path=\"{path}\",direction=\"{direction}\",initiator=\"{initiator}\"")
}

fn traffic(out: &mut Page, peers: &[Labelled<'_>]) {
    let families = [
        ("tcpx_bytes", Some("bytes"), "Payload that is in place."),
        ("tcpx_chunks", None, "Chunks of payload that are in place."),
    ];
    for (name, unit, help) in families {
        out.family(name, "counter", unit, help);
        let total = format!("{name}_total");
        let mores = PathKind::ALL.map(|path| SIDES.map(|side| side_labels(path, side)));
        for (labels, peer) in peers {
            for (path, mores) in PathKind::ALL.into_iter().zip(&mores) {
                let traffic = peer.path(path);
                // In the order of SIDES.
                let sides = [
                    traffic.written,
                    traffic.read,
                    traffic.landed,
                    traffic.served,
                ];
                for (moved, more) in sides.into_iter().zip(mores) {
                    if moved.chunks == 0 && path != PathKind::Stream {
                        continue;
                    }
                    let value = match unit {
                        Some(_) => moved.bytes,
                        None => moved.chunks,
                    };
                    out.sample(&total, labels, more, value);
                }
            }
        }
    }
}

fn transfers(out: &mut Page, peers: &[Labelled<'_>]) {
    type Get = fn(&PeerStats, TransferKind) -> u64;
    let families: [(&str, Option<&str>, &str, Get); 4] = [
        (
            "tcpx_transfers_started",
            None,
            "Transfers that were posted.",
            |peer, kind| peer.transfers(kind).started,
        ),
        (
            "tcpx_transfers_completed",
            None,
            "Transfers that ended as done.",
            |peer, kind| peer.transfers(kind).completed,
        ),
        (
            "tcpx_transfers_aborted",
            None,
            "Transfers that ended as aborted.",
            |peer, kind| peer.transfers(kind).aborted,
        ),
        (
            "tcpx_transferred_bytes",
            Some("bytes"),
            "Bytes of the transfers that ended as done.",
            |peer, kind| peer.transfers(kind).bytes,
        ),
    ];
    for (name, unit, help, get) in families {
        out.family(name, "counter", unit, help);
        let total = format!("{name}_total");
        let mores = TransferKind::ALL.map(|kind| format!(",kind=\"{}\"", kind.label()));
        for (labels, peer) in peers {
            for (kind, more) in TransferKind::ALL.into_iter().zip(&mores) {
                if peer.transfers(kind).started > 0 {
                    out.sample(&total, labels, more, get(peer, kind));
                }
            }
        }
    }
    let help = "Transfers that have failed.";
    out.family("tcpx_transfers_failed", "counter", None, help);
    let mores = Failures::CAUSES.map(|cause| format!(",cause=\"{}\"", Failures::label(cause)));
    for (labels, peer) in peers {
        for (cause, more) in Failures::CAUSES.into_iter().zip(&mores) {
            // Write zeros too: the rate of a series that begins with 1 misses that first failure.
            let count = peer.failures.of(cause);
            out.sample("tcpx_transfers_failed_total", labels, more, count);
        }
    }
    let help = "Transfers that were posted and have not ended.";
    out.family("tcpx_transfers_in_flight", "gauge", None, help);
    for (labels, peer) in peers {
        out.sample("tcpx_transfers_in_flight", labels, "", peer.in_flight());
    }
}

fn latency(out: &mut Page, peers: &[Labelled<'_>]) {
    const NAME: &str = "tcpx_transfer_duration_seconds";
    let help = "Time from the posting of a transfer to its end, of those that ended as done.";
    out.family(NAME, "histogram", Some("seconds"), help);
    let buckets = 0..Histogram::default().counts.len();
    let bounds = buckets.map(|bucket| match Histogram::bound(bucket) {
        Some(bound) => bound.as_secs_f64().to_string(),
        None => "+Inf".into(),
    });
    let bounds: Vec<String> = bounds.collect();
    let sizes = SizeClass::ALL.map(|class| format!(",size=\"{}\"", class.label()));
    // Make the labels once: these samples are the most numerous by far.
    let of_size = |size: &String| {
        let bounds = bounds.iter();
        bounds
            .map(|bound| format!("{size},le=\"{bound}\""))
            .collect()
    };
    let mores: Vec<Vec<String>> = sizes.iter().map(of_size).collect();
    let [bucket, count, sum] = ["bucket", "count", "sum"].map(|part| format!("{NAME}_{part}"));
    for (labels, peer) in peers {
        for ((histogram, size), mores) in peer.latency.iter().zip(&sizes).zip(&mores) {
            if histogram.count() == 0 {
                continue;
            }
            let mut seen = 0;
            for (more, within) in mores.iter().zip(histogram.counts) {
                seen += within;
                out.sample(&bucket, labels, more, seen);
            }
            out.sample(&count, labels, size, seen);
            let seconds = Duration::from_nanos(histogram.nanos).as_secs_f64();
            out.sample(&sum, labels, size, seconds);
        }
    }
}

fn events(out: &mut Page, peers: &[Labelled<'_>]) {
    type Notices = fn(&PeerStats) -> [u64; 2];
    let families: [(&str, Option<&str>, &str, Notices); 2] = [
        (
            "tcpx_notifications",
            None,
            "Notifications, each once.",
            |p| [p.notifications_sent.count, p.notifications_received.count],
        ),
        (
            "tcpx_notification_bytes",
            Some("bytes"),
            "Bytes of notifications.",
            |p| [p.notifications_sent.bytes, p.notifications_received.bytes],
        ),
    ];
    for (name, unit, help, get) in families {
        out.family(name, "counter", unit, help);
        let total = format!("{name}_total");
        for (labels, peer) in peers {
            let directions = [",direction=\"sent\"", ",direction=\"received\""];
            for (more, value) in directions.into_iter().zip(get(peer)) {
                out.sample(&total, labels, more, value);
            }
        }
    }
    let help = "Times that lanes had to wait: for the window, the socket, or the application.";
    out.family("tcpx_waits", "counter", None, help);
    for (labels, peer) in peers {
        let waits = [
            (",for=\"window\"", peer.waits.window),
            (",for=\"socket\"", peer.waits.socket),
            (",for=\"room\"", peer.waits.room),
        ];
        for (more, count) in waits {
            out.sample("tcpx_waits_total", labels, more, count);
        }
    }
}

fn connections(out: &mut Page, peers: &[Labelled<'_>]) {
    type Get = fn(&PeerStats) -> u64;
    let counters: [(&str, Option<&str>, &str, Get); 6] = [
        (
            "tcpx_retried_chunks",
            None,
            "Chunks that were moved again after their lane was lost.",
            |p| p.retried.chunks,
        ),
        (
            "tcpx_retried_bytes",
            Some("bytes"),
            "Bytes that were moved again after their lane was lost.",
            |p| p.retried.bytes,
        ),
        (
            "tcpx_connections",
            None,
            "Connections that were made.",
            |p| p.connections,
        ),
        (
            "tcpx_connections_lost",
            None,
            "Connections that have ended.",
            |p| p.connections_lost,
        ),
        (
            "tcpx_lanes_lost",
            None,
            "Streams that were lost while their connection went on.",
            |p| p.lanes_lost,
        ),
        (
            "tcpx_lanes_rejoined",
            None,
            "Streams that have taken the place of lost ones.",
            |p| p.lanes_rejoined,
        ),
    ];
    for (name, unit, help, get) in counters {
        out.family(name, "counter", unit, help);
        let total = format!("{name}_total");
        for (labels, peer) in peers {
            out.sample(&total, labels, "", get(peer));
        }
    }
    let gauges: [(&str, Option<&str>, &str, Get); 3] = [
        (
            "tcpx_connected",
            None,
            "Whether a connection is there.",
            |p| p.is_connected.into(),
        ),
        ("tcpx_lanes", None, "Lanes that have a stream.", |p| {
            p.lanes.iter().filter(|lane| lane.is_up).count() as u64
        }),
        (
            "tcpx_queued_message_bytes",
            Some("bytes"),
            "Bytes of messages that were sent and that the peer may not have.",
            |p| p.queued_bytes,
        ),
    ];
    for (name, unit, help, get) in gauges {
        out.family(name, "gauge", unit, help);
        for (labels, peer) in peers {
            out.sample(name, labels, "", get(peer));
        }
    }
}

fn lane_gauges(out: &mut Page, lanes: &[(String, &LaneStats)]) {
    type Get = fn(&LaneStats) -> u64;
    let gauges: [(&str, Option<&str>, &str, Get); 3] = [
        (
            "tcpx_lane_up",
            None,
            "Whether the lane has a stream.",
            |l| l.is_up.into(),
        ),
        (
            "tcpx_lane_in_flight_bytes",
            Some("bytes"),
            "Bytes of this session's chunks in flight on the lane.",
            |l| l.in_flight,
        ),
        (
            "tcpx_lane_queued_transfers",
            None,
            "Transfers with chunks that wait for their turn on the lane.",
            |l| l.queued as u64,
        ),
    ];
    for (name, unit, help, get) in gauges {
        out.family(name, "gauge", unit, help);
        for (labels, lane) in lanes {
            out.sample(name, labels, "", get(lane));
        }
    }
    let help = "Times that the lane's stream was replaced, in this connection.";
    out.family("tcpx_lane_failovers", "counter", None, help);
    for (labels, lane) in lanes {
        let name = "tcpx_lane_failovers_total";
        out.sample(name, labels, "", lane.failovers);
    }
    let help = "Bytes on the lane's stream, framing included.";
    out.family("tcpx_lane_wire_bytes", "counter", Some("bytes"), help);
    for (labels, lane) in lanes {
        let name = "tcpx_lane_wire_bytes_total";
        out.sample(name, labels, ",direction=\"sent\"", lane.wire_sent);
        out.sample(name, labels, ",direction=\"received\"", lane.wire_received);
    }
}

fn kernel(out: &mut Page, lanes: &[(String, &LaneStats)]) {
    type Get = fn(&super::KernelStats) -> f64;
    let families: [(&str, &str, Option<&str>, &str, Get); 10] = [
        (
            "tcpx_lane_rtt_seconds",
            "gauge",
            Some("seconds"),
            "The kernel's smoothed round trip.",
            |k| k.rtt.as_secs_f64(),
        ),
        (
            "tcpx_lane_rtt_variation_seconds",
            "gauge",
            Some("seconds"),
            "How much the round trip varies.",
            |k| k.rtt_var.as_secs_f64(),
        ),
        (
            "tcpx_lane_delivery_rate_bytes_per_second",
            "gauge",
            Some("bytes_per_second"),
            "The rate at which the peer received lately.",
            |k| k.delivery_rate as f64,
        ),
        (
            "tcpx_lane_app_limited",
            "gauge",
            None,
            "Whether the delivery rate was limited by the application, which had little to send.",
            |k| f64::from(u8::from(k.is_app_limited)),
        ),
        (
            "tcpx_lane_congestion_window_bytes",
            "gauge",
            Some("bytes"),
            "The congestion window.",
            |k| k.congestion_window as f64,
        ),
        (
            "tcpx_lane_send_window_bytes",
            "gauge",
            Some("bytes"),
            "The peer's receive window.",
            |k| k.send_window as f64,
        ),
        (
            "tcpx_lane_retransmits",
            "counter",
            None,
            "Segments that were sent again.",
            |k| k.retransmits as f64,
        ),
        (
            "tcpx_lane_busy_seconds",
            "counter",
            Some("seconds"),
            "Time that the lane had something to send.",
            |k| k.busy.as_secs_f64(),
        ),
        (
            "tcpx_lane_receiver_limited_seconds",
            "counter",
            Some("seconds"),
            "Time that the lane had something to send and the peer's receive window was full.",
            |k| k.receiver_limited.as_secs_f64(),
        ),
        (
            "tcpx_lane_buffer_limited_seconds",
            "counter",
            Some("seconds"),
            "Time that the lane had something to send and its send buffer was too small.",
            |k| k.buffer_limited.as_secs_f64(),
        ),
    ];
    for (name, kind, unit, help, get) in families {
        out.family(name, kind, unit, help);
        let suffix = if kind == "counter" { "_total" } else { "" };
        let name = format!("{name}{suffix}");
        for (labels, lane) in lanes {
            if let Some(kernel) = &lane.kernel {
                out.sample(&name, labels, "", get(kernel));
            }
        }
    }
}

#[cfg(test)]
mod tests;
