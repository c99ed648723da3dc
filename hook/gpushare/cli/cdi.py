"""gpushare cdi."""

from __future__ import annotations

import json
import os
from typing import Any, Optional

import click
import yaml

from ..core import constants
from ..core.quoting import shown
from ..engines.base import Change
from ..engines.host import Host, check_program, foreign_owners
from ..integrations import cdi as devices
from ..state import log
from . import facts
from .options import Paths, given, with_no_color
from .output import write, write_line
from .runtime import settings_of

_FORMATS = {".json": "json", ".yaml": "yaml"}  # engines take the format from the file's ending


class _NoAliasDumper(yaml.SafeDumper):
    """Write the same hooks out for every device, because some YAML readers do not support aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


@click.group("cdi")
def cdi_group() -> None:
    """Use the Container Device Interface (CDI)."""


@cdi_group.command()
@click.option(
    "--output", "path", callback=given, metavar="FILE", help="Write to this file, such as /etc/cdi/gpushare.yaml."
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["json", "yaml"]),
    help="Output format.  [default: by FILE's ending, else yaml]",
)
@click.option(
    "--program",
    callback=given,
    default="",
    metavar="FILE",
    help="Path of gpushare-hook, if it is not in the directory of this program.",
)
@click.option("--for-builds", is_flag=True, help="Let BuildKit give the devices to each step that names one.")
@click.option(
    "--nvidia-names",
    is_flag=True,
    help="Name the devices nvidia.com/gpu=all, =0 and so on. Refused if another file on this host does.",
)
@with_no_color
@click.pass_obj
def generate(
    paths: Paths, path: Optional[str], kind: Optional[str], program: str, for_builds: bool, nvidia_names: bool
) -> None:
    """Write a CDI specification of this host's devices.

    Engines can then give containers gpushare.io/share=any, or gpushare.io/share=UUID for a certain device.
    GPUSHARE_MEMORY and the other variables set the limits. Run the command again when devices or policy have changed.
    With --nvidia-names, write a second file, such as /etc/cdi/gpushare-nvidia.yaml: then `podman run --gpus all` and
    other requests for NVIDIA's devices give shares, on a host without NVIDIA's toolkit.
    """
    kind = _format_of(path, kind)
    settings = settings_of(paths, "")
    settings = settings._replace(hook=check_program(os.path.abspath(program) if program else settings.hook))
    node = facts.host(paths)
    if nvidia_names:
        devices.refuse_other_nvidia(Host(), path)
    value = devices.document(node, settings, for_builds, nvidia_names)
    text = json.dumps(value, indent=2) + "\n"
    if kind == "yaml":
        text = "# Written by `gpushare cdi generate`.\n" + yaml.dump(value, Dumper=_NoAliasDumper, sort_keys=False)
    if path is None:
        write(text)
    else:
        path, host = os.path.abspath(path), Host()
        change = Change(path, host.read(path), text)
        change.refuse_foreign(constants.ENV_CDI_PREFIX if nvidia_names else devices.KIND)
        if change.before != text:
            host.write([change])
        write_line("nothing to do" if change.before == text else change.describe())
    for uuid in devices.device_names(node)[1]:
        why = f"CDI does not allow its name; request {'its index' if nvidia_names else 'gpushare.io/share=any'}"
        log.to_stderr(f"gpushare: device {shown(uuid)} is left out, because {why}")
    for note in foreign_owners([settings.hook]):
        log.to_stderr(f"gpushare: {note}")


def _format_of(path: Optional[str], kind: Optional[str]) -> str:
    """The format to write. Raises click.UsageError for a file that engines would not read. A .yaml file may hold JSON,
    because JSON is valid YAML; a .json file must not hold YAML."""
    if path is None:
        return kind or "yaml"
    ending = os.path.splitext(path)[1]
    if ending not in _FORMATS:
        raise click.UsageError(f"--output {shown(path)}: engines read files that end in {' or '.join(_FORMATS)} only")
    if ending == ".json" and kind == "yaml":
        raise click.UsageError(f"--format yaml: {shown(path)} would not be JSON")
    return kind or _FORMATS[ending]
