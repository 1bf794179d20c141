"""Tokens, roles and tenants: who gets what from a daemon that has tokens, and what a stranger can find out."""

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import tierkv
from tests.service.daemon import (
    PATIENCE_S,
    ROOT,
    SPEC,
    Daemon,
    Raw,
    chain,
    eventually,
    mode,
    read_back,
    short_directory,
    store,
)
from tierkv.cache import Cache
from tierkv.client.transport import Transport
from tierkv.errors import Forbidden, InvalidRequest, Unauthorized
from tierkv.service.routes import ROUTES
from tierkv.service.tokens import Role, TokenFile

NS = f"/v1/{SPEC.namespace}"
OPEN = {("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/"), ("GET", "/page/{part}")}
READER = {
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/events"),
    ("GET", "/v1/insight"),
    ("GET", "/v1/namespaces"),
    ("GET", "/v1/stats"),
    ("GET", "/v1/trace"),
    ("GET", "/v1/trunks"),
    ("POST", "/v1/{ns}/lookup"),
    ("POST", "/v1/{ns}/where"),
}
NODES = {("POST", "/v1/peer/lookup")}
OPERATOR = {("POST", "/v1/flush"), ("GET", "/v1/segments"), ("GET", "/v1/tenants")}


@dataclass
class Guarded:
    """A daemon with a token for each role, and one of another tenant."""

    daemon: Daemon
    file: TokenFile
    tokens: dict[str, str]

    @property
    def raw(self) -> Raw:
        return Raw(self.daemon.tcp_port)

    def connect(self, name: str, *, tcp: bool = False, tenant: str | None = None) -> Cache:
        url = self.daemon.tcp_url if tcp else self.daemon.url
        return tierkv.connect(url, token=self.tokens[name], tenant=tenant)

    def status(self, method: str, path: str, token: str | None, **headers: str) -> int:
        """Status of an empty request; its body, which may never end, is not read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.daemon.tcp_port, timeout=PATIENCE_S)
        try:
            given = {} if token is None else {"Authorization": f"Bearer {token}"}
            connection.request(method, path, headers={**given, **headers})
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    with short_directory() as directory:
        daemon = Daemon(directory)
        file = TokenFile(daemon.state_dir)
        roles: dict[str, tuple[str, Role]] = {
            "engine": ("chat", "engine"),
            "reader": ("chat", "reader"),
            "operator": ("staff", "operator"),
            "other": ("batch", "engine"),
        }
        tokens = {name: file.create(tenant, role) for name, (tenant, role) in roles.items()}
        try:
            guarded = Guarded(daemon.start(), file, tokens)
            for name in ("engine", "other"):
                with guarded.connect(name) as cache:
                    cache.register(SPEC)
            yield guarded
            assert "Traceback" not in daemon.log
        finally:
            daemon.destroy()


@pytest.mark.parametrize(("method", "path"), sorted({(route.method, route.path) for route in ROUTES}))
def test_what_each_role_may(guarded: Guarded, method: str, path: str) -> None:
    names = {"{ns}": "ab" * 32, "{id}": "nobodys", "{hash}": "00" * 32, "{part}": "page.css"}
    concrete = path
    for name, value in names.items():
        concrete = concrete.replace(name, value)
    route = ("GET" if method == "HEAD" else method, path)
    for name in ("nobody", "reader", "engine", "operator"):
        status = guarded.status(method, concrete, guarded.tokens.get(name))
        if route in OPEN:
            allowed = True
        elif name == "nobody" or route in NODES:
            assert status == 401, (name, route)
            continue
        elif name == "reader":
            allowed = route in READER
        else:
            allowed = name == "operator" or route not in OPERATOR
        assert (status != 403) == allowed, (name, route, status)
        assert status != 401, (name, route)


def test_a_route_that_is_none_is_not_found_but_for_strangers(guarded: Guarded) -> None:
    assert guarded.status("GET", "/v1/nothing/at/all", None) == 401
    for name in ("reader", "engine", "operator"):
        assert guarded.status("GET", "/v1/nothing/at/all", guarded.tokens[name]) == 404


def wrong_tokens(good: str, other: str) -> list[str]:
    prefix, name, secret = good.split("_")
    return [
        "",
        "tkv",
        "Bearer",
        good[:-1],
        good + "0",
        good.upper(),
        f"{prefix}_{name}_{'0' * 64}",
        f"{prefix}_{other.split('_')[1]}_{secret}",
        f"{prefix}_{'0' * 8}_{secret}",
        secret,
        f"{good},{good}",
        f'"{good}"',
    ]


def test_wrong_tokens(guarded: Guarded) -> None:
    good = guarded.tokens["engine"]
    credentials = [f"Bearer {wrong}" for wrong in wrong_tokens(good, guarded.tokens["other"])]
    credentials += [good, f"Basic {good}", f"Bearer{good}", f"Bearer\t{good}", f"Token {good}"]
    for text in credentials:
        status, problem, response = guarded.raw.request("GET", "/v1/stats", headers={"Authorization": text})
        assert (status, problem["type"]) == (401, "urn:tierkv:problem:unauthorized"), text
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert problem["remedy"]
    for text in (f"Bearer {good}", f"bearer {good}", f"BEARER  {good}"):
        assert guarded.raw.request("GET", "/v1/stats", headers={"Authorization": text})[0] == 200


def test_the_socket_needs_a_token_too(guarded: Guarded) -> None:
    with pytest.raises(Unauthorized):
        guarded.daemon.connect()
    with guarded.connect("engine") as cache:
        assert store(cache, chain(3)) == 3
        assert read_back(cache, chain(3)) == 3
    with guarded.connect("reader") as cache, pytest.raises(Forbidden, match=r"/v1/attach is not for the role reader"):
        cache.acquire(chain(3))


@pytest.mark.parametrize("tcp", [False, True])
def test_the_tenant_is_the_tokens(guarded: Guarded, tcp: bool) -> None:
    mine = chain(2, seed=10 + tcp)
    with guarded.connect("engine", tcp=tcp) as engine, guarded.connect("other", tcp=tcp) as other:
        assert store(engine, mine) == 2
        assert read_back(engine, mine) == 2
        assert (engine.lookup(mine).blocks, other.lookup(mine).blocks) == (2, 0)
    with guarded.connect("engine", tcp=tcp, tenant="chat") as named:
        assert named.lookup(mine).blocks == 2
    with guarded.connect("other", tcp=tcp, tenant="chat") as thief, pytest.raises(Forbidden, match="not tenant 'chat'"):
        thief.lookup(mine)
    with guarded.connect("operator", tcp=tcp) as own, guarded.connect("operator", tcp=tcp, tenant="chat") as operator:
        assert (own.lookup(mine).blocks, operator.lookup(mine).blocks) == (0, 2)


def test_a_lease_of_another_tenant_is_no_ones(guarded: Guarded) -> None:
    with guarded.connect("engine", tcp=True) as engine, engine.reserve(chain(2, seed=20)) as write:
        path = f"/v1/leases/{write.id}/abort"
        assert guarded.status("POST", path, guarded.tokens["other"]) == 410
        write.renew(30)


def send(daemon: Daemon, head: str) -> bytes:
    """Send bytes as they are, and return what is answered until the end."""
    with socket.create_connection(("127.0.0.1", daemon.tcp_port), PATIENCE_S) as connection:
        connection.sendall(head.encode())
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_smuggled_headers(guarded: Guarded) -> None:
    good, other = f"Bearer {guarded.tokens['engine']}", f"Bearer {guarded.tokens['other']}"
    first = "GET /v1/stats HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    assert b"HTTP/1.1 200 " in send(guarded.daemon, f"{first}Authorization: {good}\r\n\r\n")
    refused = [
        f"Authorization: {good}\r\nAuthorization: {other}",
        f"Authorization: {good}\r\nauthorization: {good}",
        f"Authorization: nonsense\r\nAuthorization: {good}",
        f"Authorization: {good}\r\nTierkv-Tenant: chat\r\nTierkv-Tenant: batch",
        f"Authorization: {good}\r\nTierkv-Tenant: chat,batch",
        f"Authorization : {good}",
        f"Authorization: Bearer\r\n {guarded.tokens['engine']}",
        f"X: y\nAuthorization: {good}",
    ]
    for lines in refused:
        answer = send(guarded.daemon, f"{first}{lines}\r\n\r\n")
        assert answer.split(b" ", 2)[1] in (b"400", b"401"), (lines, answer)
        assert b"uptime_s" not in answer


def test_every_request_of_a_connection_needs_its_token(guarded: Guarded) -> None:
    good = f"Authorization: Bearer {guarded.tokens['engine']}\r\n"
    one = "GET /v1/namespaces HTTP/1.1\r\nHost: localhost\r\n"
    answer = send(guarded.daemon, f"{one}{good}\r\n{one}\r\n{one}{good}Connection: close\r\n\r\n")
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"401", b"200"]


def test_stats_show_ones_own_tenant(guarded: Guarded) -> None:
    for name in ("engine", "other"):
        with guarded.connect(name) as cache:
            store(cache, chain(1, seed=30))
    shown = {}
    for name in ("engine", "reader", "other", "operator"):
        with guarded.connect(name) as cache:
            shown[name] = set(cache.stats()["tenants"])
    assert shown["engine"] == shown["reader"] == {"chat"}
    assert shown["other"] == {"batch"}
    assert shown["operator"] >= {"chat", "batch"}


def test_no_token_is_logged_or_told(guarded: Guarded) -> None:
    secrets = [token.split("_")[2] for token in guarded.tokens.values()]
    token = guarded.tokens["engine"]
    for headers in (
        {"Authorization": f"Basic {token}"},
        {"Authorization": f"Bearer {token}x"},
        {"Authorization": f"Bearer {token}", "Tierkv-Tenant": "batch"},
        {"Authorization": f"Bearer {token}", "X-Request-Id": token},
        {"Authorization": f"Bearer {token}", "Content-Encoding": token},
    ):
        body = str(
            guarded.raw.request("POST", f"{NS}/lookup", b"{", {"Content-Type": "application/json", **headers})[1]
        )
        assert not any(secret in body for secret in secrets)
    send(guarded.daemon, f"GET / HTTP/1.1\r\nAuthorization Bearer {token}\r\n\r\n")
    send(guarded.daemon, f"Bearer {token}\r\n\r\n")
    with pytest.raises(Unauthorized) as refused, tierkv.connect(guarded.daemon.url, token=token[:-1] + "x") as cache:
        cache.register(SPEC)
    assert token[:-1] not in str(refused.value)
    text = guarded.daemon.log + "".join(guarded.daemon.announced) + guarded.file.path.read_text()
    assert not any(secret in text for secret in secrets)


def test_tokens_are_read_again_at_sighup(guarded: Guarded) -> None:
    fresh = guarded.file.create("chat", "reader")
    assert guarded.status("GET", "/v1/stats", fresh) == 401
    guarded.daemon.send(signal.SIGHUP)
    eventually(lambda: guarded.status("GET", "/v1/stats", fresh) == 200)
    guarded.file.revoke(fresh.split("_")[1])
    guarded.daemon.send(signal.SIGHUP)
    eventually(lambda: guarded.status("GET", "/v1/stats", fresh) == 401)
    text = guarded.file.path.read_text()
    for spoil in (guarded.file.path.unlink, lambda: guarded.file.path.write_text("- nonsense")):
        spoil()
        lines = guarded.daemon.log.count("\n")
        guarded.daemon.send(signal.SIGHUP)
        eventually(lambda lines=lines: guarded.daemon.log.count("\n") > lines)
        assert guarded.status("GET", "/v1/stats", None) == 401
        assert guarded.status("GET", "/v1/stats", guarded.tokens["reader"]) == 200
    guarded.file.path.write_text(text)
    guarded.file.path.chmod(0o600)


def test_the_client_takes_its_token_from_the_environment(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_TOKEN", guarded.tokens["reader"] + "\n")
    with tierkv.connect(guarded.daemon.url) as cache:
        assert set(cache.stats()["tenants"]) <= {"chat"}
    with tierkv.connect(guarded.daemon.url, token=guarded.tokens["operator"]) as cache:
        assert "staff" in cache.stats()["tenants"] or "chat" in cache.stats()["tenants"]


@pytest.mark.parametrize("token", ["tkv_\r\nX: y", "tkv_\u00e9", "tkv_ secret-words"])
def test_a_token_that_would_be_more_than_a_header(token: str) -> None:
    with pytest.raises(InvalidRequest, match="the token has characters") as refused:
        Transport("http://127.0.0.1:1", None, 1.0, token=token)
    assert token[4:] not in str(refused.value)


def test_without_tokens_everybody_is_an_operator(daemon: Daemon, raw: Raw) -> None:
    status, answer, _ = raw.request("GET", "/v1/stats", headers={"Authorization": "Bearer nonsense"})
    assert (status, "tenants" in answer) == (200, True)
    with daemon.connect("ann", tcp=True) as ann, daemon.connect("bob") as bob:
        store(ann, chain(1, seed=40))
        assert "ann" in bob.stats()["tenants"]


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tierkv.service", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", **environment},
        timeout=PATIENCE_S,
        check=False,
    )


def test_tokens_on_the_command_line() -> None:
    with short_directory() as directory:
        state = directory / "state"
        before = command("token", "list", "--state-dir", str(state))
        assert "nobody needs a token" in before.stdout
        made = command("token", "new", "--tenant", "chat", "--role", "engine", "--state-dir", str(state))
        prefix, name, secret = made.stdout.strip().split("_")
        assert (prefix, len(name), len(secret)) == ("tkv", 8, 64)
        assert (mode(state), mode(state / "tokens.yaml")) == (0o700, 0o600)
        assert secret not in (state / "tokens.yaml").read_text()
        shown = command("token", "list", TIERKV_STATE_DIR=str(state)).stdout
        assert all(word in shown for word in (name, "engine", "chat"))
        assert secret not in shown
        assert name in command("token", "revoke", name, "--state-dir", str(state)).stdout
        again = command("token", "revoke", name, "--state-dir", str(state))
        assert (again.returncode, "no token has the id" in again.stderr) == (3, True)
        for words, code in (
            (("--tenant", "../x", "--role", "engine", "--state-dir", str(state)), 2),
            (("--tenant", "chat", "--role", "king", "--state-dir", str(state)), 2),
            (("--tenant", "chat", "--role", "engine"), 2),
            (("--tenant", "chat", "--role", "engine", "--state-dir", "/dev/null/x"), 5),
        ):
            failed = command("token", "new", *words)
            assert (failed.returncode, failed.stdout) == (code, ""), failed
            assert failed.stderr.startswith("error: ")


def test_commands_need_a_token_and_say_so(guarded: Guarded) -> None:
    refused = command("status", TIERKV_URL=guarded.daemon.url)
    assert (refused.returncode, "error: a token is needed" in refused.stderr) == (10, True)
    shown = command("status", TIERKV_URL=guarded.daemon.url, TIERKV_TOKEN=guarded.tokens["reader"])
    assert (shown.returncode, "hit rate" in shown.stdout) == (0, True)
