"""gpushare nri."""

from __future__ import annotations

import os

import click

from ..config import node
from ..core.errors import GpushareError
from ..engines.host import check_program
from ..state import storage
from .options import Paths, given, with_no_color
from .output import write_now
from .runtime import settings_of

SOCKET = "/var/run/nri/nri.sock"


@click.command()
@click.option(
    "--socket", callback=given, default=SOCKET, show_default=True, metavar="FILE", help="The engine's socket for NRI."
)
@click.option(
    "--index",
    callback=given,
    default="10",
    show_default=True,
    metavar="NN",
    help="Position among NRI plugins; lower ones come first.",
)
@click.option(
    "--hook",
    callback=given,
    metavar="FILE",
    help="Path of gpushare-hook for the engine, if it is not in the directory of this program.",
)
@click.option(
    "--ignore-namespace",
    callback=given,
    default="",
    metavar="NAME",
    help="Add no hook to pods of this namespace that have the annotation gpushare-nri-ignore: true.",
)
@click.option(
    "--check", is_flag=True, help="Fail unless a plugin runs that an engine has accepted, for example as a probe."
)
@with_no_color
@click.pass_obj
def nri(paths: Paths, socket: str, index: str, hook: str, ignore_namespace: str, check: bool) -> None:
    """Give shares as an NRI plugin of the engine (experimental).

    Adds gpushare's hook to each container that containerd (1.7 and newer) or CRI-O creates, and passes the pod's
    annotations on. While this command does not run, new containers have no GPU. It runs until SIGTERM, and needs
    protobuf: pip install 'gpushare[kubernetes]'.
    """
    from ..integrations.nri import plugin  # imports protobuf, so only after the command line was parsed

    if check:
        if not plugin.is_registered(paths.state_dir):
            raise GpushareError("no NRI plugin runs that an engine has accepted", "see the plugin's log")
        return
    plugin.check_index(index)
    node.load_config_only(*paths)
    settings = settings_of(paths, "")._replace(cri=True)
    settings = settings._replace(hook=os.path.abspath(hook) if hook else check_program(settings.hook))
    storage.prepare(paths.state_dir)
    plugin.run(plugin.Settings(os.path.abspath(socket), index, settings, ignore_namespace), write_now)
