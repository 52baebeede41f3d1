//! Converts statistics into plain dictionaries.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tcpx::stats::{
    Failures, Histogram, KernelStats, LaneStats, LaneWaits, Moved, Notified, PathKind, SizeClass,
    Traffic, TransferKind,
};
use tcpx::{PeerStats, SessionStats};

type Dict<'py> = PyResult<Bound<'py, PyDict>>;

/// Creates a dictionary of numbers.
fn numbers<'py>(py: Python<'py>, items: &[(&str, u64)]) -> Dict<'py> {
    let dict = PyDict::new(py);
    for (key, value) in items {
        dict.set_item(key, value)?;
    }
    Ok(dict)
}

fn moved<'py>(py: Python<'py>, moved: Moved) -> Dict<'py> {
    numbers(py, &[("chunks", moved.chunks), ("bytes", moved.bytes)])
}

fn notified<'py>(py: Python<'py>, all: Notified) -> Dict<'py> {
    numbers(py, &[("count", all.count), ("bytes", all.bytes)])
}

fn traffic<'py>(py: Python<'py>, traffic: Traffic) -> Dict<'py> {
    let dict = PyDict::new(py);
    dict.set_item("written", moved(py, traffic.written)?)?;
    dict.set_item("read", moved(py, traffic.read)?)?;
    dict.set_item("landed", moved(py, traffic.landed)?)?;
    dict.set_item("served", moved(py, traffic.served)?)?;
    Ok(dict)
}

fn paths<'py>(py: Python<'py>, all: &[Traffic]) -> Dict<'py> {
    let dict = PyDict::new(py);
    for (path, found) in PathKind::ALL.iter().zip(all) {
        dict.set_item(path.label(), traffic(py, *found)?)?;
    }
    Ok(dict)
}

fn waits<'py>(py: Python<'py>, waits: LaneWaits) -> Dict<'py> {
    let LaneWaits {
        window,
        socket,
        room,
    } = waits;
    numbers(
        py,
        &[("window", window), ("socket", socket), ("room", room)],
    )
}

fn histogram<'py>(py: Python<'py>, histogram: &Histogram) -> Dict<'py> {
    let dict = numbers(py, &[("count", histogram.count())])?;
    dict.set_item("sum_seconds", histogram.nanos as f64 * 1e-9)?;
    let buckets = histogram.counts.iter().enumerate().map(|(bucket, count)| {
        let bound = Histogram::bound(bucket);
        (
            bound.map_or(f64::INFINITY, |bound| bound.as_secs_f64()),
            *count,
        )
    });
    dict.set_item("buckets", buckets.collect::<Vec<_>>())?;
    Ok(dict)
}

fn kernel<'py>(py: Python<'py>, kernel: &KernelStats) -> Dict<'py> {
    let dict = numbers(
        py,
        &[
            ("retransmits", kernel.retransmits),
            ("retransmitted_bytes", kernel.retransmitted_bytes),
            ("delivery_rate", kernel.delivery_rate),
            ("congestion_window", kernel.congestion_window),
            ("send_window", kernel.send_window),
            ("receive_space", kernel.receive_space),
            ("in_flight", kernel.in_flight),
            ("not_sent", kernel.not_sent),
        ],
    )?;
    dict.set_item("app_limited", kernel.is_app_limited)?;
    let times = [
        ("rtt", kernel.rtt),
        ("rtt_var", kernel.rtt_var),
        ("min_rtt", kernel.min_rtt),
        ("busy", kernel.busy),
        ("receiver_limited", kernel.receiver_limited),
        ("buffer_limited", kernel.buffer_limited),
    ];
    for (key, time) in times {
        dict.set_item(format!("{key}_seconds"), time.as_secs_f64())?;
    }
    Ok(dict)
}

fn lane<'py>(py: Python<'py>, lane: &LaneStats) -> Dict<'py> {
    let dict = numbers(
        py,
        &[
            ("index", lane.index as u64),
            ("failovers", lane.failovers.into()),
            ("wire_sent", lane.wire_sent),
            ("wire_received", lane.wire_received),
            ("in_flight", lane.in_flight),
            ("queued", lane.queued as u64),
        ],
    )?;
    dict.set_item("local", lane.local.to_string())?;
    dict.set_item("remote", lane.remote.to_string())?;
    dict.set_item("up", lane.is_up)?;
    dict.set_item("paths", paths(py, &lane.traffic)?)?;
    dict.set_item("waits", waits(py, lane.waits)?)?;
    if let Some(found) = &lane.kernel {
        dict.set_item("kernel", kernel(py, found)?)?;
    }
    Ok(dict)
}

fn peer<'py>(py: Python<'py>, peer: &PeerStats) -> Dict<'py> {
    let dict = numbers(
        py,
        &[
            ("in_flight", peer.in_flight()),
            ("connections", peer.connections),
            ("connections_lost", peer.connections_lost),
            ("lanes_lost", peer.lanes_lost),
            ("lanes_rejoined", peer.lanes_rejoined),
            ("queued_bytes", peer.queued_bytes),
        ],
    )?;
    dict.set_item("connected", peer.is_connected)?;
    let same_host = peer.route.map(|route| route.same_host.label());
    dict.set_item("same_host", same_host)?;
    let transfers = PyDict::new(py);
    for kind in TransferKind::ALL {
        let found = peer.transfers(kind);
        let found = [
            ("started", found.started),
            ("completed", found.completed),
            ("bytes", found.bytes),
            ("aborted", found.aborted),
        ];
        transfers.set_item(kind.label(), numbers(py, &found)?)?;
    }
    dict.set_item("transfers", transfers)?;
    let causes = Failures::CAUSES.map(|cause| (Failures::label(cause), peer.failures.of(cause)));
    let failed: Vec<_> = causes.into_iter().filter(|(_, count)| *count > 0).collect();
    dict.set_item("failed", numbers(py, &failed)?)?;
    let latency = PyDict::new(py);
    for (class, found) in SizeClass::ALL.iter().zip(&peer.latency) {
        latency.set_item(class.label(), histogram(py, found)?)?;
    }
    dict.set_item("latency", latency)?;
    dict.set_item("paths", paths(py, &peer.traffic)?)?;
    dict.set_item("retried", moved(py, peer.retried)?)?;
    dict.set_item("notifications_sent", notified(py, peer.notifications_sent)?)?;
    let received = notified(py, peer.notifications_received)?;
    dict.set_item("notifications_received", received)?;
    dict.set_item("waits", waits(py, peer.waits)?)?;
    let lanes: PyResult<Vec<_>> = peer.lanes.iter().map(|found| lane(py, found)).collect();
    dict.set_item("lanes", PyList::new(py, lanes?)?)?;
    Ok(dict)
}

/// Creates a dictionary of a session's statistics.
pub(super) fn session<'py>(py: Python<'py>, stats: &SessionStats) -> Dict<'py> {
    let dict = numbers(py, &[("slot_waits", stats.slot_waits)])?;
    dict.set_item("session", &stats.name)?;
    let peers = PyDict::new(py);
    for found in &stats.peers {
        peers.set_item(&found.name, peer(py, found)?)?;
    }
    dict.set_item("peers", peers)?;
    dict.set_item("gone", peer(py, &stats.gone)?)?;
    Ok(dict)
}
