//! Who owns which field: the part of server-side apply that matters for the kinds served here.
//!
//! A path is a list of elements as in `fieldsV1`: `f:NAME` for a field, `k:{…}` for an item of a list with keys. Lists
//! without keys, and a few maps, are atomic: they are owned and replaced whole.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

pub(super) type Path = Vec<String>;
pub(super) type Set = BTreeSet<Path>;

/// Keys of the lists that have some, by kind and place.
fn list_keys(kind: &str, place: &str) -> Option<&'static [&'static str]> {
    match (kind, place) {
        ("Service", "spec.ports") => Some(&["port", "protocol"]),
        ("Service" | "Node" | "Namespace", "status.conditions") | ("Node", "status.addresses") => Some(&["type"]),
        (_, "metadata.ownerReferences") => Some(&["uid"]),
        _ => None,
    }
}

/// Maps that are owned whole.
fn is_atomic(kind: &str, place: &str) -> bool {
    matches!((kind, place), ("Service", "spec.selector") | ("Event", "involvedObject" | "source"))
}

/// What nobody owns.
fn is_system(place: &str) -> bool {
    matches!(
        place,
        "apiVersion"
            | "kind"
            | "metadata.name"
            | "metadata.namespace"
            | "metadata.uid"
            | "metadata.resourceVersion"
            | "metadata.creationTimestamp"
            | "metadata.deletionTimestamp"
            | "metadata.deletionGracePeriodSeconds"
            | "metadata.generateName"
            | "metadata.generation"
            | "metadata.managedFields"
            | "metadata.selfLink"
    )
}

fn item_key(item: &Value, keys: &[&str]) -> String {
    let mut key = Map::new();
    for name in keys {
        let value =
            item.get(*name).cloned().unwrap_or_else(|| if *name == "protocol" { json!("TCP") } else { Value::Null });
        key.insert((*name).to_owned(), value);
    }
    format!("k:{}", Value::Object(key))
}

/// All leaves of an object.
pub(super) fn leaves(kind: &str, object: &Value) -> Set {
    let mut set = Set::new();
    collect(kind, object, &mut Vec::new(), "", &mut set);
    set
}

fn collect(kind: &str, value: &Value, path: &mut Path, place: &str, set: &mut Set) {
    if is_system(place) {
        return;
    }
    match value {
        Value::Object(map) if !is_atomic(kind, place) && (!map.is_empty() || place.is_empty()) => {
            for (name, value) in map {
                let place = if place.is_empty() { name.clone() } else { format!("{place}.{name}") };
                path.push(format!("f:{name}"));
                collect(kind, value, path, &place, set);
                path.pop();
            }
        }
        Value::Array(items) if list_keys(kind, place).is_some() => {
            for item in items {
                path.push(item_key(item, list_keys(kind, place).unwrap_or_default()));
                set.insert(path.clone());
                collect(kind, item, path, place, set);
                path.pop();
            }
        }
        Value::Null => {}
        _ => {
            set.insert(path.clone());
        }
    }
}

fn matches_key(item: &Value, key: &str) -> bool {
    let Ok(Value::Object(key)) = serde_json::from_str::<Value>(key) else { return false };
    key.iter().all(|(name, value)| match item.get(name) {
        Some(actual) => actual == value,
        None => name == "protocol" && value == "TCP",
    })
}

/// The value at a path.
pub(super) fn get<'value>(value: &'value Value, path: &[String]) -> Option<&'value Value> {
    let mut value = value;
    for element in path {
        value = if let Some(name) = element.strip_prefix("f:") {
            value.get(name)?
        } else {
            let key = element.strip_prefix("k:")?;
            value.as_array()?.iter().find(|item| matches_key(item, key))?
        };
    }
    Some(value)
}

/// Puts a value at a path, making what leads there.
pub(super) fn set(value: &mut Value, path: &[String], new: Value) {
    let Some((element, rest)) = path.split_first() else {
        *value = new;
        return;
    };
    if let Some(name) = element.strip_prefix("f:") {
        if !value.is_object() {
            *value = json!({});
        }
        set(&mut value[name], rest, new);
    } else if let Some(key) = element.strip_prefix("k:") {
        if !value.is_array() {
            *value = json!([]);
        }
        let Some(items) = value.as_array_mut() else { return };
        let index = items.iter().position(|item| matches_key(item, key)).unwrap_or_else(|| {
            items.push(serde_json::from_str(key).unwrap_or_default());
            items.len() - 1
        });
        // Membership alone changes nothing of an item that is there.
        if !rest.is_empty() {
            set(&mut items[index], rest, new);
        }
    }
}

/// Removes what is at a path.
pub(super) fn remove(value: &mut Value, path: &[String]) {
    let Some((element, rest)) = path.split_first() else { return };
    if let Some(name) = element.strip_prefix("f:") {
        let Some(map) = value.as_object_mut() else { return };
        if rest.is_empty() {
            map.remove(name);
        } else if let Some(inner) = map.get_mut(name) {
            remove(inner, rest);
            if matches!(inner, Value::Array(items) if items.is_empty()) {
                map.remove(name);
            }
        }
    } else if let Some(key) = element.strip_prefix("k:") {
        let Some(items) = value.as_array_mut() else { return };
        if rest.is_empty() {
            items.retain(|item| !matches_key(item, key));
        } else if let Some(item) = items.iter_mut().find(|item| matches_key(item, key)) {
            remove(item, rest);
        }
    }
}

/// Takes the marks off leaves.
fn tidy(node: &mut Value) {
    let Some(map) = node.as_object_mut() else { return };
    if map.len() == 1 {
        map.remove(".");
    }
    for inner in map.values_mut() {
        tidy(inner);
    }
}

fn to_fields(set: &Set) -> Value {
    let mut root = json!({});
    for path in set {
        let mut node = &mut root;
        for element in path {
            if !node[element.as_str()].is_object() {
                node[element.as_str()] = json!({});
            }
            node = &mut node[element.as_str()];
        }
        // Marked for now; leaves lose the mark below.
        node["."] = json!({});
    }
    tidy(&mut root);
    root
}

fn from_fields(node: &Value, path: &mut Path, set: &mut Set) {
    let Some(map) = node.as_object() else { return };
    if (map.is_empty() || map.contains_key(".")) && !path.is_empty() {
        set.insert(path.clone());
    }
    for (element, inner) in map.iter().filter(|(element, _)| *element != ".") {
        path.push(element.clone());
        from_fields(inner, path, set);
        path.pop();
    }
}

/// A field manager: the same name counts apart for updates and applies, and for the status subresource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Manager {
    pub(super) name: String,
    pub(super) apply: bool,
    pub(super) status: bool,
}

/// All managers of an object with what they own and since when.
#[derive(Clone, Debug, Default)]
pub(super) struct Managers(pub(super) BTreeMap<Manager, (Set, String)>);

impl Managers {
    pub(super) fn of(object: &Value) -> Self {
        let mut managers = BTreeMap::new();
        for entry in object["metadata"]["managedFields"].as_array().into_iter().flatten() {
            let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
            let manager = Manager {
                name: text("manager"),
                apply: text("operation") == "Apply",
                status: text("subresource") == "status",
            };
            let mut set = Set::new();
            from_fields(&entry["fieldsV1"], &mut Vec::new(), &mut set);
            managers.insert(manager, (set, text("time")));
        }
        Self(managers)
    }

    pub(super) fn sets(&self) -> BTreeMap<&Manager, &Set> {
        self.0.iter().map(|(manager, (set, _))| (manager, set)).collect()
    }

    pub(super) fn store(&self, object: &mut Value, api_version: &str) {
        let entries: Vec<_> = self
            .0
            .iter()
            .filter(|(_, (set, _))| !set.is_empty())
            .map(|(manager, (set, time))| {
                let mut entry = json!({
                    "manager": manager.name, "operation": if manager.apply { "Apply" } else { "Update" },
                    "apiVersion": api_version, "time": time, "fieldsType": "FieldsV1", "fieldsV1": to_fields(set),
                });
                if manager.status {
                    entry["subresource"] = json!("status");
                }
                entry
            })
            .collect();
        if entries.is_empty() {
            if let Some(metadata) = object["metadata"].as_object_mut() {
                metadata.remove("managedFields");
            }
        } else {
            object["metadata"]["managedFields"] = Value::Array(entries);
        }
    }

    /// Notes that `manager` made `new` of `old` by an update.
    pub(super) fn updated(&mut self, kind: &str, manager: &Manager, old: &Value, new: &Value, now: &str) {
        let after = leaves(kind, new);
        let changed: Set = after.iter().filter(|path| get(old, path) != get(new, path)).cloned().collect();
        // That an item has changed inside does not change whose item it is.
        let moved: Set = changed
            .iter()
            .filter(|path| get(old, path).is_none() || !path.last().is_some_and(|last| last.starts_with("k:")))
            .cloned()
            .collect();
        for (other, (set, _)) in &mut self.0 {
            if other != manager {
                set.retain(|path| !moved.contains(path));
            }
            set.retain(|path| get(new, path).is_some());
        }
        if !moved.is_empty() {
            let (set, time) = self.0.entry(manager.clone()).or_default();
            set.extend(moved);
            now.clone_into(time);
        }
        self.0.retain(|_, (set, _)| !set.is_empty());
    }
}

/// A field that another manager owns with another value.
#[derive(Debug)]
pub(super) struct Conflict {
    pub(super) manager: Manager,
    pub(super) field: String,
}

/// Applies `config` to `live`. Returns the conflicts instead, unless `force`.
pub(super) fn apply(
    kind: &str,
    live: &Value,
    config: &Value,
    manager: &Manager,
    force: bool,
    now: &str,
) -> Result<(Value, Managers), Vec<Conflict>> {
    let mut managers = Managers::of(live);
    let wanted = leaves(kind, config);
    let mut conflicts = Vec::new();
    for (other, (set, _)) in &mut managers.0 {
        if other == manager {
            continue;
        }
        for path in &wanted {
            let is_item = path.last().is_some_and(|last| last.starts_with("k:"));
            if !is_item && set.contains(path) && get(live, path) != get(config, path) {
                let field =
                    format!(".{}", path.iter().map(|element| element[2..].to_owned()).collect::<Vec<_>>().join("."));
                conflicts.push(Conflict { manager: other.clone(), field });
                if force {
                    set.remove(path);
                }
            }
        }
    }
    if !conflicts.is_empty() && !force {
        return Err(conflicts);
    }
    let mut object = live.clone();
    let before = managers.0.get(manager).map(|(set, _)| set.clone()).unwrap_or_default();
    // Outer paths first: without its key, an item could not be found any more.
    let mut given_up: Vec<_> = before.difference(&wanted).cloned().collect();
    given_up.sort_by_key(Vec::len);
    for path in given_up {
        let shared = managers
            .0
            .iter()
            .any(|(other, (set, _))| other != manager && set.iter().any(|owned| owned.starts_with(&path)));
        if !shared && !wanted.iter().any(|owned| owned.starts_with(&path)) {
            remove(&mut object, &path);
        }
    }
    for path in &wanted {
        if let Some(value) = get(config, path) {
            set(&mut object, path, value.clone());
        }
    }
    let (owned, time) = managers.0.entry(manager.clone()).or_default();
    if *owned != wanted || time.is_empty() {
        now.clone_into(time);
    }
    *owned = wanted;
    managers.0.retain(|_, (set, _)| !set.is_empty());
    Ok((object, managers))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manager(name: &str) -> Manager {
        Manager { name: name.into(), apply: true, status: true }
    }

    fn with(managers: &Managers, mut object: Value) -> Value {
        managers.store(&mut object, "v1");
        object
    }

    fn config(ip: &str, status: &str) -> Value {
        json!({"status": {"loadBalancer": {"ingress": [{"ip": ip}]}, "conditions": [{"type": "P", "status": status}]}})
    }

    #[test]
    fn the_record_survives_its_own_form() {
        let object = config("192.0.2.1", "True");
        let set = leaves("Service", &object);
        let mut read = Set::new();
        from_fields(&to_fields(&set), &mut Vec::new(), &mut read);
        assert_eq!(read, set);
        assert_eq!(
            to_fields(&set)["f:status"],
            json!({"f:loadBalancer": {"f:ingress": {}}, "f:conditions": {
                r#"k:{"type":"P"}"#: {".": {}, "f:type": {}, "f:status": {}}}})
        );
    }

    #[test]
    fn conditions_of_others_are_left_alone_and_ours_go_with_us() {
        let live = json!({"metadata": {}, "status": {"conditions": [{"type": "Other", "status": "True"}]}});
        let (object, managers) =
            apply("Service", &live, &config("192.0.2.1", "True"), &manager("lbd"), false, "t").unwrap();
        assert_eq!(object["status"]["conditions"].as_array().unwrap().len(), 2);
        let object = with(&managers, object);
        let (object, managers) = apply("Service", &object, &json!({}), &manager("lbd"), false, "t").unwrap();
        assert_eq!(object["status"], json!({"loadBalancer": {}, "conditions": [{"type": "Other", "status": "True"}]}));
        assert!(managers.0.is_empty());
    }

    #[test]
    fn another_value_of_anothers_field_is_a_conflict_until_forced() {
        let live = json!({"metadata": {}});
        let (object, managers) =
            apply("Service", &live, &config("192.0.2.1", "True"), &manager("a"), false, "t").unwrap();
        let object = with(&managers, object);
        assert!(apply("Service", &object, &config("192.0.2.1", "True"), &manager("b"), false, "t").is_ok());
        let conflicts = apply("Service", &object, &config("192.0.2.2", "True"), &manager("b"), false, "t").unwrap_err();
        assert_eq!(conflicts.len(), 1);
        assert_eq!(conflicts[0].field, ".status.loadBalancer.ingress");
        let (object, managers) =
            apply("Service", &object, &config("192.0.2.2", "True"), &manager("b"), true, "t").unwrap();
        assert_eq!(object["status"]["loadBalancer"]["ingress"][0]["ip"], "192.0.2.2");
        let ingress: Path = ["f:status", "f:loadBalancer", "f:ingress"].map(str::to_owned).to_vec();
        assert!(!managers.0[&manager("a")].0.contains(&ingress));
    }

    #[test]
    fn an_update_takes_over_what_it_changes() {
        let (object, managers) =
            apply("Service", &json!({"metadata": {}}), &config("192.0.2.1", "True"), &manager("a"), false, "t")
                .unwrap();
        let old = with(&managers, object);
        let mut new = old.clone();
        new["status"]["loadBalancer"]["ingress"][0]["ip"] = json!("192.0.2.9");
        let mut managers = Managers::of(&old);
        let updater = Manager { name: "u".into(), apply: false, status: true };
        managers.updated("Service", &updater, &old, &new, "t");
        assert_eq!(managers.0[&updater].0.len(), 1);
        assert_eq!(managers.0[&manager("a")].0.len(), 3);
    }
}
