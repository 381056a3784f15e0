//! Headers as they lie in a frame, what is wrong with them, and how they are rewritten.
//!
//! Fields named `_be` hold what is on the wire. The header types have their fields' natural alignment, which an IP header behind an
//! Ethernet header has not: BPF reads unaligned packet data in one load where the kernel's verifier allows it (x86-64 and
//! arm64 do), and host code copies headers into place with [`Ipv4Tcp::from_bytes`].

use network_types::arp::ArpHdr;

use crate::abi::{FlowKey4, Mac, Tuple4};
use crate::checksum::{Delta, fold};
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
/// Length of an IPv4 header without options.
pub const IPV4: usize = 20;
/// Length of an IPv4 header without options and of a TCP header without options, together.
pub const IPV4_TCP: usize = 40;

/// IPv4 header without options (RFC 791).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4 {
    /// Version (4 bits) and header length in words (4 bits).
    pub version_length: u8,
    /// Differentiated services and ECN.
    pub services: u8,
    /// Length of the packet.
    pub total_length_be: u16,
    /// Identification.
    pub identification_be: u16,
    /// Flags (3 bits) and fragment offset (13 bits).
    pub fragment_be: u16,
    /// Time to live.
    pub ttl: u8,
    /// Protocol.
    pub protocol: u8,
    /// Header checksum, as it lies in memory.
    pub checksum: u16,
    /// Source.
    pub source_be: u32,
    /// Destination.
    pub destination_be: u32,
}

/// TCP header without options (RFC 9293).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tcp {
    /// Source port.
    pub source_port_be: u16,
    /// Destination port.
    pub destination_port_be: u16,
    /// Sequence number.
    pub sequence_be: u32,
    /// Acknowledgement number.
    pub acknowledgement_be: u32,
    /// Data offset in words (upper 4 bits).
    pub offset: u8,
    /// Flags: [`crate::tcp`].
    pub flags: u8,
    /// Window.
    pub window_be: u16,
    /// Checksum, as it lies in memory.
    pub checksum: u16,
    /// Urgent pointer.
    pub urgent_be: u16,
}

/// IPv4 header without options and TCP header.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Tcp {
    /// IPv4.
    pub ip: Ipv4,
    /// TCP.
    pub tcp: Tcp,
}

const _: () = assert!(size_of::<Ipv4>() == IPV4 && size_of::<Ipv4Tcp>() == IPV4_TCP);

impl Ipv4 {
    /// Whether the header is well-formed, whole, without options and not a fragment; else why not. `available` is the number of
    /// bytes from the header to the end of the frame.
    #[inline(always)]
    pub const fn verify(&self, available: usize) -> Result<(), Reason> {
        if self.version_length != 0x45 {
            // Options are lengths 6 to 15; below 5, and another version, are lies.
            let options = self.version_length >> 4 == 4 && self.version_length & 15 > 5;
            return Err(if options { Reason::IpOptions } else { Reason::Malformed });
        }
        let total = u16::from_be(self.total_length_be) as usize;
        if total < IPV4 || total > available {
            return Err(Reason::Malformed);
        }
        if self.fragment_be & 0x3fffu16.to_be() != 0 {
            return Err(Reason::FragmentOrphan);
        }
        Ok(())
    }
}

impl Ipv4Tcp {
    /// Headers from the bytes of a packet.
    pub const fn from_bytes(bytes: [u8; IPV4_TCP]) -> Self {
        // SAFETY: same size, no padding, and any bytes are valid in integers.
        unsafe { core::mem::transmute(bytes) }
    }

    /// Headers as bytes.
    pub const fn to_bytes(self) -> [u8; IPV4_TCP] {
        // SAFETY: as above.
        unsafe { core::mem::transmute(self) }
    }

    /// Whether this is an unfragmented TCP segment over IPv4 without options, whose length fields fit into `available` bytes from
    /// the IP header to the end of the frame; else why not.
    #[inline(always)]
    pub const fn verify(&self, available: usize) -> Result<(), Reason> {
        if let Err(reason) = self.ip.verify(available) {
            return Err(reason);
        }
        if self.ip.protocol != TCP {
            return Err(Reason::UnservedProtocol);
        }
        let header = self.tcp_header_length();
        if header < 20 || IPV4 as u32 + header > self.total_length() {
            return Err(Reason::Malformed);
        }
        Ok(())
    }

    /// Total length of the IP packet: what counts as bytes (Ethernet padding doesn't).
    #[inline(always)]
    pub const fn total_length(&self) -> u32 {
        u16::from_be(self.ip.total_length_be) as u32
    }

    /// Length of the TCP header with options.
    #[inline(always)]
    pub const fn tcp_header_length(&self) -> u32 {
        (self.tcp.offset >> 4) as u32 * 4
    }

    /// Sequence number, host order.
    #[inline(always)]
    pub const fn sequence(&self) -> u32 {
        u32::from_be(self.tcp.sequence_be)
    }

    /// Acknowledgement number, host order.
    #[inline(always)]
    pub const fn acknowledgement(&self) -> u32 {
        u32::from_be(self.tcp.acknowledgement_be)
    }

    /// Bytes of payload. Right only after [`Self::verify`].
    #[inline(always)]
    pub const fn payload_length(&self) -> u32 {
        self.total_length().wrapping_sub(IPV4 as u32).wrapping_sub(self.tcp_header_length())
    }

    /// Sequence number after this segment: payload, SYN and FIN count (RFC 9293 §3.4).
    #[inline(always)]
    pub const fn sequence_end(&self) -> u32 {
        let flags = self.tcp.flags;
        self.sequence()
            .wrapping_add(self.payload_length())
            .wrapping_add((flags & SYN != 0) as u32)
            .wrapping_add((flags & FIN != 0) as u32)
    }

    /// Addresses and ports.
    #[inline(always)]
    pub const fn tuple(&self) -> Tuple4 {
        Tuple4 {
            source_be: self.ip.source_be,
            destination_be: self.ip.destination_be,
            source_port_be: self.tcp.source_port_be,
            destination_port_be: self.tcp.destination_port_be,
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
        let before = u16::from_ne_bytes([self.ip.ttl, self.ip.protocol]);
        let ttl = self.ip.ttl.wrapping_sub(1);
        let after = u16::from_ne_bytes([ttl, self.ip.protocol]);
        self.ip.ttl = ttl;
        self.ip.checksum = addresses.word(before, after).apply(self.ip.checksum);
        self.ip.source_be = to.source_be;
        self.ip.destination_be = to.destination_be;
        self.tcp.source_port_be = to.source_port_be;
        self.tcp.destination_port_be = to.destination_port_be;
        self.tcp.checksum = addresses.ports(from, to).apply(self.tcp.checksum);
    }

    /// The RST that refuses this segment, as if from its destination (RFC 9293 §3.10.7.1); `None` for a RST.
    #[inline(always)]
    pub const fn refusal(&self) -> Option<Self> {
        let flags = self.tcp.flags;
        if flags & RST != 0 {
            return None;
        }
        let (sequence_be, acknowledgement_be, answer) = if flags & ACK != 0 {
            (self.tcp.acknowledgement_be, 0, RST)
        } else {
            (0, self.sequence_end().to_be(), RST | ACK)
        };
        let mut reset = Self {
            ip: Ipv4 {
                version_length: 0x45,
                services: 0,
                total_length_be: (IPV4_TCP as u16).to_be(),
                identification_be: 0,
                fragment_be: 0x4000u16.to_be(),
                ttl: 64,
                protocol: TCP,
                checksum: 0,
                source_be: self.ip.destination_be,
                destination_be: self.ip.source_be,
            },
            tcp: Tcp {
                source_port_be: self.tcp.destination_port_be,
                destination_port_be: self.tcp.source_port_be,
                sequence_be,
                acknowledgement_be,
                offset: 5 << 4,
                flags: answer,
                window_be: 0,
                checksum: 0,
                urgent_be: 0,
            },
        };
        let addresses = reset.ip.source_be as u64 + reset.ip.destination_be as u64;
        let ip_rest = u16::from_ne_bytes([0x45, 0]) as u64
            + reset.ip.total_length_be as u64
            + reset.ip.fragment_be as u64
            + u16::from_ne_bytes([64, TCP]) as u64;
        let pseudo_rest = u16::from_ne_bytes([0, TCP]) as u64 + 20u16.to_be() as u64;
        let tcp = reset.tcp.source_port_be as u64
            + reset.tcp.destination_port_be as u64
            + sequence_be as u64
            + acknowledgement_be as u64
            + u16::from_ne_bytes([5 << 4, answer]) as u64;
        reset.ip.checksum = !fold(addresses + ip_rest);
        reset.tcp.checksum = !fold(addresses + pseudo_rest + tcp);
        Some(reset)
    }
}

/// Kind of the TCP option that carries the maximum segment size (RFC 9293 §3.2); it is 4 bytes long.
pub const OPTION_MSS: u8 = 2;
/// Kind of the option that ends the list.
pub const OPTION_END: u8 = 0;
/// Kind of the option that is padding, 1 byte long.
pub const OPTION_NONE: u8 = 1;

/// MSS that fits an MTU: without IPv4 and TCP headers (RFC 6691).
#[inline(always)]
pub const fn mss4(mtu: u32) -> u32 {
    mtu.saturating_sub(IPV4_TCP as u32)
}

/// TCP checksum after the two bytes of an MSS became others. `odd`: the first lies at an odd offset of the TCP header, so that it is the
/// second byte of one checksum word, and the second the first of the next.
#[inline(always)]
pub const fn mss_checksum(checksum: u16, old: [u8; 2], new: [u8; 2], odd: bool) -> u16 {
    let (old, new) = (u16::from_ne_bytes(old), u16::from_ne_bytes(new));
    if odd {
        Delta::NONE.word(old.swap_bytes(), new.swap_bytes()).apply(checksum)
    } else {
        Delta::NONE.word(old, new).apply(checksum)
    }
}

/// Whether an address can be a client's: not "this network" (RFC 1122), loopback, multicast, reserved or broadcast (RFC 6890).
#[inline(always)]
pub const fn plausible_source4(address_be: u32) -> bool {
    let first = address_be.to_ne_bytes()[0];
    first != 0 && first != 127 && first < 224
}

/// Whether a MAC is a group address.
#[inline(always)]
pub const fn is_group(mac: &Mac) -> bool {
    mac[0] & 1 != 0
}

/// The ARP reply to a request: `mac` has the address that was asked for.
#[inline(always)]
pub const fn arp_reply(request: &ArpHdr, mac: Mac) -> ArpHdr {
    ArpHdr {
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
pub const fn is_arp_request(arp: &ArpHdr) -> bool {
    matches!(arp, ArpHdr { htype: [0, 1], ptype: [8, 0], hlen: 6, plen: 4, oper: [0, 1], .. })
}
