"""Each engine's edits of its configuration texts, on hosts that are dicts. test_configure.py tests what engines
share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomlkit
from gpushare.core.errors import ConfigError
from gpushare.engines import containerd, crio, docker, hookfiles, podman, tomltext
from gpushare.engines.base import UNKNOWN, Change, Settings
from gpushare.engines.configure import ENGINES

from tests.support.host import TREE
from tests.unit.enginehost import DEBIAN, KUBEADM, MAIN, NEW, OLD, applied, configured, withdrawn
from tools import engine_snippets
from tools.engine_snippets import SETTINGS, Tree

GOLDEN = Path(__file__).parents[1] / "golden" / "configure"


# CRI-O and podman


def test_arguments_for_crio_s_runtime_are_refused() -> None:
    with pytest.raises(ConfigError, match="CRI-O cannot pass arguments to a runtime"):
        crio.propose(SETTINGS._replace(config="/c"), Tree({}))


@pytest.mark.parametrize(
    ("engine", "main"), [(crio, "/etc/crio/crio.conf"), (podman, "/etc/containers/containers.conf")]
)
def test_hooks_keep_configured_directories(engine: Any, main: str) -> None:
    table = ".".join(engine._TABLE)
    files = {main: f'[{table}]\nhooks_dir = ["/mine"]\n'}
    after = configured(engine, files, SETTINGS._replace(hook_only=True, state_dir="/s"))
    assert tomltext.at(tomlkit.parse(after[engine.FILE]).unwrap(), engine._TABLE) == {
        "hooks_dir": ["/mine", engine.HOOKS]
    }
    for stage, name in (("prestart", "gpushare.json"), ("poststop", "gpushare-poststop.json")):
        value = json.loads(after[f"{engine.HOOKS}/{name}"])
        assert value["version"] == "1.0.0" and value["when"] == {"always": True} and value["stages"] == [stage]
        flags = ["--cri"] if engine is crio else []
        assert value["hook"]["args"] == ["gpushare-hook", "--state", "/s", *flags, stage]
        assert [one.partition("=")[0] for one in value["hook"]["env"]] == ["PATH"]
    assert withdrawn(engine, after, files) == files
    if engine is crio:
        other = {f"{crio.FILE.rpartition('/')[0]}/00-default": files[main]}
        assert '"/mine"' in configured(engine, other, SETTINGS._replace(hook_only=True))[engine.FILE]
    later = f"{engine.FILE.rpartition('/')[0]}/zz.conf"
    notes = engine.propose(SETTINGS._replace(hook_only=True), Tree({**files, later: files[main]})).notes
    assert later in notes[0] and "overrides gpushare's" in notes[0]


@pytest.mark.parametrize(
    ("texts", "hooks_dir"),
    [
        (['["/acme", {append = true}]'], [podman.HOOKS, {"append": True}]),  # shared/cases/engines/10
        (['["/acme", {append = true}]', '["/other"]'], [podman.HOOKS, {"append": True}]),
        (['["/acme", {append = true}]', '["/other", {append = false}]'], ["/other", podman.HOOKS]),
        (['["/acme"]', '["/other"]'], ["/other", podman.HOOKS]),
    ],
)
def test_podman_keeps_lists_that_append(texts: list[str], hooks_dir: list[Any]) -> None:
    """podman 5.8.6 reads {append = true}: this list and later ones are added to the earlier ones."""
    files = {path: f"[engine]\nhooks_dir = {text}\n" for path, text in zip(podman._MAIN, texts)}
    after = configured(podman, files)
    assert tomlkit.parse(after[podman.FILE]).unwrap()["engine"]["hooks_dir"] == hooks_dir
    assert withdrawn(podman, after, files) == files
    later = {**files, f"{podman.FILE[:-5]}2.conf": '[engine]\nhooks_dir = ["/mine"]\n'}
    overrides = podman.propose(SETTINGS, Tree(later)).notes
    assert bool(overrides) == ("append" not in str(hooks_dir))
    with pytest.raises(ConfigError, match="hooks_dir must be a list of texts"):
        podman.propose(SETTINGS, Tree({podman._MAIN[0]: '[engine]\nhooks_dir = ["/a", {prepend = true}]\n'}))


def test_podman_gets_only_the_hook_if_its_runtime_needs_arguments() -> None:
    proposal = podman.propose(SETTINGS._replace(config="/c"), Tree({}))
    assert "only the hook was added" in proposal.notes[0]
    assert "runtimes" not in applied(proposal, {})[podman.FILE]


@pytest.mark.parametrize("engine", [crio, podman])
def test_foreign_hook_file_is_refused(engine: Any) -> None:
    path = f"{engine.HOOKS}/gpushare.json"
    other = '{"version": "1.0.0", "hook": {"path": "/usr/bin/other"}}'
    with pytest.raises(ConfigError, match="runs another program; move it away"):
        engine.propose(SETTINGS._replace(hook_only=True), Tree({path: other}))
    assert engine.withdraw(path, other, None) == other
    with pytest.raises(ConfigError, match="not valid JSON"):
        engine.propose(SETTINGS._replace(hook_only=True), Tree({path: "{"}))


@pytest.mark.parametrize("engine", [crio, podman])
def test_edits_in_drop_in_survive_undo(engine: Any) -> None:
    after = configured(engine, {})
    mine = "[mine]\nx = 1 # y\n"
    edited = {**after, engine.FILE: after[engine.FILE] + mine}
    assert withdrawn(engine, edited, {}) == {engine.FILE: mine}
    again = configured(engine, edited, SETTINGS._replace(program="/opt/bin/gpushare-runtime"))
    assert again[engine.FILE].startswith(mine)


def test_engines_use_distinct_files() -> None:
    """Otherwise an undo of one engine would remove the entry of another."""
    every = [path for engine in ENGINES.values() for path in engine.paths(SETTINGS, Tree({}))]
    assert len(every) == len(set(every))


def schema(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((TREE / "tests/schemas" / name).read_text()))


@pytest.mark.parametrize("hook_only", [False, True])
@pytest.mark.parametrize("engine", [crio, podman])
def test_files_match_documented_format(engine: Any, hook_only: bool) -> None:
    settings = SETTINGS._replace(hook_only=hook_only)
    after = configured(engine, {}, settings)
    hooks = [path for path in after if path.startswith(f"{engine.HOOKS}/")]
    assert len(hooks) == (2 if hook_only or engine is podman else 0)
    for path in hooks:
        schema("oci-hook.json").validate(json.loads(after[path]))
    if engine is crio:
        schema("crio.json").validate(tomlkit.parse(after[crio.FILE]).unwrap())


@pytest.mark.parametrize(
    ("engine", "main"), [(crio, "/etc/crio/crio.conf"), (podman, "/etc/containers/containers.conf")]
)
def test_invalid_toml_is_named_and_kept(engine: Any, main: str) -> None:
    for path in (main, engine.FILE):
        with pytest.raises(ConfigError) as caught:
            engine.propose(SETTINGS._replace(hook_only=True), Tree({path: "[x\n"}))
        assert str(caught.value).startswith(f"{path}:1: not valid TOML")
    with pytest.raises(ConfigError, match="not valid TOML"):
        engine.withdraw(engine.FILE, "[x\n", None)


# docker: cases that test_configure.py lacks


@pytest.mark.parametrize("text", ["", " \n", "{}", '{"runtimes": null}', '{"runtimes": {}}'])
def test_docker_accepts_same_files_as_dockerd(text: str) -> None:
    after = configured(docker, {docker.FILE: text})
    assert json.loads(after[docker.FILE])["runtimes"]["gpushare"]["path"] == "/usr/bin/gpushare-runtime"
    left = docker.withdraw(docker.FILE, after[docker.FILE], UNKNOWN)
    assert left is not None and json.loads(left) == {}


# Committed examples


def test_snippets_match_configure() -> None:
    folder = engine_snippets.FOLDER
    there = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert there == engine_snippets.texts(), "run python -m tools.engine_snippets"


CASES: dict[str, tuple[Any, Settings, dict[str, str]]] = {
    "docker": (
        docker,
        SETTINGS._replace(default=True),
        {docker.FILE: '{\n  "dns": ["1.1.1.1"],\n  "debug": true\n}\n'},
    ),
    "containerd-1.7": (containerd, OLD, {MAIN: DEBIAN}),
    "containerd-2.1": (containerd, NEW, {MAIN: DEBIAN}),
    "containerd-2.1-kubeadm": (containerd, NEW, {MAIN: KUBEADM}),
    "containerd-hook-only": (containerd, NEW._replace(hook_only=True, config="/c.yaml"), {MAIN: KUBEADM}),
    "crio": (crio, SETTINGS, {}),
    "crio-hook-only": (crio, SETTINGS._replace(hook_only=True), {}),
    "podman": (podman, SETTINGS, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_dry_run_matches_golden_diff_and_undo_removes_it(name: str) -> None:
    """CRI-O's handler has no allowed_annotations: it refuses to start with an annotation that it does not know."""
    engine, settings, files = CASES[name]
    text = "".join(change.diff() for change in engine.propose(settings, Tree(files)).changes)
    path = GOLDEN / f"{name}.diff"
    if os.environ.get("GOLDEN_WRITE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs: GOLDEN_WRITE=1 writes it"
    assert withdrawn(engine, configured(engine, files, settings), files, settings) == files


def test_change_has_description_and_diff() -> None:
    assert Change("/a", None, "x").describe() == "create /a"
    assert Change("/a", "x", None).describe() == "remove /a"
    assert Change("/a", "x", "y").describe() == "change /a"
    assert Change("/a", "x", "y\n").diff() == "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\n\\ No newline at end of file\n+y\n"


def test_hook_timeout_exceeds_deadline() -> None:
    from gpushare.programs import deadline

    assert hookfiles._TIMEOUT_S > deadline.DEADLINE_S
