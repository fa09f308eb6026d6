"""Message classes of open_inference.proto, made at run time.

Generated code would be tied to one version of protobuf's compiler, and would clash with a client's own copy of the same
messages in one process: these have a descriptor pool of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PROTO_FILE: Final = Path(__file__).with_name("open_inference.proto")
_PACKAGE: Final = "inference"
SERVICE: Final = f"{_PACKAGE}.GRPCInferenceService"

_LINE: Final = re.compile(
    r"""message\ (?P<message>\w+)\ \{ | oneof\ (?P<oneof>\w+)\ \{ | (?P<close>\})
    | rpc\ (?P<rpc>\w+)\((?P<asked>\w+)\)\ returns\ \((?P<answered>\w+)\)\ \{\}
    | (?P<repeated>repeated\ )? (?: map<string,\ (?P<map>\w+)> | (?P<type>\w+) )
      \ (?P<field>\w+)\ =\ (?P<number>\d+);""",
    re.VERBOSE,
)
_SKIPPED: Final = re.compile(r'(//.*|syntax = "proto3";|package \w+;|service \w+ \{|)')


@dataclass(frozen=True, slots=True)
class Rpc:
    """A unary call. Both classes are subclasses of google.protobuf's Message."""

    name: str
    request: Any
    response: Any


def load_rpcs(text: str | None = None) -> dict[str, Rpc]:
    """Read the calls of a .proto file's text, by name; None takes open_inference.proto."""
    file = FileDescriptorProto(name=PROTO_FILE.name, package=_PACKAGE, syntax="proto3")
    names = [
        (found["rpc"], found["asked"], found["answered"])
        for found in _parse(PROTO_FILE.read_text(encoding="utf-8") if text is None else text, file)
    ]
    pool = DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call,unused-ignore]

    def message(name: str) -> Any:
        return GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))

    return {name: Rpc(name, message(asked), message(answered)) for name, asked, answered in names}


def _parse(text: str, file: FileDescriptorProto) -> Iterator[re.Match[str]]:
    """Fill the file's messages and yield its rpc lines. Raises ValueError for what this subset does not have."""
    scopes: list[tuple[str, DescriptorProto | None]] = []  # full names; a oneof has its message's again
    for line in map(str.strip, text.splitlines()):
        if _SKIPPED.fullmatch(line):
            scopes += [("", None)] if line.startswith("service") else []
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"{PROTO_FILE.name}: cannot read {line!r}")
        scope, message = scopes[-1] if scopes else ("", None)
        if found["close"]:
            scopes.pop()
        elif found["rpc"]:
            yield found
        elif name := found["message"]:
            nested = file.message_type.add(name=name) if message is None else message.nested_type.add(name=name)
            scopes.append((f"{scope}.{name}", nested))
        elif message is None:
            raise ValueError(f"{PROTO_FILE.name}: {line!r} stands outside a message")
        elif name := found["oneof"]:
            message.oneof_decl.add(name=name)
            scopes.append((scope, message))
        else:
            _add_field(found, scope, message, is_choice=len(scopes) > 1 and scopes[-2][1] is message)


def _add_field(found: re.Match[str], scope: str, message: DescriptorProto, *, is_choice: bool) -> None:
    is_repeated = found["repeated"] or found["map"]
    field = message.field.add(
        name=found["field"],
        number=int(found["number"]),
        label=FieldDescriptorProto.LABEL_REPEATED if is_repeated else FieldDescriptorProto.LABEL_OPTIONAL,
    )
    if is_choice:
        field.oneof_index = len(message.oneof_decl) - 1
    if found["map"]:  # a map is a repeated message of its keys and values
        name = "".join(part.capitalize() for part in found["field"].split("_")) + "Entry"
        entry = message.nested_type.add(name=name)
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=FieldDescriptorProto.LABEL_OPTIONAL, type=_SCALARS["string"])
        value = entry.field.add(name="value", number=2, label=FieldDescriptorProto.LABEL_OPTIONAL)
        _set_type(value, found["map"], scope, message)
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}{scope}.{name}"
    else:
        _set_type(field, found["type"], scope, message)


_SCALARS: Final = {
    name.removeprefix("TYPE_").lower(): number
    for name, number in FieldDescriptorProto.Type.items()
    if name not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}


def _set_type(field: FieldDescriptorProto, kind: str, scope: str, message: DescriptorProto) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]  # type: ignore[assignment,unused-ignore]
    else:
        is_nested = any(nested.name == kind for nested in message.nested_type)
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}{scope if is_nested else ''}.{kind}"
