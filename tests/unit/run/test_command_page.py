"""Commands that pages run on a node: few flags, none that names a file, bounded and ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest

from steersman.cli.command import find_command
from steersman.host.exec import Result
from steersman.model.command_run import RunRequest
from steersman.run.pages import command_page
from steersman.run.pages.command_page import COMMANDS, CommandPage, words_of
from steersman.run.serve.http import application
from tests.support.http import serving
from tests.support.modes.scripted import OnLoop
from tests.support.waiting import until

SECONDS = 60.0


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("explain",), ("explain", "--output=json")),
        (("doctor", "shop/web"), ("doctor", "--output=json", "shop/web")),
        (
            ("dump", "shop/web", "--namespace=x"),
            ("dump", "--output=json", "--namespace=x", "shop/web"),
        ),
        (("explain", "--to", "--kubeconfig"), ("explain", "--output=json", "--to=--kubeconfig")),
        (("explain", "--problems"), ("explain", "--output=json", "--problems")),
        (("trace", "--wait=true", "--to"), ("trace", "--output=json", "--wait=true", "--to=")),
    ],
)
def test_words_of_the_command_line(words: Sequence[str], found: Sequence[str]) -> None:
    assert words_of(RunRequest(words[0], tuple(words[1:]))) == list(found)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("switch", "ipvs"), "'switch' cannot be run; there is doctor, dump, explain, trace"),
        (("doctor", "--kubeconfig=/etc/shadow"), "doctor has no flag '--kubeconfig=/etc/shadow'"),
        (("trace", "--netns=/proc/1/ns/net"), "trace has no flag"),
        (("doctor", "-o=yaml"), "doctor has no flag '-o=yaml'"),
        (("doctor", "--"), "doctor has no flag '--'"),
        (("doctor", "-"), "doctor has no flag '-'"),
        (("doctor", "--output=yaml"), "doctor has no flag '--output=yaml' here, but --from"),
        (("explain", "--problems=maybe"), "--problems is true or false, not 'maybe'"),
        (("dump", "a/b", "c/d"), "unexpected argument 'c/d'"),
        (("trace", "a/b"), "unexpected argument 'a/b'"),
        (("dump", "a\0b"), "cannot be printed"),
        (("dump", "a" * 601), "longer than 600 characters"),
        (("explain", *["--to=x"] * 17), "at most 16 arguments"),
    ],
)
def test_anything_else_is_refused(words: Sequence[str], why: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        words_of(RunRequest(words[0], tuple(words[1:])))
    assert why in str(error.value)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_flags_are_those_of_the_command_and_name_no_file(name: str) -> None:
    command = find_command(name)
    flags = {flag.name: flag for flag in command.all_flags}
    assert COMMANDS[name].keys() <= flags.keys()
    for each, has_value in COMMANDS[name].items():
        assert (flags[each].kind != "bool") == has_value
        assert "file" not in flags[each].completes
    left = flags.keys() - COMMANDS[name].keys()
    assert left <= {"output", "watch", "interval", "netns"}, "decide about new flags"


class Programs(OnLoop):
    """Runs nothing; ends when the test says so."""

    def __init__(self, result: Result | Exception) -> None:
        self.result = result
        self.ended = asyncio.Event()
        self.argv: list[Sequence[str]] = []
        self.cancelled = 0

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        self.argv.append(argv)
        try:
            await self.ended.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    @asynccontextmanager
    async def served(self) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
        async with (
            serving(application({"/run": CommandPage(self).serve})) as port,
            aiohttp.ClientSession() as session,
        ):
            yield session, f"http://127.0.0.1:{port}/run"


ASKED = {"command": "doctor", "arguments": ["shop/web"]}


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (Result(1, b'{"a": [1]}', b""), {"exitCode": 1, "answer": {"a": [1]}}),
        (Result(2, b"", b"no such\nService"), {"exitCode": 2, "error": "no such Service"}),
        (Result(0, b"", b""), {"exitCode": 2, "error": "steersman doctor ended with status 0"}),
        (TimeoutError("too long"), {"exitCode": 2, "error": "steersman doctor: too long"}),
    ],
)
async def test_the_last_line_has_the_answer(
    result: Result | Exception, line: dict[str, object]
) -> None:
    programs = Programs(result)
    programs.ended.set()
    async with programs.served() as (session, url), session.post(url, json=ASKED) as answer:
        lines = (await answer.text()).splitlines()
    assert json.loads(lines[-1]) == line
    assert list(programs.argv[0][-3:]) == ["doctor", "--output=json", "shop/web"]


async def test_bad_requests_start_nothing() -> None:
    programs = Programs(Result(0, b"{}", b""))
    async with programs.served() as (session, url):
        for body in (b"", b"{}", b'{"command": 1}', b'{"command": "run"}'):
            async with session.post(url, data=body) as answer:
                assert answer.status == 400
                assert await answer.text()
    assert programs.argv == []


async def test_commands_are_bounded_and_end_with_their_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command_page, "_BEAT", 0.02)
    programs = Programs(Result(0, b"{}", b""))
    async with programs.served() as (session, url), asyncio.timeout(SECONDS):
        one, other = await session.post(url, json=ASKED), await session.post(url, json=ASKED)
        assert b"running" in await one.content.readline()
        async with session.post(url, json=ASKED) as third:
            assert third.status == 503
            assert "ask again when one has ended" in await third.text()
        other.close()
        await until(lambda: programs.cancelled)  # the server notices it with the next line
        programs.ended.set()
        async with session.post(url, json=ASKED) as third:
            assert third.status == 200
            await third.read()
        assert (await one.content.read()).splitlines()[-1] == b'{"exitCode":0,"answer":{}}'
