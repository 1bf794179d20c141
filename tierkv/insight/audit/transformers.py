"""Audits of what `tierkv.engines.transformers` was served."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Condition
from types import TracebackType
from typing import Self

from tierkv.cache import Chain
from tierkv.errors import InvalidRequest
from tierkv.insight.audit.comparing import Comparison
from tierkv.insight.audit.judging import Compared, Judgement, judge, same
from tierkv.insight.audit.limits import MARGINS
from tierkv.insight.audit.log import AuditLog
from tierkv.insight.audit.recomputing import Computed, compute, logits_of, other_steps, plane_bits, steps
from tierkv.insight.audit.result import AuditResult, Finding, Plane
from tierkv.insight.audit.sampling import Sampler
from tierkv.insight.audit.served import Served
from tierkv.insight.audit.ulps import Bits

__all__ = ["Auditor"]

logger = logging.getLogger(__name__)

_PLANES: tuple[Plane, ...] = ("K", "V")


class Auditor:
    """Recomputes a share of the hits of `generate` without the cache, beside the requests that follow.

    An audit begins when its request has been answered, on a thread of its own. While any request waits for its first
    token it stands still: between two of its steps, so that a request waits for one step at most. It keeps the KV it
    audits, and as much again for each of the one or two times that it is computed.

    Parameters
    ----------
    sample, seed
        As in `Sampler`.
    backlog
        So many audits may wait or run; a hit beyond that is not audited but counted as ``busy``.
    log
        Where results are counted: one's own, or one that several auditors share.
    report
        Called with each result, on the auditor's thread: to write it down or send it somewhere.

    Raises
    ------
    InvalidRequest
        `sample` is no share, or `backlog` less than one.
    """

    def __init__(
        self,
        *,
        sample: float = 0.05,
        seed: bytes | None = None,
        backlog: int = 2,
        log: AuditLog | None = None,
        report: Callable[[AuditResult], None] | None = None,
    ) -> None:
        if backlog < 1:
            raise InvalidRequest(f"an auditor with a backlog of {backlog} audits nothing", remedy="allow at least 1")
        self._sampler = Sampler(sample, seed=seed)
        self._backlog = backlog
        self._report = report
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tierkv-audit")
        self._changed = Condition()
        self._waiting = 0
        self._accepted = 0
        self._closed = False
        self.log = log or AuditLog()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def offer(self, served: Served) -> bool:
        """Take a hit for an audit, or not. Does not wait, copies nothing. Returns whether it was taken."""
        if not served.reused_tokens or served.spec.dtype not in MARGINS or not self._sampler.take():
            return False
        with self._changed:
            if self._closed or self._accepted >= self._backlog:
                self.log.skip("busy")
                return False
            self._accepted += 1
            future = self._thread.submit(self._run, served)
        future.add_done_callback(self._done)
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep audits standing still: somebody waits for a first token."""
        with self._changed:
            self._waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every audit that was taken is over; say whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._accepted, timeout_s)

    def close(self) -> None:
        """Drop audits that have not begun, end the running one at its next step, and wait for that. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _done(self, future: Future[None]) -> None:
        with self._changed:
            self._accepted -= 1
            self._changed.notify_all()

    def _run(self, served: Served) -> None:
        try:
            result = self._audit(served)
            self.log.add(result)
            if self._report is not None:
                self._report(result)
        except _Closed:
            self.log.skip("busy")
        except Exception:
            self.log.skip("failed")
            logger.exception("audit: it could not be made")

    def _between_steps(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._waiting)
            if self._closed:
                raise _Closed

    def _audit(self, served: Served) -> AuditResult:
        began = time.perf_counter()
        spec, tokens = served.spec, len(served.tokens)
        logits = logits_of(served.logits)
        once = compute(served.model, served.tokens, steps(tokens, served.chunk_tokens), self._between_steps)
        planes, computed, other = _compare(served, once), 1, None
        if not (same(planes, logits, once.logits) or _bitwise(served)):
            again = compute(
                served.model,
                served.tokens,
                other_steps(tokens, served.reused_tokens, served.chunk_tokens),
                self._between_steps,
            )
            planes, computed, other = _compare_other(served, once, again, planes), 2, again.logits
        found = judge(
            planes, (logits, once.logits, other), dtype=spec.dtype, lossy=spec.lossy, block_tokens=spec.block_tokens
        )
        return AuditResult(
            engine="transformers",
            namespace=spec.namespace,
            verdict=found.verdict,
            basis=found.basis,
            reason=found.reason,
            dtype=spec.dtype,
            lossy=spec.lossy,
            tokens=served.reused_tokens,
            block_tokens=spec.block_tokens,
            planes=found.planes,
            logits=found.logits,
            finding=_finding(served, found),
            answer_token=None if found.logits.same_token else 0,
            computed=computed,
            seconds=time.perf_counter() - began,
            at=time.time(),
        )


class _Closed(Exception):
    """The auditor was closed in the middle of an audit."""


def _bitwise(served: Served) -> bool:
    """Say whether computing the prompt again must give the same bits."""
    spec = served.spec
    return served.steady and spec.dtype == "float32" and not spec.lossy and served.chunk_tokens == spec.block_tokens


def _compare(served: Served, once: Computed) -> list[Compared]:
    spec = served.spec
    found = []
    for layer in sorted(layer for group in spec.groups for layer in group.layers):
        for plane in _PLANES:
            have, first = plane_bits(
                served.past, layer, plane, served.reused_tokens, spec.block_tokens, served.row, served.padding
            )
            if have.shape[1]:
                compared = _comparison(served, have, first, once, layer, plane)
                found.append(Compared(layer, plane, compared, None))
    return found


def _compare_other(served: Served, once: Computed, again: Computed, planes: Sequence[Compared]) -> list[Compared]:
    found = []
    for part in planes:
        other, _ = plane_bits(again.past, part.layer, part.plane, served.reused_tokens, served.spec.block_tokens)
        first = part.served.first
        compared = _comparison(served, other[:, first:], first, once, part.layer, part.plane)
        found.append(replace(part, other=compared))
    return found


def _comparison(served: Served, bits: Bits, first: int, once: Computed, layer: int, plane: Plane) -> Comparison:
    spec = served.spec
    want, _ = plane_bits(once.past, layer, plane, served.reused_tokens, spec.block_tokens)
    return Comparison.of(bits, want[:, first:], spec.dtype, first=first, block_tokens=spec.block_tokens)


def _finding(served: Served, found: Judgement) -> Finding | None:
    spot, spec = found.spot, served.spec
    if spot is None:
        return None
    block = spot.token // spec.block_tokens
    stop = (block + 1) * spec.block_tokens
    chain = Chain.of(spec, served.tokens[:stop], served.extra_keys)
    return Finding(
        block=block,
        block_hash=chain.hashes[block].hex(),
        layer=spot.layer,
        plane=spot.plane,
        token=spot.token,
        difference=spot.difference,
        limit=spot.limit,
        positions=spot.positions,
    )
