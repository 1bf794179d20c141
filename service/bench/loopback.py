"""The yardstick for HTTP bodies: bytes that asyncio streams over the loopback interface to a plain socket.

    python -m tierkv.service.bench.loopback

Whoever connects sends a number of bytes as u64, little-endian, and gets so many.
"""

from __future__ import annotations

import asyncio
import socket
import struct

__all__ = ["receive"]

_COUNT = struct.Struct("<Q")
_CHUNK = 1 << 20


def receive(connection: socket.socket, target: memoryview) -> None:
    """Fill `target` from the other end."""
    connection.sendall(_COUNT.pack(len(target)))
    at = 0
    while at < len(target):
        got = connection.recv_into(target[at:])
        if not got:
            raise ConnectionResetError("the loopback stream ended early")
        at += got


async def _stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    chunk = bytes(_CHUNK)
    try:
        while True:
            (left,) = _COUNT.unpack(await reader.readexactly(_COUNT.size))
            while left:
                part = chunk[: min(left, _CHUNK)]
                writer.write(part)
                await writer.drain()
                left -= len(part)
    except asyncio.IncompleteReadError:
        writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_stream, "127.0.0.1", 0)
    print(f"ready on {server.sockets[0].getsockname()[1]}", flush=True)  # noqa: T201
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve())
