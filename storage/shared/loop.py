"""The one thread on which this process talks to storage engines.

One for all stores, not one each: valkey-glide delivers the answers of every client of a process on the event loop of
the first, and a client whose loop is not that one waits for as long as the other is gone.
"""

from __future__ import annotations

import asyncio
from threading import Lock, Thread

__all__ = ["acquire_loop", "release_loop"]

_lock = Lock()
_users = 0
_loop: asyncio.AbstractEventLoop | None = None
_thread: Thread | None = None


def acquire_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop; the first user starts its thread."""
    global _users, _loop, _thread
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _thread = Thread(target=_loop.run_forever, name="tierkv-shared", daemon=True)
            _thread.start()
        _users += 1
        return _loop


def release_loop() -> None:
    """Give the loop up; the last user stops its thread. Blocks until it has ended."""
    global _users, _loop, _thread
    with _lock:
        _users -= 1
        if _users or _loop is None or _thread is None:
            return
        loop, thread, _loop, _thread = _loop, _thread, None, None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
