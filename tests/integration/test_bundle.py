"""The bundle (make dist) on a host without Python and a C library, and in a hostile environment."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import host, rootfs
from tests.support.engines import image
from tests.support.host import Node
from tests.support.runc import Container
from tests.support.terminal import Terminal
from tools import sizes

MakeContainer = Callable[..., Container]
ONE_GIB = {"GPUSHARE_MEMORY": "1Gi"}
PROBE = ["sh", "-c", "test -e /dev/nvidia0 && test -s /usr/lib/gpushare/limits && ldconfig -p | grep -c libcuda.so.1"]


@pytest.fixture(scope="session")
def bundle() -> Path:
    """build/dist/gpushare, built of the current tree."""
    done = subprocess.run(
        ["make", "--no-print-directory", "dist"], cwd=host.TREE, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return host.BUILD / "dist" / "gpushare"


@pytest.fixture
def empty_root(bundle: Path, tmp_path: Path) -> Iterator[Path]:
    """A root file system with only the bundle, the kernel's file systems and this test's directory."""
    root = tmp_path / "empty"
    root.mkdir()
    rootfs.run("mount", "-t", "tmpfs", "-o", "mode=755", "gpushare-test", root)
    try:
        places = {"/opt/a place": bundle, str(tmp_path): tmp_path}
        places |= {name: Path(name) for name in ("/proc", "/sys", "/dev")}
        for target, source in places.items():
            (root / target[1:]).mkdir(parents=True)
            rootfs.run("mount", "--rbind", source, root / target[1:])
        yield root
    finally:
        for _ in range(2):  # mounts below tmp_path are listed twice
            rootfs.run("umount", "--recursive", "--lazy", root) if os.path.ismount(root) else None


def call(*command: str | Path, **arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        **arguments,
    )


def static_spy(directory: Path) -> tuple[Path, Path]:
    """(a static low-level runtime that writes down its environment, the file it writes)."""
    program, written = directory / "spy", directory / "written"
    text = f"""#include <stdio.h>
    #include <string.h>
    int main(int c, char **v, char **e) {{
        FILE *to = fopen("{written}", "w");
        for (; *e; e++) fwrite(*e, 1, strlen(*e) + 1, to);
        return fclose(to);
    }}"""
    subprocess.run(["gcc", "-static", "-xc", "-", "-o", str(program)], input=text.encode(), check=True)
    return program, written


def leases_in(root: Path, node: Node) -> list[str]:
    """Ids that the CLI in `root` lists: its mounts are invisible outside."""
    options = ["--config", str(node.config), "--state", str(node.state)]
    done = call("chroot", root, "/opt/a place/bin/gpushare", *options, "list", "--format", "json")
    assert done.returncode == 0, done.stderr
    return [item["id"] for item in json.loads(done.stdout)]


def test_hook_runs_on_a_host_with_only_the_bundle(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, empty_root: Path
) -> None:
    """runc of this host, and a hook in a root without /bin, /lib and /etc."""
    node = make_node(simhost, shim_dir="/opt/a place/shim")
    programs = "/opt/a place/bin"
    options = ["--config", str(node.config), "--state", str(node.state)]
    told = call("chroot", empty_root, f"{programs}/gpushare", *options, "devices", "--format", "json")
    assert told.returncode == 0, told.stderr
    assert [device["memory_bytes"] for device in json.loads(told.stdout)] == [16 << 30]

    def hooks(spec: dict[str, Any]) -> None:
        words = ["chroot", str(empty_root), f"{programs}/gpushare-hook", *options]
        spec["hooks"] = {
            stage: [{"path": shutil.which("chroot"), "args": [*words, stage]}] for stage in ("prestart", "poststop")
        }

    one = container(PROBE, env=ONE_GIB, edit=hooks)
    assert one.run() == 0, one.stderr
    assert int(one.stdout) >= 1
    assert leases_in(empty_root, node) == [one.id]
    one.delete()
    assert leases_in(empty_root, node) == []


def test_documented_sizes_are_those_of_the_bundle(bundle: Path) -> None:
    """Within a quarter, because compilers and dependencies differ. A part that is not on the page is an error on the
    release that the packages are built on: the libraries of another one need other libraries."""
    rows = re.findall(r"^\| \**([^|*]+?)\** \| ([\d.]+) \|", (host.TREE / "docs/sizes.md").read_text(), re.MULTILINE)
    written = {name: float(size) * 1e6 for name, size in rows}
    found = sizes.parts(bundle)
    if host.WITHOUT_SNAPSHOT:  # so another release: its libraries, and no notices of what is in the snapshot
        found = {name: size for name, size in found.items() if ".so" not in name and name != "licences"}
    else:
        assert set(found) <= set(written), "run `make sizes`"
    wrong = {
        name: size
        for name, size in found.items()
        if name in written and not abs(size - written[name]) <= max(size / 4, 20_000)
    }
    assert wrong == {}, "run `make sizes`"


def test_terminal_commands_and_manual_pages_work(
    make_node: Callable[..., Node], simhost: Path, bundle: Path, empty_root: Path
) -> None:
    """The bundle contains rich and the manual pages, and needs nothing else."""
    node = make_node(simhost, shim_dir=str(bundle / "shim"))
    options = [str(bundle / "bin/gpushare"), "--config", node.config, "--state", node.state]
    for columns in (160, 60):
        with Terminal([*options, "top"], columns, 24) as one:
            one.expect("q quit")
            one.press("q")
            assert one.end() == 0 and b"\x1b[?1049l" in one.raw
    with Terminal([*options, "devices"], 160) as one:
        assert one.end() == 0
        assert "NVIDIA Simulated" in one.text and b"\x1b[1mDEVICE" in one.raw
    rows = {row["name"]: row for row in json.loads(call(*options, "doctor", "--format", "json").stdout)["checks"]}
    assert rows["library loads"]["result"] == rows["programs"]["result"] == "ok"
    done = call("chroot", empty_root, "/opt/a place/bin/gpushare", *options[1:], "doctor", "--format", "json")
    assert done.stderr == "" and "internal error" not in done.stdout
    assert "_gpushare_completion" in call(options[0], "completion", "zsh").stdout
    pages = {path.name for path in (bundle / "share/man/man1").iterdir()}
    assert {"gpushare.1", "gpushare-top.1", "gpushare-runtime-configure.1"} <= pages


def test_runtime_runs_on_a_host_with_only_the_bundle(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, empty_root: Path, tmp_path: Path
) -> None:
    spy, written = static_spy(tmp_path)
    node = make_node(simhost, shim_dir="/opt/a place/shim", runtime={"path": str(spy)})
    one = container(["true"], env=ONE_GIB, rootfs=image.make_root(tmp_path / "image"))
    options = ["--gpushare-config", str(node.config), "--gpushare-state", str(node.state)]
    words = ["chroot", str(empty_root), "/opt/a place/bin/gpushare-runtime", *options]
    done = call(*words, "create", "--bundle", str(one.bundle), one.id, env={"PATH": os.environ["PATH"]})
    assert (done.returncode, done.stderr) == (0, "")
    assert written.read_bytes().split(b"\0")[:-1] == [os.fsencode("PATH=" + os.environ["PATH"])]
    assert "gpushare.io/applied" in json.loads((one.bundle / "config.json").read_text())["annotations"]
    assert leases_in(empty_root, node) == [one.id]
    done = call(*words, "delete", one.id)
    assert (done.returncode, done.stderr) == (0, "")
    assert leases_in(empty_root, node) == []


def test_shim_is_found_beside_the_programs(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, bundle: Path, tmp_path: Path
) -> None:
    """Unpacked anywhere, with a configuration that does not name the directory."""
    moved = tmp_path / "moved here"
    shutil.copytree(bundle, moved, symlinks=True)
    node = make_node(simhost)
    host.write_config(node.config, simhost, shim_dir=str(moved / "shim"))
    content = json.loads(node.config.read_text())
    del content["shim_dir"]
    node.config.write_text(json.dumps(content))
    words = (moved / "bin" / "gpushare-runtime", "--gpushare-config", node.config, "--gpushare-state", node.state)
    one = container(PROBE, env=ONE_GIB, runtime=tuple(map(str, words)))
    assert one.run() == 0, one.stderr
    shim = moved / "shim" / "libcuda.so"
    mounts = json.loads((one.bundle / "config.json").read_text())["mounts"]
    sources = [mount["source"] for mount in mounts if os.path.basename(mount.get("source", "")) == shim.name]
    assert sources and all(os.path.samefile(source, shim) for source in sources)  # through a clone of its directory
    one.delete()
    assert node.leases() == []


def test_hostile_environment_reaches_neither_loader_nor_interpreter(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, bundle: Path, tmp_path: Path
) -> None:
    """All hostile variables known from the field at once; the low-level runtime still gets them unchanged."""
    log = tmp_path / "evil.log"
    evil = tmp_path / "evil.so"
    source = host.TREE / "tests/integration/programs/evil.c"
    rootfs.run("gcc", "-shared", "-fPIC", "-w", f'-DEVIL_LOG="{log}"', "-o", evil, source)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for path in (bundle / "libexec/_internal").glob("*.so*"):
        (libraries / path.name).symlink_to(evil)
    modules = tmp_path / "modules"
    modules.mkdir()
    for name in ("json", "os", "encodings", "sitecustomize", "gpushare", "ctypes", "site"):
        (modules / f"{name}.py").write_text(f"open({str(log)!r}, 'a').write('module {name}\\n')\n")
    hostile = {
        "LD_LIBRARY_PATH": str(libraries),
        "LD_AUDIT": str(evil),
        "LD_PRELOAD": str(evil),
        "LD_DEBUG": "all",
        "LD_DEBUG_OUTPUT": str(tmp_path / "debug"),
        "GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=1:glibc.malloc.perturb=7",
        "GCONV_PATH": str(libraries),
        "LOCPATH": str(libraries),
        "MALLOC_PERTURB_": "7",
        "PYTHONHOME": str(modules),
        "PYTHONPATH": str(modules),
        "PYTHONSTARTUP": str(modules / "json.py"),
        "PYTHONINSPECT": "1",
        "PYTHONVERBOSE": "1",
        "PYTHONPLATLIBDIR": "nowhere",
        "PYTHONEXECUTABLE": str(evil),
        "PYTHONUTF8": "nonsense",
        "_MEIPASS2": str(modules),
        "_PYI_ARCHIVE_FILE": str(evil),
        "_PYI_APPLICATION_HOME_DIR": str(modules),
        "TMPDIR": str(modules),
        "HOME": str(modules),
        "PATH": str(modules),
        "": "no name",
        "TWICE": "a=b=\n\x01\udc80",
    }
    spy, written = static_spy(tmp_path)
    node = make_node(simhost, runtime={"path": str(spy)}, shim_dir=str(bundle / "shim"))
    one = container(["true"], env=ONE_GIB)
    words = [str(bundle / "bin/gpushare-runtime"), "--gpushare-config", str(node.config)]
    words += ["--gpushare-state", str(node.state), "create", "--bundle", str(one.bundle), one.id]
    given = {name: text for name, text in hostile.items() if name}
    done = subprocess.run(words, env=given, capture_output=True, cwd=modules, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    seen = written.read_bytes().split(b"\0")[:-1]
    assert sorted(seen) == sorted(os.fsencode(f"{name}={text}") for name, text in given.items())
    assert node.leases() == [one.id]
    assert not log.exists(), log.read_text()
    assert sorted(path.name for path in tmp_path.glob("debug*")) == []
    # Through the hook, run by an engine that passes on the image's variables
    state = json.dumps({"ociVersion": "1.0.2", "id": one.id, "status": "stopped", "pid": 0, "bundle": str(one.bundle)})
    words = [str(bundle / "bin/gpushare-hook"), "--config", str(node.config), "--state", str(node.state), "poststop"]
    done = subprocess.run(words, env=given, capture_output=True, cwd=modules, timeout=60, input=state.encode())
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert node.leases() == []
    assert not log.exists(), log.read_text()


def python(bundle: Path, text: str) -> str:
    """Run a text in the bundle's interpreter, as boot.c starts it, and return its output."""
    inside = bundle / "libexec" / "_internal"
    loader = (inside / "ld.so", "--inhibit-cache", "--library-path", inside)
    done = call(*loader, inside / "python3", "-ISsc", text, env={"LC_ALL": "C"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_interpreter_maps_only_files_of_the_bundle(bundle: Path) -> None:
    """It maps only files of the bundle, and its search path has nothing else."""
    text = "import gpushare.cli, pynvml, sys; print(open('/proc/self/maps').read()); print(*sys.path, sep='\\n')"
    words = {word for word in python(bundle, text).split() if word.startswith("/")}
    inside = f"{bundle}/libexec/_internal/"
    assert words and {word for word in words if not word.startswith(inside)} == set()


OF_SNAPSHOT = ("licenses/libc6-dev", "licenses/libpython3.11-dev", "licenses/README")


def test_archive_matches_its_checksum_and_names_no_build_machine(bundle: Path) -> None:
    (archive,) = bundle.parent.glob("gpushare-*.tar.gz")
    digest, name = archive.with_name(archive.name + ".sha256").read_text().split()
    assert (digest, name) == (hashlib.sha256(archive.read_bytes()).hexdigest(), archive.name)
    top = archive.name[: -len(".tar.gz")]
    with tarfile.open(archive) as content:
        members = content.getmembers()
    names = {member.name for member in members}
    assert all(name == top or name.startswith(f"{top}/") for name in names)
    assert {(member.uid, member.gid) for member in members} == {(0, 0)}
    assert not [member.name for member in members if member.mode & 0o022 and not member.issym()]
    for name in ("bin/gpushare", "bin/gpushare-hook", "bin/gpushare-runtime", "shim/libcuda.so", "shim/libnvidia-ml.so",
                 "config/config.yaml", "config/config.schema.json", "licenses/libc6", "licenses/musl-dev",
                 "licenses/zstd", *(() if host.WITHOUT_SNAPSHOT else OF_SNAPSHOT)):  # fmt: skip
        assert f"{top}/{name}" in names
    here = str(host.TREE).encode()
    assert not [path for path in bundle.rglob("*") if path.is_file() and here in path.read_bytes()]


def test_engine_configuration_names_the_launchers(bundle: Path, tmp_path: Path) -> None:
    """Called through a link, as installed. Programs of libexec would start Python for every container."""
    (tmp_path / "gpushare").symlink_to(bundle / "bin" / "gpushare")
    done = call(tmp_path / "gpushare", "runtime", "configure", "docker", "--root", tmp_path)
    assert done.returncode == 0, done.stderr
    daemon = json.loads((tmp_path / "etc/docker/daemon.json").read_text())
    assert daemon["runtimes"]["gpushare"]["path"] == str(bundle / "bin" / "gpushare-runtime")


def test_incomplete_bundle_is_reported(bundle: Path, tmp_path: Path) -> None:
    for place, words in {"half": "install gpushare again", "a:colon": "colon"}.items():
        (tmp_path / place).mkdir()
        shutil.copy(bundle / "libexec" / "gpushare", tmp_path / place)
        done = call(tmp_path / place / "gpushare", "version")
        assert done.returncode == 127 and words in done.stderr and done.stderr.count("\n") == 1
