//! Where desired state comes from.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::config::Protocol;

/// `namespace/name` of a Kubernetes object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
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

/// Everything known of a hub, as one snapshot. Serializable: the last one is kept on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    /// All first lists have arrived (in this life or, restored from disk, in an earlier one).
    pub complete: bool,
    /// UID of the namespace `kube-system`: the cluster's identity.
    pub cluster: Option<String>,
    /// Services by name.
    pub services: BTreeMap<ObjectName, Service>,
    /// Nodes by name.
    pub nodes: BTreeMap<String, Node>,
    /// Labels of namespaces.
    pub namespaces: BTreeMap<String, BTreeMap<String, String>>,
    /// Endpoints by Service.
    pub endpoints: BTreeMap<ObjectName, Vec<Endpoint>>,
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
    /// Annotations.
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

/// A ready or serving endpoint.
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
