//! The networks that the suites and the demo run in.
use std::time::Duration;

use anyhow::Result;

use super::{Agent, Lab, Listener, Namespace, Nic, Peer};

/// A tenant's network and a hub as a site with hosted control planes has them.
///
/// ```text
/// far 172.20.0.9 ── router .1 ─┐                              ┌─ n5 … n8  10.32.96.105 … .108
///        client 192.168.203.150 ─┤ tenant ─ eth1 .2  lb  eth0 .50 ─ hub ─┤
///   w1, w2 192.168.203.101, .102 ─┘                              └─ api  10.32.96.10
/// ```
#[derive(Debug)]
pub struct Seed {
    /// The lab.
    pub lab: Lab,
    /// The host that runs lbd: `eth0` in the hub, `eth1` at the tenant.
    pub lb: Namespace,
    /// The tenant's router.
    pub router: Namespace,
    /// A client behind the router.
    pub far: Namespace,
    /// A client in the tenant's network.
    pub client: Namespace,
    /// The tenant's workers.
    pub workers: Vec<Namespace>,
    /// The hub's nodes.
    pub nodes: Vec<Namespace>,
    /// Where the API server runs.
    pub api: Namespace,
}

impl Seed {
    /// Ports of `api-lb`, `ingress-shared-lb` and `ingress-lb` on their backends, as the page that describes the site has them.
    pub const API_PORT: u16 = 30918;
    /// HTTPS and HTTP of the hub's shared ingress.
    pub const SHARED_PORTS: (u16, u16) = (32488, 32460);
    /// HTTPS and HTTP of the tenant's own ingress.
    pub const INGRESS_PORTS: (u16, u16) = (30190, 30282);
    /// VIP of `api-lb`.
    pub const API_VIP: &str = "192.168.203.110";
    /// VIP of `ingress-shared-lb`.
    pub const SHARED_VIP: &str = "192.168.203.111";
    /// VIP of `ingress-lb`.
    pub const INGRESS_VIP: &str = "192.168.203.112";

    /// Lays the networks. Nothing runs in them yet.
    pub fn new(name: &str) -> Result<Self> {
        let lab = Lab::new(name)?;
        let hub = lab.switch("hub")?;
        let tenant = lab.switch("tenant")?;
        let lb = lab.namespace("lb")?;
        lab.plug(&hub, &lb, "eth0", &Nic::new("10.32.96.50/20"))?;
        lab.plug(&tenant, &lb, "eth1", &Nic::new("192.168.203.2/24"))?;
        let (router, far) = far_side(&lab, &tenant, "192.168.203.1/24", "172.20.0.1/24", &["172.20.0.9/24"])?;
        let station = |switch: &Namespace, name: &str, address: &str, gateway: Option<&str>| -> Result<Namespace> {
            let station = lab.namespace(name)?;
            let mut nic = Nic::new(address);
            nic.gateway = gateway.map(str::to_owned);
            lab.plug(switch, &station, "eth0", &nic)?;
            Ok(station)
        };
        let gateway = Some("192.168.203.1");
        let client = station(&tenant, "client", "192.168.203.150/24", gateway)?;
        let workers = vec![
            station(&tenant, "w1", "192.168.203.101/24", gateway)?,
            station(&tenant, "w2", "192.168.203.102/24", gateway)?,
        ];
        let mut nodes = Vec::new();
        for number in 5..=8 {
            nodes.push(station(&hub, &format!("n{number}"), &format!("10.32.96.10{number}/20"), None)?);
        }
        let api = station(&hub, "api", "10.32.96.10/20", None)?;
        Ok(Self { lab, lb, router, far, client, workers, nodes, api })
    }

    /// Address of a node, by its place in `nodes`.
    pub fn node_address(place: usize) -> String {
        format!("10.32.96.{}", 105 + place)
    }

    /// Starts a server on every node, for the NodePorts of `api-lb` (TLS) and `ingress-shared-lb`.
    pub fn serve_nodes(&self) -> Result<Vec<Peer>> {
        let mut peers = Vec::new();
        for (place, node) in self.nodes.iter().enumerate() {
            let address = Self::node_address(place);
            let listeners = [
                Listener::tls(&address, Self::API_PORT),
                Listener::tls(&address, Self::SHARED_PORTS.0),
                Listener::plain(&address, Self::SHARED_PORTS.1),
            ];
            peers.push(Peer::serve(&self.lab, node, node.name(), &listeners)?);
        }
        Ok(peers)
    }

    /// Starts a server on every worker.
    pub fn serve_workers(&self) -> Result<Vec<Peer>> {
        let mut peers = Vec::new();
        for (place, worker) in self.workers.iter().enumerate() {
            let address = format!("192.168.203.{}", 101 + place);
            let listeners =
                [Listener::tls(&address, Self::INGRESS_PORTS.0), Listener::plain(&address, Self::INGRESS_PORTS.1)];
            peers.push(Peer::serve(&self.lab, worker, worker.name(), &listeners)?);
        }
        Ok(peers)
    }

    /// A configuration that serves all three roles from the file alone.
    pub fn file_configuration() -> String {
        Self::configuration_of(
            "",
            "      - name: api-lb
        vip: 192.168.203.110
        ports: [{ port: 6443, target: 30918 }]
        backends: [10.32.96.105, 10.32.96.106, 10.32.96.107, 10.32.96.108]
      - name: ingress-shared-lb
        vip: 192.168.203.111
        ports: [{ port: 443, target: 32488 }, { port: 80, target: 32460 }]
        backends: [10.32.96.105, 10.32.96.106, 10.32.96.107, 10.32.96.108]",
            "",
        )
    }

    /// A configuration that learns `api-lb` (claimed) and `ingress-shared-lb` (reserved) from Kubernetes.
    pub fn kubernetes_configuration(kubeconfig: &std::path::Path) -> String {
        Self::configuration_of(
            &format!("    kubernetes: {{ kubeconfig: {} }}\n", kubeconfig.display()),
            "      - name: ingress-shared-lb
        service: openshift-ingress/router-nodeport-tenant-a
        vip: 192.168.203.111
        ports: [443, 80]",
            "    claim:\n      - namespaces: [clusters-tenant-a]\n",
        )
    }

    fn configuration_of(hub: &str, frontends: &str, tenant: &str) -> String {
        format!(
            "\
version: 1
hubs:
  - name: hub
    interface: eth0
    snat: [10.32.96.50]
    node_cidrs: [10.32.96.0/20]
{hub}tenants:
  - name: tenant-a
    segment: {{ interface: eth1, address: 192.168.203.2/24, gateway: 192.168.203.1 }}
    pools: [192.168.203.110-192.168.203.119]
{tenant}    frontends:
{frontends}
      - name: ingress-lb
        vip: 192.168.203.112
        ports: [{{ port: 443, target: 30190 }}, {{ port: 80, target: 30282 }}]
        backends: [192.168.203.101, 192.168.203.102]
        via: tenant
        affinity: source
"
        )
    }

    /// Waits until a VIP answers a client.
    pub fn wait_served(&self, target: &str, tls: bool, limit: Duration) -> Result<()> {
        wait_served(&self.client, target, tls, limit)
    }
}

/// The bench that the acceptance cases are written for: two tenants, a hub, three nodes, fixed MAC addresses.
#[derive(Debug)]
pub struct Bench {
    /// The lab.
    pub lab: Lab,
    /// The host that runs lbd: `ten0`, `ten1`, `hub0`.
    pub lb: Namespace,
    /// 192.0.2.1, tenant a's gateway.
    pub router: Namespace,
    /// 203.0.113.9 and .10, behind the router.
    pub far: Namespace,
    /// 192.0.2.60, in tenant a's segment.
    pub near: Namespace,
    /// 198.51.100.60, in tenant b's segment.
    pub other: Namespace,
    /// 10.0.0.11 … .13.
    pub nodes: Vec<Namespace>,
    /// The switches of tenant a, tenant b and the hub.
    pub switches: Vec<Namespace>,
    /// Where the API server runs: 10.0.0.20.
    pub api: Namespace,
}

impl Bench {
    /// VIP of tenant a.
    pub const VIP: &str = "192.0.2.34";
    /// VIP of tenant b.
    pub const OTHER_VIP: &str = "198.51.100.34";
    /// NodePort of `hcp-a/kube-apiserver`.
    pub const NODE_PORT: u16 = 30918;

    /// Lays the networks. Nothing runs in them yet.
    pub fn new(name: &str) -> Result<Self> {
        Self::with_mtu(name, 1500)
    }

    /// Like `new`, with another MTU on the host's interfaces and everything that they are cabled to.
    pub fn with_mtu(name: &str, mtu: u32) -> Result<Self> {
        let lab = Lab::new(name)?;
        let (ten0, ten1, hub) = (lab.switch("ten0")?, lab.switch("ten1")?, lab.switch("hub0")?);
        let lb = lab.namespace("lb")?;
        lab.plug(&ten0, &lb, "ten0", &Nic::new("192.0.2.2/24").mac("02:00:00:00:01:02").mtu(mtu))?;
        lab.plug(&ten1, &lb, "ten1", &Nic::new("198.51.100.2/24").mac("02:00:00:00:02:02").mtu(mtu))?;
        lab.plug(&hub, &lb, "hub0", &Nic::new("10.0.0.2/24").mac("02:00:00:00:0a:02").mtu(mtu))?;
        let (router, far) =
            far_side(&lab, &ten0, "192.0.2.1/24", "203.0.113.1/24", &["203.0.113.9/24", "203.0.113.10/24"])?;
        router.ip("link set eth0 address 02:00:00:00:01:01")?;
        let near = lab.namespace("near")?;
        lab.plug(&ten0, &near, "eth0", &Nic::new("192.0.2.60/24").gateway("192.0.2.1"))?;
        let other = lab.namespace("other")?;
        lab.plug(&ten1, &other, "eth0", &Nic::new("198.51.100.60/24"))?;
        let mut nodes = Vec::new();
        for number in 1..=3 {
            let node = lab.namespace(&format!("n{number}"))?;
            let nic = Nic::new(&format!("10.0.0.1{number}/24")).mac(&format!("02:00:00:00:0a:{:02x}", 10 + number));
            lab.plug(&hub, &node, "eth0", &nic)?;
            nodes.push(node);
        }
        let api = lab.namespace("api")?;
        lab.plug(&hub, &api, "eth0", &Nic::new("10.0.0.20/24"))?;
        Ok(Self { lab, lb, router, far, near, other, nodes, switches: vec![ten0, ten1, hub], api })
    }

    /// Starts a server on every node, on these ports.
    pub fn serve_nodes(&self, ports: &[u16]) -> Result<Vec<Peer>> {
        let mut peers = Vec::new();
        for (place, node) in self.nodes.iter().enumerate() {
            let address = format!("10.0.0.{}", 11 + place);
            let listeners: Vec<_> = ports.iter().map(|&port| Listener::plain(&address, port)).collect();
            peers.push(Peer::serve(&self.lab, node, node.name(), &listeners)?);
        }
        Ok(peers)
    }

    /// A configuration from the file alone: `VIP:6443` of tenant a and of tenant b on all nodes at NodePort 30918. `extra` is appended, e.g.
    /// `datapath: { mode: generic }`.
    pub fn configuration(extra: &str) -> String {
        format!(
            "\
version: 1
hubs:
  - name: hub
    interface: hub0
    snat: [10.0.0.2]
    node_cidrs: [10.0.0.0/24]
tenants:
  - name: a
    segment: {{ interface: ten0, address: 192.0.2.2/24, gateway: 192.0.2.1 }}
    pools: [192.0.2.32/28]
    frontends:
      - name: kube-apiserver
        vip: 192.0.2.34
        ports: [{{ port: 6443, target: 30918 }}]
        backends: [10.0.0.11, 10.0.0.12, 10.0.0.13]
  - name: b
    segment: {{ interface: ten1, address: 198.51.100.2/24 }}
    pools: [198.51.100.32/28]
    frontends:
      - name: kube-apiserver
        vip: 198.51.100.34
        ports: [{{ port: 6443, target: 30918 }}]
        backends: [10.0.0.11, 10.0.0.12, 10.0.0.13]
{extra}
"
        )
    }

    /// An agent with this configuration, started, with the VIP of tenant a answering.
    pub fn agent(&self, configuration: &str) -> Result<Agent> {
        let agent = Agent::new(&self.lab, &self.lb, configuration)?;
        agent.start(&self.lab)?;
        wait_served(&self.near, &format!("{}:6443", Self::VIP), false, Duration::from_secs(10))?;
        Ok(agent)
    }
}

/// A router into a switch, and a station behind it.
fn far_side(
    lab: &Lab,
    switch: &Namespace,
    router_address: &str,
    far_gateway: &str,
    far_addresses: &[&str],
) -> Result<(Namespace, Namespace)> {
    let router = lab.namespace("router")?;
    let far = lab.namespace("far")?;
    lab.plug(switch, &router, "eth0", &Nic::new(router_address))?;
    let gateway = far_gateway.split('/').next().unwrap_or(far_gateway);
    let mut nic = Nic::default().gateway(gateway);
    nic.addresses = far_addresses.iter().map(|&address| address.to_owned()).collect();
    lab.cable((&far, "eth0", &nic), (&router, "eth1", &Nic::new(far_gateway)))?;
    router.sysctl("net/ipv4/ip_forward", "1")?;
    Ok((router, far))
}

fn wait_served(client: &Namespace, target: &str, tls: bool, limit: Duration) -> Result<()> {
    super::wait_until(limit, &format!("{target} answers"), || {
        super::get(client, target, tls)?;
        Ok(true)
    })
}
