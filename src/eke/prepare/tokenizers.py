"""From text to token ids: eke's bytes, or what AutoTokenizer loads; and the frame around a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eke.corpus import BYTE_TOKENS, BYTES, Request, Vocabulary
from eke.errors import ConfigError, Problem
from eke.tokens import BOS, EOS, NUM_SPECIAL_TOKENS, SEP

Encode = Callable[[Sequence[str]], list[np.ndarray]]
"""Ids of each text, without special tokens."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and what a row of its tokens begins and ends with."""

    encode: Encode
    vocabulary: Vocabulary
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


def load_tokenizer(request: Request) -> Tokenizer:
    """The tokenizer of a request.

    Raises:
        ConfigError: it cannot be loaded, or lacks a token that the task needs.
    """
    if request.tokenizer == BYTES:
        prefix, suffix = _frame(request, cls=BOS, sep=SEP, bos=BOS, eos=EOS)
        return Tokenizer(_bytes, BYTE_TOKENS, prefix, suffix)
    loaded = _auto_tokenizer(request.tokenizer)
    vocabulary = _vocabulary(request, loaded)
    bos = vocabulary.bos if _begins_with_bos(loaded) else None
    prefix, suffix = _frame(
        request, cls=loaded.cls_token_id, sep=loaded.sep_token_id, bos=bos, eos=vocabulary.eos
    )
    if request.frame == "encoder_decoder" and not suffix:
        why = "has no end-of-text token, which T5 needs at the end of every row"
        raise ConfigError(Problem("data.tokenizer", request.tokenizer, why, "data.tokenizer=bytes"))

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        ids = loaded(list(texts), add_special_tokens=False, return_attention_mask=False)
        return [np.asarray(row, np.int64) for row in ids["input_ids"]]

    return Tokenizer(encode, vocabulary, prefix, suffix)


def _bytes(texts: Sequence[str]) -> list[np.ndarray]:
    rows = (np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts)
    return [row + NUM_SPECIAL_TOKENS for row in rows]


def _frame(
    request: Request, cls: int | None, sep: int | None, bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Beginning and end of a row, as the model's family was pre-trained with.

    BERT: [CLS] ... [SEP]; T5: ... </s>; decoders: the beginning their tokenizer writes itself, and
    an end, which is what teaches them to stop.
    """
    if request.frame != "encoder":
        return _given(bos if request.frame == "decoder" else None), _given(eos)
    return _given(bos if cls is None else cls), _given(eos if sep is None else sep)


def _given(token: int | None) -> tuple[int, ...]:
    return () if token is None else (token,)


def _auto_tokenizer(name: str) -> Any:
    if Path(name).name == "tokenizer.json" and Path(name).is_file():
        why = "is a file, and tokenizers are named by their folder"
        fix = f"data.tokenizer={Path(name).parent}"
        raise ConfigError(Problem("data.tokenizer", name, why, fix))
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError ...
        line = next((text for text in str(error).splitlines() if text.strip()), repr(error))
        why = f"AutoTokenizer cannot load it: {line.strip()[:200]}"
        fix = "data.tokenizer=FOLDER   (a name needs a connection, once; or data.tokenizer=bytes)"
        raise ConfigError(Problem("data.tokenizer", name, why, fix)) from error


def _vocabulary(request: Request, loaded: Any) -> Vocabulary:
    pad, eos = loaded.pad_token_id, loaded.eos_token_id
    fallback = next(t for t in (eos, loaded.sep_token_id, loaded.unk_token_id, 0) if t is not None)
    if request.task == "masked_lm" and loaded.mask_token_id is None:
        why = "has no mask token, and task=masked_lm hides tokens behind it"
        raise ConfigError(Problem("data.tokenizer", request.tokenizer, why, "data.tokenizer=bytes"))
    # A padding token that was added by hand may lie behind the vocabulary proper.
    size = max(len(loaded), 1 + max(loaded.get_vocab().values(), default=0))
    return Vocabulary(
        tokenizer=request.tokenizer,
        size=size,
        pad=fallback if pad is None else pad,
        pad_is_eos=pad is None,
        bos=loaded.bos_token_id,
        eos=eos if eos is not None else loaded.sep_token_id,
        mask=loaded.mask_token_id,
        special=tuple(sorted(set(loaded.all_special_ids))),
        first_random=0,
    )


def _begins_with_bos(loaded: Any) -> bool:
    ids = loaded("a")["input_ids"]
    return loaded.bos_token_id is not None and bool(ids) and ids[0] == loaded.bos_token_id


CHARACTERS_PER_TOKEN = 16
"""First guess of how much text fills a row; where it is too little, all of the text is taken."""


def clipped(
    encode: Encode, texts: Sequence[str], limit: int, keep_end: bool = False
) -> list[tuple[np.ndarray, bool]]:
    """Ids of each text, at most `limit`, and whether some were left out.

    A text that is far too long is not tokenized as a whole: a line of a gigabyte costs no more.
    """
    most = CHARACTERS_PER_TOKEN * (limit + 4)
    parts = [_part(text, most, keep_end) for text in texts]
    found = []
    for text, part, ids in zip(texts, parts, encode(parts), strict=True):
        while len(part) < len(text) and len(ids) <= limit:
            part = _part(text, 8 * len(part), keep_end)
            ids = encode([part])[0]
        long = len(ids) > limit
        found.append(
            ((ids[len(ids) - limit :] if keep_end else ids[:limit]) if long else ids, long)
        )
    return found


def _part(text: str, most: int, end: bool) -> str:
    return text[-most:] if end else text[:most]
