"""Rows hold what the checkpoint's own tokenizer writes, in tokenizers of many kinds."""

import json
from itertools import pairwise

import numpy as np
import pytest
from prepared import store_of
from tokenizer_kinds import KINDS, save_kind
from transformers import AutoTokenizer

from eke.common.errors import ConfigError
from eke.common.text import BOS, EOS, NUM_SPECIAL_TOKENS
from eke.data.preparation.lines import Fields
from eke.data.preparation.rows import Sequences
from eke.data.preparation.tokenizers import (
    Encoded,
    _agreement,
    encode_stream,
    is_doubled,
    load_request_tokenizer,
)
from eke.data.sources import PrepareRequest

TEXTS = ["the cat saw a bird", "what is 4 plus 52?", " hello  world\n", "a"]
LONG = "the cat saw a small red bird, and the dog liked it. " * 40


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Folder and loaded tokenizer of each kind."""
    found = {}
    for number, kind in enumerate(KINDS):
        folder = save_kind(tmp_path_factory.mktemp(f"kind{number}"), kind)
        found[kind] = (str(folder), AutoTokenizer.from_pretrained(folder))
    return found


def sequences(folder: str, task: str, **more) -> Sequences:
    request = PrepareRequest("jsonl", "", "", text="text", task=task, tokenizer=folder, **more)
    return Sequences(request, load_request_tokenizer(request))


def made(folder: str, task: str, *rows: tuple[str, ...], seq_len: int = 64, **more):
    found = sequences(folder, task, seq_len=seq_len, **more).of([Fields(row) for row in rows])
    return [None if each is None else (each[0].tolist(), each[1]) for each in found]


@pytest.mark.parametrize("kind", KINDS)
def test_classifier_and_masked_rows_match_the_tokenizer(kind, kinds) -> None:
    folder, tokenizer = kinds[kind]
    task = "sequence_classification" if tokenizer.mask_token is None else "masked_lm"
    found = made(folder, task, *((text,) for text in [*TEXTS, LONG]), seq_len=24)
    right = tokenizer([*TEXTS, LONG], truncation=True, max_length=24)["input_ids"]
    assert [tokens for tokens, _ in found] == right


@pytest.mark.parametrize("kind", KINDS)
def test_source_and_target_rows_match_the_tokenizer(kind, kinds) -> None:
    folder, tokenizer = kinds[kind]
    pairs = [(text, TEXTS[-number]) for number, text in enumerate(TEXTS)] + [(LONG, LONG)]
    found = made(folder, "seq2seq_lm", *pairs, seq_len=24, target_len=12, response="say")
    for (source, target), row in zip(pairs, found, strict=True):
        right = tokenizer(source, truncation=True, max_length=24)["input_ids"]
        answer = tokenizer(text_target=target, truncation=True, max_length=12)["input_ids"]
        assert row == (right + answer, len(right))


def test_truncation_side_follows_the_tokenizer(tmp_path) -> None:
    folder = save_kind(tmp_path, "bytes with a template", truncation_side="left")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.truncation_side == "left"
    right = tokenizer(LONG * 9, truncation=True, max_length=12)["input_ids"]
    assert made(str(folder), "masked_lm", (LONG * 9,), seq_len=12) == [(right, 0)]


def expected(tokenizer, text: str, border: int | None = None) -> tuple[list[int], int]:
    """The tokenizer's beginning, the text, and one end of text; learnt from a border on."""
    whole = tokenizer("a")["input_ids"]
    beginning = whole[: whole.index(tokenizer("a", add_special_tokens=False)["input_ids"][0])]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    end = tokenizer.eos_token_id
    end = tokenizer.sep_token_id if end is None else end
    ends = [place[1] for place in encoded["offset_mapping"]]
    cut = 0 if border is None else len(beginning) + sum(end <= border for end in ends)
    return [*beginning, *encoded["input_ids"], end], cut


@pytest.mark.parametrize("kind", KINDS)
def test_texts_begin_as_the_tokenizer_does_and_end_once(kind, kinds) -> None:
    folder, tokenizer = kinds[kind]
    found = made(folder, "causal_lm", *((text,) for text in [*TEXTS, LONG]))
    assert found[:-1] == [expected(tokenizer, text) for text in TEXTS]
    assert found[-1] == (expected(tokenizer, LONG)[0][:64], 0), "a cut text teaches no stop"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_of_rendered_rows_are_not_doubled(kind, kinds) -> None:
    folder, tokenizer = kinds[kind]
    names = KINDS[kind][3]
    begin = KINDS[kind][2].partition("$A")[0].replace(" ", "")
    end = names.get("eos_token") or names["sep_token"]
    plain, rendered = "saw a bird", f"{begin}saw a bird{end}"
    ((tokens, _),) = made(folder, "causal_lm", (rendered,))
    right, _ = expected(tokenizer, plain)
    edge = len(right) - len(tokenizer(plain, add_special_tokens=False)["input_ids"]) - 1
    assert tokens[:edge] == right[:edge]
    assert (tokens[-1], tokens[-2] != tokens[-1]) == (right[-1], True)
    assert not is_doubled(np.array(tokens), tokenizer.all_special_ids)
    ((tokens, cut),) = made(folder, "causal_lm", (f"{begin}what", f"is it{end}"), response="say")
    assert not is_doubled(np.array(tokens), tokenizer.all_special_ids)
    assert 0 < cut < len(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_response_are_encoded_as_one_text(kind, kinds) -> None:
    folder, tokenizer = kinds[kind]
    pairs = [("what is 4 plus 52?", "56"), ("hello\n", "world"), ("the cat", " saw it")]
    found = made(folder, "causal_lm", *pairs, response="say")
    for (prompt, response), row in zip(pairs, found, strict=True):
        between = "" if prompt[-1].isspace() or response[0].isspace() else "\n"
        border = len(prompt + between)
        assert row == expected(tokenizer, prompt + between + response, border)


def test_separator_can_be_set(kinds) -> None:
    folder, tokenizer = kinds["bytes without"]
    (row,) = made(folder, "causal_lm", ("4 plus", "52"), response="say", separator=" = ")
    assert row == expected(tokenizer, "4 plus = 52", len("4 plus = "))


def test_rows_with_other_prompt_tokens_are_counted(kinds) -> None:
    folder, tokenizer = kinds["bytes without"]
    whole = "the cat saw a bird"
    tokens = tokenizer.tokenize(whole)
    first = next(t for t in tokens if len(t) > 2)
    cut = whole.index(first.strip("\u0120")) + 1
    made_of = sequences(folder, "causal_lm", seq_len=64, response="say", separator="")
    made_of.of([Fields((whole[:cut], whole[cut:])), Fields(("hello\n", "world"))])
    assert made_of.counts["num_other_prompts"] == 1


def test_tokenizer_without_offsets_splits_at_prompt_length(kinds) -> None:
    folder, tokenizer = kinds["llama, no space"]
    made_of = sequences(folder, "causal_lm", seq_len=64, response="say")
    slow = made_of.tokenizer.encode
    fields = vars(made_of.tokenizer) | {
        "encode": lambda texts: [type(e)(e.ids, None) for e in slow(texts)]
    }
    made_of.tokenizer = type(made_of.tokenizer)(**fields)
    ((tokens, cut),) = made_of.of([Fields(("what is 4 plus 52?", "56"))])
    assert (tokens.tolist(), cut) == expected(tokenizer, "what is 4 plus 52?\n56", 19)


@pytest.mark.parametrize("kind", KINDS)
def test_document_in_chunks_has_the_tokens_of_one_text(kind, kinds) -> None:
    folder, tokenizer = kinds[kind]
    loaded = load_request_tokenizer(PrepareRequest("text", "", "", tokenizer=folder))
    text = "".join(f"line {n} {LONG[n % 50 :][:90]}\n" for n in range(200))
    edges = [0, 5000, 5001, 12000, len(text)]
    chunks = [text[a:b] for a, b in pairwise(edges)]
    found = np.concatenate(list(encode_stream(loaded, chunks)))
    assert found.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_ambiguous_chunk_borders_are_not_joined() -> None:
    """Unknown words are one token, whatever they are."""
    ids, ends = np.full(40, 3), np.arange(1, 41) * 3
    shifted = np.where(np.arange(40) == 20, ends, ends + 1)  # they agree at one end alone
    pair = Encoded(ids, ends), Encoded(ids, shifted)
    assert _agreement(*pair, 0, 120) is None
    assert _agreement(pair[0], pair[0], 0, 120) == (19, 19)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_of_a_rendered_document_are_not_doubled(kind, kinds, tmp_path) -> None:
    folder, _ = kinds[kind]
    begin, end = KINDS[kind][2].partition("$A")[0].replace(" ", ""), KINDS[kind][3]
    rendered = f"{begin}saw a bird{end.get('eos_token') or end['sep_token']}"
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(rendered)
    store = store_of("data=text", f"data.path={tmp_path}", f"data.tokenizer={folder}", "model=tiny",
                     "data.seq_len=4")  # fmt: skip
    ((row, _),) = made(folder, "causal_lm", (rendered,))
    assert store.array("tokens").tolist() == row * 3
    assert store.manifest.num_doubled == 0


def test_doubled_special_tokens_are_detected() -> None:
    special = [1, 2]
    rows = {(1, 1, 5): True, (1, 5, 2, 2): True, (1, 5, 5, 2): False, (5, 5): False, (1,): False}
    assert {row: is_doubled(np.array(row), special) for row in rows} == rows


# Of two cut texts tokenizers keeps every pair of pieces: two of LONG take seconds.
LONGER = LONG[:160]
PAIRS = [
    *zip(TEXTS, reversed(TEXTS), strict=True), (LONG, "a"), ("a bird", LONG), (LONGER, LONGER[4:]),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_text_pairs_match_the_tokenizer(kind, kinds) -> None:
    folder, tokenizer = kinds[kind]
    limit = (9, 24, 25)[list(KINDS).index(kind) % 3]
    found = made(folder, "sequence_classification", *PAIRS, seq_len=limit, text_pair="b")
    for both, row in zip(PAIRS, found, strict=True):
        right = tokenizer(*both, truncation="longest_first", max_length=limit)
        assert row is not None
        assert row[0] == right["input_ids"]


TYPES = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}


@pytest.mark.parametrize("limit", [9, 24])
def test_token_types_of_pairs_match_the_tokenizer(limit, tmp_path) -> None:
    folder = save_kind(tmp_path, "wordpiece with bos", **TYPES)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = sequences(str(folder), "sequence_classification", seq_len=limit, text_pair="b")
    assert found.tokenizer.vocabulary.has_types
    for both, row in zip(PAIRS, found.of([Fields(pair) for pair in PAIRS]), strict=True):
        right = tokenizer(*both, truncation="longest_first", max_length=limit)["token_type_ids"]
        assert row is not None
        assert [int(n >= row[1]) for n in range(len(row[0]))] == right


def test_token_types_other_than_0_and_1_are_rejected(tmp_path) -> None:
    folder = save_kind(tmp_path, "wordpiece with bos", **TYPES)
    file = folder / "tokenizer.json"
    made_by = json.loads(file.read_text())
    made_by["post_processor"]["pair"][-1]["SpecialToken"]["type_id"] = 2  # as XLNet's last token
    file.write_text(json.dumps(made_by))
    with pytest.raises(ConfigError, match="needs types 0 and 1") as caught:
        sequences(str(folder), "sequence_classification", seq_len=9, text_pair="b")
    assert str(caught.value.problems[0].fix) == "data.text_pair=null"


def test_pair_with_an_empty_text_is_skipped(kinds) -> None:
    folder, _ = kinds["wordpiece with bos"]
    task = "sequence_classification"
    empty = [("", "a"), ("a", " "), ("a", "")]
    assert made(folder, task, *empty, text_pair="b") == [None] * 3
    assert made(folder, task, ("a", "b"), text_pair="b", seq_len=2) == [None], "no room"


@pytest.mark.parametrize(
    ("pair", "limit", "kept"),
    [
        (("ab", "cd"), 64, ("ab", "cd")),
        (("abcdef", "gh"), 8, ("abc", "gh")),
        (("ab", "cdefgh"), 8, ("ab", "cde")),
        (("abcdef", "ghijkl"), 8, ("ab", "ghi")),
        (("abcdef", "ghijkl"), 7, ("ab", "gh")),
    ],
)
def test_byte_pairs_are_joined_by_end_of_text(pair, limit, kept) -> None:
    (row,) = made("bytes", "sequence_classification", pair, seq_len=limit, text_pair="b")
    first, second = ([byte + NUM_SPECIAL_TOKENS for byte in part.encode()] for part in kept)
    assert row is not None
    assert row[0] == [BOS, *first, EOS, *second, EOS]
