//! The hub's cluster, if there is one: what comes from it and what is written back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use tokio::sync::watch;

use super::core::{Core, Inputs, Maps, leaves_out};
use crate::api::types::SourceStatus;
use crate::config::Config;
use crate::plan::model::Notice;
use crate::source::events::EventWriter;
use crate::source::kubernetes::{KubernetesSource, Options, Snapshot, SourceError};
use crate::source::status::{DesiredStatus, StatusWriter};
use crate::source::{Condition, Inventory, ObjectName};

/// Source and writers of a cluster; all absent when the configuration file is all there is.
pub(super) struct Hub {
    name: String,
    file: String,
    /// What the cluster holds.
    pub(super) snapshots: Option<watch::Receiver<Snapshot>>,
    /// What can't be written to it.
    pub(super) notices: Option<watch::Receiver<Vec<Notice>>>,
    parts: Option<Parts>,
    /// When the restored inventory was current.
    restored: Option<i64>,
    nothing: Arc<Inventory>,
}

struct Parts {
    source: KubernetesSource,
    status: StatusWriter,
    events: EventWriter,
}

impl Hub {
    /// Starts to follow the cluster, from the inventory of an earlier life. Fails for what is wrong with the kubeconfig only.
    pub(super) async fn start(config: &Config, restored: Option<(i64, &Inventory)>) -> Result<Self, SourceError> {
        let mut hub = Self {
            name: config.hub.name.clone(),
            file: config.origin.file.clone(),
            snapshots: None,
            notices: None,
            parts: None,
            restored: restored.map(|(synced, _)| synced),
            nothing: Arc::new(Inventory { complete: true, ..Inventory::default() }),
        };
        if let Some(settings) = &config.hub.kubernetes {
            let options = Options {
                restored: restored.map(|(_, inventory)| inventory.clone()),
                annotations: annotations(config),
                ..Options::default()
            };
            let (source, snapshots) = KubernetesSource::start(settings, options).await?;
            let status = StatusWriter::start(source.access(), snapshots.clone());
            let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            let events = EventWriter::start(source.access(), snapshots.clone(), host.trim());
            hub.notices = Some(status.notices());
            hub.snapshots = Some(snapshots);
            hub.parts = Some(Parts { source, status, events });
        }
        Ok(hub)
    }

    /// What is known of the cluster now.
    pub(super) fn inventory(&mut self) -> Arc<Inventory> {
        match &mut self.snapshots {
            Some(snapshots) => Arc::clone(&snapshots.borrow_and_update().inventory),
            None => Arc::clone(&self.nothing),
        }
    }

    /// The inventory, if it comes from the cluster in this life.
    pub(super) fn live(&self) -> Option<Arc<Inventory>> {
        let snapshot = self.snapshots.as_ref()?.borrow();
        snapshot.live.then(|| Arc::clone(&snapshot.inventory))
    }

    pub(super) fn take_notices(&mut self) -> Vec<Notice> {
        self.notices.as_mut().map(|notices| notices.borrow_and_update().clone()).unwrap_or_default()
    }

    /// Takes over what a reload may change.
    pub(super) fn configure(&self, config: &Config) {
        if let Some(parts) = &self.parts {
            parts.source.set_annotations(annotations(config));
        }
    }

    /// Writes what became of the Services.
    pub(super) fn write<M: Maps>(&self, core: &Core<M>, inputs: &Inputs) {
        if let Some(parts) = &self.parts {
            parts.status.set(desired(core, &inputs.inventory));
            parts.events.set(core.events.lasting().iter().cloned().collect());
        }
    }

    /// State and age of the sources.
    pub(super) fn status(&self) -> Vec<SourceStatus> {
        let Some(snapshots) = &self.snapshots else {
            let file = SourceStatus {
                name: format!("file {}", self.file),
                state: "synced".to_owned(),
                age_s: None,
                error: None,
            };
            return vec![file];
        };
        let snapshot = snapshots.borrow();
        let since = |then: i64| u64::try_from(Timestamp::now().as_second().saturating_sub(then)).unwrap_or_default();
        let (state, age_s) = match (snapshot.live, snapshot.connected) {
            (true, true) => ("synced", Some(0)),
            (true, false) => ("away", snapshot.last_sync.map(|then| then.elapsed().as_secs())),
            (false, _) if snapshot.inventory.complete => ("restored", self.restored.map(since)),
            (false, _) => ("waiting", None),
        };
        let failure = self.parts.as_ref().and_then(|parts| parts.source.access().failure());
        vec![SourceStatus {
            name: format!("kubernetes {}", self.name),
            state: state.to_owned(),
            age_s,
            error: snapshot.last_error.clone().or(failure),
        }]
    }

    /// Writes to the cluster and failures of it since the start.
    pub(super) fn counts(&self) -> (u64, u64) {
        let writes = self.parts.as_ref().map_or(0, |parts| parts.status.writes());
        let failures = self.snapshots.as_ref().map_or(0, |snapshots| snapshots.borrow().failures);
        (writes, failures)
    }
}

fn annotations(config: &Config) -> BTreeSet<String> {
    config.address_annotations.iter().cloned().collect()
}

/// The status of every Service that is ours.
fn desired<M: Maps>(core: &Core<M>, inventory: &Inventory) -> BTreeMap<ObjectName, DesiredStatus> {
    let programmed: BTreeSet<&ObjectName> =
        core.plan.frontends.values().filter_map(|frontend| frontend.service.as_ref()).collect();
    let notices = core.notices_by_service();
    let mut all = BTreeMap::new();
    for (name, assignment) in core.assignments.services.iter().filter(|(_, assignment)| assignment.claimed) {
        let Some(service) = inventory.services.get(name) else { continue };
        let Some(tenant) = core.config.tenant(&assignment.tenant) else { continue };
        let settings = assignment
            .frontend
            .as_ref()
            .and_then(|frontend| tenant.frontend(frontend))
            .map_or(&tenant.settings, |frontend| &frontend.settings);
        let notice = notices.get(name);
        let no = |reason: &str, message: &str| Condition {
            status: Some(false),
            reason: notice.map_or(reason, |notice| notice.reason).to_owned(),
            message: notice.map_or(message, |notice| notice.message.as_str()).to_owned(),
            since: 0,
        };
        let condition = if assignment.addresses.is_empty() {
            no("NoAddress", "it has no address")
        } else if !core.in_maps {
            Condition {
                status: Some(false),
                reason: "ApplyFailed".to_owned(),
                message: "the datapath could not be changed yet".to_owned(),
                since: 0,
            }
        } else if notice.is_some_and(|notice| leaves_out(notice)) {
            no("NotServed", "not all of it is served")
        } else if programmed.contains(name) {
            Condition {
                status: Some(true),
                reason: "Programmed".to_owned(),
                message: "its ports are in the datapath".to_owned(),
                since: 0,
            }
        } else {
            no("NoPort", "none of its ports is forwarded")
        };
        let desired = DesiredStatus {
            uid: service.uid.clone(),
            addresses: assignment.addresses.clone(),
            ip_mode: settings.ip_mode,
            programmed: Some(condition),
        };
        all.insert(name.clone(), desired);
    }
    all
}
