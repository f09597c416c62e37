"""Where samples come from, without torch: text sources, files of rows, prepared tokens, lengths."""

from eke.data.sources.cache import cache_folder, files_digest, stamp
from eke.data.sources.files import find_files, other_format
from eke.data.sources.lengths import mix_seed, synthetic_length, synthetic_lengths
from eke.data.sources.memoize import looking_once
from eke.data.sources.packing import Packs, first_fit
from eke.data.sources.prepare_client import open_store
from eke.data.sources.request import (
    HubSource,
    Request,
    request_from_json,
    request_of,
    tokenizer_content,
)
from eke.data.sources.store import (
    DTYPES,
    Manifest,
    Store,
    Stream,
    read_manifest,
    store_folder,
    token_dtype,
    write_manifest,
)
from eke.data.sources.text import (
    EVAL_FRAC,
    SKIPPED_FOLDERS,
    Corpus,
    Piece,
    count_windows,
    fingerprint,
    largest_labels,
    longest_window,
    open_corpus,
    read_piece,
    standard_library,
    text_files,
    window_length,
)
from eke.data.sources.vocabulary import AUTO, BYTE_TOKENS, BYTES, Frame, Vocabulary, tokenizer_of

__all__ = [
    "AUTO",
    "BYTES",
    "BYTE_TOKENS",
    "DTYPES",
    "EVAL_FRAC",
    "SKIPPED_FOLDERS",
    "Corpus",
    "Frame",
    "HubSource",
    "Manifest",
    "Packs",
    "Piece",
    "Request",
    "Store",
    "Stream",
    "Vocabulary",
    "cache_folder",
    "count_windows",
    "files_digest",
    "find_files",
    "fingerprint",
    "first_fit",
    "largest_labels",
    "longest_window",
    "looking_once",
    "mix_seed",
    "open_corpus",
    "open_store",
    "other_format",
    "read_manifest",
    "read_piece",
    "request_from_json",
    "request_of",
    "stamp",
    "standard_library",
    "store_folder",
    "synthetic_length",
    "synthetic_lengths",
    "text_files",
    "token_dtype",
    "tokenizer_content",
    "tokenizer_of",
    "window_length",
    "write_manifest",
]
