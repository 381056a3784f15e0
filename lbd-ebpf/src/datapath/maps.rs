//! The maps. Keys, values, writers and sizes are in [`lbd_common::abi`]; the loader sets the sizes that depend on the
//! configuration.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    macros::map,
    maps::{Array, HashMap, PerCpuArray, ProgramArray, Queue},
};
use lbd_common::abi::{
    self, Address4, Address6, AddressKey, AgeEntry, AgeEntry4, AgeEntry6, Backend, BackendUse, Flow, Flow4, Flow6,
    FlowKey4, Frontend, FrontendEvents, FrontendKey, FrontendOwner, HalfOpenSet, HalfOpenSet4, HalfOpenSet6, HintLine,
    LocalAddress, Lookup6, MaglevChunk, Making, Making4, Making6, NextHop, Scratch, Segment, Settings, Tenant,
    TenantUse, Timeouts, Traffic,
};
use lbd_common::packet::Family;

use super::{age, choice, half_open};

/// Both halves of every IPv4 flow. Written here only; preallocated, so that inserting never allocates in a softirq.
#[map(name = "flows4")]
pub(crate) static FLOWS4: HashMap<FlowKey4, Flow4> = HashMap::with_max_entries(abi::FLOW_ENTRIES, 0);

/// Both halves of every IPv6 flow.
#[map(name = "flows6")]
pub(crate) static FLOWS6: HashMap<Lookup6, Flow6> = HashMap::with_max_entries(abi::FLOW_ENTRIES6, 0);

/// The clock hand of IPv4 flows.
#[map(name = "ageing4")]
pub(crate) static AGEING4: Queue<AgeEntry4> = Queue::with_max_entries(abi::FLOW_ENTRIES, 0);

/// The clock hand of IPv6 flows.
#[map(name = "ageing6")]
pub(crate) static AGEING6: Queue<AgeEntry6> = Queue::with_max_entries(abi::FLOW_ENTRIES6, 0);

/// IPv4 flows that are over.
#[map(name = "ended4")]
pub(crate) static ENDED4: Queue<AgeEntry4> = Queue::with_max_entries(abi::FLOW_ENTRIES, 0);

/// IPv6 flows that are over.
#[map(name = "ended6")]
pub(crate) static ENDED6: Queue<AgeEntry6> = Queue::with_max_entries(abi::FLOW_ENTRIES6, 0);

/// IPv4 connections that the client has not proven yet.
#[map(name = "half_open4")]
pub(crate) static HALF_OPEN4: Array<HalfOpenSet4> = Array::with_max_entries(abi::HALF_OPEN_SETS, 0);

/// IPv6 connections that the client has not proven yet.
#[map(name = "half_open6")]
pub(crate) static HALF_OPEN6: Array<HalfOpenSet6> = Array::with_max_entries(abi::HALF_OPEN_SETS, 0);

/// Where half-open IPv4 connections are whose first SNAT port was taken.
#[map(name = "hints4")]
pub(crate) static HINTS4: Array<HintLine> = Array::with_max_entries(abi::HINT_LINES, 0);

/// Where half-open IPv6 connections are whose first SNAT port was taken.
#[map(name = "hints6")]
pub(crate) static HINTS6: Array<HintLine> = Array::with_max_entries(abi::HINT_LINES, 0);

/// What is too large for the stack.
#[map(name = "making4")]
pub(crate) static MAKING4: PerCpuArray<Making4> = PerCpuArray::with_max_entries(1, 0);

/// What is too large for the stack.
#[map(name = "making6")]
pub(crate) static MAKING6: PerCpuArray<Making6> = PerCpuArray::with_max_entries(1, 0);

/// Timeouts by index.
#[map(name = "timeouts")]
pub(crate) static TIMEOUTS: Array<Timeouts> = Array::with_max_entries(abi::MAX_TIMEOUTS, 0);

/// What backends answer. Written here only.
#[map(name = "backend_use")]
pub(crate) static BACKEND_USE: Array<BackendUse> = Array::with_max_entries(abi::MAX_BACKENDS, 0);

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

/// The seed, and what is the same for all.
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

/// A family's stages, as indexes into [`STAGES`].
pub(crate) struct FamilyStages {
    pub(crate) open: u32,
    pub(crate) prove: u32,
    pub(crate) answer: u32,
    pub(crate) flags: u32,
    pub(crate) datagram: u32,
    pub(crate) adopt: u32,
    pub(crate) replied: u32,
}

/// A family's maps, stages and functions: what is written for both families is generic over this.
pub(crate) trait Tables: Family {
    /// Index into what the ABI has for each family.
    const INDEX: usize;
    /// Its stages.
    const STAGES: FamilyStages;

    fn flows() -> &'static HashMap<Self::Lookup, Flow<Self>>;
    fn ageing() -> &'static Queue<AgeEntry<Self>>;
    fn ended() -> &'static Queue<AgeEntry<Self>>;
    fn half_open() -> &'static Array<HalfOpenSet<Self>>;
    fn hints() -> &'static Array<HintLine>;
    fn making() -> Option<*mut Making<Self>>;

    /// See [`half_open::take`].
    fn take(port: u32, look: u32, now: u32, expires: u32) -> u64;
    /// See [`choice::may_open`].
    fn may_open(frontend: u32, tenant_timeouts: u32, ranges: u32, udp: u32, now: u32) -> u64;
    /// See [`half_open::find_client`].
    fn find_client(index: u32, hash: u64, now: u32) -> u64;
    /// See [`half_open::find_backend`].
    fn find_backend(index: u32, reverse: u32, now: u32) -> u64;
    /// See [`half_open::find_hint`].
    fn find_hint(hash: u64, now: u32) -> u64;
    /// See [`half_open::leave_hint`].
    fn leave_hint(hash: u64, port: u32, now: u32, expires: u32);
    /// See [`half_open::scan`].
    fn scan(from: u32, now: u32, expires: u32) -> u64;
    /// See [`half_open::search`].
    fn search(now: u32, expires: u32) -> u64;
    /// See [`half_open::insert`].
    fn insert(length: u32, sequence: u32, acknowledged: u32, states: u32, now: u32) -> u64;
    /// See [`age::step`].
    fn age_step(now: u32) -> u64;
    /// See [`age::bury`].
    fn bury(now: u32) -> u64;
}

macro_rules! tables {
    ($address:ty, $index:literal, $flows:ident, $ageing:ident, $ended:ident, $half_open:ident, $hints:ident, $making:ident,
     stages $open:ident $prove:ident $answer:ident $flags:ident $datagram:ident $adopt:ident $replied:ident,
     functions $take:ident $may_open:ident $find_client:ident $find_backend:ident $find_hint:ident $leave_hint:ident $scan:ident $search:ident $insert:ident $age_step:ident $bury:ident) => {
        impl Tables for $address {
            const INDEX: usize = $index;
            const STAGES: FamilyStages = FamilyStages {
                open: abi::$open,
                prove: abi::$prove,
                answer: abi::$answer,
                flags: abi::$flags,
                datagram: abi::$datagram,
                adopt: abi::$adopt,
                replied: abi::$replied,
            };

            #[inline(always)]
            fn flows() -> &'static HashMap<Self::Lookup, Flow<Self>> {
                &$flows
            }
            #[inline(always)]
            fn ageing() -> &'static Queue<AgeEntry<Self>> {
                &$ageing
            }
            #[inline(always)]
            fn ended() -> &'static Queue<AgeEntry<Self>> {
                &$ended
            }
            #[inline(always)]
            fn half_open() -> &'static Array<HalfOpenSet<Self>> {
                &$half_open
            }
            #[inline(always)]
            fn hints() -> &'static Array<HintLine> {
                &$hints
            }
            #[inline(always)]
            fn making() -> Option<*mut Making<Self>> {
                $making.get_ptr_mut(0)
            }
            #[inline(always)]
            fn take(port: u32, look: u32, now: u32, expires: u32) -> u64 {
                $take(port, look, now, expires)
            }
            #[inline(always)]
            fn may_open(frontend: u32, tenant_timeouts: u32, ranges: u32, udp: u32, now: u32) -> u64 {
                $may_open(frontend, tenant_timeouts, ranges, udp, now)
            }
            #[inline(always)]
            fn find_client(index: u32, hash: u64, now: u32) -> u64 {
                $find_client(index, hash, now)
            }
            #[inline(always)]
            fn find_backend(index: u32, reverse: u32, now: u32) -> u64 {
                $find_backend(index, reverse, now)
            }
            #[inline(always)]
            fn find_hint(hash: u64, now: u32) -> u64 {
                $find_hint(hash, now)
            }
            #[inline(always)]
            fn leave_hint(hash: u64, port: u32, now: u32, expires: u32) {
                $leave_hint(hash, port, now, expires);
            }
            #[inline(always)]
            fn scan(from: u32, now: u32, expires: u32) -> u64 {
                $scan(from, now, expires)
            }
            #[inline(always)]
            fn search(now: u32, expires: u32) -> u64 {
                $search(now, expires)
            }
            #[inline(always)]
            fn insert(length: u32, sequence: u32, acknowledged: u32, states: u32, now: u32) -> u64 {
                $insert(length, sequence, acknowledged, states, now)
            }
            #[inline(always)]
            fn age_step(now: u32) -> u64 {
                $age_step(now)
            }
            #[inline(always)]
            fn bury(now: u32) -> u64 {
                $bury(now)
            }
        }

        // Functions of their own for the verifier, which then checks their loops once instead of once for every way to call them.
        // So they take numbers, and find the rest in the maps.

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $take(port: u32, look: u32, now: u32, expires: u32) -> u64 {
            half_open::take::<$address>(port, look, now, expires)
        }
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $may_open(frontend: u32, tenant_timeouts: u32, ranges: u32, udp: u32, now: u32) -> u64 {
            choice::may_open::<$address>(frontend, tenant_timeouts, ranges, udp, now)
        }
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $find_client(index: u32, hash: u64, now: u32) -> u64 {
            half_open::find_client::<$address>(index, hash, now)
        }
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $find_backend(index: u32, reverse: u32, now: u32) -> u64 {
            half_open::find_backend::<$address>(index, reverse, now)
        }
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $find_hint(hash: u64, now: u32) -> u64 {
            half_open::find_hint::<$address>(hash, now)
        }
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $leave_hint(hash: u64, port: u32, now: u32, expires: u32) -> u64 {
            half_open::leave_hint::<$address>(hash, port, now, expires)
        }
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $scan(from: u32, now: u32, expires: u32) -> u64 {
            half_open::scan::<$address>(from, now, expires)
        }
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $search(now: u32, expires: u32) -> u64 {
            half_open::search::<$address>(now, expires)
        }
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $insert(length: u32, sequence: u32, acknowledged: u32, states: u32, now: u32) -> u64 {
            half_open::insert::<$address>(length, sequence, acknowledged, states, now)
        }
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $age_step(now: u32) -> u64 {
            age::step::<$address>(now)
        }
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $bury(now: u32) -> u64 {
            age::bury::<$address>(now)
        }
    };
}

tables!(
    Address4, 0, FLOWS4, AGEING4, ENDED4, HALF_OPEN4, HINTS4, MAKING4,
    stages STAGE_OPEN4 STAGE_PROVE4 STAGE_ANSWER4 STAGE_FLAGS4 STAGE_DATAGRAM4 STAGE_ADOPT4 STAGE_REPLIED4,
    functions lbd_take4 lbd_may_open4 lbd_find_client4 lbd_find_backend4 lbd_find_hint4 lbd_leave_hint4 lbd_scan4 lbd_search4 lbd_insert4 lbd_age_step4 lbd_bury4
);
tables!(
    Address6, 1, FLOWS6, AGEING6, ENDED6, HALF_OPEN6, HINTS6, MAKING6,
    stages STAGE_OPEN6 STAGE_PROVE6 STAGE_ANSWER6 STAGE_FLAGS6 STAGE_DATAGRAM6 STAGE_ADOPT6 STAGE_REPLIED6,
    functions lbd_take6 lbd_may_open6 lbd_find_client6 lbd_find_backend6 lbd_find_hint6 lbd_leave_hint6 lbd_scan6 lbd_search6 lbd_insert6 lbd_age_step6 lbd_bury6
);

/// Not a family's own: see [`choice::choose_backend`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn lbd_choose(table: u32, table_size: u32, hash: u32, attempt_avoid: u32, now: u32) -> u64 {
    choice::choose_backend(table, table_size, hash, attempt_avoid >> 16, attempt_avoid as u16, now)
}
