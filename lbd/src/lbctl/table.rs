//! Plain tables: a heading, no borders, columns as wide as their widest cell.
//!
//! All cells live in one string, so that a million flows cost two allocations and not a dozen millions.

use std::fmt::{self, Display, Write as _};
use std::io::{self, Write};
use std::net::SocketAddr;

use crate::flows::SocketText;

/// A column.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column {
    title: &'static str,
    right: bool,
    wide: bool,
}

impl Column {
    /// Text, always shown.
    pub(crate) const fn text(title: &'static str) -> Self {
        Self { title, right: false, wide: false }
    }

    /// A number, always shown.
    pub(crate) const fn number(title: &'static str) -> Self {
        Self { title, right: true, wide: false }
    }

    /// Shown in wide tables only.
    pub(crate) const fn wide(self) -> Self {
        Self { wide: true, ..self }
    }
}

/// A table under construction.
pub(crate) struct Table {
    columns: &'static [Column],
    wide: bool,
    /// Column of the next cell.
    next: usize,
    text: String,
    /// Where each cell's text ends.
    ends: Vec<u32>,
    widths: Vec<usize>,
    /// The heading has been printed.
    headed: bool,
}

impl Table {
    /// An empty table; with `wide`, all columns are shown.
    pub(crate) fn new(columns: &'static [Column], wide: bool) -> Self {
        let widths = columns.iter().filter(|column| wide || !column.wide).map(|column| column.title.len()).collect();
        Self { columns, wide, next: 0, text: String::new(), ends: Vec::new(), widths, headed: false }
    }

    /// The next cell: from left to right, row by row, wide columns too. Control characters are shown as `?`.
    pub(crate) fn cell(&mut self, value: impl Display) -> &mut Self {
        self.fill(|text| {
            // Writing to a string fails only if the value's own `Display` does; then the cell is cut short.
            let _ = write!(Printable(text), "{value}");
        })
    }

    /// The next cell: text as it is.
    pub(crate) fn text(&mut self, value: &str) -> &mut Self {
        self.fill(|text| {
            let _ = Printable(text).write_str(value);
        })
    }

    /// The next cell: an address and a port.
    pub(crate) fn socket(&mut self, socket: SocketAddr) -> &mut Self {
        self.fill(|text| text.push_str(SocketText::new(socket).as_str()))
    }

    /// A cell that may be empty: shown as `-`.
    pub(crate) fn optional(&mut self, value: Option<impl Display>) -> &mut Self {
        match value {
            Some(value) => self.cell(value),
            None => self.cell("-"),
        }
    }

    fn fill(&mut self, write: impl FnOnce(&mut String)) -> &mut Self {
        let shown = self.wide || !self.columns[self.next].wide;
        self.next = (self.next + 1) % self.columns.len();
        if shown {
            let start = self.text.len();
            write(&mut self.text);
            let column = self.ends.len() % self.widths.len();
            let width = width(&self.text[start..]);
            self.widths[column] = self.widths[column].max(width);
            self.ends.push(self.text.len() as u32);
        }
        self
    }

    /// Makes the columns as wide as those of a table with the same columns.
    pub(crate) fn widen(&mut self, other: &Self) {
        for (mine, theirs) in self.widths.iter_mut().zip(&other.widths) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Writes heading and rows.
    pub(crate) fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(self.heading().as_bytes())?;
        out.write_all(self.lines(self).as_bytes())
    }

    /// Writes the rows, the first time after the heading, and forgets them. Columns get wider as need be, never narrower.
    pub(crate) fn print_on(&mut self, out: &mut dyn Write) -> io::Result<()> {
        if !self.headed {
            out.write_all(self.heading().as_bytes())?;
            self.headed = true;
        }
        out.write_all(self.lines(self).as_bytes())?;
        self.text.clear();
        self.ends.clear();
        Ok(())
    }

    fn shown(&self) -> Vec<&'static Column> {
        self.columns.iter().filter(|column| self.wide || !column.wide).collect()
    }

    fn heading(&self) -> String {
        let mut line = String::new();
        for (column, place) in self.shown().into_iter().zip(0..) {
            self.pad(&mut line, column, place, column.title);
        }
        line.push('\n');
        line
    }

    /// The rows of a table with the same columns, in the widths of this one.
    pub(crate) fn lines(&self, rows: &Self) -> String {
        let shown = self.shown();
        let width: usize = self.widths.iter().map(|width| width + 2).sum();
        let count = rows.ends.len() / shown.len();
        let mut lines = String::with_capacity(count * (width + 1));
        let mut start = 0;
        for row in rows.ends.chunks_exact(shown.len()) {
            for ((column, place), &end) in shown.iter().zip(0..).zip(row) {
                self.pad(&mut lines, column, place, &rows.text[start..end as usize]);
                start = end as usize;
            }
            lines.push('\n');
        }
        lines
    }

    fn pad(&self, line: &mut String, column: &Column, place: usize, cell: &str) {
        const BLANKS: &str = "                                                                ";
        let mut missing = self.widths[place].saturating_sub(width(cell));
        let last = place + 1 == self.widths.len();
        if !column.right {
            line.push_str(cell);
            if last {
                return;
            }
        }
        while missing > 0 {
            let now = missing.min(BLANKS.len());
            line.push_str(&BLANKS[..now]);
            missing -= now;
        }
        if column.right {
            line.push_str(cell);
        }
        if !last {
            line.push_str("  ");
        }
    }
}

fn width(text: &str) -> usize {
    if text.is_ascii() { text.len() } else { text.chars().count() }
}

/// Keeps text from files and clusters from steering the terminal.
struct Printable<'a>(&'a mut String);

impl fmt::Write for Printable<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
            self.0.push_str(text);
        } else {
            self.0.extend(text.chars().map(|character| if character.is_control() { '?' } else { character }));
        }
        Ok(())
    }
}

/// A number of bytes, in binary units, three digits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes(pub(crate) u64);

impl Display for Bytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let Self(count) = *self;
        if count < 1024 {
            return write!(formatter, "{count} B");
        }
        // In whole numbers: a list of a million flows has two million of them, and floats are slow to print.
        let count = u128::from(count);
        let mut unit = 0;
        while 2 * count >= 2047 << (10 * unit) && unit + 1 < UNITS.len() {
            unit += 1;
        }
        let shift = 10 * unit;
        let rounded = |count: u128| (count + (1 << (shift - 1))) >> shift;
        if count * 1000 < 9995 << shift {
            let hundredths = rounded(count * 100);
            write!(formatter, "{}.{:02} {}", hundredths / 100, hundredths % 100, UNITS[unit])
        } else if count * 100 < 9995 << shift {
            let tenths = rounded(count * 10);
            write!(formatter, "{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
        } else {
            write!(formatter, "{} {}", rounded(count), UNITS[unit])
        }
    }
}

/// Seconds, in at most two units.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Age(pub(crate) u64);

impl Display for Age {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(seconds) = *self;
        match seconds {
            0..60 => write!(formatter, "{seconds}s"),
            60..3600 => write!(formatter, "{}m{}s", seconds / 60, seconds % 60),
            3600..86_400 => write!(formatter, "{}h{}m", seconds / 3600, seconds % 3600 / 60),
            _ => write!(formatter, "{}d{}h", seconds / 86_400, seconds % 86_400 / 3600),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column] =
        &[Column::text("NAME"), Column::number("COUNT"), Column::text("NOTE").wide(), Column::text("END")];

    fn printed(wide: bool) -> String {
        let mut table = Table::new(COLUMNS, wide);
        table.cell("a").cell(1).cell("first").cell("x");
        table.cell("longer").cell(123_456).optional(None::<&str>).cell("esc\u{1b}[1m");
        let mut out = Vec::new();
        table.print(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn columns_line_up() {
        assert_eq!(printed(false), "NAME     COUNT  END\na            1  x\nlonger  123456  esc?[1m\n");
        assert_eq!(
            printed(true),
            "NAME     COUNT  NOTE   END\na            1  first  x\nlonger  123456  -      esc?[1m\n"
        );
    }

    #[test]
    fn tables_are_joined() {
        let mut all = Table::new(COLUMNS, false);
        let tables = ["a", "longer"].map(|word| {
            let mut one = Table::new(COLUMNS, false);
            one.cell(word).cell(1).cell("hidden").cell("x");
            all.widen(&one);
            one
        });
        let mut out = Vec::new();
        all.print(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap() + &tables.map(|table| all.lines(&table)).concat();
        assert_eq!(text, "NAME    COUNT  END\na           1  x\nlonger      1  x\n");
    }

    #[test]
    fn rows_are_printed_as_they_come() {
        let mut table = Table::new(COLUMNS, false);
        let mut out = Vec::new();
        for word in ["a", "longer", "b"] {
            table.cell(word).cell(1).cell("hidden").cell("x");
            table.print_on(&mut out).unwrap();
        }
        table.print_on(&mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "NAME  COUNT  END\na         1  x\nlonger      1  x\nb           1  x\n"
        );
    }

    #[test]
    fn an_empty_table_is_its_heading() {
        let mut out = Vec::new();
        Table::new(COLUMNS, false).print(&mut out).unwrap();
        assert_eq!(out, b"NAME  COUNT  END\n");
    }

    #[test]
    fn units() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (10_234, "9.99 KiB"),
            (10_235, "10.0 KiB"),
            (102_348, "99.9 KiB"),
            (102_349, "100 KiB"),
            (10_240, "10.0 KiB"),
            (1_048_575, "1.00 MiB"),
            (123 << 20, "123 MiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(Bytes(count).to_string(), text);
        }
        for (seconds, text) in [(0, "0s"), (59, "59s"), (60, "1m0s"), (3660, "1h1m"), (90_000, "1d1h")] {
            assert_eq!(Age(seconds).to_string(), text);
        }
    }
}
