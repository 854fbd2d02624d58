"""The texts of every command: help, examples that parse, man pages that groff accepts."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest

from steersman.cli.command import Command, command_help, command_names, find_command
from steersman.cli.commands.man import command_page, overview_page
from steersman.cli.main import main, usage
from steersman.config import parse_command_line
from steersman.modes.specs import DEFAULT_MODE, SPECS

COMMANDS = [find_command(name) for name in command_names()]
QUESTIONS = [command for command in COMMANDS if command.answer is not None]


def named(command: Command) -> str:
    return command.name


@pytest.mark.parametrize("command", COMMANDS, ids=named)
def test_a_command_is_named_as_its_module_and_listed(command: Command) -> None:
    assert f"\n  {command.name} " in usage()
    assert f" {command.name} {command.summary} " in " ".join(usage().split())
    assert command.group in ("Run", "Ask", "Change", "Tools")
    assert (command.answer is None) != (command.main is None)
    assert command.summary[0].islower()
    assert not command.summary.endswith(".")


@pytest.mark.parametrize("words", [("{}", "--help"), ("help", "{}")], ids=["flag", "help"])
@pytest.mark.parametrize("command", COMMANDS, ids=named)
def test_every_command_has_its_own_help(
    command: Command, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(command.name) for word in words]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: steersman {command.name}")
    assert err == ""


@pytest.mark.parametrize("command", QUESTIONS, ids=named)
def test_the_help_of_a_question_has_examples_and_fits_a_terminal(command: Command) -> None:
    text = command_help(command)
    assert command.examples
    assert command.description
    assert "Exit status:" in text
    words = {example.words for example in command.examples}  # which are copied as they are
    assert max(len(line) for line in text.splitlines() if line.strip() not in words) <= 80
    assert "conntrack-max-per-core" not in text  # only its own flags


@pytest.mark.parametrize("command", QUESTIONS, ids=named)
def test_the_examples_parse(command: Command) -> None:
    for example in command.examples:
        first, *pipes = example.words.split(" | ")
        words = shlex.split(first)
        assert words[:2] == ["steersman", command.name], example
        flags = [word for word in words[2:] if not word.startswith("--kubeconfig")]
        parse_command_line(flags, extra=command.all_flags, allow_arguments=True)
        del pipes


@pytest.mark.parametrize("name", ["switch", "plan"])
def test_examples_change_to_a_mode_that_a_node_does_not_have_anyway(name: str) -> None:
    modes = set[str]()
    for example in find_command(name).examples:
        modes |= SPECS.keys() & set(example.words.split())
    assert modes
    assert DEFAULT_MODE not in modes


@pytest.mark.parametrize("command", [None, *COMMANDS], ids=lambda c: c.name if c else "overview")
def test_man_pages_are_valid_roff(command: Command | None) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    page = overview_page() if command is None else command_page(command)
    argv = ["groff", "-man", "-Tascii", "-ww", "-K", "utf8"]
    done = subprocess.run(argv, input=page, text=True, capture_output=True, check=True)
    assert done.stderr == ""
    shown = re.sub("(.)\b\\1", r"\1", done.stdout.replace("_\b", ""))  # bold and underlined
    if command is not None:
        shown = " ".join(shown.split())  # lines are justified
        assert f"steersman-{command.name} -" in shown
        for example in command.examples:
            assert example.words.split()[0] in shown


def test_rows_of_a_description_stay_rows_in_its_page() -> None:
    page = command_page(find_command("status"))
    rows = page.partition(".nf\n")[2].partition(".fi\n")[0].splitlines()
    assert [row.split()[0] for row in rows][:2] == ["Running", "Synced"]


def test_an_unknown_command_has_no_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["man", "nonsense"]) == 2
    assert "there is no command 'nonsense'" in capsys.readouterr().err
