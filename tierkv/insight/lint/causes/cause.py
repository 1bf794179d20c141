"""What a cause is: one row of the table of causes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierkv.insight.lint.core.batch import Kind

__all__ = ["Cause"]


@dataclass(frozen=True, slots=True)
class Cause:
    """Why prompts that could share a prefix do not.

    Attributes
    ----------
    code
        Its number in the arrays of the core; 0 is no cause.
    name
        Stable, for `--json`, SARIF and baselines.
    title
        For tables.
    advice
        One sentence: what to move where. `{place}` is where in the prompt it stands.
    why
        One sentence: how it costs hits.
    moved
        Kinds of segments that have this cause where they come before something more requests share.
    reordered
        Kinds that have it where they come in another order than elsewhere.
    fixable
        `--fix` can rewrite prompts without it.
    literals
        How values of each kind look in a text.
    """

    code: int
    name: str
    title: str
    advice: str
    why: str
    moved: frozenset[Kind] = frozenset()
    reordered: frozenset[Kind] = frozenset()
    fixable: bool = True
    literals: Mapping[Kind, re.Pattern[str]] = field(default_factory=dict)
