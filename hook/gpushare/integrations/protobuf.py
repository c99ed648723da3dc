"""Protobuf messages from a table, for the APIs that the integrations use.

    messages(package, table)  -> function: name of a message -> its class

The import raises ImportError if protobuf is missing. A container's start imports nothing of this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
}


def messages(package: str, table: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """`table`: message -> its fields as "type name" or "type name number"; without numbers they count from 1.
    type+: repeated; type*: map from string to type."""
    file = descriptor_pb2.FileDescriptorProto(name=f"gpushare/{package}.proto", package=package, syntax="proto3")
    for name, fields in table.items():
        described = file.message_type.add(name=name)
        for position, text in enumerate(fields, 1):
            kind, field, *number = text.split()
            _add_field(package, described, kind, field, int(number[0]) if number else position)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return functools.cache(
        lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
    )


def _add_field(package: str, to: Any, kind: str, name: str, number: int) -> None:
    field = to.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind.endswith("*"):  # protobuf encodes a map as repeated messages with a key and a value
        entry = to.nested_type.add(name=name.capitalize() + "Entry")
        entry.options.map_entry = True
        _add_field(package, entry, "string", "key", 1)
        _add_field(package, entry, kind[:-1], "value", 2)
        kind = f"{to.name}.{entry.name}+"
    if kind.endswith("+"):
        field.label, kind = _Field.LABEL_REPEATED, kind[:-1]
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind}"
