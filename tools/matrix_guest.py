"""The tests of make matrix-vm, run inside the virtual machine as a unit of its systemd. Standard library only.

    matrix_guest.py RESULTS     prints one JSON object for each test to the file RESULTS, then {"end": true}

The host has put into /srv/gpushare: gpushare.deb, the simulated host `simhost`, the host `real`, which has two GPUs and
character devices without a driver, `cgroup-version`, and `image.tar`, whose /usr/bin/probe allocates memory until the
limit and prints JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path

HERE = Path("/srv/gpushare")
CONFIG = Path("/etc/gpushare/config.yaml")
IMAGE = "localhost/gpushare-test:1"
GIB = 1 << 30
USER = "tester"
TIMEOUT_S = 300  # an emulated machine is slow


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)


def run(*words: str) -> str:
    """Standard output of a command that must succeed."""
    done = call(*words)
    assert done.returncode == 0, f"{' '.join(words)}: {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
    return done.stdout


def as_user(*words: str) -> tuple[str, ...]:
    uid = run("id", "-u", USER).strip()
    env = (f"XDG_RUNTIME_DIR=/run/user/{uid}", f"DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/{uid}/bus")
    return ("runuser", "-u", USER, "--", "env", "-C", f"/home/{USER}", *env, *words)


# Each starts a container by an engine, in one of the ways: the words before options of `docker run`, and after them.
class Way:
    def __init__(self, engine: str, way: str, *words: str, cgroups: str = "systemd", rootless: bool = False) -> None:
        self.engine, self.way, self.cgroups, self.rootless = engine, way, cgroups, rootless
        self._words = words

    def words(self, *args: str, **env: str) -> tuple[str, ...]:
        given = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        tail = (IMAGE, "test", *args) if self.engine == "containerd" else (IMAGE, *args)
        words = (*self._words, *given, *tail)
        return as_user(*words) if self.rootless else words


PODMAN = ("podman", "run", "--rm", "--network", "none")
DOCKER = ("docker", "run", "--rm", "--network", "none")
CTR = ("ctr", "run", "--rm", "--runc-systemd-cgroup", "--cgroup", "system.slice:gpushare:test")
CDI = ("--device", "gpushare.io/share=any")
WAYS = (
    Way("docker", "runtime", *DOCKER, "--runtime", "gpushare"),
    Way("docker", "cdi", *DOCKER, *CDI),
    Way("containerd", "runtime", *CTR, "--runc-binary", "/usr/bin/gpushare-runtime"),
    Way("podman", "hook", *PODMAN),
    Way("podman", "runtime", *PODMAN, "--runtime", "gpushare"),
    Way("podman", "cdi", *PODMAN, *CDI),
    Way("podman rootless", "runtime", *PODMAN, "--runtime", "gpushare", rootless=True),
)


def limit_holds(way: Way) -> None:
    done = call(*way.words("probe", GPUSHARE_MEMORY="2Gi"))
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise AssertionError(f"{done.returncode}: {(done.stdout + done.stderr)[-1500:]}") from None
    assert (answer["total_bytes"], answer["nvml_total_bytes"]) == (2 * GIB, 2 * GIB), answer
    assert answer["refused"] == 2 and GIB < answer["got_bytes"] <= 2 * GIB, answer


def too_much_is_refused(way: Way) -> None:
    done = call(*way.words("probe", GPUSHARE_MEMORY="99Gi"))
    assert done.returncode != 0 and not done.stdout, done


def no_request_gets_no_gpu(way: Way) -> None:
    done = call(*way.words("ls", "-d", "/usr/lib/gpushare"))
    assert done.returncode != 0 and not done.stdout, done


def leaves_nothing(way: Way) -> None:
    end = time.monotonic() + 30
    words = ("gpushare", "list", "--format", "json")
    while json.loads(run(*(as_user(*words) if way.rootless else words))):
        assert time.monotonic() < end, run("gpushare", "list")
        time.sleep(0.5)


def package_installs() -> None:
    run("dpkg", "--install", str(HERE / "gpushare.deb"))
    CONFIG.write_text(f"version: 1\ndriver: {{root: {HERE}/simhost}}\n")


def cgroups_have_the_version() -> None:
    version = (HERE / "cgroup-version").read_text()
    assert os.path.ismount("/sys/fs/cgroup/devices") == (version == "1"), run("mount")


# Real device nodes and no engine: the kernel's error tells whether the cgroup allows an open

NODES = {"nvidia0": 0, "nvidia1": 1, "nvidiactl": 255}
ALLOWED, DENIED = "No such device or address", "Operation not permitted"
GRANTED = {"nvidia0": ALLOWED, "nvidia1": DENIED, "nvidiactl": ALLOWED}
BUNDLE = Path("/srv/bundle")
SCOPE = "gs-c1.scope"
LOOK = 'for n in nvidia0 nvidia1 nvidiactl; do e=$( (: <>/nodes/$n) 2>&1 ); echo "$n|$e"; done'
# Systemd, or the runtime, may write device rules again at these events
EVENTS = (
    "systemctl daemon-reload",
    "systemctl daemon-reexec",
    f"systemctl set-property --runtime {SCOPE} CPUWeight=50",
    "update --resources /run/nothing c1",
    "pause c1",
    "resume c1",
    "systemctl daemon-reload",
)
LOW_WAYS = ("hook", "cdi any", "cdi uuid", "runtime")


def bundle_is_made() -> None:
    (BUNDLE / "rootfs").mkdir(parents=True)
    run("tar", "-C", str(BUNDLE / "rootfs"), "-xf", str(HERE / "image.tar"))
    (BUNDLE / "rootfs/nodes").mkdir()
    for name, minor in NODES.items():
        os.mknod(BUNDLE / "rootfs/nodes" / name, 0o666 | stat.S_IFCHR, os.makedev(195, minor))
    Path("/run/nothing").write_text("{}")


def write_bundle(way: str) -> None:
    """config.json of a container with GPU 0, as an engine would write it."""
    (BUNDLE / "config.json").unlink(missing_ok=True)
    run("runc", "spec", "--bundle", str(BUNDLE))
    spec = json.loads((BUNDLE / "config.json").read_text())
    spec["process"].update(args=["sleep", "inf"], terminal=False)
    spec["root"]["readonly"] = False
    spec["linux"]["cgroupsPath"] = "system.slice:gs:c1"
    devices = json.loads(run("gpushare", "cdi", "generate", "--format", "json"))["devices"]
    edits = devices[way == "cdi uuid"]["containerEdits"]
    spec["process"]["env"] += edits["env"] if way.startswith("cdi") else ["GPUSHARE_DEVICES=0"]
    if way == "cdi uuid":
        for node in edits["deviceNodes"]:
            number = os.stat(node["hostPath"]).st_rdev
            device = {"type": "c", "major": os.major(number), "minor": os.minor(number)}
            spec["linux"].setdefault("devices", []).append({**device, "path": node["path"], "fileMode": 0o666})
            rule = {**device, "allow": True, "access": node["permissions"]}
            spec["linux"]["resources"]["devices"].append(rule)
    if way != "runtime":
        hooks = spec.setdefault("hooks", {})
        for hook in edits["hooks"]:
            hooks.setdefault(hook.pop("hookName"), []).append(hook)
    (BUNDLE / "config.json").write_text(json.dumps(spec))


def device_rules_persist(low_level: str, way: str) -> None:
    before = CONFIG.read_text()
    CONFIG.write_text(f"version: 1\ndriver: {{root: {HERE}/real}}\nruntime: {{path: {shutil.which(low_level)}}}\n")
    runtime = ("gpushare-runtime" if way == "runtime" else low_level, "--systemd-cgroup", "--root", "/run/low")
    try:
        run("gpushare", "refresh")
        write_bundle(way)
        start = '"$@" >/run/printed 2>&1 </dev/null || { cat /run/printed; exit 1; }'
        run("sh", "-c", start, "sh", *runtime, "run", "--detach", "--bundle", str(BUNDLE), "c1")
        opened = {}
        for line in ("", *EVENTS):
            if line:
                run(*(() if line.startswith("systemctl ") else runtime), *line.split())
            if line != "pause c1":
                rows = (one.split("|") for one in run(*runtime, "exec", "c1", "sh", "-c", LOOK).splitlines())
                opened[line] = {name: text.rpartition(": ")[2] for name, text in rows}
        assert all(one == GRANTED for one in opened.values()), opened
    finally:
        call(low_level, "--systemd-cgroup", "--root", "/run/low", "delete", "--force", "c1")
        CONFIG.write_text(before)
        run("gpushare", "refresh")


def refresh_unit_compiles_node() -> None:
    run("systemctl", "start", "gpushare-refresh.service")
    assert Path("/run/gpushare/node.json").exists()


def path_unit_refreshes_after_an_edit() -> None:
    run("systemctl", "start", "gpushare-refresh.path")
    node = Path("/run/gpushare/node.json")
    before = node.stat().st_mtime_ns
    CONFIG.write_text(CONFIG.read_text() + "# edited\n")
    end = time.monotonic() + 60
    while node.stat().st_mtime_ns == before:
        assert time.monotonic() < end, run("systemctl", "status", "gpushare-refresh.path")
        time.sleep(0.2)


def exporter_serves_metrics() -> None:
    run("systemctl", "start", "gpushare-exporter.service")
    end = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen("http://127.0.0.1:9878/metrics", timeout=30) as answer:
                assert b"gpushare_" in answer.read()
                break
        except OSError as error:
            assert time.monotonic() < end, f"{error}: {call('systemctl', 'status', 'gpushare-exporter').stdout}"
            time.sleep(0.5)
    run("systemctl", "stop", "gpushare-exporter.service")


def engines_are_configured() -> None:
    for engine in ("docker", "podman"):
        run("gpushare", "runtime", "configure", engine)
    Path("/etc/cdi").mkdir(exist_ok=True)
    run("gpushare", "cdi", "generate", "--output", "/etc/cdi/gpushare.yaml")
    run("systemctl", "restart", "docker.service", "containerd.service")


def images_are_imported() -> None:
    run("docker", "import", str(HERE / "image.tar"), IMAGE)
    run("docker", "save", "-o", "/var/tmp/image.tar", IMAGE)
    run("ctr", "images", "import", "--local", "/var/tmp/image.tar")
    run("podman", "import", str(HERE / "image.tar"), IMAGE)


def user_has_a_session() -> None:
    run("useradd", "--create-home", USER)
    run("loginctl", "enable-linger", USER)
    uid = run("id", "-u", USER).strip()
    end = time.monotonic() + 60
    while not Path(f"/run/user/{uid}/bus").exists():
        assert time.monotonic() < end, "no session bus"
        time.sleep(0.2)
    run(*as_user("podman", "import", str(HERE / "image.tar"), IMAGE))


ALWAYS = (cgroups_have_the_version, package_installs, bundle_is_made)
FIRST = (
    engines_are_configured,
    refresh_unit_compiles_node,  # its condition: an engine is configured
    path_unit_refreshes_after_an_edit,
    exporter_serves_metrics,
    images_are_imported,
    user_has_a_session,
)
OF_EACH_WAY = (limit_holds, too_much_is_refused, no_request_gets_no_gpu, leaves_nothing)


def removal_leaves_engines_usable() -> None:
    run("gpushare", "uninstall", "--yes")
    run("dpkg", "--remove", "gpushare")
    run("systemctl", "restart", "docker.service")
    assert run(*DOCKER, IMAGE, "true") == ""


def engines(test: Callable[..., None]) -> None:
    """The tests of units and engines."""
    for function in FIRST:
        test(function.__name__, function)
    for way in WAYS:
        for check in OF_EACH_WAY:
            if way.way == "cdi" and check is no_request_gets_no_gpu:
                continue  # the device is a request
            test(check.__name__, lambda: check(way), engine=way.engine, way=way.way, cgroups=way.cgroups)  # noqa: B023
    test(removal_leaves_engines_usable.__name__, removal_leaves_engines_usable)


def main(results: str) -> None:
    with open(results, "w") as out:

        def test(name: str, function: Callable[[], None], **more: str) -> None:
            began = time.monotonic()
            try:
                function()
                detail = ""
            except Exception as error:
                detail = str(error) if isinstance(error, AssertionError) and str(error) else traceback.format_exc()
            row = {"test": name, **more, "result": "failed" if detail else "passed", "detail": detail}
            print(json.dumps({**row, "seconds": round(time.monotonic() - began)}), file=out, flush=True)

        for function in ALWAYS:
            test(function.__name__, function)
        v1 = (HERE / "cgroup-version").read_text() == "1"
        for low_level in ("runc",) if v1 else ("runc", "crun"):  # crun refuses the hybrid layout
            for low_way in LOW_WAYS:
                more = {"engine": low_level, "way": low_way, "cgroups": "systemd"}
                test(device_rules_persist.__name__, lambda: device_rules_persist(low_level, low_way), **more)  # noqa: B023
        if not v1:
            engines(test)
        print(json.dumps({"end": True, "kernel": os.uname().release}), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
