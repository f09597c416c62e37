"""Prepare one dataset: lock, check the cache, tokenize, rename."""

import shutil
from pathlib import Path

from eke.data.preparation.rows import RowStore, fill_documents
from eke.data.preparation.tokenizers import load_request_tokenizer
from eke.data.preparation.writer import Writer, locked, temporary
from eke.data.sources import PrepareRequest, read_manifest, store_folder


def prepare_store(request: PrepareRequest) -> Path:
    """Prepare the store of a request unless it exists; returns its folder.

    Raises:
        ConfigError: the input is unusable, or the cache folder cannot be written.
    """
    folder = store_folder(request.key)
    with locked(folder):
        if read_manifest(folder) is not None:
            return folder
        tokenizer = load_request_tokenizer(request)
        with temporary(folder) as unfinished:
            writer = Writer(unfinished, tokenizer.vocabulary)
            try:
                cache = unfinished / "datasets"
                if request.pieces:
                    counted = fill_documents(request, tokenizer, writer)
                else:
                    counted = RowStore(request, tokenizer, writer, str(cache)).fill()
                    shutil.rmtree(cache, ignore_errors=True)
                writer.finish(request.key, **counted)
            finally:
                writer.close()
    return folder
