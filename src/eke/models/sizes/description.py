"""What is known of an option of the group `optimizer`, whatever asks for it: facts with names."""

from dataclasses import dataclass

from eke.models.sizes.optimizer_temporaries import Temporaries, unknown

AUTO = "auto"
"""Of `implementation`: the plan chooses."""


@dataclass(frozen=True)
class Description:
    """Facts about one option; the defaults are what is assumed of one that nobody has described."""

    package: str = ""
    """What has to be importable, beside PyTorch and transformers."""
    install: str = ""
    """The line that installs it."""
    built: tuple[str, ...] = ()
    """Class and library of what may be built; empty where an effect shows in its states."""
    implementation: str = ""
    """Loop over the weights that the option names, of torch's AdamW; `AUTO` leaves it to the plan,
    and none is another optimizer's own."""

    temporaries: Temporaries = unknown
    """Bytes of one step beside the states; torch's AdamW goes by its implementation."""
    counted_as: str = ""
    """Option whose bytes and launches stand in for its own, which no trace shows: it compiles
    itself, or is another library's kernel."""
    not_timed: str = ""
    """What an estimate of a step's time leaves out, in one clause."""

    twin: str = ""
    """Option of PyTorch's own that computes the same and is traced in its place."""
    unquantised: str = "adamw"
    """Option that keeps the same states in float32, where its own are quantised."""
    cuda_only: bool = False
    """Its library has no kernels for a CPU."""
    compiles: bool = False
    """It compiles its step at first use: with a C++ compiler, or Triton on a GPU."""
    pages: bool = False
    """States may wait in the host's memory when a GPU's is short."""
    rounds_at_random: bool = False
    """Of bfloat16 weights, so that small updates add up."""
    averages: bool = False
    """Trains an average of weights in place of a schedule."""
    needs_matrices: bool = False
    """There is nothing to do for it where no matrix inside a layer is trained."""

    fails_on_parts: str = ""
    """What goes wrong when each process has only a part of every tensor, FSDP2's; empty where it
    trains on parts like on whole tensors (tests/equivalence/test_ranks.py)."""
    fails_on_pieces: str = ""
    """What goes wrong on ZeRO's flat pieces; empty where it gave the same curve as without ZeRO.
    Apex's needs a GPU and was not tried: it is on DeepSpeed's own list (runtime/zero/utils.py)."""
    fails_in_backward: str = ""
    """What goes wrong when it steps one weight at a time, in the backward pass; empty where that
    makes no difference (tests/equivalence/test_in_backward.py)."""
    returns_from_files: bool = False
    """Its moments were seen to come back from files as they went. States of 8 bits do not:
    DeepSpeed reads what it takes for moments, and not the scales of their blocks."""
