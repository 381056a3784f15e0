//! Access to a cluster: a kubeconfig file, checked, and the client made from it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Uri;
use kube::Client;
use kube::config::{Kubeconfig, KubeconfigError};
use tokio::sync::watch;

use super::expiry::Validity;
use crate::config;

/// Limit for reaching the server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Silence on a connection after which it is dead; longer than any watch lasts, so that it never cuts a healthy one.
const READ_TIMEOUT: Duration = Duration::from_mins(5);
/// How often the files are looked at.
const REREAD_INTERVAL: Duration = Duration::from_secs(10);

/// Why a cluster cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The file cannot be read.
    #[error("kubeconfig {}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// Others can read the credentials.
    #[error("kubeconfig {0}: mode {mode:04o} lets group or others at the credentials: run `chmod 600 {0}`", path.display())]
    Permissions {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// An exec plugin or auth provider.
    #[error(
        "kubeconfig {}: the user of the current context gets its credentials from {what}, and lbd runs no other \
         programs for that: use a token, a token file or a client certificate", path.display()
    )]
    Plugin {
        /// The file.
        path: PathBuf,
        /// What it wants to run.
        what: &'static str,
    },
    /// Verification is off.
    #[error(
        "kubeconfig {}: {what}: give the cluster a `certificate-authority` and an https address, or accept the risk \
         with `allow_insecure: true`", path.display()
    )]
    Insecure {
        /// The file.
        path: PathBuf,
        /// What is insecure.
        what: String,
    },
    /// A proxy is asked for.
    #[error("kubeconfig {}: `proxy-url` is not supported: lbd dials the API server directly; remove it", path.display())]
    Proxy {
        /// The file.
        path: PathBuf,
    },
    /// The file makes no sense.
    #[error("kubeconfig {}: {source}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: KubeconfigError,
    },
    /// No client can be made of it.
    #[error("kubeconfig {}: no client can be made of it: {source}", path.display())]
    Client {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: Box<kube::Error>,
    },
}

/// A client that follows its kubeconfig file: when the file, or one it refers to, changes, the next request uses what
/// it says then. Cloning is cheap.
#[derive(Clone)]
pub struct Access {
    inner: Arc<Inner>,
}

struct Inner {
    settings: config::Kubernetes,
    /// Where the server is, as the kubeconfig says, and the addresses of that.
    server: Mutex<Server>,
    /// Where to dial instead, and which of it is in use.
    detour: Mutex<Detour>,
    client: watch::Sender<Client>,
    fingerprint: Mutex<u64>,
    failure: Mutex<Option<String>>,
}

/// The server that a kubeconfig names, and how long that lets us in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Server {
    host: String,
    port: u16,
    addresses: Vec<IpAddr>,
    validity: Option<Validity>,
}

impl Server {
    fn of(url: &Uri, validity: Option<Validity>) -> Self {
        let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = url.port_u16().unwrap_or(if url.scheme_str() == Some("http") { 80 } else { 443 });
        let addresses = host.parse().into_iter().collect();
        Self { host, port, addresses, validity }
    }
}

/// Backends of a VIP of ours that the server is behind: the host's own packets do not pass its datapath.
#[derive(Debug, Default)]
struct Detour {
    backends: Vec<SocketAddr>,
    next: usize,
}

impl Detour {
    fn current(&self) -> Option<SocketAddr> {
        self.backends.get(self.next % self.backends.len().max(1)).copied()
    }
}

impl std::fmt::Debug for Access {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Access").field("kubeconfig", &self.inner.settings.kubeconfig).finish_non_exhaustive()
    }
}

impl Access {
    /// Reads the kubeconfig and makes a client of it. Nothing is sent yet. Must be called inside a runtime.
    pub fn open(settings: &config::Kubernetes) -> Result<Self, SourceError> {
        let (client, fingerprint, server) = load(settings, None)?;
        let inner = Inner {
            settings: settings.clone(),
            server: Mutex::new(server),
            detour: Mutex::default(),
            client: watch::Sender::new(client),
            fingerprint: Mutex::new(fingerprint),
            failure: Mutex::new(None),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Addresses and port of the server, as far as they are known.
    pub(crate) fn server(&self) -> (Vec<IpAddr>, u16) {
        let server = lock(&self.inner.server);
        (server.addresses.clone(), server.port)
    }

    /// Until when the credentials are good; `None` = they do not say.
    pub fn validity(&self) -> Option<Validity> {
        lock(&self.inner.server).validity
    }

    /// Dials one of these instead of what the kubeconfig says, with the same name in TLS; none: what the kubeconfig says.
    pub(crate) fn set_detour(&self, backends: Vec<SocketAddr>) {
        let mut detour = lock(&self.inner.detour);
        let before = detour.current();
        if detour.backends == backends {
            return;
        }
        // One that is still there is not left for another.
        detour.next = before.and_then(|before| backends.iter().position(|new| *new == before)).unwrap_or_default();
        detour.backends = backends;
        let now = detour.current();
        drop(detour);
        if before != now {
            self.redial(now);
        }
    }

    /// The server did not answer: if there are several ways, the next is tried.
    pub(crate) fn another_way(&self) {
        let mut detour = lock(&self.inner.detour);
        if detour.backends.len() > 1 {
            detour.next = (detour.next + 1) % detour.backends.len();
            let now = detour.current();
            drop(detour);
            self.redial(now);
        }
    }

    fn redial(&self, detour: Option<SocketAddr>) {
        match load(&self.inner.settings, detour) {
            Ok((client, fingerprint, server)) => {
                tracing::info!(?detour, "the API server is behind a VIP of ours: dialled directly");
                lock(&self.inner.server).validity = server.validity;
                *lock(&self.inner.fingerprint) = fingerprint;
                self.inner.client.send_replace(client);
            }
            Err(error) => tracing::warn!("{error}; the client of before stays in use"),
        }
    }

    /// The client as the file says now.
    pub fn client(&self) -> Client {
        self.inner.client.borrow().clone()
    }

    /// Tells of new clients.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Client> {
        self.inner.client.subscribe()
    }

    /// What was wrong with the file when it was last read, if it was.
    pub fn failure(&self) -> Option<String> {
        lock(&self.inner.failure).clone()
    }

    /// Reads the file again if it changed; a bad file leaves the old client in use. Returns whether there is a new one.
    pub fn reread(&self) -> Result<bool, SourceError> {
        let result = self.reread_inner();
        *lock(&self.inner.failure) = result.as_ref().err().map(ToString::to_string);
        result
    }

    fn reread_inner(&self) -> Result<bool, SourceError> {
        let now = fingerprint(&read(&self.inner.settings.kubeconfig)?);
        if now == *lock(&self.inner.fingerprint) {
            return Ok(false);
        }
        let detour = lock(&self.inner.detour).current();
        let (client, now, server) = load(&self.inner.settings, detour)?;
        *lock(&self.inner.server) = server;
        *lock(&self.inner.fingerprint) = now;
        self.inner.client.send_replace(client);
        Ok(true)
    }

    /// Learns the addresses of a server that has a name.
    async fn resolve(&self) {
        let (host, port) = {
            let server = lock(&self.inner.server);
            (server.host.clone(), server.port)
        };
        if host.parse::<IpAddr>().is_ok() {
            return;
        }
        if let Ok(Ok(found)) =
            tokio::time::timeout(CONNECT_TIMEOUT, tokio::net::lookup_host((host.as_str(), port))).await
        {
            let mut server = lock(&self.inner.server);
            if server.host == host {
                server.addresses = found.map(|address| address.ip()).collect();
            }
        }
    }

    /// Looks at the file from time to time, for ever.
    pub(crate) async fn follow(self) {
        loop {
            self.resolve().await;
            tokio::time::sleep(REREAD_INTERVAL).await;
            match self.reread() {
                Ok(false) => {}
                Ok(true) => tracing::info!(kubeconfig = %self.inner.settings.kubeconfig.display(), "kubeconfig reread"),
                Err(error) => tracing::warn!("{error}; the credentials read before stay in use"),
            }
        }
    }
}

/// The lock, whoever panicked while holding it: what it guards is replaced whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn read(path: &Path) -> Result<Kubeconfig, SourceError> {
    let metadata = std::fs::metadata(path).map_err(|source| SourceError::Read { path: path.into(), source })?;
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o066 != 0 {
        return Err(SourceError::Permissions { path: path.into(), mode });
    }
    Kubeconfig::read_from(path).map_err(|source| SourceError::Invalid { path: path.into(), source })
}

/// Hash of everything that credentials and trust depend on, with the contents of the files referred to.
fn fingerprint(kubeconfig: &Kubeconfig) -> u64 {
    let mut hasher = DefaultHasher::new();
    serde_json::to_string(kubeconfig).unwrap_or_default().hash(&mut hasher);
    let of_clusters =
        kubeconfig.clusters.iter().filter_map(|named| named.cluster.as_ref()?.certificate_authority.as_ref());
    let of_users = kubeconfig.auth_infos.iter().filter_map(|named| named.auth_info.as_ref()).flat_map(|user| {
        [user.client_certificate.as_ref(), user.client_key.as_ref(), user.token_file.as_ref()].into_iter().flatten()
    });
    for path in of_clusters.chain(of_users) {
        (path, std::fs::read(path).ok()).hash(&mut hasher);
    }
    hasher.finish()
}

/// `detour` is dialled instead of the server's own address.
fn load(settings: &config::Kubernetes, detour: Option<SocketAddr>) -> Result<(Client, u64, Server), SourceError> {
    let path = &settings.kubeconfig;
    let kubeconfig = read(path)?;
    let fingerprint = fingerprint(&kubeconfig);
    if kubeconfig.clusters.iter().any(|named| named.cluster.as_ref().is_some_and(|cluster| cluster.proxy_url.is_some()))
    {
        return Err(SourceError::Proxy { path: path.clone() });
    }
    let mut config =
        kube::Config::try_from(kubeconfig).map_err(|source| SourceError::Invalid { path: path.clone(), source })?;
    if config.auth_info.exec.is_some() {
        return Err(SourceError::Plugin { path: path.clone(), what: "an exec plugin" });
    }
    if config.auth_info.auth_provider.is_some() {
        return Err(SourceError::Plugin { path: path.clone(), what: "an auth provider" });
    }
    if !settings.allow_insecure {
        if config.accept_invalid_certs {
            let what = "`insecure-skip-tls-verify` turns the verification of the server off".to_owned();
            return Err(SourceError::Insecure { path: path.clone(), what });
        }
        if config.cluster_url.scheme_str() != Some("https") && !is_loopback(config.cluster_url.host()) {
            let what = format!("`{}` is not https", config.cluster_url);
            return Err(SourceError::Insecure { path: path.clone(), what });
        }
    }
    let server = Server::of(&config.cluster_url, Validity::of(&config.auth_info));
    if let Some(detour) = detour {
        config.tls_server_name.get_or_insert_with(|| server.host.clone());
        config.cluster_url = redirected(&config.cluster_url, detour);
    }
    config.accept_invalid_certs = settings.allow_insecure;
    // A proxy named in the environment is meant for programs that fetch things, not for the control plane.
    config.proxy_url = None;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    config.write_timeout = Some(CONNECT_TIMEOUT);
    config.reset_reader_on_write = true;
    // Callers retry with their own limits.
    config.default_retry = false;
    let client = Client::try_from(config)
        .map_err(|source| SourceError::Client { path: path.clone(), source: Box::new(source) })?;
    Ok((client, fingerprint, server))
}

/// The same URL at another address.
fn redirected(url: &Uri, to: SocketAddr) -> Uri {
    let mut parts = url.clone().into_parts();
    parts.authority = to.to_string().parse().ok();
    Uri::from_parts(parts).unwrap_or_else(|_| url.clone())
}

fn is_loopback(host: Option<&str>) -> bool {
    host.is_some_and(|host| {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::testing::{TOKEN, kubeconfig as file};
    use super::*;

    fn open(file: &tempfile::NamedTempFile, allow_insecure: bool) -> Result<(), String> {
        let settings = config::Kubernetes { kubeconfig: file.path().into(), allow_insecure, max_blind: None };
        load(&settings, None).map(|_| ()).map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn good_files_are_accepted() {
        open(&file("https://10.32.96.1:6443", "", TOKEN, 0o600), false).unwrap();
        open(&file("http://127.0.0.1:6443", "", TOKEN, 0o400), false).unwrap();
        open(&file("http://[::1]:6443", "", TOKEN, 0o600), false).unwrap();
        open(&file("http://10.32.96.1:6443", "", TOKEN, 0o600), true).unwrap();
        open(&file("https://10.32.96.1:6443", "    insecure-skip-tls-verify: true\n", TOKEN, 0o600), true).unwrap();
    }

    #[tokio::test]
    async fn files_that_others_can_read_are_refused() {
        for mode in [0o640, 0o604, 0o644, 0o620] {
            let error = open(&file("https://10.32.96.1:6443", "", TOKEN, mode), false).unwrap_err();
            assert!(error.contains("chmod 600"), "{error}");
        }
    }

    #[tokio::test]
    async fn plugins_are_refused() {
        let exec = "    exec: {apiVersion: client.authentication.k8s.io/v1, command: /bin/false}\n";
        let error = open(&file("https://10.32.96.1:6443", "", exec, 0o600), false).unwrap_err();
        assert!(error.contains("exec plugin"), "{error}");
        let provider = "    auth-provider: {name: oidc, config: {}}\n";
        let error = open(&file("https://10.32.96.1:6443", "", provider, 0o600), false).unwrap_err();
        assert!(error.contains("auth provider"), "{error}");
    }

    #[tokio::test]
    async fn verification_cannot_be_off_by_accident() {
        for (server, cluster) in
            [("https://10.32.96.1:6443", "    insecure-skip-tls-verify: true\n"), ("http://10.32.96.1:6443", "")]
        {
            let error = open(&file(server, cluster, TOKEN, 0o600), false).unwrap_err();
            assert!(error.contains("allow_insecure"), "{error}");
        }
        let error =
            open(&file("https://10.32.96.1:6443", "    proxy-url: http://p:1\n", TOKEN, 0o600), false).unwrap_err();
        assert!(error.contains("proxy-url"), "{error}");
    }

    #[test]
    fn another_address_is_dialled_under_the_same_name() {
        let url: Uri = "https://api.hub.example:6443/base".parse().unwrap();
        let to = "10.32.96.105:30918".parse().unwrap();
        assert_eq!(redirected(&url, to).to_string(), "https://10.32.96.105:30918/base");
        assert_eq!(
            redirected(&url, "[2001:db8::5]:30918".parse().unwrap()).authority().unwrap(),
            "[2001:db8::5]:30918"
        );
        let server = Server::of(&"https://[2001:db8::110]".parse().unwrap(), None);
        assert_eq!((server.host.as_str(), server.port, server.addresses.len()), ("2001:db8::110", 443, 1));
    }

    #[tokio::test]
    async fn a_detour_makes_a_new_client_and_another_one_after_a_failure() {
        let file = file("https://192.0.2.34:6443", "", TOKEN, 0o600);
        let settings = config::Kubernetes { kubeconfig: file.path().into(), allow_insecure: false, max_blind: None };
        let access = Access::open(&settings).unwrap();
        assert_eq!(access.server(), (vec!["192.0.2.34".parse().unwrap()], 6443));
        let mut clients = access.subscribe();
        let backends: Vec<SocketAddr> = ["10.0.0.11:30918", "10.0.0.12:30918"].map(|text| text.parse().unwrap()).into();
        access.set_detour(backends.clone());
        assert!(clients.has_changed().unwrap());
        clients.mark_unchanged();
        access.set_detour(backends.iter().rev().copied().collect());
        assert!(!clients.has_changed().unwrap(), "the way in use is still there");
        access.another_way();
        assert!(clients.has_changed().unwrap());
        assert_eq!(lock(&access.inner.detour).current(), Some(backends[1]));
        clients.mark_unchanged();
        access.set_detour(Vec::new());
        assert!(clients.has_changed().unwrap());
        access.another_way();
    }

    #[tokio::test]
    async fn secrets_are_not_in_errors() {
        let error = open(&file("not a url", "", TOKEN, 0o600), false).unwrap_err();
        assert!(!error.contains("secret"), "{error}");
    }

    #[tokio::test]
    async fn a_changed_file_gives_a_new_client_and_a_bad_one_keeps_the_old() {
        let mut first = file("https://10.32.96.1:6443", "", TOKEN, 0o600);
        let settings = config::Kubernetes { kubeconfig: first.path().into(), allow_insecure: false, max_blind: None };
        let access = Access::open(&settings).unwrap();
        assert!(!access.reread().unwrap());
        first.write_all(b"    as: other\n").unwrap();
        assert!(access.reread().unwrap());
        first.write_all(b"  - nonsense: [\n").unwrap();
        assert!(access.reread().is_err());
        assert!(access.failure().is_some());
    }
}
