"""Replace /run and /etc in this process's mount namespace, for engines with fixed paths.

with DefaultPlaces(directory): /run is empty, /etc is a writable copy, the real ones stay unchanged
"""

from __future__ import annotations

from pathlib import Path

from ..rootfs import OverlayRoot, run


class DefaultPlaces:
    """Needs a private mount namespace, which every test run has (host.enter_private_mounts)."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._copies: list[OverlayRoot] = []
        self._mounted: list[str] = []
        try:
            for place in ("/etc", "/var/lib"):
                self._copies.append(OverlayRoot(directory / place.replace("/", "-"), Path(place)))
                self._mount(place, "--bind", str(self._copies[-1].path))
            self._mount("/run", "-t", "tmpfs", "-o", "size=64m,mode=755", "gpushare-test")
        except BaseException:
            self.close()
            raise

    def _mount(self, target: str, *words: str) -> None:
        run("mount", *words, target)
        self._mounted.append(target)

    def close(self) -> None:
        """Unmount, including mounts below; a second call does nothing."""
        while self._mounted:
            run("umount", "--lazy", self._mounted.pop())
        while self._copies:
            self._copies.pop().close()
