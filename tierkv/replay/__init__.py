"""Replaying request traces: what a policy, or the tiers of a configuration, would have found.

Nothing here stores bytes; the policies are those of the cache.
"""
