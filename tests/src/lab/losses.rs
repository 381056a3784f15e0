//! What the lab's own queues lost.
//!
//! The ring behind a veth holds 256 frames, 25 ms of a flood: where the CPU that empties it stands still for longer, as CPUs of virtual
//! machines do, frames are lost that lbd has never seen, or has sent. The kernel counts each of them.
use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context as _, Result, bail, ensure};

use super::{DatagramReport, Lab, Namespace, output};

impl Lab {
    /// Frames and datagrams that queues of the lab had no room for since it was made, by place; places without a loss are left out.
    pub fn losses(&self) -> Result<BTreeMap<String, u64>> {
        let mut losses = BTreeMap::new();
        for namespace in self.namespaces() {
            for (place, count) in rings(&namespace)?.into_iter().chain(waiting(&namespace)?).chain(sockets(&namespace)?)
            {
                if count > 0 {
                    losses.insert(format!("{}: {place}", namespace.name()), count);
                }
            }
        }
        Ok(losses)
    }

    /// Runs a round of datagrams beside a flood; all of them must come back.
    ///
    /// Nobody sends a datagram again. A round in which some are missing, and the lab itself lost as many frames or more, shows nothing:
    /// it is run again. One that misses more than the lab lost fails, and so do five rounds of which none showed anything.
    pub fn all_come_back(&self, mut round: impl FnMut() -> Result<DatagramReport>) -> Result<()> {
        const ROUNDS: usize = 5;
        let mut last = String::new();
        for number in 1..=ROUNDS {
            let before = self.losses()?;
            let report = round()?;
            let Err(error) = report.assert_whole() else { return Ok(()) };
            let mut lost = self.losses()?;
            for (place, count) in &mut lost {
                *count -= before.get(place).copied().unwrap_or_default();
            }
            lost.retain(|_, count| *count > 0);
            let missing = report.sent.saturating_sub(report.received);
            let excused = report.wrong == 0 && report.refused == 0 && missing <= lost.values().sum();
            ensure!(excused, "{error}; the lab itself lost {lost:?}");
            println!("round {number} shows nothing: {missing} datagrams are missing, the lab itself lost {lost:?}");
            last = error.to_string();
        }
        bail!("in each of {ROUNDS} rounds the lab itself lost frames; in the last one {last}")
    }
}

/// What found no room in the rings behind the interfaces; the sender counts it, also what XDP sends.
fn rings(namespace: &Namespace) -> Result<Vec<(String, u64)>> {
    let mut counts = Vec::new();
    for entry in fs::read_dir(namespace.outside("/sys/class/net")).context("cannot list the interfaces")? {
        let entry = entry?;
        let path = entry.path().join("statistics/tx_dropped");
        // An interface may have gone, or have another name, by now.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let count = text.trim().parse().with_context(|| format!("{} is no number: {text}", path.display()))?;
        counts.push((format!("ring of {}", entry.file_name().display()), count));
    }
    Ok(counts)
}

/// What found no room where frames wait for room in a ring.
fn waiting(namespace: &Namespace) -> Result<Vec<(String, u64)>> {
    let text = output(namespace.command("tc").args(["-statistics", "-json", "qdisc", "show"]))?;
    let queues: Vec<serde_json::Value> = serde_json::from_str(&text).with_context(|| format!("tc printed {text}"))?;
    let drops = queues.iter().filter_map(|queue| Some((queue["dev"].as_str()?, queue["drops"].as_u64()?)));
    Ok(drops.map(|(interface, drops)| (format!("queue of {interface}"), drops)).collect())
}

/// What found no room in the buffers of receivers of datagrams; what found none at the sender's is among what waited.
fn sockets(namespace: &Namespace) -> Result<Vec<(String, u64)>> {
    let read = |file: &str| {
        let path = format!("/proc/{}/net/{file}", namespace.pid());
        fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
    };
    // Two lines a protocol for IPv4, names and numbers; one line a number for IPv6.
    let (four, six) = (read("snmp")?, read("snmp6").unwrap_or_default());
    let mut udp = four.lines().filter_map(|line| line.strip_prefix("Udp:")).map(str::split_whitespace);
    let (names, numbers) = udp.next().zip(udp.next()).context("the kernel counts no datagrams")?;
    let six = six.lines().filter_map(|line| line.strip_prefix("Udp6")?.split_once(char::is_whitespace));
    Ok(names
        .zip(numbers)
        .map(|(name, number)| ("IPv4", name, number))
        .chain(six.map(|(name, number)| ("IPv6", name, number.trim())))
        .filter(|(_, name, _)| *name == "RcvbufErrors")
        .filter_map(|(family, _, number)| Some((format!("buffers for UDP over {family}"), number.parse().ok()?)))
        .collect())
}
