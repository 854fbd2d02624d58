"""Recorded output of `steersman trace`: made comparable, compared, rewritten."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import msgspec

from steersman.cli.output import print_answer
from steersman.operate.trace import TraceAnswer

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "docs/trace.md", ROOT / "tests/kernel/traces.md")


def normalised(answer: TraceAnswer) -> str:
    """An answer as printed, without what differs each time: ports, handles, times, pids, hashes."""
    words = {f":{answer.flow.split(' to ')[0].rpartition(':')[2]}": ":40000"}
    value: dict[str, Any] = msgspec.to_builtins(answer)
    if answer.connection and answer.connection.masqueraded:
        words[f":{answer.connection.seen_port}"] = ":50000"
    for number, shown in enumerate(value["steps"], 1):
        step = shown["step"]
        if step["handle"] and "legacy" not in step["table"]:
            words[f"handle {step['handle']})"] = f"handle {number + 10})"
            step["handle"] = number + 10
        step["chain"] = re.sub(r"^\S+ \(pid \d+\)", "steersman (pid 4211)", step["chain"])
        step["table"] = re.sub(r"^\S+ \(pid \d+\)", "steersman (pid 4211)", step["table"])
        step["table"] = re.sub(r"^netns \d+", "netns 4026532001", step["table"])
        # Ports of the proxy, hashes in comments, numbers of chains
        step["rule"] = re.sub(r"(192\.0\.2\.1):\d{4,5}\b", r"\1:36000", step["rule"])
        step["note"] = re.sub(r"(192\.0\.2\.1):\d{4,5}\b", r"\1:36000", step["note"])
    if answer.reply and answer.reply.milliseconds:
        value["reply"]["milliseconds"] = 0.4
    if answer.connection and answer.connection.endpoint == "192.0.2.1":  # the proxy
        words[f"192.0.2.1:{answer.connection.endpoint_port}"] = "192.0.2.1:36000"
    value["source"] = ""
    out = io.StringIO()
    print_answer(msgspec.convert(value, TraceAnswer), "text", out)
    text = out.getvalue()
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def check(title: str, answer: TraceAnswer, update: bool) -> None:
    """Compare the block below a heading of one of the pages, or rewrite it."""
    pattern = re.compile(rf"(##+ {re.escape(title)}\n.*?```text\n)(.*?)(```)", re.DOTALL)
    found = [(path, match) for path in PAGES if (match := pattern.search(path.read_text()))]
    assert len(found) == 1, f"one page has a block below {title!r}"
    path, match = found[0]
    text = normalised(answer)
    if update:
        path.write_text(match.string[: match.start(2)] + text + match.string[match.end(2) :])
    else:
        assert match[2] == text
