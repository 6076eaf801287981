"""Make the pictures of the README, docs/round.svg and docs/sample.svg, from real runs of the bundled pair.

    python docs/make_pictures.py
"""
import sys
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from gpt2 import generate_speculative, gpt2  # noqa: E402
from utils import load_encoder_hparams_and_params  # noqa: E402

BLUE, ORANGE, GREEN = "#56B4E9", "#E69F00", "#009E73"  # Okabe and Ito: the colour-blind see them too
INK, GREY = "#1f2328", "#6e7781"
SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

SAMPLE = {"prompt": "The wolf said to the", "n": 55, "n_speculative": 2, "temperature": 0.6, "seed": 4}
ROUND = {"prompt": "In the middle of the forest stood a little house", "n": 40, "n_speculative": 4}


def speculate(pair, prompt, n, n_speculative, **sampling):
    """Return the prompt's ids and the rounds that continued it."""
    (encoder, hparams, params), (_, _, draft_params) = pair
    inputs, rounds = encoder.encode(prompt), []
    generate_speculative(inputs, params, draft_params, hparams["n_head"], n, n_speculative, **sampling,
                         on_round=rounds.append)
    return inputs, rounds


def svg(width, height, background, border, label, shapes):
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">',
        f'<rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10" '
        f'fill="{background}" stroke="{border}"/>',
        *shapes, "</svg>\n"])


def text(x, y, words, size=15, fill=INK, family=SANS, **attributes):
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return (f'<text x="{x:g}" y="{y:g}" font-family="{family}" font-size="{size}" fill="{fill}"{more}>'
            f"{escape(words, quote=False)}</text>")


# ---- One round: three rows of boxes, a column for each place in the text.


def a_round(pair):
    """Return the text so far, the drafts, the main model's picks, and how many drafts it accepted: two."""
    (encoder, hparams, params), _ = pair
    tokens, rounds = speculate(pair, **ROUND)
    for round in rounds:
        if (round.n_drafted, round.n_accepted) == (4, 2):
            break
        tokens += round.tokens
    else:
        raise ValueError("no round of this run accepted two of four drafts: choose another prompt for it")
    logits = gpt2([*tokens, *round.draft], **params, n_head=hparams["n_head"])[-5:]  # -> [5, n_vocab]
    words = [[encoder.decode([i]) for i in ids] for ids in (round.draft, logits.argmax(axis=-1).tolist())]
    return encoder.decode(tokens), *words, round.n_accepted


def draw_round(pair):
    so_far, drafts, picks, n_accepted = a_round(pair)
    left, step, width, height = 262, 116, 98, 40
    rows = {"draft": 92, "verify": 182, "keep": 272}
    shapes = []

    def box(row, column, word, fill, edge=None, ink=INK, dashed=False, struck=False):
        x, y = left + column * step, rows[row]
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        shapes.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{fill}" '
                      f'stroke="{edge or fill}" stroke-width="2"{dash}/>')
        shapes.append(text(x + width / 2, y + 26, word.strip(), 16, ink, MONO, text_anchor="middle",
                           **{"text_decoration": "line-through"} if struck else {}))

    def sign(column, sign):
        x = left + column * step + width / 2
        shapes.append(text(x, 163, sign, 24, INK, MONO, text_anchor="middle", font_weight="bold"))

    def heading(row, name, *lines):
        shapes.append(text(28, rows[row] + 12, name, 17, font_weight="bold"))
        shapes.extend(text(28, rows[row] + 31 + 17 * i, line, 13, GREY) for i, line in enumerate(lines))

    shapes.append(text(28, 38, "The text so far:", 15, GREY))
    shapes.append(text(150, 38, so_far, 14, INK, MONO, textLength=f"{len(so_far) * 8.4:g}"))
    shapes.append(f'<line x1="28" y1="58" x2="{left + 5 * step - 18}" y2="58" stroke="#d0d7de"/>')

    heading("draft", "1  Draft", "The small model guesses", "four tokens, one by one.")
    heading("verify", "2  Verify", "The large model reads all", "of them in one single pass.")
    heading("keep", "3  Keep", "Equal guesses, then the", "large model's own token.")
    for i, (draft, pick) in enumerate(zip(drafts, picks)):
        if i < n_accepted:
            box("draft", i, draft, BLUE)
            box("verify", i, pick, "#ffffff", BLUE)
            box("keep", i, pick, BLUE)
            sign(i, "=")
        else:
            box("draft", i, draft, "#eaeef2", ink=GREY, struck=True)
        if i == n_accepted:
            box("verify", i, pick, "#ffffff", ORANGE)
            box("keep", i, pick, ORANGE)
            sign(i, "\u2260")
    for i in range(n_accepted + 1, 5):
        box("verify", i, picks[i], "#ffffff", "#afb8c1", GREY, dashed=True)
    shapes.append(text(left + (n_accepted + 1) * step, 242, "not used: they continue", 13, GREY))
    shapes.append(text(left + (n_accepted + 1) * step, 259, "a text that was refused", 13, GREY))

    n = n_accepted + 1
    shapes.append(f'<line x1="28" y1="342" x2="{left + 5 * step - 18}" y2="342" stroke="#d0d7de"/>')
    shapes.append(text(28, 370, f"{n} tokens for one pass of the large model: the very {n} that it "
                                f"writes alone, in {n} passes.", 15, font_weight="bold"))
    drafted, picked, kept = ("".join(words).strip() for words in (drafts, picks, picks[:n]))
    label = f"One round. So far: {so_far}. Drafts: {drafted}. The large model picks: {picked}. Kept: {kept}."
    return svg(left + 5 * step + 10, 394, "#ffffff", "#d0d7de", label, shapes)


# ---- A sample: what the terminal shows with --show_drafts.

COLOURS = {"accepted": BLUE, "correction": ORANGE, "free": GREEN, "refused": "#7d8590", None: "#e6edf3"}
COMMAND = """\
$ python gpt2.py "{prompt}" --model_size 7M --temperature {temperature} --seed {seed} \\
    --n_speculative {n_speculative} --n_tokens_to_generate {n} --show_drafts"""
STYLES = {"correction": {"font_weight": "bold"}, "refused": {"text_decoration": "line-through"}}
LEGEND = [("accepted", "drafted by the small model, accepted by the large one"),
          ("refused", "drafted and refused"),
          ("correction", "what the large model picked instead"),
          ("free", "one more token from the large model, where it refused nothing")]


def coloured(round, decode):
    """Yield (text, origin) for what a round wrote, the refused drafts before their correction."""
    for i, token in enumerate(round.tokens):
        if i == round.n_accepted < round.n_drafted:
            yield decode(round.draft[i:]).replace("\n", "\u21b5"), "refused"
        origin = "accepted" if i < round.n_accepted else "correction" if i < round.n_drafted else "free"
        yield decode([token]), origin


def wrapped(pieces, width):
    """Break (text, origin) pieces at spaces, into lines of at most `width` characters.

    Returns the lines word by word: [[(column, text, origin), ...], ...].
    """
    letters = [(letter, origin) for piece, origin in pieces for letter in piece]
    lines = []
    while letters:
        plain = "".join(letter for letter, _ in letters[: width + 1])
        end = plain.find("\n") if "\n" in plain else plain.rfind(" ") if len(plain) > width else len(plain)
        end = end if end >= 0 else width
        words = []
        for column, (letter, origin) in enumerate(letters[:end]):
            if letter == " ":
                words.append((column + 1, "", origin))
            elif words and words[-1][2] == origin:
                words[-1] = (words[-1][0], words[-1][1] + letter, origin)
            else:
                words.append((column, letter, origin))
        lines.append([word for word in words if word[1]])
        letters = letters[end + (plain[end : end + 1] in (" ", "\n")) :]
    return lines


def draw_sample(pair):
    encoder = pair[0][0]
    _, rounds = speculate(pair, **SAMPLE)
    pieces = [piece for round in rounds for piece in coloured(round, encoder.decode)]
    counts = [(len(r.tokens), r.n_drafted, r.n_accepted) for r in rounds]
    n_tokens, n_drafted, n_accepted = map(sum, zip(*counts))

    command = [[(line, None)] for line in COMMAND.format(**SAMPLE).splitlines()]
    legend = [[("\u25a0 ", origin), (words, origin)] for origin, words in LEGEND]
    statistics = (f"{n_tokens} tokens in {len(rounds)} passes of the large model "
                  f"({n_tokens / len(rounds):.2f} per pass), "
                  f"{n_accepted} of {n_drafted} drafts accepted ({n_accepted / n_drafted:.0%})")
    lines = []
    for block in (command, [pieces], legend, [[(statistics, None)]]):
        lines += [line for paragraph in block for line in wrapped(paragraph, 92)] + [[]]
    lines.pop()

    advance, leading, margin = 8.4, 22, 24
    shapes = [f'<circle cx="{margin + 20 * i}" cy="24" r="6" fill="#30363d"/>' for i in range(3)]
    for row, line in enumerate(lines):
        for column, words, origin in line:
            x, y = margin + column * advance, 62 + row * leading
            shapes.append(text(x, y, words, 14, COLOURS[origin], MONO, **STYLES.get(origin, {}),
                               lengthAdjust="spacingAndGlyphs",  # keeps the columns in any font
                               textLength=f"{len(words) * advance:g}"))
    kept = "".join(piece for piece, origin in pieces if origin != "refused")
    return svg(2 * margin + round(92 * advance), 62 + len(lines) * leading, "#0d1117", "#30363d",
               f"The continuation as --show_drafts colours it:{kept}", shapes)


def main(directory=DOCS):
    pair = [load_encoder_hparams_and_params(size) for size in ("7M", "1M")]
    Path(directory, "round.svg").write_text(draw_round(pair), encoding="utf-8", newline="\n")
    Path(directory, "sample.svg").write_text(draw_sample(pair), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
