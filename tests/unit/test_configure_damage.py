"""`gpushare runtime configure` with an obstacle: files of odd kinds, a concurrent command, kill -9."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gpushare.core.errors import ConfigError, KernelError
from gpushare.engines import host
from gpushare.system import filelock

from tests.unit import configurehost
from tests.unit.configurehost import tree

root, programs = configurehost.root, configurehost.programs
cli, daemon_json = configurehost.cli, configurehost.daemon_json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "/etc/docker/daemon.json:1:2: not valid JSON"),
        ("[1]", "/etc/docker/daemon.json: must contain a JSON object, not list"),
        ('{"runtimes": []}', '/etc/docker/daemon.json: "runtimes" must be an object, not list'),
        ('{"default-runtime": 1}', '/etc/docker/daemon.json: "default-runtime" must be text, not int'),
        ('{"runtimes": {}, "runtimes": {}}', '"runtimes" occurs twice'),
    ],
)
def test_broken_file_is_named_and_kept(
    cli: Callable[..., Any], daemon_json: Path, root: Path, text: str, message: str
) -> None:
    daemon_json.write_text(text)
    before = tree(root)
    for options in ((), ("--undo",)):
        code, out, error = cli("docker", *options)
        assert (code, out) == (78, "") and message in error and error.count("\n") == 1
    assert tree(root) == before


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/elsewhere")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_link, '"/etc/docker/daemon.json" is a link to "/elsewhere"'),
        (_folder, "is not a regular file"),
        (_fifo, "is not a regular file"),
        (lambda path: path.write_bytes(b'{"a": "\xff"}'), "not UTF-8 text (byte 7)"),
        (lambda path: path.write_bytes(b" " * (host.MAX_BYTES + 1)), "is larger than"),
    ],
)
def test_special_file_is_refused_and_kept(
    cli: Callable[..., Any], daemon_json: Path, root: Path, spoil: Callable[[Path], Any], message: str
) -> None:
    spoil(daemon_json)
    names = sorted(path.name for path in root.rglob("*"))
    code, out, error = cli("docker")
    assert (code, out) == (78, "") and message in error and error.count("\n") == 1
    assert sorted(path.name for path in root.rglob("*")) == names


def test_link_out_of_root_is_refused(cli: Callable[..., Any], root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (root / "etc/docker").symlink_to(tmp_path / "outside")
    code, _, error = cli("docker")
    assert code == 78 and "leads out of" in error and os.listdir(tmp_path / "outside") == []


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_failed_rename_undoes_every_change(root: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """The rename of one of three files fails: files and folders are unchanged."""
    (root / "etc/a").write_text("a")
    before = tree(root)
    changes = [
        host.Change("/etc/a", "a", "A"),
        host.Change("/etc/new/b", None, "b"),
        host.Change("/etc/c/d/e", None, "e"),
    ]
    real, calls = os.rename, []

    def rename(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) == failing + 1:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KernelError, match="No space left on device; nothing was changed"):
        host.Host(str(root)).write(changes)
    assert tree(root) == before


def test_concurrently_changed_file_is_not_overwritten(root: Path) -> None:
    (root / "etc/a").write_text("b")
    with pytest.raises(ConfigError, match="changed meanwhile"):
        host.Host(str(root)).write([host.Change("/etc/new", None, ""), host.Change("/etc/a", "a", "A")])
    assert tree(root).keys() == {"etc", "etc/a"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "is not a program"),
        (lambda path: path.chmod(0o644), "is not a program"),
        (lambda path: path.chmod(0o757), "(mode 757) is writable by users other than root; chmod go-w"),
        (lambda path: path.parent.chmod(0o777), "(mode 777) is writable by users other than root"),
        (lambda path: (os.chown(path, 0, 12), path.chmod(0o775)), "(mode 775) is writable by users other than root"),
    ],
)
@pytest.mark.parametrize("name", ["gpushare-runtime", "gpushare-hook"])
def test_program_writable_by_other_users_is_refused(
    cli: Callable[..., Any], root: Path, programs: Path, name: str, spoil: Callable[[Path], Any], message: str
) -> None:
    spoil(programs / name)
    before = tree(root)
    code, _, error = cli("docker")
    assert code == 78 and message in error
    assert tree(root) == before


class Killed(BaseException):
    """A kill: no code runs after it, but its descriptors are closed."""


@pytest.mark.parametrize("call", ["makedirs", "chmod", "fchmod", "fsync", "rename", "unlink", "rmdir"])
@pytest.mark.parametrize("during", [(), ("--undo",)])
@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_undo_restores_everything_after_kill_at_any_step(
    cli: Callable[..., Any],
    root: Path,
    daemon_json: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    during: tuple[str, ...],
    call: str,
) -> None:
    (root / "var/lib").mkdir(parents=True)
    before, steps, real = tree(root), 0, getattr(os, call)
    for when in range(100):
        if during:
            assert cli(engine)[0] == 0
        calls = iter(range(100))

        def killed(*args: Any, **options: Any) -> Any:
            if next(calls) == when:  # noqa: B023  # called before the next round
                raise Killed
            return real(*args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, killed)
            try:
                assert cli(engine, *during)[0] == 0
            except Killed:
                steps += 1
            else:
                when = -1
        assert cli(engine, "--undo")[0] == 0
        assert tree(root) == before
        if when < 0:
            break
    assert steps or (call in ("unlink", "rmdir")) != bool(during)


def test_configure_waits_for_concurrent_writer(
    cli: Callable[..., Any], root: Path, daemon_json: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    monkeypatch.setattr(filelock.time, "sleep", lambda _: waits.set())
    other, full = host._temporary(str(daemon_json))[1], daemon_json.with_name(".daemon.json.gpushare-new")
    os.write(other, b'{"other": 1}')
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(host._temporary, str(daemon_json))
        assert waits.wait(30) and not second.done()
        os.rename(full, daemon_json)
        os.close(other)
        path, fd = second.result(30)
    os.write(fd, b"mine")
    os.close(fd)
    assert (daemon_json.read_text(), Path(path).read_text()) == ('{"other": 1}', "mine")


def _named_twice(path: Path) -> None:
    other = path.parents[2] / "other"
    other.write_text("other")
    os.link(other, path)


def _of_a_user(path: Path) -> None:
    path.touch()
    os.chown(path, 1234, 0)


@pytest.mark.parametrize("put", [_named_twice, _of_a_user, lambda path: path.write_text("of a killed command")])
def test_file_with_the_temporary_name_is_replaced(cli: Callable[..., Any], daemon_json: Path, put: Any) -> None:
    """Otherwise a hard link to it would get the engine's text, or its owner could write to the engine's file."""
    daemon_json.unlink()
    temporary = daemon_json.with_name(".daemon.json.gpushare-new")
    put(temporary)
    assert cli("docker")[0] == 0
    assert (daemon_json.stat().st_uid, daemon_json.stat().st_nlink) == (0, 1) and not temporary.exists()


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/elsewhere")])
def test_odd_file_with_the_temporary_name_is_refused(cli: Callable[..., Any], root: Path, put: Any) -> None:
    """A FIFO, for example, would make the command wait."""
    temporary = root / "etc/docker/.daemon.json.gpushare-new"
    temporary.parent.mkdir()
    put(temporary)
    before = sorted(root.rglob("*"))
    code, _, error = cli("docker")
    assert code == 71 and '"/etc/docker/.daemon.json.gpushare-new"' in error and error.endswith("nothing was changed\n")
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("path", ["etc/systemd/system/docker.service", "etc/default/docker"])
def test_file_of_the_daemon_that_would_make_the_reader_wait_is_ignored(
    cli: Callable[..., Any], root: Path, path: str
) -> None:
    (root / path).parent.mkdir(parents=True)
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/dockerd").touch()
    os.mkfifo(root / path)
    assert cli()[0] == 0  # the list of engines


def test_concurrently_created_folder_is_kept(
    cli: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = host.Host.missing_folders

    def and_made(self: host.Host, paths: Any) -> Any:
        found = missing(self, paths)
        for path in found:
            os.makedirs(self.at(path), exist_ok=True)
        return found

    monkeypatch.setattr(host.Host, "missing_folders", and_made)
    assert cli("podman")[0] == 0
    assert cli("podman", "--undo")[0] == 0
