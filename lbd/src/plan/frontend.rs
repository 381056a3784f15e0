//! Frontends: which there are, where they lead, and which of their backends may take connections.

use std::collections::hash_map::Entry as MapEntry;
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
    BackendId, BackendPlan, Backends, ClientsPlan, FrontendAddress, FrontendBackend, FrontendId, FrontendPlan,
    FrontendProbe, Health, Notice, Plan, ProbeTarget, Reset, SegmentId, TenantId, TimeoutsId, any_up,
};
use super::ranges::clients;
use super::table::{Cache, Content, Tables};
use crate::config::{
    AddressRange, Adopt, Affinity, AllDown, Config, Frontend, FrontendPort, FrontendSettings, Mode, OnDown, Probe,
    ProbeKind, ProbePort, Protocol, SegmentName, Tenant, Unserved, Via,
};
use crate::ipam::{Assignments, is_guest_made, mode, unserved};
use crate::source::{Endpoint, Inventory, ObjectName, Service, ServicePort};

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
    leads: Leads<'a>,
}

/// Where a frontend leads.
#[derive(Clone)]
enum Leads<'a> {
    /// To all nodes.
    Nodes,
    /// To the backends of a frontend of the file.
    File(&'a Frontend),
    /// To endpoints of its Service, addresses and ports, in the tenant's segment. `own_snat`: what settings say of SNAT is of that segment.
    /// `probe_port`: the port on the endpoints that the probe's name means.
    Endpoints { backends: Arc<[(IpAddr, u16)]>, own_snat: bool, probe_port: Option<u16> },
}

/// Backends of one frontend that are endpoints, at most.
const MAX_ENDPOINTS: usize = 512;

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

    const fn via(&self) -> Via {
        match self.leads {
            Leads::Nodes => Via::Hub,
            Leads::File(frontend) => frontend.via,
            Leads::Endpoints { .. } => Via::Tenant,
        }
    }

    /// It comes from a claim, not from a frontend of the file.
    fn is_claimed(&self) -> bool {
        std::ptr::eq(self.settings, &raw const self.tenant.settings)
    }

    const fn to_nodes(&self) -> bool {
        matches!(self.leads, Leads::Nodes)
    }

    /// It leads to endpoints of its Service.
    pub(super) const fn to_endpoints(&self) -> bool {
        matches!(self.leads, Leads::Endpoints { .. })
    }

    /// The Service, if only some backends have endpoints of it.
    fn local(&self) -> Option<&Service> {
        self.service.filter(|service| service.policy_local && !matches!(self.leads, Leads::File(_)))
    }

    /// The port that tells which backends have endpoints.
    fn local_health_port(&self) -> Option<u16> {
        self.local()?.health_port.filter(|&port| port != 0)
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
    ids: &Ids,
    plan: &mut Plan,
) -> Vec<Wish<'a>> {
    let mut maker = Maker {
        config,
        inventory,
        site,
        ids,
        plan,
        wishes: Vec::new(),
        owners: HashMap::new(),
        sources: config.source_addresses(),
        intervals: BTreeMap::new(),
    };
    let mut tenants: Vec<&Tenant> = config.tenants.iter().collect();
    tenants.sort_by(|left, right| left.name.cmp(&right.name));
    for &tenant in &tenants {
        let mut frontends: Vec<&Frontend> = tenant.frontends.iter().collect();
        frontends.sort_by(|left, right| left.name.cmp(&right.name));
        for frontend in frontends {
            maker.add_of_file(tenant, frontend, assignments);
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
                maker.add_of_claim(tenant, name, service, assignment.mode, address);
            }
            maker.add_clients(name, service);
        }
    }
    maker.wishes
}

struct Maker<'a, 'b> {
    config: &'a Config,
    inventory: &'a Inventory,
    site: &'b Site<'b>,
    ids: &'b Ids,
    plan: &'b mut Plan,
    wishes: Vec<Wish<'a>>,
    owners: HashMap<FrontendAddress, usize>,
    /// SNAT addresses that the file names.
    sources: BTreeSet<(SegmentName, IpAddr)>,
    /// Indices of [`Plan::intervals`] by content.
    intervals: BTreeMap<Arc<[AddressRange]>, usize>,
}

impl<'a> Maker<'a, '_> {
    fn add_of_file(&mut self, tenant: &'a Tenant, frontend: &'a Frontend, assignments: &'a Assignments) {
        let inventory = self.inventory;
        let mut refuse = |reason, message| {
            let tenant = Some(tenant.name.clone());
            self.plan.notices.push(Notice { reason, service: service_name(frontend), tenant, message });
        };
        if let Some(what) = unsupported(&frontend.settings) {
            refuse("Unsupported", format!("frontend {}: {what} is not supported yet: it is not served", frontend.name));
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
        if let Some((name, service)) = known {
            self.add_clients(name, service);
            if unserved(service).is_some() {
                return;
            }
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
            leads: if frontend.backends.is_empty() { Leads::Nodes } else { Leads::File(frontend) },
            tcp_port,
        };
        let assigned_mode = assigned.map(|(_, assignment)| assignment.mode);
        let mode = assigned_mode.unwrap_or_else(|| mode(service, Some(frontend), None));
        let ports = self.ports_of(tenant, frontend, service_name, service);
        if let (Mode::Endpoints, Some(name)) = (mode, service_name) {
            let own_snat = frontend.mode == Some(Mode::Endpoints);
            for &vip in &vips {
                let endpoints = self.endpoints(tenant, name, service, vip.is_ipv6());
                for (port, of_service) in &ports {
                    let (target, leads, tcp_port) = endpoints.of(*of_service, &frontend.settings, own_snat);
                    let wish = wish(vip, port.port, port.protocol, target, false);
                    self.add(Wish { tcp_port, leads, ..wish });
                }
            }
            return;
        }
        for (port, of_service) in ports {
            let (target, node_port) = match (port.target, of_service) {
                (Some(target), _) => (target, false),
                (None, Some(found)) => (found.node_port, true),
                (None, None) if named.is_some() => (0, true),
                (None, None) => (port.port, false),
            };
            for &vip in &vips {
                self.add(wish(vip, port.port, port.protocol, target, node_port));
            }
        }
    }

    /// The ports of a frontend of the file, with those of the Service behind them.
    fn ports_of(
        &mut self,
        tenant: &Tenant,
        frontend: &Frontend,
        name: Option<&ObjectName>,
        service: Option<&'a Service>,
    ) -> Vec<(FrontendPort, Option<&'a ServicePort>)> {
        if frontend.ports.is_empty() {
            let all = service.into_iter().flat_map(|service| &service.ports).filter_map(|port| {
                let protocol = self.protocol(tenant, name, &port.protocol, port.port)?;
                let exposed = FrontendPort { port: port.port, target: None, service_port: None, protocol };
                Some((exposed, Some(port)))
            });
            return all.collect();
        }
        let mut ports: Vec<FrontendPort> = frontend.ports.clone();
        ports.sort();
        let find = |port: FrontendPort| {
            let wanted = port.service_port.unwrap_or(port.port);
            let found = service.and_then(|service| {
                service.ports.iter().find(|it| it.port == wanted && it.protocol() == Some(port.protocol))
            });
            if service.is_some() && found.is_none() && port.target.is_none() {
                self.plan.notices.push(Notice {
                    reason: "PortMissing",
                    service: name.cloned(),
                    tenant: Some(tenant.name.clone()),
                    message: format!(
                        "frontend {} exposes port {}/{}, which the Service does not have",
                        frontend.name,
                        wanted,
                        port.protocol.as_str()
                    ),
                });
            }
            (port, found)
        };
        ports.into_iter().map(find).collect()
    }

    /// The endpoints of a Service that may be backends in the tenant's segment. A tenant has a say in them: none may be this host, a
    /// router, or an address that is given out.
    fn endpoints(
        &mut self,
        tenant: &Tenant,
        name: &ObjectName,
        service: Option<&'a Service>,
        v6: bool,
    ) -> Endpoints<'a> {
        let all = self.inventory.endpoints.get(name).into_iter().flatten();
        let mut usable: Vec<&'a Endpoint> = Vec::new();
        let mut refused: BTreeMap<IpAddr, &'static str> = BTreeMap::new();
        let mut addresses: BTreeSet<IpAddr> = BTreeSet::new();
        for endpoint in all.filter(|endpoint| endpoint.address.is_ipv6() == v6) {
            if let Some(why) = self.refusal(tenant, endpoint.address) {
                refused.insert(endpoint.address, why);
            } else {
                addresses.insert(endpoint.address);
                usable.push(endpoint);
            }
        }
        let mut notice = |reason, message| {
            let tenant = Some(tenant.name.clone());
            self.plan.notices.push(Notice { reason, service: Some(name.clone()), tenant, message });
        };
        if !refused.is_empty() {
            let mut shown: Vec<_> = refused.iter().take(3).map(|(address, why)| format!("{address} ({why})")).collect();
            if refused.len() > shown.len() {
                shown.push(format!("{} more", refused.len() - shown.len()));
            }
            notice(
                "EndpointRefused",
                format!("endpoints that this Service may not lead to get no connections: {}", shown.join(", ")),
            );
        }
        if let Some(&beyond) = addresses.iter().nth(MAX_ENDPOINTS) {
            usable.retain(|endpoint| endpoint.address < beyond);
            notice(
                "TooManyEndpoints",
                format!("this Service has more than {MAX_ENDPOINTS} endpoints: those beyond get no connections"),
            );
        }
        Endpoints { usable, service }
    }

    /// Why an endpoint in a tenant's segment may not be a backend.
    fn refusal(&self, tenant: &Tenant, address: IpAddr) -> Option<&'static str> {
        let segment = self.site.segment(&tenant.segment)?;
        let place = self.plan.segments.get(&segment)?;
        let Some(network) = place.networks.iter().find(|network| network.contains(&address)) else {
            return Some("outside the tenant's segment");
        };
        let whole = network.prefix_len() + 1 < network.max_prefix_len();
        if whole && (address == network.network() || (address.is_ipv4() && address == network.broadcast())) {
            return Some("no host's address");
        }
        if place.gateways.contains(&address) {
            return Some("the gateway");
        }
        let here = || self.config.tenants.iter().filter(|other| other.segment == tenant.segment);
        let ours = self
            .plan
            .addresses
            .get(&(segment, address))
            .is_some_and(|known| known.vip || known.host || known.snat.is_some());
        let own = here().flat_map(|other| &other.addresses).any(|own| own.addr() == address);
        if ours || own || self.sources.contains(&(tenant.segment.clone(), address)) {
            return Some("a VIP or this host");
        }
        if here().any(|other| other.may_hand_out(address)) {
            return Some("in a pool of VIPs");
        }
        let is_node = || self.inventory.nodes.values().any(|node| node.addresses.contains(&address));
        (tenant.segment == self.config.hub.segment && is_node()).then_some("a node of the hub")
    }

    /// Notes who may connect to a Service, if not everybody.
    fn add_clients(&mut self, name: &ObjectName, service: &Service) {
        let families = match clients(service) {
            Ok(clients) if !clients.is_limited(service) => return,
            Ok(clients) => clients.0,
            // Closed.
            Err(_) => [Some(Arc::default()), Some(Arc::default())],
        };
        let families = families.map(|family| {
            let family = family?;
            let next = self.plan.intervals.len();
            Some(*self.intervals.entry(family).or_insert_with_key(|family| {
                self.plan.intervals.push(Arc::clone(family));
                next
            }))
        });
        self.plan.clients.insert(name.clone(), ClientsPlan(families));
    }

    fn add_of_claim(
        &mut self,
        tenant: &'a Tenant,
        name: &'a ObjectName,
        service: &'a Service,
        mode: Mode,
        vip: IpAddr,
    ) {
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
        let endpoints = match mode {
            Mode::Nodes => None,
            Mode::Endpoints => Some(self.endpoints(tenant, name, Some(service), vip.is_ipv6())),
        };
        for port in &service.ports {
            let Some(protocol) = self.protocol(tenant, Some(name), &port.protocol, port.port) else { continue };
            let (target, leads, tcp_port) = match &endpoints {
                None => (port.node_port, Leads::Nodes, tcp_port(service)),
                // What the tenant's settings say of SNAT is of the hub's segment.
                Some(endpoints) => endpoints.of(Some(port), &tenant.settings, false),
            };
            self.add(Wish {
                tenant,
                tenant_id: 0,
                address: FrontendAddress { segment: 0, vip, port: port.port, protocol },
                name: name.joined(),
                service_name: Some(name),
                service: Some(service),
                settings: &tenant.settings,
                target,
                node_port: matches!(leads, Leads::Nodes),
                leads,
                tcp_port,
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
                let first = &mut self.wishes[*entry.get()];
                let memory = self.ids.frontends.used.get(&FrontendKey::from(&wish.address)).map(|it| &it.memory);
                let had = |wish: &Wish<'_>| memory.is_some_and(|memory| memory.is_of(wish.service_name));
                // Of Services that share a VIP, the one that serves a port keeps it, also from an older one that wants it later.
                if first.is_claimed() && wish.is_claimed() && had(&wish) && !had(first) {
                    std::mem::swap(first, &mut wish);
                }
                let message = format!("{} is served for {} already", wish.shown(), first.name);
                self.plan.notices.push(wish.notice("PortClash", message));
            }
        }
    }
}

/// Endpoints of a Service, of one family, that may be backends.
struct Endpoints<'a> {
    /// Sorted by address.
    usable: Vec<&'a Endpoint>,
    service: Option<&'a Service>,
}

impl<'a> Endpoints<'a> {
    /// Where a port of the Service leads: port on the backends (0 = nowhere), backends, and the port to ask by TCP.
    fn of(
        &self,
        port: Option<&ServicePort>,
        settings: &FrontendSettings,
        own_snat: bool,
    ) -> (u16, Leads<'a>, Option<u16>) {
        let backends = port.map(|port| self.backends(port)).unwrap_or_default();
        let ports = || self.service.into_iter().flat_map(|service| &service.ports);
        let target = |port: &ServicePort| Some(most_common(&self.backends(port))).filter(|&port| port != 0);
        let tcp_port = ports().filter(|port| port.protocol() == Some(Protocol::Tcp)).find_map(target);
        let probe_port = match &settings.health.port {
            Some(ProbePort::Name(name)) => ports().find(|port| port.name == *name).and_then(target),
            Some(ProbePort::Number(_)) | None => None,
        };
        (most_common(&backends), Leads::Endpoints { backends, own_snat, probe_port }, tcp_port)
    }

    fn backends(&self, port: &ServicePort) -> Arc<[(IpAddr, u16)]> {
        let all: BTreeSet<(IpAddr, u16)> = self
            .usable
            .iter()
            .flat_map(|endpoint| endpoint.ports.iter().map(|of_slice| (endpoint.address, of_slice)))
            .filter(|(_, (name, protocol, number))| {
                let protocol = if protocol.is_empty() { "TCP" } else { protocol };
                *name == port.name && *number != 0 && port.protocol().map(Protocol::as_str) == Some(protocol)
            })
            .map(|(address, (.., number))| (address, *number))
            .collect();
        all.into_iter().take(MAX_ENDPOINTS).collect()
    }
}

/// The port that most of them have, of several the lowest; 0 if there are none.
fn most_common(backends: &[(IpAddr, u16)]) -> u16 {
    let mut counts: BTreeMap<u16, usize> = BTreeMap::new();
    for (_, port) in backends {
        *counts.entry(*port).or_default() += 1;
    }
    counts.into_iter().min_by_key(|&(port, count)| (std::cmp::Reverse(count), port)).map_or(0, |(port, _)| port)
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
    /// See [`FrontendBackend::sure`].
    sure: bool,
}

/// What of a frontend may change though nobody wishes for anything else.
struct Varying {
    timeouts: TimeoutsId,
    snat: Option<IpAddr>,
    table: Option<usize>,
    backends: Backends,
    probe: Option<Arc<FrontendProbe>>,
}

/// Judgement on a set of backends.
#[derive(Clone)]
struct Judged {
    backends: Backends,
    table: Option<usize>,
    /// All are down.
    failed: bool,
    down: Arc<BTreeSet<BackendId>>,
    /// Backends whose state is not known.
    unknown: Arc<BTreeSet<BackendId>>,
}

/// What follows from wishes alone, whatever nodes and backends do.
#[derive(Debug)]
pub(super) struct Settled {
    /// Of each wish: its frontend's id, and how its backends are probed if each frontend is probed for itself.
    frontends: Vec<(FrontendId, Option<Arc<FrontendProbe>>)>,
    /// Notices about these probes.
    notices: Vec<Notice>,
}

/// Fills in frontends, backends, tables and probes. `settled` comes from the same wishes on the same host, if from anywhere. Returns what
/// is settled now, unless there is no room for some wish: that may change.
pub(super) fn fill<'a>(
    context: &mut Context<'a, '_>,
    wishes: &[Wish<'a>],
    settled: Option<Settled>,
    plan: &mut Plan,
) -> Option<Settled> {
    let hub = context.site.segment(&context.config.hub.segment).unwrap_or_default();
    let sources = Sources::new(context, hub, wishes, plan);
    let of_nodes = |v6: bool| wishes.iter().any(|wish| wish.to_nodes() && wish.is_v6() == v6);
    let nodes = nodes(context, hub, [of_nodes(false), of_nodes(true)], plan);
    let mut filler = Filler {
        hub,
        sources,
        nodes,
        tables: Tables::default(),
        shared: std::mem::take(&mut context.cache.shared),
        groups: HashMap::new(),
        crowd: None,
        frontends: Vec::with_capacity(wishes.len()),
        settled: settled.is_some(),
        last_probe: None,
        last_judged: None,
    };
    let (ids, probes, notices) = match settled {
        Some(Settled { frontends, notices }) => {
            plan.notices.extend_from_slice(&notices);
            let (ids, probes) = frontends.into_iter().map(|(id, probe)| (Some((id, false)), probe)).unzip();
            (ids, probes, notices)
        }
        None => filler.settle(context, wishes, plan),
    };
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
    for ((wish, id), probe) in wishes.iter().zip(&ids).zip(&probes) {
        if let &Some((id, new)) = id {
            filler.frontend(context, wish, id, new, probe.clone(), plan);
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
    let mut in_table = vec![false; usize::from(BackendId::MAX) + 1];
    for &id in plan.tables.iter().flat_map(|table| table.iter()) {
        in_table[usize::from(id)] = true;
    }
    for (&id, backend) in &mut plan.backends {
        backend.eligible = in_table[usize::from(id)];
    }
    plan.frontends = filler.frontends.into_iter().collect();
    drop(filler.groups);
    drop(filler.last_judged);
    drop(filler.last_probe);
    filler.shared.forget_unused();
    context.cache.shared = filler.shared;
    if !filler.settled {
        targets(context, hub, wishes, &ids, plan);
    }
    let frontends: Option<Vec<_>> = ids.into_iter().zip(probes).map(|(id, probe)| Some((id?.0, probe))).collect();
    Some(Settled { frontends: frontends?, notices })
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
        let elsewhere = matches!(wish.leads, Leads::Endpoints { own_snat: false, .. });
        let all = if elsewhere { &[][..] } else { &wish.settings.snat };
        let own: Vec<IpAddr> = all.iter().copied().filter(|it| it.is_ipv6() == v6).collect();
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
                context.ids.bound += 1;
                entry.memory = memory();
            }
            let shared: Arc<str> = Arc::from(name.as_str());
            plan.backends.insert(
                id,
                BackendPlan { address, port: 0, segment: hub, node: Some(Arc::clone(&shared)), eligible: false },
            );
            let weight = u16::from(!node.excluded);
            let probed = !node.excluded;
            let sure = true;
            candidates.insert(address, Candidate { id, address, port: 0, node: Some(shared), weight, probed, sure });
        }
    }
    let (four, six) = candidates.into_values().partition(|candidate| candidate.address.is_ipv4());
    [four, six]
}

/// Parts of plans, each content once, also from one plan to the next: what has not changed is the same object, and is found to be equal
/// without being looked at. It has no part in what a plan says.
#[derive(Debug, Default)]
pub(super) struct Shared {
    probes: BTreeMap<Probe, Arc<Probe>>,
    interfaces: BTreeMap<String, Arc<str>>,
    wholes: BTreeMap<FrontendProbe, Arc<FrontendProbe>>,
    /// Lists of backends by content.
    lists: HashMap<Vec<FrontendBackend>, Backends>,
    /// Frontends by id.
    frontends: Vec<Option<Arc<FrontendPlan>>>,
}

impl Shared {
    fn frontend(&mut self, made: FrontendPlan) -> Arc<FrontendPlan> {
        let place = usize::from(made.id);
        if self.frontends.len() <= place {
            self.frontends.resize(place + 1, None);
        }
        match &mut self.frontends[place] {
            Some(known) if **known == made => Arc::clone(known),
            other => Arc::clone(other.insert(Arc::new(made))),
        }
    }

    /// The frontend that was made of the same wish before, with what may be another now. `None` if no plan holds it any more.
    fn again(&mut self, id: FrontendId, varying: &Varying) -> Option<Arc<FrontendPlan>> {
        let known = self.frontends.get_mut(usize::from(id))?.as_mut()?;
        let Varying { timeouts, snat, table, backends, probe } = varying;
        let same = known.timeouts == *timeouts
            && known.snat == *snat
            && known.table == *table
            && known.backends == *backends
            && known.probe == *probe;
        if !same {
            *known = Arc::new(FrontendPlan {
                timeouts: *timeouts,
                snat: *snat,
                table: *table,
                backends: backends.clone(),
                probe: probe.clone(),
                ..(**known).clone()
            });
        }
        Some(Arc::clone(known))
    }

    fn list(&mut self, list: Vec<FrontendBackend>) -> Backends {
        self.lists.entry(list).or_insert_with_key(|list| list.as_slice().into()).clone()
    }

    /// Forgets what no plan holds any more.
    fn forget_unused(&mut self) {
        for frontend in &mut self.frontends {
            if frontend.as_ref().is_some_and(|frontend| Arc::strong_count(frontend) == 1) {
                *frontend = None;
            }
        }
        self.lists.retain(|_, list| !list.is_alone());
        self.wholes.retain(|_, whole| Arc::strong_count(whole) > 1);
        self.probes.retain(|_, probe| Arc::strong_count(probe) > 1);
        self.interfaces.retain(|_, interface| Arc::strong_count(interface) > 1);
    }

    fn probe(&mut self, interface: &str, probe: &Probe, ports: Vec<u16>) -> Arc<FrontendProbe> {
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
    // Equal probes are one probe: see `Shared`. The order of pointers never shows.
    let mut all: HashMap<(*const Probe, u16, bool), FrontendId> = HashMap::new();
    let mut fixed = HashSet::new();
    let (mut rate, mut count) = (0.0, 0);
    for ((wish, id), probe) in wishes.iter().zip(ids).zip(probes) {
        let (Some((id, _)), Some(probe)) = (id, probe) else { continue };
        let port = probe.ports.first().copied().unwrap_or(wish.target);
        let v6 = wish.is_v6();
        let probed = probed[usize::from(v6)];
        let targets = match &wish.leads {
            Leads::File(frontend) => frontend.backends.len(),
            Leads::Endpoints { backends, .. } => backends.len(),
            Leads::Nodes if replaceable(wish) => {
                let mut first = false;
                let oldest = all.entry((Arc::as_ptr(&probe.probe), port, v6)).or_insert_with(|| {
                    first = true;
                    *id
                });
                *oldest = (*oldest).min(*id);
                if first { probed } else { 0 }
            }
            Leads::Nodes if fixed.insert((Arc::as_ptr(&probe.probe), port, v6)) => probed,
            Leads::Nodes => 0,
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
    wish.to_nodes() && !matches!(wish.settings.health.port, Some(ProbePort::Number(_))) && wish.local().is_none()
}

struct Filler<'a> {
    hub: SegmentId,
    sources: Sources,
    /// Of IPv4 and of IPv6.
    nodes: [Vec<Candidate>; 2],
    tables: Tables,
    shared: Shared,
    /// Judgements on the nodes that frontends share, by probe and how they are judged.
    groups: HashMap<(Option<Arc<FrontendProbe>>, How), Judged>,
    crowd: Option<Crowd>,
    frontends: Vec<(FrontendAddress, Arc<FrontendPlan>)>,
    /// The wishes are those of the last plan.
    settled: bool,
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

/// Ids of wishes, and whether they are new; `None` = there is none left.
type WishIds = Vec<Option<(FrontendId, bool)>>;

impl<'a> Filler<'a> {
    /// Gives wishes their ids, and says how their backends are probed, and what is to be told about that.
    fn settle(
        &mut self,
        context: &mut Context<'a, '_>,
        wishes: &[Wish<'a>],
        plan: &mut Plan,
    ) -> (WishIds, Vec<Option<Arc<FrontendProbe>>>, Vec<Notice>) {
        let refused = beyond_capacity(context, wishes, plan);
        let ids = wishes
            .iter()
            .enumerate()
            .map(|(place, wish)| if refused.contains(&place) { None } else { frontend_id(context, wish, plan) })
            .collect();
        let told = plan.notices.len();
        let probes = wishes.iter().map(|wish| self.probe(context, wish, plan)).collect();
        (ids, probes, plan.notices[told..].to_vec())
    }

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
        if let Some(port) = wish.local_health_port() {
            return Some(self.shared.probe(interface, &local_endpoints(probe), vec![port]));
        }
        if probe.port.is_none() {
            if wish.target == 0 {
                return None;
            }
            // Whether anybody takes datagrams cannot be asked: a TCP port of the same Service or frontend stands for it.
            if wish.address.protocol == Protocol::Udp {
                let port = wish.tcp_port.filter(|&port| port != 0)?;
                return Some(self.shared.probe(interface, probe, vec![port]));
            }
            if let Some((settings, at, known)) = &self.last_probe
                && std::ptr::eq(*settings, wish.settings)
                && *at == interface
            {
                return Some(Arc::clone(known));
            }
            let made = self.shared.probe(interface, probe, Vec::new());
            self.last_probe = Some((wish.settings, interface.to_owned(), Arc::clone(&made)));
            return Some(made);
        }
        let ports = match &probe.port {
            None => Vec::new(),
            Some(ProbePort::Number(port)) => vec![*port],
            Some(ProbePort::Name(_)) if !wish.to_nodes() => match wish.leads {
                Leads::Endpoints { probe_port: Some(port), .. } => vec![port],
                Leads::Endpoints { .. } | Leads::File(_) | Leads::Nodes => Vec::new(),
            },
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
        (wish.target != 0 || !ports.is_empty()).then(|| self.shared.probe(interface, probe, ports))
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
            if wish.to_nodes() {
                let message = format!(
                    "port {} of this Service has no NodePort; set allocateLoadBalancerNodePorts to true, or type NodePort",
                    wish.address.port
                );
                plan.notices.push(wish.notice("NodePortMissing", message));
            } else {
                let message = format!("no EndpointSlice gives {} an endpoint in the tenant's segment", wish.shown());
                plan.notices.push(wish.notice("NoBackend", message));
            }
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
        let candidates = match &wish.leads {
            Leads::Nodes => wish.local().map(|_| self.nodes_with_endpoints(context, wish)),
            Leads::File(frontend) => Some(fixed_candidates(context, wish, frontend, segment, plan)),
            Leads::Endpoints { backends, .. } => Some(endpoint_candidates(context, wish, backends, segment, plan)),
        };
        let (probe, judged) = if let Some(candidates) = candidates {
            let judged = self.judge(context.health, &candidates, probe.as_ref(), wish.target, how, plan);
            (probe, judged)
        } else {
            self.judge_nodes(context.health, wish, probe, how, plan)
        };
        alarms(wish, &judged, how, plan);
        down_resets(context, wish, id, new, &judged);
        let timeouts = timeouts(context, wish, plan);
        let varying = Varying { timeouts, snat, table: judged.table, backends: judged.backends, probe };
        if self.settled
            && let Some(frontend) = self.shared.again(id, &varying)
        {
            self.frontends.push((wish.address, frontend));
            return;
        }
        let affinity = wish.settings.affinity.unwrap_or_else(|| {
            if wish.service.is_some_and(|service| service.client_ip_affinity) {
                Affinity::Source
            } else {
                Affinity::Flow
            }
        });
        let frontend = self.shared.frontend(FrontendPlan {
            id,
            tenant: wish.tenant_id,
            name: wish.name.clone(),
            timeouts: varying.timeouts,
            service: wish.service_name.cloned(),
            service_uid: wish.service.map(|service| service.uid.clone()).unwrap_or_default(),
            guest_made: wish.service.is_some_and(is_guest_made),
            mode: match wish.leads {
                Leads::Nodes => Some(Mode::Nodes),
                Leads::File(_) => None,
                Leads::Endpoints { .. } => Some(Mode::Endpoints),
            },
            source_affinity: affinity == Affinity::Source,
            preserve_client: wish.settings.preserve_client,
            adopt: wish.settings.adopt == Adopt::Takeover,
            unserved_drop: wish.settings.unserved == Unserved::Drop,
            target_port: wish.target,
            snat: varying.snat,
            snat_ports: context.config.hub.snat_ports,
            table: varying.table,
            backends: varying.backends,
            probe: varying.probe,
            reset_on_down: wish.settings.on_down == OnDown::Reset,
        });
        self.frontends.push((wish.address, frontend));
    }

    /// Nodes that may have an endpoint of a Service with policy Local. Where there is a health port it decides, and slices only say who is
    /// tried if nobody passes; where there is none, the slices decide.
    fn nodes_with_endpoints(&self, context: &Context<'_, '_>, wish: &Wish<'_>) -> Vec<Candidate> {
        let endpoints = wish.service_name.and_then(|name| context.inventory.endpoints.get(name)).into_iter().flatten();
        let mut names: BTreeSet<&str> = BTreeSet::new();
        let mut addresses: BTreeSet<IpAddr> = BTreeSet::new();
        for endpoint in endpoints.filter(|endpoint| endpoint.ready) {
            match &endpoint.node {
                Some(node) => {
                    names.insert(node);
                }
                // Where it is can be told only if it has the node's own address.
                None => {
                    addresses.insert(endpoint.address);
                }
            }
        }
        let nodes = &self.nodes[usize::from(wish.is_v6())];
        let somewhere = !addresses.iter().all(|address| nodes.iter().any(|node| node.address == *address));
        let all = nodes.iter().filter_map(|node| {
            let sure =
                node.node.as_deref().is_some_and(|name| names.contains(name)) || addresses.contains(&node.address);
            // One that may be anywhere is found by the probe.
            let asked = wish.local_health_port().is_some() || somewhere;
            (sure || asked).then(|| Candidate { sure, ..node.clone() })
        });
        all.collect()
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
                Some(self.shared.probe(&own.interface, &own.probe, ports))
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
        let any_up = which(Some(true));
        let any_unknown =
            (0..candidates.len()).any(|index| can(index) && candidates[index].sure && states[index].is_none());
        let failed = !any_up && !any_unknown && which(Some(false));
        let serves = |index: usize| {
            can(index)
                && match states[index] {
                    Some(true) => true,
                    None => !any_up && candidates[index].sure,
                    Some(false) => failed && how.try_all && candidates[index].sure,
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
                sure: candidate.sure,
            });
        }
        let ids = |state: Option<bool>| {
            let with = candidates.iter().zip(&states).filter(|(candidate, it)| candidate.probed && **it == state);
            Arc::new(with.map(|(candidate, _)| candidate.id).collect())
        };
        let backends = self.shared.list(list);
        Judged { backends, table: self.tables.add(content), failed, down: ids(Some(false)), unknown: ids(None) }
    }
}

/// Wishes for which there is no room: all that is new of a Service, if there is no room for all of it.
fn beyond_capacity(context: &Context<'_, '_>, wishes: &[Wish<'_>], plan: &mut Plan) -> HashSet<usize> {
    let frontends = &context.ids.frontends;
    let blocked = |id: u16| context.ids.pending.contains(&Reset::Frontend(id));
    let mut room = frontends.available(FRONTENDS);
    if room >= wishes.len() {
        return HashSet::new();
    }
    room += frontends.waiting(FRONTENDS, blocked);
    let mut groups: HashMap<&str, Vec<usize>> = HashMap::new();
    let mut order = Vec::new();
    for (place, wish) in wishes.iter().enumerate() {
        let uid = wish.service.map_or("", |service| service.uid.as_str());
        let known = frontends.used.get(&FrontendKey::from(&wish.address));
        let same = known.is_some_and(|entry| entry.memory.is_same(&wish.tenant.name, wish.service_name, uid));
        if !same {
            let group = groups.entry(&wish.name).or_default();
            if group.is_empty() {
                order.push(&wish.name);
            }
            group.push(place);
        }
    }
    let mut refused = HashSet::new();
    for name in order {
        let group = &groups[name.as_str()];
        if group.len() <= room {
            room -= group.len();
            continue;
        }
        for &place in group {
            plan.notices.push(wishes[place].notice("TooManyFrontends", too_many(&wishes[place])));
            refused.insert(place);
        }
    }
    refused
}

fn too_many(wish: &Wish<'_>) -> String {
    format!(
        "{} is not served: one host serves at most {} ports of all Services together, a bound of its maps that no setting changes; \
         remove some, or put tenants on another host",
        wish.shown(),
        lbd_common::abi::MAX_FRONTENDS - 1
    )
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
                context.ids.bound += 1;
                uid.clone_into(&mut entry.memory.uid);
            }
            if entry.memory.recovered {
                context.ids.changes += 1;
                context.ids.bound += 1;
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
    // An id that is used again before its time: its flows have been reset at least.
    let pending = &context.ids.pending;
    let blocked = |id: u16| pending.contains(&Reset::Frontend(id));
    let Some(id) = frontends.fresh(FRONTENDS).or_else(|| frontends.reuse(blocked)) else {
        // Its old flows are reset, because it is no longer in the plan.
        plan.notices.push(wish.notice("TooManyFrontends", too_many(wish)));
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
        let what = if judged.table.is_some() {
            "new connections are spread over all of them"
        } else {
            "new connections are refused"
        };
        let message = format!("all backends of {} fail their probes; {what}", wish.shown());
        plan.notices.push(wish.notice("AllBackendsDown", message));
    } else if judged.table.is_none() {
        let shown = wish.shown();
        let message = match wish.leads {
            Leads::Nodes if wish.local().is_some() => format!("no node has an endpoint that serves {shown}"),
            Leads::Nodes => format!("no node can take connections for {shown}"),
            Leads::File(_) => format!("no backend of {shown} has a weight"),
            Leads::Endpoints { .. } => format!("no endpoint can take connections for {shown}"),
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
            sure: true,
        });
    }
    candidates.into_values().collect()
}

/// Backends that are endpoints.
fn endpoint_candidates(
    context: &mut Context<'_, '_>,
    wish: &Wish<'_>,
    backends: &[(IpAddr, u16)],
    segment: SegmentId,
    plan: &mut Plan,
) -> Vec<Candidate> {
    // What runs behind an endpoint's node is the guest's business: only the health port tells.
    let sure = wish.local_health_port().is_none();
    let mut candidates = Vec::with_capacity(backends.len());
    for &(address, port) in backends {
        // Ports of a Service over the same endpoints share the backends, and often the table.
        let port = Some(port).filter(|&port| port != wish.target).unwrap_or_default();
        let key = BackendKey { segment, address, port };
        let Some(id) = context.ids.backends.id(key, BACKENDS, BackendMemory::default) else {
            plan.notices.push(wish.notice("TooManyBackends", "no id left for endpoints of this Service".to_owned()));
            break;
        };
        plan.backends.entry(id).or_insert_with(|| BackendPlan { address, port, segment, node: None, eligible: false });
        candidates.push(Candidate { id, address, port, node: None, weight: 1, probed: true, sure });
    }
    candidates
}

/// The probe of a health port: asks what a Service's own probe does not know, at its pace.
fn local_endpoints(probe: &Probe) -> Probe {
    Probe {
        kind: ProbeKind::LocalEndpoints,
        port: None,
        path: "/healthz".to_owned(),
        host: None,
        expect: vec![200],
        ca: None,
        ..probe.clone()
    }
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
            context.ids.set_owner(key, owner);
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
                context.ids.set_owner(key, owner.to_owned());
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
            context.ids.set_owner(key, owner);
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
        if wish.to_nodes() {
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
