//! HTTP: requests → store, and watches.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use serde_json::{Value, json};
use tokio::sync::{broadcast, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

use super::access::{Attributes, User};
use super::store::{ApiError, Caller, KINDS, Result, Store, Target};
use super::{Action, Control, Entry, Shared, patch, validate};

pub(super) type Body = BoxBody<Bytes, std::io::Error>;

fn full(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).map_err(|never: Infallible| match never {}).boxed()
}

fn answer(code: u16, value: &Value) -> Response<Body> {
    let mut response = Response::new(full(value.to_string()));
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

fn refuse(error: &ApiError) -> Response<Body> {
    let mut response = answer(error.code, &error.status());
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

/// A request, understood.
struct Call {
    verb: &'static str,
    target: Target,
    subresource: &'static str,
    query: BTreeMap<String, String>,
}

impl Call {
    fn attributes(&self) -> Attributes<'_> {
        let kind = &KINDS[self.target.kind];
        let group = kind.api_version.split_once('/').map_or("", |(group, _)| group);
        Attributes {
            verb: self.verb,
            group,
            resource: kind.plural,
            subresource: self.subresource,
            namespace: if kind.name == "Namespace" { "" } else { &self.target.namespace },
            name: &self.target.name,
        }
    }
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digits = [rest.next().unwrap_or(b'0'), rest.next().unwrap_or(b'0')];
                u8::from_str_radix(&String::from_utf8_lossy(&digits), 16).unwrap_or(b'?')
            }
            other => other,
        });
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn understand(method: &Method, path: &str, query: &str) -> Option<Call> {
    let query: BTreeMap<_, _> = query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(name, value)| (decode(name), decode(value)))
        .collect();
    let parts: Vec<_> = path.split('/').filter(|part| !part.is_empty()).map(decode).collect();
    let parts: Vec<_> = parts.iter().map(String::as_str).collect();
    let (api_version, rest) = match parts.as_slice() {
        ["api", "v1", rest @ ..] => ("v1".to_owned(), rest),
        ["apis", group, version, rest @ ..] => (format!("{group}/{version}"), rest),
        _ => return None,
    };
    let (namespace, plural, rest) = match rest {
        ["namespaces", namespace, plural, rest @ ..] if !matches!(*plural, "status" | "finalize") => {
            (*namespace, *plural, rest)
        }
        [plural, rest @ ..] => ("", *plural, rest),
        [] => return None,
    };
    let (name, subresource) = match rest {
        [] => ("", ""),
        [name] => (*name, ""),
        [name, "status"] => (*name, "status"),
        [name, "finalize"] if plural == "namespaces" => (*name, "finalize"),
        [name, "token"] if plural == "serviceaccounts" => (*name, "token"),
        _ => return None,
    };
    let kind = KINDS.iter().position(|kind| kind.plural == plural && kind.api_version == api_version)?;
    let watch = matches!(query.get("watch").map(String::as_str), Some("true" | "1"));
    let verb = match (method, name.is_empty()) {
        (&Method::GET, true) if watch => "watch",
        (&Method::GET, true) => "list",
        (&Method::GET, false) => "get",
        (&Method::POST, true) => "create",
        (&Method::POST, false) if subresource == "token" => "create",
        (&Method::PUT, false) => "update",
        (&Method::PATCH, false) => "patch",
        (&Method::DELETE, false) => "delete",
        _ => return None,
    };
    if subresource == "status" && !KINDS[kind].has_status
        || KINDS[kind].namespaced && namespace.is_empty() && !name.is_empty()
    {
        return None;
    }
    let target =
        Target { kind, namespace: namespace.to_owned(), name: name.to_owned(), status: subresource == "status" };
    Some(Call { verb, target, subresource, query })
}

/// Which objects a list or watch wants.
struct Selector {
    namespace: String,
    labels: String,
    fields: String,
}

impl Selector {
    fn of(call: &Call) -> Self {
        let get = |name: &str| call.query.get(name).cloned().unwrap_or_default();
        Self { namespace: call.target.namespace.clone(), labels: get("labelSelector"), fields: get("fieldSelector") }
    }

    fn matches(&self, object: &Value) -> bool {
        let value_of = |place: &str| -> Option<String> {
            let value = place.split('.').try_fold(object, |value, name| value.get(name))?;
            value.as_str().map(str::to_owned)
        };
        let labels = &object["metadata"]["labels"];
        let by_label = |requirement: &str| {
            if let Some((name, value)) = requirement.split_once("!=") {
                labels[name].as_str() != Some(value)
            } else if let Some((name, value)) = requirement.split_once('=') {
                labels[name].as_str() == Some(value.trim_start_matches('='))
            } else if let Some(name) = requirement.strip_prefix('!') {
                labels[name].is_null()
            } else {
                !labels[requirement].is_null()
            }
        };
        let by_field = |requirement: &str| {
            if let Some((place, value)) = requirement.split_once("!=") {
                value_of(place).unwrap_or_default() != value
            } else if let Some((place, value)) = requirement.split_once('=') {
                value_of(place).unwrap_or_default() == value.trim_start_matches('=')
            } else {
                false
            }
        };
        (self.namespace.is_empty() || object["metadata"]["namespace"] == self.namespace.as_str())
            && self.labels.split(',').filter(|text| !text.is_empty()).all(by_label)
            && self.fields.split(',').filter(|text| !text.is_empty()).all(by_field)
    }
}

/// Serves one request. `None` closes the connection without an answer.
pub(super) async fn serve(shared: Arc<Shared>, request: Request<Incoming>) -> Option<Response<Body>> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.ok()?.to_bytes();
    let path = parts.uri.path().to_owned();
    let query = parts.uri.query().unwrap_or_default().to_owned();
    let call = understand(&parts.method, &path, &query);
    let verb = call.as_ref().map_or("other", |call| call.verb);
    let header =
        |name: header::HeaderName| parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let content_type = header(header::CONTENT_TYPE).to_owned();
    let agent = header(header::USER_AGENT).to_owned();
    let token = header(header::AUTHORIZATION).to_owned();
    let parsed: Option<Value> = serde_json::from_slice(&body).ok();
    let entry = shared.log(Entry {
        at: Instant::now(),
        verb,
        path: path.clone(),
        query: query.clone(),
        content_type: content_type.clone(),
        body: parsed.clone(),
        status: 0,
    });
    let Some(user) = shared.user(token.strip_prefix("Bearer ")) else {
        let error = ApiError::new(401, "Unauthorized", "Unauthorized");
        shared.log_status(entry, 401);
        return Some(refuse(&error));
    };
    for action in shared.faults(verb, &format!("{path}?{query}")) {
        match action {
            Action::Delay(delay) => tokio::time::sleep(delay).await,
            Action::Hang => std::future::pending().await,
            Action::Close => return None,
            Action::Garbage => return Some(Response::new(full("{\"kind\": \"Serv"))),
            Action::Status { code, reason, message, retry_after } => {
                let mut error = ApiError::new(code, &reason, message);
                error.retry_after = retry_after;
                shared.log_status(entry, code);
                return Some(refuse(&error));
            }
        }
    }
    let response = match call {
        Some(call) if !shared.allows(&user, &call.attributes()) => refuse(&forbidden(&user, &call.attributes())),
        None => other(&shared, &parts.method, &path, &user, parsed),
        Some(call) if call.verb == "watch" => start_watch(&shared, &call),
        Some(call) => {
            let request = Arrived { content_type: &content_type, agent: &agent, body: parsed.as_ref(), user };
            handle(&shared, &call, request).unwrap_or_else(|error| refuse(&error))
        }
    };
    shared.log_status(entry, response.status().as_u16());
    Some(response)
}

fn forbidden(user: &User, wanted: &Attributes<'_>) -> ApiError {
    let dot = if wanted.group.is_empty() { "" } else { "." };
    let what = format!("{}{dot}{}", wanted.resource, wanted.group);
    let name = if wanted.name.is_empty() { String::new() } else { format!(" \"{}\"", wanted.name) };
    let place = if wanted.namespace.is_empty() {
        "at the cluster scope".to_owned()
    } else {
        format!("in the namespace \"{}\"", wanted.namespace)
    };
    let message = format!(
        "{what}{name} is forbidden: User \"{}\" cannot {} resource \"{}\" in API group \"{}\" {place}",
        user.name,
        wanted.verb,
        wanted.full(),
        wanted.group
    );
    ApiError::new(403, "Forbidden", message)
}

fn other(shared: &Shared, method: &Method, path: &str, user: &User, body: Option<Value>) -> Response<Body> {
    match (method, path) {
        (&Method::GET, "/healthz" | "/readyz" | "/livez") => Response::new(full("ok")),
        (&Method::GET, "/version") => answer(
            200,
            &json!({"major": "1", "minor": "34", "gitVersion": "v1.34.0-lbd-test", "gitCommit": "", "gitTreeState": "clean",
                "buildDate": "2026-01-01T00:00:00Z", "goVersion": "none", "compiler": "rustc", "platform": "linux"}),
        ),
        (&Method::POST, "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews") => {
            let mut review = body.unwrap_or_default();
            let attributes = review["spec"]["resourceAttributes"].clone();
            let text = |name: &str| attributes[name].as_str().unwrap_or_default();
            let wanted = Attributes {
                verb: text("verb"),
                group: text("group"),
                resource: text("resource"),
                subresource: text("subresource"),
                namespace: text("namespace"),
                name: text("name"),
            };
            review["status"] = json!({"allowed": shared.allows(user, &wanted)});
            answer(201, &review)
        }
        _ => refuse(&ApiError::new(404, "NotFound", "the server could not find the requested resource")),
    }
}

/// What came with a call.
struct Arrived<'a> {
    content_type: &'a str,
    agent: &'a str,
    body: Option<&'a Value>,
    user: User,
}

fn handle(shared: &Arc<Shared>, call: &Call, request: Arrived<'_>) -> Result<Response<Body>> {
    if call.verb == "list" {
        return list(shared, call);
    }
    let dry = match call.query.get("dryRun").map(String::as_str) {
        None | Some("") => false,
        Some("All") => true,
        Some(_) => return Err(ApiError::new(400, "BadRequest", "dryRun: Unsupported value")),
    };
    if dry {
        // As good as done, and not kept.
        let mut copy = shared.store().clone();
        return change(shared, &mut copy, call, request);
    }
    let answer = change(shared, &mut shared.store(), call, request)?;
    if call.verb != "get" {
        shared.changed();
    }
    Ok(answer)
}

fn token(shared: &Shared, store: &Store, call: &Call, body: &Value) -> Result<Response<Body>> {
    let account = store.get(&call.target)?;
    let seconds = body["spec"]["expirationSeconds"].as_i64().unwrap_or(3600);
    if seconds < 600 {
        let message = "may not specify a duration less than 10 minutes";
        return Err(ApiError::invalid("TokenRequest", "spec.expirationSeconds", message));
    }
    let uid = account["metadata"]["uid"].as_str().unwrap_or_default();
    let token = shared.issue(&call.target.namespace, &call.target.name, uid);
    let mut answered = body.clone();
    answered["status"] = json!({"token": token, "expirationTimestamp": "2100-01-01T00:00:00Z"});
    Ok(answer(201, &answered))
}

fn change(shared: &Arc<Shared>, store: &mut Store, call: &Call, request: Arrived<'_>) -> Result<Response<Body>> {
    let Arrived { content_type, agent, body, user } = request;
    let query = |name: &str| call.query.get(name).map(String::as_str);
    let manager = query("fieldManager").filter(|name| !name.is_empty());
    let by_agent = agent.split('/').next().filter(|name| !name.is_empty()).unwrap_or("unknown");
    let caller = Caller { user, manager: manager.unwrap_or(by_agent).to_owned() };
    validate::micro_times(&KINDS[call.target.kind], body.unwrap_or(&Value::Null))?;
    let body = || {
        body.cloned()
            .filter(|body| body.is_object() || body.is_array())
            .ok_or_else(|| ApiError::new(400, "BadRequest", "the body of the request is not JSON"))
    };
    let kind = &KINDS[call.target.kind];
    // What is not there is created, for which another right is needed.
    let may_create = |store: &Store| {
        let creating = Attributes { verb: "create", ..call.attributes() };
        let absent = store.get(&call.target).is_err() && !call.target.status;
        if absent && !shared.allows_in(store, &caller.user, &creating) {
            return Err(forbidden(&caller.user, &creating));
        }
        Ok(())
    };
    let object = match call.verb {
        "get" => store.get(&call.target)?,
        "create" if call.subresource == "token" => return token(shared, store, call, &body()?),
        "update" if call.subresource == "finalize" => store.finalize(&call.target, &body()?)?,
        "create" => {
            let mut object = body()?;
            if !object["metadata"].is_object() {
                object["metadata"] = json!({});
            }
            let given = |field: &str| object[field].as_str().unwrap_or_default();
            if given("kind") != kind.name || given("apiVersion") != kind.api_version {
                let message = format!(
                    "{} in version \"{}\" cannot be handled as a {}",
                    given("kind"),
                    given("apiVersion"),
                    kind.name
                );
                return Err(ApiError::new(400, "BadRequest", message));
            }
            same_namespace(&call.target, &object)?;
            let mut target = call.target.clone();
            object["metadata"]["name"].as_str().unwrap_or_default().clone_into(&mut target.name);
            if target.name.is_empty() {
                let prefix = object["metadata"]["generateName"].as_str().unwrap_or_default();
                if prefix.is_empty() {
                    return Err(ApiError::new(
                        422,
                        "Invalid",
                        "metadata.name: Required value: name or generateName is required",
                    ));
                }
                target.name = format!("{prefix}{:05x}", store.version & 0xf_ffff);
            }
            let created = store.create(&target, object, &caller)?;
            return Ok(answer(201, &created));
        }
        "update" => {
            let new = body()?;
            same_place(&call.target, &new)?;
            may_create(store)?;
            store.replace(&call.target, new, &caller)?
        }
        "patch" => match content_type.split(';').next().unwrap_or_default() {
            "application/apply-patch+yaml" => {
                let config = body()?;
                if manager.is_none() {
                    let message = "PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch";
                    return Err(ApiError::new(422, "Invalid", message));
                }
                if config["kind"] != kind.name || config["apiVersion"] != kind.api_version {
                    return Err(ApiError::new(
                        400,
                        "BadRequest",
                        "apiVersion and kind must be set, and be those of the URL",
                    ));
                }
                if !config["metadata"]["managedFields"].is_null() {
                    return Err(ApiError::new(400, "BadRequest", "metadata.managedFields must be nil"));
                }
                same_place(&call.target, &config)?;
                may_create(store)?;
                store.apply(&call.target, config, &caller, query("force") == Some("true"))?
            }
            // For what the tests do with it, a strategic merge is a merge.
            "application/merge-patch+json" | "application/strategic-merge-patch+json" => {
                let change = body()?;
                store.update(&call.target, &caller, |old| {
                    Store::check_uid(&call.target, old, &change)?;
                    let mut new = old.clone();
                    // A version in the patch is a precondition; the one it replaces is none.
                    if let Some(metadata) = new["metadata"].as_object_mut() {
                        metadata.remove("resourceVersion");
                    }
                    patch::merge(&mut new, &change);
                    Ok(new)
                })?
            }
            "application/json-patch+json" => {
                let change = body()?;
                store.update(&call.target, &caller, |old| {
                    let mut new = old.clone();
                    if let Some(metadata) = new["metadata"].as_object_mut() {
                        metadata.remove("resourceVersion");
                    }
                    patch::json(&mut new, &change).map_err(|text| ApiError::new(422, "Invalid", text))?;
                    Ok(new)
                })?
            }
            other => {
                return Err(ApiError::new(415, "UnsupportedMediaType", format!("unsupported content type `{other}`")));
            }
        },
        "delete" => store.delete(&call.target, &body().unwrap_or_else(|_| json!({})))?,
        _ => return Err(ApiError::new(405, "MethodNotAllowed", "the server does not allow this method")),
    };
    Ok(answer(200, &object))
}

fn same_namespace(target: &Target, object: &Value) -> Result<()> {
    let given = object["metadata"]["namespace"].as_str().unwrap_or_default();
    if KINDS[target.kind].namespaced && !given.is_empty() && given != target.namespace {
        let message = "the namespace of the provided object does not match the namespace sent on the request";
        return Err(ApiError::new(400, "BadRequest", message));
    }
    Ok(())
}

/// Refuses an object that is not the one of the path.
fn same_place(target: &Target, object: &Value) -> Result<()> {
    let given = object["metadata"]["name"].as_str().unwrap_or_default();
    if given != target.name {
        let message = format!("the name of the object ({given}) does not match the name on the URL ({})", target.name);
        return Err(ApiError::new(400, "BadRequest", message));
    }
    same_namespace(target, object)
}

/// Refuses a list of a version that there cannot be.
fn check_version(call: &Call, current: u64) -> Result<()> {
    let wanted = call.query.get("resourceVersion").map_or("", String::as_str);
    let bad = |message: String| Err(ApiError::new(400, "BadRequest", message));
    if matches!(wanted, "" | "0") {
        return Ok(());
    }
    let Ok(version) = wanted.parse::<u64>() else {
        return bad(format!("invalid resource version: resourceVersion: Invalid value: \"{wanted}\""));
    };
    if call.query.get("continue").is_some_and(|token| !token.is_empty()) {
        return bad("specifying resource version is not allowed when using continue".into());
    }
    if version > current {
        let message = format!("Timeout: Too large resource version: {version}, current: {current}");
        let mut error = ApiError::new(504, "Timeout", message);
        error.causes = vec![json!({"reason": "ResourceVersionTooLarge", "message": "Too large resource version"})];
        error.retry_after = Some(1);
        return Err(error);
    }
    Ok(())
}

fn list(shared: &Arc<Shared>, call: &Call) -> Result<Response<Body>> {
    let kind = &KINDS[call.target.kind];
    let selector = Selector::of(call);
    let limit = call.query.get("limit").and_then(|text| text.parse::<usize>().ok()).filter(|limit| *limit > 0);
    let store = shared.store();
    let mut version = store.version;
    check_version(call, version)?;
    let mut after = None;
    if let Some(token) = call.query.get("continue").filter(|token| !token.is_empty()) {
        let parts: Vec<_> = token.splitn(3, ':').collect();
        let [first, namespace, name] = parts.as_slice() else {
            return Err(ApiError::new(400, "BadRequest", "continue key is not valid"));
        };
        version = first.parse().unwrap_or(0);
        after = Some(((*namespace).to_owned(), (*name).to_owned()));
        if version < store.compacted {
            let message = "The provided continue parameter is too old to display a consistent list result.";
            return Err(ApiError::new(410, "Expired", message));
        }
    }
    let mut items = Vec::new();
    let mut token = String::new();
    let mut last: Option<&(String, String)> = None;
    for (key, object) in store.list(call.target.kind, after.as_ref()).filter(|(_, object)| selector.matches(object)) {
        if limit.is_some_and(|limit| items.len() >= limit) {
            token = last.map_or_else(String::new, |(namespace, name)| format!("{version}:{namespace}:{name}"));
            break;
        }
        last = Some(key);
        items.push(Arc::clone(object));
    }
    drop(store);
    let mut metadata = json!({"resourceVersion": version.to_string()});
    if !token.is_empty() {
        metadata["continue"] = json!(token);
    }
    let items = items.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let text = format!(
        r#"{{"kind":"{}List","apiVersion":"{}","metadata":{metadata},"items":[{items}]}}"#,
        kind.name, kind.api_version
    );
    let mut response = Response::new(full(text));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    Ok(response)
}

fn line(kind: &str, object: &Value) -> Bytes {
    Bytes::from(format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n"))
}

fn bookmark(kind: usize, version: u64, initial: bool) -> Bytes {
    let kind = &KINDS[kind];
    let mut object = json!({"kind": kind.name, "apiVersion": kind.api_version, "metadata": {"resourceVersion": version.to_string()}});
    if initial {
        object["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    }
    line("BOOKMARK", &object)
}

fn too_old(from: u64, compacted: u64) -> ApiError {
    ApiError::new(410, "Expired", format!("too old resource version: {from} ({compacted})"))
}

fn start_watch(shared: &Arc<Shared>, call: &Call) -> Response<Body> {
    let from = call.query.get("resourceVersion").and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    let initial = call.query.get("sendInitialEvents").map(String::as_str) == Some("true");
    let (gone, compacted) = {
        let store = shared.store();
        (from != 0 && (from < store.compacted || store.changes(call.target.kind, from).is_none()), store.compacted)
    };
    if gone && shared.control().gone_by_http {
        return refuse(&too_old(from, compacted));
    }
    let (lines, receiver) = mpsc::channel(256);
    let watch = Watch {
        shared: Arc::clone(shared),
        kind: call.target.kind,
        selector: Selector::of(call),
        bookmarks: call.query.get("allowWatchBookmarks").map(String::as_str) == Some("true"),
        limit: Duration::from_secs(call.query.get("timeoutSeconds").and_then(|text| text.parse().ok()).unwrap_or(1800)),
        lines,
        // Before the answer: what happens once the client has it must not be missed.
        epoch: shared.control().epoch,
        versions: shared.versions.subscribe(),
        control: shared.control.subscribe(),
        injected: shared.injected.subscribe(),
    };
    tokio::spawn(async move {
        let _ = if gone {
            watch.send(line("ERROR", &too_old(from, compacted).status())).await
        } else {
            watch.run(from, initial || from == 0).await
        };
    });
    let stream = ReceiverStream::new(receiver).map(|line| line.map(Frame::data));
    let mut response = Response::new(BodyExt::boxed(StreamBody::new(stream)));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

struct Watch {
    shared: Arc<Shared>,
    kind: usize,
    selector: Selector,
    bookmarks: bool,
    limit: Duration,
    lines: mpsc::Sender<std::io::Result<Bytes>>,
    epoch: u64,
    versions: watch::Receiver<u64>,
    control: watch::Receiver<Control>,
    injected: broadcast::Receiver<(Option<usize>, String)>,
}

/// The reader has gone.
struct Left;

impl Watch {
    async fn send(&self, line: Bytes) -> std::result::Result<(), Left> {
        self.lines.send(Ok(line)).await.map_err(|_| Left)
    }

    async fn run(mut self, from: u64, initial: bool) -> std::result::Result<(), Left> {
        let mut sent = from;
        if initial {
            let (objects, version) = {
                let store = self.shared.store();
                let matching = store
                    .list(self.kind, None)
                    .map(|(_, object)| object)
                    .filter(|object| self.selector.matches(object));
                (matching.map(|object| line("ADDED", object)).collect::<Vec<_>>(), store.version)
            };
            for object in objects {
                self.send(object).await?;
            }
            sent = version;
            if self.bookmarks {
                self.send(bookmark(self.kind, version, true)).await?;
            }
        }
        let end = tokio::time::sleep(self.limit);
        tokio::pin!(end);
        loop {
            let settings = self.control.borrow_and_update().clone();
            if settings.epoch != self.epoch {
                return Ok(());
            }
            self.versions.borrow_and_update();
            if !settings.stalled {
                let (changes, version) = {
                    let store = self.shared.store();
                    let changes = store.changes(self.kind, sent).map(|changes| {
                        let matching = changes.filter(|change| self.selector.matches(&change.object));
                        matching.map(|change| line(change.verb, &change.object)).collect::<Vec<_>>()
                    });
                    (changes, store.version)
                };
                let Some(changes) = changes else {
                    return self.send(line("ERROR", &too_old(sent, version).status())).await;
                };
                for change in changes {
                    self.send(change).await?;
                }
                sent = version;
            }
            tokio::select! {
                changed = self.versions.changed() => if changed.is_err() { return Ok(()) },
                changed = self.control.changed() => if changed.is_err() { return Ok(()) },
                raw = self.injected.recv() => if let Ok((kind, raw)) = raw
                    && kind.is_none_or(|kind| kind == self.kind)
                {
                    self.send(Bytes::from(raw)).await?;
                },
                () = tokio::time::sleep(settings.bookmark_interval), if self.bookmarks && !settings.stalled => {
                    self.send(bookmark(self.kind, sent, false)).await?;
                }
                () = &mut end, if !settings.stalled => return Ok(()),
                () = self.lines.closed() => return Err(Left),
            }
        }
    }
}
