"""The texts of rows as sequences of tokens, cut to the length that a run has."""

from dataclasses import dataclass

import numpy as np

from eke.corpus import Request
from eke.prepare.columns import Fields
from eke.prepare.tokenizers import Tokenizer, clipped

Sequence = tuple[np.ndarray, int]
"""Tokens, and how many of them are not learnt: a prompt's, or a source's before its target."""


@dataclass
class Sequences:
    """Makes sequences of rows, and counts what did not fit."""

    request: Request
    tokenizer: Tokenizer
    num_truncated: int = 0
    """Rows of which something was cut off."""

    def of(self, batch: list[Fields]) -> list[Sequence | None]:
        """The sequence of each row; None where nothing is left of one that could be learnt."""
        if self.request.response is not None:
            if self.request.task == "seq2seq_lm":
                return self._sources_and_targets(batch)
            return self._prompts_and_responses(batch)
        prefix, suffix = self.tokenizer.prefix, self.tokenizer.suffix
        room = self.request.seq_len - len(prefix) - len(suffix)
        found: list[Sequence | None] = []
        for ids, long in clipped(self.tokenizer.encode, [row.texts[0] for row in batch], room):
            tokens = _joined(prefix, ids, suffix)
            # One token predicts nothing.
            useful = len(ids) > 0 and not (self.request.task == "causal_lm" and len(tokens) < 2)
            self.num_truncated += long and useful
            found.append((tokens, 0) if useful else None)
        return found

    def _prompts_and_responses(self, batch: list[Fields]) -> list[Sequence | None]:
        """One sequence of both; where they are too long together, each may keep half of the row.

        A prompt loses its beginning, a response its end.
        """
        encode, prefix, suffix = self.tokenizer.encode, self.tokenizer.prefix, self.tokenizer.suffix
        room = self.request.seq_len - len(prefix) - len(suffix)
        prompts = clipped(encode, [row.texts[0] for row in batch], room, keep_end=True)
        responses = clipped(encode, [row.texts[1] for row in batch], room)
        found: list[Sequence | None] = []
        for (prompt, long), (response, longer) in zip(prompts, responses, strict=True):
            answer = response[: max(room - len(prompt), (room + 1) // 2)]
            asked = prompt[max(0, len(prompt) + len(answer) - room) :]
            start = _joined(prefix, asked, ())
            tokens = _joined((), np.concatenate([start, answer]), suffix)
            useful = len(answer) > 0 and len(tokens) >= 2
            shorter = len(asked) < len(prompt) or len(answer) < len(response)
            self.num_truncated += useful and (long or longer or shorter)
            found.append((tokens, len(start)) if useful else None)
        return found

    def _sources_and_targets(self, batch: list[Fields]) -> list[Sequence | None]:
        prefix, suffix = self.tokenizer.prefix, self.tokenizer.suffix
        frame = len(prefix) + len(suffix)
        encode, request = self.tokenizer.encode, self.request
        sources = clipped(encode, [row.texts[0] for row in batch], request.seq_len - frame)
        targets = clipped(encode, [row.texts[1] for row in batch], request.target_len - len(suffix))
        found: list[Sequence | None] = []
        for (source, long), (target, longer) in zip(sources, targets, strict=True):
            useful = len(source) > 0 and len(target) > 0
            self.num_truncated += useful and (long or longer)
            whole = _joined(prefix, source, suffix)
            tokens = np.concatenate([whole, _joined((), target, suffix)])
            found.append((tokens, len(whole)) if useful else None)
        return found


def _joined(prefix: tuple[int, ...], ids: np.ndarray, suffix: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([np.array(prefix, np.int64), ids, np.array(suffix, np.int64)])
