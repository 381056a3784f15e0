//! The agent without a kernel: what it would do for its cluster. For tests and benchmarks.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::core::{Core, Inputs, Maps};
use super::hub::Hub;
pub use super::hub::Patience;
use super::state::{INVENTORY, StateDirectory};
use super::{AgentError, SavedInventory, changed_if, restore};
use crate::api::types::{ClusterStatus, Event, LeaseStatus, ReloadRequest, SourceStatus};
use crate::config::Config;
use crate::dataplane::{Applied, Attached, DataplaneError};
use crate::flows::Flow;
use crate::ipam::{Assignments, Record};
use crate::plan::model::{HostFacts, Notice, Pinned, Plan};
use crate::source::ObjectName;

/// Maps that hold a plan and nothing else.
#[derive(Debug, Default)]
struct Paper {
    plans: Vec<Plan>,
}

impl Maps for Paper {
    fn apply(&mut self, plan: &Arc<Plan>) -> Result<Applied, DataplaneError> {
        self.plans.push((**plan).clone());
        Ok(Applied::default())
    }

    fn reconfigure(&mut self, _: &Config) -> Result<(), DataplaneError> {
        Ok(())
    }

    fn attached(&self) -> Vec<Attached> {
        Vec::new()
    }

    fn pinned(&self) -> Pinned {
        Pinned::default()
    }

    fn count_flows(&self, _: &Config, _: &(dyn Fn(&Flow) -> bool + Sync)) -> Result<u64, DataplaneError> {
        Ok(0)
    }
}

/// An agent without a kernel. It does something only while it is stepped; dropping it is a crash.
pub struct DryAgent {
    core: Core<Paper>,
    hub: Hub,
    inputs: Inputs,
    state: Arc<StateDirectory>,
}

impl std::fmt::Debug for DryAgent {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("DryAgent").field("role", &self.inputs.role).finish_non_exhaustive()
    }
}

impl DryAgent {
    /// Starts from what is in the state directory. Must be called inside a runtime.
    pub async fn start(config: Config, host: HostFacts, patience: Patience) -> Result<Self, AgentError> {
        let state = Arc::new(StateDirectory::open(&config.state_dir)?);
        let saved = restore(&state);
        let restored = saved.as_ref().map(|saved| (saved.synced, &saved.inventory));
        let hub = Hub::start(&config, &state, restored, patience).await?;
        let core = Core::new(config, Paper::default(), Arc::clone(&state), Timestamp::now());
        let mut agent = Self { core, hub, inputs: Inputs { host, ..Inputs::default() }, state };
        agent.hub.take(&mut agent.inputs);
        agent.round();
        Ok(agent)
    }

    fn round(&mut self) {
        self.core.reconcile(&self.inputs, Timestamp::now());
        if self.core.may_act(&self.inputs) {
            self.hub.write(&self.core, &self.inputs);
        }
    }

    /// Waits for news, for a while at most, and acts on it.
    pub async fn step(&mut self, limit: Duration) {
        tokio::select! {
            () = changed_if(self.hub.snapshots.as_mut()) => {}
            () = changed_if(self.hub.notices.as_mut()) => {}
            () = changed_if(self.hub.standing.as_mut()) => {}
            () = changed_if(self.hub.kept.as_mut()) => {}
            () = tokio::time::sleep(limit) => {}
        }
        if self.hub.take(&mut self.inputs) {
            self.round();
        }
        self.hub.flush(self.core.saved());
    }

    /// Steps until something is so. Returns whether it came to be.
    pub async fn until(&mut self, limit: Duration, condition: impl Fn(&Self) -> bool) -> bool {
        let end = Instant::now() + limit;
        while !condition(self) {
            if Instant::now() > end {
                return false;
            }
            self.step(Duration::from_millis(20)).await;
        }
        true
    }

    /// Steps for a while.
    pub async fn run_for(&mut self, time: Duration) {
        self.until(time, |_| false).await;
    }

    /// Keeps what a restart goes on from, as the agent does every few seconds.
    pub fn save(&self) -> Result<(), AgentError> {
        if let Some(inventory) = self.hub.live() {
            let synced = Timestamp::now().as_second();
            self.state.save(INVENTORY, &SavedInventory { synced, inventory: &*inventory })?;
        }
        Ok(())
    }

    /// Everything that has been put into the maps, oldest first.
    pub fn plans(&self) -> &[Plan] {
        &self.core.maps.plans
    }

    /// What is in the maps.
    pub fn plan(&self) -> &Plan {
        &self.core.plan
    }

    /// What Services have.
    pub fn assignments(&self) -> &Assignments {
        &self.core.assignments
    }

    /// The record of addresses.
    pub fn record(&self) -> &Record {
        self.core.ipam.record()
    }

    /// What is wrong now.
    pub fn notices(&self) -> Vec<Notice> {
        self.core.events.lasting().iter().cloned().collect()
    }

    /// What happened.
    pub fn events(&self) -> Vec<Event> {
        self.core.events.all()
    }

    /// The Lease, as `lbctl status` shows it.
    pub fn lease(&self) -> Option<LeaseStatus> {
        self.hub.lease()
    }

    /// The cluster, as `lbctl status` shows it.
    pub fn cluster(&self) -> Option<ClusterStatus> {
        self.hub.cluster()
    }

    /// The source, as `lbctl status` shows it.
    pub fn sources(&self) -> Vec<SourceStatus> {
        self.hub.status()
    }

    /// Writes of statuses so far.
    pub fn status_writes(&self) -> u64 {
        self.hub.counts().0
    }

    /// `lbctl reload --accept-loss`; returns the outcome.
    pub fn reload(&mut self, path: &Path) -> String {
        let request = ReloadRequest { accept_loss: true, ..ReloadRequest::default() };
        let reply = self.core.reload(path, request, &self.inputs, Timestamp::now());
        self.hub.configure(&self.core.config);
        self.hub.write(&self.core, &self.inputs);
        reply.error.unwrap_or(reply.outcome)
    }

    /// `lbctl adopt`.
    pub fn adopt(&mut self, service: &ObjectName) -> Result<String, String> {
        let uid = self.core.adopt(service, &self.inputs, Timestamp::now())?;
        self.round();
        Ok(uid)
    }

    /// `lbctl accept-cluster`.
    pub fn accept_cluster(&mut self) -> Result<String, String> {
        let uid = self.hub.accept_cluster()?;
        self.hub.take(&mut self.inputs);
        self.round();
        Ok(uid)
    }
}
