//! Typed access to the nodes of the file: every wrong value becomes one message that names object and key.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use ipnet::IpNet;

use super::AddressRange;
use super::document::{Key, Node, Value};
use super::error::{Mistake, Position, quote};
use super::unsupported::Unsupported;
use super::validate::impossible;

pub(super) type Result<T> = std::result::Result<T, Mistake>;

/// Where the values that were read stand, by key path.
pub(super) type Positions = RefCell<BTreeMap<String, Position>>;

/// A value, with what it is called.
#[derive(Clone)]
pub(super) struct Item<'a> {
    positions: &'a Positions,
    node: &'a Node,
    /// Where to point when something is wrong with it.
    pub(super) at: Position,
    /// The object it belongs to, in words; empty at the top.
    object: Rc<str>,
    /// Its key in that object.
    key: String,
    /// Its key path in the file.
    pub(super) path: String,
}

/// A map whose keys are all known.
pub(super) struct Object<'a> {
    item: Item<'a>,
    entries: &'a [(Key, Node)],
    /// What `item.key` adds to the keys of its values, unless it has a name of its own.
    prefix: String,
}

impl<'a> Item<'a> {
    /// The whole file.
    pub(super) fn root(node: &'a Node, positions: &'a Positions) -> Self {
        Self { positions, node, at: node.at, object: Rc::from(""), key: String::new(), path: String::new() }
    }

    /// A mistake in this value.
    pub(super) fn wrong(&self, message: impl AsRef<str>) -> Mistake {
        let separator = |text: &str| if text.is_empty() { "" } else { ": " };
        let (object, key, message) = (&self.object, &self.key, message.as_ref());
        Mistake::new(self.at, format!("{object}{}{key}{}{message}", separator(object), separator(key)))
    }

    /// Object and key, in words.
    pub(super) fn label_text(&self) -> String {
        let separator = if self.object.is_empty() { "" } else { ": " };
        format!("{}{separator}{}", self.object, self.key)
    }

    /// Refuses what does not work yet.
    pub(super) fn unsupported(&self, what: Unsupported) -> Mistake {
        self.wrong(what.refusal())
    }

    /// Whether nothing stands behind the key.
    pub(super) fn is_null(&self) -> bool {
        self.node.is_null()
    }

    /// The text of a scalar; `wanted` says what should stand there.
    pub(super) fn text(&self, wanted: &str) -> Result<&'a str> {
        if self.is_null() {
            return Err(self.wrong(format!("has no value: write {wanted}, or remove the key")));
        }
        match &self.node.value {
            Value::Scalar { text, .. } => Ok(text),
            Value::List(_) | Value::Map(_) => Err(self.wrong(format!("is {}: write {wanted}", self.node.kind()))),
        }
    }

    /// The text of a scalar, if it is one.
    pub(super) fn scalar(&self) -> Option<&'a str> {
        match &self.node.value {
            Value::Scalar { text, .. } if !self.is_null() => Some(text),
            Value::Scalar { .. } | Value::List(_) | Value::Map(_) => None,
        }
    }

    /// Whether it is a map.
    pub(super) fn is_map(&self) -> bool {
        matches!(self.node.value, Value::Map(_))
    }

    /// The items of a list.
    pub(super) fn list(&self, wanted: &str) -> Result<Vec<Self>> {
        match &self.node.value {
            Value::List(items) => Ok(items
                .iter()
                .enumerate()
                .map(|(index, node)| self.child(node, node.at, &format!("[{index}]")))
                .collect()),
            Value::Scalar { .. } if self.is_null() => {
                Err(self.wrong(format!("has no value: write a list of {wanted}, or remove the key")))
            }
            Value::Scalar { .. } => Err(self.wrong(format!(
                "is {}: write a list of {wanted}: [{}]",
                self.node.kind(),
                self.node.kind().trim_matches('"')
            ))),
            Value::Map(_) => Err(self.wrong(format!("is a map: write a list of {wanted}, each after a dash"))),
        }
    }

    /// A map with these keys and no others.
    pub(super) fn object(&self, known: &[&str]) -> Result<Object<'a>> {
        self.clone().into_object(None, known)
    }

    /// A map with these keys, `name` among them, that messages call `kind NAME`.
    pub(super) fn named_object(&self, kind: &str, known: &[&str]) -> Result<Object<'a>> {
        self.clone().into_object(Some(kind), known)
    }

    fn into_object(mut self, kind: Option<&str>, known: &[&str]) -> Result<Object<'a>> {
        let entries = self.entries()?;
        let mut prefix = self.key.clone();
        if let Some(kind) = kind {
            let name = entries.iter().find(|(key, _)| key.text == "name").map(|(_, node)| &node.value);
            if let Some(Value::Scalar { text, .. }) = name
                && is_name(text)
            {
                let outer = self.object.to_string();
                let separator = if outer.is_empty() { "" } else { ": " };
                self.object = Rc::from(format!("{outer}{separator}{kind} {text}"));
                prefix.clear();
            }
        }
        for (key, _) in entries {
            if !known.contains(&key.text.as_str()) {
                let mut at_key = self.clone();
                at_key.at = key.at;
                at_key.key.clone_from(&prefix);
                return Err(at_key.wrong(unknown_key(&key.text, known)));
            }
        }
        Ok(Object { entries, prefix, item: self })
    }

    /// The entries of a map.
    pub(super) fn entries(&self) -> Result<&'a [(Key, Node)]> {
        match &self.node.value {
            Value::Map(entries) => Ok(entries),
            Value::Scalar { .. } if self.is_null() => {
                Err(self.wrong("has no value: write its keys below it, indented, or remove it"))
            }
            Value::Scalar { .. } | Value::List(_) => {
                Err(self.wrong(format!("is {}: write `key: value` pairs", self.node.kind())))
            }
        }
    }

    fn child(&self, node: &'a Node, at: Position, suffix: &str) -> Self {
        let path = format!("{}{suffix}", self.path);
        self.positions.borrow_mut().insert(path.clone(), at);
        Self {
            positions: self.positions,
            node,
            at,
            object: Rc::clone(&self.object),
            key: format!("{}{suffix}", self.key),
            path,
        }
    }

    /// A whole number within bounds.
    pub(super) fn number(&self, bounds: RangeInclusive<u32>) -> Result<u32> {
        let (low, high) = (bounds.start(), bounds.end());
        let text = self.text(&format!("a number from {low} to {high}"))?;
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse::<u32>() {
            Ok(number) if digits && bounds.contains(&number) => Ok(number),
            _ => Err(self.wrong(format!("{} is not a number from {low} to {high}: write one", quote(text)))),
        }
    }

    /// A port number.
    pub(super) fn port(&self) -> Result<u16> {
        let text = self.text("a port from 1 to 65535")?;
        match text.parse::<u16>() {
            Ok(port) if port > 0 && text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(port),
            _ => Err(self.wrong(format!("{} is not a port: write a number from 1 to 65535", quote(text)))),
        }
    }

    /// `true` or `false`.
    pub(super) fn truth(&self) -> Result<bool> {
        self.choice(&[("true", true), ("false", false)])
    }

    /// One of some words.
    pub(super) fn choice<T: Copy>(&self, words: &[(&str, T)]) -> Result<T> {
        let list = alternatives(&words.iter().map(|(word, _)| *word).collect::<Vec<_>>());
        let text = self.text(&list)?;
        words
            .iter()
            .find(|(word, _)| *word == text)
            .map(|(_, value)| *value)
            .ok_or_else(|| self.wrong(format!("{} is not known here: write {list}", quote(text))))
    }

    /// A duration with its unit, within bounds.
    pub(super) fn duration(&self, bounds: RangeInclusive<Duration>) -> Result<Duration> {
        let text = self.text("a duration such as 500ms, 30s or 2h4m")?;
        let duration = parse_duration(text).map_err(|problem| self.wrong(problem))?;
        if !bounds.contains(&duration) {
            return Err(self.wrong(format!(
                "{text} is out of bounds: write {} to {}",
                show_duration(*bounds.start()),
                show_duration(*bounds.end())
            )));
        }
        Ok(duration)
    }

    /// A name of our own: tenants, frontends, hubs.
    pub(super) fn name(&self) -> Result<String> {
        const RULE: &str = "write 1 to 63 letters, digits, `-`, `_` or `.`, starting and ending with a letter or digit";
        let text = self.text("a name")?;
        if is_name(text) {
            Ok(text.to_owned())
        } else {
            Err(self.wrong(format!("{} is not a name: {RULE}", quote(text))))
        }
    }

    /// A DNS label, as namespaces and Services have for names.
    pub(super) fn label(&self, what: &str) -> Result<String> {
        let text = self.text(what)?;
        if is_label(text) { Ok(text.to_owned()) } else { Err(self.not_a_label(text, what)) }
    }

    /// `namespace/name`.
    pub(super) fn service(&self) -> Result<(String, String)> {
        let text = self.text("a Service as namespace/name")?;
        let Some((namespace, name)) = text.split_once('/') else {
            return Err(self.wrong(format!("{} is not a Service: write namespace/name", quote(text))));
        };
        if !is_label(namespace) {
            return Err(self.not_a_label(namespace, "a namespace"));
        }
        if !is_label(name) {
            return Err(self.not_a_label(name, "a Service name"));
        }
        Ok((namespace.to_owned(), name.to_owned()))
    }

    fn not_a_label(&self, text: &str, what: &str) -> Mistake {
        self.wrong(format!(
            "{} is not {what}: write 1 to 63 lower-case letters, digits or `-`, starting and ending with a letter or digit",
            quote(text)
        ))
    }

    /// The name of a network interface.
    pub(super) fn interface(&self) -> Result<String> {
        let text = self.text("the name of a network interface")?;
        let bad = |c: char| !c.is_ascii_graphic() || matches!(c, '/' | ':');
        if text.is_empty() || text.len() > 15 || text.contains(bad) || matches!(text, "." | "..") {
            return Err(self.wrong(format!(
                "{} cannot be the name of an interface: write 1 to 15 characters without `/`, `:` and spaces, as `ip link` \
                 shows it",
                quote(text)
            )));
        }
        if text == "lo" {
            return Err(self.wrong("lo has no network behind it: write the interface that the segment is on"));
        }
        Ok(text.to_owned())
    }

    /// An address that a host can have, and that means the same everywhere.
    pub(super) fn address(&self) -> Result<IpAddr> {
        let text = self.text("an address")?;
        let address = self.parse_address(text)?;
        self.usable(address, text)?;
        Ok(address)
    }

    /// The address of a router: that of IPv6 is link-local, as a rule.
    pub(super) fn router(&self) -> Result<IpAddr> {
        let text = self.text("an address")?;
        let address = self.parse_address(text)?;
        if !is_link_local(address) {
            self.usable(address, text)?;
        }
        Ok(address)
    }

    /// One value, or a list with one for each family.
    pub(super) fn by_family<T>(
        &self,
        wanted: &str,
        read: impl Fn(&Self) -> Result<T>,
        v6: impl Fn(&T) -> bool,
    ) -> Result<Vec<T>> {
        if !matches!(self.node.value, Value::List(_)) {
            return Ok(vec![read(self)?]);
        }
        let items = self.list(wanted)?;
        if items.is_empty() {
            return Err(self.wrong(format!("is empty: write {wanted}, or remove it")));
        }
        let mut found: Vec<T> = Vec::new();
        for item in &items {
            let value = read(item)?;
            if found.iter().any(|other| v6(other) == v6(&value)) {
                let family = if v6(&value) { "IPv6" } else { "IPv4" };
                return Err(item.wrong(format!("is a second one of {family}: write at most one of each family")));
            }
            found.push(value);
        }
        Ok(found)
    }

    fn parse_address(&self, text: &str) -> Result<IpAddr> {
        let hint = if text.contains('/') {
            "write the address without a prefix length"
        } else if text.contains('%') {
            "write the address without a zone"
        } else if text.parse::<std::net::SocketAddr>().is_ok() {
            "write the address without a port"
        } else if text.starts_with('[') || text.contains(':') {
            "write an IPv6 address such as 2001:db8::10, without brackets"
        } else {
            "write four numbers from 0 to 255 with dots, without leading zeros"
        };
        text.parse::<IpAddr>().map_err(|_| self.wrong(format!("{} is not an address: {hint}", quote(text))))
    }

    /// Refuses addresses that no host can have.
    fn usable(&self, address: IpAddr, text: &str) -> Result<()> {
        let what = match address {
            IpAddr::V4(v4) if v4.octets()[0] == 0 => "an address of \"this network\"",
            IpAddr::V4(v4) if v4.octets()[0] >= 240 => "a reserved address",
            IpAddr::V6(v6) if v6.is_unspecified() => "the unspecified address",
            IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => "an IPv4 address written as one of IPv6",
            IpAddr::V6(_) if is_link_local(address) => "a link-local address",
            _ if address.is_loopback() => "a loopback address",
            _ if address.is_multicast() => "a multicast address",
            IpAddr::V4(_) | IpAddr::V6(_) => return Ok(()),
        };
        Err(self.wrong(format!("{text} is {what}, which cannot stand here: write another one")))
    }

    /// An address with its prefix length.
    pub(super) fn address_with_prefix(&self) -> Result<IpNet> {
        let text = self.text("an address with its prefix length, such as 192.0.2.10/24")?;
        let net = self.parse_net(text)?;
        self.usable(net.addr(), text)?;
        match impossible(net.addr(), net) {
            None => Ok(net),
            Some(what) => {
                Err(self.wrong(format!("{text} is {what} its prefix: write the host's own address in the segment")))
            }
        }
    }

    /// A prefix without host bits.
    pub(super) fn cidr(&self) -> Result<IpNet> {
        let text = self.text("a prefix such as 192.0.2.0/24")?;
        let net = self.parse_net(text)?;
        self.no_host_bits(net, text)?;
        Ok(net)
    }

    fn no_host_bits(&self, net: IpNet, text: &str) -> Result<()> {
        if net.trunc() == net {
            return Ok(());
        }
        let (prefix, single) = (net.trunc(), net.addr());
        let longest = net.max_prefix_len();
        Err(self.wrong(format!(
            "{text} has bits behind its prefix: write {prefix}, or {single}/{longest} for the one address"
        )))
    }

    fn parse_net(&self, text: &str) -> Result<IpNet> {
        text.parse::<IpNet>().map_err(|_| {
            let hint = if text.contains('/') {
                "write ADDRESS/LENGTH"
            } else if text.contains(':') {
                "write its length too, such as /64"
            } else {
                "write its length too, such as /24"
            };
            self.wrong(format!("{} is not a prefix: {hint}", quote(text)))
        })
    }

    /// A range, a prefix or a single address.
    pub(super) fn range(&self) -> Result<AddressRange> {
        let text = self.text("a range or prefix such as 192.0.2.10-192.0.2.19 or 192.0.2.16/28")?;
        let range = if let Some((first, last)) = text.split_once('-') {
            AddressRange { first: self.parse_address(first.trim())?, last: self.parse_address(last.trim())? }
        } else if text.contains('/') {
            let net = self.parse_net(text)?;
            self.no_host_bits(net, text)?;
            AddressRange { first: net.network(), last: net.broadcast() }
        } else {
            let address = self.parse_address(text)?;
            AddressRange { first: address, last: address }
        };
        if range.first.is_ipv4() != range.last.is_ipv4() {
            return Err(self.wrong(format!("{range} starts in one family and ends in the other: write two ranges")));
        }
        if range.first > range.last {
            return Err(self.wrong(format!("{range} is backwards: write {}-{}", range.last, range.first)));
        }
        self.usable(range.first, text)?;
        self.usable(range.last, text)?;
        Ok(range)
    }

    /// First and last port, both at least `lowest`.
    pub(super) fn port_range(&self, lowest: u16) -> Result<(u16, u16)> {
        let text = self.text("two ports such as 1024-32767")?;
        let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0);
        let Some((first, last)) = text.split_once('-').and_then(|(first, last)| Some((port(first)?, port(last)?)))
        else {
            return Err(
                self.wrong(format!("{} is not a range of ports: write two ports such as 1024-32767", quote(text)))
            );
        };
        if first > last {
            return Err(self.wrong(format!("{first}-{last} is backwards: write {last}-{first}")));
        }
        if first < lowest {
            return Err(self.wrong(format!(
                "{first}-{last} starts below {lowest}, where servers live: write {lowest}-{}",
                last.max(lowest)
            )));
        }
        Ok((first, last))
    }

    /// An absolute path.
    pub(super) fn path(&self) -> Result<PathBuf> {
        let text = self.text("an absolute path")?;
        if !text.starts_with('/') || text.contains('\0') {
            return Err(self.wrong(format!("{} is not an absolute path: write one that starts with /", quote(text))));
        }
        Ok(PathBuf::from(text))
    }

    /// Labels: `matchLabels` and nothing else.
    pub(super) fn selector(&self) -> Result<BTreeMap<String, String>> {
        let object = self.object(&["matchLabels", "matchExpressions"])?;
        if let Some(expressions) = object.get("matchExpressions") {
            return Err(expressions.unsupported(Unsupported::MatchExpressions));
        }
        let labels = object.required("matchLabels", "labels that must all be there")?;
        let mut result = BTreeMap::new();
        for (key, node) in labels.entries()? {
            let mut value = labels.child(node, node.at, &format!(".{}", key.text));
            if !is_label_key(&key.text) {
                value.at = key.at;
                return Err(value.wrong("is not a label key: write [PREFIX/]NAME as Kubernetes has it"));
            }
            let text = match &node.value {
                Value::Scalar { text, .. } => text,
                Value::List(_) | Value::Map(_) => {
                    return Err(value.wrong(format!("is {}: write the label's value", node.kind())));
                }
            };
            if text.len() > 63 || !text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.')) {
                return Err(value.wrong(format!(
                    "{} is not the value of a label: write at most 63 letters, digits, `-`, `_` or `.`",
                    quote(text)
                )));
            }
            result.insert(key.text.clone(), text.clone());
        }
        if result.is_empty() {
            return Err(labels.wrong("has no label: write at least one, or remove the selector"));
        }
        Ok(result)
    }
}

impl<'a> Object<'a> {
    /// The value of a key, if the key is there.
    pub(super) fn get(&self, key: &str) -> Option<Item<'a>> {
        let (found, node) = self.entries.iter().find(|(found, _)| found.text == key)?;
        let at = if node.is_null() { found.at } else { node.at };
        let dot = |prefix: &str| if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") };
        let path = dot(&self.item.path);
        self.item.positions.borrow_mut().insert(path.clone(), at);
        Some(Item {
            positions: self.item.positions,
            node,
            at,
            object: Rc::clone(&self.item.object),
            key: dot(&self.prefix),
            path,
        })
    }

    /// The value of a key that must be there.
    pub(super) fn required(&self, key: &str, wanted: &str) -> Result<Item<'a>> {
        self.get(key).ok_or_else(|| self.wrong(format!("`{key}` is missing: write {key}: {wanted}")))
    }

    /// A mistake in the object as a whole.
    pub(super) fn wrong(&self, message: impl AsRef<str>) -> Mistake {
        let mut item = self.item.clone();
        item.key.clone_from(&self.prefix);
        item.wrong(message)
    }
}

fn unknown_key(key: &str, known: &[&str]) -> String {
    let like = known
        .iter()
        .map(|candidate| (distance(&key.to_ascii_lowercase().replace('-', "_"), candidate), *candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 4)
        .min();
    match like {
        Some((_, candidate)) => format!("unknown key {}: did you mean `{candidate}`?", quote(key)),
        None => format!("unknown key {}: remove it; known here: {}", quote(key), known.join(", ")),
    }
}

/// How many letters to change, add or remove to make one word the other.
fn distance(one: &str, other: &str) -> usize {
    let one: Vec<char> = one.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=one.len()).collect();
    for (i, other) in other.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, one) in one.iter().enumerate() {
            let change = diagonal + usize::from(*one != other);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[one.len()]
}

/// Whether the address means something on one link only.
fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

fn alternatives(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [word] => (*word).to_owned(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

fn is_name(text: &str) -> bool {
    let alphanumeric = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.len() <= 63
        && alphanumeric(text.chars().next())
        && alphanumeric(text.chars().next_back())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

fn is_label(text: &str) -> bool {
    is_name(text) && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

/// A key of a label or an annotation: `[PREFIX/]NAME`.
pub(super) fn is_label_key(text: &str) -> bool {
    let (prefix, name) = text.split_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    is_name(name) && prefix.is_none_or(|prefix| prefix.len() <= 253 && prefix.split('.').all(is_label))
}

fn parse_duration(text: &str) -> std::result::Result<Duration, String> {
    let wrong = || {
        format!(
            "{} is not a duration: write a whole number and a unit (ms, s, m, h or d), such as 500ms, 30s or 2h4m",
            quote(text)
        )
    };
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("{} has no unit: write {text}s for seconds (units: ms, s, m, h, d)", quote(text)));
    }
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let (number, tail) = rest.split_at(digits);
        let end = tail.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        let milliseconds: u64 = match unit {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(wrong()),
        };
        let part = number.parse::<u64>().ok().and_then(|number| number.checked_mul(milliseconds)).ok_or_else(wrong)?;
        total = total.checked_add(Duration::from_millis(part)).ok_or_else(wrong)?;
        rest = tail;
    }
    if text.is_empty() { Err(wrong()) } else { Ok(total) }
}

/// A duration as the file writes it.
pub(super) fn show_duration(duration: Duration) -> String {
    let mut rest = duration.as_millis();
    let mut shown = String::new();
    for (unit, milliseconds) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)] {
        // 24h is how people say it; days only from two on.
        let number = if unit == "d" && rest < 2 * milliseconds { 0 } else { rest / milliseconds };
        if number > 0 {
            shown = format!("{shown}{number}{unit}");
            rest -= number * milliseconds;
        }
    }
    if shown.is_empty() { "0s".to_owned() } else { shown }
}
