"""Failures of commands are a sentence and an exit status, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from steersman.cli.command import command_names, find_command
from steersman.cli.failures import report
from steersman.cli.main import main
from steersman.config import UsageError
from steersman.config.flags import FLAGS
from steersman.operate.answer import QuestionError

STEERSMAN = (sys.executable, "-m", "steersman")
DEMO = Path(__file__).parents[3] / "demo"
COMMANDS = {
    "help": ("run", "--help"),
    "usage": ("--help",),
    "explain": ("explain", "--manifests", str(DEMO), "--to=192.0.2.9:80", "--from=external"),
    "config": ("config", "show"),
    "completion": ("completion", "bash"),
    "version": ("version",),
}


def run(*words: str, stdout: int = subprocess.PIPE) -> tuple[int, str]:
    argv = [*STEERSMAN, *words]
    done = subprocess.run(argv, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_reader_who_has_enough_is_no_error(words: tuple[str, ...]) -> None:
    """As in `steersman run --help | head -1`."""
    read, write = os.pipe()
    os.close(read)
    try:
        assert run(*words, stdout=write) == (128 + 13, "")
    finally:
        os.close(write)


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_output_that_does_not_fit_is_a_sentence(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        status, err = run(*words, stdout=full.fileno())
    # These two import no command.
    program = "steersman" if words[0] in ("version", "--help") else f"steersman {words[0]}"
    assert (status, err) == (1, f"{program}: output: No space left on device\n")


def test_a_file_that_cannot_be_read_is_named() -> None:
    status, err = run("config", "check", "/nope.yaml")
    assert (status, err) == (1, "steersman config: /nope.yaml: error: No such file or directory\n")


def test_every_bad_configuration_has_one_exit_status(tmp_path: Path) -> None:
    for text in ("kind: [", "mode: nope\n", "\udcff"):
        file = tmp_path / "config.yaml"
        file.write_bytes(text.encode(errors="surrogateescape"))
        assert run("config", "check", str(file)) == (1, "")


def test_a_configuration_that_does_not_fit_on_the_disk_is_a_sentence() -> None:
    status, err = run("run", "--write-config-to=/dev/full")
    assert status == 1
    assert err == "steersman run: --write-config-to /dev/full: No space left on device\n"


@pytest.mark.parametrize("word", ["services", "conntrack"])
def test_maps_that_are_not_there_are_a_sentence(word: str) -> None:
    status, err = run("ebpf", "dump", word)
    assert status == 2
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        "run --nonsense",
        "cleanup --nonsense",
        "cleanup now",
        "config",
        "config check",
        "config check a b",
        "config show --nonsense",
        "completion",
        "completion csh",
        "man nonsense",
        "ui --listen=nonsense",
        "ui --nonsense",
        "ebpf dump nonsense",
        "nonsense",
        "explain a b",
        "switch",
        "switch nftables --to ebpf",
        "switch nftables ebpf",
        "trace",
        "trace a b --to c",
        "trace a b c",
        "version now",
        "services --watch --interval=0s",
        "status --nonsense",
        "config check a --kubeconfig=b",
        "config show --write-config-to=a",
        "man run explain",
        "completion bash zsh",
        "run --init-only --dry-run",
        "status --interval=1s",
        "status --timeout=1s",
        "top --once --delay=1s",
        "plan --objects --script=nft",
        "explain --problems --node=a",
        "explain shop/web --interface=eth0",
        "services --master=http://127.0.0.1:1",
        "connectivity --master=http://127.0.0.1:1 --manifests=a",
        "nodes --token-file=a",
        "problems --selector=a",
        "ui --node=a=http://127.0.0.1:1 --direct",
        "nodes --master=http://127.0.0.1:1 --ca-file=a",
    ],
)
def test_a_command_line_that_is_not_understood_is_exit_status_2(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if line.startswith(("services", "trace")):
        line += f" --manifests={DEMO}"
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("steersman")


@pytest.mark.parametrize("name", sorted({*command_names()} - {"run", "cleanup"}))
def test_a_flag_that_would_be_ignored_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever adds a flag to `run`, or a command, says whether they go together."""
    command = find_command(name)
    parses = command.answer is not None or command.flags
    own = {flag.name for flag in command.all_flags}
    ignored = (FLAGS.keys() - command.takes - own - {"help", "version"}) if parses else ()
    for flag in sorted(ignored):
        kind, default = FLAGS[flag].kind, FLAGS[flag].default
        value = {"bool": "false", "duration": "1s"}.get(kind, default)
        words = ["show"] if name == "config" else ["shop/web"] * len(command.arguments)
        assert main([name, *words, f"--{flag}={value}"]) == 2, flag
        out, err = capsys.readouterr()
        assert out == ""
        assert f"steersman {name}: --{flag} is a flag of `steersman run`" in err
    assert bool(ignored) == bool(parses)


def test_the_command_line_of_kube_proxy_fails_as_upstream_does() -> None:
    assert report(UsageError("unknown flag: --nonsense"), "kube-proxy") == 1


def test_a_name_in_an_error_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    """Names come from manifests, the command line and the API server."""
    error = QuestionError("web\x1b[31m is unknown\nit is \u202eodd")
    assert report(error, "steersman explain") == 2
    said = capsys.readouterr().err
    assert said == "steersman explain: web\\x1b[31m is unknown\nit is \\u202eodd\n"
