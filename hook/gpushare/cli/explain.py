"""gpushare explain BUNDLE: show what a container would get, and why, without changing anything. With --restore: remove
what gpushare-runtime added to the bundle's config.json."""

from __future__ import annotations

import os
from typing import Optional

import click

from ..config import node
from ..core import constants
from ..core.model import Bundle, Request
from ..core.quoting import printable
from ..inject import spec_record, specedit
from ..programs import hook, runtime, session
from ..programs.explain import explain_json, explain_text
from ..request import deny_devices, oci, request
from ..request.dialects import registry
from . import facts
from .options import Paths, with_format
from .output import write_json, write_text

_INDENT = 13  # of the text after a label
WITHHELD = (
    "nothing requested: gpushare denies NVIDIA's devices to this privileged container, "
    "which is not among policy.privileged_containers"
)
NARROWED = "nothing requested: gpushare removes NVIDIA's devices from the device rules of this container"


@click.command()
@click.argument("bundle", metavar="BUNDLE", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--way",
    type=click.Choice(["auto", "hook", "runtime"]),
    default="auto",
    help="Which program would start the container; auto: the hook, unless only gpushare-runtime can.",
)
@click.option("--cri", is_flag=True, help="The container is from containerd's CRI or CRI-O: pod annotations count.")
@click.option("--restore", is_flag=True, help="Remove what gpushare-runtime added to config.json.")
@with_format
@click.pass_obj
def explain(paths: Paths, bundle: str, way: str, cri: bool, restore: bool, output: str) -> None:
    """Show what a container would get if it started now.

    BUNDLE is a directory with config.json; `gpushare inspect` shows the one of a running container. The command reads
    it as the hook or gpushare-runtime would (--way) and changes nothing. If the start would fail, the command fails
    with the same error and exit code.
    """
    if restore:
        _restore(bundle, output)
        return
    found = oci.load_bundle(bundle, cri)
    way = way_of(found) if way == "auto" else way
    found = clean(found)
    requested, preview = of_bundle(paths, found, way)
    steps, placed, held = preview or (None, (), ())
    withheld = False
    if requested is None and deny_devices.may_apply(found):
        config = node.load_config_only(paths.config, paths.state_dir)
        withheld = way == "runtime" and deny_devices.applies(found, config)
        if way == "hook":
            deny_devices.refuse(found, config)
    has_scheduler_values = requested is None and registry.matches(found.env, found.annotations, found.container_name)
    unused = request.unused(found, facts.host(paths)) if has_scheduler_values else ()
    if output == "json":
        write_json({**explain_json(requested, steps, placed, held), "withheld": withheld, "unused": list(unused)})
    elif withheld:
        click.echo(WITHHELD if found.privileged else NARROWED)
    else:
        write_text(explain_text(requested, steps, placed, held), _INDENT)
    for line in unused if output != "json" else ():
        write_text(printable(f"{'ignored':<12} {line}"), _INDENT)


def way_of(bundle: Bundle) -> str:
    """The program that would start a bundle with these contents: "runtime" or "hook". Only gpushare-runtime can change
    what config.json already has."""
    applied = constants.APPLIED_ANNOTATION in bundle.annotations
    return "runtime" if applied or deny_devices.may_apply(bundle) or bundle.minors else "hook"


def clean(bundle: Bundle) -> Bundle:
    """The bundle as its engine wrote it, without what gpushare-runtime added."""
    return oci.with_spec(bundle, spec_record.stripped(bundle.spec))


def _restore(directory: str, output: str) -> None:
    path = os.path.join(directory, "config.json")
    spec = oci.read_json(path, oci.MAX_CONFIG_BYTES, "config.json")
    before = spec_record.stripped(spec)
    if before is not spec:
        specedit.write(path, before)
    if output == "json":
        write_json({"restored": before is not spec})
    else:
        click.echo(f"{path}: {'restored' if before is not spec else 'it has no changes of gpushare'}")


def of_bundle(paths: Paths, bundle: Bundle, way: str) -> tuple[Optional[Request], Optional[session.Preview]]:
    """The request and what the hook or gpushare-runtime would do for it. Nothing is changed."""
    start = session.resolve(bundle, lambda: facts.host(paths), with_injected=way == "runtime")
    if start is None:
        return None, None
    if way == "hook":
        request.refuse_conflicts(bundle, start.request, start.host.inventory)
    return start.request, session.preview(start, hook.IntoNamespace() if way == "hook" else runtime.IntoSpec())
