"""What the test API server holds: objects, resourceVersions, their history, selectors."""

from __future__ import annotations

import base64
import bisect
import itertools
import json
import random
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
Key = tuple[str, str]


@dataclass(frozen=True)
class Kind:
    kind: str
    api_version: str
    path: str
    bookmark: Object
    """What a bookmark's object holds beside its metadata: Go's zero values."""


KINDS = {
    kind.kind: kind
    for kind in (
        Kind("Service", "v1", "/api/v1/services", {"spec": {}, "status": {"loadBalancer": {}}}),
        Kind(
            "EndpointSlice",
            "discovery.k8s.io/v1",
            "/apis/discovery.k8s.io/v1/endpointslices",
            {"addressType": "", "endpoints": None, "ports": None},
        ),
        Kind("Node", "v1", "/api/v1/nodes", {"spec": {}, "status": {}}),
        Kind("Pod", "v1", "/api/v1/pods", {"spec": {}, "status": {}}),
        Kind("Namespace", "v1", "/api/v1/namespaces", {"spec": {}, "status": {}}),
        Kind(
            "ServiceCIDR",
            "networking.k8s.io/v1",
            "/apis/networking.k8s.io/v1/servicecidrs",
            {"spec": {}, "status": {}},
        ),
    )
}


@dataclass(frozen=True)
class Change:
    version: int
    kind: str
    before: Object | None
    after: Object | None


@dataclass(frozen=True)
class Selector:
    """The forms of label and field selectors that are used: `!key`, `key`, `a=b`, `a!=b`."""

    labels: str = ""
    fields: str = ""

    def matches(self, obj: Object) -> bool:
        meta = obj["metadata"]
        labels = meta.get("labels") or {}
        return all(_term(term, labels.get) for term in _terms(self.labels)) and all(
            _term(term, lambda path: _field(obj, path)) for term in _terms(self.fields)
        )

    def __bool__(self) -> bool:
        return bool(self.labels or self.fields)


def _terms(text: str) -> list[str]:
    return [term.strip() for term in text.split(",") if term.strip()]


def _term(term: str, get: Callable[[str], Any]) -> bool:
    if "!=" in term:
        name, _, value = term.partition("!=")
        return bool((get(name) or "") != value)
    if "=" in term:
        name, _, value = term.replace("==", "=").partition("=")
        return bool((get(name) or "") == value)
    return get(term[1:]) is None if term.startswith("!") else get(term) is not None


def _field(obj: Object, path: str) -> Any:
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def key_of(obj: Object) -> Key:
    meta = obj["metadata"]
    return str(meta.get("namespace") or ""), str(meta["name"])


_MIDDLE = 1 << 40
_APART = 1_000_000
"""More than the changes of one life."""


@dataclass
class World:
    version: int = 100
    lives: int = 0
    """Restores so far."""
    compacted: int = 0
    """Watches from before this version are refused with 410."""
    objects: dict[str, dict[Key, Object]] = field(
        default_factory=lambda: {kind: {} for kind in KINDS}
    )
    history: list[Change] = field(default_factory=list)
    pages: dict[tuple[int, str], list[Object]] = field(default_factory=dict)
    """Lists under way, by version and kind."""
    listeners: list[Callable[[Change], None]] = field(default_factory=list)
    """Told of each change: the servers of this world, as several share one etcd."""

    def put(self, obj: Object) -> Change:
        kind = obj["kind"]
        self.version += 1
        key = key_of(obj)
        before = self.objects[kind].get(key)
        old = before["metadata"] if before else {}
        meta = {
            "name": key[1],
            **({"namespace": key[0]} if key[0] else {}),
            "uid": old.get("uid") or str(uuid.uuid4()),
            "resourceVersion": str(self.version),
            "creationTimestamp": old.get("creationTimestamp") or _now(),
        }
        given = {k: v for k, v in obj["metadata"].items() if k != "resourceVersion"}
        head = {"kind": kind, "apiVersion": KINDS[kind].api_version}
        after = {**head, **obj, "metadata": {**meta, **given}}
        self.objects[kind][key] = after
        return self._record(Change(self.version, kind, before, after))

    def delete(self, kind: str, key: Key) -> Change | None:
        before = self.objects[kind].pop(key, None)
        if before is None:
            return None
        self.version += 1
        return self._record(Change(self.version, kind, before, None))

    def compact(self) -> None:
        """Forget the history: older resourceVersions and continue tokens are expired."""
        self.compacted = self.version
        self.history.clear()
        self.pages.clear()

    def restore(self, dice: random.Random) -> None:
        """Begin another life, at resourceVersions below or above those of all lives before.

        If the versions of two lives overlap, a client of the first can resume in the second and
        miss changes, and nothing shows that to any client.
        """
        self.lives += 1
        self.restart(_MIDDLE + dice.choice([-1, 1]) * self.lives * _APART)

    def restart(self, version: int) -> None:
        """Begin another life: same objects, another history of resourceVersions."""
        self.version = version
        for kind in KINDS:
            for obj in list(self.objects[kind].values()):
                self.put(obj)
        self.compact()

    def select(self, kind: str, selector: Selector) -> list[Object]:
        found = (obj for obj in self.objects[kind].values() if selector.matches(obj))
        return sorted(found, key=key_of)

    def since(self, version: int) -> Iterable[Change]:
        first = bisect.bisect_right(self.history, version, key=lambda change: change.version)
        return itertools.islice(self.history, first, None)

    def _record(self, change: Change) -> Change:
        self.history.append(change)
        for tell in self.listeners:
            tell(change)
        return change


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def watch_event(change: Change, selector: Selector) -> Object | None:
    """What a watch with this selector sees of a change."""
    was = change.before if change.before and selector.matches(change.before) else None
    now = change.after if change.after and selector.matches(change.after) else None
    if now is not None:
        return {"type": "MODIFIED" if was is not None else "ADDED", "object": now}
    if was is None:
        return None
    meta = {**was["metadata"], "resourceVersion": str(change.version)}
    return {"type": "DELETED", "object": {**was, "metadata": meta}}


def bookmark(kind: Kind, version: int, *, initial_end: bool = False) -> Object:
    meta: Object = {"resourceVersion": str(version)}
    if initial_end:
        meta["annotations"] = {"k8s.io/initial-events-end": "true"}
    head = {"kind": kind.kind, "apiVersion": kind.api_version}
    return {"type": "BOOKMARK", "object": {**head, "metadata": meta, **kind.bookmark}}


def continue_token(version: int, last: Key) -> str:
    start = "/".join(part for part in last if part) + "\0"
    token = {"v": "meta.k8s.io/v1", "rv": version, "start": start}
    text = json.dumps(token, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def read_token(token: str) -> tuple[int, str]:
    padded = token + "=" * (-len(token) % 4)
    value = json.loads(base64.urlsafe_b64decode(padded))
    return int(value["rv"]), str(value["start"])


REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    406: "NotAcceptable",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


def status(code: int, message: str = "", *, details: Object | None = None) -> Object:
    reason = REASONS.get(code, "Unknown")
    answer: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    answer |= {"message": message or reason, "reason": reason}
    if details is not None:
        answer["details"] = details
    return {**answer, "code": code}


def read_objects(path: Path) -> list[Object]:
    """The objects of a YAML or JSON file, Lists taken apart."""
    data = path.read_bytes()
    if path.suffix == ".json":  # a large world takes seconds to be read as YAML
        documents = [json.loads(data)]
    else:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        documents = [document for document in yaml.load_all(data, loader) if document]
    return [obj for document in documents for obj in document.get("items") or [document]]
