"""A model's tokens are the same computed, reused on another machine, and while machines and the network fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.faults import Cluster, unplugged
from tests.cluster.node import Node
from tierkv.cache import Chain

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from tierkv.engines.transformers import Generation, generate
from tierkv.service.demo.model import LoadedModel, find_checkpoint, load_model

NEW_TOKENS = 6
BLOCKS = 3  # of 32 tokens


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    try:
        checkpoint = find_checkpoint()
    except ImportError:
        pytest.skip("the demo's model is not installed")
    return load_model(checkpoint)


def prompt_of(loaded: LoadedModel, topic: str) -> list[int]:
    """A prompt of `BLOCKS` full blocks and a little more, of its own from the first token on."""
    text = f"{topic}: " + "a long story about it, told by somebody who was there and has forgotten half of it. " * 12
    tokens: list[int] = loaded.tokenizer.encode(text, add_special_tokens=False)
    return tokens[: BLOCKS * loaded.spec.block_tokens + 5]


def ask(node: Node, loaded: LoadedModel, prompt: list[int]) -> Generation:
    with node.connect(loaded.spec) as cache:
        answer = generate(loaded.model, cache, loaded.spec, prompt, NEW_TOKENS)
        cache.flush()
        return answer


@pytest.fixture
def nodes(cluster: Cluster, home: Path) -> Iterator[list[Node]]:
    """Nodes that nothing has happened to yet, and that wait for an answer however busy the machine is."""
    patient = {**cluster.access, "probe_timeout": 10.0}
    made = [
        Node(home, name, cluster.network.host(name), cluster.servers.url, shared=patient)
        for name in ("first", "second", "third")
    ]
    yield made
    for node in made:
        node.kill()


def test_what_one_node_computed_another_reuses_even_when_the_first_is_gone(
    nodes: list[Node], loaded: LoadedModel
) -> None:
    first, second, newcomer = nodes
    prompt = prompt_of(loaded, "Rivers")
    alone = generate(loaded.model, None, loaded.spec, prompt, NEW_TOKENS)
    first.start()
    second.start()
    cold = ask(first, loaded, prompt)
    assert cold.reused_tokens == 0
    reused = ask(second, loaded, prompt)
    first.kill()
    second.kill()
    newcomer.start()
    after = ask(newcomer, loaded, prompt)
    everything = {"shared": BLOCKS * loaded.spec.block_tokens}
    assert reused.tokens_by_tier == everything
    assert after.tokens_by_tier == everything
    assert alone.tokens == cold.tokens == reused.tokens == after.tokens


def test_a_node_that_is_cut_off_computes_what_it_knew_to_be_there(cluster: Cluster, loaded: LoadedModel) -> None:
    a, b = cluster.nodes
    prompt = prompt_of(loaded, "Lakes")
    expected = ask(a, loaded, prompt)
    with b.connect(loaded.spec) as cache:
        cache.acquire(Chain.of(loaded.spec, prompt), wait_s=5.0, max_blocks=1).release()
    with unplugged(cluster):
        cut_off = ask(b, loaded, prompt)
    assert cut_off.tokens == expected.tokens
    assert cut_off.reused_tokens <= loaded.spec.block_tokens
