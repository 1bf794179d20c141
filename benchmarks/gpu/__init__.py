"""What the cache does on a GPU, in one run of a few minutes. `python -m benchmarks.gpu`; see benchmarks/README.md."""
