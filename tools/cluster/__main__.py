"""Run gpushare on one node of a real Kubernetes cluster: make cluster KUBE=DIR.

python -m tools.cluster --kube DIR [--containerd 1.7|2.1|DIR | --crio DIR] [--record] [--keep] [--list] [CHECK]...

DIR holds kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and kubectl of one release. etcd and
containerd come from Debian; CRI-O's programs can take containerd's place. The cluster runs in namespaces of its own
(mounts, processes, network, cgroups), which end with the tool, also when it is killed. The node's root is an overlay
over this machine's root, with simulated GPUs. node-feature-discovery is not there: the tool itself gives the node the
labels and the memory of the installer's file, and defines custom resources without a schema.

Each check starts with the state that the earlier ones left. Logs are in build/cluster/logs, results in
build/cluster/result.json. --record copies them to tests/matrix/cluster.json, from which docs/versions.md is made.
--keep opens a shell with kubectl after the checks. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import helm
from tests.support.host import BUILD, TREE
from tests.support.rootfs import run
from tools import newest
from tools.cluster import ADDRESS, PLACE, SERVICE, Trouble, images
from tools.cluster.checks import CHECKS, about
from tools.cluster.cluster import Cluster
from tools.cluster.engine import Containerd, Crio, Engine
from tools.cluster.node import Cgroups, Node
from tools.cluster.plane import Plane

FOLDER = BUILD / "cluster"
RECORD = TREE / "tests" / "matrix" / "cluster.json"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
DEBIAN = {"1.7": "trixie", "2.1": "sid"}  # containerd's release -> Debian's
Rows = list[dict[str, Any]]
INSIDE = "GPUSHARE_CLUSTER_CGROUP"  # in the namespaces: name of the node's cgroup


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def enter(argv: list[str]) -> int:
    """Run this program again in namespaces of its own, and clean up after it."""
    name = f"gpushare-cluster-{os.getpid()}"
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork"]
    words += ["--kill-child", "--mount-proc", sys.executable, "-m", "tools.cluster", *argv]
    child = subprocess.Popen(words, cwd=TREE, env={**os.environ, INSIDE: name})
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # the child has got it, too
                return child.wait()
    finally:
        child.kill()
        child.wait()
        Cgroups(name).remove()


def chosen_engine(containerd: str, crio: str) -> Engine:
    """CRI-O of the folder `crio`; else containerd of this release or folder."""
    if crio:
        return Crio(Path(crio).resolve())
    if containerd in DEBIAN:
        suite = DEBIAN[containerd]
        return Containerd(newest.unpack(BUILD / ("newest" if suite == newest.SUITE else suite), suite))
    return Containerd(Path(containerd).resolve())


def make_network() -> None:
    for words in (
        "link set lo up",
        "link add node0 type veth peer name node1",
        f"addr add {ADDRESS}/24 dev node0",
        f"addr add {SERVICE}/32 dev lo",
        "link set node0 up",
        "link set node1 up",
        "route add default dev node0",
    ):
        run("ip", *words.split())


def bring_up(kube: Path, engine: Engine, etcd: Path) -> Cluster:
    """Start the control plane and the node."""
    for name in ("logs", "images"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    (FOLDER / "logs").mkdir(parents=True)
    work = FOLDER / "run"
    work.mkdir(exist_ok=True)
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "tmpfs", "-o", "mode=755,size=8g", "gpushare-cluster", work)
    say("making the images")
    archives = images.write_all(work / "images")
    make_network()
    plane = Plane(work / "plane", FOLDER / "logs", kube, etcd)
    plane.write_secrets()
    node = Node(work / "node", FOLDER / "logs", kube, engine, os.environ[INSIDE])
    node.prepare()
    for name in ("kubelet.conf", "ca.crt"):
        node.write(f"{PLACE}/{name}", (plane.folder / name).read_text(), 0o600)
    cluster = Cluster(plane, node)
    say("starting etcd, the API server, the controller manager and the scheduler")
    plane.start()
    say("booting the node")
    node.boot()
    for archive in archives:
        node.load(archive)
    return cluster


def versions(kube: Path, engine: Engine, etcd: Path) -> dict[str, str]:
    return {
        "kubernetes": run(kube / "kubelet", "--version").split()[-1].removeprefix("v"),
        engine.name: engine.version,
        "etcd": run(etcd, "--version").split()[2],
        "runc": run(shutil.which("runc", path=f"{engine.folder}:{os.environ['PATH']}") or "runc", "--version").split()[
            2
        ],
        "kernel": os.uname().release,
        "cgroups": "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1",
        "commit": run("git", "-C", str(TREE), "rev-parse", "--short=8", "HEAD").strip(),
        "when": time.strftime("%Y-%m-%d"),
    }


def run_checks(
    cluster: Cluster, names: list[str], save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Run the checks; `save` gets the results after each, so that an interruption keeps them."""
    rows: Rows = []
    for name in names or CHECKS:
        began = time.monotonic()
        try:
            CHECKS[name](cluster)
            problem = ""
        except (Trouble, AssertionError, subprocess.TimeoutExpired) as error:
            problem = str(error) or repr(error)
        seconds = round(time.monotonic() - began, 1)
        rows.append({"name": name, "about": about(name), "passed": not problem, "seconds": seconds})
        say(f"{'FAILED' if problem else 'passed':8}{seconds:6.1f} s  {name}: {problem or about(name)}")
        save(rows)
    return rows


def record(result: dict[str, Any]) -> None:
    """Replace the result of the same releases of Kubernetes and the engine in RECORD."""

    def releases(one: dict[str, Any]) -> list[str]:
        return [one.get(name, "") for name in ("kubernetes", "crio", "containerd")]

    old = json.loads(RECORD.read_text()) if RECORD.exists() else []
    kept = [one for one in old if releases(one) != releases(result)]
    rows = sorted([*kept, result], key=releases)
    RECORD.write_text(json.dumps(rows, indent=2) + "\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make cluster")
    parser.add_argument("--kube", default="", help="folder with kube-apiserver, kubelet and the others")
    parser.add_argument("--containerd", default="2.1", help="1.7 or 2.1 (Debian's), or a folder")
    parser.add_argument("--crio", default="", help="folder with crio and pinns, in place of containerd")
    parser.add_argument("--record", action="store_true", help="copy the result to tests/matrix/cluster.json")
    parser.add_argument("--keep", action="store_true", help="open a shell on the node after the checks")
    parser.add_argument("--list", action="store_true", help="print the names of the checks")
    parser.add_argument("checks", nargs="*", metavar="CHECK")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(f"{name:14} {about(name)}" for name in CHECKS))
        return 0
    for name in options.checks:
        if name not in CHECKS:
            parser.error(f"no check {name!r}; there are {' '.join(CHECKS)}")
    kube = Path(options.kube).resolve()
    missing = [name for name in PROGRAMS if not os.access(kube / name, os.X_OK)]
    if not options.kube or missing:
        parser.error(f"KUBE={options.kube}: no program {' '.join(missing)} there; unpack a release of Kubernetes")
    try:
        engine = chosen_engine(options.containerd, options.crio)
        etcd = newest.unpack(BUILD / "etcd", "trixie", "etcd") / "etcd"
        helm.program("helm"), helm.program("kubectl")  # before the network is gone
        if INSIDE not in os.environ:  # these programs are there now: inside, no network is
            return enter(argv)

        def save(rows: Rows) -> None:
            result = {**versions(kube, engine, etcd), "checks": rows}
            (FOLDER / "result.json").write_text(json.dumps(result, indent=2) + "\n")
            if options.record:
                record(result)

        cluster = bring_up(kube, engine, etcd)
        try:
            rows = run_checks(cluster, options.checks, save)
            if options.keep:
                cluster.shell()
        finally:
            cluster.node.fail()
            cluster.plane.stop()
    except Trouble as error:
        say(f"FAILED  {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    failed = [one["name"] for one in rows if not one["passed"]]
    say(f"{len(rows) - len(failed)} checks passed, {len(failed)} failed{': ' if failed else ''}{' '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
