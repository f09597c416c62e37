"""What makes a checkpoint the same checkpoint: its content, wherever it lies."""

from eke.data.sources import files_digest
from eke.models.checkpoints.locate import CONFIG, Located
from eke.models.checkpoints.problem import refuse
from eke.models.checkpoints.tensors import weight_files


def content_of(found: Located) -> str:
    """`NAME@COMMIT` of a hub model; of a folder 16 hex digits over config.json and weights.

    Hashing gigabytes takes a while, so it is done once per path, size and times of change; a
    cache that cannot be written is done without.

    Raises:
        ConfigError: a file cannot be read.
    """
    if not found.is_local:
        return f"{found.typed}@{found.commit}"
    files = [found.folder / CONFIG, *weight_files(found)]
    try:
        return files_digest((path.name, path) for path in files)[:16]
    except OSError as error:
        raise refuse(
            found.typed, f"its {error.filename} cannot be read: {error.strerror}"
        ) from error
