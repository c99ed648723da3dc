"""Build a simulated host root: device nodes (regular files), /proc and /sys entries, and driver files.

    simhost.py DIR [--gpus N] [--model "NVIDIA H200"] [--memory 16GiB] [--context-mib 300] [--uuid GPU-...]...
               [--driver 580.159.04] [--slice-ms 2] [--switch-us 50 200] [and the other fields of Timing]
               [--init-bytes 3407872] [and the other fields of Costs; a model has its own]

In an existing root each file is replaced; the state of its devices is reset.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import struct
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

if __package__:
    from . import hostfiles, layout, models
else:
    import hostfiles  # type: ignore[no-redef]
    import layout  # type: ignore[no-redef]
    import models  # type: ignore[no-redef]

VERSION = "535.261.03"
CHECKPOINTS = "580.159.04"  # a driver with the checkpoint API
CUDA_VERSIONS = {VERSION: 12020, CHECKPOINTS: 13000}  # the drivers that `make sim` builds
BUILT = Path(__file__).resolve().parents[1] / "build" / "sim"
LIBDIR = "usr/lib/x86_64-linux-gnu"
MARKER = ".gpushare-sim"
DEFAULT_MODEL = models.DEFAULT
DEFAULT_CONTEXT_MIB = int(models.MODELS[DEFAULT_MODEL].context_mib)
Costs = models.Costs
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")


class Timing(NamedTuple):
    """How the simulated device divides its time, and what calls cost."""

    slice_ms: float = 2.0
    slice_noise: float = 0.2  # a slice is longer or shorter by at most this fraction
    switch_us: tuple[float, float] = (50.0, 200.0)  # a context switch takes a time in this range
    kernel_us: float = 5.0  # duration of a kernel whose name gives none
    launch_us: float = 2.0  # minimum processor time of a launch
    record_us: float = 1.0  # minimum processor time of recording an event
    bubble_us: float = 1.0  # device time of recording an event
    seed: int = 1


def parse_size(text: str) -> int:
    """Parse "16GiB" or "512MiB" into bytes; a bare number is bytes."""
    number, unit = (text[:-3], text[-3:]) if text[-3:] in UNITS else (text, "")
    try:
        size = int(float(number) * UNITS.get(unit, 1))
    except ValueError:
        size = 0
    if size < layout.BLOCK_BYTES:
        raise ValueError(f"{text!r} is not a device memory size; write it like 16GiB")
    return size


def default_uuid(index: int) -> str:
    """Return a UUID that depends only on the index."""
    return "GPU-" + str(
        uuid.UUID(bytes=hashlib.sha256(b"gpushare simulated device %d" % index).digest()[:16], version=4)
    )


DEFAULT_TIMING = Timing()


def write_device(
    path: Path,
    gpu: hostfiles.Gpu,
    late_return_ms: float = 5.0,
    timing: Timing = DEFAULT_TIMING,
    costs: Optional[models.Costs] = None,
    driver: str = VERSION,
) -> None:
    """Write a new sparse device file with mode 0666. `costs`: default is the model's."""
    t, like = timing, models.model_of(gpu.model)
    config = layout.CONFIG.pack(
        *(layout.MAGIC, layout.VERSION, layout.STATE_BYTES, gpu.index, gpu.minor),
        *(gpu.memory_bytes, gpu.context_bytes, layout.BLOCK_BYTES),
        *(int(late_return_ms * 1e6), int(t.slice_ms * 1e6), int(t.switch_us[0] * 1e3), int(t.kernel_us * 1e3)),
        *(uuid.UUID(gpu.uuid[4:]).bytes, gpu.model.encode(), driver.encode(), f"0000{gpu.bus_id}".encode()),
        *(
            CUDA_VERSIONS[driver],
            *like.capability,
            like.multiprocessors,
            0,
            gpu.bus,
            0,
            0x25B610DE,
            1755000,
            6251000,
            128,
            2 << 20,
        ),
        *(int(t.switch_us[1] * 1e3), int(t.slice_noise * 1e6), int(t.launch_us * 1e3), int(t.record_us * 1e3)),
        *(int(t.bubble_us * 1e3), t.seed),
        *(gpu.reserved_bytes, like.cores, like.threads, gpu.compute_mode, 0),
        os.stat("/proc/self/ns/pid").st_ino,
        *map(int, like.costs if costs is None else costs),
    )
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        file.write(config)
        file.truncate(layout.STATE_BYTES)
    os.chmod(temporary, 0o666)
    os.replace(temporary, path)


def raise_xid(node: Path, xid: int) -> None:
    """Report an Xid error of the device with this node to NVML's clients."""
    with open(node, "r+b") as file:
        file.seek(layout.XID_OFFSET)
        (last,) = struct.unpack("<I", file.read(4))
        file.seek(layout.XID_OFFSET)
        file.write(struct.pack("<I", ((last >> 16) + 1) % 0x10000 << 16 | xid))


def fail_next(node: Path, operation: str) -> None:
    """Let the next "checkpoint" or "restore" of a process fail half-way, if the device with this node is its first."""
    with open(node, "r+b") as file:
        file.seek(layout.FAULT_OFFSET)
        file.write(struct.pack("<I", layout.FAULTS.index(operation)))


def _write(path: Path, text: str, mode: int = 0o444) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _link(path: Path, text: str) -> None:
    if path.is_symlink() and os.readlink(path) == text:
        return
    path.unlink(missing_ok=True)
    path.symlink_to(text)


def _install(source: Path, target: Path, mode: int = 0o644) -> None:
    """Replace the file by a rename: running programs keep the old file, and a reader never sees half of one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".new")
    shutil.copyfile(source, temporary)
    temporary.chmod(mode)
    os.replace(temporary, target)


def write_libraries(root: Path, built: Path, driver: str = VERSION) -> None:
    libdir = root / LIBDIR
    for other in CUDA_VERSIONS.keys() - {driver}:
        for stale in libdir.glob(f"*.so.{other}"):
            stale.unlink()
    for stem in ("libcuda", "libnvidia-ml"):
        source = built / f"{stem}.so.{driver}"
        _install(source if source.exists() else built / f"{stem}.so.{VERSION}", libdir / f"{stem}.so.{driver}")
        _link(libdir / f"{stem}.so.1", f"{stem}.so.{driver}")
        _link(libdir / f"{stem}.so", f"{stem}.so.1")
    empty = (built / "libempty.so").read_bytes()
    for stem, suffix in hostfiles.PLACEHOLDERS.items():
        soname = f"{stem}.so.{suffix or driver}"
        library = libdir / f"{stem}.so.{driver}"
        library.unlink(missing_ok=True)
        library.write_bytes(hostfiles.placeholder(empty, soname))
        library.chmod(0o644)
        if suffix:
            _link(libdir / soname, library.name)
    _install(built / "nvidia-smi", root / "usr/bin/nvidia-smi", 0o755)
    _install(built / "nvidia-cuda-mps-control", root / "usr/bin/nvidia-cuda-mps-control", 0o755)


def write_proc(root: Path, gpus: Sequence[hostfiles.Gpu], version: str = VERSION) -> None:
    driver = root / "proc/driver/nvidia"
    _write(driver / "version", hostfiles.VERSION_TEXT.format(version=version))
    _write(driver / "params", hostfiles.PARAMS_TEXT)
    shutil.rmtree(driver / "gpus", ignore_errors=True)
    for gpu in gpus:
        _write(driver / "gpus" / gpu.bus_id / "information", hostfiles.information(gpu, version))
        _write(driver / "gpus" / gpu.bus_id / "registry", 'Binary: ""\n')
    _write(root / "sys/module/nvidia/version", version + "\n")


def make_simhost(
    path: str | os.PathLike[str],
    gpus: int = 1,
    memory_bytes: Optional[int] = None,
    model: str = DEFAULT_MODEL,
    context_bytes: Optional[int] = None,
    uuids: Sequence[str] = (),
    late_return_ms: float = 5.0,
    built: Path = BUILT,
    timing: Timing = DEFAULT_TIMING,
    minors: Sequence[int] = (),
    compute_mode: int = 0,
    costs: Optional[models.Costs] = None,
    driver: str = VERSION,
) -> Path:
    """Build the root and return it.

    `memory_bytes` is what programs can allocate; NVML's total has the model's reserved memory in addition. Sizes that
    are not given are the model's (models.py). `compute_mode`: nvmlComputeMode_t, 3 is exclusive to one process.
    `uuids` replace the default ones, by index. `minors` default to the indices; on real hosts they may differ from
    them. `costs` replace all costs of the model; `models.model_of(model).costs._replace(...)` changes single ones.
    `driver` is one of CUDA_VERSIONS; only CHECKPOINTS has the checkpoint API.
    """
    if driver not in CUDA_VERSIONS:
        raise ValueError(f"driver {driver!r} is not simulated; give one of {', '.join(CUDA_VERSIONS)}")
    root = Path(path)
    (root / "dev").mkdir(parents=True, exist_ok=True)
    like = models.model_of(model)
    sizes = (
        like.memory_bytes if memory_bytes is None else memory_bytes,
        like.context_bytes if context_bytes is None else context_bytes,
        like.reserved_bytes,
        compute_mode,
    )
    devices = []
    for index in range(gpus):
        name = uuids[index] if index < len(uuids) else default_uuid(index)
        minor = minors[index] if index < len(minors) else index
        devices.append(hostfiles.Gpu(index, minor, name, model, index + 1, *sizes))
    for stale in (root / "dev").glob("nvidia[0-9]*"):
        stale.unlink()
    for gpu in devices:
        write_device(root / "dev" / f"nvidia{gpu.minor}", gpu, late_return_ms, timing, costs, driver)
    for node in CONTROL_NODES:
        _write(root / "dev" / node, "", 0o666)
    write_proc(root, devices, driver)
    write_libraries(root, built, driver)
    _write(root / MARKER, "The device nodes below dev/ are regular files of a simulated driver.\n")
    return root


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Build a simulated host root with simulated NVIDIA devices.")
    parser.add_argument("dir")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--memory", help="what programs can allocate of each device (default: the model's)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"one of {', '.join(models.MODELS)}, or any name")
    parser.add_argument("--context-mib", type=int, help="memory of a context (default: the model's)")
    parser.add_argument("--late-return-ms", type=float, default=5.0, help="delay until a dead client's memory is free")
    for name, value in Timing._field_defaults.items():
        several = 2 if isinstance(value, tuple) else None
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(value) if not several else float, nargs=several, default=value)
    for name, value in Costs._field_defaults.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(option, type=int, help="a cost (default: the model's)")
    parser.add_argument(
        "--driver", choices=CUDA_VERSIONS, default=VERSION, help=f"{CHECKPOINTS} has the checkpoint API"
    )
    parser.add_argument("--uuid", action="append", default=[], help="in device order; repeat")
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in Costs._fields if getattr(options, name) is not None}
    try:
        make_simhost(
            options.dir,
            options.gpus,
            parse_size(options.memory) if options.memory else None,
            options.model,
            options.context_mib << 20 if options.context_mib is not None else None,
            options.uuid,
            options.late_return_ms,
            timing=Timing(*(getattr(options, name) for name in Timing._fields)),
            costs=models.model_of(options.model).costs._replace(**given),
            driver=options.driver,
        )
    except (OSError, ValueError) as error:
        print(f"simhost.py: {error}; is the simulated driver built (make sim)?", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
