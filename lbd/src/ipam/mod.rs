//! Which Services are whose, and which address each of them has.
//!
//! An address is sticky: the record names it, and nothing but the operator's file takes it away while the Service lives. A freed address
//! stays reserved for its `namespace/name` for [`RESERVED`]; only when a pool has nothing else left is the one freed longest ago given
//! away, for a Service that waits without an address stops a hosted cluster. If the record is lost, what the Services' own status says
//! is believed where it is plausible, oldest Service first, before anything new is given out.

mod address;
mod claim;
pub mod record;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use self::address::Addresses;
pub(crate) use self::address::unusable;
use self::claim::{Wanted, requested, shared_key, wanted};
pub(crate) use self::claim::{is_guest_made, mode, unserved};
pub use self::record::{Entry, Record};
use crate::config::{Claim, Config, Mode, SegmentName, Tenant};
use crate::plan::model::{HostFacts, Notice};
use crate::source::{Inventory, ObjectName, Service, ServicePort};

/// Our load-balancer class.
pub const CLASS: &str = "lbd.tenantedge.io/edge";
/// Annotation with a requested address.
pub const VIP_ANNOTATION: &str = "lbd.tenantedge.io/vip";
/// The annotation by which Services ask for one address together.
const SHARED_KEY_ANNOTATION: &str = "lbd.tenantedge.io/shared-key";
/// Label of Services that a guest cluster made: what they ask for is not believed.
pub const GUEST_LABEL: &str = "cluster.x-k8s.io/tenant-service-name";
/// How long a freed address is kept for the Service that had it, in seconds.
pub const RESERVED: i64 = 24 * 3600;

/// What each Service has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignments {
    /// Services that a tenant claims or that a frontend of the file names, whether they exist yet or not.
    pub services: BTreeMap<ObjectName, ServiceAssignment>,
    /// What an operator should know.
    pub notices: Vec<Notice>,
}

/// What a Service has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceAssignment {
    /// Tenant by name.
    pub tenant: String,
    /// It is ours: its status is written.
    pub claimed: bool,
    /// The frontend of the file that reserves it.
    pub frontend: Option<String>,
    /// How its backends are found.
    pub mode: Mode,
    /// Its addresses, in the order of `spec.ipFamilies`; empty = none (a notice says why).
    pub addresses: Vec<IpAddr>,
}

/// Gives out addresses.
#[derive(Debug, Default)]
pub struct Ipam {
    record: Record,
}

impl Ipam {
    /// Starts from the record of an earlier life, or from none.
    pub fn new(record: Record) -> Self {
        Self { record }
    }

    /// To be kept on disk.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Takes in what another place has kept: where the two differ, the one with the higher generation counts; what only one of them
    /// knows is kept. Returns whether anything of it was news.
    pub fn restore(&mut self, other: Record) -> bool {
        self.record.merge(other)
    }

    /// Gives the record a generation above `generation`, so that it counts.
    pub fn outrank(&mut self, generation: u64) {
        self.record.generation = self.record.generation.max(generation) + 1;
    }

    /// From now on the Service with this UID is ours, whatever address it shows.
    pub fn adopt(&mut self, service: ObjectName, uid: String) {
        if self.record.adopted.get(&service) != Some(&uid) {
            self.record.adopted.insert(service, uid);
            self.record.generation += 1;
        }
    }

    /// Whether [`Self::assign`] would decide the same again from `after` as it has from `before`, with `decided`: all that it reads of the
    /// two is the same. Everything else must not have changed.
    pub fn decides_the_same(
        &self,
        config: &Config,
        decided: &Assignments,
        before: &Inventory,
        after: &Inventory,
    ) -> bool {
        // Where nodes live among tenants, none of them gets a node's address.
        let mixed = config.tenants.iter().any(|tenant| tenant.segment == config.hub.segment);
        let addresses = |inventory: &Inventory| -> BTreeSet<IpAddr> {
            inventory.nodes.values().flat_map(|node| node.addresses.iter().copied()).collect()
        };
        let recorded = |name: &ObjectName| {
            let tenant = decided.services.get(name).map(|assignment| assignment.tenant.as_str());
            tenant.is_some_and(|tenant| {
                let entries = &self.record.entries;
                let first = entries.partition_point(|entry| (entry.tenant.as_str(), &entry.service) < (tenant, name));
                entries.get(first).is_some_and(|entry| entry.tenant == tenant && entry.service == *name)
            })
        };
        before.complete == after.complete
            && before.namespaces == after.namespaces
            && (!mixed || before.nodes.ptr_eq(&after.nodes) || addresses(before) == addresses(after))
            && before.services.changes(&after.services).is_some_and(|changes| {
                changes.iter().all(|(name, before, after)| {
                    reads_the_same(before, after) && (before.ingress == after.ingress || recorded(name))
                })
            })
    }

    /// Decides about every Service. `taken` are addresses that another station answers for; `now` is in seconds since the epoch.
    ///
    /// While the inventory is not complete, nothing is given out or freed.
    pub fn assign(
        &mut self,
        config: &Config,
        inventory: &Inventory,
        host: &HostFacts,
        taken: &BTreeSet<(SegmentName, IpAddr)>,
        now: i64,
    ) -> Assignments {
        let mut notices = Vec::new();
        let wanted = wanted(config, inventory, &mut notices);
        let mut run = Run {
            record: self.record.entries.iter().map(|entry| (entry.key(), entry.clone())).collect(),
            adopted: self.record.adopted.clone(),
            addresses: Addresses::new(config, inventory, host, taken),
            inventory,
            config,
            now,
            services: BTreeMap::new(),
            settled: BTreeSet::new(),
            notices,
        };
        if inventory.complete || config.hub.kubernetes.is_none() {
            run.free(&wanted);
        }
        for entry in run.record.values() {
            if let Some(tenant) = config.tenants.iter().find(|tenant| tenant.name == entry.tenant) {
                run.addresses.hold(tenant, entry.address, &entry.service, entry.freed);
            }
        }
        run.keep(&wanted);
        if inventory.complete || config.hub.kubernetes.is_none() {
            let mut by_age: Vec<_> = wanted.iter().collect();
            by_age.sort_by_key(|(name, wanted)| {
                wanted.service.map_or((i64::MAX, "", *name), |service| (service.created, service.uid.as_str(), *name))
            });
            run.honour(&by_age);
            run.requests(&by_age);
            run.allocate(&by_age);
            run.sharing(&by_age);
        }
        run.finish(&wanted, &mut self.record)
    }
}

impl Entry {
    fn key(&self) -> Key {
        (self.tenant.clone(), self.service.clone(), self.address.is_ipv6())
    }
}

/// Tenant, Service and family (`true` = IPv6): what has one address.
type Key = (String, ObjectName, bool);

/// One pass of [`Ipam::assign`].
struct Run<'a> {
    record: BTreeMap<Key, Entry>,
    /// Services, by UID, whose foreign address is of no account.
    adopted: BTreeMap<ObjectName, String>,
    addresses: Addresses<'a>,
    inventory: &'a Inventory,
    config: &'a Config,
    now: i64,
    services: BTreeMap<ObjectName, ServiceAssignment>,
    /// Services that get nothing more in this pass.
    settled: BTreeSet<ObjectName>,
    notices: Vec<Notice>,
}

type ByAge<'a, 'b> = [(&'b ObjectName, &'b Wanted<'a>)];

impl<'a> Run<'a> {
    /// Marks what nothing wants any more, forgets what was freed long ago.
    fn free(&mut self, wanted: &BTreeMap<ObjectName, Wanted<'a>>) {
        let now = self.now;
        self.adopted.retain(|name, uid| {
            wanted.get(name).and_then(|wanted| wanted.service).is_some_and(|service| service.uid == *uid)
        });
        self.record.retain(|(tenant, name, v6), entry| {
            let used = wanted.get(name).is_some_and(|wanted| {
                wanted.tenant.name == *tenant && (wanted.service.is_none() || wanted.families().contains(v6))
            });
            match entry.freed {
                None if !used => entry.freed = Some(now),
                // A clock that was set back must neither keep a reservation for ever nor end it.
                Some(freed) if !used && freed > now => entry.freed = Some(now),
                Some(freed) if !used && freed + RESERVED <= now => return false,
                None | Some(_) => {}
            }
            true
        });
    }

    /// What the file or the record says.
    fn keep(&mut self, wanted: &BTreeMap<ObjectName, Wanted<'a>>) {
        for (name, wanted) in wanted {
            let vip = wanted.frontend.and_then(|frontend| frontend.vip);
            if let Some(vip) = vip {
                // The status of a claimed Service shows it, so it is remembered like any other.
                if wanted.claimed && !self.is_foreign(name, wanted, Some(vip)) {
                    self.give(name, wanted, vip);
                } else {
                    for v6 in [false, true] {
                        self.record.remove(&(wanted.tenant.name.clone(), name.clone(), v6));
                    }
                    self.services.entry(name.clone()).or_insert_with(|| wanted.assignment()).addresses = vec![vip];
                    self.settled.insert(name.clone());
                    continue;
                }
            }
            for v6 in [false, true].into_iter().filter(|&v6| vip.is_none_or(|vip| vip.is_ipv6() != v6)) {
                self.keep_recorded(name, wanted, v6);
            }
        }
    }

    fn keep_recorded(&mut self, name: &ObjectName, wanted: &Wanted<'a>, v6: bool) {
        let key = (wanted.tenant.name.clone(), name.clone(), v6);
        let Some((address, freed)) = self.record.get(&key).map(|entry| (entry.address, entry.freed)) else { return };
        // The Service has given up the family.
        if wanted.service.is_some() && !wanted.families().contains(&v6) {
            return;
        }
        if let Err(reason) = self.addresses.keepable(wanted.tenant, address, name) {
            self.record.remove(&key);
            self.addresses.release(wanted.tenant, address, name);
            self.notice(
                "AddressWithdrawn",
                name,
                wanted,
                format!("the address {address} of this Service cannot be kept: {reason}"),
            );
            return;
        }
        if !wanted.tenant.pools.iter().any(|pool| pool.contains(address)) {
            self.notice(
                "AddressOutsidePool",
                name,
                wanted,
                format!(
                    "the address {address} of this Service is in no pool of tenant {}; it is kept while the Service lives",
                    wanted.tenant.name
                ),
            );
        }
        if wanted.service.is_some_and(|service| service.terminating) && freed.is_some() {
            return;
        }
        self.give(name, wanted, address);
    }

    fn recorded(&self, name: &ObjectName, wanted: &Wanted<'a>) -> bool {
        [false, true].iter().any(|&v6| self.record.contains_key(&(wanted.tenant.name.clone(), name.clone(), v6)))
    }

    /// Whether a Service not on record shows an address that we did not give it.
    fn is_foreign(&self, name: &ObjectName, wanted: &Wanted<'a>, ours: Option<IpAddr>) -> bool {
        let Some(service) = wanted.service else { return false };
        !self.recorded(name, wanted)
            && !self.is_adopted(name, service)
            && !service.ingress.is_empty()
            && !service.ingress.iter().any(|shown| ours.is_some() && shown.parse().ok() == ours)
    }

    /// Whether an operator has said that it is ours.
    fn is_adopted(&self, name: &ObjectName, service: &Service) -> bool {
        self.adopted.get(name).is_some_and(|uid| *uid == service.uid)
    }

    /// The address of a family that a Service has.
    fn has(&self, name: &ObjectName, v6: bool) -> Option<IpAddr> {
        self.services.get(name)?.addresses.iter().copied().find(|address| address.is_ipv6() == v6)
    }

    /// Believes the status of Services that are not on record.
    fn honour(&mut self, by_age: &ByAge<'a, '_>) {
        for (name, wanted) in by_age {
            let Some(service) = wanted.service.filter(|_| wanted.claimed) else { continue };
            let Some(first) = service.ingress.first() else { continue };
            if self.recorded(name, wanted) {
                continue;
            }
            let served = self.services.get(*name).map(|assignment| assignment.addresses.clone());
            let families = wanted.families();
            let mut foreign = match first.parse::<IpAddr>() {
                _ if served.is_some() => Some((first, "the file reserves another address for it".to_owned())),
                Err(_) => Some((first, "it is not an IP address".to_owned())),
                Ok(_) => None,
            };
            if foreign.is_none() {
                for shown in &service.ingress {
                    let Ok(address) = shown.parse::<IpAddr>() else { continue };
                    let v6 = address.is_ipv6();
                    if self.has(name, v6).is_some() {
                        continue;
                    }
                    match self.obtainable(name, wanted, address) {
                        Ok(()) if families.contains(&v6) => self.give(name, wanted, address),
                        // The Service has given up the family.
                        Ok(()) => {}
                        // What is wrong with the second does not take away the first.
                        Err(_) if self.services.contains_key(*name) => {}
                        Err(reason) => {
                            foreign = Some((shown, reason));
                            break;
                        }
                    }
                }
            }
            let Some((shown, reason)) = foreign.filter(|_| !self.is_adopted(name, service)) else { continue };
            let mut assignment = wanted.assignment();
            assignment.claimed = false;
            assignment.addresses = served.unwrap_or_default();
            self.services.insert((*name).clone(), assignment);
            self.settled.insert((*name).clone());
            self.notice(
                "ForeignAddress",
                name,
                wanted,
                format!(
                    "this Service already shows the address {shown}, which this load balancer did not give it ({reason}); \
                     it is left alone: remove it from the status, or take it over with `lbctl adopt {name}`"
                ),
            );
        }
    }

    /// Gives what Services ask for, oldest first.
    fn requests(&mut self, by_age: &ByAge<'a, '_>) {
        for (name, wanted) in by_age {
            let Some(service) = wanted.service.filter(|_| wanted.claimed) else { continue };
            if self.services.get(*name).is_some_and(|assignment| !assignment.claimed) {
                continue;
            }
            let requests = match requested(service, &self.config.address_annotations) {
                Ok(requests) => requests,
                Err(reason) => {
                    self.refuse_request("AddressRequestRefused", name, wanted, &reason);
                    continue;
                }
            };
            for request in requests {
                let v6 = request.is_ipv6();
                match self.has(name, v6) {
                    Some(address) if address != request => {
                        let reason = format!("the address {request} was asked for after another was given");
                        self.refuse_request("AddressRequestRefused", name, wanted, &reason);
                        continue;
                    }
                    Some(_) => continue,
                    None => {}
                }
                if service.terminating || unserved(service).is_some() {
                    continue;
                }
                let free = if wanted.families().contains(&v6) {
                    self.obtainable(name, wanted, request)
                } else {
                    Err(format!("the Service has no {}", family(v6)))
                };
                let refused = match free {
                    Ok(()) => self.clash(name, wanted, request).map(|reason| ("PortClash", reason)),
                    Err(reason) => Some(("AddressRequestRefused", reason)),
                };
                match refused {
                    None => self.give(name, wanted, request),
                    Some((word, reason)) => {
                        let reason = format!("the address {request} was asked for, but {reason}");
                        self.refuse_request(word, name, wanted, &reason);
                    }
                }
            }
        }
    }

    /// Whether a Service may have this address, which may be one that others of its tenant have under the same key; else why not.
    fn obtainable(&self, name: &ObjectName, wanted: &Wanted<'a>, address: IpAddr) -> Result<(), String> {
        self.addresses.allowed(wanted.tenant, address)?;
        let key = wanted.service.and_then(shared_key);
        for (tenant, holder) in self.addresses.holders(wanted.tenant, address, name) {
            if tenant != wanted.tenant.name {
                return Err("it belongs to a Service of another tenant".to_owned());
            }
            let other = self.inventory.services.get(holder).and_then(|service| shared_key(service));
            if key.is_none() || other != key {
                return Err(format!(
                    "it belongs to the Service {holder}, and the two have no {SHARED_KEY_ANNOTATION} in common"
                ));
            }
        }
        Ok(())
    }

    /// Why a Service would have nothing of an address that it shares: others have all its ports already.
    fn clash(&self, name: &ObjectName, wanted: &Wanted<'a>, address: IpAddr) -> Option<String> {
        let ports = &wanted.service?.ports;
        let mut taken = BTreeMap::new();
        for (_, holder) in self.addresses.holders(wanted.tenant, address, name) {
            for port in self.inventory.services.get(holder).into_iter().flat_map(|service| &service.ports) {
                if let Some(protocol) = port.protocol() {
                    taken.entry((port.port, protocol)).or_insert(holder);
                }
            }
        }
        let mut first = None;
        for port in ports {
            let Some(protocol) = port.protocol() else { continue };
            let holder = taken.get(&(port.port, protocol))?;
            first.get_or_insert((port.port, protocol, holder));
        }
        let (port, protocol, holder) = first?;
        Some(format!("{port}/{} there is the Service {holder}'s", protocol.as_str()))
    }

    /// The address that the Services with the same key have: the oldest one's.
    fn shared(&self, by_age: &ByAge<'a, '_>, name: &ObjectName, wanted: &Wanted<'a>, v6: bool) -> Option<IpAddr> {
        let key = wanted.service.and_then(shared_key)?;
        let mut group = by_age.iter().filter(|(other, member)| {
            **other != *name
                && member.claimed
                && member.tenant.name == wanted.tenant.name
                && member.service.and_then(shared_key) == Some(key)
        });
        group.find_map(|(other, _)| self.has(other, v6))
    }

    /// Says of Services whose key came too late, or was changed, that they keep what they have.
    fn sharing(&mut self, by_age: &ByAge<'a, '_>) {
        for (place, (name, wanted)) in by_age.iter().enumerate() {
            let key = wanted.service.and_then(shared_key);
            let Some(service) = wanted.service.filter(|service| wanted.claimed && !service.terminating) else {
                continue;
            };
            for v6 in wanted.families() {
                let Some(address) = self.has(name, v6) else { continue };
                // Of an older one it is the younger one that is told.
                let older = key.and_then(|_| self.shared(&by_age[..place], name, wanted, v6));
                let apart = older.filter(|older| *older != address).map(|older| {
                    format!(
                        "{SHARED_KEY_ANNOTATION}: the Services with this key share {older}, but this one had {address} before and keeps \
                         it; make the Service anew to move it"
                    )
                });
                let stranger = || {
                    let mut others = self.addresses.holders(wanted.tenant, address, name);
                    let differs = |other: &ObjectName| {
                        let other = self.inventory.services.get(other);
                        other
                            .is_some_and(|other| shared_key(other) != shared_key(service) && older_than(other, service))
                    };
                    let (_, other) = others.find(|(_, other)| differs(other))?;
                    Some(format!(
                        "{SHARED_KEY_ANNOTATION} is no longer that of {other}, which has {address} too; both keep it while they live"
                    ))
                };
                if wanted.frontend.is_none_or(|frontend| frontend.vip.is_none())
                    && let Some(message) = apart.or_else(stranger)
                {
                    self.notice("SharedKeyIgnored", name, wanted, message);
                }
            }
        }
    }

    fn refuse_request(&mut self, word: &'static str, name: &ObjectName, wanted: &Wanted<'a>, reason: &str) {
        let kept = match self.services.get(name).and_then(|assignment| assignment.addresses.first()) {
            Some(address) => format!("it keeps {address}"),
            None => "it gets no address until the request changes".to_owned(),
        };
        self.services.entry(name.clone()).or_insert_with(|| wanted.assignment());
        self.settled.insert(name.clone());
        self.notice(word, name, wanted, format!("{reason}; {kept}"));
    }

    /// Gives addresses to every Service that lacks some, oldest first.
    fn allocate(&mut self, by_age: &ByAge<'a, '_>) {
        // By claim.
        let mut guests: BTreeMap<*const Claim, u32> = BTreeMap::new();
        for (name, wanted) in by_age {
            if let Some(claim) = wanted.claim.filter(|_| wanted.service.is_some_and(is_guest_made)) {
                let held = self.services.get(*name).map_or(0, |assignment| assignment.addresses.len() as u32);
                *guests.entry(std::ptr::from_ref(claim)).or_default() += held;
            }
        }
        for (name, wanted) in by_age {
            if self.settled.contains(*name)
                || wanted.service.is_some_and(|service| service.terminating || unserved(service).is_some())
            {
                continue;
            }
            let families = wanted.families();
            let missing: Vec<bool> = families.into_iter().filter(|&v6| self.has(name, v6).is_none()).collect();
            if let Some(&absent) = missing.iter().find(|&&v6| !wanted.has_pool(v6)) {
                let held = self.services.get(*name).is_some_and(|assignment| !assignment.addresses.is_empty());
                let strict = wanted.service.is_some_and(|service| service.require_dual_stack);
                let alone = !held && missing.iter().all(|&v6| !wanted.has_pool(v6));
                if strict || alone {
                    self.notice("FamilyUnavailable", name, wanted, without_family(wanted, absent, strict));
                    continue;
                }
            }
            for v6 in missing.into_iter().filter(|&v6| wanted.has_pool(v6)) {
                if let Some(shared) = self.shared(by_age, name, wanted, v6) {
                    match self.obtainable(name, wanted, shared).err().or_else(|| self.clash(name, wanted, shared)) {
                        None => self.give(name, wanted, shared),
                        Some(reason) => {
                            let reason = format!("this Service shares the address {shared} by its key, but {reason}");
                            self.refuse_request("PortClash", name, wanted, &reason);
                        }
                    }
                    continue;
                }
                let mut pools = wanted.tenant.pools.as_slice();
                let guest = wanted.claim.filter(|_| wanted.service.is_some_and(is_guest_made));
                if let Some(claim) = guest {
                    let count = guests.entry(std::ptr::from_ref(claim)).or_default();
                    if let Some(limit) = claim.guest.max_vips.filter(|&limit| *count >= limit) {
                        self.notice(
                            "GuestLimit",
                            name,
                            wanted,
                            format!(
                                "the load balancer gives at most {limit} addresses to Services of this hosted cluster, and all are in use"
                            ),
                        );
                        break;
                    }
                    *count += 1;
                    if !claim.guest.pools.is_empty() {
                        pools = &claim.guest.pools;
                    }
                }
                match self.addresses.next(wanted.tenant, pools, v6, name) {
                    Some(address) => self.give(name, wanted, address),
                    None => self.notice("PoolExhausted", name, wanted, exhausted(wanted.tenant, v6)),
                }
            }
        }
    }

    fn give(&mut self, name: &ObjectName, wanted: &Wanted<'a>, address: IpAddr) {
        for (tenant, former) in self.addresses.take(wanted.tenant, address, name) {
            self.record.remove(&(tenant, former, address.is_ipv6()));
        }
        let entry = Entry { tenant: wanted.tenant.name.clone(), service: name.clone(), address, freed: None };
        self.record.insert(entry.key(), entry);
        let assignment = self.services.entry(name.clone()).or_insert_with(|| wanted.assignment());
        assignment.addresses.retain(|other| other.is_ipv6() != address.is_ipv6());
        assignment.addresses.push(address);
    }

    fn notice(&mut self, reason: &'static str, name: &ObjectName, wanted: &Wanted<'a>, message: String) {
        self.notices.push(Notice {
            reason,
            service: Some(name.clone()),
            tenant: Some(wanted.tenant.name.clone()),
            message,
        });
    }

    fn finish(mut self, wanted: &BTreeMap<ObjectName, Wanted<'a>>, record: &mut Record) -> Assignments {
        for (name, wanted) in wanted {
            let families = wanted.families();
            let place = |address: &IpAddr| families.iter().position(|&v6| v6 == address.is_ipv6());
            let assignment = self.services.entry(name.clone()).or_insert_with(|| wanted.assignment());
            assignment.addresses.sort_by_key(place);
            if let Some((reason, message)) = wanted.service.and_then(unserved) {
                self.notice(reason, name, wanted, message);
            }
        }
        let mut entries: Vec<_> = self.record.into_values().collect();
        record::bound(&mut entries);
        if record.entries != entries || record.adopted != self.adopted {
            *record = Record { generation: record.generation + 1, entries, adopted: self.adopted };
        }
        self.notices.sort();
        self.notices.dedup();
        Assignments { services: self.services, notices: self.notices }
    }
}

/// Whether nothing is different in two states of a Service that decides about addresses; but for what its status shows, which is looked
/// at only while the Service is not on record.
fn reads_the_same(before: &Service, after: &Service) -> bool {
    let Service {
        uid,
        created,
        labels,
        annotations,
        kind,
        class,
        selector,
        terminating,
        ports,
        families_v6,
        require_dual_stack,
        policy_local: _,
        health_port: _,
        client_ip_affinity: _,
        requested_address,
        source_ranges,
        ingress: _,
        ingress_modes: _,
        programmed: _,
        published: _,
    } = before;
    let known = |ports: &[ServicePort]| -> Vec<(u16, String)> {
        ports.iter().map(|port| (port.port, port.protocol.clone())).collect()
    };
    *uid == after.uid
        && *created == after.created
        && *labels == after.labels
        && *annotations == after.annotations
        && *kind == after.kind
        && *class == after.class
        && *selector == after.selector
        && *terminating == after.terminating
        && known(ports) == known(&after.ports)
        && *families_v6 == after.families_v6
        && *require_dual_stack == after.require_dual_stack
        && *requested_address == after.requested_address
        && *source_ranges == after.source_ranges
}

fn older_than(one: &Service, other: &Service) -> bool {
    (one.created, &one.uid) < (other.created, &other.uid)
}

const fn family(v6: bool) -> &'static str {
    if v6 { "IPv6" } else { "IPv4" }
}

fn without_family(wanted: &Wanted<'_>, v6: bool, strict: bool) -> String {
    let (family, tenant) = (family(v6), &wanted.tenant.name);
    if strict {
        format!(
            "RequireDualStack cannot be met: the load balancer has no {family} address pool for tenant {tenant}; use PreferDualStack, or \
             ask its operator for one"
        )
    } else {
        format!(
            "this Service wants an address of {family}, and the load balancer has no {family} address pool for tenant {tenant}; ask its \
             operator for one"
        )
    }
}

fn exhausted(tenant: &Tenant, v6: bool) -> String {
    let pools: Vec<_> =
        tenant.pools.iter().filter(|pool| pool.first.is_ipv6() == v6).map(ToString::to_string).collect();
    format!(
        "no load balancer address left for this Service: every usable address of tenant {} ({}) is in use; delete a Service of type \
         LoadBalancer that is no longer needed, or ask the operator of the load balancer for a larger pool",
        tenant.name,
        pools.join(", ")
    )
}
