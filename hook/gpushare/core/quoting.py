r"""Escape untrusted text for messages, logs and terminals (start path).

    shown(value)      -> str     "a \x24(b)": quoted and short, for a message
    quoted(text)      -> str     the same at any length
    shown_name(name)  -> str     a plain name unchanged, any other quoted
    setting(name, value) -> str  GPUSHARE_MEMORY="4Gi", for a variable or an annotation
    printable(text)   -> str     control characters escaped, for a column or a line of a table

Images, pods, users and programs choose names, paths and values that messages repeat, and a shell or a terminal may
interpret a message. A quoted value is inert there: it holds no quote, no `$`, no backtick and no line break. The
single quote is escaped as well, because the message around it may have an apostrophe.
JSON and metrics have their own escaping.
"""

from __future__ import annotations

_SPECIAL = frozenset("\"'\\$`")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-")
_LONGEST, _LONGEST_PATH = 80, 256  # characters; a longer value is cut to four fifths of this


def _escaped(character: str) -> str:
    r"""\xNN for each UTF-8 byte; for a lone surrogate (PEP 383), the original byte."""
    code = ord(character)
    data = bytes((code - 0xDC00,)) if 0xDC80 <= code <= 0xDCFF else character.encode("utf-8", "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in data)


def printable(text: str) -> str:
    """`text` on one line, with every character escaped that a terminal could interpret."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def quoted(text: str) -> str:
    """`text` in double quotes, inert in a shell, a log and a terminal."""
    if text.isprintable() and _SPECIAL.isdisjoint(text):
        return f'"{text}"'
    return '"' + "".join(c if c.isprintable() and c not in _SPECIAL else _escaped(c) for c in text) + '"'


def shown(value: object) -> str:
    """`value` quoted and shortened to fit one line of a log. Numbers stay unquoted."""
    if isinstance(value, (int, float)):
        return str(value)
    text = str(value)
    longest = _LONGEST_PATH if text.startswith("/") else _LONGEST
    if len(text) <= longest:
        return quoted(text)
    return f"{quoted(text[: longest * 4 // 5] + '...')} ({len(text)} characters)"


def shown_name(name: str) -> str:
    """The name of a variable or an annotation, quoted unless it is plain: an image can choose it."""
    return name if _PLAIN.issuperset(name) and 0 < len(name) <= _LONGEST_PATH else shown(name)


def setting(name: str, value: object) -> str:
    """`name="value"` for a variable or an annotation."""
    return f"{shown_name(name)}={shown(value)}"
