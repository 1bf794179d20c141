"""URLs and settings of engines: which are taken, and what is said of the others, without telling a secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tierkv.errors import ConfigError
from tierkv.storage.shared import make_backend
from tierkv.storage.shared.objects import ObjectBackend
from tierkv.storage.shared.valkey import ValkeyBackend


@pytest.mark.parametrize(
    ("url", "addresses", "tls", "database"),
    [
        ("valkey://one", [("one", 6379)], False, 0),
        ("redis://one:7000", [("one", 7000)], False, 0),
        ("valkeys://one:7000,two,[::1]:7002", [("one", 7000), ("two", 6379), ("::1", 7002)], True, 0),
        ("rediss://one/3", [("one", 6379)], True, 3),
    ],
)
def test_servers(url: str, addresses: list[tuple[str, int]], tls: bool, database: int) -> None:
    backend = make_backend(url)
    assert isinstance(backend, ValkeyBackend)
    assert (list(backend._addresses), backend._tls, backend._database) == (addresses, tls, database)


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/some/prefix", "gs://bucket/x", "az://container"])
def test_buckets(url: str) -> None:
    assert isinstance(make_backend(url, options={"region": "x"}), ObjectBackend)


@pytest.mark.parametrize(
    ("url", "settings", "words"),
    [
        ("localhost:6379", {}, "valkey://host:port"),
        ("http://localhost", {}, "valkey://host:port"),
        ("valkey://", {}, "host:port"),
        ("valkey://one,,two", {}, "host:port"),
        ("valkey://one:port", {}, "'one:port'"),
        ("valkey://one/first", {}, "'first'"),
        ("valkey://one?db=1", {}, "query"),
        ("valkey://one,two/3", {"cluster": True}, "no databases"),
        ("valkey://one", {"options": {"region": "x"}}, "no options"),
        ("valkey://one", {"username": "bob"}, "needs a password"),
        ("valkey://one", {"password_env": "NOT_SET"}, "NOT_SET is not set"),
        ("valkey://one", {"password_env": "SET", "password_file": Path("x")}, "name one"),
        ("valkey://one", {"password_file": Path("/not/there")}, "/not/there cannot be read"),
        ("valkey://one", {"root_certificates": Path("/not/there")}, "/not/there cannot be read"),
        ("s3://", {}, "s3://bucket/prefix"),
        ("s3://bucket", {"username": "bob"}, "settings of Valkey"),
        ("s3://bucket", {"cluster": False}, "settings of Valkey"),
    ],
)
def test_mistakes_are_named(url: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_backend(url, environ={"SET": "x"}, **settings)
    assert words in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "url", ["valkey://bob:hush@one", "valkey://:hush@one:7000", "s3://key:hush@bucket", "valkey://one,bob:hush@two"]
)
def test_secrets_do_not_belong_into_urls_nor_errors(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_backend(url)
    assert "hush" not in str(caught.value)
    assert "file or an environment variable" in caught.value.remedy


def test_a_password_comes_from_a_file_or_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hush hush\n")
    for settings in ({"password_file": file}, {"password_env": "P", "environ": {"P": "hush hush"}}):
        backend = make_backend("valkey://one", username="bob", **settings)  # type: ignore[arg-type]
        assert isinstance(backend, ValkeyBackend)
        assert (backend._username, backend._password) == ("bob", "hush hush")
        assert "hush" not in repr(backend)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no password"):
        make_backend("valkey://one", password_file=file)
