"""The launcher against Python: it may start Python without need, but must never skip a request."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.config import oci_runtime
from gpushare.core.errors import GpushareError
from gpushare.core.model import Config, Policy
from gpushare.programs import commandline
from gpushare.request import oci, request
from gpushare.request.dialects import cdi_devices
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support import launcher
from tests.support.launcher import LOW_LEVEL_RAN, PYTHON_RAN, Installed, script

MANY = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return launcher.install(tmp_path_factory.mktemp("installed"))


# Texts


def needs_python(text: bytes, cri: bool = False) -> bool:
    """Whether Python finds a request, or something that it would refuse."""
    try:
        spec = json.loads(text.decode())
        bundle = oci.bundle_of(oci.State("c", 1, "", "/b", {}), spec, cri)
        return request.mentions(bundle) or cdi_devices.rules_reach(spec)
    except (ValueError, GpushareError, AttributeError):
        return False  # the low-level runtime refuses it too


def spelled(value: Any, choose: Callable[[int], int]) -> str:
    """`value` as JSON in one of its spellings: any character may be an escape."""
    if isinstance(value, str):
        return '"' + "".join(letter(c, choose) for c in value) + '"'
    if isinstance(value, list):
        return "[" + ",".join(spelled(item, choose) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + " , ".join(f"{spelled(k, choose)} :{spelled(v, choose)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def letter(c: str, choose: Callable[[int], int]) -> str:
    how = choose(12)
    if c == "/" and how == 0:
        return "\\/"
    if how == 1 or c in '"\\' or ord(c) < 32:
        units = c.encode("utf-16-be", "surrogatepass")
        codes = (int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2))
        return "".join("\\u" + (f"{code:04x}" if choose(2) else f"{code:04X}") for code in codes)
    return c


WORDS = (
    "GPUSHARE_MEMORY", "GPUSHARE_", "gpushare_devices", "Gpu\u017fhare_Memory", "NVIDIA_VISIBLE_DEVICES",
    "nv\u0131dia_visible_devices", "gpushare.io/memory", "app.gpushare.io/devices", "gpushare.io", "GPUSHARE.IO/x",
    "/var/run/nvidia-container-devices/0", "/dev/nvidia0", "/dev/nvidiactl", "/dev/null", "PATH", "HOME", "<&>",
)  # fmt: skip
texts = st.one_of(st.sampled_from(WORDS), st.text(max_size=12))
names = st.one_of(texts, st.tuples(texts, texts).map("".join))
specs = st.fixed_dictionaries(
    {
        "process": st.fixed_dictionaries({"env": st.lists(st.tuples(names, texts).map("=".join), max_size=4)}),
        "annotations": st.dictionaries(names, texts, max_size=3),
        "mounts": st.lists(st.fixed_dictionaries({"destination": names, "source": texts}), max_size=3),
        "linux": st.fixed_dictionaries({"devices": st.lists(st.fixed_dictionaries({"path": names}), max_size=2)}),
    }
)


@MANY
@given(spec=specs, data=st.data())
def test_request_in_any_spelling_starts_python(installed: Installed, spec: dict[str, Any], data: st.DataObject) -> None:
    seed = data.draw(st.randoms(use_true_random=False))
    text = spelled(spec, lambda n: seed.randrange(n)).encode("utf-8", "surrogatepass")
    state = installed.bundle(text)
    if needs_python(text):
        assert installed.hook("prestart", state) == PYTHON_RAN
        assert installed.runtime("create", "-b", str(installed.directory / "bundle"), "c")[0] == PYTHON_RAN


PLAIN = json.dumps(
    {
        "process": {"env": ["PATH=/bin", "OPTS=\u003c\u0026\u003e", "LANG=de", "X=\\u0022"]},
        "annotations": {"org.example/x": "\n\t"},
        "mounts": [{"destination": "/proc", "type": "proc"}],
    }
).encode()


def test_container_without_request_does_not_start_python(installed: Installed) -> None:
    state = installed.bundle(PLAIN.replace(b"<", b"\\u003c"))
    for stage in ("prestart", "createRuntime", "poststop"):
        assert installed.hook(stage, state) == 0
    bundle = str(installed.directory / "bundle")
    for words in (["create", "-b", bundle, "c"], ["--log=/l", "run", "--bundle=" + bundle, "c"], ["delete", "c"]):
        assert installed.runtime(*words) == (LOW_LEVEL_RAN, "".join(f"{word}\n" for word in words).encode())
    assert installed.runtime("create", "c", cwd=installed.directory / "bundle")[0] == LOW_LEVEL_RAN


@pytest.mark.parametrize("trigger", request.RAW_TRIGGERS)
def test_trigger_in_any_case_starts_python(installed: Installed, trigger: str) -> None:
    for text in (trigger, trigger.upper(), trigger.lower(), f"x{trigger}y"):
        state = installed.bundle(json.dumps({"annotations": {"a": text}}).encode())
        assert installed.hook("prestart", state) == PYTHON_RAN


DEVICES = (
    b'"path": "/dev/gpu", "major": 195, "minor": 0', b'"path":"/dev/gpu","major":195,"minor":0',
    b'"path": "dev/./nvidia0"', b'"major": 1, "major"\t:\r\n195, "minor": 0', b'"path": "/dev//nvidia0"',
    b'"path": "/dev/x/../nvidia0"',
)  # fmt: skip
OTHERS = (b'"major": 1, "minor": 195', b'"major": 19, "minor": 5', b'"major"', b'"major":19')


@pytest.mark.parametrize("device", [*DEVICES, *OTHERS], ids=bytes.decode)
def test_device_under_another_name_starts_python(installed: Installed, device: bytes) -> None:
    spec = b'{"linux": {"devices": [{"type": "c", %s}]}}' % device
    installed.bundle(spec)
    ran = installed.runtime("create", "c", cwd=installed.directory / "bundle")[0]
    assert (needs_python(spec), ran) == ((True, PYTHON_RAN) if device in DEVICES else (False, LOW_LEVEL_RAN))


SANDBOX = {"io.kubernetes.cri.container-type": "sandbox", "main.gpushare.io/memory": "1Gi"}


def compact(spec: dict[str, Any]) -> bytes:
    """As Go writes it."""
    return json.dumps(spec, separators=(",", ":")).encode()


def test_sandbox_does_not_start_python_despite_request(installed: Installed) -> None:
    spec = {"process": {"env": ["GPUSHARE_MEMORY=1Gi"]}, "annotations": SANDBOX}
    assert not needs_python(compact(spec), cri=True)
    state = installed.bundle(compact(spec))
    assert installed.hook("createRuntime", state, "--cri") == 0
    create = ("create", "-b", str(installed.directory / "bundle"), "c")
    assert installed.runtime(*create, name="gpushare-runtime-cri")[0] == LOW_LEVEL_RAN
    words = ["--gpushare-cri", f"--gpushare-config={installed.config}"]
    state_dir = f"--gpushare-state={installed.directory / 'state'}"
    assert installed.run("gpushare-runtime", *words, state_dir, *create)[0] == LOW_LEVEL_RAN


def test_sandbox_without_cri_starts_python(installed: Installed) -> None:
    spec = {"process": {"env": ["GPUSHARE_MEMORY=1Gi"]}, "annotations": SANDBOX}
    assert installed.hook("createRuntime", installed.bundle(compact(spec))) == PYTHON_RAN
    create = ("create", "-b", str(installed.directory / "bundle"), "c")
    assert installed.runtime(*create)[0] == PYTHON_RAN


def test_cri_name_is_passed_to_python(installed: Installed) -> None:
    program = installed.directory / "libexec" / "gpushare-runtime"
    before = program.read_text()
    script(program, 'echo "$@"')
    try:
        for name, flag in (("gpushare-runtime-cri", "--gpushare-cri "), ("gpushare-runtime", "")):
            assert installed.run(name, "--new", "create")[1].decode() == f"{flag}--new create\n"
    finally:
        program.write_text(before)


WORDS = compact(SANDBOX).decode()[1:].partition(",")[0]


@pytest.mark.parametrize(
    "spec",
    [
        {"annotations": {**SANDBOX, "io.kubernetes.cri.container-type": "container"}},
        {"annotations": {**SANDBOX, "io.kubernetes.cri.container-type": "Sandbox"}},
        {"annotations": {"IO.kubernetes.cri.container-type": "sandbox", "gpushare.io/memory": "1Gi"}},
        {"process": {"env": ["GPUSHARE_MEMORY=1Gi", WORDS]}},
        {"process": {"env": ["GPUSHARE_MEMORY=1Gi", f"A={{{WORDS}}}"]}},
        {"annotations": {WORDS: WORDS, "gpushare.io/memory": "1Gi"}},
        {"annotations": SANDBOX, "linux": {"devices": [{"path": "/dev/nvidia0"}]}},
        {"annotations": SANDBOX, "linux": {"devices": [{"path": "/dev/gpu", "major": 195}]}},
        {"annotations": SANDBOX, "mounts": [{"destination": "dev/./NVIDIA0"}]},
        {"annotations": SANDBOX, "linux": {"resources": {"devices": [{"allow": True, "type": "c", "access": "rw"}]}}},
        {"annotations": {**SANDBOX, "gpushare.io/applied": "{}"}},
        {"annotations": {**SANDBOX, "io.kubernetes.cri-o.ContainerType": "container"}},
        {"annotations": {**SANDBOX, "run.oci.hooks.stdout": "/x"}},
        {"annotations": {**SANDBOX, "run.oci.hooks.stderr": "/x"}},
    ],
    ids=str,
)
def test_imitated_sandbox_starts_python(installed: Installed, spec: dict[str, Any]) -> None:
    assert installed.hook("createRuntime", installed.bundle(compact(spec)), "--cri") == PYTHON_RAN


@pytest.mark.parametrize("escape", ["\\u0047", "\\u005F", "\\u005f", "\\u0030", "\\u002e", "\\/"])
def test_escaped_letters_start_python(installed: Installed, escape: str) -> None:
    assert installed.hook("prestart", installed.bundle(b'{"a": "' + escape.encode() + b'"}')) == PYTHON_RAN


def test_unreadable_or_large_config_starts_python(installed: Installed) -> None:
    directory = installed.directory / "odd"
    directory.mkdir()
    state = json.dumps({"id": "c", "pid": 1, "bundle": str(directory)}).encode()
    path = directory / "config.json"

    def both() -> set[int]:
        return {installed.hook("prestart", state), installed.runtime("create", "-b", str(directory), "c")[0]}

    assert both() == {PYTHON_RAN}
    os.mkfifo(path)
    assert both() == {PYTHON_RAN}
    path.unlink()
    path.mkdir()
    assert both() == {PYTHON_RAN}
    path.rmdir()
    path.write_bytes(b'{"a": "' + b"x" * (1 << 20) + b'"}')
    assert both() == {PYTHON_RAN}
    path.write_bytes(b"{}")
    assert both() == {0, LOW_LEVEL_RAN}


# The hook's state


@pytest.mark.parametrize(
    "state",
    [
        b"", b"{", b"[]", b"null", b'{"id": "c"}', b'{"bundle": 1}', b'{"bundle": ""}', b'{"bundle": "relative"}',
        b'{"bundle": "BUNDLE", "bundle": "BUNDLE"}', b'{"bundle": "BUNDLE", "bundlePath": "/x"}',
        b'{"bun\\u0064le": "/x", "bundle": "BUNDLE"}', b'{"bundle": "BUNDLE"} x', b'{"bundle": "BUNDLE"',
        b'{"bundle": "BUNDLE\\u0041"}', b'{"bundle": "BUNDLE\\\\"}',
        b'{"a": {"b": ["}", {"bundle": "BUNDLE"}]}}', b'{"bundle": "BUNDLE"\0}',
    ],
)  # fmt: skip
def test_unclear_state_is_passed_to_python_unchanged(installed: Installed, state: bytes) -> None:
    installed.bundle(PLAIN)
    state = state.replace(b"BUNDLE", str(installed.directory / "bundle").encode())
    assert installed.run("gpushare-hook", "prestart", stdin=state) == (PYTHON_RAN, state)


def test_bundle_is_found_in_any_state(installed: Installed) -> None:
    bundle = json.loads(installed.bundle(PLAIN))["bundle"]
    state = {"annotations": {"bundle": "/x", 'a"b\\': "{["}, "n": [1, -2.5e3, None, True, [[]], {}], "bundle": bundle}
    for text in (json.dumps(state), json.dumps(state, indent=3), json.dumps(state, separators=(",", ":"))):
        assert installed.hook("prestart", text.encode()) == 0
        assert installed.hook("prestart", text.replace("/", "\\/").encode()) == 0  # as crun 1.28


@pytest.mark.parametrize("stage", ["prestart", "createRuntime", "adopt", "poststop"])
@pytest.mark.parametrize(
    "annotations, prints",
    [
        (b'{"run.oci.hooks.stderr": "/x"}', False),
        (b'{"a": {"b": ["}"]}, "run.oci.hooks.stdout" : 1}', False),
        (b'{"run.oci.hooks.std\\u0065rr": "/x"}', False),
        (b'{"run.oci.hooks.stderr": "/dev/stderr", "run.oci.hooks.stderr": "/x"}', False),
        (b'{"run.oci.hooks.stderr": "/dev\\/stderrs"}', False),
        (b'{"run.oci.hooks.stderr": "\\u002fdev/stderr"}', False),
        (b'{"run.oci.hooks.stderr": "\\/dev\\/stderr", "gpushare.io\\/memory": "<"}', True),
        (b'{"run.oci.hooks.stderr": "/dev/stderr", "\\n": "<"}', True),
        (b'{"a": "run.oci.hooks.stderr"}', True),
        (b'"run.oci.hooks.stderr"', True),
        (b"{}", True),
    ],
)
def test_output_to_annotated_file_is_discarded(
    installed: Installed, stage: str, annotations: bytes, prints: bool
) -> None:
    """The Python program here prints the state, so its output must be discarded."""
    state = (
        installed.bundle(b'{"annotations": {"gpushare.io/memory": "1Gi"}}')[:-1] + b', "annotations": ' + annotations
    )
    for text in (state + b"}", state + b', "unclear": {'):
        code, printed = installed.run("gpushare-hook", stage, stdin=text)
        assert (code, printed) == (PYTHON_RAN, text if prints else b"")


def test_large_state_is_passed_to_python(installed: Installed) -> None:
    state = (
        installed.bundle(b'{"annotations": {"gpushare.io/memory": "1Gi"}}')[:-1] + b', "x": "' + b"y" * 3000000 + b'"}'
    )
    assert installed.run("gpushare-hook", "createRuntime", stdin=state) == (PYTHON_RAN, state)


def test_file_size_limit_of_the_container_is_lifted(tmp_path: Path) -> None:
    """crun runs hooks with the container's limits. A line that is not written keeps the start out of the log."""
    one = launcher.install(tmp_path / "installed")
    script(one.directory / "libexec" / "gpushare-hook", "ulimit -f")
    words = ["prlimit", "--fsize=0:unlimited", str(one.directory / "bin" / "gpushare-hook"), "createRuntime"]
    state = one.bundle(b'{"annotations": {"gpushare.io/memory": "1Gi"}}')
    done = subprocess.run(words, input=state, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"unlimited\n", b"")


@pytest.mark.parametrize("words", [[], ["adopt"], ["prestart", "more"], ["--config"], ["--new", "/x", "prestart"]])
def test_unusual_hook_arguments_start_python(installed: Installed, words: list[str]) -> None:
    assert installed.run("gpushare-hook", *words, stdin=installed.bundle(PLAIN))[0] == PYTHON_RAN


# Command lines

FLAGS = [
    f"{dash}{name}{tail}"
    for name in (
        *commandline.GLOBAL_VALUE, *commandline.GLOBAL_BARE, *commandline.COMMAND_VALUE, *commandline.COMMAND_BARE,
        *commandline.DELETE_BARE, "new", "b/x",
    )
    for dash in ("-", "--")
    for tail in ("", "=/x", "=")
]  # fmt: skip
line_words = st.one_of(
    st.sampled_from(FLAGS),
    st.sampled_from(
        ("create", "run", "restore", "delete", "state", "kill", "c", "--", "-", "asking", "plain", "-b", "--bundle")
    ),
    st.sampled_from(("--bundle=asking", "--bundle=plain", "-b=asking", "--root", "--config=other.json", "held")),
)


@MANY
@given(words=st.lists(line_words, max_size=6))
@example(words=["create", "--bundle=plain", "--bundle=asking", "c"])
def test_launcher_and_python_parse_same_command_line(installed: Installed, words: list[str]) -> None:
    """The launcher executes the low-level runtime directly only where Python would change nothing."""
    here = installed.directory / "lines"
    for name, text in (("asking", b'{"process": {"env": ["GPUSHARE_MEMORY=1Gi"]}}'), ("plain", PLAIN), ("", PLAIN)):
        (here / name).mkdir(parents=True, exist_ok=True)
        (here / name / "config.json").write_bytes(text)
    (installed.directory / "state" / "containers" / "held").mkdir(parents=True, exist_ok=True)
    code, output = installed.runtime(*words, cwd=here)
    call = commandline.parse(words)
    if code == LOW_LEVEL_RAN:
        assert output == "".join(f"{word}\n" for word in call.rest or ("",)).encode()
        assert not call.unknown
        if call.command in commandline.STARTING:
            assert not needs_python((here / call.bundle / call.config_name).read_bytes())
        if call.command == "delete":
            assert call.container_id != "held"
    else:
        assert code == PYTHON_RAN
        assert call.unknown or call.command in commandline.HANDLED or "--" in words


# The launcher's record of the low-level runtime


def test_stale_or_foreign_runtime_record_is_ignored(installed: Installed, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    config = tmp_path / "config.yaml"
    config.write_text("version: 1\n")
    words = ["--gpushare-config", str(config), "--gpushare-state", str(state), "state", "c"]

    def ran() -> int:
        return installed.run("gpushare-runtime", *words)[0]

    assert ran() == PYTHON_RAN
    oci_runtime.remember(str(config), str(state), Config(runtime=str(installed.directory / "low-level")))
    assert ran() == LOW_LEVEL_RAN
    file = state / oci_runtime.FILE
    good = file.read_text()
    for bad in (
        good.replace(f"version {oci_runtime.VERSION}", "version 1"),
        good[:-12],
        "",
        good * 200,
    ):
        file.write_text(bad)
        assert ran() == (PYTHON_RAN if bad != good * 200 else LOW_LEVEL_RAN)
    file.write_text(good)
    file.chmod(0o666)
    assert ran() == PYTHON_RAN
    file.chmod(0o644)
    os.chown(file, 1234, 0)
    assert ran() == PYTHON_RAN
    os.chown(file, 0, 0)
    assert ran() == LOW_LEVEL_RAN
    config.write_text("version: 1 # edited\n")
    assert ran() == PYTHON_RAN
    config.unlink()
    assert ran() == PYTHON_RAN


def test_recorded_runtime_runs_every_command_without_python(installed: Installed, tmp_path: Path) -> None:
    state, bundle = tmp_path / "state", tmp_path / "bundle"
    state.mkdir()
    bundle.mkdir()
    (bundle / "config.json").write_bytes(PLAIN)
    config = Config(runtime=str(installed.directory / "low-level"), policy=Policy(privileged_containers=()))
    oci_runtime.remember("/none.yaml", str(state), config)
    own = ("--gpushare-config=/none.yaml", f"--gpushare-state={state}")
    starts = (["create", "c"], ["--log", "/l", "run", "c"], ["restore", "c"])
    for words in (*starts, ["state", "c"], ["start", "c"], ["kill", "c", "9"], ["delete", "c"], ["exec", "c", "ls"]):
        assert installed.run("gpushare-runtime", *own, *words, cwd=bundle)[0] == LOW_LEVEL_RAN


@pytest.mark.parametrize("name", ["gpushare-runtime", "gpushare-runtime-cri"])
@pytest.mark.parametrize("gone", [Path.unlink, lambda path: path.chmod(0o644)], ids=["removed", "not executable"])
def test_python_gets_the_whole_line_if_the_recorded_runtime_is_gone(
    tmp_path: Path, name: str, gone: Callable[[Path], object]
) -> None:
    """As after an upgrade that moves runc: Python finds another one, and writes a new record."""
    one = launcher.install(tmp_path / "installed")
    script(one.directory / "libexec" / "gpushare-runtime", 'echo "$@"')
    gone(one.directory / "low-level")
    own = f"--gpushare-config={one.config} --gpushare-state={one.directory / 'state'}"
    cri = "--gpushare-cri " if name.endswith("-cri") else ""
    assert one.runtime("--root", "/r", "state", "c", name=name) == (0, f"{cri}{own} --root /r state c\n".encode())


def test_policy_for_all_containers_always_starts_python(installed: Installed, tmp_path: Path) -> None:
    state = installed.bundle(PLAIN)
    config = tmp_path / "config.yaml"
    assert installed.hook("prestart", state, "--config", str(config)) == 0  # no file, no policy
    config.write_text("version: 1\n")
    assert installed.hook("prestart", state, "--config", str(config)) == PYTHON_RAN  # no program has read the file yet
