"""Where the kernels run in these tests: on a GPU if there is one, else in Triton's interpreter."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("neither a GPU that torch can use nor Triton's interpreter")
    return torch.device("cpu")
