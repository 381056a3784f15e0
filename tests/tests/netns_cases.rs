//! Acceptance cases that need a real kernel around the datapath, each named for the case it covers.
//!
//! All run on the cases' bench: tenant a on `ten0`, tenant b on `ten1`, the hub on `hub0`.
use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lbd_tests::lab::{
    self, Agent, Bench, Capture, Hold, Keep, Listener, Namespace, Peer, Ticker, XdpProgram, XdpVerdict,
};
use serde_json::Value;

const TARGET: &str = "192.0.2.34:6443";
const OTHER_TARGET: &str = "198.51.100.34:6443";
const INTERFACES: [&str; 3] = ["ten0", "ten1", "hub0"];

fn fast() -> bool {
    std::env::var_os("LBD_TEST_FAST").is_some()
}

/// A bench with servers and a running agent.
fn running(name: &str, extra: &str) -> Result<(Bench, Vec<Peer>, Agent)> {
    let bench = Bench::new(name)?;
    let servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
    let agent = bench.agent(&Bench::configuration(extra))?;
    Ok((bench, servers, agent))
}

/// What `ip` says of the XDP program on an interface: mode (`xdp` is the driver's, `xdpgeneric` the kernel's) and program id.
fn attached(namespace: &Namespace, interface: &str) -> Result<Option<(String, u64)>> {
    let links = namespace.ip_json(&format!("-details link show dev {interface}"))?;
    let Some(xdp) = links.get(0).and_then(|link| link.get("xdp")) else { return Ok(None) };
    let mode = match xdp.get("mode").and_then(Value::as_u64) {
        Some(1) => "native".to_owned(),
        Some(2) => "generic".to_owned(),
        other => format!("mode {other:?}"),
    };
    let id = xdp.pointer("/prog/id").and_then(Value::as_u64).with_context(|| format!("no program id in {xdp}"))?;
    Ok(Some((mode, id)))
}

fn assert_attached(namespace: &Namespace, mode: &str) -> Result<()> {
    for interface in INTERFACES {
        let found = attached(namespace, interface)?;
        ensure!(found.as_ref().is_some_and(|(found, _)| found == mode), "{interface}: {found:?}, not {mode}");
    }
    Ok(())
}

fn assert_detached(namespace: &Namespace) -> Result<()> {
    for interface in INTERFACES {
        let found = attached(namespace, interface)?;
        ensure!(found.is_none(), "{interface} still has {found:?}");
    }
    let pins = namespace.outside("/sys/fs/bpf");
    let left: Vec<_> = std::fs::read_dir(&pins)?
        .flatten()
        .map(|entry| entry.path())
        // Every bpffs has these, `maps.debug` and `progs.debug`, from its first day.
        .filter(|path| path.extension().is_none_or(|ending| ending != "debug"))
        .collect();
    ensure!(left.is_empty(), "pins are left: {left:?}");
    Ok(())
}

/// Runs `lbd run` where it must refuse: its exit code and what it said.
fn refused(bench: &Bench, agent: &Agent) -> Result<(Option<i32>, String)> {
    let mut command = std::process::Command::new(lab::binary("lbd")?);
    command.arg("run").arg("--config").arg(agent.config());
    let process = bench.lab.start(&bench.lb, "refused", command)?;
    let status = process.wait(Duration::from_secs(10)).context("lbd run goes on, where it must refuse")?;
    Ok((status.code(), process.log()))
}

/// A sender that leaves the checksum to its card breaks XDP on veth: `check` names the interface and the remedy.
#[test]
#[ignore = "needs root"]
fn a15_checksum_offload_on_veth_is_named_with_its_remedy() -> Result<()> {
    let (bench, _servers, agent) = running("a15", "")?;
    lab::get(&bench.near, TARGET, false)?;
    bench.lb.shell("ethtool -K ten0 tx on >/dev/null")?;
    let output = agent.lbd(&["check"])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find(|line| line.contains("ten0") && line.contains("ethtool"));
    ensure!(line.is_some(), "check names neither ten0 nor the remedy:\n{text}");
    // Where the peer can be seen, its setting is.
    bench.lb.ip_batch("link add near0 type veth peer name peer0\nlink set near0 up\nlink set peer0 up\naddress add 198.18.9.2/24 dev near0")?;
    let visible = Bench::configuration("")
        .replace("interface: ten1, address: 198.51.100.2/24", "interface: near0")
        .replace("198.51.100.32/28", "198.18.9.32/28")
        .replace("198.51.100.34", "198.18.9.34");
    agent.configure(&visible)?;
    for (setting, warned) in [("on", true), ("off", false)] {
        bench.lb.shell(&format!("ethtool -K peer0 tx {setting} >/dev/null"))?;
        let output = agent.lbd(&["check"])?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "{output:?}");
        ensure!(text.contains("`ethtool -K peer0 tx off`") == warned, "tx {setting}:\n{text}");
    }
    Ok(())
}

/// A redirect that the other side does not take is counted and shown, not lost in silence.
#[test]
#[ignore = "needs root"]
fn a16_redirects_that_nobody_takes_are_counted() -> Result<()> {
    let (bench, _servers, agent) = running("a16", "")?;
    bench.lab.deafen(&bench.lb, "hub0")?;
    for _ in 0..3 {
        let mut client = bench.near.command(lab::binary("lbd-test-peer")?);
        client.args(["get", "--target", TARGET, "--limit", "1"]).output()?;
    }
    lab::wait_until(Duration::from_secs(10), "lbctl shows the failed redirects", || {
        Ok(agent.lbctl(&["drops"])?.contains("redirect"))
    })?;
    let status = agent.lbctl_raw(&["status", "--check"])?;
    ensure!(status.status.code() == Some(1), "status --check: {:?}", status.status);
    Ok(())
}

/// A hub interface whose driver takes no redirected frames at all: `native` refuses by name, `auto` takes the one mode that works on
/// all interfaces, and says why.
#[test]
#[ignore = "needs root"]
fn a16_an_interface_without_redirect() -> Result<()> {
    let bench = Bench::new("a16b")?;
    let _servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
    // A bridge has no `ndo_xdp_xmit`.
    bench.lb.ip_batch(
        "address flush dev hub0
        link set hub0 down
        link set hub0 name cable
        link add hub0 address 02:00:00:00:0a:02 type bridge
        link set cable master hub0
        link set cable up
        link set hub0 up
        address add 10.0.0.2/24 dev hub0",
    )?;
    let agent = Agent::new(&bench.lab, &bench.lb, &Bench::configuration("datapath: { mode: native }"))?;
    let (code, text) = refused(&bench, &agent)?;
    ensure!(code == Some(1) && text.contains("hub0") && text.contains("generic"), "{code:?}: {text}");
    for interface in INTERFACES {
        ensure!(attached(&bench.lb, interface)?.is_none(), "half attached: {interface}");
    }
    agent.configure(&Bench::configuration("datapath: { mode: auto }"))?;
    agent.start(&bench.lab)?;
    assert_attached(&bench.lb, "generic")?;
    lab::wait_until(Duration::from_secs(10), "the VIP answers", || Ok(lab::get(&bench.near, TARGET, false).is_ok()))?;
    ensure!(lab::load(&bench.near, TARGET, false, 100)?.failed == 0, "connections fail");
    let status = agent.lbctl_raw(&["status", "--check"])?;
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(status.status.code() == Some(1), "status --check: {:?}", status.status);
    ensure!(text.contains("ten0: generic XDP mode, because hub0"), "{text}");
    // It stays so.
    agent.stop()?;
    agent.start(&bench.lab)?;
    assert_attached(&bench.lb, "generic")
}

/// An MTU that the driver's XDP cannot take: `native` refuses with names and numbers, `auto` falls back and says so.
#[test]
#[ignore = "needs root"]
fn a18_an_mtu_that_native_xdp_cannot_take() -> Result<()> {
    let bench = Bench::with_mtu("a18", 9000)?;
    let _servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
    let agent = Agent::new(&bench.lab, &bench.lb, &Bench::configuration("datapath: { mode: native }"))?;
    let (code, text) = refused(&bench, &agent)?;
    ensure!(code == Some(1), "exit code {code:?}:\n{text}");
    ensure!(text.contains("9000") && INTERFACES.iter().any(|name| text.contains(name)), "{text}");
    for interface in INTERFACES {
        ensure!(attached(&bench.lb, interface)?.is_none(), "half attached: {interface}");
    }
    agent.configure(&Bench::configuration("datapath: { mode: auto }"))?;
    agent.start(&bench.lab)?;
    assert_attached(&bench.lb, "generic")?;
    let status = agent.lbctl(&["status"])?;
    ensure!(status.contains("generic"), "{status}");
    lab::wait_until(Duration::from_secs(10), "the VIP answers", || Ok(lab::get(&bench.near, TARGET, false).is_ok()))
}

/// Somebody else's program is neither replaced nor detached, and the error names it.
#[test]
#[ignore = "needs root"]
fn a24_a_foreign_program_is_left_alone_and_named() -> Result<()> {
    let bench = Bench::new("a24")?;
    let _servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
    let agent = Agent::new(&bench.lab, &bench.lb, &Bench::configuration(""))?;
    let foreign = XdpProgram::load("xdp_fw", XdpVerdict::Pass)?;
    for by_link in [true, false] {
        let link = if by_link {
            Some(foreign.attach(&bench.lb, "ten0", lab::XdpMode::Native)?)
        } else {
            foreign.pin(&bench.lb, "/sys/fs/bpf/xdp_fw")?;
            bench.lb.ip("link set dev ten0 xdpdrv pinned /sys/fs/bpf/xdp_fw")?;
            None
        };
        let before = attached(&bench.lb, "ten0")?;
        let (code, text) = refused(&bench, &agent)?;
        ensure!(code == Some(1), "by link {by_link}: exit code {code:?}:\n{text}");
        ensure!(text.contains("ten0") && text.contains("xdp_fw"), "by link {by_link}: {text}");
        ensure!(attached(&bench.lb, "ten0")? == before, "by link {by_link}: the foreign program was touched");
        ensure!(attached(&bench.lb, "hub0")?.is_none(), "by link {by_link}: half attached");
        drop(link);
    }
    bench.lb.ip("link set dev ten0 xdp off")?;
    std::fs::remove_file(bench.lb.outside("/sys/fs/bpf/xdp_fw"))?;
    agent.start(&bench.lab)?;
    assert_attached(&bench.lb, "native")?;
    // On the way out only our own goes.
    let other = foreign.attach(&bench.near, "eth0", lab::XdpMode::Native)?;
    agent.stop()?;
    let output = agent.lbd(&["detach"])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_detached(&bench.lb)?;
    ensure!(attached(&bench.near, "eth0")?.is_some(), "detach took a program that is not ours");
    drop(other);
    Ok(())
}

/// An empty neighbour table costs at most one retransmission of the SYN.
#[test]
#[ignore = "needs root"]
fn a26_next_hops_that_the_kernel_forgot() -> Result<()> {
    let (bench, _servers, _agent) = running("a26", "")?;
    neighbours_forgotten(&bench)
}

fn neighbours_forgotten(bench: &Bench) -> Result<()> {
    for round in 0..if fast() { 3 } else { 10 } {
        bench.lb.ip("neigh flush dev hub0")?;
        bench.lb.ip("neigh flush dev ten0")?;
        for client in [&bench.near, &bench.far] {
            let report = lab::load(client, TARGET, false, 1)?;
            ensure!(report.failed == 0 && report.slowest_ms <= 1_500, "round {round}, {}: {report:?}", client.name());
        }
        std::thread::sleep(Duration::from_millis(if fast() { 200 } else { 1_000 }));
    }
    Ok(())
}

/// Strict reverse path filtering breaks nothing, and stays as it was.
#[test]
#[ignore = "needs root"]
fn a29_strict_reverse_path_filtering() -> Result<()> {
    let bench = Bench::new("a29")?;
    for interface in ["all", "default", "ten0", "ten1", "hub0"] {
        bench.lb.sysctl(&format!("net/ipv4/conf/{interface}/rp_filter"), "1")?;
    }
    let _servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
    let agent = bench.agent(&Bench::configuration(""))?;
    for client in [&bench.near, &bench.far] {
        let report = lab::load(client, TARGET, false, 200)?;
        ensure!(report.failed == 0 && report.servers.len() == 3, "{report:?}");
    }
    // Probes work: no backend is down.
    let backends = agent.lbctl(&["backends"])?;
    ensure!(!backends.contains("down"), "{backends}");
    neighbours_forgotten(&bench)?;
    for interface in ["all", "ten0", "ten1", "hub0"] {
        let value = bench.lb.shell(&format!("cat /proc/sys/net/ipv4/conf/{interface}/rp_filter"))?;
        ensure!(value.trim() == "1", "{interface}: rp_filter is now {value}");
    }
    Ok(())
}

/// A frame for another station is not ours, even when the card hands it over.
#[test]
#[ignore = "needs root"]
fn a37_a_frame_for_another_station_is_not_translated() -> Result<()> {
    let (bench, _servers, _agent) = running("a37", "")?;
    bench.lb.ip("link set ten0 promisc on")?;
    let hub = Capture::start(
        &bench.switches[2],
        Keep::Matching(Box::new(|frame| {
            lab::ports(frame).is_some_and(|ports| ports.destination.port() == Bench::NODE_PORT)
        })),
    )?;
    let back = Capture::start(&bench.near, Keep::Matching(Box::new(|frame| lab::ports(frame).is_some())))?;
    let source = lab::mac_bytes(&bench.near.mac("eth0")?)?;
    let syn = |destination: [u8; 6], port: u16| -> Result<Vec<u8>> {
        let mut frame = Vec::new();
        etherparse::PacketBuilder::ethernet2(source, destination)
            .ipv4([192, 0, 2, 60], [192, 0, 2, 34], 64)
            .tcp(port, 6443, 1, 64240)
            .syn()
            .write(&mut frame, &[])?;
        Ok(frame)
    };
    lab::send_frame(&bench.near, "eth0", &syn(lab::mac_bytes("02:00:00:00:01:99")?, 41_001)?)?;
    // The same one, properly addressed: it is translated, so the first one was seen and left.
    lab::send_frame(&bench.near, "eth0", &syn(lab::mac_bytes("02:00:00:00:01:02")?, 41_002)?)?;
    std::thread::sleep(Duration::from_millis(500));
    // Probes come from ports of the kernel's own range; translated connections do not.
    let syns: BTreeSet<_> = hub
        .finish()?
        .kept
        .iter()
        .filter_map(|frame| lab::ports(&frame.bytes))
        .filter(|ports| ports.flags == 2 && ports.source.ip().octets() == [10, 0, 0, 2] && ports.sequence == 1)
        .map(|ports| ports.source.port())
        .collect();
    ensure!(syns.len() == 1, "{} SYNs reached the hub, one was for us", syns.len());
    let answers: BTreeSet<_> = back
        .finish()?
        .kept
        .iter()
        .filter(|frame| !frame.outgoing)
        .filter_map(|frame| lab::ports(&frame.bytes))
        .map(|ports| ports.destination.port())
        .collect();
    ensure!(!answers.contains(&41_001) && answers.contains(&41_002), "answers to ports {answers:?}");
    // Promiscuous mode changes nothing else.
    ensure!(lab::load(&bench.near, TARGET, false, 50)?.failed == 0, "connections fail in promiscuous mode");
    Ok(())
}

/// Many clients with one source port: each gets its own replies.
#[test]
#[ignore = "needs root"]
fn a40_five_hundred_clients_from_one_port() -> Result<()> {
    let (bench, _servers, _agent) = running("a40", "")?;
    for host in 1..=250 {
        bench.far.ip(&format!("address add 198.18.0.{host}/32 dev eth0"))?;
        bench.far.ip(&format!("address add 198.18.1.{host}/32 dev eth0"))?;
    }
    bench.router.ip("route add 198.18.0.0/23 via 203.0.113.9")?;
    for network in ["198.18.0.1", "198.18.1.1"] {
        let hold = Hold::start_with(
            &bench.lab,
            &bench.far,
            TARGET,
            false,
            250,
            4,
            &["--source", network, "--sources", "250", "--source-port", "40000"],
        )?;
        std::thread::sleep(Duration::from_secs(2));
        let report = hold.finish()?;
        report.assert_whole()?;
        ensure!(report.connections == 250 && report.servers.len() == 3, "{report:?}");
    }
    Ok(())
}

/// Flows of a tenant as `lbctl` counts them.
fn flows(agent: &Agent) -> Result<usize> {
    let flows = agent.lbctl_json(&["flows"])?;
    flows.as_array().map(Vec::len).with_context(|| format!("not a list of flows: {flows}"))
}

/// A backend whose probe port answers and whose service port refuses.
const PROBED_ELSEWHERE: &str = "defaults: { health: { port: 31999 } }";

/// Connections that their backend refuses are told so and leave nothing behind.
#[test]
#[ignore = "needs root"]
fn a46_refused_connections_leave_nothing_behind() -> Result<()> {
    let bench = Bench::new("a46")?;
    let _probes = bench.serve_nodes(&[31999])?;
    let agent = Agent::new(&bench.lab, &bench.lb, &Bench::configuration(PROBED_ELSEWHERE))?;
    agent.start(&bench.lab)?;
    lab::wait_until(Duration::from_secs(10), "connections are refused by the node", || {
        let report = lab::load(&bench.near, TARGET, false, 1)?;
        Ok(report.errors.contains_key("connection refused"))
    })?;
    let connections = if fast() { 1_000 } else { 10_000 };
    let report = lab::load(&bench.near, TARGET, false, connections)?;
    ensure!(report.errors.get("connection refused") == Some(&u64::from(connections)), "{report:?}");
    ensure!(report.slowest_ms < 1_000, "a refusal took {} ms", report.slowest_ms);
    // In-window resets expire after 10 s; half-open entries sooner.
    lab::wait_until(Duration::from_secs(20), "no entry is left", || Ok(flows(&agent)? == 0))
}

/// A reset whose sequence number is far off ends nothing.
#[test]
#[ignore = "needs root"]
fn a46_a_blind_reset_does_not_end_a_session() -> Result<()> {
    let (bench, _servers, _agent) = running("a46b", "")?;
    let capture = Capture::start(
        &bench.near,
        Keep::Matching(Box::new(|frame| {
            lab::ports(frame).is_some_and(|ports| ports.destination.port() == 6443 && ports.payload > 0)
        })),
    )?;
    let hold = Hold::start(&bench.lab, &bench.near, TARGET, false, 1, 10)?;
    let seen = lab::eventually(Duration::from_secs(5), "a request is seen", || {
        Ok(capture.summary().kept.last().and_then(|frame| lab::ports(&frame.bytes)))
    })?;
    let macs = (lab::mac_bytes(&bench.near.mac("eth0")?)?, lab::mac_bytes("02:00:00:00:01:02")?);
    for step in [0x2000_0000_u32, 0x4000_0000, 0x8000_0000, 0xc000_0000] {
        let mut frame = Vec::new();
        etherparse::PacketBuilder::ethernet2(macs.0, macs.1)
            .ipv4(seen.source.ip().octets(), seen.destination.ip().octets(), 64)
            .tcp(seen.source.port(), 6443, seen.sequence.wrapping_add(step), 0)
            .rst()
            .write(&mut frame, &[])?;
        lab::send_frame(&bench.near, "eth0", &frame)?;
    }
    // Longer than a flow lives after a reset that counts.
    std::thread::sleep(Duration::from_secs(if fast() { 3 } else { 13 }));
    let report = hold.finish()?;
    report.assert_whole()
}

/// A backend that flaps keeps its sessions; new connections avoid it while it is down.
#[test]
#[ignore = "needs root"]
fn a51_a_flapping_backend_keeps_its_sessions() -> Result<()> {
    let (rounds, pause) = if fast() { (2, 4) } else { (10, 10) };
    let bench = Bench::new("a51")?;
    let _servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
    let mut probes = bench.serve_nodes(&[31999])?;
    let agent = bench.agent(&Bench::configuration(PROBED_ELSEWHERE))?;
    // About fifty of them on each node.
    let hold = Hold::start(&bench.lab, &bench.near, TARGET, false, 150, 5)?;
    for round in 0..rounds {
        probes[1].kill();
        std::thread::sleep(Duration::from_secs(3));
        let report = lab::load(&bench.far, TARGET, false, 100)?;
        ensure!(report.failed == 0 && !report.servers.contains_key("n2"), "round {round}, n2 down: {report:?}");
        let backends = agent.lbctl(&["backends"])?;
        ensure!(backends.lines().any(|line| line.contains("10.0.0.12") && line.contains("down")), "{backends}");
        let listed = agent.lbctl_json(&["backends"])?;
        let held = listed.as_array().into_iter().flatten().find(|backend| {
            backend["tenant"] == "a" && backend["backend"] == "10.0.0.12:30918" && backend["state"] == "down"
        });
        let held = held.and_then(|backend| backend["flows"].as_u64());
        ensure!(held.is_some_and(|held| held > 20), "round {round}: n2 is down with {held:?} sessions: {listed}");
        std::thread::sleep(Duration::from_secs(pause - 3));
        probes[1] = Peer::serve(&bench.lab, &bench.nodes[1], "n2", &[Listener::plain("10.0.0.12", 31999)])?;
        lab::wait_until(Duration::from_secs(10), "n2 serves again", || {
            Ok(lab::load(&bench.far, TARGET, false, 50)?.servers.contains_key("n2"))
        })?;
    }
    let report = hold.finish()?;
    ensure!(report.servers.get("n2").is_some_and(|&count| count > 20), "{report:?}");
    report.assert_whole()
}

/// However often it restarts: one program on each interface, in the same mode.
#[test]
#[ignore = "needs root"]
fn a56_restarts_leave_one_program_on_each_interface() -> Result<()> {
    for mode in ["native", "generic"] {
        let (bench, _servers, agent) = running(&format!("a56{mode}"), &format!("datapath: {{ mode: {mode} }}"))?;
        let hold = Hold::start(&bench.lab, &bench.near, TARGET, false, 20, 10)?;
        let pins = pins(&bench.lb)?;
        for round in 0..if fast() { 3 } else { 20 } {
            if round % 2 == 0 {
                agent.stop()?;
            } else {
                agent.kill();
            }
            assert_attached(&bench.lb, mode)?;
            agent.start(&bench.lab)?;
            assert_attached(&bench.lb, mode)?;
        }
        ensure!(self::pins(&bench.lb)? == pins, "restarts changed what is pinned");
        hold.finish()?.assert_whole()?;
    }
    Ok(())
}

/// Everything below bpffs.
fn pins(namespace: &Namespace) -> Result<BTreeSet<String>> {
    Ok(namespace.shell("find /sys/fs/bpf")?.lines().map(str::to_owned).collect())
}

/// Addresses, and the settings of the network that have no life of their own.
fn settings(namespace: &Namespace) -> Result<BTreeSet<String>> {
    let text = namespace.shell(
        "ip -brief address; find /proc/sys/net/ipv4 /proc/sys/net/core -type f -readable -exec grep -H . {} +",
    )?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// Removal under traffic: programs first, then maps, and the host stays reachable; twice is once.
#[test]
#[ignore = "needs root"]
fn a57_removal_leaves_nothing_and_cuts_nobody_else_off() -> Result<()> {
    for mode in ["native", "generic"] {
        let (bench, _servers, agent) = running(&format!("a57{mode}"), &format!("datapath: {{ mode: {mode} }}"))?;
        let before = settings(&bench.lb)?;
        // The host's own life on the tenant's side, all the while.
        let _host = Peer::serve(&bench.lab, &bench.lb, "host", &[Listener::plain("192.0.2.2", 8080)])?;
        let ticker = Ticker::start(&bench.lab, &bench.near, "192.0.2.2:8080", false, 10)?;
        let hold = Hold::start(&bench.lab, &bench.near, TARGET, false, 20, 10)?;
        std::thread::sleep(Duration::from_millis(300));
        if mode == "native" {
            agent.stop()?;
        } else {
            agent.kill();
        }
        for round in 0..2 {
            let output = agent.lbd(&["detach"])?;
            ensure!(output.status.success(), "round {round}: {}", String::from_utf8_lossy(&output.stderr));
            assert_detached(&bench.lb)?;
        }
        ensure!(lab::get(&bench.near, "192.0.2.2:8080", false)?.name == "host", "the host is cut off");
        let ticks = ticker.finish()?;
        let lost: Vec<_> = ticks.iter().filter(|tick| tick.error.is_some()).collect();
        ensure!(ticks.len() > 20 && lost.is_empty(), "connections to the host failed: {lost:?}");
        drop(hold);
        let after = settings(&bench.lb)?;
        let changed: Vec<_> = before.symmetric_difference(&after).collect();
        ensure!(changed.is_empty(), "addresses or sysctls changed: {changed:?}");
        let neighbours = bench.lb.shell("ip neigh show proxy; ip neigh show nud permanent")?;
        ensure!(neighbours.trim().is_empty(), "neighbour entries are left: {neighbours}");
    }
    Ok(())
}

/// Our own program from a life in the other mode gives way; `native` is never silently less.
#[test]
#[ignore = "needs root"]
fn a58_a_start_in_the_other_mode() -> Result<()> {
    let (bench, _servers, agent) = running("a58", "datapath: { mode: generic }")?;
    assert_attached(&bench.lb, "generic")?;
    agent.kill();
    agent.configure(&Bench::configuration("datapath: { mode: native }"))?;
    agent.start(&bench.lab)?;
    assert_attached(&bench.lb, "native")?;
    let status = agent.lbctl(&["status"])?;
    ensure!(status.contains("native") && !status.contains("generic"), "{status}");
    lab::wait_until(Duration::from_secs(10), "the VIP answers", || Ok(lab::get(&bench.near, TARGET, false).is_ok()))
}

/// A second agent, with a state directory of its own, does not take the datapath from the first.
#[test]
#[ignore = "needs root"]
fn a_second_agent_is_refused() -> Result<()> {
    let (bench, _servers, agent) = running("second", "")?;
    let place = bench.lab.directory().join("second");
    std::fs::create_dir_all(&place)?;
    let (config, directory) = (place.join("lbd.yaml"), place.display());
    let text = Bench::configuration("")
        + &format!("state_dir: {directory}/state\nsocket: {directory}/lbd.sock\nmetrics: 127.0.0.1:9475\n");
    std::fs::write(&config, text)?;
    let before = pins(&bench.lb)?;
    let mut command = std::process::Command::new(lab::binary("lbd")?);
    command.arg("run").arg("--config").arg(&config);
    let process = bench.lab.start(&bench.lb, "second", command)?;
    let status = process.wait(Duration::from_secs(10)).context("a second agent goes on")?;
    let said = process.log();
    ensure!(status.code() == Some(1) && said.contains("another lbd agent uses the datapath"), "{status}: {said}");
    ensure!(pins(&bench.lb)? == before, "the second agent changed what is pinned");
    ensure!(lab::load(&bench.near, TARGET, false, 50)?.failed == 0, "the VIP does not answer any more");
    // A dead one holds nothing.
    agent.kill();
    agent.start(&bench.lab)
}

/// All pins are gone, the program is left: it is recognised, and gives way to the mode that is asked for now.
#[test]
#[ignore = "needs root"]
fn a58_a_left_over_without_pins() -> Result<()> {
    let (bench, _servers, agent) = running("a58b", "datapath: { mode: generic }")?;
    agent.kill();
    // A program stays without its pin only where netlink holds it.
    bench.lb.shell(
        "for name in ten0 ten1 hub0; do
            rm /sys/fs/bpf/lbd/links/$name
            # The kernel lets go of a link a moment after its last holder.
            for again in 1 2 3 4 5 6 7 8 9 10; do
                ip link set dev $name xdpgeneric pinned /sys/fs/bpf/lbd/v2/edge-$name-* && break || sleep 0.2
            done
        done
        rm -r /sys/fs/bpf/lbd",
    )?;
    assert_attached(&bench.lb, "generic")?;
    agent.configure(&Bench::configuration("datapath: { mode: native }"))?;
    agent.start(&bench.lab)?;
    assert_attached(&bench.lb, "native")?;
    ensure!(agent.lbctl(&["status"])?.contains("native"), "status does not show the mode");
    lab::wait_until(Duration::from_secs(10), "the VIP answers", || Ok(lab::get(&bench.near, TARGET, false).is_ok()))?;
    // And `detach` takes what has no pin.
    agent.kill();
    bench.lb.shell("rm /sys/fs/bpf/lbd/links/ten0")?;
    lab::wait_until(Duration::from_secs(2), "the link is gone", || Ok(attached(&bench.lb, "ten0")?.is_none()))?;
    bench.lb.shell("ip link set dev ten0 xdpdrv pinned /sys/fs/bpf/lbd/v2/edge-ten0-*")?;
    let output = agent.lbd(&["detach"])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_detached(&bench.lb)
}

/// Pins of another map ABI are named with the remedy, and keep forwarding.
#[test]
#[ignore = "needs root"]
fn pins_of_another_abi_are_named_and_left_alone() -> Result<()> {
    let (bench, _servers, agent) = running("abi", "")?;
    agent.kill();
    bench.lb.shell("mv /sys/fs/bpf/lbd/v2 /sys/fs/bpf/lbd/v7")?;
    let (code, text) = refused(&bench, &agent)?;
    ensure!(code == Some(1) && text.contains("/lbd/v7") && text.contains("ABI 7"), "{code:?}: {text}");
    ensure!(text.contains("lbd detach"), "no remedy: {text}");
    for words in [&["check"][..], &["lbctl", "flows"]] {
        let output = agent.lbd(words)?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1) && said.contains("ABI 7"), "{words:?}: {output:?}");
    }
    assert_attached(&bench.lb, "native")?;
    ensure!(lab::load(&bench.near, TARGET, false, 50)?.failed == 0, "the VIP does not answer any more");
    let output = agent.lbd(&["detach"])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_detached(&bench.lb)
}

/// A bad file changes nothing and says where; the good one clears the alarm.
#[test]
#[ignore = "needs root"]
fn b17_a_bad_configuration_on_reload() -> Result<()> {
    let (bench, _servers, agent) = running("b17", "")?;
    let good = Bench::configuration("");
    let hold = Hold::start(&bench.lab, &bench.near, TARGET, false, 20, 10)?;
    let bad = [
        ("overlapping pools", good.replace("198.51.100.32/28", "[192.0.2.40-192.0.2.44]")),
        ("unknown key", good.replace("pools:", "pool:")),
        ("VIP outside the segment", good.replace("vip: 192.0.2.34", "vip: 203.0.113.34")),
        ("half a file", good[..good.len() / 2].to_owned()),
        ("an empty file", String::new()),
    ];
    let stale = |wanted: &str| -> Result<()> {
        let metrics = agent.metrics()?;
        let line = metrics.lines().find(|line| line.starts_with("lbd_config_stale ")).unwrap_or("none");
        ensure!(line.ends_with(wanted), "lbd_config_stale: {line}, wanted {wanted}");
        Ok(())
    };
    for (name, text) in bad {
        agent.configure(&text)?;
        if text.is_empty() {
            std::fs::write(agent.config(), "")?;
        }
        let output = agent.lbctl_raw(&["reload"])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.code() == Some(2), "{name}: {:?}: {said}", output.status);
        ensure!(said.contains("lbd.yaml:"), "{name}: no file and line: {said}");
        ensure!(lab::load(&bench.near, TARGET, false, 20)?.failed == 0, "{name}: the VIP does not answer any more");
        let status = agent.lbctl_raw(&["status", "--check"])?;
        ensure!(status.status.code() == Some(1), "{name}: status --check says {:?}", status.status);
    }
    stale("1.0")?;
    // As a ConfigMap is mounted: a link that is swapped for another one; first to a bad file, then to the good one.
    for (name, text, code) in [("bad", good.replace("pools:", "pool:"), 2), ("good", good.clone(), 0)] {
        agent.configure(&text)?;
        let (target, link) = (agent.config().with_extension(name), agent.config().with_extension("link"));
        std::fs::rename(agent.config(), &target)?;
        std::os::unix::fs::symlink(&target, &link)?;
        std::fs::rename(&link, agent.config())?;
        let output = agent.lbctl_raw(&["reload"])?;
        ensure!(output.status.code() == Some(code), "link to the {name} file: {output:?}");
        stale(if code == 0 { "0.0" } else { "1.0" })?;
    }
    std::fs::remove_file(agent.config())?;
    let status = agent.lbctl_raw(&["status", "--check"])?;
    ensure!(status.status.success(), "the alarm stays: {}", String::from_utf8_lossy(&status.stdout));
    // A start with a bad file refuses and leaves the datapath as it is.
    agent.kill();
    agent.configure(&good.replace("pools:", "pool:"))?;
    let (code, text) = refused(&bench, &agent)?;
    ensure!(code == Some(2) && text.contains("lbd.yaml:"), "{code:?}: {text}");
    assert_attached(&bench.lb, "native")?;
    ensure!(lab::load(&bench.near, TARGET, false, 20)?.failed == 0, "the VIP does not answer any more");
    hold.finish()?.assert_whole()
}

/// Tenants do not meet: not by VIP, not through the hub.
#[test]
#[ignore = "needs root"]
fn a_tenant_does_not_reach_the_other_ones_vip() -> Result<()> {
    let (bench, _servers, _agent) = running("apart", "")?;
    lab::get(&bench.other, OTHER_TARGET, false)?;
    bench.near.ip("route add 198.51.100.0/24 via 192.0.2.2")?;
    bench.other.ip("route add 192.0.2.0/24 via 198.51.100.2")?;
    for (client, target) in [(&bench.near, OTHER_TARGET), (&bench.other, TARGET)] {
        let mut command = client.command(lab::binary("lbd-test-peer")?);
        let output = command.args(["get", "--target", target, "--limit", "1"]).output()?;
        ensure!(!output.status.success(), "{} reaches {target}", client.name());
    }
    Ok(())
}
