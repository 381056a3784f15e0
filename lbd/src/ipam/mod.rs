//! Which Services are whose, and which address each of them has.
//!
//! An address is sticky: the record names it, and nothing but the operator's file takes it away while the Service lives. A freed address
//! stays reserved for its `namespace/name` for [`RESERVED`]; only when a pool has nothing else left is the one freed longest ago given
//! away, for a Service that waits without an address stops a hosted cluster. If the record is lost, what the Services' own status says
//! is believed where it is plausible, oldest Service first, before anything new is given out.

mod address;
mod claim;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use self::address::Addresses;
pub(crate) use self::claim::unserved;
use self::claim::{Wanted, is_guest_made, requested, wanted};
use crate::config::{Config, SegmentName, Tenant};
use crate::plan::model::{HostFacts, Notice};
use crate::source::{Inventory, ObjectName};

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

/// Addresses given out, as kept on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Grows with every change; of two records the one with the higher generation counts.
    pub generation: u64,
    /// Entries.
    pub entries: Vec<Entry>,
}

/// An address given to a Service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Entry {
    /// Tenant.
    pub tenant: String,
    /// Service.
    pub service: ObjectName,
    /// Address.
    pub address: IpAddr,
    /// Since when no Service uses it, in seconds since the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freed: Option<i64>,
}

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
            addresses: Addresses::new(config, inventory, host, taken),
            config,
            now,
            services: BTreeMap::new(),
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
    fn key(&self) -> (String, ObjectName) {
        (self.tenant.clone(), self.service.clone())
    }
}

/// One pass of [`Ipam::assign`].
struct Run<'a> {
    record: BTreeMap<(String, ObjectName), Entry>,
    addresses: Addresses<'a>,
    config: &'a Config,
    now: i64,
    services: BTreeMap<ObjectName, ServiceAssignment>,
    notices: Vec<Notice>,
}

type ByAge<'a, 'b> = [(&'b ObjectName, &'b Wanted<'a>)];

impl<'a> Run<'a> {
    /// Marks what nothing wants any more, forgets what was freed long ago.
    fn free(&mut self, wanted: &BTreeMap<ObjectName, Wanted<'a>>) {
        let now = self.now;
        self.record.retain(|(tenant, name), entry| {
            let used = wanted.get(name).is_some_and(|wanted| wanted.tenant.name == *tenant);
            match entry.freed {
                None if !used => entry.freed = Some(now),
                // A clock that was set back must not keep a reservation for ever.
                Some(freed) if !used && (freed > now || freed + RESERVED <= now) => return false,
                None | Some(_) => {}
            }
            true
        });
    }

    /// What the file or the record says.
    fn keep(&mut self, wanted: &BTreeMap<ObjectName, Wanted<'a>>) {
        for (name, wanted) in wanted {
            let key = (wanted.tenant.name.clone(), name.clone());
            let recorded = self.record.get(&key).map(|entry| entry.address);
            if let Some(vip) = wanted.frontend.and_then(|frontend| frontend.vip) {
                // The status of a claimed Service shows it, so it is remembered like any other.
                if wanted.claimed && !Self::is_foreign(wanted, recorded, Some(vip)) {
                    self.give(name, wanted, vip);
                } else {
                    self.record.remove(&key);
                    self.services.entry(name.clone()).or_insert_with(|| wanted.assignment()).addresses = vec![vip];
                }
                continue;
            }
            let Some(address) = recorded else { continue };
            if let Err(reason) = self.addresses.keepable(wanted.tenant, address, name) {
                self.record.remove(&key);
                self.addresses.release(wanted.tenant, address, name);
                self.notice(
                    "AddressWithdrawn",
                    name,
                    wanted,
                    format!("the address {address} of this Service cannot be kept: {reason}"),
                );
                continue;
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
            let terminating = wanted.service.is_some_and(|service| service.terminating);
            if terminating && self.record.get(&key).is_some_and(|entry| entry.freed.is_some()) {
                continue;
            }
            self.give(name, wanted, address);
        }
    }

    /// Whether a Service not on record shows an address that we did not give it.
    fn is_foreign(wanted: &Wanted<'a>, recorded: Option<IpAddr>, ours: Option<IpAddr>) -> bool {
        let Some(service) = wanted.service else { return false };
        recorded.is_none()
            && !service.ingress.is_empty()
            && service.ingress.first().and_then(|first| first.parse().ok()) != ours
    }

    /// Believes the status of Services that are not on record.
    fn honour(&mut self, by_age: &ByAge<'a, '_>) {
        for (name, wanted) in by_age {
            let Some(service) = wanted.service.filter(|_| wanted.claimed) else { continue };
            let Some(shown) = service.ingress.first() else { continue };
            let served = self.services.get(*name).map(|assignment| assignment.addresses.clone());
            if self.record.contains_key(&(wanted.tenant.name.clone(), (*name).clone())) {
                continue;
            }
            let reason = match shown.parse() {
                _ if served.is_some() => "the file reserves another address for it".to_owned(),
                Err(_) => "it is not an IP address".to_owned(),
                Ok(address) => match self.addresses.free(wanted.tenant, address, name) {
                    Ok(()) => {
                        self.give(name, wanted, address);
                        continue;
                    }
                    Err(reason) => reason,
                },
            };
            let mut assignment = wanted.assignment();
            assignment.claimed = false;
            assignment.addresses = served.unwrap_or_default();
            self.services.insert((*name).clone(), assignment);
            self.notice(
                "ForeignAddress",
                name,
                wanted,
                format!(
                    "this Service already shows the address {shown}, which this load balancer did not give it ({reason}); \
                     it is left alone: remove it from the status or let the load balancer adopt the Service"
                ),
            );
        }
    }

    /// Gives what Services ask for, oldest first.
    fn requests(&mut self, by_age: &ByAge<'a, '_>) {
        for (name, wanted) in by_age {
            let Some(service) = wanted.service.filter(|_| wanted.claimed) else { continue };
            let request = match requested(service, &self.config.address_annotations) {
                Ok(None) => continue,
                Ok(Some(address)) => address,
                Err(reason) => {
                    self.refuse_request(name, wanted, &reason);
                    continue;
                }
            };
            if let Some(assignment) = self.services.get(*name) {
                if assignment.claimed && !assignment.addresses.is_empty() && !assignment.addresses.contains(&request) {
                    self.refuse_request(
                        name,
                        wanted,
                        &format!("the address {request} was asked for after another was given"),
                    );
                }
                continue;
            }
            if service.terminating || unserved(service).is_some() {
                continue;
            }
            match self.addresses.free(wanted.tenant, request, name) {
                Ok(()) => self.give(name, wanted, request),
                Err(reason) => {
                    self.refuse_request(name, wanted, &format!("the address {request} was asked for, but {reason}"));
                }
            }
        }
    }

    /// Says of Services that want to share an address that they do not.
    fn sharing(&mut self, by_age: &ByAge<'a, '_>) {
        for (name, wanted) in by_age {
            let asks = wanted
                .service
                .is_some_and(|service| !service.terminating && service.annotations.contains_key(SHARED_KEY_ANNOTATION));
            if asks {
                let message = format!(
                    "{SHARED_KEY_ANNOTATION}: addresses shared by several Services are not supported yet: this one has its own or none"
                );
                self.notice("SharingUnsupported", name, wanted, message);
            }
        }
    }

    fn refuse_request(&mut self, name: &ObjectName, wanted: &Wanted<'a>, reason: &str) {
        let kept = match self.services.get(name).and_then(|assignment| assignment.addresses.first()) {
            Some(address) => format!("it keeps {address}"),
            None => "it gets no address until the request changes".to_owned(),
        };
        self.services.entry(name.clone()).or_insert_with(|| wanted.assignment());
        self.notice("AddressRequestRefused", name, wanted, format!("{reason}; {kept}"));
    }

    /// Gives an address to every Service that still has none, oldest first.
    fn allocate(&mut self, by_age: &ByAge<'a, '_>) {
        let mut guests: BTreeMap<&str, u32> = BTreeMap::new();
        for (name, wanted) in by_age {
            if wanted.service.is_some_and(is_guest_made)
                && self.services.get(*name).is_some_and(|assignment| !assignment.addresses.is_empty())
            {
                *guests.entry(&wanted.tenant.name).or_default() += 1;
            }
        }
        for (name, wanted) in by_age {
            if self.services.contains_key(*name) {
                continue;
            }
            if wanted.service.is_some_and(|service| service.terminating || unserved(service).is_some()) {
                continue;
            }
            let mut pools = wanted.tenant.pools.as_slice();
            if wanted.service.is_some_and(is_guest_made)
                && let Some(claim) = wanted.claim
            {
                let count = guests.entry(&wanted.tenant.name).or_default();
                if let Some(limit) = claim.guest.max_vips.filter(|&limit| *count >= limit) {
                    self.notice(
                        "GuestLimit",
                        name,
                        wanted,
                        format!("the load balancer gives at most {limit} addresses to Services of this hosted cluster, and all are in use"),
                    );
                    continue;
                }
                *count += 1;
                if !claim.guest.pools.is_empty() {
                    pools = &claim.guest.pools;
                }
            }
            match self.addresses.next(wanted.tenant, pools, name) {
                Some(address) => self.give(name, wanted, address),
                None => self.notice("PoolExhausted", name, wanted, exhausted(wanted.tenant)),
            }
        }
    }

    fn give(&mut self, name: &ObjectName, wanted: &Wanted<'a>, address: IpAddr) {
        if let Some((tenant, former)) = self.addresses.take(wanted.tenant, address, name)
            && former != *name
        {
            self.record.remove(&(tenant, former));
        }
        let key = (wanted.tenant.name.clone(), name.clone());
        let entry = Entry { tenant: key.0.clone(), service: name.clone(), address, freed: None };
        self.record.insert(key, entry);
        let assignment = self.services.entry(name.clone()).or_insert_with(|| wanted.assignment());
        assignment.addresses = vec![address];
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
            self.services.entry(name.clone()).or_insert_with(|| wanted.assignment());
            if let Some((reason, message)) = wanted.service.and_then(unserved) {
                self.notice(reason, name, wanted, message);
            }
        }
        let entries: Vec<_> = self.record.into_values().collect();
        if record.entries != entries {
            *record = Record { generation: record.generation + 1, entries };
        }
        self.notices.sort();
        self.notices.dedup();
        Assignments { services: self.services, notices: self.notices }
    }
}

fn exhausted(tenant: &Tenant) -> String {
    if tenant.pools.is_empty() {
        return format!("the load balancer has no address pool for tenant {}; ask its operator for one", tenant.name);
    }
    let pools: Vec<_> = tenant
        .pools
        .iter()
        .map(
            |pool| {
                if pool.first == pool.last { pool.first.to_string() } else { format!("{}-{}", pool.first, pool.last) }
            },
        )
        .collect();
    format!(
        "no load balancer address left for this Service: every usable address of tenant {} ({}) is in use; delete a Service of type \
         LoadBalancer that is no longer needed, or ask the operator of the load balancer for a larger pool",
        tenant.name,
        pools.join(", ")
    )
}
