//! What the agent asks of a cluster, and the manifests that grant exactly that.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::IpAddr;

use ipnet::{Ipv4Subnets, Ipv6Subnets};

use super::{NAMESPACE, own_object};
use crate::config::{Claim, Config, Tenant};
use crate::source::PROGRAMMED;

/// Name of the account and of all that is granted to it.
const NAME: &str = "lbd";

/// Where a right is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Everywhere.
    Cluster,
    /// Where claimed Services are.
    Services,
    /// In the namespace of lbd itself.
    Own,
}

/// One thing that the agent asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Right {
    /// API group; empty = core.
    pub group: &'static str,
    /// Resource, with its subresource if there is one.
    pub resource: &'static str,
    /// Verb.
    pub verb: &'static str,
    /// Where.
    pub reach: Reach,
    /// What does not work without it; `None` = nothing works.
    pub without: Option<&'static str>,
}

const fn right(
    group: &'static str,
    resource: &'static str,
    verb: &'static str,
    reach: Reach,
    without: Option<&'static str>,
) -> Right {
    Right { group, resource, verb, reach, without }
}

const NO_ENDPOINTS: Option<&str> = Some("backends that are endpoints");
const NO_EVENTS: Option<&str> = Some("Warning Events");
const NO_LEASE: Option<&str> = Some("Lease that keeps a second agent from giving out the same addresses");
const NO_RECORD: Option<&str> = Some("record of addresses in the cluster, only the one on disk");

/// Everything that the agent asks for.
pub const RIGHTS: [Right; 17] = [
    right("", "services", "list", Reach::Cluster, None),
    right("", "services", "watch", Reach::Cluster, None),
    right("", "nodes", "list", Reach::Cluster, None),
    right("", "nodes", "watch", Reach::Cluster, None),
    right("", "namespaces", "list", Reach::Cluster, None),
    right("", "namespaces", "watch", Reach::Cluster, None),
    right("discovery.k8s.io", "endpointslices", "list", Reach::Cluster, NO_ENDPOINTS),
    right("discovery.k8s.io", "endpointslices", "watch", Reach::Cluster, NO_ENDPOINTS),
    right("", "services/status", "patch", Reach::Services, Some("addresses in the status of Services")),
    right("", "events", "create", Reach::Services, NO_EVENTS),
    right("", "events", "patch", Reach::Services, NO_EVENTS),
    right("coordination.k8s.io", "leases", "get", Reach::Own, NO_LEASE),
    right("coordination.k8s.io", "leases", "create", Reach::Own, NO_LEASE),
    right("coordination.k8s.io", "leases", "update", Reach::Own, NO_LEASE),
    right("", "configmaps", "get", Reach::Own, NO_RECORD),
    right("", "configmaps", "create", Reach::Own, NO_RECORD),
    right("", "configmaps", "update", Reach::Own, NO_RECORD),
];

/// The namespaces that all claims name; `None` = some claim chooses by labels alone, and its Services may be anywhere.
fn namespaces(config: &Config) -> Option<BTreeSet<&str>> {
    let mut all = BTreeSet::new();
    for claim in config.tenants.iter().flat_map(|tenant| &tenant.claims) {
        if claim.namespaces.is_empty() {
            return None;
        }
        all.extend(claim.namespaces.iter().map(String::as_str));
    }
    Some(all)
}

/// The namespaces in which a right is asked for; `None` = everywhere.
pub fn places(config: &Config, reach: Reach) -> Option<BTreeSet<&str>> {
    match reach {
        Reach::Cluster => None,
        Reach::Services => namespaces(config),
        Reach::Own => Some(BTreeSet::from([NAMESPACE])),
    }
}

/// Manifests, for `kubectl apply -f -`, that give an account of the agent what this configuration needs and nothing else.
pub fn manifests(config: &Config) -> String {
    let mut text = format!(
        "\
# What lbd asks of this cluster with its present configuration, and nothing more: made by `lbd rbac`, to be made again when claims or
# pools change. The agent runs outside the cluster, as this account: docs/kubernetes.md says how to make its kubeconfig.
apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {NAME}
  namespace: {NAMESPACE}
"
    );
    // Writing to a string does not fail.
    let _ = write!(text, "---\n# The desired state.\n{}", role("ClusterRole", NAME, Reach::Cluster, None));
    let _ = write!(text, "---\n{}", binding("ClusterRoleBinding", None, "ClusterRole", NAME));
    let _ = write!(
        text,
        "---\n# Our own namespace: the record of addresses, and the Lease that says which agent gives them out.\n{}",
        role("Role", NAME, Reach::Own, Some(&own_object(&config.hub.name)))
    );
    let _ = write!(text, "---\n{}", binding("RoleBinding", Some(NAMESPACE), "Role", NAME));
    let services = "lbd-services";
    let places = namespaces(config);
    if places.as_ref().is_some_and(BTreeSet::is_empty) {
        return text;
    }
    let _ = write!(
        text,
        "---\n# Claimed Services: their addresses and our condition, and Warnings for their owners.\n{}",
        role("ClusterRole", services, Reach::Services, None)
    );
    match places {
        Some(places) => {
            for place in places {
                let _ = write!(text, "---\n{}", binding("RoleBinding", Some(place), "ClusterRole", services));
            }
        }
        None => {
            let _ = write!(text, "---\n{}", binding("ClusterRoleBinding", None, "ClusterRole", services));
        }
    }
    let _ = write!(text, "---\n{}", policy(config));
    text
}

/// A role with the rights of one reach. `object`: the only one that they are for, but for creating, which knows no names.
fn role(kind: &str, name: &str, reach: Reach, object: Option<&str>) -> String {
    let mut text = format!("apiVersion: rbac.authorization.k8s.io/v1\nkind: {kind}\nmetadata:\n  name: {name}\n");
    if reach == Reach::Own {
        let _ = writeln!(text, "  namespace: {NAMESPACE}");
    }
    text.push_str("rules:\n");
    let mut rules: Vec<(&str, &str, bool, Vec<&str>)> = Vec::new();
    for right in RIGHTS.iter().filter(|right| right.reach == reach) {
        let named = object.is_some() && right.verb != "create";
        let same = |rule: &&mut (&str, &str, bool, Vec<&str>)| {
            (rule.0, rule.1, rule.2) == (right.group, right.resource, named)
        };
        match rules.iter_mut().find(same) {
            Some((.., verbs)) => verbs.push(right.verb),
            None => rules.push((right.group, right.resource, named, vec![right.verb])),
        }
    }
    for (group, resource, named, verbs) in rules {
        let _ = write!(
            text,
            "  - apiGroups: [{group:?}]\n    resources: [{resource}]\n    verbs: [{}]\n",
            verbs.join(", ")
        );
        if let (true, Some(object)) = (named, object) {
            let _ = writeln!(text, "    resourceNames: [{}]", quoted(object));
        }
    }
    text
}

fn binding(kind: &str, namespace: Option<&str>, role_kind: &str, role: &str) -> String {
    let mut text = format!("apiVersion: rbac.authorization.k8s.io/v1\nkind: {kind}\nmetadata:\n  name: {role}\n");
    if let Some(namespace) = namespace {
        let _ = writeln!(text, "  namespace: {}", quoted(namespace));
    }
    let _ = write!(
        text,
        "roleRef:\n  apiGroup: rbac.authorization.k8s.io\n  kind: {role_kind}\n  name: {role}\nsubjects:\n  - kind: ServiceAccount\n    \
         name: {NAME}\n    namespace: {NAMESPACE}\n"
    );
    text
}

/// Lets the account change of a Service only what is ours: the right to patch a status cannot say which part of it.
fn policy(config: &Config) -> String {
    let list = |of: &str, field: &str| format!("(has({of}.{field}) ? {of}.{field} : [])");
    let others = |of: &str| {
        format!(
            "(has({of}.status) && has({of}.status.conditions) ? {of}.status.conditions : []).filter(it, it.type != {})",
            quoted(PROGRAMMED)
        )
    };
    let map = |of: &str, field: &str| format!("(has({of}.{field}) ? {of}.{field} : {{}})");
    let metadata = ["labels", "annotations"]
        .map(|field| format!("{} == {}", map("object.metadata", field), map("oldObject.metadata", field)))
        .into_iter()
        .chain(
            ["finalizers", "ownerReferences"]
                .map(|field| format!("{} == {}", list("object.metadata", field), list("oldObject.metadata", field))),
        )
        .collect::<Vec<_>>()
        .join(" && ");
    let tenants: Vec<_> = config
        .tenants
        .iter()
        .filter(|tenant| !tenant.claims.is_empty())
        .map(|tenant| format!("({}) && variables.added.all(it, {})", claims(tenant), pools(tenant)))
        .collect();
    let ingress = |of: &str| {
        format!(
            "has({of}.status) && has({of}.status.loadBalancer) && has({of}.status.loadBalancer.ingress) ? \
             {of}.status.loadBalancer.ingress : []"
        )
    };
    let expression = |indent: &str, text: &str| format!("{indent}expression: >-\n{indent}  {text}\n");
    let mut text = format!(
        "\
# The account may patch statuses; this keeps it to addresses from the pools, and to our condition. Kubernetes 1.30 or newer.
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: lbd-services
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
      - apiGroups: [\"\"]
        apiVersions: [v1]
        operations: [UPDATE]
        resources: [services/status]
  matchConditions:
    - name: account
      expression: request.userInfo.username == \"system:serviceaccount:{NAMESPACE}:{NAME}\"
  variables:
    - name: ingress
"
    );
    text.push_str(&expression("      ", &ingress("object")));
    text.push_str("    - name: before\n");
    text.push_str(&expression("      ", &ingress("oldObject")));
    text.push_str("    - name: added\n");
    text.push_str(&expression("      ", "variables.ingress.filter(it, !(it in variables.before))"));
    text.push_str("  validations:\n    -\n");
    text.push_str(&expression("      ", &tenants.join(" || ")));
    text.push_str(
        "      message: lbd may write only addresses of a tenant's pools, to Services that this tenant claims\n    -\n",
    );
    text.push_str(&expression("      ", &format!("{} == {}", others("object"), others("oldObject"))));
    let _ = writeln!(text, "      message: lbd may write no condition but {PROGRAMMED}");
    text.push_str("    -\n");
    text.push_str(&expression("      ", &metadata));
    text.push_str(
        "\
      message: lbd may change nothing of a Service but its status
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: lbd-services
spec:
  policyName: lbd-services
  validationActions: [Deny]
",
    );
    text
}

/// CEL: whether some claim of the tenant matches the Service.
fn claims(tenant: &Tenant) -> String {
    let labels = |of: &str, wanted: &BTreeMap<String, String>| -> Vec<String> {
        wanted
            .iter()
            .map(|(key, value)| {
                let (key, value) = (quoted(key), quoted(value));
                format!("has({of}.labels) && {key} in {of}.labels && {of}.labels[{key}] == {value}")
            })
            .collect()
    };
    let one = |claim: &Claim| {
        let mut parts = Vec::new();
        if !claim.namespaces.is_empty() {
            let names: Vec<_> = claim.namespaces.iter().map(|name| quoted(name)).collect();
            parts.push(format!("request.namespace in [{}]", names.join(", ")));
        }
        parts.extend(labels("namespaceObject.metadata", &claim.namespace_labels));
        parts.extend(labels("object.metadata", &claim.service_labels));
        parts.join(" && ")
    };
    tenant.claims.iter().map(one).collect::<Vec<_>>().join(" || ")
}

/// CEL: whether the ingress entry `it` is an address of the tenant's pools.
fn pools(tenant: &Tenant) -> String {
    let mut prefixes = Vec::new();
    for pool in &tenant.pools {
        match (pool.first, pool.last) {
            (IpAddr::V4(first), IpAddr::V4(last)) => {
                prefixes.extend(Ipv4Subnets::new(first, last, 0).map(|net| quoted(&net.to_string())));
            }
            (IpAddr::V6(first), IpAddr::V6(last)) => {
                prefixes.extend(Ipv6Subnets::new(first, last, 0).map(|net| quoted(&net.to_string())));
            }
            (IpAddr::V4(_) | IpAddr::V6(_), _) => {}
        }
    }
    format!("has(it.ip) && !has(it.hostname) && [{}].exists(pool, cidr(pool).containsIP(it.ip))", prefixes.join(", "))
}

/// A string as YAML, JSON and CEL all read it.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
