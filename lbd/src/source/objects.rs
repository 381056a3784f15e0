//! Objects by name that many hold at once: snapshots share what has not changed.

use std::borrow::Borrow;
use std::collections::{BTreeMap, btree_map};
use std::ops::Index;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Objects in the order of their names. A copy shares everything; the first change after that copies names and
/// pointers, never the other objects.
#[derive(Debug)]
pub struct Objects<K, V>(Arc<BTreeMap<K, Arc<V>>>);

impl<K, V> Clone for Objects<K, V> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K, V> Default for Objects<K, V> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K: PartialEq, V: PartialEq> PartialEq for Objects<K, V> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || self.0.len() == other.0.len()
                && self
                    .0
                    .iter()
                    .zip(other.0.iter())
                    .all(|(one, two)| one.0 == two.0 && (Arc::ptr_eq(one.1, two.1) || one.1 == two.1))
    }
}

impl<K: Eq, V: Eq> Eq for Objects<K, V> {}

impl<K: Ord + Clone, V: Clone> Objects<K, V> {
    /// Puts an object in, in place of one that has the name.
    pub fn insert(&mut self, name: K, object: impl Into<Arc<V>>) {
        Arc::make_mut(&mut self.0).insert(name, object.into());
    }

    /// Takes an object out.
    pub fn remove<Q: Ord + ?Sized>(&mut self, name: &Q) -> Option<Arc<V>>
    where
        K: Borrow<Q>,
    {
        if self.0.contains_key(name) { Arc::make_mut(&mut self.0).remove(name) } else { None }
    }

    /// An object, to be changed.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, name: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        Arc::make_mut(&mut self.0).get_mut(name).map(Arc::make_mut)
    }

    /// All objects, to be changed.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        Arc::make_mut(&mut self.0).values_mut().map(Arc::make_mut)
    }

    /// Leaves out what does not fit.
    pub fn retain(&mut self, mut wanted: impl FnMut(&K, &V) -> bool) {
        Arc::make_mut(&mut self.0).retain(|name, object| wanted(name, object));
    }

    /// Takes everything out.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

impl<K: Ord, V> Objects<K, V> {
    /// An object.
    pub fn get<Q: Ord + ?Sized>(&self, name: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.0.get(name).map(Arc::as_ref)
    }

    /// An object with its name as it is kept here.
    pub fn get_key_value<Q: Ord + ?Sized>(&self, name: &Q) -> Option<(&K, &V)>
    where
        K: Borrow<Q>,
    {
        self.0.get_key_value(name).map(|(name, object)| (name, object.as_ref()))
    }

    /// Whether there is an object of the name.
    pub fn contains_key<Q: Ord + ?Sized>(&self, name: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.0.contains_key(name)
    }
}

impl<K, V> Objects<K, V> {
    /// Names and objects.
    pub fn iter(&self) -> Iter<'_, K, V> {
        Iter(self.0.iter())
    }

    /// Names.
    pub fn keys(&self) -> btree_map::Keys<'_, K, Arc<V>> {
        self.0.keys()
    }

    /// Objects.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.0.values().map(Arc::as_ref)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The objects that are another one here than in `other`, here and there; `None` if the two have different names.
    pub fn changes<'a>(&'a self, other: &'a Self) -> Option<Vec<(&'a K, &'a V, &'a V)>>
    where
        K: PartialEq,
    {
        if self.ptr_eq(other) {
            return Some(Vec::new());
        }
        if self.len() != other.len() {
            return None;
        }
        let mut changes = Vec::new();
        for ((name, here), (other_name, there)) in self.0.iter().zip(other.0.iter()) {
            if name != other_name {
                return None;
            }
            if !Arc::ptr_eq(here, there) {
                changes.push((name, &**here, &**there));
            }
        }
        Some(changes)
    }

    /// Whether the two are one and the same, which says more than that they are equal.
    pub fn ptr_eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Names and objects, in order.
#[derive(Debug)]
pub struct Iter<'a, K, V>(btree_map::Iter<'a, K, Arc<V>>);

impl<'a, K, V> Iterator for Iter<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(|(name, object)| (name, object.as_ref()))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<K, V> DoubleEndedIterator for Iter<'_, K, V> {
    fn next_back(&mut self) -> Option<Self::Item> {
        self.0.next_back().map(|(name, object)| (name, object.as_ref()))
    }
}

impl<'a, K, V> IntoIterator for &'a Objects<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Iter<'a, K, V>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<K: Ord, V> FromIterator<(K, V)> for Objects<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(objects: I) -> Self {
        Self(Arc::new(objects.into_iter().map(|(name, object)| (name, Arc::new(object))).collect()))
    }
}

impl<K: Ord, V, const N: usize> From<[(K, V); N]> for Objects<K, V> {
    fn from(objects: [(K, V); N]) -> Self {
        objects.into_iter().collect()
    }
}

impl<K: Ord + Borrow<Q>, V, Q: Ord + ?Sized> Index<&Q> for Objects<K, V> {
    type Output = V;

    fn index(&self, name: &Q) -> &V {
        &self.0[name]
    }
}

impl<K: Serialize, V: Serialize> Serialize for Objects<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self)
    }
}

impl<'de, K: Deserialize<'de> + Ord, V: Deserialize<'de>> Deserialize<'de> for Objects<K, V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(BTreeMap::<K, V>::deserialize(deserializer)?.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_leaves_copies_alone_and_shares_the_rest() {
        let first = Objects::from([("a".to_owned(), 1), ("b".to_owned(), 2)]);
        let mut second = first.clone();
        assert!(first.ptr_eq(&second) && second.remove("c").is_none());
        assert!(first.ptr_eq(&second), "what changes nothing copies nothing");
        second.insert("a".to_owned(), 3);
        assert_eq!((first["a"], second["a"], first["b"], second["b"]), (1, 3, 2, 2));
        assert!(Arc::ptr_eq(&first.0["b"], &second.0["b"]), "an object that did not change was copied");
        assert_ne!(first, second);
        second.insert("a".to_owned(), 1);
        assert_eq!(first, second);
        second.retain(|name, _| name != "a");
        assert_eq!(second.iter().collect::<Vec<_>>(), [(&"b".to_owned(), &2)]);
    }

    #[test]
    fn changes_are_found_by_identity() {
        let first = Objects::from([("a", 1), ("b", 2)]);
        let mut second = first.clone();
        assert_eq!(first.changes(&second), Some(Vec::new()));
        second.insert("b", 3);
        assert_eq!(first.changes(&second), Some(vec![(&"b", &2, &3)]));
        second.remove("a");
        assert_eq!(first.changes(&second), None);
        second.insert("c", 1);
        assert_eq!(first.changes(&second), None, "as many, but others");
    }

    #[test]
    fn it_is_a_map_in_json() {
        let objects = Objects::from([("a".to_owned(), 1)]);
        let text = serde_json::to_string(&objects).unwrap();
        assert_eq!(text, r#"{"a":1}"#);
        assert_eq!(serde_json::from_str::<Objects<String, i32>>(&text).unwrap(), objects);
    }
}
