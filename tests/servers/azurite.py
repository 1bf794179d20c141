"""Azurite as an Azure Blob service."""

from __future__ import annotations

import base64
import hmac
import shutil
import ssl
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from tests.servers.certificates import Certificate
from tests.servers.process import Server, ServerProcess, free_port, program, wait_until

__all__ = ["MISSING_AZURITE", "AzuriteServer"]

MISSING_AZURITE = (
    ""
    if program("azurite-blob") and shutil.which("node") and find_spec("obstore")
    else "needs Azurite and obstore (make azurite; pip install 'tierkv-cache[shared]')"
)
_ACCOUNT = "devstoreaccount1"
_KEY = base64.b64encode(b"not a secret, but as long as one").decode()
_VERSION = "2023-11-03"


class AzuriteServer(Server):
    """One account that keeps nothing on disk, with a container ``tests``. With a certificate it speaks TLS."""

    def __init__(self, directory: Path, certificate: Certificate | None = None) -> None:
        self.port = free_port()
        self._certificate = certificate
        command = ["env", f"AZURITE_ACCOUNTS={_ACCOUNT}:{_KEY}", program("azurite-blob") or "azurite-blob"]
        command += ["--blobPort", str(self.port), "--inMemoryPersistence", "--silent", "--disableTelemetry"]
        # A client may be newer than it, and name a version of the protocol that it has not heard of.
        command += ["--skipApiVersionCheck"]
        if certificate is not None:
            command += ["--cert", str(certificate.certificate), "--key", str(certificate.key)]
        self._process = ServerProcess(command, directory, log=f"azurite-{self.port}.log")
        self._process.start()
        wait_until(self._has_container, "Azurite")

    @property
    def options(self) -> dict[str, str]:
        """What `ObjectBackend` needs to reach it."""
        return {"endpoint": self._endpoint, "account_name": _ACCOUNT, "account_key": _KEY}

    def pass_for(self, time: timedelta) -> dict[str, str]:
        """As `options`, with a token (SAS) for the container in place of the key. It has expired if `time` is < 0."""
        ends = (datetime.now(UTC) + time).strftime("%Y-%m-%dT%H:%M:%SZ")
        resource = f"/blob/{_ACCOUNT}/tests"
        told = "\n".join(["rwdl", "", ends, resource, "", "", "", _VERSION, "c", *7 * [""]])
        token = {"sp": "rwdl", "se": ends, "sv": _VERSION, "sr": "c", "sig": _sign(told)}
        return {"endpoint": self._endpoint, "account_name": _ACCOUNT, "sas_token": urlencode(token)}

    @property
    def _endpoint(self) -> str:
        return f"http{'' if self._certificate is None else 's'}://127.0.0.1:{self.port}/{_ACCOUNT}"

    def _has_container(self) -> bool:
        """Make the container, which the client has no call for; whether it is there."""
        assert self.running, self._process.log.read_text()[-2000:]
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
        # Twelve lines are for headers that are not sent, and the account is in the path, too: one of the emulator's.
        named = "".join(f"{name}:{value}\n" for name, value in headers.items())
        told = f"PUT{12 * chr(10)}{named}/{_ACCOUNT}/{_ACCOUNT}/tests\nrestype:container"
        headers |= {"Authorization": f"SharedKey {_ACCOUNT}:{_sign(told)}", "Content-Length": "0"}
        request = Request(f"{self._endpoint}/tests?restype=container", method="PUT", headers=headers)
        trust = self._certificate and ssl.create_default_context(cafile=self._certificate.authority)
        try:
            urlopen(request, timeout=5, context=trust).close()
        except HTTPError as error:
            if error.code == 409:
                return True
            raise
        except URLError:
            return False
        return True


def _sign(text: str) -> str:
    return base64.b64encode(hmac.digest(base64.b64decode(_KEY), text.encode(), "sha256")).decode()
