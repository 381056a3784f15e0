//! Upgrades to another map ABI: connections that run through a datapath of ABI 1 live on in ours, whatever fails leaves the old one
//! forwarding, and the way back is there.
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lbd_tests::lab::{self, Agent, Bench, Hold, Ticker};
use lbd_tests::predecessor::{self, pin, soon};

const VIP: &str = "192.0.2.34:6443";
const OTHER_VIP: &str = "198.51.100.34:6443";
/// Pins of ours.
const PINS: &str = "/sys/fs/bpf/lbd/v2";

/// A bench whose datapath is of ABI 1, with connections through it, and an agent of ours that has not started yet.
struct Upgrade {
    bench: Bench,
    agent: Agent,
    holds: Vec<Hold>,
    _servers: Vec<lab::Peer>,
}

impl Upgrade {
    fn new(name: &str, max_flows: u32) -> Result<Self> {
        let bench = Bench::new(name)?;
        let servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
        let agent = Agent::new(&bench.lab, &bench.lb, &Self::configuration(max_flows))?;
        predecessor::leave(&bench, &agent, max_flows)?;
        let mut holds = Vec::new();
        for (client, target) in [(&bench.near, VIP), (&bench.far, VIP), (&bench.other, OTHER_VIP)] {
            soon(&format!("{target} answers in ABI 1"), || Ok(lab::get(client, target, false).is_ok()))?;
            holds.push(Hold::start(&bench.lab, client, target, false, 40, 80)?);
        }
        Ok(Self { bench, agent, holds, _servers: servers })
    }

    fn configuration(max_flows: u32) -> String {
        Bench::configuration(&format!("datapath: {{ max_flows: {max_flows}, max_flows_v6: 1024 }}"))
    }

    fn pinned(&self, path: impl AsRef<Path>) -> bool {
        self.bench.lb.outside(path).exists()
    }

    /// All connections live on, and none was reset.
    fn whole(self, what: &str) -> Result<()> {
        for hold in self.holds {
            let report = hold.finish()?;
            ensure!(report.connections == 40 && report.requests > 40, "{what}: {report:?}");
            report.assert_whole().with_context(|| what.to_owned())?;
        }
        Ok(())
    }

    /// `lbd run` ends with exit code 1; its message.
    fn refused(&self) -> Result<String> {
        let output = self.agent.lbd(&["run"])?;
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1), "{}: {message}", output.status);
        Ok(message)
    }
}

#[test]
#[ignore = "needs root"]
fn connections_survive_an_upgrade_from_abi_1() -> Result<()> {
    let upgrade = Upgrade::new("up", 65_536)?;
    let Upgrade { bench, agent, .. } = &upgrade;
    let tickers = [(&bench.near, VIP), (&bench.far, VIP), (&bench.other, OTHER_VIP)]
        .map(|(client, target)| Ticker::start(&bench.lab, client, target, false, 20));
    std::thread::sleep(Duration::from_millis(500));
    let before = predecessor::flows(bench)?;
    let programs = predecessor::programs(bench)?;
    agent.start(&bench.lab)?;
    let log = agent.log();
    ensure!(log.contains("map ABI 1: took over"), "{log}");
    std::thread::sleep(Duration::from_secs(1));
    for ticker in tickers {
        let ticks = ticker?.finish()?;
        let bad: Vec<_> = ticks.iter().filter(|tick| tick.error.is_some()).collect();
        ensure!(ticks.len() > 10 && bad.is_empty(), "{} of {} new connections failed: {bad:?}", bad.len(), ticks.len());
    }
    let after = predecessor::programs(bench)?;
    ensure!(programs.iter().zip(&after).all(|(old, new)| old != new), "{programs:?} {after:?}");
    // Counters go on from where they were, and whose connection it is is known.
    let shown = agent.lbctl_json(&["flows"])?;
    let shown = shown.as_array().context("a list of flows")?;
    let mut known = 0;
    for flow in shown {
        let text = |name: &str| flow.get(name).and_then(serde_json::Value::as_str).unwrap_or_default();
        let number = |name: &str| flow.get(name).and_then(serde_json::Value::as_u64).unwrap_or(0);
        // Of those that are over, one half may have been deleted while the table was read.
        if text("state") != "established" {
            continue;
        }
        let client: std::net::SocketAddrV4 = text("client").parse()?;
        let Some(&packets) = before.get(&(*client.ip(), client.port())) else { continue };
        ensure!(number("in_packets") + number("out_packets") >= packets, "{packets} packets before: {flow}");
        let tenant = if client.ip().octets()[0] == 198 { "b" } else { "a" };
        ensure!(text("tenant") == tenant && text("backend").ends_with(":30918"), "{flow}");
        known += 1;
    }
    ensure!(known >= 120, "{known} of 120 connections are shown: {shown:?}");
    let status = agent.lbctl_json(&["status"])?;
    ensure!(status.pointer("/abi").and_then(serde_json::Value::as_u64) == Some(2), "{status}");
    // The old datapath is the way back.
    ensure!(upgrade.pinned(pin("kept")) && upgrade.pinned(pin("flows4")) && upgrade.pinned(PINS));
    // The next start has nothing to take over.
    agent.stop()?;
    agent.start(&bench.lab)?;
    ensure!(predecessor::programs(bench)? == after && !agent.log().contains("took over"), "{}", agent.log());
    let discarded = agent.lbd(&["rollback", "--discard"])?;
    ensure!(discarded.status.success(), "{discarded:?}");
    ensure!(!upgrade.pinned(predecessor::PINS));
    ensure!(agent.lbd(&["rollback", "--discard"])?.status.code() == Some(1));
    let other = agent.lbctl(&["status"])?;
    ensure!(!other.is_empty());
    upgrade.whole("upgrade")
}

#[test]
#[ignore = "needs root"]
fn an_upgrade_that_fails_leaves_abi_1_forwarding() -> Result<()> {
    let upgrade = Upgrade::new("upfail", 4096)?;
    let Upgrade { bench, agent, .. } = &upgrade;
    let programs = predecessor::programs(bench)?;
    let check = |what: &str, words: &[&str]| -> Result<()> {
        let message = upgrade.refused().context(what.to_owned())?;
        ensure!(words.iter().all(|word| message.contains(word)), "{what}: {message}");
        ensure!(message.contains("goes on forwarding"), "{what}: {message}");
        ensure!(predecessor::programs(bench)? == programs, "{what}: the programs were replaced");
        ensure!(!upgrade.pinned(PINS), "{what}: new maps are left");
        ensure!(predecessor::flags(bench)? == 0, "{what}: it still drops strays in silence");
        lab::get(&bench.near, VIP, false).with_context(|| format!("{what}: new connections"))?;
        Ok(())
    };
    // 123 connections are 246 halves.
    agent.configure(&Upgrade::configuration(100))?;
    check("too little room", &["room for 200", "max_flows"])?;
    agent.configure(&Upgrade::configuration(4096))?;
    let hops = bench.lb.outside(pin("next_hops"));
    let aside = bench.lb.outside(pin("aside"));
    std::fs::rename(&hops, &aside)?;
    check("a missing map", &["next_hops is missing"])?;
    std::fs::rename(bench.lb.outside(pin("tenants")), &hops)?;
    check("another map", &["next_hops has keys of 4 and values of 16 bytes, not 4 and 24"])?;
    std::fs::rename(&hops, bench.lb.outside(pin("tenants")))?;
    std::fs::rename(&aside, &hops)?;
    // What an attempt has left that died is no obstacle.
    bench.lb.run(|| Ok(std::fs::create_dir(PINS)?))?;
    agent.start(&bench.lab)?;
    ensure!(predecessor::programs(bench)?.iter().zip(&programs).all(|(new, old)| new != old));
    upgrade.whole("failed upgrades")
}

#[test]
#[ignore = "needs root"]
fn an_upgrade_that_was_interrupted_goes_on() -> Result<()> {
    let upgrade = Upgrade::new("half", 65_536)?;
    let Upgrade { bench, agent, .. } = &upgrade;
    agent.start(&bench.lab)?;
    agent.kill();
    predecessor::interrupt(bench, "ten0")?;
    // While one interface runs the programs of ABI 1, these connections are known there only.
    let programs = predecessor::programs(bench)?;
    agent.start(&bench.lab)?;
    ensure!(predecessor::programs(bench)?[1] != programs[1], "{programs:?}");
    ensure!(agent.log().contains("map ABI 1: took over"), "{}", agent.log());
    ensure!(predecessor::our_flags(bench)? == 0 && upgrade.pinned(pin("kept")));
    std::thread::sleep(Duration::from_secs(1));
    lab::get(&bench.near, VIP, false)?;
    upgrade.whole("an interrupted upgrade")
}

#[test]
#[ignore = "needs root"]
fn a_datapath_of_the_future_is_refused_and_left_alone() -> Result<()> {
    let bench = Bench::new("future")?;
    let _servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
    let agent = bench.agent(&Upgrade::configuration(4096))?;
    let hold = Hold::start(&bench.lab, &bench.near, VIP, false, 10, 100)?;
    agent.kill();
    let programs = predecessor::programs(&bench)?;
    // As a newer lbd would have left it.
    let newer = bench.lb.outside("/sys/fs/bpf/lbd/v3");
    std::fs::rename(bench.lb.outside(PINS), &newer)?;
    let output = agent.lbd(&["run"])?;
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1), "{}: {message}", output.status);
    ensure!(message.contains("map ABI 3") && message.contains("this lbd has ABI 2"), "{message}");
    ensure!(message.contains("keeps forwarding untouched"), "{message}");
    ensure!(predecessor::programs(&bench)? == programs && !bench.lb.outside(PINS).exists());
    let output = agent.lbd(&["rollback"])?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    hold.finish()?.assert_whole()
}

#[test]
#[ignore = "needs root"]
fn a_rollback_takes_the_connections_along() -> Result<()> {
    let upgrade = Upgrade::new("back", 65_536)?;
    let Upgrade { bench, agent, .. } = &upgrade;
    let old = predecessor::programs(bench)?;
    agent.start(&bench.lab)?;
    // Connections that the new datapath has made go back too.
    let later = Hold::start(&bench.lab, &bench.near, VIP, false, 40, 80)?;
    let busy = agent.lbd(&["rollback"])?;
    let message = String::from_utf8_lossy(&busy.stderr).into_owned();
    ensure!(busy.status.code() == Some(1) && message.contains("stop the agent first"), "{message}");
    agent.stop()?;
    let ticker = Ticker::start(&bench.lab, &bench.far, VIP, false, 10)?;
    std::thread::sleep(Duration::from_millis(300));
    let done = agent.lbd(&["rollback"])?;
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    ensure!(done.status.success() && said.contains("hub0: the program of map ABI 1 is back"), "{done:?}");
    ensure!(!said.contains("lost"), "{said}");
    ensure!(predecessor::programs(bench)? == old, "the programs of before are back");
    ensure!(!upgrade.pinned(PINS) && !upgrade.pinned(pin("kept")) && predecessor::flags(bench)? == 0);
    ensure!(predecessor::flows(bench)?.len() >= 160);
    std::thread::sleep(Duration::from_millis(700));
    let ticks = ticker.finish()?;
    let bad: Vec<_> = ticks.iter().filter(|tick| tick.error.is_some()).collect();
    ensure!(ticks.len() > 10 && bad.is_empty(), "{} of {} new connections failed: {bad:?}", bad.len(), ticks.len());
    // And forward again.
    agent.start(&bench.lab)?;
    std::thread::sleep(Duration::from_millis(500));
    later.finish()?.assert_whole()?;
    upgrade.whole("there and back")
}
