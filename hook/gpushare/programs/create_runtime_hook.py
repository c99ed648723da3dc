"""The createRuntime hook that gpushare-runtime puts into config.json: what a spec cannot hold, and whose lease it is
(start path).

Links, the loader's cache and the mask over /proc are in the record that specedit.py wrote; the mounts in it must be in
place by now. Then the lease becomes the container's own: from here on it lives as long as its init.
"""

from __future__ import annotations

from ..core.errors import RequestError
from ..core.ops import Plan
from ..core.quoting import shown
from ..inject import apply, spec_record
from ..request import oci
from ..state import leases, log, storage
from ..system import inroot, procs, rootless
from . import deadline


def adopt(state_dir: str, state: oci.State, spec: str = "") -> int:
    """Raises GpushareError; the runtime then ends the container, and nothing of this is left in its root."""
    bundle = oci.load_bundle(state, path=spec)
    record = spec_record.record_of(bundle.spec)
    if record is None:
        raise RequestError(
            "config.json does not say what gpushare-runtime put into it", "start the container through gpushare-runtime"
        )
    _refuse_another_s(record, state_dir, bundle.id)
    init = procs.find(bundle.pid)
    if init is None:
        raise RequestError(f"the state's pid {bundle.pid} is no process", "adopt is a createRuntime hook")
    if record.leased and not rootless.is_rootless():
        from ..system import cgroup

        cgroup.own_cgroups(init.pid)  # else the rules of config.json are nowhere, and every device opens
    with inroot.budget():
        done = apply.adopt(Plan(bundle.id, spec_record.remaining(record)), bundle, init.pid, state_dir)
    try:
        lease = leases.find(state_dir, bundle.id)
        if lease is not None and lease.state == "reserved" and lease.bundle == bundle.path:
            leases.hold(state_dir, lease, init, procs.cgroup_of(init.pid))
        elif record.leased:
            raise RequestError(f"the lease of {shown(bundle.id)} is gone", "start the container again")
        deadline.ignore_signals()  # the container has its share: a refusal from here on would leave it behind
    except BaseException:
        deadline.ignore_signals()
        deadline.undo(state_dir, bundle.id, done.undo)
        raise
    done.close()
    log.forget(state_dir, bundle.id)
    return 0


def _refuse_another_s(record: spec_record.Record, state_dir: str, container_id: str) -> None:
    """Another start of this bundle wrote config.json before the runtime read it: this container has its share."""
    mine = storage.container_dir(state_dir, container_id)
    ours = mine[: -len(container_id)]
    sources = [source for _, source in record.mounts] + [word for op in record.ops for word in op]
    if any(isinstance(one, str) and one.startswith(ours) and not f"{one}/".startswith(f"{mine}/") for one in sources):
        raise RequestError(
            f"config.json was written for another container while {shown(container_id)} was starting",
            "start containers of one bundle one after the other",
        )
