//! What the programs cost the verifier and the stack, against what is recorded: growth has to be wanted.
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use aya_obj::generated::bpf_insn;
use lbd_tests::datapath::{Datapath, bench};
use serde::{Deserialize, Serialize};

/// Growth that needs a decision, in percent.
const GROWTH: u32 = 20;
/// BPF's stack for a program and the functions that it calls, bytes.
const STACK: u32 = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Cost {
    /// Instructions that the verifier has gone through.
    verified_instructions: u32,
    /// Deepest byte of the stack, functions that it calls included.
    stack: u32,
}

/// Deepest byte that a function addresses below its frame pointer.
fn frame(instructions: &[bpf_insn]) -> u32 {
    const FRAME_POINTER: u8 = 10;
    const ADD_IMMEDIATE: u8 = 0x07;
    let mut deepest = 0;
    let mut copies: u16 = 0;
    for instruction in instructions {
        let (destination, source) = (instruction.dst_reg(), instruction.src_reg());
        let class = instruction.code & 7;
        let loads = class == 1 && source == FRAME_POINTER;
        let stores = (class == 2 || class == 3) && destination == FRAME_POINTER;
        if loads || stores {
            deepest = deepest.max(-i32::from(instruction.off));
        } else if instruction.code == 0xbf && source == FRAME_POINTER {
            copies |= 1 << destination;
        } else if instruction.code == ADD_IMMEDIATE && copies & (1 << destination) != 0 {
            deepest = deepest.max(-instruction.imm);
            copies &= !(1 << destination);
        }
    }
    u32::try_from(deepest).unwrap_or(0).next_multiple_of(8)
}

fn costs() -> Result<BTreeMap<String, Cost>> {
    let object = aya_obj::Object::parse(lbd::dataplane::OBJECT)?;
    // Functions of their own lie in `.text`; a program calls one at a time, the deepest counts (rounded up, as the kernel does).
    let mut frames: BTreeMap<&str, u32> = BTreeMap::new();
    for function in object.functions.values() {
        frames.insert(&function.name, frame(&function.instructions).next_multiple_of(32));
    }
    let called = frames.iter().filter(|(name, _)| !object.programs.contains_key(**name)).map(|(_, depth)| *depth).max();
    let mut datapath = Datapath::load(1024)?;
    bench::fill(&mut datapath, 1)?;
    let mut costs = BTreeMap::new();
    for (name, verified_instructions) in datapath.verified_instructions()? {
        let own = frames.get(name).copied().with_context(|| format!("no function {name} in the object"))?;
        let calls = ["lbd_open", "lbd_prove", "lbd_answer", "lbd_control"].contains(&name);
        let stack = own + if calls { called.unwrap_or(0) } else { 0 };
        costs.insert(name.to_owned(), Cost { verified_instructions, stack });
    }
    Ok(costs)
}

#[test]
#[ignore = "needs root"]
fn verified_instructions_and_stack_stay_as_recorded() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/programs.json");
    let costs = costs()?;
    if std::env::var_os("LBD_RECORD").is_some() {
        std::fs::write(&path, serde_json::to_string_pretty(&costs)? + "\n")?;
    }
    let recorded: BTreeMap<String, Cost> =
        serde_json::from_str(&std::fs::read_to_string(&path).with_context(|| path.display().to_string())?)?;
    let remedy = "if it is worth it, record it: LBD_RECORD=1 cargo test -p lbd-tests --test programs -- --ignored";
    for (name, cost) in &costs {
        let before = recorded.get(name).with_context(|| format!("{name} is not recorded: {remedy}"))?;
        for (what, now, then) in [
            ("verified instructions", cost.verified_instructions, before.verified_instructions),
            ("bytes of stack", cost.stack, before.stack),
        ] {
            ensure!(
                now <= then + then * GROWTH / 100,
                "{name}: {now} {what}, {then} were recorded, more than {GROWTH} % growth; {remedy}"
            );
        }
        ensure!(cost.stack <= STACK, "{name}: {} bytes of stack", cost.stack);
    }
    ensure!(recorded.keys().eq(costs.keys()), "recorded programs {:?}, there are {:?}", recorded.keys(), costs.keys());
    Ok(())
}
