//! Tuples, moved and compared by whole words: in packets, keys and flows their bytes lie in the same order.
//!
//! IPv6 has nine times four bytes of them in each, and BPF ten registers: what the compiler makes of single fields costs a seventh more a
//! packet of a single flow.

use core::arch::asm;
use core::mem::{MaybeUninit, offset_of};
use core::ptr::{read_volatile, write_volatile};

use lbd_common::abi::{Address, Address4, Address6, FLOW_DEAD, FLOW_UDP, Flow, FlowKey, Lookup6, Tuple, mixed};
use lbd_common::checksum::{Change, WordSums};
use lbd_common::packet::UDP;

use super::LOOKUP_SECRET;
use super::maps::Tables;

/// A tuple at a whole word. Both families' end with half a word, their ports.
#[repr(C, align(8))]
pub(crate) struct Words<A: Address>(pub(crate) Tuple<A>);

/// What the flow table is asked for, at a whole word. Its last word is ports, segment and protocol.
#[repr(C, align(8))]
struct Lookup<A: Address>(A::Lookup);

/// A half's key: what the flow table is asked for, and the tuple that the half must have.
pub(crate) struct Key<A: Address> {
    lookup: Lookup<A>,
    /// Lies in a packet or a map. Read as volatile, as packets are written, so that both stay in order.
    tuple: *const Tuple<A>,
}

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

/// Words are put together and shifted as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"));
const _: () = assert!(size_of::<Tuple<Address4>>() == 8 + 4 && size_of::<Tuple<Address6>>() == 4 * 8 + 4);
const _: () = assert!(size_of::<Tuple<Address6>>() as u64 / 8 == WordSums::WORDS);
const _: () = assert!(size_of::<FlowKey<Address4>>() == 2 * 8 && size_of::<Lookup6>() == 3 * 8);
const _: () = assert!(offset_of!(FlowKey<Address4>, segment) == 12 && offset_of!(Lookup6, segment) == 20);
const _: () = assert!(offset_of!(Lookup6, interfaces) == 8 && offset_of!(Lookup6, source_port_be) == 2 * 8);
const _: () = assert!(offset_of!(Flow<Address4>, tuple) == 0 && offset_of!(Flow<Address6>, tuple) == 0);
const _: () = assert!(offset_of!(Flow<Address4>, segment) == 12 && offset_of!(Flow<Address6>, segment) == 36);
const _: () = assert!(offset_of!(Flow<Address4>, next_hop) == 14 && offset_of!(Flow<Address6>, next_hop) == 38);
const _: () = assert!(offset_of!(Flow<Address4>, to) % 8 == 0 && offset_of!(Flow<Address6>, to) % 8 == 0);

impl<A: Address> Key<A> {
    /// The key of a packet's flow or of a half, from where its tuple lies.
    ///
    /// # Safety
    ///
    /// `tuple` is part of a packet, checked, or of a map value. The stack would not do: it is read unaligned.
    #[inline(always)]
    pub(crate) unsafe fn new(tuple: *const Tuple<A>, segment: u16, protocol: u8) -> Self {
        let mut lookup = MaybeUninit::<Lookup<A>>::uninit();
        // SAFETY: whole words of the tuple, then its ports and what a key has behind them: all bytes of what is asked for.
        unsafe {
            let words = lookup.as_mut_ptr().cast::<u64>();
            let address = |word| read_volatile(tuple.cast::<u64>().add(word));
            let last = if A::IS_V6 {
                let [first, second, third, fourth] = LOOKUP_SECRET.load();
                words.write(mixed(address(0), address(2), [first, second]));
                words.add(1).write(mixed(address(1), address(3), [third, fourth]));
                words.add(2)
            } else {
                words.write(address(0));
                words.add(1)
            };
            let ports = read_volatile(tuple.cast::<u32>().add(2 * addresses::<A>()));
            last.write(u64::from(ports) | u64::from(segment) << 32 | u64::from(protocol) << 48);
            Self { lookup: lookup.assume_init(), tuple }
        }
    }

    /// The same of a key.
    ///
    /// # Safety
    ///
    /// As of [`Self::new`].
    #[inline(always)]
    pub(crate) unsafe fn of(key: *const FlowKey<A>) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::new(&raw const (*key).tuple, (*key).segment, (*key).protocol) }
    }

    /// What the flow table is asked for.
    #[inline(always)]
    pub(crate) const fn lookup(&self) -> &A::Lookup {
        &self.lookup.0
    }

    /// Ports, segment and protocol.
    #[inline(always)]
    fn last(&self) -> u64 {
        // SAFETY: the last word, as asserted above.
        unsafe { *(&raw const self.lookup).cast::<u64>().add(size_of::<A::Lookup>() / 8 - 1) }
    }

    /// A whole word of the addresses.
    #[inline(always)]
    fn address(&self, word: usize) -> u64 {
        // SAFETY: the tuple lies where it can be read unaligned; IPv4's addresses are the first word of what is asked for, too.
        unsafe {
            if A::IS_V6 {
                read_volatile(self.tuple.cast::<u64>().add(word))
            } else {
                *(&raw const self.lookup).cast::<u64>().add(word)
            }
        }
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
    /// What the table has for this key: this half, or (of IPv6) one that looks like it.
    #[inline(always)]
    pub(crate) fn flow(&self) -> Option<*mut Flow<A>> {
        // By reference: the map would copy a key that it is given.
        A::flows().get_ptr_mut(self.lookup())
    }

    /// This half, if it is alive.
    #[inline(always)]
    pub(crate) fn live(&self) -> Option<*mut Flow<A>> {
        let flow = self.flow()?;
        compare(flow, self, (self.last() >> 48) as u8, |_| ()).is_some().then_some(flow)
    }

    /// Deletes what the table has for this key.
    #[inline(always)]
    pub(crate) fn remove(&self) {
        let _ = A::flows().remove(self.lookup());
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
        let old_ports = key.last() as u32;
        let addresses = sums.delta();
        let change = Change { addresses, tuple: addresses.quad(old_ports, new_ports) };
        Some(Way { to: to.assume_init(), change, next_hop, state })
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
    // SAFETY: a map value, which the verifier checks, and all fields are plain integers; its words are those asserted above.
    unsafe {
        let now = flow.cast::<u64>();
        // The next hop before the state: if that is alive, what was read before it was the same flow's.
        let last = read_volatile(now.add(addresses::<A>()));
        let state = read_volatile(&raw const (*flow).state);
        // Ports and segment: behind them a flow has its next hop, a key the protocol.
        let mut difference = (last ^ key.last()) << 16;
        let mut word = 0;
        while word < addresses::<A>() {
            let expected = key.address(word);
            difference |= read_volatile(now.add(word)) ^ expected;
            address(expected);
            word += 1;
        }
        let own = difference == 0 && (state & FLOW_UDP != 0) == (protocol == UDP);
        (own && state & FLOW_DEAD == 0).then_some(((last >> 48) as u16, state))
    }
}
