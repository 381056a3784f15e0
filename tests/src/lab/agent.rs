//! The agent, run in the lab as an operator runs it.
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::Signal;

use super::{Lab, Namespace, Process, binary, lock, wait_until};

/// An agent with its configuration file and state directory. Dropping it kills the process; the datapath stays in the namespace.
#[derive(Debug)]
pub struct Agent {
    namespace: Namespace,
    directory: PathBuf,
    config: PathBuf,
    process: Mutex<Option<Process>>,
}

impl Agent {
    /// Prepares an agent in a namespace. The configuration gets `state_dir`, `socket` and `metrics` appended.
    pub fn new(lab: &Lab, namespace: &Namespace, configuration: &str) -> Result<Self> {
        let directory = lab.directory().join(format!("agent-{}", namespace.name()));
        std::fs::create_dir_all(&directory)?;
        let agent = Self {
            namespace: namespace.clone(),
            config: directory.join("lbd.yaml"),
            directory,
            process: Mutex::new(None),
        };
        agent.configure(configuration)?;
        Ok(agent)
    }

    /// Writes the configuration file.
    pub fn configure(&self, configuration: &str) -> Result<()> {
        let directory = self.directory.display();
        let whole = format!(
            "{configuration}\nstate_dir: {directory}/state\nsocket: {directory}/lbd.sock\nmetrics: 127.0.0.1:9474\n"
        );
        std::fs::write(&self.config, whole).with_context(|| format!("cannot write {}", self.config.display()))
    }

    /// The configuration file.
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// Starts `lbd run` and waits until it answers.
    pub fn start(&self, lab: &Lab) -> Result<()> {
        self.start_build(lab, &binary("lbd")?)
    }

    /// Starts another build of `lbd` and waits until it answers.
    pub fn start_build(&self, lab: &Lab, program: &Path) -> Result<()> {
        let mut command = Command::new(program);
        command.arg("run").arg("--config").arg(&self.config);
        command.env("RUST_BACKTRACE", "1");
        let process = lab.start(&self.namespace, "agent", command)?;
        let ready = wait_until(Duration::from_secs(20), "the agent answers", || {
            if !process.running() {
                // Not an error of the question: there is nothing to wait for.
                return Ok(true);
            }
            let status = self.lbctl_raw(&["status", "--check"])?;
            // 1 is "degraded": it answers.
            Ok(matches!(status.status.code(), Some(0 | 1)) && self.directory.join("lbd.sock").exists())
        });
        if !process.running() {
            bail!("the agent ended at once; its log ends:\n{}", process.tail());
        }
        ready.with_context(|| format!("the agent's log ends:\n{}", process.tail()))?;
        *lock(&self.process) = Some(process);
        Ok(())
    }

    /// Kills it with SIGKILL.
    pub fn kill(&self) {
        if let Some(process) = lock(&self.process).take() {
            process.kill();
        }
    }

    /// Ends it with SIGTERM and waits.
    pub fn stop(&self) -> Result<()> {
        let Some(process) = lock(&self.process).take() else { return Ok(()) };
        let status = process.stop(Duration::from_secs(10))?;
        if !status.success() {
            bail!("the agent ended with {status}; its log ends:\n{}", process.tail());
        }
        Ok(())
    }

    /// Sends SIGHUP.
    pub fn hang_up(&self) {
        if let Some(process) = lock(&self.process).as_ref() {
            process.signal(Signal::SIGHUP);
        }
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        lock(&self.process).as_ref().map(Process::log).unwrap_or_default()
    }

    /// Its process id, while it runs.
    pub fn pid(&self) -> Option<u32> {
        lock(&self.process).as_ref().map(Process::pid)
    }

    /// Runs `lbd` with any words, `--config` added.
    pub fn lbd(&self, words: &[&str]) -> Result<Output> {
        let mut command = self.namespace.command(binary("lbd")?);
        command.args(words).arg("--config").arg(&self.config);
        command.output().with_context(|| format!("cannot run lbd {}", words.join(" ")))
    }

    /// Runs `lbd lbctl` with these words and returns all that came of it.
    pub fn lbctl_raw(&self, words: &[&str]) -> Result<Output> {
        let mut all = vec!["lbctl"];
        all.extend(words);
        self.lbd(&all)
    }

    /// Runs `lbd lbctl` with these words; its standard output.
    pub fn lbctl(&self, words: &[&str]) -> Result<String> {
        let output = self.lbctl_raw(words)?;
        if !output.status.success() {
            bail!("lbctl {}: {}: {}", words.join(" "), output.status, String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs `lbd lbctl … -o json`.
    pub fn lbctl_json(&self, words: &[&str]) -> Result<serde_json::Value> {
        let mut all = words.to_vec();
        all.extend(["-o", "json"]);
        let text = self.lbctl(&all)?;
        serde_json::from_str(&text).with_context(|| format!("lbctl {} printed no JSON:\n{text}", words.join(" ")))
    }
}
