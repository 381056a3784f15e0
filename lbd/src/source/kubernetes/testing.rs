//! What tests of the source and of those around it need.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;

use crate::config;

/// User with a token.
pub(crate) const TOKEN: &str = "    token: secret\n";

/// A kubeconfig; `cluster` and `user` are lines of these, `mode` is the file's.
pub(crate) fn kubeconfig(server: &str, cluster: &str, user: &str, mode: u32) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    write!(
        file,
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters:\n- name: c\n  cluster:\n    server: {server}\n{cluster}\
         contexts:\n- name: c\n  context: {{cluster: c, user: u}}\nusers:\n- name: u\n  user:\n{user}"
    )
    .unwrap();
    file.as_file().set_permissions(std::fs::Permissions::from_mode(mode)).unwrap();
    file
}

/// Settings for a server that nobody has started. They hold for as long as the file is kept.
pub(crate) fn nowhere() -> (tempfile::NamedTempFile, config::Kubernetes) {
    let file = kubeconfig("http://127.0.0.1:1", "", TOKEN, 0o600);
    let settings = config::Kubernetes { kubeconfig: file.path().into(), allow_insecure: false, max_blind: None };
    (file, settings)
}
