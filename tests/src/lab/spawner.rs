//! Children that die with us.
//!
//! `PR_SET_PDEATHSIG` fires when the *thread* that made the child ends, so all children are made by one thread that never does.
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};

use nix::sys::signal::Signal;

type Order = (Command, Sender<io::Result<Child>>);

/// Starts a child in a process group of its own (so that Ctrl-C is ours to handle) that is killed when we end, however we end.
pub(super) fn spawn(mut command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    command.process_group(0);
    // SAFETY: prctl is a plain system call, allowed between fork and exec.
    unsafe {
        command.pre_exec(|| nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).map_err(io::Error::from));
    }
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, inbox) = channel::<Order>();
        std::thread::spawn(move || {
            for (mut command, answer) in inbox {
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(orders)
    });
    let (answer, result) = channel();
    let gone = || io::Error::other("the thread that starts children is gone");
    super::lock(spawner).send((command, answer)).map_err(|_| gone())?;
    result.recv().map_err(|_| gone())?
}
