"""gpushare explain BUNDLE: what a container would get, and why; nothing is changed. With --restore the opposite: what
gpushare-runtime put into the bundle's config.json is taken out."""

from __future__ import annotations

import os
import time
from typing import Optional

import click

from ..allocation import livelimits, placement
from ..config import node
from ..core import names
from ..core.model import Bundle, Lease, Node, Request
from ..core.ops import Mount, Plan
from ..core.quoting import printable
from ..gpu import driverfiles
from ..inject import applied, plan, rootfs, specedit
from ..inject.spectree import SpecTree
from ..programs import why
from ..programs.explain import explain_json, explain_text
from ..request import oci, policy, request, withhold
from ..request.dialects import injected, table
from ..state import leases
from ..system import procs
from . import facts
from .options import Paths, with_format
from .output import write_json, write_text

_INDENT = 13  # of what is behind a label
WITHHELD = (
    "nothing asked: NVIDIA's devices are withheld from this privileged container, "
    "which is not among policy.privileged_containers"
)
NARROWED = "nothing asked: the device rules of this container reach NVIDIA's devices, which are taken out of them"


@click.command()
@click.argument("bundle", metavar="BUNDLE", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--way",
    type=click.Choice(["auto", "hook", "runtime"]),
    default="auto",
    help="By which of our programs it starts; auto: by gpushare-runtime where only that could start it.",
)
@click.option("--cri", is_flag=True, help="It is a container of containerd's CRI or of CRI-O: pod annotations count.")
@click.option("--restore", is_flag=True, help="Take out of config.json what gpushare-runtime put into it.")
@with_format
@click.pass_obj
def explain(paths: Paths, bundle: str, way: str, cri: bool, restore: bool, output: str) -> None:
    """What a container would get if it started now.

    BUNDLE is a directory with config.json, looked at as the hook or gpushare-runtime would (--way); `gpushare inspect`
    has that of a running container. Nothing is changed. Fails with the error, and the exit code, with which its start
    would fail.
    """
    if restore:
        _restore(bundle, output)
        return
    found = oci.load_bundle(bundle, cri)
    way = way_of(found) if way == "auto" else way
    found = clean(found)
    asked, steps, placed, held = of_bundle(paths, found, way)
    withheld = False
    if asked is None and withhold.may_apply(found):
        config = node.load_config_only(paths.config, paths.state_dir)
        withheld = way == "runtime" and withhold.applies(found, config)
        if way == "hook":
            withhold.refuse(found, config)
    spoken = asked is None and table.spoken(found.env, found.annotations)
    unused = request.unused(found, facts.host(paths)) if spoken else ()
    if output == "json":
        write_json({**explain_json(asked, steps, placed, held), "withheld": withheld, "unused": list(unused)})
    elif withheld:
        click.echo(WITHHELD if found.privileged else NARROWED)
    else:
        write_text(explain_text(asked, steps, placed, held), _INDENT)
    for line in unused if output != "json" else ():
        write_text(printable(f"{'ignored':<12} {line}"), _INDENT)


def way_of(bundle: Bundle) -> str:
    """By which way a bundle with these contents starts: what is in config.json already only gpushare-runtime takes."""
    ours = names.APPLIED_ANNOTATION in bundle.annotations
    return "runtime" if ours or withhold.may_apply(bundle) or injected.minors(bundle.spec) else "hook"


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


def of_bundle(
    paths: Paths, bundle: Bundle, way: str
) -> tuple[Optional[Request], Optional[Plan], tuple[why.Reason, ...], tuple[str, ...]]:
    """The steps of hook._start or runtime._create without their effects, why these devices, and who holds limits."""
    if not request.mentions(bundle):
        return None, None, (), ()
    host = facts.host(paths)
    asked = request.resolve(bundle, host, with_injected=way == "runtime")
    if asked is None:
        return None, None, (), ()
    if way == "hook":
        request.refuse_conflicts(bundle, asked)
    lease, placed, held = _lease(paths.state_dir, bundle, asked, host)
    files = driverfiles.for_request(host.inventory, asked, lease.shares if lease else ())
    if way == "runtime":
        return asked, _by_runtime(bundle, asked, host, lease, files), placed, held
    root = rootfs.open_root(bundle)
    try:
        image = rootfs.probe(root, bundle.env)
    finally:
        os.close(root)
    return asked, plan.make_plan(bundle, asked, host, lease, image, files), placed, held


def _by_runtime(
    bundle: Bundle, asked: Request, host: Node, lease: Optional[Lease], files: driverfiles.DriverFiles
) -> Plan:
    """The plan for a config.json without what others put there, which is told as well. Targets are looked up as a
    start would; not those in our own directory, which exists only then."""
    editor = specedit.Editor(bundle.spec, leased=lease is not None)
    taken = editor.take_out_foreign()
    with SpecTree(bundle._replace(spec=editor.spec)) as tree:
        steps = plan.make_plan(bundle, asked, host, lease, rootfs.probe(tree, bundle.env), files)
        for op in steps.ops:
            if isinstance(op, Mount) and not f"{op.target}/".startswith(f"{names.PRIVATE_DIR}/"):
                tree.place(op.target, op.kind)
    return steps._replace(notes=(*steps.notes, *(f"taken out of config.json: {line}" for line in taken)))


def _lease(
    state_dir: str, bundle: Bundle, asked: Request, host: Node
) -> tuple[Optional[Lease], tuple[why.Reason, ...], tuple[str, ...]]:
    """The lease that a start would get now, and why; a running container's own one does not stand in its way."""
    if asked.selection.kind == "none":
        return None, (), ()
    seen = leases.view(state_dir)
    live = livelimits.settled(state_dir, seen.live, keep=False)
    others = tuple(lease for lease in live if lease.bundle != bundle.path)
    policy.refuse_second(asked, bundle, others)
    ledger = placement.ledger_of(others, host.config.policy, seen.blocked(host))
    shares = placement.grant(asked, host, ledger)
    lease = Lease(bundle.id, "reserved", procs.boot_id(), bundle.path, shares, 0, 0, created=time.time())
    return lease, why.placed(asked, host, ledger, shares), why.held(asked, host, ledger, shares)
