"""`python gpt2.py` as people run it: a process of its own, its two streams and its exit code."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import safetensors.numpy

from conftest import ROOT, mapped, random_model
from gpt2 import generate

FLAGS = [
    "n_tokens_to_generate",
    "model_size",
    "models_dir",
    "use_generate_speculative",
    "draft_size",
    "n_speculative",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "show_drafts",
]
posix = pytest.mark.skipif(os.name != "posix", reason="a matter of POSIX signals and terminals")


def start(*arguments, env={}, **options):
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONIOENCODING", "PYTHONUNBUFFERED", "NO_COLOR", "GPT2_MODELS_URL")
    }
    options = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) | options
    return subprocess.Popen(
        [sys.executable, str(ROOT / "gpt2.py"), *map(str, arguments)],
        env=environment | {"PYTHONIOENCODING": "utf-8"} | env,
        **options,
    )


def run(*arguments, given=None, **options):
    """Return the exit code and what came on the two streams."""
    process = start(*arguments, **options | ({} if given is None else {"stdin": subprocess.PIPE}))
    out, err = (stream.decode().replace("\r\n", "\n") for stream in process.communicate(given, timeout=60))
    assert "Traceback" not in err and "Exception ignored" not in err, err
    return process.returncode, out, err


def without_end_of_line(text):
    return text[:-1] if text.endswith("\n") else text


def assert_continues(done, text):
    """It writes just this text to standard output, but may end the line."""
    code, out, err = done
    assert code == 0, err
    assert out in (text, text + "\n")


def number(word, err):
    """The number that the statistics give for a word."""
    line = err.strip().splitlines()[-1]
    found = re.search(rf"([\d.]+) (?:[\w-]+ )?{word}|{word}\W+([\d.]+)", line)
    assert found, f"no {word} in {line!r}"
    return float(found[1] or found[2])


@pytest.fixture(scope="session")
def expected(pair):
    def continuation(prompt, n, size="1M", **settings):
        encoder, end = pair[size].encoder, 4095
        ids = generate(
            encoder.encode(prompt) or [end],
            pair[size].params,
            pair[size].n_head,
            n,
            stop_token=end,
            **settings,
        )
        return encoder.decode([i for i in ids if i != end])

    return continuation


def model_that_writes(directory, ids, n_vocab=4096):
    """Write a model, in Hugging Face's layout, that follows a prompt of one token with these ids."""
    different = sorted(set(ids))
    model = random_model(n_vocab, len(ids) + 10, max(8, len(different)), 1, 1).params
    tensors = mapped(np.zeros_like, model)
    spikes = np.eye(tensors["wte"].shape[1], dtype=np.float32)
    for i, spike in zip(different, spikes):
        tensors["wte"][i] = spike
    tensors["wpe"][: len(ids)] = 100 * spikes[[different.index(i) for i in ids]]
    tensors["ln_f"]["g"][:] = 1
    parts = {"wte": tensors["wte"], "wpe": tensors["wpe"], "ln_f": tensors["ln_f"]} | {
        "h.0": tensors["blocks"][0]
    }
    names = {"w": "weight", "g": "weight", "b": "bias", "wte": "wte.weight", "wpe": "wpe.weight"}

    def flat(node, path=()):
        if not isinstance(node, dict):
            return {".".join(path): np.ascontiguousarray(node)}
        return {
            k: v for key, value in node.items() for k, v in flat(value, (*path, names.get(key, key))).items()
        }

    directory.mkdir()
    safetensors.numpy.save_file(flat(parts), directory / "model.safetensors")
    config = dict(
        model_type="gpt2",
        vocab_size=n_vocab,
        n_positions=len(model["wpe"]),
        n_embd=len(spikes),
        n_head=1,
        n_layer=1,
    )
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(ROOT / "models" / "1M" / "encoder.json", directory / "vocab.json")
    shutil.copy(ROOT / "models" / "1M" / "vocab.bpe", directory / "merges.txt")
    return directory


# The text


@pytest.mark.parametrize(
    "prompt",
    [
        "Once upon a time",
        "123",
        "1e5",
        "[1, 2]",
        "True",
        "None",
        '"quoted"',
        "'it'",
        "{'a': 1}",
        "a,b",
        "(1)",
        "0x10",
        "1_000",
        "",
        " ",
        "Zwölf Könige, 王",
        "two\nlines\n",
        "# comment",
        "a=b",
        "<|endoftext|>",
    ],
)
def test_any_prompt_is_text(expected, prompt):
    assert_continues(run(prompt, "--model_size", "1M", "--n_tokens_to_generate", 6), expected(prompt, 6))


def test_a_prompt_may_be_named_and_may_begin_with_a_dash(expected):
    assert_continues(
        run("--prompt=-x- 12", "--model_size=1M", "--n_tokens_to_generate=6"), expected("-x- 12", 6)
    )


@pytest.mark.parametrize("given", ["It was a dark night", "Zwölf\nKönige\n", ""])
def test_a_prompt_from_standard_input(expected, given):
    code, out, err = done = run("-", "--model_size", "1M", "--n_tokens_to_generate", 6, given=given.encode())
    assert_continues(done, expected(given, 6))


def test_bytes_on_standard_input_that_are_no_utf8(pair):
    code, out, err = run("-", "--model_size", "1M", "--n_tokens_to_generate", 3, given=b"caf\xe9 \xff")
    assert code == 2 and out == "" and err == "error: standard input is no utf-8 text: its byte 3 is amiss\n"


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--nouse_generate_speculative",),
        ("--use_generate_speculative=False",),
        ("--draft_size=1M",),
        ("--draft_size=ngram", "--n_speculative=5"),
        ("--draft_size=none",),
        ("--draft_size=7M", "--n_speculative=3"),
        ("--n_speculative=8",),
        ("--n_speculative=auto",),
    ],
    ids=str,
)
def test_every_way_of_drafting_writes_the_same(expected, options):
    settings = dict(temperature=0.8, top_k=40, top_p=0.95, seed=3)
    flags = [f"--{key}={value}" for key, value in settings.items()]
    code, out, err = done = run("Once upon a time there was a king", "--model_size=7M", *flags, *options)
    assert_continues(done, expected("Once upon a time there was a king", 40, "7M", **settings))
    passes, drafted, accepted = (number(word, err) for word in ("passes", "drafted", "accepted"))
    assert number("tokens/s", err) > 0 and accepted <= drafted and passes + accepted == 40
    if "none" in str(options) or "use_" in str(options):
        assert passes == 40 and drafted == 0
    if "7M" in str(options):
        assert accepted == drafted and passes <= 12


@pytest.mark.parametrize(
    "arguments", [("--temperature=1.3", "--seed=5"), ("--temperature", "0.7", "--top_k", "3"), ()], ids=str
)
def test_settings_reach_the_model(expected, arguments):
    settings = {}
    for argument in " ".join(arguments).replace("=", " ").split("--")[1:]:
        key, value = argument.split()
        settings[key] = json.loads(value)
    assert_continues(run("The wolf", "--model_size=1M", *arguments), expected("The wolf", 40, **settings))


def test_from_another_folder_and_without_any_tokens(expected, tmp_path):
    assert_continues(
        run("The wolf", "--model_size=1M", "--n_tokens_to_generate=5", cwd=tmp_path), expected("The wolf", 5)
    )
    code, out, err = run("The wolf", "--model_size=1M", "--n_tokens_to_generate=0", cwd=tmp_path)
    assert code == 0 and out.strip() == ""


def test_characters_that_span_tokens_and_the_end_of_the_text(pair, tmp_path):
    encoder = pair["1M"].encoder
    ids = encoder.encode("a 王🙂é\n") + [4095] + encoder.encode("not this")
    model = model_that_writes(tmp_path / "model", ids)
    for options in (
        (),
        ("--draft_size=ngram", "--n_speculative=4"),
        ("--draft_size=none",),
        (f"--draft_size={model}", "--n_speculative=3"),
    ):
        code, out, err = run("x", f"--model_size={model}", *options, "--n_tokens_to_generate=17")
        assert code == 0 and out in ("a 王🙂é\n", "a 王🙂é\n\n"), err
        assert number("accepted", err) + number("passes", err) == ids.index(4095) + 1 or "3" in str(options)
    half = encoder.encode("a 王")[:-1]
    assert_continues(run("x", f"--model_size={model}", f"--n_tokens_to_generate={len(half)}"), "a \ufffd")
    code, out, err = run(
        "x", f"--model_size={model}", "--n_tokens_to_generate=17", env={"PYTHONIOENCODING": "ascii"}
    )
    assert code == 0 and out.startswith("a ")


# What goes wrong


@pytest.fixture
def closed_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--model_size=9M"], "9M"),
        (["--model_size=../models/9M"], "9M"),
        (["--model_size="], "7M"),
        (["--model_size=7"], "7"),
        (["--model_size=7m"], "did you mean 7M?"),
        (["--model_size=355"], "did you mean 355M?"),
        (["--use_generate_speculative=no"], "no"),
        (["--temperature={[1]}"], "options"),
        (["--n_tokens_to_generate=600"], "600"),
        (["--n_tokens_to_generate=-1"], "-1"),
        (["--n_tokens_to_generate=many"], "many"),
        (["--n_tokens_to_generate=2.5"], "2.5"),
        (["--temperature=-1"], "-1"),
        (["--temperature=hot"], "hot"),
        (["--top_k=0"], "0"),
        (["--top_k=1.5"], "1.5"),
        (["--top_p=0"], "0"),
        (["--top_p=1.5"], "1.5"),
        (["--n_speculative=0"], "0"),
        (["--n_speculative=lots"], "lots"),
        (["--draft_size=9M"], "9M"),
        (["--seed=x"], "x"),
        (["--show_drafts=sometimes"], "sometimes"),
        (["--models_dir=nowhere"], "nowhere"),
    ],
    ids=str,
)
def test_bad_values_are_one_sentence_and_exit_code_2(pair, arguments, said):
    code, out, err = run("The wolf", *["--model_size=1M"] * ("--model_size" not in arguments[0]), *arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and said in err, err
    assert len(err.strip().splitlines()) == 1 and len(err) < 600


def test_a_model_that_cannot_be_downloaded(tmp_path, closed_port):
    code, out, err = run(
        "The wolf",
        "--model_size=124M",
        f"--models_dir={tmp_path}",
        env={"GPT2_MODELS_URL": f"http://127.0.0.1:{closed_port}"},
    )
    assert (
        code == 2
        and out == ""
        and "no server can be reached there; `--model_size 7M` is bundled" in err
        and "Pool" not in err
        and err.strip().splitlines()[-1].startswith("error: ")
    )


def test_starting_from_nothing_needs_a_beginning_in_the_vocabulary(pair, tmp_path):
    model = model_that_writes(tmp_path / "model", [1, 2, 3])
    vocabulary = json.loads((model / "vocab.json").read_text(encoding="utf-8"))
    del vocabulary["<|endoftext|>"]
    (model / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    code, out, err = run("", f"--model_size={model}")
    assert code == 2 and out == "" and err.startswith("error: ") and "<|endoftext|>: give a prompt" in err


def test_a_draft_model_with_another_vocabulary(pair, tmp_path):
    other = model_that_writes(tmp_path / "other", [1, 2, 3], n_vocab=4100)
    code, out, err = run("The wolf", "--model_size=7M", f"--draft_size={other}")
    assert code == 2 and out == "" and err.startswith("error: ") and "vocabular" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--frobnicate=1"],
        ["--draft-sizes=1M"],
        ["world"],
        ["5", "1M", "x", "y", "z", "1", "2", "3", "4", "5", "6", "7"],
    ],
    ids=str,
)
def test_arguments_that_do_not_exist_start_nothing(pair, arguments):
    code, out, err = run("The wolf", "--model_size=1M", *arguments)
    assert code == 2 and out == "" and err


def test_a_prompt_without_quotes_is_told_so(pair):
    code, out, err = run("The", "wolf", "said", "--model_size=1M")
    assert code == 2 and out == "" and err.startswith("error: ") and "a prompt needs quotes" in err
    assert len(err.strip().splitlines()) == 1


@posix
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_caller_closed(pair, expected, closed):
    options = "--model_size=1M --n_tokens_to_generate=6"
    command = f"{sys.executable} {ROOT / 'gpt2.py'} 'The wolf' {options} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    if ">&-" not in closed.replace("2>&-", ""):
        assert without_end_of_line(done.stdout) == expected("The wolf", 6)


def test_ids_without_a_text_are_generated_as_nothing(pair, tmp_path):
    model = model_that_writes(tmp_path / "model", [pair["1M"].encoder.encode("a")[0], 4097, 4095], n_vocab=4100)
    for draft in ("none", model):
        code, out, err = run(
            "x",
            f"--model_size={model}",
            f"--draft_size={draft}",
            "--show_drafts=always",
            "--n_tokens_to_generate=9",
        )
        assert code == 0 and without_end_of_line(plain_text(out)) == "a", err


def test_without_a_prompt_it_explains_itself():
    code, out, err = run()
    assert code == 2 and out == "" and 2 <= len(err.strip().splitlines()) <= 4
    assert "python gpt2.py" in err and "--model_size 7M" in err and "--help" in err


def test_help():
    code, out, err = run("--help")
    assert code == 0
    for flag in FLAGS:
        assert f"--{flag}" in out + err
    assert "_parse" not in out + err and "FIRE" not in out + err


@posix
@pytest.mark.parametrize("options", [("--nouse_generate_speculative",), ()], ids=str)
def test_ctrl_c_ends_the_text_and_says_how_far_it_came(expected, options):
    process = start(
        "Once upon a time", "--model_size=7M", "--n_tokens_to_generate=500", "--temperature=0.8", *options
    )
    first = os.read(process.stdout.fileno(), 20)  # so it streams
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    out, err = (first + out).decode(), err.decode()
    assert process.returncode == 130 and "Traceback" not in err, err
    whole = expected("Once upon a time", 500, "7M", temperature=0.8)
    assert out.endswith("\n") and whole.startswith(out[:-1]) and len(out) < len(whole)
    assert 1 <= number("passes", err) < 500


@posix
def test_ctrl_c_before_the_first_token(pair):
    process = start("Once upon a time", "--model_size=7M")
    time.sleep(0.15)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode in (
        130,
        -signal.SIGINT,
    )  # while Python itself starts, there is nobody to say 130
    assert process.returncode != 130 or b"Traceback" not in err, err


@posix
def test_a_reader_that_leaves(pair):
    process = start("Once upon a time", "--model_size=7M", "--n_tokens_to_generate=500")
    began = time.monotonic()
    assert os.read(process.stdout.fileno(), 10)
    process.stdout.close()
    err = process.stderr.read().decode()
    process.wait(timeout=20)
    assert not re.search("Traceback|Exception|BrokenPipe|Errno", err), err
    assert time.monotonic() - began < 20


# --show_drafts


def plain_text(out):
    """What a terminal shows: no colours, and without the refused drafts, which are struck through or grey."""
    refused = r"\x1b\[(?:\d+;)*(?:9|90|2)(?:;\d+)*m.*?\x1b\[0?m"
    return re.sub(r"\x1b\[[\d;]*m", "", re.sub(refused, "", out, flags=re.DOTALL))


SHOW = ["Once upon a time there was a king", "--model_size=7M", "--n_speculative=3", "--temperature=0.7"]


def test_drafts_are_not_shown_where_there_is_no_terminal(expected):
    code, out, err = done = run(*SHOW, "--show_drafts")
    assert_continues(done, expected(SHOW[0], 40, "7M", temperature=0.7))
    assert "\x1b" not in out + err


def test_drafts_are_always_shown_if_so_asked(expected):
    code, out, err = run(*SHOW, "--show_drafts=always", env={"NO_COLOR": "1"})
    assert code == 0 and out.count("\x1b[") > 40
    assert without_end_of_line(plain_text(out)) == expected(SHOW[0], 40, "7M", temperature=0.7)
    accepted, drafted = number("accepted", err), number("drafted", err)
    assert re.search(r"\d+ ?%", err) and 0 < accepted < drafted
    assert len(re.findall(r"\x1b\[[\d;]+m", out)) >= 3  # accepted, corrected, refused, free


def test_shown_drafts_keep_characters_whole(pair, tmp_path):
    text = "王🙂é" * 6
    model = model_that_writes(tmp_path / "model", pair["1M"].encoder.encode(text) + [4095])
    for draft in (model, "ngram", "none"):
        code, out, err = run(
            "x",
            f"--model_size={model}",
            "--show_drafts=always",
            f"--draft_size={draft}",
            "--n_speculative=2",
            "--n_tokens_to_generate=63",
        )
        assert code == 0 and without_end_of_line(plain_text(out)) == text, err


def test_line_ends_of_refused_drafts_break_no_line(pair, tmp_path):
    encoder = pair["1M"].encoder
    text = encoder.encode("a b c d")
    model = model_that_writes(tmp_path / "model", text + [4095])
    draft = model_that_writes(tmp_path / "draft", [encoder.encode("\n")[0]] * len(text))
    code, out, err = run(
        "x", f"--model_size={model}", f"--draft_size={draft}", "--n_speculative=1", "--show_drafts=always",
        "--n_tokens_to_generate=9",
    )
    assert code == 0 and without_end_of_line(plain_text(out)) == "a b c d", err
    assert "↵" in out and "\n" not in without_end_of_line(out)


@posix
@pytest.mark.parametrize("env, coloured", [({}, True), ({"NO_COLOR": "1"}, False)], ids=str)
def test_shown_drafts_in_a_terminal(expected, env, coloured):
    import pty

    ours, theirs = pty.openpty()
    process = start(*SHOW, "--show_drafts", stdout=theirs, env=env | {"TERM": "xterm"})
    os.close(theirs)
    out = b""
    try:
        while piece := os.read(ours, 2**16):
            out += piece
    except OSError:  # how Linux says that the other side is closed
        pass
    err = process.communicate(timeout=60)[1].decode()
    os.close(ours)
    out = out.decode().replace("\r\n", "\n")
    assert process.returncode == 0 and ("\x1b[" in out) == coloured, err
    assert without_end_of_line(plain_text(out)) == expected(SHOW[0], 40, "7M", temperature=0.7)
