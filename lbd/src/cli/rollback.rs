//! `lbd rollback`.

use std::fmt::Write;
use std::path::Path;

use super::{FAILED, LogFormat, USAGE, complain, logging, say};
use crate::dataplane::{self, DataplaneError, RolledBack};
use crate::lbctl::Place;

/// Goes back to the datapath of the previous map ABI, or gives the way back up.
pub(super) fn run(config: Option<&Path>, bpffs: Option<&Path>, discard: bool) -> u8 {
    let place = match config {
        Some(path) => match crate::config::load(path) {
            Ok(config) => config.datapath.bpffs,
            Err(error) => return complain(&error.report(), USAGE),
        },
        None => bpffs.map_or_else(|| Place::default().bpffs, Path::to_path_buf),
    };
    if let Err(message) = logging::start(LogFormat::default(), None) {
        return complain(&message, USAGE);
    }
    let result = if discard {
        dataplane::discard_rollback(&place).map(|abi| format!("the datapath of map ABI {abi} is not kept any longer\n"))
    } else {
        dataplane::rollback(&place).map(|done| report(&done))
    };
    match result {
        Ok(text) => say(&text),
        Err(error @ DataplaneError::Busy { .. }) => complain(&format!("stop the agent first: {error}"), FAILED),
        Err(error) => complain(&error.to_string(), FAILED),
    }
}

fn report(done: &RolledBack) -> String {
    let mut text = String::new();
    for interface in &done.interfaces {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{interface}: the program of map ABI {} is back", done.abi);
    }
    let _ = writeln!(text, "{} connections went along", done.flows);
    if done.lost > 0 {
        let _ = writeln!(text, "{} connections of UDP, IPv6 or tagged segments are lost", done.lost);
    }
    let _ = writeln!(text, "now start the lbd of map ABI {}", done.abi);
    text
}
