//! Inputs for tests of `ipam` and `plan`: the topology of the documentation.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::config::{
    AddressRange, Adopt, AllDown, Claim, Config, Datapath, Frontend, FrontendPort, FrontendSettings, HostAccess, Hub,
    Kubernetes, Limits, MssClamp, OnDown, Probe, ProbeKind, Protocol, SegmentName, StaticBackend, Tenant, Timeouts,
    Unserved, Via, XdpMode,
};
use crate::plan::model::{FrontendBackend, FrontendPlan, HostFacts, InterfaceFacts};
use crate::source::{Inventory, Node, ObjectName, Service, ServiceKind, ServicePort};

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(crate) fn name(text: &str) -> ObjectName {
    let (namespace, name) = text.split_once('/').unwrap();
    ObjectName { namespace: namespace.to_owned(), name: name.to_owned() }
}

pub(crate) fn range(text: &str) -> AddressRange {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    AddressRange { first: ip(first), last: ip(last) }
}

pub(crate) fn segment(interface: &str) -> SegmentName {
    SegmentName { interface: interface.to_owned(), vlan: None }
}

pub(crate) fn settings() -> FrontendSettings {
    FrontendSettings {
        affinity: None,
        preserve_client: false,
        unserved: Unserved::Reject,
        all_down: AllDown::Try,
        on_down: OnDown::Keep,
        ip_mode: None,
        adopt: Adopt::Never,
        snat: Vec::new(),
        source_ranges: Vec::new(),
        health: Probe {
            kind: ProbeKind::Tcp,
            port: None,
            path: String::new(),
            host: None,
            expect: Vec::new(),
            interval: Duration::from_secs(1),
            timeout: Duration::from_secs(1),
            fall: 3,
            rise: 2,
            fast_interval: Duration::from_millis(250),
            ca: None,
        },
        timeouts: Timeouts {
            tcp_established: Duration::from_hours(24),
            tcp_half_open: Duration::from_secs(30),
            tcp_fin: Duration::from_mins(1),
            tcp_reset: Duration::from_secs(10),
            udp_unreplied: Duration::from_secs(30),
            udp_replied: Duration::from_mins(3),
        },
    }
}

pub(crate) fn tenant(tenant: &str, interface: &str) -> Tenant {
    Tenant {
        name: tenant.to_owned(),
        segment: segment(interface),
        addresses: Vec::new(),
        gateways: Vec::new(),
        pools: vec![range("192.168.203.110-192.168.203.119")],
        avoid: Vec::new(),
        claims: vec![Claim { namespaces: vec![format!("clusters-{tenant}")], ..Claim::default() }],
        limits: Limits::default(),
        host_access: HostAccess::Own,
        frontends: Vec::new(),
        settings: settings(),
    }
}

pub(crate) fn config() -> Config {
    Config {
        hub: Hub {
            name: "hub".to_owned(),
            segment: segment("eth0"),
            snat: Vec::new(),
            snat_ports: (1024, 32767),
            node_cidrs: Vec::new(),
            kubernetes: Some(Kubernetes {
                kubeconfig: PathBuf::from("hub.kubeconfig"),
                allow_insecure: false,
                max_blind: None,
            }),
        },
        tenants: vec![tenant("tenant-a", "eth1")],
        timeouts: settings().timeouts,
        datapath: Datapath {
            mode: XdpMode::Auto,
            max_flows: 262_144,
            max_flows_v6: 26_214,
            bpffs: PathBuf::from("/sys/fs/bpf"),
            mss_clamp: MssClamp::Auto,
            announce_interval: Duration::from_mins(1),
        },
        address_annotations: Vec::new(),
        state_dir: PathBuf::from("/var/lib/lbd"),
        socket: PathBuf::from("/run/lbd/lbd.sock"),
        metrics: "127.0.0.1:9474".parse().unwrap(),
        origin: crate::config::Origin::default(),
    }
}

pub(crate) fn frontend(frontend: &str, vip: Option<&str>, ports: &[(u16, Option<u16>)]) -> Frontend {
    Frontend {
        name: frontend.to_owned(),
        service: None,
        vip: vip.map(ip),
        ports: ports
            .iter()
            .map(|&(port, target)| FrontendPort { port, target, service_port: None, protocol: Protocol::Tcp })
            .collect(),
        backends: Vec::new(),
        via: Via::Hub,
        mode: None,
        settings: settings(),
    }
}

/// `ingress-shared-lb`: a NodePort Service that the file reserves.
pub(crate) fn shared() -> Frontend {
    Frontend {
        service: Some(("openshift-ingress".to_owned(), "router-nodeport-tenant-a".to_owned())),
        ..frontend("ingress-shared-lb", Some("192.168.203.111"), &[(443, None), (80, None)])
    }
}

/// `ingress-lb`: the tenant's own workers, one-armed.
pub(crate) fn workers() -> Frontend {
    Frontend {
        backends: ["192.168.203.101", "192.168.203.102"]
            .map(|address| StaticBackend { address: ip(address), port: None, weight: 1 })
            .to_vec(),
        via: Via::Tenant,
        ..frontend("ingress-lb", Some("192.168.203.112"), &[(443, Some(30190)), (80, Some(30282))])
    }
}

pub(crate) fn service(uid: &str, ports: &[(u16, u16)]) -> Service {
    Service {
        uid: uid.to_owned(),
        created: 1000,
        kind: ServiceKind::LoadBalancer,
        selector: true,
        ports: ports
            .iter()
            .map(|&(port, node_port)| ServicePort {
                name: format!("port-{port}"),
                protocol: "TCP".to_owned(),
                port,
                node_port,
            })
            .collect(),
        ..Service::default()
    }
}

pub(crate) fn node(number: u8) -> (String, Node) {
    let node =
        Node { uid: format!("uid-{number}"), addresses: vec![IpAddr::from([10, 32, 96, number])], excluded: false };
    (format!("node-{number}"), node)
}

/// Four nodes, no Service.
pub(crate) fn inventory() -> Inventory {
    Inventory {
        complete: true,
        cluster: Some("cluster-uid".to_owned()),
        nodes: (105..=108).map(node).collect(),
        ..Inventory::default()
    }
}

pub(crate) fn host() -> HostFacts {
    let interface = |index, address: &str| InterfaceFacts {
        index,
        mac: [2, 0, 0, 0, 0, index as u8],
        mtu: 1500,
        up: true,
        addresses: vec![address.parse().unwrap()],
        all_addresses: vec![address.parse().unwrap()],
        gateways: Vec::new(),
        routes: BTreeMap::new(),
        vlan: None,
    };
    let mut tenant = interface(3, "192.168.203.2/24");
    tenant.gateways = vec![ip("192.168.203.1")];
    HostFacts {
        interfaces: BTreeMap::from([("eth0".to_owned(), interface(2, "10.32.96.50/20")), ("eth1".to_owned(), tenant)]),
    }
}

/// A backend that is up.
pub(crate) fn frontend_backend(id: u16, address: IpAddr) -> FrontendBackend {
    FrontendBackend { id, address, port: 0, node: None, weight: 1, serving: true, probed: true, sure: true }
}

/// A frontend of tenant 1, from the file, of which nothing is asked.
pub(crate) fn frontend_plan(name: &str, target_port: u16, backends: &[FrontendBackend]) -> FrontendPlan {
    FrontendPlan {
        id: 9,
        tenant: 1,
        name: name.to_owned(),
        timeouts: 0,
        service: None,
        service_uid: String::new(),
        guest_made: false,
        mode: None,
        source_affinity: false,
        preserve_client: false,
        adopt: false,
        unserved_drop: false,
        target_port,
        snat: Some(ip("10.0.0.2")),
        snat_ports: (1024, 32767),
        table: None,
        backends: backends.into(),
        probe: None,
        reset_on_down: false,
    }
}
