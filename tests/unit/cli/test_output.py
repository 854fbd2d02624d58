"""Answers as people, scripts and terminals see them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
import yaml

from steersman.cli.output import print_answer
from steersman.operate.answer import Answer, Block, Line, Table


class Shops(Answer, frozen=True, kw_only=True):
    shop_names: tuple[str, ...]

    def blocks(self, wide: bool) -> Iterator[Block]:
        yield Line("Shops", "title")
        columns = ("NAME", "OPEN", *(("ROOMS",) if wide else ()))
        rows = [(name, ("no", "bad"), *(("3",) if wide else ())) for name in self.shop_names]
        yield Table(columns, rows, empty="no shops")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(answer: Answer, output: str, out: io.StringIO) -> str:
    print_answer(answer, output, out)
    return out.getvalue()


SHOPS = Shops(source="the manifests in demo", shop_names=("a", "long-one"))


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_pipe_gets_aligned_plain_text() -> None:
    lines = printed(SHOPS, "text", io.StringIO()).splitlines()
    assert lines == [
        "Shops",
        "NAME       OPEN",
        "a          no",
        "long-one   no",
        "from the manifests in demo",
    ]


def test_wide_has_more_columns() -> None:
    assert "ROOMS" in printed(SHOPS, "wide", io.StringIO())


def test_a_terminal_gets_colour_and_the_same_words() -> None:
    text = printed(SHOPS, "text", Terminal())
    assert "\x1b[31mno" in text
    assert "long-one" in text
    assert "from the manifests in demo" in text


def on_terminal(answer: Shops, columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of an answer on a terminal of this width, without colours."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    return printed(answer, "text", Terminal()).splitlines()


class Long(Shops, frozen=True, kw_only=True):
    def blocks(self, wide: bool) -> Iterator[Block]:
        yield Table(("NAME", "MESSAGE"), [("a-long-name", "word " * 12), ("b", "all is well")])


def test_a_narrow_terminal_breaks_the_last_column_and_cuts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert on_terminal(Long(shop_names=()), 34, monkeypatch) == [
        "NAME          MESSAGE",
        "a-long-name   word word word word",
        "              word word word word",
        "              word word word word",
        "b             all is well",
    ]


def test_a_terminal_without_room_has_the_last_column_below(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_terminal(Long(shop_names=()), 29, monkeypatch) == [
        "NAME          MESSAGE",
        "a-long-name",
        "    word word word word word",
        "    word word word word word",
        "    word word",
        "b             all is well",
    ]


class Sentences(Shops, frozen=True, kw_only=True):
    def blocks(self, wide: bool) -> Iterator[Block]:
        yield Line("error one of many", hang=4)
        yield Line("see `a b c d e f` and-more", indent=2, hang=4)
        yield Line("-A a rule that is copied")


def test_sentences_are_broken_and_what_is_copied_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_terminal(Sentences(shop_names=()), 12, monkeypatch) == [
        *("error one of", "    many"),
        *("  see", "    `a b c d e f`", "    and-more"),
        "-A a rule that is copied",
    ]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colour(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert "\x1b" not in printed(SHOPS, "text", Terminal())


def test_json_and_yaml_have_the_same_data() -> None:
    data = json.loads(printed(SHOPS, "json", io.StringIO()))
    assert data == {"source": "the manifests in demo", "shopNames": ["a", "long-one"]}
    assert yaml.safe_load(printed(SHOPS, "yaml", io.StringIO())) == data


def test_an_empty_table_is_a_sentence() -> None:
    assert "no shops" in printed(Shops(shop_names=()), "text", io.StringIO())
    assert "NAME" not in printed(Shops(shop_names=()), "text", Terminal())


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()], ids=["pipe", "terminal"])
def test_control_characters_of_names_are_never_sent(out: io.StringIO) -> None:
    text = printed(Shops(shop_names=("a\x1b[2Jb\nc",)), "text", out)
    assert "\x1b[2J" not in text
    assert "a\\x1b[2Jb\\nc" in text
