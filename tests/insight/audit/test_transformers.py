"""Audits of the transformers adapter: what is damaged is found and named, what is not is left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierkv
from tierkv.cache import Cache, Chain
from tierkv.insight.audit import AuditLog, AuditResult

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
audits = pytest.importorskip("tierkv.insight.audit.transformers")
tiny = pytest.importorskip("tests.engines.tiny")
adapter = pytest.importorskip("tierkv.engines.transformers")

BLOCK = 16
HITS = 200
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.llama(tmp_path_factory.mktemp("halves"), torch.bfloat16)


@dataclass
class Audited:
    """An auditor that has looked at some hits, and what it said."""

    results: list[AuditResult] = field(default_factory=list)
    log: AuditLog = field(default_factory=lambda: AuditLog(alarm=False))

    def serve(
        self,
        setup: Any,
        cache: Cache,
        prompts: list[list[int]],
        *,
        sample: float = 1.0,
        chunk_tokens: int = BLOCK,
        store_generated: bool = False,
        new: int = 1,
    ) -> None:
        model, spec = setup
        cache.register(spec)
        with audits.Auditor(
            sample=sample, seed=b"seed", backlog=HITS, log=self.log, report=self.results.append
        ) as auditor:
            for tokens in prompts:
                adapter.generate(
                    model,
                    cache,
                    spec,
                    tokens,
                    new,
                    chunk_tokens=chunk_tokens,
                    store_generated=store_generated,
                    audit=auditor,
                )
            assert auditor.wait(60)

    @property
    def only(self) -> AuditResult:
        (result,) = self.results
        return result


def replace_block(
    cache: Cache, spec: Any, tokens: list[int], index: int, change: Callable[[Any], None], group: int = 0
) -> None:
    """Store other bytes in place of a block, with the checksum that belongs to them."""
    chain = Chain.of(spec, tokens[: (index + 1) * spec.block_tokens])
    with cache.acquire(chain) as read:
        held = {ref.group: bytearray(read.view(index, ref.group)) for ref in read.blocks if ref.index == index}
    layout = spec.layout(group)
    width = {"float32": np.uint32, "bfloat16": np.uint16}[spec.dtype]
    change(np.frombuffer(held[group], width).reshape(layout.shape))
    cache.delete(chain)
    with cache.reserve(chain, start=index) as write:
        for number, payload in held.items():
            write.write(index, payload, number)
        assert write.commit() == len(held)


def flip(layer: int, plane: int, head: int, token: int, dim: int, bit: int) -> Callable[[Any], None]:
    def change(block: Any) -> None:
        block[layer, plane, head, token, dim] ^= block.dtype.type(1 << bit)

    return change


def test_one_flipped_bit_is_found_at_five_percent(llama: Any, cache: Cache) -> None:
    """The least significant bit of one value, under a right checksum."""
    tokens = tiny.prompt(100)
    audited = Audited()
    audited.serve(llama, cache, [tokens])
    replace_block(cache, llama[1], tokens, 4, flip(2, 1, 1, 5, 9, 0))
    audited.serve(llama, cache, [tokens] * HITS, sample=0.05)
    assert 0 < len(audited.results) < HITS // 5
    for result in audited.results:
        assert (result.verdict, result.basis, result.reason) == ("corrupt", "exact", "bits")
        assert result.finding is not None
        assert (result.finding.block, result.finding.layer, result.finding.plane) == (4, 2, "V")
        assert (result.finding.token, result.finding.positions) == (4 * BLOCK + 5, 1)
        assert result.finding.block_hash == Chain.of(llama[1], tokens).hashes[4].hex()
        assert {(p.layer, p.plane): p.differing for p in result.planes if p.differing} == {(2, "V"): 1}
        assert sum(p.ulps[1] for p in result.planes if len(p.ulps) > 1) == 1
    assert audited.log.verdicts["corrupt"] == len(audited.results)
    assert audited.log.skipped == {}


def test_what_is_whole_is_never_suspected(llama: Any, cache: Cache) -> None:
    prompts = [tiny.prompt(60 + seed, seed=seed) for seed in range(4)]
    audited = Audited()
    audited.serve(llama, cache, prompts, sample=0.0)
    audited.serve(llama, cache, prompts * (HITS // 4), sample=0.05)
    assert len(audited.results) > 2
    assert {(result.verdict, result.basis, result.computed) for result in audited.results} == {("ok", "exact", 1)}
    assert all(result.tokens == 48 for result in audited.results)
    assert audited.log.clean


@pytest.mark.parametrize("setup", ["llama", "halves"])
@pytest.mark.parametrize("chunk", [BLOCK, 4 * BLOCK])
def test_other_steps_and_stored_answers_stay_inside_the_envelope(
    setup: str, chunk: int, cache: Cache, request: pytest.FixtureRequest
) -> None:
    """Blocks of an answer are computed token by token, and a reused prefix ends in the middle of a step."""
    model = request.getfixturevalue(setup)
    audited = Audited()
    for seed in range(6):
        tokens = tiny.prompt(50 + 11 * seed, seed=seed)
        for _ in range(2):
            answer = adapter.generate(*model[:1], None, model[1], tokens, 20, chunk_tokens=chunk).tokens
            audited.serve(model, cache, [tokens], chunk_tokens=chunk, store_generated=True, new=20)
            tokens = [*tokens, *answer, 3, 4, 5]
    assert len(audited.results) >= 6
    assert {result.verdict for result in audited.results} == {"ok"}


@pytest.mark.parametrize("setup", ["llama", "halves"])
def test_a_large_error_is_seen_beyond_the_envelope(setup: str, cache: Cache, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(setup)
    tokens = tiny.prompt(100)
    audited = Audited()
    audited.serve(model, cache, [tokens])
    bit = 30 if model[1].dtype == "float32" else 14
    replace_block(cache, model[1], tokens, 1, flip(1, 0, 0, 3, 2, bit))
    audited.serve(model, cache, [tokens], chunk_tokens=4 * BLOCK, store_generated=True)
    result = audited.only
    assert (result.verdict, result.basis, result.reason, result.computed) == ("corrupt", "envelope", "difference", 2)
    assert result.finding is not None
    assert (result.finding.layer, result.finding.plane, result.finding.token) == (1, "K", BLOCK + 3)
    assert result.finding.difference > result.finding.limit > 0


def test_the_last_bit_of_bfloat16_is_within_the_envelope(halves: Any, cache: Cache) -> None:
    tokens = tiny.prompt(100)
    audited = Audited()
    audited.serve(halves, cache, [tokens])
    replace_block(cache, halves[1], tokens, 1, flip(1, 0, 0, 3, 2, 0))
    audited.serve(halves, cache, [tokens])
    assert (audited.only.verdict, audited.only.basis) == ("ok", "envelope")
    assert sum(plane.differing for plane in audited.only.planes) == 1


@pytest.mark.parametrize("setup", ["llama", "halves"])
def test_another_prompts_block_is_corrupt(setup: str, cache: Cache, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(setup)
    mine, other = tiny.prompt(100), tiny.prompt(100, seed=1)
    audited = Audited()
    audited.serve(model, cache, [mine, other])
    theirs = tiny.blocks(cache, model[1], other)[2, 0]

    def change(block: Any) -> None:
        block[:] = np.frombuffer(theirs, block.dtype).reshape(block.shape)

    replace_block(cache, model[1], mine, 2, change)
    audited.serve(model, cache, [mine], store_generated=True)
    result = audited.only
    assert (result.verdict, result.basis) == ("corrupt", "envelope")
    assert result.finding is not None
    assert (result.finding.block, result.finding.layer, result.finding.plane) == (2, 0, "K")
    assert result.finding.token == 2 * BLOCK


def test_rows_of_a_batch_and_windows(tmp_path: Path, cache: Cache) -> None:
    """Rows are padded, and of a windowed layer only the last blocks are there."""
    model, spec = tiny.gemma(tmp_path)
    cache.register(spec)
    prompts = [tiny.prompt(length, seed=length) for length in (150, 70, 100)]
    results: list[AuditResult] = []

    def batch(auditor: Any) -> None:
        adapter.generate_batch(model, cache, spec, prompts, 6, chunk_tokens=BLOCK, store_generated=False, audit=auditor)

    batch(None)
    with audits.Auditor(sample=1.0, backlog=3, report=results.append) as auditor:
        batch(auditor)
        assert auditor.wait(60)
    assert [result.verdict for result in results] == ["ok"] * 3
    assert [result.tokens for result in results] == [144, 64, 96]
    results.clear()
    replace_block(cache, spec, prompts[2], 5, flip(1, 1, 0, 7, 3, 1), group=1)
    with audits.Auditor(sample=1.0, backlog=3, report=results.append) as auditor:
        batch(auditor)
        assert auditor.wait(60)
    assert [result.verdict for result in results] == ["ok", "ok", "corrupt"]
    finding = results[2].finding
    assert finding is not None
    assert (finding.layer, finding.plane, finding.token) == (spec.groups[1].layers[1], "V", 5 * BLOCK + 7)


@pytest.fixture
def lossy(tmp_path: Path) -> Iterator[Callable[[str], tuple[Any, Cache, list[list[int]]]]]:
    """A model, a cache whose blocks have been through a codec, and the prompts it has."""
    path = tmp_path / "model"
    model, _ = tiny.llama(path)
    with torch.no_grad():
        model.lm_head.weight *= 0.25  # random weights are surer of their choices than models that were trained
    model.save_pretrained(path)
    opened: list[Cache] = []

    def make(level: str) -> tuple[Any, Cache, list[list[int]]]:
        setup = (model, adapter.spec_for(model, path, block_tokens=BLOCK, lossy=level))
        settings = {
            "state_dir": str(tmp_path / "state"),
            "warm": {"capacity": "8MiB", "directory": str(tmp_path)},
            "cold": {"capacity": "64MiB", "segment": "16MiB", "path": str(tmp_path / "cold")},
        }
        prompts = [tiny.prompt(100, seed=seed) for seed in range(4)]
        with tierkv.open(settings) as cache:
            Audited().serve(setup, cache, prompts, sample=0.0)
            cache.flush()
        opened.append(tierkv.open(settings))
        return setup, opened[0], prompts

    yield make
    for cache in opened:
        cache.close()


@pytest.mark.parametrize("level", ["int8", "eq2", "eq3", "eq4", "eq5"])
def test_a_lossy_level_stays_within_its_budget(lossy: Any, level: str) -> None:
    setup, cache, prompts = lossy(level)
    audited = Audited()
    audited.serve(setup, cache, prompts)
    assert len(audited.results) == 4
    for result in audited.results:
        assert (result.verdict, result.basis, result.lossy) == ("ok", "budget", level)
        worst = max(plane.relative_error / plane.limit for plane in result.planes)
        assert 0.05 < worst < 1, "a budget that is never touched would find nothing"


def test_a_level_coarser_than_its_namespace_says_is_outside(lossy: Any) -> None:
    """As if a daemon had coded with eq5 what was to be eq2."""
    setup, cache, prompts = lossy("eq2")
    cache.register(setup[1])
    tokens = prompts[0]

    def coarsen(block: Any) -> None:
        values = block.view(np.float32)
        values[1, 1] += (
            0.25
            * np.abs(values[1, 1]).mean()
            * np.sign(np.sin(np.arange(values[1, 1].size))).reshape(values[1, 1].shape)
        )

    replace_block(cache, setup[1], tokens, 3, coarsen)
    audited = Audited()
    audited.serve(setup, cache, [tokens])
    result = audited.only
    assert (result.verdict, result.reason) == ("outside", "relative-error")
    assert result.finding is not None
    assert (result.finding.block, result.finding.layer, result.finding.plane) == (3, 1, "V")


def test_the_answer_does_not_wait_and_audits_stand_still_for_first_tokens(llama: Any, cache: Cache) -> None:
    model, spec = llama
    cache.register(spec)
    tokens = tiny.prompt(100)
    stepped = threading.Event()
    main = threading.current_thread()
    hook = model.register_forward_pre_hook(lambda *_: stepped.set() if threading.current_thread() is not main else None)
    try:
        with audits.Auditor(sample=1.0) as auditor:
            adapter.generate(model, cache, spec, tokens, 1, chunk_tokens=BLOCK)
            with auditor.paused():
                answer = adapter.generate(model, cache, spec, tokens, 1, chunk_tokens=BLOCK, audit=auditor)
                assert answer.reused_tokens
                assert not stepped.wait(0.1)
                assert not auditor.wait(0)
            assert auditor.wait(60)
            assert stepped.is_set()
    finally:
        hook.remove()
    assert auditor.log.verdicts["ok"] == 1


def test_what_finds_no_room_is_counted_and_closing_drops_the_rest(llama: Any, cache: Cache) -> None:
    model, spec = llama
    cache.register(spec)
    tokens = tiny.prompt(100)
    auditor = audits.Auditor(sample=1.0, backlog=1)
    with auditor.paused():
        for _ in range(4):
            adapter.generate(model, cache, spec, tokens, 1, chunk_tokens=BLOCK, audit=auditor)
        assert auditor.log.skipped == {"busy": 2}, "the first was no hit, the second is being audited"
        auditor.close()
    assert sum(auditor.log.verdicts.values()) == 0
    assert auditor.log.skipped == {"busy": 3}
    adapter.generate(model, cache, spec, tokens, 1, chunk_tokens=BLOCK, audit=auditor)
    assert auditor.log.skipped == {"busy": 4}


def test_an_audit_that_fails_costs_the_request_nothing(llama: Any, cache: Cache) -> None:
    model, spec = llama
    cache.register(spec)
    tokens = tiny.prompt(100)

    def refuse(result: AuditResult) -> None:
        raise OSError("no room for the report")

    with audits.Auditor(sample=1.0, report=refuse) as auditor:
        for _ in range(2):
            answer = adapter.generate(model, cache, spec, tokens, 3, chunk_tokens=BLOCK, audit=auditor)
        assert auditor.wait(60)
    assert len(answer.tokens) == 3
    assert auditor.log.skipped == {"failed": 1}


def test_salts_are_part_of_the_block_that_is_named(llama: Any, cache: Cache) -> None:
    model, spec = llama
    cache.register(spec)
    tokens, salt = tiny.prompt(100), {0: b"salt"}
    results: list[AuditResult] = []
    adapter.generate(model, cache, spec, tokens, 1, chunk_tokens=BLOCK, extra_keys=salt, store_generated=False)
    chain = Chain.of(spec, tokens[: 2 * BLOCK], salt)
    with cache.acquire(chain) as read:
        payload = bytearray(read.view(1))
    payload[100] ^= 1
    cache.delete(chain)
    with cache.reserve(chain, start=1) as write:
        write.write(1, payload)
        write.commit()
    with audits.Auditor(sample=1.0, report=results.append) as auditor:
        adapter.generate(
            model,
            cache,
            spec,
            tokens,
            1,
            chunk_tokens=BLOCK,
            extra_keys=salt,
            store_generated=False,
            audit=auditor,
        )
        assert auditor.wait(60)
    assert results[0].finding is not None
    assert results[0].finding.block_hash == chain.hashes[1].hex()
