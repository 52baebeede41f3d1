//! Draws the plots of a report, as SVG text.
//!
//! Every colour is a literal that the page's style sheet maps to a variable, so that one drawing
//! serves the light and the dark page (see `COLOURS` in the page's style).

use std::ops::Range;

use plotters::prelude::*;

use crate::error::Error;
use crate::measure::CaseResult;
use crate::measure::beside::{BesideResult, LoadKind};
use crate::units;
use crate::workload::Op;

/// Colour of the engine.
pub(super) const ENGINE: RGBColor = RGBColor(0x1F, 0x6F, 0xEB);
/// Colour of the floor.
pub(super) const FLOOR: RGBColor = RGBColor(0x8A, 0x93, 0x9F);
/// Colour of the engine's slow cases.
pub(super) const SLOW: RGBColor = RGBColor(0xE0, 0x7B, 0x22);
const INK: RGBColor = RGBColor(0x22, 0x2B, 0x36);
const AXIS: RGBColor = RGBColor(0xB4, 0xBB, 0xC4);
const GRID: RGBColor = RGBColor(0xE3, 0xE7, 0xEC);

const SIZE: (u32, u32) = (620, 330);

/// One line: a colour, whether it is dashed, and (bytes, value) points.
struct Line {
    colour: RGBColor,
    dashed: bool,
    points: Vec<(f64, f64)>,
}

/// Plots GB/s by size, of the engine and the floor.
pub(super) fn throughput(cases: &[&CaseResult], op: Op) -> Result<Option<String>, Error> {
    let engine = |case: &CaseResult| Some(case.engine.gb_per_s);
    let floor = |case: &CaseResult| Some(case.floor.as_ref()?.measured.gb_per_s);
    let lines = vec![
        Line {
            colour: FLOOR,
            dashed: true,
            points: points(cases, op, floor),
        },
        Line {
            colour: ENGINE,
            dashed: false,
            points: points(cases, op, engine),
        },
    ];
    let top = lines
        .iter()
        .flat_map(|line| &line.points)
        .map(|point| point.1)
        .fold(0.0, f64::max);
    by_size(lines, 0.0..(top * 1.12).max(1e-6), "GB/s", |value| {
        format!("{value:.1}")
    })
}

/// Plots latency by size: median and 99th percentile of the engine, median of the floor.
pub(super) fn latency(cases: &[&CaseResult], op: Op) -> Result<Option<String>, Error> {
    let log = |us: f64| Some(us.max(1e-3).log10());
    let p50 = |case: &CaseResult| log(case.engine.latency.p50_us);
    let p99 = |case: &CaseResult| log(case.engine.latency.p99_us);
    let floor = |case: &CaseResult| log(case.floor.as_ref()?.measured.latency.p50_us);
    let lines = vec![
        Line {
            colour: FLOOR,
            dashed: true,
            points: points(cases, op, floor),
        },
        Line {
            colour: SLOW,
            dashed: false,
            points: points(cases, op, p99),
        },
        Line {
            colour: ENGINE,
            dashed: false,
            points: points(cases, op, p50),
        },
    ];
    let values = || {
        lines
            .iter()
            .flat_map(|line| &line.points)
            .map(|point| point.1)
    };
    let low = values().fold(f64::INFINITY, f64::min).floor();
    let high = values().fold(f64::NEG_INFINITY, f64::max).ceil();
    let range = if low.is_finite() {
        low..high.max(low + 1.0)
    } else {
        0.0..1.0
    };
    by_size(lines, range, "one transfer", |value| {
        // Decades only: a label such as 3.16 ms is of no use.
        let decade = value.round();
        if (value - decade).abs() > 1e-6 {
            return String::new();
        }
        units::seconds(10f64.powf(decade) / 1e6)
            .replace(".00", "")
            .replace(".0", "")
    })
}

fn points(
    cases: &[&CaseResult],
    op: Op,
    value: impl Fn(&CaseResult) -> Option<f64>,
) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = cases
        .iter()
        .filter(|case| case.shape.op() == op)
        .filter_map(|case| Some(((case.shape.total_bytes() as f64).log2(), value(case)?)))
        .collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// Plots lines over log2 of the size. `None` if there are not two sizes to connect.
fn by_size(
    lines: Vec<Line>,
    values: Range<f64>,
    unit: &str,
    label: impl Fn(f64) -> String,
) -> Result<Option<String>, Error> {
    let sizes = || {
        lines
            .iter()
            .flat_map(|line| &line.points)
            .map(|point| point.0)
    };
    let (low, high) = (
        sizes().fold(f64::INFINITY, f64::min),
        sizes().fold(0.0, f64::max),
    );
    if low >= high {
        return Ok(None);
    }
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin_top(14)
            .margin_right(22)
            .margin_bottom(4)
            .x_label_area_size(34)
            .y_label_area_size(66)
            .build_cartesian_2d(low..high, values)
            .map_err(drawing)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .max_light_lines(0)
            .bold_line_style(GRID)
            .axis_style(AXIS)
            .label_style(("sans-serif", 13).into_font().color(&INK))
            .axis_desc_style(("sans-serif", 13).into_font().color(&INK))
            .x_labels(9)
            .y_labels(7)
            .x_label_formatter(&|log| units::bytes(log.exp2().round() as u64))
            .y_label_formatter(&|value| label(*value))
            .y_desc(unit)
            .draw()
            .map_err(drawing)?;
        for Line {
            colour,
            dashed,
            points,
        } in lines
        {
            let style = colour.stroke_width(2);
            if dashed {
                let series = DashedLineSeries::new(points.iter().copied(), 6, 4, style);
                chart.draw_series(series).map_err(drawing)?;
            } else {
                chart
                    .draw_series(LineSeries::new(points.iter().copied(), style))
                    .map_err(drawing)?;
            }
            let dots = points
                .into_iter()
                .map(|point| Circle::new(point, 3, colour.filled()));
            chart.draw_series(dots).map_err(drawing)?;
        }
        root.present().map_err(drawing)?;
    }
    Ok(Some(svg))
}

/// Plots one bar per case: the engine's throughput as a fraction of the floor's, with the range of
/// its rounds.
pub(super) fn ratios(cases: &[&CaseResult]) -> Result<Option<String>, Error> {
    let bars: Vec<(String, f64, (f64, f64))> = cases
        .iter()
        .filter_map(|case| {
            let floor = case.floor.as_ref()?;
            let name = format!("{} {}", case.name, case.shape.op());
            Some((name, floor.ratio, floor.ratio_range))
        })
        .rev()
        .collect();
    if bars.is_empty() {
        return Ok(None);
    }
    let top = bars
        .iter()
        .map(|bar| bar.1.max(bar.2.1))
        .fold(1.1, f64::max)
        .min(2.0);
    let mut svg = String::new();
    {
        let height = 64 + 30 * bars.len() as u32;
        let root = SVGBackend::with_string(&mut svg, (2 * SIZE.0, height)).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin_top(10)
            .margin_right(30)
            .x_label_area_size(34)
            .y_label_area_size(132)
            .build_cartesian_2d(0.0..top, 0.0..bars.len() as f64)
            .map_err(drawing)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .max_light_lines(0)
            .bold_line_style(GRID)
            .axis_style(AXIS)
            .label_style(("sans-serif", 13).into_font().color(&INK))
            .y_labels(0)
            .x_labels(12)
            .x_label_formatter(&|ratio| format!("{ratio:.1}"))
            .draw()
            .map_err(drawing)?;
        let text = |anchor| {
            let style = TextStyle::from(("sans-serif", 13).into_font()).color(&INK);
            style.pos(plotters::style::text_anchor::Pos::new(
                anchor,
                plotters::style::text_anchor::VPos::Center,
            ))
        };
        use plotters::style::text_anchor::HPos;
        for (index, (name, ratio, (low, high))) in bars.into_iter().enumerate() {
            let (bottom, middle, top_edge) =
                (index as f64 + 0.2, index as f64 + 0.5, index as f64 + 0.8);
            let bar = Rectangle::new([(0.0, bottom), (ratio.min(top), top_edge)], ENGINE.filled());
            let range = vec![(low.min(top), middle), (high.min(top), middle)];
            let label =
                EmptyElement::at((0.0, middle)) + Text::new(name, (-10, 0), text(HPos::Right));
            let value = EmptyElement::at((0.0, middle))
                + Text::new(
                    format!("{ratio:.2}"),
                    (8, 0),
                    text(HPos::Left).color(&WHITE),
                );
            chart.draw_series([bar]).map_err(drawing)?;
            chart
                .draw_series([PathElement::new(range, INK.stroke_width(2))])
                .map_err(drawing)?;
            chart.draw_series([label]).map_err(drawing)?;
            chart.draw_series([value]).map_err(drawing)?;
        }
        let parity = vec![(1.0, 0.0), (1.0, chart.y_range().end)];
        chart
            .draw_series([PathElement::new(parity, FLOOR.stroke_width(2))])
            .map_err(drawing)?;
        root.present().map_err(drawing)?;
    }
    Ok(Some(svg))
}

/// The mark of a block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Circle,
    Square,
    Triangle,
}

impl Mark {
    /// Returns the mark of the block size with this index in a plot: each has its own shape.
    fn at(index: usize) -> Mark {
        [Mark::Circle, Mark::Square, Mark::Triangle][index % 3]
    }

    pub(super) fn glyph(self) -> char {
        match self {
            Mark::Circle => '●',
            Mark::Square => '■',
            Mark::Triangle => '▲',
        }
    }

    /// Returns its corners around the origin, in pixels; none for a circle.
    fn corners(self) -> Vec<(i32, i32)> {
        match self {
            Mark::Circle => Vec::new(),
            Mark::Square => vec![(-5, -5), (5, -5), (5, 5), (-5, 5)],
            Mark::Triangle => vec![(0, -6), (6, 5), (-6, 5)],
        }
    }
}

/// Returns the CSS class of a load, which has its colour.
pub(super) fn load_class(load: LoadKind) -> &'static str {
    match load {
        LoadKind::Matmul => "engine",
        LoadKind::Copy => "floor",
        LoadKind::Decode => "slow",
    }
}

fn load_colour(load: LoadKind) -> RGBColor {
    match load {
        LoadKind::Matmul => ENGINE,
        LoadKind::Copy => FLOOR,
        LoadKind::Decode => SLOW,
    }
}

/// Returns the block sizes of results, the largest first, with their marks.
pub(super) fn block_marks(results: &[BesideResult]) -> Vec<(u64, Mark)> {
    let mut sizes: Vec<u64> = results.iter().map(|r| r.shape.block_bytes()).collect();
    sizes.sort_unstable_by_key(|&size| std::cmp::Reverse(size));
    sizes.dedup();
    let numbered = sizes.into_iter().enumerate();
    numbered.map(|(i, size)| (size, Mark::at(i))).collect()
}

/// Plots one mark per result: the transfer's GB/s on the x axis, the speed that the load keeps on
/// the y axis. Colours are loads, shapes are block sizes; WRITEs are filled.
pub(super) fn beside(results: &[BesideResult]) -> Result<Option<String>, Error> {
    if results.is_empty() {
        return Ok(None);
    }
    let most = |of: fn(&BesideResult) -> f64| results.iter().map(of).fold(0.0, f64::max);
    let right = (most(|result| result.gb_per_s) * 1.08).max(1e-6);
    let top = (most(|result| result.keeps) * 1.02).max(1.05);
    let marks = block_marks(results);
    let mut svg = String::new();
    {
        let size = (2 * SIZE.0, SIZE.1 + 70);
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin_top(14)
            .margin_right(30)
            .margin_bottom(4)
            .x_label_area_size(44)
            .y_label_area_size(66)
            .build_cartesian_2d(0.0..right, 0.0..top)
            .map_err(drawing)?;
        chart
            .configure_mesh()
            .max_light_lines(0)
            .bold_line_style(GRID)
            .axis_style(AXIS)
            .label_style(("sans-serif", 13).into_font().color(&INK))
            .axis_desc_style(("sans-serif", 13).into_font().color(&INK))
            .x_labels(12)
            .y_labels(11)
            .x_label_formatter(&|value| format!("{value:.1}"))
            .y_label_formatter(&|value| format!("{value:.1}"))
            .x_desc("transfer, GB/s")
            .y_desc("what the load keeps")
            .draw()
            .map_err(drawing)?;
        for result in results {
            let colour = load_colour(result.load);
            let is_filled = result.shape.op() == Op::Write;
            let style = if is_filled {
                colour.filled()
            } else {
                colour.stroke_width(2)
            };
            let place = || EmptyElement::at((result.gb_per_s, result.keeps));
            let block = result.shape.block_bytes();
            let mark = marks.iter().find(|(size, _)| *size == block);
            let mut corners = mark.map_or(Vec::new(), |(_, mark)| mark.corners());
            if corners.is_empty() {
                let circle = place() + Circle::new((0, 0), 5, style);
                chart.draw_series([circle]).map_err(drawing)?;
            } else if is_filled {
                let shape = place() + Polygon::new(corners, style);
                chart.draw_series([shape]).map_err(drawing)?;
            } else {
                corners.push(corners[0]);
                let shape = place() + PathElement::new(corners, style);
                chart.draw_series([shape]).map_err(drawing)?;
            }
        }
        root.present().map_err(drawing)?;
    }
    Ok(Some(svg))
}

fn drawing(error: impl std::fmt::Display) -> Error {
    Error::Report(error.to_string())
}
