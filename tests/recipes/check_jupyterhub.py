"""docs/recipes.md: a JupyterHub starts notebook servers with DockerSpawner, each with its share of one GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.support.debian import DOCKER, Debian

from .conftest import limits, section

PACKAGES = (
    *DOCKER["trixie"], "jupyterhub", "node-configurable-http-proxy", "jupyter-server", "python3-docker",
    "python3-escapism", "python3-pip", "curl",
)  # fmt: skip
SPAWNER = "pip install --quiet --break-system-packages --no-deps dockerspawner==14.0.0"
TOKEN = "0" * 64
# The rest of the configuration of a site. Containers have no network of their own here, so each needs its port.
SITE = f"""
from dockerspawner import DockerSpawner

class HostNetwork(DockerSpawner):
    async def get_ip_and_port(self):
        return "127.0.0.1", self.port

def choose_port(spawner):
    spawner.port = {{"alice": 9001, "bob": 9002}}[spawner.user.name]

c.JupyterHub.bind_url = "http://127.0.0.1:8000"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:8081"
c.JupyterHub.authenticator_class = "dummy"
c.JupyterHub.spawner_class = HostNetwork
c.Authenticator.allowed_users = {{"alice", "bob"}}
c.JupyterHub.services = [{{"name": "test", "api_token": "{TOKEN}"}}]
c.JupyterHub.load_roles = [{{"name": "test", "scopes": ["admin:users", "admin:servers"], "services": ["test"]}}]
c.DockerSpawner.image = "notebook"
c.DockerSpawner.cmd = ["jupyterhub-singleuser"]
c.DockerSpawner.args = ["--allow-root"]
c.DockerSpawner.network_name = "host"
c.DockerSpawner.use_internal_ip = True
c.DockerSpawner.pre_spawn_hook = choose_port
c.DockerSpawner.remove = True
"""
# The image of the notebook servers: this Debian, which has jupyterhub-singleuser
IMAGE = "tar -C / --one-file-system --exclude=./srv --exclude=./var --exclude=./notify -c . | docker import - notebook"


@pytest.fixture
def hub(with_docker: Callable[..., Debian]) -> Debian:
    debian = with_docker("trixie", "jupyterhub", PACKAGES, SPAWNER)
    debian.run("bash", "-o", "pipefail", "-c", IMAGE, timeout_s=300)
    config = next(text for text in section("docs/recipes.md", "JupyterHub", "python") if "DockerSpawner" in text)
    debian.put("/etc/jupyterhub/test.py", SITE + config)
    debian.start("jupyterhub", "--config=/etc/jupyterhub/test.py")
    debian.until(lambda: ask(debian, "GET", "") is not None, "the hub")
    return debian


def ask(debian: Debian, method: str, path: str) -> object:
    """The answer of the hub's API; None if there is none."""
    head = f"Authorization: token {TOKEN}"
    url = f"http://127.0.0.1:8081/hub/api/{path}"
    done = debian.call("curl", "--silent", "--fail", "--request", method, "--header", head, url)
    return json.loads(done.stdout or "{}") if done.returncode == 0 else None


def ready(debian: Debian, user: str) -> bool:
    found = ask(debian, "GET", f"users/{user}")
    return isinstance(found, dict) and bool(found["servers"].get("", {}).get("ready"))


def test_each_user_s_notebook_server_has_its_share(hub: Debian) -> None:
    for user in ("alice", "bob"):
        assert ask(hub, "POST", f"users/{user}/server") is not None, hub.run("cat", "/var/log/jupyterhub.log")
    for user in ("alice", "bob"):
        hub.until(lambda: ready(hub, user), f"the server of {user}", 120)  # noqa: B023
    assert limits(hub) == {"jupyter-alice": 4, "jupyter-bob": 4}
    found = json.loads(hub.run("gpushare", "list", "--format", "json"))
    assert [one["shares"][0]["compute_percent"] for one in found] == [25, 25]
    for user in ("alice", "bob"):
        seen = hub.run("docker", "exec", f"jupyter-{user}", "nvidia-smi")
        assert re.findall(r"/ +(\d+)MiB", seen) == ["4096"], seen
        assert ask(hub, "DELETE", f"users/{user}/server") is not None
    hub.until(lambda: limits(hub) == {}, "the end of all shares")
