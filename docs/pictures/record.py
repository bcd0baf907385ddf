#!/usr/bin/env python3
"""Records a program in a terminal as an animated SVG: the program's own output, with the waiting left out.

    pip install pyte
    cargo build --profile kv -p dsv4-kv-cli --no-default-features
    python3 docs/pictures/record.py docs/pictures/replay.svg "cargo kv replay" target/kv/dsv4-kv replay

The picture of the report beside it is a screenshot of

    cargo kv replay --execute bookkeeping --requests 200 --report report.html
    chromium --headless --hide-scrollbars --window-size=1000,2070 --screenshot=report.png report.html
"""

import fcntl
import html
import os
import pty
import select
import struct
import sys
import termios
import time

import pyte

COLUMNS, ROWS = 120, 40
# Of the recording: seconds between two pictures of a program that draws all the time, and how long the last one stays.
SAMPLE, SHOWN, LAST = 0.5, 0.45, 12.0
# Most pictures: of a longer run every second one, and so on.
MAX_PICTURES = 24


def record(command):
    """The screens that the program showed, each once, and how many seconds it ran."""
    begin = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.environ.update(TERM="xterm")
        os.execvp(command[0], command)
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    screens, sampled, ended = [], 0.0, False
    while not ended:
        if select.select([terminal], [], [], SAMPLE)[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:
                data = b""
            ended = not data
            stream.feed(data)
        now = time.monotonic()
        if ended or now - sampled >= SAMPLE:
            sampled = now
            lines = [line.rstrip() for line in screen.display]
            if not screens or screens[-1] != lines:
                screens.append(lines)
    _, status = os.waitpid(child, 0)
    if status != 0:
        sys.exit(f"{command} ended with {status}")
    return screens, time.monotonic() - begin


def thinned(screens):
    """At most MAX_PICTURES of them, among them the last."""
    step = -(-len(screens) // MAX_PICTURES)
    return screens[:-1][::step] + screens[-1:]


def trimmed(lines):
    """Without the empty lines at the end."""
    while lines and not lines[-1]:
        lines = lines[:-1]
    return lines


def svg(title, screens, seconds):
    height = 18 * max(len(trimmed(lines)) for lines in screens) + 42
    width = 8.2 * COLUMNS + 24
    total = SHOWN * (len(screens) - 1) + LAST
    style = f"""text{{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#e6e6e6;white-space:pre}}
.p{{fill:#8fd18f}}.f{{visibility:hidden;animation:f {total:.2f}s step-end infinite}}"""
    parts = [f'<rect width="100%" height="100%" rx="8" fill="#1b1f24"/>', f'<text class="p" x="12" y="26">$ {html.escape(title)}</text>']
    for at, lines in enumerate(screens):
        begin, is_last = SHOWN * at / total, at == len(screens) - 1
        end = 1.0 if is_last else SHOWN * (at + 1) / total
        name = f"f{at}"
        hidden = "" if end == 1.0 else f"{100 * end:.2f}%{{visibility:hidden}}"
        style += f"\n@keyframes {name}{{0%{{visibility:{'visible' if begin == 0 else 'hidden'}}}{100 * begin:.2f}%{{visibility:visible}}{hidden}}}"
        rows = [f'<text x="12" y="{50 + 18 * row}">{html.escape(line)}</text>' for row, line in enumerate(lines) if line]
        parts.append(f'<g class="f" style="animation-name:{name}">{"".join(rows)}</g>')
    said = f"{html.escape(title)}, a run of {seconds:.0f} seconds, shortened"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img"><title>{said}</title>'
    # Where nothing moves, the last picture is shown.
    style += "\n@media (prefers-reduced-motion:reduce){.f{animation:none}.f:last-of-type{visibility:visible}}"
    return f"{head}\n<style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n"


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    target, title, *command = sys.argv[1:]
    screens, seconds = record(command)
    with open(target, "w") as file:
        file.write(svg(title, thinned(screens), seconds))


if __name__ == "__main__":
    main()
