//! The data plane against the kernel, each test in network and mount namespaces of its own.
//!
//! `sudo -E cargo test -p lbd --test dataplane -- --ignored`, after `cargo xtask build`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use aya::maps::MapData;
use lbd::config::{Config, Protocol, SegmentName};
use lbd::dataplane::{self, Dataplane, DataplaneError, Mode, OBJECT, Pins};
use lbd::flows::{Directory, Filter, Flow, Live, Matcher};
use lbd::plan::model::{
    AddressPlan, BackendPlan, Backends, FrontendAddress, FrontendBackend, FrontendPlan, Plan, Reset, SegmentPlan,
    TenantPlan,
};
use lbd_common::abi::{self, ADDRESS_ANSWER, NEXT_HOP_RESOLVED};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

const VIP: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 34);
const NODE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 11);

/// Two veths, `ten0` and `hub0`, whose peers are in a namespace of their own, and a BPF file system.
struct Bench {
    directory: tempfile::TempDir,
    /// Holds the peers' namespace.
    peers: Child,
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = self.peers.kill();
        let _ = self.peers.wait();
    }
}

fn run(command: &str) -> Result<String> {
    let output = Command::new("sh").args(["-c", command]).stdin(Stdio::null()).output()?;
    ensure!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

impl Bench {
    fn new() -> Result<Self> {
        ensure!(!OBJECT.is_empty(), "no BPF object: run `cargo xtask build`");
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)?;
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
        let directory = tempfile::tempdir()?;
        let bpffs = directory.path().join("bpf");
        std::fs::create_dir(&bpffs)?;
        mount(Some("bpf"), &bpffs, Some("bpf"), MsFlags::empty(), None::<&str>)?;
        let peers = Command::new("unshare").args(["--net", "sleep", "1000"]).spawn()?;
        let bench = Self { directory, peers };
        let ours = std::fs::read_link("/proc/thread-self/ns/net")?;
        let deadline = Instant::now() + Duration::from_secs(5);
        while std::fs::read_link(format!("/proc/{}/ns/net", bench.peers.id()))? == ours {
            ensure!(Instant::now() < deadline, "the peers' namespace does not appear");
            std::thread::sleep(Duration::from_millis(5));
        }
        run("ip link set lo up")?;
        bench.veth("ten0", "192.0.2.2/24", "192.0.2.1/24")?;
        bench.veth("hub0", "10.0.0.2/24", "10.0.0.11/24")?;
        Ok(bench)
    }

    fn veth(&self, name: &str, ours: &str, theirs: &str) -> Result<()> {
        run(&format!(
            "ip link add {name} type veth peer name {name}p && ip link set {name}p netns {}",
            self.peers.id()
        ))?;
        run(&format!("ip addr add {ours} dev {name} && ip link set {name} up"))?;
        self.peer(&format!("ip addr add {theirs} dev {name}p && ip link set {name}p up && ip link set lo up"))?;
        Ok(())
    }

    /// Runs a command where the peers are.
    fn peer(&self, command: &str) -> Result<String> {
        run(&format!("nsenter --net=/proc/{}/ns/net sh -c '{command}'", self.peers.id()))
    }

    fn bpffs(&self) -> PathBuf {
        self.directory.path().join("bpf")
    }

    fn config(&self, mode: &str, max_flows: u32) -> Result<Config> {
        let text = format!(
            "version: 1\nhubs:\n  - name: hub\n    interface: hub0\ntenants:\n  - name: tenant-a\n    segment: {{ interface: ten0 }}\n    \
             pools: [192.0.2.32-192.0.2.47]\ndatapath: {{ mode: {mode}, max_flows: {max_flows}, max_flows_v6: 1024, bpffs: {} }}\n\
             state_dir: {}\n",
            self.bpffs().display(),
            self.directory.path().join("state").display()
        );
        lbd::config::parse(&text, "test.yaml").map_err(|error| anyhow::anyhow!("{error}"))
    }

    fn start(&self, mode: &str) -> Result<Dataplane> {
        Ok(Dataplane::start(&self.config(mode, 4096)?, OBJECT)?)
    }

    fn pins(&self) -> Result<Pins> {
        Ok(Pins::open(&self.bpffs())?)
    }

    /// The MAC in `ip link`'s words. (/sys shows the namespace that it was mounted in.)
    fn mac(text: &str) -> Result<String> {
        let at = text.find("link/ether ").context("link/ether")?;
        Ok(text[at + 11..].split_whitespace().next().context("MAC")?.to_owned())
    }

    /// Id of the program at an interface and its mode, by iproute2.
    fn attached(interface: &str) -> Result<Option<(u32, Mode)>> {
        let text = run(&format!("ip -details link show dev {interface}"))?;
        let Some(at) = text.find("prog/xdp id ") else { return Ok(None) };
        let id = text[at + 12..].split_whitespace().next().context("id")?.parse()?;
        let mode = if text.contains("xdpgeneric") { Mode::Generic } else { Mode::Native };
        Ok(Some((id, mode)))
    }
}

#[expect(clippy::unwrap_used, reason = "constant text")]
fn plan(vips: u8) -> Plan {
    let segment = |interface: &str, network: &str, tenant_side: bool| SegmentPlan {
        name: SegmentName { interface: interface.into(), vlan: None },
        tenant_side,
        hub_side: !tenant_side,
        tenant: u16::from(tenant_side),
        networks: vec![network.parse().unwrap()],
        gateways: if tenant_side { vec!["192.0.2.1".parse().unwrap()] } else { Vec::new() },
        routes: BTreeMap::new(),
        host_ports: std::collections::BTreeSet::new(),
        host_access_all: false,
        host_access_icmp: false,
    };
    let mut plan = Plan::default();
    plan.segments.insert(1, segment("ten0", "192.0.2.0/24", true));
    plan.segments.insert(2, segment("hub0", "10.0.0.0/24", false));
    plan.tenants.insert(1, TenantPlan { name: "tenant-a".into(), host_access_all: true, ..TenantPlan::default() });
    let hub = IpAddr::from([10, 0, 0, 2]);
    plan.addresses.insert((2, hub), AddressPlan { snat: Some((1024, 32767)), host: true, ..AddressPlan::default() });
    let node = IpAddr::V4(NODE);
    plan.backends.insert(1, BackendPlan { address: node, port: 0, segment: 2, node: None, eligible: true });
    plan.tables.push(vec![1; 1021].into());
    for number in 0..vips {
        let mut octets = VIP.octets();
        octets[3] += number;
        let vip = IpAddr::from(octets);
        plan.addresses.insert((1, vip), AddressPlan { vip: true, tenant: 1, ..AddressPlan::default() });
        let backend = FrontendBackend {
            id: 1,
            address: node,
            port: 0,
            node: None,
            weight: 1,
            serving: true,
            probed: true,
            sure: true,
        };
        plan.frontends.insert(
            FrontendAddress { segment: 1, vip, port: 6443, protocol: Protocol::Tcp },
            Arc::new(FrontendPlan {
                id: u16::from(number) + 1,
                tenant: 1,
                name: "api".into(),
                service: None,
                service_uid: String::new(),
                guest_made: false,
                mode: None,
                source_affinity: false,
                preserve_client: false,
                adopt: false,
                timeouts: 0,
                unserved_drop: false,
                target_port: 30918,
                snat: Some(hub),
                snat_ports: (1024, 32767),
                table: Some(0),
                backends: vec![backend].into(),
                probe: None,
                reset_on_down: false,
            }),
        );
    }
    plan
}

fn eventually(limit: Duration, what: &str, mut check: impl FnMut() -> Result<bool>) -> Result<Duration> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if check()? {
            return Ok(start.elapsed());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    bail!("{what}: not within {limit:?}")
}

/// A refused start, as text.
/// All flows, as `lbctl` lists them.
fn listed(pins: &Pins) -> Result<Vec<Flow>> {
    let (all, directory) = (Filter::default(), Directory::default());
    let live = Live::new(pins)?;
    Ok(live.fold(&Matcher::new(&all, &directory, live.clock), Vec::new, Vec::push)?.concat())
}

fn refused(result: Result<Dataplane, DataplaneError>) -> Result<String> {
    match result {
        Ok(_) => bail!("started"),
        Err(error) => Ok(error.to_string()),
    }
}

#[test]
#[ignore = "needs root"]
fn a56_restarts_keep_the_program_and_change_nothing() -> Result<()> {
    let bench = Bench::new()?;
    for mode in ["native", "generic"] {
        let wanted = if mode == "native" { Mode::Native } else { Mode::Generic };
        let mut first = bench.start(mode)?;
        let applied = first.apply(plan(3))?;
        assert!(applied.map_writes > 0);
        assert_eq!(first.apply(plan(3))?.map_writes, 0);
        let program = Bench::attached("ten0")?;
        assert_eq!(program.map(|(_, mode)| mode), Some(wanted));
        eventually(Duration::from_secs(3), "the VIPs are answered for", || {
            let answered =
                bench.pins()?.addresses()?.iter().filter(|(_, value)| value.flags & ADDRESS_ANSWER != 0).count();
            Ok(answered == 3)
        })?;
        drop(first);
        assert_eq!(Bench::attached("ten0")?, program, "a stopped agent leaves its program");
        for _ in 0..5 {
            let mut again = bench.start(mode)?;
            assert_eq!(again.apply(plan(3))?.map_writes, 0, "a restart writes nothing");
            assert_eq!(Bench::attached("ten0")?, program);
            assert!(again.notices().borrow().is_empty());
        }
        let links = std::fs::read_dir(bench.bpffs().join("lbd/links"))?.count();
        let stages = std::fs::read_dir(bench.bpffs().join(format!("lbd/v{}", abi::ABI_VERSION)))?
            .filter(|entry| {
                entry.as_ref().is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("stages-"))
            })
            .count();
        assert_eq!((links, stages), (2, 2));
        let detached = dataplane::detach(&bench.bpffs())?;
        assert_eq!(detached.interfaces.len(), 2);
        assert_eq!(Bench::attached("ten0")?, None);
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a57_detach_works_from_the_pins_alone_and_twice() -> Result<()> {
    let bench = Bench::new()?;
    let mut agent = bench.start("auto")?;
    agent.apply(plan(1))?;
    eventually(Duration::from_secs(3), "the node is resolved", || {
        Ok(bench
            .pins()?
            .next_hops()?
            .values()
            .any(|(address, hop)| *address == Some(IpAddr::V4(NODE)) && hop.flags & NEXT_HOP_RESOLVED != 0))
    })?;
    drop(agent);
    let detached = dataplane::detach(&bench.bpffs())?;
    assert!(detached.maps > 18 && detached.neighbours >= 1, "{detached:?}");
    assert!(!bench.bpffs().join("lbd").exists());
    assert_eq!(Bench::attached("hub0")?, None);
    assert!(!run("ip neigh show")?.contains("managed"));
    assert!(dataplane::detach(&bench.bpffs())?.is_empty());
    assert!(matches!(Pins::open(&bench.bpffs()), Err(DataplaneError::NotThere { .. })));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a58_a_left_over_of_ours_is_replaced_in_either_mode() -> Result<()> {
    let bench = Bench::new()?;
    // The mode changes.
    drop(bench.start("generic")?);
    let before = Bench::attached("ten0")?;
    assert_eq!(before.map(|(_, mode)| mode), Some(Mode::Generic));
    drop(bench.start("native")?);
    assert_eq!(Bench::attached("ten0")?.map(|(_, mode)| mode), Some(Mode::Native));
    // The pin is gone, but somebody holds the link.
    let path = bench.bpffs().join("lbd/links/ten0");
    let held = aya::programs::links::PinnedLink::from_pin(&path)?;
    std::fs::remove_file(&path)?;
    assert!(Bench::attached("ten0")?.is_some());
    drop(bench.start("native")?);
    assert_eq!(Bench::attached("ten0")?.map(|(_, mode)| mode), Some(Mode::Native));
    drop(held);
    assert!(Bench::attached("ten0")?.is_some());
    let pins = bench.pins()?.attached()?;
    assert!(pins.iter().all(|attached| attached.mode == Some(Mode::Native)), "{pins:?}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a24_a_foreign_program_is_not_touched() -> Result<()> {
    let bench = Bench::new()?;
    let mut loader = aya::EbpfLoader::new();
    for map in ["flows4", "ageing4", "half_open4", "reasons", "traffic"] {
        loader.map_max_entries(map, 16);
    }
    let mut foreign = loader.load(OBJECT)?;
    let program: &mut aya::programs::Xdp = foreign.program_mut("lbd_pass").context("lbd_pass")?.try_into()?;
    program.load()?;
    let id = program.info()?.id();
    let link = program.attach("ten0", aya::programs::XdpMode::Driver)?;
    let error = refused(Dataplane::start(&bench.config("auto", 4096)?, OBJECT))?;
    assert!(error.contains("ten0") && error.contains("\"lbd_pass\"") && error.contains(&format!("id {id}")), "{error}");
    assert!(error.contains("bpf_link"), "{error}");
    assert_eq!(Bench::attached("ten0")?.map(|(id, _)| id), Some(id));
    assert_eq!(Bench::attached("hub0")?, None, "nothing half attached");
    assert!(!bench.bpffs().join("lbd").exists(), "nothing left behind");
    program.detach(link)?;
    let pin = bench.bpffs().join("foreign");
    program.pin(&pin)?;
    if run(&format!("ip link set dev ten0 xdpgeneric pinned {}", pin.display())).is_ok() {
        let error = refused(Dataplane::start(&bench.config("auto", 4096)?, OBJECT))?;
        assert!(error.contains("by netlink") && error.contains("ip link set dev ten0 xdpgeneric off"), "{error}");
        run("ip link set dev ten0 xdpgeneric off")?;
    } else {
        eprintln!("skipped: this iproute2 cannot attach a pinned program");
    }
    drop(bench.start("auto")?);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a18_a_large_mtu_is_refused_with_its_limit_or_falls_back() -> Result<()> {
    let bench = Bench::new()?;
    run("ip link set dev ten0 mtu 9000")?;
    bench.peer("ip link set dev ten0p mtu 9000")?;
    let error = refused(Dataplane::start(&bench.config("native", 4096)?, OBJECT))?;
    assert!(error.contains("ten0") && error.contains("9000") && error.contains("3506"), "{error}");
    assert_eq!((Bench::attached("hub0")?, Bench::attached("ten0")?), (None, None), "nothing half attached");
    assert!(!bench.bpffs().join("lbd").exists());
    let agent = bench.start("auto")?;
    let modes: BTreeMap<String, Option<Mode>> =
        agent.attached().into_iter().map(|attached| (attached.interface, attached.mode)).collect();
    // Generic and native do not redirect to each other: what one interface needs, all get.
    assert_eq!((modes["ten0"], modes["hub0"]), (Some(Mode::Generic), Some(Mode::Generic)));
    eventually(Duration::from_secs(2), "the notice", || {
        Ok(agent
            .notices()
            .borrow()
            .iter()
            .any(|notice| notice.reason == "GenericMode" && notice.message.contains("9000")))
    })?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a26_flushed_neighbours_come_back() -> Result<()> {
    let bench = Bench::new()?;
    let mut agent = bench.start("auto")?;
    agent.apply(plan(1))?;
    let pins = bench.pins()?;
    let resolved = |address: Ipv4Addr| -> Result<bool> {
        let hops = pins.next_hops()?;
        Ok(hops.values().any(|(found, hop)| *found == Some(IpAddr::V4(address)) && hop.flags & NEXT_HOP_RESOLVED != 0))
    };
    let gateway = Ipv4Addr::new(192, 0, 2, 1);
    for (address, interface) in [(NODE, "hub0"), (gateway, "ten0")] {
        eventually(Duration::from_millis(1500), "resolved", || resolved(address))?;
        for _ in 0..3 {
            run(&format!("ip neigh flush dev {interface}"))?;
            assert!(resolved(address)?, "the last MAC is kept");
            eventually(Duration::from_millis(1500), "back in the kernel's table", || {
                let text = run(&format!("ip neigh show {address} dev {interface}"))?;
                Ok(text.contains("lladdr") && text.contains("managed"))
            })?;
        }
    }
    // A node that gets another MAC.
    bench.peer("ip link set hub0p down && ip link set hub0p address 02:00:00:00:0a:99 && ip link set hub0p up")?;
    bench.peer("ip addr replace 10.0.0.11/24 dev hub0p")?;
    run("ip neigh flush dev hub0")?;
    eventually(Duration::from_secs(3), "the new MAC", || {
        Ok(pins.next_hops()?.values().any(|(_, hop)| hop.destination == [2, 0, 0, 0, 0x0a, 0x99]))
    })?;
    assert_eq!(run("cat /proc/sys/net/ipv4/ip_forward")?.trim(), "0");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_address_that_another_station_has_is_taken_over_when_that_stops() -> Result<()> {
    let bench = Bench::new()?;
    bench.peer(&format!("ip addr add {VIP}/24 dev ten0p"))?;
    let mut agent = bench.start("auto")?;
    agent.apply(plan(1))?;
    let pins = bench.pins()?;
    let answered = || -> Result<bool> {
        let found = pins.addresses()?;
        Ok(found
            .iter()
            .any(|(key, value)| abi::unmapped(&key.address) == VIP.octets() && value.flags & ADDRESS_ANSWER != 0))
    };
    let taken = agent.taken();
    eventually(Duration::from_secs(2), "the conflict", || {
        Ok(taken.borrow().iter().any(|(segment, address)| segment.interface == "ten0" && *address == IpAddr::V4(VIP)))
    })?;
    let mac = Bench::mac(&bench.peer("ip link show dev ten0p")?)?;
    let notices = agent.notices().borrow().clone();
    assert!(
        notices.iter().any(|notice| notice.reason == "AddressConflict" && notice.message.contains(mac.trim())),
        "{notices:?}"
    );
    std::thread::sleep(Duration::from_millis(1500));
    assert!(!answered()?);
    bench.peer(&format!("ip addr del {VIP}/24 dev ten0p"))?;
    let took = eventually(Duration::from_secs(7), "taken over", answered)?;
    eprintln!("taken over after {took:?}");
    assert!(taken.borrow().is_empty());
    // The peer believes the announcement and reaches the VIP at our MAC.
    eventually(Duration::from_secs(2), "no more notices", || Ok(agent.notices().borrow().is_empty()))?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_address_checked_ahead_is_answered_at_once() -> Result<()> {
    let bench = Bench::new()?;
    let mut agent = bench.start("auto")?;
    // 192.0.2.32–35 are checked ahead.
    std::thread::sleep(Duration::from_secs(2));
    agent.apply(plan(1))?;
    let answered = bench.pins()?.addresses()?.iter().filter(|(_, value)| value.flags & ADDRESS_ANSWER != 0).count();
    assert_eq!(answered, 1);
    bench.peer("ip neigh flush dev ten0p")?;
    let mac = Bench::mac(&run("ip link show dev ten0")?)?;
    // Only the datapath can answer: the VIP is on no interface.
    bench.peer(&format!("ip neigh replace {VIP} dev ten0p use"))?;
    eventually(Duration::from_secs(1), "the datapath answers", || {
        Ok(bench.peer(&format!("ip neigh show {VIP}"))?.contains(&mac))
    })?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn pins_of_another_shape_or_abi_are_refused_and_keep_forwarding() -> Result<()> {
    let bench = Bench::new()?;
    drop(bench.start("native")?);
    let program = Bench::attached("ten0")?;
    let error = refused(Dataplane::start(&bench.config("native", 8192)?, OBJECT))?;
    assert!(error.contains("ageing4") || error.contains("flows4"), "{error}");
    assert!(
        error.contains("8193 entries") && error.contains("16385 entries") && error.contains("max_flows to 4096"),
        "{error}"
    );
    assert_eq!(Bench::attached("ten0")?, program);
    std::fs::create_dir(bench.bpffs().join("lbd/v999"))?;
    MapData::from_pin(bench.bpffs().join(format!("lbd/v{}/settings", abi::ABI_VERSION)))?
        .pin(bench.bpffs().join("lbd/v999/settings"))?;
    let error = refused(Dataplane::start(&bench.config("native", 4096)?, OBJECT))?;
    assert!(error.contains("ABI 999") && error.contains(&format!("ABI {}", abi::ABI_VERSION)), "{error}");
    assert_eq!(Bench::attached("ten0")?, program);
    dataplane::detach(&bench.bpffs())?;
    assert!(!bench.bpffs().join("lbd").exists());
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_is_missing_is_named_with_its_remedy() -> Result<()> {
    let bench = Bench::new()?;
    let mut config = bench.config("auto", 4096)?;
    config.datapath.bpffs = bench.directory.path().to_owned();
    let error = refused(Dataplane::start(&config, OBJECT))?;
    assert!(error.contains("mount -t bpf bpf"), "{error}");
    let error = refused(Dataplane::start(&config, &[]))?;
    assert!(error.contains("cargo xtask build"), "{error}");
    let mut config = bench.config("auto", 4096)?;
    config.hub.segment.interface = "absent0".into();
    let error = refused(Dataplane::start(&config, OBJECT))?;
    assert!(error.contains("absent0 does not exist"), "{error}");
    let problems = dataplane::preflight(&config);
    assert!(problems.iter().any(|problem| problem.fatal && problem.subject == "absent0"), "{problems:?}");
    // A15, A16: the peers are out of sight.
    assert!(problems.iter().any(|problem| !problem.fatal && problem.message.contains("ethtool -K PEER tx off")));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_missing_capability_is_named() -> Result<()> {
    let bench = Bench::new()?;
    let config = bench.config("auto", 4096)?;
    // Of this thread only.
    caps::drop(None, caps::CapSet::Effective, caps::Capability::CAP_BPF)?;
    let error = refused(Dataplane::start(&config, OBJECT))?;
    assert!(error.contains("CAP_BPF") && error.contains("systemd unit"), "{error}");
    let problems = dataplane::preflight(&config);
    assert!(problems.iter().any(|problem| problem.fatal && problem.subject == "CAP_BPF"), "{problems:?}");
    caps::raise(None, caps::CapSet::Effective, caps::Capability::CAP_BPF)?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_nodes_death_is_written_fast_for_ten_thousand_services() -> Result<()> {
    let bench = Bench::new()?;
    let mut agent = bench.start("auto")?;
    let with = |alive: u16| {
        let mut big = plan(1);
        let (address, template) = big.frontends.pop_first().context("one frontend")?;
        big.backends.clear();
        let list: Vec<FrontendBackend> = (1..=500_u16)
            .map(|id| FrontendBackend {
                id,
                address: IpAddr::from([10, 0, 1 + (id >> 8) as u8, id as u8]),
                port: 0,
                node: None,
                weight: 1,
                serving: id <= alive,
                probed: true,
                sure: true,
            })
            .collect();
        for backend in &list {
            let plan =
                BackendPlan { address: backend.address, port: 0, segment: 2, node: None, eligible: backend.serving };
            big.backends.insert(backend.id, plan);
        }
        big.tables = vec![(0..65521).map(|slot| (slot % u32::from(alive)) as u16 + 1).collect::<Vec<_>>().into()];
        let list = Backends::from(list);
        for number in 0..10_000_u16 {
            let mut frontend = (*template).clone();
            (frontend.id, frontend.target_port, frontend.backends) = (number + 1, 20_000 + number, list.clone());
            big.frontends.insert(FrontendAddress { port: 1000 + number, ..address }, frontend.into());
        }
        anyhow::Ok(big)
    };
    let (first, second) = (with(500)?, with(499)?);
    let start = Instant::now();
    let writes = agent.apply(first)?.map_writes;
    eprintln!("all: {writes} writes in {:?}", start.elapsed());
    let start = Instant::now();
    let writes = agent.apply(second.clone())?.map_writes;
    let took = start.elapsed();
    eprintln!("one node less: {writes} writes in {took:?}");
    // 10,000 frontends, 2,048 chunks, one backend.
    assert_eq!(writes, 12_049);
    // The target is 100 ms; a build without optimisation is given ten times as long.
    let limit = if cfg!(debug_assertions) { Duration::from_secs(1) } else { Duration::from_millis(100) };
    assert!(took < limit, "{took:?}");
    assert_eq!(agent.apply(second.clone())?.map_writes, 0);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn map_memory_follows_its_formula() -> Result<()> {
    let bench = Bench::new()?;
    let config = bench.config("auto", 65536)?;
    let _agent = Dataplane::start(&config, OBJECT)?;
    let cpus = aya::util::nr_cpus().map_err(|(path, error)| anyhow::anyhow!("{path}: {error}"))? as u32;
    for (name, wanted) in dataplane::map_memory(&config, cpus) {
        let map = MapData::from_pin(bench.bpffs().join(format!("lbd/v{}", abi::ABI_VERSION)).join(name))?;
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", map.fd().as_fd().as_raw_fd()))?;
        let found: u64 =
            info.lines().find_map(|line| line.strip_prefix("memlock:")).context("memlock")?.trim().parse()?;
        eprintln!("{name}: {found} bytes, formula {wanted}");
        // Maps that allocate as they fill count what is in them only.
        let preallocated = ![abi::names::ADDRESSES, abi::names::FRONTENDS].contains(&name);
        if preallocated {
            assert!(found.abs_diff(wanted) <= wanted / 50 + 4096, "{name}: {found} bytes, formula {wanted}");
        } else {
            assert!(found <= wanted + 4096, "{name}: {found} bytes, formula {wanted}");
        }
    }
    Ok(())
}

/// A frame that arrived at the peers.
struct Frame {
    at: Instant,
    vlan: u16,
    /// Without its tag.
    bytes: Vec<u8>,
}

/// VLAN, address, and the MAC that the answer names.
type Answer = (u16, IpAddr, [u8; 6]);

/// A station of the peers' on one interface: notes what arrives, and answers for addresses, in a VLAN or untagged.
struct Station {
    frames: Arc<Mutex<Vec<Frame>>>,
    answers: Arc<Mutex<Vec<Answer>>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Station {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Station {
    fn new(bench: &Bench, interface: &str) -> Result<Self> {
        let namespace = std::fs::File::open(format!("/proc/{}/ns/net", bench.peers.id()))?;
        let (frames, answers, stop) = (Arc::default(), Arc::default(), Arc::default());
        let mut station = Self { frames, answers, stop, thread: None };
        let interface = interface.to_owned();
        let (ready, is_ready) = std::sync::mpsc::channel();
        let (frames, answers, stop) =
            (Arc::clone(&station.frames), Arc::clone(&station.answers), Arc::clone(&station.stop));
        station.thread = Some(std::thread::spawn(move || {
            let socket = nix::sched::setns(&namespace, CloneFlags::CLONE_NEWNET)
                .map_err(std::io::Error::from)
                .and_then(|()| packet_socket(&interface));
            let _ = ready.send(socket.as_ref().map(|_| ()).map_err(ToString::to_string));
            let Ok(socket) = socket else { return };
            while !stop.load(Ordering::Relaxed) {
                let Some((vlan, bytes)) = receive(&socket) else { continue };
                let known = answers.lock().map(|answers| answers.clone()).unwrap_or_default();
                for (segment, address, mac) in known {
                    if segment == vlan
                        && let Some(answer) = answer(&bytes, address, mac)
                    {
                        let answer = if vlan == 0 { answer } else { tagged(vlan, &answer) };
                        let _ =
                            nix::sys::socket::send(socket.as_raw_fd(), &answer, nix::sys::socket::MsgFlags::empty());
                    }
                }
                if let Ok(mut frames) = frames.lock() {
                    frames.push(Frame { at: Instant::now(), vlan, bytes });
                }
            }
        }));
        is_ready.recv()?.map_err(|error| anyhow::anyhow!("station: {error}"))?;
        Ok(station)
    }

    /// From now on there is somebody with this address.
    fn has(&self, vlan: u16, address: &str, mac: [u8; 6]) -> Result<()> {
        let address = address.parse()?;
        let mut answers = self.answers.lock().map_err(|_| anyhow::anyhow!("poisoned"))?;
        answers.retain(|&(segment, known, _)| (segment, known) != (vlan, address));
        answers.push((vlan, address, mac));
        Ok(())
    }

    /// When frames like this arrived.
    fn seen(&self, like: impl Fn(u16, &[u8]) -> bool) -> Vec<Instant> {
        let frames = self.frames.lock();
        frames
            .map(|frames| frames.iter().filter(|it| like(it.vlan, &it.bytes)).map(|it| it.at).collect())
            .unwrap_or_default()
    }

    fn forget(&self) {
        if let Ok(mut frames) = self.frames.lock() {
            frames.clear();
        }
    }
}

fn packet_socket(interface: &str) -> std::io::Result<OwnedFd> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket, sockopt};
    let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::EthAll)?;
    setsockopt(&socket, sockopt::ReceiveTimeout, &nix::sys::time::TimeVal::new(0, 50_000))?;
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: 3_u16.to_be(),
        sll_ifindex: nix::net::if_::if_nametoindex(interface)? as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let one = 1_i32;
    // SAFETY: the option's value is an int, and the address a whole `sockaddr_ll`.
    let results = unsafe {
        [
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_PACKET, libc::PACKET_AUXDATA, (&raw const one).cast(), 4),
            libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size_of::<libc::sockaddr_ll>() as u32),
        ]
    };
    if results == [0, 0] { Ok(socket) } else { Err(std::io::Error::last_os_error()) }
}

/// The next frame that arrives, with the tag that the kernel has put aside.
fn receive(socket: &OwnedFd) -> Option<(u16, Vec<u8>)> {
    const OUTGOING: u8 = 4;
    const TAG_VALID: u32 = 1 << 4;
    let mut bytes = vec![0; 2048];
    let mut control = [0_u64; 16];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: all zero is a valid value of both.
    let (mut from, mut message): (libc::sockaddr_ll, libc::msghdr) = unsafe { std::mem::zeroed() };
    message.msg_name = (&raw mut from).cast();
    message.msg_namelen = size_of::<libc::sockaddr_ll>() as u32;
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control) as _);
    // SAFETY: `message` names memory that is writable for the lengths in it.
    let length = usize::try_from(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) }).ok()?;
    let mut vlan = 0;
    // SAFETY: the kernel has filled `message`; a message of this type holds a `tpacket_auxdata`.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if !header.is_null() && (*header).cmsg_type == libc::PACKET_AUXDATA {
            let aux: libc::tpacket_auxdata = std::ptr::read_unaligned(libc::CMSG_DATA(header).cast());
            vlan = if aux.tp_status & TAG_VALID == 0 { 0 } else { aux.tp_vlan_tci & 0xfff };
        }
    }
    bytes.truncate(length);
    (from.sll_pkttype != OUTGOING).then_some((vlan, bytes))
}

fn tagged(vlan: u16, frame: &[u8]) -> Vec<u8> {
    [&frame[..12], &[0x81, 0], &vlan.to_be_bytes(), &frame[12..]].concat()
}

/// What a station with the address answers to an ARP request or a neighbour solicitation.
fn answer(frame: &[u8], address: IpAddr, mac: [u8; 6]) -> Option<Vec<u8>> {
    let asker = frame.get(6..12)?;
    match address {
        IpAddr::V4(address) => {
            let arp = frame.get(12..42)?;
            if arp[..10] != [8, 6, 0, 1, 8, 0, 6, 4, 0, 1] || arp[26..30] != address.octets() {
                return None;
            }
            let head = [asker, &mac, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &mac, &address.octets()].concat();
            Some([head.as_slice(), asker, &arp[16..20], &[0; 18]].concat())
        }
        IpAddr::V6(address) => {
            let asked = frame.get(12..78)?;
            if asked[..2] != [0x86, 0xdd] || asked[8] != 58 || asked[42] != 135 || asked[50..66] != address.octets() {
                return None;
            }
            let mut body = [[136, 0, 0, 0, 0x60, 0, 0, 0].as_slice(), &address.octets(), &[2, 1], &mac].concat();
            let pseudo = [&address.octets(), &asked[10..26], &[0, 0, 0, 32, 0, 0, 0, 58], &body].concat();
            let mut sum: u32 = pseudo.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
            while sum > 0xffff {
                sum = (sum & 0xffff) + (sum >> 16);
            }
            body[2..4].copy_from_slice(&(!(sum as u16)).to_be_bytes());
            let head = [asker, &mac, &[0x86, 0xdd, 0x60, 0, 0, 0, 0, 32, 58, 255], &address.octets()].concat();
            Some([head.as_slice(), &asked[10..26], &body].concat())
        }
    }
}

/// An unsolicited neighbour advertisement for an address, overriding.
fn advertises(frame: &[u8], address: &str) -> bool {
    let Ok(address) = address.parse::<Ipv6Addr>() else { return false };
    frame.len() == 86
        && frame[..6] == [0x33, 0x33, 0, 0, 0, 1]
        && (frame[54], frame[58]) == (136, 0x20)
        && frame[62..78] == address.octets()
        && frame[80..] == frame[6..12]
}

/// A gratuitous ARP request for an address.
fn announces(frame: &[u8], address: Ipv4Addr) -> bool {
    frame.len() >= 42
        && frame[12..22] == [8, 6, 0, 1, 8, 0, 6, 4, 0, 1]
        && frame[28..32] == address.octets()
        && frame[38..42] == address.octets()
}

/// Both families: an IPv6 VIP, a node, and a gateway that is link-local.
fn plan6(agent: &Dataplane) -> Plan {
    let mut plan = plan(1);
    // The host's own addresses, so that answers to them reach the kernel.
    for (segment, interface) in [(1, "ten0"), (2, "hub0")] {
        let facts = agent.facts().borrow().clone();
        for address in facts.interfaces.get(interface).into_iter().flat_map(|interface| &interface.all_addresses) {
            plan.addresses.entry((segment, address.addr())).or_default().host = true;
        }
    }
    let address = |text: &str| text.parse::<IpAddr>();
    if let (Some(tenant), Ok(gateway), Ok(network)) =
        (plan.segments.get_mut(&1), address("fe80::1"), "2001:db8:a::/64".parse())
    {
        tenant.gateways.push(gateway);
        tenant.networks.push(network);
    }
    if let (Some(hub), Ok(network)) = (plan.segments.get_mut(&2), "2001:db8:f::/64".parse()) {
        hub.networks.push(network);
    }
    if let (Ok(vip), Ok(node)) = (address(VIP6), address("2001:db8:f::11")) {
        plan.addresses.insert((1, vip), AddressPlan { vip: true, tenant: 1, ..AddressPlan::default() });
        plan.backends.insert(2, BackendPlan { address: node, port: 0, segment: 2, node: None, eligible: false });
    }
    plan
}

const VIP6: &str = "2001:db8:a::34";
const GROUP: &str = "ff02::1:ff00:34";

impl Bench {
    /// IPv6 addresses of both sides.
    fn six(&self) -> Result<()> {
        run("ip addr add 2001:db8:a::2/64 dev ten0 nodad && ip addr add 2001:db8:f::2/64 dev hub0 nodad")?;
        self.peer("ip addr add fe80::1/64 dev ten0p nodad && ip addr add 2001:db8:a::1/64 dev ten0p nodad")?;
        self.peer("ip addr add 2001:db8:f::11/64 dev hub0p nodad")?;
        Ok(())
    }
}

/// The next hop for an address.
fn hop(pins: &Pins, address: &str) -> Result<abi::NextHop> {
    let address = address.parse()?;
    let hops = pins.next_hops()?;
    hops.into_values().find(|(found, _)| *found == Some(address)).map(|(_, hop)| hop).context("no next hop")
}

fn mac_of(bench: &Bench, peer: &str) -> Result<[u8; 6]> {
    let text = Bench::mac(&bench.peer(&format!("ip link show dev {peer}"))?)?;
    let bytes = text.split(':').map(|part| u8::from_str_radix(part, 16)).collect::<Result<Vec<u8>, _>>()?;
    bytes.try_into().map_err(|_| anyhow::anyhow!("{text}"))
}

fn answered(pins: &Pins, address: &str) -> Result<bool> {
    let address = match address.parse()? {
        IpAddr::V4(address) => abi::mapped(address.octets()),
        IpAddr::V6(address) => address.octets(),
    };
    Ok(pins.addresses()?.iter().any(|(key, value)| key.address == address && value.flags & ADDRESS_ANSWER != 0))
}

#[test]
#[ignore = "needs root"]
fn ipv6_neighbours_and_a_link_local_gateway_are_resolved_and_followed() -> Result<()> {
    let bench = Bench::new()?;
    bench.six()?;
    let mut agent = bench.start("auto")?;
    agent.apply(plan6(&agent))?;
    let pins = bench.pins()?;
    for (address, peer) in [("fe80::1", "ten0p"), ("2001:db8:f::11", "hub0p"), ("192.0.2.1", "ten0p")] {
        let mac = mac_of(&bench, peer)?;
        // The kernel first makes sure that its own link-local address is unique.
        eventually(Duration::from_secs(10), address, || {
            let hop = hop(&pins, address)?;
            Ok(hop.flags & NEXT_HOP_RESOLVED != 0 && hop.destination == mac)
        })?;
    }
    let segments = pins.segments()?;
    let tenant = segments.values().find(|segment| segment.flags & abi::SEGMENT_TENANT != 0).context("tenant")?;
    let by_index = pins.next_hops()?;
    assert_eq!(by_index[&tenant.gateway6_next_hop].0, Some("fe80::1".parse()?));
    assert_eq!(by_index[&tenant.gateway_next_hop].0, Some("192.0.2.1".parse()?));
    // Flushed, they are asked for again, and the last MAC stays meanwhile.
    for interface in ["ten0", "hub0"] {
        run(&format!("ip -6 neigh flush dev {interface}"))?;
    }
    for (address, interface) in [("fe80::1", "ten0"), ("2001:db8:f::11", "hub0")] {
        assert!(hop(&pins, address)?.flags & NEXT_HOP_RESOLVED != 0);
        eventually(Duration::from_secs(3), "managed again", || {
            let text = run(&format!("ip -6 neigh show {address} dev {interface}"))?;
            Ok(text.contains("lladdr") && text.contains("managed"))
        })?;
    }
    // The router's MAC moves: what the kernel learns is in the map at once.
    run("ip -6 neigh replace fe80::1 lladdr 02:00:00:00:0a:01 dev ten0 nud reachable")?;
    eventually(Duration::from_secs(1), "the router's new MAC", || {
        Ok(hop(&pins, "fe80::1")?.destination == [2, 0, 0, 0, 10, 1])
    })?;
    drop(agent);
    assert!(dataplane::detach(&bench.bpffs())?.neighbours >= 4);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a61_groups_of_ipv6_vips_stay_joined_without_the_agent_until_detach() -> Result<()> {
    let bench = Bench::new()?;
    bench.six()?;
    let mut agent = bench.start("auto")?;
    agent.apply(plan6(&agent))?;
    let joined = || -> Result<(bool, bool)> {
        let text = run("ip maddr show dev ten0")?;
        let filter = text.lines().any(|line| line.contains("33:33:ff:00:00:34") && line.contains("static"));
        Ok((text.contains(GROUP), filter))
    };
    eventually(Duration::from_secs(2), "joined", || Ok(joined()? == (true, true)))?;
    assert!(!run("ip maddr show dev hub0")?.contains(GROUP));
    // No address of the host's that anybody would use.
    assert!(
        !agent.facts().borrow().interfaces["ten0"].all_addresses.iter().any(|address| address.addr().is_multicast())
    );
    drop(agent);
    assert_eq!(joined()?, (true, true));
    run("ip link set ten0 down && ip link set ten0 up")?;
    assert_eq!(joined()?, (true, true));
    // A VIP that is no more gives its group back, if the address that stands for it was not flushed.
    run(&format!("ip link set ten0 down && ip link set ten0 up && ip maddr show dev ten0 | grep -q {GROUP}"))?;
    let detached = dataplane::detach(&bench.bpffs())?;
    assert!(detached.groups >= 1, "{detached:?}");
    assert!(!joined()?.1);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a61_a_group_is_left_with_its_last_vip() -> Result<()> {
    let bench = Bench::new()?;
    bench.six()?;
    let mut agent = bench.start("auto")?;
    agent.apply(plan6(&agent))?;
    let listed = || -> Result<usize> {
        Ok(run("ip maddr show dev ten0")?.matches("ff00:34").count()
            + usize::from(run("ip maddr show dev ten0")?.contains("33:33:ff:00:00:34")))
    };
    eventually(Duration::from_secs(2), "joined", || Ok(listed()? == 2))?;
    agent.apply(plan(1))?;
    eventually(Duration::from_secs(2), "left", || Ok(listed()? == 0))?;
    agent.apply(plan6(&agent))?;
    eventually(Duration::from_secs(2), "joined again", || Ok(listed()? == 2))?;
    drop(agent);
    let detached = dataplane::detach(&bench.bpffs())?;
    assert_eq!((detached.groups, listed()?), (2, 0));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn b31_ipv6_addresses_are_asked_for_then_announced_three_times_within_three_seconds() -> Result<()> {
    let bench = Bench::new()?;
    bench.six()?;
    let station = Station::new(&bench, "ten0p")?;
    let mut agent = bench.start("auto")?;
    agent.apply(plan6(&agent))?;
    let pins = bench.pins()?;
    let announced = || station.seen(|vlan, frame| vlan == 0 && advertises(frame, VIP6));
    eventually(Duration::from_secs(6), "three announcements", || Ok(announced().len() >= 3))?;
    assert!(answered(&pins, VIP6)?);
    let times = announced();
    assert!(times[2] - times[0] < Duration::from_secs(3), "{times:?}");
    // Before that, it was asked for from the unspecified address.
    let vip: Ipv6Addr = VIP6.parse()?;
    let probes = station.seen(|_, frame| {
        frame.len() == 78
            && frame[..6] == [0x33, 0x33, 0xff, 0, 0, 0x34]
            && frame[22..38] == [0; 16]
            && frame[62..78] == vip.octets()
    });
    assert_eq!(probes.len(), 3);
    assert!(probes[2] < times[0]);
    // Another MAC: announced anew, with it.
    station.forget();
    run("ip link set ten0 address 02:00:00:00:0a:02")?;
    let with = |frame: &[u8]| frame[6..12] == [2, 0, 0, 0, 10, 2];
    eventually(Duration::from_secs(3), "the new MAC", || {
        let six = station.seen(|_, frame| advertises(frame, VIP6) && with(frame)).len();
        Ok(six >= 2 && station.seen(|_, frame| announces(frame, VIP) && with(frame)).len() >= 2)
    })?;
    let own = |segment: &abi::Segment| segment.mac == [2, 0, 0, 0, 10, 2];
    assert!(pins.segments()?.values().any(own));
    assert_eq!(hop(&pins, "fe80::1")?.source, [2, 0, 0, 0, 10, 2]);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_ipv6_address_that_another_station_has_is_not_answered_for() -> Result<()> {
    let bench = Bench::new()?;
    bench.six()?;
    bench.peer(&format!("ip addr add {VIP6}/64 dev ten0p nodad"))?;
    let mut agent = bench.start("auto")?;
    agent.apply(plan6(&agent))?;
    let (taken, pins) = (agent.taken(), bench.pins()?);
    eventually(Duration::from_secs(3), "the conflict", || {
        Ok(taken.borrow().iter().any(|(segment, address)| segment.interface == "ten0" && address.to_string() == VIP6))
    })?;
    std::thread::sleep(Duration::from_millis(1500));
    assert!(!answered(&pins, VIP6)? && answered(&pins, &VIP.to_string())?);
    bench.peer(&format!("ip addr del {VIP6}/64 dev ten0p"))?;
    eventually(Duration::from_secs(8), "taken over", || answered(&pins, VIP6))?;
    Ok(())
}

/// The tenant in VLAN 2003 of `ten0`, both families, with a backend there.
#[expect(clippy::unwrap_used, reason = "constant text")]
fn vlan_plan(agent: &Dataplane) -> Plan {
    let mut plan = plan6(agent);
    let tenant = plan.segments.get_mut(&1).unwrap();
    tenant.name.vlan = Some(2003);
    let address = "192.0.2.101".parse().unwrap();
    plan.backends.insert(3, BackendPlan { address, port: 443, segment: 1, node: None, eligible: false });
    plan
}

impl Bench {
    fn vlan_config(&self) -> Result<Config> {
        let mut config = self.config("auto", 4096)?;
        for tenant in &mut config.tenants {
            tenant.segment.vlan = Some(2003);
            tenant.addresses = vec!["192.0.2.2/24".parse()?];
        }
        Ok(config)
    }
}

#[test]
#[ignore = "needs root"]
fn a22_neighbours_in_a_vlan_are_asked_for_with_its_tag() -> Result<()> {
    let bench = Bench::new()?;
    let station = Station::new(&bench, "ten0p")?;
    station.has(2003, "192.0.2.1", [2, 0, 0, 0, 0x20, 1])?;
    station.has(2003, "fe80::1", [2, 0, 0, 0, 0x20, 6])?;
    // The same addresses in other segments are other stations.
    station.has(0, "192.0.2.101", [2, 0, 0, 0, 0, 0x66])?;
    let config = bench.vlan_config()?;
    let offload = |config: &Config| {
        let problems = dataplane::preflight(config);
        problems.iter().any(|problem| problem.subject == "ten0" && problem.message.contains("rx-vlan offload"))
    };
    assert!(offload(&config));
    let mut agent = Dataplane::start(&config, OBJECT)?;
    assert!(!offload(&config), "it is off while lbd serves VLANs");
    agent.apply(vlan_plan(&agent))?;
    let pins = bench.pins()?;
    for (address, last) in [("192.0.2.1", 1), ("fe80::1", 6)] {
        eventually(Duration::from_secs(3), address, || {
            let hop = hop(&pins, address)?;
            Ok(hop.flags & NEXT_HOP_RESOLVED != 0 && hop.destination == [2, 0, 0, 0, 0x20, last] && hop.vlan == 2003)
        })?;
    }
    assert_eq!(hop(&pins, "192.0.2.101")?.flags & NEXT_HOP_RESOLVED, 0);
    station.has(2003, "192.0.2.101", [2, 0, 0, 0, 0x20, 0x65])?;
    eventually(Duration::from_secs(3), "the backend", || {
        Ok(hop(&pins, "192.0.2.101")?.destination == [2, 0, 0, 0, 0x20, 0x65])
    })?;
    // Asked for from the segment's address, by broadcast, with the tag and only so.
    let asks = |frame: &[u8]| frame.len() >= 42 && frame[12..14] == [8, 6] && frame[38..42] == [192, 0, 2, 101];
    assert!(!station.seen(|vlan, frame| vlan == 2003 && asks(frame) && frame[28..32] == [192, 0, 2, 2]).is_empty());
    assert!(station.seen(|vlan, frame| vlan != 2003 && asks(frame)).is_empty());
    // VIPs of both families are announced there.
    eventually(Duration::from_secs(5), "announced with the tag", || {
        let four = station.seen(|vlan, frame| vlan == 2003 && announces(frame, VIP)).len();
        Ok(four >= 3 && station.seen(|vlan, frame| vlan == 2003 && advertises(frame, VIP6)).len() >= 3)
    })?;
    assert!(station.seen(|vlan, frame| vlan != 2003 && (announces(frame, VIP) || advertises(frame, VIP6))).is_empty());
    // Without an interface of the kernel's for the VLAN, the NIC's filter is all that can be had.
    let groups = run("ip maddr show dev ten0")?;
    assert!(groups.contains("33:33:ff:00:00:34") && !groups.contains(GROUP), "{groups}");
    // The router is taken over by another: one gratuitous answer is enough.
    let arp = [
        &[0xff; 6],
        [2, 0, 0, 0, 0x20, 2].as_slice(),
        &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2],
        &[2, 0, 0, 0, 0x20, 2],
        &[192, 0, 2, 1],
        &[0xff; 6],
        &[192, 0, 2, 1],
        &[0; 18],
    ]
    .concat();
    bench.send("ten0p", &tagged(2003, &arp))?;
    eventually(Duration::from_secs(1), "the router's new MAC", || {
        Ok(hop(&pins, "192.0.2.1")?.destination == [2, 0, 0, 0, 0x20, 2])
    })?;
    // The same in another VLAN means another router.
    let mut other = arp;
    (other[11], other[27]) = (3, 3);
    bench.send("ten0p", &tagged(2004, &other))?;
    bench.send("ten0p", &other)?;
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(hop(&pins, "192.0.2.1")?.destination, [2, 0, 0, 0, 0x20, 2]);
    drop(agent);
    let detached = dataplane::detach(&bench.bpffs())?;
    assert_eq!((detached.offloads, detached.groups), (vec!["ten0".to_owned()], 1));
    assert!(offload(&config), "on again");
    Ok(())
}

impl Bench {
    /// Sends a frame from the peers' side.
    fn send(&self, interface: &str, frame: &[u8]) -> Result<()> {
        let namespace = std::fs::File::open(format!("/proc/{}/ns/net", self.peers.id()))?;
        let (interface, frame) = (interface.to_owned(), frame.to_vec());
        let sent = std::thread::spawn(move || -> Result<()> {
            nix::sched::setns(&namespace, CloneFlags::CLONE_NEWNET)?;
            let socket = packet_socket(&interface)?;
            nix::sys::socket::send(socket.as_raw_fd(), &frame, nix::sys::socket::MsgFlags::empty())?;
            Ok(())
        });
        sent.join().map_err(|_| anyhow::anyhow!("the sender has panicked"))?
    }
}

#[test]
#[ignore = "needs root"]
fn a22_vlans_behind_a_peer_that_hides_tags_are_refused() -> Result<()> {
    let bench = Bench::new()?;
    run("ip link add trunk type veth peer name trunkp && ip link set trunk up && ip link set trunkp up")?;
    let mut config = bench.vlan_config()?;
    for tenant in &mut config.tenants {
        tenant.segment.interface = "trunk".to_owned();
    }
    let text = refused(Dataplane::start(&config, OBJECT))?;
    for part in ["interface trunk hides VLAN tags", "trunkp", "ethtool -K trunkp txvlan off"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(Bench::attached("trunk")?.is_none() && Bench::attached("hub0")?.is_none());
    assert!(!bench.bpffs().join("lbd").exists(), "nothing is left");
    let problems = dataplane::preflight(&config);
    assert!(problems.iter().any(|problem| problem.fatal && problem.message.contains("trunkp")), "{problems:?}");
    // Untagged, the same interface is served.
    for tenant in &mut config.tenants {
        tenant.segment.vlan = None;
    }
    drop(Dataplane::start(&config, OBJECT)?);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a59_an_interface_made_anew_serves_again_within_5_s() -> Result<()> {
    let bench = Bench::new()?;
    bench.six()?;
    let start = Instant::now();
    let mut agent = bench.start("auto")?;
    // Five seconds; more where the kernel's verifier is slow because the machine has other things to do.
    let limit = Duration::from_secs(5).max(start.elapsed());
    agent.apply(plan6(&agent))?;
    let pins = bench.pins()?;
    eventually(Duration::from_secs(3), "answered", || Ok(answered(&pins, VIP6)? && answered(&pins, "192.0.2.34")?))?;
    eventually(Duration::from_secs(3), "resolved", || Ok(hop(&pins, "192.0.2.1")?.flags & NEXT_HOP_RESOLVED != 0))?;
    let old = hop(&pins, "192.0.2.1")?;
    let facts = agent.facts();
    run("ip link del ten0")?;
    eventually(Duration::from_secs(2), "said to be down", || Ok(!facts.borrow().interfaces["ten0"].up))?;
    let mode = |name: &str| agent.attached().into_iter().find(|it| it.interface == name).and_then(|it| it.mode);
    assert_eq!(mode("ten0"), None);
    // What is planned does not change for it.
    assert_eq!(facts.borrow().interfaces["ten0"].addresses.len(), 2);
    assert_eq!(pins.segments()?.len(), 2);
    std::thread::sleep(Duration::from_secs(1));
    bench.veth("ten0", "192.0.2.2/24", "192.0.2.1/24")?;
    let made = Instant::now();
    let station = Station::new(&bench, "ten0p")?;
    eventually(limit, "attached again", || Ok(Bench::attached("ten0")?.is_some()))?;
    assert!(mode("ten0").is_some());
    let (mac, router) = (Bench::mac(&run("ip link show dev ten0")?)?, mac_of(&bench, "ten0p")?);
    eventually((limit + Duration::from_secs(1)).saturating_sub(made.elapsed()), "next hops follow", || {
        let new = hop(&pins, "192.0.2.1")?;
        Ok(new.ifindex != old.ifindex && new.destination == router)
    })?;
    let segments = pins.segments()?;
    assert!(segments.values().any(|it| it.mac.map(|byte| format!("{byte:02x}")).join(":") == mac.trim()));
    // Its addresses were not given up, and are announced.
    assert!(answered(&pins, VIP6)? && answered(&pins, "192.0.2.34")?);
    eventually((limit + Duration::from_secs(1)).saturating_sub(made.elapsed()), "announced", || {
        Ok(!station.seen(|_, frame| announces(frame, VIP)).is_empty()
            && !station.seen(|_, frame| advertises(frame, VIP6)).is_empty())
    })?;
    eventually(Duration::from_secs(5), "joined", || Ok(run("ip maddr show dev ten0")?.contains(GROUP)))?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a59_down_and_up_changes_nothing() -> Result<()> {
    let bench = Bench::new()?;
    bench.six()?;
    let mut agent = bench.start("auto")?;
    agent.apply(plan6(&agent))?;
    let pins = bench.pins()?;
    let resolved = |address: &str| Ok(hop(&pins, address)?.flags & NEXT_HOP_RESOLVED != 0);
    for address in ["192.0.2.1", "fe80::1", "10.0.0.11", "2001:db8:f::11"] {
        eventually(Duration::from_secs(10), address, || resolved(address))?;
    }
    eventually(Duration::from_secs(3), "answered", || answered(&pins, VIP6))?;
    let state = || -> Result<_> {
        let mut hops: Vec<String> = Vec::new();
        for address in ["192.0.2.1", "fe80::1", "10.0.0.11", "2001:db8:f::11"] {
            hops.push(format!("{:?}", hop(&pins, address)?));
        }
        Ok((Bench::attached("ten0")?, Bench::attached("hub0")?, hops, pins.segments()?, pins.addresses()?.len()))
    };
    let before = state()?;
    for interface in ["ten0", "hub0"] {
        run(&format!("ip link set {interface} down"))?;
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(state()?, before);
        run(&format!("ip link set {interface} up"))?;
        std::thread::sleep(Duration::from_millis(700));
        assert_eq!(state()?, before);
    }
    // A network service takes the addresses away and gives them back.
    let facts = agent.facts();
    run("ip addr flush dev ten0 scope global && ip addr flush dev hub0 scope global")?;
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(state()?, before);
    assert!(facts.borrow().interfaces["hub0"].addresses.contains(&"10.0.0.2/24".parse()?));
    run("ip addr add 192.0.2.2/24 dev ten0 && ip addr add 10.0.0.2/24 dev hub0")?;
    run("ip addr replace 2001:db8:a::2/64 dev ten0 nodad && ip addr replace 2001:db8:f::2/64 dev hub0 nodad")?;
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!(state()?, before);
    // Answers to neighbours that are asked for again are seen.
    for address in ["192.0.2.1", "10.0.0.11"] {
        eventually(Duration::from_secs(5), "back in the kernel's table", || {
            Ok(run(&format!("ip neigh show {address}"))?.contains("lladdr"))
        })?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_renamed_interface_goes_on_and_a_new_mtu_is_known() -> Result<()> {
    let bench = Bench::new()?;
    let mut agent = bench.start("auto")?;
    agent.apply(plan(1))?;
    let pins = bench.pins()?;
    eventually(Duration::from_secs(3), "answered", || answered(&pins, "192.0.2.34"))?;
    for address in ["192.0.2.1", "10.0.0.11"] {
        eventually(Duration::from_secs(5), address, || Ok(hop(&pins, address)?.flags & NEXT_HOP_RESOLVED != 0))?;
    }
    assert_eq!(agent.apply(plan(1))?.map_writes, 0);
    let (program, segments, hops) = (Bench::attached("ten0")?, pins.segments()?, pins.next_hops()?);
    let facts = agent.facts();
    run("ip link set ten0 down && ip link set ten0 name lan0 && ip link set lan0 up")?;
    eventually(Duration::from_secs(2), "up again", || {
        let facts = facts.borrow();
        Ok(facts.interfaces.contains_key("lan0") && facts.interfaces["ten0"].up)
    })?;
    assert_eq!((Bench::attached("lan0")?, pins.segments()?, pins.next_hops()?), (program, segments, hops));
    assert_eq!(agent.apply(plan(1))?.map_writes, 0);
    assert!(answered(&pins, "192.0.2.34")?);
    run("ip link set lan0 mtu 1400")?;
    eventually(Duration::from_secs(2), "the new MTU", || {
        let segments = pins.segments()?;
        Ok(segments.values().any(|segment| segment.mtu == 1400) && hop(&pins, "192.0.2.1")?.mtu == 1400)
    })?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_plan_comes_and_goes_through_the_real_maps() -> Result<()> {
    let bench = Bench::new()?;
    let mut agent = bench.start("auto")?;
    let many = plan(10);
    agent.fail_writes("frontends", 2);
    assert!(matches!(agent.apply(many.clone()), Err(DataplaneError::Partial { failed: 2, .. })));
    assert_eq!(bench.pins()?.frontends()?.len(), 8);
    assert_eq!(agent.apply(many.clone())?.map_writes, 2);
    let pins = bench.pins()?;
    let frontends = pins.frontends()?;
    assert_eq!((frontends.len(), pins.backends()?.len(), pins.segments()?.len()), (10, 1, 2));
    assert_eq!(pins.table(&frontends[0])?, vec![1; 1021]);
    assert!(pins.tenants()?.contains_key(&1));
    assert!(listed(&pins)?.is_empty());
    assert!(pins.fill()?.iter().any(|fill| fill.name == "maglev" && fill.used == Some(32)));
    let (first, settings) = (pins.now()?, pins.settings()?);
    std::thread::sleep(Duration::from_millis(500));
    let ticks = pins.now()?.wrapping_sub(first);
    let wanted = settings.ticks_per_second_256 / 512;
    assert!(ticks.abs_diff(wanted) <= 2, "{ticks} ticks in half a second, wanted {wanted}");
    assert!(pins.reasons().is_ok() && pins.frontend_counters()?.is_empty());
    let mut fewer = plan(1);
    fewer.resets.extend((2..=10).map(Reset::Frontend));
    agent.apply(fewer)?;
    assert_eq!((pins.frontends()?.len(), pins.backends()?.len()), (1, 1));
    agent.apply(Plan::default())?;
    assert_eq!((pins.frontends()?.len(), pins.backends()?.len(), pins.segments()?.len()), (0, 0, 0));
    assert!(pins.addresses()?.is_empty());
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn directories_are_closed_to_others_and_names_with_dots_work() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let bench = Bench::new()?;
    run("ip link set ten0 down && ip link set ten0 name ten.7 && ip link set ten.7 up")?;
    let mut config = bench.config("auto", 4096)?;
    config.tenants[0].segment.interface = "ten.7".into();
    let _agent = Dataplane::start(&config, OBJECT)?;
    for path in ["lbd", &format!("lbd/v{}", abi::ABI_VERSION), "lbd/links"] {
        let mode = std::fs::metadata(bench.bpffs().join(path))?.permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "{path}");
    }
    assert!(Path::new(&bench.bpffs().join("lbd/links/ten:7")).exists());
    let names: Vec<String> = bench.pins()?.attached()?.into_iter().map(|attached| attached.interface).collect();
    assert_eq!(names, ["hub0", "ten.7"]);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_map_whose_pin_is_lost_is_made_anew_for_the_program_too() -> Result<()> {
    let bench = Bench::new()?;
    drop(bench.start("auto")?);
    let before = Bench::attached("ten0")?.context("attached")?;
    std::fs::remove_file(bench.bpffs().join(format!("lbd/v{}", abi::ABI_VERSION)).join(abi::names::FRONTENDS))?;
    drop(bench.start("auto")?);
    let after = Bench::attached("ten0")?.context("attached")?;
    ensure!(before.0 != after.0, "the program of before still runs over the map of before, which nobody can write");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_interface_made_anew_twice_in_a_moment_is_attached_again() -> Result<()> {
    let bench = Bench::new()?;
    let mut dataplane = bench.start("auto")?;
    dataplane.apply(plan(1))?;
    for _ in 0..2 {
        run("ip link del ten0")?;
        bench.veth("ten0", "192.0.2.2/24", "192.0.2.1/24")?;
        eventually(Duration::from_secs(10), "the interface is noticed", || {
            Ok(dataplane.facts().borrow().interfaces.get("ten0").is_some_and(|interface| interface.up))
        })?;
    }
    eventually(Duration::from_secs(10), "the program is back", || Ok(Bench::attached("ten0")?.is_some()))?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_attachment_that_was_taken_away_is_not_called_attached() -> Result<()> {
    let bench = Bench::new()?;
    let dataplane = bench.start("auto")?;
    let mode = || dataplane.attached().iter().find(|it| it.interface == "ten0").and_then(|attached| attached.mode);
    ensure!(mode().is_some());
    run("ip link del ten0")?;
    ensure!(mode().is_none(), "{:?}", dataplane.attached());
    dataplane::detach(&bench.bpffs())?;
    ensure!(dataplane.attached().is_empty());
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn b59_a_second_agent_on_the_same_pins_is_refused_whatever_its_state_directory() -> Result<()> {
    let bench = Bench::new()?;
    let first = bench.start("auto")?;
    let mut config = bench.config("auto", 4096)?;
    config.state_dir = bench.directory.path().join("other");
    let error = refused(Dataplane::start(&config, OBJECT))?;
    ensure!(error.contains("another lbd agent uses the datapath"), "{error}");
    drop(first);
    drop(Dataplane::start(&config, OBJECT)?);
    Ok(())
}
