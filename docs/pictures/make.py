#!/usr/bin/env python3
"""Draws the pictures of this folder: `python3 docs/pictures/make.py`. Needs nothing but Python."""

from pathlib import Path

STYLE = """<style>text{font:13px system-ui,sans-serif;fill:#222}.s{font-size:11px;fill:#555}
rect{stroke:#555;stroke-width:.8}.swa{fill:#cfe3f7}.csa{fill:#fbe3c0}.key{fill:#f7cfcf}.hca{fill:#d5efcf}
.st{fill:#e6dcf4}.none{fill:#fff}path{stroke:#555;fill:none;stroke-width:1.2}
@media (prefers-color-scheme:dark){text{fill:#ddd}.s{fill:#aaa}rect{stroke:#999;fill-opacity:.35}.none{fill:#222}}
</style>"""


def rect(x, y, w, h, kind, text="", small=False):
    shown = f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="2"/>'
    if text:
        size = ' class="s"' if small else ""
        shown += f'<text{size} x="{x + w / 2}" y="{y + h / 2 + 4}" text-anchor="middle">{text}</text>'
    return shown


def text(x, y, words, small=False, anchor="start"):
    size = ' class="s"' if small else ""
    return f'<text{size} x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def svg(name, width, height, parts):
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    Path(__file__).with_name(name).write_text(f"{head}\n{STYLE}\n{body}\n</svg>\n")


def cache():
    """Layers down, blocks and slots across; below, what a step does."""
    parts = [text(20, 24, "blocks of 128 tokens, one pool for all layers"), text(560, 24, "slots, one a request")]
    layers = [("SWA layer", "swa"), ("CSA layer", "csa"), ("HCA layer", "hca"), ("CSA layer", "csa")]
    for row, (name, kind) in enumerate(layers):
        y = 44 + 46 * row
        parts.append(text(20, y + 24, name))
        for block in range(5):
            x = 110 + 84 * block
            if kind == "swa":
                parts.append(rect(x, y, 76, 36, "none"))
            elif kind == "csa":
                parts.append(rect(x, y, 76, 18, "csa", "32 entries", True))
                parts.append(rect(x, y + 18, 76, 18, "key", "32 keys", True))
            else:
                parts.append(rect(x, y, 76, 36, "hca", "1 entry", True))
        for slot in range(2):
            x = 560 + 136 * slot
            if kind == "swa":
                parts.append(rect(x, y, 128, 36, "swa", "window, 128 rows", True))
            else:
                parts.append(rect(x, y, 128, 18, "swa", "window, 128 rows", True))
                parts.append(rect(x, y + 18, 128, 18, "st", "compressor's rows", True))
    for block in range(5):
        parts.append(text(148 + 84 * block, 240, f"block {block}", True, "middle"))
    for slot in range(2):
        parts.append(text(624 + 136 * slot, 240, f"slot {slot}", True, "middle"))
    parts.append(text(20, 262, "A request is a slot and a list of blocks. Blocks are shared by requests with the same first tokens.", True))
    steps = [
        ("begin_step", "all blocks or none"),
        ("update", "entries, keys, state"),
        ("attend or gather", "window, lists, all"),
        ("append", "rows to the window"),
        ("commit", "accepted tokens"),
    ]
    for place, (name, what) in enumerate(steps):
        x = 20 + 166 * place
        parts += [rect(x, 280, 140, 46, "none"), text(x + 70, 300, name, False, "middle"), text(x + 70, 317, what, True, "middle")]
        if place:
            parts.append(f'<path d="M{x - 26} 303h20m-6 -5l6 5l-6 5"/>')
    parts.append('<path d="M186 334v10h468v-10"/>')
    parts.append(text(420, 360, "each layer, one launch or a few; or all layers as one captured graph", True, "middle"))
    svg("cache.svg", 860, 372, parts)


def rows():
    """Bytes of a main row and of an indexer key."""
    parts = [text(20, 24, "main row, 584 bytes (ue8m0): a token of a window, or a compressed entry")]
    parts.append(text(20, 62, "data, 576 B", True))
    for group in range(7):
        parts.append(rect(110 + 70 * group, 42, 70, 32, "swa", "64 E4M3", True))
    parts.append(rect(600, 42, 140, 32, "csa", "64 BF16", True))
    for offset, x in [(0, 110), (64, 180), (128, 250), (192, 320), (256, 390), (320, 460), (384, 530), (448, 600), (576, 740)]:
        parts.append(text(x, 88, str(offset), True, "middle"))
    parts.append(text(20, 120, "scales, 8 B", True))
    for group in range(7):
        parts.append(rect(110 + 70 * group, 100, 70, 32, "st", "UE8M0", True))
    parts.append(rect(600, 100, 70, 32, "none", "0", True))
    parts.append(text(20, 168, "indexer key, 68 bytes (mxfp4)"))
    parts.append(text(20, 206, "codes, 64 B", True))
    for group in range(4):
        parts.append(rect(110 + 120 * group, 186, 120, 32, "key", "32 E2M1", True))
    for offset in range(5):
        parts.append(text(110 + 120 * offset, 232, str(16 * offset), True, "middle"))
    parts.append(text(20, 264, "scales, 4 B", True))
    for group in range(4):
        parts.append(rect(110 + 120 * group, 244, 120, 32, "st", "UE8M0", True))
    svg("rows.svg", 760, 290, parts)


cache()
rows()
