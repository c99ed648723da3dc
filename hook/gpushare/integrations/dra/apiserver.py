"""The requests to the API server, with the service account of the driver's pod.

    server = Server(url, folder)       token and CA certificate of `folder`, which kubelet renews
    server.version()                   -> "v1"        the newest version of resource.k8s.io that is offered
    server.node()                      -> (name, uid) of the node, from the token
    server.claim(namespace, name)      -> the ResourceClaim
    server.slice(name)                 -> the ResourceSlice, or None
    server.write(object, old)          create it, or update `old`

Standard library only: five kinds of requests need no client library. Raises GpushareError.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
from typing import Any, Optional
from urllib.parse import quote, urlsplit

from ...core.errors import GpushareError
from ...core.quoting import shown
from .slices import GROUP, VERSIONS

FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
_TIMEOUT_S = 10
_MAX_BYTES = 16 << 20


_HINT = "see the driver's ServiceAccount, ClusterRole and network"


def default_url() -> str:
    """The address that kubelet writes into each container. Raises GpushareError outside of a pod."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise GpushareError("KUBERNETES_SERVICE_HOST is not set", "run it in a pod, or give --server")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _parsed(text: bytes, status: int) -> Any:
    """The object in an answer. Some errors are plain text: that of a path of an unknown version, and those of a proxy.
    Raises ValueError."""
    try:
        return json.loads(text)
    except ValueError:
        if status < 300:
            raise
        return {"message": text.decode(errors="replace").strip()}


class Server:
    def __init__(self, url: str, folder: str = FOLDER) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname:
            raise GpushareError(f"--server {shown(url)} is not the URL of an API server", "write https://HOST:PORT")
        self._host, self._port, self._folder = parts.hostname, parts.port or 443, folder
        self._version = ""

    def _token(self) -> str:
        path = os.path.join(self._folder, "token")
        try:
            with open(path, encoding="ascii") as file:
                return file.read().strip()
        except (OSError, ValueError):
            raise GpushareError(f"cannot read {shown(path)}", "give the pod a service account token") from None

    def node(self) -> tuple[str, str]:
        """The node of the pod, which the token names since Kubernetes 1.30."""
        try:
            text = self._token().split(".")[1]
            found = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))["kubernetes.io"]["node"]
            return str(found["name"]), str(found["uid"])
        except (IndexError, KeyError, TypeError, ValueError):
            raise GpushareError(
                "the service account token names no node", "run it in a pod of Kubernetes 1.32 or newer"
            ) from None

    def _call(self, method: str, path: str, body: Optional[dict[str, Any]] = None, can_lack: bool = False) -> Any:
        """The object in the answer. `can_lack`: None if the API server does not have it."""
        headers = {"Authorization": f"Bearer {self._token()}", "Accept": "application/json"}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        try:
            context = ssl.create_default_context(cafile=os.path.join(self._folder, "ca.crt"))
            # Python 3.13 sets it, and then refuses the certificates of old clusters, which kubectl accepts
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=_TIMEOUT_S, context=context)
            try:
                connection.request(method, path, data, headers)
                answer = connection.getresponse()
                text = answer.read(_MAX_BYTES)
            finally:
                connection.close()
            found = _parsed(text, answer.status)
        except RecursionError:
            raise GpushareError(
                f"API server: {method} {path}: the object is nested too deeply", "simplify it"
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise GpushareError(f"API server {self._host}:{self._port}: {method} {path}: {error}", _HINT) from None
        if answer.status == 404:
            self._version = ""  # an upgraded server can have dropped it: the next call looks for the newest one again
            if can_lack:
                return None
        if answer.status >= 300:
            reason = found.get("message", "") if isinstance(found, dict) else ""
            raise GpushareError(f"API server: {method} {path}: {answer.status} {shown(reason)}", _HINT)
        return found

    def version(self) -> str:
        version = self._version  # another thread can forget it at any time
        if not version:
            group = self._call("GET", f"/apis/{GROUP}", can_lack=True) or {"versions": []}
            offered = {one["version"] for one in group["versions"]}
            version = next((one for one in VERSIONS if one in offered), "")
            if not version:
                raise GpushareError(
                    f"the API server offers none of {GROUP}/{', '.join(VERSIONS)}", "use Kubernetes 1.34 or newer"
                )
            self._version = version
        return version

    def _path(self, *words: str) -> str:
        return "/".join([f"/apis/{GROUP}/{self.version()}", *(quote(word, safe="") for word in words)])

    def claim(self, namespace: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._call("GET", self._path("namespaces", namespace, "resourceclaims", name))
        return found

    def slice(self, name: str) -> Optional[dict[str, Any]]:
        found: Optional[dict[str, Any]] = self._call("GET", self._path("resourceslices", name), can_lack=True)
        return found

    def write(self, value: dict[str, Any], old: Optional[dict[str, Any]]) -> dict[str, Any]:
        """The object as the API server stored it."""
        if old is None:
            found: dict[str, Any] = self._call("POST", self._path("resourceslices"), value)
            return found
        versions = {"resourceVersion": old["metadata"]["resourceVersion"]}
        value = {**value, "metadata": {**value["metadata"], **versions}}
        changed: dict[str, Any] = self._call("PUT", self._path("resourceslices", value["metadata"]["name"]), value)
        return changed
