"""Settings of the whole suite: Hypothesis profiles, and Triton's interpreter where there is no GPU."""

import os
import shutil

from hypothesis import settings

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# Triton decides at import whether kernels are compiled or interpreted, so this must stand before any test module.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
