"""Completion as the shells ask for it, and in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from steersman.cli.completion import FILE, SHELLS, candidates, script
from steersman.cli.main import main

NAMES = {"service": ["kube-system/dns", "shop/cart", "shop/web"], "pod": ["shop/web-1"]}


def names(kind: str) -> Sequence[str]:
    return NAMES.get(kind, ())


def offered(*words: str) -> list[str]:
    return [line.partition("\t")[0] for line in candidates(words, names)]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("expl",), ["explain"]),
        (("explain", "shop/"), ["shop/cart", "shop/web"]),
        (("explain", "shop/web", "shop/"), []),
        (("explain", "--proxy-mode", "ipt"), ["iptables"]),
        (("explain", "--proxy-mode=nf"), ["--proxy-mode=nftables"]),
        (("explain", "-o", "j"), ["json"]),
        (("explain", "--manifests", ""), [FILE]),
        (("explain", "--manifests", "demo", "kube"), ["kube-system/dns"]),
        (("run", "--logging-format", ""), ["text", "json"]),
        (("run", "--proxy-mo"), ["--proxy-mode"]),
        (("cleanup", "--proxy-mo"), ["--proxy-mode"]),
        (("explain", "--proxy-mo"), ["--proxy-mode"]),
        (("status", "--proxy-mo"), []),
        (("man", "--"), ["--help"]),
        (("config", ""), ["check", "show"]),
        (("config", "check", ""), [FILE]),
        (("completion", "z"), ["zsh"]),
        (("ebpf", ""), ["dump"]),
        (("ebpf", "dump", "se"), ["services"]),
        (("ebp",), ["ebpf"]),
        (("nonsense", ""), []),
    ],
)
def test_candidates(words: tuple[str, ...], found: list[str]) -> None:
    assert offered(*words) == found


def test_flags_without_effect_are_not_offered() -> None:
    assert "--logtostderr" not in offered("run", "--log")
    assert "--logging-format" in offered("run", "--log")


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_is_valid(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    text = script(shell)
    done = subprocess.run([shell, "-n"], input=text, text=True, capture_output=True, check=True)
    assert done.stderr == ""


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert "give the shell: bash, zsh, fish" in capsys.readouterr().err


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A `steersman` whose candidates do not depend on a running process."""
    path = tmp_path / "steersman"
    path.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "from steersman.cli.completion import candidates\n"
        f"names = {NAMES!r}\n"
        "found = candidates(sys.argv[2:], lambda kind: names.get(kind, ()))\n"
        "print(*found, sep='\\n')\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("line", "replies"),
    [
        ("explain shop/w", ["shop/web"]),
        ("run --proxy-mode nf", ["nftables"]),
        ("run --proxy-mode=nf", ["nftables"]),
        ("expl", ["explain"]),
    ],
)
def test_bash_completes(program: Path, line: str, replies: list[str]) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    asked = (
        f"{script('bash')}\nCOMP_LINE='{program} {line}'\nCOMP_POINT=${{#COMP_LINE}}\n"
        '_steersman\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", asked], text=True, capture_output=True, check=True)
    assert done.stdout.split() == replies


def test_fish_completes(program: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    asked = f"set PATH {program.parent} $PATH\n{script('fish')}\ncomplete -C 'steersman explain sh'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", asked], text=True, capture_output=True, check=True
    )
    assert done.stdout.split() == ["shop/cart", "shop/web"]


def test_zsh_completes(program: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    asked = (
        "compdef() { }\n_describe() { print -l -- ${(P)3} }\n"
        f"{script('zsh')}\nwords=({program} explain sh); CURRENT=3; _steersman"
    )
    done = subprocess.run(["zsh", "-f", "-c", asked], text=True, capture_output=True, check=True)
    assert done.stdout.split() == ["shop/cart", "shop/web"]
