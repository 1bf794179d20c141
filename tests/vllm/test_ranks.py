"""Two tensor-parallel workers: each stores and loads its own half of the heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.service.daemon import running
from tests.vllm.engine import Ask, Engine, engine, eventually, prompt, tierkv_config


def test_tensor_parallel_workers_reuse_their_own_halves(
    models: dict[str, Path], plain: Callable[[str], Engine], tmp_path: Path
) -> None:
    asks = [Ask(prompt(length, seed=length)) for length in (300, 600)]
    want = plain("llama").run(asks).tokens
    separate = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (
        running({"warm": {"capacity": "64MiB"}}) as daemon,
        engine(
            models["llama"], tmp_path / "log", tierkv_config(daemon.url), environment=separate, tensor_parallel_size=2
        ) as halves,
    ):
        assert halves.run(asks).tokens == want

        def reused() -> bool:
            halves.reset()
            outcome = halves.run(asks)
            assert outcome.tokens == want
            return outcome.cached == [256, 576]

        eventually(reused)
        with daemon.connect() as cache:
            eventually(lambda: not any(cache.stats()["leases"].values()))
        assert halves.stop() == 0
