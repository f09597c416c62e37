"""Bytes of state in files, against numbers worked out by hand; the real ones are in
tests/equivalence/test_nvme.py."""

from unit.models.sizes.configs import make_config

from eke.models.sizes import model_size, shared_state_bytes, state_files

LLAMA = (
    "model=tiny", "model.hidden_size=128", "model.num_hidden_layers=2",
    "model.num_attention_heads=2", "model.num_key_value_heads=2", "model.intermediate_size=512",
    "distributed=zero3", "offload=nvme", "offload.path=/disk",
)  # fmt: skip
HIDDEN = 2 * (4 * 128**2 + 3 * 128 * 512)
"""Numbers in matrices inside layers: 524,288."""


def files_of(*overrides: str):
    config = make_config(*LLAMA, *overrides)
    return config, state_files(config)


def test_only_matrices_are_swapped() -> None:
    config, found = files_of("distributed.num_processes=1")
    assert found.files == 4 * 3 * HIDDEN  # no weight has 1 MiB, so no gradient has a file
    kept = config.model.vocab_size * 128 + 5 * 128
    assert found.memory == 4 * (4 * HIDDEN + 3 * kept)
    assert found.pinned == 4 * 4 * HIDDEN
    held = shared_state_bytes(config, model_size(config), host=True)
    assert held.optimizer == found.memory
    assert shared_state_bytes(config, model_size(config)).optimizer == 0


def test_two_processes_halve_files_down_to_a_minimum() -> None:
    assert files_of("distributed.num_processes=2")[1].files == 4 * 3 * HIDDEN // 2
    assert files_of("distributed.num_processes=4")[1].files == 0


def test_large_blocks_need_large_shards() -> None:
    one = "distributed.num_processes=1"
    assert files_of(one, f"offload.block_bytes={4 * HIDDEN}")[1].files > 0
    assert files_of(one, f"offload.block_bytes={4 * HIDDEN + 1}")[1].files == 0


def test_large_gradients_are_swapped() -> None:
    large = ("model.intermediate_size=2048", "distributed.num_processes=1")
    config, found = files_of(*large, "offload.weights=disk")
    matrices = 2 * 3 * 128 * 2048
    assert found.files == 4 * (3 * (matrices + 2 * 4 * 128**2) + matrices)
    assert shared_state_bytes(config, model_size(config)).weights == 0


def test_momentum_state_has_one_file_less() -> None:
    one = "distributed.num_processes=1"
    assert files_of(one, "optimizer=sgd")[1].files == 4 * 2 * HIDDEN


def test_small_shards_need_small_buffers() -> None:
    one = "distributed.num_processes=1"
    found = files_of(one, "offload.piece_numbers=262144")[1]
    assert found.pinned <= 4 * 4 * (262144 + 128 * 512)
