"""Why an engine was not reached: clients say so late, to programmers, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass

__all__ = ["Diagnosis", "ask", "read_text"]

_PATIENCE_S = 0.4
_SECOND_THOUGHTS_S = 0.2
_SAYS_AUTHORITY = re.compile(rb"\x55\x1d\x13(\x01\x01\xff)?\x04.\x30.\x01\x01\xff", re.DOTALL)
"""The extension basicConstraints with CA:TRUE, in a certificate's DER (RFC 5280, 4.2.1.9)."""
_PING = b"PING\r\n"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong with an engine that is not reached, and what to do about it."""

    said: str
    remedy: str


_NO_NAME = Diagnosis("its name is not known", "correct the name, or have it resolved here")
_NOBODY = Diagnosis("nothing listens there", "start the server, or correct the port")
_EXPIRED = Diagnosis("its certificate has expired", "renew it, and check the clocks")
_TOO_EARLY = Diagnosis("its certificate is not valid yet", "check the clocks")
_OTHER_NAME = Diagnosis("its certificate is for another name", "use a name or an address that is in the certificate")
_STRANGER = Diagnosis(
    "its certificate is by an authority that is not trusted", "give that authority's certificate as ca_file"
)
_AUTHORITY = Diagnosis(
    "its certificate is an authority's (CA:TRUE), which no server may show",
    "make one with CA:FALSE, signed by itself or an authority, and give the certificate of who signed it as ca_file",
)
_NO_TLS = Diagnosis("it does not speak TLS there", "use the port that does, or leave TLS out of the URL")
_WANTS_TLS = Diagnosis("it speaks TLS there", "use valkeys://, rediss:// or https://")
_SILENT = Diagnosis(
    "it closes the connection without an answer", "check the endpoint; where it speaks TLS, use https://"
)
_WANTS_CERTIFICATE = Diagnosis(
    "it wants clients to show a certificate, which this one has not", "set tls-auth-clients to no, and use a password"
)
_BY_CODE = {9: _TOO_EARLY, 10: _EXPIRED, 62: _OTHER_NAME, 64: _OTHER_NAME}
"""Codes of OpenSSL's verification."""
_BY_TEXT = (
    ("InvalidCertificate(Expired", _EXPIRED),
    ("InvalidCertificate(NotValidYet", _TOO_EARLY),
    ("InvalidCertificate(NotValidForName", _OTHER_NAME),
    ("CaUsedAsEndEntity", _AUTHORITY),
    ("InvalidCertificate(", _STRANGER),
    ("InvalidContentType", _NO_TLS),
    ("HTTPrequesttoanHTTPSserver", _WANTS_TLS),
    ("IncompleteMessage", _SILENT),
    ("dnserror", _NO_NAME),
    ("ConnectionRefused", _NOBODY),
)
"""What is in the errors of clients that are written in Rust, without its spaces."""


def read_text(text: str) -> Diagnosis | None:
    """Look for the cause in what a client tells programmers; None where it has none of those that are known here."""
    dense = "".join(text.split())
    return next((found for sign, found in _BY_TEXT if sign in dense), None)


async def ask(host: str, port: int, *, tls: bool, root_certificates: bytes | None) -> Diagnosis | None:
    """Try to talk to a Valkey or Redis server that its client did not reach. Takes about a second at most.

    Parameters
    ----------
    host, port
        Where it should be.
    tls, root_certificates
        Whether it was spoken to by TLS, and PEM of what its certificate was verified by; None: the system's.

    Returns
    -------
    None where nothing was found: it does not answer at all, or answers here.
    """
    try:
        if not tls:
            return _WANTS_TLS if await _shakes_hands(host, port) else None
        async with _connection(host, port, _context(root_certificates)) as (reader, writer):
            # By TLS 1.3 a server asks for the client's certificate and leaves when the client is through.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), _SECOND_THOUGHTS_S)
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            return _AUTHORITY if _SAYS_AUTHORITY.search(shown) else None
    except socket.gaierror:
        return _NO_NAME
    except ConnectionRefusedError:
        return _NOBODY
    except ssl.SSLCertVerificationError as error:
        return _BY_CODE.get(error.verify_code, _STRANGER)
    except ssl.SSLError as error:
        if "CERTIFICATE_REQUIRED" in (error.reason or "") or "HANDSHAKE_FAILURE" in (error.reason or ""):
            return _WANTS_CERTIFICATE
        return _NO_TLS if await _answers_plainly(host, port) else None
    except OSError:  # among them TimeoutError
        return _NO_TLS if await _answers_plainly(host, port) else None


@contextlib.asynccontextmanager
async def _connection(
    host: str, port: int, context: ssl.SSLContext | None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(_PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


def _context(root_certificates: bytes | None) -> ssl.SSLContext:
    if root_certificates is None:
        return ssl.create_default_context()
    return ssl.create_default_context(cadata=root_certificates.decode("ascii", "ignore"))


async def _shakes_hands(host: str, port: int) -> bool:
    """Whether the server speaks TLS, whoever it is."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with _connection(host, port, context):
            return True
    except (ssl.SSLError, TimeoutError, ConnectionResetError, BrokenPipeError):
        return False


async def _answers_plainly(host: str, port: int) -> bool:
    try:
        async with _connection(host, port, None) as (reader, writer):
            writer.write(_PING)
            return await reader.read(1) in (b"+", b"-")
    except OSError:
        return False
