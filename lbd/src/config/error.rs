//! What is wrong with a configuration, and where.

use std::collections::BTreeMap;
use std::fmt;

/// A place in the file, counted from 1; columns count characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.line, self.column)
    }
}

/// A file that is not a configuration: the first mistake in it.
///
/// Shown as one line, `FILE:LINE:COLUMN: message`; [`ConfigError::report`] adds the offending line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The file, as it was named.
    pub file: String,
    /// Where; `None` when the file could not be read at all.
    pub position: Option<Position>,
    /// The object, what was wanted and what to do.
    pub message: String,
    /// The offending line of the file.
    pub line: Option<String>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.position {
            Some(position) => write!(formatter, "{}:{position}: {}", self.file, self.message),
            None => write!(formatter, "{}: {}", self.file, self.message),
        }
    }
}

impl std::error::Error for ConfigError {}

impl ConfigError {
    /// The one-line message, then the offending line with a mark under the place.
    pub fn report(&self) -> String {
        let (Some(position), Some(line)) = (self.position, &self.line) else {
            return self.to_string();
        };
        let number = position.line.to_string();
        let indent = " ".repeat(number.len());
        let mark = " ".repeat(position.column.saturating_sub(1));
        format!("{self}\n{indent} |\n{number} | {line}\n{indent} | {mark}^")
    }
}

/// A mistake on its way out of the reader, before the file's name and text are put to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mistake {
    pub(super) position: Position,
    pub(super) message: String,
}

impl Mistake {
    pub(super) fn new(position: Position, message: impl Into<String>) -> Self {
        Self { position, message: message.into() }
    }

    /// Puts the file's name and the offending line to the mistake.
    pub(super) fn in_file(self, file: &str, text: &str) -> ConfigError {
        /// Longer lines are cut: a message must stay readable.
        const SHOWN: usize = 160;
        let line = text
            .lines()
            .nth(self.position.line.saturating_sub(1))
            .filter(|_| self.position.column <= SHOWN)
            .map(|line| line.chars().take(SHOWN).map(|c| if c.is_control() { ' ' } else { c }).collect());
        // Whatever of the file has got into the message, it stays one line and cannot speak to a terminal.
        let mut message = String::with_capacity(self.message.len());
        for c in self.message.chars() {
            if c.is_control() { message.extend(c.escape_debug()) } else { message.push(c) }
        }
        ConfigError { file: file.to_owned(), position: Some(self.position), message, line }
    }
}

/// Where a [`super::Config`] came from: the file, and where in it each value stands.
///
/// Two configurations that say the same are equal whatever file they came from, so all origins are equal.
#[derive(Clone, Default)]
pub struct Origin {
    /// The file, as it was named; empty when there is none.
    pub file: String,
    /// Positions by key path, e.g. `tenants[0].segment.interface`.
    pub(super) positions: BTreeMap<String, Position>,
}

impl fmt::Debug for Origin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The positions would bury the configuration that this is part of.
        formatter.debug_struct("Origin").field("file", &self.file).finish_non_exhaustive()
    }
}

impl PartialEq for Origin {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Origin {}

impl Origin {
    /// Whether the file itself has a value at a key path.
    pub(super) fn knows(&self, path: &str) -> bool {
        self.positions.contains_key(path)
    }

    /// Where the value of a key path such as `tenants[0].segment.interface` stands; for a value that the file leaves
    /// out, where the innermost object around it starts.
    pub fn position(&self, path: &str) -> Option<Position> {
        let mut path = path;
        loop {
            if let Some(position) = self.positions.get(path) {
                return Some(*position);
            }
            path = &path[..path.rfind(['.', '['])?];
        }
    }
}

/// Text of the file in a message: quoted, without control characters, not longer than a line can bear.
pub(super) fn quote(text: &str) -> String {
    const SHOWN: usize = 48;
    let mut shown: String = text.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN).is_some() {
        shown.push('…');
    }
    format!("\"{shown}\"")
}
