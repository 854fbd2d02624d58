import pytest

from steersman.config.go import (
    Duration,
    Quantity,
    parse_bool,
    parse_int,
    seconds,
    split_address,
    split_list,
    split_pairs,
    with_port,
)


@pytest.mark.parametrize(
    ("text", "nanoseconds", "shown"),
    [
        ("0", 0, "0s"),
        ("-0", 0, "0s"),
        ("30s", 30_000_000_000, "30s"),
        ("60s", 60_000_000_000, "1m0s"),
        ("15m", 900_000_000_000, "15m0s"),
        ("24h", 86_400_000_000_000, "24h0m0s"),
        ("2h22m", 8_520_000_000_000, "2h22m0s"),
        ("1.5h", 5_400_000_000_000, "1h30m0s"),
        (".5s", 500_000_000, "500ms"),
        ("1.s", 1_000_000_000, "1s"),
        ("250ms", 250_000_000, "250ms"),
        ("1.5ms", 1_500_000, "1.5ms"),
        ("10us", 10_000, "10µs"),
        ("10µs", 10_000, "10µs"),
        ("7ns", 7, "7ns"),
        ("+5s", 5_000_000_000, "5s"),
        ("-5s", -5_000_000_000, "-5s"),
        ("-1h0m0.5s", -3_600_500_000_000, "-1h0m0.5s"),
        ("1m1ms", 60_001_000_000, "1m0.001s"),
    ],
)
def test_durations_are_read_and_written_as_go_does(text: str, nanoseconds: int, shown: str) -> None:
    duration = Duration.parse(text)
    assert duration == nanoseconds
    assert str(duration) == shown


@pytest.mark.parametrize(
    "text", ["", "5", "s", ".s", "5 s", "5s ", "--5s", "+-5s", "1d", "1h-5m", "5S", "٣s"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        Duration.parse(text)


@pytest.mark.parametrize("text", ["300000000h", "9" * 400 + "ns", "9300000000000000000ns"])
def test_a_duration_has_63_bits(text: str) -> None:
    with pytest.raises(ValueError, match="292 years"):
        Duration.parse(text)


def test_a_duration_in_seconds() -> None:
    assert seconds(1.5) == Duration.parse("1.5s")
    assert seconds(1.5).seconds == 1.5
    assert repr(seconds(1.5)) == "Duration('1.5s')"


@pytest.mark.parametrize(("text", "value"), [("T", True), ("1", True), ("False", False)])
def test_booleans(text: str, value: bool) -> None:
    assert parse_bool(text) is value


@pytest.mark.parametrize("text", ["", "yes", "tRUE", "2"])
def test_what_is_no_boolean_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither true nor false"):
        parse_bool(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-999", -999),
        ("+7", 7),
        ("0x1F", 31),
        ("0b101", 5),
        ("0o17", 15),
        ("017", 15),
        ("-017", -15),
        ("1_000", 1000),
        ("2147483647", 2**31 - 1),
        ("-2147483648", -(2**31)),
    ],
)
def test_integers(text: str, value: int) -> None:
    assert parse_int(text) == value


@pytest.mark.parametrize("text", ["", "a", "1.0", "08", "0x", "1__0", "1_", "٣", "9" * 5000])
def test_what_is_no_integer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        parse_int(text)


def test_an_integer_has_bounds() -> None:
    with pytest.raises(ValueError, match="not between"):
        parse_int("2147483648")


@pytest.mark.parametrize("text", ["0", "512", "4k", "1Mi", "1.5G", "1e3", "-2", "5E", "100m"])
def test_quantities(text: str) -> None:
    assert Quantity.parse(text) == text


@pytest.mark.parametrize("text", ["", "k", "1K", "1 k", "1ki", "1e", "0x1"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        Quantity.parse(text)


@pytest.mark.parametrize(
    ("text", "some"), [("0", False), ("0Ki", False), ("0e5", False), ("1", True)]
)
def test_a_quantity_may_be_nothing(text: str, some: bool) -> None:
    assert bool(Quantity.parse(text)) is some


@pytest.mark.parametrize(
    ("text", "halves"),
    [
        ("1.2.3.4:80", ("1.2.3.4", "80")),
        ("[::1]:80", ("::1", "80")),
        (":x", ("", "x")),
        ("1.2.3.4", None),
        ("::1", None),
        ("[::1]", None),
        ("[::1", None),
        ("[::1:80", None),
        ("a]:80", None),
        ("[a[]:80", None),
    ],
)
def test_addresses_are_taken_apart(text: str, halves: tuple[str, str] | None) -> None:
    assert split_address(text) == halves


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("1.2.3.4", "1.2.3.4:10256"),
        ("::", "[::]:10256"),
        ("1.2.3.4:5", "1.2.3.4:5"),
        ("junk", "junk"),
        ("", ""),
    ],
)
def test_a_port_is_appended_where_there_is_none(text: str, result: str) -> None:
    assert with_port(text, 10256) == result


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("", ()),
        ("a", ("a",)),
        ("a,b", ("a", "b")),
        ("a,,b", ("a", "", "b")),
        ('"a,b",c', ("a,b", "c")),
        ('"a""b"', ('a"b',)),
        (",", ("", "")),
    ],
)
def test_comma_lists(text: str, items: tuple[str, ...]) -> None:
    assert split_list(text) == items


@pytest.mark.parametrize("text", ['a"b', '"a', '"a"b,c'])
def test_bad_quotes_in_a_list_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a comma-separated list"):
        split_list(text)


def test_pairs() -> None:
    assert split_pairs("a=1, b = 2,,c=x=y") == {"a": "1", "b": "2", "c": "x=y"}
    with pytest.raises(ValueError, match="'c' is not KEY=VALUE"):
        split_pairs("a=1,c")
