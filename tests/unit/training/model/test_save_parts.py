"""A model out of a checkpoint in parts is the one that a single process saves."""

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file

from eke.training.model.save_model import save_pretrained
from eke.training.model.save_parts import save_settings, save_weights
from eke.training.part_files import Held, PartFiles, Piece, part_name, write_part

SIZES = {
    "vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96,
}  # fmt: skip
EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
MODELS = {
    "untied": ("LlamaForCausalLM", SIZES),
    "tied": ("LlamaForCausalLM", SIZES | {"tie_word_embeddings": True}),
    "fused experts": ("MixtralForCausalLM", SIZES | EXPERTS | {"num_local_experts": 5}),
    "classifier": ("BertForSequenceClassification", SIZES | {"num_labels": 3}),
    "three names of one table": ("T5ForConditionalGeneration", {"vocab_size": 211, "d_model": 48,
        "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4}),
}  # fmt: skip


def write_parts(model, folder, world_size) -> PartFiles:
    """The weights of `model` as so many ranks write them."""
    folder.mkdir()
    first, tied = {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        first.setdefault(id(tensor), name)
    whole = {name: model.state_dict()[name] for name in first.values()}
    for rank in range(world_size):
        pieces = {}
        for name, tensor in whole.items():
            size = -(-len(tensor) // world_size)
            rows = tensor[rank * size : (rank + 1) * size]
            before = min(rank * size, len(tensor)) * tensor[0].numel()
            pieces[name] = Piece(rows, before, tuple(tensor.shape))
        held = Held(pieces, {"tied": tied}, rank, world_size)
        write_part(folder / part_name(rank, world_size), held, "1")
    return PartFiles(folder)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_model_saved_from_shards_equals_a_single_process_save(kind, world_size, tmp_path) -> None:
    name, sizes = MODELS[kind]
    cls = getattr(transformers, name)
    config = cls.config_class(**sizes, pad_token_id=0)
    model = cls._from_config(copy.deepcopy(config))
    save_pretrained(model, tmp_path / "whole")
    parts = write_parts(model, tmp_path / "parts", world_size)
    with torch.device("meta"):
        empty = cls._from_config(copy.deepcopy(config))
    save_settings(empty, parts, tmp_path / "mine", None)
    for rank in reversed(range(world_size)):  # transformers sweeps files that are there before
        save_weights(empty, parts, tmp_path / "mine", rank, world_size)
    expected, found = (
        {
            n: t
            for file in (tmp_path / part).glob("model*.safetensors")
            for n, t in load_file(file).items()
        }
        for part in ("whole", "mine")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype is t.dtype for n, t in expected.items())
    config = (tmp_path / "mine" / "config.json").read_text()
    assert config == (tmp_path / "whole" / "config.json").read_text()
    loaded, info = cls.from_pretrained(tmp_path / "mine", output_loading_info=True)
    assert not any(info.values())
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True)
    )
    largest = max(t.nbytes for t in expected.values())
    limit = max(sum(t.nbytes for t in expected.values()) / world_size, largest)
    files = [file.stat().st_size for file in (tmp_path / "mine").glob("*.safetensors")]
    assert max(files) <= limit * 1.5 + 4096, "no file is much larger than a rank's share"
