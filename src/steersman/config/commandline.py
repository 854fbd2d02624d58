"""Turn a command line, and the file that it names, into one configuration (behaviour 1.3).

    argv --parse_arguments--> Arguments --+
                                          +--> flags over file --> platform defaults --> rules
    --config FILE ------load.py-----------+

Go-style flags: `--x=y`, `--x y`, `-v=2`, `-v 2`, `-v2`, `--flag`, `--`. Underscores in names are
dashes, as in all of Kubernetes. The commands in cli/commands/ act on the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from steersman.config.defaults import (
    HEALTHZ_PORT,
    METRICS_PORT,
    apply_defaults,
    apply_platform_defaults,
    in_mode,
    with_min_sync_period,
)
from steersman.config.errors import ConfigError, Invalid, UsageError
from steersman.config.features import gate_warnings, suggest
from steersman.config.flags import FLAGS, LOGGING, OWN
from steersman.config.flags_upstream import Flag
from steersman.config.go import (
    Duration,
    Quantity,
    parse_bool,
    parse_int,
    split_address,
    split_list,
    split_pairs,
    with_port,
)
from steersman.config.load import load
from steersman.config.rules import validate
from steersman.config.types import ZERO, ProxyConfig, VModule
from steersman.model.addresses import canonical_ip
from steersman.modes.specs import spec_of

Read: TypeAlias = Callable[[str], bytes]
Value: TypeAlias = (
    "str | bool | int | float | Duration | tuple[str, ...] | tuple[VModule, ...] | dict[str, bool]"
)
_Section = TypeVar("_Section", bound=msgspec.Struct)

_BESIDE_CONFIG: Final = LOGGING | OWN
"""Flags that apply although a file is given."""
_ALWAYS: Final = frozenset(
    {"config", "write-config-to", "cleanup", "cleanup-iptables", "init-only", "master"}
    | {"hostname-override", "help", "version", "dry-run"}
)
"""Flags that are not about the configuration, or override the file."""


class Arguments(msgspec.Struct, frozen=True):
    """A command line, parsed and typed."""

    values: dict[str, Value]
    """Values by the flag's name; lists and maps of repeated flags are joined."""
    positional: tuple[str, ...] = ()
    stopped: str = ""
    """`help` if that flag was found: the words after it were not read."""


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
        argv: the words, without the program's name.
        read: reads a file.
        extra: further flags to accept.
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


def default_config() -> ProxyConfig:
    """Return the configuration without any flag or file, before platform defaults."""
    return in_mode(apply_defaults(ProxyConfig()), "")


def reload_file(parsed: Parsed, *, read: Read | None = None, mode: str = "") -> Parsed:
    """Read the configuration file of a running process again, under the same command line.

    Args:
        parsed: the command line; without a file it is resolved again.
        read: reads a file.
        mode: the mode that runs, if it is not the configured one: defaults depend on it.

    Raises:
        ConfigError: the file is invalid; the previous configuration should stay in force.
    """
    return _resolve(parsed.values, parsed.arguments, read or read_file, mode)


# The words of a command line


def parse_arguments(argv: Sequence[str], flags: Mapping[str, Flag]) -> Arguments:
    """Parse and type a command line.

    Raises:
        UsageError: a flag is unknown, or its value is missing or of the wrong type.
    """
    values: dict[str, Value] = {}
    positional: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            positional += words
        elif word.startswith("-") and word != "-":
            flag, shown, text = _split(word, flags)
            if text is None:
                text = flag.optional_value or next(words, None)
            if text is None:
                raise UsageError(f"flag needs an argument: {shown}")
            old, value = values.get(flag.name), read_value(flag, shown, text)
            if isinstance(old, tuple) and isinstance(value, tuple):
                value = (*old, *value)  # both are of one flag
            elif isinstance(old, dict) and isinstance(value, dict):
                value = old | value
            values[flag.name] = value
            if flag.name == "help" and value:
                return Arguments(values, tuple(positional), "help")
        else:
            positional.append(word)
    return Arguments(values, tuple(positional))


def _split(word: str, flags: Mapping[str, Flag]) -> tuple[Flag, str, str | None]:
    """Return the flag of a word, how to show it, and its value if the word has one."""
    if word.startswith("--"):
        given, equals, text = word[2:].partition("=")
        name = given.replace("_", "-")
        if name not in flags:
            raise UsageError(f"unknown flag: --{given}{_nearest(name, flags)}")
        return flags[name], f"--{name}", text if equals else None
    flag = next((flag for flag in flags.values() if flag.short == word[1]), None)
    rest = word[2:]
    if flag is None:
        name = word[1:].partition("=")[0].replace("_", "-")
        hint = f" (did you mean -{word}?)" if name in flags else _nearest(name, flags)
        raise UsageError(f"unknown shorthand flag: {word[1]!r} in {word}{hint}")
    if flag.optional_value and rest and not rest.startswith("="):
        raise UsageError(f"{word}: -{flag.short} takes no value; give flags apart from each other")
    return flag, f"-{flag.short}, --{flag.name}", rest.removeprefix("=") if rest else None


def _nearest(name: str, flags: Mapping[str, Flag]) -> str:
    shown = {f"--{flag.name}": flag for flag in flags.values() if not flag.deprecated}
    return (len(name) > 1 and suggest(f"--{name}", shown)) or "; --help lists them all"


def read_value(flag: Flag, shown: str, text: str) -> Value:
    """Return the typed value of a flag; raise UsageError if its form is wrong."""
    try:
        return split_list(text) if flag.repeatable else READERS[flag.kind](text)
    except ValueError as error:
        raise UsageError(f'invalid argument "{text}" for "{shown}" flag: {error}') from error


def _ip(text: str) -> str:
    if text and canonical_ip(text) is None:
        raise ValueError(f"{text!r} is not a valid IP address")
    return text


def _ip_port(text: str) -> str:
    if not text or canonical_ip(text) is not None:
        return text
    halves = split_address(text)
    if halves is None:
        raise ValueError(f"{text!r} is not in a valid format (ip or ip:port)")
    host, port = halves
    if canonical_ip(host) is None:
        raise ValueError(f"{host!r} is not a valid IP address")
    parse_int(port, low=0, high=65535)
    return text


def _float32(text: str) -> float:
    value = float(text)
    if not -3.4e38 <= value <= 3.4e38:
        raise ValueError(f"{text!r} is not a finite number")
    return value


def _level(text: str) -> int:
    return parse_int(text, low=0)


READERS: Final[Mapping[str, Callable[[str], Value]]] = {
    "string": str,
    "strings": split_list,
    "bool": parse_bool,
    "int32": parse_int,
    "float32": _float32,
    "duration": Duration.parse,
    "ip": _ip,
    "ipport": _ip_port,
    "quantity": Quantity.parse,
    "mapStringBool": lambda text: {k: parse_bool(v) for k, v in split_pairs(text).items()},
    "pattern=N,...": lambda text: tuple(
        VModule(file_pattern=name, verbosity=_level(level))
        for name, level in split_pairs(text).items()
    ),
    "Level": _level,
    "version": lambda text: (
        text if text == "raw" or text.startswith("v") else str(parse_bool(text)).lower()
    ),
    "ProxyMode": str,
    "LocalMode": str,
}
"""Readers of values by the flag's kind; they raise ValueError with the reason."""


# Flags and file together


def _resolve(
    given: Mapping[str, Value], words: tuple[str, ...], read: Read, mode: str = ""
) -> Parsed:
    """Return the valid configuration of flags, and of the file that they name."""
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
    """Return a configuration with the fields that flags set."""
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
