"""Parse `policy.quotas` in the configuration: caps for each user or Kubernetes namespace.

    SCHEMA             JSON Schema of the list
    rules(value)       -> quotas, [Wrong]     from a list that matches the schema
    plain(quotas)      -> list                back to such a list

Not on the start path.
"""

from __future__ import annotations

import pwd
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

from ..core.errors import RequestError
from ..core.model import Quota
from ..core.quantity import size_bytes
from ..core.quoting import shown
from .sharing import Wrong

KEY = "policy.quotas"
NAMESPACE = "^[a-z0-9*?.-]+$"
COMPUTE = "^[1-9][0-9]{0,5}%?$"
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "user": {"type": "string", "minLength": 1},
            "namespace": {"type": "string", "pattern": NAMESPACE},
            "memory": {"type": "string"},
            "compute": {"type": "string", "pattern": COMPUTE},
            "containers": {"type": "integer", "minimum": 1},
        },
    },
}
PATTERNS = {
    NAMESPACE: "a namespace such as team-a, or a pattern such as team-*",
    COMPUTE: "a whole percentage such as 250%",
}


def rules(value: Sequence[Mapping[str, Any]]) -> tuple[tuple[Quota, ...], list[Wrong]]:
    """Return (quotas, errors)."""
    found: list[Quota] = []
    wrong: list[Wrong] = []
    for index, item in enumerate(value):
        key = f"{KEY}[{index}]"
        wrong += _wrong(item, key)
        compute = str(item.get("compute", "0")).rstrip("%")
        quota = Quota(
            str(_uid(item.get("user", ""))),
            item.get("namespace", ""),
            item.get("memory", "").strip(),
            int(compute) if re.fullmatch("[0-9]{1,6}", compute) else 0,
            int(item.get("containers", 0)),
        )
        whose = (quota.user, quota.namespace)
        if whose in ((one.user, one.namespace) for one in found):
            wrong.append(Wrong(key, "names the user or namespace of an earlier entry", "keep one"))
        found.append(quota)
    return tuple(found), wrong


def _wrong(item: Mapping[str, Any], key: str) -> Iterator[Wrong]:
    named = [name for name in ("user", "namespace") if name in item]
    if len(named) != 1:
        problem = "names a user and a namespace" if named else "names no user and no namespace"
        yield Wrong(key, problem, "give one of them; * means every user or namespace, each with a quota of its own")
    if not any(name in item for name in ("memory", "compute", "containers")):
        yield Wrong(key, "caps nothing", "give memory, compute or containers")
    if "user" in item and _uid(item["user"]) is None:
        yield Wrong(f"{key}.user", f"{shown(item['user'])} is not a user of this host", "give its uid")
    if "memory" in item:
        try:
            size_bytes(f"{key}.memory", item["memory"])
        except RequestError as error:
            percent = item["memory"].strip().endswith("%")
            reason = error.message.partition(": ")[2]
            hint = "a quota is on all devices together: give a size such as 16Gi" if percent else error.hint
            yield Wrong(f"{key}.memory", f"{shown(item['memory'])}: {'a percentage' if percent else reason}", hint)


def _uid(user: str) -> Optional[str]:
    """Return a uid as text, "*" or ""; None for a name that this host does not have."""
    if user in ("", "*"):
        return user
    if re.fullmatch("[0-9]{1,10}", user):
        return str(int(user))
    try:
        return str(pwd.getpwnam(user).pw_uid)
    except (KeyError, ValueError):
        return None


def plain(quotas: Sequence[Quota]) -> list[dict[str, Any]]:
    """Return the list as the file would have it. Users are numbers."""
    return [
        {
            **({"user": quota.user} if quota.user else {"namespace": quota.namespace}),
            **({"memory": quota.memory} if quota.memory else {}),
            **({"compute": f"{quota.compute_percent}%"} if quota.compute_percent else {}),
            **({"containers": quota.containers} if quota.containers else {}),
        }
        for quota in quotas
    ]
