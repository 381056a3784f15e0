//! The plan: what the maps shall hold, with next hops still as addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::config::{AddressRange, Mode, Probe, Protocol, SegmentName, Timeouts};
use crate::source::ObjectName;

/// Dense id of a segment; 0 is none.
pub type SegmentId = u16;
/// Index of a tenant; 0 is none.
pub type TenantId = u16;
/// Id of a frontend; 0 is none.
pub type FrontendId = u16;
/// Id of a backend; 0 is none.
pub type BackendId = u16;
/// Index of timeouts; 0 is the defaults.
pub type TimeoutsId = u16;

/// What the host's interfaces say; gathered by the data plane, never by the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// Interfaces by name.
    pub interfaces: BTreeMap<String, InterfaceFacts>,
}

/// One interface of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterfaceFacts {
    /// Index.
    pub index: u32,
    /// MAC.
    pub mac: [u8; 6],
    /// MTU.
    pub mtu: u32,
    /// Administratively up with carrier.
    pub up: bool,
    /// Addresses with prefix, primary first, without deprecated, tentative and link-local IPv6 ones.
    pub addresses: Vec<IpNet>,
    /// Every address, link-local ones too.
    pub all_addresses: Vec<IpNet>,
    /// Default gateways through this interface, by family.
    pub gateways: Vec<IpAddr>,
    /// Other routes through this interface: each prefix once, with its gateway, or `None` if its addresses are on the link.
    pub routes: BTreeMap<IpNet, Option<IpAddr>>,
    /// Of a VLAN interface: index of the interface that carries it, and its VLAN id.
    pub vlan: Option<(u32, u16)>,
}

impl HostFacts {
    /// The kernel's interface for a segment: the interface itself, or the VLAN interface on it, whatever its name, if there is one.
    pub fn of(&self, segment: &SegmentName) -> Option<&InterfaceFacts> {
        self.of_segment(segment).map(|(_, facts)| facts)
    }

    /// The same with its name: what the host's own sockets in the segment are bound to.
    pub fn of_segment(&self, segment: &SegmentName) -> Option<(&str, &InterfaceFacts)> {
        let parent = self.interfaces.get_key_value(&segment.interface)?;
        let found = match segment.vlan {
            None => Some(parent),
            Some(vlan) => self.interfaces.iter().find(|(_, interface)| interface.vlan == Some((parent.1.index, vlan))),
        };
        found.map(|(name, facts)| (name.as_str(), facts))
    }
}

/// Exact contents of the maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Segments by id.
    pub segments: BTreeMap<SegmentId, SegmentPlan>,
    /// Tenants by index.
    pub tenants: BTreeMap<TenantId, TenantPlan>,
    /// Addresses that mean something, by segment.
    pub addresses: BTreeMap<(SegmentId, IpAddr), AddressPlan>,
    /// Frontends by what a client connects to. Plans share those that have not changed.
    pub frontends: BTreeMap<FrontendAddress, Arc<FrontendPlan>>,
    /// Backends by id.
    pub backends: BTreeMap<BackendId, BackendPlan>,
    /// Timeouts of flows, each content once; index 0 = the defaults.
    pub timeouts: BTreeMap<TimeoutsId, Timeouts>,
    /// Lookup tables, each content once; frontends refer to them by index. Slots are backend ids, the length is a prime.
    pub tables: Vec<Arc<[BackendId]>>,
    /// Who may connect to the Services of ours that limit it. None of them is in `frontends` while the datapath cannot enforce it.
    pub clients: BTreeMap<ObjectName, ClientsPlan>,
    /// Intervals of addresses, each content once: sorted, and they do not touch.
    pub intervals: Vec<Arc<[AddressRange]>>,
    /// What to probe.
    pub probes: BTreeSet<ProbeTarget>,
    /// Flows to reset before anything is added.
    pub resets: BTreeSet<Reset>,
    /// What an operator should know, for `lbctl events` and Warning Events.
    pub notices: Vec<Notice>,
    /// Nothing is answered for or announced: another load balancer does that. What arrives all the same is forwarded.
    pub quiet: bool,
}

/// What the maps of an earlier life say of ids: what is left when the file that keeps them is lost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pinned {
    /// Ids of the segments of the configured interfaces.
    pub segments: BTreeMap<SegmentName, SegmentId>,
    /// Ids and tenants of frontends.
    pub frontends: BTreeMap<FrontendAddress, (FrontendId, TenantId)>,
    /// Segment, address and port of backends.
    pub backends: BTreeMap<BackendId, (SegmentId, IpAddr, u16)>,
    /// Highest id of a segment that was ever seen.
    pub last_segment: SegmentId,
    /// Highest index of a tenant that was ever seen.
    pub last_tenant: TenantId,
    /// Highest id of a frontend that was ever seen.
    pub last_frontend: FrontendId,
}

/// A segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentPlan {
    /// Interface and VLAN.
    pub name: SegmentName,
    /// Tenants' clients arrive here.
    pub tenant_side: bool,
    /// The hub's nodes live here.
    pub hub_side: bool,
    /// Its only tenant, or 0.
    pub tenant: TenantId,
    /// On-link prefixes of both families.
    pub networks: Vec<IpNet>,
    /// Gateways to off-link clients, at most one per family; that of IPv6 may be link-local.
    pub gateways: Vec<IpAddr>,
    /// Other routes to what is off-link, see [`InterfaceFacts::routes`].
    pub routes: BTreeMap<IpNet, Option<IpAddr>>,
    /// TCP ports that `host_access` opens on the host's own addresses.
    pub host_ports: BTreeSet<u16>,
    /// `host_access` of several tenants, who have the same: `own`. One tenant's own is in its [`TenantPlan`].
    pub host_access_all: bool,
    /// `host_access` of several tenants has `icmp`.
    pub host_access_icmp: bool,
}

/// A tenant's limits in one family; 0 = none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FamilyLimitsPlan {
    /// Live flows, UDP among them.
    pub flows: u32,
    /// Live UDP flows.
    pub udp: u32,
    /// Half-open connections.
    pub half_open: u32,
}

/// A tenant's limits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantPlan {
    /// Name.
    pub name: String,
    /// Limits of IPv4, of IPv6.
    pub families: [FamilyLimitsPlan; 2],
    /// New connections per second, both families; 0 = no limit.
    pub new_flows_per_second: u32,
    /// `host_access: own`.
    pub host_access_all: bool,
    /// `host_access` has `icmp`.
    pub host_access_icmp: bool,
}

/// Who may connect to a Service, of IPv4 and of IPv6: index into [`Plan::intervals`], or `None` = everybody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientsPlan(pub [Option<usize>; 2]);

/// An address in a segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressPlan {
    /// A VIP.
    pub vip: bool,
    /// A SNAT address, with its ports.
    pub snat: Option<(u16, u16)>,
    /// Configured on the host's interface.
    pub host: bool,
    /// Its tenant, or 0.
    pub tenant: TenantId,
    /// A VIP whose frontends all drop in silence what nobody serves.
    pub unserved_drop: bool,
}

/// What a client connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrontendAddress {
    /// Where clients arrive.
    pub segment: SegmentId,
    /// VIP.
    pub vip: IpAddr,
    /// Port.
    pub port: u16,
    /// Protocol.
    pub protocol: Protocol,
}

/// A frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontendPlan {
    /// Id, stable while the frontend lives.
    pub id: FrontendId,
    /// Tenant.
    pub tenant: TenantId,
    /// Name: the file's, or `namespace/name`.
    pub name: String,
    /// Index of its timeouts in [`Plan::timeouts`].
    pub timeouts: TimeoutsId,
    /// The Service behind it.
    pub service: Option<ObjectName>,
    /// UID of that Service, else empty.
    pub service_uid: String,
    /// A guest cluster made that Service: what the guest says of clients is not to be seen here.
    pub guest_made: bool,
    /// How its backends are found; `None` = the file lists them.
    pub mode: Option<Mode>,
    /// Hash by client address only.
    pub source_affinity: bool,
    /// DNAT only.
    pub preserve_client: bool,
    /// For a while after a takeover, flows without state are adopted.
    pub adopt: bool,
    /// Silence instead of RST when there is no backend.
    pub unserved_drop: bool,
    /// Port on the backends that have none of their own; 0 = not known yet.
    pub target_port: u16,
    /// SNAT address, of the VIP's family; `None` with `preserve_client`, and where there is none: then there is no table.
    pub snat: Option<IpAddr>,
    /// SNAT ports.
    pub snat_ports: (u16, u16),
    /// Lookup table: index into [`Plan::tables`]; `None` = no backend.
    pub table: Option<usize>,
    /// All its backends, for `lbctl`; frontends over the same nodes in the same state share the list.
    pub backends: Backends,
    /// How its backends are probed; `None` = not at all (no target port yet, or UDP without a TCP port to ask).
    pub probe: Option<Arc<FrontendProbe>>,
    /// Reset flows of a backend that goes down.
    pub reset_on_down: bool,
}

impl FrontendPlan {
    /// The port that the backend is reached on; 0 = not known yet.
    pub fn port_of(&self, backend: &FrontendBackend) -> u16 {
        if backend.port == 0 { self.target_port } else { backend.port }
    }

    /// The targets that decide about the backend: one, or a few that stand for its node.
    pub fn targets_of<'a>(&'a self, backend: &'a FrontendBackend) -> impl Iterator<Item = ProbeTarget> + 'a {
        let own = self.port_of(backend);
        self.probe.iter().filter(|_| backend.probed).flat_map(move |probe| {
            let own = if probe.ports.is_empty() { Some(own).filter(|&port| port != 0) } else { None };
            probe.ports.iter().copied().chain(own).map(move |port| ProbeTarget {
                address: backend.address,
                port,
                interface: Arc::clone(&probe.interface),
                probe: Arc::clone(&probe.probe),
            })
        })
    }

    /// What is known of the backend: up if any of its targets is, else down if all are, else unknown.
    pub fn health_of(&self, backend: &FrontendBackend, health: &Health) -> TargetHealth {
        let known: Vec<_> = self.targets_of(backend).map(|target| health.get(&target)).collect();
        let up = any_up(known.iter().map(|known| known.and_then(|known| known.up)));
        known.into_iter().flatten().find(|known| known.up == up).cloned().unwrap_or_default()
    }
}

/// Up if any is up, down if all are down, else unknown.
pub(crate) fn any_up(states: impl Iterator<Item = Option<bool>>) -> Option<bool> {
    let mut all_down = None;
    for state in states {
        match state {
            Some(true) => return state,
            Some(false) => all_down = all_down.or(Some(true)),
            None => all_down = Some(false),
        }
    }
    all_down.filter(|&all| all).map(|_| false)
}

/// How the backends of a frontend are probed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrontendProbe {
    /// Interface to bind to.
    pub interface: Arc<str>,
    /// Settings.
    pub probe: Arc<Probe>,
    /// Ports to probe on each backend: empty = the port that it serves on. More than one: there are too many frontends to probe
    /// each of them on each node, so a few stand for all.
    pub ports: Vec<u16>,
}

/// Backends of a frontend, shared by all that have the same. Two that are one and the same are equal without a look at their many backends.
#[derive(Clone, Debug, Default)]
pub struct Backends(Arc<[FrontendBackend]>);

impl PartialEq for Backends {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}

impl Eq for Backends {}

impl std::ops::Deref for Backends {
    type Target = [FrontendBackend];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl From<Vec<FrontendBackend>> for Backends {
    fn from(list: Vec<FrontendBackend>) -> Self {
        Self(list.into())
    }
}

impl From<&[FrontendBackend]> for Backends {
    fn from(list: &[FrontendBackend]) -> Self {
        Self(list.into())
    }
}

impl FromIterator<FrontendBackend> for Backends {
    fn from_iter<I: IntoIterator<Item = FrontendBackend>>(list: I) -> Self {
        Self(list.into_iter().collect())
    }
}

impl Backends {
    /// Whether nobody else holds this list.
    pub(crate) fn is_alone(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

/// A backend of one frontend.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrontendBackend {
    /// Id.
    pub id: BackendId,
    /// Address.
    pub address: IpAddr,
    /// Port, or 0 for the frontend's target port.
    pub port: u16,
    /// Node name, if it is a node.
    pub node: Option<Arc<str>>,
    /// Weight; 0 = no new connections.
    pub weight: u16,
    /// In the lookup table.
    pub serving: bool,
    /// May be probed (excluded nodes are not).
    pub probed: bool,
    /// Known to have what the frontend leads to. Others take connections only while their probe says so: nodes that may have no endpoint
    /// of a Service with `externalTrafficPolicy: Local`.
    pub sure: bool,
}

/// A backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendPlan {
    /// Address.
    pub address: IpAddr,
    /// Port, or 0 for the frontend's target port.
    pub port: u16,
    /// Where it lives.
    pub segment: SegmentId,
    /// Node name, if it is a node.
    pub node: Option<Arc<str>>,
    /// In some lookup table: may take new connections.
    pub eligible: bool,
}

/// One thing to probe; equal targets are probed once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProbeTarget {
    /// Address.
    pub address: IpAddr,
    /// Port.
    pub port: u16,
    /// Interface to bind to.
    pub interface: Arc<str>,
    /// How (its `port` has been resolved to the port above).
    pub probe: Arc<Probe>,
}

/// Flows to remove because what they point to is gone or is now another's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Reset {
    /// All flows of a frontend.
    Frontend(FrontendId),
    /// Flows of a frontend to one of its backends.
    Backend {
        /// Frontend.
        frontend: FrontendId,
        /// Backend.
        backend: BackendId,
    },
    /// All flows to an address in a segment.
    Address(SegmentId, IpAddr),
    /// All flows from a SNAT address to backends in a segment.
    Source(SegmentId, IpAddr),
    /// Flows of any other frontend to this port: it belongs to the frontends in `keep` now.
    Target {
        /// Backend's segment.
        segment: SegmentId,
        /// IP protocol number.
        protocol: u8,
        /// Backend's address; `None` = any.
        address: Option<IpAddr>,
        /// Backend's port.
        port: u16,
        /// The frontends that own it now.
        keep: BTreeSet<FrontendId>,
    },
}

/// Something an operator should know.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Notice {
    /// Stable reason, CamelCase: the reason of the Event.
    pub reason: &'static str,
    /// The Service concerned.
    pub service: Option<ObjectName>,
    /// Tenant concerned, by name.
    pub tenant: Option<String>,
    /// Stable text.
    pub message: String,
}

/// State of a probed target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetHealth {
    /// `Some(true)` = up, `Some(false)` = down, `None` = no result yet.
    pub up: Option<bool>,
    /// Why, e.g. `connection refused`.
    pub cause: String,
    /// Since when, in seconds since the epoch; for display only.
    pub since: i64,
}

/// Health of all targets.
pub type Health = BTreeMap<ProbeTarget, TargetHealth>;
