"""The README's pictures show what the models really write, and need nothing from elsewhere."""
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
sys.path.insert(0, str(DOCS))

import make_pictures  # noqa: E402
from gpt2 import generate  # noqa: E402


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """{name: [(text, its attributes), ...]} of the pictures made anew."""
    directory = tmp_path_factory.mktemp("pictures")
    make_pictures.main(directory)
    return {path.stem: texts(path) for path in directory.iterdir()}


def texts(path):
    elements = ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")
    return [(element.text, element.attrib) for element in elements]


def plain_text(pair, prompt, n, n_speculative, **sampling):
    main = pair["7M"]
    return main.encoder.decode(generate(main.encoder.encode(prompt), main.params, main.n_head, n, **sampling))


def test_the_sample_is_the_text_of_plain_decoding(pictures, pair):
    written = [words for words, attributes in pictures["sample"]
               if attributes["fill"] in (make_pictures.BLUE, make_pictures.ORANGE, make_pictures.GREEN)]
    expected = "".join(plain_text(pair, **make_pictures.SAMPLE).split())
    assert "".join(written).split("\u25a0")[0] == expected  # the legend follows, each line with a square
    assert any(attributes.get("text-decoration") == "line-through" for _, attributes in pictures["sample"])


def test_the_round_keeps_what_plain_decoding_writes(pictures, pair):
    so_far = next(words for words, attributes in pictures["round"] if "textLength" in attributes)
    kept = [words for words, attributes in pictures["round"] if attributes["y"] == "298"]
    expected = make_pictures.ROUND["prompt"] + plain_text(pair, **make_pictures.ROUND)
    assert len(kept) == 3
    assert expected.startswith(" ".join([so_far, *kept]))


def test_wrapped_lines_keep_every_letter_in_its_column():
    pieces = [("one t", "accepted"), ("wo", "refused"), (" three\nfour ", None), ("a" * 12, "free")]
    lines = make_pictures.wrapped(pieces, 9)
    assert lines == [[(0, "one", "accepted"), (4, "t", "accepted"), (5, "wo", "refused")],
                     [(0, "three", None)], [(0, "four", None)], [(0, "a" * 9, "free")], [(0, "aaa", "free")]]


@pytest.mark.parametrize("name", ["round", "sample"])
def test_committed_pictures_need_nothing_from_elsewhere(name):
    picture = (DOCS / f"{name}.svg").read_text(encoding="utf-8")
    assert texts(DOCS / f"{name}.svg")
    assert "href" not in picture and "url(" not in picture and "<script" not in picture
    assert picture.count("http") == 1  # the name of the SVG format itself
