"""Paths and names that several parts of gpushare share. No imports: this is on the start path."""

# On the host
CONFIG_PATH = "/etc/gpushare/config.yaml"
STATE_DIR = "/run/gpushare"
SHIM_DIR = "/usr/lib/gpushare"  # the bundle has another one, see installed.py
KUBELET_DIR = "/var/lib/kubelet"
CLAIMS_DIR = "/var/run/cdi"  # CDI specifications of prepared claims
CLAIM_FILE = "gpushare.io-claim_%s.json"  # of a claim's uid
SIM_MARKER = ".gpushare-sim"  # marks a simulated driver root, whose device nodes are regular files

# In the container
PRIVATE_DIR = "/usr/lib/gpushare"
DRIVER_DIR = PRIVATE_DIR + "/driver"
REAL_CUDA = DRIVER_DIR + "/libcuda-real.so.1"
REAL_NVML = DRIVER_DIR + "/libnvidia-ml-real.so.1"
OWN_NVML = DRIVER_DIR + "/libnvidia-ml.so.1"  # the shim, where it is in no library directory
LIMITS = PRIVATE_DIR + "/limits"
RW_DIR = PRIVATE_DIR + "/rw"
USAGE = RW_DIR + "/usage"
PAGES_DIR = PRIVATE_DIR + "/pages"
PEERS_DIR = PRIVATE_DIR + "/peers"
MPS_DIR = PRIVATE_DIR + "/mps"

# `gpushare run`: marks the leases of programs that run without a container
RUN_DIALECT = "run"

# Requests in gpushare's own format: environment variable -> annotation key of the same meaning
ENV_DEVICES = "GPUSHARE_DEVICES"
ENV_MEMORY = "GPUSHARE_MEMORY"
ENV_COMPUTE = "GPUSHARE_COMPUTE"
ENV_COMPUTE_MODE = "GPUSHARE_COMPUTE_MODE"
ENV_PRIORITY = "GPUSHARE_PRIORITY"
ENV_BACKEND = "GPUSHARE_BACKEND"
ENV_OVERSUBSCRIBE = "GPUSHARE_OVERSUBSCRIBE"
ENV_CDI_PREFIX = "GPUSHARE_CDI_"  # each CDI device sets one such variable; together they replace ENV_DEVICES
# Set by the device plugin through kubelet (integrations/kubelet/offers.py)
ENV_ALLOCATED_MEMORY = "GPUSHARE_ALLOCATED_MEMORY"  # UUID=AMOUNT, or several of them
ENV_ALLOCATED_GPU = "GPUSHARE_ALLOCATED_GPU"  # UUID,UUID: equal shares; UUID=AMOUNT: whole devices
ENV_ALLOCATED_COMPUTE = "GPUSHARE_ALLOCATED_COMPUTE"  # percent, of all devices together
ENV_ALLOCATED_DEVICES = "GPUSHARE_ALLOCATED_DEVICES"  # number of devices
ALLOCATED = (ENV_ALLOCATED_MEMORY, ENV_ALLOCATED_GPU, ENV_ALLOCATED_COMPUTE, ENV_ALLOCATED_DEVICES)
ENV_CLAIM_PREFIX = (
    "GPUSHARE_CLAIM_"  # set by the DRA driver, one for each allocated device (integrations/dra/claims.py)
)
ENV_LOG = "GPUSHARE_LOG"  # no requests: what programs in the container write about themselves
ENV_TRACE = "GPUSHARE_TRACE"
# The writer of each variable or prefix above. POD: the pod's owner or the image. ENGINE: an engine that applies a CDI
# device; the variable grants nothing that a pod could not request. PLUGIN: the device plugin or the DRA driver;
# programs/system_variables.py believes it only if their record for this container has it. The admission policies of
# packaging/kubernetes allow the names of POD and refuse all others.
POD, ENGINE, PLUGIN = "pod", "engine", "plugin"
WRITERS = {
    ENV_DEVICES: POD,
    ENV_MEMORY: POD,
    ENV_COMPUTE: POD,
    ENV_COMPUTE_MODE: POD,
    ENV_PRIORITY: POD,
    ENV_BACKEND: POD,
    ENV_OVERSUBSCRIBE: POD,
    ENV_LOG: POD,
    ENV_TRACE: POD,
    ENV_CDI_PREFIX: ENGINE,
    ENV_ALLOCATED_MEMORY: PLUGIN,
    ENV_ALLOCATED_GPU: PLUGIN,
    ENV_ALLOCATED_COMPUTE: PLUGIN,
    ENV_ALLOCATED_DEVICES: PLUGIN,
    ENV_CLAIM_PREFIX: PLUGIN,
}
OF_PLUGINS = tuple(name for name, writer in WRITERS.items() if writer == PLUGIN)  # names, and beginnings of names
ANNOTATION_PREFIX = "gpushare.io/"
ANNOTATIONS = {
    ENV_DEVICES: "gpushare.io/devices",
    ENV_MEMORY: "gpushare.io/memory",
    ENV_COMPUTE: "gpushare.io/compute",
    ENV_COMPUTE_MODE: "gpushare.io/compute-mode",
    ENV_PRIORITY: "gpushare.io/priority",
    ENV_BACKEND: "gpushare.io/backend",
    ENV_OVERSUBSCRIBE: "gpushare.io/oversubscribe",
}
# The two ends of ENV_MEMORY as annotations: memory request, memory limit
MEMORY_ENDS = ("gpushare.io/memory-request", "gpushare.io/memory-limit")
AUTO = "auto"
# Values of policy.lending: how memory that a container borrowed above its request is taken back
NO_LENDING, MOVABLE, EVICT, SUSPEND = "off", "movable", "evict", "suspend"
LENDING_WORDS = {False: NO_LENDING, True: SUSPEND, "on": SUSPEND}  # YAML reads `off` as false, and `on` as true
SUSPENDING, SUSPENDED, RESUMING = "suspending", "suspended", "resuming"  # Share.phase
NVIDIA_MAJOR = 195  # Linux: Documentation/admin-guide/devices.txt has it as local use; the driver registers it
SIMULATED_MODEL = "NVIDIA Simulated"  # how the names of the simulator's own cards begin
# Memory that the device counts and NVML lists for no process: of cuInit in a process, and of each context. Measured on
# an H100 80GB HBM3 with driver 580.159.04 (tests/hardware/measured, check `context`: 526.8 MiB taken, 518 MiB listed),
# and assumed on other GPUs
INIT_BYTES = 3407872
CONTEXT_UNLISTED_BYTES = 5832704
BACKENDS = ("shim", "mps", "dmem")  # packages of allocation/backends
APPLIED_ANNOTATION = "gpushare.io/applied"  # records what gpushare put into config.json, see specedit.py
HOOK_OUTPUT_ANNOTATIONS = ("run.oci.hooks.stdout", "run.oci.hooks.stderr")  # crun: files that collect hook output

# Annotations in which engines describe a container
CONTAINER_TYPE_ANNOTATIONS = ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType")
CONTAINER_NAME_ANNOTATIONS = ("io.kubernetes.cri.container-name", "io.kubernetes.container.name")
POD_NAMESPACE_ANNOTATIONS = ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace")
POD_NAME_ANNOTATIONS = ("io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name")
IMAGE_NAME_ANNOTATIONS = ("io.kubernetes.cri.image-name", "io.kubernetes.cri-o.ImageName")
SANDBOX_ID_ANNOTATIONS = ("io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID")
# Trusted only where the engine is configured as a CRI: podman copies annotations from images.
CRI_ANNOTATION_PAIRS = (  # (containerd's, CRI-O's): if both are present and differ, a CRI did not write one of them
    CONTAINER_TYPE_ANNOTATIONS,
    CONTAINER_NAME_ANNOTATIONS,
    POD_NAMESPACE_ANNOTATIONS,
    POD_NAME_ANNOTATIONS,
    SANDBOX_ID_ANNOTATIONS,
    IMAGE_NAME_ANNOTATIONS,
)
CRI_ANNOTATIONS = frozenset(key for pair in CRI_ANNOTATION_PAIRS for key in pair)
CRI_FLAG = "--cri"  # option of gpushare-hook (prefixed for gpushare-runtime): the engine is a CRI


def short(container_id: str) -> str:
    """Return the id as engines shorten it: 12 digits of a 64-digit id. Any other name is returned whole."""
    is_hex = len(container_id) == 64 and set(container_id) <= set("0123456789abcdef")
    return container_id[:12] if is_hex else container_id
