"""Install gpushare on a node of a cluster, and remove it again. The image runs this with the Python of the bundle.

usage: install.py install | remove | run WORDS...       the node's root is mounted at /host

    install    copy the bundle to /opt/gpushare on the node, configure the engine, and write the node's features for
               node-feature-discovery (labels and the memory to share). Update the features until the pod ends. Then
               remove gpushare again, unless containers have a share: they must survive an upgrade of the pod.
    remove     remove gpushare now, even if containers have a share; they keep running.
    run        replace this program by `gpushare WORDS...` in the node's root.

Variables, with their defaults:

    GPUSHARE_ENGINE=containerd    the engine to configure; none: leave the engine alone, for the NRI plugin
    GPUSHARE_REQUIRE_NRI=no       yes, with GPUSHARE_ENGINE=none: when the NRI plugin runs on the node, make containerd
                                  2.2 and newer, or CRI-O 1.34 and newer, refuse containers while it does not run
    GPUSHARE_PROFILE=cluster      the profile of gpushare's configuration file
    GPUSHARE_RESTART=always       restart or reload the engine if it has not read its configuration yet; never: print
                                  the command instead
    GPUSHARE_NODE=                the name of the node: if it is set, the node's label gpushare.io/profile chooses a
                                  file of /profiles, which becomes the node's configuration; SIGHUP reads both at once

The node's programs run in the node's root, so that they use only the node's files.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import http.client
import json
import os
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import time

BUNDLE, HOST = "/gpushare", "/host"
FOLDER = "/opt/gpushare"  # on the node: a directory for each version of the bundle, and the link `current`
CONFIG = "/etc/gpushare/config.yaml"
WRITTEN = FOLDER + "/config.sha256"  # checksum of the configuration file that this program wrote
APPLIED = FOLDER + "/profile"  # name of the profile in that file, if a label chose it
LABEL = "gpushare.io/profile"
PROFILES = "/profiles"  # the ConfigMap in the pod: NAME.yaml for each profile
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"  # a Node without its large status
CLAIMS = "/run/cdi/gpushare.io-claim_*.json"  # prepared by the DRA driver
UPDATE_S = 300  # time between two updates of the features, since devices may change
PROFILE_S = 60  # time between two reads of the label and of the profiles
STEP_S = 2  # time between two checks for the NRI plugin, until it has run
RETRY_S = 3600  # longest time between two attempts to require it; each restarts the engine
DROP_INS = {"containerd": "/etc/containerd/conf.d/gpushare.toml", "crio": "/etc/crio/crio.conf.d/99-gpushare.conf"}
OPTIONAL = b"gpushare-nri-optional"  # is in the drop-in if it requires the NRI plugin
UNREAD = "/run/gpushare-unread."  # and the engine: perhaps it has not been restarted since gpushare left its files
PLUGIN_LOCK = "/run/gpushare/nri"  # the NRI plugin holds it while it runs
PROGRAM = FOLDER + "/current/bin/gpushare"
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "SYSTEMD_IGNORE_CHROOT": "1"}
ENDS = {signal.SIGTERM, signal.SIGINT}


class Failed(Exception):
    """One line for the pod's log."""


def on_node(path: str) -> str:
    return HOST + path


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
    """The checksum of all file names and contents below `top`."""
    found = hashlib.sha256()
    for folder, folders, files in os.walk(top):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(folder, name)
            found.update(os.path.relpath(path, top).encode() + b"\0")
            if not os.path.islink(path):
                with open(path, "rb") as file:
                    found.update(hashlib.sha256(file.read()).digest())
    return found.hexdigest()


def copy() -> str:
    """Copy the bundle to the node and return the name of its directory. A directory gets its name when it is complete,
    and never changes afterwards: running containers have mounts from it, and when they end the engine calls its
    programs."""
    name = digest(BUNDLE)[:16]
    os.makedirs(on_node(FOLDER), exist_ok=True)
    target = on_node(f"{FOLDER}/{name}")
    if not os.path.isdir(target):
        new = on_node(f"{FOLDER}/new")
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(BUNDLE, new, symlinks=True)
        os.rename(new, target)
        print(f"copied to {FOLDER}/{name}", flush=True)
    link = on_node(f"{FOLDER}/current.new")
    if os.path.lexists(link):
        os.unlink(link)
    os.symlink(name, link)
    os.rename(link, on_node(f"{FOLDER}/current"))
    return name


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
            run(*shlex.split(command))


def is_ours(config: str) -> bool:
    """Whether this program wrote the configuration file, which has this checksum."""
    return config in read(WRITTEN).split()


def write(path: str, data: bytes) -> None:
    """Write a file of the node whole or not at all."""
    os.makedirs(os.path.dirname(on_node(path)), exist_ok=True)
    with open(on_node(path + ".new"), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(on_node(path + ".new"), on_node(path))


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
            found = json.loads(answer.read())
        finally:
            connection.close()
        if answer.status != 200:
            raise Failed(f"API server: GET {path}: {answer.status} {json.dumps(found.get('message', ''))}")
        return str(found["metadata"].get("labels", {}).get(LABEL, ""))
    except (OSError, http.client.HTTPException, ValueError, KeyError, AttributeError) as error:
        raise Failed(f"API server: GET {path}: {error}") from None


def requires_nri() -> bool:
    """Read GPUSHARE_REQUIRE_NRI. Raises Failed."""
    asked = os.environ.get("GPUSHARE_REQUIRE_NRI", "no")
    if asked not in ("yes", "no"):
        raise Failed(f"GPUSHARE_REQUIRE_NRI={shlex.quote(asked)} is neither yes nor no")
    if asked == "yes" and os.environ.get("GPUSHARE_ENGINE") != "none":
        raise Failed("GPUSHARE_REQUIRE_NRI=yes needs GPUSHARE_ENGINE=none, which leaves shares to the NRI plugin")
    return asked == "yes"


def plugin_runs() -> str:
    """The engine that has accepted the running plugin; "" if there is none."""
    words: list = []
    try:
        with open(on_node(PLUGIN_LOCK), encoding="utf-8", errors="replace") as file:
            words = file.read().split()
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except FileNotFoundError:
        return ""
    except BlockingIOError:  # the plugin holds the lock
        return {"cri-o": "crio", "containerd": "containerd"}.get(words[1], "") if len(words) == 2 else ""


def require_nri(engine: str, word: str = "--require-nri") -> None:
    """Make the engine refuse containers while the NRI plugin does not run, or with --undo stop that. Not before the
    plugin has run: if its image cannot be pulled, the node must still start other containers."""
    done = gpushare("runtime", "configure", engine, word)
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
    requirement and the engine's restart. `keep`: a requirement that was not removed."""
    for engine, path in DROP_INS.items():
        required = OPTIONAL in contents(path)
        left = os.environ.get("GPUSHARE_ENGINE") == "none" and os.path.lexists(on_node(UNREAD + engine))
        if (required and not keep) or (left and not required):
            require_nri(engine, "--undo")


def install(profile: Profile) -> None:
    name = copy()
    profile.follow()
    engine = os.environ.get("GPUSHARE_ENGINE", "containerd")
    words = ["runtime", "configure", *([] if engine == "none" else [engine])]
    before = checksum(CONFIG)
    # Keep a profile, and a file that the administrator wrote or edited.
    if not before or (is_ours(before) and not read(APPLIED)):
        words += ["--profile", os.environ.get("GPUSHARE_PROFILE", "cluster"), "--force"]
    done = gpushare(*words) if len(words) > 2 else {"changes": []}
    if "--profile" in words:
        write(WRITTEN, checksum(CONFIG).encode())
        write(APPLIED, b"")
    for change in done["changes"]:
        print(f"{change['action']} {change['path']}", flush=True)
    restart(done)
    label()
    if not gpushare("list")["items"]:  # no container needs an older version
        for entry in os.listdir(on_node(FOLDER)):
            if entry not in (name, "current") and os.path.isdir(on_node(f"{FOLDER}/{entry}")):
                discard(on_node(f"{FOLDER}/{entry}"))


def become(*words: str) -> None:
    """Replace this process by gpushare on the node. Raises Failed or OSError."""
    if not os.path.lexists(on_node(FOLDER + "/current")):
        raise Failed("gpushare is not on this node yet")
    os.chroot(HOST)
    os.chdir("/")
    os.execve(PROGRAM, ["gpushare", *words], ENVIRONMENT)


def label() -> None:
    gpushare("refresh")  # updates node.json, which the device plugin reads
    done = gpushare("labels")
    if done["action"]:
        print(f"{done['action']} {done['file']}: {done['features']}", flush=True)


def remove(force: bool) -> None:
    if not os.path.lexists(on_node(FOLDER)):
        return
    if os.path.lexists(on_node(f"{FOLDER}/current")):
        if not unconfigure(force):
            return
        os.unlink(on_node(f"{FOLDER}/current"))
    for entry in os.listdir(on_node(FOLDER)):
        if os.path.isdir(on_node(f"{FOLDER}/{entry}")) and not os.path.islink(on_node(f"{FOLDER}/{entry}")):
            discard(on_node(f"{FOLDER}/{entry}"))
    shutil.rmtree(on_node(FOLDER))
    print("gpushare is removed from this node", flush=True)


def unconfigure(force: bool) -> bool:
    """Remove gpushare from the engine, with its files. Return whether nothing uses its programs any more."""
    force = force and bool(gpushare("list")["items"] or glob.glob(on_node(CLAIMS)))
    config = checksum(CONFIG)
    purge = is_ours(config)  # the configuration file is as this program wrote it
    done = gpushare("uninstall", "--yes", *(["--force"] if force else []), *(["--purge"] if purge else []))
    for step in done["steps"]:
        print(step, flush=True)
    restart(done)
    if force:  # containers still have mounts from FOLDER, and the engine calls the hooks in it when they end
        print(f"gpushare is no longer used on this node; remove {FOLDER} when its containers have ended", flush=True)
    return not force


def contents(path: str) -> bytes:
    """The contents of a file of the node; nothing if there is no file."""
    try:
        with open(on_node(path), "rb") as file:
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
            updated = now


def main(verb: str = "", *words: str) -> int:
    if verb not in ("install", "remove", "run") or (verb != "run" and words):
        print("usage: install.py install|remove|run WORDS...", file=sys.stderr)
        return 2
    if verb == "run":
        try:
            become(*words)
        except (Failed, OSError) as error:
            print(f"gpushare: {error}", file=sys.stderr)
        return 1
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS | {signal.SIGHUP})  # a signal must not interrupt a change
    try:
        if verb == "remove":
            remove(force=True)
            signal.sigwait(ENDS)  # if the program ended, Kubernetes would start it again
            return 0
        required = requires_nri()
        profile = Profile()
        install(profile)
        lift_nri(keep=required)
        print("ready", flush=True)
        serve(profile, required)
        lift_nri()  # even if containers have a share: the plugin may be removed with this pod
        remove(force=False)
    except (Failed, OSError) as error:
        print(f"gpushare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
