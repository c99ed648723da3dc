"""Names of containers, from files that their engines wrote: docker's and podman's names, Compose services, Kubernetes
pods. A daemon that hangs or is down delays no command. On the start path only for the message of a refusal.

The bundle in a lease leads to the engine's file:

    docker       the bundle mounts files from DATA-ROOT/containers/<id>, where config.v2.json has the name
    podman       bundle STORAGE/overlay-containers/<id>/userdata; containers.json two directories above lists names
    Kubernetes   the CRI's annotations in the bundle's config.json
    nerdctl      its own annotation there

A container without a bundle, such as one whose start was refused, is searched for where engines usually keep them.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Optional

from ..core import constants
from ..core.model import Lease
from ..request import oci
from ..system import rootless

_MAX_BYTES = 16 << 20
_MAX_NAME = 1024  # characters; Kubernetes' three names with slashes have at most 570
_DOCKER_FILE = "config.v2.json"
# A container with `--rm` is in the second file: containers/storage, "volatile" containers
_PODMAN_FILES = ("containers.json", "volatile-containers.json")
_NERDCTL = "nerdctl/name"  # annotation
_CONTAINERD = "/io.containerd.runtime.v2.task/"  # in the path of a bundle
_COMPOSE = ("com.docker.compose.project", "com.docker.compose.service")  # labels
_OF_POD = "k8s_"  # k8s_CONTAINER_POD_NAMESPACE_UID_ATTEMPT: CRI-O, server/container_create.go, and cri-dockerd
_DAEMON_JSON = "/etc/docker/daemon.json"


class Name(NamedTuple):
    """The names of one container; all empty if no engine has any."""

    shown: str = ""  # docker's or podman's name, or NAMESPACE/POD/CONTAINER
    service: str = ""  # PROJECT/SERVICE of Compose
    pod: tuple[str, ...] = ()  # NAMESPACE, POD, CONTAINER

    def matches(self, text: str) -> bool:
        """Whether `text` is one of the names: the whole name, a service with or without its project, or consecutive
        parts of a pod's name, such as POD or NAMESPACE/POD."""
        return bool(text) and text in self.words()

    def words(self) -> set[str]:
        """All names that `matches` accepts."""
        parts = (tuple(filter(None, self.pod)), tuple(self.service.split("/", 1)))
        runs = {"/".join(one[a:b]) for one in parts for a in range(len(one)) for b in range(a + 1, len(one) + 1)}
        return {self.shown, *runs} - {""}


NONE = Name()


def of_ids(container_ids: Iterable[str]) -> dict[str, str]:
    """Map containers to their docker's or podman's names, for a refusal. A pod's container is left out, because a
    refusal is shown to the users of another namespace: CRI-O and cri-dockerd use these engines' files, too."""
    known = Names()
    found = {one: known.of_id(one).shown for one in container_ids if constants.short(one) != one}
    return {one: name for one, name in found.items() if name and not name.startswith(_OF_POD)}


class Names:
    """Looks names up, and reads each file again only after a change. Never raises: a file that cannot be read has no
    names."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, float], tuple[Name, str]] = {}
        self._files: dict[str, tuple[tuple[int, ...], Any]] = {}

    def of(self, lease: Lease) -> Name:
        """The names of the container that has this lease."""
        if lease.dialect == constants.RUN_DIALECT:
            return NONE
        if not lease.bundle:  # restored after the state directory was lost
            return self.of_id(lease.id)
        key = (lease.id, lease.created)
        if key not in self._found:
            self._found[key] = self._look(lease)
        name, path = self._found[key]
        return name if not path else self._in_file(path, lease.id)

    def of_id(self, container_id: str) -> Name:
        """The names of a container of which only the id is known."""
        found = (self._in_file(path, container_id) for path in self._usual_files(container_id))
        return next((name for name in found if name.shown), NONE)

    def keep(self, leases: Iterable[Lease]) -> None:
        """Forget all other containers."""
        live = {(lease.id, lease.created) for lease in leases}
        self._found = {key: value for key, value in self._found.items() if key in live}
        paths = {path for _, path in self._found.values()}
        self._files = {path: value for path, value in self._files.items() if path in paths}

    def _look(self, lease: Lease) -> tuple[Name, str]:
        """(name, "") if the bundle has the name, else (NONE, file that has it). A name in a file can change."""
        if not os.path.isabs(lease.bundle):
            return NONE, ""
        above = os.path.dirname(os.path.dirname(lease.bundle))
        if os.path.basename(lease.bundle) == "userdata" and not lease.cri:
            files = (os.path.join(above, file) for file in _PODMAN_FILES)
            return NONE, next((path for path in files if self._in_file(path, lease.id).shown), "")
        spec = _object(_read(os.path.join(lease.bundle, "config.json")))
        annotations = {key: value for key, value in _object(spec.get("annotations")).items() if _is_name(value)}
        if lease.cri:
            return _of_pod(annotations), ""
        path = next((path for path in _docker_files(spec, lease.id) if os.path.lexists(path)), "")
        if path or _CONTAINERD not in lease.bundle:
            return NONE, path
        return Name(annotations.get(_NERDCTL, "")), ""

    def _in_file(self, path: str, container_id: str) -> Name:
        content = self._content(path)
        if os.path.basename(path) == _DOCKER_FILE:
            return _of_docker(_object(content))
        found = (_object(one) for one in content if isinstance(one, dict)) if isinstance(content, list) else ()
        return next((_of_podman(one) for one in found if one.get("id") == container_id), NONE)

    def _content(self, path: str) -> Any:
        """The JSON value in a file; None without a readable one."""
        try:
            status = os.stat(path)
        except OSError:
            return None
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if self._files.get(path, ((), None))[0] != identity:
            self._files[path] = identity, _read(path)
        return self._files[path][1]

    def _usual_files(self, container_id: str) -> Iterator[str]:
        for folder in self._docker_folders():
            yield os.path.join(folder, "containers", container_id, _DOCKER_FILE)
        storage = os.path.join(_user_data(), "containers/storage") if rootless.is_rootless() else _PODMAN_STORAGE
        for file in _PODMAN_FILES:
            yield os.path.join(storage, "overlay-containers", file)

    def _docker_folders(self) -> tuple[str, ...]:
        if rootless.is_rootless():
            return (os.path.join(_user_data(), "docker"),)
        root = _object(self._content(_DAEMON_JSON)).get("data-root")
        return (root, _DOCKER_ROOT) if isinstance(root, str) else (_DOCKER_ROOT,)


_DOCKER_ROOT, _PODMAN_STORAGE = "/var/lib/docker", "/var/lib/containers/storage"


def _user_data() -> str:
    return os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")


def _docker_files(spec: dict[str, Any], container_id: str) -> Iterator[str]:
    """Where docker's file would be, from the mounts of /etc/hostname, /etc/hosts and /etc/resolv.conf. With
    `--network container:ID` they are those of the other container, which has its directory beside this one's."""
    mounts = spec.get("mounts")
    for mount in mounts if isinstance(mounts, list) else ():
        source, target = _object(mount).get("source"), _object(mount).get("destination")
        if target in ("/etc/hostname", "/etc/hosts", "/etc/resolv.conf") and isinstance(source, str):
            folder = os.path.dirname(os.path.dirname(source))
            if os.path.basename(folder) == "containers":
                yield os.path.join(folder, container_id, _DOCKER_FILE)


def _of_docker(value: dict[str, Any]) -> Name:
    name: Any = value.get("Name")
    labels = _object(_object(value.get("Config")).get("Labels"))
    project, service = (labels.get(key) for key in _COMPOSE)
    by_compose = _is_name(project) and _is_name(service)
    return Name(name.lstrip("/") if _is_name(name) else "", f"{project}/{service}" if by_compose else "")


def _of_podman(value: dict[str, Any]) -> Name:
    names = value.get("names")
    first = names[0] if isinstance(names, list) and names else ""
    return Name(first if _is_name(first) else "")


def _of_pod(annotations: dict[str, str]) -> Name:
    parts = (oci.pod_namespace(annotations), oci.pod_name(annotations), oci.container_name(annotations))
    return Name("/".join(parts), "", parts) if all(parts) else Name(pod=parts)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_NAME


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read(path: str) -> Optional[Any]:
    """The JSON value in a regular file; None for any other file, which must not block."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
                return None
            return json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
