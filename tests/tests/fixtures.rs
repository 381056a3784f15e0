//! Packets through the loaded programs: bytes in, verdict, bytes out, counters.
use anyhow::Result;
use lbd_tests::datapath::{Datapath, bench};

#[test]
#[ignore = "needs root"]
fn loads() -> Result<()> {
    let mut datapath = Datapath::load(1024)?;
    bench::fill(&mut datapath, 1)?;
    eprintln!("{:?}", datapath.verified_instructions()?);
    Ok(())
}
