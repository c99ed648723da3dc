"""docs/node-life.md: what each event does to gpushare on a node. The table of the page names a test for each event.

The tests here run install.py in this process over a node below a temporary root. The node's `gpushare` and its engine
are stand-ins: the engine starts unless `fails` says otherwise, with the programs that its file names.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

import pytest
import yaml

from tests.support.host import TREE

PAGE = TREE / "docs/node-life.md"
FILE = "etc/containerd/conf.d/gpushare.toml"
SHARE = {"id": "0123456789ab", "name": "ml/train/main"}
RESTART = "systemctl restart containerd"


class Node:
    """A node as install.py finds it."""

    def __init__(self, install: ModuleType, top: Path) -> None:
        self.install, self.top = install, top
        self.root, self.proc, self.bundle = top / "node", top / "proc", top / "bundle"
        self.calls: list[str] = []
        self.shares: list[dict[str, str]] = []
        self.fails: Callable[[str], bool] = lambda text: False
        self.running = ""  # the engine's file when it last started
        for path in (self.root / "run", self.proc, self.bundle / "bin"):
            path.mkdir(parents=True)
        self.release("1")

    def release(self, version: str) -> None:
        """Build the image of this version."""
        for name in ("gpushare", "gpushare-runtime-cri"):
            (self.bundle / "bin" / name).write_text(version)

    @property
    def engine_file(self) -> str:
        path = self.root / FILE
        return path.read_text() if path.exists() else ""

    @property
    def version(self) -> str:
        return str(self.install.current())

    @property
    def versions(self) -> set[str]:
        return {path.name for path in (self.root / "opt/gpushare").iterdir() if path.is_dir() and not path.is_symlink()}

    def gpushare(self, *words: str) -> dict[str, Any]:
        self.calls.append(" ".join(words[:2]))
        path, before = self.root / FILE, self.engine_file
        if words[0] == "list":
            return {"items": self.shares}
        if words[:2] == ("runtime", "configure") or words[0] == "uninstall":
            text = "" if "--undo" in words or words[0] == "uninstall" else f"/opt/gpushare/{self.version}/bin/runtime"
            record = json.dumps({"files": [{"path": "/" + FILE}]}) if text else ""
            paths = {"/" + FILE: text, self.install.CONFIGURED.format("containerd"): record}
            if "--dry-run" not in words:
                self.install.put_back({path: data.encode() for path, data in paths.items()})
            changes = [{"action": "change", "path": str(path)}] if text != before else []
            return {
                "changes": changes,
                "steps": [],
                "notes": [],
                "next": RESTART if changes or text != self.running else None,
            }
        return {"action": ""}

    def run(self, *words: str, quiet: bool = False) -> str:
        if " ".join(words) != RESTART:
            return ""
        self.calls.append(RESTART)
        text = self.engine_file
        if self.fails(text):
            raise self.install.Failed(f"`{RESTART}` ended with 1; its messages are above")
        self.running = text
        return ""

    def restarts(self) -> int:
        return self.calls.count(RESTART)

    def install_now(self) -> None:
        self.install.install(self.install.Profile())

    def process(
        self,
        pid: int,
        name: str,
        *words: str,
        mounts: str = "",
        cwd: str = "/",
        program: str = "/usr/bin/x",
        container: bool = False,
        uid: int = 0,
    ) -> None:
        """Start a process on the node: in a container, or with the node's mounts."""
        if pid != 1 and not (self.proc / "1").exists():
            self.process(1, "systemd")
        folder = self.proc / str(pid)
        (folder / "ns").mkdir(parents=True)
        (folder / "comm").write_text(name + "\n")
        (folder / "cmdline").write_bytes(b"\0".join(word.encode() for word in words))
        (folder / "mountinfo").write_text(mounts)
        (folder / "status").write_text(f"Name:\t{name}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t0\t0\t0\t0\n")
        (folder / "ns/mnt").symlink_to(f"mnt:[{pid if container else 1}]")
        (folder / "cwd").symlink_to(cwd)
        (folder / "exe").symlink_to(program)

    def task(self, name: str, runtime: str = "", spec: str = "", top: str = "") -> Path:
        """A task's record, as containerd 1.7 and 2.1 have it (tests/integration/test_node_life.py)."""
        folder = self.root / (top or self.install.TASKS[1:]) / "k8s.io" / name
        folder.mkdir(parents=True)
        (folder / "options.json").write_text(json.dumps({"binary_name": runtime}))
        (folder / "config.json").write_text(json.dumps({"hooks": {"poststop": [{"path": spec}]}}))
        return folder

    def end(self) -> None:
        """All containers and processes of the node end."""
        self.shares.clear()
        for path in (self.root / "run", self.proc):
            shutil.rmtree(path)
            path.mkdir()


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", TREE / "packaging/kubernetes/installer/install.py")
    assert spec is not None and spec.loader is not None
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    return install


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    install = load()
    made = Node(install, tmp_path)
    places = {"HOST": made.root, "PROC": made.proc, "BUNDLE": made.bundle, "READY": tmp_path / "ready"}
    for name, path in places.items():
        monkeypatch.setattr(install, name, str(path))
    monkeypatch.setattr(install, "gpushare", made.gpushare)
    monkeypatch.setattr(install, "run", made.run)
    monkeypatch.delenv("GPUSHARE_NODE", raising=False)
    return made


@pytest.fixture
def signals(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that the pod gets, one at each wait; a missing one is the wait's end."""
    left: list[int] = []

    class Info:
        def __init__(self, number: int) -> None:
            self.si_signo = number

    def sigtimedwait(wanted: Any, seconds: float) -> Any:
        number = left.pop(0)
        return Info(number) if number else None

    monkeypatch.setattr(signal, "sigtimedwait", sigtimedwait)
    monkeypatch.setattr(signal, "sigwait", lambda wanted: left.pop(0))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda how, mask: set())
    return left


def rows() -> list[tuple[str, str]]:
    """(event, test) of the page's table."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(row[0], row[-1].strip("`")) for row in found if re.match("`(unit|integration)/", row[-1])]


def test_each_event_of_the_page_has_a_test() -> None:
    table = rows()
    assert len(table) >= 20 and len({event for event, _ in table}) == len(table)
    for event, place in table:
        path, _, name = place.partition("::")
        assert f"def {name}(" in (TREE / "tests" / path).read_text(), event


def test_first_start_installs(node: Node, signals: list[int]) -> None:
    signals += [signal.SIGTERM]
    assert node.install.main("install") == 0
    assert node.engine_file == node.running == f"/opt/gpushare/{node.version}/bin/runtime"
    assert node.restarts() == 1 and (node.top / "ready").exists()


@pytest.mark.parametrize("in_use", [True, False])
def test_end_of_the_pod_changes_nothing(node: Node, signals: list[int], in_use: bool) -> None:
    """Kubernetes sends SIGTERM at an upgrade, a drain, an eviction, a shutdown, and when the DaemonSet or its namespace
    is deleted; the pod cannot tell them apart."""
    node.install_now()
    node.shares = [SHARE] if in_use else []
    before = node.engine_file, node.versions, node.version
    signals += [signal.SIGTERM]
    assert node.install.main("install") == 0
    assert (node.engine_file, node.versions, node.version) == before
    assert node.restarts() == 1 and "uninstall --yes" not in node.calls


def test_pod_after_a_kill_finds_everything_in_place(node: Node, signals: list[int]) -> None:
    node.install_now()
    (node.top / "ready").touch()  # of the container that was killed
    (node.root / "opt/gpushare/new/bin").mkdir(parents=True)
    node.process(5, "python3", "/usr/bin/news")
    signals += [signal.SIGTERM]
    assert node.install.main("install") == 0
    assert node.restarts() == 1 and node.versions == {node.version}


def test_upgrade_replaces_the_version_and_restarts_the_engine_once(node: Node) -> None:
    node.install_now()
    first = node.version
    node.release("2")
    node.install_now()
    assert node.version != first and node.running == f"/opt/gpushare/{node.version}/bin/runtime"
    assert node.restarts() == 2 and node.versions == {node.version}


USES: dict[str, Callable[[Node, str], object]] = {
    "pause container": lambda node, name: node.task("a" * 64, f"/opt/gpushare/{name}/bin/gpushare-runtime-cri"),
    "task of k3s": lambda node, name: (
        node.task("b" * 64, f"/opt/gpushare/{name}/bin/x", top="run/k3s/containerd/tasks"),
        node.process(5, "containerd-shim", cwd=f"/run/k3s/containerd/tasks/k8s.io/{'b' * 64}"),
    ),
    "hook in a specification": lambda node, name: node.task("c" * 64, "runc", f"/opt/gpushare/{name}/bin/hook"),
    "conmon": lambda node, name: node.process(6, "conmon", "/usr/bin/conmon", "-r", f"/opt/gpushare/{name}/bin/x"),
    "mount in a container": lambda node, name: node.process(
        7, "python3", mounts=f"1 2 0:1 /opt/gpushare/{name}/shim /", container=True
    ),
}


@pytest.mark.parametrize("use", USES)
def test_version_stays_while_something_names_it(node: Node, use: str) -> None:
    """Also if no container has a share. It goes when the pod looks again."""
    node.install_now()
    first = node.version
    USES[use](node, first)
    node.release("2")
    node.install_now()
    assert node.versions == {first, node.version} and not node.shares
    node.end()
    node.install.tidy()
    assert node.versions == {node.version}


def test_version_goes_although_new_containers_were_to_get_a_mount_from_it(node: Node) -> None:
    """gpushare keeps a clone of the version's directory in its state directory, which the installer's pod sees, too."""
    node.install_now()
    for pid, name, state in ((1, "systemd", "/run/gpushare"), (5, "python3", "/host/run/gpushare")):
        mounts = (
            f"9 8 254:0 /opt/gpushare/{node.version}/shim {state}/idmap/65024-2238255 ro shared:1 - ext4 /dev/x rw\n"
        )
        node.process(pid, name, mounts=f"8 1 254:0 / / rw - ext4 /dev/x rw\n{mounts}", container=pid != 1)
    node.release("2")
    node.install_now()
    assert node.versions == {node.version}


def test_version_stays_until_the_engine_is_restarted(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """With GPUSHARE_RESTART=never, the engine calls the programs of the old version until the administrator does it."""
    node.install_now()
    first = node.version
    monkeypatch.setenv("GPUSHARE_RESTART", "never")
    node.release("2")
    node.install_now()
    node.install.tidy()
    assert node.versions == {first, node.version} and node.restarts() == 1
    node.run(*RESTART.split())
    node.install.tidy()
    assert node.versions == {node.version}


def test_removal_without_programs_changes_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are damaged; the next installer repairs them. Without them the engine's file cannot be undone."""
    node.install_now()
    before = node.engine_file
    node.install.discard(str(node.root / "opt/gpushare" / node.version))

    def gpushare(*words: str) -> dict[str, Any]:
        raise node.install.Failed("/opt/gpushare/current/bin/gpushare: No such file or directory")

    monkeypatch.setattr(node.install, "gpushare", gpushare)
    with pytest.raises(node.install.Failed, match="No such file"):
        node.install.remove()
    assert node.engine_file == before and (node.root / "opt/gpushare/current").is_symlink()


def test_engine_s_own_file_is_named_in_every_call(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a failed start is undone, and when old versions are looked for."""
    calls = list[tuple[str, ...]]()

    def gpushare(*words: str) -> dict[str, Any]:
        calls.append(words)
        return node.gpushare(*words)

    monkeypatch.setattr(node.install, "gpushare", gpushare)
    monkeypatch.setenv("GPUSHARE_CONFIG_FILE", "/x/config.toml")
    node.fails = lambda text: text != ""
    with pytest.raises(node.install.RestartFailed):
        node.install_now()
    node.install.has_unread_files()
    found = [words for words in calls if words[:2] == ("runtime", "configure")]
    assert len(found) == 3 and all(("--config-file", "/x/config.toml") in zip(words, words[1:]) for words in found)


@pytest.mark.parametrize("by_hand", [False, True])
def test_failed_restart_of_the_same_version_keeps_the_entry(
    node: Node, monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    """A pod that starts again can change the engine's file: an administrator has edited it."""
    node.install_now()
    version = node.version
    before = node.engine_file + "# edited" if by_hand else node.engine_file
    (node.root / FILE).write_text(before)
    node.running = before
    configure = node.gpushare

    def gpushare(*words: str) -> dict[str, Any]:
        done = configure(*words)
        if words[:2] == ("runtime", "configure"):
            assert "--undo" not in words
            node.install.write("/" + FILE, b"changed")
            done["next"] = RESTART
        return done

    monkeypatch.setattr(node.install, "gpushare", gpushare)
    node.fails = lambda text: text != before
    with pytest.raises(node.install.RestartFailed, match="that was undone"):
        node.install_now()
    assert (node.engine_file, node.running, node.version) == (before, before, version)
    assert list(node.install.configured("containerd")) == ["/" + FILE]


def test_version_that_cannot_configure_is_not_current(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.install_now()
    node.install.write("/etc/gpushare/config.yaml", b"version: 1\n")
    first, before = node.version, node.engine_file
    node.release("2")

    def gpushare(*words: str) -> dict[str, Any]:
        node.install.write("/etc/gpushare/config.yaml", b"version: 2\n")
        raise node.install.Failed("the engine's file is broken")

    monkeypatch.setattr(node.install, "gpushare", gpushare)
    with pytest.raises(node.install.Failed, match="is broken"):
        node.install_now()
    assert (node.version, node.engine_file) == (first, before)
    assert (node.root / "etc/gpushare/config.yaml").read_text() == "version: 1\n"


@pytest.mark.parametrize("upgrade", [False, True])
def test_failed_restart_is_undone_and_not_repeated(
    node: Node, signals: list[int], capsys: pytest.CaptureFixture[str], upgrade: bool
) -> None:
    """The pod stays unready, so the rollout stops at this node. SIGHUP tries again."""
    if upgrade:
        node.install_now()
        node.install.write("/etc/gpushare/config.yaml", b"version: 1\n")  # of the first version
        node.install.write(node.install.WRITTEN, node.install.checksum(node.install.CONFIG).encode())
    before, first, restarts = node.engine_file, node.version, node.restarts()
    node.release("2")
    node.fails = lambda text: text != before
    configure = node.gpushare

    def gpushare(*words: str) -> dict[str, Any]:
        if "--profile" in words:
            node.install.write("/etc/gpushare/config.yaml", b"version: 2\n")
        return configure(*words)

    node.install.gpushare = gpushare  # type: ignore[attr-defined]
    signals += [signal.SIGHUP, signal.SIGTERM]
    assert node.install.main("install") == 0
    assert (node.engine_file, node.running) == (before, before) and not (node.top / "ready").exists()
    assert node.restarts() - restarts == 4  # two attempts, and after each the restart that undoes it
    line = "ended with 1; its messages are above; that was undone, and the engine runs as before"
    assert capsys.readouterr().err.count(line) == 2
    if upgrade:
        assert node.version == first and (node.root / "etc/gpushare/config.yaml").read_text() == "version: 1\n"


def test_undone_upgrade_leaves_nothing_that_the_newer_version_wrote(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the earlier version does not know: more in its file, and other files. Modes stay, for passwords."""
    node.install_now()
    (node.root / FILE).chmod(0o600)
    before, configure, folder = node.engine_file, node.gpushare, (node.root / FILE).parent
    (folder / "other.toml").write_text("own")
    node.release("2")

    def gpushare(*words: str) -> dict[str, Any]:
        done = configure(*words)
        if words[:2] == ("runtime", "configure"):
            texts = {FILE: None, "etc/containerd/conf.d/other.toml": "own", "etc/containerd/conf.d/new.toml": None}
            files = [{"path": f"/{path}", "before": text} for path, text in texts.items()]
            node.install.write(node.install.CONFIGURED.format("containerd"), json.dumps({"files": files}).encode())
            for path in texts:
                node.install.write(f"/{path}", b"of the newer version")
        return done

    monkeypatch.setattr(node.install, "gpushare", gpushare)
    node.fails = lambda text: text != before
    with pytest.raises(node.install.RestartFailed, match="that was undone"):
        node.install_now()
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"gpushare.toml": before, "other.toml": "own"}
    assert (node.root / FILE).stat().st_mode & 0o777 == 0o600
    assert list(node.install.configured("containerd")) == ["/" + FILE]


def test_undo_after_which_containerd_still_has_no_cri_is_not_reported_as_done(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.install_now()
    node.release("2")
    found = iter(["ok", "error", "error"])
    monkeypatch.setattr(node.install, "cri_of", lambda engine: next(found))
    with pytest.raises(node.install.RestartFailed, match="undoing it failed as well: containerd runs without CRI"):
        node.install_now()


@pytest.mark.parametrize(
    ("before", "after", "undone"),
    [("ok", "error", True), ("ok", "ok", False), ("error", "error", False), ("skip", "skip", False), ("", "", False)],
)
def test_engine_that_runs_without_cri_is_undone(
    node: Node, monkeypatch: pytest.MonkeyPatch, before: str, after: str, undone: bool
) -> None:
    """containerd stays active if its CRI plugin refuses the configuration (seen with 2.2.7, whose output this is)."""

    def run(*words: str, quiet: bool = False) -> str:
        if words[:2] != ("ctr", "plugins"):
            return node.run(*words, quiet=quiet)
        status = after if node.running else before
        if not status:
            raise node.install.Failed("ctr: No such file or directory")
        return (
            "TYPE                      ID       PLATFORMS      STATUS    \n"
            f"io.containerd.cri.v1      runtime  linux/amd64    {status}     \n"
            f"io.containerd.grpc.v1     cri      -              {status}     \n"
        )

    monkeypatch.setattr(node.install, "run", run)
    if undone:
        with pytest.raises(node.install.RestartFailed, match="runs without CRI.*; that was undone"):
            node.install_now()
    else:
        node.install_now()
    assert (node.engine_file == "") is undone and node.restarts() == 1 + undone


def test_reboot_needs_no_restart_of_the_engine(node: Node) -> None:
    """/run is empty; the engine has read its file when it started."""
    node.install_now()
    before = node.engine_file
    node.end()
    node.install_now()
    assert node.restarts() == 1 and node.engine_file == before


def test_programs_are_on_the_disk_before_they_get_their_name(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss leaves the old version, or all of the new one."""
    synced, states = set[str](), list[tuple[str, set[str]]]()
    rename, fsync = os.rename, os.fsync

    def record(old: str, new: str) -> None:
        states.append((str(new), set(synced)))
        rename(old, new)

    def sync(file: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "rename", record)
    monkeypatch.setattr(os, "fsync", sync)
    node.install.point(node.install.copy())
    folder = node.root / "opt/gpushare"
    (name, before), (link, then) = states
    assert (name, link) == (f"{folder}/{node.version}", f"{folder}/current")
    new = {str(folder / "new" / path.relative_to(node.bundle)) for path in node.bundle.rglob("*")}
    assert {*new, f"{folder}/new"} <= before and str(folder) in then
    synced.clear()
    node.install.write("/etc/gpushare/x", b"x")
    assert str(node.root / "etc/gpushare") in synced


def _relink(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("gpushare", lambda path: path.write_text("")),
        ("gpushare", lambda path: path.chmod(0o600)),
        ("gpushare", _relink),
        ("cri", _relink),
    ],
)
def test_damaged_programs_are_replaced(node: Node, name: str, damage: Callable[[Path], object]) -> None:
    (node.bundle / "bin/cri").symlink_to("gpushare")
    (node.bundle / "bin/gpushare").chmod(0o755)
    node.install_now()
    damage(node.root / "opt/gpushare" / node.version / "bin" / name)
    node.install_now()
    path = node.root / "opt/gpushare" / node.version / "bin" / name
    assert path.read_text() == "1" and os.access(path, os.X_OK)
    assert node.versions == {node.version}


def test_full_disk_is_an_error_with_one_line_and_leaves_nothing(
    node: Node, signals: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The programs of an attempt that failed would keep the node's disk full."""

    def full(source: str, target: str, **options: Any) -> None:
        raise OSError(28, "No space left on device", source)

    monkeypatch.setattr(shutil, "copyfile", full)
    assert node.install.main("install") == 1
    error = capsys.readouterr().err
    assert error.startswith("gpushare: cannot copy the programs to /opt/gpushare: [Errno 28] No space left")
    assert error.count("\n") == 1 and len(error) < 300 and node.versions == set()


@pytest.mark.parametrize("target", ["/data/x", "data/x", "../data/../data/x", "/link"])
@pytest.mark.parametrize("link", ["etc", "etc/containerd"])
def test_links_on_the_node_name_paths_of_the_node(node: Node, link: str, target: str) -> None:
    (node.root / "data/x").mkdir(parents=True)
    (node.root / "link").symlink_to("/data/x")
    path = node.root / link
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("../" + target if "/" in link and target[0] != "/" else target)
    node.install_now()
    assert node.version in (node.root / "data/x" / FILE.removeprefix(f"{link}/")).read_text()


@pytest.mark.parametrize("target", ["/data/config.yaml", "../../data/config.yaml", "/data/missing.yaml"])
def test_administrator_s_link_to_a_configuration_stays(
    node: Node, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Also when the engine does not start, and the files from before come back."""
    node.install_now()
    (node.root / "data").mkdir()
    (node.root / "data/config.yaml").write_text("version: 1\n")
    link = node.root / "etc/gpushare/config.yaml"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)
    words: list[tuple[str, ...]] = []
    real = node.gpushare
    monkeypatch.setattr(node.install, "gpushare", lambda *one: words.append(one) or real(*one))
    node.release("2")
    node.fails = lambda text: node.version in text
    with pytest.raises(node.install.RestartFailed):
        node.install_now()
    assert os.readlink(link) == target
    assert any("--profile" in one for one in words) == ("missing" in target)  # which refuses a link


@pytest.mark.parametrize("link", ["opt", "opt/gpushare"])
@pytest.mark.parametrize("target", ["/data/x", "data/x"])
def test_folder_behind_a_link_is_refused(
    node: Node, signals: list[int], capsys: pytest.CaptureFixture[str], link: str, target: str
) -> None:
    """The engine's entries would name the path without the link, so nothing that uses gpushare would be found."""
    (node.root / "data/x").mkdir(parents=True)
    (node.root / link).parent.mkdir(exist_ok=True)
    (node.root / link).symlink_to("../" + target if "/" in link and target[0] != "/" else target)
    assert node.install.main("install") == 1
    real = "/data/x/gpushare" if link == "opt" else "/data/x"
    error = f"gpushare: GPUSHARE_FOLDER=/opt/gpushare is {real} on this node: write a path without links\n"
    assert capsys.readouterr().err == error and not any((node.root / "data/x").iterdir())


def test_folder_behind_a_link_of_an_image_based_node_is_used(node: Node) -> None:
    """/opt is a link to var/opt where only /var can be written, and the path without links ends in the same words."""
    (node.root / "var/opt").mkdir(parents=True)
    (node.root / "opt").symlink_to("var/opt")
    node.install.check_folder()
    node.install_now()
    assert (node.root / "var/opt/gpushare/current").is_symlink()


BLOCKS: dict[str, tuple[Callable[[Node, str], object], str]] = {
    "share": (lambda node, name: node.shares.append(SHARE), "container ml/train/main holds a share"),
    "claim": (
        lambda node, name: node.install.write("/run/cdi/gpushare.io-claim_u.json", b"{}"),
        "the resource claim of gpushare.io-claim_u.json is prepared",
    ),
    "pause container": (USES["pause container"], f"container {'a' * 64} has gpushare's runtime"),
    "conmon": (USES["conmon"], "process 6 (conmon) runs"),
    "exporter": (
        lambda node, name: node.process(
            8, "ld.so", program=f"{node.root}/opt/gpushare/{name}/bin/gpushare", container=True
        ),
        "process 8 (ld.so) runs",
    ),
    "name with a line break": (
        lambda node, name: node.process(11, "x\ny\x1b[2J", program=f"{node.root}/opt/gpushare/{name}/bin/gpushare"),
        r"process 11 (x\ny\x1b[2J) runs",
    ),
    "handler of CRI-O": (
        lambda node, name: node.install.write(
            "/run/containers/storage/overlay-containers/cafe/userdata/config.json",
            json.dumps({"annotations": {"io.kubernetes.cri-o.RuntimeHandler": "gpushare"}}).encode(),
        ),
        "CRI-O's container cafe has the handler gpushare",
    ),
}


@pytest.mark.parametrize("use", BLOCKS)
def test_removal_waits_while_something_uses_gpushare(
    node: Node, signals: list[int], capsys: pytest.CaptureFixture[str], use: str
) -> None:
    node.install_now()
    before = node.engine_file
    BLOCKS[use][0](node, node.version)
    signals += [0, signal.SIGTERM]
    assert node.install.main("remove") == 0
    assert capsys.readouterr().out.count(f"waiting until nothing uses gpushare: {BLOCKS[use][1]}\n") == 1
    assert node.engine_file == before and not (node.top / "ready").exists() and "uninstall --yes" not in node.calls
    node.end()
    signals += [signal.SIGTERM]
    assert node.install.main("remove") == 0
    assert "gpushare is removed from this node" in capsys.readouterr().out and (node.top / "ready").exists()
    assert not node.engine_file and not (node.root / "opt/gpushare").exists() and node.restarts() == 2


def test_removal_does_not_wait_for_the_dra_driver(node: Node) -> None:
    """The driver must release claims until then. Its command line names the hook."""
    node.install_now()
    word = "--program=/opt/gpushare/current/bin/gpushare-hook"
    node.process(9, "ld.so", "gpushare", "dra", word, program="/x/ld.so", container=True)
    (node.task("e" * 64, "runc") / "config.json").write_text(json.dumps({"process": {"args": ["dra", word]}}))
    assert node.install.remove() == [] and not (node.root / "opt/gpushare").exists()


@pytest.mark.parametrize("whose", [{"container": True}, {"uid": 1000}], ids=["container", "user"])
def test_only_shims_of_the_node_name_the_place_of_tasks(node: Node, whose: dict[str, Any]) -> None:
    """A container or user can name a process containerd-shim, and work in a directory that it fills."""
    node.install_now()
    node.task("f" * 64, "/opt/gpushare/x", "/opt/gpushare/x", top="run/tenant")
    node.process(10, "containerd-shim", cwd=f"/run/tenant/k8s.io/{'f' * 64}", **whose)
    assert list(node.install.tasks()) == [] and node.install.remove() == []


def test_processes_of_openshift_s_hidden_mounts_are_of_the_node(node: Node) -> None:
    """kubelet, CRI-O and conmon have a mount namespace of their own, which root pins below /run/kubens."""
    node.install_now()
    node.process(9, "conmon", f"/opt/gpushare/{node.version}/bin/gpushare-runtime-cri", container=True)
    assert not node.install.is_of_host("9") and node.install.hidden_namespace() == ""
    pinned = node.proc / "1/root/run/kubens/mnt"
    pinned.parent.mkdir(parents=True)
    pinned.touch()
    (node.proc / "9/ns/mnt").unlink()
    (node.proc / "9/ns/mnt").symlink_to(f"mnt:[{pinned.stat().st_ino}]")
    assert node.install.is_of_host("9")
    first = node.version
    node.release("2")
    node.install_now()
    assert first in node.versions


@pytest.mark.parametrize(("selinux", "there"), [(False, True), (True, True), (True, False)])
def test_programs_have_the_labels_of_the_policy(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: Any, selinux: bool, there: bool
) -> None:
    """Before they have their name. Without restorecon the node has them all the same, and the log names the folder."""
    calls = []

    def run(*words: str, quiet: bool = False) -> str:
        if words[0] != "restorecon":
            return node.run(*words, quiet=quiet)
        calls.append((words, (node.root / "opt/gpushare/new/bin/gpushare").exists()))
        if not there:
            raise node.install.Failed("restorecon: No such file or directory")
        return ""

    monkeypatch.setattr(node.install, "run", run)
    if selinux:
        (node.root / "sys/fs/selinux").mkdir(parents=True)
        (node.root / "sys/fs/selinux/enforce").touch()
    node.install_now()
    assert calls == ([(("restorecon", "-R", "/opt/gpushare/new"), True)] if selinux else [])
    assert node.version and ("cannot label /opt/gpushare/new for SELinux" in capsys.readouterr().err) is not there


@pytest.mark.parametrize(
    ("folder", "refused"),
    [("/home/kubernetes/bin/gpushare", False), ("/opt/", True), ("gpushare", True), ("/opt/../gpushare", True)],
)
def test_programs_can_be_in_another_folder(
    signals: list[int], monkeypatch: pytest.MonkeyPatch, capsys: Any, folder: str, refused: bool
) -> None:
    """The folder is deleted by the removal, so it is gpushare's own."""
    monkeypatch.setenv("GPUSHARE_FOLDER", folder)
    install = load()
    assert f"{folder}/current/bin/gpushare" == install.PROGRAM
    monkeypatch.setattr(install, "be_alone", lambda: False)
    assert install.main("install") == int(refused)
    assert ("is not a path that ends in /gpushare" in capsys.readouterr().err) is refused


def test_mounts_of_a_container_are_read_from_a_process_that_runs(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has ended has none, in the same mount namespace."""
    names = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(names(path)))
    node.process(7, "python3", container=True)
    node.process(8, "python3", mounts="1 2 0:1 /opt/gpushare/x /", container=True)
    for pid in (7, 8):
        link = node.proc / str(pid) / "ns/mnt"
        link.unlink()
        link.symlink_to("mnt:[7]")
    assert b"/opt/gpushare/x" in b"".join(one[-1] for one in node.install.processes())


def test_removal_deletes_all_objects() -> None:
    """The manifests of the last step contain those of the removal, and the cluster's objects."""
    page, top = PAGE.read_text(), TREE / "packaging/kubernetes"
    named = yaml.safe_load((top / "kustomization.yaml").read_text())["resources"]
    assert "kubectl delete --ignore-not-found -k packaging/kubernetes`" in page
    removal = yaml.safe_load((top / "remove/kustomization.yaml").read_text())["resources"]
    assert {os.path.basename(one) for one in removal} <= set(named)
    assert {"runtimeclass.yaml", "nodefeaturerule.yaml", "admissionpolicy.yaml"} <= set(named)


@pytest.mark.parametrize("edited", [False, True])
def test_removal_leaves_an_edited_configuration(node: Node, monkeypatch: pytest.MonkeyPatch, edited: bool) -> None:
    node.install_now()
    node.install.write(node.install.CONFIG, b"version: 1\n")
    node.install.write(node.install.WRITTEN, b"" if edited else node.install.checksum(node.install.CONFIG).encode())
    words: list[tuple[str, ...]] = []
    real = node.gpushare
    monkeypatch.setattr(node.install, "gpushare", lambda *one: words.append(one) or real(*one))
    assert node.install.remove() == []
    assert (("uninstall", "--yes") if edited else ("uninstall", "--yes", "--purge")) in words


@pytest.mark.parametrize("whose", [{"container": True}, {"uid": 1000}], ids=["container", "user"])
@pytest.mark.parametrize("kind", ["program", "conmon", "argument"])
def test_container_or_user_cannot_claim_to_use_gpushare(node: Node, kind: str, whose: dict[str, Any]) -> None:
    """An image can have files below /opt/gpushare, and processes any name and arguments."""
    node.install_now()
    first = node.version
    image = node.top / f"image/opt/gpushare/{first}/bin/gpushare"
    image.parent.mkdir(parents=True)
    image.write_text("of the image")
    program = str(image) if kind == "program" else "/usr/bin/x"
    name = "conmon" if kind == "conmon" else "python3"
    node.process(12, name, f"/opt/gpushare/{first}/bin/x", program=program, **whose)
    node.release("2")
    node.install_now()
    assert node.versions == {node.version} and node.version != first
    assert node.install.remove() == []


@pytest.mark.parametrize("kind", ["file", "pipe", "link", "large"])
def test_records_are_read_only_from_regular_files(node: Node, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A pipe would stop the installer, and a link to /dev/zero would fill its memory."""
    path = node.top / "record"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/proc/version")
    else:
        path.write_bytes(b"12345")
        monkeypatch.setattr(node.install, "MOST_BYTES", 4 if kind == "large" else 5)
    expected = {"file": b"12345", "large": b"1234"}
    assert node.install.bytes_of(str(path)) == expected.get(kind, b"")
    assert node.install.bytes_of("/proc/self/comm")


def test_removal_waits_for_the_nri_plugin(node: Node) -> None:
    node.install_now()
    (node.root / "run/gpushare").mkdir()
    with open(node.root / node.install.PLUGIN_LOCK[1:], "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert node.install.remove() == ["the NRI plugin runs: delete its DaemonSet"]
    assert node.install.remove() == []


def test_requirement_of_the_nri_plugin_waits_for_pods_of_crio_s_handler(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    """CRI-O 1.36.3 could not stop them: failed to find runtime handler gpushare."""
    use, message = BLOCKS["handler of CRI-O"]
    use(node, "")
    assert not node.install.try_to_require_nri("crio", 60)
    assert message in capsys.readouterr().err and not node.calls
    node.end()
    assert node.install.try_to_require_nri("crio", 60) and node.calls[0] == "runtime configure"


def test_entry_of_the_engine_stays_when_the_nri_plugin_takes_over(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """With GPUSHARE_ENGINE=none: CRI-O 1.36.3 could not remove the pods of the entry without it."""
    node.install_now()
    before = node.engine_file
    node.install.write(f"{node.install.UNREAD}containerd", b"systemctl restart containerd 1")
    monkeypatch.setenv("GPUSHARE_ENGINE", "none")
    node.calls.clear()
    node.install.lift_nri(keep=True)
    assert node.engine_file == before and not node.calls


def test_programs_stay_for_a_pod_that_starts_during_the_removal(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pause container has no hook, but the engine stops it by gpushare's runtime."""
    node.install_now()
    version, unconfigure = node.version, node.install.unconfigure

    def start_and_unconfigure() -> None:
        node.task("a" * 64, f"/opt/gpushare/{version}/bin/gpushare-runtime-cri")
        unconfigure()

    monkeypatch.setattr(node.install, "unconfigure", start_and_unconfigure)
    assert node.install.remove() == [f"container {'a' * 64} has gpushare's runtime"]
    assert not node.engine_file and node.version == version and node.versions == {version}
    node.end()
    monkeypatch.setattr(node.install, "unconfigure", unconfigure)
    assert node.install.remove() == [] and not (node.root / "opt/gpushare").exists()


@pytest.mark.parametrize("engine", ["containerd", "crio", "crio behind a link"])
def test_programs_stay_while_a_container_has_their_hook(node: Node, engine: str) -> None:
    """The engine calls the hook when the container ends, also without a share. The engine's file goes at once."""
    node.install_now()
    record = node.task("d" * 64, "runc", "/opt/gpushare/current/bin/gpushare-hook")
    if engine != "containerd":
        storage = node.root / "run/containers/storage"
        storage.parent.mkdir()
        if engine == "crio behind a link":
            storage.symlink_to("/run/disk")
            storage = node.root / "run/disk"
        userdata = storage / "overlay-containers" / record.name / "userdata"
        userdata.mkdir(parents=True)
        (record / "config.json").rename(userdata / "config.json")
    assert node.install.remove() == [f"container {'d' * 64} has gpushare's hook"]
    assert not node.engine_file and (node.root / "opt/gpushare/current/bin/gpushare").exists()
    node.end()
    assert node.install.remove() == [] and not (node.root / "opt/gpushare").exists()


@pytest.fixture
def other(node: Node) -> Iterator[subprocess.Popen[bytes]]:
    """Another installer that holds the node's lock."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    words = [sys.executable, "-c", code, f"{node.root}{node.install.LOCK}"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.parametrize("verb", ["install", "remove"])
def test_second_pod_of_a_node_waits(
    node: Node, signals: list[int], other: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    signals += [0, 0, signal.SIGTERM]
    assert node.install.main(verb) == 0
    assert capsys.readouterr().out == "waiting until the other pod that installs or removes gpushare here ends\n"
    assert not node.calls


def has_program(name: str) -> Callable[[Node], object]:
    def put(node: Node) -> None:
        (node.root / "usr/bin").mkdir(parents=True, exist_ok=True)
        (node.root / "usr/bin" / name).symlink_to(f"/opt/engine/{name}")

    return put


def has_unit(node: Node) -> None:
    """Of a containerd whose program is outside PATH."""
    (node.root / "lib").symlink_to("/usr/lib")
    (node.root / "usr/lib/systemd/system").mkdir(parents=True)
    (node.root / "usr/lib/systemd/system/containerd.service").touch()


def has_nothing(node: Node) -> None:
    """The node has no other trace of an engine."""


ENGINE = "gpushare: GPUSHARE_ENGINE={}: {} was not found on this node, but {} was: set GPUSHARE_ENGINE={} (engines in"


@pytest.mark.parametrize(
    ("asked", "put", "other"),
    [
        ("", has_nothing, has_program("crio")),
        ("containerd", has_nothing, lambda node: node.process(5, "crio")),
        ("crio", has_nothing, has_program("containerd")),
        ("crio", lambda node: node.process(5, "crio", container=True), has_program("containerd")),
    ],
)
def test_engine_that_the_node_lacks_is_refused_before_anything_is_written(
    node: Node,
    signals: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: str,
    put: Callable[[Node], object],
    other: Callable[[Node], object],
) -> None:
    put(node)
    other(node)
    if asked:
        monkeypatch.setenv("GPUSHARE_ENGINE", asked)
    before = sorted(node.root.rglob("*"))
    signals += [signal.SIGTERM]
    assert node.install.main("install") == 1
    lacks, has = ("crio", "containerd") if asked == "crio" else ("containerd", "crio")
    assert capsys.readouterr().err.startswith(ENGINE.format(lacks, lacks, has, has))
    assert sorted(node.root.rglob("*")) == before and not node.calls


@pytest.mark.parametrize(
    ("put", "file"),
    [
        (has_program("containerd"), ""),
        (has_unit, ""),
        (lambda node: node.process(5, "containerd", program="/var/lib/rancher/k3s/data/current/bin/containerd"), ""),
        (has_nothing, "/x/config.toml"),
    ],
)
def test_engine_beside_another_is_configured_although_it_does_not_run_yet(
    node: Node, signals: list[int], monkeypatch: pytest.MonkeyPatch, put: Callable[[Node], object], file: str
) -> None:
    """Also if its program is outside PATH, or its file is named."""
    has_program("crio")(node)
    put(node)
    monkeypatch.setenv("GPUSHARE_CONFIG_FILE", file)
    signals += [signal.SIGTERM]
    assert node.install.main("install") == 0
    assert node.engine_file and node.restarts() == 1


CRI = "[plugins.'io.containerd.cri.v1.runtime']\n    enable_cdi = {}\n"
REFUSED = (
    "gpushare: containerd has CDI disabled, so a container with a claim would start without a GPU: write enable_cdi"
)


@pytest.mark.parametrize(
    ("variables", "dump", "line"),
    [
        ({"GPUSHARE_REQUIRE_CDI": "yes"}, CRI.format("true"), ""),
        ({"GPUSHARE_REQUIRE_CDI": "yes"}, CRI.format("false"), REFUSED),
        ({"GPUSHARE_REQUIRE_CDI": "yes"}, "", REFUSED),  # before 1.7
        ({"GPUSHARE_REQUIRE_CDI": "yes"}, None, "cannot check whether containerd has CDI enabled: containerd: no"),
        ({"GPUSHARE_REQUIRE_CDI": "yes", "GPUSHARE_ENGINE": "crio"}, "", ""),
        ({}, "", ""),
        ({"GPUSHARE_REQUIRE_CDI": "on"}, "", "gpushare: GPUSHARE_REQUIRE_CDI=on is neither yes nor no"),
    ],
)
def test_node_without_cdi_is_refused_where_claims_need_it(
    node: Node,
    signals: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    dump: Optional[str],
    line: str,
) -> None:
    def run(*words: str, quiet: bool = False) -> str:
        if words != ("containerd", "config", "dump"):
            return node.run(*words, quiet=quiet)
        if dump is None:
            raise node.install.Failed("containerd: no")
        return dump

    monkeypatch.setattr(node.install, "run", run)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused = line.startswith("gpushare: ")
    signals += [] if refused else [signal.SIGTERM]
    assert node.install.main("install") == int(refused)
    assert capsys.readouterr().err.startswith(line) and bool(node.calls) is not refused
    assert refused is not bool(node.engine_file)


def test_probe_follows_the_pod(node: Node) -> None:
    assert node.install.main("ready") == 1
    node.install.set_ready(True)
    assert node.install.main("ready") == 0
    node.install.set_ready(False)
    assert node.install.main("ready") == 1


def test_error_of_a_proxy_is_reported_with_its_status() -> None:
    install = load()
    assert install.message_of(b'{"message": "no"}') == "no"
    for text in (b"<html>\nBad Gateway", b"[]", b"", b"\xff"):
        assert re.fullmatch(r"(<html>|\[\]||�)", install.message_of(text))
