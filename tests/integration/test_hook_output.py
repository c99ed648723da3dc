"""An image's annotations name host files for crun's hook output: gpushare must write nothing there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.core import constants

from tests.integration.edited import config_of
from tests.security.scene import LIBCUDA
from tests.support.host import Node
from tests.support.runc import Container, RuntimeFailed

pytestmark = pytest.mark.usefixtures("no_hybrid_cgroups")
MakeContainer = Callable[..., Container]
COMMAND = "$(touch made)"
HOSTILE = {"GPUSHARE_MEMORY": COMMAND}
ONE_GIB = {"GPUSHARE_MEMORY": "1Gi"}
SANDBOX = {"io.kubernetes.cri.container-type": "sandbox"}
LINKED = f"/opt/{COMMAND}"


@pytest.fixture(params=["runc", "crun"])
def low_level(request: pytest.FixtureRequest) -> str:
    """The low-level runtime."""
    return "/usr/bin/crun" if request.param == "crun" else "/usr/sbin/runc"


def outputs(directory: Path) -> dict[str, str]:
    """Annotations of an image, each naming a missing file."""
    return {key: str(directory / f"{key}.sh") for key in constants.HOOK_OUTPUT_ANNOTATIONS}


def made(annotations: dict[str, str]) -> list[Path]:
    return [Path(path) for path in annotations.values() if path.startswith("/") and Path(path).exists()]


@pytest.mark.parametrize("env", [HOSTILE, ONE_GIB, {}], ids=["a command", "a share", "nothing"])
@pytest.mark.parametrize("more", [{}, SANDBOX], ids=["container", "sandbox"])
def test_runtime_drops_image_annotations_for_hook_output(
    container: MakeContainer,
    make_node: Callable[..., Node],
    simhost: Path,
    tmp_path: Path,
    low_level: str,
    env: dict[str, str],
    more: dict[str, str],
) -> None:
    node, files = make_node(simhost, runtime={"path": low_level}), outputs(tmp_path)
    one = container(["true"], env=env, annotations={**files, **more}, runtime=node.runtime())
    if env == HOSTILE:
        with pytest.raises(RuntimeFailed, match="GPUSHARE_MEMORY=") as failed:
            one.create()
        assert COMMAND not in failed.value.message and r"\x24(touch made)" in failed.value.message
    else:
        assert one.run() == 0
        one.delete()
        left = config_of(one)["annotations"]
        assert constants.HOOK_OUTPUT_ANNOTATIONS[0] not in left
        assert left.get(constants.HOOK_OUTPUT_ANNOTATIONS[1], "/dev/stderr") == "/dev/stderr"
    assert made(files) == []


def test_restart_drops_annotations_from_the_edited_config_json(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, tmp_path: Path
) -> None:
    """An engine restarts a container from the config.json that an earlier start edited."""
    node, files = make_node(simhost, runtime={"path": "/usr/bin/crun"}), outputs(tmp_path)
    one = container(["true"], env=ONE_GIB, runtime=node.runtime())
    assert one.run() == 0
    one.delete()
    edited = config_of(one)
    edited["annotations"].update(files)
    (one.bundle / "config.json").write_text(json.dumps(edited))
    one.exit_code = None
    one.create()
    assert one.run() == 0
    one.delete()
    assert made(files) == []


@pytest.mark.parametrize("way", ["hook", "runtime"])
def test_image_s_link_text_is_quoted_in_the_refusal_alone(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, tmp_path: Path, way: str
) -> None:
    node, files = make_node(simhost, runtime={"path": "/usr/bin/crun"}), outputs(tmp_path)
    arguments = {"runtime": node.runtime()} if way == "runtime" else {"runtime": "/usr/bin/crun", "hook": node.hook()}
    one = container(["true"], env=ONE_GIB, annotations=files, **arguments)
    (one.rootfs / LIBCUDA).unlink(missing_ok=True)
    (one.rootfs / LIBCUDA).symlink_to(LINKED)
    (one.rootfs / "opt").mkdir(exist_ok=True)
    (one.rootfs / LINKED[1:]).write_text("no library")
    with pytest.raises(RuntimeFailed):
        one.create()
    told = node.cli("inspect", one.id).stdout
    assert r'is a link to "/opt/\x24(touch made)"' in told and COMMAND not in told
    assert [path.read_bytes() for path in made(files)] == ([b"", b""] if way == "hook" else [])  # crun creates them


@pytest.mark.parametrize("env", [HOSTILE, ONE_GIB, {}], ids=["a command", "a share", "nothing"])
@pytest.mark.parametrize("stage", ["prestart", "createRuntime"])
def test_hook_prints_nothing_under_crun(
    container: MakeContainer, node: Node, tmp_path: Path, env: dict[str, str], stage: str
) -> None:
    """crun creates the files before it runs a hook. They stay empty."""
    files = outputs(tmp_path)
    one = container(["true"], env=env, annotations=files, runtime="/usr/bin/crun", hook=node.hook(stage))
    if env == HOSTILE:
        with pytest.raises(RuntimeFailed):
            one.create()
        told = node.cli("inspect", one.id).stdout
        assert r'GPUSHARE_MEMORY="\x24(touch made)"' in told and COMMAND not in told
    else:
        assert one.run() == 0
        one.delete()
    assert [path.read_bytes() for path in made(files)] == [b"", b""]
