//! The driver programs (`lbd-ebpf/src/driver.rs`): packets made in the kernel and tail-called into the programs under test.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, MapData, ProgramArray};
use aya::programs::{ProgramFd, TestRun as _, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use lbd_common::abi::{self, names};

use crate::datapath::{Datapath, Outcome, bench};

/// Length of a template.
const TEMPLATE: usize = 80;

/// A loaded driver program with maps of its own.
pub struct Driver {
    ebpf: Ebpf,
    target: ProgramArray<MapData>,
    program: &'static str,
    template: Vec<u8>,
}

/// What came of a run.
pub struct Run {
    /// Nanoseconds a packet: the kernel's figure, in whole nanoseconds. The clock around the call would count an RCU grace period,
    /// in which the kernel installs the program.
    pub nanoseconds: f64,
    /// What came of the last packet.
    pub last: Outcome,
}

impl Driver {
    /// Loads driver program `program` with these values of its constants.
    pub fn load(datapath: &Datapath, program: &'static str, constants: &[(&'static str, u32)]) -> Result<Self> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bpf/lbd-driver");
        let object = std::fs::read(&path)
            .with_context(|| format!("read {}: run `cargo xtask build`, which builds it", path.display()))?;
        let mut loader = EbpfLoader::new();
        for (name, value) in constants {
            loader.override_global(name, value, true);
        }
        loader.override_global(abi::GLOBAL_LOOKUP_SECRET, &bench::LOOKUP_SECRET, true);
        loader.map_max_entries(names::FLOWS4, abi::flow_entries(datapath.max_flows()));
        loader.map_max_entries(names::FLOWS6, abi::flow_entries(datapath.max_flows_v6()));
        for shared in [names::FLOWS4, names::FLOWS6, "owners", "claims", "gate"] {
            loader.map_pin_path(shared, datapath.pinned(shared));
        }
        let mut ebpf = loader.load(&object).context("load the driver")?;
        for name in [program, "nothing", "bare_lookup", "bare_lookup6", "pop"] {
            let program: &mut Xdp = ebpf.program_mut(name).with_context(|| format!("program {name}"))?.try_into()?;
            program.load().with_context(|| format!("verify {name}"))?;
        }
        let target = ProgramArray::try_from(ebpf.take_map("target").context("map target")?)?;
        Ok(Self { ebpf, target, program, template: Vec::new() })
    }

    /// Sets the packet to restore. Number 0 is also what the first run begins with; only `visitor` has a number 1.
    pub fn set_template(&mut self, number: u32, frame: &[u8]) -> Result<()> {
        let mut padded = [0; TEMPLATE];
        padded.get_mut(..frame.len()).context("a template of at most 80 bytes")?.copy_from_slice(frame);
        let mut map: Array<_, [u8; TEMPLATE]> = self.array("template")?;
        map.set(number, padded, 0)?;
        if number == 0 {
            self.template = frame.to_vec();
        }
        Ok(())
    }

    /// The packet to restore.
    pub fn template(&self) -> &[u8] {
        &self.template
    }

    /// The program under test is this one; for packets of backends in place 1.
    pub fn aim(&mut self, place: u32, program: &ProgramFd) -> Result<()> {
        Ok(self.target.set(place, program, 0)?)
    }

    /// The program under test is one of the driver's own: `nothing`, `bare_lookup`, `bare_lookup6` or `pop`.
    pub fn aim_at_own(&mut self, name: &str) -> Result<()> {
        let program: &Xdp = self.ebpf.program(name).with_context(|| format!("program {name}"))?.try_into()?;
        Ok(self.target.set(0, program.fd()?, 0)?)
    }

    /// Begins again with the first flow.
    pub fn start(&mut self) -> Result<()> {
        self.set("next_flow", 0, 0)
    }

    /// Makes `repeat` packets, from the flow on that the last run ended with.
    pub fn run(&self, repeat: u32) -> Result<Run> {
        self.go_on(&self.template, repeat)
    }

    /// The same, with the packet that the last run ended with as the first: for drivers that look at what a packet has become.
    pub fn go_on(&self, from: &[u8], repeat: u32) -> Result<Run> {
        let driver: &Xdp = self.ebpf.program(self.program).context("the driver")?.try_into()?;
        let mut out = vec![0; 256];
        let result = driver.test_run(TestRunOptions {
            data_in: Some(from),
            data_out: Some(&mut out),
            repeat,
            ..TestRunOptions::new()
        })?;
        ensure!(result.return_value != 0, "the driver aborted");
        out.truncate(result.data_size_out as usize);
        let last = Outcome { action: result.return_value, frame: out };
        Ok(Run { nanoseconds: result.duration.as_nanos() as f64, last })
    }

    /// A word of one of the driver's arrays.
    pub fn get(&self, map: &str, index: u32) -> Result<u64> {
        let map: Array<_, u64> = Array::try_from(self.ebpf.map(map).with_context(|| format!("map {map}"))?)?;
        Ok(map.get(&index, 0)?)
    }

    /// Sets a word of one of the driver's arrays.
    pub fn set(&mut self, map: &str, index: u32, value: u64) -> Result<()> {
        Ok(self.array(map)?.set(index, value, 0)?)
    }

    fn array<V: aya::Pod>(&mut self, map: &str) -> Result<Array<&mut MapData, V>> {
        Ok(Array::try_from(self.ebpf.map_mut(map).with_context(|| format!("map {map}"))?)?)
    }
}

/// Binds this thread to a CPU: the kernel runs the programs on the CPU of the thread that asks.
pub fn on_cpu(cpu: usize) -> Result<()> {
    let mut cpus = nix::sched::CpuSet::new();
    cpus.set(cpu)?;
    Ok(nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &cpus)?)
}

/// Whether there are two CPUs.
pub fn two_cpus() -> bool {
    std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() >= 2)
}

/// A frame of at least 64 bytes, as an interface pads it.
#[must_use]
pub fn padded(mut frame: Vec<u8>) -> Vec<u8> {
    frame.resize(frame.len().max(64), 0);
    frame
}
