"""Policy in real containers: what the node's configuration denies is refused or removed, with a reason."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import ns_util
from tests.integration.device_matrix import ENXIO, EPERM, View
from tests.integration.edited import config_of, injected
from tests.support import host, runc
from tests.support.host import Node
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]
VIEWS = {
    "v1": "{ ! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified; }",
    "v2": "umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup",
}


# Requests


def test_clamped_request_is_reported_in_explain_inspect_and_log(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, tmp_path: Path, way: str
) -> None:
    log = tmp_path / "log"
    policy = {"max_memory": "2Gi", "over_maximum": "clamp"}
    node = make_node(simhost, policy=policy, log={"decisions": str(log)})
    one = container(["sleep", "inf"], env={"GPUSHARE_MEMORY": "3Gi"}, **node.way(way)).start()
    (listed,) = json.loads(node.cli("list", "--format", "json").stdout)
    (share,) = listed["shares"]
    assert (share["memory_limit_bytes"], share["clamped_from"]) == (2 << 30, "3 GiB of memory")
    said = "3 GiB of memory was requested, policy allows less"
    assert said in node.cli("inspect", one.id).stdout
    assert 'clamped="slot 0: 3 GiB of memory"' in log.read_text()
    assert f"note: slot 0: {said}" in node.cli("explain", str(one.bundle)).stdout


def test_cluster_refuses_an_image_that_only_names_devices(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, way: str
) -> None:
    from gpushare.config import profiles

    node = make_node(simhost)
    text = profiles.text("cluster")
    given = json.loads(node.config.read_text())
    node.config.write_text(text.replace('root: "/"', f'root: "{given["driver"]["root"]}"'))
    one = container(["sh", "-c", "test ! -e /dev/nvidia0"], env={"NVIDIA_VISIBLE_DEVICES": "all"}, **node.way(way))
    assert one.run() == 0, one.stderr
    assert node.leases() == []


def test_device_in_a_sandbox_is_refused(container: MakeContainer, node: Node, way: str) -> None:
    """A pod's annotations request nothing for it, but an injected device would be a GPU without a limit."""
    sandbox = {"io.kubernetes.cri.container-type": "sandbox", "gpushare.io/memory": "1Gi"}
    assert container(["true"], annotations=sandbox, **node.way(way, cri=True)).run() == 0
    for path, more in (("devices", {"path": "/dev/nvidia0"}), ("resources.devices", {"allow": True, "access": "rw"})):

        def edit(spec: dict[str, Any], path: str = path, more: dict[str, Any] = more) -> None:
            place = spec["linux"]["resources"] if "." in path else spec["linux"]
            place.setdefault("devices", []).append({"type": "c", "major": 195, "minor": 0, **more})

        one = container(["true"], annotations=sandbox, edit=edit, **node.way(way, cri=True))
        with pytest.raises(RuntimeFailed, match="a pod's sandbox has"):
            one.start()


def test_one_annotation_serves_one_container_of_a_pod(container: MakeContainer, node: Node, way: str) -> None:
    def pod(name: str) -> dict[str, str]:
        pods = {"container-type": "container", "container-name": name, "sandbox-id": "s1"}
        return {"gpushare.io/memory": "1Gi", **{f"io.kubernetes.cri.{key}": value for key, value in pods.items()}}

    env = {"NVIDIA_VISIBLE_DEVICES": "0"}
    first = container(["sleep", "inf"], env=env, annotations=pod("a"), **node.way(way, cri=True)).start()
    with pytest.raises(
        RuntimeFailed, match=rf"{first.id} already has the share that it requests; write b\.gpushare\.io/memory"
    ):
        container(["true"], env=env, annotations=pod("b"), **node.way(way, cri=True)).create()
    first.delete()  # as when the first one is restarted under another id
    assert container(["true"], env=env, annotations=pod("a"), **node.way(way, cri=True)).run() == 0


def test_misspelt_limit_is_refused_at_the_start(container: MakeContainer, node: Node, way: str) -> None:
    """The launcher must detect it in the text first."""
    for name in ("GPUSHAREMEMORY", "GPU_SHARE_MEMORY"):
        with pytest.raises(RuntimeFailed, match=rf"{name}=.*: unknown name; did you mean GPUSHARE_MEMORY\?"):
            container(["true"], env={name: "1Gi"}, **node.way(way)).create()


# explain


def test_explain_shows_the_runtime_s_view(container: MakeContainer, node: Node) -> None:
    one = container(["true"], env={"GPUSHARE_MEMORY": "1Gi"}, edit=injected(node))
    before = (one.bundle / "config.json").read_bytes()
    done = node.cli("explain", str(one.bundle))
    assert done.returncode == 0, done.stderr
    assert "dialect      own+injected" in done.stdout
    assert "note: taken out of config.json: prestart hook /usr/bin/nvidia-container-runtime-hook" in done.stdout
    assert node.cli("explain", "--way", "runtime", str(one.bundle)).stdout == done.stdout
    by_hook = node.cli("explain", "--way", "hook", str(one.bundle))
    assert by_hook.returncode != 0 and "already has an NVIDIA" in by_hook.stderr
    assert (one.bundle / "config.json").read_bytes() == before
    assert node.leases() == []


def test_explain_is_the_same_for_each_way_and_while_the_container_runs(container: MakeContainer, node: Node) -> None:
    """config.json of a running container has gpushare's nodes and mounts, which must not count as its request."""
    one = container(["sleep", "inf"], env={"GPUSHARE_MEMORY": "1Gi"}, runtime=node.runtime())
    texts = [node.cli("explain", "--way", way, str(one.bundle)).stdout for way in ("auto", "hook", "runtime")]
    one.start()
    texts.append(node.cli("explain", str(one.bundle)).stdout)
    assert texts == texts[:1] * 4 and "1 GiB" in texts[0]


# --privileged


@pytest.fixture(params=sorted(VIEWS))
def view(request: pytest.FixtureRequest) -> Iterator[View]:
    made = View(VIEWS[request.param])
    yield made
    made.close()


@pytest.fixture
def real_root(make_host: Callable[..., Path]) -> Path:
    """A driver root with two GPUs whose nodes are character devices without a driver."""
    root = make_host("real", gpus=2, memory_bytes=16 << 30)
    (root / ".gpushare-sim").unlink()
    for name, minor in (("nvidia0", 0), ("nvidia1", 1), ("nvidiactl", 255)):
        (root / "dev" / name).unlink()
        os.mknod(root / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(195, minor))
    return root


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return ns_util.make_image(tmp_path / "image")


def privileged(spec: dict[str, Any]) -> None:
    """The effect of --privileged in an engine: all relevant capabilities, all nodes, one rule for all devices."""
    for kind in spec["process"]["capabilities"].values():
        kind.append("CAP_SYS_ADMIN")
    spec["linux"]["resources"]["devices"] = [{"allow": False, "access": "rwm"}, {"allow": True, "access": "rwm"}]
    numbers = {"nvidia0": (195, 0), "nvidia1": (195, 1), "nvidiactl": (195, 255), "fuse": (10, 229)}
    spec["linux"]["devices"] = [
        {"path": f"/dev/{name}", "type": "c", "major": major, "minor": minor, "fileMode": 0o666, "uid": 0, "gid": 0}
        for name, (major, minor) in numbers.items()
    ]


def opened(one: Container, major: int, minor: int) -> str:
    """Return the error of opening a node made inside, or of a denied mknod; "" when it worked."""
    path = f"/dev/made-{major}-{minor}"
    done = one.exec("sh", "-c", f"mknod {path} c {major} {minor} && exec 3<>{path}")
    return done.stderr.strip().rpartition(": ")[2] if done.returncode else ""


def test_privileged_container_gets_no_other_gpu(
    view: View, container: MakeContainer, make_node: Callable[..., Node], real_root: Path, image: Path
) -> None:
    node = make_node(real_root, **host.newest_crun())
    env = {"NVIDIA_VISIBLE_DEVICES": "0"}
    rest = {"runtime": node.runtime(), "prefix": view.prefix, "rootfs": image, "edit": privileged}
    one = container(["sleep", "inf"], env=env, **rest).start()
    assert opened(one, 195, 0) == ENXIO  # granted: reaches the driver, which is absent
    assert opened(one, 195, 255) == ENXIO
    for minor in (1, 2, 254):
        assert opened(one, 195, minor) == EPERM
    assert EPERM not in (opened(one, 1, 1), opened(one, 10, 229))  # everything else is unchanged
    assert one.exec("ls", "/dev/nvidia1").returncode != 0
    one.delete()
    assert node.cli("explain", "--restore", str(one.bundle)).returncode == 0
    assert config_of(one) == one.spec


ANY = {"allow": True, "type": "c", "access": "rwm"}
WIDE = {
    "all character devices": ({**ANY, "major": -1, "minor": -1},),
    "without numbers": (ANY,),
    "a minor of every major": ({**ANY, "minor": 1}, {**ANY, "major": 10}),
    "NVIDIA's major": ({**ANY, "major": 195}, {**ANY, "major": 10}),
    "node by node": (*({**ANY, "major": 195, "minor": minor} for minor in (0, 1, 2, 254)), {**ANY, "major": 10}),
    "all devices, with numbers": ({"allow": True, "type": "a", "major": 10, "minor": 229, "access": "rwm"},),
}


def wide(name: str) -> list[dict[str, Any]]:
    """Rules of WIDE. For crun, without -1, which crun writes into cgroup v1 as it is."""
    drops = runc.LOW_LEVEL == "crun"
    return [{key: value for key, value in rule.items() if value != -1 or not drops} for rule in WIDE[name]]


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("asks", [True, False], ids=["asks", "silent"])
@pytest.mark.parametrize("is_privileged", [True, False], ids=["privileged", "ordinary"])
def test_device_rules_open_no_other_gpu(
    view: View,
    container: MakeContainer,
    make_node: Callable[..., Node],
    real_root: Path,
    image: Path,
    name: str,
    asks: bool,
    is_privileged: bool,
) -> None:
    """cgroup v1 cannot deny a part of what `c *:* rwm` allows, so that rule itself must change."""
    node = make_node(real_root, policy={"privileged_containers": ["allowed"]}, **host.newest_crun())

    def edit(spec: dict[str, Any]) -> None:
        if is_privileged:
            privileged(spec)
        spec["linux"]["devices"] = []
        spec["linux"]["resources"]["devices"] = [{"allow": False, "access": "rwm"}, *wide(name), {**ANY, "major": 9}]

    env = {"NVIDIA_VISIBLE_DEVICES": "0"} if asks else {}
    rest: dict[str, Any] = {"runtime": node.runtime(), "prefix": view.prefix, "rootfs": image, "edit": edit}
    one = container(["sleep", "inf"], env=env, id="allowed" if asks else "other", **rest).start()
    assert opened(one, 195, 0) == (ENXIO if asks else EPERM)
    assert [opened(one, 195, minor) for minor in (1, 2, 254)] == [EPERM] * 3
    assert EPERM not in (opened(one, 10, 1 if "minor" in name else 229), opened(one, 9, 0))  # all else is unchanged
    one.delete()
    assert node.cli("explain", "--restore", str(one.bundle)).returncode == 0
    assert config_of(one) == one.spec


def test_privileged_container_without_policy_entry_gets_no_gpu(
    view: View, container: MakeContainer, make_node: Callable[..., Node], real_root: Path, image: Path
) -> None:
    """It requests nothing, and its config.json need not even name an NVIDIA device."""
    node = make_node(real_root, policy={"privileged_containers": ["allowed"]}, **host.newest_crun())

    def silent(spec: dict[str, Any]) -> None:
        privileged(spec)
        spec["linux"]["devices"] = []

    rest: dict[str, Any] = {"runtime": node.runtime(), "prefix": view.prefix}
    for edit in (privileged, silent):
        root = shutil.copytree(image, image.parent / edit.__name__, symlinks=True)
        one = container(["sleep", "inf"], edit=edit, rootfs=root, **rest).start()
        assert "to this privileged container" in node.cli("explain", str(one.bundle)).stdout
        assert (opened(one, 195, 0), opened(one, 195, 255)) == (EPERM, EPERM)
        assert EPERM not in (opened(one, 1, 1), opened(one, 10, 229))
        one.delete()
    with_entry = container(["sleep", "inf"], edit=privileged, rootfs=image, id="allowed", **rest).start()
    assert opened(with_entry, 195, 0) == ENXIO
    assert config_of(with_entry) == with_entry.spec  # unchanged


@pytest.mark.parametrize("name", WIDE)
def test_hook_refuses_rules_that_open_gpus(
    container: MakeContainer, make_node: Callable[..., Node], real_root: Path, name: str
) -> None:
    """The hook runs after the rules were made."""
    node = make_node(real_root)

    def edit(spec: dict[str, Any]) -> None:
        spec["linux"]["resources"]["devices"] = [{"allow": False, "access": "rwm"}, *wide(name)]

    for env in ({}, {"NVIDIA_VISIBLE_DEVICES": "0"}):
        one = container(["true"], env=env, hook=node.hook(), edit=edit)
        with pytest.raises(RuntimeFailed, match=r"config.json allows .*, so this|config.json allows devices that were"):
            one.start()
        assert "linux.resources.devices" in node.cli("explain", "--way", "hook", str(one.bundle)).stderr


@pytest.mark.parametrize("key", ["accept", "require_limits"])
@pytest.mark.parametrize("way", ["hook", "runtime"])
def test_rule_that_names_a_gpu_is_refused_by_policy(
    container: MakeContainer, make_node: Callable[..., Node], real_root: Path, key: str, way: str
) -> None:
    """A rule for all majors names no GPU and is narrowed: a program that requests /dev/kvm so need not mean a GPU."""
    node = make_node(real_root, policy={key: {"cdi": "never"} if key == "accept" else True})

    def edit(spec: dict[str, Any]) -> None:
        spec["linux"]["resources"]["devices"].append({**ANY, "major": 195, "minor": 0})

    one = container(["true"], edit=edit, **node.way(way))
    with pytest.raises(RuntimeFailed, match="config.json has a rule for devices 195:0"):
        one.start()


@pytest.mark.usefixtures("no_hybrid_cgroups")
def test_container_without_request_opens_no_gpu_under_crun(
    container: MakeContainer, make_node: Callable[..., Node], real_root: Path
) -> None:
    node = make_node(real_root, runtime={"path": str(shutil.which("crun"))})
    for number, rules in enumerate(
        (WIDE["without numbers"], ({**ANY, "major": 195},), ({"allow": True, "type": "a", "access": "rwm"},))
    ):

        def edit(spec: dict[str, Any], rules: tuple[dict[str, Any], ...] = rules) -> None:
            spec["linux"]["resources"]["devices"] = [{"allow": False, "access": "rwm"}, *rules]

        one = container(["sleep", "inf"], runtime=node.runtime(), edit=edit, id=f"c{number}").start()
        assert [opened(one, 195, minor) for minor in (0, 1, 255)] == [EPERM] * 3
        assert (opened(one, 10, 229) == EPERM) == (number == 1)
        one.delete()


@pytest.mark.usefixtures("no_hybrid_cgroups")
def test_privileged_container_gets_no_other_gpu_under_crun(
    container: MakeContainer, make_node: Callable[..., Node], real_root: Path
) -> None:
    node = make_node(real_root, runtime={"path": str(shutil.which("crun"))})
    env = {"NVIDIA_VISIBLE_DEVICES": "0"}
    one = container(["sleep", "inf"], env=env, runtime=node.runtime(), edit=privileged).start()
    assert opened(one, 195, 0) == ENXIO
    assert opened(one, 195, 1) == EPERM
    assert opened(one, 10, 229) != EPERM
