"""Vocabulary size and special tokens of a tokenizer."""

from dataclasses import dataclass

from eke.common.text import BOS, BYTE_VOCABULARY, EOS, MASK, NUM_SPECIAL_TOKENS, PAD
from eke.config.schema import Data

BYTES = "bytes"
"""`data.tokenizer` value of eke's byte tokenizer."""

AUTO = "auto"
"""The checkpoint's tokenizer, filled in when the model is resolved; bytes for other models."""


def tokenizer_of(data: Data) -> str:
    """Resolved `data.tokenizer`; empty for data without one."""
    typed = getattr(data, "tokenizer", "")
    return BYTES if typed == AUTO else typed


@dataclass(frozen=True)
class Frame:
    """Special tokens around a text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of special tokens."""
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True)
class Vocabulary:
    """Size and special ids of one tokenizer; the defaults are the byte tokenizer's."""

    tokenizer: str = BYTES
    """`bytes`, a folder, or a Hub name."""
    size: int = BYTE_VOCABULARY
    """All ids are smaller."""
    pad: int = PAD
    """Padding id; EOS if the tokenizer has no padding token."""
    pad_is_eos: bool = False
    """Whether padding is EOS: the tokenizer has no padding token, or the same for both."""
    bos: int | None = BOS
    eos: int | None = EOS
    mask: int | None = MASK
    """Replaces a token in masked_lm."""
    special: tuple[int, ...] = ()
    """Ids never masked; none for byte tokens (BOS is a separator there)."""
    first_random: int = NUM_SPECIAL_TOKENS
    """Smallest id of a random replacement in masking."""
    frame: Frame = Frame()
    """Special tokens around a text; none for windows of byte tokens."""
    target_frame: Frame = Frame()
    """Special tokens around a seq2seq target."""

    @property
    def is_bytes(self) -> bool:
        """Whether every token is one byte, so that loss per token is loss per byte."""
        return self.tokenizer == BYTES

    def random_below(self, model_vocab_size: int) -> int:
        """Upper bound of random replacements in masking."""
        return model_vocab_size if self.is_bytes else self.size


BYTE_TOKENS = Vocabulary()
"""eke's byte tokens; synthetic data avoids their special ids, too."""
