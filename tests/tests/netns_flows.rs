//! Lives of connections: how a backend is chosen and chosen again, ports that run out, idleness, lost state, and whom backends see.
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use lbd_tests::lab::{self, Agent, Bench, Capture, Hold, Keep, Listener, Nic, Peer, Ticker, Untouched, Watch, fast};

const TARGET: &str = "192.0.2.34:6443";
const LB_MAC: &str = "02:00:00:00:01:02";

/// A bench with servers and a running agent; the configuration is changed first.
fn running(name: &str, change: impl Fn(String) -> String) -> Result<(Bench, Vec<Peer>, Agent)> {
    let bench = Bench::new(name)?;
    let servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
    let agent = bench.agent(&change(Bench::configuration("")))?;
    Ok((bench, servers, agent))
}

fn counted(agent: &Agent, tenant: &str, reason: &str) -> Result<u64> {
    Ok(agent.reasons(Some(tenant))?.get(reason).copied().unwrap_or_default())
}

fn reload(agent: &Agent, configuration: &str) -> Result<()> {
    agent.configure(configuration)?;
    agent.lbctl(&["reload", "--accept-loss"]).map(drop)
}

/// Tenant a's configuration without one of its nodes.
fn without(name: &str) -> Result<String> {
    let nodes = ["10.0.0.11", "10.0.0.12", "10.0.0.13"];
    let gone = nodes.get(name.trim_start_matches('n').parse::<usize>()? - 1).context("no such node")?;
    let left: Vec<_> = nodes.into_iter().filter(|node| node != gone).collect();
    Ok(Bench::configuration("").replacen("[10.0.0.11, 10.0.0.12, 10.0.0.13]", &format!("[{}]", left.join(", ")), 1))
}

/// A client comes again from the port of a connection that is closed, and whose node is gone: it gets another node, at once.
#[test]
#[ignore = "needs root"]
fn a38_a_port_is_used_again_after_its_node_is_gone() -> Result<()> {
    let (bench, _servers, agent) = running("a38", |text| text)?;
    let other = Untouched::since_now(&agent, "b")?;
    for (round, port) in ["40000", "40001", "40002"].into_iter().enumerate() {
        reload(&agent, &Bench::configuration(""))?;
        agent.wait_backends_up(6)?;
        let options = ["--source", "203.0.113.9", "--source-port", port];
        let first = lab::get_with(&bench.far, TARGET, false, &options)?.name;
        reload(&agent, &without(&first)?)?;
        let report = lab::load_with(&bench.far, TARGET, false, 1, &options)?;
        ensure!(report.failed == 0 && report.slowest_ms < 1_500, "round {round}: {report:?}");
        ensure!(!report.servers.contains_key(&first), "round {round}: the removed {first} got it again");
    }
    other.check(&agent)
}

/// The same after the client has crashed: nobody has closed the old connection, whose node is gone.
#[test]
#[ignore = "needs root"]
fn a38_a_crashed_client_comes_again_from_the_same_port() -> Result<()> {
    let (bench, _servers, agent) = running("a38b", |text| text)?;
    let options = ["--source", "192.0.2.60", "--source-port", "40000"];
    let hold = Hold::start_with(&bench.lab, &bench.near, TARGET, false, 1, 5, &options)?;
    let flows = agent.flows(&["--client", "192.0.2.60:40000"])?;
    let node = flows.first().and_then(|flow| flow["backend"].as_str()).context("no flow is listed")?.to_owned();
    let first = format!("n{}", &node["10.0.0.1".len()..="10.0.0.1".len()]);
    let mac = bench.near.mac("eth0")?;
    bench.near.ip("link set eth0 down")?;
    reload(&agent, &without(&first)?)?;
    // The machine boots: same addresses, and no memory.
    let again = bench.lab.namespace("again")?;
    bench.lab.plug(&bench.switches[0], &again, "eth0", &Nic::new("192.0.2.60/24").mac(&mac))?;
    let report = lab::load_with(&again, TARGET, false, 1, &options)?;
    ensure!(report.failed == 0 && report.slowest_ms < 8_000, "{report:?}");
    ensure!(!report.servers.contains_key(&first), "the removed {first} got it");
    println!("{} ms until the connection of the new life", report.slowest_ms);
    drop(hold);
    Ok(())
}

/// One hundred ports and one node.
fn scarce(text: &str) -> String {
    text.replace("snat: [10.0.0.2]\n", "snat: [10.0.0.2]\n    snat_ports: 20000-20099\n").replacen(
        "[10.0.0.11, 10.0.0.12, 10.0.0.13]",
        "[10.0.0.11]",
        1,
    )
}

fn scarce_bench(name: &str) -> Result<(Bench, Vec<Peer>, Agent)> {
    let bench = Bench::new(name)?;
    let servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
    let agent = Agent::new(&bench.lab, &bench.lb, &scarce(&Bench::configuration("")))?;
    agent.start(&bench.lab)?;
    // Connections would use ports up: ask the agent instead.
    agent.wait_backends_up(4)?;
    lab::wait_until(Duration::from_secs(10), "the VIP is ours", || {
        bench.near.ip("neigh flush dev eth0")?;
        lab::ping(&bench.near, Bench::VIP)?;
        Ok(bench.near.shell("ip neigh show 192.0.2.34")?.contains(LB_MAC))
    })?;
    Ok((bench, servers, agent))
}

/// One hundred ports serve one hundred connections; more are refused at once, counted and told; ports come back after the time that
/// closed ones are kept.
#[test]
#[ignore = "needs root"]
fn a41_snat_ports_run_out_and_come_back() -> Result<()> {
    let (bench, _servers, agent) = scarce_bench("a41")?;
    let other = Untouched::since_now(&agent, "b")?;
    // Idle: nothing between the first request and the last. All ports are found, also the last ones.
    let stay = Hold::start(&bench.lab, &bench.near, TARGET, false, 40, 0)?;
    let leave = Hold::start(&bench.lab, &bench.near, TARGET, false, 60, 0)?;
    let listed = agent.flows(&["--tenant", "a"])?;
    ensure!(listed.len() == 100, "{} flows", listed.len());
    let ports: std::collections::BTreeSet<_> = listed
        .iter()
        .filter_map(|flow| flow["snat"].as_str()?.strip_prefix("10.0.0.2:")?.parse::<u16>().ok())
        .collect();
    ensure!(ports == (20_000..=20_099).collect(), "ports in use: {ports:?}");
    let before = counted(&agent, "a", "snat_exhausted")?;
    let report = lab::load_with(&bench.near, TARGET, false, 50, &["--limit", "5"])?;
    ensure!(report.errors.get("connection refused") == Some(&50), "{report:?}");
    ensure!(report.slowest_ms < 1_000, "a refusal took {} ms", report.slowest_ms);
    let refused = counted(&agent, "a", "snat_exhausted")? - before;
    ensure!(refused >= 50, "{refused} refusals counted");
    // Counted for the VIP, too.
    let services = agent.lbctl_json(&["services"])?;
    let told = services.as_array().into_iter().flatten().any(|service| {
        service["vip"] == "192.0.2.34:6443" && service["refused"].as_u64().is_some_and(|refused| refused >= 50)
    });
    ensure!(told, "the VIP's refusals are not counted: {services}");
    snat_exhaustion_is_told(&agent)?;
    let report = leave.finish()?;
    report.assert_whole()?;
    ensure!(report.connections == 60, "{report:?}");
    if !fast() {
        // Closed ones are kept for 75 s, in case of stragglers.
        let closed = Instant::now();
        let early = lab::load_with(&bench.far, TARGET, false, 5, &["--limit", "5"])?;
        ensure!(early.errors.get("connection refused") == Some(&5), "too early: {early:?}");
        std::thread::sleep(Duration::from_secs(150).saturating_sub(closed.elapsed()));
        let fresh = Hold::start(&bench.lab, &bench.far, TARGET, false, 60, 0)?;
        let report = fresh.finish()?;
        report.assert_whole()?;
        ensure!(report.connections == 60, "{report:?}");
    }
    let report = stay.finish()?;
    report.assert_whole()?;
    ensure!(report.connections == 40, "{report:?}");
    other.check(&agent)
}

/// One lasting event and one metric name the VIP, and the backend whose ports are used up.
fn snat_exhaustion_is_told(agent: &Agent) -> Result<()> {
    let mut told = Vec::new();
    lab::wait_until(Duration::from_secs(10), "SnatExhausted is told", || {
        let events = agent.lbctl_json(&["events"])?;
        let ours = |event: &&serde_json::Value| event["reason"] == "SnatExhausted";
        told = events.as_array().into_iter().flatten().filter(ours).cloned().collect();
        Ok(!told.is_empty())
    })?;
    // More refusals of the same kind are no more events.
    std::thread::sleep(Duration::from_secs(2));
    let [event] = told.as_slice() else { bail!("{told:?}") };
    ensure!(event["active"] == true && event["level"] == "warning" && event["tenant"] == "a", "{event}");
    let message = event["message"].as_str().unwrap_or_default();
    for named in ["192.0.2.34:6443/TCP", "10.0.0.11:30918", "10.0.0.2 "] {
        ensure!(message.contains(named), "{named} is not named: {message}");
    }
    for other in ["192.0.2.35", "10.0.0.12", Bench::OTHER_VIP] {
        ensure!(!message.contains(other), "{other} has nothing to do with it: {message}");
    }
    let metrics = agent.metrics()?;
    let line = metrics.lines().find(|line| line.starts_with("lbd_snat_exhausted{")).unwrap_or_default();
    for label in ["tenant=\"a\"", "vip=\"192.0.2.34:6443\"", "snat=\"10.0.0.2\"", "backend=\"10.0.0.11:30918\"", "} 1"]
    {
        ensure!(line.contains(label), "{label} is not in {line:?}");
    }
    ensure!(metrics.contains("lbd_notices{reason=\"SnatExhausted\"} 1"), "{metrics}");
    Ok(())
}

/// Ten thousand connections a minute over a hundred ports: each ends at once, one way or the other, and a port is used again only after
/// its time.
#[test]
#[ignore = "needs root"]
fn a41_many_short_connections_over_few_ports() -> Result<()> {
    let (bench, _servers, agent) = scarce_bench("a41b")?;
    let other = Untouched::since_now(&agent, "b")?;
    let hold = Hold::start(&bench.lab, &bench.far, TARGET, false, 10, 2)?;
    let ticker = Ticker::start(&bench.lab, &bench.near, TARGET, false, 6)?;
    let begun = Instant::now();
    std::thread::sleep(Duration::from_secs(if fast() { 8 } else { 600 }));
    let ticks = ticker.finish()?;
    let elapsed = begun.elapsed().as_secs();
    hold.finish()?.assert_whole()?;
    let served = ticks.iter().filter(|tick| tick.error.is_none()).count();
    let strange: Vec<_> =
        ticks.iter().filter(|tick| tick.error.as_deref().is_some_and(|error| error != "connection refused")).collect();
    println!("{} connections in {elapsed} s: {served} served", ticks.len());
    ensure!(strange.is_empty(), "neither served nor refused: {strange:?}");
    let slowest = ticks.iter().map(|tick| tick.took_ms).max().unwrap_or_default();
    ensure!(slowest < 1_500, "one took {slowest} ms");
    // 90 ports are left beside the ten that are held. A client that happens to come again from the port of its own closed connection (of
    // the 28,232 that Linux chooses from) may have its SNAT port again at once.
    let again = 2 * ticks.len() * 90 / 28_232 + 20;
    let most = 90 * (1 + elapsed as usize / 75) + again;
    ensure!(served >= 90 && served <= most, "{served} were served, 90 to {most} can be");
    ensure!(elapsed < 300 || served >= 90 * 3, "ports do not come back: {served}");
    other.check(&agent)
}

/// The time that idle connections are given, never less than RFC 5382 asks for.
const IDLE: &str = "defaults: { timeouts: { tcp_established: 2h4m } }";

/// Watches and tunnels are silent for long: they live as long as promised, and when they are dropped, both sides learn it.
#[test]
#[ignore = "needs root"]
fn a48_idle_connections_live_for_two_hours() -> Result<()> {
    let bench = Bench::new("a48")?;
    let _servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
    let agent = bench.agent(&Bench::configuration(IDLE))?;
    // The clock hand moves with new connections.
    let turn = || -> Result<()> {
        for _ in 0..3 {
            let report = lab::load(&bench.far, TARGET, false, 200)?;
            ensure!(report.failed == 0, "{report:?}");
        }
        Ok(())
    };
    let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
    let hold = Hold::start(&bench.lab, &bench.near, TARGET, false, 20, 0)?;
    let idle = |least: Duration| -> Result<usize> {
        let flows = agent.flows(&["--client", "192.0.2.60"])?;
        Ok(flows.iter().filter(|flow| flow["idle_s"].as_u64().is_some_and(|idle| idle >= least.as_secs())).count())
    };
    let watch = Watch::start(&bench.lab, &bench.near, TARGET, 5, 4_000)?;
    ensure!(agent.age_flows(minutes(15))? >= 50, "there are no flows");
    turn()?;
    // The watched ones may have spoken since.
    let old = idle(minutes(15))?;
    ensure!(old >= 20, "{old} flows are idle for 15 minutes");
    // The server speaks first, after a quarter of an hour.
    std::thread::sleep(Duration::from_secs(5));
    let lines = watch.finish()?;
    for connection in 0..5 {
        let heard = lines.iter().filter(|line| line.connection == connection).count();
        ensure!(heard >= 2, "connection {connection} heard {heard} lines");
    }
    // A keepalive after two hours comes in time, and the next one too.
    agent.age_flows(minutes(105))?;
    turn()?;
    let old = idle(minutes(120))?;
    ensure!(old == 20, "{old} flows are idle for two hours");
    let report = hold.finish()?;
    report.assert_whole()?;
    ensure!(report.requests == 20, "{report:?}");

    // Beyond what is promised: gone, and told.
    let hold = Hold::start(&bench.lab, &bench.near, TARGET, false, 20, 0)?;
    let watch = Watch::start(&bench.lab, &bench.near, TARGET, 5, 8_000)?;
    agent.age_flows(minutes(125))?;
    turn()?;
    lab::wait_until(Duration::from_secs(5), "idle flows are gone", || {
        turn()?;
        Ok(agent.flows(&["--client", "192.0.2.60", "--state", "established"])?.is_empty())
    })?;
    let begun = Instant::now();
    let report = hold.finish()?;
    ensure!(report.reset == 20 && begun.elapsed() < Duration::from_secs(5), "clients are not told: {report:?}");
    std::thread::sleep(Duration::from_secs(9));
    // The server has pushed, and was told: its sockets are gone.
    let sockets = bench
        .nodes
        .iter()
        .map(|node| Ok(node.shell("ss -Htn state established '( sport = :30918 )'")?.lines().count()))
        .sum::<Result<usize>>()?;
    // Those that never speak learn it when they do, or by their keepalive.
    ensure!(sockets <= 20, "{sockets} sockets of servers wait for ever");
    drop(watch);
    Ok(())
}

/// All state is lost: clients are told with their next packet, no stray packet makes any, and none reaches a node.
#[test]
#[ignore = "needs root"]
fn a49_packets_without_state_are_refused_and_make_none() -> Result<()> {
    let (bench, _servers, agent) = running("a49", |text| text)?;
    let hold = Hold::start(&bench.lab, &bench.near, TARGET, false, 20, 0)?;
    agent.stop()?;
    let output = agent.lbd(&["detach"])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    agent.start(&bench.lab)?;
    agent.wait_backends_up(6)?;
    lab::wait_until(Duration::from_secs(10), "the VIP is served again", || {
        lab::get_with(&bench.other, "198.51.100.34:6443", false, &["--limit", "1"])?;
        Ok(true)
    })?;
    let other = Untouched::since_now(&agent, "b")?;
    let to_node = |frame: &[u8]| {
        lab::ports(frame).is_some_and(|ports| {
            // Probes come from the host's own ports.
            ports.destination.port() == Bench::NODE_PORT && ports.source.port() < 32_768
        })
    };
    let hub = Capture::start(&bench.switches[2], Keep::Matching(Box::new(to_node)))?;
    let before = counted(&agent, "a", "no_flow")?;
    let begun = Instant::now();
    let report = hold.finish()?;
    ensure!(report.reset == 20 && begun.elapsed() < Duration::from_secs(3), "{:?}: {report:?}", begun.elapsed());
    ensure!(counted(&agent, "a", "no_flow")? >= before + 20, "not counted");

    let way = (lab::mac_bytes(&bench.near.mac("eth0")?)?, lab::mac_bytes(LB_MAC)?);
    let answers = Capture::start(
        &bench.near,
        Keep::Matching(Box::new(|frame| lab::ports(frame).is_some_and(|ports| ports.source.port() == 6443))),
    )?;
    let strays = [
        ("ACK", 0x10, true),
        ("data", 0x18, true),
        ("FIN", 0x11, true),
        ("RST", 0x04, false),
        ("RST and ACK", 0x14, false),
        ("SYN-ACK", 0x12, true),
    ];
    for (number, (_, flags, _)) in strays.into_iter().enumerate() {
        let (from, to) = (SocketAddr::from(([192, 0, 2, 61], 45_000 + number as u16)), TARGET.parse()?);
        lab::send_frame(&bench.near, "eth0", &lab::tcp_frame(way, from, to, flags, (1000, 2000))?)?;
    }
    // The answers are for a host that there is not: they come to the MAC address that asked.
    std::thread::sleep(Duration::from_millis(500));
    let answers = answers.finish()?;
    for (number, (name, _, answered)) in strays.into_iter().enumerate() {
        let got: Vec<_> = answers
            .kept
            .iter()
            .filter(|frame| !frame.outgoing)
            .filter_map(|frame| lab::ports(&frame.bytes))
            .filter(|ports| ports.destination.port() == 45_000 + number as u16)
            .collect();
        ensure!(got.len() == usize::from(answered), "{name}: {} answers", got.len());
        // RFC 9293 §3.10.7.1: the reset has the number that the packet acknowledged.
        ensure!(got.iter().all(|ports| ports.flags & 4 != 0 && ports.sequence == 2000), "{name}: {got:?}");
    }
    ensure!(answers.bad == 0, "{:?}", answers.assert_good());
    ensure!(agent.flows(&["--tenant", "a"])?.is_empty(), "a flow was made");
    let crossed = hub.finish()?.kept.len();
    ensure!(crossed == 0, "{crossed} packets reached the nodes");
    other.check(&agent)
}

/// One client's connections spread over all nodes; with `affinity: source` they do not.
#[test]
#[ignore = "needs root"]
fn a65_one_client_spreads_over_all_nodes_unless_asked_otherwise() -> Result<()> {
    let (bench, _servers, agent) = running("a65", |text| text)?;
    // As many as it takes for chance to stay within 15 %: five standard deviations.
    let connections = 2_400;
    let report = lab::load(&bench.near, TARGET, false, connections)?;
    let fair = f64::from(connections) / 3.0;
    ensure!(
        report.failed == 0
            && report.servers.len() == 3
            && report.servers.values().all(|&count| (count as f64 - fair).abs() <= 0.15 * fair),
        "{report:?}"
    );
    reload(
        &agent,
        &Bench::configuration("").replacen(
            "        vip: 192.0.2.34\n",
            "        vip: 192.0.2.34\n        affinity: source\n",
            1,
        ),
    )?;
    for client in [&bench.near, &bench.far] {
        let report = lab::load(client, TARGET, false, 300)?;
        ensure!(report.failed == 0 && report.servers.len() == 1, "{}: {report:?}", client.name());
    }
    let report = lab::load(&bench.other, "198.51.100.34:6443", false, 300)?;
    ensure!(report.failed == 0 && report.servers.len() == 3, "the other tenant: {report:?}");
    Ok(())
}

/// Backends that route replies through the host see who the client is; two clients' connections that would be one to a backend are not.
#[test]
#[ignore = "needs root"]
fn preserve_client_shows_backends_who_the_client_is() -> Result<()> {
    let bench = Bench::dual("preserve")?;
    for node in &bench.nodes {
        for (prefix, gateway) in [
            ("192.0.2.0/24", "10.0.0.2"),
            ("203.0.113.0/24", "10.0.0.2"),
            ("2001:db8:a::/64", "2001:db8:f::2"),
            ("2001:db8:c::/64", "2001:db8:f::2"),
        ] {
            node.ip(&format!("route add {prefix} via {gateway}"))?;
        }
    }
    let _servers = bench.serve_dual()?;
    let second = "      - name: second
        vip: 192.0.2.35
        ports: [{ port: 6443, target: 30918 }]
        backends: [10.0.0.11]
  - name: b\n";
    let configuration = Bench::dual_configuration("")
        .replacen(
            "    segment: { interface: ten0 }\n",
            "    segment: { interface: ten0 }\n    preserve_client: true\n",
            1,
        )
        .replace("  - name: b\n", second)
        .replacen("[10.0.0.11, 10.0.0.12, 10.0.0.13]", "[10.0.0.11]", 1);
    let agent = bench.dual_agent(&configuration)?;
    let other = Untouched::since_now(&agent, "b")?;
    let captures = bench.lab.capture()?;
    for (vip, near, far) in
        [(Bench::VIP, "192.0.2.60", "203.0.113.9"), (Bench::VIP6, "2001:db8:a::60", "2001:db8:c::9")]
    {
        for (client, address) in [(&bench.near, near), (&bench.far, far)] {
            let answer = lab::get(client, &lab::socket(vip, 6443), false)?;
            let peer: SocketAddr = answer.peer.parse()?;
            ensure!(peer.ip().to_string() == address, "the backend sees {peer}, not {address}");
            let report = lab::load(client, &lab::socket(vip, 6443), false, if fast() { 200 } else { 2_000 })?;
            ensure!(report.failed == 0, "{report:?}");
            let report = lab::datagrams(client, &lab::socket(vip, Bench::UDP_PORTS.0), 500, &["--sockets", "10"])?;
            report.assert_whole()?;
            ensure!(report.peers.len() == 1 && report.peers.contains_key(address), "{report:?}");
            let moved = lab::transfer(client, &lab::socket(vip, 6443), false, 4 << 20)?;
            ensure!(moved.down_equal && moved.up_equal, "{moved:?}");
        }
    }
    // From one port to two VIPs of the same backend: the backend could not tell them apart.
    let options = ["--source", "192.0.2.60", "--source-port", "40000"];
    let first = Hold::start_with(&bench.lab, &bench.near, TARGET, false, 1, 5, &options)?;
    let options = ["--source", "192.0.2.60", "--source-port", "40000", "--limit", "5"];
    let report = lab::load_with(&bench.near, "192.0.2.35:6443", false, 1, &options)?;
    ensure!(report.errors.contains_key("connection refused"), "{report:?}");
    ensure!(counted(&agent, "a", "tuple_in_use")? > 0, "not counted");
    first.finish()?.assert_whole()?;
    let report = lab::load(&bench.other, &lab::socket(Bench::OTHER_VIP, 6443), false, 100)?;
    ensure!(report.failed == 0, "{report:?}");
    let answer = lab::get(&bench.other, &lab::socket(Bench::OTHER_VIP, 6443), false)?;
    ensure!(answer.peer.starts_with("10.0.0.2:"), "the other tenant's client is seen: {answer:?}");
    for namespace in bench.lab.namespaces().iter().filter(|namespace| namespace.name() != "router") {
        lab::Lab::assert_no_forwarding(namespace)?;
    }
    for capture in captures {
        let summary = capture.finish()?;
        ensure!(summary.bad == 0, "{:?}", summary.assert_good());
    }
    other.check(&agent)
}

/// A tenant's own source address at the hub, which the host does not have: nodes find it all the same.
#[test]
#[ignore = "needs root"]
fn a_tenants_own_snat_address_is_answered_for() -> Result<()> {
    let bench = Bench::dual("snat")?;
    let _servers = bench.serve_dual()?;
    let configuration = Bench::dual_configuration("").replacen(
        "    segment: { interface: ten0 }\n",
        "    segment: { interface: ten0 }\n    snat: [10.0.0.77, '2001:db8:f::77']\n",
        1,
    );
    let agent = bench.dual_agent(&configuration)?;
    let untouched = Untouched::since_now(&agent, "b")?;
    let mac = bench.lb.mac("hub0")?;
    for (vip, other, own, hosts) in [
        (Bench::VIP, Bench::OTHER_VIP, "10.0.0.77", "10.0.0.2"),
        (Bench::VIP6, Bench::OTHER_VIP6, "2001:db8:f::77", "2001:db8:f::2"),
    ] {
        for node in &bench.nodes {
            node.ip("neigh flush dev eth0")?;
        }
        for client in [&bench.near, &bench.far] {
            let report = lab::load(client, &lab::socket(vip, 6443), false, 100)?;
            ensure!(report.failed == 0 && report.servers.len() == 3, "{report:?}");
            let peer: SocketAddr = lab::get(client, &lab::socket(vip, 6443), false)?.peer.parse()?;
            ensure!(peer.ip().to_string() == own, "the backend sees {peer}");
            let report = lab::datagrams(client, &lab::socket(vip, Bench::UDP_PORTS.0), 200, &["--sockets", "5"])?;
            report.assert_whole()?;
            ensure!(report.peers.contains_key(own) && report.peers.len() == 1, "{report:?}");
        }
        for node in &bench.nodes {
            let known = node.shell(&format!("ip neigh show {own}"))?;
            ensure!(known.contains(&mac), "{}: {own} is {known}", node.name());
        }
        let peer: SocketAddr = lab::get(&bench.other, &lab::socket(other, 6443), false)?.peer.parse()?;
        ensure!(peer.ip().to_string() == hosts, "tenant b's backends see {peer}");
        // Not an address of the host: nothing of the host answers there, and the kernel never resets a connection of it.
        let report = lab::load_with(&bench.nodes[0], &lab::socket(own, 22), false, 1, &["--limit", "1"])?;
        ensure!(report.failed == 1, "{report:?}");
        ensure!(!bench.lb.shell("ip address show")?.contains(own), "{own} is on an interface");
    }
    // Nor is it answered for at a tenant.
    bench.near.ip("route add 10.0.0.77/32 dev eth0")?;
    let report = lab::load_with(&bench.near, "10.0.0.77:80", false, 1, &["--limit", "1"])?;
    let known = bench.near.shell("ip neigh show 10.0.0.77")?;
    ensure!(report.failed == 1 && !known.contains(LB_MAC), "ARP for it is answered at the tenant: {known}");
    untouched.check(&agent)
}

/// No backend at all: whoever connects is told within a second, and nothing piles up; when one comes, it is served.
#[test]
#[ignore = "needs root"]
fn b53_no_backend_refuses_at_once_and_recovers() -> Result<()> {
    use lbd_tests::apiserver;
    let seed = lab::Seed::new("b53")?;
    let api = lab::Api::start(&seed.lab, &seed.api, "10.32.96.10:6443")?;
    let nodes = |api: &lab::Api| -> Result<()> {
        for (place, node) in seed.nodes.iter().enumerate() {
            api.create(&apiserver::node(node.name(), &lab::Seed::node_address(place)))?;
        }
        Ok(())
    };
    nodes(&api)?;
    let agent = Agent::new(&seed.lab, &seed.lb, &lab::Seed::kubernetes_configuration(api.kubeconfig()))?;
    agent.start(&seed.lab)?;
    let target = "192.168.203.110:6443";
    let serve = || -> Result<Vec<Peer>> {
        let mut peers = Vec::new();
        for (place, node) in seed.nodes.iter().enumerate() {
            let listeners = [Listener::plain(&lab::Seed::node_address(place), 30918)];
            peers.push(Peer::serve(&seed.lab, node, node.name(), &listeners)?);
        }
        Ok(peers)
    };
    let servers = serve()?;
    api.create(&apiserver::service("clusters-tenant-a", "kube-apiserver", "LoadBalancer", &[(6443, 30918)]))?;
    seed.wait_served(target, false, Duration::from_secs(10))?;
    // Closed connections stay for a minute.
    let closed = agent.flows(&["--vip", target])?.len();
    let refused = |what: &str| -> Result<()> {
        for client in [&seed.client, &seed.far] {
            // Few enough for the limit on refusals.
            let report = lab::load(client, target, false, 10)?;
            ensure!(report.errors.get("connection refused") == Some(&10), "{what}: {report:?}");
            ensure!(report.slowest_ms < 1_000, "{what}: a refusal took {} ms", report.slowest_ms);
        }
        lab::wait_until(Duration::from_secs(20), &format!("{what}: nothing piles up"), || {
            let left = agent.flows(&["--vip", target])?.len();
            ensure!(left <= closed, "{left} flows, {closed} before");
            Ok(true)
        })
    };
    // The Deployment is scaled to nothing: the nodes refuse.
    drop(servers);
    refused("nodes that refuse")?;
    // All nodes are gone: the datapath refuses.
    for node in &seed.nodes {
        api.delete("Node", "", node.name())?;
    }
    lab::wait_until(Duration::from_secs(10), "the nodes are gone", || {
        let list = agent.lbctl_json(&["backends"])?;
        Ok(!list.to_string().contains("10.32.96.105"))
    })?;
    let counted = || counted(&agent, "tenant-a", "no_backend");
    let none = counted()?;
    lab::wait_until(Duration::from_secs(5), "the datapath knows no node", || {
        lab::load(&seed.client, target, false, 1)?;
        Ok(counted()? > none)
    })?;
    let before = counted()?;
    refused("no nodes")?;
    let refusals = counted()? - before;
    ensure!(refusals >= 20, "{refusals} refusals are counted");
    // Recovery within the time of a few probes.
    let _servers = serve()?;
    nodes(&api)?;
    seed.wait_served(target, false, Duration::from_secs(5))?;
    let report = lab::load(&seed.client, target, false, 100)?;
    ensure!(report.failed == 0, "{report:?}");
    Ok(())
}
