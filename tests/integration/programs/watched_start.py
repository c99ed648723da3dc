"""The hook or the runtime, which records the container's state at each point of interrupted_hook.py: what a kill there
would leave. For tests only.

`write_hook` and `write_runtime` make the program. It writes a JSON list to `directory`/seen with one row for each
point: the parts of the container that are in place, by the names in PARTS.
"""

from __future__ import annotations

from pathlib import Path

from tests.integration.programs import interrupted_hook

PARTS = ("device", "limits file", "share", "rw", "libcuda", "libnvidia-ml")

_LOOK = """
import json
from gpushare.state import shm_abi
seen = []

above = os.open({state!r}, os.O_PATH)  # in the container's mount namespace our path is none

def limits_are_complete(name):
    try:
        file = os.open("containers/" + name + "/share/limits", os.O_RDONLY, dir_fd=above)
        limits = shm_abi.read_limits(os.read(file, 1 << 16))
        os.close(file)
        usage = os.stat("containers/" + name + "/rw/usage", dir_fd=above)
        return usage.st_size == shm_abi.USAGE_SIZE and limits.devices[0].memory_limit_bytes > 0
    except (OSError, shm_abi.RegionError):
        return False

def parts(targets, name):
    libraries = [target.rpartition("/")[2] for target in targets if "/usr/lib/gpushare/" not in target]
    return [
        any(target.endswith("/dev/nvidia0") for target in targets),
        limits_are_complete(name),
        any(target.endswith("/usr/lib/gpushare") for target in targets),
        any(target.endswith("/usr/lib/gpushare/rw") for target in targets),
        any(name.startswith("libcuda.so.5") for name in libraries),
        any(name.startswith("libnvidia-ml.so.5") for name in libraries),
    ]

def look():
    sys.setprofile(None)
    seen.append(parts(*targets()))
    sys.setprofile(watch)

def finish():
    sys.setprofile(None)
    with open({seen!r}, "w") as file:
        json.dump(seen, file)
"""

_HOOK = """
text = b"".join(iter(lambda: os.read(0, 1 << 16), b""))
given = os.memfd_create("state")
os.write(given, text)
os.lseek(given, 0, 0)
os.dup2(given, 0)
state = json.loads(text)
mounts = os.open("/proc/%d/mountinfo" % state["pid"], os.O_RDONLY) if state.get("pid") else -1

def targets():
    text, part = b"", b"x"
    while part:
        part = os.pread(mounts, 1 << 16, len(text))
        text += part
    return [line.split(" ")[4] for line in text.decode().splitlines()], state["id"]
"""

_RUNTIME = """
words = sys.argv[1:]
bundle = words[words.index("--bundle") + 1] if "--bundle" in words else ""

def targets():
    with open(bundle + "/config.json") as file:
        spec = json.load(file)
    mounts = [mount for mount in spec["mounts"] if mount["type"] != "bind" or os.path.exists(mount["source"])]
    there = [entry["destination"] for entry in mounts] + [device["path"] for device in spec["linux"].get("devices", ())]
    record = json.loads(spec.get("annotations", {}).get("gpushare.io/applied", '{"ops": []}'))  # what the hook mounts
    pairs = [op[1:3] for op in record["ops"] if op[0] == "Bind"]
    pairs += [op[2:0:-1] for op in record["ops"] if op[0] == "Device"]
    return there + [target for target, source in pairs if os.path.exists(source)], words[-1]
"""


def _watched(program: Path, directory: Path, state: Path, targets: str, only: str) -> None:
    text = program.read_text()
    look = _LOOK.replace("{seen!r}", repr(str(directory / "seen"))).replace("{state!r}", repr(str(state))) + targets
    look = f"if {only}:\n" + "".join(f"    {line}\n" for line in look.splitlines()) + "else:\n    look = finish = int\n"
    text = text.replace("passed = 0\n", f"{look}passed = 0\n", 1)
    text = text.replace("    passed += 1\n", "    passed += 1\n    look()\n", 1)
    text = text.replace("os._exit(code)", "finish()\nos._exit(code)").replace(
        "    execute(program, words)", "    finish()\n    execute(program, words)"
    )
    program.write_text(text)


def write_hook(directory: Path, state: Path) -> Path:
    """Return it with the hook's command line; it records the mounts of the container's init."""
    program = interrupted_hook.write_hook(directory)
    _watched(program, directory, state, _HOOK, "sys.argv[-1] != 'poststop'")
    return program


def write_runtime(directory: Path, state: Path) -> Path:
    """Return it with gpushare-runtime's command line; it records config.json, which a killed create leaves."""
    program = interrupted_hook.write_runtime(directory)
    _watched(program, directory, state, _RUNTIME, "'create' in sys.argv")
    return program
