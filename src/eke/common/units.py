"""Units and how numbers are shown: the one place that turns a quantity into text."""

KIB, MIB, GIB = 2**10, 2**20, 2**30

ROUNDS_UP = 0.9995
"""From this share of a unit on, three significant digits round to a whole one: 999.5 k is 1 M."""


def format_bytes(num_bytes: float) -> str:
    """Bytes in the largest binary unit that keeps the number readable: `1.31 GiB`."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """A count with a decimal prefix: `1.24 B`, `335 M`, `12.3 k`."""
    for suffix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size * ROUNDS_UP:
            return f"{count / size:.3g} {suffix}"
    return f"{count:.0f}" if float(count).is_integer() else f"{count:.3g}"


def format_number(count: int, what: str) -> str:
    """A number of things: `1 run`, `2 runs`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def format_flops(flops: float) -> str:
    """Floating-point operations with their usual prefix, where a billion is G: `96.2 G`."""
    return format_count(flops).replace("B", "G")


def format_seconds(seconds: float) -> str:
    """A duration at a fitting scale: `12.3 ms`, `4.21 s`, `3 m 12 s`, `2 h 05 m`."""
    if seconds < ROUNDS_UP:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:  # three digits would say 60 s
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


def format_value(value: object) -> str:
    """A configuration value as it is typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    return str(value)
