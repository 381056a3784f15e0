//! ICMP errors (RFC 792, RFC 4443): how a packet's sender learns that it goes no further.

use crate::checksum::fold;
use crate::packet::{Family, IpHeader as _, UdpPacket};

/// ICMP message without what follows its first eight bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Icmp {
    /// Type.
    pub kind: u8,
    /// Code.
    pub code: u8,
    /// Checksum, as it lies in memory.
    pub checksum: u16,
    /// What the type makes of it.
    pub rest_be: u32,
}

/// Length of [`Icmp`].
pub const ICMP_HEADER: usize = 8;

const _: () = assert!(size_of::<Icmp>() == ICMP_HEADER);

/// What is wrong with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Nobody serves the port.
    Port,
    /// TTL or hop limit used up.
    Hops,
    /// Larger than the way's MTU.
    Size,
}

impl Trouble {
    /// The error message, without checksum.
    #[inline(always)]
    const fn message(self, v6: bool, mtu: u16) -> Icmp {
        let (kind, code, rest) = match (self, v6) {
            (Self::Port, false) => (3, 3, 0),
            (Self::Hops, false) => (11, 0, 0),
            // RFC 1191: the lower half.
            (Self::Size, false) => (3, 4, mtu as u32),
            (Self::Port, true) => (1, 4, 0),
            (Self::Hops, true) => (3, 0, 0),
            (Self::Size, true) => (2, 0, mtu as u32),
        };
        Icmp { kind, code, checksum: 0, rest_be: rest.to_be() }
    }
}

/// IP and ICMP headers of an error; what follows is the packet that it is about: its IP header and the eight bytes behind it, which hold
/// all that its sender needs to find the socket (both ports, and TCP's sequence number).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpError<A: Family> {
    /// IP.
    pub ip: A::Header,
    /// ICMP.
    pub icmp: Icmp,
}

impl<A: Family> IcmpError<A> {
    /// Length of both headers.
    pub const LENGTH: usize = A::Header::LENGTH + ICMP_HEADER;
    /// Length of the packet with what it quotes.
    pub const TOTAL: usize = Self::LENGTH + UdpPacket::<A>::LENGTH;

    /// The error about a packet, as if from its destination. The packet's first eight bytes behind the IP header need not be UDP's.
    /// `mtu` is what [`Trouble::Size`] tells, in bytes.
    #[inline(always)]
    pub fn about(original: &UdpPacket<A>, trouble: Trouble, mtu: u16) -> Self {
        let payload = (Self::TOTAL - A::Header::LENGTH) as u16;
        let mut error = Self {
            ip: A::Header::new(original.ip.destination(), original.ip.source(), A::ICMP, payload),
            icmp: trouble.message(A::IS_V6, mtu),
        };
        // RFC 4443 §2.3: ICMPv6 sums a pseudo-header too.
        let pseudo = if A::IS_V6 { error.ip.pseudo(A::ICMP, payload) } else { 0 };
        let sum = pseudo
            + u64::from(u16::from_ne_bytes([error.icmp.kind, error.icmp.code]))
            + u64::from(error.icmp.rest_be)
            + words(original);
        error.icmp.checksum = !fold(sum);
        error
    }
}

/// Sum of a packet's words, not folded.
#[inline(always)]
fn words<A: Family>(packet: &UdpPacket<A>) -> u64 {
    let start: *const u32 = (&raw const *packet).cast();
    let (mut sum, mut index) = (0, 0);
    while index < size_of::<UdpPacket<A>>() / 4 {
        // SAFETY: within the packet, which is made of integers, without padding, and aligned to 4 bytes.
        sum += u64::from(unsafe { *start.add(index) });
        index += 1;
    }
    sum
}

/// Whether a packet may be answered with an error or a reset: never what came from or went to many (RFC 1122 §3.2.2, RFC 4443 §2.4), nor
/// what would come back here. That it is neither a fragment nor ICMP is the caller's business.
#[inline(always)]
pub fn may_answer<A: Family>(ip: &A::Header) -> bool {
    let (source, destination) = (ip.source(), ip.destination());
    // Word by word: in BPF, `==` on arrays would be a call.
    let (from, to) = (source.quads(), destination.quads());
    let same = (from[0] ^ to[0]) | (from[1] ^ to[1]) | (from[2] ^ to[2]) | (from[3] ^ to[3]) == 0;
    source.is_plausible_source() && destination.is_plausible_source() && !same
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;

    use super::*;
    use crate::abi::{Address, Address4, Address6};
    use crate::checksum;
    use crate::packet::{ICMP, ICMPV6, IPV4, IPV6, Ipv4, Ipv6, UDP, Udp};

    fn bytes<T: Copy>(value: &T) -> Vec<u8> {
        // SAFETY: only used with headers, which have no padding.
        unsafe { std::slice::from_raw_parts((&raw const *value).cast::<u8>(), size_of::<T>()) }.to_vec()
    }

    fn datagram<A: Family>(source: A, destination: A, ports: (u16, u16), checksum: u16) -> UdpPacket<A> {
        UdpPacket {
            ip: A::Header::new(source, destination, UDP, 8),
            udp: Udp {
                source_port_be: ports.0.to_be(),
                destination_port_be: ports.1.to_be(),
                length_be: 8u16.to_be(),
                checksum,
            },
        }
    }

    fn trouble() -> impl Strategy<Value = Trouble> {
        prop_oneof![Just(Trouble::Port), Just(Trouble::Hops), Just(Trouble::Size)]
    }

    proptest! {
        #[test]
        fn errors_over_ipv4_have_right_checksums_and_quote_the_packet(
            source: u32, destination: u32, ports: (u16, u16), sum: u16, trouble in trouble(), mtu: u16,
        ) {
            let original = datagram::<Address4>(source, destination, ports, sum);
            let error = IcmpError::about(&original, trouble, mtu);
            let mut packet = bytes(&error);
            packet.extend(bytes(&original));
            prop_assert_eq!(packet.len(), 56);
            prop_assert_eq!(u16::from_be_bytes([packet[2], packet[3]]), 56);
            prop_assert_eq!(checksum::checksum(&packet[..IPV4]), 0, "IPv4 header");
            prop_assert_eq!(checksum::checksum(&packet[IPV4..]), 0, "ICMP");
            prop_assert_eq!(packet[9], ICMP);
            prop_assert_eq!((error.ip.source_be, error.ip.destination_be), (destination, source));
        }

        #[test]
        fn errors_over_ipv6_have_right_checksums_and_quote_the_packet(
            source: [u32; 4], destination: [u32; 4], ports: (u16, u16), sum: u16, trouble in trouble(), mtu: u16,
        ) {
            let original = datagram::<Address6>(source, destination, ports, sum);
            let error = IcmpError::about(&original, trouble, mtu);
            let mut packet = bytes(&error);
            packet.extend(bytes(&original));
            prop_assert_eq!(packet.len(), 96);
            let payload = packet[IPV6..].to_vec();
            prop_assert_eq!(usize::from(u16::from_be_bytes([packet[4], packet[5]])), payload.len());
            let mut summed = packet[8..40].to_vec();
            summed.extend((payload.len() as u32).to_be_bytes());
            summed.extend([0, 0, 0, ICMPV6]);
            summed.extend(payload);
            prop_assert_eq!(checksum::checksum(&summed), 0);
            prop_assert_eq!((error.ip.source_be, error.ip.destination_be), (destination, source));
        }
    }

    #[test]
    fn types_and_codes_are_those_of_the_family() {
        let four = |trouble| {
            let error = IcmpError::about(&datagram::<Address4>(1, 2, (3, 4), 5), trouble, 1400);
            (error.icmp.kind, error.icmp.code, u32::from_be(error.icmp.rest_be))
        };
        assert_eq!(four(Trouble::Port), (3, 3, 0));
        assert_eq!(four(Trouble::Hops), (11, 0, 0));
        assert_eq!(four(Trouble::Size), (3, 4, 1400));
        let six = |trouble| {
            let error = IcmpError::about(&datagram::<Address6>([1; 4], [2; 4], (3, 4), 5), trouble, 1400);
            (error.icmp.kind, error.icmp.code, u32::from_be(error.icmp.rest_be))
        };
        assert_eq!(six(Trouble::Port), (1, 4, 0));
        assert_eq!(six(Trouble::Hops), (3, 0, 0));
        assert_eq!(six(Trouble::Size), (2, 0, 1400));
    }

    #[test]
    fn groups_and_impossible_sources_are_never_answered() {
        let four = |source: [u8; 4], destination: [u8; 4]| {
            let at = |octets| Address4::from_ip(Ipv4Addr::from(octets));
            may_answer::<Address4>(&Ipv4::new(at(source), at(destination), UDP, 8))
        };
        let (client, vip) = ([203, 0, 113, 9], [192, 0, 2, 34]);
        assert!(four(client, vip));
        for source in [[0, 0, 0, 0], [127, 0, 0, 1], [224, 0, 0, 1], [240, 0, 0, 1], [255, 255, 255, 255], vip] {
            assert!(!four(source, vip), "{source:?}");
        }
        for destination in [[224, 0, 0, 1], [255, 255, 255, 255]] {
            assert!(!four(client, destination), "{destination:?}");
        }
        let six = |source: &str, destination: &str| {
            let at = |text: &str| Address6::from_ip(text.parse::<Ipv6Addr>().expect("an address"));
            may_answer::<Address6>(&Ipv6::new(at(source), at(destination), UDP, 8))
        };
        assert!(six("2001:db8::9", "2001:db8:a::34"));
        for source in ["::", "::1", "::ffff:192.0.2.1", "ff02::1", "2001:db8:a::34"] {
            assert!(!six(source, "2001:db8:a::34"), "{source}");
        }
        assert!(!six("2001:db8::9", "ff02::1"));
    }
}
