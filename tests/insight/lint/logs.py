"""Logs with planted causes, each beside the logs one gets by taking the causes out, first in the prompt first.

What a cause costs is then known: hits of the log without it minus hits of the log with it. All generators are seeded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CLEAN", "PLANTED", "Planted", "words"]

REQUESTS = 140
ID_REQUESTS = 240
_VOCABULARY = [
    a + b
    for a in ("ba", "co", "du", "fe", "gi", "ha", "jo", "ku", "le", "mi", "no", "pa", "ra", "so")
    for b in ("lan", "ter", "min", "dor", "vel", "sic", "ren", "tam", "pos", "quin", "bert", "gash")
]

Rows = list[Any]


@dataclass(frozen=True, slots=True)
class Planted:
    """A log and its causes.

    Attributes
    ----------
    stages
        Name of a cause, and the rows without it and all causes before it.
    fixable
        `--fix` is to reach the hit rate of the last stage.
    """

    rows: Rows
    stages: tuple[tuple[str, Rows], ...] = ()
    fixable: bool = True


def words(rng: random.Random, count: int) -> str:
    """Return a paragraph of so many words, in lines of 9 to 14 words."""
    lines = []
    while count > 0:
        line = [rng.choice(_VOCABULARY) for _ in range(min(count, rng.randint(9, 14)))]
        count -= len(line)
        lines.append(" ".join(line).capitalize() + ".")
    return "\n".join(lines)


def tool(rng: random.Random, name: str) -> dict[str, Any]:
    properties = {f"{rng.choice(_VOCABULARY)}_{n}": {"type": "string", "description": words(rng, 8)} for n in range(5)}
    schema = {"type": "object", "properties": properties, "required": sorted(properties)[:2]}
    return {"type": "function", "function": {"name": name, "description": words(rng, 20), "parameters": schema}}


def shuffled_keys(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict):
        items = [(key, shuffled_keys(rng, inner)) for key, inner in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [shuffled_keys(rng, item) for item in value] if isinstance(value, list) else value


def chat(system: str, user: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        **more,
    }


def stamp(number: int) -> str:
    return f"2026-03-{1 + number // 1440:02d} {number // 60 % 24:02d}:{number % 60:02d}:{number * 7 % 60:02d}"


def uuid(rng: random.Random) -> str:
    text = f"{rng.getrandbits(128):032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def timestamp_first() -> Planted:
    rng = random.Random(1)
    shared = words(rng, 1500)
    questions = [words(rng, 40) for _ in range(REQUESTS)]
    rows = [chat(f"Current time: {stamp(n)}\n\n{shared}", q) for n, q in enumerate(questions)]
    clean = [chat(f"{shared}", f"{q}\nCurrent time: {stamp(n)}") for n, q in enumerate(questions)]
    return Planted(rows, (("date-or-time", clean),))


def uuid_first() -> Planted:
    rng = random.Random(2)
    shared = words(rng, 900)
    questions = [words(rng, 60) for _ in range(REQUESTS)]
    ids = [uuid(rng) for _ in questions]
    rows = [chat(f"You are a clerk. Request {i}.\n{shared}", q) for i, q in zip(ids, questions, strict=True)]
    clean = [chat(f"You are a clerk. Request .\n{shared}", f"{q}\n{i}") for i, q in zip(ids, questions, strict=True)]
    return Planted(rows, (("id-or-counter", clean),))


def tools_every_fourth() -> Planted:
    rng = random.Random(3)
    tools = [tool(rng, f"tool_{n}") for n in range(12)]
    shared = words(rng, 300)
    questions = [words(rng, 30) for _ in range(REQUESTS)]
    rows = []
    for number, question in enumerate(questions):
        order = tools if number % 4 else rng.sample(tools, len(tools))
        rows.append(chat(shared, question, tools=order))
    clean = [chat(shared, question, tools=tools) for question in questions]
    return Planted(rows, (("tool-order", clean),))


def keys_shuffled() -> Planted:
    rng = random.Random(4)
    tools = [tool(rng, f"tool_{n}") for n in range(8)]
    shared = words(rng, 500)
    questions = [words(rng, 30) for _ in range(REQUESTS)]
    rows = [
        chat(shared, q, tools=[tools[0], *(shuffled_keys(rng, t) if n % 3 == 0 else t for t in tools[1:])])
        for n, q in enumerate(questions)
    ]
    clean = [chat(shared, q, tools=tools) for q in questions]
    return Planted(rows, (("json-key-order", clean),))


def user_first() -> Planted:
    rng = random.Random(5)
    shared = words(rng, 1200)
    people = [words(rng, 60) for _ in range(80)]
    rows, clean = [], []
    for _ in range(REQUESTS):
        person, question = rng.choice(people), words(rng, 30)
        rows.append({"system": f"{person}\n\n{shared}", "messages": [{"role": "user", "content": question}]})
        clean.append({"system": shared, "messages": [{"role": "user", "content": f"{person}\n{question}"}]})
    return Planted(rows, (("user-data-first", clean),))


def line_ends() -> Planted:
    rng = random.Random(6)
    shared = words(rng, 1200)
    questions = [words(rng, 30) for _ in range(REQUESTS)]
    written = [shared, shared.replace("\n", "\r\n"), shared.replace(".\n", ".  \n")]
    rows = [chat(written[0] if rng.random() < 0.6 else rng.choice(written), q) for q in questions]
    # Every third request spells it in a way of its own.
    rows = [
        chat(_spaced(rng, shared), q) if n % 3 == 1 else row
        for n, (row, q) in enumerate(zip(rows, questions, strict=True))
    ]
    return Planted(rows, (("whitespace", [chat(shared, q) for q in questions]),))


def _spaced(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    for number in range(3, len(lines)):
        lines[number] += " " * rng.randint(0, 3)
    return "\n".join(lines)


def documents_shuffled() -> Planted:
    rng = random.Random(7)
    shared = words(rng, 200)
    topics = [[words(rng, 150) for _ in range(6)] for _ in range(8)]
    rows, clean = [], []
    for _ in range(REQUESTS):
        documents, question = rng.choice(topics), words(rng, 25)
        for target, order in ((rows, rng.sample(documents, 6)), (clean, documents)):
            block = "\n".join(f'<document index="{n}">\n{text}\n</document>' for n, text in enumerate(order, start=1))
            target.append(chat(shared, f"{block}\n\nQuestion: {question}"))
    return Planted(rows, (("document-order", clean),))


def results_summarised() -> Planted:
    """Agents whose tool results are replaced by summaries, as long as they were, two turns later."""
    rng = random.Random(8)
    shared = words(rng, 300)
    rows, clean = [], []
    for session in range(12):
        full: list[dict[str, str]] = [{"role": "user", "content": words(rng, 60)}]
        for _ in range(12):
            cut = [
                m | {"content": f"Summary {m['content'][::-1]}"} if m["role"] == "tool" and index < len(full) - 4 else m
                for index, m in enumerate(full)
            ]
            for target, messages in ((rows, cut), (clean, full)):
                target.append(
                    {"session_id": f"s{session}", "messages": [{"role": "system", "content": shared}, *messages]}
                )
            full = [
                *full,
                {"role": "assistant", "content": words(rng, 90)},
                {"role": "tool", "content": words(rng, 25)},
            ]
    return Planted(rows, (("history-rewritten", clean),))


def three_causes() -> Planted:
    """Tools shuffled every fourth time, then a time in the system prompt, then a customer before the instructions."""
    rng = random.Random(9)
    tools = [tool(rng, f"tool_{n}") for n in range(5)]
    policy, shared = words(rng, 500), words(rng, 700)
    customers = [words(rng, 50) for _ in range(60)]
    stages: list[Rows] = [[], [], [], []]
    for number in range(REQUESTS):
        order = tools if number % 4 else rng.sample(tools, len(tools))
        customer, question, time = rng.choice(customers), words(rng, 25), stamp(number)
        stages[0].append(chat(f"Now: {time}\n{policy}\n\n{customer}\n\n{shared}", question, tools=order))
        stages[1].append(chat(f"Now: {time}\n{policy}\n\n{customer}\n\n{shared}", question, tools=tools))
        stages[2].append(chat(f"Now: \n{policy}\n\n{customer}\n\n{shared}", f"{question}\n{time}", tools=tools))
        stages[3].append(chat(f"Now: \n{policy}\n\n{shared}", f"{customer}\n{question}\n{time}", tools=tools))
    return Planted(stages[0], (("tool-order", stages[1]), ("date-or-time", stages[2]), ("user-data-first", stages[3])))


def counter_in_prompts() -> Planted:
    rng = random.Random(10)
    shared = words(rng, 800)
    questions = [words(rng, 50) for _ in range(REQUESTS)]
    rows = [f"Request #{n + 1000}\n{shared}\n\nQuestion: {q}" for n, q in enumerate(questions)]
    clean = [f"Request #\n{shared}\n\nQuestion: {q}\n{n + 1000}" for n, q in enumerate(questions)]
    return Planted(rows, (("id-or-counter", clean),))


def ids_with_a_value() -> Planted:
    rng = random.Random(11)
    shared = [rng.randrange(50000) for _ in range(4000)]
    rows, clean = [], []
    for _ in range(ID_REQUESTS):
        value, question = ([rng.randrange(50000) for _ in range(n)] for n in (12, 150))
        rows.append(shared[:64] + value + shared[64:] + question)
        clean.append(shared + question + value)
    return Planted(rows, (("changing-value", clean),))


def ids_reordered() -> Planted:
    rng = random.Random(12)
    parts = [[rng.randrange(50000) for _ in range(400)] for _ in range(9)]
    tail = [rng.randrange(50000) for _ in range(1500)]
    rows, clean = [], []
    for _ in range(ID_REQUESTS):
        question = [rng.randrange(50000) for _ in range(120)]
        order = rng.sample(parts, len(parts))
        rows.append([t for part in order for t in part] + tail + question)
        clean.append([t for part in parts for t in part] + tail + question)
    return Planted(rows, (("changing-order", clean),))


def two_applications() -> Planted:
    """One application with a session id in its system prompt, and a larger one without any fault."""
    rng = random.Random(13)
    shared, other = words(rng, 1000), words(rng, 900)
    rows, clean = [], []
    for number in range(REQUESTS):
        question = words(rng, 40)
        if number % 3:
            row = chat(other, question)
            rows.append(row)
            clean.append(row)
        else:
            session = uuid(rng)
            rows.append(chat(f"Session: {session}\n{shared}", question))
            clean.append(chat(f"Session: \n{shared}", f"{question}\n{session}"))
    return Planted(rows, (("id-or-counter", clean),))


def clean_conversations() -> Planted:
    """Growing conversations; the time stands at the end of the last message, where it costs nothing."""
    rng = random.Random(20)
    shared = words(rng, 400)
    sessions: list[list[dict[str, str]]] = [[] for _ in range(24)]
    rows = []
    for number in range(REQUESTS):
        messages = sessions[rng.randrange(len(sessions))]
        messages.append({"role": "user", "content": words(rng, 40)})
        last = messages[-1] | {"content": f"{messages[-1]['content']}\nCurrent time: {stamp(number)}"}
        rows.append({"messages": [{"role": "system", "content": shared}, *messages[:-1], last]})
        messages[-1] = last
        messages.append({"role": "assistant", "content": words(rng, 60)})
    return Planted(rows)


def clean_retrieval() -> Planted:
    """Tools in one order, instructions, then documents of each request's own, the question and its id."""
    rng = random.Random(21)
    tools = [tool(rng, f"tool_{n}") for n in range(6)]
    shared = words(rng, 600)
    rows = []
    for number in range(REQUESTS):
        documents = "\n".join(f"[{n}] {words(rng, 80)}" for n in range(1, 4))
        user = f"{documents}\n\nQuestion: {words(rng, 20)}\nRequest id: {uuid(rng)} at {stamp(number)}"
        rows.append(chat(shared, user, tools=tools))
    return Planted(rows)


PLANTED: dict[str, Callable[[], Planted]] = {
    function.__name__: function
    for function in (
        *(timestamp_first, uuid_first, tools_every_fourth, keys_shuffled, user_first, line_ends, documents_shuffled),
        *(results_summarised, three_causes, counter_in_prompts, ids_with_a_value, ids_reordered, two_applications),
    )
}
CLEAN: dict[str, Callable[[], Planted]] = {f.__name__: f for f in (clean_conversations, clean_retrieval)}


def write(rows: Sequence[Any]) -> str:
    """Return a log as JSONL."""
    return "".join(json.dumps(row) + "\n" for row in rows)
