"""Which nodes hold how much of a prefix: real daemons that are up, down, frozen, strangers or behind one name."""

import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.service.cluster.nodes import SECRET, Side, cluster, fill, free_ports, in_short, node, where
from tests.service.daemon import SPEC, Daemon, Raw, chain, eventually
from tests.service.test_exposed import make_certificate, needs_openssl
from tierkv.service.cluster.peers import PEER_ROUTE
from tierkv.service.cluster.signing import NODE_HEADER, NodeKey
from tierkv.service.tokens import TokenFile
from tierkv.wire import MSGPACK_TYPE, encode


@pytest.fixture(scope="module")
def three() -> Iterator[list[Daemon]]:
    with cluster(3) as daemons:
        yield daemons
        for daemon in daemons:
            assert "Traceback" not in daemon.log


def test_every_node_says_what_all_hold_best_first(three: list[Daemon]) -> None:
    prompt = chain(8, seed=1)
    fill(three[0], prompt, 2)
    fill(three[2], prompt, 5)
    for daemon in three:
        found = where(daemon, prompt)
        assert in_short(found) == [("n2", 5, None), ("n0", 2, None), ("n1", 0, None)]
        assert [entry["tokens"] for entry in found] == [80, 32, 0]
        assert [sum(entry["tokens_by_tier"].values()) for entry in found] == [80, 32, 0]
        assert found[0]["tokens_by_tier"].keys() <= {"warm", "cold"}
        assert [entry["age_s"] for entry in found] == [0, 0, 0]
        (own,) = [entry for entry in found if entry["url"] is None]
        assert own["node"] == f"n{three.index(daemon)}"
        others = {entry["url"] for entry in found} - {None}
        assert others == {other.tcp_url for other in three if other is not daemon}


def test_tenants_see_their_own(three: list[Daemon]) -> None:
    prompt = chain(4, seed=2)
    fill(three[1], prompt, 3, tenant="chat")
    assert in_short(where(three[0], prompt))[0] == ("n0", 0, None)
    assert in_short(where(three[0], prompt, Tierkv_Tenant="chat"))[0] == ("n1", 3, None)


def test_a_namespace_that_a_node_does_not_know() -> None:
    with cluster(2) as (one, other):
        assert in_short(where(one, chain(3))) == [("n0", 0, None), ("n1", 0, None)]
        other.stop()
        other.start()  # registrations are for one run
        assert in_short(where(one, chain(3))) == [("n0", 0, None), ("n1", 0, "unknown-namespace")]
        with other.connect():
            pass
        assert in_short(where(one, chain(3))) == [("n0", 0, None), ("n1", 0, None)]


def test_a_node_that_is_down_is_said_to_be_and_comes_back() -> None:
    prompt = chain(3, seed=3)
    with cluster(3) as (one, other, third):
        fill(other, prompt, 3)
        assert in_short(where(one, prompt)) == [("n1", 3, None), ("n0", 0, None), ("n2", 0, None)]
        other.kill()
        found = where(one, prompt)
        assert in_short(found) == [("n0", 0, None), ("n2", 0, None), ("n1", 0, "down")]
        assert found[2]["age_s"] > 0
        assert found[2]["detail"]
        assert in_short(where(third, prompt))[2] == (None, 0, "down")  # never heard of
        other.start()
        fill(other, prompt, 3)
        eventually(lambda: in_short(where(one, prompt))[0] == ("n1", 3, None))


def test_a_frozen_node_holds_nobody_up() -> None:
    prompt = chain(3, seed=4)
    with cluster(3) as (one, other, _):
        fill(one, prompt, 1)
        where(one, prompt)
        other.send(signal.SIGSTOP)
        found = where(one, prompt, wait_s=0.5)
        assert in_short(found) == [("n0", 1, None), ("n2", 0, None), ("n1", 0, "late")]
        assert found[2]["age_s"] > 0
        other.send(signal.SIGCONT)
        eventually(lambda: in_short(where(one, prompt))[2] == ("n2", 0, None))


def test_nobody_waits_when_nobody_wants_to(three: list[Daemon]) -> None:
    found = where(three[0], chain(2, seed=5), wait_s=0)
    assert in_short(found)[0] == ("n0", 0, None)
    assert {entry["error"] for entry in found[1:]} == {"late"}


def test_another_secret_is_refused_both_ways() -> None:
    with cluster(2, stranger=1) as (one, other):
        fill(other, chain(3), 3)
        for daemon, name in ((one, "n0"), (other, "n1")):
            mine, theirs = where(daemon, chain(3))
            assert (mine["node"], mine["error"], theirs["node"], theirs["error"]) == (name, None, None, "refused")
            assert "secret" in theirs["detail"]


def test_with_tokens_nodes_need_none_and_clients_do() -> None:
    prompt = chain(3, seed=6)
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with node("a", urls, port=ports[0]) as guarded, node("b", urls, port=ports[1]) as open_to_all:
        token = TokenFile(guarded.state_dir).create("default", "reader")
        guarded.start()
        open_to_all.start()
        bearer = {"Authorization": f"Bearer {token}"}
        fill(open_to_all, prompt, 2)
        path = f"/v1/{SPEC.namespace}/where"
        assert Raw(guarded.tcp_port).request("POST", path, b"{}")[0] == 401
        assert in_short(where(open_to_all, prompt)) == [("b", 2, None), (None, 0, "unknown-namespace")]
        operator = TokenFile(guarded.state_dir).create("default", "engine")
        guarded.send(signal.SIGHUP)
        engine = {"Authorization": f"Bearer {operator}", "Content-Type": MSGPACK_TYPE}
        spec = encode(SPEC.to_dict(), MSGPACK_TYPE)
        eventually(lambda: Raw(guarded.tcp_port).request("PUT", "/v1/namespaces", spec, engine)[0] == 200)
        assert in_short(where(guarded, prompt, **bearer)) == [("b", 2, None), ("a", 0, None)]
        assert in_short(where(open_to_all, prompt)) == [("b", 2, None), ("a", 0, None)]


_NAMES = """
import socket
real = socket.getaddrinfo
def named(host, port, *args, **more):
    hosts = {"nodes.test": ["127.0.0.2", "127.0.0.3", "127.0.0.4"]}.get(host, [host])
    if host == "nowhere.test":
        raise socket.gaierror(-2, "Name or service not known")
    return [found for one in hosts for found in real(one, port, *args, **more)]
socket.getaddrinfo = named
"""


def test_one_name_stands_for_all_its_addresses() -> None:
    """As a headless service does: each node finds the others, and itself, which it leaves out."""
    (port,) = free_ports(1, "0.0.0.0")
    peers = [f"http://nodes.test:{port}", f"http://127.0.0.3:{port}", "http://nowhere.test"]
    prompt = chain(4, seed=7)
    with ExitStack() as stack:
        daemons = [
            stack.enter_context(node(f"n{at}", peers, port=port, host=f"127.0.0.{at}", before=_NAMES)) for at in (2, 3)
        ]
        sides = []
        for at, daemon in zip((2, 3), daemons, strict=True):
            token = TokenFile(daemon.state_dir).create("default", "engine")
            sides.append(Side(f"127.0.0.{at}", daemon.start().tcp_port, {"Authorization": f"Bearer {token}"}))
            assert sides[-1].ask("PUT", "/v1/namespaces", SPEC.to_dict())[0] == 200
        for side, own, other in zip(sides, ("n2", "n3"), ("n3", "n2"), strict=True):
            for _ in range(2):  # the second time it knows which address is its own
                # Nobody listens at 127.0.0.4, and one name means nothing.
                assert in_short(side.where(prompt)) == [
                    (own, 0, None),
                    (other, 0, None),
                    (None, 0, "down"),
                    (None, 0, "down"),
                ]


@needs_openssl
def test_nodes_ask_each_other_with_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    tls = {"certificate": str(certificate), "key": str(key)}
    nobody, port = free_ports(2)
    prompt = chain(3, seed=8)
    names = _NAMES.replace('"127.0.0.2", "127.0.0.3", "127.0.0.4"', '"127.0.0.1"')
    with (
        node("a", [f"https://127.0.0.1:{port}", f"https://127.0.0.1:{nobody}"]) as one,
        node("b", [], port=port, tls=tls) as other,
        node("c", [f"https://nodes.test:{port}"], before=names) as third,
    ):
        for daemon in (one, other, third):
            daemon.start()
            with daemon.connect():
                pass
        fill(other, prompt, 2)
        assert in_short(where(one, prompt)) == [("b", 2, None), ("a", 0, None), (None, 0, "down")]
        own, mistaken = where(third, prompt)
        assert (own["node"], mistaken["error"]) == ("c", "down")
        assert "certificate" in mistaken["detail"].lower()  # it is not for that name


def test_what_is_not_a_daemon_is_refused_or_down() -> None:
    """A peer's address may be anybody's by now: nothing it sends ends a question."""
    answers = [
        b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\nContent-Length: 3\r\n\r\n\x93\x01\x02",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\nContent-Length: 1\r\n\r\n\xc1",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<p/>",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n",
        b"\0\0\0",
        b"",
    ]
    expected = ["refused"] * 7 + ["down"] * 3
    with impostors(answers) as urls, node("a", urls) as daemon:
        daemon.start()
        with daemon.connect():
            found = where(daemon, chain(2))
        kinds = {entry["url"]: entry["error"] for entry in found if entry["url"]}
        assert [kinds[url] for url in urls] == expected
        assert "Traceback" not in daemon.log


def test_what_the_shared_tier_has_makes_no_node_better() -> None:
    answers = []
    for name, tiers in (("some", {"warm": 16, "shared": 48}), ("most", {"warm": 32}), ("none", {"shared": 64})):
        held = sum(tiers.values())
        answer = {"node": name, "instance": name.encode().hex().rjust(16, "0"), "tokens_by_tier": tiers}
        body = encode({**answer, "blocks": held // 16, "tokens": held}, MSGPACK_TYPE)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {MSGPACK_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        answers.append(head.encode() + body)
    with impostors(answers) as urls, node("a", urls) as daemon:
        daemon.start()
        with daemon.connect():
            found = where(daemon, chain(4))
    assert in_short(found) == [("most", 2, None), ("some", 4, None), ("none", 4, None), ("a", 0, None)]


@contextmanager
def impostors(answers: Sequence[bytes]) -> Iterator[list[str]]:
    """Addresses at which somebody always says the same."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in answers]
        for listener, answer in zip(listeners, answers, strict=True):
            threading.Thread(target=_answer, args=(listener, answer), daemon=True).start()
        yield [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]


def _answer(listener: socket.socket, answer: bytes) -> None:
    """Read what comes, send the answer, hang up; until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass


def question(**other: object) -> bytes:
    return encode(
        {"tenant": "default", "namespace": SPEC.namespace, "hashes": chain(2).hashes[0], **other}, MSGPACK_TYPE
    )


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"Tierkv-Node": "nonsense"}, 401), ({"Authorization": "Bearer tkv"}, 401)],
)
def test_a_stranger_gets_no_answer(three: list[Daemon], headers: dict[str, str], status: int) -> None:
    found = Raw(three[0].tcp_port).request("POST", PEER_ROUTE, question(), {"Content-Type": MSGPACK_TYPE, **headers})
    assert found[0] == status
    assert found[1]["type"] == "urn:tierkv:problem:unauthorized"


def test_a_node_may_ask_by_any_name_and_as_often_as_it_wants(three: list[Daemon]) -> None:
    key, body = NodeKey(SECRET), question()
    headers = {NODE_HEADER: key.sign("POST", PEER_ROUTE, body), "Content-Type": MSGPACK_TYPE, "Host": "kv.test"}
    for _ in range(2):
        status, answer, _ = Raw(three[0].tcp_port).request("POST", PEER_ROUTE, body, headers)
        assert (status, answer["node"], answer["blocks"]) == (200, "n0", 0)
    headers["Origin"] = "http://kv.test.example"
    assert Raw(three[0].tcp_port).request("POST", PEER_ROUTE, body, headers)[0] == 400
    elsewhere = {**headers, "Origin": "http://kv.test"}
    assert Raw(three[0].tcp_port).request("POST", f"/v1/{SPEC.namespace}/lookup", b"{}", elsewhere)[0] == 400


@pytest.mark.parametrize(
    "other", [{"tenant": "a b"}, {"namespace": "x"}, {"hashes": b"x"}, {"hashes": b"\0" * 32 * 70_000}, {"more": 1}]
)
def test_a_nodes_question_is_checked_too(three: list[Daemon], other: dict[str, object]) -> None:
    body = question(**other)
    headers = {NODE_HEADER: NodeKey(SECRET).sign("POST", PEER_ROUTE, body), "Content-Type": MSGPACK_TYPE}
    assert Raw(three[0].tcp_port).request("POST", PEER_ROUTE, body, headers)[0] == 400
