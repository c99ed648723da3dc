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
                                  2.2 and newer refuse containers while it does not run
    GPUSHARE_PROFILE=cluster      the profile of gpushare's configuration file
    GPUSHARE_RESTART=always       restart or reload the engine when its configuration has changed; never: print the
                                  command instead

The node's programs run in the node's root, so that they use only the node's files.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

BUNDLE, HOST = "/gpushare", "/host"
FOLDER = "/opt/gpushare"  # on the node: a directory for each version of the bundle, and the link `current`
CONFIG = "/etc/gpushare/config.yaml"
WRITTEN = FOLDER + "/config.sha256"  # checksum of the configuration file that this program wrote
STEP_S = 2  # time between two checks for the NRI plugin
UPDATE_STEPS = 150  # checks between two updates of the features, since devices may change
PLUGIN_LOCK = "/run/gpushare/nri"  # the NRI plugin holds it while it runs
PROGRAM = FOLDER + "/current/bin/gpushare"
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "SYSTEMD_IGNORE_CHROOT": "1"}
ENDS = {signal.SIGTERM, signal.SIGINT}


class Failed(Exception):
    """One line for the pod's log."""


def on_node(path: str) -> str:
    return HOST + path


def run(*words: str) -> str:
    """Run a program of the node in the node's root and return its output. Raises Failed."""

    def enter() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        os.chroot(HOST)
        os.chdir("/")

    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, preexec_fn=enter, env=ENVIRONMENT, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Failed(f"{words[0]}: {error}") from None
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


def checksum(path: str) -> str:
    try:
        with open(on_node(path), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except FileNotFoundError:
        return ""


def restart(done: dict) -> None:
    """Run the commands that make engines reload a changed configuration: `next` in the JSON of a gpushare command."""
    commands = done.get("next") or []
    for command in [commands] if isinstance(commands, str) else commands:
        if os.environ.get("GPUSHARE_RESTART", "always") == "never":
            print(f"on the node, run: {command}", flush=True)
        else:
            print(f"running: {command}", flush=True)
            run(*shlex.split(command))


def requires_nri() -> bool:
    """Read GPUSHARE_REQUIRE_NRI. Raises Failed."""
    asked = os.environ.get("GPUSHARE_REQUIRE_NRI", "no")
    if asked not in ("yes", "no"):
        raise Failed(f"GPUSHARE_REQUIRE_NRI={shlex.quote(asked)} is neither yes nor no")
    if asked == "yes" and os.environ.get("GPUSHARE_ENGINE") != "none":
        raise Failed("GPUSHARE_REQUIRE_NRI=yes needs GPUSHARE_ENGINE=none, which leaves shares to the NRI plugin")
    return asked == "yes"


def plugin_runs() -> bool:
    try:
        with open(on_node(PLUGIN_LOCK), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def require_nri(*words: str) -> None:
    """Make the engine refuse containers while the NRI plugin does not run, or with --undo stop that. Not before the
    plugin has run: if its image cannot be pulled, the node must still start other containers."""
    done = gpushare("runtime", "configure", "containerd", *(words or ["--require-nri"]))
    for line in [*(f"{change['action']} {change['path']}" for change in done["changes"]), *done["notes"]]:
        print(line, flush=True)
    restart(done)


def install() -> None:
    name = copy()
    engine = os.environ.get("GPUSHARE_ENGINE", "containerd")
    words = ["runtime", "configure", *([] if engine == "none" else [engine])]
    before = checksum(CONFIG)
    if not before or before == read(WRITTEN):  # keep a file that the administrator wrote or edited
        words += ["--profile", os.environ.get("GPUSHARE_PROFILE", "cluster"), "--force"]
    done = gpushare(*words) if len(words) > 2 else {"changes": []}
    if "--profile" in words:
        with open(on_node(WRITTEN), "w") as file:
            file.write(checksum(CONFIG))
    for change in done["changes"]:
        print(f"{change['action']} {change['path']}", flush=True)
    restart(done)
    label()
    if not gpushare("list")["items"]:  # no container needs an older version
        for entry in os.listdir(on_node(FOLDER)):
            if entry not in (name, "current", os.path.basename(WRITTEN)):
                shutil.rmtree(on_node(f"{FOLDER}/{entry}"))


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
    if not os.path.lexists(on_node(f"{FOLDER}/current")):
        return
    force = force and bool(gpushare("list")["items"])
    config = checksum(CONFIG)
    purge = bool(config) and config == read(WRITTEN)  # the configuration file is as this program wrote it
    done = gpushare("uninstall", "--yes", *(["--force"] if force else []), *(["--purge"] if purge else []))
    for step in done["steps"]:
        print(step, flush=True)
    restart(done)
    if force:  # containers still have mounts from FOLDER, and the engine calls the hooks in it when they end
        print(f"gpushare is no longer used on this node; remove {FOLDER} when its containers have ended", flush=True)
        return
    shutil.rmtree(on_node(FOLDER))
    print("gpushare is removed from this node", flush=True)


def read(path: str) -> str:
    try:
        with open(on_node(path)) as file:
            return file.read()
    except FileNotFoundError:
        return ""


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
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # a signal must not interrupt a change
    try:
        if verb == "remove":
            remove(force=True)
            signal.sigwait(ENDS)  # if the program ended, Kubernetes would start it again
            return 0
        required = requires_nri()
        install()
        print("ready", flush=True)
        pending = required
        for step in itertools.count(1):
            if signal.sigtimedwait(ENDS, STEP_S) is not None:
                break
            if pending and plugin_runs():
                require_nri()
                pending = False
            if step % UPDATE_STEPS == 0:
                label()
        if required:
            require_nri("--undo")  # even if containers have a share: the plugin may be removed with this pod
        remove(force=False)
    except (Failed, OSError) as error:
        print(f"gpushare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
