"""Write a configuration out again: as `--write-config-to` and `/configz` do."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import yaml

from steersman.config.convert import to_v1alpha1
from steersman.config.document import is_plain_text
from steersman.config.go import Duration
from steersman.config.types import GROUP_VERSION, KIND, ProxyConfig, Steersman
from steersman.model.addresses import without_password

_OMIT_EMPTY = frozenset(
    {"featureGates", "vmodule", "splitStream", "windowsRunAsService", "steersman"}
)
"""Fields that are left out where they say nothing; upstream writes all others."""


def to_document(config: ProxyConfig) -> dict[str, Any]:
    """The configuration as plain data of a v1alpha1 document, fields in upstream's order."""
    return {"kind": KIND, "apiVersion": GROUP_VERSION, **plain(to_v1alpha1(config))}


def to_yaml(config: ProxyConfig) -> str:
    """The file that `--write-config-to` writes: keys sorted, as upstream's."""
    text: str = yaml.dump(
        to_document(config), Dumper=_Dumper, sort_keys=True, default_flow_style=False, width=1000
    )
    return text


def configz(config: ProxyConfig) -> bytes:
    """The body of `/configz`."""
    document = {GROUP_VERSION.partition("/")[0]: to_document(config)}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return without_password(text).encode()


def plain(section: msgspec.Struct) -> dict[str, Any]:
    """A part of a configuration as plain data."""
    result = {}
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if field.encode_name in _OMIT_EMPTY and (not value or value == Steersman()):
            continue
        result[field.encode_name] = _plain(value)
    return result


def _plain(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return plain(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return str(value) if isinstance(value, Duration | str) else value


class _Dumper(yaml.SafeDumper):
    """Lists indented as upstream's writer does: not at all."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # texts that read as something else need quotes; upstream's writer takes double ones
    tag = "tag:yaml.org,2002:str"
    plain = is_plain_text(text) and _yaml_11_text(dumper, text)
    return dumper.represent_scalar(tag, text, style=None if plain else '"')


def _yaml_11_text(dumper: _Dumper, text: str) -> bool:
    """Whether other YAML 1.1 readers, who know dates and base 60, see a text."""
    resolved = dumper.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return bool(resolved == "tag:yaml.org,2002:str")


_Dumper.add_representer(str, _text)
