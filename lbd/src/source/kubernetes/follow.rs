//! Follows one kind of object: list, then watch, for ever.
//!
//! Written out rather than taken from a library, because what matters here is when the stream is known to be alive
//! (opened, event, bookmark), that 410 is understood in both its forms, and that every request is bounded in time.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::time::{Duration, Instant};

use backon::BackoffBuilder;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::Status;
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::Timing;
use super::access::Access;
use super::convert::{self, Namespace, Slice};
use crate::source::{Node, ObjectName, Service};

/// The kinds that lbd follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Services,
    Nodes,
    Namespaces,
    EndpointSlices,
}

impl Kind {
    pub(super) const ALL: [Self; 4] = [Self::Services, Self::Nodes, Self::Namespaces, Self::EndpointSlices];

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Services => "services",
            Self::Nodes => "nodes",
            Self::Namespaces => "namespaces",
            Self::EndpointSlices => "endpointslices.discovery.k8s.io",
        }
    }
}

/// A converted object.
#[derive(Debug)]
pub(super) enum Item {
    Service(ObjectName, Box<Service>),
    Node(String, Node),
    Namespace(String, Namespace),
    Slice(ObjectName, Slice),
}

/// What a follower tells.
#[derive(Debug)]
pub(super) enum Update {
    /// Everything there is of the kind.
    Listed(Kind, Vec<Item>),
    Set(Item),
    Gone(Item),
    /// The watch is open and says that nothing was missed.
    Alive(Kind),
    /// The list or watch failed.
    Failed {
        kind: Kind,
        error: String,
        forbidden: bool,
    },
}

pub(super) trait Followed:
    Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + Sync + 'static
{
    const KIND: Kind;
    fn convert(self, annotations: &BTreeSet<String>) -> Option<Item>;
}

impl Followed for v1::Service {
    const KIND: Kind = Kind::Services;
    fn convert(self, annotations: &BTreeSet<String>) -> Option<Item> {
        convert::service(self, annotations).map(|(name, service)| Item::Service(name, Box::new(service)))
    }
}

impl Followed for v1::Node {
    const KIND: Kind = Kind::Nodes;
    fn convert(self, _: &BTreeSet<String>) -> Option<Item> {
        convert::node(self).map(|(name, node)| Item::Node(name, node))
    }
}

impl Followed for v1::Namespace {
    const KIND: Kind = Kind::Namespaces;
    fn convert(self, _: &BTreeSet<String>) -> Option<Item> {
        convert::namespace(self).map(|(name, namespace)| Item::Namespace(name, namespace))
    }
}

impl Followed for EndpointSlice {
    const KIND: Kind = Kind::EndpointSlices;
    fn convert(self, _: &BTreeSet<String>) -> Option<Item> {
        convert::slice(self).map(|(name, slice)| Item::Slice(name, slice))
    }
}

/// Pauses between attempts: exponential with jitter, from the start again after a success.
struct Pause {
    timing: Timing,
    delays: backon::ExponentialBackoff,
}

impl Pause {
    fn new(timing: Timing) -> Self {
        Self { delays: Self::delays(&timing), timing }
    }

    fn delays(timing: &Timing) -> backon::ExponentialBackoff {
        backon::ExponentialBuilder::default()
            .with_min_delay(timing.retry_first)
            .with_max_delay(timing.retry_last)
            .with_factor(2.0)
            .with_jitter()
            .without_max_times()
            .build()
    }

    fn reset(&mut self) {
        self.delays = Self::delays(&self.timing);
    }

    async fn wait(&mut self, at_least: Option<Duration>) {
        let delay = self.delays.next().unwrap_or(self.timing.retry_last);
        tokio::time::sleep(delay.max(at_least.unwrap_or_default())).await;
    }
}

/// How a watch ended.
enum End {
    /// Go on from this version.
    Resume(String),
    /// Something may have been missed: list again.
    Relist,
    /// Wrong; go on from the version if there is one, after a pause.
    Failed(Failure, Option<String>),
    /// Nobody listens any more.
    Closed,
}

struct Failure {
    text: String,
    code: u16,
    retry_after: Option<Duration>,
}

impl Failure {
    fn of(verb: &str, kind: Kind, error: &kube::Error) -> Self {
        let (code, retry_after) = match error {
            kube::Error::Api(status) => {
                let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
                (status.code, (seconds > 0).then(|| Duration::from_secs(u64::from(seconds.min(60)))))
            }
            _ => (0, None),
        };
        Self { text: format!("{verb} {}: {}", kind.as_str(), describe(error)), code, retry_after }
    }

    fn timeout(verb: &str, kind: Kind, limit: Duration) -> Self {
        let text = format!("{verb} {}: no answer within {limit:?}", kind.as_str());
        Self { text, code: 0, retry_after: None }
    }
}

/// An error with its causes, shortly.
pub(crate) fn describe(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        let message = status.message.trim();
        return format!(
            "the server answered {}: {}",
            status.code,
            if message.is_empty() { &status.reason } else { message }
        );
    }
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    if is_of_clocks(&text) {
        text.push_str("; compare the clocks of this host and of the server, then the certificate");
    }
    text
}

/// Whether something is refused because its namespace is on its way out, and not for want of a right.
pub(crate) fn is_namespace_going(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == 403 && causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
}

/// Whether an error may come from a clock that is wrong.
fn is_of_clocks(text: &str) -> bool {
    let text = text.to_lowercase();
    text.contains("certificate") && ["expired", "not valid yet", "notvalidyet"].iter().any(|word| text.contains(word))
}

/// Whether a version comes before another. Those that are no numbers say nothing.
fn is_older(version: &str, than: &str) -> bool {
    matches!((version.parse::<u64>(), than.parse::<u64>()), (Ok(version), Ok(than)) if version < than)
}

/// The highest version that the server has shown: what is below comes from a server that lags, or from a restored backup.
#[derive(Debug, Default)]
struct Clock {
    highest: Option<String>,
    behind: Option<Instant>,
}

impl Clock {
    fn reached(&mut self, version: &str) {
        if !self.highest.as_ref().is_some_and(|highest| is_older(version, highest)) {
            self.highest = Some(version.to_owned());
        }
    }

    /// Whether a list of this version is not to be believed: it may be after `hold`, for a backup that was restored stays.
    fn went_back(&mut self, version: &str, hold: Duration) -> bool {
        if self.highest.as_ref().is_some_and(|highest| is_older(version, highest)) {
            let since = *self.behind.get_or_insert_with(Instant::now);
            if since.elapsed() < hold {
                return true;
            }
        }
        self.behind = None;
        self.highest = Some(version.to_owned());
        false
    }
}

/// Everything a follower needs.
pub(super) struct Follower {
    pub access: Access,
    pub annotations: watch::Receiver<BTreeSet<String>>,
    pub relist: watch::Receiver<u64>,
    pub updates: mpsc::Sender<Update>,
    pub timing: Timing,
}

impl Follower {
    /// Lists and watches until nobody listens.
    pub(super) async fn run<K: Followed>(mut self) {
        let mut pause = Pause::new(self.timing.clone());
        let mut version: Option<String> = None;
        let mut clients = self.access.subscribe();
        let mut refused_before = false;
        let mut broken: Option<Instant> = None;
        let mut clock = Clock::default();
        loop {
            let api = Api::<K>::all(clients.borrow_and_update().clone());
            // A watch from a version that a restored server has not reached yet would be silent, and nobody would know.
            if let Some(from) = &version
                && self.went_back(&api, from).await
            {
                version = None;
            }
            let from = if let Some(version) = version.take() {
                version
            } else {
                self.relist.mark_unchanged();
                match self.list(&api).await {
                    Ok((_, version)) if clock.went_back(&version, self.timing.hold) => {
                        let text = format!(
                            "list {}: the server went back in time, to version {version}: the last state stays in force until this has \
                             lasted {} s",
                            K::KIND.as_str(),
                            self.timing.hold.as_secs()
                        );
                        let failure = Failure { text, code: 0, retry_after: None };
                        if !self.failed(K::KIND, &mut pause, failure, &mut refused_before).await {
                            return;
                        }
                        continue;
                    }
                    Ok((items, version)) => {
                        broken = None;
                        if self.updates.send(Update::Listed(K::KIND, items)).await.is_err() {
                            return;
                        }
                        version
                    }
                    Err(failure) => {
                        if !self.failed(K::KIND, &mut pause, failure, &mut refused_before).await {
                            return;
                        }
                        continue;
                    }
                }
            };
            let opened = Instant::now();
            match self.watch(&api, from, &mut clients).await {
                End::Resume(next) => {
                    refused_before = false;
                    broken = None;
                    clock.reached(&next);
                    version = Some(next);
                    // A server that closes at once must not be asked in a hot loop.
                    if opened.elapsed() < Duration::from_secs(1) {
                        pause.wait(None).await;
                    } else {
                        pause.reset();
                    }
                }
                End::Relist => {
                    if opened.elapsed() > self.timing.retry_last {
                        pause.reset();
                    }
                    pause.wait(None).await;
                }
                End::Failed(failure, next) => {
                    if opened.elapsed() > self.timing.retry_last {
                        pause.reset();
                        broken = None;
                    }
                    let since = *broken.get_or_insert_with(Instant::now);
                    if let Some(next) = &next {
                        clock.reached(next);
                    }
                    version = next.filter(|_| since.elapsed() < self.timing.resume);
                    if !self.failed(K::KIND, &mut pause, failure, &mut refused_before).await {
                        return;
                    }
                }
                End::Closed => return,
            }
        }
    }

    /// Whether the server has not reached a version that it had reached before.
    async fn went_back<K: Followed>(&self, api: &Api<K>, from: &str) -> bool {
        let parameters = ListParams::default().limit(1);
        // Without an answer, the watch will tell.
        match timeout(self.timing.request, api.list(&parameters)).await {
            Ok(Ok(page)) => page.metadata.resource_version.is_some_and(|version| is_older(&version, from)),
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Tells of a failure and waits. `false` if nobody listens.
    async fn failed(&self, kind: Kind, pause: &mut Pause, failure: Failure, refused_before: &mut bool) -> bool {
        let update = Update::Failed { kind, error: failure.text, forbidden: failure.code == 403 };
        if self.updates.send(update).await.is_err() {
            return false;
        }
        if failure.code == 0 {
            self.access.another_way();
        }
        // Credentials that are refused may have been replaced: look at once, then not more often than the pauses allow.
        if failure.code == 401 && self.access.reread().unwrap_or(false) && !*refused_before {
            *refused_before = true;
            return true;
        }
        pause.wait(failure.retry_after).await;
        true
    }

    async fn list<K: Followed>(&self, api: &Api<K>) -> Result<(Vec<Item>, String), Failure> {
        let annotations = self.annotations.borrow().clone();
        let limit = self.timing.request;
        let mut parameters = ListParams::default().limit(self.timing.page);
        let mut items = Vec::new();
        loop {
            let page = match timeout(limit, api.list(&parameters)).await {
                Ok(Ok(page)) => page,
                Ok(Err(error)) => return Err(Failure::of("list", K::KIND, &error)),
                Err(_) => return Err(Failure::timeout("list", K::KIND, limit)),
            };
            items.extend(page.items.into_iter().filter_map(|object| object.convert(&annotations)));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => return Ok((items, page.metadata.resource_version.unwrap_or_default())),
            }
        }
    }

    async fn watch<K: Followed>(
        &mut self,
        api: &Api<K>,
        from: String,
        clients: &mut watch::Receiver<kube::Client>,
    ) -> End {
        let kind = K::KIND;
        let limit = self.timing.request;
        let parameters = WatchParams::default().timeout(self.timing.watch_seconds);
        let stream = match timeout(limit, api.watch(&parameters, &from)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(kube::Error::Api(status))) if status.code == 410 => return End::Relist,
            Ok(Err(error)) => return End::Failed(Failure::of("watch", kind, &error), Some(from)),
            Err(_) => return End::Failed(Failure::timeout("watch", kind, limit), Some(from)),
        };
        let mut stream = stream.into_stream().boxed();
        if self.updates.send(Update::Alive(kind)).await.is_err() {
            return End::Closed;
        }
        let annotations = self.annotations.borrow().clone();
        // The server ends the watch itself; one that is silent for longer than that is dead.
        let silence = Duration::from_secs(u64::from(self.timing.watch_seconds)) + self.timing.silence;
        let mut version = from;
        loop {
            let event = tokio::select! {
                event = timeout(silence, stream.next()) => event,
                changed = self.relist.changed() => return if changed.is_ok() { End::Relist } else { End::Closed },
                changed = clients.changed() => return if changed.is_ok() { End::Resume(version) } else { End::Closed },
            };
            let update = match event {
                Err(_) => return End::Failed(Failure::timeout("watch", kind, silence), Some(version)),
                Ok(None) => return End::Resume(version),
                Ok(Some(Ok(
                    WatchEvent::Added(ref object) | WatchEvent::Modified(ref object) | WatchEvent::Deleted(ref object),
                ))) if object.resource_version().is_some_and(|next| is_older(&next, &version)) => {
                    let text = format!("watch {}: an event is older than what came before it", kind.as_str());
                    return End::Failed(Failure { text, code: 0, retry_after: None }, None);
                }
                Ok(Some(Ok(WatchEvent::Bookmark(bookmark))))
                    if is_older(&bookmark.metadata.resource_version, &version) =>
                {
                    return End::Relist;
                }
                Ok(Some(Ok(WatchEvent::Bookmark(bookmark)))) => {
                    if !bookmark.metadata.resource_version.is_empty() {
                        version = bookmark.metadata.resource_version;
                    }
                    Some(Update::Alive(kind))
                }
                Ok(Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)))) => {
                    if let Some(next) = object.resource_version() {
                        version = next;
                    }
                    object.convert(&annotations).map(Update::Set)
                }
                Ok(Some(Ok(WatchEvent::Deleted(object)))) => {
                    if let Some(next) = object.resource_version() {
                        version = next;
                    }
                    object.convert(&annotations).map(Update::Gone)
                }
                Ok(Some(Ok(WatchEvent::Error(status)))) if status.code == 410 => return End::Relist,
                Ok(Some(Ok(WatchEvent::Error(status)))) => {
                    let failure = Failure::of("watch", kind, &kube::Error::Api(status));
                    return End::Failed(failure, Some(version));
                }
                // An event that cannot be read may have been any change.
                Ok(Some(Err(error @ kube::Error::SerdeError(_)))) => {
                    return End::Failed(Failure::of("watch", kind, &error), None);
                }
                Ok(Some(Err(error))) => return End::Failed(Failure::of("watch", kind, &error), Some(version)),
            };
            if let Some(update) = update
                && self.updates.send(update).await.is_err()
            {
                return End::Closed;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b36_certificates_that_are_early_or_late_are_a_matter_of_clocks() {
        for text in [
            "invalid peer certificate: Expired",
            "invalid peer certificate: NotValidYet",
            "certificate not valid yet: verification",
        ] {
            assert!(is_of_clocks(text), "{text}");
        }
        assert!(!is_of_clocks("invalid peer certificate: UnknownIssuer") && !is_of_clocks("token expired"));
    }

    #[test]
    fn a_server_that_goes_back_is_not_believed_until_that_lasts() {
        let hold = Duration::from_millis(40);
        let mut clock = Clock::default();
        assert!(!clock.went_back("100", hold));
        clock.reached("120");
        clock.reached("110");
        assert!(clock.went_back("119", hold));
        assert!(!clock.went_back("121", hold), "one that lagged");
        assert!(clock.went_back("50", hold));
        std::thread::sleep(hold);
        assert!(!clock.went_back("51", hold), "a restored backup");
        assert!(!clock.went_back("52", hold));
        clock.reached("opaque");
        assert!(!clock.went_back("10", hold));
    }
}
