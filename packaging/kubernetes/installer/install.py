"""Puts gpushare on a node of a cluster and takes it away again: what the image runs, in the Python of the bundle.

usage: install.py install | remove | run WORDS...       the node's root is at /host

    install    copy the bundle to /opt/gpushare on the node, tell the engine of it, write the node's features for
               node-feature-discovery (labels and the memory to share), and keep them right until the pod ends. Then
               undo all that, unless containers have a share: an upgrade finds them as they are.
    remove     undo it now, also while containers have a share; they go on running.
    run        `gpushare WORDS...` in the node's root, in place of this program.

GPUSHARE_ENGINE (containerd), GPUSHARE_PROFILE (cluster) and GPUSHARE_RESTART (always: the engine is made to read its
configuration when that has changed; never) are read from the environment. Programs of the node run in its root, with
its own files and no others.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

BUNDLE, HOST = "/gpushare", "/host"
FOLDER = "/opt/gpushare"  # on the node: a directory for each content, and `current`
CONFIG = "/etc/gpushare/config.yaml"
WRITTEN = FOLDER + "/config.sha256"  # of the configuration that we wrote, to know it again
AGAIN_S = 300  # how often features are written anew: devices may have changed
PROGRAM = FOLDER + "/current/bin/gpushare"
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "SYSTEMD_IGNORE_CHROOT": "1"}
ENDS = {signal.SIGTERM, signal.SIGINT}


class Failed(Exception):
    """One line for the pod's log."""


def on_node(path: str) -> str:
    return HOST + path


def run(*words: str) -> str:
    """Output of a program of the node. Raises Failed."""

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
        raise Failed(f"`{shlex.join(words)}` ended with {done.returncode}; what it said is above")
    return done.stdout.decode()


def gpushare(*words: str) -> dict:
    """What a command of ours on the node did, as JSON."""
    value = json.loads(run(PROGRAM, *words, "--format", "json"))
    return value if isinstance(value, dict) else {"items": value}


def digest(top: str) -> str:
    """Of all names and contents below."""
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
    """Name of the directory with this bundle. It is complete when it has that name, and never changed: containers that
    run have mounts from it, and their engine calls its programs when they end."""
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
    """What the command says that an engine needs, after a change."""
    following = done.get("next") or []
    for command in [following] if isinstance(following, str) else following:
        if os.environ.get("GPUSHARE_RESTART", "always") == "never":
            print(f"on the node, run: {command}", flush=True)
        else:
            print(f"running: {command}", flush=True)
            run(*shlex.split(command))


def install() -> None:
    name = copy()
    words = ["runtime", "configure", os.environ.get("GPUSHARE_ENGINE", "containerd")]
    before = checksum(CONFIG)
    if not before or before == read(WRITTEN):  # somebody's own stays
        words += ["--profile", os.environ.get("GPUSHARE_PROFILE", "cluster"), "--force"]
    done = gpushare(*words)
    if "--profile" in words:
        with open(on_node(WRITTEN), "w") as file:
            file.write(checksum(CONFIG))
    for change in done["changes"]:
        print(f"{change['action']} {change['path']}", flush=True)
    restart(done)
    label()
    if not gpushare("list")["items"]:  # nobody needs what was there before
        for entry in os.listdir(on_node(FOLDER)):
            if entry not in (name, "current", os.path.basename(WRITTEN)):
                shutil.rmtree(on_node(f"{FOLDER}/{entry}"))


def become(*words: str) -> None:
    """That program of the node. Raises OSError."""
    if not os.path.lexists(on_node(FOLDER + "/current")):
        raise Failed("gpushare is not on this node yet")
    os.chroot(HOST)
    os.chdir("/")
    os.execve(PROGRAM, ["gpushare", *words], ENVIRONMENT)


def label() -> None:
    gpushare("refresh")  # what the device plugin reads
    done = gpushare("labels")
    if done["action"]:
        print(f"{done['action']} {done['file']}: {done['features']}", flush=True)


def remove(force: bool) -> None:
    if not os.path.lexists(on_node(f"{FOLDER}/current")):
        return
    force = force and bool(gpushare("list")["items"])
    ours = [name for name in (checksum(CONFIG),) if name and name == read(WRITTEN)]
    done = gpushare("uninstall", "--yes", *(["--force"] if force else []), *(["--purge"] if ours else []))
    for step in done["steps"]:
        print(step, flush=True)
    restart(done)
    if force:  # containers still have its mounts, and their engine calls its hooks
        print(f"gpushare is no longer used on this node; {FOLDER} can go when its containers have ended", flush=True)
        return
    shutil.rmtree(on_node(FOLDER))
    print("gpushare is gone from this node", flush=True)


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
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # a change is never left half done
    try:
        if verb == "remove":
            remove(force=True)
            signal.sigwait(ENDS)  # or it would be started again
            return 0
        install()
        print("ready", flush=True)
        while signal.sigtimedwait(ENDS, AGAIN_S) is None:
            label()
        remove(force=False)
    except (Failed, OSError) as error:
        print(f"gpushare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
