//! Access to the packet, to the maps' atomics, and to the clock.

use core::arch::asm;
use core::ptr::read_volatile;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{BPF_ANY, xdp_action},
    helpers::generated::{bpf_jiffies64, bpf_redirect, bpf_xdp_adjust_head},
    programs::XdpContext,
};
use lbd_common::abi::{self, Mac, NEXT_HOP_ON_LINK, NEXT_HOP_RESOLVED, NextHop, Scratch, Segment, Settings};
use lbd_common::packet::{ETHERNET, Family, TcpPacket, UdpPacket, VLAN_TAG, ethertype};
use lbd_common::reason::{Reason, Verdict};

use super::maps::{NEXT_HOPS, REASONS, SCRATCH, SEGMENTS, SETTINGS, STAGES};
use super::{IFINDEX, SEGMENT_BASE};

/// Why a packet goes no further (bits 0–7), the verdict (8–15), and the tenant to count it for (16–31; 0: none known). One word, because the
/// compiler fills a struct's padding with whatever is at hand, pointers too, which the verifier does not let it do sums with.
#[derive(Clone, Copy)]
pub(crate) struct Refusal(u32);

impl Refusal {
    #[inline(always)]
    const fn reason(self) -> u32 {
        self.0 & 0xff
    }

    #[inline(always)]
    const fn is(self, verdict: Verdict) -> bool {
        (self.0 >> 8) & 0xff == verdict as u32
    }

    #[inline(always)]
    const fn tenant(self) -> u32 {
        self.0 >> 16
    }
}

/// An XDP action, or why there is none to take.
pub(crate) type Outcome = Result<u32, Refusal>;

/// A refusal, counted for a tenant (0: for none in particular).
#[inline(always)]
pub(crate) const fn refuse(reason: Reason, tenant: u16) -> Refusal {
    Refusal((tenant as u32) << 16 | (reason.verdict() as u32) << 8 | reason as u32)
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

/// Where a frame came in.
pub(crate) struct Arrival {
    pub(crate) segment: &'static Segment,
    pub(crate) ethernet: *mut Ethernet,
    /// Index of the segment in the map.
    pub(crate) slot: u32,
    /// The tag that was taken off: [`abi::TAGGED`] and its control information; 0 = there was none.
    pub(crate) tag: u32,
}

impl Arrival {
    /// At the beginning of a frame's way.
    #[inline(always)]
    pub(crate) fn new(context: &XdpContext, slot: u32, tag: u32) -> Option<Self> {
        let ethernet = at::<Ethernet>(context, 0)?;
        Some(Self { segment: SEGMENTS.get(slot)?, ethernet, slot, tag })
    }

    /// In a stage: as the one before has left it.
    #[inline(always)]
    pub(crate) fn in_stage(context: &XdpContext) -> Option<Self> {
        let scratch = scratch()?;
        Self::new(context, scratch.slot, scratch.tag)
    }

    /// Goes on in another stage; comes back only if the stage is missing.
    #[inline(always)]
    pub(crate) fn go(&self, context: &XdpContext, index: u32) -> Outcome {
        enter(self.slot, self.tag);
        // SAFETY: nothing on this stack needs to be dropped.
        unsafe { STAGES.tail_call(context, index) };
        Err(refuse(Reason::Internal, 0))
    }
}

/// The TCP segment behind the Ethernet header, verified.
#[inline(always)]
pub(crate) fn tcp_packet<A: Family>(context: &XdpContext) -> Result<*mut TcpPacket<A>, Reason> {
    let Some(packet) = at::<TcpPacket<A>>(context, ETHERNET) else { return Err(Reason::Malformed) };
    // SAFETY: `at` has checked that the headers lie within the packet.
    unsafe { (*packet).verify(available(context, ETHERNET))? };
    Ok(packet)
}

/// The UDP datagram behind the Ethernet header, verified.
#[inline(always)]
pub(crate) fn udp_packet<A: Family>(context: &XdpContext) -> Result<*mut UdpPacket<A>, Reason> {
    let Some(packet) = at::<UdpPacket<A>>(context, ETHERNET) else { return Err(Reason::Malformed) };
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
    count_refusal(refuse(reason, tenant));
}

#[inline(always)]
fn count_refusal(refusal: Refusal) {
    let index = refusal.tenant() * abi::REASON_SLOTS + refusal.reason();
    if let Some(counter) = REASONS.get_ptr_mut(index) {
        // SAFETY: the pointer is to this CPU's value, and programs on one CPU do not preempt each other within a NAPI poll.
        unsafe { *counter += 1 };
    }
}

/// Not an XDP action: the end of a stage makes `XDP_TX` of it, and the frame goes back with the tag that it had.
pub(crate) const BACK: u32 = 16;

/// The end of a stage: counts the reason and takes its verdict. What goes back or to the kernel has its tag again.
#[inline(always)]
pub(crate) fn conclude(context: &XdpContext, outcome: Outcome) -> u32 {
    let action = match outcome {
        Ok(action) => action,
        Err(refusal) => {
            count_refusal(refusal);
            if refusal.is(Verdict::Drop) {
                return xdp_action::XDP_DROP;
            }
            if refusal.is(Verdict::Reject) {
                return reject(context, refusal);
            }
            if refusal.is(Verdict::Pass) { xdp_action::XDP_PASS } else { BACK }
        }
    };
    match action {
        xdp_action::XDP_PASS => give_back(context, xdp_action::XDP_PASS),
        BACK => give_back(context, xdp_action::XDP_TX),
        action => action,
    }
}

/// The end of the program at the NIC, for an untagged frame.
#[inline(always)]
pub(crate) fn conclude_untagged(context: &XdpContext, outcome: Outcome) -> u32 {
    let refusal = match outcome {
        Ok(action) => return action,
        Err(refusal) => refusal,
    };
    count_refusal(refusal);
    if refusal.is(Verdict::Reject) {
        // What is in the scratch is another frame's.
        enter(SEGMENT_BASE.load(), 0);
        return reject(context, refusal);
    }
    if refusal.is(Verdict::Drop) {
        xdp_action::XDP_DROP
    } else if refusal.is(Verdict::Pass) {
        xdp_action::XDP_PASS
    } else {
        xdp_action::XDP_TX
    }
}

#[inline(always)]
fn reject(context: &XdpContext, refusal: Refusal) -> u32 {
    if let Some(scratch) = scratch() {
        scratch.reason = refusal.reason();
        scratch.tenant = refusal.tenant();
        // SAFETY: nothing on this stack needs to be dropped.
        unsafe { STAGES.tail_call(context, abi::STAGE_REJECT) };
    }
    xdp_action::XDP_DROP
}

/// Tells the next stage where the frame is from: see [`Arrival`].
#[inline(always)]
pub(crate) fn enter(slot: u32, tag: u32) {
    if let Some(scratch) = scratch() {
        scratch.slot = slot;
        scratch.tag = tag;
    }
}

/// `action`, after the tag that was taken off the frame is on it again.
#[inline(always)]
fn give_back(context: &XdpContext, action: u32) -> u32 {
    let tag = scratch().map_or(0, |scratch| scratch.tag);
    if tag != 0 && !push_tag(context, tag as u16) {
        return xdp_action::XDP_ABORTED;
    }
    action
}

/// Moves both MACs of a frame; the places overlap, so that all is read before anything is written.
///
/// # Safety
///
/// Both were bounds-checked.
#[inline(always)]
pub(crate) unsafe fn copy_addresses(from: *const [u16; 6], to: *mut [u16; 6]) {
    // SAFETY: the caller's.
    unsafe {
        let [first, second, third, fourth, fifth, sixth] = *from;
        *to = [first, second, third, fourth, fifth, sixth];
    }
}

/// An Ethernet header with an 802.1Q tag.
#[repr(C)]
struct Tagged {
    addresses: [u16; 6],
    kind: u16,
    control_be: u16,
}

/// Puts an 802.1Q tag on the frame. All pointers into the packet are void after this.
#[inline(always)]
fn push_tag(context: &XdpContext, control: u16) -> bool {
    // SAFETY: the helper checks the new length; the pointers are made anew.
    if unsafe { bpf_xdp_adjust_head(raw(context), -(VLAN_TAG as i32)) } != 0 {
        return false;
    }
    let (Some(tagged), Some(old)) = (at::<Tagged>(context, 0), at::<[u16; 6]>(context, VLAN_TAG)) else { return false };
    // SAFETY: `at` has bounds-checked both, which overlap: the addresses are read before they are written.
    unsafe {
        let addresses = &raw mut (*tagged).addresses;
        copy_addresses(old, addresses);
        (*tagged).kind = ethertype::VLAN;
        (*tagged).control_be = control.to_be();
    }
    true
}

/// This CPU's scratch.
#[inline(always)]
pub(crate) fn scratch() -> Option<&'static mut Scratch> {
    // SAFETY: a per-CPU value; nothing else on this CPU uses it while a packet is processed.
    SCRATCH.get_ptr_mut(0).map(|scratch| unsafe { &mut *scratch })
}

/// This CPU's scratch, with the budgets of this tick.
#[inline(always)]
pub(crate) fn budgets(now: u32) -> Option<&'static mut Scratch> {
    let scratch = scratch()?;
    if scratch.tick != now {
        scratch.tick = now;
        scratch.refusals = 0;
        scratch.scanned = 0;
        scratch.over_limit = 0;
        scratch.busy_tenant = 0;
    }
    Some(scratch)
}

/// Sends the packet, already rewritten behind its Ethernet header, to a next hop; `destination` is the MAC. The last thing done with a
/// packet: a tag that the next hop wants moves it.
#[inline(always)]
pub(crate) fn send(context: &XdpContext, ethernet: *mut Ethernet, hop: &NextHop, destination: *const u16) -> u32 {
    // SAFETY: `ethernet` was bounds-checked by `at`; `destination` points to 6 bytes of a map value or of the stack.
    unsafe {
        (*ethernet).destination = [*destination, *destination.add(1), *destination.add(2)];
        let source: *const u16 = hop.source.as_ptr().cast();
        (*ethernet).source = [*source, *source.add(1), *source.add(2)];
    }
    if hop.vlan != 0 && !push_tag(context, hop.vlan) {
        return xdp_action::XDP_ABORTED;
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
        return Err(too_long(length, u32::from(hop.mtu), segment));
    }
    Ok((hop, hop.flags & (NEXT_HOP_RESOLVED | NEXT_HOP_ON_LINK) == NEXT_HOP_RESOLVED))
}

/// Why a packet of `length` bytes does not go where the MTU is `mtu`, which its sender is told.
#[inline(always)]
fn too_long(length: u32, mtu: u32, segment: &Segment) -> Reason {
    if length > segment.mtu {
        return Reason::GsoFrame;
    }
    if let Some(scratch) = scratch() {
        scratch.mtu = mtu;
    }
    Reason::TooBig
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

/// An atomic instruction on a word of a map value; gives the value before.
macro_rules! atomic {
    ($(#[$meta:meta])* $name:ident, $word:ty, $class:ident, $instruction:literal) => {
        $(#[$meta])*
        #[inline(always)]
        pub(crate) unsafe fn $name(word: *mut $word, value: $word) -> $word {
            let old: $word;
            // SAFETY: the caller's pointer is to a map value, which the verifier checks.
            unsafe { asm!($instruction, word = in(reg) word, value = inout($class) value => old) };
            old
        }
    };
}

atomic!(
    /// Adds.
    fetch_add, u64, reg, "{value} = atomic_fetch_add((u64 *)({word} + 0), {value})"
);
atomic!(
    /// Writes.
    exchange, u64, reg, "{value} = xchg_64({word} + 0, {value})"
);
atomic!(
    /// Sets bits.
    fetch_or, u32, wreg, "{value} = atomic_fetch_or((u32 *)({word} + 0), {value})"
);
atomic!(
    /// Clears all bits but these.
    fetch_and, u32, wreg, "{value} = atomic_fetch_and((u32 *)({word} + 0), {value})"
);

/// Copies word by word, in order: the compiler would first load all of it, as both might overlap, into registers that BPF does not have.
///
/// # Safety
///
/// Both point to a `T` whose size and alignment are whole words.
#[inline(always)]
pub(crate) unsafe fn copy_words<T>(from: *const T, to: *mut T) {
    const { assert!(size_of::<T>().is_multiple_of(4) && align_of::<T>() >= 4) };
    let mut word = 0;
    while word < size_of::<T>() / 4 {
        // SAFETY: the caller's.
        unsafe { to.cast::<u32>().add(word).write(read_volatile(from.cast::<u32>().add(word))) };
        word += 1;
    }
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
