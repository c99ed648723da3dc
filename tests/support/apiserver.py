"""A stand-in for the API server: https with a token, and a record of each request as RBAC sees it.

    class Mine(ApiServer):
        def handle(self, method, path, body): -> (status, object)
    with Mine(folder) as api:              `api.url`; `api.account`: the folder with token and ca.crt
        api.calls                          -> [Call]
        api.connections                    -> how many clients connected, with or without a valid request
    compared(calls, rights)                -> (calls that no right allows, rights without a call)

Discovery (`/apis/GROUP`) is no call: Kubernetes allows it to every account, by the role system:discovery.
"""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Optional
from urllib.parse import unquote, urlsplit

import pytest

NODE, NODE_UID = "node-a", "11111111-2222-3333-4444-555555555555"
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_OF_ALL = {"get": "list", "delete": "deletecollection"}  # without a name


class Call(NamedTuple):
    """A request as a rule of RBAC allows it. `resource` has the subresource, as in "pods/status"."""

    verb: str
    group: str
    resource: str
    name: str = ""


def call_of(method: str, url: str) -> Optional[Call]:
    """The request's verb, group and resource: "Request Verbs" in Kubernetes' authorization docs. None: discovery."""
    parts = urlsplit(url)
    root, *words = map(unquote, parts.path.strip("/").split("/"))
    group = "" if root == "api" else words.pop(0)
    resource = words[1:]  # after the version
    if len(resource) > 2 and resource[0] == "namespaces":
        resource = resource[2:]
    if not resource:
        return None
    kind, name, *rest = [*resource, ""][: max(2, len(resource))]
    verb = _VERBS[method]
    if not name:
        verb = "watch" if "watch=" in parts.query else _OF_ALL.get(verb, verb)
    return Call(verb, group, "/".join([kind, *rest]), name)


def rights_of(rules: Iterable[Any]) -> set[Call]:
    """Each right that the rules of a role give; without a name it is for all objects of the resource."""
    return {
        Call(verb, group, resource, name)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


def compared(calls: Iterable[Call], rights: Iterable[Call]) -> tuple[set[Call], set[Call]]:
    """(calls that no right allows, rights that no call used). Both are empty for an account with the least rights."""
    made, given = set(calls), set(rights)

    def allows(right: Call, call: Call) -> bool:
        return right[:3] == call[:3] and right.name in ("", call.name)

    return (
        {call for call in made if not any(allows(right, call) for right in given)},
        {right for right in given if not any(allows(right, call) for call in made)},
    )


def failed(code: int, message: str) -> tuple[int, Any]:
    return code, {"kind": "Status", "code": code, "message": message}


# Like the certificates of clusters that were made before 2020, these have no key identifiers.
_EXTENSIONS = """
[req]
distinguished_name = name
[name]
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = none
authorityKeyIdentifier = none
[api]
subjectAltName = IP:127.0.0.1
subjectKeyIdentifier = none
authorityKeyIdentifier = none
"""


def _make_certificates(folder: Path) -> None:
    """ca.crt, and the server's api.crt with its key."""
    (folder / "extensions").write_text(_EXTENSIONS)
    new = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -config extensions -days 2"
    for line in (
        f"{new} -x509 -subj /CN=kubernetes -extensions ca -keyout ca.key -out ca.crt",
        f"{new} -new -subj /CN=api -keyout key -out api.csr",
        "x509 -req -days 2 -in api.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile extensions -extensions api"
        " -out api.crt",
    ):
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)


def check_strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the default of TLS connections that of Python 3.13, under every Python."""
    default = ssl.create_default_context

    def strict(**words: Any) -> ssl.SSLContext:
        context = default(**words)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)


class ApiServer:
    """`account`: the folder with token and ca.crt."""

    def __init__(self, folder: Path) -> None:
        self.account = folder
        self.calls: list[Call] = []
        self.connections = 0
        self.changed = threading.Condition()
        folder.mkdir(parents=True, exist_ok=True)
        payload = base64.urlsafe_b64encode(
            json.dumps({"kubernetes.io": {"node": {"name": NODE, "uid": NODE_UID}}}).encode()
        )
        self.token = f"e30.{payload.decode().rstrip('=')}.x"
        (folder / "token").write_text(self.token + "\n")
        _make_certificates(folder)

    def __enter__(self) -> Any:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                with api.changed:
                    code, found = api.authorised(self.command, self.path, self.headers.get("Authorization", ""), body)
                    api.changed.notify_all()
                text = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer

            def log_message(self, *words: Any) -> None:
                pass

        class Counting(ThreadingHTTPServer):
            def get_request(self) -> Any:
                api.connections += 1
                return super().get_request()

        self._server = Counting(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.account / "api.crt", self.account / "key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.url = f"https://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def authorised(self, method: str, path: str, authorization: str, body: Any) -> tuple[int, Any]:
        if authorization != f"Bearer {self.token}":
            return failed(401, "Unauthorized")
        call = call_of(method, path)
        self.calls += [call] if call else []
        return self.handle(method, path, body)

    def handle(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        raise NotImplementedError


class NodeServer(ApiServer):
    """An API server with one node. `labels`: its labels; `problem`: the status of each answer, if not 200."""

    def __init__(self, folder: Path, labels: dict[str, str]) -> None:
        super().__init__(folder)
        self.labels, self.problem = labels, 0

    def handle(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if self.problem:
            return failed(self.problem, "the server is not able to answer")
        if method != "GET" or path != f"/api/v1/nodes/{NODE}":
            return failed(404, f"{path} not found")
        return 200, {"kind": "PartialObjectMetadata", "metadata": {"name": NODE, "labels": self.labels}}
