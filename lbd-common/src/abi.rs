//! The ABI of the pinned maps: every key and value, in the byte order that its name or type says.
//!
//! Addresses and ports that come from packets are stored as they are on the wire (`[u8; N]`, or an integer named `_be`);
//! everything else is in host order. No enums, bools or implicit padding: a map value may hold any bytes. The size and
//! the offsets of each struct are asserted below; changing one means a new [`ABI_VERSION`].

use core::mem::{align_of, offset_of, size_of, zeroed};
use core::net::{Ipv4Addr, SocketAddrV4};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of everything in this module. Part of the pin path, and stored in [`Settings::abi`].
pub const ABI_VERSION: u32 = 1;

/// Names of maps and programs, as the kernel and the pins know them (at most 15 characters).
pub mod names {
    /// Hash [`super::FlowKey4`] → [`super::Flow4`]: both halves of every proven IPv4 flow.
    pub const FLOWS4: &str = "flows4";
    /// Queue of [`super::AgeEntry4`]: the clock hand that ages flows without the agent.
    pub const AGEING4: &str = "ageing4";
    /// Array of [`super::HalfOpenSet4`]: connections that the client has not proven yet.
    pub const HALF_OPEN4: &str = "half_open4";
    /// Array of [`super::HintLine`]: where a half-open connection went whose first SNAT port was taken.
    pub const HINTS4: &str = "hints4";
    /// Array of [`super::Segment`], index [`super::segment_index`].
    pub const SEGMENTS: &str = "segments";
    /// Hash [`super::AddressKey`] → [`super::LocalAddress`]: VIPs, SNAT addresses, the host's own, backends and their ports.
    pub const ADDRESSES: &str = "addresses";
    /// Hash [`super::FrontendKey`] → [`super::Frontend`].
    pub const FRONTENDS: &str = "frontends";
    /// Array of [`super::MaglevChunk`]: all lookup tables, one after another.
    pub const MAGLEV: &str = "maglev";
    /// Array of [`super::Backend`].
    pub const BACKENDS: &str = "backends";
    /// Array of [`super::NextHop`].
    pub const NEXT_HOPS: &str = "next_hops";
    /// Array of [`super::Tenant`]: limits, written by the agent.
    pub const TENANTS: &str = "tenants";
    /// Array of [`super::TenantUse`]: what is in use, written by the datapath.
    pub const TENANT_USE: &str = "tenant_use";
    /// Array with one [`super::Settings`].
    pub const SETTINGS: &str = "settings";
    /// Hash: ids of our programs at NICs and, with [`super::OWN_INTERFACE`], indexes of those NICs.
    pub const OWN: &str = "own";
    /// Per-CPU array with one [`super::Scratch`]: what a stage hands to the next.
    pub const SCRATCH: &str = "scratch";
    /// Per-CPU array of `u64`, index `tenant * REASON_SLOTS + reason`.
    pub const REASONS: &str = "reasons";
    /// Array of [`super::FrontendOwner`], index = frontend id.
    pub const FRONTEND_OWNERS: &str = "frontend_owner";
    /// Per-CPU array of [`super::Traffic`], index [`super::traffic_index`].
    pub const TRAFFIC: &str = "traffic";
    /// Per-CPU array of [`super::FrontendEvents`], index = frontend id.
    pub const FRONTEND_EVENTS: &str = "frontend_event";
    /// Program array: the stages off the hot path, index = the `STAGE_*` constants.
    pub const STAGES: &str = "stages";
    /// All maps that the NICs' loads share: all but [`STAGES`], whose programs know their NIC.
    pub const SHARED: [&str; 19] = [
        FLOWS4,
        AGEING4,
        HALF_OPEN4,
        HINTS4,
        SEGMENTS,
        ADDRESSES,
        FRONTENDS,
        MAGLEV,
        BACKENDS,
        NEXT_HOPS,
        TENANTS,
        TENANT_USE,
        SETTINGS,
        FRONTEND_OWNERS,
        TRAFFIC,
        FRONTEND_EVENTS,
        REASONS,
        SCRATCH,
        OWN,
    ];
    /// The XDP program at the NIC.
    pub const PROGRAM: &str = "lbd_edge";
    /// Control program, run by `BPF_PROG_TEST_RUN`: marks flows and reads the kernel's clock.
    pub const CONTROL: &str = "lbd_control";
}

/// Ethernet address as on the wire.
pub type Mac = [u8; 6];

/// Bits that a clock tick drops from jiffies: one tick is 16 jiffies, so that a `u32` of ticks spans years.
///
/// `bpf_jiffies64` is inlined by the verifier to one load; `bpf_ktime_get_ns` costs as much as a map look-up.
pub const TICK_SHIFT: u32 = 4;

/// Entries of [`names::HALF_OPEN4`], a power of two: 65,536 half-open connections.
pub const HALF_OPEN_SETS: u32 = 8192;
/// Entries of [`names::HINTS4`], a power of two.
pub const HINT_LINES: u32 = 4096;
/// Entries of [`names::FLOWS4`] and [`names::AGEING4`] by default.
pub const FLOW_ENTRIES: u32 = flow_entries(262_144);
/// Number of VLAN ids per NIC in [`names::SEGMENTS`]; VID 0 is untagged.
pub const VLANS: u32 = 4096;
/// NICs that one agent can attach to.
pub const MAX_NICS: u32 = 16;
/// Entries of [`names::SEGMENTS`].
pub const SEGMENT_SLOTS: u32 = VLANS * MAX_NICS;
/// Entries of [`names::TENANTS`]. Index 0 is "no tenant known".
pub const MAX_TENANTS: u32 = 1024;
/// Slots per tenant in [`names::REASONS`].
pub const REASON_SLOTS: u32 = 64;
/// Entries of [`names::FRONTENDS`] and [`names::FRONTEND_EVENTS`]; ids are `u16`.
pub const MAX_FRONTENDS: u32 = 65_536;
/// Entries of [`names::BACKENDS`]; ids are `u16`, 0 is never a backend.
pub const MAX_BACKENDS: u32 = 65_536;
/// Entries of [`names::NEXT_HOPS`]; index 0 is "unresolved": packets to it are dropped.
pub const MAX_NEXT_HOPS: u32 = 65_536;
/// Entries of [`names::ADDRESSES`].
pub const MAX_ADDRESSES: u32 = 65_536;
/// Entries of [`names::OWN`]: for each NIC its index, its program and the one that replaces it.
pub const MAX_OWN: u32 = 4 * MAX_NICS;
/// Bit that tells interface indexes from program ids in [`names::OWN`].
pub const OWN_INTERFACE: u32 = 1 << 31;
/// Lookup slots in one [`MaglevChunk`].
pub const CHUNK_SLOTS: u32 = 32;
/// Entries of [`names::MAGLEV`]: 4 MiB, two million slots.
pub const MAGLEV_CHUNKS: u32 = 65_536;

/// Entries of [`names::FLOWS4`] for `max_flows` flows: two halves each.
///
/// The kernel gives a hash as many buckets as entries, rounded up to a power of two. A table that would fill its buckets by more than
/// seven eighths gets one entry more than they are, and so twice the buckets, 16 bytes each: measured with a million flows
/// in two million entries, a look-up in the full table takes 240 ns instead of 350.
pub const fn flow_entries(max_flows: u32) -> u32 {
    let halves = max_flows.saturating_mul(2);
    match halves.checked_next_power_of_two() {
        Some(buckets) if halves > buckets - buckets / 8 => buckets + 1,
        Some(_) | None => halves,
    }
}

/// Index into [`names::SEGMENTS`] of a NIC's slot (0 ≤ `nic` < [`MAX_NICS`]) and VLAN id.
pub const fn segment_index(nic: u32, vlan: u16) -> u32 {
    nic * VLANS + (vlan as u32 & (VLANS - 1))
}

macro_rules! abi_struct {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$field_meta:meta])* pub $field:ident: $type:ty,)* }
     size $size:literal align $align:literal offsets { $($checked:ident: $offset:literal),* $(,)? }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable, KnownLayout)]
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)* }

        impl $name {
            /// All bytes zero.
            // SAFETY: `FromBytes` is derived: any bytes are valid.
            pub const ZERO: Self = unsafe { zeroed() };
        }

        const _: () = assert!(size_of::<$name>() == $size && align_of::<$name>() == $align);
        $(const _: () = assert!(offset_of!($name, $checked) == $offset);)*

        // SAFETY: `repr(C)`, `Copy`, and zerocopy's derives have proven that there is no padding and that any bytes are valid.
        #[cfg(feature = "user")]
        unsafe impl aya::Pod for $name {}
    };
}

abi_struct! {
    /// Addresses and ports of one direction, as on the wire.
    pub struct Tuple4 {
        /// Source address.
        pub source_be: u32,
        /// Destination address.
        pub destination_be: u32,
        /// Source port.
        pub source_port_be: u16,
        /// Destination port.
        pub destination_port_be: u16,
    }
    size 12 align 4 offsets { source_be: 0, destination_be: 4, source_port_be: 8, destination_port_be: 10 }
}

abi_struct! {
    /// Key of [`names::FLOWS4`]: one direction, in the segment it arrives on.
    pub struct FlowKey4 {
        /// Addresses and ports as they arrive.
        pub tuple: Tuple4,
        /// Segment id ([`Segment::id`]).
        pub segment: u16,
        /// IP protocol number.
        pub protocol: u8,
        /// Zero.
        pub pad: u8,
    }
    size 16 align 4 offsets { tuple: 0, segment: 12, protocol: 14 }
}

abi_struct! {
    /// One half of a flow: everything that rewriting a packet needs, in one cache line.
    ///
    /// The kernel keeps 48 bytes before the key, so key and value each start a cache line. `tuple` and `segment` repeat the key: a
    /// hash element can be recycled under a reader, who compares them before it trusts `to`. Only BPF code writes a live
    /// value. The forward half (client → backend) and the reverse half (backend → client) name each other through `to`.
    pub struct Flow4 {
        /// The key's addresses and ports.
        pub tuple: Tuple4,
        /// The key's segment.
        pub segment: u16,
        /// Index into [`names::NEXT_HOPS`].
        pub next_hop: u16,
        /// Addresses and ports after rewriting.
        pub to: Tuple4,
        /// Tick of the last packet in this direction.
        pub last_seen: u32,
        /// Bytes of IP packets in this direction.
        pub bytes: u64,
        /// Packets in this direction, low 32 bits.
        pub packets: u32,
        /// Highest sequence number sent in this direction, plus one (host order).
        pub sequence: u32,
        /// Last acknowledgement number sent in this direction (host order).
        pub acknowledged: u32,
        /// Forward half: `created` tick (4 bytes, native order), then backend id (2 bytes). Reverse half: the client's MAC.
        pub own: [u8; 6],
        /// Frontend id.
        pub frontend: u16,
        /// Packets in this direction, high 16 bits.
        pub packets_high: u16,
        /// `FLOW_*` bits.
        pub state: u16,
    }
    size 64 align 8 offsets {
        tuple: 0, segment: 12, next_hop: 14, to: 16, last_seen: 28, bytes: 32, packets: 40, sequence: 44, acknowledged: 48,
        own: 52, frontend: 58, packets_high: 60, state: 62
    }
}

/// [`Flow4::state`]: this half goes from backend to client.
pub const FLOW_REVERSE: u16 = 1 << 0;
/// [`Flow4::state`]: an in-window FIN was seen in this direction.
pub const FLOW_FIN: u16 = 1 << 1;
/// [`Flow4::state`]: an in-window FIN was seen in the other direction.
pub const FLOW_PEER_FIN: u16 = 1 << 2;
/// [`Flow4::state`]: an in-window RST was seen in either direction.
pub const FLOW_RESET: u16 = 1 << 3;
/// [`Flow4::state`]: marked for removal: treated as absent, deleted when no reader can hold it any more.
pub const FLOW_DEAD: u16 = 1 << 4;
/// [`Flow4::state`]: adopted without a handshake (`adopt: takeover`).
pub const FLOW_ADOPTED: u16 = 1 << 5;
/// [`Flow4::state`]: the backend answered at least once (UDP; always set for TCP).
pub const FLOW_REPLIED: u16 = 1 << 6;

/// [`Flow4::state`]: a dead half that somebody is about to delete or to write over: whoever set the bit first.
pub const FLOW_BUSY: u16 = 1 << 7;

impl Flow4 {
    /// Forward half: tick at which the flow was promoted.
    pub const fn created(&self) -> u32 {
        u32::from_ne_bytes([self.own[0], self.own[1], self.own[2], self.own[3]])
    }

    /// Forward half: backend id.
    pub const fn backend(&self) -> u16 {
        u16::from_ne_bytes([self.own[4], self.own[5]])
    }

    /// The `own` bytes of a forward half.
    pub const fn forward_own(created: u32, backend: u16) -> [u8; 6] {
        let (tick, id) = (created.to_ne_bytes(), backend.to_ne_bytes());
        [tick[0], tick[1], tick[2], tick[3], id[0], id[1]]
    }

    /// Packets in this direction.
    pub const fn packets(&self) -> u64 {
        (self.packets_high as u64) << 32 | self.packets as u64
    }
}

abi_struct! {
    /// Entry of [`names::AGEING4`].
    pub struct AgeEntry4 {
        /// Key of the forward half.
        pub key: FlowKey4,
        /// [`Flow4::created`] of the flow meant; another value means that the tuple has been used again.
        pub created: u32,
    }
    size 20 align 4 offsets { key: 0, created: 16 }
}

/// Records in one [`HalfOpenSet4`].
pub const HALF_OPEN_WAYS: usize = 8;

abi_struct! {
    /// A connection between the client's SYN and its ACK.
    pub struct HalfOpen4 {
        /// Client → VIP, as it arrives.
        pub client: Tuple4,
        /// Segment of the client.
        pub client_segment: u16,
        /// Index of the next hop to the client.
        pub client_next_hop: u16,
        /// SNAT address → backend, as it leaves.
        pub to: Tuple4,
        /// Segment of the backend.
        pub backend_segment: u16,
        /// Index of the next hop to the backend.
        pub backend_next_hop: u16,
        /// Client's initial sequence number (host order).
        pub client_sequence: u32,
        /// Backend's initial sequence number (host order), valid if `state` has [`HALF_OPEN_ANSWERED`].
        pub backend_sequence: u32,
        /// The MAC that the SYN came from.
        pub client_mac: Mac,
        /// Backend id.
        pub backend: u16,
        /// Frontend id.
        pub frontend: u16,
        /// Tenant index.
        pub tenant: u16,
        /// Tick of the first SYN to this backend.
        pub first_syn: u32,
        /// Tick of the last packet.
        pub last_seen: u32,
        /// `HALF_OPEN_*` bits.
        pub state: u32,
    }
    size 64 align 4 offsets { client: 0, to: 16, client_sequence: 32, client_mac: 40, backend: 46, first_syn: 52, state: 60 }
}

/// [`HalfOpen4::state`]: the backend has sent a SYN-ACK.
pub const HALF_OPEN_ANSWERED: u32 = 1 << 0;
/// [`HalfOpen4::state`]: the backend refused with a RST.
pub const HALF_OPEN_REFUSED: u32 = 1 << 1;

abi_struct! {
    /// A set of half-open records, indexed by SNAT port: [`crate::hash::half_open_set`].
    ///
    /// `tags[way]` owns `records[way]`; its parts are in [`crate::half_open`]. A record is claimed by compare-and-swap of its tag, then
    /// the claimer looks whether another way holds the same reverse tuple; if so it yields. So two CPUs never both own a
    /// tuple.
    pub struct HalfOpenSet4 {
        /// Owner words.
        pub tags: [u64; HALF_OPEN_WAYS],
        /// Records.
        pub records: [HalfOpen4; HALF_OPEN_WAYS],
    }
    size 576 align 8 offsets { tags: 0, records: 64 }
}

/// Hints in one line.
pub const HINT_WAYS: usize = 8;

abi_struct! {
    /// A line of hints, indexed by the client tuple's hash; the parts of a hint are in [`crate::half_open`]. Zero is empty.
    pub struct HintLine {
        /// Hints.
        pub hints: [u64; HINT_WAYS],
    }
    size 64 align 8 offsets { hints: 0 }
}

abi_struct! {
    /// One layer-2 network on one NIC.
    pub struct Segment {
        /// Dense id, part of every flow key; 0 = this slot is not a segment of ours.
        pub id: u16,
        /// `SEGMENT_*` bits.
        pub flags: u16,
        /// MAC of the NIC: frames to another unicast MAC are not for us.
        pub mac: Mac,
        /// Tenant index if the segment belongs to exactly one tenant, else 0; for counting only.
        pub tenant: u16,
        /// Index of the next hop to off-link clients (the gateway).
        pub gateway_next_hop: u16,
        /// Index of the next hop to on-link clients ([`NEXT_HOP_ON_LINK`]).
        pub on_link_next_hop: u16,
        /// VLAN id, 0 = untagged.
        pub vlan: u16,
        /// Zero.
        pub pad: u16,
        /// On-link IPv4 prefix: network address.
        pub network4_be: u32,
        /// On-link IPv4 prefix: mask (all ones: no prefix, all clients are off-link).
        pub mask4_be: u32,
        /// Egress MTU of the NIC for IP packets.
        pub mtu: u32,
    }
    size 32 align 4 offsets { id: 0, flags: 2, mac: 4, tenant: 10, gateway_next_hop: 12, vlan: 16, network4_be: 20, mask4_be: 24, mtu: 28 }
}

/// [`Segment::flags`]: tenants' clients arrive here; the host behind is closed except for `host_access`.
pub const SEGMENT_TENANT: u16 = 1 << 0;
/// [`Segment::flags`]: the hub's nodes live here; what matches no flow is the host's own.
pub const SEGMENT_HUB: u16 = 1 << 1;

abi_struct! {
    /// Key of [`names::ADDRESSES`].
    pub struct AddressKey {
        /// IPv6 address, or IPv4 as an IPv4-mapped one (`::ffff:a.b.c.d`).
        pub address: [u8; 16],
        /// Segment id.
        pub segment: u16,
        /// 0, or with an all-zero address: a port that backends in this segment serve ([`ADDRESS_TARGET_PORT`]).
        pub port_be: u16,
    }
    size 20 align 2 offsets { address: 0, segment: 16, port_be: 18 }
}

abi_struct! {
    /// An address that means something in one segment.
    pub struct LocalAddress {
        /// `ADDRESS_*` bits.
        pub flags: u16,
        /// Tenant index (VIPs and per-tenant SNAT addresses), else 0.
        pub tenant: u16,
        /// SNAT addresses: first port of the range (host order).
        pub snat_first: u16,
        /// SNAT addresses: last port of the range (host order).
        pub snat_last: u16,
    }
    size 8 align 2 offsets { flags: 0, tenant: 2, snat_first: 4, snat_last: 6 }
}

/// [`LocalAddress::flags`]: a VIP.
pub const ADDRESS_VIP: u16 = 1 << 0;
/// [`LocalAddress::flags`]: a SNAT address.
pub const ADDRESS_SNAT: u16 = 1 << 1;
/// [`LocalAddress::flags`]: the host's own, configured on the interface.
pub const ADDRESS_HOST: u16 = 1 << 2;
/// [`LocalAddress::flags`]: answer ARP and neighbour solicitations for it (VIPs, SNAT addresses that are not the host's).
pub const ADDRESS_ANSWER: u16 = 1 << 3;
/// [`LocalAddress::flags`]: the address of a backend. What it sends from a target port to a SNAT port is a reply, never the host's.
pub const ADDRESS_BACKEND: u16 = 1 << 4;
/// [`LocalAddress::flags`]: not an address but a port that backends in the segment serve, see [`AddressKey::port_be`].
pub const ADDRESS_TARGET_PORT: u16 = 1 << 5;

abi_struct! {
    /// Key of [`names::FRONTENDS`].
    pub struct FrontendKey {
        /// VIP; IPv4 as an IPv4-mapped address.
        pub vip: [u8; 16],
        /// Destination port.
        pub port_be: u16,
        /// Segment that the client's packet arrives on.
        pub segment: u16,
        /// IP protocol number.
        pub protocol: u8,
        /// Zero.
        pub pad: [u8; 3],
    }
    size 24 align 2 offsets { vip: 0, port_be: 16, segment: 18, protocol: 20 }
}

abi_struct! {
    /// What a client connects to.
    pub struct Frontend {
        /// The key's VIP: values repeat their key, see [`Flow4`].
        pub vip: [u8; 16],
        /// SNAT address towards the backends; IPv4 as an IPv4-mapped address. All zero: no SNAT (`preserve_client`).
        pub snat: [u8; 16],
        /// The key's port.
        pub port_be: u16,
        /// The key's segment.
        pub segment: u16,
        /// The key's protocol.
        pub protocol: u8,
        /// Zero.
        pub pad: u8,
        /// Frontend id; stable while the frontend lives.
        pub id: u16,
        /// Tenant index.
        pub tenant: u16,
        /// `FRONTEND_*` bits.
        pub flags: u16,
        /// Port on the backends, unless [`Backend::port_be`] is set.
        pub target_port_be: u16,
        /// First SNAT port (host order).
        pub snat_first: u16,
        /// Last SNAT port (host order).
        pub snat_last: u16,
        /// Zero.
        pub pad2: u16,
        /// Lookup table: index of its first chunk in [`names::MAGLEV`].
        pub table: u32,
        /// Lookup table: its slots (a prime); 0 = no backend.
        pub table_size: u32,
        /// Interval array of allowed sources; 0 = all are allowed.
        pub source_ranges: u32,
    }
    size 64 align 4 offsets {
        vip: 0, snat: 16, port_be: 32, segment: 34, protocol: 36, id: 38, tenant: 40, flags: 42, target_port_be: 44, snat_first: 46,
        snat_last: 48, table: 52, table_size: 56, source_ranges: 60
    }
}

/// [`Frontend::flags`]: hash only the client's address and the VIP (`affinity: source`).
pub const FRONTEND_SOURCE_AFFINITY: u16 = 1 << 0;
/// [`Frontend::flags`]: keep the client's address (`preserve_client`).
pub const FRONTEND_PRESERVE_CLIENT: u16 = 1 << 1;
/// [`Frontend::flags`]: drop instead of refusing when there is no backend (`unserved: drop`).
pub const FRONTEND_UNSERVED_DROP: u16 = 1 << 2;

abi_struct! {
    /// Part of a lookup table: backend ids.
    pub struct MaglevChunk {
        /// Backend ids; 0 beyond the table's end.
        pub slots: [u16; CHUNK_SLOTS as usize],
    }
    size 64 align 2 offsets { slots: 0 }
}

abi_struct! {
    /// Where connections go.
    pub struct Backend {
        /// Address; IPv4 as an IPv4-mapped address.
        pub address: [u8; 16],
        /// Port, or 0 for the frontend's `target_port_be`.
        pub port_be: u16,
        /// Segment id.
        pub segment: u16,
        /// Index of the next hop.
        pub next_hop: u16,
        /// `BACKEND_*` bits.
        pub flags: u16,
    }
    size 24 align 2 offsets { address: 0, port_be: 16, segment: 18, next_hop: 20, flags: 22 }
}

/// [`Backend::flags`]: in use by the current plan.
pub const BACKEND_PRESENT: u16 = 1 << 0;
/// [`Backend::flags`]: may take new connections.
pub const BACKEND_ELIGIBLE: u16 = 1 << 1;

abi_struct! {
    /// How to reach a neighbour.
    pub struct NextHop {
        /// Destination MAC; zero = unresolved.
        pub destination: Mac,
        /// `NEXT_HOP_*` bits.
        pub flags: u16,
        /// Source MAC: the NIC's own.
        pub source: Mac,
        /// VLAN id, 0 = untagged.
        pub vlan: u16,
        /// Egress interface; 0 = this entry is unused.
        pub ifindex: u32,
        /// Largest IP packet that the interface takes.
        pub mtu: u16,
        /// Segment id: the segment in which the other half of a flow arrives.
        pub segment: u16,
    }
    size 24 align 4 offsets { destination: 0, flags: 6, source: 8, vlan: 14, ifindex: 16, mtu: 20, segment: 22 }
}

/// [`NextHop::flags`]: `destination` is valid.
pub const NEXT_HOP_RESOLVED: u16 = 1 << 0;
/// [`NextHop::flags`]: the client's MAC in the flow is the destination.
pub const NEXT_HOP_ON_LINK: u16 = 1 << 1;

abi_struct! {
    /// A tenant's limits; 0 = no limit.
    pub struct Tenant {
        /// Live flows.
        pub max_flows: u32,
        /// New connections per second.
        pub new_flows_per_second: u32,
        /// Half-open connections.
        pub max_half_open: u32,
        /// `TENANT_*` bits.
        pub flags: u32,
    }
    size 16 align 4 offsets { max_flows: 0, new_flows_per_second: 4, max_half_open: 8, flags: 12 }
}

/// [`Tenant::flags`]: `host_access` lets everything through to the host's own address.
pub const TENANT_HOST_ACCESS_OWN: u32 = 1 << 0;
/// [`Tenant::flags`]: `host_access` lets ICMP through.
pub const TENANT_HOST_ACCESS_ICMP: u32 = 1 << 1;

abi_struct! {
    /// What a tenant uses now. Written with atomic adds. At index 0 (no tenant), `window` is the tick of the last hint that was left.
    pub struct TenantUse {
        /// Live flows.
        pub flows: u64,
        /// New connections in `window`.
        pub new_flows: u64,
        /// Second that `new_flows` counts.
        pub window: u64,
        /// Kept for connections ever accepted; not written, as frontends count them.
        pub total: u64,
    }
    size 32 align 8 offsets { flows: 0, new_flows: 8, window: 16, total: 24 }
}

abi_struct! {
    /// What the agent tells the datapath, and what it must know about the pins.
    pub struct Settings {
        /// [`ABI_VERSION`] of the writer.
        pub abi: u32,
        /// `SETTING_*` bits.
        pub flags: u32,
        /// Secret seed of the hashes, persisted, so that clients cannot aim and restarts change nothing.
        pub seed: [u64; 2],
        /// Ticks in one second, times 256.
        pub ticks_per_second_256: u32,
        /// Ticks: established TCP flows.
        pub tcp_established: u32,
        /// Ticks: half-open connections.
        pub tcp_half_open: u32,
        /// Ticks: after FIN both ways.
        pub tcp_fin: u32,
        /// Ticks: after an in-window RST.
        pub tcp_reset: u32,
        /// Ticks: UDP without a reply.
        pub udp_unreplied: u32,
        /// Ticks: UDP with replies.
        pub udp_replied: u32,
        /// Ticks: how long a closed flow's reverse tuple is kept from other clients (≥ 75 s).
        pub tombstone: u32,
        /// Ticks: until no reader can hold a marked flow.
        pub grace: u32,
        /// Rejects (RST, ICMP) that one CPU sends per tick.
        pub rejects_per_tick: u32,
        /// Half-open sets in use: a power of two.
        pub half_open_sets: u32,
        /// Tick until which non-SYN packets without state may be adopted; 0 = never.
        pub adopt_until: u32,
        /// Largest MSS that SYN and SYN-ACK keep, besides what the interfaces' MTU allows; 0 = neither is enforced.
        pub max_mss: u32,
        /// Zero.
        pub pad: u32,
    }
    size 80 align 8 offsets { abi: 0, flags: 4, seed: 8, ticks_per_second_256: 24, tcp_established: 28, adopt_until: 68 }
}

/// [`Settings::flags`]: starting or migrating: unmatched replies are dropped in silence.
pub const SETTING_MIGRATING: u32 = 1 << 0;

abi_struct! {
    /// What a stage hands to the next one on the same CPU, and the rate limit of refusals.
    pub struct Scratch {
        /// Why the packet is refused ([`crate::reason::Reason`]).
        pub reason: u32,
        /// Tenant to count it for.
        pub tenant: u32,
        /// Tick that `refusals` counts.
        pub tick: u32,
        /// Refusals sent in `tick`.
        pub refusals: u32,
        /// A half in the making: too large for the stack beside everything else.
        pub half: Flow4,
        /// Argument of the search for a half-open record: the client's key, or the turned-around tuple of a backend's packet.
        pub key: FlowKey4,
    }
    size 96 align 8 offsets { reason: 0, tenant: 4, tick: 8, refusals: 12, half: 16, key: 80 }
}

abi_struct! {
    /// Whose a frontend is: what a flow's frontend id leads to when the flow ends.
    pub struct FrontendOwner {
        /// Tenant index.
        pub tenant: u16,
        /// Zero.
        pub pad: [u16; 3],
    }
    size 8 align 2 offsets { tenant: 0 }
}

abi_struct! {
    /// Traffic of one frontend in one direction. Small, and the directions apart, so that the hot path touches few cache lines.
    pub struct Traffic {
        /// Packets.
        pub packets: u64,
        /// Bytes of IP packets.
        pub bytes: u64,
    }
    size 16 align 8 offsets { packets: 0, bytes: 8 }
}

/// Index into [`names::TRAFFIC`] of a frontend's packets from clients, or (`reverse`) to them.
pub const fn traffic_index(frontend: u16, reverse: bool) -> u32 {
    reverse as u32 * MAX_FRONTENDS + frontend as u32
}

abi_struct! {
    /// What happened at one frontend besides traffic.
    pub struct FrontendEvents {
        /// Connections promoted.
        pub flows: u64,
        /// Connections refused by lbd (RST) or dropped for want of a backend or port.
        pub refused: u64,
    }
    size 16 align 8 offsets { flows: 0, refused: 8 }
}

/// Counters of one frontend, put together from [`names::TRAFFIC`] and [`names::FRONTEND_EVENTS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrontendCounters {
    /// Packets client → backend.
    pub in_packets: u64,
    /// Bytes of IP packets client → backend.
    pub in_bytes: u64,
    /// Packets backend → client.
    pub out_packets: u64,
    /// Bytes of IP packets backend → client.
    pub out_bytes: u64,
    /// Connections promoted.
    pub flows: u64,
    /// Connections refused by lbd (RST) or dropped for want of a backend or port.
    pub refused: u64,
}

/// Stage: a SYN that matches no flow.
pub const STAGE_OPEN: u32 = 0;
/// Stage: a client's packet that matches no flow: the proof of a half-open connection, or refused.
pub const STAGE_PROVE: u32 = 1;
/// Stage: a packet that is not to a frontend and matches no flow: a backend's answer, a stray reply, or the host's.
pub const STAGE_ANSWER: u32 = 2;
/// Stage: FIN, RST and SYN on a live flow: state changes off the hot path.
pub const STAGE_FLAGS: u32 = 3;
/// Stage: ARP.
pub const STAGE_ARP: u32 = 4;
/// Stage: what is no flow's: VIP traffic without a frontend, the host's own, transit.
pub const STAGE_LOCAL: u32 = 5;
/// Stage: answers with RST, ICMP.
pub const STAGE_REJECT: u32 = 6;
/// Entries of [`names::STAGES`].
pub const STAGE_SLOTS: u32 = 16;

/// The stages: index into [`names::STAGES`] and program name.
pub const STAGE_PROGRAMS: [(u32, &str); 7] = [
    (STAGE_OPEN, "lbd_open"),
    (STAGE_PROVE, "lbd_prove"),
    (STAGE_ANSWER, "lbd_answer"),
    (STAGE_FLAGS, "lbd_flags"),
    (STAGE_ARP, "lbd_arp"),
    (STAGE_LOCAL, "lbd_local"),
    (STAGE_REJECT, "lbd_reject"),
];

/// The programs at tracepoints of the group `xdp`, which count what goes wrong after the verdict: tracepoint and program name.
pub const TRACE_PROGRAMS: [(&str, &str); 3] =
    [("xdp_redirect_err", "lbd_failed"), ("xdp_exception", "lbd_failed"), ("xdp_devmap_xmit", "lbd_sent")];

/// `.rodata` of the edge program, set for each NIC at load: name of the NIC's first index into [`names::SEGMENTS`].
pub const GLOBAL_SEGMENT_BASE: &str = "SEGMENT_BASE";
/// `.rodata` of the edge program: name of the NIC's ifindex (a next hop with this ifindex leaves by `XDP_TX`).
pub const GLOBAL_IFINDEX: &str = "IFINDEX";

/// Commands of the control program, in [`ControlRequest::command`].
pub mod control {
    /// Mark the flow whose forward key is given, both halves, as dead. Result: 1 if it lived.
    pub const MARK: u32 = 1;
    /// Read the clocks: `jiffies` and `nanoseconds` of the reply.
    pub const CLOCK: u32 = 2;
    /// Age: look at the `count` oldest entries of the ageing queue.
    pub const AGE: u32 = 3;
}

abi_struct! {
    /// First bytes of the packet that the control program is run on, and of its answer.
    pub struct ControlRequest {
        /// Destination and source MAC and ethertype in a real frame: zero.
        pub frame: [u8; 16],
        /// One of [`control`].
        pub command: u32,
        /// Argument.
        pub count: u32,
        /// Forward key (MARK).
        pub key: FlowKey4,
        /// Answer: jiffies (CLOCK).
        pub jiffies: u64,
        /// Answer: `bpf_ktime_get_ns` (CLOCK).
        pub nanoseconds: u64,
        /// Answer: flows marked, or entries looked at.
        pub result: u64,
    }
    size 64 align 8 offsets { command: 16, key: 24, jiffies: 40, nanoseconds: 48, result: 56 }
}

/// IPv4 address as an IPv4-mapped IPv6 address.
pub const fn mapped(address: [u8; 4]) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, address[0], address[1], address[2], address[3]]
}

/// The IPv4 address in an IPv4-mapped one.
pub const fn unmapped(address: &[u8; 16]) -> [u8; 4] {
    [address[12], address[13], address[14], address[15]]
}

impl Tuple4 {
    /// From host types.
    pub const fn new(source: (Ipv4Addr, u16), destination: (Ipv4Addr, u16)) -> Self {
        Self {
            source_be: u32::from_ne_bytes(source.0.octets()),
            destination_be: u32::from_ne_bytes(destination.0.octets()),
            source_port_be: source.1.to_be(),
            destination_port_be: destination.1.to_be(),
        }
    }

    /// Source address and port.
    pub const fn source(&self) -> SocketAddrV4 {
        let [a, b, c, d] = self.source_be.to_ne_bytes();
        SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), u16::from_be(self.source_port_be))
    }

    /// Destination address and port.
    pub const fn destination(&self) -> SocketAddrV4 {
        let [a, b, c, d] = self.destination_be.to_ne_bytes();
        SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), u16::from_be(self.destination_port_be))
    }
}

impl FlowKey4 {
    /// Key of the other half: where replies to `to` arrive.
    pub const fn reply(to: &Tuple4, segment: u16, protocol: u8) -> Self {
        Self {
            tuple: Tuple4 {
                source_be: to.destination_be,
                destination_be: to.source_be,
                source_port_be: to.destination_port_be,
                destination_port_be: to.source_port_be,
            },
            segment,
            protocol,
            pad: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_flow_table_has_buckets_to_spare() {
        assert_eq!(flow_entries(262_144), 524_289);
        assert_eq!(flow_entries(250_000), 524_289);
        assert_eq!(flow_entries(200_000), 400_000);
        assert_eq!(flow_entries(u32::MAX), u32::MAX);
        for max_flows in [100, 65_536, 1_000_000, 1_048_576] {
            let entries = flow_entries(max_flows);
            assert!(entries >= 2 * max_flows);
            assert!(u64::from(2 * max_flows) * 8 <= u64::from(entries.next_power_of_two()) * 7, "{max_flows}");
        }
    }
}
