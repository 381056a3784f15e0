//! Packets for the fixtures: built and checked by another implementation (etherparse) than the one under test.
//!
//! What differs by family is generic over [`Ip`]; without a word about it, IPv4 is meant.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result, bail, ensure};
use etherparse::{
    IpHeaders, NetSlice, PacketBuilder, PacketBuilderStep, SlicedPacket, TcpSlice, TransportSlice, UdpSlice,
};
use lbd_common::tcp::{ACK, FIN, RST, SYN};

use crate::datapath::bench::{self, Ip};

/// A TCP segment in an untagged Ethernet frame, with what tests change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment<I = Ipv4Addr> {
    /// Source MAC.
    pub source_mac: [u8; 6],
    /// Destination MAC.
    pub destination_mac: [u8; 6],
    /// Source.
    pub source: (I, u16),
    /// Destination.
    pub destination: (I, u16),
    /// TTL or hop limit.
    pub ttl: u8,
    /// Flags.
    pub flags: u8,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgement number.
    pub acknowledgement: u32,
    /// Payload.
    pub payload: Vec<u8>,
}

impl<I: Ip> Segment<I> {
    /// The frame, with right checksums.
    pub fn frame(&self) -> Vec<u8> {
        let mut tcp = I::builder(self.source_mac, self.destination_mac, self.source.0, self.destination.0, self.ttl)
            .tcp(self.source.1, self.destination.1, self.sequence, 0xfaf0);
        if self.flags & SYN != 0 {
            tcp = tcp.syn();
        }
        if self.flags & FIN != 0 {
            tcp = tcp.fin();
        }
        if self.flags & RST != 0 {
            tcp = tcp.rst();
        }
        if self.flags & ACK != 0 {
            tcp = tcp.ack(self.acknowledgement);
        }
        let mut frame = Vec::new();
        tcp.write(&mut frame, &self.payload).expect("a vector takes all");
        frame
    }

    /// Parses a frame; all checksums must be right.
    pub fn parse(frame: &[u8]) -> Result<Self> {
        let sliced = SlicedPacket::from_ethernet(frame)?;
        let outer = Outer::<I>::of(frame, &sliced)?;
        let Some(TransportSlice::Tcp(tcp)) = &sliced.transport else { bail!("not TCP: {frame:02x?}") };
        ensure!(
            tcp.checksum() == I::tcp_checksum(tcp, outer.source, outer.destination)?,
            "TCP checksum is wrong: {frame:02x?}"
        );
        let bits = [(tcp.syn(), SYN), (tcp.fin(), FIN), (tcp.rst(), RST), (tcp.ack(), ACK)];
        Ok(Self {
            source_mac: outer.source_mac,
            destination_mac: outer.destination_mac,
            source: (outer.source, tcp.source_port()),
            destination: (outer.destination, tcp.destination_port()),
            ttl: outer.ttl,
            flags: bits.iter().filter(|(set, _)| *set).map(|(_, bit)| bit).sum(),
            sequence: tcp.sequence_number(),
            acknowledgement: tcp.acknowledgment_number(),
            payload: tcp.payload().to_vec(),
        })
    }

    /// What the segment's receiver answers: acknowledges all of it.
    #[must_use]
    pub fn answer(&self, flags: u8, sequence: u32) -> Self {
        let length = self.payload.len() as u32 + u32::from(self.flags & (SYN | FIN) != 0);
        Self {
            // The receiver sends back to where the frame came from.
            source_mac: self.destination_mac,
            destination_mac: self.source_mac,
            source: self.destination,
            destination: self.source,
            ttl: 64,
            flags,
            sequence,
            acknowledgement: self.sequence.wrapping_add(length),
            payload: Vec::new(),
        }
    }
}

/// A UDP datagram in an untagged Ethernet frame, with what tests change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram<I = Ipv4Addr> {
    /// Source MAC.
    pub source_mac: [u8; 6],
    /// Destination MAC.
    pub destination_mac: [u8; 6],
    /// Source.
    pub source: (I, u16),
    /// Destination.
    pub destination: (I, u16),
    /// TTL or hop limit.
    pub ttl: u8,
    /// Whether the checksum is computed; else the field is zero.
    pub checksum: bool,
    /// Payload.
    pub payload: Vec<u8>,
}

impl<I: Ip> Datagram<I> {
    /// The frame, with right checksums.
    pub fn frame(&self) -> Vec<u8> {
        let mut frame = Vec::new();
        I::builder(self.source_mac, self.destination_mac, self.source.0, self.destination.0, self.ttl)
            .udp(self.source.1, self.destination.1)
            .write(&mut frame, &self.payload)
            .expect("a vector takes all");
        if !self.checksum {
            let at = frame.len() - self.payload.len() - 2;
            frame[at..at + 2].fill(0);
        }
        frame
    }

    /// Parses a frame; all checksums must be right, but UDP's may be zero.
    pub fn parse(frame: &[u8]) -> Result<Self> {
        let sliced = SlicedPacket::from_ethernet(frame)?;
        let outer = Outer::<I>::of(frame, &sliced)?;
        let Some(TransportSlice::Udp(udp)) = &sliced.transport else { bail!("not UDP: {frame:02x?}") };
        ensure!(
            udp.checksum() == 0 || udp.checksum() == I::udp_checksum(udp, outer.source, outer.destination)?,
            "UDP checksum is wrong: {frame:02x?}"
        );
        Ok(Self {
            source_mac: outer.source_mac,
            destination_mac: outer.destination_mac,
            source: (outer.source, udp.source_port()),
            destination: (outer.destination, udp.destination_port()),
            ttl: outer.ttl,
            checksum: udp.checksum() != 0,
            payload: udp.payload().to_vec(),
        })
    }

    /// What the datagram's receiver answers.
    #[must_use]
    pub fn answer(&self, payload: &[u8]) -> Self {
        Self {
            source_mac: self.destination_mac,
            destination_mac: self.source_mac,
            source: self.destination,
            destination: self.source,
            ttl: 64,
            checksum: true,
            payload: payload.to_vec(),
        }
    }
}

/// An ICMP or ICMPv6 message in an untagged Ethernet frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Icmp<I = Ipv4Addr> {
    /// Source MAC.
    pub source_mac: [u8; 6],
    /// Destination MAC.
    pub destination_mac: [u8; 6],
    /// Source.
    pub source: I,
    /// Destination.
    pub destination: I,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Type.
    pub kind: u8,
    /// Code.
    pub code: u8,
    /// Bytes 5 to 8 of the header: identifier and sequence number, MTU, or flags.
    pub rest: [u8; 4],
    /// What follows: the packet that an error is about, the echoed data, or target and options.
    pub payload: Vec<u8>,
}

impl<I: Ip> Icmp<I> {
    /// The frame, with right checksums.
    pub fn frame(&self) -> Vec<u8> {
        let ip = I::builder(self.source_mac, self.destination_mac, self.source, self.destination, self.ttl);
        let mut frame = Vec::new();
        if I::IS_V6 {
            ip.icmpv6_raw(self.kind, self.code, self.rest).write(&mut frame, &self.payload)
        } else {
            ip.icmpv4_raw(self.kind, self.code, self.rest).write(&mut frame, &self.payload)
        }
        .expect("a vector takes all");
        frame
    }

    /// Parses a frame; all checksums must be right.
    pub fn parse(frame: &[u8]) -> Result<Self> {
        let sliced = SlicedPacket::from_ethernet(frame)?;
        let outer = Outer::<I>::of(frame, &sliced)?;
        let bytes = match &sliced.transport {
            Some(TransportSlice::Icmpv4(icmp)) if !I::IS_V6 => {
                let right = icmp.header().icmp_type.calc_checksum(icmp.payload());
                ensure!(icmp.checksum() == right, "ICMP checksum is wrong: {frame:02x?}");
                icmp.slice()
            }
            Some(TransportSlice::Icmpv6(icmp)) if I::IS_V6 => {
                let (source, destination) = (outer.source.mapped(), outer.destination.mapped());
                ensure!(icmp.is_checksum_valid(source, destination), "ICMPv6 checksum is wrong: {frame:02x?}");
                icmp.slice()
            }
            _ => bail!("not ICMP: {frame:02x?}"),
        };
        let (header, payload) = bytes.split_first_chunk::<8>().context("an ICMP header")?;
        Ok(Self {
            source_mac: outer.source_mac,
            destination_mac: outer.destination_mac,
            source: outer.source,
            destination: outer.destination,
            ttl: outer.ttl,
            kind: header[0],
            code: header[1],
            rest: [header[4], header[5], header[6], header[7]],
            payload: payload.to_vec(),
        })
    }
}

/// Ethernet and IP of a frame.
struct Outer<I> {
    source_mac: [u8; 6],
    destination_mac: [u8; 6],
    source: I,
    destination: I,
    ttl: u8,
}

impl<I: Ip> Outer<I> {
    /// The header's own checksum must be right, and there must be no tag.
    fn of(frame: &[u8], sliced: &SlicedPacket<'_>) -> Result<Self> {
        ensure!(sliced.link_exts.is_empty(), "there is a tag: {frame:02x?}");
        let net = sliced.net.as_ref().context("not IP")?;
        let (source, destination, ttl) = I::addresses(net).with_context(|| format!("{frame:02x?}"))?;
        Ok(Self {
            source_mac: frame[6..12].try_into()?,
            destination_mac: frame[..6].try_into()?,
            source,
            destination,
            ttl,
        })
    }
}

/// What etherparse has apart for the families.
pub trait Packets: Sized {
    /// Starts a packet.
    fn builder(
        source_mac: [u8; 6],
        destination_mac: [u8; 6],
        source: Self,
        destination: Self,
        ttl: u8,
    ) -> PacketBuilderStep<IpHeaders>;
    /// Source, destination and TTL of an IP header, whose own checksum must be right.
    fn addresses(net: &NetSlice<'_>) -> Result<(Self, Self, u8)>;
    /// What a segment's checksum must be.
    fn tcp_checksum(tcp: &TcpSlice<'_>, source: Self, destination: Self) -> Result<u16>;
    /// What a datagram's checksum must be.
    fn udp_checksum(udp: &UdpSlice<'_>, source: Self, destination: Self) -> Result<u16>;
}

impl Packets for Ipv4Addr {
    fn builder(
        source_mac: [u8; 6],
        destination_mac: [u8; 6],
        source: Self,
        destination: Self,
        ttl: u8,
    ) -> PacketBuilderStep<IpHeaders> {
        PacketBuilder::ethernet2(source_mac, destination_mac).ipv4(source.octets(), destination.octets(), ttl)
    }

    fn addresses(net: &NetSlice<'_>) -> Result<(Self, Self, u8)> {
        let NetSlice::Ipv4(ip) = net else { bail!("not IPv4") };
        let header = ip.header();
        ensure!(header.header_checksum() == header.to_header().calc_header_checksum(), "IPv4 checksum is wrong");
        Ok((header.source_addr(), header.destination_addr(), header.ttl()))
    }

    fn tcp_checksum(tcp: &TcpSlice<'_>, source: Self, destination: Self) -> Result<u16> {
        tcp.calc_checksum_ipv4(source.octets(), destination.octets()).context("TCP checksum")
    }

    fn udp_checksum(udp: &UdpSlice<'_>, source: Self, destination: Self) -> Result<u16> {
        let header = udp.to_header();
        header.calc_checksum_ipv4_raw(source.octets(), destination.octets(), udp.payload()).context("UDP checksum")
    }
}

impl Packets for Ipv6Addr {
    fn builder(
        source_mac: [u8; 6],
        destination_mac: [u8; 6],
        source: Self,
        destination: Self,
        ttl: u8,
    ) -> PacketBuilderStep<IpHeaders> {
        PacketBuilder::ethernet2(source_mac, destination_mac).ipv6(source.octets(), destination.octets(), ttl)
    }

    fn addresses(net: &NetSlice<'_>) -> Result<(Self, Self, u8)> {
        let NetSlice::Ipv6(ip) = net else { bail!("not IPv6") };
        let header = ip.header();
        Ok((header.source_addr(), header.destination_addr(), header.hop_limit()))
    }

    fn tcp_checksum(tcp: &TcpSlice<'_>, source: Self, destination: Self) -> Result<u16> {
        tcp.calc_checksum_ipv6(source.octets(), destination.octets()).context("TCP checksum")
    }

    fn udp_checksum(udp: &UdpSlice<'_>, source: Self, destination: Self) -> Result<u16> {
        let header = udp.to_header();
        header.calc_checksum_ipv6_raw(source.octets(), destination.octets(), udp.payload()).context("UDP checksum")
    }
}

/// A client's segment to the bench's VIP, through the tenant's gateway.
pub fn client<I: Ip>(source: (I, u16), flags: u8, sequence: u32, acknowledgement: u32) -> Segment<I> {
    Segment {
        source_mac: bench::GATEWAY_MAC,
        destination_mac: bench::TENANT_MAC,
        source,
        destination: (I::VIP, bench::PORT),
        ttl: 64,
        flags,
        sequence,
        acknowledgement,
        payload: Vec::new(),
    }
}

/// A client's datagram to the bench's VIP, through the tenant's gateway.
pub fn query<I: Ip>(source: (I, u16), payload: &[u8]) -> Datagram<I> {
    Datagram {
        source_mac: bench::GATEWAY_MAC,
        destination_mac: bench::TENANT_MAC,
        source,
        destination: (I::VIP, bench::UDP_PORT),
        ttl: 64,
        checksum: true,
        payload: payload.to_vec(),
    }
}

/// A frame with an 802.1Q tag put in: `control` is priority (3 bits), drop eligibility (1 bit) and VLAN id (12 bits).
#[must_use]
pub fn tagged(frame: &[u8], control: u16) -> Vec<u8> {
    let mut out = frame[..12].to_vec();
    out.extend([0x81, 0x00]);
    out.extend(control.to_be_bytes());
    out.extend(&frame[12..]);
    out
}

/// Tag control information of a frame that must have one 802.1Q tag, and the frame without it.
pub fn untagged(frame: &[u8]) -> Result<(u16, Vec<u8>)> {
    ensure!(frame.len() >= 18 && frame[12..14] == [0x81, 0x00], "no tag: {frame:02x?}");
    let control = u16::from_be_bytes([frame[14], frame[15]]);
    Ok((control, [&frame[..12], &frame[16..]].concat()))
}

/// Bytes of a hexadecimal text.
pub fn bytes(hex: &str) -> Result<Vec<u8>> {
    ensure!(hex.len().is_multiple_of(2), "odd number of digits");
    (0..hex.len()).step_by(2).map(|at| Ok(u8::from_str_radix(&hex[at..at + 2], 16)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip<I: Ip>() -> Result<()> {
        let mut segment = client((I::CLIENT, 40000), SYN | ACK, 7, 9);
        segment.payload = b"payload".to_vec();
        assert_eq!(Segment::<I>::parse(&segment.frame())?, segment);
        let datagram = query((I::CLIENT, 40000), b"payload");
        assert_eq!(Datagram::<I>::parse(&datagram.frame())?, datagram);
        let unchecked = Datagram { checksum: false, ..datagram.clone() };
        assert_eq!(Datagram::<I>::parse(&unchecked.frame())?, unchecked);
        let icmp = Icmp {
            source_mac: bench::GATEWAY_MAC,
            destination_mac: bench::TENANT_MAC,
            source: I::CLIENT,
            destination: I::VIP,
            ttl: 64,
            kind: 3,
            code: 4,
            rest: [0, 0, 5, 0x78],
            payload: vec![7; 28],
        };
        assert_eq!(Icmp::<I>::parse(&icmp.frame())?, icmp);

        let mut damaged = [segment.frame(), datagram.frame(), icmp.frame()];
        for frame in &mut damaged {
            *frame.last_mut().context("a byte")? ^= 1;
        }
        assert!(Segment::<I>::parse(&damaged[0]).is_err());
        assert!(Datagram::<I>::parse(&damaged[1]).is_err());
        assert!(Icmp::<I>::parse(&damaged[2]).is_err());
        let with_tag = tagged(&segment.frame(), 2003);
        assert!(Segment::<I>::parse(&with_tag).is_err());
        assert_eq!(untagged(&with_tag)?, (2003, segment.frame()));
        assert!(untagged(&segment.frame()).is_err());
        Ok(())
    }

    #[test]
    fn what_is_built_is_parsed_and_damage_is_seen() -> Result<()> {
        round_trip::<Ipv4Addr>()?;
        round_trip::<Ipv6Addr>()
    }
}
