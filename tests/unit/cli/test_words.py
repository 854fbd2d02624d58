"""Words that stand for flags: `switch MODE` and `trace FROM TO`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steersman.cli.main import main
from steersman.model.switch import SwitchRequest, SwitchResult, SwitchStep
from steersman.model.world import World
from steersman.operate import switch, trace
from steersman.operate.answer import Answer, Block, Line
from steersman.operate.switch import Switched
from steersman.operate.trace_question import TraceQuestion

DEMO = Path(__file__).parents[3] / "demo"


class Traced(Answer, frozen=True, kw_only=True):
    def blocks(self, wide: bool) -> Iterator[Block]:
        yield Line("done")


@pytest.mark.parametrize(
    "words", [["nftables"], ["--to=nftables"], ["nftables", "--to", "nftables"]]
)
def test_the_mode_to_switch_to_is_a_word_or_a_flag(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[SwitchRequest] = []

    async def switched(request: SwitchRequest, tell: Callable[[SwitchStep], None]) -> Switched:
        asked.append(request)
        tell(SwitchStep("check", "nftables can serve here", at=0.5))
        result = SwitchResult(
            "checked", "iptables", "iptables", "nftables mode can serve", seconds=1.0
        )
        return Switched(source="the running process", result=result)

    monkeypatch.setattr(switch, "switch", switched)
    assert main(["switch", *words, "--dry-run"]) == 0
    assert [(each.to, each.dry_run) for each in asked] == [("nftables", True)]
    lines = capsys.readouterr().out.splitlines()
    assert "   0.50 s  check    nftables can serve here" in lines
    assert "nftables mode can serve (1.0 s)" in lines


@pytest.mark.parametrize(
    ("words", "client"),
    [
        (["10.96.0.10:80"], ""),
        (["192.0.2.9", "10.96.0.10:80"], "192.0.2.9"),
        (["--from=192.0.2.9", "10.96.0.10:80"], "192.0.2.9"),
        (["--to=10.96.0.10:80", "--from", "192.0.2.9"], "192.0.2.9"),
    ],
)
def test_the_ends_of_a_trace_are_words_or_flags(
    words: list[str], client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TraceQuestion] = []

    async def traced(_: World, question: TraceQuestion, __: object) -> Answer:
        asked.append(question)
        return Traced(source="the kernel")

    monkeypatch.setattr(trace, "trace_packet", traced)
    source = [f"--manifests={DEMO}", "--hostname-override=node-a"]
    assert main(["trace", *words, "--wait", *source]) == 0
    found = [(each.source, each.destination, each.port, each.wait) for each in asked]
    assert found == [(client, "10.96.0.10", 80, True)]
