//! Plain tables: a heading, no borders, columns as wide as their widest cell.
//!
//! All cells live in one string, so that a million flows cost two allocations and not a dozen millions.

use std::fmt::{self, Display, Write as _};
use std::io::{self, Write};

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
    text: String,
    ends: Vec<usize>,
    widths: Vec<usize>,
}

impl Table {
    /// An empty table.
    pub(crate) fn new(columns: &'static [Column]) -> Self {
        let widths = columns.iter().map(|column| column.title.len()).collect();
        Self { columns, text: String::new(), ends: Vec::new(), widths }
    }

    /// The next cell: from left to right, row by row, wide columns too. Control characters are shown as `?`.
    pub(crate) fn cell(&mut self, value: impl Display) -> &mut Self {
        let start = self.text.len();
        // Writing to a string fails only if the value's own `Display` does; then the cell is cut short.
        let _ = write!(Printable(&mut self.text), "{value}");
        let column = self.ends.len() % self.columns.len();
        let width = self.text[start..].chars().count();
        self.widths[column] = self.widths[column].max(width);
        self.ends.push(self.text.len());
        self
    }

    /// A cell that may be empty: shown as `-`.
    pub(crate) fn optional(&mut self, value: Option<impl Display>) -> &mut Self {
        match value {
            Some(value) => self.cell(value),
            None => self.cell("-"),
        }
    }

    /// Writes heading and rows.
    pub(crate) fn print(&self, out: &mut dyn Write, wide: bool) -> io::Result<()> {
        let shown: Vec<usize> = (0..self.columns.len()).filter(|&column| wide || !self.columns[column].wide).collect();
        let mut line = String::new();
        for (place, &column) in shown.iter().enumerate() {
            self.pad(&mut line, column, self.columns[column].title, place + 1 == shown.len());
        }
        writeln!(out, "{line}")?;
        let mut start_of_row = 0;
        for row in self.ends.chunks_exact(self.columns.len()) {
            line.clear();
            for (place, &column) in shown.iter().enumerate() {
                let start = if column == 0 { start_of_row } else { row[column - 1] };
                self.pad(&mut line, column, &self.text[start..row[column]], place + 1 == shown.len());
            }
            start_of_row = row[self.columns.len() - 1];
            writeln!(out, "{line}")?;
        }
        Ok(())
    }

    fn pad(&self, line: &mut String, column: usize, cell: &str, last: bool) {
        let missing = self.widths[column].saturating_sub(cell.chars().count());
        let blanks = |line: &mut String, count| line.extend(std::iter::repeat_n(' ', count));
        if self.columns[column].right {
            blanks(line, missing);
        }
        line.push_str(cell);
        if !last {
            if !self.columns[column].right {
                blanks(line, missing);
            }
            line.push_str("  ");
        }
    }
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
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1023.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{count} B")
    } else if value < 9.995 {
        format!("{value:.2} {}", UNITS[unit])
    } else if value < 99.95 {
        format!("{value:.1} {}", UNITS[unit])
    } else {
        format!("{value:.0} {}", UNITS[unit])
    }
}

/// Seconds in at most two units.
pub(crate) fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{}h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column] =
        &[Column::text("NAME"), Column::number("COUNT"), Column::text("NOTE").wide(), Column::text("END")];

    fn printed(wide: bool) -> String {
        let mut table = Table::new(COLUMNS);
        table.cell("a").cell(1).cell("first").cell("x");
        table.cell("longer").cell(123_456).optional(None::<&str>).cell("esc\u{1b}[1m");
        let mut out = Vec::new();
        table.print(&mut out, wide).unwrap();
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
    fn an_empty_table_is_its_heading() {
        let mut out = Vec::new();
        Table::new(COLUMNS).print(&mut out, false).unwrap();
        assert_eq!(out, b"NAME  COUNT  END\n");
    }

    #[test]
    fn units() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (10_240, "10.0 KiB"),
            (1_048_575, "1.00 MiB"),
            (123 << 20, "123 MiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
        for (seconds, text) in [(0, "0s"), (59, "59s"), (60, "1m0s"), (3660, "1h1m"), (90_000, "1d1h")] {
            assert_eq!(age(seconds), text);
        }
    }
}
