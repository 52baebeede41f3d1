//! The page around the plots. Every string from outside this file goes through [`escape`].

use std::fmt::Write;

use super::{Report, plots};
use crate::error::Error;
use crate::floor::Waiting;
use crate::machine::Machine;
use crate::measure::CaseResult;
use crate::measure::beside::{BesideResult, LoadKind};
use crate::path::Path;
use crate::place::Places;
use crate::suite::Group;
use crate::units;
use crate::workload::Op;

/// Layout and both themes. The `[fill=…]` and `[stroke=…]` rules map the plots' literal colours
/// (see `plots`) to either theme.
const STYLE: &str = include_str!("style.css");

pub(super) fn page(report: &Report) -> Result<String, Error> {
    let mut body = String::new();
    header(&mut body, report);
    highlights(&mut body, &report.cases);
    size_plots(&mut body, &report.cases)?;
    ratio_plot(&mut body, &report.cases)?;
    beside(&mut body, &report.beside)?;
    let (swept, others): (Vec<_>, Vec<_>) = report
        .cases
        .iter()
        .partition(|case| case.group == Group::Sweep);
    case_table(&mut body, "Cases", &others, report.memory);
    costs(&mut body, report);
    case_table(&mut body, "Sweep over sizes", &swept, report.memory);
    settings(&mut body, report);
    machines(&mut body, report);
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>tcpx bench · {} · {}</title>\n<style>\n{STYLE}</style>\n</head>\n\
         <body>\n<main>\n{body}</main>\n</body>\n</html>\n",
        escape(&report.machine.host),
        escape(&report.date),
    ))
}

/// Writing to a `String` does not fail.
macro_rules! put {
    ($out:expr, $($arguments:tt)*) => { let _ = writeln!($out, $($arguments)*); };
}

fn header(out: &mut String, report: &Report) {
    let between = match &report.target_machine {
        Some(target) => format!(
            "{} and {}",
            escape(&report.machine.host),
            escape(&target.host)
        ),
        None => format!("two processes on {}", escape(&report.machine.host)),
    };
    put!(out, "<header>\n<h1>tcpx bench</h1>");
    put!(
        out,
        "<p class=\"sub\">{between} · {} · {} · {} · tcpx {} · {}</p>",
        escape(&report.machine.cpu),
        count(report.machine.cores, "core"),
        count(report.lanes, "lane"),
        escape(&report.version),
        escape(&report.date)
    );
    put!(out, "<p>{}</p>", escape(&report.path_line()));
    let has_floor = !report.cases.is_empty() && report.path == Path::Lanes;
    if has_floor {
        put!(
            out,
            "<p>The <b>floor</b> is a raw <code>readv</code>/<code>writev</code> loop over the same \
             blocks and as many streams as the engine has lanes. Rounds of the engine and of the floor \
             take turns; a number is the median of its rounds. Every byte was checked before and after \
             unless a case says otherwise.</p>"
        );
    }
    if !report.memory.are_host() {
        put!(
            out,
            "<p>The measuring side's memory is <b>{}</b>, the other's <b>{}</b>.{}</p>",
            report.memory.initiator,
            report.memory.target,
            if has_floor {
                " Raw sockets do not reach memory of a GPU: the floor moves host memory."
            } else {
                ""
            }
        );
    }
    put!(out, "</header>");
}

/// Writes the few numbers that a reader looks for first.
fn highlights(out: &mut String, cases: &[CaseResult]) {
    let named = || cases.iter().filter(|case| case.group != Group::Sweep);
    let mut cards = String::new();
    for case in named() {
        let (value, unit, note) = if case.waiting == Waiting::Poll {
            let latency = case.engine.latency;
            let p99 = units::seconds(latency.p99_us / 1e6);
            (
                format!("{:.1}", latency.p50_us),
                "µs p50",
                format!("p99 {p99}"),
            )
        } else {
            let note = case
                .floor
                .as_ref()
                .map(|floor| format!("{:.2} of the floor", floor.ratio));
            (
                format!("{:.2}", case.engine.gb_per_s),
                "GB/s",
                note.unwrap_or_default(),
            )
        };
        put!(
            cards,
            "<div class=\"card\"><div class=\"what\">{} <span>{}</span></div>\
             <div class=\"value\">{value} <small>{unit}</small></div><div class=\"note\">{note}</div></div>",
            escape(&case.name),
            case.shape.op()
        );
    }
    if !cards.is_empty() {
        put!(out, "<section class=\"cards\">\n{cards}</section>");
    }
}

fn size_plots(out: &mut String, cases: &[CaseResult]) -> Result<(), Error> {
    // Only the sweep if there is one: its points are measured alike.
    let swept = cases.iter().any(|case| case.group == Group::Sweep);
    let contiguous: Vec<&CaseResult> = cases
        .iter()
        .filter(|case| case.shape.blocks() == 1 && (!swept || case.group == Group::Sweep))
        .collect();
    let engine_floor = [("engine", "engine"), ("floor", "floor")];
    let percentiles = [("engine", "p50"), ("slow", "p99"), ("floor", "floor p50")];
    let mut figures = String::new();
    for op in [Op::Read, Op::Write] {
        let plot = plots::throughput(&contiguous, op)?;
        figure(
            &mut figures,
            plot,
            &format!("Throughput of one block by size, {op}"),
            &engine_floor,
        );
    }
    for op in [Op::Read, Op::Write] {
        let plot = plots::latency(&contiguous, op)?;
        figure(
            &mut figures,
            plot,
            &format!("Latency by size, {op}"),
            &percentiles,
        );
    }
    if !figures.is_empty() {
        put!(out, "<section class=\"plots\">\n{figures}</section>");
    }
    Ok(())
}

fn ratio_plot(out: &mut String, cases: &[CaseResult]) -> Result<(), Error> {
    let bulk: Vec<&CaseResult> = cases
        .iter()
        .filter(|case| case.group != Group::Sweep)
        .collect();
    let mut figures = String::new();
    let legend = [
        ("engine", "median"),
        ("ink", "range of the rounds"),
        ("floor", "the floor"),
    ];
    figure(
        &mut figures,
        plots::ratios(&bulk)?,
        "Throughput relative to the floor",
        &legend,
    );
    if !figures.is_empty() {
        put!(out, "<section>\n{figures}</section>");
    }
    Ok(())
}

/// Writes the speed that loads keep beside transfers: a plot and its numbers.
fn beside(out: &mut String, results: &[BesideResult]) -> Result<(), Error> {
    if results.is_empty() {
        return Ok(());
    }
    let mut legend: Vec<(&str, String)> = LoadKind::ALL
        .into_iter()
        .filter(|load| results.iter().any(|result| result.load == *load))
        .map(|load| (plots::load_class(load), load.to_string()))
        .collect();
    let is_whole = |block| results.iter().any(|r| r.shape.total_bytes() == block);
    legend.extend(
        plots::block_marks(results)
            .into_iter()
            .map(|(block, mark)| {
                let blocks = match is_whole(block) {
                    true => "one block".to_owned(),
                    false => format!("blocks of {}", units::bytes(block)),
                };
                ("", format!("{} {blocks}", mark.glyph()))
            }),
    );
    legend.push(("", "filled: WRITE, hollow: READ".to_owned()));
    let legend: Vec<(&str, &str)> = legend.iter().map(|(c, name)| (*c, name.as_str())).collect();
    put!(
        out,
        "<section>\n<h2>Beside a model that computes</h2>\n<p>A built-in load runs on the GPU alone \
         and beside a transfer that is posted again and again, in turns. What it <b>keeps</b> is its \
         speed beside the transfer as a part of its speed alone.</p>"
    );
    figure(
        out,
        plots::beside(results)?,
        "What the model keeps by the speed of the transfer",
        &legend,
    );
    put!(
        out,
        "<div class=\"scroll\">\n<table>\n<thead><tr><th>load</th><th>transfer</th>\
         <th class=\"n\">GB/s</th><th class=\"n\">keeps</th><th class=\"n\">range</th>\
         <th class=\"n\">alone /s</th><th class=\"n\">beside /s</th>\
         <th class=\"n\">p99/p50 alone</th><th class=\"n\">beside</th><th>checked</th></tr></thead>\n<tbody>"
    );
    for result in results {
        put!(
            out,
            "<tr><td><b>{}</b></td><td>{}</td><td class=\"n\">{:.2}</td><td class=\"n\"><b>{:.3}</b></td>\
             <td class=\"n\">{:.3} – {:.3}</td><td class=\"n\">{:.1}</td><td class=\"n\">{:.1}</td>\
             <td class=\"n\">{:.2}</td><td class=\"n\">{:.2}</td><td>{}</td></tr>",
            result.load,
            escape(&result.shape.to_string()),
            result.gb_per_s,
            result.keeps,
            result.keeps_range.0,
            result.keeps_range.1,
            result.alone.per_s,
            result.beside.per_s,
            result.alone.tail,
            result.beside.tail,
            if result.verified { "every byte" } else { "no" },
        );
    }
    put!(out, "</tbody>\n</table>\n</div>\n</section>");
    Ok(())
}

fn figure(out: &mut String, plot: Option<String>, title: &str, legend: &[(&str, &str)]) {
    let Some(svg) = plot else { return };
    let keys: String = legend
        .iter()
        .map(|(class, name)| format!("<span class=\"key {class}\"></span>{name} "))
        .collect();
    let svg = svg.replacen(
        "<svg ",
        &format!("<svg role=\"img\" aria-label=\"{title}\" "),
        1,
    );
    put!(
        out,
        "<figure>\n<figcaption><b>{title}</b><span class=\"legend\">{keys}</span></figcaption>\n{svg}</figure>"
    );
}

fn case_table(out: &mut String, title: &str, cases: &[&CaseResult], memory: Places) {
    if cases.is_empty() {
        return;
    }
    let floor = if memory.are_host() {
        "floor"
    } else {
        "floor (host memory)"
    };
    put!(
        out,
        "<section>\n<h2>{title}</h2>\n<div class=\"scroll\">\n<table>\n<thead><tr>\
         <th>case</th><th>transfer</th><th>waits</th><th class=\"n\">GB/s</th><th class=\"n\">{floor}</th>\
         <th class=\"n\">ratio</th><th class=\"n\">p50</th><th class=\"n\">p99</th>\
         <th class=\"n\">floor p50</th><th class=\"n\">CPU s/GB</th><th class=\"n\">floor</th>\
         <th class=\"n\">iterations</th><th>checked</th></tr></thead>\n<tbody>"
    );
    for case in cases {
        let floor = case.floor.as_ref();
        let of_floor = |show: &dyn Fn(&crate::measure::FloorResult) -> String| {
            floor.map_or_else(|| "–".to_owned(), show)
        };
        let us = |us: f64| units::seconds(us / 1e6);
        let waiting = match case.waiting {
            Waiting::Block => "blocking",
            Waiting::Poll => "polling",
        };
        put!(
            out,
            "<tr><td><b>{}</b></td><td>{}</td><td>{waiting}</td><td class=\"n\">{:.2}</td>\
             <td class=\"n\">{}</td><td class=\"n\"><b>{}</b></td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{:.3}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td><td>{}</td></tr>",
            escape(&case.name),
            escape(&case.shape.to_string()),
            case.engine.gb_per_s,
            of_floor(&|floor| format!("{:.2}", floor.measured.gb_per_s)),
            of_floor(&|floor| format!("{:.2}", floor.ratio)),
            us(case.engine.latency.p50_us),
            us(case.engine.latency.p99_us),
            of_floor(&|floor| us(floor.measured.latency.p50_us)),
            case.engine.cpu.total,
            of_floor(&|floor| format!("{:.3}", floor.measured.cpu.total)),
            case.engine.iterations,
            if case.verified { "every byte" } else { "no" },
        );
    }
    put!(out, "</tbody>\n</table>\n</div>\n</section>");
}

/// Writes the costs besides moving bytes: preparing, being idle, running long.
fn costs(out: &mut String, report: &Report) {
    let mut rows = String::new();
    let mut row = |what: String, value: String| {
        put!(rows, "<tr><td>{what}</td><td class=\"n\">{value}</td></tr>");
    };
    for prepare in &report.prepare {
        let what = format!(
            "{} segments of {}",
            prepare.segments,
            units::bytes(prepare.segment_bytes)
        );
        row(
            format!("prepare, {what}"),
            format!("{:.2} ms", prepare.prepare_ms),
        );
        row(
            format!("first post to done, {what}"),
            format!("{:.2} ms", prepare.first_post_ms),
        );
        row(
            format!("post again to done, {what}"),
            format!("{:.2} ms", prepare.repost_ms),
        );
        row(
            format!("post again, the call alone, {what}"),
            format!("{:.1} µs", prepare.repost_call_us),
        );
    }
    if let Some(idle) = &report.idle {
        let percent = |part: f64| format!("{:.3} %", part * 100.0);
        row(
            "CPU of an idle session, of one core".into(),
            percent(idle.initiator_cpu),
        );
        row(
            "CPU of an idle target, of one core".into(),
            percent(idle.target_cpu),
        );
    }
    if let Some(peers) = &report.idle_peers {
        let bytes = units::bytes(peers.bytes_per_peer.max(0.0) as u64);
        row(
            format!("memory of an idle peer (of {})", peers.peers),
            bytes,
        );
    }
    if let Some(soak) = &report.soak {
        let end = soak.samples.last().map_or(0.0, |sample| sample.at_s);
        let verdict = if soak.growth.grew { "grew" } else { "steady" };
        let growth = soak.growth.initiator_bytes.max(soak.growth.target_bytes) / 1024.0;
        row(
            format!(
                "memory over {} ({} transfers)",
                units::seconds(end),
                soak.transfers
            ),
            format!("{verdict} ({growth:+.0} KiB)"),
        );
    }
    if !rows.is_empty() {
        put!(
            out,
            "<section>\n<h2>Costs besides moving bytes</h2>\n<table class=\"narrow\">\n<tbody>\n{rows}</tbody>\n</table>\n</section>"
        );
    }
}

fn settings(out: &mut String, report: &Report) {
    put!(
        out,
        "<section class=\"pair\">\n<div>\n<h2>Configuration</h2>\n<table>\n<thead><tr><th>setting</th>\
         <th>value</th><th>from</th></tr></thead>\n<tbody>"
    );
    for setting in &report.settings {
        put!(
            out,
            "<tr><td>{}</td><td><code>{}</code></td><td>{}</td></tr>",
            escape(&setting.key),
            escape(&setting.value),
            escape(&setting.source)
        );
    }
    put!(out, "</tbody>\n</table>\n</div>");
}

fn machines(out: &mut String, report: &Report) {
    put!(out, "<div>\n<h2>Machine</h2>");
    machine(out, &report.machine);
    if let Some(target) = &report.target_machine {
        put!(out, "<h2>Target</h2>");
        machine(out, target);
    }
    put!(
        out,
        "<h2>Command</h2>\n<pre>{}</pre>\n</div>\n</section>",
        escape(&report.command.join(" "))
    );
}

fn machine(out: &mut String, machine: &Machine) {
    put!(out, "<table>\n<tbody>");
    let mut row = |name: &str, value: &str| {
        put!(
            out,
            "<tr><td>{}</td><td>{}</td></tr>",
            escape(name),
            escape(value)
        );
    };
    row("host", &machine.host);
    row("kernel", &machine.kernel);
    row("CPU", &machine.cpu);
    row("cores", &machine.cores.to_string());
    row("memory", &units::bytes(machine.memory_bytes));
    for gpu in &machine.gpus {
        row("GPU", gpu);
    }
    for (name, value) in &machine.tcp {
        row(name, value);
    }
    put!(out, "</tbody>\n</table>");
}

fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}
