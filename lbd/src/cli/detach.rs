//! `lbd detach`.

use std::fmt::Write;
use std::path::Path;

use super::{DONE, FAILED, USAGE, complain, say};
use crate::lbctl::Place;
use crate::source::kubernetes::Access;
use crate::source::status;

/// Takes our entries out of the statuses of Services.
fn release(path: &Path) -> u8 {
    let config = match crate::config::load(path) {
        Ok(config) => config,
        Err(error) => return complain(&error.report(), USAGE),
    };
    let Some(settings) = &config.hub.kubernetes else {
        return complain("there is no cluster in the configuration: no status to clear", USAGE);
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return complain(&format!("cannot start: {error}"), FAILED),
    };
    let released = runtime.block_on(async {
        let access = Access::open(settings).map_err(|error| error.to_string())?;
        status::release_all(&access, &config).await
    });
    match released {
        Ok((count, failed)) => {
            say(&format!("cleared the status of {count} Services\n"));
            for (service, why) in &failed {
                complain(&format!("the status of {service} is not cleared: {why}"), FAILED);
            }
            if failed.is_empty() { DONE } else { FAILED }
        }
        Err(error) => complain(&error, FAILED),
    }
}

/// Removes everything of lbd's from the kernel, and if asked to, our entries from the statuses of Services.
pub(super) fn run(config: Option<&Path>, bpffs: Option<&Path>, statuses: bool) -> u8 {
    // First this: an address that leads nowhere is worse than none.
    let released = match config.filter(|_| statuses) {
        Some(path) => release(path),
        None => DONE,
    };
    if released == USAGE {
        return released;
    }
    let detached = detach(config, bpffs);
    if detached == DONE { released } else { detached }
}

fn detach(config: Option<&Path>, bpffs: Option<&Path>) -> u8 {
    let place = match config {
        Some(path) => match crate::config::load(path) {
            Ok(config) => config.datapath.bpffs,
            Err(error) => return complain(&error.report(), USAGE),
        },
        None => bpffs.map_or_else(|| Place::default().bpffs, Path::to_path_buf),
    };
    // Whoever names a place means the datapath there, and not whatever is on the interfaces.
    if (config.is_some() || bpffs.is_some())
        && let Err(error) = crate::dataplane::check_bpffs(&place)
    {
        return complain(&error.to_string(), FAILED);
    }
    if crate::dataplane::is_busy(&place) {
        complain("an agent is running: stop it, or nothing is served until it is restarted", DONE);
    }
    match crate::dataplane::detach(&place) {
        Ok(detached) if detached.is_empty() => say("nothing to detach\n"),
        Ok(detached) => {
            let mut text = String::new();
            // Writing to a string does not fail.
            for interface in &detached.interfaces {
                let _ = writeln!(text, "detached from {interface}");
            }
            let _ = writeln!(text, "removed {} pinned maps", detached.maps);
            if detached.neighbours > 0 {
                let _ = writeln!(text, "released {} neighbour entries", detached.neighbours);
            }
            if detached.groups > 0 {
                let _ = writeln!(text, "left {} multicast groups", detached.groups);
            }
            for interface in &detached.offloads {
                let _ = writeln!(text, "turned rx-vlan offload of {interface} on again");
            }
            say(&text)
        }
        Err(error) => complain(&error.to_string(), FAILED),
    }
}
