import shutil
import subprocess
from pathlib import Path

import pytest

from steersman.config import FLAGS, Flag, Group, completion, flagz, help_text, parse_command_line

GOLDEN = Path(__file__).parents[3] / "../shared/golden"


def test_help_has_every_flag_once_under_its_heading() -> None:
    text = help_text("kube-proxy")
    lines = text.splitlines()
    assert lines[0] == "Usage: kube-proxy [flags]"
    assert max(map(len, lines)) <= 100
    for flag in FLAGS.values():
        count = sum(line[6:].split(" ")[0] == f"--{flag.name}" for line in lines)
        assert count == (0 if flag.deprecated else 1), flag.name
    assert lines.index("Proxy mode and traffic:") < lines.index("ipvs mode:")
    assert "Accepted for older guides:" not in lines


def test_help_of_a_command_with_more_flags() -> None:
    flag = Flag("output", "string", "text", Group.GENERAL, "How to print.")
    text = help_text("steersman show", [flag])
    assert "      --output string" in text
    assert "How to print. (default text)" in text


def test_long_names_have_a_line_of_their_own() -> None:
    lines = help_text().splitlines()
    index = lines.index("      --conntrack-tcp-timeout-established duration")
    assert lines[index + 1].strip().startswith("Idle established")


def test_flagz_equals_upstreams() -> None:
    golden = GOLDEN / "iptables/http-10249-flagz.txt"
    if not golden.exists():
        pytest.skip("no golden files")
    values = parse_command_line(
        ["--config=/etc/kubernetes/kp-iptables-default.yaml", "--v=2"],
        read=lambda _: (
            b"{kind: KubeProxyConfiguration, apiVersion: kubeproxy.config.k8s.io/v1alpha1}"
        ),
    ).values
    assert flagz(values) == golden.read_text().partition("\n\n")[2]


def test_flagz_shows_what_was_given() -> None:
    values = parse_command_line(
        [
            "--feature-gates=AllBeta=true,AllAlpha=false",
            "--nodeport-addresses=10.0.0.0/8,fd00::/8",
            "--vmodule=a=1,b=2",
            "--master=http://a,http://b",
            "--kube-api-qps=7.5",
            "--iptables-sync-period=90s",
            "--masquerade-all",
        ]
    ).values
    shown = dict(line.partition(" ")[::2] for line in flagz(values).splitlines())
    assert shown["feature-gates"] == "AllAlpha=false,AllBeta=true"
    assert shown["nodeport-addresses"] == "[10.0.0.0/8,fd00::/8]"
    assert shown["vmodule"] == "a=1,b=2"
    assert shown["master"] == "http://a,http://b"
    assert shown["kube-api-qps"] == "7.5"
    assert shown["iptables-sync-period"] == "1m30s"
    assert shown["masquerade-all"] == "true"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_offers_flags_commands_and_choices(shell: str) -> None:
    script = completion(shell, program="steersman", commands=["run", "explain"])
    for word in ("steersman", "explain", "proxy-mode", "InterfaceNamePrefix"):
        assert word in script
    assert "logtostderr" not in script
    if shutil.which(shell):
        argv = [shell, "-n"]
        done = subprocess.run(argv, input=script, text=True, capture_output=True, check=True)
        assert done.stderr == ""


def test_completion_without_commands() -> None:
    assert "1:command" not in completion("zsh")
    assert "__fish_use_subcommand" not in completion("fish")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("words", "replies"),
    [
        (["kube-proxy", "--proxy-m"], {"--proxy-mode"}),
        (["kube-proxy", "--proxy-mode", "ip"], {"iptables", "ipvs"}),
        (["kube-proxy", "--proxy-mode", "=", "nf"], {"nftables"}),
        (["kube-proxy", "--logging-format", "="], {"text", "json"}),
    ],
)
def test_bash_completes(words: list[str], replies: set[str]) -> None:
    listed = " ".join(f"'{word}'" for word in words)
    script = (
        f"{completion('bash')}\nCOMP_WORDS=({listed})\nCOMP_CWORD={len(words) - 1}\n"
        '_kube_proxy\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", script], text=True, capture_output=True, check=True)
    assert set(done.stdout.split()) == replies


def test_other_shells_are_refused() -> None:
    with pytest.raises(ValueError, match="give one of bash, zsh, fish"):
        completion("csh")
