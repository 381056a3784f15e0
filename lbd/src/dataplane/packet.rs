//! A raw socket for ARP and neighbour discovery on one interface, in all its VLANs.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Opens everything: tagged frames, too, before a VLAN interface takes them away.
const ALL: u16 = 0x0003;
const TAGGED: u16 = 0x8100;
const VLAN_ID: u16 = 0x0fff;
const PACKET_OUTGOING: u8 = 4;
const PACKET_LOOPBACK: u8 = 5;
const PACKET_IGNORE_OUTGOING: i32 = 23;
const TAG_VALID: u32 = 1 << 4;
const TAG_KIND_VALID: u32 = 1 << 6;

/// A socket that sends whole frames and receives the interface's ARP and neighbour discovery frames.
pub(super) struct FrameSocket {
    fd: OwnedFd,
    ifindex: u32,
}

/// Classic BPF: ARP, and ICMPv6 of types 135 and 136 right behind an IPv6 header. (The kernel has put a tag aside by then.)
const FILTER: [(u16, u8, u8, u32); 10] = [
    (0x28, 0, 0, 12),
    (0x15, 6, 0, 0x0806),
    (0x15, 0, 6, 0x86dd),
    (0x30, 0, 0, 20),
    (0x15, 0, 4, 58),
    (0x30, 0, 0, 54),
    (0x15, 1, 0, 135),
    (0x15, 0, 1, 136),
    (0x06, 0, 0, 0xffff),
    (0x06, 0, 0, 0),
];

impl FrameSocket {
    /// Opens one (needs `CAP_NET_RAW`).
    pub(super) fn new(ifindex: u32) -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: takes no address. Protocol 0: nothing is received until the socket is bound to its interface.
        let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us.
        let socket = Self { fd: unsafe { OwnedFd::from_raw_fd(fd) }, ifindex };
        let mut code = FILTER.map(|(code, jt, jf, k)| libc::sock_filter { code, jt, jf, k });
        let filter = libc::sock_fprog { len: code.len() as u16, filter: code.as_mut_ptr() };
        socket.set(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)?;
        socket.set(libc::SOL_PACKET, libc::PACKET_AUXDATA, &1_i32)?;
        // Since 4.20; what it does not keep away is told apart by its type.
        let _ = socket.set(libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, &1_i32);
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: ALL.to_be(),
            sll_ifindex: ifindex as i32,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        // SAFETY: `address` is a whole `sockaddr_ll`.
        let result = unsafe {
            libc::bind(socket.fd(), std::ptr::from_ref(&address).cast(), size_of::<libc::sockaddr_ll>() as u32)
        };
        if result == 0 { Ok(socket) } else { Err(io::Error::last_os_error()) }
    }

    fn set<T>(&self, level: i32, option: i32, value: &T) -> io::Result<()> {
        // SAFETY: `value` is readable for the length given, and what it points to lives as long as the caller's borrow.
        let result = unsafe {
            libc::setsockopt(self.fd(), level, option, std::ptr::from_ref(value).cast(), size_of::<T>() as u32)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// For poll(2).
    pub(super) fn fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }

    /// The interface.
    pub(super) const fn ifindex(&self) -> u32 {
        self.ifindex
    }

    /// Sends a frame, with a tag in front of its type if `vlan` is not 0.
    pub(super) fn send(&self, vlan: u16, frame: &[u8]) -> io::Result<()> {
        let frame = tagged(vlan, frame);
        // SAFETY: `frame` is readable for its length.
        let sent = unsafe { libc::send(self.fd(), frame.as_ptr().cast(), frame.len(), 0) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// The next frame that has arrived, without its tag, and its VLAN (0 = untagged).
    pub(super) fn receive<'a>(&self, buffer: &'a mut [u8]) -> Option<(u16, &'a [u8])> {
        loop {
            let (length, kind, vlan) = self.receive_one(buffer)?;
            // Not ours to read: what this host sends, and tags of providers (802.1ad).
            if let (false, Some(vlan)) = (matches!(kind, PACKET_OUTGOING | PACKET_LOOPBACK), vlan) {
                return buffer.get(..length).map(|frame| (vlan, frame));
            }
        }
    }

    fn receive_one(&self, buffer: &mut [u8]) -> Option<(usize, u8, Option<u16>)> {
        // SAFETY: all zero is a valid `sockaddr_ll`.
        let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        let mut control = [0_u64; 16];
        // SAFETY: all zero is a valid `msghdr`.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_name = (&raw mut from).cast();
        message.msg_namelen = size_of::<libc::sockaddr_ll>() as u32;
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        // SAFETY: `message` names memory that is writable for the lengths in it.
        let length = unsafe { libc::recvmsg(self.fd(), &raw mut message, 0) };
        let length = usize::try_from(length).ok()?;
        let mut vlan = Some(0);
        // SAFETY: the kernel has filled `message`, whose control buffer is aligned and lives until the end of this function.
        let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        while !header.is_null() {
            // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return headers within the buffer.
            let found = unsafe { *header };
            if found.cmsg_level == libc::SOL_PACKET
                && found.cmsg_type == libc::PACKET_AUXDATA
                && found.cmsg_len as usize >= size_of::<libc::cmsghdr>() + size_of::<libc::tpacket_auxdata>()
            {
                // SAFETY: the length of the message was checked.
                let aux: libc::tpacket_auxdata = unsafe { std::ptr::read_unaligned(libc::CMSG_DATA(header).cast()) };
                vlan = vlan_of(aux.tp_status, aux.tp_vlan_tci, aux.tp_vlan_tpid);
            }
            // SAFETY: see above.
            header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
        }
        Some((length, from.sll_pkttype, vlan))
    }
}

/// The VLAN of a received frame; `None` if its tag is not 802.1Q.
const fn vlan_of(status: u32, tci: u16, kind: u16) -> Option<u16> {
    if status & TAG_VALID == 0 {
        return Some(0);
    }
    if status & TAG_KIND_VALID != 0 && kind != TAGGED { None } else { Some(tci & VLAN_ID) }
}

fn tagged(vlan: u16, frame: &[u8]) -> Vec<u8> {
    let mut bytes = frame.to_vec();
    if vlan != 0 && bytes.len() >= 12 {
        let ([a, b], [c, d]) = (TAGGED.to_be_bytes(), vlan.to_be_bytes());
        bytes.splice(12..12, [a, b, c, d]);
    }
    bytes
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_goes_between_addresses_and_type() {
        let frame: Vec<u8> = (0..20).collect();
        assert_eq!(tagged(0, &frame), frame);
        let with = tagged(2003, &frame);
        assert_eq!(
            (&with[..12], &with[12..16], &with[16..]),
            (&frame[..12], [0x81, 0, 7, 0xd3].as_slice(), &frame[12..])
        );
    }

    #[test]
    fn the_vlan_is_read_from_what_the_kernel_put_aside() {
        assert_eq!(vlan_of(1, 2003, TAGGED), Some(0));
        assert_eq!(vlan_of(TAG_VALID | TAG_KIND_VALID, 0xe7d3, TAGGED), Some(0x7d3));
        assert_eq!(vlan_of(TAG_VALID, 5, 0), Some(5));
        assert_eq!(vlan_of(TAG_VALID | TAG_KIND_VALID, 5, 0x88a8), None);
    }

    /// Runs the filter as the kernel would.
    fn passes(frame: &[u8]) -> bool {
        let (mut at, mut accumulator) = (0, 0);
        loop {
            let (code, jt, jf, k) = FILTER[at];
            at += 1;
            match code {
                0x28 => match frame.get(k as usize..k as usize + 2) {
                    Some(bytes) => accumulator = u32::from(u16::from_be_bytes([bytes[0], bytes[1]])),
                    None => return false,
                },
                0x30 => match frame.get(k as usize) {
                    Some(&byte) => accumulator = u32::from(byte),
                    None => return false,
                },
                0x15 => at += usize::from(if accumulator == k { jt } else { jf }),
                _ => return k != 0,
            }
        }
    }

    #[test]
    fn only_arp_and_neighbour_discovery_pass_the_filter() {
        let mac = [2, 0, 0, 0, 0, 1];
        assert!(passes(&super::super::arp::probe(mac, [192, 0, 2, 34].into())));
        let vip = "2001:db8::34".parse().unwrap();
        let good = super::super::ndisc::announcement(mac, vip);
        assert!(passes(&good) && passes(&super::super::ndisc::probe(mac, vip)));
        for (at, value) in [(13, 0), (20, 6), (54, 134), (54, 137)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(!passes(&bad), "byte {at}");
        }
        assert!(!passes(&good[..50]));
    }
}
