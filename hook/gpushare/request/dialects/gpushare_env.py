"""Our own dialect: GPUSHARE_* variables and gpushare.io/ annotations, one row each.

    read(bundle, inventory)                 -> Request | None
    refuse_unknown(bundle)                  GPUSHARE_ names that mean nothing, and annotations for another container

In the Request, Selection("any", count=0) means that no device was named, and Selection("void") that the container
wants to be left alone; request.resolve turns both into something definite.

In a pod an annotation reaches every container. So `<container>.gpushare.io/memory` is for that container, and an
unscoped one counts only for containers that name a device themselves: a sidecar must not get a GPU by accident.
Runs on the start path.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Optional

from ...core import constants
from ...core.errors import RequestError
from ...core.model import Bundle, Inventory, Request, Selection
from ...core.quantity import amounts, percents, wrong
from ...core.quoting import setting, shown, shown_name
from . import Env, nvidia, one_value, parse_devices

UNNAMED = Selection("any", count=0)
VOID = Selection("void")
_OTHER_VARIABLES = frozenset((constants.ENV_LOG, constants.ENV_TRACE, *constants.ALLOCATED))  # ours, but no rows
_PREFIX = "GPUSHARE_"
_UUIDS = ("GPU-", "MIG-")  # how the driver's uuids begin
_UUID_LENGTH = 40


class Found(NamedTuple):
    """One value and the name under which it was found."""

    name: str
    value: str


def _word(choices: dict[str, Any]) -> Callable[[str, str, Inventory], Any]:
    """Return a parser for one of these words."""

    def parse(name: str, value: str, inventory: Inventory) -> Any:
        word = value.strip().lower()
        if word not in choices:
            raise wrong(name, value, "unknown value", f"write {', '.join(choices)}")
        return choices[word]

    return parse


def _devices(name: str, value: str, inventory: Inventory) -> Selection:
    if not value.strip():
        return UNNAMED
    return parse_devices(name, value, inventory, any_allowed=True) or VOID


def _backends(name: str, value: str, inventory: Inventory) -> str:
    """Parse `auto`, or one or more backends separated by commas."""
    words = tuple(dict.fromkeys(word.strip().lower() for word in value.split(",")))
    if words != ("auto",) and not set(words) <= set(constants.BACKENDS):
        raise wrong(name, value, "unknown value", f"write auto, or one or several of {', '.join(constants.BACKENDS)}")
    return ",".join(words)


# variable -> (field of Request, parser)
ROWS: dict[str, tuple[str, Callable[[str, str, Inventory], Any]]] = {
    constants.ENV_DEVICES: ("selection", _devices),
    constants.ENV_MEMORY: ("memory", lambda name, value, inventory: amounts(name, value)),
    constants.ENV_COMPUTE: ("compute", lambda name, value, inventory: percents(name, value)),
    constants.ENV_COMPUTE_MODE: ("compute_mode", _word({"hard": "hard", "soft": "soft"})),
    constants.ENV_PRIORITY: ("priority", _word({"normal": 0, "high": 1, "0": 0, "1": 1})),
    constants.ENV_BACKEND: ("backend", _backends),
    constants.ENV_OVERSUBSCRIBE: (
        "oversubscribe",
        _word({"1": True, "0": False, "true": True, "false": False, "yes": True, "no": False}),
    ),
}


# Prefixes of our variables and of common misspellings. A bare GPUSHARE would match too much: the launcher searches the
# text of config.json for these, and the path of our hook is in there.
_BEGINNINGS = tuple(dict.fromkeys(f"GPUSHARE{sign}{name[len(_PREFIX) :][:3]}" for sign in ("", "-") for name in ROWS))
PREFIXES = (_PREFIX, "GPU_SHARE", *_BEGINNINGS)


_BEGINNING = len("GPUSHAREMEM")


def _near(word: str, known: str) -> bool:
    """Return whether `word` is a misspelling of `known`: at most two letters differ, or `word` is its beginning
    (GPUSHARE_MEM). Case, _ and - do not count."""
    word, known = (text.upper().replace("_", "").replace("-", "") for text in (word, known))
    if word == known or (len(word) >= _BEGINNING and known.startswith(word)):
        return True
    if abs(len(word) - len(known)) > 2:
        return False
    row = list(range(len(known) + 1))
    for i, a in enumerate(word, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(known, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    return row[-1] <= 2


def _meant(word: str, known: Iterable[str]) -> str:
    """Return the known name of which `word` is a misspelling; "" if there is none."""
    return next((name for name in known if _near(word, name)), "")


def _unknown(env: Env) -> list[tuple[str, str]]:
    """Return GPUSHARE_* variables that gpushare does not define."""
    return [
        (name, value)
        for name, value in env
        if name[: len(_PREFIX)].upper() == _PREFIX
        and name not in ROWS
        and name not in _OTHER_VARIABLES
        and not name.startswith((constants.ENV_CDI_PREFIX, constants.ENV_CLAIM_PREFIX))
    ]


def _misspelt(env: Env) -> list[tuple[str, str]]:
    """Return variables with a misspelt GPUSHARE_ prefix."""
    return [(name, value) for name, value in env if name.upper().startswith(PREFIXES) and name[:9].upper() != _PREFIX]


def _refuse_misspelt(env: Env, annotations: dict[str, str], container: str) -> None:
    """Refuse misspelt names: a misspelt limit must not become no limit."""
    for name, value in _unknown(env) + _misspelt(env):
        meant = _meant(name, ROWS)
        if meant:
            raise wrong(name, value, "unknown name", f"did you mean {meant}?")
    known_keys = {*constants.ANNOTATIONS.values(), *constants.MEMORY_ENDS, constants.APPLIED_ANNOTATION}
    for key, value in annotations.items():
        scope, prefix, rest = key.rpartition(constants.ANNOTATION_PREFIX)
        if prefix and scope in ("", f"{container}.") and prefix + rest not in known_keys:
            meant = _meant(prefix + rest, (*constants.ANNOTATIONS.values(), *constants.MEMORY_ENDS))
            hint = (
                f"did you mean {shown_name(scope + meant)}?"
                if meant
                else f"use {', '.join((*constants.ANNOTATIONS.values(), *constants.MEMORY_ENDS))}"
            )
            raise wrong(key, value, "unknown annotation", hint)


def refuse_unknown(bundle: Bundle) -> None:
    """Refuse unknown GPUSHARE_* variables beside a request: GPUSHARE_MEM=4Gi was meant as a limit."""
    for name, value in _unknown(bundle.env):
        raise wrong(name, value, "unknown name", f"use {', '.join(ROWS)}")
    suffixes = tuple("." + key for key in (*constants.ANNOTATIONS.values(), *constants.MEMORY_ENDS))
    for name, value in () if bundle.container_name else bundle.annotations.items():
        if name.endswith(suffixes):
            raise wrong(name, value, "the engine does not name this container", "leave out the prefix")


def _from_cdi(env: Env, value: Optional[str]) -> Optional[Found]:
    """Return the devices that CDI gave, as one value of GPUSHARE_DEVICES. That variable, `value`, may only name the
    same devices: the user requested these from the engine, and a variable must neither add nor remove any."""
    given = [Found(name, text.strip()) for name, text in env if name.startswith(constants.ENV_CDI_PREFIX)]
    if not given:
        return None
    for one in given:  # an image can set such a variable too, but it cannot know a uuid of this host
        if one.value != "any" and not (one.value.startswith(_UUIDS) and len(one.value) == _UUID_LENGTH):
            hint = "leave it out, or use --device gpushare.io/share=any"
            raise wrong(one.name, one.value, "not set by a CDI device of gpushare", hint)
    found = Found(given[0].name, ",".join(dict.fromkeys(item.value for item in given)))
    if value is not None and value.strip() and value.strip() != found.value:
        raise RequestError(
            f"{constants.ENV_DEVICES}={shown(value)} and {setting(found.name, found.value)}, which CDI has set, "
            "contradict",
            f"leave out {constants.ENV_DEVICES}, or the CDI device",
        )
    return found


_OF_MEMORY = (constants.ANNOTATIONS[constants.ENV_MEMORY], *constants.MEMORY_ENDS)


def _key_for(key: str, annotations: dict[str, str], container: str, unscoped: bool) -> str:
    """Return the annotation that counts for this container. If one of the three for memory is scoped, all are."""
    together = _OF_MEMORY if key in _OF_MEMORY else (key,)
    if container and any(f"{container}.{one}" in annotations for one in together):
        return f"{container}.{key}"
    return key if unscoped else ""


def _find(
    env: Env, annotations: dict[str, str], container: str, unscoped: bool, inventory: Inventory
) -> dict[str, Found]:
    """Return every GPUSHARE_* variable that is set, and every gpushare.io/ annotation for this container."""
    found: dict[str, Found] = {}
    allocated: dict[str, str] = {}
    giver: Any = None  # the module that parses what Kubernetes gave the container
    if any(name.startswith(constants.ENV_CLAIM_PREFIX) for name, _ in env):
        from . import claims as giver

        allocated = giver.read(env, inventory)
    elif any(name in constants.ALLOCATED for name, _ in env):
        from . import kubelet_allocation as giver

        allocated = giver.read(env)
    for variable, key in constants.ANNOTATIONS.items():
        value = one_value(variable, [value for name, value in env if name == variable])
        cdi = _from_cdi(env, value) if variable == constants.ENV_DEVICES else None
        source, value = (variable, value) if cdi is None else cdi
        chosen = _key_for(key, annotations, container, unscoped)
        said = annotations.get(chosen)
        if allocated:
            given = giver.combined(variable, ((source, value), (chosen, said)), allocated)
            if given:
                found.update({key: Found(*pair) for key, pair in given.items()})
                continue
        if value is not None and said is not None and value.strip() != said.strip():
            raise RequestError(
                f"{setting(source, value)} and annotation {setting(chosen, said)} contradict", "keep one of them"
            )
        if value is not None:
            found[variable] = Found(source, value)
        elif said is not None:
            found[variable] = Found(chosen, said)
    for key in constants.MEMORY_ENDS:
        chosen = _key_for(key, annotations, container, unscoped)
        said = annotations.get(chosen)
        if said is not None:
            found[key] = Found(chosen, said)
    if allocated:
        found = {key: Found(*pair) for key, pair in giver.with_ends(found, allocated).items()}
    return found


def read(bundle: Bundle, inventory: Inventory) -> Optional[Request]:
    """Return the request by GPUSHARE_* variables and gpushare.io/ annotations; None if there is none."""
    env, annotations, container = bundle.env, bundle.annotations, bundle.container_name
    _refuse_misspelt(env, annotations, container)
    found = _find(env, annotations, container, not container, inventory)
    ignored = []
    if container:
        everything = _find(env, annotations, container, True, inventory)
        named = found.get(constants.ENV_DEVICES)
        if (named and named.value.strip()) or nvidia.names_device(bundle) or bundle.injected:
            found = everything
        else:
            ignored = [
                f"{setting(item.name, item.value)}: container {shown(container)} names no device"
                for variable, item in everything.items()
                if variable not in found
            ]
    if not found:
        return None
    low, high = (found.get(key) for key in constants.MEMORY_ENDS)
    whole = found.pop(constants.ENV_MEMORY, None) if low or high else None  # the same, and the ends are the source
    fields = {
        ROWS[variable][0]: ROWS[variable][1](*item, inventory) for variable, item in found.items() if variable in ROWS
    }
    if low or high:
        from . import memory_ends

        fields["memory"] = memory_ends.read(low, high, whole)
    conditions = found.get(constants.ENV_ALLOCATED_DEVICES)
    if conditions:
        fields["selection"] = fields["selection"]._replace(conditions=_devices(*conditions, inventory).conditions)
    fields.setdefault("selection", UNNAMED)
    return Request(
        dialect="own",
        sources=tuple((item.name, item.value) for item in found.values()),
        ignored=tuple(ignored),
        **fields,
    )
