"""Blocks that machines share: what the shared tier has, what it is given, and who computes what.

knowledge    what is known of it without asking
probing      asking it
uploading    writing to it
following    waiting for what another machine computes
sharing      all of this for one engine, and what others cleared or deleted
"""
