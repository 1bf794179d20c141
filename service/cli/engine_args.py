"""`tierkv engine-args`: the arguments that connect an engine to a daemon."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import typer

from tierkv.service.cli.options import UrlOption

__all__ = ["engine_args"]


class Engine(StrEnum):
    """Engines that are connected by arguments on their command line."""

    VLLM = "vllm"
    SGLANG = "sglang"


def engine_args(
    engine: Annotated[Engine, typer.Argument(help="Which engine.")],
    url: UrlOption,
    tenant: Annotated[str | None, typer.Option(help="Whose blocks; default: the token's tenant.")] = None,
) -> None:
    """Print the arguments that connect an engine to a daemon, ready to paste behind its own into a shell.

    A token is not among them, since everybody who lists processes would see it: give the engine TIERKV_TOKEN in its
    environment.
    """
    from tierkv.client.transport import Transport

    Transport(url, tenant, timeout_s=1.0)  # connects to nobody yet, but refuses what no daemon's address can be
    options = {"url": url, **({} if tenant is None else {"tenant": tenant})}
    typer.echo(shlex.join(_vllm(options) if engine is Engine.VLLM else _sglang(options)))


def _vllm(options: Mapping[str, str]) -> list[str]:
    transfer = {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # the default, `fail`, ends a request whose blocks could not be loaded
        "kv_connector_extra_config": options,
    }
    return ["--kv-transfer-config", json.dumps(transfer)]


def _sglang(options: Mapping[str, str]) -> list[str]:
    backend = {
        "backend_name": "tierkv",
        "module_path": "tierkv.engines.sglang",
        "class_name": "TierKVHiCache",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,  # without it tierkv does not know which page follows which
        **options,
    }
    return [
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-backend-extra-config", json.dumps(backend)),
    ]
