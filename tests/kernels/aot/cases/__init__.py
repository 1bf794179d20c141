"""The cases: one module per kernel module, each with a tuple `CASES`. A module that is here is compiled and tested."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tests.kernels.aot.case import Case

__all__ = ["all_cases"]


def all_cases() -> list[Case]:
    """Return the cases of every module in this folder, in the order of the modules' names."""
    cases = [case for module in iter_modules(__path__) for case in import_module(f"{__name__}.{module.name}").CASES]
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"two cases share a name: {sorted(names)}")
    return cases
