"""Tokenizers: eke's byte tokenizer and all tokenizers of AutoTokenizer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import BOS, EOS, NUM_SPECIAL_TOKENS, SEP
from eke.data.preparation.untrusted import LoadError, load
from eke.data.sources import BYTE_TOKENS, BYTES, PrepareRequest, SpecialTokens, Vocabulary

_T = TypeVar("_T", bound=Sized)


_MARGIN_TOKENS = 32
"""Number of last tokens of a partial text that may differ from the entire text's tokens."""


@dataclass(frozen=True)
class Encoded:
    """Tokens of a text, without special tokens."""

    ids: np.ndarray
    """int64, shape (tokens,)."""
    ends: np.ndarray | None
    """End of each token in characters, shape (tokens,), None without offsets."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class _EncodedText:
    """Tokens of a text including special tokens."""

    ids: np.ndarray
    is_cut: bool
    is_useful: bool
    """True if there are other than special tokens."""
    cut: int = 0
    """Number of tokens of the first text of a pair (token type 0)."""


@dataclass(frozen=True)
class Tokenizer:
    """Functions and properties of a loaded tokenizer."""

    vocabulary: Vocabulary
    encode: Callable[[Sequence[str]], list[Encoded]]
    """Tokenize without special tokens."""
    frame: Callable[[Sequence[str], bool, int | None], list[np.ndarray]]
    """Tokenize with special tokens. Arguments: texts, whether seq2seq targets, limit of tokens."""
    decode: Callable[[Sequence[int]], list[str]]
    """Text of each token, for display."""
    join: Callable[[Sequence[int]], str]
    pair: Callable[[Sequence[tuple[str, ...]], int], list[_EncodedText]]
    """Tokenize pairs of texts with truncation="longest_first" and max_length=limit."""
    special_texts: tuple[str, ...] = ()
    eos_text: str = ""
    knows_ends: bool = True
    """True if `encode` returns offsets."""
    keeps_end: bool = False
    """True if truncation removes the beginning."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Jinja source of chat templates by name, including `default`."""
    special_names: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by name (`eos_token`), for use in templates."""

    @property
    def beginning(self) -> np.ndarray:
        """Special ids before a text."""
        return np.array(self.vocabulary.frame.prefix, np.int64)

    def begun(self, ids: np.ndarray) -> np.ndarray:
        """Prepend the tokenizer's prefix unless a chat template has already written it."""
        beginning = self.beginning
        has_it = np.array_equal(ids[: len(beginning)], beginning)
        return ids if has_it else np.concatenate([beginning, ids])

    def ended(self, ids: np.ndarray, text: str) -> np.ndarray:
        """Append EOS unless the text already ends with it."""
        end, eos = self.eos_text, self.vocabulary.eos
        if eos is None or (end and text.rstrip().endswith(end)):
            return ids
        return np.append(ids, eos)

    def rows(self, texts: Sequence[str], limit: int, target: bool = False) -> list[_EncodedText]:
        """Return `tokenizer(text, truncation=True, max_length=limit)` for each text."""
        frame = self.vocabulary.target_frame if target else self.vocabulary.frame
        if limit <= frame.size:
            return [_EncodedText(np.zeros(0, np.int64), True, False) for _ in texts]

        def framed(parts: list[str]) -> list[np.ndarray]:
            return self.frame(parts, target, None)

        found = []
        # Long texts are tokenized only as far as needed.
        for part, ids in tokenize_truncated(texts, limit, framed, self.keeps_end):
            useful = len(ids) > frame.size
            if is_cut := len(ids) > limit:
                ids = self.frame([part], target, limit)[0]
            found.append(_EncodedText(ids, is_cut, useful))
        return found


RUN = 8
"""Number of tokens on each side of a joint that must match."""


def encode_stream(tokenizer: Tokenizer, chunks: Iterable[str]) -> Iterator[np.ndarray]:
    """Tokenize a text in chunks and yield the ids of the entire text, in the memory of two chunks.

    Each chunk is tokenized together with the end of the previous chunk, and joined where the tokens
    of both match. Tokenizers without offsets receive the entire text.
    """
    text = "" if tokenizer.knows_ends else "".join(chunks)
    pending = tokenizer.encode([text])[0]
    for chunk in chunks:
        for overlap in (1 << 12, 1 << 17):  # characters that are tokenized again
            kept = text[-overlap:]
            found = tokenizer.encode([kept + chunk])[0]
            place = _agreement(pending, found, len(text) - len(kept), len(kept))
            if place is not None:
                break
        else:  # no match in a hundred thousand characters
            place, kept, found = (len(pending.ids), 0), "", tokenizer.encode([chunk])[0]
        yield pending.ids[: place[0]]
        assert found.ends is not None, "this tokenizer returns offsets"
        pending, text = Encoded(found.ids[place[1] :], found.ends[place[1] :]), kept + chunk
    yield pending.ids


def _agreement(before: Encoded, after: Encoded, shift: int, size: int) -> tuple[int, int] | None:
    """Find a joint and return the number of tokens before it in each text, None without a match."""
    assert before.ends is not None
    assert after.ends is not None
    # The text of `after` begins with the last `size` characters of `before`, from `shift` on.
    ends = before.ends - shift
    common, mine, others = np.intersect1d(ends, after.ends, return_indices=True)
    for number in np.argsort(abs(common - size // 2)):
        if not 0 < common[number] < size:
            continue
        i, j = int(mine[number]), int(others[number])
        here, there = slice(i - RUN, i + RUN), slice(j - RUN, j + RUN)
        if min(i, j) < RUN or i + RUN > len(ends):
            continue
        same_ids = np.array_equal(before.ids[here], after.ids[there])
        if same_ids and np.array_equal(ends[here], after.ends[there]):
            return i, j
    return None


RowEnds = tuple[tuple[str, ...], tuple[str, ...]]
"""First and last tokens of a row, decoded."""

_NUM_SHOWN = 5
"""Number of first and of last tokens in Ends."""


def ends_of(tokenizer: Tokenizer, ids: np.ndarray) -> RowEnds:
    """Decode the first and last tokens of a row, without overlap."""
    first, last = ids[:_NUM_SHOWN], ids[max(_NUM_SHOWN, len(ids) - _NUM_SHOWN) :]
    return tuple(tokenizer.decode(first.tolist())), tuple(tokenizer.decode(last.tolist()))


def is_doubled(ids: np.ndarray, special: Sequence[int]) -> bool:
    """Return whether a special token is repeated at the beginning or the end."""
    return any(len(p) == 2 and p[0] == p[1] and int(p[0]) in special for p in (ids[:2], ids[-2:]))


def truncate_text(text: str, limit: int, keep_end: bool = False) -> str:
    """Return a part of a text that fills `limit` tokens in nearly all cases."""
    most = 16 * (limit + _MARGIN_TOKENS)  # characters; more are tokenized if needed
    return text[-most:] if keep_end else text[:most]


def is_too_short(text: str, part: str, num_tokens: int, limit: int) -> bool:
    """Return whether more of the text must be tokenized to fill the row."""
    return len(part) < len(text) and num_tokens <= limit + _MARGIN_TOKENS


def tokenize_truncated(
    texts: Sequence[str],
    limit: int,
    tokenize: Callable[[list[str]], list[_T]],
    keep_end: bool = False,
) -> Iterator[tuple[str, _T]]:
    """Yield the part of each text that fills a row, and its tokens from `tokenize`."""
    parts = [truncate_text(text, limit, keep_end) for text in texts]
    for text, part, found in zip(texts, parts, tokenize(parts), strict=True):
        while is_too_short(text, part, len(found), limit):
            part = truncate_text(text, len(part), keep_end)  # 16 times as long, or all
            found = tokenize([part])[0]
        yield part, found


def load_request_tokenizer(request: PrepareRequest) -> Tokenizer:
    """Load the tokenizer of a request; ConfigError if it lacks a token of the task."""
    if request.tokenizer == BYTES:
        return _byte_tokenizer(request)
    loaded = _auto_tokenizer(request.tokenizer)

    def encode(texts: Sequence[str]) -> list[Encoded]:
        fast = bool(loaded.is_fast)
        made = loaded(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=fast,
        )
        ids = [np.asarray(row, np.int64) for row in made["input_ids"]]
        if not fast:
            return [Encoded(row, None) for row in ids]
        places = [np.asarray(row, np.int64).reshape(-1, 2) for row in made["offset_mapping"]]
        return [Encoded(row, place[:, 1]) for row, place in zip(ids, places, strict=True)]

    def frame(texts: Sequence[str], target: bool, limit: int | None) -> list[np.ndarray]:
        named: dict[str, Any] = {"text_target" if target else "text": list(texts)}
        if limit is not None:
            named |= {"truncation": True, "max_length": limit}
        made = loaded(**named, return_attention_mask=False, return_token_type_ids=False)
        return [np.asarray(row, np.int64) for row in made["input_ids"]]

    # Markers of a chat, as <|im_start|>, can be added tokens that all_special_tokens lacks.
    added = loaded.added_tokens_decoder.values()
    special = {*loaded.all_special_tokens, *(str(t) for t in added if t.special)}
    vocabulary = _vocabulary(request, loaded)
    eos = vocabulary.eos
    templates = loaded.chat_template or {}
    return Tokenizer(
        vocabulary,
        encode,
        frame,
        eos_text="" if eos is None else str(loaded.convert_ids_to_tokens(eos)),
        decode=lambda ids: [loaded.decode([token]) for token in ids],
        join=lambda ids: str(loaded.decode(ids, clean_up_tokenization_spaces=False)),
        pair=partial(_pairs, loaded),
        special_texts=tuple(sorted(text for text in special if text)),
        knows_ends=bool(loaded.is_fast),
        keeps_end=loaded.truncation_side == "left",
        chat_templates=templates if isinstance(templates, dict) else {"default": templates},
        special_names={k: v for k, v in loaded.special_tokens_map.items() if isinstance(v, str)},
    )


def _pairs(loaded: Any, pairs: Sequence[tuple[str, ...]], limit: int) -> list[_EncodedText]:
    found, is_room = [], limit > loaded.num_special_tokens_to_add(pair=True)
    # Entire texts are tokenized, since truncation cuts the longer one.
    made = loaded(*map(list, zip(*pairs, strict=True)))
    for number, both in enumerate(pairs):
        row = {name: values[number] for name, values in made.items()}
        if (is_cut := len(row["input_ids"]) > limit) and is_room:
            row = loaded(*both, truncation="longest_first", max_length=limit)
        ids, cut = np.asarray(row["input_ids"], np.int64), row.get("token_type_ids", [])
        useful = is_room and all(map(str.strip, both))
        found.append(_EncodedText(ids, is_cut, useful, list(cut).count(0)))
    return found


def _byte_tokenizer(request: PrepareRequest) -> Tokenizer:
    """Return the byte tokenizer with the special tokens of models for the task."""
    prefix = () if request.task == "seq2seq_lm" else (BOS,)
    end = SEP if request.task == "masked_lm" else EOS
    own = SpecialTokens(prefix, (end,))

    def encode(texts: Sequence[str]) -> list[Encoded]:
        rows = [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
        starts = [(row & 0xC0) != 0x80 for row in rows]  # first bytes of characters
        return [
            Encoded(r + NUM_SPECIAL_TOKENS, s.cumsum()) for r, s in zip(rows, starts, strict=True)
        ]

    def frame(texts: Sequence[str], target: bool, limit: int | None) -> list[np.ndarray]:
        rows = [np.array([*prefix, *each.ids, end], np.int64) for each in encode(texts)]
        return [np.append(row[: limit - 1], end) if limit else row for row in rows]

    def pair(pairs: Sequence[tuple[str, ...]], limit: int) -> list[_EncodedText]:
        room, found = limit - len(prefix) - 2, []
        for one, two in map(encode, pairs):
            first = one.ids[: max(room - len(two.ids), room // 2)]
            ids = np.array([*prefix, *first, end, *two.ids[: room - len(first)], end], np.int64)
            is_cut = len(one.ids) + len(two.ids) > room
            found.append(_EncodedText(ids, is_cut, room > 1 and len(one.ids) * len(two.ids) > 0))
        return found

    def decode(ids: Sequence[int]) -> list[str]:
        names = {BOS: "<bos>", EOS: "<eos>", SEP: "<sep>"}
        return [names.get(i) or bytes([i - NUM_SPECIAL_TOKENS]).decode("latin-1") for i in ids]

    def join(ids: Sequence[int]) -> str:
        return "".join(decode(ids)).encode("latin-1").decode(errors="replace")

    vocabulary = replace(BYTE_TOKENS, frame=own, target_frame=own)
    return Tokenizer(vocabulary, encode, frame, decode, join, pair)


def _auto_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return load(AutoTokenizer, name)
    except LoadError as error:
        why = f"cannot be loaded by AutoTokenizer: {error.why[:200]}"
        remark = "not a file; or a Hub name with a connection, or data.tokenizer=bytes"
        fix = Fix("data.tokenizer=FOLDER", remark=remark)
        raise ConfigError(Problem("data.tokenizer", name, why, fix, "unreadable")) from error


def _vocabulary(request: PrepareRequest, loaded: Any) -> Vocabulary:
    pad, eos = loaded.pad_token_id, loaded.eos_token_id
    fallback = next(t for t in (eos, loaded.sep_token_id, loaded.unk_token_id, 0) if t is not None)
    if request.task == "masked_lm" and loaded.mask_token_id is None:
        why, fix = "has no mask token for task=masked_lm", Fix("data.tokenizer=bytes")
        raise ConfigError(Problem("data.tokenizer", request.tokenizer, why, fix, "wrong_tokenizer"))
    # A padding token added later may have an id above the vocabulary size.
    size = max(len(loaded), 1 + max(loaded.get_vocab().values(), default=0))
    return Vocabulary(
        tokenizer=request.tokenizer,
        size=size,
        pad=fallback if pad is None else pad,
        pad_is_eos=pad is None or pad == eos,
        bos=loaded.bos_token_id,
        eos=eos if eos is not None else loaded.sep_token_id,
        mask=loaded.mask_token_id,
        special=tuple(sorted(set(loaded.all_special_ids))),
        first_random=0,
        frame=_frame_of(loaded, target=False),
        target_frame=_frame_of(loaded, target=True),
        has_types=request.text_pair is not None and _has_types(request, loaded),
    )


def _has_types(request: PrepareRequest, loaded: Any) -> bool:
    types = list(loaded("a", "b").get("token_type_ids", []))
    if types != sorted(types) or not set(types) <= {0, 1}:  # XLNet has other types
        why = f"the tokenizer has token types {types}. A pair of texts needs types 0 and 1"
        fix = Fix("data.text_pair=null")
        problem = Problem("data.text_pair", str(request.text_pair), why, fix, "wrong_tokenizer")
        raise ConfigError(problem)
    return bool(types)


def _frame_of(loaded: Any, target: bool) -> SpecialTokens:
    key = "text_target" if target else "text"
    whole = list(loaded(**{key: "a"})["input_ids"])
    plain = list(loaded(**{key: "a"}, add_special_tokens=False)["input_ids"])
    starts = range(len(whole) - len(plain) + 1)
    start = next((n for n in starts if whole[n : n + len(plain)] == plain), None)
    if start is None or not plain:
        return SpecialTokens()
    return SpecialTokens(tuple(whole[:start]), tuple(whole[start + len(plain) :]))
