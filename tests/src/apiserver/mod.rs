//! A small Kubernetes API server for tests: real HTTP, real state.
//!
//! It keeps Services, Nodes, Namespaces, EndpointSlices, ConfigMaps, Leases, Events and Secrets in memory; lists them in
//! pages, watches with versions and bookmarks, patches in all ways with field ownership, allocates NodePorts. It is as
//! strict as a real server without controllers: objects are validated, accounts get tokens, roles and bindings decide
//! what an account may do, validating admission policies are evaluated, a deleted namespace waits for somebody to
//! finalize it. Faults can be ordered. What it does not do: garbage collection, conversion, webhooks.

mod access;
mod admission;
mod client;
mod cluster;
mod fields;
mod http;
mod patch;
mod store;
mod tls;
mod validate;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{broadcast, watch};
use tokio::task::JoinSet;

use access::{Attributes, User};
pub use client::{Client, node, service};
pub use cluster::{Cluster, KUBECONFIG};
use store::{Caller, KINDS, Store, Target};
use tls::Identity;

/// How to start.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Serve HTTPS with a certificate of an authority of its own.
    pub tls: bool,
    /// The bearer token of the administrator. Without one, who shows no token is the administrator.
    pub token: Option<String>,
    /// Whether Services can have both families.
    pub dual_stack: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { listen: ([127, 0, 0, 1], 0).into(), tls: false, token: None, dual_stack: false }
    }
}

/// A request that was made.
#[derive(Clone, Debug)]
pub struct Entry {
    /// When it had been read.
    pub at: Instant,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, or `other`.
    pub verb: &'static str,
    /// Path.
    pub path: String,
    /// Query, undecoded.
    pub query: String,
    /// Content type.
    pub content_type: String,
    /// Body, if it is JSON.
    pub body: Option<Value>,
    /// Code of the answer; 0 until there is one.
    pub status: u16,
}

/// What happens to a request instead of, or before, what it asks for.
#[derive(Clone, Debug)]
pub enum Action {
    /// This answer.
    Status {
        /// HTTP code.
        code: u16,
        /// Reason.
        reason: String,
        /// Message.
        message: String,
        /// Seconds to wait, as told to the client.
        retry_after: Option<u32>,
    },
    /// Later.
    Delay(Duration),
    /// Never.
    Hang,
    /// The connection is closed.
    Close,
    /// Half an object.
    Garbage,
}

impl Action {
    /// An answer with a code and a reason.
    pub fn status(code: u16, reason: &str) -> Self {
        Self::Status { code, reason: reason.into(), message: format!("injected {code}"), retry_after: None }
    }
}

/// A fault that waits for requests.
#[derive(Clone, Debug)]
struct Fault {
    verb: String,
    path: String,
    left: u32,
    action: Action,
}

/// Settings that running watches follow.
#[derive(Clone, Debug)]
struct Control {
    stalled: bool,
    epoch: u64,
    bookmark_interval: Duration,
    gone_by_http: bool,
}

#[derive(Debug)]
struct Shared {
    store: Mutex<Store>,
    versions: watch::Sender<u64>,
    control: watch::Sender<Control>,
    injected: broadcast::Sender<(Option<usize>, String)>,
    log: Mutex<Vec<Entry>>,
    faults: Mutex<Vec<Fault>>,
    token: Mutex<Option<String>>,
    denied: Mutex<BTreeSet<String>>,
    /// Tokens of accounts, each with namespace, name and UID.
    accounts: Mutex<BTreeMap<String, [String; 3]>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn store(&self) -> MutexGuard<'_, Store> {
        lock(&self.store)
    }

    fn changed(&self) {
        let version = self.store().version;
        self.versions.send_if_modified(|current| std::mem::replace(current, version) != version);
    }

    fn control(&self) -> Control {
        self.control.borrow().clone()
    }

    fn token(&self) -> Option<String> {
        lock(&self.token).clone()
    }

    /// Whose token it is.
    fn user(&self, bearer: Option<&str>) -> Option<User> {
        let administrator = self.token();
        match (bearer, administrator) {
            (None, None) => Some(User::administrator()),
            (Some(bearer), Some(token)) if bearer == token => Some(User::administrator()),
            (Some(bearer), _) => {
                let [namespace, name, uid] = lock(&self.accounts).get(bearer)?.clone();
                let kind = KINDS.iter().position(|kind| kind.name == "ServiceAccount")?;
                let store = self.store();
                let account = store.object(kind, &(namespace.clone(), name.clone()))?;
                (account["metadata"]["uid"] == uid.as_str()).then(|| User::account(&namespace, &name))
            }
            (None, Some(_)) => None,
        }
    }

    /// A token of an account.
    fn issue(&self, namespace: &str, name: &str, uid: &str) -> String {
        let token = format!("lbd-test.{}.{}", store::uid(), store::uid());
        lock(&self.accounts).insert(token.clone(), [namespace, name, uid].map(str::to_owned));
        token
    }

    /// Whether a user may do something: as roles say, less what was taken away by order.
    fn allows(&self, user: &User, wanted: &Attributes<'_>) -> bool {
        self.allows_in(&self.store(), user, wanted)
    }

    fn allows_in(&self, store: &Store, user: &User, wanted: &Attributes<'_>) -> bool {
        // With a token of his own, the administrator is not whom a test takes rights away from.
        let spared = user.is_administrator() && self.token().is_some();
        let denied = lock(&self.denied).contains(&format!("{} {}", wanted.verb, wanted.full()));
        (!denied || spared) && access::authorize(store, user, wanted)
    }

    fn log(&self, entry: Entry) -> usize {
        let mut log = lock(&self.log);
        log.push(entry);
        log.len() - 1
    }

    fn log_status(&self, index: usize, status: u16) {
        if let Some(entry) = lock(&self.log).get_mut(index) {
            entry.status = status;
        }
    }

    fn faults(&self, verb: &str, path: &str) -> Vec<Action> {
        let mut faults = lock(&self.faults);
        let mut actions = Vec::new();
        for fault in faults.iter_mut() {
            if (fault.verb.is_empty() || fault.verb == verb) && path.contains(&fault.path) && fault.left > 0 {
                fault.left -= 1;
                actions.push(fault.action.clone());
            }
        }
        faults.retain(|fault| fault.left > 0);
        actions
    }
}

/// All objects and versions of a server at a moment.
#[derive(Clone, Debug)]
pub struct Backup(Store);

/// A running server. Dropping it stops it.
#[derive(Debug)]
pub struct Handle {
    shared: Arc<Shared>,
    address: SocketAddr,
    identity: Option<Arc<Identity>>,
    running: Option<tokio::task::JoinHandle<()>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.go_away();
    }
}

/// Starts a server on the current runtime.
pub async fn start(options: Options) -> Result<Handle> {
    let listener = TcpListener::bind(options.listen).await.with_context(|| format!("listen on {}", options.listen))?;
    let address = listener.local_addr()?;
    let identity = if options.tls { Some(Arc::new(Identity::new(address.ip())?)) } else { None };
    let mut store = Store::new();
    store.dual_stack = options.dual_stack;
    let shared = Arc::new(Shared {
        versions: watch::Sender::new(store.version),
        store: Mutex::new(store),
        control: watch::Sender::new(Control {
            stalled: false,
            epoch: 0,
            bookmark_interval: Duration::from_secs(10),
            gone_by_http: false,
        }),
        injected: broadcast::Sender::new(64),
        log: Mutex::default(),
        faults: Mutex::default(),
        token: Mutex::new(options.token),
        denied: Mutex::default(),
        accounts: Mutex::default(),
    });
    let mut handle = Handle { shared, address, identity, running: None };
    handle.accept(listener);
    Ok(handle)
}

async fn accept(shared: Arc<Shared>, identity: Option<Arc<Identity>>, listener: TcpListener) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Ok((stream, _)) = listener.accept() => {
                let (shared, identity) = (Arc::clone(&shared), identity.clone());
                connections.spawn(async move {
                    // A small answer must not wait for the client's acknowledgement of the last one.
                    let _ = stream.set_nodelay(true);
                    match identity {
                        None => connection(shared, TokioIo::new(stream)).await,
                        Some(identity) => {
                            if let Ok(stream) = identity.accept(stream).await {
                                connection(shared, TokioIo::new(stream)).await;
                            }
                        }
                    }
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection<T>(shared: Arc<Shared>, stream: T)
where
    T: hyper::rt::Read + hyper::rt::Write + Unpin,
{
    let service = service_fn(move |request| {
        let shared = Arc::clone(&shared);
        async move { http::serve(shared, request).await.ok_or_else(|| std::io::Error::other("closed by order")) }
    });
    let _ = hyper::server::conn::http1::Builder::new().timer(TokioTimer::new()).serve_connection(stream, service).await;
}

impl Handle {
    fn accept(&mut self, listener: TcpListener) {
        self.running = Some(tokio::spawn(accept(Arc::clone(&self.shared), self.identity.clone(), listener)));
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its URL.
    pub fn url(&self) -> String {
        let scheme = if self.identity.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// Text of a kubeconfig for it, with the authority's certificate and the token.
    pub fn kubeconfig(&self) -> String {
        let authority = self.identity.as_ref().map_or_else(String::new, |identity| {
            format!("    certificate-authority-data: {}\n", tls::base64(identity.authority().as_bytes()))
        });
        let user = self.shared.token().map_or_else(|| "    {}\n".to_owned(), |token| format!("    token: {token}\n"));
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\nclusters:\n- name: test\n  cluster:\n    server: {}\n{authority}\
             contexts:\n- name: test\n  context: {{cluster: test, user: test}}\nusers:\n- name: test\n  user:\n{user}",
            self.url()
        )
    }

    /// Writes the kubeconfig into a file that only its owner can read.
    pub fn write_kubeconfig(&self, path: &Path) -> Result<()> {
        use std::io::Write;
        use std::os::unix::fs::OpenOptionsExt;
        let temporary = path.with_extension("new");
        let _ = std::fs::remove_file(&temporary);
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)
            .with_context(|| format!("create {}", temporary.display()))?;
        file.write_all(self.kubeconfig().as_bytes())?;
        std::fs::rename(&temporary, path).with_context(|| format!("write {}", path.display()))
    }

    /// A client of it.
    pub fn client(&self) -> Result<Client> {
        Client::from_kubeconfig(&self.kubeconfig())
    }

    /// Creates an object without a request; its namespace too, if that is missing.
    pub fn create(&self, object: &Value) -> Result<Value> {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let kind = KINDS.iter().position(|kind| kind.name == text("/kind")).context("unknown kind")?;
        let target =
            Target { kind, namespace: text("/metadata/namespace"), name: text("/metadata/name"), status: false };
        let mut store = self.shared.store();
        if KINDS[kind].namespaced {
            store.ensure_namespace(&target.namespace).map_err(|error| anyhow::anyhow!(error.message))?;
        }
        let created = store
            .create(&target, object.clone(), &Caller::server("test"))
            .map_err(|error| anyhow::anyhow!(error.message))?;
        drop(store);
        self.shared.changed();
        Ok((*created).clone())
    }

    /// Requests so far.
    pub fn requests(&self) -> Vec<Entry> {
        lock(&self.shared.log).clone()
    }

    /// Requests of a verb whose path contains a text.
    pub fn requests_of(&self, verb: &str, path: &str) -> Vec<Entry> {
        let log = lock(&self.shared.log);
        log.iter().filter(|entry| entry.verb == verb && entry.path.contains(path)).cloned().collect()
    }

    /// Forgets the requests so far.
    pub fn clear_requests(&self) {
        lock(&self.shared.log).clear();
    }

    /// Does `action` to the next `times` requests of a verb (empty = any) whose path and query contain a text.
    pub fn fault(&self, verb: &str, path: &str, times: u32, action: Action) {
        let fault = Fault { verb: verb.into(), path: path.into(), left: times, action };
        lock(&self.shared.faults).push(fault);
    }

    /// Forgets all faults.
    pub fn clear_faults(&self) {
        lock(&self.shared.faults).clear();
    }

    /// Forgets old versions: a watch or page from before now is answered by 410, by the code of the answer if
    /// `by_http`, otherwise by an ERROR event.
    pub fn compact(&self, by_http: bool) {
        self.shared.control.send_modify(|control| control.gone_by_http = by_http);
        let mut store = self.shared.store();
        store.version += 1;
        store.compacted = store.version;
    }

    /// Everything that there is, as a backup has it.
    pub fn backup(&self) -> Backup {
        Backup(self.shared.store().clone())
    }

    /// Loses an object, without telling any watch.
    pub fn forget(&self, kind: &str, namespace: &str, name: &str) -> Result<()> {
        let kind = KINDS.iter().position(|known| known.name == kind).context("unknown kind")?;
        self.shared.store().forget(kind, namespace, name);
        Ok(())
    }

    /// Goes back to a backup, in versions too. Running watches end.
    pub fn restore(&self, backup: &Backup) {
        *self.shared.store() = backup.0.clone();
        self.shared.versions.send_replace(backup.0.version);
        self.end_watches();
    }

    /// Running watches say nothing any more, or go on.
    pub fn stall_watches(&self, stalled: bool) {
        self.shared.control.send_modify(|control| control.stalled = stalled);
    }

    /// Ends running watches.
    pub fn end_watches(&self) {
        self.shared.control.send_modify(|control| control.epoch += 1);
    }

    /// Pause between bookmarks.
    pub fn set_bookmark_interval(&self, interval: Duration) {
        self.shared.control.send_modify(|control| control.bookmark_interval = interval);
    }

    /// Sends a line, as it is, down the running watches of a kind (plural; `None` = all).
    pub fn inject(&self, plural: Option<&str>, line: &str) {
        let kind = plural.map(|plural| KINDS.iter().position(|kind| kind.plural == plural).unwrap_or(usize::MAX));
        let _ = self.shared.injected.send((kind, format!("{line}\n")));
    }

    /// Sends an ERROR event down the running watches of a kind.
    pub fn inject_error(&self, plural: Option<&str>, code: u16, reason: &str) {
        let status = store::ApiError::new(code, reason, format!("injected {code}")).status();
        self.inject(plural, &serde_json::json!({"type": "ERROR", "object": status}).to_string());
    }

    /// Asks for another token from now on.
    pub fn set_token(&self, token: Option<&str>) {
        *lock(&self.shared.token) = token.map(str::to_owned);
    }

    /// Takes a right away, such as `patch services/status`, or gives it back.
    pub fn deny(&self, right: &str, denied: bool) {
        let mut rights = lock(&self.shared.denied);
        if denied {
            rights.insert(right.to_owned());
        } else {
            rights.remove(right);
        }
    }

    /// Widens the range of NodePorts.
    pub fn set_node_port_range(&self, first: u16, last: u16) {
        self.shared.store().set_node_port_range((first, last));
    }

    /// Stops listening and cuts all connections; the state stays.
    pub fn go_away(&mut self) {
        if let Some(running) = self.running.take() {
            running.abort();
        }
    }

    /// Listens again on the same address.
    pub async fn come_back(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(5);
        let listener = loop {
            match TcpListener::bind(self.address).await {
                Ok(listener) => break listener,
                Err(error) if Instant::now() > deadline => return Err(error).context("listen again"),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        self.accept(listener);
        Ok(())
    }

    /// Waits for ever, or until the server fails.
    pub async fn wait(&mut self) {
        if let Some(running) = &mut self.running {
            let _ = running.await;
        }
    }
}

impl Identity {
    async fn accept(&self, stream: TcpStream) -> std::io::Result<tokio_rustls::server::TlsStream<TcpStream>> {
        tokio::time::timeout(Duration::from_secs(10), self.acceptor().accept(stream)).await?
    }
}
