"""No engine: run runc or crun directly, with gpushare's hook in config.json or its runtime in front."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

from ..host import Node
from ..rootfs import OverlayRoot
from ..runc import Container, RuntimeFailed
from .base import Refused, Result, Want

_numbers = itertools.count(1)


class Bare:
    """`low_level`: runc or crun."""

    annotates = True
    restarts = False  # a bundle cannot be started twice

    def __init__(self, node: Node, directory: Path, image_root: Path, low_level: str, way: str) -> None:
        self.node = node
        self.way = way
        self.name = low_level
        # crun discards a hook's output; with gpushare-runtime in front, the output is redirected.
        self.shows_reason = (low_level, way) != ("crun", "hook")
        self._directory = directory
        self._image_root = image_root
        self._words = node.way(way) | ({"runtime": low_level} if way == "hook" else {})

    def _make(self, want: Want) -> BareContainer:
        place = self._directory / f"bare{next(_numbers)}"
        place.mkdir(parents=True)
        disk = OverlayRoot(place / "disk", self._image_root)

        def edit(spec: dict[str, Any]) -> None:
            spec["root"]["readonly"] = want.read_only
            for point in want.tmpfs:
                mount = {"destination": point, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev"]}
                spec["mounts"].append(mount)

        uid, _, gid = want.user.partition(":")
        return BareContainer(
            place,
            disk,
            Container(
                place,
                list(want.args),
                env=dict(want.env),
                annotations=dict(want.annotations),
                mounts=list(want.mounts),
                user=(int(uid), int(gid or uid)),
                rootfs=disk.path,
                edit=edit,
                **self._words,
            ),
        )

    def run(self, want: Want, timeout_s: float = 60) -> Result:
        one = self._make(want)
        try:
            code = one.container.run(timeout_s)
            return Result(code, one.container.stdout, one.container.stderr)
        except RuntimeFailed as failed:
            return Result(failed.code, "", failed.message)
        finally:
            one.remove()

    def start(self, want: Want) -> BareContainer:
        one = self._make(want)
        try:
            one.container.start()
        except RuntimeFailed as failed:
            one.remove()
            raise Refused(Result(failed.code, "", failed.message)) from None
        except BaseException:
            one.remove()
            raise
        return one

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


class BareContainer:
    """See base.Running."""

    def __init__(self, place: Path, disk: OverlayRoot, container: Container) -> None:
        self.container = container
        self._place = place
        self._disk = disk

    @property
    def id(self) -> str:
        return self.container.id

    @property
    def pid(self) -> int:
        return self.container.pid

    def exec(self, *args: str, user: str = "") -> Result:
        done = self.container.exec(*args, options=("--user", user) if user else ())
        return Result(done.returncode, done.stdout, done.stderr)

    def stop(self) -> None:
        self.container.kill()
        self.container.wait()

    def restart(self) -> None:
        raise NotImplementedError("a bundle has no life beyond one container")

    def remove(self) -> None:
        self.container.close()
        self._disk.close()
        shutil.rmtree(self._place, ignore_errors=True)

    def __enter__(self) -> BareContainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()
