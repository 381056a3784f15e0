//! The agent's main loop.

use std::path::Path;

use thiserror::Error;

use crate::config::ConfigError;

mod core;
mod events;
pub mod state;
mod view;

/// Why the agent ended.
#[derive(Debug, Error)]
pub enum AgentError {
    /// The configuration file is wrong.
    #[error("{0}")]
    Config(ConfigError),
}

/// Runs until it is told to stop.
pub fn run(config: &Path) -> Result<(), AgentError> {
    let _config = crate::config::load(config).map_err(AgentError::Config)?;
    Ok(())
}
