"""Configurations to begin with: what a workstation and what a node of a cluster differ in from the defaults.

    WORKSTATION, CLUSTER -> dict     dotted key -> value, as in keys.KEYS
    PROFILES, NAMES                  by name
    text(profile)        -> str      a commented config.yaml with every key; raises ConfigError
    says_nothing(text)   -> bool     a file as packages bring it, which a profile may replace

Not on the start path.
"""

from __future__ import annotations

from typing import Any

from ..core.errors import ConfigError
from ..core.quoting import shown
from .config import rendered
from .keys import VERSION

# Whoever starts containers owns the machine: every way of asking counts, and a container that names no limit gets the
# whole device, for itself.
WORKSTATION: dict[str, Any] = {
    "policy.unlimited": "exclusive",
}
# Many people start containers: nobody gets a GPU by accident (an image that sets NVIDIA_VISIBLE_DEVICES, an annotation
# that reaches a sidecar, words of a scheduler that is not there, a privileged agent), nobody what no scheduler has
# counted, and nobody more than the maximum.
CLUSTER: dict[str, Any] = {
    "policy.accept.widening": "never",
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
    "workstation": ("# gpushare: configuration of a workstation", "# Every way of asking for a share counts."),
    "cluster": (
        "# gpushare: configuration of a node of a cluster",
        "# A container gets a share only if it asks for a memory limit, by name. Set max_memory, and the privileged",
        "# containers that need a GPU, such as a monitoring agent, to what this cluster needs. Where another scheduler",
        "# shares the GPUs, such as HAMi, name it in dialects.enabled.",
    ),
}


def text(profile: str) -> str:
    """Raises ConfigError when there is no such profile."""
    if profile not in PROFILES:
        raise ConfigError(f"no profile {shown(profile)}", f"one of {', '.join(NAMES)}")
    return rendered(PROFILES[profile], (*_HEADS[profile], "# `gpushare config check` reads it and says what is wrong."))


def says_nothing(text: str) -> bool:
    """Whether a configuration file is valid and has no key but `version`."""
    import yaml

    try:
        return bool(yaml.safe_load(text) == {"version": VERSION})
    except (yaml.YAMLError, RecursionError, ValueError):
        return False
