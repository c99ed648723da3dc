"""The hook's interface: its command line, its cost for a container without a request, and its failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpushare.core import constants
from gpushare.core.errors import CapacityError, RequestError
from gpushare.programs import deadline, hook
from gpushare.request import request
from gpushare.state import log

SOURCE = str(Path(hook.__file__).resolve().parents[2])
# Modules that the start path must never load: each costs more than the rest of the hook together, or is a risk.
EXPENSIVE = frozenset(
    "argparse asyncio click dataclasses email glob http importlib.metadata inspect jsonschema logging pathlib pynvml "
    "rich shutil socket subprocess tempfile threading traceback unittest urllib yaml".split()
)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """main() changes signals, umask and directory of its process, which is pytest here."""
    import signal

    numbers = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before, mask, directory = [signal.getsignal(number) for number in numbers], os.umask(0), os.getcwd()
    yield
    signal.alarm(0)
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)
    os.umask(mask)
    os.chdir(directory)


@pytest.fixture
def bundle(tmp_path: Path) -> Callable[..., bytes]:
    """bundle(*env, **spec) -> the state that a runtime sends for a container; writes its config.json."""

    def make(*env: str, pid: int = 0, **spec: Any) -> bytes:
        directory = tmp_path / "bundle"
        directory.mkdir(exist_ok=True)
        content = {"root": {"path": "rootfs"}, "process": {"env": list(env)}, **spec}
        (directory / "config.json").write_text(json.dumps(content))
        state = {"ociVersion": "1.0.2", "id": "c1", "status": "creating", "pid": pid, "bundle": str(directory)}
        return json.dumps(state).encode()

    return make


def call(state: bytes, *argv: str) -> int:
    """Call hook.main with `state` on its own descriptor."""
    reader, writer = os.pipe()
    try:
        os.write(writer, state)
        os.close(writer)
        return hook.main(argv, stdin=reader)
    finally:
        os.close(reader)


# Command line


def test_options_and_defaults_are_parsed() -> None:
    assert hook.parse(["prestart"]) == ("prestart", constants.CONFIG_PATH, constants.STATE_DIR, False, "", "")
    both = ["--config", "/c.yaml", "--state=/s/", "createRuntime"]
    assert hook.parse(both) == ("createRuntime", "/c.yaml", "/s", False, "", "")
    for at in range(4):
        if at != 1:  # at 1 the word would be the value of --config
            assert hook.parse([*both[:at], "--cri", *both[at:]]) == ("createRuntime", "/c.yaml", "/s", True, "", "")


@pytest.mark.parametrize(
    "argv",
    [[], ["start"], ["prestart", "more"], ["--config"], ["--config", "/c"], ["--verbose", "prestart"]]
    + [["--state", "relative", "prestart"], ["--state=", "prestart"], ["-x"]],
    ids=" ".join,
)
def test_wrong_usage_prints_usage(argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError):
        hook.parse(argv)
    assert call(b"", *argv) == 64
    assert "use gpushare-hook [--config FILE] [--state DIR]" in capfd.readouterr().err


# Containers without a request


@pytest.mark.parametrize(
    ("env", "annotations"),
    [
        ([], {}),
        (["PATH=/bin", "TERM=xterm"], {"org.example": "x"}),
        (["GPUSHARE_MEMORY=1Gi"], {"io.kubernetes.cri.container-type": "sandbox"}),
        (["NVIDIA_VISIBLE_DEVICES=all"], {"io.kubernetes.cri-o.ContainerType": "sandbox"}),
    ],
    ids=["empty", "ordinary", "sandbox of containerd", "sandbox of cri-o"],
)
def test_container_without_request_leaves_no_trace(
    bundle: Callable[..., bytes], tmp_path: Path, env: list[str], annotations: dict[str, str]
) -> None:
    """The hook reads neither configuration nor state: neither path exists, before or after."""
    state = tmp_path / "none" / "state"
    assert (
        call(bundle(*env, annotations=annotations), "--config", "/none", "--cri", "--state", str(state), "prestart")
        == 0
    )
    assert not state.parent.exists()


def modules_after(statements: str, state: bytes = b"") -> set[str]:
    """Names of the modules that a start as the installed program loads (-I -S: nothing else)."""
    text = f"import sys; sys.path.insert(0, {SOURCE!r})\n{statements}\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-ISc", text], input=state, capture_output=True, check=True)
    return set(done.stderr.decode().split())


LATE = (
    "allocation.placement allocation.reservation config.node gpu.driverfiles inject.apply inject.cachefile inject.plan "
    "inject.proc_nvidia_mask inject.rootfs inject.specedit programs.create_runtime_hook programs.runtime "
    "state.leases state.storage system.bpf system.cgroup system.procs"
).split()


def test_start_path_loads_only_few_standard_modules() -> None:
    """All modules of the start, including lazily imported ones."""
    loaded = modules_after("\n".join(f"import gpushare.{one}" for one in LATE))
    assert not loaded & EXPENSIVE
    assert {f"gpushare.{name}" for name in LATE} <= loaded


# Failing


def test_refusal_is_last_line_and_recorded(
    bundle: Callable[..., bytes], state_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> bool:
        raise CapacityError("8 GiB requested,\n\x1b[31m4 GiB free", "ask for less")

    monkeypatch.setattr(request, "mentions", refuse)
    assert call(bundle(), "--state", str(state_dir), "prestart") == 75
    expected = "gpushare: 8 GiB requested,\\x0a\\x1b[31m4 GiB free; ask for less\n"
    assert capfd.readouterr().err == expected
    assert (state_dir / "errors" / "c1").read_text() == expected
    assert log.read(str(state_dir), "c1") == expected[len("gpushare: ") : -1]
    assert os.listdir(state_dir / "errors") == ["c1"]


@pytest.mark.parametrize("where", ["gpushare.state.storage.prepare", "gpushare.config.node.log_target"])
def test_refusal_is_one_line_without_memory_to_record_it(
    bundle: Callable[..., bytes],
    state_dir: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """crun runs hooks with the container's RLIMIT_AS."""

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(where, full)
    state = bundle("GPUSHARE_MEMORY=x")
    assert call(state, "--state", str(state_dir), "--config", str(state_dir / "none"), "prestart") != 0
    assert capfd.readouterr().err.count("\n") == 1


def test_internal_error_is_one_line_with_traceback_on_host(
    bundle: Callable[..., bytes], state_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> bool:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr(request, "mentions", broken)
    assert call(bundle(), "--state", str(state_dir), "prestart") == 1
    error = capfd.readouterr().err
    assert error.startswith('gpushare: internal error: ZeroDivisionError: "a\\x0ab" (at test_hook.py:')
    assert error.count("\n") == 1
    trace = state_dir / "errors" / "c1~trace"
    assert "Traceback" in trace.read_text() and trace.stat().st_mode & 0o077 == 0
    assert log.known(str(state_dir)) == ["c1"]
    log.forget(str(state_dir), "c1")
    assert os.listdir(state_dir / "errors") == []


@pytest.mark.parametrize(
    "state",
    [b"", b"{", b"[]", b"\xff", b'{"id": "../x", "bundle": "/b"}', b'{"id": "c1"}', b'{"id": "c1", "bundle": "rel"}']
    + [b'{"id": "c1", "bundle": "/none"}', b'{"id": 1, "bundle": "/"}', b'{"id": "c1", "bundle": "/b", "pid": -1}'],
)
def test_malformed_state_is_one_line(
    state: bytes, state_dir: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(state, "--state", str(state_dir), "prestart") == 64
    error = capfd.readouterr().err
    assert error.startswith("gpushare: ") and error.count("\n") == 1 and "Traceback" not in error
    assert call(state, "--state", str(state_dir), "poststop") == 0


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_exits_with_zero(flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert hook.main([flag], stdin=-1) == 0
    told = capfd.readouterr()
    assert told.out.startswith("usage: gpushare-hook ") and told.err == ""


def test_missing_state_ends_at_deadline(
    state_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "DEADLINE_S", 1)
    reader, writer = os.pipe()
    try:
        assert hook.main(["--state", str(state_dir), "prestart"], stdin=reader) == 1
    finally:
        os.close(reader)
        os.close(writer)
    assert "took longer than 1 s" in capfd.readouterr().err


def test_undo_after_deadline_has_deadline(
    state_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several undo steps hang, and so does the state directory that keeps the message."""
    from gpushare.state import leases, storage

    reader, writer = os.pipe()
    hung: list[str] = []

    def hang(name: str) -> Callable[..., None]:
        def step(*_: object) -> None:
            hung.append(name)
            os.read(reader, 1)

        return step

    def start(*_: object) -> int:
        deadline.undo(str(state_dir), "c1", hang("applied"))
        raise RuntimeError("the error that counts")

    monkeypatch.setattr(deadline, "UNDO_DEADLINE_S", 1)
    monkeypatch.setitem(hook._STAGES, "prestart", start)
    monkeypatch.setattr(leases, "undo", hang("lease"))
    monkeypatch.setattr(storage, "empty_trash", hang("trash"))
    monkeypatch.setattr(storage, "prepare", hang("state directory"))
    try:
        assert (
            call(b'{"ociVersion":"1.0.2","id":"c1","pid":1,"bundle":"/"}', "--state", str(state_dir), "prestart") != 0
        )
    finally:
        os.close(reader)
        os.close(writer)
    assert hung == ["applied", "lease", "trash", "state directory"]
    assert "the error that counts" in capfd.readouterr().err


def test_state_without_pid_is_refused(
    bundle: Callable[..., bytes], state_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook in the wrong stage (poststop's state has no pid) must not make a lease without a process."""
    from gpushare.config import node

    from tests.unit import pure

    monkeypatch.setattr(node, "load_node", lambda config, state: pure.node())
    assert call(bundle("GPUSHARE_MEMORY=1Gi"), "--state", str(state_dir), "createRuntime") == 64
    assert "no process has pid 0, which the OCI state" in capfd.readouterr().err
    assert os.listdir(state_dir / "containers") == []


def test_poststop_of_unknown_container_is_silent(
    bundle: Callable[..., bytes], state_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert call(bundle(), "--state", str(state_dir), "poststop") == 0
    assert capfd.readouterr().err == ""
    assert not os.listdir(state_dir)  # nothing was ever mounted here


def test_old_refusals_are_removed(state_dir: Path) -> None:
    """In a crash loop with new names, the oldest refusals are removed and the newest stay."""
    (state_dir / "errors").mkdir()
    for number in range(300):
        log.record(str(state_dir), f"c{number}", "gpushare: no", CapacityError("no"))
        os.utime(state_dir / "errors" / f"c{number}", ns=(number, number))
    kept = log.known(str(state_dir))
    assert 200 < len(kept) <= 257 and "c299" in kept and "c0" not in kept


def test_missing_nri_plugin_frees_no_container_with_another_gpu(
    bundle: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other software has added a device; without the plugin there is no share that limits it."""
    start = SimpleNamespace(request=None, host=SimpleNamespace(inventory=None))
    monkeypatch.setattr(hook.session, "resolve", lambda *_: start)
    monkeypatch.setattr(request, "refuse_conflicts", lambda *_: None)
    words = ("--nri", str(tmp_path / "lock"), "prestart")
    assert call(bundle(), *words) == 0 and "does not run, so this container has no GPU" in capfd.readouterr().err

    def conflict(*_: Any) -> None:
        raise RequestError("it already has an NVIDIA device")

    monkeypatch.setattr(request, "refuse_conflicts", conflict)
    assert call(bundle(), *words) == RequestError.exit_code
