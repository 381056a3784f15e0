//! The three roles of a site with hosted control planes, served at once by one agent, with real clients and servers.
//!
//! Run by `cargo xtask test --only netns`; `--fast` (or `LBD_TEST_FAST=1`) makes the numbers smaller.
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lbd_tests::lab::{self, Agent, Capture, Hold, Keep, Lab, Namespace, Seed, Ticker};

fn fast() -> bool {
    std::env::var_os("LBD_TEST_FAST").is_some()
}

/// VIP:port of the roles, and whether they speak TLS.
const ROLES: [(&str, bool); 3] =
    [("192.168.203.110:6443", true), ("192.168.203.111:443", true), ("192.168.203.112:80", false)];

/// The seed's networks with all servers and a running agent that serves all three roles from its file.
struct Road {
    seed: Seed,
    agent: Agent,
    nodes: Vec<lab::Peer>,
    _workers: Vec<lab::Peer>,
}

impl Road {
    fn new(name: &str) -> Result<Self> {
        let seed = Seed::new(name)?;
        let (nodes, workers) = (seed.serve_nodes()?, seed.serve_workers()?);
        let agent = Agent::new(&seed.lab, &seed.lb, &Seed::file_configuration())?;
        agent.start(&seed.lab)?;
        for (target, tls) in ROLES {
            seed.wait_served(target, tls, Duration::from_secs(10))?;
        }
        Ok(Self { seed, agent, nodes, _workers: workers })
    }

    /// Every namespace but the tenant's router forwards nothing.
    fn assert_no_forwarding(&self) -> Result<()> {
        let namespaces = self.seed.lab.namespaces();
        namespaces.iter().filter(|namespace| namespace.name() != "router").try_for_each(Lab::assert_no_forwarding)
    }
}

/// Runs something for all roles at once.
fn for_all_roles<T: Send>(work: impl Fn(&str, bool) -> Result<T> + Sync) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ROLES
            .map(|(target, tls)| {
                scope.spawn({
                    let work = &work;
                    move || work(target, tls)
                })
            })
            .into();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

#[test]
#[ignore = "needs root"]
fn short_connections_of_all_roles_at_once_all_succeed() -> Result<()> {
    let connections = if fast() { 1_000 } else { 10_000 };
    let road = Road::new("short")?;
    let captures = road.seed.lab.capture()?;
    let reports = for_all_roles(|target, tls| lab::load(&road.seed.client, target, tls, connections))?;
    for ((target, _), report) in ROLES.iter().zip(&reports) {
        println!("{target}: {report:?}");
        ensure!(report.connections == u64::from(connections) && report.failed == 0, "{target}: {report:?}");
    }
    // By flow, all nodes take part; by source address, one worker serves one client.
    ensure!(reports[0].servers.len() == 4 && reports[1].servers.len() == 4, "{reports:?}");
    ensure!(reports[2].servers.len() == 1, "{reports:?}");
    for (target, tls) in ROLES {
        let far = lab::get(&road.seed.far, target, tls)?;
        // The backend sees lbd's address, not the client's.
        ensure!(!far.peer.starts_with("172.20."), "{far:?}");
    }
    road.assert_no_forwarding()?;
    for capture in captures {
        let summary = capture.finish()?;
        // Nobody talks to the API server here: this site has none.
        if summary.namespace != "api" {
            summary.assert_good()?;
        }
        ensure!(summary.missed == 0, "{}: {} of {} missed", summary.namespace, summary.missed, summary.frames);
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn large_transfers_both_ways_have_equal_digests() -> Result<()> {
    let bytes = if fast() { 32 << 20 } else { 1 << 30 };
    let road = Road::new("large")?;
    // Where packets leave and arrive: switches alter nothing.
    let captures = ["client", "n5", "n6", "n7", "n8", "w1", "w2"]
        .map(|name| road.seed.lab.namespace(name).and_then(|namespace| Capture::start(&namespace, Keep::Bad)));
    let reports = for_all_roles(|target, tls| lab::transfer(&road.seed.client, target, tls, bytes))?;
    for report in &reports {
        println!("{report:?}");
        ensure!(report.down_equal && report.up_equal, "{report:?}");
    }
    road.assert_no_forwarding()?;
    let mut frames = 0;
    for capture in captures {
        let summary = capture?.finish()?;
        ensure!(summary.bad == 0, "{:?}", summary.assert_good());
        println!("{}: {} frames, {} missed", summary.namespace, summary.frames, summary.missed);
        frames += summary.frames;
    }
    ensure!(frames > 4 * bytes / 1500, "only {frames} frames were seen");
    Ok(())
}

/// Another build of `lbd`, made by `cargo xtask test`; the same one where there is none.
fn other_build() -> Result<PathBuf> {
    let program = lab::binary("lbd")?;
    let other = program.with_file_name("lbd-other-build");
    Ok(if other.is_file() { other } else { program })
}

#[test]
#[ignore = "needs root"]
fn a55_the_agent_dies_returns_and_is_replaced_and_no_connection_notices() -> Result<()> {
    let dead = Duration::from_secs(if fast() { 4 } else { 30 });
    let road = Road::new("a55")?;
    let (target, tls) = ROLES[0];
    let hold = Hold::start(&road.seed.lab, &road.seed.client, target, tls, 200, 10)?;
    let hairpin = Hold::start(&road.seed.lab, &road.seed.far, ROLES[2].0, ROLES[2].1, 20, 10)?;
    road.agent.kill();
    std::thread::sleep(dead / 2);
    for (target, tls) in ROLES {
        let report = lab::load(&road.seed.far, target, tls, 100)?;
        ensure!(report.failed == 0, "new connections to {target} while the agent is dead: {report:?}");
    }
    // What lbctl reads from the pins alone.
    let flows = road.agent.lbctl_json(&["flows"])?;
    ensure!(
        flows.as_array().is_some_and(|flows| flows.len() >= 220),
        "lbctl does not see the flows while the agent is dead"
    );
    std::thread::sleep(dead / 2);
    road.agent.start(&road.seed.lab).context("starting again")?;
    std::thread::sleep(Duration::from_secs(2));
    road.agent.stop().context("stopping")?;
    road.agent.start_build(&road.seed.lab, &other_build()?).context("starting another build")?;
    std::thread::sleep(Duration::from_secs(2));
    for report in [hold.finish()?, hairpin.finish()?] {
        println!("{report:?}");
        report.assert_whole()?;
        // None paused either: each connection asked ten times a second.
        ensure!(report.slowest_ms < 1_000, "{report:?}");
    }
    road.assert_no_forwarding()
}

/// New connections avoid the node after `limit`, those on the other nodes see nothing.
fn node_death(name: &str, limit: Duration, kill: impl Fn(&Road, &str) -> Result<()>) -> Result<()> {
    let road = Road::new(name)?;
    let (target, tls) = ROLES[1];
    let hold = Hold::start(&road.seed.lab, &road.seed.client, target, tls, 40, 10)?;
    let ticker = Ticker::start(&road.seed.lab, &road.seed.client, target, tls, 20)?;
    std::thread::sleep(Duration::from_secs(1));
    let died = lab::now_ms();
    kill(&road, "n6")?;
    std::thread::sleep(limit + Duration::from_secs(3));
    let ticks = ticker.finish()?;
    let avoided = died + limit.as_millis() as u64;
    let late: Vec<_> = ticks
        .iter()
        .filter(|tick| tick.at_ms > avoided && (tick.error.is_some() || tick.server.as_deref() == Some("n6")))
        .collect();
    let after = ticks.iter().filter(|tick| tick.at_ms > avoided).count();
    ensure!(
        late.is_empty() && after > 50,
        "{} of {after} connections begun {limit:?} after the death failed: {late:?}",
        late.len()
    );
    let last_failure = ticks.iter().filter(|tick| tick.error.is_some()).map(|tick| tick.at_ms).max();
    println!(
        "the last connection that failed was begun {:?} ms after the death",
        last_failure.map(|at| at as i64 - died as i64)
    );
    let report = hold.finish()?;
    println!("{report:?}");
    let on_others = report.lost_servers.iter().filter(|(server, _)| *server != "n6").count();
    ensure!(
        on_others == 0 && report.wrong == 0 && report.refused == 0,
        "connections on other nodes suffered: {report:?}"
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_node_that_falls_silent_is_avoided_within_four_seconds() -> Result<()> {
    node_death("silent", Duration::from_secs(4), |road, name| road.seed.lab.namespace(name)?.ip("link set eth0 down"))
}

#[test]
#[ignore = "needs root"]
fn a_node_that_refuses_is_avoided_within_three_seconds() -> Result<()> {
    node_death("refused", Duration::from_secs(3), |road, name| {
        let place = road.seed.nodes.iter().position(|node| node.name() == name).context("no such node")?;
        road.nodes[place].kill();
        Ok(())
    })
}

/// Whether a connection comes to anything at all, a refusal included.
fn answered(from: &Namespace, target: &str) -> Result<Option<String>> {
    let output =
        from.command(lab::binary("lbd-test-peer")?).args(["get", "--target", target, "--limit", "1"]).output()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok((output.status.success() || text.contains("refused") || text.contains("reset")).then_some(text))
}

#[test]
#[ignore = "needs root"]
fn a_tenant_reaches_no_hub_address_but_through_a_vip() -> Result<()> {
    let road = Road::new("wall")?;
    let seed = &road.seed;
    // A tenant that knows how the host is attached, and tries.
    for tenant in [&seed.client, &seed.workers[0]] {
        tenant.ip("route add 10.32.96.0/20 via 192.168.203.2")?;
    }
    seed.nodes[0].ip("route add 192.168.203.0/24 via 10.32.96.50")?;
    let is_foreign = |frame: &[u8]| {
        lab::ports(frame).is_some_and(|ports| {
            let tenant = |address: std::net::Ipv4Addr| address.octets()[..3] == [192, 168, 203];
            tenant(*ports.source.ip()) || tenant(*ports.destination.ip())
        })
    };
    let hub = Capture::start(&seed.lab.namespace("hub")?, Keep::Matching(Box::new(is_foreign)))?;
    let tenant_side = Capture::start(
        &seed.lab.namespace("tenant")?,
        Keep::Matching(Box::new(|frame| {
            // Hub addresses have no business here.
            lab::ports(frame).is_some_and(|ports| ports.source.ip().octets()[..2] == [10, 32])
        })),
    )?;
    for target in ["10.32.96.105:30918", "10.32.96.106:32488", "10.32.96.50:22", "10.32.96.10:6443", "10.32.96.50:9474"]
    {
        ensure!(answered(&seed.client, target)?.is_none(), "the tenant got an answer from {target}");
        ensure!(answered(&seed.workers[0], target)?.is_none(), "a worker got an answer from {target}");
    }
    ensure!(answered(&seed.nodes[0], "192.168.203.101:30282")?.is_none(), "a node got an answer from a worker");
    for (target, tls) in ROLES {
        lab::get(&seed.client, target, tls)?;
    }
    // A VIP is served in its own segment only.
    ensure!(answered(&seed.api, "192.168.203.110:6443")?.is_none(), "the hub got an answer from a VIP");
    let crossed: Vec<_> =
        hub.finish()?.kept.iter().filter(|frame| !frame.outgoing).map(|frame| lab::describe(&frame.bytes)).collect();
    let from_nodes_only = crossed.iter().all(|line| line.contains("10.32.96.105:") && line.contains("> 192.168.203."));
    ensure!(from_nodes_only, "tenant packets on the hub: {crossed:#?}");
    let leaked: Vec<_> = tenant_side.finish()?.kept.iter().map(|frame| lab::describe(&frame.bytes)).collect();
    ensure!(leaked.is_empty(), "hub packets at the tenant: {leaked:#?}");
    road.assert_no_forwarding()
}
