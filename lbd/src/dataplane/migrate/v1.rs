//! Map ABI 1: TCP over IPv4, untagged. Its layouts, and what becomes of each value in ABI 2 and back.
//!
//! Kept as they were when ABI 1 was last built, whatever becomes of [`lbd_common::abi`]. Pure: no map is touched here.

use bytemuck::{Pod, Zeroable};
use lbd_common::abi::{self, HalfOpen4, Tuple4};
use lbd_common::half_open;

/// Version of the layouts in this module.
pub const VERSION: u32 = 1;
/// The maps that hold what is carried over. ABI 1 has no others but `scratch` and `own`, which hold nothing that lasts.
pub const MAPS: [(&str, usize, usize); 18] = [
    ("flows4", size_of::<FlowKey>(), size_of::<Flow>()),
    ("ageing4", 0, size_of::<AgeEntry>()),
    ("half_open4", 4, size_of::<HalfOpenSet>()),
    ("hints4", 4, size_of::<HintLine>()),
    ("segments", 4, size_of::<Segment>()),
    ("addresses", size_of::<AddressKey>(), size_of::<LocalAddress>()),
    ("frontends", size_of::<FrontendKey>(), size_of::<Frontend>()),
    ("maglev", 4, size_of::<MaglevChunk>()),
    ("backends", 4, size_of::<Backend>()),
    ("next_hops", 4, size_of::<NextHop>()),
    ("next_hop_keys", 4, size_of::<AddressKey>()),
    ("tenants", 4, size_of::<Tenant>()),
    ("tenant_use", 4, size_of::<TenantUse>()),
    ("settings", 4, size_of::<Settings>()),
    ("frontend_owner", 4, size_of::<FrontendOwner>()),
    ("traffic", 4, size_of::<abi::Traffic>()),
    ("frontend_event", 4, size_of::<abi::FrontendEvents>()),
    ("reasons", 4, size_of::<u64>()),
];
/// Entries of `half_open4`.
pub const HALF_OPEN_SETS: u32 = 8192;
/// Records in one [`HalfOpenSet`], and hints in one [`HintLine`].
pub const WAYS: usize = 8;
/// [`Settings::flags`]: unmatched replies are dropped in silence.
pub const SETTING_MIGRATING: u32 = 1 << 0;

/// Where the time of the claim is in a tag, in units of [`COARSE`] ticks.
const TAG_TIME: u32 = 32;
const TAG_TIME_MASK: u64 = (1 << 22) - 1;
/// Where the client's hash is in a tag.
const TAG_CLIENT: u32 = 54;
/// Where that time is in a hint.
const HINT_TIME: u32 = 16;
const HINT_TIME_MASK: u64 = 0xffff;
const COARSE: u32 = 4;

macro_rules! layout {
    ($(#[$meta:meta])* $name:ident: $size:literal { $($field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[expect(missing_docs, reason = "as the fields of the same names in lbd_common::abi")]
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
        pub struct $name { $(pub $field: $type,)* }
        const _: () = assert!(size_of::<$name>() == $size);
    };
}

layout! {
    /// Addresses and ports of one direction.
    Tuple: 12 { source_be: u32, destination_be: u32, source_port_be: u16, destination_port_be: u16, }
}

layout! {
    /// Key of `flows4`.
    FlowKey: 16 { tuple: Tuple, segment: u16, protocol: u8, pad: u8, }
}

layout! {
    /// One half of a flow.
    Flow: 64 {
        tuple: Tuple, segment: u16, next_hop: u16, to: Tuple, last_seen: u32, bytes: u64, packets: u32, sequence: u32,
        acknowledged: u32, own: [u8; 6], frontend: u16, packets_high: u16, state: u16,
    }
}

layout! {
    /// Entry of `ageing4`.
    AgeEntry: 20 { key: FlowKey, created: u32, }
}

layout! {
    /// A connection between SYN and ACK.
    HalfOpen: 64 {
        client: Tuple, client_segment: u16, client_next_hop: u16, to: Tuple, backend_segment: u16, backend_next_hop: u16,
        client_sequence: u32, backend_sequence: u32, client_mac: [u8; 6], backend: u16, frontend: u16, tenant: u16,
        first_syn: u32, last_seen: u32, state: u32,
    }
}

layout! {
    /// A set of half-open records.
    HalfOpenSet: 576 { tags: [u64; WAYS], records: [HalfOpen; WAYS], }
}

layout! {
    /// A line of hints.
    HintLine: 64 { hints: [u64; WAYS], }
}

layout! {
    /// A layer-2 network on a NIC.
    Segment: 32 {
        id: u16, flags: u16, mac: [u8; 6], tenant: u16, gateway_next_hop: u16, on_link_next_hop: u16, vlan: u16, pad: u16,
        network4_be: u32, mask4_be: u32, mtu: u32,
    }
}

layout! {
    /// Key of `addresses`, and value of `next_hop_keys`.
    AddressKey: 20 { address: [u8; 16], segment: u16, port_be: u16, }
}

layout! {
    /// An address that means something in a segment.
    LocalAddress: 8 { flags: u16, tenant: u16, snat_first: u16, snat_last: u16, }
}

layout! {
    /// Key of `frontends`.
    FrontendKey: 24 { vip: [u8; 16], port_be: u16, segment: u16, protocol: u8, pad: [u8; 3], }
}

layout! {
    /// What a client connects to.
    Frontend: 64 {
        vip: [u8; 16], snat: [u8; 16], port_be: u16, segment: u16, protocol: u8, pad: u8, id: u16, tenant: u16, flags: u16,
        target_port_be: u16, snat_first: u16, snat_last: u16, pad2: u16, table: u32, table_size: u32, source_ranges: u32,
    }
}

layout! {
    /// Part of a lookup table.
    MaglevChunk: 64 { slots: [u16; 32], }
}

layout! {
    /// Where connections go.
    Backend: 24 { address: [u8; 16], port_be: u16, segment: u16, next_hop: u16, flags: u16, }
}

layout! {
    /// How to reach a neighbour.
    NextHop: 24 {
        destination: [u8; 6], flags: u16, source: [u8; 6], vlan: u16, ifindex: u32, mtu: u16, segment: u16,
    }
}

layout! {
    /// A tenant's limits.
    Tenant: 16 { max_flows: u32, new_flows_per_second: u32, max_half_open: u32, flags: u32, }
}

layout! {
    /// What a tenant uses.
    TenantUse: 32 { flows: u64, new_flows: u64, window: u64, total: u64, }
}

layout! {
    /// Whose a frontend is.
    FrontendOwner: 8 { tenant: u16, pad: [u16; 3], }
}

layout! {
    /// What the agent tells the datapath.
    Settings: 80 {
        abi: u32, flags: u32, seed: [u64; 2], ticks_per_second_256: u32, tcp_established: u32, tcp_half_open: u32, tcp_fin: u32,
        tcp_reset: u32, udp_unreplied: u32, udp_replied: u32, tombstone: u32, grace: u32, rejects_per_tick: u32,
        half_open_sets: u32, adopt_until: u32, max_mss: u32, pad: u32,
    }
}

const fn tuple(old: &Tuple) -> Tuple4 {
    Tuple4 {
        source_be: old.source_be,
        destination_be: old.destination_be,
        source_port_be: old.source_port_be,
        destination_port_be: old.destination_port_be,
    }
}

const fn tuple_back(new: &Tuple4) -> Tuple {
    Tuple {
        source_be: new.source_be,
        destination_be: new.destination_be,
        source_port_be: new.source_port_be,
        destination_port_be: new.destination_port_be,
    }
}

/// A flow's key.
pub const fn flow_key(old: &FlowKey) -> abi::FlowKey4 {
    abi::FlowKey4 { tuple: tuple(&old.tuple), segment: old.segment, protocol: old.protocol, pad: 0 }
}

/// A flow's key; `None` if ABI 1 cannot have it.
pub fn flow_key_back(new: &abi::FlowKey4) -> Option<FlowKey> {
    let key = FlowKey { tuple: tuple_back(&new.tuple), segment: new.segment, protocol: new.protocol, pad: 0 };
    (new.protocol == lbd_common::packet::TCP).then_some(key)
}

/// Bits of [`Flow::state`], which mean the same in ABI 2.
const STATES: u16 = abi::FLOW_REVERSE
    | abi::FLOW_FIN
    | abi::FLOW_PEER_FIN
    | abi::FLOW_RESET
    | abi::FLOW_DEAD
    | abi::FLOW_ADOPTED
    | abi::FLOW_REPLIED;

/// One half of a flow. Whoever was about to delete it (`FLOW_BUSY`) is not there any more: it is dead and left to the clock hand.
pub const fn flow(old: &Flow) -> abi::Flow4 {
    abi::Flow4 {
        tuple: tuple(&old.tuple),
        segment: old.segment,
        next_hop: old.next_hop,
        to: tuple(&old.to),
        last_seen: old.last_seen,
        bytes: old.bytes,
        packets: old.packets,
        sequence: old.sequence,
        acknowledged: old.acknowledged,
        own: old.own,
        frontend: old.frontend,
        packets_high: old.packets_high,
        spare: [],
        state: old.state & STATES,
    }
}

/// One half of a flow.
pub const fn flow_back(new: &abi::Flow4) -> Flow {
    Flow {
        tuple: tuple_back(&new.tuple),
        segment: new.segment,
        next_hop: new.next_hop,
        to: tuple_back(&new.to),
        last_seen: new.last_seen,
        bytes: new.bytes,
        packets: new.packets,
        sequence: new.sequence,
        acknowledged: new.acknowledged,
        own: new.own,
        frontend: new.frontend,
        packets_high: new.packets_high,
        state: new.state & STATES,
    }
}

/// A half-open connection.
pub const fn half_open(old: &HalfOpen) -> HalfOpen4 {
    HalfOpen4 {
        client: tuple(&old.client),
        client_segment: old.client_segment,
        client_next_hop: old.client_next_hop,
        to: tuple(&old.to),
        backend_segment: old.backend_segment,
        backend_next_hop: old.backend_next_hop,
        client_sequence: old.client_sequence,
        backend_sequence: old.backend_sequence,
        client_mac: old.client_mac,
        backend: old.backend,
        frontend: old.frontend,
        tenant: old.tenant,
        first_syn: old.first_syn,
        last_seen: old.last_seen,
        state: old.state & (abi::HALF_OPEN_ANSWERED | abi::HALF_OPEN_REFUSED),
    }
}

/// A half-open connection.
pub const fn half_open_back(new: &HalfOpen4) -> HalfOpen {
    HalfOpen {
        client: tuple_back(&new.client),
        client_segment: new.client_segment,
        client_next_hop: new.client_next_hop,
        to: tuple_back(&new.to),
        backend_segment: new.backend_segment,
        backend_next_hop: new.backend_next_hop,
        client_sequence: new.client_sequence,
        backend_sequence: new.backend_sequence,
        client_mac: new.client_mac,
        backend: new.backend,
        frontend: new.frontend,
        tenant: new.tenant,
        first_syn: new.first_syn,
        last_seen: new.last_seen,
        state: new.state & (abi::HALF_OPEN_ANSWERED | abi::HALF_OPEN_REFUSED),
    }
}

/// An owner word: it holds when its record was claimed, in ABI 2 when it expires. Free unless the record may be read: what was being
/// written when the programs changed is not there.
pub const fn tag(old: u64, now: u32, settings: &Settings) -> u64 {
    let state = old & half_open::STATE;
    let claimed = (old >> TAG_TIME) & TAG_TIME_MASK;
    let lifetime = settings.tcp_half_open >> COARSE;
    let age = ((now >> COARSE) as u64).wrapping_sub(claimed) & TAG_TIME_MASK;
    if state == half_open::FREE || state == half_open::BUSY || age > lifetime as u64 {
        return 0;
    }
    let client = ((old >> TAG_CLIENT) & 0xff) << 56;
    // The last unit in which it is still there; `tag` adds one.
    let last = (claimed as u32).wrapping_add(lifetime) << COARSE;
    half_open::tag(half_open::LIVE, half_open::reverse(old), client, last)
}

/// An owner word.
pub const fn tag_back(new: u64, now: u32, settings: &Settings) -> u64 {
    if !half_open::readable(new, now) {
        return 0;
    }
    let expires = (new >> TAG_TIME) & TAG_TIME_MASK;
    let claimed = expires.wrapping_sub((settings.tcp_half_open >> COARSE) as u64 + 1) & TAG_TIME_MASK;
    half_open::with_state(new & !(TAG_TIME_MASK << TAG_TIME), half_open::LIVE) | claimed << TAG_TIME
}

/// Where a half-open connection is whose first SNAT port was taken: as with [`tag`].
pub const fn hint(old: u64, now: u32, settings: &Settings) -> u64 {
    let lifetime = settings.tcp_half_open >> COARSE;
    let age = ((now >> COARSE) as u64).wrapping_sub(old >> HINT_TIME) & HINT_TIME_MASK;
    if old == 0 || age > lifetime as u64 {
        return 0;
    }
    let left = (now >> COARSE).wrapping_sub(age as u32);
    half_open::hint(old, old as u16, left.wrapping_add(lifetime) << COARSE)
}

/// A segment: without IPv6.
pub const fn segment(old: &Segment) -> abi::Segment {
    abi::Segment {
        id: old.id,
        flags: old.flags,
        mac: old.mac,
        tenant: old.tenant,
        gateway_next_hop: old.gateway_next_hop,
        on_link_next_hop: old.on_link_next_hop,
        vlan: old.vlan,
        gateway6_next_hop: 0,
        network4_be: old.network4_be,
        mask4_be: old.mask4_be,
        mtu: old.mtu,
        network6_be: [0; 4],
        mask6_be: if old.id == 0 { [0; 4] } else { [u32::MAX; 4] },
        second_network6_be: [0; 4],
        second_mask6_be: if old.id == 0 { [0; 4] } else { [u32::MAX; 4] },
        second_network4_be: 0,
        second_mask4_be: if old.id == 0 { 0 } else { u32::MAX },
        reserved: [0; 6],
    }
}

/// A segment; nothing (id 0) if ABI 1 cannot have it.
pub const fn segment_back(new: &abi::Segment) -> Segment {
    if new.vlan != 0 {
        return Segment {
            id: 0,
            flags: 0,
            mac: [0; 6],
            tenant: 0,
            gateway_next_hop: 0,
            on_link_next_hop: 0,
            vlan: 0,
            pad: 0,
            network4_be: 0,
            mask4_be: 0,
            mtu: 0,
        };
    }
    Segment {
        id: new.id,
        flags: new.flags & (abi::SEGMENT_TENANT | abi::SEGMENT_HUB),
        mac: new.mac,
        tenant: new.tenant,
        gateway_next_hop: new.gateway_next_hop,
        on_link_next_hop: new.on_link_next_hop,
        vlan: 0,
        pad: 0,
        network4_be: new.network4_be,
        mask4_be: new.mask4_be,
        mtu: new.mtu,
    }
}

/// The key of an address.
pub const fn address_key(old: &AddressKey) -> abi::AddressKey {
    abi::AddressKey { address: old.address, segment: old.segment, port_be: old.port_be }
}

/// The key of an address; `None` for one of IPv6.
pub fn address_key_back(new: &abi::AddressKey) -> Option<AddressKey> {
    let key = AddressKey { address: new.address, segment: new.segment, port_be: new.port_be };
    (is_mapped(&new.address) || new.address == [0; 16]).then_some(key)
}

/// Whether it is an IPv4 address.
fn is_mapped(address: &[u8; 16]) -> bool {
    *address == abi::mapped(abi::unmapped(address))
}

/// Bits of [`LocalAddress::flags`], which mean the same in ABI 2.
const ADDRESSES: u16 = abi::ADDRESS_VIP
    | abi::ADDRESS_SNAT
    | abi::ADDRESS_HOST
    | abi::ADDRESS_ANSWER
    | abi::ADDRESS_BACKEND
    | abi::ADDRESS_TARGET_PORT;

/// An address.
pub const fn address(old: &LocalAddress) -> abi::LocalAddress {
    abi::LocalAddress {
        flags: old.flags & ADDRESSES,
        tenant: old.tenant,
        snat_first: old.snat_first,
        snat_last: old.snat_last,
    }
}

/// An address; `None` if it means nothing in ABI 1.
pub fn address_back(new: &abi::LocalAddress) -> Option<LocalAddress> {
    let flags = new.flags & ADDRESSES;
    let value = LocalAddress { flags, tenant: new.tenant, snat_first: new.snat_first, snat_last: new.snat_last };
    (flags != 0).then_some(value)
}

/// The key of a frontend.
pub const fn frontend_key(old: &FrontendKey) -> abi::FrontendKey {
    abi::FrontendKey { vip: old.vip, port_be: old.port_be, segment: old.segment, protocol: old.protocol, pad: [0; 3] }
}

/// A frontend.
pub const fn frontend(old: &Frontend) -> abi::Frontend {
    abi::Frontend {
        vip: old.vip,
        snat: old.snat,
        port_be: old.port_be,
        segment: old.segment,
        protocol: old.protocol,
        pad: 0,
        id: old.id,
        tenant: old.tenant,
        flags: old.flags & FRONTENDS,
        target_port_be: old.target_port_be,
        snat_first: old.snat_first,
        snat_last: old.snat_last,
        timeouts: 0,
        table: old.table,
        table_size: old.table_size,
        source_ranges: 0,
    }
}

/// Bits of [`Frontend::flags`], which mean the same in ABI 2.
const FRONTENDS: u16 = abi::FRONTEND_SOURCE_AFFINITY | abi::FRONTEND_PRESERVE_CLIENT | abi::FRONTEND_UNSERVED_DROP;

/// A frontend with its key; `None` if ABI 1 cannot serve it as it is meant: it would let through what `source_ranges` forbids, and
/// without SNAT it finds no way back.
pub fn frontend_back(new: &abi::Frontend) -> Option<(FrontendKey, Frontend)> {
    let expressible = new.protocol == lbd_common::packet::TCP
        && is_mapped(&new.vip)
        && is_mapped(&new.snat)
        && new.source_ranges == 0
        && new.flags & abi::FRONTEND_PRESERVE_CLIENT == 0;
    let key =
        FrontendKey { vip: new.vip, port_be: new.port_be, segment: new.segment, protocol: new.protocol, pad: [0; 3] };
    let value = Frontend {
        vip: new.vip,
        snat: new.snat,
        port_be: new.port_be,
        segment: new.segment,
        protocol: new.protocol,
        pad: 0,
        id: new.id,
        tenant: new.tenant,
        flags: new.flags & FRONTENDS,
        target_port_be: new.target_port_be,
        snat_first: new.snat_first,
        snat_last: new.snat_last,
        pad2: 0,
        table: new.table,
        table_size: new.table_size,
        source_ranges: 0,
    };
    expressible.then_some((key, value))
}

/// Part of a lookup table.
pub const fn chunk(old: &MaglevChunk) -> abi::MaglevChunk {
    abi::MaglevChunk { slots: old.slots }
}

/// Part of a lookup table.
pub const fn chunk_back(new: &abi::MaglevChunk) -> MaglevChunk {
    MaglevChunk { slots: new.slots }
}

/// A backend.
pub const fn backend(old: &Backend) -> abi::Backend {
    abi::Backend {
        address: old.address,
        port_be: old.port_be,
        segment: old.segment,
        next_hop: old.next_hop,
        flags: old.flags & (abi::BACKEND_PRESENT | abi::BACKEND_ELIGIBLE),
        ours_be: 0,
        ours_mask_be: 0,
    }
}

/// A backend; nothing if it is one of IPv6.
pub fn backend_back(new: &abi::Backend) -> Backend {
    if !is_mapped(&new.address) {
        return Backend::zeroed();
    }
    Backend {
        address: new.address,
        port_be: new.port_be,
        segment: new.segment,
        next_hop: new.next_hop,
        flags: new.flags & (abi::BACKEND_PRESENT | abi::BACKEND_ELIGIBLE),
    }
}

/// A next hop.
pub const fn next_hop(old: &NextHop) -> abi::NextHop {
    abi::NextHop {
        destination: old.destination,
        flags: old.flags & (abi::NEXT_HOP_RESOLVED | abi::NEXT_HOP_ON_LINK),
        source: old.source,
        vlan: old.vlan,
        ifindex: old.ifindex,
        mtu: old.mtu,
        segment: old.segment,
    }
}

/// A next hop; one that needs a tag leads nowhere in ABI 1, which sends without.
pub fn next_hop_back(new: &abi::NextHop) -> NextHop {
    if new.vlan != 0 {
        return NextHop::zeroed();
    }
    NextHop {
        destination: new.destination,
        flags: new.flags & (abi::NEXT_HOP_RESOLVED | abi::NEXT_HOP_ON_LINK),
        source: new.source,
        vlan: 0,
        ifindex: new.ifindex,
        mtu: new.mtu,
        segment: new.segment,
    }
}

/// A tenant's limits: the new kinds of limit are none until the agent says otherwise.
pub const fn tenant(old: &Tenant) -> abi::Tenant {
    let limits = abi::FamilyLimits { flows: old.max_flows, udp: 0, half_open: old.max_half_open, pad: 0 };
    abi::Tenant {
        families: [limits, limits],
        new_flows_per_second: old.new_flows_per_second,
        flags: old.flags & (abi::TENANT_HOST_ACCESS_OWN | abi::TENANT_HOST_ACCESS_ICMP),
    }
}

/// A tenant's limits.
pub const fn tenant_back(new: &abi::Tenant) -> Tenant {
    Tenant {
        max_flows: new.families[0].flows,
        new_flows_per_second: new.new_flows_per_second,
        max_half_open: new.families[0].half_open,
        flags: new.flags & (abi::TENANT_HOST_ACCESS_OWN | abi::TENANT_HOST_ACCESS_ICMP),
    }
}

/// Whose a frontend is.
pub const fn owner(old: &FrontendOwner) -> abi::FrontendOwner {
    abi::FrontendOwner { tenant: old.tenant, timeouts: 0, pad: [0; 2] }
}

/// Whose a frontend is.
pub const fn owner_back(new: &abi::FrontendOwner) -> FrontendOwner {
    FrontendOwner { tenant: new.tenant, pad: [0; 3] }
}

/// What the datapath is told.
pub const fn settings(old: &Settings) -> abi::Settings {
    let epoch = old.tcp_half_open.div_ceil(6);
    abi::Settings {
        abi: abi::ABI_VERSION,
        flags: 0,
        seed: old.seed,
        ticks_per_second_256: old.ticks_per_second_256,
        tombstone: old.tombstone,
        grace: old.grace,
        half_open_epoch: if epoch == 0 { 1 } else { epoch },
        rejects_per_tick: old.rejects_per_tick,
        adopt_until: old.adopt_until,
        max_mss: old.max_mss,
        pad: 0,
    }
}

/// The default timeouts.
pub const fn timeouts(old: &Settings) -> abi::Timeouts {
    abi::Timeouts {
        tcp_established: old.tcp_established,
        tcp_half_open: old.tcp_half_open,
        tcp_fin: old.tcp_fin,
        tcp_reset: old.tcp_reset,
        udp_unreplied: old.udp_unreplied,
        udp_replied: old.udp_replied,
    }
}

/// What the datapath is told.
pub const fn settings_back(new: &abi::Settings, timeouts: &abi::Timeouts) -> Settings {
    Settings {
        abi: VERSION,
        flags: 0,
        seed: new.seed,
        ticks_per_second_256: new.ticks_per_second_256,
        tcp_established: timeouts.tcp_established,
        tcp_half_open: timeouts.tcp_half_open,
        tcp_fin: timeouts.tcp_fin,
        tcp_reset: timeouts.tcp_reset,
        udp_unreplied: timeouts.udp_unreplied,
        udp_replied: timeouts.udp_replied,
        tombstone: new.tombstone,
        grace: new.grace,
        rejects_per_tick: new.rejects_per_tick,
        half_open_sets: HALF_OPEN_SETS,
        adopt_until: new.adopt_until,
        max_mss: new.max_mss,
        pad: 0,
    }
}

#[cfg(test)]
mod tests {
    use lbd_common::abi::{Flow4, FlowKey4, Tuple4};
    use lbd_common::hash;
    use proptest::prelude::*;

    use super::*;

    /// Half a minute at 250 Hz.
    const SETTINGS: Settings = Settings {
        abi: 1,
        flags: SETTING_MIGRATING,
        seed: [7, 9],
        ticks_per_second_256: 4000,
        tcp_established: 1_350_000,
        tcp_half_open: 469,
        tcp_fin: 938,
        tcp_reset: 157,
        udp_unreplied: 469,
        udp_replied: 2813,
        tombstone: 1172,
        grace: 4,
        rejects_per_tick: 64,
        half_open_sets: HALF_OPEN_SETS,
        adopt_until: 5,
        max_mss: 65535,
        pad: 0,
    };

    fn bytes<T: Pod>(seed: u8) -> T {
        let mut value = T::zeroed();
        for (at, byte) in bytemuck::bytes_of_mut(&mut value).iter_mut().enumerate() {
            *byte = (at as u8).wrapping_mul(31).wrapping_add(seed) | 1;
        }
        value
    }

    #[test]
    fn a_flow_keeps_all_but_the_bits_that_are_not_its_state() {
        let old: Flow = Flow { state: abi::FLOW_REVERSE | abi::FLOW_PEER_FIN, ..bytes(3) };
        let new = flow(&old);
        assert_eq!((new.own, new.frontend, new.packets_high), (old.own, old.frontend, old.packets_high));
        assert_eq!(
            (new.created(), new.backend()),
            (
                u32::from_ne_bytes([old.own[0], old.own[1], old.own[2], old.own[3]]),
                u16::from_ne_bytes([old.own[4], old.own[5]])
            )
        );
        assert_eq!(flow_back(&new), old);
        let busy = Flow { state: abi::FLOW_DEAD | abi::FLOW_BUSY, ..old };
        assert_eq!(flow(&busy).state, abi::FLOW_DEAD);
        let newer = Flow4 { state: abi::FLOW_DEAD | abi::FLOW_ENDED, ..new };
        assert_eq!(flow_back(&newer).state, abi::FLOW_DEAD);
    }

    #[test]
    fn keys_of_other_protocols_do_not_go_back() {
        let old = FlowKey { protocol: 6, pad: 0, ..bytes(5) };
        assert_eq!(flow_key_back(&flow_key(&old)), Some(old));
        assert_eq!(flow_key_back(&FlowKey4 { protocol: 17, ..flow_key(&old) }), None);
    }

    /// What ABI 1 made of a claim.
    fn tag1(state: u64, reverse: u32, client: u64, now: u32) -> u64 {
        state
            | u64::from(reverse)
            | (u64::from(now >> COARSE) & TAG_TIME_MASK) << TAG_TIME
            | (client >> 56) << TAG_CLIENT
    }

    /// Whether ABI 1 took the record for one that may be read.
    fn readable1(tag: u64, now: u32) -> bool {
        let age = u64::from(now >> COARSE).wrapping_sub(tag >> TAG_TIME) & TAG_TIME_MASK;
        tag & half_open::STATE > half_open::BUSY && age <= u64::from(SETTINGS.tcp_half_open >> COARSE)
    }

    proptest! {
        #[test]
        fn a_record_lives_exactly_as_long_as_it_would_have(reverse: u32, client: u64, claimed: u32, passed in 0..900u32, more in 0..900u32) {
            let old = tag1(half_open::PROMOTING, reverse, client, claimed);
            let now = claimed.wrapping_add(passed);
            let new = tag(old, now, &SETTINGS);
            prop_assert_eq!(half_open::readable(new, now), readable1(old, now));
            let later = now.wrapping_add(more);
            if new != 0 {
                prop_assert_eq!(half_open::reverse(new), reverse);
                prop_assert!(half_open::may_be_client(new, client));
                prop_assert_eq!(half_open::readable(new, later), readable1(old, later));
                prop_assert_eq!(tag_back(new, now, &SETTINGS), half_open::with_state(old, half_open::LIVE));
            }
        }

        #[test]
        fn a_hint_too(client: u64, port in 1u16.., left: u32, passed in 0..900u32) {
            let old = client & 0xffff_ffff_0000_0000 | (u64::from(left >> COARSE) & 0xffff) << HINT_TIME | u64::from(port);
            let now = left.wrapping_add(passed);
            let new = hint(old, now, &SETTINGS);
            let age = (now >> COARSE).wrapping_sub(left >> COARSE);
            if age <= SETTINGS.tcp_half_open >> COARSE {
                prop_assert_eq!(half_open::hinted_port(new, client, now), Some(port));
            } else {
                prop_assert_eq!(new, 0);
            }
        }
    }

    #[test]
    fn a_record_that_is_being_written_is_not_taken() {
        assert_eq!(tag(tag1(half_open::BUSY, 1, 2, 100), 100, &SETTINGS), 0);
        assert_eq!(tag(0, 100, &SETTINGS), 0);
    }

    #[test]
    fn a_half_open_connection_is_found_where_it_was() {
        let old: HalfOpen = HalfOpen { state: abi::HALF_OPEN_ANSWERED, ..bytes(9) };
        let new = half_open(&old);
        assert_eq!(
            (new.client_mac, new.backend_sequence, new.tenant),
            (old.client_mac, old.backend_sequence, old.tenant)
        );
        assert_eq!(half_open_back(&new), old);
        let tried = HalfOpen4 { state: abi::HALF_OPEN_ANSWERED | 3 << abi::HALF_OPEN_ATTEMPT_SHIFT, ..new };
        assert_eq!(half_open_back(&tried), old);
        // The hashes of ABI 1, taken from its build: a copied record is looked for under the same words.
        let to = Tuple4 {
            source_be: u32::from_ne_bytes([10, 0, 0, 2]),
            destination_be: u32::from_ne_bytes([10, 0, 0, 11]),
            source_port_be: 2000_u16.to_be(),
            destination_port_be: 30918_u16.to_be(),
        };
        let key = FlowKey4 { tuple: to, segment: 2, protocol: 6, pad: 0 };
        assert_eq!((hash::reverse(&to, 2, 6), hash::flow(&[7, 9], &key)), (REVERSE1, FLOW1));
    }
    const REVERSE1: u32 = 0xefc4_0b27;
    const FLOW1: u64 = 0x2260_6fef_e449_1e71;

    #[test]
    fn limits_and_timeouts_keep_their_meaning() {
        let old = Tenant { max_flows: 1000, new_flows_per_second: 50, max_half_open: 64, flags: 3 };
        let new = tenant(&old);
        assert_eq!((new.families[0].flows, new.families[0].half_open, new.families[0].udp), (1000, 64, 0));
        assert_eq!((new.new_flows_per_second, new.flags), (50, 3));
        assert_eq!(tenant_back(&new), old);

        let (told, times) = (settings(&SETTINGS), timeouts(&SETTINGS));
        assert_eq!((told.abi, told.flags, told.seed), (abi::ABI_VERSION, 0, [7, 9]));
        assert_eq!((told.half_open_epoch, told.grace, told.tombstone), (79, 4, 1172));
        assert_eq!((times.tcp_established, times.tcp_fin, times.udp_replied), (1_350_000, 938, 2813));
        assert_eq!(settings_back(&told, &times), Settings { flags: 0, ..SETTINGS });
    }

    #[test]
    fn a_segment_and_its_hops_stay_and_tagged_ones_do_not_go_back() {
        let old = Segment { id: 3, flags: 1, vlan: 0, pad: 0, ..bytes(2) };
        let new = segment(&old);
        assert_eq!(
            (new.gateway_next_hop, new.gateway6_next_hop, new.mask6_be),
            (old.gateway_next_hop, 0, [u32::MAX; 4])
        );
        assert_eq!(segment_back(&new), old);
        assert_eq!(segment_back(&abi::Segment { vlan: 7, ..new }).id, 0);
        let hop = NextHop { flags: 3, vlan: 0, ..bytes(4) };
        assert_eq!(next_hop_back(&next_hop(&hop)), hop);
        assert_eq!(next_hop_back(&abi::NextHop { vlan: 7, ..next_hop(&hop) }), NextHop::zeroed());
    }

    #[test]
    fn frontends_that_abi_1_would_serve_wrongly_do_not_go_back() {
        let old = Frontend {
            vip: abi::mapped([192, 0, 2, 34]),
            snat: abi::mapped([10, 0, 0, 2]),
            protocol: 6,
            pad: 0,
            pad2: 0,
            flags: abi::FRONTEND_SOURCE_AFFINITY,
            source_ranges: 0,
            ..bytes(6)
        };
        let new = frontend(&old);
        let (key, back) = frontend_back(&new).unwrap();
        assert_eq!(back, old);
        assert_eq!((key.vip, key.port_be, key.segment), (old.vip, old.port_be, old.segment));
        let mut six = new.vip;
        six[0] = 0x20;
        for other in [
            abi::Frontend { protocol: 17, ..new },
            abi::Frontend { vip: six, ..new },
            abi::Frontend { source_ranges: 1, ..new },
            abi::Frontend { flags: abi::FRONTEND_PRESERVE_CLIENT, snat: [0; 16], ..new },
        ] {
            assert_eq!(frontend_back(&other), None);
        }
    }

    #[test]
    fn addresses_and_backends_of_the_other_family_do_not_go_back() {
        let key = AddressKey { address: abi::mapped([10, 0, 0, 11]), segment: 2, port_be: 0 };
        assert_eq!(address_key_back(&address_key(&key)), Some(key));
        let port = AddressKey { address: [0; 16], segment: 2, port_be: 7 };
        assert_eq!(address_key_back(&address_key(&port)), Some(port));
        let mut six = address_key(&key);
        six.address[0] = 0x20;
        assert_eq!(address_key_back(&six), None);
        let value = LocalAddress { flags: abi::ADDRESS_VIP, tenant: 1, snat_first: 0, snat_last: 0 };
        assert_eq!(address_back(&address(&value)), Some(value));
        assert_eq!(address_back(&abi::LocalAddress { flags: abi::ADDRESS_HOST_PORT, ..address(&value) }), None);
        let backend1 = Backend { address: key.address, port_be: 0, segment: 2, next_hop: 5, flags: 3 };
        assert_eq!(backend_back(&backend(&backend1)), backend1);
        assert_eq!(backend_back(&abi::Backend { address: six.address, ..backend(&backend1) }), Backend::zeroed());
        let chunk1 = MaglevChunk { slots: [7; 32] };
        assert_eq!(chunk_back(&chunk(&chunk1)), chunk1);
        let owner1 = FrontendOwner { tenant: 4, pad: [0; 3] };
        assert_eq!(owner_back(&owner(&owner1)), owner1);
    }
}
