//! Who announces, and what an API that is away or hard to reach costs: the agent between a real API and a real kernel.
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lbd_tests::apiserver;
use lbd_tests::lab::{self, Agent, Api, Bench, Hold, Listener, Nic, Peer, Seed};
use serde_json::Value;

const NAMESPACE: &str = "clusters-tenant-a";
const SERVICE: &str = "kube-apiserver";
const TARGET: &str = "192.168.203.110:6443";

fn configuration(kubeconfig: &std::path::Path, address: &str) -> String {
    format!(
        "\
version: 1
hubs:
  - name: hub
    interface: hub0
    node_cidrs: [10.0.0.0/24]
    kubernetes: {{ kubeconfig: {} }}
tenants:
  - name: a
    segment: {{ interface: ten0, address: {address}/24, gateway: 192.0.2.1 }}
    pools: [192.0.2.32/28]
    claim: [{{ namespaces: [{NAMESPACE}] }}]
",
        kubeconfig.display()
    )
}

fn lease(agent: &Agent) -> Result<Value> {
    Ok(agent.lbctl_json(&["status"])?["lease"]["state"].clone())
}

/// A second host with the same file: it gives out nothing, writes nothing and answers nobody, until the first is gone; then it serves the
/// same addresses.
#[test]
#[ignore = "needs root"]
fn b59_a_second_load_balancer_waits_until_the_first_is_gone() -> Result<()> {
    let bench = Bench::new("b59")?;
    let second = bench.lab.namespace("lb2")?;
    bench.lab.plug(&bench.switches[0], &second, "ten0", &Nic::new("192.0.2.3/24").mac("02:00:00:00:01:03"))?;
    bench.lab.plug(&bench.switches[2], &second, "hub0", &Nic::new("10.0.0.3/24").mac("02:00:00:00:0a:03"))?;
    let api = Api::start(&bench.lab, &bench.api, "10.0.0.20:6443")?;
    for (place, node) in bench.nodes.iter().enumerate() {
        api.create(&apiserver::node(node.name(), &format!("10.0.0.{}", 11 + place)))?;
    }
    let _servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
    let first_agent = Agent::new(&bench.lab, &bench.lb, &configuration(api.kubeconfig(), "192.0.2.2"))?;
    first_agent.start(&bench.lab)?;
    api.create(&apiserver::service(NAMESPACE, SERVICE, "LoadBalancer", &[(6443, Bench::NODE_PORT)]))?;
    let address = api.wait_address(NAMESPACE, SERVICE, Duration::from_secs(5))?;
    let target = format!("{address}:6443");
    lab::wait_until(Duration::from_secs(10), "it is served", || {
        Ok(lab::load(&bench.near, &target, false, 1).is_ok_and(|report| report.failed == 0))
    })?;
    let second_agent = Agent::new(&bench.lab, &second, &configuration(api.kubeconfig(), "192.0.2.3"))?;
    second_agent.start(&bench.lab)?;
    lab::wait_until(Duration::from_secs(5), "the second waits", || Ok(lease(&second_agent)? == "other"))?;
    ensure!(lease(&first_agent)? == "held");
    let before = api.get("Service", NAMESPACE, SERVICE)?["metadata"]["resourceVersion"].clone();
    std::thread::sleep(Duration::from_secs(20));
    // Longer than the Lease is valid, and still one station answers.
    let mac = |address: &str| -> Result<String> {
        bench.near.ip(&format!("neigh flush to {address}"))?;
        let _ = lab::load(&bench.near, &target, false, 1);
        let found = bench.near.ip_json(&format!("neigh show {address}"))?;
        Ok(found[0]["lladdr"].as_str().unwrap_or_default().to_owned())
    };
    ensure!(mac(&address)? == "02:00:00:00:01:02", "{}", mac(&address)?);
    ensure!(second_agent.lbctl_json(&["services"])?.as_array().is_none_or(Vec::is_empty));
    ensure!(
        api.get("Service", NAMESPACE, SERVICE)?["metadata"]["resourceVersion"] == before,
        "the Service was written"
    );
    let status = second_agent.lbctl(&["status"])?;
    ensure!(status.contains("LeaseHeldByOther"), "{status}");
    // The host is gone, with everything.
    first_agent.kill();
    bench.lb.ip("link set ten0 down")?;
    bench.lb.ip("link set hub0 down")?;
    lab::wait_until(Duration::from_secs(40), "the second serves", || {
        Ok(lab::load(&bench.near, &target, false, 1).is_ok_and(|report| report.failed == 0))
    })?;
    ensure!(mac(&address)? == "02:00:00:00:01:03", "{}", mac(&address)?);
    ensure!(api.wait_address(NAMESPACE, SERVICE, Duration::from_secs(1))? == address, "the address changed");
    ensure!(
        api.get("Service", NAMESPACE, SERVICE)?["metadata"]["resourceVersion"] == before,
        "the Service was written"
    );
    Ok(())
}

struct Site {
    seed: Seed,
    api: Api,
    agent: Agent,
    servers: Vec<Peer>,
}

impl Site {
    fn new(name: &str, change: impl FnOnce(&Api, String) -> Result<String>) -> Result<Self> {
        let seed = Seed::new(name)?;
        let api = Api::start(&seed.lab, &seed.api, "10.32.96.10:6443")?;
        let mut servers = Vec::new();
        for (place, node) in seed.nodes.iter().enumerate() {
            api.create(&apiserver::node(node.name(), &Seed::node_address(place)))?;
            servers.push(serve(&seed, place)?);
        }
        let agent = Agent::new(&seed.lab, &seed.lb, &change(&api, Seed::kubernetes_configuration(api.kubeconfig()))?)?;
        agent.start(&seed.lab)?;
        api.create(&apiserver::service(NAMESPACE, SERVICE, "LoadBalancer", &[(6443, Seed::API_PORT)]))?;
        seed.wait_served(TARGET, false, Duration::from_secs(15))?;
        Ok(Self { seed, api, agent, servers })
    }
}

fn serve(seed: &Seed, place: usize) -> Result<Peer> {
    let node = &seed.nodes[place];
    Peer::serve(&seed.lab, node, node.name(), &[Listener::plain(&Seed::node_address(place), Seed::API_PORT)])
}

/// The API is away: connections go on, new ones are served, a node that dies is left out, one that returns is used; on return nothing moves.
#[test]
#[ignore = "needs root"]
fn b35_without_the_api_forwarding_probing_and_failing_over_go_on() -> Result<()> {
    let mut site = Site::new("b35", |_, text| Ok(text))?;
    let hold = Hold::start(&site.seed.lab, &site.seed.client, TARGET, false, 20, 10)?;
    let version = site.api.get("Service", NAMESPACE, SERVICE)?["metadata"]["resourceVersion"].clone();
    let others = ["n5", "n7", "n8"];
    site.seed.api.ip("link set eth0 down")?;
    lab::wait_until(Duration::from_secs(90), "the API is missed", || {
        Ok(site.agent.lbctl_json(&["status"])?["sources"][0]["state"] == "away")
    })?;
    // Its connections would be lost with it; they are none of this test's.
    let on_node = |name: &str| -> Result<u64> {
        let report = lab::load(&site.seed.far, TARGET, false, 60)?;
        ensure!(report.failed == 0, "{report:?}");
        Ok(report.servers.get(name).copied().unwrap_or_default())
    };
    ensure!(on_node("n6")? > 0);
    site.servers[1].refuse();
    lab::wait_until(Duration::from_secs(15), "the dead node is left out", || {
        let report = lab::load(&site.seed.far, TARGET, false, 60)?;
        Ok(report.failed == 0 && report.servers.keys().all(|server| others.contains(&server.as_str())))
    })?;
    site.servers[1].kill();
    site.servers[1] = serve(&site.seed, 1)?;
    lab::wait_until(Duration::from_secs(15), "the node that returned is used", || {
        let report = lab::load(&site.seed.far, TARGET, false, 60)?;
        Ok(report.failed == 0 && report.servers.contains_key("n6"))
    })?;
    let status = site.agent.lbctl_json(&["status"])?;
    ensure!(status["sources"][0]["age_s"].as_u64().is_some_and(|age| age > 0), "{status}");
    ensure!(status["lease"]["state"] == "held", "{status}");
    site.seed.api.ip("link set eth0 up")?;
    lab::wait_until(Duration::from_secs(90), "the API is back", || {
        Ok(site.agent.lbctl_json(&["status"])?["sources"][0]["state"] == "synced")
    })?;
    std::thread::sleep(Duration::from_secs(2));
    ensure!(site.api.get("Service", NAMESPACE, SERVICE)?["metadata"]["resourceVersion"] == version, "rewritten");
    let report = hold.finish()?;
    let elsewhere = report.lost_servers.keys().all(|server| server == "n6");
    ensure!(elsewhere, "connections to nodes that lived were lost: {report:?}");
    Ok(())
}

/// The kubeconfig names a VIP that this very host serves: its own packets would never get there.
#[test]
#[ignore = "needs root"]
fn an_api_behind_an_own_vip_is_dialled_directly() -> Result<()> {
    let site = Site::new("ownvip", |api, text| {
        let mine = api.kubeconfig().with_file_name("own-vip.kubeconfig");
        let text_of = std::fs::read_to_string(api.kubeconfig())?;
        ensure!(text_of.contains("10.32.96.10:6443"), "{text_of}");
        std::fs::write(&mine, text_of.replace("10.32.96.10:6443", "192.168.203.115:8443"))?;
        std::fs::set_permissions(&mine, std::fs::Permissions::from_mode(0o600))?;
        let hub_api = "    frontends:\n      - name: hub-api\n        vip: 192.168.203.115\n        \
                       ports: [{ port: 8443, target: 6443 }]\n        backends: [10.32.96.10]\n";
        Ok(text
            .replace(
                &format!("kubeconfig: {} }}", api.kubeconfig().display()),
                &format!("kubeconfig: {}, allow_insecure: true }}", mine.display()),
            )
            .replacen("    frontends:\n", hub_api, 1))
    })?;
    let status = site.agent.lbctl_json(&["status"])?;
    ensure!(status["sources"][0]["state"] == "synced", "{status}");
    // Still after a restart, and a change is seen.
    site.agent.stop()?;
    site.agent.start(&site.seed.lab)?;
    site.api.delete("Service", NAMESPACE, SERVICE).context("delete")?;
    lab::wait_until(Duration::from_secs(10), "the Service is gone", || {
        let services = site.agent.lbctl_json(&["services"])?;
        Ok(services.as_array().into_iter().flatten().all(|service| service["vip"] != TARGET))
    })
}
