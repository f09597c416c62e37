"""`eke generate`: what plain transformers writes; a model that writes no text is refused."""

import io
import json
from unittest.mock import Mock

import pytest
import torch
from checkpoints import save_checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from eke.cli import main
from eke.workflows.export import export
from eke.workflows.generate import Sampling, TextWriter

# peft 0.21 asks by a name that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)

KINDS = {
    "chat": ("data=chat",),
    "lora": ("data=chat", "peft=lora"),
    "seq2seq": ("data=jsonl", "task=seq2seq_lm", "model.name_or_path=t5", "data.prompt=text",
           "data.response=label"),
    "classes": ("data=jsonl", "task=sequence_classification"),
    "bytes": ("data=synthetic", "model=tiny", "model.hidden_size=32", "model.num_attention_heads=2",
              "model.intermediate_size=64"),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(run_folder, chat_base, train_kind):
    """Kind -> a finished run with an id of the same name."""
    save_checkpoint(run_folder / "t5", "t5", tokenizer=True)
    return lambda kind: train_kind(kind, *KINDS[kind]) and kind


def plain(folder, text: str, kind=AutoModelForCausalLM, **how) -> str:
    """What transformers alone writes with a folder."""
    model, tokenizer = kind.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(
        text, return_tensors="pt", add_special_tokens=kind is not AutoModelForCausalLM
    )
    torch.manual_seed(how.pop("seed", 0))
    ids = model.generate(inputs["input_ids"], max_new_tokens=12, **{"do_sample": False, **how})[0]
    start = 0 if kind is AutoModelForSeq2SeqLM else inputs["input_ids"].shape[1]
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chat", "lora"])
def test_generated_answer_matches_transformers(kind, trained, tmp_path, capsys) -> None:
    trained(kind)
    export(kind, str(tmp_path / "whole"), merge=kind == "lora")
    expected = plain(tmp_path / "whole", "<user>a fox?<sep><assistant>")
    for run in (kind, str(tmp_path / "whole")):
        capsys.readouterr()
        assert main(["generate", run, "a fox?", "--max-new-tokens", "12"]) == 0
        assert capsys.readouterr().out == f"{expected}\n"
    raw = plain(tmp_path / "whole", "a fox?")
    assert main(["generate", kind, "a fox?", "--max-new-tokens=12", "--raw"]) == 0
    assert capsys.readouterr().out == f"{raw}\n"


@pytest.mark.slow
def test_sampled_answer_depends_only_on_the_seed(trained, tmp_path, capsys) -> None:
    export(trained("chat"), str(tmp_path / "whole"))
    expected = plain(tmp_path / "whole", "a", do_sample=True, temperature=0.9, top_p=0.8, seed=7)
    typed = ["--raw", "--temperature=0.9", "--top-p=0.8", "--seed=7", "--max-new-tokens=12"]
    capsys.readouterr()
    assert main(["generate", "chat", "a", *typed]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.slow
def test_encoder_decoder_generates_its_target(trained, tmp_path, capsys) -> None:
    export(trained("seq2seq"), str(tmp_path / "whole"))
    expected = plain(tmp_path / "whole", "fox 3", AutoModelForSeq2SeqLM)
    capsys.readouterr()
    assert main(["generate", "seq2seq", "fox 3", "--max-new-tokens=12"]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(
    ("count", "free", "device_map"), [(1, 1000, None), (2, 1 << 40, None), (2, 1000, "auto")]
)
def test_model_is_spread_over_several_gpus(count, free, device_map, tmp_path, monkeypatch) -> None:
    save_checkpoint(tmp_path / "base", "llama", tokenizer=True)
    writer = TextWriter(str(tmp_path / "base"), Sampling())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    monkeypatch.setattr(writer, "_load", Mock())
    assert writer.model
    assert writer._load.call_args.kwargs.get("device_map") == device_map


@pytest.mark.slow
def test_conversation_continues_until_reset(trained, monkeypatch, capsys) -> None:
    trained("chat")
    lines = iter(["a fox?", "", "a dog?", "/reset", "a fox?"])

    def ask(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    seen = []
    monkeypatch.setattr(
        "eke.workflows.generate.TextWriter.answer",
        lambda self, text: (
            seen.append((text, len(self.messages))) or self.messages.append({}) or "x"
        ),
    )
    assert main(["generate", "chat"]) == 0
    assert seen == [("a fox?", 0), ("a dog?", 1), ("a fox?", 0)]
    assert capsys.readouterr().out == "x\nx\nx\n\n"


@pytest.mark.slow
def test_byte_model_needs_no_tokenizer_and_accepts_a_pipe(trained, monkeypatch, capsys) -> None:
    trained("bytes")
    monkeypatch.setattr("sys.stdin", io.StringIO("é"))
    assert main(["generate", "bytes", "--max-new-tokens=3"]) == 0
    assert len(capsys.readouterr().out) <= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "why"),
    [
        ("classes", "is a model for task=sequence_classification, which generates no text"),
        ("absent", "no such folder"),
    ],
)
def test_model_without_text_output_is_rejected(run, why, trained, capsys) -> None:
    trained("classes")
    assert main(["generate", run, "a"]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.slow
def test_exported_classifier_is_rejected(trained, tmp_path, capsys) -> None:
    export(trained("classes"), str(tmp_path / "whole"))
    assert main(["generate", str(tmp_path / "whole"), "a"]) == 2
    assert "is a LlamaForSequenceClassification" in capsys.readouterr().err


@pytest.mark.slow
def test_folder_without_tokenizer_is_reported(trained, tmp_path, capsys) -> None:
    export(trained("bytes"), str(tmp_path / "whole"))
    assert json.loads((tmp_path / "whole" / "config.json").read_text())
    assert main(["generate", str(tmp_path / "whole"), "a"]) == 2
    assert "cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed", [["--top-p=0.5"], ["--temperature=-1"], ["--max-new-tokens=0"], ["--top-p=2"]]
)
def test_contradicting_options_are_rejected(typed, capsys) -> None:
    assert main(["generate", "run", "a", *typed]) == 2
    assert capsys.readouterr().err.startswith("error: ")
