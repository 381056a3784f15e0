//! What only the host can prove wrong about a configuration. Pure: the facts are gathered elsewhere.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use super::error::Position;
use super::validate::impossible;
use super::{Config, Frontend, MssClamp, SegmentName, Tenant, Via};
use crate::plan::model::{HostFacts, InterfaceFacts};

/// How bad a [`Problem`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// It cannot work: nothing is attached.
    Error,
    /// It works, but perhaps not as wanted.
    Warning,
}

/// Something in the file that does not fit the host.
///
/// Shown as one line, `FILE:LINE:COLUMN: message`, without the severity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// How bad it is.
    pub severity: Severity,
    /// The file, as it was named; empty when there is none.
    pub file: String,
    /// Where in the file, if it says so there.
    pub position: Option<Position>,
    /// The object, what was wanted and what to do.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { severity: _, file, position, message } = self;
        match position {
            Some(position) => write!(formatter, "{file}:{position}: {message}"),
            None if file.is_empty() => formatter.write_str(message),
            None => write!(formatter, "{file}: {message}"),
        }
    }
}

/// Bytes of IPv4 and TCP headers without options.
const HEADERS: u32 = 40;

/// Everything in the configuration that does not fit the host, in the order of the file.
pub fn check_host(config: &Config, host: &HostFacts) -> Vec<Problem> {
    let mut check = Check { config, host, problems: Vec::new() };
    check.hub();
    for (index, tenant) in config.tenants.iter().enumerate() {
        check.tenant(&format!("tenants[{index}]"), tenant);
    }
    let mut problems = check.problems;
    problems.sort_by_key(|problem| problem.position);
    // One place, one mistake: an MTU that fits no tenant is told once.
    problems.dedup_by(|next, first| {
        next.severity == Severity::Error && first.severity == Severity::Error && next.position == first.position
    });
    problems
}

/// What the host has in a segment.
struct Here<'a> {
    /// Interface of the host's own sockets.
    name: &'a str,
    gateways: &'a [IpAddr],
    prefixes: &'a [IpNet],
    /// The host's addresses.
    own: &'a [IpAddr],
}

struct Check<'a> {
    config: &'a Config,
    host: &'a HostFacts,
    problems: Vec<Problem>,
}

impl<'a> Check<'a> {
    fn say(&mut self, severity: Severity, path: &str, message: String) {
        self.problems.push(Problem {
            severity,
            file: self.config.origin.file.clone(),
            position: self.config.origin.position(path),
            message,
        });
    }

    fn error(&mut self, path: &str, message: String) {
        self.say(Severity::Error, path, message);
    }

    fn warning(&mut self, path: &str, message: String) {
        self.say(Severity::Warning, path, message);
    }

    /// The facts of an interface, which must be there.
    fn interface(&mut self, path: &str, label: &str, name: &str) -> Option<&'a InterfaceFacts> {
        let Some(facts) = self.host.interfaces.get(name) else {
            let mut others: Vec<&str> =
                self.host.interfaces.keys().map(String::as_str).filter(|name| *name != "lo").collect();
            others.truncate(16);
            self.error(
                path,
                format!(
                    "{label}: the host has no interface {name}: write one that it has ({}), or create it",
                    if others.is_empty() { "there is none".to_owned() } else { others.join(", ") }
                ),
            );
            return None;
        };
        if !facts.up {
            self.warning(
                path,
                format!("{label}: interface {name} is down: bring it up (`ip link set {name} up`) or plug it in"),
            );
        }
        Some(facts)
    }

    /// The prefixes of the hub's segment.
    fn hub_prefixes(&self) -> Vec<IpNet> {
        let facts = self.host.of_segment(&self.config.hub.segment);
        let local = |net: &&IpNet| matches!(net.addr(), IpAddr::V6(address) if address.is_unicast_link_local());
        facts.into_iter().flat_map(|(_, facts)| &facts.addresses).filter(|net| !local(net)).copied().collect()
    }

    /// Whether something of a family is to be served with backends behind the hub.
    fn serves(&self, v6: bool) -> bool {
        self.config.tenants.iter().any(|tenant| {
            tenant.pools.iter().any(|pool| pool.first.is_ipv6() == v6)
                || tenant
                    .frontends
                    .iter()
                    .any(|frontend| frontend.via == Via::Hub && frontend.vip.is_some_and(|vip| vip.is_ipv6() == v6))
        })
    }

    fn hub(&mut self) {
        let hub = &self.config.hub;
        let label = format!("hub {}", hub.name);
        let nic = &hub.segment.interface;
        if self.interface("hubs[0].interface", &format!("{label}: interface"), nic).is_none() {
            return;
        }
        let (name, facts) = match self.host.of_segment(&hub.segment) {
            Some((name, facts)) => (name.to_owned(), Some(facts)),
            None => (hub.segment.to_string(), None),
        };
        if facts.is_none() {
            self.no_vlan_interface("hubs[0].vlan", &format!("{label}: vlan"), &hub.segment);
        }
        let prefixes = self.hub_prefixes();
        for (v6, family) in [(false, "IPv4"), (true, "IPv6")] {
            let of_family = |address: IpAddr| address.is_ipv6() == v6;
            if !self.serves(v6)
                || hub.snat.iter().any(|&address| of_family(address))
                || prefixes.iter().any(|net| of_family(net.addr()))
            {
                continue;
            }
            let message = format!(
                "{label}: interface: {name} has no {}{family} address that backends could answer to: give it one, or write `snat`",
                if v6 { "global " } else { "" }
            );
            // What is of IPv4 goes on without it; a host without IPv4 has been plugged in wrongly.
            let severity = if v6 { Severity::Warning } else { Severity::Error };
            self.say(severity, "hubs[0].interface", message);
        }
        for (index, &address) in hub.snat.iter().enumerate() {
            self.source(&format!("hubs[0].snat[{index}]"), &format!("{label}: snat[{index}]"), address);
        }
        for (index, cidr) in hub.node_cidrs.iter().enumerate() {
            if !prefixes.is_empty()
                && !prefixes.iter().any(|prefix| prefix.contains(&cidr.network()) || cidr.contains(&prefix.network()))
            {
                self.warning(
                    &format!("hubs[0].node_cidrs[{index}]"),
                    format!(
                        "{label}: node_cidrs[{index}]: {cidr} is not on {name} ({}): nodes there need a route through {name}",
                        list(&prefixes)
                    ),
                );
            }
        }
    }

    /// There is no way for the host's own sockets into a VLAN segment.
    fn no_vlan_interface(&mut self, path: &str, label: &str, segment: &SegmentName) {
        let SegmentName { interface, vlan } = segment;
        let id = vlan.unwrap_or_default();
        self.warning(
            path,
            format!(
                "{label}: the host has no VLAN interface for {segment}: backends there cannot be probed, and count as up: create it \
                 (`ip link add link {interface} name {segment} type vlan id {id}`) with an address"
            ),
        );
    }

    /// A SNAT address towards the hub: the host's own, or one of the segment that lbd answers for.
    fn source(&mut self, path: &str, label: &str, address: IpAddr) {
        let Some((name, facts)) = self.host.of_segment(&self.config.hub.segment) else {
            return;
        };
        if facts.gateways.contains(&address) {
            self.error(path, format!("{label}: {address} is the gateway behind {name}: write another address"));
        } else if !facts.all_addresses.iter().chain(&facts.addresses).any(|net| net.addr() == address)
            && !facts.addresses.iter().any(|net| impossible(address, *net).is_none())
        {
            self.warning(
                path,
                format!(
                    "{label}: {address} is neither an address of {name} nor in its prefixes ({}): replies come back only if the \
                     nodes have a route to it through this host",
                    list(&facts.addresses)
                ),
            );
        }
    }

    fn tenant(&mut self, path: &str, tenant: &Tenant) {
        let label = format!("tenant {}", tenant.name);
        let nic = &tenant.segment.interface;
        let interface_path = format!("{path}.segment.interface");
        let Some(carrier) = self.interface(&interface_path, &format!("{label}: segment.interface"), nic) else {
            return;
        };
        let (name, facts) = match self.host.of_segment(&tenant.segment) {
            Some((name, facts)) => (name.to_owned(), Some(facts)),
            None => (tenant.segment.to_string(), None),
        };
        if facts.is_none() && tenant.frontends.iter().any(|frontend| frontend.via == Via::Tenant) {
            self.no_vlan_interface(&format!("{path}.segment.vlan"), &format!("{label}: segment.vlan"), &tenant.segment);
        }
        let here = |facts: &'a InterfaceFacts| facts.all_addresses.iter().chain(&facts.addresses);
        let own: Vec<IpAddr> = facts.into_iter().flat_map(here).map(IpNet::addr).collect();
        let mut prefixes = tenant.addresses.clone();
        for &address in tenant.addresses.iter().filter(|_| facts.is_some()) {
            if !own.contains(&address.addr()) {
                self.warning(
                    &format!("{path}.segment.address"),
                    format!(
                        "{label}: segment.address: {name} does not have {address}, which neighbours and probes need: add it \
                         (`ip address add {address} dev {name}`) or correct it"
                    ),
                );
            } else if !facts.into_iter().flat_map(here).any(|net| *net == address) {
                let has = facts.into_iter().flat_map(here).find(|net| net.addr() == address.addr());
                self.warning(
                    &format!("{path}.segment.address"),
                    format!(
                        "{label}: segment.address: {address} is {} on {name}: clients between the two would be looked for in the \
                         wrong place: write the same length here and there",
                        has.map_or_else(String::new, ToString::to_string)
                    ),
                );
            }
        }
        let learnt = facts.into_iter().flat_map(|facts| &facts.addresses);
        prefixes.extend(learnt.filter(|net| tenant.address(net.addr().is_ipv6()).is_none()));
        if prefixes.is_empty() {
            self.error(
                &interface_path,
                format!(
                    "{label}: segment.interface: {name} has no address, so the segment's prefix is not known: give it one, or write \
                     segment.address"
                ),
            );
            return;
        }
        for &gateway in &tenant.gateways {
            let local = matches!(gateway, IpAddr::V6(v6) if v6.is_unicast_link_local());
            if !local && !prefixes.iter().any(|prefix| prefix.contains(&gateway)) {
                self.error(
                    &format!("{path}.segment.gateway"),
                    format!(
                        "{label}: segment.gateway: {gateway} is not in {} of {name}: write a router of the segment",
                        list(&prefixes)
                    ),
                );
            }
        }
        if self.config.origin.knows(&format!("{path}.snat")) {
            for (index, &address) in tenant.settings.snat.iter().enumerate() {
                self.source(&format!("{path}.snat[{index}]"), &format!("{label}: snat[{index}]"), address);
            }
        }
        for (index, pool) in tenant.pools.iter().enumerate() {
            if !prefixes.iter().any(|prefix| prefix.contains(&pool.first) && prefix.contains(&pool.last)) {
                self.error(
                    &format!("{path}.pools[{index}]"),
                    format!(
                        "{label}: pools[{index}]: {pool} is not inside {} of {name}: write a range of the segment, or its prefix at \
                         segment.address",
                        list(&prefixes)
                    ),
                );
            }
        }
        for (index, frontend) in tenant.frontends.iter().enumerate() {
            let path = format!("{path}.frontends[{index}]");
            let gateways = facts.map_or(&[][..], |facts| &facts.gateways);
            let here = Here { name: &name, gateways, prefixes: &prefixes, own: &own };
            self.vip(&format!("{path}.vip"), tenant, frontend, &here);
            self.backends(&path, tenant, frontend);
            if frontend.via == Via::Hub && self.config.origin.knows(&format!("{path}.snat")) {
                for (index, &address) in frontend.settings.snat.iter().enumerate() {
                    let label = format!("{label}: frontend {}: snat[{index}]", frontend.name);
                    self.source(&format!("{path}.snat[{index}]"), &label, address);
                }
            }
        }
        self.mtu(path, tenant, carrier);
    }

    fn vip(&mut self, path: &str, tenant: &Tenant, frontend: &Frontend, here: &Here<'_>) {
        let Some(vip) = frontend.vip else {
            return;
        };
        let Here { name, gateways, prefixes, own } = *here;
        let label = format!("tenant {}: frontend {}: vip: {vip}", tenant.name, frontend.name);
        if own.contains(&vip) {
            self.error(
                path,
                format!(
                    "{label} is an address of {name}, but lbd answers for VIPs itself: remove it there (`ip address del {vip} dev \
                     {name}`) or write another one"
                ),
            );
        } else if tenant.gateway(vip.is_ipv6()).is_none() && gateways.contains(&vip) {
            self.error(path, format!("{label} is the gateway behind {name}: write another address"));
        } else {
            match prefixes.iter().find(|prefix| prefix.contains(&vip)) {
                None => self.error(
                    path,
                    format!(
                        "{label} is not in {} of {name}: write an address of the segment, or its prefix at segment.address",
                        list(prefixes)
                    ),
                ),
                Some(prefix) => {
                    if let Some(what) = impossible(vip, *prefix) {
                        self.error(path, format!("{label} is {what} {}: write another address", prefix.trunc()));
                    }
                }
            }
        }
    }

    fn backends(&mut self, path: &str, tenant: &Tenant, frontend: &Frontend) {
        let segment = if frontend.via == Via::Hub { &self.config.hub.segment } else { &tenant.segment };
        let Some((_, facts)) = self.host.of_segment(segment) else {
            return;
        };
        let mut prefixes = facts.addresses.clone();
        if frontend.via == Via::Tenant {
            prefixes.extend(&tenant.addresses);
        }
        for (index, backend) in frontend.backends.iter().enumerate() {
            let address = backend.address;
            let path = format!("{path}.backends[{index}]");
            let label = format!("tenant {}: frontend {}: backends[{index}]: {address}", tenant.name, frontend.name);
            if facts.all_addresses.iter().chain(&facts.addresses).any(|net| net.addr() == address) {
                self.error(&path, format!("{label} is this host's own address: write the address of a server"));
            } else if !prefixes.is_empty() && !prefixes.iter().any(|prefix| prefix.contains(&address)) {
                self.warning(
                    &path,
                    format!(
                        "{label} is not in {} of {segment}: it needs a route through {segment}, or is `via` wrong?",
                        list(&prefixes)
                    ),
                );
            }
        }
    }

    fn mtu(&mut self, path: &str, tenant: &Tenant, facts: &InterfaceFacts) {
        let hub_name = &self.config.hub.segment.interface;
        let crosses = !tenant.claims.is_empty() || tenant.frontends.iter().any(|frontend| frontend.via == Via::Hub);
        let Some(hub) = self.host.interfaces.get(hub_name).filter(|_| crosses) else {
            return;
        };
        let name = &tenant.segment.interface;
        let smaller = facts.mtu.min(hub.mtu);
        let differ = format!("the MTU of {name} is {} and that of {hub_name} is {}", facts.mtu, hub.mtu);
        match self.config.datapath.mss_clamp {
            MssClamp::Off if facts.mtu != hub.mtu => self.error(
                "datapath.mss_clamp",
                format!(
                    "datapath.mss_clamp: off, but {differ}: connections of tenant {} would stall on large packets: write auto, or \
                     make the MTUs equal",
                    tenant.name
                ),
            ),
            MssClamp::Value(value) if u32::from(value) + HEADERS > smaller => self.error(
                "datapath.mss_clamp",
                format!(
                    "datapath.mss_clamp: {value} is too large, as {differ}: write at most {}, or auto",
                    smaller.saturating_sub(HEADERS)
                ),
            ),
            MssClamp::Auto if facts.mtu != hub.mtu => self.warning(
                &format!("{path}.segment.interface"),
                format!(
                    "tenant {}: segment.interface: {differ}: TCP segments are kept to {} bytes (mss_clamp: auto); make the MTUs equal \
                     to be rid of this",
                    tenant.name,
                    smaller.saturating_sub(HEADERS)
                ),
            ),
            MssClamp::Auto | MssClamp::Off | MssClamp::Value(_) => {}
        }
    }
}

fn list(prefixes: &[IpNet]) -> String {
    let mut shown: Vec<String> = prefixes.iter().map(|prefix| prefix.trunc().to_string()).collect();
    shown.dedup();
    if shown.is_empty() { "none".to_owned() } else { shown.join(", ") }
}
