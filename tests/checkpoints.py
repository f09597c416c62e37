"""Small checkpoints with random weights, in the hub's layout and with a tokenizer, for any test."""

from pathlib import Path

import torch

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "def forward(self, x): return self.linear(x)",
    "a supply that lasts is one that is eked out",
]

FAMILIES = ("llama", "bert", "gpt2", "t5", "mistral", "qwen2", "qwen3", "mixtral")
"""What `save_checkpoint` can make."""

TASK_OF = {"bert": "masked_lm", "t5": "seq2seq_lm"}
"""Family -> its pre-training task, where it is not causal_lm."""

VOCABULARY = 320
"""As many as eke's byte tokenizer asks for, and more than `make_tokenizer` has."""


def save_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    task: str = "",
    tokenizer: bool = False,
    **changes,
) -> Path:
    """Save a model of 2 layers, 32 wide, and its tokenizer if asked for; returns the folder.

    Args:
        folder: made if it is not there.
        family: one of FAMILIES, transformers' model_type.
        seed: of the weights.
        task: head of the saved model; the family's pre-training task if not given.
        tokenizer: whether to save one beside.
        changes: arguments of transformers' configuration class.
    """
    import transformers

    from eke.training.model.model_checks import HEADS

    config = make_model_config(family, **changes)
    head = getattr(transformers, HEADS[task or TASK_OF.get(family, "causal_lm")])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = head.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return folder


def checkpoint_plan(path: Path, *overrides: str):
    """The plan of a short run on a CPU that trains the checkpoint in a folder."""
    from support import last_wins

    from eke.config.compose import compose
    from eke.workflows.planning import plan_for

    typed = (
        "model=pretrained", f"model.name_or_path='{path}'", "data=synthetic", "data.seq_len=16",
        "data.max_token=300", "hardware=cpu", "tracker=none",
    )  # fmt: skip
    return plan_for(compose(last_wins(*typed, *overrides)), planning=True)


def save_unknown(folder: Path) -> Path:
    """Save a model of an architecture that eke has no closed form for; returns the folder."""
    import transformers

    config = transformers.PhiConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    transformers.PhiForCausalLM(config).save_pretrained(folder)
    return folder


def save_capped(folder: Path) -> Path:
    """Save a model that caps its logits by a number of another name; returns the folder."""
    import transformers

    config = transformers.RecurrentGemmaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=64, lru_width=32,
    )  # fmt: skip
    transformers.RecurrentGemmaForCausalLM(config).save_pretrained(folder)
    return folder


def make_model_config(family: str, **changes):
    """transformers' configuration of a small model; special tokens as `make_tokenizer` has them."""
    import transformers

    common = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    width = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    grouped = {**width, "num_key_value_heads": 1}
    own = {
        "llama": grouped,
        "mistral": {**grouped, "head_dim": 16},
        "qwen2": grouped,
        "qwen3": {**grouped, "head_dim": 16},
        "mixtral": {**grouped, "num_local_experts": 4, "num_experts_per_tok": 2},
        "bert": {**width, "max_position_embeddings": 128},
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 64, "n_positions": 128},
        "t5": {
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
    }[family]
    return transformers.AutoConfig.for_model(family, **{**common, **own, **changes})


def make_tokenizer(lines: list[str] | None = None):
    """A byte-level BPE tokenizer trained on a few lines; PAD, BOS, EOS, MASK, SEP are 0 to 4."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<mask>", "<sep>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines or LINES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
        sep_token="<sep>",
    )
