"""gpushare dra."""

from __future__ import annotations

import os

import click

from ..config import node
from . import facts
from .options import Paths, given, with_interval, with_no_color
from .output import write_now
from .runtime import settings_of


@click.command()
@click.option(
    "--kubelet",
    callback=given,
    default="/var/lib/kubelet",
    show_default=True,
    metavar="DIR",
    help="kubelet's directory.",
)
@click.option(
    "--cdi",
    callback=given,
    default="/var/run/cdi",
    show_default=True,
    metavar="DIR",
    help="Directory for CDI specifications.",
)
@click.option(
    "--program",
    callback=given,
    default="",
    metavar="FILE",
    help="Path of gpushare-hook on the node, if it is not in the directory of this program.",
)
@click.option("--server", callback=given, default="", metavar="URL", help="API server.  [default: the pod's]")
@click.option(
    "--account",
    callback=given,
    default="/var/run/secrets/kubernetes.io/serviceaccount",
    show_default=True,
    metavar="DIR",
    help="Directory with token and ca.crt.",
)
@with_interval(5.0, "Time between two checks of the devices.")
@with_no_color
@click.pass_obj
def dra(paths: Paths, kubelet: str, cdi: str, program: str, server: str, account: str, interval: float) -> None:
    """Offer the devices of this node to claims, as a DRA driver.

    Each device is published in a ResourceSlice, with memory and compute as capacity that claims consume. A container
    gets the share that its claim was allocated. The driver needs grpcio and protobuf: pip install
    'gpushare[kubernetes]'.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the driver prints errors itself
    from ..integrations.dra import apiserver, driver  # imports gRPC, so only after the command line was parsed

    hooks = settings_of(paths, "")._replace(cri=True)
    if program:
        hooks = hooks._replace(hook=os.path.abspath(program))
    settings = driver.Settings(os.path.abspath(kubelet), os.path.abspath(cdi), interval)
    api = apiserver.Server(server or apiserver.default_url(), account)
    first = node.last(paths.state_dir) or facts.host(paths)
    driver.run(first, paths.state_dir, settings, api, hooks, write_now)
