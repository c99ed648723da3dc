"""Refusals that list the containers that hold a device (start path).

    held_by(holders)     -> ", held by a (4 GiB), b (all)"      "" if no container holds any
    HeldError            CapacityError whose text gets the containers' names when it is read

Names are in files of the engines, which take long to read. `any` makes a refusal for each full device, also when
another one is free, and under the lease lock. So no name is looked up before the refusal is shown.
"""

from collections.abc import Iterable, Sequence
from typing import Optional

from ..core import constants
from ..core.errors import CapacityError

LISTED = 4  # containers in a refusal


class HeldError(CapacityError):
    """`containers`: ids, of which the texts may contain the short forms."""

    def __init__(self, message: str, hint: str = "", brief: str = "", containers: Iterable[str] = ()) -> None:
        super().__init__(message, hint, brief)
        self.containers = tuple(
            one for one in dict.fromkeys(containers) if constants.short(one) in f"{message} {brief}"
        )
        self._names: Optional[dict[str, str]] = None

    @property
    def message(self) -> str:
        return self._named(self.draft)

    @property
    def brief(self) -> str:
        return self._named(self.draft_brief)

    def _named(self, text: str) -> str:
        """`5d429606a152 (train, 4 GiB)` for `5d429606a152 (4 GiB)`: a container as `gpushare list` names it."""
        if self._names is None:
            from ..state import names

            self._names = names.of_ids(self.containers)
        import re

        for container_id, name in self._names.items():
            short = constants.short(container_id)
            first, alone = f"{short} ({name}, ", f"{short} ({name})"
            text = re.sub(
                rf"\b{re.escape(short)}\b( \()?",
                lambda match, first=first, alone=alone: first if match[1] else alone,  # type: ignore[misc]
                text,
            )
        return text


def held_by(holders: Sequence[tuple[str, str]]) -> str:
    """`holders`: (container id, amount)."""
    more = f" and {len(holders) - LISTED} more" if len(holders) > LISTED else ""
    listed = ", ".join(f"{constants.short(name)} ({size})" for name, size in holders[:LISTED])
    return f", held by {listed}{more}" if holders else ""


def ids(holders: Sequence[tuple[str, object]]) -> list[str]:
    """The containers that `held_by` lists."""
    return [name for name, _ in holders[:LISTED]]
