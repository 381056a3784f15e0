//! A wall clock that a test sets: the machine's own is everybody's.
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::{Lab, binary};

/// Where distributions put the library of the package `faketime`.
const PLACES: [&str; 3] = ["/usr/lib", "/usr/lib64/faketime", "/usr/lib/faketime"];
const LIBRARY: &str = "libfaketimeMT.so.1";

/// A program under a wall clock of its own. Its monotonic clock is the machine's, as after `date -s`.
#[derive(Debug)]
pub struct Clock {
    offset: PathBuf,
    program: PathBuf,
}

impl Clock {
    /// A clock for `lbd` that is right so far.
    pub fn new(lab: &Lab) -> Result<Self> {
        let clock =
            Self { offset: lab.directory().join("clock-offset"), program: lab.directory().join("lbd-with-clock") };
        clock.set(0)?;
        let script = format!(
            "#!/bin/sh\n\
             export LD_PRELOAD='{}' FAKETIME_TIMESTAMP_FILE='{}' FAKETIME_CACHE_DURATION=1\n\
             export FAKETIME_DONT_FAKE_MONOTONIC=1 DONT_FAKE_MONOTONIC=1 NO_FAKE_STAT=1\n\
             exec '{}' \"$@\"\n",
            library()?.display(),
            clock.offset.display(),
            binary("lbd")?.display()
        );
        std::fs::write(&clock.program, script)?;
        std::fs::set_permissions(&clock.program, PermissionsExt::from_mode(0o755))?;
        Ok(clock)
    }

    /// What to start instead of `lbd`.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Sets the clock so many seconds before or after the machine's. The program sees it within a second.
    pub fn set(&self, seconds: i64) -> Result<()> {
        // In one step: it may be read at any time.
        let new = self.offset.with_extension("new");
        std::fs::write(&new, format!("{seconds:+}\n"))?;
        std::fs::rename(&new, &self.offset).with_context(|| format!("cannot write {}", self.offset.display()))
    }
}

fn library() -> Result<PathBuf> {
    let below = std::fs::read_dir(PLACES[0]).into_iter().flatten().flatten().map(|entry| entry.path().join("faketime"));
    let mut places = below.chain(PLACES[1..].iter().map(PathBuf::from)).map(|place| place.join(LIBRARY));
    places.find(|place| place.is_file()).with_context(|| format!("there is no {LIBRARY}: install the package faketime"))
}
