"""The texts of rows as sequences of tokens, cut to the length that a run has."""

from dataclasses import dataclass

import numpy as np

from eke.data.preparation.columns import Fields
from eke.data.preparation.tokenizers import MARGIN_TOKENS, Encoded, Tokenizer, part_of
from eke.data.sources import Request

Sequence = tuple[np.ndarray, int]
"""Tokens, and how many of them are not learnt: a prompt's, or a source's before its target."""


@dataclass
class Sequences:
    """Makes sequences of rows, and counts what did not fit."""

    request: Request
    tokenizer: Tokenizer
    num_truncated: int = 0
    """Rows of which something was cut off."""
    num_other_prompts: int = 0
    """Rows that do not begin with the tokens of their prompt alone."""

    def of(self, batch: list[Fields]) -> list[Sequence | None]:
        """The sequence of each row; None where nothing is left of one that could be learnt."""
        if self.request.task != "causal_lm":
            return self._framed(batch)
        if self.request.response is None:
            return self._texts([row.texts[0] for row in batch])
        return self._answers(batch)

    def _framed(self, batch: list[Fields]) -> list[Sequence | None]:
        """As the tokenizer itself writes texts; of seq2seq, a target behind its source."""
        request, rows = self.request, self.tokenizer.rows
        made = [rows([row.texts[0] for row in batch], request.seq_len)]
        if request.response is not None:
            made.append(rows([row.texts[1] for row in batch], request.target_len, target=True))
        found: list[Sequence | None] = []
        for parts in zip(*made, strict=True):
            useful = all(part.is_useful for part in parts)
            self.num_truncated += useful and any(part.is_cut for part in parts)
            tokens = np.concatenate([part.ids for part in parts])
            found.append((tokens, len(parts[0].ids) if len(parts) > 1 else 0) if useful else None)
        return found

    def _texts(self, texts: list[str]) -> list[Sequence | None]:
        """Each behind what the tokenizer puts in front of a text; a whole one ends in EOS."""
        limit = self.request.seq_len
        found: list[Sequence | None] = []
        for text, encoded in zip(texts, self._beginnings_of(texts, limit), strict=True):
            tokens = self._ended(self._begun(encoded.ids), text)
            useful = len(encoded.ids) > 0
            self.num_truncated += useful and len(tokens) > limit
            tokens = tokens[:limit]
            # One token predicts nothing.
            found.append((tokens, 0) if useful and len(tokens) > 1 else None)
        return found

    def _beginnings_of(self, texts: list[str], limit: int) -> list[Encoded]:
        """Tokens of texts, or of as much of each as fills a row."""
        encode = self.tokenizer.encode
        parts = [part_of(text, limit) for text in texts]
        found = encode(parts)
        for number, text in enumerate(texts):
            while _too_short(text, parts[number], len(found[number].ids), limit):
                parts[number] = part_of(text, len(parts[number]))
                found[number] = encode([parts[number]])[0]
        return found

    def _begun(self, ids: np.ndarray) -> np.ndarray:
        """Behind the tokenizer's beginning, which a rendered row has already."""
        beginning = self.tokenizer.beginning
        has_it = np.array_equal(ids[: len(beginning)], beginning)
        return ids if has_it else np.concatenate([beginning, ids])

    def _ended(self, tokens: np.ndarray, text: str) -> np.ndarray:
        """With an end of text, which a rendered row may have already."""
        vocabulary = self.tokenizer.vocabulary
        end = self.tokenizer.eos_text
        if vocabulary.eos is None or (end and text.rstrip().endswith(end)):
            return tokens
        return np.append(tokens, vocabulary.eos)

    def _separator(self, prompt: str, response: str) -> str:
        """Nothing where white space or a special token stands at the border already."""
        if self.request.separator is not None:
            return self.request.separator
        special = self.tokenizer.special_texts
        rendered = prompt.startswith(special) or prompt.rstrip().endswith(special)
        spaced = not prompt or prompt[-1].isspace() or response[:1].isspace()
        return "" if rendered or spaced else "\n"

    def _answers(self, batch: list[Fields]) -> list[Sequence | None]:
        """Each prompt and its response as one text, of which the response's tokens are learnt.

        A token that ends behind the border belongs to the response. Where both are too long
        together, each may keep half: a prompt loses its beginning, a response its end and its EOS.
        """
        pairs = [(p + self._separator(p, r), r) for p, r in (row.texts for row in batch)]
        limit, encode = self.request.seq_len, self.tokenizer.encode
        parts = [(part_of(p, limit, True), part_of(r, limit)) for p, r in pairs]
        joined, alone = encode([p + r for p, r in parts]), encode([p for p, _ in parts])
        found: list[Sequence | None] = []
        for pair, (prompt, response), both, first in zip(pairs, parts, joined, alone, strict=True):
            cut = _border(both, first, len(prompt))
            while _too_short(pair[0], prompt, cut, limit) or _too_short(
                pair[1], response, len(both.ids) - cut, limit
            ):
                prompt = part_of(pair[0], len(prompt), True)
                response = part_of(pair[1], len(response))
                both, first = encode([prompt + response, prompt])
                cut = _border(both, first, len(prompt))
            asked, answer = both.ids[:cut], both.ids[cut:]
            if len(prompt) == len(pair[0]):
                self.num_other_prompts += not np.array_equal(both.ids[: len(first.ids)], first.ids)
                asked = self._begun(asked)[len(self.tokenizer.beginning) :]
            found.append(self._cut(asked, answer, self._ended(answer, pair[1])))
        return found

    def _cut(self, asked: np.ndarray, answer: np.ndarray, ended: np.ndarray) -> Sequence | None:
        beginning = self.tokenizer.beginning
        room = self.request.seq_len - len(beginning)
        kept = ended[: max(room - len(asked), (room + 1) // 2)]
        start = np.concatenate([beginning, asked[max(0, len(asked) + len(kept) - room) :]])
        tokens = np.concatenate([start, kept])
        if not len(answer) or len(tokens) < 2:
            return None
        self.num_truncated += len(tokens) < len(beginning) + len(asked) + len(ended)
        return tokens, len(start)


def _too_short(text: str, part: str, num_tokens: int, limit: int) -> bool:
    """More of a text is needed to know the tokens that a row keeps of it."""
    return len(part) < len(text) and num_tokens <= limit + MARGIN_TOKENS


def _border(both: Encoded, first: Encoded, place: int) -> int:
    """Number of the first token that ends behind a place of the text."""
    if both.ends is not None:
        behind = both.ends > place
        return int(behind.argmax()) if behind.any() else len(both.ids)
    size = min(len(both.ids), len(first.ids))
    differs = both.ids[:size] != first.ids[:size]
    return int(differs.argmax()) if differs.any() else size
