"""`tierkv plan`: hit rates, times and costs over sizes of memory and disk, from a trace of requests."""
