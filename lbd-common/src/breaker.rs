//! When the datapath goes around a backend by itself: the agent's probes may be dead.
//!
//! A backend with three new connections unanswered, none answered for three seconds, is skipped, except for one trial a second; any SYN-ACK
//! brings it back. A single client whose answer is lost does not skip a backend: each of its SYNs is one connection.

use crate::abi::BackendUse;
use crate::tcp::elapsed;

/// Unanswered connections before a backend is skipped.
pub const UNANSWERED: u32 = 3;
/// Seconds without an answer before a backend is skipped.
pub const SECONDS: u32 = 3;

/// What to do with a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Take the backend.
    Take,
    /// Take it, and note that this is the second's trial.
    Try,
    /// Look for another.
    Skip,
}

/// Whether a new connection may go to the backend. `second` is one second in ticks.
#[inline(always)]
pub const fn choose(used: &BackendUse, now: u32, second: u32) -> Choice {
    if used.unanswered < UNANSWERED
        || elapsed(now, used.since) < SECONDS * second
        || elapsed(now, used.answered) < SECONDS * second
    {
        Choice::Take
    } else if elapsed(now, used.trial) >= second {
        Choice::Try
    } else {
        Choice::Skip
    }
}

/// Whether a SYN that is sent again after 900 ms without an answer should go elsewhere: the backend answered nobody for a second.
#[inline(always)]
pub const fn should_move(used: &BackendUse, first_syn: u32, now: u32, second: u32) -> bool {
    elapsed(now, first_syn) >= second - second / 10 && elapsed(now, used.answered) >= second
}

/// What a backend is known for once it owes one more answer. Ticks that are so long ago that the clock's turn would soon make them look like the
/// future move up: a backend without traffic for months, or that was never asked, is one that has not answered for long.
#[inline(always)]
pub const fn owing(used: &BackendUse, now: u32) -> BackendUse {
    BackendUse {
        answered: not_before(used.answered, now),
        unanswered: used.unanswered.saturating_add(1),
        since: if used.unanswered == 0 { now } else { not_before(used.since, now) },
        trial: not_before(used.trial, now),
    }
}

/// A quarter of the clock's turn ago, for ticks before that.
#[inline(always)]
const fn not_before(tick: u32, now: u32) -> u32 {
    const LONG: u32 = 1 << 30;
    /// Another CPU's clock may be ahead.
    const AHEAD: u32 = 4;
    let ago = now.wrapping_sub(tick);
    if ago > LONG && ago < 0u32.wrapping_sub(AHEAD) { now.wrapping_sub(LONG) } else { tick }
}

/// One second in ticks, at least one.
#[inline(always)]
pub const fn second(ticks_per_second_256: u32) -> u32 {
    if ticks_per_second_256 < 256 { 1 } else { ticks_per_second_256 >> 8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u32 = 62;

    #[test]
    fn three_unanswered_for_three_seconds_skip_a_backend_but_for_a_trial_a_second() {
        let now = 10_000;
        let silent =
            BackendUse { answered: now - 4 * SECOND, unanswered: 3, since: now - 3 * SECOND, trial: now - SECOND };
        assert_eq!(choose(&silent, now, SECOND), Choice::Try);
        assert_eq!(choose(&BackendUse { trial: now, ..silent }, now, SECOND), Choice::Skip);
        assert_eq!(choose(&BackendUse { unanswered: 2, ..silent }, now, SECOND), Choice::Take);
        assert_eq!(choose(&BackendUse { since: now - 2 * SECOND, ..silent }, now, SECOND), Choice::Take);
        assert_eq!(choose(&BackendUse { answered: now - SECOND, ..silent }, now, SECOND), Choice::Take);
        assert_eq!(choose(&BackendUse::ZERO, now, SECOND), Choice::Take);
    }

    #[test]
    fn a_backend_that_never_answered_is_gone_around_at_any_tick() {
        for start in [10_000, 0x4000_0000, 0x7fff_ff00, 0x8000_0010, 0x9000_0000, u32::MAX - 100] {
            let mut used = BackendUse::ZERO;
            for _ in 0..UNANSWERED {
                assert_eq!(choose(&used, start, SECOND), Choice::Take, "{start:#x}");
                used = owing(&used, start);
            }
            assert!(should_move(&used, start, start.wrapping_add(SECOND), SECOND), "{start:#x}");
            let later = start.wrapping_add(SECONDS * SECOND);
            assert_eq!(choose(&used, later, SECOND), Choice::Try, "{start:#x}");
            used.trial = later;
            assert_eq!(choose(&used, later.wrapping_add(1), SECOND), Choice::Skip, "{start:#x}");
            assert_eq!(choose(&used, later.wrapping_add(SECOND), SECOND), Choice::Try, "{start:#x}");
        }
        // Another CPU's tick, a little ahead, is no long ago.
        let ahead = BackendUse { answered: 101, ..BackendUse::ZERO };
        assert_eq!(owing(&ahead, 100).answered, 101);
    }

    #[test]
    fn a_syn_moves_on_after_900_ms_only_from_a_backend_that_answers_nobody() {
        let now = 10_000;
        let silent = BackendUse { answered: now - SECOND, ..BackendUse::ZERO };
        assert!(should_move(&silent, now - 56, now, SECOND));
        assert!(!should_move(&silent, now - 55, now, SECOND));
        assert!(!should_move(&BackendUse { answered: now - SECOND + 1, ..silent }, now - 56, now, SECOND));
    }
}
