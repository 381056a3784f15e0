//! Frontends: which there are, where they lead, and which of their backends may take connections.

use std::collections::btree_map::Entry as MapEntry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use lbd_common::maglev::identity;

use super::Site;
use super::ids::{
    BACKENDS, BackendKey, BackendMemory, Entry, FRONTENDS, FrontendKey, FrontendMemory, Ids, TIMEOUTS, TargetKey,
};
use super::model::{
    BackendId, BackendPlan, FrontendAddress, FrontendBackend, FrontendId, FrontendPlan, FrontendProbe, Health, Notice,
    Plan, ProbeTarget, Reset, SegmentId, TenantId, TimeoutsId, any_up,
};
use super::table::{Cache, Content, Tables};
use crate::config::{
    Adopt, Affinity, AllDown, Config, Frontend, FrontendPort, FrontendSettings, Mode, OnDown, Probe, ProbePort,
    Protocol, SegmentName, Tenant, Unserved, Via,
};
use crate::ipam::{Assignments, unserved};
use crate::source::{Inventory, ObjectName, Service};

/// Probes a second over all targets, at most.
pub(crate) const PROBES_PER_SECOND: f64 = 5000.0;
/// Targets at most, however seldom they are probed.
const MAX_TARGETS: usize = 20_000;
/// How many frontends stand for a node when there are too many to probe each of them there.
const REPRESENTATIVES: usize = 3;

/// A frontend that somebody wants.
pub(super) struct Wish<'a> {
    tenant: &'a Tenant,
    tenant_id: TenantId,
    address: FrontendAddress,
    name: String,
    service_name: Option<&'a ObjectName>,
    service: Option<&'a Service>,
    settings: &'a FrontendSettings,
    /// Port on the backends; 0 = not known.
    target: u16,
    /// `target` is the NodePort of the Service.
    node_port: bool,
    /// The first port on the backends that the same Service or frontend serves by TCP.
    tcp_port: Option<u16>,
    /// The frontend of the file whose backends it has; `None` = nodes.
    fixed: Option<&'a Frontend>,
}

impl Wish<'_> {
    fn notice(&self, reason: &'static str, message: String) -> Notice {
        Notice { reason, service: self.service_name.cloned(), tenant: Some(self.tenant.name.clone()), message }
    }

    fn shown(&self) -> String {
        let FrontendAddress { vip, port, protocol, .. } = self.address;
        format!("{}/{}", SocketAddr::new(vip, port), protocol.as_str())
    }

    const fn is_v6(&self) -> bool {
        self.address.vip.is_ipv6()
    }

    fn via(&self) -> Via {
        self.fixed.map_or(Via::Hub, |frontend| frontend.via)
    }

    /// Whether backends see an address of ours.
    const fn has_source(&self) -> bool {
        !self.settings.preserve_client
    }
}

/// The NodePort of a Service's first TCP port that has one.
fn tcp_port(service: &Service) -> Option<u16> {
    let mut ports = service.ports.iter().filter(|port| port.protocol() == Some(Protocol::Tcp));
    ports.find(|port| port.node_port != 0).map(|port| port.node_port)
}

/// The object name of a frontend's Service.
fn service_name(frontend: &Frontend) -> Option<ObjectName> {
    let (namespace, name) = frontend.service.as_ref()?;
    Some(ObjectName { namespace: namespace.clone(), name: name.clone() })
}

/// All VIPs with their tenants, the file's first.
pub(super) fn vips<'a>(config: &'a Config, assignments: &Assignments) -> Vec<(&'a Tenant, IpAddr)> {
    let tenants: BTreeMap<&str, &Tenant> = config.tenants.iter().map(|tenant| (tenant.name.as_str(), tenant)).collect();
    let mut all = Vec::new();
    for tenant in tenants.values() {
        all.extend(tenant.frontends.iter().filter_map(|frontend| Some((*tenant, frontend.vip?))));
    }
    for assignment in assignments.services.values() {
        if let Some(tenant) = tenants.get(assignment.tenant.as_str()) {
            all.extend(assignment.addresses.iter().map(|&address| (*tenant, address)));
        }
    }
    all
}

/// Addresses of backends that the file names.
pub(super) fn fixed_backends(config: &Config) -> BTreeSet<(&SegmentName, IpAddr)> {
    let mut all = BTreeSet::new();
    for tenant in &config.tenants {
        for frontend in &tenant.frontends {
            let segment = match frontend.via {
                Via::Hub => &config.hub.segment,
                Via::Tenant => &tenant.segment,
            };
            all.extend(frontend.backends.iter().map(|backend| (segment, backend.address)));
        }
    }
    all
}

/// What settings ask for that is not there yet.
fn unsupported(settings: &FrontendSettings) -> Option<&'static str> {
    (!settings.source_ranges.is_empty()).then_some("source_ranges")
}

/// All frontends that can be served, in the order in which they win when two want the same address and port.
pub(super) fn wishes<'a>(
    config: &'a Config,
    inventory: &'a Inventory,
    assignments: &'a Assignments,
    site: &Site<'_>,
    plan: &mut Plan,
) -> Vec<Wish<'a>> {
    let mut maker = Maker { site, plan, wishes: Vec::new(), owners: BTreeMap::new() };
    let mut tenants: Vec<&Tenant> = config.tenants.iter().collect();
    tenants.sort_by(|left, right| left.name.cmp(&right.name));
    for &tenant in &tenants {
        let mut frontends: Vec<&Frontend> = tenant.frontends.iter().collect();
        frontends.sort_by(|left, right| left.name.cmp(&right.name));
        for frontend in frontends {
            maker.add_of_file(tenant, frontend, inventory, assignments);
        }
    }
    let by_name: BTreeMap<&str, &Tenant> = tenants.iter().map(|&tenant| (tenant.name.as_str(), tenant)).collect();
    // Both are sorted by name: side by side is much faster than ten thousand look-ups by name.
    let mut services = inventory.services.iter().peekable();
    let mut claimed: Vec<_> = assignments
        .services
        .iter()
        .filter(|(_, assignment)| assignment.claimed && assignment.frontend.is_none())
        .filter_map(|(name, assignment)| {
            while services.next_if(|(other, _)| *other < name).is_some() {}
            let (_, service) = services.next_if(|(other, _)| *other == name)?;
            Some((service, name, assignment))
        })
        .collect();
    claimed.sort_by(|(left, left_name, _), (right, right_name, _)| {
        (left.created, &left.uid, left_name).cmp(&(right.created, &right.uid, right_name))
    });
    for (service, name, assignment) in claimed {
        if let Some(&tenant) = by_name.get(assignment.tenant.as_str()) {
            for &address in &assignment.addresses {
                maker.add_of_claim(tenant, name, service, address);
            }
        }
    }
    maker.wishes
}

struct Maker<'a, 'b> {
    site: &'b Site<'b>,
    plan: &'b mut Plan,
    wishes: Vec<Wish<'a>>,
    owners: BTreeMap<FrontendAddress, usize>,
}

impl<'a> Maker<'a, '_> {
    fn add_of_file(
        &mut self,
        tenant: &'a Tenant,
        frontend: &'a Frontend,
        inventory: &'a Inventory,
        assignments: &'a Assignments,
    ) {
        let mut refuse = |reason, message| {
            let tenant = Some(tenant.name.clone());
            self.plan.notices.push(Notice { reason, service: service_name(frontend), tenant, message });
        };
        if let Some(what) = unsupported(&frontend.settings) {
            refuse("Unsupported", format!("frontend {}: {what} is not supported yet: it is not served", frontend.name));
            return;
        }
        if frontend.mode == Some(Mode::Endpoints) {
            refuse(
                "EndpointsModeUnsupported",
                format!("frontend {}: mode endpoints is not supported yet", frontend.name),
            );
            return;
        }
        let named = service_name(frontend);
        // The names in the inventory and in the assignments live as long as the wishes.
        let known = named.as_ref().and_then(|named| inventory.services.get_key_value(named));
        let assigned = named.as_ref().and_then(|named| assignments.services.get_key_value(named));
        let assigned = assigned.filter(|(_, assignment)| {
            assignment.tenant == tenant.name && assignment.frontend.as_ref() == Some(&frontend.name)
        });
        // The file's VIP, and what the Service has of the other family.
        let mut vips: Vec<IpAddr> = frontend.vip.into_iter().collect();
        for &address in assigned.into_iter().flat_map(|(_, assignment)| &assignment.addresses) {
            if !vips.iter().any(|vip| vip.is_ipv6() == address.is_ipv6()) {
                vips.push(address);
            }
        }
        let service = known.map(|(_, service)| service);
        if service.is_some_and(|service| unserved(service).is_some()) {
            return;
        }
        let service_name = match (&named, known, assigned) {
            (None, ..) => None,
            (Some(_), Some((name, _)), _) | (Some(_), None, Some((name, _))) => Some(name),
            // Neither there nor expected by the address management: nothing to lead to.
            (Some(_), None, None) => return,
        };
        let by_tcp = |port: &&FrontendPort| port.protocol == Protocol::Tcp;
        let tcp_port = match service {
            Some(service) => tcp_port(service),
            None => frontend.ports.iter().find(by_tcp).map(|port| port.target.unwrap_or(port.port)),
        };
        let wish = |vip: IpAddr, port: u16, protocol, target, node_port| Wish {
            tenant,
            tenant_id: 0,
            address: FrontendAddress { segment: 0, vip, port, protocol },
            name: frontend.name.clone(),
            service_name,
            service,
            settings: &frontend.settings,
            target,
            node_port,
            fixed: (!frontend.backends.is_empty()).then_some(frontend),
            tcp_port,
        };
        if frontend.ports.is_empty() {
            for port in service.into_iter().flat_map(|service| &service.ports) {
                if let Some(protocol) = self.protocol(tenant, service_name, &port.protocol, port.port) {
                    for &vip in &vips {
                        self.add(wish(vip, port.port, protocol, port.node_port, true));
                    }
                }
            }
            return;
        }
        let mut ports: Vec<_> = frontend.ports.iter().collect();
        ports.sort();
        for port in ports {
            let of_service = service.map(|service| {
                service.ports.iter().find(|it| it.port == port.port && it.protocol() == Some(port.protocol))
            });
            let (target, node_port) = match (port.target, of_service) {
                (Some(target), _) => (target, false),
                (None, Some(Some(found))) => (found.node_port, true),
                (None, Some(None)) => {
                    self.plan.notices.push(Notice {
                        reason: "PortMissing",
                        service: service_name.cloned(),
                        tenant: Some(tenant.name.clone()),
                        message: format!(
                            "frontend {} exposes port {}/{}, which the Service does not have",
                            frontend.name,
                            port.port,
                            port.protocol.as_str()
                        ),
                    });
                    (0, true)
                }
                (None, None) if named.is_some() => (0, true),
                (None, None) => (port.port, false),
            };
            for &vip in &vips {
                self.add(wish(vip, port.port, port.protocol, target, node_port));
            }
        }
    }

    fn add_of_claim(&mut self, tenant: &'a Tenant, name: &'a ObjectName, service: &'a Service, vip: IpAddr) {
        if unserved(service).is_some() {
            return;
        }
        if let Some(what) = unsupported(&tenant.settings) {
            self.plan.notices.push(Notice {
                reason: "Unsupported",
                service: Some(name.clone()),
                tenant: Some(tenant.name.clone()),
                message: format!("{what} is not supported yet: the Service is not served"),
            });
            return;
        }
        for port in &service.ports {
            let Some(protocol) = self.protocol(tenant, Some(name), &port.protocol, port.port) else { continue };
            self.add(Wish {
                tenant,
                tenant_id: 0,
                address: FrontendAddress { segment: 0, vip, port: port.port, protocol },
                name: name.to_string(),
                service_name: Some(name),
                service: Some(service),
                settings: &tenant.settings,
                target: port.node_port,
                node_port: true,
                fixed: None,
                tcp_port: tcp_port(service),
            });
        }
    }

    /// The protocol, or a notice.
    fn protocol(&mut self, tenant: &Tenant, name: Option<&ObjectName>, protocol: &str, port: u16) -> Option<Protocol> {
        let message = match protocol {
            "TCP" | "" => return Some(Protocol::Tcp),
            "UDP" => return Some(Protocol::Udp),
            "SCTP" => format!("port {port}: SCTP is not supported"),
            _ => format!("port {port}: its protocol is not supported"),
        };
        let tenant = Some(tenant.name.clone());
        self.plan.notices.push(Notice { reason: "ProtocolUnsupported", service: name.cloned(), tenant, message });
        None
    }

    fn add(&mut self, mut wish: Wish<'a>) {
        let (Some(segment), Some(&tenant_id)) =
            (self.site.segment(&wish.tenant.segment), self.site.tenants.get(wish.tenant.name.as_str()))
        else {
            return;
        };
        wish.tenant_id = tenant_id;
        wish.address.segment = segment;
        let owner = self.plan.addresses.get(&(segment, wish.address.vip));
        if !owner.is_some_and(|address| address.vip && address.tenant == tenant_id) {
            // The VIP has been refused, with a notice.
            return;
        }
        if wish.address.port == 0 {
            self.plan.notices.push(wish.notice("PortInvalid", "a port of this Service is out of range".to_owned()));
            return;
        }
        match self.owners.entry(wish.address) {
            MapEntry::Vacant(entry) => {
                entry.insert(self.wishes.len());
                self.wishes.push(wish);
            }
            MapEntry::Occupied(entry) => {
                let first = &self.wishes[*entry.get()];
                let message = format!("{} is served for {} already", wish.shown(), first.name);
                self.plan.notices.push(wish.notice("PortClash", message));
            }
        }
    }
}

/// What [`fill`] works with.
pub(super) struct Context<'a, 'b> {
    pub(super) config: &'a Config,
    pub(super) inventory: &'a Inventory,
    pub(super) health: &'b Health,
    pub(super) site: &'b Site<'b>,
    /// What is not in the inventory does not exist.
    pub(super) complete: bool,
    pub(super) ids: &'b mut Ids,
    pub(super) cache: &'b mut Cache,
    pub(super) resets: &'b mut BTreeSet<Reset>,
}

/// A backend before anybody has judged it.
#[derive(Clone)]
struct Candidate {
    id: BackendId,
    address: IpAddr,
    port: u16,
    node: Option<Arc<str>>,
    weight: u16,
    probed: bool,
}

/// Judgement on a set of backends.
#[derive(Clone)]
struct Judged {
    backends: Arc<[FrontendBackend]>,
    table: Option<usize>,
    /// All are down.
    failed: bool,
    down: Arc<BTreeSet<BackendId>>,
    /// Backends whose state is not known.
    unknown: Arc<BTreeSet<BackendId>>,
}

/// Fills in frontends, backends, tables and probes.
pub(super) fn fill<'a>(context: &mut Context<'a, '_>, wishes: &[Wish<'a>], plan: &mut Plan) {
    let hub = context.site.segment(&context.config.hub.segment).unwrap_or_default();
    let sources = Sources::new(context, hub, wishes, plan);
    let of_nodes = |v6: bool| wishes.iter().any(|wish| wish.fixed.is_none() && wish.is_v6() == v6);
    let nodes = nodes(context, hub, [of_nodes(false), of_nodes(true)], plan);
    let mut filler = Filler {
        hub,
        sources,
        nodes,
        tables: Tables::default(),
        probes: Interner::default(),
        groups: HashMap::new(),
        lists: HashMap::new(),
        crowd: None,
        frontends: Vec::with_capacity(wishes.len()),
        last_probe: None,
        last_judged: None,
    };
    let ids: Vec<_> = wishes.iter().map(|wish| frontend_id(context, wish, plan)).collect();
    let probes: Vec<_> = wishes.iter().map(|wish| filler.probe(context, wish, plan)).collect();
    filler.crowd = crowd(&filler.nodes, wishes, &ids, &probes);
    if filler.crowd.is_some() {
        plan.notices.push(Notice {
            reason: "ProbeBudget",
            service: None,
            tenant: None,
            message: format!(
                "probing every frontend on every node would take more than {PROBES_PER_SECOND} probes a second: \
                 up to {REPRESENTATIVES} frontends stand for each node"
            ),
        });
    }
    for ((wish, id), probe) in wishes.iter().zip(&ids).zip(probes) {
        if let &Some((id, new)) = id {
            filler.frontend(context, wish, id, new, probe, plan);
        }
    }
    let (tables, tight) = filler.tables.finish(context.cache);
    plan.tables = tables;
    if tight {
        plan.notices.push(Notice {
            reason: "TableSpace",
            service: None,
            tenant: None,
            message: "there are more different sets of backends than fit into the map of lookup tables at full size: \
                      smaller tables are used, and more new connections change their backend when one goes"
                .to_owned(),
        });
    }
    for target in plan.tables.iter().flat_map(|table| table.iter()).collect::<BTreeSet<_>>() {
        if let Some(backend) = plan.backends.get_mut(target) {
            backend.eligible = true;
        }
    }
    plan.frontends = filler.frontends.into_iter().collect();
    targets(context, hub, wishes, &ids, plan);
}

/// Addresses that backends see connections come from.
struct Sources {
    /// Towards the hub, of IPv4 and of IPv6.
    hub: [Vec<IpAddr>; 2],
}

impl Sources {
    /// The hub's own, as far as somebody needs them.
    fn new(context: &Context<'_, '_>, hub: SegmentId, wishes: &[Wish<'_>], plan: &mut Plan) -> Self {
        let settings = &context.config.hub;
        let of_family = |v6: bool| {
            if !wishes.iter().any(|wish| wish.is_v6() == v6 && wish.via() == Via::Hub && wish.has_source()) {
                return Vec::new();
            }
            let configured: Vec<IpAddr> = settings.snat.iter().copied().filter(|it| it.is_ipv6() == v6).collect();
            if configured.is_empty() {
                context.site.primary(&settings.segment, v6, plan).into_iter().collect()
            } else {
                configured
            }
        };
        let all = [of_family(false), of_family(true)];
        for &address in all.iter().flatten() {
            plan.addresses.entry((hub, address)).or_default().snat = Some(settings.snat_ports);
        }
        Self { hub: all }
    }

    /// The source of a frontend's connections: its own, its tenant's or the hub's; of several, frontends take turns by id.
    fn of(
        &self,
        context: &Context<'_, '_>,
        wish: &Wish<'_>,
        id: FrontendId,
        segment: SegmentId,
        plan: &mut Plan,
    ) -> Option<IpAddr> {
        let turn = |all: &[IpAddr]| all.get(usize::from(id) % all.len().max(1)).copied();
        let v6 = wish.is_v6();
        let own: Vec<IpAddr> = wish.settings.snat.iter().copied().filter(|it| it.is_ipv6() == v6).collect();
        let (address, tenant) = match (turn(&own), wish.via()) {
            (Some(address), _) => (address, wish.tenant_id),
            (None, Via::Hub) => return turn(&self.hub[usize::from(v6)]),
            (None, Via::Tenant) => {
                let configured = wish.tenant.address(v6).map(|address| address.addr());
                let learnt = || context.site.primary(&wish.tenant.segment, v6, plan);
                (configured.or_else(learnt)?, wish.tenant_id)
            }
        };
        let entry = plan.addresses.entry((segment, address)).or_default();
        if entry.vip {
            return None;
        }
        if !entry.host {
            // Shared by tenants, it is nobody's.
            entry.tenant = if entry.snat.is_none() || entry.tenant == tenant { tenant } else { 0 };
        }
        entry.snat = Some(context.config.hub.snat_ports);
        Some(address)
    }
}

/// Nodes that can be backends, in the families that are wanted.
fn nodes(context: &mut Context<'_, '_>, hub: SegmentId, wanted: [bool; 2], plan: &mut Plan) -> [Vec<Candidate>; 2] {
    let settings = &context.config.hub;
    if wanted == [false, false] {
        return Default::default();
    }
    let prefixes: Vec<IpNet> = if settings.node_cidrs.is_empty() {
        let facts = context.site.interface(&settings.segment).map(|(_, facts)| facts);
        facts.into_iter().flat_map(|facts| &facts.addresses).map(IpNet::trunc).collect()
    } else {
        settings.node_cidrs.clone()
    };
    let mut candidates: BTreeMap<IpAddr, Candidate> = BTreeMap::new();
    for (name, node) in &context.inventory.nodes {
        let inside = |address: &&IpAddr| prefixes.iter().any(|prefix| prefix.contains(*address));
        let mut skip = |reason, message| {
            plan.notices.push(Notice { reason, service: None, tenant: None, message });
        };
        if !node.addresses.is_empty() && !node.addresses.iter().any(|address| inside(&address)) {
            skip("NodeOutsideHub", format!("node {name} has no address in the hub's prefixes: it gets no connections"));
            continue;
        }
        for v6 in [false, true].into_iter().filter(|&v6| wanted[usize::from(v6)]) {
            // A node may lack a family: it gets no connections of that one.
            let Some(&address) = node.addresses.iter().filter(|address| address.is_ipv6() == v6).find(inside) else {
                continue;
            };
            let mut skip = |reason, message| {
                plan.notices.push(Notice { reason, service: None, tenant: None, message });
            };
            let key = BackendKey { segment: hub, address, port: 0 };
            let local = plan
                .addresses
                .get(&(hub, address))
                .is_some_and(|known| known.vip || known.host || known.snat.is_some());
            if local {
                skip(
                    "NodeAddressIsOurs",
                    format!("node {name} has the address {address}, which is this host's: it gets no connections"),
                );
                continue;
            }
            if candidates.contains_key(&address) {
                skip("NodeAddressTwice", format!("node {name} has the address {address} of another node"));
                continue;
            }
            let memory = || BackendMemory { node: Some(name.clone()), uid: node.uid.clone() };
            let Some(id) = context.ids.backends.id(key, BACKENDS, memory) else {
                skip("TooManyBackends", format!("no id left for node {name}: it gets no connections"));
                continue;
            };
            // A backend of the file can be a node too.
            if let Some(entry) = context.ids.backends.used.get_mut(&key)
                && entry.memory.node.is_none()
            {
                context.ids.changes += 1;
                entry.memory = memory();
            }
            let shared: Arc<str> = Arc::from(name.as_str());
            plan.backends.insert(
                id,
                BackendPlan { address, port: 0, segment: hub, node: Some(Arc::clone(&shared)), eligible: false },
            );
            let weight = u16::from(!node.excluded);
            let probed = !node.excluded;
            candidates.insert(address, Candidate { id, address, port: 0, node: Some(shared), weight, probed });
        }
    }
    let (four, six) = candidates.into_values().partition(|candidate| candidate.address.is_ipv4());
    [four, six]
}

/// Each distinct probe once.
#[derive(Default)]
struct Interner {
    probes: BTreeMap<Probe, Arc<Probe>>,
    interfaces: BTreeMap<String, Arc<str>>,
    wholes: BTreeMap<FrontendProbe, Arc<FrontendProbe>>,
}

impl Interner {
    fn get(&mut self, interface: &str, probe: &Probe, ports: Vec<u16>) -> Arc<FrontendProbe> {
        let interface = match self.interfaces.get(interface) {
            Some(known) => Arc::clone(known),
            None => Arc::clone(self.interfaces.entry(interface.to_owned()).or_insert_with(|| Arc::from(interface))),
        };
        let probe = match self.probes.get(probe) {
            Some(known) => Arc::clone(known),
            // The port has been resolved: equal targets are equal however their port was found.
            None => Arc::clone(
                self.probes.entry(probe.clone()).or_insert_with(|| Arc::new(Probe { port: None, ..probe.clone() })),
            ),
        };
        let whole = FrontendProbe { interface, probe, ports };
        Arc::clone(self.wholes.entry(whole).or_insert_with_key(|whole| Arc::new(whole.clone())))
    }
}

/// Ports that stand for a node, by how they are probed and by family.
type Crowd = HashMap<(*const Probe, bool), Vec<u16>>;

/// Whether there are too many probes, and if so, who stands for the nodes.
fn crowd(
    nodes: &[Vec<Candidate>; 2],
    wishes: &[Wish<'_>],
    ids: &[Option<(FrontendId, bool)>],
    probes: &[Option<Arc<FrontendProbe>>],
) -> Option<Crowd> {
    let count_of = |nodes: &Vec<Candidate>| nodes.iter().filter(|node| node.probed).count();
    let probed = [count_of(&nodes[0]), count_of(&nodes[1])];
    // Equal probes are one probe: see `Interner`. The order of pointers never shows.
    let mut all: HashMap<(*const Probe, u16, bool), FrontendId> = HashMap::new();
    let mut fixed = HashSet::new();
    let (mut rate, mut count) = (0.0, 0);
    for ((wish, id), probe) in wishes.iter().zip(ids).zip(probes) {
        let (Some((id, _)), Some(probe)) = (id, probe) else { continue };
        let port = probe.ports.first().copied().unwrap_or(wish.target);
        let v6 = wish.is_v6();
        let probed = probed[usize::from(v6)];
        let targets = match wish.fixed {
            Some(frontend) => frontend.backends.len(),
            None if replaceable(wish) => {
                let mut first = false;
                let oldest = all.entry((Arc::as_ptr(&probe.probe), port, v6)).or_insert_with(|| {
                    first = true;
                    *id
                });
                *oldest = (*oldest).min(*id);
                if first { probed } else { 0 }
            }
            None if fixed.insert((Arc::as_ptr(&probe.probe), port, v6)) => probed,
            None => 0,
        };
        count += targets;
        rate += targets as f64 / probe.probe.interval.as_secs_f64().max(0.001);
    }
    if rate <= PROBES_PER_SECOND && count <= MAX_TARGETS {
        return None;
    }
    let mut oldest: HashMap<(*const Probe, bool), Vec<(FrontendId, u16)>> = HashMap::new();
    // A NodePort of a Service of one family says nothing of the nodes in the other.
    for ((probe, port, v6), id) in all {
        oldest.entry((probe, v6)).or_default().push((id, port));
    }
    let mut crowd = Crowd::new();
    for (probe, mut ports) in oldest {
        ports.sort_unstable();
        ports.truncate(REPRESENTATIVES);
        let mut ports: Vec<u16> = ports.into_iter().map(|(_, port)| port).collect();
        ports.sort_unstable();
        crowd.insert(probe, ports);
    }
    Some(crowd)
}

/// Whether another frontend can stand for this one on a node: it is probed on a port of its own, and the port answers on every node.
fn replaceable(wish: &Wish<'_>) -> bool {
    wish.fixed.is_none()
        && !matches!(wish.settings.health.port, Some(ProbePort::Number(_)))
        && !wish.service.is_some_and(|service| service.policy_local)
}

struct Filler<'a> {
    hub: SegmentId,
    sources: Sources,
    /// Of IPv4 and of IPv6.
    nodes: [Vec<Candidate>; 2],
    tables: Tables,
    probes: Interner,
    /// Judgements on the nodes that frontends share, by probe and how they are judged.
    groups: HashMap<(Option<Arc<FrontendProbe>>, How), Judged>,
    /// Lists of backends by content.
    lists: HashMap<Vec<FrontendBackend>, Arc<[FrontendBackend]>>,
    crowd: Option<Crowd>,
    frontends: Vec<(FrontendAddress, FrontendPlan)>,
    /// The last probe made, for the settings and the interface that it was made for: those of a tenant's Services are the same.
    last_probe: Option<(&'a FrontendSettings, String, Arc<FrontendProbe>)>,
    /// The last judgement on nodes that frontends share: probe of the frontend, how, probe that stands for it, judgement.
    last_judged: Option<(Arc<FrontendProbe>, How, Arc<FrontendProbe>, Judged)>,
}

/// How backends are judged, besides their probes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct How {
    /// They can be reached: there is a port to go to and an address to come from.
    usable: bool,
    /// `all_down: try`.
    try_all: bool,
    /// Family.
    v6: bool,
}

impl<'a> Filler<'a> {
    /// How the backends of a frontend are probed, each frontend for itself.
    fn probe(&mut self, context: &Context<'a, '_>, wish: &Wish<'a>, plan: &mut Plan) -> Option<Arc<FrontendProbe>> {
        let probe = &wish.settings.health;
        let segment = match wish.via() {
            Via::Hub => &context.config.hub.segment,
            Via::Tenant => &wish.tenant.segment,
        };
        let interface = match context.site.interface(segment) {
            Some((name, _)) => name,
            // Of a segment without a tag the interface may come yet; a VLAN's may not exist at all.
            None if segment.vlan.is_none() => segment.interface.as_str(),
            None => {
                let message = format!(
                    "the host has no VLAN interface for {segment}: backends there cannot be probed, and count as up"
                );
                plan.notices.push(Notice { reason: "ProbeImpossible", service: None, tenant: None, message });
                return None;
            }
        };
        if probe.port.is_none() {
            if wish.target == 0 {
                return None;
            }
            // Whether anybody takes datagrams cannot be asked: a TCP port of the same Service or frontend stands for it.
            if wish.address.protocol == Protocol::Udp {
                let port = wish.tcp_port.filter(|&port| port != 0)?;
                return Some(self.probes.get(interface, probe, vec![port]));
            }
            if let Some((settings, at, known)) = &self.last_probe
                && std::ptr::eq(*settings, wish.settings)
                && *at == interface
            {
                return Some(Arc::clone(known));
            }
            let made = self.probes.get(interface, probe, Vec::new());
            self.last_probe = Some((wish.settings, interface.to_owned(), Arc::clone(&made)));
            return Some(made);
        }
        let ports = match &probe.port {
            None => Vec::new(),
            Some(ProbePort::Number(port)) => vec![*port],
            Some(ProbePort::Name(name)) => {
                let found = wish.service.and_then(|service| service.ports.iter().find(|port| port.name == *name));
                match found.map(|port| port.node_port) {
                    Some(port) if port != 0 => vec![port],
                    Some(_) | None => {
                        if wish.service.is_some() {
                            let message = format!("the Service has no port {name:?} with a NodePort to probe");
                            plan.notices.push(wish.notice("ProbePortMissing", message));
                        }
                        Vec::new()
                    }
                }
            }
        };
        if ports.is_empty() && wish.address.protocol == Protocol::Udp {
            return None;
        }
        (wish.target != 0 || !ports.is_empty()).then(|| self.probes.get(interface, probe, ports))
    }

    fn frontend(
        &mut self,
        context: &mut Context<'_, '_>,
        wish: &Wish<'_>,
        id: FrontendId,
        new: bool,
        probe: Option<Arc<FrontendProbe>>,
        plan: &mut Plan,
    ) {
        if wish.target == 0 && wish.service.is_some_and(|service| !service.terminating) {
            let message = format!(
                "port {} of this Service has no NodePort; set allocateLoadBalancerNodePorts to true, or type NodePort",
                wish.address.port
            );
            plan.notices.push(wish.notice("NodePortMissing", message));
        }
        let segment = match wish.via() {
            Via::Hub => self.hub,
            Via::Tenant => wish.address.segment,
        };
        let snat = if wish.has_source() { self.sources.of(context, wish, id, segment, plan) } else { None };
        if wish.has_source() && snat.is_none() {
            plan.notices.push(wish.notice("NoSnatAddress", no_source(context, wish)));
        }
        let how = How {
            usable: wish.target != 0 && (snat.is_some() || !wish.has_source()),
            try_all: wish.settings.all_down == AllDown::Try,
            v6: wish.is_v6(),
        };
        let probe = probe.filter(|_| how.usable);
        let (probe, judged) = if let Some(frontend) = wish.fixed {
            let candidates = fixed_candidates(context, wish, frontend, segment, plan);
            let judged = self.judge(context.health, &candidates, probe.as_ref(), wish.target, how, plan);
            (probe, judged)
        } else {
            self.judge_nodes(context.health, wish, probe, how, plan)
        };
        alarms(wish, &judged, how, plan);
        down_resets(context, wish, id, new, &judged);
        let affinity = wish.settings.affinity.unwrap_or_else(|| {
            if wish.service.is_some_and(|service| service.client_ip_affinity) {
                Affinity::Source
            } else {
                Affinity::Flow
            }
        });
        self.frontends.push((
            wish.address,
            FrontendPlan {
                id,
                tenant: wish.tenant_id,
                name: wish.name.clone(),
                timeouts: timeouts(context, wish, plan),
                service: wish.service_name.cloned(),
                service_uid: wish.service.map(|service| service.uid.clone()).unwrap_or_default(),
                source_affinity: affinity == Affinity::Source,
                preserve_client: wish.settings.preserve_client,
                adopt: wish.settings.adopt == Adopt::Takeover,
                unserved_drop: wish.settings.unserved == Unserved::Drop,
                target_port: wish.target,
                snat,
                snat_ports: context.config.hub.snat_ports,
                table: judged.table,
                backends: judged.backends,
                probe,
                reset_on_down: wish.settings.on_down == OnDown::Reset,
            },
        ));
    }

    /// Decides about the nodes. Returns the probe that does.
    fn judge_nodes(
        &mut self,
        health: &Health,
        wish: &Wish<'_>,
        own: Option<Arc<FrontendProbe>>,
        how: How,
        plan: &mut Plan,
    ) -> (Option<Arc<FrontendProbe>>, Judged) {
        let replaceable = replaceable(wish);
        if let (Some(own), Some((before, tried, probe, judged))) = (&own, &self.last_judged)
            && replaceable
            && *tried == how
            && Arc::ptr_eq(own, before)
        {
            return (Some(Arc::clone(probe)), judged.clone());
        }
        let probe = match (&self.crowd, &own) {
            (Some(crowd), Some(own)) if replaceable => {
                let ports = crowd.get(&(Arc::as_ptr(&own.probe), how.v6)).cloned().unwrap_or_default();
                Some(self.probes.get(&own.interface, &own.probe, ports))
            }
            _ => own.clone(),
        };
        // Where the probe does not depend on the frontend, neither does the judgement.
        let shared = probe.as_ref().is_none_or(|probe| !probe.ports.is_empty());
        let key = (probe.clone(), how);
        let judged = if let Some(known) = self.groups.get(&key).filter(|_| shared) {
            known.clone()
        } else {
            let family = usize::from(how.v6);
            let candidates = std::mem::take(&mut self.nodes[family]);
            let judged = self.judge(health, &candidates, probe.as_ref(), wish.target, how, plan);
            self.nodes[family] = candidates;
            if shared {
                self.groups.insert(key, judged.clone());
            }
            judged
        };
        if let (Some(own), Some(probe)) = (own, &probe)
            && shared
            && replaceable
        {
            self.last_judged = Some((own, how, Arc::clone(probe), judged.clone()));
        }
        (probe, judged)
    }

    /// Decides which backends may take connections. Without a probe, all of them: their state is not known.
    fn judge(
        &mut self,
        health: &Health,
        candidates: &[Candidate],
        probe: Option<&Arc<FrontendProbe>>,
        target: u16,
        how: How,
        plan: &mut Plan,
    ) -> Judged {
        let mut states = Vec::with_capacity(candidates.len());
        for candidate in candidates {
            let Some(probe) = probe.filter(|_| candidate.probed) else {
                states.push(None);
                continue;
            };
            let own = if candidate.port == 0 { target } else { candidate.port };
            let own = [own];
            let ports = if probe.ports.is_empty() { own.as_slice() } else { probe.ports.as_slice() };
            let targets: Vec<_> = ports
                .iter()
                .map(|&port| ProbeTarget {
                    address: candidate.address,
                    port,
                    interface: Arc::clone(&probe.interface),
                    probe: Arc::clone(&probe.probe),
                })
                .collect();
            states.push(any_up(targets.iter().map(|target| health.get(target).and_then(|known| known.up))));
            plan.probes.extend(targets);
        }
        let can = |index: usize| how.usable && candidates[index].weight > 0;
        let which = |state: Option<bool>| (0..candidates.len()).any(|index| can(index) && states[index] == state);
        let (any_up, any_unknown) = (which(Some(true)), which(None));
        let failed = !any_up && !any_unknown && which(Some(false));
        let serves = |index: usize| {
            can(index)
                && match states[index] {
                    Some(true) => true,
                    None => !any_up,
                    Some(false) => failed && how.try_all,
                }
        };
        let mut content = Content::new();
        let mut list = Vec::with_capacity(candidates.len());
        for (index, candidate) in candidates.iter().enumerate() {
            let serving = serves(index);
            if serving {
                let address = match candidate.address {
                    IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
                    IpAddr::V6(address) => address.octets(),
                };
                content.push((identity(address, candidate.port), candidate.weight, candidate.id));
            }
            list.push(FrontendBackend {
                id: candidate.id,
                address: candidate.address,
                port: candidate.port,
                node: candidate.node.clone(),
                weight: candidate.weight,
                serving,
                probed: candidate.probed,
            });
        }
        let ids = |state: Option<bool>| {
            let with = candidates.iter().zip(&states).filter(|(candidate, it)| candidate.probed && **it == state);
            Arc::new(with.map(|(candidate, _)| candidate.id).collect())
        };
        let backends = if let Some(known) = self.lists.get(&list) {
            Arc::clone(known)
        } else {
            let shared: Arc<[FrontendBackend]> = list.clone().into();
            self.lists.insert(list, Arc::clone(&shared));
            shared
        };
        Judged { backends, table: self.tables.add(content), failed, down: ids(Some(false)), unknown: ids(None) }
    }
}

/// The id of a frontend, and whether it is new.
fn frontend_id(context: &mut Context<'_, '_>, wish: &Wish<'_>, plan: &mut Plan) -> Option<(FrontendId, bool)> {
    let key = FrontendKey::from(&wish.address);
    let uid = wish.service.map_or("", |service| service.uid.as_str());
    let frontends = &mut context.ids.frontends;
    if let Some(entry) = frontends.used.get_mut(&key) {
        let missing = wish.service.is_none() && wish.service_name.is_some() && !context.complete;
        if missing || entry.memory.is_same(&wish.tenant.name, wish.service_name, uid) {
            if wish.settings.on_down == OnDown::Keep && !entry.memory.down.is_empty() {
                context.ids.changes += 1;
                entry.memory.down.clear();
            }
            if !missing && entry.memory.uid != uid {
                context.ids.changes += 1;
                uid.clone_into(&mut entry.memory.uid);
            }
            if entry.memory.recovered {
                context.ids.changes += 1;
                entry.memory.recovered = false;
                entry.memory.service = wish.service_name.cloned();
            }
            return Some((entry.id, false));
        }
    }
    let memory = FrontendMemory {
        tenant: wish.tenant.name.clone(),
        service: wish.service_name.cloned(),
        uid: uid.to_owned(),
        ..FrontendMemory::default()
    };
    let Some(id) = frontends.fresh(FRONTENDS) else {
        // Its old flows are reset, because it is no longer in the plan.
        plan.notices
            .push(wish.notice("TooManyFrontends", format!("no id left for {}: it is not served", wish.shown())));
        return None;
    };
    // A new id, so that a flow that the old owner gets at the last moment can be told from the new owner's.
    if let Some(old) = frontends.used.insert(key, Entry { id, memory }) {
        frontends.retire(old.id);
        context.resets.insert(Reset::Frontend(old.id));
    }
    Some((id, true))
}

fn alarms(wish: &Wish<'_>, judged: &Judged, how: How, plan: &mut Plan) {
    if !how.usable {
        return;
    }
    if judged.failed {
        let what =
            if how.try_all { "new connections are spread over all of them" } else { "new connections are refused" };
        let message = format!("all backends of {} fail their probes; {what}", wish.shown());
        plan.notices.push(wish.notice("AllBackendsDown", message));
    } else if judged.table.is_none() {
        let message = if wish.fixed.is_none() {
            format!("no node can take connections for {}", wish.shown())
        } else {
            format!("no backend of {} has a weight", wish.shown())
        };
        plan.notices.push(wish.notice("NoBackend", message));
    }
}

/// Why a frontend has no source address.
fn no_source(context: &Context<'_, '_>, wish: &Wish<'_>) -> String {
    let segment = match wish.via() {
        Via::Hub => &context.config.hub.segment,
        Via::Tenant => &wish.tenant.segment,
    };
    let family = if wish.is_v6() { "global IPv6" } else { "IPv4" };
    format!(
        "{} is not served: the interface {segment} has no {family} address that could be the source towards the backends",
        wish.shown()
    )
}

/// The index of a frontend's timeouts.
fn timeouts(context: &mut Context<'_, '_>, wish: &Wish<'_>, plan: &mut Plan) -> TimeoutsId {
    let wanted = wish.settings.timeouts;
    if wanted == context.config.timeouts {
        return 0;
    }
    let Some(id) = context.ids.timeouts.id(wanted, TIMEOUTS, || ()) else {
        let message = format!("{}: too many different `timeouts`: it has the defaults", wish.shown());
        plan.notices.push(wish.notice("TooManyTimeouts", message));
        return 0;
    };
    plan.timeouts.insert(id, wanted);
    id
}

/// Backends that the file names.
fn fixed_candidates(
    context: &mut Context<'_, '_>,
    wish: &Wish<'_>,
    frontend: &Frontend,
    segment: SegmentId,
    plan: &mut Plan,
) -> Vec<Candidate> {
    let mut candidates: BTreeMap<(IpAddr, u16), Candidate> = BTreeMap::new();
    let mut backends: Vec<_> = frontend.backends.iter().collect();
    backends.sort_by_key(|backend| (backend.address, backend.port));
    for backend in backends {
        let mut skip = |reason, message| plan.notices.push(wish.notice(reason, message));
        if backend.address.is_ipv6() != wish.is_v6() {
            let message = format!("backend {} is not of the family of {}", backend.address, wish.address.vip);
            skip("BackendOfOtherFamily", message);
            continue;
        }
        if plan
            .addresses
            .get(&(segment, backend.address))
            .is_some_and(|known| known.vip || known.host || known.snat.is_some())
        {
            skip(
                "BackendAddressIsOurs",
                format!("backend {} is a VIP or this host: it gets no connections", backend.address),
            );
            continue;
        }
        // The frontend's own target needs no port of its own, so that frontends on other ports share the backend and its table.
        let port = backend.port.filter(|&port| port != wish.target).unwrap_or_default();
        let key = BackendKey { segment, address: backend.address, port };
        let Some(id) = context.ids.backends.id(key, BACKENDS, BackendMemory::default) else {
            skip("TooManyBackends", format!("no id left for backend {}", backend.address));
            continue;
        };
        plan.backends.entry(id).or_insert_with(|| BackendPlan {
            address: backend.address,
            port,
            segment,
            node: None,
            eligible: false,
        });
        candidates.entry((backend.address, port)).or_insert(Candidate {
            id,
            address: backend.address,
            port,
            node: None,
            weight: backend.weight,
            probed: true,
        });
    }
    candidates.into_values().collect()
}

/// With `on_down: reset`: flows to backends that have gone down.
fn down_resets(context: &mut Context<'_, '_>, wish: &Wish<'_>, id: FrontendId, new: bool, judged: &Judged) {
    if wish.settings.on_down == OnDown::Keep {
        return;
    }
    let Some(entry) = context.ids.frontends.used.get_mut(&FrontendKey::from(&wish.address)) else { return };
    let before = &mut entry.memory.down;
    let remembered = before.clone();
    if !new {
        context.resets.extend(judged.down.difference(before).map(|&backend| Reset::Backend { frontend: id, backend }));
    }
    // What is not known, as after a restart, is still as it was.
    before.retain(|backend| judged.unknown.contains(backend));
    before.extend(judged.down.iter());
    context.ids.changes += u64::from(*before != remembered);
}

/// NodePorts that were a frontend's and belong now to a Service that no frontend leads to. `current`: ports of frontends.
fn of_others(context: &mut Context<'_, '_>, hub: SegmentId, current: &HashSet<(u8, u16)>) -> Vec<TargetKey> {
    let former: HashSet<(u8, u16)> = context
        .ids
        .targets
        .keys()
        .filter(|key| key.segment == hub && !current.contains(&(key.protocol, key.port)))
        .map(|key| (key.protocol, key.port))
        .collect();
    if former.is_empty() {
        return Vec::new();
    }
    let mut owners: BTreeMap<TargetKey, Vec<String>> = BTreeMap::new();
    for (name, service) in &context.inventory.services {
        for port in &service.ports {
            let Some(protocol) = port.protocol().map(Protocol::number) else { continue };
            if !former.contains(&(protocol, port.node_port)) {
                continue;
            }
            let owner = if service.uid.is_empty() { name.to_string() } else { service.uid.clone() };
            let key = TargetKey { segment: hub, protocol, port: port.node_port };
            owners.entry(key).or_default().push(owner);
        }
    }
    let mut found = Vec::new();
    for (key, owners) in owners {
        if let Some(owner) = new_owner(context.ids.targets.get(&key), owners) {
            context.ids.targets.insert(key, owner);
            context.ids.changes += 1;
            found.push(key);
        }
    }
    found
}

/// Who owns a port now, if the one who did does not any more. A list that gives a port to two Services does not make them take turns.
fn new_owner(before: Option<&String>, owners: Vec<String>) -> Option<String> {
    let kept = before.is_some_and(|before| owners.contains(before));
    owners.into_iter().next().filter(|_| before.is_some() && !kept)
}

/// NodePorts that belong to another Service now.
fn targets(
    context: &mut Context<'_, '_>,
    hub: SegmentId,
    wishes: &[Wish<'_>],
    ids: &[Option<(FrontendId, bool)>],
    plan: &Plan,
) {
    let mut taken_over = Vec::new();
    let mut current = HashSet::new();
    let mut disputed: BTreeMap<TargetKey, Vec<String>> = BTreeMap::new();
    for (wish, id) in wishes.iter().zip(ids) {
        let (Some(service), Some(name)) = (wish.service, wish.service_name) else { continue };
        if !wish.node_port || wish.target == 0 || id.is_none() {
            continue;
        }
        let key = TargetKey { segment: hub, protocol: wish.address.protocol.number(), port: wish.target };
        let named;
        let owner = if service.uid.is_empty() {
            named = name.to_string();
            named.as_str()
        } else {
            service.uid.as_str()
        };
        current.insert((key.protocol, key.port));
        match context.ids.targets.get(&key) {
            Some(before) if before == owner => {}
            Some(_) => {
                disputed.entry(key).or_default();
            }
            None => {
                context.ids.changes += 1;
                context.ids.targets.insert(key, owner.to_owned());
            }
        }
    }
    // Not the owner of before: but that one may be among them.
    let among = if disputed.is_empty() { &[] } else { wishes };
    for wish in among.iter().filter(|wish| wish.node_port) {
        let key = TargetKey { segment: hub, protocol: wish.address.protocol.number(), port: wish.target };
        if let (Some(owners), Some(service), Some(name)) = (disputed.get_mut(&key), wish.service, wish.service_name) {
            owners.push(if service.uid.is_empty() { name.to_string() } else { service.uid.clone() });
        }
    }
    for (key, owners) in disputed {
        if let Some(owner) = new_owner(context.ids.targets.get(&key), owners) {
            context.ids.targets.insert(key, owner);
            context.ids.changes += 1;
            taken_over.push(key);
        }
    }
    taken_over.extend(of_others(context, hub, &current));
    if taken_over.is_empty() {
        return;
    }
    let mut by_target: BTreeMap<TargetKey, BTreeSet<FrontendId>> = BTreeMap::new();
    for (wish, id) in wishes.iter().zip(ids) {
        let (Some((id, _)), Some(frontend)) = (id, plan.frontends.get(&wish.address)) else { continue };
        let protocol = wish.address.protocol.number();
        if wish.fixed.is_none() {
            let key = TargetKey { segment: hub, protocol, port: wish.target };
            by_target.entry(key).or_default().insert(*id);
            continue;
        }
        for backend in frontend.backends.iter() {
            if let Some(known) = plan.backends.get(&backend.id) {
                let key = TargetKey { segment: known.segment, protocol, port: frontend.port_of(backend) };
                by_target.entry(key).or_default().insert(*id);
            }
        }
    }
    for key in taken_over {
        context.resets.insert(Reset::Target {
            segment: hub,
            protocol: key.protocol,
            address: None,
            port: key.port,
            keep: by_target.get(&key).cloned().unwrap_or_default(),
        });
    }
}
