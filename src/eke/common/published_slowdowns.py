"""What others have measured techniques to cost, until somebody has measured it on this machine."""

from dataclasses import dataclass

GUIDE = "https://huggingface.co/docs/transformers/v4.20.1/en/perf_train_gpu_one"
TORCHAO = "https://github.com/pytorch/ao/tree/main/torchao/optim"
TORCHTITAN = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)


@dataclass(frozen=True)
class Published:
    """One figure."""

    slowdown: float
    """Time of a step with the technique over that without."""
    source: str
    """What was measured on what, and where it says so: one clause."""


def _on_a_v100(speed: float) -> Published:
    """A row of the guides' table: BERT-large, 512 x 512; its baseline trains 8.86 samples/s."""
    return Published(8.86 / speed, f"8.86 to {speed} samples/s on a V100, {GUIDE}")


QUARTER_BATCH = _on_a_v100(7.75)
FP16 = _on_a_v100(18.64)
ADAM_8BIT = _on_a_v100(9.15)
ADAFACTOR = _on_a_v100(7.96)

ADAM_8BIT_TORCHAO = Published(3200 / 3000, f"3200 to 3000 tokens/s for a Llama of 7B ({TORCHAO})")
STATES_ON_HOST = Published(3.13 / 1.27, f"1.27 to 3.13 s a step of ViT-H, untuned ({TORCHAO})")

CHECKPOINTING = Published(4 / 3, "a third of a step's FLOPs: arXiv:1604.06174")
SELECTIVE = Published(1.07, "arXiv:2205.05198, table 4")
LORA = Published(0.8, "a quarter faster: arXiv:2106.09685, section 4.2")

TF32 = Published(1 / 2.25, "T5-base on an A100: huggingface/transformers#15026")
EAGER = Published(1.15, "BERT-large of 512 tokens, MLPerf 1.1's speed record: arXiv:2205.14135")
COMPILED = Published(5762 / 6667, f"tokens/s of a Llama of 8B on 8 H100, {TORCHTITAN}")
FP8 = Published(6667 / 8532, f"compiled and over bf16, on the same machines: {TORCHTITAN}")
