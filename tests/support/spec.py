"""The config.json of a test container, as an engine would write it for an ordinary, unprivileged container."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

CAPABILITIES = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
]  # Docker's default, without the network

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Hook(NamedTuple):
    """gpushare's hook in config.json. `stage`: prestart or createRuntime."""

    program: Path
    config: Path
    state: Path
    stage: str = "prestart"
    cri: bool = False  # as configured for containerd and CRI-O

    def entries(self) -> dict[str, Any]:
        def entry(action: str) -> list[dict[str, Any]]:
            words = ["--config", str(self.config), "--state", str(self.state), *(["--cri"] if self.cri else [])]
            args = [self.program.name, *words, action]
            return [{"path": str(self.program), "args": args, "env": [PATH], "timeout": 30}]

        return {self.stage: entry(self.stage), "poststop": entry("poststop")}


class Mount(NamedTuple):
    """A bind mount of the host's `source`."""

    source: Path
    target: str
    options: tuple[str, ...] = ("ro", "nosuid", "nodev")


def spec(
    *,
    rootfs: Path,
    args: list[str],
    env: dict[str, str],
    annotations: dict[str, str],
    hook: Hook | None,
    mounts: list[Mount],
    user: tuple[int, int],
    cgroups_path: str,
) -> dict[str, Any]:
    """An OCI runtime spec 1.0 configuration."""

    def pseudo(kind: str, target: str, *options: str) -> dict[str, Any]:
        return {"type": kind, "source": kind, "destination": target, "options": list(options)}

    binds = [
        {"type": "bind", "source": str(m.source), "destination": m.target, "options": ["rbind", *m.options]}
        for m in mounts
    ]
    return {
        "ociVersion": "1.0.2",
        "hostname": "gpushare-test",
        "annotations": annotations,
        "hooks": hook.entries() if hook else {},
        "root": {"path": str(rootfs)},
        "process": {
            "args": args,
            "cwd": "/",
            "env": [PATH, *(f"{key}={value}" for key, value in env.items())],
            "user": {"uid": user[0], "gid": user[1]},
            "noNewPrivileges": True,
            "capabilities": {
                kind: list(CAPABILITIES) if user[0] == 0 or kind == "bounding" else []
                for kind in ("bounding", "effective", "permitted")
            },
        },
        "mounts": [
            pseudo("proc", "/proc", "nosuid", "noexec", "nodev"),
            pseudo("tmpfs", "/dev", "nosuid", "strictatime", "mode=755", "size=64k"),
            pseudo("devpts", "/dev/pts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
            pseudo("tmpfs", "/dev/shm", "nosuid", "noexec", "nodev", "mode=1777", "size=64m"),
            pseudo("sysfs", "/sys", "nosuid", "noexec", "nodev", "ro"),
            # The container must not see what the host has there.
            pseudo("tmpfs", "/tmp", "nosuid", "nodev", "mode=1777", "size=64m"),
            pseudo("tmpfs", "/run", "nosuid", "nodev", "mode=755", "size=16m"),
            *binds,
        ],
        "linux": {
            "cgroupsPath": cgroups_path,
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")],
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    }
