import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from benchmark_speculative import PROMPTS, Run, compare, exit_code, leviathan, write_whole
from encoder import get_encoder
from gpt2 import Round

ROOT = Path(__file__).resolve().parent.parent


def run(*options, folder=ROOT, code=0):
    done = subprocess.run([sys.executable, ROOT / "benchmark_speculative.py", *map(str, options)], cwd=folder,
                          env=dict(os.environ, PYTHONUTF8="1"), capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The built-in prompts on the bundled pair: stdout, JSON, PNG."""
    folder = tmp_path_factory.mktemp("benchmark")
    done = run("--model_sizes", "7M", "--n_speculative", "1,3,auto", "--tokens", 24, "--repeats", 2,
               "--json", "figures.json", "--plot", "figures.png", folder=folder)
    assert sorted(os.listdir(folder)) == ["figures.json", "figures.png"]
    figures = json.loads((folder / "figures.json").read_text())
    return done.stdout, figures, (folder / "figures.png").read_bytes()


def test_every_prompt_with_every_number_of_drafts_is_measured_and_identical(measured):
    rows = measured[1]["results"]
    kinds = [kind for kind, texts in PROMPTS.items() for _ in texts]
    assert [(row["kind"], row["n_speculative"]) for row in rows] == [
        (kind, n) for kind in kinds for n in (1, 3, "auto")]
    assert len({(row["prompt"], row["n_speculative"]) for row in rows}) == len(rows)
    assert all(row["identical"] and (row["model"], row["draft"]) == ("7M", "1M") for row in rows)


def test_json_figures_agree_with_each_other(measured):
    for row in measured[1]["results"]:
        decoding_speedup = row["plain_decoding_seconds"] / row["decoding_seconds"]
        assert row["tokens_per_second"] == pytest.approx(24 / row["seconds"])
        assert row["plain_tokens_per_second"] == pytest.approx(24 / row["plain_seconds"])
        assert row["improvement_percent"] == pytest.approx(100 * row["plain_seconds"] / row["seconds"] - 100)
        assert row["decoding_speedup"] == pytest.approx(decoding_speedup)
        assert 0 < row["decoding_seconds"] < row["seconds"]
        assert row["n_decoded"] == 23
        by_n_accepted = {int(n): count for n, count in row["rounds_by_n_accepted"].items()}
        assert sum(n * count for n, count in by_n_accepted.items()) == row["n_accepted"] <= row["n_drafted"]
        n_rounds = sum(by_n_accepted.values()) + row["n_rounds_without_draft"]
        assert n_rounds + row["n_accepted"] == 2 * 23  # every round adds the accepted drafts and one more
        assert row["tokens_per_pass"] >= 1


def test_greedy_drafts_are_accepted_as_often_as_the_card_says(measured):
    rows = [row for row in measured[1]["results"] if (row["kind"], row["n_speculative"]) == ("prose", 3)]
    assert 0.4 < median(row["acceptance_rate"] for row in rows) < 0.8  # 0.61 on the average


def test_the_table_shows_the_figures(measured):
    table, figures, _ = measured
    assert max(map(len, table.splitlines())) <= 110
    lines = [line for line in table.splitlines() if line.endswith("yes")]
    assert len(lines) == len(figures["results"])
    for line, row in zip(lines, figures["results"]):
        assert line.startswith(row["prompt"])
        assert line[12:18].strip() == str(row["n_speculative"])
        shown = [float(number) for number in re.findall(r"(?<= )[+-]?\d+(?:\.\d+)?(?= )", line[18:])]
        faster, after, formula = (row["improvement_percent"], 100 * row["decoding_speedup"] - 100,
                                  100 * row["formula_speedup"] - 100)
        accepted = [] if row["acceptance_rate"] is None else [100 * row["acceptance_rate"]]
        expected = [row["plain_seconds"], row["seconds"], row["plain_tokens_per_second"],
                    row["tokens_per_second"], faster, after, formula, *accepted, row["tokens_per_pass"]]
        assert shown == pytest.approx(expected, abs=0.51)


def test_the_picture_is_a_png_of_sane_size(measured):
    picture = measured[2]
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and picture.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", picture[16:24])
    assert 1000 < width < 3000 and 500 < height < 1500
    assert 20_000 < len(picture) < 1_000_000


def plain_run(ids, seconds_per_pass=0.1):
    rounds = [Round((ids[0],), 0, 0, 0.0, 1.0)] + [Round((i,), 0, 0, 0.0, seconds_per_pass) for i in ids[1:]]
    return Run(1.0 + seconds_per_pass * (len(ids) - 1), ids, rounds)


def speculative_run(ids):
    rounds = [Round((ids[0],), 0, 0, 0.0, 1.0),  # the prompt
              Round(tuple(ids[1:4]), 2, 2, 0.04, 0.15),  # both accepted
              Round(tuple(ids[4:5]), 2, 0, 0.04, 0.15),  # none: the second one was never judged
              Round(tuple(ids[5:6]), 0, 0, 0.0, 0.11)]
    return Run(1.49, ids, rounds)


def test_figures_of_hand_made_runs():
    ids = [5, 6, 7, 8, 9, 10]
    row = compare([plain_run(ids)], [speculative_run(ids)])
    assert row["identical"]
    assert row["plain_seconds"] == pytest.approx(1.5) and row["plain_tokens_per_second"] == pytest.approx(4)
    assert row["decoding_speedup"] == pytest.approx(0.5 / 0.49)
    assert row["acceptance_rate"] == pytest.approx(2 / 3)
    assert row["draft_cost"] == pytest.approx(0.2)  # 0.02 s per draft, 0.1 s per plain pass
    assert row["verify_cost"] == {1: pytest.approx(1.1), 3: pytest.approx(1.5)}
    assert row["tokens_per_pass"] == pytest.approx(6 / 4)
    assert (row["n_drafted"], row["n_accepted"], row["n_rounds_without_draft"]) == (4, 2, 1)
    assert row["rounds_by_n_accepted"] == {0: 1, 2: 1}
    expected = (2 * (1 + 2 / 3 + 4 / 9) + 1) / (2 * (2 * 0.2 + 1.5) + 1.1)
    assert row["formula_speedup"] == pytest.approx(expected)


def test_medians_ignore_a_hiccup():
    ids = [5, 6, 7, 8, 9, 10]
    row = compare([plain_run(ids), plain_run(ids), plain_run(ids, 9.0)], [speculative_run(ids)] * 3)
    assert row["plain_seconds"] == pytest.approx(1.5)
    assert row["draft_cost"] == pytest.approx(0.2)


@pytest.mark.parametrize("a, n, c", [(0.0, 3, 0.1), (0.6, 1, 0.05), (0.8, 5, 0.02), (0.9, 7, 0.0)])
def test_formula_is_theorem_3_8_where_verifying_costs_one_pass(a, n, c):
    theorem = (1 - a ** (n + 1)) / ((1 - a) * (n * c + 1))
    assert leviathan([n], a, c, {n + 1: 1.0}) == pytest.approx(theorem)
    assert leviathan([n] * 9, a, c, {n + 1: 1.0}) == pytest.approx(theorem)


def test_formula_gives_all_drafts_at_rate_one_and_nothing_without_drafts():
    assert leviathan([4], 1.0, 0.25, {5: 1.5}) == pytest.approx(5 / 2.5)
    assert leviathan([0, 0], None, 0.0, {1: 1.0}) == 1.0


@pytest.mark.parametrize("wrong", ([5, 6, 7, 8, 9, 11], [5, 6, 7, 8, 9], [6, 5, 7, 8, 9, 10]))
def test_other_ids_in_any_run_make_the_exit_code_1(wrong, capsys):
    ids = [5, 6, 7, 8, 9, 10]
    names = dict(model="7M", draft="1M", prompt="prose 1", n_speculative=2)
    good = names | compare([plain_run(ids)] * 2, [speculative_run(ids)] * 2)
    assert exit_code([good]) == 0 and capsys.readouterr().err == ""
    for plain, speculative in (([ids] * 2, [ids, wrong]), ([ids, wrong], [ids] * 2)):
        bad = names | compare(list(map(plain_run, plain)), list(map(speculative_run, speculative)))
        assert not bad["identical"]
        assert exit_code([good, bad, good]) == 1
        assert "7M, prose 1, 2 drafts by 1M" in capsys.readouterr().err


def test_a_model_that_would_be_its_own_draft_uses_ngrams_and_says_so(tmp_path):
    (tmp_path / "prompts.txt").write_text("\ufeffThe wolf said to the\n\n  Der König  \n", encoding="utf-8")
    done = run("--model_sizes", "1M,7M", "--draft", "7M", "--prompts", "prompts.txt", "--tokens", 6,
               "--repeats", 1, "--n_speculative", 2, "--temperature", 0.8, "--json", "figures.json",
               folder=tmp_path)
    assert "7M would be its own draft model, so n-gram lookup drafts for it." in done.stdout
    assert "1M would be" not in done.stdout
    rows = json.loads((tmp_path / "figures.json").read_text())["results"]
    assert [(row["model"], row["draft"], row["prompt"]) for row in rows] == [
        ("1M", "7M", "prompt 1"), ("1M", "7M", "prompt 2"),
        ("7M", "ngram", "prompt 1"), ("7M", "ngram", "prompt 2")]


def test_passes(tmp_path):
    done = run("--passes", "--model_sizes", "1M", "--repeats", 1, "--json", "passes.json", folder=tmp_path)
    (row,) = json.loads((tmp_path / "passes.json").read_text())["results"]
    rows = [str(n) for n in range(1, 9)]
    assert {way: list(seconds) for way, seconds in row["pass_seconds"].items()} == {
        "x @ w": rows, "w.T @ x": ["1"], "ours": rows}
    assert row["weight_bytes"] == 4 * (986_624 - 512 * 128 - 2 * 128)  # the card's, but wpe and ln_f
    assert row["bytes_per_second"] == pytest.approx(row["weight_bytes"] / row["pass_seconds"]["ours"]["1"])
    assert 1e9 < row["large_read_bytes_per_second"] < 2e12
    fastest = min(row["pass_seconds"][way]["1"] for way in ("x @ w", "w.T @ x"))
    assert f"{row['pass_seconds']['ours']['8'] / fastest:9.2f}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


def test_help_describes_every_option():
    help = run("--help").stderr
    for option in ("model_sizes", "draft", "n_speculative", "prompts", "tokens", "repeats", "temperature",
                   "models_dir", "passes", "json", "plot"):
        assert re.search(rf"--{option}=\S+\n(\s+(Type|Default): .*\n)+\s+\w.{{15}}", help), option


@pytest.mark.parametrize("options, what", [
    (["--tokens", 1], "--tokens"),
    (["--tokens", "many"], "--tokens"),
    (["--repeats", 0], "--repeats"),
    (["--n_speculative", "1,x"], "--n_speculative"),
    (["--temperature", -1], "--temperature"),
    (["--passes", "--plot", "a.png"], "--passes"),
    (["--json", "nowhere/a.json"], "nowhere"),
    (["--plot", "nowhere/a.png"], "nowhere"),
    (["--plot", "a.jpg"], "a.jpg"),
    (["--model_sizes", "7M", "--json", "latin1.txt/a.json"], "latin1.txt/a.json"),
    (["--model_sizes", "7M", "--json", "a" * 300 + ".json"], "aaa"),
    
    (["--model_sizes", "7M", "--draft", "7M", "--tokens", 600], "512"),
    (["--prompts", "missing.txt"], "missing.txt"),
    (["--prompts", "latin1.txt"], "UTF-8"),
    (["--model_sizes", "7M", "--tokens", 600, "--json", "a.json"], "512"),
    (["--model_sizes", "7M", "--draft", "3M"], "3M"),
])
def test_what_makes_no_sense_is_refused_in_one_sentence(options, what, tmp_path):
    (tmp_path / "latin1.txt").write_bytes("König".encode("latin-1"))
    done = run(*options, folder=tmp_path, code=2)
    assert done.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr) and what in done.stderr
    assert os.listdir(tmp_path) == ["latin1.txt"]


def test_an_unknown_option_is_refused_before_any_work():
    done = run("--model_sizes", "7M", "--speed", 3, code=2)
    assert done.stdout == "" and "--speed" in done.stderr


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    (tmp_path / "figures.json").write_text("old")

    def write_half(file):
        file.write(b"ne")
        raise OSError("no space left")

    with pytest.raises(OSError):
        write_whole(str(tmp_path / "figures.json"), write_half)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"figures.json": "old"}
    write_whole(str(tmp_path / "figures.json"), lambda file: file.write(b"new"))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"figures.json": "new"}


def test_built_in_prompts_suit_the_small_models():
    encoder = get_encoder("7M", ROOT / "models")
    assert len(PROMPTS["prose"]) > 1 and {"quoting", "code-like", "repetitive"} < PROMPTS.keys()
    assert all(len(encoder.encode(text)) < 150 for texts in PROMPTS.values() for text in texts)


def test_quoting_and_repetitive_prompts_go_on_quoting_and_repeating(tmp_path):
    run("--model_sizes", "7M", "--draft", "ngram", "--n_speculative", 4, "--tokens", 48, "--repeats", 1,
        "--json", "figures.json", folder=tmp_path)
    rows = {row["prompt"]: row for row in json.loads((tmp_path / "figures.json").read_text())["results"]}
    assert min(rows["quoting"]["acceptance_rate"], rows["repetitive"]["acceptance_rate"]) > 0.7
    assert min(rows["quoting"]["tokens_per_pass"], rows["repetitive"]["tokens_per_pass"]) > 1.8
