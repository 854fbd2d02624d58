from steersman.config import FLAGS, Flag, Group, flagz, help_text, parse_command_line
from steersman.config.help import flag_lines
from tests.support.data import RECORDED

GOLDEN = RECORDED / "golden"


def test_help_has_every_flag_once_under_its_heading() -> None:
    text = help_text("kube-proxy")
    lines = text.splitlines()
    assert lines[0] == "Usage: kube-proxy [flags]"
    assert max(map(len, lines)) <= 80
    for flag in FLAGS.values():
        count = sum(line[6:].split(" ")[0] == f"--{flag.name}" for line in lines)
        assert count == (0 if flag.deprecated else 1), flag.name
    assert lines.index("Proxy mode and traffic:") < lines.index("ipvs mode:")
    assert "Accepted for older guides:" not in lines


def test_lines_of_flags_of_a_command() -> None:
    flag = Flag("output", "string", "text", Group.GENERAL, "How to print.")
    (line,) = flag_lines([flag])
    assert line.startswith("      --output string  ")
    assert line.endswith("  How to print. (default text)")


def test_long_names_have_a_line_of_their_own() -> None:
    lines = help_text().splitlines()
    index = lines.index("      --conntrack-tcp-timeout-established duration")
    assert lines[index + 1].strip().startswith("Timeout of idle established")


def test_flagz_equals_upstreams() -> None:
    golden = GOLDEN / "iptables/http-10249-flagz.txt"
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
