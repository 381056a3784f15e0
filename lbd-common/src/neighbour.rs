//! Neighbour discovery for our addresses (RFC 4861): what a valid solicitation is, and its answer.

use crate::abi::{Address6, Mac};
use crate::checksum::fold;
use crate::icmp::Icmp;
use crate::packet::{Family as _, ICMPV6, IPV6, IpHeader as _, Ipv6};
use crate::reason::Reason;

/// ICMPv6 type: neighbour solicitation.
pub const SOLICITATION: u8 = 135;
/// ICMPv6 type: neighbour advertisement.
pub const ADVERTISEMENT: u8 = 136;
/// Hop limit of all neighbour discovery: what came through a router has less.
pub const HOP_LIMIT: u8 = 255;
/// [`Icmp::rest_be`] of an advertisement, host order: it answers a solicitation.
pub const SOLICITED: u32 = 1 << 30;
/// [`Icmp::rest_be`] of an advertisement, host order: it replaces what was cached.
pub const OVERRIDE: u32 = 1 << 29;
/// Option: the sender's link-layer address.
pub const SOURCE_LINK_LAYER: u8 = 1;
/// Option: the target's link-layer address.
pub const TARGET_LINK_LAYER: u8 = 2;
/// Length of one unit of options.
pub const OPTION_UNIT: usize = 8;

/// All nodes on the link, `ff02::1`.
pub const ALL_NODES: Address6 = [0xff02_0000u32.to_be(), 0, 0, 1u32.to_be()];
/// Where frames to [`ALL_NODES`] go (RFC 2464 §7).
pub const ALL_NODES_MAC: Mac = [0x33, 0x33, 0, 0, 0, 1];

/// A neighbour solicitation without its options.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Solicitation {
    /// IP.
    pub ip: Ipv6,
    /// ICMP.
    pub icmp: Icmp,
    /// Whose MAC is asked for.
    pub target_be: Address6,
}

/// A neighbour advertisement with the target's MAC.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advertisement {
    /// IP.
    pub ip: Ipv6,
    /// ICMP.
    pub icmp: Icmp,
    /// Whose MAC it is.
    pub target_be: Address6,
    /// [`TARGET_LINK_LAYER`].
    pub option: u8,
    /// 1: eight bytes.
    pub option_units: u8,
    /// The MAC.
    pub mac: Mac,
}

/// Length of [`Solicitation`].
pub const SOLICITATION_LENGTH: usize = 64;
/// Length of [`Advertisement`].
pub const ADVERTISEMENT_LENGTH: usize = 72;

const _: () = assert!(size_of::<Solicitation>() == SOLICITATION_LENGTH);
const _: () = assert!(size_of::<Advertisement>() == ADVERTISEMENT_LENGTH);

/// What of a solicitation lies behind the IPv6 header.
const BODY: u32 = (SOLICITATION_LENGTH - IPV6) as u32;

impl Solicitation {
    /// What RFC 4861 §7.1.1 demands besides options and checksum, which are [`Options`]' business. `available` is the number of bytes
    /// from the IPv6 header to the end of the frame.
    #[inline(always)]
    pub fn verify(&self, available: usize) -> Result<Options, Reason> {
        self.ip.verify(available)?;
        let payload = u32::from(u16::from_be(self.ip.payload_length_be));
        let source = self.ip.source_be;
        let good = self.ip.next_header == ICMPV6
            && self.ip.hop_limit == HOP_LIMIT
            && self.icmp.kind == SOLICITATION
            && self.icmp.code == 0
            && payload >= BODY
            && payload.is_multiple_of(OPTION_UNIT as u32)
            && !is_group(&self.target_be)
            && (source.is_plausible_source() || self.is_probe())
            && (!self.is_probe() || is_solicited_node(&self.ip.destination_be));
        if !good {
            return Err(Reason::Malformed);
        }
        let target = self.target_be;
        let sum = self.ip.pseudo(ICMPV6, payload as u16)
            + u64::from(u16::from_ne_bytes([self.icmp.kind, self.icmp.code]))
            + u64::from(self.icmp.checksum)
            + u64::from(self.icmp.rest_be)
            + words(&target);
        Ok(Options { sum, units: (payload - BODY) / OPTION_UNIT as u32, inside: 0, probe: self.is_probe(), good: true })
    }

    /// Whether somebody asks because it wants the address for itself (RFC 4862 §5.4).
    #[inline(always)]
    pub const fn is_probe(&self) -> bool {
        let [a, b, c, d] = self.ip.source_be;
        a | b | c | d == 0
    }

    /// The answer: the target is at `mac`. A probe has no address to be answered at: all nodes learn of it, and it solicits nothing
    /// (RFC 4861 §7.2.4).
    #[inline(always)]
    pub fn answer(&self, mac: Mac) -> Advertisement {
        let (to, flags) =
            if self.is_probe() { (ALL_NODES, OVERRIDE) } else { (self.ip.source_be, SOLICITED | OVERRIDE) };
        Advertisement::new(self.target_be, to, flags, mac)
    }
}

impl Advertisement {
    /// From `target`, which is at `mac`, to `to`. `flags` are in host order.
    #[inline(always)]
    pub fn new(target: Address6, to: Address6, flags: u32, mac: Mac) -> Self {
        let payload = (ADVERTISEMENT_LENGTH - IPV6) as u16;
        let mut advertisement = Self {
            ip: Ipv6 { hop_limit: HOP_LIMIT, ..Ipv6::new(target, to, ICMPV6, payload) },
            icmp: Icmp { kind: ADVERTISEMENT, code: 0, checksum: 0, rest_be: flags.to_be() },
            target_be: target,
            option: TARGET_LINK_LAYER,
            option_units: 1,
            mac,
        };
        let sum = advertisement.ip.pseudo(ICMPV6, payload)
            + u64::from(u16::from_ne_bytes([ADVERTISEMENT, 0]))
            + u64::from(advertisement.icmp.rest_be)
            + words(&target)
            + u64::from(u16::from_ne_bytes([TARGET_LINK_LAYER, 1]))
            + u64::from(u16::from_ne_bytes([mac[0], mac[1]]))
            + u64::from(u16::from_ne_bytes([mac[2], mac[3]]))
            + u64::from(u16::from_ne_bytes([mac[4], mac[5]]));
        advertisement.icmp.checksum = !fold(sum);
        advertisement
    }
}

/// Walks the options of a solicitation, in units of eight bytes, and sums them.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    sum: u64,
    /// Units there are.
    pub units: u32,
    /// Units until the next option begins.
    inside: u32,
    probe: bool,
    good: bool,
}

impl Options {
    /// The next unit.
    #[inline(always)]
    pub const fn unit(&mut self, unit: [u16; 4]) {
        self.sum += unit[0] as u64 + unit[1] as u64 + unit[2] as u64 + unit[3] as u64;
        if self.inside != 0 {
            self.inside -= 1;
            return;
        }
        let [kind, units] = unit[0].to_ne_bytes();
        if units == 0 || self.probe && kind == SOURCE_LINK_LAYER {
            self.good = false;
            return;
        }
        self.inside = units as u32 - 1;
    }

    /// After the last unit: whether options and checksum are right.
    #[inline(always)]
    pub const fn verify(&self) -> Result<(), Reason> {
        if self.good && self.inside == 0 && fold(self.sum) == 0xffff { Ok(()) } else { Err(Reason::Malformed) }
    }
}

/// Sum of an address's words, not folded.
#[inline(always)]
fn words(address: &Address6) -> u64 {
    let [a, b, c, d] = *address;
    u64::from(a) + u64::from(b) + u64::from(c) + u64::from(d)
}

/// Whether an address is a group's.
#[inline(always)]
pub const fn is_group(address: &Address6) -> bool {
    address[0].to_ne_bytes()[0] == 0xff
}

/// Whether an address is in `ff02::1:ff00:0/104` (RFC 4291 §2.7.1).
#[inline(always)]
const fn is_solicited_node(address: &Address6) -> bool {
    address[0] == ALL_NODES[0] && address[1] == 0 && address[2] == 1u32.to_be() && address[3].to_ne_bytes()[0] == 0xff
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use proptest::prelude::*;

    use super::*;
    use crate::abi::Address;
    use crate::checksum;

    const MAC: Mac = [2, 0, 0, 0, 1, 2];

    fn address(text: &str) -> Address6 {
        Address6::from_ip(text.parse::<Ipv6Addr>().expect("an address"))
    }

    /// The ICMPv6 checksum of a packet, computed over its bytes.
    fn checksum_of(packet: &[u8]) -> u16 {
        let mut summed = packet[8..40].to_vec();
        summed.extend((packet.len() as u32 - 40).to_be_bytes());
        summed.extend([0, 0, 0, ICMPV6]);
        summed.extend(&packet[40..]);
        checksum::checksum(&summed)
    }

    fn solicitation(source: &str, destination: &str, options: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x60, 0, 0, 0, 0, 24 + options.len() as u8, ICMPV6, HOP_LIMIT];
        packet.extend(source.parse::<Ipv6Addr>().expect("an address").octets());
        packet.extend(destination.parse::<Ipv6Addr>().expect("an address").octets());
        packet.extend([SOLICITATION, 0, 0, 0, 0, 0, 0, 0]);
        packet.extend("2001:db8:a::34".parse::<Ipv6Addr>().expect("an address").octets());
        packet.extend(options);
        summed(packet)
    }

    fn summed(mut packet: Vec<u8>) -> Vec<u8> {
        packet[42..44].fill(0);
        let checksum = checksum_of(&packet);
        packet[42..44].copy_from_slice(&checksum.to_ne_bytes());
        packet
    }

    fn parse(packet: &[u8]) -> Solicitation {
        let bytes: [u8; SOLICITATION_LENGTH] = packet[..SOLICITATION_LENGTH].try_into().expect("long enough");
        // SAFETY: same size, and made of integers.
        unsafe { std::mem::transmute(bytes) }
    }

    /// As the datapath does it.
    fn verify(packet: &[u8]) -> Result<Solicitation, Reason> {
        let solicitation = parse(packet);
        let mut options = solicitation.verify(packet.len())?;
        for index in 0..options.units as usize {
            let unit = &packet[SOLICITATION_LENGTH + index * OPTION_UNIT..][..OPTION_UNIT];
            let word = |at: usize| u16::from_ne_bytes([unit[at], unit[at + 1]]);
            options.unit([word(0), word(2), word(4), word(6)]);
        }
        options.verify()?;
        Ok(solicitation)
    }

    const GROUP: &str = "ff02::1:ff00:34";
    const SOURCE_MAC: [u8; 8] = [1, 1, 2, 0, 0, 0, 1, 0x60];
    const NONCE: [u8; 8] = [14, 1, 1, 2, 3, 4, 5, 6];

    #[test]
    fn valid_solicitations_are_answered_at_their_source() {
        for (source, destination, options) in [
            ("fe80::1", GROUP, &SOURCE_MAC[..]),
            ("2001:db8:a::60", GROUP, &SOURCE_MAC[..]),
            ("2001:db8:a::60", "2001:db8:a::34", &[][..]),
            ("fe80::1", GROUP, &[SOURCE_MAC, NONCE].concat()[..]),
        ] {
            let asked = verify(&solicitation(source, destination, options)).expect("valid");
            let answer = asked.answer(MAC);
            assert_eq!(answer.ip.source_be, address("2001:db8:a::34"));
            assert_eq!(answer.ip.destination_be, address(source));
            assert_eq!(u32::from_be(answer.icmp.rest_be), SOLICITED | OVERRIDE);
            assert_eq!((answer.icmp.kind, answer.icmp.code, answer.ip.hop_limit), (136, 0, 255));
            assert_eq!((answer.option, answer.option_units, answer.mac), (2, 1, MAC));
        }
    }

    #[test]
    fn a_probe_is_answered_to_all_nodes() {
        for options in [&[][..], &NONCE[..]] {
            let answer = verify(&solicitation("::", GROUP, options)).expect("valid").answer(MAC);
            assert_eq!(answer.ip.destination_be, address("ff02::1"));
            assert_eq!(u32::from_be(answer.icmp.rest_be), OVERRIDE);
        }
    }

    #[test]
    fn what_rfc_4861_forbids_is_malformed() {
        let good = solicitation("fe80::1", GROUP, &SOURCE_MAC);
        let changed = |at: usize, to: u8| {
            let mut packet = good.clone();
            packet[at] = to;
            summed(packet)
        };
        for (what, packet) in [
            ("hop limit 254", changed(7, 254)),
            ("version 4", changed(0, 0x40)),
            ("code 1", changed(41, 1)),
            ("a group as target", changed(48, 0xff)),
            ("an empty option", changed(65, 0)),
            ("an option beyond the end", changed(65, 2)),
            ("a group as source", changed(8, 0xff)),
            ("a payload beyond the end", changed(5, 40)),
            ("half an option", changed(5, 28)),
            ("a payload too short for the target", changed(5, 16)),
            ("a probe with a source MAC", solicitation("::", GROUP, &SOURCE_MAC)),
            ("a probe to the address", solicitation("::", "2001:db8:a::34", &[])),
            ("a probe to all nodes", solicitation("::", "ff02::1", &[])),
        ] {
            assert_eq!(verify(&packet), Err(Reason::Malformed), "{what}");
        }
        let mut damaged = good.clone();
        damaged[42] ^= 1;
        assert_eq!(verify(&damaged), Err(Reason::Malformed), "a wrong checksum");
        assert_eq!(verify(&good).map(|asked| asked.target_be), Ok(address("2001:db8:a::34")));
    }

    proptest! {
        #[test]
        fn advertisements_have_right_checksums(target: [u32; 4], to: [u32; 4], mac: [u8; 6], flags in 0u32..8) {
            let advertisement = Advertisement::new(target, to, flags << 29, mac);
            // SAFETY: same size, and without padding.
            let bytes: [u8; ADVERTISEMENT_LENGTH] = unsafe { std::mem::transmute(advertisement) };
            prop_assert_eq!(checksum_of(&bytes), 0);
            prop_assert_eq!(&bytes[66..], &mac);
            prop_assert_eq!(bytes[5], 32);
        }

        #[test]
        fn damage_to_a_solicitation_is_noticed(at in 40usize..80, bit in 0u8..8) {
            let mut packet = solicitation("fe80::1", GROUP, &[SOURCE_MAC, NONCE].concat());
            packet[at] ^= 1 << bit;
            prop_assert_eq!(verify(&packet), Err(Reason::Malformed));
        }
    }
}
