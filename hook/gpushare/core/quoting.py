r"""How text that is not ours is written in a line for people, logs and terminals (start path).

    shown(value)      -> str     "a \x24(b)": quoted and short, for a message
    quoted(text)      -> str     the same at any length
    shown_name(name)        -> str     a name as it is when nothing in it is special, else quoted
    setting(name, value) -> str  GPUSHARE_MEMORY="4Gi", for a variable or an annotation
    printable(text)   -> str     without control characters, for a column or a line of a table

An image, a pod, a user or a program chooses names, paths and values that our messages repeat, and a message may end up
in a file that a shell or a terminal interprets. A quoted value is inert there: it holds no quote, no `$`, no backtick
and no line break. The single quote is escaped as well, because the message around it may have an apostrophe.
JSON and metrics have their own escaping.
"""

from __future__ import annotations

_SPECIAL = frozenset("\"'\\$`")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-")
_LONGEST, _LONGEST_PATH = 80, 256  # characters; of longer values four fifths are shown


def _escaped(character: str) -> str:
    r"""\xNN of each byte in UTF-8; of a byte that was not UTF-8 (a lone surrogate, PEP 383), of that."""
    code = ord(character)
    data = bytes((code - 0xDC00,)) if 0xDC80 <= code <= 0xDCFF else character.encode("utf-8", "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in data)


def printable(text: str) -> str:
    """`text` on one line and without anything that a terminal interprets."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def quoted(text: str) -> str:
    """`text` in double quotes, inert in a shell, a log and a terminal."""
    if text.isprintable() and _SPECIAL.isdisjoint(text):
        return f'"{text}"'
    return '"' + "".join(c if c.isprintable() and c not in _SPECIAL else _escaped(c) for c in text) + '"'


def shown(value: object) -> str:
    """`value` quoted, shortened to what fits one line of a log. A number stays as it is."""
    if isinstance(value, (int, float)):
        return str(value)
    text = str(value)
    longest = _LONGEST_PATH if text.startswith("/") else _LONGEST
    if len(text) <= longest:
        return quoted(text)
    return f"{quoted(text[: longest * 4 // 5] + '...')} ({len(text)} characters)"


def shown_name(name: str) -> str:
    """A variable's or an annotation's name, which an image can choose too: quoted unless it is plain."""
    return name if _PLAIN.issuperset(name) and 0 < len(name) <= _LONGEST_PATH else shown(name)


def setting(name: str, value: object) -> str:
    """A variable or an annotation with its value."""
    return f"{shown_name(name)}={shown(value)}"
