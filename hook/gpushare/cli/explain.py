"""gpushare explain BUNDLE: what a container would get, and why; nothing is changed."""

from __future__ import annotations

import os
import time
from typing import Optional

import click

from .. import driverfiles, hook, leases, oci, plan, procs, request, rootfs
from ..explain import explain_json, explain_text
from ..model import Bundle, Lease, Node, Request
from ..ops import Plan
from . import facts
from .options import Paths, with_format
from .output import write_json


@click.command()
@click.argument("bundle", metavar="BUNDLE", type=click.Path(exists=True, file_okay=False))
@with_format
@click.pass_obj
def explain(paths: Paths, bundle: str, output: str) -> None:
    """What a container would get if it started now.

    BUNDLE is a directory with config.json. Nothing is changed. Fails with the error, and the exit code, with which its
    start would fail.
    """
    asked, steps = of_bundle(paths, oci.load_bundle(bundle))
    if output == "json":
        write_json(explain_json(asked, steps))
    else:
        click.echo(explain_text(asked, steps), nl=False)


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
