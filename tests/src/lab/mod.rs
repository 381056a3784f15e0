//! The lab: networks of real kernels in namespaces, on one machine, that vanish with the process that made them.
//!
//! Every namespace is held by a child process that dies with us (even by SIGKILL), and has its own mount namespace with its own
//! bpffs: with the last holder go the interfaces, the pins and the XDP programs. Nothing has a name in the machine's own
//! namespaces, so labs never meet each other.
//!
//! Offloads are off on every interface (a checksum that nobody computed would otherwise stay invisible), and every far end of a cable
//! carries an XDP program that passes everything, because a veth accepts redirected frames only then. Frames wait where the ring of a veth
//! has no room for them; what is lost all the same is counted (`Lab::losses`).

mod agent;
mod api;
mod binaries;
mod bpf;
mod capture;
mod cleanup;
mod clock;
mod craft;
mod frame;
mod losses;
mod namespace;
mod peer;
mod ping;
mod process;
mod raw;
mod spawner;
mod suite;
mod topology;
mod wait;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

pub use agent::Agent;
pub use api::Api;
pub use binaries::binary;
pub use bpf::{XdpMode, XdpProgram, XdpVerdict};
pub use capture::{Capture, Captured, Filter, Keep, Summary, write_pcap};
pub use clock::Clock;
pub use craft::{
    BROADCAST, Way, announcement, icmp_frame, icmp6_frame, protocol_frame, solicited_group, tcp_frame, udp_frame,
};
pub use frame::{Arp, Packet, Ports, arp, describe, packet, ports, verify};
pub use namespace::Namespace;
pub use peer::{
    Answer, Arrived, DatagramReport, Datagrams, Hold, HoldReport, Listener, LoadReport, Peer, Tick, Ticker, Transfer,
    Watch, datagrams, get, get_with, load, load_with, socket, transfer,
};
pub use ping::ping;
pub use process::Process;
pub use raw::{Arrival, PacketSocket, mac_bytes, send_frame, send_frames, tagged};
pub use suite::{Untouched, fast, now_ms};
pub use topology::{Bench, Seed, Trunk};
pub use wait::{eventually, wait_until};

/// A set of namespaces, cables and processes with one life.
#[derive(Debug)]
pub struct Lab {
    name: String,
    directory: PathBuf,
    namespaces: Mutex<BTreeMap<String, Namespace>>,
    /// Attached programs on the far ends of cables, by the near ends.
    links: Mutex<BTreeMap<(String, String), OwnedFd>>,
    serial: AtomicU32,
}

/// One end of a cable, as one wants it.
#[derive(Clone, Debug, Default)]
pub struct Nic {
    /// Addresses with prefix length.
    pub addresses: Vec<String>,
    /// MAC address; `None` = what the kernel picks.
    pub mac: Option<String>,
    /// MTU; `None` = 1500.
    pub mtu: Option<u32>,
    /// Default gateways, at most one a family.
    pub gateways: Vec<String>,
}

impl Nic {
    /// An end with one address.
    pub fn new(address: &str) -> Self {
        Self::default().address(address)
    }

    /// With this address too; one of IPv6 turns IPv6 on at the interface.
    #[must_use]
    pub fn address(mut self, address: &str) -> Self {
        self.addresses.push(address.to_owned());
        self
    }

    /// With this MAC address.
    #[must_use]
    pub fn mac(mut self, mac: &str) -> Self {
        self.mac = Some(mac.to_owned());
        self
    }

    /// With this default gateway.
    #[must_use]
    pub fn gateway(mut self, gateway: &str) -> Self {
        self.gateways.push(gateway.to_owned());
        self
    }

    /// With this MTU.
    #[must_use]
    pub fn mtu(mut self, mtu: u32) -> Self {
        self.mtu = Some(mtu);
        self
    }
}

impl Lab {
    /// An empty lab. Needs root.
    pub fn new(name: &str) -> Result<Self> {
        ensure!(
            nix::unistd::geteuid().is_root(),
            "the lab needs root: it makes network namespaces and loads BPF programs"
        );
        let directory = tempfile::Builder::new()
            .prefix(&format!("lbd-{name}-"))
            .tempdir()
            .context("cannot make the lab's directory")?
            .keep();
        cleanup::register(&directory);
        std::fs::create_dir(directory.join("logs"))?;
        Ok(Self {
            name: name.to_owned(),
            directory,
            namespaces: Mutex::default(),
            links: Mutex::default(),
            serial: AtomicU32::new(0),
        })
    }

    /// Where the lab keeps files: logs, captures, the agent's state.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The namespace of this name; made if there is none yet. `net.ipv4.ip_forward` is 0 in it.
    pub fn namespace(&self, name: &str) -> Result<Namespace> {
        let mut namespaces = lock(&self.namespaces);
        if let Some(namespace) = namespaces.get(name) {
            return Ok(namespace.clone());
        }
        let namespace = Namespace::new(&format!("{}-{name}", self.name), name)?;
        namespace.ip("link set lo up")?;
        namespace.sysctl("net/ipv4/ip_forward", "0")?;
        // No IPv6 chatter: only interfaces that get an IPv6 address have it on.
        namespace.sysctl("net/ipv6/conf/default/accept_dad", "0")?;
        namespace.sysctl("net/ipv6/conf/all/disable_ipv6", "1")?;
        namespace.sysctl("net/ipv6/conf/default/disable_ipv6", "1")?;
        namespaces.insert(name.to_owned(), namespace.clone());
        Ok(namespace)
    }

    /// All namespaces.
    pub fn namespaces(&self) -> Vec<Namespace> {
        lock(&self.namespaces).values().cloned().collect()
    }

    /// A switch: a namespace with a bridge `br0` that learns and floods like any switch.
    pub fn switch(&self, name: &str) -> Result<Namespace> {
        let switch = self.namespace(name)?;
        switch.ip("link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0")?;
        switch.ip("link set br0 up")?;
        Ok(switch)
    }

    /// Plugs an interface of a station into a switch.
    pub fn plug(&self, switch: &Namespace, station: &Namespace, interface: &str, nic: &Nic) -> Result<()> {
        let port = format!("p{}", self.serial.fetch_add(1, Ordering::Relaxed));
        let end = Nic { mtu: nic.mtu, ..Nic::default() };
        self.cable((station, interface, nic), (switch, &port, &end))?;
        switch.ip(&format!("link set {port} master br0"))
    }

    /// A cable between two stations. Both ends have an XDP program that passes everything, but for the first one: that is where lbd
    /// may be attached.
    pub fn cable(&self, near: (&Namespace, &str, &Nic), far: (&Namespace, &str, &Nic)) -> Result<()> {
        let (a, a_name, a_nic) = near;
        let (b, b_name, b_nic) = far;
        output(Command::new("ip").args(["link", "add", a_name, "netns", &a.pid().to_string(), "type", "veth"]).args([
            "peer",
            "name",
            b_name,
            "netns",
            &b.pid().to_string(),
        ]))
        .with_context(|| format!("cannot lay a cable from {}:{a_name} to {}:{b_name}", a.name(), b.name()))?;
        configure(a, a_name, a_nic)?;
        configure(b, b_name, b_nic)?;
        let link = XdpProgram::load("lab_pass", XdpVerdict::Pass)?.attach(b, b_name, XdpMode::Native)?;
        lock(&self.links).insert((a.name().to_owned(), a_name.to_owned()), link);
        Ok(())
    }

    /// Takes the program off the far end of the cable in this interface: what XDP redirects into it is lost from now on.
    pub fn deafen(&self, station: &Namespace, interface: &str) -> Result<()> {
        let near = (station.name().to_owned(), interface.to_owned());
        lock(&self.links).remove(&near).map(drop).with_context(|| format!("no cable in {}:{interface}", station.name()))
    }

    /// Joins an access switch, whose stations know nothing of VLANs, to a trunk switch: frames get the tag on the way to the trunk
    /// and lose it on the way back; frames of other VLANs and without a tag stay outside. A process does it, since kernels
    /// without VLAN devices run the suites too.
    pub fn tagger(&self, trunk: &Namespace, access: &Namespace, vlan: u16) -> Result<Process> {
        let tagger = self.namespace(&format!("tag{vlan}"))?;
        self.plug(access, &tagger, "access", &Nic::default())?;
        self.plug(trunk, &tagger, "trunk", &Nic::default())?;
        let mut command = Command::new(binary("lbd-test-peer")?);
        command.args(["tagger", "--access", "access", "--trunk", "trunk", "--vlan", &vlan.to_string()]);
        let process = self.start(&tagger, &format!("tagger-{vlan}"), command)?;
        process.wait_for("joined", Duration::from_secs(10))?;
        Ok(process)
    }

    /// Starts a program in a namespace; its output goes to files in the lab's directory.
    pub fn start(&self, namespace: &Namespace, name: &str, command: Command) -> Result<Process> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        Process::start(namespace, &format!("{name}-{serial}"), command, &self.directory.join("logs"))
    }

    /// Starts a capture in every namespace.
    pub fn capture(&self) -> Result<Vec<Capture>> {
        self.namespaces().iter().map(|namespace| Capture::start(namespace, Keep::Bad)).collect()
    }

    /// Fails if forwarding is on in that namespace, for either family, for all interfaces or any.
    pub fn assert_no_forwarding(namespace: &Namespace) -> Result<()> {
        let values = namespace.run(|| -> Result<String> {
            let mut on = String::new();
            for family in ["ipv4", "ipv6"] {
                for entry in std::fs::read_dir(format!("/proc/sys/net/{family}/conf"))? {
                    let path = entry?.path().join("forwarding");
                    if std::fs::read_to_string(&path)?.trim() != "0" {
                        let _ = write!(on, "{} ", path.display());
                    }
                }
            }
            if std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward")?.trim() != "0" {
                on.push_str("net.ipv4.ip_forward");
            }
            Ok(on)
        })?;
        ensure!(values.is_empty(), "forwarding is on in {}: {values}", namespace.name());
        Ok(())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.show_logs();
        }
        if std::env::var_os("LBD_LAB_KEEP").is_some() {
            eprintln!("kept: {}", self.directory.display());
            cleanup::forget(&self.directory);
        } else {
            cleanup::remove(&self.directory);
        }
    }
}

impl Lab {
    /// The ends of all logs, to standard error.
    pub fn show_logs(&self) {
        const LINES: usize = 40;
        let Ok(entries) = std::fs::read_dir(self.directory.join("logs")) else { return };
        let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths {
            let text =
                std::fs::read(&path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
            let lines: Vec<_> = text.lines().collect();
            if lines.is_empty() {
                continue;
            }
            eprintln!("--- {} ({} lines)", path.file_name().unwrap_or_default().to_string_lossy(), lines.len());
            for line in &lines[lines.len().saturating_sub(LINES)..] {
                eprintln!("{line}");
            }
        }
    }
}

/// What `ip address add` needs besides, so that an IPv6 address can be used at once: the kernel looks for duplicates, even where it does
/// not look for them, when it finds time.
fn at_once(address: &str) -> &'static str {
    if address.contains(':') { " nodad" } else { "" }
}

/// Sets up one end of a cable.
fn configure(station: &Namespace, interface: &str, nic: &Nic) -> Result<()> {
    let mut batch = String::new();
    if let Some(mac) = &nic.mac {
        let _ = writeln!(batch, "link set {interface} address {mac}");
    }
    if let Some(mtu) = nic.mtu {
        let _ = writeln!(batch, "link set {interface} mtu {mtu}");
    }
    if nic.addresses.iter().any(|address| address.contains(':')) {
        for name in ["lo", interface] {
            station.sysctl(&format!("net/ipv6/conf/{name}/disable_ipv6"), "0")?;
        }
    }
    for address in &nic.addresses {
        let _ = writeln!(batch, "address add {address} dev {interface}{}", at_once(address));
    }
    let _ = writeln!(batch, "link set {interface} up");
    for gateway in &nic.gateways {
        let _ = writeln!(batch, "route add default via {gateway} dev {interface}");
    }
    station.ip_batch(&batch)?;
    let mut ethtool = station.command("ethtool");
    ethtool.args(["-K", interface, "tx", "off", "rx", "off", "gso", "off", "tso", "off", "gro", "off", "sg", "off"]);
    ethtool.args(["rxvlan", "off", "txvlan", "off"]);
    output(&mut ethtool).with_context(|| format!("cannot turn offloads off on {}:{interface}", station.name()))?;
    // Two seconds of a flood. Before Linux 6.16 a veth loses what its ring has no room for, whether frames can wait or not.
    let mut tc = station.command("tc");
    tc.args(["qdisc", "add", "dev", interface, "root", "pfifo", "limit", "20000"]);
    output(&mut tc).with_context(|| format!("cannot let frames wait on {}:{interface}", station.name()))?;
    Ok(())
}

/// Standard output of a command that must succeed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!(
            "{} {}: {}: {}",
            command.get_program().display(),
            command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Locks; a panic elsewhere does not matter to what the lab keeps.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
