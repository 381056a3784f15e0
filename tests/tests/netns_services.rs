//! Services in all their forms, from a real API to real packets: endpoints, policy Local, shared addresses, probes that speak.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lbd_tests::apiserver;
use lbd_tests::lab::{self, Agent, Api, Hold, Listener, Peer, Seed};
use serde_json::{Value, json};

const NAMESPACE: &str = "clusters-tenant-a";
const LIMIT: Duration = Duration::from_secs(10);

struct Site {
    seed: Seed,
    api: Api,
    agent: Agent,
}

impl Site {
    /// The seed's networks, an API server that knows its nodes, and an agent with more settings.
    fn new(name: &str, more: &str) -> Result<Self> {
        let seed = Seed::new(name)?;
        let api = Api::start(&seed.lab, &seed.api, "10.32.96.10:6443")?;
        for (place, node) in seed.nodes.iter().enumerate() {
            api.create(&apiserver::node(node.name(), &Seed::node_address(place)))?;
        }
        let configuration = Seed::kubernetes_configuration(api.kubeconfig()) + more;
        let agent = Agent::new(&seed.lab, &seed.lb, &configuration)?;
        agent.start(&seed.lab)?;
        Ok(Self { seed, api, agent })
    }

    /// Starts servers on all nodes at some ports.
    fn serve(&self, ports: &[u16]) -> Result<Vec<Peer>> {
        let mut peers = Vec::new();
        for (place, node) in self.seed.nodes.iter().enumerate() {
            let address = Seed::node_address(place);
            let listeners: Vec<_> = ports.iter().map(|&port| Listener::plain(&address, port)).collect();
            peers.push(Peer::serve(&self.seed.lab, node, node.name(), &listeners)?);
        }
        Ok(peers)
    }

    fn address(&self, name: &str) -> Result<String> {
        self.api.wait_address(NAMESPACE, name, Duration::from_secs(5))
    }

    /// New connections go to these servers and to no others.
    fn wait_servers(&self, target: &str, servers: &[&str]) -> Result<()> {
        lab::wait_until(LIMIT, &format!("{target} is served by {servers:?}"), || {
            let report = lab::load(&self.seed.client, target, false, 60)?;
            Ok(report.failed == 0 && report.servers.keys().eq(servers.iter().copied()))
        })
    }

    fn wait_refused(&self, target: &str) -> Result<()> {
        lab::wait_until(LIMIT, &format!("{target} refuses"), || {
            let report = lab::load(&self.seed.client, target, false, 5)?;
            Ok(report.errors.get("connection refused") == Some(&5))
        })
    }

    fn condition(&self, name: &str) -> Result<Value> {
        let service = self.api.get("Service", NAMESPACE, name)?;
        service.pointer("/status/conditions/0").cloned().context("no condition")
    }
}

fn slice(service: &str, machine: &str, addresses: &[&str], ports: &[(&str, u16)]) -> Value {
    let ports: Vec<_> =
        ports.iter().map(|(name, port)| json!({ "name": name, "port": port, "protocol": "TCP" })).collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "namespace": NAMESPACE, "name": format!("{service}-{machine}-ipv4"),
            "labels": { "kubernetes.io/service-name": service } },
        "ports": ports, "endpoints": [{ "addresses": addresses, "conditions": { "ready": true } }],
    })
}

/// The mirror of a guest's Service leads to the guest's workers in the tenant's segment, by one leg; hub nodes have no part in it.
#[test]
#[ignore = "needs root"]
fn b67_a_mirrored_service_reaches_the_guests_workers() -> Result<()> {
    let site = Site::new("b67", "")?;
    let seed = &site.seed;
    let mut workers = Vec::new();
    for (place, worker) in seed.workers.iter().enumerate() {
        let address = format!("192.168.203.{}", 101 + place);
        workers.push(Peer::serve(&seed.lab, worker, worker.name(), &[Listener::plain(&address, 31380)])?);
    }
    // The NodePorts answer too: nobody may come there.
    let _nodes = site.serve(&[31777])?;
    let mut mirror = apiserver::service(NAMESPACE, "a0b1", "LoadBalancer", &[(80, 31777)]);
    mirror["spec"].as_object_mut().context("spec")?.remove("selector");
    mirror["metadata"]["labels"] = json!({ "cluster.x-k8s.io/tenant-service-name": "router-default" });
    site.api.create(&mirror)?;
    // The address first; without slices clients are refused at once (B53).
    let vip = site.address("a0b1")?;
    let target = format!("{vip}:80");
    site.wait_refused(&target)?;
    site.api.create(&slice("a0b1", "worker-1", &["192.168.203.101", "10.128.0.2"], &[("p80", 31380)]))?;
    site.api.create(&slice("a0b1", "worker-2", &["192.168.203.102"], &[("p80", 31380)]))?;
    site.wait_servers(&target, &["w1", "w2"])?;
    // Between the first answers to a probe, only the one that has answered serves.
    lab::wait_until(LIMIT, "clients behind the router reach both workers", || {
        let report = lab::load(&seed.far, &target, false, 60)?;
        ensure!(report.failed == 0, "{report:?}");
        Ok(report.servers.keys().eq(["w1", "w2"]))
    })?;
    let seen = lab::get(&seed.client, &target, false)?;
    ensure!(seen.peer.starts_with("192.168.203.2:"), "the worker saw {}", seen.peer);
    let services = site.agent.lbctl_json(&["services"])?;
    let shown =
        services.as_array().into_iter().flatten().find(|it| it["vip"] == target.as_str()).context("not shown")?;
    ensure!(shown["mode"] == "endpoints" && shown["clients"] == "all (guest)", "{shown}");
    // Probes decide: a virtual machine that runs is ready, whatever it serves.
    let hold = Hold::start(&seed.lab, &seed.client, &target, false, 20, 10)?;
    workers[1].refuse();
    site.wait_servers(&target, &["w1"])?;
    hold.finish()?.assert_whole()?;
    site.api.delete("EndpointSlice", NAMESPACE, "a0b1-worker-1-ipv4")?;
    site.api.delete("EndpointSlice", NAMESPACE, "a0b1-worker-2-ipv4")?;
    site.wait_refused(&target)?;
    ensure!(site.address("a0b1")? == vip, "the address changed");
    Ok(())
}

/// Policy Local: only the node whose health port says so gets connections; sessions on a node that the endpoint left go on.
#[test]
#[ignore = "needs root"]
fn b24_policy_local_follows_the_health_port() -> Result<()> {
    let site = Site::new("b24", "")?;
    let seed = &site.seed;
    // The NodePort is open everywhere: only the health port tells.
    let _servers = site.serve(&[31443])?;
    let healthy = |place: usize| {
        let node = &seed.nodes[place];
        Peer::serve(&seed.lab, node, "health", &[Listener::plain(&Seed::node_address(place), 32000)])
    };
    let first = healthy(0)?;
    let mut service = apiserver::service(NAMESPACE, "web", "LoadBalancer", &[(443, 31443)]);
    service["spec"]["externalTrafficPolicy"] = json!("Local");
    service["spec"]["healthCheckNodePort"] = json!(32000);
    site.api.create(&service)?;
    let target = format!("{}:443", site.address("web")?);
    site.wait_servers(&target, &["n5"])?;
    let hold = Hold::start(&seed.lab, &seed.client, &target, false, 20, 10)?;
    // The pod moves.
    let second = healthy(1)?;
    first.kill();
    site.wait_servers(&target, &["n6"])?;
    // No pod anywhere: refused, and `all_down: try` tries no node without one.
    second.kill();
    site.wait_refused(&target)?;
    let report = hold.finish()?;
    report.assert_whole()?;
    ensure!(report.servers.keys().eq(["n5"]), "{report:?}");
    // Cluster: all nodes.
    let cluster = json!({ "spec": { "externalTrafficPolicy": "Cluster", "healthCheckNodePort": null } });
    site.api.patch("Service", NAMESPACE, "web", &cluster)?;
    site.wait_servers(&target, &["n5", "n6", "n7", "n8"])
}

/// Two Services on one address: the end of one is not the other's, a third waits for its port, and a request that changes moves nothing.
#[test]
#[ignore = "needs root"]
fn b20_two_services_share_an_address() -> Result<()> {
    let site = Site::new("b20", "")?;
    let seed = &site.seed;
    let _servers = site.serve(&[30918, 31091, 31943])?;
    let shared = |name: &str, port: u16, node_port: u16| {
        let mut service = apiserver::service(NAMESPACE, name, "LoadBalancer", &[(port, node_port)]);
        service["metadata"]["annotations"] =
            json!({ "lbd.tenantedge.io/shared-key": "cp", "lbd.tenantedge.io/vip": "192.168.203.114" });
        service
    };
    site.api.create(&shared("kube-apiserver", 6443, 30918))?;
    ensure!(site.address("kube-apiserver")? == "192.168.203.114", "another address");
    site.api.create(&shared("konnectivity-server", 8091, 31091))?;
    ensure!(site.address("konnectivity-server")? == "192.168.203.114", "not shared");
    let (api, tunnel) = ("192.168.203.114:6443", "192.168.203.114:8091");
    seed.wait_served(api, false, LIMIT)?;
    seed.wait_served(tunnel, false, LIMIT)?;
    // Made a second later: the age of Services is in seconds.
    std::thread::sleep(Duration::from_millis(1100));
    site.api.create(&shared("zz-collides", 6443, 31943))?;
    lab::wait_until(LIMIT, "the third one is told why it waits", || {
        Ok(site.condition("zz-collides").is_ok_and(|it| it["reason"] == "PortClash" && it["status"] == "False"))
    })?;
    let message = site.condition("zz-collides")?["message"].to_string();
    ensure!(message.contains("clusters-tenant-a/kube-apiserver"), "{message}");
    let hold = Hold::start(&seed.lab, &seed.client, tunnel, false, 20, 10)?;
    // B52: asked for too late.
    let late = json!({ "metadata": { "annotations": { "lbd.tenantedge.io/vip": "192.168.203.115" } } });
    site.api.patch("Service", NAMESPACE, "konnectivity-server", &late)?;
    lab::wait_until(LIMIT, "the late request is refused", || {
        Ok(site.agent.lbctl(&["events"])?.contains("it keeps 192.168.203.114"))
    })?;
    site.api.delete("Service", NAMESPACE, "kube-apiserver")?;
    // The one that waited has the port now.
    lab::wait_until(LIMIT, "the third one has the address", || {
        let service = site.api.get("Service", NAMESPACE, "zz-collides")?;
        Ok(service.pointer("/status/loadBalancer/ingress/0/ip") == Some(&json!("192.168.203.114")))
    })?;
    seed.wait_served(api, false, LIMIT)?;
    ensure!(lab::get(&seed.client, api, false)?.local.ends_with(":31943"), "not the third one's NodePort");
    let report = hold.finish()?;
    report.assert_whole()?;
    ensure!(site.address("konnectivity-server")? == "192.168.203.114", "the address changed");
    Ok(())
}

/// TCP and UDP on one number are two things: one goes, the other stays.
#[test]
#[ignore = "needs root"]
fn b21_tcp_and_udp_on_one_port() -> Result<()> {
    let site = Site::new("b21", "")?;
    let seed = &site.seed;
    let mut servers = Vec::new();
    for (place, node) in seed.nodes.iter().enumerate() {
        let address = Seed::node_address(place);
        let listeners = [Listener::plain(&address, 31443), Listener::udp(&address, 31444)];
        servers.push(Peer::serve(&seed.lab, node, node.name(), &listeners)?);
    }
    let mut service = apiserver::service(NAMESPACE, "web", "LoadBalancer", &[]);
    let (tcp, udp, sctp) = (
        json!({ "name": "https", "port": 443, "protocol": "TCP", "nodePort": 31443, "targetPort": "https", "appProtocol": "https" }),
        json!({ "name": "quic", "port": 443, "protocol": "UDP", "nodePort": 31444 }),
        json!({ "name": "odd", "port": 5000, "protocol": "SCTP", "nodePort": 31500 }),
    );
    service["spec"]["ports"] = json!([tcp, udp, sctp]);
    site.api.create(&service)?;
    let target = format!("{}:443", site.address("web")?);
    seed.wait_served(&target, false, LIMIT)?;
    let answered = || lab::datagrams(&seed.client, &target, 20, &["--limit", "2"]).map(|report| report.received);
    lab::wait_until(LIMIT, "datagrams are answered", || Ok(answered()? == 20))?;
    // SCTP alone is reported; the others work.
    lab::wait_until(LIMIT, "SCTP is reported", || {
        Ok(site.condition("web").is_ok_and(|it| it["reason"] == "ProtocolUnsupported"))
    })?;
    let hold = Hold::start(&seed.lab, &seed.client, &target, false, 10, 10)?;
    // A merge by port number alone loses one of the two.
    site.api.patch("Service", NAMESPACE, "web", &json!({ "spec": { "ports": [tcp] } }))?;
    lab::wait_until(LIMIT, "datagrams are not answered any more", || {
        Ok(answered().map_or(true, |answered| answered == 0))
    })?;
    hold.finish()?.assert_whole()?;
    ensure!(lab::load(&seed.client, &target, false, 20)?.failed == 0, "TCP is gone too");
    Ok(())
}

/// Probes that speak TLS and HTTP: what only listens, or speaks something else, is out; what is well behaved is in.
#[test]
#[ignore = "needs root"]
fn b54_probes_of_tls_ports() -> Result<()> {
    let probe = "defaults: { health: { probe: https, path: /readyz, host: api.example } }\n";
    let site = Site::new("b54", probe)?;
    let seed = &site.seed;
    let listener = |place: usize, tls: bool| {
        let address = Seed::node_address(place);
        if tls { Listener::tls(&address, 30918) } else { Listener::plain(&address, 30918) }
    };
    let mut servers = Vec::new();
    // n5 and n6 are API servers; n7 speaks plain HTTP; nothing listens at n8.
    for (place, tls) in [(0, true), (1, true), (2, false)] {
        let node = &seed.nodes[place];
        servers.push(Peer::serve(&seed.lab, node, node.name(), &[listener(place, tls)])?);
    }
    site.api.create(&apiserver::service(NAMESPACE, "kube-apiserver", "LoadBalancer", &[(6443, 30918)]))?;
    let target = format!("{}:6443", site.address("kube-apiserver")?);
    lab::wait_until(LIMIT, "the two API servers serve", || {
        let report = lab::load(&seed.client, &target, true, 60)?;
        Ok(report.failed == 0 && report.servers.keys().eq(["n5", "n6"]))
    })?;
    let backends = site.agent.lbctl_json(&["backends"])?;
    let cause = |node: &str| -> Result<String> {
        let found = backends.as_array().into_iter().flatten().find(|it| it["node"] == node && it["service"] != "x");
        Ok(found.with_context(|| format!("no backend {node}: {backends}"))?["cause"]
            .as_str()
            .unwrap_or_default()
            .to_owned())
    };
    ensure!(cause("n5")? == "HTTP 200", "{backends}");
    ensure!(cause("n7")?.starts_with("TLS handshake"), "{backends}");
    ensure!(cause("n8")? == "connection refused", "{backends}");
    // A restart of the agent forgets nothing.
    site.agent.stop()?;
    site.agent.start(&seed.lab)?;
    let report = lab::load(&seed.client, &target, true, 60)?;
    ensure!(report.failed == 0 && report.servers.keys().eq(["n5", "n6"]), "{report:?}");
    Ok(())
}

/// A node changes its address: new connections go to the new one, those to the old one end before another node has it.
#[test]
#[ignore = "needs root"]
fn b28_a_node_changes_its_address() -> Result<()> {
    let site = Site::new("b28", "")?;
    let seed = &site.seed;
    let _servers = site.serve(&[30918])?;
    site.api.create(&apiserver::service(NAMESPACE, "kube-apiserver", "LoadBalancer", &[(6443, 30918)]))?;
    let target = format!("{}:6443", site.address("kube-apiserver")?);
    site.wait_servers(&target, &["n5", "n6", "n7", "n8"])?;
    let hold = Hold::start(&seed.lab, &seed.client, &target, false, 80, 10)?;
    seed.nodes[0].ip("address add 10.32.96.121/20 dev eth0")?;
    let moved = [Listener::plain("10.32.96.121", 30918)];
    let _moved = Peer::serve(&seed.lab, &seed.nodes[0], "n5-moved", &moved)?;
    let status = |address: &str| json!({ "status": { "addresses": [{ "type": "InternalIP", "address": address }] } });
    site.api.patch_status("Node", "", "n5", &status("10.32.96.121"))?;
    site.wait_servers(&target, &["n5-moved", "n6", "n7", "n8"])?;
    let words = ["flows", "--backend", "10.32.96.105", "--state", "established"];
    lab::wait_until(LIMIT, "no flow to the old address is left", || {
        Ok(site.agent.lbctl_json(&words)?.as_array().is_some_and(Vec::is_empty))
    })?;
    // Another node has the old address now: no old flow goes on into it.
    site.api.create(&apiserver::node("n9", "10.32.96.105"))?;
    site.wait_servers(&target, &["n5", "n5-moved", "n6", "n7", "n8"])?;
    let report = hold.finish()?;
    let on_node = report.servers.get("n5").copied().unwrap_or_default();
    ensure!(on_node > 5 && report.reset == on_node && report.lost == 0 && report.wrong == 0, "{report:?}");
    ensure!(report.lost_servers.keys().all(|server| server == "n5"), "{report:?}");
    Ok(())
}

fn map_writes(site: &Site) -> Result<u64> {
    let metrics = site.seed.lb.run(|| {
        use std::io::{Read as _, Write as _};
        let mut stream = std::net::TcpStream::connect("127.0.0.1:9474")?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: lbd\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })?;
    let line = metrics.lines().find_map(|line| line.strip_prefix("lbd_map_writes_total "));
    line.with_context(|| format!("no lbd_map_writes_total in {metrics}"))?.trim().parse().context("a number")
}

/// An upgrade cordons one node after another: nothing moves, and no map is written.
#[test]
#[ignore = "needs root"]
fn b25_cordons_write_no_map() -> Result<()> {
    let site = Site::new("b25", "")?;
    let _servers = site.serve(&[30918])?;
    site.api.create(&apiserver::service(NAMESPACE, "kube-apiserver", "LoadBalancer", &[(6443, 30918)]))?;
    let target = format!("{}:6443", site.address("kube-apiserver")?);
    site.wait_servers(&target, &["n5", "n6", "n7", "n8"])?;
    let hold = Hold::start(&site.seed.lab, &site.seed.client, &target, false, 20, 10)?;
    std::thread::sleep(Duration::from_secs(2));
    let before = map_writes(&site)?;
    for node in ["n5", "n6", "n7"] {
        let cordon = json!({ "spec": { "unschedulable": true,
            "taints": [{ "key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule" }] } });
        site.api.patch("Node", "", node, &cordon)?;
        std::thread::sleep(Duration::from_millis(500));
    }
    ensure!(map_writes(&site)? == before, "maps were written: {before} before, {} after", map_writes(&site)?);
    site.wait_servers(&target, &["n5", "n6", "n7", "n8"])?;
    hold.finish()?.assert_whole()
}

/// Excluded by label: no new connections, and the open ones go on. A new node gets none before it has an address and answers there.
#[test]
#[ignore = "needs root"]
fn b27_excluded_and_half_born_nodes() -> Result<()> {
    let site = Site::new("b27", "")?;
    let seed = &site.seed;
    let mut servers = Vec::new();
    for place in 0..3 {
        let listeners = [Listener::plain(&Seed::node_address(place), 30918)];
        servers.push(Peer::serve(&seed.lab, &seed.nodes[place], seed.nodes[place].name(), &listeners)?);
    }
    site.api.delete("Node", "", "n8")?;
    site.api.create(&apiserver::service(NAMESPACE, "kube-apiserver", "LoadBalancer", &[(6443, 30918)]))?;
    let target = format!("{}:6443", site.address("kube-apiserver")?);
    site.wait_servers(&target, &["n5", "n6", "n7"])?;
    let hold = Hold::start(&seed.lab, &seed.client, &target, false, 40, 10)?;
    let label = |value: Value| json!({ "metadata": { "labels": { "node.kubernetes.io/exclude-from-external-load-balancers": value } } });
    for value in ["", "true", "yes"] {
        site.api.patch("Node", "", "n6", &label(json!(value)))?;
        site.wait_servers(&target, &["n5", "n7"])?;
        site.api.patch("Node", "", "n6", &label(json!("false")))?;
        site.wait_servers(&target, &["n5", "n6", "n7"])?;
    }
    let taint = |taints: Value| json!({ "spec": { "taints": taints } });
    let deleted = json!([{ "key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule" }]);
    site.api.patch("Node", "", "n6", &taint(deleted))?;
    site.wait_servers(&target, &["n5", "n7"])?;
    site.api.patch("Node", "", "n6", &taint(Value::Null))?;
    site.wait_servers(&target, &["n5", "n6", "n7"])?;
    hold.finish()?.assert_whole()?;
    // A node is born: without an address, then without a network, then good.
    site.api.create(&json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n8" } }))?;
    let report = lab::load(&seed.client, &target, false, 60)?;
    ensure!(report.failed == 0 && report.servers.len() == 3, "{report:?}");
    let status = json!({ "status": { "addresses": [{ "type": "InternalIP", "address": "10.32.96.108" }],
        "conditions": [{ "type": "NetworkUnavailable", "status": "True" }] } });
    site.api.patch_status("Node", "", "n8", &status)?;
    for _ in 0..3 {
        let report = lab::load(&seed.client, &target, false, 60)?;
        ensure!(report.failed == 0 && report.servers.len() == 3, "{report:?}");
        std::thread::sleep(Duration::from_millis(500));
    }
    let listeners = [Listener::plain("10.32.96.108", 30918)];
    servers.push(Peer::serve(&seed.lab, &seed.nodes[3], "n8", &listeners)?);
    site.wait_servers(&target, &["n5", "n6", "n7", "n8"])
}

/// Which Services are ours, who of two gets an address, and that nothing that is written into one stops the others.
#[test]
#[ignore = "needs root"]
fn b10_b19_b51_services_that_want_what_they_may_not_have() -> Result<()> {
    let site = Site::new("b10", "")?;
    let _servers = site.serve(&[30918])?;
    let wants = |namespace: &str, name: &str, class: Option<&str>, vip: Option<&str>| {
        let mut service = apiserver::service(namespace, name, "LoadBalancer", &[(6443, 0)]);
        if let Some(class) = class {
            service["spec"]["loadBalancerClass"] = json!(class);
        }
        if let Some(vip) = vip {
            service["metadata"]["annotations"] = json!({ "lbd.tenantedge.io/vip": vip });
        }
        service
    };
    let ours = "lbd.tenantedge.io/edge";
    for object in [
        wants(NAMESPACE, "plain", None, None),
        wants("openshift-ingress", "router-default", None, None),
        wants(NAMESPACE, "ours", Some(ours), None),
        wants(NAMESPACE, "foreign", Some("loxilb.io/loxilb"), Some("192.168.203.119")),
        wants("elsewhere", "ours", Some(ours), None),
    ] {
        site.api.create(&object)?;
    }
    site.address("plain")?;
    site.address("ours")?;
    // B19, in the same moment.
    site.api.create(&wants(NAMESPACE, "old", None, Some("192.168.203.114")))?;
    site.api.create(&wants(NAMESPACE, "young", None, Some("192.168.203.114")))?;
    let has = |name: &str| -> Result<bool> {
        let service = site.api.get("Service", NAMESPACE, name)?;
        Ok(service.pointer("/status/loadBalancer/ingress/0/ip") == Some(&json!("192.168.203.114")))
    };
    lab::wait_until(LIMIT, "one of the two has the address", || Ok(has("old")? || has("young")?))?;
    let (winner, loser) = if has("old")? { ("old", "young") } else { ("young", "old") };
    lab::wait_until(LIMIT, "the other one is told who has it", || {
        Ok(site.condition(loser).is_ok_and(|it| it["message"].as_str().is_some_and(|it| it.contains(winner))))
    })?;
    ensure!(!has(loser)?, "both have it");
    site.api.delete("Service", NAMESPACE, winner)?;
    lab::wait_until(Duration::from_secs(5), "it takes over", || has(loser))?;
    // B51: nonsense of all kinds, and then somebody in good order.
    for (number, text) in
        ["300.1.1.1", "192.168.203.110,", "::g", "-1s", "{\"a\":1}", "\u{1f4a9}"].into_iter().enumerate()
    {
        let mut object = wants(NAMESPACE, &format!("odd-{number}"), None, Some(text));
        object["metadata"]["annotations"]["lbd.tenantedge.io/shared-key"] = json!(text);
        object["metadata"]["annotations"]["service.beta.kubernetes.io/load-balancer-source-ranges"] = json!(text);
        site.api.create(&object)?;
    }
    let mut good = wants(NAMESPACE, "good", None, None);
    good["spec"]["ports"][0]["nodePort"] = json!(30918);
    site.api.create(&good)?;
    let target = format!("{}:6443", site.address("good")?);
    site.wait_servers(&target, &["n5", "n6", "n7", "n8"])?;
    lab::wait_until(LIMIT, "nonsense is named", || {
        let condition = site.condition("odd-0");
        Ok(condition.is_ok_and(|it| it["reason"] == "SourceRangesInvalid" || it["reason"] == "AddressRequestRefused"))
    })?;
    // The unknown tenant's is told in lbd's own events; what is others' has not been touched at all.
    ensure!(site.agent.lbctl(&["events"])?.contains("no tenant of this load balancer claims it"), "no event");
    for (namespace, name) in [("openshift-ingress", "router-default"), (NAMESPACE, "foreign"), ("elsewhere", "ours")] {
        let service = site.api.get("Service", namespace, name)?;
        let untouched = service.pointer("/status/loadBalancer/ingress/0").is_none()
            && service.pointer("/status/conditions/0").is_none()
            && service.pointer("/metadata/finalizers").is_none();
        ensure!(untouched, "{namespace}/{name} was written to: {service}");
    }
    Ok(())
}
