//! What the suites ask again and again.
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};

use super::Agent;

/// Whether numbers and pauses shall be small: always, but with `LBD_TEST_FULL=1`, which makes these suites half an hour longer.
pub fn fast() -> bool {
    std::env::var_os("LBD_TEST_FAST").is_some() || std::env::var_os("LBD_TEST_FULL").is_none()
}

/// Milliseconds since the epoch.
pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// What a tenant had lost at one time, to see later that it has lost nothing since.
#[derive(Debug)]
pub struct Untouched {
    tenant: String,
    losses: BTreeMap<String, u64>,
}

impl Untouched {
    /// From now on.
    pub fn since_now(agent: &Agent, tenant: &str) -> Result<Self> {
        Ok(Self { tenant: tenant.to_owned(), losses: agent.losses(Some(tenant))? })
    }

    /// Fails if a packet of the tenant was dropped or refused since.
    pub fn check(&self, agent: &Agent) -> Result<()> {
        let now = agent.losses(Some(&self.tenant))?;
        ensure!(now == self.losses, "tenant {} has lost packets: {:?}, before {:?}", self.tenant, now, self.losses);
        Ok(())
    }
}
