//! The benchmark of the control plane: how long after a change in the cluster the kernel's maps hold it.
//!
//! The agent runs as it does anywhere, attached to two NICs in a network namespace, against the test API server; its pinned maps are read
//! from outside. Every node answers on every port, so that probes are what they are in a healthy cluster.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use aya::maps::{Array, HashMap, Map, MapData};
use lbd_common::abi::{self, names};
use lbd_common::packet::TCP;
use serde::Serialize;
use serde_json::json;

use crate::apiserver::{self, Client, Handle, node, service};
use crate::lab::{Agent, Lab, Listener, Namespace, Nic, Peer};

/// Changes of each kind; the median counts.
const ROUNDS: u32 = 5;
/// Longest wait for anything.
const LIMIT: Duration = Duration::from_mins(5);
/// Port of every Service.
const PORT: u16 = 6443;
/// NodePort of the first Service; the others follow.
const NODE_PORTS: u16 = 20_000;
/// Namespace of the Services.
const SERVICES: &str = "clusters-tenant-a";

/// What `--json` writes.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The cases.
    pub cases: Vec<Case>,
    /// The sizes.
    pub sizes: Vec<Size>,
}

/// A kind of change at one size.
#[derive(Debug, Serialize)]
pub struct Case {
    /// Name.
    pub name: String,
    /// From the request that changes the object until the maps hold it, milliseconds; the median.
    pub ms: f64,
    /// Map elements written or deleted for one change; the median.
    pub map_writes: u64,
}

/// What else is known of one size.
#[derive(Debug, Serialize)]
pub struct Size {
    /// Services.
    pub services: u32,
    /// Nodes.
    pub nodes: u32,
    /// From the start of the agent, without any state, until the maps hold every Service, milliseconds.
    pub cold_start_ms: f64,
    /// Most memory that the agent had (`VmHWM`), MiB.
    pub memory_mib: f64,
    /// Map elements written while every node sent a heartbeat.
    pub heartbeat_map_writes: u64,
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Case { name, ms, map_writes } in &self.cases {
            writeln!(formatter, "{name:<22} {ms:>8.1} ms {map_writes:>6} map writes")?;
        }
        for Size { services, nodes, cold_start_ms, memory_mib, heartbeat_map_writes } in &self.sizes {
            writeln!(
                formatter,
                "{services} Services, {nodes} nodes: cold start {cold_start_ms:.0} ms, {memory_mib:.0} MiB, {heartbeat_map_writes} map \
                 writes for heartbeats"
            )?;
        }
        Ok(())
    }
}

/// Runs both sizes.
pub fn control() -> Result<Report> {
    let mut report = Report { cases: Vec::new(), sizes: Vec::new() };
    for (label, services, nodes) in [("10", 10, 3), ("10k", 10_000, 500)] {
        let site = Site::new(label, services, nodes)?;
        let api = site.api.clone();
        // Threads that the runtime makes are where this one is.
        let (cases, size) = api.run(|| {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .context("cannot make a runtime")?
                .block_on(site.measure(label))
        })?;
        report.cases.extend(cases);
        report.sizes.push(size);
    }
    Ok(report)
}

/// A hub with many nodes, and a tenant.
struct Site {
    lab: Lab,
    lb: Namespace,
    api: Namespace,
    _nodes: Peer,
    services: u32,
    count: u32,
}

/// Address of a node.
fn node_address(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 32, 16, 1).to_bits() + number)
}

/// Address that a Service asks for.
fn vip(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(172, 16, 64, 1).to_bits() + number)
}

fn service_name(number: u32) -> String {
    format!("s{number}")
}

fn load_balancer(number: u32) -> serde_json::Value {
    let mut object = service(SERVICES, &service_name(number), "LoadBalancer", &[(PORT, NODE_PORTS + number as u16)]);
    object["metadata"]["annotations"] = json!({"lbd.tenantedge.io/vip": vip(number).to_string()});
    object
}

fn a_node(number: u32) -> serde_json::Value {
    node(&format!("n{number}"), &node_address(number).to_string())
}

impl Site {
    fn new(label: &str, services: u32, count: u32) -> Result<Self> {
        let lab = Lab::new(&format!("control-{label}"))?;
        let hub = lab.switch("hub")?;
        let tenant = lab.switch("tenant")?;
        let lb = lab.namespace("lb")?;
        lab.plug(&hub, &lb, "eth0", &Nic::new("10.32.0.50/16"))?;
        lab.plug(&tenant, &lb, "eth1", &Nic::new("172.16.0.2/16"))?;
        let api = lab.namespace("api")?;
        lab.plug(&hub, &api, "eth0", &Nic::new("10.32.0.10/16"))?;
        let nodes = lab.namespace("nodes")?;
        lab.plug(&hub, &nodes, "eth0", &Nic::new("10.32.0.11/16"))?;
        // One more than there are, to be added.
        let addresses: Vec<_> =
            (0..=count).map(|number| format!("address add {}/16 dev eth0", node_address(number))).collect();
        nodes.ip_batch(&addresses.join("\n"))?;
        nodes.shell(
            "nft add table ip every && nft 'add chain ip every port { type nat hook prerouting priority dstnat; }' && nft add rule ip \
             every port tcp dport != 30000 redirect to :30000",
        )?;
        let server = Peer::serve(&lab, &nodes, "nodes", &[Listener::plain("0.0.0.0", 30_000)])?;
        Ok(Self { lab, lb, api, _nodes: server, services, count })
    }

    async fn measure(&self, label: &str) -> Result<(Vec<Case>, Size)> {
        let options = apiserver::Options { listen: ([10, 32, 0, 10], 6443).into(), ..apiserver::Options::default() };
        let server = apiserver::start(options).await?;
        server.set_node_port_range(NODE_PORTS, 60_000);
        for number in 0..self.count {
            server.create(&a_node(number))?;
        }
        server.create(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SERVICES}}))?;
        for number in 0..self.services {
            server.create(&load_balancer(number))?;
        }
        let kubeconfig = self.lab.directory().join("kubeconfig");
        server.write_kubeconfig(&kubeconfig)?;
        let configuration = format!(
            "\
version: 1
hubs:
  - name: hub
    interface: eth0
    node_cidrs: [10.32.0.0/16]
    kubernetes: {{ kubeconfig: {}, allow_insecure: true }}
tenants:
  - name: tenant-a
    segment: {{ interface: eth1, gateway: 172.16.0.1 }}
    pools: [172.16.64.0/18]
    claim: [{{ namespaces: [{SERVICES}] }}]
",
            kubeconfig.display()
        );
        let agent = Agent::new(&self.lab, &self.lb, &configuration)?;
        let begun = Instant::now();
        agent.start(&self.lab)?;
        let run = Run { site: self, agent, maps: self.lb.outside(format!("/sys/fs/bpf/lbd/v{}", abi::ABI_VERSION)) };
        until("every Service is in the maps", || Ok(run.frontends()? == self.services as usize))?;
        let cold_start_ms = begun.elapsed().as_secs_f64() * 1e3;
        until("every Service has its status", || run.all_written(&server))?;
        let client = server.client()?;
        let mut cases = vec![Case::of("nodeport_change", label, run.nodeport_changes(&client).await?)];
        let (removed, added) = run.node_changes(&client).await?;
        cases.push(Case::of("node_remove", label, removed));
        cases.push(Case::of("node_add", label, added));
        let (added, deleted) = run.service_changes(&client).await?;
        cases.push(Case::of("service_add", label, added));
        cases.push(Case::of("service_delete", label, deleted));
        let heartbeat_map_writes = run.heartbeats(&client).await?;
        let memory_mib = run.memory_mib()?;
        run.agent.stop()?;
        let size = Size { services: self.services, nodes: self.count, cold_start_ms, memory_mib, heartbeat_map_writes };
        Ok((cases, size))
    }
}

impl Case {
    fn of(name: &str, label: &str, mut measured: Vec<(f64, u64)>) -> Self {
        let middle = measured.len() / 2;
        measured.sort_by(|left, right| left.0.total_cmp(&right.0));
        let ms = measured[middle].0;
        measured.sort_by_key(|&(_, writes)| writes);
        Self { name: format!("{name}_{label}"), ms, map_writes: measured[middle].1 }
    }
}

/// An agent that is measured.
struct Run<'a> {
    site: &'a Site,
    agent: Agent,
    maps: PathBuf,
}

impl Run<'_> {
    fn open(&self, name: &str) -> Result<MapData> {
        let path = self.maps.join(name);
        MapData::from_pin(&path).with_context(|| format!("cannot open {}", path.display()))
    }

    fn frontends(&self) -> Result<usize> {
        let map = HashMap::<_, abi::FrontendKey, abi::Frontend>::try_from(Map::HashMap(self.open(names::FRONTENDS)?))?;
        Ok(map.keys().collect::<Result<Vec<_>, _>>()?.len())
    }

    fn frontend(&self, number: u32) -> Result<Option<abi::Frontend>> {
        let map = HashMap::<_, abi::FrontendKey, abi::Frontend>::try_from(Map::HashMap(self.open(names::FRONTENDS)?))?;
        let segments = Array::<_, abi::Segment>::try_from(Map::Array(self.open(names::SEGMENTS)?))?;
        let tenant_segments = (0..2u32)
            .map(|nic| segments.get(&abi::segment_index(nic, 0), 0))
            .collect::<Result<Vec<_>, _>>()?
            .into_iter()
            .filter(|segment| segment.flags & abi::SEGMENT_TENANT != 0);
        for segment in tenant_segments {
            let key = abi::FrontendKey {
                vip: abi::mapped(vip(number).octets()),
                port_be: PORT.to_be(),
                segment: segment.id,
                protocol: TCP,
                pad: [0; 3],
            };
            match map.get(&key, 0) {
                Ok(frontend) => return Ok(Some(frontend)),
                Err(aya::maps::MapError::KeyNotFound) => {}
                Err(error) => bail!("cannot read {}: {error}", names::FRONTENDS),
            }
        }
        Ok(None)
    }

    /// Addresses of the backends in the lookup table of a Service.
    fn table(&self, number: u32) -> Result<BTreeSet<IpAddr>> {
        let frontend = self.frontend(number)?.with_context(|| format!("{} has no frontend", service_name(number)))?;
        let maglev = Array::<_, abi::MaglevChunk>::try_from(Map::Array(self.open(names::MAGLEV)?))?;
        let backends = Array::<_, abi::Backend>::try_from(Map::Array(self.open(names::BACKENDS)?))?;
        let mut ids = BTreeSet::new();
        for slot in 0..frontend.table_size.div_ceil(abi::CHUNK_SLOTS) {
            let chunk = maglev.get(&(frontend.table + slot), 0)?;
            let left = (frontend.table_size - slot * abi::CHUNK_SLOTS).min(abi::CHUNK_SLOTS) as usize;
            ids.extend(bytemuck::cast_slice::<_, u16>(bytemuck::bytes_of(&chunk))[..left].iter().copied());
        }
        let mut addresses = BTreeSet::new();
        for id in ids.into_iter().filter(|&id| id != 0) {
            addresses.insert(IpAddr::from(backends.get(&u32::from(id), 0)?.address).to_canonical());
        }
        Ok(addresses)
    }

    /// Whether all statuses have been written.
    fn all_written(&self, server: &Handle) -> Result<bool> {
        let written = server.requests_of("patch", "/status").len();
        ensure!(written >= self.site.services as usize, "{written} statuses are written");
        Ok(true)
    }

    fn map_writes(&self) -> Result<u64> {
        let text = self.site.lb.run(|| {
            use std::io::{Read as _, Write as _};
            let mut stream = std::net::TcpStream::connect("127.0.0.1:9474")?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })?;
        text.lines()
            .find_map(|line| line.strip_prefix("lbd_map_writes_total "))
            .and_then(|value| value.parse().ok())
            .context("the metrics have no lbd_map_writes_total")
    }

    /// Map writes since there were `before`, after the dust has settled.
    fn written_since(&self, before: u64) -> Result<u64> {
        let mut last = self.map_writes()?;
        loop {
            std::thread::sleep(Duration::from_millis(300));
            let now = self.map_writes()?;
            if now == last {
                return Ok(now - before);
            }
            last = now;
        }
    }

    async fn nodeport_changes(&self, client: &Client) -> Result<Vec<(f64, u64)>> {
        let mut measured = Vec::new();
        for round in 0..ROUNDS {
            let number = round * (self.site.services / ROUNDS);
            let node_port = 40_000 + round as u16;
            let patch = json!({"spec": {"ports": [
                {"name": format!("p{PORT}"), "port": PORT, "protocol": "TCP", "nodePort": node_port}]}});
            let before = self.map_writes()?;
            let begun = Instant::now();
            client.patch("Service", SERVICES, &service_name(number), &patch).await?;
            let ms = since(begun, "the new NodePort", || {
                Ok(self.frontend(number)?.is_some_and(|frontend| frontend.target_port_be == node_port.to_be()))
            })?;
            measured.push((ms, self.written_since(before)?));
        }
        Ok(measured)
    }

    /// Removals and additions of a node.
    async fn node_changes(&self, client: &Client) -> Result<(Vec<(f64, u64)>, Vec<(f64, u64)>)> {
        let (mut removed, mut added) = (Vec::new(), Vec::new());
        let probe = self.site.services - 1;
        for round in 0..ROUNDS {
            let number = round % self.site.count;
            let address = IpAddr::V4(node_address(number));
            let holds = |wanted: bool| Ok(self.table(probe)?.contains(&address) == wanted);
            ensure!(holds(true)?, "{address} is in no table");
            let before = self.map_writes()?;
            let begun = Instant::now();
            client.delete("Node", "", &format!("n{number}")).await?;
            let ms = since(begun, "a node's end", || holds(false))?;
            removed.push((ms, self.written_since(before)?));
            let before = self.map_writes()?;
            let begun = Instant::now();
            client.create(&a_node(number)).await?;
            let ms = since(begun, "a new node", || holds(true))?;
            added.push((ms, self.written_since(before)?));
        }
        Ok((removed, added))
    }

    /// Additions and deletions of a Service.
    async fn service_changes(&self, client: &Client) -> Result<(Vec<(f64, u64)>, Vec<(f64, u64)>)> {
        let (mut added, mut deleted) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let number = self.site.services + round;
            let before = self.map_writes()?;
            let begun = Instant::now();
            client.create(&load_balancer(number)).await?;
            let ms = since(begun, "a new Service", || Ok(self.frontend(number)?.is_some()))?;
            added.push((ms, self.written_since(before)?));
            let before = self.map_writes()?;
            let begun = Instant::now();
            client.delete("Service", SERVICES, &service_name(number)).await?;
            let ms = since(begun, "a Service's end", || Ok(self.frontend(number)?.is_none()))?;
            deleted.push((ms, self.written_since(before)?));
        }
        Ok((added, deleted))
    }

    /// Map elements written while every node sends a heartbeat.
    async fn heartbeats(&self, client: &Client) -> Result<u64> {
        let before = self.map_writes()?;
        for number in 0..self.site.count {
            let condition = json!({"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "",
                "lastHeartbeatTime": "2026-01-01T00:00:10Z", "lastTransitionTime": "2026-01-01T00:00:00Z"});
            let patch = json!({"status": {"conditions": [condition]}});
            client.patch_status("Node", "", &format!("n{number}"), "kubelet", &patch).await?;
        }
        self.written_since(before)
    }

    fn memory_mib(&self) -> Result<f64> {
        let pid = self.agent.pid().context("the agent has ended")?;
        let path = format!("/proc/{pid}/status");
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let kib = text
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.trim().parse::<f64>().ok())
            .with_context(|| format!("{path} has no VmHWM"))?;
        Ok(kib / 1024.0)
    }
}

/// Waits until something is so.
fn until(what: &str, check: impl Fn() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + LIMIT;
    while !check().unwrap_or(false) {
        ensure!(Instant::now() < end, "did not happen within {LIMIT:?}: {what}; {:?}", check());
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Waits, without sleeping long, until something of the maps is so; milliseconds since `begun`.
fn since(begun: Instant, what: &str, check: impl Fn() -> Result<bool>) -> Result<f64> {
    while !check()? {
        ensure!(begun.elapsed() < LIMIT, "not in the maps within {LIMIT:?}: {what}");
        std::thread::sleep(Duration::from_micros(500));
    }
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}
