"""The table of targets. Each is a program with libFuzzer's command line."""

from __future__ import annotations

import sys
from typing import NamedTuple

from tests.support.host import BUILD, TREE

CORPUS = TREE / "tests" / "fuzz" / "corpus"
PROGRAMS = BUILD / "fuzz"


class Target(NamedTuple):
    """`function`: "module:name" below tests/fuzz; none for tests/fuzz/c/<name>.c. `json`: see mutate.py."""

    name: str
    reads: str
    function: str = ""
    json: bool = False
    longest: int = 4096  # bytes of an input
    words: bool = False  # it uses the dictionary of words.py

    def command(self) -> list[str]:
        if not self.function:
            return [str(PROGRAMS / self.name)]
        return [sys.executable, "-m", "tests.fuzz.guided", self.function, "json" if self.json else "bytes"]


TARGETS = {
    target.name: target
    for target in (
        # C, with AddressSanitizer and UBSan
        Target("args", "the launcher: argv", words=True),
        Target("scan", "the launcher: the text of config.json", words=True),
        Target("state", "the launcher: the state of a container"),
        Target("region", "the shim: limits and usage files during concurrent writes", longest=1024),
        Target("law", "the shim: activity files and bucket during concurrent writes", longest=1024),
        Target("image", "the shim: program images (ELF, fat binaries)"),
        Target("ptx", "the shim: PTX text"),
        Target("lz4", "the shim: compressed program images"),
        # Python
        Target("config-json", "config.json, to the request", "readers:config_json", json=True, words=True),
        Target("oci-state", "the state on stdin", "readers:state", json=True),
        Target("requests", "variables and annotations, all dialects", "readers:requests", words=True),
        Target("quantity", "amounts of memory and compute", "readers:quantities", longest=256),
        Target("quoting", "values of images in messages", "readers:quoted_value", longest=512),
        Target("ldcache", "an image's ld.so.cache", "readers:loader_cache"),
        Target("elf", "an image's libraries", "readers:library"),
        Target("limits", "limits files", "readers:limits", longest=512),
        Target("usage", "usage files", "readers:usage", longest=512),
        Target("index", "the index of activity files", "readers:index", longest=256),
        Target("lease", "lease.json and held", "readers:lease", json=True),
        Target("config-yaml", "config.yaml", "readers:configuration"),
        Target("spec", "config.json, edited and restored", "editors:spec", json=True, words=True),
        Target("jsontext", "an engine's JSON, edited and restored", "editors:json_text", json=True),
        Target("tomltext", "an engine's TOML, edited and restored", "editors:toml_text"),
        # C against Python
        Target("twin-args", "argv, by launcher and Python", "twins:command_line", words=True),
        Target("twin-scan", "config.json, by launcher and Python", "twins:words_in_config", json=True, words=True),
        Target("twin-state", "the state, by launcher and Python", "twins:oci_state", json=True),
    )
}
