//! Who asks, and what they may do: tokens of accounts, roles and bindings as they are in the store.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::store::{KINDS, Store};

/// Roles, bindings and policies work this long after they were made, as they do where they are read from a watch.
pub(super) const DELAY: Duration = Duration::from_millis(150);

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct User {
    pub(super) name: String,
    pub(super) groups: Vec<String>,
}

impl User {
    /// Who may do everything.
    pub(super) fn administrator() -> Self {
        Self { name: "administrator".into(), groups: vec!["system:masters".into(), "system:authenticated".into()] }
    }

    /// An account.
    pub(super) fn account(namespace: &str, name: &str) -> Self {
        Self {
            name: format!("system:serviceaccount:{namespace}:{name}"),
            groups: vec![
                "system:serviceaccounts".into(),
                format!("system:serviceaccounts:{namespace}"),
                "system:authenticated".into(),
            ],
        }
    }

    pub(super) fn is_administrator(&self) -> bool {
        self.groups.iter().any(|group| group == "system:masters")
    }

    fn is(&self, subject: &Value, place: &str) -> bool {
        let name = subject["name"].as_str().unwrap_or_default();
        match subject["kind"].as_str() {
            Some("ServiceAccount") => {
                let namespace = subject["namespace"].as_str().unwrap_or(place);
                self.name == format!("system:serviceaccount:{namespace}:{name}")
            }
            Some("User") => self.name == name,
            Some("Group") => self.groups.iter().any(|group| group == name),
            _ => false,
        }
    }
}

/// What somebody wants to do.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Attributes<'a> {
    pub(super) verb: &'a str,
    pub(super) group: &'a str,
    pub(super) resource: &'a str,
    pub(super) subresource: &'a str,
    pub(super) namespace: &'a str,
    pub(super) name: &'a str,
}

impl Attributes<'_> {
    /// Resource and subresource.
    pub(super) fn full(&self) -> String {
        let slash = if self.subresource.is_empty() { "" } else { "/" };
        format!("{}{slash}{}", self.resource, self.subresource)
    }

    fn granted_by(&self, rule: &Value) -> bool {
        let any = |field: &str, wanted: &str| {
            rule[field].as_array().into_iter().flatten().any(|item| item == wanted || item == "*")
        };
        let named = rule["resourceNames"].as_array().is_some_and(|names| !names.is_empty());
        any("verbs", self.verb)
            && any("apiGroups", self.group)
            && any("resources", &self.full())
            && (!named
                || !self.name.is_empty()
                    && rule["resourceNames"].as_array().is_some_and(|names| names.contains(&json!(self.name))))
    }
}

fn position(kind: &str) -> usize {
    KINDS.iter().position(|known| known.name == kind).unwrap_or(usize::MAX)
}

/// Whether roles and bindings let a user do something.
pub(super) fn authorize(store: &Store, user: &User, wanted: &Attributes<'_>) -> bool {
    if user.is_administrator() {
        return true;
    }
    let works = |kind: usize, key: &(String, String)| {
        store.since.get(&(kind, key.clone())).is_none_or(|since: &Instant| since.elapsed() >= DELAY)
    };
    [position("ClusterRoleBinding"), position("RoleBinding")].into_iter().any(|kind| {
        store.list(kind, None).any(|(key, binding)| {
            let place = key.0.as_str();
            if !works(kind, key) || !(place.is_empty() || place == wanted.namespace) {
                return false;
            }
            let subjects = binding["subjects"].as_array();
            if !subjects.into_iter().flatten().any(|subject| user.is(subject, place)) {
                return false;
            }
            let role = &binding["roleRef"];
            let role_kind = position(role["kind"].as_str().unwrap_or_default());
            let role_place = if role["kind"] == "Role" { place } else { "" };
            let role_key = (role_place.to_owned(), role["name"].as_str().unwrap_or_default().to_owned());
            role_kind < KINDS.len()
                && works(role_kind, &role_key)
                && store.object(role_kind, &role_key).is_some_and(|role| {
                    role["rules"].as_array().into_iter().flatten().any(|rule| wanted.granted_by(rule))
                })
        })
    })
}

/// Policies with their bindings, so far as they work already.
pub(super) fn policies(store: &Store) -> Vec<(std::sync::Arc<Value>, std::sync::Arc<Value>)> {
    let (policy, binding) = (position("ValidatingAdmissionPolicy"), position("ValidatingAdmissionPolicyBinding"));
    let works = |kind: usize, key: &(String, String)| {
        store.since.get(&(kind, key.clone())).is_none_or(|since: &Instant| since.elapsed() >= DELAY * 2)
    };
    store
        .list(binding, None)
        .filter(|(key, _)| works(binding, key))
        .filter_map(|(_, bound)| {
            let key = (String::new(), bound["spec"]["policyName"].as_str()?.to_owned());
            let found = store.object(policy, &key).filter(|_| works(policy, &key))?;
            Some((found.clone(), bound.clone()))
        })
        .collect()
}
