"""What the daemon publishes is what vLLM's own classes read."""

from __future__ import annotations

import zmq

from tests.service.daemon import PATIENCE_S, SPEC, chain, running, short_directory, store


def test_vllm_reads_the_events() -> None:
    import msgspec
    from vllm.distributed.kv_events import (
        MEDIUM_CPU,
        MEDIUM_STORAGE,
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVEventBatch,
    )

    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    wanted = chain(3)
    with short_directory() as directory, zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        asking.setsockopt(zmq.LINGER, 0)
        addresses = {"endpoint": f"ipc://{directory}/events", "replay": f"ipc://{directory}/replay"}
        settings = {"warm": {"capacity": "1MiB"}, "cold": {"capacity": "8MiB", "segment": "1MiB"}}
        with running({**settings, "kv_events": addresses}) as daemon:
            with daemon.connect() as cache:
                store(cache, wanted)
                cache.flush()
                cache.delete(wanted)
            asking.connect(addresses["replay"])
            told: list[object] = []
            while not any(isinstance(event, BlockRemoved) and event.medium == MEDIUM_STORAGE for event in told):
                told = []
                asking.send_multipart((b"", (0).to_bytes(8, "big")))
                while (frames := asking.recv_multipart())[2] != (-1).to_bytes(8, "big", signed=True):
                    batch = decoder.decode(frames[3])
                    assert batch.data_parallel_rank == 0
                    told += batch.events
    assert told[0] == AllBlocksCleared()
    assert told[1] == BlockStored(
        block_hashes=list(wanted.hashes),
        parent_block_hash=None,
        token_ids=[],
        block_size=SPEC.block_tokens,
        lora_id=None,
        medium=MEDIUM_CPU,
        lora_name=None,
        group_idx=0,
    )
    assert BlockRemoved(block_hashes=[wanted.hashes[2]], medium=MEDIUM_CPU, group_idx=0) in told
