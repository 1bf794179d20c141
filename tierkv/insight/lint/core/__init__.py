"""The numerical core: token arrays and segment hashes in, hits and losses by cause out. It never sees text."""
