"""`eke data show`: the rows, what is trained of them, and how long they are."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES
from prepared import write_jsonl
from tokenizer_kinds import byte_tokenizer, unigram_tokenizer
from tokenizers import decoders

from eke.cli import main
from eke.data.preparation.rows import prepare_store

GREEN, PLAIN = "\x1b[1;32m", "\x1b[0m"

ASK = {"role": "user", "content": "what is été?"}
SAY = {"role": "assistant", "content": "it is \U0001f600 日本."}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    # In this process, which is quicker.
    monkeypatch.setattr("eke.data.sources.request._run_preparation", prepare_store)
    return tmp_path


def save_tokenizer(folder: Path, is_bytes: bool = True) -> Path:
    """A tokenizer with ChatML's template."""
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES["chatml"]
    made = (byte_tokenizer if is_bytes else unigram_tokenizer)(["<unk>", *family.specials])
    made.decoder = decoders.ByteLevel() if is_bytes else decoders.Metaspace()
    PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=family.template, eos_token=family.eos,
        extra_special_tokens=[each for each in family.specials if each != family.eos],
        unk_token="<unk>",
    ).save_pretrained(folder)  # fmt: skip
    return folder


def chats(folder: Path, *others: Any) -> list[str]:
    """Overrides of four conversations and others, with a tokenizer."""
    rows = [{"messages": [ASK, SAY]}, *({"messages": [ASK, SAY] * n} for n in (2, 3, 4)), *others]
    write_jsonl(folder / "chats.jsonl", rows)
    save_tokenizer(folder / "tok")
    return ["data=chat", "data.path=chats.jsonl", "data.tokenizer=tok", "data.seq_len=512"]


def show(*words: str) -> int:
    return main(["data", "show", *words])


def rows_of(told: str) -> list[str]:
    """Rows as they are shown, each with its heading."""
    return re.split(r"^(?=row \d+ \()", told.partition("\n\ntokens of a row")[0], flags=re.M)[1:]


@pytest.mark.parametrize("is_bytes", [True, False], ids=["bytes", "words"])
def test_decoded_text_matches_all_tokens(is_bytes: bool, here, capsys) -> None:
    """Also where a part on its own loses the space it begins with."""
    from transformers import AutoTokenizer

    words = chats(here)
    save_tokenizer(here / "tok", is_bytes)
    assert show(*words, "--rows=1", "--ids") == 0
    (row,) = rows_of(capsys.readouterr().out)
    heading, *lines, ids = row.split("\n")
    assert re.fullmatch(r"row 1 \((training|evaluation)\): \d+ tokens, \d+ trained", heading)
    if is_bytes:
        assert lines == ["<|im_start|>user", "what is été?<|im_end|>", "<|im_start|>assistant",
                         "[[it is \U0001f600 日本.<|im_end|>]]", ""]  # fmt: skip
    loaded = AutoTokenizer.from_pretrained(here / "tok")
    text = "\n".join(lines)
    tokens = [int(n) for n in re.sub(r"[\[\]]", " ", ids).split()]
    assert text.replace("[[", "").replace("]]", "") == loaded.decode(tokens)
    (trained,) = re.findall(r"\[\[(.*?)\]\]", ids)
    (answer,) = re.findall(r"\[\[(.*?)\]\]", text)
    inside = [int(n) for n in trained.split()]
    assert answer.strip() == loaded.decode(inside).strip()
    assert answer.endswith("<|im_end|>")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "is_green"),
    [
        pytest.param({"TERM": "xterm-256color"}, True, id="terminal"),
        pytest.param({"TERM": "xterm-256color", "NO_COLOR": "1"}, False, id="NO_COLOR"),
        pytest.param({"TERM": "dumb"}, False, id="dumb"),
    ],
)
def test_trained_text_is_green_in_a_terminal(variables, is_green, here, monkeypatch) -> None:
    words = chats(here)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    assert show(*words, "--rows=1") == 0
    assert (GREEN + "it is \U0001f600 日本.<|im_end|>" + PLAIN in stream.getvalue()) is is_green
    assert ("[[" in stream.getvalue()) is not is_green


def test_hostile_and_bad_rows_are_shown_escaped(here, capsys) -> None:
    """Whatever the model's vocabulary is."""
    hostile = {"messages": [{"role": "user", "content": "\x1b[2J\x1b[1;32mgreen"}, SAY]}
    words = [*chats(here, hostile, {"messages": [ASK]}), "model.vocab_size=300"]
    assert show(*words, "--rows=9") == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "green" in told
    assert told.splitlines()[-1].endswith("eke plan")


def test_counts_of_rows_are_shown(here, capsys) -> None:
    words = chats(here, {"messages": [ASK]}, {"messages": "no list"})
    assert show(*words, "--rows=0", "data.bad_rows=skip") == 0
    told = capsys.readouterr().out
    assert "[[" not in told
    assert "rows: 6 read; 2 bad, 0 empty, 0 truncated" in told
    assert "first bad row: chats.jsonl:5 has no answer of the assistant" in told
    assert "refuses" not in told
    low, high = map(int, re.findall(r"tokens of a row: (\d+) to (\d+), median", told)[0])
    assert high == 4 * low
    sizes = [int(n) for n in re.findall(r"^ +\d+ to \d+ +(\d+)", told, re.M)]
    assert sum(sizes) == 4
    assert len(sizes) <= 8
    share, trained, tokens = re.findall(r"trained: (\S+)% \((\d+) of (\d+) tokens\)", told)[0]
    assert int(tokens) == 10 * low
    assert float(share) == pytest.approx(100 * int(trained) / int(tokens), abs=0.06)


def test_first_token_is_not_a_target_and_ignored_keys_are_listed(here, capsys) -> None:
    words = chats(
        here, *[{"messages": [ASK, SAY], "lang": "\x1b[2Jfr", "\x1b[2Jid": n} for n in (1, 2)]
    )
    assert show(*words, "--rows=1", "data.train_on=all") == 0
    told = capsys.readouterr().out
    tokens, trained = map(int, re.findall(r"\): (\d+) tokens, (\d+) trained", told)[0])
    assert trained == tokens - 1
    whole, tokens = map(int, re.findall(r"\((\d+) of (\d+) tokens\)", told)[0])
    assert whole == tokens - 6
    assert "\nignored: \ufffd[2Jid (2 rows), lang (2 rows)\n" in told


def test_first_token_of_texts_is_not_a_target(here, capsys) -> None:
    assert show(*bytes_of(here), "--rows=0") == 0
    trained, tokens = map(int, re.findall(r"\((\d+) of (\d+) tokens\)", capsys.readouterr().out)[0])
    assert trained == tokens - 4


def bytes_of(folder: Path, count: int = 4) -> list[str]:
    rows = [{"q": f"é{n}?", "a": f"ü{n}", "text": f"row {n}", "label": n % 2} for n in range(count)]
    write_jsonl(folder / "rows.jsonl", rows)
    return ["data=jsonl", "data.path=rows.jsonl", "data.tokenizer=bytes"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        pytest.param(["data.prompt=q", "data.response=a"], "<bos>é0?\n[[ü0<eos>]]", id="answers"),
        pytest.param([], "7 tokens, 6 trained\n<bos>[[row 0<eos>]]", id="texts"),
        pytest.param(
            ["task=seq2seq_lm", "model=tiny_t5", "data.prompt=q", "data.response=a"],
            "é0?<eos>[[ü0<eos>]]", id="seq2seq",
        ),
        pytest.param(
            ["task=masked_lm", "model=tiny_bert"], "<bos>row 0<sep>", id="masked",
        ),
    ],
)  # fmt: skip
def test_rows_of_other_tasks_are_shown(more: list[str], expected: str, here, capsys) -> None:
    assert show(*bytes_of(here), *more, "--rows=1") == 0
    assert expected in capsys.readouterr().out


def test_classes_are_named(here, capsys) -> None:
    words = [*bytes_of(here), "task=sequence_classification", "model=tiny_bert"]
    assert show(*words, "--rows=2") == 0
    told = capsys.readouterr().out
    assert re.search(r"row 2 \(\w+\): \d+ tokens, class 1\n", told)
    assert "trained:" not in told


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["data=synthetic"], id="synthetic"),
        pytest.param(["data=text", "data.path=a.txt", "data.tokenizer=tok"], id="text as tokens"),
    ],
)
def test_data_without_rows_is_reported(words: list[str], here, capsys) -> None:
    (here / "a.txt").write_text("one two three\n" * 50)
    save_tokenizer(here / "tok")
    assert show(*words) == 0
    told = capsys.readouterr()
    assert "has no rows" in told.out
    assert not told.err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        pytest.param(
            ["data=chat", "data.path=no.jsonl", "data.tokenizer=x"], "no.jsonl", id="no file"
        ),
        pytest.param(["-m", "seed=1,2"], "-> eke data show with the", id="a sweep"),
        pytest.param(["--row", "1", "--idz"], "-> --ids\n", id="no such flag"),
        pytest.param(["data=jsonl", "data.path=x", "data.prompt=q"], "data.response", id="a rule"),
    ],
)
def test_wrong_command_has_a_fix(words: list[str], reason: str, here, capsys) -> None:
    assert show(*words) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["shw"], ["data=chat"], ["show", "--rows", "x"]])
def test_invalid_arguments_are_rejected(words: list[str], capsys) -> None:
    assert main(["data", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "-> " in told


def test_rows_as_json_have_tokens_text_and_counts(here, capsys) -> None:
    assert show("--json", "--rows", "2", *chats(here)) == 0
    (source,) = json.loads(capsys.readouterr().out)
    assert source["data"] == "chat"
    assert (source["counts"]["num_rows"], source["counts"]["num_bad"]) == (4, 0)
    first, second = source["rows"]
    assert len(first["ids"]) == len(first["trained"]) < len(second["ids"])
    assert 0 < sum(first["trained"]) < len(first["ids"])
    assert ASK["content"] in first["text"]
