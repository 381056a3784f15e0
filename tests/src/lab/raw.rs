//! Frames as they are, on packet sockets.
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike as _};

use super::Namespace;

/// Bytes of a VLAN tag.
const TAG: usize = 4;
/// Bytes of both MAC addresses.
const MACS: usize = 12;

/// A packet socket on one interface, or on all of them.
#[derive(Debug)]
pub struct PacketSocket(OwnedFd);

/// What came with a frame.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Bytes of the frame.
    pub length: usize,
    /// Index of the interface.
    pub interface: u32,
    /// The frame was sent by the namespace that the socket is in.
    pub outgoing: bool,
}

/// Room for the control message that tells of the tag, aligned as the kernel wants it.
#[repr(align(8))]
struct Control([u8; 64]);

impl PacketSocket {
    /// Opens a socket in this thread's namespace. `own`: also frames that the namespace sends itself.
    pub fn open(interface: Option<&str>, own: bool) -> Result<Self> {
        // 64 MiB hold what comes while the reader waits for a CPU.
        const BUFFER: usize = 64 << 20;
        let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::EthAll)
            .context("cannot open a packet socket")?;
        setsockopt(&socket, sockopt::RcvBufForce, &BUFFER)?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::milliseconds(20))?;
        let packets = Self(socket);
        packets.option(libc::PACKET_AUXDATA, 1)?;
        if !own {
            packets.option(libc::PACKET_IGNORE_OUTGOING, 1)?;
        }
        if let Some(name) = interface {
            let index = nix::net::if_::if_nametoindex(name).with_context(|| format!("there is no {name}"))?;
            let address = link(index, (libc::ETH_P_ALL as u16).to_be());
            // SAFETY: the address is valid for its length during the call.
            let bound = unsafe {
                libc::bind(
                    packets.0.as_raw_fd(),
                    (&raw const address).cast(),
                    size_of::<libc::sockaddr_ll>() as libc::socklen_t,
                )
            };
            ensure!(bound == 0, "cannot bind to {name}: {}", io::Error::last_os_error());
        }
        Ok(packets)
    }

    fn option(&self, name: libc::c_int, value: libc::c_int) -> Result<()> {
        // SAFETY: the kernel reads one integer, which outlives the call.
        let set = unsafe {
            libc::setsockopt(
                self.0.as_raw_fd(),
                libc::SOL_PACKET,
                name,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        ensure!(set == 0, "cannot set option {name} of a packet socket: {}", io::Error::last_os_error());
        Ok(())
    }

    /// Waits at most 20 ms for a frame. The kernel takes VLAN tags off what it receives; here they are where they were.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Arrival> {
        let (mut control, mut from) = (Control([0; 64]), link(0, 0));
        let mut vector = libc::iovec { iov_base: buffer[TAG..].as_mut_ptr().cast(), iov_len: buffer.len() - TAG };
        // SAFETY: all zeros is a valid msghdr.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_name = (&raw mut from).cast();
        message.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control.0.len();
        // SAFETY: every pointer in the message is valid for the length beside it during the call.
        let length = unsafe { libc::recvmsg(self.0.as_raw_fd(), &raw mut message, 0) };
        let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
        let arrival = |length| Arrival {
            length,
            interface: from.sll_ifindex as u32,
            outgoing: from.sll_pkttype == libc::PACKET_OUTGOING,
        };
        match tag(&message) {
            Some(tag) if length >= MACS => {
                buffer.copy_within(TAG..TAG + MACS, 0);
                buffer[MACS..MACS + TAG].copy_from_slice(&tag);
                Ok(arrival(length + TAG))
            }
            _ => {
                buffer.copy_within(TAG..TAG + length, 0);
                Ok(arrival(length))
            }
        }
    }

    /// Sends a frame from the interface that the socket is bound to, or from that of this index.
    pub fn send(&self, interface: Option<u32>, frame: &[u8]) -> io::Result<()> {
        let address = link(interface.unwrap_or_default(), 0);
        let (name, length) = match interface {
            Some(_) => ((&raw const address).cast(), size_of::<libc::sockaddr_ll>() as libc::socklen_t),
            None => (std::ptr::null(), 0),
        };
        // SAFETY: frame and address are valid for their lengths during the call.
        let sent = unsafe { libc::sendto(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0, name, length) };
        if sent == frame.len() as isize { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// How many frames the socket had no room for since the last call.
    pub fn missed(&self) -> Result<u64> {
        let mut statistics = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
        let mut length = size_of::<libc::tpacket_stats>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `length` bytes into the struct, which is that long.
        let result = unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut statistics).cast(),
                &raw mut length,
            )
        };
        ensure!(result == 0, "cannot read the packet socket's statistics: {}", io::Error::last_os_error());
        Ok(u64::from(statistics.tp_drops))
    }
}

/// The tag that the kernel took off, as on the wire.
fn tag(message: &libc::msghdr) -> Option<[u8; TAG]> {
    // SAFETY: the message has come from recvmsg, so that its control part is what the kernel wrote.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: not null, so a header within the control part, and so is the next one. It is aligned: the buffer is.
        let (level, kind, data) = unsafe { ((*header).cmsg_level, (*header).cmsg_type, libc::CMSG_DATA(header)) };
        if level == libc::SOL_PACKET && kind == libc::PACKET_AUXDATA {
            // SAFETY: the kernel puts one such struct into a message of this type.
            let extra = unsafe { data.cast::<libc::tpacket_auxdata>().read_unaligned() };
            if extra.tp_status & libc::TP_STATUS_VLAN_VALID == 0 {
                return None;
            }
            let kind = if extra.tp_vlan_tpid == 0 { 0x8100 } else { extra.tp_vlan_tpid };
            let ([a, b], [c, d]) = (kind.to_be_bytes(), extra.tp_vlan_tci.to_be_bytes());
            return Some([a, b, c, d]);
        }
        // SAFETY: as above.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    None
}

fn link(index: u32, protocol: u16) -> libc::sockaddr_ll {
    libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: protocol,
        sll_ifindex: index as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 6,
        sll_addr: [0; 8],
    }
}

/// Sends one frame from an interface.
pub fn send_frame(namespace: &Namespace, interface: &str, frame: &[u8]) -> Result<()> {
    send_frames(namespace, interface, u32::MAX, std::iter::once(frame.to_vec())).map(drop)
}

/// Sends frames from an interface, at most so many a second, and never more at a time because there were less before; how many the
/// kernel took.
pub fn send_frames(
    namespace: &Namespace,
    interface: &str,
    rate: u32,
    frames: impl Iterator<Item = Vec<u8>> + Send,
) -> Result<u64> {
    /// Frames between two looks at the clock.
    const BURST: u64 = 32;
    let index = namespace.index(interface)?;
    namespace
        .run(|| {
            let socket = PacketSocket::open(Some(interface), false)?;
            let pause = Duration::from_secs_f64(BURST as f64 / f64::from(rate));
            let (mut due, mut sent) = (Instant::now(), 0_u64);
            for frame in frames {
                match socket.send(Some(index), &frame) {
                    Ok(()) => sent += 1,
                    // The interface's queue is full: that is a loss as on any wire.
                    Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
                    Err(error) => return Err(error.into()),
                }
                if sent.is_multiple_of(BURST) {
                    let now = Instant::now();
                    due = now.max(due + pause);
                    std::thread::sleep(due - now);
                }
            }
            Ok(sent)
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

/// The frame with an 802.1Q tag of this VLAN.
pub fn tagged(frame: &[u8], vlan: u16) -> Vec<u8> {
    let mut bytes = frame[..MACS].to_vec();
    bytes.extend([0x81, 0]);
    bytes.extend(vlan.to_be_bytes());
    bytes.extend(&frame[MACS..]);
    bytes
}
