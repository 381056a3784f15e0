//! What survives a restart: small JSON files in the state directory.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Ids of the plan.
pub const IDS: &str = "ids.json";
/// Addresses given out.
pub const ADDRESSES: &str = "addresses.json";
/// The last list of Services and nodes.
pub const INVENTORY: &str = "inventory.json";
/// When the cluster was last heard of.
pub const CONTACT: &str = "contact.json";
/// Health of backends.
pub const HEALTH: &str = "health.json";
/// Names of ids, for `lbctl` while the agent is down.
pub const NAMES: &str = "names.json";
/// Who this state directory is.
const IDENTITY: &str = "identity.json";
/// Whether this agent gives out addresses, as it knew last.
pub const STANDING: &str = "standing.json";
/// The cluster that the rest comes from.
pub const CLUSTER: &str = "cluster.json";
const LOCK: &str = "lock";
/// The kernel's source of identities, and the host's.
const NEW_UUID: &str = "/proc/sys/kernel/random/uuid";
const MACHINE_ID: &str = "/etc/machine-id";

/// Who a state directory is.
#[derive(Serialize, Deserialize)]
struct Identity {
    id: String,
    /// The host that made it: a copy on another one is another.
    machine: String,
}

/// Why the state directory can't be used.
#[derive(Debug, Error)]
pub enum StateError {
    /// Another agent has it.
    #[error(
        "another lbd agent{} uses the state directory {}: stop it first, or give this one its own state_dir",
        pid.as_ref().map(|pid| format!(" (process {pid})")).unwrap_or_default(), path.display()
    )]
    Locked {
        /// The directory.
        path: PathBuf,
        /// Its process id, if it wrote one.
        pid: Option<String>,
    },
    /// A system call failed.
    #[error("state directory: {what} {}: {source}: run as root or as the systemd unit does, or set state_dir", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StateError {
    let path = path.to_owned();
    move |source| StateError::Io { what, path, source }
}

/// The state directory, held by this process alone.
#[derive(Debug)]
pub struct StateDirectory {
    path: PathBuf,
    _lock: Flock<File>,
}

impl StateDirectory {
    /// Makes the directory if need be, and takes its lock. The lock ends with the process, however it ends.
    pub fn open(path: &Path) -> Result<Self, StateError> {
        fs::DirBuilder::new().recursive(true).mode(0o750).create(path).map_err(failed("cannot make", path))?;
        let lock = path.join(LOCK);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&lock)
            .map_err(failed("cannot open", &lock))?;
        let mut held = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(held) => held,
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
                let pid =
                    fs::read_to_string(&lock).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
                return Err(StateError::Locked { path: path.to_owned(), pid });
            }
            Err((_, error)) => return Err(failed("cannot lock", &lock)(error.into())),
        };
        held.set_len(0)
            .and_then(|()| writeln!(held, "{}", std::process::id()))
            .map_err(failed("cannot write", &lock))?;
        Ok(Self { path: path.to_owned(), _lock: held })
    }

    /// Who this directory is: made once, and anew on another host, so that a copy is not taken for the original.
    pub fn identity(&self) -> Result<String, StateError> {
        let machine = fs::read_to_string(MACHINE_ID).unwrap_or_default().trim().to_owned();
        if let Some(known) = self.load::<Identity>(IDENTITY)
            && known.machine == machine
        {
            return Ok(known.id);
        }
        let path = Path::new(NEW_UUID);
        let id = fs::read_to_string(path).map_err(failed("cannot read", path))?.trim().to_owned();
        self.save(IDENTITY, &Identity { id: id.clone(), machine })?;
        Ok(id)
    }

    /// Reads a file. `None` if there is none; a damaged one is moved aside and named in the log.
    pub fn load<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        let path = self.path.join(name);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "cannot read saved state, starting without it");
                return None;
            }
        };
        match serde_json::from_slice(&bytes) {
            Ok(value) => Some(value),
            Err(error) => {
                let aside = path.with_extension("damaged");
                let moved = fs::rename(&path, &aside);
                tracing::warn!(
                    file = %path.display(), %error, moved = moved.is_ok(),
                    "saved state is damaged, starting without it; it was moved to .damaged"
                );
                None
            }
        }
    }

    /// Replaces a file: after a crash there is the old content or the new one.
    pub fn save(&self, name: &str, value: &impl Serialize) -> Result<(), StateError> {
        let path = self.path.join(name);
        let bytes = serde_json::to_vec(value).map_err(|error| failed("cannot encode", &path)(error.into()))?;
        self.save_bytes(name, &bytes)
    }

    /// Like [`Self::save`], of JSON that is there already.
    pub fn save_bytes(&self, name: &str, bytes: &[u8]) -> Result<(), StateError> {
        write_atomically(&self.path, name, bytes)
    }
}

fn write_atomically(directory: &Path, name: &str, bytes: &[u8]) -> Result<(), StateError> {
    let path = directory.join(name);
    let temporary = directory.join(format!(".{name}.new"));
    let written = (|| {
        // A left-over of a crash may have other rights.
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, &path)?;
        File::open(directory)?.sync_all()
    })();
    written.map_err(failed("cannot write", &path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn files_are_replaced_whole_and_private() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("state");
        let state = StateDirectory::open(&path).unwrap();
        assert_eq!(state.load::<Vec<u32>>(IDS), None);
        state.save(IDS, &[1, 2, 3]).unwrap();
        fs::write(path.join(".ids.json.new"), "left over").unwrap();
        state.save(IDS, &[4]).unwrap();
        assert_eq!(state.load::<Vec<u32>>(IDS), Some(vec![4]));
        assert_eq!(fs::metadata(path.join(IDS)).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(!path.join(".ids.json.new").exists());
    }

    #[test]
    fn a_directory_is_itself_and_a_copy_on_another_host_is_not() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (first, second) = (StateDirectory::open(one.path()).unwrap(), StateDirectory::open(two.path()).unwrap());
        let id = first.identity().unwrap();
        assert_eq!((first.identity().unwrap(), id.len()), (id.clone(), 36));
        assert_ne!(second.identity().unwrap(), id);
        second.save(IDENTITY, &Identity { id: id.clone(), machine: "another".to_owned() }).unwrap();
        assert_ne!(second.identity().unwrap(), id);
    }

    #[test]
    fn damaged_state_is_put_aside() {
        let parent = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(parent.path()).unwrap();
        fs::write(parent.path().join(IDS), "[1, 2").unwrap();
        assert_eq!(state.load::<Vec<u32>>(IDS), None);
        assert_eq!(fs::read_to_string(parent.path().join("ids.damaged")).unwrap(), "[1, 2");
        assert_eq!(state.load::<Vec<u32>>(IDS), None);
    }

    #[test]
    fn b59_a_second_agent_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let first = StateDirectory::open(parent.path()).unwrap();
        let error = StateDirectory::open(parent.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        drop(first);
        StateDirectory::open(parent.path()).unwrap();
    }
}
