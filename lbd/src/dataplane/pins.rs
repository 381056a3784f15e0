//! A read-only view of the pinned maps, for `lbctl`: works with the agent dead.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::Path;

use bytemuck::Pod;
use lbd_common::abi::{
    self, AddressKey, Backend, ControlRequest4, FLOW_DEAD, FLOW_REVERSE, Flow4, FlowKey4, Frontend, FrontendCounters,
    FrontendEvents, FrontendKey, HalfOpen4, HalfOpenSet4, LocalAddress, MaglevChunk, NextHop, Segment, Settings,
    Tenant, TenantUse, Timeouts, Traffic, control, names,
};
use lbd_common::half_open;

use super::bpf::{self, Map, PerCpu};
use super::contents::{self, HopKey};
use super::loader::{self, HOP_RECORDS, Paths};
use super::{Attached, DataplaneError, engine};

/// A flow: both halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowPair {
    /// Client → VIP, as it arrives.
    pub key: FlowKey4,
    /// The forward half.
    pub forward: Flow4,
    /// The reverse half, if it was found.
    pub reverse: Option<Flow4>,
    /// Segment of the backend; 0 if it is not known any more.
    pub backend_segment: u16,
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

/// A read-only view of the pinned maps; works with the agent dead.
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

    /// All live flows.
    pub fn flows(&self) -> Result<Vec<FlowPair>, DataplaneError> {
        let segments: BTreeMap<u16, u16> =
            self.next_hops()?.into_iter().map(|(index, (_, hop))| (index, hop.segment)).collect();
        // Room for all at once: growing to a million flows would copy them again and again.
        let live = self.tenants()?.values().map(|(_, used)| used.families[0].flows).sum::<u64>();
        let live = live.min(1 << 21) as usize;
        let mut forward = Vec::with_capacity(live);
        let mut reverse: HashMap<[u8; 16], Flow4, BuildHasherDefault<KeyHasher>> =
            HashMap::with_capacity_and_hasher(live, BuildHasherDefault::default());
        self.map::<FlowKey4, Flow4>(names::FLOWS4)?
            .for_each(|key, flow| {
                if flow.state & FLOW_DEAD != 0 {
                    return;
                }
                if flow.state & FLOW_REVERSE == 0 {
                    forward.push((*key, *flow));
                } else {
                    reverse.insert(key_bytes(key), *flow);
                }
            })
            .map_err(DataplaneError::system(format!("cannot read map {}", names::FLOWS4)))?;
        Ok(forward
            .into_iter()
            .map(|(key, forward)| {
                let backend_segment = segments.get(&forward.next_hop).copied().unwrap_or(0);
                let other = FlowKey4::reply(&forward.to, backend_segment, key.protocol);
                FlowPair { key, forward, reverse: reverse.get(&key_bytes(&other)).copied(), backend_segment }
            })
            .collect())
    }

    /// Half-open connections whose record may be read.
    pub fn half_open(&self) -> Result<Vec<HalfOpen4>, DataplaneError> {
        let now = self.now()?;
        let mut found = Vec::new();
        self.map::<u32, HalfOpenSet4>(names::HALF_OPEN4)?
            .for_each(|_, set| {
                for (&tag, record) in set.tags.iter().zip(&set.records) {
                    if half_open::readable(tag, now) {
                        found.push(*record);
                    }
                }
            })
            .map_err(DataplaneError::system(format!("cannot read map {}", names::HALF_OPEN4)))?;
        Ok(found)
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

    /// How full the tables are. Counts flows, so it takes as long as [`Self::flows`].
    pub fn fill(&self) -> Result<Vec<Fill>, DataplaneError> {
        let mut fill = Vec::new();
        let flows = self.map::<FlowKey4, Flow4>(names::FLOWS4)?;
        let mut used = 0;
        flows
            .for_each(|_, _| used += 1)
            .map_err(DataplaneError::system(format!("cannot read map {}", names::FLOWS4)))?;
        fill.push(Fill { name: names::FLOWS4, max: flows.info().max_entries, used: Some(used) });
        let half_open = self.map::<u32, HalfOpenSet4>(names::HALF_OPEN4)?.info().max_entries;
        fill.push(Fill {
            name: names::HALF_OPEN4,
            max: half_open * abi::HALF_OPEN_WAYS as u32,
            used: Some(self.half_open()?.len() as u64),
        });
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

fn key_bytes(key: &FlowKey4) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(bytemuck::bytes_of(key));
    bytes
}

/// A fast hash for a million flow keys. The table lives for one listing, so clients gain nothing from aiming at it.
#[derive(Default)]
struct KeyHasher(u64);

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
