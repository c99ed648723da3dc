"""docs/recipes.md: Slurm's own daemons, whose jobs share one simulated GPU by its memory."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support.debian import RELEASES, Debian
from tests.support.rootfs import run

from .conftest import limits, section

HOST, USERS = "gpushare-matrix", ("alice", "bob")
SMI = "/srv/driver/usr/bin/nvidia-smi"
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
# The rest of the configuration of a site. No job gets a cgroup here, and the processors are more than there are.
SITE = f"""\
ClusterName=gpushare
SlurmctldHost={HOST}
SlurmUser=slurm
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def recipe(language: str) -> str:
    (text,) = section("docs/recipes.md", "Slurm", language)
    return text


@pytest.fixture(params=RELEASES)
def cluster(request: pytest.FixtureRequest, with_gpushare: Callable[..., Debian]) -> Debian:
    """A cluster of one node, with two ordinary users who are not logged in."""
    debian = with_gpushare(request.param, "slurm", PACKAGES)
    lines = recipe("text").replace("NodeName=node1", f"NodeName={HOST} CPUs=8")
    debian.put("/etc/slurm/slurm.conf", lines + SITE)
    debian.put("/etc/slurm/prolog.sh", recipe("bash"), 0o755)
    if request.param != "bookworm":  # slurmd 23.11 and newer loads a cgroup plugin even if no job gets a cgroup
        debian.put("/etc/slurm/cgroup.conf", "CgroupPlugin=disabled\n")
    for user in USERS:
        debian.run("useradd", "--create-home", user)
    for name, owner in (("slurm/slurmctld", "slurm"), ("slurm/slurmd", "root")):
        debian.run("install", "-d", "-o", owner, "-g", owner, f"/var/lib/{name}")
    debian.run("install", "-d", "-o", "munge", "-g", "munge", "/run/munge")
    # Slurm resolves its own port with AI_ADDRCONFIG, for which 127.0.0.1 alone is no address
    run("nsenter", "--target", str(debian.pid), "--net", "ip", "address", "add", "127.0.0.2/32", "dev", "lo")
    debian.start("runuser", "-u", "munge", "--", "munged", "--foreground")
    debian.until(lambda: debian.call("munge", "--no-input").returncode == 0, "munged")
    debian.start("slurmctld", "-D")
    debian.start("slurmd", "-D")
    debian.until(lambda: "idle" in debian.call("sinfo", "--noheader", "--format=%t").stdout, "the node")
    return debian


def as_user(user: str) -> tuple[str, ...]:
    return ("runuser", "-u", user, "--")


def job(debian: Debian, user: str) -> str:
    """Submit the command of the page with a program that shows its GPU and keeps it busy; return the job's number."""
    found = re.fullmatch(r"srun (--\S+) (gpushare run .* --) python train\.py\n", recipe("sh"))
    assert found, recipe("sh")
    script = f"{found[2]} sh -c '{SMI}; exec busy --seconds 600'"
    submit = ("sbatch", "--parsable", f"--chdir=/home/{user}", "--output=%j.out", found[1], f"--wrap={script}")
    return debian.run(*as_user(user), *submit).strip()


def state(debian: Debian, number: str) -> str:
    return debian.run("scontrol", "--oneliner", "show", "job", number).partition(" JobState=")[2].split()[0]


def shares(debian: Debian, user: str) -> list[int]:
    return sorted(limits(debian, *as_user(user)).values())


def seen(debian: Debian, user: str, number: str) -> list[str]:
    """The sizes in MiB of the GPUs that the program of a job saw."""
    path = debian.path / f"home/{user}/{number}.out"
    return re.findall(r"/ +(\d+)MiB", path.read_text() if path.exists() else "")


def test_jobs_share_one_gpu_and_the_third_waits(cluster: Debian) -> None:
    users = ("alice", "bob", "alice")
    jobs = [job(cluster, user) for user in users]
    for user, number in zip(users, jobs[:2]):
        cluster.until(lambda: seen(cluster, user, number) == ["8192"], f"job {number}")  # noqa: B023
        cluster.until(lambda: shares(cluster, user) == [8], f"the share of {user}")  # noqa: B023
    assert [state(cluster, one) for one in jobs] == ["RUNNING", "RUNNING", "PENDING"]
    assert "Resources" in cluster.run("squeue", "--noheader", f"--jobs={jobs[2]}", "--format=%r")
    cluster.run(*as_user("bob"), "scancel", jobs[1])
    cluster.until(lambda: state(cluster, jobs[2]) == "RUNNING", "the third job")
    cluster.until(lambda: shares(cluster, "alice") == [8, 8] and shares(cluster, "bob") == [], "the third share")
    cluster.run(*as_user("alice"), "scancel", jobs[0], jobs[2])
    cluster.until(lambda: shares(cluster, "alice") == [], "the end of all shares")


def test_job_that_asks_gpushare_for_too_much_fails_with_the_reason(cluster: Debian) -> None:
    command = ("srun", "--gres=gpumem:8", "gpushare", "run", "--memory", "17Gi", "--", "true")
    done = cluster.call(*as_user("alice"), *command)
    assert done.returncode and "17 GiB" in done.stderr and "gpushare: " in done.stderr, done.stderr
