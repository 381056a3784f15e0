//! ARP frames (RFC 826, RFC 5227), by hand: 42 bytes, padded to the Ethernet minimum.

use std::net::{IpAddr, Ipv4Addr};

/// Shortest Ethernet frame without its checksum.
pub(super) const FRAME: usize = 60;

const BROADCAST: [u8; 6] = [0xff; 6];
const REQUEST: u16 = 1;
const REPLY: u16 = 2;

/// What an ARP or neighbour discovery packet says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heard {
    /// Who says it.
    pub(super) mac: [u8; 6],
    /// The address it has; unspecified in a probe.
    pub(super) sender: IpAddr,
    /// The address it asks for or answers to.
    pub(super) target: IpAddr,
    /// A request.
    pub(super) request: bool,
    /// Replaces what is known of the sender (an IPv6 proxy's answer does not).
    pub(super) overrides: bool,
}

fn frame(operation: u16, mac: [u8; 6], sender: Ipv4Addr, target_mac: [u8; 6], target: Ipv4Addr) -> [u8; FRAME] {
    let mut bytes = [0; FRAME];
    bytes[..6].copy_from_slice(&BROADCAST);
    bytes[6..12].copy_from_slice(&mac);
    bytes[12..14].copy_from_slice(&0x0806_u16.to_be_bytes());
    bytes[14..16].copy_from_slice(&1_u16.to_be_bytes());
    bytes[16..18].copy_from_slice(&0x0800_u16.to_be_bytes());
    bytes[18..20].copy_from_slice(&[6, 4]);
    bytes[20..22].copy_from_slice(&operation.to_be_bytes());
    bytes[22..28].copy_from_slice(&mac);
    bytes[28..32].copy_from_slice(&sender.octets());
    bytes[32..38].copy_from_slice(&target_mac);
    bytes[38..42].copy_from_slice(&target.octets());
    bytes
}

/// "Does anybody have this address?" (RFC 5227 §1.1): fills nobody's cache.
pub(super) fn probe(mac: [u8; 6], address: Ipv4Addr) -> [u8; FRAME] {
    request(mac, Ipv4Addr::UNSPECIFIED, address)
}

/// "Who has this address?" From 0.0.0.0 it is a probe.
pub(super) fn request(mac: [u8; 6], sender: Ipv4Addr, target: Ipv4Addr) -> [u8; FRAME] {
    frame(REQUEST, mac, sender, [0; 6], target)
}

/// "This address is at this MAC", as a request and as a reply: stations differ in which of the two they believe (RFC 5227 §3).
pub(super) fn announcements(mac: [u8; 6], address: Ipv4Addr) -> [[u8; FRAME]; 2] {
    [frame(REQUEST, mac, address, [0; 6], address), frame(REPLY, mac, address, BROADCAST, address)]
}

/// Reads an ARP packet for IPv4 over Ethernet.
pub(super) fn parse(bytes: &[u8]) -> Option<Heard> {
    let bytes: &[u8; 42] = bytes.get(..42)?.try_into().ok()?;
    let field = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    if field(12) != 0x0806 || field(14) != 1 || field(16) != 0x0800 || bytes[18..20] != [6, 4] {
        return None;
    }
    let request = match field(20) {
        REQUEST => true,
        REPLY => false,
        _ => return None,
    };
    let address = |at: usize| IpAddr::from([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let mut mac = [0; 6];
    mac.copy_from_slice(&bytes[22..28]);
    Some(Heard { mac, sender: address(28), target: address(38), request, overrides: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 1, 2];
    const VIP: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 34);

    #[test]
    fn a_probe_says_nothing_about_us() {
        let bytes = probe(MAC, VIP);
        let wanted = [
            255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 1, 2, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 1, 2, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 192, 0, 2, 34,
        ];
        assert_eq!(bytes[..42], wanted);
        assert_eq!(bytes[42..], [0; 18]);
        let heard = Heard {
            mac: MAC,
            sender: Ipv4Addr::UNSPECIFIED.into(),
            target: VIP.into(),
            request: true,
            overrides: true,
        };
        assert_eq!(parse(&bytes), Some(heard));
    }

    #[test]
    fn announcements_have_both_forms() {
        let [request, reply] = announcements(MAC, VIP);
        assert_eq!(
            parse(&request),
            Some(Heard { mac: MAC, sender: VIP.into(), target: VIP.into(), request: true, overrides: true })
        );
        assert_eq!(
            parse(&reply),
            Some(Heard { mac: MAC, sender: VIP.into(), target: VIP.into(), request: false, overrides: true })
        );
        assert_eq!((&request[32..38], &reply[32..38]), ([0; 6].as_slice(), [255; 6].as_slice()));
    }

    #[test]
    fn what_is_not_arp_for_ipv4_is_not_read() {
        let good = probe(MAC, VIP);
        assert_eq!(parse(&good[..41]), None);
        for (at, value) in [(12, 9), (15, 6), (16, 9), (18, 8), (19, 16), (21, 3)] {
            let mut bad = good;
            bad[at] = value;
            assert_eq!(parse(&bad), None, "byte {at}");
        }
    }
}
