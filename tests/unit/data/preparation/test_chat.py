"""Chat data: what is trained on, beside an oracle that works on characters."""

import csv
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import FAMILIES, Family, Message, saved
from prepared import store_of, write_jsonl

from eke.common.errors import ConfigError
from eke.data.preparation.chat import ChatTemplate, encode_conversation, generated_spans
from eke.data.preparation.conversations import columns_of, read_conversation
from eke.data.preparation.lines import BadRowError
from eke.data.preparation.tokenizers import Encoded

COUNT = 80
"""Conversations for each template."""

WORDS = ["the", "cat", "saw", "4", "\n", "\n\n", " ", "  ", "été", "日本", "\U0001f600", "{", "}",
         '"', "'", "[INST]", "<think>x", "user", "assistant", "<b>", "a\tb", "\\n"]  # fmt: skip
NASTY = ["", "", " ", "\n", "\n\n "]


def text_of(rng: random.Random) -> str:
    words = [rng.choice(WORDS) for _ in range(rng.randint(1, 8))]
    inner = rng.choice(["", " "]).join(words).strip() or "word"
    return rng.choice(NASTY) + inner + rng.choice(NASTY)


def conversation_of(family: Family, rng: random.Random) -> list[Message]:
    messages: list[Message] = []
    if family.system and rng.random() < 0.5:
        messages.append({"role": "system", "content": text_of(rng)})
    last = ""
    for _ in range(rng.randint(1, 4)):
        question = text_of(rng)
        messages.append({"role": "user", "content": question})
        if family.tools and rng.random() < 0.3:
            arguments = {"query": text_of(rng).strip(), "n": rng.randint(0, 9)}
            call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
            content = "" if family.template.startswith("{{ '<|start|>") else rng.choice(["", "so"])
            messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
            messages.append({"role": "tool", "content": text_of(rng)})
        # An answer may repeat the question or the answer before.
        answer = rng.choice([question, last or question, text_of(rng), text_of(rng)])
        message: Message = {"role": "assistant", "content": answer}
        if family.thinking and rng.random() < 0.5:
            thinking = rng.choice(["", "\n\n", "let me see", "a\nb"])
            message["content"] = f"<think>\n{thinking}\n</think>\n\n{answer.strip()}"
        if family.eos == "<|return|>" and rng.random() < 0.3:
            message["thinking"] = "let me see"
        messages.append(message)
        last = answer
    return messages


class Characters:
    """A tokenizer of characters and special tokens, to compare with an oracle of characters."""

    def __init__(self, special: tuple[str, ...]) -> None:
        self.special = sorted(special, key=len, reverse=True)
        self.vocabulary = type("Vocabulary", (), {"bos": None})

    def encode(self, texts: list[str]) -> list[Encoded]:
        (text,) = texts
        ids, ends, at = [], [], 0
        while at < len(text):
            word = next((w for w in self.special if text.startswith(w, at)), text[at])
            at += len(word)
            ids.append(hash(word) % 2**31)
            ends.append(at)
        return [Encoded(np.array(ids, np.int64), np.array(ends, np.int64))]


def template_of(family: Family) -> ChatTemplate:
    names = {"bos_token": family.bos, "eos_token": family.eos}
    return ChatTemplate(
        family.template, {k: v for k, v in names.items() if v}, frozenset(family.specials)
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_mask_matches_the_oracle(name: str) -> None:
    family, rng = FAMILIES[name], random.Random(name)
    template, tokenizer = template_of(family), Characters(family.specials)
    for _ in range(COUNT):
        messages = conversation_of(family, rng)
        pieces = family.write(messages)
        text = "".join(piece for piece, _ in pieces)
        trained = "".join("1" * len(p) if t else "0" * len(p) for p, t in pieces)
        given = read_conversation({"messages": messages}, "messages")
        rendered, spans = generated_spans(template, given, "assistant")
        assert rendered == text, messages
        _, mask = encode_conversation(template, tokenizer, given, "assistant", 10**6)
        ends = tokenizer.encode([text])[0].ends
        starts = [0, *ends[:-1]]
        expected = ["1" in trained[a:b] for a, b in zip(starts, ends, strict=True)]
        assert mask.tolist() == expected, ([text[a:b] for a, b in spans], messages)


def encoded(given, name: str = "chatml", train_on: str = "assistant", limit: int = 10**6):
    family = FAMILIES[name]
    tokenizer = Characters(family.specials)
    return encode_conversation(template_of(family), tokenizer, given, train_on, limit)


def one(messages: list[Message], *how: str, **more: Any):
    return encoded(read_conversation({"messages": messages}, "messages"), *how, **more)


ASK = {"role": "user", "content": "why?"}
SAY = {"role": "assistant", "content": "so."}


@pytest.mark.parametrize(
    ("messages", "name", "limit", "reason"),
    [
        ([ASK, {"role": "robot", "content": "x"}], "chatml", 99, "unknown role 'robot'"),
        ([ASK, {"role": "assistant", "content": ""}], "chatml", 99, r"\[1\] is an empty answer"),
        ([ASK, {"role": "assistant"}], "chatml", 99, "is an empty answer"),
        ([ASK], "chatml", 99, "has no answer"),
        ([ASK, SAY], "chatml", 20, "would be cut off at 20"),
        ([{"role": "system", "content": "x"}, ASK, SAY], "gemma", 99, "System role not supported"),
        ([SAY, ASK], "llama 2", 99, "roles must alternate"),
        ([ASK, {"role": "assistant", "content": [{"type": "image"}]}], "chatml", 99, "other than"),
        ("why? so.", "chatml", 99, "is not a list of messages"),
        (None, "chatml", 99, "has no messages"),
    ],
)
def test_untrainable_row_is_rejected(messages, name, limit, reason) -> None:
    with pytest.raises(BadRowError, match=reason):
        one(messages, name, limit=limit)


def with_template(template: str, messages: list[Message], special: tuple[str, ...] = ("<e>",)):
    made = ChatTemplate(template, {"eos_token": "<e>"}, frozenset(special))
    given = read_conversation({"messages": messages}, "messages")
    tokenizer = Characters(special)
    return encode_conversation(made, tokenizer, given, "assistant", 10**6)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}", "no special token"),
        ("{% for m in messages %}{{ m.content * 2 + '<e>' }}{% endfor %}", "occurs 2 times"),
        ("{{ messages[0].content + '<e>' }}", "occurs 0 times"),
        ("{% for m in messages %}{{ m.content|upper + '<e>' }}{% endfor %}", "occurs 0 times"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
         "without end-of-turn"),
        ("{% for m in messages %}{{ m.content + '<e>' }}{% endfor %}{% generation %}"
         "{% endgeneration %}", "no token to train on"),
        ("{% generation %}{% for m in messages %}{{ m.content + '<e>' }}{% endfor %}"
         "{% endgeneration %}", "including the questions"),
        ("{{ 1 / 0 }}", "rejected by the chat template"),
        ("{% if %}", "rejected by the chat template"),
    ],
)  # fmt: skip
def test_template_that_hides_generated_text_is_rejected(template: str, reason: str) -> None:
    with pytest.raises(BadRowError, match=reason):
        with_template(template, [ASK, SAY])


def test_answer_may_be_marked_in_several_parts() -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% generation %}{{ '<e>' }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    _, mask = with_template(template, [ASK, SAY])
    assert mask.sum() == len("so.") + 1


def test_train_on_selects_last_all_or_every_message() -> None:
    messages = [ASK, SAY, ASK, {"role": "assistant", "content": "end"}]
    both, last = one(messages)[1], one(messages, train_on="last_assistant")[1]
    assert (both.sum(), last.sum()) == (8, 4)
    assert last[:-6].sum() == 0
    assert one(messages, train_on="all")[1].all()


def test_double_bos_token_is_rejected() -> None:
    family = FAMILIES["llama 3.1"]
    template = ChatTemplate(
        "{{ bos_token }}" + family.template, template_of(family).variables,
        frozenset(family.specials),
    )  # fmt: skip
    tokenizer = Characters(family.specials)
    tokenizer.vocabulary = type("Vocabulary", (), {"bos": tokenizer.encode([family.bos])[0].ids[0]})
    given = read_conversation({"messages": [ASK, SAY]}, "messages")
    with pytest.raises(BadRowError, match="two BOS tokens"):
        encode_conversation(template, tokenizer, given, "assistant", 10**6)


SHAREGPT = [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so."}]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": [ASK, SAY]}, ["messages"]),
        ({"conversations": SHAREGPT, "id": "7"}, ["conversations"]),
        ({"talk": [ASK, SAY], "n": 1}, ["talk"]),
        ({"chosen": [ASK, SAY], "rejected": [ASK, SAY]}, ["chosen", "rejected"]),
        ({"prompt": "why?", "completion": "so."}, ["completion"]),
        ({"prompt": [ASK], "completion": [SAY]}, ["completion"]),
        ({"instruction": "why?", "input": "", "output": "so."}, ["output"]),
        ({"text": "why? so."}, []),
    ],
)
def test_chat_columns_are_found(row: dict[str, Any], columns: list[str]) -> None:
    assert columns_of(row) == columns
    if len(columns) == 1:
        read = read_conversation(row, columns[0])
        assert [(m["role"], m["content"]) for m in read.messages] == [
            ("user", "why?"), ("assistant", "so."),
        ]  # fmt: skip


def test_instruction_with_input_and_tool_calls() -> None:
    read = read_conversation({"instruction": "add", "input": "1 2", "output": "3"}, "output")
    assert read.messages[0]["content"] == "add\n1 2"
    call = {"from": "function_call", "value": '{"name": "find", "arguments": {"n": 1}}'}
    row = {"conversations": [SHAREGPT[0], call, {"from": "observation", "value": "7"}, SHAREGPT[1]],
           "tools": '[{"type": "function"}]'}  # fmt: skip
    read = read_conversation(row, "conversations")
    assert [m["role"] for m in read.messages] == ["user", "assistant", "tool", "assistant"]
    assert read.messages[1]["tool_calls"][0]["function"]["name"] == "find"
    assert read.tools == [{"type": "function"}]


def test_answers_inside_a_prompt_are_not_trained() -> None:
    row = {"prompt": [ASK, SAY, ASK], "completion": [{"role": "assistant", "content": "end"}]}
    assert encoded(read_conversation(row, "completion"))[1].sum() == len("end") + 1


TOOLS = (
    "{% if effort is defined %}{{ '<|im_start|>effort ' + effort + '<|im_end|>\n' }}{% endif %}"
    "{% for t in tools or [] %}{{ t | tojson + '\n' }}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.reasoning_content or '') }}{% for c in m.tool_calls or "
    "[] %}{{ c.function.name + ' ' + c.function.arguments | tojson }}{% endfor %}"
    "{{ (m.content or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with tools, calls, thinking and a setting of a row."""

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% generation %}{{ '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
"""The same without them; it marks what is generated, in two parts."""


def shown(row: dict[str, Any], template: str = TOOLS, train_on: str = "assistant") -> str:
    """The row's text in short, what is trained in brackets."""
    made = ChatTemplate(template, {"eos_token": "<|im_end|>"}, frozenset(["<|im_end|>"]))
    (column,) = columns_of(row)
    given = read_conversation(row, column, made.parses_calls)
    text, spans = generated_spans(made, given, train_on)
    for start, end in reversed(spans):
        text = f"{text[:start]}[{text[start:end]}]{text[end:]}"
    text = text.replace("<|im_start|>", "").replace("<|im_end|>", ".")
    return " ".join(text.replace("][", "").split())


def say(content: str | None = "so", **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any, **more: Any) -> Message:
    function = {"name": "find", "arguments": arguments}
    return say(None, tool_calls=[{"type": "function", "function": function}], **more)


TOOL = {"type": "function", "function": {"name": "find"}}
FOUR = [ASK, say("bad"), ASK, say("good")]
BOTH = "user why?. assistant [bad.] user why?. assistant [good.]"
LAST = "user why?. assistant bad. user why?. assistant [good.]"
PAIR = "user why?. assistant [so.]"
CALLED = 'user why?. assistant [find {"n": 1}.] tool 7. assistant [so.]'


@pytest.mark.parametrize(
    ("row", "text"),
    [
        pytest.param({"messages": [ASK, {**FOUR[1], key: off}, *FOUR[2:]]}, LAST, id=f"{key}={off}")
        for key, off in (("weight", 0), ("weight", 0.0), ("train", False), ("train_on", False),
                         ("training", False), ("loss", False))
    ]
    + [
        pytest.param({"messages": [ASK, {**FOUR[1], key: on}, *FOUR[2:]]}, BOTH, id=f"{key}={on}")
        for key, on in (("weight", 1), ("weight", None), ("train", True))
    ]
    + [
        pytest.param(row, text, id=name)
        for name, row, text in (
            ("system", {"system": "be", "messages": [ASK, say()]}, f"system be. {PAIR}"),
            ("system_prompt", {"system_prompt": "be", "conversations": SHAREGPT},
             "system be. user why?. assistant [so..]"),
            ("system is empty", {"system": "", "messages": [ASK, say()]}, PAIR),
            ("tools", {"tools": [TOOL], "messages": [ASK, say()]},
             '{"type": "function", "function": {"name": "find"}} ' + PAIR),
            ("one tool", {"tools": {"name": "find"}, "messages": [ASK, say()]},
             '{"name": "find"} ' + PAIR),
            ("tools in JSON", {"tools": '[{"name": "find"}]', "messages": [ASK, say()]},
             '{"name": "find"} ' + PAIR),
            ("functions", {"functions": [TOOL["function"]], "messages": [ASK, say()]},
             '{"type": "function", "function": {"name": "find"}} ' + PAIR),
            ("an empty function", {"functions": [{}], "messages": [ASK, say()]},
             '{"type": "function", "function": {}} ' + PAIR),
            ("no tools", {"tools": "[]", "messages": [ASK, say()]}, PAIR),
            ("settings", {"chat_template_kwargs": {"effort": "low"}, "messages": [ASK, say()]},
             f"effort low. {PAIR}"),
            ("settings in JSON", {"chat_template_kwargs": '{"effort": "low"}',
             "messages": [ASK, say()]}, f"effort low. {PAIR}"),
            ("history", {"instruction": "and?", "input": "", "output": "no",
             "history": [["why?", "so"]]}, f"{PAIR} user and?. assistant [no.]"),
            ("history with a system", {"query": "and?", "response": "no", "system": "be",
             "history": [["why?", "so"]]}, f"system be. {PAIR} user and?. assistant [no.]"),
            ("history behind a system message", {"history": [["why?", "so"]],
             "messages": [{"role": "system", "content": "be"}, ASK, say()]},
             f"system be. {PAIR} {PAIR}"),
            ("history before a prompt", {"history": [["why?", "so"]], "prompt": [ASK],
             "completion": [say()]}, f"user why?. assistant so. {PAIR}"),
            ("arguments in JSON",
             {"messages": [ASK, call('{"n":1}'), {"role": "tool", "content": "7"}, say()]}, CALLED),
            ("an older call", {"messages": [
                ASK, say(None, function_call={"name": "find", "arguments": '{"n": 1}'}),
                {"role": "function", "name": "find", "content": "7"}, say()]}, CALLED),
            ("calls in JSON", {"messages": [ASK, say(None, tool_calls=(
                '[{"function": {"name": "find", "arguments": {"n": 1}}}]')),
                {"role": "tool", "content": "7"}, say()]}, CALLED),
            ("no calls", {"messages": [ASK, say(tool_calls=[])]}, PAIR),
            ("no calls in JSON", {"messages": [ASK, say(tool_calls="[]")]}, PAIR),
            ("calls of ms-swift", {"messages": [
                ASK, {"role": "tool_call", "content": '[{"name": "find", "arguments": {"n": 1}}]'},
                {"role": "tool_response", "content": "7"}, say()]}, CALLED),
            ("a call is context",
             {"messages": [ASK, call({"n": 1}, weight=0), {"role": "tool", "content": "7"}, say()]},
             CALLED.replace("[", "").replace(".] tool", ". tool").replace("so.", "[so.")),
            ("a typed null", {"messages": [ASK, call({"n": None}), say()]},
             'user why?. assistant [find {"n": null}.] assistant [so.]'),
            ("no arguments", {"messages": [ASK, call(""), say()]},
             "user why?. assistant [find {}.] assistant [so.]"),
            ("thinking", {"messages": [ASK, say(reasoning_content="hm ")]},
             "user why?. assistant [hm so.]"),
        )
    ],
)  # fmt: skip
def test_clear_loss_mask_of_a_row_is_read(row: dict[str, Any], text: str) -> None:
    assert shown(row) == text


@pytest.mark.parametrize(
    ("row", "how", "reason"),
    [
        ({"messages": [ASK, say(weight=0.5)]}, {}, "weight = 0.5"),
        ({"messages": [ASK, say(weight="0")]}, {}, "weight = 0"),
        ({"messages": [ASK, say(weight=0, train=True)]}, {}, "weight = 0, train = True"),
        ({"messages": [ASK, say(train_detail=[{"train": False}])]}, {}, "train_detail"),
        ({"messages": [ASK, say([{"text": "so", "train": False}])]}, {}, "flags for training"),
        ({"messages": [ASK, say(weight=0)]}, {}, "no answer of the assistant to train on"),
        ({"messages": [*FOUR[:3], say(loss=False)]}, {"train_on": "last_assistant"}, "no answer"),
        ({"messages": [{**ASK, "train": True}, say()]}, {}, r"messages\[0\] is flagged as trained"),
        ({"messages": [ASK, say(weight=0)]}, {"train_on": "all"}, "is flagged as context"),
        ({"system": "be", "messages": [{"role": "system", "content": "x"}, ASK, say()]}, {},
         "system column"),
        ({"system": "be", "system_prompt": "so", "messages": [ASK, say()]}, {}, "only one"),
        ({"system": ["be"], "messages": [ASK, say()]}, {}, "system is .* not a text"),
        ({"tools": "find(x)", "messages": [ASK, say()]}, {}, "tools is .* not a list or an object"),
        ({"tools": ["find"], "messages": [ASK, say()]}, {}, "a tool is .* not an object"),
        ({"tools": [TOOL], "functions": [TOOL], "messages": [ASK, say()]}, {}, "only one"),
        ({"chat_template_kwargs": ["low"], "messages": [ASK, say()]}, {}, "is .* not an object"),
        ({"chat_template_kwargs": {"tools": []}, "messages": [ASK, say()]}, {}, "rejected"),
        ({"history": [["why?"]], "messages": [ASK, say()]}, {}, "not a list of pairs"),
        ({"history": [ASK, say()], "query": "so?", "response": "x"}, {}, "not a list of pairs"),
        ({"messages": [ASK, call([["n", 1]])]}, {}, "arguments is .* not an object"),
        ({"messages": [ASK, call("find it")]}, {}, "arguments is .* not an object"),
        ({"messages": [ASK, say(None, tool_calls=["find"])]}, {}, "without a function name"),
        ({"messages": [ASK, call({}, function_call={"name": "find"})]}, {}, "only one"),
    ],
)  # fmt: skip
def test_unclear_loss_mask_of_a_row_is_rejected(row, how, reason) -> None:
    with pytest.raises(BadRowError, match=reason):
        shown(row, **how)


@pytest.mark.parametrize(
    ("off", "text"), [(1, LAST), (3, "assistant [bad.] user why?. assistant good.")]
)
def test_marked_answer_may_be_context(off: int, text: str) -> None:
    messages = [{**m, "weight": 0} if n == off else m for n, m in enumerate(FOUR)]
    assert shown({"messages": messages}, MARKED).endswith(text)


def test_jointly_marked_answers_are_trained_together() -> None:
    template = (
        "{{ messages[0].content + '<|im_end|>' }}{% generation %}{% for m in messages[1:] %}"
        "{{ m.content + '<|im_end|>' }}{% endfor %}{% endgeneration %}"
    )
    assert shown({"messages": [ASK, say("a"), say("b")]}, template) == "why?.[a.b.]"
    with pytest.raises(BadRowError, match="marked together"):
        shown({"messages": [ASK, say("a", weight=0), say("b")]}, template)


@pytest.mark.parametrize(
    ("written", "reads"),
    [
        ("c.function.arguments + ''", True),
        ("c.function.arguments + '' if m.content is none else ''", True),
        ("c.function.arguments", True),
        ("c.function.arguments | tojson", False),
        ("c.function.arguments['n']", False),
    ],
)
def test_tool_arguments_may_be_text_or_an_object(written, reads) -> None:
    """DeepSeek-R1's joins texts; jinja would write an object as Python does."""
    template = TOOLS.replace("c.function.arguments | tojson", f"({written})")
    made = ChatTemplate(template, {}, frozenset())
    assert made.parses_calls is not reads
    if reads:
        row = {"messages": [ASK, call('{"n":1}'), call({"n": "é"}), say()]}
        said = 'find {"n":1}.] assistant [find {"n": "é"}.]'
        assert shown(row, template) == f"user why?. assistant [{said} assistant [so.]"


MARKS = {
    "mistral": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
        "{% elif m.tool_calls %}{{ '[TOOL_CALLS] ' }}{% for c in m.tool_calls %}"
        "{{ c.function | tojson }}{% endfor %}{{ '</s>' }}{% elif m.role == 'tool' %}"
        "{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}{% else %}{{ m.content + '</s>' }}"
        "{% endif %}{% endfor %}",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    ),
    "deepseek": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content }}"
        "{% elif m.tool_calls %}{{ '<A><calls>' }}{% for c in m.tool_calls %}{{ '<call>' }}"
        "{{ c.function | tojson }}"
        "{{ '</call>' }}{% endfor %}{{ '</calls><end>' }}{% elif m.role == 'tool' %}{{ '<outs>' + "
        "m.content + '</outs>' }}{% else %}{{ '<A>' + m.content + '<end>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<A>' }}{% endif %}",
        ("<U>", "<A>", "<calls>", "</calls>", "<call>", "</call>", "<outs>", "</outs>", "<end>"),
    ),
}


@pytest.mark.parametrize("name", MARKS)
def test_tool_call_is_trained_without_the_next_header(name) -> None:
    source, special = MARKS[name]
    tool = {"role": "tool", "content": "find"}
    row = {"messages": [ASK, call({"find": "find"}), tool, call({"n": 1}), tool, say()]}
    made = ChatTemplate(source, {"eos_token": special[-1]}, frozenset(special))
    text, spans = generated_spans(made, read_conversation(row, "messages"), "assistant")
    opening, closing = {
        "mistral": ("[TOOL_CALLS] ", "</s>"), "deepseek": ("<calls><call>", "</call></calls><end>")
    }[name]  # fmt: skip
    assert [text[start:end] for start, end in spans] == [
        f'{opening}{{"name": "find", "arguments": {{"find": "find"}}}}{closing}',
        f'{opening}{{"name": "find", "arguments": {{"n": 1}}}}{closing}',
        f"so{special[-1]}",
    ]


def test_rows_keep_their_split() -> None:
    answer = {**SAY, "name": "x", "weight": 1}
    asked = {"role": "user", "content": [{"type": "text", "text": "why?"}]}
    row = {"messages": [asked, {**answer, "y": None}], "tools": '[{"name": "t"}]', "id": 7}
    said = [[ASK, answer], [{"name": "t"}]]
    assert json.loads(read_conversation(row, "messages").identity) == said


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    saved(replace(FAMILIES["chatml"], template=TOOLS), folder)
    return f"data.tokenizer={folder}"


def test_named_templates_need_a_choice(tmp_path) -> None:
    named = {"tool_use": TOOLS, "rag": TOOLS}
    saved(replace(FAMILIES["chatml"], template=named), tmp_path)
    file = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [ASK, say()]}] * 20)
    typed = ("data=chat", f"data.path={file}", f"data.tokenizer={tmp_path}")
    with pytest.raises(ConfigError) as raised:
        store_of(*typed)
    (problem,) = raised.value.problems
    assert problem.id == "missing_template"
    assert all(name in problem.why for name in named)
    assert "NAME" in str(problem.fix)
    assert store_of(*typed, "data.chat_template=rag").manifest.chat_template == TOOLS


@pytest.mark.parametrize("text", ["", "assistant"])
def test_file_that_is_no_template_is_named(tokenizer, tmp_path, text) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [ASK, say()]}] * 20)
    (wrong := tmp_path / "wrong.jinja").write_text(text)
    with pytest.raises(ConfigError) as raised:
        store_of("data=chat", f"data.path={file}", tokenizer, f"data.chat_template={wrong}")
    (problem,) = raised.value.problems
    assert (problem.id, problem.value) == ("wrong_template", str(wrong))


def test_ignored_keys_are_counted(tokenizer, tmp_path) -> None:
    one = {"messages": [{**ASK, "name": "Ann"}, say(id=7)], "source": "web", "score": None}
    read = {"messages": [ASK, say(reasoning_content="hm")], "tools": [TOOL], "system": "be"}
    settings = {"messages": [ASK, say()], "chat_template_kwargs": {"effort": "low", "date": "1"}}
    file = write_jsonl(tmp_path / "rows.jsonl", [one, one, read, settings] * 3)
    typed = ("data=chat", f"data.path={file}", tokenizer)
    assert sorted(store_of(*typed).manifest.ignored) == [
        "assistant.id (6 rows)", "chat_template_kwargs.date (3 rows)", "source (6 rows)",
        "user.name (6 rows)",
    ]  # fmt: skip
    plain = tmp_path / "plain.jinja"
    plain.write_text(
        FAMILIES["chatml"].template.replace("m in messages", "m in messages if m.role != 'system'")
    )
    found = store_of(*typed, f"data.chat_template={plain}").manifest.ignored
    assert {
        "assistant.reasoning_content (3 rows)",
        "system.content (3 rows)",
        "tools (3 rows)",
    } < set(found)


def test_nulls_added_by_arrow_are_ignored(tokenizer, tmp_path) -> None:
    rows = [
        {"messages": [ASK, call({"town" if n % 2 else "stock": f"{n}"}), say()], "tools": [TOOL],
         "chat_template_kwargs": {"effort" if n % 2 else "date": "x"}}
        for n in range(12)
    ]  # fmt: skip
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "hub").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "hub" / "train.parquet")
    stores = [
        store_of("data=chat", f"data.path={file}", tokenizer),
        store_of("data=chat", f"data.path={tmp_path}/rows.parquet", tokenizer),
        store_of("data=chat_hub", f"data.name={tmp_path}/hub", tokenizer),
    ]
    for name in ("tokens", "trained", "train"):
        first, *others = (store.array(name).tolist() for store in stores)
        assert others == [first, first], name


def test_long_rows_have_a_fix_with_their_length(tmp_path: Path) -> None:
    saved(FAMILIES["chatml"], tmp_path / "tokenizer")
    long = [{"role": "user", "content": "why? " * 40}, SAY]
    rows = [{"messages": long if n % 2 else [ASK, SAY]} for n in range(20)]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    typed = ("data=chat", f"data.path={file}", f"data.tokenizer={tmp_path / 'tokenizer'}")
    cut = store_of(*typed, "data.seq_len=64").manifest
    assert cut.num_bad == 10
    whole = store_of(*typed, cut.bad_fix).manifest
    assert whole.num_bad == 0


@pytest.mark.parametrize("more", [(), ("data.streaming=true",)], ids=["stored", "streamed"])
def test_hub_conversations_match_a_local_file(more, tmp_path: Path) -> None:
    saved(FAMILIES["chatml"], tmp_path / "tokenizer")
    rows = [{"id": n, "messages": [{**ASK, "content": f"{n}?"}, SAY]} for n in range(20)]
    (tmp_path / "mine").mkdir()
    file = write_jsonl(tmp_path / "mine" / "train.jsonl", rows)
    write_jsonl(tmp_path / "mine" / "test.jsonl", rows[:3])
    tokenizer = f"data.tokenizer={tmp_path / 'tokenizer'}"
    hub = store_of(
        "data=chat_hub", f"data.name={file.parent}", "data.eval_split=test", tokenizer, *more
    )
    held_out = f"data.eval_path={file.parent / 'test.jsonl'}"
    local = store_of("data=chat", f"data.path={file}", held_out, tokenizer, *more)
    assert hub.manifest.num_trained == local.manifest.num_trained > 0
    for name in ("tokens", "train", "evaluation"):
        assert hub.array(name).tolist() == local.array(name).tolist()


def test_instruction_table_is_read_as_conversations(tmp_path: Path) -> None:
    saved(FAMILIES["chatml"], tmp_path / "tokenizer")
    rows = [{"instruction": f"say {n}", "input": "", "output": str(n)} for n in range(20)]
    with (tmp_path / "rows.csv").open("w") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    write_jsonl(tmp_path / "rows.jsonl", rows)
    found = [
        store_of(
            "data=chat", f"data.path={tmp_path / name}", f"data.tokenizer={tmp_path / 'tokenizer'}"
        )
        for name in ("rows.csv", "rows.jsonl")
    ]
    assert found[0].manifest.num_rows == 20
    assert found[0].array("tokens").tolist() == found[1].array("tokens").tolist()
