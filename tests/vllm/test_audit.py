"""`tierkv audit vllm`, of a real server: what it serves from tierkv is what it computes under a salt of its own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.service.daemon import ROOT, running
from tests.vllm.engine import PATIENT, eventually, tierkv_config
from tests.vllm.models import find_smollm2
from tests.vllm.server import server
from tierkv.insight.audit import AuditLog
from tierkv.insight.audit.vllm import Endpoint, audit_endpoint


def test_hits_are_what_is_computed(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model = find_smollm2()
    text = Tokenizer.from_file(str(model / "tokenizer.json")).encode((ROOT / "README.md").read_text()).ids
    prompts = [tuple(text[start : start + 400]) for start in (0, 400, 800)]
    log = AuditLog(alarm=False)
    with (
        running({"warm": {"capacity": "256MiB"}}) as daemon,
        server(model, tmp_path / "log", tierkv_config(daemon.url, **PATIENT)) as started,
    ):
        endpoint = Endpoint(started.url)
        assert not audit_endpoint(endpoint, prompts, max_tokens=8, sample=1.0, floor=0.001, log=log)
        assert log.skipped == {"miss": 3}

        def reused() -> bool:
            endpoint.forget()
            return all(endpoint.complete(prompt, 1).cached_tokens == 384 for prompt in prompts)

        eventually(reused)
        endpoint.forget()
        before = external(started.request("GET", "/metrics").decode())
        results = audit_endpoint(endpoint, prompts, max_tokens=8, sample=1.0, floor=0.001, log=log)
        assert external(started.request("GET", "/metrics").decode()) - before == 3 * 384, (
            "a salt of its own finds nothing"
        )
    print(json.dumps([result.to_dict() for result in results], indent=1))
    assert [(result.verdict, result.tokens, result.answer_token) for result in results] == [("ok", 384, None)] * 3
    assert log.clean


def external(metrics: str) -> float:
    (line,) = (line for line in metrics.splitlines() if line.startswith("vllm:external_prefix_cache_hits_total{"))
    return float(line.split()[-1])
