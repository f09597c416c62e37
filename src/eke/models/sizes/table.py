"""The description of every option of the group `optimizer`."""

from functools import partial

from eke.config.schema import Optimizer
from eke.models.sizes import optimizer_temporaries as temporaries
from eke.models.sizes.description import AUTO, Description

TORCH = "AdamW torch"

MIXED = "(torch: got mixed torch.Tensor and DTensor)"
PROJECTED_PARTS = f"it projects whole matrices {MIXED}"
WHOLE = (
    "bitsandbytes' kernels take whole tensors (torch: Operator "
    "bitsandbytes.optimizer_update_32bit.default does not have a sharding strategy registered)"
)

PIECES = "ZeRO hands it flat pieces"
PROJECTED_PIECES = f"projects matrices, and {PIECES} (IndexError: tuple index out of range)"
UNROUNDED = f"{PIECES} of no whole number of blocks, whose states it silently keeps in float32"

COUNTS = "counts the steps of a group of weights, which is stepped once for each of them then"

_torch_adamw = partial(Description, returns_from_files=True)

_bitsandbytes = partial(
    Description,
    package="bitsandbytes",
    install='pip install "eke[bitsandbytes]"',
    temporaries=temporaries.bitsandbytes,
    fails_on_parts=WHOLE,
)

_torchao = partial(
    Description,
    package="torchao",
    install='pip install "eke[torchao]"',
    temporaries=temporaries.torchao,
    compiles=True,
)

_low_rank = partial(
    Description,
    temporaries=temporaries.low_rank,
    fails_on_parts=PROJECTED_PARTS,
    fails_on_pieces=PROJECTED_PIECES,
)

DESCRIPTIONS: dict[str, Description] = {
    "adamw": _torch_adamw(built=(TORCH, "DeepSpeedCPUAdam deepspeed"), implementation=AUTO),
    "adamw_forloop": _torch_adamw(built=(TORCH,), implementation="forloop"),
    "adamw_foreach": _torch_adamw(built=(TORCH,), implementation="foreach"),
    "adamw_fused": _torch_adamw(built=(TORCH,), implementation="fused"),
    "adamw_apex_fused": Description(
        package="apex.optimizers",
        install=(
            "build it from github.com/NVIDIA/apex; the package index has another project of that "
            "name"
        ),
        built=("FusedAdam apex",),
        temporaries=temporaries.one_kernel,
        counted_as="adamw_fused",
        twin="adamw_fused",
        cuda_only=True,
        fails_on_parts="apex's kernels take whole tensors",
        fails_in_backward=COUNTS,
    ),
    "adamw_8bit": _bitsandbytes(),
    "paged_adamw_8bit": _bitsandbytes(
        counted_as="adamw_8bit",
        not_timed="paged states: as if nothing had to be paged in",
        pages=True,
    ),
    "lion": _bitsandbytes(built=("Lion bitsandbytes",), returns_from_files=True),
    "lion_8bit": _bitsandbytes(unquantised="lion"),
    "adamw_torchao_8bit": _torchao(
        counted_as="adamw_8bit",
        fails_on_parts=(
            "it trains, and its quantised parts cannot be read back from a checkpoint (torch: "
            "Weights only load failed)"
        ),
        fails_on_pieces=UNROUNDED,
    ),
    "adamw_torchao_4bit": _torchao(
        counted_as="adamw_8bit",
        fails_on_parts=(
            "its 4-bit states are flat, and its compiled step takes them for matrices (torch: "
            "wrong number of dimensions)"
        ),
        fails_on_pieces=UNROUNDED,
    ),
    "adamw_bf16_sr": _torchao(
        counted_as="adamw_fused",
        rounds_at_random=True,
        fails_on_parts=(
            "each process would draw the same random numbers for another part: on two it strayed "
            "from float32 copies as far as one does, and parts of uneven sizes have not been seen"
        ),
        fails_on_pieces="rounds bfloat16 weights at random; ZeRO steps on float32 copies",
        fails_in_backward=(
            "draws the random numbers of a step once, and the same for each weight then"
        ),
    ),
    "adafactor": Description(
        built=("Adafactor transformers",),
        temporaries=temporaries.adafactor,
        fails_on_parts=(
            f"it keeps sums over rows and columns, which a part of a matrix has not {MIXED}"
        ),
        fails_on_pieces=(
            f"keeps a row and a column of statistics for each matrix; {PIECES}, and it silently "
            "becomes another algorithm with 4 bytes a parameter"
        ),
    ),
    "sgd": Description(built=("SGD torch",), temporaries=temporaries.sgd, returns_from_files=True),
    "muon": Description(
        built=("Muon+AdamW torch", "Muon torch"),
        temporaries=temporaries.muon,
        needs_matrices=True,
        fails_on_pieces=(
            f"orthogonalizes matrices; {PIECES} (torch: Param gradient must be a 2D matrix)"
        ),
    ),
    "schedule_free": Description(
        package="schedulefree",
        install='pip install "eke[schedulefree]"',
        built=("AdamWScheduleFree schedulefree",),
        temporaries=temporaries.schedule_free,
        averages=True,
        fails_on_pieces=(
            "evaluates and saves an average, which it would put into ZeRO's pieces, where the "
            "model does not see it"
        ),
        fails_in_backward=COUNTS,
    ),
    "galore": _low_rank(
        package="galore_torch",
        install='pip install "eke[galore]"',
        not_timed="galore: its decompositions, every few hundred steps, are left out",
    ),
    "apollo": _low_rank(
        package="apollo_torch", install='pip install "eke[apollo]"', counted_as="galore"
    ),
}
"""Option -> its description."""

NOBODYS = Description()


def describe(optimizer: Optimizer) -> Description:
    """What is known of a configured optimizer; little of an option from a user's own folder."""
    return DESCRIPTIONS.get(optimizer.option, NOBODYS)
