//! The plan and the health of backends, as `lbctl` shows them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use jiff::Timestamp;

use super::core::{Core, Counts, Inputs, Maps};
use super::events::time;
use super::exhaustion::Exhausted;
use super::hub::Hub;
use crate::api::types::{
    Backend, Event, FrontendLabel, InterfaceStatus, Names, SegmentLabel, Service, SourceStatus, Status, TenantVips,
    Vip, service_state, vip_state,
};
use crate::config::{AddressRange, Config, Mode, SegmentName, Tenant};
use crate::ipam::{self, RESERVED, Record};
use crate::plan::model::{FrontendAddress, FrontendBackend, FrontendPlan, FrontendProbe, Health, HostFacts, Plan};

/// Seconds that a source may be away before it is a problem: watches are renewed now and then.
const SOURCE_GRACE: u64 = 5;

/// Notices that make the host degraded; others concern only the owner of a Service.
const ALARMS: [&str; 13] = [
    "AllBackendsDown",
    "Blind",
    "ClusterChanged",
    "CredentialsEnd",
    "EventsForbidden",
    "ForeignAddress",
    "LeaseHeldByOther",
    "LeaseUnavailable",
    "RecordContended",
    "RecordForbidden",
    "RecordNotSaved",
    "RecordTooLarge",
    "RemovalHeld",
];

/// What the agent lets others see: made anew after every round, never changed.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    pub status: Status,
    pub events: Vec<Event>,
    pub plan: Arc<Plan>,
    pub health: Arc<Health>,
    pub addresses: Addresses,
    pub hub: String,
    pub bpffs: PathBuf,
    pub counts: Counts,
    pub notices: BTreeMap<&'static str, u64>,
    /// Frontends for which SNAT ports have run out.
    pub exhausted: Vec<Exhausted>,
    /// Writes of Service statuses since the start.
    pub status_writes: u64,
    /// Failed requests to the source since the start, by kind of object.
    pub source_failures: BTreeMap<&'static str, u64>,
    /// When the credentials for the cluster end to be good, in seconds since the epoch.
    pub credentials_until: Option<i64>,
    /// A plan is in the maps.
    pub ready: bool,
    /// When it was made, in seconds since the epoch.
    pub made: i64,
}

impl View {
    pub(super) fn new<M: Maps>(
        core: &Core<M>,
        inputs: &Inputs,
        holders: Holders,
        hub: &Hub,
        started: Timestamp,
    ) -> Self {
        let sources = hub.status();
        let (status_writes, source_failures) = hub.counts();
        let mut notices = BTreeMap::new();
        for notice in core.events.lasting() {
            *notices.entry(notice.reason).or_default() += 1;
        }
        let interfaces = interfaces(core, inputs);
        let problems = problems(core, inputs, &sources, &interfaces);
        let status = Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            abi: lbd_common::abi::ABI_VERSION,
            pid: std::process::id(),
            started: time(started),
            config: core.config_status.clone(),
            interfaces,
            sources,
            lease: hub.lease(),
            cluster: hub.cluster(),
            tables: Vec::new(),
            tenants: Vec::new(),
            apply: core.apply_status.clone(),
            problems,
        };
        Self {
            status,
            events: core.events.all(),
            plan: Arc::clone(&core.plan),
            health: Arc::clone(&inputs.health),
            addresses: Addresses {
                config: Some(Arc::clone(&core.config)),
                record: Arc::clone(&core.record),
                host: inputs.host.clone(),
                holders,
            },
            hub: core.config.hub.name.clone(),
            bpffs: core.config.datapath.bpffs.clone(),
            counts: core.counts,
            notices,
            exhausted: inputs.exhausted.clone(),
            status_writes,
            source_failures,
            credentials_until: hub.validity().map(|validity| validity.until),
            ready: core.ever,
            made: Timestamp::now().as_second(),
        }
    }
}

fn role(config: &Config, interface: &str) -> &'static str {
    let tenant = config.tenants.iter().any(|tenant| tenant.segment.interface == interface);
    match (tenant, config.hub.segment.interface == interface) {
        (true, true) => "tenant+hub",
        (true, false) => "tenant",
        (false, _) => "hub",
    }
}

fn interfaces<M: Maps>(core: &Core<M>, inputs: &Inputs) -> Vec<InterfaceStatus> {
    let attached = core.maps.attached();
    let one = |name: &str| {
        let facts = inputs.host.interfaces.get(name);
        let mode = attached.iter().find(|attached| attached.interface == name).and_then(|attached| attached.mode);
        InterfaceStatus {
            name: name.to_owned(),
            role: role(&core.config, name).to_owned(),
            mode: mode.map_or("detached", |mode| mode.as_str()).to_owned(),
            up: facts.is_some_and(|facts| facts.up),
            mtu: facts.map_or(0, |facts| facts.mtu),
        }
    };
    core.config.interfaces().into_iter().map(one).collect()
}

fn problems<M: Maps>(
    core: &Core<M>,
    inputs: &Inputs,
    sources: &[SourceStatus],
    interfaces: &[InterfaceStatus],
) -> Vec<String> {
    let mut problems = Vec::new();
    if core.config_status.stale {
        problems.push("config_stale: the last reload was refused".to_owned());
    }
    if let Some(error) = &core.apply_status.error {
        problems.push(format!("apply_failed: {error}"));
    }
    for source in sources {
        if source.state != "synced" && source.age_s.is_none_or(|age| age > SOURCE_GRACE) {
            let error = source.error.as_deref().unwrap_or("no connection");
            let age = source.age_s.map_or_else(String::new, |age| format!(" for {age} s"));
            problems.push(format!("source_away: {} is {}{age}: {error}", source.name, source.state));
        } else if source.state == "synced"
            && let Some(error) = &source.error
        {
            problems.push(format!("source_error: {}: {error}", source.name));
        }
    }
    for interface in interfaces {
        if interface.mode == "detached" {
            problems.push(format!("detached: lbd's program is not on {}", interface.name));
        }
        if !interface.up {
            problems.push(format!("link_down: {} is down or has no carrier", interface.name));
        }
    }
    let mut told = BTreeSet::new();
    for notice in inputs.host_notices.iter().filter(|notice| told.insert(*notice)) {
        problems.push(format!("{}: {}", notice.reason, notice.message));
    }
    // One word for all Services: there may be thousands.
    let mut forbidden = inputs.source_notices.iter().filter(|notice| notice.reason == "StatusForbidden");
    if let Some(first) = forbidden.next() {
        let more = match forbidden.count() {
            0 => String::new(),
            more => format!(" (and {more} more Services)"),
        };
        problems.push(format!("{}: {}{more}", first.reason, first.message));
    }
    let others = core.plan.notices.iter().chain(&core.assignments.notices).chain(&inputs.source_notices);
    for notice in others.filter(|notice| ALARMS.contains(&notice.reason)) {
        problems.push(format!("{}: {}", notice.reason, notice.message));
    }
    problems
}

/// Names of all ids in a plan.
pub(crate) fn names(plan: &Plan, hub: &str) -> Names {
    let segments = plan.segments.iter().map(|(&id, segment)| {
        let label = SegmentLabel {
            interface: segment.name.interface.clone(),
            vlan: segment.name.vlan.unwrap_or_default(),
            tenant_side: segment.tenant_side,
            hub_side: segment.hub_side,
        };
        (id, label)
    });
    let frontends = plan.frontends.values().map(|frontend| {
        let label = FrontendLabel {
            name: frontend.name.clone(),
            service: frontend.service.as_ref().map(ToString::to_string),
            tenant: frontend.tenant,
        };
        (frontend.id, label)
    });
    let nodes: BTreeMap<IpAddr, String> = plan
        .backends
        .values()
        .filter_map(|backend| Some((backend.address, backend.node.as_ref()?.to_string())))
        .collect();
    Names {
        hub: hub.to_owned(),
        segments: segments.collect(),
        tenants: plan.tenants.iter().map(|(&id, tenant)| (id, tenant.name.clone())).collect(),
        frontends: frontends.collect(),
        nodes,
    }
}

fn label(frontend: &FrontendPlan) -> String {
    frontend.service.as_ref().map_or_else(|| frontend.name.clone(), ToString::to_string)
}

fn tenant(plan: &Plan, frontend: &FrontendPlan) -> String {
    plan.tenants.get(&frontend.tenant).map_or_else(|| format!("#{}", frontend.tenant), |tenant| tenant.name.clone())
}

fn vip(address: &FrontendAddress) -> String {
    SocketAddr::new(address.vip, address.port).to_string()
}

/// A backend that could get connections if it were up: excluded nodes and those with weight 0 could not.
fn counts(backend: &FrontendBackend) -> bool {
    backend.probed && backend.weight > 0
}

/// The backends of a frontend whose port is known: none of a Service's port without NodePort.
fn reachable(frontend: &FrontendPlan) -> impl Iterator<Item = &FrontendBackend> {
    frontend.backends.iter().filter(|backend| frontend.port_of(backend) != 0)
}

/// How many backends of a frontend there are, are up, are down, and serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub all: u32,
    pub up: u32,
    pub down: u32,
    pub serving: u32,
}

impl Tally {
    fn of(frontend: &FrontendPlan, health: &Health) -> Self {
        let mut tally = Self::default();
        for backend in reachable(frontend) {
            tally.serving += u32::from(backend.serving && frontend.table.is_some());
            if counts(backend) {
                let up = frontend.health_of(backend, health).up;
                // A node without an endpoint of the Service is not missed.
                if !backend.sure && up != Some(true) {
                    continue;
                }
                tally.all += 1;
                match up {
                    Some(true) => tally.up += 1,
                    Some(false) => tally.down += 1,
                    None => {}
                }
            }
        }
        tally
    }

    pub(crate) fn state(self) -> &'static str {
        if self.all == 0 && self.serving == 0 {
            service_state::PENDING
        } else if self.serving == 0 {
            service_state::DOWN
        } else if self.all > 0 && self.down == self.all {
            service_state::TRYING
        } else if self.serving < self.all || self.down > 0 {
            service_state::DEGRADED
        } else {
            service_state::SERVING
        }
    }
}

/// Tallies of many frontends: those that share their backends and how these are probed are counted once.
pub(crate) struct Tallies<'a> {
    health: &'a Health,
    known: HashMap<(*const FrontendBackend, *const FrontendProbe, bool, u16), Tally>,
}

impl<'a> Tallies<'a> {
    pub(crate) fn new(health: &'a Health) -> Self {
        Self { health, known: HashMap::new() }
    }

    pub(crate) fn of(&mut self, frontend: &FrontendPlan) -> Tally {
        let probe = frontend.probe.as_ref();
        // Where the frontend's own port is not asked, it counts only whether it has one.
        let own = probe.is_some_and(|probe| probe.ports.is_empty());
        let port = if own { frontend.target_port } else { u16::from(frontend.target_port != 0) };
        let key =
            (frontend.backends.as_ptr(), probe.map_or(std::ptr::null(), Arc::as_ptr), frontend.table.is_some(), port);
        *self.known.entry(key).or_insert_with(|| Tally::of(frontend, self.health))
    }
}

/// All frontends of a plan.
pub(crate) fn services(plan: &Plan, health: &Health) -> Vec<Service> {
    let mut tallies = Tallies::new(health);
    let service = |(address, frontend): (&FrontendAddress, &Arc<FrontendPlan>)| {
        let tally = tallies.of(frontend);
        Service {
            tenant: tenant(plan, frontend),
            service: label(frontend),
            name: frontend.name.clone(),
            vip: vip(address),
            proto: address.protocol.as_str().to_owned(),
            state: tally.state().to_owned(),
            serving: tally.serving,
            up: Some(tally.up),
            backends: Some(tally.all),
            mode: Some(match frontend.mode {
                None => "file".to_owned(),
                Some(Mode::Nodes) => "nodes".to_owned(),
                Some(Mode::Endpoints) => "endpoints".to_owned(),
            }),
            clients: Some(if frontend.guest_made { "all (guest)" } else { "all" }.to_owned()),
            affinity: if frontend.source_affinity { "source" } else { "flow" }.to_owned(),
            target_port: frontend.target_port,
            snat: frontend.snat,
            id: frontend.id,
            ..Service::default()
        }
    };
    plan.frontends.iter().map(service).collect()
}

/// All backends of all frontends of a plan.
pub(crate) fn backends(plan: &Plan, health: &Health, now: i64) -> Vec<Backend> {
    let mut all = Vec::new();
    for (address, frontend) in &plan.frontends {
        let (tenant, service, vip) = (tenant(plan, frontend), label(frontend), vip(address));
        for backend in reachable(frontend) {
            let known = frontend.health_of(backend, health);
            let cause = if !backend.probed {
                if known.cause.is_empty() { "excluded".to_owned() } else { known.cause }
            } else if backend.weight == 0 {
                "weight 0".to_owned()
            } else {
                known.cause
            };
            all.push(Backend {
                tenant: tenant.clone(),
                service: service.clone(),
                vip: vip.clone(),
                proto: address.protocol.as_str().to_owned(),
                backend: SocketAddr::new(backend.address, frontend.port_of(backend)).to_string(),
                node: backend.node.as_ref().map(ToString::to_string),
                state: match known.up {
                    Some(true) => "up",
                    Some(false) => "down",
                    None => "unknown",
                }
                .to_owned(),
                cause,
                since_s: known.up.map(|_| u64::try_from(now.saturating_sub(known.since)).unwrap_or_default()),
                serving: backend.serving && frontend.table.is_some(),
                weight: Some(backend.weight),
                id: backend.id,
                frontend: frontend.id,
                flows: None,
            });
        }
    }
    all
}

/// MACs of other stations, by the address that they answer for.
pub(crate) type Holders = BTreeMap<(SegmentName, IpAddr), [u8; 6]>;

/// What addresses are made up of.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    pub config: Option<Arc<Config>>,
    pub record: Arc<Record>,
    pub host: HostFacts,
    pub holders: Holders,
}

/// The addresses of all tenants. `now` is in seconds since the epoch.
pub(crate) fn vips(addresses: &Addresses, plan: &Plan, now: i64) -> Vec<TenantVips> {
    let Some(config) = &addresses.config else { return Vec::new() };
    let unusable = ipam::unusable(config, &addresses.host);
    let none = BTreeSet::new();
    let of = |tenant: &Tenant| vips_of(tenant, addresses, unusable.get(&tenant.segment).unwrap_or(&none), plan, now);
    config.tenants.iter().map(of).collect()
}

/// `unusable` are addresses of the tenant's segment that no Service can have.
fn vips_of(tenant: &Tenant, addresses: &Addresses, unusable: &BTreeSet<IpAddr>, plan: &Plan, now: i64) -> TenantVips {
    let mut listed: BTreeMap<IpAddr, Vip> = BTreeMap::new();
    let add = |listed: &mut BTreeMap<IpAddr, Vip>,
               address: IpAddr,
               state: &str,
               service: Option<String>,
               until_s: Option<u64>| {
        let vip = listed.entry(address).or_insert_with(|| Vip {
            address,
            state: state.to_owned(),
            services: Vec::new(),
            mac: None,
            until_s,
        });
        if let Some(service) = service.filter(|service| !vip.services.contains(service)) {
            vip.services.push(service);
        }
    };
    for (address, frontend) in &plan.frontends {
        if plan.tenants.get(&frontend.tenant).is_some_and(|owner| owner.name == tenant.name) {
            add(&mut listed, address.vip, vip_state::USED, Some(label(frontend)), None);
        }
    }
    let recorded = addresses.record.entries.iter().filter(|entry| entry.tenant == tenant.name);
    for entry in recorded.clone().filter(|entry| entry.freed.is_none()) {
        add(&mut listed, entry.address, vip_state::USED, Some(entry.service.to_string()), None);
    }
    for entry in recorded {
        if let Some(freed) = entry.freed
            && listed.get(&entry.address).is_none_or(|vip| vip.state != vip_state::USED)
        {
            let left = u64::try_from(freed.saturating_add(RESERVED).saturating_sub(now)).unwrap_or(0);
            add(&mut listed, entry.address, vip_state::RESERVED, Some(entry.service.to_string()), Some(left));
        }
    }
    for frontend in &tenant.frontends {
        if let Some(vip) = frontend.vip {
            let service = frontend
                .service
                .as_ref()
                .map_or_else(|| frontend.name.clone(), |(namespace, name)| format!("{namespace}/{name}"));
            add(&mut listed, vip, vip_state::RESERVED, Some(service), None);
        }
    }
    let holders = addresses.holders.iter().filter(|((segment, _), _)| *segment == tenant.segment);
    for ((_, address), mac) in holders {
        // In one segment there may be several tenants.
        if listed.contains_key(address) || tenant.pools.iter().any(|pool| pool.contains(*address)) {
            add(&mut listed, *address, vip_state::CONFLICT, None, None);
            if let Some(vip) = listed.get_mut(address) {
                vip_state::CONFLICT.clone_into(&mut vip.state);
                vip.mac = Some(mac.map(|byte| format!("{byte:02x}")).join(":"));
            }
        }
    }
    let free = free(tenant, unusable, &listed);
    TenantVips {
        tenant: tenant.name.clone(),
        interface: tenant.segment.interface.clone(),
        vlan: tenant.segment.vlan.unwrap_or_default(),
        pools: tenant.pools.iter().map(ToString::to_string).collect(),
        free: Some(free.iter().copied().fold(0, u64::saturating_add)),
        free_in_pools: free,
        addresses: listed.into_values().collect(),
    }
}

/// How many addresses of each of a tenant's pools are nothing else.
fn free(tenant: &Tenant, unusable: &BTreeSet<IpAddr>, listed: &BTreeMap<IpAddr, Vip>) -> Vec<u64> {
    let mut others: BTreeSet<IpAddr> = listed.keys().chain(unusable).copied().collect();
    others.retain(|address| !tenant.avoid.iter().any(|avoid| avoid.contains(*address)));
    let of = |pool: &AddressRange| {
        let avoided: u128 = tenant.avoid.iter().map(|avoid| common(*pool, *avoid)).sum();
        let used = others.iter().filter(|address| pool.contains(**address)).count() as u128;
        let free = common(*pool, *pool).saturating_sub(avoided).saturating_sub(used);
        u64::try_from(free).unwrap_or(u64::MAX)
    };
    tenant.pools.iter().map(of).collect()
}

/// How many addresses are in both ranges. All of IPv6 counts as one less.
fn common(a: AddressRange, b: AddressRange) -> u128 {
    let number = |address: IpAddr| match address {
        IpAddr::V4(address) => u128::from(u32::from(address)),
        IpAddr::V6(address) => u128::from(address),
    };
    if a.first.is_ipv4() != b.first.is_ipv4() {
        return 0;
    }
    let (first, last) = (number(a.first).max(number(b.first)), number(a.last).min(number(b.last)));
    last.checked_sub(first).map_or(0, |steps| steps.saturating_add(1))
}

/// Ids that are gone keep their last name, so that flows which outlive their frontend still have one.
pub(crate) fn with_former(mut names: Names, former: Names) -> Names {
    /// More than that are forgotten.
    const KEPT: usize = 65_536;
    for (id, label) in former.frontends {
        if names.frontends.len() < KEPT {
            names.frontends.entry(id).or_insert(label);
        }
    }
    for (id, label) in former.tenants {
        names.tenants.entry(id).or_insert(label);
    }
    names
}

/// Labels of a frontend's metrics.
pub(crate) fn labels(plan: &Plan, address: &FrontendAddress, frontend: &FrontendPlan) -> Vec<(&'static str, String)> {
    vec![
        ("tenant", tenant(plan, frontend)),
        ("service", label(frontend)),
        ("vip", vip(address)),
        ("proto", address.protocol.as_str().to_owned()),
    ]
}

/// Whether two plans have the same names for the same ids.
pub(crate) fn same_names(a: &Plan, b: &Plan) -> bool {
    a.frontends.len() == b.frontends.len()
        && a.frontends.values().zip(b.frontends.values()).all(|(a, b)| {
            Arc::ptr_eq(a, b) || (a.id, a.tenant, &a.name, &a.service) == (b.id, b.tenant, &b.name, &b.service)
        })
        && a.segments == b.segments
        && a.tenants
            .iter()
            .map(|(id, tenant)| (id, &tenant.name))
            .eq(b.tenants.iter().map(|(id, tenant)| (id, &tenant.name)))
        && a.backends.values().map(|a| (a.address, &a.node)).eq(b.backends.values().map(|b| (b.address, &b.node)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::core::testing::{Bench, CONFIG};
    use crate::ipam::Entry;
    use crate::plan::model::Notice;
    use crate::source::ObjectName;

    #[test]
    fn b42_missing_rights_are_problems_and_those_of_all_services_are_one() {
        let mut bench = Bench::new();
        let notice = |reason, service: Option<&str>| Notice {
            reason,
            service: service.map(|name| ObjectName::new("n", name)),
            tenant: None,
            message: "allow it".to_owned(),
        };
        bench.inputs.source_notices = vec![
            notice("StatusForbidden", Some("a")),
            notice("StatusForbidden", Some("b")),
            notice("StatusForbidden", Some("c")),
            notice("EventsForbidden", None),
            notice("StatusContended", Some("d")),
        ];
        let found = problems(&bench.core, &bench.inputs, &[], &[]);
        assert_eq!(found, ["StatusForbidden: allow it (and 2 more Services)", "EventsForbidden: allow it"]);
    }

    #[test]
    fn ranges_have_addresses_in_common() {
        let range =
            |first: &str, last: &str| AddressRange { first: first.parse().unwrap(), last: last.parse().unwrap() };
        let pool = range("192.0.2.32", "192.0.2.47");
        assert_eq!(common(pool, pool), 16);
        assert_eq!(common(pool, range("192.0.2.40", "192.0.2.40")), 1);
        assert_eq!(common(pool, range("192.0.2.40", "192.0.2.200")), 8);
        assert_eq!(common(pool, range("192.0.2.48", "192.0.2.50")), 0);
        assert_eq!(common(pool, range("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")), 0);
        assert_eq!(common(range("2001:db8::", "2001:db8::ffff"), range("2001:db8::ff00", "2001:db8:1::")), 256);
    }

    #[test]
    fn every_address_of_a_tenant_is_one_thing() {
        let mut bench = Bench::new();
        let text =
            CONFIG.replace("pools: [192.0.2.32/28]", "pools: [192.0.2.32/28]\n    avoid: [192.0.2.40-192.0.2.41]");
        std::fs::write(bench.path(), text).unwrap();
        bench.core.config = Arc::new(crate::config::load(&bench.path()).unwrap());
        bench.round();
        let entry = |name: &str, last: u8, freed: Option<i64>| Entry {
            tenant: "a".to_owned(),
            service: ObjectName::new("ns", name),
            address: std::net::Ipv4Addr::new(192, 0, 2, last).into(),
            freed,
        };
        let segment = SegmentName { interface: "ten0".to_owned(), vlan: None };
        let at = |last: u8| (segment.clone(), IpAddr::from([192, 0, 2, last]));
        let elsewhere = (SegmentName { interface: "ten9".to_owned(), vlan: None }, IpAddr::from([192, 0, 2, 45]));
        let addresses = Addresses {
            config: Some(Arc::clone(&bench.core.config)),
            record: Arc::new(Record {
                generation: 1,
                entries: vec![entry("one", 35, None), entry("gone", 36, Some(1000)), entry("late", 37, None)],
                ..Record::default()
            }),
            host: bench.inputs.host.clone(),
            // A Service's, a free one's, one of no pool, and one of another segment.
            holders: [at(35), at(47), at(200), elsewhere].map(|at| (at, [2, 0, 0, 0, 9, 0xab])).into(),
        };
        let found = vips(&addresses, &bench.core.plan, 1000 + RESERVED - 60);
        assert_eq!(found.len(), 1);
        let tenant = &found[0];
        assert_eq!((tenant.tenant.as_str(), tenant.interface.as_str(), tenant.vlan), ("a", "ten0", 0));
        assert_eq!(tenant.pools, ["192.0.2.32-192.0.2.47"]);
        let vip = |last: u8, state: &str, service: &[&str], mac: Option<&str>, until_s| Vip {
            address: IpAddr::from([192, 0, 2, last]),
            state: state.to_owned(),
            services: service.iter().map(ToString::to_string).collect(),
            mac: mac.map(str::to_owned),
            until_s,
        };
        assert_eq!(
            tenant.addresses,
            [
                vip(34, "used", &["web"], None, None),
                vip(35, "conflict", &["ns/one"], Some("02:00:00:00:09:ab"), None),
                vip(36, "reserved", &["ns/gone"], None, Some(60)),
                vip(37, "used", &["ns/late"], None, None),
                vip(47, "conflict", &[], Some("02:00:00:00:09:ab"), None),
            ]
        );
        assert_eq!(tenant.free, Some(16 - 5 - 2));
    }

    #[test]
    fn b22_edges_of_a_prefix_that_is_learnt_are_not_free() {
        let mut bench = Bench::new();
        let text = CONFIG
            .replace("interface: ten0, address: 192.0.2.2/24", "interface: ten0")
            .replace("[192.0.2.32/28]", "[192.0.2.248/29, 192.0.2.32-192.0.2.33]");
        std::fs::write(bench.path(), text).unwrap();
        bench.core.config = Arc::new(crate::config::load(&bench.path()).unwrap());
        let of = |bench: &Bench| {
            let addresses = Addresses {
                config: Some(Arc::clone(&bench.core.config)),
                host: bench.inputs.host.clone(),
                ..Addresses::default()
            };
            let found = vips(&addresses, &Plan::default(), 0).remove(0);
            (found.free, found.free_in_pools)
        };
        assert_eq!(of(&bench), (Some(9), vec![7, 2]), "192.0.2.255 is the broadcast address");
        bench.inputs.host = HostFacts::default();
        assert_eq!(of(&bench), (Some(10), vec![8, 2]));
    }

    #[test]
    fn a_frontend_of_the_file_that_serves_nothing_yet_is_a_reservation() {
        let bench = Bench::new();
        let addresses = Addresses { config: Some(Arc::clone(&bench.core.config)), ..Addresses::default() };
        let found = vips(&addresses, &Plan::default(), 0);
        let [vip] = found[0].addresses.as_slice() else { panic!("{found:?}") };
        assert_eq!(
            (vip.state.as_str(), vip.services.as_slice(), vip.until_s),
            ("reserved", ["web".to_owned()].as_slice(), None)
        );
    }
}
