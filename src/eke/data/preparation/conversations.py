"""Conversations in rows of OpenAI, ShareGPT, Alpaca, axolotl, ms-swift and TRL formats."""

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
"""Role in OpenAI's, ShareGPT's and ms-swift's formats -> role in a template."""

_INSTRUCTIONS = ("system", "developer")

_PROMPT_OF = {"completion": "prompt", "output": "instruction", "response": "query"}
"""Common column of answers -> column of the questions."""

_BESIDE = {"system", "system_prompt", "tools", "functions", "history", "chat_template_kwargs"}
"""Columns that are read in addition to the messages."""

_FLAGS = frozenset(("weight", "train", "train_on", "training", "trainable", "loss", "loss_scale",
                    "train_detail", "training_detail"))  # fmt: skip
"""Keys of a message for whether it is trained, in OpenAI's, axolotl's and ms-swift's formats."""

_CALLS = ("tool_calls", "function_call")

_KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}

EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values that count as missing."""


@dataclass(frozen=True)
class Conversation:
    """Messages in the form that templates read."""

    messages: list[Message]
    tools: list[Any] | None = None
    first_trained: int = 0
    """Number of the first message after the prompt."""
    flags: Sequence[bool | None] = ()
    """True if each message is trained, None without a flag in the row."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template (`chat_template_kwargs`)."""
    identity: str = ""
    """Key of the split: equal conversations are in the same split."""
    ignored: frozenset[str] = frozenset()
    """Non-empty columns of the row that are not read."""


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and ("role" in m or "from" in m) for m in value)
    )


def columns_of(row: Mapping[str, Any]) -> list[str]:
    """Return the candidates for `data.messages` in a row: columns of messages or of answers."""
    names = [name for name in row if name not in _BESIDE]
    found = [name for name in names if _is_conversation(parse_list(row[name]))]
    pairs = [a for a, q in _PROMPT_OF.items() if None not in (row.get(q), row.get(a))]
    # Lists of messages in `prompt` and `completion` are two halves of one conversation.
    return pairs if pairs and set(found) <= {*_PROMPT_OF, *_PROMPT_OF.values()} else found


def without_nulls(value: Any) -> Any:
    """Remove nulls from a row: Arrow gives every object the keys of all objects."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def read_conversation(
    row: Mapping[str, Any], column: str, parses_calls: bool = True
) -> Conversation:
    """Return the conversation of a row; `column` has messages or answers (`completion`)."""
    if row.get(column) is None:
        raise BadRowError(f"has no {column}")
    question, asked = _PROMPT_OF.get(column, ""), None
    if question not in row and _is_conversation(parse_list(row[column])):
        question = ""
    if question and (asked := row.get(question)) is None:
        raise BadRowError(f"has {column} but no {question}")
    # Alpaca's columns: the input continues the instruction.
    used = {column, question, *_BESIDE}
    if column == "output" and isinstance(asked, str):
        used.add("input")
        asked = f"{asked}\n{row['input']}" if row.get("input") else asked
    prompt = _messages(asked, question, "user") if question else []
    said = _messages(row[column], column, "assistant" if question else "")
    turns = [*prompt, *said]
    at = int(turns[0]["role"] in _INSTRUCTIONS)
    turns[at:at] = _read_history(row)
    if system := _column(row, (str,), "system", "system_prompt"):
        if any(message["role"] in _INSTRUCTIONS for message in turns):
            raise BadRowError("has a system message and also a system column")
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
    """Return the value of the only non-empty column of `names`, None if all are empty."""
    found = [name for name in names if row.get(name) not in EMPTY]
    if len(found) > 1:
        raise BadRowError(f"has {' and '.join(found)}, only one is allowed")
    return _parsed(row[found[0]], found[0], *kinds) if found else None


def _parsed(value: Any, place: str, *kinds: type) -> Any:
    """Return a value of one of `kinds`, decoded from JSON if it is text, or None if it is empty."""
    found = value
    if isinstance(value, str) and str not in kinds:
        with suppress(ValueError, RecursionError):
            found = json.loads(value.strip() or "null")
    if found not in EMPTY and not isinstance(found, kinds):
        wanted = " or ".join(_KINDS[kind] for kind in kinds)
        raise BadRowError(f"{place} is {str(value)[:30]!r}, not {wanted}")
    return None if found in EMPTY else found


def _read_history(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of `history`, pairs of question and answer (LLaMA-Factory, ms-swift)."""
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
    """Return a list of messages, a text as one message of `role`."""
    value = parse_list(value)
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if not _is_conversation(value):
        raise BadRowError(f"{column} is not a list of messages with role and content")
    return [_message(m, f"{column}[{n}]") for n, m in enumerate(value)]


def _message(given: Mapping[str, Any], place: str) -> Message:
    name = given.get("role", given.get("from"))
    role = _ROLES.get(str(name).lower())
    if role is None:
        raise BadRowError(f"{place} has the unknown role {name!r}")
    # Datasets with one type per column fill missing fields with null.
    message = {k: v for k, v in given.items() if v is not None and k not in ("from", "value")}
    content = given.get("content", given.get("value"))
    if isinstance(content, list):
        if any(not isinstance(c, dict) or not isinstance(c.get("text"), str) for c in content):
            raise BadRowError(f"{place} has content other than text")
        if any(key in _FLAGS for part in content for key in part):
            raise BadRowError(f"{place} has flags for training in parts of its content")
        others = {k: v for part in content for k, v in part.items() if k not in ("type", "text")}
        message |= {f"content.{key}": value for key, value in others.items()}
        content = "".join(c["text"] for c in content)
    if content is not None and not isinstance(content, str):
        raise BadRowError(f"{place} has content other than text")
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
    """Return a message with tool calls for templates; `parses` decodes arguments from JSON."""
    others = {k: v for k, v in message.items() if k not in _FLAGS and k not in _CALLS}
    place = f"messages[{number}]"
    older = _parsed(message.get("function_call"), f"{place}.function_call", dict)  # OpenAI's
    calls = _parsed(message.get("tool_calls"), f"{place}.tool_calls", list)
    if older and calls:
        raise BadRowError(f"{place} has tool_calls and function_call, only one is allowed")
    made = []
    for call in [{"type": "function", "function": older}] if older else calls or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRowError(f"{place} has a tool call without a function name")
        given = function.get("arguments")
        if parses:
            given = _parsed(given, f"{place}.tool_calls: arguments", dict) or {}
        elif not isinstance(given, str):
            given = json.dumps(given or {}, ensure_ascii=False)
        function = {**function, "arguments": given}
        made.append({**call, "function": function} if "function" in call else function)
    return {**others, "tool_calls": made} if made else others


def _flag(message: Message, number: int) -> bool | None:
    """Return whether a message is flagged as trained, None without a flag."""
    found = {k: v for k, v in message.items() if k in _FLAGS and v not in EMPTY}
    if any(value not in (0, 1) for value in found.values()) or len({*found.values()}) > 1:
        said = ", ".join(f"{key} = {str(value)[:30]}" for key, value in found.items())
        raise BadRowError(f"messages[{number}] has invalid or contradictory flags: {said}")
    return bool(next(iter(found.values()))) if found else None
