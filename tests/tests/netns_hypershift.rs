//! What happens to hosted control planes on the hub: a stand-in for HyperShift's operator, and NodePorts that change tenants; with real packets.
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lbd_tests::apiserver;
use lbd_tests::lab::{self, Agent, Api, Bench, Hold, Listener, Namespace, Peer};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(10);
const KAS: &str = "kube-apiserver";

fn configuration(kubernetes: &str, pool: &str) -> String {
    format!(
        "\
version: 1
hubs:
  - name: hub
    interface: hub0
    snat: [10.0.0.2]
    node_cidrs: [10.0.0.0/24]
    kubernetes: {{ {kubernetes} }}
tenants:
  - name: a
    segment: {{ interface: ten0, address: 192.0.2.2/24, gateway: 192.0.2.1 }}
    pools: [{pool}]
    claim: [{{ namespaces: [hcp-a, hcp-old] }}]
  - name: b
    segment: {{ interface: ten1, address: 198.51.100.2/24 }}
    pools: [198.51.100.32/28]
    claim: [{{ namespaces: [hcp-b] }}]
"
    )
}

struct Site {
    bench: Bench,
    api: Api,
    agent: Agent,
}

impl Site {
    fn new(name: &str, pool: &str, words: &str) -> Result<Self> {
        let bench = Bench::new(name)?;
        let api = Api::start(&bench.lab, &bench.api, "10.0.0.20:6443")?;
        for (place, node) in bench.nodes.iter().enumerate() {
            api.create(&apiserver::node(node.name(), &format!("10.0.0.{}", 11 + place)))?;
        }
        let kubernetes = format!("kubeconfig: {}{words}", api.kubeconfig().display());
        let agent = Agent::new(&bench.lab, &bench.lb, &configuration(&kubernetes, pool))?;
        agent.start(&bench.lab)?;
        Ok(Self { bench, api, agent })
    }

    /// Servers of a tenant on all nodes at the NodePort.
    fn serve(&self, tenant: &str) -> Result<Vec<Peer>> {
        let mut peers = Vec::new();
        for (place, node) in self.bench.nodes.iter().enumerate() {
            let listener = Listener::plain(&format!("10.0.0.{}", 11 + place), Bench::NODE_PORT);
            peers.push(Peer::serve(&self.bench.lab, node, &format!("{tenant}-{}", node.name()), &[listener])?);
        }
        Ok(peers)
    }

    fn publish(&self, namespace: &str) -> Result<()> {
        let service = apiserver::service(namespace, KAS, "LoadBalancer", &[(6443, Bench::NODE_PORT)]);
        self.api.create(&service).map(drop)
    }

    fn target(&self, namespace: &str) -> Result<String> {
        Ok(format!("{}:6443", self.api.wait_address(namespace, KAS, LIMIT)?))
    }

    /// Waits until servers of a tenant, and no others, answer at a VIP.
    fn wait_served_by(client: &Namespace, target: &str, tenant: &str) -> Result<()> {
        lab::wait_until(LIMIT * 2, &format!("{target} is served by {tenant}"), || {
            let report = lab::load(client, target, false, 10)?;
            Ok(report.failed == 0 && report.servers.keys().all(|server| server.starts_with(tenant)))
        })
    }

    /// Asks at the old tenant's VIP for a while: nobody of the new tenant may answer.
    fn assert_apart(&self, target: &str) -> Result<()> {
        // An address that is withdrawn does not refuse: nothing answers there.
        for _ in 0..6 {
            let report = lab::load_with(&self.bench.near, target, false, 5, &["--limit", "1"])?;
            ensure!(report.servers.keys().all(|server| !server.starts_with("b-")), "{target} reaches {report:?}");
            ensure!(report.failed == report.connections, "{target} is still served: {report:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn assert_no_flows(&self, target: &str) -> Result<()> {
        let vip = target.split(':').next().unwrap_or_default();
        lab::wait_until(LIMIT, "no flow of the old tenant is left", || {
            let words = ["flows", "--vip", vip, "--state", "established"];
            Ok(self.agent.lbctl_json(&words)?.as_array().is_some_and(Vec::is_empty))
        })
    }

    /// The Service of tenant a goes, and its NodePort is at once one of tenant b's.
    fn recycle(&self, old: Vec<Peer>) -> Result<Vec<Peer>> {
        self.api.delete("Service", "hcp-a", KAS)?;
        self.publish("hcp-b")?;
        drop(old);
        self.serve("b")
    }
}

#[test]
#[ignore = "needs root"]
fn a_recycled_node_port_leads_nobody_astray_while_the_agent_lives() -> Result<()> {
    let site = Site::new("recycled", "192.0.2.32/28", "")?;
    let old = site.serve("a")?;
    site.publish("hcp-a")?;
    let target = site.target("hcp-a")?;
    Site::wait_served_by(&site.bench.near, &target, "a-")?;
    let hold = Hold::start(&site.bench.lab, &site.bench.near, &target, false, 20, 10)?;
    let _new = site.recycle(old)?;
    site.assert_apart(&target)?;
    site.assert_no_flows(&target)?;
    Site::wait_served_by(&site.bench.other, &site.target("hcp-b")?, "b-")?;
    site.assert_apart(&target)?;
    let report = hold.finish()?;
    ensure!(report.wrong == 0 && report.reset + report.lost == report.connections, "{report:?}");
    Ok(())
}

/// What nobody watches cannot be known: but once the agent is back, the first thing is that the old tenant's flows end.
#[test]
#[ignore = "needs root"]
fn a_recycled_node_port_leads_nobody_astray_once_a_dead_agent_is_back() -> Result<()> {
    let site = Site::new("recycled2", "192.0.2.32/28", "")?;
    let old = site.serve("a")?;
    site.publish("hcp-a")?;
    let target = site.target("hcp-a")?;
    Site::wait_served_by(&site.bench.near, &target, "a-")?;
    // The last state is on disk every few seconds.
    std::thread::sleep(Duration::from_secs(6));
    site.agent.kill();
    let _new = site.recycle(old)?;
    // The datapath goes on with what it knows.
    let hold = Hold::start(&site.bench.lab, &site.bench.near, &target, false, 20, 10)?;
    site.agent.start(&site.bench.lab)?;
    Site::wait_served_by(&site.bench.other, &site.target("hcp-b")?, "b-")?;
    site.assert_no_flows(&target)?;
    site.assert_apart(&target)?;
    let report = hold.finish()?;
    ensure!(report.reset + report.lost == report.connections, "connections into the new tenant live on: {report:?}");
    Ok(())
}

/// With `max_blind` a cluster that cannot be seen for long gets no new connections: whose NodePort it is now is not known.
#[test]
#[ignore = "needs root"]
fn a_recycled_node_port_leads_nobody_astray_while_the_agent_is_blind() -> Result<()> {
    let site = Site::new("recycled3", "192.0.2.32/28", ", max_blind: 20s")?;
    let old = site.serve("a")?;
    site.publish("hcp-a")?;
    let target = site.target("hcp-a")?;
    Site::wait_served_by(&site.bench.near, &target, "a-")?;
    site.bench.lb.ip("route add blackhole 10.0.0.20/32")?;
    lab::wait_until(Duration::from_mins(2), "new connections are refused", || {
        let report = lab::load(&site.bench.near, &target, false, 5)?;
        Ok(report.failed == report.connections)
    })?;
    let status = site.agent.lbctl(&["status"])?;
    ensure!(status.contains("Blind"), "{status}");
    let _new = site.recycle(old)?;
    site.assert_apart(&target)?;
    site.bench.lb.ip("route del blackhole 10.0.0.20/32")?;
    lab::wait_until(Duration::from_mins(2), "the new tenant is served", || {
        let service = site.api.get("Service", "hcp-b", KAS)?;
        let address = service.pointer("/status/loadBalancer/ingress/0/ip").and_then(Value::as_str);
        let Some(address) = address else { return Ok(false) };
        let report = lab::load(&site.bench.other, &format!("{address}:6443"), false, 5)?;
        Ok(report.failed == 0 && report.servers.keys().all(|server| server.starts_with("b-")))
    })?;
    site.assert_no_flows(&target)?;
    site.assert_apart(&target)
}

// ---- HyperShift ----

/// Pods of a hosted kube-apiserver, as their nodes' NodePort shows them: `GET /healthz` is answered with `ok`.
struct Pods {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Pods {
    fn roll_out(bench: &Bench, node_port: u16) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for (place, node) in bench.nodes.iter().enumerate() {
            let address = format!("10.0.0.{}:{node_port}", 11 + place);
            let listener = node.run(|| TcpListener::bind(&address).with_context(|| format!("listen on {address}")))?;
            listener.set_nonblocking(true)?;
            let stop = Arc::clone(&stop);
            threads.push(std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    match listener.accept() {
                        Ok((stream, _)) => drop(answer(stream)),
                        Err(_) => std::thread::sleep(Duration::from_millis(5)),
                    }
                }
            }));
        }
        Ok(Self { stop, threads })
    }
}

impl Drop for Pods {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn answer(mut stream: TcpStream) -> Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    let mut request = [0; 1024];
    let length = stream.read(&mut request)?;
    let good = request[..length].starts_with(b"GET /healthz ");
    let line = if good { "200 OK" } else { "404 Not Found" };
    write!(stream, "HTTP/1.1 {line}\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok").context("answer")
}

/// HyperShift's operator, as far as a load balancer meets it.
struct Operator<'a> {
    site: &'a Site,
    namespace: &'static str,
}

impl Operator<'_> {
    fn service(&self) -> Result<Value> {
        self.site.api.get("Service", self.namespace, KAS)
    }

    /// `status.loadBalancer.ingress[0]` of the Service, which it waits for before it rolls anything out.
    fn address(&self) -> Result<Option<String>> {
        let service = self.service()?;
        Ok(service.pointer("/status/loadBalancer/ingress/0/ip").and_then(Value::as_str).map(str::to_owned))
    }

    /// What the HostedCluster shows while there is no address: Warning Events of the Service, by its UID.
    fn message(&self) -> Result<Vec<String>> {
        let uid = self.service()?["metadata"]["uid"].clone();
        let events = self.site.api.list("Event", self.namespace)?;
        let ours = events.iter().filter(|event| event["involvedObject"]["uid"] == uid && event["type"] == "Warning");
        Ok(ours.map(|event| format!("{}: {}", event["reason"], event["message"])).collect())
    }

    /// `GET /healthz` on the address; anything but 200 makes `Available=False`, with reason `KASLoadBalancerNotReachable`.
    fn available(&self, address: &str) -> Result<bool> {
        self.site.bench.near.run(|| {
            let Ok(place) = format!("{address}:6443").parse() else { return Ok(false) };
            let Ok(mut stream) = TcpStream::connect_timeout(&place, Duration::from_secs(2)) else { return Ok(false) };
            stream.set_read_timeout(Some(Duration::from_secs(2)))?;
            write!(stream, "GET /healthz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
            let mut text = String::new();
            let read = stream.read_to_string(&mut text);
            Ok(read.is_ok() && text.starts_with("HTTP/1.1 200 ") && text.ends_with("ok"))
        })
    }
}

/// The whole story of a HostedCluster with `APIServer: LoadBalancer`: its Service comes first; no address, no pods; while there is none, the
/// reason is to be read in Events; then pods, then the probe of the address.
#[test]
#[ignore = "needs root"]
fn b45_a_hosted_cluster_comes_up_behind_its_load_balancer() -> Result<()> {
    let hosted: Vec<Value> = include_str!("../fixtures/services/s14-hostedcluster-services.yaml")
        .split("\n---\n")
        .map(|text| serde_saphyr::from_str(text).context("s14"))
        .collect::<Result<_>>()?;
    ensure!(hosted[0]["spec"]["services"][0]["servicePublishingStrategy"]["type"] == "LoadBalancer", "{}", hosted[0]);
    let mut manifest: Value = serde_saphyr::from_str(include_str!("../fixtures/services/s01-kas-lb.yaml"))?;
    manifest["metadata"]["namespace"] = json!("hcp-a");
    // `allowedCIDRBlocks` is empty.
    manifest["spec"].as_object_mut().context("spec")?.remove("loadBalancerSourceRanges");
    let site = Site::new("hypershift", "192.0.2.34-192.0.2.34", "")?;
    let operator = Operator { site: &site, namespace: "hcp-a" };

    // An older hosted cluster has the only address.
    site.api.create(&apiserver::service("hcp-old", "router", "LoadBalancer", &[(443, 0)]))?;
    site.api.wait_address("hcp-old", "router", LIMIT)?;
    site.api.create(&manifest)?;
    let told = lab::eventually(LIMIT, "the reason is to be read", || {
        let message = operator.message()?;
        Ok((!message.is_empty()).then_some(message))
    })?;
    ensure!(told.len() == 1 && told[0].contains("PoolExhausted") && told[0].contains("192.0.2.34"), "{told:?}");
    ensure!(operator.address()?.is_none());
    let condition = lab::eventually(LIMIT, "the condition says it too", || {
        Ok(operator.service()?.pointer("/status/conditions/0").cloned())
    })?;
    ensure!(condition["status"] == "False" && condition["reason"] == "PoolExhausted", "{condition}");

    // It goes: the address comes at once, though nothing is there that could be healthy.
    site.api.delete("Service", "hcp-old", "router")?;
    let address = lab::eventually(Duration::from_secs(5), "the Service has an address", || operator.address())?;
    ensure!(address == "192.0.2.34", "{address}");
    ensure!(!operator.available(&address)?, "somebody answers before there are pods");
    let node_port = operator.service()?["spec"]["ports"][0]["nodePort"].as_u64().context("nodePort")?;
    let pods = Pods::roll_out(&site.bench, node_port as u16)?;
    lab::wait_until(LIMIT, "GET /healthz on the address", || operator.available(&address))?;
    let condition = lab::eventually(LIMIT, "the condition is true", || {
        let found = operator.service()?.pointer("/status/conditions/0").cloned();
        Ok(found.filter(|condition| condition["status"] == "True"))
    })?;
    ensure!(condition["type"] == lbd::source::PROGRAMMED, "{condition}");

    // The operator reconciles: it writes its own fields, and nothing of ours moves.
    let annotations = &operator.service()?["metadata"]["annotations"];
    ensure!(annotations["external-dns.alpha.kubernetes.io/hostname"] == "api.tenant-a.example", "{annotations}");
    let reconciled = json!({"spec": {"loadBalancerSourceRanges": null, "selector": {"app": "kube-apiserver"}}});
    site.api.patch("Service", "hcp-a", KAS, &reconciled)?;
    ensure!(operator.available(&address)? && operator.address()?.as_ref() == Some(&address));

    // All pods restart: the address stays, and the probe finds them again.
    drop(pods);
    lab::wait_until(LIMIT, "the probe fails", || Ok(!operator.available(&address)?))?;
    ensure!(operator.address()?.as_ref() == Some(&address), "the address was taken away with the pods");
    let _pods = Pods::roll_out(&site.bench, node_port as u16)?;
    lab::wait_until(LIMIT * 2, "GET /healthz again", || operator.available(&address))
}
