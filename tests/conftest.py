"""Fixtures for all tests. Their helpers are in tests/support and work without pytest."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.simhost import make_simhost
from tests.support import host, processes, rootfs, short, turns
from tests.support.runc import Container, close_all
from tools import nvidia_userland

GIB = 1 << 30
OLD_BUILD = "build/ is older than the tree, so these tests ran old code: run `make build`"
# gRPC's handlers of fork start threads in the child, which then cannot make a user namespace
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--low-level", choices=("runc", "crun"), default="runc", help="of containers without an engine")
    parser.addoption("--record-costs", action="store_true", help="in tests/support/costs.txt: the run has one process")
    parser.addoption("--programs", type=Path, help="a bundle (build/dist/gpushare) to test, not the source tree")


def pytest_configure(config: pytest.Config) -> None:
    """Give the test run its own mount namespace: no mount is left on the machine, even if the run is killed."""
    if config.getoption("record_costs"):
        config.pluginmanager.register(short.CostsFile())
    if config.getoption("programs"):
        host.use_programs(config.getoption("programs"))
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # background run of a shell, and what its tests start
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.geteuid() == 0:
        host.enter_private_mounts()
        host.use_low_level(config.getoption("low_level"))
        processes.become_subreaper()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return turns.scheduler(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that the short form of a run omits: -m "not long". A test that is judged by a real clock and fails
    is run again while nothing else runs, at most twice: see pytest_runtest_setup."""
    omitted = short.omitted(item.nodeid for item in items)
    for item in items:
        if item.nodeid in omitted:
            item.add_marker(pytest.mark.long)
        if turns.kind_of(item.nodeid) == turns.TIMED:
            item.add_marker(pytest.mark.flaky(reruns=2))


SEATS = turns.Seats()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Wait for a seat before the test's time limit begins, so that waiting does not count."""
    kind = turns.kind_of(item.nodeid)
    SEATS.enter(kind, os.environ.get("PYTEST_XDIST_WORKER"))
    try:
        return (yield)
    finally:
        SEATS.leave(turns.kind_of(nextitem.nodeid) if nextitem else None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Judge shares of a device again without other tests: these may have used the processors that it needed."""
    if getattr(item, "execution_count", 1) > 1:
        SEATS.leave()
        SEATS.enter(turns.EXCLUSIVE, os.environ.get("PYTEST_XDIST_WORKER"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Reap adopted orphans that have ended: a test that inspects its own children must not find them."""
    processes.reap_zombies()


UNBUILT = ("tests/unit/", "tests/golden/", "tests/limiter/")  # their tests run nothing that is built, or build it


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell if the tests ran programs from before an edit."""
    reports = (one for some in terminalreporter.stats.values() for one in some)
    built = (one for one in reports if not getattr(one, "nodeid", UNBUILT[0]).startswith(UNBUILT))
    if not config.getoption("programs") and any(built) and not host.is_built():
        terminalreporter.write_line(OLD_BUILD, red=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of a real driver that are marked so with each branch that the distribution has."""
    if "userland" in metafunc.fixturenames and metafunc.definition.get_closest_marker("every_driver"):
        metafunc.parametrize("userland", list(nvidia_userland.branches()), indirect=True, scope="session")


@pytest.fixture(scope="session")
def userland(request: pytest.FixtureRequest) -> Iterator[nvidia_userland.Userland]:
    """A real NVIDIA user-space driver, unpacked once into build/userland-BRANCH. As root its NVML creates a missing
    control node; the fixture removes that node."""
    control = Path("/dev/nvidiactl")
    was_there = control.exists()
    branch = getattr(request, "param", nvidia_userland.SIMULATED)
    try:
        yield nvidia_userland.unpack(host.BUILD / f"userland-{branch}", branch)
    except nvidia_userland.UserlandError as error:
        pytest.fail(f"this test needs a real NVIDIA user-space driver, and none can be had: {error}", pytrace=False)
    finally:
        if not was_there:
            control.unlink(missing_ok=True)


@pytest.fixture
def make_host(tmp_path: Path) -> Callable[..., Path]:
    """make_host(name="host", **arguments of make_simhost) -> a simulated host below tmp_path."""

    def make(name: str = "host", **arguments: Any) -> Path:
        return make_simhost(tmp_path / name, **arguments)

    return make


@pytest.fixture
def simhost(make_host: Callable[..., Path]) -> Path:
    """A simulated host with one GPU of 16 GiB."""
    return make_host(gpus=1, memory_bytes=16 * GIB)


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    """An empty state directory; the fixture unmounts all mounts below it."""
    path = tmp_path / "state"
    path.mkdir()
    yield path
    rootfs.unmount_below(path)


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    """config_file(driver_root, **keys) -> a configuration file."""

    def make(driver_root: Path, **keys: Any) -> Path:
        return host.write_config(tmp_path / "config.yaml", driver_root, **keys)

    return make


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., host.Node]]:
    """make_node(driver_root, name="node", **config keys) -> host.Node with a separate state directory."""
    made: list[host.Node] = []

    def make(driver_root: Path, name: str = "node", **config: Any) -> host.Node:
        made.append(host.Node(tmp_path / name, driver_root, **config))
        return made[-1]

    yield make
    for node in made:
        node.close()


@pytest.fixture
def node(make_node: Callable[..., host.Node], simhost: Path) -> host.Node:
    """The simulated host with the default configuration."""
    return make_node(simhost)


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Callable[..., Container]]:
    """container(args, **arguments of lib.runc.Container) -> Container, closed at the end of the test."""
    made: list[Container] = []

    def make(args: list[str], **arguments: Any) -> Container:
        made.append(Container(tmp_path / "bundles", args, **arguments))
        return made[-1]

    yield make
    close_all(made)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a mount or a process behind. Request it first, so that it checks last."""
    mounts, children = set(rootfs.mount_points()), set(processes.children())
    yield
    # Mounts of activity files and of idmap.py stay as long as the state directory
    stays = {f"{point}/{name}" for point in mounts for name in ("devices", "idmap")}
    left = [point for point in rootfs.mount_points() if point not in mounts and os.path.dirname(point) not in stays]
    assert not left, f"mounts left behind: {left}"
    left_over = {pid: command for pid, command in processes.children().items() if pid not in children}
    # The cgroup lock warm-up (hook/launcher/cgroup_lock_warmup.c) may outlive a start by a moment.
    running = {pid: command for pid, command in left_over.items() if processes.wait_exit(pid, 30) is None}
    assert not running, f"processes left behind: {running}"
