"""`tierkv engine-args`: what a user pastes behind an engine's command."""

import json
import shlex
from collections.abc import Iterator

import pytest

from tests.service.cli import Command, command


@pytest.fixture
def tierkv(capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    with command(capfd) as run:
        yield run


def words(tierkv: Command, *arguments: str) -> list[str]:
    """The words a shell makes of what is printed: one line, which keeps its quotes when it is pasted."""
    code, out, error = tierkv("engine-args", *arguments)
    assert (code, error, out.count("\n")) == (0, "", 1)
    return shlex.split(out)


def test_vllm(tierkv: Command) -> None:
    option, config = words(tierkv, "vllm", "--url", "unix:///run/it's mine/s")
    assert option == "--kv-transfer-config"
    assert json.loads(config) == {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": "unix:///run/it's mine/s"},
    }


def test_sglang(tierkv: Command) -> None:
    *flags, config = words(tierkv, "sglang", "--url", "http://127.0.0.1:7000", "--tenant", "chat")
    assert flags == [
        "--enable-hierarchical-cache",
        "--hicache-storage-backend",
        "dynamic",
        "--hicache-storage-backend-extra-config",
    ]
    assert json.loads(config) == {
        "backend_name": "tierkv",
        "module_path": "tierkv.engines.sglang",
        "class_name": "TierKVHiCache",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "url": "http://127.0.0.1:7000",
        "tenant": "chat",
    }


def test_the_tenant_is_for_both_engines(tierkv: Command) -> None:
    _, config = words(tierkv, "vllm", "--url", "unix:///s", "--tenant", "chat")
    assert json.loads(config)["kv_connector_extra_config"] == {"url": "unix:///s", "tenant": "chat"}


def test_the_address_may_come_from_the_environment(capfd: pytest.CaptureFixture[str]) -> None:
    with command(capfd, TIERKV_URL="unix:///run/s") as tierkv:
        assert "unix:///run/s" in words(tierkv, "vllm")[1]


def test_a_token_is_never_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with command(capfd, TIERKV_TOKEN="tkv_secret") as tierkv:
        for engine in ("vllm", "sglang"):
            assert "secret" not in " ".join(words(tierkv, engine, "--url", "unix:///run/s"))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("wrong", "named"),
    [(("--url", "run/s"), "'run/s'"), (("--url", "unix:///s", "--tenant", "a b"), "'a b'")],
)
def test_what_cannot_work_is_refused(tierkv: Command, engine: str, wrong: tuple[str, ...], named: str) -> None:
    code, out, error = tierkv("engine-args", engine, *wrong)
    assert (code, out) == (2, "")
    assert named in error


def test_an_unknown_engine_is_refused(tierkv: Command) -> None:
    code, out, error = tierkv("engine-args", "llama.cpp", "--url", "unix:///s")
    assert (code, out) == (2, "")
    assert "vllm" in error
