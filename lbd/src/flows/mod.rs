//! Flows as an operator sees them: one connection from both halves, states named, ticks turned into seconds, filters.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;
use std::net::{IpAddr, SocketAddr, SocketAddrV4};
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

use ipnet::IpNet;
use lbd_common::abi::{
    Address, FLOW_DEAD, FLOW_FIN, FLOW_PEER_FIN, FLOW_REPLIED, FLOW_RESET, FLOW_REVERSE, FLOW_UDP, Frontend,
    HALF_OPEN_REFUSED, HalfOpen,
};
use serde::{Serialize, Serializer};

pub use self::live::{Lifetimes, Live};
use crate::dataplane::{FlowPair, FlowTables};

pub mod fill;
pub mod follow;
pub mod kill;
mod live;
pub mod ports;
pub mod whois;

/// State of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// The client's SYN went to a backend; the client has not yet proven that it saw the answer.
    HalfOpen,
    /// Open both ways.
    Established,
    /// One side has sent its FIN.
    Closing,
    /// Both sides have sent their FIN; kept for late packets.
    Closed,
    /// One side has sent a RST; kept for late packets.
    Reset,
    /// UDP: the backend has not answered yet.
    Unreplied,
    /// UDP: the backend has answered.
    Replied,
}

impl State {
    /// All states.
    pub const ALL: [Self; 7] =
        [Self::HalfOpen, Self::Established, Self::Closing, Self::Closed, Self::Reset, Self::Unreplied, Self::Replied];

    /// Stable name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::HalfOpen => "half_open",
            Self::Established => "established",
            Self::Closing => "closing",
            Self::Closed => "closed",
            Self::Reset => "reset",
            Self::Unreplied => "unreplied",
            Self::Replied => "replied",
        }
    }

    /// From the `FLOW_*` bits of a half; `None` = marked for removal.
    pub const fn of(bits: u16) -> Option<Self> {
        if bits & FLOW_DEAD != 0 {
            None
        } else if bits & FLOW_UDP != 0 {
            Some(if bits & FLOW_REPLIED != 0 { Self::Replied } else { Self::Unreplied })
        } else if bits & FLOW_RESET != 0 {
            Some(Self::Reset)
        } else {
            Some(match (bits & FLOW_FIN != 0, bits & FLOW_PEER_FIN != 0) {
                (false, false) => Self::Established,
                (true, true) => Self::Closed,
                (true, false) | (false, true) => Self::Closing,
            })
        }
    }

    /// Whether something may still come of it: what is closed or reset is only kept for late packets.
    pub const fn is_open(self) -> bool {
        match self {
            Self::HalfOpen | Self::Established | Self::Closing | Self::Unreplied | Self::Replied => true,
            Self::Closed | Self::Reset => false,
        }
    }
}

impl FromStr for State {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|state| state.as_str() == text).ok_or_else(|| {
            format!("\"{text}\" is no state of a flow; there are {}", Self::ALL.map(Self::as_str).join(", "))
        })
    }
}

/// One connection, both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// IP protocol number.
    pub protocol: u8,
    /// Segment in which the client is.
    pub segment: u16,
    /// Client.
    pub client: SocketAddr,
    /// VIP.
    pub vip: SocketAddr,
    /// Backend.
    pub backend: SocketAddr,
    /// Segment in which the backend is.
    pub backend_segment: u16,
    /// Source that the backend sees.
    pub snat: SocketAddr,
    /// Frontend id.
    pub frontend: u16,
    /// Backend id.
    pub backend_id: u16,
    /// State.
    pub state: State,
    /// Tick at which it was opened.
    pub opened: u32,
    /// Ticks since then.
    pub age: u32,
    /// Ticks since the last packet in either direction.
    pub idle: u32,
    /// Packets client → backend.
    pub in_packets: u64,
    /// Bytes client → backend.
    pub in_bytes: u64,
    /// Packets backend → client.
    pub out_packets: u64,
    /// Bytes backend → client.
    pub out_bytes: u64,
}

/// Address of an IPv6 or IPv4-mapped field of the maps.
pub fn unmap(address: &[u8; 16]) -> IpAddr {
    std::net::Ipv6Addr::from(*address).to_canonical()
}

/// Converts ticks.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Current tick.
    pub now: u32,
    /// Ticks in one second, times 256.
    pub ticks_per_second_256: u32,
}

impl Clock {
    /// Ticks from `then` to now. Another CPU's stamp may lie a little in the future: that is zero.
    pub const fn since(&self, then: u32) -> u32 {
        let ticks = self.now.wrapping_sub(then);
        if ticks > u32::MAX / 2 { 0 } else { ticks }
    }

    /// Seconds, rounded down.
    pub fn seconds(&self, ticks: u32) -> u64 {
        u64::from(ticks) * 256 / u64::from(self.ticks_per_second_256.max(1))
    }

    /// Ticks in a duration.
    pub fn ticks(&self, duration: Duration) -> u64 {
        u64::try_from(duration.as_millis() * u128::from(self.ticks_per_second_256) / 256_000).unwrap_or(u64::MAX)
    }
}

impl Flow {
    /// A flow of the table; `None` = marked for removal, or idle for longer than the datapath keeps it.
    pub fn from_pair<A: FlowTables>(pair: &FlowPair<A>, clock: Clock, lifetimes: &Lifetimes) -> Option<Self> {
        let forward = &pair.forward;
        let reverse = pair.reverse.unwrap_or_default();
        // Only what comes back tells that the backend answers.
        let bits = forward.state | reverse.state & FLOW_REPLIED;
        let state = State::of(bits)?;
        let last_seen = clock.since(forward.last_seen);
        let idle = pair.reverse.map_or(last_seen, |half| last_seen.min(clock.since(half.last_seen)));
        if idle > lifetimes.of(bits, forward.frontend, A::FAMILY) {
            return None;
        }
        Some(Self {
            protocol: pair.key.protocol,
            segment: pair.key.segment,
            client: pair.key.tuple.source(),
            vip: pair.key.tuple.destination(),
            backend: forward.to.destination(),
            backend_segment: pair.backend_segment,
            snat: forward.to.source(),
            frontend: forward.frontend,
            backend_id: forward.backend(),
            state,
            opened: forward.created(),
            age: clock.since(forward.created()),
            idle,
            in_packets: forward.packets(),
            in_bytes: forward.bytes,
            out_packets: reverse.packets,
            out_bytes: reverse.bytes,
        })
    }

    /// A half-open connection; `None` = refused by its backend. Its packets are not counted yet.
    pub fn from_half_open<A: Address>(record: &HalfOpen<A>, clock: Clock) -> Option<Self> {
        (record.state & HALF_OPEN_REFUSED == 0).then(|| Self {
            protocol: 6,
            segment: record.client_segment,
            client: record.client.source(),
            vip: record.client.destination(),
            backend: record.to.destination(),
            backend_segment: record.backend_segment,
            snat: record.to.source(),
            frontend: record.frontend,
            backend_id: record.backend,
            state: State::HalfOpen,
            opened: record.first_syn,
            age: clock.since(record.first_syn),
            idle: clock.since(record.last_seen),
            in_packets: 0,
            in_bytes: 0,
            out_packets: 0,
            out_bytes: 0,
        })
    }
}

/// An address, an address with a port, or a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    network: IpNet,
    port: Option<u16>,
}

impl Endpoint {
    /// Whether it means this one.
    pub fn matches(&self, socket: SocketAddr) -> bool {
        self.network.contains(&socket.ip()) && self.port.is_none_or(|port| port == socket.port())
    }
}

impl Endpoint {
    /// The address and the port, if it is one address with a port.
    pub fn socket(&self) -> Option<SocketAddr> {
        let single = self.network.prefix_len() == self.network.max_prefix_len();
        self.port.filter(|_| single).map(|port| SocketAddr::new(self.network.addr(), port))
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        if let Ok(address) = bare.parse::<IpAddr>() {
            Ok(Self { network: address.into(), port: None })
        } else if let Ok(socket) = text.parse::<SocketAddr>() {
            Ok(Self { network: socket.ip().into(), port: Some(socket.port()) })
        } else if let Ok(network) = text.parse::<IpNet>() {
            Ok(Self { network, port: None })
        } else {
            Err(format!("\"{text}\" is no address, address:port or prefix (write IPv6 with a port as [address]:port)"))
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(formatter, "{}", SocketAddr::new(self.network.addr(), port)),
            None => write!(formatter, "{}", self.network),
        }
    }
}

/// Which flows are meant; everything that is given must fit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Tenant's name, or `#index`.
    pub tenant: Option<String>,
    /// VIP.
    pub vip: Option<Endpoint>,
    /// Client.
    pub client: Option<Endpoint>,
    /// Backend.
    pub backend: Option<Endpoint>,
    /// Source that the backend sees.
    pub snat: Option<SocketAddr>,
    /// Service or frontend: `namespace/name`, a name, or `#id`.
    pub service: Option<String>,
    /// IP protocol number.
    pub protocol: Option<u8>,
    /// State.
    pub state: Option<State>,
    /// Opened at least so long ago.
    pub older: Option<Duration>,
}

/// What a frontend id stands for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrontendNames {
    /// Tenant.
    pub tenant: String,
    /// Service or frontend.
    pub service: String,
    /// Frontend's name.
    pub name: String,
}

/// Names for everything that a flow refers to by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Directory {
    /// The hub.
    pub hub: String,
    /// Frontends by id.
    pub frontends: BTreeMap<u16, FrontendNames>,
    /// Nodes by address.
    pub nodes: BTreeMap<IpAddr, String>,
    /// Segments in which nodes live: the same address elsewhere is another station.
    pub node_segments: Vec<u16>,
}

impl Directory {
    /// Merges what the maps hold with what the agent has called it. Without a name it is `#id`.
    pub fn new(names: &crate::api::types::Names, frontends: &[Frontend]) -> Self {
        let tenant = |index: u16| names.tenants.get(&index).cloned().unwrap_or_else(|| format!("#{index}"));
        let mut all: BTreeMap<u16, FrontendNames> = names
            .frontends
            .iter()
            .map(|(&id, label)| {
                let entry = FrontendNames {
                    tenant: tenant(label.tenant),
                    service: label.label().to_owned(),
                    name: label.name.clone(),
                };
                (id, entry)
            })
            .collect();
        for frontend in frontends {
            all.entry(frontend.id).or_insert_with(|| {
                let id = format!("#{}", frontend.id);
                FrontendNames { tenant: tenant(frontend.tenant), service: id.clone(), name: id }
            });
        }
        Self {
            hub: if names.hub.is_empty() { "#1".to_owned() } else { names.hub.clone() },
            frontends: all,
            nodes: names.nodes.clone(),
            node_segments: names.segments.iter().filter(|(_, label)| label.hub_side).map(|(&id, _)| id).collect(),
        }
    }

    /// Name of the node with this address in this segment.
    pub fn node(&self, segment: u16, address: IpAddr) -> Option<&str> {
        let name = self.nodes.get(&address)?;
        self.node_segments.contains(&segment).then_some(name.as_str())
    }

    /// Names of a frontend that neither the maps nor the agent know any more.
    pub fn unknown(id: u16) -> FrontendNames {
        FrontendNames { tenant: "#0".to_owned(), service: format!("#{id}"), name: format!("#{id}") }
    }
}

/// A [`Filter`] with its names looked up.
pub struct Matcher<'a> {
    filter: &'a Filter,
    older: u64,
    /// Frontends that fit `tenant` and `service`; `None` = all.
    frontends: Option<Vec<bool>>,
}

impl<'a> Matcher<'a> {
    /// Looks the names up.
    pub fn new(filter: &'a Filter, directory: &Directory, clock: Clock) -> Self {
        let frontends = (filter.tenant.is_some() || filter.service.is_some()).then(|| {
            let mut wanted = vec![false; usize::from(u16::MAX) + 1];
            for (&id, names) in &directory.frontends {
                let tenant = filter.tenant.as_ref().is_none_or(|tenant| *tenant == names.tenant);
                let service = filter.service.as_ref().is_none_or(|service| {
                    *service == names.service
                        || *service == names.name
                        || names.service.split_once('/').is_some_and(|(_, name)| name == service)
                        || service.strip_prefix('#').is_some_and(|number| number.parse() == Ok(id))
                });
                wanted[usize::from(id)] = tenant && service;
            }
            wanted
        });
        Self { filter, older: filter.older.map_or(0, |older| clock.ticks(older)), frontends }
    }

    /// Whether the flow may be meant by what its halves, either of them, say of it alone. A cheap first look.
    pub fn may_match<A: Address>(&self, half: &lbd_common::abi::Flow<A>) -> bool {
        let filter = self.filter;
        filter.protocol.is_none_or(|protocol| protocol == half.protocol())
            && self.frontends.as_ref().is_none_or(|frontends| frontends[usize::from(half.frontend)])
            && (filter.client.is_none() && filter.vip.is_none() && filter.backend.is_none() && filter.snat.is_none()
                || {
                    let (inbound, outbound) = if half.state & FLOW_REVERSE == 0 {
                        (half.tuple, half.to)
                    } else {
                        (half.to.turned(), half.tuple.turned())
                    };
                    filter.client.is_none_or(|client| client.matches(inbound.source()))
                        && filter.vip.is_none_or(|vip| vip.matches(inbound.destination()))
                        && filter.backend.is_none_or(|backend| backend.matches(outbound.destination()))
                        && filter.snat.is_none_or(|snat| snat == outbound.source())
                })
    }

    /// Whether the flow is meant.
    pub fn matches(&self, flow: &Flow) -> bool {
        let filter = self.filter;
        filter.protocol.is_none_or(|protocol| protocol == flow.protocol)
            && filter.state.is_none_or(|state| state == flow.state)
            && u64::from(flow.age) >= self.older
            && filter.client.is_none_or(|client| client.matches(flow.client))
            && filter.vip.is_none_or(|vip| vip.matches(flow.vip))
            && filter.backend.is_none_or(|backend| backend.matches(flow.backend))
            && filter.snat.is_none_or(|snat| snat == flow.snat)
            && self.frontends.as_ref().is_none_or(|frontends| frontends[usize::from(flow.frontend)])
    }
}

/// Order of `--top`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum By {
    /// Bytes in both directions.
    #[default]
    Bytes,
    /// Packets in both directions.
    Packets,
    /// Age.
    Age,
}

impl By {
    fn of(self, flow: &Flow) -> u64 {
        match self {
            Self::Bytes => flow.in_bytes.saturating_add(flow.out_bytes),
            Self::Packets => flow.in_packets.saturating_add(flow.out_packets),
            Self::Age => u64::from(flow.age),
        }
    }
}

fn order(flow: &Flow) -> (SocketAddr, SocketAddr, u16, u8) {
    (flow.vip, flow.client, flow.segment, flow.protocol)
}

struct Ranked(u64, Flow);

impl Ord for Ranked {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.cmp(&other.0).then_with(|| order(&other.1).cmp(&order(&self.1)))
    }
}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Ranked {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Ranked {}

/// The largest flows of many.
pub struct Top {
    count: usize,
    by: By,
    heap: BinaryHeap<Reverse<Ranked>>,
}

impl Top {
    /// Keeps `count` of them.
    pub fn new(count: usize, by: By) -> Self {
        Self { count, by, heap: BinaryHeap::new() }
    }

    /// Looks at one more.
    pub fn add(&mut self, flow: Flow) {
        let ranked = Ranked(self.by.of(&flow), flow);
        if self.heap.len() < self.count {
            self.heap.push(Reverse(ranked));
        } else if self.heap.peek().is_some_and(|smallest| smallest.0 < ranked) {
            self.heap.pop();
            self.heap.push(Reverse(ranked));
        }
    }

    /// The largest of all, largest first; of equal ones the first by VIP and client.
    pub fn of(tops: impl IntoIterator<Item = Self>) -> Vec<Flow> {
        let mut tops = tops.into_iter();
        let Some(mut all) = tops.next() else { return Vec::new() };
        for Reverse(Ranked(_, flow)) in tops.flat_map(|top| top.heap) {
            all.add(flow);
        }
        all.heap.into_sorted_vec().into_iter().map(|Reverse(Ranked(_, flow))| flow).collect()
    }
}

/// Flows in an order. They stay where they are: sorting small keys takes a third of the time of sorting flows.
#[derive(Debug, Default)]
pub struct Listing {
    lists: Vec<Vec<Flow>>,
    order: Vec<Position>,
}

/// Number of a list, and of a flow in it.
pub type Position = (u32, u32);

impl From<Vec<Flow>> for Listing {
    /// In the order that they have.
    fn from(flows: Vec<Flow>) -> Self {
        let order = (0..flows.len() as u32).map(|index| (0, index)).collect();
        Self { lists: vec![flows], order }
    }
}

impl Listing {
    /// By VIP and client, IPv4 first.
    pub fn sorted(lists: Vec<Vec<Flow>>) -> Self {
        let (mut four, mut six) = (Vec::with_capacity(lists.iter().map(Vec::len).sum()), Vec::new());
        for (list, number) in lists.iter().zip(0_u32..) {
            for (flow, index) in list.iter().zip(0_u32..) {
                match order4(flow) {
                    Some(key) => four.push((key, (number, index))),
                    None => six.push((order(flow), (number, index))),
                }
            }
        }
        let mut order = in_order(four);
        order.extend(in_order(six));
        Self { lists, order }
    }

    /// Number of flows.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Where the flows are, in order.
    pub fn order(&self) -> &[Position] {
        &self.order
    }

    /// The flow at a position of [`Self::order`].
    pub fn at(&self, (list, index): Position) -> &Flow {
        &self.lists[list as usize][index as usize]
    }

    /// The flows at these positions. They lie anywhere in memory: fetched some at a time, the processor need not wait for each.
    pub fn at_all(&self, positions: &[Position]) -> impl Iterator<Item = Flow> {
        const AT_A_TIME: usize = 32;
        positions.chunks(AT_A_TIME).flat_map(|some| some.iter().map(|&position| *self.at(position)).collect::<Vec<_>>())
    }

    /// All, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Flow> {
        self.order.iter().map(|&position| self.at(position))
    }
}

/// The positions, in the order of their keys. Sorted by two threads if there are many.
fn in_order<K: Ord + Send>(mut keys: Vec<(K, Position)>) -> Vec<Position> {
    /// Fewer are sorted sooner than a thread starts.
    const MANY: usize = 65_536;
    let middle = if keys.len() < MANY { keys.len() } else { keys.len() / 2 };
    let (first, second) = keys.split_at_mut(middle);
    std::thread::scope(|scope| {
        if !second.is_empty() {
            scope.spawn(|| second.sort_unstable());
        }
        first.sort_unstable();
    });
    let (first, second) = keys.split_at(middle);
    let (mut left, mut right) = (first.iter().peekable(), second.iter().peekable());
    let mut order = Vec::with_capacity(keys.len());
    loop {
        let next = match (left.peek(), right.peek()) {
            (Some(one), Some(other)) if one <= other => left.next(),
            (Some(_), None) => left.next(),
            _ => right.next(),
        };
        match next {
            Some(&(_, position)) => order.push(position),
            None => return order,
        }
    }
}

/// [`order`] as a number, if both addresses are IPv4.
fn order4(flow: &Flow) -> Option<u128> {
    let (SocketAddr::V4(vip), SocketAddr::V4(client)) = (flow.vip, flow.client) else { return None };
    let socket = |socket: SocketAddrV4| u128::from(u32::from(*socket.ip())) << 16 | u128::from(socket.port());
    Some(socket(vip) << 72 | socket(client) << 24 | u128::from(flow.segment) << 8 | u128::from(flow.protocol))
}

/// `address:port` as text, on the stack. A million flows have four million of them, and the standard formatter takes its time.
pub struct SocketText {
    bytes: [u8; Self::LENGTH],
    length: usize,
}

impl SocketText {
    /// `[ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255%4294967295]:65535`
    const LENGTH: usize = 72;

    /// Formats it.
    pub fn new(socket: SocketAddr) -> Self {
        let mut text = Self { bytes: [0; Self::LENGTH], length: 0 };
        if let SocketAddr::V4(socket) = socket {
            for (octet, place) in socket.ip().octets().into_iter().zip(0..) {
                if place > 0 {
                    text.push(b'.');
                }
                text.number(octet.into());
            }
            text.push(b':');
            text.number(socket.port());
        } else {
            // It fits: the length is that of the longest.
            let _ = fmt::Write::write_fmt(&mut text, format_args!("{socket}"));
        }
        text
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        str::from_utf8(&self.bytes[..self.length]).unwrap_or_default()
    }

    fn push(&mut self, byte: u8) {
        if let Some(slot) = self.bytes.get_mut(self.length) {
            *slot = byte;
            self.length += 1;
        }
    }

    fn number(&mut self, number: u16) {
        // By constants: the processor's own division is as slow as all the rest.
        let digits = [number / 10_000, number / 1000 % 10, number / 100 % 10, number / 10 % 10, number % 10];
        let first = digits.iter().take(4).position(|&digit| digit > 0).unwrap_or(4);
        for digit in &digits[first..] {
            self.push(b'0' + *digit as u8);
        }
    }
}

impl fmt::Write for SocketText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| self.push(byte));
        Ok(())
    }
}

fn socket_text<S: Serializer>(socket: &SocketAddr, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(SocketText::new(*socket).as_str())
}

/// JSON of one flow: the contract of `lbctl flows -o json`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FlowRecord<'a> {
    /// Hub that the frontend belongs to.
    pub hub: &'a str,
    /// Tenant.
    pub tenant: &'a str,
    /// `TCP` or `UDP`.
    pub proto: &'a str,
    /// Client, `address:port`.
    #[serde(serialize_with = "socket_text")]
    pub client: SocketAddr,
    /// VIP, `address:port`.
    #[serde(serialize_with = "socket_text")]
    pub vip: SocketAddr,
    /// Backend, `address:port`.
    #[serde(serialize_with = "socket_text")]
    pub backend: SocketAddr,
    /// Node, if the backend is one that the agent knows.
    pub node: Option<&'a str>,
    /// `namespace/name` of the Service, or the name of the frontend in the file.
    pub service: &'a str,
    /// Source that the backend sees, `address:port`.
    #[serde(serialize_with = "socket_text")]
    pub snat: SocketAddr,
    /// State.
    pub state: &'static str,
    /// Seconds since it was opened.
    pub age_s: u64,
    /// Seconds since the last packet.
    pub idle_s: u64,
    /// Packets client → backend.
    pub in_packets: u64,
    /// Bytes of IP packets client → backend.
    pub in_bytes: u64,
    /// Packets backend → client.
    pub out_packets: u64,
    /// Bytes of IP packets backend → client.
    pub out_bytes: u64,
}

/// Name of an IP protocol.
pub const fn protocol_name(protocol: u8) -> &'static str {
    match protocol {
        6 => "TCP",
        17 => "UDP",
        _ => "?",
    }
}

/// Names a flow's numbers, many times over.
pub struct Namer<'a> {
    directory: &'a Directory,
    /// By frontend id.
    known: Vec<Option<&'a FrontendNames>>,
    unknown: Vec<OnceLock<FrontendNames>>,
    clock: Clock,
}

impl<'a> Namer<'a> {
    /// With these names.
    pub fn new(directory: &'a Directory, clock: Clock) -> Self {
        let mut known = vec![None; usize::from(u16::MAX) + 1];
        for (&id, names) in &directory.frontends {
            known[usize::from(id)] = Some(names);
        }
        let unknown = std::iter::repeat_with(OnceLock::new).take(known.len()).collect();
        Self { directory, known, unknown, clock }
    }

    fn names(&self, frontend: u16) -> &FrontendNames {
        let id = usize::from(frontend);
        self.known[id].unwrap_or_else(|| self.unknown[id].get_or_init(|| Directory::unknown(frontend)))
    }

    /// The record of a flow.
    pub fn record(&self, flow: &Flow) -> FlowRecord<'_> {
        let names = self.names(flow.frontend);
        FlowRecord {
            hub: &self.directory.hub,
            tenant: &names.tenant,
            proto: protocol_name(flow.protocol),
            client: flow.client,
            vip: flow.vip,
            backend: flow.backend,
            node: self.directory.node(flow.backend_segment, flow.backend.ip()),
            service: &names.service,
            snat: flow.snat,
            state: flow.state.as_str(),
            age_s: self.clock.seconds(flow.age),
            idle_s: self.clock.seconds(flow.idle),
            in_packets: flow.in_packets,
            in_bytes: flow.in_bytes,
            out_packets: flow.out_packets,
            out_bytes: flow.out_bytes,
        }
    }
}

#[cfg(test)]
impl Flow {
    /// A flow as most tests want one.
    pub(crate) fn sample(client: SocketAddr, state: State) -> Self {
        Self {
            protocol: 6,
            segment: 2,
            client,
            vip: "192.0.2.34:6443".parse().unwrap(),
            backend: "10.0.0.11:30918".parse().unwrap(),
            backend_segment: 1,
            snat: "10.0.0.2:1024".parse().unwrap(),
            frontend: 5,
            backend_id: 1,
            state,
            opened: 0,
            age: 0,
            idle: 0,
            in_packets: 1,
            in_bytes: 1,
            out_packets: 1,
            out_bytes: 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use lbd_common::abi::{
        self, Address4, Address6, FLOW_ADOPTED, FamilyLimits, FamilyUse, FlowKey, FrontendOwner, HalfOpen4, Settings,
        Tenant, TenantUse, Timeouts, Tuple, Tuple4,
    };

    use super::*;
    use crate::api::types::{FrontendLabel, Names, SegmentLabel};
    use crate::dataplane::Answers;

    const CLOCK: Clock = Clock { now: 100_000, ticks_per_second_256: 4000 };

    /// All frontends are tenant 1's; the tenant is not near its limit.
    fn lifetimes() -> Lifetimes {
        let timeouts = Timeouts {
            tcp_established: 90_000,
            tcp_half_open: 469,
            tcp_fin: 938,
            tcp_reset: 157,
            udp_unreplied: 469,
            udp_replied: 2812,
        };
        let mut tenant = (Tenant::ZERO, TenantUse::ZERO);
        tenant.0.families = [FamilyLimits { flows: 100, ..FamilyLimits::ZERO }; 2];
        tenant.1.families = [FamilyUse { flows: 2, ..FamilyUse::ZERO }; 2];
        let owner = FrontendOwner { tenant: 1, ..FrontendOwner::ZERO };
        Lifetimes::new(Settings::ZERO, vec![timeouts], vec![owner; 8], [(1, &tenant)])
    }

    fn tuple(source: [u8; 4], source_port: u16, destination: [u8; 4], destination_port: u16) -> Tuple4 {
        Tuple4::new((source.into(), source_port), (destination.into(), destination_port))
    }

    /// A flow between these stations, client → VIP and SNAT address → backend.
    fn pair_of<A: Address>(tuple: Tuple<A>, to: Tuple<A>, protocol: u8, state: u16) -> FlowPair<A> {
        let key = FlowKey { tuple, segment: 2, protocol, pad: 0 };
        FlowPair {
            key,
            forward: abi::Flow {
                tuple,
                segment: 2,
                next_hop: 3,
                to,
                last_seen: CLOCK.now - 100,
                bytes: 1000,
                packets: 10,
                own: abi::Flow::<A>::forward_own(CLOCK.now - 1000, 7),
                frontend: 5,
                state,
                ..abi::Flow::ZERO
            },
            reverse: Some(Answers {
                last_seen: CLOCK.now - 50,
                bytes: 5000,
                packets: (1 << 32) + 20,
                state: state | FLOW_REVERSE,
            }),
            backend_segment: 1,
        }
    }

    /// A TCP flow of client 203.0.113.9:`port` → 192.0.2.34:6443.
    fn pair(port: u16, state: u16) -> FlowPair<Address4> {
        let to = tuple([10, 0, 0, 2], port + 1, [10, 0, 0, 11], 30918);
        pair_of(tuple([203, 0, 113, 9], port, [192, 0, 2, 34], 6443), to, 6, state)
    }

    /// A UDP flow of client `[2001:db8:1::9]:port`.
    fn pair6(port: u16, state: u16) -> FlowPair<Address6> {
        let address = |third, last| Ipv6Addr::new(0x2001, 0xdb8, third, 0, 0, 0, 0, last);
        let to = Tuple::new((address(3, 2), port + 1), (address(3, 0x11), 30053));
        pair_of(Tuple::new((address(1, 9), port), (address(2, 0x34), 53)), to, 17, state | FLOW_UDP)
    }

    fn flow<A: FlowTables>(pair: &FlowPair<A>) -> Option<Flow> {
        Flow::from_pair(pair, CLOCK, &lifetimes())
    }

    fn names() -> Names {
        Names {
            hub: "hub".to_owned(),
            segments: [(1, SegmentLabel { hub_side: true, ..SegmentLabel::default() })].into(),
            tenants: [(1, "tenant-a".to_owned())].into(),
            frontends: [(
                5,
                FrontendLabel { name: "api".to_owned(), service: Some("hcp-a/kube-apiserver".to_owned()), tenant: 1 },
            )]
            .into(),
            nodes: [("10.0.0.11".parse().unwrap(), "n1".to_owned())].into(),
        }
    }

    #[test]
    fn the_json_is_the_contract() {
        let flow = flow(&pair(40000, FLOW_REPLIED)).unwrap();
        assert_eq!((flow.age, flow.idle, flow.backend_id), (1000, 50, 7));
        let names = names();
        let directory = Directory::new(&names, &[]);
        let json = serde_json::to_value(Namer::new(&directory, CLOCK).record(&flow)).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "hub": "hub", "tenant": "tenant-a", "proto": "TCP", "client": "203.0.113.9:40000", "vip": "192.0.2.34:6443",
                "backend": "10.0.0.11:30918", "node": "n1", "service": "hcp-a/kube-apiserver", "snat": "10.0.0.2:40001",
                "state": "established", "age_s": 64, "idle_s": 3, "in_packets": 10, "in_bytes": 1000,
                "out_packets": 4_294_967_316_u64, "out_bytes": 5000
            })
        );
    }

    #[test]
    fn ipv6_and_udp_are_flows_like_any_other() {
        let flow = flow(&pair6(40000, FLOW_REPLIED)).unwrap();
        let names = names();
        let directory = Directory::new(&names, &[]);
        let json = serde_json::to_value(Namer::new(&directory, CLOCK).record(&flow)).unwrap();
        for (field, value) in [
            ("proto", "UDP"),
            ("client", "[2001:db8:1::9]:40000"),
            ("vip", "[2001:db8:2::34]:53"),
            ("backend", "[2001:db8:3::11]:30053"),
            ("snat", "[2001:db8:3::2]:40001"),
            ("state", "replied"),
            ("service", "hcp-a/kube-apiserver"),
        ] {
            assert_eq!(json[field], value, "{field}");
        }
        assert_eq!(json["out_packets"], 4_294_967_316_u64);
    }

    #[test]
    fn a_datagram_that_was_answered_lives_longer() {
        let mut unreplied = pair6(1, 0);
        unreplied.forward.last_seen = CLOCK.now - 470;
        unreplied.reverse = None;
        assert_eq!(flow(&unreplied), None);
        unreplied.forward.last_seen = CLOCK.now - 469;
        assert_eq!(flow(&unreplied).unwrap().state, State::Unreplied);
        unreplied.reverse = Some(Answers { state: FLOW_REVERSE | FLOW_UDP | FLOW_REPLIED, ..Answers::default() });
        unreplied.forward.last_seen = CLOCK.now - 2812;
        assert_eq!(flow(&unreplied).unwrap().state, State::Replied, "one half knows");
        unreplied.forward.last_seen = CLOCK.now - 2813;
        assert_eq!(flow(&unreplied), None);
    }

    #[test]
    fn a_flow_without_its_reverse_half_is_shown() {
        let flow = flow(&FlowPair { reverse: None, ..pair(40000, 0) }).unwrap();
        assert_eq!((flow.out_packets, flow.out_bytes, flow.idle), (0, 0, 100));
    }

    #[test]
    fn a_node_is_one_only_where_nodes_live() {
        let names = names();
        let directory = Directory::new(&names, &[]);
        assert_eq!(directory.node(1, "10.0.0.11".parse().unwrap()), Some("n1"));
        assert_eq!(directory.node(2, "10.0.0.11".parse().unwrap()), None);
        assert_eq!(directory.node(1, "10.0.0.12".parse().unwrap()), None);
    }

    #[test]
    fn states_and_expiry() {
        assert_eq!(State::of(0), Some(State::Established));
        assert_eq!(State::of(FLOW_FIN), Some(State::Closing));
        assert_eq!(State::of(FLOW_PEER_FIN), Some(State::Closing));
        assert_eq!(State::of(FLOW_FIN | FLOW_PEER_FIN), Some(State::Closed));
        assert_eq!(State::of(FLOW_FIN | FLOW_RESET), Some(State::Reset));
        assert_eq!(State::of(FLOW_DEAD | FLOW_FIN), None);
        assert_eq!(State::of(FLOW_UDP), Some(State::Unreplied));
        assert_eq!(State::of(FLOW_UDP | FLOW_REPLIED), Some(State::Replied));
        assert_eq!(State::of(FLOW_UDP | FLOW_REPLIED | FLOW_DEAD), None);
        assert_eq!(State::of(FLOW_REPLIED | FLOW_ADOPTED), Some(State::Established));
        for state in State::ALL {
            assert_eq!(state.as_str().parse(), Ok(state));
            assert_eq!(state.is_open(), !matches!(state, State::Closed | State::Reset));
        }
        assert_eq!(flow(&pair(1, FLOW_DEAD)), None);
        let mut reset = pair(1, FLOW_RESET);
        assert_eq!(flow(&reset).unwrap().state, State::Reset);
        reset.forward.last_seen = CLOCK.now - 158;
        assert!(flow(&reset).is_some(), "the other direction is younger");
        reset.reverse = None;
        assert_eq!(flow(&reset), None, "a reset flow is forgotten after its timeout");
        let mut ahead = pair(1, 0);
        ahead.forward.last_seen = CLOCK.now + 3;
        assert_eq!(flow(&ahead).unwrap().idle, 0, "another CPU may be a tick ahead");
    }

    #[test]
    fn half_open_records_are_flows_too() {
        let record = HalfOpen4 {
            client: tuple([203, 0, 113, 9], 1, [192, 0, 2, 34], 6443),
            to: tuple([10, 0, 0, 2], 2, [10, 0, 0, 11], 30918),
            first_syn: CLOCK.now - 20,
            last_seen: CLOCK.now - 10,
            ..HalfOpen4::ZERO
        };
        let flow = Flow::from_half_open(&record, CLOCK).unwrap();
        assert_eq!((flow.state, flow.age, flow.idle), (State::HalfOpen, 20, 10));
        let refused = HalfOpen4 { state: HALF_OPEN_REFUSED, ..record };
        assert_eq!(Flow::from_half_open(&refused, CLOCK), None);
    }

    #[test]
    fn filters() {
        let flows = [
            flow(&pair(40000, 0)).unwrap(),
            flow(&pair(40002, FLOW_FIN)).unwrap(),
            Flow { frontend: 6, ..flow(&pair6(40004, 0)).unwrap() },
        ];
        let names = names();
        let directory = Directory::new(&names, &[]);
        let count = |filter: Filter| {
            let matcher = Matcher::new(&filter, &directory, CLOCK);
            flows.iter().filter(|flow| matcher.matches(flow)).count()
        };
        assert_eq!(count(Filter::default()), 3);
        for (text, expected) in [
            ("203.0.113.9", 2),
            ("203.0.113.9:40000", 1),
            ("203.0.113.0/24", 2),
            ("203.0.114.0/24", 0),
            ("0.0.0.0/0", 2),
            ("::/0", 1),
            ("2001:db8:1::9", 1),
            ("[2001:db8:1::9]:40004", 1),
            ("[2001:db8:1::9]:40000", 0),
            ("2001:db8:1::/48", 1),
        ] {
            assert_eq!(count(Filter { client: Some(text.parse().unwrap()), ..Filter::default() }), expected, "{text}");
        }
        assert_eq!(count(Filter { vip: Some("192.0.2.34:6443".parse().unwrap()), ..Filter::default() }), 2);
        assert_eq!(count(Filter { backend: Some("10.0.0.12".parse().unwrap()), ..Filter::default() }), 0);
        for service in ["hcp-a/kube-apiserver", "kube-apiserver", "api", "#5"] {
            assert_eq!(count(Filter { service: Some(service.to_owned()), ..Filter::default() }), 2, "{service}");
        }
        assert_eq!(count(Filter { service: Some("hcp-a/other".to_owned()), ..Filter::default() }), 0);
        assert_eq!(count(Filter { tenant: Some("tenant-b".to_owned()), ..Filter::default() }), 0);
        assert_eq!(count(Filter { protocol: Some(17), ..Filter::default() }), 1);
        assert_eq!(count(Filter { protocol: Some(6), ..Filter::default() }), 2);
        assert_eq!(count(Filter { state: Some(State::Unreplied), ..Filter::default() }), 1);
        assert_eq!(count(Filter { snat: Some("10.0.0.2:40003".parse().unwrap()), ..Filter::default() }), 1);
        assert_eq!(count(Filter { snat: Some("[2001:db8:3::2]:40005".parse().unwrap()), ..Filter::default() }), 1);
        assert_eq!(count(Filter { snat: Some("10.0.0.3:40003".parse().unwrap()), ..Filter::default() }), 0);
        assert_eq!(count(Filter { state: Some(State::Closing), ..Filter::default() }), 1);
        assert_eq!(count(Filter { older: Some(Duration::from_secs(63)), ..Filter::default() }), 3);
        assert_eq!(count(Filter { older: Some(Duration::from_secs(65)), ..Filter::default() }), 0);
    }

    /// Both halves of the flow pass the first look of every filter that the flow passes, and most others do not.
    #[test]
    fn the_first_look_at_a_half_drops_nothing_that_is_meant() {
        fn looks<A: FlowTables>(pair: &FlowPair<A>, matcher: &Matcher<'_>) -> [bool; 3] {
            let reply = FlowKey::reply(&pair.forward.to, 1, pair.key.protocol);
            let reverse = abi::Flow {
                tuple: reply.tuple,
                to: pair.key.tuple.turned(),
                frontend: pair.forward.frontend,
                state: pair.forward.state | FLOW_REVERSE,
                ..abi::Flow::ZERO
            };
            let whole = matcher.matches(&flow(pair).unwrap());
            [whole, matcher.may_match(&pair.forward), matcher.may_match(&reverse)]
        }
        let endpoint = |text: &str| Some(text.parse().unwrap());
        let names = names();
        let directory = Directory::new(&names, &[]);
        for (filter, four, six) in [
            (Filter::default(), true, true),
            (Filter { protocol: Some(6), ..Filter::default() }, true, false),
            (Filter { client: endpoint("203.0.113.9:40000"), ..Filter::default() }, true, false),
            (Filter { client: endpoint("2001:db8:1::9"), ..Filter::default() }, false, true),
            (Filter { client: endpoint("192.0.2.34"), ..Filter::default() }, false, false),
            (Filter { vip: endpoint("192.0.2.34:6443"), ..Filter::default() }, true, false),
            (Filter { vip: endpoint("2001:db8:2::/48"), ..Filter::default() }, false, true),
            (Filter { backend: endpoint("10.0.0.11:30918"), ..Filter::default() }, true, false),
            (Filter { backend: endpoint("10.0.0.2"), ..Filter::default() }, false, false),
            (Filter { snat: Some("[2001:db8:3::2]:40001".parse().unwrap()), ..Filter::default() }, false, true),
            (Filter { service: Some("api".to_owned()), ..Filter::default() }, true, true),
            (Filter { tenant: Some("tenant-b".to_owned()), ..Filter::default() }, false, false),
        ] {
            let matcher = Matcher::new(&filter, &directory, CLOCK);
            assert_eq!(looks(&pair(40000, 0), &matcher), [four; 3], "{filter:?}");
            assert_eq!(looks(&pair6(40000, 0), &matcher), [six; 3], "{filter:?}");
        }
    }

    #[test]
    fn sockets_are_written_as_the_standard_does() {
        for text in
            ["0.0.0.0:0", "255.255.255.255:65535", "10.20.30.104:1009", "[2001:db8::1]:443", "[::ffff:1.2.3.4]:9"]
        {
            let socket: SocketAddr = text.parse().unwrap();
            assert_eq!(SocketText::new(socket).as_str(), socket.to_string());
        }
        let longest = "[1111:2222:3333:4444:5555:6666:7777:8888]:65535".parse().unwrap();
        assert_eq!(SocketText::new(longest).as_str(), longest.to_string());
        for port in 0..=u16::MAX {
            assert_eq!(
                SocketText::new((std::net::Ipv4Addr::LOCALHOST, port).into()).as_str(),
                format!("127.0.0.1:{port}")
            );
        }
    }

    #[test]
    fn endpoints_parse() {
        for good in
            ["1.2.3.4", "1.2.3.4:5", "1.2.3.0/24", "2001:db8::1", "[2001:db8::1]:443", "[2001:db8::1]", "2001:db8::/32"]
        {
            assert!(good.parse::<Endpoint>().is_ok(), "{good}");
        }
        for bad in ["", "1.2.3", "1.2.3.4:", "1.2.3.4:70000", "1.2.3.4/33", "host:1"] {
            assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_top_is_largest_first() {
        let mut flows: Vec<Flow> = (0..100).filter_map(|port| flow(&pair(port * 2, 0))).collect();
        for (index, flow) in flows.iter_mut().enumerate() {
            flow.in_bytes = (index as u64 * 37) % 100;
        }
        // As several threads find them.
        let top = |count, by| {
            Top::of(flows.chunks(40).map(|chunk| {
                let mut top = Top::new(count, by);
                for flow in chunk {
                    top.add(*flow);
                }
                top
            }))
        };
        assert_eq!(top(3, By::Bytes).iter().map(|flow| flow.in_bytes).collect::<Vec<_>>(), [99, 98, 97]);
        assert_eq!(top(2, By::Age).iter().map(|flow| flow.client.port()).collect::<Vec<_>>(), [0, 2]);
        assert!(top(0, By::Age).is_empty());
        assert_eq!(top(1000, By::Packets).len(), 100);
    }

    #[test]
    fn listings_are_in_order_whoever_found_the_flows() {
        let mut flows: Vec<Flow> = (0..200u16).filter_map(|port| flow(&pair(port.wrapping_mul(31_337), 0))).collect();
        flows.extend((0..50u16).filter_map(|port| flow(&pair6(port.wrapping_mul(31_337), 0))));
        for (flow, number) in flows.iter_mut().zip(0u16..) {
            flow.vip.set_port(number % 3);
            flow.segment = number % 5;
        }
        let mut expected = flows.clone();
        expected.sort_by_key(order);
        let listing = Listing::sorted(flows.chunks(60).map(<[Flow]>::to_vec).collect());
        assert_eq!(listing.iter().copied().collect::<Vec<_>>(), expected);
        assert_eq!(Listing::from(flows.clone()).iter().copied().collect::<Vec<_>>(), flows);
        // Enough for two threads.
        let keys: Vec<(u32, Position)> =
            (0..100_000_u32).map(|number| (number.wrapping_mul(0x9e37_79b1), (0, number))).collect();
        let mut expected = keys.clone();
        expected.sort_unstable();
        assert_eq!(in_order(keys), expected.into_iter().map(|(_, position)| position).collect::<Vec<_>>());
    }

    #[test]
    fn ids_without_names_are_shown_as_numbers() {
        let frontend = Frontend { id: 5, tenant: 3, ..Frontend::ZERO };
        let directory = Directory::new(&Names::default(), &[frontend]);
        assert_eq!(
            directory.frontends[&5],
            FrontendNames { tenant: "#3".to_owned(), service: "#5".to_owned(), name: "#5".to_owned() }
        );
    }
}
