"""The installer applies the profile that the node's label names; the node's programs are called in this process.

tests/integration/test_installer.py does the same with the image's programs in a node's root.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from gpushare.config.config import load_config
from gpushare.core.errors import ConfigError

from tests.support.apiserver import NODE, NodeServer, check_strictly
from tests.unit.test_node_life import load

SMALL = "version: 1\npolicy: {max_memory: 8Gi}\n"
LARGE = "version: 1\npolicy: {max_memory: 64Gi}\n"
Follow = Callable[[str], tuple[str, str]]
KEPT = "; the node keeps its configuration\n"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[NodeServer]:
    with NodeServer(tmp_path / "account", {}) as made:
        yield made


@pytest.fixture
def install(tmp_path: Path, api: NodeServer, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """install.py over a node below tmp_path. `refresh` fails while the file `no-driver` exists."""
    module = load()
    (tmp_path / "profiles").mkdir()
    for name, text in (("small", SMALL), ("large", LARGE)):
        (tmp_path / f"profiles/{name}.yaml").write_text(text)
    places = {"HOST": tmp_path / "node", "PROFILES": tmp_path / "profiles", "ACCOUNT": api.account}
    for name, path in places.items():
        monkeypatch.setattr(module, name, str(path))

    def run(program: str, *words: str, quiet: bool) -> str:
        assert quiet
        if words == ("refresh",) and (tmp_path / "no-driver").exists():
            raise module.Failed("no driver is loaded")
        if words[:2] == ("config", "check"):
            try:
                load_config(module.on_node(words[2]))
            except ConfigError as error:
                raise module.Failed(str(error).replace(module.on_node(words[2]), words[2])) from None
        return ""

    monkeypatch.setattr(module, "run", run)
    variables = {"GPUSHARE_NODE": NODE, "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": api.port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return module


@pytest.mark.parametrize("killed_in", [1, 2, 3, 4])
def test_killed_removal_leaves_no_programs_that_look_complete(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_in: int
) -> None:
    """The next installer copies all of them, and the next removal removes the rest."""
    bundle, folder = tmp_path / "bundle", tmp_path / "node/opt/gpushare"
    for name in ("bin/gpushare", "bin/gpushare-hook", "shim/libcuda.so.1"):
        (bundle / name).parent.mkdir(parents=True, exist_ok=True)
        (bundle / name).write_text(name)
    monkeypatch.setattr(install, "BUNDLE", str(bundle))
    monkeypatch.setattr(install, "gpushare", lambda *words: {"items": [], "steps": []})
    monkeypatch.setattr(install, "restart", lambda done: None)
    monkeypatch.setattr(install, "PROC", str(tmp_path))
    remove, calls = shutil.rmtree, []

    def killed(path: str, ignore_errors: bool = False) -> None:
        calls.append(path)
        if len(calls) < killed_in:
            return remove(path, ignore_errors)
        for one in [path for path in Path(path).rglob("gpushare*") if path.is_file()]:
            one.unlink()
        raise KeyboardInterrupt

    install.point(install.copy())
    with monkeypatch.context() as now, pytest.raises(KeyboardInterrupt):
        now.setattr(shutil, "rmtree", killed)
        install.remove()
        raise KeyboardInterrupt  # fewer calls
    install.point(install.copy())
    assert install.digest(str(folder / "current")) == install.digest(str(bundle))
    with monkeypatch.context() as now, pytest.raises(KeyboardInterrupt):
        calls.clear()
        now.setattr(shutil, "rmtree", killed)
        install.remove()
        raise KeyboardInterrupt
    install.remove()
    assert not folder.exists()


@pytest.fixture
def follow(install: ModuleType, api: NodeServer, capsys: pytest.CaptureFixture[str]) -> Follow:
    """follow(label) -> (the node's configuration afterwards, the printed lines)."""
    profile = install.Profile()

    def done(label: str) -> tuple[str, str]:
        api.labels = {install.LABEL: label} if label else {"other": "label"}
        before = install.contents(install.CONFIG)
        capsys.readouterr()
        changed = profile.follow()
        printed = capsys.readouterr()
        after = install.contents(install.CONFIG)
        assert changed == (before != after)
        return after.decode(), printed.out + printed.err

    return done


def test_label_chooses_and_changes_the_profile(install: ModuleType, follow: Follow, tmp_path: Path) -> None:
    assert follow("") == ("", "")  # the installer's own configuration stays
    assert follow("small") == (SMALL, "profile small is applied\n")
    assert follow("small") == (SMALL, "")
    assert follow("large") == (LARGE, "profile large is applied\n")
    (tmp_path / "profiles/large.yaml").write_text(SMALL)
    assert follow("large") == (SMALL, "profile large is applied\n")
    assert install.is_ours(install.checksum(install.CONFIG))  # the installer may replace or remove it


@pytest.mark.parametrize(
    ("labels", "applied"),
    [
        ({"nvidia.com/device-plugin.config": "small"}, SMALL),
        ({"nvidia.com/device-plugin.config": "small", "gpushare.io/profile": "large"}, LARGE),
        ({"nvidia.com/device-plugin.config": "a100-40gb"}, ""),  # of NVIDIA's plugin only
        ({"nvidia.com/device-plugin.config": ""}, ""),
    ],
)
def test_label_of_nvidia_s_plugin_chooses_a_profile(
    install: ModuleType, api: NodeServer, labels: dict[str, str], applied: str
) -> None:
    api.labels = labels
    assert install.Profile().follow() is bool(applied)
    assert install.contents(install.CONFIG).decode() == applied


def test_certificates_without_key_identifiers_are_accepted(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    check_strictly(monkeypatch)
    assert follow("small") == (SMALL, "profile small is applied\n")


def test_impossible_profile_keeps_the_configuration(
    install: ModuleType, api: NodeServer, follow: Follow, tmp_path: Path
) -> None:
    """Each reason is printed once."""
    follow("small")
    lines = {
        "tiny": f'label {install.LABEL}="tiny": the profiles are large, small',
        "": f'the node lost its label {install.LABEL}="small"',
        "../small": f'label {install.LABEL}="../small": the profiles are large, small',
    }
    for label, line in lines.items():
        assert follow(label) == (SMALL, f"gpushare: {line}{KEPT}")
        assert follow(label) == (SMALL, "")
    (tmp_path / "profiles/large.yaml").write_text("version: 1\npolicy: {max_memory: lots}\n")
    text, line = follow("large")
    assert text == SMALL and line.startswith('gpushare: profile "large": large.yaml:2: policy.max_memory: "lots"')
    assert line.endswith(KEPT)
    (tmp_path / "profiles/large.yaml").write_text(LARGE)
    (tmp_path / "no-driver").touch()
    assert follow("large") == (SMALL, f'gpushare: profile "large": no driver is loaded{KEPT}')
    assert install.read(install.APPLIED) == "small" and install.is_ours(install.checksum(install.CONFIG))
    (tmp_path / "no-driver").unlink()
    api.problem = 403
    text, line = follow("large")
    assert text == SMALL and line.startswith(f"gpushare: API server: GET /api/v1/nodes/{NODE}: 403 ")
    api.problem = 0
    config = tmp_path / "node/etc/gpushare/config.yaml"
    config.write_text(SMALL + "# edited\n")
    assert "config.yaml was edited on the node; delete it there" in follow("large")[1]
    config.unlink()
    assert follow("large")[0] == LARGE


def test_first_profile_that_fails_leaves_no_file(install: ModuleType, follow: Follow, tmp_path: Path) -> None:
    (tmp_path / "no-driver").touch()
    assert follow("small") == ("", f'gpushare: profile "small": no driver is loaded{KEPT}')
    assert not (tmp_path / "node/etc/gpushare/config.yaml").exists() and not install.read(install.APPLIED)


def test_killed_change_is_still_the_installer_s(
    install: ModuleType, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod is killed at each write of a change; the next pod applies the profile."""

    class Killed(BaseException):
        pass

    write = install.write
    for last in range(4):
        follow("small")
        left = [last]

        def some(path: str, data: bytes, left: list[int] = left) -> None:
            if not left[0]:
                raise Killed
            left[0] -= path.endswith(("sha256", "profile", "config.yaml"))
            write(path, data)

        monkeypatch.setattr(install, "write", some)
        with pytest.raises(Killed):
            follow("large")
        monkeypatch.setattr(install, "write", write)
        assert install.is_ours(install.checksum(install.CONFIG))
        assert follow("large")[0] == LARGE


def test_node_without_profiles_asks_no_server(
    install: ModuleType, api: NodeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUSHARE_NODE")
    assert not install.Profile().follow() and api.calls == []


def test_plugin_runs_when_an_engine_has_accepted_it(install: ModuleType) -> None:
    """Before that the plugin has its lock too, for example where the engine has no NRI."""
    lock = Path(install.on_node(install.PLUGIN_LOCK))
    assert not install.plugin_runs()
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not install.plugin_runs()
        for line, engine in (("registered", ""), ("registered containerd", "containerd"), ("registered cri-o", "crio")):
            file.seek(0)
            file.truncate()
            file.write(f"{line}\n")  # the plugin of an earlier version names no engine: it is restarted soon
            file.flush()
            assert install.plugin_runs() == engine
    assert not install.plugin_runs()
