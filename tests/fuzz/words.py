"""The fuzzers' dictionary: names of all dialects, command lines and other inputs that random bytes rarely form."""

from __future__ import annotations

from pathlib import Path

from gpushare.core import constants
from gpushare.inject import spec_record
from gpushare.programs import commandline
from gpushare.request import request
from gpushare.request.dialects import gpushare_env, nvidia, registry

from tests.fuzz import mutate

AMOUNTS = ("=1Gi", "=30%", "=0=4Gi,1=25%", "=3000m", "=100", "=0.5", "=true", "=all", "=0,1", "=GPU-aaaaaaaa", "=0:0")
RANGES = ("=4Gi..12Gi", "=0=4Gi..8Gi,1=2Gi", "..")


def words() -> list[str]:
    """Sorted and unique."""
    found = {
        *gpushare_env.ROWS,
        *gpushare_env.PREFIXES,
        *request.RAW_TRIGGERS,
        *mutate.KEYS,
        *AMOUNTS,
        *RANGES,
        spec_record.NONCE_ENV,
    }
    found |= {word.name for row in registry.ROWS for word in (*row.variables, *row.annotations)}
    found |= {f"{registry.SCOPE}main.{key.name}" for row in registry.ROWS for key in row.scoped}
    found |= {value for value in mutate.VALUES if isinstance(value, str)}
    found |= {*commandline.OWN, *commandline.GLOBAL_VALUE, *commandline.COMMAND_VALUE, *commandline.HANDLED}
    found |= {
        constants.ANNOTATION_PREFIX,
        constants.APPLIED_ANNOTATION,
        constants.ENV_CDI_PREFIX,
        *constants.ALLOCATED,
        *constants.MEMORY_ENDS,
        nvidia.ENV_DEVICES,
        nvidia.VOLUME_ROOT,
    }
    return sorted(word for word in found if word and word.isascii())


def write(path: Path) -> Path:
    """In the format of libFuzzer's -dict."""
    lines = ("".join(f"\\x{byte:02x}" for byte in word.encode()) for word in words())
    text = "".join(f'"{line}"\n' for line in lines)
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{id(text)}")
        new.write_text(text)
        new.replace(path)
    return path
