"""Laws of the configuration: any text is a configuration or a ConfigError, and round trips hold."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steersman.config import (
    ConfigError,
    check_config,
    configz,
    flagz,
    in_mode,
    load,
    parse_command_line,
    reload_plan,
    to_node_config,
    to_yaml,
    validate,
)
from steersman.config.arguments import parse_arguments, read_value
from steersman.config.defaults import apply_defaults, apply_platform_defaults
from steersman.config.flags import FLAGS
from steersman.config.go import Duration, Quantity, split_list
from steersman.config.help import show_value
from steersman.config.types import GROUP_VERSION, KIND, ProxyConfig
from steersman.model.inputs import NodeConfig
from steersman.modes.specs import SPECS
from tests.support.parts import examples

WORDS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["primary", "10.0.0.0/8", "fd00::/8", "1.2.3.4", "::", "1h", "0", "1e3", "on"]),
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS


def field_names(kind: Any) -> list[str]:
    names = []
    for field in msgspec.structs.fields(kind):
        names.append(field.encode_name)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            names += field_names(field.type)
    return names


NAMES = st.sampled_from(field_names(ProxyConfig)) | st.text(max_size=4)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=20,
)
relaxed = settings(
    deadline=None,  # machines are slow at times
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
HEAD = {"apiVersion": GROUP_VERSION, "kind": KIND}
DOCUMENTS = st.dictionaries(NAMES, TREES, max_size=6).map(lambda tree: {**HEAD, **tree})


def total(data: bytes | str) -> None:
    """Reading ends in a configuration that can be checked and shown, or in a ConfigError."""
    answer = check_config("f", data)
    try:
        config = load(data).config
    except ConfigError:
        assert answer.status == 1
        return
    assert answer.status == bool(validate(apply_platform_defaults(config)))
    json.loads(configz(config))
    load(to_yaml(config))
    if answer.status == 0:
        assert isinstance(to_node_config(apply_platform_defaults(config)), NodeConfig)


@given(st.binary(max_size=200))
@relaxed
def test_any_bytes(data: bytes) -> None:
    total(data)


@given(st.text(max_size=200))
@relaxed
def test_any_text_after_the_right_head(text: str) -> None:
    total(f"apiVersion: {GROUP_VERSION}\nkind: {KIND}\n{text}")


@given(st.text(alphabet="{}[]:,-&*a<?!|>'\"#\n \t~%@", max_size=60))
@relaxed
def test_any_yaml_punctuation(text: str) -> None:
    total(text)


@given(DOCUMENTS)
@relaxed
def test_any_yaml_document(tree: dict[str, Any]) -> None:
    total(yaml.safe_dump(tree, allow_unicode=True))


@given(DOCUMENTS)
@relaxed
def test_any_json_document(tree: dict[str, Any]) -> None:
    total(json.dumps(tree))


DURATIONS = st.integers(-(2**63) + 1, 2**63 - 1).map(Duration)
SPANS = st.integers(0, 2**62).map(Duration)
SIZES = st.integers(0, 10**9).map(lambda number: Quantity(str(number)))


def structs(kind: Any) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{f.name: values(f.type) for f in msgspec.structs.fields(kind)})


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field of a configuration; texts are printable, as files are."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=6) | WORDS_ASCII,
        bool: st.booleans(),
        int: st.integers(0, 1000),
        float: st.integers(0, 1000).map(float),
        Duration: SPANS,
        Quantity: SIZES,
    }
    if kind in plain:
        return plain[kind]
    arguments = [a for a in getattr(kind, "__args__", ()) if a is not Ellipsis]
    if type(None) in arguments:
        return st.none() | values(arguments[0])
    if getattr(kind, "__origin__", None) is tuple:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    if getattr(kind, "__origin__", None) is dict:
        return st.dictionaries(values(str), st.booleans(), max_size=2)
    return values(kind.__origin__)  # Annotated


WORDS_ASCII = st.sampled_from(["1e3", "0o7", "no", "~", "1:30", "2026-01-01", "<<", "=", "- a"])
CONFIGS = structs(ProxyConfig).map(apply_defaults).map(lambda config: in_mode(config, config.mode))


@given(CONFIGS)
@relaxed
def test_what_is_written_is_read_again(config: ProxyConfig) -> None:
    mode = config.mode if config.mode in SPECS else "iptables"
    config = in_mode(config, mode)
    assert in_mode(apply_defaults(config), mode) == config
    assert load(to_yaml(config)).config == config


@given(CONFIGS, CONFIGS)
@relaxed
def test_a_reload_leaves_only_what_needs_a_restart(old: ProxyConfig, new: ProxyConfig) -> None:
    new = msgspec.structs.replace(new, mode=old.mode)
    after = reload_plan(old, new).config
    assert reload_plan(old, after).needs_restart == []
    assert reload_plan(after, new).applied_live == []
    assert reload_plan(after, new).needs_restart == reload_plan(old, new).needs_restart


@given(CONFIGS)
@relaxed
def test_defaults_are_idempotent(config: ProxyConfig) -> None:
    once = apply_platform_defaults(config)
    assert apply_platform_defaults(once) == once
    assert apply_defaults(apply_defaults(config)) == apply_defaults(config)


@given(DURATIONS)
@relaxed
def test_durations_survive_writing(duration: Duration) -> None:
    assert Duration.parse(str(duration)) == duration


@given(st.text(max_size=20))
@relaxed
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    for read in (Duration.parse, Quantity.parse, split_list):
        with suppress(ValueError):
            assert isinstance(read(text), Duration | Quantity | tuple)


@given(st.lists(st.text(st.characters(exclude_characters=',"'), max_size=5), min_size=2))
@relaxed
def test_lists_survive_joining(items: list[str]) -> None:
    assert split_list(",".join(items)) == tuple(items)
    assert split_list(",".join(f'"{item}"' for item in items)) == tuple(items)


ARGUMENT = st.one_of(
    st.text(max_size=10),
    st.sampled_from([f"--{name}" for name in FLAGS]),
    st.tuples(st.sampled_from(sorted(FLAGS)), WORDS).map(lambda pair: f"--{pair[0]}={pair[1]}"),
)


@given(st.lists(ARGUMENT, max_size=6))
@relaxed
def test_any_command_line(argv: list[str]) -> None:
    try:
        parsed = parse_command_line(argv, read=lambda _: json.dumps(HEAD).encode())
    except ConfigError:
        return
    assert flagz(parsed.values)
    if not (parsed.help or parsed.version):
        assert validate(parsed.config) == []


@given(st.sampled_from(sorted(FLAGS)), st.data())
@relaxed
def test_a_flags_shown_value_reads_as_the_same(name: str, data: st.DataObject) -> None:
    flag = FLAGS[name]
    text = {
        "bool": st.sampled_from(["true", "F"]),
        "int32": st.integers(-5, 5).map(str),
        "Level": st.integers(0, 5).map(str),
        "duration": SPANS.map(str),
        "mapStringBool": st.sampled_from(["A=true,B=false", ""]),
        "pattern=N,...": st.sampled_from(["a=1,b=2", ""]),
        "float32": st.integers(0, 5).map(str),
        "quantity": st.just("4k"),
        "version": st.sampled_from(["raw", "true"]),
        "ip": st.just("1.2.3.4"),
        "ipport": st.just("[::1]:5"),
    }.get(flag.kind, st.text(st.characters(exclude_characters='",'), max_size=5))
    value = parse_arguments([f"--{name}={data.draw(text)}"], FLAGS).values[name]
    shown = show_value(flag, value)
    if flag.kind == "strings":
        shown = shown[1:-1]
    assert read_value(flag, name, shown) == value
