"""What the rest of eke must know about a tokenizer: how many tokens, and which are special."""

from dataclasses import dataclass

from eke.common.text import BOS, BYTE_VOCABULARY, EOS, MASK, NUM_SPECIAL_TOKENS, PAD
from eke.config.schema import Data

BYTES = "bytes"
"""`data.tokenizer` of eke's own byte tokens."""

AUTO = "auto"
"""The checkpoint's own tokenizer, which stands in its place once the model is resolved; bytes for
any other model."""


def tokenizer_of(data: Data) -> str:
    """What `data.tokenizer` says, or `auto` stands for; empty for data that has none."""
    typed = getattr(data, "tokenizer", "")
    return BYTES if typed == AUTO else typed


@dataclass(frozen=True)
class Frame:
    """Special tokens around a text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True)
class Vocabulary:
    """Special ids of one tokenizer; the default is eke's byte tokens."""

    tokenizer: str = BYTES
    """As typed: `bytes`, a folder, or a name on the hub."""
    size: int = BYTE_VOCABULARY
    """Ids are below this."""
    pad: int = PAD
    """Fills rows up; the tokenizer's end of text where it has no padding of its own."""
    pad_is_eos: bool = False
    """The end of text pads: the tokenizer has no padding token, or names the same for both."""
    bos: int | None = BOS
    eos: int | None = EOS
    mask: int | None = MASK
    """What hides a token in masked_lm."""
    special: tuple[int, ...] = ()
    """Ids that are never chosen for masking; for byte tokens none (BOS is a separator there)."""
    first_random: int = NUM_SPECIAL_TOKENS
    """Smallest id that masking may put in place of a token."""
    frame: Frame = Frame()
    """What the tokenizer itself writes around a text; for windows of byte tokens nothing."""
    target_frame: Frame = Frame()
    """The same around a target of seq2seq."""

    @property
    def is_bytes(self) -> bool:
        """Every token is one byte, so a loss per token is a loss per byte."""
        return self.tokenizer == BYTES

    def random_below(self, model_vocab_size: int) -> int:
        """Ids that masking puts in place of a token are below this."""
        return model_vocab_size if self.is_bytes else self.size


BYTE_TOKENS = Vocabulary()
"""eke's own; synthetic data keeps off its special ids, too."""
