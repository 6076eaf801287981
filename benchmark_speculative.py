"""How much sooner speculative decoding writes the same text, and how much sooner theory says it should.

From top to bottom: the command, the measurement, the table, the cost of one pass, the picture.
"""
import importlib.util
import os
import sys
import time
from collections import Counter, namedtuple
from contextlib import nullcontext
from functools import partial
from json import dumps
from statistics import median

import numpy as np
from threadpoolctl import threadpool_info

from gpt2 import (KVCache, command_line, default_draft, generate, generate_speculative, gpt2, layer_norm,
                  ngram_draft, transformer_block)
from matvec import in_parallel, matvec, single_threaded_blas
from utils import MODELS_DIR, load_encoder_hparams_and_params

PROMPTS = {  # about what the bundled pair knows: fairy tales
    "prose": [
        "Once upon a time there was a poor woodcutter who lived with his three sons near a great forest. One",
        "The king sent messengers through all the country to make known that whoever could heal his daughter",
        "It was the middle of winter, and the snow lay deep upon the fields. A little girl was walking home",
    ],
    "quoting": [
        'Then the king\'s son said, "I will give you the ring, and I will give you the ring."\n\n' * 2
        + "Then the king's daughter said,",
    ],
    "code-like": ['if x == 1:\n    print("one")\nelif x == 2:\n    print("two")\nelif x == 3:\n    print('],
    "repetitive": ["a white horse, and a black horse, and " * 2 + "a white horse, and"],
}

Model = namedtuple("Model", "size encoder params n_head n_ctx")
Run = namedtuple("Run", "seconds ids rounds")  # rounds: what on_round got to see, the prompt's pass first


def benchmark(*, model_sizes="124M,355M", draft=None, n_speculative="1,2,4,auto", prompts=None, tokens=64,
              repeats=3, temperature=0.0, models_dir=None, passes=False, json=None, plot=None):
    """Time plain against speculative decoding, and check that both write the same text.

    For every model, prompt and number of drafts, a line shows: seconds for the whole text, with its prompt;
    tokens per second; how much faster speculative decoding was, for the whole text and for what follows the
    prompt; what Leviathan et al.'s formula gives for the latter; the share of drafts that were accepted, of
    those before which none was rejected; tokens per pass of the main model; whether the ids were the same.
    Figures are medians of runs that take turns. The formula goes by average rates, so auto, which drafts more
    where more is accepted, can beat it. The exit code is 0 if all ids were the same, 1 if not, 2 for errors.

    `--model_sizes 7M` runs offline and at once, on the pair of models that comes along.

    Args:
        model_sizes: the models to measure, separated by commas.
        draft: the model that drafts, or ngram for looking up how the last words went on earlier in the text.
            By default as in gpt2.py: 1M for 7M, 124M for larger ones, else ngram. No model is its own draft.
        n_speculative: the numbers of drafts per round to compare. auto drafts as much as pays.
        prompts: a UTF-8 file, one prompt per line. By default prose, quoting, code-like and repetitive ones.
        tokens: how many tokens each run writes, at least 2.
        repeats: how many runs of each kind.
        temperature: 0 takes the likeliest token; above, tokens are drawn, with the same seed in every run.
        models_dir: the folder that the models are in.
        passes: print instead what one pass over 1 to 8 tokens costs, with plain NumPy products and with ours,
            and the memory bandwidth that it reaches.
        json: a .json file for all the figures.
        plot: a .png file for a picture of them. Needs matplotlib.
    """
    numbers = [n if n == "auto" else count("n_speculative", n) for n in listed(n_speculative)]
    tokens, repeats = count("tokens", tokens, least=2), count("repeats", repeats)
    if type(temperature) not in (int, float) or not 0 <= temperature < float("inf"):
        raise ValueError(f"--temperature must be a number of at least 0, not {temperature}.")
    if type(passes) is not bool or passes and plot is not None:
        raise ValueError("--passes takes no value, and no --plot.")
    check_target("json", json)
    check_target("plot", plot)
    prompts = PROMPTS if prompts is None else {"prompt": lines_of(prompts)}
    drafts = {size: draft or default_draft(size) for size in listed(model_sizes)}
    own = [] if passes else [size for size in drafts if drafts[size] == size]
    drafts.update(dict.fromkeys(drafts if passes else own, "ngram"))
    models = {size: load(size, models_dir) for size in {*drafts, *drafts.values()} - {"ngram"}}
    if not passes:
        check_lengths([models[size] for size in drafts], prompts, tokens)

    print(machine(), flush=True)
    for size in own:
        print(f"{size} would be its own draft model, so n-gram lookup drafts for it.", flush=True)
    results = []
    for size in drafts:
        if passes:
            results.append(measure_passes(models[size], repeats))
            print_passes(results[-1])
        else:
            print_heading(size, drafts[size], tokens, temperature, repeats)
            draft = models.get(drafts[size])
            for row in measure(models[size], draft, prompts, numbers, tokens, repeats, temperature):
                results.append(row)
                print_row(row)
    if json:
        text = dumps(dict(machine=machine(), results=results), indent=1)
        write_whole(json, lambda file: file.write(text.encode()))
    if plot:
        write_whole(plot, lambda file: draw(results, file))
    return exit_code(results)


# ---- The measurement.


def measure(model, draft, prompts, numbers, tokens, repeats, temperature):
    """Yield the figures of every prompt with every number of drafts: `compare`'s, and what they belong to."""
    draft_params, draft_n_head = (draft.params, draft.n_head) if draft else (ngram_draft, None)
    for kind, i in ((kind, i) for kind, texts in prompts.items() for i in range(len(texts))):
        ids = model.encoder.encode(prompts[kind][i])
        ways = {"plain": partial(generate, ids, model.params, model.n_head, temperature=temperature)}
        for n in numbers:
            ways[n] = partial(generate_speculative, ids, model.params, draft_params, model.n_head,
                              n_speculative=n, draft_n_head=draft_n_head, temperature=temperature)
        runs = {way: [] for way in ways}
        for n_tokens in [min(tokens, 8)] + [tokens] * repeats:  # the first to warm up
            for way in ways:  # in turn, so that a machine that slows down slows all of them
                runs[way].append(timed(ways[way], n_tokens))
        for n in numbers:
            yield dict(model=model.size, draft=draft.size if draft else "ngram", kind=kind,
                       prompt=kind if len(prompts[kind]) == 1 else f"{kind} {i + 1}", n_speculative=n,
                       **compare(runs["plain"][1:], runs[n][1:]))


def timed(way, n_tokens):
    rounds, start = [], time.perf_counter()
    ids = way(n_tokens_to_generate=n_tokens, on_round=rounds.append)
    return Run(time.perf_counter() - start, ids, rounds)


def compare(plain, speculative):
    """Return the figures of some plain and some speculative runs on one prompt, as a dictionary.

    "decoding" leaves the prompt's pass out. Costs are in plain passes over one token: of one draft, and of a
    verifying pass by its number of tokens. Without any draft, acceptance_rate is None.
    """
    rounds = [round for run in speculative for round in run.rounds[1:]]
    plain_pass = median(round.verify_seconds for run in plain for round in run.rounds[1:])
    n_accepted = sum(round.n_accepted for round in rounds)
    n_judged = sum(round.n_judged for round in rounds)
    acceptance = n_accepted / n_judged if n_judged else None
    draft_cost = median(map(seconds_per_draft, speculative)) / plain_pass
    verify_cost = {n: median(r.verify_seconds for r in rounds if r.n_drafted + 1 == n) / plain_pass
                   for n in sorted({round.n_drafted + 1 for round in rounds})}
    plain_seconds, seconds = [median(run.seconds for run in runs) for runs in (plain, speculative)]
    plain_decoding, decoding = [median(map(decoding_seconds, runs)) for runs in (plain, speculative)]
    n_tokens = len(plain[0].ids)
    return dict(
        identical=all(run.ids == plain[0].ids for run in (*plain, *speculative)),
        plain_seconds=plain_seconds, plain_tokens_per_second=n_tokens / plain_seconds,
        seconds=seconds, tokens_per_second=n_tokens / seconds,
        improvement_percent=100 * (plain_seconds / seconds - 1),
        plain_decoding_seconds=plain_decoding, decoding_seconds=decoding, n_decoded=n_tokens - 1,
        decoding_speedup=plain_decoding / decoding,
        formula_speedup=leviathan([round.n_drafted for round in rounds], acceptance, draft_cost, verify_cost),
        acceptance_rate=acceptance, draft_cost=draft_cost, verify_cost=verify_cost,
        n_drafted=sum(round.n_drafted for round in rounds), n_accepted=n_accepted,
        rounds_by_n_accepted=dict(sorted(Counter(r.n_accepted for r in rounds if r.n_drafted).items())),
        n_rounds_without_draft=sum(not round.n_drafted for round in rounds),
        tokens_per_pass=median(len(run.ids) / len(run.rounds) for run in speculative),
    )


def leviathan(n_drafted, acceptance, draft_cost, verify_cost):
    """Return the speedup to expect of rounds with so many drafts each.

    Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", theorem 3.8: N drafts,
    accepted at rate a, of cost c each, speed up by (1 - a^(N+1)) / (1 - a) / (N c + 1). Here round by round,
    since a drafter may stop early, and with v(N + 1), what the verifying pass really costs, in place of 1.
    """
    n_tokens = sum(sum((acceptance or 0) ** i for i in range(n + 1)) for n in n_drafted)
    return n_tokens / sum(n * draft_cost + verify_cost[n + 1] for n in n_drafted)


def seconds_per_draft(run):  # a search that finds nothing takes time, too
    rounds = run.rounds[1:]
    return sum(round.draft_seconds for round in rounds) / (sum(round.n_drafted for round in rounds) or 1)


def decoding_seconds(run):
    return run.seconds - run.rounds[0].draft_seconds - run.rounds[0].verify_seconds


def exit_code(results):
    """Return 0 if all ids were the same; otherwise say where they were not, and return 1."""
    differing = [row for row in results if not row.get("identical", True)]
    for row in differing:
        print("error: {model}, {prompt}, {n_speculative} drafts by {draft}: plain and speculative decoding "
              "wrote different ids, which must never happen.".format_map(row), file=sys.stderr)
    return 1 if differing else 0


# ---- The table.


def print_heading(size, draft, tokens, temperature, repeats):
    draft = "n-gram lookup" if draft == "ngram" else draft
    print(f"""
{size}, drafts by {draft}; {tokens} tokens, temperature {temperature:g}, medians of {repeats}

                       seconds          tokens/s         whole   after the prompt   drafts    tokens  same
prompt      drafts   plain   spec.    plain   spec.     faster   faster  formula   accepted  per pass  ids""")


def print_row(row):
    def percent(share, sign=""):
        return "none" if share is None else f"{100 * share:{sign}.0f} %"

    print("{prompt:12} {n_speculative:>5} {plain_seconds:7.3f} {seconds:7.3f} {plain_tokens_per_second:8.1f} "
          "{tokens_per_second:7.1f}  {0:>9}  {1:>7}  {2:>7}   {3:>8} {tokens_per_pass:9.2f}  {4:>3}".format(
              percent(row["improvement_percent"] / 100, "+"), percent(row["decoding_speedup"] - 1, "+"),
              percent(row["formula_speedup"] - 1, "+"), percent(row["acceptance_rate"]),
              "yes" if row["identical"] else "NO", **row), flush=True)


def machine():
    blas = [f"{library['internal_api']} {library['version']} ({library.get('architecture', 'one kernel')}, "
            f"{library['num_threads']} threads)"
            for library in threadpool_info() if library["user_api"] == "blas"]
    return f"NumPy {np.__version__} with {' and '.join(blas) or 'an unknown BLAS'}"


# ---- What a pass costs: the same model on top of the same cache, with our product and with NumPy's.

N_PAST = 100  # tokens in the cache
SETTLE = 0.15  # seconds: BLAS's idle threads spin for a while and would take the cores from ours


def measure_passes(model, repeats):
    """Return the seconds of a pass by product and number of tokens, and bandwidths in bytes per second."""
    rng = np.random.default_rng(0)
    ids, params = rng.integers(len(model.params["wte"]), size=N_PAST + 8).tolist(), model.params
    cache = KVCache(params, model.n_head)
    gpt2(ids[:N_PAST], **params, n_head=model.n_head, kv_cache=cache, n_logits=1)

    def ours(inputs):
        cache.truncate(N_PAST)
        gpt2(inputs, **params, n_head=model.n_head, kv_cache=cache)

    def plain(product, inputs):  # gpt2() with another product
        x = params["wte"][inputs] + params["wpe"][N_PAST : N_PAST + len(inputs)]
        for block, keys, values in zip(params["blocks"], cache.keys, cache.values):
            x = transformer_block(x, **block, keys=keys, values=values, n_past=N_PAST, product=product)
        product(layer_norm(x, **params["ln_f"]), params["wte"].T)

    ways = {"x @ w": (partial(plain, np.matmul), nullcontext(), range(1, 9)),
            "w.T @ x": (partial(plain, lambda x, w: (w.T @ x[0])[None]), nullcontext(), [1]),
            "ours": (ours, single_threaded_blas(), range(1, 9))}
    seconds = {way: {n: [] for n in numbers} for way, (_, _, numbers) in ways.items()}
    for _ in range(repeats):
        for way, (one_pass, threads, numbers) in ways.items():
            with threads:
                time.sleep(SETTLE)
                for n in numbers:
                    one_pass(ids[-n:])  # to warm up
                    for _ in range(5):
                        start = time.perf_counter()
                        one_pass(ids[-n:])
                        seconds[way][n].append(time.perf_counter() - start)
    seconds = {way: {n: median(times) for n, times in by_n.items()} for way, by_n in seconds.items()}
    weight_bytes = params["wte"].nbytes + sum(array.nbytes for array in arrays(params["blocks"]))
    large_read, how = large_read_bandwidth()
    return dict(model=model.size, pass_seconds=seconds, weight_bytes=weight_bytes,
                bytes_per_second=weight_bytes / seconds["ours"][1],
                large_read_bytes_per_second=large_read, large_read=how)


def arrays(tree):
    if isinstance(tree, np.ndarray):
        return [tree]
    return [array for part in (tree.values() if isinstance(tree, dict) else tree) for array in arrays(part)]


def large_read_bandwidth():
    """Return (bytes per second, how) of the faster of two ways to read far more than caches hold."""
    memory, x, found = np.ones((64 * 1024, 1024), np.float32), np.ones(1024, np.float32), []
    ways = {"256 MB times a vector, with BLAS's threads": lambda: memory @ x,
            "the largest number in 256 MB, with our threads":
                lambda: in_parallel(lambda a, b: memory[a:b].max(), len(memory), memory.shape[1])}
    for how, read in ways.items():
        time.sleep(SETTLE)
        seconds = []
        for _ in range(9):
            start = time.perf_counter()
            read()
            seconds.append(time.perf_counter() - start)
        found.append((memory.nbytes / median(seconds), how))
    return max(found)


def print_passes(row):
    seconds = row["pass_seconds"]
    fastest = min(seconds["x @ w"][1], seconds["w.T @ x"][1])
    print(f"""
{row["model"]}, one pass after {N_PAST} tokens, in milliseconds, and relative to NumPy's fastest for one token

tokens in the pass{"".join(f"{n:9}" for n in seconds["ours"])}""")
    for way, name in (("x @ w", "NumPy, x @ w"), ("w.T @ x", "NumPy, w.T @ x"), ("ours", "ours, row-exact")):
        print(f"{name:18}" + "".join(f"{1e3 * s:9.1f}" for s in seconds[way].values()))
        print(f"{'':18}" + "".join(f"{s / fastest:9.2f}" for s in seconds[way].values()))
    reached, possible = row["bytes_per_second"] / 1e9, row["large_read_bytes_per_second"] / 1e9
    print(f"""
For one token, ours reads {row["weight_bytes"] / 1e6:,.0f} MB of weights at {reached:.1f} GB/s.
A large read reaches {possible:.1f} GB/s ({row["large_read"]}).""", flush=True)


# ---- The picture.

GREY, BLUE, ORANGE = "#767676", "#0072B2", "#D55E00"  # Okabe and Ito's, which colour-blind eyes tell apart


def draw(results, file):
    """Draw speeds and accepted drafts as PNG: a column for every kind of prompt, two rows for every model."""
    from matplotlib.figure import Figure

    models, kinds, numbers = (list(dict.fromkeys(row[key] for row in results))
                              for key in ("model", "kind", "n_speculative"))
    numbers.sort(key=lambda n: (n == "auto", n))
    size = max(7, 2 + 2.4 * len(kinds)), 0.7 + 4.6 * len(models)  # inches
    figure = Figure(size, dpi=150, layout="constrained", facecolor="white")
    for model, part in zip(models, np.atleast_1d(figure.subfigures(len(models), 1))):
        axes = part.subplots(2, len(kinds), sharey="row", squeeze=False, height_ratios=(3, 2))
        for kind, above, below in zip(kinds, *axes):
            rows = [row for row in results if (row["model"], row["kind"]) == (model, kind)]
            above.set_title(kind, fontweight="bold")
            draw_speeds(above, rows, numbers)
            draw_acceptance(below, rows, max((n for n in numbers if n != "auto"), default="auto"))
        axes[0, 0].set_ylim(0)
        axes[0, 0].set_ylabel("tokens per second\n(after the prompt)")
        axes[1, 0].set_ylabel("% of rounds")
        draft = rows[0]["draft"].replace("ngram", "n-gram lookup")
        part.suptitle(f"{model}, drafts by {draft}, {rows[0]['n_decoded'] + 1} tokens", fontsize="x-large")
    legend = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(file, format="png")


def draw_speeds(axes, rows, numbers):
    def speed(rows, seconds):
        return sum(row["n_decoded"] for row in rows) / sum(map(seconds, rows))

    by_number = [[row for row in rows if row["n_speculative"] == n] for n in numbers]
    plain = speed(rows, lambda row: row["plain_decoding_seconds"])
    measured = [speed(rows, lambda row: row["decoding_seconds"]) for rows in by_number]
    formula = [speed(rows, lambda row: row["plain_decoding_seconds"] / row["formula_speedup"])
               for rows in by_number]
    fixed = slice(len(numbers) - ("auto" in numbers))  # only these make a line
    axes.axhline(plain, color=GREY, lw=2, label="plain decoding")
    axes.plot(measured[fixed], "-", color=BLUE, lw=2)
    axes.plot(formula[fixed], "--", color=ORANGE, lw=1.5)
    axes.plot(measured, "o", color=BLUE, ms=7, label="speculative decoding, measured")
    axes.plot(formula, "D", color=ORANGE, ms=8, mfc="none", mew=1.5,
              label="speculative decoding, by Leviathan et al.'s formula")
    axes.set(xticks=range(len(numbers)), xticklabels=numbers, xlim=(-0.5, len(numbers) - 0.5),
             xlabel="drafts per round")
    axes.grid(axis="y", alpha=0.3)


def draw_acceptance(axes, rows, n_speculative):
    rows = [row for row in rows if row["n_speculative"] == n_speculative]
    counts = sum((Counter(row["rounds_by_n_accepted"]) for row in rows), Counter())
    n_without = sum(row["n_rounds_without_draft"] for row in rows)
    percent = 100 / (sum(counts.values()) + n_without)
    numbers = range(1 + (n_speculative if n_speculative in range(20) else max(counts, default=0)))
    axes.bar(numbers, [counts[n] * percent for n in numbers], color=BLUE)
    axes.bar(0, n_without * percent, bottom=counts[0] * percent, color="white", edgecolor=GREY, hatch="////",
             label="rounds in which nothing was drafted")
    axes.set(xticks=numbers, xlabel=f"accepted per round, of {n_speculative}")
    axes.grid(axis="y", alpha=0.3)


# ---- What the command line asks for, and where it puts the answer.


def listed(option):
    """Return the parts of "a,b", once each."""
    return list(dict.fromkeys(part.strip() for part in option.split(",")))


def count(name, value, least=1):
    if not str(value).isdecimal() or int(value) < least:
        auto = ", or auto" if name == "n_speculative" else ""
        raise ValueError(f"--{name} must be a whole number of at least {least}{auto}, not {value!r}.")
    return int(value)


def check_target(option, path):
    ending = {"json": ".json", "plot": ".png"}[option]
    if path is not None:
        if not path.endswith(ending):
            raise ValueError(f"--{option} takes the name of a {ending} file, not {path!r}.")
        try:  # now, rather than after all the work
            if os.path.isdir(path):
                raise IsADirectoryError
            open(f"{path}.part", "wb").close()
            os.remove(f"{path}.part")
        except (OSError, ValueError):
            raise ValueError(f"{path:.200} cannot be written: choose a file in a folder that lets you.") from None
        if option == "plot" and not importlib.util.find_spec("matplotlib"):
            raise ValueError("--plot needs matplotlib: `pip install matplotlib` brings it.")


def lines_of(path):
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError):
        lines = []
    if not lines:
        raise ValueError(f"--prompts must be a file of UTF-8 text with one prompt per line, not {path}.")
    return lines


def load(size, models_dir):
    encoder, hparams, params = load_encoder_hparams_and_params(size, models_dir or MODELS_DIR)
    return Model(size, encoder, params, hparams["n_head"], hparams["n_ctx"])


def check_lengths(models, prompts, tokens):
    for model in models:
        n = max(len(model.encoder.encode(text)) for texts in prompts.values() for text in texts)
        if n + tokens > model.n_ctx:
            raise ValueError(f"the longest prompt has {n} tokens, and {tokens} more do not fit into the "
                             f"context of {model.size}, {model.n_ctx}: fewer --tokens would work.")


def write_whole(path, write):
    part = f"{path}.part"  # so that nobody ever sees half a file
    try:
        with open(part, "wb") as file:
            write(file)
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.remove(part)


if __name__ == "__main__":
    command_line(benchmark, model_sizes=str, draft=str, n_speculative=str, prompts=str, models_dir=str,
                 json=str, plot=str)
