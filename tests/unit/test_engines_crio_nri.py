"""CRI-O's requirement of gpushare's NRI plugin, on hosts that are dicts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from gpushare.core.errors import ConfigError
from gpushare.engines import crio, tomltext, validator
from gpushare.engines.base import Change
from gpushare.engines.host import Host

from tests.unit.enginehost import applied, configured, withdrawn
from tools.engine_snippets import SETTINGS, Tree

REQUIRE_CRIO = SETTINGS._replace(engine_version="1.34", require_nri=True)
CRIO_MAIN, DROP_INS = "/etc/crio/crio.conf", "/etc/crio/crio.conf.d"


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


@pytest.mark.parametrize("name", ["10-a.conf", "00-default", ".hidden", "50-a/b.conf", "9-a/b/c"])
def test_crio_s_lists_of_other_files_are_kept(name: str) -> None:
    """A list in a later file replaces that of an earlier one."""
    own = '[crio.nri.default_validator]\nnri_validator_required_plugins = ["{}"]\n'
    early, late = f"{DROP_INS}/{name}", f"{DROP_INS}/99-z.conf"
    files = {CRIO_MAIN: own.format("main"), early: own.format("early")}
    after, table = required_by_crio(files)
    assert table["nri_validator_required_plugins"] == ["early", "gpushare"]
    assert {path: after[path] for path in files} == files == withdrawn(crio, after, files)
    (note,) = crio.propose(REQUIRE_CRIO, Tree({**files, late: own.format("late")})).notes
    assert note.startswith(f"{late}: nri_validator_required_plugins overrides gpushare's")
    assert crio.propose(REQUIRE_CRIO, Tree({**files, late: own.format("gpushare")})).notes == []


@pytest.mark.parametrize("late", ["99-z", "99-gpushare.confx", "99-z/a.conf"])
@pytest.mark.parametrize("other", ["b", ""])
def test_later_crio_file_without_the_exception_for_gpushare_s_pods_is_refused(late: str, other: str) -> None:
    table = "[crio.nri.default_validator]\nnri_validator_tolerate_missing_plugins_annotation = '{}'\n"
    path = f"{DROP_INS}/{late}"
    with pytest.raises(ConfigError, match=f"{path}: nri_validator_tolerate_missing_plugins_annotation overrides gpush"):
        crio.propose(REQUIRE_CRIO, Tree({path: table.format(other)}))
    assert crio.propose(REQUIRE_CRIO, Tree({path: table.format(validator.OPTIONAL)})).notes == []
    assert crio.propose(REQUIRE_CRIO, Tree({f"{DROP_INS}/1": table.format("")})).notes == []


def test_later_crio_file_that_disables_the_validator_is_named() -> None:
    path = f"{DROP_INS}/99-z"
    text = "[crio.nri.default_validator]\nnri_enable_default_validator = {}\n"
    (note,) = crio.propose(REQUIRE_CRIO, Tree({path: text.format("false")})).notes
    assert note == f"{path}: nri_enable_default_validator = false overrides gpushare's, so set it to true there"
    assert crio.propose(REQUIRE_CRIO, Tree({path: text.format("true")})).notes == []


def test_every_file_below_the_directory_of_drop_ins_is_found(tmp_path: Path) -> None:
    """In the order of Go's filepath.Walk, which CRI-O uses."""
    names = [".a", "00-default", "a/b", "a/c/d.conf", "a-b", "b.conf"]
    for name in names:
        file = tmp_path / DROP_INS[1:] / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / DROP_INS[1:] / "link").symlink_to("a")
    host, expected = Host(str(tmp_path)), [f"{DROP_INS}/{name}" for name in (*names, "link")]
    assert host.files_below(DROP_INS) == expected
    assert Tree(dict.fromkeys(reversed(expected), "")).files_below(DROP_INS) == expected
    assert host.files_below("/none") == host.files_below(f"{DROP_INS}/.a") == []


@pytest.mark.parametrize("place", ["/etc/site/other", "../../site/other"])
def test_drop_in_of_the_administrator_can_be_a_link(tmp_path: Path, place: str) -> None:
    """CRI-O reads the file that it names. gpushare's own file must be none: it would change the target."""
    for name in (DROP_INS, "/etc/site"):
        (tmp_path / name[1:]).mkdir(parents=True)
    text = '[crio.nri.default_validator]\nnri_validator_required_plugins = ["site"]\n'
    (tmp_path / "etc/site/file").write_text(text)
    (tmp_path / "etc/site/other").symlink_to("file")
    (tmp_path / DROP_INS[1:] / "10-site.conf").symlink_to(place)
    (change,) = crio.propose(REQUIRE_CRIO, Host(str(tmp_path))).changes
    assert change.after and '["site", "gpushare"]' in change.after.replace("'", '"')
    (tmp_path / DROP_INS[1:] / "20-loop.conf").symlink_to("20-loop.conf")
    with pytest.raises(ConfigError, match=f'"{DROP_INS}/20-loop.conf" is a link to itself; remove that link'):
        crio.propose(REQUIRE_CRIO, Host(str(tmp_path)))


def test_temporary_file_is_where_crio_does_not_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, seen = Host(str(tmp_path)), []
    (tmp_path / DROP_INS[1:]).mkdir(parents=True)
    rename = os.rename

    def watched(old: str, new: str) -> None:
        seen.append(host.files_below(DROP_INS))
        rename(old, new)

    monkeypatch.setattr(os, "rename", watched)
    host.write([Change(crio.FILE, None, "x")])
    assert seen == [[]] and host.files_below("/etc/crio") == [crio.FILE]


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
