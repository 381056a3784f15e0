//! The log on standard error.

use std::io::IsTerminal;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Form of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For reading.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Default filter: our own messages, and warnings of the libraries below.
const DEFAULT: &str = "warn,lbd=info";

/// Starts logging. The error is a message about the filter.
pub(super) fn start(format: LogFormat, filter: Option<&str>) -> Result<(), String> {
    let wanted = filter.map(str::to_owned).or_else(|| std::env::var("RUST_LOG").ok());
    let filter = match wanted.filter(|text| !text.is_empty()) {
        Some(text) => EnvFilter::try_new(&text).map_err(|error| format!("log filter \"{text}\": {error}"))?,
        None => EnvFilter::new(DEFAULT),
    };
    let registry = tracing_subscriber::registry().with(filter);
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    // Fails only if there is a logger already; then that one stays.
    let _ = match format {
        LogFormat::Text => registry.with(layer.with_ansi(std::io::stderr().is_terminal())).try_init(),
        LogFormat::Json => registry.with(layer.json().flatten_event(true)).try_init(),
    };
    Ok(())
}
