//! Where desired state comes from, and where what became of it is written back.

pub mod events;
pub mod kubernetes;
mod objects;
pub mod status;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

pub use self::objects::Objects;
use crate::config::Protocol;

/// `loadBalancerClass` of Services that ask for lbd by name.
pub const CLASS: &str = "lbd.tenantedge.io/edge";
/// Prefix of every annotation and condition of ours.
pub const PREFIX: &str = "lbd.tenantedge.io/";
/// Field manager of our server-side apply, and component of our Events.
pub const MANAGER: &str = "lbd";
/// Type of our condition in the status of a Service.
pub const PROGRAMMED: &str = "lbd.tenantedge.io/Programmed";

/// `namespace/name` of a Kubernetes object; serialized as that string, so that it can be a key of a map in JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct ObjectName {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl std::fmt::Display for ObjectName {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}/{}", self.namespace, self.name)
    }
}

impl ObjectName {
    /// A name from its parts.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// `namespace/name`, in one piece: faster than by way of a formatter.
    pub fn joined(&self) -> String {
        [&self.namespace, "/", &self.name].concat()
    }
}

impl From<ObjectName> for String {
    fn from(name: ObjectName) -> Self {
        name.joined()
    }
}

impl TryFrom<String> for ObjectName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
                Ok(Self::new(namespace, name))
            }
            _ => Err(format!("`{text}` is not namespace/name")),
        }
    }
}

/// Everything known of a hub, as one snapshot; copies share what is the same. Serializable: the last one is kept on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    /// All first lists have arrived (in this life or, restored from disk, in an earlier one).
    pub complete: bool,
    /// UID of the namespace `kube-system`: the cluster's identity.
    pub cluster: Option<String>,
    /// Services by name.
    pub services: Objects<ObjectName, Service>,
    /// Nodes by name.
    pub nodes: Objects<String, Node>,
    /// Labels of namespaces.
    pub namespaces: Objects<String, BTreeMap<String, String>>,
    /// Endpoints by Service.
    pub endpoints: Objects<ObjectName, Vec<Endpoint>>,
}

impl Inventory {
    /// Whether two differ in nothing but what load balancers write into the status of Services.
    pub fn is_same_but_for_statuses(&self, other: &Self) -> bool {
        let Self { complete, cluster, services, nodes, namespaces, endpoints } = self;
        *complete == other.complete
            && *cluster == other.cluster
            && *nodes == other.nodes
            && *namespaces == other.namespaces
            && *endpoints == other.endpoints
            && services.changes(&other.services).is_some_and(|changes| {
                let status_of = |one: &Service, of: &Service| Service {
                    ingress: of.ingress.clone(),
                    ingress_modes: of.ingress_modes.clone(),
                    programmed: of.programmed.clone(),
                    published: of.published,
                    ..one.clone()
                };
                changes.iter().all(|(_, before, after)| status_of(before, after) == **after)
            })
    }
}

/// What lbd reads of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Service {
    /// UID; empty if the server sent none.
    pub uid: String,
    /// Seconds since the epoch of `creationTimestamp`.
    pub created: i64,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations that lbd reads: ours, and those that the source was told to keep.
    pub annotations: BTreeMap<String, String>,
    /// `spec.type`.
    pub kind: ServiceKind,
    /// `spec.loadBalancerClass`.
    pub class: Option<String>,
    /// Has a selector.
    pub selector: bool,
    /// Being deleted.
    pub terminating: bool,
    /// `spec.ports`.
    pub ports: Vec<ServicePort>,
    /// `spec.ipFamilies` (`true` = IPv6), in order.
    pub families_v6: Vec<bool>,
    /// `spec.ipFamilyPolicy` is `RequireDualStack`.
    pub require_dual_stack: bool,
    /// `spec.externalTrafficPolicy` is `Local`.
    pub policy_local: bool,
    /// `spec.healthCheckNodePort`.
    pub health_port: Option<u16>,
    /// `spec.sessionAffinity` is `ClientIP`.
    pub client_ip_affinity: bool,
    /// `spec.loadBalancerIP`, unparsed.
    pub requested_address: Option<String>,
    /// `spec.loadBalancerSourceRanges`, unparsed.
    pub source_ranges: Vec<String>,
    /// `status.loadBalancer.ingress`: addresses and host names, unparsed, in order.
    pub ingress: Vec<String>,
    /// `ipMode` of each entry of `ingress`; empty where none is said.
    #[serde(default)]
    pub ingress_modes: Vec<String>,
    /// Our condition, as it stands in the status.
    #[serde(default)]
    pub programmed: Option<Condition>,
    /// The server's record says that lbd applied something of the status.
    #[serde(default)]
    pub published: bool,
}

/// Our condition in the status of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Condition {
    /// `True` (`Some(true)`), `False` or `Unknown` (`None`).
    pub status: Option<bool>,
    /// One word, CamelCase.
    pub reason: String,
    /// Text.
    pub message: String,
    /// Seconds since the epoch of the last change of `status`.
    pub since: i64,
}

/// `spec.type`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServiceKind {
    /// `ClusterIP`.
    #[default]
    ClusterIp,
    /// `NodePort`.
    NodePort,
    /// `LoadBalancer`.
    LoadBalancer,
    /// `ExternalName`.
    ExternalName,
}

/// A port of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ServicePort {
    /// Name, may be empty.
    pub name: String,
    /// Protocol as written (`TCP`, `UDP`, `SCTP`).
    pub protocol: String,
    /// Port that clients connect to; 0 if out of range.
    pub port: u16,
    /// NodePort; 0 if there is none.
    pub node_port: u16,
}

impl ServicePort {
    /// The protocol, if lbd forwards it.
    pub fn protocol(&self) -> Option<Protocol> {
        match self.protocol.as_str() {
            "TCP" | "" => Some(Protocol::Tcp),
            "UDP" => Some(Protocol::Udp),
            _ => None,
        }
    }
}

/// What lbd reads of a Node. Heartbeats change nothing here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// UID.
    pub uid: String,
    /// `InternalIP` addresses in order.
    pub addresses: Vec<IpAddr>,
    /// Excluded: by label, deletion timestamp or autoscaler taint.
    pub excluded: bool,
}

/// An endpoint of a Service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Endpoint {
    /// First address of the endpoint.
    pub address: IpAddr,
    /// Node it runs on, if said.
    pub node: Option<String>,
    /// Ready.
    pub ready: bool,
    /// Ports by Service port name: (name, protocol, port).
    pub ports: BTreeSet<(String, String, u16)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inventory_survives_json() {
        let mut inventory = Inventory { complete: true, cluster: Some("u".into()), ..Inventory::default() };
        let name = ObjectName::new("clusters-tenant-a", "kube-apiserver");
        let condition = Condition { status: Some(true), since: 5, ..Condition::default() };
        let service = Service { published: true, programmed: Some(condition), ..Service::default() };
        inventory.services.insert(name.clone(), service);
        let endpoint = Endpoint {
            address: "192.0.2.1".parse().unwrap(),
            node: None,
            ready: true,
            ports: BTreeSet::from([("p".to_owned(), "TCP".to_owned(), 80)]),
        };
        inventory.endpoints.insert(name, vec![endpoint]);
        inventory.nodes.insert("n1".into(), Node { addresses: vec!["::1".parse().unwrap()], ..Node::default() });
        let text = serde_json::to_string(&inventory).unwrap();
        assert!(text.contains(r#""clusters-tenant-a/kube-apiserver""#));
        assert_eq!(serde_json::from_str::<Inventory>(&text).unwrap(), inventory);
    }

    #[test]
    fn a_status_is_told_from_everything_else() {
        let name = ObjectName::new("n", "s");
        let mut first = Inventory::default();
        first.services.insert(name.clone(), Service::default());
        let with = |service: Service| {
            let mut other = first.clone();
            other.services.insert(name.clone(), service);
            other
        };
        let status = Service {
            ingress: vec!["192.0.2.1".into()],
            ingress_modes: vec!["VIP".into()],
            programmed: Some(Condition::default()),
            published: true,
            ..Service::default()
        };
        assert!(first.is_same_but_for_statuses(&with(status.clone())));
        assert!(!first.is_same_but_for_statuses(&with(Service { terminating: true, ..status })));
        let mut other = first.clone();
        other.nodes.insert("n1".into(), Node::default());
        assert!(!first.is_same_but_for_statuses(&other));
        other = first.clone();
        other.services.insert(ObjectName::new("n", "t"), Service::default());
        assert!(!first.is_same_but_for_statuses(&other));
    }

    #[test]
    fn names_without_both_parts_are_refused() {
        for text in ["", "a", "/a", "a/", "a/b/c"] {
            assert!(ObjectName::try_from(text.to_owned()).is_err(), "{text}");
        }
    }
}
