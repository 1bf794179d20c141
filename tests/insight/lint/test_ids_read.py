"""Token ids read with their tokenizer: what they are is found as in text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.insight.lint import logs
from tests.insight.lint.oracle import prompts_of
from tierkv.errors import ConfigError
from tierkv.insight.lint.command import lint_log
from tierkv.insight.lint.core.batch import Kind
from tierkv.insight.lint.readers.log import open_log
from tierkv.insight.lint.report import LintReport
from tierkv.insight.lint.reports.words import excerpt_place
from tierkv.insight.lint.text.frames import unframed
from tierkv.insight.lint.text.pieces import cut
from tierkv.insight.lint.text.prompt import render
from tierkv.insight.lint.text.tokenise import load_tokeniser

tokenizers = pytest.importorskip("tokenizers")
TEXT = [name for name in (*logs.PLANTED, *logs.CLEAN) if not name.startswith("ids_")]


def text_of(row: Any) -> str:
    return row if isinstance(row, str) else render(row).text()


def chatml(row: dict[str, Any]) -> str:
    """A request as ChatML's template has it, open for the answer."""
    said = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row["messages"])
    return f"{said}<|im_start|>assistant\n"


def lint(path: Path, text: str, tokenizer: Path | None = None) -> LintReport:
    path.write_text(text)
    with open_log(path) as log:
        return lint_log(log, tokenizer=tokenizer)


def found(report: LintReport) -> list[tuple[str, str]]:
    return [(finding.cause, finding.severity.label) for finding in report.findings if finding.severity.label != "info"]


@pytest.mark.parametrize("name", TEXT)
def test_causes_are_those_of_the_same_log_as_text(name: str, tokenizer: Path, tmp_path: Path) -> None:
    rows = (logs.PLANTED | logs.CLEAN)[name]().rows
    encode = tokenizers.Tokenizer.from_file(str(tokenizer)).encode
    ids = "".join(f"{encode(text_of(row)).ids}\n" for row in rows)
    read, written = lint(tmp_path / "ids", ids, tokenizer), lint(tmp_path / "text", logs.write(rows), tokenizer)
    assert found(read) == found(written)
    assert read.hit_tokens == pytest.approx(written.hit_tokens, rel=0.01)
    for one, other in zip(read.findings, written.findings, strict=False):
        assert (one.cause, one.place) == (other.cause, other.place)
        assert one.lost_tokens == pytest.approx(other.lost_tokens, rel=0.02)


def test_a_rewritten_history_is_found_in_a_models_own_frames(tokenizer: Path, tmp_path: Path) -> None:
    rng = random.Random(40)
    encode = tokenizers.Tokenizer.from_file(str(tokenizer)).encode
    shared = logs.words(rng, 300)
    kept, cut_off = [], []
    for _ in range(8):
        full: list[dict[str, str]] = [{"role": "user", "content": logs.words(rng, 60)}]
        for _ in range(8):
            short = [m | {"content": "Cut."} if m["role"] == "tool" and m not in full[-4:] else m for m in full]
            for target, messages in ((kept, full), (cut_off, short)):
                target.append({"messages": [{"role": "system", "content": shared}, *messages]})
            full = [
                *full,
                {"role": "assistant", "content": logs.words(rng, 90)},
                {"role": "tool", "content": logs.words(rng, 25)},
            ]
    ids = ["".join(f"{encode(chatml(row)).ids}\n" for row in rows) for rows in (cut_off, kept)]
    assert [cause for cause, _ in found(lint(tmp_path / "cut", ids[0], tokenizer))] == ["history-rewritten"]
    assert found(lint(tmp_path / "kept", ids[1], tokenizer)) == []


def test_rows_of_an_array_are_read_too(tokenizer: Path, tmp_path: Path) -> None:
    encode = tokenizers.Tokenizer.from_file(str(tokenizer)).encode
    prompts = [encode(text_of(row)).ids for row in logs.timestamp_first().rows[:30]]
    array = np.full((len(prompts), max(map(len, prompts))), -1, np.int64)
    for row, prompt in zip(array, prompts, strict=True):
        row[: len(prompt)] = prompt
    path = tmp_path / "log.npy"
    np.save(path, array)
    with open_log(path) as log:
        report = lint_log(log, tokenizer=tokenizer)
    assert report.prompt_tokens == sum(map(len, prompts))
    assert found(report) == [("date-or-time", "high")]
    assert excerpt_place(report.findings[0], report).startswith("row ")


def test_without_a_tokenizer_it_is_said_what_would_tell_more(tmp_path: Path) -> None:
    report = lint(tmp_path / "log", logs.write(logs.ids_with_a_value().rows[:40]))
    assert report.exact
    assert "--tokenizer" in report.tokeniser
    assert "--tokenizer" in report.findings[0].advice


def test_quoted_ids_stand_apart(tmp_path: Path) -> None:
    rows = logs.ids_with_a_value().rows[:40]
    quoted = lint(tmp_path / "log", logs.write(rows)).findings[0].excerpt
    assert quoted is not None
    row = rows[quoted.line - 1]
    assert [int(token) for token in (quoted.before + quoted.here).split()] == row[quoted.token - 4 : quoted.token + 8]


def test_hashes_have_no_text_to_read(tokenizer: Path, tmp_path: Path) -> None:
    row = json.dumps({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [3]})
    with pytest.raises(ConfigError, match="hashes instead of tokens"):
        lint(tmp_path / "log", row + "\n", tokenizer)


@pytest.mark.parametrize("text", ["naïve 日本語 😀 <|im_start|>user\n", " two  spaces ", "e\u0301", "\ufffd"])
def test_characters_of_several_tokens_are_read_whole(text: str, tokenizer: Path) -> None:
    ids = tokenizers.Tokenizer.from_file(str(tokenizer)).encode(text).ids
    assert "".join(load_tokeniser(tokenizer).decode(np.array(ids, np.uint32))) == text


def test_half_a_character_and_an_unknown_token_are_still_tokens(tokenizer: Path) -> None:
    ids = tokenizers.Tokenizer.from_file(str(tokenizer)).encode("😀").ids
    texts = load_tokeniser(tokenizer).decode(np.array([*ids[:2], 999_999], np.uint32))
    assert len(texts) == 3
    assert "".join(texts) == "\ufffd<999999>"
    texts = load_tokeniser(tokenizer).decode(np.array(ids[:2], np.uint32))
    assert (len(texts), texts[-1]) == (2, "\ufffd")


def test_spaces_of_a_sentence_piece_vocabulary_are_kept(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "\u2581the": 1, "\u2581lamp": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "s": 6}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    texts = load_tokeniser(tmp_path).decode(np.array([1, 2, 6, 3, 4, 5], np.uint32))
    assert texts == [" the", " lamp", "s", "", "", "€"]


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<bos><start_of_turn>system\nBe kind.<end_of_turn>\n<start_of_turn>user\nWhy?<end_of_turn>\n"
        "<start_of_turn>model\n",
        "<|system|>\nBe kind.<|end|>\n<|user|>\nWhy?<|end|>\n<|assistant|>\n",
        "<|start|>system<|message|>Be kind.<|end|><|start|>user<|message|>Why?<|end|><|start|>assistant<|message|>",
    ],
)
def test_messages_are_found_in_the_frames_of_templates(text: str) -> None:
    prompt = unframed(text)
    assert prompt.text() == text
    said = [(part.place, part.message, part.text) for part in prompt.parts if part.kind is Kind.TEXT]
    assert said[-2:] == [("the system prompt", -1, "Be kind."), ("the first message (user)", 1, "Why?")]
    assert prompt.parts[-1].kind is Kind.MARKER
    assert prompt.parts[-1].place == "later messages (assistant)"


def test_turns_between_brackets_and_wide_bars_are_messages() -> None:
    mistral = unframed("<s>[INST] Why? [/INST] Because.</s>[INST] And? [/INST]")
    deepseek = unframed("Be kind.<\uff5cUser\uff5c>Why?<\uff5cAssistant\uff5c>Because.")
    assert [part.message for part in mistral.parts if part.kind is Kind.TEXT] == [-1, 0, 1, 2]
    assert [part.text for part in deepseek.parts if part.kind is Kind.TEXT] == ["Be kind.", "Why?", "Because."]


@pytest.mark.parametrize("key", ["parameters", "input_schema"])
def test_tools_in_a_text_are_tools(key: str) -> None:
    tools = [{"name": f"tool_{number}", "description": "Does it.", key: {"type": "object"}} for number in range(3)]
    listed = f"Tools: {json.dumps(tools)}\nGo.\n"
    lines = "".join(f"{json.dumps({'type': 'function', 'function': tool})}\n" for tool in tools)
    for text in (listed, f"<tools>\n{lines}</tools>"):
        pieces = cut(text, Kind.TEXT)
        assert "".join(piece.text for piece in pieces) == text
        assert [json.loads(piece.text) for piece in pieces if piece.kind is Kind.TOOL][-1] in (
            tools[-1],
            {"type": "function", "function": tools[-1]},
        )
        assert sum(piece.kind is Kind.TOOL for piece in pieces) == 3


def test_other_json_in_a_text_is_no_tool() -> None:
    pieces = cut('Data: {"name": "lamp", "price": 12}\n', Kind.TEXT)
    assert Kind.TOOL not in {piece.kind for piece in pieces}


def test_tools_in_a_plain_prompt_are_put_in_order(tmp_path: Path) -> None:
    planted = logs.tools_every_fourth()
    prompts = [text_of(row) for row in planted.rows]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    with open_log(path) as log:
        report = lint_log(log, fix=tmp_path / "fixed.jsonl")
    assert found(report) == [("tool-order", "high")]
    assert report.fixed is not None
    assert report.fixed.hit_rate > report.hit_rate + 0.2
    fixed = [json.loads(line) for line in (tmp_path / "fixed.jsonl").read_text().splitlines()]
    assert [sorted(prompt.split("\n")) for prompt in fixed] == [sorted(prompt.split("\n")) for prompt in prompts]
    assert prompts_of(fixed) != prompts_of(prompts)
