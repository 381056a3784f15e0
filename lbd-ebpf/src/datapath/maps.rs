//! The maps. Keys, values, writers and sizes are in [`lbd_common::abi`]; the loader sets the sizes that depend on the
//! configuration.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    macros::map,
    maps::{Array, HashMap, PerCpuArray, ProgramArray, Queue},
};
use lbd_common::abi::{
    self, AddressKey, AgeEntry4, Backend, Flow4, FlowKey4, Frontend, FrontendEvents, FrontendKey, FrontendOwner,
    HalfOpenSet4, HintLine, LocalAddress, MaglevChunk, NextHop, Scratch, Segment, Settings, Tenant, TenantUse, Traffic,
};

/// Both halves of every flow. Written here only; preallocated, so that inserting never allocates in a softirq.
#[map(name = "flows4")]
pub(crate) static FLOWS4: HashMap<FlowKey4, Flow4> = HashMap::with_max_entries(abi::FLOW_ENTRIES, 0);

/// The clock hand.
#[map(name = "ageing4")]
pub(crate) static AGEING4: Queue<AgeEntry4> = Queue::with_max_entries(abi::FLOW_ENTRIES, 0);

/// Connections that the client has not proven yet.
#[map(name = "half_open4")]
pub(crate) static HALF_OPEN4: Array<HalfOpenSet4> = Array::with_max_entries(abi::HALF_OPEN_SETS, 0);

/// Where half-open connections are whose first SNAT port was taken.
#[map(name = "hints4")]
pub(crate) static HINTS4: Array<HintLine> = Array::with_max_entries(abi::HINT_LINES, 0);

/// Segments by NIC and VLAN id.
#[map(name = "segments")]
pub(crate) static SEGMENTS: Array<Segment> = Array::with_max_entries(abi::SEGMENT_SLOTS, 0);

/// VIPs, SNAT addresses, the host's own.
#[map(name = "addresses")]
pub(crate) static ADDRESSES: HashMap<AddressKey, LocalAddress> =
    HashMap::with_max_entries(abi::MAX_ADDRESSES, BPF_F_NO_PREALLOC);

/// What clients connect to.
#[map(name = "frontends")]
pub(crate) static FRONTENDS: HashMap<FrontendKey, Frontend> =
    HashMap::with_max_entries(abi::MAX_FRONTENDS, BPF_F_NO_PREALLOC);

/// Lookup tables.
#[map(name = "maglev")]
pub(crate) static MAGLEV: Array<MaglevChunk> = Array::with_max_entries(abi::MAGLEV_CHUNKS, 0);

/// Where connections go.
#[map(name = "backends")]
pub(crate) static BACKENDS: Array<Backend> = Array::with_max_entries(abi::MAX_BACKENDS, 0);

/// How to reach neighbours.
#[map(name = "next_hops")]
pub(crate) static NEXT_HOPS: Array<NextHop> = Array::with_max_entries(abi::MAX_NEXT_HOPS, 0);

/// Limits of tenants.
#[map(name = "tenants")]
pub(crate) static TENANTS: Array<Tenant> = Array::with_max_entries(abi::MAX_TENANTS, 0);

/// What tenants use. Written here only, atomically.
#[map(name = "tenant_use")]
pub(crate) static TENANT_USE: Array<TenantUse> = Array::with_max_entries(abi::MAX_TENANTS, 0);

/// Timeouts and the seed.
#[map(name = "settings")]
pub(crate) static SETTINGS: Array<Settings> = Array::with_max_entries(1, 0);

/// Whose a frontend is.
#[map(name = "frontend_owner")]
pub(crate) static FRONTEND_OWNERS: Array<FrontendOwner> = Array::with_max_entries(abi::MAX_FRONTENDS, 0);

/// Traffic of frontends, by direction. Written here only.
#[map(name = "traffic")]
pub(crate) static TRAFFIC: PerCpuArray<Traffic> = PerCpuArray::with_max_entries(2 * abi::MAX_FRONTENDS, 0);

/// Other counters of frontends. Written here only.
#[map(name = "frontend_event")]
pub(crate) static FRONTEND_EVENTS: PerCpuArray<FrontendEvents> = PerCpuArray::with_max_entries(abi::MAX_FRONTENDS, 0);

/// Packets not forwarded, by tenant and reason. Written here only.
#[map(name = "reasons")]
pub(crate) static REASONS: PerCpuArray<u64> = PerCpuArray::with_max_entries(abi::MAX_TENANTS * abi::REASON_SLOTS, 0);

/// Ids of our programs at NICs and, with [`abi::OWN_INTERFACE`], the NICs' indexes.
#[map(name = "own")]
pub(crate) static OWN: HashMap<u32, u32> = HashMap::with_max_entries(abi::MAX_OWN, BPF_F_NO_PREALLOC);

/// What a stage hands to the next.
#[map(name = "scratch")]
pub(crate) static SCRATCH: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(1, 0);

/// The stages off the hot path; one array for each NIC.
#[map(name = "stages")]
pub(crate) static STAGES: ProgramArray = ProgramArray::with_max_entries(abi::STAGE_SLOTS, 0);
