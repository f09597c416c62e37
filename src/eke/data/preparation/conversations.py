"""Conversations of rows, as OpenAI, ShareGPT, Alpaca, axolotl, ms-swift and TRL write them."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from eke.data.preparation.lines import BadRowError, check_unicode, parse_list

Message = dict[str, Any]

_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant", "function_call": "assistant", "tool_call": "assistant", "tool": "tool",
    "function": "tool", "ipython": "tool", "observation": "tool", "function_response": "tool",
    "tool_response": "tool",
}  # fmt: skip
"""Names of roles in OpenAI's, ShareGPT's and ms-swift's formats -> role of a template."""

_INSTRUCTIONS = ("system", "developer")

_PROMPT_OF = {"completion": "prompt", "output": "instruction", "response": "query"}
"""Usual columns of an answer -> of its question."""

_BESIDE = {"system", "system_prompt", "tools", "functions", "history", "chat_template_kwargs"}
"""Columns that are read with those of the messages."""

_FLAGS = frozenset(("weight", "train", "train_on", "training", "trainable", "loss", "loss_scale",
                    "train_detail", "training_detail"))  # fmt: skip
"""Keys of a message that say whether it is trained: OpenAI's, axolotl's and ms-swift's."""

_CALLS = ("tool_calls", "function_call")

_KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}

EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values that say nothing."""


@dataclass(frozen=True)
class Conversation:
    """Messages as templates read them."""

    messages: list[Message]
    tools: list[Any] | None = None
    first_trained: int = 0
    """Messages before this one are a prompt."""
    flags: Sequence[bool | None] = ()
    """Whether each message is to be trained; None where the row does not say."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template."""
    identity: str = ""
    """Conversations with the same one are in the same split."""
    ignored: frozenset[str] = frozenset()
    """Columns of the row that are not read."""


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and ("role" in m or "from" in m) for m in value)
    )


def columns_of(row: Mapping[str, Any]) -> list[str]:
    """Candidates for `data.messages` in a row: columns of messages, or of question and answer."""
    names = [name for name in row if name not in _BESIDE]
    found = [name for name in names if is_conversation(parse_list(row[name]))]
    pairs = [a for a, q in _PROMPT_OF.items() if None not in (row.get(q), row.get(a))]
    # Lists of messages in `prompt` and `completion` are two halves of one conversation.
    return pairs if pairs and set(found) <= {*_PROMPT_OF, *_PROMPT_OF.values()} else found


def without_nulls(value: Any) -> Any:
    """A row without the nulls of Arrow, which gives each object the keys of all of them."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def read_conversation(
    row: Mapping[str, Any], column: str, parses_calls: bool = True
) -> Conversation:
    """The conversation of a row; `column` has messages, or answers (`completion`, `output`)."""
    if row.get(column) is None:
        raise BadRowError(f"has no {column}")
    question, asked = _PROMPT_OF.get(column, ""), None
    if question not in row and is_conversation(parse_list(row[column])):
        question = ""
    if question and (asked := row.get(question)) is None:
        raise BadRowError(f"has {column} and no {question}")
    used = {column, question, *_BESIDE}
    if column == "output" and isinstance(asked, str):
        used.add("input")
        asked = f"{asked}\n{row['input']}" if row.get("input") else asked
    prompt = _messages(asked, question, "user") if question else []
    said = _messages(row[column], column, "assistant" if question else "")
    turns = [*prompt, *said]
    at = int(turns[0]["role"] in _INSTRUCTIONS)
    turns[at:at] = _earlier(row)
    if system := _column(row, (str,), "system", "system_prompt"):
        if any(message["role"] in _INSTRUCTIONS for message in turns):
            raise BadRowError("has a system message, and another one in a column")
        turns.insert(0, {"role": "system", "content": system})
    tools = _tools(row)
    return Conversation(
        [_with_calls(message, number, parses_calls) for number, message in enumerate(turns)],
        tools,
        len(turns) - len(said) if isinstance(parse_list(asked), list) else 0,
        [_flag(message, number) for number, message in enumerate(turns)],
        _column(row, (dict,), "chat_template_kwargs") or {},
        json.dumps([turns, tools], sort_keys=True, default=str),
        frozenset(name for name, value in row.items() if name not in used and value not in EMPTY),
    )


def _column(row: Mapping[str, Any], kinds: tuple[type, ...], *names: str) -> Any:
    """What one of these columns has; None where all are empty."""
    found = [name for name in names if row.get(name) not in EMPTY]
    if len(found) > 1:
        raise BadRowError(f"has {' and '.join(found)}, of which one is read")
    return _parsed(row[found[0]], found[0], *kinds) if found else None


def _parsed(value: Any, place: str, *kinds: type) -> Any:
    """A value of one of these kinds, or what a text in JSON stands for; None where it is empty."""
    found = value
    if isinstance(value, str) and str not in kinds:
        with suppress(ValueError, RecursionError):
            found = json.loads(value.strip() or "null")
    if found not in EMPTY and not isinstance(found, kinds):
        wanted = " or ".join(_KINDS[kind] for kind in kinds)
        raise BadRowError(f"{place} is {str(value)[:30]!r}, not {wanted}")
    return None if found in EMPTY else found


def _earlier(row: Mapping[str, Any]) -> list[Message]:
    """The turns of `history`: pairs of a question and its answer (LLaMA-Factory, ms-swift)."""
    history = _column(row, (list,), "history") or []
    if any(not isinstance(pair, list) or [*map(type, pair)] != [str, str] for pair in history):
        raise BadRowError("history is not a list of pairs of texts")
    turns = [zip(("user", "assistant"), pair, strict=True) for pair in history]
    return [_message({"role": r, "content": c}, "history") for pair in turns for r, c in pair]


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    found = _column(row, (list, dict), "tools", "functions") or []
    found = [found] if isinstance(found, dict) else found
    tools = [_parsed(tool, "a tool", dict) or {} for tool in found]
    if row.get("functions") not in EMPTY:  # OpenAI's older form
        tools = [t if "function" in t else {"type": "function", "function": t} for t in tools]
    return tools or None


def _messages(value: Any, column: str, role: str = "") -> list[Message]:
    """A list of messages; a text is one message of `role`."""
    value = parse_list(value)
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if not is_conversation(value):
        raise BadRowError(f"{column} is not a list of messages with role and content")
    return [_message(m, f"{column}[{n}]") for n, m in enumerate(value)]


def _message(given: Mapping[str, Any], place: str) -> Message:
    name = given.get("role", given.get("from"))
    role = _ROLES.get(str(name).lower())
    if role is None:
        raise BadRowError(f"{place} has the unknown role {name!r}")
    # Data sets with one type a column fill missing fields with null.
    message = {k: v for k, v in given.items() if v is not None and k not in ("from", "value")}
    content = given.get("content", given.get("value"))
    if isinstance(content, list):
        if any(not isinstance(c, dict) or not isinstance(c.get("text"), str) for c in content):
            raise BadRowError(f"{place} has content other than text")
        if any(key in _FLAGS for part in content for key in part):
            raise BadRowError(f"{place} has parts that say whether they are trained")
        others = {k: v for part in content for k, v in part.items() if k not in ("type", "text")}
        message |= {f"content.{key}": value for key, value in others.items()}
        content = "".join(c["text"] for c in content)
    if content is not None and not isinstance(content, str):
        raise BadRowError(f"{place} has no text as its content")
    if name in ("function_call", "tool_call"):
        found = _parsed(content, place, dict, list)
        each = found if isinstance(found, list) else [found]
        message["tool_calls"] = [{"type": "function", "function": call} for call in each]
        content = ""
    calls = role == "assistant" and any(_parsed(message.get(k), place, list, dict) for k in _CALLS)
    if not content and role == "assistant" and not calls:
        raise BadRowError(f"{place} is an empty answer")
    check_unicode(content or "", place)
    return {**message, "role": role, "content": content if calls else content or ""}


def _with_calls(message: Message, number: int, parses: bool) -> Message:
    """A message with its tool calls as templates read them; `parses` arguments that are JSON."""
    others = {k: v for k, v in message.items() if k not in _FLAGS and k not in _CALLS}
    place = f"messages[{number}]"
    older = _parsed(message.get("function_call"), f"{place}.function_call", dict)  # of OpenAI
    calls = _parsed(message.get("tool_calls"), f"{place}.tool_calls", list)
    if older and calls:
        raise BadRowError(f"{place} has tool_calls and function_call, of which one is read")
    made = []
    for call in [{"type": "function", "function": older}] if older else calls or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRowError(f"{place} has a tool call without the name of a function")
        given = function.get("arguments")
        if parses:
            given = _parsed(given, f"{place}.tool_calls: arguments", dict) or {}
        elif not isinstance(given, str):
            given = json.dumps(given or {}, ensure_ascii=False)
        function = {**function, "arguments": given}
        made.append({**call, "function": function} if "function" in call else function)
    return {**others, "tool_calls": made} if made else others


def _flag(message: Message, number: int) -> bool | None:
    """Whether a message is to be trained; None if it does not say."""
    found = {k: v for k, v in message.items() if k in _FLAGS and v not in EMPTY}
    if any(value not in (0, 1) for value in found.values()) or len({*found.values()}) > 1:
        said = ", ".join(f"{key} = {str(value)[:30]}" for key, value in found.items())
        raise BadRowError(f"messages[{number}] is neither trained nor context: {said}")
    return bool(next(iter(found.values()))) if found else None
