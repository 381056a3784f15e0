//! bpf(2) where aya has nothing: batches, links without the silent fall-back to netlink, typed maps over file descriptors.
//!
//! The layouts are those of `union bpf_attr` in `include/uapi/linux/bpf.h`.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

const MAP_CREATE: u32 = 0;
const MAP_LOOKUP_ELEM: u32 = 1;
const MAP_UPDATE_ELEM: u32 = 2;
const MAP_DELETE_ELEM: u32 = 3;
const MAP_GET_NEXT_KEY: u32 = 4;
const OBJ_PIN: u32 = 6;
const OBJ_GET: u32 = 7;
const PROG_TEST_RUN: u32 = 10;
const MAP_LOOKUP_AND_DELETE_ELEM: u32 = 21;
const PROG_GET_FD_BY_ID: u32 = 13;
const OBJ_GET_INFO_BY_FD: u32 = 15;
const MAP_LOOKUP_BATCH: u32 = 24;
const MAP_UPDATE_BATCH: u32 = 26;
const LINK_CREATE: u32 = 28;
const LINK_UPDATE: u32 = 29;
const LINK_GET_FD_BY_ID: u32 = 30;
const LINK_GET_NEXT_ID: u32 = 31;
const LINK_DETACH: u32 = 34;

const ATTACH_TYPE_XDP: u32 = 37;
const LINK_TYPE_XDP: u32 = 6;

/// `BPF_MAP_TYPE_ARRAY`.
pub(super) const TYPE_ARRAY: u32 = 2;

/// `XDP_FLAGS_SKB_MODE`.
pub(super) const XDP_GENERIC: u32 = 1 << 1;
/// `XDP_FLAGS_DRV_MODE`.
pub(super) const XDP_NATIVE: u32 = 1 << 2;

/// Calls bpf(2).
///
/// # Safety
/// Every address in `attribute` must be valid for the command, for as long as the call takes.
unsafe fn call<A: Pod>(command: u32, attribute: &mut A) -> io::Result<i32> {
    // SAFETY: `attribute` is initialised memory of the size given; the caller vouches for the addresses in it.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, libc::c_long::from(command), std::ptr::from_mut(attribute), size_of::<A>())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

/// As [`call`], for commands that return a file descriptor.
unsafe fn call_for_fd<A: Pod>(command: u32, attribute: &mut A) -> io::Result<OwnedFd> {
    // SAFETY: as the caller vouches.
    let fd = unsafe { call(command, attribute)? };
    // SAFETY: the kernel has just made this descriptor for us (close-on-exec, as all of bpf(2)'s).
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn raw(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd() as u32
}

fn address<T: ?Sized>(value: &T) -> u64 {
    std::ptr::from_ref(value).cast::<u8>() as u64
}

fn address_mut<T: ?Sized>(value: &mut T) -> u64 {
    std::ptr::from_mut(value).cast::<u8>() as u64
}

fn path_string(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ObjectAttribute {
    path: u64,
    fd: u32,
    flags: u32,
}

/// Opens a pin.
pub(super) fn open(path: &Path) -> io::Result<OwnedFd> {
    let path = path_string(path)?;
    let mut attribute = ObjectAttribute { path: path.as_ptr() as u64, fd: 0, flags: 0 };
    // SAFETY: `path` is a NUL-terminated string that outlives the call.
    unsafe { call_for_fd(OBJ_GET, &mut attribute) }
}

/// Pins an object.
pub(super) fn pin(fd: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = path_string(path)?;
    let mut attribute = ObjectAttribute { path: path.as_ptr() as u64, fd: raw(fd), flags: 0 };
    // SAFETY: `path` is a NUL-terminated string that outlives the call.
    unsafe { call(OBJ_PIN, &mut attribute) }.map(|_| ())
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct InfoAttribute {
    fd: u32,
    length: u32,
    info: u64,
}

fn info<T: Pod>(fd: BorrowedFd<'_>, value: &mut T) -> io::Result<()> {
    let mut attribute = InfoAttribute { fd: raw(fd), length: size_of::<T>() as u32, info: address_mut(value) };
    // SAFETY: `info` points to `length` writable bytes.
    unsafe { call(OBJ_GET_INFO_BY_FD, &mut attribute) }.map(|_| ())
}

/// First part of `struct bpf_map_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct MapInfo {
    pub(super) kind: u32,
    pub(super) id: u32,
    pub(super) key_size: u32,
    pub(super) value_size: u32,
    pub(super) max_entries: u32,
    pub(super) flags: u32,
    pub(super) name: [u8; 16],
}

impl MapInfo {
    /// A map to be made, or to be compared with.
    pub(super) const fn of(kind: u32, key_size: u32, value_size: u32, max_entries: u32, flags: u32) -> Self {
        Self { kind, id: 0, key_size, value_size, max_entries, flags, name: [0; 16] }
    }
}

/// What the kernel knows of a map.
pub(super) fn map_info(fd: BorrowedFd<'_>) -> io::Result<MapInfo> {
    let mut value = MapInfo::default();
    info(fd, &mut value)?;
    Ok(value)
}

/// First part of `struct bpf_prog_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct ProgramInfo {
    kind: u32,
    pub(super) id: u32,
    pub(super) tag: [u8; 8],
    jited_length: u32,
    translated_length: u32,
    jited: u64,
    translated: u64,
    load_time: u64,
    created_by: u32,
    map_count: u32,
    map_ids: u64,
    name: [u8; 16],
}

impl ProgramInfo {
    /// The kernel's name of the program.
    pub(super) fn name(&self) -> String {
        let end = self.name.iter().position(|&byte| byte == 0).unwrap_or(self.name.len());
        String::from_utf8_lossy(&self.name[..end]).into_owned()
    }
}

/// What the kernel knows of a program.
pub(super) fn program_info(fd: BorrowedFd<'_>) -> io::Result<ProgramInfo> {
    let mut value = ProgramInfo::default();
    info(fd, &mut value)?;
    Ok(value)
}

/// First part of `struct bpf_link_info`, with its `xdp` arm.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct LinkInfo {
    kind: u32,
    pub(super) id: u32,
    pub(super) program_id: u32,
    pad: u32,
    ifindex: u32,
    pad2: u32,
    rest: [u64; 4],
}

impl LinkInfo {
    /// The interface; 0 once it is gone, or if the link is not an XDP link.
    pub(super) const fn ifindex(&self) -> u32 {
        if self.kind == LINK_TYPE_XDP { self.ifindex } else { 0 }
    }
}

/// What the kernel knows of a link.
pub(super) fn link_info(fd: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    let mut value = LinkInfo::default();
    info(fd, &mut value)?;
    Ok(value)
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct IdAttribute {
    id: u32,
    next: u32,
    flags: u32,
}

/// Opens a program by id (needs `CAP_SYS_ADMIN`).
pub(super) fn program_by_id(id: u32) -> io::Result<OwnedFd> {
    // SAFETY: the command takes no address.
    unsafe { call_for_fd(PROG_GET_FD_BY_ID, &mut IdAttribute { id, next: 0, flags: 0 }) }
}

/// The XDP link at an interface that runs this program, if there is one (needs `CAP_SYS_ADMIN`).
pub(super) fn link_of(ifindex: u32, program_id: u32) -> io::Result<Option<(OwnedFd, LinkInfo)>> {
    let mut id = 0;
    loop {
        let mut attribute = IdAttribute { id, next: 0, flags: 0 };
        // SAFETY: the command takes no address.
        match unsafe { call(LINK_GET_NEXT_ID, &mut attribute) } {
            Ok(_) => id = attribute.next,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            Err(error) => return Err(error),
        }
        // SAFETY: the command takes no address.
        let link = match unsafe { call_for_fd(LINK_GET_FD_BY_ID, &mut IdAttribute { id, next: 0, flags: 0 }) } {
            Ok(link) => link,
            // It went away between the two calls.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => continue,
            Err(error) => return Err(error),
        };
        let info = link_info(link.as_fd())?;
        if info.ifindex() == ifindex && info.program_id == program_id {
            return Ok(Some((link, info)));
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct LinkAttribute {
    first: u32,
    second: u32,
    third: u32,
    fourth: u32,
}

/// Attaches a program to an interface. `mode` is [`XDP_NATIVE`] or [`XDP_GENERIC`].
pub(super) fn link_create(program: BorrowedFd<'_>, ifindex: u32, mode: u32) -> io::Result<OwnedFd> {
    let mut attribute = LinkAttribute { first: raw(program), second: ifindex, third: ATTACH_TYPE_XDP, fourth: mode };
    // SAFETY: the command takes no address.
    unsafe { call_for_fd(LINK_CREATE, &mut attribute) }
}

/// Replaces a link's program; no packet sees neither of the two.
pub(super) fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attribute = LinkAttribute { first: raw(link), second: raw(program), third: 0, fourth: 0 };
    // SAFETY: the command takes no address.
    unsafe { call(LINK_UPDATE, &mut attribute) }.map(|_| ())
}

/// Detaches a link, whoever else holds it.
pub(super) fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attribute = LinkAttribute { first: raw(link), second: 0, third: 0, fourth: 0 };
    // SAFETY: the command takes no address.
    unsafe { call(LINK_DETACH, &mut attribute) }.map(|_| ())
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct TestRunAttribute {
    program: u32,
    result: u32,
    length_in: u32,
    length_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    context_in_length: u32,
    context_out_length: u32,
    context_in: u64,
    context_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    pad: u32,
}

/// Runs an XDP program once on `packet`, which is replaced by what the program made of it. Returns the verdict.
pub(super) fn test_run(program: BorrowedFd<'_>, packet: &mut [u8]) -> io::Result<u32> {
    let input = packet.to_vec();
    let mut attribute = TestRunAttribute {
        program: raw(program),
        length_in: input.len() as u32,
        length_out: packet.len() as u32,
        data_in: address(input.as_slice()),
        data_out: address_mut(packet),
        repeat: 1,
        ..TestRunAttribute::default()
    };
    // SAFETY: both buffers have the lengths given and outlive the call.
    unsafe { call(PROG_TEST_RUN, &mut attribute) }?;
    Ok(attribute.result)
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ElementAttribute {
    map: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct BatchAttribute {
    position_in: u64,
    position_out: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct CreateAttribute {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner: u32,
    numa_node: u32,
    name: [u8; 16],
}

/// Makes a map of this type and these sizes.
pub(super) fn create_map(name: &str, shape: &MapInfo) -> io::Result<OwnedFd> {
    let mut bytes = [0; 16];
    for (to, from) in bytes.iter_mut().take(15).zip(name.bytes()) {
        *to = from;
    }
    let mut attribute = CreateAttribute {
        kind: shape.kind,
        key_size: shape.key_size,
        value_size: shape.value_size,
        max_entries: shape.max_entries,
        flags: shape.flags,
        inner: 0,
        numa_node: 0,
        name: bytes,
    };
    // SAFETY: the command takes no address.
    unsafe { call_for_fd(MAP_CREATE, &mut attribute) }
}

/// A queue with typed entries. The size has been compared with the kernel's.
pub(super) struct Queue<V> {
    fd: OwnedFd,
    types: PhantomData<fn() -> V>,
}

impl<V: Pod> Queue<V> {
    /// Opens a pinned queue.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let fd = open(path)?;
        let info = map_info(fd.as_fd())?;
        if info.key_size != 0 || info.value_size as usize != size_of::<V>() {
            return Err(io::Error::other(format!(
                "map has keys of {} and values of {} bytes, not 0 and {}",
                info.key_size,
                info.value_size,
                size_of::<V>()
            )));
        }
        Ok(Self { fd, types: PhantomData })
    }

    /// Puts an entry at the end.
    pub(super) fn push(&self, value: &V) -> io::Result<()> {
        let mut attribute =
            ElementAttribute { map: raw(self.fd.as_fd()), pad: 0, key: 0, value: address(value), flags: 0 };
        // SAFETY: the value has the map's size, as `open` has checked; a queue has no keys.
        unsafe { call(MAP_UPDATE_ELEM, &mut attribute) }.map(|_| ())
    }

    /// Takes the entry at the front.
    pub(super) fn pop(&self) -> io::Result<Option<V>> {
        let mut value = V::zeroed();
        let mut attribute =
            ElementAttribute { map: raw(self.fd.as_fd()), pad: 0, key: 0, value: address_mut(&mut value), flags: 0 };
        // SAFETY: as in `push`.
        match unsafe { call(MAP_LOOKUP_AND_DELETE_ELEM, &mut attribute) } {
            Ok(_) => Ok(Some(value)),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Elements asked for in one batch.
const BATCH: usize = 16_384;
/// Bytes for a batch's position.
const POSITION: usize = 64;

/// A map with typed keys and values. The sizes have been compared with the kernel's.
pub(super) struct Map<K, V> {
    fd: Arc<OwnedFd>,
    info: MapInfo,
    types: PhantomData<fn() -> (K, V)>,
}

impl<K, V> Clone for Map<K, V> {
    fn clone(&self) -> Self {
        Self { fd: Arc::clone(&self.fd), info: self.info, types: PhantomData }
    }
}

impl<K: Pod, V: Pod> Map<K, V> {
    /// Takes a map; the error says which sizes were found.
    pub(super) fn new(fd: OwnedFd) -> io::Result<Self> {
        let info = map_info(fd.as_fd())?;
        if info.key_size as usize != size_of::<K>() || info.value_size as usize != size_of::<V>() {
            return Err(io::Error::other(format!(
                "map has keys of {} and values of {} bytes, not {} and {}",
                info.key_size,
                info.value_size,
                size_of::<K>(),
                size_of::<V>()
            )));
        }
        Ok(Self { fd: Arc::new(fd), info, types: PhantomData })
    }

    /// Opens a pinned map.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        Self::new(open(path)?)
    }

    pub(super) const fn info(&self) -> &MapInfo {
        &self.info
    }

    fn map(&self) -> u32 {
        raw(self.fd.as_fd())
    }

    /// The value of a key.
    pub(super) fn get(&self, key: &K) -> io::Result<Option<V>> {
        let mut value = V::zeroed();
        let mut attribute =
            ElementAttribute { map: self.map(), pad: 0, key: address(key), value: address_mut(&mut value), flags: 0 };
        // SAFETY: key and value have the map's sizes, as `new` has checked.
        match unsafe { call(MAP_LOOKUP_ELEM, &mut attribute) } {
            Ok(_) => Ok(Some(value)),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sets the value of a key.
    pub(super) fn set(&self, key: &K, value: &V) -> io::Result<()> {
        let mut attribute =
            ElementAttribute { map: self.map(), pad: 0, key: address(key), value: address(value), flags: 0 };
        // SAFETY: key and value have the map's sizes, as `new` has checked.
        unsafe { call(MAP_UPDATE_ELEM, &mut attribute) }.map(|_| ())
    }

    /// Adds a key with its value; whether it was absent.
    pub(super) fn insert(&self, key: &K, value: &V) -> io::Result<bool> {
        const NO_EXIST: u64 = 1;
        let mut attribute =
            ElementAttribute { map: self.map(), pad: 0, key: address(key), value: address(value), flags: NO_EXIST };
        // SAFETY: key and value have the map's sizes, as `new` has checked.
        match unsafe { call(MAP_UPDATE_ELEM, &mut attribute) } {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes a key; whether it was there.
    pub(super) fn delete(&self, key: &K) -> io::Result<bool> {
        let mut attribute = ElementAttribute { map: self.map(), pad: 0, key: address(key), value: 0, flags: 0 };
        // SAFETY: the key has the map's size, as `new` has checked.
        match unsafe { call(MAP_DELETE_ELEM, &mut attribute) } {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Sets many; on an error, the number of those that were set before it.
    pub(super) fn set_many(&self, keys: &[K], values: &[V]) -> Result<(), (usize, io::Error)> {
        debug_assert_eq!(keys.len(), values.len());
        let mut done = 0;
        while done < keys.len() {
            let count = (keys.len() - done).min(BATCH);
            let mut attribute = BatchAttribute {
                position_in: 0,
                position_out: 0,
                keys: address(&keys[done..done + count]),
                values: address(&values[done..done + count]),
                count: count as u32,
                map: self.map(),
                element_flags: 0,
                flags: 0,
            };
            // SAFETY: `count` keys and values of the map's sizes.
            match unsafe { call(MAP_UPDATE_BATCH, &mut attribute) } {
                Ok(_) => done += count,
                Err(error) if no_batches(&error) => {
                    for (key, value) in keys[done..].iter().zip(&values[done..]) {
                        self.set(key, value).map_err(|error| (done, error))?;
                        done += 1;
                    }
                }
                Err(error) => return Err((done + (attribute.count as usize).min(count), error)),
            }
        }
        Ok(())
    }

    /// Hands every element to `each`, in no order. Elements that come or go meanwhile may be missed or, in a hash, seen twice.
    pub(super) fn for_each(&self, mut each: impl FnMut(&K, &V)) -> io::Result<()> {
        // The position is a bucket number for hashes and a key for arrays.
        let mut position = [0_u8; POSITION];
        let mut next = [0_u8; POSITION];
        let mut first = true;
        let mut capacity = BATCH.min(self.info.max_entries.max(1) as usize);
        let mut keys = vec![K::zeroed(); capacity];
        let mut values = vec![V::zeroed(); capacity];
        if size_of::<K>() > position.len() {
            return self.walk(each);
        }
        loop {
            let mut attribute = BatchAttribute {
                position_in: if first { 0 } else { address(&position) },
                position_out: address_mut(&mut next),
                keys: address_mut(keys.as_mut_slice()),
                values: address_mut(values.as_mut_slice()),
                count: capacity as u32,
                map: self.map(),
                element_flags: 0,
                flags: 0,
            };
            // SAFETY: room for `count` keys and values of the map's sizes; the positions hold the larger of a key and a bucket number.
            let end = match unsafe { call(MAP_LOOKUP_BATCH, &mut attribute) } {
                Ok(_) => false,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
                // A bucket with more elements than there was room for.
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                    capacity *= 2;
                    keys.resize(capacity, K::zeroed());
                    values.resize(capacity, V::zeroed());
                    continue;
                }
                Err(error) if first && no_batches(&error) => return self.walk(each),
                Err(error) => return Err(error),
            };
            let count = (attribute.count as usize).min(capacity);
            for (key, value) in keys[..count].iter().zip(&values[..count]) {
                each(key, value);
            }
            if end {
                return Ok(());
            }
            position = next;
            first = false;
        }
    }

    /// As [`Self::for_each`] of a hash, by several threads if it is large: each gathers in what `new` makes.
    pub(super) fn gather<T: Send>(
        &self,
        new: impl Fn() -> T + Sync,
        each: impl Fn(&mut T, &K, &V) + Sync,
    ) -> io::Result<Vec<T>> {
        /// Smaller maps are read sooner than a thread starts.
        const LARGE: u32 = 65_536;
        // As the kernel makes them. A batch may begin at any bucket.
        let buckets = self.info.max_entries.checked_next_power_of_two().unwrap_or(1 << 31);
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(8) as u32;
        if threads == 1 || self.info.max_entries < LARGE || size_of::<K>() > POSITION {
            let mut gathered = new();
            self.for_each(|key, value| each(&mut gathered, key, value))?;
            return Ok(vec![gathered]);
        }
        let bound = |part: u32| (u64::from(buckets) * u64::from(part) / u64::from(threads)) as u32;
        let part = |number: u32| {
            let mut gathered = new();
            let end = (number + 1 < threads).then(|| bound(number + 1));
            self.buckets(bound(number), end, |key, value| each(&mut gathered, key, value))?;
            Ok(gathered)
        };
        let parts: Vec<io::Result<T>> = std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|number| scope.spawn(move || part(number))).collect();
            let joined = others.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread that reads the map has ended")))
            });
            // The first part is this thread's.
            let first = part(0);
            std::iter::once(first).chain(joined).collect()
        });
        match parts.into_iter().collect() {
            // Then it was the first call that failed: nothing is gathered twice.
            Err(error) if no_batches(&error) => {
                let mut gathered = new();
                self.walk(|key, value| each(&mut gathered, key, value))?;
                Ok(vec![gathered])
            }
            result => result,
        }
    }

    /// The elements of the buckets from `start` up to `end` (`None`: the last) of a hash.
    fn buckets(&self, start: u32, end: Option<u32>, mut each: impl FnMut(&K, &V)) -> io::Result<()> {
        let mut batch = Batch::new(BATCH);
        let mut position = start;
        loop {
            let (count, next) = batch.read(self.map(), position)?;
            let past = end.filter(|&end| next.is_none_or(|next| next > end));
            let Some(end) = past else {
                for (key, value) in batch.keys[..count].iter().zip(&batch.values[..count]) {
                    each(key, value);
                }
                match next {
                    Some(next) if Some(next) != end => position = next,
                    _ => return Ok(()),
                }
                continue;
            };
            // A batch ends where its room does, here behind the end: what lies there is read once more, to be left out.
            let mut behind = BTreeSet::new();
            let mut beyond = Batch::<K, V>::new(BATCH);
            let mut from = end;
            loop {
                let (count, after) = beyond.read(self.map(), from)?;
                behind.extend(beyond.keys[..count].iter().map(|key| bytemuck::bytes_of(key).to_vec()));
                match after {
                    Some(after) if next.is_none_or(|next| after < next) => from = after,
                    _ => break,
                }
            }
            for (key, value) in batch.keys[..count].iter().zip(&batch.values[..count]) {
                if !behind.contains(bytemuck::bytes_of(key)) {
                    each(key, value);
                }
            }
            return Ok(());
        }
    }

    /// As [`Self::for_each`], key by key.
    fn walk(&self, mut each: impl FnMut(&K, &V)) -> io::Result<()> {
        let mut key: Option<K> = None;
        let mut next = K::zeroed();
        loop {
            let mut attribute = ElementAttribute {
                map: self.map(),
                pad: 0,
                key: key.as_ref().map_or(0, address),
                value: address_mut(&mut next),
                flags: 0,
            };
            // SAFETY: both keys have the map's size, as `new` has checked.
            match unsafe { call(MAP_GET_NEXT_KEY, &mut attribute) } {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
                Err(error) => return Err(error),
            }
            if let Some(value) = self.get(&next)? {
                each(&next, &value);
            }
            key = Some(next);
        }
    }
}

/// Room for a batch of a hash.
struct Batch<K, V> {
    keys: Vec<K>,
    values: Vec<V>,
}

impl<K: Pod, V: Pod> Batch<K, V> {
    fn new(capacity: usize) -> Self {
        Self { keys: vec![K::zeroed(); capacity], values: vec![V::zeroed(); capacity] }
    }

    /// Reads what fits from this bucket on: the number of elements, and the bucket to go on with (`None`: there are no more).
    fn read(&mut self, map: u32, bucket: u32) -> io::Result<(usize, Option<u32>)> {
        loop {
            let capacity = self.keys.len();
            let (position, mut next) = ([bucket; POSITION / 4], [0_u32; POSITION / 4]);
            let mut attribute = BatchAttribute {
                position_in: address(&position),
                position_out: address_mut(&mut next),
                keys: address_mut(self.keys.as_mut_slice()),
                values: address_mut(self.values.as_mut_slice()),
                count: capacity as u32,
                map,
                element_flags: 0,
                flags: 0,
            };
            // SAFETY: room for `count` keys and values of the map's sizes, which are those of the types (`Map::new` has checked); a
            // position is a bucket number.
            match unsafe { call(MAP_LOOKUP_BATCH, &mut attribute) } {
                Ok(_) => return Ok(((attribute.count as usize).min(capacity), Some(next[0]))),
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                    return Ok(((attribute.count as usize).min(capacity), None));
                }
                // A bucket with more elements than there was room for.
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                    self.keys.resize(capacity * 2, K::zeroed());
                    self.values.resize(capacity * 2, V::zeroed());
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// The kernel (< 5.6, or < 5.13 for per-CPU arrays) knows no batches for this map.
fn no_batches(error: &io::Error) -> bool {
    /// `ENOTSUPP`, which is not part of the C library's interface.
    const NOT_SUPPORTED: i32 = 524;
    matches!(error.raw_os_error(), Some(libc::EINVAL | NOT_SUPPORTED | libc::EOPNOTSUPP))
}

/// A per-CPU array, read by index.
#[derive(Clone)]
pub(super) struct PerCpu<V> {
    fd: Arc<OwnedFd>,
    entries: u32,
    cpus: usize,
    types: PhantomData<fn() -> V>,
}

impl<V: Pod> PerCpu<V> {
    /// Opens a pinned map.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let fd = open(path)?;
        let info = map_info(fd.as_fd())?;
        // The kernel pads each CPU's value to 8 bytes; all of ours have such a size anyway.
        if info.value_size as usize != size_of::<V>() || !size_of::<V>().is_multiple_of(8) {
            return Err(io::Error::other(format!(
                "map has values of {} bytes, not {}",
                info.value_size,
                size_of::<V>()
            )));
        }
        let cpus = aya::util::nr_cpus().map_err(|(_, error)| error)?;
        Ok(Self { fd: Arc::new(fd), entries: info.max_entries, cpus, types: PhantomData })
    }

    /// Hands the values of all CPUs of every index to `each`.
    pub(super) fn for_each(&self, mut each: impl FnMut(u32, &[V])) -> io::Result<()> {
        let capacity = 2048.min(self.entries.max(1) as usize);
        let mut keys = vec![0_u32; capacity];
        let mut values = vec![V::zeroed(); capacity * self.cpus];
        let (mut position, mut next, mut first) = (0_u32, 0_u32, true);
        loop {
            let mut attribute = BatchAttribute {
                position_in: if first { 0 } else { address(&position) },
                position_out: address_mut(&mut next),
                keys: address_mut(keys.as_mut_slice()),
                values: address_mut(values.as_mut_slice()),
                count: capacity as u32,
                map: raw(self.fd.as_fd()),
                element_flags: 0,
                flags: 0,
            };
            // SAFETY: room for `count` keys, and for `count` values of every possible CPU.
            let end = match unsafe { call(MAP_LOOKUP_BATCH, &mut attribute) } {
                Ok(_) => false,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
                Err(error) if first && no_batches(&error) => {
                    for index in 0..self.entries {
                        each(index, &self.get(index)?);
                    }
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            let count = (attribute.count as usize).min(capacity);
            for (slot, &index) in keys[..count].iter().enumerate() {
                each(index, &values[slot * self.cpus..(slot + 1) * self.cpus]);
            }
            if end {
                return Ok(());
            }
            (position, first) = (next, false);
        }
    }

    /// The values of all CPUs.
    pub(super) fn get(&self, index: u32) -> io::Result<Vec<V>> {
        let mut values = vec![V::zeroed(); self.cpus];
        let mut attribute = ElementAttribute {
            map: raw(self.fd.as_fd()),
            pad: 0,
            key: address(&index),
            value: address_mut(values.as_mut_slice()),
            flags: 0,
        };
        // SAFETY: room for one value of every possible CPU.
        unsafe { call(MAP_LOOKUP_ELEM, &mut attribute) }?;
        Ok(values)
    }

    /// Sets the value of all CPUs to zero.
    pub(super) fn clear(&self, index: u32) -> io::Result<()> {
        self.set(index, &vec![V::zeroed(); self.cpus])
    }

    /// Sets the values of all CPUs.
    pub(super) fn set(&self, index: u32, values: &[V]) -> io::Result<()> {
        if values.len() != self.cpus {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let mut attribute = ElementAttribute {
            map: raw(self.fd.as_fd()),
            pad: 0,
            key: address(&index),
            value: address(values),
            flags: 0,
        };
        // SAFETY: one value of every possible CPU.
        unsafe { call(MAP_UPDATE_ELEM, &mut attribute) }.map(|_| ())
    }
}

/// Waits until every BPF program that was running when this was called has ended.
pub(super) fn barrier() {
    const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;
    // SAFETY: the command takes no address. With more than one CPU it is `synchronize_rcu`, and XDP programs are RCU readers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if result != 0 || std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1) {
        // Refused with nohz_full; does nothing on one CPU. No program runs as long as this.
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
}

/// Whether the path is on a BPF file system; `Err` says what is there instead.
pub(super) fn is_bpffs(path: &Path) -> Result<(), String> {
    match nix::sys::statfs::statfs(path) {
        Ok(found) if found.filesystem_type() == nix::sys::statfs::BPF_FS_MAGIC => Ok(()),
        Ok(found) => Err(format!("its file system has the type {:#x}", found.filesystem_type().0)),
        Err(error) => Err(error.desc().to_owned()),
    }
}
