"""What the kernels compile to, ahead of time and without a GPU.

    TRITON_INTERPRET=0 python -m tests.kernels.aot              what was found, as JSON
    TRITON_INTERPRET=0 python -m tests.kernels.aot --document   rewrite the table in docs/kernels.md

Compilation needs kernels that are not interpreted, so this is a program of its own.
"""
