"""Compare shim/symbols.tsv with the functions that CUDA headers declare: make check-headers.

    check_headers.py    downloads NVIDIA's newest headers into build/newest-headers; returns 1 if names are missing

`declared` is also how a test compares the table with the headers of the build.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from shim import gen_symbols

TREE = Path(__file__).resolve().parents[1]
# Without these macros the headers rename old functions to new ones, or omit the old ones.
HEADERS = {
    "cuda": ("cuda.h", "-D__CUDA_API_VERSION_INTERNAL"),
    "nvml": ("nvml.h", "-DNVML_NO_UNVERSIONED_FUNC_DEFS"),
}
PACKAGES = {"cuda": "nvidia-cuda-runtime", "nvml": "nvidia-nvml-dev"}


def declared(library: str, include: Path) -> set[str]:
    """Return every function that the library's header declares, as the compiler lists them."""
    header, macro = HEADERS[library]
    prefix = "cu" if library == "cuda" else "nvml"
    with tempfile.NamedTemporaryFile("r") as listing:
        subprocess.run(
            ["gcc", "-fsyntax-only", macro, f"-I{include}", "-aux-info", listing.name, "-x", "c", "-"],
            input=f"#include <{header}>\n",
            text=True,
            check=True,
        )
        # One line per declaration: /* file:line:NC */ extern type name (types);
        lines = [line for line in listing.read().splitlines() if f"/{header}:" in line]
    return {found.group(1) for line in lines if (found := re.search(rf"\b({prefix}[A-Z]\w*) \(", line))}


def missing(library: str, known: set[str]) -> list[str]:
    """Return the names that the table lacks."""
    return sorted(known - {row.name for row in gen_symbols.read() if row.library == library})


def download(directory: Path) -> dict[str, tuple[str, Path]]:
    """Fetch the newest packages with headers; return the version and the include directory for each library."""
    shutil.rmtree(directory, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--dest", directory, *PACKAGES.values()], check=True)
    found = {}
    for library, package in PACKAGES.items():
        (wheel,) = directory.glob(f"{package.replace('-', '_')}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory / library)
        found[library] = wheel.name.split("-")[1], next((directory / library).rglob(HEADERS[library][0])).parent
    return found


def main() -> int:
    try:
        newest = download(TREE / "build/newest-headers")
    except subprocess.CalledProcessError as error:
        print(f"gpushare: pip could not download the headers (exit code {error.returncode})", file=sys.stderr)
        return 2
    bad = 0
    for library, (version, include) in newest.items():
        known = declared(library, include)
        names = missing(library, known)
        bad += len(names)
        for name in names:
            print(f"{name}: not classified; add it to shim/symbols.tsv")
        print(f"{PACKAGES[library]} {version}: {len(known)} functions, {len(names)} not in shim/symbols.tsv")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
