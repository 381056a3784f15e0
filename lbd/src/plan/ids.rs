//! Ids that survive restarts, and what must be remembered of the past to find flows that have to go.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use lbd_common::abi::{MAX_BACKENDS, MAX_FRONTENDS, MAX_TENANTS, MAX_TIMEOUTS};
use serde::{Deserialize, Serialize};

use super::model::{BackendId, FrontendAddress, Pinned, Reset, SegmentId, TenantId};
use crate::config::{Config, Protocol, SegmentName, Tenant, Timeouts};
use crate::source::ObjectName;

/// Ids that must survive restarts, and what is needed to find flows whose backend is gone or another's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Ids {
    pub(super) segments: Pool<SegmentKey, ()>,
    pub(super) tenants: Pool<String, ()>,
    pub(super) frontends: Pool<FrontendKey, FrontendMemory>,
    pub(super) backends: Pool<BackendKey, BackendMemory>,
    pub(super) timeouts: Pool<Timeouts, ()>,
    /// Which Service a NodePort belonged to last: its UID, or its name if it has none.
    #[serde(with = "pairs")]
    pub(super) targets: BTreeMap<TargetKey, String>,
    /// SNAT addresses that lbd answers for: those that are not the host's own.
    pub(super) sources: BTreeSet<(SegmentId, IpAddr)>,
    /// Resets that are not in the maps yet.
    pub(super) pending: BTreeSet<Reset>,
    /// Counts changes of what the pools remember, of `targets` and of `pending`.
    #[serde(skip)]
    pub(super) changes: u64,
    /// Counts those after which it is known of something whose it is now: that must not be forgotten.
    #[serde(skip)]
    pub(super) bound: u64,
}

impl Ids {
    /// The name of each tenant that has an id, for counters that outlive a plan.
    pub fn tenants(&self) -> BTreeMap<TenantId, String> {
        self.tenants.used.iter().map(|(name, entry)| (entry.id, name.clone())).collect()
    }

    /// Whether the maps know the segments of configured interfaces by these ids. A file that was lost, or comes from elsewhere, does not
    /// agree: what is in the maps would be read as another segment's.
    pub(super) fn agree(&self, pinned: &Pinned) -> bool {
        pinned
            .segments
            .iter()
            .all(|(name, &id)| self.segments.used.get(&name.into()).is_some_and(|entry| entry.id == id))
    }

    /// The ids that the maps hold. Who a frontend belonged to is not in the maps: whose VIP it is now has had it.
    pub(super) fn recovered(pinned: &Pinned, config: &Config) -> Self {
        let mut ids = Self { changes: 1, ..Self::default() };
        ids.segments.used = pinned.segments.iter().map(|(name, &id)| (name.into(), Entry { id, memory: () })).collect();
        ids.segments.highest = pinned.last_segment;
        for (address, &(id, tenant_id)) in &pinned.frontends {
            let here = |tenant: &&Tenant| pinned.segments.get(&tenant.segment) == Some(&address.segment);
            let owns = |tenant: &&Tenant| {
                tenant.pools.iter().any(|range| range.contains(address.vip))
                    || tenant.frontends.iter().any(|frontend| frontend.vip == Some(address.vip))
            };
            // Nobody's: its flows are reset.
            let mut memory = FrontendMemory { recovered: true, ..FrontendMemory::default() };
            if let Some(tenant) = config.tenants.iter().filter(here).find(owns) {
                ids.tenants.used.entry(tenant.name.clone()).or_insert(Entry { id: tenant_id, memory: () });
                memory.tenant.clone_from(&tenant.name);
            }
            ids.frontends.used.insert(address.into(), Entry { id, memory });
        }
        ids.tenants.highest = pinned.last_tenant;
        ids.frontends.highest = pinned.last_frontend;
        for (&id, &(segment, address, port)) in &pinned.backends {
            let key = BackendKey { segment, address, port };
            ids.backends.used.insert(key, Entry { id, memory: BackendMemory::default() });
        }
        ids.repair();
        ids
    }

    /// Grows whenever something has changed that belongs on disk.
    pub(super) fn revision(&self) -> u64 {
        let Self {
            segments,
            tenants,
            frontends,
            backends,
            timeouts,
            targets: _,
            sources: _,
            pending: _,
            changes,
            bound: _,
        } = self;
        changes + segments.changes + tenants.changes + frontends.changes + backends.changes + timeouts.changes
    }

    /// Grows whenever something has changed that must be on disk before the maps hold it: an id has been given out, or something
    /// has another owner. The rest follows again from what the disk holds, should this agent die before it is written: what is gone is
    /// found gone again, and the same flows are reset again.
    pub(super) fn binding_revision(&self) -> u64 {
        let Self {
            segments,
            tenants,
            frontends,
            backends,
            timeouts,
            targets: _,
            sources: _,
            pending: _,
            changes: _,
            bound,
        } = self;
        bound + segments.given + tenants.given + frontends.given + backends.given + timeouts.given
    }

    /// Notes that a NodePort has another owner.
    pub(super) fn set_owner(&mut self, key: TargetKey, owner: String) {
        self.targets.insert(key, owner);
        self.changes += 1;
        self.bound += 1;
    }

    /// A file can hold anything: no id twice, none out of range.
    pub(super) fn repair(&mut self) {
        self.segments.repair(SEGMENTS);
        self.tenants.repair(TENANTS);
        self.frontends.repair(FRONTENDS);
        self.backends.repair(BACKENDS);
        self.timeouts.repair(TIMEOUTS);
    }
}

/// How many ids there are, and how many must be given back after one before that one is used again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) last: u16,
    quarantine: usize,
}

pub(super) const SEGMENTS: Bounds = Bounds { last: u16::MAX, quarantine: 1024 };
pub(super) const TENANTS: Bounds = Bounds { last: (MAX_TENANTS - 1) as u16, quarantine: 16 };
pub(super) const FRONTENDS: Bounds = Bounds { last: (MAX_FRONTENDS - 1) as u16, quarantine: 1024 };
pub(super) const BACKENDS: Bounds = Bounds { last: (MAX_BACKENDS - 1) as u16, quarantine: 1024 };

/// A flow finds its timeouts through its frontend, so an index may be used again as soon as no frontend has it.
pub(super) const TIMEOUTS: Bounds = Bounds { last: (MAX_TIMEOUTS - 1) as u16, quarantine: 0 };

/// Ids by key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(bound(
    serialize = "K: Serialize + Ord, V: Serialize",
    deserialize = "K: Deserialize<'de> + Ord, V: Deserialize<'de>"
))]
pub(super) struct Pool<K, V> {
    #[serde(with = "pairs")]
    pub(super) used: BTreeMap<K, Entry<V>>,
    /// Ids given back, in the order of that.
    retired: VecDeque<u16>,
    /// Highest id ever given out.
    pub(super) highest: u16,
    #[serde(skip)]
    changes: u64,
    /// Counts ids given out.
    #[serde(skip)]
    given: u64,
}

/// An id and what belongs to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry<V> {
    pub(super) id: u16,
    #[serde(flatten)]
    pub(super) memory: V,
}

impl<K, V> Default for Pool<K, V> {
    fn default() -> Self {
        Self { used: BTreeMap::new(), retired: VecDeque::new(), highest: 0, changes: 0, given: 0 }
    }
}

impl<K: Ord, V> Pool<K, V> {
    /// An id that nobody has: one never used, else the one given back longest ago. `None` if there is none.
    pub(super) fn fresh(&mut self, bounds: Bounds) -> Option<u16> {
        self.changes += 1;
        self.given += 1;
        if self.highest < bounds.last {
            self.highest += 1;
            return Some(self.highest);
        }
        (self.retired.len() > bounds.quarantine).then(|| self.retired.pop_front()).flatten()
    }

    /// How many ids [`Self::fresh`] has yet.
    pub(super) fn available(&self, bounds: Bounds) -> usize {
        usize::from(bounds.last - self.highest) + self.retired.len().saturating_sub(bounds.quarantine)
    }

    /// How many ids are in quarantine that may end for want of others.
    pub(super) fn waiting(&self, bounds: Bounds, blocked: impl Fn(u16) -> bool) -> usize {
        let all = self.retired.iter().filter(|&&id| !blocked(id)).count();
        all - self.retired.len().saturating_sub(bounds.quarantine).min(all)
    }

    /// The id given back longest ago, if it may be used again before its time.
    pub(super) fn reuse(&mut self, blocked: impl Fn(u16) -> bool) -> Option<u16> {
        let place = self.retired.iter().position(|&id| !blocked(id))?;
        self.changes += 1;
        self.given += 1;
        self.retired.remove(place)
    }

    /// The id of a key, which gets one if it has none.
    pub(super) fn id(&mut self, key: K, bounds: Bounds, memory: impl FnOnce() -> V) -> Option<u16> {
        if let Some(entry) = self.used.get(&key) {
            return Some(entry.id);
        }
        let id = self.fresh(bounds)?;
        self.used.insert(key, Entry { id, memory: memory() });
        Some(id)
    }

    /// Notes that an id is not used any more.
    pub(super) fn retire(&mut self, id: u16) {
        self.changes += 1;
        self.retired.push_back(id);
    }

    /// Gives back the ids of keys that are not wanted any more, and returns them.
    pub(super) fn keep_only(&mut self, mut wanted: impl FnMut(&K, &V) -> bool) -> Vec<u16> {
        let mut gone = Vec::new();
        self.used.retain(|key, entry| {
            let keep = wanted(key, &entry.memory);
            if !keep {
                gone.push(entry.id);
            }
            keep
        });
        self.retired.extend(&gone);
        self.changes += gone.len() as u64;
        gone
    }

    fn repair(&mut self, bounds: Bounds) {
        let mut seen = BTreeSet::new();
        self.used.retain(|_, entry| (1..=bounds.last).contains(&entry.id) && seen.insert(entry.id));
        self.retired.retain(|&id| (1..=bounds.last).contains(&id) && seen.insert(id));
        self.highest = seen.last().copied().unwrap_or_default().max(self.highest).min(bounds.last);
    }
}

/// A segment, as on disk.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct SegmentKey {
    interface: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vlan: Option<u16>,
}

impl From<&SegmentName> for SegmentKey {
    fn from(name: &SegmentName) -> Self {
        Self { interface: name.interface.clone(), vlan: name.vlan }
    }
}

/// What a client connects to, as on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct FrontendKey {
    pub(super) segment: SegmentId,
    pub(super) vip: IpAddr,
    pub(super) port: u16,
    pub(super) protocol: u8,
}

impl FrontendKey {
    /// The reverse of `from`. A file can hold anything, so there may be none.
    pub(super) fn address(&self) -> Option<FrontendAddress> {
        let protocol = [Protocol::Tcp, Protocol::Udp].into_iter().find(|it| it.number() == self.protocol)?;
        Some(FrontendAddress { segment: self.segment, vip: self.vip, port: self.port, protocol })
    }
}

impl From<&FrontendAddress> for FrontendKey {
    fn from(address: &FrontendAddress) -> Self {
        Self { segment: address.segment, vip: address.vip, port: address.port, protocol: address.protocol.number() }
    }
}

/// Whose a frontend was.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FrontendMemory {
    pub(super) tenant: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) service: Option<ObjectName>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) uid: String,
    /// With `on_down: reset`: the backends that were down.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) down: BTreeSet<BackendId>,
    /// Only the tenant is known.
    #[serde(skip)]
    pub(super) recovered: bool,
}

impl FrontendMemory {
    /// Whether it was this Service's.
    pub(super) fn is_of(&self, service: Option<&ObjectName>) -> bool {
        service.is_some() && self.service.as_ref() == service
    }

    /// Whether a flow of the past may live on: same tenant, same Service object. A Service that was not there yet had no flows.
    pub(super) fn is_same(&self, tenant: &str, service: Option<&ObjectName>, uid: &str) -> bool {
        self.tenant == tenant
            && (self.recovered || self.service.as_ref() == service && (self.uid.is_empty() || self.uid == uid))
    }
}

/// Where connections went, as on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct BackendKey {
    pub(super) segment: SegmentId,
    pub(super) address: IpAddr,
    pub(super) port: u16,
}

/// Whose a backend's address was.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BackendMemory {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) node: Option<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) uid: String,
}

/// A port on the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct TargetKey {
    pub(super) segment: SegmentId,
    pub(super) protocol: u8,
    pub(super) port: u16,
}

/// Maps with keys that are not strings, as lists of pairs.
mod pairs {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<K: Serialize, V: Serialize, S: Serializer>(
        map: &BTreeMap<K, V>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(map)
    }

    pub(super) fn deserialize<'de, K: Deserialize<'de> + Ord, V: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<K, V>, D::Error> {
        Ok(Vec::<(K, V)>::deserialize(deserializer)?.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_come_back_only_after_a_quarantine() {
        let bounds = Bounds { last: 5, quarantine: 2 };
        let mut pool = Pool::<u32, ()>::default();
        for key in 1..=5 {
            assert_eq!(pool.id(key, bounds, || ()), Some(key as u16));
        }
        assert_eq!(pool.id(3, bounds, || ()), Some(3));
        assert_eq!(pool.id(6, bounds, || ()), None);
        assert_eq!(pool.keep_only(|&key, ()| key != 2), [2]);
        assert_eq!(pool.id(6, bounds, || ()), None);
        pool.keep_only(|&key, ()| key != 1 && key != 5);
        assert_eq!(pool.id(6, bounds, || ()), Some(2));
        assert_eq!(pool.id(7, bounds, || ()), None);
    }

    #[test]
    fn a_damaged_file_is_repaired() {
        let text = r#"{"segments":{"used":[[{"interface":"eth0"},{"id":1}],[{"interface":"eth1"},{"id":1}],
            [{"interface":"eth2"},{"id":0}]],"retired":[1,7,7],"highest":2}}"#;
        let mut ids: Ids = serde_json::from_str(text).unwrap();
        ids.repair();
        assert_eq!(ids.segments.used.len(), 1);
        assert_eq!(ids.segments.retired, [7]);
        assert_eq!(ids.segments.fresh(SEGMENTS), Some(8));
        assert_eq!(serde_json::from_str::<Ids>("{}").unwrap(), Ids::default());
    }
}
