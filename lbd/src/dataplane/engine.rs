//! The contents of the maps: what is wanted, what is there, and the order of changes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, iter};

use bytemuck::Pod;
use ipnet::IpNet;
use lbd_common::abi::{
    self, ADDRESS_ANSWER, Address, AddressKey, Backend, ControlRequest, ControlRequest4, Flow, Flow4, Flow6, FlowKey,
    FlowKey4, Frontend, FrontendEvents, FrontendKey, FrontendOwner, LocalAddress, Lookup6, MaglevChunk, NextHop,
    Segment, Settings, Tenant, TenantUse, Timeouts, Traffic, control, names,
};
use lbd_common::reason::Reason;

use super::bpf::{self, Map, PerCpu};
use super::claims::{Claims, Place};
use super::contents::{self, HopKey};
use super::groups;
use super::loader::{HOP_RECORDS, Nic, Paths};
use super::ndisc;
use super::netlink::{Neighbour, Neighbours};
use super::regions::Regions;
use super::resets;
use super::shadow::{Faults, Store, Table, Writer};
use super::{Applied, DataplaneError};
use crate::config::{Config, MssClamp, Protocol, SegmentName};
use crate::plan::model::{FrontendAddress, HostFacts, InterfaceFacts, Pinned, Plan, Reset, SegmentId, SegmentPlan};
use crate::source::ObjectName;

/// Free addresses of each tenant's pools that are checked ahead of need.
const AHEAD: usize = 4;

/// A lookup table in map `maglev`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Region {
    start: u32,
    slots: u32,
}

impl Region {
    const fn chunks(self) -> u32 {
        contents::chunks(self.slots)
    }
}

/// A next hop: its index, and the address to resolve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hop {
    index: u16,
    address: Option<IpAddr>,
}

/// What talks to the datapath's programs and flows; absent in unit tests.
pub(super) struct Programs {
    pub(super) control: OwnedFd,
    pub(super) flows: Map<FlowKey4, Flow4>,
    pub(super) flows6: Map<Lookup6, Flow6>,
    pub(super) settings: Map<u32, Settings>,
    pub(super) traffic: PerCpu<Traffic>,
    pub(super) events: PerCpu<FrontendEvents>,
    pub(super) used: Map<u32, TenantUse>,
    pub(super) reasons: PerCpu<u64>,
}

impl Programs {
    /// Runs the control program.
    pub(super) fn control<A: Address>(&self, request: ControlRequest<A>) -> io::Result<ControlRequest<A>> {
        run_control(&self.control, request)
    }

    /// Lets the clock hand pass over so many entries of the ageing queue, so that flows end also where no new ones begin.
    pub(super) fn age(&self, entries: u64) -> io::Result<()> {
        // One run looks at so many entries at the most, so that it holds its CPU for microseconds.
        const STEPS: u32 = 64;
        for _ in 0..entries.div_ceil(u64::from(STEPS)) {
            let request = ControlRequest4 { command: control::AGE, count: STEPS, ..ControlRequest4::ZERO };
            if self.control(request)?.result < u64::from(STEPS) {
                break;
            }
        }
        Ok(())
    }

    /// Packets that a driver did not take after our verdict.
    pub(super) fn redirects_failed(&self) -> io::Result<u64> {
        let values = self.reasons.get(Reason::RedirectFailed as u32)?;
        Ok(values.iter().fold(0, |total, &value| total.wrapping_add(value)))
    }

    /// Flows that live now, by the datapath's count.
    pub(super) fn live_flows(&self) -> io::Result<u64> {
        let mut total: u64 = 0;
        self.used.for_each(|_, used| total = used.families.iter().fold(total, |sum, it| sum.wrapping_add(it.flows)))?;
        Ok(total)
    }

    /// From now on for five minutes, flows without state are adopted by the frontends that say so.
    fn adopt(&self, hertz: u32) -> io::Result<()> {
        let clock = self.control(ControlRequest4 { command: control::CLOCK, ..ControlRequest4::ZERO })?;
        let Some(settings) = self.settings.get(&0)? else { return Ok(()) };
        self.settings.set(&0, &Settings { adopt_until: adopt_until(clock.jiffies, hertz), ..settings })
    }
}

/// Marks a flow as dead: both halves count as absent from then on, and the clock hand deletes them. Whether it lived.
pub(super) fn mark<A: Address>(control: &OwnedFd, key: &FlowKey<A>) -> io::Result<bool> {
    Ok(run_control(control, ControlRequest::mark(*key))?.result != 0)
}

/// Runs the control program on a request.
pub(super) fn run_control<A: Address>(
    program: &OwnedFd,
    mut request: ControlRequest<A>,
) -> io::Result<ControlRequest<A>> {
    run_request(program, &mut request)?;
    Ok(request)
}

/// Runs the control program on a request with whatever follows it; the answer takes its place.
pub(super) fn run_request<T: Pod>(program: &OwnedFd, request: &mut T) -> io::Result<()> {
    const XDP_PASS: u32 = 2;
    let verdict = bpf::test_run(program.as_fd(), bytemuck::bytes_of_mut(request))?;
    if verdict == XDP_PASS { Ok(()) } else { Err(io::Error::other(format!("the control program returned {verdict}"))) }
}

/// The tables that the agent writes.
pub(super) struct Tables {
    /// `CONFIG_HZ`, as the settings in the maps say.
    hertz: u32,
    tenants: Table<u32, Tenant>,
    timeouts: Table<u32, Timeouts>,
    owners: Table<u32, FrontendOwner>,
    backends: Table<u32, Backend>,
    frontends: Table<FrontendKey, Frontend>,
    addresses: Table<AddressKey, LocalAddress>,
    segments: Table<u32, Segment>,
    hops: Table<u32, NextHop>,
    records: Table<u32, AddressKey>,
    maglev: Box<dyn Store<u32, MaglevChunk>>,
}

impl Tables {
    /// Opens the pinned maps and reads what is in them.
    pub(super) fn open(paths: &Paths) -> io::Result<Self> {
        fn array<V: Pod + PartialEq + Send + Sync>(
            paths: &Paths,
            name: &'static str,
            zero: V,
        ) -> io::Result<Table<u32, V>> {
            Table::load(name, Box::new(Map::<u32, V>::open(&paths.map(name))?), Some(zero))
        }
        fn hash<K: Pod + Ord, V: Pod + PartialEq>(paths: &Paths, name: &'static str) -> io::Result<Table<K, V>> {
            Table::load(name, Box::new(Map::<K, V>::open(&paths.map(name))?), None)
        }
        let settings = Map::<u32, Settings>::open(&paths.map(names::SETTINGS))?.get(&0)?.unwrap_or(Settings::ZERO);
        Ok(Self {
            hertz: settings.ticks_per_second_256 << abi::TICK_SHIFT >> 8,
            tenants: array(paths, names::TENANTS, Tenant::ZERO)?,
            timeouts: array(paths, names::TIMEOUTS, Timeouts::ZERO)?,
            owners: array(paths, names::FRONTEND_OWNERS, FrontendOwner::ZERO)?,
            backends: array(paths, names::BACKENDS, Backend::ZERO)?,
            frontends: hash(paths, names::FRONTENDS)?,
            addresses: hash(paths, names::ADDRESSES)?,
            segments: array(paths, names::SEGMENTS, Segment::ZERO)?,
            hops: array(paths, names::NEXT_HOPS, NextHop::ZERO)?,
            records: array(paths, HOP_RECORDS, AddressKey::ZERO)?,
            maglev: Box::new(Map::<u32, MaglevChunk>::open(&paths.map(names::MAGLEV))?),
        })
    }
}

/// Everything that the data plane knows.
pub(super) struct Engine {
    tables: Tables,
    pub(super) programs: Option<Arc<Programs>>,
    pub(super) faults: Faults,
    pub(super) config: Config,
    pub(super) facts: HostFacts,
    pub(super) neighbours: Neighbours,
    pub(super) nics: BTreeMap<String, Nic>,
    pub(super) claims: Claims,
    /// Addresses that were answered for when this agent started.
    kept: BTreeSet<(SegmentId, IpAddr)>,
    plan: Arc<Plan>,
    regions: Regions,
    by_content: BTreeMap<Arc<[u16]>, Region>,
    retired: Vec<Region>,
    hops: BTreeMap<HopKey, Hop>,
    /// Hops that the plan needs.
    needed: BTreeSet<HopKey>,
    next_index: u32,
    /// When a redirect was last seen to fail, and how many did so far.
    pub(super) redirects_failed: Option<(Instant, u64)>,
    /// Interfaces whose VLAN tags are hidden from XDP, and why.
    pub(super) hidden_tags: BTreeMap<String, String>,
    /// Resets to repeat when connections that were half-open then are over.
    again: Vec<(Instant, BTreeSet<Reset>)>,
}

impl Engine {
    /// Starts from what is in the maps.
    pub(super) fn new(config: &Config, tables: Tables, programs: Option<Arc<Programs>>) -> io::Result<Self> {
        let mut engine = Self {
            tables,
            programs,
            faults: Faults::default(),
            config: config.clone(),
            facts: HostFacts::default(),
            neighbours: Neighbours::new(),
            nics: BTreeMap::new(),
            claims: Claims::new(config.datapath.announce_interval),
            kept: BTreeSet::new(),
            plan: Arc::default(),
            regions: Regions::new(abi::MAGLEV_CHUNKS),
            by_content: BTreeMap::new(),
            retired: Vec::new(),
            hops: BTreeMap::new(),
            needed: BTreeSet::new(),
            next_index: 1,
            again: Vec::new(),
            redirects_failed: None,
            hidden_tags: BTreeMap::new(),
        };
        engine.recover_hops();
        engine.recover_regions()?;
        engine.kept = engine
            .tables
            .addresses
            .shadow()
            .iter()
            .filter(|(_, value)| value.flags & ADDRESS_ANSWER != 0)
            .map(|(key, _)| (key.segment, contents::address(&key.address)))
            .collect();
        Ok(engine)
    }

    /// What the maps say of ids, before anything is written.
    pub(super) fn pinned(&self) -> Pinned {
        let mut pinned = Pinned::default();
        let at: BTreeMap<u32, &str> =
            self.nics.values().map(|nic| (abi::segment_index(nic.slot, 0), nic.interface.as_str())).collect();
        for (index, segment) in self.tables.segments.shadow().iter().filter(|(_, segment)| segment.id != 0) {
            pinned.last_segment = pinned.last_segment.max(segment.id);
            let vlan = index % abi::VLANS;
            if let Some(&interface) = at.get(&(index - vlan)) {
                let vlan = Some(vlan as u16).filter(|&vlan| vlan != 0);
                pinned.segments.insert(SegmentName { interface: interface.to_owned(), vlan }, segment.id);
            }
        }
        for key in self.hops.keys() {
            pinned.last_segment = pinned.last_segment.max(key.segment());
        }
        for (key, frontend) in self.tables.frontends.shadow() {
            let protocol = [Protocol::Tcp, Protocol::Udp].into_iter().find(|it| it.number() == key.protocol);
            let Some(protocol) = protocol else { continue };
            let (segment, vip, port) = (key.segment, contents::address(&key.vip), u16::from_be(key.port_be));
            let address = FrontendAddress { segment, vip, port, protocol };
            pinned.frontends.insert(address, (frontend.id, frontend.tenant));
        }
        for (&id, owner) in self.tables.owners.shadow() {
            pinned.last_frontend = pinned.last_frontend.max(id as u16);
            pinned.last_tenant = pinned.last_tenant.max(owner.tenant);
        }
        for (&id, backend) in self.tables.backends.shadow() {
            let place = (backend.segment, contents::address(&backend.address), u16::from_be(backend.port_be));
            pinned.backends.insert(id as u16, place);
        }
        pinned
    }

    fn recover_hops(&mut self) {
        for (&index, record) in self.tables.records.shadow() {
            if let Some((key, address)) = HopKey::from_record(record) {
                self.hops.insert(key, Hop { index: index as u16, address });
            }
            self.next_index = self.next_index.max(index + 1);
        }
        if let Some((&last, _)) = self.tables.hops.shadow().last_key_value() {
            self.next_index = self.next_index.max(last + 1);
        }
    }

    fn recover_regions(&mut self) -> io::Result<()> {
        let in_use: BTreeMap<u32, u32> = self
            .tables
            .frontends
            .shadow()
            .values()
            .filter(|frontend| frontend.table_size != 0)
            .map(|frontend| (frontend.table, frontend.table_size))
            .collect();
        if in_use.is_empty() {
            return Ok(());
        }
        let chunks: BTreeMap<u32, MaglevChunk> = self.tables.maglev.load()?.into_iter().collect();
        for (start, slots) in in_use {
            let region = Region { start, slots };
            if self.regions.claim(start, region.chunks()) {
                let mut content: Vec<u16> =
                    chunks.range(start..start + region.chunks()).flat_map(|(_, chunk)| chunk.slots).collect();
                content.truncate(slots as usize);
                self.by_content.insert(content.into(), region);
            } else {
                tracing::warn!("map {}: overlapping lookup tables at chunk {start}", names::MAGLEV);
            }
        }
        Ok(())
    }

    /// See [`super::Dataplane::apply`].
    pub(super) fn apply(&mut self, plan: &Arc<Plan>, now: Instant) -> Result<Applied, DataplaneError> {
        let mut writer = Writer::new(&self.faults);
        let mut flows_reset = self.reset(&plan.resets, &mut writer);
        let before = std::mem::replace(&mut self.plan, Arc::clone(plan));
        let same = before.quiet == plan.quiet && before.segments == plan.segments && before.addresses == plan.addresses;
        if !same {
            self.claim_addresses(now);
        }
        self.kept.clear();

        // What is new, from the back to the front: whatever a packet finds leads to something complete.
        self.add_hops(&mut writer);
        let tenants = plan
            .tenants
            .iter()
            .map(|(&id, tenant)| (u32::from(id), contents::tenant(tenant)))
            .collect::<BTreeMap<_, _>>();
        self.tables.tenants.put_all(&tenants, &mut writer);
        let backends = self.wanted_backends();
        self.add_backends(&backends, &mut writer);
        let regions = self.add_tables(&backends, &mut writer);
        // What is not used any more stays: no frontend leads to it.
        let hertz = self.tables.hertz;
        let wanted: BTreeMap<u32, Timeouts> =
            plan.timeouts.iter().map(|(&id, wanted)| (u32::from(id), timeouts(wanted, hertz))).collect();
        self.tables.timeouts.put_all(&wanted, &mut writer);
        let addresses = self.wanted_addresses();
        let meanwhile = contents::ports_meanwhile(self.tables.addresses.shadow(), &addresses);
        self.tables.addresses.put_all(&meanwhile, &mut writer);
        self.add_frontends(&regions, &mut writer);
        self.adopt_for(&addresses);
        self.tables.addresses.put_all(&addresses, &mut writer);
        let segments = self.wanted_segments();
        self.tables.segments.put_all(&segments, &mut writer);

        // What is gone, in reverse.
        self.tables.segments.retain(&segments, &mut writer);
        self.tables.addresses.retain(&addresses, &mut writer);
        self.remove_frontends(&mut writer);
        self.retire_tables();
        if writer.failed == 0 {
            self.remove_backends(&backends, &mut writer);
            self.tables.tenants.retain(&tenants, &mut writer);
        }

        if !plan.resets.is_empty() {
            // Connections that were made between the first pass and the change, by packets that still saw what was before, too; and
            // later, those whose handshake was under way.
            if self.programs.is_some() {
                bpf::barrier();
            }
            flows_reset += self.reset(&plan.resets, &mut writer);
            let after = half_open(&self.config) + Duration::from_secs(5);
            self.again.push((now + after, plan.resets.clone()));
        }
        match writer.first {
            None => Ok(Applied { map_writes: writer.writes, flows_reset }),
            Some(first) => Err(DataplaneError::Partial { failed: writer.failed, first }),
        }
    }

    /// Opens the time for adoption, if a VIP is about to be answered for that was not, and one of its frontends adopts.
    fn adopt_for(&self, wanted: &BTreeMap<AddressKey, LocalAddress>) {
        if !taken_over(&self.plan, self.tables.addresses.shadow(), wanted) {
            return;
        }
        if let Some(programs) = &self.programs
            && let Err(error) = programs.adopt(self.tables.hertz)
        {
            tracing::warn!("map {}: flows of VIPs taken over cannot be adopted: {error}", names::SETTINGS);
        }
    }

    /// Marks the flows that are meant. Returns how many lived.
    fn reset(&self, resets: &BTreeSet<Reset>, writer: &mut Writer) -> u64 {
        let Some(programs) = &self.programs else { return 0 };
        if resets.is_empty() {
            return 0;
        }
        self.reset_of(&programs.flows, names::FLOWS4, resets, writer)
            + self.reset_of(&programs.flows6, names::FLOWS6, resets, writer)
    }

    /// The same in one family.
    fn reset_of<A: Address>(
        &self,
        flows: &Map<A::Lookup, Flow<A>>,
        name: &str,
        resets: &BTreeSet<Reset>,
        writer: &mut Writer,
    ) -> u64 {
        let mut meant = Vec::new();
        let result = flows.for_each(|_, flow| {
            if flow.state & (abi::FLOW_REVERSE | abi::FLOW_DEAD) == 0 {
                let segment = self.tables.hops.get(&u32::from(flow.next_hop)).map_or(0, |hop| hop.segment);
                if resets.iter().any(|reset| resets::matches(reset, flow, segment)) {
                    meant.push(flow.key());
                }
            }
        });
        if let Err(error) = result {
            writer.fail(format!("map {name}: cannot list flows to reset: {error}"));
        }
        match self.mark(&meant) {
            Ok(count) => count,
            Err(error) => {
                writer.fail(format!("map {name}: cannot reset flows: {error}"));
                0
            }
        }
    }

    /// Marks flows as dead. Returns how many lived.
    pub(super) fn mark<A: Address>(&self, keys: &[FlowKey<A>]) -> io::Result<u64> {
        let Some(programs) = &self.programs else { return Ok(0) };
        let mut count = 0;
        for key in keys {
            count += u64::from(mark(&programs.control, key)?);
        }
        Ok(count)
    }

    /// Resets again what was half-open the first time.
    pub(super) fn reset_again(&mut self, now: Instant) -> u64 {
        let (due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.again).into_iter().partition(|(at, _)| *at <= now);
        self.again = later;
        let resets: BTreeSet<Reset> = due
            .into_iter()
            .flat_map(|(_, resets)| resets)
            .filter(|reset| resets::still_meant(reset, &self.plan))
            .collect();
        self.reset(&resets, &mut Writer::new(&self.faults))
    }

    fn interface(&self, segment: &SegmentPlan) -> Option<&InterfaceFacts> {
        self.facts.interfaces.get(&segment.name.interface)
    }

    /// Gives every next hop that the plan needs an index, for ever: flows keep indexes.
    fn add_hops(&mut self, writer: &mut Writer) {
        let wanted = contents::hops(&self.plan);
        for (&key, &address) in &wanted {
            let known = self.hops.get(&key).copied();
            let index = match known {
                Some(hop) => hop.index,
                None if self.next_index < abi::MAX_NEXT_HOPS => {
                    self.next_index += 1;
                    (self.next_index - 1) as u16
                }
                None => {
                    let Some(index) = self.recycle_hop(&wanted) else {
                        writer.fail(DataplaneError::NextHopsFull.to_string());
                        continue;
                    };
                    index
                }
            };
            // The record first: an index without a record could be given away again by the next agent.
            if self.tables.records.put(u32::from(index), key.record(address), writer) {
                let same = known.is_some_and(|hop| hop.address == address);
                self.hops.insert(key, Hop { index, address });
                self.write_hop(key, same, writer);
            }
        }
        self.needed = wanted.into_keys().collect();
    }

    /// Takes an index that neither the plan nor any flow uses.
    fn recycle_hop(&mut self, wanted: &BTreeMap<HopKey, Option<IpAddr>>) -> Option<u16> {
        let mut used: BTreeSet<u16> = BTreeSet::new();
        if let Some(programs) = &self.programs {
            programs
                .flows
                .for_each(|_, flow| {
                    used.insert(flow.next_hop);
                })
                .and_then(|()| {
                    programs.flows6.for_each(|_, flow| {
                        used.insert(flow.next_hop);
                    })
                })
                .ok()?;
        }
        let (&key, &hop) =
            self.hops.iter().find(|(key, hop)| !wanted.contains_key(key) && !used.contains(&hop.index))?;
        self.hops.remove(&key);
        Some(hop.index)
    }

    fn write_hop(&mut self, key: HopKey, same_address: bool, writer: &mut Writer) {
        let Some(&hop) = self.hops.get(&key) else { return };
        let Some(segment) = self.plan.segments.get(&key.segment()) else { return };
        let Some(interface) = self.interface(segment) else { return };
        let neighbour = hop.address.and_then(|address| self.neighbours.get(&self.station(segment, interface, address)));
        let old = self.tables.hops.get(&u32::from(hop.index));
        let value = contents::next_hop(key, segment.name.vlan, interface, neighbour, old, same_address);
        self.tables.hops.put(u32::from(hop.index), value, writer);
    }

    /// A neighbour has changed.
    pub(super) fn neighbour(&mut self, place: Place, neighbour: Option<Neighbour>) {
        match neighbour {
            Some(neighbour) => self.neighbours.insert(place, neighbour),
            None => self.neighbours.remove(&place),
        };
        let keys: Vec<HopKey> =
            self.hops.iter().filter(|(_, hop)| hop.address == Some(place.address)).map(|(&key, _)| key).collect();
        let mut writer = Writer::new(&self.faults);
        for key in keys {
            self.write_hop(key, true, &mut writer);
        }
    }

    /// Interfaces or routes have changed: MACs, MTUs and indexes of next hops and segments follow.
    pub(super) fn refresh(&mut self) {
        let mut writer = Writer::new(&self.faults);
        let keys: Vec<HopKey> = self.hops.keys().copied().collect();
        for key in keys {
            self.write_hop(key, true, &mut writer);
        }
        let segments = self.wanted_segments();
        self.tables.segments.put_all(&segments, &mut writer);
        if writer.failed != 0 {
            tracing::warn!("{} map writes failed after a change of the host's interfaces", writer.failed);
        }
    }

    /// Where a station of a segment is resolved: on the kernel's interface for the segment; by lbd itself on a VLAN without one.
    fn station(&self, segment: &SegmentPlan, interface: &InterfaceFacts, address: IpAddr) -> Place {
        match self.facts.of(&segment.name).filter(|own| own.up) {
            Some(own) => Place { interface: own.index, vlan: 0, address },
            None => Place { interface: interface.index, vlan: segment.name.vlan.unwrap_or(0), address },
        }
    }

    /// The neighbours to keep resolved: untagged ones by the kernel, tagged ones by lbd.
    pub(super) fn to_resolve(&self) -> BTreeSet<Place> {
        self.needed
            .iter()
            .filter_map(|key| {
                let segment = self.plan.segments.get(&key.segment())?;
                let interface = self.interface(segment).filter(|interface| interface.up)?;
                Some(self.station(segment, interface, self.hops.get(key)?.address?))
            })
            .collect()
    }

    /// The address to ask for a tagged neighbour from: the configured one, else the link-local or no address.
    pub(super) fn asks_from(&self, place: Place, mac: [u8; 6]) -> IpAddr {
        let segment = self.segment_at(place);
        let here = self.config.tenants.iter().filter(|tenant| Some(&tenant.segment) == segment.as_ref());
        let own = here.flat_map(|tenant| tenant.addresses.iter().map(IpNet::addr));
        let hub = self.config.hub.snat.iter().copied().filter(|_| Some(&self.config.hub.segment) == segment.as_ref());
        own.chain(hub).find(|address| address.is_ipv6() == place.address.is_ipv6()).unwrap_or(match place.address {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => ndisc::link_local(mac).into(),
        })
    }

    /// The segment at a place.
    fn segment_at(&self, place: Place) -> Option<SegmentName> {
        // By the name that lbd knows, if the interface was renamed.
        let mut names = self.facts.interfaces.iter().filter(|(_, interface)| interface.index == place.interface);
        let first = names.clone().next();
        let (name, _) = names.find(|(name, _)| self.nics.contains_key(*name)).or(first)?;
        Some(SegmentName { interface: name.clone(), vlan: Some(place.vlan).filter(|&vlan| vlan != 0) })
    }

    /// Groups to join for the IPv6 addresses that are answered for; `None` before the first plan, which may need what is there.
    pub(super) fn groups(&self) -> Option<groups::Wanted> {
        if self.plan.segments.is_empty() {
            return None;
        }
        let mut wanted = groups::Wanted::default();
        for (&(segment, address), plan) in &self.plan.addresses {
            let IpAddr::V6(address) = address else { continue };
            let Some(segment) = self.plan.segments.get(&segment).filter(|_| contents::answered(plan)) else { continue };
            let group = ndisc::solicited_node(address);
            if let Some(interface) = self.interface(segment).filter(|interface| interface.up) {
                wanted.filtered.insert((interface.index, group));
            }
            if let Some(own) = self.facts.of(&segment.name).filter(|own| own.up) {
                wanted.joined.insert((own.index, group));
            }
        }
        Some(wanted)
    }

    /// Indexes of our NICs and of the kernel's VLAN interfaces for our segments.
    pub(super) fn own_indexes(&self) -> BTreeSet<u32> {
        let nics = self.nics.values().map(|nic| nic.index);
        nics.chain(self.plan.segments.values().filter_map(|segment| Some(self.facts.of(&segment.name)?.index)))
            .collect()
    }

    /// Interfaces on which a hidden tag would matter: those of tenants, and those with VLAN segments (`true`).
    pub(super) fn tagged_interfaces(&self) -> BTreeMap<String, bool> {
        tagged_interfaces(&self.config)
    }

    /// Neighbours that we made the kernel look after and that nothing needs. None before the first plan, which may need them.
    pub(super) fn unneeded_neighbours(&self, wanted: &BTreeSet<Place>) -> BTreeSet<Place> {
        if self.plan.segments.is_empty() {
            return BTreeSet::new();
        }
        let ours = self.neighbours.iter().filter(|(_, neighbour)| neighbour.ours).map(|(&place, _)| place);
        ours.filter(|place| !wanted.contains(place)).collect()
    }

    fn wanted_backends(&self) -> BTreeMap<u32, Backend> {
        let prefixes = contents::common_prefixes(&self.plan);
        self.plan
            .backends
            .iter()
            .filter_map(|(&id, backend)| {
                let ours = prefixes.get(&(backend.segment, backend.address.is_ipv6()))?;
                let segment = self.plan.segments.get(&backend.segment)?;
                let hop = self.hops.get(&contents::hop_to(backend.segment, segment, backend.address).0)?;
                Some((u32::from(id), contents::backend(backend, hop.index, *ours)))
            })
            .collect()
    }

    /// A backend that may no longer take connections keeps saying so until nothing leads to it.
    fn add_backends(&mut self, wanted: &BTreeMap<u32, Backend>, writer: &mut Writer) {
        let first: BTreeMap<u32, Backend> = wanted
            .iter()
            .map(|(&id, &backend)| {
                let old = self.tables.backends.get(&id).filter(|old| old.address == backend.address);
                let flags = old.map_or(0, |old| old.flags & abi::BACKEND_ELIGIBLE);
                (id, Backend { flags: backend.flags | flags, ..backend })
            })
            .collect();
        self.tables.backends.put_all(&first, writer);
    }

    fn remove_backends(&mut self, wanted: &BTreeMap<u32, Backend>, writer: &mut Writer) {
        self.tables.backends.put_all(wanted, writer);
        if !self.tables.backends.beyond(wanted).is_empty() {
            if self.programs.is_some() {
                bpf::barrier();
            }
            self.tables.backends.retain(wanted, writer);
        }
    }

    /// Makes sure that every lookup table of the plan is in the map; where that failed there is `None`.
    fn add_tables(&mut self, backends: &BTreeMap<u32, Backend>, writer: &mut Writer) -> Vec<Option<Region>> {
        let plan = Arc::clone(&self.plan);
        plan.tables
            .iter()
            .map(|table| {
                if let Some(&region) = self.by_content.get(table) {
                    return Some(region);
                }
                let written = |id: u16| {
                    id == 0
                        || self.tables.backends.get(&u32::from(id)).is_some_and(|found| {
                            backends.get(&u32::from(id)).is_some_and(|wanted| wanted.address == found.address)
                        })
                };
                if !members(table).all(written) {
                    writer.fail(format!("map {}: a backend of a lookup table could not be written", names::MAGLEV));
                    return None;
                }
                let slots = table.len() as u32;
                let chunks = contents::chunks(slots);
                let start = match self.take_region(chunks) {
                    Ok(start) => start,
                    Err(free) => {
                        writer.fail(DataplaneError::MaglevFull { wanted: chunks, free }.to_string());
                        return None;
                    }
                };
                let keys: Vec<u32> = (start..start + chunks).collect();
                let injected = writer.faults.strikes(names::MAGLEV);
                let result = if injected {
                    Err((0, io::Error::other("injected")))
                } else {
                    self.tables.maglev.set_many(&keys, &contents::cut(table))
                };
                if let Err((_, error)) = result {
                    self.regions.give(start, chunks);
                    writer.fail(format!("map {}: cannot write a lookup table: {error}", names::MAGLEV));
                    return None;
                }
                writer.writes += u64::from(chunks);
                let region = Region { start, slots };
                self.by_content.insert(Arc::clone(table), region);
                Some(region)
            })
            .collect()
    }

    fn take_region(&mut self, chunks: u32) -> Result<u32, u32> {
        match self.regions.take(chunks) {
            Err(_) if !self.retired.is_empty() => {
                if self.programs.is_some() {
                    bpf::barrier();
                }
                let retired = std::mem::take(&mut self.retired);
                self.free(&retired);
                self.regions.take(chunks)
            }
            result => result,
        }
    }

    fn add_frontends(&mut self, regions: &[Option<Region>], writer: &mut Writer) {
        let plan = Arc::clone(&self.plan);
        let mut wanted = Vec::with_capacity(plan.frontends.len());
        let mut owners = Vec::with_capacity(plan.frontends.len());
        for (address, frontend) in &plan.frontends {
            let table = match frontend.table {
                None => (0, 0),
                Some(index) => match regions.get(index) {
                    Some(Some(region)) => (region.start, region.slots),
                    // Its table could not be written: it stays as it is, or away.
                    Some(None) | None => continue,
                },
            };
            wanted.push((contents::frontend_key(address), contents::frontend(address, frontend, table)));
            let owner = FrontendOwner { tenant: frontend.tenant, timeouts: frontend.timeouts, pad: [0; 2] };
            owners.push((u32::from(frontend.id), owner));
        }
        // Made in one go, a map of many costs a fraction.
        self.tables.owners.put_all(&owners.into_iter().collect(), writer);
        self.tables.frontends.put_all(&wanted.into_iter().collect(), writer);
    }

    fn remove_frontends(&mut self, writer: &mut Writer) {
        let wanted: BTreeMap<FrontendKey, u16> =
            self.plan.frontends.iter().map(|(address, it)| (contents::frontend_key(address), it.id)).collect();
        let mut gone: BTreeSet<u16> =
            self.tables.frontends.beyond(&wanted).into_iter().map(|(_, value)| value.id).collect();
        if gone.is_empty() {
            return;
        }
        for id in wanted.values() {
            gone.remove(id);
        }
        self.tables.frontends.retain(&wanted, writer);
        if let Some(programs) = &self.programs {
            for id in gone {
                // The next frontend with this id shall start from zero.
                let cleared = programs
                    .traffic
                    .clear(abi::traffic_index(id, false))
                    .and_then(|()| programs.traffic.clear(abi::traffic_index(id, true)))
                    .and_then(|()| programs.events.clear(u32::from(id)));
                if let Err(error) = cleared {
                    writer.fail(format!("frontend #{id}: cannot clear its counters: {error}"));
                }
            }
        }
    }

    /// Lookup tables that nothing refers to any more wait for the last packet that may be reading them.
    fn retire_tables(&mut self) {
        let used: BTreeSet<u32> = self
            .tables
            .frontends
            .shadow()
            .values()
            .filter(|frontend| frontend.table_size != 0)
            .map(|frontend| frontend.table)
            .collect();
        let retired = &mut self.retired;
        self.by_content.retain(|_, region| {
            let keep = used.contains(&region.start);
            if !keep {
                retired.push(*region);
            }
            keep
        });
    }

    /// Takes the regions that wait for an RCU grace period; give them to [`Self::free`] after it.
    pub(super) fn take_retired(&mut self) -> Retired {
        Retired(std::mem::take(&mut self.retired))
    }

    fn free(&mut self, regions: &[Region]) {
        for region in regions {
            self.regions.give(region.start, region.chunks());
        }
    }

    /// Makes the regions usable again.
    pub(super) fn release(&mut self, retired: &Retired) {
        self.free(&retired.0);
    }

    fn wanted_segments(&self) -> BTreeMap<u32, Segment> {
        let index = |key: HopKey| self.hops.get(&key).map_or(0, |hop| hop.index);
        self.plan
            .segments
            .iter()
            .filter_map(|(&id, segment)| {
                let nic = self.nics.get(&segment.name.interface)?;
                let interface = self.interface(segment)?;
                let at = abi::segment_index(nic.slot, segment.name.vlan.unwrap_or(0));
                let (gateway, gateway6) = (index(HopKey::Gateway(id)), index(HopKey::Gateway6(id)));
                let on_link = index(HopKey::OnLink(id));
                Some((at, contents::segment(id, segment, interface, gateway, gateway6, on_link)))
            })
            .collect()
    }

    /// The place of an address: its segment's interface and VLAN.
    fn place(&self, segment: SegmentId, address: IpAddr) -> Option<Place> {
        let plan = self.plan.segments.get(&segment)?;
        Some(Place { interface: self.interface(plan)?.index, vlan: plan.name.vlan.unwrap_or(0), address })
    }

    fn wanted_addresses(&self) -> BTreeMap<AddressKey, LocalAddress> {
        let places = self.places();
        contents::addresses(&self.plan, |segment, address| {
            places.get(&segment).is_some_and(|at| self.claims.is_ours(Place { address, ..*at }))
        })
    }

    /// A place in each segment.
    fn places(&self) -> BTreeMap<SegmentId, Place> {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        self.plan.segments.keys().filter_map(|&segment| Some((segment, self.place(segment, nowhere)?))).collect()
    }

    /// Follows changes of who has which address.
    pub(super) fn write_addresses(&mut self) {
        let wanted = self.wanted_addresses();
        self.adopt_for(&wanted);
        let mut writer = Writer::new(&self.faults);
        self.tables.addresses.put_all(&wanted, &mut writer);
    }

    /// Tells [`Claims`] which addresses are needed now and which may be next.
    pub(super) fn claim_addresses(&mut self, now: Instant) {
        let places = self.places();
        let answered = self.plan.addresses.iter().filter(|(_, plan)| !self.plan.quiet && contents::answered(plan));
        let needed =
            answered.filter_map(|(&(segment, address), _)| Some(Place { address, ..*places.get(&segment)? })).collect();
        let kept = self.kept.iter().filter_map(|&(segment, address)| self.place(segment, address)).collect();
        let ahead = self.ahead(&needed);
        self.claims.want(&needed, &ahead, &kept, now);
    }

    /// A few free addresses of every tenant: the next ones to be given out.
    fn ahead(&self, needed: &BTreeSet<Place>) -> BTreeSet<Place> {
        let mut ahead = BTreeSet::new();
        for tenant in &self.config.tenants {
            let Some(interface) = self.facts.interfaces.get(&tenant.segment.interface) else { continue };
            let vlan = tenant.segment.vlan.unwrap_or(0);
            let place = |address| Place { interface: interface.index, vlan, address };
            let own = self.facts.of(&tenant.segment).into_iter();
            let host =
                own.flat_map(|own| own.all_addresses.iter().map(IpNet::addr).chain(own.gateways.iter().copied()));
            let mut unusable: BTreeSet<IpAddr> = host.chain(tenant.gateways.iter().copied()).collect();
            unusable.extend(tenant.addresses.iter().map(IpNet::addr));
            for v6 in [false, true] {
                let pools: Vec<_> = tenant.pools.iter().copied().filter(|pool| pool.first.is_ipv6() == v6).collect();
                let free = tenant
                    .candidates(&pools)
                    .filter(|address| !needed.contains(&place(*address)) && !unusable.contains(address));
                ahead.extend(free.take(AHEAD).map(place));
            }
        }
        ahead
    }

    /// Whose a place is.
    pub(super) fn whose(&self, place: Place) -> Option<Whose> {
        let segment = self.segment_at(place)?;
        let address = place.address;
        let id = self.plan.segments.iter().find(|(_, plan)| plan.name == segment).map(|(&id, _)| id);
        let planned = id.and_then(|id| {
            let tenant = self.plan.addresses.get(&(id, address))?.tenant;
            Some(self.plan.tenants.get(&tenant)?.name.clone())
        });
        let pooled = || {
            let owner =
                self.config.tenants.iter().find(|tenant| {
                    tenant.segment == segment && tenant.pools.iter().any(|range| range.contains(address))
                });
            owner.map(|tenant| tenant.name.clone())
        };
        let service = id.and_then(|id| {
            let mut frontends = self.plan.frontends.iter();
            frontends
                .find(|(at, _)| at.segment == id && at.vip == address)
                .and_then(|(_, frontend)| frontend.service.clone())
        });
        let tenant = planned.or_else(pooled);
        Some(Whose { segment, tenant, service })
    }
}

/// The backends in a lookup table, each once.
fn members(table: &[u16]) -> impl Iterator<Item = u16> {
    let mut seen = vec![false; abi::MAX_BACKENDS as usize];
    for &id in table {
        if let Some(seen) = seen.get_mut(usize::from(id)) {
            *seen = true;
        }
    }
    seen.into_iter().enumerate().filter(|(_, seen)| *seen).map(|(id, _)| id as u16)
}

/// Whose an address is.
pub(super) struct Whose {
    pub(super) segment: SegmentName,
    pub(super) tenant: Option<String>,
    pub(super) service: Option<ObjectName>,
}

/// Regions that wait for an RCU grace period.
pub(super) struct Retired(Vec<Region>);

impl Retired {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Interfaces on which a hidden tag would matter: those of tenants, and those with VLAN segments (`true`).
pub(super) fn tagged_interfaces(config: &Config) -> BTreeMap<String, bool> {
    let mut found = BTreeMap::new();
    let tenants = config.tenants.iter().map(|tenant| &tenant.segment);
    for segment in tenants.chain(Some(&config.hub.segment).filter(|hub| hub.vlan.is_some())) {
        *found.entry(segment.interface.clone()).or_default() |= segment.vlan.is_some();
    }
    found
}

/// Ticks for a duration, rounded up.
fn ticks(duration: Duration, hertz: u32) -> u32 {
    let jiffies = duration.as_millis() as u64 * u64::from(hertz) / 1000;
    jiffies.div_ceil(1 << abi::TICK_SHIFT).min(u64::from(u32::MAX / 4)) as u32
}

/// Timeouts in ticks.
pub(super) fn timeouts(timeouts: &crate::config::Timeouts, hertz: u32) -> Timeouts {
    let ticks = |duration| ticks(duration, hertz).max(1);
    Timeouts {
        tcp_established: ticks(timeouts.tcp_established),
        tcp_half_open: ticks(timeouts.tcp_half_open),
        tcp_fin: ticks(timeouts.tcp_fin),
        tcp_reset: ticks(timeouts.tcp_reset),
        udp_unreplied: ticks(timeouts.udp_unreplied),
        udp_replied: ticks(timeouts.udp_replied),
    }
}

/// The longest time that a connection may be half-open.
fn half_open(config: &Config) -> Duration {
    let inner = config.tenants.iter().flat_map(|tenant| {
        iter::once(&tenant.settings).chain(tenant.frontends.iter().map(|frontend| &frontend.settings))
    });
    let inner = inner.map(|settings| settings.timeouts.tcp_half_open);
    inner.fold(config.timeouts.tcp_half_open, Duration::max)
}

/// Whether a VIP that was not answered for is now, and one of its frontends adopts flows without state.
fn taken_over(
    plan: &Plan,
    before: &BTreeMap<AddressKey, LocalAddress>,
    wanted: &BTreeMap<AddressKey, LocalAddress>,
) -> bool {
    let adopting = plan.frontends.iter().filter(|(_, frontend)| frontend.adopt);
    let mut keys = adopting.map(|(address, _)| contents::address_key(address.segment, address.vip));
    let answered = |known: Option<&LocalAddress>| known.is_some_and(|known| known.flags & ADDRESS_ANSWER != 0);
    keys.any(|key| answered(wanted.get(&key)) && !answered(before.get(&key)))
}

/// The tick until which flows may be adopted, from the clock's jiffies now; never the 0 that means "never".
pub(super) fn adopt_until(jiffies: u64, hertz: u32) -> u32 {
    const ADOPT: Duration = Duration::from_mins(5);
    ((jiffies >> abi::TICK_SHIFT) as u32).wrapping_add(ticks(ADOPT, hertz)).max(1)
}

/// What the datapath is told.
pub(super) fn settings(config: &Config, seed: [u64; 2], hertz: u32) -> Settings {
    Settings {
        abi: abi::ABI_VERSION,
        flags: 0,
        seed,
        ticks_per_second_256: (hertz * 256) >> abi::TICK_SHIFT,
        tombstone: ticks(Duration::from_secs(75), hertz),
        // No XDP program runs for 100 ms; a tick may have just ended when it is read.
        grace: ticks(Duration::from_millis(100), hertz) + 2,
        // A thousand a second on each CPU.
        rejects_per_tick: (1000 << abi::TICK_SHIFT) / hertz,
        half_open_epoch: ticks(half_open(config), hertz).div_ceil(6).max(1),
        adopt_until: 0,
        max_mss: match config.datapath.mss_clamp {
            MssClamp::Off => 0,
            MssClamp::Auto => u32::from(u16::MAX),
            MssClamp::Value(value) => u32::from(value),
        },
        pad: 0,
    }
}

/// `CONFIG_HZ` from two readings of jiffies and nanoseconds.
pub(super) fn hertz(jiffies: u64, nanoseconds: u64) -> Option<u32> {
    if nanoseconds == 0 {
        return None;
    }
    let measured = jiffies as f64 * 1e9 / nanoseconds as f64;
    [100_u32, 250, 300, 1000]
        .into_iter()
        .min_by(|left, right| {
            let off = |&hertz: &u32| (measured / f64::from(hertz)).ln().abs();
            off(left).total_cmp(&off(right))
        })
        .filter(|&hertz| (measured / f64::from(hertz) - 1.0).abs() < 0.2)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::Mode;
    use super::super::shadow::tests::Memory;
    use super::*;

    use crate::plan::model::{AddressPlan, BackendPlan, FrontendPlan, TenantPlan};
    use crate::plan::testing::{frontend_backend, frontend_plan};

    /// Writes to all maps, in order.
    type Log = Arc<Mutex<Vec<&'static str>>>;

    struct Logged<K, V> {
        name: &'static str,
        log: Log,
        memory: Memory<K, V>,
    }

    impl<K: Copy + Ord + Send, V: Copy + Send> Store<K, V> for Logged<K, V> {
        fn set_many(&self, keys: &[K], values: &[V]) -> Result<(), (usize, io::Error)> {
            if !keys.is_empty() {
                self.log.lock().unwrap().push(self.name);
            }
            self.memory.set_many(keys, values)
        }

        fn delete(&self, key: &K) -> io::Result<()> {
            self.log.lock().unwrap().push(self.name);
            self.memory.delete(key)
        }

        fn load(&self) -> io::Result<Vec<(K, V)>> {
            self.memory.load()
        }
    }

    struct Bench {
        log: Log,
        maglev: Memory<u32, MaglevChunk>,
        frontends: Memory<FrontendKey, Frontend>,
        addresses: Memory<AddressKey, LocalAddress>,
        backends: Memory<u32, Backend>,
        hops: Memory<u32, NextHop>,
        records: Memory<u32, AddressKey>,
        segments: Memory<u32, Segment>,
    }

    impl Bench {
        fn new() -> Self {
            Self {
                log: Log::default(),
                maglev: Memory::default(),
                frontends: Memory::default(),
                addresses: Memory::default(),
                backends: Memory::default(),
                hops: Memory::default(),
                records: Memory::default(),
                segments: Memory::default(),
            }
        }

        fn table<K: Copy + Ord + Send + 'static, V: Copy + Send + PartialEq + 'static>(
            &self,
            name: &'static str,
            memory: &Memory<K, V>,
            zero: Option<V>,
        ) -> Table<K, V> {
            let memory = memory.clone();
            Table::load(name, Box::new(Logged { name, log: Arc::clone(&self.log), memory }), zero).unwrap()
        }

        fn engine(&self) -> Engine {
            let tables = Tables {
                hertz: 250,
                timeouts: self.table("timeouts", &Memory::default(), Some(Timeouts::ZERO)),
                tenants: self.table("tenants", &Memory::default(), Some(Tenant::ZERO)),
                owners: self.table("owners", &Memory::default(), Some(FrontendOwner::ZERO)),
                backends: self.table("backends", &self.backends, Some(Backend::ZERO)),
                frontends: self.table("frontends", &self.frontends, None),
                addresses: self.table("addresses", &self.addresses, None),
                segments: self.table("segments", &self.segments, Some(Segment::ZERO)),
                hops: self.table("hops", &self.hops, Some(NextHop::ZERO)),
                records: self.table("records", &self.records, Some(AddressKey::ZERO)),
                maglev: Box::new(Logged { name: "maglev", log: Arc::clone(&self.log), memory: self.maglev.clone() }),
            };
            let mut engine = Engine::new(&config(), tables, None).unwrap();
            for (name, index) in [("ten0", 7), ("hub0", 8)] {
                let facts = InterfaceFacts {
                    index,
                    mac: [2, 0, 0, 0, 0, index as u8],
                    mtu: 1500,
                    up: true,
                    ..InterfaceFacts::default()
                };
                engine.facts.interfaces.insert(name.into(), facts);
                let nic = Nic {
                    interface: name.into(),
                    index,
                    slot: index - 7,
                    mode: Mode::Native,
                    program_id: 1,
                    warning: None,
                    new: true,
                };
                engine.nics.insert(name.into(), nic);
            }
            engine
        }

        fn log(&self) -> Vec<&'static str> {
            let mut log = std::mem::take(&mut *self.log.lock().unwrap());
            log.dedup();
            log
        }
    }

    fn config() -> Config {
        let text = "version: 1\nhubs:\n  - name: hub\n    interface: hub0\ntenants:\n  - name: a\n    segment: { interface: ten0, \
                    address: 192.0.2.2/24 }\n    pools: [192.0.2.32-192.0.2.47]\n";
        crate::config::parse(text, "test").unwrap()
    }

    fn segment(interface: &str, network: &str, tenant_side: bool) -> SegmentPlan {
        SegmentPlan {
            name: SegmentName { interface: interface.into(), vlan: None },
            tenant_side,
            hub_side: !tenant_side,
            tenant: u16::from(tenant_side),
            networks: vec![network.parse().unwrap()],
            gateways: Vec::new(),
            routes: BTreeMap::new(),
            host_ports: BTreeSet::new(),
            host_access_all: false,
            host_access_icmp: false,
        }
    }

    /// One VIP over so many nodes.
    fn plan(nodes: u8, slots: usize) -> Arc<Plan> {
        let vip: IpAddr = "192.0.2.34".parse().unwrap();
        let mut plan = Plan::default();
        plan.segments.insert(1, segment("ten0", "192.0.2.0/24", true));
        plan.segments.insert(2, segment("hub0", "10.0.0.0/24", false));
        plan.tenants.insert(1, TenantPlan { name: "a".into(), new_flows_per_second: 10, ..TenantPlan::default() });
        plan.addresses.insert((1, vip), AddressPlan { vip: true, tenant: 1, ..AddressPlan::default() });
        let mut list = Vec::new();
        for node in 1..=nodes {
            let address = IpAddr::from([10, 0, 0, 10 + node]);
            let id = u16::from(node);
            plan.backends.insert(id, BackendPlan { address, port: 0, segment: 2, node: None, eligible: true });
            list.push(frontend_backend(id, address));
        }
        if nodes > 0 {
            plan.tables.push((0..slots).map(|slot| (slot % usize::from(nodes)) as u16 + 1).collect::<Vec<_>>().into());
        }
        let address = FrontendAddress { segment: 1, vip, port: 6443, protocol: Protocol::Tcp };
        let frontend = FrontendPlan { table: (nodes > 0).then_some(0), ..frontend_plan("api", 30918, &list) };
        plan.frontends.insert(address, frontend.into());
        Arc::new(plan)
    }

    #[test]
    fn what_leads_to_something_is_written_after_it_and_removed_before_it() {
        let bench = Bench::new();
        let mut engine = bench.engine();
        let now = Instant::now();
        let applied = engine.apply(&plan(2, 1021), now).unwrap();
        assert!(applied.map_writes > 32);
        assert_eq!(
            bench.log(),
            [
                "records",
                "hops",
                "records",
                "hops",
                "records",
                "hops",
                "records",
                "hops",
                "records",
                "hops",
                "tenants",
                "backends",
                "maglev",
                "addresses",
                "owners",
                "frontends",
                "addresses",
                "segments"
            ]
        );
        assert_eq!(engine.apply(&plan(2, 1021), now).unwrap().map_writes, 0);
        assert!(bench.log().is_empty());
        engine.apply(&Arc::default(), now).unwrap();
        // First of all, its ports are left.
        assert_eq!(bench.log(), ["addresses", "segments", "addresses", "frontends", "backends", "tenants"]);
        assert!(bench.frontends.entries.lock().unwrap().is_empty());
    }

    #[test]
    fn b01_a_node_port_is_left_before_its_frontend_changes_and_gone_after() {
        let bench = Bench::new();
        let mut engine = bench.engine();
        let now = Instant::now();
        let mut plan = (*plan(2, 1021)).clone();
        engine.apply(&Arc::new(plan.clone()), now).unwrap();
        bench.log();
        for frontend in plan.frontends.values_mut() {
            Arc::make_mut(frontend).target_port = 31222;
        }
        engine.apply(&Arc::new(plan), now).unwrap();
        assert_eq!(bench.log(), ["addresses", "frontends", "addresses"]);
        let addresses = bench.addresses.entries.lock().unwrap();
        assert_eq!(addresses.get(&contents::port_key(2, 30918)), None);
        assert_eq!(addresses[&contents::port_key(2, 31222)].flags, abi::ADDRESS_TARGET_PORT);
    }

    #[test]
    fn a_new_table_is_written_elsewhere_and_the_old_one_freed_later() {
        let bench = Bench::new();
        let mut engine = bench.engine();
        let now = Instant::now();
        engine.apply(&plan(2, 1021), now).unwrap();
        let old = *bench.frontends.entries.lock().unwrap().values().next().unwrap();
        engine.apply(&plan(3, 1021), now).unwrap();
        let new = *bench.frontends.entries.lock().unwrap().values().next().unwrap();
        assert_eq!((old.table, new.table, new.table_size), (0, 32, 1021));
        assert_eq!(engine.regions.free(), abi::MAGLEV_CHUNKS - 64);
        let retired = engine.take_retired();
        assert!(!retired.is_empty());
        engine.release(&retired);
        assert_eq!(engine.regions.free(), abi::MAGLEV_CHUNKS - 32);
        engine.apply(&plan(4, 1021), now).unwrap();
        assert_eq!(bench.frontends.entries.lock().unwrap().values().next().unwrap().table, 0);
    }

    #[test]
    fn a_full_map_keeps_the_old_table() {
        let bench = Bench::new();
        let mut engine = bench.engine();
        let now = Instant::now();
        engine.apply(&plan(2, 1021), now).unwrap();
        engine.regions = Regions::new(8);
        let error = engine.apply(&plan(3, 1021), now).unwrap_err().to_string();
        assert!(error.contains("maglev_full: 32 chunks wanted") && error.contains("8 free"), "{error}");
        let kept = *bench.frontends.entries.lock().unwrap().values().next().unwrap();
        assert_eq!((kept.table, kept.table_size), (0, 1021));
        // The backends that the old table names are still there.
        assert!(bench.backends.entries.lock().unwrap()[&1].flags & abi::BACKEND_PRESENT != 0);
        engine.regions = Regions::new(64);
        engine.apply(&plan(3, 1021), now).unwrap();
    }

    #[test]
    fn a_failing_write_leaves_the_rest_consistent_and_is_made_up_for() {
        for map in [names::BACKENDS, names::MAGLEV, names::FRONTENDS, names::ADDRESSES] {
            let bench = Bench::new();
            let mut engine = bench.engine();
            let now = Instant::now();
            engine.apply(&plan(2, 1021), now).unwrap();
            // In the tests the tables go by other names.
            let name = if map == names::MAGLEV {
                map
            } else {
                ["backends", "frontends", "addresses"].into_iter().find(|name| *name == map).unwrap()
            };
            engine.faults.inject(name, 1);
            let result = engine.apply(&plan(4, 1021), now);
            assert!(matches!(result, Err(DataplaneError::Partial { .. })), "{map}: {result:?}");
            // Every slot that a frontend can reach names a backend that is present.
            for frontend in bench.frontends.entries.lock().unwrap().values() {
                for chunk in frontend.table..frontend.table + contents::chunks(frontend.table_size) {
                    for id in bench.maglev.entries.lock().unwrap()[&chunk].slots.into_iter().filter(|&id| id != 0) {
                        let flags = bench.backends.entries.lock().unwrap()[&u32::from(id)].flags;
                        assert!(flags & abi::BACKEND_PRESENT != 0, "{map}: backend {id}");
                    }
                }
            }
            assert!(engine.apply(&plan(4, 1021), now).unwrap().map_writes > 0, "{map}");
            assert_eq!(engine.apply(&plan(4, 1021), now).unwrap().map_writes, 0, "{map}");
        }
    }

    #[test]
    fn a_restart_finds_everything_as_it_was() {
        let bench = Bench::new();
        let now = Instant::now();
        let before = {
            let mut engine = bench.engine();
            engine.apply(&plan(3, 1021), now).unwrap();
            engine.hops.clone()
        };
        bench.log();
        let mut engine = bench.engine();
        assert_eq!(engine.hops, before);
        // Tenants and owners start empty in this bench.
        engine.apply(&plan(3, 1021), now).unwrap();
        assert_eq!(bench.log(), ["tenants", "owners"]);
        assert_eq!(engine.regions.free(), abi::MAGLEV_CHUNKS - 32);
    }

    #[test]
    fn next_hops_follow_their_neighbours_and_keep_the_last_mac() {
        let bench = Bench::new();
        let mut engine = bench.engine();
        engine.apply(&plan(1, 1021), Instant::now()).unwrap();
        let node = IpAddr::from([10, 0, 0, 11]);
        let at = |interface| Place { interface, vlan: 0, address: node };
        let index = u32::from(engine.hops[&HopKey::Station(2, node)].index);
        let hop = |bench: &Bench| bench.hops.entries.lock().unwrap()[&index];
        assert_eq!(hop(&bench).flags, 0);
        assert!(engine.to_resolve().contains(&at(8)));
        let good = Neighbour { mac: Some([2, 9, 9, 9, 9, 9]), valid: true, ..Neighbour::default() };
        engine.neighbour(at(8), Some(good));
        assert_eq!((hop(&bench).destination, hop(&bench).flags), ([2, 9, 9, 9, 9, 9], abi::NEXT_HOP_RESOLVED));
        engine.neighbour(at(8), None);
        assert_eq!(hop(&bench).destination, [2, 9, 9, 9, 9, 9]);
        // Another interface's neighbour of the same address is another station.
        let other = Neighbour { mac: Some([2, 8, 8, 8, 8, 8]), valid: true, ..Neighbour::default() };
        engine.neighbour(at(7), Some(other));
        assert_eq!(hop(&bench).destination, [2, 9, 9, 9, 9, 9]);
        engine.facts.interfaces.get_mut("hub0").unwrap().mac = [2, 7, 7, 7, 7, 7];
        engine.refresh();
        assert_eq!(hop(&bench).source, [2, 7, 7, 7, 7, 7]);
        assert_eq!(bench.segments.entries.lock().unwrap()[&abi::VLANS].mac, [2, 7, 7, 7, 7, 7]);
    }

    #[test]
    fn a_vip_is_answered_only_once_it_is_known_to_be_free() {
        let bench = Bench::new();
        let mut engine = bench.engine();
        let mut now = Instant::now();
        engine.apply(&plan(1, 1021), now).unwrap();
        let key = contents::address_key(1, "192.0.2.34".parse().unwrap());
        let flags = |bench: &Bench| bench.addresses.entries.lock().unwrap()[&key].flags;
        assert_eq!(flags(&bench), abi::ADDRESS_VIP);
        for _ in 0..20 {
            engine.claims.due(now, |_| true);
            now += Duration::from_millis(100);
        }
        engine.write_addresses();
        assert_eq!(flags(&bench), abi::ADDRESS_VIP | ADDRESS_ANSWER);
        // The next agent does not take it away while it makes up its mind.
        let mut engine = bench.engine();
        engine.apply(&plan(1, 1021), now).unwrap();
        assert_eq!(flags(&bench), abi::ADDRESS_VIP | ADDRESS_ANSWER);
    }

    #[test]
    fn the_first_free_pool_addresses_are_checked_ahead() {
        let bench = Bench::new();
        let mut engine = bench.engine();
        engine.plan = plan(1, 1021);
        let needed = BTreeSet::from([Place { interface: 7, vlan: 0, address: IpAddr::from([192, 0, 2, 33]) }]);
        let ahead: Vec<String> = engine.ahead(&needed).iter().map(|place| place.address.to_string()).collect();
        assert_eq!(ahead, ["192.0.2.32", "192.0.2.34", "192.0.2.35", "192.0.2.36"]);
    }

    #[test]
    fn backends_and_their_ports_are_known_as_addresses() {
        let wanted = contents::addresses(&plan(2, 1021), |_, _| false);
        let node = contents::address_key(2, "10.0.0.11".parse().unwrap());
        assert_eq!(wanted[&node].flags, abi::ADDRESS_BACKEND);
        assert_eq!(wanted[&contents::port_key(2, 30918)].flags, abi::ADDRESS_TARGET_PORT);
        // And the VIP, in its segment and as it is known on the hub's.
        assert_eq!(wanted.len(), 5);
    }

    #[test]
    fn clocks_are_told_apart() {
        assert_eq!(hertz(25, 100_000_000), Some(250));
        assert_eq!(hertz(26, 100_000_000), Some(250));
        assert_eq!(hertz(29, 100_000_000), Some(300));
        assert_eq!(hertz(10, 100_000_000), Some(100));
        assert_eq!(hertz(100, 100_000_000), Some(1000));
        assert_eq!(hertz(5000, 100_000_000), None);
        assert_eq!(hertz(1, 0), None);
    }

    #[test]
    fn timeouts_are_there_before_a_frontend_refers_to_them() {
        let bench = Bench::new();
        let mut engine = bench.engine();
        let mut plan = (*plan(1, 1021)).clone();
        let short = crate::config::Timeouts { udp_replied: Duration::from_secs(10), ..config().timeouts };
        plan.timeouts.extend([(0, config().timeouts), (5, short)]);
        for frontend in plan.frontends.values_mut() {
            Arc::make_mut(frontend).timeouts = 5;
        }
        engine.apply(&Arc::new(plan.clone()), Instant::now()).unwrap();
        let log = bench.log();
        let at = |name: &str| log.iter().position(|other| *other == name).unwrap();
        assert!(at("timeouts") < at("owners") && at("owners") < at("frontends"));
        assert_eq!(engine.tables.timeouts.get(&5).unwrap().udp_replied, 157);
        assert_eq!(engine.tables.timeouts.get(&0).unwrap().udp_replied, 2813);
        assert_eq!(engine.tables.owners.get(&9).unwrap().timeouts, 5);
        assert_eq!(bench.frontends.entries.lock().unwrap().values().next().unwrap().timeouts, 5);
        // An index that is not used any more holds something sensible.
        plan.timeouts.remove(&5);
        engine.apply(&Arc::new(plan), Instant::now()).unwrap();
        assert_eq!(engine.tables.timeouts.get(&5).unwrap().udp_replied, 157);
    }

    #[test]
    fn a_vip_is_taken_over_when_it_is_answered_for_anew_and_a_frontend_adopts() {
        let mut plan = (*plan(1, 1021)).clone();
        let [unanswered, answered] = [false, true].map(|answer| contents::addresses(&plan, |_, _| answer));
        assert!(!taken_over(&plan, &unanswered, &answered), "nobody adopts");
        for frontend in plan.frontends.values_mut() {
            Arc::make_mut(frontend).adopt = true;
        }
        assert!(taken_over(&plan, &BTreeMap::new(), &answered));
        assert!(taken_over(&plan, &unanswered, &answered));
        assert!(!taken_over(&plan, &answered, &answered));
        assert!(!taken_over(&plan, &answered, &unanswered));
    }

    #[test]
    fn adoption_ends_after_five_minutes_of_ticks() {
        assert_eq!(adopt_until(16_000, 250), 1000 + 4688);
        // Past the end of the ticks, and never the word for "never".
        assert_eq!(adopt_until((1 << 36) - 16, 250), 4687);
        assert_eq!(adopt_until((1 << 36) - 16 * 4688, 250), 1);
    }

    #[test]
    fn the_longest_half_open_timeout_of_all_counts() {
        let mut config = config();
        assert_eq!(half_open(&config), Duration::from_secs(30));
        config.timeouts.tcp_half_open = Duration::from_secs(40);
        assert_eq!(half_open(&config), Duration::from_secs(40));
        config.tenants[0].settings.timeouts.tcp_half_open = Duration::from_secs(50);
        assert_eq!(settings(&config, [1, 2], 250).half_open_epoch, 131);
    }

    #[test]
    fn settings_are_in_ticks() {
        let settings = settings(&config(), [1, 2], 250);
        assert_eq!((settings.ticks_per_second_256, settings.tombstone), (4000, 1172));
        assert_eq!((settings.rejects_per_tick, settings.half_open_epoch), (64, 79));
        let timeouts = timeouts(&config().tenants[0].settings.timeouts, 250);
        assert_eq!((timeouts.tcp_established, timeouts.tcp_half_open), (1_350_000, 469));
        assert!(settings.grace >= 3);
    }
}
