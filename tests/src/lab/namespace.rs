//! A network namespace with a mount namespace of its own, held by a child.
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result, bail};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

/// A namespace. Clones are the same namespace; it goes when the last clone goes.
#[derive(Clone, Debug)]
pub struct Namespace(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: String,
    holder: Mutex<Child>,
    pid: u32,
    network: File,
    mounts: File,
}

impl Namespace {
    pub(super) fn new(title: &str, name: &str) -> Result<Self> {
        let mut command = Command::new("sleep");
        command.arg0(format!("lbd-lab-{title}")).arg("infinity").stdin(Stdio::null()).stdout(Stdio::null());
        // SAFETY: only system calls on static strings between fork and exec.
        unsafe {
            command.pre_exec(|| prepare().map_err(io::Error::from));
        }
        let holder = super::spawner::spawn(command).with_context(|| format!("cannot make the namespace {name}"))?;
        let pid = holder.id();
        let open = |kind: &str| {
            let path = format!("/proc/{pid}/ns/{kind}");
            File::open(&path).with_context(|| format!("cannot open {path}"))
        };
        Ok(Self(Arc::new(Inner {
            name: name.to_owned(),
            pid,
            network: open("net")?,
            mounts: open("mnt")?,
            holder: Mutex::new(holder),
        })))
    }

    /// Its name in the lab.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The process that holds it: `nsenter -t PID -n -m` looks around in it.
    pub fn pid(&self) -> u32 {
        self.0.pid
    }

    /// How the machine's own namespace sees a path of this one, e.g. of its bpffs.
    pub fn outside(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        Path::new(&format!("/proc/{}/root", self.0.pid)).join(path.strip_prefix("/").unwrap_or(path))
    }

    /// A command that will run in this namespace. Paths must be absolute.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        self.place(&mut command);
        command
    }

    /// Makes a command run in this namespace.
    pub(super) fn place(&self, command: &mut Command) {
        let inner = Arc::clone(&self.0);
        // SAFETY: only system calls on open descriptors between fork and exec.
        unsafe {
            command.pre_exec(move || inner.enter().map_err(io::Error::from));
        }
    }

    /// Runs something on a thread that is in this namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    self.enter_thread()?;
                    work()
                })
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Moves this thread into the namespace, for good.
    pub fn enter_thread(&self) -> Result<()> {
        // A mount namespace can be entered only by one who shares no directory with other threads.
        unshare(CloneFlags::CLONE_FS)
            .and_then(|()| self.0.enter())
            .with_context(|| format!("cannot enter the namespace {}", self.name()))
    }

    /// Runs `ip` with these words.
    pub fn ip(&self, words: &str) -> Result<()> {
        super::output(self.command("ip").args(words.split_whitespace())).map(drop)
    }

    /// Runs `ip -json` with these words.
    pub fn ip_json(&self, words: &str) -> Result<serde_json::Value> {
        let text = super::output(self.command("ip").arg("-json").args(words.split_whitespace()))?;
        if text.trim().is_empty() {
            return Ok(serde_json::Value::Array(Vec::new()));
        }
        serde_json::from_str(&text).with_context(|| format!("`ip -json {words}` printed no JSON"))
    }

    /// Runs many `ip` commands, a line each.
    pub fn ip_batch(&self, lines: &str) -> Result<()> {
        let mut child = self
            .command("ip")
            .args(["-batch", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run ip")?;
        if let Some(mut input) = child.stdin.take() {
            input.write_all(lines.as_bytes())?;
        }
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("ip -batch in {}: {}\n{lines}", self.name(), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    /// Runs a command of the shell in it and returns what it printed.
    pub fn shell(&self, line: &str) -> Result<String> {
        super::output(self.command("sh").args(["-ec", line]))
    }

    /// Sets a value below `/proc/sys`, e.g. `net/ipv4/ip_forward`.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        let path = Path::new("/proc/sys").join(key);
        self.run(|| std::fs::write(&path, value).with_context(|| format!("cannot set {} to {value}", path.display())))
    }

    /// The index of an interface.
    pub fn index(&self, interface: &str) -> Result<u32> {
        self.run(|| {
            nix::net::if_::if_nametoindex(interface).with_context(|| format!("{} has no {interface}", self.name()))
        })
    }

    /// The MAC address of an interface, as `ip` writes it.
    pub fn mac(&self, interface: &str) -> Result<String> {
        let links = self.ip_json(&format!("link show dev {interface}"))?;
        let mac = links.get(0).and_then(|link| link.get("address")).and_then(serde_json::Value::as_str);
        mac.map(str::to_owned).with_context(|| format!("{} has no {interface}", self.name()))
    }
}

impl Inner {
    fn enter(&self) -> nix::Result<()> {
        setns(self.network.as_fd(), CloneFlags::CLONE_NEWNET)?;
        setns(self.mounts.as_fd(), CloneFlags::CLONE_NEWNS)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut holder = super::lock(&self.holder);
        let _ = holder.kill();
        let _ = holder.wait();
    }
}

/// In the child, before it becomes the holder.
fn prepare() -> nix::Result<()> {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)?;
    let none: Option<&std::ffi::CStr> = None;
    mount(none, c"/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    // /sys shows the interfaces of the namespace that mounted it.
    mount(Some(c"sysfs"), c"/sys", Some(c"sysfs"), MsFlags::empty(), none)?;
    mount(Some(c"bpf"), c"/sys/fs/bpf", Some(c"bpf"), MsFlags::empty(), none)?;
    // Some kernels have no tracing; nothing here depends on it.
    let _ = mount(Some(c"tracefs"), c"/sys/kernel/tracing", Some(c"tracefs"), MsFlags::empty(), none);
    Ok(())
}
