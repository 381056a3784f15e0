//! The ABI of the pinned maps: every key and value, in the byte order that its name or type says.
//!
//! Addresses and ports that come from packets are stored as they are on the wire (`[u8; N]`, or an integer named `_be`);
//! everything else is in host order. No enums, bools or implicit padding: a map value may hold any bytes. The size and
//! the offsets of each struct are asserted below; changing one means a new [`ABI_VERSION`].

use core::fmt::Debug;
use core::mem::{align_of, offset_of, size_of, zeroed};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use bytemuck::{Pod, Zeroable};

use crate::hash::LookupSecret;
use crate::packet::{TCP, UDP};

/// Version of everything in this module. Part of the pin path, and stored in [`Settings::abi`].
///
/// | version | is |
/// |---|---|
/// | 1 | TCP over IPv4, untagged |
/// | 2 | both families, TCP and UDP, VLANs; timeouts by frontend, quotas by tenant |
pub const ABI_VERSION: u32 = 2;

/// Names of maps and programs, as the kernel and the pins know them (at most 15 characters).
pub mod names {
    /// Hash [`super::FlowKey4`] → [`super::Flow4`]: both halves of every IPv4 flow.
    pub const FLOWS4: &str = "flows4";
    /// Hash [`super::Lookup6`] → [`super::Flow6`]: both halves of every IPv6 flow.
    pub const FLOWS6: &str = "flows6";
    /// Queue of [`super::AgeEntry4`]: the clock hand that ages IPv4 flows without the agent.
    pub const AGEING4: &str = "ageing4";
    /// Queue of [`super::AgeEntry6`]: the clock hand that ages IPv6 flows.
    pub const AGEING6: &str = "ageing6";
    /// Queue of [`super::AgeEntry4`]: IPv4 flows that are over, to be deleted when no reader can hold them any more.
    pub const ENDED4: &str = "ended4";
    /// Queue of [`super::AgeEntry6`]: IPv6 flows that are over.
    pub const ENDED6: &str = "ended6";
    /// Array of [`super::HalfOpenSet4`]: IPv4 connections that the client has not proven yet.
    pub const HALF_OPEN4: &str = "half_open4";
    /// Array of [`super::HalfOpenSet6`]: IPv6 connections that the client has not proven yet.
    pub const HALF_OPEN6: &str = "half_open6";
    /// Array of [`super::HintLine`]: where a half-open IPv4 connection went whose first SNAT port was taken.
    pub const HINTS4: &str = "hints4";
    /// Array of [`super::HintLine`]: the same for IPv6.
    pub const HINTS6: &str = "hints6";
    /// Per-CPU array with one [`super::Making4`]: an IPv4 half in the making.
    pub const MAKING4: &str = "making4";
    /// Per-CPU array with one [`super::Making6`]: an IPv6 half in the making.
    pub const MAKING6: &str = "making6";
    /// Array of [`super::Timeouts`]; index 0 = the defaults.
    pub const TIMEOUTS: &str = "timeouts";
    /// Array of [`super::BackendUse`], index = backend id: what backends answer, written by the datapath.
    pub const BACKEND_USE: &str = "backend_use";
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
    pub const SHARED: [&str; 29] = [
        FLOWS4,
        FLOWS6,
        AGEING4,
        AGEING6,
        ENDED4,
        ENDED6,
        HALF_OPEN4,
        HALF_OPEN6,
        HINTS4,
        HINTS6,
        MAKING4,
        MAKING6,
        TIMEOUTS,
        BACKEND_USE,
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

/// Entries of [`names::HALF_OPEN4`] and [`names::HALF_OPEN6`], a power of two: 65,536 half-open connections each.
pub const HALF_OPEN_SETS: u32 = 8192;
/// Entries of [`names::HINTS4`] and [`names::HINTS6`], a power of two.
pub const HINT_LINES: u32 = 4096;
/// Entries of [`names::TIMEOUTS`].
pub const MAX_TIMEOUTS: u32 = 1024;
/// Entries of [`names::FLOWS4`] and [`names::AGEING4`] by default.
pub const FLOW_ENTRIES: u32 = flow_entries(262_144);
/// Entries of [`names::FLOWS6`] and [`names::AGEING6`] by default.
pub const FLOW_ENTRIES6: u32 = flow_entries(26_214);
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

mod sealed {
    /// Only the two families have addresses.
    pub trait Sealed {}
    impl Sealed for u32 {}
    impl Sealed for [u32; 4] {}
}

/// An IPv4 address as on the wire.
pub type Address4 = u32;
/// An IPv6 address as on the wire.
pub type Address6 = [u32; 4];

/// An address of one family, as on the wire. What is written for both families is generic over it.
pub trait Address: sealed::Sealed + Pod + Eq + Ord + Debug + Send + Sync {
    /// As the standard library has it.
    type Ip: Copy + Into<IpAddr>;
    /// Whether the family is IPv6.
    const IS_V6: bool;
    /// What the flow table is asked for: [`FlowKey::lookup`].
    type Lookup: Pod + Eq + Ord + Debug + Send + Sync;
    /// What fills an element of the flow table up to whole cache lines.
    type Spare: Pod + Eq + Ord + Debug + Send + Sync;
    /// Address of a host type.
    fn from_ip(ip: Self::Ip) -> Self;
    /// The host type.
    fn ip(self) -> Self::Ip;
    /// Its 32-bit words; IPv4 has one, and zeros.
    fn quads(self) -> [u32; 4];
    /// As IPv6 address; IPv4 as an IPv4-mapped one (`::ffff:a.b.c.d`).
    fn mapped(self) -> [u8; 16];
    /// From an IPv6 address; IPv4 from its last four bytes.
    fn unmapped(address: &[u8; 16]) -> Self;
    /// What the flow table is asked for, for this key.
    fn lookup(key: &FlowKey<Self>, secret: LookupSecret) -> Self::Lookup;
    /// The address if it is of this family.
    fn from_any(ip: IpAddr) -> Option<Self>;

    /// Whether both are the same, word by word: in BPF, `==` on arrays would be a call.
    #[inline(always)]
    fn is(self, other: Self) -> bool {
        let ([a, b, c, d], [e, f, g, h]) = (self.quads(), other.quads());
        (a ^ e) | (b ^ f) | (c ^ g) | (d ^ h) == 0
    }
}

impl Address for Address4 {
    type Ip = Ipv4Addr;
    type Lookup = FlowKey4;
    type Spare = [u32; 0];
    const IS_V6: bool = false;

    #[inline(always)]
    fn from_ip(ip: Ipv4Addr) -> Self {
        Self::from_ne_bytes(ip.octets())
    }

    #[inline(always)]
    fn ip(self) -> Ipv4Addr {
        Ipv4Addr::from(self.to_ne_bytes())
    }

    #[inline(always)]
    fn quads(self) -> [u32; 4] {
        [self, 0, 0, 0]
    }

    #[inline(always)]
    fn mapped(self) -> [u8; 16] {
        mapped(self.to_ne_bytes())
    }

    #[inline(always)]
    fn unmapped(address: &[u8; 16]) -> Self {
        Self::from_ne_bytes(unmapped(address))
    }

    #[inline(always)]
    fn lookup(key: &FlowKey4, _secret: LookupSecret) -> FlowKey4 {
        *key
    }

    fn from_any(ip: IpAddr) -> Option<Self> {
        match ip {
            IpAddr::V4(ip) => Some(Self::from_ip(ip)),
            IpAddr::V6(_) => None,
        }
    }
}

impl Address for Address6 {
    type Ip = Ipv6Addr;
    type Lookup = Lookup6;
    type Spare = [u32; 2];
    const IS_V6: bool = true;

    #[inline(always)]
    fn from_ip(ip: Ipv6Addr) -> Self {
        Self::unmapped(&ip.octets())
    }

    #[inline(always)]
    fn ip(self) -> Ipv6Addr {
        Ipv6Addr::from(self.mapped())
    }

    #[inline(always)]
    fn quads(self) -> [u32; 4] {
        self
    }

    #[inline(always)]
    fn mapped(self) -> [u8; 16] {
        // SAFETY: same size, and any bytes are valid.
        unsafe { core::mem::transmute(self) }
    }

    #[inline(always)]
    fn unmapped(address: &[u8; 16]) -> Self {
        // SAFETY: same size, and any bytes are valid.
        unsafe { core::mem::transmute(*address) }
    }

    #[inline(always)]
    fn lookup(key: &FlowKey6, [first, second, third, fourth]: LookupSecret) -> Lookup6 {
        let ([s0, s1, s2, s3], [d0, d1, d2, d3]) = (key.tuple.source_be, key.tuple.destination_be);
        Lookup6 {
            prefixes: halves(mixed(whole(s0, s1), whole(d0, d1), [first, second])),
            interfaces: halves(mixed(whole(s2, s3), whole(d2, d3), [third, fourth])),
            source_port_be: key.tuple.source_port_be,
            destination_port_be: key.tuple.destination_port_be,
            segment: key.segment,
            protocol: key.protocol,
            pad: key.pad,
        }
    }

    fn from_any(ip: IpAddr) -> Option<Self> {
        match ip {
            IpAddr::V4(_) => None,
            IpAddr::V6(ip) => Some(Self::from_ip(ip)),
        }
    }
}

/// A struct of the ABI: `repr(C)`, plain integers, size and offsets asserted, and the sizes of the fields add up to the struct's: no
/// padding. With `<A>`: for both families.
macro_rules! abi_struct {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$field_meta:meta])* pub $field:ident: $type:ty,)* }
     size $size:literal align $align:literal offsets { $($checked:ident: $offset:literal),* $(,)? }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)* }

        impl $name {
            /// All bytes zero.
            // SAFETY: made of integers: any bytes are valid.
            pub const ZERO: Self = unsafe { zeroed() };
        }

        const _: () = assert!(size_of::<$name>() == $size && align_of::<$name>() == $align);
        const _: () = assert!(0 $(+ size_of::<$type>())* == $size);
        $(const _: () = assert!(offset_of!($name, $checked) == $offset);)*

        // SAFETY: made of integers.
        unsafe impl Zeroable for $name {}
        // SAFETY: `repr(C)`, `Copy`, made of integers, and without padding: asserted above.
        unsafe impl Pod for $name {}
        // SAFETY: as above.
        #[cfg(feature = "user")]
        unsafe impl aya::Pod for $name {}
    };
    ($(#[$meta:meta])* pub struct $name:ident<A> { $($(#[$field_meta:meta])* pub $field:ident: $type:ty,)* }
     size $size4:literal and $size6:literal align $align:literal
     offsets { $($checked:ident: $offset4:literal and $offset6:literal),* $(,)? }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub struct $name<A: Address> { $($(#[$field_meta])* pub $field: $type,)* }

        impl<A: Address> $name<A> {
            /// All bytes zero.
            // SAFETY: made of integers: any bytes are valid.
            pub const ZERO: Self = unsafe { zeroed() };
            const FIELDS: usize = 0 $(+ size_of::<$type>())*;
        }

        const _: () = assert!(size_of::<$name<Address4>>() == $size4 && align_of::<$name<Address4>>() == $align);
        const _: () = assert!(size_of::<$name<Address6>>() == $size6 && align_of::<$name<Address6>>() == $align);
        const _: () = assert!($name::<Address4>::FIELDS == $size4 && $name::<Address6>::FIELDS == $size6);
        $(const _: () = assert!(offset_of!($name<Address4>, $checked) == $offset4);)*
        $(const _: () = assert!(offset_of!($name<Address6>, $checked) == $offset6);)*

        // SAFETY: made of integers.
        unsafe impl<A: Address> Zeroable for $name<A> {}
        // SAFETY: `repr(C)`, `Copy`, made of integers, and without padding for both addresses there are: asserted above.
        unsafe impl<A: Address> Pod for $name<A> {}
        // SAFETY: as above.
        #[cfg(feature = "user")]
        unsafe impl<A: Address> aya::Pod for $name<A> {}
    };
}

abi_struct! {
    /// Addresses and ports of one direction, as on the wire.
    pub struct Tuple<A> {
        /// Source address.
        pub source_be: A,
        /// Destination address.
        pub destination_be: A,
        /// Source port.
        pub source_port_be: u16,
        /// Destination port.
        pub destination_port_be: u16,
    }
    size 12 and 36 align 4 offsets {
        source_be: 0 and 0, destination_be: 4 and 16, source_port_be: 8 and 32, destination_port_be: 10 and 34
    }
}

/// Addresses and ports of IPv4.
pub type Tuple4 = Tuple<Address4>;
/// Addresses and ports of IPv6.
pub type Tuple6 = Tuple<Address6>;

abi_struct! {
    /// Which half of a flow: one direction, in the segment it arrives on. Key of [`names::FLOWS4`]; for [`names::FLOWS6`] see [`Lookup6`].
    pub struct FlowKey<A> {
        /// Addresses and ports as they arrive.
        pub tuple: Tuple<A>,
        /// Segment id ([`Segment::id`]).
        pub segment: u16,
        /// IP protocol number.
        pub protocol: u8,
        /// Zero.
        pub pad: u8,
    }
    size 16 and 40 align 4 offsets { tuple: 0 and 0, segment: 12 and 36, protocol: 14 and 38 }
}

abi_struct! {
    /// Key of [`names::FLOWS6`]: a [`FlowKey6`] in 24 bytes instead of 40.
    ///
    /// The kernel hashes keys by 12 bytes at a time, and the next 12 wait for it: 24 bytes cost as much as the 16 of IPv4, 40 bytes two rounds
    /// more (`jhash2`, include/linux/jhash.h). So both addresses' prefixes are mixed to one word with a secret, and so are their interface
    /// identifiers. Keys that differ in one address only, in ports, segment or protocol, stay different; of others a pair looks
    /// alike so rarely (see [`mixed`]) that the second connection may be refused: a half holds its whole tuple, and is nobody
    /// else's.
    pub struct Lookup6 {
        /// [`mixed`] of the addresses' first 8 bytes.
        pub prefixes: [u32; 2],
        /// [`mixed`] of the addresses' last 8 bytes, their interface identifiers (RFC 4291).
        pub interfaces: [u32; 2],
        /// Source port.
        pub source_port_be: u16,
        /// Destination port.
        pub destination_port_be: u16,
        /// Segment id ([`Segment::id`]).
        pub segment: u16,
        /// IP protocol number.
        pub protocol: u8,
        /// Zero.
        pub pad: u8,
    }
    size 24 align 4 offsets {
        prefixes: 0, interfaces: 8, source_port_be: 16, destination_port_be: 18, segment: 20, protocol: 22
    }
}

/// Two halves of addresses as one word, each as the word that lies in memory, with half of the secret.
///
/// If one is the same, the other one shows: each is mapped one to one. A pair that differs in both looks the same under one secret in
/// about 2³² at the worst, and numbered hosts and subnets in about 2³⁹. Who can open millions of connections to many addresses and sees which
/// ones are refused can find such a pair, for a while of probing.
#[inline(always)]
pub const fn mixed(source: u64, destination: u64, secret: [u64; 2]) -> u64 {
    // What differs in the upper half comes to differ in the lower one too, as a product shows a difference only from its lowest bit on:
    // without that a difference of the highest bit would look the same under every secret.
    let spread = destination ^ (destination >> 32).wrapping_mul(secret[1]) >> 32;
    // By an odd number, so that words stay different.
    source.wrapping_add(spread.wrapping_mul(secret[0] | 1))
}

/// Two quads as they lie in memory as the word that lies there.
const fn whole(first: u32, second: u32) -> u64 {
    first as u64 | (second as u64) << 32
}

/// The reverse of [`whole`].
const fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// Key of an IPv4 flow's half.
pub type FlowKey4 = FlowKey<Address4>;
/// Key of an IPv6 flow's half.
pub type FlowKey6 = FlowKey<Address6>;

abi_struct! {
    /// One half of a flow: everything that rewriting a packet needs, for IPv4 in one cache line.
    ///
    /// The kernel keeps 48 bytes before the key, so that an IPv4 key ends a cache line and its value is the next. An IPv6 element is three
    /// whole lines. `tuple`, `segment` and [`FLOW_UDP`] are the half's [`FlowKey`]: a hash element can be recycled under a reader, who
    /// compares them before it trusts `to`. Only BPF code writes a live value. The forward half (client → backend) and the reverse half
    /// (backend → client) name each other through `to`.
    pub struct Flow<A> {
        /// Addresses and ports as they arrive.
        pub tuple: Tuple<A>,
        /// Segment id ([`Segment::id`]) where they arrive.
        pub segment: u16,
        /// Index into [`names::NEXT_HOPS`].
        pub next_hop: u16,
        /// Addresses and ports after rewriting.
        pub to: Tuple<A>,
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
        /// Frontend id.
        pub frontend: u16,
        /// `FLOW_*` bits. In one word with `frontend`, which never changes: bits are set atomically.
        pub state: u16,
        /// Forward half: `created` tick (4 bytes, native order), then backend id (2 bytes). Reverse half: the client's MAC.
        pub own: [u8; 6],
        /// Packets in this direction, high 16 bits.
        pub packets_high: u16,
        /// Zero.
        pub spare: A::Spare,
    }
    size 64 and 120 align 8 offsets {
        tuple: 0 and 0, segment: 12 and 36, next_hop: 14 and 38, to: 16 and 40, last_seen: 28 and 76, bytes: 32 and 80,
        packets: 40 and 88, sequence: 44 and 92, acknowledged: 48 and 96, frontend: 52 and 100, state: 54 and 102, own: 56 and 104,
        packets_high: 62 and 110
    }
}

/// One half of an IPv4 flow.
pub type Flow4 = Flow<Address4>;
/// One half of an IPv6 flow.
pub type Flow6 = Flow<Address6>;

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
/// [`Flow4::state`]: UDP; else TCP.
pub const FLOW_UDP: u16 = 1 << 8;
/// [`Flow4::state`]: this forward half is in [`names::ENDED4`] or [`names::ENDED6`] and no longer in the ageing queue.
pub const FLOW_ENDED: u16 = 1 << 9;

impl<A: Address> Flow<A> {
    /// Which half it is.
    pub const fn key(&self) -> FlowKey<A> {
        FlowKey { tuple: self.tuple, segment: self.segment, protocol: self.protocol(), pad: 0 }
    }

    /// IP protocol number.
    pub const fn protocol(&self) -> u8 {
        if self.state & FLOW_UDP != 0 { UDP } else { TCP }
    }

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
    /// Entry of [`names::AGEING4`], [`names::AGEING6`], [`names::ENDED4`] and [`names::ENDED6`].
    pub struct AgeEntry<A> {
        /// What the flow table is asked for to find the forward half.
        pub lookup: A::Lookup,
        /// [`Flow4::created`] of the flow meant; another value means that the place has been used again.
        pub created: u32,
    }
    size 20 and 28 align 4 offsets { lookup: 0 and 0, created: 16 and 24 }
}

/// Entry of the IPv4 queues.
pub type AgeEntry4 = AgeEntry<Address4>;
/// Entry of the IPv6 queues.
pub type AgeEntry6 = AgeEntry<Address6>;

/// Records in one [`HalfOpenSet4`].
pub const HALF_OPEN_WAYS: usize = 8;

abi_struct! {
    /// A connection between the client's SYN and its ACK.
    pub struct HalfOpen<A> {
        /// Client → VIP, as it arrives.
        pub client: Tuple<A>,
        /// Segment of the client.
        pub client_segment: u16,
        /// Index of the next hop to the client.
        pub client_next_hop: u16,
        /// SNAT address → backend, as it leaves.
        pub to: Tuple<A>,
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
        /// `HALF_OPEN_*` bits, and how many other backends were tried before ([`HALF_OPEN_ATTEMPT_SHIFT`]).
        pub state: u32,
    }
    size 64 and 112 align 4 offsets {
        client: 0 and 0, to: 16 and 40, client_sequence: 32 and 80, client_mac: 40 and 88, backend: 46 and 94,
        first_syn: 52 and 100, state: 60 and 108
    }
}

/// A half-open IPv4 connection.
pub type HalfOpen4 = HalfOpen<Address4>;
/// A half-open IPv6 connection.
pub type HalfOpen6 = HalfOpen<Address6>;

/// [`HalfOpen4::state`]: the backend has sent a SYN-ACK.
pub const HALF_OPEN_ANSWERED: u32 = 1 << 0;
/// [`HalfOpen4::state`]: the backend refused with a RST.
pub const HALF_OPEN_REFUSED: u32 = 1 << 1;
/// [`HalfOpen4::state`]: how often the SYN has gone on to the next candidate, from this bit on.
pub const HALF_OPEN_ATTEMPT_SHIFT: u32 = 8;

abi_struct! {
    /// A set of half-open records, indexed by SNAT port: [`crate::hash::half_open_set`].
    ///
    /// `tags[way]` owns `records[way]`; its parts are in [`crate::half_open`]. A record is claimed by compare-and-swap of its tag, then
    /// the claimer looks whether another way holds the same reverse tuple; if so it yields. So two CPUs never both own a
    /// tuple.
    pub struct HalfOpenSet<A> {
        /// Owner words.
        pub tags: [u64; HALF_OPEN_WAYS],
        /// Records.
        pub records: [HalfOpen<A>; HALF_OPEN_WAYS],
    }
    size 576 and 960 align 8 offsets { tags: 0 and 0, records: 64 and 64 }
}

/// A set of half-open IPv4 records.
pub type HalfOpenSet4 = HalfOpenSet<Address4>;
/// A set of half-open IPv6 records.
pub type HalfOpenSet6 = HalfOpenSet<Address6>;

abi_struct! {
    /// What is too large for the stack while a packet is looked at, on one CPU.
    pub struct Making<A> {
        /// A half in the making.
        pub half: Flow<A>,
        /// Argument of the search for a half-open record: the client's key, or the turned-around tuple of a backend's packet.
        pub key: FlowKey<A>,
        /// Copy of the half-open record that was found.
        pub record: HalfOpen<A>,
        /// Where the packet shall go.
        pub to: Tuple<A>,
        /// Hash of the reverse tuple of `to`.
        pub reverse: u32,
        /// What looks for a SNAT port: the client's hash.
        pub hash: u64,
        /// The first port that it may have (host order).
        pub first: u16,
        /// The last one.
        pub last: u16,
        /// Segment of the backend.
        pub backend_segment: u16,
        /// IP protocol number.
        pub protocol: u16,
        /// Key of the reverse half that belongs to `to`.
        pub reply: FlowKey<A>,
    }
    size 192 and 368 align 8 offsets {
        half: 0 and 0, key: 64 and 120, record: 80 and 160, to: 144 and 272, hash: 160 and 312, first: 168 and 320,
        protocol: 174 and 326, reply: 176 and 328
    }
}

/// What is too large for the stack while an IPv4 packet is looked at.
pub type Making4 = Making<Address4>;
/// What is too large for the stack while an IPv6 packet is looked at.
pub type Making6 = Making<Address6>;

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
        /// Index of the next hop to off-link IPv4 clients (the gateway).
        pub gateway_next_hop: u16,
        /// Index of the next hop to on-link clients ([`NEXT_HOP_ON_LINK`]).
        pub on_link_next_hop: u16,
        /// VLAN id, 0 = untagged.
        pub vlan: u16,
        /// Index of the next hop to off-link IPv6 clients.
        pub gateway6_next_hop: u16,
        /// On-link IPv4 prefix: network address.
        pub network4_be: u32,
        /// On-link IPv4 prefix: mask (all ones: no prefix, all clients are off-link).
        pub mask4_be: u32,
        /// Egress MTU of the NIC for IP packets.
        pub mtu: u32,
        /// On-link IPv6 prefix: network address.
        pub network6_be: Address6,
        /// On-link IPv6 prefix: mask (all ones: no prefix, all clients but link-local ones are off-link).
        pub mask6_be: Address6,
        /// A second on-link IPv6 prefix (a unique local one beside a global one): network address.
        pub second_network6_be: Address6,
        /// A second on-link IPv6 prefix: mask.
        pub second_mask6_be: Address6,
        /// A second on-link IPv4 prefix: network address.
        pub second_network4_be: u32,
        /// A second on-link IPv4 prefix: mask.
        pub second_mask4_be: u32,
        /// Zero, up to whole cache lines. Packets of known flows need the first only.
        pub reserved: [u32; 6],
    }
    size 128 align 4 offsets {
        id: 0, flags: 2, mac: 4, tenant: 10, gateway_next_hop: 12, vlan: 16, gateway6_next_hop: 18, network4_be: 20, mask4_be: 24,
        mtu: 28, network6_be: 32, mask6_be: 48, second_network6_be: 64, second_mask6_be: 80, second_network4_be: 96,
        second_mask4_be: 100, reserved: 104
    }
}

/// [`Segment::flags`]: tenants' clients arrive here; the host behind is closed except for `host_access`.
pub const SEGMENT_TENANT: u16 = 1 << 0;
/// [`Segment::flags`]: the hub's nodes live here; what matches no flow is the host's own.
pub const SEGMENT_HUB: u16 = 1 << 1;
/// [`Segment::flags`]: what [`TENANT_HOST_ACCESS_OWN`] is, on a segment that is no one tenant's: its tenants have the same access.
pub const SEGMENT_HOST_ACCESS_OWN: u16 = 1 << 2;
/// [`Segment::flags`]: what [`TENANT_HOST_ACCESS_ICMP`] is, on a segment that is no one tenant's.
pub const SEGMENT_HOST_ACCESS_ICMP: u16 = 1 << 3;

abi_struct! {
    /// Key of [`names::ADDRESSES`].
    pub struct AddressKey {
        /// IPv6 address, or IPv4 as an IPv4-mapped one (`::ffff:a.b.c.d`).
        pub address: [u8; 16],
        /// Segment id.
        pub segment: u16,
        /// 0, or with an all-zero address: a port that backends in this segment serve ([`ADDRESS_TARGET_PORT`], [`ADDRESS_LEFT_PORT`])
        /// or that `host_access` opens ([`ADDRESS_HOST_PORT`]).
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
/// [`LocalAddress::flags`]: not an address but a TCP port that `host_access` opens on the host's own addresses in the segment.
pub const ADDRESS_HOST_PORT: u16 = 1 << 6;
/// [`LocalAddress::flags`]: a VIP whose frontends all drop in silence what nobody serves.
pub const ADDRESS_UNSERVED_DROP: u16 = 1 << 7;
/// [`LocalAddress::flags`]: not an address but a port that frontends lead to no more once a change is written, which it is just now. Until then it is a
/// backend's like one with [`ADDRESS_TARGET_PORT`], but nobody's that a handshake of before could reach by mistake.
pub const ADDRESS_LEFT_PORT: u16 = 1 << 8;

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
        /// Index into [`names::TIMEOUTS`].
        pub timeouts: u16,
        /// Lookup table: index of its first chunk in [`names::MAGLEV`].
        pub table: u32,
        /// Lookup table: its slots (a prime); 0 = no backend.
        pub table_size: u32,
        /// Interval array of allowed sources; 0 = all are allowed.
        pub source_ranges: u32,
    }
    size 64 align 4 offsets {
        vip: 0, snat: 16, port_be: 32, segment: 34, protocol: 36, id: 38, tenant: 40, flags: 42, target_port_be: 44, snat_first: 46,
        snat_last: 48, timeouts: 50, table: 52, table_size: 56, source_ranges: 60
    }
}

/// [`Frontend::flags`]: hash only the client's address and the VIP (`affinity: source`).
pub const FRONTEND_SOURCE_AFFINITY: u16 = 1 << 0;
/// [`Frontend::flags`]: keep the client's address (`preserve_client`).
pub const FRONTEND_PRESERVE_CLIENT: u16 = 1 << 1;
/// [`Frontend::flags`]: drop instead of refusing when there is no backend (`unserved: drop`).
pub const FRONTEND_UNSERVED_DROP: u16 = 1 << 2;
/// [`Frontend::flags`]: until [`Settings::adopt_until`], packets of unknown TCP connections are adopted (`adopt: takeover`).
pub const FRONTEND_ADOPT: u16 = 1 << 3;

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
        /// What the first 32 bits of our addresses in the backend's segment, of its family, have in common: no other source can be one of them.
        pub ours_be: u32,
        /// Which bits those are; 0 = none.
        pub ours_mask_be: u32,
    }
    size 32 align 4 offsets { address: 0, port_be: 16, segment: 18, next_hop: 20, flags: 22, ours_be: 24, ours_mask_be: 28 }
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
    /// A tenant's limits in one family; 0 = no limit.
    pub struct FamilyLimits {
        /// Live flows, UDP among them.
        pub flows: u32,
        /// Live UDP flows.
        pub udp: u32,
        /// Half-open connections.
        pub half_open: u32,
        /// Zero.
        pub pad: u32,
    }
    size 16 align 4 offsets { flows: 0, udp: 4, half_open: 8 }
}

abi_struct! {
    /// A tenant's limits; 0 = no limit.
    pub struct Tenant {
        /// In each family: IPv4, IPv6.
        pub families: [FamilyLimits; 2],
        /// New connections per second, both families.
        pub new_flows_per_second: u32,
        /// `TENANT_*` bits.
        pub flags: u32,
    }
    size 40 align 4 offsets { families: 0, new_flows_per_second: 32, flags: 36 }
}

/// [`Tenant::flags`]: `host_access` lets everything through to the host's own address.
pub const TENANT_HOST_ACCESS_OWN: u32 = 1 << 0;
/// [`Tenant::flags`]: `host_access` lets ICMP through.
pub const TENANT_HOST_ACCESS_ICMP: u32 = 1 << 1;

/// Buckets of [`FamilyUse::buckets`].
pub const HALF_OPEN_BUCKETS: usize = 8;

abi_struct! {
    /// What a tenant uses in one family. Counts are signed: an end may be counted before its beginning.
    pub struct FamilyUse {
        /// Live flows, UDP among them.
        pub flows: u64,
        /// Live UDP flows.
        pub udp: u64,
        /// Half-open connections: the sum of the buckets.
        pub half_open: u64,
        /// Epoch up to which `buckets` have been emptied ([`Settings::half_open_epoch`] ticks each).
        pub epoch: u64,
        /// Half-open connections by the epoch in which they expire, modulo the number of buckets: nobody has to look for expired ones.
        pub buckets: [u64; HALF_OPEN_BUCKETS],
    }
    size 96 align 8 offsets { flows: 0, udp: 8, half_open: 16, epoch: 24, buckets: 32 }
}

abi_struct! {
    /// What a tenant uses now. Written with atomic operations.
    pub struct TenantUse {
        /// New connections in `window`.
        pub new_flows: u64,
        /// Second that `new_flows` counts.
        pub window: u64,
        /// At index 0 (no tenant): tick at which the last of all hints expires.
        pub hinted: u64,
        /// Refusals that were sent from the tenant's reserve in a tick ([`crate::reserve`]).
        pub refusals: u64,
        /// In each family: IPv4, IPv6.
        pub families: [FamilyUse; 2],
        /// Zero, up to whole cache lines.
        pub reserved: [u64; 4],
    }
    size 256 align 8 offsets { new_flows: 0, window: 8, hinted: 16, refusals: 24, families: 32 }
}

abi_struct! {
    /// How long flows live without a packet, in ticks.
    pub struct Timeouts {
        /// Established TCP flows.
        pub tcp_established: u32,
        /// Half-open connections.
        pub tcp_half_open: u32,
        /// After FIN both ways.
        pub tcp_fin: u32,
        /// After an in-window RST.
        pub tcp_reset: u32,
        /// UDP without a reply.
        pub udp_unreplied: u32,
        /// UDP with replies.
        pub udp_replied: u32,
    }
    size 24 align 4 offsets { tcp_established: 0, udp_replied: 20 }
}

abi_struct! {
    /// What a backend answers to new connections. Written without atomics: a lost count delays the breaker by a SYN.
    pub struct BackendUse {
        /// Tick of its last SYN-ACK.
        pub answered: u32,
        /// New connections since then.
        pub unanswered: u32,
        /// Tick of the first of them.
        pub since: u32,
        /// Tick of the last trial while it is skipped.
        pub trial: u32,
    }
    size 16 align 4 offsets { answered: 0, unanswered: 4, since: 8, trial: 12 }
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
        /// Ticks: how long a closed flow's reverse tuple is kept from other clients (≥ 75 s).
        pub tombstone: u32,
        /// Ticks: until no reader can hold a marked flow.
        pub grace: u32,
        /// Ticks in one epoch of [`FamilyUse::buckets`]: at least a sixth of the longest half-open timeout.
        pub half_open_epoch: u32,
        /// Rejects (RST, ICMP) that one CPU sends per tick.
        pub rejects_per_tick: u32,
        /// Tick until which non-SYN packets without state may be adopted; 0 = never.
        pub adopt_until: u32,
        /// Largest MSS that SYN and SYN-ACK over IPv4 keep, besides what the interfaces' MTU allows; over IPv6 20 less. 0 = neither is
        /// enforced.
        pub max_mss: u32,
        /// Zero.
        pub pad: u32,
    }
    size 56 align 8 offsets { abi: 0, flags: 4, seed: 8, ticks_per_second_256: 24, tombstone: 28, adopt_until: 44, max_mss: 48 }
}

impl Settings {
    /// Longest time that adoption can lie ahead, in seconds: a stale [`Settings::adopt_until`] is not taken for a time to come when ticks have wrapped.
    const ADOPTION_SECONDS: u32 = 600;

    /// Whether packets of unknown TCP connections are adopted now.
    #[inline(always)]
    pub const fn adopts(&self, now: u32) -> bool {
        let left = self.adopt_until.wrapping_sub(now);
        self.adopt_until != 0 && left != 0 && left <= (self.ticks_per_second_256 >> 8) * Self::ADOPTION_SECONDS
    }
}

/// [`Settings::flags`]: starting or migrating: unmatched replies are dropped in silence.
pub const SETTING_MIGRATING: u32 = 1 << 0;

abi_struct! {
    /// What a stage hands to the next one on the same CPU, and the budgets of what is rate-limited.
    pub struct Scratch {
        /// Why the packet is refused ([`crate::reason::Reason`]).
        pub reason: u32,
        /// Tenant to count it for.
        pub tenant: u32,
        /// Tick of `refusals`, `scanned`, `over_limit` and `busy_tenant`.
        pub tick: u32,
        /// Refusals sent in `tick`.
        pub refusals: u32,
        /// Index of the frame's segment in [`names::SEGMENTS`].
        pub slot: u32,
        /// The 802.1Q tag that was taken off the frame: [`TAGGED`] and its control information in host order; 0 = there was none.
        pub tag: u32,
        /// SNAT ports looked at in `tick` by searches of whole ranges.
        pub scanned: u32,
        /// MTU of the way that the packet is too large for ([`crate::reason::Reason::TooBig`]).
        pub mtu: u32,
        /// SYNs above a limit of their tenant that were looked at in `tick`.
        pub over_limit: u32,
        /// The last tenant for which there was no budget left in `tick` to look for a SNAT port; 0 = none.
        pub busy_tenant: u32,
    }
    size 40 align 4 offsets { reason: 0, tenant: 4, tick: 8, refusals: 12, slot: 16, tag: 20, scanned: 24, mtu: 28, over_limit: 32, busy_tenant: 36 }
}

/// [`Scratch::tag`]: there was a tag.
pub const TAGGED: u32 = 1 << 16;

abi_struct! {
    /// Whose a frontend is: what a flow's frontend id leads to.
    pub struct FrontendOwner {
        /// Tenant index.
        pub tenant: u16,
        /// Index into [`names::TIMEOUTS`].
        pub timeouts: u16,
        /// Zero.
        pub pad: [u16; 2],
    }
    size 8 align 2 offsets { tenant: 0, timeouts: 2 }
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

/// Stage: an IPv4 SYN that matches no flow.
pub const STAGE_OPEN4: u32 = 0;
/// Stage: a client's IPv4 TCP packet that matches no flow: the proof of a half-open connection, or refused.
pub const STAGE_PROVE4: u32 = 1;
/// Stage: an IPv4 TCP packet that is not to a frontend and matches no flow: a backend's answer, a stray reply, or the host's.
pub const STAGE_ANSWER4: u32 = 2;
/// Stage: FIN, RST and SYN on a live IPv4 flow: state changes off the hot path.
pub const STAGE_FLAGS4: u32 = 3;
/// Stage: ARP.
pub const STAGE_ARP: u32 = 4;
/// Stage: what is no flow's: VIP traffic without a frontend, the host's own, transit.
pub const STAGE_LOCAL: u32 = 5;
/// Stage: answers with RST, ICMP.
pub const STAGE_REJECT: u32 = 6;
/// Stage: an IPv4 UDP datagram that matches no flow.
pub const STAGE_DATAGRAM4: u32 = 7;
/// Stage: as [`STAGE_OPEN4`], IPv6.
pub const STAGE_OPEN6: u32 = 8;
/// Stage: as [`STAGE_PROVE4`], IPv6.
pub const STAGE_PROVE6: u32 = 9;
/// Stage: as [`STAGE_ANSWER4`], IPv6.
pub const STAGE_ANSWER6: u32 = 10;
/// Stage: as [`STAGE_FLAGS4`], IPv6.
pub const STAGE_FLAGS6: u32 = 11;
/// Stage: as [`STAGE_DATAGRAM4`], IPv6.
pub const STAGE_DATAGRAM6: u32 = 12;
/// Stage: a frame with an 802.1Q tag: the tag is taken off, and the frame starts over.
pub const STAGE_TAGGED: u32 = 13;
/// Stage: neighbour discovery.
pub const STAGE_NEIGHBOUR: u32 = 14;
/// Stage: an IPv4 TCP packet of no known flow, to be adopted.
pub const STAGE_ADOPT4: u32 = 15;
/// Stage: as [`STAGE_ADOPT4`], IPv6.
pub const STAGE_ADOPT6: u32 = 16;
/// Stage: the first IPv4 datagram of a backend on a UDP flow.
pub const STAGE_REPLIED4: u32 = 17;
/// Stage: as [`STAGE_REPLIED4`], IPv6.
pub const STAGE_REPLIED6: u32 = 18;
/// Entries of [`names::STAGES`].
pub const STAGE_SLOTS: u32 = 32;

/// The stages: index into [`names::STAGES`] and program name.
pub const STAGE_PROGRAMS: [(u32, &str); 19] = [
    (STAGE_OPEN4, "lbd_open4"),
    (STAGE_PROVE4, "lbd_prove4"),
    (STAGE_ANSWER4, "lbd_answer4"),
    (STAGE_FLAGS4, "lbd_flags4"),
    (STAGE_ARP, "lbd_arp"),
    (STAGE_LOCAL, "lbd_local"),
    (STAGE_REJECT, "lbd_reject"),
    (STAGE_DATAGRAM4, "lbd_datagram4"),
    (STAGE_OPEN6, "lbd_open6"),
    (STAGE_PROVE6, "lbd_prove6"),
    (STAGE_ANSWER6, "lbd_answer6"),
    (STAGE_FLAGS6, "lbd_flags6"),
    (STAGE_DATAGRAM6, "lbd_datagram6"),
    (STAGE_TAGGED, "lbd_tagged"),
    (STAGE_NEIGHBOUR, "lbd_neighbour"),
    (STAGE_ADOPT4, "lbd_adopt4"),
    (STAGE_ADOPT6, "lbd_adopt6"),
    (STAGE_REPLIED4, "lbd_replied4"),
    (STAGE_REPLIED6, "lbd_replied6"),
];

/// The programs at tracepoints of the group `xdp`, which count what goes wrong after the verdict: tracepoint and program name.
pub const TRACE_PROGRAMS: [(&str, &str); 3] =
    [("xdp_redirect_err", "lbd_failed"), ("xdp_exception", "lbd_failed"), ("xdp_devmap_xmit", "lbd_sent")];

/// `.rodata` of the edge program, set for each NIC at load: name of the NIC's first index into [`names::SEGMENTS`].
pub const GLOBAL_SEGMENT_BASE: &str = "SEGMENT_BASE";
/// `.rodata` of the edge program: name of the NIC's ifindex (a next hop with this ifindex leaves by `XDP_TX`).
pub const GLOBAL_IFINDEX: &str = "IFINDEX";
/// `.rodata` of all programs: name of what [`FlowKey::lookup`] is made with; it follows from [`Settings::seed`] of the maps that they are
/// loaded over.
pub const GLOBAL_LOOKUP_SECRET: &str = "LOOKUP_SECRET";

/// Commands of the control program, in [`ControlRequest::command`].
pub mod control {
    /// Mark the flow whose forward key is given, both halves, as dead. Result: 1 if it lived.
    pub const MARK: u32 = 1;
    /// Read the clocks: `jiffies` and `nanoseconds` of the reply.
    pub const CLOCK: u32 = 2;
    /// Age: look at the `count` oldest entries of the queues of both families.
    pub const AGE: u32 = 3;
    /// As [`MARK`], with an IPv6 key ([`super::ControlRequest6`]).
    pub const MARK6: u32 = 4;
    /// Migration: insert a half ([`super::ControlFlow`]), and charge and age it if it is a live forward half. Result: 1 if it was inserted.
    pub const RESTORE: u32 = 5;
    /// Migration: what another program did to a half that is there: adds `bytes` and `packets`, takes later sequence numbers, times and
    /// state bits over. Result: 1 if it is there.
    pub const GROW: u32 = 6;
    /// Migration: a half-open connection ([`super::ControlHalfOpen`]), new or answered meanwhile; `nanoseconds` is its tag. Result: 1 if
    /// it is known now.
    pub const RESTORE_HALF_OPEN: u32 = 7;
    /// Migration: adds `jiffies` and `nanoseconds` to the counters at index `count` of the table `result`: [`CREDIT_TRAFFIC`] (packets and
    /// bytes), [`CREDIT_EVENTS`] (flows and refused) or [`CREDIT_REASON`] (packets).
    pub const CREDIT: u32 = 8;
    /// Table of [`CREDIT`]: [`super::names::TRAFFIC`].
    pub const CREDIT_TRAFFIC: u32 = 0;
    /// Table of [`CREDIT`]: [`super::names::FRONTEND_EVENTS`].
    pub const CREDIT_EVENTS: u32 = 1;
    /// Table of [`CREDIT`]: [`super::names::REASONS`].
    pub const CREDIT_REASON: u32 = 2;
}

abi_struct! {
    /// First bytes of the packet that the control program is run on, and of its answer.
    pub struct ControlRequest<A> {
        /// Destination and source MAC and ethertype in a real frame: zero.
        pub frame: [u8; 16],
        /// One of [`control`].
        pub command: u32,
        /// Argument.
        pub count: u32,
        /// Answer: jiffies (CLOCK).
        pub jiffies: u64,
        /// Answer: `bpf_ktime_get_ns` (CLOCK).
        pub nanoseconds: u64,
        /// Answer: flows marked, or entries looked at.
        pub result: u64,
        /// Forward key (MARK, MARK6).
        pub key: FlowKey<A>,
    }
    size 64 and 88 align 8 offsets {
        command: 16 and 16, count: 20 and 20, jiffies: 24 and 24, nanoseconds: 32 and 32, result: 40 and 40, key: 48 and 48
    }
}

abi_struct! {
    /// Request about one half of a flow.
    pub struct ControlFlow<A> {
        /// The request, with the half's key.
        pub request: ControlRequest<A>,
        /// The half.
        pub flow: Flow<A>,
    }
    size 128 and 208 align 8 offsets { request: 0 and 0, flow: 64 and 88 }
}

abi_struct! {
    /// Request about a half-open connection.
    pub struct ControlHalfOpen<A> {
        /// The request.
        pub request: ControlRequest<A>,
        /// The record.
        pub record: HalfOpen<A>,
    }
    size 128 and 200 align 8 offsets { request: 0 and 0, record: 64 and 88 }
}

/// Request with an IPv4 key, or none.
pub type ControlRequest4 = ControlRequest<Address4>;
/// Request with an IPv6 key.
pub type ControlRequest6 = ControlRequest<Address6>;

/// IPv4 address as an IPv4-mapped IPv6 address.
pub const fn mapped(address: [u8; 4]) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, address[0], address[1], address[2], address[3]]
}

/// The IPv4 address in an IPv4-mapped one.
pub const fn unmapped(address: &[u8; 16]) -> [u8; 4] {
    [address[12], address[13], address[14], address[15]]
}

impl<A: Address> Tuple<A> {
    /// From host types.
    pub fn new(source: (A::Ip, u16), destination: (A::Ip, u16)) -> Self {
        Self {
            source_be: A::from_ip(source.0),
            destination_be: A::from_ip(destination.0),
            source_port_be: source.1.to_be(),
            destination_port_be: destination.1.to_be(),
        }
    }

    /// Source address and port.
    pub fn source(&self) -> SocketAddr {
        SocketAddr::new(self.source_be.ip().into(), u16::from_be(self.source_port_be))
    }

    /// Destination address and port.
    pub fn destination(&self) -> SocketAddr {
        SocketAddr::new(self.destination_be.ip().into(), u16::from_be(self.destination_port_be))
    }

    /// Whether both are the same, word by word.
    #[inline(always)]
    pub fn is(&self, other: &Self) -> bool {
        self.source_port_be == other.source_port_be
            && self.destination_port_be == other.destination_port_be
            && self.source_be.is(other.source_be)
            && self.destination_be.is(other.destination_be)
    }

    /// The other direction.
    #[inline(always)]
    #[must_use]
    pub const fn turned(&self) -> Self {
        Self {
            source_be: self.destination_be,
            destination_be: self.source_be,
            source_port_be: self.destination_port_be,
            destination_port_be: self.source_port_be,
        }
    }
}

impl<A: Address> ControlRequest<A> {
    /// Marks the flow with this forward key as dead.
    pub const fn mark(key: FlowKey<A>) -> Self {
        Self { command: if A::IS_V6 { control::MARK6 } else { control::MARK }, key, ..Self::ZERO }
    }
}

impl<A: Address> FlowKey<A> {
    /// Key of the other half: where replies to `to` arrive.
    #[inline(always)]
    pub const fn reply(to: &Tuple<A>, segment: u16, protocol: u8) -> Self {
        Self { tuple: to.turned(), segment, protocol, pad: 0 }
    }

    /// What the flow table is asked for, with what follows from [`Settings::seed`] ([`crate::hash::lookup_secret`]).
    #[inline(always)]
    pub fn lookup(&self, secret: LookupSecret) -> A::Lookup {
        A::lookup(self, secret)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::{any, prop_assert, proptest};

    use super::*;
    use crate::hash::lookup_secret;

    const SECRET: LookupSecret = lookup_secret(&[0x9fb2_1c65_1e98_df25, 0xa076_1d64_78bd_642f]);
    const PAIR: [u64; 2] = [SECRET[0], SECRET[1]];

    /// For each difference of one or two bits of the destination, the one of the source that hides it under one secret.
    #[test]
    fn what_looks_the_same_under_one_secret_does_not_under_another() {
        let (source, destination) = (0x2001_0db8_000c_0001_u64.swap_bytes(), 0x2001_0db8_000a_0001_u64.swap_bytes());
        for (one, two) in (0..64).flat_map(|one| (0..64).map(move |two| (one, two))) {
            let other = destination ^ (1 << one | 1 << two);
            let hidden = mixed(source, destination, PAIR).wrapping_sub(mixed(0, other, PAIR));
            assert_eq!(mixed(hidden, other, PAIR), mixed(source, destination, PAIR));
            let secret = [0x9e37_79b9_7f4a_7c15, 0x2545_f491_4f6c_dd1d];
            assert_ne!(mixed(hidden, other, secret), mixed(source, destination, secret), "{one}, {two}");
        }
    }

    fn key(source: [u16; 8], destination: [u16; 8]) -> FlowKey6 {
        let tuple = Tuple::new((Ipv6Addr::from(source), 40000), (Ipv6Addr::from(destination), 443));
        FlowKey6 { tuple, segment: 7, protocol: TCP, pad: 0 }
    }

    #[test]
    fn numbered_clients_and_vips_of_numbered_subnets_have_lookups_of_their_own() {
        let mut seen = BTreeMap::new();
        let numbers = [0, 1, 2, 3, 0x7f, 0x80, 0x100, 0x8000, 0xff00, 0xffff];
        for (client_net, vip_net) in numbers.iter().flat_map(|client| numbers.map(|vip| (*client, vip))) {
            for (client, vip) in numbers.iter().flat_map(|client| numbers.map(|vip| (*client, vip))) {
                let source = [0x2001, 0xdb8, 0xc, client_net, 0, 0, 0, client];
                let key = key(source, [0x2001, 0xdb8, 0xa, vip_net, 0, 0, 0, vip]);
                if let Some(other) = seen.insert(key.lookup(SECRET), key) {
                    panic!("{key:?} and {other:?} look the same");
                }
            }
        }
    }

    #[test]
    fn clients_and_vips_of_any_subnets_have_prefixes_of_their_own() {
        let mut seen = BTreeMap::new();
        for (client, vip) in (0..256).flat_map(|client| (0..256).map(move |vip| (client, vip))) {
            let key = key([0x2001, 0xdb8, 0xc, client, 0, 0, 0, 9], [0x2001, 0xdb8, 0xa, vip, 0, 0, 0, 9]);
            if let Some(other) = seen.insert(key.lookup(SECRET).prefixes, key) {
                panic!("{key:?} and {other:?} look the same");
            }
        }
    }

    #[test]
    fn numbered_clients_and_vips_of_one_subnet_have_interfaces_of_their_own() {
        let mut seen = BTreeMap::new();
        for (client, vip) in (0..256).flat_map(|client| (0..256).map(move |vip| (client, vip))) {
            let key = key([0x2001, 0xdb8, 0xc, 9, 0, 0, 0, client], [0x2001, 0xdb8, 0xa, 9, 0, 0, 0, vip]);
            if let Some(other) = seen.insert(key.lookup(SECRET).interfaces, key) {
                panic!("{key:?} and {other:?} look the same");
            }
        }
    }

    proptest! {
        #[test]
        fn a_lookup_shows_whatever_differs_beside_one_address(
            (words, other) in (any::<[u32; 10]>(), any::<[u32; 10]>()),
            changed in 1..1024u32,
            secret in any::<LookupSecret>(),
        ) {
            let key = |words: [u32; 10]| {
                let [s0, s1, s2, s3, d0, d1, d2, d3, ports, last] = words;
                let tuple = Tuple {
                    source_be: [s0, s1, s2, s3],
                    destination_be: [d0, d1, d2, d3],
                    source_port_be: ports as u16,
                    destination_port_be: (ports >> 16) as u16,
                };
                FlowKey { tuple, segment: last as u16, protocol: (last >> 16) as u8, pad: 0 }
            };
            let changed: [u32; 10] =
                std::array::from_fn(|at| if changed & (1 << at) == 0 { words[at] } else { other[at] });
            let (was, is) = (key(words), key(changed));
            let both = was.tuple.source_be != is.tuple.source_be && was.tuple.destination_be != is.tuple.destination_be;
            prop_assert!(was.lookup(secret) != is.lookup(secret) || was == is || both);
        }
    }

    #[test]
    fn adoption_ends_and_does_not_come_back_when_ticks_wrap() {
        let settings = Settings { adopt_until: 10_000, ticks_per_second_256: 62 * 256, ..Settings::ZERO };
        assert!(settings.adopts(9_999) && settings.adopts(10_000u32.wrapping_sub(300 * 62)));
        assert!(!settings.adopts(10_000) && !settings.adopts(10_001));
        assert!(!settings.adopts(10_000u32.wrapping_add(1 << 31)) && !settings.adopts(10_000u32.wrapping_sub(1 << 30)));
        assert!(!Settings { adopt_until: 0, ..settings }.adopts(u32::MAX - 5));
    }

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
