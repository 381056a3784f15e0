//! Sequence arithmetic and the life of a flow.

use crate::abi::{FLOW_FIN, FLOW_PEER_FIN, FLOW_RESET, Settings};

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
/// away from other clients (`tombstone`), so that both halves end together.
#[inline(always)]
pub const fn lifetime(state: u16, settings: &Settings) -> u32 {
    if state & FLOW_RESET != 0 {
        settings.tcp_reset
    } else if closed(state) {
        if settings.tcp_fin > settings.tombstone { settings.tcp_fin } else { settings.tombstone }
    } else {
        settings.tcp_established
    }
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
        let settings = Settings { tcp_established: 1000, tcp_fin: 60, tombstone: 75, tcp_reset: 10, ..Settings::ZERO };
        assert_eq!(lifetime(0, &settings), 1000);
        assert_eq!(lifetime(FLOW_FIN, &settings), 1000);
        assert_eq!(lifetime(FLOW_FIN | FLOW_PEER_FIN, &settings), 75);
        assert_eq!(lifetime(FLOW_RESET | FLOW_FIN, &settings), 10);
        assert_eq!(elapsed(10, 11), 0);
        assert_eq!(elapsed(3, u32::MAX - 1), 5);
    }
}
