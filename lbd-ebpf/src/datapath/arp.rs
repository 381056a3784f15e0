//! ARP for our addresses (RFC 826), in the segment where they live.

use aya_ebpf::programs::XdpContext;
use lbd_common::abi::{ADDRESS_ANSWER, AddressKey, mapped};
use lbd_common::packet::{ETHERNET, arp_reply, is_arp_request};
use lbd_common::reason::Reason;
use network_types::arp::ArpHdr;

use super::context::{Arrival, Outcome, at, mac_pointer, refuse};
use super::maps::ADDRESSES;

/// Answers a request for an address of ours; everything else is the kernel's.
#[inline(always)]
pub(crate) fn arp(context: &XdpContext) -> Outcome {
    let arrival = Arrival::in_stage(context).ok_or(refuse(Reason::Internal, 0))?;
    let (segment, ethernet) = (arrival.segment, arrival.ethernet);
    let Some(arp) = at::<ArpHdr>(context, ETHERNET) else { return Err(refuse(Reason::Malformed, segment.tenant)) };
    // SAFETY: `at` has bounds-checked the message.
    let arp = unsafe { &mut *arp };
    if !is_arp_request(arp) {
        return Err(refuse(Reason::ArpOther, 0));
    }
    let key = AddressKey { address: mapped(arp.tpa), segment: segment.id, port_be: 0 };
    // SAFETY: the flags are read at once.
    let flags = unsafe { ADDRESSES.get(key) }.map_or(0, |address| address.flags);
    if flags & ADDRESS_ANSWER == 0 {
        return Err(refuse(Reason::ArpOther, 0));
    }
    *arp = arp_reply(arp, segment.mac);
    // SAFETY: `segment` has bounds-checked the Ethernet header, and a MAC has three `u16`s.
    unsafe {
        let mac = mac_pointer(&segment.mac);
        (*ethernet).destination = (*ethernet).source;
        (*ethernet).source = [*mac, *mac.add(1), *mac.add(2)];
    }
    Err(refuse(Reason::Arp, segment.tenant))
}
