"""`config check` and `config show`: text and an exit status, nothing done."""

from __future__ import annotations

import json
from typing import NamedTuple

from steersman.config.defaults import apply_platform_defaults
from steersman.config.errors import ConfigError
from steersman.config.features import gate_warnings
from steersman.config.load import load
from steersman.config.rules import validate
from steersman.config.types import ProxyConfig
from steersman.config.write import to_document, to_yaml
from steersman.model.addresses import without_password


class Answer(NamedTuple):
    """What a command says."""

    status: int
    """0 fine, 1 bad (when strict, also if there are warnings), 2 a flag that means nothing."""
    text: str


def check_config(name: str, data: bytes | str, *, strict: bool = False) -> Answer:
    """Say everything that is wrong with a configuration file, as the daemon would see it.

    `strict` refuses what is only warned of, and modes that upstream does not have.
    """
    try:
        loaded = load(data)
    except ConfigError as error:
        return Answer(1, f"{name}: error: {error}\n")
    config = apply_platform_defaults(loaded.config)
    warnings = [*loaded.warnings, *gate_warnings(config.feature_gates)]
    errors = validate(config, strict_upstream=strict)
    lines = [f"{name}: error: {error}" for error in errors]
    lines += [f"{name}: warning: {warning}" for warning in warnings]
    bad = bool(errors) or (strict and bool(warnings))
    if not bad:
        lines.append(f"{name}: ok, mode {config.mode}")
    return Answer(int(bad), "\n".join(lines) + "\n")


def show_config(config: ProxyConfig, output: str = "yaml") -> Answer:
    """Show the configuration in force, defaults and flags included, as `yaml` or `json`.

    Passwords in URLs are not shown: people paste this into tickets.
    """
    if output == "yaml":
        return Answer(0, without_password(to_yaml(config)))
    if output == "json":
        text = json.dumps(to_document(config), indent=2, ensure_ascii=False)
        return Answer(0, without_password(text) + "\n")
    return Answer(2, f"output {output!r}: give yaml or json\n")
