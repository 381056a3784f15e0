//! Loading, pinning and attaching the programs.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use aya::maps::{Map, MapData, ProgramArray};
use aya::programs::links::FdLink;
use aya::programs::{ProgramError, TracePoint, Xdp};
use aya::{Ebpf, EbpfLoader};
use lbd_common::abi::{self, names};
use lbd_common::hash::{self, LookupSecret, Seed};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::bpf::{self, MapInfo};
use super::migrate::{self, Predecessor, Stage};
use super::netlink::{Client, LinkDetails};
use super::{Attached, DataplaneError, InterfaceXdp, Mode};
use crate::config::{Config, XdpMode};

/// Pins of the programs at tracepoints begin with this.
const TRACE: &str = "trace-";

/// The agent's own map: what each next hop stands for.
pub(super) const HOP_RECORDS: &str = "next_hop_keys";

/// Where everything is pinned.
#[derive(Clone, Debug)]
pub(super) struct Paths {
    /// The BPF file system.
    pub(super) bpffs: PathBuf,
    /// `<bpffs>/lbd`.
    pub(super) root: PathBuf,
    /// `<bpffs>/lbd/v<ABI>`.
    pub(super) maps: PathBuf,
    /// `<bpffs>/lbd/links`.
    pub(super) links: PathBuf,
}

impl Paths {
    pub(super) fn new(bpffs: &Path) -> Self {
        let root = bpffs.join("lbd");
        Self {
            bpffs: bpffs.to_owned(),
            maps: root.join(format!("v{}", abi::ABI_VERSION)),
            links: root.join("links"),
            root,
        }
    }

    pub(super) fn map(&self, name: &str) -> PathBuf {
        self.maps.join(name)
    }

    fn link(&self, interface: &str) -> PathBuf {
        self.links.join(pin_name(interface))
    }

    pub(super) fn check_bpffs(&self) -> Result<(), DataplaneError> {
        bpf::is_bpffs(&self.bpffs).map_err(|found| DataplaneError::NoBpffs { path: self.bpffs.clone(), found })
    }

    /// Refuses pins of another ABI, for whoever only reads ours.
    pub(super) fn check_abi(&self) -> Result<(), DataplaneError> {
        for (version, path) in versions(&self.root) {
            if version != abi::ABI_VERSION && !entries(&path).is_empty() {
                return Err(DataplaneError::Abi { path, found: version, wanted: abi::ABI_VERSION });
            }
        }
        Ok(())
    }

    fn create(&self) -> Result<(), DataplaneError> {
        for path in [&self.root, &self.maps, &self.links] {
            match fs::DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(DataplaneError::system(format!("cannot make {}", path.display()))(error));
                }
                _ => {}
            }
            fs::set_permissions(path, fs::Permissions::from_mode(0o700))
                .map_err(DataplaneError::system(format!("cannot close {} to others", path.display())))?;
        }
        Ok(())
    }
}

/// Directories of pinned maps by ABI version.
pub(super) fn versions(root: &Path) -> Vec<(u32, PathBuf)> {
    entries(root).into_iter().filter_map(|(name, path)| Some((name.strip_prefix('v')?.parse().ok()?, path))).collect()
}

/// Names and paths in a directory; none if it cannot be read.
pub(super) fn entries(path: &Path) -> Vec<(String, PathBuf)> {
    let Ok(entries) = fs::read_dir(path) else { return Vec::new() };
    let mut found: Vec<_> = entries
        .filter_map(Result::ok)
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
        .collect();
    found.sort();
    found
}

/// bpffs refuses names with dots, and interface names have no colons.
pub(super) fn pin_name(interface: &str) -> String {
    interface.replace('.', ":")
}

pub(super) fn interface_name(pin: &str) -> String {
    pin.replace(':', ".")
}

/// What the name of a pinned program or stage array says: interface, slot of the NIC, fingerprint of the code.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Build {
    interface: String,
    slot: u32,
    fingerprint: u64,
}

impl Build {
    fn name(&self, kind: &str) -> String {
        format!("{kind}-{}-{}-{:016x}", pin_name(&self.interface), self.slot, self.fingerprint)
    }

    fn parse(kind: &str, name: &str) -> Option<Self> {
        let rest = name.strip_prefix(kind)?.strip_prefix('-')?;
        let (rest, fingerprint) = rest.rsplit_once('-')?;
        let (interface, slot) = rest.rsplit_once('-')?;
        let fingerprint = u64::from_str_radix(fingerprint, 16).ok()?;
        Some(Self { interface: interface_name(interface), slot: slot.parse().ok()?, fingerprint })
    }
}

/// What the program expects of a pinned map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) name: String,
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
}

impl Shape {
    const fn info(&self) -> MapInfo {
        MapInfo::of(self.kind, self.key_size, self.value_size, self.max_entries, self.flags)
    }

    fn describe(kind: u32, key: u32, value: u32, entries: u32, flags: u32) -> String {
        format!("type {kind}, keys of {key} and values of {value} bytes, {entries} entries, flags {flags:#x}")
    }

    /// Compares with what is pinned.
    fn check(&self, path: &Path, found: &MapInfo) -> Result<(), DataplaneError> {
        let layout = (found.kind, found.key_size, found.value_size, found.flags);
        let wanted = (self.kind, self.key_size, self.value_size, self.flags);
        if layout == wanted && found.max_entries == self.max_entries {
            return Ok(());
        }
        let remedy = if layout == wanted {
            let setting = match self.name.as_str() {
                names::FLOWS4 | names::AGEING4 | names::ENDED4 => {
                    format!("set datapath.max_flows to {}, or ", found.max_entries / 2)
                }
                names::FLOWS6 | names::AGEING6 | names::ENDED6 => {
                    format!("set datapath.max_flows_v6 to {}, or ", found.max_entries / 2)
                }
                _ => String::new(),
            };
            format!("{setting}run `lbd detach` (connections are lost) and start again")
        } else {
            "it was made by another build: run that build, or `lbd detach` (connections are lost) and start again"
                .into()
        };
        Err(DataplaneError::Shape {
            path: path.to_owned(),
            wanted: Self::describe(self.kind, self.key_size, self.value_size, self.max_entries, self.flags),
            found: Self::describe(found.kind, found.key_size, found.value_size, found.max_entries, found.flags),
            remedy,
        })
    }

    /// Bytes that the kernel accounts for the map (`map_mem_usage` of hashtab.c, arraymap.c and queue_stack_maps.c), up to the sizes
    /// of its own structures.
    pub(super) fn memory(&self, cpus: u32) -> u64 {
        const HASH: u32 = 1;
        const ARRAY: u32 = 2;
        const PERCPU_ARRAY: u32 = 6;
        const QUEUE: u32 = 22;
        let (entries, cpus) = (u64::from(self.max_entries), u64::from(cpus));
        let (key, value) =
            (u64::from(self.key_size).next_multiple_of(8), u64::from(self.value_size).next_multiple_of(8));
        match self.kind {
            // A bucket of 16 bytes for each entry (rounded up to a power of two); elements with a header of 48 bytes, one spare for
            // each CPU.
            HASH => 16 * entries.next_power_of_two() + (48 + key + value) * (entries + cpus),
            ARRAY => value * entries,
            PERCPU_ARRAY => (8 + value * cpus) * entries,
            QUEUE => u64::from(self.value_size) * (entries + 1),
            _ => (key + value) * entries,
        }
    }
}

/// Sizes that the configuration sets.
fn sizes(config: &Config) -> [(&'static str, u32); 6] {
    let four = abi::flow_entries(config.datapath.max_flows);
    let six = abi::flow_entries(config.datapath.max_flows_v6);
    [
        (names::FLOWS4, four),
        (names::AGEING4, four),
        (names::ENDED4, four),
        (names::FLOWS6, six),
        (names::AGEING6, six),
        (names::ENDED6, six),
    ]
}

/// The maps that the object wants pinned, with the sizes that the configuration sets.
pub(super) fn shapes(object: &[u8], config: &Config) -> Result<Vec<Shape>, DataplaneError> {
    if object.is_empty() {
        return Err(DataplaneError::NoObject);
    }
    let parsed =
        aya_obj::Object::parse(object).map_err(|error| DataplaneError::Object { message: error.to_string() })?;
    let sizes: BTreeMap<&str, u32> = sizes(config).into_iter().collect();
    let mut shapes: Vec<Shape> = parsed
        .maps
        .iter()
        .filter(|(name, map)| {
            matches!(map.section_kind(), aya_obj::EbpfSectionKind::Maps | aya_obj::EbpfSectionKind::BtfMaps)
                && *name != names::STAGES
        })
        .map(|(name, map)| Shape {
            name: name.clone(),
            kind: map.map_type(),
            key_size: map.key_size(),
            value_size: map.value_size(),
            max_entries: sizes.get(name.as_str()).copied().unwrap_or(map.max_entries()),
            flags: map.map_flags(),
        })
        .collect();
    shapes.push(Shape {
        name: HOP_RECORDS.to_owned(),
        kind: bpf::TYPE_ARRAY,
        key_size: 4,
        value_size: size_of::<abi::AddressKey>() as u32,
        max_entries: abi::MAX_NEXT_HOPS,
        flags: 0,
    });
    shapes.sort_by(|left, right| left.name.cmp(&right.name));
    Ok(shapes)
}

/// The constant for a map's name.
pub(super) fn known_name(name: &str) -> &'static str {
    names::SHARED.into_iter().chain([HOP_RECORDS]).find(|known| *known == name).unwrap_or("other")
}

/// A program loaded for one NIC.
pub(super) struct Loaded {
    edge: OwnedFd,
    stages: OwnedFd,
    pub(super) control: OwnedFd,
    build: Build,
}

impl Loaded {
    /// The NIC's name.
    pub(super) fn interface(&self) -> &str {
        &self.build.interface
    }

    /// The program for the NIC.
    pub(super) fn edge(&self) -> BorrowedFd<'_> {
        self.edge.as_fd()
    }

    /// The control program.
    pub(super) const fn control(&self) -> &OwnedFd {
        &self.control
    }
}

/// An interface that our program is attached to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Nic {
    pub(super) interface: String,
    pub(super) index: u32,
    pub(super) slot: u32,
    pub(super) mode: Mode,
    pub(super) program_id: u32,
    /// Why generic mode was chosen.
    pub(super) warning: Option<String>,
    /// Nothing of ours was attached before.
    pub(super) new: bool,
}

fn interface_index(interface: &str) -> Result<u32, DataplaneError> {
    nix::net::if_::if_nametoindex(interface)
        .map_err(|_| DataplaneError::NoInterface { interface: interface.to_owned() })
}

/// Loads and attaches.
pub(super) struct Loader {
    pub(super) paths: Paths,
    object: Vec<u8>,
    shapes: Vec<Shape>,
    mode: XdpMode,
    sizes: [(&'static str, u32); 6],
    client: Client,
    /// What keys of the IPv6 flow table are mixed with: the programs are loaded with it.
    lookup_secret: LookupSecret,
    /// What is pinned of the ABI before ours.
    predecessor: Option<Predecessor>,
    /// One agent for these pins, wherever its state is.
    lock: Option<Flock<fs::File>>,
}

/// Takes the BPF file system for this process; the lock ends with it.
pub(super) fn lock(bpffs: &Path) -> Result<Flock<fs::File>, DataplaneError> {
    let failed = || DataplaneError::system(format!("cannot lock {}", bpffs.display()));
    let directory = fs::File::open(bpffs).map_err(failed())?;
    Flock::lock(directory, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| match error {
        Errno::EWOULDBLOCK => DataplaneError::Busy { bpffs: bpffs.to_owned() },
        error => failed()(error.into()),
    })
}

/// Whether an agent has the BPF file system.
pub(super) fn is_busy(bpffs: &Path) -> bool {
    matches!(lock(bpffs), Err(DataplaneError::Busy { .. }))
}

impl Loader {
    /// Checks everything that can be checked before anything is made.
    pub(super) fn new(config: &Config, object: &[u8]) -> Result<Self, DataplaneError> {
        let shapes = shapes(object, config)?;
        let paths = Paths::new(&config.datapath.bpffs);
        paths.check_bpffs()?;
        let predecessor = migrate::predecessor(&paths)?;
        // What an attempt to take over has left is made anew.
        let left = predecessor.as_ref().is_some_and(|it| it.stage == Stage::Forwarding);
        for shape in shapes.iter().filter(|_| !left) {
            let path = paths.map(&shape.name);
            match bpf::open(&path) {
                Ok(map) => {
                    let found = bpf::map_info(map.as_fd())
                        .map_err(DataplaneError::system(format!("{} is not a BPF map", path.display())))?;
                    shape.check(&path, &found)?;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(DataplaneError::system(format!("cannot open the pin {}", path.display()))(error));
                }
            }
        }
        let client = Client::new().map_err(DataplaneError::system("cannot open a netlink socket"))?;
        Ok(Self {
            paths,
            object: object.to_vec(),
            shapes,
            mode: config.datapath.mode,
            sizes: sizes(config),
            client,
            lookup_secret: [0; 4],
            predecessor,
            lock: None,
        })
    }

    /// Takes the pins for this process.
    pub(super) fn lock(&mut self, bpffs: &Path) -> Result<(), DataplaneError> {
        self.lock = Some(lock(bpffs)?);
        Ok(())
    }

    /// Makes the directories and the maps that are not there yet.
    pub(super) fn create_maps(&self) -> Result<(), DataplaneError> {
        self.paths.create()?;
        for shape in &self.shapes {
            let path = self.paths.map(&shape.name);
            if !path.exists() {
                bpf::create_map(&shape.name, &shape.info())
                    .and_then(|map| bpf::pin(map.as_fd(), &path))
                    .map_err(DataplaneError::system(format!("cannot make the map {}", path.display())))?;
            }
        }
        Ok(())
    }

    /// Tells the seed, once the maps are there: programs are loaded after that.
    pub(super) const fn set_seed(&mut self, seed: &Seed) {
        self.lookup_secret = hash::lookup_secret(seed);
    }

    /// Whether nothing of ours is pinned yet.
    pub(super) fn is_fresh(&self) -> bool {
        !self.paths.root.exists()
    }

    /// Refuses an interface that does not exist or carries another's program, before anything is changed.
    pub(super) fn check(&mut self, interface: &str) -> Result<(), DataplaneError> {
        let index = interface_index(interface)?;
        let details = self.details(interface, index)?;
        let pinned = bpf::open(&self.paths.link(interface)).and_then(|link| bpf::link_info(link.as_fd())).ok();
        for xdp in &details.xdp {
            let ours = pinned.is_some_and(|link| link.ifindex() == index && link.program_id == xdp.program_id);
            if !ours {
                let name = program_name(xdp.program_id);
                if name.as_deref() != Some(names::PROGRAM) {
                    let link = bpf::link_of(index, xdp.program_id).ok().flatten().map(|(_, info)| info.id);
                    return Err(foreign(interface, *xdp, name, link, xdp.mode));
                }
            }
        }
        Ok(())
    }

    /// What is pinned of the ABI before ours.
    pub(super) const fn predecessor(&self) -> Option<&Predecessor> {
        self.predecessor.as_ref()
    }

    /// Slots of the NICs that carry our program now, or our predecessor's.
    pub(super) fn slots(&self) -> BTreeMap<String, u32> {
        let old = self.predecessor.iter().flat_map(|old| builds_in(&old.maps, "edge"));
        builds(&self.paths, "edge")
            .into_iter()
            .chain(old)
            .filter(|(build, path)| {
                let link = bpf::open(&self.paths.link(&build.interface)).and_then(|link| bpf::link_info(link.as_fd()));
                let program = bpf::open(path).and_then(|program| bpf::program_info(program.as_fd()));
                matches!((link, program), (Ok(link), Ok(program)) if link.program_id == program.id)
            })
            .map(|(build, _)| (build.interface, build.slot))
            .collect()
    }

    /// Loads the program for one NIC over the pinned maps.
    pub(super) fn prepare(&self, interface: &str, slot: u32) -> Result<Loaded, DataplaneError> {
        self.load(interface, interface_index(interface)?, slot)
    }

    /// Pins what a loaded program needs to run without us.
    pub(super) fn pin_loaded(&self, loaded: &Loaded) -> Result<(), DataplaneError> {
        self.pin_build(loaded)?;
        self.pin_control(loaded)
    }

    /// Attaches a loaded program, or replaces the attached one atomically, or keeps that if its code is the same.
    pub(super) fn attach(&mut self, loaded: &Loaded) -> Result<Nic, DataplaneError> {
        let (interface, slot) = (loaded.build.interface.as_str(), loaded.build.slot);
        let index = interface_index(interface)?;
        let details = self.details(interface, index)?;
        let held = self.held(interface, index, &details)?;
        self.pin_control(loaded)?;
        let program = bpf::program_info(loaded.edge.as_fd())
            .map_err(DataplaneError::system(format!("cannot read the program loaded for {interface}")))?;
        let new = held.is_none();
        let (link, mode, program_id, warning) = match held {
            Some(held) if mode_fits(self.mode, held.mode) => {
                let same = self.same_code(&loaded.build, held.program_id);
                if same {
                    (held.link, held.mode, held.program_id, None)
                } else {
                    // Pinned first: a stage array that nothing pins empties itself when this process ends.
                    self.pin_build(loaded)?;
                    bpf::link_update(held.link.as_fd(), loaded.edge.as_fd())
                        .map_err(DataplaneError::system(format!("cannot replace the program at {interface}")))?;
                    (held.link, held.mode, program.id, None)
                }
            }
            held => {
                self.pin_build(loaded)?;
                if let Some(held) = held {
                    // The kernel cannot change the mode of an attachment.
                    tracing::warn!(
                        "{interface}: lbd's program leaves {} mode: packets are lost for a moment",
                        held.mode.as_str()
                    );
                    self.let_go(interface, &held)?;
                }
                let (link, mode, warning) = self.create_link(interface, index, &details, loaded)?;
                (link, mode, program.id, warning)
            }
        };
        self.pin_link(interface, &link)?;
        self.verify(interface, index, mode, program_id)?;
        self.forget_builds(interface, program_id);
        let warning = warning.or_else(|| {
            (self.mode == XdpMode::Auto && mode == Mode::Generic)
                .then(|| format!("{interface}: generic XDP mode, as chosen when lbd was first attached"))
        });
        Ok(Nic { interface: interface.to_owned(), index, slot, mode, program_id, warning, new })
    }

    /// Attaches in generic mode, whatever the configuration prefers.
    pub(super) fn attach_generic(&mut self, loaded: &Loaded) -> Result<Nic, DataplaneError> {
        let wanted = std::mem::replace(&mut self.mode, XdpMode::Generic);
        let nic = self.attach(loaded);
        self.mode = wanted;
        nic
    }

    fn details(&mut self, interface: &str, index: u32) -> Result<LinkDetails, DataplaneError> {
        self.client.link(index).map_err(DataplaneError::system(format!("cannot ask for the state of {interface}")))
    }

    /// Our own attachment, pinned or left over; an error if the interface carries another's program.
    fn held(&mut self, interface: &str, index: u32, details: &LinkDetails) -> Result<Option<Held>, DataplaneError> {
        let path = self.paths.link(interface);
        match bpf::open(&path) {
            Ok(link) => {
                let info = bpf::link_info(link.as_fd())
                    .map_err(DataplaneError::system(format!("{} is not a BPF link", path.display())))?;
                let mode = details.xdp.iter().find(|xdp| xdp.program_id == info.program_id).and_then(|xdp| xdp.mode);
                if let (true, Some(mode)) = (info.ifindex() == index, mode) {
                    return Ok(Some(Held { link, mode, program_id: info.program_id }));
                }
                // The interface was deleted or renamed.
                if info.ifindex() != 0 {
                    bpf::link_detach(link.as_fd())
                        .map_err(DataplaneError::system(format!("cannot detach the stale link {}", path.display())))?;
                }
                fs::remove_file(&path)
                    .map_err(DataplaneError::system(format!("cannot remove the stale pin {}", path.display())))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(DataplaneError::system(format!("cannot open the pin {}", path.display()))(error)),
        }
        let mut held = None;
        for xdp in &details.xdp {
            let name = program_name(xdp.program_id);
            let link = bpf::link_of(index, xdp.program_id);
            match (name.as_deref() == Some(names::PROGRAM), link, xdp.mode) {
                (true, Ok(Some((link, _))), Some(mode)) => {
                    tracing::warn!("{interface}: taking over lbd's own program, whose pin is gone");
                    held = Some(Held { link, mode, program_id: xdp.program_id });
                }
                (true, Ok(None), Some(mode)) => {
                    tracing::warn!("{interface}: replacing lbd's own program, left over from another start");
                    self.client
                        .detach_xdp(index, mode)
                        .map_err(DataplaneError::system(format!("cannot detach lbd's own left-over at {interface}")))?;
                }
                (_, link, mode) => {
                    return Err(foreign(interface, *xdp, name, link.ok().flatten().map(|(_, info)| info.id), mode));
                }
            }
        }
        Ok(held)
    }

    /// The object over the pinned maps.
    fn object(&self, base: u32, index: u32) -> Result<Ebpf, String> {
        let mut loader = EbpfLoader::new();
        loader
            .override_global(abi::GLOBAL_SEGMENT_BASE, &base, true)
            .override_global(abi::GLOBAL_IFINDEX, &index, true)
            .override_global(abi::GLOBAL_LOOKUP_SECRET, &self.lookup_secret, true);
        for (name, entries) in self.sizes {
            loader.map_max_entries(name, entries);
        }
        for shape in &self.shapes {
            loader.map_pin_path(&shape.name, self.paths.map(&shape.name));
        }
        loader.load(&self.object).map_err(|error| chain(&error))
    }

    /// Attaches the programs that count what goes wrong after the verdict. They are no condition for forwarding: the error is for a
    /// warning.
    pub(super) fn trace(&self) -> Result<(), String> {
        let mut ebpf = self.object(0, 0)?;
        let mut current = Vec::new();
        for (tracepoint, name) in abi::TRACE_PROGRAMS {
            let program: &mut TracePoint = ebpf
                .program_mut(name)
                .ok_or_else(|| format!("the object has no program {name}"))?
                .try_into()
                .map_err(|error: ProgramError| chain(&error))?;
            match program.load() {
                Ok(()) | Err(ProgramError::AlreadyLoaded) => {}
                Err(error) => return Err(format!("program {name}: {}", chain(&error))),
            }
            let info = program
                .fd()
                .map_err(|error| chain(&error))
                .and_then(|fd| bpf::program_info(fd.as_fd()).map_err(|error| error.to_string()))?;
            let pin = format!("{TRACE}{tracepoint}-{:016x}", u64::from_be_bytes(info.tag));
            let path = self.paths.map(&pin);
            if !path.exists() {
                let link = program
                    .attach("xdp", tracepoint)
                    .and_then(|link| program.take_link(link))
                    .map_err(|error| format!("tracepoint {tracepoint}: {}", chain(&error)))?;
                let link =
                    FdLink::try_from(link).map_err(|error| format!("tracepoint {tracepoint}: {}", chain(&error)))?;
                link.pin(&path).map_err(|error| format!("cannot pin at {}: {}", path.display(), chain(&error)))?;
            }
            current.push(pin);
        }
        for (name, path) in entries(&self.paths.maps) {
            if name.starts_with(TRACE) && !current.contains(&name) {
                let _ = fs::remove_file(path);
            }
        }
        Ok(())
    }

    /// Tells those programs which NICs and programs are ours.
    pub(super) fn own<'a>(&self, nics: impl IntoIterator<Item = &'a Nic>) -> io::Result<()> {
        let map = bpf::Map::<u32, u32>::open(&self.paths.map(names::OWN))?;
        let wanted: Vec<u32> =
            nics.into_iter().flat_map(|nic| [nic.program_id, abi::OWN_INTERFACE | nic.index]).collect();
        let mut stale = Vec::new();
        map.for_each(|&key, _| stale.extend((!wanted.contains(&key)).then_some(key)))?;
        for key in stale {
            map.delete(&key)?;
        }
        wanted.iter().try_for_each(|key| map.set(key, &1))
    }

    fn load(&self, interface: &str, index: u32, slot: u32) -> Result<Loaded, DataplaneError> {
        let failed = |message: String| DataplaneError::Load { interface: interface.to_owned(), message };
        let base = slot * abi::VLANS;
        let mut ebpf = self.object(base, index).map_err(failed)?;
        let Some(Map::ProgramArray(stages)) = ebpf.take_map(names::STAGES) else {
            return Err(DataplaneError::Object { message: format!("it has no program array {}", names::STAGES) });
        };
        let stages_fd = stages.fd().as_fd().try_clone_to_owned().map_err(|error| failed(error.to_string()))?;
        let mut stages: ProgramArray<MapData> = Map::ProgramArray(stages)
            .try_into()
            .map_err(|error: aya::maps::MapError| DataplaneError::Object { message: chain(&error) })?;
        let mut fingerprint = Fingerprint::new();
        fingerprint.add(&base.to_ne_bytes());
        fingerprint.add(&index.to_ne_bytes());
        // The kernel's tag of a program does not tell over which maps it runs: a map that was made anew is another.
        for shape in &self.shapes {
            let id = bpf::open(&self.paths.map(&shape.name))
                .and_then(|map| bpf::map_info(map.as_fd()))
                .map_err(|error| failed(format!("map {}: {error}", shape.name)))?
                .id;
            fingerprint.add(&id.to_ne_bytes());
        }
        for (stage, name) in abi::STAGE_PROGRAMS {
            let program = load_program(&mut ebpf, name, &mut fingerprint).map_err(failed)?;
            stages
                .set(stage, program.fd().map_err(|error| failed(chain(&error)))?, 0)
                .map_err(|error| failed(chain(&error)))?;
        }
        let edge = owned(load_program(&mut ebpf, names::PROGRAM, &mut fingerprint).map_err(failed)?).map_err(failed)?;
        // The control program is not attached anywhere: its code does not count.
        let control =
            owned(load_program(&mut ebpf, names::CONTROL, &mut Fingerprint::new()).map_err(failed)?).map_err(failed)?;
        let build = Build { interface: interface.to_owned(), slot, fingerprint: fingerprint.0 };
        Ok(Loaded { edge, stages: stages_fd, control, build })
    }

    /// Whether the attached program is the one that we would attach.
    fn same_code(&self, build: &Build, program_id: u32) -> bool {
        bpf::open(&self.paths.map(&build.name("stages"))).is_ok()
            && bpf::open(&self.paths.map(&build.name("edge")))
                .and_then(|program| bpf::program_info(program.as_fd()))
                .is_ok_and(|info| info.id == program_id)
    }

    fn pin_build(&self, loaded: &Loaded) -> Result<(), DataplaneError> {
        for (kind, fd) in [("stages", &loaded.stages), ("edge", &loaded.edge)] {
            replace_pin(fd.as_fd(), &self.paths.map(&loaded.build.name(kind)))?;
        }
        Ok(())
    }

    /// The control program is pinned so that the clock can be read without the agent.
    fn pin_control(&self, loaded: &Loaded) -> Result<(), DataplaneError> {
        replace_pin(loaded.control.as_fd(), &self.paths.map(names::CONTROL))
    }

    fn pin_link(&self, interface: &str, link: &OwnedFd) -> Result<(), DataplaneError> {
        let path = self.paths.link(interface);
        if path.exists() {
            return Ok(());
        }
        bpf::pin(link.as_fd(), &path)
            .map_err(DataplaneError::system(format!("cannot pin the attachment at {}", path.display())))
    }

    fn let_go(&self, interface: &str, held: &Held) -> Result<(), DataplaneError> {
        bpf::link_detach(held.link.as_fd())
            .map_err(DataplaneError::system(format!("cannot detach lbd's own program from {interface}")))?;
        match fs::remove_file(self.paths.link(interface)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(DataplaneError::system(format!("cannot remove the pin of {interface}"))(error))
            }
            _ => Ok(()),
        }
    }

    fn create_link(
        &mut self,
        interface: &str,
        index: u32,
        details: &LinkDetails,
        loaded: &Loaded,
    ) -> Result<(OwnedFd, Mode, Option<String>), DataplaneError> {
        let modes: &[Mode] = match self.mode {
            XdpMode::Auto => &[Mode::Native, Mode::Generic],
            XdpMode::Native => &[Mode::Native],
            XdpMode::Generic => &[Mode::Generic],
        };
        let mut first: Option<(Mode, String, String)> = None;
        for &mode in modes {
            match bpf::link_create(loaded.edge.as_fd(), index, flags(mode)) {
                Ok(link) => {
                    let warning = first.map(|(_, reason, remedy)| {
                        format!("{interface}: generic XDP mode, because native mode is refused: {reason}; {remedy}")
                    });
                    return Ok((link, mode, warning));
                }
                Err(error) => {
                    let text = self.client.why_not(index, loaded.edge.as_raw_fd(), mode);
                    let (reason, remedy) = refusal(mode, details, &error, text);
                    first.get_or_insert((mode, reason, remedy));
                }
            }
        }
        let (mode, reason, remedy) =
            first.unwrap_or((Mode::Generic, "no mode to try".to_owned(), "set datapath.mode".to_owned()));
        Err(DataplaneError::Attach { interface: interface.to_owned(), mode: mode.as_str(), reason, remedy })
    }

    /// Asks the kernel what it did.
    fn verify(&mut self, interface: &str, index: u32, mode: Mode, program_id: u32) -> Result<(), DataplaneError> {
        let found = self.details(interface, index)?.xdp;
        if found == [InterfaceXdp { mode: Some(mode), program_id }] {
            return Ok(());
        }
        Err(DataplaneError::Attach {
            interface: interface.to_owned(),
            mode: mode.as_str(),
            reason: format!("the kernel reports {found:?}, wanted program {program_id} alone"),
            remedy: "see `ip link show`, and report this".to_owned(),
        })
    }

    /// Removes the pins of programs that were replaced.
    fn forget_builds(&self, interface: &str, program_id: u32) {
        let programs = builds(&self.paths, "edge");
        let current = programs.iter().find(|(build, path)| {
            build.interface == interface
                && bpf::open(path)
                    .and_then(|program| bpf::program_info(program.as_fd()))
                    .is_ok_and(|info| info.id == program_id)
        });
        let Some((current, _)) = current else { return };
        for (build, path) in programs.iter().chain(&builds(&self.paths, "stages")) {
            if build.interface == interface && build != current {
                let _ = fs::remove_file(path);
            }
        }
    }

    /// Undoes an attachment made by this start.
    pub(super) fn undo(&self, nic: &Nic) {
        let path = self.paths.link(&nic.interface);
        if let Ok(link) = bpf::open(&path) {
            let _ = bpf::link_detach(link.as_fd());
            let _ = fs::remove_file(path);
        }
    }

    /// Detaches from interfaces that the configuration no longer names.
    pub(super) fn release_others(&mut self, interfaces: &[String]) -> Vec<String> {
        let mut released = Vec::new();
        for (pin, path) in entries(&self.paths.links) {
            let interface = interface_name(&pin);
            if !interfaces.contains(&interface) {
                if let Ok(link) = bpf::open(&path) {
                    let _ = bpf::link_detach(link.as_fd());
                }
                let _ = fs::remove_file(&path);
                for kind in ["edge", "stages"] {
                    for (build, path) in builds(&self.paths, kind) {
                        if build.interface == interface {
                            let _ = fs::remove_file(path);
                        }
                    }
                }
                released.push(interface);
            }
        }
        released
    }
}

/// Our attachment.
struct Held {
    link: OwnedFd,
    mode: Mode,
    program_id: u32,
}

fn mode_fits(wanted: XdpMode, found: Mode) -> bool {
    match wanted {
        XdpMode::Auto => true,
        XdpMode::Native => found == Mode::Native,
        XdpMode::Generic => found == Mode::Generic,
    }
}

const fn flags(mode: Mode) -> u32 {
    match mode {
        Mode::Native => bpf::XDP_NATIVE,
        Mode::Generic => bpf::XDP_GENERIC,
    }
}

fn builds(paths: &Paths, kind: &str) -> Vec<(Build, PathBuf)> {
    builds_in(&paths.maps, kind)
}

fn builds_in(directory: &Path, kind: &str) -> Vec<(Build, PathBuf)> {
    entries(directory).into_iter().filter_map(|(name, path)| Some((Build::parse(kind, &name)?, path))).collect()
}

/// The program pinned in this directory that has this id.
fn program_of(directory: &Path, id: u32) -> Option<OwnedFd> {
    builds_in(directory, "edge").into_iter().find_map(|(_, path)| {
        let program = bpf::open(&path).ok()?;
        (bpf::program_info(program.as_fd()).ok()?.id == id).then_some(program)
    })
}

/// The programs pinned in this directory, by interface.
pub(super) fn programs_in(directory: &Path) -> Vec<(String, OwnedFd)> {
    builds_in(directory, "edge")
        .into_iter()
        .filter_map(|(build, path)| Some((build.interface, bpf::open(&path).ok()?)))
        .collect()
}

/// Our link at an interface, if it runs a program that is pinned in this directory, and that program.
pub(super) fn linked(paths: &Paths, interface: &str, directory: &Path) -> Option<(OwnedFd, OwnedFd)> {
    let link = bpf::open(&paths.link(interface)).ok()?;
    let info = bpf::link_info(link.as_fd()).ok()?;
    if interface_index(interface).ok() != Some(info.ifindex()) {
        return None;
    }
    program_of(directory, info.program_id).map(|program| (link, program))
}

/// Whether an interface runs a program that is pinned in this directory.
pub(super) fn runs(paths: &Paths, directory: &Path) -> bool {
    entries(&paths.links).iter().any(|(_, path)| {
        bpf::open(path)
            .and_then(|link| bpf::link_info(link.as_fd()))
            .is_ok_and(|link| program_of(directory, link.program_id).is_some())
    })
}

/// Ends the programs at tracepoints that are pinned in this directory.
pub(super) fn remove_traces(directory: &Path) {
    for (name, path) in entries(directory) {
        if name.starts_with(TRACE) {
            let _ = fs::remove_file(path);
        }
    }
}

/// Removes the pins in a directory, and the directory.
pub(super) fn remove_directory(directory: &Path) -> io::Result<()> {
    for (_, path) in entries(directory) {
        fs::remove_file(path)?;
    }
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn program_name(id: u32) -> Option<String> {
    let program = bpf::program_by_id(id).ok()?;
    Some(bpf::program_info(program.as_fd()).ok()?.name())
}

fn foreign(
    interface: &str,
    xdp: InterfaceXdp,
    name: Option<String>,
    link: Option<u32>,
    mode: Option<Mode>,
) -> DataplaneError {
    let kind = match mode {
        Some(Mode::Native) => "xdpdrv",
        Some(Mode::Generic) => "xdpgeneric",
        None => "xdpoffload",
    };
    let (owner, remedy) = match link {
        Some(id) => (format!("bpf_link {id}"), format!("bpftool link detach id {id}")),
        None => ("netlink".to_owned(), format!("ip link set dev {interface} {kind} off")),
    };
    DataplaneError::Foreign {
        interface: interface.to_owned(),
        program: name.unwrap_or_default(),
        id: xdp.program_id,
        owner,
        remedy,
    }
}

/// Largest MTU at which a veth takes a program without fragments (`veth_xdp_set`): a page, less headroom, `skb_shared_info` and the
/// Ethernet header.
pub(super) const VETH_MTU: u32 = 4096 - 256 - 320 - 14;

/// Why the kernel refuses and what helps.
fn refusal(mode: Mode, details: &LinkDetails, error: &io::Error, text: Option<String>) -> (String, String) {
    let said = match text {
        Some(text) => format!("{error}: {text}"),
        None => error.to_string(),
    };
    let limit = if details.kind == "veth" { VETH_MTU } else { 3498 };
    let large = details.mtu > limit;
    let mode_hint = match mode {
        Mode::Native => "or set datapath.mode to generic (slower)",
        Mode::Generic => "or take another interface",
    };
    match error.raw_os_error() {
        Some(libc::ERANGE | libc::EINVAL)
            if mode == Mode::Native && (large || error.raw_os_error() == Some(libc::ERANGE)) =>
        {
            (
                format!(
                    "the MTU of {} (or of its veth peer) is {}, native mode takes at most {limit} here ({said})",
                    details.name, details.mtu
                ),
                format!("run `ip link set dev {} mtu {limit}` (and its peer), {mode_hint}", details.name),
            )
        }
        Some(libc::EOPNOTSUPP) => {
            (format!("its driver has no native XDP ({said})"), format!("take a NIC whose driver has it, {mode_hint}"))
        }
        Some(libc::ENOMEM | libc::ENOSPC) => (
            format!("the driver has no queue or memory for it ({said})"),
            format!("lower its number of queues (`ethtool -L {}`), {mode_hint}", details.name),
        ),
        Some(libc::EPERM | libc::EACCES) => (said, "give lbd CAP_NET_ADMIN and CAP_BPF".to_owned()),
        Some(libc::EBUSY | libc::EEXIST) => (
            format!("another XDP program came in between ({said})"),
            format!("see `ip link show dev {}`, detach it", details.name),
        ),
        _ => (said, format!("see the kernel's log, {mode_hint}")),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let part = inner.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        source = inner.source();
    }
    text
}

fn load_program<'a>(ebpf: &'a mut Ebpf, name: &str, fingerprint: &mut Fingerprint) -> Result<&'a mut Xdp, String> {
    let program: &mut Xdp = ebpf
        .program_mut(name)
        .ok_or_else(|| format!("the object has no program {name}"))?
        .try_into()
        .map_err(|error: ProgramError| format!("program {name}: {}", chain(&error)))?;
    program.load().map_err(|error| format!("program {name}: {}", chain(&error)))?;
    let info = program
        .fd()
        .map_err(|error| chain(&error))
        .and_then(|fd| bpf::program_info(fd.as_fd()).map_err(|error| error.to_string()))?;
    fingerprint.add(name.as_bytes());
    fingerprint.add(&info.tag);
    Ok(program)
}

fn owned(program: &Xdp) -> Result<OwnedFd, String> {
    let fd = program.fd().map_err(|error| chain(&error))?;
    fd.as_fd().try_clone_to_owned().map_err(|error| error.to_string())
}

/// Pins over whatever is at the path, in one step.
fn replace_pin(fd: BorrowedFd<'_>, path: &Path) -> Result<(), DataplaneError> {
    let mut beside = path.as_os_str().to_owned();
    beside.push("~");
    let beside = PathBuf::from(beside);
    let _ = fs::remove_file(&beside);
    bpf::pin(fd, &beside)
        .and_then(|()| fs::rename(&beside, path))
        .map_err(DataplaneError::system(format!("cannot pin at {}", path.display())))
}

/// FNV-1a, 64 bits: tells builds apart; nothing depends on it being hard to forge.
struct Fingerprint(u64);

impl Fingerprint {
    const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        // So that parts cannot run together.
        self.0 = (self.0 ^ bytes.len() as u64).wrapping_mul(0x0100_0000_01b3);
    }
}

/// Interfaces with a pinned link, as the kernel sees them now.
pub(super) fn attached(paths: &Paths) -> Result<Vec<Attached>, DataplaneError> {
    let mut client = Client::new().map_err(DataplaneError::system("cannot open a netlink socket"))?;
    let programs = builds(paths, "edge");
    let mut found = Vec::new();
    for (pin, path) in entries(&paths.links) {
        let interface = interface_name(&pin);
        let info = bpf::open(&path)
            .and_then(|link| bpf::link_info(link.as_fd()))
            .map_err(DataplaneError::system(format!("cannot read the link pinned at {}", path.display())))?;
        let slot = programs
            .iter()
            .find(|(build, path)| {
                build.interface == interface
                    && bpf::open(path)
                        .and_then(|program| bpf::program_info(program.as_fd()))
                        .is_ok_and(|program| program.id == info.program_id)
            })
            .map_or(0, |(build, _)| build.slot);
        let mode = match info.ifindex() {
            0 => None,
            // The interface may be in another network namespace than the caller.
            index => client.link(index).ok().and_then(|details| {
                details.xdp.iter().find(|xdp| xdp.program_id == info.program_id).and_then(|xdp| xdp.mode)
            }),
        };
        found.push(Attached {
            interface,
            index: info.ifindex(),
            mode,
            program_id: info.program_id,
            segment_base: slot * abi::VLANS,
        });
    }
    Ok(found)
}

/// Detaches every pinned link; then removes all pins, of any ABI. Returns interfaces and the number of maps.
pub(super) fn remove_all(paths: &Paths) -> Result<(Vec<String>, u32), DataplaneError> {
    let mut interfaces = Vec::new();
    for directory in [&paths.root, &paths.links] {
        // What cannot be seen is not gone.
        match fs::read_dir(directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(DataplaneError::system(format!("cannot read {} (run as root)", directory.display()))(
                    error,
                ));
            }
            _ => {}
        }
    }
    for (pin, path) in entries(&paths.links) {
        // A link that cannot be opened is no link: the pin is all there is to remove.
        if let Ok(link) = bpf::open(&path) {
            let alive = bpf::link_info(link.as_fd()).is_ok_and(|info| info.ifindex() != 0);
            fs::remove_file(&path).map_err(DataplaneError::system(format!("cannot remove {}", path.display())))?;
            if alive {
                bpf::link_detach(link.as_fd())
                    .map_err(DataplaneError::system(format!("cannot detach the link of {}", interface_name(&pin))))?;
                interfaces.push(interface_name(&pin));
            }
        } else {
            fs::remove_file(&path).map_err(DataplaneError::system(format!("cannot remove {}", path.display())))?;
        }
    }
    let mut maps = 0;
    for (_, directory) in versions(&paths.root) {
        for (_, path) in entries(&directory) {
            fs::remove_file(&path).map_err(DataplaneError::system(format!("cannot remove {}", path.display())))?;
            maps += 1;
        }
        fs::remove_dir(&directory).map_err(DataplaneError::system(format!("cannot remove {}", directory.display())))?;
    }
    for path in [&paths.links, &paths.root] {
        match fs::remove_dir(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(DataplaneError::system(format!("cannot remove {}", path.display()))(error));
            }
            _ => {}
        }
    }
    Ok((interfaces, maps))
}

/// Takes programs of ours off interfaces that have lost their pin.
pub(super) fn detach_left_overs(client: &mut Client, indexes: &[(String, u32)]) -> Vec<String> {
    let mut found = Vec::new();
    for (interface, index) in indexes {
        let Ok(details) = client.link(*index) else { continue };
        for xdp in details.xdp {
            if program_name(xdp.program_id).as_deref() != Some(names::PROGRAM) {
                continue;
            }
            let gone = match (bpf::link_of(*index, xdp.program_id), xdp.mode) {
                (Ok(Some((link, _))), _) => bpf::link_detach(link.as_fd()).is_ok(),
                (_, Some(mode)) => client.detach_xdp(*index, mode).is_ok(),
                (_, None) => false,
            };
            if gone {
                found.push(interface.clone());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_builds_survive_odd_interface_names() {
        for interface in ["eth0", "eth0.2003", "a-1-b", "br-0-7-8"] {
            let build = Build { interface: interface.to_owned(), slot: 3, fingerprint: 0xab };
            let name = build.name("edge");
            assert!(!name.contains('.'), "{name}");
            assert_eq!(Build::parse("edge", &name), Some(build));
            assert_eq!(Build::parse("stages", &name), None);
        }
        assert_eq!(Build::parse("edge", "edge-eth0"), None);
    }

    fn shape(name: &str, kind: u32, key: u32, value: u32, entries: u32) -> Shape {
        Shape { name: name.into(), kind, key_size: key, value_size: value, max_entries: entries, flags: 0 }
    }

    #[test]
    fn a_pinned_map_of_another_shape_is_refused_by_name() {
        let wanted = shape("flows4", 1, 16, 64, 1024);
        let path = Path::new("/bpf/lbd/v1/flows4");
        let found = MapInfo { kind: 1, key_size: 16, value_size: 64, max_entries: 1024, ..MapInfo::default() };
        assert!(wanted.check(path, &found).is_ok());
        let smaller = wanted.check(path, &MapInfo { max_entries: 512, ..found }).unwrap_err().to_string();
        assert!(smaller.contains("512 entries") && smaller.contains("max_flows to 256"), "{smaller}");
        let wider = wanted.check(path, &MapInfo { value_size: 72, ..found }).unwrap_err().to_string();
        assert!(wider.contains("/bpf/lbd/v1/flows4") && wider.contains("values of 72"), "{wider}");
        assert!(wider.contains("wanted type 1") && wider.contains("lbd detach"), "{wider}");
    }

    #[test]
    fn memory_of_a_hash_counts_buckets_headers_and_spares() {
        assert_eq!(shape("f", 1, 16, 64, 1000).memory(2), 16 * 1024 + 128 * 1002);
        assert_eq!(shape("p", 6, 4, 8, 100).memory(4), 100 * 40);
        assert_eq!(shape("q", 22, 0, 20, 100).memory(4), 2020);
    }

    #[test]
    fn a_large_mtu_is_named_with_limit_and_remedy() {
        let details = LinkDetails { name: "ten0".into(), kind: "veth".into(), mtu: 9000, ..LinkDetails::default() };
        let error = io::Error::from_raw_os_error(libc::ERANGE);
        let (reason, remedy) = refusal(Mode::Native, &details, &error, Some("Peer MTU is too large".into()));
        assert!(reason.contains("ten0") && reason.contains("9000") && reason.contains("3506"), "{reason}");
        assert!(reason.contains("Peer MTU is too large") && remedy.contains("mtu 3506"), "{reason} {remedy}");
    }

    #[test]
    fn a_foreign_program_is_named_with_its_owner() {
        let xdp = InterfaceXdp { mode: Some(Mode::Native), program_id: 42 };
        let by_link = foreign("ten0", xdp, Some("xdp_fw".into()), Some(9), xdp.mode).to_string();
        assert!(by_link.contains("\"xdp_fw\" (id 42)") && by_link.contains("bpf_link 9"), "{by_link}");
        let by_netlink = foreign("ten0", xdp, Some("xdp_fw".into()), None, xdp.mode).to_string();
        assert!(
            by_netlink.contains("by netlink") && by_netlink.contains("ip link set dev ten0 xdpdrv off"),
            "{by_netlink}"
        );
    }

    #[test]
    fn an_empty_object_says_how_to_build_one() {
        let config = crate::config::parse("", "x").err();
        assert!(config.is_some());
        assert!(DataplaneError::NoObject.to_string().contains("cargo xtask build"));
    }
}
