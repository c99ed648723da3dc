"""The documentation agrees with the code."""

from __future__ import annotations

import re

import pytest
from gpushare.cli import containers, devices, output
from gpushare.config import keys
from gpushare.core import errors
from gpushare.gpu import drivertable
from gpushare.request import constraints, dialects
from gpushare.request.dialects import conditions, nvidia_driver_env

from tests.support.host import TREE
from tools import (
    architecture,
    config_docs,
    error_docs,
    error_texts,
)


def test_troubleshooting_lists_every_error_class() -> None:
    defined = set()
    for path in error_texts.SOURCES.rglob("*.py"):
        defined |= set(re.findall(r"^class (\w+)\((?!Value)\w*Error\)", path.read_text(), re.MULTILINE))
    assert {"GpushareError", *defined} <= set(error_texts.ERRORS)


def test_troubleshooting_lists_printed_messages() -> None:
    """Messages of the golden tests, which do not come from the sources: each must match a row."""
    rows = re.findall(r"^\| `+ ?(.*?) ?`+ \| ", error_docs.text(), re.MULTILINE)
    shapes = [re.compile(_shape(row.replace("\\|", "|"))) for row in rows if row != "PATH: REASON"]
    messages = []
    for path in sorted((TREE / "tests" / "golden").rglob("*.txt")):
        messages += re.findall(r"^refused \(\w+, exit \d+\): (.*)", path.read_text(), re.MULTILINE)
        messages += [text for text in re.findall(r"^gpushare: (.*)", path.read_text(), re.MULTILINE) if "; " in text]
    assert len(messages) > 20
    assert [text for text in messages if not any(shape.match(text) for shape in shapes)] == []


def test_troubleshooting_lists_messages_of_the_shim() -> None:
    """Each literal of a call that logs begins a row, unless the reason comes from another call."""
    text = "".join(path.read_text() for path in sorted((TREE / "shim").glob("*/*.c")))
    literals = set(re.findall(r'(?:gs_log|gs_tell|refuse)\(\s*"([^"]+)"', text)) - {
        "cuInit refused",
        "nvmlInit refused",
    }
    rows = [row for row, hint in error_texts.of_shim() if hint]
    assert len(literals) > 8
    assert [one for one in literals if not any(row.startswith(one) for row in rows)] == []
    assert "FILE is missing" in rows


def _shape(row: str) -> str:
    return re.escape(row).replace(re.escape("NAME=VALUE"), ".+=.*").replace("…", ".*") + "(;|$)"


def test_every_error_is_documented() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == set(config_docs.WHEN)


def test_make_targets_in_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (TREE / "Makefile").read_text(), re.MULTILINE))
    for part in ("shim/shim.mk", "simulator/sim.mk", "packaging/packages.mk", "bench/bench.mk"):
        targets |= set(re.findall(r"^([a-z0-9-]+):", (TREE / part).read_text(), re.MULTILINE))
    for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "docs/install.md", "docs/security.md"):
        text = (TREE / name).read_text()
        named = set(re.findall(r"(?:^ {4}|`)make ([a-z0-9-]+)|^make ([a-z0-9-]+)(?= +#|$)", text, re.MULTILINE))
        named = {word for pair in named for word in pair if word}
        assert named <= targets, f"{name} names {sorted(named - targets)}"


def test_versions_match_pyproject() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (TREE / "pyproject.toml").read_text(), re.MULTILINE)
    named = r"(?:gpushare(?:-installer)?[-_:]|newTag: )([0-9]+\.[0-9]+\.[0-9]+)"
    kubernetes = ("README.md", "installer/Dockerfile", "installer/kustomization.yaml")
    pages = ("README.md", "README.zh-CN.md", "docs/install.md", *(f"packaging/kubernetes/{one}" for one in kubernetes))
    for name in pages:
        assert set(re.findall(named, (TREE / name).read_text())) == {version}, name
    newest = re.search(r"^## ([0-9.]+)", (TREE / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == version


def _shown_columns() -> list[output.Column]:
    """Those of containers with names, without anything unusual."""
    return [one.column for one in containers._LIST if not one.optional or one.column.title == "name"]


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_readme_samples_have_current_columns(readme: str) -> None:
    lines = (TREE / readme).read_text().splitlines()
    for name, columns in (("list", _shown_columns()), ("devices", devices._COLUMNS)):
        heading = lines[lines.index(f"$ gpushare {name}") + 1]
        assert re.split("  +", heading.strip()) == [one.title.upper() for one in columns if not one.only_tty], name


def _fenced(text: str) -> list[str]:
    """Return the code blocks with their language."""
    return re.findall(r"^```[\s\S]*?^```$", text, re.MULTILINE)


def test_readmes_have_same_structure() -> None:
    """The same code blocks, and as many headings, table rows and list items."""
    english, chinese = ((TREE / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    assert _fenced(english) == _fenced(chinese) and len(_fenced(english)) > 4
    for part in (r"^#+ ", r"^\|", r"^\* ", r"^!\["):
        found = [len(re.findall(part, text, re.MULTILINE)) for text in (english, chinese)]
        assert found[0] == found[1] > 0, part


def test_readmes_have_same_links_and_figures() -> None:
    """As far as a comparison needs no Chinese: links, pictures, names and figures."""
    english, chinese = ((TREE / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    links = [set(re.findall(r"\]\(([^)]+)\)", text)) - {"README.md", "README.zh-CN.md"} for text in (english, chinese)]
    assert links[0] == links[1]
    prose = [re.sub(r"^```[\s\S]*?^```$", "", text, flags=re.MULTILINE) for text in (english, chinese)]
    named = [{" ".join(word.split()) for word in re.findall(r"`([^`]+)`", text)} for text in prose]
    assert named[0] - named[1] == set()
    figures = [re.findall(r"\| *([\d.,]+(?: \w+)?) \|$", text, re.MULTILINE) for text in (english, chinese)]
    assert figures[0] == figures[1] and len(figures[0]) > 5


def test_index_links_every_page() -> None:
    """docs/README.md links each page by its kind; internals have an index of their own."""
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (TREE / "docs/README.md").read_text().partition("## Four kinds")[2]))
    assert {path.name for path in (TREE / "docs").glob("*.md")} - linked == {"README.md"}


def test_picture_of_architecture_is_up_to_date() -> None:
    assert architecture.PICTURE.read_text() == architecture.svg(), "run `make pictures`"


def test_placement_conditions_are_documented() -> None:
    text = (TREE / "docs" / "placement.md").read_text()
    words = [f"any,{name}{sign}" for name, (sign, _) in conditions.CONDITIONS.items()]
    for key in keys.KEYS:
        if key.path.startswith(("placement.", "sharing.")):
            words += [key.path.rpartition(".")[2], *key.schema.get("enum", ())]
    assert [word for word in words if word not in text] == []


def test_capabilities_features_and_constraints_are_documented() -> None:
    text = (TREE / "docs" / "driver.md").read_text()
    words = [*dialects.CAPABILITIES, *constraints.PROPERTIES, *nvidia_driver_env.MIG_RIGHTS, nvidia_driver_env.ENV_IMEX]
    words += [feature.variable for feature in drivertable.FEATURES.values()]
    assert [word for word in words if f"`{word}`" not in text] == []


FOREIGN = {"uvm_pmm_gpu.c", "os-interface.c", "gpu_rmapi.c", "gpushare-hook.py"}  # NVIDIA's kernel modules; installed


def test_pages_for_contributors_name_existing_files() -> None:
    files = {
        f"/{path.relative_to(TREE)}"
        for folder in ("hook", "shim", "tests", "tools", "config", "docs", "packaging", "simulator", "bench", "demo")
        for path in (TREE / folder).rglob("*.*")
    }
    missing = []
    for page in [*(TREE / "docs" / "internals").rglob("*.md"), TREE / "CONTRIBUTING.md", *TREE.glob("*/README.md")]:
        for name in re.findall(r"`([\w./-]+\.(?:py|c|h|md|mk|sh|tsv|txt|yaml))`", page.read_text()):
            known = name.rpartition("/")[2] in FOREIGN or any(path.endswith(f"/{name}") for path in files)
            missing += [] if known else [f"{page.relative_to(TREE)}: {name}"]
    assert missing == []
