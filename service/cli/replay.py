"""`tierkv replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["replay"]


def replay(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL, plain or .gz: timestamp, input_length, hash_ids.")],
    policy: Annotated[str | None, typer.Option(help="aslru (default), slru, lru, s3fifo or arc.")] = None,
    protected: Annotated[float | None, typer.Option(help="slru: protected share, default 0.3.")] = None,
    ghost: Annotated[float | None, typer.Option(help="slru, s3fifo: capacities of ghosts, default 2 and 1.")] = None,
    small: Annotated[float | None, typer.Option(help="s3fifo: share of the small queue, default 0.1.")] = None,
    capacity: Annotated[str | None, typer.Option(help="Share of the trace's distinct blocks, default 5%.")] = None,
    capacity_blocks: Annotated[int | None, typer.Option(min=1, help="Capacity in blocks instead.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Replay the tiers of this configuration instead.")
    ] = None,
    end_hints: Annotated[bool, typer.Option("--end-hints", help="Retire a session's own blocks at its end.")] = False,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block of the trace.")] = 512,
    bytes_per_token: Annotated[int, typer.Option(min=1, help="KV of one token; default: an 8B model.")] = 131072,
    prefill: Annotated[float, typer.Option(min=1, help="Tokens the engine prefills per second.")] = 8000,
    hot_gbps: Annotated[float, typer.Option(min=0.001, help="Gigabytes per second from the hot tier.")] = 400,
    warm_gbps: Annotated[float, typer.Option(min=0.001, help="The same from the warm tier.")] = 20,
    cold_gbps: Annotated[float, typer.Option(min=0.001, help="The same from the cold tier.")] = 2,
    nodes: Annotated[int | None, typer.Option(min=1, help="Replay so many machines, in several layouts.")] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="With --nodes: private, routed, shared or both only. May be repeated.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="With --nodes: no turns, any node, by this seed.")] = None,
    spread: Annotated[
        float | None, typer.Option(min=1, help="routed: pass over nodes above so many mean loads, default 2.")
    ] = None,
    shared: Annotated[str | None, typer.Option(help="Shared tier: share of the distinct blocks, default 50%.")] = None,
    shared_blocks: Annotated[int | None, typer.Option(min=0, help="Its capacity in blocks instead.")] = None,
    write: Annotated[str | None, typer.Option(help="What goes there: all (default), demotion or hits:N.")] = None,
    link: Annotated[str | None, typer.Option(help="A node's way there, default 10Gbit.")] = None,
    latency_ms: Annotated[float | None, typer.Option(min=0, help="Wait for the first byte, default 1.")] = None,
    block_bytes: Annotated[str | None, typer.Option(help="A block there; default: KV of one, by codec bx1.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Replay a trace of requests: what a policy, the tiers of a configuration, or several nodes would have found."""
    from tierkv.replay.command import choose_policy, choose_tiers, run_command
    from tierkv.replay.costs import Costs
    from tierkv.replay.layouts_command import Cluster, own_policy, own_tiers, refuse_without_nodes, run_cluster

    given = {"protected": protected, "ghost": ghost, "small": small}
    parameters = {name: value for name, value in given.items() if value is not None}
    unused = (policy, capacity, capacity_blocks, *given.values())
    bandwidths = {"hot": hot_gbps * 1e9, "warm": warm_gbps * 1e9, "cold": cold_gbps * 1e9}
    between = (seed, spread, shared, shared_blocks, write, link, latency_ms, block_bytes)
    if nodes is not None:
        if config is None:
            own = own_policy(policy, parameters, capacity, capacity_blocks)
        else:
            own = own_tiers(config, unused, bytes_per_token)
        cluster = Cluster(nodes, tuple(layout or ()), *between)
        costs = Costs(bytes_per_token, prefill, bandwidths)
        run_cluster(trace, block_tokens, cluster, own, costs, end_hints=end_hints, as_json=as_json)
        return
    refuse_without_nodes((layout, *between))
    if config is None:
        choice = choose_policy(policy, parameters, capacity, capacity_blocks)
    else:
        choice = choose_tiers(config, unused, bytes_per_token, prefill, bandwidths)
    run_command(trace, block_tokens, choice, end_hints=end_hints, as_json=as_json)
