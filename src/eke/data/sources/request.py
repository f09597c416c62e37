"""Inputs of a preparation, and the client of the process that prepares the tokens."""

import dataclasses
import hashlib
import json
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.output import write_line
from eke.common.paths import user_path
from eke.common.process_env import child_environment, module_command
from eke.config import schema
from eke.config.schema import Config
from eke.data.sources.content_hash import CHUNK_BYTES, content_hash, files_digest
from eke.data.sources.source_files import (
    TextSource,
    find_files,
    fingerprint,
    labels_of,
    open_corpus,
    unreadable,
)
from eke.data.sources.store import BYTES, Store, read_manifest, store_folder, tokenizer_of

_STORE_VERSION = 5
"""Version of prepared tokens. Increase it when the result of preparation changes."""

_NamedFiles = tuple[tuple[str, str], ...]
"""Files as pairs: name relative to `data.path`, absolute path."""


@dataclass(frozen=True)
class HubSource:
    """A dataset of the Hugging Face Hub."""

    name: str
    config_name: str | None
    split: str
    eval_split: str | None
    revision: str | None
    streaming: bool


@dataclass(frozen=True)
class PrepareRequest:
    """Inputs of one preparation."""

    option: str
    """jsonl, csv, parquet, hub, chat, or text (documents cut into windows)."""
    path: str
    """`data.path` or `data.name`, shown in messages."""
    content: str
    train: _NamedFiles = ()
    evaluation: _NamedFiles = ()
    """Evaluation files, empty: `eval_frac` of the training rows is held out."""
    corpus: TextSource | None = None
    labels: tuple[str, ...] = ()
    """Class names of documents by number."""
    hub: HubSource | None = None
    text: str | None = None
    text_pair: str | None = None
    prompt: str | None = None
    response: str | None = None
    label: str | None = None
    """Name of the label column. Columns that the task does not read are None."""
    task: str = "causal_lm"
    num_labels: int = 0
    problem: str = "single"
    head_labels: tuple[str, ...] = ()
    """Class names of the checkpoint's head by number, empty without names."""
    class_names: tuple[str, ...] = ()
    multi_hot: bool | None = None
    """`data.multi_hot`. `class_names` is `task.labels`."""
    separator: str | None = None
    """Text between prompt and response, None: a newline unless white space separates them."""
    messages: str | None = None
    """Column of conversations, None: the only candidate."""
    chat_template: str = ""
    """Jinja source or name, empty: the tokenizer's default template."""
    train_on: str = ""
    """`data.train_on`: the trained messages, empty for other rows than conversations."""
    tokenizer: str = BYTES
    tokenizer_content: str = ""
    seq_len: int = 0
    target_len: int = 0
    eval_frac: float = 0.1
    packing: bool = False
    max_row_bytes: int = 0
    """Largest row of local files, bytes."""
    streamed: int = 0
    """Evaluation samples of a source streamed during training, 0: all rows are prepared."""

    @property
    def is_csv(self) -> bool:
        """Whether all values are text."""
        return self.option == "csv"

    @property
    def only_evaluates(self) -> bool:
        """True if all rows are for evaluation, as in `eke evaluate`."""
        hub = self.hub
        return self.train == self.evaluation if hub is None else hub.split == hub.eval_split

    @property
    def key(self) -> str:
        """Cache key, 32 hex digits, independent of the location of the files."""
        content = dataclasses.asdict(self)
        for place in ("path", "train", "evaluation", "corpus", "max_row_bytes"):
            del content[place]
        if self.tokenizer_content:
            del content["tokenizer"]
        if self.hub and self.content:
            del content["hub"]["name"]
        text = json.dumps([_STORE_VERSION, content], sort_keys=True)
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]

    def to_json(self) -> str:
        """Serialize the request to one line of JSON."""
        return json.dumps(dataclasses.asdict(self), default=str)  # paths


def request_of(config: Config) -> PrepareRequest | None:
    """Return the request of a configuration, None for synthetic data and for text as bytes."""
    data = config.data
    if isinstance(data, schema.PythonSource | schema.Text):
        return None if tokenizer_of(data) == BYTES else _documents(config, data)
    if isinstance(data, schema.Conversations):
        request = _chat_request(config, data)
    elif isinstance(data, schema.Hub | schema.Files):
        request = _rows_request(config, data)
    if isinstance(data, schema.HubRows):
        return _hub(request, data)
    return _files(request, data) if isinstance(data, schema.LocalRows) else None


def _common_request(config: Config) -> PrepareRequest:
    data, targets, tokenizer = config.data, config.targets, tokenizer_of(config.data)
    content = tokenizer_content(tokenizer)  # of a folder
    return PrepareRequest(
        option=data.option,
        path=getattr(data, "path", getattr(data, "name", data.option)),
        content="",
        task=targets.option,
        num_labels=targets.num_labels,
        problem=targets.problem.value,
        tokenizer=str(user_path(tokenizer).absolute()) if content else tokenizer,
        tokenizer_content=content,
        seq_len=data.seq_len,
        target_len=config.target_len,
        packing=data.packing is schema.Packing.on,
        streamed=data.num_eval_samples if data.is_stream else 0,
        eval_frac=data.eval_frac if isinstance(data, schema.Rows) else 0.1,
    )


def _chat_request(config: Config, data: schema.Conversations) -> PrepareRequest:
    template = data.chat_template or ""
    file = user_path(template)
    if template and file.is_file():
        try:
            template = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise unreadable(error, "data.chat_template", str(file), "FILE") from error
        if "{" not in template:
            key, why = "data.chat_template", "this file is not a template: it has no {{ or {%"
            raise ConfigError(Problem(key, str(file), why, Fix(f"{key}=FILE"), "wrong_template"))
    return dataclasses.replace(
        _common_request(config),
        messages=data.messages,
        chat_template=template,
        train_on=data.train_on.value,
    )


def _rows_request(config: Config, data: schema.Hub | schema.Files) -> PrepareRequest:
    targets = config.targets
    pairs = targets.has_target or (targets.is_causal and data.prompt is not None)
    return dataclasses.replace(
        _common_request(config),
        text=None if pairs else data.text,
        prompt=data.prompt if pairs else None,
        response=data.response if pairs else None,
        separator=data.separator if pairs and targets.is_causal else None,
        label=None if targets.per_token else data.label,
        text_pair=data.text_pair,
        head_labels=_head_labels(config),
        class_names=tuple(getattr(config.task, "labels", ())),
        multi_hot=data.multi_hot,
    )


def _head_labels(config: Config) -> tuple[str, ...]:
    """Return the checkpoint's class names, () if they are transformers' default `LABEL_0`."""
    names = getattr(config.model, "label_names", [])
    is_kept = config.targets.num_labels == len(names)
    is_named = any(name != f"LABEL_{number}" for number, name in enumerate(names))
    return tuple(names) if is_kept and is_named else ()


def _files(request: PrepareRequest, data: schema.LocalRows) -> PrepareRequest:
    train = find_files(data.option, "data.path", data.path, data.pattern)
    evaluation = []
    if data.eval_path is not None:
        evaluation = find_files(data.option, "data.eval_path", data.eval_path, data.pattern)
    return dataclasses.replace(
        request,
        content="".join(_content(files, data.streaming) for files in (train, evaluation) if files),
        train=tuple((name, str(path)) for name, path in train),
        evaluation=tuple((name, str(path)) for name, path in evaluation),
        max_row_bytes=data.max_row_bytes,
    )


def _content(files: list[tuple[str, Path]], streaming: bool = False) -> str:
    """Return a hash of files. For a stream only of names, sizes and first bytes, as it is large."""
    try:
        if not streaming:
            return files_digest(files)
        sized = ((f"{name}\0{path.stat().st_size}\0", path) for name, path in files)
        return content_hash((*each, 0, CHUNK_BYTES) for each in sized)[:32]
    except OSError as error:
        raise unreadable(error) from error


def _hub(request: PrepareRequest, data: schema.HubRows) -> PrepareRequest:
    folder = user_path(data.name)
    content = ""
    if folder.is_dir():
        files = sorted(p for p in folder.rglob("*") if p.is_file() and ".git" not in p.parts)
        content = _content([(p.relative_to(folder).as_posix(), p) for p in files], data.streaming)
    own = {field.name: getattr(data, field.name) for field in dataclasses.fields(HubSource)}
    source = HubSource(**own | ({"name": str(folder.absolute())} if content else {}))
    return dataclasses.replace(request, content=content, hub=source)


def _documents(config: Config, data: schema.PythonSource | schema.Text) -> PrepareRequest:
    corpus = open_corpus(config)
    assert corpus is not None
    return dataclasses.replace(
        _common_request(config),
        option="text",
        content=fingerprint(corpus),
        corpus=corpus,
        labels=tuple(labels_of(config, corpus)),
        # Windows are cut when the store is opened.
        seq_len=0,
        target_len=0,
        packing=False,
    )


TOKENIZER_FILES = (
    "tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "sentencepiece",
    "chat_template", "config.json", "bpe.codes", "byte_maps", "dict.txt", "emoji", "entity_vocab",
    "normalizer", "prophetnet", "source.spm", "target.spm", "target_vocab", "tekken", "word_",
)  # fmt: skip
"""Prefixes of tokenizer files: `vocab_files_names` of transformers' classes, and config.json."""


def tokenizer_content(tokenizer: str) -> str:
    """Return the hash of a tokenizer's folder, "" for a Hub name and for bytes."""
    folder = user_path(tokenizer)
    if tokenizer in ("", BYTES) or not folder.is_dir():
        return ""
    files = sorted(
        p
        for p in folder.iterdir()
        if p.is_file()
        and (p.name.startswith(TOKENIZER_FILES) or p.suffix in (".model", ".tiktoken"))
    )
    files += sorted(folder.glob("additional_chat_templates/*"))  # transformers' CHAT_TEMPLATE_DIR
    try:
        return files_digest([(p.name, p) for p in files])
    except OSError as error:
        raise unreadable(error, "data.tokenizer", tokenizer, "bytes") from error


_PROGRESS_DELAY_S = 1.0
"""Seconds of preparation before a progress message is printed."""


def open_store(request: PrepareRequest) -> Store:
    """Open the prepared tokens of a request. Prepare them first if they are missing."""
    folder = store_folder(request.key)
    if (manifest := read_manifest(folder)) is None:
        _run_preparation(request)
        manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(_unexpected_failure(request, 0, f"no tokens in {folder}"))
    return Store(folder, manifest)


def _run_preparation(request: PrepareRequest) -> None:
    child = subprocess.Popen(
        module_command("eke.data.preparation"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
    )
    path = request.path if len(request.path) <= 80 else f"...{request.path[-77:]}"
    words = f"preparing data={request.option} {path} (once) ..."
    notice = threading.Timer(_PROGRESS_DELAY_S, write_line, (words, sys.stderr))
    notice.start()
    try:  # no timeout: after one, Python 3.11 drops unsent input
        out, err = child.communicate(request.to_json())
    except BaseException:  # Ctrl-C: let the child clean up
        child.terminate()
        child.wait()
        raise
    finally:
        notice.cancel()
    if child.returncode == 0:
        return
    try:
        problems = json.loads(out.splitlines()[-1])["problems"]
    except (ValueError, LookupError):
        raise ConfigError(_unexpected_failure(request, child.returncode, err)) from None
    for problem in problems:
        problem["fix"] = Fix(*problem["fix"]["words"], remark=problem["fix"]["remark"])
    raise ConfigError([Problem(**problem) for problem in problems])


def _unexpected_failure(request: PrepareRequest, code: int, err: str) -> Problem:
    if code == -signal.SIGVTALRM:  # set in eke.data.preparation.untrusted
        why = "rendering one conversation exceeds the time limit"
        fix = Fix("data.chat_template=FILE")
        name = f"{request.chat_template[:60] or 'default'} of {request.tokenizer}"
        return Problem("data.chat_template", name, why, fix, "costly_template")
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    how = f"killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
    why = f"data preparation {how}: {(lines or ['no output'])[-1][:300]}"
    fix = Fix(remark="free memory, repeat the command") if code == -9 else Fix("data=synthetic")
    return Problem("data", request.option, why, fix, "failed_preparation")
