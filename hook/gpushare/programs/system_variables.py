"""Believe a variable of the device plugin or of the DRA driver only if their record has it (start path).

    require(bundle, config)      raises RequestError for a variable without a record

A pod, an image or a ConfigMap can set any variable. Records that only root of the host can write:

* A claim: the CDI specification that the DRA driver prepared, at `config.claims_dir`. The name of the variable ends
  with random digits that only containers with this claim know, so no other pod can name it.
* The device plugin: kubelet's checkpoint at `config.kubelet_dir`, which has the plugin's answer for each pod and
  container. Source: k8s.io/kubernetes, pkg/kubelet/cm/devicemanager: kubelet writes it before it starts the container
  (allocateContainerResources), as JSON without spaces in the order of PodDevicesEntry. It can list 100,000 device ids,
  so it is searched and not parsed.

Loaded only if there is such a variable.
"""

from __future__ import annotations

import base64
import json
import os
import re
from typing import Optional

from ..core import constants
from ..core.errors import RequestError
from ..core.model import Bundle, Config
from ..core.quoting import setting, shown, shown_name

_CHECKPOINT = "device-plugins/kubelet_internal_checkpoint"
_MAX_BYTES = 64 << 20
# The pod's part of a cgroup path: /kubepods/burstable/pod<uid>/<container>, and with systemd
# kubepods-burstable-pod<uid with _ for ->.slice:cri-containerd:<container>
_POD = re.compile(r"(?:.*[-/])?pod([0-9A-Za-z_-]+)(?:/|\.slice:)[^/]*")
_ENTRY = re.compile(rb'"ResourceName":"[^"]*","DeviceIDs":(?:null|\{[^}]*\}),"AllocResp":"([A-Za-z0-9+/=]*)"')


def require(bundle: Bundle, config: Config) -> None:
    """Raise RequestError for the first variable that no record has."""
    given = [pair for pair in bundle.env if pair[0].startswith(constants.OF_PLUGINS)]
    answers: Optional[tuple[bytes, ...]] = None
    for name, value in given:
        if name.startswith(constants.ENV_CLAIM_PREFIX):
            if not _is_prepared(name, value, config.claims_dir):
                raise RequestError(
                    f"{shown_name(name)}: no claim that is prepared for this container has this value",
                    "leave it out: gpushare dra sets it; if it did, delete the pod, and its claim is prepared again",
                )
            continue
        answers = _answers(bundle, config.kubelet_dir) if answers is None else answers
        if not any(_field(name, value) in answer for answer in answers):
            raise RequestError(
                f"{setting(name, value)}: kubelet did not give this container that "
                f"({shown(os.path.join(config.kubelet_dir, _CHECKPOINT))})",
                "leave it out: only kubelet sets it; if kubelet has another directory, set kubernetes.kubelet_dir",
            )


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block the start
        with open(fd, "rb") as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return b""


# Claims


def _is_prepared(name: str, value: str, folder: str) -> bool:
    """Return whether the prepared claim that the variable names gives it this value. The name ends with
    <uid>_<number>_<random digits>, with _ for - in the uid."""
    words = name[len(constants.ENV_CLAIM_PREFIX) :].split("_")
    if len(words) < 3 or not all(word.isalnum() and word.isascii() for word in words):
        return False
    return f"{name}={value}" in _variables(os.path.join(folder, constants.CLAIM_FILE % "-".join(words[:-2])))


def _variables(path: str) -> list[str]:
    """The variables in a CDI specification of the DRA driver; none if it is not there or damaged."""
    try:
        devices = json.loads(_read(path))["devices"]
        return [text for device in devices for text in device["containerEdits"]["env"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []


# kubelet


def _answers(bundle: Bundle, folder: str) -> tuple[bytes, ...]:
    """The answers of device plugins for this container, as protobuf messages (ContainerAllocateResponse)."""
    found = _POD.fullmatch(bundle.cgroups_path)
    if found is None or not bundle.container_name:
        return ()
    uid = found[1].replace("_", "-") if ".slice:" in bundle.cgroups_path else found[1]
    data = _read(os.path.join(folder, _CHECKPOINT))
    start = f'{{"PodUID":{json.dumps(uid)},"ContainerName":{json.dumps(bundle.container_name)},'.encode()
    answers, at = [], data.find(start)
    while at >= 0:
        at += len(start)
        entry = _ENTRY.match(data, at)
        if entry:
            answers.append(base64.b64decode(entry[1]))
        at = data.find(start, at)
    return tuple(answers)


def _field(name: str, value: str) -> bytes:
    """One entry of `map<string, string> envs = 1`, as protobuf encodes it."""
    name_bytes, value_bytes = (text.encode("utf-8", "surrogatepass") for text in (name, value))  # any text of JSON
    pair = _text(1, name_bytes) + _text(2, value_bytes)
    return _text(1, pair)


def _text(number: int, data: bytes) -> bytes:
    """A field of wire type 2: tag, length as a varint, data."""
    length, left = bytearray(), len(data)
    while left > 127:
        length.append(left & 127 | 128)
        left >>= 7
    return bytes((number << 3 | 2, *length, left)) + data
