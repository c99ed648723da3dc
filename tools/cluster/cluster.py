"""The cluster as the checks use it: manifests of packaging/kubernetes, pods, their states and events."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.support import helm
from tests.support.host import TREE
from tools.cluster import NAME, SIMULATED, Trouble
from tools.cluster.images import CUDA, KUBERNETES
from tools.cluster.node import Node, wait_for
from tools.cluster.plane import Plane

SYSTEM = "gpushare"  # the namespace of gpushare's own pods
# Custom resources of other projects in our manifests: (group, version, plural, kind). Any content is accepted
CUSTOM = (
    ("nfd.k8s-sigs.io", "v1alpha1", "nodefeaturerules", "NodeFeatureRule"),
    ("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor"),
    ("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor"),
    ("monitoring.coreos.com", "v1", "prometheusrules", "PrometheusRule"),
)
FEATURES = "/etc/kubernetes/node-feature-discovery/features.d/gpushare"
GPU_LABEL = "feature.node.kubernetes.io/pci-10de.present"
POD_S = 90
CONFIG = "/etc/gpushare/config.yaml"


class Cluster:
    def __init__(self, plane: Plane, node: Node) -> None:
        self.plane, self.node = plane, node
        self._config = ""  # the node's configuration before `use_driver_root`

    def ready(self) -> bool:
        node = self.plane.get("node", NAME)
        conditions = node["status"]["conditions"] if node else []
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def define_custom(self) -> None:
        for group, version, plural, kind in CUSTOM:
            schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
            served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
            names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
            one = {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural}.{group}"},
                "spec": {
                    "group": group,
                    "scope": "Cluster" if kind == "NodeFeatureRule" else "Namespaced",
                    "names": names,
                    "versions": [served],
                },
            }
            self.plane.do("apply", "--server-side", "-f", "-", stdin=json.dumps(one))
            self.plane.do("wait", "--for=condition=Established", f"crd/{plural}.{group}", "--timeout=30s")

    def built(self, *folders: str) -> list[Any]:
        """The objects that kubectl builds from folders of packaging/kubernetes."""
        texts = [self.plane.do("kustomize", str(KUBERNETES / folder)) for folder in folders]
        return [one for text in texts for one in yaml.safe_load_all(text) if one]

    def apply(self, objects: list[Any], *words: str) -> str:
        """Apply objects, for the node's engine."""
        text = yaml.safe_dump_all(with_engine(objects, self.node.engine.name))
        return self.plane.do("apply", "--server-side", "--force-conflicts", *words, "-f", "-", stdin=text)

    def delete(self, objects: list[Any]) -> None:
        """Delete objects, but not gpushare's namespace."""
        kept = [one for one in objects if one["kind"] != "Namespace"]
        words = ("delete", "--ignore-not-found", "--wait", "--timeout=120s", "-f", "-")
        self.plane.do(*words, stdin=yaml.safe_dump_all(kept), timeout_s=150)

    def rollout(self, name: str, seconds: int = 240) -> None:
        """Wait until the DaemonSet's pods are ready; raises Trouble with the last lines of the pod's log."""
        words = ("rollout", "status", f"daemonset/{name}", "-n", SYSTEM, f"--timeout={seconds}s")
        done = self.plane.kubectl(*words, timeout_s=seconds + 30)
        if done.code:
            raise Trouble(f"{name} is not ready: {done.err}; {self.why_waiting(name)}")

    def why_waiting(self, name: str) -> str:
        """States, events and log of the pods of a DaemonSet, in one line."""
        pods = self.plane.get("pods", "-n", SYSTEM, "-l", f"app.kubernetes.io/name={name}") or []
        found = [json.dumps(one["status"].get("containerStatuses", one["status"].get("conditions"))) for one in pods]
        found += [self.events(one["metadata"]["name"], SYSTEM) for one in pods]
        found += [self.plane.kubectl("logs", "--tail=5", "-n", SYSTEM, one["metadata"]["name"]).out for one in pods]
        return " | ".join(found)

    def logs(self, name: str) -> str:
        """The logs of a DaemonSet's pods; nothing while a pod starts."""
        return self.plane.kubectl("logs", "--tail=-1", "-n", SYSTEM, "-l", f"app.kubernetes.io/name={name}").out

    def label_as_nfd(self) -> None:
        """Give the node its labels and its memory from the installer's file, as node-feature-discovery does with the
        component one-sum."""
        text = self.node.run("cat", FEATURES)
        features = re.findall(r"^(# \+no-label\n)?([^#\n]+)=(.*)$", text, re.MULTILINE)
        labels = [f"{name}={value}" for hidden, name, value in features if not hidden]
        self.plane.do("label", "--overwrite", "node", NAME, *labels)
        memory = next(value for _, name, value in features if name == "gpushare.io/memory-mib")
        self.set_memory(memory)

    def set_memory(self, mib: str | None) -> None:
        """Set the node's extended resource; None removes it."""
        patch = {
            "status": {"capacity": {"gpushare.io/memory-mib": mib}, "allocatable": {"gpushare.io/memory-mib": mib}}
        }
        self.plane.do("patch", "node", NAME, "--subresource=status", "--type=merge", "-p", json.dumps(patch))

    def gpushare(self, *words: str) -> Any:
        """JSON of a gpushare command on the node."""
        return json.loads(self.node.run("/opt/gpushare/current/bin/gpushare", *words, "--format", "json"))

    def use_driver_root(self, used: bool = True) -> None:
        """Make the simulated driver one below a driver root of its own, as an administrator would, or undo that. A pod
        has the /proc and /sys of the kernel, which know no simulated device, and runc mounts nothing over them."""
        file = Path(f"/proc/{self.node.pid}/root{CONFIG}")
        if used:
            self._config = self._config or file.read_text()
            config = yaml.safe_load(self._config)
            config["driver"] = {**config.get("driver", {}), "root": SIMULATED}
            file.write_text(yaml.safe_dump(config))
        elif self._config:
            file.write_text(self._config)
            self._config = ""
        self.node.run("/opt/gpushare/current/bin/gpushare", "refresh")

    def shares(self) -> dict[str, str]:
        """Names of the containers with a share on the node, and their ids."""
        return {one["name"]: one["id"] for one in self.gpushare("list")}

    def create(self, pod: Any) -> None:
        self.plane.do("create", "-f", "-", stdin=json.dumps(pod))

    def remove(self, *pods: str) -> None:
        self.plane.do("delete", "pod", "--ignore-not-found", "--wait", "--timeout=60s", "--grace-period=1", *pods)

    def phase(self, name: str) -> str:
        pod = self.plane.get("pod", name)
        return pod["status"].get("phase", "") if pod else ""

    def until(self, name: str, phase: str, seconds: float = POD_S) -> str:
        """Wait until a pod has a phase, and return its log."""
        end = ("Succeeded", "Failed")

        def true() -> bool:
            now = self.phase(name)
            if now != phase and now in end:
                raise Trouble(f"pod {name} is {now}, not {phase}: {self.events(name)} {self.log(name)}")
            return now == phase

        try:
            wait_for(f"pod {name} {phase}", true, seconds)
        except Trouble as error:
            raise Trouble(f"{error}; {self.events(name)}") from None
        return self.log(name)

    def log(self, name: str) -> str:
        done = self.plane.kubectl("logs", name)
        return done.out + done.err

    def events(self, name: str, namespace: str = "default") -> str:
        """Messages of the pod's events, one after the other."""
        field = f"--field-selector=involvedObject.name={name}"
        return " / ".join(one["message"] for one in self.plane.get("events", "-n", namespace, field) or ())

    def restarts(self, name: str) -> int:
        """How often kubelet restarted the pod's containers."""
        pod = self.plane.get("pod", name)
        return sum(one["restartCount"] for one in pod["status"].get("containerStatuses", ()))

    def shows(self, name: str, mib: int) -> None:
        """Wait until nvidia-smi in a running pod shows this size: kubelet may have restarted just now."""
        seen: list[str] = []

        def true() -> bool:
            done = self.plane.kubectl("exec", name, "--", "nvidia-smi")
            seen[:] = [done.out + done.err]
            return f"{mib}MiB" in done.out

        try:
            wait_for(f"{mib} MiB in pod {name}", true, 40)
        except Trouble as error:
            raise Trouble(f"{error}: {seen}; {self.events(name)}") from None

    def engine_pid(self) -> str:
        return self.node.run("systemctl", "show", self.node.engine.name, "--property=MainPID", "--value").strip()

    def shell(self) -> None:
        environment = {"KUBECONFIG": self.plane.file("admin.conf"), "PS1": "cluster# "}
        print(f"kubectl works here; the node: nsenter --target {self.node.pid} --all", flush=True)
        path = f"{self.plane.kube}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        subprocess.run(["bash", "--norc"], env={**environment, "PATH": path, "HOME": self.plane.file("")})


def pod(name: str, *command: str, spec: dict[str, Any] | None = None, **container: Any) -> dict[str, Any]:
    """A pod with one container `main`, which sleeps unless there is a command."""
    main = {"name": "main", "image": CUDA, "command": list(command or ("sleep", "inf")), **container}
    rest = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, **(spec or {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {**rest, "containers": [main]}}


def share(name: str, mib: int, *command: str, **spec: Any) -> dict[str, Any]:
    """A pod with a share through the RuntimeClass."""
    return pod(
        name,
        *command,
        spec={"runtimeClassName": "gpushare", **spec},
        env=[{"name": "GPUSHARE_MEMORY", "value": f"{mib}Mi"}],
        resources={"limits": {"gpushare.io/memory-mib": str(mib)}},
    )


def example(path: str) -> list[Any]:
    """The objects of an example in packaging/kubernetes."""
    return [one for one in yaml.safe_load_all((KUBERNETES / path).read_text()) if one]


def with_engine(objects: list[Any], name: str) -> list[Any]:
    """The same objects for an installer that configures this engine in place of containerd."""
    changed = copy.deepcopy(objects)
    for one in changed:
        for container in one["spec"]["template"]["spec"]["containers"] if one["kind"] == "DaemonSet" else ():
            for variable in container.get("env", ()):
                if (variable["name"], variable.get("value")) == ("GPUSHARE_ENGINE", "containerd"):
                    variable["value"] = name
    return changed


def with_image(objects: list[Any], tag: str) -> list[Any]:
    """The same objects with another tag of gpushare's images. Pods that read the state of the devices get the driver
    root of `Cluster.use_driver_root`."""
    changed = copy.deepcopy(objects)
    for one in changed:
        if one["kind"] == "DaemonSet":
            pod_spec = one["spec"]["template"]["spec"]
            for container in pod_spec["containers"]:
                container["image"] = f"{container['image'].split(':')[0]}:{tag}"
                if container["image"].startswith("gpushare-plugin:"):
                    container["volumeMounts"] += [{"name": "simulated", "mountPath": SIMULATED, "readOnly": True}]
                    pod_spec["volumes"] += [{"name": "simulated", "hostPath": {"path": SIMULATED}}]
    return changed


def chart(*options: str) -> list[Any]:
    """The objects that helm renders of the chart."""
    words = [str(helm.program()), "template", "gpushare", str(TREE / "packaging/helm/gpushare"), "--namespace", SYSTEM]
    words += ["--set", "image.registry=registry.site/gpu", *(word for one in options for word in ("--set", one))]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise Trouble(f"helm template: {done.stderr.strip()}")
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def folders() -> list[str]:
    """The folders of packaging/kubernetes that `kubectl apply -k` takes."""
    found = []
    for path in sorted(KUBERNETES.rglob("kustomization.yaml")):
        if yaml.safe_load(path.read_text())["kind"] == "Kustomization":
            found.append(str(Path(path.parent).relative_to(KUBERNETES)))
    return found
