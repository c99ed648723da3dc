"""Forward compatibility: use the image's libcuda where it is newer than the host's driver. Pure (start path).

    newest(files, image, shares, notes) -> DriverFiles

Every library that must match libcuda then comes from the image, in one version, or is left out: libcuda (behind the
shim), ptxjitcompiler, nvvm and debugger. NVML and the rest stay the host's: they must match the kernel module.
Source: CUDA compatibility guide, "Forward compatibility": a newer major branch, on data centre GPUs.
"""

from __future__ import annotations

from ..core.model import Image, Share
from .driverfiles import DriverFiles, Library
from .drivertable import CAPABILITIES, COMPAT

_NOT_SUPPORTED = ("geforce", "geforcertx", "titan", "titanrtx")  # brands on which cuInit would return 804


def _major(version: str) -> int:
    major = version.partition(".")[0]
    return int(major) if major.isascii() and major.isdigit() else 0


def _library(stem: str, version: str, path: str) -> Library:
    endings = CAPABILITIES["compute"].libraries[stem]
    chain = (f"{stem}.so.{version}", *(f"{stem}.{ending}" for ending in endings))
    return Library(stem, chain[0], path, tuple((chain[i + 1], chain[i]) for i in range(len(endings))), in_image=True)


def newest(files: DriverFiles, image: Image, shares: tuple[Share, ...], notes: list[str]) -> DriverFiles:
    """Replace older libraries of `files` by the image's own; append a note about the decision."""
    found = dict(image.compat_files)
    if "libcuda" not in found or _major(image.compat_version) <= _major(files.version):
        return files
    refusing = next((share.device.brand for share in shares if share.device.brand in _NOT_SUPPORTED), "")
    if refusing:
        notes.append(
            f"the image's libcuda {image.compat_version} is not used: brand {refusing} has no forward compatibility"
        )
        return files
    notes.append(f"forward compatibility: libcuda {image.compat_version} of the image over driver {files.version}")
    new = {stem: _library(stem, image.compat_version, path) for stem, path in found.items()}
    kept = tuple(library for library in files.libraries if library.stem not in COMPAT)
    added = tuple(new[stem] for stem in COMPAT if stem in new and stem != "libcuda" and files.asked_cuda)
    dropped = [library.stem for library in files.libraries if library.stem in COMPAT and library.stem not in new]
    if dropped:
        notes.append(f"{', '.join(dropped)}: not in the image's compat directory, the host has another version")
    return files._replace(cuda=new["libcuda"], libraries=added + kept)
