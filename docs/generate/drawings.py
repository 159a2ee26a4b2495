"""Draws the images of the documentation: ``python docs/generate/drawings.py``.

They keep a light ground of their own, so that they can be read in dark mode too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "images"
COLORS = "#3f74b5", "#e07b1f", "#4a9a52"  # of the devices
PALE = "#c9d9ec", "#f7dcc0", "#cde5cf"
INK, GREY, GROUND = "#24303c", "#67727e", "#fbfbfd"


class Drawing:
    """An SVG under construction."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" role="img" '
                f'font-family="system-ui, sans-serif" font-size="14">'
            ),
            f"<title>{title}</title>",
            (
                '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                'markerHeight="7" orient="auto-start-reverse">'
                f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
            ),
            f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>',
        ]

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, stroke: str = "#ffffff",
        dashed: bool = False, rx: float = 0,
    ) -> None:  # fmt: skip
        """Adds a rectangle."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{rx:g}" fill="{fill}" '
            f'stroke="{stroke}"{dash}/>'
        )

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", color: str = INK,
        bold: bool = False, size: int = 14,
    ) -> None:  # fmt: skip
        """Adds a line of text."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}" '
            f'font-size="{size}"{weight}>{words}</text>'
        )

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        both: bool = False,
        color: str = INK,
    ) -> None:
        """Adds an arrow."""
        start = ' marker-start="url(#a)"' if both else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
            f'stroke-width="1.6" marker-end="url(#a)"{start}/>'
        )

    def rows(
        self, x: float, y: float, w: float, counts: Sequence[int], size: float = 12
    ) -> None:
        """Adds an image of rows, so many of each device."""
        at = y
        for color, count in zip(COLORS, counts, strict=False):
            for _ in range(count):
                self.box(x, at, w, size, color)
                at += size

    def svg(self) -> str:
        """Returns the file's text."""
        return "\n".join([*self.parts, "</svg>", ""])


def idea() -> Drawing:
    """One image, three devices: strips in proportion to speeds, halos between them."""
    d = Drawing(
        860, 370, "One image is cut into unequal strips for three unequal devices"
    )
    names, shares = ("fast GPU", "older GPU", "CPU"), (8, 4, 2)
    d.text(95, 34, "one image", "middle", bold=True)
    d.rows(30, 60, 130, shares, 14)
    d.text(330, 34, "each device: its strip and a halo", "middle", bold=True)
    first = 0
    top = 58.0
    for rank, (name, count) in enumerate(zip(names, shares, strict=True)):
        above, below = rank > 0, rank < 2
        d.arrow(166, 60 + 14 * (first + count / 2), 252, top + 14 * (count / 2 + above))
        for row in range(count + above + below):
            halo = (above and row == 0) or (below and row == count + above + below - 1)
            neighbour = rank - 1 if row == 0 else rank + 1
            fill = PALE[neighbour] if halo else COLORS[rank]
            edge = COLORS[neighbour] if halo else "#ffffff"
            d.box(260, top + 14 * row, 100, 13 if halo else 14, fill, edge, dashed=halo)
        d.text(370, top + 14 * (count / 2 + above) + 5, name)
        first, top = first + count, top + 14 * (count + above + below) + 14
    # seconds are rows over speeds: 8/8, 4/4 and 2/2, or a third of 14 each
    for y, title, rows in (
        (84, "split in proportion to speed", shares),
        (216, "split evenly", (14 / 3,) * 3),
    ):
        d.text(480, y - 20, title, bold=True)
        for rank, (count, speed) in enumerate(zip(rows, shares, strict=True)):
            d.box(480, y + 26 * rank, 150 * count / speed, 18, COLORS[rank], rx=2)
    d.arrow(480, 318, 840, 318, color=GREY)
    d.text(
        660,
        340,
        "time of a step: it ends when the last device ends",
        "middle",
        GREY,
        size=13,
    )
    return d


def halo() -> Drawing:
    """A window at the cut reads a row of the neighbour."""
    d = Drawing(760, 300, "Halo exchange of a 3 x 3 convolution between two ranks")
    for rank, (y, count) in enumerate(((50, 5), (170, 3))):
        d.text(30, y - 12, f"rank {rank}", bold=True, color=COLORS[rank])
        for row in range(count):
            d.box(30, y + 18 * row, 170, 18, COLORS[rank])
    d.text(115, 242, "own rows", "middle", GREY)
    d.box(216, 122, 170, 18, PALE[0], COLORS[0], dashed=True)
    d.text(301, 112, "halo for rank 1", "middle", GREY)
    d.box(216, 170, 170, 18, PALE[1], COLORS[1], dashed=True)
    d.text(301, 206, "halo for rank 0", "middle", GREY)
    d.arrow(301, 142, 301, 168, both=True)
    d.text(312, 160, "one message each way", size=12, color=GREY)
    d.text(480, 38, "outputs", bold=True)
    for rank, (y, count) in enumerate(((50, 5), (170, 3))):
        for row in range(count):
            beside = row == (0 if rank else count - 1)
            d.box(
                480,
                y + 18 * row,
                110,
                18,
                PALE[rank] if beside else COLORS[rank],
                "#ffffff",
            )
        beside_y = y + (14 if rank else 18 * count - 5)
        d.text(600, beside_y, "own rows + halo row", size=13)
        d.text(600, y + (46 if rank else 40), "own rows alone,", size=13, color=GREY)
        d.text(600, y + (62 if rank else 56), "while halos travel", size=13, color=GREY)
    law = "conv(own rows and halo) = conv(own rows) + conv(halo)"
    d.text(30, 278, f"{law}: the halo adds to the rows beside the cut.")
    return d


def adjoints() -> Drawing:
    """Three movements, and what their backward passes do."""
    d = Drawing(860, 320, "Movements between layouts and their adjoints")
    panels = (
        ("gather", "sharded → replicated", "every rank gets the whole", "take the own box"),
        ("halo", "sharded → read region", "rows beside the cut travel",
         "their gradients travel home and add"),
        ("reduce", "partial → sharded", "summands add up, each keeps its box",
         "gather"),
    )  # fmt: skip
    for p, (kind, title, forward, backward) in enumerate(panels):
        x = 20 + 285 * p
        d.box(x, 16, 265, 288, "#ffffff", "#d5dae0", rx=6)
        d.text(x + 132, 42, title, "middle", bold=True)
        _sides(d, kind, x)
        d.arrow(x + 116, 96, x + 150, 96)
        d.text(x + 132, 176, "forward", "middle", bold=True, size=13)
        d.text(x + 132, 196, forward, "middle", size=13, color=GREY)
        d.arrow(x + 150, 122, x + 116, 122, color=GREY)
        d.text(x + 132, 232, "backward", "middle", bold=True, size=13)
        d.text(x + 132, 252, backward, "middle", size=13, color=GREY)
        d.text(x + 132, 284, "⟨Fx, y⟩ = ⟨x, F*y⟩", "middle", size=13)
    return d


def _sides(d: Drawing, kind: str, x: float) -> None:
    """Adds what ranks 0 and 1 hold before and after."""
    for rank in range(2):
        before, after = x + 18 + 48 * rank, x + 160 + 48 * rank
        own = (5, 3)[rank]
        offset = 70 + (50 if rank else 0)
        if kind == "reduce":
            d.box(before, 70, 38, 80, PALE[rank], COLORS[rank])
            d.text(before + 19, 115, "+" if rank else "", "middle")
        else:
            d.box(before, offset, 38, own * 10, COLORS[rank])
        if kind == "gather":
            d.box(after, 70, 38, 50, COLORS[0])
            d.box(after, 120, 38, 30, COLORS[1])
            continue
        d.box(after, offset, 38, own * 10, COLORS[rank])
        if kind == "halo":
            y = 110 if rank else 120
            d.box(after, y, 38, 10, PALE[1 - rank], COLORS[1 - rank], dashed=True)


def kinds() -> Drawing:
    """What each kind of split divides."""
    d = Drawing(
        860, 190, "Kinds of split: samples, rows, columns, filters, input channels"
    )
    panels = (
        ("sample", "images of the batch"), ("height", "rows"), ("width", "columns"),
        ("filter", "output channels"), ("channel", "input channels, summed"),
    )  # fmt: skip
    for p, (kind, divided) in enumerate(panels):
        x = 24 + 168 * p
        d.text(x + 62, 34, kind, "middle", bold=True)
        if kind == "height":
            d.rows(x + 12, 56, 100, (6, 2), 10)
        elif kind == "width":
            d.box(x + 12, 56, 75, 80, COLORS[0])
            d.box(x + 87, 56, 25, 80, COLORS[1])
        else:
            for layer in reversed(range(4)):
                color = COLORS[layer == 3]
                d.box(x + 10 + 12 * layer, 56 + 8 * (3 - layer), 62, 56, color)
        d.text(x + 62, 166, divided, "middle", GREY, size=13)
    return d


def flow() -> Drawing:
    """From measuring to a split model."""
    d = Drawing(860, 150, "autotune measures, plan chooses, parallelize splits")
    steps = (
        ("hetconv autotune", "measures devices", "and links", True),
        ("cluster.json", "seconds of layers,", "latency, bandwidth", False),
        ("hetconv plan", "chooses a split", "for every layer", True),
        ("plan.json", "a kind and a size", "per device and layer", False),
        ("parallelize", "splits the model", "in your program", True),
    )
    for s, (name, first, second, acts) in enumerate(steps):
        x = 14 + 170 * s
        d.box(
            x,
            30,
            146,
            90,
            PALE[0] if acts else "#ffffff",
            COLORS[0],
            rx=8 if acts else 0,
        )
        d.text(x + 73, 56, name, "middle", bold=True, size=13)
        d.text(x + 73, 82, first, "middle", GREY, size=13)
        d.text(x + 73, 100, second, "middle", GREY, size=13)
        if s:
            d.arrow(x - 22, 75, x - 3, 75)
    return d


DRAWINGS = {draw.__name__: draw for draw in (idea, halo, adjoints, kinds, flow)}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
