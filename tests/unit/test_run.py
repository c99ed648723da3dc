"""gpushare run without effects: its request, program and user; and the namespaces of an unprivileged user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpushare.cli.main import group
from gpushare.cli.run import as_typed, default_name, user_of
from gpushare.cli.run import run as run_command
from gpushare.config import oci_runtime
from gpushare.core import constants
from gpushare.core.errors import CapacityError, GpushareError, KernelError, RequestError
from gpushare.programs import run
from gpushare.programs.runtime import Paths
from gpushare.request import request
from gpushare.request.dialects import gpushare_env
from gpushare.state import storage
from gpushare.system import rootless, syscalls

from tests.unit import pure


def job(*asked: tuple[str, str], name: str = "j", command: tuple[str, ...] = ("true",)) -> run.Job:
    return run.Job(name, command, asked)


def test_flags_and_gpushare_variables_are_the_only_requests() -> None:
    environment = {
        b"GPUSHARE_MEMORY": b"1Gi",
        b"NVIDIA_VISIBLE_DEVICES": b"all",
        b"PATH": b"/bin",
        b"GPU_PORTION": b"1",
    }
    bundle = run.bundle_of(job((constants.ENV_MEMORY, "2Gi")), environment)
    assert dict(bundle.env) == {constants.ENV_MEMORY: "2Gi", constants.ENV_DEVICES: "any"}
    asked = request.resolve(bundle, pure.node(), on_host=True)
    assert asked is not None and asked.memory[0][1].limit_bytes == 2 << 30
    with pytest.raises(RequestError, match=r"root\.path"):
        request.resolve(bundle, pure.node())  # a container must still have its own root


@pytest.mark.parametrize("value", ["0,1", "none"])
def test_named_device_is_kept(value: str) -> None:
    assert (constants.ENV_DEVICES, value) in run.bundle_of(job((constants.ENV_DEVICES, value)), {}).env
    assert (constants.ENV_DEVICES, value) in run.bundle_of(job(), {b"GPUSHARE_DEVICES": value.encode()}).env


def test_command_is_shown_quoted_and_truncated() -> None:
    assert run.bundle_of(job(command=("sh", "-c", "a b")), {}).path == "sh -c 'a b'"
    long = run.bundle_of(job(command=("x" * 9000,)), {}).path
    assert len(long) == 256 and long.endswith("…")
    assert run.bundle_of(job(command=("a\udcff",)), {}).path.isascii()


def test_default_name_is_valid_and_unique() -> None:
    assert default_name("/opt/my train.py") == f"my_train.py-{os.getpid()}"
    assert default_name("../..") == default_name("-") == f"program-{os.getpid()}"
    assert default_name("ünï") == f"_n_-{os.getpid()}"
    with pytest.raises(RequestError, match="not acceptable"):
        run.bundle_of(job(name="a/b"), {})


def test_program_is_found_like_execvp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory, mode in (("first", 0o644), ("second", 0o755), ("third", 0o755)):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "tool").write_text("#!/bin/sh\n")
        (tmp_path / directory / "tool").chmod(mode)
    (tmp_path / "first" / "plain").write_text("")
    path = ":".join(str(tmp_path / name) for name in ("none", "first", "second", "third"))
    monkeypatch.setattr(oci_runtime, "environment", lambda: {b"PATH": path.encode()})
    assert run.find("tool") == str(tmp_path / "second" / "tool")
    for name, code in (("plain", 126), ("missing", 127), (str(tmp_path), 126), (f"{tmp_path}/none", 127), ("", 127)):
        with pytest.raises(run.CannotExecute) as caught:
            run.find(name)
        assert caught.value.exit_code == code, name
    monkeypatch.setattr(oci_runtime, "environment", dict)
    assert run.find("sh") in ("/bin/sh", "/usr/bin/sh")


@pytest.mark.parametrize(
    ("program", "hint"),
    [
        ("docker", "GPUSHARE_MEMORY, docs/docker.md"),
        ("/usr/bin/podman", "GPUSHARE_MEMORY, docs/podman.md"),
        ("nerdctl", "GPUSHARE_MEMORY, docs/engines.md"),
        ("enroot", "Enroot and Pyxis are not supported; docs/recipes.md has"),
    ],
)
def test_launcher_of_containers_is_refused(program: str, hint: str) -> None:
    """Its containers would get whole GPUs, or none. The rule comes before the search for the program."""
    with pytest.raises(RequestError, match=f"^the containers of {os.path.basename(program)} do not get the share"):
        run.start(job(command=(program, "run", "IMAGE")), Paths("/none", "/none"))
    with pytest.raises(RequestError) as refused:
        run.refuse_launcher(program)
    assert hint in refused.value.hint
    run.refuse_launcher("apptainer")
    run.refuse_launcher("bwrap")


def test_errors_name_flags() -> None:
    """One variable's name is a prefix of another's."""
    text = "GPUSHARE_COMPUTE_MODE=soft and GPUSHARE_COMPUTE, NO_GPUSHARE_MEMORY"
    given = [constants.ENV_COMPUTE, constants.ENV_MEMORY]
    assert as_typed(text, given) == "GPUSHARE_COMPUTE_MODE=soft and --compute, NO_GPUSHARE_MEMORY"
    assert as_typed(text, [*given, constants.ENV_COMPUTE_MODE]).startswith("--compute-mode=soft and --compute,")
    options = {option for one in run_command.params for option in one.opts}
    for variable in gpushare_env.ROWS:
        assert as_typed(variable, [variable]) in options


@pytest.mark.parametrize(
    ("words", "variable", "hint"),
    [
        ((), "", "set --memory"),
        (("--compute", "30"), "GPUSHARE_PRIORITY", "set --memory"),
        ((), "GPUSHARE_PRIORITY", "set GPUSHARE_MEMORY"),
        ((), "gpu_share_memory", "set GPUSHARE_MEMORY"),
        ((), "NVIDIA_VISIBLE_DEVICES", "set --memory"),
    ],
)
def test_hints_name_flags_or_variables_of_user(
    words: tuple[str, ...], variable: str, hint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise CapacityError("no room", f"set {constants.ENV_MEMORY}")

    monkeypatch.setattr(os, "environ", {variable: "1"} if variable else {})
    monkeypatch.setattr(run, "start", refuse)
    with pytest.raises(CapacityError) as caught:
        group.main(["--state", str(tmp_path), "run", *words, "--", "true"], standalone_mode=False)
    assert caught.value.hint == hint


def test_user_option_is_parsed() -> None:
    assert user_of("0") == run.User(0, 0, tuple(os.getgrouplist("root", 0)))
    assert user_of("root:daemon")[:2] == (0, 1)
    assert user_of("65000:65001") == run.User(65000, 65001, (65001,))
    for text in ("", "no-such-user", "0:", "0:no-such-group", "-1", "\0", "0:\0"):
        with pytest.raises(RequestError, match="no such"):
            user_of(text)
    for text in ("4294967295", "0:4294967295", "4294967296", "9" * 5000):
        with pytest.raises(RequestError, match="is not an id; use an id below 4294967295"):
            user_of(text)


def test_empty_user_is_refused() -> None:
    """As with `--user "$WHO"` in a script that leaves WHO unset."""
    with pytest.raises(RequestError, match="no such user"):
        group.main(["run", "--user", "", "--", "true"], standalone_mode=False)


def test_misspelt_limit_is_refused() -> None:
    for name in (b"GPUSHAREMEMORY", b"gpushare_memory", b"GPU_SHARE_MEMORY"):
        with pytest.raises(RequestError, match="unknown name; did you mean GPUSHARE_MEMORY"):
            request.resolve(run.bundle_of(job(), {name: b"1Gi"}), pure.node(), on_host=True)


def test_deleted_working_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(RequestError, match="directory of this process: No such file.*; cd to an existing directory"):
        run.start(job(), run.Paths("/none", "/none"))


# Without root


def test_root_is_not_rootless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    assert not rootless.is_rootless() and rootless.state_dir() == constants.STATE_DIR


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (["0", "0", "4294967295"], False),  # root of the host
        (["0", "1000000", "65536"], False),  # of a system container
        (["0", "1000", "1"], True),  # of rootless docker
    ],
)
def test_root_of_one_user_is_rootless_with_a_writable_run(
    monkeypatch: pytest.MonkeyPatch, table: list[str], expected: bool
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    monkeypatch.setattr(rootless, "_uid_map", lambda: table)
    assert rootless.is_rootless() is expected


@pytest.mark.parametrize(
    ("uid", "table", "expected"),
    [
        (1000, ["0", "0", "4294967295"], "/run/user/1000/gpushare"),  # a logged-in user
        (0, ["0", "1000", "1"], "/run/user/1000/gpushare"),  # "root" of rootless podman
        (1000, ["1000", "1000", "1"], "/run/user/1000/gpushare"),  # below gpushare run
        (5, ["0", "1000", "1"], "/run/user/5/gpushare"),  # not in the mapped range
    ],
)
def test_runtime_directory_belongs_to_mapped_user(
    monkeypatch: pytest.MonkeyPatch, uid: int, table: list[str], expected: str
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(rootless, "_uid_map", lambda: table)
    assert rootless.state_dir() == expected


def test_runtime_directory_writable_by_others_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rootless, "is_rootless", lambda: True)
    for mode, good in ((0o700, True), (0o755, True), (0o770, False), (0o1777, False)):
        tmp_path.chmod(mode)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert (rootless.state_dir() == f"{tmp_path}/gpushare") is good, oct(mode)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert rootless.state_dir().startswith("/run/user/")


def test_rootless_state_is_plain_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rootless, "is_rootless", lambda: True)
    state = str(tmp_path / "gpushare")
    assert not storage.is_ready(state)
    storage.prepare(state)
    assert storage.is_ready(state) and os.stat(state).st_dev == os.stat(tmp_path).st_dev
    os.unlink(f"{state}/rootless")
    assert not storage.is_ready(state)  # for root, a directory that is not a mount point has lost its content


def test_missing_user_namespaces_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(kinds: int, what: str) -> None:
        raise syscalls.SyscallError("unshare", what, 1)

    monkeypatch.setattr(syscalls, "unshare", refused)
    with pytest.raises(
        KernelError, match=r"this host does not allow users to make mounts .*Operation not permitted.*sudo"
    ):
        run._enter_user_namespace()


def test_unexecutable_command_has_own_exit_code() -> None:
    assert issubclass(run.CannotExecute, GpushareError) and run.CannotExecute("x").exit_code == 1
