"""The demo's prompts: token for token what the chat template makes, sharing what they should share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest

from tierkv.service.demo.scenario import SYSTEM_TOKENS, TURNS, Scenario

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")
model = pytest.importorskip("tierkv.service.demo.model")

BLOCK = 64
ANSWERS = {turn.id: f"The answer to {turn.id}." for turn in TURNS}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    try:
        file = model.find_checkpoint()
    except ImportError:
        pytest.skip("the demo's model is not installed")
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> dict[str, list[int]]:
    scenario = Scenario(tokenizer)
    answers = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in ANSWERS.items()}
    made: dict[str, list[int]] = {}
    for turn in TURNS:
        made[turn.id] = scenario.prompt(turn, made, answers)
    return made


def common(*sequences: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*sequences, strict=False)))


def test_prompts_are_what_the_chat_template_makes(tokenizer: Any, prompts: dict[str, list[int]]) -> None:
    for tokens in prompts.values():
        text = tokenizer.decode(tokens)
        assert tokenizer.encode(text, add_special_tokens=False) == tokens
        assert text.endswith("<|im_start|>assistant\n")
        assert text.count("<|im_start|>system\n") == 1
        for part in text.split("<|im_start|>")[1:-1]:
            assert part.endswith("<|im_end|>\n")


def test_a_turn_continues_its_parent_and_branches_share_no_more(prompts: dict[str, list[int]]) -> None:
    for turn in TURNS:
        if turn.parent is not None:
            assert prompts[turn.id][: len(prompts[turn.parent])] == prompts[turn.parent]
    left, right = prompts["ada-2"], prompts["bob-1"]
    shared = common(left, right)
    assert len(prompts["ada-1"]) < shared < min(len(left), len(right)) - BLOCK


def test_all_share_about_three_thousand_tokens(prompts: dict[str, list[int]]) -> None:
    shared = common(*prompts.values())
    assert 0.9 * SYSTEM_TOKENS < shared < 1.1 * SYSTEM_TOKENS
    assert max(map(len, prompts.values())) < 4096


def test_an_answer_cut_by_its_end_token_is_not_closed_twice(tokenizer: Any) -> None:
    scenario = Scenario(tokenizer)
    first = {TURNS[0].id: scenario.prompt(TURNS[0], {}, {})}
    words = tokenizer.encode("Yes.", add_special_tokens=False)
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert scenario.prompt(TURNS[1], first, {TURNS[0].id: words + end}) == scenario.prompt(
        TURNS[1], first, {TURNS[0].id: words}
    )
