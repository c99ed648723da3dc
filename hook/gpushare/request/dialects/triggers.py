"""The triggers of dialects/registry.py, which a start loads only if one of these occurs. `make docs`
generates this file; a test fails if it is out of date. Runs on the start path."""

from __future__ import annotations

from collections.abc import Iterable

# Prefixes of variables that request something
BEGINNINGS = (
    "CUDA_DEVICE_MEMORY_LIMIT",
    "CUDA_DEVICE_SM_LIMIT",
    "CUDA_MEM_LIMIT",
    "CUDA_CORE_LIMIT",
    "CUDA_CORE_SOFT_LIMIT",
    "GPU_DEVICES_UUID",
    "MANAGER_VISIBLE_DEVICE",
    "VOLCANO_GPU_ALLOCATED",
    "VOLCANO_GPU_MEMORY_TOTAL",
    "ALIYUN_COM_GPU_MEM_CONTAINER",
    "ALIYUN_COM_GPU_MEM_DEV",
    "ALIYUN_COM_GPU_MEM_IDX",
    "ALIYUN_COM_GPU_VISIBLE_DEVICES",
    "AMP_VGPU_ENABLE",
    "GPU_PORTION",
    "RUNAI_NUM_OF_GPUS",
    "RUNAI_GPU_MEMORY_LIMIT",
    "NVIDIA_GPU_MEMORY_REQUEST",
    "NVIDIA_GPU_MEMORY_LIMIT",
)
# Prefixes of all variables
VARIABLES = (
    "CUDA_DEVICE_MEMORY_LIMIT",
    "CUDA_DEVICE_SM_LIMIT",
    "CUDA_TASK_PRIORITY",
    "CUDA_OVERSUBSCRIBE",
    "GPU_CORE_UTILIZATION_POLICY",
    "CUDA_DISABLE_CONTROL",
    "CUDA_MEM_LIMIT",
    "CUDA_CORE_LIMIT",
    "CUDA_CORE_SOFT_LIMIT",
    "CUDA_MEM_RATIO",
    "CUDA_MEM_OVERSOLD",
    "GPU_DEVICES_UUID",
    "MANAGER_VISIBLE_DEVICE",
    "DISABLE_VGPU_CONTROL",
    "VOLCANO_GPU_ALLOCATED",
    "VOLCANO_GPU_MEMORY_TOTAL",
    "ALIYUN_COM_GPU_MEM_CONTAINER",
    "ALIYUN_COM_GPU_MEM_DEV",
    "ALIYUN_COM_GPU_MEM_POD",
    "ALIYUN_COM_GPU_MEM_IDX",
    "ALIYUN_COM_GPU_VISIBLE_DEVICES",
    "CGPU_DISABLE",
    "AMP_VGPU_ENABLE",
    "GPU_MEM_PER_DEVICE",
    "GPU_UTIL_PER_DEVICE",
    "GPU_PORTION",
    "RUNAI_NUM_OF_GPUS",
    "RUNAI_GPU_MEMORY_LIMIT",
    "NVIDIA_GPU_MEMORY_REQUEST",
    "NVIDIA_GPU_MEMORY_LIMIT",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_CLIENT_PRIORITY",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
)
# Annotations, and their prefixes
KEYS = frozenset((
    "gpu-fraction",
    "gpu-fraction-container-name",
    "gpu-fraction-num-devices",
    "gpu-memory",
    "gpu-sm-cores",
    "gpu-sm-percentage",
    "scheduling.koordinator.sh/device-allocated",
    "tencent.com/vcuda-core",
    "tencent.com/vcuda-core-limit",
    "tencent.com/vcuda-device",
    "tencent.com/vcuda-memory",
))  # fmt: skip
KEY_BEGINNINGS = (
    "gpu-fraction",
    "gpu-memory",
    "gpu-sm-cores",
    "gpu-sm-percentage",
    "nvidia.com/container.",
    "scheduling.koordinator.sh/device-allocated",
    "tencent.com/vcuda-core",
    "tencent.com/vcuda-device",
    "tencent.com/vcuda-memory",
)
# Prefix of annotations that name their container
SCOPE = "nvidia.com/container."


def any_annotation(names: Iterable[str]) -> bool:
    """Return whether one of these is an annotation of another scheduler."""
    return any(name in KEYS or name.startswith(SCOPE) for name in names)
