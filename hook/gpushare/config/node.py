"""Compile configuration and inventory into node.json, the only file that the start path reads for both.

    load_node(config_path, state_dir)           -> Node     fast; compiles when missing or stale
    compile_node(config_path, state_dir, write, measure) -> Node     always compiles: yaml, jsonschema, NVML
    read_node(config_path, state_dir)           -> Node | None   only if fresh
    last(state_dir)                             -> Node | None   the last one, stale or of the previous schema as well
    load_config_only(config_path, state_dir)    -> Config   also on a host without a driver
    config_or_defaults(config_path, state_dir)  -> Config   the defaults if the configuration is wrong
    log_target(config_path, state_dir)          -> str      destination of audit lines
    node_json(node, inputs), node_of(value)     -> to and from plain JSON values

Fresh means: same schema, same configuration file (path, mtime, size, inode), same driver version, same GPUs on the
bus. Checking costs one stat, one short read, one directory listing. The file is a cache: if it cannot be written, the
next start compiles again. Raises ConfigError and DeviceError.
"""

from __future__ import annotations

import json
import os
import stat
import time
from typing import Any, Callable, Optional

from ..core import constants
from ..core.errors import DeviceError, GpushareError
from ..core.model import Config, Context, Device, Inventory, Node, Policy, Quota, SharingRule
from ..gpu import inventory
from ..system import filelock
from . import oci_runtime

SCHEMA = 8  # increment when the meaning of node.json changes
_LAST = (7, SCHEMA)  # what `last` reads: the fields that 7 lacks have defaults
FILE = "node.json"
_LOCK = "compile"  # a file next to it; the process that holds its lock compiles
_DEVICES = ("devices", "mig")  # fields of Inventory that hold devices
MAX_NODE_BYTES = 4 << 20
PARTIAL_S = 60  # how long an inventory without memory sizes stays fresh: NVML may answer by then


def _config_identity(config_path: str) -> list[Any]:
    """Values that change when the file is edited; only the path if there is no file. The first one changes with an
    upgrade: the default of shim_dir, which is compiled too."""
    try:
        status = os.stat(config_path)
    except OSError:
        return [constants.SHIM_DIR, config_path]
    return [constants.SHIM_DIR, config_path, status.st_mtime_ns, status.st_size, status.st_ino]


def _driver_identity(root: str) -> list[Any]:
    """Values that change with the driver or the GPUs; the version is None while no driver is loaded."""
    try:
        version: Optional[str] = inventory.driver_version(root)
    except DeviceError:
        version = None
    return [version, *inventory.bus_ids(root), *inventory.mig_instances(root)]


def node_json(node: Node, config_identity: list[Any], driver_identity: list[Any]) -> dict[str, Any]:
    """The file's content as plain values."""
    config, host = node
    return {
        "schema": SCHEMA,
        "config_identity": config_identity,
        "driver_identity": driver_identity,
        "config": {**config._asdict(), "policy": config.policy._asdict()},
        "inventory": {**host._asdict(), **{key: [d._asdict() for d in getattr(host, key)] for key in _DEVICES}},
    }


def node_of(value: dict[str, Any]) -> Node:
    """The Node in a file's content. Raises KeyError or TypeError for any other content."""
    config, host = value["config"], value["inventory"]
    policy: dict[str, Any] = {
        key: tuple(item) if isinstance(item, list) else item for key, item in config["policy"].items()
    }
    policy["quotas"] = tuple(Quota(*quota) for quota in policy["quotas"])
    measured = tuple(Context(*one) for one in host["contexts"])
    rules = (SharingRule(*rule) for rule in config["sharing"])
    sharing = tuple(rule._replace(devices=tuple(rule.devices)) for rule in rules)
    return Node(
        Config(**{**config, "policy": Policy(**policy), "sharing": sharing}),
        Inventory(
            **{
                **host,
                **{key: tuple(Device(**device) for device in host[key]) for key in _DEVICES},
                "contexts": measured,
                "stale_programs": tuple(host["stale_programs"]),
            }
        ),
    )


def _read(path: str) -> Optional[dict[str, Any]]:
    """The file's content if only root or this user could have written it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        trusted = status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not trusted or not stat.S_ISREG(status.st_mode) or status.st_size > MAX_NODE_BYTES:
            return None
        value = json.loads(os.read(fd, MAX_NODE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(fd)
    return value if isinstance(value, dict) else None


def read_node(config_path: str, state_dir: str) -> Optional[Node]:
    """The compiled node if it is fresh."""
    value = _read(os.path.join(state_dir, FILE))
    if value is None or value.get("schema") != SCHEMA or value.get("config_identity") != _config_identity(config_path):
        return None
    try:
        node = node_of(value)
        host = node.inventory
        partial = not all(device.memory_bytes for device in (*host.devices, *host.mig))
        if partial and not 0 <= time.time() - os.stat(os.path.join(state_dir, FILE)).st_mtime <= PARTIAL_S:
            return None  # too old, or from the future: the clock was set back
    except (KeyError, TypeError, AttributeError, OSError):
        return None
    if value.get("driver_identity") != _driver_identity(node.config.driver_root):
        return None
    return node._replace(config=node.config._replace(state_dir=state_dir))


def last(state_dir: str) -> Optional[Node]:
    """The last compiled node, fresh or not, also of the previous schema: a pod that is upgraded before its node's
    installer has no driver library to compile with."""
    value = _read(os.path.join(state_dir, FILE))
    try:
        return None if value is None or value.get("schema") not in _LAST else node_of(value)
    except (KeyError, TypeError, AttributeError):
        return None


def load_node(config_path: str, state_dir: str) -> Node:
    """The node, compiled only after a change. One start compiles and concurrent starts wait for its file: compiling in
    all of them at once would take each of them several times as long."""
    return read_node(config_path, state_dir) or _compiled_once(config_path, state_dir)


def _compiled_once(config_path: str, state_dir: str) -> Node:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:  # not the directory itself: any user of the host can open that, and then hold its lock for ever
        lock = os.open(os.path.join(state_dir, _LOCK), flags, 0o600)
    except OSError:
        return compile_node(config_path, state_dir)
    try:
        filelock.take(lock, os.path.join(state_dir, _LOCK))  # the kernel releases it when the process dies
        return read_node(config_path, state_dir) or compile_node(config_path, state_dir)
    finally:
        os.close(lock)


def load_config_only(config_path: str, state_dir: str) -> Config:
    """The configuration, from node.json if that is fresh."""
    fresh = read_node(config_path, state_dir)
    if fresh is not None:
        return fresh.config
    from .config import load_config

    return load_config(config_path)._replace(state_dir=state_dir)


Measure = Callable[[Node, tuple[Context, ...]], tuple[Context, ...]]


def compile_node(config_path: str, state_dir: str, write: bool = True, measure: Optional[Measure] = None) -> Node:
    """Read the configuration and query the driver. `write=False` writes no file (explain). `measure` measures contexts
    that the last node.json does not have (refresh)."""
    from ..gpu import contexts
    from .config import load_config

    config_identity = _config_identity(config_path)  # before reading: a change meanwhile makes the file stale
    try:
        config = load_config(config_path)._replace(state_dir=state_dir)
    except ImportError as error:
        raise GpushareError(f"cannot read {config_path}: {error}", "install PyYAML and jsonschema") from None
    if write:
        oci_runtime.remember(config_path, state_dir, config)  # before querying the driver: a host may have no driver
    driver_identity = _driver_identity(config.driver_root)
    before = last(state_dir)
    host = contexts.with_measured(
        inventory.read_inventory(config.driver_root, libraries=config.driver_libraries, dev=config.driver_dev),
        before.inventory.contexts if before is not None else (),
    )
    node = Node(config, host)
    if measure is not None:
        node = node._replace(inventory=contexts.with_measured(host, measure(node, host.contexts)))
    if write:
        _write(state_dir, node_json(node, config_identity, driver_identity))
    return node


def _write(state_dir: str, value: dict[str, Any]) -> None:
    """Write node.json atomically. Ignores errors: without the file the next start only takes longer."""
    temporary = os.path.join(state_dir, f".{FILE}.{os.getpid()}")
    try:
        os.makedirs(state_dir, mode=0o700, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError:
        return
    try:
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o644)  # whatever the umask: users of the host may read it
            file.write(json.dumps(value))
        os.rename(temporary, os.path.join(state_dir, FILE))
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass


def config_or_defaults(config_path: str, state_dir: str) -> Config:
    """The configuration, for a program that has not loaded it; the defaults if it is wrong."""
    try:
        return load_config_only(config_path, state_dir)
    except (GpushareError, ImportError, OSError):
        return Config(state_dir=state_dir)


def log_target(config_path: str, state_dir: str) -> str:
    """`log.decisions`, for a program that has not loaded the configuration; the journal if the configuration is
    wrong."""
    return config_or_defaults(config_path, state_dir).log
