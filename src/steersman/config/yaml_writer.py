"""Write YAML in block style, as upstream does: answers of commands, and configurations.

PyYAML writes single values only: that of a list of 5,000 Services takes it 4 s and 140 MB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import yaml

from steersman.model.yaml_reader import is_text

_PLAIN = re.compile(
    r"[A-Za-z]{6,}[\w.-]*"
    r"|[A-Za-z0-9][\w.-]*[ /][\w./ -]*\w"
    r"|(?:\d+\.){3}\d+(?::\d+)?",
    re.ASCII,
)
"""Most texts that need no quotes: words that are longer than those that read as something else,
names with a namespace, sentences, addresses. To ask PyYAML takes 80 us each."""


def dump_yaml(document: dict[str, Any]) -> str:
    """Return a document as upstream writes it: keys sorted."""
    return "".join(f"{line}\n" for line in yaml_lines(document, sort_keys=True))


def yaml_lines(value: Any, indent: str = "", *, sort_keys: bool = False) -> Iterator[str]:
    """Yield the lines of a value of JSON types."""
    match value:
        case dict() if value:
            for key, item in sorted(value.items()) if sort_keys else value.items():
                if isinstance(item, dict | list | tuple) and item:
                    yield f"{indent}{_scalar(key)}:"
                    inner = f"{indent}  " if isinstance(item, dict) else indent
                    yield from yaml_lines(item, inner, sort_keys=sort_keys)
                else:
                    yield f"{indent}{_scalar(key)}: {_scalar(item)}"
        case list() | tuple() if value:
            for item in value:
                lines = yaml_lines(item, f"{indent}  ", sort_keys=sort_keys)
                yield f"{indent}- {next(lines).lstrip(' ')}"
                yield from lines
        case _:
            yield f"{indent}{_scalar(value)}"


def _scalar(value: Any) -> str:
    """Return a text, number, truth value, None, or an empty list or mapping on one line."""
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else _text(value)
    # A float may have an exponent, which YAML writes otherwise than JSON.
    return _written(value) if isinstance(value, float) else json.dumps(value)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that read as something else; upstream's writer uses double quotes."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    tag = "tag:yaml.org,2002:str"
    # other YAML 1.1 readers know dates and numbers of base 60, too
    resolved = dumper.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    plain = is_text(text) and resolved == tag and text.isprintable()
    return dumper.represent_scalar(tag, text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def _written(value: str | float) -> str:
    # What cannot be printed is escaped, as it would change the screen.
    unicode = str(value).isprintable()
    text: str = yaml.dump(value, Dumper=_Dumper, width=1 << 30, allow_unicode=unicode)
    return text.removesuffix("...\n").removesuffix("\n")


_text = lru_cache(1 << 14)(_written)
