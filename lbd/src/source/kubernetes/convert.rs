//! Kubernetes objects → what lbd reads of them. Pure; nothing that an object contains makes it panic.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;

use super::super::{
    Condition, Endpoint, MANAGER, Node, ObjectName, PREFIX, PROGRAMMED, Service, ServiceKind, ServicePort,
};
use crate::plan::ranges::SOURCE_RANGES_ANNOTATION;

/// Keeps a node out, if its value is not `false`.
const EXCLUDE_LABEL: &str = "node.kubernetes.io/exclude-from-external-load-balancers";
/// The autoscaler is about to delete the node.
const AUTOSCALER_TAINT: &str = "ToBeDeletedByClusterAutoscaler";
/// The Service that a slice belongs to.
const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
/// Bytes kept of an annotation's value; no valid value of those we read is longer.
const ANNOTATION_LIMIT: usize = 64 * 1024;

/// What lbd reads of an EndpointSlice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slice {
    /// The Service it belongs to.
    pub(crate) service: ObjectName,
    /// Its endpoints, ready or not.
    pub(crate) endpoints: Vec<Endpoint>,
}

/// What lbd reads of a Namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Namespace {
    /// UID.
    pub(crate) uid: String,
    /// Labels.
    pub(crate) labels: BTreeMap<String, String>,
}

fn object_name(metadata: &mut meta::ObjectMeta) -> Option<ObjectName> {
    let name = metadata.name.take().filter(|name| !name.is_empty())?;
    let namespace = metadata.namespace.take().filter(|namespace| !namespace.is_empty())?;
    Some(ObjectName { namespace, name })
}

fn port(number: i32) -> u16 {
    u16::try_from(number).unwrap_or(0)
}

/// A Service. `annotations` are the keys to keep beside ours. `None` if it has no name.
pub(crate) fn service(mut object: v1::Service, annotations: &BTreeSet<String>) -> Option<(ObjectName, Service)> {
    let name = object_name(&mut object.metadata)?;
    let published = object.metadata.managed_fields.unwrap_or_default().iter().any(|entry| {
        entry.manager.as_deref() == Some(MANAGER)
            && entry.operation.as_deref() == Some("Apply")
            && entry.subresource.as_deref() == Some("status")
    });
    let spec = object.spec.unwrap_or_default();
    let status = object.status.unwrap_or_default();
    let mut kept = object.metadata.annotations.unwrap_or_default();
    kept.retain(|key, _| key.starts_with(PREFIX) || key == SOURCE_RANGES_ANNOTATION || annotations.contains(key));
    for value in kept.values_mut() {
        if value.len() > ANNOTATION_LIMIT {
            // What is cut off must not mean something else: a prefix length could.
            value.truncate(value.floor_char_boundary(ANNOTATION_LIMIT - '…'.len_utf8()));
            value.push('…');
        }
    }
    let mut ingress = Vec::new();
    let mut ingress_modes = Vec::new();
    for entry in status.load_balancer.and_then(|balancer| balancer.ingress).unwrap_or_default() {
        if let Some(text) = entry.ip.filter(|ip| !ip.is_empty()).or(entry.hostname) {
            ingress.push(text);
            ingress_modes.push(entry.ip_mode.unwrap_or_default());
        }
    }
    let programmed =
        status.conditions.unwrap_or_default().into_iter().find(|condition| condition.type_ == PROGRAMMED).map(
            |condition| Condition {
                status: match condition.status.as_str() {
                    "True" => Some(true),
                    "False" => Some(false),
                    _ => None,
                },
                reason: condition.reason,
                message: condition.message,
                since: condition.last_transition_time.0.as_second(),
            },
        );
    let ports = spec.ports.unwrap_or_default().into_iter().map(|entry| ServicePort {
        name: entry.name.unwrap_or_default(),
        protocol: entry.protocol.unwrap_or_else(|| "TCP".to_owned()),
        port: port(entry.port),
        node_port: port(entry.node_port.unwrap_or(0)),
    });
    let service = Service {
        uid: object.metadata.uid.unwrap_or_default(),
        created: object.metadata.creation_timestamp.map_or(0, |time| time.0.as_second()),
        labels: object.metadata.labels.unwrap_or_default(),
        annotations: kept,
        kind: match spec.type_.as_deref() {
            Some("LoadBalancer") => ServiceKind::LoadBalancer,
            Some("NodePort") => ServiceKind::NodePort,
            Some("ExternalName") => ServiceKind::ExternalName,
            _ => ServiceKind::ClusterIp,
        },
        class: spec.load_balancer_class,
        selector: spec.selector.is_some_and(|selector| !selector.is_empty()),
        terminating: object.metadata.deletion_timestamp.is_some(),
        ports: ports.collect(),
        families_v6: spec.ip_families.unwrap_or_default().iter().map(|family| family == "IPv6").collect(),
        require_dual_stack: spec.ip_family_policy.as_deref() == Some("RequireDualStack"),
        policy_local: spec.external_traffic_policy.as_deref() == Some("Local"),
        health_port: spec.health_check_node_port.map(port).filter(|port| *port != 0),
        client_ip_affinity: spec.session_affinity.as_deref() == Some("ClientIP"),
        requested_address: spec.load_balancer_ip.filter(|address| !address.is_empty()),
        source_ranges: spec.load_balancer_source_ranges.unwrap_or_default(),
        ingress,
        ingress_modes,
        programmed,
        published,
    };
    Some((name, service))
}

/// A Node. `None` if it has no name.
pub(crate) fn node(object: v1::Node) -> Option<(String, Node)> {
    let name = object.metadata.name.filter(|name| !name.is_empty())?;
    let labelled = object.metadata.labels.as_ref().and_then(|labels| labels.get(EXCLUDE_LABEL));
    // The values that Go's `strconv.ParseBool` reads as false, as the service controller of Kubernetes does.
    let excluded_by_label =
        labelled.is_some_and(|value| !matches!(value.as_str(), "0" | "f" | "F" | "false" | "FALSE" | "False"));
    let tainted =
        object.spec.and_then(|spec| spec.taints).unwrap_or_default().iter().any(|taint| taint.key == AUTOSCALER_TAINT);
    let mut addresses: Vec<IpAddr> = Vec::new();
    for entry in object.status.and_then(|status| status.addresses).unwrap_or_default() {
        if entry.type_ == "InternalIP"
            && let Ok(address) = entry.address.parse()
            && !addresses.contains(&address)
        {
            addresses.push(address);
        }
    }
    let node = Node {
        uid: object.metadata.uid.unwrap_or_default(),
        addresses,
        excluded: excluded_by_label || tainted || object.metadata.deletion_timestamp.is_some(),
    };
    Some((name, node))
}

/// A Namespace. `None` if it has no name.
pub(crate) fn namespace(object: v1::Namespace) -> Option<(String, Namespace)> {
    let name = object.metadata.name.filter(|name| !name.is_empty())?;
    let uid = object.metadata.uid.unwrap_or_default();
    Some((name, Namespace { uid, labels: object.metadata.labels.unwrap_or_default() }))
}

/// An EndpointSlice. `None` if it has no name; the Service of one that belongs to none has no name.
pub(crate) fn slice(mut object: EndpointSlice) -> Option<(ObjectName, Slice)> {
    let name = object_name(&mut object.metadata)?;
    let service = object.metadata.labels.and_then(|mut labels| labels.remove(SERVICE_NAME_LABEL)).unwrap_or_default();
    let service = ObjectName { namespace: name.namespace.clone(), name: service };
    let mut endpoints = Vec::new();
    if matches!(object.address_type.as_str(), "IPv4" | "IPv6") {
        let ports: BTreeSet<_> = object
            .ports
            .unwrap_or_default()
            .into_iter()
            .filter_map(|entry| {
                let number = port(entry.port?);
                let protocol = entry.protocol.unwrap_or_else(|| "TCP".to_owned());
                (number != 0).then(|| (entry.name.unwrap_or_default(), protocol, number))
            })
            .collect();
        for endpoint in object.endpoints.unwrap_or_default() {
            // Only the first address: more than one has no meaning that anybody agrees on.
            let Some(address) = endpoint.addresses.first().and_then(|address| address.parse().ok()) else { continue };
            let conditions = endpoint.conditions.unwrap_or_default();
            let ready = conditions.ready.unwrap_or(true);
            endpoints.push(Endpoint { address, node: endpoint.node_name, ready, ports: ports.clone() });
        }
    }
    Some((name, Slice { service, endpoints }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    fn read(value: serde_json::Value) -> Service {
        service(parse(value), &BTreeSet::from(["metallb.io/loadBalancerIPs".to_owned()])).unwrap().1
    }

    #[test]
    fn a_service_as_the_hosted_control_plane_writes_it() {
        let service = read(serde_json::json!({
            "metadata": {
                "name": "kube-apiserver", "namespace": "clusters-tenant-a", "uid": "u1",
                "creationTimestamp": "2026-01-02T03:04:05Z",
                "labels": {"app": "kube-apiserver"},
                "annotations": {
                    "external-dns.alpha.kubernetes.io/hostname": "api.example",
                    "lbd.tenantedge.io/vip": "192.168.203.110",
                    "metallb.io/loadBalancerIPs": "192.168.203.111",
                    "kubectl.kubernetes.io/last-applied-configuration": "{}"
                },
                "managedFields": [{"manager": "lbd", "operation": "Apply", "subresource": "status"}]
            },
            "spec": {
                "type": "LoadBalancer", "ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv4", "IPv6"],
                "selector": {"app": "kube-apiserver"}, "loadBalancerSourceRanges": ["203.0.113.0/24"],
                "externalTrafficPolicy": "Local", "healthCheckNodePort": 32020, "sessionAffinity": "ClientIP",
                "loadBalancerIP": "192.168.203.110", "loadBalancerClass": "lbd.tenantedge.io/edge",
                "ports": [{"port": 6443, "protocol": "TCP", "targetPort": "client", "nodePort": 30918}]
            },
            "status": {
                "loadBalancer": {"ingress": [{"ip": "192.168.203.110", "ipMode": "VIP"}, {"hostname": "h"}, {}]},
                "conditions": [
                    {"type": "Other", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z"},
                    {"type": "lbd.tenantedge.io/Programmed", "status": "False", "reason": "Pending", "message": "m",
                     "lastTransitionTime": "1970-01-01T00:01:00Z"}
                ]
            }
        }));
        assert_eq!(service.uid, "u1");
        assert_eq!(service.created, 1_767_323_045);
        assert_eq!(
            service.annotations.keys().collect::<Vec<_>>(),
            ["lbd.tenantedge.io/vip", "metallb.io/loadBalancerIPs"]
        );
        assert_eq!(service.kind, ServiceKind::LoadBalancer);
        assert_eq!(service.class.as_deref(), Some(crate::source::CLASS));
        assert!(service.selector && !service.terminating && service.policy_local && service.client_ip_affinity);
        assert!(!service.require_dual_stack);
        assert_eq!(service.families_v6, [false, true]);
        assert_eq!(service.health_port, Some(32020));
        let port = ServicePort { name: String::new(), protocol: "TCP".into(), port: 6443, node_port: 30918 };
        assert_eq!(service.ports, [port]);
        assert_eq!(service.ingress, ["192.168.203.110", "h"]);
        assert_eq!(service.ingress_modes, ["VIP", ""]);
        assert!(service.published);
        let condition = service.programmed.unwrap();
        assert_eq!((condition.status, condition.reason.as_str(), condition.since), (Some(false), "Pending", 60));
    }

    #[test]
    fn b51_nothing_in_a_service_panics() {
        let service = read(serde_json::json!({
            "metadata": {"name": "n", "namespace": "s", "annotations": {
                "lbd.tenantedge.io/vip": "é".repeat(1_000_000), "lbd.tenantedge.io/shared-key": "\u{0}"}},
            "spec": {"type": "Strange", "ports": [
                {"port": 70000, "nodePort": -1}, {"port": 0}, {"port": -5, "protocol": "ODD", "nodePort": 65536}],
                "healthCheckNodePort": 99999, "ipFamilies": ["IPv5"], "externalTrafficPolicy": "?", "sessionAffinity": "?",
                "loadBalancerIP": "300.1.1.1", "loadBalancerSourceRanges": ["bad", ""]},
            "status": {"loadBalancer": {"ingress": [{"ip": "", "hostname": "x"}, {"ip": "::g"}]}}
        }));
        assert_eq!(service.kind, ServiceKind::ClusterIp);
        assert!(service.uid.is_empty());
        assert_eq!(service.ports.iter().map(|port| (port.port, port.node_port)).collect::<Vec<_>>(), [(0, 0); 3]);
        assert_eq!(service.ports[2].protocol(), None);
        assert_eq!(service.health_port, None);
        assert_eq!(service.ingress, ["x", "::g"]);
        assert!(service.annotations["lbd.tenantedge.io/vip"].len() <= ANNOTATION_LIMIT);
        assert!(super::service(v1::Service::default(), &BTreeSet::new()).is_none());
        assert!(node(v1::Node::default()).is_none());
        assert!(namespace(v1::Namespace::default()).is_none());
        assert!(slice(EndpointSlice::default()).is_none());
    }

    fn read_node(value: serde_json::Value) -> Node {
        node(parse(value)).unwrap().1
    }

    #[test]
    fn b27_node_exclusion() {
        let labelled = |value: &str| {
            read_node(serde_json::json!({"metadata": {"name": "n", "labels": {EXCLUDE_LABEL: value}}})).excluded
        };
        for value in ["", "true", "yes", "1", "tRuE"] {
            assert!(labelled(value), "{value:?}");
        }
        for value in ["false", "False", "FALSE", "f", "F", "0"] {
            assert!(!labelled(value), "{value:?}");
        }
        assert!(!read_node(serde_json::json!({"metadata": {"name": "n"}})).excluded);
        let taint = serde_json::json!({"metadata": {"name": "n"}, "spec": {"taints": [
            {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule", "value": "1"}]}});
        assert!(read_node(taint).excluded);
        let going = serde_json::json!({"metadata": {"name": "n", "deletionTimestamp": "2026-01-02T03:04:05Z"}});
        assert!(read_node(going).excluded);
    }

    #[test]
    fn b25_cordon_and_readiness_change_nothing() {
        let ready = serde_json::json!({"metadata": {"name": "n", "uid": "u"},
            "status": {"addresses": [{"type": "InternalIP", "address": "10.32.96.105"}]}});
        let cordoned = serde_json::json!({"metadata": {"name": "n", "uid": "u"}, "spec": {"unschedulable": true,
            "taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]},
            "status": {"addresses": [{"type": "InternalIP", "address": "10.32.96.105"}],
                "conditions": [{"type": "Ready", "status": "False"}]}});
        assert_eq!(read_node(ready), read_node(cordoned));
    }

    #[test]
    fn node_addresses_that_do_not_parse_are_skipped() {
        let node = read_node(serde_json::json!({"metadata": {"name": "n"}, "status": {"addresses": [
            {"type": "Hostname", "address": "n"}, {"type": "InternalIP", "address": "10.32.96.105"},
            {"type": "ExternalIP", "address": "203.0.113.1"}, {"type": "InternalIP", "address": "nonsense"},
            {"type": "InternalIP", "address": "2001:db8:f::5"}, {"type": "InternalIP", "address": "10.32.96.105"}]}}));
        assert_eq!(node.addresses, ["10.32.96.105".parse::<IpAddr>().unwrap(), "2001:db8:f::5".parse().unwrap()]);
    }

    #[test]
    fn slices_give_first_addresses_and_say_which_are_ready() {
        let (name, slice) = slice(parse(serde_json::json!({
            "metadata": {"name": "web-1", "namespace": "s", "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": 31380}, {"name": "bad", "port": 70000}, {"name": "any"}],
            "endpoints": [
                {"addresses": ["192.0.2.101", "169.254.1.1"], "nodeName": "n1"},
                {"addresses": ["192.0.2.102"], "conditions": {"ready": false, "serving": true, "terminating": true}},
                {"addresses": ["192.0.2.103"], "conditions": {"ready": false}},
                {"addresses": []}, {"addresses": ["nonsense"]}
            ]
        })))
        .unwrap();
        assert_eq!(name, ObjectName::new("s", "web-1"));
        assert_eq!(slice.service, ObjectName::new("s", "web"));
        let ports = BTreeSet::from([("http".to_owned(), "TCP".to_owned(), 31380)]);
        let first = Endpoint {
            address: "192.0.2.101".parse().unwrap(),
            node: Some("n1".into()),
            ready: true,
            ports: ports.clone(),
        };
        let [second, third] = ["192.0.2.102", "192.0.2.103"].map(|address| Endpoint {
            address: address.parse().unwrap(),
            node: None,
            ready: false,
            ports: ports.clone(),
        });
        assert_eq!(slice.endpoints, [first, second, third]);
    }

    #[test]
    fn names_of_hosts_are_no_endpoints() {
        let (_, slice) = slice(parse(serde_json::json!({
            "metadata": {"name": "web-1", "namespace": "s", "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "FQDN", "endpoints": [{"addresses": ["192.0.2.101"]}]
        })))
        .unwrap();
        assert!(slice.endpoints.is_empty());
    }
}
