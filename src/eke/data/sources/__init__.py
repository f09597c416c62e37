"""Data sources without torch: text, files of rows, prepared tokens, sample lengths."""

from eke.data.sources.content_hash import (
    CHUNK_BYTES,
    cache_folder,
    file_signature,
    files_digest,
    memoize_file_reads,
)
from eke.data.sources.mixture_sampler import MixtureSampler
from eke.data.sources.packing import (
    PackedRows,
    first_fit,
    mix_seed,
    synthetic_length,
    synthetic_lengths,
)
from eke.data.sources.request import (
    HubSource,
    PrepareRequest,
    open_store,
    request_of,
    tokenizer_content,
)
from eke.data.sources.source_files import (
    FileRange,
    TextSource,
    count_windows,
    fingerprint,
    labels_of,
    largest_labels,
    longest_window,
    open_corpus,
    other_format,
    read_piece,
    text_files,
    unreadable,
    window_length,
)
from eke.data.sources.store import (
    AUTO,
    BYTE_TOKENS,
    BYTES,
    MANIFEST,
    Manifest,
    SpecialTokens,
    Store,
    TokenStream,
    Vocabulary,
    array_dtype,
    read_manifest,
    store_folder,
    tokenizer_of,
)
