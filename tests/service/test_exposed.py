"""Beyond the loopback interface: never without tokens, by known names only, and with TLS."""

import http.client
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tests.service.daemon import PATIENCE_S, TIERS, Daemon, Raw, chain, mode, read_back, short_directory, store
from tests.service.test_start import Serve, here, serve  # noqa: F401
from tierkv.config import parse_config
from tierkv.errors import ConfigError, InvalidRequest, NotFound, StorageError, Unavailable
from tierkv.service.auth import Authority
from tierkv.service.tokens import Token, TokenFile

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def make_certificate(directory: Path, name: str = "tls") -> tuple[Path, Path]:
    """Make a self-signed certificate for 127.0.0.1; return it and its key."""
    certificate, key = directory / f"{name}.crt", directory / f"{name}.key"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=tierkv"
    command = ["openssl", *words.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    return certificate, key


def test_another_host_needs_a_place_for_tokens() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "kv.example.org"):
        with pytest.raises(ConfigError, match="loopback interface only, unless callers have tokens"):
            parse_config({"host": host, "port": 1})
        assert parse_config({"host": host, "port": 1, "state_dir": "/x"}).exposed
    for host in ("127.0.0.1", "::1", "localhost"):
        assert not parse_config({"host": host, "port": 1}).exposed


def test_another_host_without_tokens_does_not_start(serve: Serve, here: Path) -> None:  # noqa: F811
    code, said = serve(host="0.0.0.0", port=0)
    assert code == 2
    assert all(word in said for word in ("0.0.0.0", "no tokens", "tierkv token new", "127.0.0.1"))
    assert not (here / "s").exists()


def test_another_host_with_tokens_serves_those_who_call_it_by_name() -> None:
    with short_directory() as directory:
        daemon = Daemon(directory, {**TIERS, "host": "0.0.0.0", "auth": {"allowed_hosts": ["kv.Example.org", "::7"]}})
        token = TokenFile(daemon.state_dir).create("chat", "engine")
        try:
            daemon.start()
            assert daemon.announced[0].startswith(f"tierkv {tierkv.__version__} ready on unix://")
            assert "unencrypted" in daemon.log
            raw, bearer = Raw(daemon.tcp_port), {"Authorization": f"Bearer {token}"}
            for host in ("localhost", "127.0.0.1:80", "kv.example.org", "KV.EXAMPLE.ORG:8780", "[::7]:1", "0.0.0.0"):
                assert raw.request("GET", "/v1/stats", headers={"Host": host, **bearer})[0] == 200, host
            for host in ("example.org", "x.kv.example.org", "kv.example.org.", "[::8]", "10.0.0.1"):
                status, problem, _ = raw.request("GET", "/v1/stats", headers={"Host": host, **bearer})
                assert (status, "auth.allowed_hosts" in problem["remedy"]) == (400, True), host
            for path, status in (("/v1/stats", 401), ("/healthz", 200), ("/readyz", 200)):
                assert raw.request("GET", path)[0] == status
        finally:
            daemon.destroy()


@pytest.mark.parametrize("host", ["", "a b", "http://x", "x:80", "[::1]", 5])
def test_allowed_hosts_are_hosts(host: Any) -> None:
    with pytest.raises(ConfigError, match=r"auth\.allowed_hosts\.0: not a host"):
        parse_config({"auth": {"allowed_hosts": [host]}})


@pytest.fixture
def encrypted() -> Iterator[tuple[Daemon, Path]]:
    with short_directory() as directory:
        certificate, key = make_certificate(directory)
        daemon = Daemon(directory, {**TIERS, "tls": {"certificate": str(certificate), "key": str(key)}})
        try:
            yield daemon.start(), certificate
        finally:
            daemon.destroy()


@needs_openssl
def test_tls(encrypted: tuple[Daemon, Path]) -> None:
    daemon, certificate = encrypted
    url = f"https://127.0.0.1:{daemon.tcp_port}"
    assert url in daemon.announced[0]
    with tierkv.connect(url, ca=certificate) as cache, daemon.connect() as local:
        local.lookup(chain(1))
        assert store(cache, chain(50)) == 50
        assert read_back(cache, chain(50)) == 50
        assert read_back(local, chain(50)) == 50  # the socket needs no TLS
        assert cache.stats()["http"]["connections"] == 2
    with pytest.raises(Unavailable, match=r"(?i)certificate"):
        tierkv.connect(url)
    with pytest.raises(Unavailable):
        tierkv.connect(daemon.tcp_url)
    with pytest.raises(Unavailable, match=r"(?i)mismatch"):
        tierkv.connect(url.replace("127.0.0.1", "localhost"), ca=certificate)
    with pytest.raises(InvalidRequest, match="https only"):
        tierkv.connect(daemon.tcp_url, ca=certificate)
    with pytest.raises(InvalidRequest, match="holds no certificates"):
        tierkv.connect(url, ca="/nowhere.pem")
    assert "Traceback" not in daemon.log


@needs_openssl
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_tls_of_old_is_refused(encrypted: tuple[Daemon, Path]) -> None:
    daemon, certificate = encrypted
    offered = ssl.create_default_context(cafile=certificate)
    offered.set_ciphers("ALL:@SECLEVEL=0")
    for version, works in ((ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_1, False)):
        offered.minimum_version = ssl.TLSVersion.TLSv1
        offered.maximum_version = version
        connection = http.client.HTTPSConnection("127.0.0.1", daemon.tcp_port, timeout=PATIENCE_S, context=offered)
        if works:
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == 200
        else:
            with pytest.raises(ssl.SSLError):
                connection.request("GET", "/healthz")
        connection.close()


@needs_openssl
def test_who_never_shakes_hands_holds_up_nobody(encrypted: tuple[Daemon, Path]) -> None:
    daemon, certificate = encrypted
    with (
        socket.create_connection(("127.0.0.1", daemon.tcp_port), PATIENCE_S) as silent,
        tierkv.connect(f"https://127.0.0.1:{daemon.tcp_port}", ca=certificate) as cache,
    ):
        assert "uptime_s" in cache.stats()
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b" 200 " not in silent.recv(1000)


@needs_openssl
def test_tls_settings_that_cannot_be(serve: Serve, here: Path) -> None:  # noqa: F811
    certificate, key = make_certificate(here)
    _, other = make_certificate(here, "other")
    locked, junk = here / "locked.key", here / "junk"
    command = ["openssl", "ec", "-in", str(key), "-aes128", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    junk.write_text("no certificate")
    for tls, words in (
        ({"certificate": certificate}, ["tls: certificate and key belong together"]),
        ({"certificate": "/nowhere", "key": key}, ["tls.certificate: cannot read /nowhere"]),
        ({"certificate": certificate, "key": here}, ["tls.key: cannot read", "directory"]),
        ({"certificate": certificate, "key": other}, ["tls: ", "not a certificate and its key"]),
        ({"certificate": junk, "key": key}, ["tls: ", "not a certificate and its key"]),
        ({"certificate": certificate, "key": locked}, ["tls.key is encrypted"]),
    ):
        code, said = serve(tls={name: str(path) for name, path in tls.items()}, port=0)
        assert code == 2, said
        assert all(word in said for word in words), said


@pytest.fixture
def file(here: Path) -> TokenFile:  # noqa: F811
    return TokenFile(here / "state")


def test_a_token_file_is_private_and_holds_no_secret(file: TokenFile) -> None:
    token = file.create("chat", "engine")
    found = file.read()
    assert found is not None
    assert [(entry.tenant, entry.role) for entry in found] == [("chat", "engine")]
    assert found[0].has_secret(token.split("_")[2])
    assert not found[0].has_secret("0" * 64)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found[0].created)
    assert token.split("_")[2] not in file.path.read_text()
    assert (mode(file.path), mode(file.path.parent)) == (0o600, 0o700)
    assert [path.name for path in file.path.parent.iterdir()] == ["tokens.yaml"]


def test_tokens_made_at_the_same_time_are_all_kept(file: TokenFile) -> None:
    barrier = threading.Barrier(8)

    def make(number: int) -> str:
        barrier.wait(PATIENCE_S)
        return [file.create(f"tenant-{number}", "engine") for _ in range(4)][-1]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(make, range(8)))
    found = file.read()
    assert found is not None
    assert sorted(entry.tenant for entry in found) == sorted(
        f"tenant-{number}" for number in range(8) for _ in range(4)
    )


def test_without_any_token_left_nobody_is_served(file: TokenFile) -> None:
    assert not Authority(file.path.parent).required
    token = file.create("chat", "engine")
    authority = Authority(file.path.parent)
    file.revoke(token.split("_")[1])
    assert authority.required
    authority.reload()
    assert authority.required
    assert Authority(file.path.parent).required
    file.path.unlink()
    with pytest.raises(ConfigError, match="has disappeared"):
        authority.reload()
    assert authority.required
    with pytest.raises(NotFound):
        file.revoke("00000000")


ENTRY = {"id": "0" * 8, "sha256": "0" * 64, "tenant": "chat", "role": "engine", "created": "then"}


@pytest.mark.parametrize(
    "content",
    [
        "[",
        "text",
        "- [1]",
        "\x00",
        *(f"- {entry}" for entry in ({**ENTRY, "role": "king"}, {**ENTRY, "id": "1"}, {**ENTRY, "tenant": "../x"})),
        *(f"- {entry}" for entry in ({**ENTRY, "sha256": "0"}, {**ENTRY, "more": 1}, {"id": "0" * 8})),
        f"- {ENTRY}\n- {ENTRY}",
    ],
)
def test_a_token_file_that_is_none(file: TokenFile, content: str) -> None:
    file.create("chat", "engine")
    file.path.write_text(content)
    for use in (file.read, lambda: file.create("chat", "engine"), lambda: Authority(file.path.parent)):
        with pytest.raises(ConfigError, match=r"tokens\.yaml cannot be understood"):
            use()
    assert file.path.read_text() == content


def test_a_token_file_others_can_read(file: TokenFile) -> None:
    file.create("chat", "engine")
    file.path.chmod(0o640)
    with pytest.raises(ConfigError, match="open to other users"):
        file.read()
    file.path.unlink()
    file.path.mkdir()
    with pytest.raises(StorageError):
        file.read()


def test_the_entry_of_these_tests_is_one(file: TokenFile) -> None:
    file.create("chat", "engine")
    file.path.write_text(f"- {ENTRY}")
    assert file.read() == (Token(**ENTRY),)  # type: ignore[arg-type]
