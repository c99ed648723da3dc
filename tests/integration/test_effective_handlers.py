"""gpushare's handler as the engines themselves have it, compared key by key with their default handler, before and
after `gpushare runtime configure`. No daemon of containerd is started.

GOLDEN_WRITE=1 adds the versions of this machine to tests/golden/configure/effective.json, from which `make docs` writes
tables of docs/engines-reference.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from gpushare.engines import containerd, docker, podman, tomltext

from tests.integration import engines
from tests.support.engines.base import SLEEP
from tests.support.engines.dockerd import Dockerd
from tests.support.engines.image import IMAGE, make_tar
from tests.support.engines.places import DefaultPlaces
from tests.support.host import BUILD, TREE
from tests.unit.test_engines_places import K0S, K0S_NEW, K0S_OLD, K3S, K3S_MAIN, K3S_OLD, MICROK8S, MICROK8S_FILES
from tools import effective_docs, newest

CRI2, CRI3 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"
# The releases of containerd that the tests can have: this machine's own, 1.7 and 2.1 (engines.SUITES)
VERSIONS = ("containerd", *(f"{name} containerd" for name in engines.SUITES))
# All keys that a handler of runc can have, in any version; containerd ignores those of other versions
OLD = f"""\
version = 2
[plugins."{CRI2}".containerd]
  default_runtime_name = "mine"
  [plugins."{CRI2}".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."{CRI2}".containerd.runtimes.mine]
    runtime_type = "io.containerd.runc.v2"
    runtime_path = "/opt/shim"
    base_runtime_spec = "/etc/base.json"
    pod_annotations = ["mine/*"]
    container_annotations = ["mine.io/*"]
    privileged_without_host_devices = true
    privileged_without_host_devices_all_devices_allowed = true
    cgroup_writable = true
    cni_conf_dir = "/etc/cni/mine.d"
    cni_max_conf_num = 2
    snapshotter = "native"
    sandbox_mode = "shim"
    io_type = "streaming"
    runtime_engine = "mine"
    runtime_root = "/run/mine"
    [plugins."{CRI2}".containerd.runtimes.mine.options]
      BinaryName = "/usr/sbin/runc"
      SystemdCgroup = true
      Root = "/run/mine"
      ShimCgroup = "/shims"
      NoPivotRoot = true
      NoNewKeyring = true
      IoUid = 5
      IoGid = 6
      CriuPath = "/opt/criu"
      CriuImagePath = "/opt/images"
      CriuWorkPath = "/opt/work"
"""
# Only what an administrator of containerd 2 has to write (shared/cases/engines/01)
SHORT = f"""\
version = 3
[plugins.'{CRI3}'.containerd.runtimes.runc]
  pod_annotations = ["mine/*"]
[plugins.'{CRI3}'.containerd.runtimes.runc.options]
  SystemdCgroup = true
"""


@pytest.fixture
def places(tmp_path: Path) -> Iterator[None]:
    made = DefaultPlaces(tmp_path / "places")
    try:
        for path in ("/etc/containerd", "/etc/k0s", "/var/lib/rancher"):  # in copies of /etc and /var/lib
            shutil.rmtree(path, ignore_errors=True)
        yield
    finally:
        made.close()


def put(files: dict[str, str], root: str = "") -> None:
    for path, text in files.items():
        file = Path(f"{root}{path}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def run(*words: str) -> str:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def dump(main: str) -> str:
    return run("containerd", "--config", main, "config", "dump")


def table(text: str) -> Any:
    """The table `containerd` of the CRI plugin."""
    plugins = tomlkit.parse(text).unwrap()["plugins"]
    return plugins[CRI3 if CRI3 in plugins else CRI2]["containerd"]


def handlers(main: str) -> dict[str, dict[str, Any]]:
    """The handlers of containerd's own dump, with dotted keys, without the zero values that a handler has by itself."""
    effective = table(dump(main))
    flat = {name: effective_docs.flat(handler) for name, handler in effective["runtimes"].items()}
    found = {name: {k: v for k, v in one.items() if v or isinstance(v, list)} for name, one in flat.items()}
    return {**found, "default": found[effective["default_runtime_name"]]}


def copy_of(default: dict[str, Any]) -> dict[str, Any]:
    """gpushare's handler: the default one with gpushare's program, and its annotations added."""
    names = ("pod_annotations", "container_annotations")
    annotations = {name: [*default[name], *containerd.ANNOTATIONS] for name in names}
    return {**default, **annotations, "options.BinaryName": str(BUILD / "bin/gpushare-runtime-cri")}


def version() -> str:
    match = re.search(r" v?(\d+\.\d+\.\d+)", run("containerd", "--version"))
    assert match
    return match[1]


@pytest.mark.parametrize("text", [OLD, SHORT], ids=["own handler", "short file"])
@pytest.mark.parametrize("name", VERSIONS)
def test_handler_equals_the_default_one_in_every_other_key(places: None, name: str, text: str) -> None:
    with engines.programs(name):
        if text == SHORT and version().startswith("1."):
            text = OLD  # a file of version 3 is for containerd 2
        put({containerd.FILE: text})
        before = handlers(containerd.FILE)
        run(str(BUILD / "bin/gpushare"), "runtime", "configure", "containerd")
        after = handlers(containerd.FILE)
        assert {key: after[key] for key in before} == before
        ours, default = after["gpushare"], after["default"]
        assert ours == copy_of(default)
        if text == OLD:
            every = effective_docs.flat(table(run("containerd", "config", "default"))["runtimes"]["runc"])
            assert set(every) <= set(default)  # no key was left out
            effective_docs.check(f"containerd {version()}", before["default"], default, ours)
        run(str(BUILD / "bin/gpushare"), "runtime", "configure", "containerd", "--undo")
        assert handlers(containerd.FILE) == before and Path(containerd.FILE).read_text() == text


def test_hook_only_handler_has_our_base_spec(places: None) -> None:
    """On a host without a file of containerd."""
    words = [str(BUILD / "bin/gpushare"), "runtime", "configure", "containerd"]
    run(*words, "--hook-only")
    after = handlers(containerd.FILE)
    ours = copy_of(after["default"]) | {"base_runtime_spec": containerd.BASE_SPEC}
    del ours["options.BinaryName"]
    assert after["gpushare"] == ours
    run(*words, "--undo")
    assert not Path(containerd.FILE).exists() and not Path(containerd.BASE_SPEC).exists()


def test_base_spec_equals_containerd_s_default() -> None:
    """Hosts without ctr use this copy: it must not open anything that containerd masks or denies."""
    spec = json.loads(run("ctr", "oci", "spec"))
    written = TREE / "config/engines/containerd-hook-only" / containerd.BASE_SPEC.lstrip("/")
    copy = json.loads(written.read_text())
    assert copy["process"] == spec["process"] and copy["root"] == spec["root"]
    assert copy["mounts"] == spec["mounts"] and copy["linux"]["resources"] == spec["linux"]["resources"]
    assert copy["linux"]["namespaces"] == spec["linux"]["namespaces"]
    for name in ("maskedPaths", "readonlyPaths"):
        assert set(copy["linux"][name]) >= set(spec["linux"][name])


@pytest.mark.parametrize("name", VERSIONS[1:])
@pytest.mark.parametrize("shape", ["k3s", "k0s", "MicroK8s"])
def test_distribution_s_containerd_reads_the_entry(places: None, tmp_path: Path, shape: str, name: str) -> None:
    """The test itself does the work of the next start: it runs no program of the distribution."""
    with engines.programs(name):
        old = version().startswith("1.")
        shapes = {
            "k3s": ({f"{K3S}/config.toml": K3S_OLD if old else K3S_MAIN}, f"{K3S}/config.toml"),
            "k0s": (K0S_OLD if old else K0S_NEW, K0S),
            "MicroK8s": (MICROK8S_FILES, f"{MICROK8S}/containerd.toml"),
        }
        files, main = shapes[shape]
        root = str(tmp_path / "root") if shape == "MicroK8s" else ""  # its files import no others
        put(files, root)
        before = handlers(root + main)
        (tmp_path / "dump").write_text(dump(root + main))
        below = ("--root", root) if root else ()
        words = [str(BUILD / "bin/gpushare"), "runtime", "configure", "containerd", "--config-file", main, *below]
        run(*words, "--engine-version", version()[:3], "--dump", str(tmp_path / "dump"))
        assert all(Path(root + path).read_text() == text for path, text in files.items() if "template" not in path)
        next_start(shape, Path(root + main), old)
        after = handlers(root + main)
        assert after["default"] == before["default"] and after["gpushare"] == copy_of(after["default"])
        assert after["gpushare"].get("options.SystemdCgroup", False) is (shape != "k0s")
        states = json.loads(run(str(BUILD / "bin/gpushare"), "runtime", "status", "--format", "json", *below))
        (state,) = (one for one in states if one["engine"] == "containerd")
        assert (state["configured"], state["problem"]) == (True, "")
        run(*words, "--undo")
        assert all(Path(root + path).read_text() == text for path, text in files.items() if "template" in path)


def next_start(shape: str, main: Path, old: bool) -> None:
    folder = main.parent
    if shape == "k3s" and old:
        template = (folder / "config.toml.tmpl").read_text()
        main.write_text(template.replace('{{ template "base" . }}\n', K3S_OLD))
    elif shape == "k0s" and old:  # k0s merges files with CRI sections into its own
        merged = tomlkit.parse(K0S_OLD["/run/k0s/containerd-cri.toml"]).unwrap()
        more = tomlkit.parse(Path("/etc/k0s/containerd.d/gpushare.toml").read_text()).unwrap()
        Path("/run/k0s/containerd-cri.toml").write_text(tomlkit.dumps(tomltext.merged(merged, more)))
    elif shape == "MicroK8s":
        text = (folder / "containerd-template.toml").read_text()
        text = text.replace("${RUNTIME}", "runc").replace("${RUNTIME_TYPE}", "io.containerd.runc.v2")
        main.write_text(text)


@pytest.mark.parametrize("name", VERSIONS)
def test_fault_that_containerd_finds_is_named(places: None, name: str) -> None:
    """containerd itself checks the files: here a key of another type, before the change already."""
    with engines.programs(name):
        put({containerd.FILE: "version = 2\noom_score = 'x'\n"})
        words = [str(BUILD / "bin/gpushare"), "runtime", "configure", "containerd"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "containerd refuses the change: " in done.stderr
        assert "; it refused the files before the change, too\n" in done.stderr


TYPED = next(iter(engines.SUITES))  # docker 23 and later have runtimes with a type


# docker: this machine's own, and those of the releases in engines.SUITES. podman: the same


def program(name: str, suite: str) -> str:
    """A program of this machine, or of another release."""
    if not suite:
        return shutil.which(name) or name
    return str(newest.unpack(BUILD / f"{suite}-engines", engines.SUITES[suite], "engines") / name)


class Other(Dockerd):
    """A daemon of another release."""

    suite = ""

    def command_line(self) -> list[str]:
        return [program("dockerd", self.suite), *super().command_line()[1:]]


@contextlib.contextmanager
def of_release(suite: str, runtime: dict[str, Any]) -> Iterator[Other]:
    """A daemon with this default runtime, which does not run yet."""
    directory = Path(tempfile.mkdtemp(prefix="gs-"))
    made = Other(directory / "d", {"default-runtime": "mine", "runtimes": {"mine": runtime}})
    made.suite = suite
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(directory)


@pytest.fixture(params=["", *engines.SUITES], ids=["own", *engines.SUITES])
def dockerd(request: pytest.FixtureRequest, places: None) -> Iterator[Other]:
    with of_release(request.param, {"path": "/usr/sbin/runc", "runtimeArgs": ["--debug"]}) as made:
        yield made


def runtimes_of(daemon: Dockerd) -> dict[str, dict[str, Any]]:
    """The runtimes of `docker info`; a newer docker adds what each supports."""
    info = json.loads(daemon.must("info", "--format", "{{json .}}"))
    keys = ("path", "runtimeArgs")
    found = {name: {key: one[key] for key in keys if key in one} for name, one in info["Runtimes"].items()}
    return {**found, "default": found[info["DefaultRuntime"]]}


def test_docker_s_runtime_has_the_arguments_of_the_default_one(dockerd: Other) -> None:
    dockerd.start()
    before = runtimes_of(dockerd)
    words = [str(BUILD / "bin/gpushare"), "runtime", "configure", "docker", "--config-file", str(dockerd.config_file)]
    text = dockerd.config_file.read_text()
    run(*words)
    dockerd.end()
    dockerd.start()
    after = runtimes_of(dockerd)
    ours = after["gpushare"]
    assert {name: after[name] for name in before} == before
    assert ours == {**after["default"], "path": str(BUILD / "bin/gpushare-runtime")}
    number = json.loads(dockerd.must("version", "--format", "{{json .Server.Version}}")).partition("+")[0]
    effective_docs.check(f"docker {number}", before["default"], after["default"], ours)
    run(*words, "--undo")
    assert dockerd.config_file.read_text() == text


def test_docker_s_typed_runtime_keeps_its_options(places: None, image_root: Path, tmp_path: Path) -> None:
    """docker shows them nowhere, so a container with runc's state in another directory judges."""
    options = {"BinaryName": shutil.which("runc"), "Root": str(tmp_path / "state")}
    with of_release(TYPED, {"runtimeType": "io.containerd.runc.v2", "options": options}) as daemon:
        run(str(BUILD / "bin/gpushare"), "runtime", "configure", "docker", "--config-file", str(daemon.config_file))
        daemon.start()
        daemon.must("import", str(make_tar(image_root, tmp_path / "image.tar")), IMAGE)
        created = daemon.must("run", "--detach", "--network=none", "--runtime=gpushare", IMAGE, *SLEEP)
        assert [path.name for path in (tmp_path / "state/moby").iterdir()] == [created]


def test_dockerd_does_not_start_with_a_key_that_is_also_its_flag(dockerd: Other) -> None:
    """shared/cases/engines/03. The unit is the one of a host; the daemon gets its flag."""
    flag = ("--default-runtime", "runc")
    put({"/etc/systemd/system/docker.service.d/flag.conf": f"[Service]\nExecStart=/usr/bin/dockerd {' '.join(flag)}\n"})
    put({"/etc/systemd/system/docker.service": "[Service]\nExecStart=\n"})
    put({docker.FILE: "{}"})
    words = [str(BUILD / "bin/gpushare"), "runtime", "configure", "docker", "--default"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78 and Path(docker.FILE).read_text() == "{}"
    assert '--default-runtime "runc" from /etc/systemd/system/docker.service.d/flag.conf, and does not' in done.stderr
    dockerd.config_file.write_text('{"default-runtime": "gpushare"}')
    with pytest.raises(AssertionError, match="specified both as a flag and in the configuration file: default-runtime"):
        dockerd.start(*flag)


@pytest.mark.parametrize("suite", list(engines.SUITES))
def test_docker_checks_the_change(places: None, tmp_path: Path, suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dockerd --validate` of docker 23 and later."""
    put({docker.FILE: '{"log-level": "loud"}\n'})
    monkeypatch.setenv("PATH", f"{Path(program('dockerd', suite)).parent}:{os.environ['PATH']}")
    words = [str(BUILD / "bin/gpushare"), "runtime", "configure", "docker"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "dockerd refuses the change: " in done.stderr
    assert "; it refused the files before the change, too\n" in done.stderr
    Path(docker.FILE).write_text('{"log-level": "debug"}\n')
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "refuses" not in done.stderr


@pytest.mark.parametrize("suite", ["", *engines.SUITES], ids=["own", *engines.SUITES])
def test_podman_keeps_its_default_runtime_and_reads_ours(
    places: None, suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(tempfile.mkdtemp(prefix="gs-"))
    put({"/etc/containers/containers.conf": '[engine]\nruntime_supports_nocgroup = ["runc"]\n'})
    # podman 5 looks for its network program before it answers
    put({f"{directory}/o.conf": f'[engine]\nhelper_binaries_dir = ["{directory}"]\n'})
    put({f"{directory}/netavark": "#!/bin/sh\necho netavark 1.0\n"})
    (directory / "netavark").chmod(0o755)
    monkeypatch.setenv("CONTAINERS_CONF_OVERRIDE", f"{directory}/o.conf")
    storage = ["--root", f"{directory}/s", "--runroot", f"{directory}/r", "--storage-driver", "vfs"]

    def words(*options: str) -> list[str]:
        return [program("podman", suite), *storage, *options]

    def info(*options: str) -> dict[str, Any]:
        host = json.loads(run(*words(*options, "info", "--format", "json")))["host"]
        return {"cgroupManager": host["cgroupManager"], "ociRuntime.path": host["ociRuntime"]["path"]}

    try:
        before = info()
        run(str(BUILD / "bin/gpushare"), "runtime", "configure", "podman")
        after, ours = info(), info("--runtime", "gpushare")
        assert f",{podman.HOOKS}]" in run(*words("--help"))
        # no answer of podman shows runtime_supports_*
        run(*words("--runtime", "gpushare", "create", "--network=none", "--cgroups=disabled", "--rootfs", "/", "true"))
        assert after == before and ours == {**before, "ociRuntime.path": str(BUILD / "bin/gpushare-runtime")}
        number = run(program("podman", suite), "--version").split()[-1].partition("+")[0]
        effective_docs.check(f"podman {number}", before, after, ours)
    finally:
        shutil.rmtree(directory)
