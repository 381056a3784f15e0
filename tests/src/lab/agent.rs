//! The agent, run in the lab as an operator runs it.
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::Signal;

use aya::maps::{Map, MapData};
use lbd_common::abi;

use super::{Lab, Namespace, Process, binary, lock};

/// Only what is there is changed.
const BPF_EXIST: u64 = 2;

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

    /// Starts another build of `lbd` and waits until it is ready, as systemd would.
    pub fn start_build(&self, lab: &Lab, program: &Path) -> Result<()> {
        let place = self.directory.join("notify.sock");
        let _ = std::fs::remove_file(&place);
        let notices = UnixDatagram::bind(&place).with_context(|| format!("cannot listen on {}", place.display()))?;
        notices.set_read_timeout(Some(Duration::from_millis(20)))?;
        let mut command = Command::new(program);
        command.arg("run").arg("--config").arg(&self.config);
        command.env("RUST_BACKTRACE", "1").env("NOTIFY_SOCKET", &place);
        let process = lab.start(&self.namespace, "agent", command)?;
        let end = Instant::now() + Duration::from_mins(3);
        let mut buffer = [0; 4096];
        loop {
            if let Ok(length) = notices.recv(&mut buffer)
                && String::from_utf8_lossy(&buffer[..length]).lines().any(|line| line == "READY=1")
            {
                break;
            }
            if !process.running() {
                bail!("the agent ended at once; its log ends:\n{}", process.tail());
            }
            if Instant::now() > end {
                bail!("the agent is not ready after three minutes; its log ends:\n{}", process.tail());
            }
        }
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

    /// Runs `lbd lbctl` with these words and returns all that came of it. It is told where socket and bpffs are, so that it does not
    /// depend on the configuration file.
    pub fn lbctl_raw(&self, words: &[&str]) -> Result<Output> {
        let mut command = self.namespace.command(binary("lbd")?);
        command.arg("lbctl").args(words).arg("--socket").arg(self.directory.join("lbd.sock"));
        command.args(["--bpffs", "/sys/fs/bpf"]);
        command.output().with_context(|| format!("cannot run lbctl {}", words.join(" ")))
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

    /// What is served at `/metrics`.
    pub fn metrics(&self) -> Result<String> {
        self.namespace.run(|| {
            let mut stream = std::net::TcpStream::connect("127.0.0.1:9474")?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: lbd\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })
    }

    /// Flows as `lbctl flows` lists them with these filters, e.g. `["--tenant", "a"]`.
    pub fn flows(&self, filters: &[&str]) -> Result<Vec<serde_json::Value>> {
        let mut words = vec!["flows"];
        words.extend(filters);
        match self.lbctl_json(&words)? {
            serde_json::Value::Array(flows) => Ok(flows),
            other => bail!("lbctl flows printed no list: {other}"),
        }
    }

    fn rows(&self, wanted: impl Fn(&serde_json::Value) -> bool) -> Result<BTreeMap<String, u64>> {
        let list = self.lbctl_json(&["drops"])?;
        let rows = list.as_array().with_context(|| format!("lbctl drops printed no list: {list}"))?;
        let mut reasons = BTreeMap::new();
        for row in rows.iter().filter(|row| wanted(row)) {
            let (reason, packets) = (row["reason"].as_str(), row["packets"].as_u64());
            let (reason, packets) =
                reason.zip(packets).with_context(|| format!("a row of lbctl drops is unreadable: {row}"))?;
            *reasons.entry(reason.to_owned()).or_default() += packets;
        }
        Ok(reasons)
    }

    /// Packets by reason that the tenant's counters hold; `None`: those of no tenant.
    pub fn reasons(&self, tenant: Option<&str>) -> Result<BTreeMap<String, u64>> {
        self.rows(|row| row["tenant"].as_str() == tenant)
    }

    /// Those that were dropped or refused.
    pub fn losses(&self, tenant: Option<&str>) -> Result<BTreeMap<String, u64>> {
        self.rows(|row| row["tenant"].as_str() == tenant && matches!(row["verdict"].as_str(), Some("drop" | "reject")))
    }

    /// Packets of one reason, of all tenants and of none.
    pub fn reason(&self, reason: &str) -> Result<u64> {
        Ok(self.rows(|row| row["reason"] == reason)?.values().sum())
    }

    /// Makes all IPv4 flows look as if nothing had come for so much longer. They must be idle: what comes meanwhile is not counted.
    pub fn age_flows(&self, age: Duration) -> Result<usize> {
        let pins = self.namespace.outside(format!("/sys/fs/bpf/lbd/v{}", abi::ABI_VERSION));
        let open = |name: &str| {
            let path = pins.join(name);
            MapData::from_pin(&path).with_context(|| format!("cannot open {}", path.display()))
        };
        let settings = aya::maps::Array::<_, abi::Settings>::try_from(Map::Array(open(abi::names::SETTINGS)?))?;
        let ticks = age.as_millis() * u128::from(settings.get(&0, 0)?.ticks_per_second_256) / 256_000;
        let ticks = u32::try_from(ticks).context("an age of years")?;
        let mut flows =
            aya::maps::HashMap::<_, abi::FlowKey4, abi::Flow4>::try_from(Map::HashMap(open(abi::names::FLOWS4)?))?;
        let all = flows.iter().collect::<Result<Vec<_>, _>>()?;
        for (key, mut flow) in all.iter().copied() {
            flow.last_seen = flow.last_seen.wrapping_sub(ticks);
            flows.insert(key, flow, BPF_EXIST)?;
        }
        Ok(all.len())
    }

    /// Waits until this many backends are up, as `lbctl backends` lists them.
    pub fn wait_backends_up(&self, count: usize) -> Result<()> {
        super::wait_until(Duration::from_secs(10), &format!("{count} backends are up"), || {
            let list = self.lbctl_json(&["backends"])?;
            let up = list.as_array().into_iter().flatten().filter(|backend| backend["state"] == "up").count();
            ensure!(up >= count, "{list}");
            Ok(true)
        })
    }
}
