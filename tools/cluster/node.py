"""The node from outside: boot it, run commands there, and let its power fail."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.host import TREE
from tools.cluster import ADDRESS, NAME, PLACE, Trouble
from tools.cluster.engine import Engine

BOOT_S = 60
NETWORK = """{
  "cniVersion": "0.4.0", "name": "cluster",
  "plugins": [
    {"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.98.0.0/24", "routes": [{"dst": "0.0.0.0/0"}],
     "dataDir": "/run/cluster-network"}},
    {"type": "loopback"}
  ]
}
"""
UNIT = """[Unit]
DefaultDependencies=no
{after}
[Service]
Type={kind}
Delegate=yes
KillMode=process
Restart=on-failure
RestartSec=1
Environment=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
StandardOutput=append:{place}/logs/{name}.log
StandardError=append:{place}/logs/{name}.log
ExecStart={program}
"""
TARGETS = ("sysinit", "basic", "shutdown", "umount", "final", "multi-user")
KUBELET = f"""apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: [pods]
makeIPTablesUtilChains: false
evictionHard: {{nodefs.available: "0%", imagefs.available: "0%", memory.available: 50Mi}}
imageGCHighThresholdPercent: 100
imageMinimumGCAge: 240h
oomScoreAdj: 0
nodeStatusUpdateFrequency: 4s
syncFrequency: 10s
address: 0.0.0.0
resolvConf: ""
clusterDNS: []
authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: false}}, x509: {{clientCAFile: {PLACE}/ca.crt}}}}
authorization: {{mode: AlwaysAllow}}
"""


class Cgroups:
    """The cgroups of the node in each hierarchy of this machine."""

    def __init__(self, name: str) -> None:
        top = Path("/sys/fs/cgroup")
        tops = [top] if (top / "cgroup.procs").exists() else [one for one in top.iterdir() if not one.is_symlink()]
        self.folders = [one / name for one in tops if (one / "cgroup.procs").exists()]

    def make(self) -> None:
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):  # empty in a new cgroup of v1, and then it takes no process
                if (folder.parent / name).exists() and folder.parent.name == "cpuset":
                    (folder / name).write_text((folder.parent / name).read_text())

    def remove(self) -> None:
        """Wait until the processes are gone: the kernel removes a killed one a moment later."""
        end = time.monotonic() + 20
        for top in self.folders:
            for folder, _, _ in os.walk(top, topdown=False):
                while True:
                    try:
                        os.rmdir(folder)
                    except FileNotFoundError:
                        break
                    except OSError:
                        if time.monotonic() > end:
                            raise
                        time.sleep(0.05)
                    else:
                        break


class Node:
    """`folder`: what the node writes; `logs`: of its daemons; `kube`: the folder with the Kubernetes programs."""

    def __init__(self, folder: Path, logs: Path, kube: Path, engine: Engine, cgroup: str) -> None:
        self.folder, self.logs, self.kube, self.engine = folder, logs, kube, engine
        self.cgroups = Cgroups(cgroup)
        self.pid = 0
        self._outside: subprocess.Popen[bytes] | None = None

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file of the node before its first boot."""
        target = self.folder / "upper" / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def prepare(self) -> None:
        """Put programs, units and configurations on the node."""
        programs = self.folder / "upper/usr/local/bin"
        programs.mkdir(parents=True)
        for name in (*self.engine.programs, "runc"):
            if (self.engine.folder / name).exists():
                shutil.copy2(self.engine.folder / name, programs)
        for name in ("kubelet", "kubectl"):
            shutil.copy2(self.kube / name, programs)
        for path, text in self.engine.files().items():
            self.write(path, text, 0o755 if text.startswith("#!") else 0o644)
        self.write(f"{PLACE}/cni/10-cluster.conflist", NETWORK)
        self.write(f"{PLACE}/kubelet.yaml", f"{KUBELET}containerRuntimeEndpoint: unix://{self.engine.socket}\n")
        for target in TARGETS:
            self.write(f"{PLACE}/units/{target}.target", "[Unit]\nDefaultDependencies=no\n")
        name = self.engine.name
        wants = f"[Unit]\nDefaultDependencies=no\nWants={name}.service kubelet.service\nAfter={name}.service\n"
        self.write(f"{PLACE}/units/node.target", wants)
        units = {
            name: ("notify", "", f"/usr/local/bin/{name}"),
            "kubelet": (
                "exec",
                f"After={name}.service\nWants={name}.service",
                f"/usr/local/bin/kubelet --config={PLACE}/kubelet.yaml --kubeconfig={PLACE}/kubelet.conf "
                f"--hostname-override={NAME} --node-ip={ADDRESS} --v=2",
            ),
        }
        for name, (kind, after, program) in units.items():
            text = UNIT.format(name=name, kind=kind, after=after, program=program, place=PLACE)
            self.write(f"{PLACE}/units/{name}.service", text)

    def boot(self) -> None:
        self.cgroups.make()
        procs = " ".join(f"{folder}/cgroup.procs" for folder in self.cgroups.folders)
        enter = f'for file in {procs}; do echo 0 >"$file"; done; exec unshare --cgroup "$@"'
        python = str(TREE / "build/venv/bin/python")
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--uts", "--ipc", "--pid", "--fork"]
        words += ["--kill-child", "sh", "-ec", enter, "sh", python, "-m", "tools.cluster.boot"]
        with open(self.logs / "systemd.log", "ab") as log:
            self._outside = subprocess.Popen(
                [*words, str(self.folder), str(self.logs)],
                cwd=TREE,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(TREE)},
            )
        wait_for("systemd", lambda: self._find() and self.call("systemctl", "is-active", "node.target").returncode == 0)

    def _find(self) -> bool:
        """Find the first process of the node, which is systemd in the end."""
        assert self._outside
        if self._outside.poll() is not None:
            raise Trouble(f"the node did not boot; {self.logs}/systemd.log")
        pid = self._outside.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self.pid = int(children[0]) if children else 0
        return bool(self.pid) and Path(f"/proc/{self.pid}/comm").read_text() == "systemd\n"

    def call(self, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command on the node."""
        inside = ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--ipc", "--pid", "--cgroup", "--"]
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return subprocess.run(
            [*inside, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={"PATH": path, "LC_ALL": "C.UTF-8"},
        )

    def run(self, *words: str, timeout_s: float = 120) -> str:
        done = self.call(*words, timeout_s=timeout_s)
        if done.returncode:
            raise Trouble(f"on the node, `{' '.join(words)}` failed: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def load(self, archive: Path) -> None:
        """Import images into the engine."""
        inside = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--"]
        with open(archive, "rb") as file:
            words = [*inside, *self.engine.import_words()]
            done = subprocess.run(words, stdin=file, capture_output=True, text=True)
        if done.returncode:
            raise Trouble(f"{self.engine.title} did not import {archive.name}: {done.stderr.strip()}")

    def fail(self) -> None:
        """The power fails: every process ends at once."""
        if self._outside is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9) if self.pid else self._outside.kill()
            self._outside.wait(30)
            self._outside = None
        self.cgroups.remove()


def wait_for(what: str, true: Callable[[], object], seconds: float = BOOT_S) -> None:
    """Poll until `true` returns something true. Raises Trouble."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise Trouble(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.2)
