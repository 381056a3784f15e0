//! The agent against a Kubernetes API, without a kernel: who gives out addresses, what is kept where, what an API that is away,
//! lies or goes back in time does.
//!
//! Against the cluster that `LBD_TEST_KUBECONFIG` names, if it is set; what needs faults runs on the test server only.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lbd::agent::dry::{DryAgent, Patience};
use lbd::plan::model::{HostFacts, InterfaceFacts, Plan, Reset};
use lbd::source::ObjectName;
use lbd::source::kubernetes::{LeaseTiming, Timing, own_object, rights};
use lbd_tests::apiserver::{self, Action, Cluster, node, service};
use serde_json::{Value, json};

/// Nothing here takes longer.
const LIMIT: Duration = Duration::from_secs(20);
const POOL: &str = "192.0.2.32-192.0.2.47";

fn patience() -> Patience {
    Patience {
        source: Timing {
            retry_first: Duration::from_millis(20),
            retry_last: Duration::from_millis(200),
            hold: Duration::from_millis(800),
            ..Timing::default()
        },
        lease: LeaseTiming {
            interval: Duration::from_millis(100),
            valid: Duration::from_secs(1),
            request: Duration::from_secs(1),
        },
    }
}

fn host() -> HostFacts {
    let interface = |index, address: &str| InterfaceFacts {
        index,
        mac: [2, 0, 0, 0, 0, index as u8],
        mtu: 1500,
        up: true,
        addresses: address.parse().into_iter().collect(),
        all_addresses: address.parse().into_iter().collect(),
        gateways: Vec::new(),
        routes: BTreeMap::new(),
        vlan: None,
    };
    let interfaces =
        [("ten0".to_owned(), interface(2, "192.0.2.2/24")), ("hub0".to_owned(), interface(3, "10.0.0.2/24"))];
    HostFacts { interfaces: interfaces.into() }
}

/// A place for one agent: configuration file and state directory.
struct Site {
    directory: tempfile::TempDir,
    hub: String,
    text: String,
}

impl Site {
    /// With the account that its configuration needs.
    async fn new(cluster: &Cluster) -> Result<Self> {
        Self::with(cluster, POOL, "").await
    }

    /// With another pool, and words for the cluster.
    async fn with(cluster: &Cluster, pool: &str, kubernetes: &str) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let (hub, namespace) = (cluster.namespace.clone(), &cluster.namespace);
        let text = format!(
            "\
version: 1
hubs:
  - name: {hub}
    interface: hub0
    snat: [10.0.0.2]
    node_cidrs: [10.0.0.0/24]
    kubernetes: {{ {}{kubernetes} }}
tenants:
  - name: a
    segment: {{ interface: ten0, address: 192.0.2.2/24, gateway: 192.0.2.1 }}
    pools: [{pool}]
    claim: [{{ namespaces: [{namespace}] }}]
state_dir: {}
",
            cluster.settings()?,
            directory.path().join("state").display()
        );
        let site = Self { directory, hub, text };
        site.configure(|text| text)?;
        cluster.grant(&site.text).await?;
        Ok(site)
    }

    fn configure(&self, change: impl FnOnce(String) -> String) -> Result<()> {
        std::fs::write(self.config(), change(self.text.clone())).context("write the configuration")
    }

    fn config(&self) -> PathBuf {
        self.directory.path().join("lbd.yaml")
    }

    fn state(&self, file: &str) -> PathBuf {
        self.directory.path().join("state").join(file)
    }

    async fn start(&self) -> Result<DryAgent> {
        let config = lbd::config::load(&self.config()).map_err(|error| anyhow::anyhow!(error.report()))?;
        Ok(DryAgent::start(config, host(), patience()).await?)
    }

    /// The record in the cluster.
    async fn record(&self, cluster: &Cluster) -> Result<BTreeMap<String, String>> {
        let found = cluster.client.get("ConfigMap", "lbd-system", &own_object(&self.hub)).await?;
        // Without data there is no such field.
        let data = found.get("data").filter(|data| !data.is_null());
        data.map_or_else(|| Ok(BTreeMap::new()), |data| serde_json::from_value(data.clone()).context("data"))
    }

    fn object(&self) -> String {
        own_object(&self.hub)
    }
}

fn load_balancer(cluster: &Cluster, name: &str, node_port: u16) -> (ObjectName, Value) {
    let object = service(&cluster.namespace, name, "LoadBalancer", &[(6443, node_port)]);
    (ObjectName::new(&cluster.namespace, name), object)
}

/// Makes Services and waits, with the agent, until all show an address.
async fn serve(cluster: &Cluster, agent: &mut DryAgent, names: &[&str]) -> Result<BTreeMap<String, String>> {
    // Of a name that is nobody else's; it may be there already.
    let _ = cluster.client.create(&node(&cluster.namespace, "10.0.0.11")).await;
    for name in names {
        cluster.client.create(&load_balancer(cluster, name, 0).1).await?;
    }
    until(agent, "all Services have an address", |agent| {
        names.iter().all(|name| !address(agent, cluster, name).is_empty())
    })
    .await?;
    let end = Instant::now() + LIMIT;
    loop {
        let shown = addresses(cluster).await?;
        if names.iter().all(|name| shown.get(*name).is_some_and(|address| !address.is_empty())) {
            return Ok(shown);
        }
        ensure!(Instant::now() < end, "not all show an address: {shown:?}; {:?}", agent.notices());
        agent.step(Duration::from_millis(20)).await;
    }
}

/// The first address that each Service shows.
async fn addresses(cluster: &Cluster) -> Result<BTreeMap<String, String>> {
    let all = cluster.client.list("Service", &cluster.namespace).await?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok(all
        .iter()
        .map(|object| (text(&object["metadata"]["name"]), text(&object["status"]["loadBalancer"]["ingress"][0]["ip"])))
        .collect())
}

/// The address that a Service has, as the agent sees it.
fn address(agent: &DryAgent, cluster: &Cluster, name: &str) -> String {
    let found = agent.assignments().services.get(&ObjectName::new(&cluster.namespace, name));
    found.and_then(|found| found.addresses.first()).map(ToString::to_string).unwrap_or_default()
}

async fn until(agent: &mut DryAgent, what: &str, condition: impl Fn(&DryAgent) -> bool) -> Result<()> {
    if agent.until(LIMIT, condition).await {
        return Ok(());
    }
    bail!(
        "did not happen: {what}; notices {:?}; lease {:?}; cluster {:?}; sources {:?}",
        agent.notices(),
        agent.lease(),
        agent.cluster(),
        agent.sources()
    )
}

fn holds(agent: &DryAgent) -> bool {
    agent.lease().is_some_and(|lease| lease.state == "held")
}

fn waits(agent: &DryAgent) -> bool {
    agent.lease().is_some_and(|lease| lease.state == "other")
}

fn told(agent: &DryAgent, reason: &str) -> bool {
    agent.notices().iter().any(|notice| notice.reason == reason)
}

fn happened(agent: &DryAgent, reason: &str) -> bool {
    agent.events().iter().any(|event| event.reason == reason)
}

fn services(plan: &Plan) -> Vec<String> {
    let mut names: Vec<_> =
        plan.frontends.values().filter_map(|frontend| Some(frontend.service.as_ref()?.name.clone())).collect();
    names.sort();
    names
}

// ---- who acts ----

#[tokio::test(flavor = "multi_thread")]
async fn b59_of_two_agents_one_acts_and_the_other_takes_over_with_the_same_addresses() -> Result<()> {
    let cluster = Cluster::any().await?;
    let (first_site, second_site) = (Site::new(&cluster).await?, Site::new(&cluster).await?);
    let mut first = first_site.start().await?;
    let before = serve(&cluster, &mut first, &["c", "a", "b"]).await?;
    assert!(holds(&first) && !told(&first, "LeaseUnavailable"), "{:?}", first.notices());
    let mut second = second_site.start().await?;
    until(&mut second, "the second agent waits", waits).await?;
    assert!(told(&second, "LeaseHeldByOther"));
    // For several times as long as the Lease is valid the second does nothing, while the first goes on.
    for _ in 0..10 {
        first.run_for(Duration::from_millis(150)).await;
        second.run_for(Duration::from_millis(150)).await;
    }
    assert!(holds(&first) && waits(&second));
    assert!(second.plans().is_empty() && second.record().entries.is_empty(), "it acts: {:?}", second.plan());
    assert_eq!(second.status_writes(), 0);
    first.save()?;
    drop(first);
    let begun = Instant::now();
    until(&mut second, "the second agent takes over", |agent| holds(agent) && services(agent.plan()).len() == 3)
        .await?;
    assert!(begun.elapsed() > Duration::from_millis(700), "the Lease was still valid: {:?}", begun.elapsed());
    assert!(!second.plan().quiet && !told(&second, "LeaseHeldByOther"));
    for (name, address_before) in &before {
        assert_eq!(address(&second, &cluster, name), *address_before);
    }
    second.run_for(Duration::from_millis(300)).await;
    assert_eq!((second.status_writes(), addresses(&cluster).await?), (0, before.clone()));
    // The first comes back, and waits.
    let mut first = first_site.start().await?;
    for _ in 0..8 {
        first.run_for(Duration::from_millis(100)).await;
        second.run_for(Duration::from_millis(100)).await;
    }
    assert!(waits(&first) && holds(&second));
    assert!(first.plan().quiet, "it still announces");
    assert_eq!(services(first.plan()), ["a", "b", "c"], "what still arrives is not forwarded");
    assert_eq!(first.status_writes(), 0);
    drop((first, second));
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b59_losing_the_api_withdraws_nothing_and_nobody_takes_over() -> Result<()> {
    let Some(mut cluster) = Cluster::with_faults("going away").await? else { return Ok(()) };
    let (first_site, second_site) = (Site::new(&cluster).await?, Site::new(&cluster).await?);
    let mut first = first_site.start().await?;
    serve(&cluster, &mut first, &["a", "b"]).await?;
    let mut second = second_site.start().await?;
    until(&mut second, "the second agent waits", waits).await?;
    let plans = first.plans().len();
    cluster.server_mut()?.go_away();
    until(&mut first, "the API is missed", |agent| agent.sources()[0].state == "away").await?;
    for _ in 0..10 {
        first.run_for(Duration::from_millis(150)).await;
        second.run_for(Duration::from_millis(150)).await;
    }
    assert_eq!(first.plans().len(), plans, "the maps were changed");
    assert_eq!(services(first.plan()), ["a", "b"]);
    cluster.server_mut()?.come_back().await?;
    // Neither was there to renew or to watch the Lease: the second must not take its silence for an end.
    for _ in 0..15 {
        second.run_for(Duration::from_millis(20)).await;
        first.run_for(Duration::from_millis(40)).await;
    }
    assert!(holds(&first) && waits(&second));
    assert!(second.plans().is_empty() && !first.plan().quiet);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b36_the_clocks_of_others_neither_keep_nor_lose_a_lease() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    let lease = |time: &str| {
        json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"namespace": "lbd-system", "name": site.object()},
            "spec": {"holderIdentity": "another", "leaseDurationSeconds": 1, "renewTime": time, "acquireTime": time}})
    };
    cluster.client.create(&lease("2001-01-01T00:00:00.000000Z")).await?;
    let mut agent = site.start().await?;
    // Renewed by a clock that is far behind, then by one that is far ahead.
    for second in 0..12 {
        let year = if second < 6 { 2001 } else { 2101 };
        let renewed = lease(&format!("{year}-01-01T00:00:{second:02}.000000Z"));
        cluster.client.patch("Lease", "lbd-system", &site.object(), &renewed).await?;
        agent.run_for(Duration::from_millis(250)).await;
        assert!(!holds(&agent), "taken from a holder that renews it");
    }
    assert!(waits(&agent));
    // Whatever the clock says, what is not renewed runs out.
    until(&mut agent, "taken over", holds).await?;
    let found = cluster.client.get("Lease", "lbd-system", &site.object()).await?;
    assert_eq!(found["spec"]["leaseTransitions"], 1);
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b42_without_rights_in_lbd_system_services_are_served_and_the_right_is_named() -> Result<()> {
    let Some(cluster) = Cluster::with_faults("rights taken away and given back at a moment").await? else {
        return Ok(());
    };
    let site = Site::new(&cluster).await?;
    let server = cluster.server()?;
    server.deny("create leases", true);
    server.deny("create configmaps", true);
    let mut agent = site.start().await?;
    serve(&cluster, &mut agent, &["a"]).await?;
    let text = |reason: &str| {
        let notices = agent.notices();
        notices.iter().find(|notice| notice.reason == reason).map(|notice| notice.message.clone()).unwrap_or_default()
    };
    assert!(text("LeaseUnavailable").contains("create of leases.coordination.k8s.io"), "{:?}", agent.notices());
    assert!(text("RecordForbidden").contains("create of configmaps"), "{:?}", agent.notices());
    server.deny("create leases", false);
    server.deny("create configmaps", false);
    until(&mut agent, "both are there", |agent| holds(agent) && agent.notices().is_empty()).await?;
    assert!(site.record(&cluster).await?["tenant.a"].ends_with("/a\n"));
    Ok(())
}

// ---- the record ----

#[tokio::test(flavor = "multi_thread")]
async fn the_record_is_in_the_cluster_before_an_address_is_published() -> Result<()> {
    let Some(cluster) = Cluster::with_faults("a log of requests, delays, 503").await? else { return Ok(()) };
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    serve(&cluster, &mut agent, &["a"]).await?;
    let server = cluster.server()?;
    server.clear_requests();
    server.fault("update", "/configmaps/", 1, Action::Delay(Duration::from_millis(300)));
    serve(&cluster, &mut agent, &["b"]).await?;
    let requests = server.requests();
    let place = |verb: &str, path: &str| {
        requests.iter().position(|entry| entry.verb == verb && entry.path.contains(path)).context("no such request")
    };
    let (kept, published) = (place("update", "/configmaps/")?, place("patch", "/services/b/status")?);
    assert!(kept < published);
    assert!(requests[published].at.duration_since(requests[kept].at) >= Duration::from_millis(300));
    // A record that cannot be written there for now is on disk, and nobody waits; later it is written.
    server.fault("update", "/configmaps/", u32::MAX, Action::status(503, "ServiceUnavailable"));
    let shown = serve(&cluster, &mut agent, &["c"]).await?;
    until(&mut agent, "told", |agent| told(agent, "RecordNotSaved")).await?;
    assert!(!site.record(&cluster).await?["tenant.a"].contains("/c\n"));
    let on_disk = std::fs::read_to_string(site.state("addresses.json"))?;
    assert!(on_disk.contains(&shown["c"]), "{on_disk}");
    server.clear_faults();
    until(&mut agent, "it is written", |agent| agent.notices().is_empty()).await?;
    assert!(site.record(&cluster).await?["tenant.a"].contains("/c\n"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_state_directory_keeps_every_vip() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    let mut before = serve(&cluster, &mut agent, &["e", "d", "c"]).await?;
    cluster.client.delete("Service", &cluster.namespace, "e").await?;
    until(&mut agent, "it is gone", |agent| address(agent, &cluster, "e").is_empty()).await?;
    before.remove("e");
    agent.run_for(Duration::from_millis(200)).await;
    drop(agent);
    std::fs::remove_dir_all(site.directory.path().join("state"))?;
    // Not the status is what they are known by.
    let cleared = json!({"status": {"loadBalancer": null}});
    for name in before.keys() {
        cluster.client.patch_status("Service", &cluster.namespace, name, "other", &cleared).await?;
    }
    let mut agent = site.start().await?;
    let after = serve(&cluster, &mut agent, &["a"]).await?;
    until(&mut agent, "all have an address again", |agent| services(agent.plan()).len() == 3).await?;
    for (name, address_before) in &before {
        assert_eq!(address(&agent, &cluster, name), *address_before, "{name} moved");
    }
    // What was freed is still reserved for its name.
    assert_eq!(agent.record().entries.len(), 4, "{:?}", agent.record());
    assert!(!before.values().any(|address| *address == after["a"]));
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_config_map_keeps_every_vip_and_comes_back() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    let before = serve(&cluster, &mut agent, &["c", "b", "a"]).await?;
    let kept = site.record(&cluster).await?;
    drop(agent);
    cluster.client.delete("ConfigMap", "lbd-system", &site.object()).await?;
    let mut agent = site.start().await?;
    until(&mut agent, "all are served", |agent| holds(agent) && services(agent.plan()).len() == 3).await?;
    let end = Instant::now() + LIMIT;
    while site.record(&cluster).await.is_err() {
        ensure!(Instant::now() < end, "the ConfigMap does not come back: {:?}", agent.notices());
        agent.step(Duration::from_millis(20)).await;
    }
    assert_eq!(site.record(&cluster).await?["tenant.a"], kept["tenant.a"]);
    assert_eq!((agent.status_writes(), addresses(&cluster).await?), (0, before));
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn with_both_lost_statuses_are_honoured_before_anything_is_given_out() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    // The oldest has none; the next two claim the same; the youngest one that is nobody's.
    for (name, shown) in
        [("oldest", None), ("first", Some("192.0.2.32")), ("twin", Some("192.0.2.32")), ("last", Some("192.0.2.33"))]
    {
        cluster.client.create(&load_balancer(&cluster, name, 0).1).await?;
        if let Some(shown) = shown {
            let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": shown}]}}});
            cluster.client.patch_status("Service", &cluster.namespace, name, "lbd", &status).await?;
        }
        // `creationTimestamp` has whole seconds.
        tokio::time::sleep(Duration::from_millis(1100)).await;
    }
    let mut agent = site.start().await?;
    until(&mut agent, "the oldest has one", |agent| !address(agent, &cluster, "oldest").is_empty()).await?;
    assert_eq!(address(&agent, &cluster, "first"), "192.0.2.32");
    assert_eq!(address(&agent, &cluster, "last"), "192.0.2.33");
    assert_eq!(address(&agent, &cluster, "oldest"), "192.0.2.34");
    // Who comes second to an address has a foreign one.
    assert!(told(&agent, "ForeignAddress") && address(&agent, &cluster, "twin").is_empty());
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_config_map_loses_no_address_and_is_put_right() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    let before = serve(&cluster, &mut agent, &["b", "a"]).await?;
    drop(agent);
    let good = site.record(&cluster).await?;
    for broken in [
        json!({"data": {"generation": "18446744073709551615", "tenant.a": "\u{0}\u{ff} ../.. freed\n192.0.2.1 x/y\n"}}),
        json!({"data": {"generation": null, "tenant.a": null}}),
        json!({"data": {"generation": "999999999", "tenant.a": "192.0.2.40 no-such/service\n192.0.2.1 no-such/gateway\n"}}),
    ] {
        cluster.client.patch("ConfigMap", "lbd-system", &site.object(), &broken).await?;
        let mut agent = site.start().await?;
        until(&mut agent, "served", |agent| {
            holds(agent) && happened(agent, "RecordDamaged") | happened(agent, "RecordImplausible")
        })
        .await?;
        for (name, address_before) in &before {
            assert_eq!(address(&agent, &cluster, name), *address_before);
        }
        let end = Instant::now() + LIMIT;
        loop {
            let kept = site.record(&cluster).await?;
            let all = good["tenant.a"].lines().all(|line| kept.get("tenant.a").is_some_and(|text| text.contains(line)));
            if all && kept["generation"].parse::<u64>()? == agent.record().generation {
                assert!(!kept["tenant.a"].contains("192.0.2.1 "), "the gateway is in the record: {kept:?}");
                break;
            }
            ensure!(Instant::now() < end, "it stays broken: {kept:?}");
            agent.step(Duration::from_millis(20)).await;
        }
        agent.run_for(Duration::from_millis(100)).await;
        assert_eq!(agent.status_writes(), 0);
        assert_eq!(services(agent.plan()).len(), 2);
    }
    assert_eq!(addresses(&cluster).await?, before);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b08_a_record_that_somebody_else_writes_is_read_again_and_replaced() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    serve(&cluster, &mut agent, &["a"]).await?;
    let foreign = json!({"data": {"generation": "1000", "tenant.a": "192.0.2.47 other/thing\n"}});
    cluster.client.patch("ConfigMap", "lbd-system", &site.object(), &foreign).await?;
    serve(&cluster, &mut agent, &["b"]).await?;
    until(&mut agent, "told", |agent| happened(agent, "RecordContended")).await?;
    let kept = site.record(&cluster).await?;
    assert!(kept["generation"].parse::<u64>()? > 1000, "{kept:?}");
    assert_eq!(kept["tenant.a"].lines().count(), 2, "{kept:?}");
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_cluster_backup_keeps_every_vip() -> Result<()> {
    let Some(mut cluster) = Cluster::with_faults("going back in time").await? else { return Ok(()) };
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    serve(&cluster, &mut agent, &["e", "d", "c"]).await?;
    let backup = cluster.server()?.backup();
    // After the backup: one goes, two come, one is made anew.
    cluster.client.delete("Service", &cluster.namespace, "e").await?;
    cluster.client.delete("Service", &cluster.namespace, "d").await?;
    let latest = serve(&cluster, &mut agent, &["d", "b", "a"]).await?;
    agent.run_for(Duration::from_millis(200)).await;
    let (record, plans) = (agent.record().clone(), agent.plans().len());
    cluster.server_mut()?.go_away();
    cluster.server()?.restore(&backup);
    cluster.server_mut()?.come_back().await?;
    // At first the last state stays.
    until(&mut agent, "it is noticed", |agent| {
        agent.sources()[0].error.as_ref().is_some_and(|error| error.contains("back in time"))
    })
    .await?;
    assert_eq!(agent.plans().len(), plans, "acted on a server that went back in time");
    until(&mut agent, "the backup is in force", |agent| services(agent.plan()) == ["c", "d", "e"]).await?;
    let address_of = |name: &str| {
        let entry = record.entries.iter().find(|entry| entry.service.name == name);
        entry.map(|entry| entry.address.to_string()).unwrap_or_default()
    };
    for name in ["c", "d", "e"] {
        assert_eq!(address(&agent, &cluster, name), address_of(name), "{name} moved");
    }
    // Those that are lost are reserved, and have them again.
    let again = serve(&cluster, &mut agent, &["a", "b"]).await?;
    assert_eq!((&again["a"], &again["b"]), (&latest["a"], &latest["b"]));
    let end = Instant::now() + LIMIT;
    while site.record(&cluster).await?["generation"].parse::<u64>()? != agent.record().generation {
        ensure!(Instant::now() < end, "the older record stays: {:?}", agent.notices());
        agent.step(Duration::from_millis(20)).await;
    }
    Ok(())
}

// ---- rights ----

/// What a request asks for: API group, resource, verb, namespace, name.
fn asked(entry: &apiserver::Entry) -> (String, String, String, String, String) {
    let mut parts: Vec<&str> = entry.path.trim_matches('/').split('/').collect();
    let group = if parts.remove(0) == "apis" { parts.remove(0) } else { "" };
    // The version.
    parts.remove(0);
    let namespace =
        if parts.len() > 2 && parts[0] == "namespaces" { parts.drain(..2).nth(1).unwrap_or("") } else { "" };
    let resource = match parts.as_slice() {
        [resource, _, subresource] => format!("{resource}/{subresource}"),
        [resource, ..] => (*resource).to_owned(),
        [] => String::new(),
    };
    let name = parts.get(1).copied().unwrap_or("");
    (group.to_owned(), resource, entry.verb.to_owned(), namespace.to_owned(), name.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn b42_what_is_asked_for_is_what_the_manifests_grant() -> Result<()> {
    let Some(cluster) = Cluster::with_faults("a log of requests").await? else { return Ok(()) };
    let site = Site::with(&cluster, "192.0.2.32/32", "").await?;
    let server = cluster.server()?;
    server.create(&node("n1", "10.0.0.11"))?;
    // The second finds the pool empty: an Event.
    for name in ["first", "second"] {
        server.create(&load_balancer(&cluster, name, 0).1)?;
    }
    server.clear_requests();
    let mut agent = site.start().await?;
    let path = |verb: &'static str, path: &'static str| move || !server.requests_of(verb, path).is_empty();
    let wanted = [path("patch", "/status"), path("update", "/leases"), path("update", "/configmaps")];
    let end = Instant::now() + LIMIT;
    // A Lease is renewed, a record changes with another Service, an Event is repeated as a patch.
    let mut more = false;
    while !wanted.iter().all(|seen| seen()) {
        ensure!(Instant::now() < end, "{:?}", server.requests().iter().map(asked).collect::<Vec<_>>());
        agent.step(Duration::from_millis(20)).await;
        if !more && !server.requests_of("create", "/configmaps").is_empty() {
            more = true;
            // Of two that are made in one second, either may have come first.
            let served = if address(&agent, &cluster, "first").is_empty() { "second" } else { "first" };
            cluster.client.delete("Service", &cluster.namespace, served).await?;
        }
    }
    agent.run_for(Duration::from_millis(300)).await;
    let requests: Vec<_> = server.requests().into_iter().filter(|entry| entry.verb != "delete").collect();

    let config = lbd::config::load(&site.config()).map_err(|error| anyhow::anyhow!(error.report()))?;
    let documents = rights::manifests(&config)
        .split("---\n")
        .map(|text| serde_saphyr::from_str::<Value>(text).context("a manifest"))
        .collect::<Result<Vec<_>>>()?;
    let rules = |kind: &str, name: &Value| -> Vec<Value> {
        let role = documents.iter().find(|it| it["kind"] == kind && it["metadata"]["name"] == *name);
        role.and_then(|role| role["rules"].as_array().cloned()).unwrap_or_default()
    };
    // Each rule, where it holds, and whether it was needed.
    let mut granted = Vec::new();
    for binding in documents.iter().filter(|it| it["kind"].as_str().is_some_and(|kind| kind.ends_with("Binding"))) {
        let place = binding["metadata"]["namespace"].as_str().unwrap_or("").to_owned();
        for rule in rules(binding["roleRef"]["kind"].as_str().unwrap_or(""), &binding["roleRef"]["name"]) {
            for verb in rule["verbs"].as_array().into_iter().flatten() {
                granted.push((place.clone(), rule.clone(), verb.clone(), false));
            }
        }
    }
    for entry in &requests {
        let (group, resource, verb, namespace, name) = asked(entry);
        let right = granted.iter_mut().find(|(place, rule, granted_verb, _)| {
            (place.is_empty() || *place == namespace)
                && rule["apiGroups"] == json!([group])
                && rule["resources"] == json!([resource])
                && *granted_verb == json!(verb)
                && (rule.get("resourceNames").is_none_or(|names| *names == json!([name])))
        });
        let Some(right) = right else { bail!("nothing grants {verb} {resource} {namespace}/{name} ({})", entry.path) };
        right.3 = true;
    }
    let unused: Vec<_> =
        granted.iter().filter(|(.., used)| !used).map(|(_, rule, verb, _)| format!("{verb} {rule}")).collect();
    // The first Event of its kind is created by the same patch that would repeat it, or the other way round.
    let events = unused.iter().filter(|text| text.contains("events")).count();
    ensure!(unused.len() == events && events <= 1, "granted and not needed: {unused:?}");
    cluster.finish().await
}

// ---- what is not acted on at once ----

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_address_is_left_alone_until_it_is_adopted() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    let (name, object) = load_balancer(&cluster, "foreign", 0);
    cluster.client.create(&object).await?;
    let theirs = json!({"status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.99"}]}}});
    cluster.client.patch_status("Service", &name.namespace, &name.name, "metallb", &theirs).await?;
    let mut agent = site.start().await?;
    until(&mut agent, "told", |agent| told(agent, "ForeignAddress")).await?;
    agent.run_for(Duration::from_millis(300)).await;
    assert_eq!(agent.status_writes(), 0);
    assert!(services(agent.plan()).is_empty());
    let error = agent.adopt(&ObjectName::new(&cluster.namespace, "absent")).unwrap_err();
    assert!(error.contains("there is no Service"), "{error}");
    let uid = agent.adopt(&name).map_err(anyhow::Error::msg)?;
    assert_eq!(address(&agent, &cluster, "foreign"), "192.0.2.32");
    until(&mut agent, "served", |agent| !told(agent, "ForeignAddress") && services(agent.plan()) == ["foreign"])
        .await?;
    let end = Instant::now() + LIMIT;
    while addresses(&cluster).await?["foreign"] != "192.0.2.32" {
        ensure!(Instant::now() < end, "the status is not ours: {:?}", agent.notices());
        agent.step(Duration::from_millis(20)).await;
    }
    assert!(agent.adopt(&name).unwrap_err().contains("ours already"));
    assert_eq!(agent.record().adopted.get(&name), Some(&uid));
    // Another Service of the name is another.
    cluster.client.delete("Service", &name.namespace, &name.name).await?;
    until(&mut agent, "forgotten", |agent| agent.record().adopted.is_empty()).await?;
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn another_cluster_is_not_applied_until_it_is_accepted() -> Result<()> {
    let Some(mut cluster) = Cluster::with_faults("becoming another cluster").await? else { return Ok(()) };
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    let before = serve(&cluster, &mut agent, &["a", "b", "c", "d"]).await?;
    let uid = agent.cluster().context("cluster")?.uid;
    assert!(agent.accept_cluster().unwrap_err().contains("nothing to accept"));
    agent.save()?;
    drop(agent);
    cluster.server_mut()?.go_away();
    // The kubeconfig leads elsewhere now: one Service is of the same name, the others are not there.
    let other = apiserver::start(apiserver::Options::default()).await?;
    other.write_kubeconfig(cluster.kubeconfig())?;
    let theirs = service(&cluster.namespace, "a", "LoadBalancer", &[(6443, 0)]);
    other.create(&theirs)?;
    let mut agent = site.start().await?;
    until(&mut agent, "told", |agent| told(agent, "ClusterChanged")).await?;
    agent.run_for(Duration::from_millis(300)).await;
    assert_eq!(services(agent.plan()), ["a", "b", "c", "d"], "the last state is gone");
    let shown = agent.cluster().context("cluster")?;
    assert_eq!((shown.uid.as_str(), shown.instead.is_some()), (uid.as_str(), true));
    let written: Vec<_> = other
        .requests()
        .into_iter()
        .filter(|entry| matches!(entry.verb, "create" | "update" | "patch" | "delete"))
        .collect();
    assert!(written.is_empty(), "{written:?}");
    agent.accept_cluster().map_err(anyhow::Error::msg)?;
    until(&mut agent, "applied", |agent| services(agent.plan()) == ["a"] && holds(agent)).await?;
    assert_eq!(address(&agent, &cluster, "a"), before["a"], "a name keeps its address");
    let resets: usize = agent.plans().iter().map(|plan| plan.resets.len()).sum();
    assert!(resets > 0, "the flows of the other cluster's Services go on");
    assert!(!told(&agent, "ClusterChanged"));
    agent.save()?;
    drop(agent);
    let mut agent = site.start().await?;
    until(&mut agent, "still the right one", holds).await?;
    assert!(!told(&agent, "ClusterChanged"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b37_an_empty_list_after_errors_is_not_believed_at_once() -> Result<()> {
    let Some(cluster) = Cluster::with_faults("losing objects without an event").await? else { return Ok(()) };
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    serve(&cluster, &mut agent, &["a", "b", "c", "d"]).await?;
    agent.run_for(Duration::from_millis(200)).await;
    let (writes, plan) = (agent.status_writes(), agent.plan().clone());
    let server = cluster.server()?;
    // A server that has lost everything for a moment, without an event.
    let full = server.backup();
    for name in ["a", "b", "c", "d"] {
        server.forget("Service", &cluster.namespace, name)?;
    }
    server.compact(true);
    server.end_watches();
    until(&mut agent, "held", |agent| told(agent, "RemovalHeld")).await?;
    server.restore(&full);
    server.compact(true);
    server.end_watches();
    until(&mut agent, "over", |agent| !told(agent, "RemovalHeld")).await?;
    agent.run_for(Duration::from_millis(200)).await;
    assert_eq!((agent.plan(), agent.status_writes()), (&plan, writes), "something was done");
    // The same once more, for good.
    for name in ["a", "b", "c", "d"] {
        server.forget("Service", &cluster.namespace, name)?;
    }
    server.compact(true);
    server.end_watches();
    until(&mut agent, "held again", |agent| told(agent, "RemovalHeld")).await?;
    assert_eq!(services(agent.plan()).len(), 4);
    until(&mut agent, "believed", |agent| services(agent.plan()).is_empty()).await?;
    assert!(!told(&agent, "RemovalHeld"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b35_a_start_with_the_api_away_serves_the_last_state_and_says_how_old_it_is() -> Result<()> {
    let Some(mut cluster) = Cluster::with_faults("going away").await? else { return Ok(()) };
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    let before = serve(&cluster, &mut agent, &["a", "b"]).await?;
    let tables = agent.plan().tables.clone();
    ensure!(!tables.is_empty(), "no table");
    agent.save()?;
    drop(agent);
    // An hour ago.
    let text = std::fs::read_to_string(site.state("inventory.json"))?;
    let mut saved: Value = serde_json::from_str(&text)?;
    saved["synced"] = json!(saved["synced"].as_i64().context("synced")? - 3600);
    std::fs::write(site.state("inventory.json"), saved.to_string())?;
    cluster.server_mut()?.go_away();
    let mut agent = site.start().await?;
    agent.run_for(Duration::from_millis(1500)).await;
    assert_eq!(
        (services(agent.plan()).as_slice(), &agent.plan().tables),
        (["a", "b"].map(str::to_owned).as_slice(), &tables)
    );
    assert!(!agent.plan().quiet);
    let source = &agent.sources()[0];
    assert_eq!(source.state, "restored");
    assert!(source.age_s.is_some_and(|age| (3600..3700).contains(&age)) && source.error.is_some(), "{source:?}");
    // It comes back with one Service fewer: one list, no flap, no write to the other.
    cluster.server_mut()?.come_back().await?;
    cluster.client.delete("Service", &cluster.namespace, "a").await?;
    until(&mut agent, "synced", |agent| services(agent.plan()) == ["b"] && holds(agent)).await?;
    agent.run_for(Duration::from_millis(300)).await;
    assert_eq!((agent.status_writes(), &addresses(&cluster).await?["b"]), (0, &before["b"]));
    assert!(agent.plans().iter().all(|plan| services(plan).contains(&"b".to_owned())), "it flapped");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn max_blind_refuses_new_connections_until_the_cluster_answers() -> Result<()> {
    let Some(mut cluster) = Cluster::with_faults("going away").await? else { return Ok(()) };
    let site = Site::with(&cluster, POOL, ", max_blind: 1h").await?;
    let mut agent = site.start().await?;
    serve(&cluster, &mut agent, &["a"]).await?;
    assert!(agent.plan().frontends.values().all(|frontend| frontend.table.is_some()));
    agent.save()?;
    drop(agent);
    cluster.server_mut()?.go_away();
    let age = |age: i64| -> Result<()> {
        let mut saved: Value = serde_json::from_str(&std::fs::read_to_string(site.state("inventory.json"))?)?;
        saved["synced"] = json!(saved["synced"].as_i64().context("synced")? - age);
        std::fs::write(site.state("inventory.json"), saved.to_string()).context("write")
    };
    age(1800)?;
    let mut agent = site.start().await?;
    agent.run_for(Duration::from_millis(300)).await;
    assert!(agent.plan().frontends.values().all(|frontend| frontend.table.is_some()), "refused too early");
    assert!(!told(&agent, "Blind"));
    drop(agent);
    age(1801)?;
    let mut agent = site.start().await?;
    until(&mut agent, "told", |agent| told(agent, "Blind")).await?;
    assert!(
        agent.plan().frontends.values().all(|frontend| frontend.table.is_none()) && agent.plan().frontends.len() == 1
    );
    assert!(agent.plan().resets.is_empty(), "connections that are there go on");
    cluster.server_mut()?.come_back().await?;
    until(&mut agent, "open again", |agent| agent.plan().frontends.values().all(|frontend| frontend.table.is_some()))
        .await?;
    assert!(!told(&agent, "Blind"));
    Ok(())
}

// ---- a NodePort that is another's ----

/// Deletes a Service and gives its NodePort to another one.
async fn recycle(cluster: &Cluster, old: &Old) -> Result<()> {
    cluster.client.delete("Service", &cluster.namespace, "old").await?;
    cluster.client.create(&load_balancer(cluster, "new", old.node_port).1).await.map(drop)
}

/// The frontend of a Service that goes, and its NodePort.
struct Old {
    id: u16,
    node_port: u16,
}

/// In the plan that first serves the new Service, the flows of the old one are reset.
fn assert_recycled(agent: &DryAgent, old: &Old) {
    let plan = agent.plans().iter().find(|plan| services(plan).contains(&"new".to_owned()));
    let before = agent.plans().iter().take_while(|plan| !services(plan).contains(&"new".to_owned()));
    // A plan carries its resets before anything that it adds; one before may have carried them.
    let reset = before.chain(plan).any(|plan| {
        plan.resets.contains(&Reset::Frontend(old.id))
            || plan.resets.iter().any(|reset| matches!(reset, Reset::Target { port, .. } if *port == old.node_port))
    });
    assert!(
        reset,
        "flows to the recycled port live on: {:?}",
        agent.plans().iter().map(|plan| &plan.resets).collect::<Vec<_>>()
    );
    let frontends = agent.plan().frontends.values();
    let owners: Vec<_> =
        frontends.filter(|frontend| frontend.target_port == old.node_port).map(|frontend| &frontend.name).collect();
    assert_eq!(owners.len(), 1, "{owners:?}");
}

async fn with_old(cluster: &Cluster, site: &Site) -> Result<(DryAgent, Old)> {
    let mut agent = site.start().await?;
    cluster.client.create(&node(&cluster.namespace, "10.0.0.11")).await?;
    cluster.client.create(&load_balancer(cluster, "old", 0).1).await?;
    until(&mut agent, "old is served", |agent| services(agent.plan()) == ["old"]).await?;
    let frontend = agent.plan().frontends.values().next().context("a frontend")?;
    let old = Old { id: frontend.id, node_port: frontend.target_port };
    agent.save()?;
    Ok((agent, old))
}

fn serves_new(agent: &DryAgent) -> bool {
    services(agent.plan()) == ["new"]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recycled_node_port_resets_the_old_flows_while_the_agent_watches() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    let (mut agent, old) = with_old(&cluster, &site).await?;
    recycle(&cluster, &old).await?;
    until(&mut agent, "new is served", serves_new).await?;
    assert_recycled(&agent, &old);
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recycled_node_port_resets_the_old_flows_when_the_agent_was_dead() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    let (agent, old) = with_old(&cluster, &site).await?;
    drop(agent);
    recycle(&cluster, &old).await?;
    let mut agent = site.start().await?;
    until(&mut agent, "new is served", serves_new).await?;
    assert_recycled(&agent, &old);
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recycled_node_port_resets_the_old_flows_when_the_agent_was_blind() -> Result<()> {
    let Some(cluster) = Cluster::with_faults("watches that stall, 503 for lists").await? else { return Ok(()) };
    let site = Site::new(&cluster).await?;
    let (mut agent, old) = with_old(&cluster, &site).await?;
    let server = cluster.server()?;
    server.stall_watches(true);
    server.fault("list", "/", u32::MAX, Action::status(503, "ServiceUnavailable"));
    recycle(&cluster, &old).await?;
    agent.run_for(Duration::from_millis(500)).await;
    assert_eq!(services(agent.plan()), ["old"]);
    server.compact(true);
    server.end_watches();
    server.stall_watches(false);
    agent.run_for(Duration::from_millis(300)).await;
    assert_eq!(services(agent.plan()), ["old"], "acted without a list");
    server.clear_faults();
    until(&mut agent, "new is served", serves_new).await?;
    assert_recycled(&agent, &old);
    Ok(())
}

// ---- Services that come, change and go ----

#[tokio::test(flavor = "multi_thread")]
async fn b02_a_nodeport_that_toggles_costs_nothing_but_maps() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    serve(&cluster, &mut agent, &["other", "toggled"]).await?;
    agent.run_for(Duration::from_millis(300)).await;
    let other = |plan: &Plan| plan.frontends.values().find(|frontend| frontend.name.ends_with("/other")).cloned();
    let (writes, events, before) = (agent.status_writes(), agent.events().len(), other(agent.plan()));
    for step in 0..60 {
        let node_port = if step % 2 == 0 { 30918 } else { 31222 };
        let patch =
            json!({"spec": {"ports": [{"name": "p6443", "port": 6443, "protocol": "TCP", "nodePort": node_port}]}});
        cluster.client.patch("Service", &cluster.namespace, "toggled", &patch).await?;
        agent.step(Duration::from_millis(20)).await;
    }
    let target = |plan: &Plan| {
        let found = plan.frontends.values().find(|frontend| frontend.name.ends_with("/toggled"));
        found.map(|frontend| frontend.target_port)
    };
    until(&mut agent, "the last value", |agent| target(agent.plan()) == Some(31222)).await?;
    agent.run_for(Duration::from_millis(300)).await;
    assert_eq!(target(agent.plan()), Some(31222));
    assert_eq!((agent.status_writes(), agent.events().len()), (writes, events));
    assert!(agent.plans().iter().rev().take(20).all(|plan| other(plan) == before), "another VIP moved");
    assert_eq!((agent.plan().frontends.len(), agent.plan().tables.len()), (2, 1));
    if let Ok(server) = cluster.server() {
        let kept = server.requests_of("update", "/configmaps/").len();
        assert!(kept <= 3, "{kept} writes of the record");
    }
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b04_a_service_deleted_while_the_agent_is_down_goes_with_the_first_complete_list() -> Result<()> {
    let Some(cluster) = Cluster::with_faults("503 for one kind").await? else { return Ok(()) };
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    let before = serve(&cluster, &mut agent, &["a", "b"]).await?;
    agent.save()?;
    drop(agent);
    cluster.client.delete("Service", &cluster.namespace, "a").await?;
    let server = cluster.server()?;
    server.fault("list", "/nodes", u32::MAX, Action::status(503, "ServiceUnavailable"));
    let mut agent = site.start().await?;
    agent.run_for(Duration::from_millis(600)).await;
    assert_eq!(services(agent.plan()), ["a", "b"], "a partial list was acted on");
    server.clear_faults();
    until(&mut agent, "it is gone", |agent| services(agent.plan()) == ["b"]).await?;
    let vips: Vec<_> =
        agent.plan().addresses.iter().filter(|(_, plan)| plan.vip).map(|((_, vip), _)| vip.to_string()).collect();
    assert_eq!(vips, [before["b"].clone()]);
    assert!(agent.record().entries.iter().any(|entry| entry.service.name == "a" && entry.freed.is_some()));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b05_a_service_first_seen_while_it_goes_is_never_touched() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    let (name, mut object) = load_balancer(&cluster, "going", 0);
    object["metadata"]["finalizers"] = json!(["example.com/hold"]);
    cluster.client.create(&object).await?;
    cluster.client.delete("Service", &name.namespace, &name.name).await?;
    let mut agent = site.start().await?;
    let shown = serve(&cluster, &mut agent, &["other"]).await?;
    let labelled = json!({"metadata": {"labels": {"example.com/a": "b"}}});
    cluster.client.patch("Node", "", &cluster.namespace, &labelled).await?;
    agent.run_for(Duration::from_millis(500)).await;
    assert_eq!((address(&agent, &cluster, "going"), shown["other"].as_str()), (String::new(), "192.0.2.32"));
    let found = cluster.client.get("Service", &name.namespace, &name.name).await?;
    assert!(found["status"]["conditions"].as_array().is_none_or(Vec::is_empty), "{}", found["status"]);
    let events = cluster.client.list("Event", &cluster.namespace).await?;
    assert!(events.iter().all(|event| event["involvedObject"]["name"] != "going"), "{events:?}");
    cluster.client.patch("Service", &name.namespace, &name.name, &json!({"metadata": {"finalizers": null}})).await?;
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b06_nothing_of_ours_holds_a_service_or_its_namespace() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    serve(&cluster, &mut agent, &["a", "b", "c"]).await?;
    // No goodbye: the agent is uninstalled.
    drop(agent);
    for name in ["a", "b", "c"] {
        let found = cluster.client.get("Service", &cluster.namespace, name).await?;
        assert!(found["metadata"]["finalizers"].as_array().is_none_or(Vec::is_empty), "{found}");
        cluster.client.delete("Service", &cluster.namespace, name).await?;
        assert!(cluster.client.get("Service", &cluster.namespace, name).await.is_err(), "{name} stays");
    }
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b07_another_type_withdraws_and_the_type_again_gives_the_same_address() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    let before = serve(&cluster, &mut agent, &["a", "b"]).await?;
    let kind = |kind: &str| json!({"spec": {"type": kind}});
    for other in ["ClusterIP", "NodePort"] {
        cluster.client.patch("Service", &cluster.namespace, "a", &kind(other)).await?;
        let begun = Instant::now();
        until(&mut agent, "withdrawn", |agent| services(agent.plan()) == ["b"]).await?;
        while !addresses(&cluster).await?["a"].is_empty() {
            ensure!(begun.elapsed() < Duration::from_secs(2), "the status keeps the address");
            agent.step(Duration::from_millis(20)).await;
        }
        // Back in the pool, and reserved for its name: another one gets another.
        let name = format!("c-{}", other.to_lowercase());
        let shown = serve(&cluster, &mut agent, &[&name]).await?;
        assert_ne!(shown[&name], before["a"]);
        cluster.client.delete("Service", &cluster.namespace, &name).await?;
        cluster.client.patch("Service", &cluster.namespace, "a", &kind("LoadBalancer")).await?;
        until(&mut agent, "served again", |agent| services(agent.plan()) == ["a", "b"]).await?;
        while addresses(&cluster).await?["a"] != before["a"] {
            ensure!(begun.elapsed() < LIMIT, "another address: {:?}", addresses(&cluster).await?);
            agent.step(Duration::from_millis(20)).await;
        }
    }
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b12_an_exhausted_pool_says_so_on_the_service_and_heals() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::with(&cluster, "192.0.2.32-192.0.2.33", "").await?;
    let mut agent = site.start().await?;
    let before = serve(&cluster, &mut agent, &["a", "b"]).await?;
    let (third, object) = load_balancer(&cluster, "third", 0);
    let created = cluster.client.create(&object).await?;
    until(&mut agent, "told", |agent| told(agent, "PoolExhausted")).await?;
    let end = Instant::now() + LIMIT;
    let event = loop {
        let events = cluster.client.list("Event", &cluster.namespace).await?;
        if let Some(event) = events.into_iter().find(|event| event["reason"] == "PoolExhausted") {
            break event;
        }
        ensure!(Instant::now() < end, "no Event");
        agent.step(Duration::from_millis(20)).await;
    };
    assert_eq!(event["involvedObject"]["uid"], created["metadata"]["uid"]);
    assert_eq!((&event["involvedObject"]["namespace"], &event["type"]), (&json!(third.namespace), &json!("Warning")));
    assert!(event["message"].as_str().is_some_and(|text| text.contains("192.0.2.32-192.0.2.33")), "{event}");
    loop {
        let shown = cluster.client.get("Service", &third.namespace, "third").await?;
        if shown["status"]["conditions"][0]["reason"] == "PoolExhausted" {
            break;
        }
        ensure!(Instant::now() < end, "no condition: {}", shown["status"]);
        agent.step(Duration::from_millis(20)).await;
    }
    cluster.client.delete("Service", &cluster.namespace, "a").await?;
    let begun = Instant::now();
    while addresses(&cluster).await?["third"] != before["a"] {
        ensure!(begun.elapsed() < Duration::from_secs(5), "{:?}", addresses(&cluster).await?);
        agent.step(Duration::from_millis(20)).await;
    }
    assert!(!told(&agent, "PoolExhausted"));
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b14_deleting_one_service_moves_no_other() -> Result<()> {
    let cluster = Cluster::any().await?;
    // A pool of two families, and a cluster of one.
    let site = Site::with(&cluster, &format!("{POOL}, 2001:db8:a::100-2001:db8:a::1ff"), "").await?;
    let mut agent = site.start().await?;
    let names: Vec<_> = (0..10).map(|index| format!("s{index}")).collect();
    let mut left = serve(&cluster, &mut agent, &names.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    agent.run_for(Duration::from_millis(300)).await;
    let writes = agent.status_writes();
    for name in &names {
        cluster.client.delete("Service", &cluster.namespace, name).await?;
        left.remove(name);
        until(&mut agent, "it is gone", |agent| services(agent.plan()).len() == left.len()).await?;
        assert_eq!(addresses(&cluster).await?, left);
    }
    agent.run_for(Duration::from_millis(200)).await;
    assert_eq!(agent.status_writes(), writes);
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b15_another_pool_renumbers_nobody() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::with(&cluster, "192.0.2.40-192.0.2.47", "").await?;
    let mut agent = site.start().await?;
    let before = serve(&cluster, &mut agent, &["e", "d", "c", "b", "a"]).await?;
    agent.run_for(Duration::from_millis(200)).await;
    let (writes, frontends) = (agent.status_writes(), agent.plan().frontends.clone());
    for pools in
        ["[192.0.2.37-192.0.2.47]", "[192.0.2.44-192.0.2.47, 192.0.2.37-192.0.2.43]", "[192.0.2.128/28, 192.0.2.32/28]"]
    {
        site.configure(|text| text.replace("[192.0.2.40-192.0.2.47]", pools))?;
        assert_eq!(agent.reload(&site.config()), "applied");
        agent.run_for(Duration::from_millis(200)).await;
        assert_eq!(agent.plan().frontends, frontends, "{pools}");
        assert!(agent.plan().resets.is_empty(), "{pools}: sessions are cut");
    }
    assert_eq!((agent.status_writes(), addresses(&cluster).await?), (writes, before));
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b06_a_release_clears_our_statuses_and_a_later_start_gives_the_same_addresses() -> Result<()> {
    let cluster = Cluster::any().await?;
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    let before = serve(&cluster, &mut agent, &["a", "b"]).await?;
    let (foreign, object) = load_balancer(&cluster, "foreign", 0);
    let mut object = object;
    object["spec"]["loadBalancerClass"] = json!("example.com/other");
    cluster.client.create(&object).await?;
    let theirs = json!({"status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.99"}]}}});
    cluster.client.patch_status("Service", &foreign.namespace, &foreign.name, "other", &theirs).await?;
    drop(agent);
    let config = lbd::config::load(&site.config()).map_err(|error| anyhow::anyhow!(error.report()))?;
    let settings = config.hub.kubernetes.as_ref().context("a cluster")?;
    let access = lbd::source::kubernetes::Access::open(settings)?;
    assert_eq!(lbd::source::status::release_all(&access, &config).await.map_err(anyhow::Error::msg)?, (2, Vec::new()));
    let shown = addresses(&cluster).await?;
    assert_eq!((shown["a"].as_str(), shown["b"].as_str(), shown["foreign"].as_str()), ("", "", "198.51.100.99"));
    for name in ["a", "b"] {
        let found = cluster.client.get("Service", &cluster.namespace, name).await?;
        assert!(found["status"]["conditions"].as_array().is_none_or(Vec::is_empty), "{}", found["status"]);
    }
    assert_eq!(lbd::source::status::release_all(&access, &config).await.map_err(anyhow::Error::msg)?, (0, Vec::new()));
    let mut agent = site.start().await?;
    let end = Instant::now() + LIMIT;
    while addresses(&cluster)
        .await?
        .iter()
        .any(|(name, address)| before.get(name).is_some_and(|known| known != address))
    {
        ensure!(Instant::now() < end, "other addresses than before: {:?}", addresses(&cluster).await?);
        agent.step(Duration::from_millis(20)).await;
    }
    drop(agent);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b46_b47_of_two_families_what_the_pools_have_is_shown_in_order_and_stays() -> Result<()> {
    let Some(cluster) = Cluster::with_faults("both families, whatever the cluster has").await? else { return Ok(()) };
    let site = Site::new(&cluster).await?;
    let mut agent = site.start().await?;
    let create = async |name: &str, policy: &str| {
        let (_, mut object) = load_balancer(&cluster, name, 0);
        object["spec"]["ipFamilyPolicy"] = json!(policy);
        object["spec"]["ipFamilies"] = json!(["IPv4", "IPv6"]);
        cluster.client.create(&object).await.map(drop)
    };
    create("preferring", "PreferDualStack").await?;
    create("requiring", "RequireDualStack").await?;
    until(&mut agent, "the one that can be served is", |agent| !address(agent, &cluster, "preferring").is_empty())
        .await?;
    let shown = async |agent: &mut DryAgent, name: &str, wanted: &dyn Fn(&[String]) -> bool| -> Result<Vec<String>> {
        let end = Instant::now() + LIMIT;
        loop {
            let object = cluster.client.get("Service", &cluster.namespace, name).await?;
            let ingress = object["status"]["loadBalancer"]["ingress"].as_array().cloned().unwrap_or_default();
            ensure!(ingress.iter().all(|entry| entry["hostname"].is_null()), "a host name: {ingress:?}");
            let found: Vec<String> =
                ingress.iter().filter_map(|entry| Some(entry["ip"].as_str()?.to_owned())).collect();
            if wanted(&found) {
                return Ok(found);
            }
            ensure!(Instant::now() < end, "{name} shows {found:?}: {:?}", agent.notices());
            agent.step(Duration::from_millis(20)).await;
        }
    };
    let first = shown(&mut agent, "preferring", &|found| found.len() == 1).await?;
    assert_eq!(first, ["192.0.2.32"]);
    until(&mut agent, "the other is told why not", |agent| told(agent, "FamilyUnavailable")).await?;
    agent.run_for(Duration::from_millis(200)).await;
    assert!(shown(&mut agent, "requiring", &|_| true).await?.is_empty());

    // A pool of the other family: what is shown keeps its place.
    site.configure(|text| {
        text.replace("snat: [10.0.0.2]", "snat: [10.0.0.2, '2001:db8:f::2']")
            .replace("node_cidrs: [10.0.0.0/24]", "node_cidrs: [10.0.0.0/24, '2001:db8:f::/64']")
            .replace(
                "address: 192.0.2.2/24, gateway: 192.0.2.1",
                "address: [192.0.2.2/24, '2001:db8:a::2/64'], gateway: [192.0.2.1, '2001:db8:a::1']",
            )
            .replace(&format!("[{POOL}]"), &format!("['2001:db8:a::30/124', {POOL}]"))
    })?;
    cluster.grant(&std::fs::read_to_string(site.config())?).await?;
    let answer = agent.reload(&site.config());
    let both = shown(&mut agent, "preferring", &|found| found.len() == 2).await.with_context(|| answer.clone())?;
    assert!(both[0] == first[0] && both[1].starts_with("2001:db8:a::3"), "{both:?}");
    let required = shown(&mut agent, "requiring", &|found| found.len() == 2).await?;
    assert!(required[0].starts_with("192.0.2.") && required[1].starts_with("2001:db8:a::3"), "{required:?}");
    // After a restart nothing is written: the order is the same.
    agent.save()?;
    drop(agent);
    let mut agent = site.start().await?;
    until(&mut agent, "it acts", |agent| holds(agent) && services(agent.plan()).len() == 4).await?;
    agent.run_for(Duration::from_millis(300)).await;
    assert_eq!(agent.status_writes(), 0);
    assert_eq!(shown(&mut agent, "preferring", &|_| true).await?, both);
    drop(agent);
    cluster.finish().await
}
