//! Statistics as lines for people.

use std::fmt;

use super::data::{PathKind, PeerStats, SessionStats, SizeClass, TransferKind};

/// Writes bytes for people, such as `1.5 GiB`.
fn bytes(count: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = count as f64;
    let mut unit = "B";
    for next in units {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    match unit {
        "B" => format!("{count} B"),
        unit => format!("{value:.1} {unit}"),
    }
}

/// Prints one block of lines: the session, then each peer.
impl fmt::Display for SessionStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (total, in_flight) = (self.total(), self.in_flight());
        writeln!(
            f,
            "session {}: sent {}, received {}, {in_flight} transfers in flight",
            self.name,
            bytes(total.sent().bytes),
            bytes(total.received().bytes),
        )?;
        for peer in self.all() {
            let is_used = peer.connections > 0 || peer.transfers.iter().any(|t| t.started > 0);
            if is_used {
                write!(f, "{peer}")?;
            }
        }
        Ok(())
    }
}

/// Prints a few lines: state, paths, transfers, and problems.
impl fmt::Display for PeerStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.name.as_str() {
            "" => "(gone)",
            name => name,
        };
        let up = self.lanes.iter().filter(|lane| lane.is_up).count();
        match self.is_connected {
            true => writeln!(f, "peer {name}: connected, {up} lanes")?,
            false => writeln!(f, "peer {name}: not connected")?,
        }
        for path in PathKind::ALL {
            let traffic = self.path(path);
            let (sent, received) = (traffic.sent(), traffic.received());
            if sent.chunks + received.chunks > 0 {
                writeln!(
                    f,
                    "  {}: sent {} in {} chunks, received {} in {}",
                    path.label(),
                    bytes(sent.bytes),
                    sent.chunks,
                    bytes(received.bytes),
                    received.chunks,
                )?;
            }
        }
        for kind in TransferKind::ALL {
            let transfers = self.transfers(kind);
            if transfers.started > 0 {
                writeln!(
                    f,
                    "  {}: {} started, {} done ({}), {} aborted",
                    kind.label(),
                    transfers.started,
                    transfers.completed,
                    bytes(transfers.bytes),
                    transfers.aborted,
                )?;
            }
        }
        for (class, histogram) in SizeClass::ALL.iter().zip(&self.latency) {
            if let (Some(mean), Some(p99)) = (histogram.mean(), histogram.quantile(0.99)) {
                let class = class.label();
                writeln!(f, "  latency {class}: mean {mean:.1?}, 99 % within {p99:?}")?;
            }
        }
        let trouble = [
            ("transfers failed", self.failures.total()),
            ("connections lost", self.connections_lost),
            ("lanes lost", self.lanes_lost),
            ("chunks moved again", self.retried.chunks),
        ];
        for (what, count) in trouble.into_iter().filter(|(_, count)| *count > 0) {
            writeln!(f, "  {what}: {count}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_largest_unit_that_leaves_a_whole() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (3 << 29, "1.5 GiB"),
        ];
        for (count, text) in cases {
            assert_eq!(bytes(count), text);
        }
    }
}
