"""containerd's default config.json, for hosts without `ctr oci spec`. Pure.

As in containerd 1.6 to 2.x; it masks or makes read-only every path that any of these versions does.
"""

from __future__ import annotations

from typing import Any

_CAPABILITIES = (
    "CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE SYS_CHROOT KILL "
    "AUDIT_WRITE"
).split()
_MOUNTS = (  # destination, type, source, options
    ("/proc", "proc", "proc", "nosuid noexec nodev"),
    ("/dev", "tmpfs", "tmpfs", "nosuid strictatime mode=755 size=65536k"),
    ("/dev/pts", "devpts", "devpts", "nosuid noexec newinstance ptmxmode=0666 mode=0620 gid=5"),
    ("/dev/shm", "tmpfs", "shm", "nosuid noexec nodev mode=1777 size=65536k"),
    ("/dev/mqueue", "mqueue", "mqueue", "nosuid noexec nodev"),
    ("/sys", "sysfs", "sysfs", "nosuid noexec nodev ro"),
    ("/run", "tmpfs", "tmpfs", "nosuid strictatime mode=755 size=65536k"),
)
_MASKED = (
    "/proc/acpi /proc/asound /proc/interrupts /proc/kcore /proc/keys /proc/latency_stats /proc/timer_list "
    "/proc/timer_stats /proc/sched_debug /proc/scsi /sys/firmware /sys/devices/virtual/powercap"
).split()
_READ_ONLY = "/proc/bus /proc/fs /proc/irq /proc/sys /proc/sysrq-trigger".split()


def default() -> dict[str, Any]:
    """A config.json without a command."""
    capabilities = [f"CAP_{name}" for name in _CAPABILITIES]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "capabilities": {name: list(capabilities) for name in ("bounding", "effective", "permitted")},
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}],
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": destination, "type": kind, "source": source, "options": options.split()}
            for destination, kind, source, options in _MOUNTS
        ],
        "linux": {
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "namespaces": [{"type": name} for name in ("pid", "ipc", "uts", "mount", "network")],
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
        },
    }
