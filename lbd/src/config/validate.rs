//! What the objects of a file say about each other.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::error::{Mistake, Position};
use super::{AddressRange, Claim, Config, Frontend, FrontendSettings, HostAccess, SegmentName, Tenant, Via, following};

type Result<T> = std::result::Result<T, Mistake>;

/// Refuses what cannot be, and puts the addresses that no VIP can have among those to avoid.
pub(super) fn validate(config: &mut Config) -> Result<()> {
    let checks = Checks { config };
    checks.sizes()?;
    checks.names()?;
    checks.segments()?;
    checks.limits()?;
    checks.pools()?;
    checks.vips()?;
    checks.ports()?;
    checks.services()?;
    checks.backends()?;
    checks.snat()?;
    checks.claims()?;
    avoid_impossible(config);
    let checks = Checks { config };
    checks.room()
}

struct Checks<'a> {
    config: &'a Config,
}

impl<'a> Checks<'a> {
    fn position(&self, path: &str) -> Position {
        self.config.origin.position(path).unwrap_or(Position { line: 1, column: 1 })
    }

    fn mistake<T>(&self, path: &str, message: impl AsRef<str>) -> Result<T> {
        Err(Mistake::new(self.position(path), message.as_ref()))
    }

    /// Tenants with their key paths.
    fn tenants(&self) -> impl Iterator<Item = (String, &'a Tenant)> {
        self.config.tenants.iter().enumerate().map(|(index, tenant)| (format!("tenants[{index}]"), tenant))
    }

    /// Frontends with their key paths and tenants.
    fn frontends(&self) -> impl Iterator<Item = (String, &'a Tenant, &'a Frontend)> {
        self.tenants().flat_map(|(path, tenant)| {
            tenant
                .frontends
                .iter()
                .enumerate()
                .map(move |(index, frontend)| (format!("{path}.frontends[{index}]"), tenant, frontend))
        })
    }

    /// What the datapath's tables hold at most.
    fn sizes(&self) -> Result<()> {
        const TENANTS: usize = lbd_common::abi::MAX_TENANTS as usize - 1;
        const NICS: usize = lbd_common::abi::MAX_NICS as usize;
        const FRONTENDS: usize = lbd_common::abi::MAX_FRONTENDS as usize - 1;
        if self.config.tenants.len() > TENANTS {
            let path = format!("tenants[{TENANTS}]");
            return self
                .mistake(&path, format!("tenants: more than {TENANTS}, which is what one host can have: remove some"));
        }
        let mut interfaces = BTreeSet::from([self.config.hub.segment.interface.as_str()]);
        for (path, tenant) in self.tenants() {
            interfaces.insert(&tenant.segment.interface);
            if interfaces.len() > NICS {
                return self.mistake(
                    &format!("{path}.segment.interface"),
                    format!(
                        "tenant {}: segment.interface: {} is one interface more than the {NICS} that one host can serve: put \
                         its tenants on another host",
                        tenant.name, tenant.segment.interface
                    ),
                );
            }
        }
        if let Some((path, ..)) = self.frontends().nth(FRONTENDS) {
            return self.mistake(
                &path,
                format!("frontends: more than {FRONTENDS}, which is what one host can have: remove some"),
            );
        }
        Ok(())
    }

    fn names(&self) -> Result<()> {
        let mut tenants = BTreeMap::new();
        for (path, tenant) in self.tenants() {
            let path = format!("{path}.name");
            if let Some(first) = tenants.insert(&tenant.name, self.position(&path)) {
                return self.mistake(
                    &path,
                    format!(
                        "tenant {0}: name: there is a tenant {0} already, at {first}: choose another name",
                        tenant.name
                    ),
                );
            }
        }
        let mut frontends = BTreeMap::new();
        for (path, tenant, frontend) in self.frontends() {
            let path = format!("{path}.name");
            if let Some(first) = frontends.insert((&tenant.name, &frontend.name), self.position(&path)) {
                return self.mistake(
                    &path,
                    format!(
                        "tenant {}: frontend {1}: name: the tenant has a frontend {1} already, at {first}: choose another name",
                        tenant.name, frontend.name
                    ),
                );
            }
        }
        Ok(())
    }

    fn segments(&self) -> Result<()> {
        let mut gateways: BTreeMap<(&SegmentName, bool), (IpAddr, Position)> = BTreeMap::new();
        let mut access: BTreeMap<&SegmentName, (&HostAccess, &str)> = BTreeMap::new();
        for (path, tenant) in self.tenants() {
            let (other, first) = *access.entry(&tenant.segment).or_insert((&tenant.host_access, &tenant.name));
            if *other != tenant.host_access {
                // A packet to the host's own address does not say which of them it is from.
                return self.mistake(
                    &format!("{path}.host_access"),
                    format!(
                        "tenant {}: host_access: is not that of tenant {first} on the same segment {}: write the same at both",
                        tenant.name, tenant.segment
                    ),
                );
            }
            for (index, &gateway) in tenant.gateways.iter().enumerate() {
                let mut path = format!("{path}.segment.gateway");
                if self.config.origin.knows(&format!("{path}[{index}]")) {
                    path = format!("{path}[{index}]");
                }
                let wrong = |message: String| {
                    self.mistake(&path, format!("tenant {}: segment.gateway: {gateway} {message}", tenant.name))
                };
                // A link-local address is on the link whatever the prefix.
                let local = matches!(gateway, IpAddr::V6(v6) if v6.is_unicast_link_local());
                if let Some(address) = tenant.address(gateway.is_ipv6()).filter(|_| !local) {
                    if address.addr() == gateway {
                        return wrong("is the host's own address: write the router's".to_owned());
                    }
                    if let Some(what) = impossible(gateway, address) {
                        return wrong(format!("is {what} {}: write the router's address", address.trunc()));
                    }
                }
                let position = self.position(&path);
                let (other, first) =
                    *gateways.entry((&tenant.segment, gateway.is_ipv6())).or_insert((gateway, position));
                if other != gateway {
                    return wrong(format!(
                        "is not the gateway {other} that the same segment has at {first}: write one gateway for {}",
                        tenant.segment
                    ));
                }
            }
        }
        Ok(())
    }

    fn limits(&self) -> Result<()> {
        let table = self.config.datapath.max_flows;
        for (path, tenant) in self.tenants() {
            if let Some(flows) = tenant.limits.flows.filter(|flows| *flows > table) {
                return self.mistake(
                    &format!("{path}.limits.flows"),
                    format!(
                        "tenant {}: limits.flows: {flows} is more than the {table} of datapath.max_flows: write less, or raise \
                         max_flows",
                        tenant.name
                    ),
                );
            }
            if let (Some(flows), Some(udp)) = (tenant.limits.flows, tenant.limits.udp_flows)
                && udp > flows
            {
                return self.mistake(
                    &format!("{path}.limits.udp_flows"),
                    format!(
                        "tenant {}: limits.udp_flows: {udp} is more than limits.flows {flows}, which counts them too: write less",
                        tenant.name
                    ),
                );
            }
            let v6 = tenant.pools.iter().position(|pool| pool.first.is_ipv6());
            let vip = tenant.frontends.iter().position(|frontend| frontend.vip.is_some_and(|vip| vip.is_ipv6()));
            let at = v6.map(|index| format!("pools[{index}]")).or(vip.map(|index| format!("frontends[{index}].vip")));
            if let Some(at) = at.filter(|_| self.config.datapath.max_flows_v6 == 0) {
                return self.mistake(
                    &format!("{path}.{at}"),
                    format!(
                        "tenant {}: {at}: datapath.max_flows_v6 is 0, so there is no room for IPv6 connections: raise it, or remove \
                         the IPv6 addresses",
                        tenant.name
                    ),
                );
            }
        }
        Ok(())
    }

    fn pools(&self) -> Result<()> {
        let mut by_segment: BTreeMap<&SegmentName, Vec<(AddressRange, &str, Position)>> = BTreeMap::new();
        for (path, tenant) in self.tenants() {
            for (index, pool) in tenant.pools.iter().enumerate() {
                let path = format!("{path}.pools[{index}]");
                let wrong = |message: String| {
                    self.mistake(&path, format!("tenant {}: pools[{index}]: {pool} {message}", tenant.name))
                };
                if let Some(prefix) = tenant.address(pool.first.is_ipv6())
                    && !(prefix.contains(&pool.first) && prefix.contains(&pool.last))
                {
                    return wrong(format!(
                        "is not inside the segment's prefix {}: write a range of the segment",
                        prefix.trunc()
                    ));
                }
                let others = by_segment.entry(&tenant.segment).or_default();
                if let Some((other, owner, first)) = others.iter().find(|(other, ..)| other.overlaps(pool)) {
                    return if *owner == tenant.name {
                        wrong(format!("overlaps {other} at {first}: write each address once"))
                    } else {
                        wrong(format!(
                            "overlaps {other} of tenant {owner} at {first}, on the same segment {}: give each address to one tenant",
                            tenant.segment
                        ))
                    };
                }
                others.push((*pool, &tenant.name, self.position(&path)));
            }
        }
        Ok(())
    }

    fn vips(&self) -> Result<()> {
        let sources = sources(self.config);
        let mut owners: BTreeMap<(&SegmentName, IpAddr), (&str, Position)> = BTreeMap::new();
        for (path, tenant, frontend) in self.frontends() {
            let path = format!("{path}.vip");
            let Some(vip) = frontend.vip else {
                if tenant.pools.is_empty() {
                    return self.mistake(
                        path.trim_end_matches(".vip"),
                        format!(
                            "tenant {}: frontend {}: has no `vip`, and the tenant has no `pools` to take one from: write one of them",
                            tenant.name, frontend.name
                        ),
                    );
                }
                continue;
            };
            let wrong = |message: String| {
                self.mistake(&path, format!("tenant {}: frontend {}: vip: {vip} {message}", tenant.name, frontend.name))
            };
            if let Some(prefix) = tenant.address(vip.is_ipv6()) {
                if prefix.addr() == vip {
                    return wrong("is the host's own address in the segment: write another one".to_owned());
                }
                if let Some(what) = impossible(vip, prefix) {
                    return wrong(format!("is {what} {}: write another address of the segment", prefix.trunc()));
                }
            }
            if tenant.gateways.contains(&vip) {
                return wrong("is the segment's gateway: write another address".to_owned());
            }
            if self.config.hub.segment == tenant.segment && self.config.hub.snat.contains(&vip) {
                return wrong("is the hub's SNAT address, on the same segment: write another one".to_owned());
            }
            if sources.contains(&(tenant.segment.clone(), vip)) {
                return wrong("is a SNAT address (`snat`) in the same segment: write another one".to_owned());
            }
            if tenant.avoid.iter().any(|range| range.contains(vip)) {
                return wrong(
                    "is among the addresses to avoid: remove it there (what a frontend has is never handed out) or write another \
                     one"
                    .to_owned(),
                );
            }
            let foreign = self.tenants().find(|(_, other)| {
                other.name != tenant.name
                    && other.segment == tenant.segment
                    && other.pools.iter().any(|pool| pool.contains(vip))
            });
            if let Some((_, other)) = foreign {
                return wrong(format!(
                    "is in a pool of tenant {}, on the same segment {}: write another one",
                    other.name, tenant.segment
                ));
            }
            let (owner, first) = *owners.entry((&tenant.segment, vip)).or_insert((&tenant.name, self.position(&path)));
            if owner != tenant.name {
                return wrong(format!(
                    "is a VIP of tenant {owner} at {first}, on the same segment {}: write another one",
                    tenant.segment
                ));
            }
        }
        Ok(())
    }

    fn ports(&self) -> Result<()> {
        let mut taken = BTreeMap::new();
        for (path, tenant, frontend) in self.frontends() {
            // Without a VIP the frontend is alone on the one it will get.
            let place = frontend.vip.map_or_else(|| Err(path.clone()), |vip| Ok((&tenant.segment, vip)));
            for (index, port) in frontend.ports.iter().enumerate() {
                let path = format!("{path}.ports[{index}]");
                let value = (self.position(&path), &frontend.name);
                if let Some((first, other)) = taken.insert((place.clone(), port.protocol, port.port), value) {
                    let vip = frontend.vip.map(|vip| format!("{vip}:")).unwrap_or_default();
                    return self.mistake(
                        &path,
                        format!(
                            "tenant {}: frontend {}: ports[{index}]: {vip}{}/{} is taken by frontend {other} at {first}: write another \
                             port or another `vip`",
                            tenant.name,
                            frontend.name,
                            port.port,
                            port.protocol.as_str()
                        ),
                    );
                }
            }
        }
        Ok(())
    }

    fn services(&self) -> Result<()> {
        let mut reserved = BTreeMap::new();
        for (path, tenant, frontend) in self.frontends() {
            let Some((namespace, name)) = &frontend.service else {
                continue;
            };
            let path = format!("{path}.service");
            let label = format!("tenant {}: frontend {}: service: {namespace}/{name}", tenant.name, frontend.name);
            if self.config.hub.kubernetes.is_none() {
                return self.mistake(
                    &path,
                    format!(
                        "{label} cannot be followed without a cluster: write `kubernetes: {{ kubeconfig: … }}` at the hub, or \
                         `backends` here"
                    ),
                );
            }
            if let Some((first, owner, other)) =
                reserved.insert((namespace, name), (self.position(&path), &tenant.name, &frontend.name))
            {
                return self.mistake(
                    &path,
                    format!("{label} is reserved by frontend {other} of tenant {owner} at {first} already: remove one of the two"),
                );
            }
        }
        Ok(())
    }

    fn backends(&self) -> Result<()> {
        let hub = &self.config.hub;
        let sources = sources(self.config);
        let vips: BTreeMap<(&SegmentName, IpAddr), (&Tenant, &Frontend)> = self
            .frontends()
            .filter_map(|(_, tenant, frontend)| Some(((&tenant.segment, frontend.vip?), (tenant, frontend))))
            .collect();
        for (path, tenant, frontend) in self.frontends() {
            let segment = if frontend.via == Via::Hub { &hub.segment } else { &tenant.segment };
            for (index, backend) in frontend.backends.iter().enumerate() {
                let address = backend.address;
                let wrong = |message: String| {
                    self.mistake(
                        &format!("{path}.backends[{index}]"),
                        format!(
                            "tenant {}: frontend {}: backends[{index}]: {address} {message}",
                            tenant.name, frontend.name
                        ),
                    )
                };
                if let Some(vip) = frontend.vip.filter(|vip| vip.is_ipv6() != address.is_ipv6()) {
                    return wrong(format!(
                        "is not of the family of the vip {vip}, and lbd does not translate between families: write one frontend for \
                         each family"
                    ));
                }
                if let Some((_, other)) = vips.get(&(segment, address)) {
                    return wrong(format!("is the VIP of frontend {}: write the address of a server", other.name));
                }
                if frontend.via == Via::Hub && hub.snat.contains(&address) {
                    return wrong(
                        "is the hub's SNAT address, which is this host's: write the address of a server".to_owned(),
                    );
                }
                if sources.contains(&(segment.clone(), address)) {
                    return wrong(
                        "is a SNAT address (`snat`), which is this host's: write the address of a server".to_owned(),
                    );
                }
                for other in self.config.tenants.iter().filter(|other| other.segment == *segment) {
                    if let Some(prefix) = other.address(address.is_ipv6()) {
                        if prefix.addr() == address {
                            return wrong("is this host's own address: write the address of a server".to_owned());
                        }
                        if prefix.contains(&address)
                            && let Some(what) = impossible(address, prefix)
                        {
                            return wrong(format!("is {what} {}: write the address of a server", prefix.trunc()));
                        }
                    }
                    if other.may_hand_out(address) {
                        return wrong(format!(
                            "is in a pool of tenant {} and could become a VIP: add it to the tenant's `avoid`, or make the pool smaller",
                            other.name
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// SNAT addresses of tenants and frontends, as far as the file knows their segments.
    fn snat(&self) -> Result<()> {
        let defaults = || ("defaults.snat".to_owned(), "defaults: snat".to_owned());
        let hub = &self.config.hub.segment;
        let mut all = Vec::new();
        for (path, tenant) in self.tenants() {
            let known = |(path, _): &(String, String)| self.config.origin.knows(path);
            let label = format!("tenant {}: ", tenant.name);
            let outer = Some((format!("{path}.snat"), format!("{label}snat"))).filter(known).unwrap_or_else(defaults);
            all.push((outer.clone(), hub, &tenant.settings));
            for (index, frontend) in tenant.frontends.iter().enumerate() {
                let segment = if frontend.via == Via::Hub { hub } else { &tenant.segment };
                let label = format!("{label}frontend {}: snat", frontend.name);
                let inner = Some((format!("{path}.frontends[{index}].snat"), label)).filter(known);
                all.push((inner.unwrap_or_else(|| outer.clone()), segment, &frontend.settings));
            }
        }
        for ((path, label), segment, settings) in all {
            for (index, &address) in settings.snat.iter().enumerate() {
                let wrong = |message: String| {
                    let text = format!("{label}[{index}]: {address} {message}");
                    self.mistake(&format!("{path}[{index}]"), text)
                };
                for tenant in self.config.tenants.iter().filter(|tenant| tenant.segment == *segment) {
                    if tenant.gateways.contains(&address) {
                        return wrong(format!("is the gateway of {segment}: write an address that nobody has"));
                    }
                    if let Some(prefix) = tenant.address(address.is_ipv6())
                        && let Some(what) = impossible(address, prefix)
                    {
                        return wrong(format!(
                            "is {what} {} on {segment}, where the backends are: write an address of that segment",
                            prefix.trunc()
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    fn claims(&self) -> Result<()> {
        let mut claims: Vec<(&Tenant, &Claim, Position)> = Vec::new();
        for (path, tenant) in self.tenants() {
            for (index, claim) in tenant.claims.iter().enumerate() {
                let path = format!("{path}.claim[{index}]");
                let wrong =
                    |message: String| self.mistake(&path, format!("tenant {}: claim[{index}]: {message}", tenant.name));
                if self.config.hub.kubernetes.is_none() {
                    return wrong(
                        "there is no cluster to claim Services from: write `kubernetes: { kubeconfig: … }` at the hub, or remove \
                         `claim`"
                            .to_owned(),
                    );
                }
                if tenant.pools.is_empty() {
                    return wrong("the tenant has no addresses for them: write `pools`".to_owned());
                }
                for (at, range) in claim.guest.pools.iter().enumerate() {
                    if !covered(*range, &tenant.pools) {
                        return self.mistake(
                            &format!("{path}.guest.pools[{at}]"),
                            format!(
                                "tenant {}: claim[{index}].guest.pools[{at}]: {range} is not inside the tenant's `pools`: write a part of \
                                 them",
                                tenant.name
                            ),
                        );
                    }
                }
                for (other, earlier, first) in &claims {
                    let Some(what) = claim.meets(earlier) else {
                        continue;
                    };
                    if other.name == tenant.name {
                        if earlier.same_services(claim) {
                            return wrong(format!("is the claim at {first} again: remove one of the two"));
                        }
                        continue;
                    }
                    return wrong(format!(
                        "takes Services{what} that the claim of tenant {} at {first} takes too, and a Service that two tenants \
                         claim gets no address: make the two differ",
                        other.name
                    ));
                }
                claims.push((tenant, claim, self.position(&path)));
            }
        }
        Ok(())
    }

    /// A tenant that must give addresses has one.
    fn room(&self) -> Result<()> {
        for (path, tenant) in self.tenants() {
            let wanted = !tenant.claims.is_empty() || tenant.frontends.iter().any(|frontend| frontend.vip.is_none());
            if wanted && !tenant.pools.iter().any(|pool| !covered(*pool, &tenant.avoid)) {
                return self.mistake(
                    &format!("{path}.pools"),
                    format!(
                        "tenant {}: pools: no address is left after `avoid`, the gateway and the host's own: write a larger pool",
                        tenant.name
                    ),
                );
            }
        }
        Ok(())
    }
}

/// Why no host in the prefix can have the address.
pub(super) fn impossible(address: IpAddr, prefix: IpNet) -> Option<&'static str> {
    if !prefix.contains(&address) {
        Some("outside the segment's prefix")
    } else if prefix.prefix_len() + 1 >= prefix.max_prefix_len() {
        // RFC 3021, RFC 6164: both addresses of a /31 or /127 are hosts.
        None
    } else if address == prefix.network() {
        Some(if address.is_ipv6() { "the subnet-router anycast address of" } else { "the network address of" })
    } else if address.is_ipv4() && address == prefix.broadcast() {
        Some("the broadcast address of")
    } else {
        None
    }
}

fn avoid_impossible(config: &mut Config) {
    let sources = sources(config);
    let hub = &config.hub;
    for tenant in &mut config.tenants {
        let mut impossible: BTreeSet<IpAddr> = tenant.gateways.iter().copied().collect();
        for prefix in &tenant.addresses {
            impossible.insert(prefix.addr());
            if prefix.prefix_len() + 1 < prefix.max_prefix_len() {
                impossible.insert(prefix.network());
                impossible.extend(Some(prefix.broadcast()).filter(IpAddr::is_ipv4));
            }
        }
        if hub.segment == tenant.segment {
            impossible.extend(&hub.snat);
        }
        impossible.extend(sources.iter().filter(|(segment, _)| *segment == tenant.segment).map(|(_, address)| address));
        for address in impossible {
            if tenant.may_hand_out(address) {
                tenant.avoid.push(AddressRange { first: address, last: address });
            }
        }
    }
}

/// The SNAT addresses of tenants and frontends, with the segments in which they are used.
pub(super) fn sources(config: &Config) -> BTreeSet<(SegmentName, IpAddr)> {
    let mut all = BTreeSet::new();
    for tenant in &config.tenants {
        let mut add = |segment: &SegmentName, settings: &FrontendSettings| {
            all.extend(settings.snat.iter().map(|&address| (segment.clone(), address)));
        };
        add(&config.hub.segment, &tenant.settings);
        for frontend in &tenant.frontends {
            let segment = if frontend.via == Via::Hub { &config.hub.segment } else { &tenant.segment };
            add(segment, &frontend.settings);
        }
    }
    all
}

/// Whether every address of the range is in one of the others.
fn covered(range: AddressRange, others: &[AddressRange]) -> bool {
    let mut address = range.first;
    loop {
        let Some(last) = others.iter().filter(|other| other.contains(address)).map(|other| other.last).max() else {
            return false;
        };
        match following(last).filter(|next| range.contains(*next)) {
            Some(next) => address = next,
            None => return true,
        }
    }
}

impl AddressRange {
    /// Whether an address is in both.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.contains(other.first) || other.contains(self.first)
    }
}

impl Claim {
    fn same_services(&self, other: &Self) -> bool {
        let Self { namespaces, namespace_labels, service_labels, mode: _, guest: _ } = self;
        (namespaces, namespace_labels, service_labels)
            == (&other.namespaces, &other.namespace_labels, &other.service_labels)
    }

    /// Whether every Service that this claim matches somewhere is matched by the other too: says where, in words.
    fn meets(&self, other: &Self) -> Option<String> {
        let implied = |mine: &BTreeMap<String, String>, others: &BTreeMap<String, String>| {
            others.iter().all(|(key, value)| mine.get(key) == Some(value))
        };
        let covers = |one: &Self, two: &Self| {
            implied(&one.namespace_labels, &two.namespace_labels) && implied(&one.service_labels, &two.service_labels)
        };
        let (mine, others) = (covers(self, other), covers(other, self));
        let within = |namespace: &str| Some(format!(" in namespace {namespace}"));
        match (self.namespaces.is_empty(), other.namespaces.is_empty()) {
            (true, true) => (mine || others).then(String::new),
            (false, true) => self.namespaces.first().filter(|_| mine).and_then(|namespace| within(namespace)),
            (true, false) => other.namespaces.first().filter(|_| others).and_then(|namespace| within(namespace)),
            (false, false) => self
                .namespaces
                .iter()
                .find(|namespace| other.namespaces.contains(namespace))
                .filter(|_| mine || others)
                .and_then(|namespace| within(namespace)),
        }
    }
}
