"""CRI-O's requirement of gpushare's NRI plugin, on hosts that are dicts."""

from __future__ import annotations

from typing import Any

import pytest
import tomlkit
from gpushare.core.errors import ConfigError
from gpushare.engines import crio, tomltext, validator

from tests.unit.enginehost import applied, configured, withdrawn
from tools.engine_snippets import SETTINGS, Tree

REQUIRE_CRIO = SETTINGS._replace(engine_version="1.34", require_nri=True)
CRIO_MAIN = "/etc/crio/crio.conf"


def required_by_crio(files: dict[str, str]) -> tuple[dict[str, str], Any]:
    """(the files after `configure crio --require-nri`, the validator's table in the drop-in)"""
    after = applied(crio.propose(REQUIRE_CRIO, Tree(files)), files)
    assert crio.propose(REQUIRE_CRIO, Tree(after)).changes == []
    assert [crio.entry(path, text) for path, text in after.items()] == [""] * len(after)  # no handler
    return after, tomltext.at(tomlkit.parse(after[crio.FILE]).unwrap(), validator.CRIO.keys)


def test_crio_requires_the_nri_plugin_in_its_drop_in() -> None:
    """With the settings of CRI-O 1.34, internal/config/nri/nri.go."""
    after, table = required_by_crio({})
    assert table == {
        "nri_enable_default_validator": True,
        "nri_validator_required_plugins": ["gpushare"],
        "nri_validator_tolerate_missing_plugins_annotation": "gpushare-nri-optional",
    }
    assert list(after) == [crio.FILE] and withdrawn(crio, after, {}) == {}
    bare = tomlkit.dumps(tomlkit.parse(after[crio.FILE]).unwrap())  # rewritten, without gpushare's markers
    assert crio.withdraw(crio.FILE, bare, None) is None


def test_crio_s_requirement_replaces_the_handler_and_is_replaced_by_it() -> None:
    after, _ = required_by_crio(configured(crio, {}))
    assert "runtimes" not in after[crio.FILE]
    assert "default_validator" not in configured(crio, after)[crio.FILE]
    assert "default_validator" not in configured(crio, after, SETTINGS._replace(hook_only=True))[crio.FILE]


def test_crio_s_lists_of_other_files_are_kept() -> None:
    """A list in a later file replaces that of an earlier one."""
    own = '[crio.nri.default_validator]\nnri_validator_required_plugins = ["{}"]\n'
    early, late = "/etc/crio/crio.conf.d/10-a.conf", "/etc/crio/crio.conf.d/99-z.conf"
    files = {CRIO_MAIN: own.format("main"), early: own.format("early")}
    after, table = required_by_crio(files)
    assert table["nri_validator_required_plugins"] == ["early", "gpushare"]
    assert {path: after[path] for path in files} == files == withdrawn(crio, after, files)
    (note,) = crio.propose(REQUIRE_CRIO, Tree({**files, late: own.format("late")})).notes
    assert note.startswith(f"{late}: nri_validator_required_plugins overrides gpushare's")
    assert crio.propose(REQUIRE_CRIO, Tree({**files, late: own.format("gpushare")})).notes == []


def test_administrator_s_crio_file_keeps_its_validator() -> None:
    path = "/etc/crio/own.conf"
    text = '[crio.nri.default_validator]\nnri_validator_required_plugins = ["a"]\n'
    with pytest.raises(ConfigError, match="cannot be added at the end of the file"):
        crio.propose(REQUIRE_CRIO._replace(config_file=path), Tree({path: text}))
    assert crio.withdraw(path, text, None) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[crio.nri]\nenable_nri = false", "crio.conf: enable_nri = false keeps the plugin out, so CRI-O would refuse"),
        ("[crio.nri]\nnri_disable_connections = true", "nri_disable_connections = true keeps the plugin out"),
        (
            "[crio.nri.default_validator]\nnri_validator_reject_oci_hook_adjustment = true",
            "makes CRI-O refuse gpushare's hooks",
        ),
        ("[crio.nri.default_validator]\nnri_validator_required_plugins = 'a'", "plugins must be a list"),
        (
            "[crio.nri.default_validator]\nnri_validator_tolerate_missing_plugins_annotation = 'b'",
            "set it to gpushare-nri-optional, or remove it",
        ),
        ("[crio]\nnri = 3", "crio.nri must be a table"),
    ],
)
def test_crio_configuration_that_would_block_the_node_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        crio.propose(REQUIRE_CRIO, Tree({CRIO_MAIN: text}))


@pytest.mark.parametrize(
    ("version", "unknown"), [("1.33.9", ""), ("1.26", ""), ("", "the version of CRI-O is unknown")]
)
def test_older_crio_stays_unchanged_without_required_nri_plugin(version: str, unknown: str) -> None:
    """It ignores the table, so gpushare must not claim that the plugin is required."""
    proposal = crio.propose(REQUIRE_CRIO._replace(engine_version=version), Tree({}))
    (note,) = proposal.notes
    assert proposal.changes == () and note.startswith(unknown) and "CRI-O before 1.34 cannot require NRI" in note
    with pytest.raises(ConfigError, match="is not a version"):
        crio.propose(REQUIRE_CRIO._replace(engine_version="new"), Tree({}))


def test_version_is_that_of_the_installed_crio() -> None:
    answers = {"crio --version": "crio version 1.36.3\n   GitCommit:       0123\n"}
    settings = REQUIRE_CRIO._replace(engine_version="")
    assert crio.engine_version(settings, Tree({}, answers)) == (1, 36)
    assert crio.propose(settings, Tree({}, answers)).changes
