"""gpushare runtime configure: real files below a temporary root, through the command line. Docker stands for all
engines here; what is an engine's own is in test_engines.py."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gpushare import profiles
from gpushare.cli import main
from gpushare.engines import docker, host, record
from gpushare.errors import ConfigError, GpushareError, KernelError

HAND = '{\n  "log-driver": "json-file",\n  "dns": ["1.1.1.1", "8.8.8.8"],\n  "default-runtime": "runc"\n}\n'


def tree(root: Path) -> dict[str, Any]:
    """Every file below `root` with its mode and bytes, and every folder."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, content)
    return found


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """An installation: bin/gpushare-runtime and bin/gpushare-hook."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("gpushare-runtime", "gpushare-hook"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "etc").mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture
def cli(root: Path, programs: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """cli(*arguments of `runtime configure`) -> (exit code, standard output, standard error)."""

    def run(*args: str) -> tuple[int, str, str]:
        where = ("--root", str(root), "--program", str(programs / "gpushare-runtime"))
        code = main(["runtime", "configure", *args, *where])
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def daemon_json(root: Path) -> Path:
    (root / "etc/docker").mkdir()
    path = root / "etc/docker/daemon.json"
    path.write_text(HAND)
    return path


def test_new_file_comes_and_goes(cli: Callable[..., Any], root: Path, programs: Path) -> None:
    before = tree(root)
    code, text, error = cli("docker")
    assert (code, text) == (0, "create /etc/docker/daemon.json\n")
    assert error == "gpushare: now run: systemctl reload docker\n"
    wanted = {"runtimes": {"gpushare": {"path": str(programs / "gpushare-runtime"), "runtimeArgs": []}}}
    assert json.loads((root / "etc/docker/daemon.json").read_text()) == wanted
    after = tree(root)
    assert cli("docker") == (0, "nothing to do\n", "")
    assert tree(root) == after
    assert cli("docker", "--undo")[:2] == (0, "remove /etc/docker/daemon.json\n")
    left = tree(root)
    assert {name for name in left if "docker" in name} == set() and before.items() <= left.items()
    assert cli("docker", "--undo") == (0, "nothing to do\n", "")


def test_nothing_else_in_the_file_changes_and_undo_gives_back_every_byte(
    cli: Callable[..., Any], daemon_json: Path, programs: Path
) -> None:
    daemon_json.chmod(0o640)
    os.chown(daemon_json, 12, 34)
    before = tree(daemon_json.parent)
    assert cli("docker", "--default")[0] == 0
    program = programs / "gpushare-runtime"
    lines = HAND.replace('"runc"\n', '"gpushare",\n').splitlines()[:-1]
    lines += ['  "runtimes": {', '    "gpushare": {', f'      "path": "{program}",', '      "runtimeArgs": []']
    assert daemon_json.read_text().splitlines() == [*lines, "    }", "  }", "}"]
    status = daemon_json.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o640, 12, 34)
    assert cli("docker", "--undo")[0] == 0
    assert tree(daemon_json.parent) == before


def test_undo_after_an_edit_removes_only_what_is_ours(cli: Callable[..., Any], daemon_json: Path) -> None:
    cli("docker", "--default")
    value = json.loads(daemon_json.read_text())
    value["runtimes"]["kata"] = {"path": "/bin/kata"}
    value["debug"] = True
    daemon_json.write_text(json.dumps(value))
    assert cli("docker", "--undo")[0] == 0
    left = json.loads(daemon_json.read_text())
    assert left == {**json.loads(HAND), "runtimes": {"kata": {"path": "/bin/kata"}}, "debug": True}
    assert left["default-runtime"] == "runc"


def test_configure_again_after_an_edit_remembers_the_edit(cli: Callable[..., Any], daemon_json: Path) -> None:
    cli("docker")
    daemon_json.write_text(daemon_json.read_text().replace("8.8.8.8", "9.9.9.9"))
    assert cli("docker", "--default")[0] == 0
    assert cli("docker", "--undo")[0] == 0
    assert daemon_json.read_text() == HAND.replace("8.8.8.8", "9.9.9.9")


def test_undo_without_the_record(cli: Callable[..., Any], daemon_json: Path, root: Path) -> None:
    cli("docker", "--default")
    (root / record.path_of("docker").lstrip("/")).unlink()
    assert cli("docker", "--undo")[0] == 0
    assert json.loads(daemon_json.read_text()) == {
        key: value for key, value in json.loads(HAND).items() if key != "default-runtime"
    }


def test_lost_record_is_made_again_without_our_entries(cli: Callable[..., Any], daemon_json: Path, root: Path) -> None:
    cli("docker")
    (root / record.path_of("docker").lstrip("/")).unlink()
    cli("docker", "--default")
    cli("docker", "--undo")
    assert daemon_json.read_text() == HAND


def test_damaged_record_is_said(cli: Callable[..., Any], daemon_json: Path, root: Path) -> None:
    cli("docker")
    path = root / record.path_of("docker").lstrip("/")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for text in ("{", "[]", '{"version": 2}', '{"version": 1, "files": [{"path": 1}], "folders": []}'):
        path.write_text(text)
        before = daemon_json.read_text()
        code, out, error = cli("docker", "--undo")
        assert (code, out) == (78, "") and "is damaged" in error and "move it away" in error
        assert daemon_json.read_text() == before


@pytest.mark.parametrize("options", [(), ("--default",), ("--undo",)])
def test_dry_run_changes_nothing_and_prints_what_patch_takes(
    cli: Callable[..., Any], daemon_json: Path, root: Path, options: tuple[str, ...]
) -> None:
    if options == ("--undo",):
        cli("docker")
    before = tree(root)
    code, diff, error = cli("docker", "--dry-run", *options)
    word = "restart" if options == ("--undo",) else "reload"
    assert code == 0 and tree(root) == before and f"then run: systemctl {word} docker" in error
    cli("docker", *options)
    wanted = daemon_json.read_text()
    daemon_json.write_bytes(before["etc/docker/daemon.json"][3])
    subprocess.run(["patch", "-p1", "-d", str(root)], input=diff, text=True, check=True, capture_output=True)
    assert daemon_json.read_text() == wanted


def test_json_report(cli: Callable[..., Any], daemon_json: Path) -> None:
    value = json.loads(cli("docker", "--dry-run", "--format", "json")[1])
    (change,) = value["changes"]
    assert (value["engine"], value["dry_run"], value["next"]) == ("docker", True, "systemctl reload docker")
    assert (change["path"], change["action"]) == ("/etc/docker/daemon.json", "change")
    assert '+    "gpushare": {' in change["diff"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "/etc/docker/daemon.json:1:2: not valid JSON"),
        ("[1]", "/etc/docker/daemon.json: must hold a JSON object, not list"),
        ('{"runtimes": []}', '/etc/docker/daemon.json: "runtimes" must be an object, not list'),
        ('{"default-runtime": 1}', '/etc/docker/daemon.json: "default-runtime" must be text, not int'),
        ('{"runtimes": {}, "runtimes": {}}', "'runtimes' is there twice"),
    ],
)
def test_a_broken_file_is_named_and_left_alone(
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
        (_link, "'/etc/docker/daemon.json' is a link to '/elsewhere'"),
        (_folder, "is not a regular file"),
        (_fifo, "is not a regular file"),
        (lambda path: path.write_bytes(b'{"a": "\xff"}'), "not UTF-8 text (byte 7)"),
        (lambda path: path.write_bytes(b" " * (host.MAX_BYTES + 1)), "is larger than"),
    ],
)
def test_what_is_no_usual_file_is_left_alone(
    cli: Callable[..., Any], daemon_json: Path, root: Path, spoil: Callable[[Path], Any], message: str
) -> None:
    spoil(daemon_json)
    names = sorted(path.name for path in root.rglob("*"))
    code, out, error = cli("docker")
    assert (code, out) == (78, "") and message in error and error.count("\n") == 1
    assert sorted(path.name for path in root.rglob("*")) == names


def test_links_out_of_root_are_refused(cli: Callable[..., Any], root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (root / "etc/docker").symlink_to(tmp_path / "outside")
    code, _, error = cli("docker")
    assert code == 78 and "leads out of" in error and os.listdir(tmp_path / "outside") == []


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_or_nothing(root: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """The rename of one of three files fails: the files, and the folders, are as before."""
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


def test_a_file_that_changes_meanwhile_is_not_overwritten(root: Path) -> None:
    (root / "etc/a").write_text("b")
    with pytest.raises(ConfigError, match="changed meanwhile"):
        host.Host(str(root)).write([host.Change("/etc/new", None, ""), host.Change("/etc/a", "a", "A")])
    assert tree(root).keys() == {"etc", "etc/a"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "is not a program"),
        (lambda path: path.chmod(0o644), "is not a program"),
        (lambda path: path.chmod(0o757), "(mode 757) is writable by others than root; chmod go-w"),
        (lambda path: path.parent.chmod(0o777), "(mode 777) is writable by others than root"),
        (lambda path: (os.chown(path, 0, 12), path.chmod(0o775)), "(mode 775) is writable by others than root"),
    ],
)
@pytest.mark.parametrize("name", ["gpushare-runtime", "gpushare-hook"])
def test_programs_that_others_can_change_are_not_written_anywhere(
    cli: Callable[..., Any], root: Path, programs: Path, name: str, spoil: Callable[[Path], Any], message: str
) -> None:
    spoil(programs / name)
    before = tree(root)
    code, _, error = cli("docker")
    assert code == 78 and message in error
    assert tree(root) == before


def test_a_program_of_somebody_else_is_noted(cli: Callable[..., Any], programs: Path) -> None:
    os.chown(programs / "gpushare-hook", 12, 34)
    code, _, error = cli("docker")
    assert code == 0 and f"{programs / 'gpushare-hook'} belongs to uid 12" in error and "gpushare-runtime" not in error


def test_the_resolved_path_is_written(cli: Callable[..., Any], root: Path, programs: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(programs)
    code = main(
        ["runtime", "configure", "docker", "--root", str(root), "--program", str(tmp_path / "link/gpushare-runtime")]
    )
    assert code == 0
    assert docker.entry("", (root / "etc/docker/daemon.json").read_text()) == str(programs / "gpushare-runtime")


def test_of_the_bundle_the_launchers_are_written(
    root: Path, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gpushare is in libexec, beside programs of the same names that start Python for every container."""
    shutil.copytree(programs, tmp_path / "libexec")
    (tmp_path / "libexec" / "gpushare").write_text("")
    (programs / "gpushare").symlink_to("../libexec/gpushare")
    monkeypatch.setattr("sys.argv", [str(programs / "gpushare")])
    assert main(["runtime", "configure", "docker", "--root", str(root)]) == 0
    assert docker.entry("", (root / "etc/docker/daemon.json").read_text()) == str(programs / "gpushare-runtime")
    assert main(["runtime", "configure", "podman", "--root", str(root)]) == 0
    hook = json.loads((root / "etc/containers/oci/hooks.d/gpushare.json").read_text())
    assert hook["hook"]["path"] == str(programs / "gpushare-hook")


def test_what_to_do_next_is_the_last_line(root: Path, programs: Path) -> None:
    program = str(programs / "gpushare-runtime")
    script = "import sys; from gpushare.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "runtime", "configure", "docker", "--dry-run"]
    done = subprocess.run(
        [*command, "--root", str(root), "--program", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.splitlines()[-1] == "gpushare: then run: systemctl reload docker"


def test_other_paths_of_ours_reach_the_runtime(root: Path, programs: Path) -> None:
    program = str(programs / "gpushare-runtime")
    args = ["--config", "/c.yaml", "--state", "/s", "runtime", "configure", "docker"]
    assert main([*args, "--root", str(root), "--program", program]) == 0
    value = json.loads((root / "etc/docker/daemon.json").read_text())
    wanted = ["--gpushare-config", "/c.yaml", "--gpushare-state", "/s"]
    assert value["runtimes"]["gpushare"]["runtimeArgs"] == wanted


def test_profile_is_written_and_never_over_an_edited_file(cli: Callable[..., Any], root: Path) -> None:
    path = root / "etc/gpushare/config.yaml"
    assert cli("--profile", "workstation")[:2] == (0, "create /etc/gpushare/config.yaml\n")
    assert path.read_text() == profiles.text("workstation")
    assert cli("--profile", "workstation")[1] == "nothing to do\n"
    assert cli("docker", "--profile", "cluster")[0] == 0  # nobody has edited it
    assert path.read_text() == profiles.text("cluster")
    path.write_text("version: 1\nmemory_overcommit: 1.5\n")
    before = tree(root)
    code, _, error = cli("docker", "--default", "--profile", "cluster")
    assert (
        code == 78
        and "memory_overcommit 1.5 (profile: 1.0)" in error
        and error.endswith("; without --profile it stays, --force replaces it\n")
    )
    assert tree(root) == before
    assert cli("--profile", "cluster", "--force")[0] == 0
    assert path.read_text() == profiles.text("cluster")


def test_undo_leaves_the_profile_alone(cli: Callable[..., Any], root: Path) -> None:
    cli("docker", "--profile", "cluster")
    assert cli("docker", "--undo", "--profile", "cluster")[0] == 2
    assert cli("docker", "--undo")[0] == 0
    assert (root / "etc/gpushare/config.yaml").read_text() == profiles.text("cluster")


def test_without_an_engine_it_lists_them(cli: Callable[..., Any], root: Path, daemon_json: Path) -> None:
    (root / "usr/sbin").mkdir(parents=True)
    (root / "usr/sbin/dockerd").touch()
    rows = {line.split()[0]: line.split()[1:] for line in cli()[1].splitlines()[1:]}
    assert rows["docker"] == ["/usr/sbin/dockerd", "not", "configured", "-"]
    cli("docker")
    rows = {line.split()[0]: line.split()[1:] for line in cli()[1].splitlines()[1:]}
    assert rows["docker"] == ["/usr/sbin/dockerd", "configured", "/etc/docker/daemon.json"]
    daemon_json.write_text("{")
    code, text, error = cli()
    assert code == 0 and "damaged" in text and "gpushare: docker: /etc/docker/daemon.json:1:2" in error
    assert cli("--undo")[0] == 2


def test_docker_has_no_hooks(cli: Callable[..., Any]) -> None:
    code, _, error = cli("docker", "--hook-only")
    assert code == 78 and "leave out --hook-only" in error


def test_two_daemons_are_configured_and_undone_each_for_itself(
    cli: Callable[..., Any], daemon_json: Path, root: Path
) -> None:
    before = tree(root)
    second = root / "etc/docker/second.json"
    second.write_text("{}")
    cli("docker")
    assert cli("docker", "--config-file", "/etc/docker/second.json")[0] == 0
    configured = daemon_json.read_text()
    assert cli("docker", "--undo", "--config-file", "/etc/docker/second.json")[0] == 0
    assert second.read_text() == "{}" and daemon_json.read_text() == configured
    cli("docker", "--config-file", "/etc/docker/second.json")
    second.unlink()  # that daemon is gone; nobody trips over its record
    assert cli("docker", "--default")[0] == 0 and "second" not in (root / record.path_of("docker")[1:]).read_text()
    assert cli("docker", "--undo")[0] == 0
    after = tree(root)
    assert {name: after[name] for name in after if not name.startswith("var")} == before


def test_unknown_profiles() -> None:
    with pytest.raises(GpushareError):
        profiles.text("other")


class Killed(BaseException):
    """Nothing of ours runs after it, but that descriptors are closed."""


@pytest.mark.parametrize("call", ["makedirs", "chmod", "fchmod", "fsync", "rename", "unlink", "rmdir"])
@pytest.mark.parametrize("during", [(), ("--undo",)])
@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_killed_at_any_step_an_undo_gives_everything_back(
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


def test_a_file_that_another_command_writes_is_waited_for(
    cli: Callable[..., Any], root: Path, daemon_json: Path, programs: Path
) -> None:
    other, full = host._temporary(str(daemon_json))[1], daemon_json.with_name(".daemon.json.gpushare-new")
    os.write(other, b'{"other": 1}')
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(host._temporary, str(daemon_json))
        while f":{os.fstat(other).st_ino} " not in "".join(
            line for line in Path("/proc/locks").read_text().splitlines() if "->" in line
        ):
            assert not second.done()
        os.rename(full, daemon_json)
        os.close(other)
        path, fd = second.result(30)
    os.write(fd, b"mine")
    os.close(fd)
    assert (daemon_json.read_text(), Path(path).read_text()) == ('{"other": 1}', "mine")


def test_a_folder_that_another_command_makes_meanwhile(
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
