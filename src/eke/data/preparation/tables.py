"""Rows of parquet files and of the hub's data sets."""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, Problem
from eke.data.preparation.columns import Columns
from eke.data.preparation.lines import Row, streamed, unreadable
from eke.data.sources import HubSource, other_format


def parquet_rows(name: str, file: str, cache: str, columns: Columns) -> Iterator[Row | None]:
    """Each row of a parquet file, with the columns that are read.

    Raises:
        ConfigError: it is no parquet file, or a wanted column is not there.
    """
    import pyarrow.parquet

    try:
        found = pyarrow.parquet.read_metadata(file)
        names = list(found.schema.to_arrow_schema().names)
    except Exception as error:  # Arrow's own tree of errors
        why = f"is no parquet file: {str(error).splitlines()[0][:150]}"
        fix = other_format("parquet", [file]) or "data.path=FILE_OR_FOLDER"
        raise ConfigError(Problem("data.path", file, why, fix)) from error
    columns.require_in(names, file)
    if not found.num_rows:
        return  # the library stumbles over it
    wanted = [column for _, column in columns.wanted]
    try:
        rows = iter(streamed("parquet", file, cache, columns=list(dict.fromkeys(wanted))))
    except Exception as error:  # datasets' and Arrow's
        raise unreadable(file, error) from error
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # a page that does not decompress
            raise unreadable(file, error) from error
        number += 1
        yield f"{name} row {number}", row


def hub_rows(source: HubSource, evaluation: bool, columns: Columns) -> Iterator[Row | None]:
    """Each row of one split.

    Raises:
        ConfigError: the data set, its configuration, its split or a column is not there.
    """
    split = source.eval_split if evaluation else source.split
    assert split is not None
    rows = iter(_load(source, split, "data.eval_split" if evaluation else "data.split", columns))
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the connection, or a damaged file
            raise _unavailable(source, error) from error
        number += 1
        yield f"{split} row {number}", row


def _load(source: HubSource, split: str, key: str, columns: Columns) -> Any:
    loaded = _loaded(source)
    if split not in loaded:
        there = [str(name) for name in loaded]
        close = difflib.get_close_matches(split, there, 1) or there
        why = f"there is no such split; there are: {', '.join(there)}"
        raise ConfigError(Problem(key, split, why, f"{key}={close[0]}"))
    chosen = loaded[split]
    if chosen.column_names is not None:
        columns.require_in(list(chosen.column_names))
        chosen = chosen.select_columns(list(dict.fromkeys(c for _, c in columns.wanted)))
    return chosen


def _loaded(source: HubSource) -> Any:
    """All splits, from the hub or its cache."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    options = {"name": source.config_name, "streaming": source.streaming}
    try:
        return datasets.load_dataset(source.name, revision=source.revision, **options)
    except Exception as error:  # huggingface_hub's, the connection's, datasets'
        folder = _cached_copy(source)
        if folder is None:
            raise _unavailable(source, error) from error
    try:
        return datasets.load_dataset(folder, **options)
    except Exception as error:  # a copy without the files of a split
        raise _unavailable(source, error) from error


def _cached_copy(source: HubSource) -> str | None:
    """Where `hf download` has put a copy; without a connection the library itself does not look."""
    from huggingface_hub import snapshot_download

    if Path(source.name).is_dir():
        return None
    try:
        return str(
            snapshot_download(
                source.name, repo_type="dataset", revision=source.revision, local_files_only=True
            )
        )
    except Exception:  # not cached, or not a name at all
        return None


def _unavailable(source: HubSource, error: Exception) -> ConfigError:
    """What the datasets library raised, in eke's words."""
    text = str(error).strip() or repr(error)
    line = text.splitlines()[0][:200]
    if "onfig name is missing" in text or "BuilderConfig" in text:
        names = text.partition("[")[2].partition("]")[0].replace("'", "").split(", ")
        what = "there are" if source.config_name else "one must be chosen"
        why = f"{what}: {', '.join(names)[:200]}"
        value = source.config_name or "null"
        return ConfigError(Problem("data.config_name", value, why, f"data.config_name={names[0]}"))
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"DatasetNotFoundError", "OfflineModeIsEnabled", "ConnectionError",
                "LocalEntryNotFoundError", "RepositoryNotFoundError"}:  # fmt: skip
        why = (
            f"is neither in the cache of this machine nor to be had from the hub ({line}); fetch "
            f"it where there is a connection: hf download --repo-type dataset {source.name}"
        )
        fix = "data=jsonl data.path=FILE   (or the folder it was fetched into: data.name=FOLDER)"
        return ConfigError(Problem("data.name", source.name, why, fix))
    why = f"the datasets library cannot load it: {line}"
    return ConfigError(Problem("data.name", source.name, why, "data=jsonl data.path=FILE"))
