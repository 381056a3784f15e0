//! What each tenant may still do in a tick when others have used a common budget up.
//!
//! One word holds the tick in its upper half and the number of uses in that tick in its lower half.

/// The word after one more use, or `None` if the reserve of `limit` uses in tick `now` is used up.
#[inline(always)]
pub const fn take(word: u64, now: u32, limit: u32) -> Option<u64> {
    let used = if (word >> 32) as u32 == now { word as u32 } else { 0 };
    if used >= limit { None } else { Some((now as u64) << 32 | (used + 1) as u64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserve_lasts_for_its_uses_and_is_whole_again_in_the_next_tick() {
        let mut word = 0;
        for now in [5, 6, u32::MAX, 0] {
            for _ in 0..3 {
                word = take(word, now, 3).expect("three uses");
            }
            assert_eq!(take(word, now, 3), None);
            assert_eq!(take(word, now, 0), None);
        }
    }
}
