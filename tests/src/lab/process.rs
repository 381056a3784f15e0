//! A program that runs in a namespace.
use std::fs::File;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Namespace, lock};

/// A running program, killed when this goes.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Mutex<Child>,
    pid: u32,
    output: PathBuf,
    log: PathBuf,
}

impl Process {
    pub(super) fn start(namespace: &Namespace, name: &str, mut command: Command, logs: &Path) -> Result<Self> {
        let output = logs.join(format!("{name}.out"));
        let log = logs.join(format!("{name}.err"));
        command.stdin(Stdio::null()).stdout(File::create(&output)?).stderr(File::create(&log)?);
        namespace.place(&mut command);
        let program = command.get_program().to_owned();
        let child = super::spawner::spawn(command)
            .with_context(|| format!("cannot start {} in {}", program.display(), namespace.name()))?;
        Ok(Self { name: name.to_owned(), pid: child.id(), child: Mutex::new(child), output, log })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What it wrote to standard output so far.
    pub fn output(&self) -> String {
        std::fs::read(&self.output).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// What it wrote to standard error so far.
    pub fn log(&self) -> String {
        std::fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Whether it still runs.
    pub fn running(&self) -> bool {
        matches!(lock(&self.child).try_wait(), Ok(None))
    }

    /// Sends a signal; nothing happens if it has ended.
    pub fn signal(&self, signal: Signal) {
        // Under the lock, so that the pid is not reaped and recycled between the look and the signal.
        let mut child = lock(&self.child);
        if matches!(child.try_wait(), Ok(None)) {
            let _ = kill(Pid::from_raw(self.pid as i32), signal);
        }
    }

    /// Kills it and waits for its end.
    pub fn kill(&self) {
        let mut child = lock(&self.child);
        let _ = child.kill();
        let _ = child.wait();
    }

    /// Asks it to end, and waits.
    pub fn stop(&self, limit: Duration) -> Result<ExitStatus> {
        self.signal(Signal::SIGTERM);
        self.wait(limit)
    }

    /// Waits for its end.
    pub fn wait(&self, limit: Duration) -> Result<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = lock(&self.child).try_wait()? {
                return Ok(status);
            }
            if Instant::now() > end {
                bail!("{} still runs after {limit:?}; its log ends:\n{}", self.name, self.tail());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its end; fails unless it succeeded.
    pub fn succeed(&self, limit: Duration) -> Result<String> {
        let status = self.wait(limit)?;
        if !status.success() {
            let how = status.signal().map_or_else(|| status.to_string(), |signal| format!("killed by signal {signal}"));
            bail!("{}: {how}; its log ends:\n{}", self.name, self.tail());
        }
        Ok(self.output())
    }

    /// Waits until its standard output or its log contains the text.
    pub fn wait_for(&self, text: &str, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        while !(self.output().contains(text) || self.log().contains(text)) {
            if !self.running() {
                bail!("{} ended before it said \"{text}\"; its log ends:\n{}", self.name, self.tail());
            }
            if Instant::now() > end {
                bail!("{} did not say \"{text}\" within {limit:?}; its log ends:\n{}", self.name, self.tail());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// The last lines of its log.
    pub fn tail(&self) -> String {
        const LINES: usize = 15;
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
