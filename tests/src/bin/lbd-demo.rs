//! `cargo xtask demo`: lbd at work on the networks of a site with hosted control planes, in namespaces of this machine.
//!
//! Every step asserts what it shows; the exit code is 0 only if all of them held.
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use lbd_tests::apiserver;
use lbd_tests::lab::{self, Agent, Api, Hold, HoldReport, Lab, Listener, Namespace, Peer, Seed, Ticker};

/// The NodePort that the API server's Service moves to.
const NEW_PORT: u16 = 31222;

fn main() -> ExitCode {
    let begun = Instant::now();
    match demo() {
        Ok(()) => {
            println!("\nAll of it worked, in {:.0} s. Nothing is left behind.", begun.elapsed().as_secs_f64());
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("\nIt did not work: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// One line of the show: what happens, and what came of it.
fn show(what: &str, result: &str) {
    println!("  {what:<58} {result}");
}

fn title(text: &str) {
    println!("\n{text}");
}

fn counts(counts: &BTreeMap<String, u64>) -> String {
    counts.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
}

fn demo() -> Result<()> {
    println!(
        "   client .150, far client 172.20.0.9 ┐                                  ┌ nodes n5 … n8  10.32.96.105 … .108
      workers w1, w2  .101, .102      ┤ 192.168.203.0/24    10.32.96.0/20 ┤
                                      └─── eth1 .2 [ lbd ] eth0 .50 ─────┘ Kubernetes API  10.32.96.10"
    );
    let seed = Seed::new("demo")?;
    let result = on(&seed);
    if result.is_err() {
        seed.lab.show_logs();
    }
    result
}

fn on(seed: &Seed) -> Result<()> {
    let captures = seed.lab.capture()?;
    let api = Api::start(&seed.lab, &seed.api, "10.32.96.10:6443")?;
    for place in 0..seed.nodes.len() {
        api.create(&apiserver::node(seed.nodes[place].name(), &Seed::node_address(place)))?;
    }
    api.create(&apiserver::service(
        "openshift-ingress",
        "router-nodeport-tenant-a",
        "NodePort",
        &[(443, Seed::SHARED_PORTS.0), (80, Seed::SHARED_PORTS.1)],
    ))?;
    let agent = Agent::new(&seed.lab, &seed.lb, &Seed::kubernetes_configuration(api.kubeconfig()))?;
    agent.start(&seed.lab)?;

    let servers = roles(seed, &api)?;
    look(seed, &agent)?;
    let servers = node_port_moves(seed, &api, servers)?;
    node_dies(seed, &servers)?;
    agent_dies(seed, &agent)?;
    wall(seed)?;

    for namespace in seed.lab.namespaces().iter().filter(|namespace| namespace.name() != "router") {
        Lab::assert_no_forwarding(namespace)?;
    }
    let mut frames = 0;
    for capture in captures {
        let summary = capture.finish()?;
        ensure!(summary.bad == 0, "{:?}", summary.assert_good());
        frames += summary.frames;
    }
    show("net.ipv4.ip_forward, bad checksums in all captures", &format!("0, 0 of {frames} frames"));
    Ok(())
}

/// Who answered a request, and what it saw.
fn answer(client: &Namespace, target: &str, tls: bool) -> Result<String> {
    let begun = Instant::now();
    let answer = lab::get(client, target, tls)?;
    Ok(format!("{} at {} sees {} ({} ms)", answer.name, answer.local, answer.peer, begun.elapsed().as_millis()))
}

/// Waits until a VIP answers, from the first try on.
fn served(client: &Namespace, target: &str, tls: bool) -> Result<String> {
    lab::eventually(Duration::from_secs(10), &format!("{target} answers"), || answer(client, target, tls).map(Some))
}

struct Servers {
    api: Vec<Peer>,
    shared: Vec<Peer>,
    _workers: Vec<Peer>,
}

fn roles(seed: &Seed, api: &Api) -> Result<Servers> {
    title("Three roles, one agent: two learnt from Kubernetes, one from its file");
    let begun = Instant::now();
    api.create(&apiserver::service("clusters-tenant-a", "kube-apiserver", "LoadBalancer", &[(6443, Seed::API_PORT)]))?;
    let vip = api.wait_address("clusters-tenant-a", "kube-apiserver", Duration::from_secs(5))?;
    ensure!(vip == Seed::API_VIP, "the Service got {vip}, not the first address of the pool");
    show(
        "api-lb: Service kube-apiserver appears, no backend yet",
        &format!("VIP {vip} after {} ms", begun.elapsed().as_millis()),
    );
    let mut servers = Servers { api: Vec::new(), shared: Vec::new(), _workers: seed.serve_workers()? };
    for (place, node) in seed.nodes.iter().enumerate() {
        let address = Seed::node_address(place);
        let shared = [Listener::tls(&address, Seed::SHARED_PORTS.0), Listener::plain(&address, Seed::SHARED_PORTS.1)];
        servers.shared.push(Peer::serve(&seed.lab, node, node.name(), &shared)?);
        servers.api.push(Peer::serve(&seed.lab, node, node.name(), &[Listener::tls(&address, Seed::API_PORT)])?);
    }
    let target = format!("{vip}:6443");
    show(&format!("api-lb: https://{target} from behind the router"), &served(&seed.far, &target, true)?);
    for (name, target, tls) in [
        ("ingress-shared-lb: https", format!("{}:443", Seed::SHARED_VIP), true),
        ("ingress-shared-lb: http", format!("{}:80", Seed::SHARED_VIP), false),
        ("ingress-lb, one-armed: https", format!("{}:443", Seed::INGRESS_VIP), true),
        ("ingress-lb, one-armed: http", format!("{}:80", Seed::INGRESS_VIP), false),
    ] {
        show(&format!("{name}://{target}"), &served(&seed.client, &target, tls)?);
    }
    for (name, target, tls) in [("api-lb", target, true), ("ingress-lb", format!("{}:80", Seed::INGRESS_VIP), false)] {
        let report = lab::load(&seed.client, &target, tls, 300)?;
        ensure!(report.failed == 0, "{report:?}");
        show(&format!("{name}: 300 short connections"), &format!("0 failed; {}", counts(&report.servers)));
    }
    Ok(servers)
}

/// Prints what an operator sees, its lines cut to the width of a screen.
fn print(text: &str, lines: usize) {
    for line in text.lines().take(lines) {
        println!("  {}", line.chars().take(118).collect::<String>());
    }
}

fn look(seed: &Seed, agent: &Agent) -> Result<()> {
    let target = format!("{}:6443", Seed::API_VIP);
    let hold = Hold::start(&seed.lab, &seed.client, &target, true, 4, 5)?;
    title("$ lbctl services");
    print(&agent.lbctl(&["services"])?, 8);
    title("$ lbctl flows --state established --top 4");
    print(&agent.lbctl(&["flows", "--state", "established", "--top", "4"])?, 6);
    hold.finish()?.assert_whole()
}

fn node_port_moves(seed: &Seed, api: &Api, mut servers: Servers) -> Result<Servers> {
    title("Things change");
    let target = format!("{}:6443", Seed::API_VIP);
    let hold = Hold::start(&seed.lab, &seed.far, &target, true, 20, 10)?;
    let ticker = Ticker::start(&seed.lab, &seed.client, &target, true, 10)?;
    let mut fresh = Vec::new();
    for (place, node) in seed.nodes.iter().enumerate() {
        fresh.push(Peer::serve(&seed.lab, node, node.name(), &[Listener::tls(&Seed::node_address(place), NEW_PORT)])?);
    }
    std::thread::sleep(Duration::from_millis(300));
    let changed = lab::now_ms();
    api.set_node_port("clusters-tenant-a", "kube-apiserver", 6443, NEW_PORT)?;
    std::thread::sleep(Duration::from_secs(1));
    let ticks = ticker.finish()?;
    let port = format!(":{NEW_PORT}");
    let is_new = |local: &Option<String>| local.as_ref().is_some_and(|local| local.ends_with(&port));
    let first = ticks.iter().find(|tick| is_new(&tick.local)).context("no connection went to the new NodePort")?;
    let old_after = ticks.iter().filter(|tick| tick.at_ms > first.at_ms && !is_new(&tick.local)).count();
    let report = hold.finish()?;
    report.assert_whole()?;
    let failed = ticks.iter().filter(|tick| tick.error.is_some()).count();
    ensure!(failed == 0, "{failed} connections failed while the NodePort changed");
    ensure!(old_after == 0, "{old_after} connections went to the old NodePort after the first to the new one");
    show(
        &format!("NodePort {} becomes {NEW_PORT}, 20 connections open", Seed::API_PORT),
        &format!("new ones follow after {} ms; {}", first.at_ms.saturating_sub(changed), lost(&report)),
    );
    servers.api = fresh;
    Ok(servers)
}

fn lost(report: &HoldReport) -> String {
    let mut text = format!("{} of {} lost", report.lost + report.reset, report.connections);
    let _ = write!(text, ", {} requests", report.requests);
    text
}

fn node_dies(seed: &Seed, servers: &Servers) -> Result<()> {
    let target = format!("{}:443", Seed::SHARED_VIP);
    let hold = Hold::start(&seed.lab, &seed.client, &target, true, 20, 10)?;
    let ticker = Ticker::start(&seed.lab, &seed.far, &target, true, 20)?;
    std::thread::sleep(Duration::from_millis(300));
    let died = lab::now_ms();
    servers.shared[1].kill();
    std::thread::sleep(Duration::from_millis(3_500));
    let ticks = ticker.finish()?;
    let failures: Vec<_> = ticks.iter().filter(|tick| tick.error.is_some()).collect();
    let last = failures.iter().map(|tick| tick.at_ms.saturating_sub(died)).max().unwrap_or(0);
    ensure!(last < 3_000, "new connections failed until {last} ms after the death of n6");
    let report = hold.finish()?;
    let others = report.lost_servers.iter().filter(|(server, _)| *server != "n6").count();
    ensure!(others == 0 && report.wrong == 0, "connections on other nodes suffered: {report:?}");
    let on_others: u64 = report.servers.iter().filter(|(server, _)| *server != "n6").map(|(_, count)| count).sum();
    show(
        "Servers of n6 die",
        &format!("new connections avoid it after {last} ms; 0 of {on_others} on the others lost"),
    );
    Ok(())
}

fn agent_dies(seed: &Seed, agent: &Agent) -> Result<()> {
    let target = format!("{}:6443", Seed::API_VIP);
    let hold = Hold::start(&seed.lab, &seed.client, &target, true, 50, 10)?;
    agent.kill();
    std::thread::sleep(Duration::from_secs(3));
    let report = lab::load(&seed.far, &target, true, 50)?;
    ensure!(report.failed == 0, "{report:?}");
    let flows = agent.lbctl_json(&["flows", "--state", "established"])?;
    let seen = flows.as_array().map_or(0, Vec::len);
    ensure!(seen >= 50, "lbctl sees {seen} flows while the agent is dead");
    agent.start(&seed.lab)?;
    std::thread::sleep(Duration::from_millis(500));
    let held = hold.finish()?;
    held.assert_whole()?;
    show(
        "The agent is killed (SIGKILL) for 3 s, then started again",
        &format!("{}; 50 new ones meanwhile, 0 failed; lbctl saw {seen}", lost(&held)),
    );
    Ok(())
}

fn wall(seed: &Seed) -> Result<()> {
    seed.client.ip("route add 10.32.96.0/20 via 192.168.203.2")?;
    let targets = ["10.32.96.105:31222", "10.32.96.107:32488", "10.32.96.10:6443", "10.32.96.50:22"];
    // All at once: each of them waits for its time to run out.
    let program = lab::binary("lbd-test-peer")?;
    let tries: Vec<_> = targets
        .iter()
        .map(|target| {
            let mut command = seed.client.command(&program);
            command.args(["get", "--target", target, "--limit", "1"]);
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn()
        })
        .collect();
    for (target, child) in targets.iter().zip(tries) {
        let output = child?.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stderr);
        if output.status.success() || text.contains("refused") || text.contains("reset") {
            bail!("the tenant got an answer from {target}: {text}");
        }
    }
    lab::get(&seed.client, &format!("{}:6443", Seed::API_VIP), true)?;
    show(
        "A tenant that routes the hub's network through lbd's host",
        &format!("reaches 0 of {} hub addresses, and the VIP", targets.len()),
    );
    Ok(())
}
