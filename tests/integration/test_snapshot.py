"""Python from a snapshot (docs/internals/snapshot.md): its contents from the process that made it, and what it must not
contain. All other tests here use it, if `make build` could make it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.host import BUILD, TREE, WITHOUT_SNAPSHOT, Node, write_config
from tests.support.runc import Container

pytestmark = pytest.mark.skipif(WITHOUT_SNAPSHOT, reason="no snapshot: SNAPSHOT=no, or not Python 3.11")
MakeContainer = Callable[..., Container]
SNAPSHOT = BUILD / "libexec" / "snapshot"
STATIC = BUILD / "snapshot" / "python"  # the interpreter that writes it
ORDER = BUILD / "snapshot" / "order"  # order of objects in memory; a file of four bytes has none
LIBRARY = sysconfig.get_path("stdlib")
PAGE = 1 << 16  # of snapshot.c: where the pool begins in the file
SHARE = {"GPUSHARE_MEMORY": "1Gi"}


def write(file: Path, tree: Path = TREE, order: Path = ORDER, before: Sequence[str] = (), **options: Any) -> Path:
    """Write a snapshot of the modules of `tree`."""
    command = [*before, tree / "hook/snapshot/write", STATIC, LIBRARY, order, file]
    subprocess.run(command, cwd=tree, check=True, **options)
    return file


def copied(directory: Path) -> Path:
    """A tree with its own sources."""
    shutil.copytree(TREE / "hook", directory / "hook")
    return directory


@pytest.fixture
def with_snapshot(tmp_path: Path) -> Callable[[Path | None], Path]:
    """Return the directory of copied programs with another snapshot."""

    def put(snapshot: Path | None) -> Path:
        root = tmp_path / "programs"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(BUILD / "bin", root / "bin", symlinks=True)
        (root / "libexec").mkdir()
        for name in ("gpushare-hook", "gpushare-runtime"):
            shutil.copy2(BUILD / "libexec" / name, root / "libexec" / name)
        if snapshot:
            shutil.copy2(snapshot, root / "libexec" / "snapshot")
        return root / "bin"

    return put


def waiting(program: Path) -> subprocess.Popen[bytes]:
    """Start a hook that waits for its state on standard input."""
    return subprocess.Popen(
        ["/gpushare-hook", "poststop"], executable=program, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def test_start_runs_only_launcher_and_snapshot(node: Node, tmp_path: Path) -> None:
    assert node.cli("refresh").returncode == 0
    trace, hook = tmp_path / "trace", node.hook()
    words = ["--config", hook.config, "--state", hook.state, "prestart"]
    subprocess.run(
        ["strace", "-f", "-e", "trace=execve,openat", "-o", trace, hook.program, *words],
        input=b'{"ociVersion":"1.0.2","id":"c","status":"creating","pid":1,"bundle":"/nowhere"}',
        stderr=subprocess.DEVNULL,
    )
    lines = trace.read_text()
    programs = re.findall(r'execve\("([^"]*)"', lines)
    assert [Path(path).name for path in programs] == ["gpushare-hook", "snapshot"]
    assert not re.findall(r'"[^"]*\.(?:pyc?|so[.0-9]*|pack)"', lines)


@pytest.fixture(params=[0, 999])
def last_access(request: pytest.FixtureRequest) -> Iterator[None]:
    """Modules of Python that were last read at a time with this fraction of a second."""
    modules = [Path(LIBRARY, name) for name in ("encodings", "encodings/__init__.py")]
    before = [one.stat() for one in modules]
    for one, found in zip(modules, before):
        os.utime(one, ns=(1_700_000_000_000_000_000 + request.param, found.st_mtime_ns))
    yield
    for one, found in zip(modules, before):
        os.utime(one, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.usefixtures("last_access")
def test_builds_are_reproducible(tmp_path: Path) -> None:
    """In another directory, at another time, with another environment; Python makes an object for each number above
    256, such as those of a last access."""
    there = copied(tmp_path / "elsewhere")
    environment = {"HOME": "/nowhere", "LANG": "de_DE.UTF-8", "PYTHONHASHSEED": "7", "PYTHONPATH": "/tmp"}
    hung_up = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)  # like nohup
    other = write(tmp_path / "other", there, env=environment, stdin=subprocess.DEVNULL, preexec_fn=hung_up)
    assert other.read_bytes() == SNAPSHOT.read_bytes()


def test_builds_in_a_container_are_the_same(tmp_path: Path) -> None:
    """The first processes of a PID namespace have numbers for which Python makes no object."""
    other = write(tmp_path / "other", before=("unshare", "--pid", "--fork"))
    assert other.read_bytes() == SNAPSHOT.read_bytes()


def test_module_that_cannot_be_imported_ends_the_build(tmp_path: Path) -> None:
    """Only a host that lacks something builds without a snapshot: wrong modules would go unnoticed."""
    tree = copied(tmp_path / "tree")
    (tree / "hook/gpushare/core/quantity.py").write_text("import nothing_like_this\n")
    (tmp_path / "made").mkdir()
    for file in (BUILD / "snapshot").glob("*.o"):
        shutil.copy(file, tmp_path / "made")
    (source,) = (BUILD / "snapshot").glob("Python-*")
    (tmp_path / "made" / source.name).symlink_to(source)
    command = ["hook/snapshot/make", sys.executable, tmp_path / "made", tmp_path / "snapshot"]
    done = subprocess.run(command, cwd=tree, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and f"{tmp_path}/made/log has the messages" in done.stderr
    assert "No module named 'nothing_like_this'" in (tmp_path / "made/log").read_text()
    assert not (tmp_path / "snapshot").exists() and not (tree / "snapshot.new").exists()


def test_training_is_repeatable() -> None:
    """Also as a job in the background, which ignores SIGINT: then Python does not handle it."""
    script = 'trap "" INT; umask 077; exec "$0" -m tools.train build/snapshot/sparse.snapshot'
    again = subprocess.run(
        ["/bin/sh", "-c", script, sys.executable], cwd=TREE, stdout=subprocess.PIPE, check=True
    ).stdout
    assert memoryview(again).cast("I").tolist() == memoryview(ORDER.read_bytes()).cast("I").tolist()


def test_training_leaves_no_process_when_it_is_killed(tmp_path: Path) -> None:
    """As runc kills a hook that is late; then runc waits until no process has the hook's output."""
    snapshot = tmp_path / "snapshot"
    snapshot.touch()
    start = ["sh", "-c", "echo; exec sleep 600"]
    program = f"import pathlib; from tools import train; train.touched({start}, pathlib.Path({str(snapshot)!r}), 0)"
    with subprocess.Popen([sys.executable, "-c", program], cwd=TREE, stdout=subprocess.PIPE) as training:
        assert training.stdout and training.stdout.readline() == b"\n"
        training.kill()
        assert training.communicate(timeout=20) == (b"", None)


def test_object_order_reduces_page_faults(
    container: MakeContainer, node: Node, with_snapshot: Callable[..., Path], tmp_path: Path
) -> None:
    """Page faults of the process that executes the low-level runtime, which is `true` here."""
    none = tmp_path / "none"
    none.write_bytes(b"\xff" * 4)
    write_config(node.config, node.driver_root, runtime={"path": shutil.which("true")})
    faults = []
    for order in (none, ORDER):
        programs = with_snapshot(write(tmp_path / "snapshot", order=order))
        for _ in range(2):  # the first compiles the configuration, in the ordinary program
            one = container(["true"], env=SHARE)
            runtime = [programs / "gpushare-runtime", *node.runtime()[1:]]
            start = subprocess.Popen([*runtime, "create", "--bundle", one.bundle, one.id])
            _, status, used = os.wait4(start.pid, 0)
            assert status == 0
            start.returncode = 0
        faults.append(used.ru_minflt)
    assert faults[1] < 0.75 * faults[0], faults


def test_snapshot_contains_no_build_paths() -> None:
    data = SNAPSHOT.read_bytes()
    for text in (str(TREE), os.environ.get("HOME", ""), os.uname().nodename):
        assert len(text) < 6 or os.fsencode(text) not in data, text


def test_no_segment_is_writable_and_executable() -> None:
    lines = subprocess.run(["readelf", "-lW", SNAPSHOT], capture_output=True, text=True, check=True).stdout.splitlines()
    segments = [line.split() for line in lines if line.split()[:1] in (["LOAD"], ["GNU_STACK"])]
    assert [words[0] for words in segments].count("GNU_STACK") == 1
    assert not [words for words in segments if "".join(words[6:-1]) in ("RWE", "WE")]


def wait_for_read(one: subprocess.Popen[bytes]) -> None:
    while Path(f"/proc/{one.pid}/syscall").read_text().split()[:2] != ["0", "0x0"]:  # read(0, ...)
        assert one.poll() is None


def test_no_function_for_this_processor_is_in_the_snapshot() -> None:
    """The C library selects functions when the snapshot starts (IFUNC). The file has what the linker wrote, and no word
    of Python's memory is the address of a selected function."""
    linked, written = STATIC.read_bytes(), SNAPSHOT.read_bytes()
    lines = subprocess.run(["readelf", "-rSW", STATIC], capture_output=True, text=True, check=True).stdout
    slots = [int(slot, 16) for slot in re.findall(r"^(\w+) .*R_X86_64_IRELATIVE", lines, re.M)]
    found = re.search(r" python +PROGBITS +\w+ (\w+) (\w+)", lines)
    assert found and len(slots) > 20
    begin, size = (int(word, 16) for word in found.groups())
    after_headers = slice(1 << 10, begin)
    assert linked[after_headers] == written[after_headers]
    assert linked[begin + size :] == written[begin + size : len(linked)]

    one = waiting(SNAPSHOT)
    try:
        wait_for_read(one)
        with open(f"/proc/{one.pid}/mem", "rb", buffering=0) as memory:
            selected = {os.pread(memory.fileno(), 8, slot) for slot in slots}
    finally:
        one.kill()
        one.communicate()
    assert len(selected) > 20
    for part in (written[begin : begin + size], written[-(-len(linked) // PAGE) * PAGE :]):
        assert selected.isdisjoint(part[at : at + 8] for at in range(0, len(part), 8))


def test_snapshot_has_the_functions_that_modules_call() -> None:
    """A static program cannot look up symbols. A missing one fails the start that calls it, with an internal error."""
    called = set(re.findall(r'_libc_call\(\s*"(\w+)"', (TREE / "hook/gpushare/system/syscalls.py").read_text()))
    text = (TREE / "hook/snapshot/snapshot.c").read_text()
    assert called - {"syscall"} and called <= set(re.findall(r'"(\w+)",\s+\1\b', text))


def test_source_stays_small() -> None:
    files = [file for file in (TREE / "hook/snapshot").iterdir() if file.suffix != ".md"]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 500


def test_each_process_has_its_own_canary_and_addresses() -> None:
    """Stack canary and pointer guard are at fixed offsets of the thread block; glibc takes them from AT_RANDOM."""
    seen: list[tuple[str, ...]] = []
    for _ in range(3):
        one = waiting(SNAPSHOT)
        try:
            wait_for_read(one)
            words = ["gdb", "-batch", "-p", str(one.pid)]
            for offset in (0x28, 0x30):
                words += ["-ex", f"p/x *(unsigned long*)($fs_base+{offset})"]
            shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            guards = re.findall(r"^\$\d+ = (0x\w+)", shown, re.M)
            maps = Path(f"/proc/{one.pid}/maps").read_text()
            places = [re.search(rf"^(\w+)-.*{re.escape(name)}", maps, re.M) for name in ("[heap]", "[stack]", "[vdso]")]
            seen.append((*guards, *(place.group(1) for place in places if place)))
        finally:
            one.kill()
            one.communicate()
    assert len(seen[0]) == 5
    for values in zip(*seen):
        assert len(set(values)) == 3, values


@pytest.mark.parametrize("content", [None, b"", b"\x7fELF", b"#!/nowhere\n"])
def test_unusable_snapshot_starts_the_ordinary_program(
    container: MakeContainer, node: Node, with_snapshot: Callable[..., Path], tmp_path: Path, content: bytes | None
) -> None:
    snapshot = None
    if content is not None:
        snapshot = tmp_path / "broken"
        snapshot.write_bytes(content)
        snapshot.chmod(0o755)
    programs = with_snapshot(snapshot)
    runtime = (str(programs / "gpushare-runtime"), *node.runtime()[1:])
    one = container(["true"], env=SHARE, runtime=runtime)
    one.create()
    assert node.leases() == [one.id]


def test_module_missing_from_the_snapshot_restarts_the_start(
    container: MakeContainer, node: Node, with_snapshot: Callable[..., Path], tmp_path: Path
) -> None:
    """The first attempt's changes are undone, so the second finds no lease of its own."""
    tree = copied(tmp_path / "tree")
    (tree / "hook/gpushare/inject/cachefile.py").unlink()
    apply = tree / "hook/gpushare/inject/apply.py"
    text = apply.read_text().replace("import cachefile, ", "import ")
    apply.write_text(text.replace("cachefile.extend", "from . import cachefile; cachefile.extend"))
    programs = with_snapshot(write(tmp_path / "smaller", tree))
    for _ in range(2):  # the first compiles the configuration, in the ordinary program
        one = container(["true"], env=SHARE, hook=node.hook()._replace(program=programs / "gpushare-hook"))
        one.create()
        assert node.leases() == [one.id]
        one.delete()
    decisions = [line["decision"] for line in node.decisions()]
    assert decisions[-3:] == ["refused", "granted", "released"]  # first the module was missing, then it was there


@pytest.mark.parametrize("form", ["--config={}", "--config {}"])
def test_hook_keeps_its_state_when_it_becomes_the_ordinary_program(node: Node, tmp_path: Path, form: str) -> None:
    """The configuration is not compiled yet, so both the snapshot and the ordinary program read the state."""
    (tmp_path / "config.json").write_text('{"process": {"env": ["GPUSHARE_MEMORY=1Gi"]}, "root": {"path": "rootfs"}}')
    state = f'{{"ociVersion": "1.0.2", "id": "c", "status": "creating", "pid": 4194303, "bundle": "{tmp_path}"}}'
    words = [node.hook().program, *form.format(node.config).split(), "--state", node.state, "prestart"]
    done = subprocess.run(words, input=state, capture_output=True, text=True)
    assert "no process has pid 4194303" in done.stderr


def test_missing_ordinary_program_is_an_error_with_one_line(
    container: MakeContainer, node: Node, with_snapshot: Callable[..., Path]
) -> None:
    programs = with_snapshot(SNAPSHOT)
    (programs.parent / "libexec/gpushare-runtime").unlink()
    words = [programs / "gpushare-runtime", *node.runtime()[1:], "create"]
    one = container(["true"], env=SHARE)
    done = subprocess.run([*words, "--bundle", one.bundle, one.id], env={"": "x"}, capture_output=True, text=True)
    assert re.fullmatch(r"gpushare: [^\n]*No such file or directory; install gpushare again\n", done.stderr)


@pytest.mark.parametrize(
    "text", ['{"process": {"env": ["GPUSHARE_MEMORY=1Gi"]}, "root": {"path": "r"}}', "GPUSHARE_MEMORY"]
)
def test_ordinary_program_gets_the_signals_of_the_start(
    node: Node, with_snapshot: Callable[..., Path], tmp_path: Path, text: str
) -> None:
    """Before and after an error, which makes the start ignore them. The low-level runtime would pass them on."""
    programs = with_snapshot(SNAPSHOT)
    ordinary = programs.parent / "libexec" / "gpushare-runtime"
    ordinary.write_text(f"#!{sys.executable} -IS\nprint(open('/proc/self/status').read())")
    (tmp_path / "config.json").write_text(text)
    words = [programs / "gpushare-runtime", *node.runtime()[1:], "create", "--bundle", tmp_path, "c"]

    def block() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if the tests run under nohup
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    done = subprocess.run(words, capture_output=True, text=True, check=True, preexec_fn=block)
    found = re.findall(r"^Sig(?:Blk|Ign):\t(\w+)$", done.stdout, re.M)
    watched = sum(1 << number - 1 for number in (signal.SIGHUP, signal.SIGINT, signal.SIGALRM, signal.SIGTERM))
    assert [int(word, 16) & watched for word in found] == [1 << signal.SIGTERM - 1, 0]


def test_colliding_keys_do_not_delay_the_start(container: MakeContainer, node: Node) -> None:
    """The hash seed is known, so anyone can choose colliding keys. The start stays below its limit of 20 s."""
    code = "print(*(key for key in map(str, range(8_000_000)) if not hash(key) & 4095))"
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # as in snapshot.c
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    keys = done.stdout.split()
    assert len(keys) > 1500

    def flooded(spec: dict[str, Any]) -> None:
        spec["annotations"] = {**spec.get("annotations", {}), **dict.fromkeys(keys, "")}

    one = container(["true"], env=SHARE, edit=flooded, runtime=node.runtime())
    one.create()
    assert node.leases() == [one.id]


def test_closed_standard_descriptors_are_accepted() -> None:
    for closed in ((0,), (1,), (2,), (0, 1, 2)):

        def close(numbers: tuple[int, ...] = closed) -> None:
            for number in numbers:
                os.close(number)

        done = subprocess.run(["/gpushare-hook", "poststop"], executable=SNAPSHOT, preexec_fn=close)
        assert done.returncode == 0  # poststop always succeeds


@pytest.mark.parametrize("closed", [(2,), (1, 2), (0, 1, 2)], ids=str)
def test_refusal_without_standard_error_is_written_into_no_other_file(
    container: MakeContainer, node: Node, closed: tuple[int, ...]
) -> None:
    """Files that a start opens get the free numbers."""
    one = container(["true"], env={"GPUSHARE_MEMORY": "x"})
    before = (one.bundle / "config.json").read_bytes()

    def close() -> None:
        for number in closed:
            os.close(number)

    done = subprocess.run([*node.runtime(), "create", "--bundle", one.bundle, one.id], preexec_fn=close)
    assert done.returncode == 64 and (one.bundle / "config.json").read_bytes() == before
    (kept,) = (node.state / "errors").iterdir()
    assert "GPUSHARE_MEMORY" in kept.read_text()
    assert [path for path in node.state.iterdir() if path.is_file() and b"GPUSHARE_MEMORY" in path.read_bytes()] == []
