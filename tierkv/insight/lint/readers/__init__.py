"""Logs of requests, in the formats they come in."""
