"""Chat templates as their models' documentation describes them, and an oracle that knows none.

Each family has a template in jinja and a function that writes the same conversation piece by piece,
each piece with whether the assistant generates it. Formats were read on 2026-11-26 at the places
that `source` names; templates and pieces are written for these tests.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizer_kinds import byte_tokenizer, unigram_tokenizer

Message = dict[str, Any]
Pieces = list[tuple[str, bool]]


@dataclass(frozen=True)
class Family:
    """One documented format."""

    source: str
    template: str
    specials: tuple[str, ...]
    write: Callable[[list[Message]], Pieces]
    bos: str = ""
    eos: str = ""
    system: bool = True
    thinking: bool = False
    tools: bool = False
    bytes: bool = True
    """Byte-level BPE; otherwise SentencePiece's kind."""


def _each(bos: str, one: Callable[[Message, bool], Pieces]) -> Callable[[list[Message]], Pieces]:
    """A format in which messages follow each other."""

    def write(messages: list[Message]) -> Pieces:
        pieces: Pieces = [(bos, False)]
        for number, message in enumerate(messages):
            pieces += one(message, number == len(messages) - 1)
        return pieces

    return write


def _headed(bos: str, header: str, end: str, behind: str = "", strip: bool = False, **names: str):
    """`header` with the role, the text, `end` and what is `behind` it."""

    def one(message: Message, _: bool) -> Pieces:
        role, text = message["role"], message["content"]
        text = text.strip() if strip else text
        mine = role == "assistant"
        return [(header.format(names.get(role, role)), False), (text + end, mine), (behind, False)]

    return _each(bos, one)


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>"
    "\n\n' + m.content|trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set first = '<<SYS>>\n' +"
    " messages[0].content + '\n<</SYS>>\n\n' %}{% else %}{% set rest = messages %}{% set first = ''"
    " %}{% endif %}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% if m.role == 'user' "
    "%}{{ bos_token + '[INST] ' + ((first if loop.first else '') + m.content).strip() + ' [/INST]' "
    "}}{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def _llama_2(messages: list[Message]) -> Pieces:
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    rest = messages[system is not None :]
    pieces: Pieces = []
    for number, message in enumerate(rest):
        text = message["content"]
        if message["role"] == "user":
            if number == 0 and system is not None:
                text = f"<<SYS>>\n{system}\n<</SYS>>\n\n{text}"
            pieces += [(f"<s>[INST] {text.strip()} [/INST]", False)]
        else:
            pieces += [(" ", False), (f"{text.strip()} </s>", True)]
    return pieces


MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + "
    "'\n\n' %}{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}"
    "{% endif %}{% for m in rest %}{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.last or "
    "(loop.index0 == rest|length - 2) else '') + m.content + ' [/INST]' }}{% else %}{{ ' ' + "
    "m.content + eos_token }}{% endif %}{% endfor %}"
)


def _mistral(messages: list[Message]) -> Pieces:
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    rest = messages[system is not None :]
    pieces: Pieces = [("<s>", False)]
    for number, message in enumerate(rest):
        if message["role"] == "user":
            last = number in (len(rest) - 1, len(rest) - 2)
            before = f"{system}\n\n" if system is not None and last else ""
            pieces += [(f"[INST] {before}{message['content']} [/INST]", False)]
        else:
            pieces += [(" ", False), (message["content"] + "</s>", True)]
    return pieces


QWEN_2 = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are Qwen, created by Alibaba "
    "Cloud. You are a helpful assistant.<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + "
    "'\n</tool_response><|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    '{% for c in m.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", '
    "\"arguments\": ' + c.function.arguments|tojson + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _json(value: Any) -> str:
    """As transformers' `tojson` writes it."""
    return json.dumps(value, ensure_ascii=False)


def _calls(message: Message) -> str:
    return "".join(
        f'\n<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": '
        f"{_json(call['function']['arguments'])}}}\n</tool_call>"
        for call in message.get("tool_calls", ())
    )


def _qwen_2(messages: list[Message]) -> Pieces:
    pieces: Pieces = []
    if messages[0]["role"] != "system":
        default = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        pieces += [(f"<|im_start|>system\n{default}<|im_end|>\n", False)]
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            response = f"<tool_response>\n{text}\n</tool_response>"
            pieces += [(f"<|im_start|>user\n{response}<|im_end|>\n", False)]
            continue
        pieces += [(f"<|im_start|>{role}\n", False)]
        pieces += [(text + _calls(message) + "<|im_end|>", role == "assistant"), ("\n", False)]
    return pieces


QWEN_3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% set content = m.content %}{% if m.role == 'assistant' %}{% set thinking = "
    "m.reasoning_content or '' %}{% if '</think>' in content %}{% set thinking = "
    "content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last and (loop.last or thinking) %}"
    "{{ '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{% else %}"
    "{{ content }}{% endif %}{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + "
    "content + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _thought(message: Message) -> tuple[str, str]:
    """Thinking and answer of a message, whichever way it has them."""
    text = message["content"]
    if "</think>" in text:
        thinking, _, answer = text.removeprefix("<think>").partition("</think>")
        return thinking.strip("\n"), answer.lstrip("\n")
    return message.get("reasoning_content", "").strip("\n"), text


def _qwen_3(messages: list[Message]) -> Pieces:
    last_user = max(n for n, m in enumerate(messages) if m["role"] == "user")
    pieces: Pieces = []
    for number, message in enumerate(messages):
        role = message["role"]
        if role != "assistant":
            pieces += [(f"<|im_start|>{role}\n{message['content']}<|im_end|>\n", False)]
            continue
        thinking, answer = _thought(message)
        pieces += [("<|im_start|>assistant\n", False)]
        if number > last_user and (number == len(messages) - 1 or thinking):
            answer = answer.lstrip("\n")
            pieces += [(f"<think>\n{thinking}\n</think>\n\n", bool(thinking.strip()))]
        pieces += [(answer + "<|im_end|>", True), ("\n", False)]
    return pieces


GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not "
    "supported') }}{% endif %}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == "
    "'assistant' else m.role) + '\n' + m.content|trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

PHI_3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


def _phi_3(messages: list[Message]) -> Pieces:
    written = _headed("", "<|{}|>\n", "<|end|>", "\n")(messages)
    return [*written, ("<|endoftext|>", False)]


PHI_4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)

ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

USER, ASSISTANT, SENTENCE, BEGIN = (
    f"<\uff5c{name}\uff5c>"
    for name in ("User", "Assistant", "end\u2581of\u2581sentence", "begin\u2581of\u2581sentence")
)

DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role"
    f" == 'user' %}}{{{{ '{USER}' + m.content }}}}{{% else %}}{{% set text = m.content.split("
    f"'</think>')[-1] %}}{{{{ '{ASSISTANT}' + text + eos_token }}}}{{% endif %}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{{{{ '{ASSISTANT}<think>\n' }}}}{{% endif %}}"
)


def _deepseek(message: Message, _: bool) -> Pieces:
    text = message["content"]
    if message["role"] == "system":
        return [(text, False)]
    if message["role"] == "user":
        return [(USER + text, False)]
    return [(ASSISTANT, False), (text.split("</think>")[-1] + SENTENCE, True)]


HARMONY = (
    "{{ '<|start|>system<|message|>You are ChatGPT.\n# Valid channels: analysis, commentary, final."
    "<|end|>' }}{% for m in messages %}{% if m.role == 'system' %}{{ '<|start|>developer<|message|>"
    "# Instructions\n\n' + m.content + '\n\n<|end|>' }}{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions.find to=assistant<|channel|>commentary<|message|>' + m.content|tojson +"
    " '<|end|>' }}{% elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' "
    "}}{% else %}{% set thinking = m.thinking if loop.last else '' %}{% if thinking %}{{ "
    "'<|start|>assistant<|channel|>analysis<|message|>' + thinking + '<|end|>' }}{% endif %}"
    "{% if m.tool_calls %}{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + "
    "'<|channel|>commentary json<|message|>' + m.tool_calls[0].function.arguments|tojson + "
    "'<|call|>' }}{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + "
    "('<|return|>' if loop.last else '<|end|>') }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


def _harmony(message: Message, is_last: bool) -> Pieces:
    role, text = message["role"], message["content"]
    start = "<|start|>assistant"
    if role == "system":
        whole = f"<|start|>developer<|message|># Instructions\n\n{text}\n\n<|end|>"
        return [(whole, False)]
    if role == "tool":
        head = "<|start|>functions.find to=assistant<|channel|>commentary<|message|>"
        return [(f"{head}{_json(text)}<|end|>", False)]
    if role == "user":
        return [(f"<|start|>user<|message|>{text}<|end|>", False)]
    if calls := message.get("tool_calls"):
        call = calls[0]["function"]
        words = f" to=functions.{call['name']}<|channel|>commentary json<|message|>"
        return [(start, False), (f"{words}{_json(call['arguments'])}<|call|>", True)]
    pieces: Pieces = [(start, False)]
    if is_last and message.get("thinking"):
        analysis = f"<|channel|>analysis<|message|>{message['thinking']}<|end|>"
        pieces += [(f"{analysis}<|start|>assistant", True)]
    end = "<|return|>" if is_last else "<|end|>"
    return [*pieces, (f"<|channel|>final<|message|>{text}{end}", True)]


GRANITE = (
    "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + "
    "'<|end_of_text|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)

SMOLLM_3 = (
    "{{ '<|im_start|>system\n## Metadata\n\nReasoning Mode: /no_think\n\n## Custom Instructions"
    "\n\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}{{ 'You are a "
    "helpful AI assistant.' }}{% endif %}{{ '\n\n<|im_end|>\n' }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% elif m.role"
    " == 'assistant' %}{{ '<|im_start|>assistant\n' + '<think>\n\n</think>\n' + "
    "m.content.lstrip('\n') + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n' }}{% endif %}"
)


def _smollm_3(messages: list[Message]) -> Pieces:
    system = "You are a helpful AI assistant."
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    head = "<|im_start|>system\n## Metadata\n\nReasoning Mode: /no_think\n\n"
    pieces: Pieces = [(f"{head}## Custom Instructions\n\n{system}\n\n<|im_end|>\n", False)]
    for message in messages:
        text = message["content"]
        if message["role"] == "user":
            pieces += [(f"<|im_start|>user\n{text}<|im_end|>\n", False)]
        else:
            answer = text.lstrip("\n")
            pieces += [("<|im_start|>assistant\n<think>\n\n</think>\n", False)]
            pieces += [(f"{answer}<|im_end|>", True), ("\n", False)]
    return pieces


IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
HF = "https://huggingface.co"

FAMILIES: dict[str, Family] = {
    "llama 2": Family(
        f"{HF}/blog/llama2#how-to-prompt-llama-2", LLAMA_2, ("<s>", "</s>"), _llama_2,
        "<s>", "</s>", bytes=False,
    ),
    "llama 3.1": Family(
        "https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1", LLAMA_3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        _headed("<|begin_of_text|>", "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>",
                strip=True),
        "<|begin_of_text|>", "<|eot_id|>",
    ),
    "mistral": Family(
        "https://docs.mistral.ai/cookbooks/concept-deep-dive-tokenization-chat_templates", MISTRAL,
        ("<s>", "</s>"), _mistral, "<s>", "</s>", system=False, bytes=False,
    ),
    "mistral with system": Family(
        "https://docs.mistral.ai/cookbooks/concept-deep-dive-tokenization-chat_templates", MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]"), _mistral, "<s>", "</s>", bytes=False,
    ),
    "qwen 2.5": Family(
        f"{HF}/Qwen/Qwen2.5-7B-Instruct", QWEN_2, IM, _qwen_2, "", "<|im_end|>", tools=True,
    ),
    "qwen 3": Family(
        f"{HF}/Qwen/Qwen3-8B", QWEN_3, IM, _qwen_3, "", "<|im_end|>", thinking=True,
    ),
    "gemma": Family(
        "https://ai.google.dev/gemma/docs/core/prompt-structure", GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        _headed("<bos>", "<start_of_turn>{}\n", "<end_of_turn>", "\n", strip=True,
                assistant="model"),
        "<bos>", "<eos>", system=False, bytes=False,
    ),
    "phi 3": Family(
        f"{HF}/microsoft/Phi-3-mini-4k-instruct", PHI_3,
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), _phi_3,
        "", "<|endoftext|>", bytes=False,
    ),
    "phi 4": Family(
        f"{HF}/microsoft/phi-4", PHI_4, (*IM, "<|im_sep|>"),
        _headed("", "<|im_start|>{}<|im_sep|>", "<|im_end|>"), "", "<|im_end|>",
    ),
    "chatml": Family(
        "https://github.com/openai/openai-python/blob/v0.28.1/chatml.md", CHATML, IM,
        _headed("", "<|im_start|>{}\n", "<|im_end|>", "\n"), "", "<|im_end|>",
    ),
    "zephyr": Family(
        f"{HF}/HuggingFaceH4/zephyr-7b-beta", ZEPHYR, ("<s>", "</s>"),
        _headed("", "<|{}|>\n", "</s>", "\n"), "<s>", "</s>", bytes=False,
    ),
    "deepseek": Family(
        f"{HF}/deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", DEEPSEEK,
        (USER, ASSISTANT, SENTENCE, BEGIN), _each(BEGIN, _deepseek), BEGIN, SENTENCE,
        thinking=True,
    ),
    "harmony": Family(
        "https://developers.openai.com/cookbook/articles/openai-harmony", HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        _each("<|start|>system<|message|>You are ChatGPT.\n# Valid channels: analysis, commentary, "
              "final.<|end|>", _harmony),
        "", "<|return|>", tools=True,
    ),
    "granite": Family(
        "https://www.ibm.com/granite/docs/models/granite", GRANITE,
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        _headed("", "<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>", "\n"),
        "", "<|end_of_text|>",
    ),
    "smollm 3": Family(
        f"{HF}/HuggingFaceTB/SmolLM3-3B", SMOLLM_3, IM, _smollm_3, "", "<|im_end|>",
    ),
}  # fmt: skip


def saved(family: Family, folder: Path, **more: Any) -> Any:
    """A tokenizer of the family's kind, saved with its template."""
    from transformers import PreTrainedTokenizerFast

    make = byte_tokenizer if family.bytes else unigram_tokenizer
    made = make(["<unk>", *family.specials])
    names = {"bos_token": family.bos or None, "eos_token": family.eos, "unk_token": "<unk>", **more}
    others = [word for word in family.specials if word not in names.values()]
    loaded = PreTrainedTokenizerFast(
        tokenizer_object=made, extra_special_tokens=others, chat_template=family.template, **names
    )
    loaded.save_pretrained(folder)
    return loaded


TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds"}}]


def exchange(has: tuple[str, ...], number: int, turn: int) -> list[dict[str, Any]]:
    """A question and its answer, perhaps with a tool's between them."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"what is {number} plus {turn}?"}]
    if "tools" in has and number % 3 == 1:
        function = {"name": "add", "arguments": {"one": number, "other": turn}}
        calls = [{"type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "content": str(number + turn)})
    answer = f"it is {number + turn}" + ", fine thanks\nfor the question" * (number % 4)
    if "tagged" in has and number % 2:
        answer = f"<think>\nso {turn} more\n</think>\n\n{answer}"
    said = {"role": "assistant", "content": answer}
    if "thinking" in has:
        said["thinking"] = f"the dog has {turn} more"
    return [*messages, said]


def conversations(has: tuple[str, ...], count: int = 13) -> list[dict[str, Any]]:
    """Rows of one to three exchanges; answers differ in length."""
    rows = []
    for number in range(count):
        row: dict[str, Any] = {"messages": []}
        if "system" in has and number % 2:
            row["messages"].append({"role": "system", "content": f"you are bird {number}."})
        for turn in range(1 + number % 3):
            row["messages"] += exchange(has, number, turn)
        if "tools" in has:
            row["tools"] = json.dumps(TOOLS)
        rows.append(row)
    return rows
