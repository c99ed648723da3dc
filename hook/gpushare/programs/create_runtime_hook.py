"""The createRuntime hook that gpushare-runtime adds to config.json. It takes the steps that config.json cannot express,
then ties the lease to the container's init.

The record that specedit.py left in config.json lists these steps (links, the loader's cache, the /proc mask) and the
mounts that the runtime has already made; the hook checks the mounts. After the hook the lease lives as long as the
container's init. This module runs while a container starts.
"""

from __future__ import annotations

from ..config import oci_runtime
from ..core.errors import KernelError, RequestError
from ..core.ops import Plan
from ..core.quoting import shown
from ..inject import apply, spec_record
from ..request import oci
from ..state import leases, log, storage
from ..system import cgroup, inroot, procs, rootless
from . import deadline


def adopt(config_path: str, state_dir: str, state: oci.State, spec: str = "") -> int:
    """Run the hook. On GpushareError the hook has undone its changes in the container's root, and the runtime ends the
    container."""
    bundle = oci.load_bundle(state, path=spec)
    record = spec_record.record_of(bundle.spec)
    if record is None:
        raise RequestError(
            "config.json has no record of what gpushare-runtime put into it",
            "start the container through gpushare-runtime",
        )
    _refuse_foreign_record(record, state_dir, bundle.id)
    init = procs.find(bundle.pid)
    if init is None:
        raise RequestError(
            f"no process has pid {bundle.pid}, which the OCI state on standard input names",
            "run adopt as gpushare-runtime does, as a createRuntime hook",
        )
    if record.leased and not rootless.is_rootless():
        # Fail if the container has no cgroup of its own: the device rules of config.json would not apply to it.
        cgroup.own_cgroups(init.pid)
        if not oci_runtime.gives_rules(config_path, state_dir):
            _tell_systemd(init.pid, record, bundle.cgroups_path)
    with inroot.budget():
        done = apply.adopt(Plan(bundle.id, spec_record.remaining(record)), bundle, init.pid, state_dir)
    try:
        lease = leases.find(state_dir, bundle.id)
        if lease is not None and lease.state == "reserved" and lease.bundle == bundle.path:
            leases.hold(state_dir, lease, init, procs.cgroup_of(init.pid))
        elif record.leased:
            raise RequestError(f"the lease of {shown(bundle.id)} is gone", "start the container again")
        # The container has its share. A signal now would fail the start without undoing the share.
        deadline.ignore_signals()
    except BaseException:
        deadline.ignore_signals()
        deadline.undo(state_dir, bundle.id, done.undo)
        raise
    done.close()
    log.forget(state_dir, bundle.id)
    return 0


def _tell_systemd(pid: int, record: spec_record.Record, cgroups_path: str) -> None:
    """runc 1.1.3 to 1.1.6 does not pass NVIDIA's devices on to systemd, so `systemctl daemon-reload` would take them
    away. Later runtimes do: where `gpushare refresh` knows that, this step is left out. Nothing has to be undone: the
    rules are those of config.json."""
    try:
        cgroup.tell_systemd(pid, [(major, minor) for major, minor in record.rules], cgroups_path=cgroups_path)
    except KernelError:
        pass  # `gpushare doctor` warns about these versions


def _refuse_foreign_record(record: spec_record.Record, state_dir: str, container_id: str) -> None:
    """Refuse a record of another container: a second start of the bundle replaced config.json before the runtime read
    it."""
    mine = storage.container_dir(state_dir, container_id)
    ours = mine[: -len(container_id)]
    sources = [source for _, source in record.mounts] + [word for op in record.ops for word in op]
    if any(isinstance(one, str) and one.startswith(ours) and not f"{one}/".startswith(f"{mine}/") for one in sources):
        raise RequestError(
            f"config.json was written for another container while {shown(container_id)} was starting",
            "start containers of one bundle one after the other",
        )
