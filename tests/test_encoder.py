import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder import get_encoder

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
LINES = [json.loads(line) for line in (GOLDEN / "tokenizer.jsonl").read_text(encoding="utf-8").splitlines()]

gpt2 = get_encoder("gpt2_vocab", str(GOLDEN))
small = get_encoder("7M", str(ROOT / "models"))
both = pytest.mark.parametrize("encoder", [gpt2, small], ids=["gpt2", "7M"])

utf8_text = st.text(st.characters(exclude_categories=["Cs"]))
fitting = settings(max_examples=200, deadline=None)


# The references


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_agrees_with_hugging_face(line):
    assert gpt2.encode(line["text"]) == line["ids"]
    assert gpt2.decode(line["ids"]) == line["text"]
    assert small.decode(small.encode(line["text"])) == line["text"]


@pytest.mark.parametrize("size", ["1M", "7M"])
def test_bundled_vocabularies_encode_the_prompts_of_the_reference(size):
    encoder = get_encoder(size, str(ROOT / "models"))
    for line in (GOLDEN / f"pair_{size}.jsonl").read_text(encoding="utf-8").splitlines():
        reference = json.loads(line)
        assert encoder.encode(reference["prompt"]) == reference["prompt_ids"]
    assert len(encoder.encoder) == 4096


def naive_bpe(encoder, merges, text):
    """One word the way the paper writes it down: the best pair in all its places, over and over."""
    invisible = [*range(33), *range(127, 161), 173]
    word = [chr(256 + invisible.index(b) if b in invisible else b) for b in text.encode()]
    while ranked := [merges[pair] for pair in zip(word, word[1:]) if pair in merges]:
        best, i, merged = min(ranked), 0, []
        while i < len(word):
            n = 2 if merges.get(tuple(word[i:i + 2])) == best else 1
            merged.append("".join(word[i:i + n]))
            i += n
        word = merged
    return [encoder.encoder[token] for token in word]


def merges_of(path):
    lines = Path(path).read_text(encoding="utf-8").split("\n")[1:-1]
    return {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}


WORDS = st.one_of([st.text(alphabet, min_size=1, max_size=80) for alphabet in [
    "a", "ab", "etaoinshrdlu", "theringstoandESTHING", "áéíñüßØ", "привет", "日本語中国人的一是", "مرحبا",
    "0123456789", "-=*_.", "!?.,;:()[]", "🙂👩❤\u200d\ufe0f"]])


@pytest.mark.parametrize("encoder, path", [(gpt2, GOLDEN / "gpt2_vocab" / "vocab.bpe"),
                                           (small, ROOT / "models" / "7M" / "vocab.bpe")], ids=["gpt2", "7M"])
def test_merges_like_a_naive_implementation(encoder, path):
    merges = merges_of(path)

    @fitting
    @given(WORDS, st.sampled_from(["", " "]))
    def check(word, space):
        assert encoder.encode(space + word) == naive_bpe(encoder, merges, space + word)

    check()


# Any text, any ids


@both
def test_any_text_survives(encoder):
    @fitting
    @given(utf8_text)
    def check(text):
        assert encoder.decode(encoder.encode(text)) == text

    check()


@both
def test_any_bytes_survive_as_python_escapes_them(encoder):
    @fitting
    @given(st.binary())
    def check(raw):
        ids = encoder.encode(raw.decode("utf-8", "surrogateescape"))
        assert encoder.decode(ids) == raw.decode("utf-8", "replace")
        assert ids == encoder.encode(raw.decode("ascii", "surrogateescape"))  # a terminal without UTF-8

    check()


def run(code, argument, **environment):
    """What the code prints when another Python runs it."""
    command = [sys.executable, "-c", "import sys; from encoder import get_encoder; " + code, argument]
    return json.loads(subprocess.check_output(command, cwd=ROOT, env={**os.environ, **environment}))


@pytest.mark.parametrize("text, reads_as", [
    ("a\ud800b", "a\ufffdb"), ("\udfff", "\ufffd"), ("\udc7f\udd00", "\ufffd\ufffd"),
    ("\ud83d\ude42", "🙂"), ("\ud83d\udc80", "💀"),  # UTF-16 kept in a string
    ("\udcf0\udc9f\udc99\udc82", "🙂"), ("caf\udce9", "caf\ufffd"), ("\ufefftext", "\ufefftext")])
def test_lone_surrogates(text, reads_as):
    assert gpt2.decode(gpt2.encode(text)) == reads_as


def test_an_escaped_byte_keeps_its_own_token():
    assert gpt2.encode("caf\udce9") == gpt2.encode("caf") + [gpt2.encoder["é"]]  # the symbol of byte 0xE9


@pytest.mark.skipif(os.name == "nt", reason="Windows passes arguments as UTF-16")
def test_an_argument_that_is_not_utf8():
    done = run("e = get_encoder('7M', 'models'); print(e.encode(sys.argv[1]))", b"caf\xe9 au lait")
    assert small.decode(done) == "caf\ufffd au lait"


@pytest.mark.parametrize("encoder, end", [(gpt2, 50256), (small, 4095)], ids=["gpt2", "7M"])
def test_end_of_text_is_a_token_but_ordinary_as_text(encoder, end):
    assert encoder.encoder["<|endoftext|>"] == end
    assert encoder.decode([end]) == "<|endoftext|>"
    assert end not in encoder.encode("<|endoftext|>")


@both
def test_a_stream_adds_up_to_the_whole(encoder):
    pieces = st.lists(st.lists(st.integers(0, len(encoder.encoder) - 1), max_size=4), max_size=12)

    @fitting
    @given(pieces, st.booleans())
    def check(pieces, final_comes_alone):
        feed = encoder.incremental_decoder()
        if final_comes_alone:
            text = "".join([feed(ids) for ids in pieces]) + feed([], final=True)
        else:
            text = "".join([feed(ids, final=i == len(pieces)) for i, ids in enumerate(pieces, 1)])
        assert text == encoder.decode([i for ids in pieces for i in ids])

    check()


@both
def test_a_stream_of_single_bytes_adds_up_to_the_whole(encoder):
    single = [i for token, i in encoder.encoder.items() if len(token) == 1]

    @fitting
    @given(st.lists(st.sampled_from(single)))
    def check(ids):
        feed = encoder.incremental_decoder()
        assert "".join([feed([i]) for i in ids]) + feed([], final=True) == encoder.decode(ids)

    check()


def test_a_stream_shows_a_split_character_once_and_whole():
    ids = gpt2.encode("a🙂b")
    assert ids == gpt2.encode("a") + [8582, 25081] + gpt2.encode("b")
    feed = gpt2.incremental_decoder()
    assert [feed([i]) for i in ids] == ["a", "", "🙂", "b"]
    assert feed([8582]) == "" and feed([], final=True) == "\ufffd"
    assert feed(ids, final=True) == "a🙂b"  # after the end it is as good as new


@pytest.mark.parametrize("wrong", [-1, 4096, 50257, 10**30, 1.5, None, "a"])
def test_an_id_without_a_token(wrong):
    feed = small.incremental_decoder()
    for decode in small.decode, feed:
        with pytest.raises(ValueError, match=re.escape(f"token id {wrong} is not one of the 4096")):
            decode([5, wrong])
    assert feed([5]) == small.decode([5])  # nothing of the refused list stays behind


# Long input

LONG = {
    "one letter": "a", "letters": "".join(random.Random(1).choices("etaoinshrdlu", k=1000)), "words": "the ",
    "spaces": " ", "newlines": "\n", "digits": "1234567890", "zeros": "0", "dashes": "-",
    "punctuation": "!?.,", "ideographs": "日本語中国", "emoji": "🙂👩", "escaped bytes": "\udcff"}


def seconds(text):
    best = float("inf")
    for _ in range(2):
        start = time.process_time()
        gpt2.encode(text)
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("piece", LONG.values(), ids=LONG)
def test_long_input_takes_linear_time(piece):
    text = (piece * 100_000)[:100_000]
    short = max(seconds(text[:25_000]), 1e-3)
    assert seconds(text) < min(5, 10 * short)  # for four times the text; quadratic would be 16


def test_nothing_is_kept_of_what_was_encoded():
    words = "".join(f" {i:x}zq" for i in range(20_000))
    gpt2.encode("warm up")
    tracemalloc.start()
    try:
        gpt2.encode(words)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 50_000 < peak


# Files


@pytest.fixture
def folder(tmp_path):
    for name in "encoder.json", "vocab.bpe":
        shutil.copy(ROOT / "models" / "7M" / name, tmp_path)
    return tmp_path


SAMPLE = "The king's café 🙂\n  said: 12345"


def test_absolute_folder_and_hugging_face_names():
    for directory in "plain", "prefixed", "bfloat16_sharded":
        encoder = get_encoder(str(GOLDEN / "huggingface" / directory), "no such folder")
        assert encoder.encode(SAMPLE) == small.encode(SAMPLE)


@pytest.mark.parametrize("change", [
    lambda text: text.replace(b"\n", b"\r\n"),
    lambda text: b"\xef\xbb\xbf" + text,
    lambda text: text.rstrip(b"\n"),
    lambda text: text.partition(b"\n")[2] if text.startswith(b"#version") else text,
], ids=["windows", "byte order mark", "no last newline", "no version"])
def test_harmless_differences(folder, change):
    for path in folder.iterdir():
        path.write_bytes(change(path.read_bytes()))
    assert get_encoder(str(folder), "").encode(SAMPLE) == small.encode(SAMPLE)


def test_files_are_utf8_whatever_the_locale(folder):
    no_utf8 = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    ids = run(r"print(get_encoder(sys.argv[1], '').encode('caf\xe9 \u65e5'))", folder, **no_utf8)
    assert ids == small.encode("café 日")


def test_added_tokens_are_plain_text(folder):
    vocabulary = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    added = {"<pad>": 4096, "two words": 4097, "日本": 5000}
    (folder / "encoder.json").write_text(json.dumps({**vocabulary, **added}), encoding="utf-8")
    encoder = get_encoder(str(folder), "")
    assert encoder.encode("<pad> two words 日本") == small.encode("<pad> two words 日本")
    assert encoder.decode([4096, 4097, 5000, 4095]) == "<pad>two words日本<|endoftext|>"


def lacking(token):
    def change(text):
        vocabulary = json.loads(text)
        del vocabulary[token]
        return json.dumps(vocabulary).encode()
    return change


HOSTILE = {
    "empty": ("encoder.json", lambda text: b""),
    "truncated": ("encoder.json", lambda text: text[:len(text) // 2]),
    "zeros": ("encoder.json", lambda text: bytes(len(text))),
    "web page": ("encoder.json", lambda text: b"<!DOCTYPE html><html>Not Found</html>"),
    "not UTF-8": ("encoder.json", lambda text: b"\xff\xfe" + text),
    "a list": ("encoder.json", lambda text: b"[1, 2]"),
    "no tokens": ("encoder.json", lambda text: b"{}"),
    "other dictionary": ("encoder.json", lambda text: b'{"n_vocab": 4096, "n_ctx": "512"}'),
    "ids as text": ("encoder.json", lambda text: text.replace(b": 7,", b': "7",')),
    "ids as fractions": ("encoder.json", lambda text: text.replace(b": 7,", b": 7.0,")),
    "ids as truth": ("encoder.json", lambda text: text.replace(b": 1,", b": true,")),
    "negative id": ("encoder.json", lambda text: text.replace(b": 7,", b": -7,")),
    "one id twice": ("encoder.json", lambda text: text.replace(b": 7,", b": 8,")),
    "a byte less": ("encoder.json", lacking("Ā")),
    "deep nesting": ("encoder.json", lambda text: b"[" * 1_000_000),
    "endless number": ("encoder.json", lambda text: text.replace(b": 7,", b": " + b"7" * 5000 + b",")),
    "no merges": ("vocab.bpe", lambda text: b""),
    "only the version": ("vocab.bpe", lambda text: text.partition(b"\n")[0]),
    "half the merges": ("vocab.bpe", lambda text: text[:len(text) // 2]),
    "half the lines": ("vocab.bpe", lambda text: b"\n".join(text.split(b"\n")[:2000])),
    "merges of zeros": ("vocab.bpe", lambda text: bytes(len(text))),
    "merges not UTF-8": ("vocab.bpe", lambda text: text + b"\xff \xff\n"),
    "web page as merges": ("vocab.bpe", lambda text: b"<!DOCTYPE html>\n<html>Not Found</html>"),
    "pointer": ("vocab.bpe", lambda text: b"version https://git-lfs.github.com/spec/v1\nsize 30139\n"),
    "three in a line": ("vocab.bpe", lambda text: text + b"t h e\n"),
    "one in a line": ("vocab.bpe", lambda text: text + b"the\n"),
    "unknown product": ("vocab.bpe", lambda text: text + b"z q\n"),
    "unknown part": ("vocab.bpe", lambda text: text + b"thequick brown\n"),
    "other vocabulary": ("vocab.bpe", lambda text: (GOLDEN / "gpt2_vocab" / "vocab.bpe").read_bytes())}


@pytest.mark.parametrize("name, change", HOSTILE.values(), ids=HOSTILE)
def test_damaged_files(folder, name, change):
    path = folder / name
    damaged = change(path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(ValueError) as caught:
        get_encoder(str(folder), "")
    message = str(caught.value)
    assert type(caught.value) is ValueError
    assert message.startswith(f"{path} is damaged (")
    assert message.endswith("); delete it and fetch the model again")
    assert "\n" not in message and len(message) < len(str(path)) + 200


@pytest.mark.parametrize("missing, named", [("encoder.json", "encoder.json or vocab.json"),
                                            ("vocab.bpe", "vocab.bpe or merges.txt")])
def test_missing_files(folder, missing, named):
    (folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {named}; fetch the model or choose another$"):
        get_encoder(str(folder), "")
    (folder / missing).mkdir()
    with pytest.raises(FileNotFoundError, match=f"has no {named}"):
        get_encoder(str(folder), "")


def test_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "nothing"))):
        get_encoder("nothing", str(tmp_path))
