"""Draws small SVG pictures of boxes, text and arrows in one style, on a card that is readable on light and dark
pages."""

from html import escape

FONT = "Helvetica, Arial, sans-serif"
MONO = "DejaVu Sans Mono, Menlo, Consolas, monospace"
# Kind: (fill, stroke, fill on a dark card, stroke on a dark card). The hues are Okabe and Ito's.
KINDS = {
    "plain": ("#eceeef", "#8a939b", "#2b333a", "#8a97a3"),  # bytes as the user has them
    "kept": ("#d3e6f6", "#0072b2", "#12405f", "#56b4e9"),  # bits of the row that are stored
    "coder": ("#fce8bf", "#b97a00", "#5c4303", "#e69f00"),  # what the coder adds: digits, participation bits, headers
    "index": ("#cfeadf", "#007a59", "#0b4a3a", "#2cb894"),  # positions: lengths, bases, places
    "raw": ("#f8d9c9", "#c04d00", "#63270a", "#ee7733"),  # exceptions: escapes, overflow
    "left": ("#fbfbf8", "#b9c0c6", "#1b2127", "#56616b"),  # what is not stored
}
STYLE = "".join(
    [
        f"text{{font-family:{FONT};font-size:14px;fill:#1b2733}}",
        f".mono{{font-family:{MONO}}}.note{{fill:#56616b}}.head{{font-weight:bold;font-size:15px}}",
        ".small{font-size:12px}.mid{text-anchor:middle}.end{text-anchor:end}",
        ".card{fill:#fdfdfb;stroke:#d6d9d4}.line{fill:none;stroke:#56616b;stroke-width:1.5}.tip{fill:#56616b}",
        *(f".{kind}{{fill:{fill};stroke:{stroke}}}" for kind, (fill, stroke, _, _) in KINDS.items()),
        ".left{stroke-dasharray:3 3}",
        "@media (prefers-color-scheme:dark){text{fill:#e6eaee}.note{fill:#a9b4be}.card{fill:#1b2127;stroke:#3a444d}",
        ".line{stroke:#a9b4be}.tip{fill:#a9b4be}",
        *(f".{kind}{{fill:{fill};stroke:{stroke}}}" for kind, (_, _, fill, stroke) in KINDS.items()),
        "}",
    ]
)


class Drawing:
    """An SVG file that is being drawn. Lengths are in pixels, and y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>',
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>',
        ]

    def box(self, kind: str, x: float, y: float, width: float, height: float, text: str = "", style: str = "") -> None:
        """Draws a box with text in its middle. style: further classes of the text."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"/>')
        if text:
            self.text(x + width / 2, y + height / 2 + 5, text, f"mid {style}".strip())

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """Draws one line of text on the base line y."""
        self.parts.append(f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], tip: bool = True) -> None:
        """Draws a line through points. It ends with a tip if `tip` is set."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#tip)"' if tip else ""
        self.parts.append(f'<polyline class="line" points="{path}"{end}/>')

    def cells(self, kinds: list[str], texts: list[str], x: float, y: float, width: float, height: float) -> None:
        """Draws boxes of one size side by side, each with a short text."""
        for i, (kind, text) in enumerate(zip(kinds, texts)):
            self.box(kind, x + i * width, y, width, height, text, "mono small")

    def legend(self, x: float, y: float, entries: list[tuple[str, str]], step: float = 180) -> None:
        """Draws a line that explains the kinds of boxes."""
        for i, (kind, meaning) in enumerate(entries):
            self.box(kind, x + i * step, y - 11, 14, 14)
            self.text(x + i * step + 21, y, meaning, "small note")

    def svg(self) -> str:
        """Returns the text of the whole file."""
        return "\n".join([*self.parts, "</svg>", ""])
