//! HTTP on the Unix socket and on the metrics address.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use jiff::Timestamp;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};

use super::metrics::Metrics;
use super::types::{
    AcceptClusterReply, AdoptReply, AdoptRequest, ApiError, Backend, Event, KillReply, KillRequest, Names, ReloadReply,
    ReloadRequest, Service, Status, TenantVips, paths,
};
use crate::agent::AgentError;
use crate::agent::view::{self, View};
use crate::config::Config;
use crate::dataplane::Pins;
use crate::flows::{Directory, Filter};
use crate::source::ObjectName;

/// Group that may use the socket, if it exists.
const GROUP: &str = "lbd";
/// How long the main loop may be silent before the agent counts as stuck.
const STUCK: i64 = 30;

/// Something that somebody has asked for.
pub(crate) struct Call<Q, A> {
    /// What is asked.
    pub request: Q,
    /// Where the answer goes.
    pub reply: oneshot::Sender<A>,
}

/// What the main loop can be asked for.
pub(crate) enum Order {
    /// To reload its file.
    Reload(Call<ReloadRequest, ReloadReply>),
    /// To take a Service over.
    Adopt(Call<ObjectName, Result<AdoptReply, String>>),
    /// To accept the cluster that is there.
    AcceptCluster(Call<(), Result<AcceptClusterReply, String>>),
}

#[derive(Clone)]
struct Shared {
    views: watch::Receiver<Arc<View>>,
    orders: mpsc::Sender<Order>,
    metrics: Arc<Metrics>,
}

impl Shared {
    /// Has the main loop do something.
    async fn ask<Q, A>(&self, order: impl FnOnce(Call<Q, A>) -> Order, request: Q) -> Result<A, Failure> {
        let stopping = || Failure(StatusCode::SERVICE_UNAVAILABLE, "the agent is stopping".to_owned());
        let (reply, answer) = oneshot::channel();
        self.orders.send(order(Call { request, reply })).await.map_err(|_| stopping())?;
        answer.await.map_err(|_| stopping())
    }

    fn view(&self) -> Arc<View> {
        Arc::clone(&self.views.borrow())
    }
}

/// The socket's file, gone with its owner. The next agent replaces one that a crash has left.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::debug!(path = %self.0.display(), %error, "the socket's file stays");
        }
    }
}

/// Open sockets that nobody serves yet.
pub(crate) struct Api {
    socket: UnixListener,
    file: SocketFile,
    path: PathBuf,
    metrics: TcpListener,
    shared: Shared,
}

/// Sockets being served.
pub(crate) struct Serving {
    tasks: Vec<AbortHandle>,
    _file: SocketFile,
}

impl Serving {
    /// Ends it.
    pub(crate) fn stop(self) {
        for task in self.tasks {
            task.abort();
        }
    }
}

impl Api {
    /// Opens the sockets; the Unix socket gets its name only when it is served, so that nobody waits for an agent that is
    /// starting. The state directory's lock is held: a socket file that is there is a left-over.
    pub(crate) async fn bind(
        config: &Config,
        views: watch::Receiver<Arc<View>>,
        orders: mpsc::Sender<Order>,
    ) -> Result<Self, AgentError> {
        let failed = listen_failed(&config.socket);
        let mut starting = config.socket.clone().into_os_string();
        starting.push(".starting");
        let starting = PathBuf::from(starting);
        let socket = remove_left_over(&config.socket).and_then(|()| bind_unix(&starting)).map_err(failed)?;
        let file = SocketFile(starting);
        let metrics = TcpListener::bind(config.metrics).await.map_err(|source| AgentError::Listen {
            address: config.metrics.to_string(),
            source,
            remedy: "correct `metrics` in the configuration, or stop who listens there",
        })?;
        let shared = Shared { metrics: Arc::new(Metrics::new(views.clone())), views, orders };
        Ok(Self { socket, file, path: config.socket.clone(), metrics, shared })
    }

    /// Answers in the background.
    pub(crate) fn serve(mut self) -> Result<Serving, AgentError> {
        fs::rename(&self.file.0, &self.path).map_err(listen_failed(&self.path))?;
        self.file.0.clone_from(&self.path);
        let local = Router::new()
            .route(paths::STATUS, get(status))
            .route(paths::SERVICES, get(services))
            .route(paths::BACKENDS, get(backends))
            .route(paths::VIPS, get(vips))
            .route(paths::EVENTS, get(events))
            .route(paths::NAMES, get(names))
            .route(paths::KILL, post(kill))
            .route(paths::RELOAD, post(reload))
            .route(paths::ADOPT, post(adopt))
            .route(paths::ACCEPT_CLUSTER, post(accept_cluster))
            .fallback(unknown)
            .with_state(self.shared.clone());
        let public = Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(healthz))
            .route("/readyz", get(readyz))
            .with_state(self.shared);
        let mut tasks = JoinSet::new();
        let handles = vec![
            // Neither ends by itself: errors of single connections are the client's.
            tasks.spawn(async move { axum::serve(self.socket, local).await }),
            tasks.spawn(async move { axum::serve(self.metrics, public).await }),
        ];
        tasks.detach_all();
        Ok(Serving { tasks: handles, _file: self.file })
    }
}

fn listen_failed(socket: &Path) -> impl Fn(io::Error) -> AgentError + use<> {
    let address = socket.display().to_string();
    move |source| AgentError::Listen {
        address: address.clone(),
        source,
        remedy: "correct `socket` in the configuration, or remove what is there",
    }
}

fn remove_left_over(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => fs::remove_file(path),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is something that is no socket")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
    }
    remove_left_over(path)?;
    // Nobody but the owner may connect until group and mode are right.
    let before = nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o177));
    let bound = std::os::unix::net::UnixListener::bind(path);
    nix::sys::stat::umask(before);
    let listener = bound?;
    match nix::unistd::Group::from_name(GROUP) {
        Ok(Some(group)) => {
            if let Err(error) = std::os::unix::fs::chown(path, None, Some(group.gid.as_raw())) {
                tracing::warn!(%error, "the socket could not be given to group {GROUP}");
            }
        }
        Ok(None) => tracing::debug!("there is no group {GROUP}: only root can use the socket"),
        Err(error) => tracing::warn!(%error, "group {GROUP} could not be looked up"),
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o660))?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

async fn status(State(shared): State<Shared>) -> Json<Status> {
    Json(shared.view().status.clone())
}

/// Lists can be long: they are made beside the threads that answer.
async fn made<T: Send + 'static>(make: impl FnOnce() -> T + Send + 'static) -> Result<Json<T>, Failure> {
    match tokio::task::spawn_blocking(make).await {
        Ok(value) => Ok(Json(value)),
        Err(error) => Err(Failure(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

async fn services(State(shared): State<Shared>) -> Result<Json<Vec<Service>>, Failure> {
    let view = shared.view();
    made(move || view::services(&view.plan, &view.health)).await
}

async fn backends(State(shared): State<Shared>) -> Result<Json<Vec<Backend>>, Failure> {
    let view = shared.view();
    made(move || view::backends(&view.plan, &view.health, Timestamp::now().as_second())).await
}

async fn vips(State(shared): State<Shared>) -> Result<Json<Vec<TenantVips>>, Failure> {
    let view = shared.view();
    made(move || view::vips(&view.addresses, &view.plan, Timestamp::now().as_second())).await
}

async fn names(State(shared): State<Shared>) -> Result<Json<Names>, Failure> {
    let view = shared.view();
    made(move || view::names(&view.plan, &view.hub)).await
}

async fn events(State(shared): State<Shared>) -> Json<Vec<Event>> {
    Json(shared.view().events.clone())
}

async fn reload(
    State(shared): State<Shared>,
    Json(request): Json<ReloadRequest>,
) -> Result<Json<ReloadReply>, Failure> {
    Ok(Json(shared.ask(Order::Reload, request).await?))
}

async fn adopt(State(shared): State<Shared>, Json(request): Json<AdoptRequest>) -> Result<Json<AdoptReply>, Failure> {
    let service = ObjectName::try_from(request.service).map_err(|why| Failure(StatusCode::BAD_REQUEST, why))?;
    let adopted = shared.ask(Order::Adopt, service).await?;
    Ok(Json(adopted.map_err(|why| Failure(StatusCode::CONFLICT, why))?))
}

async fn accept_cluster(State(shared): State<Shared>) -> Result<Json<AcceptClusterReply>, Failure> {
    let accepted = shared.ask(Order::AcceptCluster, ()).await?;
    Ok(Json(accepted.map_err(|why| Failure(StatusCode::CONFLICT, why))?))
}

async fn kill(State(shared): State<Shared>, Json(request): Json<KillRequest>) -> Result<Json<KillReply>, Failure> {
    let filter = Filter::try_from(&request).map_err(|error| Failure(StatusCode::BAD_REQUEST, error))?;
    let view = shared.view();
    let Json(killed) = made(move || {
        let pins = Pins::open(&view.bpffs)?;
        let directory = Directory::new(&view::names(&view.plan, &view.hub), &pins.frontends()?);
        crate::flows::kill::kill(&pins, &filter, &directory)
    })
    .await?;
    let killed = killed.map_err(|error| Failure(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    tracing::info!(killed, ?request, "flows were killed");
    Ok(Json(KillReply { killed }))
}

async fn unknown(uri: Uri) -> Failure {
    Failure(StatusCode::NOT_FOUND, format!("this agent knows no {}: is lbctl of another version?", uri.path()))
}

async fn metrics(State(shared): State<Shared>) -> Response {
    match tokio::task::spawn_blocking(move || shared.metrics.encode()).await {
        Ok(Ok(text)) => {
            let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Ok(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

fn stuck(view: &View) -> bool {
    Timestamp::now().as_second().saturating_sub(view.made) > STUCK
}

async fn healthz(State(shared): State<Shared>) -> Response {
    if stuck(&shared.view()) {
        (StatusCode::SERVICE_UNAVAILABLE, "the main loop is stuck\n").into_response()
    } else {
        "ok\n".into_response()
    }
}

async fn readyz(State(shared): State<Shared>) -> Response {
    let view = shared.view();
    if stuck(&view) {
        (StatusCode::SERVICE_UNAVAILABLE, "the main loop is stuck\n").into_response()
    } else if !view.ready {
        (StatusCode::SERVICE_UNAVAILABLE, "no plan is in the datapath yet\n").into_response()
    } else if let Some(error) = &view.status.apply.error {
        (StatusCode::SERVICE_UNAVAILABLE, format!("the datapath can't be changed: {error}\n")).into_response()
    } else if view.notices.contains_key("RedirectFailed") {
        (StatusCode::SERVICE_UNAVAILABLE, "packets are lost after the redirect, see `lbctl status`\n").into_response()
    } else {
        "ok\n".into_response()
    }
}

/// An answer that is not a success.
struct Failure(StatusCode, String);

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        // Give a client that hammers a failing path a moment.
        const RETRY: Duration = Duration::from_secs(1);
        let retry = [(header::RETRY_AFTER, HeaderValue::from(RETRY.as_secs()))];
        (self.0, retry, Json(ApiError { error: self.1 })).into_response()
    }
}
