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
            nic.gateways = gateway.map(str::to_owned).into_iter().collect();
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
    /// IPv6 VIP of tenant a.
    pub const VIP6: &str = "2001:db8:a::34";
    /// IPv6 VIP of tenant b.
    pub const OTHER_VIP6: &str = "2001:db8:b::34";
    /// Port of the UDP service, and its NodePort.
    pub const UDP_PORTS: (u16, u16) = (5353, 31053);
    /// NodePort of `hcp-a/kube-apiserver`.
    pub const NODE_PORT: u16 = 30918;
    /// NodePort of the TCP frontends of tenant b of `dual`.
    pub const OTHER_NODE_PORT: u16 = 31918;

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

    /// Like `new`, with IPv6 beside IPv4: 2001:db8:a::/64 is tenant a's segment, 2001:db8:b::/64 tenant b's, 2001:db8:c::/64 behind
    /// tenant a's router, 2001:db8:f::/64 the hub's. The host has default routes by tenant a's router.
    pub fn dual(name: &str) -> Result<Self> {
        let bench = Self::new(name)?;
        bench.lb.ip("route add default via 192.0.2.1 dev ten0")?;
        let stations = [
            (&bench.lb, "ten0", "2001:db8:a::2", Some("2001:db8:a::1")),
            (&bench.lb, "ten1", "2001:db8:b::2", None),
            (&bench.lb, "hub0", "2001:db8:f::2", None),
            (&bench.router, "eth0", "2001:db8:a::1", None),
            (&bench.router, "eth1", "2001:db8:c::1", None),
            // The last one is the one that connections come from.
            (&bench.far, "eth0", "2001:db8:c::a", None),
            (&bench.far, "eth0", "2001:db8:c::9", Some("2001:db8:c::1")),
            (&bench.near, "eth0", "2001:db8:a::60", Some("2001:db8:a::1")),
            (&bench.other, "eth0", "2001:db8:b::60", None),
        ];
        for (station, interface, address, gateway) in stations {
            enable_v6(station, interface, &format!("{address}/64"), gateway)?;
        }
        for (place, node) in bench.nodes.iter().enumerate() {
            enable_v6(node, "eth0", &format!("{}/64", Self::node_address(place, true)), None)?;
        }
        bench.router.sysctl("net/ipv6/conf/all/forwarding", "1")?;
        Ok(bench)
    }

    /// Address of a node, by its place in `nodes`.
    pub fn node_address(place: usize, v6: bool) -> String {
        format!("{}{}", if v6 { "2001:db8:f::" } else { "10.0.0." }, 11 + place)
    }

    /// Starts a server on every node for the services of `dual_configuration`.
    pub fn serve_dual(&self) -> Result<Vec<Peer>> {
        serve_dual(&self.lab, &self.nodes)
    }

    /// `dual`, with servers on its nodes and a running agent, whose configuration is `dual_configuration` after `change`.
    pub fn dual_running(name: &str, change: impl Fn(String) -> String) -> Result<(Self, Vec<Peer>, Agent)> {
        let bench = Self::dual(name)?;
        let servers = bench.serve_dual()?;
        let agent = bench.dual_agent(&change(Self::dual_configuration("")))?;
        Ok((bench, servers, agent))
    }

    /// The TCP frontends of the first tenant of `dual_configuration`: IPv4, IPv6.
    pub fn targets() -> [String; 2] {
        [super::socket(Self::VIP, 6443), super::socket(Self::VIP6, 6443)]
    }

    /// A configuration from the file alone, for `dual`: `VIP:6443` and `VIP:5353/udp` of both tenants, in both families, on all nodes: TCP at
    /// NodePort 30918 of tenant a and 31918 of tenant b, UDP at 31053. `extra` is appended.
    pub fn dual_configuration(extra: &str) -> String {
        let frontends = |v4: &str, v6: &str, node_port: u16| {
            format!(
                "    frontends:
      - name: four
        vip: {v4}
        ports: [{{ port: 6443, target: {node_port} }}, {{ port: 5353, target: 31053, protocol: UDP }}]
        backends: [10.0.0.11, 10.0.0.12, 10.0.0.13]
      - name: six
        vip: '{v6}'
        ports: [{{ port: 6443, target: {node_port} }}, {{ port: 5353, target: 31053, protocol: UDP }}]
        backends: ['2001:db8:f::11', '2001:db8:f::12', '2001:db8:f::13']
"
            )
        };
        format!(
            "\
version: 1
hubs:
  - name: hub
    interface: hub0
    snat: [10.0.0.2, '2001:db8:f::2']
    node_cidrs: [10.0.0.0/24, '2001:db8:f::/64']
tenants:
  - name: a
    segment: {{ interface: ten0 }}
    pools: [192.0.2.32/28, '2001:db8:a::30/124']
{}  - name: b
    segment: {{ interface: ten1 }}
    pools: [198.51.100.32/28, '2001:db8:b::30/124']
{}{extra}
",
            frontends(Self::VIP, Self::VIP6, Self::NODE_PORT),
            frontends(Self::OTHER_VIP, Self::OTHER_VIP6, Self::OTHER_NODE_PORT),
        )
    }

    /// An agent for `dual` with this configuration, started, with both VIPs of tenant a answering.
    pub fn dual_agent(&self, configuration: &str) -> Result<Agent> {
        let agent = self.agent(configuration)?;
        wait_served(&self.near, &super::socket(Self::VIP6, 6443), false, Duration::from_secs(10))?;
        Ok(agent)
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

/// Two tenants that use the very same addresses, in two VLANs of one interface of the host.
///
/// ```text
/// a's client .60, router .1 ── access-a ── tagger 2003 ─┐
///                                                       ├─ trunk ─ trunk0  lb  hub0 .2 ─ hub ── n1 … n4  10.0.0.11 … .14
/// b's client .60, router .1 ── access-b ── tagger 2004 ─┘
/// ```
#[derive(Debug)]
pub struct Trunk {
    /// The lab.
    pub lab: Lab,
    /// The host that runs lbd: `trunk0` (192.168.77.2 without a tag) and `hub0`.
    pub lb: Namespace,
    /// By tenant: 192.0.2.60 and 2001:db8:a::60.
    pub clients: Vec<Namespace>,
    /// By tenant: 192.0.2.1 and 2001:db8:a::1.
    pub routers: Vec<Namespace>,
    /// By tenant: 203.0.113.9 and 2001:db8:c::9, behind the router.
    pub far: Vec<Namespace>,
    /// 192.168.77.60, on the trunk without a tag.
    pub untagged: Namespace,
    /// 10.0.0.11 … .14 and 2001:db8:f::11 … ::14.
    pub nodes: Vec<Namespace>,
    /// The switch that the host's interface is in.
    pub trunk: Namespace,
    /// The hub's switch.
    pub hub: Namespace,
    _taggers: Vec<super::Process>,
}

impl Trunk {
    /// VLAN ids of tenants a and b.
    pub const VLANS: [u16; 2] = [2003, 2004];
    /// MAC address of the host's interface in the trunk.
    pub const MAC: &str = "02:00:00:00:01:02";

    /// Lays the networks. Only the taggers run in them yet.
    pub fn new(name: &str) -> Result<Self> {
        let lab = Lab::new(name)?;
        let (trunk, hub) = (lab.switch("trunk")?, lab.switch("hub")?);
        let lb = lab.namespace("lb")?;
        lab.plug(&trunk, &lb, "trunk0", &Nic::new("192.168.77.2/24").mac(Self::MAC))?;
        lab.plug(&hub, &lb, "hub0", &Nic::new("10.0.0.2/24").address("2001:db8:f::2/64").mac("02:00:00:00:0a:02"))?;
        let untagged = lab.namespace("untagged")?;
        lab.plug(&trunk, &untagged, "eth0", &Nic::new("192.168.77.60/24"))?;
        let (mut clients, mut routers, mut far, mut taggers) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (tenant, vlan) in ["a", "b"].into_iter().zip(Self::VLANS) {
            let access = lab.switch(&format!("access-{tenant}"))?;
            let client = lab.namespace(&format!("client-{tenant}"))?;
            let nic =
                Nic::new("192.0.2.60/24").address("2001:db8:a::60/64").gateway("192.0.2.1").gateway("2001:db8:a::1");
            lab.plug(&access, &client, "eth0", &nic)?;
            let router = lab.namespace(&format!("router-{tenant}"))?;
            lab.plug(&access, &router, "eth0", &Nic::new("192.0.2.1/24").address("2001:db8:a::1/64"))?;
            let behind = lab.namespace(&format!("far-{tenant}"))?;
            let nic =
                Nic::new("203.0.113.9/24").address("2001:db8:c::9/64").gateway("203.0.113.1").gateway("2001:db8:c::1");
            let gateway = Nic::new("203.0.113.1/24").address("2001:db8:c::1/64");
            lab.cable((&behind, "eth0", &nic), (&router, "eth1", &gateway))?;
            router.sysctl("net/ipv4/ip_forward", "1")?;
            router.sysctl("net/ipv6/conf/all/forwarding", "1")?;
            taggers.push(lab.tagger(&trunk, &access, vlan)?);
            clients.push(client);
            routers.push(router);
            far.push(behind);
        }
        let mut nodes = Vec::new();
        for number in 1..=4 {
            let node = lab.namespace(&format!("n{number}"))?;
            let nic = Nic::new(&format!("10.0.0.1{number}/24")).address(&format!("2001:db8:f::1{number}/64"));
            lab.plug(&hub, &node, "eth0", &nic)?;
            nodes.push(node);
        }
        Ok(Self { lab, lb, clients, routers, far, untagged, nodes, trunk, hub, _taggers: taggers })
    }

    /// Starts a server on every node for the services of `configuration`.
    pub fn serve(&self) -> Result<Vec<Peer>> {
        serve_dual(&self.lab, &self.nodes)
    }

    /// A configuration in which both tenants have the VIPs 192.0.2.34 and 2001:db8:a::34, with 6443 and 5353/udp: tenant a on n1 and n2,
    /// tenant b on n3 and n4.
    pub fn configuration(extra: &str) -> String {
        let tenant = |name: &str, vlan: u16, nodes: [u8; 2]| {
            let [first, second] = nodes;
            format!(
                "  - name: {name}
    segment: {{ interface: trunk0, vlan: {vlan}, address: [192.0.2.2/24, '2001:db8:a::2/64'], gateway: [192.0.2.1, '2001:db8:a::1'] }}
    pools: [192.0.2.32/28, '2001:db8:a::30/124']
    frontends:
      - name: four
        vip: 192.0.2.34
        ports: [{{ port: 6443, target: 30918 }}, {{ port: 5353, target: 31053, protocol: UDP }}]
        backends: [10.0.0.{first}, 10.0.0.{second}]
      - name: six
        vip: '2001:db8:a::34'
        ports: [{{ port: 6443, target: 30918 }}, {{ port: 5353, target: 31053, protocol: UDP }}]
        backends: ['2001:db8:f::{first}', '2001:db8:f::{second}']
"
            )
        };
        format!(
            "\
version: 1
hubs:
  - name: hub
    interface: hub0
    snat: [10.0.0.2, '2001:db8:f::2']
    node_cidrs: [10.0.0.0/24, '2001:db8:f::/64']
tenants:
{}{}{extra}
",
            tenant("a", Self::VLANS[0], [11, 12]),
            tenant("b", Self::VLANS[1], [13, 14]),
        )
    }

    /// An agent with this configuration, started, with all VIPs answering.
    pub fn agent(&self, configuration: &str) -> Result<Agent> {
        let agent = Agent::new(&self.lab, &self.lb, configuration)?;
        agent.start(&self.lab)?;
        for client in &self.clients {
            for vip in [Bench::VIP, Bench::VIP6] {
                wait_served(client, &super::socket(vip, 6443), false, Duration::from_secs(10))?;
            }
        }
        Ok(agent)
    }
}

/// Gives an interface that is up an IPv6 address.
fn enable_v6(station: &Namespace, interface: &str, address: &str, gateway: Option<&str>) -> Result<()> {
    for name in ["lo", interface] {
        station.sysctl(&format!("net/ipv6/conf/{name}/disable_ipv6"), "0")?;
    }
    station.ip(&format!("address add {address} dev {interface} nodad"))?;
    match gateway {
        Some(gateway) => station.ip(&format!("route add default via {gateway} dev {interface}")),
        None => Ok(()),
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

/// Starts a server on every node, in both families: TCP at both NodePorts, UDP at the second of `Bench::UDP_PORTS`.
fn serve_dual(lab: &Lab, nodes: &[Namespace]) -> Result<Vec<Peer>> {
    let mut peers = Vec::new();
    for (place, node) in nodes.iter().enumerate() {
        let listeners: Vec<_> = [false, true]
            .map(|v6| Bench::node_address(place, v6))
            .iter()
            .flat_map(|address| {
                [
                    Listener::plain(address, Bench::NODE_PORT),
                    Listener::plain(address, Bench::OTHER_NODE_PORT),
                    Listener::udp(address, Bench::UDP_PORTS.1),
                ]
            })
            .collect();
        peers.push(Peer::serve(lab, node, node.name(), &listeners)?);
    }
    Ok(peers)
}
