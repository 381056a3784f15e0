//! Kubernetes changes, packets follow: the agent between a real API (over HTTP) and a real kernel.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lbd::source::kubernetes;
use lbd_tests::apiserver;
use lbd_tests::lab::{self, Agent, Api, Clock, Hold, Lab, Listener, Namespace, Peer, Seed, Tick, Ticker};
use serde_json::json;

const NAMESPACE: &str = "clusters-tenant-a";
const SERVICE: &str = "kube-apiserver";
const TARGET: &str = "192.168.203.110:6443";

struct Site {
    seed: Seed,
    api: Api,
    agent: Agent,
}

impl Site {
    /// The seed's networks, an API server that knows its nodes, and an agent. Nothing is served yet.
    fn new(name: &str) -> Result<Self> {
        Self::started(name, Agent::start)
    }

    /// The same, with an agent that is started in another way.
    fn started(name: &str, start: impl FnOnce(&Agent, &Lab) -> Result<()>) -> Result<Self> {
        let seed = Seed::new(name)?;
        let api = Api::start(&seed.lab, &seed.api, "10.32.96.10:6443")?;
        for (place, node) in seed.nodes.iter().enumerate() {
            api.create(&apiserver::node(node.name(), &Seed::node_address(place)))?;
        }
        let agent = Agent::new(&seed.lab, &seed.lb, &Seed::kubernetes_configuration(api.kubeconfig()))?;
        start(&agent, &seed.lab)?;
        Ok(Self { seed, api, agent })
    }

    /// Starts servers on all nodes at one NodePort.
    fn serve(&self, port: u16) -> Result<Vec<Peer>> {
        let mut peers = Vec::new();
        for (place, node) in self.seed.nodes.iter().enumerate() {
            let listeners = [Listener::plain(&Seed::node_address(place), port)];
            peers.push(Peer::serve(&self.seed.lab, node, node.name(), &listeners)?);
        }
        Ok(peers)
    }

    /// Creates the Service of the API server with this NodePort.
    fn create(&self, node_port: u16) -> Result<()> {
        self.api.create(&apiserver::service(NAMESPACE, SERVICE, "LoadBalancer", &[(6443, node_port)])).map(drop)
    }
}

/// TCP connections that were opened to servers of a namespace.
fn accepted(namespace: &Namespace) -> Result<u64> {
    let text = namespace.run(|| Ok(std::fs::read_to_string("/proc/thread-self/net/snmp")?))?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = lines.next().zip(lines.next()).context("no Tcp in /proc/net/snmp")?;
    let mut pairs = names.split(' ').zip(values.split(' '));
    let (_, value) = pairs.find(|(name, _)| *name == "PassiveOpens").context("no PassiveOpens in /proc/net/snmp")?;
    Ok(value.parse()?)
}

/// The clock is set an hour ahead, then an hour back, under open connections: none is lost, new ones are made, the Lease is kept and renewed,
/// nobody is probed more often, and changes are followed.
#[test]
#[ignore = "needs root"]
fn b36_a_clock_that_is_set_by_an_hour_disturbs_nothing() -> Result<()> {
    const WATCHED: Duration = Duration::from_secs(4);
    let mut clock = None;
    let site = Site::started("b36", |agent, lab| {
        let clock = clock.insert(Clock::new(lab)?);
        agent.start_build(lab, clock.program())
    })?;
    let clock = clock.context("the agent has no clock")?;
    let _servers = site.serve(30918)?;
    site.create(30918)?;
    site.seed.wait_served(TARGET, false, Duration::from_secs(10))?;
    let address = site.api.wait_address(NAMESPACE, SERVICE, Duration::from_secs(1))?;
    let hold = Hold::start(&site.seed.lab, &site.seed.client, TARGET, false, 40, 10)?;
    let lease = || site.api.get("Lease", kubernetes::NAMESPACE, &kubernetes::own_object("hub"));
    let holder = |lease: &serde_json::Value| lease["spec"]["holderIdentity"].clone();
    // How far the agent's renewals are ahead of the machine's clock, in seconds.
    let ahead = |lease: &serde_json::Value| -> Result<i64> {
        let renewed: jiff::Timestamp = lease["spec"]["renewTime"].as_str().context("never renewed")?.parse()?;
        Ok(renewed.as_second() - (lab::now_ms() / 1000) as i64)
    };
    // Flows that are open, and probes that a node sees meanwhile.
    let watch = || -> Result<(usize, u64)> {
        let before = accepted(&site.seed.nodes[0])?;
        std::thread::sleep(WATCHED);
        let probes = accepted(&site.seed.nodes[0])? - before;
        let flows = site.agent.lbctl_json(&["flows", "--state", "established"])?;
        Ok((flows.as_array().map_or(0, Vec::len), probes))
    };
    let first = lease()?;
    ensure!(ahead(&first)?.abs() < 60, "{first}");
    let (flows, probes) = watch()?;
    ensure!(flows >= 40 && probes > 0, "{flows} flows, {probes} probes");
    for (offset, node_port) in [(3600, 31222), (-3600, 31333)] {
        clock.set(offset)?;
        let begun = std::time::Instant::now();
        // A Lease is renewed every few seconds: the agent has seen its clock.
        lab::wait_until(Duration::from_secs(30), "the Lease is renewed by the clock as it is set", || {
            Ok((ahead(&lease()?)? - offset).abs() < 60)
        })?;
        println!("set by {offset} s: renewed after {} ms", begun.elapsed().as_millis());
        ensure!(holder(&lease()?) == holder(&first), "the Lease has changed hands");
        let (now, probed) = watch()?;
        ensure!(now >= flows, "{now} of {flows} flows are left");
        ensure!(probed <= 2 * probes + 4, "{probed} probes in the time of {probes}");
        let report = lab::load(&site.seed.far, TARGET, false, 50)?;
        ensure!(report.failed == 0, "{report:?}");
        // The servers of before go on for the connections of before.
        let (_new, port) = (site.serve(node_port)?, format!(":{node_port}"));
        site.api.set_node_port(NAMESPACE, SERVICE, 6443, node_port)?;
        lab::wait_until(Duration::from_secs(5), "the new NodePort is followed", || {
            let backends = site.agent.lbctl_json(&["backends"])?;
            let at = |it: &serde_json::Value| it["backend"].as_str().is_some_and(|at| at.ends_with(&port));
            Ok(backends.as_array().is_some_and(|all| all.iter().any(|it| at(it) && it["state"] == "up")))
        })?;
        site.api.set_node_port(NAMESPACE, SERVICE, 6443, 30918)?;
        site.seed.wait_served(TARGET, false, Duration::from_secs(10))?;
    }
    ensure!(site.api.wait_address(NAMESPACE, SERVICE, Duration::from_secs(1))? == address, "the address changed");
    hold.finish()?.assert_whole()
}

/// Whether a connection was answered at this `:port`.
fn went_to(tick: &Tick, port: &str) -> bool {
    tick.local.as_ref().is_some_and(|local| local.ends_with(port))
}

/// The NodePort changes under open connections: none is lost, new ones go to the new port within 100 ms of the event.
#[test]
#[ignore = "needs root"]
fn b01_the_node_port_changes() -> Result<()> {
    let site = Site::new("b01")?;
    let _old = site.serve(30918)?;
    site.create(30918)?;
    site.seed.wait_served(TARGET, false, Duration::from_secs(10))?;
    let hold = Hold::start(&site.seed.lab, &site.seed.client, TARGET, false, 20, 10)?;
    let _new = site.serve(31222)?;
    let ticker = Ticker::start(&site.seed.lab, &site.seed.far, TARGET, false, 5)?;
    std::thread::sleep(Duration::from_millis(500));
    let address = site.api.wait_address(NAMESPACE, SERVICE, Duration::from_secs(1))?;
    let changed = lab::now_ms();
    site.api.set_node_port(NAMESPACE, SERVICE, 6443, 31222)?;
    // The call returns after the event was sent: the event is between these two.
    let acknowledged = lab::now_ms();
    std::thread::sleep(Duration::from_secs(3));
    let ticks = ticker.finish()?;
    let failed: Vec<_> = ticks.iter().filter(|tick| tick.error.is_some()).collect();
    ensure!(failed.is_empty(), "connections failed while the NodePort changed: {failed:?}");
    let last_old = ticks
        .iter()
        .filter(|tick| went_to(tick, ":30918"))
        .map(|tick| tick.at_ms)
        .max()
        .context("none went to the old port")?;
    println!(
        "the last connection to the old port was begun {} ms after the change was asked for",
        last_old as i64 - changed as i64
    );
    ensure!(
        last_old <= acknowledged + 100,
        "a connection begun {} ms after the event went to the old port",
        last_old - acknowledged
    );
    let report = hold.finish()?;
    report.assert_whole()?;
    ensure!(site.api.wait_address(NAMESPACE, SERVICE, Duration::from_secs(1))? == address, "the address changed");
    Ok(())
}

/// Handshakes are under way at every change: each ends where it began, whatever of the change is written already.
#[test]
#[ignore = "needs root"]
fn b01_no_handshake_is_lost_while_the_node_port_changes_again_and_again() -> Result<()> {
    let site = Site::new("b01s")?;
    let (_one, _other) = (site.serve(30918)?, site.serve(31222)?);
    site.create(30918)?;
    site.seed.wait_served(TARGET, false, Duration::from_secs(10))?;
    let tickers: Vec<_> =
        (0..4).map(|_| Ticker::start(&site.seed.lab, &site.seed.far, TARGET, false, 1)).collect::<Result<_>>()?;
    for change in 0..60 {
        site.api.set_node_port(NAMESPACE, SERVICE, 6443, if change % 2 == 0 { 31222 } else { 30918 })?;
        std::thread::sleep(Duration::from_millis(100));
    }
    let mut ticks = Vec::new();
    for ticker in tickers {
        ticks.append(&mut ticker.finish()?);
    }
    let failed: Vec<_> = ticks.iter().filter(|tick| tick.error.is_some()).collect();
    let to = |port: &str| ticks.iter().filter(|tick| went_to(tick, port)).count();
    let (one, other) = (to(":30918"), to(":31222"));
    println!("{} connections, {} failed, {one} and {other} to the ports", ticks.len(), failed.len());
    ensure!(failed.is_empty(), "connections failed while the NodePort changed: {failed:?}");
    ensure!(one > 1000 && other > 1000, "the changes were not followed");
    Ok(())
}

/// The address comes first: before any backend is healthy; until then the VIP refuses, it does not swallow.
#[test]
#[ignore = "needs root"]
fn b45_the_address_is_there_before_anything_is_healthy() -> Result<()> {
    let site = Site::new("b45")?;
    let begun = std::time::Instant::now();
    site.create(30918)?;
    let address = site.api.wait_address(NAMESPACE, SERVICE, Duration::from_secs(5))?;
    println!("{address} after {} ms", begun.elapsed().as_millis());
    ensure!(address == "192.168.203.110", "{address}");
    std::thread::sleep(Duration::from_secs(5));
    let report = lab::load(&site.seed.client, TARGET, false, 10)?;
    ensure!(report.errors.get("connection refused") == Some(&10) && report.slowest_ms < 1_500, "{report:?}");
    let _servers = site.serve(30918)?;
    site.seed.wait_served(TARGET, false, Duration::from_secs(5))?;
    ensure!(site.api.wait_address(NAMESPACE, SERVICE, Duration::from_secs(1))? == address, "the address changed");
    Ok(())
}

/// A Node object that is deleted takes its flows with it, at once; clients reconnect to another node. A node that is merely silent keeps
/// them, unless asked otherwise.
#[test]
#[ignore = "needs root"]
fn a52_a_deleted_node_resets_its_flows() -> Result<()> {
    let site = Site::new("a52")?;
    let _servers = site.serve(30918)?;
    site.create(30918)?;
    site.seed.wait_served(TARGET, false, Duration::from_secs(10))?;
    let hold = Hold::start(&site.seed.lab, &site.seed.client, TARGET, false, 80, 10)?;
    site.seed.nodes[1].ip("link set eth0 down")?;
    site.api.delete("Node", "", "n6")?;
    std::thread::sleep(Duration::from_secs(2));
    let flows = site.agent.lbctl_json(&["flows", "--backend", "10.32.96.106", "--state", "established"])?;
    ensure!(flows.as_array().is_some_and(Vec::is_empty), "flows to the deleted node are left: {flows}");
    let report = lab::load(&site.seed.far, TARGET, false, 100)?;
    ensure!(report.failed == 0 && !report.servers.contains_key("n6"), "{report:?}");
    let report = hold.finish()?;
    println!("{report:?}");
    let on_node = report.servers.get("n6").copied().unwrap_or_default();
    ensure!(on_node > 5 && report.reset == on_node && report.lost == 0, "clients of n6 were not told: {report:?}");
    ensure!(report.lost_servers.keys().all(|server| server == "n6"), "{report:?}");
    Ok(())
}

/// A node without power whose object stays, NotReady: its flows are kept as configured, and the operator ends them with one command.
#[test]
#[ignore = "needs root"]
fn a52_a_node_without_power_is_given_up_by_one_command() -> Result<()> {
    let site = Site::new("a52b")?;
    let _servers = site.serve(30918)?;
    site.create(30918)?;
    site.seed.wait_served(TARGET, false, Duration::from_secs(10))?;
    let hold = Hold::start(&site.seed.lab, &site.seed.client, TARGET, false, 80, 10)?;
    site.seed.nodes[1].ip("link set eth0 down")?;
    let not_ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "Unknown" }] } });
    site.api.patch("Node", "", "n6", &not_ready)?;
    std::thread::sleep(Duration::from_secs(5));
    let words = ["flows", "--backend", "10.32.96.106", "--state", "established"];
    let kept = site.agent.lbctl_json(&words)?.as_array().map_or(0, Vec::len);
    ensure!(kept > 5, "{kept} flows of the node are left: `on_down: keep` is the default");
    let report = lab::load(&site.seed.far, TARGET, false, 100)?;
    ensure!(report.failed == 0 && !report.servers.contains_key("n6"), "{report:?}");
    let given_up = Seed::kubernetes_configuration(site.api.kubeconfig()) + "\ndefaults: { on_down: reset }\n";
    site.agent.configure(&given_up)?;
    site.agent.lbctl(&["reload", "--accept-loss"])?;
    lab::wait_until(Duration::from_secs(5), "no flow of the node is left", || {
        Ok(site.agent.lbctl_json(&words)?.as_array().is_some_and(Vec::is_empty))
    })?;
    let report = hold.finish()?;
    let on_node = report.servers.get("n6").copied().unwrap_or_default();
    ensure!(on_node > 5 && report.reset == on_node && report.lost == 0, "clients of n6 were not told: {report:?}");
    ensure!(report.lost_servers.keys().all(|server| server == "n6"), "{report:?}");
    Ok(())
}

/// A Service with one NodePort and one port without: the first serves, the second refuses and is never port 0; both are told.
#[test]
#[ignore = "needs root"]
fn b50_a_port_without_node_port() -> Result<()> {
    let site = Site::new("b50")?;
    let _servers = site.serve(31555)?;
    let mut service = apiserver::service(NAMESPACE, "no-nodeports", "LoadBalancer", &[(6443, 31555), (8444, 0)]);
    service["spec"]["allocateLoadBalancerNodePorts"] = json!(false);
    site.api.create(&service)?;
    let address = site.api.wait_address(NAMESPACE, "no-nodeports", Duration::from_secs(5))?;
    site.seed.wait_served(&format!("{address}:6443"), false, Duration::from_secs(10))?;
    let report = lab::load(&site.seed.client, &format!("{address}:8444"), false, 3)?;
    ensure!(report.errors.get("connection refused") == Some(&3), "{report:?}");
    let services = site.agent.lbctl_json(&["services"])?;
    let state = |vip: &str| {
        let found = services.as_array().into_iter().flatten().find(|service| service["vip"] == vip);
        found.map(|service| service["state"].clone())
    };
    ensure!(state(&format!("{address}:6443")) == Some(json!("serving")), "{services}");
    ensure!(state(&format!("{address}:8444")) == Some(json!("pending")), "{services}");
    let backends = site.agent.lbctl(&["backends"])?;
    ensure!(!backends.split_whitespace().any(|word| word.ends_with(":0")), "{backends}");
    let found = lab::eventually(Duration::from_secs(5), "the condition is written", || {
        let service = site.api.get("Service", NAMESPACE, "no-nodeports")?;
        Ok(service.pointer("/status/conditions/0").cloned())
    })?;
    ensure!(found["status"] == "False" && found["reason"] == "NodePortMissing", "{found}");
    Ok(())
}

/// Services that are not lbd's, and those that it must not open to everybody.
#[test]
#[ignore = "needs root"]
fn services_that_are_not_served() -> Result<()> {
    let site = Site::new("refused")?;
    let _servers = site.serve(30918)?;
    let mut ranges = apiserver::service(NAMESPACE, SERVICE, "LoadBalancer", &[(6443, 30918)]);
    ranges["spec"]["loadBalancerSourceRanges"] = json!(["203.0.113.0/24"]);
    let mut foreign = apiserver::service(NAMESPACE, "other-lb", "LoadBalancer", &[(6443, 31902)]);
    foreign["spec"]["loadBalancerClass"] = json!("loxilb.io/loxilb");
    let internal = apiserver::service(NAMESPACE, "internal", "NodePort", &[(6443, 30213)]);
    for service in [&ranges, &foreign, &internal] {
        site.api.create(service)?;
    }
    let condition = lab::eventually(Duration::from_secs(5), "the reason is in the status", || {
        Ok(site.api.get("Service", NAMESPACE, SERVICE)?.pointer("/status/conditions/0").cloned())
    })?;
    ensure!(condition["status"] == "False" && condition["reason"] == "SourceRangesUnsupported", "{condition}");
    std::thread::sleep(Duration::from_secs(1));
    for name in [SERVICE, "other-lb", "internal"] {
        let service = site.api.get("Service", NAMESPACE, name)?;
        ensure!(service.pointer("/status/loadBalancer/ingress/0").is_none(), "{name} has an address: {service}");
        ensure!(service.pointer("/metadata/finalizers").is_none(), "{service}");
        ensure!(
            name == SERVICE || service.pointer("/status/conditions/0").is_none(),
            "{name} was written to: {service}"
        );
    }
    // With the ranges gone it is opened.
    let open = json!({ "spec": { "loadBalancerSourceRanges": null } });
    site.api.patch("Service", NAMESPACE, SERVICE, &open)?;
    site.seed.wait_served(TARGET, false, Duration::from_secs(10))
}

/// A deleted Service takes its flows and its address with it.
#[test]
#[ignore = "needs root"]
fn a_deleted_service_closes() -> Result<()> {
    let site = Site::new("deleted")?;
    let _servers = site.serve(30918)?;
    site.create(30918)?;
    site.seed.wait_served(TARGET, false, Duration::from_secs(10))?;
    let hold = Hold::start(&site.seed.lab, &site.seed.client, TARGET, false, 10, 10)?;
    site.api.delete("Service", NAMESPACE, SERVICE)?;
    lab::wait_until(Duration::from_secs(5), "no flow is left", || {
        let flows = site.agent.lbctl_json(&["flows", "--vip", "192.168.203.110", "--state", "established"])?;
        Ok(flows.as_array().is_some_and(Vec::is_empty))
    })?;
    // Each connection learns it with its next request, ten times a second.
    std::thread::sleep(Duration::from_secs(1));
    let report = hold.finish()?;
    ensure!(report.reset + report.lost == 10, "connections to a deleted Service live on: {report:?}");
    let report = lab::load(&site.seed.client, TARGET, false, 1)?;
    ensure!(report.failed == 1, "{report:?}");
    Ok(())
}
