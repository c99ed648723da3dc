"""The checks of the cluster, in order. Each check goes on with what the ones before it left.

A check raises Trouble, or AssertionError, with one line that tells what was different.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.support.rbac import KUBERNETES, with_component
from tools.cluster import GPU_BYTES, GPUS, NAME
from tools.cluster.cluster import (
    FEATURES,
    GPU_LABEL,
    SYSTEM,
    Cluster,
    chart,
    example,
    folders,
    pod,
    share,
    with_image,
)
from tools.cluster.images import UPGRADED
from tools.cluster.node import wait_for

MEMORY_MIB = GPUS * GPU_BYTES >> 20
PROFILE_KINDS = ("ConfigMap", "ServiceAccount", "ClusterRole", "ClusterRoleBinding")
CHARTS = (
    ("plugin.enabled=true", "exporter.enabled=true"),
    ("dra.enabled=true",),
    ("nri.enabled=true",),
    ("remove=true",),
)


def node_runs_a_pod(c: Cluster) -> None:
    """The node is Ready and a pod without a share runs."""
    wait_for("the node Ready", c.ready, 120)
    c.create(pod("plain", "sh", "-c", "echo hello"))
    log = c.until("plain", "Succeeded")
    assert log == "hello\n", log
    c.remove("plain")


def manifests_are_accepted(c: Cluster) -> None:
    """The API server accepts every manifest and the chart, applied on the server side."""
    c.define_custom()
    c.apply(c.built("installer")[:1])
    assert c.plane.get("namespace", SYSTEM), "installer/kustomization.yaml begins with the namespace"
    for folder in folders():
        c.apply(c.built(folder), "--dry-run=server")
    for path in ("exporter/podmonitor.yaml", "exporter/servicemonitor.yaml", "exporter/prometheusrule.yaml"):
        c.apply(example(path), "--dry-run=server")
    for options in CHARTS:
        c.apply(chart(*options), "--dry-run=server", "--namespace", SYSTEM)


def installer_installs(c: Cluster) -> None:
    """The installer's pod installs gpushare and restarts the engine."""
    before = c.engine_pid()
    c.plane.do("label", "--overwrite", "node", NAME, f"{GPU_LABEL}=true")
    c.apply(c.built("."))
    c.rollout("gpushare-installer")
    assert c.engine_pid() != before, "the installer did not restart the engine"
    c.label_as_nfd()
    found = c.plane.get("node", NAME)["status"]["allocatable"].get("gpushare.io/memory-mib")
    assert found == str(MEMORY_MIB), f"the scheduler counts {found} MiB"


def is_checked(c: Cluster, policy: str) -> bool:
    return "typeChecking" in c.plane.get("validatingadmissionpolicy", policy).get("status", {})


def policies(c: Cluster) -> None:
    """The API server finds no wrong type in the expressions of the admission policies."""
    c.apply([one for one in c.built("dra") if one["kind"] == "ValidatingAdmissionPolicy"])
    found = c.plane.get("validatingadmissionpolicies")
    names = {one["metadata"]["name"] for one in found}
    assert names == {"gpushare", "gpushare-claims", "gpushare-dra"}, names
    for one in found:
        path = ("validatingadmissionpolicy", one["metadata"]["name"])
        wait_for(f"{path[1]} checked", partial(is_checked, c, path[1]), 60)
        warnings = c.plane.get(*path)["status"]["typeChecking"].get("expressionWarnings")
        assert not warnings, f"{path[1]}: {warnings}"
    c.delete([one for one in c.built("dra") if one["kind"] == "ValidatingAdmissionPolicy"])


def runtime_class(c: Cluster) -> None:
    """A pod of the RuntimeClass sees its share (example-env.yaml)."""
    (env,) = example("example-env.yaml")
    c.create(env)
    name = env["metadata"]["name"]
    log = c.until(name, "Succeeded")
    assert "4096MiB" in log, log
    c.remove(name)


def one_line(c: Cluster) -> None:
    """With the component one-line, a pod that has the limit only is completed, and sees its share."""
    found = with_component("one-line", KUBERNETES)
    policy = [one for one in found if one["kind"].startswith("MutatingAdmissionPolicy")]
    one = pod("line", "nvidia-smi", resources={"limits": {"gpushare.io/memory-mib": "2048"}})
    c.apply(policy)
    words = ("create", "--dry-run=server", "--output=jsonpath={.spec.runtimeClassName}", "-f", "-")
    text = json.dumps(one)
    wait_for("the API server completes the pod", lambda: c.plane.kubectl(*words, stdin=text).out == "gpushare", 30)
    c.create(one)
    log = c.until("line", "Succeeded")
    assert "2048MiB" in log, log
    c.remove("line")
    c.delete(policy)


def two_shares(c: Cluster) -> None:
    """Two pods with shares, as `gpushare list` and nvidia-smi show them."""
    c.create(share("one", 4096))
    c.create(share("two", 6144))
    for name in ("one", "two"):
        c.until(name, "Running")
    found = set(c.shares())
    assert found == {"default/one/main", "default/two/main"}, found
    for name, mib in (("one", 4096), ("two", 6144)):
        c.shows(name, mib)


def refusals_are_visible(c: Cluster) -> None:
    """A wrong pod is refused by the policy, a pod that never fits has the reason in an event."""
    wrong = share("wrong", 4096)
    wrong["spec"]["containers"][0]["env"][0]["value"] = "8Gi"
    done = c.plane.kubectl("create", "-f", "-", stdin=json.dumps(wrong))
    assert done.code and "must be equal to the limit gpushare.io/memory-mib" in done.err.replace("\n", " "), done.err
    c.create(share("large", 12288))  # the sum of both devices has room; the profile allows half of one
    wait_for("the reason in an event", lambda: "policy.max_memory" in c.events("large"), 60)
    c.plane.do("label", "pod", "large", "seen=yes")
    c.remove("large")


def pods_outlive_restarts(c: Cluster) -> None:
    """Shares outlive restarts of kubelet and the engine."""
    before = c.shares()
    for unit in ("kubelet", c.node.engine.name):
        c.node.run("systemctl", "restart", unit)
        wait_for("the node Ready", c.ready, 120)
        c.shows("one", 4096)
        assert c.shares() == before, f"after a restart of {unit}: {c.shares()}"
        assert c.restarts("one") == 0
    c.create(share("after", 1024, "nvidia-smi"))
    assert "1024MiB" in c.until("after", "Succeeded")
    c.remove("after")


def exporter(c: Cluster) -> None:
    """Metrics of the node name the pods with shares, and count the refused starts."""
    c.apply(c.built("exporter"))
    c.rollout("gpushare-exporter")
    (one,) = c.plane.get("pods", "-n", SYSTEM, "-l", "app.kubernetes.io/name=gpushare-exporter")
    place = f"/api/v1/namespaces/{SYSTEM}/pods/{one['metadata']['name']}:9878/proxy/metrics"

    def line(name: str, label: str = "") -> str:
        lines = c.plane.do("get", "--raw", place).splitlines()
        return next((one for one in lines if one.startswith(name) and label in one), "")

    wait_for("the share's limit", lambda: line("gpushare_memory_limit_bytes", 'pod="one"'), 30)
    c.create(share("large", 12288))
    wait_for("the refusal", lambda: float(line("gpushare_refused_starts_total").split()[-1]) > 0, 60)
    c.remove("large")
    c.delete(c.built("exporter"))


def profiles(c: Cluster) -> None:
    """A label of the node chooses its configuration: the installer's account may read it, and nothing else."""
    account = f"--as=system:serviceaccount:{SYSTEM}:gpushare-installer"
    c.apply(with_component("profiles", KUBERNETES))
    c.rollout("gpushare-installer")
    for verb, resource, allowed in (("get", "nodes", True), ("list", "nodes", False), ("get", "secrets", False)):
        done = c.plane.kubectl("auth", "can-i", verb, resource, account)
        assert (done.code == 0) is allowed, f"{account} {verb} {resource}: {done.out}{done.err}"
    for name, replicas in (("equal-shares", "gpu.replicas=4"), ("cluster", "gpu.replicas=1")):
        c.plane.do("label", "--overwrite", "node", NAME, f"gpushare.io/profile={name}")
        # it reads the label at once
        c.node.run("sh", "-c", "kill -HUP $(pgrep -f '^/gpushare.*install.py install')")
        wait_for(f"profile {name} on the node", partial(is_in_features, c, replicas), 100)
    c.apply(c.built("."))
    c.delete([one for one in with_component("profiles", KUBERNETES) if one["kind"] in PROFILE_KINDS])
    c.plane.do("label", "node", NAME, "gpushare.io/profile-")
    c.rollout("gpushare-installer")


def is_in_features(c: Cluster, text: str) -> bool:
    return text in c.node.run("cat", FEATURES)


def current(c: Cluster) -> str:
    return c.node.run("readlink", "/opt/gpushare/current").strip()


def upgrade(c: Cluster) -> None:
    """A new version restarts the engine once, and shares keep the old version."""
    old, pid, shares = current(c), c.engine_pid(), c.shares()
    c.apply(with_image(c.built("."), UPGRADED))
    c.rollout("gpushare-installer")
    assert current(c) != old, "the new version is not the current one"
    assert c.engine_pid() != pid, "the engine was not restarted"
    assert c.shares() == shares, c.shares()
    c.node.run("test", "-d", f"/opt/gpushare/{old}")  # its pods still need it
    pid = c.engine_pid()
    c.plane.do("delete", "pod", "--wait", "-n", SYSTEM, "-l", "app.kubernetes.io/name=gpushare-installer")
    c.rollout("gpushare-installer")
    assert c.engine_pid() == pid, "another pod of the same version restarted the engine"
    c.create(share("new", 1024, "nvidia-smi"))
    assert "1024MiB" in c.until("new", "Succeeded")
    c.remove("one", "two", "new")


def stop_counting_by_label(c: Cluster) -> None:
    """Take away what only the RuntimeClass without plugin or claim needs: the node's sum, and the policy that compares
    a pod's limit with its request."""
    kinds = ("NodeFeatureRule", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    c.delete([one for one in c.built(".") if one["kind"] in kinds])
    c.set_memory(None)


def units(name: str, mib: int, *command: str) -> dict[str, Any]:
    """A pod with a share through the device plugin."""
    limits = {"gpushare.io/memory-mib": str(mib)}
    return pod(name, *command, spec={"runtimeClassName": "gpushare"}, resources={"limits": limits})


def plugin(c: Cluster) -> None:
    """The device plugin's resources are counted, and pods get them after a restart of kubelet as well."""
    stop_counting_by_label(c)
    c.use_driver_root()
    c.apply(with_image(c.built("plugin"), UPGRADED))
    c.rollout("gpushare-plugin")

    def offered() -> bool:
        found = c.plane.get("node", NAME)["status"]["allocatable"]
        return (found.get("gpushare.io/memory-mib"), found.get("gpushare.io/compute")) == (
            str(MEMORY_MIB),
            str(GPUS * 100),
        )

    wait_for("the plugin's resources at the API server", offered, 60)
    (one,) = example("plugin/example-plugin.yaml")
    c.create(one)
    log = c.until(one["metadata"]["name"], "Succeeded")
    assert "4096MiB" in log, log
    c.remove(one["metadata"]["name"])
    c.create(units("held", 2048))
    c.until("held", "Running")
    c.node.run("systemctl", "restart", "kubelet")
    wait_for("the node Ready", c.ready, 120)
    c.create(units("later", 1024, "nvidia-smi"))
    assert "1024MiB" in c.until("later", "Succeeded", 180)
    c.shows("held", 2048)
    wait_for("the plugin's resources after a restart of kubelet", offered, 60)
    c.remove("held", "later")
    c.delete([one for one in c.built("plugin") if one["metadata"]["name"] != "gpushare-installer"])


def nri(c: Cluster) -> None:
    """The NRI plugin adds the hook, also after a restart of the engine."""
    objects = [one for one in with_image(c.built("nri"), UPGRADED) if one["metadata"]["name"] == "gpushare-nri"]
    c.apply(objects)
    c.rollout("gpushare-nri")
    asks = [{"name": "GPUSHARE_MEMORY", "value": "2Gi"}]
    c.create(pod("hooked", "nvidia-smi", env=asks))
    assert "2048MiB" in c.until("hooked", "Succeeded")
    c.create(pod("held", env=asks))
    c.until("held", "Running")
    shares = c.shares()
    c.node.run("systemctl", "restart", c.node.engine.name)
    wait_for("the node Ready", c.ready, 120)
    assert c.shares() == shares and c.restarts("held") == 0, c.shares()
    c.remove("hooked")
    c.rollout("gpushare-nri")
    wait_for("the NRI plugin in the engine again", lambda: _hooked(c), 60)
    c.remove("held")
    c.delete(objects)


def nri_required(c: Cluster) -> None:
    """With CRI-O and containerd 2.2, pods wait while the required NRI plugin does not run (2.1 changes nothing)."""
    objects = with_image(c.built("nri-required"), UPGRADED)
    c.apply(objects)
    c.rollout("gpushare-installer")
    c.rollout("gpushare-nri")
    newer = c.node.engine.can_require_nri
    if newer:
        wait_for("the requirement in the engine", lambda: "gpushare" in required(c), 150)
    plugins = [one for one in objects if one["metadata"]["name"] == "gpushare-nri"]
    c.delete(plugins)
    c.create(pod("without", "true"))
    if newer:
        wait_for("the reason in an event", lambda: "gpushare" in c.events("without"), 60)
        c.apply(plugins)  # its pod, and the installer's, start all the same
        c.rollout("gpushare-nri")
    c.until("without", "Succeeded")
    c.remove("without")
    c.apply(with_image(c.built("installer"), UPGRADED))  # the end of the installer's pod lifts the requirement
    c.rollout("gpushare-installer")
    assert "gpushare" not in required(c)
    c.delete(plugins)


def required(c: Cluster) -> str:
    """The setting of the engine, with its list of plugins."""
    found = re.search(r"required_plugins = \[[^]]*\]", c.node.run(*c.node.engine.show_words()))
    return found[0] if found else ""


def _hooked(c: Cluster) -> bool:
    c.create(pod("again", "sh", "-c", "nvidia-smi || true", env=[{"name": "GPUSHARE_MEMORY", "value": "2Gi"}]))
    log = c.until("again", "Succeeded")
    c.remove("again")
    return "2048MiB" in log


def dra(c: Cluster) -> None:
    """The driver's slice is accepted, and pods with claims of one and two devices run."""
    c.use_driver_root()
    c.apply(with_image(c.built("dra"), UPGRADED))
    c.rollout("gpushare-installer")
    c.rollout("gpushare-dra")
    wait_for("the driver's ResourceSlice", lambda: c.plane.get("resourceslices"), 60)
    for path, name, expected in (
        ("dra/example-claim.yaml", "gpushare-dra-example", ("4096MiB",)),
        ("dra/example-two.yaml", "gpushare-dra-two", ("8192MiB",)),
    ):
        objects = example(path)
        for one in objects:
            c.create(one)
        log = c.until(name, "Succeeded")
        assert all(text in log for text in expected), log
        c.delete(objects)
    no_claims(c)


def claim(name: str, mib: int, **spec: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A claim and a pod that uses it."""
    template = example("dra/example-claim.yaml")[0]["spec"]["spec"]
    template["devices"]["requests"][0]["exactly"]["capacity"]["requests"] = {"memory": f"{mib}Mi"}
    claims = [{"name": "share", "resourceClaimName": name}]
    one = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}, "spec": template}
    used = {"claims": [{"name": "share"}]}
    return one, pod(name, spec={"resourceClaims": claims, **spec}, resources=used)


def no_claims(c: Cluster) -> None:
    """Wait until no claim is prepared on the node."""
    wait_for("all claims released", lambda: not c.node.call("sh", "-c", "ls /run/cdi/gpushare.io-claim_*").stdout, 60)


def dra_scheduler(c: Cluster) -> None:
    """The scheduler counts memory of each device, and the next claim waits."""
    names = [f"c{number}" for number in range(5)]
    for name in names:
        for one in claim(name, 8192):
            c.create(one)
    wait_for("four of five pods run", lambda: sum(c.phase(name) == "Running" for name in names) == 4, 120)
    wait_for("the fifth pod waits", lambda: any("cannot allocate" in c.events(name) for name in names), 60)
    running = [name for name in names if c.phase(name) == "Running"]
    (waiting,) = set(names) - set(running)
    c.remove(running[0])
    c.until(waiting, "Running")
    c.remove(*names)
    c.plane.do("delete", "resourceclaim", "--wait", "--timeout=60s", *names)
    no_claims(c)


def dra_life(c: Cluster) -> None:
    """Claims outlive kubelet and driver, and a forced deletion releases them."""
    for one in claim("kept", 2048):
        c.create(one)
    c.until("kept", "Running")
    c.node.run("systemctl", "restart", "kubelet")
    wait_for("the node Ready", c.ready, 120)
    c.plane.do(
        "delete", "pod", "-n", SYSTEM, "-l", "app.kubernetes.io/name=gpushare-dra", "--force", "--grace-period=0"
    )
    c.rollout("gpushare-dra")
    c.shows("kept", 2048)
    c.plane.do("delete", "pod", "kept", "--force", "--grace-period=0")
    c.plane.do("delete", "resourceclaim", "kept", "--wait", "--timeout=60s")
    no_claims(c)


def dra_reboot(c: Cluster) -> None:
    """A pod with a claim runs again after a power failure."""
    for one in claim("again", 2048, restartPolicy="Always"):
        c.create(one)
    c.until("again", "Running")
    power_fails(c, "again")
    c.shows("again", 2048)
    c.remove("again")
    c.plane.do("delete", "resourceclaim", "again", "--wait", "--timeout=60s")
    no_claims(c)


def dra_removed(c: Cluster) -> None:
    """The driver is removed, and no pod or claim stays in Terminating."""
    for one in claim("late", 2048):
        c.create(one)
    c.until("late", "Running")
    c.plane.do("delete", "deviceclass", "gpushare.io")
    c.remove("late")
    c.plane.do("delete", "resourceclaim", "late", "--wait", "--timeout=60s")
    no_claims(c)
    c.delete([one for one in c.built("dra") if one["metadata"]["name"] != "gpushare-installer"])
    wait_for("no pod in Terminating", lambda: not ending(c), 40)


def ending(c: Cluster) -> list[str]:
    """Names of the pods in Terminating."""
    pods = c.plane.get("pods", "-A") or ()
    return [one["metadata"]["name"] for one in pods if "deletionTimestamp" in one["metadata"]]


def dra_extended(c: Cluster) -> None:
    """A pod with the limit gpushare.io/gpu gets a claim: all of a device that policy allows one container."""
    c.create(pod("extended", "nvidia-smi", resources={"limits": {"gpushare.io/gpu": "1"}}))
    log = c.until("extended", "Succeeded")
    assert "8192MiB" in log, log
    c.remove("extended")
    no_claims(c)


def rights(c: Cluster) -> None:
    """The driver's account can do what it needs on its own node, and no more."""
    driver = f"system:serviceaccount:{SYSTEM}:gpushare-dra"
    expected = {
        ("get", "resourceclaims.resource.k8s.io"): True,
        ("create", "resourceslices.resource.k8s.io"): True,
        ("delete", "resourceslices.resource.k8s.io"): False,
        ("get", "pods"): False,
        ("get", "secrets"): False,
        ("list", "nodes"): False,
    }
    for (verb, resource), allowed in expected.items():
        done = c.plane.kubectl("auth", "can-i", verb, resource, f"--as={driver}", "-n", "default")
        assert (done.code == 0) is allowed, f"{driver} can {verb} {resource}: {done.out}{done.err}"
    (driving,) = c.plane.get("pods", "-n", SYSTEM, "-l", "app.kubernetes.io/name=gpushare-dra")
    words = ("--bound-object-kind=Pod", f"--bound-object-name={driving['metadata']['name']}")
    token = c.plane.do("create", "token", "gpushare-dra", "-n", SYSTEM, *words).strip()
    (c.plane.folder / "driver.conf").write_text(c.plane.kubeconfig("driver", token))
    pool = {"name": "other", "generation": 1, "resourceSliceCount": 1}
    for node, message in ((NAME, ""), ("node-b", "only the ResourceSlice of its own node")):
        spec = {"driver": "gpushare.io", "nodeName": node, "pool": pool, "devices": []}
        one = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "try"}, "spec": spec}
        done = c.plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(one), user="driver")
        assert (message in done.err and done.code) if message else not done.code, f"{node}: {done.err}"


def drain(c: Cluster) -> None:
    """A drained node has no shares, and gives new ones afterwards."""
    c.create(share("drained", 1024))
    c.until("drained", "Running")
    pid = c.engine_pid()
    c.plane.do(
        "drain", NAME, "--force", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=90s", timeout_s=120
    )
    assert not c.shares(), c.shares()
    c.plane.do("uncordon", NAME)
    c.create(share("drained", 1024))
    c.until("drained", "Running")
    assert c.engine_pid() == pid
    c.remove("drained")


def power_fails(c: Cluster, name: str) -> str:
    """Let the node reboot, and wait until the pod runs again; return the pid of the new engine."""
    c.node.fail()
    c.node.boot()
    began = c.engine_pid()
    wait_for(f"kubelet to start pod {name} again", lambda: c.restarts(name) > 0, 180)
    wait_for("the node Ready", c.ready, 120)
    c.until(name, "Running")
    return began


def reboot(c: Cluster) -> None:
    """After a power failure the node gives shares again, without a restart of the engine."""
    c.create(share("kept", 1024, restartPolicy="Always"))
    c.until("kept", "Running")
    began = power_fails(c, "kept")
    wait_for("its share", lambda: list(c.shares()) == ["default/kept/main"], 60)
    c.shows("kept", 1024)
    c.rollout("gpushare-installer")
    assert c.engine_pid() == began, "the installer restarted the engine"
    c.remove("kept")


def without_limit(name: str, *command: str) -> dict[str, Any]:
    """A pod of the RuntimeClass that no scheduler counts."""
    one = share(name, 1024, *command)
    del one["spec"]["containers"][0]["resources"]
    return one


def removal(c: Cluster) -> None:
    """The removal waits for the last share, and leaves nothing on the node."""
    c.use_driver_root(False)
    stop_counting_by_label(c)
    for name in ("kept", "meanwhile"):
        c.create(without_limit(name))
        c.until(name, "Running")
    c.remove("meanwhile")
    c.apply(c.built("remove"))
    wait_for("the removal waits", lambda: "default/kept/main holds a share" in c.logs("gpushare-installer"), 90)
    c.create(without_limit("meanwhile", "nvidia-smi"))
    assert "1024MiB" in c.until("meanwhile", "Succeeded")
    c.remove("kept", "meanwhile")
    c.rollout("gpushare-installer", 200)
    places = f"/opt/gpushare /etc/gpushare {c.node.engine.drop_in}"
    left = c.node.call("sh", "-c", f"ls -d {places}; grep -lr runtimes.gpushare /etc/containerd /etc/crio")
    assert not left.stdout, f"left on the node: {left.stdout}"
    c.create(pod("plain", "sh", "-c", "echo hello"))
    log = c.until("plain", "Succeeded")
    assert log == "hello\n", log
    c.remove("plain")
    c.delete(c.built("."))


CHECKS: dict[str, Callable[[Cluster], None]] = {
    "node": node_runs_a_pod,
    "manifests": manifests_are_accepted,
    "installer": installer_installs,
    "policies": policies,
    "runtime": runtime_class,
    "one-line": one_line,
    "two": two_shares,
    "refused": refusals_are_visible,
    "restarts": pods_outlive_restarts,
    "exporter": exporter,
    "profiles": profiles,
    "upgrade": upgrade,
    "drain": drain,
    "reboot": reboot,
    "plugin": plugin,
    "nri": nri,
    "nri-required": nri_required,
    "dra": dra,
    "dra-extended": dra_extended,
    "dra-rights": rights,
    "dra-scheduler": dra_scheduler,
    "dra-life": dra_life,
    "dra-reboot": dra_reboot,
    "dra-removed": dra_removed,
    "removal": removal,
}


def about(name: str) -> str:
    """One sentence about a check."""
    text = CHECKS[name].__doc__
    assert text
    return text.rstrip(".")
