"""Print docs/troubleshooting.md: what to do about each message.

Its second half is generated from the messages in the sources (error_texts.py):

PYTHONPATH=hook:. build/venv/bin/python -m tools.error_docs >docs/troubleshooting.md      (make docs)
"""

from __future__ import annotations

import sys

from gpushare.core import errors

from tools.config_docs import WHEN
from tools.error_texts import Message, messages, of_shim, shown

HEAD = """\
# Troubleshooting, by message

The second half of this page is written from the sources by `make docs`, and a test compares them: no message is missing.

`gpushare doctor` looks for what is wrong with a host, tries a share over its driver, and says what to do. Why a container was refused is in the
engine's own output (`docker run` prints it; Kubernetes: `kubectl describe pod`), in the [log](log.md), and in `gpushare inspect ID` after it.
`gpushare explain BUNDLE` says what a container would get, and why, without starting it.

## What the program in the container sees

| what it says | why | what to do |
|---|---|---|
"""
# Messages of other programs that gpushare causes: (text, why, what to do)
SYMPTOMS = (
    ("`CUDA_ERROR_OUT_OF_MEMORY` (2), `CUDA out of memory`", "the container's limit is reached: all its processes count, each with its context", "`gpushare list` says how much; ask for more, or `gpushare limit set ID --memory +2Gi` while it runs"),
    ("`CUDA_ERROR_NOT_PERMITTED` (800) from `cuInit`; NVML: `Insufficient Permissions`", "the share's limits file is missing, damaged or of another version, or there is no room for one more process", "`GPUSHARE_LOG=1` in its environment has the library say the reason on standard error; then start the container anew"),
    ("`CUDA_ERROR_NO_DEVICE` (100), `No devices were found`", "the driver itself has no GPU, or `CUDA_VISIBLE_DEVICES` names one that the container does not have", "`gpushare doctor`; in the container devices are counted from 0"),
    ("`libcuda.so.1: cannot open shared object file`, `nvidia-smi: not found`", "the container asked for nothing, so it got nothing; or another runtime started it", "set `GPUSHARE_MEMORY`, and `--runtime gpushare`; `gpushare explain BUNDLE` says what was read"),
    ("`CUDA_ERROR_MPS_CONNECTION_FAILED` (805)", "a container with `GPUSHARE_BACKEND=mps`, whose MPS daemon is gone", "`gpushare mps status`, `gpushare mps start`, then start the program anew ([mps](mps.md))"),
    ("`CUDA_ERROR_MPS_MAX_CLIENTS_REACHED` (808)", "MPS serves so many processes already", "fewer processes, or `GPUSHARE_BACKEND=shim`"),
    ("`CUDA_ERROR_NOT_INITIALIZED` (3) in a child process", "it was forked after `cuInit`; CUDA does not survive that, with or without gpushare", "start workers with `spawn` instead of `fork`"),
    ("`cudaErrorSoftwareValidityNotEstablished` (103)", "recent CUDA runtimes refuse a driver that is not NVIDIA's, as the simulated one", "on a simulated GPU use programs of the driver API, as `make playground` has them"),
    ("it is slow", "its compute limit holds its launches back", "`gpushare top`, column THROTTLED; `gpushare limit set ID --compute 60`, or `GPUSHARE_COMPUTE_MODE=soft`"),
    ("it hangs", "somebody has paused it", "`gpushare list` says `paused`; `gpushare resume ID`"),
)  # fmt: skip
ENGINES = (
    ("`unknown or invalid runtime name: gpushare`, `Unknown runtime specified gpushare` (docker)", "docker has not read that there is one", "`gpushare runtime configure docker`, then `systemctl reload docker`"),
    ("`no runtime for \"gpushare\" is configured` (containerd)", "the same", "`gpushare runtime configure containerd`, then restart it as the command says"),
    ("`RuntimeClass \"gpushare\" not found` (Kubernetes)", "the manifest is missing", "`kubectl apply -f runtimeclass.yaml` ([kubernetes](kubernetes.md))"),
    ("`could not select device driver \"\" with capabilities: [[gpu]]` (docker)", "docker finds no hook of NVIDIA's for `--gpus`", "leave `--gpus` out, and set `GPUSHARE_MEMORY` or `GPUSHARE_DEVICES`"),
    ("the container starts and `nvidia-smi` shows the whole GPU", "gpushare did not start it: the default runtime did", "`docker inspect --format '{{.HostConfig.Runtime}}' ID`; `--runtime gpushare`, or `gpushare runtime configure docker --default`"),
)  # fmt: skip
KINDS = ("RequestError", "CapacityError", "PolicyError", "DeviceError", "KernelError", "ConfigError", "GpushareError")
OF_KIND = {
    "RegionError": "GpushareError",
    "UsageError": "GpushareError",
    "BadParameter": "GpushareError",
    "CannotExecute": "GpushareError",
    "Interrupted": "GpushareError",
}

_FULL = "free space there, or run as root, depending on the reason"
_CONFIG_JSON = "the engine, or who edited the bundle, wrote it: mend config.json, `gpushare explain BUNDLE` reads it"
_RUNTIME = "the runtime gives the hook that state: use runc or crun, unchanged"
_REMOVE = "start the container anew; `gpushare prune` removes what is left"
_UPDATE = "update gpushare"
# Advice that is not in the source beside its message: (file, start of the text on the page) -> what to do
ADVICE = {
    ("inject/apply.py", ""): "`gpushare refresh`; `gpushare doctor` looks at the device nodes",
    ("system/bpf.py", ""): "name fewer devices in the container's device rules",
    ("cli/cdi.py", ""): "as it says",
    ("cli/main.py", "standard output"): "where the output goes is full or closed",
    ("cli/runtime.py", ""): "as it says",
    ("cli/options.py", "it is empty"): "write a value, or leave the option out: is a variable of the script not set?",
    ("cli/options.py", ""): "write a number of seconds",
    ("config/config.py", "… is larger"): "is it the right file?",
    ("config/config.py", "… is not UTF-8"): "save it as UTF-8",
    ("programs/deadline.py", "undoing"): _REMOVE,
    ("programs/run.py", ""): "is it there, and executable for this user?",
    ("gpu/selectors.py", ""): "name one that `gpushare devices` shows",
    ("request/dialects/conditions.py", ""): "ask for less, or for another device (`gpushare devices`)",
    ("request/dialects/parsed_request.py", ""): "write it as that system does ([dialects](dialects.md))",
    ("engines/host.py", "… is larger"): "is it the right file?",
    (
        "integrations/kubelet/offers.py",
        "device",
    ): "`gpushare devices`; kubelet starts the pod elsewhere when it is told of the device",
    ("integrations/kubelet/offers.py", ""): "kubelet knows an older offer: restart the plugin, start the pod anew",
    ("integrations/kubelet/plugin.py", ""): "see kubelet's log: it says why",
    ("state/leases.py", "the container's init"): "see why: the engine's log",
    ("system/syscalls.py", ""): _UPDATE,
    ("allocation/limit_update.py", "limits file"): _REMOVE,
    ("allocation/backends/mps/control.py", "MPS did not take"): "ask for what it can hold, or see the daemon's log",
    ("allocation/backends/mps/control.py", ""): "is the driver's nvidia-cuda-mps-control installed, and executable?",
    ("system/servicenotify.py", ""): "is the unit of Type=notify, as packaging/systemd has it?",
    ("allocation/backends/mps/daemon.py", ""): "is the driver's nvidia-cuda-mps-control installed, and executable?",
    ("request/oci.py", "the state"): _RUNTIME,
    ("request/oci.py", ""): _CONFIG_JSON,
    ("state/activity_files.py", "device uuid"): "`gpushare refresh`",
    ("state/rebuild.py", ""): "`gpushare prune` when that container has ended",
    ("state/shm_abi.py", ""): _REMOVE,
    ("state/storage.py", "container id"): "use another id",
    ("state/storage.py", "… is still"): "unmount it, or end who uses it",
    ("state/storage.py", ""): _REMOVE,
    (
        "allocation/backends/__init__.py",
        "nothing holds",
    ): "use another device or backend, as it says ([backends](backends.md))",
    ("cli/export.py", ""): "another --port or --socket, or run as root",
    ("core/errors.py", ""): _FULL,
    ("engines/host.py", ""): "run as root, or free space there",
    ("inject/spectree.py", ""): _CONFIG_JSON,
}
# Hints that the program computes
WORKED_OUT = {
    "<what_to_do(error)>": _FULL,
    "<_key_hint(at, name, known)>": "write the key that it suggests; [config](config.md) lists all",
    "<rootless.hint()>": "run as root, or set XDG_RUNTIME_DIR to a directory of yours",
}
# File of the shim -> what to do about its messages
SHIM_ADVICE = {
    "launch/admit.c": "give the container a limit of memory only, and tell us what it launches",
    "memory/foreign.c": "leave GPUSHARE_OVERSUBSCRIBE out where processes share memory",
    "driver/init.c": "start the container anew, with fewer processes; `gpushare doctor`",
    "driver/mps.c": "`gpushare mps status`; start the daemon, then the program",
    "oversubscription/virtual.c": "leave GPUSHARE_OVERSUBSCRIBE out on this device",
    "memory/vmm_host.c": "leave GPUSHARE_OVERSUBSCRIBE out on this device",
    "driver/getproc.c": "tell us which function it is: the program gets none",
    "nvml/init.c": "start the container anew",
    "core/region.c": "the share's files are damaged, hidden, or of another version: start the container anew",
}
SYSCALL = (
    '| `CALL PATH: REASON`, as `openat2 "/etc/ld.so.cache": Permission denied` | the kernel refused that call on that path: '
    "its reason says why; of a path in the image, look at what the image has there |\n"
)


def advice(one: Message) -> str:
    """Return what to do. KeyError for a message without a hint in the source and without an entry in ADVICE."""
    hint = WORKED_OUT.get(one.hint, one.hint)
    if hint and not hint.startswith("<"):
        return shown(hint)
    text = shown(one.text)
    for (file, begin), what in ADVICE.items():
        if file == one.file and text.startswith(begin):
            return what
    raise KeyError(f"hook/gpushare/{one.file}:{one.line} says {text!r}, and what to do about it is not in ADVICE")


def kind(one: Message) -> str:
    return OF_KIND.get(one.kind, one.kind)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def rows(wanted: str) -> list[str]:
    found: dict[str, list[str]] = {}
    for one in messages():
        if kind(one) == wanted:
            text, what = shown(one.text), advice(one)
            if what not in found.setdefault(text, []):
                found[text].append(what)
    in_order = sorted(found.items(), key=lambda row: (row[0].replace("…", "").strip(" :='").lower(), row[0]))
    return [f"| {cell(code(text))} | {cell('; or '.join(what))} |\n" for text, what in in_order]


def text() -> str:
    page = HEAD + "".join(f"| {cell(a)} | {cell(b)} | {cell(c)} |\n" for a, b, c in SYMPTOMS)
    page += "\nWith `GPUSHARE_LOG=1` in its environment the library says on standard error, after `gpushare: `, why it refused:\n"
    page += "\n| message | what to do |\n|---|---|\n"
    page += "".join(f"| {cell(code(said))} | {SHIM_ADVICE[file]} |\n" for file, said in of_shim())
    page += "\n## What the engine says\n\n| what it says | why | what to do |\n|---|---|---|\n"
    page += "".join(f"| {cell(a)} | {cell(b)} | {cell(c)} |\n" for a, b, c in ENGINES)
    page += "\n## What gpushare says\n\nAfter `gpushare: `. `…` stands for what is filled in; what to do is said in the same line, after a semicolon.\n"
    for name in KINDS:
        number = getattr(errors, name).exit_code
        when = WHEN[name]
        page += f"\n### {when[0].upper()}{when[1:]} (exit code {number})\n\n| message | what to do |\n|---|---|\n"
        page += (SYSCALL if name == "KernelError" else "") + "".join(rows(name))
    return page


if __name__ == "__main__":
    sys.stdout.write(text())
