"""Decode objects from JSON, protobuf or YAML values; a malformed object becomes a Finding. No I/O.

No object raises an exception, so that one malformed object never affects others (behaviour 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from steersman.model import codes
from steersman.model.findings import Finding, Severity
from steersman.model.kube import KINDS, KubeObject
from steersman.source.framing import Message
from steersman.source.messages import OBJECTS
from steersman.source.protobuf import ProtobufError
from steersman.source.wire import decode_metadata

_DECODERS = {kind: msgspec.json.Decoder(type_) for kind, type_ in KINDS.items()}
_LIST_DECODERS: dict[str, msgspec.json.Decoder[list[KubeObject]]] = {
    kind: msgspec.json.Decoder(list[type_])  # type: ignore[valid-type]
    for kind, type_ in KINDS.items()
}
_RAW_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_CLUSTER_SCOPED = frozenset({"Node", "ServiceCIDR"})


def decode_object(kind: str, raw: bytes | msgspec.Raw) -> KubeObject | Finding:
    """Decode one object of a known kind, JSON or a Message; return a Finding if it is malformed."""
    if isinstance(raw, Message):
        try:
            return _checked(kind, OBJECTS[kind].decode(raw))
        except ProtobufError as error:
            meta = decode_metadata(raw)
            named = {"metadata": {"namespace": meta.namespace, "name": meta.name}}
            return _finding(kind, named, str(error))
    try:
        return _checked(kind, _DECODERS[kind].decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Decode it again without a type, to find its name.
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            value = None
        return _finding(kind, value, str(error))


def decode_value(kind: str, value: Any) -> KubeObject | Finding:
    """Convert an object parsed from YAML; return a Finding if it is malformed."""
    try:
        return _checked(kind, msgspec.convert(value, KINDS[kind], strict=True))
    except (msgspec.ValidationError, RecursionError) as error:
        return _finding(kind, value, str(error))


def decode_items(
    kind: str, raw: bytes | msgspec.Raw
) -> tuple[Sequence[KubeObject], Sequence[Finding]]:
    """Decode the JSON array of a list's items; malformed items become Findings.

    Raises:
        msgspec.DecodeError: it is not a JSON array at all.
    """
    try:
        objects = _LIST_DECODERS[kind].decode(raw)  # all at once, which is faster
    except (msgspec.ValidationError, UnicodeDecodeError):  # an item is malformed
        return partition(decode_object(kind, item) for item in _RAW_LIST.decode(raw))
    return partition(_checked(kind, obj) for obj in objects)


def partition(results: Iterable[KubeObject | Finding]) -> tuple[list[KubeObject], list[Finding]]:
    """Separate decoded objects from Findings, in order."""
    objects: list[KubeObject] = []
    findings: list[Finding] = []
    for result in results:
        if isinstance(result, Finding):
            findings.append(result)
        else:
            objects.append(result)
    return objects, findings


def _checked(kind: str, obj: KubeObject) -> KubeObject | Finding:
    """Return an object that has a name, or else a Finding."""
    meta = obj.metadata
    if meta.name and (meta.namespace or kind in _CLUSTER_SCOPED):
        return obj
    missing = "namespace" if meta.name else "name"
    return Finding(
        f"{kind} {meta.object_name}",
        f"metadata.{missing}",
        f"is missing; every {kind} needs one",
        Severity.ERROR,
        codes.MALFORMED,
    )


def _finding(kind: str, value: Any, message: str) -> Finding:
    """Describe a malformed object, with as much of its name as is well formed."""
    meta = value.get("metadata") if isinstance(value, dict) else None
    parts = (meta.get("namespace"), meta.get("name")) if isinstance(meta, dict) else ()
    name = "/".join(part for part in parts if isinstance(part, str) and part) or "(unnamed)"
    # msgspec's messages: "Expected `int`, got `str` - at `$.spec.ports[0].port`"
    reason, _, path = message.partition(" - at `")
    field = path.rstrip("`").removeprefix("$").lstrip(".")
    return Finding(
        f"{kind} {name}",
        field,
        f"{reason}; correct it: until then the last good version, if any, stays in force",
        Severity.ERROR,
        codes.MALFORMED,
    )
