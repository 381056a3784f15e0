//! ARP for our addresses (RFC 826), in the segment where they live.

use aya_ebpf::programs::XdpContext;
use lbd_common::abi::{ADDRESS_ANSWER, mapped};
use lbd_common::packet::{ETHERNET, arp_reply, is_arp_request};
use lbd_common::reason::Reason;
use network_types::arp::ArpHdr;

use super::context::{Arrival, Outcome, at, mac_pointer, refuse};
use super::local::address_in;

/// Answers a request for an address of ours; everything else is the kernel's.
#[inline(always)]
pub(crate) fn arp(context: &XdpContext) -> Outcome {
    let Arrival { segment, ethernet, .. } = Arrival::in_stage(context).ok_or(refuse(Reason::Internal, 0))?;
    let Some(arp) = at::<ArpHdr>(context, ETHERNET) else { return Err(refuse(Reason::Malformed, segment.tenant)) };
    // SAFETY: `at` has bounds-checked the message.
    let arp = unsafe { &mut *arp };
    if !is_arp_request(arp) {
        return Err(refuse(Reason::ArpOther, 0));
    }
    let address = address_in(segment, mapped(arp.tpa));
    if address.flags & ADDRESS_ANSWER == 0 {
        return Err(refuse(Reason::ArpOther, 0));
    }
    *arp = arp_reply(arp, segment.mac);
    // SAFETY: `Arrival` has bounds-checked the Ethernet header, and a MAC has three `u16`s.
    unsafe {
        let mac = mac_pointer(&segment.mac);
        (*ethernet).destination = (*ethernet).source;
        (*ethernet).source = [*mac, *mac.add(1), *mac.add(2)];
    }
    Err(refuse(Reason::Arp, address.tenant))
}
