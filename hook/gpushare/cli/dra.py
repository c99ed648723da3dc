"""gpushare dra."""

from __future__ import annotations

import os

import click

from ..config import node
from ..core.errors import GpushareError
from . import facts
from .options import Paths, given, with_interval, with_no_color, with_xid_options, xids
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
@click.option("--check", is_flag=True, help="Fail while the devices of the node are not known, for example as a probe.")
@click.option("--alive", is_flag=True, help="Fail unless a driver runs that answers, for example as a probe.")
@click.option("--server", callback=given, default="", metavar="URL", help="API server.  [default: the pod's]")
@click.option(
    "--account",
    callback=given,
    default="/var/run/secrets/kubernetes.io/serviceaccount",
    show_default=True,
    metavar="DIR",
    help="Directory with token and ca.crt.",
)
@with_xid_options
@click.option(
    "--taint",
    "effect",
    type=click.Choice(["NoSchedule", "NoExecute"]),
    default="NoSchedule",
    show_default=True,
    help="Effect of the taint of a broken device; NoExecute also ends the pods that have it.",
)
@with_interval(5.0, "Time between two checks of the devices.")
@with_no_color
@click.pass_obj
def dra(
    paths: Paths,
    kubelet: str,
    cdi: str,
    program: str,
    check: bool,
    alive: bool,
    server: str,
    account: str,
    nvml: str,
    ignored: str,
    effect: str,
    interval: float,
) -> None:
    """Offer this node's devices to claims, by DRA (experimental).

    Each device is published in a ResourceSlice, with memory and compute as capacity that claims consume. A container
    gets the share that its claim was allocated. The driver needs grpcio and protobuf: pip install
    'gpushare[kubernetes]'.
    """
    if check:
        if node.last(paths.state_dir) is None:
            raise GpushareError("the devices of this node are not known", "run `gpushare refresh` on the node")
        return
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the driver prints errors itself
    from ..integrations.dra import apiserver, driver  # imports gRPC, so only after the command line was parsed

    if alive:
        driver.require_answer(os.path.abspath(kubelet))
        return
    hooks = settings_of(paths, "")._replace(cri=True)
    if program:
        hooks = hooks._replace(hook=os.path.abspath(program))
    settings = driver.Settings(os.path.abspath(kubelet), os.path.abspath(cdi), interval, nvml, xids(ignored), effect)
    api = apiserver.Server(server or apiserver.default_url(), account)
    first = node.last(paths.state_dir)
    if first is None:
        try:
            first = facts.host(paths)
        except GpushareError as error:
            write_now(f"{error}: only claims are released until `gpushare refresh` has run on the node")
    driver.run(first, paths.state_dir, settings, api, hooks, write_now)
