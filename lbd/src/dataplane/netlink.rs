//! rtnetlink: what the host's interfaces, routes and neighbours say, and the neighbours that lbd keeps resolved.
//!
//! Blocking sockets and a thread of its own, so that the data plane needs no async runtime and can be asked before there is one.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsRawFd;

use ipnet::IpNet;
use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use rtnetlink::packet_route::link::{
    InfoData, InfoKind, InfoVlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, LinkXdp, XdpAttached,
};
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourExtFlags, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteType};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use super::claims::Place;
use super::groups::{Group, is_solicited_node};
use super::{InterfaceXdp, Mode};
use crate::plan::model::{HostFacts, InterfaceFacts};

/// `NDA_PROTOCOL` of the neighbours that we manage, so that `lbd detach` knows them without any record.
const NEIGHBOUR_PROTOCOL: u8 = 171;

/// Groups: links, neighbours, IPv4 and IPv6 addresses and routes.
const GROUPS: u32 = 1 << 0 | 1 << 2 | 1 << 4 | 1 << 6 | 1 << 8 | 1 << 10;

/// A neighbour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Neighbour {
    /// Its MAC, if it is known.
    pub(super) mac: Option<[u8; 6]>,
    /// The kernel believes in the MAC.
    pub(super) valid: bool,
    /// We made it.
    pub(super) ours: bool,
    /// The kernel keeps it fresh.
    pub(super) managed: bool,
    /// An operator's static entry.
    pub(super) permanent: bool,
}

/// Neighbours by where they are.
pub(super) type Neighbours = BTreeMap<Place, Neighbour>;

/// More of an interface than the plan needs.
#[derive(Clone, Debug, Default)]
pub(super) struct LinkDetails {
    /// Kind, e.g. `veth`; empty for hardware.
    pub(super) kind: String,
    /// Index of the veth peer or parent, if it is in this network namespace.
    pub(super) peer: Option<u32>,
    /// Kernel's name.
    pub(super) name: String,
    /// MTU.
    pub(super) mtu: u32,
    /// XDP programs attached.
    pub(super) xdp: Vec<InterfaceXdp>,
}

/// A request socket.
pub(super) struct Client {
    socket: Socket,
    sequence: u32,
    /// The kernel's words for the last error, if it had any.
    words: Option<String>,
}

impl Client {
    /// Opens a socket in the thread's network namespace.
    pub(super) fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // Optional: gives better texts.
        let _ = socket.set_ext_ack(true);
        let _ = socket.set_cap_ack(true);
        Ok(Self { socket, sequence: 0, words: None })
    }

    fn send(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message));
        packet.finalize();
        let mut buffer = vec![0; packet.buffer_len()];
        packet.serialize(&mut buffer);
        self.socket.send(&buffer, 0).map(|_| ())
    }

    /// Reads the answer to the last request.
    fn answers(&mut self, mut each: impl FnMut(RouteNetlinkMessage)) -> io::Result<()> {
        loop {
            let (buffer, _) = self.socket.recv_from_full()?;
            for message in messages(&buffer) {
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::InnerMessage(inner) => each(inner),
                    NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::Error(error) if error.code.is_none() => return Ok(()),
                    NetlinkPayload::Error(error) => {
                        self.words = words(&error.header);
                        return Err(error.to_io());
                    }
                    _ => {}
                }
            }
        }
    }

    fn dump(&mut self, message: RouteNetlinkMessage, each: impl FnMut(RouteNetlinkMessage)) -> io::Result<()> {
        self.send(message, NLM_F_DUMP)?;
        self.answers(each)
    }

    /// All interfaces with their addresses and default gateways.
    pub(super) fn facts(&mut self) -> io::Result<HostFacts> {
        let mut links = Vec::new();
        self.dump(RouteNetlinkMessage::GetLink(LinkMessage::default()), |message| {
            if let RouteNetlinkMessage::NewLink(link) = message {
                links.push(link);
            }
        })?;
        let mut addresses = Vec::new();
        self.dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()), |message| {
            if let RouteNetlinkMessage::NewAddress(address) = message {
                addresses.push(address);
            }
        })?;
        let mut routes = Vec::new();
        self.dump(RouteNetlinkMessage::GetRoute(RouteMessage::default()), |message| {
            if let RouteNetlinkMessage::NewRoute(route) = message {
                routes.push(route);
            }
        })?;
        Ok(facts(&links, &addresses, &routes))
    }

    /// One interface.
    pub(super) fn link(&mut self, index: u32) -> io::Result<LinkDetails> {
        let mut request = LinkMessage::default();
        request.header.index = index;
        // Without the dump flag the kernel answers with one message and no end mark, so an acknowledgement is asked for.
        self.send(RouteNetlinkMessage::GetLink(request), NLM_F_ACK)?;
        let mut details = LinkDetails::default();
        self.answers(|message| {
            if let RouteNetlinkMessage::NewLink(link) = message {
                details = link_details(&link);
            }
        })?;
        Ok(details)
    }

    /// Neighbours of both families.
    pub(super) fn neighbours(&mut self) -> io::Result<Neighbours> {
        let mut found = Neighbours::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut request = NeighbourMessage::default();
            request.header.family = family;
            self.dump(RouteNetlinkMessage::GetNeighbour(request), |message| {
                if let RouteNetlinkMessage::NewNeighbour(message) = message
                    && let Some((place, neighbour)) = neighbour(&message)
                {
                    found.insert(place, neighbour);
                }
            })?;
        }
        Ok(found)
    }

    /// Has the kernel join a group, for as long as the interface lives.
    pub(super) fn join(&mut self, ifindex: u32, group: Ipv6Addr) -> io::Result<()> {
        let request = RouteNetlinkMessage::NewAddress(group_address(ifindex, group));
        self.send(request, NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE)?;
        self.answers(|_| {})
    }

    /// Has it leave a group that [`Self::join`] has joined.
    pub(super) fn leave(&mut self, ifindex: u32, group: Ipv6Addr) -> io::Result<()> {
        self.send(RouteNetlinkMessage::DelAddress(group_address(ifindex, group)), NLM_F_ACK)?;
        self.answers(|_| {})
    }

    /// Solicited-node groups that were joined that way.
    pub(super) fn joined(&mut self) -> io::Result<BTreeSet<Group>> {
        let mut request = AddressMessage::default();
        request.header.family = AddressFamily::Inet6;
        let mut found = BTreeSet::new();
        self.dump(RouteNetlinkMessage::GetAddress(request), |message| {
            if let RouteNetlinkMessage::NewAddress(message) = message
                && let Some((address, _)) = interface_address(&message)
                && let IpAddr::V6(group) = address.addr()
                && is_solicited_node(address.addr())
            {
                found.insert((message.header.index, group));
            }
        })?;
        Ok(found)
    }

    /// Has the kernel resolve a neighbour now and, from 5.16 on, keep it fresh.
    pub(super) fn resolve(&mut self, place: Place) -> io::Result<()> {
        let mut request = neighbour_request(place);
        request.header.flags = NeighbourFlags::Use;
        request.attributes.push(NeighbourAttribute::ExtFlags(NeighbourExtFlags::Managed));
        request.attributes.push(NeighbourAttribute::Protocol(RouteProtocol::from(NEIGHBOUR_PROTOCOL)));
        self.send(RouteNetlinkMessage::NewNeighbour(request), NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE)?;
        self.answers(|_| {})
    }

    /// Forgets a neighbour that we manage.
    pub(super) fn release(&mut self, place: Place) -> io::Result<()> {
        self.send(RouteNetlinkMessage::DelNeighbour(neighbour_request(place)), NLM_F_ACK)?;
        match self.answers(|_| {}) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            result => result,
        }
    }

    /// Detaches the XDP program that netlink attached (there is no other way to detach those).
    pub(super) fn detach_xdp(&mut self, ifindex: u32, mode: Mode) -> io::Result<()> {
        self.set_xdp(ifindex, -1, mode, 0)
    }

    /// The kernel's words for why it does not attach a program: bpf(2) has none, netlink does.
    pub(super) fn why_not(&mut self, ifindex: u32, program: i32, mode: Mode) -> Option<String> {
        const IF_NONE: u32 = 1;
        self.words = None;
        if self.set_xdp(ifindex, program, mode, IF_NONE).is_ok() {
            // What bpf(2) refused a moment ago is possible now. Not like this: the attachment could not be pinned.
            let _ = self.detach_xdp(ifindex, mode);
        }
        self.words.take()
    }

    fn set_xdp(&mut self, ifindex: u32, fd: i32, mode: Mode, flags: u32) -> io::Result<()> {
        let flags = flags
            | match mode {
                Mode::Native => super::bpf::XDP_NATIVE,
                Mode::Generic => super::bpf::XDP_GENERIC,
            };
        let mut request = LinkMessage::default();
        request.header.index = ifindex;
        request.attributes.push(LinkAttribute::Xdp(vec![LinkXdp::Fd(fd), LinkXdp::Flags(flags)]));
        self.send(RouteNetlinkMessage::SetLink(request), NLM_F_ACK)?;
        self.answers(|_| {})
    }
}

/// The text in an error message with extended acknowledgement: after the header of the request.
fn words(payload: &[u8]) -> Option<String> {
    const HEADER: usize = 16;
    const MESSAGE: u16 = 1;
    let mut rest = payload.get(HEADER..)?;
    while rest.len() >= 4 {
        let length = usize::from(u16::from_ne_bytes([rest[0], rest[1]]));
        let kind = u16::from_ne_bytes([rest[2], rest[3]]);
        let value = rest.get(4..length)?;
        if kind == MESSAGE {
            let end = value.iter().position(|&byte| byte == 0).unwrap_or(value.len());
            return Some(String::from_utf8_lossy(&value[..end]).into_owned());
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
    None
}

/// A socket that hears of every change.
pub(super) struct Events {
    socket: Socket,
}

/// What an event was about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Links, addresses or routes have changed: ask again.
    Facts,
    /// A neighbour has changed.
    Neighbour(Place, Neighbour),
    /// A neighbour entry is gone.
    NeighbourGone(Place),
    /// Events were lost: ask for everything again.
    Lost,
}

impl Events {
    /// Subscribes, in the thread's network namespace.
    pub(super) fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        // Best effort: a burst of events that does not fit is reported as lost.
        let _ = socket.set_rx_buf_sz(4_u32 << 20);
        socket.bind(&SocketAddr::new(0, GROUPS))?;
        socket.set_non_blocking(true)?;
        Ok(Self { socket })
    }

    /// For poll(2).
    pub(super) fn fd(&self) -> i32 {
        self.socket.as_raw_fd()
    }

    /// The events that have arrived.
    pub(super) fn read(&mut self) -> io::Result<Vec<Event>> {
        let mut events = Vec::new();
        loop {
            let buffer = match self.socket.recv_from_full() {
                Ok((buffer, _)) => buffer,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    events.push(Event::Lost);
                    continue;
                }
                Err(error) => return Err(error),
            };
            for message in messages(&buffer) {
                if let NetlinkPayload::InnerMessage(inner) = message.payload
                    && let Some(event) = event(&inner)
                    && events.last() != Some(&event)
                {
                    events.push(event);
                }
            }
        }
        Ok(events)
    }
}

fn event(message: &RouteNetlinkMessage) -> Option<Event> {
    match message {
        RouteNetlinkMessage::NewNeighbour(message) => {
            neighbour(message).map(|(place, neighbour)| Event::Neighbour(place, neighbour))
        }
        RouteNetlinkMessage::DelNeighbour(message) => neighbour(message).map(|(place, _)| Event::NeighbourGone(place)),
        RouteNetlinkMessage::NewLink(_)
        | RouteNetlinkMessage::DelLink(_)
        | RouteNetlinkMessage::NewAddress(_)
        | RouteNetlinkMessage::DelAddress(_)
        | RouteNetlinkMessage::NewRoute(_)
        | RouteNetlinkMessage::DelRoute(_) => Some(Event::Facts),
        _ => None,
    }
}

/// The messages in a datagram; what does not parse (an attribute of a newer kernel) is passed over.
fn messages(buffer: &[u8]) -> Vec<NetlinkMessage<RouteNetlinkMessage>> {
    let mut found = Vec::new();
    let mut offset = 0;
    while let Some(length) = buffer.get(offset..offset + 4) {
        let length = u32::from_ne_bytes([length[0], length[1], length[2], length[3]]) as usize;
        let Some(bytes) = buffer.get(offset..offset + length) else { break };
        if length < 16 {
            break;
        }
        match NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes) {
            Ok(message) => found.push(message),
            Err(error) => tracing::debug!("netlink message not understood: {error}"),
        }
        offset += length.next_multiple_of(4);
    }
    found
}

/// A group in the form of an address.
fn group_address(ifindex: u32, group: Ipv6Addr) -> AddressMessage {
    let mut request = AddressMessage::default();
    request.header.family = AddressFamily::Inet6;
    request.header.prefix_len = 128;
    request.header.index = ifindex;
    request.attributes.push(AddressAttribute::Local(group.into()));
    request.attributes.push(AddressAttribute::Address(group.into()));
    request.attributes.push(AddressAttribute::Flags(AddressFlags::Mcautojoin | AddressFlags::Nodad));
    request
}

fn neighbour_request(place: Place) -> NeighbourMessage {
    let mut request = NeighbourMessage::default();
    let (family, address) = match place.address {
        IpAddr::V4(address) => (AddressFamily::Inet, NeighbourAddress::Inet(address)),
        IpAddr::V6(address) => (AddressFamily::Inet6, NeighbourAddress::Inet6(address)),
    };
    request.header.family = family;
    request.header.ifindex = place.interface;
    request.header.state = NeighbourState::None;
    request.header.kind = RouteType::Unicast;
    request.attributes.push(NeighbourAttribute::Destination(address));
    request
}

fn neighbour(message: &NeighbourMessage) -> Option<(Place, Neighbour)> {
    const VALID: u16 = 0x02 | 0x04 | 0x08 | 0x10 | 0x80;
    if !matches!(message.header.family, AddressFamily::Inet | AddressFamily::Inet6) {
        return None;
    }
    let mut address = None;
    let mut found = Neighbour::default();
    let mut mac = None;
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(destination)) => {
                address = Some(IpAddr::V4(*destination));
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(destination)) => {
                address = Some(IpAddr::V6(*destination));
            }
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = <[u8; 6]>::try_from(bytes.as_slice()).ok(),
            NeighbourAttribute::Protocol(protocol) => found.ours = u8::from(*protocol) == NEIGHBOUR_PROTOCOL,
            NeighbourAttribute::ExtFlags(flags) => found.managed = flags.contains(NeighbourExtFlags::Managed),
            _ => {}
        }
    }
    let state = u16::from(message.header.state);
    found.valid = state & VALID != 0;
    found.permanent = message.header.state == NeighbourState::Permanent;
    found.mac = mac.filter(|mac| *mac != [0; 6]);
    Some((Place { interface: message.header.ifindex, vlan: 0, address: address? }, found))
}

fn link_details(link: &LinkMessage) -> LinkDetails {
    let mut details = LinkDetails::default();
    let (mut peer, mut elsewhere) = (None, false);
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => details.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => details.mtu = *mtu,
            LinkAttribute::Link(index) => peer = Some(*index),
            LinkAttribute::LinkNetNsId(_) => elsewhere = true,
            LinkAttribute::LinkInfo(parts) => {
                for part in parts {
                    if let LinkInfo::Kind(kind) = part {
                        details.kind = match kind {
                            InfoKind::Veth => "veth".to_owned(),
                            other => other.to_string(),
                        };
                    }
                }
            }
            LinkAttribute::Xdp(parts) => details.xdp = xdp(parts),
            _ => {}
        }
    }
    details.peer = peer.filter(|_| !elsewhere);
    details
}

fn xdp(parts: &[LinkXdp]) -> Vec<InterfaceXdp> {
    let (mut attached, mut program) = (XdpAttached::None, 0);
    let mut several = Vec::new();
    for part in parts {
        match part {
            LinkXdp::Attached(mode) => attached = *mode,
            LinkXdp::ProgId(id) => program = *id,
            LinkXdp::DrvProgId(id) => several.push(InterfaceXdp { mode: Some(Mode::Native), program_id: *id }),
            LinkXdp::SkbProgId(id) => several.push(InterfaceXdp { mode: Some(Mode::Generic), program_id: *id }),
            LinkXdp::HwProgId(id) => several.push(InterfaceXdp { mode: None, program_id: *id }),
            _ => {}
        }
    }
    match attached {
        XdpAttached::None => Vec::new(),
        XdpAttached::Driver => vec![InterfaceXdp { mode: Some(Mode::Native), program_id: program }],
        XdpAttached::SocketBuffer => vec![InterfaceXdp { mode: Some(Mode::Generic), program_id: program }],
        XdpAttached::Multiple => several,
        _ => vec![InterfaceXdp { mode: None, program_id: program }],
    }
}

/// Puts dumps together.
fn facts(links: &[LinkMessage], addresses: &[AddressMessage], routes: &[RouteMessage]) -> HostFacts {
    let mut by_index: BTreeMap<u32, (String, InterfaceFacts)> = BTreeMap::new();
    for link in links {
        let mut interface = InterfaceFacts {
            index: link.header.index,
            up: link.header.flags.contains(LinkFlags::Up) && link.header.flags.contains(LinkFlags::LowerUp),
            ..InterfaceFacts::default()
        };
        let mut name = String::new();
        let (mut parent, mut vlan) = (None, None);
        for attribute in &link.attributes {
            match attribute {
                LinkAttribute::IfName(found) => name.clone_from(found),
                LinkAttribute::Mtu(mtu) => interface.mtu = *mtu,
                LinkAttribute::Link(index) => parent = Some(*index),
                LinkAttribute::LinkInfo(parts) => vlan = vlan_id(parts),
                LinkAttribute::Address(bytes) => {
                    interface.mac = <[u8; 6]>::try_from(bytes.as_slice()).unwrap_or_default();
                }
                _ => {}
            }
        }
        interface.vlan = parent.zip(vlan);
        by_index.insert(link.header.index, (name, interface));
    }
    let mut secondary = Vec::new();
    for message in addresses {
        let Some((_, interface)) = by_index.get_mut(&message.header.index) else { continue };
        let Some((address, flags)) = interface_address(message) else { continue };
        // The groups that lbd joins look like addresses.
        if address.addr().is_multicast() {
            continue;
        }
        interface.all_addresses.push(address);
        let unusable = AddressFlags::Deprecated | AddressFlags::Tentative | AddressFlags::Dadfailed;
        let link_local = matches!(address.addr(), IpAddr::V6(address) if address.is_unicast_link_local());
        if !flags.intersects(unusable) && !link_local {
            if flags.contains(AddressFlags::Secondary) {
                secondary.push((message.header.index, address));
            } else {
                interface.addresses.push(address);
            }
        }
    }
    for (index, address) in secondary {
        if let Some((_, interface)) = by_index.get_mut(&index) {
            interface.addresses.push(address);
        }
    }
    let mut routes: Vec<Route> = routes.iter().flat_map(routes_of).collect();
    // Lowest metric first.
    routes.sort_by_key(|route| route.metric);
    for Route { interface, network, gateway, .. } in routes {
        let Some((_, interface)) = by_index.get_mut(&interface) else { continue };
        if network.prefix_len() != 0 {
            interface.routes.entry(network).or_insert(gateway);
        } else if let Some(gateway) = gateway
            && !interface.gateways.iter().any(|other| other.is_ipv4() == gateway.is_ipv4())
        {
            interface.gateways.push(gateway);
        }
    }
    HostFacts { interfaces: by_index.into_values().filter(|(name, _)| !name.is_empty()).collect() }
}

/// The VLAN id of a VLAN interface.
fn vlan_id(parts: &[LinkInfo]) -> Option<u16> {
    parts.iter().find_map(|part| match part {
        LinkInfo::Data(InfoData::Vlan(data)) => data.iter().find_map(|part| match part {
            InfoVlan::Id(id) => Some(*id),
            _ => None,
        }),
        _ => None,
    })
}

fn interface_address(message: &AddressMessage) -> Option<(IpNet, AddressFlags)> {
    let (mut address, mut local, mut flags) = (None, None, None);
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Address(found) => address = Some(*found),
            AddressAttribute::Local(found) => local = Some(*found),
            AddressAttribute::Flags(found) => flags = Some(*found),
            _ => {}
        }
    }
    // On a point-to-point link `Address` is the peer's.
    let net = IpNet::new(local.or(address)?, message.header.prefix_len).ok()?;
    let flags = flags.unwrap_or_else(|| AddressFlags::from_bits_retain(u32::from(message.header.flags.bits())));
    Some((net, flags))
}

/// A route of the main table through one interface.
struct Route {
    interface: u32,
    metric: u32,
    network: IpNet,
    /// `None`: on the link.
    gateway: Option<IpAddr>,
}

/// A route with several ways is one through each of their interfaces. Link-local prefixes are on the link anyway.
fn routes_of(route: &RouteMessage) -> Vec<Route> {
    if route.header.kind != RouteType::Unicast {
        return Vec::new();
    }
    let mut destination = match route.header.address_family {
        AddressFamily::Inet => IpAddr::from([0; 4]),
        AddressFamily::Inet6 => IpAddr::from([0; 16]),
        _ => return Vec::new(),
    };
    let mut table = u32::from(route.header.table);
    let (mut gateway, mut interface, mut metric, mut paths) = (None, None, 0, Vec::new());
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Destination(found) => destination = route_address(found).unwrap_or(destination),
            RouteAttribute::Gateway(found) => gateway = route_address(found),
            // A gateway of the other family, or a tunnel: nothing that lbd can send by.
            RouteAttribute::Via(_) | RouteAttribute::EncapType(_) => return Vec::new(),
            RouteAttribute::Oif(index) => interface = Some(*index),
            RouteAttribute::Priority(priority) => metric = *priority,
            RouteAttribute::Table(number) => table = *number,
            RouteAttribute::MultiPath(hops) => {
                for hop in hops {
                    let gateway = hop.attributes.iter().find_map(|attribute| match attribute {
                        RouteAttribute::Gateway(found) => route_address(found),
                        _ => None,
                    });
                    paths.extend(gateway.map(|gateway| (hop.interface_index, Some(gateway))));
                }
            }
            _ => {}
        }
    }
    if table != 254 {
        return Vec::new();
    }
    let Ok(network) = IpNet::new(destination, route.header.destination_prefix_length) else { return Vec::new() };
    if matches!(network, IpNet::V6(network) if network.addr().is_unicast_link_local()) {
        return Vec::new();
    }
    paths.extend(interface.map(|interface| (interface, gateway)));
    paths.into_iter().map(|(interface, gateway)| Route { interface, metric, network, gateway }).collect()
}

fn route_address(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use rtnetlink::packet_route::route::RouteVia;

    use super::*;
    use crate::config::SegmentName;

    fn link(index: u32, name: &str) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.flags = LinkFlags::Up | LinkFlags::LowerUp;
        message.attributes.push(LinkAttribute::IfName(name.to_owned()));
        message.attributes.push(LinkAttribute::Mtu(1500));
        message.attributes.push(LinkAttribute::Address(vec![2, 0, 0, 0, 0, 1]));
        message
    }

    fn address(index: u32, net: &str, flags: AddressFlags) -> AddressMessage {
        let net: IpNet = net.parse().unwrap();
        let mut message = AddressMessage::default();
        message.header.index = index;
        message.header.prefix_len = net.prefix_len();
        message.attributes.push(AddressAttribute::Local(net.addr()));
        message.attributes.push(AddressAttribute::Flags(flags));
        message
    }

    fn route(index: u32, gateway: Ipv4Addr, metric: u32) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.table = 254;
        message.header.kind = RouteType::Unicast;
        message.attributes.push(RouteAttribute::Gateway(RouteAddress::Inet(gateway)));
        message.attributes.push(RouteAttribute::Oif(index));
        message.attributes.push(RouteAttribute::Priority(metric));
        message
    }

    #[test]
    fn facts_are_put_together_and_sorted() {
        let found = facts(
            &[link(1, "lo"), link(7, "ten0")],
            &[
                address(7, "192.0.2.9/24", AddressFlags::Secondary),
                address(7, "192.0.2.2/24", AddressFlags::Permanent),
                address(7, "fe80::1/64", AddressFlags::Permanent),
                address(7, "2001:db8::2/64", AddressFlags::Tentative),
            ],
            &[route(7, Ipv4Addr::new(192, 0, 2, 254), 200), route(7, Ipv4Addr::new(192, 0, 2, 1), 100)],
        );
        let ten0 = &found.interfaces["ten0"];
        assert_eq!((ten0.index, ten0.mtu, ten0.up, ten0.mac), (7, 1500, true, [2, 0, 0, 0, 0, 1]));
        let addresses: Vec<String> = ten0.addresses.iter().map(ToString::to_string).collect();
        assert_eq!(addresses, ["192.0.2.2/24", "192.0.2.9/24"]);
        assert_eq!(ten0.all_addresses.len(), 4);
        assert_eq!(ten0.gateways, [IpAddr::from([192, 0, 2, 1])]);
        assert!(ten0.routes.is_empty());
    }

    #[test]
    fn of_two_routes_to_a_prefix_the_one_with_the_lower_metric_holds() {
        let to = |index, gateway: [u8; 4], metric, network: &str| {
            let network: ipnet::Ipv4Net = network.parse().unwrap();
            let mut message = route(index, gateway.into(), metric);
            message.header.destination_prefix_length = network.prefix_len();
            message.attributes.push(RouteAttribute::Destination(RouteAddress::Inet(network.addr())));
            message
        };
        let mut on_link = to(7, [0; 4], 0, "10.9.0.0/24");
        on_link.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::Gateway(_)));
        let mut other_table = to(7, [192, 0, 2, 9], 0, "10.8.0.0/24");
        other_table.header.table = 100;
        let mut unreachable = to(7, [192, 0, 2, 9], 0, "10.7.0.0/24");
        unreachable.header.kind = RouteType::Unreachable;
        let mut other_family = to(7, [192, 0, 2, 9], 0, "10.6.0.0/24");
        other_family.attributes.push(RouteAttribute::Via(RouteVia::Inet6("fe80::1".parse().unwrap())));
        let routes = [
            to(7, [192, 0, 2, 4], 200, "10.1.0.0/16"),
            to(7, [192, 0, 2, 3], 100, "10.1.0.0/16"),
            to(8, [198, 51, 100, 1], 0, "10.1.0.0/16"),
            on_link,
            other_table,
            unreachable,
            other_family,
        ];
        let found = facts(&[link(7, "ten0"), link(8, "ten1")], &[], &routes);
        let expected: [(IpNet, Option<IpAddr>); 2] =
            [("10.1.0.0/16".parse().unwrap(), Some([192, 0, 2, 3].into())), ("10.9.0.0/24".parse().unwrap(), None)];
        assert_eq!(found.interfaces["ten0"].routes, expected.into());
        assert_eq!(found.interfaces["ten1"].routes.len(), 1);
        assert!(found.interfaces["ten0"].gateways.is_empty());
    }

    #[test]
    fn vlan_interfaces_are_known_by_parent_and_id() {
        let mut vlan = link(9, "tenant-a");
        vlan.attributes.push(LinkAttribute::Link(7));
        let data = InfoData::Vlan(vec![InfoVlan::Id(2003)]);
        vlan.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Vlan), LinkInfo::Data(data)]));
        let found = facts(&[link(7, "ten0"), vlan], &[address(7, "ff02::1:ff00:34/128", AddressFlags::Permanent)], &[]);
        assert_eq!((found.interfaces["ten0"].vlan, found.interfaces["tenant-a"].vlan), (None, Some((7, 2003))));
        assert!(found.interfaces["ten0"].all_addresses.is_empty());
        let of = |vlan| found.of(&SegmentName { interface: "ten0".into(), vlan }).map(|interface| interface.index);
        assert_eq!((of(None), of(Some(2003)), of(Some(2004))), (Some(7), Some(9), None));
    }

    #[test]
    fn a_neighbour_without_a_mac_is_not_valid() {
        let station = Place { interface: 3, vlan: 0, address: "10.0.0.11".parse().unwrap() };
        let mut message = neighbour_request(station);
        message.header.state = NeighbourState::Failed;
        let (place, found) = neighbour(&message).unwrap();
        assert_eq!(place, station);
        assert_eq!(found, Neighbour::default());
        message.header.state = NeighbourState::Stale;
        message.attributes.push(NeighbourAttribute::LinkLayerAddress(vec![2, 0, 0, 0, 10, 11]));
        message.attributes.push(NeighbourAttribute::Protocol(RouteProtocol::from(NEIGHBOUR_PROTOCOL)));
        let (_, found) = neighbour(&message).unwrap();
        let mac = Some([2, 0, 0, 0, 10, 11]);
        assert_eq!(found, Neighbour { mac, valid: true, ours: true, ..Neighbour::default() });
        let router = Place { interface: 3, vlan: 0, address: "fe80::1".parse().unwrap() };
        assert_eq!(neighbour(&neighbour_request(router)), Some((router, Neighbour::default())));
    }

    #[test]
    fn damaged_datagrams_are_passed_over() {
        assert!(messages(&[]).is_empty());
        assert!(messages(&[0; 40]).is_empty());
        assert!(messages(&[255; 40]).is_empty());
        assert!(messages(&[20, 0, 0, 0, 16, 0]).is_empty());
    }

    #[test]
    fn the_mode_in_force_is_read_from_both_forms() {
        let one = xdp(&[LinkXdp::Attached(XdpAttached::SocketBuffer), LinkXdp::ProgId(9), LinkXdp::SkbProgId(9)]);
        assert_eq!(one, [InterfaceXdp { mode: Some(Mode::Generic), program_id: 9 }]);
        let two = xdp(&[LinkXdp::Attached(XdpAttached::Multiple), LinkXdp::DrvProgId(4), LinkXdp::SkbProgId(9)]);
        assert_eq!(two.len(), 2);
        assert!(xdp(&[LinkXdp::Attached(XdpAttached::None)]).is_empty());
    }
}
