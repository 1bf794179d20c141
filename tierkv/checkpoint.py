"""Read from a checkpoint what decides whether two KV blocks are the same thing.

Nothing of the model is loaded: the configuration is read as JSON (or as GGUF metadata), and the weight files are
recognised by their sizes, headers and a fixed sample of their pages, so that weights replaced in place under the same
name change the namespace. Where a checkpoint lies, what its directory is called and when it was written do not matter:
copies of one checkpoint share their KV.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tierkv.errors import DependencyMissing, InvalidRequest
from tierkv.spec import KVGroup

__all__ = ["SAMPLED_PAGES", "SAMPLE_BYTES", "read_checkpoint", "sample_offsets"]

SAMPLE_BYTES = 4096
SAMPLED_PAGES = 66
"""Pages hashed per weight file: its first, its last, and 64 evenly spread between them."""

_MAX_HEADER = 256 * 2**20
_LABELS = frozenset({"_name_or_path", "_model_name_or_path", "name_or_path", "transformers_version", "use_cache"})
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tekken.json")
_ATTENTION_FIELDS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "attn_logit_softcapping",
    "sliding_window",
)
_WINDOW_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "gpt-oss": 2}
"""Every n-th layer attends to everything, where the configuration leaves that to the engine's source code."""


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the `KVSpec` fields a checkpoint decides.

    Parameters
    ----------
    path
        A Hugging Face checkpoint directory (``config.json`` and ``*.safetensors`` or ``pytorch_model*.bin``), a GGUF
        file, or a directory holding exactly one GGUF file.

    Returns
    -------
    dict
        ``model``: the architecture, not the directory's name, so that a renamed copy keeps its KV.
        ``weights``: 32 hex digits over the configuration and every weight file's name, size, header and sampled pages
        (a GGUF file's own name is left out). ``tokenizer``: a hash of the tokenizer's files, empty for GGUF, whose
        header holds the tokenizer. ``groups``, ``attention``: as in `KVSpec`.

    Raises
    ------
    InvalidRequest
        There is no checkpoint here, it is incomplete, or its KV is not made of KV heads or MLA latents.
    DependencyMissing
        The path is a GGUF file and the ``gguf`` package is not installed.

    Notes
    -----
    Blocks on disk: about 270 KiB per weight file plus headers and the tokenizer, whatever the size of the weights.
    """
    root = Path(path)
    if root.is_dir() and (root / "config.json").is_file():
        return _read_directory(root)
    return _read_gguf(_find_gguf(root))


def sample_offsets(size: int) -> list[int]:
    """Return where the sampled pages of a file of `size` bytes begin: a function of the size alone, ascending."""
    last = max(size - SAMPLE_BYTES, 0)
    steps = SAMPLED_PAGES - 1
    inner = (last * step // steps // SAMPLE_BYTES * SAMPLE_BYTES for step in range(steps))
    return sorted({*inner, last})


def _read_directory(root: Path) -> dict[str, Any]:
    config = _read_json(root / "config.json")
    revision = blake2b(_canonical(_without_labels(config)), digest_size=16)
    for file in _weight_files(root):
        _hash_weights(revision, file, file.name)
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    architectures = config.get("architectures") or [config.get("model_type")]
    return {
        "model": str(architectures[0] or "unknown"),
        "weights": revision.hexdigest(),
        "tokenizer": _tokenizer_revision(root),
        "groups": _groups(text, root),
        "attention": _attention(text),
    }


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {file}: {error}", remedy="fetch the checkpoint again") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"{file} does not hold a JSON object", remedy="fetch the checkpoint again")
    return data


def _canonical(data: object) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def _without_labels(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = ((name, value) for name, value in config.items() if name not in _LABELS)
    return {name: _without_labels(value) if isinstance(value, dict) else value for name, value in kept}


def _weight_files(root: Path) -> list[Path]:
    index = next(iter(sorted(root.glob("*.index.json"))), None)
    if index is not None:
        named = set(_read_json(index).get("weight_map", {}).values())
        missing = sorted(name for name in named if not (root / name).is_file())
        if missing:
            raise InvalidRequest(
                f"{root} lacks {missing[0]}, which {index.name} names", remedy="fetch the missing files"
            )
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        files = sorted(f for f in root.glob(pattern) if f.is_file() and not f.name.startswith("adapter_"))
        if files:
            return files
    raise InvalidRequest(f"no weight files in {root}", remedy="expected *.safetensors or pytorch_model*.bin")


def _hash_weights(revision: blake2b, file: Path, name: str, header_bytes: int = 0) -> None:
    try:
        with file.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            revision.update(f"{name}\x00{size}\x00".encode())
            if file.suffix == ".safetensors":
                header_bytes = 8 + int.from_bytes(os.pread(stream.fileno(), 8, 0), "little")
            if header_bytes > min(size, _MAX_HEADER):
                raise InvalidRequest(f"the header of {file} is longer than the file", remedy="fetch the file again")
            revision.update(os.pread(stream.fileno(), header_bytes, 0))
            for offset in sample_offsets(size):
                revision.update(os.pread(stream.fileno(), SAMPLE_BYTES, offset))
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}: {error}", remedy="make the weight files readable") from None


def _tokenizer_revision(root: Path) -> str:
    found = [root / name for name in _TOKENIZER_FILES if (root / name).is_file()]
    if not found:
        return ""
    revision = blake2b(digest_size=16)
    for file in found:
        content = file.read_bytes()
        revision.update(f"{file.name}\x00{len(content)}\x00".encode() + content)
    return revision.hexdigest()


def _attention(config: Mapping[str, Any]) -> dict[str, str]:
    present = _present(config)
    return {name: _canonical(present[name]).decode("ascii") for name in _ATTENTION_FIELDS if name in present}


def _present(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _groups(config: Mapping[str, Any], where: Path) -> tuple[KVGroup, ...]:
    layers = _integer(config, "num_hidden_layers", where) - (config.get("num_kv_shared_layers") or 0)
    if config.get("kv_lora_rank"):
        latent = _integer(config, "kv_lora_rank", where) + _integer(config, "qk_rope_head_dim", where)
        return (KVGroup(tuple(range(layers)), "mla", 1, latent),)
    heads = _integer(config, "num_attention_heads", where)
    kv_heads = _integer({"num_key_value_heads": heads, **_present(config)}, "num_key_value_heads", where)
    if config.get("head_dim") is None:
        head_dim = _integer(config, "hidden_size", where) // heads
    else:
        head_dim = _integer(config, "head_dim", where)
    for other in ("global_head_dim", "v_head_dim"):
        if config.get(other, head_dim) not in (None, head_dim):
            raise InvalidRequest(
                f"{where}: {other} is {config[other]} and head_dim {head_dim}; a block has one head size",
                remedy="build the KVSpec and its groups by hand",
            )
    windows = list(_windows(config, layers, where))
    return tuple(
        KVGroup(
            tuple(layer for layer in range(layers) if windows[layer] == window),
            "sliding_window" if window else "full",
            kv_heads,
            head_dim,
            window,
        )
        for window in sorted(set(windows))
    )


def _windows(config: Mapping[str, Any], layers: int, where: Path) -> Iterator[int]:
    """Yield the window of each layer in tokens, 0 for full attention."""
    model_type = str(config.get("model_type"))
    # Where a model may slide but does not by default, a forgotten block of a layer that needs it would be wrong KV.
    slides_at_all = config.get("use_sliding_window", not model_type.startswith("qwen"))
    window = int(config.get("sliding_window") or 0) if slides_at_all else 0
    if config.get("layer_types"):
        for kind in config["layer_types"][:layers]:
            if kind not in ("full_attention", "chunked_attention", "sliding_attention"):
                raise InvalidRequest(
                    f"{where}: a layer of type {kind!r} keeps a state that is not KV per token",
                    remedy="tierkv caches attention layers only",
                )
            # A chunked layer is kept whole: which tokens it still needs depends on where the prompt ends.
            yield window if kind == "sliding_attention" else 0
        return
    pattern = config.get("sliding_window_pattern") or _WINDOW_PATTERN.get(model_type, 0)
    first_sliding = int(config.get("max_window_layers") or 0) if config.get("use_sliding_window") else 0
    for layer in range(layers):
        slides = (layer + 1) % pattern != 0 if pattern else layer >= first_sliding
        yield window if slides else 0


def _integer(config: Mapping[str, Any], name: str, where: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(
            f"the configuration in {where} has no usable {name} ({value!r})",
            remedy="only decoder models with Llama-style configuration fields are understood; build the KVSpec by hand",
        )
    return value


def _find_gguf(path: Path) -> Path:
    if path.is_file() and path.suffix == ".gguf":
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(found) != 1:
        raise InvalidRequest(
            f"no checkpoint at {path}" if not found else f"{path} holds {len(found)} GGUF files",
            remedy="give a directory with a config.json, a GGUF file, or a directory with exactly one GGUF file",
        )
    return found[0]


def _read_gguf(file: Path) -> dict[str, Any]:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise DependencyMissing(f"reading {file} needs the gguf package", remedy="pip install gguf") from None
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise InvalidRequest(f"{file} is not a readable GGUF file: {error}", remedy="fetch the file again") from None
    metadata = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("tokenizer.")}
    if metadata.get("split.count", 1) > 1:
        raise InvalidRequest(f"{file} is one part of {metadata['split.count']}", remedy="merge the parts into one file")
    config = _gguf_config(metadata)
    revision = blake2b(digest_size=16)
    _hash_weights(revision, file, "", header_bytes=reader.data_offset)
    return {
        "model": str(config["model_type"]),
        "weights": revision.hexdigest(),
        "tokenizer": "",
        "groups": _groups(config, file),
        "attention": _attention(config),
    }


def _gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Translate GGUF metadata into the names of config.json."""
    arch = metadata.get("general.architecture")

    def get(name: str) -> Any:
        value = metadata.get(f"{arch}.{name}")
        return value[0] if isinstance(value, list) and value and len(set(value)) == 1 else value

    config: dict[str, Any] = {
        "model_type": arch,
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "hidden_size": get("embedding_length"),
        "head_dim": get("attention.key_length"),
        "v_head_dim": get("attention.value_length"),
        "sliding_window": get("attention.sliding_window"),
        "kv_lora_rank": get("attention.kv_lora_rank"),
        "qk_rope_head_dim": get("rope.dimension_count"),
        "rope_theta": get("rope.freq_base"),
        "attn_logit_softcapping": get("attn_logit_softcapping"),
    }
    scaling = {name: value for name, value in metadata.items() if name.startswith(f"{arch}.rope.scaling.")}
    return config | {"rope_scaling": scaling or None}
