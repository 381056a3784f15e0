//! Neighbour discovery frames (RFC 4861, RFC 4862), by hand: Ethernet, IPv6 without extension headers, ICMPv6, one option.

use std::net::{IpAddr, Ipv6Addr};

use super::arp::Heard;

const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const SOURCE_LINK: u8 = 1;
const TARGET_LINK: u8 = 2;
const OVERRIDE: u8 = 0x20;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// The group of everybody whose address ends like this one (RFC 4291 §2.7.1).
pub(super) fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., low, last] = address.segments();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | (low & 0xff), last)
}

/// The Ethernet address of a group (RFC 2464 §7).
pub(super) fn group_mac(group: Ipv6Addr) -> [u8; 6] {
    let [.., a, b, c, d] = group.octets();
    [0x33, 0x33, a, b, c, d]
}

/// The link-local address that belongs to a MAC (RFC 4291, appendix A).
pub(super) fn link_local(mac: [u8; 6]) -> Ipv6Addr {
    let mut bytes = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, mac[0] ^ 2, 0, 0, 0xff, 0xfe, 0, 0, 0];
    bytes[9..11].copy_from_slice(&mac[1..3]);
    bytes[13..].copy_from_slice(&mac[3..]);
    Ipv6Addr::from(bytes)
}

struct Message {
    kind: u8,
    flags: u8,
    source: Ipv6Addr,
    group: Ipv6Addr,
    target: Ipv6Addr,
    option: Option<u8>,
}

fn frame(mac: [u8; 6], message: &Message) -> Vec<u8> {
    let mut body = vec![message.kind, 0, 0, 0, message.flags, 0, 0, 0];
    body.extend(message.target.octets());
    if let Some(option) = message.option {
        body.extend([option, 1]);
        body.extend(mac);
    }
    let sum = checksum(message.source, message.group, &body);
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut bytes = group_mac(message.group).to_vec();
    bytes.extend(mac);
    bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, body.len() as u8, 58, 255]);
    bytes.extend(message.source.octets());
    bytes.extend(message.group.octets());
    bytes.extend(body);
    bytes
}

/// The Internet checksum over pseudo-header and body; 0 if the body holds its right checksum.
fn checksum(source: Ipv6Addr, destination: Ipv6Addr, body: &[u8]) -> u16 {
    let words = |bytes: &[u8]| {
        let pairs = bytes.chunks(2);
        pairs.map(|pair| u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]))).sum::<u64>()
    };
    let mut sum = words(&source.octets()) + words(&destination.octets()) + body.len() as u64 + 58 + words(body);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// "Does anybody have this address?" (RFC 4862 §5.4): fills nobody's cache.
pub(super) fn probe(mac: [u8; 6], address: Ipv6Addr) -> Vec<u8> {
    solicitation(mac, Ipv6Addr::UNSPECIFIED, address)
}

/// "Who has this address?" From the unspecified address it is a probe, which is answered to all nodes.
pub(super) fn solicitation(mac: [u8; 6], source: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
    let option = (!source.is_unspecified()).then_some(SOURCE_LINK);
    frame(mac, &Message { kind: SOLICITATION, flags: 0, source, group: solicited_node(target), target, option })
}

/// "This address is at this MAC, whatever you knew" (RFC 4861 §7.2.6).
pub(super) fn announcement(mac: [u8; 6], address: Ipv6Addr) -> Vec<u8> {
    frame(
        mac,
        &Message {
            kind: ADVERTISEMENT,
            flags: OVERRIDE,
            source: address,
            group: ALL_NODES,
            target: address,
            option: Some(TARGET_LINK),
        },
    )
}

/// Reads a neighbour solicitation or advertisement. What RFC 4861 §7.1 tells hosts to ignore is ignored.
pub(super) fn parse(bytes: &[u8]) -> Option<Heard> {
    const HEADERS: usize = 54;
    let header: &[u8; HEADERS] = bytes.get(..HEADERS)?.try_into().ok()?;
    if header[12..14] != [0x86, 0xdd] || header[14] >> 4 != 6 || header[20..22] != [58, 255] {
        return None;
    }
    let body = bytes.get(HEADERS..HEADERS + usize::from(u16::from_be_bytes([header[18], header[19]])))?;
    let address = |bytes: &[u8]| <[u8; 16]>::try_from(bytes).ok().map(Ipv6Addr::from);
    let (source, destination) = (address(&header[22..38])?, address(&header[38..54])?);
    let target = address(body.get(8..24)?)?;
    if body[1] != 0 || target.is_multicast() || checksum(source, destination, body) != 0 {
        return None;
    }
    let mut mac = <[u8; 6]>::try_from(&header[6..12]).ok()?;
    let wanted = if body[0] == SOLICITATION { SOURCE_LINK } else { TARGET_LINK };
    let (mut options, mut told) = (&body[24..], false);
    while let &[kind, units, ..] = options {
        let option = options.get(..usize::from(units) * 8).filter(|option| !option.is_empty())?;
        if kind == wanted {
            (mac, told) = (<[u8; 6]>::try_from(&option[2..8]).ok()?, true);
        }
        options = &options[option.len()..];
    }
    match body[0] {
        SOLICITATION if source.is_unspecified() && !told => {
            Some(Heard { mac, sender: source.into(), target: target.into(), request: true, overrides: false })
        }
        SOLICITATION if told && !source.is_unspecified() => {
            Some(Heard { mac, sender: source.into(), target: target.into(), request: true, overrides: true })
        }
        ADVERTISEMENT => Some(Heard {
            mac,
            sender: IpAddr::V6(target),
            target: target.into(),
            request: false,
            overrides: body[4] & OVERRIDE != 0,
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 1, 2];

    fn vip() -> Ipv6Addr {
        "2001:db8:a::12:3456".parse().unwrap()
    }

    #[test]
    fn a_probe_comes_from_nobody_and_goes_to_the_solicited_node_group() {
        let bytes = probe(MAC, vip());
        let wanted = [
            0x33, 0x33, 0xff, 0x12, 0x34, 0x56, 2, 0, 0, 0, 1, 2, 0x86, 0xdd, 0x60, 0, 0, 0, 0, 24, 58, 255, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0x12, 0x34, 0x56, 135,
            0,
        ];
        assert_eq!((bytes.len(), &bytes[..56]), (78, wanted.as_slice()));
        assert_eq!(bytes[62..78], vip().octets());
        let heard = Heard {
            mac: MAC,
            sender: Ipv6Addr::UNSPECIFIED.into(),
            target: vip().into(),
            request: true,
            overrides: false,
        };
        assert_eq!(parse(&bytes), Some(heard));
    }

    #[test]
    fn an_announcement_overrides_and_asks_for_nothing() {
        let bytes = announcement(MAC, vip());
        assert_eq!((bytes.len(), &bytes[..6]), (86, [0x33, 0x33, 0, 0, 0, 1].as_slice()));
        assert_eq!((&bytes[22..38], &bytes[38..54]), (vip().octets().as_slice(), ALL_NODES.octets().as_slice()));
        assert_eq!((bytes[54], bytes[58], &bytes[78..80]), (136, 0x20, [2, 1].as_slice()));
        let heard = Heard { mac: MAC, sender: vip().into(), target: vip().into(), request: false, overrides: true };
        assert_eq!(parse(&bytes), Some(heard));
    }

    #[test]
    fn a_solicitation_tells_who_asks() {
        let own = link_local(MAC);
        assert_eq!(own, "fe80::ff:fe00:102".parse::<Ipv6Addr>().unwrap());
        let heard = Heard { mac: MAC, sender: own.into(), target: vip().into(), request: true, overrides: true };
        assert_eq!(parse(&solicitation(MAC, own, vip())), Some(heard));
    }

    #[test]
    fn the_checksum_covers_the_pseudo_header() {
        let source: Ipv6Addr = "fe80::1".parse().unwrap();
        let bytes = solicitation([0x02, 0, 0, 0, 0, 1], source, "fe80::2".parse().unwrap());
        // 0xfe80+1 + 0xff02+1+0xff00+2 + 32+58 + 0x8700 + 0xfe80+2 + 0x0101+0x0200+0+1, folded and inverted, by hand.
        let sum: u32 = 0xfe81 + 0xff02 + 1 + 0xff00 + 2 + 90 + 0x8700 + 0xfe80 + 2 + 0x0101 + 0x0200 + 1;
        let folded = (sum & 0xffff) + (sum >> 16);
        assert_eq!(u32::from(u16::from_be_bytes([bytes[56], bytes[57]])), 0xffff - folded);
    }

    #[test]
    fn what_hosts_must_ignore_is_not_read() {
        let good = announcement(MAC, vip());
        assert!(parse(&good[..85]).is_none());
        // Ethertype, version, next header, hop limit, code, target, a length of 0 in the option, and the checksum of each.
        for (at, bit) in [(13, 1), (14, 0x20), (20, 1), (21, 1), (55, 1), (56, 1), (62, 1), (79, 1)] {
            let mut bad = good.clone();
            bad[at] ^= bit;
            assert_eq!(parse(&bad), None, "byte {at}");
        }
        for length in 0..good.len() {
            assert_eq!(parse(&good[..length]), None);
        }
        // Right checksum, wrong content: a probe with a link-layer address.
        let message = Message {
            kind: SOLICITATION,
            flags: 0,
            source: Ipv6Addr::UNSPECIFIED,
            group: solicited_node(vip()),
            target: vip(),
            option: Some(SOURCE_LINK),
        };
        assert_eq!(parse(&frame(MAC, &message)), None);
        assert_eq!(parse(&frame(MAC, &Message { target: ALL_NODES, ..message })), None);
    }
}
