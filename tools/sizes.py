"""Print docs/sizes.md: what is in the bundle, and how large it is (`make sizes`, after `make dist`)."""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
BUNDLE = TREE / "build" / "dist" / "gpushare"
HEAD = """\
# Sizes

What the package installs below `/usr/libexec/gpushare`, and what the archive unpacks: everything that gpushare needs,
with its own Python. `make sizes` generates this page from the bundle of `make dist`; a test compares both. MB are
millions of bytes.

| part | MB | why it is there |
|---|---:|---|
"""
# Part -> why; parts that are not here are libraries of the interpreter
WHY = {
    "gpushare": "the programs",
    "launchers": "start before Python, and skip it for containers without a request",
    "shim": "is mounted into containers",
    "snapshot": "Python with all modules in memory, for a fast start",
    "Python": "the interpreter",
    "Python's library": "its modules",
    "licences": "notices of everything here",
    "manual pages": "",
    "configuration": "a sample and the schema",
    "click": "the command line",
    "jsonschema": "checks the configuration",
    "nvidia-ml-py": "NVML",
    "prometheus_client": "metrics",
    "PyYAML": "the configuration",
    "rich": "tables, `top`",
    "tomlkit": "edits containerd's configuration",
}
OF_JSONSCHEMA = ("attrs", "jsonschema-specifications", "referencing", "rpds-py", "typing_extensions")
FOLDERS = {"shim": "shim", "licenses": "licences", "share": "manual pages", "config": "configuration"}


def _packages() -> dict[str, str]:
    """Top-level module -> the Python package that installed it."""
    return {module: names[0] for module, names in _modules().items()} | {"gpushare": "gpushare"}


def _modules() -> dict[str, list[str]]:
    if sys.version_info >= (3, 10):
        return dict(metadata.packages_distributions())
    found: dict[str, list[str]] = {}
    for one in metadata.distributions():
        for path in one.files or []:
            found.setdefault(path.parts[0].split(".")[0], []).append(one.metadata["Name"])
    return found


def parts(bundle: Path = BUNDLE) -> dict[str, int]:
    """Name of a part -> bytes."""
    packages = _packages()
    found: dict[str, int] = {}
    for folder, _, names in os.walk(bundle):
        for path in (Path(folder, name) for name in names):
            if not path.is_symlink():
                name = _part(path.relative_to(bundle), packages)
                found[name] = found.get(name, 0) + path.stat().st_size
    return found


def _part(path: Path, packages: dict[str, str]) -> str:
    if path.parts[0] in FOLDERS:
        return FOLDERS[path.parts[0]]
    if path.name == "snapshot":
        return "snapshot"
    if "_internal" not in path.parts:
        return "launchers" if len(path.parts) > 1 else "licences"
    inside = path.parts[path.parts.index("_internal") + 1 :]
    if inside[0] != "lib":
        return "Python" if inside[0] == "python3" else inside[0]
    name = inside[2].removesuffix(".pyc")
    if name.endswith(".dist-info"):
        return next((one for one in packages.values() if name.startswith(one.replace("-", "_"))), "Python's library")
    return packages.get(name.split(".")[0], "Python's library")


def text(found: dict[str, int]) -> str:
    """Return the page."""

    def why(name: str) -> str:
        default = "of jsonschema" if name in OF_JSONSCHEMA else "a library of Python" if ".so" in name else ""
        return WHY.get(name, default)

    rows = sorted(found.items(), key=lambda item: -item[1])
    lines = [f"| {name} | {size / 1e6:.2f} | {why(name)} |\n" for name, size in rows]
    return HEAD + "".join(lines) + f"| **all** | {sum(found.values()) / 1e6:.2f} | |\n" + TAIL


TAIL = f"""
Containers get the shim alone. The host needs runc or crun, and no other package. A build for
{sysconfig.get_platform()} is shown.
"""


if __name__ == "__main__":
    sys.stdout.write(text(parts()))
