//! How half-open records are claimed and found: the parts of a tag and of a hint.
//!
//! A tag is one word, so that one compare-and-swap decides who owns a record:
//!
//! | bits | part |
//! |---|---|
//! | 0–31 | hash of the reverse tuple ([`crate::hash::reverse`]): whoever claims a tuple looks for it here |
//! | 32–53 | when the record expires, in units of 16 ticks, modulo 2^22 |
//! | 54–61 | eight bits of the client tuple's hash: spares most look-ups the records |
//! | 62–63 | state |

use crate::abi::HALF_OPEN_BUCKETS;

/// State: nothing here.
pub const FREE: u64 = 0;
/// State: claimed, the record is being written.
pub const BUSY: u64 = 1 << 62;
/// State: the record may be read.
pub const LIVE: u64 = 2 << 62;
/// State: being promoted; the record may still be read.
pub const PROMOTING: u64 = 3 << 62;
/// Mask of the state.
pub const STATE: u64 = 3 << 62;

const TIME_SHIFT: u32 = 32;
const TIME_MASK: u64 = (1 << 22) - 1;
const CLIENT_SHIFT: u32 = 54;
const COARSE_SHIFT: u32 = 4;
/// Longest life of a record, in coarse units: an hour of the fastest tick (1000 Hz) and more. What says that it ends later has ended, one turn
/// of its clock ago.
const LONGEST: u64 = 1 << 14;
const HINT_CLIENT_SHIFT: u32 = 40;
const HINT_TIME_MASK: u64 = (1 << 24) - 1;

/// When a record that is claimed at `now` expires, in ticks; whole coarse units, so that a tag keeps it exactly.
#[inline(always)]
pub const fn expiry(now: u32, timeout: u32) -> u32 {
    now.wrapping_add(timeout) >> COARSE_SHIFT << COARSE_SHIFT
}

/// The tick at which the record with this tag expires.
#[inline(always)]
pub const fn expires(tag: u64, now: u32) -> u32 {
    let now = now >> COARSE_SHIFT;
    let left = (tag >> TIME_SHIFT).wrapping_sub(now as u64) & TIME_MASK;
    now.wrapping_add(left as u32).wrapping_sub(1) << COARSE_SHIFT
}

/// A tag. `reverse` is the reverse tuple's hash, `client` the client tuple's, `expires` as [`expiry`] gives it.
#[inline(always)]
pub const fn tag(state: u64, reverse: u32, client: u64, expires: u32) -> u64 {
    state | reverse as u64 | (coarse_end(expires) as u64 & TIME_MASK) << TIME_SHIFT | (client >> 56) << CLIENT_SHIFT
}

/// The first coarse unit that lies wholly at or after a tick.
#[inline(always)]
const fn coarse_end(tick: u32) -> u32 {
    (tick >> COARSE_SHIFT).wrapping_add(1)
}

/// The same tag in another state.
#[inline(always)]
pub const fn with_state(tag: u64, state: u64) -> u64 {
    tag & !STATE | state
}

/// Hash of the reverse tuple.
#[inline(always)]
pub const fn reverse(tag: u64) -> u32 {
    tag as u32
}

/// Whether the tag may belong to a client tuple with this hash.
#[inline(always)]
pub const fn may_be_client(tag: u64, client: u64) -> bool {
    (tag >> CLIENT_SHIFT) & 0xff == client >> 56
}

/// Whether the record is claimed and not yet expired.
#[inline(always)]
pub const fn occupied(tag: u64, now: u32) -> bool {
    let left = (tag >> TIME_SHIFT).wrapping_sub((now >> COARSE_SHIFT) as u64) & TIME_MASK;
    tag & STATE != FREE && left != 0 && left <= LONGEST
}

/// Whether the tag is of a record that has expired. It is cleared before its clock has come round (2^26 ticks, 12 days at 1000 Hz): then it would be
/// taken for a new one.
#[inline(always)]
pub const fn expired(tag: u64, now: u32) -> bool {
    tag != 0 && !occupied(tag, now)
}

/// Whether the record may be read.
#[inline(always)]
pub const fn readable(tag: u64, now: u32) -> bool {
    occupied(tag, now) && tag & STATE != BUSY
}

/// A hint: the client tuple with this hash has its half-open record in the set of `port`. It holds 24 bits of the hash, 24 of the time, and
/// the port.
#[inline(always)]
pub const fn hint(client: u64, port: u16, expires: u32) -> u64 {
    client >> HINT_CLIENT_SHIFT << HINT_CLIENT_SHIFT | (coarse_end(expires) as u64 & HINT_TIME_MASK) << 16 | port as u64
}

/// Whether a hint may be this client tuple's.
#[inline(always)]
const fn hints_at(hint: u64, client: u64) -> bool {
    (hint ^ client) >> HINT_CLIENT_SHIFT == 0
}

/// Coarse units until a hint expires.
#[inline(always)]
const fn hint_left(hint: u64, now: u32) -> u64 {
    (hint >> 16).wrapping_sub((now >> COARSE_SHIFT) as u64) & HINT_TIME_MASK
}

/// The SNAT port (host order) of a hint that may belong to this client tuple and has not expired.
#[inline(always)]
pub const fn hinted_port(hint: u64, client: u64, now: u32) -> Option<u16> {
    if !hints_at(hint, client) || hint_expired(hint, now) {
        return None;
    }
    Some(hint as u16)
}

/// Whether a hint's place may be taken.
#[inline(always)]
pub const fn hint_expired(hint: u64, now: u32) -> bool {
    let left = hint_left(hint, now);
    hint == 0 || left == 0 || left > LONGEST
}

/// How ill a place in a line of hints suits a new hint of a client; the lowest takes it. The client's own old hint comes first, since a
/// look-up believes the first that it meets; then what has expired, then what expires soonest.
#[inline(always)]
pub const fn hint_cost(hint: u64, client: u64, now: u32) -> u32 {
    if hints_at(hint, client) {
        0
    } else if hint_expired(hint, now) {
        1
    } else {
        1 + hint_left(hint, now) as u32
    }
}

/// Whether tick `one` is later than tick `other`, also after the clock has wrapped.
#[inline(always)]
pub const fn is_later(one: u32, other: u32) -> bool {
    one.wrapping_sub(other) as i32 > 0
}

/// Line of hints for a client tuple's hash. `lines` is a power of two.
#[inline(always)]
pub const fn hint_line(client: u64, lines: u32) -> u32 {
    (client >> 20) as u32 & lines.wrapping_sub(1)
}

/// Epoch of [`FamilyUse::buckets`](crate::abi::FamilyUse::buckets) in which a record that expires at this tick is counted: the first that lies wholly after it.
#[inline(always)]
pub const fn expiry_epoch(expires: u32, ticks_per_epoch: u32) -> u64 {
    epoch(expires, ticks_per_epoch) + 1
}

/// Epoch of a tick.
#[inline(always)]
pub const fn epoch(now: u32, ticks_per_epoch: u32) -> u64 {
    (now / if ticks_per_epoch == 0 { 1 } else { ticks_per_epoch }) as u64
}

/// Bucket of an epoch.
#[inline(always)]
pub const fn bucket(epoch: u64) -> usize {
    epoch as usize & (HALF_OPEN_BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::abi::HINT_WAYS;

    const TIMEOUT: u32 = 30 * 62;

    proptest! {
        #[test]
        fn a_tag_keeps_its_parts(reverse_hash: u32, client: u64, now: u32, later in 0u32..(1 << 26) - (1 << 19)) {
            let live = tag(LIVE, reverse_hash, client, now.wrapping_add(TIMEOUT));
            prop_assert_eq!(reverse(live), reverse_hash);
            prop_assert!(may_be_client(live, client));
            prop_assert!(readable(live, now));
            prop_assert!(readable(live, now.wrapping_add(TIMEOUT)));
            prop_assert!(!occupied(live, now.wrapping_add(TIMEOUT + 32)));
            prop_assert!(!occupied(live, now.wrapping_add(3600 * 62)));
            let end = now.wrapping_add(TIMEOUT + 32);
            prop_assert!(!occupied(live, end.wrapping_add(later)) && expired(live, end.wrapping_add(later)));
            prop_assert!(!expired(live, now) && !expired(0, now));
            prop_assert!(!readable(with_state(live, BUSY), now));
            prop_assert!(occupied(with_state(live, BUSY), now));
            prop_assert!(!occupied(with_state(live, FREE), now));
            let end = expiry(now, TIMEOUT);
            prop_assert_eq!(expires(tag(LIVE, reverse_hash, client, end), now), end);
            prop_assert_eq!(expires(tag(LIVE, reverse_hash, client, end), now.wrapping_add(1000)), end);
        }

        #[test]
        fn a_hint_leads_its_client_only(client: u64, other: u64, port in 1u16.., now: u32, later in 0u32..(1 << 28) - (1 << 19)) {
            let hint = hint(client, port, now.wrapping_add(TIMEOUT));
            prop_assert_eq!(hinted_port(hint, client, now), Some(port));
            prop_assert_eq!(hinted_port(hint, client, now.wrapping_add(TIMEOUT)), Some(port));
            prop_assert_eq!(hinted_port(hint, client, now.wrapping_add(TIMEOUT + 32)), None);
            prop_assert_eq!(hinted_port(hint, client, now.wrapping_add(TIMEOUT + 32 + later)), None);
            if client >> HINT_CLIENT_SHIFT != other >> HINT_CLIENT_SHIFT {
                prop_assert_eq!(hinted_port(hint, other, now), None);
            }
        }

        #[test]
        fn a_client_has_one_hint_and_its_newest_is_found(clients: [u64; 12], ports: [u16; 12], timeouts in prop::array::uniform12(0..TIMEOUT), now: u32) {
            let mut line = [0; HINT_WAYS];
            let mut left = std::collections::BTreeSet::new();
            for ((client, port), timeout) in clients.iter().zip(ports).zip(timeouts) {
                // Few clients, so that they come again, and none whose hash looks like an empty place.
                let client = ((client % 10) + 1) << HINT_CLIENT_SHIFT;
                let expires = now.wrapping_add(500 + timeout);
                let place = (0..HINT_WAYS).min_by_key(|&way| hint_cost(line[way], client, now)).unwrap_or_default();
                line[place] = hint(client, port, expires);
                left.insert(client);
                // The newest is found, and no client has two.
                prop_assert_eq!(line.iter().find_map(|&hint| hinted_port(hint, client, now)), Some(port));
                for client in &left {
                    prop_assert!(line.iter().filter(|&&hint| hinted_port(hint, *client, now).is_some()).count() <= 1);
                }
            }
        }

        #[test]
        fn of_a_full_line_the_hint_that_expires_soonest_makes_room(timeouts in prop::array::uniform8(0u32..20_000), now: u32) {
            let line: Vec<u64> = (1u64..).zip(timeouts).map(|(client, timeout)| hint(client << HINT_CLIENT_SHIFT, 1, now.wrapping_add(100 + timeout))).collect();
            let place = (0..HINT_WAYS).min_by_key(|&way| hint_cost(line[way], 99 << HINT_CLIENT_SHIFT, now)).unwrap_or_default();
            let soonest = timeouts.iter().map(|timeout| now.wrapping_add(100 + timeout)).map(|end| coarse_end(end).wrapping_sub(coarse_end(now))).min();
            prop_assert_eq!(Some(coarse_end(now.wrapping_add(100 + timeouts[place])).wrapping_sub(coarse_end(now))), soonest);
        }

        #[test]
        fn a_record_is_counted_until_it_has_expired_and_never_in_a_bucket_of_the_past(now in 0..u32::MAX - 10_000, timeout in 1u32..TIMEOUT) {
            let per_epoch = TIMEOUT.div_ceil(6);
            let counted = expiry_epoch(now + timeout, per_epoch);
            // It is emptied when its epoch begins, which is after the record's end, and its bucket is not one that is still to be emptied.
            prop_assert!(counted * u64::from(per_epoch) > u64::from(now + timeout));
            prop_assert!(counted > epoch(now, per_epoch) && counted < epoch(now, per_epoch) + HALF_OPEN_BUCKETS as u64);
        }
    }
}

#[cfg(test)]
mod claims {
    //! All interleavings of claimers, in a model of what the datapath does word by word.
    use std::collections::BTreeSet;

    const WAYS: usize = 2;

    /// One claimer's program counter and what it has read. Every step is one access to shared memory, in program order; the
    /// compare-and-swap is a full barrier, so that what follows it is not seen before it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    enum Claimer {
        Looking { way: usize, free: Option<usize> },
        Swapping { free: usize },
        Checking { own: usize, way: usize },
        Yielding { own: usize },
        Owning,
        Lost,
    }

    /// A word: free, this tuple's, or another tuple's (which may be released at any time).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    enum Word {
        Free,
        Ours,
        Other,
    }

    type State = ([Word; WAYS], [Claimer; 2]);

    fn step(words: &mut [Word; WAYS], claimer: Claimer, check: bool) -> Option<Claimer> {
        Some(match claimer {
            Claimer::Looking { way, free } if way == WAYS => {
                free.map_or(Claimer::Lost, |free| Claimer::Swapping { free })
            }
            Claimer::Looking { way, free } => match words[way] {
                Word::Ours => Claimer::Lost,
                Word::Free => Claimer::Looking { way: way + 1, free: Some(way) },
                Word::Other => Claimer::Looking { way: way + 1, free },
            },
            Claimer::Swapping { free } if words[free] == Word::Free => {
                words[free] = Word::Ours;
                if check { Claimer::Checking { own: free, way: 0 } } else { Claimer::Owning }
            }
            Claimer::Swapping { .. } => Claimer::Lost,
            Claimer::Checking { way, .. } if way == WAYS => Claimer::Owning,
            Claimer::Checking { own, way } if way != own && words[way] == Word::Ours => Claimer::Yielding { own },
            Claimer::Checking { own, way } => Claimer::Checking { own, way: way + 1 },
            Claimer::Yielding { own } => {
                words[own] = Word::Free;
                Claimer::Lost
            }
            Claimer::Owning | Claimer::Lost => return None,
        })
    }

    /// Whether any interleaving ends with two owners.
    fn two_owners_are_possible(check: bool) -> bool {
        let start = Claimer::Looking { way: 0, free: None };
        let mut seen: BTreeSet<State> = BTreeSet::new();
        let mut open: Vec<State> = vec![([Word::Free, Word::Other], [start; 2]), ([Word::Free; WAYS], [start; 2])];
        while let Some((words, claimers)) = open.pop() {
            if !seen.insert((words, claimers)) {
                continue;
            }
            if claimers == [Claimer::Owning; 2] {
                return true;
            }
            for which in 0..2 {
                let (mut words, mut claimers) = (words, claimers);
                if let Some(next) = step(&mut words, claimers[which], check) {
                    claimers[which] = next;
                    open.push((words, claimers));
                }
            }
            for way in 0..WAYS {
                if words[way] == Word::Other {
                    let mut words = words;
                    words[way] = Word::Free;
                    open.push((words, claimers));
                }
            }
        }
        false
    }

    #[test]
    fn no_interleaving_gives_a_tuple_to_two_owners() {
        assert!(!two_owners_are_possible(true));
        // The model would find them: without the look after the swap, two ways can hold one tuple.
        assert!(two_owners_are_possible(false));
    }
}
