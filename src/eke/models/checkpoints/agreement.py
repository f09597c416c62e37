"""Whether a checkpoint's tensors are the ones its config.json describes: the cheap half of it.

Widths and depth are compared here, before anything is queued; every single tensor is compared when
the model is loaded.
"""

import re
from collections.abc import Iterator

from eke.models.checkpoints.architecture import Sizes
from eke.models.checkpoints.problem import refuse
from eke.models.checkpoints.tensors import Shapes

_LAYER = {
    "llama": r"(?:^|\.)layers\.(\d+)\.",
    "qwen2": r"(?:^|\.)layers\.(\d+)\.",
    "qwen3": r"(?:^|\.)layers\.(\d+)\.",
    "mixtral": r"(?:^|\.)layers\.(\d+)\.",
    "bert": r"(?:^|\.)encoder\.layer\.(\d+)\.",
    "gpt2": r"(?:^|\.)h\.(\d+)\.",
    "t5": r"(?:^|\.)encoder\.block\.(\d+)\.",
}
"""Family -> the number of a layer in a tensor's name."""

_EMBEDDING = {
    "bert": "embeddings.word_embeddings.weight",
    "gpt2": "wte.weight",
    "t5": "shared.weight",
}
"""Family -> end of the embedding's name, where it is not Llama's."""

_UP = {
    "llama": "layers.0.mlp.up_proj.weight",
    "qwen2": "layers.0.mlp.up_proj.weight",
    "qwen3": "layers.0.mlp.up_proj.weight",
    "bert": "layer.0.intermediate.dense.weight",
    "gpt2": "h.0.mlp.c_proj.weight",
}
"""Family -> end of the name of a matrix [intermediate_size, hidden_size]."""


def compare(family: str, sizes: Sizes, shapes: Shapes, typed: str) -> None:
    """Refuse a config.json that is not of these tensors.

    Raises:
        ConfigError: the first size on which they disagree.
    """
    if family == "other":
        return
    _check_heads(sizes, typed)
    if not shapes:
        return
    for what, said, found in _differences(family, sizes, shapes):
        why = f"its config.json says {what} = {said}, and its tensors {found}"
        raise refuse(typed, why, "the config.json that was saved with these weights")


def _check_heads(sizes: Sizes, typed: str) -> None:
    """What transformers refuses, or fails at, when it builds the model."""
    heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    groups = sizes.get("num_key_value_heads") or heads
    if width % heads and "gated" not in sizes:  # T5 alone has heads of any width
        why = f"its config.json has num_attention_heads = {heads}, no divisor of hidden_size"
        raise refuse(typed, f"{why} = {width}")
    if heads % groups:
        why = f"its config.json has num_key_value_heads = {groups}, no divisor of"
        raise refuse(typed, f"{why} num_attention_heads = {heads}")


def _differences(family: str, sizes: Sizes, shapes: Shapes) -> Iterator[tuple[str, object, str]]:
    ending = _EMBEDDING.get(family, "embed_tokens.weight")
    embedding = _ending(shapes, ending)
    if embedding is None or len(embedding) != 2:
        yield "model_type", family, f"have no matrix {ending}"
        return
    width, rows = sizes["hidden_size"], sizes["vocab_size"]
    if embedding[-1] != width:
        yield "hidden_size", width, f"are {embedding[-1]} wide"
    if embedding[0] != rows:
        yield "vocab_size", rows, f"have {embedding[0]} embeddings"
    numbers = [int(m[1]) for name in shapes if (m := re.search(_LAYER[family], name))]
    depth = 1 + max(numbers, default=-1)
    if depth != sizes["num_hidden_layers"]:
        yield "num_hidden_layers", sizes["num_hidden_layers"], f"are of {depth} layers"
    inner = _ending(shapes, _UP[family]) if family in _UP else None
    if inner is not None and inner != (sizes["intermediate_size"], width):
        yield "intermediate_size", sizes["intermediate_size"], f"are of {inner[0]}"


def _ending(shapes: Shapes, ending: str) -> tuple[int, ...] | None:
    return next((shape for name, shape in shapes.items() if name.endswith(ending)), None)
