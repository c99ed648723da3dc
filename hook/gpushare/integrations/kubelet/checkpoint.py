"""kubelet's record of the devices that containers have.

    Checkpoint(folder, names).holders(kind, unit)  -> {(pod uid, container)}

kubelet writes the record when it has allocated all resources of a container, and before it calls for the next one
(Kubernetes 1.36, pkg/kubelet/cm/devicemanager, allocateContainerResources). The file is not part of an API: one that is
missing or has another form counts as empty.
"""

from __future__ import annotations

import json
import os
from typing import Any

FILE = "kubelet_internal_checkpoint"
Holder = tuple[str, str]


class Checkpoint:
    def __init__(self, folder: str, names: dict[str, str]) -> None:
        """`names`: the resource of each kind."""
        self._path, self._names = os.path.join(folder, FILE), names
        self._read: tuple[Any, list[dict[str, Any]]] = (None, [])  # identity of the file, and its entries

    def _entries(self) -> list[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_ino, status.st_mtime_ns, status.st_size)
                if identity != self._read[0]:
                    self._read = (identity, json.load(file)["Data"]["PodDeviceEntries"] or [])
        except (OSError, ValueError, LookupError, TypeError):
            return []
        return self._read[1]

    def holders(self, kind: str, unit: str) -> frozenset[Holder]:
        try:
            return frozenset(
                (str(one["PodUID"]), str(one["ContainerName"]))
                for one in self._entries()
                if one["ResourceName"] == self._names.get(kind)
                and any(unit in ids for ids in one["DeviceIDs"].values())
            )
        except (LookupError, TypeError, AttributeError):
            return frozenset()
