//! Nodes of the file → [`Config`]: keys, types, defaults and merging. What objects say about each other is checked in
//! [`super::validate`].

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use rustls::pki_types::ServerName;

use super::document::{Node, Value};
use super::error::{Mistake, Position, quote};
use super::fields::{Item, Object, Positions, Result, is_label_key, show_duration};
use super::unsupported::Unsupported;
use super::{
    AddressRange, Adopt, Affinity, AllDown, Claim, Config, Datapath, Frontend, FrontendPort, FrontendSettings, Guest,
    HostAccess, Hub, IpMode, Kubernetes, Limits, Mode, MssClamp, OnDown, Origin, Probe, ProbeKind, ProbePort, Protocol,
    SegmentName, StaticBackend, Tenant, Timeouts, Unserved, Via, XdpMode,
};

/// Entries of the IPv4 flow table: two per flow must fit in what a map can hold.
const MAX_FLOWS: RangeInclusive<u32> = 64..=33_554_432;
/// RFC 5382 REQ-5: an established connection may be idle for 2 hours 4 minutes.
const ESTABLISHED: RangeInclusive<Duration> = Duration::from_mins(124)..=Duration::from_hours(30 * 24);
/// Bounds of the other timeouts of flows.
const TRANSIENT: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_hours(1);
/// Bounds of the announcement interval: a new address is announced three times in two seconds anyway.
const ANNOUNCE: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_hours(1);
/// Bounds of all times of a probe.
const PROBE: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_hours(1);

const SETTINGS: [&str; 11] = [
    "affinity",
    "preserve_client",
    "unserved",
    "all_down",
    "on_down",
    "ip_mode",
    "timeouts",
    "adopt",
    "snat",
    "source_ranges",
    "health",
];

/// Reads the whole file.
pub(super) fn config(root: &Node, file: &str) -> Result<Config> {
    let positions: Positions = RefCell::new(BTreeMap::new());
    let mut config = read(&Item::root(root, &positions))?;
    config.origin = Origin { file: file.to_owned(), positions: positions.into_inner() };
    Ok(config)
}

fn read(root: &Item<'_>) -> Result<Config> {
    version(root)?;
    let file = root.object(&[
        "version",
        "hubs",
        "tenants",
        "defaults",
        "datapath",
        "address_annotations",
        "state_dir",
        "socket",
        "metrics",
    ])?;
    let hub = hub(&file)?;
    let defaults = match file.get("defaults") {
        Some(item) => inherit(&item.object(&SETTINGS)?, &Settings::default())?,
        None => Settings::default(),
    };
    let timeouts = defaults.finish()?.timeouts;
    let tenants = file.required("tenants", "a list of tenants")?;
    let items = tenants.list("tenants")?;
    if items.is_empty() {
        return Err(tenants.wrong("is empty: write at least one tenant"));
    }
    let tenants = items.iter().map(|item| tenant(item, &defaults)).collect::<Result<_>>()?;
    Ok(Config {
        hub,
        tenants,
        timeouts,
        datapath: datapath(&file)?,
        address_annotations: address_annotations(&file)?,
        state_dir: path(&file, "state_dir", "/var/lib/lbd")?,
        socket: socket(&file)?,
        metrics: metrics(&file)?,
        origin: Origin::default(),
    })
}

/// Comes first: the keys of another version are not known here.
fn version(root: &Item<'_>) -> Result<()> {
    if !root.is_map() {
        return Err(
            root.wrong("the file is not a map: write `version: 1`, `hubs: …` and `tenants: …`, each on its line")
        );
    }
    let Some((key, node)) = root.entries()?.iter().find(|(key, _)| key.text == "version") else {
        return Err(root.wrong("`version` is missing: write `version: 1`"));
    };
    match &node.value {
        Value::Scalar { text, .. } if text == "1" => Ok(()),
        Value::Scalar { .. } if node.is_null() => {
            Err(Mistake::new(key.at, "version: has no value: write `version: 1`"))
        }
        Value::Scalar { .. } | Value::List(_) | Value::Map(_) => Err(Mistake::new(
            node.at,
            format!("version: {} is not known to this lbd, which reads version 1: write `version: 1`", node.kind()),
        )),
    }
}

fn hub(file: &Object<'_>) -> Result<Hub> {
    let hubs = file.required("hubs", "a list with one hub")?;
    let items = hubs.list("hubs")?;
    let item = match items.as_slice() {
        [] => return Err(hubs.wrong("is empty: write exactly one hub")),
        [item] => item,
        [_, second, ..] => return Err(second.wrong("is a second hub, but exactly one is possible for now: remove it")),
    };
    let hub =
        item.named_object("hub", &["name", "interface", "vlan", "snat", "snat_ports", "node_cidrs", "kubernetes"])?;
    let segment = SegmentName {
        interface: hub.required("interface", "the interface that the nodes are behind")?.interface()?,
        vlan: vlan(&hub)?,
    };
    Ok(Hub {
        name: hub.required("name", "a name for the hub")?.name()?,
        segment,
        snat: hub.get("snat").map_or(Ok(Vec::new()), |list| snat(&list))?,
        snat_ports: hub.get("snat_ports").map_or(Ok((1024, 32_767)), |item| item.port_range(1024))?,
        node_cidrs: match hub.get("node_cidrs") {
            Some(list) => list.list("prefixes")?.iter().map(Item::cidr).collect::<Result<_>>()?,
            None => Vec::new(),
        },
        kubernetes: hub.get("kubernetes").map(|item| kubernetes(&item)).transpose()?,
    })
}

fn snat(list: &Item<'_>) -> Result<Vec<IpAddr>> {
    let mut addresses = Vec::new();
    for item in list.list("addresses")? {
        let address = item.address()?;
        if addresses.contains(&address) {
            return Err(item.wrong(format!("{address} is there twice: remove one")));
        }
        addresses.push(address);
    }
    Ok(addresses)
}

/// Bounds of `max_blind`: not so short that a server which restarts closes everything.
const MAX_BLIND: RangeInclusive<Duration> = Duration::from_secs(10)..=Duration::from_hours(24 * 365);

fn kubernetes(item: &Item<'_>) -> Result<Kubernetes> {
    let kubernetes = item.object(&["kubeconfig", "allow_insecure", "max_blind"])?;
    Ok(Kubernetes {
        kubeconfig: kubernetes.required("kubeconfig", "the path of a kubeconfig file")?.path()?,
        allow_insecure: kubernetes.get("allow_insecure").map_or(Ok(false), |item| item.truth())?,
        max_blind: kubernetes.get("max_blind").map(|item| item.duration(MAX_BLIND)).transpose()?,
    })
}

fn vlan(object: &Object<'_>) -> Result<Option<u16>> {
    object.get("vlan").map(|item| item.number(1..=4094).map(|id| id as u16)).transpose()
}

fn tenant(item: &Item<'_>, defaults: &Settings) -> Result<Tenant> {
    let mut known = vec!["name", "segment", "pools", "avoid", "claim", "limits", "host_access", "frontends"];
    known.extend(SETTINGS);
    let tenant = item.named_object("tenant", &known)?;
    let name = tenant.required("name", "a name for the tenant")?.name()?;
    let segment =
        tenant.required("segment", "{ interface: … }")?.object(&["interface", "vlan", "address", "gateway"])?;
    let ranges = |key: &str| match tenant.get(key) {
        Some(list) => list.list("ranges or prefixes")?.iter().map(Item::range).collect::<Result<_>>(),
        None => Ok(Vec::new()),
    };
    let segment_name = SegmentName {
        interface: segment.required("interface", "the interface that the tenant's clients are behind")?.interface()?,
        vlan: vlan(&segment)?,
    };
    let addresses = match segment.get("address") {
        Some(item) => {
            item.by_family("an address of each family", Item::address_with_prefix, |net| net.addr().is_ipv6())?
        }
        None => Vec::new(),
    };
    let gateways = match segment.get("gateway") {
        Some(item) => item.by_family("a gateway of each family", Item::router, IpAddr::is_ipv6)?,
        None => Vec::new(),
    };
    let (pools, avoid) = (ranges("pools")?, ranges("avoid")?);
    let claims = match tenant.get("claim") {
        Some(list) => list.list("claims")?.iter().map(claim).collect::<Result<_>>()?,
        None => Vec::new(),
    };
    let limits = tenant.get("limits").map_or(Ok(Limits::default()), |item| limits(&item))?;
    let host_access = tenant.get("host_access").map_or(Ok(HostAccess::Own), |item| host_access(&item))?;
    let settings = inherit(&tenant, defaults)?;
    let mut frontends = Vec::new();
    if let Some(list) = tenant.get("frontends") {
        for item in list.list("frontends")? {
            frontends.push(frontend(&item, &settings)?);
        }
    }
    Ok(Tenant {
        name,
        segment: segment_name,
        addresses,
        gateways,
        pools,
        avoid,
        claims,
        limits,
        host_access,
        frontends,
        settings: settings.finish()?,
    })
}

fn claim(item: &Item<'_>) -> Result<Claim> {
    let claim = item.object(&["namespaces", "namespace_selector", "service_selector", "mode", "guest"])?;
    let mut namespaces = Vec::new();
    if let Some(list) = claim.get("namespaces") {
        for item in list.list("namespaces")? {
            let namespace = item.label("a namespace")?;
            if namespaces.contains(&namespace) {
                return Err(item.wrong(format!("namespace {namespace} is there twice: remove one")));
            }
            namespaces.push(namespace);
        }
    }
    let selector = |key: &str| claim.get(key).map_or(Ok(BTreeMap::new()), |item| item.selector());
    let (namespace_labels, service_labels) = (selector("namespace_selector")?, selector("service_selector")?);
    if namespaces.is_empty() && namespace_labels.is_empty() && service_labels.is_empty() {
        return Err(claim.wrong(
            "would take every Service of the cluster: write namespaces, namespace_selector or service_selector",
        ));
    }
    let guest = match claim.get("guest") {
        Some(item) => {
            let guest = item.object(&["max_vips", "pools"])?;
            Guest {
                max_vips: guest.get("max_vips").map(|item| item.number(0..=65_535)).transpose()?,
                pools: match guest.get("pools") {
                    Some(list) => guest_pools(&list)?,
                    None => Vec::new(),
                },
            }
        }
        None => Guest::default(),
    };
    let mode = claim.get("mode").map(|item| mode(&item)).transpose()?;
    Ok(Claim { namespaces, namespace_labels, service_labels, mode, guest })
}

fn guest_pools(list: &Item<'_>) -> Result<Vec<AddressRange>> {
    let items = list.list("ranges or prefixes")?;
    if items.is_empty() {
        return Err(list.wrong("is empty: write ranges of the tenant's pools, or remove it for all of them"));
    }
    items.iter().map(Item::range).collect()
}

fn mode(item: &Item<'_>) -> Result<Mode> {
    item.choice(&[("nodes", Mode::Nodes), ("endpoints", Mode::Endpoints)])
}

fn limits(item: &Item<'_>) -> Result<Limits> {
    let limits = item.object(&["flows", "udp_flows", "new_flows_per_second"])?;
    Ok(Limits {
        flows: limits.get("flows").map(|item| item.number(1..=*MAX_FLOWS.end())).transpose()?,
        udp_flows: limits.get("udp_flows").map(|item| item.number(1..=*MAX_FLOWS.end())).transpose()?,
        new_flows_per_second: limits
            .get("new_flows_per_second")
            .map(|item| item.number(1..=100_000_000))
            .transpose()?,
    })
}

fn host_access(item: &Item<'_>) -> Result<HostAccess> {
    if item.scalar().is_some() {
        let own = item.choice(&[("own", true), ("none", false)])?;
        return Ok(if own { HostAccess::Own } else { HostAccess::None });
    }
    let items = item.list("ports and `icmp`, or own, or none,")?;
    if items.is_empty() {
        return Err(item.wrong("is empty: write none to let nothing in, or own for everything"));
    }
    let (mut ports, mut icmp) = (BTreeSet::new(), false);
    for item in &items {
        if item.text("a port or icmp")? == "icmp" {
            icmp = true;
            continue;
        }
        ports.insert(item.port().map_err(|_| {
            item.wrong(format!(
                "{} is neither a port nor icmp: write one of them",
                quote(item.scalar().unwrap_or_default())
            ))
        })?);
    }
    Ok(HostAccess::Only { ports: ports.into_iter().collect(), icmp })
}

fn frontend(item: &Item<'_>, outer: &Settings) -> Result<Frontend> {
    let mut known = vec!["name", "service", "vip", "ports", "backends", "via", "mode"];
    known.extend(SETTINGS);
    let frontend = item.named_object("frontend", &known)?;
    let name = frontend.required("name", "a name for the frontend")?.name()?;
    let service = frontend.get("service").map(|item| item.service()).transpose()?;
    let vip = frontend.get("vip").map(|item| item.address()).transpose()?;
    if service.is_none() && vip.is_none() {
        return Err(
            frontend.wrong("`vip` is missing: write vip: an address (only a frontend with `service` can do without)")
        );
    }
    let backends = match (frontend.get("backends"), &service) {
        (Some(list), Some(_)) => {
            return Err(list.wrong("a frontend has a Service or backends, not both: remove `backends` or `service`"));
        }
        (Some(list), None) => backends(&list)?,
        (None, Some(_)) => Vec::new(),
        (None, None) => {
            return Err(frontend.wrong(
                "has neither `service` nor `backends`: write service: namespace/name, or backends: a list of addresses",
            ));
        }
    };
    let ports = ports(&frontend, service.is_some())?;
    if let Some(list) = frontend.get("backends")
        && let Some(index) = backends.iter().position(|backend| backend.port.is_some())
        && ports.len() > 1
    {
        return Err(list.list("backends")?[index].wrong(
            "has a port of its own, but the frontend has several: write `target` at the ports, or one frontend per port",
        ));
    }
    let mode = match frontend.get("mode") {
        Some(item) => {
            let mode = mode(&item)?;
            if service.is_none() {
                return Err(item.wrong("is for frontends with `service`, and this one has backends: remove it"));
            }
            Some(mode)
        }
        None => None,
    };
    let endpoints = mode == Some(Mode::Endpoints);
    let via = match frontend.get("via") {
        Some(item) => {
            let via = item.choice(&[("hub", Via::Hub), ("tenant", Via::Tenant)])?;
            if via == Via::Tenant && service.is_some() && !endpoints {
                return Err(item.wrong("the nodes of a Service are behind the hub: remove it or write hub"));
            }
            if via == Via::Hub && endpoints {
                return Err(
                    item.wrong("endpoints of a Service are reached in the tenant's segment: remove it or write tenant")
                );
            }
            via
        }
        None if endpoints => Via::Tenant,
        None => Via::Hub,
    };
    let mut settings = inherit(&frontend, outer)?;
    if via == Via::Tenant && frontend.get("snat").is_none() {
        // Those around it are of the hub's segment.
        settings.snat.clear();
    }
    if service.is_none()
        && let Some((ProbePort::Name(port), _)) = &settings.probe.port
    {
        let message = format!(
            "its probe goes to port {port}, which is the name of a Service port, but it has no Service: write health: {{ port: \
             NUMBER }}"
        );
        return Err(match frontend.get("health").and_then(|health| health.object(&PROBE_KEYS).ok()?.get("port")) {
            Some(port) => port.wrong(message),
            None => frontend.wrong(message),
        });
    }
    Ok(Frontend { name, service, vip, ports, backends, via, mode, settings: settings.finish()? })
}

fn ports(frontend: &Object<'_>, of_service: bool) -> Result<Vec<FrontendPort>> {
    let list = match frontend.get("ports") {
        Some(list) => list,
        None if of_service => return Ok(Vec::new()),
        None => {
            return Err(
                frontend.wrong("`ports` is missing: write ports: a list such as [443, { port: 80, target: 8080 }]")
            );
        }
    };
    let items = list.list("ports")?;
    if items.is_empty() && of_service {
        return Err(list.wrong("is empty: write the ports, or remove it for all ports of the Service"));
    }
    if items.is_empty() {
        return Err(list.wrong("is empty: write at least one port"));
    }
    let mut ports = Vec::new();
    for item in &items {
        ports.push(port(item, of_service)?);
    }
    Ok(ports)
}

fn port(item: &Item<'_>, of_service: bool) -> Result<FrontendPort> {
    if !item.is_map() {
        return Ok(FrontendPort { port: item.port()?, target: None, service_port: None, protocol: Protocol::Tcp });
    }
    let port = item.object(&["port", "target", "service_port", "protocol"])?;
    let protocol = match port.get("protocol") {
        Some(item) => item
            .choice(&[("TCP", Some(Protocol::Tcp)), ("UDP", Some(Protocol::Udp)), ("SCTP", None)])?
            .ok_or_else(|| item.unsupported(Unsupported::Sctp))?,
        None => Protocol::Tcp,
    };
    let target = match port.get("target") {
        Some(item) if of_service => {
            return Err(item.wrong("is the Service's NodePort, which lbd follows: remove it"));
        }
        Some(item) => Some(item.port()?),
        None => None,
    };
    let service_port = match port.get("service_port") {
        Some(item) if !of_service => {
            return Err(
                item.wrong("is for frontends with `service`, and this one has backends: remove it, or write target")
            );
        }
        Some(item) => Some(item.port()?),
        None => None,
    };
    let number = port.required("port", "the port that clients connect to")?.port()?;
    Ok(FrontendPort { port: number, target, service_port, protocol })
}

fn backends(list: &Item<'_>) -> Result<Vec<StaticBackend>> {
    let items = list.list("addresses")?;
    if items.is_empty() {
        return Err(list.wrong("is empty: write at least one backend"));
    }
    let mut backends: Vec<StaticBackend> = Vec::new();
    for item in &items {
        let backend = if item.is_map() {
            let backend = item.object(&["address", "port", "weight"])?;
            StaticBackend {
                address: backend.required("address", "the backend's address")?.address()?,
                port: backend.get("port").map(|item| item.port()).transpose()?,
                weight: backend.get("weight").map_or(Ok(1), |item| item.number(0..=100))? as u16,
            }
        } else {
            if let Some(socket) = item.scalar().and_then(|text| text.parse::<SocketAddr>().ok()) {
                return Err(item.wrong(format!(
                    "{socket} is not an address: write {{ address: {}, port: {} }}, or `target` at the port",
                    socket.ip(),
                    socket.port()
                )));
            }
            StaticBackend { address: item.address()?, port: None, weight: 1 }
        };
        if backends.iter().any(|other| (other.address, other.port) == (backend.address, backend.port)) {
            return Err(
                item.wrong(format!("{} is there twice: remove one, or give one of them a `weight`", backend.address))
            );
        }
        backends.push(backend);
    }
    Ok(backends)
}

/// Settings as they are merged: what has not been written anywhere is `None`.
#[derive(Clone, Default)]
struct Settings {
    affinity: Option<Affinity>,
    preserve_client: Option<bool>,
    unserved: Option<Unserved>,
    all_down: Option<AllDown>,
    on_down: Option<OnDown>,
    ip_mode: Option<IpMode>,
    adopt: Option<Adopt>,
    snat: Vec<IpAddr>,
    source_ranges: Vec<IpNet>,
    probe: ProbeSettings,
    timeouts: Option<Timeouts>,
}

/// Parts of a probe as they are merged, some with what to say when they do not go together.
#[derive(Clone, Default)]
struct ProbeSettings {
    kind: Option<ProbeKind>,
    port: Option<(ProbePort, Position)>,
    path: Option<String>,
    host: Option<String>,
    expect: Option<Vec<u16>>,
    interval: Option<Duration>,
    timeout: Option<Duration>,
    fall: Option<u32>,
    rise: Option<u32>,
    fast_interval: Option<Duration>,
    ca: Option<PathBuf>,
    /// The innermost `health` whose times were merged last, to point at.
    last: Option<Place>,
}

/// What to call a merged value that is wrong, and where it stands.
#[derive(Clone)]
struct Place {
    position: Position,
    label: String,
}

/// Settings of the defaults, a tenant or a frontend over those around it.
fn inherit(object: &Object<'_>, outer: &Settings) -> Result<Settings> {
    let mut settings = outer.clone();
    if let Some(item) = object.get("affinity") {
        settings.affinity = Some(item.choice(&[("flow", Affinity::Flow), ("source", Affinity::Source)])?);
    }
    if let Some(item) = object.get("preserve_client") {
        settings.preserve_client = Some(item.truth()?);
    }
    if let Some(item) = object.get("unserved") {
        settings.unserved = Some(item.choice(&[("reject", Unserved::Reject), ("drop", Unserved::Drop)])?);
    }
    if let Some(item) = object.get("all_down") {
        settings.all_down = Some(item.choice(&[("try", AllDown::Try), ("reject", AllDown::Reject)])?);
    }
    if let Some(item) = object.get("on_down") {
        settings.on_down = Some(item.choice(&[("keep", OnDown::Keep), ("reset", OnDown::Reset)])?);
    }
    if let Some(item) = object.get("ip_mode") {
        settings.ip_mode = Some(item.choice(&[("VIP", IpMode::Vip), ("Proxy", IpMode::Proxy)])?);
    }
    if let Some(item) = object.get("adopt") {
        settings.adopt = Some(item.choice(&[("never", Adopt::Never), ("takeover", Adopt::Takeover)])?);
    }
    if let Some(item) = object.get("snat") {
        settings.snat = snat(&item)?;
        if object.get("preserve_client").is_some()
            && settings.preserve_client == Some(true)
            && !settings.snat.is_empty()
        {
            return Err(item
                .wrong("has no meaning with `preserve_client: true`, which leaves the client's address: remove one"));
        }
    }
    if let Some(item) = object.get("source_ranges") {
        let ranges = item.list("prefixes")?;
        ranges.iter().map(Item::cidr).collect::<Result<Vec<_>>>()?;
        if !ranges.is_empty() {
            return Err(item.unsupported(Unsupported::SourceRanges));
        }
    }
    if let Some(item) = object.get("timeouts") {
        settings.timeouts = Some(timeouts(&item, settings.timeouts.unwrap_or_else(default_timeouts))?);
    }
    if let Some(item) = object.get("health") {
        settings.probe = probe(&item, &settings.probe)?;
    }
    Ok(settings)
}

const PROBE_KEYS: [&str; 11] =
    ["probe", "port", "path", "host", "expect", "ca", "interval", "timeout", "fall", "rise", "fast_interval"];

fn probe(item: &Item<'_>, outer: &ProbeSettings) -> Result<ProbeSettings> {
    let mut probe = outer.clone();
    let health = item.object(&PROBE_KEYS)?;
    if let Some(item) = health.get("probe") {
        let kind = item.choice(&[
            ("tcp", ProbeKind::Tcp),
            ("http", ProbeKind::Http),
            ("https", ProbeKind::Https),
            ("tls", ProbeKind::Tls),
        ])?;
        probe.kind = Some(kind);
    }
    if let Some(item) = health.get("port") {
        let text = item.text("a port number or the name of a Service port")?;
        let port = if text.bytes().any(|byte| byte.is_ascii_lowercase()) {
            if text.len() > 15 {
                return Err(item
                    .wrong(format!("{} is not the name of a Service port: write at most 15 characters", quote(text))));
            }
            ProbePort::Name(item.label("the name of a Service port")?)
        } else {
            ProbePort::Number(item.port()?)
        };
        probe.port = Some((port, item.at));
    }
    let kind = probe.kind.unwrap_or_default();
    if let Some(item) = health.get("path") {
        let path = item.text("a path such as /healthz")?;
        if !matches!(kind, ProbeKind::Http | ProbeKind::Https) {
            return Err(item.wrong("is for probes that ask by HTTP, and this one does not: remove it"));
        }
        if !path.starts_with('/') || path.contains(|c: char| !c.is_ascii_graphic()) {
            return Err(
                item.wrong(format!("{} is not a path: write one that starts with / and has no spaces", quote(path)))
            );
        }
        probe.path = Some(path.to_owned());
    }
    if let Some(item) = health.get("host") {
        let host = item.text("a host name")?;
        if kind == ProbeKind::Tcp {
            return Err(item.wrong("is for probes that send a name, and this one only connects: remove it"));
        }
        if ServerName::try_from(host).is_err() {
            return Err(
                item.wrong(format!("{} is not the name of a host: write one such as api.example.com", quote(host)))
            );
        }
        probe.host = Some(host.to_owned());
    }
    if let Some(item) = health.get("ca") {
        if !matches!(kind, ProbeKind::Https | ProbeKind::Tls) {
            return Err(item.wrong("is for probes that speak TLS, and this one does not: remove it"));
        }
        probe.ca = Some(item.path()?);
    }
    if let Some(item) = health.get("expect") {
        let codes = item.list("HTTP codes")?.iter().map(|item| item.number(100..=599)).collect::<Result<Vec<_>>>()?;
        if !matches!(kind, ProbeKind::Http | ProbeKind::Https) {
            return Err(item.wrong("is for probes that ask by HTTP, and this one does not: remove it"));
        }
        probe.expect = Some(codes.into_iter().map(|code| code as u16).collect());
    }
    let times = [
        ("interval", &mut probe.interval),
        ("timeout", &mut probe.timeout),
        ("fast_interval", &mut probe.fast_interval),
    ];
    for (key, time) in times {
        if let Some(item) = health.get(key) {
            *time = Some(item.duration(PROBE)?);
            probe.last = Some(Place { position: item.at, label: item.label_text() });
        }
    }
    for (key, count) in [("fall", &mut probe.fall), ("rise", &mut probe.rise)] {
        if let Some(item) = health.get(key) {
            *count = Some(item.number(1..=100)?);
        }
    }
    Ok(probe)
}

fn default_timeouts() -> Timeouts {
    Timeouts {
        tcp_established: Duration::from_hours(24),
        tcp_half_open: Duration::from_secs(30),
        tcp_fin: Duration::from_mins(1),
        tcp_reset: Duration::from_secs(10),
        udp_unreplied: Duration::from_secs(30),
        udp_replied: Duration::from_mins(3),
    }
}

/// What is written, over what holds outside.
fn timeouts(item: &Item<'_>, outer: Timeouts) -> Result<Timeouts> {
    let object =
        item.object(&["tcp_established", "tcp_half_open", "tcp_fin", "tcp_reset", "udp_unreplied", "udp_replied"])?;
    let mut timeouts = outer;
    if let Some(item) = object.get("tcp_established") {
        timeouts.tcp_established = item.duration(Duration::ZERO..=Duration::MAX)?;
        if timeouts.tcp_established < *ESTABLISHED.start() {
            return Err(item.wrong(format!(
                "{} would cut connections that are only idle (RFC 5382 asks for 2h4m): write 2h4m or more",
                show_duration(timeouts.tcp_established)
            )));
        }
        item.duration(ESTABLISHED)?;
    }
    let transient = [
        ("tcp_half_open", &mut timeouts.tcp_half_open),
        ("tcp_fin", &mut timeouts.tcp_fin),
        ("tcp_reset", &mut timeouts.tcp_reset),
        ("udp_unreplied", &mut timeouts.udp_unreplied),
        ("udp_replied", &mut timeouts.udp_replied),
    ];
    for (key, timeout) in transient {
        if let Some(item) = object.get(key) {
            *timeout = item.duration(TRANSIENT)?;
        }
    }
    Ok(timeouts)
}

impl Settings {
    /// Fills in what has not been written anywhere, and checks what has been merged.
    fn finish(&self) -> Result<FrontendSettings> {
        let probe = &self.probe;
        let interval = probe.interval.unwrap_or(Duration::from_secs(1));
        let timeout = probe.timeout.unwrap_or(interval.min(Duration::from_secs(1)));
        let fast_interval = probe.fast_interval.unwrap_or(interval.min(Duration::from_millis(250)));
        for (name, time) in [("timeout", timeout), ("fast_interval", fast_interval)] {
            if time > interval
                && let Some(place) = &probe.last
            {
                return Err(Mistake::new(
                    place.position,
                    format!(
                        "{}: {name} {} is longer than interval {}: write a shorter {name} or a longer interval",
                        place.label,
                        show_duration(time),
                        show_duration(interval)
                    ),
                ));
            }
        }
        Ok(FrontendSettings {
            affinity: self.affinity,
            preserve_client: self.preserve_client.unwrap_or_default(),
            unserved: self.unserved.unwrap_or_default(),
            all_down: self.all_down.unwrap_or_default(),
            on_down: self.on_down.unwrap_or_default(),
            ip_mode: self.ip_mode,
            adopt: self.adopt.unwrap_or_default(),
            snat: self.snat.clone(),
            source_ranges: self.source_ranges.clone(),
            health: Probe {
                kind: probe.kind.unwrap_or_default(),
                port: probe.port.as_ref().map(|(port, _)| port.clone()),
                path: probe.path.clone().unwrap_or_else(|| "/".to_owned()),
                host: probe.host.clone(),
                expect: probe.expect.clone().unwrap_or_default(),
                interval,
                timeout,
                fall: probe.fall.unwrap_or(3),
                rise: probe.rise.unwrap_or(2),
                fast_interval,
                ca: probe.ca.clone(),
            },
            timeouts: self.timeouts.unwrap_or_else(default_timeouts),
        })
    }
}

fn datapath(file: &Object<'_>) -> Result<Datapath> {
    let mut datapath = Datapath {
        mode: XdpMode::Auto,
        max_flows: 262_144,
        max_flows_v6: 26_214,
        bpffs: PathBuf::from("/sys/fs/bpf"),
        mss_clamp: MssClamp::Auto,
        announce_interval: Duration::from_mins(1),
    };
    let Some(item) = file.get("datapath") else {
        return Ok(datapath);
    };
    let object = item.object(&["mode", "max_flows", "max_flows_v6", "bpffs", "mss_clamp", "announce_interval"])?;
    if let Some(item) = object.get("mode") {
        datapath.mode =
            item.choice(&[("auto", XdpMode::Auto), ("native", XdpMode::Native), ("generic", XdpMode::Generic)])?;
    }
    if let Some(item) = object.get("max_flows") {
        datapath.max_flows = item.number(MAX_FLOWS)?;
        datapath.max_flows_v6 = datapath.max_flows / 10;
    }
    if let Some(item) = object.get("max_flows_v6") {
        datapath.max_flows_v6 = item.number(0..=*MAX_FLOWS.end())?;
    }
    datapath.bpffs = path(&object, "bpffs", "/sys/fs/bpf")?;
    if let Some(item) = object.get("mss_clamp") {
        datapath.mss_clamp = match item.scalar() {
            Some(text) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
                MssClamp::Value(item.number(536..=65_495)? as u16)
            }
            _ => item.choice(&[("auto", MssClamp::Auto), ("off", MssClamp::Off)])?,
        };
    }
    if let Some(item) = object.get("announce_interval") {
        datapath.announce_interval = item.duration(ANNOUNCE)?;
    }
    Ok(datapath)
}

fn address_annotations(file: &Object<'_>) -> Result<Vec<String>> {
    let mut annotations = Vec::new();
    let Some(list) = file.get("address_annotations") else {
        return Ok(annotations);
    };
    for item in list.list("annotation keys")? {
        let key = item.text("the key of an annotation")?;
        if !is_label_key(key) {
            return Err(item.wrong(format!("{} is not the key of an annotation: write [PREFIX/]NAME", quote(key))));
        }
        if key.starts_with("lbd.tenantedge.io/") {
            return Err(item.wrong(format!("{key} is ours, and lbd.tenantedge.io/vip is always looked at: remove it")));
        }
        if annotations.iter().any(|other| other == key) {
            return Err(item.wrong(format!("{key} is there twice: remove one")));
        }
        annotations.push(key.to_owned());
    }
    Ok(annotations)
}

fn path(object: &Object<'_>, key: &str, default: &str) -> Result<PathBuf> {
    object.get(key).map_or_else(|| Ok(PathBuf::from(default)), |item| item.path())
}

fn socket(file: &Object<'_>) -> Result<PathBuf> {
    /// What `sockaddr_un` holds, without the end mark.
    const LONGEST: usize = 107;
    let path = path(file, "socket", "/run/lbd/lbd.sock")?;
    if let Some(item) = file.get("socket")
        && path.as_os_str().len() > LONGEST
    {
        return Err(item.wrong(format!(
            "is longer than the {LONGEST} bytes that a Unix socket's path can have: write a shorter one"
        )));
    }
    Ok(path)
}

fn metrics(file: &Object<'_>) -> Result<SocketAddr> {
    let Some(item) = file.get("metrics") else {
        return Ok(SocketAddr::from(([127, 0, 0, 1], 9474)));
    };
    let text = item.text("an address and port such as 127.0.0.1:9474")?;
    match text.parse::<SocketAddr>() {
        Ok(address) if address.port() > 0 => Ok(address),
        _ => Err(item.wrong(format!("{} is not an address and port: write one such as 127.0.0.1:9474", quote(text)))),
    }
}
