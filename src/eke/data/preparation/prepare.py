"""One preparation from start to end: lock, look, tokenize, rename."""

import shutil
from pathlib import Path

from eke.data.preparation.rows import RowStore, fill_documents
from eke.data.preparation.tokenizers import load_tokenizer
from eke.data.preparation.writer import Writer, locked, temporary
from eke.data.sources import Request, read_manifest, store_folder


def prepare(request: Request) -> Path:
    """Make the store of a request, unless another process has just made it.

    Raises:
        ConfigError: the input cannot be used, or the cache folder not be written.
    """
    folder = store_folder(request.key)
    with locked(folder):
        if read_manifest(folder) is not None:
            return folder
        tokenizer = load_tokenizer(request)
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
