import pytest

from steersman.config import ConfigError, default_config, load
from steersman.config.go import Duration
from steersman.config.load import parse_document
from steersman.config.types import ProxyConfig, VModule

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def config(body: str) -> ProxyConfig:
    loaded = load(HEAD + body)
    assert loaded.warnings == ()
    return loaded.config


def refusal(data: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        load(data)
    return str(caught.value)


def test_an_empty_document_is_the_defaults() -> None:
    assert load(HEAD).config == default_config()
    assert config("").sync_period == Duration.parse("30s")


def test_json_is_read_too() -> None:
    text = (
        '{"apiVersion":"kubeproxy.config.k8s.io/v1alpha1","kind":"KubeProxyConfiguration",'
        '\n\t"mode":"ipvs","ipvs":{"syncPeriod":"5s"}}'
    )
    loaded = load(text.encode())
    assert (loaded.config.mode, loaded.config.sync_period) == ("ipvs", Duration.parse("5s"))


def test_flow_style_yaml_is_not_taken_for_json() -> None:
    text = "{apiVersion: kubeproxy.config.k8s.io/v1alpha1, kind: KubeProxyConfiguration, mode: x}"
    assert load(text).config.mode == "x"


def test_a_byte_order_mark_is_skipped() -> None:
    assert load(b"\xef\xbb\xbf" + HEAD.encode()).warnings == ()


def test_null_is_the_zero_value() -> None:
    assert config("mode:\nipvs: null\nnodePortAddresses: [~]\n").node_port_addresses == ("",)


def test_numbers_may_stand_for_nanoseconds_and_quantities() -> None:
    got = config("logging: {flushFrequency: 1000000000, options: {json: {infoBufferSize: 5}}}\n")
    assert got.logging.flush_frequency == Duration.parse("1s")
    assert got.logging.options.json.info_buffer_size == "5"


def test_merge_keys_and_anchors() -> None:
    body = (
        "iptables: &p {syncPeriod: 7s, minSyncPeriod: 2s}\n"
        "ipvs: {<<: *p, minSyncPeriod: 3s}\n"
        "nftables: {<<: [*p, {syncPeriod: 1s}]}\n"
    )
    plain, _ = parse_document(body)
    assert isinstance(plain, dict)
    assert plain["ipvs"] == {"syncPeriod": "7s", "minSyncPeriod": "3s"}
    assert plain["nftables"] == {"syncPeriod": "7s", "minSyncPeriod": "2s"}
    assert str(config(f"mode: ipvs\n{body}").sync_period) == "7s"


def test_vmodule() -> None:
    got = config("logging: {vmodule: [{filePattern: a, verbosity: 3}]}\n")
    assert got.logging.vmodule == (VModule(file_pattern="a", verbosity=3),)


@pytest.mark.parametrize(
    ("body", "warning"),
    [
        ("mood: ipvs\n", 'unknown field "mood" (did you mean mode?)'),
        ("ipvs: {qwerty: 1}\n", 'unknown field "ipvs.qwerty"'),
        ("ipvs: {kind: 1}\n", 'unknown field "ipvs.kind"'),
        (  # it was a setting once
            "steersman: {failover: {doubt: 1m}}\n",
            'unknown field "steersman.failover.doubt"',
        ),
        (
            "logging: {vmodule: [{filePatern: a}]}\n",
            'unknown field "logging.vmodule[0].filePatern" (did you mean filePattern?)',
        ),
        ("mode: a\nmode: b\n", 'line 4: key "mode" already set in map'),
        ("---\nmode: b\n", "only the first of several YAML documents is used"),
    ],
)
def test_what_strictness_refuses_is_a_warning(body: str, warning: str) -> None:
    assert load(HEAD + body).warnings == (warning,)


def test_of_a_repeated_key_the_last_wins() -> None:
    assert load(HEAD + "mode: a\nmode: b\n").config.mode == "b"
    text = '{"apiVersion":"kubeproxy.config.k8s.io/v1alpha1","kind":"KubeProxyConfiguration",'
    loaded = load(text + '"mode":"a","mode":"b"}')
    assert loaded.config.mode == "b"
    assert loaded.warnings == ('key "mode" already set in map',)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("mode: 5\n", "failed to decode: mode: Expected `str`, got `int`"),
        ("oomScoreAdj: 1.5\n", "failed to decode: oomScoreAdj: Expected `int | null`, got `float`"),
        ("oomScoreAdj: 3000000000\n", "oomScoreAdj: Expected `int` <= 2147483647"),
        ("configSyncPeriod: soon\n", "configSyncPeriod: 'soon' is not a duration"),
        ("configSyncPeriod: true\n", "configSyncPeriod: expected a duration such as 30s"),
        ("configSyncPeriod: [1s]\n", "configSyncPeriod: expected a duration"),
        ("ipvs: [a]\n", "failed to decode: ipvs: Expected `object`, got `array`"),
        ("featureGates: {A: 'true'}\n", "failed to decode: featureGates[...]: Expected `bool`"),
        ("logging: {options: {text: {infoBufferSize: x}}}\n", "'x' is not a quantity"),
        ("logging: {vmodule: {a: b}}\n", "logging.vmodule: Expected `array`, got `object`"),
        ("a: &a [*a]\n", "failed to decode: yaml: line 3: 'a' holds itself by an alias"),
        ("a: " + "[" * 60 + "]" * 60 + "\n", "line 3: is nested too deeply"),
        ("a: " + "[" * 100_000, "line 3: is nested too deeply"),
        ("? [a]\n: b\n", "failed to decode: yaml: line 3: a key must be a scalar"),
        ("ipvs: {<<: 5}\n", "failed to decode: yaml: line 3: map merge requires"),
        ("oomScoreAdj: 09\n", "failed to decode: oomScoreAdj: Expected `int | null`, got `float`"),
        ("oomScoreAdj: 1" + "0" * 100 + "\n", "oomScoreAdj: Expected `int | null`, got `float`"),
        ("clientConnection: {qps: 1e999}\n", "clientConnection.qps: Expected `float`, got `str`"),
        ("clientConnection: {qps: .nan}\n", "nan is not a finite number"),
        ("clientConnection: {qps: -.Inf}\n", "-inf is not a finite number"),
        ("mode: !!int x\n", "'x' is not a whole number"),
        ("mode: !!float x\n", "'x' is not a number"),
        ("mode: *nowhere\n", "failed to decode: yaml: line 3: found undefined alias"),
        ("mode: 'a\n", "failed to decode: yaml: line 4: found unexpected end of stream"),
        ("mode: [a\n", "failed to decode: yaml: line 4: did not find expected"),
        ("mode: \ud800\n", "failed to decode: yaml:"),
        ("mode: \x00\n", "control characters are not allowed"),
    ],
)
def test_what_cannot_be_decoded_is_refused(body: str, error: str) -> None:
    assert error in refusal(HEAD + body)


def test_tagged_scalars_are_texts() -> None:
    assert config("mode: !!str 5\n").mode == "5"
    assert config("mode: !!bool maybe\n").mode == "maybe"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "Object 'Kind' is missing"),
        ("[]", "is a mapping, not a list"),
        ("5", "is a mapping, not a scalar"),
        ("kind: KubeProxyConfiguration", "Object 'apiVersion' is missing"),
        ("kind: [a]", "Object 'Kind' is missing"),
        (
            "kind: Pod\napiVersion: v1",
            'no kind "Pod" is registered for version "v1"; use kind KubeProxyConfiguration',
        ),
    ],
)
def test_the_kind_must_be_right(text: str, error: str) -> None:
    assert error in refusal(text)


def test_other_encodings_are_refused() -> None:
    assert refusal(b"mode: \xff") == "failed to decode: yaml: not UTF-8 at byte 6"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", True),
        ("OFF", False),
        ("0x10", 16),
        ("010", 8),
        ("1_000", 1000),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("2026-01-01", "2026-01-01"),
        ("1:30", "1:30"),
        ("~", None),
        ("'5'", "5"),
        ("y", "y"),
    ],
)
def test_scalars_are_those_of_yaml_1_1_without_dates_and_base_60(text: str, value: object) -> None:
    assert parse_document(f"a: {text}") == ({"a": value}, [])
