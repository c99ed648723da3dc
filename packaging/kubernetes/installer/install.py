"""Install gpushare on a node of a cluster, and remove it again. The image runs this with the Python of the bundle.

usage: install.py install | remove | run WORDS... | ready       the node's root is mounted at /host

    install    copy the bundle to /opt/gpushare on the node, configure the engine, and write the node's features for
               node-feature-discovery (labels and the memory to share). Update the features until the pod ends. The
               end of the pod removes nothing: it ends by an upgrade, a drain or a shutdown as well.
    remove     wait until nothing on the node uses gpushare, and remove it.
    run        replace this program by `gpushare WORDS...` in the node's root.
    ready      succeed if `install` or `remove` of this pod is done: the pod's readiness probe.

docs/node-life.md has the states of a node and what each event does.

Variables, with their defaults:

    GPUSHARE_ENGINE=containerd    the engine to configure; none: leave the engine alone, for the NRI plugin
    GPUSHARE_FOLDER=/opt/gpushare the folder for the programs, if the node cannot write to /opt or run programs there;
                                  its path without links
    GPUSHARE_CONFIG_FILE=         the file that the engine reads, if it is not the usual one; for k3s, RKE2, k0s and
                                  MicroK8s see docs/engines.md
    GPUSHARE_REQUIRE_NRI=no       yes, with GPUSHARE_ENGINE=none: when the NRI plugin runs on the node, make containerd
                                  2.2 and newer, or CRI-O 1.34 and newer, refuse containers while it does not run
    GPUSHARE_REQUIRE_CDI=no       yes, for the DRA driver: refuse a node whose containerd has CDI disabled
    GPUSHARE_PROFILE=cluster      the profile of gpushare's configuration file
    GPUSHARE_RESTART=always       restart or reload the engine if it has not read its configuration yet; never: print
                                  the command instead
    GPUSHARE_NODE=                the name of the node: if it is set, the node's label gpushare.io/profile chooses a
                                  file of /profiles, which becomes the node's configuration; without it, the label
                                  nvidia.com/device-plugin.config does, if it names one; SIGHUP reads both at once

The node's programs run in the node's root, so that they use only the node's files.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

BUNDLE, HOST = "/gpushare", "/host"
# On the node: a directory for each version of the bundle, and the link `current`
FOLDER = os.environ.get("GPUSHARE_FOLDER", "/opt/gpushare")
CONFIG = "/etc/gpushare/config.yaml"
WRITTEN = FOLDER + "/config.sha256"  # checksum of the configuration file that this program wrote
APPLIED = FOLDER + "/profile"  # name of the profile in that file, if a label chose it
LABEL = "gpushare.io/profile"
NVIDIA_LABEL = "nvidia.com/device-plugin.config"  # the same for NVIDIA's device plugin; it counts without LABEL
PROFILES = "/profiles"  # the ConfigMap in the pod: NAME.yaml for each profile
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"  # a Node without its large status
CLAIMS = "/run/cdi/gpushare.io-claim_*.json"  # prepared by the DRA driver
UPDATE_S = 300  # time between two updates of the features, since devices may change
PROFILE_S = 60  # time between two reads of the label and of the profiles
STEP_S = 2  # time between two checks for the NRI plugin, until it has run
RETRY_S = 3600  # longest time between two attempts to require it; each restarts the engine
DROP_INS = {"containerd": "/etc/containerd/conf.d/gpushare.toml", "crio": "/etc/crio/crio.conf.d/99-gpushare.conf"}
CONFIGURED = "/var/lib/gpushare/configured/{}.json"
OPTIONAL = b"gpushare-nri-optional"  # is in the drop-in if it requires the NRI plugin
UNITS = tuple(f"{top}/systemd/system" for top in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib"))
UNREAD = "/run/gpushare-unread."  # and the engine: perhaps it has not been restarted since gpushare left its files
PLUGIN_LOCK = "/run/gpushare/nri"  # the NRI plugin holds it while it runs
LOCK = "/run/gpushare-installer.lock"  # `install` or `remove` holds it while it runs
READY = "/ready"  # in the pod: exists when `install` or `remove` is done
SELINUX = "/sys/fs/selinux/enforce"  # exists where the kernel uses SELinux
PROC = "/proc"
FIRST = "1"  # the process in PROC that has the mounts of the node
# In the root of FIRST: the mount namespace of kubelet and CRI-O, where OpenShift hides their mounts from systemd. Only
# root of the node can put a namespace there.
HIDDEN = "root/run/kubens/mnt"
MOST_LINKS = 40  # on the way to a file, as in the kernel
MOST_BYTES = 16 << 20  # of a record or of a file of a process
# containerd's record of each task, in a directory for each container; a shim's working directory is such a directory
TASKS = "/run/containerd/io.containerd.runtime.v2.task"
RUNTIME_FILES = ("runtime", "options.json")  # they name the program that containerd calls until the task is deleted
# CRI-O's record of each container and sandbox; that of a sandbox names its handler. CRI-O looks the handler up in its
# configuration to stop them.
CRIO = ("/run/containers/storage", "/var/lib/containers/storage")
HANDLER = re.compile(rb'"io\.kubernetes\.cri-o\.RuntimeHandler": ?"gpushare"')
# Mounts in gpushare's state directory from which new containers get theirs (system/idmap.py): they use no version
CLONES = re.compile(rb"^(?:\S+ ){4}\S*/idmap/\d+-\d+ .*$", re.MULTILINE)
PROGRAM = FOLDER + "/current/bin/gpushare"
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "SYSTEMD_IGNORE_CHROOT": "1"}
ENDS = {signal.SIGTERM, signal.SIGINT}


class Failed(Exception):
    """One line for the pod's log."""


class RestartFailed(Failed):
    """The engine did not start with gpushare's entries. They were undone, and another attempt restarts it again."""


def on_node(path: str) -> str:
    """The place of a path of the node in this pod. An absolute link on the way names a path of the node, too; a link as
    the last component stays."""
    done, left, links = "", path.split("/")[::-1], 0
    while left:
        name = left.pop()
        target = link_of(f"{HOST}{done}/{name}") if left else ""
        if target and links < MOST_LINKS:
            done, links = "" if target.startswith("/") else done, links + 1
            left += target.split("/")[::-1]
        elif name == "..":
            done = done.rpartition("/")[0]
        elif name not in ("", "."):
            done = f"{done}/{name}"
    return HOST + done


def run(*words: str, quiet: bool = False) -> str:
    """Run a program of the node in the node's root and return its output. Raises Failed, with the first message of the
    program if `quiet`."""

    def enter() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS | {signal.SIGHUP})
        os.chroot(HOST)
        os.chdir("/")

    try:
        done = subprocess.run(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if quiet else None,
            preexec_fn=enter,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Failed(f"{words[0]}: {error}") from None
    if done.returncode and quiet:
        first = done.stderr.decode(errors="replace").partition("\n")[0]
        raise Failed(first.partition("gpushare: ")[2] or f"`{shlex.join(words)}` ended with {done.returncode}")
    if done.returncode:
        raise Failed(f"`{shlex.join(words)}` ended with {done.returncode}; its messages are above")
    return done.stdout.decode()


def gpushare(*words: str) -> dict:
    """Run a gpushare command on the node and return its JSON; an array becomes {"items": array}."""
    value = json.loads(run(PROGRAM, *words, "--format", "json"))
    return value if isinstance(value, dict) else {"items": value}


def digest(top: str) -> str:
    """The checksum of all file names and contents below `top`, and of which files can be executed."""
    found = hashlib.sha256()
    for folder, folders, files in os.walk(top):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(folder, name)
            found.update(os.path.relpath(path, top).encode() + b"\0" + link_of(path).encode() + b"\0")
            if not os.path.islink(path):
                with open(path, "rb") as file:
                    runs = os.fstat(file.fileno()).st_mode & 0o111
                    found.update(bytes([runs]) + hashlib.sha256(file.read()).digest())
    return found.hexdigest()


def sync(path: str) -> None:
    """Write a file or directory of the node to the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def copy() -> str:
    """Copy the bundle to the node and return the name of its directory. A directory gets its name when all of it is on
    the disk, and never changes afterwards: running containers have mounts from it, and when they end the engine calls
    its programs. A damaged one, from which programs do not start, is replaced."""
    name = digest(BUNDLE)[:16]
    os.makedirs(on_node(FOLDER), exist_ok=True)
    target = on_node(f"{FOLDER}/{name}")
    if not os.path.isdir(target) or digest(target)[:16] != name:
        new, damaged = on_node(f"{FOLDER}/new"), on_node(f"{FOLDER}/damaged")
        for left in (new, damaged):
            shutil.rmtree(left, ignore_errors=True)
        try:
            shutil.copytree(BUNDLE, new, symlinks=True)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)  # the disk may be full
            why = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # of one file
            raise Failed(f"cannot copy the programs to {FOLDER}: {why}") from None
        relabel(f"{FOLDER}/new")
        for folder, _, files in os.walk(new, topdown=False):
            paths = [os.path.join(folder, one) for one in files]
            for path in [*(one for one in paths if not os.path.islink(one)), folder]:
                sync(path)
        if os.path.isdir(target):
            os.rename(target, damaged)
        os.rename(new, target)
        sync(on_node(FOLDER))
        print(f"copied to {FOLDER}/{name}", flush=True)
    return name


def relabel(folder: str) -> None:
    """Give a folder the labels of the node's SELinux policy. Without them, containers cannot map the libraries."""
    if not os.path.exists(on_node(SELINUX)):
        return
    try:
        run("restorecon", "-R", folder, quiet=True)
    except Failed as error:
        line = f"cannot label {folder} for SELinux, so containers with a share may not start: {error}"
        print(line, file=sys.stderr, flush=True)


def point(name: str) -> None:
    """Make `current` name this version; the old or the new one after a crash."""
    link = on_node(f"{FOLDER}/current.new")
    if os.path.lexists(link):
        os.unlink(link)
    os.symlink(name, link)
    os.rename(link, on_node(f"{FOLDER}/current"))
    sync(on_node(FOLDER))


def current() -> str:
    """The version that `current` names; "" if there is none."""
    link = on_node(f"{FOLDER}/current")
    return os.readlink(link) if os.path.isdir(link) else ""


def discard(folder: str) -> None:
    """Remove a directory that copy() made; killed, it leaves none with the name of a complete one."""
    new = on_node(f"{FOLDER}/new")  # copy() removes it, too
    if folder != new:
        shutil.rmtree(new, ignore_errors=True)
        os.rename(folder, new)
    shutil.rmtree(new)


def checksum(path: str) -> str:
    data = contents(path)
    return hashlib.sha256(data).hexdigest() if data else ""


def restart(done: dict) -> None:
    """Run the commands that make engines reload a changed configuration: `next` in the JSON of a gpushare command."""
    commands = done.get("next") or []
    for command in [commands] if isinstance(commands, str) else commands:
        if os.environ.get("GPUSHARE_RESTART", "always") == "never":
            print(f"on the node, run: {command}", flush=True)
        else:
            print(f"running: {command}", flush=True)
            try:
                run(*shlex.split(command))
            except Failed as error:
                raise RestartFailed(str(error)) from None


def is_ours(config: str) -> bool:
    """Whether this program wrote the configuration file, which has this checksum."""
    return config in read(WRITTEN).split()


def write(path: str, data: bytes) -> None:
    """Write a file of the node whole or not at all. A file that is there keeps its owner and mode: the engine's files,
    and gpushare's record of them, can contain passwords."""
    os.makedirs(os.path.dirname(on_node(path)), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with open(os.open(on_node(path + ".new"), flags, 0o600), "wb") as file:
        try:
            old = os.stat(on_node(path))
            os.fchown(file.fileno(), old.st_uid, old.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
        except FileNotFoundError:
            os.fchmod(file.fileno(), 0o644)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(on_node(path + ".new"), on_node(path))
    sync(os.path.dirname(on_node(path)))


class Profile:
    """Makes the profile that the node's label names the node's configuration. If that is impossible, it prints why,
    once, and the node keeps its configuration."""

    def __init__(self) -> None:
        self.line = ""
        self.failed: tuple = ()  # the profile that `refresh` refused, and why

    def follow(self, again: bool = True) -> bool:
        """Return whether the configuration has changed. `again`: try a profile that failed once more."""
        if "GPUSHARE_NODE" not in os.environ:
            return False
        if again:
            self.failed = ()
        try:
            changed, line = self.apply(label_of_node()), ""
        except (Failed, OSError) as error:
            changed, line = False, f"gpushare: {error}; the node keeps its configuration"
        if line and line != self.line:
            print(line, file=sys.stderr, flush=True)
        self.line = line
        return changed

    def apply(self, name: str) -> bool:
        applied, old = read(APPLIED), contents(CONFIG)
        if not name and applied:
            raise Failed(f"the node lost its label {LABEL}={json.dumps(applied)}")
        if not name:
            return False
        text = self.text(name)
        if text == old and name == applied:
            return False
        if old and not is_ours(checksum(CONFIG)):
            raise Failed(f"profile {json.dumps(name)}: {CONFIG} was edited on the node; delete it there")
        if self.failed[:2] == (name, text):
            raise Failed(self.failed[2])
        self.check(name, text)
        self.replace(name, text)
        try:
            run(PROGRAM, "refresh", quiet=True)
        except Failed as error:
            self.replace(applied, old)
            self.failed = (name, text, f"profile {json.dumps(name)}: {error}")
            raise Failed(self.failed[2]) from None
        print(f"profile {name} is applied", flush=True)
        return True

    @staticmethod
    def text(name: str) -> bytes:
        """The contents of the profile's file. Raises Failed."""
        found = sorted(one[: -len(".yaml")] for one in os.listdir(PROFILES) if one.endswith(".yaml"))
        if name not in found:
            raise Failed(f"label {LABEL}={json.dumps(name)}: the profiles are {', '.join(found) or 'none'}")
        with open(f"{PROFILES}/{name}.yaml", "rb") as file:
            return file.read()

    @staticmethod
    def check(name: str, text: bytes) -> None:
        """Raise Failed with the first error in the profile."""
        path = f"{FOLDER}/{name}.yaml"
        write(path, text)
        try:
            run(PROGRAM, "config", "check", path, quiet=True)
        except Failed as error:
            raise Failed(f"profile {json.dumps(name)}: {str(error).replace(path, name + '.yaml')}") from None
        finally:
            os.unlink(on_node(path))

    @staticmethod
    def replace(name: str, text: bytes) -> None:
        """Write the configuration. If the pod is killed meanwhile, the file still counts as written by this program."""
        new = hashlib.sha256(text).hexdigest()
        write(WRITTEN, f"{checksum(CONFIG)} {new}".encode())
        write(APPLIED, name.encode())
        if text:
            write(CONFIG, text)
        elif os.path.lexists(on_node(CONFIG)):  # there was none before
            os.unlink(on_node(CONFIG))
        write(WRITTEN, new.encode())


def label_of_node() -> str:
    """The value of the node's label; "" without that label. Raises Failed."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    path = f"/api/v1/nodes/{os.environ['GPUSHARE_NODE']}"
    try:
        with open(f"{ACCOUNT}/token", encoding="ascii") as file:
            headers = {"Authorization": f"Bearer {file.read().strip()}", "Accept": METADATA}
        context = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
        # Python 3.13 sets it, and then refuses the certificates of old clusters, which kubectl accepts
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        connection = http.client.HTTPSConnection(host, int(port), timeout=10, context=context)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:  # its text can be that of a proxy
            raise Failed(f"API server: GET {path}: {answer.status} {json.dumps(message_of(text))}")
        found = json.loads(text)
        return named_profile(found["metadata"].get("labels", {}))
    except (OSError, http.client.HTTPException, ValueError, KeyError, AttributeError) as error:
        raise Failed(f"API server: GET {path}: {error}") from None


def named_profile(labels: dict[str, str]) -> str:
    """The profile that the labels name. A name in NVIDIA's label can be one of NVIDIA's configurations only."""
    other = str(labels.get(NVIDIA_LABEL, ""))
    return str(labels.get(LABEL, "")) or (other if os.path.isfile(f"{PROFILES}/{os.path.basename(other)}.yaml") else "")


def message_of(text: bytes) -> str:
    """The message of an error of the API server, or the first line of an answer that is no JSON object."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, LookupError, TypeError):
        return text.decode(errors="replace").strip().partition("\n")[0][:200]


def is_yes(name: str, asked: str) -> bool:
    """Raises Failed for a value that is neither yes nor no."""
    if asked not in ("yes", "no"):
        raise Failed(f"{name}={shlex.quote(asked)} is neither yes nor no")
    return asked == "yes"


def check_folder() -> None:
    """Raise Failed if programs cannot be in GPUSHARE_FOLDER."""
    if not re.fullmatch(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+/gpushare", FOLDER):
        raise Failed(f"GPUSHARE_FOLDER={shlex.quote(FOLDER)} is not a path that ends in /gpushare: write one such as "
                     "/home/kubernetes/bin/gpushare")  # fmt: skip
    real = on_node(f"{FOLDER}/.")[len(HOST) :]
    if f"{FOLDER}/" not in f"{real}/" or link_of(on_node(FOLDER)):  # the engine's entries name the path without links
        raise Failed(f"GPUSHARE_FOLDER={FOLDER} is {shlex.quote(real)} on this node: write a path without links")


def requires_nri() -> bool:
    """Read GPUSHARE_REQUIRE_NRI. Raises Failed."""
    asked = is_yes("GPUSHARE_REQUIRE_NRI", os.environ.get("GPUSHARE_REQUIRE_NRI", "no"))
    if asked and os.environ.get("GPUSHARE_ENGINE") != "none":
        raise Failed("GPUSHARE_REQUIRE_NRI=yes needs GPUSHARE_ENGINE=none, which leaves shares to the NRI plugin")
    return asked


def check_engine() -> None:
    """Raise Failed if the node has the other engine only. An engine can be in a place that `has_engine` does not know,
    so a node without either is not refused, and GPUSHARE_CONFIG_FILE overrides this."""
    engine = os.environ.get("GPUSHARE_ENGINE", "containerd")
    other = {"containerd": "crio", "crio": "containerd"}.get(engine, "")
    if other and not config_file() and not has_engine(engine) and has_engine(other):
        raise Failed(
            f"GPUSHARE_ENGINE={engine}: {engine} was not found on this node, but {other} was: set GPUSHARE_ENGINE="
            f"{other} (engines in the Helm chart), or GPUSHARE_CONFIG_FILE to the file that {engine} reads"
        )


def has_engine(engine: str) -> bool:
    """Whether the node has a program, a unit or a process of this name. The socket tells less: an option can move it,
    and an engine that does not run yet has none."""
    paths = [f"{folder}/{engine}" for folder in ENVIRONMENT["PATH"].split(":")]
    paths += [f"{folder}/{engine}.service" for folder in UNITS]
    return any(os.path.lexists(on_node(path)) for path in paths) or any(
        bytes_of(f"{PROC}/{pid}/comm") == f"{engine}\n".encode() and is_of_host(pid)
        for pid in filter(str.isdigit, os.listdir(PROC))
    )


def check_cdi() -> None:
    """Raise Failed if claims need CDI and the node's containerd ignores it: containers would start without a GPU."""
    asked = is_yes("GPUSHARE_REQUIRE_CDI", os.environ.get("GPUSHARE_REQUIRE_CDI", "no"))
    if not asked or os.environ.get("GPUSHARE_ENGINE") == "crio":
        return
    try:
        text = run("containerd", "config", "dump", quiet=True)
    except Failed as error:
        print(f"cannot check whether containerd has CDI enabled: {error}", file=sys.stderr, flush=True)
        return
    if re.search(r"^\s*enable_cdi = true$", text, re.MULTILINE) is None:
        raise Failed(
            "containerd has CDI disabled, so a container with a claim would start without a GPU: write enable_cdi = "
            'true below [plugins."io.containerd.grpc.v1.cri"] in /etc/containerd/config.toml and restart containerd'
        )


def plugin_runs() -> str:
    """The engine that has accepted the running plugin; "" if there is none."""
    words = read(PLUGIN_LOCK).split() if is_locked(on_node(PLUGIN_LOCK)) else []
    return {"cri-o": "crio", "containerd": "containerd"}.get(words[1], "") if len(words) == 2 else ""


def require_nri(engine: str, word: str = "--require-nri") -> None:
    """Make the engine refuse containers while the NRI plugin does not run, or with --undo stop that. Not before the
    plugin has run: if its image cannot be pulled, the node must still start other containers. Raises Failed while
    CRI-O has pods of the handler: the requirement takes the handler's place in CRI-O's file."""
    handled = handled_sandboxes() if (engine, word) == ("crio", "--require-nri") else []
    if handled:
        raise Failed(f"CRI-O's container {handled[0]} has the handler gpushare, without which CRI-O cannot stop it")
    done = gpushare("runtime", "configure", engine, word, *config_file())
    for line in [*(f"{change['action']} {change['path']}" for change in done["changes"]), *done["notes"]]:
        print(line, flush=True)
    restart(done)


def try_to_require_nri(engine: str, delay: int) -> bool:
    """Require the NRI plugin, or print why not and leave the engine without the requirement. `delay`: seconds until the
    next attempt."""
    try:
        require_nri(engine)
        return True
    except Failed as error:
        line = f"gpushare: {error}; the engine does not require the NRI plugin, next attempt in {delay} s"
        print(line, file=sys.stderr, flush=True)
    try:
        lift_nri()
    except Failed as error:
        print(f"gpushare: {error}", file=sys.stderr, flush=True)
    return False


def lift_nri(keep: bool = False) -> None:
    """Stop requiring the NRI plugin, also for an earlier pod that was killed, even between the removal of the
    requirement and the engine's restart. `keep`: a requirement that was not removed. An entry of gpushare stays:
    CRI-O needs it to stop the pods that have it."""
    for engine, usual in DROP_INS.items():
        texts = [contents(path) for path in [usual, *configured(engine)]]
        required = any(OPTIONAL in text for text in texts)
        entry = any(f"{FOLDER}/".encode() in text for text in texts)
        left = os.environ.get("GPUSHARE_ENGINE") == "none" and os.path.lexists(on_node(UNREAD + engine))
        if (required and not keep) or (left and not required and not entry):
            require_nri(engine, "--undo")


def configured(engine: str) -> dict[str, bytes]:
    """The files of the engine in which gpushare's entries are, and their contents without these."""
    try:
        files = json.loads(read(CONFIGURED.format(engine)))["files"]
        return {one["path"]: (one.get("before") or "").encode() for one in files}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def config_file() -> list:
    path = os.environ.get("GPUSHARE_CONFIG_FILE", "")
    return ["--config-file", path] if path else []


def install(profile: Profile) -> None:
    """Install this version and configure the engine. Raises Failed and RestartFailed after it has undone that."""
    engine = os.environ.get("GPUSHARE_ENGINE", "containerd")
    before = Before(engine)
    point(copy())
    try:
        done = configure(profile, engine)
    except (Failed, OSError):  # the engine's files are as before
        before.put_back_programs()
        raise
    for change in done["changes"]:
        print(f"{change['action']} {change['path']}", flush=True)
    try:
        restart(done)
        before.check_cri()
    except RestartFailed as error:
        raise RestartFailed(f"{error}; {before.undo(done)}") from None
    label()
    tidy()


def configure(profile: Profile, engine: str) -> dict:
    """Configure gpushare and the engine. Raises Failed."""
    profile.follow()
    words = ["runtime", "configure", *([] if engine == "none" else [engine, *config_file()])]
    before = checksum(CONFIG)
    # Keep a profile, and a file that the administrator wrote or edited.
    if not before or (is_ours(before) and not read(APPLIED)):
        words += ["--profile", os.environ.get("GPUSHARE_PROFILE", "cluster"), "--force"]
    done = gpushare(*words) if len(words) > 2 else {"changes": []}
    if "--profile" in words:
        write(WRITTEN, checksum(CONFIG).encode())
        write(APPLIED, b"")
    return done


def cri_of(engine: str) -> str:
    """The status of containerd's CRI plugin, such as "ok" or "error": containerd runs also if that plugin refuses the
    configuration. "" if containerd does not answer at its usual place, and for CRI-O, which runs only with CRI."""
    if engine != "containerd" or config_file():
        return ""
    try:
        lines = run("ctr", "plugins", "ls", quiet=True).splitlines()
    except Failed:
        return ""
    found = [line.split() for line in lines]
    return next((words[-1] for words in found if words[:2] == ["io.containerd.grpc.v1", "cri"]), "")


class Before:
    """The node before this version was installed."""

    def __init__(self, engine: str) -> None:
        self.engine, self.version, self.cri = engine, current(), cri_of(engine)
        self.files = {path: contents(path) for path in (CONFIG, WRITTEN, APPLIED)}
        record = CONFIGURED.format(engine)
        self.entries = {path: contents(path) for path in configured(engine)}
        if self.entries:
            self.entries[record] = contents(record)

    def put_back_programs(self) -> None:
        """Make the earlier version the current one, if there was one. It may not accept the new configuration."""
        if self.version:
            put_back(self.files)
            point(self.version)

    def check_cri(self) -> None:
        """Raise RestartFailed if containerd has lost CRI."""
        if self.cri == "ok" and cri_of(self.engine) == "error":
            raise RestartFailed("containerd runs without CRI, so kubelet can start no container (`ctr plugins ls`)")

    def undo(self, done: dict) -> str:
        """Give the engine the files that it had before, and restart it. `done`: the change that made it fail. Return
        what was done."""
        place = f"{FOLDER}/{self.version}" if self.entries else "its own files"
        print(f"the engine goes back to {place}", flush=True)
        try:
            self.put_back_programs()
            if self.entries:  # not by the earlier version: it does not know all that a newer one can write
                put_back({**configured(self.engine), **self.entries})
            else:
                done = gpushare("runtime", "configure", self.engine, "--undo", *config_file())
            restart(done)
            self.check_cri()
            return "that was undone, and the engine runs as before; send SIGHUP or replace the pod to try again"
        except Failed as error:
            return f"undoing it failed as well: {error}; see the engine's log on the node"


def put_back(files: dict[str, bytes]) -> None:
    """Give files of the node these contents; without contents there was no file. A file that has them stays, also as a
    link."""
    for path, data in files.items():
        if contents(path) == data:
            continue
        if data:
            write(path, data)
        elif os.path.lexists(on_node(path)):
            os.unlink(on_node(path))


def tidy() -> None:
    """Remove the versions that nothing on the node names any more. An engine that was not restarted yet names one."""
    if os.environ.get("GPUSHARE_RESTART", "always") == "never" and has_unread_files():
        return
    names = [one for one in os.listdir(on_node(FOLDER)) if os.path.isdir(on_node(f"{FOLDER}/{one}"))]
    old = {one for one in names if one not in ("current", "current.new", current())}
    texts = (data for found in (tasks(), crio(), processes()) for one in found for data in one[1:])
    for name in sorted(old - named(old - {"new"}, texts)):  # `new` is an incomplete copy: nothing runs from it
        discard(on_node(f"{FOLDER}/{name}"))


def has_unread_files() -> bool:
    engine = os.environ.get("GPUSHARE_ENGINE", "containerd")
    return engine != "none" and bool(gpushare("runtime", "configure", engine, "--dry-run", *config_file()).get("next"))


def named(names: Iterable[str], texts: Iterable[bytes]) -> set[str]:
    """Those of `names` that are in one of the texts."""
    wanted, found = set(names), set[str]()
    for text in texts if wanted else ():
        found |= {name for name in wanted if name.encode() in text}
    return found


def bytes_of(path: str) -> bytes:
    """The contents of a regular file that can go at any time. A pipe or a link to a device must not stop the reader."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return b""
    with open(file, "rb") as opened:
        try:
            return opened.read(MOST_BYTES) if stat.S_ISREG(os.fstat(file).st_mode) else b""
        except OSError:
            return b""


def link_of(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def is_of_host(pid: str) -> bool:
    """Whether root of the node runs a process with the mounts of the node's first process, or with the mounts that
    OpenShift hides from it. A container or user chooses all else of its processes: their names, working directories,
    programs, and arguments, which can be in memory that makes the reader wait (FUSE). The owner of the folder tells
    nothing: root owns that of a process that cannot be dumped (proc(5), PR_SET_DUMPABLE)."""
    namespace = link_of(f"{PROC}/{pid}/ns/mnt")
    return (
        namespace != ""
        and namespace in (link_of(f"{PROC}/{FIRST}/ns/mnt"), hidden_namespace())
        and b"\nUid:\t0\t0\t0\t0\n" in bytes_of(f"{PROC}/{pid}/status")
    )


def hidden_namespace() -> str:
    """The mount namespace of kubelet and CRI-O as /proc names it; "" if they have the mounts of the node."""
    try:
        return f"mnt:[{os.stat(f'{PROC}/{FIRST}/{HIDDEN}').st_ino}]"
    except OSError:
        return ""


def processes() -> Iterator[tuple[str, bytes, bytes, bytes]]:
    """(pid and name, program, command line, mounts) of each process of the node: the program if it is a file below
    FOLDER, and the command line if no container chose it. The mounts of a container are from the version that it
    started with; processes of one mount namespace have them once."""
    seen: set[str] = set()
    for pid in filter(str.isdigit, os.listdir(PROC)):
        folder = f"{PROC}/{pid}"
        namespace = link_of(f"{folder}/ns/mnt")
        mounts = b"" if namespace in seen else bytes_of(f"{folder}/mountinfo")
        if mounts:  # a process that has ended has none
            seen.add(namespace)
        name = shown(bytes_of(f"{folder}/comm").decode(errors="replace").strip())
        words = bytes_of(f"{folder}/cmdline") if is_of_host(pid) else b""
        yield f"{pid} ({name})", program_of(folder), words, CLONES.sub(b"", mounts)


def program_of(folder: str) -> bytes:
    """The path of a process's program if that is a file below the node's FOLDER. The image of a container can have
    another file of that path."""
    link = link_of(f"{folder}/exe")
    _, below, rest = link.partition(f"{FOLDER}/")
    try:
        same = below and os.path.samestat(os.stat(f"{folder}/exe"), os.stat(on_node(below + rest)))
    except OSError:
        return b""
    return os.fsencode(link) if same else b""


def shown(name: str) -> str:
    """A name for one line of the log, also if a container chose it."""
    return ascii(name)[1:-1]


def tasks() -> Iterator[tuple[str, bytes, bytes]]:
    """(id, runtime, specification) of each task of containerd: also of pause containers and stopped ones. containerd
    has its records in TASKS, or where a shim of it works (k3s and other distributions)."""
    tops = {TASKS}
    for pid in filter(str.isdigit, os.listdir(PROC)):
        if bytes_of(f"{PROC}/{pid}/comm").startswith(b"containerd-shim") and is_of_host(pid):
            tops.add(os.path.dirname(os.path.dirname(link_of(f"{PROC}/{pid}/cwd"))))
    for folder in sorted(one for top in tops for one in glob.glob(on_node(f"{glob.escape(top)}/*/*"))):
        runtime = b"\n".join(bytes_of(f"{folder}/{name}") for name in RUNTIME_FILES)
        yield os.path.basename(folder), runtime, bytes_of(f"{folder}/config.json")


def crio() -> Iterator[tuple[str, bytes]]:
    """(id, specification) of each container and sandbox of CRI-O."""
    for path in (one for top in CRIO for one in glob.glob(on_node(f"{top}/*-containers/*/userdata/config.json"))):
        yield path.split("/")[-3], bytes_of(path)


def handled_sandboxes() -> list[str]:
    """The ids of CRI-O's sandboxes with gpushare's handler."""
    return sorted({name for name, spec in crio() if HANDLER.search(spec)})


def has_hook(spec: bytes) -> bool:
    """Whether a container's specification has a hook of gpushare."""
    try:
        return f"{FOLDER}/" in json.dumps(json.loads(spec).get("hooks"))
    except (ValueError, AttributeError):  # the container has gone meanwhile
        return False


def users() -> list[str]:
    """List everything that uses gpushare on the node. Raises Failed."""
    folder = f"{FOLDER}/".encode()
    found = [f"container {shown(one['name'] or one['id'])} holds a share" for one in gpushare("list")["items"]]
    found += [f"the resource claim of {os.path.basename(path)} is prepared" for path in glob.glob(on_node(CLAIMS))]
    found += [f"container {name} has gpushare's runtime" for name, runtime, _ in tasks() if folder in runtime]
    # conmon calls the runtime of its command line; the DRA driver only names a program, and must stay until the end
    found += [
        f"process {name} runs"
        for name, program, words, _ in processes()
        if folder in program or (name.endswith("(conmon)") and folder in words)
    ]
    found += [f"CRI-O's container {name} has the handler gpushare" for name in handled_sandboxes()]
    return [*found, *(["the NRI plugin runs: delete its DaemonSet"] if is_locked(on_node(PLUGIN_LOCK)) else [])]


def is_locked(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


def become(*words: str) -> None:
    """Replace this process by gpushare on the node. Raises Failed or OSError."""
    if not os.path.lexists(on_node(FOLDER + "/current")):
        raise Failed("gpushare is not on this node yet")
    os.chroot(HOST)
    os.chdir("/")
    os.execve(PROGRAM, ["gpushare", *words], ENVIRONMENT)


def label() -> None:
    try:
        gpushare("refresh")  # updates node.json, which the device plugin reads
    finally:  # a node whose GPUs are gone loses its labels
        done = gpushare("labels")
    if done["action"]:
        print(f"{done['action']} {done['file']}: {done['features']}", flush=True)


def remove() -> list[str]:
    """Remove gpushare, or return what still uses it. As long as a container has gpushare's hook in its specification,
    the programs stay, because the engine calls the hook when the container ends. Raises Failed."""
    if not os.path.lexists(on_node(FOLDER)):
        return []
    if os.path.lexists(on_node(f"{FOLDER}/current")):
        found = users()
        if found:
            return found
        unconfigure()
        found = users()  # a sandbox that the engine started meanwhile needs its runtime to the end
        if found:
            return found
    hooked = {one[0] for found in (tasks(), crio()) for one in found if has_hook(one[-1])}
    if hooked:
        return [f"container {name} has gpushare's hook" for name in sorted(hooked)]
    if os.path.lexists(on_node(f"{FOLDER}/current")):
        os.unlink(on_node(f"{FOLDER}/current"))
    for entry in os.listdir(on_node(FOLDER)):
        if os.path.isdir(on_node(f"{FOLDER}/{entry}")) and not os.path.islink(on_node(f"{FOLDER}/{entry}")):
            discard(on_node(f"{FOLDER}/{entry}"))
    shutil.rmtree(on_node(FOLDER))
    return []


def unconfigure() -> None:
    """Remove gpushare from the engine, with its files. Raises Failed."""
    purge = is_ours(checksum(CONFIG))  # the configuration file is as this program wrote it
    done = gpushare("uninstall", "--yes", *(["--purge"] if purge else []))
    for step in done["steps"]:
        print(step, flush=True)
    restart(done)


def wait_to_remove() -> bool:
    """Remove gpushare as soon as nothing uses it. Return whether that was done before the pod ended."""
    said: list[str] = []
    while True:
        try:
            left = remove()
        except Failed as error:
            left = [str(error)]
        if not left:
            print("gpushare is removed from this node", flush=True)
            return True
        if left != said:
            more = f", and {len(left) - 3} more" if len(left) > 3 else ""
            print(f"waiting until nothing uses gpushare: {', '.join(left[:3])}{more}", flush=True)
        said = left
        info = signal.sigtimedwait(ENDS | {signal.SIGHUP}, PROFILE_S)
        if info is not None and info.si_signo in ENDS:
            return False


def contents(path: str) -> bytes:
    """The contents of a file of the node, or of the file that a link names; nothing if there is no file."""
    try:
        with open(on_node(f"{path}/."), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def read(path: str) -> str:
    return contents(path).decode()


def serve(profile: Profile, pending: bool) -> None:
    """Follow the label, the profiles and the devices until the pod ends. `pending`: require the NRI plugin once it
    runs."""
    followed = updated = time.monotonic()
    next_try, delay = 0.0, PROFILE_S
    while True:
        info = signal.sigtimedwait(ENDS | {signal.SIGHUP}, STEP_S if pending else PROFILE_S)
        if info is not None and info.si_signo in ENDS:
            return
        now = time.monotonic()
        engine = plugin_runs() if pending and (info is not None or now >= next_try) else ""
        if engine:
            pending = not try_to_require_nri(engine, delay)
            next_try, delay = now + delay, min(2 * delay, RETRY_S)
        if info is None and now < followed + PROFILE_S:
            continue
        followed = now
        if profile.follow(again=info is not None) or info is not None or now >= updated + UPDATE_S:
            label()
            tidy()
            updated = now


def be_alone() -> bool:
    """Wait until no other installer runs on the node. Return whether that was before the pod ended."""
    os.makedirs(os.path.dirname(on_node(LOCK)), exist_ok=True)
    file = os.open(on_node(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # held until this process ends
    waits = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not waits:
                print("waiting until the other pod that installs or removes gpushare here ends", flush=True)
            waits = True
        info = signal.sigtimedwait(ENDS, STEP_S)
        if info is not None:
            return False


def set_ready(ready: bool) -> None:
    if ready:
        open(READY, "wb").close()
    elif os.path.lexists(READY):
        os.unlink(READY)


def install_until_done(profile: Profile) -> bool:
    """Install. An engine that does not start with gpushare's entries is not restarted again and again: the pod stays
    unready, which stops the rollout, until it is replaced or gets SIGHUP. Return False if it ended. Raises Failed."""
    while True:
        try:
            install(profile)
            return True
        except RestartFailed as error:
            print(f"gpushare: {error}", file=sys.stderr, flush=True)
            if signal.sigwait(ENDS | {signal.SIGHUP}) in ENDS:
                return False


def main(verb: str = "", *words: str) -> int:
    if verb not in ("install", "remove", "run", "ready") or (verb != "run" and words):
        print("usage: install.py install|remove|run WORDS...|ready", file=sys.stderr)
        return 2
    if verb == "ready":
        return 0 if os.path.lexists(READY) else 1
    if verb == "run":
        try:
            become(*words)
        except (Failed, OSError) as error:
            print(f"gpushare: {error}", file=sys.stderr)
        return 1
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS | {signal.SIGHUP})  # a signal must not interrupt a change
    try:
        check_folder()
        set_ready(False)
        required = verb == "install" and requires_nri()
        if verb == "install":
            check_engine()
        if not be_alone():
            return 0
        if verb == "install":
            check_cdi()
        if verb == "remove":
            if wait_to_remove():
                set_ready(True)
                signal.sigwait(ENDS)  # if the program ended, Kubernetes would start it again
            return 0
        profile = Profile()
        if not install_until_done(profile):
            return 0
        lift_nri(keep=required)
        set_ready(True)
        print("ready", flush=True)
        serve(profile, required)
        lift_nri()  # the engine would refuse containers if the plugin were removed with this pod
    except (Failed, OSError) as error:
        print(f"gpushare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
