import json

from msgspec.structs import replace

from steersman.config import (
    ConfigError,
    Invalid,
    check_config,
    configz,
    default_config,
    findings,
    flagz,
    load,
    parse_command_line,
    show_config,
    to_yaml,
    validate,
)
from steersman.config.commandline import assign
from steersman.config.defaults import apply_platform_defaults
from steersman.config.write import CommandOutput

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
BASE = apply_platform_defaults(default_config())


def test_a_good_file() -> None:
    assert check_config("f", HEAD) == CommandOutput(0, "f: ok, mode iptables\n")


def test_broken_rules_and_warnings() -> None:
    answer = check_config("f", HEAD + "oomScoreAdj: 5000\nmood: x\n")
    assert answer.status == 1
    first, second = answer.text.splitlines()
    assert first.startswith("f: error: KubeProxyConfiguration.KubeProxyLinuxConfiguration")
    assert second == 'f: warning: unknown field "mood" (did you mean mode?)'


def test_warnings_count_only_when_strict() -> None:
    body = HEAD + "featureGates: {SCTPSupport: true}\n"
    assert check_config("f", body).status == 0
    assert check_config("f", body, strict=True).status == 1
    assert check_config("f", HEAD, strict=True).status == 0


def test_our_modes_are_refused_when_strict() -> None:
    assert check_config("f", HEAD + "mode: ebpf\n").status == 0
    assert check_config("f", HEAD + "mode: ebpf\n", strict=True).status == 1


def test_what_cannot_be_read() -> None:
    answer = check_config("f", b"\xff")
    assert answer == CommandOutput(1, "f: error: failed to decode: yaml: not UTF-8 at byte 0\n")


def test_a_refused_configuration_is_shown_as_findings() -> None:
    broken = Invalid(validate(assign(replace(BASE, mode="x"), "oom_score_adj", 9999)))
    assert [finding.field for finding in findings(broken, "f")] == [
        "KubeProxyLinuxConfiguration.OOMScoreAdj",
        "Mode.ProxyMode",
    ]
    (finding,) = findings(ConfigError("failed to decode: x"), "/etc/config.yaml")
    assert (
        str(finding)
        == "/etc/config.yaml: failed to decode: x; keeping the previous configuration [SM3001]"
    )


def test_showing() -> None:
    answer = show_config(BASE)
    assert answer.status == 0
    assert load(answer.text).config == apply_platform_defaults(load(answer.text).config)
    document = json.loads(show_config(BASE, "json").text)
    assert document["conntrack"]["tcpEstablishedTimeout"] == "24h0m0s"
    assert show_config(BASE, "xml") == CommandOutput(2, "output 'xml': give yaml or json\n")


def test_passwords_in_urls_are_not_shown() -> None:
    parsed = parse_command_line(["--master=https://u:s3cret@x:6443", "--write-config-to=f"])
    shown = [show_config(parsed.config, output).text for output in ("yaml", "json")]
    shown += [configz(parsed.config).decode(), flagz(parsed.values)]
    for text in shown:
        assert "s3cret" not in text
        assert "https://***@x:6443" in text
    assert "s3cret" in to_yaml(parsed.config)  # --write-config-to: it will be used
