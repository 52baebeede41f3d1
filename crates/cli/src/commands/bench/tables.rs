//! A report as tables.

use comfy_table::CellAlignment;
use tcpx_bench::measure::CaseResult;
use tcpx_bench::report::Report;
use tcpx_bench::soak::SoakResult;
use tcpx_bench::units::{bytes, seconds};

use crate::error::Failure;
use crate::output::{Output, Tone};
use crate::units::count;

/// Ratios to the floor at or above this are what the project aims at.
const GOOD_RATIO: f64 = 0.9;
/// Below this, something other than the machine is the limit.
const POOR_RATIO: f64 = 0.7;

pub(super) fn print(report: &Report, output: &mut Output) -> Result<(), Failure> {
    machine(report, output)?;
    if !report.cases.is_empty() {
        cases(&report.cases, output)?;
    }
    prepare(report, output)?;
    idle(report, output)?;
    if let Some(result) = &report.soak {
        soak(result, output)?;
    }
    Ok(())
}

fn machine(report: &Report, output: &mut Output) -> Result<(), Failure> {
    for machine in [Some(&report.machine), report.target_machine.as_ref()]
        .into_iter()
        .flatten()
    {
        output.line(format_args!(
            "{}: {}, {}, {}",
            output.paint(Tone::Strong, &machine.host),
            machine.cpu,
            count(machine.cores, "core"),
            machine.kernel
        ))?;
    }
    output.line(format_args!(
        "{}, tcpx {}",
        count(report.lanes, "lane"),
        report.version
    ))?;
    Ok(output.line("")?)
}

fn cases(cases: &[CaseResult], output: &mut Output) -> Result<(), Failure> {
    let mut table = output.table();
    table.set_header(output.header(&[
        "CASE",
        "OP",
        "SIZE",
        "BLOCKS",
        "GB/S",
        "P50",
        "P99",
        "CPU S/GB",
        "FLOOR GB/S",
        "RATIO",
        "CPU RATIO",
    ]));
    for case in cases {
        let shape = &case.shape;
        let blocks = match shape.blocks() {
            1 => "1".to_owned(),
            number => format!("{number} × {}", bytes(shape.block_bytes())),
        };
        let engine = &case.engine;
        let mut row = vec![
            output.cell(Tone::Strong, &case.name),
            output.cell(Tone::Plain, shape.op()),
            output.cell(Tone::Plain, bytes(shape.total_bytes())),
            output.cell(Tone::Plain, blocks),
            output.cell(Tone::Strong, format_args!("{:.2}", engine.gb_per_s)),
            output.cell(Tone::Plain, seconds(engine.latency.p50_us / 1e6)),
            output.cell(Tone::Plain, seconds(engine.latency.p99_us / 1e6)),
            output.cell(Tone::Plain, format_args!("{:.3}", engine.cpu.total)),
        ];
        match &case.floor {
            Some(floor) => row.extend([
                output.cell(Tone::Plain, format_args!("{:.2}", floor.measured.gb_per_s)),
                output.cell(tone(floor.ratio), format_args!("{:.2}", floor.ratio)),
                output.cell(Tone::Plain, format_args!("{:.2}", floor.cpu_ratio)),
            ]),
            None => row.extend((0..3).map(|_| output.cell(Tone::Dim, "-"))),
        }
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    output.show(table)?;
    output.line("")?;
    let verified = if cases.iter().all(|case| case.verified) {
        "Every byte was verified before and after the rounds."
    } else {
        "Bytes were not verified."
    };
    let floor = if cases.iter().any(|case| case.floor.is_some()) {
        " RATIO: our GB/s as a part of the floor's, a raw readv/writev loop in the same run."
    } else {
        ""
    };
    Ok(output.line(format_args!("{verified}{floor}"))?)
}

fn tone(ratio: f64) -> Tone {
    match ratio {
        r if r >= GOOD_RATIO => Tone::Good,
        r if r >= POOR_RATIO => Tone::Warn,
        _ => Tone::Bad,
    }
}

fn prepare(report: &Report, output: &mut Output) -> Result<(), Failure> {
    if report.prepare.is_empty() {
        return Ok(());
    }
    output.line("")?;
    let mut table = output.table();
    table.set_header(output.header(&[
        "SEGMENTS",
        "EACH",
        "PREPARE",
        "FIRST POST",
        "REPOST",
        "REPOST CALL",
    ]));
    for row in &report.prepare {
        let cells = [
            row.segments.to_string(),
            bytes(row.segment_bytes),
            seconds(row.prepare_ms / 1e3),
            seconds(row.first_post_ms / 1e3),
            seconds(row.repost_ms / 1e3),
            seconds(row.repost_call_us / 1e6),
        ];
        table.add_row(cells.map(|text| output.cell(Tone::Plain, text)));
    }
    Ok(output.show(table)?)
}

fn idle(report: &Report, output: &mut Output) -> Result<(), Failure> {
    if let Some(idle) = &report.idle {
        output.line("")?;
        output.line(format_args!(
            "Idle for {:.0} s: {:.3} % and {:.3} % of a core (this side, the other).",
            idle.seconds,
            idle.initiator_cpu * 100.0,
            idle.target_cpu * 100.0
        ))?;
    }
    if let Some(peers) = &report.idle_peers {
        output.line(format_args!(
            "Each of {} costs {} of memory and {:.1} descriptors.",
            count(peers.peers, "idle peer"),
            bytes(peers.bytes_per_peer.max(0.0) as u64),
            peers.descriptors_per_peer
        ))?;
    }
    Ok(())
}

fn soak(soak: &SoakResult, output: &mut Output) -> Result<(), Failure> {
    output.line(format_args!(
        "Soak: {} transfers, {}, {} of them verified byte by byte.",
        soak.transfers,
        bytes(soak.bytes),
        soak.verified
    ))?;
    let growth = &soak.growth;
    let verdict = if growth.grew {
        output.paint(Tone::Bad, "The steady state grew:")
    } else {
        output.paint(Tone::Good, "The steady state did not grow:")
    };
    Ok(output.line(format_args!(
        "{verdict} {:+.0} KiB here, {:+.0} KiB there, {:+.0} descriptors.",
        growth.initiator_bytes / 1024.0,
        growth.target_bytes / 1024.0,
        growth.descriptors
    ))?)
}
