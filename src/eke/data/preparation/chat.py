"""Chat rows: rendering of conversations by a chat template, and their trained tokens.

Templates may mark generated text (`{% generation %}`). Otherwise unique sentinels replace the texts
of the messages, and are located in the entire rendering. Rendering only the first messages is not
enough: the templates of Phi-3, Qwen3 and gpt-oss change earlier text when messages are added.
"""

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product, takewhile
from typing import Any

import numpy as np

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import first_line, format_number, override
from eke.data.preparation.conversations import (
    EMPTY,
    Conversation,
    Message,
    columns_of,
    read_conversation,
)
from eke.data.preparation.lines import BadRowError, Fields, TooLongError
from eke.data.preparation.tokenizers import Tokenizer
from eke.data.preparation.untrusted import RENDER_CHARACTERS, limited
from eke.data.sources import PrepareRequest

_Span = tuple[int, int]
"""Start and end of a text, in characters."""
_Places = Mapping[int, list[_Span]]
"""Number of a message -> spans of its texts in order."""

_THINKING = ("reasoning_content", "thinking", "reasoning")
"""Names of separate fields for an assistant's thinking."""

_TAGGED = re.compile(r"<think>(.*?)</think>(.*)", re.DOTALL)
_EMPTY_TAGS = re.compile(r"<(\w+)>\s*</\1>\s*")
_MARKERS = re.compile("<[|\uff5c][^<>\\s|\uff5c]+[|\uff5c]>")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template with the special tokens of its tokenizer."""

    source: str
    """Jinja source."""
    variables: Mapping[str, Any]
    """Special tokens by name (`eos_token`), for use in the template."""
    special: frozenset[str]
    name: str = ""
    """Name of the template in messages."""

    @cached_property
    def is_marked(self) -> bool:
        """True if the template marks generated text."""
        return bool(_GENERATION.search(self.source))

    @property
    def bos(self) -> str:
        """Text of the BOS token; empty without one."""
        return str(self.variables.get("bos_token") or "")

    @cached_property
    def parses_calls(self) -> bool:
        """True if arguments of a tool call may be an object. DeepSeek-R1's must be text."""
        texts, user = [], {"role": "user", "content": "?"}
        # R1's first version writes calls only if the content is null.
        for content, given in product(("", None), ({"k": 1}, '{"k": 1}')):
            function = {"name": "f", "arguments": given}
            call = {"id": "123456789", "type": "function", "function": function}
            said = {"role": "assistant", "content": content, "tool_calls": [call]}
            texts.append(self.text(Conversation([user, said])))
        # Without a filter, jinja writes an object as Python code.
        pairs = zip(texts[::2], texts[1::2], strict=True)
        return not any(b and (not a or "{'k'" in a) for a, b in pairs)

    @cached_property
    def generation_prompt(self) -> str:
        """Generation prompt of the template; empty without one."""
        _, end, due = self._probed
        same = _common_length(end, due)
        # Phi-3's rendering ends with a special token unless a generation prompt follows.
        inside = [at for at, word in self.specials(due) if at <= same < at + len(word)]
        return due[inside[0] if inside else same :]

    @cached_property
    def turn_starts(self) -> frozenset[str]:
        """Special tokens that begin a message or, in Llama 2, the next exchange."""
        before, end, _ = self._probed
        header = before.rpartition(end)[2] if end.strip() else before
        found = {self.bos} - {"", self.variables.get("eos_token")}
        for text in (self.generation_prompt, header):
            words = [word for _, word in self.specials(text) if word != self.bos]
            found |= set(words[:1])
        return frozenset(found)

    @cached_property
    def _probed(self) -> tuple[str, str, str]:
        """Text before a question, after it, and after it with a generation prompt."""
        user = {"role": "user", "content": _SENTINEL.format(0)}
        for messages in ([user], [{"role": "system", "content": "instruction"}, user]):
            try:
                before, _, end = self.render(Conversation(messages))[0].rpartition(user["content"])
                due, _ = self.render(Conversation(messages), prompt=True)
            except BadRowError:
                continue
            return before, end, due.rpartition(user["content"])[2]
        return "", "", ""

    @cached_property
    def _special_pattern(self) -> "re.Pattern[str]":
        words = sorted(self.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, words)) or r"(?!)")

    def specials(self, text: str) -> list[tuple[int, str]]:
        """Return positions and texts of the special tokens in a text."""
        return [(m.start(), m.group()) for m in self._special_pattern.finditer(text)]

    def render(self, conversation: Conversation, prompt: bool = False) -> tuple[str, list[_Span]]:
        """Return the text of a conversation and its spans marked as generated.

        `prompt` adds the generation prompt. BadRowError if the template rejects the conversation.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = limited(
                lambda: render_jinja_template(
                    [conversation.messages],
                    tools=conversation.tools,
                    chat_template=self.source,
                    return_assistant_tokens_mask=self.is_marked,
                    add_generation_prompt=prompt,
                    **{**self.variables, **conversation.settings},
                )
            )
        except MemoryError as error:
            why = "rendering one conversation needs more than 1 GiB of memory"
            fix = Fix("data.chat_template=FILE")
            problem = Problem("data.chat_template", self.name, why, fix, "costly_template")
            raise ConfigError(problem) from error
        except Exception as error:  # a template may fail in any way
            why = f"is rejected by the chat template: {first_line(error)[:200]}"
            raise BadRowError(why) from error
        (text,), spans = rendered
        if len(text) > RENDER_CHARACTERS:
            raise BadRowError(f"is rendered as {len(text)} characters, limit {RENDER_CHARACTERS}")
        return text, [(a, b) for a, b in spans[0]] if self.is_marked else []

    def text(self, conversation: Conversation) -> str:
        """Return the text of a conversation, "" if the template rejects it."""
        with suppress(BadRowError):
            return self.render(conversation)[0]
        return ""

    def shared(self, given: Conversation, count: int, text: str, span: _Span) -> int:
        """Count the characters after a span that stay if only the first messages are rendered."""
        less = self.text(replace(given, messages=given.messages[:count]))
        places = re.finditer(re.escape(text[slice(*span)]), less)
        return max((_common_length(less[m.end() :], text[span[1] :]) for m in places), default=0)


_SENTINEL = "Qz{}zQ"
"""Replacement of a text. Templates do not change letters and digits."""

_SENTINELS = re.compile(r"Qz(\d+)zQ")
_END = "\0"

_TRIMS: tuple[Callable[[str], str], ...] = (
    str, str.strip, str.lstrip, str.rstrip, lambda t: t.strip("\n"), lambda t: t.lstrip("\n"),
    lambda t: t.rstrip("\n"), lambda t: json.dumps(t, ensure_ascii=False)[1:-1],
)  # fmt: skip
"""Changes of texts by templates. Other changes are found by replacing single texts."""


@dataclass(frozen=True)
class _Text:
    """Replaceable text: a part of a field of a message, or the name of a tool call."""

    path: tuple[Any, ...]
    """Number of the message and keys to the field."""
    value: str
    start: int = 0
    """Position of the text in the field."""
    is_answer: bool = False


def _texts_of(messages: Sequence[Message]) -> list[_Text]:
    """Return all texts of a conversation, in the order in which templates write them."""
    found = []
    for number, message in enumerate(messages):
        for name in [name for name in _THINKING if message.get(name)][:1]:
            found.append(_Text((number, name), message[name]))
        content, start, answers = message["content"] or "", 0, message["role"] == "assistant"
        if answers and (tagged := _TAGGED.match(content)):
            start = tagged.start(2)
            found.append(_Text((number, "content"), tagged[1], tagged.start(1)))
        found.append(_Text((number, "content"), content[start:], start, answers))
        for index, call in enumerate(message.get("tool_calls") or ()):
            path = ("function", "name") if "function" in call else ("name",)
            name = call.get("function", call).get("name", "")
            found.append(_Text((number, "tool_calls", index, *path), name))
    return [text for text in found if text.value.strip()]


def _replaced(messages: Sequence[Message], texts: Mapping[int, _Text]) -> list[Message]:
    """Return the messages with numbered sentinels in place of texts."""
    copies = [dict(message) for message in messages]  # deep copies of the texts are slow
    for each in copies:
        if "tool_calls" in each:
            each["tool_calls"] = copy.deepcopy(each["tool_calls"])
    for number, text in sorted(texts.items(), reverse=True):
        *path, field = text.path
        holder: Any = copies
        for key in path:
            holder = holder[key]
        old, end = holder[field], text.start + len(text.value)
        holder[field] = old[: text.start] + _SENTINEL.format(number) + old[end:]
    return copies


def _find_spans(
    template: ChatTemplate, conversation: Conversation, rendered: str
) -> dict[int, list[_Span]]:
    """Return the spans of each message's texts in the rendering, omitting missing texts."""
    messages = conversation.messages
    texts = dict(enumerate(_texts_of(messages)))

    def render(some: Mapping[int, _Text]) -> str:
        return template.render(replace(conversation, messages=_replaced(messages, some)))[0]

    found = _aligned(render(texts), rendered, texts)
    if found is None:
        found = {}
        for number, text in texts.items():
            found |= _aligned(render({number: text}), rendered, {number: text}, trims=()) or {}
    places: dict[int, list[_Span]] = {}
    for number, text in texts.items():
        spans = found.get(number, [])
        if text.is_answer and len(spans) != 1:
            why = f"the answer occurs {len(spans)} times in the rendered text, not once"
            raise BadRowError(f"messages[{text.path[0]}]: {why}")
        places.setdefault(text.path[0], []).extend(spans[:1])
    return {message: sorted(spans) for message, spans in places.items() if spans}


def _aligned(
    skeleton: str, rendered: str, texts: Mapping[int, _Text], trims: Sequence[Any] = _TRIMS
) -> dict[int, list[_Span]] | None:
    """Return the spans of texts by sentinel number, None if the renderings do not match.

    `skeleton` is the rendering with sentinels. `trims` are possible changes of texts by templates,
    empty for a single text with any change.
    """
    pieces, rendered = _SENTINELS.split(skeleton + _END), rendered + _END
    if not rendered.startswith(pieces[0]):
        return None
    at = len(pieces[0])
    found: dict[int, list[_Span]] = {}
    for number, after in zip(map(int, pieces[1::2]), pieces[2::2], strict=True):
        values = [trim(texts[number].value) for trim in trims]
        if not trims and len(pieces) == 3:
            values = [rendered[at : len(rendered) - len(after)]]
        value = next((v for v in values if rendered.startswith(v + after, at)), None)
        if value is None:
            return None
        found.setdefault(number, []).append((at, at + len(value)))
        at += len(value) + len(after)
    return found if at == len(rendered) else None


def _answers(given: Conversation, train_on: str) -> list[int]:
    said = [n for n, message in enumerate(given.messages) if message["role"] == "assistant"]
    on = {n for n, flag in enumerate(given.flags) if flag}
    off = {n for n, flag in enumerate(given.flags) if flag is False}
    if wrong := off if train_on == "all" else on.difference(said):
        kind = "context" if train_on == "all" else "trained"
        raise BadRowError(f"messages[{min(wrong)}] is flagged as {kind}, but train_on={train_on}")
    found = [n for n in said if n in on or n >= given.first_trained]
    found = found[-1:] if train_on == "last_assistant" else found
    found = [n for n in found if n not in off]
    if not found and train_on != "all":
        raise BadRowError("has no answer of the assistant to train on")
    return found


def generated_spans(
    template: ChatTemplate, conversation: Conversation, train_on: str
) -> tuple[str, list[_Span]]:
    """Return the rendered conversation and its trained spans; BadRowError if ambiguous."""
    text, marked = template.render(conversation)
    messages = conversation.messages
    answers = _answers(conversation, train_on)
    if train_on == "all":
        return text, [(0, len(text))]
    places = _find_spans(template, conversation, text)
    if missing := [n for n in answers if n not in places]:
        raise BadRowError(f"messages[{missing[0]}] is not in the rendered text")
    if not template.is_marked:
        return text, [_generated_span(template, text, places, n, conversation) for n in answers]
    said = {n for n, message in enumerate(messages) if message["role"] == "assistant"}
    spans = [span for span in marked if _owner(places, span, said) in answers]
    for number in said.difference(answers) & {*places}:
        if any(start <= places[number][0][0] < end for start, end in spans):
            raise BadRowError(f"messages[{number}] is marked together with an answer to train on")
    if not spans:
        raise BadRowError("has no text marked as generated by the chat template")
    starts = {start for start, _ in spans}  # an answer may be marked in parts
    for answer in [text[:end].rstrip() for _, end in spans if end not in starts]:
        if not answer.endswith(tuple(template.special)):
            raise BadRowError(f"has an answer without end-of-turn token: {answer[-30:]!r}")
    return text, spans


def _owner(places: _Places, span: _Span, said: Container[int]) -> int | None:
    """Return the message of a marked span: the last before its end if an answer, else the next."""
    before = max((n for n, spans in places.items() if spans[0][0] < span[1]), default=-1)
    return before if before in said else min((n for n in places if n > before), default=None)


def _generated_span(
    template: ChatTemplate, text: str, places: _Places, number: int, of: Conversation
) -> _Span:
    """Return the generated span of a message, from the end of its header to the end of turn."""
    first, last = places[number][0][0], places[number][-1][1]
    spans = sorted(s[-1] for n, s in places.items() if n < number and s[-1][1] <= first)
    before = spans[-1][1] if spans else 0
    after = min((spans[0][0] for n, spans in places.items() if n > number), default=len(text))
    start = _header_end(template, text, before, first)
    calls = bool(of.messages[number].get("tool_calls"))
    if calls:  # may contain special tokens, and the next header may begin with another token
        if not start and spans and (shared := template.shared(of, number, text, spans[-1])):
            start = before + shared  # there is no header, as in Mistral's template
        own = last + template.shared(of, number + 1, text, (first, last))
        after = min(after, own) if template.specials(text[last:own]) else after
    # Empty thinking is context, also after the header.
    empty = (m.end() for m in _EMPTY_TAGS.finditer(text, before, first))
    start = max([start or first, *empty])
    found = template.specials(text[last:after])
    ends = [*takewhile(lambda each: each[1] not in template.turn_starts, found)]
    if not ends:
        why = "no special token ends the answer, so the model would not learn to stop"
        raise BadRowError(f"messages[{number}]: {why}")
    at, word = ends[-1 if calls else 0]
    return start, last + at + len(word)


def _header_end(template: ChatTemplate, text: str, before: int, first: int) -> int:
    """Return the end of the header of the assistant's turn, 0 without a header."""
    prompt = template.generation_prompt
    words = [word for _, word in template.specials(prompt) if word != template.bos]
    at = text.rfind(words[0] if words else prompt, before, first)
    return at + _common_length(text[at:first], prompt) if prompt and at >= 0 else 0


def _common_length(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def encode_conversation(
    template: ChatTemplate, tokenizer: Tokenizer, given: Conversation, train_on: str, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of a conversation and the mask of trained tokens, (tokens,) each.

    The ids equal `apply_chat_template(tokenize=True)`. BadRowError if the trained tokens are
    ambiguous or an answer exceeds `limit`.
    """
    text, spans = generated_spans(template, given, train_on)
    encoded = tokenizer.encode([text])[0]
    assert encoded.ends is not None, "only tokenizers with offsets are accepted"
    ids, ends = encoded.ids, encoded.ends
    starts = np.concatenate([[0], np.maximum.accumulate(ends)])[:-1]
    mask = np.zeros(len(ids), bool)
    for start, end in spans:
        mask |= (ends > start) & (starts < end)
    if not mask.any():
        raise BadRowError("has no token to train on")
    if mask.all() and train_on != "all":
        raise BadRowError("would be trained completely, including the questions")
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.vocabulary.bos:
        raise BadRowError("begins with two BOS tokens, both from the template")
    if mask[limit:].any():
        raise TooLongError(len(ids), limit)
    return ids[:limit], mask[:limit]


_SETTINGS = "chat_template_kwargs"


def _without(given: Conversation, name: str) -> Conversation:
    """Return a conversation without its tools, a setting, or a key of one role's messages."""
    owner, _, left = name.partition(".")
    if owner == "tools":
        return replace(given, tools=None)
    if owner == _SETTINGS:
        return replace(given, settings={k: v for k, v in given.settings.items() if k != left})
    messages = [
        {k: v for k, v in m.items() if (m["role"], k) != (owner, left)} for m in given.messages
    ]
    return replace(given, messages=messages)


class ChatRows:
    """Reader of conversations from rows."""

    def __init__(self, request: PrepareRequest, tokenizer: Tokenizer) -> None:
        self.request, self.tokenizer = request, tokenizer
        self.column = request.messages
        self.num_trained, self.ends, self.ignored = 0, set[int](), Counter[str]()
        # Keys that the template reads, and the number of rows in which each key was tested.
        self._read, self._tried = set[str](), Counter[str]()
        if not tokenizer.knows_ends:
            why = "has no character offsets of tokens, which are needed to find answers"
            fix = Fix("data.tokenizer=FOLDER", remark="one with a tokenizer.json")
            problem = Problem("data.tokenizer", request.tokenizer, why, fix, "wrong_tokenizer")
            raise ConfigError(problem)
        chosen = request.chat_template
        name = "of a file" if "{" in chosen else f"{chosen or 'default'} of {request.tokenizer}"
        special = frozenset(tokenizer.special_texts)
        self.template = ChatTemplate(self._source(), tokenizer.special_names, special, name)

    def _source(self) -> str:
        named, chosen = self.tokenizer.chat_templates, self.request.chat_template
        if "{" in chosen:
            return chosen
        if (chosen or "default") in named:
            return named[chosen or "default"]
        why, names = f"{self.request.tokenizer} has no chat template", ", ".join(named) or "none"
        fix = Fix("data.chat_template=FILE", remark="a template in jinja")
        if chosen:
            why = f"is neither a file nor one of the tokenizer's templates ({names})"
        elif named:
            why = f"{self.request.tokenizer} has no default chat template. Its templates: {names}"
            fix = Fix("data.chat_template=NAME", remark="the name of a template")
        raise ConfigError(Problem("data.chat_template", chosen, why, fix, "missing_template"))

    def take(self, row: Mapping[str, Any]) -> Fields:
        """Read and tokenize the conversation of a row."""
        if self.column is None:
            self.column = self._find(row)
        given = read_conversation(row, self.column, self.template.parses_calls)
        ids, trained = encode_conversation(
            self.template, self.tokenizer, given, self.request.train_on, self.request.seq_len
        )
        self._count_ignored(given)
        self.num_trained += int(trained[1:].sum())  # the first token is not a target
        self.ends.add(int(ids[trained][-1]))
        return Fields((given.identity,), ids=ids, trained=trained)

    def _count_ignored(self, given: Conversation) -> None:
        """Count the keys of a row that do not change its text."""
        keys = {
            f"{message['role']}.{key}" for message in given.messages
            for key, value in message.items() if key != "role" and value not in EMPTY
        }  # fmt: skip
        keys |= {f"{_SETTINGS}.{key}" for key in given.settings}
        keys |= {"tools"} if given.tools else set()
        keys -= self._read
        if tried := [key for key in keys if self._tried[key] < 100]:  # enough rows per key
            text = self.template.text(given)
            self._read |= {key for key in tried if self.template.text(_without(given, key)) != text}
            self._tried.update(tried)
        self.ignored.update(sorted(keys | given.ignored))

    def _find(self, row: Mapping[str, Any]) -> str:
        found = columns_of(row)
        if len(found) == 1:
            return found[0]
        names = ", ".join(map(str, row)) or "none"
        why = f"no column of {self.request.path} has conversations. Columns: {names}"
        fixes = Fix("data.messages=COLUMN", remark="or data=jsonl or hub for texts")
        if found:
            why = f"several columns have conversations: {', '.join(found)}"
            fixes = Fix(override("data.messages", found[0]))
        raise ConfigError(Problem("data.messages", "null", why, fixes, "unknown_column"))

    def found(self) -> dict[str, Any]:
        """Return the manifest's statistics of conversations."""
        template, ends = self.template, sorted(self.ends)
        words = zip(ends, self.tokenizer.decode(ends), strict=True)
        ignored = [each for each in self.ignored.most_common() if each[0] not in self._read]
        return {
            "num_trained": self.num_trained,
            "chat_template": template.source,
            "ignored": tuple(f"{key} ({format_number(n, 'row')})" for key, n in ignored),
            "ends_of_turn": tuple(end for end, word in words if word in template.special),
            # Markers (`<|user|>`) that are not special tokens: the tokenizer splits them.
            "plain_markers": tuple(sorted({*_MARKERS.findall(template.source)} - template.special)),
        }
