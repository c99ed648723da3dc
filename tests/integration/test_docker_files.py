"""docker and files: commit, cp, volumes, images with a request, builds; and daemon.json while the daemon runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.docker_host import GIB, TWO_GIB, BuildHost, DockerHost, Events, docker_host, total
from tests.integration.test_systemd_cgroups import version_of
from tests.support.engines.base import SLEEP, Refused, Result
from tests.support.engines.docker import IMAGE, configure
from tests.support.engines.image import PROBE
from tests.support.rootfs import mount_points, run, unmount_below

RUNC = ("--runtime", "runc", "--network", "none")
LIBDIR = "/usr/lib/x86_64-linux-gnu"
HAS_GIB = f"{PROBE} | grep '\"total_bytes\": {GIB}'"


# Files


def test_committed_image_gets_a_new_share(docker: DockerHost) -> None:
    """An image committed from a container with a share has gpushare's empty mount points, links and ld.so.cache."""
    daemon = docker.daemon
    with docker.start_with(*TWO_GIB, args=(PROBE,)) as one:
        assert one.wait() == 0
        daemon.must("commit", one.id, "committed")
    try:
        ran = docker.try_run("-e", "GPUSHARE_MEMORY=3Gi", args=(PROBE,), image="committed").answer()
        assert ran["total_bytes"] == 3 * GIB
        found = f"ls -l {LIBDIR}/libcuda.so* /usr/lib/gpushare; ldconfig && ls /"
        plain = daemon.docker("run", "--rm", *RUNC, "committed", "sh", "-c", found)
        assert plain.code == 0, plain.err
        without = daemon.docker("run", "--rm", *RUNC, "committed", PROBE)
        assert json.loads(without.out)["failed"] == "nvmlInit_v2"  # no driver, and no crash
        # `docker commit` keeps the variable as well
        assert docker.try_run(args=(PROBE,), image="committed").answer()["total_bytes"] == 2 * GIB
    finally:
        daemon.docker("rmi", "-f", "committed")


def test_copied_limits_file_has_no_effect(docker: DockerHost, tmp_path: Path) -> None:
    """docker cp writes below the mounts, into the container's own root: the file is invisible, also after a restart."""
    daemon = docker.daemon
    (tmp_path / "limits").write_text("everything")
    with docker.start_with(*TWO_GIB, args=SLEEP) as one:
        daemon.must("cp", f"{tmp_path}/limits", f"{one.id}:/usr/lib/gpushare/limits")
        assert total(one) == 2 * GIB
        daemon.must("cp", f"{one.id}:/usr/lib/gpushare/limits", str(tmp_path / "back"))
        assert (tmp_path / "back").read_text() == "everything"
        # Replacing a mount point unmounts it; the next start mounts it again.
        daemon.must("cp", f"{tmp_path}/limits", f"{one.id}:{LIBDIR}/libcuda.so.535.261.03")
        daemon.must("restart", "--time", "0", one.id)
        assert total(one) == 2 * GIB


def test_host_directory_over_usr_is_refused_and_unchanged(docker: DockerHost, image_root: Path, tmp_path: Path) -> None:
    for target in ("/usr", LIBDIR):
        host = tmp_path / target.rpartition("/")[2]
        run("cp", "-a", f"{image_root}{target}", host)
        before = sorted(path.relative_to(host) for path in host.rglob("*"))
        done = docker.try_run(*TWO_GIB, "-v", f"{host}:{target}", args=(PROBE,))
        assert done.code == 125 and done.out == ""
        assert f'in the volume at "{target}" (on the host: "{host}")' in done.err
        assert sorted(path.relative_to(host) for path in host.rglob("*")) == before


def test_target_in_a_shared_volume_is_refused(docker: DockerHost, tmp_path: Path) -> None:
    """A mount over a propagating volume would appear on the host, and stay there after the container."""
    run("mount", "-t", "tmpfs", "gpushare-test", tmp_path)
    try:
        run("mount", "--make-shared", tmp_path)
        (tmp_path / "v").mkdir()
        volume = f"{tmp_path}/v:/usr/lib/gpushare"
        done = docker.try_run(*TWO_GIB, "-v", f"{volume}:rshared", args=(PROBE,))
        assert done.code == 125 and "would appear on the host" in done.err and str(tmp_path / "v") in done.err
        for options in (f"{volume}:rslave", f"{tmp_path}/v:/data:rshared"):
            assert docker.try_run(*TWO_GIB, "-v", options, args=(PROBE,)).answer()["total_bytes"] == 2 * GIB
        assert [point for point in mount_points() if point.startswith(f"{tmp_path}/")] == []
    finally:
        unmount_below(tmp_path)


# Images


@pytest.fixture(scope="module")
def asking(_docker_host: DockerHost) -> str:
    return _docker_host.load("asking", "ENV GPUSHARE_MEMORY=1Gi", "USER 1000", f'CMD ["{PROBE}"]')


def test_image_s_request_is_a_default(docker: DockerHost, asking: str) -> None:
    for options, expected in (((), GIB), (TWO_GIB, 2 * GIB)):
        assert docker.try_run(*options, image=asking, args=()).answer()["total_bytes"] == expected


def test_image_request_for_all_devices_is_granted(docker: DockerHost) -> None:
    image = docker.load("all", "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    answer = docker.try_run(image=image, args=(PROBE,)).answer()
    assert (answer["devices"], answer["total_bytes"]) == (2, 16 * GIB)
    with docker.start_with(*TWO_GIB, "-e", "NVIDIA_VISIBLE_DEVICES=0", image=image, args=SLEEP) as one:
        assert total(one) == 2 * GIB
        with pytest.raises(Refused):
            docker.start_with(image=image, args=SLEEP)
    nothing = docker.try_run("-e", "NVIDIA_VISIBLE_DEVICES=void", image=image, args=("ls", "/dev/nvidiactl"))
    assert nothing.code != 0


# Builds


@pytest.fixture(scope="module")
def _docker_host(image_root: Path) -> Iterator[DockerHost]:
    with docker_host(image_root, kind=BuildHost) as made:
        yield made


def build(docker: DockerHost, directory: Path, *lines: str, kit: bool = True) -> Result:
    """`kit`: with BuildKit."""
    (directory / "Dockerfile").write_text("\n".join((f"FROM {IMAGE}", *lines)) + "\n")
    words = ("build", "--no-cache", "--network", "none", *(("--progress", "plain") if kit else ()))
    done = docker.daemon.docker(*words, "--tag", "built", str(directory), DOCKER_BUILDKIT=str(int(kit)), timeout_s=120)
    assert docker.node.leases() == []
    return done


def test_steps_of_buildkit_have_the_requested_share(docker: DockerHost, tmp_path: Path) -> None:
    """With docker 26 and newer, which can set BuildKit's runtime; earlier ones start the steps without a share
    (docs/docker.md)."""
    sets_runtime = version_of("dockerd") >= (26, 0)
    done = build(docker, tmp_path, "RUN ! ls -d /usr/lib/gpushare", "ENV GPUSHARE_MEMORY=1Gi", f"RUN {HAS_GIB}")
    assert (done.code == 0) == sets_runtime and ("> [3/3]" in done.err or done.code == 0), done.err
    done = build(docker, tmp_path, "ENV GPUSHARE_MEMORY=99Gi", "RUN true")
    assert (done.code != 0 and "gpushare: no device fits 99 GiB of memory" in done.err) == sets_runtime, done.err


def test_default_runtime_serves_run_and_build(docker: DockerHost, tmp_path: Path) -> None:
    """Without a --runtime option: docker run, and the steps of docker build without BuildKit."""
    answer = Result(0, docker.daemon.must("run", "--rm", "--network", "none", *TWO_GIB, IMAGE, PROBE), "").answer()
    assert answer["total_bytes"] == 2 * GIB
    done = build(docker, tmp_path, "ENV GPUSHARE_MEMORY=1Gi", f"RUN {HAS_GIB}", "RUN ldconfig", kit=False)
    assert done.code == 0, done.err
    assert docker.try_run(image="built", args=(PROBE,)).answer()["total_bytes"] == GIB
    assert docker.daemon.docker("run", "--rm", *RUNC, "built", "sh", "-c", "ldconfig").code == 0


# daemon.json


def test_daemon_reads_our_entry_on_reload(image_root: Path) -> None:
    """The next step that `gpushare runtime configure` prints suffices: a reload. After --undo a restart is necessary,
    because a reload keeps runtimes that were removed from the file."""
    with docker_host(image_root) as docker:
        daemon = docker.daemon
        configure(docker.node, daemon, "--undo")
        daemon.end()
        daemon.start()
        unknown = docker.try_run(*TWO_GIB, args=(PROBE,))
        assert unknown.code == 125 and "gpushare: " not in unknown.err
        configure(docker.node, daemon)
        with Events(daemon, "type=daemon", "event=reload") as reloads:
            daemon.reload()
            assert reloads.next() == "reload"
        assert docker.try_run(*TWO_GIB, args=(PROBE,)).answer()["total_bytes"] == 2 * GIB
