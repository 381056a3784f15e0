//! Tells the owners of Services what is wrong: Warning Events, repeated while it lasts.
//!
//! There is one Event per Service and reason; its name is derived from both, so that a restart goes on with the same.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::core::v1;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::kubernetes::{Access, Snapshot, describe, is_namespace_going};
use super::{Inventory, MANAGER, ObjectName};
use crate::plan::model::Notice;

/// How often an Event is renewed while its cause lasts; servers forget Events after an hour.
const REPEAT: Duration = Duration::from_mins(10);
/// How often the text of one may change.
const CHANGE: Duration = Duration::from_mins(1);
/// Pauses after failures.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_LAST: Duration = Duration::from_mins(2);
/// Limit for one write.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Events per second, and how many may be saved up.
const RATE: f64 = 5.0;
const BURST: f64 = 50.0;
/// Bytes of a message that the server takes.
const MESSAGE_LIMIT: usize = 1024;

/// Keeps the Events of the current notices. Dropping it stops it; Events expire by themselves.
#[derive(Debug)]
pub struct EventWriter {
    notices: watch::Sender<Vec<Notice>>,
    forbidden: watch::Receiver<Option<Notice>>,
    _tasks: JoinSet<()>,
}

impl EventWriter {
    /// Starts a writer without notices. `host` is told as the reporting instance. Must be called inside a runtime.
    pub fn start(access: &Access, snapshots: watch::Receiver<Snapshot>, host: &str) -> Self {
        let notices = watch::Sender::new(Vec::new());
        let (publish, forbidden) = watch::channel(None);
        let worker = Worker {
            access: access.clone(),
            snapshots,
            notices: notices.subscribe(),
            host: host.to_owned(),
            told: BTreeMap::new(),
            forbidden: BTreeMap::new(),
            publish,
            tokens: BURST,
            filled: Instant::now(),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(worker.run());
        Self { notices, forbidden, _tasks: tasks }
    }

    /// That the right to write Events is missing, while it is.
    pub fn notice(&self) -> Option<Notice> {
        self.forbidden.borrow().clone()
    }

    /// Replaces the current notices. Those that concern no Service are not told to the cluster.
    pub fn set(&self, mut notices: Vec<Notice>) {
        notices.retain(|notice| notice.service.is_some());
        notices.sort();
        notices.dedup();
        self.notices.send_if_modified(|current| {
            let changed = *current != notices;
            *current = notices;
            changed
        });
    }
}

/// One Event as it was last told.
struct Told {
    uid: String,
    message: String,
    first: i64,
    count: u32,
    at: Option<Instant>,
    due: Instant,
    retry: Duration,
}

struct Worker {
    access: Access,
    snapshots: watch::Receiver<Snapshot>,
    notices: watch::Receiver<Vec<Notice>>,
    host: String,
    told: BTreeMap<(ObjectName, &'static str), Told>,
    /// Namespaces where the server forbids Events, with its answer.
    forbidden: BTreeMap<String, String>,
    publish: watch::Sender<Option<Notice>>,
    tokens: f64,
    filled: Instant,
}

impl Worker {
    async fn run(mut self) {
        loop {
            let snapshot = self.snapshots.borrow_and_update().clone();
            let notices = self.notices.borrow_and_update().clone();
            let next = if snapshot.live { self.pass(&snapshot.inventory, &notices).await } else { None };
            self.tell_forbidden(&notices);
            let wait = next.map_or(Duration::from_hours(1), |at| at.saturating_duration_since(Instant::now()));
            tokio::select! {
                changed = self.notices.changed() => if changed.is_err() { return },
                changed = self.snapshots.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Tells that Events are forbidden, while there is something to tell.
    fn tell_forbidden(&mut self, notices: &[Notice]) {
        let named: BTreeSet<&str> = notices.iter().filter_map(namespace).collect();
        self.forbidden.retain(|namespace, _| named.contains(namespace.as_str()));
        let current = forbidden(&self.forbidden);
        self.publish.send_if_modified(|notice| {
            let changed = *notice != current;
            *notice = current;
            changed
        });
    }

    /// Tells what is due. Returns when the next is.
    async fn pass(&mut self, inventory: &Inventory, notices: &[Notice]) -> Option<Instant> {
        let mut current: BTreeMap<(ObjectName, &'static str), &Notice> = BTreeMap::new();
        for notice in notices {
            if let Some(service) = &notice.service {
                // Several notices of one reason become one Event; the first in order speaks.
                current.entry((service.clone(), notice.reason)).or_insert(notice);
            }
        }
        let now = Instant::now();
        // What is over is remembered for a while, so that what comes and goes does not become spam.
        self.told.retain(|key, told| current.contains_key(key) || told.at.is_some_and(|at| now < at + REPEAT));
        let mut next: Option<Instant> = None;
        for (key, notice) in current {
            let Some(service) = inventory.services.get(&key.0).filter(|service| !service.uid.is_empty()) else {
                continue;
            };
            let now = Instant::now();
            let told = self.told.entry(key.clone()).or_insert_with(|| Told::new(&service.uid, now));
            if told.uid != service.uid {
                *told = Told::new(&service.uid, now);
            }
            let due = match told.at {
                Some(at) if told.message != notice.message => told.due.min(at + CHANGE),
                _ => told.due,
            };
            let now = Instant::now();
            self.tokens = (self.tokens + now.duration_since(self.filled).as_secs_f64() * RATE).min(BURST);
            self.filled = now;
            let due = if due <= now && self.tokens < 1.0 { now + Duration::from_secs_f64(1.0 / RATE) } else { due };
            if due > now {
                next = Some(next.map_or(due, |next: Instant| next.min(due)));
                continue;
            }
            self.tokens -= 1.0;
            let event = event(&key.0, key.1, &service.uid, &notice.message, told.first, told.count + 1, &self.host);
            let result = send(&self.access, &key.0, &event).await;
            let now = Instant::now();
            match result {
                Ok(()) => {
                    told.message.clone_from(&notice.message);
                    told.count += 1;
                    told.at = Some(now);
                    told.due = now + REPEAT;
                    told.retry = RETRY_FIRST;
                    self.forbidden.remove(&key.0.namespace);
                }
                Err(error) => {
                    let text = error.as_ref().map_or_else(|| format!("no answer within {REQUEST_TIMEOUT:?}"), describe);
                    tracing::debug!(service = %key.0, reason = key.1, "Event not written: {text}");
                    if is_forbidden(error.as_ref()) && namespace(notice).is_some() {
                        self.forbidden.insert(key.0.namespace.clone(), text);
                    }
                    told.due = now + told.retry;
                    told.at = None;
                    told.retry = (told.retry * 2).min(RETRY_LAST);
                    if !matches!(error, Some(kube::Error::Api(_))) {
                        // Nobody there: the others would only wait as long each.
                        return Some(told.due);
                    }
                }
            }
            next = Some(next.map_or(told.due, |next: Instant| next.min(told.due)));
        }
        next
    }
}

impl Told {
    fn new(uid: &str, now: Instant) -> Self {
        Self {
            uid: uid.to_owned(),
            message: String::new(),
            first: Timestamp::now().as_second(),
            count: 0,
            at: None,
            due: now,
            retry: RETRY_FIRST,
        }
    }
}

/// Where the right to tell of a notice is missed: nobody grants it where no claim is.
fn namespace(notice: &Notice) -> Option<&str> {
    let service = notice.service.as_ref().filter(|_| notice.reason != "NoTenant")?;
    Some(&service.namespace)
}

fn is_forbidden(error: Option<&kube::Error>) -> bool {
    matches!(error, Some(kube::Error::Api(status)) if status.code == 403 && !is_namespace_going(status))
}

/// That Events are forbidden in these namespaces; each with the server's answer.
fn forbidden(namespaces: &BTreeMap<String, String>) -> Option<Notice> {
    let (first, answer) = namespaces.first_key_value()?;
    let more = match namespaces.len() - 1 {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let message = format!(
        "owners of Services are not told of trouble, allow `create` and `patch` of `events` in the namespace {first}{more}: {answer}"
    );
    Some(Notice { reason: "EventsForbidden", service: None, tenant: None, message })
}

fn event(name: &ObjectName, reason: &str, uid: &str, message: &str, first: i64, count: u32, host: &str) -> Value {
    let mut hasher = DefaultHasher::new();
    (uid, reason).hash(&mut hasher);
    let time =
        |second: i64| Timestamp::from_second(second).unwrap_or_default().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    json!({
        "apiVersion": "v1", "kind": "Event",
        "metadata": {"namespace": name.namespace, "name": format!("{}.{:016x}", name.name, hasher.finish())},
        "involvedObject": {"apiVersion": "v1", "kind": "Service", "namespace": name.namespace, "name": name.name, "uid": uid},
        "type": "Warning", "reason": reason, "message": &message[..message.floor_char_boundary(MESSAGE_LIMIT)],
        "source": {"component": MANAGER, "host": host},
        "reportingComponent": MANAGER, "reportingInstance": host,
        "firstTimestamp": time(first), "lastTimestamp": time(Timestamp::now().as_second()), "count": count,
    })
}

/// `None` is no answer in time.
async fn send(access: &Access, name: &ObjectName, event: &Value) -> Result<(), Option<kube::Error>> {
    let api: Api<v1::Event> = Api::namespaced(access.client(), &name.namespace);
    let event_name = event["metadata"]["name"].as_str().unwrap_or_default();
    let parameters = PatchParams::apply(MANAGER).force();
    match tokio::time::timeout(REQUEST_TIMEOUT, api.patch(event_name, &parameters, &Patch::Apply(event))).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(Some(error)),
        Err(_) => Err(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b42_forbidden_events_are_one_notice_that_names_verb_resource_and_namespace() {
        let mut namespaces = BTreeMap::new();
        assert_eq!(forbidden(&namespaces), None);
        namespaces.insert("clusters-a".to_owned(), "the server answered 403: no".to_owned());
        let text = forbidden(&namespaces).unwrap().message;
        for part in ["`create` and `patch` of `events`", "namespace clusters-a:", "403"] {
            assert!(text.contains(part), "{text}");
        }
        namespaces.insert("clusters-b".to_owned(), "no".to_owned());
        assert!(forbidden(&namespaces).unwrap().message.contains("clusters-a and 1 more:"));
    }

    #[test]
    fn an_event_is_found_by_the_uid_of_its_service_and_keeps_its_name() {
        let name = ObjectName::new("clusters-tenant-a", "kube-apiserver");
        let first = event(&name, "PoolExhausted", "u1", "text", 0, 1, "edge1");
        let again = event(&name, "PoolExhausted", "u1", "other text", 0, 2, "edge1");
        let other = event(&name, "AddressConflict", "u1", "text", 0, 1, "edge1");
        assert_eq!(first["metadata"]["name"], again["metadata"]["name"]);
        assert_ne!(first["metadata"]["name"], other["metadata"]["name"]);
        assert_eq!(first["involvedObject"]["uid"], "u1");
        assert_eq!(first["involvedObject"]["namespace"], first["metadata"]["namespace"]);
        assert_eq!(first["type"], "Warning");
        let long = event(&name, "R", "u1", &"é".repeat(2000), 0, 1, "edge1");
        assert!(long["message"].as_str().unwrap().len() <= MESSAGE_LIMIT);
    }
}
