//! Captures: every frame on every interface of a namespace, its checksums checked as it comes.
//!
//! What XDP takes is not seen on the interface that it is attached to, but on the other end of the cable.
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow, ensure};

use super::{Namespace, PacketSocket, describe, lock, verify};

/// Frames that a capture keeps at most, so that a long run does not fill the memory.
const KEPT: usize = 200_000;
const LOOPBACK: u32 = 1;

/// Says of a frame whether it is wanted.
pub type Filter = Box<dyn Fn(&[u8]) -> bool + Send>;

/// Which frames are kept.
pub enum Keep {
    /// Those whose checksums are wrong.
    Bad,
    /// Those too, and these.
    Matching(Filter),
    /// All, up to a limit.
    All,
}

/// A frame that was kept.
#[derive(Clone, Debug)]
pub struct Captured {
    /// When.
    pub at: SystemTime,
    /// On which interface.
    pub interface: String,
    /// It was sent by the namespace.
    pub outgoing: bool,
    /// What is wrong with its checksums.
    pub fault: Option<String>,
    /// The frame.
    pub bytes: Vec<u8>,
}

/// What a capture saw.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// The namespace.
    pub namespace: String,
    /// Frames seen.
    pub frames: u64,
    /// Frames with a wrong checksum.
    pub bad: u64,
    /// Frames that came too fast to be looked at.
    pub missed: u64,
    /// Kept frames.
    pub kept: Vec<Captured>,
}

impl Summary {
    /// Fails if a checksum was wrong, or if nothing was seen.
    pub fn assert_good(&self) -> Result<()> {
        ensure!(self.frames > 0, "the capture in {} saw nothing", self.namespace);
        if self.bad == 0 {
            return Ok(());
        }
        let first = self.kept.iter().find_map(|frame| frame.fault.as_ref().map(|fault| (frame, fault)));
        Err(match first {
            Some((frame, fault)) => anyhow!(
                "{} of {} frames in {} are bad; the first, on {}: wrong {fault}: {}",
                self.bad,
                self.frames,
                self.namespace,
                frame.interface,
                describe(&frame.bytes)
            ),
            None => anyhow!("{} of {} frames in {} are bad", self.bad, self.frames, self.namespace),
        })
    }
}

/// A running capture.
#[derive(Debug)]
pub struct Capture {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Summary>>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Capture {
    /// Captures on all interfaces of a namespace but loopback, from now on.
    pub fn start(namespace: &Namespace, keep: Keep) -> Result<Self> {
        let socket = namespace.run(|| PacketSocket::open(None, true))?;
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(Mutex::new(Summary { namespace: namespace.name().to_owned(), ..Summary::default() }));
        let thread = std::thread::spawn({
            let (stop, seen, namespace) = (Arc::clone(&stop), Arc::clone(&seen), namespace.clone());
            move || read(&socket, &namespace, &keep, &stop, &seen)
        });
        Ok(Self { stop, seen, thread: Some(thread) })
    }

    /// What was seen so far.
    pub fn summary(&self) -> Summary {
        lock(&self.seen).clone()
    }

    /// Ends the capture; what has arrived by now is in it.
    pub fn finish(mut self) -> Result<Summary> {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| anyhow!("the capture's thread panicked"))??;
        }
        Ok(self.summary())
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn read(
    socket: &PacketSocket,
    namespace: &Namespace,
    keep: &Keep,
    stop: &AtomicBool,
    seen: &Mutex<Summary>,
) -> Result<()> {
    let mut names = BTreeMap::new();
    namespace.enter_thread()?;
    let mut buffer = vec![0; 1 << 16];
    loop {
        let stopping = stop.load(Ordering::Relaxed);
        let arrival = match socket.receive(&mut buffer) {
            Ok(arrival) => arrival,
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN) if stopping => break,
                // ENETDOWN: an interface went away.
                Some(libc::EINTR | libc::EAGAIN | libc::ENETDOWN) => continue,
                _ => return Err(error).context("cannot read from the packet socket"),
            },
        };
        if arrival.interface == LOOPBACK {
            continue;
        }
        let frame = &buffer[..arrival.length];
        let fault = verify(frame).err();
        let wanted = match keep {
            Keep::Bad => false,
            Keep::Matching(filter) => filter(frame),
            Keep::All => true,
        };
        let mut seen = lock(seen);
        seen.frames += 1;
        seen.bad += u64::from(fault.is_some());
        if (wanted || fault.is_some()) && seen.kept.len() < KEPT {
            let interface = names.entry(arrival.interface).or_insert_with(|| name(arrival.interface)).clone();
            seen.kept.push(Captured {
                at: SystemTime::now(),
                interface,
                outgoing: arrival.outgoing,
                fault,
                bytes: frame.to_vec(),
            });
        }
    }
    lock(seen).missed = socket.missed()?;
    Ok(())
}

fn name(index: u32) -> String {
    let mut buffer = [0; libc::IF_NAMESIZE];
    // SAFETY: the buffer has the size that the function asks for.
    let found = unsafe { libc::if_indextoname(index, buffer.as_mut_ptr()) };
    if found.is_null() {
        return format!("interface {index}");
    }
    let bytes: Vec<u8> = buffer.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Writes frames as a file that tcpdump and Wireshark read.
pub fn write_pcap(path: &Path, frames: &[Captured]) -> Result<()> {
    let mut file = std::io::BufWriter::new(
        std::fs::File::create(path).with_context(|| format!("cannot make {}", path.display()))?,
    );
    // Magic number, version 2.4, zone and accuracy 0, snap length, Ethernet.
    for word in [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 65536, 1] {
        file.write_all(&word.to_ne_bytes())?;
    }
    for frame in frames {
        let at = frame.at.duration_since(UNIX_EPOCH).unwrap_or_default();
        let length = frame.bytes.len() as u32;
        for word in [at.as_secs() as u32, at.subsec_micros(), length, length] {
            file.write_all(&word.to_ne_bytes())?;
        }
        file.write_all(&frame.bytes)?;
    }
    Ok(file.flush()?)
}
