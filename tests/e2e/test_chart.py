"""The chart, and the manifests made of it: Helm, Kubernetes and ``serve`` understand them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, get_type_hints

import pytest
import yaml
from charts import CHART, MANIFESTS, by_kind, helm, manifests, plain
from typer.testing import CliRunner

from provider.cli import app
from provider.config import ServeConfig
from provider.observe.metrics import Metrics
from provider.serve.provider import LIVENESS_SECONDS

DOCUMENT = (CHART.parents[2] / "docs" / "how-to" / "operations.md").read_text()
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
needs_helm = pytest.mark.skipif(
    find_spec("helm_python") is None, reason="Helm's library is not installed (pip install -e '.[deploy]')"
)
# Whatever templates do only if told to.
EVERYTHING: dict[str, Any] = {
    "image": {"digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "registry"}],
    "model": {"volume": {"emptyDir": {"sizeLimit": "20Gi"}}},
    "initContainers": [
        {
            "name": "fetch",
            "image": "mirror:1",
            "command": ["fetch"],
            "volumeMounts": [{"name": "tls", "mountPath": "/tls"}],
        }
    ],
    "workers": 4,
    "stripes": 2,
    "threads": 1,
    "gpu": {"count": 1},
    "extraArgs": ["--tenant-mib=1024"],
    "extraEnv": [{"name": "LANG", "value": "C.UTF-8"}],
    "tls": {"clientCaKey": "ca.crt"},
    "service": {"loadBalancerSourceRanges": ["192.0.2.0/24"], "annotations": {"of": "service"}},
    "networkPolicy": {"tenantsFrom": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], "egress": [{}]},
    "serviceAccount": {"annotations": {"of": "account"}},
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "nodeSelector": {"kind": "gpu"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "podAnnotations": {"of": "pod"},
    "podLabels": {"of": "pod"},
}


@pytest.fixture
def understood(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServeConfig]:
    """What options come to; nothing is served."""
    monkeypatch.setattr("provider.cli.log_to_console", lambda *_: None)
    monkeypatch.setattr("provider.cli.keep_freed_memory", lambda: None)
    given: list[ServeConfig] = []

    def options(*words: str) -> ServeConfig:
        made = ServeConfig.__post_init__
        monkeypatch.setattr(ServeConfig, "__post_init__", lambda self: (given.append(self), made(self))[1])
        result = CliRunner().invoke(app, [*words])
        assert "is not a checkpoint folder" in str(result.exception), result.output
        return given[-1]

    return options


def check_pod(pod: dict[str, Any], config: ServeConfig) -> None:
    """What holds for every pod, whatever the values; ``config`` is what its arguments come to."""
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"tenants": config.port, "admin": config.admin_port}
    assert config.host == config.admin_host == "0.0.0.0"
    for name, path in (("startup", "/readyz"), ("readiness", "/readyz"), ("liveness", "/healthz")):
        assert container[f"{name}Probe"]["httpGet"] == {"path": path, "port": "admin"}
    assert container["livenessProbe"]["timeoutSeconds"] > LIVENESS_SECONDS
    stopping = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= stopping + config.drain_seconds + 10
    mounted = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    for needed in (config.model_dir, config.certificates, config.tokens.parent):
        assert mounted[str(needed)]["readOnly"]
    assert {mount["name"] for mount in mounted.values()} == {each["name"] for each in pod["volumes"]}
    files = {each["name"]: each["secret"]["items"] for each in pod["volumes"] if "secret" in each}
    assert {item["path"] for item in files["tls"]} >= {"server.pem", "server.key"}
    if config.client_ca is not None:
        assert config.client_ca.name in {item["path"] for item in files["tls"]}
    assert [item["path"] for item in files["tokens"]] == [config.tokens.name]

    assert not pod["automountServiceAccountToken"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in (container, *pod.get("initContainers", ())):
        locked = each["securityContext"]
        assert locked["readOnlyRootFilesystem"]
        assert not locked["allowPrivilegeEscalation"]
        assert locked["capabilities"] == {"drop": ["ALL"]}


def check_together(there: dict[str, dict[str, Any]]) -> None:
    """What the manifests say of each other."""
    deployment = there["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    for selector in (
        deployment["selector"]["matchLabels"],
        there["Service"]["spec"]["selector"],
        there["Replicas"]["spec"]["selector"],
        there["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        there["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        *(
            each["labelSelector"]["matchLabels"]
            for each in deployment["template"]["spec"]["topologySpreadConstraints"]
        ),
    ):
        assert selector
        assert selector.items() <= labels.items()
    assert [port["targetPort"] for port in there["Service"]["spec"]["ports"]] == ["tenants"]
    rules = there["NetworkPolicy"]["spec"]["ingress"]
    assert [[port["port"] for port in rule["ports"]] for rule in rules] == [["tenants"], ["admin"]]
    assert rules[1]["from"]  # without it, everybody
    account = there["ServiceAccount"]
    assert deployment["template"]["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert not account["automountServiceAccountToken"]


def test_the_plain_manifests_start_what_there_is_and_probe_where_it_listens(
    understood: Callable[..., ServeConfig],
) -> None:
    there = by_kind(MANIFESTS.read_text())
    pod = there["Deployment"]["spec"]["template"]["spec"]
    check_pod(pod, understood(*pod["containers"][0]["args"]))
    check_together(there)
    assert there["NetworkPolicy"]["spec"]["egress"] == []


@needs_helm
def test_the_plain_manifests_are_those_of_the_chart() -> None:
    assert MANIFESTS.read_text() == plain(), "run: python tests/charts.py"


@needs_helm
@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_helm_finds_nothing_to_say(values: dict[str, Any]) -> None:
    made = helm(values)
    assert made["error"] == ""
    assert made["lint"]["errors"] == []
    assert [each["error"] for each in made["lint"]["messages"]] == ["icon is recommended"]
    assert "{{" not in "".join(made["rendered"].values())


@needs_helm
def test_every_value_arrives(understood: Callable[..., ServeConfig]) -> None:
    there = manifests(EVERYTHING)
    deployment = there["Deployment"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    config = understood(*container["args"])
    check_pod(pod, config)
    check_together(there)
    assert (config.workers, config.stripes, config.threads, config.tenant_mib) == (4, 2, 1, 1024)
    assert config.device == "cuda"
    assert container["resources"]["limits"] == {"memory": "16Gi", "nvidia.com/gpu": 1}
    assert container["image"].endswith("@" + EVERYTHING["image"]["digest"])
    assert pod["volumes"][0] == {"name": "model", **EVERYTHING["model"]["volume"]}
    (fetch,) = pod["initContainers"]
    assert [mount["mountPath"] for mount in fetch["volumeMounts"]] == ["/model", "/tmp", "/tls"]
    assert not any(mount.get("readOnly") for mount in fetch["volumeMounts"])
    assert "replicas" not in deployment  # the autoscaler's
    assert set(deployment["template"]["metadata"]["annotations"]) == {"of"}  # or it would be scraped twice
    given = yaml.safe_dump_all(there.values())
    for text in (
        "registry",
        "192.0.2.0/24",
        "of: service",
        "of: account",
        "kind: gpu",
        "of: pod",
        "release: prom",
    ):
        assert text in given, text
    monitor = there["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= there["Replicas"]["metadata"]["labels"].items()
    assert {each["port"] for each in monitor["endpoints"]} <= {
        p["name"] for p in there["Replicas"]["spec"]["ports"]
    }
    assert monitor["endpoints"][0]["relabelings"][0]["replacement"] == VALUES["serviceMonitor"]["job"]
    assert f'job="{VALUES["serviceMonitor"]["job"]}"' in (CHART.parents[1] / "alerts.yml").read_text()


@needs_helm
def test_the_autoscaler_asks_for_a_gauge_that_there_is() -> None:
    scaler = manifests({"autoscaling": {"enabled": True}})["HorizontalPodAutoscaler"]["spec"]
    (metric,) = scaler["metrics"]
    assert metric["type"] == "Pods"
    name = metric["pods"]["metric"]["name"]
    metrics = Metrics()
    metrics.watch(lambda: 7, lambda: 0, lambda: (0, 0))
    assert metrics.value(name) == 7
    (rule,) = (text for text in re.findall(r"(?s)```yaml\n(.*?)```", DOCUMENT) if "seriesQuery" in text)
    (rule,) = yaml.safe_load(rule)["rules"]["custom"]
    assert rule["seriesQuery"].startswith(name + "{")
    assert rule["name"] == {"as": name}
    assert scaler["scaleTargetRef"]["name"] == manifests()["Deployment"]["metadata"]["name"]


@needs_helm
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replica": 2}, "'replica' not allowed"),
        ({"tls": {"secret": "x"}}, "'secret' not allowed"),
        ({"numerics": "int8"}, "must be one of 'ring'"),
        ({"tokens": {"secretName": ""}}, "/tokens/secretName"),
        ({"extraArgs": ["tenant-mib"]}, "/extraArgs/0"),
        ({"workers": 3, "stripes": 2}, "workers=3 cannot be divided into stripes=2"),
        ({"stripes": 2}, "stripes=2 has no effect without workers"),
        ({"model": {"existingClaim": ""}}, "model.existingClaim or model.volume is needed"),
        ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "minReplicas is more than"),
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, Any], said: str) -> None:
    assert said in helm(values)["error"]


def test_the_schema_knows_the_values_and_the_options() -> None:
    """Whatever has a default may be given, and nothing else."""
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())  # JSON is YAML

    def compare(values: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        assert not schema["additionalProperties"], where
        assert values.keys() == schema["properties"].keys() - {"global"}, where
        for name, value in values.items():
            if "properties" in schema["properties"][name]:
                compare(value, schema["properties"][name], f"{where}.{name}")

    compare(VALUES, schema, "values")
    options = get_type_hints(ServeConfig, include_extras=True)
    assert set(schema["properties"]["numerics"]["enum"]) == set(options["numerics"].__metadata__[0].choices)
    usual = {each.name: each.default for each in dataclasses.fields(ServeConfig)}
    for name in ("numerics", "workers", "stripes"):
        assert VALUES[name] == usual[name]
    assert int(VALUES["resources"]["requests"]["cpu"]) == VALUES["threads"] * max(1, VALUES["workers"])


def test_the_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    changes = (CHART.parents[2] / "CHANGELOG.md").read_text()
    assert chart["version"] == chart["appVersion"] == re.findall(r"(?m)^## (\S+)$", changes)[0]


def test_the_document_names_values_that_there_are() -> None:
    (table,) = re.findall(r"(?s)\| value \|.*?\n\n", DOCUMENT)
    named = re.findall(
        r"`([a-z][\w.]*)`", " ".join(line.split("|")[1] for line in table.splitlines()[2:] if line)
    )
    assert len(named) > 10
    for name in named:
        there: Any = VALUES
        for part in name.split("."):
            assert part in there, name
            there = there[part]


def versions() -> list[str]:
    """Of Kubernetes: the oldest that the chart allows, and the newest whose schemas there are."""
    validate = pytest.importorskip(
        "kubernetes_validate", reason="no schemas of Kubernetes (pip install -e '.[deploy]')"
    )
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (oldest,) = re.findall(r">=(1\.\d+)", chart["kubeVersion"])
    return [oldest, validate.latest_version()]


def test_kubernetes_understands_the_plain_manifests() -> None:
    for version in versions():
        check_schemas(by_kind(MANIFESTS.read_text()), version)


@needs_helm
def test_kubernetes_understands_what_the_chart_makes() -> None:
    for version in versions():
        check_schemas(manifests(EVERYTHING), version)


def check_schemas(there: dict[str, dict[str, Any]], version: str) -> None:
    import kubernetes_validate

    for kind, manifest in there.items():
        if kind != "ServiceMonitor":  # not of Kubernetes itself
            kubernetes_validate.validate(manifest, version, strict=True)
    there["Deployment"]["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="redinessProbe"):
        kubernetes_validate.validate(there["Deployment"], version, strict=True)
