//! A read-only view of the pinned maps, for `lbctl`: works with the agent dead.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, BuildHasherDefault, Hash, Hasher};
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytemuck::Pod;
use lbd_common::abi::{
    self, Address, Address4, Address6, AddressKey, Backend, ControlRequest4, FLOW_DEAD, FLOW_REVERSE, Flow, FlowKey,
    Frontend, FrontendCounters, FrontendEvents, FrontendKey, FrontendOwner, HalfOpen, HalfOpenSet, LocalAddress,
    MaglevChunk, NextHop, Segment, Settings, Tenant, TenantUse, Timeouts, Traffic, control, names,
};
use lbd_common::reason::Reason;
use lbd_common::{half_open, hash};

use super::bpf::{self, Map, PerCpu};
use super::contents::{self, HopKey};
use super::loader::{self, HOP_RECORDS, Paths};
use super::{Attached, DataplaneError, engine};

/// The tables of one address family.
pub trait FlowTables: Address {
    /// Place among a tenant's limits and uses ([`Tenant::families`]).
    const FAMILY: usize;
    /// Name of the flow table.
    const FLOWS: &'static str;
    /// Name of the table of half-open connections.
    const HALF_OPEN: &'static str;
}

impl FlowTables for Address4 {
    const FAMILY: usize = 0;
    const FLOWS: &'static str = names::FLOWS4;
    const HALF_OPEN: &'static str = names::HALF_OPEN4;
}

impl FlowTables for Address6 {
    const FAMILY: usize = 1;
    const FLOWS: &'static str = names::FLOWS6;
    const HALF_OPEN: &'static str = names::HALF_OPEN6;
}

/// A flow: both halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowPair<A: Address> {
    /// Client → VIP, as it arrives.
    pub key: FlowKey<A>,
    /// The forward half.
    pub forward: Flow<A>,
    /// The reverse half, if it was found.
    pub reverse: Option<Answers>,
    /// Segment of the backend; 0 if it is not known any more.
    pub backend_segment: u16,
}

/// What the reverse half of a flow adds to the forward half.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answers {
    /// Tick of the last packet.
    pub last_seen: u32,
    /// `FLOW_*` bits.
    pub state: u16,
    /// Bytes of IP packets.
    pub bytes: u64,
    /// Packets.
    pub packets: u64,
}

impl<A: Address> From<&Flow<A>> for Answers {
    fn from(half: &Flow<A>) -> Self {
        Self { last_seen: half.last_seen, state: half.state, bytes: half.bytes, packets: half.packets() }
    }
}

/// How full a map is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Map name.
    pub name: &'static str,
    /// Entries that it can hold.
    pub max: u32,
    /// Entries in use, where that means something.
    pub used: Option<u64>,
}

/// The pinned maps, to be read; works with the agent dead.
pub struct Pins {
    paths: Paths,
    settings: Map<u32, Settings>,
    control: OwnedFd,
}

impl Pins {
    /// Opens the pins below `bpffs`.
    pub fn open(bpffs: &Path) -> Result<Self, DataplaneError> {
        let paths = Paths::new(bpffs);
        let missing = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => DataplaneError::NotThere { path: paths.maps.clone() },
            _ => DataplaneError::system(format!("cannot open {}", paths.map(names::SETTINGS).display()))(error),
        };
        let settings = match Map::<u32, Settings>::open(&paths.map(names::SETTINGS)) {
            Ok(settings) => settings,
            Err(error) => {
                if error.kind() == io::ErrorKind::NotFound {
                    paths.check_abi()?;
                    bpf::is_bpffs(bpffs).map_err(|found| DataplaneError::NoBpffs { path: bpffs.to_owned(), found })?;
                }
                return Err(missing(error));
            }
        };
        let control = bpf::open(&paths.map(names::CONTROL)).map_err(missing)?;
        Ok(Self { paths, settings, control })
    }

    fn map<K: Pod, V: Pod>(&self, name: &str) -> Result<Map<K, V>, DataplaneError> {
        Map::open(&self.paths.map(name)).map_err(DataplaneError::system(format!("cannot open map {name}")))
    }

    fn collect<K: Pod, V: Pod, T>(
        &self,
        name: &str,
        mut pick: impl FnMut(&K, &V) -> Option<T>,
    ) -> Result<Vec<T>, DataplaneError> {
        let mut found = Vec::new();
        self.map::<K, V>(name)?
            .for_each(|key, value| found.extend(pick(key, value)))
            .map_err(DataplaneError::system(format!("cannot read map {name}")))?;
        Ok(found)
    }

    /// What the agent last told the datapath.
    pub fn settings(&self) -> Result<Settings, DataplaneError> {
        let found = self
            .settings
            .get(&0)
            .map_err(DataplaneError::system(format!("cannot read map {}", names::SETTINGS)))?
            .unwrap_or(Settings::ZERO);
        if found.abi != abi::ABI_VERSION {
            let path = self.paths.maps.clone();
            return Err(DataplaneError::Abi { path, found: found.abi, wanted: abi::ABI_VERSION });
        }
        Ok(found)
    }

    /// The datapath's clock now, in ticks.
    pub fn now(&self) -> Result<u32, DataplaneError> {
        let request = ControlRequest4 { command: control::CLOCK, ..ControlRequest4::ZERO };
        let answer = engine::run_control(&self.control, request)
            .map_err(DataplaneError::system("cannot read the datapath's clock"))?;
        Ok((answer.jiffies >> abi::TICK_SHIFT) as u32)
    }

    /// All live flows of a family, in no order, handed to `each` by several threads, each with what `new` made for it.
    ///
    /// `wanted` is asked about either half before it is kept; it must say the same of both.
    pub fn flows<A: FlowTables, T: Send>(
        &self,
        wanted: impl Fn(&Flow<A>) -> bool + Sync,
        new: impl Fn() -> T + Sync,
        each: impl Fn(&mut T, &FlowPair<A>) + Sync,
    ) -> Result<Vec<T>, DataplaneError> {
        let segments = self.hop_segments()?;
        let halves = self
            .map::<A::Lookup, Flow<A>>(A::FLOWS)?
            .gather(Halves::new, |halves: &mut Halves<A>, _, flow| {
                if flow.state & FLOW_DEAD == 0 && wanted(flow) {
                    halves.add(flow, &segments);
                }
            })
            .map_err(DataplaneError::system(format!("cannot read map {}", A::FLOWS)))?;
        Ok(join(&halves, new, each))
    }

    /// The live flow whose replies have this key.
    pub fn flow_of_reply<A: FlowTables>(&self, reply: &FlowKey<A>) -> Result<Option<FlowPair<A>>, DataplaneError> {
        let map = self.map::<A::Lookup, Flow<A>>(A::FLOWS)?;
        let secret = hash::lookup_secret(&self.settings()?.seed);
        let get = |key: &FlowKey<A>| {
            let found = map
                .get(&key.lookup(secret))
                .map_err(DataplaneError::system(format!("cannot read map {}", A::FLOWS)))?;
            Ok::<_, DataplaneError>(found.filter(|half| half.state & FLOW_DEAD == 0 && half.key() == *key))
        };
        let Some(reverse) = get(reply)?.filter(|half| half.state & FLOW_REVERSE != 0) else { return Ok(None) };
        let hop = self
            .map::<u32, NextHop>(names::NEXT_HOPS)?
            .get(&u32::from(reverse.next_hop))
            .map_err(DataplaneError::system(format!("cannot read map {}", names::NEXT_HOPS)))?;
        let key = FlowKey::reply(&reverse.to, hop.map_or(0, |hop| hop.segment), reply.protocol);
        let forward = get(&key)?.filter(|half| half.state & FLOW_REVERSE == 0);
        Ok(forward.map(|forward| FlowPair {
            key,
            forward,
            reverse: Some(Answers::from(&reverse)),
            backend_segment: reply.segment,
        }))
    }

    /// Marks flows as dead: both halves are treated as absent at once and deleted soon. Returns how many lived.
    pub fn remove_flows<A: FlowTables>(&self, keys: &[FlowKey<A>]) -> Result<u64, DataplaneError> {
        let mut count = 0;
        for key in keys {
            let lived = engine::mark(&self.control, key);
            count += u64::from(lived.map_err(DataplaneError::system(format!("cannot mark flows in {}", A::FLOWS)))?);
        }
        Ok(count)
    }

    /// Half-open connections of a family whose record may be read.
    pub fn half_open<A: FlowTables>(&self) -> Result<Vec<HalfOpen<A>>, DataplaneError> {
        let now = self.now()?;
        let mut found = Vec::new();
        self.map::<u32, HalfOpenSet<A>>(A::HALF_OPEN)?
            .for_each(|_, set| found.extend(readable(set, now)))
            .map_err(DataplaneError::system(format!("cannot read map {}", A::HALF_OPEN)))?;
        Ok(found)
    }

    /// Half-open connections with this SNAT port, and some others.
    pub fn half_open_at<A: FlowTables>(&self, port: u16) -> Result<Vec<HalfOpen<A>>, DataplaneError> {
        let now = self.now()?;
        let map = self.map::<u32, HalfOpenSet<A>>(A::HALF_OPEN)?;
        let set = map
            .get(&hash::half_open_set(port, map.info().max_entries))
            .map_err(DataplaneError::system(format!("cannot read map {}", A::HALF_OPEN)))?;
        Ok(set.iter().flat_map(|set| readable(set, now)).collect())
    }

    /// Segments that next hops lead to, by index of the hop; 0 = unused.
    fn hop_segments(&self) -> Result<Vec<u16>, DataplaneError> {
        let mut segments = vec![0; usize::from(u16::MAX) + 1];
        self.map::<u32, NextHop>(names::NEXT_HOPS)?
            .for_each(|&index, hop| {
                if let Some(slot) = segments.get_mut(index as usize).filter(|_| hop.ifindex != 0) {
                    *slot = hop.segment;
                }
            })
            .map_err(DataplaneError::system(format!("cannot read map {}", names::NEXT_HOPS)))?;
        Ok(segments)
    }

    /// Owners of frontends, by frontend id.
    pub fn owners(&self) -> Result<Vec<FrontendOwner>, DataplaneError> {
        let mut owners = vec![FrontendOwner::ZERO; abi::MAX_FRONTENDS as usize];
        self.map::<u32, FrontendOwner>(names::FRONTEND_OWNERS)?
            .for_each(|&id, owner| {
                if let Some(slot) = owners.get_mut(id as usize) {
                    *slot = *owner;
                }
            })
            .map_err(DataplaneError::system(format!("cannot read map {}", names::FRONTEND_OWNERS)))?;
        Ok(owners)
    }

    /// Flows that a family's table has room for.
    pub fn flow_capacity<A: FlowTables>(&self) -> Result<u32, DataplaneError> {
        Ok(self.map::<A::Lookup, Flow<A>>(A::FLOWS)?.info().max_entries / 2)
    }

    /// Timeouts, by index.
    pub fn timeouts(&self) -> Result<Vec<Timeouts>, DataplaneError> {
        let mut all = Vec::new();
        self.map::<u32, Timeouts>(names::TIMEOUTS)?
            .for_each(|_, timeouts| all.push(*timeouts))
            .map_err(DataplaneError::system(format!("cannot read map {}", names::TIMEOUTS)))?;
        Ok(all)
    }

    /// All frontends.
    pub fn frontends(&self) -> Result<Vec<Frontend>, DataplaneError> {
        self.collect(names::FRONTENDS, |_: &FrontendKey, value: &Frontend| Some(*value))
    }

    /// The slots of a frontend's lookup table: backend ids.
    pub fn table(&self, frontend: &Frontend) -> Result<Vec<u16>, DataplaneError> {
        let map = self.map::<u32, MaglevChunk>(names::MAGLEV)?;
        let mut slots = Vec::with_capacity(frontend.table_size as usize);
        for index in frontend.table..frontend.table.saturating_add(contents::chunks(frontend.table_size)) {
            let chunk =
                map.get(&index).map_err(DataplaneError::system(format!("cannot read map {}", names::MAGLEV)))?;
            slots.extend(chunk.unwrap_or(MaglevChunk::ZERO).slots);
        }
        slots.truncate(frontend.table_size as usize);
        Ok(slots)
    }

    /// Backends in use, by id.
    pub fn backends(&self) -> Result<BTreeMap<u16, Backend>, DataplaneError> {
        let found = self.collect(names::BACKENDS, |&id: &u32, value: &Backend| {
            (value.flags & abi::BACKEND_PRESENT != 0).then_some((id as u16, *value))
        })?;
        Ok(found.into_iter().collect())
    }

    /// Addresses by segment.
    pub fn addresses(&self) -> Result<Vec<(AddressKey, LocalAddress)>, DataplaneError> {
        self.collect(names::ADDRESSES, |key: &AddressKey, value: &LocalAddress| Some((*key, *value)))
    }

    /// Segments by index in map `segments`.
    pub fn segments(&self) -> Result<BTreeMap<u32, Segment>, DataplaneError> {
        let found =
            self.collect(names::SEGMENTS, |&index: &u32, value: &Segment| (value.id != 0).then_some((index, *value)))?;
        Ok(found.into_iter().collect())
    }

    /// Next hops in use by index, with the address that each stands for (`None`: the client's own MAC, or a gateway slot without one).
    pub fn next_hops(&self) -> Result<BTreeMap<u16, (Option<IpAddr>, NextHop)>, DataplaneError> {
        let records: BTreeMap<u32, Option<IpAddr>> = self
            .collect(HOP_RECORDS, |&index: &u32, record: &AddressKey| Some((index, HopKey::from_record(record)?.1)))?
            .into_iter()
            .collect();
        let found = self.collect(names::NEXT_HOPS, |&index: &u32, value: &NextHop| {
            let address = records.get(&index).copied().flatten();
            (value.ifindex != 0).then_some((index as u16, (address, *value)))
        })?;
        Ok(found.into_iter().collect())
    }

    /// Limits and use of tenants that have any.
    pub fn tenants(&self) -> Result<BTreeMap<u16, (Tenant, TenantUse)>, DataplaneError> {
        let mut found: BTreeMap<u16, (Tenant, TenantUse)> = self
            .collect(names::TENANTS, |&id: &u32, value: &Tenant| {
                (*value != Tenant::ZERO).then_some((id as u16, (*value, TenantUse::ZERO)))
            })?
            .into_iter()
            .collect();
        for (id, used) in self.collect(names::TENANT_USE, |&id: &u32, value: &TenantUse| {
            (*value != TenantUse::ZERO).then_some((id as u16, *value))
        })? {
            found.entry(id).or_insert((Tenant::ZERO, TenantUse::ZERO)).1 = used;
        }
        Ok(found)
    }

    /// Counters of reasons by (tenant, number of the reason), summed over CPUs, without zeros.
    pub fn reasons(&self) -> Result<BTreeMap<(u16, u8), u64>, DataplaneError> {
        let mut found = BTreeMap::new();
        PerCpu::<u64>::open(&self.paths.map(names::REASONS))
            .and_then(|map| {
                map.for_each(|index, values| {
                    let total = values.iter().fold(0_u64, |total, &value| total.wrapping_add(value));
                    if total != 0 {
                        let (tenant, reason) = (index / abi::REASON_SLOTS, index % abi::REASON_SLOTS);
                        found.insert((tenant as u16, reason as u8), total);
                    }
                })
            })
            .map_err(DataplaneError::system(format!("cannot read map {}", names::REASONS)))?;
        Ok(found)
    }

    /// How often packets of these tenants have met a reason, summed over CPUs.
    pub fn reason_of(
        &self,
        reason: Reason,
        tenants: impl Iterator<Item = u16>,
    ) -> Result<BTreeMap<u16, u64>, DataplaneError> {
        let failed = || DataplaneError::system(format!("cannot read map {}", names::REASONS));
        let map = PerCpu::<u64>::open(&self.paths.map(names::REASONS)).map_err(failed())?;
        tenants
            .map(|tenant| {
                let values = map.get(u32::from(tenant) * abi::REASON_SLOTS + reason as u32).map_err(failed())?;
                Ok((tenant, sum(values.into_iter())))
            })
            .collect()
    }

    /// Counters of frontends by id, summed over CPUs, without those that are all zero.
    pub fn frontend_counters(&self) -> Result<BTreeMap<u16, FrontendCounters>, DataplaneError> {
        let mut found: BTreeMap<u16, FrontendCounters> = BTreeMap::new();
        PerCpu::<Traffic>::open(&self.paths.map(names::TRAFFIC))
            .and_then(|map| {
                map.for_each(|index, values| {
                    let packets = sum(values.iter().map(|value| value.packets));
                    let bytes = sum(values.iter().map(|value| value.bytes));
                    if packets == 0 && bytes == 0 {
                        return;
                    }
                    let counters = found.entry((index % abi::MAX_FRONTENDS) as u16).or_default();
                    if index < abi::MAX_FRONTENDS {
                        (counters.in_packets, counters.in_bytes) = (packets, bytes);
                    } else {
                        (counters.out_packets, counters.out_bytes) = (packets, bytes);
                    }
                })
            })
            .map_err(DataplaneError::system(format!("cannot read map {}", names::TRAFFIC)))?;
        PerCpu::<FrontendEvents>::open(&self.paths.map(names::FRONTEND_EVENTS))
            .and_then(|map| {
                map.for_each(|index, values| {
                    let flows = sum(values.iter().map(|value| value.flows));
                    let refused = sum(values.iter().map(|value| value.refused));
                    if flows != 0 || refused != 0 {
                        let counters = found.entry(index as u16).or_default();
                        (counters.flows, counters.refused) = (flows, refused);
                    }
                })
            })
            .map_err(DataplaneError::system(format!("cannot read map {}", names::FRONTEND_EVENTS)))?;
        Ok(found)
    }

    /// Interfaces that carry our program, with the mode in force.
    pub fn attached(&self) -> Result<Vec<Attached>, DataplaneError> {
        loader::attached(&self.paths)
    }

    fn fill_of<A: FlowTables>(&self, fill: &mut Vec<Fill>) -> Result<(), DataplaneError> {
        let flows = self.map::<A::Lookup, Flow<A>>(A::FLOWS)?;
        let counts = flows
            .gather(|| 0, |count: &mut u64, _, _| *count += 1)
            .map_err(DataplaneError::system(format!("cannot read map {}", A::FLOWS)))?;
        fill.push(Fill { name: A::FLOWS, max: flows.info().max_entries, used: Some(counts.into_iter().sum()) });
        let sets = self.map::<u32, HalfOpenSet<A>>(A::HALF_OPEN)?.info().max_entries;
        fill.push(Fill {
            name: A::HALF_OPEN,
            max: sets * abi::HALF_OPEN_WAYS as u32,
            used: Some(self.half_open::<A>()?.len() as u64),
        });
        Ok(())
    }

    /// How full the tables are. Counts halves of flows one by one: seconds, if there are millions.
    pub fn fill(&self) -> Result<Vec<Fill>, DataplaneError> {
        let mut fill = Vec::new();
        self.fill_of::<Address4>(&mut fill)?;
        self.fill_of::<Address6>(&mut fill)?;
        let frontends = self.frontends()?;
        let tables: BTreeMap<u32, u32> =
            frontends.iter().map(|frontend| (frontend.table, contents::chunks(frontend.table_size))).collect();
        let chunks = tables.values().map(|&chunks| u64::from(chunks)).sum();
        for (name, max, used) in [
            (names::FRONTENDS, abi::MAX_FRONTENDS, frontends.len() as u64),
            (names::MAGLEV, abi::MAGLEV_CHUNKS, chunks),
            (names::BACKENDS, abi::MAX_BACKENDS, self.backends()?.len() as u64),
            (names::ADDRESSES, abi::MAX_ADDRESSES, self.addresses()?.len() as u64),
            (names::NEXT_HOPS, abi::MAX_NEXT_HOPS, self.next_hops()?.len() as u64),
            (names::TENANTS, abi::MAX_TENANTS, self.tenants()?.len() as u64),
        ] {
            fill.push(Fill { name, max, used: Some(used) });
        }
        Ok(fill)
    }
}

/// Counters of all CPUs; they wrap, like each of them.
fn sum(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::wrapping_add)
}

fn readable<A: Address>(set: &HalfOpenSet<A>, now: u32) -> impl Iterator<Item = HalfOpen<A>> {
    set.tags.iter().zip(&set.records).filter(move |&(&tag, _)| half_open::readable(tag, now)).map(|(_, record)| *record)
}

/// Halves are sorted into so many parts by the hash of the reply's key, so that both halves of a flow lie in one part, and looking for
/// one among the halves of its part stays in the cache.
const PARTS: usize = 128;

/// Halves of flows, as one thread has read them.
struct Halves<A: Address> {
    parts: Vec<Part<A>>,
}

struct Part<A: Address> {
    /// Without [`FlowPair::reverse`] yet.
    forward: Vec<FlowPair<A>>,
    reverse: Vec<(ReplyKey<A>, Answers)>,
}

impl<A: Address> Halves<A> {
    fn new() -> Self {
        let part = || Part { forward: Vec::new(), reverse: Vec::new() };
        Self { parts: std::iter::repeat_with(part).take(PARTS).collect() }
    }

    fn add(&mut self, half: &Flow<A>, segments: &[u16]) {
        let key = half.key();
        if half.state & FLOW_REVERSE == 0 {
            let backend_segment = segments.get(usize::from(half.next_hop)).copied().unwrap_or(0);
            let reply = ReplyKey(FlowKey::reply(&half.to, backend_segment, key.protocol));
            let pair = FlowPair { key, forward: *half, reverse: None, backend_segment };
            self.parts[reply.part()].forward.push(pair);
        } else {
            let reply = ReplyKey(key);
            self.parts[reply.part()].reverse.push((reply, Answers::from(half)));
        }
    }
}

/// Finds the reverse half of every forward half, and hands the pairs over.
fn join<A: Address, T: Send>(
    halves: &[Halves<A>],
    new: impl Fn() -> T + Sync,
    each: impl Fn(&mut T, &FlowPair<A>) + Sync,
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut result = new();
        let mut replies: HashMap<ReplyKey<A>, Answers, BuildHasherDefault<KeyHasher>> = HashMap::default();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= PARTS {
                return result;
            }
            let parts = || halves.iter().map(|halves| &halves.parts[number]);
            replies.clear();
            replies.extend(parts().flat_map(|part| part.reverse.iter().copied()));
            for pair in parts().flat_map(|part| &part.forward) {
                let reply = ReplyKey(FlowKey::reply(&pair.forward.to, pair.backend_segment, pair.key.protocol));
                each(&mut result, &FlowPair { reverse: replies.get(&reply).copied(), ..*pair });
            }
        }
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = halves.iter().skip(1).map(|_| scope.spawn(work)).collect();
        let mut results = vec![work()];
        // A thread ends early only by a panic, which is handed on.
        results.extend(others.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))));
        results
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct ReplyKey<A: Address>(FlowKey<A>);

impl<A: Address> ReplyKey<A> {
    fn part(&self) -> usize {
        // The highest bits: a hash map of one part goes by the lowest and the next highest.
        (BuildHasherDefault::<KeyHasher>::default().hash_one(self) >> 32) as usize % PARTS
    }
}

impl<A: Address> Hash for ReplyKey<A> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(bytemuck::bytes_of(&self.0));
    }
}

/// A fast hash for a million flow keys. The table lives for one listing, so clients gain nothing from aiming at it.
#[derive(Default)]
pub(super) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 29
    }

    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.0 = (self.0.rotate_left(23) ^ u64::from_ne_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use lbd_common::abi::Tuple;

    use super::*;

    const SEGMENTS: [u16; 3] = [0, 1, 2];

    /// Halves of `count` flows of clients in segment 2 to a backend in segment 1.
    fn halves<A: Address>(count: u16, client: A::Ip, vip: A::Ip, snat: A::Ip, backend: A::Ip) -> Vec<Flow<A>> {
        (0..count)
            .flat_map(|number| {
                let tuple = Tuple::new((client, number), (vip, 443));
                let to = Tuple::new((snat, number), (backend, 30443));
                let reply = FlowKey::reply(&to, 1, 6);
                let forward = Flow { tuple, segment: 2, next_hop: 1, to, bytes: u64::from(number), ..Flow::ZERO };
                let reverse = Flow {
                    tuple: reply.tuple,
                    segment: 1,
                    next_hop: 2,
                    to: tuple.turned(),
                    bytes: 1000 + u64::from(number),
                    packets_high: 1,
                    state: FLOW_REVERSE,
                    ..Flow::ZERO
                };
                [forward, reverse]
            })
            .collect()
    }

    fn joined<A: Address>(all: &[Flow<A>]) -> Vec<FlowPair<A>> {
        // As two threads would have read them: the halves of a flow may be in both.
        let mut read = [Halves::new(), Halves::new()];
        for (half, number) in all.iter().zip(0..) {
            read[number % 2].add(half, &SEGMENTS);
        }
        let mut pairs = join(&read, Vec::new, |pairs: &mut Vec<_>, pair| pairs.push(*pair)).concat();
        pairs.sort_by_key(|pair| pair.forward.bytes);
        pairs
    }

    #[test]
    fn halves_find_each_other_in_both_families() {
        let four = halves::<Address4>(
            5000,
            Ipv4Addr::new(192, 0, 2, 9),
            Ipv4Addr::new(192, 0, 2, 34),
            Ipv4Addr::new(10, 0, 0, 2),
            Ipv4Addr::new(10, 0, 0, 11),
        );
        let pairs = joined(&four);
        assert_eq!(pairs.len(), 5000);
        for (pair, number) in pairs.iter().zip(0..) {
            assert_eq!(pair.forward.bytes, number);
            let expected = Answers { bytes: 1000 + number, packets: 1 << 32, state: FLOW_REVERSE, last_seen: 0 };
            assert_eq!((pair.reverse, pair.backend_segment), (Some(expected), 1));
        }
        let address = |last| Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last);
        let six = halves::<Address6>(300, address(1), address(2), address(3), address(4));
        assert!(joined(&six).iter().all(|pair| pair.reverse.is_some()));
        assert_eq!(joined(&six).len(), 300);
    }

    #[test]
    fn a_half_alone_stays_alone() {
        let all = halves::<Address4>(
            2,
            Ipv4Addr::new(192, 0, 2, 9),
            Ipv4Addr::new(192, 0, 2, 34),
            Ipv4Addr::new(10, 0, 0, 2),
            Ipv4Addr::new(10, 0, 0, 11),
        );
        // The first forward half, the second reverse half; and one that arrives in another segment.
        let mut other = all[1];
        other.segment = 2;
        let pairs = joined(&[all[0], all[3], other]);
        assert_eq!(pairs.len(), 1);
        assert_eq!(pairs[0].reverse, None);
    }
}
