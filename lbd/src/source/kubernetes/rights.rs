//! What the agent asks of a cluster, and the manifests that grant exactly that.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Subnets, Ipv6Subnets};

use super::{NAMESPACE, own_object};
use crate::config::{Claim, Config, Tenant};
use crate::source::PROGRAMMED;

/// Name of the account and of all that is granted to it.
const NAME: &str = "lbd";

/// How long an expression of a policy gets. The server compiles up to 100,000 characters; what is longer stands in variables.
const EXPRESSION: usize = 90_000;
/// Of these, all alternatives of a tenant's claims together; its prefixes are the rest.
const CLAIMS: usize = 40_000;
/// So many namespaces and prefixes are in one list: at 63 and 43 characters they are within the limits above.
const NAMESPACES: usize = 400;
const PREFIXES: usize = 1000;
const OR: &str = " || ";

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

/// Manifests, for `kubectl apply --server-side -f -`, that give an account of the agent what this configuration needs and nothing else.
pub fn manifests(config: &Config) -> String {
    let mut text = format!(
        "\
# What lbd asks of this cluster with its present configuration, and nothing more: made by `lbd rbac`, to be made again when claims or
# addresses change. The agent runs outside the cluster, as this account: docs/kubernetes.md says how to make its kubeconfig.
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
    let mut lists = Vec::new();
    let mut tenants = Vec::new();
    for tenant in config.tenants.iter().filter(|tenant| !tenant.claims.is_empty()) {
        let pools = pools(tenant, &mut lists);
        tenants.extend(
            joined(claims(tenant), CLAIMS)
                .into_iter()
                .map(|claims| format!("({claims}) && variables.added.all(it, {pools})")),
        );
    }
    let mut tenants = joined(tenants, EXPRESSION);
    let ingress = |of: &str| {
        format!(
            "has({of}.status) && has({of}.status.loadBalancer) && has({of}.status.loadBalancer.ingress) ? \
             {of}.status.loadBalancer.ingress : []"
        )
    };
    let named = |name: &str, text: &str| format!("    - name: {name}\n      expression: >-\n        {text}\n");
    let rule = |text: &str, message: &str| format!("    - expression: >-\n        {text}\n      message: {message}\n");
    let mut text = format!(
        "\
# The account may patch statuses; this keeps it to addresses from the pools, and to our condition. Kubernetes 1.31 or newer.
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
"
    );
    text.push_str(&named("ingress", &ingress("object")));
    text.push_str(&named("before", &ingress("oldObject")));
    text.push_str(&named("added", "variables.ingress.filter(it, !(it in variables.before))"));
    for (index, list) in lists.iter().enumerate() {
        text.push_str(&named(&format!("pools{index}"), list));
    }
    if tenants.len() > 1 {
        for (index, part) in tenants.iter_mut().enumerate() {
            text.push_str(&named(&format!("tenants{index}"), part));
            *part = format!("variables.tenants{index}");
        }
    }
    text.push_str("  validations:\n");
    let message = "lbd may write only addresses of a tenant's pools, to Services that this tenant claims";
    text.push_str(&rule(&tenants.join(OR), message));
    let message = format!("lbd may write no condition but {PROGRAMMED}");
    text.push_str(&rule(&format!("{} == {}", others("object"), others("oldObject")), &message));
    text.push_str(&rule(&metadata, "lbd may change nothing of a Service but its status"));
    text.push_str(
        "\
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

/// Alternatives, joined to as few expressions as can be of at most so many characters each.
fn joined(alternatives: Vec<String>, most: usize) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for one in alternatives {
        match all.last_mut() {
            Some(last) if last.len() + OR.len() + one.len() <= most => {
                last.push_str(OR);
                last.push_str(&one);
            }
            _ => all.push(one),
        }
    }
    all
}

/// CEL: of each claim of the tenant, whether it matches the Service; of one that names many namespaces, in parts.
fn claims(tenant: &Tenant) -> Vec<String> {
    let labels = |of: &str, wanted: &BTreeMap<String, String>| -> Vec<String> {
        wanted
            .iter()
            .map(|(key, value)| {
                let (key, value) = (quoted(key), quoted(value));
                format!("has({of}.labels) && {key} in {of}.labels && {of}.labels[{key}] == {value}")
            })
            .collect()
    };
    let part = |claim: &Claim, names: &[String]| {
        let mut parts = Vec::new();
        if !names.is_empty() {
            let names: Vec<_> = names.iter().map(|name| quoted(name)).collect();
            parts.push(format!("request.namespace in [{}]", names.join(", ")));
        }
        parts.extend(labels("namespaceObject.metadata", &claim.namespace_labels));
        parts.extend(labels("object.metadata", &claim.service_labels));
        parts.join(" && ")
    };
    let one = |claim: &Claim| -> Vec<String> {
        if claim.namespaces.is_empty() {
            return vec![part(claim, &[])];
        }
        claim.namespaces.chunks(NAMESPACES).map(|names| part(claim, names)).collect()
    };
    tenant.claims.iter().flat_map(one).collect()
}

/// CEL: whether the ingress entry `it` is an address of the tenant's pools, or of a frontend that names a Service: that may be any.
/// `lists` takes what is too long to stand in one expression.
fn pools(tenant: &Tenant, lists: &mut Vec<String>) -> String {
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
    let named =
        tenant.frontends.iter().filter(|frontend| frontend.service.is_some()).filter_map(|frontend| frontend.vip);
    let outside = named.filter(|vip| !tenant.pools.iter().any(|pool| pool.contains(*vip)));
    let outside: BTreeSet<_> = outside.map(|vip| IpNet::from(vip).to_string()).collect();
    prefixes.extend(outside.iter().map(|net| quoted(net)));
    let list = |prefixes: &[String]| format!("[{}]", prefixes.join(", "));
    let within = |list: &str| format!("{list}.exists(pool, cidr(pool).containsIP(it.ip))");
    let within = if prefixes.len() <= PREFIXES {
        within(&list(&prefixes))
    } else {
        let parts = prefixes.chunks(PREFIXES).map(|prefixes| {
            lists.push(list(prefixes));
            within(&format!("variables.pools{}", lists.len() - 1))
        });
        format!("({})", parts.collect::<Vec<_>>().join(OR))
    };
    format!("has(it.ip) && !has(it.hostname) && {within}")
}

/// A string as YAML, JSON and CEL all read it.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use cel::extractors::This;
    use cel::{Context, Program, Value as Cel};
    use serde_json::{Value, json};

    use super::*;

    const NAMED: &str = "[{ namespaces: [clusters-a, clusters-b] }]";
    const BY_LABELS: &str = "[{ namespace_selector: { matchLabels: { hosted: 'true' } } }, { namespaces: [shared], service_selector: { matchLabels: { tenant: a } } }]";

    fn config(claim: &str) -> Config {
        let text = format!(
            "version: 1\nhubs: [{{ name: My.Hub, interface: hub0, kubernetes: {{ kubeconfig: /k }} }}]\ntenants:\n  - name: a\n    segment: \
             {{ interface: ten0 }}\n    pools: [192.0.2.32-192.0.2.35, '2001:db8::/120']\n    claim: {claim}\n  - name: b\n    segment: {{ \
             interface: ten1 }}\n    pools: [198.51.100.0/28]\n    claim: [{{ namespaces: [clusters-c] }}]\n"
        );
        crate::config::parse(&text, "test").unwrap()
    }

    fn documents(claim: &str) -> Vec<Value> {
        manifests(&config(claim)).split("---\n").map(|text| serde_saphyr::from_str(text).unwrap()).collect()
    }

    fn of_kind<'a>(documents: &'a [Value], kind: &str) -> Vec<&'a Value> {
        documents.iter().filter(|document| document["kind"] == kind).collect()
    }

    #[test]
    fn named_namespaces_are_bound_one_by_one() {
        let all = documents(NAMED);
        let bound: Vec<_> = of_kind(&all, "RoleBinding")
            .into_iter()
            .map(|binding| {
                (binding["metadata"]["namespace"].as_str().unwrap(), binding["roleRef"]["name"].as_str().unwrap())
            })
            .collect();
        assert_eq!(
            bound,
            [
                ("lbd-system", "lbd"),
                ("clusters-a", "lbd-services"),
                ("clusters-b", "lbd-services"),
                ("clusters-c", "lbd-services")
            ]
        );
        let everywhere = of_kind(&all, "ClusterRoleBinding");
        assert_eq!(everywhere.len(), 1);
        assert_eq!(everywhere[0]["roleRef"]["name"], "lbd");
        let reading = &of_kind(&all, "ClusterRole")[0]["rules"];
        for rule in reading.as_array().unwrap() {
            assert_eq!(rule["verbs"], json!(["list", "watch"]), "{rule}");
        }
    }

    #[test]
    fn claims_by_label_need_the_right_everywhere() {
        let all = documents(BY_LABELS);
        let everywhere: Vec<_> =
            of_kind(&all, "ClusterRoleBinding").into_iter().map(|binding| binding["roleRef"]["name"].clone()).collect();
        assert_eq!(everywhere, ["lbd", "lbd-services"]);
        assert_eq!(of_kind(&all, "RoleBinding").len(), 1);
    }

    #[test]
    fn our_own_objects_are_named() {
        let all = documents(NAMED);
        let rules = of_kind(&all, "Role")[0]["rules"].clone();
        for rule in rules.as_array().unwrap() {
            let names = if rule["verbs"] == json!(["create"]) { Value::Null } else { json!(["lbd-my-hub"]) };
            assert_eq!(rule.get("resourceNames").cloned().unwrap_or_default(), names, "{rule}");
        }
    }

    #[test]
    fn without_claims_nothing_may_be_written_to_services() {
        let text = "version: 1\nhubs: [{ name: hub, interface: hub0, kubernetes: { kubeconfig: /k } }]\ntenants:\n  - name: a\n    segment: { \
                    interface: ten0 }\n    pools: [192.0.2.32/28]\n";
        let text = manifests(&crate::config::parse(text, "test").unwrap());
        assert!(!text.contains("services/status") && !text.contains("events"), "{text}");
    }

    /// Whether the policy lets the account make `object` of `old`.
    fn admits(claim: &str, namespace: &Value, old: &Value, object: &Value) -> bool {
        admitted_by(&documents(claim), namespace, old, object)
    }

    fn admitted_by(all: &[Value], namespace: &Value, old: &Value, object: &Value) -> bool {
        let policy = of_kind(all, "ValidatingAdmissionPolicy")[0]["spec"].clone();
        let mut context = Context::default();
        context.add_function("cidr", |text: std::sync::Arc<String>| text).unwrap();
        context
            .add_function("containsIP", |This(net): This<std::sync::Arc<String>>, address: std::sync::Arc<String>| {
                net.parse::<IpNet>().unwrap().contains(&address.parse::<IpAddr>().unwrap())
            })
            .unwrap();
        let request = json!({"namespace": namespace["metadata"]["name"],
            "userInfo": {"username": "system:serviceaccount:lbd-system:lbd"}});
        for (name, value) in
            [("request", &request), ("object", object), ("oldObject", old), ("namespaceObject", namespace)]
        {
            context.add_variable(name, value).unwrap();
        }
        let run = |context: &Context, expression: &Value| {
            let text = expression.as_str().unwrap();
            Program::compile(text)
                .unwrap_or_else(|error| panic!("{text}: {error}"))
                .execute(context)
                .unwrap_or_else(|error| panic!("{text}: {error}"))
        };
        assert_eq!(run(&context, &policy["matchConditions"][0]["expression"]), Cel::Bool(true));
        let mut variables: HashMap<String, Cel> = HashMap::new();
        for variable in policy["variables"].as_array().unwrap() {
            context.add_variable_from_value("variables", variables.clone());
            variables.insert(variable["name"].as_str().unwrap().to_owned(), run(&context, &variable["expression"]));
        }
        context.add_variable_from_value("variables", variables);
        policy["validations"]
            .as_array()
            .unwrap()
            .iter()
            .all(|rule| run(&context, &rule["expression"]) == Cel::Bool(true))
    }

    fn namespace(name: &str, labels: &Value) -> Value {
        json!({"metadata": {"name": name, "labels": labels}})
    }

    fn service(labels: &Value, ingress: &Value, conditions: &Value) -> Value {
        json!({"metadata": {"name": "s", "labels": labels},
            "status": {"loadBalancer": {"ingress": ingress}, "conditions": conditions}})
    }

    #[test]
    fn the_policy_admits_addresses_of_the_pools_only() {
        let place = namespace("clusters-a", &json!({}));
        let old = json!({"metadata": {"name": "s"}, "status": {"loadBalancer": {}}});
        let with =
            |ingress: Value| json!({"metadata": {"name": "s"}, "status": {"loadBalancer": {"ingress": ingress}}});
        for (ingress, admitted) in [
            (json!([{"ip": "192.0.2.32"}]), true),
            (json!([{"ip": "192.0.2.35"}, {"ip": "2001:db8::7f"}]), true),
            (json!([{"ip": "192.0.2.36"}]), false),
            (json!([{"ip": "198.51.100.1"}]), false),
            (json!([{"ip": "192.0.2.32"}, {"ip": "10.0.0.1"}]), false),
            (json!([{"hostname": "evil.example"}]), false),
        ] {
            assert_eq!(admits(NAMED, &place, &old, &with(ingress.clone())), admitted, "{ingress}");
        }
        // Cleared, or left as it was.
        assert!(admits(NAMED, &place, &with(json!([{"ip": "192.0.2.32"}])), &old));
        let foreign = with(json!([{"ip": "203.0.113.1"}]));
        assert!(admits(NAMED, &place, &foreign, &foreign));
        // Another tenant's namespace, and nobody's.
        let ours = with(json!([{"ip": "192.0.2.32"}]));
        assert!(!admits(NAMED, &namespace("clusters-c", &json!({})), &old, &ours));
        assert!(!admits(NAMED, &namespace("kube-system", &json!({})), &old, &ours));
    }

    #[test]
    fn the_policy_admits_what_the_file_gives_a_service_outside_the_pools() {
        let claim = format!(
            "{NAMED}\n    frontends: [{{ name: s, service: clusters-a/s, vip: 192.0.2.99 }}, {{ name: in, service: clusters-a/in, vip: \
             192.0.2.33 }}, {{ name: plain, vip: 192.0.2.98, ports: [443], backends: [10.0.0.1] }}]"
        );
        let place = namespace("clusters-a", &json!({}));
        let old = json!({"metadata": {"name": "s"}});
        let with = |address: &str| json!({"metadata": {"name": "s"}, "status": {"loadBalancer": {"ingress": [{"ip": address}]}}});
        for (address, admitted) in [("192.0.2.99", true), ("192.0.2.33", true), ("192.0.2.98", false)] {
            assert_eq!(admits(&claim, &place, &old, &with(address)), admitted, "{address}");
        }
        assert!(!admits(NAMED, &place, &old, &with("192.0.2.99")));
        assert_eq!(manifests(&config(&claim)).matches("192.0.2.33").count(), 0, "a part of the pool is named once");
    }

    #[test]
    fn the_policy_reads_labels_as_claims_do() {
        let none = json!({});
        let old = json!({"metadata": {"name": "s"}});
        let ours = |labels: &Value| json!({"metadata": {"name": "s", "labels": labels}, "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.32"}]}}});
        let labelled = |labels: &Value| json!({"metadata": {"name": "s", "labels": labels}});
        assert!(admits(BY_LABELS, &namespace("any", &json!({"hosted": "true"})), &labelled(&none), &ours(&none)));
        assert!(!admits(BY_LABELS, &namespace("any", &json!({"hosted": "false"})), &labelled(&none), &ours(&none)));
        assert!(!admits(BY_LABELS, &namespace("any", &none), &old, &ours(&none)));
        let labels = json!({"tenant": "a"});
        assert!(admits(BY_LABELS, &namespace("shared", &none), &labelled(&labels), &ours(&labels)));
        assert!(!admits(BY_LABELS, &namespace("shared", &none), &labelled(&none), &ours(&none)));
    }

    /// Tenants with ranges that are many prefixes, each with namespaces of its own.
    fn large(tenants: usize, pools: usize, namespaces: usize) -> Vec<Value> {
        let mut text =
            "version: 1\nhubs: [{ name: hub, interface: hub0, kubernetes: { kubeconfig: /k } }]\ntenants:\n".to_owned();
        for tenant in 0..tenants {
            let pools: Vec<_> = (0..pools)
                .map(|pool| {
                    format!("'2001:db8:{tenant:x}:{pool:x}::1-2001:db8:{tenant:x}:{pool:x}:ffff:ffff:ffff:fffe'")
                })
                .collect();
            let names: Vec<_> =
                (0..namespaces).map(|index| format!("clusters-{tenant}-{index}-{}", "x".repeat(40))).collect();
            let _ = writeln!(
                text,
                "  - {{ name: t{tenant}, segment: {{ interface: ten{} }}, pools: [{}], claim: [{{ namespaces: [{}] }}] }}",
                tenant % 8,
                pools.join(", "),
                names.join(", ")
            );
        }
        let config = crate::config::parse(&text, "test").unwrap();
        manifests(&config).split("---\n").map(|text| serde_saphyr::from_str(text).unwrap()).collect()
    }

    #[test]
    fn no_expression_of_a_large_policy_is_longer_than_the_server_takes() {
        let x = "x".repeat(40);
        for (all, tenant, place, split) in [
            (large(1, 1, 3), 0, format!("clusters-0-2-{x}"), false),
            (large(60, 1, 2), 59, format!("clusters-59-1-{x}"), true),
            (large(2, 9, 800), 1, format!("clusters-1-799-{x}"), true),
        ] {
            let policy = &of_kind(&all, "ValidatingAdmissionPolicy")[0]["spec"];
            let mut names = BTreeSet::new();
            for entry in ["variables", "validations"].iter().flat_map(|field| policy[field].as_array().unwrap()) {
                let length = entry["expression"].as_str().unwrap().chars().count();
                assert!(length < 100_000, "{length}: {}", entry["name"]);
                assert!(entry["name"].as_str().is_none_or(|name| names.insert(name)), "{}", entry["name"]);
            }
            assert_eq!(names.len() > 3, split, "{names:?}");
            let old = json!({"metadata": {"name": "s"}});
            let with = |address: &str| json!({"metadata": {"name": "s"}, "status": {"loadBalancer": {"ingress": [{"ip": address}]}}});
            let place = namespace(&place, &json!({}));
            let last = format!("2001:db8:{tenant:x}::ffff:ffff:ffff:fffe");
            assert!(admitted_by(&all, &place, &old, &with(&last)));
            assert!(!admitted_by(&all, &place, &old, &with(&format!("2001:db8:{tenant:x}::ffff:ffff:ffff:ffff"))));
            assert!(!admitted_by(&all, &place, &old, &with("2001:db8:ffff::1")));
            assert!(!admitted_by(&all, &namespace("clusters", &json!({})), &old, &with(&last)));
        }
    }

    #[test]
    fn the_policy_keeps_other_conditions_and_all_metadata() {
        let place = namespace("clusters-a", &json!({}));
        let (labels, ingress) = (json!({"app": "x"}), json!([{"ip": "192.0.2.32"}]));
        let theirs = json!({"type": "Theirs", "status": "True"});
        let ours = json!({"type": PROGRAMMED, "status": "True"});
        let old = service(&labels, &ingress, &json!([theirs]));
        assert!(admits(NAMED, &place, &old, &service(&labels, &ingress, &json!([theirs, ours]))));
        assert!(!admits(NAMED, &place, &old, &service(&labels, &ingress, &json!([ours]))));
        assert!(!admits(NAMED, &place, &old, &service(&json!({"app": "y"}), &ingress, &json!([theirs]))));
        let mut finalized = old.clone();
        finalized["metadata"]["finalizers"] = json!(["x/y"]);
        assert!(!admits(NAMED, &place, &old, &finalized));
    }
}
