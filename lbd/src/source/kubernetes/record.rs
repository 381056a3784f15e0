//! Keeps the record of addresses in a ConfigMap, beside the one on disk.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::access::Access;
use super::follow::{describe, is_namespace_going};
use super::{NAMESPACE, own_object};
use crate::ipam::Record;
use crate::ipam::record::Found;

/// Limit for an answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a ConfigMap that should not have changed is looked at.
const VERIFY: Duration = Duration::from_mins(1);
/// Pauses after failures.
const RETRY_FIRST: Duration = Duration::from_millis(200);
const RETRY_LAST: Duration = Duration::from_secs(10);
/// Conflicting writes in a row after which that is a failure.
const CONFLICTS: u32 = 10;

/// What is known of the ConfigMap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// What it held when it was first read; `None` = not read yet.
    pub found: Option<Arc<Found>>,
    /// Generation of ours that it holds; 0 = none.
    pub stored: u64,
    /// A generation above ours, written by somebody else.
    pub above: Option<u64>,
    /// Why it cannot be read or written, while it cannot.
    pub failure: Option<Failure>,
    /// Writes so far.
    pub writes: u64,
}

/// Why the ConfigMap is of no use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Reason of its notice.
    pub reason: &'static str,
    /// Text of its notice.
    pub text: String,
    /// Waiting does not help.
    pub lasting: bool,
}

/// Keeps the ConfigMap as it shall be, once it is let. Dropping it stops it.
#[derive(Debug)]
pub struct RecordKeeper {
    enabled: watch::Sender<bool>,
    wanted: watch::Sender<Arc<Record>>,
    kept: watch::Receiver<Kept>,
    _tasks: JoinSet<()>,
}

impl RecordKeeper {
    /// Prepares to keep the record of a hub. Must be called inside a runtime.
    pub fn start(access: &Access, hub: &str) -> Self {
        let enabled = watch::Sender::new(false);
        let wanted = watch::Sender::new(Arc::default());
        let (publish, kept) = watch::channel(Kept::default());
        let worker = Worker {
            access: access.clone(),
            name: own_object(hub),
            enabled: enabled.subscribe(),
            wanted: wanted.subscribe(),
            publish,
            version: None,
            data: BTreeMap::new(),
            verified: None,
            pause: RETRY_FIRST,
            conflicts: 0,
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(worker.run());
        Self { enabled, wanted, kept, _tasks: tasks }
    }

    /// Whether to read and write: only who holds the Lease does. What was read before is read again after a pause.
    pub fn enable(&self, enabled: bool) {
        self.enabled.send_if_modified(|current| std::mem::replace(current, enabled) != enabled);
    }

    /// Replaces what it shall hold.
    pub fn set(&self, record: &Arc<Record>) {
        self.wanted.send_if_modified(|current| {
            let changed = current.generation != record.generation;
            *current = Arc::clone(record);
            changed
        });
    }

    /// What is known of it.
    pub fn kept(&self) -> watch::Receiver<Kept> {
        self.kept.clone()
    }
}

struct Worker {
    access: Access,
    name: String,
    enabled: watch::Receiver<bool>,
    wanted: watch::Receiver<Arc<Record>>,
    publish: watch::Sender<Kept>,
    /// Version of the ConfigMap as last read or written; `None` = there is none.
    version: Option<String>,
    data: BTreeMap<String, String>,
    /// When it was last read or written.
    verified: Option<Instant>,
    pause: Duration,
    conflicts: u32,
}

impl Worker {
    async fn run(mut self) {
        loop {
            if !*self.enabled.borrow_and_update() {
                // Whoever writes meanwhile may know better.
                self.publish.send_if_modified(|kept| {
                    let forgotten = Kept { writes: kept.writes, ..Kept::default() };
                    std::mem::replace(kept, forgotten.clone()) != forgotten
                });
                self.verified = None;
                if self.enabled.changed().await.is_err() {
                    return;
                }
                continue;
            }
            let wait = self.step().await;
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                changed = self.enabled.changed() => if changed.is_err() { return },
                changed = self.wanted.changed(), if wait >= VERIFY / 2 => if changed.is_err() { return },
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut Kept)) {
        self.publish.send_if_modified(|kept| {
            let before = kept.clone();
            change(kept);
            *kept != before
        });
    }

    /// Does what is due. Returns for how long there is nothing more.
    async fn step(&mut self) -> Duration {
        let api: Api<ConfigMap> = Api::namespaced(self.access.client(), NAMESPACE);
        let done = match self.verified {
            Some(at) if at.elapsed() < VERIFY => Ok(()),
            Some(_) | None => self.read(&api).await,
        };
        let done = match done {
            Ok(()) => self.write(&api).await,
            Err(failure) => Err(failure),
        };
        match done {
            Ok(()) => {
                self.pause = RETRY_FIRST;
                self.change(|kept| kept.failure = None);
                self.verified.map_or(Duration::ZERO, |at| VERIFY.saturating_sub(at.elapsed())).max(VERIFY / 2)
            }
            Err(None) => {
                // Somebody else has written: read, and decide anew.
                self.verified = None;
                self.conflicts += 1;
                if self.conflicts > CONFLICTS {
                    let text = "the ConfigMap with the record of addresses changes with every write of ours: another \
                                program writes it";
                    self.fail(Failure { reason: "RecordContended", text: text.to_owned(), lasting: false })
                } else {
                    Duration::from_millis(u64::from(self.conflicts) * 10)
                }
            }
            Err(Some(failure)) => {
                self.verified = None;
                self.fail(failure)
            }
        }
    }

    fn fail(&mut self, failure: Failure) -> Duration {
        tracing::debug!(reason = failure.reason, "{}", failure.text);
        self.change(|kept| kept.failure = Some(failure));
        let pause = self.pause;
        self.pause = (self.pause * 2).min(RETRY_LAST);
        pause
    }

    async fn read(&mut self, api: &Api<ConfigMap>) -> Result<(), Option<Failure>> {
        let found = match timeout(REQUEST_TIMEOUT, api.get_opt(&self.name)).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => return Err(Some(self.failure("get", &error))),
            Err(_) => return Err(Some(no_answer("get"))),
        };
        self.verified = Some(Instant::now());
        let known = self.publish.borrow().found.is_some();
        let Some(found) = found else {
            self.version = None;
            self.data = BTreeMap::new();
            self.change(|kept| {
                kept.found.get_or_insert_default();
                kept.stored = 0;
            });
            return Ok(());
        };
        let version = found.metadata.resource_version.unwrap_or_default();
        let data = found.data.unwrap_or_default();
        if known && self.version.as_ref() == Some(&version) {
            return Ok(());
        }
        let read = Record::from_data(&data);
        let ours = known && data == self.data;
        self.version = Some(version);
        self.data = data;
        let wanted = self.wanted.borrow().generation;
        self.change(|kept| {
            if !known {
                kept.found = Some(Arc::new(read));
                kept.stored = 0;
            } else if !ours {
                kept.stored = 0;
                kept.above = Some(read.record.generation).filter(|above| *above >= wanted);
            }
        });
        Ok(())
    }

    async fn write(&mut self, api: &Api<ConfigMap>) -> Result<(), Option<Failure>> {
        let wanted = Arc::clone(&self.wanted.borrow_and_update());
        let kept = self.publish.borrow().clone();
        // Nothing is written before what is there has been looked at by whoever decides, or from a generation that does not count.
        if wanted.generation == 0 || kept.stored == wanted.generation {
            return Ok(());
        }
        if kept.above.is_some_and(|above| above >= wanted.generation)
            || kept.found.as_ref().is_some_and(|found| found.record.generation > wanted.generation)
        {
            return Ok(());
        }
        let data = match wanted.to_data() {
            Ok(data) => data,
            Err(error) => {
                let failure = Failure { reason: "RecordTooLarge", text: error.to_string(), lasting: true };
                return Err(Some(failure));
            }
        };
        if self.version.is_some() && data == self.data {
            self.change(|kept| kept.stored = wanted.generation);
            return Ok(());
        }
        let metadata = ObjectMeta {
            name: Some(self.name.clone()),
            resource_version: self.version.clone(),
            ..ObjectMeta::default()
        };
        let object = ConfigMap { metadata, data: Some(data.clone()), ..ConfigMap::default() };
        let parameters = PostParams::default();
        let (verb, answer) = if self.version.is_some() {
            ("update", timeout(REQUEST_TIMEOUT, api.replace(&self.name, &parameters, &object)).await)
        } else {
            ("create", timeout(REQUEST_TIMEOUT, api.create(&parameters, &object)).await)
        };
        match answer {
            Ok(Ok(answer)) => {
                self.version = answer.metadata.resource_version;
                self.data = data;
                self.verified = Some(Instant::now());
                self.conflicts = 0;
                self.change(|kept| {
                    kept.stored = wanted.generation;
                    kept.above = None;
                    kept.writes += 1;
                });
                Ok(())
            }
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => Err(None),
            Ok(Err(kube::Error::Api(status))) if status.code == 404 && self.version.is_some() => Err(None),
            Ok(Err(error)) => Err(Some(self.failure(verb, &error))),
            Err(_) => Err(Some(no_answer(verb))),
        }
    }

    fn failure(&self, verb: &str, error: &kube::Error) -> Failure {
        let text = describe(error);
        let kube::Error::Api(status) = error else {
            return Failure { reason: "RecordNotSaved", text: format!("{verb} configmaps: {text}"), lasting: false };
        };
        let (reason, remedy) = match status.code {
            403 if is_namespace_going(status) => {
                ("RecordForbidden", format!("make the namespace {NAMESPACE} again once it is gone, see `lbd rbac`"))
            }
            403 => ("RecordForbidden", format!("allow {verb} of configmaps in namespace {NAMESPACE}, see `lbd rbac`")),
            404 => ("RecordForbidden", format!("make the namespace {NAMESPACE}, see `lbd rbac`")),
            401 => {
                let _ = self.access.reread();
                return Failure {
                    reason: "RecordNotSaved",
                    text: format!("{verb} configmaps: {text}"),
                    lasting: false,
                };
            }
            _ => {
                return Failure {
                    reason: "RecordNotSaved",
                    text: format!("{verb} configmaps: {text}"),
                    lasting: false,
                };
            }
        };
        let text = format!("the record of addresses is kept on disk only: {text}; {remedy}");
        Failure { reason, text, lasting: true }
    }
}

fn no_answer(verb: &str) -> Failure {
    let text = format!("{verb} configmaps: no answer within {REQUEST_TIMEOUT:?}");
    Failure { reason: "RecordNotSaved", text, lasting: false }
}
