//! Packets for the fixtures: built and checked by another implementation (etherparse) than the one under test.

use std::net::Ipv4Addr;

use anyhow::{Context as _, Result, ensure};
use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TcpSlice, TransportSlice};
use lbd_common::tcp::{ACK, FIN, RST, SYN};

use crate::datapath::bench;

/// A TCP segment in an Ethernet frame, with what tests change.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Source MAC.
    pub source_mac: [u8; 6],
    /// Destination MAC.
    pub destination_mac: [u8; 6],
    /// Source.
    pub source: (Ipv4Addr, u16),
    /// Destination.
    pub destination: (Ipv4Addr, u16),
    /// TTL.
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

impl Segment {
    /// The frame, with right checksums.
    pub fn frame(&self) -> Vec<u8> {
        let mut tcp = PacketBuilder::ethernet2(self.source_mac, self.destination_mac)
            .ipv4(self.source.0.octets(), self.destination.0.octets(), self.ttl)
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

    /// Parses a frame; both checksums must be right.
    pub fn parse(frame: &[u8]) -> Result<Self> {
        let sliced = SlicedPacket::from_ethernet(frame)?;
        let Some(NetSlice::Ipv4(ip)) = &sliced.net else { anyhow::bail!("not IPv4: {frame:02x?}") };
        let header = ip.header();
        ensure!(header.header_checksum() == header.to_header().calc_header_checksum(), "IPv4 checksum is wrong");
        let Some(TransportSlice::Tcp(tcp)) = &sliced.transport else { anyhow::bail!("not TCP: {frame:02x?}") };
        ensure!(
            tcp.checksum() == expected_checksum(tcp, header.source(), header.destination())?,
            "TCP checksum is wrong"
        );
        let bits = [(tcp.syn(), SYN), (tcp.fin(), FIN), (tcp.rst(), RST), (tcp.ack(), ACK)];
        Ok(Self {
            source_mac: frame[6..12].try_into()?,
            destination_mac: frame[..6].try_into()?,
            source: (header.source_addr(), tcp.source_port()),
            destination: (header.destination_addr(), tcp.destination_port()),
            ttl: header.ttl(),
            flags: bits.iter().filter(|(set, _)| *set).map(|(_, bit)| bit).sum(),
            sequence: tcp.sequence_number(),
            acknowledgement: tcp.acknowledgment_number(),
            payload: tcp.payload().to_vec(),
        })
    }
}

/// A client's segment to the bench's VIP, through the tenant's gateway.
pub fn client(source: (Ipv4Addr, u16), flags: u8, sequence: u32, acknowledgement: u32) -> Segment {
    Segment {
        source_mac: bench::GATEWAY_MAC,
        destination_mac: bench::TENANT_MAC,
        source,
        destination: (bench::VIP, bench::PORT),
        ttl: 64,
        flags,
        sequence,
        acknowledgement,
        payload: Vec::new(),
    }
}

fn expected_checksum(tcp: &TcpSlice<'_>, source: [u8; 4], destination: [u8; 4]) -> Result<u16> {
    tcp.calc_checksum_ipv4(source, destination).context("TCP checksum")
}

/// Bytes of a hexadecimal text.
pub fn bytes(hex: &str) -> Result<Vec<u8>> {
    ensure!(hex.len().is_multiple_of(2), "odd number of digits");
    (0..hex.len()).step_by(2).map(|at| Ok(u8::from_str_radix(&hex[at..at + 2], 16)?)).collect()
}
