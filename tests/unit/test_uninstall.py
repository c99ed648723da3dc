"""gpushare uninstall and gpushare labels, through the command line, on a host below a temporary root."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.cli import cdi, facts, main
from gpushare.core.model import Node, SharingRule
from gpushare.core.ops import TenantTmpfs, WriteLimits
from gpushare.engines.configure import ENGINES
from gpushare.integrations import labels, uninstall
from gpushare.state import journal, leasefile, leases, storage
from gpushare.system import procs

from tests.support import rootfs
from tests.unit import pure
from tests.unit.test_mps import ready

HAND = '{\n  "debug": true\n}\n'
MAIN = "version = 2\n"
HOOK_FILES = ("gpushare.json", "gpushare-poststop.json")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A host with the files of docker and containerd, fully configured."""
    root = tmp_path / "root"
    for name, text in (("etc/docker/daemon.json", HAND), ("etc/containerd/config.toml", MAIN)):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("gpushare-runtime", "gpushare-runtime-cri", "gpushare-hook"):
        (programs / name).touch(0o755)
    (root / "run").mkdir()
    for engine in ENGINES:
        options = ["--root", str(root), "--program", str(programs / "gpushare-runtime")]
        assert main(["runtime", "configure", engine, *options, "--profile", "workstation"]) == 0
    storage.prepare(str(root / "run/gpushare"))
    yield root
    rootfs.unmount_below(root)


@pytest.fixture
def cli(root: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    capfd.readouterr()

    def run(*args: str) -> tuple[int, str, str]:
        code = main(["uninstall", "--root", str(root), *args])
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def container(root: Path) -> Iterator[Path]:
    """A container with an allocation: its own tmpfs."""
    state = str(root / "run/gpushare")
    with subprocess.Popen(["sleep", "inf"]) as process:
        me, init = procs.myself(), procs.find(process.pid)
        assert init is not None
        lease = pure.lease(pure.share(0, 0, 1 << 30), container_id="c1")._replace(
            boot_id=procs.boot_id(), creator_pid=me.pid, creator_start=me.start
        )
        folder = Path(storage.container_dir(state, "c1"))
        folder.mkdir()
        (folder / "lease.json").write_bytes(leasefile.to_json(lease))
        share = storage.make_share_dir(state, "c1", lease.shares)
        storage.execute(WriteLimits(lease.shares, f"{share}/limits"))
        storage.execute(TenantTmpfs(str(folder / "rw"), storage.TENANT_BYTES, storage.TENANT_INODES))
        leases.hold(state, lease, init, procs.cgroup_of(init.pid))
        yield folder / "rw"
        process.kill()


@pytest.fixture
def container_files(root: Path) -> Path:
    """A tmpfs in the state that a container without a lease left."""
    path = root / "run/gpushare/trash/c0/rw"
    path.mkdir(parents=True)
    rootfs.mount_tmpfs(path, "size=64k")
    return path


def mounts_below(root: Path) -> list[str]:
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {root}/" in line]


def files(root: Path) -> dict[str, str]:
    """All files except the state."""
    return {str(path.relative_to(root)): path.read_text() for path in root.glob("[!r]*/**/*") if path.is_file()}


def test_uninstall_removes_everything_and_restores_files(cli: Callable[..., Any], root: Path) -> None:
    code, text, error = cli("--yes")
    assert code == 0 and "the programs stay in " in error and "; remove them in the way in which" in error
    for command in ("systemctl restart docker", "systemctl restart containerd", "systemctl restart crio"):
        assert f"now run: {command}\n" in error
    assert f"unmount {root}/run/gpushare\n" in text and "change /etc/docker/daemon.json\n" in text
    left = files(root)
    assert left.pop("etc/gpushare/config.yaml").startswith("# gpushare")
    assert left == {"etc/docker/daemon.json": HAND, "etc/containerd/config.toml": MAIN}
    assert (
        mounts_below(root) == [] and not (root / "run/gpushare").exists() and not (root / "var/lib/gpushare").exists()
    )
    assert cli("--yes") == (0, "nothing to do\n", "")


def test_links_of_devices_are_removed_and_the_toolkit_s_stay(cli: Callable[..., Any], root: Path) -> None:
    links = root / "dev/char"
    links.mkdir(parents=True)
    (links / "195:0").symlink_to("/dev/nvidia0")
    (links / "195:1").symlink_to("../nvidia1")
    assert "remove /dev/char/195:0\n" in cli("--yes")[1]
    assert [path.name for path in links.iterdir()] == ["195:1"]


def test_claims_of_the_dra_driver_are_removed(cli: Callable[..., Any], root: Path) -> None:
    """Also what a killed write left; other CDI specifications stay."""
    folder = root / "run/cdi"
    folder.mkdir()
    for name in ("gpushare.io-claim_u.json", "gpushare.io-claim_v.json.new", "nvidia.json"):
        (folder / name).touch()
    code, out, error = cli("--yes")
    line = "1 resource claim is prepared for pods: uid u; delete these pods first"
    assert (code, out) == (75, "") and line in error and len(list(folder.iterdir())) == 3
    (folder / "gpushare.io-claim_a.json").touch()
    assert "2 resource claims are prepared for pods: uid a, u; delete these pods first" in cli("--yes")[2]
    assert "remove /run/cdi/gpushare.io-claim_u.json\n" in cli("--yes", "--force")[1]
    assert [path.name for path in folder.iterdir()] == ["nvidia.json"]


def test_hook_only_files_are_removed(cli: Callable[..., Any], root: Path, tmp_path: Path) -> None:
    """containerd's base spec, and the files of two hook directories."""
    assert cli("--yes", "--purge")[0] == 0
    program = ("--program", str(tmp_path / "bin/gpushare-runtime"))
    for engine in ("containerd", "crio", "podman"):
        assert main(["runtime", "configure", engine, "--hook-only", "--root", str(root), *program]) == 0
    hooks = [f"{place}/hooks.d/{name}" for place in ("etc/crio", "etc/containers/oci") for name in HOOK_FILES]
    assert {"etc/gpushare/containerd-base-spec.json", *hooks} <= set(files(root))
    assert cli("--yes")[0] == 0
    assert files(root) == {"etc/docker/daemon.json": HAND, "etc/containerd/config.toml": MAIN}


def test_purge_removes_configuration_and_journal(cli: Callable[..., Any], root: Path) -> None:
    journals = [root / path.lstrip("/") for path in (journal.PATH, journal.PATH + ".1")]
    for file in (root / labels.FILE.lstrip("/"), *journals):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert "usage" not in cli("--yes")[1] and all(file.exists() for file in journals)
    text = cli("--yes", "--purge")[1]
    assert "remove /etc/gpushare\n" in text and f"remove {journal.PATH}\nremove {journal.PATH}.1\n" in text
    assert not (root / "var/lib/gpushare").exists()
    assert files(root) == {"etc/docker/daemon.json": HAND, "etc/containerd/config.toml": MAIN}


def test_link_to_the_configuration_s_folder_is_removed_and_the_folder_stays(
    cli: Callable[..., Any], root: Path
) -> None:
    folder = root / "etc/gpushare"
    folder.rename(root / "managed")
    folder.symlink_to("../managed")
    before = os.listdir(root / "managed")
    assert cli("--yes", "--purge")[0] == 0
    assert not folder.is_symlink() and os.listdir(root / "managed") == before == ["config.yaml"]


def test_state_behind_a_link_is_unmounted_and_can_be_used_again(cli: Callable[..., Any], root: Path) -> None:
    state, place = root / "run/gpushare", root / "place"
    uninstall.unmount_state(str(state))
    place.mkdir(0o700)
    state.symlink_to(place)
    storage.prepare(str(state))
    assert mounts_below(root) == [str(place)]
    assert cli("--yes")[0] == 0 == cli("--yes")[0]
    assert mounts_below(root) == [] and list(place.iterdir()) == []
    storage.prepare(str(state))
    assert storage.is_ready(str(state))


def test_dry_run_and_unanswered_question_do_nothing(cli: Callable[..., Any], root: Path) -> None:
    before = files(root)
    code, planned, _ = cli("--dry-run")
    assert code == 0 and "remove /etc/containers/containers.conf.d/gpushare.conf\n" in planned
    code, asked, error = cli()
    assert (code, asked) == (1, planned) and "give --yes" in error
    assert files(root) == before and mounts_below(root)
    value = json.loads(cli("--dry-run", "--format", "json")[1])
    assert value["steps"] == planned.splitlines() and "systemctl restart docker" in value["next"]


def test_running_container_blocks_uninstall(cli: Callable[..., Any], root: Path, container: Path) -> None:
    before = files(root)
    code, out, error = cli("--yes")
    assert (code, out) == (75, "") and "1 container holds a share: c1; stop it first" in error
    assert files(root) == before
    with open(container / "usage", "rb") as page:  # a running container keeps it open
        assert cli("--yes", "--force")[0] == 0
        assert mounts_below(root) == [] and not (root / "run/gpushare").exists()
        assert len(page.read()) > 0


@pytest.fixture(params=["of the mount", "of the directory before"])
def pod(root: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The state directory as a pod sees it: a volume in its mount namespace, which follows the host's mounts."""
    state, volume = root / "run/gpushare", tmp_path / "volume"
    volume.mkdir()
    run = rootfs.run
    if request.param != "of the mount":
        run("umount", state)
    run("mount", "--bind", root / "run", root / "run")
    run("mount", "--make-shared", root / "run")
    script = 'mount --rbind "$0" "$1" && mount --make-rslave "$1" && echo && exec sleep inf'
    words = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script, str(state), str(volume)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"\n"
        storage.prepare(str(state))
        yield Path(f"/proc/{process.pid}/root") / str(volume)[1:]
        process.kill()


def test_state_that_pods_have_as_a_volume_is_emptied(
    cli: Callable[..., Any], root: Path, pod: Path, container_files: Path
) -> None:
    """Another mount or directory at its place would never get into the pods."""
    state = root / "run/gpushare"
    (state / "node.json").write_text("{}")
    assert f"empty {state}\n" in cli("--yes")[1]
    assert list(state.iterdir()) == [] == list(pod.iterdir()) and not container_files.exists()
    storage.prepare(str(state))  # gpushare is installed again
    (state / "node.json").write_text("{}")
    assert storage.is_ready(str(state)) and (pod / "node.json").exists()


def test_state_of_running_containers_stays_for_pods(
    cli: Callable[..., Any], root: Path, pod: Path, container: Path
) -> None:
    """Files of the state are mount points in a running container, which it would lose."""
    code, text, _ = cli("--yes", "--force")
    assert code == 0 and str(root / "run/gpushare") not in text
    assert (container / "usage").exists() and (pod / "containers/c1/lease.json").exists()


def test_damaged_lease_blocks_uninstall(cli: Callable[..., Any], root: Path, container: Path) -> None:
    (container.parent / "lease.json").write_text("{")
    assert cli("--yes")[0] == 75


def test_broken_engine_file_stops_uninstall_unchanged(cli: Callable[..., Any], root: Path) -> None:
    (root / "etc/docker/daemon.json").write_text("{")
    before = files(root)
    code, out, error = cli("--yes")
    assert (code, out) == (78, "") and "/etc/docker/daemon.json:1:2" in error
    assert files(root) == before and mounts_below(root)


# gpushare labels


@pytest.mark.parametrize(
    ("policy", "overcommit", "mib"),
    [
        ({}, 1.0, 32768),
        ({}, 1.5, 49152),
        ({"allowed_devices": ("1",)}, 1.0, 16384),
        ({"allowed_devices": (pure.UUIDS[1].upper(),)}, 1.0, 16384),
        ({"allowed_devices": ("7",)}, 1.0, 0),
    ],
)
def test_labels_count_grantable_memory(policy: Any, overcommit: float, mib: int) -> None:
    text = labels.feature_file(pure.node(overcommit=overcommit, **policy))
    assert f"# +no-label\ngpushare.io/memory-mib={mib}\n" in text
    assert f"gpushare.io/present={'true' if mib else 'false'}\n" in text
    for line in text.splitlines():
        assert line.startswith("#") or re.fullmatch(
            r"[a-z0-9.]+/[a-z.-]+=[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", line
        ), line


@pytest.mark.parametrize(
    ("models", "memory", "rules", "labels_"),
    [
        (("NVIDIA H100 PCIe",) * 2, (81559, 81559), (), ("2", "NVIDIA-H100-PCIe", "81559", "1")),
        (("NVIDIA H100 PCIe",) * 2, (81559, 81559), (SharingRule(4),), ("2", "NVIDIA-H100-PCIe-SHARED", "81559", "4")),
        (("Tesla T4",) * 2, (1, 1), (SharingRule(4, resource=".shared"),), ("2", "Tesla-T4", "1", "4")),
        (("Tesla T4",) * 2, (1, 1), (SharingRule(1),), ("2", "Tesla-T4", "1", "1")),  # one replica means no sharing
        (("Tesla T4",) * 2, (1, 1), (SharingRule(4, devices=("0",)),), ("2", None, None, None)),
        (("Tesla T4", "Tesla V100"), (1, 1), (SharingRule(4),), ("2", None, None, None)),
        (("Tesla T4",) * 2, (1, 2), (), ("2", None, None, None)),
        (("Tesla T4",), (0,), (), ("1", "Tesla-T4", None, "1")),  # unknown size
        (("RTX  6000 (Ada)",), (1,), (), ("1", "RTX-6000-Ada", "1", "1")),
        (("?",), (1,), (SharingRule(2),), ("1", None, "1", "2")),
        (("x" * 80,), (1,), (SharingRule(2),), ("1", "x" * 56 + "-SHARED", "1", "2")),
        ((), (), (), ("0", None, None, None)),
    ],
)
def test_labels_match_gpu_feature_discovery(models: Any, memory: Any, rules: Any, labels_: Any) -> None:
    found = [pure.device(i, model=model, memory_bytes=mib << 20) for i, (model, mib) in enumerate(zip(models, memory))]
    node = pure.node()
    node = Node(node.config._replace(sharing=rules), node.inventory._replace(devices=tuple(found)))
    told = labels.device_labels(node)
    assert tuple(told.get(f"gpu.{name}") for name in ("count", "product", "memory", "replicas")) == labels_
    lines = labels.feature_file(node).splitlines()
    for name, value in told.items():
        at = lines.index(f"gpushare.io/{name}={value}")
        assert lines[at - 1] != "# +no-label"
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", value)


def test_labels_omit_disallowed_devices() -> None:
    node = pure.node(allowed_devices=("1",))
    other = node.inventory.devices[0]._replace(model="Another", memory_bytes=1 << 30)
    mixed = node._replace(inventory=node.inventory._replace(devices=(other, node.inventory.devices[1])))
    assert labels.device_labels(mixed)["gpu.product"] == "Test-GPU" and labels.device_labels(mixed)["gpu.count"] == "1"


def test_divided_gpu_counts_as_mig_devices() -> None:
    node = pure.node()
    part = pure.device(0, uuid="MIG-1", parent=pure.UUIDS[0], mig_index=0, memory_bytes=4 << 30)
    divided = node._replace(inventory=node.inventory._replace(mig=(part,)))
    assert labels.grantable_mib(divided) == (4 + 16) * 1024
    unknown = pure.node(memory_bytes=0)
    assert "present=false" in labels.feature_file(unknown)


def test_labels_are_written_atomically_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(facts, "host", lambda paths: pure.node())
    path = tmp_path / "features.d" / "gpushare"
    assert main(["labels", "--dry-run", "--output", str(path)]) == 0
    text = capfd.readouterr().out
    assert text == labels.feature_file(pure.node()) and not path.parent.exists()
    assert main(["labels", "--output", str(path)]) == 0 and path.read_text() == text
    assert os.listdir(path.parent) == ["gpushare"]
    assert capfd.readouterr().out == f"create {path}\n"
    assert main(["labels", "--output", str(path)]) == 0 and capfd.readouterr().out == "nothing to do\n"


def test_running_mps_daemon_blocks_uninstall(root: Path, cli: Callable[..., Any]) -> None:
    state = root / "run/gpushare"
    ready(state)
    code, _, said = cli()
    assert code == 75 and "MPS runs on " in said and "`gpushare mps stop` first" in said
    assert storage.is_ready(str(state)) and json.loads((root / "etc/docker/daemon.json").read_text()) != json.loads(
        HAND
    )
    ready(state, start=1)  # the daemon has died
    assert cli("--yes")[0] == 0 and not state.exists()


@pytest.mark.parametrize("words", [("--yes",), ("--yes", "--force")], ids=["", "forced"])
def test_foreign_directory_is_not_unmounted(
    root: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """`gpushare --state /home uninstall`"""
    home = root / "home"
    home.mkdir()
    rootfs.mount_tmpfs(home, "mode=755")
    (home / "ada").mkdir()
    assert main(["--state", "/home", "uninstall", "--root", str(root), *words]) == 78
    assert "\"ada\" in it is not gpushare's; name gpushare's with --state" in capfd.readouterr().err
    assert os.path.ismount(home) and (root / "etc/gpushare").is_dir()


@pytest.mark.parametrize("command", [["labels"], ["cdi", "generate", "--program", "/bin/true"]], ids=" ".join)
def test_foreign_file_is_not_overwritten(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`gpushare cdi generate --output /etc/cdi/nvidia.yaml`"""
    monkeypatch.setattr(facts, "host", lambda paths: pure.node())
    monkeypatch.setattr(cdi, "check_program", lambda path: path)
    monkeypatch.setattr(cdi, "foreign_owners", lambda paths: [])
    path = tmp_path / "nvidia.yaml"
    path.write_text("kind: nvidia.com/gpu\n")
    assert main([*command, "--output", str(path)]) == 78
    assert "was not written by gpushare; move it away, or name another file" in capfd.readouterr().err
    assert path.read_text() == "kind: nvidia.com/gpu\n"
    path.write_text("\n")
    for _ in range(2):
        assert main([*command, "--output", str(path)]) == 0
    assert "gpushare.io" in path.read_text()
