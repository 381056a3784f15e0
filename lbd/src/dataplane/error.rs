//! What can go wrong between the agent and the kernel.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// An error of the data plane. Every message names the object, what was wanted and what to do.
#[derive(Debug, Error)]
pub enum DataplaneError {
    /// Another agent has the pins.
    #[error("another lbd agent uses the datapath pinned in {}: stop it first, or give this one its own datapath.bpffs", bpffs.display())]
    Busy {
        /// The BPF file system.
        bpffs: PathBuf,
    },
    /// The binary carries no BPF object.
    #[error("this lbd was built without its datapath: run `cargo xtask build`, then build lbd again")]
    NoObject,
    /// The BPF object cannot be used.
    #[error("the BPF object in this binary is damaged: {message}; build lbd again")]
    Object {
        /// What the parser said.
        message: String,
    },
    /// The path is not a BPF file system.
    #[error("{} is not a BPF file system ({found}): run `mount -t bpf bpf {}`, or set datapath.bpffs", path.display(), path.display())]
    NoBpffs {
        /// The configured path.
        path: PathBuf,
        /// What is there.
        found: String,
    },
    /// No datapath is pinned.
    #[error("no lbd datapath at {}: start `lbd run`, or name its BPF file system with --bpffs", path.display())]
    NotThere {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// Pins of another ABI.
    #[error(
        "the datapath pinned at {} has map ABI {found}, this lbd has ABI {wanted}: it keeps forwarding untouched; \
         run the lbd of ABI {found}, or `lbd detach` (connections are lost) and start again",
        path.display()
    )]
    Abi {
        /// Directory of the pins.
        path: PathBuf,
        /// Version found.
        found: u32,
        /// Our version.
        wanted: u32,
    },
    /// The datapath of the previous ABI could not be taken over.
    #[error(
        "cannot take over the datapath of map ABI {found} pinned at {}: {message}; it goes on forwarding as before. Correct that and start \
         again, run the lbd of ABI {found}, or `lbd detach` (connections are lost)",
        path.display()
    )]
    Migration {
        /// Directory of its pins.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// Our version.
        wanted: u32,
        /// What failed.
        message: String,
    },
    /// The datapath of the previous ABI could not be put back.
    #[error("cannot go back from the datapath of map ABI {found} pinned at {}: {message}; it goes on forwarding", path.display())]
    Rollback {
        /// Directory of the pins in force.
        path: PathBuf,
        /// Their version.
        found: u32,
        /// What failed.
        message: String,
    },
    /// A pinned map is not what the program expects.
    #[error(
        "pinned map {} has {found}, wanted {wanted}: {remedy}",
        path.display()
    )]
    Shape {
        /// The pin.
        path: PathBuf,
        /// What the program expects.
        wanted: String,
        /// What is there.
        found: String,
        /// What to do.
        remedy: String,
    },
    /// An interface of the configuration does not exist.
    #[error("interface {interface} does not exist: create it, or correct the configuration")]
    NoInterface {
        /// Its name.
        interface: String,
    },
    /// XDP would not see VLAN tags.
    #[error(
        "interface {interface} hides VLAN tags from lbd ({reason}): frames of other VLANs would count as untagged; run `{remedy}`, \
         or give the VLAN segments another NIC"
    )]
    HiddenTags {
        /// Interface.
        interface: String,
        /// What hides them.
        reason: String,
        /// What to run.
        remedy: String,
    },
    /// More interfaces than slots.
    #[error("interface {interface} is one too many: lbd attaches to at most {} interfaces", lbd_common::abi::MAX_NICS)]
    TooManyInterfaces {
        /// Its name.
        interface: String,
    },
    /// A program that is not ours is attached.
    #[error(
        "interface {interface} already has the XDP program {program:?} (id {id}), attached by {owner}: lbd does not touch it; \
         detach it (`{remedy}`) or give lbd another interface"
    )]
    Foreign {
        /// Interface.
        interface: String,
        /// Its program's name; empty if the kernel does not let us see it.
        program: String,
        /// Its program's id.
        id: u32,
        /// `bpf_link` (with its id) or `netlink`.
        owner: String,
        /// How to detach it.
        remedy: String,
    },
    /// The kernel refused to attach.
    #[error("cannot attach to {interface} in {mode} mode: {reason}; {remedy}")]
    Attach {
        /// Interface.
        interface: String,
        /// `native` or `generic`.
        mode: &'static str,
        /// The kernel's reason, with MTU and limit where they matter.
        reason: String,
        /// What to do.
        remedy: String,
    },
    /// The kernel's verifier or loader refused.
    #[error("cannot load the BPF program for {interface}: {message}")]
    Load {
        /// Interface.
        interface: String,
        /// What the loader said.
        message: String,
    },
    /// A capability is missing.
    #[error("missing capability {capability}: run lbd as root, or give it {capability} (the systemd unit does)")]
    Capability {
        /// Its name.
        capability: &'static str,
    },
    /// Map `maglev` has no room for a new lookup table.
    #[error(
        "maglev_full: {wanted} chunks wanted for lookup tables, {free} free in one piece: the tables in use stay; \
         have fewer frontends with different backends, or lower weights"
    )]
    MaglevFull {
        /// Chunks wanted.
        wanted: u32,
        /// Largest free piece.
        free: u32,
    },
    /// No free next-hop index.
    #[error("next hops: all {} are in use: have fewer backends", lbd_common::abi::MAX_NEXT_HOPS)]
    NextHopsFull,
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was done to what.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Parts of the plan could not be written; the rest is consistent, and `apply` may be called again.
    #[error("{failed} map writes failed, the first: {first}")]
    Partial {
        /// How many.
        failed: u64,
        /// The first one.
        first: String,
    },
}

impl DataplaneError {
    pub(super) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::System { what, source }
    }
}
