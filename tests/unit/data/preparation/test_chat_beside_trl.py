"""What each template that TRL ships for training marks is what is trained, token by token."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from chat_templates import Family, conversations, saved

from eke.data.preparation.chat import ChatTemplate, encode_conversation
from eke.data.preparation.conversations import read_conversation
from eke.data.preparation.tokenizers import load_request_tokenizer
from eke.data.sources import PrepareRequest

SPECIAL = re.compile(r"<\|[^\s<>]+>|<[^\s<>]+\|>|<\uff5c[^\s<>]+\uff5c>|<(?:start|end)_of_turn>")
"""Special tokens in the text of a template."""

IMAGES = ("idefics3", "llava_next", "smolvlm")
"""Their contents are lists of texts and images."""

KINDS = [(), ("system",), ("tagged",), ("thinking",)]


def shipped() -> list[Path]:
    """Templates that mark what the assistant generates; none without TRL."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        return []
    folder = Path(found.origin).parent / "chat_templates"
    return sorted(
        path for path in folder.glob("*_training.jinja") if not path.stem.startswith(IMAGES)
    )


@pytest.mark.skipif(find_spec("trl") is None, reason="an extra of the tests")
def test_many_conversations_are_compared() -> None:
    assert len(shipped()) > 25


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem.removesuffix("_training"))
def test_trained_tokens_match_trl(path, tmp_path) -> None:
    in_bytes = shipped().index(path) % 2 == 0  # or unigrams
    source = path.read_text()
    specials = (*dict.fromkeys(SPECIAL.findall(source)), "<bos>", "<eos>")
    family = Family("", source, specials, lambda _: [], "<bos>", "<eos>", bytes=in_bytes)
    loaded = saved(family, tmp_path)
    request = PrepareRequest(option="chat", path="", content="", tokenizer=str(tmp_path))
    tokenizer = load_request_tokenizer(request)
    template = ChatTemplate(source, tokenizer.special_names, frozenset(specials))
    refuses = "System role not supported" in source
    kinds = [has for has in KINDS if not (refuses and "system" in has)]
    for row in [row for has in kinds for row in conversations(has, count=5)]:
        given = read_conversation(row, "messages")
        ids, mask = encode_conversation(template, tokenizer, given, "assistant", 10**6)
        named = {"return_dict": True, "return_assistant_tokens_mask": True}
        expected = loaded.apply_chat_template(row["messages"], **named)
        assert ids.tolist() == expected["input_ids"]
        assert mask.tolist() == [bool(each) for each in expected["assistant_masks"]], row
