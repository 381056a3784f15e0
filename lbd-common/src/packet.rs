//! Headers as they lie in a frame, what is wrong with them, and how they are rewritten.
//!
//! Fields named `_be` hold what is on the wire. The header types have their fields' natural alignment, which an IP header behind an
//! Ethernet header has not: BPF reads unaligned packet data in one load where the kernel's verifier allows it (x86-64 and
//! arm64 do).

use core::fmt::Debug;
use core::mem::offset_of;
use core::sync::atomic::{Ordering, compiler_fence};

use network_types::arp::ArpHdr;

use crate::abi::{Address, Address4, Address6, FlowKey, Mac, Tuple, Tuple4, Tuple6};
use crate::checksum::{Change, Delta, fold};
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
/// Length of an IPv6 header.
pub const IPV6: usize = 40;
/// Length of an IPv6 header and of a TCP header without options, together.
pub const IPV6_TCP: usize = 60;
/// Length of an 802.1Q tag.
pub const VLAN_TAG: usize = 4;

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

/// IPv6 header (RFC 8200).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6 {
    /// Version (4 bits), traffic class (8 bits), flow label (20 bits).
    pub version_class_label_be: u32,
    /// Length of what follows this header.
    pub payload_length_be: u16,
    /// Protocol of what follows, or an extension header.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source.
    pub source_be: Address6,
    /// Destination.
    pub destination_be: Address6,
}

/// UDP header (RFC 768).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Udp {
    /// Source port.
    pub source_port_be: u16,
    /// Destination port.
    pub destination_port_be: u16,
    /// Length of header and payload.
    pub length_be: u16,
    /// Checksum, as it lies in memory; zero: not computed (IPv4 only).
    pub checksum: u16,
}

/// IP header and TCP header, both without options.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpPacket<A: Family> {
    /// IP.
    pub ip: A::Header,
    /// TCP.
    pub tcp: Tcp,
}

/// IP header without options and UDP header.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpPacket<A: Family> {
    /// IP.
    pub ip: A::Header,
    /// UDP.
    pub udp: Udp,
}

/// TCP over IPv4.
pub type Ipv4Tcp = TcpPacket<Address4>;
/// TCP over IPv6.
pub type Ipv6Tcp = TcpPacket<Address6>;
/// UDP over IPv4.
pub type Ipv4Udp = UdpPacket<Address4>;
/// UDP over IPv6.
pub type Ipv6Udp = UdpPacket<Address6>;

const _: () = assert!(size_of::<Ipv4>() == IPV4 && size_of::<Ipv4Tcp>() == IPV4_TCP && size_of::<Ipv4Udp>() == 28);
const _: () = assert!(size_of::<Ipv6>() == IPV6 && size_of::<Ipv6Tcp>() == IPV6_TCP && size_of::<Ipv6Udp>() == 48);

const _: () = assert!(offset_of!(Ipv4, source_be) == IPV4 - 8 && offset_of!(Ipv6, source_be) == IPV6 - 32);
const _: () = assert!(offset_of!(Tcp, source_port_be) == 0 && offset_of!(Udp, source_port_be) == 0);
const _: () = assert!(offset_of!(Ipv4, destination_be) == IPV4 - 4 && offset_of!(Tuple4, source_port_be) == 8);
const _: () = assert!(offset_of!(Ipv6, destination_be) == IPV6 - 16 && offset_of!(Tuple6, source_port_be) == 32);
const _: () = assert!(offset_of!(Tcp, destination_port_be) == 2 && offset_of!(Udp, destination_port_be) == 2);

/// An address family's packets.
pub trait Family: Address {
    /// Its IP header without options.
    type Header: IpHeader<Self>;
    /// ICMP's protocol number.
    const ICMP: u8;

    /// Whether an address can be a client's.
    fn is_plausible_source(self) -> bool;
}

/// An IP header without options.
pub trait IpHeader<A: Address>: Copy + Debug + Eq {
    /// Length of the header.
    const LENGTH: usize;

    /// Whether the header is well-formed, whole, without options and not a fragment; else why not. `available` is the number of
    /// bytes from the header to the end of the frame.
    fn verify(&self, available: usize) -> Result<(), Reason>;
    /// Protocol of what follows.
    fn protocol(&self) -> u8;
    /// Length of the packet with its header.
    fn total_length(&self) -> u32;
    /// TTL or hop limit.
    fn hops(&self) -> u8;
    /// Source.
    fn source(&self) -> A;
    /// Destination.
    fn destination(&self) -> A;
    /// The TTL becomes one less, and the header's checksum follows incrementally, by a change of addresses too. The TTL must be above 1.
    fn forward(&mut self, addresses: Delta);
    /// A header from `source` to `destination`, with `payload` bytes of `protocol` to follow, and the TTL 64.
    fn new(source: A, destination: A, protocol: u8, payload: u16) -> Self;
    /// Sum of the pseudo-header (RFC 9293 §3.1, RFC 8200 §8.1) over `payload` bytes of `protocol`, not folded.
    fn pseudo(&self, protocol: u8, payload: u16) -> u64;
}

/// Sum of an address's words, not folded.
#[inline(always)]
fn address_sum<A: Address>(address: A) -> u64 {
    let [a, b, c, d] = address.quads();
    u64::from(a) + u64::from(b) + u64::from(c) + u64::from(d)
}

impl Family for Address4 {
    type Header = Ipv4;
    const ICMP: u8 = ICMP;

    /// Not "this network" (RFC 1122), loopback, multicast, reserved or broadcast (RFC 6890).
    #[inline(always)]
    fn is_plausible_source(self) -> bool {
        let first = self.to_ne_bytes()[0];
        first != 0 && first != 127 && first < 224
    }
}

impl Family for Address6 {
    type Header = Ipv6;
    const ICMP: u8 = ICMPV6;

    /// Not unspecified, loopback, IPv4-mapped (all in `::/32` or so, none of it given out: RFC 4291 §2.5) or a group.
    #[inline(always)]
    fn is_plausible_source(self) -> bool {
        self[0] != 0 && self[0].to_ne_bytes()[0] != 0xff
    }
}

impl IpHeader<Address4> for Ipv4 {
    const LENGTH: usize = IPV4;

    #[inline(always)]
    fn verify(&self, available: usize) -> Result<(), Reason> {
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

    #[inline(always)]
    fn protocol(&self) -> u8 {
        self.protocol
    }

    #[inline(always)]
    fn total_length(&self) -> u32 {
        u32::from(u16::from_be(self.total_length_be))
    }

    #[inline(always)]
    fn hops(&self) -> u8 {
        self.ttl
    }

    #[inline(always)]
    fn source(&self) -> Address4 {
        self.source_be
    }

    #[inline(always)]
    fn destination(&self) -> Address4 {
        self.destination_be
    }

    #[inline(always)]
    fn forward(&mut self, addresses: Delta) {
        let before = u16::from_ne_bytes([self.ttl, self.protocol]);
        let ttl = self.ttl.wrapping_sub(1);
        let after = u16::from_ne_bytes([ttl, self.protocol]);
        self.ttl = ttl;
        self.checksum = addresses.word(before, after).apply(self.checksum);
    }

    #[inline(always)]
    fn new(source: Address4, destination: Address4, protocol: u8, payload: u16) -> Self {
        let mut header = Self {
            version_length: 0x45,
            services: 0,
            total_length_be: (IPV4 as u16 + payload).to_be(),
            identification_be: 0,
            fragment_be: 0x4000u16.to_be(),
            ttl: 64,
            protocol,
            checksum: 0,
            source_be: source,
            destination_be: destination,
        };
        header.checksum = !fold(
            address_sum(source)
                + address_sum(destination)
                + u64::from(u16::from_ne_bytes([0x45, 0]))
                + u64::from(header.total_length_be)
                + u64::from(header.fragment_be)
                + u64::from(u16::from_ne_bytes([64, protocol])),
        );
        header
    }

    #[inline(always)]
    fn pseudo(&self, protocol: u8, payload: u16) -> u64 {
        address_sum(self.source_be)
            + address_sum(self.destination_be)
            + u64::from(u16::from_ne_bytes([0, protocol]))
            + u64::from(payload.to_be())
    }
}

/// Next header: a fragment (RFC 8200 §4.5).
const IPV6_FRAGMENT: u8 = 44;
/// Next headers that are extensions with another header behind them in clear (RFC 8200 §4.1, RFC 4302, RFC 7401): hop-by-hop, routing,
/// authentication, destination options, mobility, host identity, shim6. What encapsulating security (RFC 4303) hides is a protocol like any.
const IPV6_EXTENSIONS: [u8; 7] = [0, 43, 51, 60, 135, 139, 140];

impl IpHeader<Address6> for Ipv6 {
    const LENGTH: usize = IPV6;

    #[inline(always)]
    fn verify(&self, available: usize) -> Result<(), Reason> {
        if self.version_class_label_be.to_ne_bytes()[0] >> 4 != 6 || self.total_length() as usize > available {
            return Err(Reason::Malformed);
        }
        if self.next_header == IPV6_FRAGMENT {
            return Err(Reason::FragmentOrphan);
        }
        if is_extension(self.next_header) {
            return Err(Reason::IpOptions);
        }
        Ok(())
    }

    #[inline(always)]
    fn protocol(&self) -> u8 {
        self.next_header
    }

    #[inline(always)]
    fn total_length(&self) -> u32 {
        IPV6 as u32 + u32::from(u16::from_be(self.payload_length_be))
    }

    #[inline(always)]
    fn hops(&self) -> u8 {
        self.hop_limit
    }

    #[inline(always)]
    fn source(&self) -> Address6 {
        self.source_be
    }

    #[inline(always)]
    fn destination(&self) -> Address6 {
        self.destination_be
    }

    #[inline(always)]
    fn forward(&mut self, _addresses: Delta) {
        self.hop_limit = self.hop_limit.wrapping_sub(1);
    }

    #[inline(always)]
    fn new(source: Address6, destination: Address6, protocol: u8, payload: u16) -> Self {
        Self {
            version_class_label_be: 0x6000_0000u32.to_be(),
            payload_length_be: payload.to_be(),
            next_header: protocol,
            hop_limit: 64,
            source_be: source,
            destination_be: destination,
        }
    }

    #[inline(always)]
    fn pseudo(&self, protocol: u8, payload: u16) -> u64 {
        address_sum(self.source_be)
            + address_sum(self.destination_be)
            + u64::from(u16::from_ne_bytes([0, protocol]))
            + u64::from(payload.to_be())
    }
}

/// Whether an IPv6 next header is an extension header other than a fragment's.
#[inline(always)]
pub const fn is_extension(next_header: u8) -> bool {
    let mut index = 0;
    while index < IPV6_EXTENSIONS.len() {
        if IPV6_EXTENSIONS[index] == next_header {
            return true;
        }
        index += 1;
    }
    false
}

/// Makes the compiler read IPv6 addresses again rather than keep all of them in registers that BPF does not have.
#[inline(always)]
fn read_again<A: Address>() {
    if A::IS_V6 {
        compiler_fence(Ordering::SeqCst);
    }
}

/// The tuple of a packet, where it lies.
///
/// # Safety
///
/// The packet begins with the family's IP header without options, behind which ports follow.
#[inline(always)]
const unsafe fn tuple_in<A: Family, P>(packet: &mut P) -> &mut Tuple<A> {
    // SAFETY: the caller's; addresses end an IP header, ports begin what is behind it, and that is a tuple: asserted above.
    unsafe { &mut *(&raw mut *packet).byte_add(A::Header::LENGTH - 2 * size_of::<A>()).cast() }
}

impl<A: Family> TcpPacket<A> {
    /// Length of both headers without options.
    pub const LENGTH: usize = A::Header::LENGTH + 20;

    /// Whether this is an unfragmented TCP segment without IP options, whose length fields fit into `available` bytes from
    /// the IP header to the end of the frame; else why not.
    #[inline(always)]
    pub fn verify(&self, available: usize) -> Result<(), Reason> {
        self.ip.verify(available)?;
        if self.ip.protocol() != TCP {
            return Err(Reason::UnservedProtocol);
        }
        let header = self.tcp_header_length();
        if header < 20 || A::Header::LENGTH as u32 + header > self.total_length() {
            return Err(Reason::Malformed);
        }
        Ok(())
    }

    /// Total length of the IP packet: what counts as bytes (Ethernet padding doesn't).
    #[inline(always)]
    pub fn total_length(&self) -> u32 {
        self.ip.total_length()
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
    pub fn payload_length(&self) -> u32 {
        self.total_length().wrapping_sub(A::Header::LENGTH as u32).wrapping_sub(self.tcp_header_length())
    }

    /// Sequence number after this segment: payload, SYN and FIN count (RFC 9293 §3.4).
    #[inline(always)]
    pub fn sequence_end(&self) -> u32 {
        let flags = self.tcp.flags;
        self.sequence()
            .wrapping_add(self.payload_length())
            .wrapping_add(u32::from(flags & SYN != 0))
            .wrapping_add(u32::from(flags & FIN != 0))
    }

    /// Addresses and ports.
    #[inline(always)]
    pub fn tuple(&self) -> Tuple<A> {
        Tuple {
            source_be: self.ip.source(),
            destination_be: self.ip.destination(),
            source_port_be: self.tcp.source_port_be,
            destination_port_be: self.tcp.destination_port_be,
        }
    }

    /// Key of the flow that this packet belongs to.
    #[inline(always)]
    pub fn key(&self, segment: u16) -> FlowKey<A> {
        FlowKey { tuple: self.tuple(), segment, protocol: TCP, pad: 0 }
    }

    /// Addresses and ports become `to`, the TTL one less; all checksums follow incrementally. The TTL must be above 1.
    #[inline(always)]
    pub fn rewrite(&mut self, from: &Tuple<A>, to: &Tuple<A>) {
        let change = Change::between(from, to);
        read_again::<A>();
        *self.tuple_mut() = *to;
        self.forward(change);
    }

    /// Addresses and ports, where they lie.
    #[inline(always)]
    pub const fn tuple_mut(&mut self) -> &mut Tuple<A> {
        // SAFETY: an IP header of the family with ports behind it.
        unsafe { tuple_in(self) }
    }

    /// The TTL becomes one less; all checksums follow, by a change of addresses and ports too. The TTL must be above 1.
    #[inline(always)]
    pub fn forward(&mut self, change: Change) {
        self.ip.forward(change.addresses);
        self.tcp.checksum = change.tuple.apply(self.tcp.checksum);
    }

    /// A segment without payload and options: `flags` from `tuple`'s source to its destination. Sequence numbers are in host order.
    #[inline(always)]
    pub fn bare(tuple: &Tuple<A>, sequence: u32, acknowledgement: u32, flags: u8) -> Self {
        let mut segment = Self {
            ip: A::Header::new(tuple.source_be, tuple.destination_be, TCP, 20),
            tcp: Tcp {
                source_port_be: tuple.source_port_be,
                destination_port_be: tuple.destination_port_be,
                sequence_be: sequence.to_be(),
                acknowledgement_be: acknowledgement.to_be(),
                offset: 5 << 4,
                flags,
                window_be: 0,
                checksum: 0,
                urgent_be: 0,
            },
        };
        let sum = segment.ip.pseudo(TCP, 20)
            + u64::from(segment.tcp.source_port_be)
            + u64::from(segment.tcp.destination_port_be)
            + u64::from(segment.tcp.sequence_be)
            + u64::from(segment.tcp.acknowledgement_be)
            + u64::from(u16::from_ne_bytes([5 << 4, flags]));
        segment.tcp.checksum = !fold(sum);
        segment
    }

    /// The RST that refuses this segment, as if from its destination (RFC 9293 §3.10.7.1); `None` for a RST.
    #[inline(always)]
    pub fn refusal(&self) -> Option<Self> {
        let flags = self.tcp.flags;
        if flags & RST != 0 {
            return None;
        }
        let back = self.tuple().turned();
        Some(if flags & ACK != 0 {
            Self::bare(&back, self.acknowledgement(), 0, RST)
        } else {
            Self::bare(&back, 0, self.sequence_end(), RST | ACK)
        })
    }
}

impl<A: Family> UdpPacket<A> {
    /// Length of both headers.
    pub const LENGTH: usize = A::Header::LENGTH + 8;

    /// Whether this is an unfragmented UDP datagram without IP options, whose length fields fit into `available` bytes from
    /// the IP header to the end of the frame; else why not.
    #[inline(always)]
    pub fn verify(&self, available: usize) -> Result<(), Reason> {
        self.ip.verify(available)?;
        if self.ip.protocol() != UDP {
            return Err(Reason::UnservedProtocol);
        }
        let length = u32::from(u16::from_be(self.udp.length_be));
        if length < 8 || A::Header::LENGTH as u32 + length > self.ip.total_length() {
            return Err(Reason::Malformed);
        }
        // RFC 8200 §8.1: receivers discard UDP over IPv6 without a checksum.
        if A::IS_V6 && self.udp.checksum == 0 {
            return Err(Reason::UdpNoChecksum);
        }
        Ok(())
    }

    /// Addresses and ports.
    #[inline(always)]
    pub fn tuple(&self) -> Tuple<A> {
        Tuple {
            source_be: self.ip.source(),
            destination_be: self.ip.destination(),
            source_port_be: self.udp.source_port_be,
            destination_port_be: self.udp.destination_port_be,
        }
    }

    /// Addresses and ports become `to`, the TTL one less; all checksums follow incrementally, and none stays none. The TTL must
    /// be above 1.
    #[inline(always)]
    pub fn rewrite(&mut self, from: &Tuple<A>, to: &Tuple<A>) {
        let change = Change::between(from, to);
        read_again::<A>();
        *self.tuple_mut() = *to;
        self.forward(change);
    }

    /// Addresses and ports, where they lie.
    #[inline(always)]
    pub const fn tuple_mut(&mut self) -> &mut Tuple<A> {
        // SAFETY: an IP header of the family with ports behind it.
        unsafe { tuple_in(self) }
    }

    /// The TTL becomes one less; all checksums follow, by a change of addresses and ports too. The TTL must be above 1.
    #[inline(always)]
    pub fn forward(&mut self, change: Change) {
        self.ip.forward(change.addresses);
        self.udp.checksum = change.tuple.apply_udp(self.udp.checksum);
    }
}

/// Kind of the TCP option that carries the maximum segment size (RFC 9293 §3.2); it is 4 bytes long.
pub const OPTION_MSS: u8 = 2;
/// Kind of the option that ends the list.
pub const OPTION_END: u8 = 0;
/// Kind of the option that is padding, 1 byte long.
pub const OPTION_NONE: u8 = 1;

/// MSS that fits an MTU: without IP and TCP headers (RFC 6691).
#[inline(always)]
pub const fn mss<A: Family>(mtu: u32) -> u32 {
    mtu.saturating_sub(TcpPacket::<A>::LENGTH as u32)
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

#[cfg(test)]
mod tests {
    use super::*;

    const VIP: Address6 = [0x2a00, 1, 2, 0x3000_0001];
    const CLIENT: Address6 = [0xffff_ffff, 0, u32::MAX, 9];
    const NODE: Address6 = [0, 0x1234, 0, 7];

    const fn tuple<A: Address>(
        source_be: A,
        destination_be: A,
        source_port_be: u16,
        destination_port_be: u16,
    ) -> Tuple<A> {
        Tuple { source_be, destination_be, source_port_be, destination_port_be }
    }

    /// A segment that is rewritten is the one made for where it goes, but for its TTL.
    fn rewritten<A: Family>(from: &Tuple<A>, to: &Tuple<A>) {
        let mut segment = TcpPacket::bare(from, 1, 2, ACK);
        assert_eq!(*segment.tuple_mut(), *from);
        assert_eq!(segment.tuple(), *from);
        segment.rewrite(from, to);
        let mut expected = TcpPacket::bare(to, 1, 2, ACK);
        expected.ip.forward(Delta::NONE);
        assert_eq!(segment, expected);
    }

    #[test]
    fn a_rewritten_segment_is_the_one_made_for_where_it_goes() {
        rewritten(&tuple(0x0102_0304, 0x0506_0708, 9, 10), &tuple(0xffff_0000, 1, 0xffff, 12));
        rewritten(&tuple(CLIENT, VIP, 9, 10), &tuple(VIP, NODE, 0xffff, 12));
    }

    #[test]
    fn a_datagram_has_its_tuple_where_a_segment_has_it() {
        let udp = Udp { source_port_be: 9, destination_port_be: 10, length_be: 8, checksum: 1 };
        let mut four = Ipv4Udp { ip: Ipv4::new(1, 2, UDP, 8), udp };
        assert_eq!((*four.tuple_mut(), four.tuple()), (tuple(1, 2, 9, 10), tuple(1, 2, 9, 10)));
        let mut six = Ipv6Udp { ip: Ipv6::new(CLIENT, VIP, UDP, 8), udp };
        assert_eq!((*six.tuple_mut(), six.tuple()), (tuple(CLIENT, VIP, 9, 10), tuple(CLIENT, VIP, 9, 10)));
    }
}
