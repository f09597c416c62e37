"""Flowcharts of the pages as inline SVG, so that the site needs no script and no network.

Reads the part of Mermaid's syntax that the pages use: `flowchart TD|LR`, `a & b --> c`,
`a -. "label" .-> b`, `a -- label --> b`, and labels `a[text<br>text]`, `a{text}`.
"""

import html
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator

_CHARACTER, _LINE, _PAD, _GAP, _LEVEL_GAP = 7.6, 18, 14, 26, 44  # pixels, at 14 px sans-serif
_NODE = re.compile(r"(\w+)(?:[\[({]+(.*?)[\])}]+)?$")
_ARROW = re.compile(r"\s(?:--\s(?P<a>.*?)\s-->|-\.\s(?P<b>.*?)\s\.->|(?P<c>-->)|(?P<d>-\.->))\s")

Edge = tuple[str, str, str, bool]
"""From, to, label, and whether it is dotted."""
Point = tuple[float, float]


def draw(text: str) -> str:
    """The SVG of a flowchart. ValueError if it uses other syntax."""
    head, *lines = text.strip().splitlines()
    match = re.fullmatch(r"flowchart (TD|LR)", head.strip())
    if not match:
        raise ValueError(f"unknown diagram: {head}")
    labels: dict[str, list[str]] = {}
    edges = [edge for line in lines for edge in _edges(line.strip(), labels)]
    across = match[1] == "LR"
    sizes = {name: _size(rows) for name, rows in labels.items()}
    chain, levels = _layers(list(labels), edges)
    at, width, height = _place(levels, sizes, across)
    parts = [_path([at[name] for name in chain[edge]], edge, sizes, across) for edge in edges]
    parts += [_box(at[name], sizes[name], rows) for name, rows in labels.items()]
    return (
        f'<svg class="diagram" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="max-width:{width:.0f}px" xmlns="http://www.w3.org/2000/svg">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker></defs>'
        f"{''.join(parts)}</svg>"
    )


def _edges(line: str, labels: dict[str, list[str]]) -> Iterator[Edge]:
    pieces, arrows, start = [], [], 0
    for found in _ARROW.finditer(line):
        pieces.append(line[start : found.start()])
        arrows.append(((found["a"] or found["b"] or "").strip('"'), "." in found[0].split()[0]))
        start = found.end()
    names = [[_node(word, labels) for word in piece.split(" & ")]
             for piece in (*pieces, line[start:])]  # fmt: skip
    for i, (label, dotted) in enumerate(arrows):
        yield from ((a, b, label, dotted) for a in names[i] for b in names[i + 1])


def _node(word: str, labels: dict[str, list[str]]) -> str:
    found = _NODE.match(word.strip())
    if not found:
        raise ValueError(f"unknown node: {word}")
    if found[2] or found[1] not in labels:
        labels[found[1]] = re.split(r"<br/?>", found[2] or found[1])
    return found[1]


def _size(rows: list[str]) -> Point:
    return max(map(len, rows)) * _CHARACTER + 2 * _PAD, len(rows) * _LINE + _PAD


def _layers(names: list[str], edges: list[Edge]) -> tuple[dict[Edge, list[str]], list[list[str]]]:
    """Longest paths give the level of a node; edges over several levels pass through points."""
    after = defaultdict(list)
    for a, b, *_ in edges:
        after[a].append(b)
    level: dict[str, int] = {}

    def visit(name: str, depth: int, seen: tuple[str, ...]) -> None:
        if name not in seen and depth >= level.get(name, 0):
            level[name] = depth
            for other in after[name]:
                visit(other, depth + 1, (*seen, name))

    ends = {b for _, b, *_ in edges}
    for name in [name for name in names if name not in ends] or names[:1]:
        visit(name, 0, ())
    levels: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
    for name in names:
        levels[level.setdefault(name, 0)].append(name)
    chain: dict[Edge, list[str]] = {}
    for edge in edges:
        a, b = edge[:2]
        step = 1 if level[b] > level[a] else -1
        between = [f"{a}>{b}@{n}" for n in range(level[a] + step, level[b], step)]
        for n, point in zip(range(level[a] + step, level[b], step), between, strict=True):
            levels[n].append(point)
        chain[edge] = [a, *between, b]
    _sort(levels, chain)
    return chain, levels


def _sort(levels: list[list[str]], chain: dict[Edge, list[str]]) -> None:
    """Order each level by the mean place of its neighbours, downwards and upwards."""
    near = defaultdict(set)
    for names in chain.values():
        for a, b in itertools.pairwise(names):
            near[a].add(b)
            near[b].add(a)
    for _ in range(4):
        for order in (range(1, len(levels)), range(len(levels) - 2, -1, -1)):
            for n in order:
                beside = levels[n - 1 if order.step > 0 else n + 1]
                place = {name: (i + 0.5) / len(beside) for i, name in enumerate(beside)}
                own = {name: i for i, name in enumerate(levels[n])}

                def mean(name: str, place: dict[str, float] = place) -> float:
                    found = [place[other] for other in near[name] if other in place]
                    return sum(found) / len(found) if found else 0.5

                levels[n].sort(key=lambda name, own=own: (mean(name), own[name]))  # type: ignore[misc]


def _place(
    levels: list[list[str]], sizes: dict[str, Point], across: bool
) -> tuple[dict[str, Point], float, float]:
    """Centre of every node and point, and the size of the picture."""
    side, along = (1, 0) if across else (0, 1)
    spans = [sum(sizes.get(name, (8, 8))[side] + _GAP for name in each) for each in levels]
    at, offset, widest = {}, float(_PAD), max(spans)
    for names, span in zip(levels, spans, strict=True):
        thick = max(sizes.get(name, (8, 8))[along] for name in names)
        free = (widest - span) / (len(names) + 1)
        place = free + _GAP / 2
        for name in names:
            length = sizes.get(name, (8, 8))[side]
            pair = (place + length / 2, offset + thick / 2)
            at[name] = pair[::-1] if across else pair
            place += length + _GAP + free
        offset += thick + _LEVEL_GAP * (1.6 if across else 1)
    end = offset - _LEVEL_GAP * (1.6 if across else 1) + _PAD
    return (at, end, widest) if across else (at, widest, end)


def _path(points: list[Point], edge: Edge, sizes: dict[str, Point], across: bool) -> str:
    """A smooth line from the border of one box to that of the other, with its label."""
    way = 1 if (points[-1][0 if across else 1] > points[0][0 if across else 1]) else -1
    first, last = (sizes[name][0 if across else 1] / 2 * way for name in edge[:2])
    move = (lambda p, d: (p[0] + d, p[1])) if across else (lambda p, d: (p[0], p[1] + d))
    line = [move(points[0], first), *points[1:-1], move(points[-1], -last)]
    text = f"M{line[0][0]:.1f} {line[0][1]:.1f}"
    for a, b in itertools.pairwise(line):
        half = (b[0] - a[0]) / 2 if across else (b[1] - a[1]) / 2
        c, d = move(a, half), move(b, -half)
        text += f"C{c[0]:.1f} {c[1]:.1f} {d[0]:.1f} {d[1]:.1f} {b[0]:.1f} {b[1]:.1f}"
    style = ' class="dotted"' if edge[3] else ""
    drawn = f'<path{style} d="{text}" marker-end="url(#tip)"/>'
    if edge[2]:
        a, b = line[(len(line) - 1) // 2], line[(len(line) - 1) // 2 + 1]
        rows = re.split(r"<br/?>", edge[2])
        drawn += _text(((a[0] + b[0]) / 2, (a[1] + b[1]) / 2), rows, ' class="label"')
    return drawn


def _box(at: Point, size: Point, rows: list[str]) -> str:
    x, y = at[0] - size[0] / 2, at[1] - size[1] / 2
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{size[0]:.1f}" height="{size[1]:.1f}" rx="4"/>'
        + _text(at, rows)
    )


def _text(at: Point, rows: list[str], style: str = "") -> str:
    top = at[1] - (len(rows) - 1) * _LINE / 2 + 5
    lines = (
        f'<tspan x="{at[0]:.1f}" y="{top + i * _LINE:.1f}">{html.escape(row)}</tspan>'
        for i, row in enumerate(rows)
    )
    return f"<text{style}>{''.join(lines)}</text>"
