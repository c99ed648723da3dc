"""The image that installs gpushare on nodes, run as in a pod: the node's root at /host, and only the image's tools."""

from __future__ import annotations

import fcntl
import json
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import yaml
from gpushare.engines import crio, tomltext, validator
from gpushare.integrations import labels

from simulator.simhost import make_simhost
from tests.support.apiserver import NODE, NodeServer, compared
from tests.support.engines.image import PROBE, make_root
from tests.support.host import BUILD
from tests.support.installer import FOLDER, Pod
from tests.support.rbac import access, with_component
from tests.support.rootfs import run, unmount_below
from tests.support.runc import Container
from tests.unit.test_engines_places import K3S, K3S_MAIN

DROP_IN = "etc/containerd/conf.d/gpushare.toml"
FEATURES = labels.FILE[1:]
LABEL = "gpushare.io/profile"
# systemctl and containerd of the node write down their arguments. The engine runs since boot, or the last restart.
# A restart fails while the file `fails` exists.
PROGRAM = """
#include <stdio.h>
#include <string.h>
#include <time.h>
int main(int c, char **v) {
    if (c > 1 && strcmp(v[1], "show") == 0) {
        long long started = 1;
        FILE *from = fopen("/started", "r");
        if (from && fscanf(from, "%lld", &started) != 1) return 1;
        return printf("ActiveState=active\\nExecMainStartTimestampMonotonic=%lld\\n", started) < 0;
    }
    if (c > 1 && strcmp(v[1], "restart") == 0) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (fopen("/fails", "r")) return 1;
        FILE *at = fopen("/started", "w");
        fprintf(at, "%lld", now.tv_sec * 1000000LL + now.tv_nsec / 1000);
        fclose(at);
    }
    FILE *to = fopen("/called", "a");
    for (int i = 0; i < c; i++) fprintf(to, "%s%c", v[i], i + 1 < c ? ' ' : '\\n');
    if (strstr(v[0], "containerd")) puts("containerd example.invalid/containerd v" VERSION " 0123456789");
    if (strstr(v[0], "crio")) puts("crio version 1.36.3\\n   GitCommit: 0123456789");
    return fclose(to);
}"""
# Files of NVIDIA's GPU Operator, device plugin and GPU feature discovery on a node
NVIDIA = {
    "etc/kubernetes/node-feature-discovery/features.d/gfd": "nvidia.com/gpu.count=1\n",
    "etc/cdi/nvidia.yaml": "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n",
    "var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json": "{}",
    "var/lib/kubelet/device-plugins/nvidia-gpu.sock": "",
    "etc/containerd/conf.d/99-nvidia.toml": """version = 3
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]
runtime_type = 'io.containerd.runc.v2'
""",
    "run/nvidia/validations/toolkit-ready": "",
}
REQUIRED = {"GPUSHARE_ENGINE": "none", "GPUSHARE_REQUIRE_NRI": "yes"}


def put_programs(node: Path, version: str) -> None:
    """systemctl, and containerd of this version."""
    for name in ("systemctl", "containerd"):
        words = ["gcc", "-static", f'-DVERSION="{version}"', "-xc", "-", "-o", str(node / "usr/bin" / name)]
        subprocess.run(words, input=PROGRAM.encode(), check=True)


@contextmanager
def plugin_running(node: Path, engine: str = "containerd") -> Iterator[None]:
    """The lock of an NRI plugin that runs on the node, as integrations/nri/plugin.py has it."""
    with open(node / "run/gpushare/nri", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"registered {engine}\n")
        lock.flush()
        yield


@pytest.fixture
def bundle() -> Path:
    """build/dist/gpushare, made by `make test`."""
    made = BUILD / "dist" / "gpushare"
    assert (made / "bin" / "gpushare").exists(), "make dist"
    return made


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Path]:
    """A node's root: a simulated driver, an engine, systemd. The kernel's file systems are the machine's."""
    root = make_simhost(tmp_path / "node")
    driver = tmp_path / "driver"
    (root / "proc" / "driver").rename(driver)
    for name in ("etc/containerd", "usr/bin", "run/systemd/system", "sys", "tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "dev" / "null").touch()
    (root / "etc/containerd/config.toml").write_text("version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n")
    put_programs(root, "2.1.0")
    try:
        run("mount", "--bind", root, root)
        run("mount", "--make-private", root)
        run("mount", "--make-shared", root)  # visible to a pod with mountPropagation: Bidirectional
        run("mount", "--bind", "/dev/null", root / "dev" / "null")
        run("mount", "--rbind", "/proc", root / "proc")
        run("mount", "--bind", driver, root / "proc" / "driver")
        run("mount", "--rbind", "/sys", root / "sys")
        yield root
    finally:
        unmount_below(root)


@pytest.fixture
def image(tmp_path: Path, bundle: Path, node: Path) -> Iterator[Path]:
    root = tmp_path / "image"
    for name in ("gpushare", "dev", "proc", "host"):
        (root / name).mkdir(parents=True)
    shutil.copy(FOLDER / "install.py", root)
    try:
        run("mount", "--bind", bundle, root / "gpushare")
        run("mount", "--rbind", "/dev", root / "dev")
        run("mount", "--rbind", "/proc", root / "proc")
        run("mount", "--rbind", node, root / "host")
        yield root
    finally:
        unmount_below(root)


@pytest.fixture
def start(node: Path, image: Path) -> Iterator[Callable[..., Pod]]:
    """start(argument..., VARIABLE=...) -> Pod, killed at the end."""
    made: list[Pod] = []

    def begin(*arguments: str, **variables: str) -> Pod:
        setup = f"mount --make-rprivate {shlex.quote(str(node))}; umount --lazy {shlex.quote(str(node))}"
        made.append(Pod(image, setup, *arguments, **variables))
        return made[-1]

    yield begin
    for pod in made:
        pod.close()


@contextmanager
def share_held(node: Path, directory: Path) -> Iterator[None]:
    """A container with a share that the node's hook gave it."""
    program = Path("/opt/gpushare") / (node / "opt/gpushare/current").readlink() / "bin"
    state = {"run": ["gpushare-hook", "prestart"], "end": ["gpushare-hook", "poststop"]}
    entries = {
        stage: [{"path": "/usr/sbin/chroot", "args": ["chroot", str(node), str(program / words[0]), words[1]]}]
        for stage, words in (("prestart", state["run"]), ("poststop", state["end"]))
    }
    bundles = directory / "bundles"
    bundles.mkdir()
    (node / str(bundles)[1:]).mkdir(parents=True)
    run("mount", "--bind", bundles, node / str(bundles)[1:])
    rootfs = make_root(bundles / "image")
    with Container(bundles, [PROBE, "hold"], env={"GPUSHARE_MEMORY": "1Gi"}, rootfs=rootfs,
                   edit=lambda spec: spec.update(hooks=entries)) as one:  # fmt: skip
        one.create()
        yield


def called(node: Path) -> list[str]:
    """Arguments of the node's programs, except queries."""
    lines = (node / "called").read_text().splitlines() if (node / "called").exists() else []
    return [line for line in lines if line.startswith("systemctl")]


def wait_for(done: Callable[[], bool]) -> None:
    """Poll: no event tells that a program of the node has ended."""
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def tree(node: Path) -> set[str]:
    places = (node / "etc", node / "opt", node / "var")
    return {str(path.relative_to(node)) for place in places for path in place.rglob("*")}


def removed(node: Path, start: Callable[..., Pod], before: set[str]) -> None:
    """Remove gpushare, and check that nothing of it is left."""
    removal = start("remove")
    removal.until("gpushare is removed from this node")
    assert removal.process.poll() is None  # or its DaemonSet would restart it in a loop
    assert removal.stop() == 0
    assert {path for path in tree(node) - before if "gpushare" in path} == set()


def test_engine_is_left_alone_for_the_nri_plugin(node: Path, start: Callable[..., Pod]) -> None:
    for _ in range(2):  # and after a restart of the pod, which keeps a configuration that was edited meanwhile
        pod = start("install", GPUSHARE_ENGINE="none")
        pod.until("ready")
        assert [path.name for path in (node / "etc/containerd").iterdir()] == ["config.toml"]
        assert not (node / "called").exists()
        assert (node / "opt/gpushare/current/bin/gpushare-hook").is_file()
        config = node / "etc/gpushare/config.yaml"
        assert "require_limits: true" in config.read_text()
        pod.kill()
        config.write_text(config.read_text() + "# edited\n")
    assert config.read_text().count("# edited") == 2


def test_nri_plugin_is_required_when_it_runs(node: Path, start: Callable[..., Pod], tmp_path: Path) -> None:
    """Not before: if its image cannot be pulled, the node must still start other containers. At the end of the pod the
    engine requires it no more, even if a container has a share; after a pod that was killed, from the next one on."""
    put_programs(node, "2.2.0")
    before = tree(node)
    pod = start("install", **REQUIRED)
    pod.until("ready")
    assert not (node / DROP_IN).exists() and not (node / "called").exists()
    with plugin_running(node):
        pod.until("running: systemctl restart containerd")
    with share_held(node, tmp_path):
        value = tomlkit.parse((node / DROP_IN).read_text()).unwrap()
        assert (
            tomltext.at(value, validator.CONTAINERD.keys)["required_plugins"] == ["gpushare"] and value["version"] == 3
        )
        assert pod.stop() == 0, pod.lines
        assert not (node / DROP_IN).exists() and called(node) == ["systemctl restart containerd"] * 2
    killed = start("install", **REQUIRED)
    killed.until("ready")
    with plugin_running(node):
        killed.process.send_signal(signal.SIGHUP)  # check for the plugin now
        killed.until("running: systemctl restart containerd")
        wait_for(lambda: len(called(node)) == 3)  # a kill between the line and the restart would leave two
    killed.kill()
    assert (node / DROP_IN).exists()
    last = start("install", GPUSHARE_ENGINE="none")
    last.until("ready")
    assert not (node / DROP_IN).exists() and called(node) == ["systemctl restart containerd"] * 4
    assert last.stop() == 0, last.lines
    removed(node, start, before)


def test_requirement_is_removed_and_tried_again_after_a_restart_failed(node: Path, start: Callable[..., Pod]) -> None:
    put_programs(node, "2.2.0")
    line = "systemctl restart containerd"
    pod = start("install", **REQUIRED)
    pod.until("ready")
    fails = node / "fails"
    fails.touch()
    with plugin_running(node):
        pod.until(f"gpushare: `{line}` ended with 1")
        assert pod.lines[-1].endswith("; the engine does not require the NRI plugin, next attempt in 60 s")
        pod.until(f"gpushare: `{line}` ended with 1")  # after the removal of the requirement
        assert not (node / DROP_IN).exists() and called(node) == []
        fails.unlink()
        pod.process.send_signal(signal.SIGHUP)
        pod.until(f"running: {line}")
        wait_for(lambda: called(node) == [line])
    assert (node / DROP_IN).exists()
    assert pod.stop() == 0 and not (node / DROP_IN).exists() and called(node) == [line] * 2


@pytest.mark.parametrize("variables", [{"GPUSHARE_ENGINE": "none"}, REQUIRED], ids=["not required", "required again"])
def test_pod_restarts_an_engine_from_which_an_earlier_pod_removed_the_requirement(
    node: Path, start: Callable[..., Pod], variables: dict[str, str]
) -> None:
    """The earlier pod was killed after it had removed the drop-in: the engine would refuse containers until its
    restart. A third pod finds that the engine has read it."""
    put_programs(node, "2.2.0")
    line = "systemctl restart containerd"
    first = start("install", **REQUIRED)
    first.until("ready")
    with plugin_running(node):
        first.until(f"running: {line}")
        wait_for(lambda: called(node) == [line])
    first.kill()
    second = start("install", GPUSHARE_ENGINE="none", GPUSHARE_RESTART="never")
    second.until(f"on the node, run: {line}")
    second.kill()
    assert not (node / DROP_IN).exists() and called(node) == [line]
    third = start("install", **variables)
    third.until("ready")
    assert called(node) == [line] * 2 and not (node / DROP_IN).exists(), third.lines
    third.kill()
    last = start("install", **variables)
    last.until("ready")
    assert last.stop() == 0 and called(node) == [line] * 2, last.lines
    assert not list((node / "run").glob("gpushare-unread*"))


@pytest.mark.parametrize("variables", [{}, REQUIRED], ids=["runtime", "nri"])
def test_pod_restarts_an_engine_that_an_earlier_pod_did_not_restart(
    node: Path, start: Callable[..., Pod], variables: dict[str, str]
) -> None:
    """The earlier pod was killed after it had written the drop-in. A third pod finds that the engine has read it."""
    put_programs(node, "2.2.0")
    line = "systemctl restart containerd"
    first = start("install", GPUSHARE_RESTART="never", **variables)
    with ExitStack() as stack:
        if variables:
            first.until("ready")
            stack.enter_context(plugin_running(node))
        first.until(f"on the node, run: {line}")
        first.kill()
        second = start("install", **variables)
        second.until(f"running: {line}")
        wait_for(lambda: called(node) == [line])
        second.kill()
        third = start("install", **variables)
        third.until("ready")
        restarts = 1 if variables else 0  # the end of the pod lifts the requirement
        assert third.stop() == 0 and third.lines.count(f"running: {line}") == restarts, third.lines


def test_crio_requires_the_plugin_that_it_accepted(node: Path, start: Callable[..., Pod]) -> None:
    (node / "usr/bin/containerd").rename(node / "usr/bin/crio")
    drop_in, line = node / crio.FILE[1:], "systemctl restart crio"
    pod = start("install", **REQUIRED)
    pod.until("ready")
    with plugin_running(node, "cri-o"):
        pod.until(f"running: {line}")
    value = tomlkit.parse(drop_in.read_text()).unwrap()
    assert tomltext.at(value, validator.CRIO.keys)["nri_validator_required_plugins"] == ["gpushare"]
    assert not (node / DROP_IN).exists()
    assert pod.stop() == 0, pod.lines
    assert not drop_in.exists() and called(node) == [line] * 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**REQUIRED, "GPUSHARE_REQUIRE_NRI": "maybe"}, "GPUSHARE_REQUIRE_NRI=maybe is neither yes nor no"),
        ({"GPUSHARE_REQUIRE_NRI": "yes"}, "GPUSHARE_REQUIRE_NRI=yes needs GPUSHARE_ENGINE=none"),
    ],
)
def test_wrong_requirement_changes_nothing(
    node: Path, start: Callable[..., Pod], variables: dict[str, str], message: str
) -> None:
    before = tree(node)
    pod = start("install", **variables)
    pod.until(f"gpushare: {message}")
    assert pod.process.wait(timeout=60) == 1 and tree(node) == before


def test_node_of_a_distribution_is_configured(node: Path, start: Callable[..., Pod]) -> None:
    """shared/cases/engines/05: k3s's own containerd, and its files."""
    shutil.copytree(node / "etc/containerd", node / K3S[1:])
    shutil.rmtree(node / "etc/containerd")
    program = node / "var/lib/rancher/k3s/data/current/bin/containerd"
    program.parent.mkdir(parents=True)
    (node / "usr/bin/containerd").rename(program)
    main = node / K3S[1:] / "config.toml"
    main.write_text(K3S_MAIN)
    pod = start("install", GPUSHARE_CONFIG_FILE=f"{K3S}/config.toml")
    pod.until("ready")
    drop_in = main.parent / "config-v3.toml.d/gpushare.toml"
    assert "SystemdCgroup = true" in drop_in.read_text() and main.read_text() == K3S_MAIN
    assert called(node) == ["systemctl restart k3s"] and not (node / "etc/containerd").exists()
    assert pod.stop() == 0 and drop_in.exists(), "the end of a pod removes nothing"
    removal = start("remove", GPUSHARE_CONFIG_FILE=f"{K3S}/config.toml")
    removal.until("gpushare is removed from this node")
    assert not drop_in.exists() and called(node) == ["systemctl restart k3s"] * 2 and removal.stop() == 0


def test_pod_installs_and_removes_gpushare(node: Path, start: Callable[..., Pod]) -> None:
    for name, text in NVIDIA.items():
        (node / name).parent.mkdir(parents=True, exist_ok=True)
        (node / name).write_text(text)
    before = tree(node)
    early = start("run", "export")
    early.until("gpushare: gpushare is not on this node yet")
    assert early.process.wait(timeout=60) == 1
    pod = start("install")
    pod.until("ready")
    (home,) = (path for path in (node / "opt/gpushare").iterdir() if path.is_dir() and not path.is_symlink())
    program = f"/opt/gpushare/{home.name}/bin/gpushare-runtime-cri"
    assert f'BinaryName = "{program}"' in (node / DROP_IN).read_text()
    assert (node / program[1:]).stat().st_mode & 0o777 == 0o755
    assert "require_limits: true" in (node / "etc/gpushare/config.yaml").read_text()  # the cluster's default
    assert "gpushare.io/present=true\n" in (node / FEATURES).read_text()
    assert called(node) == ["systemctl restart containerd"]
    assert pod.process.poll() is None
    assert (node / "run/gpushare/node.json").is_file()  # the device plugin reads it

    # Other pods of the image run the node's program, in its root.
    exporter = start("run", "export", "--port", "0")
    exporter.until("serving metrics at http://127.0.0.1:")
    assert exporter.stop() == 0, exporter.lines

    # A pod that finds the entry of a version without gpushare-runtime-cri rewrites it.
    pod.kill()
    entry = (node / DROP_IN).read_text()
    (node / DROP_IN).write_text(entry.replace(program, program.removesuffix("-cri")))
    upgraded = start("install")
    upgraded.until("ready")
    assert (node / DROP_IN).read_text() == entry
    assert called(node) == ["systemctl restart containerd"] * 2

    (home.parent / "current.new").symlink_to(".")  # a pod was killed before it renamed the link
    installed = tree(node)
    assert upgraded.stop() == 0, upgraded.lines
    assert tree(node) == installed and called(node) == ["systemctl restart containerd"] * 2
    removed(node, start, before)
    assert called(node) == ["systemctl restart containerd"] * 3 and not (node / FEATURES).exists()
    assert {name: (node / name).read_text() for name in NVIDIA} == NVIDIA


def test_label_of_the_node_chooses_its_profile(
    node: Path, image: Path, start: Callable[..., Pod], tmp_path: Path
) -> None:
    """With the image's programs. tests/unit/test_node_profiles.py has more labels and profiles that are refused."""
    manifests = FOLDER.parent / "profiles"
    texts: dict[str, str] = yaml.safe_load((manifests / "profiles.yaml").read_text())["data"]
    profiles, config = image / "profiles", node / "etc/gpushare/config.yaml"
    profiles.mkdir()

    def put(name: str, text: str) -> None:
        (profiles / ".new").write_text(text)
        (profiles / ".new").rename(profiles / f"{name}.yaml")

    def compiled() -> Any:
        return json.loads((node / "run/gpushare/node.json").read_text())["config"]

    for name, text in texts.items():
        put(name.removesuffix(".yaml"), text)
    put("elsewhere", "version: 1\ndriver: {root: /none}\n")
    with NodeServer(tmp_path / "account", {LABEL: "equal-shares"}) as api:
        shutil.copytree(api.account, image / "var/run/secrets/kubernetes.io/serviceaccount")
        server = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.port)}
        pod = start("install", GPUSHARE_NODE=NODE, **server)

        def labelled(label: str, line: str) -> None:
            api.labels = {LABEL: label}
            pod.process.send_signal(signal.SIGHUP)
            pod.until(line)

        pod.until("profile equal-shares is applied")
        pod.until("ready")
        assert config.read_text() == texts["equal-shares.yaml"] and compiled()["sharing"][0][0] == 4
        before = config.read_bytes()
        labelled("elsewhere", 'gpushare: profile "elsewhere": ')
        assert pod.lines[-1].endswith("; the node keeps its configuration") and config.read_bytes() == before
        put("equal-shares", texts["equal-shares.yaml"].replace("split_count: 4", "split_count: 2"))
        labelled("equal-shares", "profile equal-shares is applied")
        pod.until("change /etc/kubernetes")  # the labels
        assert compiled()["sharing"][0][0] == 2
        labelled("cluster", "profile cluster is applied")
        assert called(node) == ["systemctl restart containerd"]  # at the installation only

        # A restarted pod finds everything in place. It keeps the profile, although it cannot read the label.
        pod.kill()
        before, api.problem = config.read_bytes(), 503
        pod = start("install", GPUSHARE_NODE=NODE, **server)
        pod.until(f"gpushare: API server: GET /api/v1/nodes/{NODE}: 503")
        pod.until("ready")
        assert config.read_bytes() == before and called(node) == ["systemctl restart containerd"]
        assert pod.stop() == 0, pod.lines
    assert config.read_bytes() == before
    account = access(with_component("profiles", FOLDER))["gpushare-installer"]
    assert compared(api.calls, account.rights) == (set(), set())
