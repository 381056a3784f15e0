//! What is in a map, remembered, so that only differences are written.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;

use super::bpf::Map;

/// Where a table is kept: a BPF map, or memory in tests.
pub(super) trait Store<K, V>: Send {
    /// Sets many; on an error, the number of those that were set before it.
    fn set_many(&self, keys: &[K], values: &[V]) -> Result<(), (usize, io::Error)>;
    /// Removes a key.
    fn delete(&self, key: &K) -> io::Result<()>;
    /// Everything in it.
    fn load(&self) -> io::Result<Vec<(K, V)>>;
}

impl<K: Pod, V: Pod> Store<K, V> for Map<K, V> {
    fn set_many(&self, keys: &[K], values: &[V]) -> Result<(), (usize, io::Error)> {
        Map::set_many(self, keys, values)
    }

    fn delete(&self, key: &K) -> io::Result<()> {
        Map::delete(self, key).map(|_| ())
    }

    fn load(&self) -> io::Result<Vec<(K, V)>> {
        let mut all = Vec::new();
        self.for_each(|key, value| all.push((*key, *value)))?;
        Ok(all)
    }
}

/// Writes that shall fail, by map: for tests of what happens then.
#[derive(Clone, Debug, Default)]
pub(super) struct Faults(Arc<Mutex<BTreeMap<String, u64>>>);

impl Faults {
    /// Lets the next `count` writes to this map fail.
    pub(super) fn inject(&self, map: &str, count: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(map.to_owned(), count);
    }

    /// Whether this write shall fail.
    pub(super) fn strikes(&self, map: &str) -> bool {
        let mut faults = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match faults.get_mut(map) {
            Some(count) if *count > 0 => {
                *count -= 1;
                true
            }
            _ => false,
        }
    }
}

/// Counts writes and keeps the first failure.
#[derive(Debug, Default)]
pub(super) struct Writer {
    pub(super) writes: u64,
    pub(super) failed: u64,
    pub(super) first: Option<String>,
    pub(super) faults: Faults,
}

impl Writer {
    pub(super) fn new(faults: &Faults) -> Self {
        Self { faults: faults.clone(), ..Self::default() }
    }

    /// Records a failure.
    pub(super) fn fail(&mut self, message: String) {
        tracing::warn!("{message}");
        self.failed += 1;
        self.first.get_or_insert(message);
    }
}

/// A map with its shadow. Entries that are all zero are not kept for arrays.
pub(super) struct Table<K, V> {
    name: &'static str,
    store: Box<dyn Store<K, V>>,
    shadow: BTreeMap<K, V>,
    /// What stands for "absent" in an array; `None` for hashes.
    absent: Option<V>,
}

impl<K: Copy + Ord, V: Copy + PartialEq> Table<K, V> {
    /// Reads what is there.
    pub(super) fn load(name: &'static str, store: Box<dyn Store<K, V>>, absent: Option<V>) -> io::Result<Self> {
        let shadow = store.load()?.into_iter().filter(|(_, value)| Some(*value) != absent).collect();
        Ok(Self { name, store, shadow, absent })
    }

    /// What is in the map.
    pub(super) const fn shadow(&self) -> &BTreeMap<K, V> {
        &self.shadow
    }

    /// The value in the map.
    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.shadow.get(key)
    }

    /// What is in the map, zeros of arrays too.
    fn held(&self, key: &K) -> Option<&V> {
        self.shadow.get(key).or(self.absent.as_ref())
    }

    /// Writes what is new or different; what failed stays as it was in the map and is tried again next time.
    pub(super) fn put_all(&mut self, wanted: &BTreeMap<K, V>, writer: &mut Writer) {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        // Side by side: both are in order, and there may be ten thousands of them.
        let mut held = self.shadow.iter().peekable();
        for (key, value) in wanted {
            while held.next_if(|(other, _)| *other < key).is_some() {}
            let known = held.next_if(|(other, _)| *other == key).map(|(_, known)| known);
            if known.or(self.absent.as_ref()) != Some(value) {
                keys.push(*key);
                values.push(*value);
            }
        }
        self.write(&keys, &values, writer);
    }

    /// Writes one entry if it is new or different. Whether it is in the map now.
    pub(super) fn put(&mut self, key: K, value: V, writer: &mut Writer) -> bool {
        if self.held(&key) == Some(&value) {
            return true;
        }
        self.write(&[key], &[value], writer) == 0
    }

    /// Removes one entry if it is there.
    pub(super) fn remove(&mut self, key: K, writer: &mut Writer) {
        if !self.shadow.contains_key(&key) {
            return;
        }
        let result = match self.absent {
            _ if writer.faults.strikes(self.name) => Err(io::Error::other("injected")),
            Some(zero) => self.store.set_many(&[key], &[zero]).map_err(|(_, error)| error),
            None => self.store.delete(&key),
        };
        match result {
            Ok(()) => {
                writer.writes += 1;
                self.shadow.remove(&key);
            }
            Err(error) => writer.fail(format!("map {}: cannot remove an entry: {error}", self.name)),
        }
    }

    /// Entries whose key is not among these.
    pub(super) fn beyond<T>(&self, wanted: &BTreeMap<K, T>) -> Vec<(K, V)> {
        let mut wanted = wanted.keys().peekable();
        let stale = self.shadow.iter().filter(|(key, _)| {
            while wanted.next_if(|other| other < key).is_some() {}
            wanted.next_if(|other| other == key).is_none()
        });
        stale.map(|(key, value)| (*key, *value)).collect()
    }

    /// Removes what is not wanted.
    pub(super) fn retain<T>(&mut self, wanted: &BTreeMap<K, T>, writer: &mut Writer) {
        for (key, _) in self.beyond(wanted) {
            self.remove(key, writer);
        }
    }

    /// Returns how many failed.
    fn write(&mut self, keys: &[K], values: &[V], writer: &mut Writer) -> u64 {
        let (mut at, mut failed) = (0, 0);
        while at < keys.len() {
            let (done, error) = if writer.faults.strikes(self.name) {
                (0, Some(io::Error::other("injected")))
            } else {
                match self.store.set_many(&keys[at..], &values[at..]) {
                    Ok(()) => (keys.len() - at, None),
                    Err((done, error)) => (done.min(keys.len() - at - 1), Some(error)),
                }
            };
            for (key, value) in keys[at..at + done].iter().zip(&values[at..at + done]) {
                if Some(*value) == self.absent {
                    self.shadow.remove(key);
                } else {
                    self.shadow.insert(*key, *value);
                }
            }
            writer.writes += done as u64;
            at += done;
            if let Some(error) = error {
                writer.fail(format!("map {}: cannot write an entry: {error}", self.name));
                failed += 1;
                at += 1;
            }
        }
        failed
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A store in memory that counts its calls and can be full.
    pub(in super::super) struct Memory<K, V> {
        pub(in super::super) entries: Arc<Mutex<BTreeMap<K, V>>>,
        pub(in super::super) limit: Option<usize>,
    }

    impl<K, V> Clone for Memory<K, V> {
        fn clone(&self) -> Self {
            Self { entries: Arc::clone(&self.entries), limit: self.limit }
        }
    }

    impl<K, V> Default for Memory<K, V> {
        fn default() -> Self {
            Self { entries: Arc::new(Mutex::new(BTreeMap::new())), limit: None }
        }
    }

    impl<K: Copy + Ord + Send, V: Copy + Send> Store<K, V> for Memory<K, V> {
        fn set_many(&self, keys: &[K], values: &[V]) -> Result<(), (usize, io::Error)> {
            let mut entries = self.entries.lock().unwrap();
            for (index, (key, value)) in keys.iter().zip(values).enumerate() {
                if self.limit.is_some_and(|limit| entries.len() >= limit && !entries.contains_key(key)) {
                    return Err((index, io::Error::from_raw_os_error(libc::E2BIG)));
                }
                entries.insert(*key, *value);
            }
            Ok(())
        }

        fn delete(&self, key: &K) -> io::Result<()> {
            self.entries.lock().unwrap().remove(key);
            Ok(())
        }

        fn load(&self) -> io::Result<Vec<(K, V)>> {
            Ok(self.entries.lock().unwrap().iter().map(|(key, value)| (*key, *value)).collect())
        }
    }

    #[test]
    fn only_differences_are_written() {
        let store = Memory::default();
        let mut table = Table::load("t", Box::new(store.clone()), None).unwrap();
        let mut writer = Writer::default();
        let wanted = BTreeMap::from([(1_u32, 10_u64), (2, 20)]);
        table.put_all(&wanted, &mut writer);
        assert_eq!(writer.writes, 2);
        table.put_all(&wanted, &mut writer);
        assert_eq!(writer.writes, 2);
        table.put_all(&BTreeMap::from([(1, 10), (2, 21)]), &mut writer);
        table.retain(&BTreeMap::from([(2, 21)]), &mut writer);
        assert_eq!(writer.writes, 4);
        assert_eq!(*store.entries.lock().unwrap(), BTreeMap::from([(2, 21)]));
    }

    #[test]
    fn an_array_forgets_zeros() {
        let store = Memory { entries: Arc::new(Mutex::new(BTreeMap::from([(0_u32, 0_u64), (1, 5)]))), limit: None };
        let mut table = Table::load("t", Box::new(store.clone()), Some(0)).unwrap();
        assert_eq!(*table.shadow(), BTreeMap::from([(1, 5)]));
        let mut writer = Writer::default();
        table.remove(1, &mut writer);
        table.remove(1, &mut writer);
        assert_eq!((writer.writes, table.shadow().len()), (1, 0));
        assert_eq!(store.entries.lock().unwrap()[&1], 0);
        // What is absent is zero already.
        table.put_all(&BTreeMap::from([(1, 0), (2, 0)]), &mut writer);
        assert!(table.put(3, 0, &mut writer));
        assert_eq!(writer.writes, 1);
    }

    #[test]
    fn a_full_map_fails_for_what_does_not_fit_only_and_is_tried_again() {
        let store = Memory { entries: Arc::default(), limit: Some(2) };
        let mut table = Table::load("t", Box::new(store), None).unwrap();
        let mut writer = Writer::default();
        table.put_all(&BTreeMap::from([(1_u32, 1_u64), (2, 2), (3, 3)]), &mut writer);
        assert_eq!((writer.writes, writer.failed), (2, 1));
        table.put_all(&BTreeMap::from([(1, 7), (2, 2), (3, 3)]), &mut writer);
        assert_eq!((writer.writes, writer.failed), (3, 2));
        table.remove(1, &mut writer);
        assert!(table.put(3, 3, &mut writer));
    }

    #[test]
    fn an_injected_fault_leaves_the_shadow_true() {
        let store = Memory::default();
        let mut table = Table::load("t", Box::new(store.clone()), None).unwrap();
        let mut writer = Writer::default();
        writer.faults.inject("t", 1);
        table.put_all(&BTreeMap::from([(1_u32, 1_u64), (2, 2)]), &mut writer);
        assert_eq!((writer.writes, writer.failed), (1, 1));
        assert_eq!(*table.shadow(), *store.entries.lock().unwrap());
        table.put_all(&BTreeMap::from([(1, 1), (2, 2)]), &mut writer);
        assert_eq!((writer.writes, table.shadow().len()), (2, 2));
    }
}
