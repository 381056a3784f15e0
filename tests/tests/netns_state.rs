//! What is left of an earlier life: state files that are lost or another's, and a configuration that is another one.
use std::time::Duration;

use anyhow::{Result, ensure};
use lbd_tests::lab::{self, Agent, Bench, Hold};

const HEAD: &str = "\
version: 1
hubs: [{ name: hub, interface: hub0, snat: [10.0.0.2], node_cidrs: [10.0.0.0/24] }]
tenants:
";
const A: &str = "  - name: a
    segment: { interface: ten0, address: 192.0.2.2/24, gateway: 192.0.2.1 }
    pools: [192.0.2.32/28]
    frontends:
      - { name: kube-apiserver, vip: 192.0.2.34, ports: [{ port: 6443, target: 30918 }], backends: [10.0.0.11, 10.0.0.12] }
";
const B: &str = "  - name: b
    segment: { interface: ten1, address: 198.51.100.2/24 }
    pools: [198.51.100.32/28]
    frontends:
      - { name: kube-apiserver, vip: 198.51.100.34, ports: [{ port: 6443, target: 30918 }], backends: [10.0.0.11, 10.0.0.12] }
";
const VIP_A: &str = "192.0.2.34:6443";
const VIP_B: &str = "198.51.100.34:6443";

fn serve(bench: &Bench, agent: &Agent, client: &lab::Namespace, target: &str) -> Result<()> {
    lab::wait_until(Duration::from_secs(10), &format!("{target} answers"), || {
        ensure!(agent.pid().is_some());
        lab::get(client, target, false)?;
        Ok(true)
    })?;
    let _ = bench;
    Ok(())
}

/// The ids of segments decide where a reply leaves: lost or foreign files must not give one tenant's to another.
#[test]
#[ignore = "needs root"]
fn connections_survive_the_loss_of_the_ids_and_stay_in_their_segment() -> Result<()> {
    for damage in ["lost", "damaged", "foreign"] {
        let bench = Bench::new("ids")?;
        let _servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
        // Tenant b is there first, so that its segment has the id that tenant a's would get in a first life.
        let agent = Agent::new(&bench.lab, &bench.lb, &format!("{HEAD}{B}"))?;
        agent.start(&bench.lab)?;
        serve(&bench, &agent, &bench.other, VIP_B)?;
        agent.stop()?;
        agent.configure(&format!("{HEAD}{A}{B}"))?;
        agent.start(&bench.lab)?;
        serve(&bench, &agent, &bench.near, VIP_A)?;
        let hold_a = Hold::start(&bench.lab, &bench.near, VIP_A, false, 10, 20)?;
        let hold_b = Hold::start(&bench.lab, &bench.other, VIP_B, false, 10, 20)?;
        agent.kill();
        let ids = agent.config().with_file_name("state").join("ids.json");
        match damage {
            "lost" => std::fs::remove_file(&ids)?,
            "damaged" => {
                let text = std::fs::read(&ids)?;
                std::fs::write(&ids, &text[..text.len() / 2])?;
            }
            _ => {
                let text = std::fs::read_to_string(&ids)?;
                let swapped = text.replace("ten0", "tenX").replace("ten1", "ten0").replace("tenX", "ten1");
                std::fs::write(&ids, swapped)?;
            }
        }
        agent.start(&bench.lab)?;
        serve(&bench, &agent, &bench.near, VIP_A)?;
        serve(&bench, &agent, &bench.other, VIP_B)?;
        std::thread::sleep(Duration::from_secs(2));
        for (tenant, hold) in [("a", hold_a), ("b", hold_b)] {
            let report = hold.finish()?;
            ensure!(report.assert_whole().is_ok(), "ids {damage}: tenant {tenant}: {report:?}");
        }
    }
    Ok(())
}

/// A tenant and its interface are gone from the file while no agent runs: nothing of it is served any more, the other's connections live.
#[test]
#[ignore = "needs root"]
fn a_tenant_that_is_gone_at_the_start_is_served_no_more() -> Result<()> {
    let bench = Bench::new("gone")?;
    let _servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
    let agent = Agent::new(&bench.lab, &bench.lb, &format!("{HEAD}{A}{B}"))?;
    agent.start(&bench.lab)?;
    serve(&bench, &agent, &bench.near, VIP_A)?;
    serve(&bench, &agent, &bench.other, VIP_B)?;
    let hold_a = Hold::start(&bench.lab, &bench.near, VIP_A, false, 10, 20)?;
    let hold_b = Hold::start(&bench.lab, &bench.other, VIP_B, false, 10, 20)?;
    agent.kill();
    agent.configure(&format!("{HEAD}{A}"))?;
    agent.start(&bench.lab)?;
    std::thread::sleep(Duration::from_secs(2));
    let services = agent.lbctl_json(&["services"])?.to_string();
    let flows = agent.lbctl_json(&["flows"])?.to_string();
    ensure!(!services.contains("198.51.100.34") && services.contains("192.0.2.34"), "{services}");
    ensure!(!flows.contains("198.51.100.34") && flows.contains("192.0.2.34"), "{flows}");
    hold_a.finish()?.assert_whole()?;
    let report = hold_b.finish()?;
    ensure!(report.lost + report.reset == 10, "tenant b is still served: {report:?}");
    ensure!(lab::get(&bench.other, VIP_B, false).is_err());
    // And comes back.
    agent.stop()?;
    agent.configure(&format!("{HEAD}{A}{B}"))?;
    agent.start(&bench.lab)?;
    serve(&bench, &agent, &bench.other, VIP_B)?;
    Ok(())
}
