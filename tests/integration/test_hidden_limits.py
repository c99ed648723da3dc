"""An unprivileged tenant can hide or replace gpushare's files in its own mount namespace: then it has no GPU, and never
one without a limit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.host import PYTHON
from tests.support.tenant import Tenant

PRIVATE = "/usr/lib/gpushare"
NOT_PERMITTED, NO_PERMISSION = "800", "4"
PROBE = (
    "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0), ctypes.CDLL('libnvidia-ml.so.1').nvmlInitWithFlags(0))"
)
COPY = f"cp {PRIVATE}/limits /tmp/l; cp {PRIVATE}/rw/usage /tmp/u; chmod 666 /tmp/l /tmp/u"
HIDE = {
    "writable files behind a tmpfs": f"mount -t tmpfs none {PRIVATE}/rw",
    "limits behind /dev/null": f"mount --bind /dev/null {PRIVATE}/limits",
    "limits cut short": f"{COPY}; truncate -s -1 /tmp/l; mount --bind /tmp/l {PRIVATE}/limits",
    "limits grown": f"{COPY}; truncate -s +1 /tmp/l; mount --bind /tmp/l {PRIVATE}/limits",
    "limits empty": f"{COPY}; truncate -s 0 /tmp/l; mount --bind /tmp/l {PRIVATE}/limits",
    "limits of another version": (
        f"{COPY}; printf '\\377' | dd of=/tmp/l bs=1 seek=8 conv=notrunc 2>/dev/null;"
        f" mount --bind /tmp/l {PRIVATE}/limits"
    ),
    "usage of another container": (
        f"{COPY}; printf '\\377\\376\\375' | dd of=/tmp/u bs=1 seek=24 conv=notrunc 2>/dev/null;"
        f" mount --bind /tmp/u {PRIVATE}/rw/usage"
    ),
    "usage cut short": f"{COPY}; truncate -s 4096 /tmp/u; mount --bind /tmp/u {PRIVATE}/rw/usage",
}


def own_namespace(tenant: Tenant, script: str) -> list[str]:
    """Run `script` and the probe in user and mount namespaces that the tenant makes, and return the output's fields."""
    command = f'set -e; {script}; exec {PYTHON} -c "{PROBE}"'
    done = tenant.container.exec("unshare", "-Urm", "sh", "-c", command, options=("--user", "1000:1000"))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def running(tenant: Callable[..., Tenant]) -> Tenant:
    one = tenant("a", {"GPUSHARE_MEMORY": "2Gi"})
    one.container.start()
    one.expect("seen")
    return one


def test_hidden_limits_file_gives_no_gpu(running: Tenant) -> None:
    """The probe itself works: in such a namespace the share exists as long as its files do."""
    assert own_namespace(running, "true") == ["0", "0"]
    seen = {name: own_namespace(running, script) for name, script in HIDE.items()}
    assert seen == {name: [NOT_PERMITTED, NO_PERMISSION] for name in HIDE}


def test_hidden_directory_loads_no_driver(running: Tenant) -> None:
    command = f'mount -t tmpfs none {PRIVATE} && {PYTHON} -c "{PROBE}"'
    done = running.container.exec("unshare", "-Urm", "sh", "-c", command, options=("--user", "1000:1000"))
    assert done.returncode != 0
    assert f"{PRIVATE}/driver" in done.stderr
