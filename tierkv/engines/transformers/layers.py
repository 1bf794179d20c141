"""Cache objects with room: appending a token copies that token, not the whole prefix.

`DynamicLayer` concatenates, so that each forward pass copies all KV there is, and `DynamicSlidingWindowLayer` forgets
what lies before its window, which may not be stored yet. The layers here give the model the same tensors and the same
mask sizes, but lie in memory that is allocated ahead and keep everything.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tierkv.errors import InvalidRequest
from tierkv.spec import KVSpec

__all__ = ["RoomyLayer", "RoomySlidingLayer", "kv_dtype", "new_cache"]


class RoomyLayer(DynamicLayer):
    """A `DynamicLayer` that grows within memory allocated ahead. `capacity` is in tokens, a hint.

    Attributes
    ----------
    keys, values
        ``(rows, heads, tokens, head_dim)``, views of the memory. May be replaced, as transformers does in `crop` or
        `reorder_cache`: the next `update` then moves them to memory of their own.
    """

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capacity = capacity
        self._memory: tuple[torch.Tensor, torch.Tensor] | None = None
        self._views: tuple[torch.Tensor, torch.Tensor] | None = None

    def fill(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Take over memory of ``(rows, heads, capacity, head_dim)`` that holds `length` tokens."""
        self._memory = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._show(length)

    def first_seen(self, length: int) -> int:
        """Return the first of `length` tokens that the next forward pass looks at."""
        return 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states  # transformers 4 does not pass it
        rows, heads, *_ = key_states.shape
        memory = [
            states.new_empty((rows, heads, self._capacity, states.shape[-1])) for states in (key_states, value_states)
        ]
        self.fill(memory[0], memory[1], 0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to the layer; return what the model attends to. Mutates the memory behind `keys` and `values`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        start = self.keys.shape[-2]
        stop = start + key_states.shape[-2]
        keys, values = self._with_room(key_states, stop)
        keys[:, :, start:stop], values[:, :, start:stop] = key_states, value_states
        self._show(stop)
        first = self.first_seen(start)
        return keys[:, :, first:stop], values[:, :, first:stop]

    def _with_room(self, like: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory, moved if it is too small, elsewhere, or no longer what `keys` and `values` show."""
        assert self.keys is not None
        assert self.values is not None
        held = self._memory
        current = self._views is not None and self.keys is self._views[0] and self.values is self._views[1]
        if held is None or not current or held[0].shape[-2] < tokens or held[0].device != like.device:
            moved = []
            for old in (self.keys, self.values):
                rows, heads, length, width = old.shape
                new = like.new_empty((rows, heads, max(self._capacity, tokens + tokens // 4), width))
                new[:, :, :length] = old
                moved.append(new)
            held = self._memory = moved[0], moved[1]
        return held

    def _show(self, tokens: int) -> None:
        assert self._memory is not None
        self._views = self._memory[0][:, :, :tokens], self._memory[1][:, :, :tokens]
        self.keys, self.values = self._views


class RoomySlidingLayer(RoomyLayer, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A `DynamicSlidingWindowLayer` in memory allocated ahead, which keeps what lies before its window.

    Attributes
    ----------
    sliding_window
        The window in tokens.
    absent
        So many tokens at the beginning were never loaded, and are zeros.
    """

    is_sliding = True

    def __init__(self, sliding_window: int, capacity: int = 0) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window)
        self._capacity = capacity
        self._memory = None
        self._views = None
        self.absent = 0

    def first_seen(self, length: int) -> int:
        return max(0, length - self.sliding_window + 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `RoomyLayer.update`. Raises `InvalidRequest` when it was cropped to where nothing was loaded."""
        if self.first_seen(self.cumulative_length) < self.absent:
            raise InvalidRequest(
                f"the window begins before token {self.absent}, where this prefix was loaded from",
                remedy="acquire the shorter prefix instead of cropping the longer one",
            )
        return super().update(key_states, value_states, *args, **kwargs)

    def crop(self, *args: Any) -> None:
        """As `DynamicLayer.crop` of the installed transformers: nothing was forgotten."""
        DynamicLayer.crop(self, *args)
        self.cumulative_length = 0 if self.keys is None else self.keys.shape[-2]

    def _show(self, tokens: int) -> None:
        super()._show(tokens)
        self.cumulative_length = tokens


def new_cache(model: PreTrainedModel, *, room: int = 0) -> DynamicCache:
    """Return an empty cache object with the layers that the model's configuration asks for.

    Parameters
    ----------
    room
        Tokens to allocate memory for when the first one is appended. It grows beyond that.

    Raises
    ------
    InvalidRequest
        A layer of the model keeps a state that is not KV per token.
    """
    made = DynamicCache(config=model.config)
    if not made.layers:  # transformers 4 makes none where a configuration shares none of them
        made.layers.extend(DynamicLayer() for _ in range(model.config.get_text_config().num_hidden_layers))  # type: ignore[no-untyped-call]
    made.layers[:] = [_roomy(model, layer, room) for layer in made.layers]
    return made


def _roomy(model: PreTrainedModel, layer: Any, room: int) -> Any:
    if type(layer) is DynamicLayer:
        return RoomyLayer(room)
    if type(layer) is DynamicSlidingWindowLayer:
        return RoomySlidingLayer(layer.sliding_window, room)
    if type(layer).__name__ == "DummyLayer":  # uses the KV of another layer; transformers 4 has none
        return layer
    raise InvalidRequest(
        f"{type(model).__name__} keeps state in a {type(layer).__name__}, which is not KV per token",
        remedy="tierkv caches attention layers only; run this model without it",
    )


def kv_dtype(spec: KVSpec) -> torch.dtype:
    """Return the type of a spec's KV."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype
