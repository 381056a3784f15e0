//! Pure: (config, inventory, addresses, health, host) → exact contents of the maps.

mod frontend;
mod ids;
mod known;
pub mod model;
pub(crate) mod ranges;
mod table;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use lbd_common::abi::{HALF_OPEN_SETS, HALF_OPEN_WAYS};

pub use self::ids::Ids;
use self::ids::{BackendKey, SEGMENTS, SegmentKey, TENANTS};
use self::known::{Known, Origin};
use self::model::{
    AddressPlan, FamilyLimitsPlan, Health, HostFacts, InterfaceFacts, Notice, Pinned, Plan, Reset, SegmentId,
    SegmentPlan, TenantId, TenantPlan,
};
use self::table::Cache;
use crate::config::{Config, HostAccess, SegmentName, Tenant};
use crate::ipam::Assignments;
use crate::source::Inventory;

/// Makes plans. A plan is a function of the arguments and the [`Ids`].
#[derive(Debug, Default)]
pub struct Planner {
    ids: Ids,
    cache: Cache,
    /// What the last plan was asked for. Most changes are of nodes and of what probes find: then all of it holds.
    known: Option<Known>,
}

impl Planner {
    /// Starts from the ids of an earlier life, or from none.
    pub fn new(mut ids: Ids) -> Self {
        ids.repair();
        Self { ids, ..Self::default() }
    }

    /// Starts from the ids of an earlier life if the maps agree with them, else from what the maps hold.
    pub fn restored(ids: Option<Ids>, pinned: &Pinned, config: &Config) -> Self {
        let mut ids = ids.unwrap_or_default();
        ids.repair();
        if !ids.agree(pinned) {
            tracing::warn!(
                "the saved ids are lost or not those of the maps; recovered from the maps: {} segments, {} frontends, {} backends",
                pinned.segments.len(),
                pinned.frontends.len(),
                pinned.backends.len()
            );
            ids = Ids::recovered(pinned, config);
        }
        Self { ids, ..Self::default() }
    }

    /// To be kept on disk, before the plan is applied.
    pub fn ids(&self) -> &Ids {
        &self.ids
    }

    /// Tells that the last plan is in the maps: its resets are done and not asked for again. Until then every plan repeats them.
    pub fn applied(&mut self) {
        if !self.ids.pending.is_empty() {
            self.ids.pending.clear();
            self.ids.changes += 1;
        }
    }

    /// Grows whenever [`Self::ids`] has changed, so that what has not changed need not be written.
    pub fn ids_revision(&self) -> u64 {
        self.ids.revision()
    }

    /// Grows whenever [`Self::ids`] has changed in a way that must be on disk before the plan is applied.
    pub fn binding_ids_revision(&self) -> u64 {
        self.ids.binding_revision()
    }

    /// Makes a plan. With a hub in Kubernetes, the plan of an inventory that is not complete must not be applied: it lacks what
    /// has not been listed yet.
    pub fn plan(
        &mut self,
        config: &Arc<Config>,
        inventory: &Inventory,
        assignments: &Arc<Assignments>,
        health: &Health,
        host: &HostFacts,
    ) -> Plan {
        let complete = inventory.complete || config.hub.kubernetes.is_none();
        let mut plan = Plan { notices: Vec::new(), ..Plan::default() };
        let site = self.site(config, host, &mut plan);
        plan.timeouts.insert(0, config.timeouts);
        for (tenant, vip) in frontend::vips(config, assignments) {
            add_vip(&site, tenant, vip, &mut plan);
        }
        let origin = Origin::of(config, inventory, assignments, host);
        let mut known = match self.known.take().filter(|known| known.holds(&origin)) {
            Some(mut known) => {
                known.follow(origin);
                known.add_to(&mut plan);
                known
            }
            None => Known::make(origin, &site, &self.ids, &mut plan),
        };
        let settled = known.settled.take();
        let mut resets = BTreeSet::new();
        known.settled = frontend::fill(
            &mut frontend::Context {
                config,
                inventory,
                health,
                site: &site,
                complete,
                ids: &mut self.ids,
                cache: &mut self.cache,
                resets: &mut resets,
            },
            known.wishes(),
            settled,
            &mut plan,
        );
        self.known = Some(known);
        close_quietly(&mut plan);
        self.forget(complete, inventory, config, &site, &plan, &mut resets);
        if !resets.is_empty() {
            self.ids.changes += 1;
            self.ids.pending.append(&mut resets);
        }
        plan.resets.clone_from(&self.ids.pending);
        plan.notices.sort();
        plan.notices.dedup();
        plan
    }

    /// Segments and tenants, and the host's own addresses.
    fn site<'a>(&mut self, config: &'a Config, host: &'a HostFacts, plan: &mut Plan) -> Site<'a> {
        let mut names: Vec<&SegmentName> = config.tenants.iter().map(|tenant| &tenant.segment).collect();
        names.push(&config.hub.segment);
        names.sort();
        names.dedup();
        let mut tenants: Vec<&Tenant> = config.tenants.iter().collect();
        tenants.sort_by(|left, right| left.name.cmp(&right.name));
        let mut site = Site::default();
        for name in names {
            let Some(id) = self.ids.segments.id(name.into(), SEGMENTS, || ()) else { continue };
            site.segments.insert(name, (id, host.of_segment(name)));
        }
        for &tenant in &tenants {
            if !site.segments.contains_key(&tenant.segment) {
                continue;
            }
            let Some(id) = self.ids.tenants.id(tenant.name.clone(), TENANTS, || ()) else {
                plan.notices.push(Notice {
                    reason: "TooManyTenants",
                    service: None,
                    tenant: Some(tenant.name.clone()),
                    message: format!("no id left for tenant {}: it is not served", tenant.name),
                });
                continue;
            };
            site.tenants.insert(&tenant.name, id);
            plan.tenants.insert(id, limits(config, tenant));
        }
        for (&name, &(id, facts)) in &site.segments {
            let here: Vec<&Tenant> = tenants.iter().copied().filter(|tenant| tenant.segment == *name).collect();
            let only = match here.as_slice() {
                [only] => site.tenants.get(only.name.as_str()).copied().unwrap_or_default(),
                _ => 0,
            };
            // Tenants of one segment have the same access: it is the segment's where no one tenant has it.
            let shared = here.first().filter(|_| only == 0).map_or((false, false), |tenant| host_access(tenant));
            let facts = facts.map(|(_, facts)| facts);
            let configured = here.iter().flat_map(|tenant| tenant.addresses.iter().copied());
            let mut networks = Vec::new();
            for network in configured.chain(facts.into_iter().flat_map(|facts| facts.addresses.iter().copied())) {
                if !networks.contains(&network.trunc()) {
                    networks.push(network.trunc());
                }
            }
            let mut gateways: Vec<IpAddr> = Vec::new();
            let learnt = facts.into_iter().flat_map(|facts| facts.gateways.iter().copied());
            for gateway in here.iter().flat_map(|tenant| tenant.gateways.iter().copied()).chain(learnt) {
                if !gateways.iter().any(|known| known.is_ipv4() == gateway.is_ipv4()) {
                    gateways.push(gateway);
                }
            }
            for address in facts.into_iter().flat_map(|facts| &facts.all_addresses) {
                let own = AddressPlan { host: true, tenant: only, ..AddressPlan::default() };
                plan.addresses.insert((id, address.addr()), own);
            }
            plan.segments.insert(
                id,
                SegmentPlan {
                    name: name.clone(),
                    tenant_side: !here.is_empty(),
                    hub_side: *name == config.hub.segment,
                    tenant: only,
                    networks,
                    gateways,
                    routes: facts.map(|facts| facts.routes.clone()).unwrap_or_default(),
                    host_ports: here.iter().flat_map(|tenant| host_ports(&tenant.host_access)).copied().collect(),
                    host_access_all: shared.0,
                    host_access_icmp: shared.1,
                },
            );
        }
        site
    }

    /// Finds what is gone, and gives back its ids.
    fn forget(
        &mut self,
        complete: bool,
        inventory: &Inventory,
        config: &Config,
        site: &Site<'_>,
        plan: &Plan,
        resets: &mut BTreeSet<Reset>,
    ) {
        if !complete {
            return;
        }
        let wanted =
            |key: &ids::FrontendKey| key.address().is_some_and(|address| plan.frontends.contains_key(&address));
        // Every frontend of the plan has an id. As many ids as frontends: none is gone.
        if self.ids.frontends.used.len() > plan.frontends.len() {
            let gone = self.ids.frontends.keep_only(|key, _| wanted(key));
            resets.extend(gone.into_iter().map(Reset::Frontend));
        }
        self.gone_nodes(inventory, config, site, resets);
        self.gone_sources(plan, resets);
        let backends: BTreeSet<BackendKey> = plan
            .backends
            .values()
            .map(|backend| BackendKey { segment: backend.segment, address: backend.address, port: backend.port })
            .collect();
        // A node that still exists can have flows, though it gets no new ones: its id stays, and its end will be noticed.
        self.ids.backends.keep_only(|key, memory| backends.contains(key) || memory.node.is_some());
        self.ids.tenants.keep_only(|name, ()| site.tenants.contains_key(name.as_str()));
        self.ids.timeouts.keep_only(|timeouts, ()| plan.timeouts.values().any(|used| used == timeouts));
        let segments: BTreeSet<SegmentKey> = site.segments.keys().map(|&name| name.into()).collect();
        self.ids.segments.keep_only(|key, ()| segments.contains(key));
        let live: BTreeSet<SegmentId> = plan.segments.keys().copied().collect();
        let before = self.ids.targets.len();
        self.ids.targets.retain(|key, _| live.contains(&key.segment));
        self.ids.changes += (before - self.ids.targets.len()) as u64;
    }

    /// Source addresses that nobody answers for any more: replies to what came from them would get lost.
    fn gone_sources(&mut self, plan: &Plan, resets: &mut BTreeSet<Reset>) {
        let mut sources: BTreeSet<(SegmentId, IpAddr)> = BTreeSet::new();
        for (&place, known) in &plan.addresses {
            if known.snat.is_some() && !known.host {
                sources.insert(place);
            }
        }
        for &(segment, address) in self.ids.sources.difference(&sources) {
            // On the host itself it is still there, whoever uses it.
            let kept = plan.addresses.get(&(segment, address)).is_some_and(|known| known.snat.is_some() || known.host);
            if plan.segments.contains_key(&segment) && !kept {
                resets.insert(Reset::Source(segment, address));
            }
        }
        if self.ids.sources != sources {
            self.ids.sources = sources;
            self.ids.changes += 1;
            self.ids.bound += 1;
        }
    }

    /// Addresses whose Node object is gone, or is another's now.
    fn gone_nodes(&mut self, inventory: &Inventory, config: &Config, site: &Site<'_>, resets: &mut BTreeSet<Reset>) {
        let Some(&(hub, _)) = site.segments.get(&config.hub.segment) else { return };
        let mut nodes = BTreeMap::new();
        for (name, node) in &inventory.nodes {
            for address in &node.addresses {
                nodes.entry(*address).or_insert((name, node));
            }
        }
        let fixed = frontend::fixed_backends(config);
        for (key, entry) in &mut self.ids.backends.used {
            let memory = &mut entry.memory;
            let (Some(name), 0) = (&memory.node, key.port) else { continue };
            let now = nodes.get(&key.address);
            let same = now.is_some_and(|(now, node)| {
                **now == *name && (memory.uid.is_empty() || node.uid.is_empty() || memory.uid == node.uid)
            });
            if same {
                continue;
            }
            self.ids.changes += 1;
            match now {
                Some((name, node)) => {
                    self.ids.bound += 1;
                    memory.node = Some((*name).clone());
                    memory.uid.clone_from(&node.uid);
                }
                None => *memory = ids::BackendMemory::default(),
            }
            // The file still names it: then it has not gone.
            if key.segment != hub || !fixed.contains(&(&config.hub.segment, key.address)) {
                resets.insert(Reset::Address(key.segment, key.address));
            }
        }
    }
}

/// A segment's id, and the interface by which the host itself is in it.
type Place<'a> = (SegmentId, Option<(&'a str, &'a InterfaceFacts)>);

/// Segments and tenants with their ids.
#[derive(Debug, Default)]
struct Site<'a> {
    segments: BTreeMap<&'a SegmentName, Place<'a>>,
    tenants: BTreeMap<&'a str, TenantId>,
}

impl<'a> Site<'a> {
    fn segment(&self, name: &SegmentName) -> Option<SegmentId> {
        self.segments.get(name).map(|&(id, _)| id)
    }

    /// The interface for the host's own sockets in a segment.
    fn interface(&self, name: &SegmentName) -> Option<(&'a str, &'a InterfaceFacts)> {
        self.segments.get(name)?.1
    }

    /// Primary address of the host in a segment, of a family: never a link-local, deprecated or tentative one, and never a VIP.
    fn primary(&self, name: &SegmentName, v6: bool, plan: &Plan) -> Option<IpAddr> {
        let (id, facts) = self.segments.get(name)?;
        let (_, facts) = (*facts)?;
        let is_vip = |address: &IpAddr| plan.addresses.get(&(*id, *address)).is_some_and(|known| known.vip);
        let local = |address: &IpAddr| matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let mut addresses = facts.addresses.iter().map(IpNet::addr);
        addresses.find(|address| address.is_ipv6() == v6 && !local(address) && !is_vip(address))
    }

    fn is_host(&self, name: &SegmentName, address: IpAddr) -> bool {
        self.interface(name).is_some_and(|(_, facts)| facts.all_addresses.iter().any(|own| own.addr() == address))
    }
}

/// TCP ports that `host_access` opens.
fn host_ports(access: &HostAccess) -> &[u16] {
    match access {
        HostAccess::Own | HostAccess::None => &[],
        HostAccess::Only { ports, icmp: _ } => ports,
    }
}

/// Whether `host_access` lets everything through, and whether ICMP.
const fn host_access(tenant: &Tenant) -> (bool, bool) {
    match &tenant.host_access {
        HostAccess::Own => (true, true),
        HostAccess::None => (false, false),
        HostAccess::Only { ports: _, icmp } => (false, *icmp),
    }
}

fn limits(config: &Config, tenant: &Tenant) -> TenantPlan {
    /// Of the table of half-open connections, which all tenants share, one has half at the most.
    const HALF_OPEN: u32 = HALF_OPEN_SETS * HALF_OPEN_WAYS as u32 / 2;
    // One tenant alone cannot fill the table.
    let half = |table: u32| (table / 2).max(1);
    let (four, six) = (half(config.datapath.max_flows), half(config.datapath.max_flows_v6));
    let four = tenant.limits.flows.unwrap_or(four);
    // What is said of IPv4's table may be more than there is of IPv6's.
    let six = tenant.limits.flows.map_or(six, |flows| flows.min(six));
    let family = |flows: u32| {
        FamilyLimitsPlan {
            flows,
            udp: tenant.limits.udp_flows.unwrap_or((flows / 4).max(1)).min(flows),
            // A small tenant needs no more than half of its connections under way at once, but a burst must have room.
            half_open: (flows / 2).clamp(64, HALF_OPEN),
        }
    };
    let (host_access_all, host_access_icmp) = host_access(tenant);
    TenantPlan {
        name: tenant.name.clone(),
        families: [family(four), family(six)],
        new_flows_per_second: tenant.limits.new_flows_per_second.unwrap_or_default(),
        host_access_all,
        host_access_icmp,
    }
}

/// Notes which VIPs drop in silence what nobody serves: those of which no frontend answers.
fn close_quietly(plan: &mut Plan) {
    let vips = |quiet: bool| {
        let all = plan.frontends.iter().filter(move |(_, frontend)| frontend.unserved_drop == quiet);
        all.map(|(address, _)| (address.segment, address.vip))
    };
    let mut silent: BTreeSet<_> = vips(true).collect();
    if !silent.is_empty() {
        for answering in vips(false) {
            silent.remove(&answering);
        }
    }
    for vip in silent {
        if let Some(address) = plan.addresses.get_mut(&vip) {
            address.unserved_drop = true;
        }
    }
}

/// Notes a VIP, unless another tenant has it in this segment.
fn add_vip(site: &Site<'_>, tenant: &Tenant, vip: IpAddr, plan: &mut Plan) {
    let (Some(segment), Some(&id)) = (site.segment(&tenant.segment), site.tenants.get(tenant.name.as_str())) else {
        return;
    };
    let mut notice = |reason, message| {
        plan.notices.push(Notice { reason, service: None, tenant: Some(tenant.name.clone()), message });
    };
    let entry = plan.addresses.entry((segment, vip)).or_default();
    if entry.vip && entry.tenant != id {
        notice(
            "VipOfOtherTenant",
            format!("the VIP {vip} belongs to another tenant in the same segment, and is not served"),
        );
        return;
    }
    if site.is_host(&tenant.segment, vip) {
        notice(
            "VipOnInterface",
            format!(
                "the VIP {vip} is also configured on the interface {}; remove it there: ports that no frontend uses are closed",
                tenant.segment
            ),
        );
    }
    *entry = AddressPlan { vip: true, tenant: id, ..AddressPlan::default() };
}
