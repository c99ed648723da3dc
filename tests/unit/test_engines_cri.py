"""containerd and CRI-O get `--cri`, which declares the engine a CRI.

Entries of earlier versions are found and replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpushare.engines import configure, containerd, crio, docker, podman
from gpushare.engines.base import Settings
from gpushare.engines.host import Host

from tests.unit import configurehost

programs = configurehost.programs
OLD = {
    "containerd": ("runtime", containerd.FILE),
    "crio": ("runtime", crio.FILE),
    "containerd, hook": ("hook", containerd.BASE_SPEC),
    "crio, hook": ("hook", crio.HOOKS + "/gpushare.json"),
}


@pytest.mark.parametrize("case", OLD)
def test_old_entry_is_found_and_replaced(case: str, tmp_path: Path, programs: Path) -> None:
    way, path = OLD[case]
    engine: Any = {"containerd": containerd, "crio": crio}[case.partition(",")[0]]
    host = Host(str(tmp_path / "root"))
    settings = Settings(str(programs / "gpushare-runtime"), str(programs / "gpushare-hook"))
    settings = settings._replace(hook_only=way == "hook", engine_version="1.6" if engine is containerd else "")
    configure.configure(engine, settings, host)
    file = Path(host.at(path))
    new = file.read_text()
    assert configure.state(engine, settings, host).problem == ""
    file.write_text(new.replace("gpushare-runtime-cri", "gpushare-runtime").replace('"--cri",', ""))
    state = configure.state(engine, settings, host)
    assert state.configured and f"run `gpushare runtime configure {engine.NAME}` again" in state.problem
    assert f"systemctl restart {engine.NAME}" in state.problem
    assert configure.configure(engine, settings, host).next == f"systemctl restart {engine.NAME}"
    assert configure.state(engine, settings, host).problem == ""
    configure.undo(engine, settings, host)
    assert not file.exists()


def test_other_engines_get_no_cri_flag(programs: Path, tmp_path: Path) -> None:
    settings = Settings(str(programs / "gpushare-runtime"), str(programs / "gpushare-hook"))
    for engine in (docker, podman):
        for change in engine.propose(settings, Host(str(tmp_path))).changes:
            assert "cri" not in (change.after or "").replace(str(tmp_path), "")
