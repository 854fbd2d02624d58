"""The manifests of deploy/: valid for Kubernetes, understood by steersman, and sufficient."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from steersman import __version__
from steersman.cli.commands import ui
from steersman.config import load, parse_command_line
from steersman.run.serve.health import ProxyHealth, proxy_health_app
from steersman.source.apiserver import resources
from steersman.source.kubeconfig import load_cluster_access
from steersman.ui import access
from tests.support.http import ask, serving

try:
    import helm_python as helm
except ImportError:
    pytest.skip("there is no Helm engine for this machine", allow_module_level=True)

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "steersman"
OVERLAYS = DEPLOY / "kustomize" / "overlays"
MODES = ("iptables", "nftables", "ipvs", "ebpf", "userspace")
KUBERNETES = "1.36"
SERVERS = ["https://192.0.2.1:6443", "https://192.0.2.2:6443"]

Object = dict[str, Any]


def rendered(**values: Any) -> list[Object]:
    """The chart's objects."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(
            {"apiServers": SERVERS, **values}, name="steersman", namespace="kube-system"
        )
    documents = [yaml.safe_load_all(t) for name, t in texts.items() if name.endswith(".yaml")]
    return [each for document in documents for each in document if each]


def chart_objects(mode: str) -> list[Object]:
    return rendered(**yaml.safe_load((CHART / f"values-{mode}.yaml").read_text()))


def kustomize(directory: Path) -> list[Object]:
    """An overlay's objects, as kubectl or kustomize writes them."""
    for argv in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(argv[0]):
            done = subprocess.run([*argv, str(directory)], capture_output=True, check=True)
            return list(yaml.safe_load_all(done.stdout))
    pytest.skip("neither kubectl nor kustomize is installed")


def one(objects: list[Object], kind: str) -> Object:
    (found,) = (each for each in objects if each["kind"] == kind)
    return found


def pod(objects: list[Object]) -> Object:
    spec: Object = one(objects, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def container(objects: list[Object]) -> Object:
    (found,) = pod(objects)["containers"]
    assert isinstance(found, dict)
    return found


@pytest.fixture(
    scope="module",
    params=[f"{tool}-{mode}" for tool in ("chart", "overlay") for mode in MODES],
)
def variant(request: pytest.FixtureRequest) -> tuple[str, list[Object]]:
    """A mode, and all objects that deploy it."""
    tool, _, mode = request.param.partition("-")
    return mode, chart_objects(mode) if tool == "chart" else kustomize(OVERLAYS / mode)


def test_is_valid(variant: tuple[str, list[Object]]) -> None:
    kinds = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "ConfigMap", "DaemonSet"}
    assert {each["kind"] for each in variant[1]} == kinds
    for each in variant[1]:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    "path", sorted((DEPLOY / "kustomize" / "base").glob("*.yaml")), ids=lambda path: path.name
)
def test_base_is_valid_without_kustomize(path: Path) -> None:
    for each in yaml.safe_load_all(path.read_text()):
        if each["kind"] != "Kustomization":
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_configuration_is_understood(variant: tuple[str, list[Object]]) -> None:
    mode, objects = variant
    loaded = load(one(objects, "ConfigMap")["data"]["config.conf"])
    assert loaded.config.mode == mode
    assert loaded.warnings == ()
    assert loaded.config.client_connection.kubeconfig == "/var/lib/kube-proxy/kubeconfig.conf"


def test_flags_are_known(variant: tuple[str, list[Object]], tmp_path: Path) -> None:
    objects = variant[1]
    config = tmp_path / "config.conf"
    config.write_text(one(objects, "ConfigMap")["data"]["config.conf"])
    for each in (*pod(objects)["initContainers"], container(objects)):
        argv = [a.replace("/var/lib/kube-proxy/config.conf", str(config)) for a in each["args"]]
        parsed = parse_command_line([a.replace("$(NODE_NAME)", "node-a") for a in argv])
        assert parsed.config.hostname_override == "node-a"
        assert parsed.warnings == ()
        assert parsed.init_only == ("--init-only" in argv)


def test_kubeconfig_reaches_an_api_server(
    variant: tuple[str, list[Object]], tmp_path: Path
) -> None:
    text = one(variant[1], "ConfigMap")["data"]["kubeconfig.conf"]
    folder = "/var/run/secrets/kubernetes.io/serviceaccount"
    assert text.count(folder) == 2
    for name in ("kubeconfig.conf", "ca.crt", "token"):
        (tmp_path / name).write_text(text.replace(folder, str(tmp_path)))
    access = load_cluster_access(tmp_path / "kubeconfig.conf")
    assert access.servers[0].endswith(":6443")
    assert access.token_file == str(tmp_path / "token")
    assert access.ca.path == str(tmp_path / "ca.crt")


def test_all_api_servers_are_configured() -> None:
    objects = chart_objects("nftables")
    loaded = load(one(objects, "ConfigMap")["data"]["config.conf"])
    assert loaded.config.steersman.api_servers == tuple(SERVERS)


def test_role_allows_what_is_asked_for_and_no_more(variant: tuple[str, list[Object]]) -> None:
    allowed = {
        (group, resource, verb)
        for rule in one(variant[1], "ClusterRole")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    paths = [each.path.removeprefix("/apis/").split("/") for each in resources("node-a")]
    read = {("" if p[1] == "api" else p[0], p[-1]) for p in paths}
    asked = {(group, resource, verb) for group, resource in read for verb in ("list", "watch")}
    assert allowed == asked | {("events.k8s.io", "events", "create")}


def test_doctor_may_be_allowed_to_see_more() -> None:
    usual = one(rendered(), "ClusterRole")["rules"]
    objects = rendered(hostPID=True, rbac={"doctor": True})
    assert pod(objects)["hostPID"] is True
    assert "hostPID" not in pod(rendered())
    more = [each for each in one(objects, "ClusterRole")["rules"] if each not in usual]
    assert {(r["resources"][0], v) for r in more for v in r["verbs"]} == {
        ("pods", "list"),
        ("services", "get"),
        ("networkpolicies", "list"),
    }
    for each in objects:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_role_is_bound_to_the_pods_account(variant: tuple[str, list[Object]]) -> None:
    binding = one(variant[1], "ClusterRoleBinding")
    account = one(variant[1], "ServiceAccount")["metadata"]
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    assert pod(variant[1])["serviceAccountName"] == account["name"]
    assert binding["roleRef"]["name"] == one(variant[1], "ClusterRole")["metadata"]["name"]


def test_runs_on_every_node_before_others(variant: tuple[str, list[Object]]) -> None:
    spec = pod(variant[1])
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["priorityClassName"] == "system-node-critical"
    assert spec["hostNetwork"] is True


def test_only_the_init_container_is_privileged(variant: tuple[str, list[Object]]) -> None:
    mode, objects = variant
    (initial,) = pod(objects)["initContainers"]
    assert initial["securityContext"]["privileged"] is True
    running = container(objects)["securityContext"]
    assert "privileged" not in running
    assert running["readOnlyRootFilesystem"] is True
    assert running["capabilities"]["drop"] == ["ALL"]
    assert "NET_ADMIN" in running["capabilities"]["add"]
    assert ("SYS_ADMIN" in running["capabilities"]["add"]) == (mode == "ebpf")
    assert running.get("runAsNonRoot", False) == (mode == "nftables")


def test_capabilities_are_handed_on_where_the_user_is_not_root() -> None:
    running = container(rendered(runAsNonRoot=True, capabilities=["NET_ADMIN", "NET_RAW"]))
    assert running["command"] == [
        "setpriv-net",
        "--inh-caps=+net_admin,+net_raw",
        "--ambient-caps=+net_admin,+net_raw",
        "kube-proxy",
    ]
    assert running["securityContext"]["allowPrivilegeEscalation"] is True
    assert running["securityContext"]["runAsUser"] == 65532


@pytest.mark.parametrize("mode", MODES)
def test_chart_and_overlay_agree(mode: str) -> None:
    ours, theirs = (container(o) for o in (chart_objects(mode), kustomize(OVERLAYS / mode)))
    for key in ("args", "command", "ports", "livenessProbe", "readinessProbe", "resources"):
        assert ours.get(key) == theirs.get(key), key
    assert ours["securityContext"] == theirs["securityContext"]
    assert {m["mountPath"] for m in ours["volumeMounts"]} == {
        m["mountPath"] for m in theirs["volumeMounts"]
    }


async def test_probes_ask_for_pages_that_there_are(variant: tuple[str, list[Object]]) -> None:
    running = container(variant[1])
    app = proxy_health_app(ProxyHealth(60.0), lambda: None)
    async with serving(app) as port:
        for probe in ("livenessProbe", "readinessProbe"):
            assert (await ask(port, running[probe]["httpGet"]["path"])).status == 200


@pytest.mark.parametrize("mode", MODES)
def test_recommended_values_turn_failover_on_in_every_mode(mode: str) -> None:
    recommended = yaml.safe_load((CHART / "values-recommended.yaml").read_text())
    values = yaml.safe_load((CHART / f"values-{mode}.yaml").read_text())
    config = {**values.pop("config", {}), **recommended["config"]}
    for servers in (SERVERS, [*SERVERS, "https://second:6443"]):
        objects = rendered(**{**values, "apiServers": servers, "config": config})
        data = one(objects, "ConfigMap")["data"]["config.conf"]
        found = load(data)
        assert found.warnings == ()
        assert found.config.steersman.eject_failing_endpoints
        assert len(found.config.steersman.api_servers) == (len(servers) if len(servers) > 1 else 0)


def test_chart_takes_the_configmap_of_kubeadm() -> None:
    objects = rendered(existingConfigMap="kube-proxy", apiServers=[])
    assert "ConfigMap" not in {each["kind"] for each in objects}
    (config,) = (v for v in pod(objects)["volumes"] if v["name"] == "config")
    assert config["configMap"]["name"] == "kube-proxy"


UI = {"enabled": True}


def named_ui(objects: list[Object], kind: str) -> Object:
    (found,) = (
        each
        for each in objects
        if each["kind"] == kind and each["metadata"]["name"] == "steersman-ui"
    )
    return found


def ui_container(objects: list[Object]) -> Object:
    (found,) = named_ui(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_pages_are_off_unless_asked_for_and_valid_then() -> None:
    assert not [each for each in rendered() if each["metadata"]["name"] == "steersman-ui"]
    assert "state" not in {port["name"] for port in container(rendered())["ports"]}
    objects = rendered(ui={**UI, "networkPolicy": {"enabled": True}})
    kinds = {each["kind"] for each in objects if each["metadata"]["name"] == "steersman-ui"}
    assert {"Deployment", "Service", "ServiceAccount", "Role", "NetworkPolicy"} <= kinds
    for each in objects:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_pages_run_without_any_rights_on_their_node() -> None:
    objects = rendered(ui=UI)
    spec = named_ui(objects, "Deployment")["spec"]["template"]["spec"]
    running = ui_container(objects)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert running["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not spec.get("hostNetwork")
    assert {"secret"} == {kind for each in spec["volumes"] for kind in each if kind != "name"}
    assert {"requests", "limits"} == running["resources"].keys()


def test_pages_may_find_pods_and_ask_for_reviews_and_nothing_else() -> None:
    for direct, rules in (
        (True, {("pods", "list")}),
        (False, {("pods", "list"), ("pods/proxy", "get"), ("pods/proxy", "create")}),
    ):
        objects = rendered(ui={**UI, "direct": direct})
        found = {
            (resource, verb)
            for rule in named_ui(objects, "Role")["rules"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        assert found == rules
        assert ("--direct" in ui_container(objects)["args"]) == direct
        for kind, role in (
            ("RoleBinding", "steersman-ui"),
            ("ClusterRoleBinding", "system:auth-delegator"),
        ):
            binding = named_ui(objects, kind)
            assert binding["roleRef"]["name"] == role
            account = {"kind": "ServiceAccount", "name": "steersman-ui", "namespace": "kube-system"}
            assert binding["subjects"] == [account]


def test_pages_are_no_pods_of_the_proxy() -> None:
    """The DaemonSet, the PodMonitor and the pages themselves find the proxy by its labels."""
    objects = rendered(ui=UI)
    template = named_ui(objects, "Deployment")["spec"]["template"]
    wanted = one(objects, "DaemonSet")["spec"]["selector"]["matchLabels"]
    assert not wanted.items() <= template["metadata"]["labels"].items()
    (selector,) = (
        each.removeprefix("--selector=")
        for each in ui_container(objects)["args"]
        if each.startswith("--selector=")
    )
    labels = dict(each.split("=") for each in selector.split(","))
    proxy = one(objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert labels.items() <= proxy.items()


def test_pages_and_proxy_have_the_same_token_and_port() -> None:
    for given, secret in (("", "steersman-state"), ("mine", "mine")):
        objects = rendered(ui={**UI, "existingSecret": given})
        assert ("Secret" in {each["kind"] for each in objects}) == (not given)
        for spec in (pod(objects), named_ui(objects, "Deployment")["spec"]["template"]["spec"]):
            (volume,) = (each for each in spec["volumes"] if each["name"] == "state")
            assert volume["secret"]["secretName"] == secret
        token = "/var/run/steersman/state/token"
        assert f"--token-file={token}" in ui_container(objects)["args"]
        loaded = load(one(objects, "ConfigMap")["data"]["config.conf"])
        state = loaded.config.steersman.state
        assert (state.bind_address, state.token_file) == ("0.0.0.0:10247", token)
        assert loaded.warnings == ()
        (port,) = (each for each in container(objects)["ports"] if each["name"] == "state")
        assert port["containerPort"] == 10247


def test_flags_of_the_pages_are_known() -> None:
    running = ui_container(rendered(ui=UI))
    parsed = parse_command_line(running["args"], extra=ui.COMMAND.flags)
    assert parsed.values["login"] is True
    assert parsed.warnings == ()
    assert running["livenessProbe"]["httpGet"]["path"] == access.ALIVE


def test_chart_without_api_server_says_what_to_give() -> None:
    with pytest.raises(helm.HelmError, match="apiServers: give the URL"):
        rendered(apiServers=[])


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "cilium"},
        {"tolerate": []},
        {"capabilities": ["net-admin"]},
        {"ui": {"enable": True}},
    ],
)
def test_chart_refuses_values_that_mean_nothing(values: Object) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError):
        chart.validate_schema(values)


def test_chart_has_no_lint() -> None:
    found = helm.lint(CHART, values={"apiServers": SERVERS})
    assert [m for m in found["messages"] if m["severity"] > 1] == []
    assert found["errors"] == []


@pytest.mark.parametrize(
    ("page", "count"), [("docs/migration.md", 3), ("docs/install.md", 1), ("README.md", 1)]
)
def test_commands_of_the_pages_render(page: str, count: int) -> None:
    """What the pages give to helm is understood by the chart."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    commands = re.findall(r"^ +.*(helm (?:install|upgrade).*)$", text, re.MULTILINE)
    assert len(commands) == count
    for command in commands:
        values: Object = {}
        for name in re.findall(r"(?:-f|--values) (\S+)", command):
            values |= yaml.safe_load((ROOT / name).read_text())
        for kind, setting in re.findall(r"--set(-string)? (\S+)", command):
            read = helm.parse_set_string_values if kind else helm.parse_set_string
            values |= read(setting)
        assert pod(rendered(**values))["containers"]


def test_settings_of_the_page_about_pages_render() -> None:
    settings = re.findall(r"--set (\S+?)`?\s", (ROOT / "docs" / "ui.md").read_text())
    assert settings == ["ui.enabled=true", "ui.direct=false"]
    values = helm.parse_set_string(",".join(settings))
    assert named_ui(rendered(**values), "Deployment")


def test_patches_of_the_migration_page_are_objects() -> None:
    text = (ROOT / "docs" / "migration.md").read_text().replace("\\\n", " ")
    patches = re.findall(r"-p '(.*?)'", text, re.DOTALL)
    assert len(patches) == 4
    for each in patches:
        assert yaml.safe_load(each), each


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    base = yaml.safe_load((DEPLOY / "kustomize/base/kustomization.yaml").read_text())
    assert {chart["version"], chart["appVersion"], base["images"][0]["newTag"]} == {__version__}


def mounts(objects: list[Object]) -> dict[str, Object]:
    return {each["mountPath"]: each for each in container(objects)["volumeMounts"]}


def test_the_mode_alone_brings_its_rights_and_mounts() -> None:
    """Also without the file of values for it: `--set mode=ebpf`."""
    bare, full = rendered(mode="ebpf"), chart_objects("ebpf")
    assert container(bare)["securityContext"] == container(full)["securityContext"]
    assert mounts(bare) == mounts(full)
    assert {"BPF", "PERFMON", "SYS_ADMIN"} <= set(
        container(bare)["securityContext"]["capabilities"]["add"]
    )


def test_capabilities_that_are_given_beat_those_of_the_mode() -> None:
    running = container(rendered(mode="ebpf", capabilities=["NET_ADMIN"]))
    assert running["securityContext"]["capabilities"]["add"] == ["NET_ADMIN"]


def test_another_mode_may_see_the_pins_that_it_is_to_remove() -> None:
    assert "/sys/fs/bpf" not in mounts(rendered(mode="nftables"))
    assert "/sys/fs/bpf" in mounts(rendered(mode="nftables", hostPaths={"bpf": True}))


def test_only_what_is_written_is_mounted_writable(variant: tuple[str, list[Object]]) -> None:
    mode, objects = variant
    writable = {path for path, each in mounts(objects).items() if not each.get("readOnly")}
    expected = {"nftables": set[str](), "ebpf": {"/run/xtables.lock", "/sys/fs/bpf"}}
    assert writable == expected.get(mode, {"/run/xtables.lock"})
