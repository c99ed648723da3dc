"""The control plane: etcd, API server, controller manager and scheduler, with certificates and tokens of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.rootfs import run
from tools.cluster import ADDRESS, NAME, SERVICE, Trouble
from tools.cluster.node import wait_for

# name -> (user, groups); the token is the name
USERS = {
    "admin": ("admin", "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
    "kube-scheduler": ("system:kube-scheduler", ""),
    "kubelet": (f"system:node:{NAME}", "system:nodes"),
}
NAMES = f"DNS:kubernetes,DNS:kubernetes.default.svc,DNS:localhost,IP:127.0.0.1,IP:{ADDRESS},IP:{SERVICE}"


class Outcome(NamedTuple):
    """The result of a command of kubectl."""

    code: int
    out: str
    err: str


class Plane:
    """`folder`: certificates and etcd's data; `logs`: of the programs."""

    def __init__(self, folder: Path, logs: Path, kube: Path, etcd: Path) -> None:
        self.folder, self.logs, self.kube, self.etcd = folder, logs, kube, etcd
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def file(self, name: str) -> str:
        return str(self.folder / name)

    def write_secrets(self) -> None:
        """Write certificates, the key of service accounts, and one kubeconfig for each user."""
        self.folder.mkdir(parents=True)
        openssl = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30")
        own = ("-subj", "/CN=cluster", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
        run(*openssl, *own, "-keyout", self.file("ca.key"), "-out", self.file("ca.crt"))
        ours = ("-CA", self.file("ca.crt"), "-CAkey", self.file("ca.key"), "-addext", f"subjectAltName={NAMES}")
        for name, subject in (("server", "/CN=kube-apiserver"), ("client", "/O=system:masters/CN=kube-apiserver")):
            files = ("-keyout", self.file(f"{name}.key"), "-out", self.file(f"{name}.crt"))
            run(*openssl, *ours, "-subj", subject, "-addext", "basicConstraints=critical,CA:false", *files)
        run("openssl", "genrsa", "-out", self.file("accounts.key"), "2048")
        run("openssl", "rsa", "-in", self.file("accounts.key"), "-pubout", "-out", self.file("accounts.pub"))
        rows = [f'{name},{user},{name},"{groups}"' for name, (user, groups) in USERS.items()]
        (self.folder / "tokens.csv").write_text("\n".join(rows) + "\n")
        for name in USERS:
            (self.folder / f"{name}.conf").write_text(self.kubeconfig(name))

    def kubeconfig(self, user: str, token: str = "") -> str:
        """The kubeconfig of a user, or of the owner of a token. It holds all that it needs."""
        server = {"server": f"https://{ADDRESS}:443", "certificate-authority-data": self._base64("ca.crt")}
        context = {"cluster": "c", "user": "u"}
        value = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": server}],
            "users": [{"name": "u", "user": {"token": token or user}}],
            "contexts": [{"name": "x", "context": context}],
            "current-context": "x",
        }
        return json.dumps(value)

    def _base64(self, name: str) -> str:
        return run("base64", "-w0", self.file(name))

    def start(self) -> None:
        """Start everything and wait until the API server is ready."""
        self._start(
            "etcd",
            self.etcd,
            f"--data-dir={self.file('etcd')}",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
        )
        self._start(
            "kube-apiserver",
            self.kube / "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            "--secure-port=443",
            f"--advertise-address={ADDRESS}",
            f"--tls-cert-file={self.file('server.crt')}",
            f"--tls-private-key-file={self.file('server.key')}",
            f"--client-ca-file={self.file('ca.crt')}",
            f"--token-auth-file={self.file('tokens.csv')}",
            f"--kubelet-client-certificate={self.file('client.crt')}",
            f"--kubelet-client-key={self.file('client.key')}",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.file('accounts.pub')}",
            f"--service-account-signing-key-file={self.file('accounts.key')}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
        )
        wait_for("the API server", self._ready, 120)
        self._start(
            "kube-controller-manager",
            self.kube / "kube-controller-manager",
            f"--kubeconfig={self.file('kube-controller-manager.conf')}",
            f"--service-account-private-key-file={self.file('accounts.key')}",
            f"--root-ca-file={self.file('ca.crt')}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
        )
        self._start(
            "kube-scheduler",
            self.kube / "kube-scheduler",
            f"--kubeconfig={self.file('kube-scheduler.conf')}",
            "--leader-elect=false",
        )
        wait_for("the account of new pods", lambda: self.kubectl("get", "serviceaccount", "default").code == 0)

    def _start(self, name: str, program: Path, *words: str) -> None:
        with open(self.logs / f"{name}.log", "ab") as log:
            self._running[name] = subprocess.Popen(
                [str(program), *words], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _ready(self) -> bool:
        for name, process in self._running.items():
            if process.poll() is not None:
                raise Trouble(f"{name} ended with {process.returncode}; {self.logs}/{name}.log")
        return self.kubectl("get", "--raw", "/readyz").code == 0

    def kubectl(self, *words: str, stdin: str = "", user: str = "admin", timeout_s: float = 90) -> Outcome:
        done = subprocess.run(
            [str(self.kube / "kubectl"), f"--kubeconfig={self.file(user)}.conf", *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
        )
        return Outcome(done.returncode, done.stdout, done.stderr.strip())

    def do(self, *words: str, stdin: str = "", user: str = "admin", timeout_s: float = 90) -> str:
        """Run a command of kubectl that must succeed; return what it printed."""
        done = self.kubectl(*words, stdin=stdin, user=user, timeout_s=timeout_s)
        if done.code:
            raise Trouble(f"kubectl {' '.join(words)}: {done.err}")
        return done.out

    def get(self, *words: str) -> Any:
        """An object, or a list of objects; None if there is no such object."""
        done = self.kubectl("get", *words, "--output=json", "--ignore-not-found")
        if done.code:
            raise Trouble(f"kubectl get {' '.join(words)}: {done.err}")
        value = json.loads(done.out or "null")
        return value["items"] if value and value["kind"] == "List" else value

    def stop(self) -> None:
        for process in reversed(self._running.values()):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(30)
        self._running.clear()
