//! Consistent-hash tables (Eisenbud et al., "Maglev", NSDI 2016, §3.4), with weights.
//!
//! The agent fills a table, the datapath looks a slot up ([`crate::hash::slot`]). A table is a function of the identities (address and
//! port) and weights of its backends alone: neither their order, nor ids, nor a process's random seed have a part in it, so
//! two agents, or one before and after a restart, agree on every slot.

/// Sizes that a table can have: primes.
pub const SIZES: [u32; 4] = [1021, 4093, 16381, 65521];

/// What distinguishes a backend: its address (IPv4 as an IPv4-mapped one) and its port in network order, zero if it has none of its own.
pub type Identity = [u8; 18];

/// The identity of a backend. `port` is in host order.
pub const fn identity(address: [u8; 16], port: u16) -> Identity {
    let mut bytes = [0; 18];
    let mut index = 0;
    while index < 16 {
        bytes[index] = address[index];
        index += 1;
    }
    let port = port.to_be_bytes();
    bytes[16] = port[0];
    bytes[17] = port[1];
    bytes
}

/// Size of the table for backends with this sum of weights: the smallest of [`SIZES`] that has at least 1000 slots for each unit of
/// weight, else the largest; 0 if there is no backend.
///
/// The more slots for a backend, the fewer slots of survivors move when one goes: see `docs/balancing.md`.
pub const fn table_size(total_weight: u32) -> u32 {
    if total_weight == 0 {
        return 0;
    }
    let wanted = total_weight.saturating_mul(1000);
    let mut index = 0;
    while index + 1 < SIZES.len() && SIZES[index] < wanted {
        index += 1;
    }
    SIZES[index]
}

#[cfg(any(test, feature = "user"))]
pub use build::{Candidate, build};

#[cfg(any(test, feature = "user"))]
mod build {
    extern crate alloc;

    use alloc::vec;
    use alloc::vec::Vec;

    use super::Identity;
    use crate::hash::hash_words;

    /// A backend that may be in a table.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub struct Candidate {
        /// What distinguishes it; no two candidates may have the same.
        pub identity: Identity,
        /// Its share of the slots, relative to the others'; 0 = none.
        pub weight: u16,
    }

    /// Order in which a backend wants the slots: `offset`, `offset + skip`, … modulo the size.
    #[derive(Clone, Copy, Debug)]
    struct Permutation {
        offset: u32,
        skip: u32,
    }

    impl Permutation {
        fn new(identity: &Identity, size: u32) -> Self {
            // Fixed keys: every agent must find the same table. Clients cannot aim at a slot, for their hash has a secret seed.
            let word = |from: usize| {
                let mut bytes = [0; 8];
                for (to, byte) in bytes.iter_mut().zip(identity.iter().skip(from)) {
                    *to = *byte;
                }
                u64::from_le_bytes(bytes)
            };
            let words = [word(0), word(8), word(16)];
            let offset = hash_words(&[0x6c62_6420_6d61_676c, 0x6576_206f_6666_7365], 1, words);
            let skip = hash_words(&[0x6c62_6420_6d61_676c, 0x6576_2073_6b69_7021], 2, words);
            let size = u64::from(size);
            Self { offset: (offset % size) as u32, skip: (skip % (size - 1)) as u32 + 1 }
        }
    }

    const EMPTY: u16 = u16::MAX;

    /// Fills a table of `size` slots, a prime. A slot holds an index into `candidates`.
    ///
    /// Empty if no candidate has a weight or `size` is less than 2. With more candidates than slots, the last ones by identity get
    /// none. At most 65,535 candidates are looked at.
    pub fn build(candidates: &[Candidate], size: u32) -> Vec<u16> {
        struct Turn {
            index: u16,
            position: u32,
            skip: u32,
            weight: u32,
            credit: u32,
        }

        let mut order: Vec<u16> =
            (0..EMPTY).zip(candidates).filter(|(_, candidate)| candidate.weight > 0).map(|(index, _)| index).collect();
        order.sort_unstable_by_key(|&index| candidates[usize::from(index)]);
        if size < 2 || order.is_empty() {
            return Vec::new();
        }
        let mut turns: Vec<Turn> = order
            .into_iter()
            .map(|index| {
                let candidate = &candidates[usize::from(index)];
                let permutation = Permutation::new(&candidate.identity, size);
                let weight = u32::from(candidate.weight);
                Turn { index, position: permutation.offset, skip: permutation.skip, weight, credit: 0 }
            })
            .collect();
        let heaviest = turns.iter().map(|turn| turn.weight).max().unwrap_or(1);
        let mut table = vec![EMPTY; size as usize];
        let mut left = size;
        loop {
            for turn in &mut turns {
                turn.credit += turn.weight;
                if turn.credit < heaviest {
                    continue;
                }
                turn.credit -= heaviest;
                // Ends: `size` is prime, so the steps reach every slot, and one is free.
                while table[turn.position as usize] != EMPTY {
                    turn.position += turn.skip;
                    if turn.position >= size {
                        turn.position -= size;
                    }
                }
                table[turn.position as usize] = turn.index;
                left -= 1;
                if left == 0 {
                    return table;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;
    use crate::abi::mapped;

    fn node(number: u8, weight: u16) -> Candidate {
        Candidate { identity: identity(mapped([10, 32, 96, number]), 0), weight }
    }

    /// The table with identities in its slots, which can be compared between different lists of candidates.
    fn named(candidates: &[Candidate], size: u32) -> Vec<Identity> {
        build(candidates, size).into_iter().map(|index| candidates[usize::from(index)].identity).collect()
    }

    fn counts(table: &[Identity]) -> BTreeMap<Identity, u32> {
        let mut counts = BTreeMap::new();
        for name in table {
            *counts.entry(*name).or_default() += 1;
        }
        counts
    }

    /// A small generator, so that the tests are the same everywhere.
    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((self.0 >> 33) as usize) % limit
        }

        fn shuffle<T>(&mut self, list: &mut [T]) {
            for last in (1..list.len()).rev() {
                list.swap(last, self.below(last + 1));
            }
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(table_size(0), 0);
        assert_eq!(table_size(1), 1021);
        assert_eq!(table_size(2), 4093);
        assert_eq!(table_size(4), 4093);
        assert_eq!(table_size(5), 16381);
        assert_eq!(table_size(16), 16381);
        assert_eq!(table_size(17), 65521);
        assert_eq!(table_size(u32::MAX), 65521);
        for size in SIZES {
            assert!(
                (2..256).take_while(|divisor| divisor * divisor <= size).all(|divisor| size % divisor != 0),
                "{size}"
            );
        }
    }

    #[test]
    fn a50_every_order_gives_the_same_table_slot_for_slot() {
        let mut random = Random(50);
        for weights in [[1; 10], [1, 2, 1, 2, 1, 2, 1, 2, 1, 2]] {
            let nodes: Vec<_> = (1..=10).zip(weights).map(|(number, weight)| node(number, weight)).collect();
            for size in [16381, 65521] {
                let expected = named(&nodes, size);
                for _ in 0..100 {
                    let mut shuffled = nodes.clone();
                    random.shuffle(&mut shuffled);
                    assert!(named(&shuffled, size) == expected);
                }
            }
        }
    }

    #[test]
    fn a50_spread_follows_the_weights() {
        for size in [16381, 65521] {
            let nodes: Vec<_> = (1..=10).map(|number| node(number, 1)).collect();
            let counts = counts(&named(&nodes, size));
            let (least, most) = (counts.values().min().unwrap(), counts.values().max().unwrap());
            assert!(f64::from(*most) / f64::from(*least) <= 1.02, "{counts:?}");
        }
        let nodes: Vec<_> = (1..=10).map(|number| node(number, 1 + u16::from(number % 2))).collect();
        let counts = counts(&named(&nodes, 65521));
        for candidate in &nodes {
            let share = f64::from(counts[&candidate.identity]) * 15.0 / (65521.0 * f64::from(candidate.weight));
            assert!((0.99..=1.01).contains(&share), "{share}");
        }
    }

    /// Slots of survivors that differ between the tables, as a part of all their slots in the old one.
    fn moved(before: &[Identity], after: &[Identity], gone: &Identity) -> f64 {
        let survivors = before.iter().filter(|&name| name != gone).count();
        let moved = before.iter().zip(after).filter(|(old, new)| *old != gone && old != new).count();
        moved as f64 / survivors as f64
    }

    #[test]
    fn a50_removing_one_of_ten_moves_hardly_any_slot_of_the_others() {
        for weights in [[1; 10], [1, 2, 1, 2, 1, 2, 1, 2, 1, 2]] {
            for (size, bound) in [(16381, 0.01), (65521, 0.005)] {
                let nodes: Vec<_> = (1..=10).zip(weights).map(|(number, weight)| node(number, weight)).collect();
                let before = named(&nodes, size);
                let mut worst: f64 = 0.0;
                for removed in 0..nodes.len() {
                    let mut rest = nodes.clone();
                    let gone = rest.remove(removed).identity;
                    let after = named(&rest, size);
                    // What must move does: nothing points to the removed backend.
                    assert!(!after.contains(&gone));
                    let there = moved(&before, &after, &gone);
                    // Adding it again gives back the very same table, so it moves as many.
                    let mut again = rest.clone();
                    again.push(nodes[removed]);
                    assert!(named(&again, size) == before);
                    worst = worst.max(there);
                }
                println!(
                    "{size} slots, weights {weights:?}: at most {:.2} % of the survivors' slots moved",
                    worst * 100.0
                );
                assert!(worst <= bound, "{size} slots, weights {weights:?}: {worst}");
            }
        }
    }

    #[test]
    fn a50_adding_an_eleventh_takes_its_share_and_little_else() {
        let mut nodes: Vec<_> = (1..=10).map(|number| node(number, 1)).collect();
        let before = named(&nodes, 16381);
        nodes.push(node(11, 1));
        let after = named(&nodes, 16381);
        let new = node(11, 1).identity;
        let taken = after.iter().filter(|&name| *name == new).count();
        let moved = before.iter().zip(&after).filter(|(old, new)| old != new).count();
        assert!((1480..=1500).contains(&taken), "{taken}");
        // Beyond its share: at most 1 % of the rest.
        assert!(moved - taken <= 149, "{moved} {taken}");
    }

    #[test]
    fn a50_edge_cases() {
        assert!(build(&[], 1021).is_empty());
        assert!(build(&[node(1, 0)], 1021).is_empty());
        assert!(build(&[node(1, 1)], 0).is_empty());
        assert_eq!(build(&[node(1, 1)], 1021), [0; 1021]);
        assert_eq!(build(&[node(2, 0), node(1, 7)], 1021), [1; 1021]);
        // More backends than slots: each slot has one, none twice.
        let crowd: Vec<_> = (0..=255).map(|number| node(number, 1)).collect();
        let table = named(&crowd, 101);
        assert_eq!(table.len(), 101);
        assert!(counts(&table).values().all(|&count| count == 1));
    }

    #[test]
    fn the_table_never_changes_between_builds() {
        // A golden value: if it differs, two versions of lbd would send new connections of one client to different backends.
        let nodes: Vec<_> = (1..=5).map(|number| node(number, u16::from(number % 3))).collect();
        let table = build(&nodes, 1021);
        assert_eq!(table[..16], GOLDEN);
        let sum = table
            .iter()
            .zip(1u64..)
            .fold(0u64, |sum, (&slot, index)| sum.wrapping_mul(31).wrapping_add(u64::from(slot) * index));
        assert_eq!(sum, GOLDEN_SUM);
    }

    const GOLDEN: [u16; 16] = [0, 4, 1, 3, 4, 4, 4, 4, 0, 4, 4, 0, 0, 1, 1, 3];
    const GOLDEN_SUM: u64 = 4_546_871_657_059_094_101;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_slot_holds_a_candidate_with_a_weight(list in prop::collection::vec((any::<[u8; 4]>(), 0u16..5), 0..60)) {
            let unique: BTreeMap<_, _> = list.into_iter().collect();
            let candidates: Vec<_> = unique
                .into_iter()
                .map(|(address, weight)| Candidate { identity: identity(mapped(address), 80), weight })
                .collect();
            let size = table_size(candidates.iter().map(|candidate| u32::from(candidate.weight)).sum()).min(4093);
            let table = build(&candidates, size);
            prop_assert_eq!(table.len(), size as usize);
            prop_assert!(table.iter().all(|&slot| candidates[usize::from(slot)].weight > 0));
        }
    }
}
