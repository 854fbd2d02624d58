"""A command line and a configuration file made into one configuration (behaviour 1.3).

Not here: doing anything about it; cli.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from steersman.config.arguments import Arguments, Value, parse_arguments
from steersman.config.convert import split_cidrs, to_internal
from steersman.config.defaults import (
    HEALTHZ_PORT,
    METRICS_PORT,
    apply_defaults,
    apply_platform_defaults,
    fast_by_default,
)
from steersman.config.errors import ConfigError, Invalid, UsageError
from steersman.config.features import gate_warnings
from steersman.config.flag import Flag
from steersman.config.flags import FLAGS, LOGGING, OWN
from steersman.config.go import Duration, with_port
from steersman.config.load import load
from steersman.config.rules import validate
from steersman.config.types import ZERO, KubeProxyConfiguration, ProxyConfig
from steersman.modes.specs import spec_of

Read = Callable[[str], bytes]
_S = TypeVar("_S", bound=msgspec.Struct)

_BESIDE_CONFIG: Final = LOGGING | OWN
"""Flags of the table's targets that hold although a file is given."""
_ALWAYS: Final = frozenset(
    {"config", "write-config-to", "cleanup", "cleanup-iptables", "init-only", "master"}
    | {"hostname-override", "help", "version", "dry-run"}
)
"""Flags that have nothing to do with the file, or beat it."""


class Parsed(msgspec.Struct, frozen=True):
    """What a command line asks for."""

    config: ProxyConfig
    """Complete and valid."""
    warnings: tuple[str, ...] = ()
    """Sentences to log once logging is set up."""
    config_file: str = ""
    """The file to watch, "" where there is none."""
    cleanup: bool = False
    init_only: bool = False
    dry_run: bool = False
    write_config_to: str = ""
    version: str = ""
    """"" where it was not asked for, else `true`, `raw` or a version to claim."""
    help: bool = False
    arguments: tuple[str, ...] = ()
    """Words that belong to no flag (refused unless they were allowed)."""
    values: dict[str, Value] = {}
    """Flags as given, by name: what `/flagz` shows, and those of `extra`."""


def read_file(path: str) -> bytes:
    """Read a configuration file; ConfigError where that fails."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(reason) from error


def parse_command_line(
    argv: Sequence[str],
    *,
    read: Read = read_file,
    extra: Sequence[Flag] = (),
    allow_arguments: bool = False,
) -> Parsed:
    """Make a configuration of a command line (without the program's name).

    `extra` are further flags to accept; their values are in `values`. Where help or the version
    is asked for, no file is read and nothing is validated.

    Raises:
        UsageError: the command line cannot be understood.
        Invalid: the configuration breaks rules; every one is listed.
        ConfigError: the file cannot be read or decoded.
    """
    arguments = parse_arguments(argv, {**FLAGS, **{flag.name: flag for flag in extra}})
    version = _text(arguments, "version").replace("false", "")
    if arguments.stopped or version:
        shown = Parsed(default_config(), help=bool(arguments.stopped), version=version)
        return replace(shown, values=arguments.values, arguments=arguments.positional)
    words = tuple(filter(None, arguments.positional))
    if words and not allow_arguments:
        raise UsageError(f"unexpected argument {words[0]!r}; every flag begins with two dashes")
    parsed = _resolve(arguments, read)
    if errors := validate(parsed.config):
        raise Invalid(errors)
    return parsed


def default_config() -> ProxyConfig:
    """The configuration where nothing is said, before platform defaults."""
    return to_internal(apply_defaults(KubeProxyConfiguration()))


def reload_file(parsed: Parsed, *, read: Read = read_file) -> Parsed:
    """Read the configuration file of a running process again, under the same command line.

    Raises:
        ConfigError: the file is bad; the old configuration should stay in force.
    """
    fresh = _resolve(Arguments(parsed.values, parsed.arguments), read)
    if errors := validate(fresh.config):
        raise Invalid(errors)
    return fresh


def _resolve(arguments: Arguments, read: Read) -> Parsed:
    given = arguments.values
    path = _text(arguments, "config")
    config, warnings = from_file(path, given, read) if path else (from_flags(given), ())
    config = apply_platform_defaults(_overrides(config, arguments))
    notes = [*_flag_warnings(given), *warnings, *gate_warnings(config.feature_gates)]
    return Parsed(
        config,
        tuple(notes),
        config_file=path,
        cleanup=bool(given.get("cleanup") or given.get("cleanup-iptables")),
        init_only=bool(given.get("init-only")),
        dry_run=bool(given.get("dry-run")),
        write_config_to=_text(arguments, "write-config-to"),
        arguments=arguments.positional,
        values=given,
    )


def _text(arguments: Arguments, name: str) -> str:
    return str(arguments.values.get(name, ""))


def from_file(
    path: str, given: Mapping[str, Value], read: Read
) -> tuple[ProxyConfig, tuple[str, ...]]:
    """Read a file and lay the flags that beat it over it; also say what there is to warn of."""
    try:
        loaded = load(read(path))
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    config = loaded.config
    own = {name: value for name, value in given.items() if name in _BESIDE_CONFIG}
    file_patterns = config.logging.vmodule
    config = _assign_all(config, own)
    if "vmodule" in own:
        joined = (*config.logging.vmodule, *file_patterns)
        config = replace(config, logging=replace(config.logging, vmodule=joined))
    return config, (*(f"{path}: {text}" for text in loaded.warnings), *_ignored(given))


def _ignored(given: Mapping[str, Value]) -> Iterator[str]:
    names = sorted(
        name
        for name in given
        if name in FLAGS and not FLAGS[name].deprecated and name not in _BESIDE_CONFIG | _ALWAYS
    )
    if names:
        listed = ", ".join(f"--{name}" for name in names)
        yield f"ignored because --config is given: {listed}"


def from_flags(given: Mapping[str, Value]) -> ProxyConfig:
    """The configuration of flags alone, before platform defaults."""
    config = _assign_all(default_config(), given)
    kind = "ipvs" if spec_of(config.mode).periods_section == "ipvs" else "iptables"
    period = given.get(f"{kind}-sync-period", config.sync_period)
    minimum = given.get(f"{kind}-min-sync-period")
    if "cluster-cidr" in given:
        cidrs = split_cidrs(str(given["cluster-cidr"]))
        config = replace(config, detect_local=replace(config.detect_local, cluster_cidrs=cidrs))
    asked = minimum if isinstance(minimum, Duration) else ZERO
    return replace(
        config,
        sync_period=period,
        min_sync_period=config.min_sync_period if minimum is None else minimum,
        steersman=fast_by_default(config.steersman, config.mode, asked),
        **_server_addresses(config, given),
    )


def _server_addresses(config: ProxyConfig, given: Mapping[str, Value]) -> dict[str, Any]:
    if given.get("write-config-to"):
        return {}
    healthz, metrics = config.healthz_bind_address, config.metrics_bind_address
    return {
        "healthz_bind_address": _address(healthz, given.get("healthz-port", HEALTHZ_PORT)),
        "metrics_bind_address": _address(metrics, given.get("metrics-port", METRICS_PORT)),
    }


def _address(address: str, port: Value) -> str:
    return with_port(address, port) if isinstance(port, int) and port else ""


def _overrides(config: ProxyConfig, arguments: Arguments) -> ProxyConfig:
    given = _text(arguments, "hostname-override")
    name = given.strip().lower()
    if given and not name:
        raise UsageError("empty hostname-override is invalid; give the node's name or leave it out")
    masters = arguments.values.get("master")
    block = config.steersman
    return replace(
        config,
        hostname_override=name or config.hostname_override,
        steersman=replace(block, api_servers=masters or block.api_servers),
    )


def _flag_warnings(given: Mapping[str, Value]) -> Iterator[str]:
    for name in given:
        if name in FLAGS and FLAGS[name].deprecated:
            yield f"flag --{name} is deprecated: {FLAGS[name].deprecated}"


def _assign_all(config: ProxyConfig, given: Mapping[str, Value]) -> ProxyConfig:
    for name, value in given.items():
        flag = FLAGS.get(name)
        if flag and flag.target and not (flag.kind == "ip" and not value):  # upstream: no change
            config = assign(config, flag.target, value)
    return config


def assign(section: _S, path: str, value: object) -> _S:
    """The same with one field, named by its path, changed."""
    name, _, rest = path.partition(".")
    inner = assign(getattr(section, name), rest, value) if rest else value
    return replace(section, **{name: inner})
