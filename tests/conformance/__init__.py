"""Conformance suites: what every implementation of a contract must pass, a stranger's too."""
