//! The plan: what the maps shall hold, with next hops still as addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

use crate::config::{Protocol, SegmentName};
use crate::source::ObjectName;

/// Dense id of a segment; 0 is none.
pub type SegmentId = u16;
/// Index of a tenant; 0 is none.
pub type TenantId = u16;
/// Id of a frontend; 0 is none.
pub type FrontendId = u16;
/// Id of a backend; 0 is none.
pub type BackendId = u16;

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
    /// Frontends by what a client connects to.
    pub frontends: BTreeMap<FrontendAddress, FrontendPlan>,
    /// Backends by id.
    pub backends: BTreeMap<BackendId, BackendPlan>,
    /// Lookup tables, each content once; frontends refer to them by index. Slots are backend ids, the length is a prime.
    pub tables: Vec<Vec<BackendId>>,
    /// What to probe.
    pub probes: BTreeSet<ProbeTarget>,
    /// Flows to reset before anything is added.
    pub resets: BTreeSet<Reset>,
    /// What an operator should know, for `lbctl events` and Warning Events.
    pub notices: Vec<Notice>,
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
    /// On-link prefixes.
    pub networks: Vec<IpNet>,
    /// Gateways to off-link clients, at most one per family.
    pub gateways: Vec<IpAddr>,
}

/// A tenant's limits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantPlan {
    /// Name.
    pub name: String,
    /// Live flows; 0 = none.
    pub max_flows: u32,
    /// New connections per second; 0 = none.
    pub new_flows_per_second: u32,
    /// Half-open connections; 0 = none.
    pub max_half_open: u32,
    /// `host_access: own`.
    pub host_access_all: bool,
    /// `host_access` has `icmp`.
    pub host_access_icmp: bool,
    /// TCP ports of `host_access`.
    pub host_access_ports: Vec<u16>,
}

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
    /// The Service behind it.
    pub service: Option<ObjectName>,
    /// UID of that Service, else empty.
    pub service_uid: String,
    /// Hash by client address only.
    pub source_affinity: bool,
    /// DNAT only.
    pub preserve_client: bool,
    /// Silence instead of RST when there is no backend.
    pub unserved_drop: bool,
    /// Port on the backends that have none of their own; 0 = not known yet.
    pub target_port: u16,
    /// SNAT address; `None` with `preserve_client`.
    pub snat: Option<IpAddr>,
    /// SNAT ports.
    pub snat_ports: (u16, u16),
    /// Lookup table: index into [`Plan::tables`]; `None` = no backend.
    pub table: Option<usize>,
    /// All its backends, with what is known of them, for `lbctl`.
    pub backends: Vec<FrontendBackend>,
    /// Reset flows of a backend that goes down.
    pub reset_on_down: bool,
}

/// A backend of one frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontendBackend {
    /// Id.
    pub id: BackendId,
    /// Address.
    pub address: IpAddr,
    /// Port.
    pub port: u16,
    /// Node name, if it is a node.
    pub node: Option<String>,
    /// Weight; 0 = no new connections.
    pub weight: u16,
    /// In the lookup table.
    pub serving: bool,
    /// The probe that decides about it.
    pub probe: ProbeTarget,
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
    pub node: Option<String>,
}

/// One thing to probe; equal targets are probed once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProbeTarget {
    /// Address.
    pub address: IpAddr,
    /// Port.
    pub port: u16,
    /// Interface to bind to.
    pub interface: String,
    /// How (its `port` has been resolved to the port above).
    pub probe: crate::config::Probe,
}

/// Flows to remove because what they point to is gone or is now another's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reset {
    /// All flows of a frontend.
    Frontend(FrontendId),
    /// All flows to an address in a segment.
    Address(SegmentId, IpAddr),
    /// Flows of any other frontend to this address and port: it is `keep`'s now.
    Target {
        /// Backend's segment.
        segment: SegmentId,
        /// Backend's address; `None` = any.
        address: Option<IpAddr>,
        /// Backend's port.
        port: u16,
        /// The frontend that owns it now.
        keep: FrontendId,
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetHealth {
    /// `Some(true)` = up, `Some(false)` = down, `None` = no result yet.
    pub up: Option<bool>,
    /// Why, e.g. `connection refused`.
    pub cause: String,
    /// How long it has been so.
    pub since: Duration,
}

/// Health of all targets.
pub type Health = BTreeMap<ProbeTarget, TargetHealth>;
