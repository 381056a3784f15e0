//! Reading captured frames: what they are, and whether their checksums are right.
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddrV4};

use lbd_common::checksum::{fold, sum};

const ETHERNET: usize = 14;
const TCP: u8 = 6;
const UDP: u8 = 17;

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
        1 => ("ICMP", false),
        58 => ("ICMPv6", true),
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
}
