"""Every command on every page is run, or parsed, or listed with the reason why it is neither."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from gpushare.cli.main import group
from gpushare.core import constants
from gpushare.request import request

from tests.docs import blocks
from tests.docs.blocks import Command
from tests.docs.test_tour import TOUR, TYPED
from tests.support.host import TREE
from tests.unit import pure

# Beginning of a command -> the test that runs it, or the reason why no test does
ELSEWHERE = {
    "docker build": "it needs a registry; tests/integration/test_installer.py",
    "docker cp": "writing the trace: tests/shim/test_compute.py",
    "docker exec": "tests/docs/test_tour.py",
    "docker rm": "tests/docs/test_tour.py",
    "docker service create": "it needs a swarm; tests/integration/test_swarm.py",
    "dpkg -": "tests/packages/check_install.py",
    "helm": "it needs a cluster; what it renders: tests/unit/test_helm.py",
    "journalctl": "it needs systemd's journal; tests/integration/test_decisions.py",
    "kubectl": "it needs a cluster; what it applies: tests/unit/test_kubernetes.py",
    "ln -s": "tests/integration/test_bundle.py",
    "systemctl": "it needs systemd; tests/packages/check_contents.py",
    "tar": "tests/integration/test_bundle.py",
}
ALL = [one for page in blocks.pages() for one in blocks.commands(page)]


def of(program: str) -> list[Command]:
    return [one for one in ALL if one.text.split(" ")[0] == program]


def words(command: Command) -> list[str]:
    """Split like a shell: the output of an inner command is an id, and `...` is empty."""
    text = re.sub(r"\$\([^)]*\)", "ID", command.text)
    text = re.sub(r"\s\.\.\.$", "", text).replace("GPU-<uuid>", "GPU-0")
    return shlex.split(re.sub(r"\s[<>]\S+$", "", text))


def test_pages_have_commands() -> None:
    """A change of style must not make the tests below find no commands."""
    assert len(ALL) > 100
    assert {one.page for one in ALL} >= {"README.md", "docs/tour.md", "docs/cli.md", "docs/docker.md", "docs/podman.md"}


@pytest.mark.parametrize("one", of("gpushare"), ids=lambda one: one.place)
def test_gpushare_command_parses(one: Command) -> None:
    """Commands, options and values are known; nothing is run."""
    command: click.Command = group
    arguments = list(itertools.takewhile(lambda word: word != "&&", words(one)[1:]))
    context = command.make_context("gpushare", arguments)
    while isinstance(command, click.Group):
        name, found, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found, f"{one.place}: no command {name}"
        command = found
        context = command.make_context(name, arguments, parent=context)


@pytest.mark.parametrize("page", blocks.pages())
def test_inline_gpushare_commands_exist(page: str) -> None:
    """`gpushare mps stop --device …`: its command and options exist, whatever the values."""
    for text in re.findall(r"`gpushare ([^`]*)`", (TREE / page).read_text()):
        command: click.Command = group
        context = click.Context(group, **group.context_settings)
        for word in text.split(" -- ")[0].split():
            if word.startswith("-"):
                known = [name for one in command.get_params(context) for name in one.opts]
                known += [name for one in group.get_params(context) for name in one.opts]
                assert word.split("=")[0].strip(",.") in known, f"{page}: gpushare {text}"
            elif isinstance(command, click.Group) and not word.startswith("/"):
                found = [command.get_command(context, name) for name in word.split("|")]
                assert all(found) or word in ("...", "…", "COMMAND"), f"{page}: gpushare {text}"
                command = found[0] or command


# Verb of kubectl and an option with a name: the kind of file that it must be, in packaging/kubernetes
APPLIES: dict[tuple[str, str], Callable[[Path], bool]] = {
    ("apply", "-f"): Path.is_file,  # with the fields of its API: test_kubernetes.py
    ("delete", "-k"): lambda folder: (folder / "kustomization.yaml").is_file(),
    ("apply", "-k"): lambda folder: (folder / "kustomization.yaml").is_file(),  # and what that names: test_packaging.py
}
FLAGS = ("--ignore-not-found",)  # of kubectl, without a value
WITHOUT_FILES = (
    "describe pod", "describe node", "create namespace", "label namespace", "label node", "logs", "rollout status",
    "get crds", "get daemonsets", "get nodes", "get events", "get resourceclaims", "get resourceslices",
    "delete daemonset", "delete serviceaccount", "delete clusterrole", "delete deviceclass",
)  # fmt: skip


def test_kubectl_arguments_exist() -> None:
    inline = [
        (page, text) for page in blocks.pages() for text in re.findall(r"`(kubectl [^`]*)`", (TREE / page).read_text())
    ]
    todo = [*((one.place, one.text) for one in of("kubectl")), *inline]
    assert len(todo) > 6
    for place, text in todo:
        _, verb, *arguments = (word for word in shlex.split(text) if word not in FLAGS)
        if text.startswith(tuple(f"kubectl {verb}" for verb in WITHOUT_FILES)):
            continue
        assert arguments and len(arguments) % 2 == 0, f"{place}: {text}"
        for option, name in zip(arguments[::2], (one.replace("packaging/kubernetes", ".") for one in arguments[1::2])):
            assert APPLIES[verb, option](TREE / "packaging/kubernetes" / name), f"{place}: {text}"


def test_make_targets_exist() -> None:
    files = [TREE / "Makefile", *TREE.glob("*/*.mk"), *TREE.glob("*/*/*.mk")]
    targets = {name for path in files for name in re.findall(r"^([\w-]+):", path.read_text(), re.MULTILINE)}
    for one in of("make"):
        named = [word.strip(",:.") for word in one.text.split(" ")[1:2]]
        named = [word for word in named if "=" not in word]
        assert set(named) <= targets, one.place


@pytest.mark.parametrize("one", [*of("docker"), *of("podman")], ids=lambda one: one.place)
def test_container_commands_request_valid_shares(one: Command) -> None:
    """The container runs under gpushare, and its request is valid."""
    if one.text.startswith(tuple(ELSEWHERE)):
        return
    ours = ("--runtime gpushare", "gpushare.io/share=", "nvidia.com/gpu=", "podman run", "docker ps", "docker inspect")
    assert any(way in one.text for way in ours), one.place
    arguments = words(one)
    env = [value for flag, value in zip(arguments, arguments[1:]) if flag == "-e"]
    if any(line.startswith("GPUSHARE_") for line in env):
        assert request.resolve(pure.bundle(*env), pure.node(allowed_backends=("shim", "mps"))), one.place


def test_other_commands_are_tested_elsewhere() -> None:
    """Every reason is needed, and the test that it names exists."""
    rest = [one for one in ALL if one.text.split(" ")[0] not in ("gpushare", "make", "podman", "source")]
    rest = [
        one for one in rest if not one.text.startswith(("docker run", "docker compose", "docker ps", "docker inspect"))
    ]
    unexplained = [one.place for one in rest if not one.text.startswith(tuple(ELSEWHERE))]
    assert unexplained == []
    assert [begin for begin in ELSEWHERE if not any(one.text.startswith(begin) for one in rest)] == []
    for why in ELSEWHERE.values():
        assert (TREE / why.rpartition(" ")[2]).is_file(), why


def test_pages_starting_containers_are_run() -> None:
    """Every command that starts a container is run, except for the reasons listed here."""
    starts = {one.page for one in ALL if one.text.startswith(("docker run", "podman run"))}
    assert starts - set(TYPED) == {"README.md", "README.zh-CN.md", TOUR, "docs/mps.md"}
    assert (TREE / "tests/integration/test_mps_daemon.py").is_file()  # docs/mps.md needs a real driver's daemon


def test_readmes_have_same_commands() -> None:
    readme, chinese = ([one.text for one in ALL if one.page == page] for page in ("README.md", "README.zh-CN.md"))
    assert readme == chinese


@pytest.mark.parametrize("page", blocks.pages())
def test_link_targets_exist(page: str) -> None:
    """Links to files, and to headings in them."""
    text = (TREE / page).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, heading = target.partition("#")
        path = (TREE / page).parent / name if name else TREE / page
        assert path.exists(), f"{page} -> {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{page} -> {target}"


def test_documented_variables_exist() -> None:
    """Every GPUSHARE_... on a page is a known variable."""
    known = {value for key, value in vars(constants).items() if key.startswith("ENV_")} | {
        "GPUSHARE_LOG",
        "GPUSHARE_TRACE",
    }
    installer = (TREE / "packaging/kubernetes/installer/install.py").read_text()
    known |= set(re.findall(r'environ(?:\.get\(|\[)"(GPUSHARE_[A-Z_]+)"', installer))
    for page in blocks.pages():
        for word in re.findall(r"\bGPUSHARE_[A-Z_]+\b", (TREE / page).read_text()):
            named = any(one.startswith(word) for one in known) if word.endswith("_") else word in known
            assert named or word in SEEN_BY_OTHERS, f"{page}: {word}"


# Variables of the tests and the tools
SEEN_BY_OTHERS = ("GPUSHARE_CONFORMANCE_LIB", "GPUSHARE_RACES", "GPUSHARE_EVERY_POINT", "GPUSHARE_TEST_SHIM")
