//! Offloads of NICs (ethtool): what hides VLAN tags from XDP is turned off, and on again by `lbd detach`.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::DataplaneError;
use super::loader::{interface_name, pin_name};
use super::netlink::Client;

pub(super) const GET_TX_CHECKSUM: u32 = 0x16;
pub(super) const GET_GRO: u32 = 0x2b;
pub(super) const GET_FLAGS: u32 = 0x25;
const SET_FLAGS: u32 = 0x26;
/// A sender's tag goes beside the frame: on a veth, it arrives there, too.
pub(super) const FLAG_TX_VLAN: u32 = 1 << 7;
/// The NIC takes tags off.
pub(super) const FLAG_RX_VLAN: u32 = 1 << 8;
pub(super) const FLAG_LRO: u32 = 1 << 15;

/// `struct ifreq`: a name and what depends on the command.
#[repr(C)]
pub(super) struct InterfaceRequest {
    name: [u8; 16],
    pub(super) data: RequestData,
}

#[repr(C)]
pub(super) union RequestData {
    /// `struct sockaddr` and more.
    pub(super) bytes: [u8; 24],
    value: *mut EthtoolValue,
}

impl InterfaceRequest {
    /// For an interface.
    pub(super) fn new(interface: &str) -> io::Result<Self> {
        let mut name = [0; 16];
        let bytes = interface.as_bytes();
        if bytes.len() >= name.len() || bytes.contains(&0) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        name[..bytes.len()].copy_from_slice(bytes);
        Ok(Self { name, data: RequestData { bytes: [0; 24] } })
    }
}

/// A socket to ask the thread's network namespace through.
pub(super) fn control_socket() -> io::Result<OwnedFd> {
    // SAFETY: takes no address.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

/// Reads one number of the driver's (`ETHTOOL_G…`) or sets one (`ETHTOOL_S…`).
fn ethtool(interface: &str, command: u32, data: u32) -> io::Result<u32> {
    const SIOCETHTOOL: libc::c_ulong = 0x8946;
    let mut value = EthtoolValue { command, data };
    let mut request = InterfaceRequest::new(interface)?;
    request.data.value = &raw mut value;
    let socket = control_socket()?;
    // SAFETY: `request` is a whole `struct ifreq`, and its data points to the `struct ethtool_value` that these commands use.
    if unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL as _, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(value.data)
}

/// One number of the driver's (`ETHTOOL_G…`).
pub(super) fn get(interface: &str, command: u32) -> io::Result<u32> {
    ethtool(interface, command, 0)
}

fn set_rx_vlan(interface: &str, on: bool) -> io::Result<()> {
    let flags = get(interface, GET_FLAGS)?;
    let wanted = if on { flags | FLAG_RX_VLAN } else { flags & !FLAG_RX_VLAN };
    if wanted != flags {
        ethtool(interface, SET_FLAGS, wanted)?;
    }
    let found = get(interface, GET_FLAGS)?;
    if (found ^ wanted) & FLAG_RX_VLAN != 0 {
        return Err(io::Error::other("the driver does not change it"));
    }
    Ok(())
}

/// What lbd has changed on the host, kept as empty directories in the BPF file system: it must be known without the agent.
pub(super) struct Record {
    directory: PathBuf,
}

const RX_VLAN: &str = "rxvlan-";

impl Record {
    /// Below `<bpffs>/lbd`.
    pub(super) fn new(root: &Path) -> Self {
        Self { directory: root.join("host") }
    }

    fn path(&self, interface: &str) -> PathBuf {
        self.directory.join(format!("{RX_VLAN}{}", pin_name(interface)))
    }

    fn note(&self, interface: &str) -> io::Result<()> {
        let root = self.directory.parent().unwrap_or(&self.directory);
        for path in [root, self.directory.as_path(), &self.path(interface)] {
            match fs::DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Interfaces whose offload lbd has turned off.
    fn interfaces(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(&self.directory) else { return Vec::new() };
        let names = entries.filter_map(Result::ok).filter_map(|entry| entry.file_name().into_string().ok());
        let mut found: Vec<String> =
            names.filter_map(|name| Some(interface_name(name.strip_prefix(RX_VLAN)?))).collect();
        found.sort();
        found
    }

    /// Makes a NIC leave tags where they are, so that XDP sees them. Whether something had to be changed.
    pub(super) fn show_tags(&self, interface: &str) -> Result<bool, DataplaneError> {
        let hidden = |error: io::Error| DataplaneError::HiddenTags {
            interface: interface.to_owned(),
            reason: format!("its rx-vlan offload cannot be turned off: {error}"),
            remedy: format!("ethtool -K {interface} rxvlan off"),
        };
        match get(interface, GET_FLAGS) {
            // A driver without the question has no such offload, and an interface that is away hides nothing.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENODEV)) => return Ok(false),
            Err(error) => return Err(hidden(error)),
            Ok(flags) if flags & FLAG_RX_VLAN == 0 => return Ok(false),
            Ok(_) => {}
        }
        // Noted first: what is noted and was not changed is harmless.
        self.note(interface).map_err(DataplaneError::system(format!(
            "cannot note a change of {interface} in {}",
            self.directory.display()
        )))?;
        if let Err(error) = set_rx_vlan(interface, false) {
            let _ = fs::remove_dir(self.path(interface));
            let _ = fs::remove_dir(&self.directory);
            return Err(hidden(error));
        }
        Ok(true)
    }

    /// Makes all NICs show tags. Where that cannot be, those with VLAN segments (`true`) are refused. Returns what was changed.
    pub(super) fn prepare(&self, interfaces: &BTreeMap<String, bool>) -> Result<Vec<String>, DataplaneError> {
        let mut changed = Vec::new();
        for (interface, &vlans) in interfaces {
            let shown = self.show_tags(interface);
            if matches!(shown, Ok(true)) {
                changed.push(interface.clone());
            }
            let peer = hiding_peer(interface).filter(|_| vlans);
            match shown.and_then(|_| peer.map_or(Ok(()), |peer| Err(peer_hides(interface, &peer)))) {
                Ok(()) => {}
                Err(error) if vlans => {
                    self.undo(&changed);
                    return Err(error);
                }
                Err(error) => tracing::warn!("{error}"),
            }
        }
        Ok(changed)
    }

    /// Takes back what [`Self::prepare`] has changed, after a start that failed.
    pub(super) fn undo(&self, changed: &[String]) {
        let others: Vec<String> = self.interfaces().into_iter().filter(|name| !changed.contains(name)).collect();
        self.restore(&others);
    }

    /// Turns on again what was turned off, for all interfaces but `except`, and forgets it. Interfaces that are gone need nothing.
    pub(super) fn restore(&self, except: &[String]) -> Vec<String> {
        let mut restored = Vec::new();
        for interface in self.interfaces() {
            if except.contains(&interface) {
                continue;
            }
            match set_rx_vlan(&interface, true) {
                Ok(()) => restored.push(interface.clone()),
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
                Err(error) => tracing::warn!("{interface}: cannot turn rx-vlan offload on again: {error}"),
            }
            let _ = fs::remove_dir(self.path(&interface));
        }
        // Only if it is empty.
        let _ = fs::remove_dir(&self.directory);
        restored
    }
}

/// The veth peer in this network namespace that leaves tags beside its frames, where XDP does not see them.
pub(super) fn hiding_peer(interface: &str) -> Option<String> {
    let index = nix::net::if_::if_nametoindex(interface).ok()?;
    let mut client = Client::new().ok()?;
    let details = client.link(index).ok().filter(|details| details.kind == "veth")?;
    let peer = client.link(details.peer?).ok()?.name;
    get(&peer, GET_FLAGS).is_ok_and(|flags| flags & FLAG_TX_VLAN != 0).then_some(peer)
}

/// What is said of such a peer.
pub(super) fn peer_hides(interface: &str, peer: &str) -> DataplaneError {
    DataplaneError::HiddenTags {
        interface: interface.to_owned(),
        reason: format!("its veth peer {peer} has tx-vlan offload on and leaves tags beside its frames"),
        remedy: format!("ethtool -K {peer} txvlan off"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_changed_is_known_later() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("lbd");
        let record = Record::new(&root);
        assert!(record.interfaces().is_empty());
        record.note("eth1.5").unwrap();
        record.note("eth0").unwrap();
        record.note("eth0").unwrap();
        assert_eq!(Record::new(&root).interfaces(), ["eth0", "eth1.5"]);
        // Neither exists here.
        assert!(record.restore(&["eth0".to_owned()]).is_empty());
        assert_eq!(record.interfaces(), ["eth0"]);
        record.restore(&[]);
        assert!(!root.join("host").exists());
    }

    #[test]
    fn names_that_are_too_long_are_refused() {
        assert!(InterfaceRequest::new("0123456789abcde").is_ok());
        assert!(InterfaceRequest::new("0123456789abcdef").is_err());
        assert!(get("lbd-nosuch0", GET_FLAGS).is_err());
    }
}
