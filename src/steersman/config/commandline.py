"""Turn a command line, and the file that it names, into one configuration (behaviour 1.3).

    argv --arguments.py--> Arguments -----+
                                          +--> flags over file --> platform defaults --> rules
    --config FILE ------load.py-----------+

The commands in cli/commands/ act on the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from steersman.config.arguments import Value, parse_arguments
from steersman.config.defaults import (
    HEALTHZ_PORT,
    METRICS_PORT,
    apply_platform_defaults,
    default_config,
    in_mode,
    with_min_sync_period,
)
from steersman.config.errors import ConfigError, Invalid, UsageError
from steersman.config.features import gate_warnings
from steersman.config.flags import FLAGS, LOGGING, OWN
from steersman.config.flags_upstream import Flag
from steersman.config.go import Duration, with_port
from steersman.config.load import load
from steersman.config.rules import validate
from steersman.config.types import ZERO, ProxyConfig
from steersman.modes.specs import spec_of

Read: TypeAlias = Callable[[str], bytes]
_Section = TypeVar("_Section", bound=msgspec.Struct)

_BESIDE_CONFIG: Final = LOGGING | OWN
"""Flags that apply although a file is given."""
_ALWAYS: Final = frozenset(
    {"config", "write-config-to", "cleanup", "cleanup-iptables", "init-only", "master"}
    | {"hostname-override", "help", "version", "dry-run"}
)
"""Flags that are not about the configuration, or override the file."""


class Parsed(msgspec.Struct, frozen=True):
    """What a command line asks for."""

    config: ProxyConfig
    """Complete and valid."""
    warnings: tuple[str, ...] = ()
    """Sentences to log when logging is set up."""
    config_file: str = ""
    """The file to watch; "" if there is none."""
    cleanup: bool = False
    init_only: bool = False
    dry_run: bool = False
    write_config_to: str = ""
    version: str = ""
    """`true`, `raw` or a version to claim; "" if it was not asked for."""
    help: bool = False
    arguments: tuple[str, ...] = ()
    """Words that belong to no flag."""
    values: dict[str, Value] = {}
    """Flags as given, by name: for `/flagz`, and those of `extra`."""


def parse_command_line(
    argv: Sequence[str],
    *,
    read: Read | None = None,
    extra: Sequence[Flag] = (),
    allow_arguments: bool = False,
) -> Parsed:
    """Return the configuration of a command line.

    If help or the version is asked for, no file is read and nothing is validated.

    Args:
        allow_arguments: accept words that belong to no flag.

    Raises:
        UsageError: the command line cannot be understood.
        Invalid: the configuration breaks rules; every one is listed.
        ConfigError: the file cannot be read or decoded.
    """
    arguments = parse_arguments(argv, {**FLAGS, **{flag.name: flag for flag in extra}})
    version = _text(arguments.values, "version").replace("false", "")
    if arguments.stopped or version:
        return Parsed(
            default_config(),
            version=version,
            help=bool(arguments.stopped),
            arguments=arguments.positional,
            values=arguments.values,
        )
    words = tuple(filter(None, arguments.positional))
    if words and not allow_arguments:
        raise UsageError(f"unexpected argument {words[0]!r}; every flag begins with two dashes")
    return _resolve(arguments.values, arguments.positional, read or read_file)


def read_file(path: str) -> bytes:
    """Return the bytes of a configuration file; raise ConfigError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(reason) from error


def reload_file(parsed: Parsed, *, mode: str = "") -> Parsed:
    """Read the configuration file of a running process again, under the same command line.

    Args:
        parsed: the command line; without a file it is resolved again.
        mode: the mode that runs, if it is not the configured one: defaults depend on it.

    Raises:
        ConfigError: the file is invalid; the previous configuration should stay in force.
    """
    return _resolve(parsed.values, parsed.arguments, read_file, mode)


def _resolve(
    given: Mapping[str, Value], words: tuple[str, ...], read: Read, mode: str = ""
) -> Parsed:
    path = _text(given, "config")
    if path:
        config, warnings = from_file(path, given, read, mode)
    else:
        config, warnings = from_flags({**given, "proxy-mode": mode} if mode else given), ()
    # These two override the file, too.
    name, hostname = _text(given, "hostname-override"), config.hostname_override
    if name and not (hostname := name.strip().lower()):
        raise UsageError("empty hostname-override is invalid; give the node's name or leave it out")
    masters = given.get("master") or config.steersman.api_servers
    config = apply_platform_defaults(
        replace(
            config,
            hostname_override=hostname,
            steersman=replace(config.steersman, api_servers=masters),
        )
    )
    if errors := validate(config):
        raise Invalid(errors)
    deprecated = (
        f"flag --{name} is deprecated: {FLAGS[name].deprecated}"
        for name in given
        if name in FLAGS and FLAGS[name].deprecated
    )
    return Parsed(
        config,
        (*deprecated, *warnings, *gate_warnings(config.feature_gates)),
        config_file=path,
        cleanup=bool(given.get("cleanup") or given.get("cleanup-iptables")),
        init_only=bool(given.get("init-only")),
        dry_run=bool(given.get("dry-run")),
        write_config_to=_text(given, "write-config-to"),
        arguments=words,
        values=dict(given),
    )


def _text(given: Mapping[str, Value], name: str) -> str:
    return str(given.get(name, ""))


def from_file(
    path: str, given: Mapping[str, Value], read: Read, mode: str = ""
) -> tuple[ProxyConfig, tuple[str, ...]]:
    """Return the configuration of a file under the flags that override it, and warnings."""
    try:
        loaded = load(read(path), mode)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    config = loaded.config
    own = {name: value for name, value in given.items() if name in _BESIDE_CONFIG}
    file_patterns = config.logging.vmodule
    config = _assign_all(config, own)
    if "vmodule" in own:
        joined = (*config.logging.vmodule, *file_patterns)
        config = replace(config, logging=replace(config.logging, vmodule=joined))
    warnings = [f"{path}: {text}" for text in loaded.warnings]
    counted = {name for name in given if name in FLAGS and not FLAGS[name].deprecated}
    if ignored := sorted(counted - _BESIDE_CONFIG - _ALWAYS):
        listed = ", ".join(f"--{name}" for name in ignored)
        warnings.append(f"ignored because --config is given: {listed}")
    return config, tuple(warnings)


def from_flags(given: Mapping[str, Value]) -> ProxyConfig:
    """Return the configuration of flags alone, before platform defaults."""
    # Periods and masqueradeAll are settings of each mode, in the section of the one that runs.
    config = _assign_all(in_mode(default_config(), _text(given, "proxy-mode")), given)
    spec = spec_of(config.mode)
    if "masquerade-all" in given:
        path = f"{spec.masquerade_section}.masquerade_all"
        config = assign(config, path, given["masquerade-all"])
    # Upstream's flags have two pairs of periods: ipvs has its own, all other modes share one.
    kind = "ipvs" if spec.periods_section == "ipvs" else "iptables"
    for flag, field in (("sync-period", "sync_period"), ("min-sync-period", "min_sync_period")):
        if f"{kind}-{flag}" in given:
            config = assign(config, f"{spec.periods_section}.{field}", given[f"{kind}-{flag}"])
    asked = given.get(f"{kind}-min-sync-period")
    minimum = asked if isinstance(asked, Duration) else ZERO
    block = with_min_sync_period(config.steersman, config.mode, minimum)
    config = replace(config, steersman=block)
    if given.get("write-config-to"):
        return config
    healthz, metrics = config.healthz_bind_address, config.metrics_bind_address
    return replace(
        config,
        healthz_bind_address=_address(healthz, given.get("healthz-port", HEALTHZ_PORT)),
        metrics_bind_address=_address(metrics, given.get("metrics-port", METRICS_PORT)),
    )


def _address(address: str, port: Value) -> str:
    return with_port(address, port) if isinstance(port, int) and port else ""


def _assign_all(config: ProxyConfig, given: Mapping[str, Value]) -> ProxyConfig:
    for name, value in given.items():
        flag = FLAGS.get(name)
        if flag and flag.target and not (flag.kind == "ip" and not value):  # upstream: no change
            config = assign(config, flag.target, value)
    return config


def assign(section: _Section, path: str, value: object) -> _Section:
    """Return a section with one field, given by its dotted path, changed."""
    name, _, rest = path.partition(".")
    inner = assign(getattr(section, name), rest, value) if rest else value
    return replace(section, **{name: inner})
