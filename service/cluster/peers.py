"""The other nodes: what they hold of a prefix, asked of all at once, until a deadline."""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from pydantic import ValidationError

from tierkv.config import Config
from tierkv.connected import NodeFailure
from tierkv.core.build import node_name
from tierkv.errors import TierKVError
from tierkv.service.answers import PeerHit
from tierkv.service.cluster.addresses import Address, Peer
from tierkv.service.cluster.signing import NODE_HEADER, NodeKey
from tierkv.wire import MSGPACK_TYPE, decode, encode

__all__ = ["PEER_ROUTE", "Answer", "Peers"]

PEER_ROUTE = "/v1/peer/lookup"
_MOST_ANSWER_BYTES = 1 << 20
_CONNECTIONS = 256
_IDLE_S = 60.0
"""Less than daemons keep idle connections for."""
_OWN_S = 60.0
"""For so long an address that turned out to be this node's own is not asked again."""
_DETAIL = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What one node holds of a prefix, or why it does not say.

    Attributes
    ----------
    url
        The address that was asked.
    node
        Its name; empty for one that was never heard of.
    blocks, tokens, tokens_by_tier
        Length of the longest prefix it has published, in blocks and tokens, and these by tier.
    error, detail
        Why that is not known; empty for one that answered.
    age_s
        Seconds since the node last answered anything of the kind; 0 for one that just did, None for never.
    """

    url: str
    node: str
    blocks: int = 0
    tokens: int = 0
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    error: NodeFailure | None = None
    detail: str = ""
    age_s: float | None = 0.0


@dataclass(frozen=True, slots=True)
class _Heard:
    """Who answered at an address, and when."""

    node: str
    instance: str
    at: float


class Peers:
    """The nodes that `cluster.peers` names. Belongs to the event loop; enter it before use.

    Attributes
    ----------
    node
        Name of this node.
    instance
        Random name of this run of it: by that it knows itself among the addresses of a name.
    key
        Signs what is asked, and checks what others ask.
    """

    def __init__(self, config: Config, secret: bytes) -> None:
        self.node = node_name(config)
        self.instance = secrets.token_hex(8)
        self.key = NodeKey(secret)
        self._peers = [Peer(url) for url in dict.fromkeys(config.cluster.peers)]
        self._heard: dict[str, _Heard] = {}

    async def __aenter__(self) -> Self:
        encrypted = any(peer.url.startswith("https:") for peer in self._peers)
        connector = aiohttp.TCPConnector(
            limit=_CONNECTIONS, keepalive_timeout=_IDLE_S, ssl=ssl.create_default_context() if encrypted else True
        )
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.close()
        await self._session.close()

    async def ask(self, tenant: str, namespace: str, hashes: Sequence[bytes], wait_s: float) -> list[Answer]:
        """Ask every other node for its longest published prefix; return one answer each, after `wait_s` at the latest.

        Nodes that cannot be reached, are late or refuse are answers, too. This node is not among them.
        """
        if not self._peers:
            return []
        question = {"tenant": tenant, "namespace": namespace, "hashes": b"".join(hashes)}
        body = encode(question, MSGPACK_TYPE)
        answers: dict[str, Answer] = {}
        asked: set[str] = set()
        tasks = [asyncio.create_task(self._ask_all(peer, body, answers, asked)) for peer in self._peers]
        try:
            done, _ = await asyncio.wait(tasks, timeout=wait_s)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
        for peer in self._peers:
            for url in [address.url for address in peer.known] or [peer.url]:
                if url not in answers and not self._own(url):
                    answers[url] = self._failure(url, "late", f"no answer in {wait_s:g} s")
        return self._distinct(answers)

    async def _ask_all(self, peer: Peer, body: bytes, answers: dict[str, Answer], asked: set[str]) -> None:
        found = await peer.addresses()
        if not found:
            answers[peer.url] = self._failure(peer.url, "down", "the name means no address")
        fresh = [address for address in found if address.url not in asked and not self._own(address.url)]
        asked.update(address.url for address in fresh)  # another name may mean it, too
        await asyncio.gather(*(self._ask(address, body, answers) for address in fresh))

    async def _ask(self, address: Address, body: bytes, answers: dict[str, Answer]) -> None:
        try:
            answers[address.url] = await self._request(address, body)
        except (aiohttp.ClientError, OSError) as error:
            told = str(error) or type(error).__name__
            answers[address.url] = self._failure(address.url, "down", told)
        except (TierKVError, ValidationError, ValueError):
            answers[address.url] = self._failure(address.url, "refused", "its answer is not understood")

    async def _request(self, address: Address, body: bytes) -> Answer:
        headers = {
            NODE_HEADER: self.key.sign("POST", PEER_ROUTE, body),
            "Host": address.authority,
            "Content-Type": MSGPACK_TYPE,
            "Accept": MSGPACK_TYPE,
        }
        async with self._session.post(
            address.url + PEER_ROUTE,
            data=body,
            headers=headers,
            server_hostname=address.name if address.url.startswith("https:") else None,
            allow_redirects=False,
        ) as response:
            if response.content_length is None or response.content_length > _MOST_ANSWER_BYTES:
                return self._failure(address.url, "refused", "its answer has no length, or is too long")
            raw = await response.read()
            return self._understand(address.url, response.status, response.content_type, raw)

    def _understand(self, url: str, status: int, content_type: str, raw: bytes) -> Answer:
        if status != 200:
            problem = _problem(raw)
            unknown = status == 404 and problem.get("type") == "urn:tierkv:problem:not-found"
            kind: NodeFailure = "unknown-namespace" if unknown else "down" if status >= 500 else "refused"
            return self._failure(url, kind, str(problem.get("detail", f"status {status}")), heard=unknown)
        hit = PeerHit.model_validate(decode(raw, content_type))
        self._heard[url] = _Heard(hit.node, hit.instance, asyncio.get_running_loop().time())
        return Answer(url, hit.node, hit.blocks, hit.tokens, hit.tokens_by_tier)

    def _failure(self, url: str, kind: NodeFailure, detail: str, *, heard: bool = False) -> Answer:
        known = self._heard.get(url)
        age_s = None if known is None else asyncio.get_running_loop().time() - known.at
        return Answer(
            url,
            "" if known is None else known.node,
            error=kind,
            detail=detail[:_DETAIL],
            age_s=0.0 if heard else age_s,
        )

    def _own(self, url: str) -> bool:
        heard = self._heard.get(url)
        now = asyncio.get_running_loop().time()
        return heard is not None and heard.instance == self.instance and now - heard.at < _OWN_S

    def _distinct(self, answers: Mapping[str, Answer]) -> list[Answer]:
        """Leave out this node, and further addresses of one that answers already."""
        known = {address.url for peer in self._peers for address in peer.known}
        self._heard = {url: heard for url, heard in self._heard.items() if url in known}
        seen = {self.instance}
        distinct = []
        for url, answer in sorted(answers.items(), key=lambda item: item[1].error is not None):
            heard = self._heard.get(url)
            if heard is not None:
                if heard.instance in seen:
                    continue
                seen.add(heard.instance)
            distinct.append(answer)
        return distinct


def _problem(raw: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
