"""Parse the state on stdin and the bundle's config.json. Both are untrusted text.

    read_state(data: bytes)           -> State     the hook's stdin
    load_bundle(State | path, cri)    -> Bundle    config.json of that bundle
    bundle_of(state, spec, cri)       -> Bundle    the same from a parsed config.json (pure)
    with_spec(bundle, spec)           -> Bundle    the same with another config.json
    facts(spec)                       -> dict      the fields of Bundle that follow from config.json alone
    read_json(path, max_bytes, what)  -> dict      bounded, one object, clear errors
    check_id(text)                    -> str       a container id that is safe as a directory name

All raise RequestError. Source: OCI runtime specification 1.x, `runtime.md` (State) and `config.md`.
Runs on the start path, so it imports only the standard library.
"""

import json
import os
from collections.abc import Iterable
from typing import Any, NamedTuple, Union

from ..core import constants
from ..core.errors import RequestError
from ..core.model import Bundle
from ..core.quoting import setting, shown
from .dialects import cdi_devices
from .speckeys import KEYS, items, refuse_other_case, section

MAX_STATE_BYTES = 4 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_ID_LENGTH = 200  # a directory name, with room for a suffix
_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-.")


class State(NamedTuple):
    """The container's state from the runtime. `pid` is 0 if there is none."""

    id: str
    pid: int
    status: str
    bundle: str
    annotations: dict[str, str]


def check_id(text: object) -> str:
    """Return `text` if it is a container id: what runc accepts, except paths that leave the state directory."""
    if not isinstance(text, str) or not text:
        raise RequestError("the state has no container id", "the runtime must give one")
    if len(text) > MAX_ID_LENGTH or not _ID_CHARACTERS.issuperset(text) or text in (".", ".."):
        raise RequestError(
            f"container id {shown(text)} is not acceptable",
            f"use at most {MAX_ID_LENGTH} letters, digits and _ + - .",
        )
    return text


def path_text(value: object, what: str) -> str:
    """Return `value` if it is text that the kernel accepts as a path."""
    if not isinstance(value, str) or not value:
        raise RequestError(f"{what} is missing or not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{what} {shown(value)} is not valid text") from None
    if "\0" in value:
        raise RequestError(f"{what} {shown(value)} holds a NUL")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Refuse a duplicate key: Go merges the two values, Python takes the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{shown(key)} is twice in one object")
    return found


def _object(data: bytes, what: str) -> dict[str, Any]:
    """Parse one JSON object. Raise RequestError for any invalid text."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise RequestError(f"{what} is nested too deeply") from None
    except ValueError as error:  # also UnicodeDecodeError, and integers with too many digits
        raise RequestError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"{what} must be a JSON object, not {type(value).__name__}")
    return value


def read_json(path: str, max_bytes: int, what: str) -> dict[str, Any]:
    """Read the JSON object in a regular file of at most `max_bytes`. Never block on a FIFO."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        hint = "name a bundle: a directory that contains config.json" if error.errno == 2 else ""
        raise RequestError(f"cannot read {what} {shown(path)}: {error.strerror}", hint) from None
    try:
        if not os.path.isfile(f"/proc/self/fd/{fd}"):
            raise RequestError(f"{what} {shown(path)} is not a regular file")
        data = _read_all(fd, max_bytes)
    finally:
        os.close(fd)
    if len(data) > max_bytes:
        raise RequestError(f"{what} {shown(path)} is larger than {max_bytes} bytes")
    return _object(data, what)


def _read_all(fd: int, max_bytes: int) -> bytes:
    """Read up to one byte more than `max_bytes`."""
    parts: list[bytes] = []
    left = max_bytes + 1
    while left:
        part = os.read(fd, min(left, 1 << 20))
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _texts(value: object, what: str) -> dict[str, str]:
    """Return a JSON object of strings; null and absent count as empty, as in Go."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{what} must be an object, not {type(value).__name__}")
    for key, text in value.items():
        if not isinstance(text, str):
            raise RequestError(f"{what}: {shown(key)} must be text, not {type(text).__name__}")
    return value


def first_uid(spec: dict[str, Any]) -> int:
    """Return the uid of the first process as the container numbers it; 0 if the spec has none."""
    uid = section(spec, "process", "user").get("uid")
    return uid if type(uid) is int and 0 <= uid < 1 << 32 else 0


def uid_on_host(spec: dict[str, Any]) -> int:
    """Return the same uid as the host numbers it, by the user mapping of the spec."""
    uid = first_uid(spec)
    for row in items(spec, "linux", "uidMappings"):
        row = row if isinstance(row, dict) else {}
        inside, outside, size = (row.get(key) for key in ("containerID", "hostID", "size"))
        if all(type(one) is int for one in (inside, outside, size)) and inside <= uid < inside + size:
            return int(uid - inside + outside)
    return uid


def shm_source(spec: dict[str, Any]) -> str:
    """Return the host path at /dev/shm, as with --ipc=host; "" if the container has its own or only reads it."""
    found = ""
    for row in items(spec, "mounts"):
        row = row if isinstance(row, dict) else {}
        target, source, options = (row.get(key) for key in ("destination", "source", "options"))
        place = os.path.normpath(target) if isinstance(target, str) and "dev" in target else ""
        if place not in ("/dev", "/dev/shm"):
            continue
        flags = options if isinstance(options, list) else ()
        whole = place == "/dev" and "rbind" in flags
        itself = place == "/dev/shm" and ("bind" in flags or "rbind" in flags) and "ro" not in flags
        found = (f"{source}/shm" if whole else source if itself else "") if isinstance(source, str) else ""
    return found


def read_state(data: bytes) -> State:
    """Parse the hook's stdin."""
    if len(data) > MAX_STATE_BYTES:
        raise RequestError(f"the state on standard input is larger than {MAX_STATE_BYTES} bytes")
    value = _object(data, "the state on standard input")
    pid = value.get("pid") or 0
    if not isinstance(pid, int) or isinstance(pid, bool) or not 0 <= pid < 1 << 31:
        raise RequestError(f"the state's pid {shown(str(pid))} is not a process id")
    bundle = value.get("bundle") or value.get("bundlePath")  # bundlePath: before specification 1.0
    path = path_text(bundle, "the state's bundle")
    if not path.startswith("/"):
        raise RequestError(f"the state's bundle {shown(path)} is not an absolute path")
    status = value.get("status")
    return State(
        check_id(value.get("id")),
        pid,
        status if isinstance(status, str) else "",
        path,
        _texts(value.get("annotations"), "the state's annotations"),
    )


def load_bundle(source: Union[State, str], cri: bool = False, path: str = "") -> Bundle:
    """Load the bundle of a state, or of a directory, whose name is then the id. `cri`: as in bundle_of. `path`: of
    another file than its config.json."""
    if isinstance(source, str):
        directory = os.path.abspath(path_text(source, "the bundle"))
        name = os.path.basename(directory)
        state = State(name if _ID_CHARACTERS.issuperset(name) and name else "bundle", 0, "", directory, {})
    else:
        state = source
    spec = read_json(path or os.path.join(state.bundle, "config.json"), MAX_CONFIG_BYTES, "config.json")
    return bundle_of(state, spec, cri)


def _env(spec: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return process.env in order with duplicates, less service links. Skip entries without `=`, which the process
    cannot get."""
    pairs = []
    for line in items(spec, "process", "env"):
        if not isinstance(line, str):
            raise RequestError(f"config.json: process.env holds {shown(str(line))}, which is not text")
        name, equals, value = line.partition("=")
        if "\0" in line:
            raise RequestError(f"config.json: process.env holds a NUL in {shown(name)}")
        if equals:
            pairs.append((name, value))
    return without_links(pairs)


def without_links(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return variables less service links: Kubernetes adds `<SERVICE>_SERVICE_HOST`, `<SERVICE>_PORT_80_TCP` and the
    like to all pods of a namespace. None is a request or a claim, also if the service is called gpushare-claim."""
    return tuple(pair for pair in pairs if not (pair[0].startswith("GPUSHARE_") and _is_link(f"{pair[0]}_")))


def _is_link(name: str) -> bool:
    return any(word in name for word in ("_SERVICE_HOST_", "_SERVICE_PORT_", "_PORT_"))


def _rootfs(spec: dict[str, Any], directory: str) -> str:
    """Return root.path joined to the bundle as runc does; "" if there is none (request.py decides)."""
    path = section(spec, "root").get("path")
    if path is None or path == "":
        return ""
    joined = os.path.normpath(os.path.join(directory, path_text(path, "config.json: root.path")))
    return "/" + joined.lstrip("/")  # normpath keeps a leading "//"


def _first(annotations: dict[str, str], keys: tuple[str, ...]) -> str:
    return next((annotations[key] for key in keys if annotations.get(key)), "")


def _refuse_disagreement(annotations: dict[str, str]) -> None:
    """Refuse annotations of two engines that contradict each other. A pod's owner can write those of another engine,
    which the engine passes on (CRI-O: all annotations of the pod)."""
    for keys in constants.CRI_ANNOTATION_PAIRS:
        said = [(key, annotations[key]) for key in keys if annotations.get(key)]
        if len({value for _, value in said}) > 1:
            raise RequestError(
                f"annotations {' and '.join(setting(*pair) for pair in said)} contradict",
                "remove the one that is in the pod's own annotations: the engine sets the other",
            )


def container_name(annotations: dict[str, str]) -> str:
    """Return the container's name in its pod; "" if no engine sets it."""
    return _first(annotations, constants.CONTAINER_NAME_ANNOTATIONS)


def pod_namespace(annotations: dict[str, str]) -> str:
    """Return the namespace of the container's pod; "" if no engine sets it."""
    return _first(annotations, constants.POD_NAMESPACE_ANNOTATIONS)


def pod_name(annotations: dict[str, str]) -> str:
    """Return the name of the container's pod; "" if no engine sets it."""
    return _first(annotations, constants.POD_NAME_ANNOTATIONS)


def image_name(annotations: dict[str, str]) -> str:
    """Return the name of the container's image; "" if no engine sets it."""
    return _first(annotations, constants.IMAGE_NAME_ANNOTATIONS)


def sandbox_id(annotations: dict[str, str]) -> str:
    """Return the id of the sandbox that the containers of a pod share; "" if no engine sets it."""
    return _first(annotations, constants.SANDBOX_ID_ANNOTATIONS)


_SETS = ("bounding", "inheritable", "permitted", "effective", "ambient")  # a program can get it from any of them


def has_sys_admin(spec: dict[str, Any]) -> bool:
    """Return whether a program of the container can have CAP_SYS_ADMIN, in any user namespace."""
    # crun accepts names of capabilities in either case
    found = (items(spec, "process", "capabilities", name) for name in _SETS)
    different = {word for words in found for word in words if isinstance(word, str)}
    return any(word.upper() == "CAP_SYS_ADMIN" for word in different)


def facts(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Bundle that decisions ask for again and again. A privileged container could mount and create
    devices as the host's root."""
    sys_admin = has_sys_admin(spec)
    return {
        "privileged": sys_admin and not _is_apart(spec),
        "sys_admin": sys_admin,
        "uid": uid_on_host(spec),
        "shm": shm_source(spec),
        **cdi_devices.facts(spec, sys_admin),
    }


def with_spec(bundle: Bundle, spec: dict[str, Any]) -> Bundle:
    """Return the bundle with another config.json, but the same variables and annotations."""
    return bundle if spec is bundle.spec else bundle._replace(spec=spec, **facts(spec))


def _is_apart(spec: dict[str, Any]) -> bool:
    """Return whether the container has a user namespace without the host's root. There CAP_SYS_ADMIN applies to the
    container's own mounts only, and to no file of the host's root."""
    for one in items(spec, "linux", "namespaces"):
        if isinstance(one, dict) and one.get("type") == "user":
            path = one.get("path")
            if path:
                return not _maps_root(_joined_map(path))
            rows = (row for row in items(spec, "linux", "uidMappings") if isinstance(row, dict))
            # null is 0 for a runtime in Go
            return not _maps_root([(row.get("hostID") or 0, row.get("size") or 0) for row in rows])
    return False


def _maps_root(rows: list[tuple[Any, Any]]) -> bool:
    """Return whether one of `rows`, (first id outside, count), has uid 0; also True if there are no rows."""
    return not rows or any(first == 0 and count != 0 for first, count in rows)


def _joined_map(path: Any) -> list[tuple[Any, Any]]:
    """Return the map of a user namespace that the container joins; empty if it cannot be read."""
    head, _, tail = path.rpartition("/ns/user") if isinstance(path, str) else ("", "", "")
    if tail or not head.startswith("/proc/") or not head[6:].isdigit():
        return []
    try:
        with open(f"{head}/uid_map", encoding="ascii") as table:
            return [(int(words[1]), int(words[2])) for words in (line.split() for line in table)]
    except (OSError, ValueError, IndexError):
        return []


def _claims(annotations: dict[str, str]) -> tuple[str, str]:
    """Return the annotation that makes the container part of a pod, ("", "") if there is none. Podman's own pods have
    CRI-O's type and no name, and do not count as sandboxes."""
    kinds, crio = constants.CONTAINER_TYPE_ANNOTATIONS, constants.CONTAINER_TYPE_ANNOTATIONS[1]
    found = next((key for key in (*kinds, *constants.CONTAINER_NAME_ANNOTATIONS) if annotations.get(key)), "")
    if found == crio and annotations[crio] != "sandbox":
        found = next((key for key in constants.CONTAINER_NAME_ANNOTATIONS if annotations.get(key)), "")
    return (found, annotations[found]) if found else ("", "")


def pod_entry(annotations: dict[str, str]) -> str:
    """Return <namespace>/<container>; "" if the engine does not set both."""
    namespace, name = pod_namespace(annotations), container_name(annotations)
    return f"{namespace}/{name}" if namespace and name else ""


def bundle_of(state: State, spec: dict[str, Any], cri: bool = False) -> Bundle:
    """Return the checked parts of a parsed config.json. `cri`: the engine is configured as a CRI, so its annotations
    about pods count. With any other engine an image can set them."""
    refuse_other_case(spec, KEYS)
    said = _texts(spec.get("annotations"), "config.json: annotations")
    annotations = said if cri else {key: text for key, text in said.items() if key not in constants.CRI_ANNOTATIONS}
    _refuse_disagreement(annotations)
    cgroups_path = section(spec, "linux").get("cgroupsPath") or ""
    if not isinstance(cgroups_path, str):
        raise RequestError("config.json: linux.cgroupsPath must be text")
    return Bundle(
        id=state.id,
        pid=state.pid,
        path=state.bundle,
        rootfs=_rootfs(spec, state.bundle),
        env=_env(spec),
        annotations=annotations,
        cgroups_path=cgroups_path,
        container_type=_first(annotations, constants.CONTAINER_TYPE_ANNOTATIONS),
        container_name=container_name(annotations),
        spec=spec,
        claims=("", "") if cri else _claims(said),
        entry=pod_entry(annotations) or state.id,
        claimed_entry="" if cri else pod_entry(said),
        **facts(spec),
    )
