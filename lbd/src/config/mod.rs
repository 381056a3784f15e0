//! The configuration file: YAML → typed, validated [`Config`], with line and column in every error.

mod document;
mod error;
mod fields;
mod host;
mod read;
mod reload;
mod unsupported;
mod validate;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use self::error::Mistake;
pub use self::error::{ConfigError, Origin, Position};
pub use self::host::{Problem, Severity, check_host};
pub use self::reload::changes_needing_restart;

/// A validated configuration. Everything that the file alone can prove wrong has been refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Management clusters; exactly one.
    pub hub: Hub,
    /// Tenants in file order.
    pub tenants: Vec<Tenant>,
    /// Timeouts at `defaults`: of every flow whose frontend says nothing else.
    pub timeouts: Timeouts,
    /// Datapath settings.
    pub datapath: Datapath,
    /// Annotations (besides our own) whose value is a requested address.
    pub address_annotations: Vec<String>,
    /// Where state survives restarts.
    pub state_dir: PathBuf,
    /// The agent's Unix socket.
    pub socket: PathBuf,
    /// Where metrics are served.
    pub metrics: SocketAddr,
    /// The file it came from; equal for all.
    pub origin: Origin,
}

/// The largest file that is read: far more than a host can serve, far less than memory.
const MAX_BYTES: u64 = 8 * 1024 * 1024;

/// Reads and validates a file.
///
/// Fails on the first thing in it that is wrong, or when it cannot be read, is not UTF-8 or is larger than 8 MiB.
pub fn load(path: &Path) -> Result<Config, ConfigError> {
    let file = path.display().to_string();
    let unreadable = |message: String| ConfigError { file: file.clone(), position: None, message, line: None };
    let mut bytes = Vec::new();
    File::open(path).and_then(|opened| opened.take(MAX_BYTES + 1).read_to_end(&mut bytes)).map_err(|error| {
        unreadable(format!("the configuration cannot be read: {error}: correct the path or its permissions"))
    })?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(unreadable(format!(
            "the configuration is larger than {} MiB: is this the right file?",
            MAX_BYTES / (1024 * 1024)
        )));
    }
    parse_bytes(&bytes, &file)
}

/// Reads and validates a configuration; `file` is only named in errors.
pub fn parse(text: &str, file: &str) -> Result<Config, ConfigError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut config = document::parse(text)
        .and_then(|root| read::config(&root, file))
        .map_err(|mistake| mistake.in_file(file, text))?;
    validate::validate(&mut config).map_err(|mistake| mistake.in_file(file, text))?;
    Ok(config)
}

fn parse_bytes(bytes: &[u8], file: &str) -> Result<Config, ConfigError> {
    match str::from_utf8(bytes) {
        Ok(text) => parse(text, file),
        Err(error) => {
            let good = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
            let line = good.matches('\n').count() + 1;
            let column = good.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
            let message = "this is not UTF-8 text: save the file as UTF-8";
            Err(Mistake::new(Position { line, column }, message).in_file(file, &good))
        }
    }
}

impl Config {
    /// Every segment once: the hub's and the tenants'.
    pub fn segment_names(&self) -> BTreeSet<SegmentName> {
        self.tenants.iter().map(|tenant| &tenant.segment).chain([&self.hub.segment]).cloned().collect()
    }

    /// Every interface once: what the datapath attaches to.
    pub fn interfaces(&self) -> BTreeSet<&str> {
        self.tenants
            .iter()
            .map(|tenant| &tenant.segment)
            .chain([&self.hub.segment])
            .map(|s| s.interface.as_str())
            .collect()
    }

    /// Interfaces that carry VLAN segments.
    fn tagged(&self) -> BTreeSet<&str> {
        let segments = self.tenants.iter().map(|tenant| &tenant.segment).chain([&self.hub.segment]);
        segments.filter(|segment| segment.vlan.is_some()).map(|segment| segment.interface.as_str()).collect()
    }

    /// SNAT addresses that the file names, with the segments in which they are used.
    pub fn source_addresses(&self) -> BTreeSet<(SegmentName, IpAddr)> {
        let mut all = validate::sources(self);
        all.extend(self.hub.snat.iter().map(|&address| (self.hub.segment.clone(), address)));
        all
    }

    /// A tenant by name.
    pub fn tenant(&self, name: &str) -> Option<&Tenant> {
        self.tenants.iter().find(|tenant| tenant.name == name)
    }
}

impl Tenant {
    /// A frontend of the file by name.
    pub fn frontend(&self, name: &str) -> Option<&Frontend> {
        self.frontends.iter().find(|frontend| frontend.name == name)
    }

    /// The host's address and prefix in the segment, of a family, if the file says it.
    pub fn address(&self, v6: bool) -> Option<IpNet> {
        self.addresses.iter().copied().find(|net| net.addr().is_ipv6() == v6)
    }

    /// The gateway of a family, if the file says it.
    pub fn gateway(&self, v6: bool) -> Option<IpAddr> {
        self.gateways.iter().copied().find(|gateway| gateway.is_ipv6() == v6)
    }

    /// Whether the address is in a pool and not to be avoided.
    pub fn may_hand_out(&self, address: IpAddr) -> bool {
        self.pools.iter().any(|range| range.contains(address))
            && !self.avoid.iter().any(|range| range.contains(address))
    }

    /// What may be handed out of these ranges, in order. Lazy: a range may hold a /64, and what is avoided of it is passed over at once.
    pub fn candidates<'a>(&'a self, ranges: &'a [AddressRange]) -> impl Iterator<Item = IpAddr> + 'a {
        ranges.iter().flat_map(move |range| {
            let mut next = Some(range.first);
            std::iter::from_fn(move || {
                let mut address = next.filter(|address| range.contains(*address))?;
                while let Some(avoided) = self.avoid.iter().find(|avoided| avoided.contains(address)) {
                    address = following(avoided.last).filter(|address| range.contains(*address))?;
                }
                next = following(address);
                Some(address)
            })
        })
    }
}

/// The next address of the family.
pub fn following(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(address) => address.to_bits().checked_add(1).map(|bits| Ipv4Addr::from_bits(bits).into()),
        IpAddr::V6(address) => address.to_bits().checked_add(1).map(|bits| Ipv6Addr::from_bits(bits).into()),
    }
}

/// A layer-2 network the host is attached to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentName {
    /// Interface name.
    pub interface: String,
    /// VLAN id; `None` is untagged.
    pub vlan: Option<u16>,
}

impl fmt::Display for SegmentName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.vlan {
            Some(vlan) => write!(formatter, "{}.{vlan}", self.interface),
            None => formatter.write_str(&self.interface),
        }
    }
}

/// A management cluster and its segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hub {
    /// Name, as in `lbctl flows`.
    pub name: String,
    /// Where the nodes live.
    pub segment: SegmentName,
    /// SNAT addresses of both families; none of a family = the interface's primary address.
    pub snat: Vec<IpAddr>,
    /// SNAT ports, first and last.
    pub snat_ports: (u16, u16),
    /// Prefixes that node addresses must be in; empty = the interface's prefixes.
    pub node_cidrs: Vec<IpNet>,
    /// How to reach the cluster; `None` = the file is all there is.
    pub kubernetes: Option<Kubernetes>,
}

/// Access to a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kubernetes {
    /// Kubeconfig file.
    pub kubeconfig: PathBuf,
    /// Accept a server certificate that does not verify.
    pub allow_insecure: bool,
    /// How long new connections are accepted while nothing is heard of the cluster; `None` = for ever.
    pub max_blind: Option<Duration>,
}

/// A tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Name.
    pub name: String,
    /// Where its clients are.
    pub segment: SegmentName,
    /// The host's addresses and prefixes in the segment, at most one per family; empty = learnt from the interface.
    pub addresses: Vec<IpNet>,
    /// Gateways to off-link clients, at most one per family; what is missing is learnt from the routing table.
    pub gateways: Vec<IpAddr>,
    /// VIP pools: inclusive ranges.
    pub pools: Vec<AddressRange>,
    /// Addresses in the pools that are never handed out.
    pub avoid: Vec<AddressRange>,
    /// Which Services are this tenant's.
    pub claims: Vec<Claim>,
    /// Limits.
    pub limits: Limits,
    /// What may reach the host's own address.
    pub host_access: HostAccess,
    /// Frontends in file order.
    pub frontends: Vec<Frontend>,
    /// Settings of frontends that come from claims (already merged with `defaults`).
    pub settings: FrontendSettings,
}

/// An inclusive range of addresses of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AddressRange {
    /// First.
    pub first: IpAddr,
    /// Last.
    pub last: IpAddr,
}

impl fmt::Display for AddressRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            write!(formatter, "{}", self.first)
        } else {
            write!(formatter, "{}-{}", self.first, self.last)
        }
    }
}

impl AddressRange {
    /// Whether the address is in the range (never across families).
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.first, self.last, address) {
            (IpAddr::V4(first), IpAddr::V4(last), IpAddr::V4(address)) => first <= address && address <= last,
            (IpAddr::V6(first), IpAddr::V6(last), IpAddr::V6(address)) => first <= address && address <= last,
            (IpAddr::V4(_) | IpAddr::V6(_), ..) => false,
        }
    }
}

/// A rule that makes Services a tenant's. All parts that are present must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Namespace names; empty = any that the selectors allow.
    pub namespaces: Vec<String>,
    /// Labels that the namespace must have.
    pub namespace_labels: BTreeMap<String, String>,
    /// Labels that the Service must have.
    pub service_labels: BTreeMap<String, String>,
    /// How backends are derived; `None` = from the Service itself.
    pub mode: Option<Mode>,
    /// Limits for Services that guests made.
    pub guest: Guest,
}

impl fmt::Display for Claim {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let labels = |labels: &BTreeMap<String, String>| {
            labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
        };
        let mut parts = Vec::new();
        if !self.namespaces.is_empty() {
            parts.push(format!("in namespaces {}", self.namespaces.join(", ")));
        }
        if !self.namespace_labels.is_empty() {
            parts.push(format!("in namespaces with {}", labels(&self.namespace_labels)));
        }
        if !self.service_labels.is_empty() {
            parts.push(format!("with {}", labels(&self.service_labels)));
        }
        formatter.write_str(&parts.join(" "))
    }
}

/// Limits for Services that a guest cluster made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guest {
    /// How many VIPs they may hold together.
    pub max_vips: Option<u32>,
    /// Which VIPs; empty = the tenant's pools.
    pub pools: Vec<AddressRange>,
}

/// A tenant's limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Live flows in each family; `None` = half of the family's table.
    pub flows: Option<u32>,
    /// Live UDP flows in each family; `None` = a quarter of the flows.
    pub udp_flows: Option<u32>,
    /// New connections per second, both families.
    pub new_flows_per_second: Option<u32>,
}

/// What may reach the host's own address on a tenant segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HostAccess {
    /// Everything to the host's address in that segment.
    #[default]
    Own,
    /// Nothing.
    None,
    /// These TCP ports, and ICMP if said.
    Only {
        /// TCP ports.
        ports: Vec<u16>,
        /// ICMP.
        icmp: bool,
    },
}

/// A frontend (or reservation) of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frontend {
    /// Name, unique in its tenant.
    pub name: String,
    /// The Service behind it, `(namespace, name)`.
    pub service: Option<(String, String)>,
    /// The address; may be missing only with `service`.
    pub vip: Option<IpAddr>,
    /// Ports; empty = all of the Service's.
    pub ports: Vec<FrontendPort>,
    /// Backends when there is no Service.
    pub backends: Vec<StaticBackend>,
    /// Where the backends live.
    pub via: Via,
    /// How backends are derived from the Service; `None` = from the Service itself.
    pub mode: Option<Mode>,
    /// Settings.
    pub settings: FrontendSettings,
}

/// A port of a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontendPort {
    /// Port that clients connect to.
    pub port: u16,
    /// Port on the backends; `None` = the Service's NodePort, or `port` when there is no Service.
    pub target: Option<u16>,
    /// Port of the Service that it stands for; `None` = the same as `port`.
    pub service_port: Option<u16>,
    /// Protocol.
    pub protocol: Protocol,
}

/// Transport protocols that lbd forwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    /// IP protocol number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }

    /// `TCP` or `UDP`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        }
    }
}

/// A backend of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaticBackend {
    /// Address.
    pub address: IpAddr,
    /// Port, if not the frontend's target.
    pub port: Option<u16>,
    /// Weight, 1–100; 0 = no new connections.
    pub weight: u16,
}

/// Where backends live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Via {
    /// In the hub's segment.
    #[default]
    Hub,
    /// In the tenant's own segment.
    Tenant,
}

/// How backends are derived from a Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Node address : NodePort.
    #[default]
    Nodes,
    /// Endpoint address : slice port.
    Endpoints,
}

/// Settings that can stand at `defaults`, at a tenant and at a frontend; the innermost wins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontendSettings {
    /// Backend choice; `None` = the Service's `sessionAffinity`, else by flow.
    pub affinity: Option<Affinity>,
    /// DNAT only.
    pub preserve_client: bool,
    /// What a client without a backend gets.
    pub unserved: Unserved,
    /// What happens when all backends fail their probes.
    pub all_down: AllDown,
    /// What happens to flows of a backend that goes down.
    pub on_down: OnDown,
    /// `ipMode` in the Service status.
    pub ip_mode: Option<IpMode>,
    /// Whether flows without state may be adopted.
    pub adopt: Adopt,
    /// SNAT addresses other than the hub's, in the segment where the backends live; none of a family = the hub's, or with `via: tenant` the
    /// host's own.
    pub snat: Vec<IpAddr>,
    /// Who may connect; empty = everybody.
    pub source_ranges: Vec<IpNet>,
    /// Probes.
    pub health: Probe,
    /// Timeouts.
    pub timeouts: Timeouts,
}

/// Which client addresses and ports reach the same backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Affinity {
    /// By client address and port.
    Flow,
    /// By client address.
    Source,
}

/// Answer where nothing serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unserved {
    /// RST or ICMP.
    #[default]
    Reject,
    /// Silence.
    Drop,
}

/// Policy when all backends fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AllDown {
    /// Spread over all eligible ones.
    #[default]
    Try,
    /// Refuse.
    Reject,
}

/// Policy for flows of a failed backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDown {
    /// Leave them.
    #[default]
    Keep,
    /// Reset them.
    Reset,
}

/// `ipMode` of a Service status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IpMode {
    /// `VIP`.
    Vip,
    /// `Proxy`.
    Proxy,
}

/// Adoption of flows without state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Adopt {
    /// Never.
    #[default]
    Never,
    /// For five minutes after a takeover or a start with lost tables.
    Takeover,
}

/// How a backend is probed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Probe {
    /// What is done.
    pub kind: ProbeKind,
    /// Port to probe, if not the target's.
    pub port: Option<ProbePort>,
    /// Path (HTTP).
    pub path: String,
    /// Host or server name.
    pub host: Option<String>,
    /// Accepted codes (HTTP); empty = 200–399.
    pub expect: Vec<u16>,
    /// Pause between probes.
    pub interval: Duration,
    /// Limit for one probe.
    pub timeout: Duration,
    /// Failures until down.
    pub fall: u32,
    /// Successes until up.
    pub rise: u32,
    /// Pause while the state is in doubt.
    pub fast_interval: Duration,
    /// File with the authorities that the server's certificate must come from (TLS); `None` = any certificate will do.
    pub ca: Option<PathBuf>,
}

/// Kinds of probe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProbeKind {
    /// Connect.
    #[default]
    Tcp,
    /// `GET`.
    Http,
    /// `GET` over TLS.
    Https,
    /// TLS handshake.
    Tls,
    /// The health port of a Service with `externalTrafficPolicy: Local`: 200 and a positive count. Not to be written in the file.
    LocalEndpoints,
}

/// A port to probe.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProbePort {
    /// This number, on the backend.
    Number(u16),
    /// The NodePort of the Service port with this name.
    Name(String),
}

/// Timeouts of flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Timeouts {
    /// Established TCP; at least 2 h 4 min (RFC 5382 REQ-5).
    pub tcp_established: Duration,
    /// Half-open TCP.
    pub tcp_half_open: Duration,
    /// TCP after FIN both ways.
    pub tcp_fin: Duration,
    /// TCP after RST.
    pub tcp_reset: Duration,
    /// UDP without a reply.
    pub udp_unreplied: Duration,
    /// UDP with replies.
    pub udp_replied: Duration,
}

/// Datapath settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datapath {
    /// XDP mode.
    pub mode: XdpMode,
    /// IPv4 flows.
    pub max_flows: u32,
    /// IPv6 flows.
    pub max_flows_v6: u32,
    /// Where bpffs is mounted.
    pub bpffs: PathBuf,
    /// MSS clamping.
    pub mss_clamp: MssClamp,
    /// Between two announcements of an address, after the first ones.
    pub announce_interval: Duration,
}

/// XDP mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum XdpMode {
    /// Native, else generic with a warning.
    #[default]
    Auto,
    /// Native or nothing.
    Native,
    /// Generic.
    Generic,
}

/// MSS clamping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MssClamp {
    /// To the smaller NIC.
    #[default]
    Auto,
    /// Not at all.
    Off,
    /// To this value.
    Value(u16),
}

#[cfg(test)]
mod tests;
