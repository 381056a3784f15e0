//! The Kubernetes source, the statuses and Events it writes, and the test API server itself.
//!
//! Against the cluster that `LBD_TEST_KUBECONFIG` names, if it is set; what needs faults runs on the test server only. On both, what
//! is tested has the account and the rights that `lbd rbac` prints.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lbd::config;
use lbd::plan::model::Notice;
use lbd::source::events::EventWriter;
use lbd::source::kubernetes::{KubernetesSource, Options, Snapshot, Timing, check};
use lbd::source::status::{DesiredStatus, Pace, StatusWriter};
use lbd::source::{Condition, Inventory, ObjectName, PROGRAMMED};
use lbd_tests::apiserver::{self, Action, Cluster, node, service};
use serde_json::{Value, json};
use tokio::sync::watch;

/// Nothing here takes longer.
const LIMIT: Duration = Duration::from_secs(20);

/// So soon a watch of the test server shows what was written.
const SETTLE: Duration = Duration::from_millis(100);

fn quick() -> Timing {
    Timing { retry_first: Duration::from_millis(20), retry_last: Duration::from_millis(200), ..Timing::default() }
}

fn quick_pace() -> Pace {
    Pace { settle: SETTLE, pause_first: Duration::from_millis(20), ..Pace::default() }
}

/// A configuration that claims the test's namespace, with all addresses that statuses get here.
fn configuration(cluster: &Cluster) -> Result<String> {
    Ok(format!(
        "version: 1\nhubs: [{{ name: {0}, interface: hub0, kubernetes: {{ {1} }} }}]\ntenants:\n  - name: a\n    segment: {{ interface: \
         ten0 }}\n    pools: [192.168.203.0/24, '2001:db8:a::/112']\n    claim: [{{ namespaces: [{0}] }}]\n",
        cluster.namespace,
        cluster.settings()?
    ))
}

/// A cluster with the account.
async fn any() -> Result<Cluster> {
    let cluster = Cluster::any().await?;
    cluster.grant(&configuration(&cluster)?).await?;
    Ok(cluster)
}

/// The test server, with the account; `None` on a real cluster.
async fn with_faults(what: &str) -> Result<Option<Cluster>> {
    let Some(cluster) = Cluster::with_faults(what).await? else { return Ok(None) };
    cluster.grant(&configuration(&cluster)?).await?;
    Ok(Some(cluster))
}

struct Seen {
    source: KubernetesSource,
    snapshots: watch::Receiver<Snapshot>,
    settle: Duration,
}

impl Seen {
    async fn start_with(cluster: &Cluster, options: Options) -> Result<Self> {
        let allow_insecure = cluster.allow_insecure()?;
        let settings = config::Kubernetes { kubeconfig: cluster.kubeconfig().into(), allow_insecure, max_blind: None };
        let (source, snapshots) = KubernetesSource::start(&settings, options).await?;
        Ok(Self { source, snapshots, settle: cluster.limit(SETTLE) })
    }

    async fn start(cluster: &Cluster) -> Result<Self> {
        let mut seen = Self::start_with(cluster, Options { timing: quick(), ..Options::default() }).await?;
        seen.until("complete", |snapshot| snapshot.live && snapshot.connected).await?;
        Ok(seen)
    }

    async fn until(&mut self, what: &str, condition: impl Fn(&Snapshot) -> bool) -> Result<Snapshot> {
        let error = self.snapshots.clone();
        match tokio::time::timeout(LIMIT, self.snapshots.wait_for(|snapshot| condition(snapshot))).await {
            Ok(Ok(snapshot)) => Ok(snapshot.clone()),
            Ok(Err(_)) => bail!("the source ended while waiting for: {what}"),
            Err(_) => bail!("not seen: {what}; last error: {:?}", error.borrow().last_error),
        }
    }

    async fn until_service(&mut self, name: &ObjectName) -> Result<lbd::source::Service> {
        let snapshot = self.until("the Service", |snapshot| snapshot.inventory.services.contains_key(name)).await?;
        Ok(snapshot.inventory.services[name].clone())
    }

    fn inventory(&self) -> Arc<Inventory> {
        Arc::clone(&self.snapshots.borrow().inventory)
    }

    /// One that writes once what the cluster shows in time.
    fn writer(&self) -> StatusWriter {
        let pace = Pace { settle: self.settle, ..quick_pace() };
        StatusWriter::start_with(self.source.access(), self.snapshots.clone(), pace)
    }

    /// One that loses patience soon, for a test of what it does then.
    fn impatient_writer(&self) -> StatusWriter {
        StatusWriter::start_with(self.source.access(), self.snapshots.clone(), quick_pace())
    }
}

fn wanted(uid: &str, address: &str) -> DesiredStatus {
    DesiredStatus {
        uid: uid.into(),
        addresses: address.parse().into_iter().collect(),
        ip_mode: None,
        programmed: Some(Condition {
            status: Some(true),
            reason: "Programmed".into(),
            message: "in the kernel".into(),
            since: 0,
        }),
    }
}

fn load_balancer(cluster: &Cluster, name: &str) -> (ObjectName, Value) {
    (ObjectName::new(&cluster.namespace, name), service(&cluster.namespace, name, "LoadBalancer", &[(6443, 0)]))
}

/// The median: a test machine that is busy for a moment is no fault of what is measured.
fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

async fn eventually(what: &str, mut check: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < LIMIT {
        if check().await? {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    bail!("did not happen: {what}")
}

fn ingress(object: &Value) -> Vec<String> {
    let entries = object["status"]["loadBalancer"]["ingress"].as_array();
    entries.into_iter().flatten().map(|entry| entry["ip"].as_str().unwrap_or("?").to_owned()).collect()
}

async fn until_ingress(cluster: &Cluster, name: &ObjectName, wanted: &[&str]) -> Result<Value> {
    let mut last = Value::Null;
    eventually(&format!("{name} has {wanted:?}"), async || {
        last = cluster.client.get("Service", &name.namespace, &name.name).await?;
        Ok(ingress(&last) == wanted)
    })
    .await
    .with_context(|| format!("last: {}", last["status"]))?;
    Ok(last)
}

// ---- the source ----

#[tokio::test(flavor = "multi_thread")]
async fn lists_and_watches() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let inventory = seen.inventory();
    assert!(inventory.complete);
    let kube_system = cluster.client.get("Namespace", "", "kube-system").await?;
    assert_eq!(inventory.cluster.as_deref(), kube_system["metadata"]["uid"].as_str());
    let first = &inventory.services[&name];
    assert_eq!(first.ports[0].port, 6443);
    assert!(first.ports[0].node_port >= 30000 && first.selector && !first.terminating && !first.uid.is_empty());
    assert!(inventory.namespaces.contains_key(&cluster.namespace));

    let (second, object) = load_balancer(&cluster, "second");
    cluster.client.create(&object).await?;
    seen.until_service(&second).await?;
    cluster.client.delete("Service", &cluster.namespace, "second").await?;
    seen.until("the deletion", |snapshot| !snapshot.inventory.services.contains_key(&second)).await?;
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b01_a_nodeport_change_is_seen_within_100_ms() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let before = seen.inventory().services[&name].ports[0].node_port;
    let mut times = Vec::new();
    for step in 1..=5_u16 {
        let node_port = 30000 + (before - 30000 + step * 97) % 2700;
        let patch =
            json!({"spec": {"ports": [{"name": "p6443", "port": 6443, "protocol": "TCP", "nodePort": node_port}]}});
        cluster.client.patch("Service", &name.namespace, &name.name, &patch).await?;
        let begun = Instant::now();
        seen.until("the new NodePort", |snapshot| snapshot.inventory.services[&name].ports[0].node_port == node_port)
            .await?;
        times.push(begun.elapsed());
    }
    assert!(median(times.clone()) < cluster.limit(Duration::from_millis(100)), "{times:?}");
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b27_nodes_with_addresses_labels_taints_and_deletion() -> Result<()> {
    let cluster = any().await?;
    let (client, hub) = (&cluster.client, cluster.namespace.as_str());
    client.create(&node(hub, "10.32.96.105")).await?;
    let mut seen = Seen::start(&cluster).await?;
    let first = seen.inventory().nodes[hub].clone();
    assert_eq!(first.addresses, ["10.32.96.105".parse::<std::net::IpAddr>()?]);
    assert!(!first.excluded);
    let excluded = |wanted: bool| move |snapshot: &Snapshot| snapshot.inventory.nodes[hub].excluded == wanted;
    let label = |value: Value| json!({"metadata": {"labels": {"node.kubernetes.io/exclude-from-external-load-balancers": value}}});
    for (value, wanted) in [(json!(""), true), (json!("false"), false), (json!("yes"), true), (Value::Null, false)] {
        client.patch("Node", "", hub, &label(value.clone())).await?;
        seen.until(&format!("label {value}"), excluded(wanted)).await?;
    }
    let taint = |taints: Value| json!({"spec": {"taints": taints}});
    client
        .patch("Node", "", hub, &taint(json!([{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}])))
        .await?;
    seen.until("the taint", excluded(true)).await?;
    client.patch("Node", "", hub, &taint(Value::Null)).await?;
    seen.until("no taint", excluded(false)).await?;
    client.patch("Node", "", hub, &json!({"metadata": {"finalizers": ["example.com/hold"]}})).await?;
    client.delete("Node", "", hub).await?;
    seen.until("going", excluded(true)).await?;
    client.patch("Node", "", hub, &json!({"metadata": {"finalizers": null}})).await?;
    seen.until("gone", |snapshot| !snapshot.inventory.nodes.contains_key(hub)).await?;
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b25_heartbeats_and_cordons_change_nothing() -> Result<()> {
    let cluster = any().await?;
    let hub = cluster.namespace.as_str();
    cluster.client.create(&node(hub, "10.32.96.105")).await?;
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    seen.until_service(&name).await?;
    let before = seen.inventory();
    for second in 0..20 {
        let heartbeat = json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "KubeletReady",
            "message": "", "lastHeartbeatTime": format!("2026-01-01T00:00:{second:02}Z"),
            "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
        cluster.client.patch_status("Node", "", hub, "kubelet", &heartbeat).await?;
    }
    cluster.client.patch("Node", "", hub, &json!({"spec": {"unschedulable": true}})).await?;
    let annotation = json!({"metadata": {"annotations": {"example.com/counter": "1"}}});
    cluster.client.patch("Service", &name.namespace, &name.name, &annotation).await?;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(Arc::ptr_eq(&before, &seen.inventory()), "a new inventory without a change");
    let annotation = json!({"metadata": {"annotations": {"lbd.tenantedge.io/vip": "192.168.203.110"}}});
    cluster.client.patch("Service", &name.namespace, &name.name, &annotation).await?;
    seen.until("our annotation", |snapshot| !snapshot.inventory.services[&name].annotations.is_empty()).await?;
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn bookmarks_keep_the_age_young_without_waking_anybody() -> Result<()> {
    let Some(cluster) = with_faults("bookmarks on demand").await? else { return Ok(()) };
    cluster.server()?.set_bookmark_interval(Duration::from_millis(30));
    let mut seen = Seen::start(&cluster).await?;
    tokio::time::sleep(Duration::from_millis(100)).await;
    seen.snapshots.borrow_and_update();
    let before = seen.snapshots.borrow().last_sync.context("synced")?;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!seen.snapshots.has_changed()?);
    assert!(seen.snapshots.borrow().last_sync.context("synced")? > before);
    Ok(())
}

/// Loses a deletion and an addition while watches are stalled, forgets their versions, and ends the watches.
async fn b37_gone(by_http: bool) -> Result<()> {
    let Some(cluster) = with_faults("410 for a watch").await? else { return Ok(()) };
    let (kept, object) = load_balancer(&cluster, "kept");
    cluster.client.create(&object).await?;
    let (deleted, object) = load_balancer(&cluster, "deleted");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let before = seen.inventory();
    let server = cluster.server()?;
    server.stall_watches(true);
    cluster.client.delete("Service", &cluster.namespace, "deleted").await?;
    let (added, object) = load_balancer(&cluster, "added");
    cluster.client.create(&object).await?;
    server.compact(by_http);
    server.clear_requests();
    server.end_watches();
    server.stall_watches(false);
    let after = seen.until("the relist", |snapshot| snapshot.inventory.services.contains_key(&added)).await?;
    assert!(!after.inventory.services.contains_key(&deleted));
    assert_eq!(after.inventory.services[&kept], before.services[&kept]);
    assert!(after.inventory.complete && after.live);
    seen.until("connected again", |snapshot| snapshot.connected).await?;
    let lists = server.requests_of("list", "/services").len();
    assert!((1..=3).contains(&lists), "{lists} lists");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b37_410_as_answer_to_a_watch() -> Result<()> {
    b37_gone(true).await
}

#[tokio::test(flavor = "multi_thread")]
async fn b37_410_as_first_event_of_a_watch() -> Result<()> {
    b37_gone(false).await
}

#[tokio::test(flavor = "multi_thread")]
async fn b37_410_in_mid_stream_relists_and_leaves_the_unchanged_alone() -> Result<()> {
    let Some(cluster) = with_faults("410 in mid stream").await? else { return Ok(()) };
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    seen.until_service(&name).await?;
    let before = seen.inventory();
    let lists = seen.snapshots.borrow().lists;
    cluster.server()?.inject_error(None, 410, "Expired");
    eventually("all kinds listed again", async || Ok(seen.snapshots.borrow().lists >= lists + 4)).await?;
    seen.until("connected", |snapshot| snapshot.connected).await?;
    assert!(Arc::ptr_eq(&before, &seen.inventory()));
    let (second, object) = load_balancer(&cluster, "second");
    cluster.client.create(&object).await?;
    seen.until_service(&second).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b37_other_errors_are_survived() -> Result<()> {
    let Some(cluster) = with_faults("500, half an answer, a closed connection").await? else { return Ok(()) };
    let server = cluster.server()?;
    server.fault("list", "/services", 2, Action::status(500, "InternalError"));
    server.fault("list", "/nodes", 1, Action::Garbage);
    server.fault("list", "/namespaces", 1, Action::Close);
    server.fault("watch", "/services", 1, Action::status(429, "TooManyRequests"));
    let mut seen = Seen::start(&cluster).await?;
    assert!(seen.snapshots.borrow().failures.values().sum::<u64>() >= 5);
    let disturbances: [&dyn Fn(); 4] = [
        &|| server.inject_error(Some("services"), 500, "InternalError"),
        &|| server.inject(Some("services"), r#"{"type":"ADDED","object":{"metadata":{"name":7}}}"#),
        &|| server.inject(Some("services"), r#"{"type":"MODIFIED","obj"#),
        &|| server.end_watches(),
    ];
    for (index, disturb) in disturbances.iter().enumerate() {
        disturb();
        let (name, object) = load_balancer(&cluster, &format!("after-{index}"));
        cluster.client.create(&object).await?;
        seen.until_service(&name).await?;
    }
    seen.until("healthy", |snapshot| snapshot.connected && snapshot.last_error.is_none()).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_watch_is_noticed() -> Result<()> {
    let Some(cluster) = with_faults("a watch that stalls").await? else { return Ok(()) };
    let timing = Timing { watch_seconds: 1, silence: Duration::from_millis(300), ..quick() };
    let mut seen = Seen::start_with(&cluster, Options { timing, ..Options::default() }).await?;
    seen.until("complete", |snapshot| snapshot.live && snapshot.connected).await?;
    let server = cluster.server()?;
    server.stall_watches(true);
    let snapshot = seen.until("the silence", |snapshot| snapshot.last_error.is_some()).await?;
    assert!(
        snapshot.last_error.as_deref().unwrap_or_default().contains("no answer within"),
        "{:?}",
        snapshot.last_error
    );
    let (name, object) = load_balancer(&cluster, "meanwhile");
    cluster.client.create(&object).await?;
    server.stall_watches(false);
    seen.until_service(&name).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b35_the_last_state_stays_while_the_api_is_away() -> Result<()> {
    let Some(mut cluster) = with_faults("going away").await? else { return Ok(()) };
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let before = seen.inventory();
    cluster.server_mut()?.go_away();
    let snapshot = seen.until("disconnected", |snapshot| !snapshot.connected && snapshot.last_error.is_some()).await?;
    assert!(Arc::ptr_eq(&before, &snapshot.inventory) && snapshot.live);
    tokio::time::sleep(Duration::from_millis(500)).await;
    cluster.server_mut()?.come_back().await?;
    cluster.client.delete("Service", &name.namespace, &name.name).await?;
    let snapshot = seen.until("the deletion", |snapshot| !snapshot.inventory.services.contains_key(&name)).await?;
    assert!(snapshot.inventory.complete);
    seen.until("connected", |snapshot| snapshot.connected && snapshot.last_error.is_none()).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b04_a_restored_inventory_is_shown_until_a_complete_one_has_come() -> Result<()> {
    let Some(cluster) = with_faults("503 for one kind").await? else { return Ok(()) };
    let (name, object) = load_balancer(&cluster, "new");
    cluster.client.create(&object).await?;
    let server = cluster.server()?;
    server.fault("list", "/nodes", u32::MAX, Action::status(503, "ServiceUnavailable"));
    let mut restored = Inventory { complete: true, ..Inventory::default() };
    let gone = ObjectName::new(&cluster.namespace, "gone");
    restored.services.insert(gone.clone(), lbd::source::Service::default());
    let text = serde_json::to_string(&restored)?;
    let options = Options { restored: Some(serde_json::from_str(&text)?), timing: quick(), ..Options::default() };
    let mut seen = Seen::start_with(&cluster, options).await?;
    seen.until("an error", |snapshot| snapshot.last_error.is_some()).await?;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let snapshot = seen.snapshots.borrow().clone();
    assert!(!snapshot.live && snapshot.last_sync.is_none());
    assert_eq!(*snapshot.inventory, restored, "a partial list was shown");
    server.clear_faults();
    let snapshot = seen.until("live", |snapshot| snapshot.live).await?;
    assert!(snapshot.inventory.services.contains_key(&name) && !snapshot.inventory.services.contains_key(&gone));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b42_without_the_right_to_see_slices_everything_else_works() -> Result<()> {
    let Some(cluster) = with_faults("rights taken away and given back at a moment").await? else { return Ok(()) };
    let server = cluster.server()?;
    server.deny("list endpointslices", true);
    let mut seen = Seen::start_with(&cluster, Options { timing: quick(), ..Options::default() }).await?;
    let snapshot = seen.until("live", |snapshot| snapshot.live && snapshot.last_error.is_some()).await?;
    assert!(snapshot.inventory.complete);
    let error = snapshot.last_error.unwrap_or_default();
    assert!(error.contains("list endpointslices.discovery.k8s.io") && error.contains("403"), "{error}");
    // Nor does the age of the rest count from then, now or when the right is taken away later.
    seen.until("connected", |snapshot| snapshot.connected && snapshot.last_sync.is_some()).await?;
    server.deny("list endpointslices", false);
    seen.until("complete", |snapshot| snapshot.connected && snapshot.last_error.is_none()).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b42_missing_rights_are_named_by_a_check() -> Result<()> {
    let Some(cluster) = with_faults("rights taken away and given back at a moment").await? else { return Ok(()) };
    let text = configuration(&cluster)?;
    let settings = config::parse(&text, "lbd.yaml").map_err(|error| anyhow::anyhow!(error.report()))?;
    assert_eq!(check(&settings).await?, []);
    let server = cluster.server()?;
    server.deny("watch nodes", true);
    server.deny("patch services/status", true);
    let findings = check(&settings).await?;
    assert_eq!(findings.iter().map(|finding| finding.fatal).collect::<Vec<_>>(), [true, false]);
    assert!(findings[0].message.contains("may not watch nodes"), "{}", findings[0].message);
    assert!(findings[1].message.contains("may not patch services/status"), "{}", findings[1].message);
    server.fault("other", "/apis", 1, Action::Close);
    assert_eq!(check(&settings).await?.len(), 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b67_endpoints_of_slices_are_followed() -> Result<()> {
    let cluster = any().await?;
    let (name, mut object) = load_balancer(&cluster, "mirror");
    object["spec"].as_object_mut().context("spec")?.remove("selector");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"namespace": cluster.namespace, "name": "mirror-vm1-ipv4", "labels": {"kubernetes.io/service-name": "mirror"}},
        "ports": [{"name": "p6443", "port": 31380, "protocol": "TCP"}],
        "endpoints": [{"addresses": ["192.168.203.101", "192.168.203.102"], "conditions": {"ready": true}}]});
    cluster.client.create(&slice).await?;
    let snapshot = seen.until("endpoints", |snapshot| snapshot.inventory.endpoints.contains_key(&name)).await?;
    assert_eq!(snapshot.inventory.endpoints[&name].len(), 1);
    assert_eq!(snapshot.inventory.endpoints[&name][0].address.to_string(), "192.168.203.101");
    cluster.client.delete("EndpointSlice", &cluster.namespace, "mirror-vm1-ipv4").await?;
    seen.until("no endpoints", |snapshot| !snapshot.inventory.endpoints.contains_key(&name)).await?;
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b43_new_credentials_are_used_without_a_restart() -> Result<()> {
    let options = apiserver::Options { tls: true, token: Some("first".into()), ..apiserver::Options::default() };
    let Some(cluster) = Cluster::plain(options, "another token from now on").await? else { return Ok(()) };
    let mut seen = Seen::start(&cluster).await?;
    let server = cluster.server()?;
    server.set_token(Some("second"));
    server.end_watches();
    let snapshot = seen.until("refused", |snapshot| snapshot.last_error.is_some()).await?;
    let error = snapshot.last_error.unwrap_or_default();
    assert!(error.contains("401") && !error.contains("first"), "{error}");
    server.write_kubeconfig(cluster.kubeconfig())?;
    seen.until("accepted", |snapshot| snapshot.connected && snapshot.last_error.is_none()).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_authority_is_not_trusted() -> Result<()> {
    let Some(cluster) = Cluster::plain(
        apiserver::Options { tls: true, ..apiserver::Options::default() },
        "a certificate of another authority",
    )
    .await?
    else {
        return Ok(());
    };
    let other = apiserver::start(apiserver::Options { tls: true, ..apiserver::Options::default() }).await?;
    let text = other.kubeconfig().replace(&other.url(), &cluster.server()?.url());
    std::fs::write(cluster.kubeconfig(), text)?;
    let mut seen = Seen::start_with(&cluster, Options { timing: quick(), ..Options::default() }).await?;
    let snapshot = seen.until("refused", |snapshot| snapshot.last_error.is_some()).await?;
    let error = snapshot.last_error.unwrap_or_default();
    assert!(error.contains("certificate"), "{error}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_services_are_listed_in_pages_and_followed() -> Result<()> {
    let Some(cluster) = with_faults("more NodePorts than there are").await? else { return Ok(()) };
    let server = cluster.server()?;
    server.set_node_port_range(20000, 60000);
    let begun = Instant::now();
    for index in 0..10_000 {
        server.create(&service(&cluster.namespace, &format!("s{index}"), "LoadBalancer", &[(443, 0)]))?;
    }
    for index in 0..500_u32 {
        server.create(&node(&format!("n{index}"), &format!("10.32.{}.{}", 96 + index / 250, 1 + index % 250)))?;
    }
    eprintln!("made in {:?}", begun.elapsed());
    let begun = Instant::now();
    let mut seen = Seen::start(&cluster).await?;
    eprintln!("10,000 Services and 500 nodes after {:?}", begun.elapsed());
    assert_eq!(seen.inventory().services.len(), 10_000);
    assert!(server.requests_of("list", "/services").len() >= 20);
    let mut times = Vec::new();
    for index in 0..10 {
        let begun = Instant::now();
        let gone = format!("n{index}");
        cluster.client.delete("Node", "", &gone).await?;
        seen.until("the node's end", |snapshot| !snapshot.inventory.nodes.contains_key(&gone)).await?;
        times.push(begun.elapsed());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    eprintln!("a node's end after {times:?}");
    assert!(median(times.clone()) < Duration::from_millis(100), "{times:?}");
    let mut times = Vec::new();
    for index in 0..10 {
        let begun = Instant::now();
        let gone = ObjectName::new(&cluster.namespace, format!("s{index}"));
        cluster.client.delete("Service", &gone.namespace, &gone.name).await?;
        seen.until("the Service's end", |snapshot| !snapshot.inventory.services.contains_key(&gone)).await?;
        times.push(begun.elapsed());
    }
    eprintln!("a Service's end after {times:?}");
    // Without optimization; the copy of the names is what takes the time.
    assert!(median(times.clone()) < Duration::from_millis(300), "{times:?}");
    Ok(())
}

// ---- statuses ----

#[tokio::test(flavor = "multi_thread")]
async fn b45_the_address_is_written_at_once_and_only_once() -> Result<()> {
    let cluster = any().await?;
    let mut seen = Seen::start(&cluster).await?;
    let writer = seen.writer();
    let mut all = BTreeMap::new();
    let mut times = Vec::new();
    for index in 0..5 {
        let (name, object) = load_balancer(&cluster, &format!("hosted-{index}"));
        let address = format!("192.168.203.{}", 110 + index);
        let begun = Instant::now();
        cluster.client.create(&object).await?;
        let uid = seen.until_service(&name).await?.uid;
        all.insert(name.clone(), wanted(&uid, &address));
        writer.set(all.clone());
        let object = until_ingress(&cluster, &name, &[&address]).await?;
        times.push(begun.elapsed());
        let conditions = object["status"]["conditions"].as_array().context("conditions")?;
        assert_eq!((&conditions[0]["type"], &conditions[0]["status"]), (&json!(PROGRAMMED), &json!("True")));
        writer.set(all.clone());
    }
    assert!(median(times.clone()) < cluster.limit(Duration::from_millis(100)), "{times:?}");
    // Neither what comes back by the watch nor a repeated wish makes another write.
    tokio::time::sleep(Duration::from_millis(500)).await;
    writer.set(all.clone());
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(writer.writes(), 5);
    if let Ok(server) = cluster.server() {
        let patches = server.requests_of("patch", "/services/");
        assert_eq!(patches.len(), 5);
        for patch in patches {
            assert!(patch.path.ends_with("/status"), "{}", patch.path);
            assert_eq!(patch.content_type, "application/apply-patch+yaml");
            assert!(patch.query.contains("fieldManager=lbd") && !patch.query.contains("force"), "{}", patch.query);
            assert!(patch.body.context("body")?["metadata"]["uid"].is_string());
        }
    }
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b65_a_new_service_does_not_wait_behind_all_the_others() -> Result<()> {
    /// More than may be written at once.
    const MANY: u32 = 800;
    let Some(cluster) = with_faults("many Services at once").await? else { return Ok(()) };
    let server = cluster.server()?;
    for index in 0..MANY {
        server.create(&load_balancer(&cluster, &format!("hosted-{index}")).1)?;
    }
    // Time stamps are in seconds.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let mut seen = Seen::start(&cluster).await?;
    let writer = seen.writer();
    let mut all: BTreeMap<_, _> = seen
        .inventory()
        .services
        .iter()
        .enumerate()
        .map(|(index, (name, service))| {
            (name.clone(), wanted(&service.uid, &format!("192.168.{}.{}", 204 + index / 250, 1 + index % 250)))
        })
        .collect();
    assert_eq!(all.len(), MANY as usize);
    writer.set(all.clone());
    eventually("the first are written", async || Ok(writer.writes() > 0)).await?;
    // The last by name: it is not for that that it comes first.
    let (name, object) = load_balancer(&cluster, "mirror-of-a-guest");
    cluster.client.create(&object).await?;
    let uid = seen.until_service(&name).await?.uid;
    all.insert(name.clone(), wanted(&uid, "192.168.203.110"));
    writer.set(all);
    until_ingress(&cluster, &name, &["192.168.203.110"]).await?;
    let written = writer.writes();
    assert!(written < u64::from(MANY), "{written} were written before");
    eventually("all are written", async || Ok(writer.writes() > u64::from(MANY))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn b65_a_server_that_has_too_much_to_do_is_left_alone_for_a_while() -> Result<()> {
    let Some(cluster) = with_faults("429 to eight writes").await? else { return Ok(()) };
    let server = cluster.server()?;
    for index in 0..40 {
        server.create(&load_balancer(&cluster, &format!("hosted-{index}")).1)?;
    }
    let seen = Seen::start(&cluster).await?;
    let writer = seen.writer();
    let all = seen.inventory();
    let all = all.services.iter().enumerate();
    let all = all.map(|(index, (name, it))| (name.clone(), wanted(&it.uid, &format!("192.168.203.{}", 10 + index))));
    server.fault("patch", "/status", 8, Action::status(429, "TooManyRequests"));
    writer.set(all.collect());
    eventually("some are refused", async || Ok(writer.writes() >= 8)).await?;
    tokio::time::sleep(Duration::from_millis(400)).await;
    // Those that were under way, and no more.
    let written = writer.writes();
    assert!(written <= 16, "{written} writes");
    eventually("all are written", async || Ok(server.requests_of("patch", "/status").len() >= 48)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn b46_the_status_has_addresses_in_order_and_an_ip_mode_only_if_wanted() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let writer = seen.writer();
    let uid = seen.until_service(&name).await?.uid;
    let mut desired = wanted(&uid, "192.168.203.110");
    desired.addresses.push("2001:db8:a::10".parse()?);
    writer.set(BTreeMap::from([(name.clone(), desired.clone())]));
    let object = until_ingress(&cluster, &name, &["192.168.203.110", "2001:db8:a::10"]).await?;
    let modes = |object: &Value| object["status"]["loadBalancer"]["ingress"][0]["ipMode"].clone();
    assert_eq!(modes(&object), "VIP");
    desired.ip_mode = Some(config::IpMode::Proxy);
    writer.set(BTreeMap::from([(name.clone(), desired.clone())]));
    eventually("Proxy", async || {
        Ok(modes(&cluster.client.get("Service", &name.namespace, &name.name).await?) == "Proxy")
    })
    .await?;
    desired.ip_mode = None;
    writer.set(BTreeMap::from([(name.clone(), desired)]));
    // What is wanted no longer is not taken back: an unsaid mode is whatever the server has.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(writer.writes(), 2);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b46_a_restart_writes_nothing() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let writer = seen.writer();
    let uid = seen.until_service(&name).await?.uid;
    let desired = BTreeMap::from([(name.clone(), wanted(&uid, "192.168.203.110"))]);
    writer.set(desired.clone());
    until_ingress(&cluster, &name, &["192.168.203.110"]).await?;
    drop((writer, seen));
    let seen = Seen::start(&cluster).await?;
    let writer = seen.writer();
    writer.set(desired);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(writer.writes(), 0);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b08_conflicts_of_versions_and_errors_are_retried_and_foreign_fields_survive() -> Result<()> {
    let Some(cluster) = with_faults("409, 503 and a closed connection").await? else { return Ok(()) };
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let writer = seen.writer();
    let server = cluster.server()?;
    server.fault("patch", "/status?&fieldManager=lbd", 3, Action::status(409, "Conflict"));
    let uid = seen.until_service(&name).await?.uid;
    writer.set(BTreeMap::from([(name.clone(), wanted(&uid, "192.168.203.110"))]));
    eventually("three refusals", async || Ok(writer.writes() >= 2)).await?;
    let foreign = json!({"metadata": {"annotations": {"example.com/a": "b"}}});
    cluster.client.patch("Service", &name.namespace, &name.name, &foreign).await?;
    let condition = json!({"status": {"conditions": [{"type": "example.com/Other", "status": "True", "reason": "R", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    cluster.client.patch_status("Service", &name.namespace, &name.name, "other", &condition).await?;
    let begun = Instant::now();
    let object = until_ingress(&cluster, &name, &["192.168.203.110"]).await?;
    assert!(begun.elapsed() < Duration::from_secs(2));
    assert_eq!(object["metadata"]["annotations"]["example.com/a"], "b");
    eventually("both conditions", async || {
        let object = cluster.client.get("Service", &name.namespace, &name.name).await?;
        let types: BTreeSet<_> = object["status"]["conditions"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|entry| entry["type"].to_string())
            .collect();
        Ok(types.len() == 2)
    })
    .await?;
    assert!(writer.notices().borrow().is_empty());
    // A server that is away for a moment.
    server.fault("patch", "/status", 4, Action::status(503, "ServiceUnavailable"));
    server.fault("patch", "/status", 1, Action::Close);
    writer.set(BTreeMap::from([(name.clone(), wanted(&uid, "192.168.203.111"))]));
    until_ingress(&cluster, &name, &["192.168.203.111"]).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b09_a_fight_over_a_status_ends_in_a_notice_that_names_the_other() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let writer = seen.impatient_writer();
    let uid = seen.until_service(&name).await?.uid;
    writer.set(BTreeMap::from([(name.clone(), wanted(&uid, "192.168.203.110"))]));
    let theirs = json!({"status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.99"}]}}});
    let mut notices = writer.notices();
    let fight = async {
        loop {
            let object = cluster.client.get("Service", &name.namespace, &name.name).await?;
            if ingress(&object) != ["198.51.100.99"] {
                cluster.client.patch_status("Service", &name.namespace, &name.name, "metallb", &theirs).await?;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let told = tokio::select! {
        result = fight => return result,
        told = tokio::time::timeout(LIMIT, notices.wait_for(|notices| !notices.is_empty())) => told??.clone(),
    };
    assert_eq!(told.len(), 1);
    assert_eq!((told[0].reason, told[0].service.as_ref()), ("StatusContended", Some(&name)));
    assert!(told[0].message.contains("metallb"), "{}", told[0].message);
    let writes = writer.writes();
    assert!(writes <= 10, "{writes} writes");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(writer.writes(), writes, "writes go on while held");
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b09_one_overwrite_is_put_right() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let writer = seen.impatient_writer();
    let uid = seen.until_service(&name).await?.uid;
    writer.set(BTreeMap::from([(name.clone(), wanted(&uid, "192.168.203.110"))]));
    until_ingress(&cluster, &name, &["192.168.203.110"]).await?;
    for theirs in [json!([{"ip": "198.51.100.99"}]), json!([])] {
        let patch = json!({"status": {"loadBalancer": {"ingress": theirs}}});
        cluster.client.patch_status("Service", &name.namespace, &name.name, "other", &patch).await?;
        until_ingress(&cluster, &name, &["192.168.203.110"]).await?;
    }
    assert!(writer.notices().borrow().is_empty());
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b07_another_type_clears_and_the_type_again_gives_the_address_again() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let writer = seen.writer();
    let uid = seen.until_service(&name).await?.uid;
    let desired = BTreeMap::from([(name.clone(), wanted(&uid, "192.168.203.110"))]);
    writer.set(desired.clone());
    until_ingress(&cluster, &name, &["192.168.203.110"]).await?;
    // The wish may come later than the change of type: the writer looks at both.
    let patch = json!({"spec": {"type": "ClusterIP"}});
    cluster.client.patch("Service", &name.namespace, &name.name, &patch).await?;
    let begun = Instant::now();
    eventually("cleared", async || {
        let object = cluster.client.get("Service", &name.namespace, &name.name).await?;
        Ok(ingress(&object).is_empty() && object["status"]["conditions"].as_array().is_none_or(Vec::is_empty))
    })
    .await?;
    assert!(begun.elapsed() < Duration::from_secs(2));
    writer.set(BTreeMap::new());
    tokio::time::sleep(Duration::from_millis(300)).await;
    let writes = writer.writes();
    let patch = json!({"spec": {"type": "LoadBalancer"}});
    cluster.client.patch("Service", &name.namespace, &name.name, &patch).await?;
    writer.set(desired);
    until_ingress(&cluster, &name, &["192.168.203.110"]).await?;
    assert_eq!(writer.writes(), writes + 1);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b10_what_is_not_ours_is_never_written() -> Result<()> {
    let cluster = any().await?;
    let mut desired = BTreeMap::new();
    let mut seen = Seen::start(&cluster).await?;
    let (foreign, mut object) = load_balancer(&cluster, "foreign-class");
    object["spec"]["loadBalancerClass"] = json!("loxilb.io/loxilb");
    cluster.client.create(&object).await?;
    let (plain, mut object) = load_balancer(&cluster, "node-port");
    object["spec"]["type"] = json!("NodePort");
    cluster.client.create(&object).await?;
    let (going, mut object) = load_balancer(&cluster, "going");
    object["metadata"]["finalizers"] = json!(["example.com/hold"]);
    cluster.client.create(&object).await?;
    cluster.client.delete("Service", &going.namespace, &going.name).await?;
    let (other, object) = load_balancer(&cluster, "other-uid");
    cluster.client.create(&object).await?;
    let (unclaimed, object) = load_balancer(&cluster, "unclaimed");
    cluster.client.create(&object).await?;
    for name in [&foreign, &plain, &going, &unclaimed] {
        let uid = seen.until_service(name).await?.uid;
        if *name != unclaimed {
            desired.insert(name.clone(), wanted(&uid, "192.168.203.110"));
        }
    }
    seen.until("terminating", |snapshot| snapshot.inventory.services[&going].terminating).await?;
    desired.insert(other.clone(), wanted("00000000-0000-4000-8000-000000000001", "192.168.203.111"));
    let writer = seen.writer();
    writer.set(desired);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(writer.writes(), 0);
    let patch = json!({"metadata": {"finalizers": null}});
    cluster.client.patch("Service", &going.namespace, &going.name, &patch).await?;
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b14_deleting_some_writes_nothing_to_the_others() -> Result<()> {
    let cluster = any().await?;
    let mut seen = Seen::start(&cluster).await?;
    let writer = seen.writer();
    let mut desired = BTreeMap::new();
    for index in 0..10 {
        let (name, object) = load_balancer(&cluster, &format!("s{index}"));
        cluster.client.create(&object).await?;
        let uid = seen.until_service(&name).await?.uid;
        desired.insert(name, wanted(&uid, &format!("192.168.203.{}", 110 + index)));
    }
    writer.set(desired.clone());
    for (name, status) in &desired {
        until_ingress(&cluster, name, &[&status.addresses[0].to_string()]).await?;
    }
    assert_eq!(writer.writes(), 10);
    let names: Vec<_> = desired.keys().cloned().collect();
    for name in names {
        cluster.client.delete("Service", &name.namespace, &name.name).await?;
        seen.until("the deletion", |snapshot| !snapshot.inventory.services.contains_key(&name)).await?;
        desired.remove(&name);
        writer.set(desired.clone());
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(writer.writes(), 10);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b02_a_nodeport_that_toggles_costs_no_status_write() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let writer = seen.writer();
    let found = seen.until_service(&name).await?;
    let desired = BTreeMap::from([(name.clone(), wanted(&found.uid, "192.168.203.110"))]);
    writer.set(desired.clone());
    let first = found.ports[0].node_port;
    let second = if first == 31222 { 31223 } else { 31222 };
    for step in 0..40 {
        let node_port = if step % 2 == 0 { second } else { first };
        let patch =
            json!({"spec": {"ports": [{"name": "p6443", "port": 6443, "protocol": "TCP", "nodePort": node_port}]}});
        cluster.client.patch("Service", &name.namespace, &name.name, &patch).await?;
        seen.until("the NodePort", |snapshot| snapshot.inventory.services[&name].ports[0].node_port == node_port)
            .await?;
        writer.set(desired.clone());
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(writer.writes(), 1);
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b42_a_forbidden_status_is_told_and_recovers() -> Result<()> {
    let Some(cluster) = with_faults("rights taken away and given back at a moment").await? else { return Ok(()) };
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let writer = seen.writer();
    let server = cluster.server()?;
    server.deny("patch services/status", true);
    let uid = seen.until_service(&name).await?.uid;
    writer.set(BTreeMap::from([(name.clone(), wanted(&uid, "192.168.203.110"))]));
    let mut notices = writer.notices();
    let told = tokio::time::timeout(LIMIT, notices.wait_for(|notices| !notices.is_empty())).await??.clone();
    assert_eq!(told[0].reason, "StatusForbidden");
    assert!(told[0].message.contains("services/status"), "{}", told[0].message);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(writer.writes() < 10, "a hot loop: {} writes", writer.writes());
    server.deny("patch services/status", false);
    until_ingress(&cluster, &name, &["192.168.203.110"]).await?;
    tokio::time::timeout(LIMIT, notices.wait_for(Vec::is_empty)).await??;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b06_a_release_removes_ours_and_nothing_else() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let writer = seen.writer();
    let uid = seen.until_service(&name).await?.uid;
    writer.set(BTreeMap::from([(name.clone(), wanted(&uid, "192.168.203.110"))]));
    until_ingress(&cluster, &name, &["192.168.203.110"]).await?;
    drop(writer);
    let condition = json!({"type": "example.com/Other", "status": "True", "reason": "R", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let object = cluster.client.get("Service", &name.namespace, &name.name).await?;
    let both = json!([object["status"]["conditions"][0], condition]);
    let patch = json!({"status": {"conditions": both}});
    cluster.client.patch_status("Service", &name.namespace, &name.name, "other", &patch).await?;
    let failed = lbd::source::status::release(seen.source.access(), &BTreeMap::from([(name.clone(), uid)])).await;
    assert_eq!(failed, []);
    let object = until_ingress(&cluster, &name, &[]).await?;
    let conditions = object["status"]["conditions"].as_array().context("conditions")?;
    assert_eq!(conditions.len(), 1);
    assert_eq!(conditions[0]["type"], "example.com/Other");
    cluster.finish().await
}

// ---- Events ----

#[tokio::test(flavor = "multi_thread")]
async fn b12_a_warning_event_names_the_service_by_uid_and_is_told_once() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "kube-apiserver");
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    let uid = seen.until_service(&name).await?.uid;
    let events = EventWriter::start(seen.source.access(), seen.snapshots.clone(), "edge-1");
    let notice = |reason: &'static str, message: &str| Notice {
        reason,
        service: Some(name.clone()),
        tenant: Some("tenant-a".into()),
        message: message.into(),
    };
    let exhausted = notice("PoolExhausted", "no free address in 192.168.203.110-192.168.203.119 (10)");
    for _ in 0..20 {
        events.set(vec![exhausted.clone(), exhausted.clone(), Notice { service: None, ..exhausted.clone() }]);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let ours = async || -> Result<Vec<Value>> {
        let all = cluster.client.list("Event", &cluster.namespace).await?;
        Ok(all.into_iter().filter(|event| event["involvedObject"]["uid"] == uid.as_str()).collect())
    };
    eventually("the Event", async || Ok(!ours().await?.is_empty())).await?;
    events.set(Vec::new());
    tokio::time::sleep(Duration::from_millis(50)).await;
    events.set(vec![exhausted.clone(), notice("AddressConflict", "192.168.203.110 is used by 02:00:00:00:00:01")]);
    eventually("the second Event", async || Ok(ours().await?.len() == 2)).await?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let told = ours().await?;
    assert_eq!(told.len(), 2);
    let first = told.iter().find(|event| event["reason"] == "PoolExhausted").context("PoolExhausted")?;
    assert_eq!((&first["type"], &first["count"]), (&json!("Warning"), &json!(1)));
    assert_eq!(first["message"], exhausted.message);
    assert_eq!(first["involvedObject"]["namespace"], name.namespace);
    if let Ok(server) = cluster.server() {
        assert_eq!(server.requests_of("patch", "/events/").len(), 2);
    }
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b42_an_event_in_a_namespace_that_goes_is_no_missing_right() -> Result<()> {
    let cluster = any().await?;
    let (name, mut object) = load_balancer(&cluster, "kube-apiserver");
    object["metadata"]["finalizers"] = json!(["example.com/hold"]);
    cluster.client.create(&object).await?;
    let mut seen = Seen::start(&cluster).await?;
    seen.until_service(&name).await?;
    cluster.client.delete("Namespace", "", &cluster.namespace).await?;
    let events = EventWriter::start(seen.source.access(), seen.snapshots.clone(), "edge-1");
    events.set(vec![Notice {
        reason: "PoolExhausted",
        service: Some(name.clone()),
        tenant: Some("tenant-a".into()),
        message: "no free address".into(),
    }]);
    if let Ok(server) = cluster.server() {
        let refused = || server.requests_of("patch", "/events/").iter().any(|entry| entry.status == 403);
        eventually("the Event is refused", async || Ok(refused())).await?;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(events.notice(), None);
    drop(events);
    cluster.client.patch("Service", &name.namespace, &name.name, &json!({"metadata": {"finalizers": null}})).await?;
    cluster.finish().await
}

// ---- the server, so far as the rest relies on it ----

#[tokio::test(flavor = "multi_thread")]
async fn server_node_ports_are_allocated_kept_and_refused_when_taken() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "a");
    let first = cluster.client.create(&object).await?;
    let port = first["spec"]["ports"][0]["nodePort"].as_u64().context("nodePort")?;
    assert!((30000..=32767).contains(&port));
    let clash = service(&cluster.namespace, "b", "NodePort", &[(80, port as u16)]);
    let error = cluster.client.create(&clash).await.unwrap_err();
    assert!(format!("{error:#}").contains("already allocated"), "{error:#}");
    // A change elsewhere keeps the number, even if the ports are sent without it.
    let patch = json!({"spec": {"ports": [{"name": "p6443", "port": 6443, "protocol": "TCP", "targetPort": 1}]}});
    let object = cluster.client.patch("Service", &name.namespace, "a", &patch).await?;
    assert_eq!(object["spec"]["ports"][0]["nodePort"], port);
    let object = cluster.client.patch("Service", &name.namespace, "a", &json!({"spec": {"type": "ClusterIP"}})).await?;
    assert!(object["spec"]["ports"][0]["nodePort"].is_null());
    cluster.client.create(&clash).await?;
    let bad = service(&cluster.namespace, "c", "NodePort", &[(80, 80)]);
    assert!(cluster.client.create(&bad).await.is_err());
    // A number is one Service's, whatever the protocol; a port of two protocols has one.
    let mut other = service(&cluster.namespace, "d", "NodePort", &[(80, port as u16)]);
    other["spec"]["ports"][0]["protocol"] = json!("UDP");
    let error = cluster.client.create(&other).await.unwrap_err();
    assert!(format!("{error:#}").contains("already allocated"), "{error:#}");
    let mut both = service(&cluster.namespace, "e", "LoadBalancer", &[(53, 0), (53, 0)]);
    both["spec"]["ports"][1]["name"] = json!("udp");
    both["spec"]["ports"][1]["protocol"] = json!("UDP");
    let made = cluster.client.create(&both).await?;
    let ports = &made["spec"]["ports"];
    assert!(ports[0]["nodePort"].is_u64() && ports[0]["nodePort"] == ports[1]["nodePort"], "{ports}");
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn server_status_and_spec_change_only_through_their_own_paths() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "a");
    cluster.client.create(&object).await?;
    let both = json!({"metadata": {"annotations": {"example.com/a": "b"}}, "spec": {"sessionAffinity": "ClientIP"},
        "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}});
    let object = cluster.client.patch("Service", &name.namespace, "a", &both).await?;
    assert_eq!(object["spec"]["sessionAffinity"], "ClientIP");
    assert!(ingress(&object).is_empty());
    let both =
        json!({"spec": {"sessionAffinity": "None"}, "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}});
    let object = cluster.client.patch_status("Service", &name.namespace, "a", "m", &both).await?;
    assert_eq!(object["spec"]["sessionAffinity"], "ClientIP");
    assert_eq!(ingress(&object), ["192.0.2.1"]);
    let bad = json!({"status": {"loadBalancer": {"ingress": [{"ip": "300.0.2.1"}]}}});
    assert!(cluster.client.patch_status("Service", &name.namespace, "a", "m", &bad).await.is_err());
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn server_preconditions_and_finalizers() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "a");
    let created = cluster.client.create(&object).await?;
    let version = created["metadata"]["resourceVersion"].clone();
    let patch =
        json!({"metadata": {"resourceVersion": version, "labels": {"a": "b"}, "finalizers": ["example.com/hold"]}});
    let object = cluster.client.patch("Service", &name.namespace, "a", &patch).await?;
    assert_ne!(object["metadata"]["resourceVersion"], version);
    let error = cluster.client.patch("Service", &name.namespace, "a", &patch).await.unwrap_err();
    assert!(format!("{error:#}").contains("object has been modified"), "{error:#}");
    cluster.client.delete("Service", &name.namespace, "a").await?;
    let object = cluster.client.get("Service", &name.namespace, "a").await?;
    assert!(object["metadata"]["deletionTimestamp"].is_string());
    let patch = json!({"metadata": {"finalizers": null}});
    cluster.client.patch("Service", &name.namespace, "a", &patch).await?;
    assert!(cluster.client.get("Service", &name.namespace, "a").await.is_err());
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn server_apply_names_conflicts_and_repeats_cost_no_version() -> Result<()> {
    let cluster = any().await?;
    let (name, object) = load_balancer(&cluster, "a");
    cluster.client.create(&object).await?;
    let path =
        |manager: &str| format!("/api/v1/namespaces/{}/services/a/status?fieldManager={manager}", name.namespace);
    let config = |ip: &str| {
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "namespace": name.namespace},
        "status": {"loadBalancer": {"ingress": [{"ip": ip}]}}})
    };
    let apply = async |manager: &str, ip: &str| {
        cluster.client.request("PATCH", &path(manager), "application/apply-patch+yaml", Some(&config(ip))).await
    };
    let first = apply("one", "192.0.2.1").await?;
    let again = apply("one", "192.0.2.1").await?;
    assert_eq!(first["metadata"]["resourceVersion"], again["metadata"]["resourceVersion"]);
    let Err(kube::Error::Api(status)) = apply("two", "192.0.2.2").await else { bail!("no conflict") };
    assert_eq!(status.code, 409);
    let causes = status.details.context("details")?.causes;
    assert_eq!(causes[0].reason, "FieldManagerConflict");
    assert!(causes[0].message.contains("\"one\""), "{}", causes[0].message);
    assert_eq!(causes[0].field, ".status.loadBalancer.ingress");
    cluster.finish().await
}
