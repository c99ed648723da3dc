"""A host as a dict of files, and what the proposal of an engine changes in it."""

from __future__ import annotations

from typing import Any

from gpushare.engines import containerd
from gpushare.engines.base import Engine, Proposal, Settings

from tools.engine_snippets import SETTINGS, Tree

OLD, NEW = SETTINGS._replace(engine_version="1.7"), SETTINGS._replace(engine_version="2.1")
MAIN = containerd.FILE
DEBIAN = """\
# of the package
version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"   # here
"""
KUBEADM = """\
version = 3
imports = ["/etc/containerd/conf.d/*.toml"]
[plugins.'io.containerd.cri.v1.runtime'.containerd]
  default_runtime_name = 'runc'
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    snapshotter = 'zfs'
    pod_annotations = ['a.io/*']
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = '/usr/sbin/runc'
      SystemdCgroup = true
"""


def applied(proposal: Proposal, files: dict[str, str]) -> dict[str, str]:
    """Apply a proposal to the files."""
    result = dict(files)
    for change in proposal.changes:
        assert files.get(change.path) == change.before
        if change.after is None:
            del result[change.path]
        else:
            result[change.path] = change.after
    return result


def configured(engine: Engine, files: dict[str, str], settings: Settings = SETTINGS) -> dict[str, str]:
    """The files after `configure`; a second run must change nothing."""
    result = applied(engine.propose(settings, Tree(files)), files)
    assert engine.propose(settings, Tree(result)).changes in ((), [])
    assert any(engine.entry(path, result[path]) for path in engine.paths(settings, Tree(files)) if path in result)
    return result


def withdrawn(engine: Engine, files: dict[str, str], before: dict[str, str], settings: Settings = SETTINGS) -> Any:
    """The files after an undo that removes only gpushare's entries."""
    result = dict(files)
    for path in engine.paths(settings, Tree(files)):
        if path in result:
            left = engine.withdraw(path, result.pop(path), before.get(path))
            if left is not None:
                result[path] = left
    return result
