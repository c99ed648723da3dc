"""The table of attacks: one row each. `make test-attacks` runs it, `make docs` prints it.

A row of ATTACKS is a function that prepares a container (see scene.py) and its expected outcome for each way; a row of
RACES is a loop of starts while a second container swaps files; a row of ELSEWHERE names tests of other directories that
try the attack with the same strength.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Union

from . import environment, exhaustion, image, inside, owners, races, rules, spec, volumes
from .scene import LIBCUDA, LIBDIR, Scene

# Conditions that a hook must survive, from the project's collection of facts. Each has a row.
FACTS = (
    "leaf link", "parent link", "magic link", "special file", "immutable file", "swapped component", "user mount",
    "read-only user mount", "host's /dev", "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "GCONV_PATH", "TMPDIR", "PYTHON*",
    "PyInstaller's variables", "cwd in the rootfs", "image raises its limit", "CUDA_MPS_PIPE_DIRECTORY",
    "duplicate variables", "NUL, newline, 1 MiB", "config.json of 100 MB", "deep or wrong types", "root.path",
    "id or annotation with ../", "pid reused", "crafted ELF", "crafted ld.so.cache", "crafted ld.so.conf",
    "shared propagation", "mount table growth", "read-only rootfs", "user namespace", "no /etc, distroless, musl",
    "killed hook", "hanging hook", "writable or hard-linked limits", "corrupted usage and pages", "mknod",
    "another tenant's MPS pipe", "device rule",
    "no cgroup of its own",
    "state directory filled",
    "file lease",
    "CAP_SYS_ADMIN",
    "maze of links", "few descriptors",
    "image's text in our lines",
    "slow clients",
    "image claims a pod",
    "resource limits and seccomp",
    "odd files and links of the host",
)  # fmt: skip

# Known CVEs of NVIDIA's toolkit and of runc, by subject.
LINKS = ("CVE-2024-0132", "CVE-2024-0133", "CVE-2024-0135", "CVE-2024-0136", "CVE-2025-23359")
LOOP = ("CVE-2024-0132", "CVE-2025-23359", "CVE-2026-24260", "CVE-2021-30465", "CVE-2024-45310")
CACHE = ("CVE-2025-23267",)
PRELOAD = ("CVE-2025-23266",)
DESCRIPTORS = ("CVE-2024-21626",)
PROC = ("CVE-2025-31133", "CVE-2025-52565", "CVE-2025-52881")
BINARY = ("CVE-2019-5736",)
NAMESPACES = ("CVE-2024-0137",)
CVES = tuple(sorted({*LINKS, *LOOP, *CACHE, *PRELOAD, *DESCRIPTORS, *PROC, *BINARY, *NAMESPACES}))


class Refused(NamedTuple):
    """The container does not start; the message has `words`. `by` "runc": the low-level runtime refuses."""

    words: tuple[str, ...] = ()
    by: str = "gpushare"


class Other(NamedTuple):
    """It may start without a share to check; `words` describe the outcome. The host is checked as always."""

    words: str


Verdict = Union[Refused, Other, None]
SHARE = None  # it starts, and has exactly its request
NO_GPU = Other("starts, no GPU")  # its own files block its programs
ENDS = Other("ends at once")  # its program is invalid
DENIED = Other("starts, opens no GPU")  # without a share


def refused(*words: str) -> Refused:
    return Refused(words)


RUNC = Refused(by="runc")
NULL_IS_CHECKED = "container's /dev/null is invalid"  # runc 1.2.8, 1.3.3 and newer


class Attack(NamedTuple):
    name: str
    facts: tuple[str, ...]
    prepare: Callable[[Scene], None]
    hook: Verdict = SHARE
    runtime: Verdict = SHARE
    cves: tuple[str, ...] = ()

    def expected(self, way: str, low_level: str = "runc") -> Verdict:
        if low_level == "crun" and (self.name, way) in CRUN:
            return CRUN[self.name, way]
        return self.hook if way == "hook" else self.runtime


class Race(NamedTuple):
    name: str
    facts: tuple[str, ...]
    run: Callable[[Scene], races.Counted]
    cves: tuple[str, ...] = ()


class Elsewhere(NamedTuple):
    name: str
    facts: tuple[str, ...]
    tests: tuple[str, ...]  # file below tests, "::", function
    cves: tuple[str, ...] = ()


def both(name: str, facts: str, prepare: Callable[[Scene], None], gets: Verdict = SHARE, *cves: str) -> Attack:
    """A row with one outcome for hook and runtime; `facts` separated by semicolons."""
    return Attack(name, tuple(facts.split("; ")), prepare, gets, gets, cves)


def each(
    name: str, facts: str, prepare: Callable[[Scene], None], hook: Verdict, runtime: Verdict, *cves: str
) -> Attack:
    return Attack(name, tuple(facts.split("; ")), prepare, hook, runtime, cves)


OURS, OF_HOST = image.OURS, "../../../../../../../..{host}"
SPECIAL = "is a "
IMAGE = (
    both("libcuda is a link to /etc/passwd", "leaf link", image.link(LIBCUDA, "/etc/passwd"), refused("is not in a library directory"), *LINKS),
    both("libcuda is a link to a file of the host", "leaf link", image.link(LIBCUDA, "{host}/secret"), refused("is a link to"), *LINKS),
    both("libcuda is a link with very many ..", "leaf link", image.link(LIBCUDA, f"{OF_HOST}/secret"), refused("is a link to"), *LINKS),
    both("libcuda.so.1 is a link to a program", "leaf link", image.link(f"{LIBDIR}/libcuda.so.1", "/bin/bash"), refused("is not in a library directory"), *LINKS),
    both("libcuda.so.1 is a link to nothing", "leaf link", image.link(f"{LIBDIR}/libcuda.so.1", f"{OF_HOST}/none"), SHARE, *LINKS),
    both("libcuda is a link to /proc/self/exe", "magic link", image.link(LIBCUDA, "/proc/self/exe"), refused(), *BINARY, *LINKS),
    both("libcuda is a link through /proc/1/root", "magic link", image.link(LIBCUDA, "/proc/1/root/etc/passwd"), refused(), *LINKS),
    both("gpushare's directory is a link to the host's", "parent link", image.link(OURS, "{host}/share"), refused("link"), *LINKS),
    both("gpushare's directory is a link with very many ..", "parent link", image.link(OURS, f"{OF_HOST}/share"), refused("link"), *LINKS),
    both("gpushare's directory is a link to /etc", "parent link", image.link(OURS, "/etc"), refused("is not in a library directory"), *LINKS),
    both("gpushare's directory is a link to /proc/self/cwd", "magic link; parent link", image.link(OURS, "/proc/self/cwd"), refused(), *LINKS),
    both("gpushare's directory is a loop of links", "parent link", image.link(OURS, "gpushare"), refused("loop"), *LINKS),
    both("libcuda is a FIFO", "special file; hanging hook", image.special(LIBCUDA, "fifo"), refused("is a FIFO where a file must be")),
    both("libcuda is a socket", "special file", image.special(LIBCUDA, "socket"), refused("is a socket where a file must be")),
    both("libcuda is a directory", "special file", image.special(LIBCUDA, "directory"), refused("is a folder where a file must be")),
    both("libcuda is a disk", "special file", image.special(LIBCUDA, "block device"), refused("is a block device where a file must be")),
    both("libcuda.so.1 is a FIFO", "special file; hanging hook", image.special(f"{LIBDIR}/libcuda.so.1", "fifo"), refused("is a FIFO")),
    both("gpushare's directory is a FIFO", "special file", image.special(OURS, "fifo"), refused("is a FIFO where a directory must be")),
    both("the loader's cache is a FIFO", "special file; crafted ld.so.cache; hanging hook", image.cache_is_a_fifo, SHARE, *CACHE),
    both("the loader's cache is a link to the host's", "leaf link; crafted ld.so.cache", image.link(image.CACHE, f"{OF_HOST}/etc/ld.so.cache"), SHARE, *CACHE),
    both("the loader's cache is garbage", "crafted ld.so.cache", image.content(image.CACHE, b"glibc-ld.so.cache1.1" + b"\xff" * 5000), SHARE, *CACHE),
    both("the loader's cache has 16 GiB", "crafted ld.so.cache; hanging hook", image.content(image.CACHE, b"glibc-ld.so.cache1.1", 16 << 30), SHARE, *CACHE),
    both("ld.so.conf is a FIFO", "crafted ld.so.conf; hanging hook", image.special("etc/ld.so.conf", "fifo")),
    both("ld.so.conf includes the host", "crafted ld.so.conf", image.content("etc/ld.so.conf", b"include /proc/self/root/*\n/../../..\n")),
    both("ld.so.preload names a file", "LD_PRELOAD; crafted ld.so.conf", image.content("etc/ld.so.preload", b"/opt/none.so\n"), SHARE, *PRELOAD),
    both("a newer driver is a crafted ELF", "crafted ELF", image.content(f"{image.COMPAT}/libcuda.so.999.1", image.ELF), NO_GPU),
    both("a newer driver is a link to a secret", "leaf link; crafted ELF", image.compat_link_out, SHARE, *LINKS),
    both("a newer driver is a FIFO", "special file; hanging hook", image.special(f"{image.COMPAT}/libcuda.so.999.1", "fifo")),
    both("a newer driver has 20000 names", "hanging hook", image.many_names),
    both("glibc-hwcaps has a libcuda of its own", "image raises its limit", image.own_driver(f"{LIBDIR}/glibc-hwcaps/x86-64-v2", "libcuda.so.1")),
    both("libcuda and another file are one inode", "leaf link", image.hard_link),
    both("the image brings limits without an end", "writable or hard-linked limits; image raises its limit", image.baked_state),
    each("the library directory is immutable", "immutable file", image.immutable, refused("Operation not permitted"), RUNC),
    both("there is no /etc", "no /etc, distroless, musl", image.without_etc),
    both("/etc is a link to the host's", "parent link; no /etc, distroless, musl", image.etc_is_a_link, SHARE, *LINKS, *CACHE),
    both("nodes in the image's /dev are links", "leaf link", image.device_link, refused("/dev/nvidia"), *LINKS, *PROC),
    both("/dev/null is a link to core_pattern", "leaf link", image.swapped_null, SHARE, *PROC),
)  # fmt: skip

V = "would be created in the volume"
VOLUMES = (
    both("a volume over gpushare's directory", "user mount", volumes.over(f"/{OURS}", files=("limits", "rw/usage"))),
    both("a read-only volume over gpushare's directory", "user mount; read-only user mount", volumes.over(f"/{OURS}", "ro", files=("limits",))),
    both("a volume over gpushare's directory, mounts below it", "user mount", volumes.nested),
    both("a file over the limits", "user mount; writable or hard-linked limits", volumes.over_file(f"/{OURS}/limits")),
    both("a file over the real driver", "user mount", volumes.over_file(f"/{OURS}/driver/libcuda-real.so.1")),
    both("a file over the usage page", "user mount; corrupted usage and pages", volumes.over_file(f"/{OURS}/rw/usage")),
    both("a tmpfs over gpushare's directory", "user mount", volumes.tmpfs(f"/{OURS}")),
    both("a tmpfs over gpushare's counters", "user mount; corrupted usage and pages", volumes.tmpfs(f"/{OURS}/rw")),
    both("the host's library directory", "user mount", volumes.host_libraries(), refused(V)),
    both("the host's library directory, read-only", "user mount; read-only user mount", volumes.host_libraries("ro"), refused(V)),
    both("the host's /dev", "host's /dev", volumes.host_dev, refused(V), "CVE-2024-0136"),
    both("the host's /proc, and a link through it", "magic link; user mount", volumes.host_proc, refused(), *PROC),
    both("a volume over /etc", "user mount; no /etc, distroless, musl", volumes.over("/etc", files=("ld.so.cache",)), SHARE, *CACHE),
    both("a library in a user's volume", "user mount", volumes.library_in_a_volume()),
    both("a library in a user's read-only volume", "user mount; read-only user mount", volumes.library_in_a_volume("ro")),
    both("a volume where libcuda is a link out", "leaf link; user mount", volumes.link_in_a_volume, SHARE, *LINKS),
    each("a library in a shared volume", "shared propagation", volumes.shared_library, SHARE, refused("shared")),
    both("a directory of the host, rshared", "shared propagation", volumes.host_root("rshared")),
    both("a directory of the host, rslave", "shared propagation", volumes.host_root("rslave")),
    each("a device of the host over gpushare's node", "user mount", volumes.device_covered, refused("/dev/nvidia0"), SHARE),
)  # fmt: skip

E = environment.obeyed
ENVIRONMENT = (
    both("LD_PRELOAD", "LD_PRELOAD", E("LD_PRELOAD={trap}/evil.so"), SHARE, *PRELOAD),
    both("LD_LIBRARY_PATH", "LD_LIBRARY_PATH", E("LD_LIBRARY_PATH={trap}/lib"), SHARE, *PRELOAD),
    both("LD_AUDIT", "LD_AUDIT", E("LD_AUDIT={trap}/evil.so"), SHARE, *PRELOAD),
    both("GCONV_PATH and LOCPATH", "GCONV_PATH", E("GCONV_PATH={trap}/lib", "LOCPATH={trap}/lib", "LC_ALL=x.ANSI_X3.4-1968")),
    both("TMPDIR and HOME", "TMPDIR", E("TMPDIR={trap}/modules", "HOME={trap}/modules", "XDG_RUNTIME_DIR={trap}/tmp")),
    both("PYTHONPATH and PYTHONHOME", "PYTHON*", E("PYTHONPATH={trap}/modules", "PYTHONHOME={trap}/modules", "PYTHONPLATLIBDIR={trap}")),
    both("PYTHONSTARTUP and others", "PYTHON*", E("PYTHONSTARTUP={trap}/modules/os.py", "PYTHONINSPECT=1", "PYTHONEXECUTABLE={trap}/evil.so", "PYTHONUSERBASE={trap}")),
    both("the variables of PyInstaller", "PyInstaller's variables", E("_MEIPASS2={trap}/modules", "_PYI_ARCHIVE_FILE={trap}/evil.so", "_PYI_APPLICATION_HOME_DIR={trap}/lib", "_PYI_PARENT_PROCESS_LEVEL=1")),
    both("PATH with programs of that name", "TMPDIR", E("PATH={trap}/bin:/usr/bin:/bin")),
    both("tunables of the loader", "LD_PRELOAD", E("GLIBC_TUNABLES=glibc.malloc.perturb=7:glibc.rtld.optional_static_tls=1", "MALLOC_PERTURB_=7", "LD_DEBUG=all", "LD_DEBUG_OUTPUT={trap}/tmp/debug")),
    both("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_PIPE_DIRECTORY; another tenant's MPS pipe", environment.variables("CUDA_MPS_PIPE_DIRECTORY=/etc", "CUDA_MPS_LOG_DIRECTORY=/etc", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100")),
    both("a second, larger limit", "image raises its limit; duplicate variables", environment.variables("GPUSHARE_MEMORY=16Gi"), refused("GPUSHARE_MEMORY")),
    both("a second, empty limit", "duplicate variables", environment.variables("GPUSHARE_MEMORY="), refused("GPUSHARE_MEMORY")),
    both("the same limit twice", "duplicate variables", environment.variables("GPUSHARE_MEMORY=2Gi")),
    both("all devices by NVIDIA's variable", "image raises its limit; duplicate variables", environment.variables("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=none", "NVIDIA_VISIBLE_DEVICES=all"), refused("NVIDIA_VISIBLE_DEVICES")),
    both("a limit by annotation, larger", "image raises its limit", environment.annotation("gpushare.io/memory", "16Gi"), refused("GPUSHARE_MEMORY")),
    both("another scheduler's variables for more, and for no limit", "image raises its limit", environment.variables("CUDA_DEVICE_MEMORY_LIMIT=16g", "CUDA_DISABLE_CONTROL=true", "GPU_PORTION=1", "CGPU_DISABLE=1")),
    both("oversubscription", "image raises its limit", environment.variables("GPUSHARE_OVERSUBSCRIBE=1"), refused("GPUSHARE_OVERSUBSCRIBE")),
    both("another tenant's daemon as the backend", "another tenant's MPS pipe", environment.variables("GPUSHARE_BACKEND=mps"), refused("backend")),
    both("a variable without =", "duplicate variables", environment.variables("GPUSHARE_MEMORY"), RUNC),
    each("a NUL in a variable", "NUL, newline, 1 MiB", environment.variables("X=a\0GPUSHARE_MEMORY=16Gi"), RUNC, RUNC),
    both("a newline in the limit", "NUL, newline, 1 MiB", environment.variables_instead("GPUSHARE_MEMORY=2Gi\nlevel=info"), refused("GPUSHARE_MEMORY")),
    both("a limit of 1 MiB of text", "NUL, newline, 1 MiB", environment.variables_instead("GPUSHARE_MEMORY=" + "1" * (1 << 20)), refused("GPUSHARE_MEMORY")),
    both("escape sequences in the limit", "NUL, newline, 1 MiB", environment.variables_instead("GPUSHARE_MEMORY=\x1b[2J16Gi"), refused("GPUSHARE_MEMORY")),
    both("a device with ../", "id or annotation with ../", environment.variables("GPUSHARE_DEVICES=../../dev/sda"), refused("GPUSHARE_DEVICES")),
    both("an image that claims to be a pod's sandbox", "image claims a pod", environment.annotation("io.kubernetes.cri.container-type", "sandbox")),
    both("an image that claims to be CRI-O's sandbox", "image claims a pod", environment.annotation("io.kubernetes.cri-o.ContainerType", "sandbox")),
    both("an image that claims to be a pod's container", "image claims a pod", environment.annotation("io.kubernetes.cri.container-name", "app")),
    both("a limit for a pod, which the container claims to be in", "image claims a pod; image raises its limit", environment.several_annotations({"io.kubernetes.cri.container-name": "app", "app.gpushare.io/memory": "16Gi"}), refused("would make this a container of a pod")),
    both("an annotation with ../", "id or annotation with ../", environment.annotation("gpushare.io/devices", "../../../etc/shadow"), refused("shadow")),
)  # fmt: skip

SPEC = (
    *(both(f"cwd is descriptor {n}", "cwd in the rootfs", spec.directory_of_descriptors(n), RUNC, *DESCRIPTORS) for n in (3, 7, 9)),
    both("cwd is /proc/self/exe", "magic link", spec.put("process.cwd", "/proc/self/exe"), RUNC, *DESCRIPTORS),
    both("the program is /proc/self/exe", "magic link", spec.put("process.args", ["/proc/self/exe", "init"]), ENDS, *BINARY),
    both("root.path is relative", "root.path", spec.relative_root),
    both("root.path has very many ..", "root.path", spec.dots_root),
    both("root.path is a link to the root", "root.path", spec.linked_root("{root}"), RUNC),
    both("root.path is a link to /", "root.path", spec.linked_root("/"), RUNC),
    both("root.path is /", "root.path", spec.root_of_the_host, refused("root.path")),
    both("root.path does not exist", "root.path", spec.put("root.path", "{host}/none"), RUNC),
    both("config.json has no root", "root.path", spec.drop("root"), RUNC),
    both("tiny resource limits", "resource limits and seccomp", spec.tiny_limits),
    both("a seccomp profile without robust lists, by which a slot is held", "resource limits and seccomp", spec.without_calls("set_robust_list"), NO_GPU),
    both("a read-only root", "read-only rootfs", spec.put("root.readonly", True)),
    both("config.json has 100 MB", "config.json of 100 MB", spec.huge, refused("config.json")),
    both("lists 9000 deep", "deep or wrong types", spec.nested(9000), refused("config.json")),
    both("lists 100000 deep", "deep or wrong types", spec.nested(100_000), RUNC),
    both("env is a number", "deep or wrong types", spec.put("process.env", 1), RUNC),
    both("annotations are a list", "deep or wrong types", spec.put("annotations", ["gpushare.io/memory"]), RUNC),
    both("two processes in one file", "duplicate variables; deep or wrong types", spec.duplicate_objects, refused("twice")),
    both("a second process in another case", "duplicate variables; deep or wrong types", spec.other_case, refused("in the wrong case")),
    both("a device rule in a second object", "device rule; duplicate variables", spec.rule_in_a_second_object, refused("twice")),
    both("a device rule under a key in another case", "device rule; deep or wrong types", spec.rule_in_another_case, refused("in the wrong case")),
    both("a device rule with a key in another case", "device rule; deep or wrong types", rules.allowing(rules.IN_ANOTHER_CASE, asks=False), refused("in the wrong case")),
)  # fmt: skip

INSIDE = (
    both("a program changes its limits", "writable or hard-linked limits", inside.fails(*inside.LIMITS)),
    both("a program makes nodes of other devices", "mknod", inside.makes(*inside.DEVICES), SHARE, "CVE-2024-0136"),
    both("a program fills its counters with garbage", "corrupted usage and pages", inside.does(f"head -c 200000 /dev/urandom 1<>{inside.OURS}/rw/usage >&1", f"truncate -s 0 {inside.OURS}/rw/usage", f"chmod 0 {inside.OURS}/rw/usage", f"chmod 666 {inside.OURS}/rw/usage")),
    both("descriptors of a container's first program", "cwd in the rootfs", inside.descriptors, SHARE, *DESCRIPTORS),
    both("the host's paths in a container", "id or annotation with ../", inside.process_environment, SHARE, *NAMESPACES),
    both("another tenant's pipes, activity files and names", "another tenant's MPS pipe; corrupted usage and pages", inside.other_tenant),
    both("a pid that now belongs to another container", "pid reused", inside.pid_of_another),
    both("file leases on all files that are mounted into a container", "file lease; hanging hook", owners.leases),
    both("mounts made writable again by CAP_SYS_ADMIN", "CAP_SYS_ADMIN; writable or hard-linked limits", owners.writes),
    both("mounts over gpushare's in a user namespace", "user namespace; writable or hard-linked limits", inside.hidden_in_a_user_namespace),
)  # fmt: skip

RULES = {
    "all devices": rules.EVERY_DEVICE, "character devices of every major": rules.EVERY_MAJOR,
    "NVIDIA's major": rules.GPUS, "reading one GPU": rules.GPU,
}  # fmt: skip
BY_RULE = (
    *(each(f"a rule for {name}", "device rule; mknod", rules.allowing(rule), refused("linux.resources.devices"), SHARE) for name, rule in RULES.items()),
    *(each(f"a rule for {name}, and no request", "device rule; mknod", rules.allowing(rule, asks=False), refused("could open any GPU"), DENIED) for name, rule in RULES.items()),
)  # fmt: skip

EXHAUSTION = (
    both("an image's large files fill the state directory", "state directory filled; crafted ld.so.cache", exhaustion.fill_the_state),
    both("a library's names lead through a maze of links", "maze of links; hanging hook", exhaustion.names_in_a_maze, refused("links")),
    both("LD_LIBRARY_PATH leads through a maze of links", "maze of links; hanging hook", exhaustion.paths_in_a_maze, refused("links")),
    both("directories of variants are behind a maze of links", "maze of links; hanging hook", exhaustion.variants_in_a_maze, refused("links")),
    both("the state directory is full", "state directory filled", exhaustion.full_state),
)  # fmt: skip

ATTACKS = (*IMAGE, *VOLUMES, *ENVIRONMENT, *SPEC, *INSIDE, *BY_RULE, *EXHAUSTION)

# Where the outcome with crun differs from runc's: (name, way)
CRUN: dict[tuple[str, str], Verdict] = {
    **{("/dev/null is a link to core_pattern", way): RUNC for way in ("hook", "runtime")},
    **{
        (name, way): SHARE
        for name in ("a variable without =", "root.path is a link to the root")
        for way in ("hook", "runtime")
    },
    ("two processes in one file", "hook"): RUNC,
}

RACES = (
    Race("a library in a volume is swapped", ("swapped component", "leaf link"), races.leaf_in_a_volume, LOOP),
    Race("the directory of a library is swapped", ("swapped component", "parent link"), races.parent_in_a_volume, LOOP),
    Race("gpushare's directory is swapped", ("swapped component", "parent link"), races.our_directory_in_a_shared_image, LOOP),
    Race("libcuda's mount point is swapped", ("swapped component", "leaf link"), races.library_in_a_shared_image, LOOP),
    Race("a program's mount point is swapped", ("swapped component", "leaf link"), races.program_in_a_shared_image, LOOP),
    Race("the loader's cache is swapped", ("swapped component", "crafted ld.so.cache"), races.cache_in_a_shared_image, (*LOOP, *CACHE)),
    Race("/etc is swapped", ("swapped component", "parent link"), races.etc_in_a_shared_image, (*LOOP, *CACHE)),
    Race("a newer driver is swapped", ("swapped component", "leaf link"), races.newer_driver_in_the_image, LOOP),
    Race("many starts and ends", ("mount table growth",), races.many_starts),
    Race("limits are changed while their container ends", ("pid reused",), races.limits_of_dying),
)  # fmt: skip

T = "integration/"
ELSEWHERE = (
    Elsewhere("65,000 mounts and 60 roots of other users, while containers start and end", ("mount table growth", "hanging hook"), (T + "test_leftovers.py::test_start_and_end_read_no_foreign_mounts_or_processes",)),
    Elsewhere("a process that outlives its init and pivots away with its CUDA context", ("pid reused",), (T + "test_leftovers.py::test_cuda_context_in_another_root_keeps_the_lease",)),
    Elsewhere("a descriptor of the usage file, passed on with a lock", ("corrupted usage and pages",), (T + "test_leftovers.py::test_passed_descriptor_does_not_keep_the_share",)),
    Elsewhere("a seccomp filter that ends the shim's thread alone", ("resource limits and seccomp",), ("shim/test_processes.py::test_process_that_loses_the_shim_s_thread_gets_no_more_memory",)),
    Elsewhere("a file size limit keeps lines out of the log", ("resource limits and seccomp",), ("unit/test_launcher.py::test_file_size_limit_of_the_container_is_lifted",)),
    Elsewhere("a process restored in another container", ("image raises its limit",), ("shim/test_processes.py::test_process_that_is_restored_in_another_container_gets_no_memory",)),
    Elsewhere("forked children keep the memory of a killed process", ("image raises its limit",), ("shim/test_processes.py::test_memory_of_a_killed_process_stays_charged_while_a_forked_child_lives",)),
    Elsewhere("a program that cannot open the files of its container any more", ("few descriptors",), ("shim/test_processes.py::test_memory_of_a_killed_process_stays_charged_while_a_forked_child_lives", "shim/test_compute_life.py::test_soft_limit_holds_where_neighbours_cannot_be_read")),
    Elsewhere("a preloaded library that defines the clock", ("LD_PRELOAD",), ("shim/test_compute_life.py::test_preloaded_clock_has_no_effect_on_the_limit",)),
    Elsewhere("a signal at any point while gpushare works in a container's mounts", ("killed hook",), ("unit/test_mountns.py::test_signal_at_any_bytecode_leaves_no_process_in_the_container",)),
    Elsewhere("command lines and variables in memory that makes the reader wait", ("hanging hook",), ("unit/test_engines_flags.py::test_only_root_processes_of_the_host_count", "unit/test_mps.py::test_variables_of_other_processes_are_not_read")),
    Elsewhere("a long mount table while limits change", ("mount table growth",), ("unit/test_limit_update.py::test_no_mount_table_is_read_under_the_lock",)),
    Elsewhere("a Service whose variables look like a claim", ("image raises its limit",), ("unit/test_request.py::test_service_link_variable_is_ignored",)),
    Elsewhere("a process of a user or container that is called containerd-shim", ("hanging hook",), ("unit/test_node_life.py::test_only_shims_of_the_node_name_the_place_of_tasks",)),
    Elsewhere("forged shares after the state directory was lost", ("user namespace",), (T + "test_forged_shares.py::test_forged_share_is_ignored", T + "test_forged_shares.py::test_share_forged_in_a_container_s_user_namespace_is_ignored")),
    Elsewhere("a lock on the directory below the state's mount", ("hanging hook",), (T + "test_host_user.py::test_user_s_lock_below_the_mount_does_not_block_the_first_start",)),
    Elsewhere("links of every kind, at each operation of a plan", ("leaf link", "parent link", "magic link"), (T + "test_paths.py::test_leaf_link_out_of_the_library_directories_is_refused", T + "test_paths.py::test_magic_links_are_refused", T + "test_paths.py::test_link_name_that_leads_to_passwd_is_refused"), LINKS),
    Elsewhere("special files, at each operation of a plan", ("special file",), (T + "test_path_kinds.py::test_special_file_at_a_mount_target_is_refused", T + "test_path_kinds.py::test_special_file_at_a_link_s_name_is_refused", T + "test_path_kinds.py::test_special_file_at_a_device_target_is_refused")),
    Elsewhere("an immutable directory", ("immutable file",), (T + "test_path_kinds.py::test_immutable_directory_is_refused",)),
    Elsewhere("a component swapped in a loop, also without openat2", ("swapped component",), (T + "test_paths.py::test_component_swapped_in_a_loop_is_never_followed_out", T + "test_images.py::test_swapped_source_is_refused"), LOOP),
    Elsewhere("a mount point changed between config.json and our hook", ("swapped component", "special file", "user mount"), (T + "test_adopt_mounts.py::test_changed_target_is_refused_by_name", T + "test_adopt_mounts.py::test_file_mounted_over_the_target_is_covered"), LOOP),
    Elsewhere("a runtime that omits hooks", ("image raises its limit",), (T + "test_adopt_mounts.py::test_runtime_without_hooks_gives_no_gpu",)),
    Elsewhere("all hostile variables at once, from the bundle", ("LD_PRELOAD", "LD_AUDIT", "GCONV_PATH", "PYTHON*", "PyInstaller's variables"), (T + "test_bundle.py::test_hostile_environment_reaches_neither_loader_nor_interpreter", T + "test_hook_errors.py::test_hook_ignores_python_settings_of_environment_and_directory"), PRELOAD),
    Elsewhere("any value in any field of config.json", ("deep or wrong types",), (T + "test_runtime_bad_input.py::test_arbitrary_config_starts_or_is_refused_in_one_line", T + "test_runtime_bad_input.py::test_unreadable_config_is_refused")),
    Elsewhere("ids that leave the state directory", ("id or annotation with ../",), ("unit/test_oci.py::test_bad_id_is_refused",)),
    Elsewhere("a forged record of gpushare", ("id or annotation with ../",), (T + "test_runtime.py::test_forged_record_is_ignored",)),
    Elsewhere("the number of a process that ends while its container is suspended or stopped", ("pid reused",), ("unit/test_suspend.py::test_process_that_gets_the_number_of_an_ended_one_is_not_moved", "unit/test_suspend.py::test_first_process_that_has_ended_is_no_longer_the_container_s", "unit/test_overuse.py::test_owner_is_found_by_unshared_cgroup", "unit/test_overuse.py::test_stop_kills_no_process_that_got_the_number_meanwhile")),
    Elsewhere("a process that stops itself each time that it is suspended or resumed", ("hanging hook",), ("unit/test_suspend.py::test_process_that_stops_while_it_is_moved_costs_little_of_the_agent_s_time",)),
    Elsewhere("a container whose name is the id of another one", ("id or annotation with ../",), ("unit/test_names.py::test_name_that_is_another_container_s_id_does_not_stand_for_it",)),
    Elsewhere("a process that has ended, or belongs to the host", ("pid reused",), (T + "test_apply.py::test_exited_process_is_refused", T + "test_hook_errors.py::test_process_without_a_mount_namespace_is_refused")),
    Elsewhere("mounts that would reach the host", ("shared propagation",), (T + "test_apply.py::test_mounts_do_not_propagate_to_a_host_that_shares_the_rootfs", T + "test_apply.py::test_mounts_below_a_shared_source_do_not_propagate_to_it", T + "test_adopt_mounts.py::test_mounts_do_not_propagate_to_peers")),
    Elsewhere("rootfsPropagation shared, rshared, slave", ("shared propagation",), (T + "test_propagation.py::test_mounts_of_a_share_do_not_propagate_to_the_host",)),
    Elsewhere("another user of the host, with all locks", ("hanging hook",), (T + "test_host_user.py::test_another_user_cannot_read_shares_or_block_starts", T + "test_cgroup_lock_warmup.py::test_warmup_writes_until_the_start_ends")),
    Elsewhere("a container of a user namespace", ("user namespace",), (T + "test_pages.py::test_containers_see_each_other_in_any_start_order",)),
    Elsewhere("images without a shell, without glibc", ("no /etc, distroless, musl",), (T + "test_images.py::test_limit_is_visible_in_each_image_layout", T + "test_images.py::test_musl_image_gets_devices_and_limits_are_refused")),
    Elsewhere("forged lines in the log of decisions", ("NUL, newline, 1 MiB",), ("unit/test_audit_log.py::test_hostile_text_adds_no_field_or_line", "unit/test_audit_log.py::test_refused_line_has_kind_and_name_without_value")),
    Elsewhere("an image names files of the host for the output of hooks", ("image's text in our lines",), (T + "test_podman.py::test_image_cannot_redirect_hook_output_to_host_files", T + "test_hook_output.py::test_runtime_drops_image_annotations_for_hook_output", T + "test_hook_output.py::test_restart_drops_annotations_from_the_edited_config_json", T + "test_hook_output.py::test_hook_prints_nothing_under_crun")),
    Elsewhere("a link of the image whose text is a command", ("image's text in our lines", "leaf link"), (T + "test_hook_output.py::test_image_s_link_text_is_quoted_in_the_refusal_alone",)),
    Elsewhere("connections to the exporter that never end", ("slow clients",), ("unit/test_export_clients.py::test_scrape_is_answered_beside_slow_clients", "unit/test_export_clients.py::test_whole_request_has_one_deadline", "unit/test_export_clients.py::test_bounded_reader_stops_at_limit")),
    Elsewhere("a flood of requests to the exporter, and malformed ones", ("slow clients",), ("unit/test_export_clients.py::test_scrape_is_answered_beside_a_flood_of_requests", "unit/test_export_clients.py::test_strange_request_gets_the_metrics_and_logs_nothing")),
    Elsewhere("a FIFO, a device or endless blank lines among the host's records and CDI specifications", ("special file", "hanging hook"), ("unit/test_cdi.py::test_special_file_beside_it_is_not_read", "unit/test_cdi.py::test_names_of_nvidia_are_left_to_their_owner", "unit/test_system_variables.py::test_fifo_in_place_of_a_record_does_not_delay_the_start", "unit/test_names.py::test_unreadable_file_means_no_name")),
    Elsewhere("links and paths in a user's state directory, which root cleans up", ("leaf link", "parent link"), ("unit/test_cli_errors.py::test_root_command_changes_nothing_for_a_state_directory_of_a_user",)),
    Elsewhere("a lease with numbers that are out of range", ("corrupted usage and pages",), ("unit/test_leases.py::test_lease_with_a_number_out_of_range_is_damaged", "unit/test_cli_errors.py::test_lease_with_invalid_field_is_no_crash")),
    Elsewhere("a usage journal that is full, torn, sparse or has impossible values, when leases are made again", ("corrupted usage and pages", "hanging hook"), ("unit/test_journal.py::test_lost_leases_are_restored_without_parsing_the_whole_journal", "unit/test_journal.py::test_damage_keeps_no_lost_lease_from_its_labels", "unit/test_journal.py::test_huge_journal_delays_no_lost_lease", "unit/test_journal.py::test_line_with_a_wrong_value_is_left_out")),
    Elsewhere("commands in every name and value of a request", ("image's text in our lines",), ("unit/test_quoting_messages.py::test_image_text_is_always_quoted", "unit/test_quoting.py::test_shell_runs_nothing_in_message")),
    Elsewhere("a start killed at any point", ("killed hook",), (T + "test_lifecycle.py::test_start_killed_at_any_point_leaves_nothing", T + "test_adopt.py::test_adoption_killed_at_any_call_leaves_nothing", T + "test_kill_points.py::test_gpushare_run_killed_at_any_point_leaves_nothing")),
    Elsewhere("a release killed at any point", ("killed hook",), (T + "test_release.py::test_poststop_killed_at_any_call_is_completed_by_the_next_start",)),
    Elsewhere("a hook that hangs", ("hanging hook",), (T + "test_hook_errors.py::test_hanging_hook_ends_at_its_deadline",)),
    Elsewhere("attacks of a container on its own counters", ("corrupted usage and pages",), ("unit/test_storage.py::test_attacked_usage_file_is_only_damaged", "unit/test_storage.py::test_modes_and_locks_of_tenant_do_not_block_host")),
    Elsewhere("attacks of a container on its own activity file", ("corrupted usage and pages",), (T + "test_pages.py::test_corrupt_activity_file_affects_no_start_or_release", T + "test_pages.py::test_forged_activity_files_are_ignored")),
    Elsewhere("attacks on other tenants' activity files", ("corrupted usage and pages",), (T + "test_pages.py::test_root_cannot_write_foreign_activity_files",)),
    Elsewhere("other GPUs' minors, on cgroup v2", ("mknod",), (T + "test_cgroup_v2.py::test_exactly_the_granted_devices_become_accessible", T + "test_policy.py::test_privileged_container_gets_no_other_gpu"), ("CVE-2024-0136",)),
    Elsewhere("the index of a device is truncated under a program", ("corrupted usage and pages",), ("shim/test_compute_life.py::test_index_that_is_truncated_under_a_running_program_does_not_kill_it",)),
    Elsewhere("CAP_SYS_ADMIN over the host, without an entry in policy", ("CAP_SYS_ADMIN",), ("unit/test_policy.py::test_privileged_container_needs_entry", "unit/test_oci.py::test_user_namespace_without_host_root_is_unprivileged")),
    Elsewhere("device rules that open GPUs, on cgroup v1 and v2, runc and crun", ("device rule", "mknod"), (T + "test_policy.py::test_device_rules_open_no_other_gpu", T + "test_policy.py::test_hook_refuses_rules_that_open_gpus", T + "test_policy.py::test_rule_that_names_a_gpu_is_refused_by_policy", T + "test_policy.py::test_container_without_request_opens_no_gpu_under_crun")),
    Elsewhere("file leases and writes from a user namespace with CAP_SYS_ADMIN", ("file lease", "CAP_SYS_ADMIN", "user namespace"), (T + "test_sys_admin.py::test_sys_admin_in_a_user_namespace_cannot_write_mounted_files",)),
    Elsewhere("file leases where a file system cannot hide owners, and after an upgrade", ("file lease",), (T + "test_hidden_owner.py::test_driver_without_id_mapped_mounts_starts_and_doctor_warns", T + "test_hidden_owner.py::test_state_directory_of_an_earlier_version_is_completed")),
    Elsewhere("annotations of a CRI in an image that podman starts, with devices and policy", ("image claims a pod",), (T + "test_podman_claims.py::test_injected_device_has_the_user_s_limit", T + "test_podman_claims.py::test_policy_applies_to_a_claimed_pod", T + "test_podman_claims.py::test_privileged_container_of_a_claimed_pod_needs_a_policy_entry")),
    Elsewhere("annotations of two CRIs that contradict each other", ("image claims a pod",), ("unit/test_oci.py::test_contradicting_cri_annotations_are_refused",)),
    Elsewhere("a device in the sandbox of a pod", ("image claims a pod",), (T + "test_policy.py::test_device_in_a_sandbox_is_refused",)),
    Elsewhere("an image adds to its user's limit", ("image raises its limit",), ("unit/test_widening.py::test_widening_variable_is_ignored_and_reported_by_policy", "unit/test_widening.py::test_cluster_profile_accepts_no_widening", "unit/test_widening.py::test_smaller_limit_on_one_device_does_not_raise_own_limit_on_another")),
    Elsewhere("an image replaces another scheduler's limit by a larger one", ("image raises its limit",), ("unit/test_widening.py::test_memory_above_other_schedulers_limit_is_ignored", "unit/test_widening.py::test_memory_above_a_limit_that_alone_requests_no_device_is_ignored", "unit/test_widening.py::test_variable_beside_annotation_of_other_scheduler_is_ignored")),
    Elsewhere("a pod, an image or a ConfigMap invents claims or kubelet's choices, or names those of another pod", ("image raises its limit",), ("unit/test_system_variables.py::test_variable_alone_is_refused", "unit/test_system_variables.py::test_other_variable_than_the_prepared_one_is_refused", "unit/test_system_variables.py::test_variable_that_kubelet_gave_another_container_is_refused", "unit/test_kubernetes.py::test_policies_allow_only_what_a_pod_may_write")),
    Elsewhere("one amount, which a scheduler counted, on several devices", ("image raises its limit",), ("unit/test_system_variables.py::test_one_amount_for_several_devices_is_refused", "unit/test_system_variables.py::test_image_that_names_all_devices_gets_one")),
    Elsewhere("a container claims to wait for memory that it has, or does not take", ("corrupted usage and pages",), ("unit/test_eviction.py::test_wait_for_more_than_the_driver_leaves_of_the_request_ends_no_container", "unit/test_eviction.py::test_container_that_does_not_take_freed_memory_is_believed_after_growing_pauses")),
    Elsewhere("a borrower reports too little use", ("corrupted usage and pages",), ("unit/test_eviction.py::test_borrower_that_reports_less_than_the_driver_counts_comes_first",)),
    Elsewhere("LD_LIBRARY_PATH is set after the start", ("LD_LIBRARY_PATH",), (T + "test_unlimited.py::test_program_with_another_libcuda_is_reported", "unit/test_rootfs.py::test_driver_that_a_later_library_path_names_is_found")),
    Elsewhere("files and processes that delay the search for processes without a limit", ("hanging hook",), ("unit/test_unlimited.py::test_files_that_a_container_serves_itself_are_not_waited_for", "unit/test_unlimited.py::test_container_with_very_many_processes_takes_a_bounded_time", "unit/test_unlimited.py::test_many_containers_that_make_a_reader_wait_share_one_wait")),
    Elsewhere("limits hidden from the shim", ("writable or hard-linked limits",), (T + "test_hidden_limits.py::test_hidden_limits_file_gives_no_gpu", T + "test_lost_state.py::test_tenant_cannot_understate_its_share")),
    Elsewhere("tricks of a program to exceed its limit", ("image raises its limit",), (T + "test_limits.py::test_bypass_attempts_get_no_more_than_the_limit",)),
    Elsewhere("the loader's cache has a name of megabytes", ("crafted ld.so.cache", "hanging hook"), ("unit/test_ldcache.py::test_huge_name_is_refused_uncompared",), CACHE),
    Elsewhere("an image has a volume at the path of a GPU", ("image raises its limit",), (T + "test_podman_image_asks.py::test_volume_at_a_gpu_s_path_gives_no_gpu", T + "test_podman_image_asks.py::test_volume_at_a_gpu_s_path_changes_no_limit")),
    Elsewhere("a container that stays in the cgroup of the process that starts it", ("no cgroup of its own", "mknod"), (T + "test_podman_cgroups.py::test_caller_s_cgroup_gets_no_rule", T + "test_podman_cgroups.py::test_podman_without_cgroups_is_refused", T + "test_podman_cgroups.py::test_container_in_the_caller_s_cgroup_is_refused")),
    Elsewhere("a start that may open few files", ("few descriptors", "hanging hook"), (T + "test_few_descriptors.py::test_runtime_with_few_descriptors_is_refused_before_any_reservation", T + "test_few_descriptors.py::test_later_lack_of_descriptors_is_no_internal_error")),
    Elsewhere("leftovers of a container in a new container", ("image raises its limit",), (T + "test_docker_files.py::test_committed_image_gets_a_new_share", T + "test_docker_files.py::test_copied_limits_file_has_no_effect")),
    Elsewhere("odd files, links and other names at an engine's files and their temporary files", ("odd files and links of the host", "hanging hook"), ("unit/test_configure_damage.py::test_special_file_is_refused_and_kept", "unit/test_configure_damage.py::test_file_with_the_temporary_name_is_replaced", "unit/test_configure_damage.py::test_odd_file_with_the_temporary_name_is_refused", "unit/test_configure_damage.py::test_file_of_the_daemon_that_would_make_the_reader_wait_is_ignored", "unit/test_configure_damage.py::test_link_out_of_root_is_refused")),
    Elsewhere("a full disk, and kill -9, while an engine is configured", ("odd files and links of the host", "killed hook"), ("unit/test_configure_damage.py::test_failed_rename_undoes_every_change", "unit/test_configure_damage.py::test_undo_restores_everything_after_kill_at_any_step")),
    Elsewhere("a full disk, links and damaged programs on a node of a cluster", ("odd files and links of the host",), ("unit/test_node_life.py::test_full_disk_is_an_error_with_one_line_and_leaves_nothing", "unit/test_node_life.py::test_links_on_the_node_name_paths_of_the_node", "unit/test_node_life.py::test_folder_behind_a_link_is_refused", "unit/test_node_life.py::test_administrator_s_link_to_a_configuration_stays", "unit/test_node_life.py::test_programs_stay_while_a_container_has_their_hook", "unit/test_node_life.py::test_damaged_programs_are_replaced")),
    Elsewhere("the package is removed beside a suspended container, or while containers cannot be listed", ("odd files and links of the host",), ("unit/test_mps.py::test_package_removal_stops_nothing_if_a_container_may_have_a_share",)),
    Elsewhere("gpushare is removed, and its directories are links", ("odd files and links of the host",), ("unit/test_uninstall.py::test_link_to_the_configuration_s_folder_is_removed_and_the_folder_stays", "unit/test_uninstall.py::test_state_behind_a_link_is_unmounted_and_can_be_used_again", "unit/test_uninstall.py::test_foreign_directory_is_not_unmounted")),
    Elsewhere("the low-level runtime was moved, and the record of it is stale or of another user", ("odd files and links of the host",), ("unit/test_launcher.py::test_python_gets_the_whole_line_if_the_recorded_runtime_is_gone", "unit/test_launcher.py::test_stale_or_foreign_runtime_record_is_ignored")),
    Elsewhere("any umask of root", ("odd files and links of the host",), ("unit/test_node.py::test_umask_of_a_command_of_root_does_not_matter",)),
    Elsewhere("a snapshot that is cut short, empty or a script", ("odd files and links of the host",), (T + "test_snapshot.py::test_unusable_snapshot_starts_the_ordinary_program", "unit/test_configure.py::test_snapshot_that_does_not_start_is_removed")),
    Elsewhere("address layouts, personality flags and little memory of a start", ("resource limits and seccomp",), (T + "test_snapshot_surroundings.py::test_snapshot_starts_with_each_address_layout", T + "test_snapshot_surroundings.py::test_memory_cgroup_of_the_ordinary_program_suffices", T + "test_snapshot_surroundings.py::test_seccomp_filter_may_deny_unused_calls")),
    Elsewhere("a start that is refused with standard input, output and error closed", ("few descriptors",), (T + "test_snapshot.py::test_refusal_without_standard_error_is_written_into_no_other_file", T + "test_snapshot.py::test_closed_standard_descriptors_are_accepted")),
)  # fmt: skip


def resembling() -> set[str]:
    """Every third of the attacks that one function prepares. `make test` leaves these to `make test-attacks`."""
    number: Counter[tuple[str, str]] = Counter()
    found = set()
    for attack in ATTACKS:
        function = attack.prepare.__module__, attack.prepare.__qualname__
        number[function] += 1
        if number[function] % 3 == 0:
            found.add(attack.name)
    return found


# Tests of ELSEWHERE that runs with crun omit, and why
RUNC_ALONE = {
    **{
        T + f"test_docker_files.py::{test}": "docker has runc below it"
        for test in ("test_committed_image_gets_a_new_share", "test_copied_limits_file_has_no_effect")
    },
    T + "test_podman_cgroups.py::test_caller_s_cgroup_gets_no_rule": "starts no container",
    T + "test_policy.py::test_device_rules_open_no_other_gpu": "on cgroup v1 crun takes no rule with -1",
    T
    + "test_policy.py::test_privileged_container_gets_no_other_gpu": "on cgroup v2 crun raises a limit that a test machine may not raise",
}


def elsewhere(low_level: str) -> tuple[Elsewhere, ...]:
    """The rows of ELSEWHERE with their tests for this runtime, without rows that have none."""
    if low_level != "crun":
        return ELSEWHERE
    rows = (row._replace(tests=tuple(test for test in row.tests if test not in RUNC_ALONE)) for row in ELSEWHERE)
    return tuple(row for row in rows if row.tests)
