"""The client library: the cache's contract spoken to a daemon. Imports neither torch nor pydantic."""

from __future__ import annotations

from tierkv.client.remote import RemoteCache, connect

__all__ = ["RemoteCache", "connect"]
