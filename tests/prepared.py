"""Files of rows, tokenizers and stores for the tests of prepared data."""

import json
from pathlib import Path
from typing import Any

from unit.plan.cases import config_of

from eke.data.preparation.rows import prepare_store
from eke.data.sources import Store, open_store, request_of


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(count: int, **more: Any) -> list[dict[str, Any]]:
    """Rows that all differ."""
    return [{"text": f"row number {n}", **more} for n in range(count)]


def store_of(*overrides: str) -> Store:
    """The store of some overrides, prepared in this process, which is quicker."""
    request = request_of(config_of(*overrides))
    assert request is not None
    prepare_store(request)
    return open_store(request)


def texts_of(store: Store, split: str) -> list[str]:
    """The byte tokens of a split as text; special tokens are left out."""
    tokens, offsets = store.array("tokens"), store.array("offsets")
    rows = (tokens[offsets[n] : offsets[n + 1]] for n in store.array(split))
    return [bytes(int(t) - 8 for t in row if t >= 8).decode() for row in rows]


def save_bpe(
    folder: Path, special: dict[str, str], size: int = 300, ends_texts: bool = False
) -> Path:
    """A byte-level BPE tokenizer with these special tokens (`{"eos_token": "</s>"}`)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(dict.fromkeys(special.values())),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["row number one two three four five"] * 50, trainer)
    if ends_texts:  # as T5's own
        end = special["eos_token"]
        made.post_processor = processors.TemplateProcessing(
            single=f"$A {end}",
            pair=f"$A {end} $B {end}",
            special_tokens=[(end, made.token_to_id(end))],
        )
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    return folder


BERT = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}  # fmt: skip
T5 = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
GPT = {"eos_token": "<|endoftext|>"}
"""Special tokens as the families have them; GPT's has no padding."""
