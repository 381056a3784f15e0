//! Removing the lab's directories, also when a signal ends us. Everything else goes by itself: see the module above.
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use nix::sys::signal::{SigSet, Signal};

static DIRECTORIES: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Removes the directory when SIGINT, SIGTERM or SIGHUP ends us.
pub(super) fn register(directory: &Path) {
    static WATCH: OnceLock<()> = OnceLock::new();
    super::lock(&DIRECTORIES).insert(directory.to_owned());
    WATCH.get_or_init(watch);
}

/// Removes a directory now.
pub(super) fn remove(directory: &Path) {
    forget(directory);
    let _ = std::fs::remove_dir_all(directory);
}

/// Leaves a directory alone.
pub(super) fn forget(directory: &Path) {
    super::lock(&DIRECTORIES).remove(directory);
}

/// A handler can do next to nothing, so it only writes into a pipe; a thread does the work.
fn watch() {
    static PIPE: OnceLock<std::os::fd::RawFd> = OnceLock::new();
    extern "C" fn handler(signal: libc::c_int) {
        if let Some(&pipe) = PIPE.get() {
            let byte = signal as u8;
            // SAFETY: write is async-signal-safe, and the byte outlives the call.
            unsafe { libc::write(pipe, (&raw const byte).cast(), 1) };
        }
    }
    let Ok((reader, writer)) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC) else { return };
    let _ = PIPE.set(std::os::fd::IntoRawFd::into_raw_fd(writer));
    let action = nix::sys::signal::SigAction::new(
        nix::sys::signal::SigHandler::Handler(handler),
        nix::sys::signal::SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler only calls write.
        let _ = unsafe { nix::sys::signal::sigaction(signal, &action) };
    }
    std::thread::spawn(move || {
        let mut byte = [0];
        while nix::unistd::read(&reader, &mut byte) == Err(nix::errno::Errno::EINTR) {}
        let directories = std::mem::take(&mut *super::lock(&DIRECTORIES));
        for directory in directories {
            let _ = std::fs::remove_dir_all(directory);
        }
        // Our children die with us, and the namespaces with them.
        std::process::exit(128 + i32::from(byte[0]));
    });
}
