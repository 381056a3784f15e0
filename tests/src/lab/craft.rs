//! Frames that no kernel would send.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Result, bail};
use etherparse::{IpNumber, PacketBuilder};

/// MAC addresses of a frame: whom it is from, and to.
pub type Way = ([u8; 6], [u8; 6]);

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;

/// Every MAC address.
pub const BROADCAST: [u8; 6] = [0xff; 6];

/// A TCP packet with these flags, sequence and acknowledgement number.
pub fn tcp_frame(way: Way, from: SocketAddr, to: SocketAddr, flags: u8, numbers: (u32, u32)) -> Result<Vec<u8>> {
    let start = PacketBuilder::ethernet2(way.0, way.1);
    let start = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => start.ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => start.ipv6(from.octets(), to.octets(), 64),
        _ => bail!("{from} and {to} are of two families"),
    };
    let mut step = start.tcp(from.port(), to.port(), numbers.0, 64240);
    if flags & FIN != 0 {
        step = step.fin();
    }
    if flags & SYN != 0 {
        step = step.syn();
    }
    if flags & RST != 0 {
        step = step.rst();
    }
    if flags & PSH != 0 {
        step = step.psh();
    }
    if flags & ACK != 0 {
        step = step.ack(numbers.1);
    }
    let mut frame = Vec::new();
    step.write(&mut frame, &[])?;
    Ok(frame)
}

/// A datagram.
pub fn udp_frame(way: Way, from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Result<Vec<u8>> {
    let start = PacketBuilder::ethernet2(way.0, way.1);
    let start = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => start.ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => start.ipv6(from.octets(), to.octets(), 64),
        _ => bail!("{from} and {to} are of two families"),
    };
    let mut frame = Vec::new();
    start.udp(from.port(), to.port()).write(&mut frame, payload)?;
    Ok(frame)
}

/// A packet of any protocol, e.g. 47 (GRE).
pub fn protocol_frame(way: Way, from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8]) -> Result<Vec<u8>> {
    let start = PacketBuilder::ethernet2(way.0, way.1);
    let start = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => start.ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => start.ipv6(from.octets(), to.octets(), 64),
        _ => bail!("{from} and {to} are of two families"),
    };
    let mut frame = Vec::new();
    start.write(&mut frame, IpNumber(protocol), payload)?;
    Ok(frame)
}

/// An ICMP message: type, code, the four bytes after the checksum, and what follows.
pub fn icmp_frame(
    way: Way,
    from: Ipv4Addr,
    to: Ipv4Addr,
    kind: (u8, u8),
    rest: [u8; 4],
    payload: &[u8],
) -> Result<Vec<u8>> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(way.0, way.1)
        .ipv4(from.octets(), to.octets(), 64)
        .icmpv4_raw(kind.0, kind.1, rest)
        .write(&mut frame, payload)?;
    Ok(frame)
}

/// An ICMPv6 message with hop limit 255, as neighbour discovery wants it.
pub fn icmp6_frame(
    way: Way,
    from: Ipv6Addr,
    to: Ipv6Addr,
    kind: (u8, u8),
    rest: [u8; 4],
    payload: &[u8],
) -> Result<Vec<u8>> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(way.0, way.1)
        .ipv6(from.octets(), to.octets(), 255)
        .icmpv6_raw(kind.0, kind.1, rest)
        .write(&mut frame, payload)?;
    Ok(frame)
}

/// The solicited-node group of an address, and its MAC address.
pub fn solicited_group(address: Ipv6Addr) -> (Ipv6Addr, [u8; 6]) {
    let [.., a, b, c] = address.octets();
    let group = Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c]);
    (group, [0x33, 0x33, 0xff, a, b, c])
}

/// "This address is at this MAC address", to everybody: gratuitous ARP, or an unsolicited neighbour advertisement with override.
pub fn announcement(address: IpAddr, mac: [u8; 6]) -> Result<Vec<u8>> {
    match address {
        IpAddr::V4(address) => {
            let mut frame = [BROADCAST.as_slice(), &mac, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]].concat();
            for part in [mac.as_slice(), &address.octets(), &[0; 6], &address.octets()] {
                frame.extend(part);
            }
            Ok(frame)
        }
        IpAddr::V6(address) => {
            let all = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
            let payload = [address.octets().as_slice(), &[2, 1], &mac].concat();
            icmp6_frame((mac, [0x33, 0x33, 0, 0, 0, 1]), address, all, (136, 0), [0x20, 0, 0, 0], &payload)
        }
    }
}
