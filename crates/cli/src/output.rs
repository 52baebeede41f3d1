//! Writes reports: text or JSON on stdout, coloured on a terminal only.

use std::fmt;
use std::io::{self, IsTerminal, Write};

use anstream::AutoStream;
use anstyle::{AnsiColor, Style};
use comfy_table::{Cell, ContentArrangement, Table, presets};
use serde::Serialize;

use crate::args::Color;
use crate::error::Failure;

/// The importance of a text, which decides its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    /// Neutral.
    Plain,
    /// Less important than the rest.
    Dim,
    /// As it should be.
    Good,
    /// Works, could be better.
    Warn,
    /// Does not work.
    Bad,
    /// A heading.
    Strong,
}

/// Stdout, and the allowed formats.
pub(crate) struct Output {
    stdout: io::Stdout,
    json: bool,
    colour: bool,
    progress: bool,
}

impl Output {
    /// Creates the output with the user's options.
    pub(crate) fn stdout(json: bool, color: Color) -> Self {
        let stdout = io::stdout();
        let colour = match color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => AutoStream::choice(&stdout) != anstream::ColorChoice::Never,
        };
        let progress = !json && color != Color::Never && io::stderr().is_terminal();
        Output {
            stdout,
            json,
            colour,
            progress,
        }
    }

    /// Returns whether the report is to be one JSON document.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Returns whether colours may be used.
    pub(crate) fn shows_colour(&self) -> bool {
        self.colour
    }

    /// Returns whether progress may be drawn on stderr.
    pub(crate) fn shows_progress(&self) -> bool {
        self.progress
    }

    /// Writes the report as JSON.
    pub(crate) fn document(&mut self, report: &impl Serialize) -> io::Result<()> {
        let mut stdout = self.stdout.lock();
        serde_json::to_writer_pretty(&mut stdout, report).map_err(io::Error::from)?;
        stdout.write_all(b"\n")?;
        stdout.flush()
    }

    /// Writes one line of text.
    pub(crate) fn line(&mut self, text: impl fmt::Display) -> io::Result<()> {
        let mut stdout = self.stdout.lock();
        writeln!(stdout, "{text}")?;
        stdout.flush()
    }

    /// Writes a table made by [`Output::table`].
    pub(crate) fn show(&mut self, mut table: Table) -> io::Result<()> {
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        self.line(table.trim_fmt())
    }

    /// Returns `text` in the colour of `tone`, if colours are allowed.
    pub(crate) fn paint(&self, tone: Tone, text: impl fmt::Display) -> String {
        let style = style(tone);
        if self.colour {
            format!("{style}{text}{style:#}")
        } else {
            text.to_string()
        }
    }

    /// Returns an empty table: no lines drawn, columns two spaces apart, wrapped on a terminal
    /// only.
    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new();
        table
            .load_style(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Dynamic);
        if !self.stdout.is_terminal() {
            table.force_no_tty();
        }
        if self.colour {
            table.enforce_styling().style_text_only();
        }
        table
    }

    /// Returns a table cell in the colour of `tone`.
    pub(crate) fn cell(&self, tone: Tone, text: impl fmt::Display) -> Cell {
        let cell = Cell::new(text);
        if !self.colour {
            return cell;
        }
        match tone {
            Tone::Plain => cell,
            Tone::Dim => cell.add_attribute(comfy_table::Attribute::Dim),
            Tone::Good => cell.fg(comfy_table::Color::DarkGreen),
            Tone::Warn => cell.fg(comfy_table::Color::DarkYellow),
            Tone::Bad => cell.fg(comfy_table::Color::DarkRed),
            Tone::Strong => cell.add_attribute(comfy_table::Attribute::Bold),
        }
    }

    /// Returns a heading row for [`Output::table`].
    pub(crate) fn header(&self, names: &[&str]) -> Vec<Cell> {
        names
            .iter()
            .map(|name| self.cell(Tone::Strong, name))
            .collect()
    }

    /// Informs the user on stderr.
    pub(crate) fn note(&self, text: impl fmt::Display) {
        // Stderr may be closed; the report is what counts.
        let _ = writeln!(io::stderr(), "{text}");
    }

    /// Reports why a command failed: text on stderr, and a JSON document if requested.
    pub(crate) fn failure(&mut self, failure: &Failure) -> io::Result<()> {
        let text = failure.chain();
        let mut stderr = AutoStream::new(io::stderr(), anstream::ColorChoice::Auto).lock();
        let style = style(Tone::Bad).bold();
        writeln!(stderr, "{style}error:{style:#} {text}")?;
        if self.json {
            self.document(&failure.document())?;
        }
        Ok(())
    }
}

fn style(tone: Tone) -> Style {
    match tone {
        Tone::Plain => Style::new(),
        Tone::Dim => Style::new().dimmed(),
        Tone::Good => AnsiColor::Green.on_default(),
        Tone::Warn => AnsiColor::Yellow.on_default(),
        Tone::Bad => AnsiColor::Red.on_default(),
        Tone::Strong => Style::new().bold(),
    }
}
