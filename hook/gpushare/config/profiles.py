"""Initial configurations for a workstation and for a node of a cluster, as differences from the defaults.

    WORKSTATION, CLUSTER -> dict     dotted key -> value, as in keys.KEYS
    PROFILES, NAMES                  by name
    text(profile)        -> str      a commented config.yaml with every key; raises ConfigError
    says_nothing(text)   -> bool     whether a file has no settings, as in the packages; a profile may replace it

Not on the start path.
"""

from __future__ import annotations

from typing import Any

from ..core.errors import ConfigError
from ..core.quoting import shown
from .config import rendered
from .keys import VERSION

# The user who starts containers owns the machine: every kind of request is accepted, and a container without a limit
# gets the whole device for itself.
WORKSTATION: dict[str, Any] = {
    "policy.unlimited": "exclusive",
}
# Many users start containers. No container gets a GPU by accident (an image that sets NVIDIA_VISIBLE_DEVICES, an
# annotation that reaches a sidecar, variables of a scheduler that is not installed, a privileged agent). A scheduler
# must have counted every amount, and no amount may exceed the maximum.
CLUSTER: dict[str, Any] = {
    "policy.accept.widening": "never",
    "policy.amounts": "container",
    "policy.annotations": "scoped",
    "policy.dialects.enabled": [],
    "policy.nvidia_visible_devices": "with_limit",
    "policy.privileged_containers": [],
    "policy.require_limits": True,
    "policy.max_memory": "50%",
    "policy.unlimited": "deny",
}
PROFILES = {"workstation": WORKSTATION, "cluster": CLUSTER}
NAMES = tuple(PROFILES)
_HEADS = {
    "workstation": ("# gpushare: configuration of a workstation", "# Every kind of request for a share is accepted."),
    "cluster": (
        "# gpushare: configuration of a node of a cluster",
        "# A container gets a share only if it explicitly requests a memory limit. Adapt max_memory to this cluster,",
        "# and list the privileged containers that need a GPU, such as a monitoring agent. If another scheduler, such",
        "# as HAMi, shares the GPUs, name it in dialects.enabled.",
    ),
}


def text(profile: str) -> str:
    """The commented configuration file of a profile. Raises ConfigError for an unknown profile."""
    if profile not in PROFILES:
        raise ConfigError(f"no profile {shown(profile)}", f"use {' or '.join(NAMES)}")
    check = "# `gpushare config check` checks the file and reports every error."
    return rendered(PROFILES[profile], (*_HEADS[profile], check))


def says_nothing(text: str) -> bool:
    """Whether a configuration file is valid and has no key but `version`."""
    import yaml

    try:
        return bool(yaml.safe_load(text) == {"version": VERSION})
    except (yaml.YAMLError, RecursionError, ValueError):
        return False
