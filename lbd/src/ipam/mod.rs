//! Which Services are whose, and which address each of them has.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::config::{Config, SegmentName};
use crate::plan::model::{HostFacts, Notice};
use crate::source::{Inventory, ObjectName};

/// Our load-balancer class.
pub const CLASS: &str = "lbd.tenantedge.io/edge";
/// Annotation with a requested address.
pub const VIP_ANNOTATION: &str = "lbd.tenantedge.io/vip";

/// Addresses given out, as kept on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Grows with every change; of two records the one with the higher generation counts.
    pub generation: u64,
    /// Entries.
    pub entries: Vec<Entry>,
}

/// An address given to a Service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Entry {
    /// Tenant.
    pub tenant: String,
    /// Service.
    pub service: ObjectName,
    /// Address.
    pub address: IpAddr,
    /// Since when no Service uses it, in seconds since the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freed: Option<i64>,
}

/// What each Service has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignments {
    /// Services that a tenant claims or that a frontend of the file names, whether they exist yet or not.
    pub services: BTreeMap<ObjectName, ServiceAssignment>,
    /// What an operator should know.
    pub notices: Vec<Notice>,
}

/// What a Service has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceAssignment {
    /// Tenant by name.
    pub tenant: String,
    /// It is ours: its status is written.
    pub claimed: bool,
    /// The frontend of the file that reserves it.
    pub frontend: Option<String>,
    /// Its addresses, in the order of `spec.ipFamilies`; empty = none (a notice says why).
    pub addresses: Vec<IpAddr>,
}

/// Gives out addresses.
#[derive(Debug, Default)]
pub struct Ipam {
    record: Record,
}

impl Ipam {
    /// Starts from the record of an earlier life, or from none.
    pub fn new(record: Record) -> Self {
        Self { record }
    }

    /// To be kept on disk.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Decides about every Service. `taken` are addresses that another station answers for; `now` is in seconds since the epoch.
    pub fn assign(
        &mut self,
        config: &Config,
        inventory: &Inventory,
        host: &HostFacts,
        taken: &BTreeSet<(SegmentName, IpAddr)>,
        now: i64,
    ) -> Assignments {
        let _ = (config, inventory, host, taken, now);
        Assignments::default()
    }
}
