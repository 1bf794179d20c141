"""What vLLM calls. Everything is done by the scheduler's side or a worker's; nothing here decides anything."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Self

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from tierkv.engines.vllm.identity import group_layers, page_geometry, read_spec
from tierkv.engines.vllm.link import open_link
from tierkv.engines.vllm.options import parse_options
from tierkv.engines.vllm.orders import Step
from tierkv.engines.vllm.scheduler import SchedulerSide
from tierkv.engines.vllm.worker import WorkerSide
from tierkv.spec import KVSpec

__all__ = ["TierKVConnector"]

log = logging.getLogger(__name__)


class _Identity(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler's side at the start: the spec of its KV."""

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec


class _Counts(KVConnectorStats):  # type: ignore[misc]
    """How often what happened, for vLLM's log."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> Self:
        self.data = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in {*self.data, *other.data}}
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class TierKVConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's KV connector for tierkv, see `tierkv.engines.vllm`."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = parse_options(transfer.kv_connector_extra_config or {})
        geometry = page_geometry(vllm_config, kv_cache_config, options)
        if transfer.kv_load_failure_policy != "recompute":
            log.warning("a block that cannot be loaded ends its request: set kv_load_failure_policy to recompute")
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._link = open_link(options, transfer.engine_id)
            self._scheduler = SchedulerSide(self._link, options, geometry)
            return
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        pp_rank, tp = get_pp_group().rank_in_group, get_tp_group()
        self._spec = read_spec(
            vllm_config,
            kv_cache_config,
            options,
            device=vllm_config.device_config.device_type,
            tp_rank=tp.rank_in_group,
            pp_rank=pp_rank,
        )
        self._link = open_link(options, transfer.engine_id)
        rank = pp_rank * tp.world_size + tp.rank_in_group
        self._worker = WorkerSide(self._link, options, geometry, self._spec, rank)

    # In the worker

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        groups = self._kv_cache_config.kv_cache_groups
        self._working.use_pages([[kv_caches[name] for name in group_layers(group)] for group in groups])

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return _Identity(self._spec)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._working.start_loads(self._step.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: no step begins before the loads it needs have ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: whole blocks are saved when the step is over."""

    def wait_for_save(self) -> None:
        self._working.start_saves(self._step.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self._working.results(idle=self._step.idle)
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    # In the scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], _Identity]) -> None:
        self._scheduling.know_ranks([metadata[rank].spec for rank in sorted(metadata)])

    def on_new_request(self, request: Any) -> None:
        self._scheduling.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self._scheduling.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduling.arrived(connector_output.finished_recving or set(), connector_output.failed_recving or set())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        self._scheduling.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        self._scheduling.reset()
        return True

    # In both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counts = self._link.take_counts()
        return _Counts(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return _Counts(data=data or {})

    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        if side is not None:
            side.close()
        self._scheduler = self._worker = None

    @property
    def _step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "this is the scheduler's side"
        return self._worker

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is a worker's side"
        return self._scheduler
