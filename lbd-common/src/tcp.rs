//! Sequence arithmetic and the life of a flow.

use crate::abi::{FLOW_FIN, FLOW_PEER_FIN, FLOW_REPLIED, FLOW_RESET, FLOW_UDP, Settings, Timeouts};

/// FIN.
pub const FIN: u8 = 1 << 0;
/// SYN.
pub const SYN: u8 = 1 << 1;
/// RST.
pub const RST: u8 = 1 << 2;
/// ACK.
pub const ACK: u8 = 1 << 4;

/// How far from the tracked sequence number a packet may be and still change a flow: the largest window that hosts use by
/// default, rather than what each flow has negotiated, which a balancer that missed the handshake would not know.
pub const WINDOW: u32 = 1 << 20;

/// Whether a sequence number is within [`WINDOW`] of the reference, either side.
#[inline(always)]
pub const fn near(sequence: u32, reference: u32) -> bool {
    sequence.wrapping_sub(reference).wrapping_add(WINDOW) <= 2 * WINDOW
}

/// Whether `sequence` is after the reference (RFC 9293 §3.4, modulo 2^32).
#[inline(always)]
pub const fn after(sequence: u32, reference: u32) -> bool {
    (sequence.wrapping_sub(reference) as i32) > 0
}

/// Whether a flag combination is one that TCP sends. SYN with FIN or RST, and no flags at all, are scans.
#[inline(always)]
pub const fn valid_flags(flags: u8) -> bool {
    flags & (SYN | RST | ACK | FIN) != 0
        && !(flags & SYN != 0 && flags & (FIN | RST) != 0)
        && flags & (FIN | RST) != FIN | RST
}

/// Whether both ends, or a reset, have ended the connection.
#[inline(always)]
pub const fn closed(state: u16) -> bool {
    state & FLOW_RESET != 0 || state & (FLOW_FIN | FLOW_PEER_FIN) == FLOW_FIN | FLOW_PEER_FIN
}

/// Ticks without a packet after which a flow is over. A flow closed by FIN is kept at least as long as its reverse tuple must stay
/// away from other clients (`tombstone`), so that both halves end together. `used` of `limit` flows are the tenant's.
#[inline(always)]
pub const fn lifetime(state: u16, timeouts: &Timeouts, settings: &Settings, used: u64, limit: u32) -> u32 {
    if state & FLOW_UDP != 0 {
        let timeout = if state & FLOW_REPLIED != 0 { timeouts.udp_replied } else { timeouts.udp_unreplied };
        shrunk(timeout, used, limit)
    } else if state & FLOW_RESET != 0 {
        shrunk(timeouts.tcp_reset, used, limit)
    } else if closed(state) {
        let timeout = shrunk(timeouts.tcp_fin, used, limit);
        if timeout > settings.tombstone { timeout } else { settings.tombstone }
    } else {
        timeouts.tcp_established
    }
}

/// A timeout that gets shorter the more of its limit a tenant uses: whole up to a half, then in equal steps, an eighth at the limit.
/// Limit 0 = none. `used` is signed: an end may be counted before its beginning.
#[inline(always)]
pub const fn shrunk(timeout: u32, used: u64, limit: u32) -> u32 {
    let half = (limit / 2) as u64;
    if limit < 2 || (used as i64) <= half as i64 {
        return timeout;
    }
    let over = if used >= limit as u64 { half } else { used - half };
    let eighths = 8 - over * 7 / if half == 0 { 1 } else { half };
    (timeout as u64 * eighths / 8) as u32
}

/// Whether a limit is used up; 0 = none. `used` is signed: an end that is counted before its beginning makes it wrap, and is below every
/// limit.
#[inline(always)]
pub const fn reached(used: u64, limit: u32) -> bool {
    limit != 0 && used as i64 >= limit as i64
}

/// Ticks from `then` to `now`; 0 if another CPU's clock is a tick ahead.
#[inline(always)]
pub const fn elapsed(now: u32, then: u32) -> u32 {
    let ticks = now.wrapping_sub(then);
    if ticks > u32::MAX / 2 { 0 } else { ticks }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_zero_is_none_and_a_count_that_has_wrapped_is_below_every_limit() {
        assert!(!reached(u64::MAX / 2, 0));
        assert!(!reached(9, 10) && reached(10, 10) && reached(11, 10));
        assert!(!reached(0u64.wrapping_sub(1), 1));
    }

    #[test]
    fn near_and_after_wrap() {
        assert!(near(5, u32::MAX - 5) && near(u32::MAX - 5, 5));
        assert!(near(WINDOW, 0) && !near(WINDOW + 1, 0));
        assert!(after(5, u32::MAX - 5) && !after(u32::MAX - 5, 5) && !after(7, 7));
    }

    #[test]
    fn flags_that_no_tcp_sends_are_invalid() {
        for good in [SYN, SYN | ACK, ACK, FIN | ACK, RST, RST | ACK, ACK | 8] {
            assert!(valid_flags(good), "{good:#x}");
        }
        for bad in [0, SYN | FIN, SYN | RST, FIN | RST, 8, SYN | FIN | ACK] {
            assert!(!valid_flags(bad), "{bad:#x}");
        }
    }

    #[test]
    fn lifetimes() {
        let settings = Settings { tombstone: 75, ..Settings::ZERO };
        let timeouts = Timeouts {
            tcp_established: 1000,
            tcp_half_open: 30,
            tcp_fin: 60,
            tcp_reset: 10,
            udp_unreplied: 30,
            udp_replied: 180,
        };
        let life = |state, used| lifetime(state, &timeouts, &settings, used, 100);
        assert_eq!(life(0, 0), 1000);
        assert_eq!(life(0, 100), 1000, "established flows are never cut short");
        assert_eq!(life(FLOW_FIN, 0), 1000);
        assert_eq!(life(FLOW_FIN | FLOW_PEER_FIN, 0), 75);
        assert_eq!(life(FLOW_RESET | FLOW_FIN, 0), 10);
        assert_eq!(life(FLOW_UDP, 0), 30);
        assert_eq!(life(FLOW_UDP | FLOW_REPLIED, 50), 180);
        assert_eq!(life(FLOW_UDP | FLOW_REPLIED, 100), 22);
        assert_eq!(life(FLOW_FIN | FLOW_PEER_FIN, 100), 75, "a tombstone is never cut short");
    }

    #[test]
    fn timeouts_shrink_with_the_second_half_of_the_limit() {
        assert_eq!(shrunk(800, 0, 0), 800);
        assert_eq!(shrunk(800, u64::MAX, 100), 800, "an end counted before its beginning");
        assert_eq!(shrunk(800, 50, 100), 800);
        assert_eq!(shrunk(800, 75, 100), 500);
        assert_eq!(shrunk(800, 100, 100), 100);
        assert_eq!(shrunk(800, 1_000_000, 100), 100);
        let mut last = 800;
        for used in 0..=100 {
            let now = shrunk(800, used, 100);
            assert!(now <= last);
            last = now;
        }
    }

    #[test]
    fn clocks_may_differ_by_a_tick() {
        assert_eq!(elapsed(10, 11), 0);
        assert_eq!(elapsed(3, u32::MAX - 1), 5);
    }
}
