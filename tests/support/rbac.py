"""The rights of the pods in rendered manifests at the API server.

    built(folder)                   -> the objects that `kubectl apply -k` sends
    with_component(name, folder)    -> the same of a copy whose kustomization has this component
    access(objects)                 -> {name of a DaemonSet: Access}; fails if an account or a role is not in order
    pod_command(api, command)       -> the command as in a pod whose token is mounted; `environment(api)` belongs to it

A pod has its account's token unless the pod forbids that, so a pod that needs no right must forbid it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from . import helm
from .apiserver import NODE, ApiServer, Call, rights_of
from .host import TREE

KUBERNETES = TREE / "packaging" / "kubernetes"
ROLES = ("Role", "ClusterRole")
# Objects that would call a program, or give it calls, beside the objects in view
UNEXPECTED = {"MutatingWebhookConfiguration", "ValidatingWebhookConfiguration", "APIService"}
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class Access(NamedTuple):
    token: bool
    rights: frozenset[Call]


def built(folder: Path) -> list[Any]:
    command = [str(helm.program("kubectl")), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def with_component(name: str, folder: Path) -> list[Any]:
    """`name`: of a folder beside the top of packaging/kubernetes."""
    with tempfile.TemporaryDirectory() as work:
        tree = Path(shutil.copytree(KUBERNETES, Path(work) / "kubernetes"))
        path = tree / folder.relative_to(KUBERNETES) / "kustomization.yaml"
        component = os.path.relpath(tree / name, path.parent)
        path.write_text(path.read_text() + f"components: {json.dumps([component])}\n")
        return built(path.parent)


def access(objects: Iterable[Any]) -> dict[str, Access]:
    kinds: dict[str, list[Any]] = {}
    for one in objects:
        kinds.setdefault(one["kind"], []).append(one)
    assert not UNEXPECTED & kinds.keys()
    roles = {(one["kind"], one["metadata"]["name"]): one["rules"] for kind in ROLES for one in kinds.get(kind, [])}
    accounts = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in kinds.get("ServiceAccount", [])}
    rights: dict[tuple[str, str], set[Call]] = {account: set() for account in accounts}
    bound = set()
    for binding in (*kinds.get("RoleBinding", []), *kinds.get("ClusterRoleBinding", [])):
        (subject,), role = binding["subjects"], (binding["roleRef"]["kind"], binding["roleRef"]["name"])
        assert subject["kind"] == "ServiceAccount"
        rights[subject["namespace"], subject["name"]] |= rights_of(roles[role])
        bound.add(role)
    assert bound == roles.keys(), "a role that no account has"
    assert not any("*" in word for given in rights.values() for right in given for word in right)
    used, found = set(), {}
    for workload in kinds.get("DaemonSet", []):
        pod = workload["spec"]["template"]["spec"]
        assert "serviceAccountToken" not in json.dumps(pod["volumes"]), "a token beside that of the account"
        account = (workload["metadata"]["namespace"], pod.get("serviceAccountName", "default"))
        token = pod.get("automountServiceAccountToken", True)
        used |= {account} & accounts
        assert token or account[1] == "default", "an account without its token"
        found[workload["metadata"]["name"]] = Access(token, frozenset(rights.get(account, ())))
    assert used == accounts, "an account that no pod has"
    assert not {"Deployment", "StatefulSet", "Job", "CronJob", "Pod", "ReplicaSet"} & kinds.keys()
    return found


def environment(api: ApiServer) -> dict[str, str]:
    """Variables that kubelet sets in each container."""
    return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.port), "NODE_NAME": NODE}


def pod_command(api: ApiServer, command: Sequence[object]) -> list[str]:
    """A mount namespace of its own with the token in the usual place, also for a program that must not use it."""
    script = f"mount -t tmpfs tmpfs /run && mkdir -p {_ACCOUNT} && cp {shlex.quote(str(api.account))}/* {_ACCOUNT}"
    return ["unshare", "--mount", "sh", "-ec", f'{script}; exec "$@"', "sh", *map(str, command)]
