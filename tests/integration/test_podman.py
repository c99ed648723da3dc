"""Features of podman alone: images with annotations, pods, the containers' lifecycle, messages of a refusal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare.engines import crio
from gpushare.engines.base import Settings
from gpushare.engines.host import Host

from tests.integration.podman_host import GIB, OURS, TWO_GIB, refusal
from tests.support import processes
from tests.support.engines.base import SLEEP, Refused, Want
from tests.support.engines.image import PROBE
from tests.support.engines.podman import IMAGE, PAUSE, Podman
from tests.support.judge import peak_bytes
from tests.support.rootfs import run


@pytest.fixture
def build(podman: Podman, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """build(instructions, *options) -> an image made of the test image by them, removed at the end."""
    made: list[str] = []

    def make(instructions: str = "", *options: str, tag: str = "") -> str:
        made.append(tag or f"localhost/derived{len(made)}")
        (tmp_path / "Containerfile").write_text(f"FROM {IMAGE}\n{instructions}\n")
        podman.command("build", "--quiet", "--network=none", "--format=oci", *options, "-t", made[-1], str(tmp_path))
        return made[-1]

    yield make
    if made:
        podman.command("image", "rm", "--force", *made)


@pytest.fixture
def policy(podman: Podman) -> Iterator[Callable[..., None]]:
    """policy(**keys of `policy` in the configuration) sets them until the end of the test."""
    before = podman.node.config.read_text()

    def change(**keys: object) -> None:
        podman.node.config.write_text(json.dumps({**json.loads(before), "policy": keys}))

    yield change
    podman.node.config.write_text(before)


@pytest.fixture
def no_hooks(podman: Podman) -> Iterator[None]:
    """podman's directory of hooks is empty at the beginning of the test, and as before at the end."""
    before = {path: path.read_text() for path in podman.hooks_dir.iterdir()}
    for path in before:
        path.unlink()
    yield
    for path in podman.hooks_dir.iterdir():
        path.unlink()
    for path, text in before.items():
        path.write_text(text)


# Images


def test_image_cannot_raise_its_own_limit(
    podman: Podman, build: Callable[..., str], policy: Callable[..., None]
) -> None:
    """podman merges an image's environment, and until version 5 its annotations, into config.json: policy limits it."""
    annotated = ("", "--annotation", "gpushare.io/memory=3Gi")
    if not podman.copies_image_annotations:
        assert podman.run(Want(("ls", OURS)), image=build(*annotated)).code != 0
    for words in (*([annotated] if podman.copies_image_annotations else []), ("ENV GPUSHARE_MEMORY=3Gi",)):
        image = build(*words)
        assert podman.run(Want(), image=image).answer()["total_bytes"] == 3 * GIB
        policy(max_memory="2Gi")
        assert "3 GiB" in refusal(podman, Want(SLEEP), image=image)
        policy()


def test_user_s_annotation_overrides_the_image_s(podman: Podman, build: Callable[..., str]) -> None:
    image = build("", "--annotation", "gpushare.io/memory=3Gi")
    mine = Want(annotations={"gpushare.io/memory": "1Gi"})
    assert podman.run(mine, image=image).answer()["total_bytes"] == GIB  # podman prefers the user's one
    if not podman.copies_image_annotations:
        assert podman.run(Want(env=TWO_GIB), image=image).answer()["total_bytes"] == 2 * GIB
        return
    said = refusal(podman, Want(SLEEP, TWO_GIB), image=image)
    assert "2Gi" in said
    assert "3Gi" in said


def test_image_cannot_forge_our_record(podman: Podman, build: Callable[..., str]) -> None:
    """A forged gpushare.io/applied could remove mounts or fake a lease."""
    claim = {"version": 1, "nonce": "", "leased": True, "mounts": [["/etc/hosts", ""]]}
    image = build("", "--annotation", f"gpushare.io/applied={json.dumps(claim)}")
    assert podman.run(Want(env=TWO_GIB), image=image).answer()["total_bytes"] == 2 * GIB
    assert podman.run(Want(("ls", OURS)), image=image).code != 0


# Pods


def _pod(tmp_path: Path, annotations: dict[str, str], **memory: str) -> Path:
    """A pod named `kube` with a container for each name."""
    containers = [
        {
            "name": name,
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": ["/usr/bin/sleep", "inf"],
            "env": [{"name": "GPUSHARE_MEMORY", "value": limit}],
        }
        for name, limit in memory.items()
    ]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "kube", "annotations": annotations},
        "spec": {"containers": containers},
    }
    (tmp_path / "pod.yaml").write_text(json.dumps(pod))
    return tmp_path / "pod.yaml"


@pytest.fixture
def play(
    podman: Podman, build: Callable[..., str], tmp_path: Path
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """play(annotations, name=limit, ...): `podman play kube` of that pod, which is removed at the end."""
    build('ENTRYPOINT ["/usr/bin/sleep", "inf"]', tag=PAUSE)

    def go(annotations: dict[str, str], **memory: str) -> subprocess.CompletedProcess[str]:
        done = podman.podman("play", "kube", "--network=none", str(_pod(tmp_path, annotations, **memory)))
        return subprocess.CompletedProcess([], done.code, done.out, done.err)

    yield go
    podman.remove_pod("kube")


def test_containers_of_a_pod_have_separate_shares(
    podman: Podman, play: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = play({}, one="2Gi", two="3Gi")
    assert done.returncode == 0, done.stderr
    ids = [podman.inspect(f"kube-{name}")["Id"] for name in ("one", "two")]
    assert podman.node.leases() == sorted(ids)  # the infra container has none
    totals = [podman.podman("exec", f"kube-{name}", PROBE).answer()["total_bytes"] for name in ("one", "two")]
    assert totals == [2 * GIB, 3 * GIB]


def test_scoped_annotations_of_a_pod_are_refused(
    podman: Podman, play: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """podman does not tell the runtime which container of the pod it starts: no limit is guessed."""
    done = play({"one.gpushare.io/memory": "2Gi"}, one="2Gi")
    assert done.returncode != 0
    assert podman.node.leases() == []
    if podman.shows_reason:
        assert "the engine does not name this container" in done.stderr


# Lifecycle


def test_stopped_container_releases_its_share(podman: Podman) -> None:
    with podman.start(Want(SLEEP, {"GPUSHARE_MEMORY": "10Gi"})) as one:
        one.stop()
        assert podman.node.leases() == []
        with podman.start(Want(SLEEP, {"GPUSHARE_MEMORY": "10Gi"})), pytest.raises(Refused):
            one.restart()
        one.restart()
        assert one.exec(PROBE).answer()["total_bytes"] == 10 * GIB


def test_share_survives_the_death_of_podman(podman: Podman) -> None:
    """conmon and the container continue with their share; when the program ends, conmon runs podman's cleanup."""
    name = f"gpushare-{os.getpid()}-killed"
    words = podman.options(Want(env=TWO_GIB), name)
    command = podman.words("run", "--rm", *words, IMAGE, "sh", "-c", f"{PROBE}; exec sleep inf")
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=podman.environment()
        ) as one:
            assert one.stdout is not None
            report = json.loads(one.stdout.readline())
            one.kill()
        found = podman.inspect(name)
        assert found["State"]["Running"]
        assert podman.node.leases() == [found["Id"]]
        assert GIB < peak_bytes(podman.node.driver_root, report["pidns"]) <= 2 * GIB
        os.kill(found["State"]["Pid"], signal.SIGKILL)
        podman.wait_conmon(name)  # it ends after its podman has
        assert podman.node.leases() == []
        assert podman.podman("container", "exists", name).code == 1
    finally:
        podman.remove(name)


def test_dead_container_without_conmon_releases_its_share(podman: Podman) -> None:
    """No process cleans up: a dead container's share goes to the next one."""
    with podman.start(Want(SLEEP, {"GPUSHARE_MEMORY": "16Gi"})) as one:
        for pid in podman.conmons(one.name):
            processes.kill_and_reap(pid)
        assert podman.node.leases() == [one.id]
        assert "16 GiB" in refusal(podman, Want(SLEEP, {"GPUSHARE_MEMORY": "16Gi"}))
        os.kill(one.pid, signal.SIGKILL)
        processes.wait_exit(one.pid, 10)
        assert podman.run(Want(env={"GPUSHARE_MEMORY": "16Gi"})).answer()["total_bytes"] == 16 * GIB
        run(podman.low_level, "delete", "--force", one.id)  # without a conmon podman forgets it otherwise
    cgroups, top = Path("/sys/fs/cgroup"), os.stat("/sys/fs/cgroup").st_dev  # a plain file there is podman's own error
    found = cgroups.glob(f"*/libpod_parent/*{one.id}*/cgroup.procs")
    left = [path for path in (*found, *Path("/run").glob(f"[cr]*un*/{one.id}")) if path.stat().st_dev != top]
    assert left == []


def test_forced_removal_releases_the_share(podman: Podman) -> None:
    with podman.start(Want(SLEEP, TWO_GIB)) as one:
        podman.command("rm", "--force", "--time", "0", one.name)
        podman.wait_conmon(one.name)
        assert podman.node.leases() == []


# Messages


def test_missing_program_releases_the_share(podman: Podman) -> None:
    """podman reports this error itself. It runs no poststop hook of its directory then: the next start cleans up and
    does not count the dead container."""
    whole = {"GPUSHARE_MEMORY": "16Gi"}
    result = podman.run(Want(("/usr/bin/nothing",), whole))
    assert result.code == 127
    assert "not found" in result.err or "no such file" in result.err
    assert podman.run(Want(env=whole)).answer()["total_bytes"] == 16 * GIB


@pytest.mark.parametrize("asks", ["ENV GPUSHARE_MEMORY='$(touch made)'", "ENV GPUSHARE_MEMORY=1Gi", ""])
def test_image_cannot_redirect_hook_output_to_host_files(
    podman: Podman, build: Callable[..., str], tmp_path: Path, asks: str
) -> None:
    """podman before version 5 copies an image's annotations, and crun opens these files as root before any hook runs.
    With the hook they stay empty; gpushare-runtime removes the annotations."""
    files = [tmp_path / f"{name}.sh" for name in ("stdout", "stderr")]
    options = [word for path in files for word in ("--annotation", f"run.oci.hooks.{path.stem}={path}")]
    image = build(asks, *options)
    if "touch" in asks:
        with pytest.raises(Refused):
            podman.start(Want(SLEEP), image=image)
        kept = max((podman.node.state / "errors").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        assert '"\\x24(touch made)"' in podman.node.cli("inspect", kept.name).stdout
    else:
        podman.run(Want(("/bin/true",)), image=image)
    made_by_crun = podman.copies_image_annotations and podman.low_level == "crun" and podman.way == "hook"
    assert [path.read_bytes() for path in files if path.exists()] == ([b"", b""] if made_by_crun else [])


@pytest.mark.usefixtures("no_hooks")
@pytest.mark.parametrize("stages", [("createRuntime",), ("prestart", "createRuntime")], ids=" and ".join)
def test_each_hook_stage_makes_one_share(podman: Podman, stages: tuple[str, ...]) -> None:
    """With any stage that the administrator chose, or both: one share."""
    if podman.way != "hook":
        return
    podman.hooks(*stages)
    with podman.start(Want(SLEEP, TWO_GIB)) as one:
        assert podman.node.leases() == [one.id]
        assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
        points = [line.split()[4] for line in Path(f"/proc/{one.pid}/mountinfo").read_text().splitlines()]
        assert points.count("/usr/lib/gpushare") == 1


@pytest.mark.usefixtures("no_hooks")
def test_hook_files_for_crio_make_a_share(podman: Podman, tmp_path: Path) -> None:
    """CRI-O reads hooks.d with the code that podman uses (containers/common), and is itself in no archive."""
    if podman.way != "hook":
        return
    hook = podman.node.hook()
    programs = (str(hook.program.with_name("gpushare-runtime")), str(hook.program))
    settings = Settings(*programs, str(hook.config), str(hook.state), hook_only=True)
    for change in crio.propose(settings, Host(str(tmp_path))).changes:
        if change.after and change.path.endswith(".json"):
            (podman.hooks_dir / Path(change.path).name).write_text(change.after)
    with podman.start(Want(SLEEP, TWO_GIB)) as one:
        assert podman.node.leases() == [one.id]
        assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
    assert podman.node.leases() == []


@pytest.mark.usefixtures("no_hooks")
def test_hook_and_runtime_together_make_one_share(podman: Podman) -> None:
    """With both installed, as `runtime configure podman` does: one share, and poststop twice."""
    if podman.way != "runtime":
        return
    podman.hooks("prestart")
    with podman.start(Want(SLEEP, TWO_GIB)) as one:
        assert podman.node.leases() == [one.id]
        assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
    assert '"lots"' in refusal(podman, Want(SLEEP, {"GPUSHARE_MEMORY": "lots"}))


def test_commands_take_podman_s_names(podman: Podman) -> None:
    """Also of a container with `--rm`, which podman keeps in another file, and after a rename."""
    with podman.start(Want(SLEEP, TWO_GIB)) as kept, podman.start(Want(SLEEP, TWO_GIB), "--rm") as removed:
        podman.command("rename", kept.name, f"{kept.name}-renamed")
        try:
            for one, name in ((kept, f"{kept.name}-renamed"), (removed, removed.name)):
                found = json.loads(podman.node.cli("inspect", name, "-o", "json").stdout)
                assert (found["id"], found["name"]) == (one.id, name)
        finally:
            podman.command("rename", f"{kept.name}-renamed", kept.name)
