"""Where the kernels run in these tests: on a GPU if there is one, else in Triton's interpreter."""

import os
from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let ``-m gpu`` choose these tests where they run on one."""
    for item in items if torch.cuda.is_available() else ():
        if item.path.parent == Path(__file__).parent and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("neither a GPU that torch can use nor Triton's interpreter")
    return torch.device("cpu")
