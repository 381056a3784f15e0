//! First-fit allocation of chunks in map `maglev`.

use std::collections::BTreeMap;

/// Free pieces: start → length, never adjacent.
#[derive(Clone, Debug)]
pub(super) struct Regions {
    free: BTreeMap<u32, u32>,
}

impl Regions {
    /// Everything from 0 to `chunks` is free.
    pub(super) fn new(chunks: u32) -> Self {
        Self { free: BTreeMap::from([(0, chunks)]) }
    }

    /// Takes the first piece that is long enough; the error is the longest one.
    pub(super) fn take(&mut self, length: u32) -> Result<u32, u32> {
        let found = self.free.iter().find(|&(_, &free)| free >= length).map(|(&start, &free)| (start, free));
        let Some((start, free)) = found else { return Err(self.free.values().copied().max().unwrap_or(0)) };
        self.free.remove(&start);
        if free > length {
            self.free.insert(start + length, free - length);
        }
        Ok(start)
    }

    /// Takes this very piece, found in use at the start. `false` if part of it is taken.
    pub(super) fn claim(&mut self, start: u32, length: u32) -> bool {
        let Some((&from, &free)) = self.free.range(..=start).next_back() else { return false };
        let (end, piece_end) = (u64::from(start) + u64::from(length), u64::from(from) + u64::from(free));
        if end > piece_end || length == 0 {
            return false;
        }
        self.free.remove(&from);
        if start > from {
            self.free.insert(from, start - from);
        }
        if piece_end > end {
            self.free.insert(end as u32, (piece_end - end) as u32);
        }
        true
    }

    /// Gives a piece back.
    pub(super) fn give(&mut self, mut start: u32, mut length: u32) {
        if let Some((&before, &free)) = self.free.range(..start).next_back()
            && before + free == start
        {
            self.free.remove(&before);
            (start, length) = (before, length + free);
        }
        if let Some(after) = self.free.remove(&(start + length)) {
            length += after;
        }
        self.free.insert(start, length);
    }

    /// Chunks that are free.
    #[cfg(test)]
    pub(super) fn free(&self) -> u32 {
        self.free.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pieces_are_taken_first_fit_and_merge_when_given_back() {
        let mut regions = Regions::new(100);
        assert_eq!((regions.take(30), regions.take(30), regions.take(30)), (Ok(0), Ok(30), Ok(60)));
        assert_eq!(regions.take(11), Err(10));
        regions.give(0, 30);
        regions.give(60, 30);
        assert_eq!(regions.take(31), Ok(60));
        regions.give(60, 31);
        regions.give(30, 30);
        assert_eq!((regions.free(), regions.take(100)), (100, Ok(0)));
    }

    #[test]
    fn a_piece_in_use_is_claimed_once() {
        let mut regions = Regions::new(64);
        assert!(regions.claim(10, 20) && !regions.claim(29, 1) && !regions.claim(60, 5) && regions.claim(60, 4));
        assert_eq!((regions.free(), regions.take(30), regions.take(10)), (40, Ok(30), Ok(0)));
        assert!(!regions.claim(u32::MAX, 2));
    }

    proptest! {
        #[test]
        fn no_chunk_has_two_owners(steps in proptest::collection::vec((any::<bool>(), 1u32..20), 1..200)) {
            let mut regions = Regions::new(128);
            let mut taken: Vec<(u32, u32)> = Vec::new();
            for (give, length) in steps {
                if give && !taken.is_empty() {
                    let (start, length) = taken.swap_remove(length as usize % taken.len());
                    regions.give(start, length);
                } else if let Ok(start) = regions.take(length) {
                    for &(other, other_length) in &taken {
                        prop_assert!(start + length <= other || other + other_length <= start);
                    }
                    prop_assert!(start + length <= 128);
                    taken.push((start, length));
                }
                prop_assert_eq!(regions.free() + taken.iter().map(|piece| piece.1).sum::<u32>(), 128);
            }
        }
    }
}
