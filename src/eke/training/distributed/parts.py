"""Which rows of a tensor a rank has."""


def rows(num_rows: int, rank: int, world_size: int) -> slice:
    """FSDP2's cut, torch's Shard(0): equal numbers of rows, the last ranks' short or empty."""
    each = -(-num_rows // world_size)
    return slice(min(rank * each, num_rows), min((rank + 1) * each, num_rows))
