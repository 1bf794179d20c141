"""Log lines: one for each event, parseable, tied together by the request's id, and slow requests told."""

import json
import re
import signal
import socket
import subprocess
import sys

import pytest

from tests.service.daemon import PATIENCE_S, ROOT, SPEC, TIERS, Daemon, Raw, chain, eventually, running
from tierkv.service.logs import REQUEST_ID_HEADER

PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"=]+)')


def parse_logfmt(line: str) -> dict[str, str]:
    fields = {name: json.loads(value) if value[0] == '"' else value for name, value in PAIR.findall(line)}
    assert PAIR.sub("", line).strip() == "", line
    return fields


_PROGRAM = """
import logging, sys
from tierkv.config import LogConfig
from tierkv.service.logs import configure_logs
configure_logs(LogConfig(format=sys.argv[1], level=sys.argv[2]))
log = logging.getLogger("x")
log.debug("quiet")
log.info("two words", extra={"number": 3, "text": 'a "b"=c\\nd', "empty": ""})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def lines(style: str, level: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, style, level],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize(("style", "parse"), [("text", parse_logfmt), ("json", json.loads)])
def test_an_event_is_a_line_with_fields(style: str, parse: object) -> None:
    assert callable(parse)
    quiet, told, failed = (parse(line) for line in lines(style, "debug"))
    assert quiet["event"] == "quiet"
    assert told["event"] == "two words"
    assert (told["level"], told["logger"], str(told["number"])) == ("info", "x", "3")
    assert (told["text"], told["empty"]) == ('a "b"=c\nd', "")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told["time"])
    assert failed["event"] == "failed"
    assert "ZeroDivisionError" in failed["traceback"]


def test_levels() -> None:
    assert [parse_logfmt(line)["event"] for line in lines("text", "error")] == ["failed"]


@pytest.mark.parametrize("given", ["abc-1.2_Z", "x" * 64])
def test_a_request_keeps_the_id_it_comes_with(raw: Raw, given: str) -> None:
    for path in ("/healthz", "/v1/stats", "/nowhere"):
        answer = raw.request("GET", path, headers={REQUEST_ID_HEADER: given})[2]
        assert answer.headers[REQUEST_ID_HEADER] == given


@pytest.mark.parametrize("given", [None, "", "x" * 65, "a b", "a=b", 'a"b', "\xe9"])
def test_a_request_without_a_sane_id_gets_one_of_its_own(raw: Raw, given: str | None) -> None:
    headers = {} if given is None else {REQUEST_ID_HEADER: given}
    answers = [raw.request("GET", "/healthz", headers=headers)[2].headers[REQUEST_ID_HEADER] for _ in range(2)]
    assert all(re.fullmatch("[0-9a-f]{16}", answer) for answer in answers)
    assert answers[0] != answers[1]


def test_lines_of_a_request_carry_its_id() -> None:
    with running({**TIERS, "log": {"format": "json"}}) as daemon:
        daemon.connect().close()
        refuse_a_request(daemon)
        found = [json.loads(line) for line in daemon.log.splitlines() if '"request failed"' in line]
        assert found
        assert {line["request"] for line in found} == {"failing-1"}
        assert found[0]["route"] == "POST /v1/leases/{id}/renew"
        assert (found[0]["status"], found[0]["problem"]) == (503, "unavailable")


def refuse_a_request(daemon: Daemon) -> None:
    """Ask something of a daemon that is closing but still has a request to finish."""
    raw = Raw(daemon.tcp_port)
    body = b'{"tokens": [1]}'
    head = f"POST /v1/{SPEC.namespace}/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", daemon.tcp_port), PATIENCE_S) as connection:
        connection.sendall(head.encode() + body[:-1])
        raw.request("GET", "/healthz")
        daemon.send(signal.SIGTERM)
        eventually(lambda: "draining" in daemon.log)
        status, _, _ = raw.request(
            "POST", "/v1/leases/x/renew", b"{}", {"Content-Type": "application/json", REQUEST_ID_HEADER: "failing-1"}
        )
        assert status == 503
        connection.sendall(body[-1:])
    daemon.wait()


def test_what_takes_longer_than_asked_is_told() -> None:
    """A wait the caller asked for is not slow; a body that trickles in is."""
    with running(TIERS) as daemon:
        with daemon.connect() as cache:
            first = cache.acquire(chain(1), compute_s=30)  # promises to compute it, and does not
            second = cache.acquire(chain(1), compute_s=30, wait_s=1.2)
            assert (first.compute is not None, second.waited_s > 1.1) == (True, True)
        assert "slow request" not in daemon.log
        body = b'{"tokens": [1]}'
        head = f"POST /v1/{SPEC.namespace}/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        head += f"Content-Type: application/json\r\n{REQUEST_ID_HEADER}: trickle\r\n\r\n"
        with socket.create_connection(("127.0.0.1", daemon.tcp_port), PATIENCE_S) as connection:
            connection.sendall(head.encode() + body[:-1])
            connection.settimeout(1.1)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(PATIENCE_S)
            connection.sendall(body[-1:])
            assert b" 200 " in connection.makefile("rb").readline()
        (line,) = (parse_logfmt(line) for line in daemon.log.splitlines() if "slow request" in line)
        assert (line["request"], line["route"]) == ("trickle", "POST /v1/{ns}/lookup")
        assert float(line["took_s"]) > 1
