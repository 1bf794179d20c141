"""Logs as batches for the core: from token ids alone, or from text."""
