"""The house: what may import what, how large a room may be, and what an import costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("tierkv", "kernels", "storage", "service")
FOUNDATION = ("tierkv.errors", "tierkv.spec", "tierkv.keys")
MAY_IMPORT = {
    "kernels": ("tierkv.kernels",),
    "storage": (*FOUNDATION, "tierkv.storage", "tierkv.kernels"),
    "service": ("tierkv",),
}
MOST_LINES = 500


def sources(folder: str) -> list[Path]:
    """Python files of a top-level folder. `rglob` does not follow links, so each file belongs to one folder."""
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "tierkv" else ("tierkv", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


HOUSE = {folder: sources(folder) for folder in FOLDERS}
MODULES = {module_name(path): path for paths in HOUSE.values() for path in paths}


def imports(path: Path, nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[str]:
    """Yield the absolute module names that import statements name."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield full if full in MODULES else source


def ours(names: Iterator[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] in FOLDERS}


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_the_house_is_found() -> None:
    assert all(len(paths) > 1 for paths in HOUSE.values()), {folder: len(paths) for folder, paths in HOUSE.items()}
    assert {"tierkv.cache", "tierkv.storage.tier", "tierkv.kernels.pages"} <= set(MODULES)


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_downwards(folder: str) -> None:
    for path in HOUSE[folder]:
        for name in ours(imports(path, ast.walk(ast.parse(path.read_text())))):
            if folder == "tierkv":
                allowed = inside(name, ("tierkv",)) and not inside(name, ("tierkv.service",))
            else:
                allowed = inside(name, MAY_IMPORT[folder])
            assert allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("module", FOUNDATION)
def test_the_foundation_stands_on_errors_alone(module: str) -> None:
    path = MODULES[module]
    at_import = ours(imports(path, ast.parse(path.read_text()).body))
    assert at_import <= {"tierkv.errors"} - {module}


def test_files_fit_in_the_head() -> None:
    paths = [path for folder in (*FOLDERS, "tests", "benchmarks") for path in sources(folder)]
    long = {str(p.relative_to(ROOT)): n for p in paths if (n := len(p.read_text().splitlines())) > MOST_LINES}
    assert not long


def test_no_room_is_called_after_nothing() -> None:
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert not [str(path) for path in MODULES.values() if path.stem in vague]


def shown_order(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions, each by the alphabet."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("module", sorted(MODULES))
def test_exports_are_sorted_and_unique(module: str) -> None:
    for node in ast.parse(MODULES[module].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = ast.literal_eval(node.value)
            assert exported == sorted(set(exported), key=shown_order)


TENSORS = {"torch", "triton", "transformers", "cupy", "gguf"}


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("tierkv", TENSORS | {"pydantic", "aiohttp"}),
        ("tierkv.kernels", TENSORS),
        ("tierkv.client", TENSORS | {"pydantic"}),
        ("tierkv.service.cli", TENSORS),
    ],
)
def test_an_import_loads_only_what_it_needs(module: str, unwanted: set[str]) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not unwanted & set(done.stdout.split())
