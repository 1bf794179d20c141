"""Triton kernels, each with a plain torch reference. They know tensors, and nothing of blocks' keys, tiers or policy.

Importing this package imports neither torch nor triton; its modules do.
"""
