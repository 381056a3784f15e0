//! The sample files, with the objects that a hosted control plane really makes.

use serde_json::Value;

use super::*;
use crate::config::{self, Mode, ProbeKind};
use crate::ipam::Assignments;
use crate::source::kubernetes::convert;

const SAMPLE: &str = include_str!("../../../../deploy/lbd.yaml");
const ONE_VIP: &str = include_str!("../../../../deploy/lbd-one-vip.yaml");

macro_rules! manifest {
    ($name:literal) => {
        include_str!(concat!("../../../../tests/fixtures/services/", $name, ".yaml"))
    };
}

const KAS: &str = manifest!("s01-kas-lb");
const KONNECTIVITY: &str = manifest!("s02-konnectivity-lb");
const KAS_NODE_PORT: &str = manifest!("s03-kas-nodeport");
const SHARD: &str = manifest!("s05-router-nodeport-shard");
const SHARED: &str = manifest!("s07-shared-vip");
const NO_NODE_PORTS: &str = manifest!("s09-no-nodeports");
const FOREIGN: &str = manifest!("s11-foreign-class");
const RANGES: &str = manifest!("s12-source-ranges");
const HOSTED_CLUSTERS: &str = manifest!("s14-hostedcluster-services");
const ROUTER: &str = manifest!("s15-one-vip-router");
const MIRROR: &str = manifest!("mirror");

const WEB: &str = "clusters-tenant-a/a6a0c1f2e3d4455b96b1a2c3d4e5f607";

struct Site {
    world: World,
    assignments: Assignments,
}

impl Site {
    fn new(configuration: &str) -> Self {
        let mut world = World::new();
        world.config = config::parse(configuration, "lbd.yaml").unwrap_or_else(|error| panic!("{}", error.report()));
        Self { world, assignments: Assignments::default() }
    }

    /// What `kubectl apply` of a manifest means to lbd.
    fn apply(&mut self, manifest: &str, change: impl Fn(&mut Value)) {
        let objects: Vec<Value> = serde_saphyr::from_multiple(manifest).unwrap();
        for mut object in objects {
            change(&mut object);
            if object["kind"] == "EndpointSlice" {
                let (_, slice) = convert::slice(serde_json::from_value(object).unwrap()).unwrap();
                let mut all = self.world.inventory.endpoints.get(&slice.service).cloned().unwrap_or_default();
                all.extend(slice.endpoints);
                self.world.inventory.endpoints.insert(slice.service, all);
            } else {
                let parsed = serde_json::from_value(object).unwrap();
                let (name, service) = convert::service(parsed, &BTreeSet::new()).unwrap();
                self.world.inventory.services.insert(name, service);
            }
        }
    }

    fn plan(&mut self) -> Plan {
        let world = &mut self.world;
        self.assignments = world.ipam.assign(&world.config, &world.inventory, &world.host, &BTreeSet::new(), 0);
        world.plan_with(&self.assignments)
    }

    fn addresses(&self, named: &str) -> Vec<String> {
        let found = self.assignments.services.get(&name(named));
        found.into_iter().flat_map(|it| &it.addresses).map(ToString::to_string).collect()
    }

    fn notices(&self, plan: &Plan) -> Vec<(&'static str, String)> {
        let all = self.assignments.notices.iter().chain(&plan.notices);
        all.map(|it| (it.reason, it.service.as_ref().map(ToString::to_string).unwrap_or_default())).collect()
    }
}

fn unlimited(object: &mut Value) {
    object["spec"].as_object_mut().unwrap().remove("loadBalancerSourceRanges");
}

fn as_it_is(_: &mut Value) {}

#[test]
fn the_sample_serves_a_hosted_control_plane() {
    // What the platform makes of it: the API server is a LoadBalancer, the rest are Routes on the shard.
    let clusters: Vec<Value> = serde_saphyr::from_multiple(HOSTED_CLUSTERS).unwrap();
    let strategies = |cluster: &Value| -> Vec<String> {
        let all = cluster["spec"]["services"].as_array().unwrap().iter();
        all.map(|it| it["servicePublishingStrategy"]["type"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(strategies(&clusters[0]), ["LoadBalancer", "Route", "Route", "Route"]);
    let mut site = Site::new(SAMPLE);
    // Before anything exists, the addresses are there.
    site.plan();
    assert_eq!(site.addresses("clusters-tenant-a/kube-apiserver"), ["192.168.203.110"]);
    assert_eq!(site.addresses("openshift-ingress/router-nodeport-tenant-a"), ["192.168.203.111"]);
    site.apply(KAS, unlimited);
    site.apply(SHARD, as_it_is);
    site.apply(MIRROR, as_it_is);
    let routers = ["node-105", "node-107"].map(|node| crate::source::Endpoint {
        address: ip("10.128.2.9"),
        node: Some(node.to_owned()),
        ready: true,
        ports: BTreeSet::new(),
    });
    site.world.inventory.endpoints.insert(name("openshift-ingress/router-nodeport-tenant-a"), routers.to_vec());
    let plan = site.plan();
    assert_eq!(site.notices(&plan), []);
    // The API server, asked for what it knows of itself.
    let api = at(&plan, "192.168.203.110", 6443);
    assert_eq!((api.target_port, api.probe.as_ref().unwrap().probe.kind), (30918, ProbeKind::Https));
    assert_eq!(api.probe.as_ref().unwrap().probe.expect, [200, 401, 403]);
    assert_eq!(serving(&plan, "192.168.203.110", 6443), ALL_NODES);
    // The shard: only nodes that have a router, asked at its metrics port, which is not exposed.
    for (port, target) in [(443, 32488), (80, 32460)] {
        let frontend = at(&plan, "192.168.203.111", port);
        assert_eq!((frontend.target_port, frontend.probe.as_ref().unwrap().ports.as_slice()), (target, &[32095][..]));
        assert_eq!(serving(&plan, "192.168.203.111", port), ["10.32.96.105", "10.32.96.107"]);
    }
    assert!(!plan.frontends.keys().any(|it| it.port == 1936));
    // The guest's Service: an address of the guest's part of the pool, whatever it asks for, and its workers.
    assert_eq!(site.addresses(WEB), ["192.168.203.116"]);
    for port in [80, 443] {
        assert_eq!(at(&plan, "192.168.203.116", port).mode, Some(Mode::Endpoints));
        assert_eq!(serving(&plan, "192.168.203.116", port), ["192.168.203.101", "192.168.203.102"]);
    }
    // Nothing is written to what is only forwarded.
    let claimed: Vec<_> =
        site.assignments.services.iter().filter(|(_, it)| it.claimed).map(|(it, _)| it.to_string()).collect();
    assert_eq!(claimed, [WEB, "clusters-tenant-a/kube-apiserver"]);
    // With ranges, the API server is closed until they can be enforced, and the plan knows them.
    site.apply(KAS, as_it_is);
    let plan = site.plan();
    assert!(site.notices(&plan).contains(&("SourceRangesUnsupported", "clusters-tenant-a/kube-apiserver".to_owned())));
    assert!(!plan.frontends.keys().any(|it| it.port == 6443));
    assert_eq!(site.addresses("clusters-tenant-a/kube-apiserver"), ["192.168.203.110"]);
    assert_eq!((plan.clients.len(), plan.intervals[0].len()), (1, 2));
}

#[test]
fn b20_konnectivity_beside_the_api_server() {
    let mut site = Site::new(SAMPLE);
    site.apply(KONNECTIVITY, as_it_is);
    // Not asked for: an address of its own.
    let plan = site.plan();
    assert_eq!(site.addresses("clusters-tenant-a/konnectivity-server"), ["192.168.203.113"]);
    assert_eq!(at(&plan, "192.168.203.113", 8091).target_port, 31091);
    // Two of the three with one key share what they ask for; the third collides.
    site.apply(SHARED, as_it_is);
    let plan = site.plan();
    for named in ["clusters-tenant-a/tcp-a-api", "clusters-tenant-a/tcp-a-tunnel"] {
        // The last by name of equal age is the one that waits.
        assert!(site.assignments.services.contains_key(&name(named)));
    }
    let holders: Vec<_> = site
        .assignments
        .services
        .iter()
        .filter(|(_, it)| it.addresses == [ip("192.168.203.114")])
        .map(|(it, _)| it.name.as_str())
        .collect();
    assert_eq!(holders.len(), 2);
    assert!(holders.contains(&"tcp-a-tunnel"));
    let waiting = if holders.contains(&"tcp-a-api") { "collide" } else { "api" };
    let told = site.notices(&plan);
    assert_eq!(told, [("PortClash", format!("clusters-tenant-a/tcp-a-{waiting}"))]);
}

#[test]
fn one_vip_for_a_control_plane_that_is_published_by_route() {
    let mut site = Site::new(ONE_VIP);
    site.apply(ROUTER, as_it_is);
    site.apply(MIRROR, as_it_is);
    let plan = site.plan();
    assert_eq!(site.notices(&plan), []);
    let router = at(&plan, "192.168.203.110", 443);
    assert_eq!((router.target_port, router.mode), (32210, Some(Mode::Nodes)));
    let probe = &router.probe.as_ref().unwrap().probe;
    // Without a server name: the router's default backend is the API server.
    assert_eq!((probe.kind, probe.host.clone(), probe.path.as_str()), (ProbeKind::Https, None, "/readyz"));
    assert_eq!(plan.frontends.len(), 3);
    assert!(site.assignments.services[&name("clusters-tenant-a/router")].claimed);
}

#[test]
fn a_control_plane_that_is_published_by_node_port_is_reached_at_that_number() {
    let mut site = Site::new(SAMPLE);
    site.apply(KAS_NODE_PORT, as_it_is);
    let mut it = frontend("api-by-node-port", Some("192.168.203.113"), &[(30213, None)]);
    it.service = Some(("clusters-tenant-a".to_owned(), "kube-apiserver".to_owned()));
    it.ports[0].service_port = Some(2040);
    site.world.config.tenants[0].frontends = vec![it];
    let plan = site.plan();
    assert_eq!(site.notices(&plan), []);
    assert_eq!(at(&plan, "192.168.203.113", 30213).target_port, 30213);
    // The NodePort changes; what clients know does not.
    site.apply(KAS_NODE_PORT, |object| object["spec"]["ports"][0]["nodePort"] = 30999.into());
    let plan = site.plan();
    assert_eq!(at(&plan, "192.168.203.113", 30213).target_port, 30999);
    // Of type NodePort, it is written to by nobody.
    assert!(!site.assignments.services.values().any(|it| it.claimed));
}

#[test]
fn b50_b10_services_that_lack_something_or_are_not_ours() {
    let mut site = Site::new(SAMPLE);
    site.apply(NO_NODE_PORTS, as_it_is);
    site.apply(FOREIGN, as_it_is);
    let plan = site.plan();
    let [vip] = site.addresses("clusters-tenant-a/no-nodeports").try_into().unwrap();
    assert_eq!((at(&plan, &vip, 443).target_port, at(&plan, &vip, 8444).table), (31555, None));
    assert_eq!(site.notices(&plan), [("NodePortMissing", "clusters-tenant-a/no-nodeports".to_owned())]);
    assert!(!site.assignments.services.contains_key(&name("clusters-tenant-a/other-lb")));
}

#[test]
fn ranges_in_the_shapes_that_people_write() {
    let mut site = Site::new(SAMPLE);
    site.apply(RANGES, as_it_is);
    let plan = site.plan();
    let mut told = site.notices(&plan);
    told.sort();
    let of = |it: &str| format!("clusters-tenant-a/{it}");
    assert_eq!(
        told,
        [
            ("SourceRangesInvalid", of("malformed")),
            ("SourceRangesUnsupported", of("by-annotation")),
            ("SourceRangesUnsupported", of("mixed")),
        ]
    );
    // Everybody is everybody.
    let [vip] = site.addresses(&of("wide-open")).try_into().unwrap();
    assert_eq!(serving(&plan, &vip, 6443), ALL_NODES);
    assert_eq!(plan.frontends.values().filter(|it| it.name.starts_with("clusters-tenant-a/")).count(), 1);
    let bad = site.assignments.notices.iter().find(|it| it.reason == "SourceRangesInvalid").unwrap();
    assert!(bad.message.contains("203.0.113.9") && bad.message.contains("stays closed"), "{}", bad.message);
}
