"""Generate parts of the simulated libraries: export maps, stubs, stream variants and look-up tables.

    generate.py cuda VERSION OUT.c OUT.map CUDA_H_PREPROCESSED OBJECT...
    generate.py nvml OUT.c OUT.map OBJECT...

The lists in exports/ are the exports and answers of the real 535.261.03 driver, and what later drivers have in
addition, as far as it is simulated. An export that no object defines becomes a stub that returns "not supported".
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXPORTS = Path(__file__).parent / "exports"
CUDA_VERSIONS = {"535": 12020, "580": 13000}  # by branch of the driver
CUDA_NOT_SUPPORTED = 801
NVML_NOT_SUPPORTED = 3
PER_THREAD = re.compile(r"_pt[sd][zs]$")


def read_exports(stem: str, version: str) -> dict[str, int]:
    """Map each export's name to its object size in bytes; 0 for a function."""
    exports = {}
    for line in lines(stem, version):
        symbol, _, size = line.partition(" ")
        exports[symbol] = int(size or 0)
    return exports


def lines(stem: str, version: str) -> list[str]:
    """Return the lines of the lists of all drivers up to the version's."""
    last = int(version.split(".")[0])
    paths = sorted(p for p in EXPORTS.glob(f"{stem}-*.txt") if int(p.stem.rpartition("-")[2]) <= last)
    return [line for path in paths for line in path.read_text().splitlines()]


def defined(objects: list[str]) -> set[str]:
    """Return the global symbols that the objects define."""
    text = subprocess.run(["nm", "-g", "--defined-only", *objects], check=True, capture_output=True, text=True).stdout
    return {line.split()[2] for line in text.splitlines() if len(line.split()) == 3}


def export_map(exports: dict[str, int]) -> str:
    names = "".join(f"    {name};\n" for name in sorted(exports))
    return "{\n  global:\n" + names + "  local: *;\n};\n"


def stub(name: str, size: int, code: int) -> str:
    """Return a stub, which needs no parameters: the caller cleans up its arguments and the result is constant."""
    if size:
        return f"EXPORT unsigned char {name}[{size}];\n"
    return f"EXPORT int {name}(void);\nEXPORT int {name}(void) {{ return {code}; }}\n"


def prototypes(header: str) -> dict[str, str]:
    """Map each function's name to its parameter list, from the preprocessed cuda.h."""
    found = re.findall(r"\bCUresult\s+(cu\w+)\s*\(([^;{]*?)\)\s*;", Path(header).read_text(), re.S)
    return {name: " ".join(parameters.split()) for name, parameters in found}


def argument(parameter: str) -> str:
    match = re.search(r"\(\s*\*\s*(\w+)\s*\)|(\w+)\s*(?:\[\w*\])?$", parameter)
    if match is None:
        raise SystemExit(f"generate.py: cannot read parameter {parameter!r}; extend argument()")
    return match.group(1) or match.group(2)


def per_thread_variant(name: str, parameters: str) -> str:
    """Return name_ptsz or name_ptds: a call of the base function in which the default stream is the per-thread one."""
    base = PER_THREAD.sub("", name)
    arguments = [argument(p) for p in parameters.split(",")]
    call = ", ".join("sim_stream(hStream)" if a == "hStream" else a for a in arguments)
    return f"EXPORT CUresult {name}({parameters}) {{ return {base}({call}); }}\n"


def cuda(version: str, out_c: str, out_map: str, header: str, objects: list[str]) -> None:
    exports = read_exports("libcuda", version)
    have, declared = defined(objects), prototypes(header)
    variants, stubs = [], []
    for name in sorted(exports):
        base = PER_THREAD.sub("", name)
        if name in have:
            continue
        if base != name and base in have and name in declared:
            variants.append(per_thread_variant(name, declared[name]))
        else:
            stubs.append(stub(name, exports[name], CUDA_NOT_SUPPORTED))
    rows = [line.split() for line in lines("procaddress", version)]
    errors = [line.split("|") for line in lines("errors", version)]
    symbols = sorted({row[3] for row in rows})
    Path(out_c).write_text(
        '#include "sim.h"\n#include "procaddress.h"\n'
        f"const int sim_cuda_version = {CUDA_VERSIONS[version.split('.')[0]]};\n"
        "static inline CUstream sim_stream(CUstream s) { return s ? s : CU_STREAM_PER_THREAD; }\n"
        + "".join(variants)
        + "extern const struct sim_error sim_errors[];\nextern const unsigned sim_n_errors;\n"
        + "const struct sim_error sim_errors[] = {\n"
        + "".join(f'{{{code}, "{name}", "{text}"}},\n' for code, name, text in errors)
        + "};\nconst unsigned sim_n_errors = sizeof sim_errors / sizeof *sim_errors;\n"
    )
    Path(out_c.replace(".c", "_stubs.c")).write_text(
        '#include "procaddress.h"\n#define EXPORT __attribute__((visibility("default")))\n'
        + "".join(stubs)
        + "".join(f"extern char {s}[];\n" for s in symbols if f" {s}(" not in "".join(stubs))
        + "extern const struct sim_proc sim_procs[];\nextern const unsigned sim_n_procs;\n"
        + "const struct sim_proc sim_procs[] = {\n"
        + "".join(f'{{"{n}", {flag}, {since}, (void *){symbol}}},\n' for n, flag, since, symbol in rows)
        + "};\nconst unsigned sim_n_procs = sizeof sim_procs / sizeof *sim_procs;\n"
    )
    Path(out_map).write_text(export_map(exports))


def nvml(out_c: str, out_map: str, objects: list[str]) -> None:
    exports = read_exports("libnvidia-ml", "535")
    have = defined(objects)
    Path(out_c).write_text(
        '#define EXPORT __attribute__((visibility("default")))\n'
        + "".join(stub(n, exports[n], NVML_NOT_SUPPORTED) for n in sorted(exports) if n not in have)
    )
    Path(out_map).write_text(export_map(exports))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["cuda"] and len(arguments) > 5:
        cuda(arguments[1], arguments[2], arguments[3], arguments[4], arguments[5:])
    elif arguments[:1] == ["nvml"] and len(arguments) > 3:
        nvml(arguments[1], arguments[2], arguments[3:])
    else:
        raise SystemExit(f"usage: {__doc__}")


if __name__ == "__main__":
    main(sys.argv[1:])
