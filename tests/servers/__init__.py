"""Real storage engines for tests, each in processes of its own on free ports."""
