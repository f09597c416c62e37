"""`eke generate`: text of a trained model after a prompt, by transformers' `generate`."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import read_json
from eke.common.paths import user_path
from eke.common.text import BYTE_VOCABULARY, EOS, NUM_SPECIAL_TOKENS
from eke.data.preparation.untrusted import load, reading, render_apart
from eke.workflows.export import ADAPTER, checked_model, find_run, finished_record


@dataclass(frozen=True)
class Sampling:
    """Parameters that choose the next token."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    """Temperature. 0: the most probable token."""
    top_p: float = 1.0
    seed: int = 0


class ByteTokens:
    """eke's byte tokens, with the tokenizer methods that generation needs."""

    chat_template = None
    eos_token_id = EOS

    def __call__(self, text: str, return_tensors: str) -> dict[str, Any]:
        """Return the ids of a text, int64 [1, bytes]."""
        import torch

        ids = [byte + NUM_SPECIAL_TOKENS for byte in text.encode()]
        return {"input_ids": torch.tensor([ids], dtype=torch.int64)}

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        """Return the text of ids without special tokens. Invalid UTF-8 is marked."""
        known = range(NUM_SPECIAL_TOKENS, BYTE_VOCABULARY)
        values = [int(i) - NUM_SPECIAL_TOKENS for i in ids if int(i) in known]
        return bytes(values).decode(errors="replace")


class TextWriter:
    """A trained model that continues prompts, or answers in a conversation.

    `run` is a run, or a folder of `eke export`. `raw` continues prompts without the chat template.
    """

    def __init__(self, run: str, sampling: Sampling, raw: bool = False) -> None:
        self.run, self.sampling = run, sampling
        self._held = ExitStack()
        self.folder, in_bytes = self._find(run)
        self.tokenizer: Any = ByteTokens() if in_bytes else self._load("AutoTokenizer")
        self.is_chat = not raw and self.tokenizer.chat_template is not None
        self.messages: list[dict[str, str]] = []

    def _find(self, run: str) -> tuple[Path, bool]:
        """Return the folder of the model, and whether its tokens are bytes."""
        folder = user_path(run)
        if (folder / "config.json").is_file() or (folder / f"{ADAPTER}config.json").is_file():
            return folder, False
        paths = find_run(run, "generate", "PROMPT")
        record = finished_record(paths, stopped=True)
        if record.choices.get("task") not in ("causal_lm", "seq2seq_lm"):
            raise self._unusable(f"is a model for task={record.choices.get('task')}")
        saved = self._held.enter_context(checked_model(paths, record))
        # Other tokenizers are saved with the model.
        return saved, not any(saved.glob("tokenizer*"))

    def _unusable(self, why: str) -> ConfigError:
        fix = Fix(remark="eke export, and transformers' pipeline for its task")
        problem = Problem("RUN", self.run, f"{why}, which generates no text", fix, "no_generation")
        return ConfigError(problem)

    @cached_property
    def is_adapter(self) -> bool:
        """True if the folder has only an adapter."""
        return (self.folder / f"{ADAPTER}config.json").is_file()

    def _load(self, name: str, **more: Any) -> Any:
        from eke.training.loop.environment import quiet_imports, quiet_transformers

        quiet_imports()
        quiet_transformers()
        library = import_module("peft" if name.startswith("AutoPeft") else "transformers")
        return load(getattr(library, name), self.folder, **more)

    @cached_property
    def model(self) -> Any:
        """The model in evaluation mode, on one device or spread over all GPUs."""
        import torch

        spread = {"device_map": "auto"} if self._is_spread() else {}
        with reading(self.folder):
            if self.is_adapter:
                content = read_json(self.folder / f"{ADAPTER}config.json")
                prefix, is_seq2seq = "AutoPeft", content.get("task_type") == "SEQ_2_SEQ_LM"
            else:
                content = read_json(self.folder / "config.json")
                prefix, is_seq2seq = "Auto", content.get("is_encoder_decoder")
                names = content.get("architectures") or [""]
                generative = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
                if not names[0].endswith(generative):
                    raise self._unusable(f"is a {names[0] or 'model without a class'}")
            kind = "ModelForSeq2SeqLM" if is_seq2seq else "ModelForCausalLM"
            found = self._load(f"{prefix}{kind}", dtype="auto", use_safetensors=True, **spread)
            if self.is_adapter and (self.folder / "generation_config.json").is_file():
                # It has the end-of-turn tokens of the adapter.
                found.generation_config = self._load("GenerationConfig")
            if not spread:
                found.to("cuda" if torch.cuda.is_available() else "cpu")
            return found.eval()

    def _is_spread(self) -> bool:
        """Return whether the weights may not fit on the first of several GPUs."""
        import torch

        if torch.cuda.device_count() < 2:
            return False
        size = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        # The base model of an adapter is in another folder.
        return self.is_adapter or size > torch.cuda.mem_get_info(0)[0]

    def answer(self, prompt: str) -> str:
        """Return the model's text after a prompt, in a conversation after all messages."""
        with reading(self.folder):
            import torch

            model = self.model
            if self.is_chat:
                self.messages.append({"role": "user", "content": prompt})
                with reading(f"the chat template of {self.folder}"):
                    text = render_apart(self.messages, self.tokenizer)
                inputs = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
            else:
                inputs = self.tokenizer(prompt, return_tensors="pt")
            inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()
                      if name in ("input_ids", "attention_mask")}  # fmt: skip
            how = self.sampling
            chosen: dict[str, Any] = {"do_sample": False}
            if how.temperature > 0:
                chosen = {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p}
            torch.manual_seed(how.seed)
            ids = model.generate(**inputs, **chosen, max_new_tokens=how.max_new_tokens)[0]
            asked = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
            text = str(self.tokenizer.decode(ids[asked:], skip_special_tokens=True))
        if self.is_chat:
            self.messages.append({"role": "assistant", "content": text})
        return text

    def forget(self) -> None:
        """Start a new conversation."""
        self.messages = []

    def close(self) -> None:
        """Remove copies of another user's files."""
        self._held.close()
