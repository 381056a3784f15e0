//! The record of addresses given out, and the text in which a ConfigMap keeps it.
//!
//! What a ConfigMap holds is not believed blindly: anybody who may write there could have.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::config::Config;
use crate::source::ObjectName;

/// Reservations of one tenant that are kept at most; of more, the oldest are forgotten.
const RESERVATIONS: usize = 4096;
/// Bytes that a ConfigMap may have, with room for its metadata; the server refuses 1 MiB.
const CONFIG_MAP_LIMIT: usize = 960_000;
/// Entries that are read at most.
const ENTRIES: usize = 65_536;
/// Generations above this are no generations: nothing could outrank them.
const LAST_GENERATION: u64 = 1 << 53;
/// Keys of a ConfigMap.
const GENERATION: &str = "generation";
const ADOPTED: &str = "adopted";
const TENANT: &str = "tenant.";

/// Addresses given out, as kept on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Grows with every change; of two records the one with the higher generation counts.
    pub generation: u64,
    /// Entries.
    pub entries: Vec<Entry>,
    /// Services whose foreign address does not matter any more, by order of an operator, with their UIDs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub adopted: BTreeMap<ObjectName, String>,
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

/// A record that no ConfigMap can hold.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "the record of {entries} addresses takes {bytes} bytes, and a ConfigMap holds {CONFIG_MAP_LIMIT}: it is kept on disk only; back the \
     state directory up"
)]
pub struct TooLarge {
    entries: usize,
    bytes: usize,
}

/// What a ConfigMap says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// What could be read.
    pub record: Record,
    /// What could not, the first of it.
    pub problem: Option<String>,
}

impl Record {
    /// As the data of a ConfigMap: a key for each tenant, a line for each address. Reservations are left out, the oldest first, if
    /// not all has room.
    pub fn to_data(&self) -> Result<BTreeMap<String, String>, TooLarge> {
        let mut left: Vec<&Entry> = self.entries.iter().collect();
        loop {
            let data = self.data_of(&left);
            let bytes = data.iter().map(|(key, value)| key.len() + value.len()).sum();
            if bytes <= CONFIG_MAP_LIMIT {
                return Ok(data);
            }
            let mut freed: Vec<i64> = left.iter().filter_map(|entry| entry.freed).collect();
            if freed.is_empty() {
                return Err(TooLarge { entries: self.entries.len(), bytes });
            }
            freed.sort_unstable();
            let until = freed[freed.len() / 2];
            left.retain(|entry| entry.freed.is_none_or(|freed| freed > until));
        }
    }

    fn data_of(&self, entries: &[&Entry]) -> BTreeMap<String, String> {
        let mut data = BTreeMap::from([(GENERATION.to_owned(), self.generation.to_string())]);
        for entry in entries {
            let text = data.entry(format!("{TENANT}{}", entry.tenant)).or_default();
            let _ = write!(text, "{} {}", entry.address, entry.service);
            let _ = match entry.freed {
                Some(freed) => writeln!(text, " freed {freed}"),
                None => writeln!(text),
            };
        }
        if !self.adopted.is_empty() {
            let lines = self.adopted.iter().map(|(service, uid)| format!("{service} {uid}\n"));
            data.insert(ADOPTED.to_owned(), lines.collect());
        }
        data
    }

    /// Reads the data of a ConfigMap. Whatever it holds, what makes sense of it is returned, and the first that does not is named.
    pub fn from_data(data: &BTreeMap<String, String>) -> Found {
        let mut found = Found::default();
        let problem = |found: &mut Found, text: String| {
            found.problem.get_or_insert(text);
        };
        match data.get(GENERATION).map(|text| text.trim().parse::<u64>()) {
            Some(Ok(generation)) if generation <= LAST_GENERATION => found.record.generation = generation,
            Some(_) => problem(&mut found, format!("{GENERATION}: not a number up to {LAST_GENERATION}")),
            None => problem(&mut found, format!("{GENERATION}: missing")),
        }
        let mut keys = BTreeSet::new();
        for (key, text) in data {
            let Some(tenant) = key.strip_prefix(TENANT) else { continue };
            for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                let entry = match entry(tenant, line) {
                    Ok(entry) => entry,
                    Err(why) => {
                        problem(&mut found, format!("{key}, line {}: {why}", number + 1));
                        continue;
                    }
                };
                let twice = !keys.insert(owner(&entry));
                if twice || found.record.entries.len() >= ENTRIES {
                    let why = if twice { "there is another line for the same" } else { "too many lines" };
                    problem(&mut found, format!("{key}, line {}: {why}", number + 1));
                    continue;
                }
                found.record.entries.push(entry);
            }
        }
        for line in data.get(ADOPTED).into_iter().flat_map(|text| text.lines()).take(ENTRIES) {
            let mut words = line.split_whitespace();
            match (words.next().map(object_name), words.next(), words.next()) {
                (Some(Ok(service)), Some(uid), None) if uid.len() <= 64 => {
                    found.record.adopted.insert(service, uid.to_owned());
                }
                _ => problem(&mut found, format!("{ADOPTED}: a line is not `namespace/name UID`")),
            }
        }
        found.record.entries.sort_by(|a, b| order(a).cmp(&order(b)));
        found
    }

    /// Takes in another record: where the two differ, the one with the higher generation counts; what only one of them knows is kept,
    /// for an address that is forgotten is worse than one that is reserved for a day without need. Returns whether anything changed.
    pub fn merge(&mut self, other: Self) -> bool {
        let before = self.clone();
        let newer = other.generation > self.generation;
        let rest = if newer { std::mem::replace(self, other) } else { other };
        let mut keys: BTreeSet<_> = self.entries.iter().map(owner).collect();
        let mut live: BTreeSet<_> = self.entries.iter().map(|entry| (entry.tenant.clone(), entry.address)).collect();
        let (entries, adopted) = (self.entries.len(), self.adopted.len());
        for entry in rest.entries {
            if !keys.contains(&owner(&entry)) && live.insert((entry.tenant.clone(), entry.address)) {
                keys.insert(owner(&entry));
                self.entries.push(entry);
            }
        }
        for (service, uid) in rest.adopted {
            self.adopted.entry(service).or_insert(uid);
        }
        if (self.entries.len(), self.adopted.len()) != (entries, adopted) {
            self.entries.sort_by(|a, b| order(a).cmp(&order(b)));
            self.generation += 1;
        }
        *self != before
    }

    /// Leaves out addresses that the configuration does not let a tenant have, but for those that are `vouched` for: a Service keeps its
    /// address when the pools change. Returns how many those were.
    pub fn keep_plausible(&mut self, config: &Config, vouched: impl Fn(&Entry) -> bool) -> usize {
        let before = self.entries.len();
        self.entries.retain(|entry| {
            let Some(tenant) = config.tenant(&entry.tenant) else { return true };
            let reserved = tenant.frontends.iter().any(|frontend| frontend.vip == Some(entry.address));
            let own = tenant.addresses.iter().any(|own| own.addr() == entry.address);
            let pooled = reserved || tenant.pools.iter().any(|pool| pool.contains(entry.address));
            let avoided = tenant.avoid.iter().any(|avoid| avoid.contains(entry.address));
            !own && !tenant.gateways.contains(&entry.address) && (pooled && !avoided || vouched(entry))
        });
        before - self.entries.len()
    }
}

/// Of one key there is one entry.
fn owner(entry: &Entry) -> (String, ObjectName, bool) {
    (entry.tenant.clone(), entry.service.clone(), entry.address.is_ipv6())
}

/// In this order they are kept.
fn order(entry: &Entry) -> (&str, &ObjectName, bool) {
    (&entry.tenant, &entry.service, entry.address.is_ipv6())
}

fn object_name(text: &str) -> Result<ObjectName, String> {
    let plain = |part: &str| {
        part.len() <= 253 && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'))
    };
    match ObjectName::try_from(text.to_owned()) {
        Ok(name) if plain(&name.namespace) && plain(&name.name) => Ok(name),
        Ok(_) | Err(_) => Err("no Service as namespace/name".to_owned()),
    }
}

/// `ADDRESS NAMESPACE/NAME [freed SECONDS]`.
fn entry(tenant: &str, line: &str) -> Result<Entry, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (address, service, freed) = match words.as_slice() {
        [address, service] => (address, service, None),
        [address, service, "freed", since] => {
            let since = since.parse::<i64>().ok().filter(|since| *since >= 0).ok_or("`freed` needs seconds")?;
            (address, service, Some(since))
        }
        _ => return Err("it is not `ADDRESS NAMESPACE/NAME [freed SECONDS]`".to_owned()),
    };
    Ok(Entry {
        tenant: tenant.to_owned(),
        service: object_name(service)?,
        address: address.parse().map_err(|_| "it does not begin with an IP address".to_owned())?,
        freed,
    })
}

/// Forgets the oldest reservations of tenants that have too many.
pub(super) fn bound(entries: &mut Vec<Entry>) {
    let mut reservations: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for entry in entries.iter() {
        reservations.entry(&entry.tenant).or_default().extend(entry.freed);
    }
    let mut until: BTreeMap<String, i64> = BTreeMap::new();
    for (tenant, mut freed) in reservations.into_iter().filter(|(_, freed)| freed.len() > RESERVATIONS) {
        freed.sort_unstable();
        until.insert(tenant.to_owned(), freed[freed.len() - RESERVATIONS]);
    }
    if !until.is_empty() {
        entries.retain(|entry| {
            entry.freed.is_none_or(|freed| until.get(&entry.tenant).is_none_or(|until| freed >= *until))
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry_of(tenant: &str, name: &str, address: &str, freed: Option<i64>) -> Entry {
        Entry {
            tenant: tenant.to_owned(),
            service: ObjectName::new("clusters-tenant-a", name),
            address: address.parse().unwrap(),
            freed,
        }
    }

    #[test]
    fn a_config_map_gives_back_what_was_put_in() {
        let record = Record {
            generation: 17,
            entries: vec![
                entry_of("a", "kube-apiserver", "192.0.2.34", None),
                entry_of("a", "kube-apiserver", "2001:db8:a::34", None),
                entry_of("a", "old", "192.0.2.35", Some(1000)),
                entry_of("b", "kube-apiserver", "192.0.2.34", None),
            ],
            adopted: [(ObjectName::new("n", "s"), "u1".to_owned())].into(),
        };
        let data = record.to_data().unwrap();
        assert_eq!(
            data["tenant.a"],
            "192.0.2.34 clusters-tenant-a/kube-apiserver\n2001:db8:a::34 clusters-tenant-a/kube-apiserver\n\
             192.0.2.35 clusters-tenant-a/old freed 1000\n"
        );
        assert_eq!(Record::from_data(&data), Found { record, problem: None });
    }

    #[test]
    fn what_is_broken_is_named_and_the_rest_is_kept() {
        let good = "192.0.2.34 n/s\n";
        for (broken, named) in [
            (("generation", "many".to_owned()), "generation"),
            (("generation", u64::MAX.to_string()), "generation"),
            (("tenant.a", format!("{good}nonsense")), "line 2"),
            (("tenant.a", format!("{good}192.0.2.35 n/t freed")), "line 2"),
            (("tenant.a", format!("{good}192.0.2.35 n/t freed -1")), "seconds"),
            (("tenant.a", format!("{good}192.0.2.35 n/s")), "the same"),
            (("tenant.a", format!("{good}192.0.2.36 n/s\u{7f}")), "namespace/name"),
            (("adopted", "n/s".to_owned()), "adopted"),
        ] {
            let mut data = BTreeMap::from([("generation", "3".to_owned()), ("tenant.a", good.to_owned())]);
            data.insert(broken.0, broken.1);
            let data = data.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
            let found = Record::from_data(&data);
            assert!(found.problem.as_ref().is_some_and(|problem| problem.contains(named)), "{found:?}");
            assert_eq!(found.record.entries.len(), 1, "{found:?}");
        }
        let found = Record::from_data(&BTreeMap::new());
        assert_eq!((found.record, found.problem.is_some()), (Record::default(), true));
    }

    #[test]
    fn the_size_is_bounded_and_reservations_go_first() {
        let long = "x".repeat(60);
        let mut record = Record { generation: 1, ..Record::default() };
        for number in 0..12_000_u32 {
            let address = std::net::Ipv4Addr::from(0x0a00_0000 + number).to_string();
            let freed = (number >= 6000).then_some(i64::from(number));
            record.entries.push(entry_of("a", &format!("{long}-{number}"), &address, freed));
        }
        let data = record.to_data().unwrap();
        let back = Record::from_data(&data).record;
        assert_eq!(back.entries.iter().filter(|entry| entry.freed.is_none()).count(), 6000);
        let oldest = back.entries.iter().filter_map(|entry| entry.freed).min().unwrap();
        assert!(oldest > 6000 && back.entries.iter().filter_map(|entry| entry.freed).max() == Some(11_999));
        for entry in &mut record.entries {
            entry.freed = None;
        }
        assert_eq!(record.to_data().unwrap_err().entries, 12_000);

        let mut entries: Vec<Entry> =
            (0..RESERVATIONS as i64 + 10).map(|at| entry_of("a", &format!("s{at}"), "192.0.2.1", Some(at))).collect();
        entries.push(entry_of("b", "s", "192.0.2.1", Some(0)));
        bound(&mut entries);
        assert_eq!(entries.len(), RESERVATIONS + 1);
        assert_eq!(entries.first().and_then(|entry| entry.freed), Some(10));
    }

    #[test]
    fn of_two_records_the_higher_generation_counts_and_nothing_is_forgotten() {
        let record =
            |generation, entries: &[Entry]| Record { generation, entries: entries.to_vec(), ..Record::default() };
        let (one, two) = (entry_of("a", "one", "192.0.2.34", None), entry_of("a", "two", "192.0.2.35", None));
        let moved = entry_of("a", "one", "192.0.2.36", None);
        let rival = entry_of("a", "rival", "192.0.2.36", None);
        let mut newer = record(7, std::slice::from_ref(&moved));
        assert!(newer.merge(record(3, &[one.clone(), two.clone(), rival.clone()])));
        assert_eq!(newer, record(8, &[moved.clone(), two.clone()]));
        let mut older = record(3, &[one.clone(), two.clone(), rival]);
        assert!(older.merge(record(7, std::slice::from_ref(&moved))));
        assert_eq!(older, record(8, &[moved, two.clone()]));
        let mut same = record(3, &[one.clone(), two.clone()]);
        assert!(!same.merge(record(2, std::slice::from_ref(&one))));
        assert!(!same.merge(Record::default()));
        let mut lost = Record::default();
        assert!(lost.merge(same.clone()));
        assert_eq!(lost, same);
    }

    proptest! {
        #[test]
        fn no_config_map_breaks_it(data in prop::collection::btree_map("(tenant\\.a|generation|adopted|.{0,8})", ".{0,200}", 0..4)) {
            let found = Record::from_data(&data);
            // What was read can be written and read again.
            let again = Record::from_data(&found.record.to_data().unwrap());
            prop_assert_eq!(again.record, found.record);
        }
    }
}
