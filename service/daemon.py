"""The daemon's life: open the cache, listen, drain, flush, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from tierkv.config import Config
from tierkv.core.build import build_engine, make_state_directory, server_secret
from tierkv.errors import ConfigError, StorageError, StoreInUse, Unavailable
from tierkv.insight.live import Insight
from tierkv.insight.traces.files import TraceFiles
from tierkv.insight.traces.recorder import Recorder
from tierkv.insight.traces.row import trace_salt
from tierkv.service.app import make_app
from tierkv.service.auth import Authority
from tierkv.service.cluster.peers import Peers
from tierkv.service.connections import RETRY_AFTER_S, Connections
from tierkv.service.context import Context
from tierkv.service.kv_events import publishing
from tierkv.service.notify import notify
from tierkv.service.pins import keeping_pins
from tierkv.service.reload import reload
from tierkv.service.tls import server_context
from tierkv.wire import PROBLEM_TYPE, problem_from_error

__all__ = ["run_daemon"]

log = logging.getLogger(__name__)

DRAIN_S = 5.0
ANSWER_S = 1.0
"""For answers of drained requests to be written; after that connections are cut."""
KEEP_ALIVE_S = 75.0
_HEADER_BYTES = 8 << 10
"""Longest header line of a request."""
_SPARE_FILES = 256
"""Open files beside those of connections."""
_BACKLOG = 128
_PROBE_S = 1.0


async def run_daemon(config: Config, reread: Callable[[], Config], on_ready: Callable[[list[str]], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish running requests, flush to the cold tier and close.

    Parameters
    ----------
    reread
        Reads the configuration again, at SIGHUP.
    on_ready
        Called once with the addresses that accept connections.

    Raises `ConfigError`, `StorageError` or `StoreInUse` for an address that cannot be had, and what `build_engine`
    raises.
    """
    if config.socket is None and config.port is None:
        raise ConfigError("the daemon has no address", remedy="set socket, or port for TCP on the loopback interface")
    authority = Authority(config.state_dir)
    if config.exposed and not authority.required:
        raise ConfigError(
            f"host {config.host} is not the loopback interface, and there are no tokens: anybody could ask",
            remedy="make one with `tierkv token new`, or listen on 127.0.0.1",
        )
    encryption = server_context(config.tls)
    if config.exposed and encryption is None:
        log.warning("tokens and blocks travel unencrypted over the network: set tls")
    _allow_files(config.limits.connections)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    async with contextlib.AsyncExitStack() as stack:
        listeners = []
        if config.state_dir is not None:
            make_state_directory(config.state_dir)  # where the socket may lie, too
        if config.socket is not None:
            listeners.append(stack.enter_context(_unix_socket(config.socket)))
        if config.port is not None:
            listeners.append(stack.enter_context(_tcp_socket(config.host, config.port)))
        connections = Connections(web.Server(_starting, access_log=None, logger=_http_log()), lambda: config.limits)
        stack.callback(asyncio.create_task(connections.watch()).cancel)
        for listener in listeners:
            over_tcp = listener.family != socket.AF_UNIX
            await _listen(stack, connections, listener, encryption if over_tcp else None, config.limits.idle)
        engine = await asyncio.to_thread(build_engine, config)
        stack.push_async_callback(asyncio.to_thread, engine.close)
        await stack.enter_async_context(keeping_pins(config.state_dir, engine))
        await stack.enter_async_context(publishing(config.kv_events, engine))
        secret = await asyncio.to_thread(server_secret, config)
        peers = await stack.enter_async_context(Peers(config, secret))
        insight = Insight(engine, config, secret) if config.insight.enabled else None
        if insight is not None:
            stack.push_async_callback(asyncio.to_thread, insight.close)
        recorder = Recorder(engine, trace_salt(secret), _trace_files(config))
        stack.push_async_callback(asyncio.to_thread, recorder.close)
        context = Context(config, engine, authority, connections, peers, recorder, insight)
        stack.callback(context.threads.shutdown)
        runner = web.AppRunner(
            make_app(context),
            handler_cancellation=True,
            shutdown_timeout=ANSWER_S,
            keepalive_timeout=KEEP_ALIVE_S,
            auto_decompress=False,
            access_log=None,
            logger=_http_log(),
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
        )
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        assert runner.server is not None
        connections.make, connections.limits = runner.server, lambda: context.config.limits
        stack.push_async_callback(context.requests.drain, DRAIN_S)
        stack.enter_context(_reloading(context, reread))
        on_ready([_address(listener, encryption is not None) for listener in listeners])
        notify("READY=1")
        await stop.wait()
        notify("STOPPING=1")
        log.info("stopping: draining requests, then flushing to the cold tier")


@contextlib.contextmanager
def _reloading(context: Context, reread: Callable[[], Config]) -> Iterator[None]:
    """Reload the configuration at SIGHUP, one signal after the other."""
    wanted = asyncio.Event()

    async def work() -> None:
        while True:
            await wanted.wait()
            wanted.clear()
            await asyncio.to_thread(reload, context, reread)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, wanted.set)
    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()


async def _listen(
    stack: contextlib.AsyncExitStack,
    connections: Connections,
    listener: socket.socket,
    encryption: ssl.SSLContext | None,
    handshake_s: float,
) -> None:
    server = await asyncio.get_running_loop().create_server(
        connections,
        sock=listener,
        backlog=_BACKLOG,
        ssl=encryption,
        ssl_handshake_timeout=handshake_s if encryption else None,
    )
    stack.callback(server.close)


async def _starting(_: web.BaseRequest) -> web.Response:
    """Answer all requests until there is a cache."""
    failure = Unavailable("the daemon is starting", remedy="ask again later")
    response = web.Response(
        body=json.dumps(problem_from_error(failure)).encode(),
        status=failure.status,
        content_type=PROBLEM_TYPE,
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )
    response.force_close()
    return response


def _allow_files(connections: int) -> None:
    """See to it that there are file descriptors for so many connections. Raises `ConfigError`."""
    needed = connections + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"limits.connections: {connections} connections need {needed} open files, and {hard} are allowed",
            remedy="allow more (ulimit -n, LimitNOFILE), or fewer connections",
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _trace_files(config: Config) -> TraceFiles | None:
    insight = config.insight
    return None if insight.trace is None else TraceFiles(insight.trace, insight.trace_size)


def _http_log() -> logging.Logger:
    logger = logging.getLogger(f"{__name__}.http")
    logger.filters = [_names_no_bytes]
    return logger


def _names_no_bytes(record: logging.LogRecord) -> bool:
    """aiohttp logs a request it cannot parse together with the bytes it choked on: a block's, or somebody's token."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


@contextlib.contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    """Listen on a Unix socket only its owner may use; a socket that a killed daemon left is replaced.

    Connections queue from the start: a second daemon that comes while this one still allocates memory finds it alive.
    """
    _remove_dead_socket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
            listener.listen(_BACKLOG)
            ours = path.lstat()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {path}: {error.strerror or error}",
                remedy="choose a socket path in an existing directory this user may write to",
            ) from None
        finally:
            os.umask(mask)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(ours, path.lstat()):
                    path.unlink()


def _remove_dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if not path.is_socket():
                raise StorageError(
                    f"{path} exists and is not a socket", remedy="choose another socket path, or remove it"
                ) from None
            path.unlink()
            return
        except (BlockingIOError, TimeoutError):  # its queue is full: somebody holds it, if only just
            pass
        except OSError as error:
            raise ConfigError(
                f"cannot use the socket {path}: {error.strerror or error}", remedy="choose another socket path"
            ) from None
    raise StoreInUse(f"a daemon is listening on {path} already", remedy="stop it or choose another socket")


@contextlib.contextmanager
def _tcp_socket(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(_BACKLOG)  # bind alone succeeds beside a listener that set SO_REUSEADDR too
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} on {host} is in use", remedy="stop its owner or set another port"
                ) from None
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", remedy="set another port") from None
        yield listener


def _address(listener: socket.socket, encrypted: bool) -> str:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix://{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"{'https' if encrypted else 'http'}://{host}:{name[1]}"
