"""Find forward-compatibility driver libraries of CUDA images, in /usr/local/cuda*/compat (start path).

    directories(root)                   -> tuple[str, ...]   every such directory, and lib* below it (NGC: lib.real)
    newest(root, machine, directories)  -> (version, ((stem, path), ...))   ("", ()) when there is none

Only regular files in the directory itself count: a versioned name that is a link could lead anywhere.
"""

from __future__ import annotations

from ..system import imagefiles, inroot
from .drivertable import COMPAT

_MAX_DIRECTORIES = 64


def directories(root: inroot.Root) -> tuple[str, ...]:
    """All compat directories, by name. NVIDIA's own images make `compat/lib`, a link to `lib.real`, when they run."""
    found: list[str] = []
    for name in imagefiles.names_in(root, "/usr/local"):
        if name.startswith("cuda"):
            base = f"/usr/local/{name}/compat"
            below = imagefiles.names_in(root, base)
            if not below and not imagefiles.directory(root, base):
                continue
            found += [base, *(f"{base}/{one}" for one in below if one.startswith("lib") and ".so" not in one)]
    return tuple(found[:_MAX_DIRECTORIES])


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    if len(parts) < 2 or not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        return ()
    return tuple(int(part) for part in parts)


def _is_library(root: inroot.Root, path: str, machine: str) -> bool:
    """Whether a shared object for this machine is at exactly this path, not behind a link."""
    real, library = imagefiles.library_at(root, path)
    return real == path and library is not None and library.machine == machine


def newest(
    root: inroot.Root, machine: str, named_directories: tuple[str, ...]
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The highest version of libcuda in `directories(root)`, and all libraries of that version beside it."""
    best: tuple[tuple[int, ...], str, str] = ((), "", "")
    for named in named_directories:
        directory = imagefiles.directory(root, named)
        for name in imagefiles.names_in(root, directory) if directory else ():
            version = name[len("libcuda.so.") :] if name.startswith("libcuda.so.") else ""
            if _version(version) > best[0] and _is_library(root, f"{directory}/{name}", machine):
                best = (_version(version), version, directory)
    _, version, directory = best
    if not version:
        return "", ()
    paths = ((stem, f"{directory}/{stem}.so.{version}") for stem in COMPAT)
    return version, tuple((stem, path) for stem, path in paths if _is_library(root, path, machine))
