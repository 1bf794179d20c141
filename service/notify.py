"""Tell systemd how the daemon is (sd_notify): one datagram to the socket it named, nothing where it named none."""

from __future__ import annotations

import contextlib
import os
import socket

__all__ = ["notify"]


def notify(state: str) -> None:
    """Send a state such as ``READY=1``. Never fails: who does not listen does not mind."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.sendto(state.encode(), address)
