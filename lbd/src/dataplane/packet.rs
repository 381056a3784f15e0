//! A raw socket for ARP on one interface.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// `ETH_P_ARP`.
const ARP: u16 = 0x0806;

/// A socket that sends whole frames and receives the interface's ARP frames.
pub(super) struct ArpSocket {
    fd: OwnedFd,
    ifindex: u32,
}

impl ArpSocket {
    /// Opens one (needs `CAP_NET_RAW`).
    pub(super) fn new(ifindex: u32) -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: takes no address. Protocol 0: nothing is received until the socket is bound to its interface.
        let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let address = link_address(ifindex);
        // SAFETY: `address` is a whole `sockaddr_ll`.
        let result = unsafe {
            libc::bind(fd.as_raw_fd(), std::ptr::from_ref(&address).cast(), size_of::<libc::sockaddr_ll>() as u32)
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { fd, ifindex })
    }

    /// For poll(2).
    pub(super) fn fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }

    /// The interface.
    pub(super) const fn ifindex(&self) -> u32 {
        self.ifindex
    }

    /// Sends a frame.
    pub(super) fn send(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: `frame` is readable for its length.
        let sent = unsafe { libc::send(self.fd(), frame.as_ptr().cast(), frame.len(), 0) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// The next frame that has arrived.
    pub(super) fn receive<'a>(&self, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
        // SAFETY: `buffer` is writable for its length.
        let length = unsafe { libc::recv(self.fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        usize::try_from(length).ok().and_then(|length| buffer.get(..length))
    }
}

fn link_address(ifindex: u32) -> libc::sockaddr_ll {
    libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: ARP.to_be(),
        sll_ifindex: ifindex as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    }
}

/// Waits until one of the descriptors can be read, or the time is up.
pub(super) fn wait(descriptors: &[i32], timeout: std::time::Duration) {
    let mut polled: Vec<libc::pollfd> =
        descriptors.iter().map(|&fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    // Rounded up, so that a short rest of a millisecond is not spent spinning.
    let milliseconds = timeout.as_millis().saturating_add(1).min(60_000) as i32;
    // SAFETY: `polled` is writable for its length. An early return does no harm.
    unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, milliseconds) };
}
