"""containerd's edits of its configuration, on hosts that are dicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

import pytest
import tomlkit
from gpushare.core.errors import ConfigError
from gpushare.engines import configure, containerd, tomltext, validator
from gpushare.engines.base import UNKNOWN
from gpushare.engines.host import Host

from tests.unit.enginehost import DEBIAN, KUBEADM, MAIN, NEW, OLD, applied, configured, withdrawn
from tools.engine_snippets import SETTINGS, Tree

CRI2, CRI3 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"


FALLBACK = f"`containerd config dump` did not run, so the default handler is as {MAIN} has it"


def handler(files: dict[str, str], path: str = MAIN, plugin: str = CRI2) -> Any:
    return tomlkit.parse(files[path]).unwrap()["plugins"][plugin]["containerd"]["runtimes"]


def test_version_4_uses_plugin_name_of_version_3() -> None:
    after = configured(containerd, {MAIN: KUBEADM.replace("version = 3", "version = 4")}, NEW)
    assert tomlkit.parse(after[containerd.DROP_IN])["version"] == 4
    assert "gpushare" in handler(after, containerd.DROP_IN, CRI3)


@pytest.mark.parametrize(
    ("answer", "dump", "drop_in", "version"),
    [
        ("containerd github.com/containerd/containerd 1.6.20~ds1 x", "", False, 2),
        ("containerd github.com/containerd/containerd v1.7.27 x", "", False, 2),
        ("containerd github.com/containerd/containerd/v2 v2.0.5 x", "", False, 3),
        ("containerd github.com/containerd/containerd/v2 v2.1.0 x", "", True, 3),
        ("containerd github.com/containerd/containerd/v2 v2.3.0-rc.0 x", "", True, 3),
        ("containerd github.com/containerd/containerd/v2 v10.0.0 x", "", True, 3),
        (None, "version = 4\n", True, 3),
        (None, "version = 3\n", False, 3),
        (None, "version = 2\n", False, 2),
        (None, "", False, 2),
        ("nonsense", "", False, 2),
    ],
)
def test_engine_version_selects_layout(answer: Optional[str], dump: str, drop_in: bool, version: int) -> None:
    answers = {"containerd --version": answer} if answer else {}
    proposal = containerd.propose(SETTINGS._replace(dump=dump), Tree({}, answers))
    after = applied(proposal, {})
    assert (containerd.DROP_IN in after) == drop_in
    assert tomlkit.parse(after[MAIN])["version"] == version


def test_engine_version_keeps_all_digits() -> None:
    answers = {"containerd --version": "containerd github.com/containerd/containerd/v2 v2.10.3 x"}
    assert containerd.engine_version(SETTINGS, Tree({}, answers)) == (2, 10)


def test_new_main_file_keeps_default_imports() -> None:
    after = configured(containerd, {}, NEW)
    assert tomlkit.parse(after[MAIN]).unwrap() == {"version": 3, "imports": ["/etc/containerd/conf.d/*.toml"]}
    assert withdrawn(containerd, after, {}) == {}
    assert withdrawn(containerd, configured(containerd, {}, OLD), {}) == {}


def test_before_2_1_effective_imported_section_gets_entry() -> None:
    """Otherwise the entry would be in a section that containerd discards."""
    other = "/etc/containerd/conf.d/99-other.toml"
    section = f'version = 2\n[plugins."{CRI2}".containerd.runtimes.other]\n  runtime_type = "io.containerd.other.v1"\n'
    files = {MAIN: 'version = 2\nimports = ["conf.d/*.toml"]\n' + DEBIAN.partition("version = 2\n")[2], other: section}
    proposal = containerd.propose(OLD, Tree(files))
    after = applied(proposal, files)
    assert after[MAIN] == files[MAIN] and set(handler(after, other)) == {"other", "gpushare"}
    note = f"containerd before 2.1 does not merge imported files, so the entry goes into {other}"
    assert proposal.notes == [FALLBACK, f"{note}, whose CRI section is in force"]
    assert containerd.propose(OLD, Tree(after)).changes == []


def test_unmerged_imports_are_noted() -> None:
    """Also for a file that imports others: a later edit of an imported file would remove the entry."""
    note = f"containerd before 2.1 does not merge imported files, so the entry goes into {MAIN}"
    for text in (DEBIAN, KUBEADM):
        assert containerd.propose(SETTINGS._replace(engine_version="2.0"), Tree({MAIN: text})).notes == [FALLBACK, note]
        assert containerd.propose(NEW, Tree({MAIN: text})).notes == [FALLBACK]
    _, unknown = containerd.propose(SETTINGS, Tree({MAIN: DEBIAN})).notes
    assert unknown == f"the version of containerd is unknown (--engine-version); {note}"


def test_containerd_upgrade_moves_entry() -> None:
    files = {MAIN: DEBIAN}
    upgraded = configured(containerd, configured(containerd, files, OLD), NEW)
    assert "runtimes" not in upgraded[MAIN] and "gpushare" in handler(upgraded, containerd.DROP_IN)
    back = configured(containerd, upgraded, OLD)
    assert containerd.DROP_IN not in back and "gpushare" in handler(back)


REQUIRE = SETTINGS._replace(engine_version="2.2", require_nri=True)


def required(files: dict[str, str]) -> tuple[dict[str, str], Any]:
    """(the files after `configure --require-nri`, the validator's table in the drop-in)"""
    after = applied(containerd.propose(REQUIRE, Tree(files)), files)
    assert containerd.propose(REQUIRE, Tree(after)).changes == []
    assert [containerd.entry(path, text) for path, text in after.items()] == [""] * len(after)  # no handler
    return after, tomltext.at(tomlkit.parse(after[containerd.DROP_IN]).unwrap(), validator.CONTAINERD.keys)


@pytest.mark.parametrize("text", [DEBIAN, KUBEADM])
def test_required_nri_plugin_is_a_drop_in(text: str) -> None:
    after, table = required({MAIN: text})
    assert table == {
        "enable": True,
        "required_plugins": ["gpushare"],
        "tolerate_missing_plugins_annotation": "gpushare-nri-optional",
    }
    assert tomlkit.parse(after[containerd.DROP_IN])["version"] == tomlkit.parse(text)["version"]
    assert withdrawn(containerd, after, {MAIN: text}) == {MAIN: text}
    bare = tomlkit.dumps(tomlkit.parse(after[containerd.DROP_IN]).unwrap())  # rewritten, without gpushare's markers
    assert containerd.withdraw(containerd.DROP_IN, bare, None) is None


def test_required_nri_plugin_replaces_the_handler_and_is_replaced_by_it() -> None:
    files = {MAIN: KUBEADM}
    after, _ = required(configured(containerd, files, NEW))
    assert "runtimes" not in after[containerd.DROP_IN]
    again = configured(containerd, after, NEW)
    assert "default_validator" not in again[containerd.DROP_IN] and "gpushare" in handler(
        again, containerd.DROP_IN, CRI3
    )


def test_administrator_s_validator_is_extended_and_kept() -> None:
    own = "[plugins.'io.containerd.nri.v1.nri'.default_validator]\n  {}\n"
    given = "enable = true\n  required_plugins = ['a', 'gpushare']\n  tolerate_missing_plugins_annotation = ''"
    files = {MAIN: KUBEADM + own.format(given)}
    after, table = required(files)
    assert table == {
        "enable": True,
        "required_plugins": ["a", "gpushare"],
        "tolerate_missing_plugins_annotation": "gpushare-nri-optional",
    }
    assert after[MAIN] == files[MAIN] and withdrawn(containerd, after, files) == files
    for text, message in (
        ("reject_oci_hook_adjustment = true", "makes containerd refuse gpushare's hooks"),
        ("required_plugins = 'a'", "required_plugins must be a list"),
        ("tolerate_missing_plugins_annotation = 'b'", "set it to gpushare-nri-optional, or remove it"),
    ):
        with pytest.raises(ConfigError, match=message):
            containerd.propose(REQUIRE, Tree({MAIN: KUBEADM + own.format(text)}))


@pytest.mark.parametrize("line", ["disable = true", "disable_connections = true"])
def test_requirement_that_no_plugin_can_meet_is_refused(line: str) -> None:
    text = f"{KUBEADM}[plugins.'io.containerd.nri.v1.nri']\n  {line}\n"
    with pytest.raises(ConfigError, match=f"config.toml: {line} keeps the plugin out, so containerd would refuse"):
        containerd.propose(REQUIRE, Tree({MAIN: text}))
    assert required({MAIN: text.replace("true", "false")})


def test_requirement_without_nri_is_refused() -> None:
    text = 'version = 3\ndisabled_plugins = ["io.containerd.nri.v1.nri"]\n'
    with pytest.raises(ConfigError, match="disabled_plugins disables NRI; remove it from that list"):
        containerd.propose(REQUIRE, Tree({MAIN: text}))
    containerd.propose(REQUIRE._replace(require_nri=False), Tree({MAIN: text}))


@pytest.mark.parametrize(("version", "unknown"), [("1.7", ""), ("2.1.9", ""), ("", "the version of containerd is unk")])
def test_older_containerd_stays_unchanged_without_required_nri_plugin(version: str, unknown: str) -> None:
    proposal = containerd.propose(REQUIRE._replace(engine_version=version), Tree({MAIN: KUBEADM}))
    (note,) = proposal.notes
    assert proposal.changes == () and note.startswith(unknown) and "containerd before 2.2 cannot require" in note


def test_lines_after_half_deleted_block_are_kept() -> None:
    """An administrator deleted the end marker of a block and added lines below."""
    half = f'{DEBIAN}{tomltext.BEGIN}[debug]\n  level = "info"\n'
    after = configured(containerd, {MAIN: half}, OLD)
    assert withdrawn(containerd, after, {MAIN: half}, OLD) == {MAIN: half}
    assert containerd.withdraw(MAIN, half, UNKNOWN) == half


def test_rewritten_file_without_markers_is_undone() -> None:
    files = {MAIN: DEBIAN}
    after = configured(containerd, files, OLD)
    bare = tomlkit.dumps(tomlkit.parse(after[MAIN]).unwrap())
    assert tomltext.BEGIN not in bare
    left = containerd.withdraw(MAIN, bare, DEBIAN)
    assert left is not None and "gpushare" not in left
    again = configured(
        containerd, {MAIN: bare}, SETTINGS._replace(engine_version="1.7", program="/opt/gpushare-runtime")
    )
    assert handler(again)["gpushare"]["options"]["BinaryName"] == "/opt/gpushare-runtime-cri"


@pytest.mark.parametrize("own", [True, False])
def test_base_spec_comes_from_engine(own: bool) -> None:
    """The default handler's base spec, otherwise the output of ctr. Its hooks stay; a container's cgroupsPath is
    removed."""
    spec = json.dumps(
        {"ociVersion": "1", "linux": {"cgroupsPath": "/default"}, "hooks": {"prestart": [{"path": "/x"}]}}
    )
    line = "    base_runtime_spec = '/etc/base.json'\n"
    text = KUBEADM.replace("    snapshotter", line + "    snapshotter") if own else KUBEADM
    tree = Tree({MAIN: text, "/etc/base.json": spec if own else "{"}, {} if own else {"ctr oci spec": spec})
    after = applied(containerd.propose(NEW._replace(hook_only=True), tree), tree.files)
    found = json.loads(after[containerd.BASE_SPEC])
    assert [hook["path"] for hook in found["hooks"]["prestart"]] == ["/x", "/usr/bin/gpushare-hook"]
    assert found["linux"] == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 2\n[x", f"{MAIN}:2: not valid TOML"),
        ("version = 2\nversion = 2\n", f'{MAIN}:2: not valid TOML: Key "version" already exists; fix'),
        ("[plugins.cri]\nx = 1\n", "the file has format version 1 (the default); convert it to version 2 with"),
        ("version = 1\n", "the file has format version 1"),
        ("version = 5\n", "unknown version 5; known: 2, 3, 4; update gpushare"),
        ('version = "2"\n', 'unknown version "2"'),
        ('disabled_plugins = ["cri"]\n', "disabled_plugins disables CRI; remove it from that list"),
        (f'version = 3\ndisabled_plugins = ["{CRI3}"]\n', "disabled_plugins disables CRI"),
        ("version = 2\nimports = 1\n", "imports must be a list of strings"),
        ("version = 2\nplugins = 1\n", "plugins must be a table, not int"),
        (
            f'version = 2\n[plugins]\n"{CRI2}" = {{containerd = {{}}}}\n',
            "cannot be added at the end of the file; write",
        ),
        (f'version = 2\n[plugins."{CRI2}".containerd]\nruntimes = 3\n', "runtimes must be a table, not int"),
        (
            f'version = 2\n[plugins."{CRI2}".containerd.runtimes.runc]\n'
            'runtime_type = "io.containerd.runc.v2"\noptions = "x"\n',
            "options must be a table, not str",
        ),
    ],
)
def test_invalid_containerd_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        containerd.propose(OLD, Tree({MAIN: text}))
    assert message in str(caught.value) and MAIN in str(caught.value)


def test_impossible_containerd_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot pass arguments to a runtime .--gpushare-state /s."):
        containerd.propose(NEW._replace(state_dir="/s"), Tree({}))
    with pytest.raises(ConfigError, match='"two" is not a version; write it as 1.7 or 2.1'):
        containerd.propose(SETTINGS._replace(engine_version="two"), Tree({}))


def test_other_default_runtime_is_noted() -> None:
    text = KUBEADM.replace("/usr/sbin/runc", "/usr/bin/nvidia-container-runtime")
    assert '"/usr/bin/nvidia-container-runtime"' in containerd.propose(NEW, Tree({MAIN: text})).notes[1]


def test_linked_files_of_the_administrator_are_read(tmp_path: Path) -> None:
    """containerd follows links. gpushare changes only its drop-in."""
    folder, base = tmp_path / "etc/containerd", tmp_path / "etc/mine.json"
    folder.mkdir(parents=True)
    text = KUBEADM.replace("    snapshotter", "    base_runtime_spec = '/etc/b'\n    snapshotter")
    (folder / "real.toml").write_text(text)
    (folder / "config.toml").symlink_to("real.toml")
    base.write_text(json.dumps({"ociVersion": "1.1.0", "hostname": "mine"}))
    (tmp_path / "etc/b").symlink_to("mine.json")
    host = Host(str(tmp_path))
    assert not configure.state(containerd, NEW, host).problem
    changes = configure.configure(containerd, NEW._replace(hook_only=True), host).changes
    assert [one.path for one in changes] == [containerd.BASE_SPEC, containerd.DROP_IN]
    assert '"hostname": "mine"' in (host.read(containerd.BASE_SPEC) or "")
    assert containerd.systemd_cgroups(NEW, host) == (True, True)
    state = configure.state(containerd, NEW, host)
    assert state.configured and state.files == (containerd.BASE_SPEC, containerd.DROP_IN)
    configure.undo(containerd, NEW, host)
    assert not host.has(containerd.DROP_IN) and (folder / "config.toml").is_symlink()


def test_missing_base_spec_is_noted() -> None:
    text = KUBEADM.replace("    snapshotter", "    base_runtime_spec = '/etc/b'\n    snapshotter")
    notes = containerd.propose(NEW._replace(hook_only=True), Tree({MAIN: text})).notes
    assert notes[-1] == "base_runtime_spec \"/etc/b\" does not exist, so gpushare's is a copy of containerd's own"


def test_version_is_not_added_above_imported_files_of_version_1() -> None:
    files = {MAIN: 'imports = ["/etc/containerd/a.toml"]\n', "/etc/containerd/a.toml": "[plugins.cri]\nx = 1\n"}
    with pytest.raises(ConfigError, match="a.toml: the file has format version 1"):
        containerd.propose(NEW, Tree(files))
    files["/etc/containerd/a.toml"] = "version = 2\n" + files["/etc/containerd/a.toml"]
    assert containerd.propose(NEW, Tree(files)).changes
