"""Rewriting a log so that its prompts share what they can."""
