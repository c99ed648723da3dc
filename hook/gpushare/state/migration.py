"""Read the leases that the first packages of 0.1.0 wrote (rare, but on the start path). It goes with 0.3.0.

    lease_json(data, held)   -> bytes   lease.json of 0.1.0 as this version writes it; raises ValueError

These leases have fewer fields. Their new owner is in the file `held` beside lease.json, which is complete by its rename
and has four lines: the version, the creator's pid and start time (which must be the lease's), init's pid and start
time, and the cgroup. Whether init is the first process of its pid namespace is not recorded.
"""

import json
import os
from collections.abc import Callable
from typing import Any

from ..core import constants
from ..core.model import Lease, Share
from ..system import cgroup, procs

HELD = "held"
HELD_VERSION = "gpushare-held-1"
_LEASE = ("first", "cgroup_dir", "cgroup_id", "began_ns", "counted_ns", "uid", "namespace", "pod", "container", "image")
_SHARE = ("granted_ns", "granted_byte_ns", "lending", "phase", "suspended_bytes", "suspended_ns")


def lease_json(data: bytes, held: Callable[[], bytes]) -> bytes:
    """`held` reads the file of this name."""
    try:
        lease = json.loads(data)
        shares = [{**{name: Share._field_defaults[name] for name in _SHARE}, **share} for share in lease["shares"]]
        added = {**{name: Lease._field_defaults[name] for name in _LEASE}, "cri": True}  # annotations were trusted
        lease = {**added, **lease, "shares": shares}
        if lease["state"] == "reserved":
            lease.update(_owner(lease, held()))
        lease["cgroup_dir"] = _directory(str(lease["cgroup"]), lease["dialect"])
    except FileNotFoundError:
        pass  # it is still reserved
    except (LookupError, TypeError, RecursionError):
        raise ValueError("lease has fields of another version of gpushare") from None
    return json.dumps(lease).encode()


def _owner(lease: dict[str, Any], data: bytes) -> dict[str, Any]:
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    if len(lines) != 5 or lines[0] != HELD_VERSION or lines[1] != f"{lease['creator_pid']} {lease['creator_start']}":
        raise ValueError("its file `held` is of another lease, or damaged")
    pid, _, start = lines[2].partition(" ")
    if not (pid.isdigit() and start.isdigit()) or lines[4]:
        raise ValueError("its file `held` is damaged")
    return {"state": "held", "init_pid": int(pid), "init_start": int(start), "cgroup": lines[3]}


def _directory(path: str, dialect: str) -> str:
    """Return the directory of a container's cgroup; "" if it may be shared."""
    path, mine = path.rstrip("/"), procs.cgroup_of(os.getpid())
    is_run = dialect == constants.RUN_DIALECT and not os.path.basename(path).startswith("gpushare-")
    if not path or is_run or f"{mine}/".startswith(f"{path}/"):
        return ""
    v1, v2 = cgroup.directories(path, path)
    return v1 or v2
