"""apply.py on a container-like process: its view afterwards, the host's unchanged view, and a complete undo."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gpushare.core.errors import GpushareError
from gpushare.core.model import LdEntry
from gpushare.core.ops import DeviceNode, DeviceRule, LdCache, Link, Mount, Op, Plan, ProcMask
from gpushare.inject import apply
from gpushare.system import cgroup, mountns, syscalls

from tests.integration import ns_util, scene
from tests.integration.scene import LIBDIR, RO

base, image, source = scene.base, scene.image, scene.source


def whole_plan(source: Path) -> tuple[Op, ...]:
    private = "/usr/lib/gpushare"
    return (
        Mount(str(source / "share"), private, "dir", RO, "share"),
        Mount(str(source / "real.so"), f"{private}/driver/libcuda-real.so.1", "file", RO, "driver"),
        Mount(str(source / "rw"), f"{private}/rw", "dir", ("nosuid", "nodev", "noexec"), "tenant"),
        Mount(str(source / "shim.so"), f"{LIBDIR}/libcuda.so.535.1", "file", RO, "shim"),
        Link(f"{LIBDIR}/libcuda.so.1", "libcuda.so.535.1", "name"),
        Link(f"{LIBDIR}/libcuda.so", "libcuda.so.1", "name"),
        Mount(str(source / "shim.so"), "/opt/new/directory/file", "file", RO, "deep"),
        DeviceNode(str(source / "nvidia0"), "/dev/nvidia0", 195, 0, False),
        DeviceNode(str(source / "simulated0"), "/dev/nvidia1", 195, 1, True),
        LdCache((LdEntry("libcuda.so.1", f"{LIBDIR}/libcuda.so.1", 0x0303),)),
        ProcMask(()),
    )


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def options(box: ns_util.Sandbox, point: str) -> set[str]:
    """Per-mount options, with "shared" for a shared mount."""
    with open(f"/proc/{box.pid}/mountinfo") as table:
        for line in table:
            fields = line.split(" ")
            if fields[4] == str(box.rootfs) + point:
                tags = {t.split(":")[0] for t in fields[6 : fields.index("-")]}
                return set(fields[5].split(",")) | tags
    raise AssertionError(f"{point} is not mounted")


def errno_of(call: Any) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or 0
    return 0


# The container's view


def test_plan_is_visible_only_in_the_container(image: Path, source: Path) -> None:
    """With its attributes. Mount points are empty files of the container's root, and the second start uses them."""
    host = ns_util.host_mounts()
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", whole_plan(source)))
        assert ns_util.host_mounts() == host
        assert box.enter(lambda: read("/usr/lib/gpushare/limits")) == "the limits"
        assert box.enter(lambda: read("/usr/lib/gpushare/driver/libcuda-real.so.1")) == "the driver"
        assert box.enter(lambda: read(f"{LIBDIR}/libcuda.so")) == "the shim"
        assert box.enter(lambda: read("/opt/new/directory/file")) == "the shim"
        assert box.enter(lambda: os.readlink(f"{LIBDIR}/libcuda.so")) == "libcuda.so.1"
        assert box.enter(lambda: os.stat("/dev/nvidia0").st_rdev) == os.makedev(195, 0)
        assert box.enter(lambda: read("/dev/nvidia1")) == "device state"
        names = {"ro", "rw", "nosuid", "nodev", "noexec", "shared"}
        assert options(box, "/usr/lib/gpushare") & names == {"ro", "nosuid", "nodev"}
        assert options(box, "/usr/lib/gpushare/rw") & names == {"rw", "nosuid", "nodev", "noexec"}
        assert options(box, "/dev/nvidia0") & names == {"rw", "nosuid", "noexec"}
        assert options(box, "/dev/nvidia1") & names == {"rw", "nosuid", "nodev", "noexec"}
        write = box.enter(lambda: errno_of(lambda: open("/usr/lib/gpushare/limits", "w")))
        assert write == 30  # EROFS
        assert box.enter(lambda: errno_of(lambda: open("/usr/lib/gpushare/rw/x", "w"))) == 0
        assert (source / "rw/x").exists()
    left = ns_util.snapshot(image)
    for path in (f"{LIBDIR}/libcuda.so.535.1", "/opt/new/directory/file", "/dev/nvidia0"):
        mode, owner, content = left[path]
        assert (oct(mode), owner, content) == ("0o100644", 0, ns_util.EMPTY)
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", whole_plan(source)))
        assert box.enter(lambda: read(f"{LIBDIR}/libcuda.so.1")) == "the shim"
    assert ns_util.snapshot(image) == left


def test_device_access_is_granted_after_all_mounts(image: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a process in the container could use the device before the shim and its limits are in place."""
    plan = Plan("test", (*whole_plan(source), DeviceRule(195, 0)))
    with ns_util.sandbox(image) as box:
        at_grant: list[str] = []
        monkeypatch.setattr(cgroup, "allow_devices", lambda *_: at_grant.extend(box.mounts()) or at_grant.clear)
        seen = box.apply(plan, lambda applied: at_grant)
        assert seen == box.mounts() and f"{LIBDIR}/libcuda.so.535.1" in seen


# Undo


def test_undo_leaves_nothing(image: Path, source: Path) -> None:
    before = ns_util.snapshot(image)
    with ns_util.sandbox(image) as box:
        mounts, host = box.mounts(), ns_util.host_mounts()
        box.apply(Plan("test", whole_plan(source)), lambda applied: applied.undo())
        assert (box.mounts(), ns_util.host_mounts()) == (mounts, host)
    assert ns_util.snapshot(image) == before


@pytest.mark.parametrize("failing", range(1, 11))
def test_failure_at_any_op_undoes_the_earlier_ops(image: Path, source: Path, failing: int) -> None:
    os.mkfifo(image / "fifo")
    ops = list(whole_plan(source))
    ops.insert(failing, Mount(str(source / "shim.so"), "/fifo", "file", RO, "fails"))
    with ns_util.sandbox(image) as box:
        message = box.refuses(*ops)
        assert message == '"/fifo" is a FIFO where a file must be; remove it from the image'


@pytest.mark.parametrize("survived", range(11))
def test_kill_at_any_op_leaves_the_host_unchanged_and_the_next_start_works(
    image: Path, source: Path, survived: int
) -> None:
    host = ns_util.host_mounts()
    with ns_util.sandbox(image) as box:
        left = [survived]

        def body() -> None:
            def killing(real: Any) -> Any:
                def step(*arguments: Any) -> None:
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left[0] -= 1
                    real(*arguments)

                return step

            for kind in (DeviceNode, LdCache, Link, Mount, ProcMask):
                kind.put = killing(kind.put)  # type: ignore[method-assign]
            apply.apply(Plan("test", whole_plan(source)), box.bundle, box.pid)

        with pytest.raises(ns_util.ChildDied):
            ns_util.in_child(body)
        assert ns_util.host_mounts() == host
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", whole_plan(source)))
        assert box.enter(lambda: read(f"{LIBDIR}/libcuda.so.1")) == "the shim"
    assert ns_util.host_mounts() == host


def test_missing_source_is_reported_before_any_change(image: Path, source: Path) -> None:
    with ns_util.sandbox(image) as box:
        message = box.refuses(*whole_plan(source), Mount(str(source / "gone.so"), "/x", "file", RO, "?"))
        assert 'gone.so": No such file or directory' in message


def test_apply_closes_its_descriptors_and_restores_the_directory(image: Path, source: Path) -> None:
    with ns_util.sandbox(image) as box:

        def body() -> list[bool]:
            os.chdir("/tmp")
            apply.apply(Plan("test", whole_plan(source)), box.bundle, box.pid).undo()
            fds, here, mounts = os.listdir("/proc/self/fd"), os.getcwd(), ns_util.host_mounts()
            applied = apply.apply(Plan("test", whole_plan(source)), box.bundle, box.pid)
            applied.close()
            same = [len(os.listdir("/proc/self/fd")) == len(fds), os.getcwd() == here, ns_util.host_mounts() == mounts]
            return [*same, here == "/tmp"]

        assert ns_util.in_child(body) == [True] * 4


# Invalid processes


def refusal(of: Any) -> str:
    def body() -> str:
        try:
            of()
        except GpushareError as error:
            return str(error)
        return ""

    return str(ns_util.in_child(body))


def test_process_without_own_mount_namespace_is_refused(image: Path) -> None:
    said = refusal(lambda: apply.apply(Plan("test", ()), ns_util.bundle(str(image)), os.getppid()))
    assert "has no mount namespace of its own" in said


def test_exited_process_is_refused(image: Path) -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie: its pid still has an entry in /proc
    said = refusal(lambda: mountns.Namespace(child.pid))
    child.wait()
    assert str(child.pid) in said


# Propagation


def test_mounts_do_not_propagate_to_a_host_that_shares_the_rootfs(image: Path, source: Path) -> None:
    subprocess.run(["mount", "--bind", image, image], check=True)
    subprocess.run(["mount", "--make-shared", image], check=True)
    try:
        host = ns_util.host_mounts()
        with ns_util.sandbox(image, propagates=True) as box:
            box.enter(
                lambda: subprocess.run(["mount", "--bind", image / "etc", image / "tmp"], check=True).returncode, False
            )
            assert ns_util.host_mounts() != host, "the test's premise: a mount in there does reach the host"
            subprocess.run(["umount", image / "tmp"], check=True)
            box.apply(Plan("test", whole_plan(source)))
            assert f"{LIBDIR}/libcuda.so.535.1" in box.mounts()
            assert ns_util.host_mounts() == host
    finally:
        subprocess.run(["umount", image], check=True)


def test_mounts_below_a_shared_source_do_not_propagate_to_it(image: Path, source: Path) -> None:
    share = source / "share"
    subprocess.run(["mount", "-t", "tmpfs", "none", share], check=True)
    try:
        subprocess.run(["mount", "--make-shared", share], check=True)
        for directory in ("driver", "rw"):
            (share / directory).mkdir()
        host = ns_util.host_mounts()
        with ns_util.sandbox(image) as box:
            box.apply(Plan("test", whole_plan(source)))
            assert "/usr/lib/gpushare/rw" in box.mounts()
            assert ns_util.host_mounts() == host
    finally:
        subprocess.run(["umount", share], check=True)


# User namespaces and read-only roots


def test_new_files_belong_to_the_root_of_the_user_namespace(image: Path, source: Path) -> None:
    subprocess.run(["chown", "-hR", "100000:100000", image], check=True)
    os.chmod(image.parent, 0o755)
    for parent in image.parents:
        if str(parent).startswith("/tmp/"):
            os.chmod(parent, 0o755)
    with ns_util.sandbox(image, mapped=100000) as box:
        box.apply(Plan("test", whole_plan(source)))
        assert box.enter(lambda: read(f"{LIBDIR}/libcuda.so.1")) == "the shim"
    owners = {owner for _, owner, _ in ns_util.snapshot(image).values()}
    assert owners == {100000}


def test_dev_of_a_user_namespace_is_written_as_its_root(image: Path, source: Path) -> None:
    """As runc and crun mount it: host root has no id there and may create nothing."""
    for directory in (image, *image.parents):
        if str(directory).startswith("/tmp/"):
            os.chmod(directory, 0o755)
    shim = Mount(str(source / "shim.so"), "/dev/deep/node", "file", RO, "shim")
    with ns_util.sandbox(image, f"mount -t tmpfs -o mode=755 tmpfs {image}/dev", mapped=100000) as box:
        box.apply(Plan("test", (shim,)))
        assert box.enter(lambda: read(shim.target)) == "the shim"
        assert box.enter(lambda: [os.stat("/dev/deep").st_uid, os.stat("/dev/deep").st_gid]) == [100000, 100000]
    assert (os.geteuid(), os.getegid()) == (0, 0)


def test_read_only_root_needs_mount_points(image: Path, source: Path) -> None:
    shim = Mount(str(source / "shim.so"), f"{LIBDIR}/libcuda.so.535.1", "file", RO, "shim")
    with ns_util.sandbox(image, f"mount -o remount,bind,ro {image}") as box:
        message = box.refuses(shim)
        assert "Read-only file system" in message
        assert "create an empty file there in the image" in message
    (image / LIBDIR[1:] / "libcuda.so.535.1").touch()
    with ns_util.sandbox(image, f"mount -o remount,bind,ro {image}") as box:
        box.apply(Plan("test", (shim,)))
        assert box.enter(lambda: read(shim.target)) == "the shim"


# Links over files of the image


def shim_and_link(source: Path) -> tuple[Op, ...]:
    return (
        Mount(str(source / "shim.so"), f"{LIBDIR}/libcuda.so.535.1", "file", RO, "shim"),
        Link(f"{LIBDIR}/libcuda.so.1", "libcuda.so.535.1", "name"),
        Link(f"{LIBDIR}/libcuda.so", "libcuda.so.1", "name"),
    )


@pytest.mark.parametrize("existing", ["same link", "other link", "chain", "file", "dangling", "empty file"])
def test_library_name_leads_to_the_shim_whatever_the_image_has(image: Path, source: Path, existing: str) -> None:
    name = image / LIBDIR[1:] / "libcuda.so.1"
    old = image / LIBDIR[1:] / "libcuda.so.470"
    if existing in ("other link", "chain"):
        old.write_text("an old driver")
    if existing == "chain":
        os.symlink("libcuda.so.470", image / LIBDIR[1:] / "libcuda.so.2")
    texts = {"same link": "libcuda.so.535.1", "other link": f"{LIBDIR}/libcuda.so.470", "chain": "libcuda.so.2"}
    if existing in ("file", "empty file"):
        name.write_text("a driver" if existing == "file" else "")
    else:
        os.symlink(texts.get(existing, "libcuda.so.999"), name)
    before = ns_util.snapshot(image)
    with ns_util.sandbox(image) as box:

        def read_and_undo(applied: apply.Applied) -> list[str]:
            found = [box.enter(lambda n=n: read(f"{LIBDIR}/{n}")) for n in ("libcuda.so.1", "libcuda.so")]
            applied.undo()
            return found

        assert box.apply(Plan("test", shim_and_link(source)), read_and_undo) == ["the shim", "the shim"]
    assert ns_util.snapshot(image) == before


# Messages


def test_message_has_the_kernel_s_reason(image: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tree: int, target: int, what: str) -> None:
        raise syscalls.SyscallError("move_mount", what, 1)

    monkeypatch.setattr(syscalls, "move_mount", refuse)
    with ns_util.sandbox(image) as box:
        message = box.refuses(*whole_plan(source))
        assert message == 'move_mount "/usr/lib/gpushare": Operation not permitted'
