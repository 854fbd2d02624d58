"""Write YAML as upstream does, for `--write-config-to` and `config show`."""

from __future__ import annotations

from typing import Any

import yaml

from steersman.model.yaml_reader import is_text


def dump_yaml(document: dict[str, Any]) -> str:
    """Return a document as upstream writes it: keys sorted."""
    text: str = yaml.dump(
        document, Dumper=_Dumper, sort_keys=True, default_flow_style=False, width=1000
    )
    return text


class _Dumper(yaml.SafeDumper):
    """Writes as upstream does: lists are not indented, nothing is an alias."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Quote texts that read as something else; upstream's writer uses double quotes."""
    tag = "tag:yaml.org,2002:str"
    # other YAML 1.1 readers know dates and numbers of base 60, too
    resolved = dumper.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    plain = is_text(text) and resolved == tag
    return dumper.represent_scalar(tag, text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)
