//! Headers as they lie in a frame, what is wrong with them, and how they are rewritten.
//!
//! All header types have alignment 1 and hold bytes as on the wire, so that a pointer to packet data can be one of them
//! after a single bounds check.

use network_types::{ip::Ipv4Hdr, tcp::TcpHdr};

use crate::abi::{FlowKey4, Mac, Tuple4};
use crate::checksum::{Delta, checksum, fold, sum};
use crate::reason::Reason;
use crate::tcp::{ACK, FIN, RST, SYN};

/// IP protocol number of ICMP.
pub const ICMP: u8 = 1;
/// IP protocol number of TCP.
pub const TCP: u8 = 6;
/// IP protocol number of UDP.
pub const UDP: u8 = 17;
/// IP protocol number of ICMPv6.
pub const ICMPV6: u8 = 58;

/// Ethertypes, as the `u16` that lies in a frame.
pub mod ethertype {
    /// IPv4.
    pub const IPV4: u16 = u16::from_ne_bytes([0x08, 0x00]);
    /// ARP.
    pub const ARP: u16 = u16::from_ne_bytes([0x08, 0x06]);
    /// IPv6.
    pub const IPV6: u16 = u16::from_ne_bytes([0x86, 0xdd]);
    /// IEEE 802.1Q tag.
    pub const VLAN: u16 = u16::from_ne_bytes([0x81, 0x00]);
    /// IEEE 802.1ad service tag.
    pub const SERVICE_VLAN: u16 = u16::from_ne_bytes([0x88, 0xa8]);
}

/// Length of an Ethernet header.
pub const ETHERNET: usize = 14;
/// Length of an IPv4 header without options and of a TCP header without options, together.
pub const IPV4_TCP: usize = 40;

/// IPv4 header without options and TCP header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Ipv4Tcp {
    /// IPv4.
    pub ip: Ipv4Hdr,
    /// TCP.
    pub tcp: TcpHdr,
}

const _: () = assert!(size_of::<Ipv4Tcp>() == IPV4_TCP && align_of::<Ipv4Tcp>() == 1);

/// Bytes of a TCP header up to which the flags lie.
const FLAGS_OFFSET: usize = 13;

impl Ipv4Tcp {
    /// The whole as bytes.
    #[inline(always)]
    pub const fn as_bytes(&self) -> &[u8; IPV4_TCP] {
        // SAFETY: size and alignment are asserted above; the struct has only byte arrays, hence no padding.
        unsafe { &*core::ptr::from_ref(self).cast() }
    }

    /// Headers from bytes.
    pub const fn from_bytes(bytes: [u8; IPV4_TCP]) -> Self {
        // SAFETY: same size; any bytes are valid in byte arrays.
        unsafe { core::mem::transmute(bytes) }
    }

    /// Whether this is an unfragmented TCP segment over IPv4 without options, whose length fields fit into `available` bytes of IP
    /// packet; else why not. Reads nothing beyond the 40 bytes.
    #[inline(always)]
    pub const fn verify(&self, available: usize) -> Result<(), Reason> {
        if let Err(reason) = verify_ipv4(&self.ip, available) {
            return Err(reason);
        }
        if self.ip.proto != TCP {
            return Err(Reason::UnservedProtocol);
        }
        let total = u16::from_be_bytes(self.ip.tot_len) as usize;
        let header = self.tcp_header_length();
        if header < 20 || 20 + header > total {
            return Err(Reason::Malformed);
        }
        Ok(())
    }

    /// Total length of the IP packet: what counts as bytes (Ethernet padding doesn't).
    #[inline(always)]
    pub const fn total_length(&self) -> u16 {
        u16::from_be_bytes(self.ip.tot_len)
    }

    /// Length of the TCP header with options.
    #[inline(always)]
    pub const fn tcp_header_length(&self) -> usize {
        (self.as_bytes()[20 + 12] >> 4) as usize * 4
    }

    /// TCP flags.
    #[inline(always)]
    pub const fn flags(&self) -> u8 {
        self.as_bytes()[20 + FLAGS_OFFSET]
    }

    /// Sequence number, host order.
    #[inline(always)]
    pub const fn sequence(&self) -> u32 {
        u32::from_be_bytes(self.tcp.seq)
    }

    /// Acknowledgement number, host order.
    #[inline(always)]
    pub const fn acknowledgement(&self) -> u32 {
        u32::from_be_bytes(self.tcp.ack_seq)
    }

    /// Bytes of payload. Right only after [`Self::verify`].
    #[inline(always)]
    pub const fn payload_length(&self) -> u32 {
        (self.total_length() as u32).wrapping_sub(20).wrapping_sub(self.tcp_header_length() as u32)
    }

    /// Sequence number after this segment: payload, SYN and FIN count (RFC 9293 §3.4).
    #[inline(always)]
    pub const fn sequence_end(&self) -> u32 {
        let flags = self.flags();
        self.sequence()
            .wrapping_add(self.payload_length())
            .wrapping_add((flags & SYN != 0) as u32)
            .wrapping_add((flags & FIN != 0) as u32)
    }

    /// Addresses and ports.
    #[inline(always)]
    pub const fn tuple(&self) -> Tuple4 {
        Tuple4 {
            source: self.ip.src_addr,
            destination: self.ip.dst_addr,
            source_port_be: u16::from_ne_bytes(self.tcp.source),
            destination_port_be: u16::from_ne_bytes(self.tcp.dest),
        }
    }

    /// Key of the flow that this packet belongs to.
    #[inline(always)]
    pub const fn key(&self, segment: u16) -> FlowKey4 {
        FlowKey4 { tuple: self.tuple(), segment, protocol: TCP, pad: 0 }
    }

    /// Addresses and ports become `to`, the TTL one less; both checksums follow incrementally. The TTL must be above 1.
    #[inline(always)]
    pub const fn rewrite(&mut self, from: &Tuple4, to: &Tuple4) {
        let addresses = Delta::NONE.addresses(from, to);
        let before = u16::from_ne_bytes([self.ip.ttl, self.ip.proto]);
        self.ip.ttl = self.ip.ttl.wrapping_sub(1);
        let after = u16::from_ne_bytes([self.ip.ttl, self.ip.proto]);
        self.ip.check = addresses.word(before, after).apply(u16::from_ne_bytes(self.ip.check)).to_ne_bytes();
        self.ip.src_addr = to.source;
        self.ip.dst_addr = to.destination;
        self.tcp.source = to.source_port_be.to_ne_bytes();
        self.tcp.dest = to.destination_port_be.to_ne_bytes();
        self.tcp.check = addresses.ports(from, to).apply(u16::from_ne_bytes(self.tcp.check)).to_ne_bytes();
    }

    /// The RST that refuses this segment (RFC 9293 §3.10.7.1), from its destination; `None` for a RST.
    #[inline(always)]
    pub fn refusal(&self) -> Option<Self> {
        let flags = self.flags();
        if flags & RST != 0 {
            return None;
        }
        let (sequence, acknowledgement, answer) = if flags & ACK != 0 {
            (self.tcp.ack_seq, [0; 4], RST)
        } else {
            ([0; 4], self.sequence_end().to_be_bytes(), RST | ACK)
        };
        let mut bytes = [0u8; IPV4_TCP];
        bytes[0] = 0x45;
        bytes[2..4].copy_from_slice(&(IPV4_TCP as u16).to_be_bytes());
        bytes[6] = 0x40;
        bytes[8] = 64;
        bytes[9] = TCP;
        bytes[12..16].copy_from_slice(&self.ip.dst_addr);
        bytes[16..20].copy_from_slice(&self.ip.src_addr);
        bytes[20..22].copy_from_slice(&self.tcp.dest);
        bytes[22..24].copy_from_slice(&self.tcp.source);
        bytes[24..28].copy_from_slice(&sequence);
        bytes[28..32].copy_from_slice(&acknowledgement);
        bytes[32] = 5 << 4;
        bytes[33] = answer;
        let [ip, tcp] = [checksum(&bytes[..20]), tcp_checksum(&bytes)];
        bytes[10..12].copy_from_slice(&ip.to_ne_bytes());
        bytes[36..38].copy_from_slice(&tcp.to_ne_bytes());
        Some(Self::from_bytes(bytes))
    }
}

/// TCP checksum of a segment without payload and options whose checksum field is zero.
#[inline(always)]
fn tcp_checksum(bytes: &[u8; IPV4_TCP]) -> u16 {
    let pseudo = u64::from(u16::from_ne_bytes([0, TCP])) + u64::from(20u16.to_be());
    !fold(sum(&bytes[12..]) + pseudo)
}

/// Whether an IPv4 header is well-formed, whole, without options and not a fragment; else why not.
#[inline(always)]
pub const fn verify_ipv4(ip: &Ipv4Hdr, available: usize) -> Result<(), Reason> {
    if ip.vihl != 0x45 {
        // Options are IHL 6 to 15; below 5 and another version are lies.
        let options = ip.vihl >> 4 == 4 && ip.vihl & 15 > 5;
        return Err(if options { Reason::IpOptions } else { Reason::Malformed });
    }
    let total = u16::from_be_bytes(ip.tot_len) as usize;
    if total < 20 || total > available {
        return Err(Reason::Malformed);
    }
    if u16::from_be_bytes(ip.frags) & 0x3fff != 0 {
        return Err(Reason::FragmentOrphan);
    }
    if ip.proto == TCP && total < IPV4_TCP {
        return Err(Reason::Malformed);
    }
    Ok(())
}

/// Whether an address can be a client's: not "this network" (RFC 1122), loopback, multicast, reserved or broadcast (RFC 6890).
#[inline(always)]
pub const fn plausible_source4(address: [u8; 4]) -> bool {
    address[0] != 0 && address[0] != 127 && address[0] < 224
}

/// Whether a MAC is a group address.
#[inline(always)]
pub const fn is_group(mac: &Mac) -> bool {
    mac[0] & 1 != 0
}

/// The ARP reply to a request, as the 28 bytes after the Ethernet header: `mac` has the address that was asked for.
#[inline(always)]
pub const fn arp_reply(request: &network_types::arp::ArpHdr, mac: Mac) -> network_types::arp::ArpHdr {
    network_types::arp::ArpHdr {
        htype: request.htype,
        ptype: request.ptype,
        hlen: request.hlen,
        plen: request.plen,
        oper: [0, 2],
        sha: mac,
        spa: request.tpa,
        tha: request.sha,
        tpa: request.spa,
    }
}

/// Whether this is an ARP request for an IPv4 address over Ethernet (RFC 826).
#[inline(always)]
pub const fn is_arp_request(arp: &network_types::arp::ArpHdr) -> bool {
    matches!(arp, network_types::arp::ArpHdr { htype: [0, 1], ptype: [8, 0], hlen: 6, plen: 4, oper: [0, 1], .. })
}
