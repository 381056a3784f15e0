//! What the XDP programs and the agent must agree on, and all packet logic that can be wrong.
//!
//! `no_std`, without I/O and without a dependency on BPF crates, so that every line here is tested on the host.
//!
//! | module | holds |
//! |---|---|
//! | [`abi`] | keys and values of the pinned maps, map names, program constants |
//! | [`reason`] | why a packet was not forwarded, and the verdict for each reason |
//! | [`breaker`] | when the datapath goes around a backend by itself |
//! | [`checksum`] | RFC 1624 incremental updates |
//! | [`half_open`] | how half-open records are claimed and found |
//! | [`hash`] | the keyed hash behind backend and port choice |
//! | [`icmp`] | ICMP errors |
//! | [`maglev`] | consistent-hash tables |
//! | [`neighbour`] | neighbour discovery |
//! | [`reserve`] | what a tenant may still do when a common budget is used up |
//! | [`packet`] | header offsets and parsing |
//! | [`tcp`] | sequence arithmetic and the flow state machine |

#![cfg_attr(not(test), no_std)]

pub mod abi;
pub mod breaker;
pub mod checksum;
pub mod half_open;
pub mod hash;
pub mod icmp;
pub mod maglev;
pub mod neighbour;
pub mod packet;
pub mod reason;
pub mod reserve;
pub mod tcp;
