//! Echo requests.
use std::net::{IpAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use lbd_common::checksum::{fold, sum};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, SockaddrIn6, recv, sendto, setsockopt,
    socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike as _};

use super::Namespace;

/// Whether an address answers an echo request within a second.
pub fn ping(namespace: &Namespace, address: &str) -> Result<bool> {
    let to: IpAddr = address.parse().with_context(|| format!("not an address: {address}"))?;
    namespace.run(|| {
        let (family, protocol) = match to {
            IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp),
            IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6),
        };
        let socket = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::milliseconds(50))?;
        let (request, reply) = if to.is_ipv4() { (8, 0) } else { (128, 129) };
        let mark = super::now_ms().to_be_bytes();
        let mut message = [[request, 0, 0, 0, 0x6c, 0x62, 0, 1].as_slice(), &mark, b"is anybody there"].concat();
        if to.is_ipv4() {
            // The kernel computes that of ICMPv6 only.
            let checksum = !fold(sum(&message));
            message[2..4].copy_from_slice(&checksum.to_ne_bytes());
        }
        let sent = match to {
            IpAddr::V4(to) => {
                sendto(socket.as_raw_fd(), &message, &SockaddrIn::from(SocketAddrV4::new(to, 0)), MsgFlags::empty())
            }
            IpAddr::V6(to) => {
                let to = SockaddrIn6::from(SocketAddrV6::new(to, 0, 0, 0));
                sendto(socket.as_raw_fd(), &message, &to, MsgFlags::empty())
            }
        };
        sent.with_context(|| format!("cannot ping {to}"))?;
        let end = Instant::now() + Duration::from_secs(1);
        let mut buffer = [0; 2048];
        while Instant::now() < end {
            let Ok(length) = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) else { continue };
            // A raw socket of IPv4 gets the IP header too.
            let start = if to.is_ipv4() { usize::from(buffer[0] & 0xf) * 4 } else { 0 };
            let got = buffer[..length].get(start..).unwrap_or_default();
            if got.first() == Some(&reply) && got.get(4..) == Some(&message[4..]) {
                return Ok(true);
            }
        }
        Ok(false)
    })
}
