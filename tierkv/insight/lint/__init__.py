"""`tierkv lint`: why prompts of a log do not share prefixes, what that costs, and what to change.

    readers/    logs in the formats they come in            text/     prompts rendered, cut into pieces, tokenised
    sources/    logs as batches for the core                core/     hits, statistics and plans, on numbers alone
    causes/     the table of causes                         fix/      the log as it should be
    reports/    terminal, JSON, HTML, SARIF

A log is replayed through a prefix cache, then once more without what stands in the way of sharing; `analysis` puts the
difference down to causes. The core works on token ids or hashes of segments and never sees text.
"""
