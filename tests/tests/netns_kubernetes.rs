//! Kubernetes changes, packets follow: the agent between a real API (over HTTP) and a real kernel.
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use lbd_tests::apiserver;
use lbd_tests::lab::{self, Agent, Api, Hold, Listener, Peer, Seed, Ticker};

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
        let seed = Seed::new(name)?;
        let api = Api::start(&seed.lab, &seed.api, "10.32.96.10:6443")?;
        for (place, node) in seed.nodes.iter().enumerate() {
            api.create(&apiserver::node(node.name(), &Seed::node_address(place)))?;
        }
        let agent = Agent::new(&seed.lab, &seed.lb, &Seed::kubernetes_configuration(api.kubeconfig()))?;
        agent.start(&seed.lab)?;
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

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
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
    let changed = now_ms();
    site.api.set_node_port(NAMESPACE, SERVICE, 6443, 31222)?;
    // The call returns after the event was sent: the event is between these two.
    let acknowledged = now_ms();
    std::thread::sleep(Duration::from_secs(3));
    let ticks = ticker.finish()?;
    let to_old = |local: &Option<String>| local.as_ref().is_some_and(|local| local.ends_with(":30918"));
    let failed: Vec<_> = ticks.iter().filter(|tick| tick.error.is_some()).collect();
    ensure!(failed.is_empty(), "connections failed while the NodePort changed: {failed:?}");
    let last_old = ticks
        .iter()
        .filter(|tick| to_old(&tick.local))
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
    let report = hold.finish()?;
    ensure!(report.reset + report.lost == 10, "connections to a deleted Service live on: {report:?}");
    let report = lab::load(&site.seed.client, TARGET, false, 1)?;
    ensure!(report.failed == 1, "{report:?}");
    Ok(())
}
