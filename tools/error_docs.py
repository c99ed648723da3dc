"""The text of docs/troubleshooting.md: what to do about each message. A row of generated.py.

Its second half is generated from the messages in the sources (error_texts.py).
"""

from __future__ import annotations

from gpushare.core import errors

from tools.config_docs import WHEN
from tools.error_texts import Message, messages, of_shim, shown

HEAD = """\
# Troubleshooting, by message

Search this page for a part of your message that has no names or numbers in it. `…` stands for a value.

* `gpushare doctor` finds problems of a host, tests that a share works, and tells you what to do.
* The reason why a container was refused is in the engine's own output (`docker run` prints it; Kubernetes:
  `kubectl describe pod`) and in `gpushare inspect ID`. The [log](log.md) has its kind, and the names of variables.
* `gpushare explain BUNDLE` shows what a container would get, and why, without starting it. BUNDLE is the directory with
  the container's `config.json`; `gpushare inspect ID` shows it in the line `bundle`.

## What the program in the container sees

| message | why | what to do |
|---|---|---|
"""
# Messages of other programs that gpushare causes: (text, why, what to do)
SYMPTOMS = (
    ("`CUDA_ERROR_OUT_OF_MEMORY` (2), `CUDA out of memory`", "the container reached its limit. The limit covers all its processes together, and all that the driver takes for contexts, code, streams and graphs", "`gpushare list` shows the usage and `gpushare inspect ID` the driver's part; request more, or run `gpushare limit set ID --memory +2Gi` while it runs"),
    ("`cuMemGetInfo` or `torch.cuda.mem_get_info()` shows 0 bytes free", "the driver itself takes more for the container than its limit has left", "`gpushare inspect ID` shows how much; run `gpushare limit set ID --memory +1Gi`, or fewer processes"),
    ("`CUDA_ERROR_NOT_PERMITTED` (800) from `cuInit`; NVML: `Insufficient Permissions`", "the share's limits file is missing, damaged or of another version, or the container already runs its maximum number of processes", "set `GPUSHARE_LOG=1` in its environment to get the reason on standard error; then start a new container"),
    ("`CUDA_ERROR_NO_DEVICE` (100), `No devices were found`", "the driver itself has no GPU, or `CUDA_VISIBLE_DEVICES` names a device that the container does not have", "run `gpushare doctor`; in the container device numbers start at 0"),
    ("`libcuda.so.1: cannot open shared object file`, `nvidia-smi: not found`", "the container did not request a GPU, or another runtime started it", "set `GPUSHARE_MEMORY` and `--runtime gpushare`; `gpushare explain BUNDLE` shows the request"),
    ("`CUDA_ERROR_MPS_CONNECTION_FAILED` (805)", "the container has `GPUSHARE_BACKEND=mps`, and its MPS daemon has ended", "run `gpushare mps status` and `gpushare mps start`, then restart the program ([mps](mps.md))"),
    ("`CUDA_ERROR_MPS_MAX_CLIENTS_REACHED` (808)", "MPS already serves its maximum number of processes", "run fewer processes, or use `GPUSHARE_BACKEND=shim`"),
    ("`CUDA_ERROR_NOT_INITIALIZED` (3) in a child process", "the process called `fork` after CUDA had started. CUDA does not work in such a child, with or without gpushare", "start workers with `spawn` instead of `fork`"),
    ("`cudaErrorSoftwareValidityNotEstablished` (103)", "recent CUDA runtimes refuse a driver that is not NVIDIA's, such as the simulated one", "on a simulated GPU use programs of the driver API, such as those in `make playground`"),
    ("the program is slow", "its compute limit delays its launches", "see column THROTTLED of `gpushare top`; run `gpushare limit set ID --compute 60`, or use `GPUSHARE_COMPUTE_MODE=soft`"),
    ("the program hangs", "the container is paused", "if `gpushare list` shows `paused`, run `gpushare resume ID`"),
)  # fmt: skip
ENGINES = (
    ("`unknown or invalid runtime name: gpushare`, `Unknown runtime specified gpushare` (docker)", "docker has not read its configuration yet", "run `gpushare runtime configure docker`, then `systemctl reload docker`"),
    ("`no runtime for \"gpushare\" is configured` (containerd)", "the same", "run `gpushare runtime configure containerd`, then restart containerd as the command says"),
    ("`RuntimeClass \"gpushare\" not found` (Kubernetes)", "the manifest is missing", "run `kubectl apply -f runtimeclass.yaml` ([kubernetes](kubernetes.md))"),
    ("`could not select device driver \"\" with capabilities: [[gpu]]` (docker)", "`--gpus` needs NVIDIA's hook, which is not installed", "omit `--gpus`, and set `GPUSHARE_MEMORY` or `GPUSHARE_DEVICES`"),
    ("the container starts and `nvidia-smi` shows the whole GPU", "the default runtime started it, not gpushare", "check that `docker inspect --format '{{.HostConfig.Runtime}}' ID` prints `gpushare`; if not, use `--runtime gpushare`, or run `gpushare runtime configure docker --default`"),
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
_CONFIG_JSON = "correct what you gave the engine, or the file if you wrote it; `gpushare explain BUNDLE` checks it"
_RUNTIME = "the runtime passes that state to the hook: use an unmodified runc or crun"
_REMOVE = "start a new container; `gpushare prune` removes the remains"
_UPDATE = "update gpushare"
# Advice that is not in the source beside its message: (file, start of the text on the page) -> what to do
ADVICE = {
    ("inject/apply.py", ""): "run `gpushare refresh`; `gpushare doctor` checks the device nodes",
    ("system/bpf.py", ""): "use fewer devices in the container's device rules",
    ("cli/cdi.py", ""): "follow the message",
    ("cli/containers.py", ""): "write one of these keys, as in --filter name=web",
    ("cli/help.py", ""): "see `gpushare --help`",
    ("cli/main.py", "standard output"): "check the target of the output: it is full or closed",
    ("cli/runtime.py", ""): "follow the message",
    (
        "cli/options.py",
        "it is empty",
    ): "give a value, or omit the option; check whether a variable of the script is unset",
    ("cli/options.py", ""): "write a number of seconds",
    ("config/config.py", "… is larger"): "check that it is the right file",
    ("config/config.py", "… is not UTF-8"): "save it as UTF-8",
    ("programs/deadline.py", "undoing"): _REMOVE,
    ("programs/run.py", ""): "check that the command exists and is executable for this user",
    ("gpu/unsupported.py", ""): "see the [support matrix](support.md#hosts)",
    ("gpu/selectors.py", ""): "use a device that `gpushare devices` lists",
    ("request/dialects/conditions.py", ""): "request less, or another device (`gpushare devices`)",
    ("request/dialects/parsed_request.py", ""): "use that system's syntax ([dialects](dialects.md))",
    ("engines/host.py", "… is larger"): "check that it is the right file",
    (
        "integrations/kubelet/offers.py",
        "device",
    ): "run `gpushare devices`; kubelet starts the pod on another node once the device is reported as unhealthy",
    ("integrations/kubelet/offers.py", ""): "kubelet has outdated devices: restart the plugin, then recreate the pod",
    ("integrations/kubelet/plugin.py", ""): "see kubelet's log for the reason",
    ("state/leases.py", "the container's init"): "see the engine's log for the reason",
    ("system/syscalls.py", ""): _UPDATE,
    ("allocation/limit_update.py", "limits file"): _REMOVE,
    (
        "allocation/backends/mps/control.py",
        "MPS did not accept",
    ): "request a limit that it supports, or see the daemon's log",
    (
        "allocation/backends/mps/control.py",
        "",
    ): "check that the driver's nvidia-cuda-mps-control is installed and executable",
    ("system/servicenotify.py", ""): "check that the unit has Type=notify, as in packaging/systemd",
    (
        "allocation/backends/mps/daemon.py",
        "",
    ): "check that the driver's nvidia-cuda-mps-control is installed and executable",
    ("request/oci.py", "the state"): _RUNTIME,
    ("request/oci.py", ""): _CONFIG_JSON,
    ("request/speckeys.py", ""): _CONFIG_JSON,
    ("state/activity_files.py", "device uuid"): "`gpushare refresh`",
    ("state/rebuild.py", ""): "run `gpushare prune` once that container has ended",
    ("state/shm_abi.py", ""): _REMOVE,
    ("state/storage.py", "container id"): "use another id",
    ("state/storage.py", "… is still"): "unmount it, or end the processes that use it",
    ("state/storage.py", ""): _REMOVE,
    (
        "allocation/backends/__init__.py",
        "no backend can",
    ): "use another device or backend, as the message says ([backends](backends.md))",
    ("cli/export.py", ""): "use another --port or --socket, or run as root",
    ("core/errors.py", ""): _FULL,
    ("engines/configure.py", ""): "fix what the engine reports, then run the command again",
    ("engines/distributions.py", ""): "add the handler to the configuration of the cluster, as the message says",
    ("engines/host.py", ""): "run as root, or free space there",
    ("inject/spectree.py", ""): _CONFIG_JSON,
}
# Hints that the program computes
WORKED_OUT = {
    "<what_to_do(error)>": _FULL,
    "<_unit_hint(text[:end], text[end:].strip())>": "use the suggested unit, or one of k, M, G, T, Ki, Mi, Gi, Ti",
    "<_key_hint(at, name, known)>": "use the suggested key; [config](config.md) lists all keys",
    "<rootless.hint()>": "run as root, or set XDG_RUNTIME_DIR to a directory that you own",
}
SYSCALL = (
    '| `CALL PATH: REASON`, for example `openat2 "/etc/ld.so.cache": Permission denied` | the kernel refused that call on that path: '
    "check the reason; for a path in the image, check what the image has there |\n"
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
    raise KeyError(f"hook/gpushare/{one.file}:{one.line} has the message {text!r}, for which ADVICE has no entry")


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
    return [f"| {cell(code(text))} | {cell('<br>or: '.join(what))} |\n" for text, what in in_order]


def text() -> str:
    page = HEAD + "".join(f"| {cell(a)} | {cell(b)} | {cell(c)} |\n" for a, b, c in SYMPTOMS)
    page += "\nWith `GPUSHARE_LOG=1` in the environment the library prints each refusal on standard error, after `gpushare: `. `FILE` stands for a file name, `…` for a function:\n"
    page += "\n| message | what to do |\n|---|---|\n"
    by_hint: dict[str, list[str]] = {}
    for said, hint in of_shim():
        by_hint.setdefault(hint, []).append(cell(code(said)))
    page += "".join(f"| {'<br>'.join(said)} | {hint} |\n" for hint, said in by_hint.items())
    page += "\n## Messages of the engine\n\n| message | why | what to do |\n|---|---|---|\n"
    page += "".join(f"| {cell(a)} | {cell(b)} | {cell(c)} |\n" for a, b, c in ENGINES)
    page += "\n## Messages of gpushare\n\nA message begins with `gpushare: `. After it there is a semicolon, then the advice.\n"
    for name in KINDS:
        number = getattr(errors, name).exit_code
        when = WHEN[name]
        page += f"\n### {when[0].upper()}{when[1:]} (exit code {number})\n\n| message | what to do |\n|---|---|\n"
        page += (SYSCALL if name == "KernelError" else "") + "".join(rows(name))
    return page
