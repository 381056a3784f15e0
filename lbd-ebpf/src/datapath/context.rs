//! Access to the packet, to the maps' atomics, and to the clock.

use core::arch::asm;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{BPF_ANY, xdp_action},
    helpers::generated::{bpf_jiffies64, bpf_redirect},
    programs::XdpContext,
};
use lbd_common::abi::{self, Mac, NEXT_HOP_ON_LINK, NEXT_HOP_RESOLVED, NextHop, Scratch, Segment, Settings};
use lbd_common::packet::{ETHERNET, Ipv4Tcp};
use lbd_common::reason::{Reason, Verdict};

use super::maps::{NEXT_HOPS, REASONS, SCRATCH, SEGMENTS, SETTINGS, STAGES};
use super::{IFINDEX, SEGMENT_BASE};

/// Why a packet goes no further, and the tenant to count it for (0: none known).
#[derive(Clone, Copy)]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    pub(crate) tenant: u16,
}

/// An XDP action, or why there is none to take.
pub(crate) type Outcome = Result<u32, Refusal>;

/// A refusal that is no tenant's in particular.
#[inline(always)]
pub(crate) const fn refuse(reason: Reason, tenant: u16) -> Refusal {
    Refusal { reason, tenant }
}

/// Ethernet header with fields that load in one instruction.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Ethernet {
    pub(crate) destination: [u16; 3],
    pub(crate) source: [u16; 3],
    pub(crate) ethertype: u16,
}

const _: () = assert!(size_of::<Ethernet>() == ETHERNET);

/// A pointer to `T` at `offset` of the packet, if it lies within. `offset` must be a constant or bounded below 64 KiB.
#[inline(always)]
pub(crate) fn at<T>(context: &XdpContext, offset: usize) -> Option<*mut T> {
    let start = context.data();
    if start + offset + size_of::<T>() > context.data_end() {
        return None;
    }
    Some((start + offset) as *mut T)
}

/// Bytes from `offset` to the end of the frame.
#[inline(always)]
pub(crate) fn available(context: &XdpContext, offset: usize) -> usize {
    context.data_end() - context.data() - offset
}

/// The segment that the frame arrived on, and the Ethernet header. Only untagged segments are served.
#[inline(always)]
pub(crate) fn segment(context: &XdpContext) -> Option<(&'static Segment, *mut Ethernet)> {
    let ethernet = at::<Ethernet>(context, 0)?;
    let segment = SEGMENTS.get(SEGMENT_BASE.load())?;
    Some((segment, ethernet))
}

/// The TCP segment over IPv4 behind an untagged Ethernet header, verified.
#[inline(always)]
pub(crate) fn ipv4_tcp(context: &XdpContext) -> Result<*mut Ipv4Tcp, Reason> {
    let Some(packet) = at::<Ipv4Tcp>(context, ETHERNET) else { return Err(Reason::Malformed) };
    // SAFETY: `at` has checked that the headers lie within the packet.
    unsafe { (*packet).verify(available(context, ETHERNET))? };
    Ok(packet)
}

/// The settings.
#[inline(always)]
pub(crate) fn settings() -> Result<&'static Settings, Refusal> {
    SETTINGS.get(0).ok_or(refuse(Reason::Internal, 0))
}

/// The current tick.
#[inline(always)]
pub(crate) fn now() -> u32 {
    // SAFETY: the helper has no arguments and no effects.
    (unsafe { bpf_jiffies64() } >> abi::TICK_SHIFT) as u32
}

/// Counts a reason for a tenant on this CPU.
#[inline(always)]
pub(crate) fn count(reason: Reason, tenant: u16) {
    let index = u32::from(tenant) * abi::REASON_SLOTS + reason as u32;
    if let Some(counter) = REASONS.get_ptr_mut(index) {
        // SAFETY: the pointer is to this CPU's value, and programs on one CPU do not preempt each other within a NAPI poll.
        unsafe { *counter += 1 };
    }
}

/// Goes on in another stage; comes back only if the stage is missing.
#[inline(always)]
pub(crate) fn stage(context: &XdpContext, index: u32) -> Outcome {
    // SAFETY: nothing on this stack needs to be dropped.
    unsafe { STAGES.tail_call(context, index) };
    Err(refuse(Reason::Internal, 0))
}

/// The end of a program: counts the reason and takes its verdict.
#[inline(always)]
pub(crate) fn conclude(context: &XdpContext, outcome: Outcome) -> u32 {
    let Refusal { reason, tenant } = match outcome {
        Ok(action) => return action,
        Err(refusal) => refusal,
    };
    count(reason, tenant);
    match reason.verdict() {
        Verdict::Drop => xdp_action::XDP_DROP,
        Verdict::Pass => xdp_action::XDP_PASS,
        Verdict::Answer => xdp_action::XDP_TX,
        Verdict::Reject => {
            if let Some(scratch) = scratch() {
                scratch.reason = reason as u32;
                scratch.tenant = u32::from(tenant);
            }
            // SAFETY: as in `stage`.
            unsafe { STAGES.tail_call(context, abi::STAGE_REJECT) };
            xdp_action::XDP_DROP
        }
    }
}

/// This CPU's scratch.
#[inline(always)]
pub(crate) fn scratch() -> Option<&'static mut Scratch> {
    // SAFETY: a per-CPU value; nothing else on this CPU uses it while a packet is processed.
    SCRATCH.get_ptr_mut(0).map(|scratch| unsafe { &mut *scratch })
}

/// Sends the packet, already rewritten behind its Ethernet header, to a next hop. `length` is that of the IP packet,
/// `client_mac` the destination on-link and the fallback while the gateway is unknown.
///
/// Called before anything is written to the packet: see [`resolve`].
#[inline(always)]
pub(crate) fn send(ethernet: *mut Ethernet, hop: &NextHop, destination: *const u16) -> u32 {
    // SAFETY: `ethernet` was bounds-checked by `at`; `destination` points to 6 bytes of a map value or of the stack.
    unsafe {
        (*ethernet).destination = [*destination, *destination.add(1), *destination.add(2)];
        let source: *const u16 = hop.source.as_ptr().cast();
        (*ethernet).source = [*source, *source.add(1), *source.add(2)];
    }
    if hop.ifindex == IFINDEX.load() {
        return xdp_action::XDP_TX;
    }
    // SAFETY: a helper without pointers.
    unsafe { bpf_redirect(hop.ifindex, 0) as u32 }
}

/// The next hop with this index, if a packet of `length` bytes can go there now, and whether its own MAC is the destination (else the
/// client's).
#[inline(always)]
pub(crate) fn resolve(index: u16, length: u32, segment: &Segment) -> Result<(&'static NextHop, bool), Reason> {
    let hop = NEXT_HOPS.get(u32::from(index)).ok_or(Reason::Internal)?;
    if hop.ifindex == 0 {
        return Err(Reason::NoNeighbour);
    }
    if length > u32::from(hop.mtu) {
        return Err(if length > segment.mtu { Reason::GsoFrame } else { Reason::TooBig });
    }
    Ok((hop, hop.flags & (NEXT_HOP_RESOLVED | NEXT_HOP_ON_LINK) == NEXT_HOP_RESOLVED))
}

/// A MAC as `u16`s.
#[inline(always)]
pub(crate) fn mac_pointer(mac: &Mac) -> *const u16 {
    mac.as_ptr().cast()
}

/// Whether the frame is addressed to the segment's NIC.
#[inline(always)]
pub(crate) fn is_for(ethernet: *const Ethernet, segment: &Segment) -> bool {
    let mac = mac_pointer(&segment.mac);
    // SAFETY: `ethernet` was bounds-checked by `at`; a segment's MAC has three `u16`s.
    unsafe {
        let [a, b, c] = (*ethernet).destination;
        a == *mac && b == *mac.add(1) && c == *mac.add(2)
    }
}

/// Whether the frame is addressed to a group.
#[inline(always)]
pub(crate) fn is_group(ethernet: *const Ethernet) -> bool {
    // SAFETY: `ethernet` was bounds-checked by `at`.
    unsafe { (*ethernet).destination[0] & 1u16.to_le() != 0 }
}

/// Atomically replaces `*word` by `new` if it is `expected`; true if it did. A full barrier (BPF_CMPXCHG, Linux 5.12).
#[inline(always)]
pub(crate) unsafe fn compare_and_swap(word: *mut u64, expected: u64, new: u64) -> bool {
    let old: u64;
    // SAFETY: the caller's pointer is to a map value, which the verifier checks.
    unsafe {
        asm!(
            "r0 = {expected}",
            "r0 = cmpxchg_64({word} + 0, r0, {new})",
            word = in(reg) word,
            expected = in(reg) expected,
            new = in(reg) new,
            out("r0") old,
        );
    }
    old == expected
}

/// Atomically adds; gives the value before.
#[inline(always)]
pub(crate) unsafe fn fetch_add(word: *mut u64, value: u64) -> u64 {
    let old: u64;
    // SAFETY: as above.
    unsafe {
        asm!(
            "{value} = atomic_fetch_add((u64 *)({word} + 0), {value})",
            word = in(reg) word,
            value = inout(reg) value => old,
        );
    }
    old
}

/// Atomically sets bits; gives the value before.
#[inline(always)]
pub(crate) unsafe fn fetch_or(word: *mut u32, bits: u32) -> u32 {
    let old: u32;
    // SAFETY: as above.
    unsafe {
        asm!(
            "{bits} = atomic_fetch_or((u32 *)({word} + 0), {bits})",
            word = in(reg) word,
            bits = inout(wreg) bits => old,
        );
    }
    old
}

/// Flag of `bpf_map_update_elem`: whatever is there.
pub(crate) const ANY: u64 = BPF_ANY as u64;

/// The raw context, for helpers.
#[inline(always)]
pub(crate) fn raw(context: &XdpContext) -> *mut aya_ebpf::bindings::xdp_md {
    context.as_ptr().cast()
}

/// A number that the compiler does not know and the verifier does: a loop up to it is not unrolled.
#[inline(always)]
pub(crate) fn opaque<const N: u32>() -> u32 {
    let number: u32;
    // SAFETY: moves a constant.
    unsafe { asm!("{number} = {N}", number = out(wreg) number, N = const N, options(pure, nomem, nostack)) };
    number
}
