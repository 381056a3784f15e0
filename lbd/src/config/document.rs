//! YAML text → a tree of nodes that know where they stand.
//!
//! The tree keeps scalars as they are written; what they mean is decided by whoever reads them, so that `off`, `010` or
//! `1e3` mean what the key says and not what a YAML schema guesses.

use std::collections::HashMap;

use serde_saphyr::granit_parser::{Event, Marker, Options, Parser, ScalarStyle, Span};

use super::error::{Mistake, Position, quote};

/// Objects inside objects; the file needs eight.
const MAX_DEPTH: usize = 32;
/// Nodes in the tree, those that aliases repeat among them: far above any real file, far below what hurts.
const MAX_NODES: usize = 1_000_000;

/// A value of the file.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) at: Position,
    pub(super) value: Value,
}

/// What a value is.
#[derive(Clone, Debug)]
pub(super) enum Value {
    /// Text, number, truth value or nothing.
    Scalar {
        /// As written, without quotes.
        text: String,
        /// Without quotes.
        plain: bool,
    },
    /// `[…]` or `- …`.
    List(Vec<Node>),
    /// `{…}` or `key: …`.
    Map(Vec<(Key, Node)>),
}

/// A key of a map.
#[derive(Clone, Debug)]
pub(super) struct Key {
    pub(super) at: Position,
    pub(super) text: String,
}

impl Node {
    /// Whether the key stands there with nothing behind it.
    pub(super) fn is_null(&self) -> bool {
        matches!(&self.value, Value::Scalar { text, plain: true } if matches!(text.as_str(), "" | "~" | "null"))
    }

    /// What the value is, in words.
    pub(super) fn kind(&self) -> String {
        match &self.value {
            Value::Scalar { .. } if self.is_null() => "nothing".to_owned(),
            Value::Scalar { text, .. } => quote(text),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a map".to_owned(),
        }
    }

    fn size(&self) -> usize {
        match &self.value {
            Value::Scalar { .. } => 1,
            Value::List(items) => 1 + items.iter().map(Self::size).sum::<usize>(),
            Value::Map(entries) => 1 + entries.iter().map(|(_, node)| 1 + node.size()).sum::<usize>(),
        }
    }
}

/// Reads the one document of `text`.
pub(super) fn parse(text: &str) -> Result<Node, Mistake> {
    let mut options = Options::default();
    options.emit_comments = false;
    options.flow_nesting_limit = MAX_DEPTH;
    options.block_nesting_limit = MAX_DEPTH;
    let mut composer =
        Composer { parser: Parser::new_from_str_with_options(text, options), anchors: HashMap::new(), nodes: 0 };
    let mut root = None;
    loop {
        let (event, span) = composer.next()?;
        match event {
            Event::StreamEnd => break,
            Event::DocumentStart(..) if root.is_some() => {
                return Err(Mistake::new(
                    position(span),
                    "a second document starts here, but the file is one document: remove the line `---`",
                ));
            }
            Event::StreamStart | Event::DocumentStart(..) | Event::DocumentEnd => {}
            event => root = Some(composer.node(event, span, 0)?),
        }
    }
    match root {
        Some(root) if !root.is_null() => Ok(root),
        _ => Err(Mistake::new(
            Position { line: 1, column: 1 },
            "the file is empty: it needs at least `version: 1`, `hubs` and `tenants`",
        )),
    }
}

struct Composer<'a> {
    parser: Parser<'a, serde_saphyr::granit_parser::StrInput<'a>>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
}

impl<'a> Composer<'a> {
    fn next(&mut self) -> Result<(Event<'a>, Span), Mistake> {
        match self.parser.next_event() {
            Some(Ok(next)) => Ok(next),
            Some(Err(error)) => {
                let marker = error.marker();
                let info = error.info();
                let info = if info.is_empty() { format!("{:?}", error.kind()) } else { info };
                Err(Mistake::new(
                    place(*marker),
                    format!(
                        "this is not YAML: {info}: correct the text here or just before (indentation, a quote or a bracket that is not closed)"
                    ),
                ))
            }
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn node(&mut self, event: Event<'a>, span: Span, depth: usize) -> Result<Node, Mistake> {
        let at = position(span);
        if depth > MAX_DEPTH {
            return Err(Mistake::new(
                at,
                format!("more than {MAX_DEPTH} objects inside each other: no key of this file goes that deep"),
            ));
        }
        if event.tag().is_some() {
            let at = span.tag_start().map_or(at, place);
            return Err(Mistake::new(
                at,
                "this value has a YAML tag (`!…`), and no key of this file takes one: remove the tag",
            ));
        }
        self.count(1, at)?;
        let anchor = event.anchor_id();
        let value = match event {
            Event::Scalar(text, style, ..) => {
                Value::Scalar { text: text.into_owned(), plain: matches!(style, ScalarStyle::Plain) }
            }
            Event::SequenceStart(..) => self.list(depth)?,
            Event::MappingStart(..) => self.map(depth)?,
            Event::Alias(anchor) => {
                let Some(node) = self.anchors.get(&anchor).cloned() else {
                    return Err(Mistake::new(
                        at,
                        "this alias (`*…`) stands inside the value it repeats: write the value out",
                    ));
                };
                self.count(node.size(), at)?;
                return Ok(node);
            }
            _ => return Err(Mistake::new(at, "a value is missing here: write it or remove its key")),
        };
        let node = Node { at, value };
        if let Some(anchor) = anchor {
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn list(&mut self, depth: usize) -> Result<Value, Mistake> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd | Event::StreamEnd, _) => return Ok(Value::List(items)),
                (event, span) => items.push(self.node(event, span, depth + 1)?),
            }
        }
    }

    fn map(&mut self, depth: usize) -> Result<Value, Mistake> {
        let mut entries: Vec<(Key, Node)> = Vec::new();
        let mut seen: HashMap<String, Position> = HashMap::new();
        let mut merged: Vec<(Key, Node)> = Vec::new();
        loop {
            let (event, span) = match self.next()? {
                (Event::MappingEnd | Event::StreamEnd, _) => break,
                next => next,
            };
            let key = self.node(event, span, depth + 1)?;
            let Value::Scalar { text, plain } = key.value else {
                return Err(Mistake::new(
                    key.at,
                    format!("a key is a word, and this is {}: write `key: value`", key.kind()),
                ));
            };
            let (event, span) = self.next()?;
            let value = self.node(event, span, depth + 1)?;
            if plain && text == "<<" {
                self.merge(&value, &mut merged)?;
                continue;
            }
            if let Some(first) = seen.insert(text.clone(), key.at) {
                return Err(Mistake::new(
                    key.at,
                    format!("key {} is there twice, first at {first}: remove one of the two", quote(&text)),
                ));
            }
            entries.push((Key { at: key.at, text }, value));
        }
        for (key, node) in merged {
            if !seen.contains_key(&key.text) {
                seen.insert(key.text.clone(), key.at);
                entries.push((key, node));
            }
        }
        Ok(Value::Map(entries))
    }

    /// `<<: *other` and `<<: [*one, *two]`: keys that are not there yet are taken from the other map.
    fn merge(&mut self, value: &Node, into: &mut Vec<(Key, Node)>) -> Result<(), Mistake> {
        let maps = match &value.value {
            Value::List(maps) => maps.as_slice(),
            Value::Map(_) | Value::Scalar { .. } => std::slice::from_ref(value),
        };
        for map in maps {
            let Value::Map(entries) = &map.value else {
                return Err(Mistake::new(
                    map.at,
                    format!("`<<` takes a map, and this is {}: refer to a map", map.kind()),
                ));
            };
            self.count(map.size(), map.at)?;
            into.extend(entries.iter().cloned());
        }
        Ok(())
    }

    fn count(&mut self, nodes: usize, at: Position) -> Result<(), Mistake> {
        self.nodes += nodes;
        if self.nodes > MAX_NODES {
            return Err(Mistake::new(
                at,
                format!("with its aliases (`*…`) the file has more than {MAX_NODES} values: write fewer of them"),
            ));
        }
        Ok(())
    }
}

fn position(span: Span) -> Position {
    place(span.start)
}

fn place(marker: Marker) -> Position {
    Position { line: marker.line().max(1), column: marker.col() + 1 }
}
