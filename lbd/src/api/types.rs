//! What the agent's socket speaks: one set of types for the server and for `lbctl`.
//!
//! Everything is JSON. Fields are only ever added; readers ignore what they don't know.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// Paths of the socket's HTTP interface.
pub mod paths {
    /// `GET`: [`super::Status`].
    pub const STATUS: &str = "/status";
    /// `GET`: list of [`super::Service`].
    pub const SERVICES: &str = "/services";
    /// `GET`: list of [`super::Backend`].
    pub const BACKENDS: &str = "/backends";
    /// `GET`: list of [`super::TenantVips`].
    pub const VIPS: &str = "/vips";
    /// `GET`: list of [`super::Event`], oldest first.
    pub const EVENTS: &str = "/events";
    /// `GET`: [`super::Names`].
    pub const NAMES: &str = "/names";
    /// `POST` [`super::KillRequest`]: [`super::KillReply`].
    pub const KILL: &str = "/kill";
    /// `POST` [`super::ReloadRequest`]: [`super::ReloadReply`].
    pub const RELOAD: &str = "/reload";
    /// `POST` [`super::AdoptRequest`]: [`super::AdoptReply`].
    pub const ADOPT: &str = "/adopt";
    /// `POST`: [`super::AcceptClusterReply`].
    pub const ACCEPT_CLUSTER: &str = "/accept-cluster";
}

/// How the agent is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Version of the agent.
    pub version: String,
    /// ABI of the maps.
    pub abi: u32,
    /// Process id of the agent.
    pub pid: u32,
    /// When it started (RFC 3339).
    pub started: String,
    /// The configuration file.
    pub config: ConfigStatus,
    /// Interfaces that lbd is attached to.
    pub interfaces: Vec<InterfaceStatus>,
    /// Where desired state comes from.
    pub sources: Vec<SourceStatus>,
    /// Whether this agent acts for its hub; absent without a cluster.
    pub lease: Option<LeaseStatus>,
    /// The cluster; absent without one.
    pub cluster: Option<ClusterStatus>,
    /// Fill of the tables.
    pub tables: Vec<TableFill>,
    /// What tenants use of what they may.
    pub tenants: Vec<TenantFill>,
    /// The last change of the datapath.
    pub apply: ApplyStatus,
    /// What is wrong now; empty = healthy.
    pub problems: Vec<String>,
}

/// The configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConfigStatus {
    /// Path.
    pub file: String,
    /// When the configuration in force was loaded (RFC 3339).
    pub loaded: String,
    /// The file is not what is in force: the last reload failed.
    pub stale: bool,
    /// Why the last reload failed.
    pub error: Option<String>,
}

/// An interface that lbd is attached to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InterfaceStatus {
    /// Name.
    pub name: String,
    /// `tenant`, `hub` or `tenant+hub`.
    pub role: String,
    /// XDP mode in force: `native`, `generic`, or `detached`.
    pub mode: String,
    /// Up with carrier.
    pub up: bool,
    /// MTU.
    pub mtu: u32,
}

/// A source of desired state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SourceStatus {
    /// `file`, or `kubernetes` and the hub's name.
    pub name: String,
    /// `synced`, `restored` (last state from disk), `away` (last state, no connection) or `waiting` (nothing yet).
    pub state: String,
    /// Seconds since the source was last known to be current.
    pub age_s: Option<u64>,
    /// Last error, while it lasts.
    pub error: Option<String>,
}

/// Whether this agent acts for its hub.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeaseStatus {
    /// See [`lease_state`].
    pub state: String,
    /// The other agent.
    pub holder: Option<String>,
}

/// Values of [`LeaseStatus::state`].
pub mod lease_state {
    /// This agent holds the Lease.
    pub const HELD: &str = "held";
    /// Another agent does, and this one only waits.
    pub const OTHER: &str = "other";
    /// The API has not answered yet; this agent goes on as before.
    pub const UNKNOWN: &str = "unknown";
    /// There can be no Lease; this agent acts.
    pub const UNGUARDED: &str = "unguarded";
}

/// The hub's cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterStatus {
    /// UID of its namespace `kube-system`; empty = not known yet.
    pub uid: String,
    /// The UID of another cluster that is there instead, until it is accepted.
    pub instead: Option<String>,
}

/// Fill of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TableFill {
    /// Name.
    pub name: String,
    /// Entries in use.
    pub used: u64,
    /// Entries that fit.
    pub capacity: u64,
}

/// What a tenant uses in one address family. A limit of 0 is none.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct TenantFill {
    /// Tenant.
    pub tenant: String,
    /// `IPv4` or `IPv6`.
    pub family: String,
    /// Live flows, UDP among them.
    pub flows: u64,
    /// Live flows that it may have.
    pub flows_limit: u64,
    /// Live UDP flows.
    pub udp: u64,
    /// Live UDP flows that it may have.
    pub udp_limit: u64,
    /// Half-open connections.
    pub half_open: u64,
    /// Half-open connections that it may have.
    pub half_open_limit: u64,
}

/// The addresses of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TenantVips {
    /// Tenant.
    pub tenant: String,
    /// Interface of its segment.
    pub interface: String,
    /// VLAN of its segment, 0 = untagged.
    pub vlan: u16,
    /// Its pools: `first-last`, or one address.
    pub pools: Vec<String>,
    /// Addresses of the pools that can still be given out; absent = not known (no agent). Of a larger pool 2^64 − 1.
    pub free: Option<u64>,
    /// The same for each pool, in the order of `pools`; empty = not known.
    #[serde(default)]
    pub free_in_pools: Vec<u64>,
    /// Addresses that are something else than free, in order.
    pub addresses: Vec<Vip>,
}

/// An address that is not free.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vip {
    /// Address.
    pub address: IpAddr,
    /// See [`vip_state`].
    pub state: String,
    /// Services (`namespace/name`) and frontends of the file that use it or that it is kept for.
    #[serde(default)]
    pub services: Vec<String>,
    /// MAC of the other station that has it.
    #[serde(default)]
    pub mac: Option<String>,
    /// Seconds until a reservation ends; absent = it does not end by itself.
    #[serde(default)]
    pub until_s: Option<u64>,
}

/// Values of [`Vip::state`].
pub mod vip_state {
    /// In use.
    pub const USED: &str = "used";
    /// Kept for a Service that is not there.
    pub const RESERVED: &str = "reserved";
    /// Another station has it, or claims it too.
    pub const CONFLICT: &str = "conflict";
    /// Nobody answers for it (told without an agent): another station has it, or it was being looked at when the agent ended.
    pub const UNANSWERED: &str = "unanswered";
}

/// The last change of the datapath.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ApplyStatus {
    /// When the maps were last brought to the plan (RFC 3339); empty = never.
    pub last: String,
    /// Changes applied.
    pub applied: u64,
    /// Changes that failed.
    pub failed: u64,
    /// Why the last one failed; absent = it did not.
    pub error: Option<String>,
}

/// What a client connects to.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct Service {
    /// Tenant.
    pub tenant: String,
    /// `namespace/name` of the Service, or the name of the frontend in the file.
    pub service: String,
    /// Frontend name.
    pub name: String,
    /// `address:port`.
    pub vip: String,
    /// `TCP` or `UDP`.
    pub proto: String,
    /// See [`service_state`].
    pub state: String,
    /// Backends that get new connections.
    pub serving: u32,
    /// Backends that pass their probe; absent = not known (no agent).
    pub up: Option<u32>,
    /// All backends; absent = not known (no agent).
    pub backends: Option<u32>,
    /// How backends are found: `nodes`, `endpoints`, or `file`; absent = not known (no agent).
    #[serde(default)]
    pub mode: Option<String>,
    /// Who may connect, as far as lbd sees: `all`, or `all (guest)`: the guest cluster's Service may say otherwise, and its mirror on the hub
    /// does not show that; absent = not known (no agent).
    #[serde(default)]
    pub clients: Option<String>,
    /// `flow` or `source`.
    pub affinity: String,
    /// Port on the backends; 0 = not known yet.
    pub target_port: u16,
    /// SNAT address; absent = the client's address is kept.
    pub snat: Option<IpAddr>,
    /// Id in the maps.
    pub id: u16,
    /// Live flows; absent = the maps can't be read.
    pub flows: Option<u64>,
    /// Connections ever accepted.
    pub accepted: Option<u64>,
    /// Connections refused by lbd.
    pub refused: Option<u64>,
    /// Packets client → backend.
    pub in_packets: Option<u64>,
    /// Bytes client → backend.
    pub in_bytes: Option<u64>,
    /// Packets backend → client.
    pub out_packets: Option<u64>,
    /// Bytes backend → client.
    pub out_bytes: Option<u64>,
}

/// Values of [`Service::state`].
pub mod service_state {
    /// All backends serve.
    pub const SERVING: &str = "serving";
    /// Some backends are down.
    pub const DEGRADED: &str = "degraded";
    /// All backends fail their probes; new connections are tried on all of them (`all_down: try`).
    pub const TRYING: &str = "trying";
    /// No backend serves: clients are refused.
    pub const DOWN: &str = "down";
    /// No backend is known yet (no NodePort, no node).
    pub const PENDING: &str = "pending";
}

/// A backend of one frontend.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct Backend {
    /// Tenant.
    pub tenant: String,
    /// `namespace/name` of the Service, or the name of the frontend in the file.
    pub service: String,
    /// `address:port` that clients connect to.
    pub vip: String,
    /// `TCP` or `UDP`.
    pub proto: String,
    /// `address:port` of the backend.
    pub backend: String,
    /// Node name, if it is a node.
    pub node: Option<String>,
    /// `up`, `down` or `unknown`.
    pub state: String,
    /// Why.
    pub cause: String,
    /// Seconds in that state.
    pub since_s: Option<u64>,
    /// Gets new connections.
    pub serving: bool,
    /// Weight; absent = not known (no agent).
    pub weight: Option<u16>,
    /// Id in the maps.
    pub id: u16,
    /// Id of the frontend in the maps.
    pub frontend: u16,
    /// Live flows; absent = the maps can't be read.
    pub flows: Option<u64>,
}

/// Something that happened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Event {
    /// When it was first seen (RFC 3339).
    pub time: String,
    /// When it was last seen (RFC 3339).
    pub last: String,
    /// How often.
    pub count: u64,
    /// `normal` or `warning`.
    pub level: String,
    /// Stable reason, CamelCase.
    pub reason: String,
    /// Tenant concerned.
    pub tenant: Option<String>,
    /// Service concerned.
    pub service: Option<String>,
    /// Text.
    pub message: String,
    /// It lasts.
    pub active: bool,
}

/// Names of the ids in the maps. The agent serves them and keeps them in `names.json` of its state directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Names {
    /// The hub.
    pub hub: String,
    /// Segments by id.
    pub segments: BTreeMap<u16, SegmentLabel>,
    /// Tenants by index.
    pub tenants: BTreeMap<u16, String>,
    /// Frontends by id.
    pub frontends: BTreeMap<u16, FrontendLabel>,
    /// Names of nodes by address.
    pub nodes: BTreeMap<IpAddr, String>,
}

/// A segment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SegmentLabel {
    /// Interface.
    pub interface: String,
    /// VLAN id, 0 = untagged.
    pub vlan: u16,
    /// Clients arrive here.
    pub tenant_side: bool,
    /// Nodes live here.
    pub hub_side: bool,
}

/// A frontend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FrontendLabel {
    /// Name: the file's, or `namespace/name`.
    pub name: String,
    /// `namespace/name` of the Service.
    pub service: Option<String>,
    /// Tenant index.
    pub tenant: u16,
}

impl FrontendLabel {
    /// What `lbctl` shows: the Service, else the name.
    pub fn label(&self) -> &str {
        self.service.as_deref().unwrap_or(&self.name)
    }
}

/// Asks for the end of flows: those that fit everything that is given, in the words of `lbctl flows`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KillRequest {
    /// Tenant.
    pub tenant: Option<String>,
    /// VIP: address, `address:port` or prefix.
    pub vip: Option<String>,
    /// Client: address, `address:port` or prefix.
    pub client: Option<String>,
    /// Backend: address, `address:port` or prefix.
    pub backend: Option<String>,
    /// Service or frontend.
    pub service: Option<String>,
    /// IP protocol number.
    pub protocol: Option<u8>,
    /// State.
    pub state: Option<String>,
    /// Seconds since it was opened, at least.
    pub older_s: Option<u64>,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KillReply {
    /// Flows that have ended by this.
    pub killed: u64,
}

/// Asks for a reload of the configuration file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReloadRequest {
    /// Only say what would change.
    pub dry_run: bool,
    /// Go on although live flows are cut.
    pub accept_loss: bool,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReloadReply {
    /// See [`reload_outcome`].
    pub outcome: String,
    /// Why it was refused; may have several lines.
    pub error: Option<String>,
    /// What changes, one line each.
    pub changes: Vec<String>,
    /// Live flows that are cut.
    pub flows_cut: u64,
}

/// Values of [`ReloadReply::outcome`].
pub mod reload_outcome {
    /// In force.
    pub const APPLIED: &str = "applied";
    /// The file is what was in force already.
    pub const UNCHANGED: &str = "unchanged";
    /// Dry run: it would be applied.
    pub const WOULD_APPLY: &str = "would_apply";
    /// The file is wrong.
    pub const INVALID: &str = "invalid";
    /// Something changed that only a restart can change.
    pub const RESTART: &str = "restart_required";
    /// Something changed that only a migration of the maps can change.
    pub const MIGRATION: &str = "migration_required";
    /// Live flows would be cut, and that was not accepted.
    pub const LOSS: &str = "loss_not_accepted";
    /// The host or the datapath refused.
    pub const FAILED: &str = "failed";
}

/// Asks that a Service be taken over although it shows an address that is not ours.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdoptRequest {
    /// `namespace/name`.
    pub service: String,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdoptReply {
    /// `namespace/name`.
    pub service: String,
    /// Its UID.
    pub uid: String,
    /// The addresses that it has now; empty = none yet, `lbctl events` says why.
    pub addresses: Vec<IpAddr>,
}

/// What came of accepting the cluster that is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AcceptClusterReply {
    /// UID of its namespace `kube-system`.
    pub uid: String,
}

/// Body of an answer that is not a success.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// Why.
    pub error: String,
}
