//! Which addresses can be given out.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::config::{AddressRange, Config, SegmentName, Tenant, Via, following};
use crate::plan::model::HostFacts;
use crate::source::{Inventory, ObjectName};

struct Holder {
    tenant: String,
    service: ObjectName,
    freed: Option<i64>,
}

/// What is known of the addresses of all segments.
pub(super) struct Addresses<'a> {
    config: &'a Config,
    taken: &'a BTreeSet<(SegmentName, IpAddr)>,
    /// Addresses with a purpose of their own, and which.
    special: BTreeMap<(&'a SegmentName, IpAddr), String>,
    prefixes: BTreeMap<&'a SegmentName, Vec<IpNet>>,
    /// By address and segment: most are told apart by the first.
    holders: BTreeMap<(IpAddr, &'a SegmentName), Vec<Holder>>,
    /// Where to go on in a tenant's pools: (range, address). Nothing before it becomes free during a pass.
    cursors: BTreeMap<(String, Vec<AddressRange>), (usize, Option<IpAddr>)>,
}

/// Addresses that no Service can have, by segment, as the file and the host tell them. Those of nodes are not among them.
pub(crate) fn unusable(config: &Config, host: &HostFacts) -> BTreeMap<SegmentName, BTreeSet<IpAddr>> {
    let (inventory, taken) = (Inventory::default(), BTreeSet::new());
    let addresses = Addresses::new(config, &inventory, host, &taken);
    let mut all: BTreeMap<SegmentName, BTreeSet<IpAddr>> = BTreeMap::new();
    for ((segment, address), _) in addresses.special {
        all.entry(segment.clone()).or_default().insert(address);
    }
    for (segment, prefixes) in addresses.prefixes {
        for prefix in prefixes.into_iter().filter(has_edges) {
            let edges = [Some(prefix.network()), Some(prefix.broadcast()).filter(IpAddr::is_ipv4)];
            all.entry(segment.clone()).or_default().extend(edges.into_iter().flatten());
        }
    }
    all
}

/// Whether the first and the last address of a prefix are special.
fn has_edges(prefix: &IpNet) -> bool {
    prefix.prefix_len() + 1 < prefix.max_prefix_len()
}

impl<'a> Addresses<'a> {
    pub(super) fn new(
        config: &'a Config,
        inventory: &Inventory,
        host: &HostFacts,
        taken: &'a BTreeSet<(SegmentName, IpAddr)>,
    ) -> Self {
        let mut special = BTreeMap::new();
        let mut prefixes: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for tenant in &config.tenants {
            let segment = &tenant.segment;
            let facts = host.of_segment(segment).map(|(_, facts)| facts);
            let own = tenant
                .addresses
                .iter()
                .copied()
                .chain(facts.into_iter().flat_map(|facts| facts.all_addresses.iter().copied()));
            for address in own {
                special.insert((segment, address.addr()), "is the load balancer's own".to_owned());
                prefixes.entry(segment).or_default().push(address.trunc());
            }
            let learnt = facts.into_iter().flat_map(|facts| facts.gateways.iter().copied());
            for gateway in tenant.gateways.iter().copied().chain(learnt) {
                special.insert((segment, gateway), "is the gateway's".to_owned());
            }
            for &address in &tenant.settings.snat {
                special.insert((&config.hub.segment, address), "is a SNAT address".to_owned());
            }
            for frontend in &tenant.frontends {
                if let Some(vip) = frontend.vip {
                    special.entry((segment, vip)).or_insert_with(|| {
                        format!("is reserved for frontend {} of tenant {}", frontend.name, tenant.name)
                    });
                }
                let behind = if frontend.via == Via::Hub { &config.hub.segment } else { segment };
                for backend in &frontend.backends {
                    special.insert((behind, backend.address), "is a backend's".to_owned());
                }
                for &address in &frontend.settings.snat {
                    special.insert((behind, address), "is a SNAT address".to_owned());
                }
            }
            if *segment == config.hub.segment {
                for address in inventory.nodes.values().flat_map(|node| &node.addresses) {
                    special.insert((segment, *address), "is a node's".to_owned());
                }
                for address in &config.hub.snat {
                    special.insert((segment, *address), "is a SNAT address".to_owned());
                }
            }
        }
        Self { config, taken, special, prefixes, holders: BTreeMap::new(), cursors: BTreeMap::new() }
    }

    /// Notes what the record says.
    pub(super) fn hold(&mut self, tenant: &'a Tenant, address: IpAddr, service: &ObjectName, freed: Option<i64>) {
        let holder = Holder { tenant: tenant.name.clone(), service: service.clone(), freed };
        self.holders.entry((address, &tenant.segment)).or_default().push(holder);
    }

    /// Undoes [`Self::hold`].
    pub(super) fn release(&mut self, tenant: &'a Tenant, address: IpAddr, service: &ObjectName) {
        if let Some(holders) = self.holders.get_mut(&(address, &tenant.segment)) {
            holders.retain(|holder| holder.service != *service);
        }
    }

    /// Gives an address to a Service. Returns whose reservations end by that: tenant and Service. Those of Services that shared it stay.
    pub(super) fn take(
        &mut self,
        tenant: &'a Tenant,
        address: IpAddr,
        service: &ObjectName,
    ) -> Vec<(String, ObjectName)> {
        let holders = self.holders.entry((address, &tenant.segment)).or_default();
        if let Some(own) = holders.iter_mut().find(|holder| holder.tenant == tenant.name && holder.service == *service)
        {
            own.freed = None;
            return Vec::new();
        }
        let mut former = Vec::new();
        if holders.iter().all(|holder| holder.freed.is_some()) {
            former = holders.drain(..).map(|holder| (holder.tenant, holder.service)).collect();
        }
        holders.push(Holder { tenant: tenant.name.clone(), service: service.clone(), freed: None });
        former
    }

    /// Who else has the address now: tenants and Services.
    pub(super) fn holders<'b>(
        &'b self,
        tenant: &'a Tenant,
        address: IpAddr,
        service: &'b ObjectName,
    ) -> impl Iterator<Item = (&'b str, &'b ObjectName)> + use<'b, 'a> {
        let all = self.holders.get(&(address, &tenant.segment)).into_iter().flatten();
        let others = all.filter(move |holder| holder.freed.is_none() && holder.service != *service);
        others.map(|holder| (holder.tenant.as_str(), &holder.service))
    }

    /// Whether a Service may keep the address that the record names; else why not.
    pub(super) fn keepable(&self, tenant: &'a Tenant, address: IpAddr, service: &ObjectName) -> Result<(), String> {
        let other = self.config.tenants.iter().find(|other| {
            other.segment == tenant.segment
                && other.name != tenant.name
                && other.pools.iter().any(|pool| pool.contains(address))
        });
        if let Some(other) = other {
            return Err(format!("it is in the pool of tenant {} now", other.name));
        }
        // Two of one tenant share it, or shared it once. Of two tenants one is a mistake: the first by name keeps it.
        let here = (tenant.name.as_str(), service);
        match self.holders(tenant, address, service).find(|other| other.0 != tenant.name && *other < here) {
            Some((other, holder)) => Err(format!("it is also recorded for {holder} of tenant {other}")),
            None => Ok(()),
        }
    }

    /// Whether a Service may have this address; else why not. A reservation for another Service is no hindrance.
    pub(super) fn free(&self, tenant: &'a Tenant, address: IpAddr, service: &ObjectName) -> Result<(), String> {
        self.allowed(tenant, address)?;
        match self.holders(tenant, address, service).next() {
            Some((_, holder)) => Err(format!("it belongs to the Service {holder}")),
            None => Ok(()),
        }
    }

    /// Whether Services of a tenant may have this address; else why not.
    pub(super) fn allowed(&self, tenant: &'a Tenant, address: IpAddr) -> Result<(), String> {
        if !tenant.pools.iter().any(|pool| pool.contains(address)) {
            return Err(format!("it is in no pool of tenant {}", tenant.name));
        }
        self.usable(tenant, address)
    }

    /// Whether anybody may have this address; else why not.
    fn usable(&self, tenant: &'a Tenant, address: IpAddr) -> Result<(), String> {
        if tenant.avoid.iter().any(|range| range.contains(address)) {
            return Err("the configuration says to avoid it".to_owned());
        }
        if let Some(purpose) = self.special.get(&(&tenant.segment, address)) {
            return Err(format!("it {purpose}"));
        }
        for prefix in self.prefixes.get(&tenant.segment).into_iter().flatten() {
            if !has_edges(prefix) || !prefix.contains(&address) {
                continue;
            }
            if address.is_ipv4() && (address == prefix.network() || address == prefix.broadcast()) {
                return Err(format!("it is the network or broadcast address of {prefix}"));
            }
            if address.is_ipv6() && address == prefix.network() {
                return Err(format!("it is the subnet-router anycast address of {prefix}"));
            }
        }
        let impossible = match address {
            IpAddr::V4(v4) => v4.is_broadcast(),
            IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.to_ipv4_mapped().is_some(),
        };
        if impossible || address.is_multicast() || address.is_loopback() || address.is_unspecified() {
            return Err("no host can have it".to_owned());
        }
        if self.taken.contains(&(tenant.segment.clone(), address)) {
            return Err("another station answers for it".to_owned());
        }
        Ok(())
    }

    /// An address of a family for a Service: the first that nobody has or had of late, else the one freed longest ago.
    pub(super) fn next(
        &mut self,
        tenant: &'a Tenant,
        pools: &[AddressRange],
        v6: bool,
        service: &ObjectName,
    ) -> Option<IpAddr> {
        let pools: Vec<AddressRange> = pools.iter().copied().filter(|pool| pool.first.is_ipv6() == v6).collect();
        let key = (tenant.name.clone(), pools.clone());
        let (mut range, mut at) = self.cursors.get(&key).copied().unwrap_or_default();
        let mut found = None;
        while let (None, Some(pool)) = (found, pools.get(range)) {
            let address = at.unwrap_or(pool.first);
            // A pool may be a /64, and what is avoided of it, too: passed over at once.
            let avoided = tenant.avoid.iter().find(|avoided| avoided.contains(address));
            let next = following(avoided.map_or(address, |avoided| avoided.last));
            if avoided.is_none() {
                let held = self.holders.get(&(address, &tenant.segment)).is_some_and(|holders| !holders.is_empty());
                if !held && self.free(tenant, address, service).is_ok() {
                    found = Some(address);
                }
            }
            at = next.filter(|next| pool.contains(*next));
            range += usize::from(at.is_none());
        }
        self.cursors.insert(key, (range, at));
        found.or_else(|| {
            let longest = self.holders.iter().filter(|((address, segment), holders)| {
                **segment == tenant.segment
                    && !holders.is_empty()
                    && pools.iter().any(|pool| pool.contains(*address))
                    && self.free(tenant, *address, service).is_ok()
            });
            let longest = longest.filter_map(|((address, _), holders)| {
                Some((holders.iter().filter_map(|holder| holder.freed).min()?, *address))
            });
            longest.min().map(|(_, address)| address)
        })
    }
}
