//! Neighbour solicitations for our addresses (RFC 4861), in the segment where they live.

use aya_ebpf::{helpers::generated::bpf_xdp_adjust_head, programs::XdpContext};
use lbd_common::abi::{ADDRESS_ANSWER, Address as _, Mac};
use lbd_common::neighbour::{
    ADVERTISEMENT_LENGTH, ALL_NODES_MAC, Advertisement, OPTION_UNIT, SOLICITATION_LENGTH, Solicitation,
};
use lbd_common::packet::{ETHERNET, ethertype};
use lbd_common::reason::Reason;

use super::context::{Arrival, Ethernet, Outcome, at, available, mac_pointer, opaque, raw, refuse};
use super::local::address_in;

/// Units of options that are looked at: hosts send one or two. A solicitation with more is not answered.
const UNITS: u32 = 8;

/// Answers a solicitation for an address of ours; everything else is the kernel's.
#[inline(always)]
pub(crate) fn neighbour(context: &XdpContext) -> Outcome {
    let Arrival { segment, ethernet, .. } = Arrival::in_stage(context).ok_or(refuse(Reason::Internal, 0))?;
    let Some(asked) = at::<Solicitation>(context, ETHERNET) else {
        return Err(refuse(Reason::Malformed, segment.tenant));
    };
    // SAFETY: `at` has bounds-checked the message up to its options.
    let asked = unsafe { &*asked };
    let address = address_in(segment, asked.target_be.mapped());
    if address.flags & ADDRESS_ANSWER == 0 {
        return Err(refuse(Reason::NeighbourOther, 0));
    }
    let no = |reason| refuse(reason, address.tenant);
    let mut options = asked.verify(available(context, ETHERNET)).map_err(no)?;
    let (mut unit, most) = (0, opaque::<UNITS>());
    while unit < options.units {
        if unit >= most {
            return Err(no(Reason::Malformed));
        }
        let offset = ETHERNET + SOLICITATION_LENGTH + OPTION_UNIT * unit as usize;
        let Some(bytes) = at::<[u16; 4]>(context, offset) else { return Err(no(Reason::Malformed)) };
        // SAFETY: `at` has bounds-checked the unit.
        options.unit(unsafe { *bytes });
        unit += 1;
    }
    options.verify().map_err(no)?;
    let answer = asked.answer(segment.mac);
    // SAFETY: `Arrival` has bounds-checked the Ethernet header.
    let asker = if asked.is_probe() { ALL_NODES } else { unsafe { (*ethernet).source } };
    advertise(context, &answer, asker, &segment.mac).ok_or(no(Reason::Internal))?;
    Err(no(Reason::Neighbour))
}

/// [`ALL_NODES_MAC`] as `u16`s.
const ALL_NODES: [u16; 3] = {
    let mac = ALL_NODES_MAC;
    [u16::from_ne_bytes([mac[0], mac[1]]), u16::from_ne_bytes([mac[2], mac[3]]), u16::from_ne_bytes([mac[4], mac[5]])]
};

/// Replaces the frame by an advertisement.
#[inline(always)]
fn advertise(context: &XdpContext, answer: &Advertisement, to: [u16; 3], own: &Mac) -> Option<()> {
    let surplus = available(context, 0) as i32 - (ETHERNET + ADVERTISEMENT_LENGTH) as i32;
    // SAFETY: the helper checks the room in front of the frame, or the length that is left. Nothing of the old frame is kept.
    if unsafe { bpf_xdp_adjust_head(raw(context), surplus) } != 0 {
        return None;
    }
    let (ethernet, packet) = (at::<Ethernet>(context, 0)?, at::<Advertisement>(context, ETHERNET)?);
    let mac = mac_pointer(own);
    // SAFETY: bounds-checked again after the change of length; a MAC has three `u16`s.
    unsafe {
        *ethernet = Ethernet { destination: to, source: [*mac, *mac.add(1), *mac.add(2)], ethertype: ethertype::IPV6 };
        *packet = *answer;
    }
    Some(())
}
