"""eke's byte tokenizer: every byte is one token, after a few special ones. Constants only."""

PAD, BOS, EOS, MASK, SEP = 0, 1, 2, 3, 4
"""Special tokens; BOS also separates documents in packed text."""

NUM_SPECIAL_TOKENS = 8
"""Ids below this are special (three are spare); byte b is token b + 8."""

BYTE_VOCABULARY = NUM_SPECIAL_TOKENS + 256
"""Number of tokens."""

IGNORED = -100
"""Label of a position that is not to be predicted (torch's cross_entropy default)."""
