"""Small tokenizers of many kinds, trained on a few sentences; each frames a text differently."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "the cat saw a small red bird, and the dog liked it.",
    "what is 4 plus 52? it is 56, not 9!",
    "hello world: how are you today?\nfine, thanks for the question",
] * 30
LETTERS = sorted(set("".join(SENTENCES)) | {"\u2581"})


def byte_tokenizer(specials: list[str], prefix_space: bool = False) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=330, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return made


def unigram_tokenizer(specials: list[str], prepend: str = "always") -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    made.train_from_iterator(
        SENTENCES,
        trainers.UnigramTrainer(
            vocab_size=150,
            special_tokens=specials,
            unk_token="<unk>",
            initial_alphabet=LETTERS,
            show_progress=False,
        ),
    )
    return made


def _wordpiece(specials: list[str]) -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(
        SENTENCES,
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=specials, show_progress=False),
    )
    return made


BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
LLAMA = ["<unk>", "<s>", "</s>"]
T5 = ["<pad>", "</s>", "<unk>"]
GLM = ["<unk>", "[gMASK]", "<sop>", "<eop>"]
LANGUAGES = ["<s>", "<pad>", "</s>", "<unk>", "en_XX"]

OF_BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]",
           "mask_token": "[MASK]"}  # fmt: skip
OF_ROBERTA = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>",
              "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}  # fmt: skip
OF_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
OF_T5 = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
OF_GLM = {"eos_token": "<eop>", "unk_token": "<unk>"}
OF_LANGUAGES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

KINDS: dict[str, tuple[Any, list[str], str, dict[str, str]]] = {
    # name: how it is made, special tokens, what stands around a text, their names
    "wordpiece without bos": (_wordpiece, BERT, "[CLS] $A [SEP]", OF_BERT),
    "wordpiece with bos": (_wordpiece, BERT, "[CLS] $A [SEP]", {**OF_BERT, "bos_token": "[CLS]"}),
    "bytes with a template": (byte_tokenizer, ROBERTA, "<s> $A </s>", OF_ROBERTA),
    "bytes without": (
        byte_tokenizer, ["<|end|>"], "", {"eos_token": "<|end|>", "bos_token": "<|end|>"},
    ),
    "bytes, prefix space": (
        lambda specials: byte_tokenizer(specials, prefix_space=True),
        ROBERTA, "<s> $A </s>", OF_ROBERTA,
    ),
    "unigram with cls": (unigram_tokenizer, ROBERTA, "<s> $A </s>", OF_ROBERTA),
    "llama, space always": (unigram_tokenizer, LLAMA, "<s> $A", OF_LLAMA),
    "llama, space first": (lambda s: unigram_tokenizer(s, "first"), LLAMA, "<s> $A", OF_LLAMA),
    "llama, no space": (lambda s: unigram_tokenizer(s, "never"), LLAMA, "<s> $A", OF_LLAMA),
    "llama, eos": (unigram_tokenizer, LLAMA, "<s> $A </s>", OF_LLAMA),
    "t5": (unigram_tokenizer, T5, "$A </s>", OF_T5),
    "two in front": (unigram_tokenizer, GLM, "[gMASK] <sop> $A", OF_GLM),
    "language behind": (unigram_tokenizer, LANGUAGES, "$A </s> en_XX", OF_LANGUAGES),
    "language in front": (unigram_tokenizer, LANGUAGES, "en_XX $A </s>", OF_LANGUAGES),
}  # fmt: skip


def save_kind(folder: Path, kind: str, **more: Any) -> Path:
    """A tokenizer of this kind, saved as transformers does."""
    from transformers import PreTrainedTokenizerFast

    build, specials, template, names = KINDS[kind]
    made = build(specials)
    if template:
        written = [word for word in template.split() if word != "$A"]
        made.post_processor = processors.TemplateProcessing(
            single=template,
            pair=f"{template} {template.replace('$A', '$B')}",
            special_tokens=[(word, made.token_to_id(word)) for word in dict.fromkeys(written)],
        )
    PreTrainedTokenizerFast(tokenizer_object=made, **names, **more).save_pretrained(folder)
    return folder
