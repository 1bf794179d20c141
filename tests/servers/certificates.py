"""An authority that signs certificates of servers on this machine, by the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.servers.process import program

__all__ = ["MISSING_OPENSSL", "Authority", "Certificate"]

MISSING_OPENSSL = "" if program("openssl") else "needs openssl (apt install openssl)"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files of a server: its certificate, its private key, and the certificate that it is verified by."""

    certificate: Path
    key: Path
    authority: Path


class Authority:
    """Keeps its files in `directory`, which is there."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self.certificate = directory / f"{name}.pem"
        self._directory = directory
        self._key = directory / f"{name}.key"
        command = ["req", "-x509", *_NEW_KEY, "-keyout", str(self._key), "-out", str(self.certificate), "-days", "30"]
        command += ["-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign"]
        self._openssl(*command)

    def sign(self, *names: str, days: int = 30) -> Certificate:
        """Make a key and a certificate for `names`: ``IP:127.0.0.1``, ``DNS:localhost``. It has expired if days < 0."""
        stem = f"{'-'.join(names)}{days}".replace(":", "_")
        request, key, certificate = (self._directory / f"{stem}.{kind}" for kind in ("csr", "key", "pem"))
        self._openssl("req", *_NEW_KEY, "-keyout", str(key), "-out", str(request), "-subj", "/CN=server")
        extensions = self._directory / f"{stem}.ext"
        extensions.write_text(f"subjectAltName={','.join(names)}\n")
        command = ["x509", "-req", "-in", str(request), "-out", str(certificate), "-days", str(days)]
        command += ["-CA", str(self.certificate), "-CAkey", str(self._key), "-CAcreateserial"]
        self._openssl(*command, "-extfile", str(extensions))
        return Certificate(certificate, key, self.certificate)

    def sign_itself(self, *names: str, authority: bool) -> Certificate:
        """Make a certificate for `names` that nobody else signs, and that may say that it is an authority's."""
        key, certificate = (self._directory / f"itself-{authority}.{kind}" for kind in ("key", "pem"))
        command = ["req", "-x509", *_NEW_KEY, "-keyout", str(key), "-out", str(certificate), "-days", "30"]
        command += ["-addext", f"basicConstraints=critical,CA:{str(authority).upper()}"]
        self._openssl(*command, "-subj", "/CN=itself", "-addext", f"subjectAltName={','.join(names)}")
        return Certificate(certificate, key, certificate)

    @staticmethod
    def _openssl(*arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 0, done.stderr
