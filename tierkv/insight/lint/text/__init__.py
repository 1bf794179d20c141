"""Prompts as text: rendered from requests, cut into pieces that mean something, and turned into tokens."""
