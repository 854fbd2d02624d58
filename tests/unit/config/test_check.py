import json
from pathlib import Path

import msgspec
import pytest
import yaml

from steersman.config import (
    Answer,
    ConfigError,
    Invalid,
    ProxyConfig,
    applied,
    check_config,
    configz,
    default_config,
    findings,
    flagz,
    load,
    parse_command_line,
    reload_plan,
    show_config,
    to_yaml,
    validate,
)
from steersman.config.commandline import assign
from steersman.config.defaults import apply_platform_defaults
from steersman.config.go import Duration
from steersman.config.types import Steersman, VModule

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
BASE = apply_platform_defaults(default_config())


def test_a_good_file() -> None:
    assert check_config("f", HEAD) == Answer(0, "f: ok, mode iptables\n")


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
    assert answer == Answer(1, "f: error: failed to decode: yaml: not UTF-8 at byte 0\n")


def test_a_refused_configuration_is_shown_as_findings() -> None:
    broken = Invalid(validate(changed(mode="x", linux__oom_score_adj=9999)))
    assert [finding.field for finding in findings(broken, "f")] == [
        "KubeProxyLinuxConfiguration.OOMScoreAdj",
        "Mode.ProxyMode",
    ]
    (finding,) = findings(ConfigError("failed to decode: x"), "/etc/config.yaml")
    assert str(finding) == "/etc/config.yaml: failed to decode: x; the old one stays in force"


def test_showing() -> None:
    answer = show_config(BASE)
    assert answer.status == 0
    assert load(answer.text).config == apply_platform_defaults(load(answer.text).config)
    document = json.loads(show_config(BASE, "json").text)
    assert document["conntrack"]["tcpEstablishedTimeout"] == "24h0m0s"
    assert show_config(BASE, "xml") == Answer(2, "output 'xml': give yaml or json\n")


def test_passwords_in_urls_are_not_shown() -> None:
    parsed = parse_command_line(["--master=https://u:s3cret@x:6443", "--write-config-to=f"])
    shown = [show_config(parsed.config, output).text for output in ("yaml", "json")]
    shown += [configz(parsed.config).decode(), flagz(parsed.values)]
    for text in shown:
        assert "s3cret" not in text
        assert "https://***@x:6443" in text
    assert "s3cret" in to_yaml(parsed.config)  # --write-config-to: it will be used


def changed(**paths: object) -> ProxyConfig:
    config = BASE
    for path, value in paths.items():
        config = assign(config, path.replace("__", "."), value)
    return config


@pytest.mark.parametrize(
    ("path", "value", "live", "later"),
    [
        ("sync_period", Duration(5), ["iptables.syncPeriod"], []),
        ("logging__verbosity", 4, ["logging.verbosity"], []),
        ("node_port_addresses", ("primary",), ["nodePortAddresses"], []),
        ("detect_local__cluster_cidrs", ("10.0.0.0/8",), ["clusterCIDR"], []),
        ("steersman__split_threshold", 7, ["steersman.splitThreshold"], []),
        ("linux__conntrack__min", 7, ["conntrack.min"], []),
        ("steersman__metrics_per_service", True, ["steersman.metricsPerService"], []),
        ("steersman__manifests", ("a",), [], ["steersman.manifests"]),
        ("steersman__ipvs_local_fallback", True, ["steersman.ipvsLocalFallback"], []),
        ("steersman__ebpf_guard_node_ports", False, [], ["steersman.ebpfGuardNodePorts"]),
        ("steersman__ebpf_xdp_devices", ("eth0",), [], ["steersman.ebpfXdpDevices"]),
        ("steersman__ebpf_cgroup_root", "/c", [], ["steersman.ebpfCgroupRoot"]),
        ("steersman__ipvs_scheduler_flags", ("none",), [], ["steersman.ipvsSchedulerFlags"]),
        ("client_connection__qps", 7.0, [], ["clientConnection.qps"]),
        ("feature_gates", {"AllBeta": True}, [], ["featureGates"]),
        ("hostname_override", "x", [], ["hostnameOverride"]),
        ("logging__format", "json", [], ["logging.format"]),
        ("logging__vmodule", (VModule(file_pattern="a"),), [], ["logging.vmodule"]),
        ("linux__oom_score_adj", -7, [], ["oomScoreAdj"]),
    ],
)
def test_what_a_reload_does(path: str, value: object, live: list[str], later: list[str]) -> None:
    new = changed(**{path: value})
    assert reload_plan(BASE, new) == (live, later)
    assert applied(BASE, new) == (new if live else BASE)


def test_nothing_changed() -> None:
    assert reload_plan(BASE, BASE) == ([], [])


def test_a_mode_change_waits_for_the_restart() -> None:
    new = load(HEAD + "mode: nftables\niptables: {masqueradeAll: true}\n").config
    new = apply_platform_defaults(new)
    assert (new.node_port_addresses, BASE.node_port_addresses) == (("primary",), ())
    assert reload_plan(BASE, new) == ([], ["mode"])
    assert applied(BASE, new) == BASE


def test_pointers_that_appear_are_changes() -> None:
    new = changed(linux__conntrack__tcp_established_timeout=None)
    assert reload_plan(BASE, new).applied_live == ["conntrack.tcpEstablishedTimeout"]


def test_the_documentation_shows_every_field_of_ours_with_its_default() -> None:
    page = (Path(__file__).parents[3] / "docs/configuration.md").read_text()
    body = page.partition("```yaml\n")[2].partition("```")[0]
    shown = yaml.safe_load(body)["steersman"]
    assert set(shown) == {field.encode_name for field in msgspec.structs.fields(Steersman)}
    loaded = load(body)
    assert loaded.warnings == ()
    assert loaded.config == load(HEAD + "mode: nftables\n").config
