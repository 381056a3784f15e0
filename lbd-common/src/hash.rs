//! The keyed hash behind backend choice, SNAT ports and half-open sets.
//!
//! SipHash-1-3's round (Aumasson and Bernstein) on 64-bit words: keyed, so that clients who don't know the seed cannot aim at a
//! backend or a set; no multiplication wider than 64 bits and no tables, so that it is cheap in BPF.

use crate::abi::{Address, FlowKey, Tuple};

/// A secret seed.
pub type Seed = [u64; 2];

/// SipHash's state.
struct Sip([u64; 4]);

impl Sip {
    #[inline(always)]
    const fn round(&mut self) {
        let [mut v0, mut v1, mut v2, mut v3] = self.0;
        v0 = v0.wrapping_add(v1);
        v1 = v1.rotate_left(13) ^ v0;
        v0 = v0.rotate_left(32);
        v2 = v2.wrapping_add(v3);
        v3 = v3.rotate_left(16) ^ v2;
        v0 = v0.wrapping_add(v3);
        v3 = v3.rotate_left(21) ^ v0;
        v2 = v2.wrapping_add(v1);
        v1 = v1.rotate_left(17) ^ v2;
        v2 = v2.rotate_left(32);
        self.0 = [v0, v1, v2, v3];
    }

    #[inline(always)]
    const fn word(&mut self, input: u64) {
        self.0[3] ^= input;
        self.round();
        self.0[0] ^= input;
    }

    #[inline(always)]
    const fn finish(mut self) -> u64 {
        self.0[2] ^= 0xff;
        self.round();
        self.round();
        self.round();
        self.0[0] ^ self.0[1] ^ self.0[2] ^ self.0[3]
    }
}

/// SipHash-1-3 over whole words. The caller fixes the number of words for each use and gives each use its own `domain`.
#[inline(always)]
pub const fn hash_words<const N: usize>(seed: &Seed, domain: u64, words: [u64; N]) -> u64 {
    let mut sip = Sip([
        seed[0] ^ 0x736f_6d65_7073_6575,
        seed[1] ^ 0x646f_7261_6e64_6f6d,
        seed[0] ^ 0x6c79_6765_6e65_7261 ^ domain,
        seed[1] ^ 0x7465_6462_7974_6573,
    ]);
    let mut index = 0;
    while index < N {
        sip.word(words[index]);
        index += 1;
    }
    sip.finish()
}

const DOMAIN_FLOW: u64 = 1;
const DOMAIN_SOURCE: u64 = 2;
const DOMAIN_LOOKUP: u64 = 3;

/// What keys of the IPv6 flow table are mixed with ([`crate::abi::Lookup6`]): two words for the prefixes, two for the interface identifiers.
pub type LookupSecret = [u64; 4];

/// The words that follow from the seed. Who learns them learns nothing of the seed, nor of one pair from the other.
pub const fn lookup_secret(seed: &Seed) -> LookupSecret {
    let mut secret = [0; 4];
    let mut index = 0;
    while index < secret.len() {
        secret[index] = hash_words(seed, DOMAIN_LOOKUP, [index as u64]);
        index += 1;
    }
    secret
}

/// An address as two words; IPv4 as the first.
#[inline(always)]
fn words<A: Address>(address: A) -> (u64, u64) {
    let [a, b, c, d] = address.quads();
    (u64::from(a) << 32 | u64::from(b), u64::from(c) << 32 | u64::from(d))
}

/// Both IPv4 addresses as one word.
#[inline(always)]
fn address_word<A: Address>(tuple: &Tuple<A>) -> u64 {
    u64::from(tuple.source_be.quads()[0]) << 32 | u64::from(tuple.destination_be.quads()[0])
}

#[inline(always)]
fn port_word<A: Address>(tuple: &Tuple<A>, segment: u16, protocol: u8) -> u64 {
    u64::from(tuple.source_port_be) << 48
        | u64::from(tuple.destination_port_be) << 32
        | u64::from(segment) << 16
        | u64::from(protocol)
}

/// Hash of a client's flow: client address and port, VIP, port, protocol, segment. Low half: backend; all of it: SNAT port.
#[inline(always)]
pub fn flow<A: Address>(seed: &Seed, key: &FlowKey<A>) -> u64 {
    let ports = port_word(&key.tuple, key.segment, key.protocol);
    if A::IS_V6 {
        let (a, b) = words(key.tuple.source_be);
        let (c, d) = words(key.tuple.destination_be);
        hash_words(seed, DOMAIN_FLOW, [a, b, c, d, ports])
    } else {
        hash_words(seed, DOMAIN_FLOW, [address_word(&key.tuple), ports])
    }
}

/// Hash of a client's address only: the same choice for all ports and VIPs that share a table (HAProxy's `balance source`).
#[inline(always)]
pub fn source<A: Address>(seed: &Seed, client: A) -> u64 {
    if A::IS_V6 {
        let (a, b) = words(client);
        hash_words(seed, DOMAIN_SOURCE, [a, b])
    } else {
        hash_words(seed, DOMAIN_SOURCE, [u64::from(client.quads()[0])])
    }
}

/// Hash of a reverse tuple (backend, SNAT address and port): the owner word of a half-open record. Never zero.
///
/// Not keyed: the SNAT port in it is chosen by the keyed hash, so that no client can aim; two multiplications do (the finalizer of
/// MurmurHash3, Appleby).
#[inline(always)]
pub fn reverse<A: Address>(to: &Tuple<A>, segment: u16, protocol: u8) -> u32 {
    let ports = port_word(to, segment, protocol);
    let mut mixed = if A::IS_V6 {
        let (a, b) = words(to.source_be);
        let (c, d) = words(to.destination_be);
        let mut mixed = 0u64;
        for word in [a, b, c, d] {
            mixed = (mixed ^ (mixed >> 33) ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
        }
        mixed
    } else {
        address_word(to).wrapping_mul(0xff51_afd7_ed55_8ccd)
    };
    mixed = (mixed ^ (mixed >> 33) ^ ports).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    ((mixed >> 32) as u32) | 1
}

/// Slot of a lookup table with `size` slots.
#[inline(always)]
pub const fn slot(hash: u64, size: u32) -> u32 {
    (((hash & 0xffff_ffff) * size as u64) >> 32) as u32
}

/// Number of hashed tries for a SNAT port before the scan.
pub const PORT_TRIES: u32 = 16;

/// The SNAT port of try number `attempt` (0 ≤ `attempt` < [`PORT_TRIES`]), in `first..=last`.
#[inline(always)]
pub const fn snat_port(hash: u64, attempt: u32, first: u16, last: u16) -> u16 {
    let range = (last as u32).wrapping_sub(first as u32).wrapping_add(1) & 0x1_ffff;
    let mut mixed = (hash >> 16).wrapping_add((attempt as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed ^= mixed >> 29;
    mixed = mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^= mixed >> 32;
    first.wrapping_add((((mixed & 0xffff_ffff) * range as u64) >> 32) as u16)
}

/// Set of half-open records for a SNAT port. `sets` is a power of two.
#[inline(always)]
pub const fn half_open_set(port: u16, sets: u32) -> u32 {
    ((port as u32).wrapping_mul(0x9e37_79b1) >> 7) & sets.wrapping_sub(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::abi::{FlowKey4, FlowKey6, Tuple4};

    use super::*;

    proptest! {
        #[test]
        fn ports_stay_in_their_range(hash: u64, attempt in 0u32..PORT_TRIES, first in 1024u16..60000, span in 0u16..5000) {
            let port = snat_port(hash, attempt, first, first + span);
            prop_assert!((first..=first + span).contains(&port));
        }

        #[test]
        fn slots_stay_in_their_table(hash: u64, size in 1u32..70000) {
            prop_assert!(slot(hash, size) < size);
        }
    }

    #[test]
    fn another_seed_gives_another_choice() {
        let key = FlowKey4 { protocol: 6, ..FlowKey4::ZERO };
        assert_ne!(flow(&[1, 2], &key), flow(&[1, 3], &key));
        assert_ne!(flow(&[1, 2], &key), flow(&[2, 2], &key));
    }

    #[test]
    fn every_word_of_an_ipv6_address_counts() {
        let base = FlowKey6 { protocol: 6, ..FlowKey6::ZERO };
        for word in 0..4 {
            let mut key = base;
            key.tuple.source_be[word] = 1;
            assert_ne!(flow(&[1, 2], &key), flow(&[1, 2], &base));
            assert_ne!(source(&[1, 2], key.tuple.source_be), source(&[1, 2], base.tuple.source_be));
            assert_ne!(reverse(&key.tuple, 1, 6), reverse(&base.tuple, 1, 6));
            let mut key = base;
            key.tuple.destination_be[word] = 1;
            assert_ne!(flow(&[1, 2], &key), flow(&[1, 2], &base));
            assert_ne!(reverse(&key.tuple, 1, 6), reverse(&base.tuple, 1, 6));
        }
    }

    #[test]
    fn tries_differ_and_spread() {
        let mut seen = std::collections::BTreeSet::new();
        for attempt in 0..PORT_TRIES {
            seen.insert(snat_port(0x0123_4567_89ab_cdef, attempt, 1024, 32767));
        }
        assert!(seen.len() >= 15, "{seen:?}");
        let mut buckets = [0u32; 16];
        for client in 0..160_000u32 {
            let key =
                FlowKey4 { tuple: Tuple4 { source_be: client.to_be(), ..Tuple4::ZERO }, protocol: 6, ..FlowKey4::ZERO };
            let port = snat_port(flow(&[7, 9], &key), 0, 1024, 32767);
            buckets[usize::from(port - 1024) * 16 / 31744] += 1;
        }
        assert!(buckets.iter().all(|&count| (9_500..10_500).contains(&count)), "{buckets:?}");
    }
}
