"""gpushare explain BUNDLE: what a container would get, and why; nothing is changed. With --restore the opposite: what
gpushare-runtime put into the bundle's config.json is taken out."""

from __future__ import annotations

import os
import time
from typing import Optional

import click

from .. import applied, driverfiles, hook, leases, oci, plan, procs, request, rootfs, specedit
from ..explain import explain_json, explain_text
from ..model import Bundle, Lease, Node, Request
from ..ops import Plan
from . import facts
from .options import Paths, with_format
from .output import write_json


@click.command()
@click.argument("bundle", metavar="BUNDLE", type=click.Path(exists=True, file_okay=False))
@click.option("--restore", is_flag=True, help="Take out of config.json what gpushare-runtime put into it.")
@with_format
@click.pass_obj
def explain(paths: Paths, bundle: str, restore: bool, output: str) -> None:
    """What a container would get if it started now.

    BUNDLE is a directory with config.json. Nothing is changed. Fails with the error, and the exit code, with which its
    start would fail.
    """
    if restore:
        _restore(bundle, output)
        return
    asked, steps = of_bundle(paths, clean(oci.load_bundle(bundle)))
    if output == "json":
        write_json(explain_json(asked, steps))
    else:
        click.echo(explain_text(asked, steps), nl=False)


def clean(bundle: Bundle) -> Bundle:
    """The bundle as its engine wrote it."""
    return bundle._replace(spec=applied.stripped(bundle.spec))


def _restore(directory: str, output: str) -> None:
    path = os.path.join(directory, "config.json")
    spec = oci.read_json(path, oci.MAX_CONFIG_BYTES, "config.json")
    before = applied.stripped(spec)
    if before is not spec:
        specedit.write(path, before)
    if output == "json":
        write_json({"restored": before is not spec})
    else:
        click.echo(f"{path}: {'as it was' if before is not spec else 'nothing of gpushare is in it'}")


def of_bundle(paths: Paths, bundle: Bundle) -> tuple[Optional[Request], Optional[Plan]]:
    """The steps of hook._start without its effects."""
    if not request.mentions(bundle):
        return None, None
    host = facts.host(paths)
    asked = request.resolve(bundle, host)
    if asked is None:
        return None, None
    request.refuse_conflicts(bundle, asked)
    lease = _lease(paths.state_dir, bundle, asked, host)
    files = driverfiles.for_request(host.inventory, asked, lease.shares if lease else ())
    root = rootfs.open_root(bundle)
    try:
        image = rootfs.probe(root, bundle.env)
    finally:
        os.close(root)
    return asked, plan.make_plan(bundle, asked, host, lease, image, files)


def _lease(state_dir: str, bundle: Bundle, asked: Request, host: Node) -> Optional[Lease]:
    """The lease that a start would get now; a running container's own one does not stand in its way."""
    if asked.selection.kind == "none":
        return None
    seen = leases.view(state_dir)
    others = tuple(lease for lease in seen.live if lease.bundle != bundle.path)
    shares = hook.grant(asked, host, others, seen.blocked(host))
    return Lease(bundle.id, "reserved", procs.boot_id(), bundle.path, shares, 0, 0, created=time.time())
