//! Frames with an 802.1Q tag: each VLAN of a NIC is a segment of its own, if it is one of ours.

use aya_ebpf::{helpers::generated::bpf_xdp_adjust_head, programs::XdpContext};
use lbd_common::abi::{SEGMENT_TENANT, Segment, TAGGED, VLANS};
use lbd_common::packet::{VLAN_TAG, ethertype};
use lbd_common::reason::Reason;

use super::SEGMENT_BASE;
use super::context::{Outcome, Refusal, at, copy_addresses, enter, raw, refuse};
use super::edge::edge;
use super::maps::SEGMENTS;

/// Both MACs, a tag, and the ethertype behind it, which may be another tag's with its control information.
#[repr(C)]
struct Tagged {
    addresses: [u16; 6],
    kind: u16,
    control_be: u16,
    inner: u16,
    inner_control_be: u16,
}

/// VLAN id in a tag's control information.
#[inline(always)]
fn vlan(control_be: u16) -> u32 {
    u32::from(u16::from_be(control_be)) & (VLANS - 1)
}

#[inline(always)]
fn segment(vlan: u32) -> Result<&'static Segment, Refusal> {
    SEGMENTS.get(SEGMENT_BASE.load() + vlan).ok_or(refuse(Reason::Internal, 0))
}

/// Takes the tag off and starts over in the tag's segment. Frames of other VLANs are the kernel's.
///
/// A tag with VLAN id 0 carries only a priority (IEEE 802.1Q): the kernel looks behind it, and so does this.
#[inline(always)]
pub(crate) fn tagged(context: &XdpContext) -> Outcome {
    // Until the tag is off, there is none to put back.
    enter(SEGMENT_BASE.load(), 0);
    let Some(frame) = at::<Tagged>(context, 0) else { return Err(refuse(Reason::Malformed, segment(0)?.tenant)) };
    // SAFETY: `at` has bounds-checked the headers.
    let (kind, control_be, inner, inner_control_be) =
        unsafe { ((*frame).kind, (*frame).control_be, (*frame).inner, (*frame).inner_control_be) };
    // A service tag's ids are no segments': it comes to all of the NIC or to nobody.
    let id = if kind == ethertype::VLAN { vlan(control_be) } else { 0 };
    let outer = segment(id)?;
    let double = inner == ethertype::VLAN || inner == ethertype::SERVICE_VLAN;
    if double || kind != ethertype::VLAN {
        if outer.flags & SEGMENT_TENANT != 0 {
            return Err(refuse(Reason::DoubleTag, outer.tenant));
        }
        // Behind a priority tag the kernel finds another segment's frame.
        if double && vlan(control_be) == 0 {
            let within = segment(vlan(inner_control_be))?;
            if within.flags & SEGMENT_TENANT != 0 || vlan(inner_control_be) == 0 {
                return Err(refuse(Reason::DoubleTag, within.tenant));
            }
        }
        return Err(refuse(Reason::UnknownVlan, 0));
    }
    if outer.id == 0 {
        return Err(refuse(Reason::UnknownVlan, 0));
    }
    if !take_off(context) {
        return Err(refuse(Reason::Malformed, outer.tenant));
    }
    let (slot, tag) = (SEGMENT_BASE.load() + id, TAGGED | u32::from(u16::from_be(control_be)));
    enter(slot, tag);
    edge(context, slot, tag)
}

/// Takes the tag off. No pointer into the packet is valid any more.
#[inline(always)]
fn take_off(context: &XdpContext) -> bool {
    let (Some(old), Some(new)) = (at::<[u16; 6]>(context, 0), at::<[u16; 6]>(context, VLAN_TAG)) else { return false };
    // SAFETY: `at` has bounds-checked both, which overlap: the addresses are read before they are written.
    unsafe {
        copy_addresses(old, new);
        // SAFETY: the helper checks the new length.
        bpf_xdp_adjust_head(raw(context), VLAN_TAG as i32) == 0
    }
}
