//! A cluster for tests: the test server, or the real one that `LBD_TEST_KUBECONFIG` names. The same way on both: an
//! administrator makes namespaces, objects, and what `lbd rbac` prints; the agent uses the account that comes of it.

use std::collections::BTreeSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kube::config::Kubeconfig;
use lbd::config::{Claim, Config, Tenant};
use lbd::source::kubernetes::rights::{self, RIGHTS, Reach};
use serde_json::{Value, json};

use super::store::KINDS;
use super::{Client, Handle, Options};

/// Names the kubeconfig of a real cluster to test against.
pub const KUBECONFIG: &str = "LBD_TEST_KUBECONFIG";

/// The account and its namespace, as `lbd rbac` has them.
const OWN: &str = "lbd-system";
const ACCOUNT: &str = "lbd";
/// The label of everything that tests make beside objects in their own namespaces.
const MARK: &str = "lbd.tenantedge.io/test";
/// What names of namespaces and nodes of tests begin with.
const PREFIX: &str = "lbd-test-";
/// How long a real cluster may take to follow.
const PATIENCE: Duration = Duration::from_mins(1);
/// How long the test server may.
const PATIENCE_TEST: Duration = Duration::from_secs(10);
/// The administrator of the test server.
const TOKEN: &str = "administrator-of-the-test-server";

/// A cluster with a namespace of one's own in it. Dropping it removes what the test made.
#[derive(Debug)]
pub struct Cluster {
    /// The test server; `None` if the cluster is real.
    pub server: Option<Handle>,
    /// The administrator.
    pub client: Client,
    /// A namespace that nobody else uses.
    pub namespace: String,
    /// The administrator's kubeconfig.
    administrator: PathBuf,
    /// The agent's.
    kubeconfig: PathBuf,
    clean: bool,
    _directory: tempfile::TempDir,
    /// Tests take turns at a real cluster: the names that `lbd rbac` gives are the same for all.
    _turn: Option<File>,
}

impl Cluster {
    /// The real cluster if one is named, otherwise a test server that is as strict.
    pub async fn any() -> Result<Self> {
        match std::env::var_os(KUBECONFIG) {
            Some(path) => Self::real(Path::new(&path)).await,
            None => Self::strict().await,
        }
    }

    /// A test server, for a test of what a real cluster cannot be made to do; `None` if a real one is to be tested.
    pub async fn with_faults(what: &str) -> Result<Option<Self>> {
        if skipped(what) {
            return Ok(None);
        }
        Self::strict().await.map(Some)
    }

    /// A test server without accounts: what a test gets is the administrator's access. `None` if a real one is to be tested.
    pub async fn plain(options: Options, what: &str) -> Result<Option<Self>> {
        if skipped(what) {
            return Ok(None);
        }
        let mut cluster = Self::test(options).await?;
        cluster.kubeconfig.clone_from(&cluster.administrator);
        Ok(Some(cluster))
    }

    async fn strict() -> Result<Self> {
        Self::test(Options { tls: true, token: Some(TOKEN.into()), dual_stack: true, ..Options::default() }).await
    }

    async fn test(options: Options) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let server = super::start(options).await?;
        let kubeconfig = directory.path().join("kubeconfig");
        server.write_kubeconfig(&kubeconfig)?;
        let client = server.client()?;
        Self::with(Some(server), client, kubeconfig, directory, None).await
    }

    async fn real(path: &Path) -> Result<Self> {
        let turn = turn(path).await?;
        let client = Client::from_file(path)?;
        // What an earlier run could not remove, because it was killed.
        sweep(&client, PREFIX).await.context("remove what an earlier run left")?;
        Self::with(None, client, path.to_owned(), tempfile::tempdir()?, Some(turn)).await
    }

    async fn with(
        server: Option<Handle>,
        client: Client,
        administrator: PathBuf,
        directory: tempfile::TempDir,
        turn: Option<File>,
    ) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let second = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        // Names are not used twice: without controllers a namespace may never go.
        let namespace = format!("{PREFIX}{second:x}-{}-{number}", std::process::id());
        let kubeconfig = directory.path().join("agent.kubeconfig");
        let cluster = Self {
            server,
            client,
            namespace,
            administrator,
            kubeconfig,
            clean: false,
            _directory: directory,
            _turn: turn,
        };
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": cluster.namespace}});
        cluster.client.create(&object).await?;
        Ok(cluster)
    }

    /// Whether it is a real one.
    pub fn is_real(&self) -> bool {
        self.server.is_none()
    }

    /// The agent's kubeconfig file: the account's, or of a plain test server the administrator's.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Whether the agent has to be told that the way to the server is not safe.
    pub fn allow_insecure(&self) -> Result<bool> {
        if self.is_real() { insecure(&self.administrator) } else { Ok(false) }
    }

    /// The cluster's part of a configuration file: `kubeconfig: …` and what goes with it.
    pub fn settings(&self) -> Result<String> {
        let insecure = if self.allow_insecure()? { ", allow_insecure: true" } else { "" };
        Ok(format!("kubeconfig: {}{insecure}", self.kubeconfig.display()))
    }

    /// The test server.
    pub fn server(&self) -> Result<&Handle> {
        self.server.as_ref().context("this needs the test server")
    }

    /// The test server, to stop and start it.
    pub fn server_mut(&mut self) -> Result<&mut Handle> {
        self.server.as_mut().context("this needs the test server")
    }

    /// A limit for what takes this long on the test server.
    pub fn limit(&self, time: Duration) -> Duration {
        if self.is_real() { time * 20 } else { time }
    }

    /// Makes the account with exactly the rights that `lbd rbac` prints for a configuration, and waits until they are in
    /// force. From then on, the agent's kubeconfig is the account's.
    pub async fn grant(&self, configuration: &str) -> Result<()> {
        let config = lbd::config::parse(configuration, "lbd.yaml").map_err(|error| anyhow::anyhow!(error.report()))?;
        self.grant_for(&config).await
    }

    /// As [`Self::grant`], for a configuration that has been read.
    pub async fn grant_for(&self, config: &Config) -> Result<()> {
        for place in rights::places(config, Reach::Services).unwrap_or_default() {
            self.make_namespace(place).await?;
        }
        for document in rights::manifests(config).split("---\n") {
            let object: Value = serde_saphyr::from_str(document).context("a manifest of `lbd rbac`")?;
            if object["kind"] == "Namespace" {
                let name = object["metadata"]["name"].as_str().unwrap_or_default();
                self.make_namespace(name).await?;
            } else {
                self.apply(object).await?;
            }
        }
        let token = self.client.token(OWN, ACCOUNT).await?;
        write_secret(&self.kubeconfig, &self.account_kubeconfig(&token)?)?;
        self.until_in_force(config).await?;
        if let Some(server) = &self.server {
            server.clear_requests();
        }
        Ok(())
    }

    /// A client with the account's rights.
    pub fn account(&self) -> Result<Client> {
        Client::from_file(&self.kubeconfig)
    }

    /// The text of a kubeconfig with the administrator's way to the server, and a token.
    fn account_kubeconfig(&self, token: &str) -> Result<String> {
        let read = Kubeconfig::read_from(&self.administrator).context("read the administrator's kubeconfig")?;
        let current = read.current_context.clone().or_else(|| Some(read.contexts.first()?.name.clone()));
        let context = read.contexts.iter().find(|context| Some(&context.name) == current.as_ref());
        let wanted = context.and_then(|context| context.context.as_ref()).map(|context| context.cluster.clone());
        let cluster = read.clusters.iter().find(|cluster| Some(&cluster.name) == wanted.as_ref());
        let mut cluster = serde_json::to_value(cluster.and_then(|cluster| cluster.cluster.as_ref()))?;
        ensure!(cluster.is_object(), "{}: the current context has no cluster", self.administrator.display());
        if let Some(map) = cluster.as_object_mut() {
            map.remove("proxy-url");
            map.retain(|_, value| !value.is_null());
        }
        let text = json!({"apiVersion": "v1", "kind": "Config", "current-context": "account",
            "clusters": [{"name": "cluster", "cluster": cluster}],
            "users": [{"name": "account", "user": {"token": token}}],
            "contexts": [{"name": "account", "context": {"cluster": "cluster", "user": "account"}}]});
        Ok(text.to_string())
    }

    /// Makes a namespace, if there is none; waits for one of the name that is on its way out.
    async fn make_namespace(&self, name: &str) -> Result<()> {
        let begun = Instant::now();
        loop {
            match self.client.get("Namespace", "", name).await {
                Ok(found) if found["metadata"]["deletionTimestamp"].is_null() => return Ok(()),
                Ok(_) => {
                    let hint = "delete what is in it, and let it go";
                    ensure!(begun.elapsed() < PATIENCE, "namespace {name} is being deleted and stays: {hint}");
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                Err(_) => {
                    let object = json!({"apiVersion": "v1", "kind": "Namespace",
                        "metadata": {"name": name, "labels": {MARK: "made"}}});
                    return self.client.create(&object).await.map(drop);
                }
            }
        }
    }

    /// Makes an object, or brings one that a test made up to date.
    async fn apply(&self, mut object: Value) -> Result<()> {
        object["metadata"]["labels"][MARK] = json!("made");
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (kind, namespace, name) = (text("/kind"), text("/metadata/namespace"), text("/metadata/name"));
        let Ok(found) = self.client.get(&kind, &namespace, &name).await else {
            return self.client.create(&object).await.map(drop);
        };
        ensure!(
            found["metadata"]["labels"][MARK] == "made",
            "the cluster has a {kind} {name} that is not of a test: an lbd is installed there, and tests would break it"
        );
        if kind == "ServiceAccount" {
            return Ok(());
        }
        object["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"].clone();
        self.client.replace(&kind, &namespace, &name, &object).await.map(drop)
    }

    /// Waits until the account may do what it is to do, and the policy for it works.
    async fn until_in_force(&self, config: &Config) -> Result<()> {
        let account = self.account()?;
        let patience = if self.is_real() { PATIENCE } else { PATIENCE_TEST };
        let own = lbd::source::kubernetes::own_object(&config.hub.name);
        let mut wanted = Vec::new();
        for right in RIGHTS {
            let places = rights::places(config, right.reach).map_or_else(|| vec![""], |all| all.into_iter().collect());
            for place in places {
                let name = if right.reach == Reach::Own && right.verb != "create" { own.as_str() } else { "" };
                wanted.push((right, place.to_owned(), name.to_owned()));
            }
        }
        let begun = Instant::now();
        let mut last;
        while !wanted.is_empty() {
            let (right, place, name) = &wanted[wanted.len() - 1];
            match account.may(right.verb, right.group, right.resource, place, name).await {
                Ok(true) => {
                    wanted.pop();
                    continue;
                }
                Ok(false) => last = format!("the account may not {} {} in {place:?}", right.verb, right.resource),
                // An account that was made just now may not be known everywhere.
                Err(error) => last = format!("{error:#}"),
            }
            ensure!(begun.elapsed() < patience, "what `lbd rbac` prints is not in force: {last}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let Some(probe) = Probe::of(config, &self.namespace) else { return Ok(()) };
        self.client.create(&probe.object).await?;
        let result = loop {
            match probe.works(&account).await {
                Ok(true) => break Ok(()),
                Ok(false) => last = "the policy lets everything pass".into(),
                Err(error) => last = format!("{error:#}"),
            }
            if begun.elapsed() > patience {
                break Err(anyhow::anyhow!("the ValidatingAdmissionPolicy is not in force: {last}"));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        self.client.delete("Service", &probe.namespace, Probe::NAME).await?;
        result
    }

    /// Removes what the test made, and says if something of it stays.
    pub async fn finish(mut self) -> Result<()> {
        sweep(&self.client, &self.namespace).await?;
        self.clean = true;
        let left = left(&self.client, &self.namespace).await?;
        ensure!(left.is_empty(), "left in the cluster: {left:?}");
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.clean || !self.is_real() {
            return;
        }
        // A test that failed, or forgot. Its runtime may be at its end: this has one of its own.
        let (path, namespace) = (self.administrator.clone(), self.namespace.clone());
        let cleaned = std::thread::spawn(move || -> Result<()> {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let client = Client::from_file(&path)?;
                tokio::time::timeout(PATIENCE, sweep(&client, &namespace)).await.context("too slow")?
            })
        });
        if let Ok(Err(error)) = cleaned.join() {
            eprintln!("not everything of {} was removed: {error:#}", self.namespace);
        }
    }
}

/// Says that a test is left out, if a real cluster is to be tested.
fn skipped(what: &str) -> bool {
    let real = std::env::var_os(KUBECONFIG).is_some();
    if real {
        // Past the test harness, which shows what is printed only of tests that fail.
        let name = std::thread::current().name().unwrap_or("a test").to_owned();
        let _ = writeln!(std::io::stderr(), "{name}: skipped: a real cluster cannot be made to do this: {what}");
    }
    real
}

/// Waits for one's turn at a real cluster, also among test programs.
async fn turn(kubeconfig: &Path) -> Result<File> {
    let mut hasher = DefaultHasher::new();
    kubeconfig.canonicalize().with_context(|| format!("{KUBECONFIG}={}", kubeconfig.display()))?.hash(&mut hasher);
    let path = std::env::temp_dir().join(format!("lbd-test-cluster-{:016x}.lock", hasher.finish()));
    let file =
        File::options().create(true).append(true).open(&path).with_context(|| format!("open {}", path.display()))?;
    tokio::task::spawn_blocking(move || file.lock().map(|()| file)).await?.context("wait for a turn")
}

fn insecure(kubeconfig: &Path) -> Result<bool> {
    let read = Kubeconfig::read_from(kubeconfig).context("read the kubeconfig")?;
    Ok(read.clusters.iter().filter_map(|named| named.cluster.as_ref()).any(|cluster| {
        cluster.insecure_skip_tls_verify == Some(true)
            || cluster.server.as_deref().is_some_and(|server| server.starts_with("http:"))
    }))
}

fn write_secret(path: &Path, text: &str) -> Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let temporary = path.with_extension("new");
    let _ = std::fs::remove_file(&temporary);
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(text.as_bytes())?;
    std::fs::rename(&temporary, path).with_context(|| format!("write {}", path.display()))
}

/// A Service that the agent leaves alone, to see whether the policy works: dry runs only.
struct Probe {
    namespace: String,
    object: Value,
    good: String,
    bad: &'static str,
}

impl Probe {
    const NAME: &str = "probe-of-the-policy";

    fn of(config: &Config, own: &str) -> Option<Self> {
        let claims = config.tenants.iter().flat_map(|tenant| tenant.claims.iter().map(move |claim| (tenant, claim)));
        // A namespace by labels would have to be made first.
        let mut claims = claims.filter(|(tenant, claim)| !tenant.pools.is_empty() && claim.namespace_labels.is_empty());
        let (tenant, claim): (&Tenant, &Claim) = claims.next()?;
        let namespace = claim.namespaces.first().map_or(own, String::as_str).to_owned();
        let mut object = super::service(&namespace, Self::NAME, "LoadBalancer", &[(443, 0)]);
        object["spec"]["loadBalancerClass"] = json!("lbd.tenantedge.io/probe-of-the-policy");
        object["spec"]["allocateLoadBalancerNodePorts"] = json!(false);
        object["metadata"]["labels"] = json!(claim.service_labels);
        let outside = ["203.0.113.250", "198.51.100.250"]
            .into_iter()
            .find(|text| text.parse().is_ok_and(|address| !tenant.pools.iter().any(|pool| pool.contains(address))))?;
        Some(Self { namespace, object, good: tenant.pools[0].first.to_string(), bad: outside })
    }

    /// Whether the policy denies an address that is in no pool, and nothing else.
    async fn works(&self, account: &Client) -> Result<bool> {
        let path = format!(
            "/api/v1/namespaces/{}/services/{}/status?dryRun=All&fieldManager=lbd-test",
            self.namespace,
            Self::NAME
        );
        let patch = |address: &str| json!({"status": {"loadBalancer": {"ingress": [{"ip": address}]}}});
        let content = "application/merge-patch+json";
        // First this: a policy that is still an older one does not know the namespace.
        account.request("PATCH", &path, content, Some(&patch(&self.good))).await.context("an address of the pool")?;
        match account.request("PATCH", &path, content, Some(&patch(self.bad))).await {
            Ok(_) => Ok(false),
            Err(kube::Error::Api(status)) if status.message.contains("ValidatingAdmissionPolicy") => Ok(true),
            Err(error) => Err(error).context("an address outside of the pool"),
        }
    }
}

/// Whether a name is the one that is meant, or begins with it.
fn belongs(name: &str, prefix: &str) -> bool {
    prefix == PREFIX && name.starts_with(PREFIX)
        || name == prefix
        || name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('-'))
}

fn name_of(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

fn namespace_of(object: &Value) -> &str {
    object["metadata"]["namespace"].as_str().unwrap_or_default()
}

/// Kinds that tests make beside what is in their own namespaces.
const MARKED: [&str; 7] = [
    "ValidatingAdmissionPolicyBinding",
    "ValidatingAdmissionPolicy",
    "ClusterRoleBinding",
    "RoleBinding",
    "ClusterRole",
    "Role",
    "ServiceAccount",
];

/// What tests made outside of their own namespaces, and nodes.
async fn outside(client: &Client, prefix: &str) -> Result<Vec<(&'static str, Value)>> {
    let mut found = Vec::new();
    for kind in MARKED {
        found.extend(client.list_labelled(kind, MARK).await?.into_iter().map(|object| (kind, object)));
    }
    for kind in ["ConfigMap", "Lease"] {
        let all = client.list(kind, OWN).await.unwrap_or_default();
        let ours = |object: &Value| name_of(object).strip_prefix("lbd-").is_some_and(|name| belongs(name, prefix));
        found.extend(all.into_iter().filter(ours).map(|object| (kind, object)));
    }
    let nodes = client.list("Node", "").await?;
    found.extend(nodes.into_iter().filter(|node| belongs(name_of(node), prefix)).map(|object| ("Node", object)));
    Ok(found)
}

/// Namespaces of tests: by name, and those that were made because a manifest needs them.
async fn namespaces(client: &Client, prefix: &str) -> Result<Vec<Value>> {
    let all = client.list("Namespace", "").await?;
    let ours = |object: &Value| belongs(name_of(object), prefix) || object["metadata"]["labels"].get(MARK).is_some();
    Ok(all.into_iter().filter(ours).collect())
}

/// Removes everything whose name begins with a prefix, and all that is marked as of tests.
async fn sweep(client: &Client, prefix: &str) -> Result<()> {
    for (kind, object) in outside(client, prefix).await? {
        remove(client, kind, &object).await?;
    }
    let mut going = BTreeSet::new();
    for namespace in namespaces(client, prefix).await? {
        let name = name_of(&namespace);
        // A controller that makes this also removes what is in a namespace, and the namespace.
        let controlled = client.get("ServiceAccount", name, "default").await.is_ok();
        for kind in KINDS.iter().filter(|kind| kind.namespaced) {
            for object in client.list(kind.name, name).await? {
                if !(controlled && matches!(name_of(&object), "default" | "kube-root-ca.crt")) {
                    remove(client, kind.name, &object).await?;
                }
            }
        }
        delete(client, "Namespace", "", name).await?;
        if controlled {
            going.insert(name.to_owned());
            continue;
        }
        if let Ok(current) = client.get("Namespace", "", name).await {
            // Somebody else may have been faster.
            let _ = client.finalize(&current).await;
        }
    }
    // The namespace of the account has the same name in the next test.
    let begun = Instant::now();
    while going.contains(OWN) && client.get("Namespace", "", OWN).await.is_ok() {
        if begun.elapsed() > PATIENCE {
            bail!("namespace {OWN} does not go");
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

/// What a sweep has left.
async fn left(client: &Client, prefix: &str) -> Result<Vec<String>> {
    let mut left: Vec<_> = outside(client, prefix)
        .await?
        .iter()
        .map(|(kind, object)| format!("{kind} {}/{}", namespace_of(object), name_of(object)))
        .collect();
    for namespace in namespaces(client, prefix).await? {
        // With controllers it goes a little later.
        if namespace["metadata"]["deletionTimestamp"].is_null() {
            left.push(format!("Namespace {}", name_of(&namespace)));
        }
    }
    Ok(left)
}

async fn remove(client: &Client, kind: &str, object: &Value) -> Result<()> {
    let (namespace, name) = (namespace_of(object), name_of(object));
    if object["metadata"]["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty()) {
        let _ = client.patch(kind, namespace, name, &json!({"metadata": {"finalizers": null}})).await;
    }
    delete(client, kind, namespace, name).await
}

async fn delete(client: &Client, kind: &str, namespace: &str, name: &str) -> Result<()> {
    let Err(error) = client.delete(kind, namespace, name).await else { return Ok(()) };
    match error.downcast_ref::<kube::Error>() {
        Some(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        _ => Err(error),
    }
}
