"""The client library: the cache's contract spoken to a daemon. Imports neither torch nor pydantic.

`tierkv.client.failopen` is imported by those who fail open only: it would cost the others 10 milliseconds.
"""

from __future__ import annotations

from tierkv.client.remote import RemoteCache, connect

__all__ = ["RemoteCache", "connect"]
