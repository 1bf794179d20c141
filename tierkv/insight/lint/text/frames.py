"""Finding the messages of a chat in text that a model's chat template has made of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tierkv.insight.lint.core.batch import Kind
from tierkv.insight.lint.text.prompt import SYSTEM_ROLES, Part, Prompt

__all__ = ["unframed"]

_ROLE = r"system|developer|user|human|assistant|model|bot|tool|ipython|observation|tools"
_OPENS = re.compile(
    rf"<\|im_start\|>(?P<chatml>\w+)\n?"  # ChatML: Qwen, SmolLM
    rf"|<\|start_header_id\|>(?P<llama>\w+)<\|end_header_id\|>\s*"
    rf"|<\|start\|>(?P<harmony>\w+)[^<\n]*(?:<\|channel\|>\w+[^<\n]*)?<\|message\|>"  # gpt-oss
    rf"|<(?:start_of_turn|\|turn)>(?P<gemma>\w+)\n?"
    rf"|<\|(?P<plain>{_ROLE})\|>\n?"  # Phi, GLM, Zephyr
    rf"|<\uff5c(?P<deepseek>User|Assistant)\uff5c>"  # its bars are wide
    rf"|(?P<mistral>\[/?INST\]) ?"
)
_CLOSES = re.compile(
    r"(?:<\|(?:im_end|eot_id|eom_id|end|end_of_text|endoftext|return|call)\|>|<end_of_turn>|<turn\|>|</s>"
    r"|<\uff5cend\u2581of\u2581sentence\uff5c>)\s*\Z"
)
_NAMES = {"human": "user", "[inst]": "user", "[/inst]": "assistant", "model": "assistant", "bot": "assistant"}
_TOOLS = "tools"


def unframed(text: str) -> Prompt:
    """Cut text at the frames of chat templates, and name its parts as `render` names those of a request.

    Text without any is one part. What stands before the first frame is counted with no message.
    """
    opens = list(_OPENS.finditer(text))
    if not opens:
        return Prompt((Part(text, "the prompt"),) if text else ())
    parts = [Part(text[: opens[0].start()], "the prompt")] if opens[0].start() else []
    number, opening = -1, 0
    for begin, end in zip(opens, [*(found.start() for found in opens[1:]), len(text)], strict=True):
        role = (begin[begin.lastgroup or 0]).lower()
        role = _NAMES.get(role, role)
        if role == _TOOLS:
            place, message = "the tools", -1
        else:
            number += 1
            if number == 0 and role in SYSTEM_ROLES:
                opening = 1
                place, message = "the system prompt", -1
            else:
                place = f"the first message ({role})" if number == opening else f"later messages ({role})"
                message = number
        parts.extend(_message(begin.group(), text[begin.end() : end], place, message))
    return Prompt(tuple(parts))


def _message(opened: str, said: str, place: str, message: int) -> Iterator[Part]:
    yield Part(opened, place, Kind.MARKER, message)
    closed = _CLOSES.search(said)
    body = said[: closed.start()] if closed else said
    if body:
        yield Part(body, place, Kind.TEXT, message)
    if closed:
        yield Part(closed.group(), place, Kind.MARKER, message)
