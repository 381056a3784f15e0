//! The smallest XDP programs, assembled by hand, so that the lab needs no BPF toolchain.
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use anyhow::{Context as _, Result, ensure};

use super::Namespace;

/// Where the kernel runs a program.
#[derive(Clone, Copy, Debug)]
pub enum XdpMode {
    /// In the generic path of the kernel.
    Generic = 1 << 1,
    /// In the driver.
    Native = 1 << 2,
}

const PROG_LOAD: libc::c_long = 5;
const OBJ_PIN: libc::c_long = 6;
const LINK_CREATE: libc::c_long = 28;
const PROG_TYPE_XDP: u32 = 6;
const ATTACH_TYPE_XDP: u32 = 37;
/// Takes packets of more than one buffer, so that any MTU will do.
const HAS_FRAGS: u32 = 1 << 5;

/// What a program answers to every packet.
#[derive(Clone, Copy, Debug)]
pub enum XdpVerdict {
    /// Drop.
    Drop = 1,
    /// To the kernel.
    Pass = 2,
}

/// A loaded program that gives every packet the same verdict.
#[derive(Debug)]
pub struct XdpProgram(OwnedFd);

#[repr(C)]
struct Instruction {
    opcode: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// The part of `union bpf_attr` that `BPF_PROG_LOAD` reads.
#[repr(C)]
#[derive(Default)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
}

/// The part of `union bpf_attr` that `BPF_OBJ_PIN` reads.
#[repr(C)]
struct ObjPin {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// The part of `union bpf_attr` that `BPF_LINK_CREATE` reads.
#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

fn bpf<T>(command: libc::c_long, attributes: &T) -> std::io::Result<libc::c_long> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes of the attributes, whose pointers are valid for the call.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>() as libc::c_long)
    };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(result) }
}

fn descriptor(result: libc::c_long) -> OwnedFd {
    // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(result as i32) }
}

impl XdpProgram {
    /// Loads a program of this name (15 characters at most).
    pub fn load(name: &str, verdict: XdpVerdict) -> Result<Self> {
        ensure!(name.len() < 16, "the kernel keeps 15 characters of a program's name: {name}");
        let code = [
            // r0 = verdict
            Instruction { opcode: 0xb7, registers: 0, offset: 0, immediate: verdict as i32 },
            // exit
            Instruction { opcode: 0x95, registers: 0, offset: 0, immediate: 0 },
        ];
        let mut attributes = ProgLoad {
            prog_type: PROG_TYPE_XDP,
            insn_cnt: code.len() as u32,
            insns: code.as_ptr() as u64,
            license: c"Dual MIT/GPL".as_ptr() as u64,
            prog_flags: HAS_FRAGS,
            ..ProgLoad::default()
        };
        attributes.prog_name[..name.len()].copy_from_slice(name.as_bytes());
        bpf(PROG_LOAD, &attributes)
            .map(|result| Self(descriptor(result)))
            .with_context(|| format!("cannot load the XDP program {name}"))
    }

    /// Attaches it to an interface until the link that this returns is dropped.
    pub fn attach(&self, namespace: &Namespace, interface: &str, mode: XdpMode) -> Result<OwnedFd> {
        let prog_fd = self.0.as_raw_fd() as u32;
        namespace
            .run(|| {
                let target_ifindex = nix::net::if_::if_nametoindex(interface)?;
                let attributes =
                    LinkCreate { prog_fd, target_ifindex, attach_type: ATTACH_TYPE_XDP, flags: mode as u32 };
                Ok(descriptor(bpf(LINK_CREATE, &attributes)?))
            })
            .with_context(|| format!("cannot attach an XDP program to {}:{interface}", namespace.name()))
    }

    /// Pins it in a namespace's bpffs, e.g. for `ip link set dev … xdp pinned PATH`.
    pub fn pin(&self, namespace: &Namespace, path: &str) -> Result<()> {
        let place = std::ffi::CString::new(path)?;
        let bpf_fd = self.0.as_raw_fd() as u32;
        namespace
            .run(|| {
                bpf(OBJ_PIN, &ObjPin { pathname: place.as_ptr() as u64, bpf_fd, file_flags: 0 })?;
                Ok(())
            })
            .with_context(|| format!("cannot pin an XDP program at {path}"))
    }
}
