"""Every name and value that an image can put into config.json is quoted in gpushare's output."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from gpushare.allocation import placement
from gpushare.core.errors import GpushareError
from gpushare.core.model import Bundle
from gpushare.request import request
from gpushare.request.dialects import gpushare_env, nvidia, nvidia_driver_env, registry

from tests.unit import pure

NASTY = ("; made; ", '"; made; "', "'; made; '", "$(made)", "`made`", "=; made; ", '="; made; "')
POLICIES = (
    pure.node(),
    pure.node(accept_env="privileged", require_limits=True, annotations="scoped", accept_cdi="never"),
    pure.node(annotations="scoped", nvidia_visible_devices="with_limit"),
)
MEMORY, SCOPED = "gpushare.io/memory", "io.kubernetes.cri.container-name"
# values as dialects write them, with the image's text at each place
VALUES = (
    "{}", "{}=1Gi", "0={}", "0=1{}", "0,{}", "any:{}", "any:{}=1", "any,{}", "any,model={}", "any,memory{}",
    "any,free>=1{}", "GPU-{}", "1{}", "1%{}", "GPU-aaaaaaaa,{}", "[{}]", '{{"0":"{}"}}',
    '{{"gpu":[{{"minor":0,"resources":{{"gpu-core":"{}"}}}}]}}', "/dev/nvidia{}", "cuda>={}", "{}=1", "brand={}",
)  # fmt: skip


def variables() -> list[str]:
    known = [word.name for row in registry.ROWS for word in row.variables]
    return [*gpushare_env.ROWS, *known, nvidia.ENV_DEVICES, nvidia.ENV_CAPABILITIES, nvidia_driver_env.ENV_IMEX]


def containers(text: str) -> Iterator[Bundle]:
    for value in (pattern.format(text) for pattern in VALUES):
        for name in variables():
            yield pure.bundle(f"{name}={value}")
            yield pure.bundle(f"{name}={value}", f"{nvidia.ENV_DEVICES}=all", "GPUSHARE_MEMORY=1Gi")
        for key in (word.name for row in registry.ROWS for word in row.annotations):
            yield pure.bundle("NVIDIA_VISIBLE_DEVICES=0", annotations={key: value})
        yield pure.bundle("GPUSHARE_CDI_0=0", f"GPUSHARE_DEVICES={value}")
        yield pure.bundle("GPUSHARE_MEMORY=1Gi", annotations={MEMORY: value})
        yield pure.bundle(f"NVIDIA_REQUIRE_CUDA={value}", "GPUSHARE_DEVICES=0")
    name = text.replace("=", "-")  # the name of a variable
    yield pure.bundle(f"GPUSHARE_MEMORY{name}=1Gi")
    yield pure.bundle(f"GPUSHAREMEM{name}=1Gi")
    yield pure.bundle(f"GPUSHARE_CDI_{name}=0", "GPUSHARE_DEVICES=1")
    yield pure.bundle(f"GPUSHARE_CDI_{name}={text}")
    yield pure.bundle(f"NVIDIA_REQUIRE_{name}=cuda>=99", "GPUSHARE_DEVICES=0")
    for value in ("1Gi", "0=bad", "0=1Gi,7=1Gi", text):
        yield pure.bundle(annotations={SCOPED: text, f"{text}.{MEMORY}": value, f"{text}.gpushare.io/devices": "0"})
        yield pure.bundle("GPUSHARE_MEMORY=2Gi", annotations={SCOPED: text, f"{text}.{MEMORY}": value})
        yield pure.bundle("GPUSHARE_DEVICES=0", annotations={SCOPED: text, MEMORY: value})
        yield pure.bundle("GPUSHARE_DEVICES=0", annotations={f"{text}.{MEMORY}": value})
    yield pure.bundle(annotations={SCOPED: text, f"{text}.gpushare.io/memry": "1Gi"})
    yield pure.bundle(annotations={f"gpushare.io/{text}": "1Gi"})
    asks = {
        "container_id": "c1",
        "hooks": {"prestart": [{"path": f"/usr/bin/nvidia-{text}/nvidia-container-runtime-hook"}]},
    }
    yield pure.bundle("GPUSHARE_MEMORY=1Gi", **asks)
    yield pure.bundle("GPUSHARE_MEMORY=1Gi", mounts=[{"destination": f"/{text}/libcuda.so.1", "source": "/x"}])
    yield pure.bundle(
        "GPUSHARE_MEMORY=1Gi", linux={"devices": [{"path": f"/dev/nvidia{text}", "major": 195, "minor": 0}]}
    )


def lines(bundle: Bundle) -> Iterator[str]:
    """All output about a container before its root is opened."""
    for node in POLICIES:
        for with_injected in (False, True):
            try:
                found = request.resolve(bundle, node, with_injected)
                if found is None:
                    yield from request.unused(bundle, node)
                    continue
                yield from found.ignored
                placement.grant(found, node, pure.ledger())
                request.refuse_conflicts(bundle, found, node.inventory)
            except GpushareError as error:
                yield str(error)


@pytest.mark.parametrize("text", NASTY)
def test_image_text_is_always_quoted(text: str) -> None:
    quoted_lines = 0
    for bundle in containers(text):
        for line in lines(bundle):
            outside = re.sub(r'"[^"]*"', "", line)
            assert "made" not in outside and '"' not in outside and "$(" not in line and "`made" not in line, line
            quoted_lines += "made" in line
    assert quoted_lines > 300  # most are refusals that quote the text
