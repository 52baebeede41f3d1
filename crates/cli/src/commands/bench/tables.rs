//! A report as tables.

use comfy_table::CellAlignment;
use tcpx_bench::faults::{FaultCount, FaultsResult};
use tcpx_bench::measure::CaseResult;
use tcpx_bench::measure::beside::BesideResult;
use tcpx_bench::place::Places;
use tcpx_bench::report::Report;
use tcpx_bench::soak::{SoakResult, SoakSample};
use tcpx_bench::units::{bytes, seconds};
use tcpx_bench::workload::Shape;

use crate::error::Failure;
use crate::output::{Output, Tone};
use crate::units::count;

/// The ratio to the floor from which on a result is good.
const GOOD_RATIO: f64 = 0.9;
/// The ratio below which something other than the machine is the limit.
const POOR_RATIO: f64 = 0.7;

pub(super) fn print(report: &Report, output: &mut Output) -> Result<(), Failure> {
    machine(report, output)?;
    if !report.cases.is_empty() {
        cases(&report.cases, report.memory, output)?;
    }
    if !report.beside.is_empty() {
        beside(&report.beside, output)?;
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
        if !report.memory.are_host() && !machine.gpus.is_empty() {
            output.line(machine.gpus.join(", "))?;
        }
    }
    output.line(format_args!(
        "{}, {}, tcpx {}",
        count(report.lanes, "lane"),
        memory(report.memory),
        report.version
    ))?;
    output.line(report.path_line())?;
    Ok(output.line("")?)
}

/// Names the places of the memory.
fn memory(places: Places) -> String {
    if places.initiator == places.target {
        return format!("memory: {}", places.initiator);
    }
    format!(
        "memory: {} here, {} at the other side",
        places.initiator, places.target
    )
}

/// Returns the heading of the floor's column: raw sockets reach host memory only.
fn floor_heading(places: Places) -> &'static str {
    if places.are_host() {
        "FLOOR GB/S"
    } else {
        "FLOOR (HOST MEMORY) GB/S"
    }
}

fn cases(cases: &[CaseResult], memory: Places, output: &mut Output) -> Result<(), Failure> {
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
        floor_heading(memory),
        "RATIO",
        "CPU RATIO",
    ]));
    for case in cases {
        let shape = &case.shape;
        let engine = &case.engine;
        let mut row = vec![
            output.cell(Tone::Strong, &case.name),
            output.cell(Tone::Plain, shape.op()),
            output.cell(Tone::Plain, bytes(shape.total_bytes())),
            output.cell(Tone::Plain, blocks(shape)),
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
    let is_plugged = |case: &CaseResult| case.floor.as_ref().is_some_and(|floor| floor.plugin);
    let floor = match cases.iter().any(|case| case.floor.is_some()) {
        true if cases.iter().any(is_plugged) => {
            " RATIO: our GB/s as a part of the floor's, a raw isend/irecv loop on the same plugin in \
             the same run."
        }
        true if memory.are_host() => {
            " RATIO: our GB/s as a part of the floor's, a raw readv/writev loop in the same run."
        }
        true => {
            " RATIO: our GB/s as a part of the floor's, a raw readv/writev loop over host memory in \
             the same run."
        }
        false => "",
    };
    output.line(format_args!("{verified}{floor}"))?;
    limits(cases, output)
}

/// Prints what limits the cases, grouped by limit.
fn limits(cases: &[CaseResult], output: &mut Output) -> Result<(), Failure> {
    let mut said: Vec<(&str, Vec<String>)> = Vec::new();
    for case in cases {
        let name = format!("{} {}", case.name, case.shape.op());
        match said.iter_mut().find(|(words, _)| *words == case.limit) {
            Some((_, names)) => names.push(name),
            None => said.push((&case.limit, vec![name])),
        }
    }
    output.line("What limits:")?;
    for (words, names) in said {
        let names = output.paint(Tone::Strong, names.join(", "));
        output.line(format_args!("  {names}: {words}"))?;
    }
    Ok(())
}

fn beside(results: &[BesideResult], output: &mut Output) -> Result<(), Failure> {
    let mut table = output.table();
    table.set_header(output.header(&BESIDE_HEADINGS));
    for result in results {
        let keeps = tone(result.keeps);
        let cells = beside_cells(result).into_iter().enumerate();
        let tones = [
            Tone::Strong,
            Tone::Plain,
            Tone::Plain,
            Tone::Plain,
            Tone::Strong,
            keeps,
        ];
        table.add_row(cells.map(|(column, text)| {
            let tone = tones.get(column).copied().unwrap_or(Tone::Plain);
            output.cell(tone, text)
        }));
    }
    for column in table.column_iter_mut().skip(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    output.show(table)?;
    output.line("")?;
    let verified = if results.iter().all(|result| result.verified) {
        "Every byte was verified before and after the rounds."
    } else {
        "Bytes were not verified."
    };
    Ok(output.line(format_args!(
        "{verified} KEEPS: the load's speed beside the transfer as a part of its speed alone. P99/P50: \
         how much longer slow iterations take, alone and beside."
    ))?)
}

const BESIDE_HEADINGS: [&str; 9] = [
    "LOAD",
    "OP",
    "SIZE",
    "BLOCKS",
    "GB/S",
    "KEEPS",
    "ALONE /S",
    "BESIDE /S",
    "P99/P50",
];

/// Returns the cells of one row, in the order of the headings.
fn beside_cells(result: &BesideResult) -> [String; 9] {
    [
        result.load.to_string(),
        result.shape.op().to_string(),
        bytes(result.shape.total_bytes()),
        blocks(&result.shape),
        format!("{:.2}", result.gb_per_s),
        format!("{:.3}", result.keeps),
        format!("{:.1}", result.alone.per_s),
        format!("{:.1}", result.beside.per_s),
        format!("{:.2} → {:.2}", result.alone.tail, result.beside.tail),
    ]
}

/// Formats the blocks: `1`, or the number and the size.
fn blocks(shape: &Shape) -> String {
    match shape.blocks() {
        1 => "1".to_owned(),
        number => format!("{number} × {}", bytes(shape.block_bytes())),
    }
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
    output.line(format_args!(
        "{verdict} {:+.0} KiB here, {:+.0} KiB there, {:+.0} descriptors, {:+.0} threads.",
        growth.initiator_bytes / 1024.0,
        growth.target_bytes / 1024.0,
        growth.descriptors,
        growth.threads
    ))?;
    if let Some(faults) = &soak.faults {
        fault_counts(faults, output)?;
    }
    let on_gpu = |sample: &SoakSample| {
        sample.initiator.device_free_bytes.is_some() || sample.target.device_free_bytes.is_some()
    };
    if soak.samples.iter().any(on_gpu) {
        output.line(format_args!(
            "GPU memory in use by all processes: {:+.1} MiB.",
            growth.device_bytes / f64::from(1 << 20)
        ))?;
    }
    Ok(())
}

fn fault_counts(faults: &FaultsResult, output: &mut Output) -> Result<(), Failure> {
    let made = |entry: &FaultCount| format!("{} × {:?}", entry.count, entry.fault).to_lowercase();
    let made: Vec<String> = faults.counts.iter().map(made).collect();
    let ended = if faults.interrupted {
        " Ended early."
    } else {
        ""
    };
    output.line(format_args!(
        "Faults: {}; {} failed by them.{ended}",
        made.join(", "),
        count(faults.failed as usize, "transfer")
    ))?;
    for entry in &faults.counts {
        if let Some(reason) = &entry.skipped {
            let name = format!("{:?}", entry.fault).to_lowercase();
            output.line(format_args!("Skipped {name}: {reason}."))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tcpx_bench::measure::beside::{LoadKind, Pace};
    use tcpx_bench::workload::{Layout, Op};

    use super::*;

    #[test]
    fn a_row_beside_a_load_has_both_speeds_and_what_is_kept() {
        let pace = |per_s, tail| Pace {
            per_s,
            tail,
            rounds: vec![per_s],
        };
        let mut result = BesideResult {
            load: LoadKind::Decode,
            name: "256M/16K".into(),
            shape: Shape::new(Op::Write, 256 << 20, 16 << 10, Layout::Scattered).unwrap(),
            gb_per_s: 19.876,
            keeps: 0.9346,
            keeps_range: (0.9, 1.0),
            alone: pace(1500.04, 1.02),
            beside: pace(1402.0, 1.317),
            verified: true,
        };
        let expected = [
            "decode",
            "WRITE",
            "256 MiB",
            "16384 × 16 KiB",
            "19.88",
            "0.935",
            "1500.0",
            "1402.0",
            "1.02 → 1.32",
        ];
        assert_eq!(beside_cells(&result), expected);
        assert_eq!(BESIDE_HEADINGS[5], "KEEPS");
        result.shape = Shape::new(Op::Read, 256 << 20, 0, Layout::Scattered).unwrap();
        assert_eq!(beside_cells(&result)[3], "1");
    }

    #[test]
    fn the_table_says_where_the_bytes_lay() {
        let places = |text: &str| text.parse::<Places>().unwrap();
        assert_eq!(memory(places("host")), "memory: host");
        assert_eq!(
            memory(places("host,vram:0")),
            "memory: host here, vram:0 at the other side"
        );
        assert_eq!(floor_heading(places("host")), "FLOOR GB/S");
        for text in ["vram:0", "host,vram:0", "vram:0,host"] {
            assert_eq!(floor_heading(places(text)), "FLOOR (HOST MEMORY) GB/S");
        }
    }
}
