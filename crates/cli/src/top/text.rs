//! Prints the report as tables, once.

use super::report::{Report, speed};
use crate::error::Failure;
use crate::output::{Output, Tone};

/// Prints sessions and their peers.
pub(crate) fn print(report: &Report, output: &mut Output) -> Result<(), Failure> {
    for silent in &report.silent {
        output.note(format_args!("Process {}: {}.", silent.pid, silent.reason));
    }
    if report.sessions.is_empty() {
        for line in super::view::NOBODY {
            output.line(line)?;
        }
        return Ok(());
    }
    let mut table = output.table();
    table.set_header(output.header(&[
        "PID",
        "SESSION",
        "PEER",
        "PATH",
        "SENT",
        "RECEIVED",
        "IN FLIGHT",
        "RETRIES",
        "FAILOVER",
        "FAILED",
        "WHAT LIMITS",
    ]));
    for session in &report.sessions {
        let rows = session.peers.iter().map(|peer| {
            let name = match peer.is_connected {
                true => peer.name.clone(),
                false => format!("{} (not connected)", peer.name),
            };
            (name, &peer.figures)
        });
        let mut rows: Vec<_> = rows.collect();
        if rows.is_empty() {
            rows.push(("-".into(), &session.figures));
        }
        for (peer, figures) in rows {
            let plain = |text: String| output.cell(Tone::Plain, text);
            let words = figures.slow.iter().chain(&figures.limit);
            let words: Vec<_> = words.map(String::as_str).collect();
            table.add_row(vec![
                plain(session.pid.to_string()),
                output.cell(Tone::Strong, &session.name),
                plain(peer),
                plain(figures.path.clone()),
                plain(speed(figures.sent_bytes_per_second)),
                plain(speed(figures.received_bytes_per_second)),
                plain(figures.transfers_in_flight.to_string()),
                plain(figures.retried_chunks.to_string()),
                plain(figures.failovers.to_string()),
                plain(figures.transfers_failed.to_string()),
                plain(words.join("; ")),
            ]);
        }
    }
    Ok(output.show(table)?)
}
