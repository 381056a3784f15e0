//! Internet checksums, updated incrementally (RFC 1624 equation 3), so that damage in transit stays visible.
//!
//! Sums run over 16-bit words as they lie in memory: the one's complement sum does not depend on byte order (RFC 1071 §2 B), so
//! nothing here swaps bytes.

use crate::abi::{Address, Tuple};

/// What a rewrite adds to the one's complement sum of the words that it changes; not folded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delta(u64);

impl Delta {
    /// Nothing changed.
    pub const NONE: Self = Self(0);

    /// A 16-bit word changed.
    #[must_use]
    #[inline(always)]
    pub const fn word(self, old: u16, new: u16) -> Self {
        Self(self.0 + (!old) as u64 + new as u64)
    }

    /// Four bytes at an even offset changed.
    #[must_use]
    #[inline(always)]
    pub const fn quad(self, old: u32, new: u32) -> Self {
        Self(self.0 + (!old) as u64 + new as u64)
    }

    /// An address changed.
    #[must_use]
    #[inline(always)]
    pub fn address<A: Address>(self, old: A, new: A) -> Self {
        let (old, new) = (old.quads(), new.quads());
        let first = self.quad(old[0], new[0]);
        if A::IS_V6 { first.quad(old[1], new[1]).quad(old[2], new[2]).quad(old[3], new[3]) } else { first }
    }

    /// The addresses of a tuple changed.
    #[must_use]
    #[inline(always)]
    pub fn addresses<A: Address>(self, old: &Tuple<A>, new: &Tuple<A>) -> Self {
        self.address(old.source_be, new.source_be).address(old.destination_be, new.destination_be)
    }

    /// The ports of a tuple changed.
    #[must_use]
    #[inline(always)]
    pub const fn ports<A: Address>(self, old: &Tuple<A>, new: &Tuple<A>) -> Self {
        self.word(old.source_port_be, new.source_port_be).word(old.destination_port_be, new.destination_port_be)
    }

    /// The checksum field after the change.
    #[must_use]
    #[inline(always)]
    pub const fn apply(self, checksum: u16) -> u16 {
        !fold(self.0 + (!checksum) as u64)
    }

    /// The UDP checksum field after the change: "not computed" stays so, a result of zero is sent as all ones (RFC 768).
    #[must_use]
    #[inline(always)]
    pub const fn apply_udp(self, checksum: u16) -> u16 {
        if checksum == 0 {
            return 0;
        }
        let new = self.apply(checksum);
        if new == 0 { 0xffff } else { new }
    }
}

/// Sums of 64-bit words that come and of others that go, at most [`Self::WORDS`] of each: what costs least where nothing adds with carry.
///
/// One sum wraps and knows the lower 64 bits of the whole; the other is that of the words' upper halves. Their difference is the sum of
/// the lower halves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WordSums {
    whole: u64,
    upper: u64,
}

impl WordSums {
    /// Nothing changed.
    pub const NONE: Self = Self { whole: 0, upper: 0 };

    /// Most words that may come, and go.
    pub const WORDS: u64 = 4;

    /// A word at an even offset comes; `add` adds and wraps.
    #[must_use]
    #[inline(always)]
    pub fn comes(self, word: u64, add: impl Fn(u64, u64) -> u64) -> Self {
        Self { whole: add(self.whole, word), upper: add(self.upper, word >> 32) }
    }

    /// A word at an even offset goes; `subtract` subtracts and wraps.
    #[must_use]
    #[inline(always)]
    pub fn goes(self, word: u64, subtract: impl Fn(u64, u64) -> u64) -> Self {
        Self { whole: subtract(self.whole, word), upper: subtract(self.upper, word >> 32) }
    }

    /// What the change adds to a checksum's sum.
    #[must_use]
    #[inline(always)]
    pub const fn delta(self) -> Delta {
        /// A multiple of 0xffff, zero in one's complement, that makes up for all halves that can go.
        const ENOUGH: u64 = 2 * WordSums::WORDS * 0xffff_ffff;
        let lower = self.whole.wrapping_sub(self.upper << 32);
        Delta(lower.wrapping_add(self.upper).wrapping_add(ENOUGH))
    }
}

/// What a change of addresses and ports adds to checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The addresses: to that of an IPv4 header.
    pub addresses: Delta,
    /// Addresses and ports: to that of the transport.
    pub tuple: Delta,
}

impl Change {
    /// From one tuple to another.
    #[must_use]
    #[inline(always)]
    pub fn between<A: Address>(old: &Tuple<A>, new: &Tuple<A>) -> Self {
        let addresses = Delta::NONE.addresses(old, new);
        Self { addresses, tuple: addresses.ports(old, new) }
    }
}

/// Folds a sum of 16- and 32-bit words to 16 bits.
#[inline(always)]
pub const fn fold(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// One's complement sum of bytes, not folded and not complemented; an odd last byte is padded with zero.
pub fn sum(bytes: &[u8]) -> u64 {
    let mut chunks = bytes.chunks_exact(2);
    let mut total: u64 = 0;
    for chunk in &mut chunks {
        total += u64::from(u16::from_ne_bytes([chunk[0], chunk[1]]));
    }
    if let [last] = chunks.remainder() {
        total += u64::from(u16::from_ne_bytes([*last, 0]));
    }
    total
}

/// The checksum field for bytes whose checksum field is zero.
pub fn checksum(bytes: &[u8]) -> u16 {
    !fold(sum(bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Any word, and often one whose halves are all zeros or all ones.
    fn word() -> impl Strategy<Value = u64> {
        prop_oneof![any::<u64>(), Just(0), Just(u64::MAX), Just(0xffff_ffff), Just(0xffff_ffff << 32)]
    }

    proptest! {
        #[test]
        fn incremental_update_equals_recomputation(mut bytes in proptest::collection::vec(any::<u8>(), 12..60), new: [u8; 4], at in 0usize..2) {
            bytes[10] = 0;
            bytes[11] = 0;
            // A header of all zeros has two checksums in one's complement; real headers never are.
            bytes[8] |= 1;
            let at = at * 4;
            let before = checksum(&bytes);
            let old = [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
            bytes[at..at + 4].copy_from_slice(&new);
            prop_assert_eq!(Delta::NONE.quad(u32::from_ne_bytes(old), u32::from_ne_bytes(new)).apply(before), checksum(&bytes));
        }

        #[test]
        fn sums_of_words_are_those_of_their_halves(words in proptest::collection::vec((word(), word()), 1..=WordSums::WORDS as usize), checksum: u16) {
            let (mut sums, mut halves) = (WordSums::NONE, Delta::NONE);
            for &(_, new) in &words {
                sums = sums.comes(new, u64::wrapping_add);
            }
            for &(old, new) in &words {
                sums = sums.goes(old, u64::wrapping_sub);
                halves = halves.quad(old as u32, new as u32).quad((old >> 32) as u32, (new >> 32) as u32);
            }
            // With a word that is not zero, as every header has one: all zeros have two checksums.
            prop_assert_eq!(sums.delta().word(1, 2).apply(checksum), halves.word(1, 2).apply(checksum));
            prop_assert_eq!(sums.delta().word(1, 2).apply_udp(checksum), halves.word(1, 2).apply_udp(checksum));
        }

        #[test]
        fn damage_stays_visible(mut bytes in proptest::collection::vec(any::<u8>(), 20..60), bit in 0usize..8, new: [u8; 4]) {
            bytes[10] = 0;
            bytes[11] = 0;
            bytes[8] |= 1;
            let before = checksum(&bytes);
            bytes[14] ^= 1 << bit;
            let old = [bytes[0], bytes[1], bytes[2], bytes[3]];
            bytes[..4].copy_from_slice(&new);
            prop_assert_ne!(Delta::NONE.quad(u32::from_ne_bytes(old), u32::from_ne_bytes(new)).apply(before), checksum(&bytes));
        }
    }

    #[test]
    fn udp_zero_stays_zero_and_a_zero_result_becomes_all_ones() {
        assert_eq!(Delta::NONE.word(1, 2).apply_udp(0), 0);
        // !0x1234 + 0x1234 = 0xffff, whose complement is zero.
        assert_eq!(Delta::NONE.word(0, 0x1234).apply(0x1234), 0);
        assert_eq!(Delta::NONE.word(0, 0x1234).apply_udp(0x1234), 0xffff);
    }
}
