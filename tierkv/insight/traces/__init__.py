"""Traces of the traffic: which blocks were asked for, when and in which conversation; no tokens, no names.

A trace is JSON lines in Mooncake's format (`tierkv.replay.trace`). What the daemon records has three more fields:

    {"timestamp": 1767225600250, "input_length": 32, "output_length": 1, "hash_ids": [5417..., 2210...],
     "session_id": "9f0c61d2a7b84e35", "tenant": "41d8cd98f00b2042", "block_tokens": 16}

`timestamp` is the arrival in milliseconds since the epoch, `input_length` counts whole blocks, and `output_length` is 1
because the cache does not see answers. Blocks, sessions and tenants are salted hashes; the salt is derived from the
server secret, so that the files of daemons with one secret belong together, and is in no file. `export` makes of them
what can be given away: dense numbers, hashes with another salt that nobody keeps, times from zero.
"""
