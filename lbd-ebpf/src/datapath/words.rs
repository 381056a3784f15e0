//! Tuples, moved and compared by whole words: in packets, keys and flows their bytes lie in the same order.
//!
//! IPv6 has nine times four bytes of them in each, and BPF ten registers: what the compiler makes of single fields costs a seventh more a
//! packet of a single flow.

use core::arch::asm;
use core::mem::{MaybeUninit, offset_of};
use core::ptr::{read_volatile, write_volatile};

use lbd_common::abi::{
    Address, Address4, Address6, FLOW_DEAD, FLOW_UDP, Flow, FlowKey, Identity6, Making, Tuple, mixed_prefixes,
};
use lbd_common::checksum::{Change, WordSums};
use lbd_common::packet::UDP;

use super::maps::{SETTINGS, Tables};

/// A tuple at a whole word. Both families' end with half a word, their ports.
#[repr(C, align(8))]
pub(crate) struct Words<A: Address>(pub(crate) Tuple<A>);

/// A key at a whole word, which is whole words.
#[repr(C, align(8))]
pub(crate) struct Key<A: Address>(pub(crate) FlowKey<A>);

/// What a half says of a packet's way, copied out.
pub(crate) struct Way<A: Address> {
    /// Addresses and ports after rewriting.
    pub(crate) to: Words<A>,
    /// What that adds to checksums.
    pub(crate) change: Change,
    /// [`Flow::next_hop`].
    pub(crate) next_hop: u16,
    /// [`Flow::state`].
    pub(crate) state: u16,
}

/// Whole words of a tuple: its addresses.
const fn addresses<A: Address>() -> usize {
    size_of::<Tuple<A>>() / 8
}

/// Whole words of an identity, before the ports.
const fn identity_words<A: Address>() -> usize {
    size_of::<A::Identity>() / 8
}

/// Words are put together and shifted as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"));
const _: () = assert!(size_of::<Tuple<Address4>>() == 8 + 4 && size_of::<Tuple<Address6>>() == 4 * 8 + 4);
const _: () = assert!(size_of::<Tuple<Address6>>() as u64 / 8 == WordSums::WORDS);
const _: () = assert!(size_of::<FlowKey<Address4>>() == 2 * 8 && size_of::<FlowKey<Address6>>() == 5 * 8);
const _: () = assert!(offset_of!(FlowKey<Address4>, segment) == 12 && offset_of!(FlowKey<Address6>, segment) == 36);
const _: () = assert!(offset_of!(Flow<Address4>, identity) == 0 && offset_of!(Flow<Address6>, identity) == 0);
const _: () = assert!(size_of::<Identity6>() == 3 * 8 + 4 && offset_of!(Identity6, prefixes) == 0);
const _: () = assert!(offset_of!(Identity6, source_interface_be) == 8);
const _: () = assert!(offset_of!(Identity6, destination_interface_be) == 2 * 8);
const _: () = assert!(offset_of!(Flow<Address4>, segment) == 12 && offset_of!(Flow<Address6>, segment) == 28);
const _: () = assert!(offset_of!(Flow<Address4>, next_hop) == 14 && offset_of!(Flow<Address6>, next_hop) == 30);
const _: () = assert!(offset_of!(Flow<Address4>, to) % 8 == 0 && offset_of!(Flow<Address6>, to) % 8 == 0);
const _: () = assert!(offset_of!(Making<Address4>, reply) % 8 == 0 && offset_of!(Making<Address6>, reply) % 8 == 0);

impl<A: Address> Key<A> {
    /// The key of a packet's flow, from where its tuple lies ([`TcpPacket::tuple_mut`](lbd_common::packet::TcpPacket::tuple_mut)).
    #[inline(always)]
    pub(crate) fn new(tuple: &Tuple<A>, segment: u16, protocol: u8) -> Self {
        let tuple = &raw const *tuple;
        let mut key = MaybeUninit::<Self>::uninit();
        let mut word = 0;
        // SAFETY: whole words of the tuple, then its ports and what a key has behind them: all bytes of a key. Packets are read
        // unaligned: see `lbd_common::packet`.
        unsafe {
            let words = key.as_mut_ptr().cast::<u64>();
            while word < addresses::<A>() {
                words.add(word).write(read_volatile(tuple.cast::<u64>().add(word)));
                word += 1;
            }
            let ports = read_volatile(tuple.cast::<u32>().add(2 * word));
            words.add(word).write(u64::from(ports) | u64::from(segment) << 32 | u64::from(protocol) << 48);
            key.assume_init()
        }
    }

    /// The key in [`Making::reply`].
    ///
    /// # Safety
    ///
    /// It lies there.
    #[inline(always)]
    pub(crate) unsafe fn in_making(key: &FlowKey<A>) -> &Self {
        // SAFETY: the caller's; it lies at a whole word, as asserted above.
        unsafe { &*(&raw const *key).cast() }
    }
}

/// Adds here and now: with IPv6's words the compiler would wait, and read all of them once more.
#[inline(always)]
fn add<A: Address>(sum: u64, word: u64) -> u64 {
    if !A::IS_V6 {
        return sum.wrapping_add(word);
    }
    let mut sum = sum;
    // SAFETY: an addition.
    unsafe { asm!("{sum} += {word}", sum = inout(reg) sum, word = in(reg) word, options(nomem, nostack)) };
    sum
}

/// Subtracts as [`add`] adds.
#[inline(always)]
fn subtract<A: Address>(sum: u64, word: u64) -> u64 {
    if !A::IS_V6 {
        return sum.wrapping_sub(word);
    }
    let mut sum = sum;
    // SAFETY: a subtraction.
    unsafe { asm!("{sum} -= {word}", sum = inout(reg) sum, word = in(reg) word, options(nomem, nostack)) };
    sum
}

impl<A: Tables> Key<A> {
    /// The half in the table with this key.
    #[inline(always)]
    pub(crate) fn flow(&self) -> Option<*mut Flow<A>> {
        // By reference: the map would copy a key that it is given.
        let key: &FlowKey<A> = &self.0;
        A::flows().get_ptr_mut(key)
    }
}

impl<A: Address> Words<A> {
    /// Writes the tuple to where a packet has its own.
    #[inline(always)]
    pub(crate) fn write(&self, to: &mut Tuple<A>) {
        let (from, to) = (&raw const self.0, &raw mut *to);
        let mut word = 0;
        // SAFETY: whole words of both tuples, then their ports; `from` lies at a whole word, and packets are written as they are
        // read: unaligned.
        unsafe {
            while word < addresses::<A>() {
                write_volatile(to.cast::<u64>().add(word), *from.cast::<u64>().add(word));
                word += 1;
            }
            write_volatile(to.cast::<u32>().add(2 * word), *from.cast::<u32>().add(2 * word));
        }
    }
}

/// What a half says of a packet's way. `None` if the half is dead or another flow's: a hash element can be recycled under its reader, so
/// the tuple is compared after the copy, in program order. That the half lives is looked at on both sides of it: a dead one may be written
/// over meanwhile by the same client's next connection.
#[inline(always)]
pub(crate) fn read<A: Tables>(flow: *const Flow<A>, key: &Key<A>, protocol: u8) -> Option<Way<A>> {
    let mut to = MaybeUninit::<Words<A>>::uninit();
    let mut sums = WordSums::NONE;
    let mut word = 0;
    // SAFETY: a map value, which the verifier checks, and all fields are plain integers; its words are those asserted above, and all
    // of `to` is written.
    unsafe {
        if read_volatile(&raw const (*flow).state) & FLOW_DEAD != 0 {
            return None;
        }
        let (target, source) = (to.as_mut_ptr().cast::<u64>(), (&raw const (*flow).to).cast::<u64>());
        while word < addresses::<A>() {
            let new = read_volatile(source.add(word));
            target.add(word).write(new);
            sums = sums.comes(new, add::<A>);
            word += 1;
        }
        let new_ports = read_volatile(source.add(word).cast::<u32>());
        target.add(word).cast::<u32>().write(new_ports);
        let (next_hop, state) = compare(flow, key, protocol, |old| sums = sums.goes(old, subtract::<A>))?;
        let old_ports = (&raw const *key).cast::<u32>().add(2 * word).read();
        let addresses = sums.delta();
        let change = Change { addresses, tuple: addresses.quad(old_ports, new_ports) };
        Some(Way { to: to.assume_init(), change, next_hop, state })
    }
}

/// Whether a half is alive and the key's.
#[inline(always)]
pub(crate) fn is_alive<A: Tables>(flow: *const Flow<A>, key: &Key<A>, protocol: u8) -> bool {
    compare(flow, key, protocol, |_| ()).is_some()
}

/// What [`Address::identity`] needs of the settings.
#[inline(always)]
pub(crate) fn identity_seed<A: Address>() -> [u64; 2] {
    if A::IS_V6 { SETTINGS.get(0).map_or([0; 2], |settings| settings.seed) } else { [0; 2] }
}

/// Whether a half repeats the tuple that turned around is `to`.
///
/// # Safety
///
/// `flow` is a map value, `to` a tuple in a map.
#[inline(always)]
pub(crate) unsafe fn is_turned<A: Address>(flow: *const Flow<A>, to: *const Tuple<A>) -> bool {
    // SAFETY: the caller's; the words are those asserted above.
    unsafe {
        let expected = A::identity(&(*to).turned(), identity_seed::<A>());
        let (now, expected) = ((&raw const (*flow).identity).cast::<u32>(), (&raw const expected).cast::<u32>());
        let (mut difference, mut quad) = (0, 0);
        while quad < size_of::<A::Identity>() / 4 {
            difference |= *now.add(quad) ^ *expected.add(quad);
            quad += 1;
        }
        difference == 0
    }
}

/// Next hop and state of a half that is alive and the key's. `address` is called with each word of the key's addresses.
#[inline(always)]
fn compare<A: Tables>(
    flow: *const Flow<A>,
    key: &Key<A>,
    protocol: u8,
    mut address: impl FnMut(u64),
) -> Option<(u16, u16)> {
    // SAFETY: a map value, which the verifier checks, and all fields are plain integers; its words and the key's are those asserted
    // above.
    unsafe {
        let (now, expected) = (flow.cast::<u64>(), (&raw const *key).cast::<u64>());
        // The next hop before the state: if that is alive, what was read before it was the same flow's.
        let last = read_volatile(now.add(identity_words::<A>()));
        let state = read_volatile(&raw const (*flow).state);
        // Ports and segment: behind them a flow has its next hop, a key the protocol.
        let mut difference = (last ^ *expected.add(addresses::<A>())) << 16;
        if A::IS_V6 {
            let (source, destination) = (*expected, *expected.add(2));
            difference |= read_volatile(now) ^ mixed_prefixes(source, destination, identity_seed::<A>());
            address(source);
            address(destination);
            let (source, destination) = (*expected.add(1), *expected.add(3));
            difference |= read_volatile(now.add(1)) ^ source;
            address(source);
            difference |= read_volatile(now.add(2)) ^ destination;
            address(destination);
        } else {
            let both = *expected;
            difference |= read_volatile(now) ^ both;
            address(both);
        }
        let own = difference == 0 && (state & FLOW_UDP != 0) == (protocol == UDP);
        (own && state & FLOW_DEAD == 0).then_some(((last >> 48) as u16, state))
    }
}
