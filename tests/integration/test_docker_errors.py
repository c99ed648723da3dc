"""The message and exit code of docker when a container with a share does not start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.docker_host import TWO_GIB, Hosts, docker_hosts
from tests.support.engines.docker import IMAGE
from tests.support.host import Node, write_config

DAEMON_ERROR, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127  # `docker run --help`, "Exit status"


@pytest.fixture(scope="module")
def _made(image_root: Path) -> Iterator[Hosts]:
    def prepare(directory: Path, nodes: dict[str, Node]) -> dict[str, tuple[str, ...]]:
        nodes["no-runc"] = node = Node(directory / "no-runc", directory / "host")
        assert node.cli("refresh").returncode == 0  # it worked before, and its state directory is mounted
        write_config(node.config, directory / "host", runtime={"path": "/usr/local/bin/no-runc"})
        return {name: node.runtime() for name, node in nodes.items()}

    with docker_hosts(image_root, prepare) as made:
        yield made


@pytest.fixture
def hosts(_made: Hosts) -> Iterator[Hosts]:
    yield _made
    assert [node.leases() for node in _made.nodes.values() if node.leases()] == []
    assert _made.docker.daemon.must("ps", "-aq") == "", "docker kept a container"


# runtime, options -> strings that the message must quote
REFUSALS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "two values": ("gpushare", ("-e", "GPUSHARE_MEMORY=1\n2"), ("GPUSHARE_MEMORY", r"1\x0a2")),
    "no low-level runtime": ("no-runc", TWO_GIB, ("/usr/local/bin/no-runc", "runtime.path")),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_is_one_line_with_exit_code_125(hosts: Hosts, name: str) -> None:
    """One complete line of gpushare below docker's own; 125 is the daemon's "could not start it"."""
    runtime, options, quoted = REFUSALS[name]
    done = hosts.docker.try_run(*options, args=("true",), runtime=runtime)
    assert (done.code, done.out) == (DAEMON_ERROR, ""), done
    lines = [line for line in done.err.splitlines() if "gpushare: " in line]
    assert len(lines) == 1, done.err
    message = lines[0].partition("gpushare: ")[2]
    assert [word for word in quoted if word not in message] == [], message
    assert "Traceback" not in done.err and "internal error" not in done.err


@pytest.mark.parametrize(
    ("program", "code"), [("/no/such/program", NOT_FOUND), ("/etc/passwd", NOT_EXECUTABLE), ("no-such", NOT_FOUND)]
)
def test_docker_s_exit_codes_are_unchanged(hosts: Hosts, program: str, code: int) -> None:
    for options in ((), TWO_GIB):
        assert hosts.docker.try_run(*options, args=(program,)).code == code


def test_program_s_exit_code_and_signal_are_passed_on(hosts: Hosts) -> None:
    assert hosts.docker.try_run(*TWO_GIB, args=("sh", "-c", "exit 42")).code == 42
    assert hosts.docker.try_run(*TWO_GIB, "--init", args=("sh", "-c", "kill -TERM $$")).code == 128 + 15


def test_inspect_shows_the_last_refusal(hosts: Hosts) -> None:
    docker = hosts.docker
    created = docker.daemon.must("create", "--runtime", "gpushare", "-e", "GPUSHARE_MEMORY=lots", IMAGE, "true")
    try:
        assert docker.daemon.docker("start", created).code == 1
        assert "lots" in docker.daemon.must("inspect", "--format", "{{.State.Error}}", created)
        shown = docker.node.cli("inspect", created)
        assert "lots" in shown.stdout + shown.stderr
    finally:
        docker.daemon.must("rm", created)


def test_refusal_for_the_image_s_content_is_shown(hosts: Hosts, tmp_path: Path) -> None:
    """A link's name is a directory in the image: the hook detects it, and runc shows the hook's message. docker 26 and
    newer exit with 126 if the message has the kernel's words for that."""
    docker = hosts.docker
    (tmp_path / "d").mkdir()
    made = docker.daemon.must("create", IMAGE, "true")
    try:
        docker.daemon.must("cp", f"{tmp_path}/d", f"{made}:/usr/lib/x86_64-linux-gnu/libcuda.so.1")
        docker.daemon.must("commit", made, "odd")
    finally:
        docker.daemon.must("rm", made)
    done = docker.try_run(*TWO_GIB, image="odd", args=("true",))
    assert done.code == DAEMON_ERROR
    assert "gpushare: " in done.err and "libcuda.so.1" in done.err and "folder" in done.err
