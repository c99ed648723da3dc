"""One node of a real Kubernetes cluster in private namespaces: make cluster KUBE=DIR."""

from __future__ import annotations

PLACE = "/usr/local/lib/gpushare-cluster"  # on the node: what is the tool's own
SIMULATED = f"{PLACE}/simulated"  # on the node: the simulated driver once more, as a driver root below /
NAME = "node-a"
ADDRESS = "10.99.0.1"  # of the node and of the API server, in a network namespace of their own
SERVICE = "10.96.0.1"  # of the Service `kubernetes`: an address of the same namespace, so it needs no kube-proxy
PAUSE = "localhost/gpushare-test:1"
GPUS, GPU_BYTES = 2, 16 << 30


class Trouble(Exception):
    """One line: a step of the tool cannot go on."""
