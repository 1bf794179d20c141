"""`tierkv config`, and what a new user reads."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.service.cli import Command, command
from tests.service.daemon import PATIENCE_S, ROOT
from tierkv.config import Config, load_config
from tierkv.service.cli import app


@pytest.fixture
def tierkv(capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    with command(capfd) as run:
        yield run


def test_init_writes_a_file_that_means_the_defaults_and_never_overwrites(tierkv: Command, tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    assert tierkv("config", "init", path)[0] == 0
    assert load_config(path) == Config()
    assert path.read_text() == (ROOT / "configs" / "default.yaml").read_text()
    path.write_text("port: 1\n")
    code, _, error = tierkv("config", "init", path)
    assert (code, f"{path} exists" in error, "--force" in error) == (2, True, True)
    assert path.read_text() == "port: 1\n"
    assert tierkv("config", "init", path, "--force")[0] == 0
    assert load_config(path) == Config()


def test_init_prints(tierkv: Command) -> None:
    code, out, _ = tierkv("config", "init", "-")
    assert (code, out) == (0, (ROOT / "configs" / "default.yaml").read_text())


def test_init_where_nothing_can_be_written(tierkv: Command) -> None:
    code, _, error = tierkv("config", "init", "/dev/null/c.yaml")
    assert (code, "cannot write /dev/null/c.yaml" in error) == (5, True)


def test_validate_tells_every_mistake(tierkv: Command, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("wram: {}\nport: -1\n")
    code, _, error = tierkv("config", "validate", path)
    assert (code, "did you mean 'warm'?" in error, "port" in error) == (2, True, True)
    path.write_text("state_dir: /s\nwarm: {capacity: 2GiB}\ncold: {capacity: 1GiB}\n")
    code, _, error = tierkv("config", "validate", path)
    assert (code, "smaller than the warm tier" in error) == (2, True)
    path.write_text("port: 1\n")
    assert tierkv("config", "validate", path)[:2] == (0, f"{path} is valid\n")


def test_show_merges_all_sources(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("port: 1\n")
    with command(capfd, TIERKV_WARM__CAPACITY="3MiB") as tierkv:
        code, out, _ = tierkv("config", "show", "-c", path, "--state-dir", "/s")
    assert code == 0
    shown = yaml.safe_load(out)
    assert (shown["port"], shown["warm"]["capacity"], shown["state_dir"]) == (1, "3MiB", "/s")
    assert all(origin in out for origin in (f"# {path}", "# TIERKV_WARM__CAPACITY", "# --state-dir", "# default"))


def test_a_mistyped_variable_stops_the_daemon(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with command(capfd, TIERKV_SOKET="/tmp/s") as tierkv:
        for arguments in (("serve",), ("doctor",), ("config", "show")):
            code, out, error = tierkv(*arguments)
            assert (code, out, "did you mean TIERKV_SOCKET?" in error) == (2, "", True)


def test_options_are_checked_like_settings(tierkv: Command) -> None:
    code, _, error = tierkv("serve", "--socket", "/tmp/" + "x" * 200)
    assert (code, "--socket: socket: the path" in error, "107 bytes" in error) == (2, True, True)


def test_the_schema_is_json(tierkv: Command) -> None:
    code, out, _ = tierkv("config", "schema")
    assert (code, json.loads(out)["title"]) == (0, "Config")


def _commands(group: object, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, found in group.commands.items():  # type: ignore[attr-defined]
        if hasattr(found, "commands"):
            yield from _commands(found, (*prefix, name))
        else:
            yield (*prefix, name)


def test_every_command_explains_itself_and_is_documented(tierkv: Command) -> None:
    from typer.main import get_command

    documents = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    found = list(_commands(get_command(app)))
    assert len(found) > 10
    for name in found:
        code, out, _ = tierkv(*name, "--help")
        assert code == 0
        assert len(out.split()) > 15, name
        assert f"tierkv {' '.join(name)}" in documents, name


def test_help_needs_no_heavy_imports() -> None:
    """`tierkv --help` must be quick: neither pydantic nor aiohttp nor numpy."""
    program = "import sys, tierkv.service.cli; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S, check=True
    )
    assert not {"pydantic", "aiohttp", "yaml", "lmdb"} & set(done.stdout.split())
