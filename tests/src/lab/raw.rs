//! Sending frames as they are.
use std::os::fd::AsRawFd as _;

use anyhow::{Context as _, Result, ensure};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

use super::Namespace;

/// Sends one frame from an interface.
pub fn send_frame(namespace: &Namespace, interface: &str, frame: &[u8]) -> Result<()> {
    let index = namespace.index(interface)?;
    namespace
        .run(|| {
            let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::EthAll)?;
            let address = libc::sockaddr_ll {
                sll_family: libc::AF_PACKET as u16,
                sll_protocol: 0,
                sll_ifindex: index as i32,
                sll_hatype: 0,
                sll_pkttype: 0,
                sll_halen: 6,
                sll_addr: [0; 8],
            };
            // SAFETY: frame and address are valid for their lengths during the call.
            let sent = unsafe {
                libc::sendto(
                    socket.as_raw_fd(),
                    frame.as_ptr().cast(),
                    frame.len(),
                    0,
                    (&raw const address).cast(),
                    size_of::<libc::sockaddr_ll>() as libc::socklen_t,
                )
            };
            ensure!(sent == frame.len() as isize, "{}", std::io::Error::last_os_error());
            Ok(())
        })
        .with_context(|| format!("cannot send a frame from {}:{interface}", namespace.name()))
}

/// The bytes of a MAC address as `ip` writes it.
pub fn mac_bytes(text: &str) -> Result<[u8; 6]> {
    let mut bytes = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut bytes {
        let part = parts.next().with_context(|| format!("not a MAC address: {text}"))?;
        *byte = u8::from_str_radix(part, 16).with_context(|| format!("not a MAC address: {text}"))?;
    }
    Ok(bytes)
}
