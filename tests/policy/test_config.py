"""The policy of a tier in a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tierkv
from tierkv.config import PolicyConfig, load_config, parse_config
from tierkv.errors import ConfigError


@pytest.mark.parametrize("tier", ["hot", "warm"])
def test_a_policy_is_a_name_or_a_name_with_parameters(tier: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"{tier}: {{policy: {{name: slru, protected: 0.5, ghost: 2}}}}")
    assert getattr(load_config(path), tier).policy == PolicyConfig("slru", {"protected": 0.5, "ghost": 2})
    assert getattr(parse_config({tier: {"policy": "arc"}}), tier).policy == PolicyConfig("arc")
    assert getattr(parse_config({tier: {"policy": {"name": "lru"}}}), tier).policy == PolicyConfig("lru")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("slur", ["unknown policy", "did you mean 'slru'?"]),
        ("belady", ["unknown policy", "aslru"]),
        ({"name": "slur"}, ["unknown policy", "did you mean 'slru'?"]),
        ({"protected": 0.5}, ["unknown policy"]),
        ({}, ["not a policy", "name"]),
        ({"name": "slru", "protcted": 0.5}, ["no parameter 'protcted'", "did you mean 'protected'?"]),
        ({"name": "slru", "protected": 2}, ["cannot be 2", "from 0 to 1"]),
        ({"name": "slru", "ghost": "much"}, ["cannot be 'much'"]),
        ({"name": "lru", "ghost": 2}, ["no parameter 'ghost'"]),
        (["slru"], ["not a policy"]),
        (None, ["not a policy"]),
    ],
)
def test_mistakes_are_named(policy: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"warm": {"policy": policy}})
    assert all(word in str(caught.value) for word in ["warm.policy:", *words]), caught.value


@pytest.mark.parametrize("policy", ["aslru", "s3fifo", "arc", {"name": "slru", "protected": 0.5, "ghost": 0}])
def test_a_cache_opens_with_it(policy: object, tmp_path: Path) -> None:
    with tierkv.open({"warm": {"capacity": "1MiB", "policy": policy, "directory": str(tmp_path)}}) as cache:
        assert cache.stats()
