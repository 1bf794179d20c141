"""Ends of sessions: what an application that says "this conversation is over" would let a cache forget.

With the last request of a session its private tail can go: the blocks that no other living session has used. A session
lives from its first request to its last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from tierkv.replay.trace import Request, Trace

__all__ = ["infer_sessions", "session_ends"]

_SHARED = -1  # no session's own


def session_ends(trace: Trace) -> list[tuple[int, ...]]:
    """Return for each request the blocks to retire after it, the first of a chain first; mostly none.

    Sessions are the trace's own where every request names one, inferred ones otherwise.
    """
    named = [request.session for request in trace.requests]
    sessions = infer_sessions(trace) if None in named else named
    last = {session: number for number, session in enumerate(sessions)}
    depth_of: dict[object, dict[int, int]] = {}  # of the blocks a living session has used
    living_users: Counter[int] = Counter()
    ends: list[tuple[int, ...]] = []
    for number, (request, session) in enumerate(zip(trace.requests, sessions, strict=True)):
        used = depth_of.setdefault(session, {})
        for depth, block in enumerate(request.blocks):
            if block not in used:
                used[block] = depth
                living_users[block] += 1
        if last[session] > number:
            ends.append(())
            continue
        del depth_of[session]
        living_users.subtract(used.keys())
        private = [block for block in used if not living_users[block]]
        for block in private:
            del living_users[block]
        ends.append(tuple(sorted(private, key=used.__getitem__)))
    return ends


def infer_sessions(trace: Trace) -> list[int]:
    """Number the sessions of a trace that does not name them.

    A request goes on with a session if the deepest of its blocks that is known belongs to that session alone, and with
    it the request repeats at least half of the full blocks of the prompt that used this block last. So a session may
    be edited or asked again from an earlier turn, and a shared beginning, such as a system prompt, joins nobody.
    """
    owner: dict[int, int] = {}
    length: dict[int, int] = {}  # in full blocks, of the prompt that used a block last
    sessions: list[int] = []
    count = 0
    for request in trace.requests:
        depth = _deepest(request, owner)
        session = owner[request.blocks[depth]] if depth >= 0 else _SHARED
        if session == _SHARED or 2 * (depth + 1) < length[request.blocks[depth]]:
            session = count
            count += 1
        sessions.append(session)
        full_blocks = request.tokens // trace.block_tokens
        for block in request.blocks:
            if owner.setdefault(block, session) != session:
                owner[block] = _SHARED
            length[block] = full_blocks
    return sessions


def _deepest(request: Request, known: Container[int]) -> int:
    """Return the depth of a request's deepest known block; -1 if it has none."""
    for depth in range(len(request.blocks) - 1, -1, -1):
        if request.blocks[depth] in known:
            return depth
    return -1
