//! Solicited-node groups of the IPv6 addresses that lbd answers for: nobody has these addresses, so nobody joins their groups.
//!
//! Joined in the two ways that outlive the process. An address that is the group itself, with `IFA_F_MCAUTOJOIN`, makes the kernel
//! join, report the group and answer queries (MLD), so that switches that snoop forward it. `SIOCADDMULTI` makes the NIC's filter
//! accept the group's Ethernet address, also while the other is not possible: in a VLAN without an interface of the kernel's, and
//! after the interface was down.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsRawFd;

use super::ndisc::group_mac;
use super::netlink::Client;
use super::offload::{InterfaceRequest, RequestData, control_socket};

/// A group on an interface, by index.
pub(super) type Group = (u32, Ipv6Addr);

/// An Ethernet address on an interface, by index.
type Filter = (u32, [u8; 6]);

/// What shall be joined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    /// By the kernel's IPv6.
    pub(super) joined: BTreeSet<Group>,
    /// By the filters of NICs.
    pub(super) filtered: BTreeSet<Group>,
}

/// Whether the address is a solicited-node group's.
pub(super) fn is_solicited_node(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.octets()[..13] == [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff])
}

/// `/proc/net` of the thread's network namespace.
fn list(name: &str) -> io::Result<String> {
    fs::read_to_string(format!("/proc/thread-self/net/{name}"))
}

/// Groups that the kernel's IPv6 is a member of, whoever asked for it.
fn members(text: &str) -> BTreeSet<Group> {
    let line = |line: &str| {
        let mut fields = line.split_whitespace();
        let index = fields.next()?.parse().ok()?;
        let group = u128::from_str_radix(fields.nth(1)?, 16).ok()?;
        Some((index, Ipv6Addr::from(group)))
    };
    text.lines().filter_map(line).collect()
}

/// Ethernet addresses of solicited-node groups that someone has set by hand, i.e. we.
fn filters(text: &str) -> BTreeSet<Filter> {
    let line = |line: &str| {
        let mut fields = line.split_whitespace();
        let index = fields.next()?.parse().ok()?;
        let by_hand = fields.nth(2)? != "0";
        let bits = u64::from_str_radix(fields.next()?, 16).ok()?;
        let [_, _, mac @ ..] = bits.to_be_bytes();
        (by_hand && mac[..3] == [0x33, 0x33, 0xff]).then_some((index, mac))
    };
    text.lines().filter_map(line).collect()
}

/// Joins what is wanted, and leaves what is not on interfaces that are ours. What fails is returned, and is no reason to stop.
pub(super) fn set(client: &mut Client, wanted: &Wanted, ours: impl Fn(u32) -> bool) -> Vec<String> {
    let mut failed = Vec::new();
    match list("igmp6") {
        Ok(text) => {
            let members = members(&text);
            for &(index, group) in wanted.joined.difference(&members) {
                if let Err(error) = client.join(index, group) {
                    failed.push(format!("interface {index}: cannot join {group}: {error}"));
                }
            }
        }
        // A kernel without IPv6.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => failed.push(format!("cannot list groups: {error}")),
    }
    match client.joined() {
        Ok(joined) => {
            for &(index, group) in joined.difference(&wanted.joined).filter(|(index, _)| ours(*index)) {
                if let Err(error) = client.leave(index, group) {
                    failed.push(format!("interface {index}: cannot leave {group}: {error}"));
                }
            }
        }
        Err(error) => failed.push(format!("cannot list groups: {error}")),
    }
    let filtered: BTreeSet<Filter> = wanted.filtered.iter().map(|&(index, group)| (index, group_mac(group))).collect();
    match list("dev_mcast") {
        Ok(text) => {
            let found = filters(&text);
            let add = filtered.difference(&found).map(|&filter| (filter, true));
            let gone = found.difference(&filtered).filter(|(index, _)| ours(*index));
            for ((index, mac), add) in add.chain(gone.map(|&filter| (filter, false))) {
                let Some(name) = name_of(index) else { continue };
                if let Err(error) = set_filter(&name, mac, add) {
                    failed.push(format!("interface {name}: cannot change its filter: {error}"));
                }
            }
        }
        Err(error) => failed.push(format!("cannot list filters: {error}")),
    }
    failed
}

/// Leaves everything that lbd has joined. Returns how much that was.
pub(super) fn leave_all(client: &mut Client) -> io::Result<u32> {
    let mut left = 0;
    for (index, group) in client.joined()? {
        client.leave(index, group)?;
        left += 1;
    }
    let filters = list("dev_mcast").map(|text| filters(&text)).unwrap_or_default();
    for (index, mac) in filters {
        if let Some(name) = name_of(index) {
            set_filter(&name, mac, false)?;
            left += 1;
        }
    }
    Ok(left)
}

/// What the kernel calls an interface now.
fn name_of(index: u32) -> Option<String> {
    nix::net::if_::if_indextoname(index).ok()?.into_string().ok()
}

fn set_filter(interface: &str, mac: [u8; 6], add: bool) -> io::Result<()> {
    const ADD: libc::c_ulong = 0x8931;
    const DELETE: libc::c_ulong = 0x8932;
    let mut request = InterfaceRequest::new(interface)?;
    // A `struct sockaddr` of family AF_UNSPEC (0).
    let mut bytes = [0; 24];
    bytes[2..8].copy_from_slice(&mac);
    request.data = RequestData { bytes };
    let socket = control_socket()?;
    let command = if add { ADD } else { DELETE };
    // SAFETY: `request` is a whole `struct ifreq`, which these commands only read.
    if unsafe { libc::ioctl(socket.as_raw_fd(), command as _, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::ndisc::solicited_node;
    use super::*;

    #[test]
    fn memberships_and_filters_are_read() {
        let text = "2    t1              ff0200000000000000000001ff92fc57     1 00000004 0\n\
                    12   ten0            ff020000000000000000000000000001     1 0000000C 0\nnonsense\n";
        let group = |text: &str| text.parse::<Ipv6Addr>().unwrap();
        assert_eq!(members(text), BTreeSet::from([(2, group("ff02::1:ff92:fc57")), (12, group("ff02::1"))]));
        let text = "2    t1              1     0     3333ff92fc57\n3    t0              2     1     3333ff000034\n\
                    3    t0              1     1     01005e000005\n";
        assert_eq!(filters(text), BTreeSet::from([(3, [0x33, 0x33, 0xff, 0, 0, 0x34])]));
    }

    #[test]
    fn groups_are_told_from_addresses() {
        let vip: Ipv6Addr = "2001:db8::34".parse().unwrap();
        let group = solicited_node(vip);
        assert_eq!(group, "ff02::1:ff00:34".parse::<Ipv6Addr>().unwrap());
        assert!(is_solicited_node(group.into()) && !is_solicited_node(vip.into()));
        assert!(!is_solicited_node("ff02::1".parse().unwrap()));
        assert_eq!(group_mac(group), [0x33, 0x33, 0xff, 0, 0, 0x34]);
    }
}
