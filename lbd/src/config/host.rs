//! What only the host can prove wrong about a configuration. Pure: the facts are gathered elsewhere.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use super::error::Position;
use super::validate::impossible;
use super::{Config, Frontend, MssClamp, Tenant, Via};
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

    fn hub(&mut self) {
        let hub = &self.config.hub;
        let label = format!("hub {}", hub.name);
        let name = &hub.segment.interface;
        let Some(facts) = self.interface("hubs[0].interface", &format!("{label}: interface"), name) else {
            return;
        };
        let prefixes = ipv4(&facts.addresses);
        if prefixes.is_empty() && hub.snat.is_empty() {
            self.error(
                "hubs[0].interface",
                format!(
                    "{label}: interface: {name} has no IPv4 address that backends could answer to: give it one, or write `snat`"
                ),
            );
        }
        for (index, address) in hub.snat.iter().enumerate() {
            if !facts.all_addresses.iter().chain(&facts.addresses).any(|net| net.addr() == *address) {
                self.error(
                    &format!("hubs[0].snat[{index}]"),
                    format!(
                        "{label}: snat[{index}]: {address} is not an address of {name}, so no reply would come back: add it \
                         (`ip address add {address}/32 dev {name}`), or remove it for the interface's own"
                    ),
                );
            }
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

    fn tenant(&mut self, path: &str, tenant: &Tenant) {
        let label = format!("tenant {}", tenant.name);
        let name = &tenant.segment.interface;
        let interface_path = format!("{path}.segment.interface");
        let Some(facts) = self.interface(&interface_path, &format!("{label}: segment.interface"), name) else {
            return;
        };
        let own: Vec<IpAddr> = facts.all_addresses.iter().chain(&facts.addresses).map(IpNet::addr).collect();
        let prefixes = match tenant.address {
            Some(address) => {
                if !own.contains(&address.addr()) {
                    self.warning(
                        &format!("{path}.segment.address"),
                        format!(
                            "{label}: segment.address: {name} does not have {address}, which neighbours and probes need: add it \
                             (`ip address add {address} dev {name}`) or correct it"
                        ),
                    );
                } else if !facts.all_addresses.iter().chain(&facts.addresses).any(|net| *net == address) {
                    let has =
                        facts.addresses.iter().chain(&facts.all_addresses).find(|net| net.addr() == address.addr());
                    self.warning(
                        &format!("{path}.segment.address"),
                        format!(
                            "{label}: segment.address: {address} is {} on {name}: clients between the two would be looked for in the \
                             wrong place: write the same length here and there",
                            has.map_or_else(String::new, ToString::to_string)
                        ),
                    );
                }
                vec![address]
            }
            None => ipv4(&facts.addresses),
        };
        if prefixes.is_empty() {
            self.error(
                &interface_path,
                format!(
                    "{label}: segment.interface: {name} has no IPv4 address, so the segment's prefix is not known: give it one, or \
                     write segment.address"
                ),
            );
            return;
        }
        if let Some(gateway) = tenant.gateway
            && !prefixes.iter().any(|prefix| prefix.contains(&gateway))
        {
            self.error(
                &format!("{path}.segment.gateway"),
                format!(
                    "{label}: segment.gateway: {gateway} is not in {} of {name}: write a router of the segment",
                    list(&prefixes)
                ),
            );
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
            self.vip(&format!("{path}.frontends[{index}].vip"), tenant, frontend, facts, &prefixes, &own);
            self.backends(&format!("{path}.frontends[{index}]"), tenant, frontend);
        }
        self.mtu(path, tenant, facts);
    }

    fn vip(
        &mut self,
        path: &str,
        tenant: &Tenant,
        frontend: &Frontend,
        facts: &InterfaceFacts,
        prefixes: &[IpNet],
        own: &[IpAddr],
    ) {
        let Some(vip) = frontend.vip else {
            return;
        };
        let name = &tenant.segment.interface;
        let label = format!("tenant {}: frontend {}: vip: {vip}", tenant.name, frontend.name);
        if own.contains(&vip) {
            self.error(
                path,
                format!(
                    "{label} is an address of {name}, but lbd answers for VIPs itself: remove it there (`ip address del {vip} dev \
                     {name}`) or write another one"
                ),
            );
        } else if tenant.gateway.is_none() && facts.gateways.contains(&vip) {
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
        let Some(facts) = self.host.interfaces.get(&segment.interface) else {
            return;
        };
        let mut prefixes = ipv4(&facts.addresses);
        if frontend.via == Via::Tenant {
            prefixes.extend(tenant.address);
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

fn ipv4(addresses: &[IpNet]) -> Vec<IpNet> {
    addresses.iter().filter(|net| matches!(net, IpNet::V4(_))).copied().collect()
}

fn list(prefixes: &[IpNet]) -> String {
    prefixes.iter().map(|prefix| prefix.trunc().to_string()).collect::<Vec<_>>().join(", ")
}
