"""What gets installed: one package with the whole house in it, and a command that runs."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("tierkv", "kernels", "storage", "service")
DATA = {".py", ".typed", ".yaml", ".json", ".html", ".js", ".css"}


def run(*command: str | Path, cwd: Path) -> str:
    # A PYTHONPATH would lend the checkout's modules to what must stand alone.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the source distribution, which is built from a copy of the checkout."""
    checkout = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, checkout / folder, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, checkout)
    run(sys.executable, "-m", "build", "--no-isolation", cwd=checkout)
    (built,) = (checkout / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in an environment of its own, which borrows only the dependencies from this one."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    run(
        *(sys.executable, "-m", "pip", "--python", home / "bin/python"),
        *("install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel),
        cwd=home,
    )
    (packages,) = home.glob("lib/python*/site-packages")
    # A directory named in a .pth is only appended to sys.path: an editable install in it does not come along.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return home


def test_wheel_installs_one_package(wheel: Path) -> None:
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"tierkv"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_wheel_carries_every_file(wheel: Path, folder: str) -> None:
    # Path.rglob does not follow the links in tierkv/, so the other folders are looked at once each.
    files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.suffix in DATA}
    expected = {str(path if folder == "tierkv" else "tierkv" / path) for path in files}
    assert expected
    assert not expected - set(zipfile.ZipFile(wheel).namelist())


def test_wheel_is_typed_and_licensed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "tierkv/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)


def test_installed_package_is_the_one_imported(installed: Path) -> None:
    program = "import tierkv.kernels, tierkv.storage.tier as tier; print(tier.__file__)"
    assert Path(run(installed / "bin/python", "-c", program, cwd=installed).strip()).is_relative_to(installed)


def test_installed_command_says_what_it_does(installed: Path) -> None:
    assert "tierkv" in run(installed / "bin/tierkv", "--help", cwd=installed)


def test_no_document_names_the_other_project_on_pypi() -> None:
    # `tierkv` on PyPI is somebody else's; this distribution is `tierkv-cache`.
    wrong = re.compile(r"pip3? install (?:-\S+ )*['\"]?tierkv(?![-\w/.])")
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*")]
    assert documents
    for document in documents:
        assert not wrong.search(document.read_text()), document
