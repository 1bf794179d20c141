"""What is shipped to run several daemons: compose file, Kubernetes manifests, a Valkey's configuration."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

from tests.servers.redis import MISSING_REDIS, RedisServer
from tierkv.config import Config, load_config
from tierkv.core.build import read_secret
from tierkv.service.auth import OPEN_ROUTES, Authority
from tierkv.service.catalog import OPERATIONS
from tierkv.sources import Sources
from tierkv.storage.shared import BackendError, make_backend
from tierkv.storage.shared.valkey import ValkeyBackend

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
MANIFESTS = DEPLOY / "kubernetes"
COMPOSE = (DEPLOY / "compose.yaml").read_text()
KUBERNETES = "1.34"
needs_redis = pytest.mark.skipif(bool(MISSING_REDIS), reason=MISSING_REDIS)


def documents(path: Path) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all(path.read_text())


@cache
def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """All resources, by kind and name."""
    found = [document for path in sorted(MANIFESTS.glob("*.yaml")) for document in documents(path)]
    named = [document for document in found if document["kind"] != "Kustomization"]
    return {(document["kind"], document["metadata"]["name"]): document for document in named}


def schema_of(kind: str) -> Any:
    return getattr(prometheus_operator, kind)


@pytest.mark.parametrize("name", sorted(manifests()), ids="-".join)
def test_kubernetes_takes_every_manifest(name: tuple[str, str]) -> None:
    document = manifests()[name]
    if document["apiVersion"].startswith("monitoring.coreos.com/"):
        understood = schema_of(name[0]).model_validate(document)
        assert understood.model_dump(mode="json", by_alias=True, exclude_unset=True) == document  # no field is unknown
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    assert document["metadata"].get("namespace", "kv") == "kv"


def test_a_misspelt_field_would_be_found() -> None:
    daemons, monitor = manifests()["DaemonSet", "tierkv"], manifests()["ServiceMonitor", "tierkv"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**daemons, "spec": {**daemons["spec"], "replicas": 1}}, KUBERNETES, strict=True)
    broken = {**monitor, "spec": {**monitor["spec"], "endpoint": []}}
    understood = schema_of("ServiceMonitor").model_validate(broken)
    assert understood.model_dump(mode="json", by_alias=True, exclude_unset=True) != broken


def test_the_kustomization_names_every_manifest_but_the_example_of_a_secret() -> None:
    (kustomization,) = documents(MANIFESTS / "kustomization.yaml")
    files = {path.name for path in MANIFESTS.glob("*.yaml")}
    assert set(kustomization["resources"]) == files - {"kustomization.yaml", "secret.example.yaml"}
    assert {document["kind"] for document in manifests().values()} >= {"DaemonSet", "StatefulSet", "ServiceMonitor"}


def pod(kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = manifests()[kind, name]["spec"]["template"]["spec"]
    return found


PODS = [("DaemonSet", "tierkv"), ("StatefulSet", "valkey")]


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_pods_are_unprivileged(kind: str, name: str) -> None:
    spec = pod(kind, name)
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec["automountServiceAccountToken"]
    assert not spec["enableServiceLinks"]  # a service called tierkv would set TIERKV_PORT
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own = container["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
        assert own["capabilities"]["drop"] == ["ALL"]
        assert own.get("runAsUser") is None or container["name"] == "directories"
    for container in spec["containers"]:
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_pods_mount_volumes_that_there_are(kind: str, name: str) -> None:
    spec = pod(kind, name)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounted = set()
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        mounted |= {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == set(volumes)
    for volume in volumes.values():
        for source in volume.get("projected", {}).get("sources", [volume]):
            if "configMap" in source:
                assert ("ConfigMap", source["configMap"]["name"]) in manifests()
            if "secret" in source:
                secret = manifests()["Secret", source["secret"].get("secretName") or source["secret"]["name"]]
                keys = {item["key"] for item in source["secret"]["items"]}
                assert keys <= {*secret.get("data", {}), *secret["stringData"]}


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_services_find_the_pods(kind: str, name: str) -> None:
    workload = manifests()[kind, name]
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in pod(kind, name)["containers"][0]["ports"]}
    services = [document for (found, _), document in manifests().items() if found == "Service"]
    ours = [service["spec"] for service in services if service["spec"]["selector"].items() <= labels.items()]
    assert ours
    for service in ours:
        for port in service["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    assert not [service for service in services if service["metadata"]["name"] == "tierkv"]


@pytest.fixture
def in_the_pod(tmp_path: Path) -> Config:
    """What the daemon of the pod is configured with: its image, its file, its environment."""
    container = pod("DaemonSet", "tierkv")["containers"][0]
    path = tmp_path / "tierkv.yaml"
    path.write_text(manifests()["ConfigMap", "tierkv"]["data"]["tierkv.yaml"])
    downward = {"POD_IP": "10.1.2.3", "NODE_NAME": "node-7"}
    environ = {"TIERKV_STATE_DIR": "/var/lib/tierkv", "TIERKV_SOCKET": "/run/tierkv/tierkv.sock"}
    for variable in container["env"]:
        if "value" in variable:
            environ[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: downward[match[1]], variable["value"])
        else:
            assert variable["name"] in downward
    return Sources(path, environ, {}).read().config


def test_the_pods_configuration_fits_the_pod(in_the_pod: Config) -> None:
    spec = pod("DaemonSet", "tierkv")
    container = spec["containers"][0]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"] == ["serve", "--config", "/etc/tierkv/tierkv.yaml"]
    for path in (in_the_pod.state_dir, in_the_pod.warm.directory):
        assert str(path) in mounts
    for path in (in_the_pod.socket, in_the_pod.secret, in_the_pod.shared.password_file):
        assert path is not None
        assert str(path.parent) in mounts
    assert (in_the_pod.host, in_the_pod.cluster.node) == ("10.1.2.3", "node-7")
    assert in_the_pod.port == container["ports"][0]["containerPort"]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert in_the_pod.warm.capacity < limit
    assert spec["terminationGracePeriodSeconds"] >= 600


def test_the_pods_of_the_configuration_are_called_as_the_services_are(in_the_pod: Config) -> None:
    names = {f"{name}.kv.svc" for kind, name in manifests() if kind == "Service"}
    assert in_the_pod.shared.url == "valkey://valkey.kv.svc:6379"
    assert in_the_pod.cluster.peers == (f"http://tierkv-nodes.kv.svc:{in_the_pod.port}",)
    assert {"valkey.kv.svc", "tierkv-nodes.kv.svc"} <= names
    assert set(in_the_pod.auth.allowed_hosts) & names == {"tierkv-local.kv.svc"}
    assert manifests()["Service", "tierkv-nodes"]["spec"]["clusterIP"] == "None"


def test_what_the_pod_is_given_lands_where_the_daemon_looks(in_the_pod: Config) -> None:
    copying = next(c for c in pod("DaemonSet", "tierkv")["initContainers"] if c["name"] == "secrets")
    script = copying["command"][-1]
    assert f"/mnt/secret/secret /mnt/secret/valkey-password {in_the_pod.secret and in_the_pod.secret.parent}/" in script
    assert f"/mnt/secret/tokens.yaml {in_the_pod.state_dir}/" in script


def test_probes_and_prometheus_ask_routes_that_there_are() -> None:
    container = pod("DaemonSet", "tierkv")["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert ("GET", container[probe]["httpGet"]["path"]) in OPEN_ROUTES  # Kubernetes has no token
    (endpoint,) = manifests()["ServiceMonitor", "tierkv"]["spec"]["endpoints"]
    assert ("GET", endpoint["path"]) in OPERATIONS
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["key"] in manifests()["Secret", credentials["name"]]["stringData"]
    selected = manifests()["ServiceMonitor", "tierkv"]["spec"]["selector"]["matchLabels"]
    assert selected.items() <= manifests()["Service", "tierkv-nodes"]["metadata"]["labels"].items()


def test_the_manifests_say_of_the_valkey_what_its_files_say() -> None:
    assert manifests()["ConfigMap", "valkey"]["data"]["valkey.conf"] == (DEPLOY / "valkey.conf").read_text()
    users = [line for line in (DEPLOY / "valkey-users.conf").read_text().splitlines() if line.startswith("user ")]
    assert manifests()["Secret", "tierkv"]["stringData"]["users.conf"].splitlines() == users
    limit = pod("StatefulSet", "valkey")["containers"][0]["resources"]["limits"]["memory"]
    assert "maxmemory 48gb" in (DEPLOY / "valkey.conf").read_text()
    assert int(limit.removesuffix("Gi")) >= 1.15 * 48


def test_the_compose_file_is_one() -> None:
    compose_spec.PyCompose.from_json(json.dumps(yaml.safe_load(COMPOSE))).validate()  # it merges no maps by itself
    with pytest.raises(ValueError, match="shm_sise"):
        compose_spec.PyCompose.from_json(json.dumps(yaml.safe_load(COMPOSE.replace("shm_size", "shm_sise"))))


def test_the_composed_daemons_are_configured_well() -> None:
    services = yaml.safe_load(COMPOSE)["services"]
    nodes = {name: service for name, service in services.items() if name.startswith("tierkv-")}
    seen = []
    for service in nodes.values():
        environ = {name: str(value) for name, value in service["environment"].items()}
        config = Sources(None, {"TIERKV_STATE_DIR": "/var/lib/tierkv", **environ}, {}).read().config
        assert {f"http://{name}:{config.port}" for name in nodes} == set(config.cluster.peers)
        assert config.shared.url == "valkey://valkey:6379"
        targets = {volume.split(":")[1] for volume in service["volumes"]}
        for path in (config.secret, config.shared.password_file):
            assert path is not None
            assert str(path.parent) in targets
        assert str(config.state_dir) in targets
        assert config.warm.capacity < 1200 << 20
        seen.append(config.cluster.node)
    assert sorted(seen) == ["a", "b"]


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to other users, as the container does")
def test_the_composed_setup_makes_what_daemons_and_valkey_read(tmp_path: Path) -> None:
    for name in ("tierkv", "valkey", "state-a", "state-b"):
        (tmp_path / name).mkdir()
    (tmp_path / "deploy").symlink_to(DEPLOY)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tierkv").write_text(f'#!/bin/sh\nexec {sys.executable} -m tierkv.service "$@"\n')
    (tmp_path / "bin" / "tierkv").chmod(0o755)
    environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    made = []
    for _ in range(2):  # the second start changes nothing
        subprocess.run(["sh", DEPLOY / "compose-setup.sh", tmp_path], check=True, env=environ, timeout=60)
        made.append({path.name: path.read_bytes() for path in (tmp_path / "tierkv").iterdir()})
    assert made[0] == made[1]
    assert len(read_secret(tmp_path / "tierkv" / "secret")) == 32
    password = made[0]["valkey-password"].decode()
    assert re.fullmatch("[0-9a-f]{48}", password)
    assert f">{password} " in (tmp_path / "valkey" / "users.conf").read_text()
    for name in ("state-a", "state-b"):
        assert Authority(tmp_path / name).required
        assert (tmp_path / name).stat().st_uid == (tmp_path / name / "tokens.yaml").stat().st_uid == 10001


@pytest.mark.parametrize("name", ["cluster-valkey.yaml", "cluster-s3.yaml"])
def test_the_configurations_name_engines_that_can_be_spoken_to(name: str, tmp_path: Path) -> None:
    shared = load_config(ROOT / "configs" / name).shared
    assert shared.url is not None
    (tmp_path / "password").write_text("x\n")
    make_backend(
        shared.url,
        username=shared.user,
        password_file=tmp_path / "password" if shared.password_file else None,
        options=shared.options,
    )


def test_the_lifecycle_rule_is_about_the_configurations_blocks() -> None:
    (rule,) = json.loads((DEPLOY / "s3-lifecycle.json").read_text())["Rules"]
    url = load_config(ROOT / "configs" / "cluster-s3.yaml").shared.url
    assert url is not None
    assert rule["Filter"]["Prefix"].startswith(url.split("/", 3)[3] + "/tierkv")
    assert (rule["Status"], rule["Expiration"]) == ("Enabled", {"Days": 7})


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[RedisServer]:
    """A server with the files that are shipped, smaller; the directory has a password."""
    users = tmp_path / "users.conf"
    users.write_text((DEPLOY / "valkey-users.conf").read_text().replace("CHANGE-ME", "right"))
    conf = tmp_path / "valkey.conf"
    conf.write_text((DEPLOY / "valkey.conf").read_text().replace("/etc/valkey/users.conf", str(users)))
    server = RedisServer(tmp_path, "--include", str(conf), "--maxmemory", "64mb")
    yield server
    server.stop()


@needs_redis
def test_a_server_takes_the_configuration_and_lets_in_nobody_without_password(valkey: RedisServer) -> None:
    with pytest.raises(AssertionError):
        assert valkey.tell("GET", "tierkv/1/x") == ""

    def as_user(*words: str) -> str:
        return valkey.tell("--no-auth-warning", "--user", "tierkv", "--pass", "right", *words)

    assert "maxmemory_policy:allkeys-lru" in as_user("INFO", "memory")
    assert "NOPERM" in as_user("FLUSHALL")
    assert "NOPERM" in as_user("CONFIG", "GET", "maxmemory")
    assert "NOPERM" in as_user("SET", "elsewhere", "x")
    assert as_user("SET", "tierkv/1/x", "x") == "OK"


@needs_redis
async def test_the_shipped_user_may_do_all_that_the_shared_tier_does(valkey: RedisServer) -> None:
    backend = ValkeyBackend([(valkey.host, valkey.port)], username="tierkv", password="right")
    await backend.open()
    try:
        await backend.put("tierkv/1/a", b"value")
        assert await backend.present(["tierkv/1/a", "tierkv/1/b"]) == [True, False]
        assert await backend.get("tierkv/1/a") == b"value"
        assert await backend.get_many(["tierkv/1/a"]) == [b"value"]
        assert await backend.get_head("tierkv/1/a", 2) == b"va"
        assert await backend.swap("tierkv/1/a", b"value", b"other")
        assert await backend.claim("tierkv/1/c", "me", 10)
        await backend.unclaim("tierkv/1/c", "me")
        assert [name async for name in backend.names("tierkv/")] == ["tierkv/1/a"]
        capacity = await backend.capacity()
        assert (capacity.capacity_bytes, capacity.warnings) == (64 << 20, ())
        assert await backend.delete(["tierkv/1/a"]) == 1
    finally:
        await backend.close()


@needs_redis
async def test_the_shipped_server_refuses_others(valkey: RedisServer) -> None:
    for username, password in ((None, None), (None, "right"), ("tierkv", "wrong")):
        backend = ValkeyBackend([(valkey.host, valkey.port)], username=username, password=password)
        with pytest.raises(BackendError) as refused:
            await backend.open()
        assert refused.value.kind == "refused"
        await backend.close()
