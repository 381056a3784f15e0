//! Reading captured frames: what they are, and whether their checksums are right.
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};

use lbd_common::checksum::{fold, sum};

const ETHERNET: usize = 14;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMP6: u8 = 58;

/// Where an IPv4 TCP or UDP packet goes from and to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// IP protocol number.
    pub protocol: u8,
    /// Sender.
    pub source: SocketAddrV4,
    /// Receiver.
    pub destination: SocketAddrV4,
    /// TCP flags (0 for UDP).
    pub flags: u8,
    /// TCP sequence number (0 for UDP).
    pub sequence: u32,
    /// TCP acknowledgement number (0 for UDP).
    pub acknowledgement: u32,
    /// Time to live.
    pub ttl: u8,
    /// Bytes after the transport header.
    pub payload: usize,
}

/// A packet of either family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// MAC address that it was sent to.
    pub to_mac: [u8; 6],
    /// MAC address that it was sent from.
    pub from_mac: [u8; 6],
    /// VLAN id of its tag, if it has one.
    pub vlan: Option<u16>,
    /// Sender.
    pub source: IpAddr,
    /// Receiver.
    pub destination: IpAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// What follows the IP header.
    pub payload: Vec<u8>,
}

impl Packet {
    fn port(&self, at: usize) -> u16 {
        if matches!(self.protocol, TCP | UDP) { u16_at(&self.payload, at).unwrap_or_default() } else { 0 }
    }

    /// Sender, with its port (0 unless TCP or UDP).
    pub fn from(&self) -> SocketAddr {
        SocketAddr::new(self.source, self.port(0))
    }

    /// Receiver, with its port (0 unless TCP or UDP).
    pub fn to(&self) -> SocketAddr {
        SocketAddr::new(self.destination, self.port(2))
    }

    /// Flags of a TCP packet, else 0.
    pub fn tcp_flags(&self) -> u8 {
        if self.protocol == TCP { self.payload.get(13).copied().unwrap_or_default() } else { 0 }
    }

    /// Type and code of an ICMP or ICMPv6 message.
    pub fn icmp(&self) -> Option<(u8, u8)> {
        if matches!(self.protocol, ICMP | ICMP6) { Some((*self.payload.first()?, *self.payload.get(1)?)) } else { None }
    }

    /// Largest segment that a SYN asks for.
    pub fn mss(&self) -> Option<u16> {
        if self.tcp_flags() & 2 == 0 {
            return None;
        }
        let mut options = self.payload.get(20..usize::from(self.payload[12] >> 4) * 4)?;
        loop {
            match options {
                [2, 4, high, low, ..] => return Some(u16::from_be_bytes([*high, *low])),
                [1, rest @ ..] => options = rest,
                [0, ..] | [] | [_] => return None,
                [_, length, ..] => options = options.get(usize::from(*length).max(2)..)?,
            }
        }
    }
}

/// An ARP packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arp {
    /// MAC address that the frame was sent to.
    pub to_mac: [u8; 6],
    /// VLAN id of the frame's tag, if it has one.
    pub vlan: Option<u16>,
    /// 1: request; 2: reply.
    pub operation: u16,
    /// Who says so.
    pub sender_mac: [u8; 6],
    /// And its address.
    pub sender: Ipv4Addr,
    /// Whom it asks for or tells.
    pub target: Ipv4Addr,
}

struct Network<'a> {
    protocol: u8,
    /// The header of the network layer.
    header: &'a [u8],
    /// Sum of the pseudo header's addresses.
    addresses: u64,
    payload: &'a [u8],
    /// Only the first fragment has ports, and none has a whole checksum.
    fragment: bool,
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// The network layer, if there is a whole one.
fn network(frame: &[u8]) -> Option<Network<'_>> {
    let mut at = ETHERNET;
    let mut kind = u16_at(frame, 12)?;
    if kind == 0x8100 {
        kind = u16_at(frame, 16)?;
        at += 4;
    }
    match kind {
        0x0800 => {
            let first = *frame.get(at)?;
            let length = usize::from(first & 0xf) * 4;
            let total = usize::from(u16_at(frame, at + 2)?);
            let header = frame.get(at..at + length).filter(|_| first >> 4 == 4)?;
            Some(Network {
                protocol: *header.get(9)?,
                header,
                addresses: sum(header.get(12..20)?),
                payload: frame.get(at + length..at + total)?,
                fragment: u16_at(header, 6)? & 0x3fff != 0,
            })
        }
        0x86dd => {
            let header = frame.get(at..at + 40).filter(|header| header[0] >> 4 == 6)?;
            let length = usize::from(u16_at(header, 4)?);
            Some(Network {
                protocol: *header.get(6)?,
                header,
                addresses: sum(header.get(8..40)?),
                payload: frame.get(at + 40..at + 40 + length)?,
                fragment: *header.get(6)? == 44,
            })
        }
        _ => None,
    }
}

/// Fails if a checksum of the frame is wrong, or a length is a lie. What has no checksum is fine.
pub fn verify(frame: &[u8]) -> Result<(), String> {
    let kind = u16_at(frame, 12).unwrap_or_default();
    let Some(network) = network(frame) else {
        return if kind == 0x0800 || kind == 0x86dd { Err("not a whole packet".to_owned()) } else { Ok(()) };
    };
    if network.header[0] >> 4 == 4 && fold(sum(network.header)) != 0xffff {
        return Err("IPv4 header checksum".to_owned());
    }
    if network.fragment {
        return Ok(());
    }
    let (name, pseudo) = match network.protocol {
        TCP => ("TCP", true),
        UDP if u16_at(network.payload, 6) == Some(0) && network.header[0] >> 4 == 4 => return Ok(()),
        UDP => ("UDP", true),
        ICMP => ("ICMP", false),
        ICMP6 => ("ICMPv6", true),
        _ => return Ok(()),
    };
    let mut total = sum(network.payload);
    if pseudo {
        let length = network.payload.len() as u32;
        total += network.addresses + sum(&length.to_be_bytes()) + sum(&[0, network.protocol]);
    }
    if fold(total) == 0xffff { Ok(()) } else { Err(format!("{name} checksum")) }
}

/// Where the frame goes from and to, if it is IPv4 TCP or UDP and not a later fragment.
pub fn ports(frame: &[u8]) -> Option<Ports> {
    let network = network(frame)?;
    if network.header.first()? >> 4 != 4 || u16_at(network.header, 6)? & 0x1fff != 0 {
        return None;
    }
    let address = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(network.header.get(at..at + 4)?).ok()?));
    let segment = network.payload;
    let tcp = match network.protocol {
        TCP => true,
        UDP => false,
        _ => return None,
    };
    let header = if tcp { usize::from(segment.get(12)? >> 4) * 4 } else { 8 };
    Some(Ports {
        protocol: network.protocol,
        source: SocketAddrV4::new(address(12)?, u16_at(segment, 0)?),
        destination: SocketAddrV4::new(address(16)?, u16_at(segment, 2)?),
        flags: if tcp { *segment.get(13)? } else { 0 },
        sequence: if tcp { u32_at(segment, 4)? } else { 0 },
        acknowledgement: if tcp { u32_at(segment, 8)? } else { 0 },
        ttl: *network.header.get(8)?,
        payload: segment.len().saturating_sub(header),
    })
}

fn mac_at(frame: &[u8], at: usize) -> Option<[u8; 6]> {
    frame.get(at..at + 6)?.try_into().ok()
}

fn vlan(frame: &[u8]) -> Option<u16> {
    (u16_at(frame, 12)? == 0x8100).then(|| u16_at(frame, 14).map(|tag| tag & 0xfff)).flatten()
}

/// The packet in a frame, if it is a whole one of IPv4 or IPv6.
pub fn packet(frame: &[u8]) -> Option<Packet> {
    let network = network(frame)?;
    let header = network.header;
    let four = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(header.get(at..at + 4)?).ok()?).into());
    let six = |at: usize| Some(Ipv6Addr::from(<[u8; 16]>::try_from(header.get(at..at + 16)?).ok()?).into());
    let v4 = header.first()? >> 4 == 4;
    Some(Packet {
        to_mac: mac_at(frame, 0)?,
        from_mac: mac_at(frame, 6)?,
        vlan: vlan(frame),
        source: if v4 { four(12)? } else { six(8)? },
        destination: if v4 { four(16)? } else { six(24)? },
        protocol: network.protocol,
        ttl: *header.get(if v4 { 8 } else { 7 })?,
        payload: network.payload.to_vec(),
    })
}

/// The ARP packet in a frame.
pub fn arp(frame: &[u8]) -> Option<Arp> {
    let vlan = vlan(frame);
    let at = ETHERNET + if vlan.is_some() { 4 } else { 0 };
    if u16_at(frame, at - 2)? != 0x0806 {
        return None;
    }
    let address = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(frame.get(at..at + 4)?).ok()?));
    Some(Arp {
        to_mac: mac_at(frame, 0)?,
        vlan,
        operation: u16_at(frame, at + 6)?,
        sender_mac: mac_at(frame, at + 8)?,
        sender: address(at + 14)?,
        target: address(at + 24)?,
    })
}

/// One line about a frame.
pub fn describe(frame: &[u8]) -> String {
    if let Some(found) = ports(frame) {
        let mut flags = String::new();
        for (bit, letter) in ['F', 'S', 'R', 'P', '.', 'U'].into_iter().enumerate() {
            if found.flags & (1 << bit) != 0 {
                flags.push(letter);
            }
        }
        let protocol = if found.protocol == TCP { "TCP" } else { "UDP" };
        return format!(
            "{protocol} {} > {} [{flags}] seq {} ack {} ttl {} length {}",
            found.source, found.destination, found.sequence, found.acknowledgement, found.ttl, found.payload
        );
    }
    if let Some(found) = packet(frame) {
        let tag = found.vlan.map_or_else(String::new, |vlan| format!("VLAN {vlan} "));
        let kind = found.icmp().map_or_else(String::new, |(kind, code)| format!(" type {kind} code {code}"));
        return format!(
            "{tag}protocol {} {} > {}{kind} flags {:#x} ttl {} length {}",
            found.protocol,
            found.from(),
            found.to(),
            found.tcp_flags(),
            found.ttl,
            found.payload.len()
        );
    }
    if let Some(found) = arp(frame) {
        return format!("{found:?}");
    }
    let mut text = String::from("frame");
    for byte in frame.iter().take(48) {
        let _ = write!(text, " {byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;

    fn packet() -> Vec<u8> {
        let mut packet = Vec::new();
        PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4([203, 0, 113, 9], [192, 0, 2, 34], 63)
            .tcp(40000, 6443, 7, 64240)
            .syn()
            .write(&mut packet, b"abc")
            .unwrap();
        packet
    }

    #[test]
    fn a_right_packet_is_right_and_any_flipped_bit_is_seen() {
        let packet = packet();
        assert_eq!(verify(&packet), Ok(()));
        for at in ETHERNET..packet.len() {
            let mut damaged = packet.clone();
            damaged[at] ^= 0x10;
            assert!(verify(&damaged).is_err(), "byte {at}");
        }
    }

    #[test]
    fn padding_is_not_payload() {
        let mut packet = packet();
        packet.extend([0xaa; 6]);
        assert_eq!(verify(&packet), Ok(()));
        assert_eq!(ports(&packet).map(|ports| ports.payload), Some(3));
    }

    #[test]
    fn ports_are_read() {
        let found = ports(&packet()).unwrap();
        assert_eq!(found.source.to_string(), "203.0.113.9:40000");
        assert_eq!(found.destination.to_string(), "192.0.2.34:6443");
        assert_eq!((found.flags, found.sequence, found.ttl), (2, 7, 63));
    }

    #[test]
    fn packets_of_both_families_are_read_with_their_tags() {
        let found = super::packet(&crate::lab::tagged(&packet(), 2003)).unwrap();
        assert_eq!((found.vlan, found.ttl, found.tcp_flags(), found.mss()), (Some(2003), 63, 2, None));
        assert_eq!(found.to().to_string(), "192.0.2.34:6443");
        let mut six = Vec::new();
        PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv6([1; 16], [3; 16], 9)
            .tcp(1, 443, 7, 64240)
            .syn()
            .options(&[etherparse::TcpOptionElement::Noop, etherparse::TcpOptionElement::MaximumSegmentSize(1220)])
            .unwrap()
            .write(&mut six, &[])
            .unwrap();
        assert_eq!(verify(&six), Ok(()));
        let found = super::packet(&six).unwrap();
        assert_eq!((found.vlan, found.ttl, found.mss(), found.to().port()), (None, 9, Some(1220), 443));
        assert_eq!((found.to_mac, found.from_mac), ([4; 6], [2; 6]));
    }
}
