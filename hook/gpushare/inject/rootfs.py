"""Probe a container's root file system: where its glibc is, and which other copies of the driver its loader could
prefer. Reads only, by descriptor and inside the root (inroot.py). All content is the tenant's, so every read is
bounded.
"""

import errno
import os
import stat
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Union

from ..core import constants
from ..core.errors import KernelError, is_exhausted, reason
from ..core.model import Bundle, Image
from ..core.quoting import shown
from ..gpu import compatdir
from ..system import imagefiles, inroot, ldcache, syscalls

LD_CACHE = "/etc/ld.so.cache"
SONAMES = {  # name that a program passes to the loader -> library
    "libcuda.so.1": "libcuda.so.1",
    "libcuda.so": "libcuda.so.1",
    "libnvidia-ml.so.1": "libnvidia-ml.so.1",
    "libnvidia-ml.so": "libnvidia-ml.so.1",
}
_PREFIXES = ("libcuda.so", "libnvidia-ml.so")


class _Platform(NamedTuple):
    cache_flags: int  # flags of a cache entry for this machine's glibc
    libdirs: tuple[str, ...]  # possible directories of libc.so.6, multiarch first


_PLATFORMS = {
    "x86_64": _Platform(ldcache.FLAGS["x86_64"], ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu")),
    "aarch64": _Platform(ldcache.FLAGS["aarch64"], ("/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu")),
}
_COMMON_LIBDIRS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
_LIBDIRS_32 = ("/lib/i386-linux-gnu", "/usr/lib/i386-linux-gnu", "/lib32", "/usr/lib32", "/lib", "/usr/lib")
# Nix and Guix keep each glibc in its own directory. Their programs search the driver in one fixed place, or in
# the directory of LD_LIBRARY_PATH where other runtimes mount it
_STORES = ("/nix/store", "/gnu/store")
_STORE_LIBDIR = "/run/opengl-driver/lib"
_STORE_OTHER_LIBDIRS = ("/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib")
_MAX_STORE_NAMES = 1 << 16
_LEGACY_HWCAPS = ("tls", "x86_64", "haswell", "tls/x86_64", "tls/haswell", "haswell/x86_64", "haswell/avx512_1")

_MAX_ENV_BYTES = 64 << 10  # of LD_LIBRARY_PATH that are parsed
_MAX_DIRS = 128
_MAX_LATER = 64  # packages in /opt and environments of conda
_CONDA = ("conda", "conda2", "conda3", "forge", "forge3")  # ends of /root/miniconda3 and the like
_LATER = ("lib", "lib64", "compat", "cuda-compat")  # the last: conda-forge's package cuda-compat
_ENVIRONMENTS = "envs"
_MAX_PATH = 4096  # PATH_MAX; a forged cache may have one path as long as the file


def open_root(bundle: Bundle, pid: int = 0) -> int:
    """Return an O_PATH descriptor of the container's root: in the mount namespace of `pid` (its init, before
    pivot_root), or on the host without a pid. The path to the root is the runtime's and is trusted; everything below is
    not."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        if not pid:
            return os.open(bundle.rootfs, flags)
        theirs = os.open(f"/proc/{pid}/root", flags)
        try:  # relative to its root: an absolute link would lead back into our own namespace
            return inroot.open_in(theirs, bundle.rootfs, flags)
        finally:
            os.close(theirs)
    except (OSError, syscalls.SyscallError) as error:
        if is_exhausted(error):
            raise
        raise KernelError(
            f"open the container's root {shown(bundle.rootfs)}: {reason(error.errno or 0)}",
            "check root.path in config.json",
        ) from None


class Opened:
    """`open_root` as a context manager."""

    def __init__(self, bundle: Bundle, pid: int = 0) -> None:
        self.fd = open_root(bundle, pid)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def probe(root: Union[inroot.Root, str], env: Iterable[tuple[str, str]]) -> Image:
    """Return the `Image` below `root` (a descriptor, a view or a host path) for a process with environment `env`, where
    the last value of a name counts."""
    if not isinstance(root, str):
        return _probe(root, dict(env))
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _probe(root_fd, dict(env))
    finally:
        os.close(root_fd)


def _probe(root: inroot.Root, env: dict[str, str]) -> Image:
    cache, note = read_cache(root)
    cached = _cached_paths(cache) if cache else {}
    libdir, machine = _find_libc(root, cached)
    if not libdir:
        libdir, machine = _find_in_store(root, env)
    names = imagefiles.names_in(root, libdir) if libdir else []
    compat = compatdir.directories(root)
    directories = [*compat, *_preferred_directories(root, libdir, names, env), *_later_directories(root)]
    drivers = [name for prefix in _PREFIXES for name in _starting(names, prefix)]
    found: dict[str, str] = {}
    for path, soname in _candidates(root, libdir, drivers, directories, cached):
        _add_driver(root, path, soname, found)
    links = tuple(_links(root, libdir, drivers))
    image = Image(libdir, machine, cache is not None, note, tuple(sorted(found.items())), links)
    if not libdir:
        return image
    version, files = compatdir.newest(root, machine, compat)
    libdir32 = _find_libc32(root) if machine == "x86_64" else ""
    return image._replace(libdir32=libdir32, compat_version=version, compat_files=files)


def shows(root: inroot.Root, files: Iterable[tuple[str, str]]) -> bool:
    """Return whether each (host path, container path) is the same file already."""
    for source, target in files:
        try:
            there = os.stat(source)
            fd = inroot.open_in(root, target, os.O_PATH)
        except (OSError, KernelError):
            return False
        try:
            if not os.path.samestat(os.fstat(fd), there):
                return False
        finally:
            os.close(fd)
    return True


def read_cache(root: inroot.Root) -> tuple[Union[ldcache.Cache, None], str]:
    """Return (the parsed ld.so.cache, "") or (None or the cache, why it must not be changed)."""
    fd = inroot.exists(root, LD_CACHE, os.O_PATH | os.O_NOFOLLOW)
    if fd < 0:
        return None, f"no {LD_CACHE} in the image"
    try:
        return parsed_cache(root, fd)[1:]
    finally:
        os.close(fd)


def parsed_cache(root: inroot.Root, fd: int) -> tuple[bytes, Union[ldcache.Cache, None], str]:
    """Return (content, cache, reason) of the file `fd` (O_PATH); the last two as `read_cache`."""
    data = b""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return data, None, f"{LD_CACHE} is not a regular file"
        if status.st_size > ldcache.MAX_BYTES:
            return data, None, f"{LD_CACHE} has {status.st_size} bytes; at most {ldcache.MAX_BYTES} are read"
        data = imagefiles.read_all(fd, ldcache.MAX_BYTES)
        note = ""
        if inroot.is_mounted_over(root, fd):
            note = f"{LD_CACHE} is on a mount of its own (a volume over it or over /etc)"
        return data, ldcache.parse(data), note
    except ldcache.MalformedCache as error:
        return data, None, f"{LD_CACHE} is malformed: {error}"
    except OSError as error:
        if is_exhausted(error):
            raise
        return data, None, f"{LD_CACHE} cannot be read: {os.strerror(error.errno or 0)}"


def _cached_paths(cache: ldcache.Cache) -> dict[str, list[tuple[str, int]]]:
    """Return name -> [(path, flags)] in the cache, for the names in SONAMES and libc."""
    wanted = {name.encode(): name for name in (*SONAMES, "libc.so.6")}
    interesting = [k for name in wanted for k in _offsets_of(cache.strings, name)]
    keys = set(interesting)
    result: dict[str, list[tuple[str, int]]] = {}
    # ldconfig shares string tails ("libc.so.6" ends its path), so a key is any offset at which the name begins
    for entry in cache.named(keys):
        paths = result.setdefault(cache.text(entry.key).decode(), [])
        end = cache.strings.find(b"\0", entry.value, entry.value + _MAX_PATH)
        if len(paths) < _MAX_DIRS and end >= 0 and cache.strings.startswith(b"/", entry.value):
            paths.append((os.fsdecode(cache.strings[entry.value : end]), entry.flags))
    return result


def _offsets_of(strings: bytes, name: bytes) -> Iterator[int]:
    at = strings.find(name + b"\0")
    while at >= 0:
        yield at
        at = strings.find(name + b"\0", at + 1)


def _find_libc(root: inroot.Root, cached: dict[str, list[tuple[str, int]]]) -> tuple[str, str]:
    """Return (libdir, machine) of the image's glibc: for the host's machine first, then for any known machine."""
    host = os.uname().machine
    platform = _PLATFORMS.get(host, _Platform(0, ()))
    places = [path for path, flags in cached.get("libc.so.6", ()) if flags == platform.cache_flags]
    places += [f"{d}/libc.so.6" for d in (*platform.libdirs, *_COMMON_LIBDIRS)]
    other = ("", "")
    for place in places:
        real, library = imagefiles.library_at(root, place)
        if not real or library is None or not library.machine:
            continue
        directory = imagefiles.directory(root, place.rpartition("/")[0])
        if directory and library.machine == host:
            return directory, host
        other = other if other[0] else (directory, library.machine)
    return other


def _find_libc32(root: inroot.Root) -> str:
    """Return the directory of a 32-bit glibc; "" if the image has none."""
    for directory in _LIBDIRS_32:
        _, library = imagefiles.library_at(root, f"{directory}/libc.so.6")
        if library is not None and library.machine == "i386":
            return imagefiles.directory(root, directory)
    return ""


def _find_in_store(root: inroot.Root, env: dict[str, str]) -> tuple[str, str]:
    """Return (directory where the programs search a driver, machine) if the glibc is in a Nix or Guix store."""
    host = os.uname().machine
    for store in _STORES:
        for name in imagefiles.names_in(root, store, _MAX_STORE_NAMES):
            if "-glibc-" not in name:
                continue
            _, library = imagefiles.library_at(root, f"{store}/{name}/lib/libc.so.6")
            if library is not None and library.machine == host:
                named = _library_path(env.get("LD_LIBRARY_PATH", ""), "/lib")
                chosen = (path for path in named if path in (_STORE_LIBDIR, *_STORE_OTHER_LIBDIRS))
                return next(chosen, _STORE_LIBDIR), host
    return "", ""


def _preferred_directories(root: inroot.Root, libdir: str, names: list[str], env: dict[str, str]) -> Iterator[str]:
    """Return directories that a loader can search before, or instead of, the cache's entry for the libdir."""
    for directory in _library_path(env.get("LD_LIBRARY_PATH", ""), libdir):
        if imagefiles.directory(root, directory):  # NVIDIA's images name two directories that do not exist
            yield directory
            yield from _variants(root, directory, imagefiles.names_in(root, directory))
    if libdir:
        yield from _variants(root, libdir, names)


def _later_directories(root: inroot.Root) -> Iterator[str]:
    """Return directories with another libcuda that a program finds only by an LD_LIBRARY_PATH of later, which conda's
    activate scripts, entry scripts and shell profiles set: of conda, and of packages in /opt."""
    opt = imagefiles.names_in(root, "/opt", _MAX_LATER)
    conda = [name for name in imagefiles.names_in(root, "/root", _MAX_LATER) if name.endswith(_CONDA)]
    prefixes = [*(f"/opt/{name}" for name in opt), *(f"/root/{name}" for name in conda)]
    if "nvidia" in opt:
        yield from imagefiles.matches(root, "/opt/nvidia/hpc_sdk", ("*", "*", "cuda", "*", "compat"))
    found = {place: imagefiles.present(root, place, (*_LATER, _ENVIRONMENTS)) for place in prefixes[:_MAX_LATER]}
    above = [f"{place}/{_ENVIRONMENTS}" for place, names in found.items() if _ENVIRONMENTS in names]
    environments = [one for place in above for one in imagefiles.matches(root, place, ("*",))]
    found.update((one, imagefiles.present(root, one, _LATER)) for one in environments[: _MAX_LATER - len(found)])
    yield from (f"{place}/{name}" for place, names in found.items() for name in names if name != _ENVIRONMENTS)


def _variants(root: inroot.Root, directory: str, names: list[str]) -> Iterator[str]:
    """Return the directories for processor variants (glibc-hwcaps) below `directory`. `names`: its entries, or all
    known variants if it could not be listed."""
    listed = 0 < len(names) < imagefiles.MAX_NAMES
    yield from (f"{directory}/{sub}" for sub in _LEGACY_HWCAPS if not listed or sub.partition("/")[0] in names)
    if not listed or "glibc-hwcaps" in names:
        yield from (f"{directory}/glibc-hwcaps/{n}" for n in imagefiles.names_in(root, f"{directory}/glibc-hwcaps"))


def _library_path(value: str, libdir: str) -> list[str]:
    """Return the absolute directories of an LD_LIBRARY_PATH with $LIB and $PLATFORM expanded. Relative ones and
    $ORIGIN depend on the program and are skipped."""
    lib = libdir.removeprefix("/usr").lstrip("/") if libdir else "lib"
    tokens = {"LIB": lib, "PLATFORM": os.uname().machine}
    directories: list[str] = []
    for part in value[:_MAX_ENV_BYTES].replace(";", ":").split(":"):
        for token, text in tokens.items():
            part = part.replace("${" + token + "}", text).replace("$" + token, text)
        if part.startswith("/") and "$ORIGIN" not in part and part not in directories and _is_file_name(part):
            directories.append(part)
    return directories[:_MAX_DIRS]


def _is_file_name(text: str) -> bool:
    """Return whether a string from JSON can be a path: no NUL, and no surrogate that encodes no byte."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _starting(names: list[str], prefix: str) -> list[str]:
    """Return the names that start with `prefix`, from a sorted list of often thousands."""
    begin = end = bisect_left(names, prefix)
    while end < len(names) and names[end].startswith(prefix):
        end += 1
    return names[begin:end]


def _candidates(
    root: inroot.Root,
    libdir: str,
    drivers: list[str],
    directories: list[str],
    cached: dict[str, list[tuple[str, int]]],
) -> Iterator[tuple[str, str]]:
    """Yield (path, soname) of every place where a driver library may be."""
    for name, soname in SONAMES.items():
        yield from ((path, soname) for path, _ in cached.get(name, ()))
    for directory in directories:
        yield from ((f"{directory}/{name}", SONAMES[name]) for name in imagefiles.present(root, directory, SONAMES))
    for name in drivers:
        yield from ((f"{libdir}/{name}", f"{prefix}.1") for prefix in _PREFIXES if name.startswith(prefix))


def _add_driver(root: inroot.Root, path: str, soname: str, found: dict[str, str]) -> None:
    """Add the file that `path` resolves to, if it is a driver library: a shared object with its name or its DT_SONAME.
    A link of that name may lead to another file (a library, /etc/passwd), which must not be covered. Our own directory
    hides what an image has there, such as one that was committed from a container."""
    real, library = imagefiles.library_at(root, path)
    if not real or library is None or real.startswith(constants.PRIVATE_DIR + "/"):
        return
    if real.rpartition("/")[2].startswith(_PREFIXES) or library.soname in SONAMES:
        found.setdefault(real, soname)


def _links(root: inroot.Root, libdir: str, drivers: list[str]) -> Iterator[tuple[str, str]]:
    """Return (path, text) of the links in the libdir that have a driver library's name."""
    for name in drivers:
        path = f"{libdir}/{name}"
        try:
            fd = inroot.open_in(root, path, os.O_PATH | os.O_NOFOLLOW)
        except syscalls.SyscallError as error:
            if error.errno == errno.ENOENT:
                continue  # removed meanwhile
            raise
        try:
            if stat.S_ISLNK(os.fstat(fd).st_mode):
                yield path, os.readlink("", dir_fd=fd)
        finally:
            os.close(fd)
