import hashlib
import itertools
import os
import signal
import statistics
import threading
import time

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given
from hypothesis import strategies as st

from conftest import Model, golden, in_own_process, mapped, random_model
from gpt2 import KVCache, generate, generate_speculative, gpt2, ngram_draft

GREEDY = dict(temperature=0)
SETTINGS = [
    GREEDY,
    dict(temperature=0.7),
    dict(temperature=1.3, seed=7),
    dict(temperature=1.3, top_k=20, seed=2**63),
    dict(temperature=0.7, top_p=0.9, seed=3),
    dict(temperature=1, top_k=50, top_p=0.5, seed=4),
]


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype == np.float32 and a.tobytes() == b.tobytes()


def logits(model, ids, cache=None):
    return gpt2(ids, **model.params, n_head=model.n_head, kv_cache=cache)


def cached(model, ids):
    cache = KVCache(model.params, model.n_head)
    logits(model, ids, cache)
    return cache


def plain(model, prompt, n, **settings):
    return generate(prompt, model.params, model.n_head, n, **settings)


def speculative(model, prompt, draft, n, n_speculative=3, **settings):
    if isinstance(draft, Model):
        settings, draft = dict(draft_n_head=draft.n_head) | settings, draft.params
    return generate_speculative(prompt, model.params, draft, model.n_head, n, n_speculative, **settings)


# The model


def textbook_logits(ids, params, n_head):
    """GPT-2 in float64, one position after the other: [n_seq] -> [n_seq, n_vocab]."""
    p = mapped(lambda a: np.asarray(a, np.float64), params)
    norm = lambda x, g, b: (x - x.mean()) / np.sqrt(x.var() + 1e-5) * g + b  # noqa: E731
    past = [([], []) for _ in p["blocks"]]
    rows = []
    for position, i in enumerate(ids):
        x = p["wte"][i] + p["wpe"][position]
        for block, (keys, values) in zip(p["blocks"], past):
            q, k, v = np.split(
                norm(x, **block["ln_1"]) @ block["attn"]["c_attn"]["w"] + block["attn"]["c_attn"]["b"], 3
            )
            keys.append(np.split(k, n_head))
            values.append(np.split(v, n_head))
            heads = []
            for h, q in enumerate(np.split(q, n_head)):
                weights = np.exp([q @ k[h] / np.sqrt(len(q)) for k in keys])
                heads.append(sum(w * v[h] for w, v in zip(weights / weights.sum(), values)))
            x = x + np.concatenate(heads) @ block["attn"]["c_proj"]["w"] + block["attn"]["c_proj"]["b"]
            h = norm(x, **block["ln_2"]) @ block["mlp"]["c_fc"]["w"] + block["mlp"]["c_fc"]["b"]
            h = h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
            x = x + h @ block["mlp"]["c_proj"]["w"] + block["mlp"]["c_proj"]["b"]
        rows.append(p["wte"] @ norm(x, **p["ln_f"]))
    return np.array(rows)


@pytest.mark.parametrize(
    "n_vocab, n_embd, n_head, n_layer",
    [(7, 5, 1, 1), (1, 8, 2, 1), (53, 21, 3, 2), (101, 65, 5, 3), (257, 128, 1, 2), (1009, 100, 25, 1)],
)
def test_logits_against_a_textbook_in_float64(n_vocab, n_embd, n_head, n_layer):
    model = random_model(n_vocab, 40, n_embd, n_head, n_layer, scale=0.2)
    ids = np.random.default_rng(0).integers(0, n_vocab, 40)
    expected = textbook_logits(ids, *model[:2])
    cache = cached(model, ids[:7])
    in_pieces = np.concatenate([logits(model, piece, cache) for piece in (ids[7:8], ids[8:20], ids[20:])])
    close = dict(rtol=0, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_allclose(logits(model, ids), expected, **close)
    np.testing.assert_allclose(in_pieces, expected[7:], **close)
    assert len(cache) == 40


@pytest.mark.parametrize("size", ["7M", "1M"])
def test_logits_of_the_bundled_models(pair, size):
    for line in golden(size):
        ids, top_ids = line["prompt_ids"], line["top_ids"]
        cache, pieces = KVCache(pair[size].params, pair[size].n_head), []
        at_once, with_cache = (
            logits(pair[size], ids),
            logits(pair[size], ids, KVCache(pair[size].params, pair[size].n_head)),
        )
        for start in range(0, len(ids), 3):
            pieces.append(logits(pair[size], ids[start : start + 3], cache))
        for found in (at_once, with_cache, np.concatenate(pieces)):
            assert found.shape == (len(ids), 4096) and found.dtype == np.float32
            assert np.abs(found[-1, top_ids] - line["top_logits"]).max() < 1e-3
            assert found[-1].argmax() == top_ids[0]
            np.testing.assert_allclose(found, at_once, rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", ["7M", "1M"])
def test_greedy_ids_of_the_bundled_models(pair, size):
    for i, line in enumerate(golden(size)):
        n = len(line["greedy_ids"])
        assert plain(pair[size], line["prompt_ids"], n) == line["greedy_ids"], line["prompt"]
        if i == 0:
            assert speculative(pair[size], line["prompt_ids"], pair["1M"], n) == line["greedy_ids"], line[
                "prompt"
            ]


def test_greedy_ids_without_a_cache(pair):
    line = golden("7M")[2]
    ids = list(line["prompt_ids"])
    for expected in line["greedy_ids"][:30]:
        ids.append(int(logits(pair["7M"], ids)[-1].argmax()))
        assert ids[-1] == expected


@pytest.mark.parametrize("n_seq, n_past", [(0, 0), (0, 5), (11, 0), (6, 5)])
def test_a_pass_that_does_not_fit_is_refused_and_leaves_the_cache(n_seq, n_past):
    model = random_model(7, 10, 8, 2, 1)
    cache = cached(model, [1] * n_past) if n_past else KVCache(model.params, 2)
    with pytest.raises(ValueError, match=str(n_seq)):
        logits(model, [1] * n_seq, cache)
    assert len(cache) == n_past


# Rows do not mix

SHAPES = {  # n_vocab, n_ctx, n_embd, n_head, n_layer
    "124M": (50257, 128, 768, 12, 1),
    "355M": (4099, 128, 1024, 16, 1),
    "774M": (1000, 128, 1280, 20, 1),
    "1558M": (257, 128, 1600, 25, 1),
    "one head": (257, 128, 100, 1, 2),
    "odd": (61, 128, 33, 3, 2),
    "narrow": (5, 128, 1, 1, 1),
    "heads of one": (13, 128, 6, 6, 2),
}


@pytest.mark.parametrize("name", ["7M", "1M", *SHAPES])
def test_rows_have_the_bits_they_have_alone(pair, name):
    model = pair[name] if name in pair else random_model(*SHAPES[name], scale=0.1)
    ids = np.random.default_rng(1).integers(0, len(model.params["wte"]), 128)
    for n_past, n_rows in [(1, (1, 2, 3, 4, 8)), (28, (2, 3, 4, 5, 6, 7, 8, 9, 20, 100))]:
        cache = cached(model, ids[:n_past])
        alone = np.concatenate(
            [logits(model, ids[i : i + 1], cache) for i in range(n_past, n_past + max(n_rows))]
        )
        for k in n_rows:
            cache.truncate(n_past)
            assert len(cache) == n_past
            assert same_bits(logits(model, ids[n_past : n_past + k], cache), alone[:k]), k
            assert len(cache) == n_past + k
        cache.truncate(n_past + 1)  # a few refused: what comes next is as if they had never been
        assert same_bits(logits(model, ids[n_past + 1 : n_past + 3], cache), alone[1:3])


@pytest.mark.parametrize(
    "change",
    [np.ascontiguousarray, np.asfortranarray, lambda a: a.astype(np.float64)],
    ids=["C order", "Fortran order", "float64"],
)
def test_parameters_from_elsewhere(change):
    model, draft = random_model(101, 50, 24, 3, 2), random_model(101, 50, 16, 2, 1, seed=1)
    expected = plain(model, [1, 2, 3], 30, temperature=1)
    params, draft = mapped(change, model.params), mapped(change, draft.params)
    assert generate([1, 2, 3], params, 3, 30, temperature=1) == expected
    assert generate_speculative([1, 2, 3], params, draft, 3, 30, temperature=1) == expected


def test_memory_order_of_weights_does_not_change_logits():
    model = random_model(5003, 20, 64, 2, 1)
    expected, cache = logits(model, [4, 5, 6]), cached(model, [1, 2, 3])
    rows = logits(model, [4, 5], cache)
    for order in (np.ascontiguousarray, np.asfortranarray):
        changed = model._replace(params=mapped(order, model.params))
        np.testing.assert_allclose(
            logits(changed, [4, 5, 6]), expected, rtol=0, atol=1e-4 * np.abs(expected).max()
        )
        cache.truncate(3)
        assert same_bits(logits(changed, [4, 5], cache), rows)


def fingerprint():
    model = random_model(50257, 64, 768, 12, 1, scale=0.1)
    cache = KVCache(model.params, 12)
    found = [logits(model, ids, cache) for ids in (range(50), [1], [2, 3, 4])]
    return hashlib.sha256(b"".join(a.tobytes() for a in found)).hexdigest()


def test_the_number_of_threads_makes_no_difference():
    code = "import numpy, threadpoolctl; threadpoolctl.threadpool_limits({})\n"
    code += "import test_gpt2; print(test_gpt2.fingerprint())"
    assert len({in_own_process(code.format(n)) for n in (1, 2, 4)}) == 1


# Exact, whatever drafts


def drafters(model, prompt, ids, n_vocab):
    """Drafters of every sort, by name; `ids` is what plain decoding appends to `prompt`."""
    rng = np.random.default_rng(0)
    rest = lambda tokens, n: ids[len(tokens) - len(prompt) :][:n]  # noqa: E731

    def vandal(tokens, n):
        right = rest(tokens, n)
        tokens.clear()
        return right

    return {
        "the main model": model,
        "n-gram": ngram_draft,
        "right": rest,
        "wrong": lambda tokens, n: [(i + 1) % n_vocab for i in rest(tokens, n)],
        "wrong at the end": lambda tokens, n: (
            rest(tokens, n - 1) + [(i + 1) % n_vocab for i in rest(tokens, n)[-1:]]
        ),
        "random": lambda tokens, n: rng.integers(0, n_vocab, n).tolist(),
        "too many": lambda tokens, n: ids[len(tokens) - len(prompt) :] + [0] * 100,
        "endless": lambda tokens, n: itertools.chain(rest(tokens, n), itertools.repeat(0)),
        "none": lambda tokens, n: [],
        "nothing": lambda tokens, n: None,
        "array": lambda tokens, n: np.array(rest(tokens, n), np.uint16),
        "outside": lambda tokens, n: rest(tokens, 1) + [n_vocab, 0],
        "negative": lambda tokens, n: [-1] * n,
        "huge": lambda tokens, n: [10**30, -(10**30)],
        "not whole": lambda tokens, n: [0.0, "1", None, float("nan"), [2]][-n:],
        "vandal": vandal,
    }


def perturbed(model, scale=0.05):
    rng = np.random.default_rng(9)
    return model._replace(
        params=mapped(lambda a: (a + scale * rng.standard_normal(a.shape)).astype(np.float32), model.params)
    )


NAMES = [*drafters(None, [], [], 1), "cousin", "stranger"]


@st.composite
def requests(draw):
    n_head, d_head, n_layer, n_vocab, n_ctx = (
        draw(st.integers(*span)) for span in ((1, 3), (1, 7), (1, 3), (1, 61), (4, 40))
    )
    model = random_model(
        n_vocab,
        n_ctx,
        n_head * d_head,
        n_head,
        n_layer,
        draw(st.integers(0, 2**32)),
        draw(st.sampled_from([0.1, 0.5])),
    )
    prompt = draw(st.lists(st.integers(0, n_vocab - 1), min_size=1, max_size=n_ctx))
    n = draw(st.integers(0, n_ctx - len(prompt)) | st.just(n_ctx - len(prompt)))
    settings = dict(
        temperature=draw(st.sampled_from([0, 0.7, 1.3])),
        seed=draw(st.integers(0, 2**64 - 1)),
        top_k=draw(st.none() | st.integers(1, n_vocab + 3)),
        top_p=draw(st.none() | st.sampled_from([1e-9, 0.3, 0.9, 1])),
        stop_token=draw(st.none() | st.integers(0, n_vocab - 1)),
    )
    return (
        model,
        prompt,
        n,
        settings,
        draw(st.sampled_from(NAMES)),
        draw(st.integers(1, 8) | st.just("auto")),
        draw(st.integers(1, 5)),
    )


@given(requests())
@pytest.mark.filterwarnings("error")
def test_exact_on_random_models(request):
    model, prompt, n, settings, name, n_speculative, draft_heads = request
    n_vocab = len(model.params["wte"])
    ids = plain(model, prompt, n, **settings)
    every = drafters(model, prompt, ids, n_vocab)
    if name == "cousin":
        every[name] = perturbed(model)
    if name == "stranger":  # also of another width, depth and context
        every[name] = random_model(
            n_vocab, 3 + 5 * draft_heads, 3 * draft_heads, draft_heads, draft_heads % 2 + 1, seed=n
        )
    assert speculative(model, prompt, every[name], n, n_speculative, **settings) == ids


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_exact_on_the_pair(pair, settings):
    for line, lengths in zip(golden("7M")[::4], [(1, 5), ("auto", 3), (8,)]):
        prompt = line["prompt_ids"]
        ids = plain(pair["7M"], prompt, 16, **settings)
        every = drafters(pair["7M"], prompt, ids, 4096) | {"1M": pair["1M"]}
        chosen = ["1M", "the main model", "n-gram", "wrong", "wrong at the end", "random", "too many"]
        for name, n_speculative in itertools.product(chosen, lengths):
            assert speculative(pair["7M"], prompt, every[name], 16, n_speculative, **settings) == ids, (
                name,
                n_speculative,
            )


def test_exact_at_the_vocabulary_of_gpt2():
    model, other = random_model(50257, 60, 48, 3, 1), random_model(50257, 60, 32, 2, 1, seed=1)
    for prompt in ([50256, 0, 49999], [5, 17]):
        for settings in SETTINGS[:3]:
            ids = plain(model, prompt, 30, **settings)
            assert max(ids) > 40000 or settings == GREEDY
            for draft, n_speculative in itertools.product(
                [model, perturbed(model), other, ngram_draft], [1, 4, "auto"]
            ):
                assert speculative(model, prompt, draft, 30, n_speculative, **settings) == ids


@pytest.mark.parametrize("n_speculative", [1, 3, 8])
@pytest.mark.parametrize("settings", SETTINGS[:3], ids=str)
def test_rounds(pair, settings, n_speculative):
    prompt = golden("7M")[0]["prompt_ids"]
    for draft in (pair["1M"], pair["7M"], ngram_draft, None):
        rounds = []
        ids = (
            speculative(pair["7M"], prompt, draft, 36, n_speculative, on_round=rounds.append, **settings)
            if draft
            else plain(pair["7M"], prompt, 36, on_round=rounds.append, **settings)
        )
        assert [i for r in rounds for i in r.tokens] == ids
        for r in rounds:
            assert 0 <= r.n_accepted <= r.n_drafted <= (n_speculative if draft else 0)
            assert len(r.tokens) == r.n_accepted + 1  # and one of the main model's own
            assert r.draft_seconds >= 0 and r.verify_seconds > 0
            assert all(type(i) is int for i in r.tokens) and r._fields[:5] == (
                "tokens",
                "n_drafted",
                "n_accepted",
                "draft_seconds",
                "verify_seconds",
            )
        if (
            draft is pair["7M"]
        ):  # it agrees with itself, so that only the prompt and the end have smaller rounds
            assert all(r.n_accepted == r.n_drafted for r in rounds)
            assert len(rounds) <= 35 / (n_speculative + 1) + 2
        if draft is pair["1M"]:  # drafts are what it would write itself, whatever was refused before
            alone = []
            speculative(
                pair["7M"],
                prompt,
                lambda tokens, n: plain(pair["1M"], tokens, n, **settings),
                36,
                n_speculative,
                on_round=alone.append,
                **settings,
            )
            assert [r[:3] for r in rounds] == [r[:3] for r in alone] and sum(
                r.n_accepted for r in rounds
            ) >= 10


def test_what_a_drafter_is_asked(pair):
    prompt, asked = golden("7M")[0]["prompt_ids"], []
    text = prompt + golden("7M")[0]["greedy_ids"][:20]

    def draft(tokens, n):
        asked.append((list(tokens), n))
        return text[len(tokens) :][:1]

    assert speculative(pair["7M"], prompt, draft, 20, 4) == text[len(prompt) :]
    assert asked
    for tokens, n in asked:
        assert (
            tokens == text[: len(tokens)] and 1 <= n <= 4 and len(tokens) + n < len(text)
        )  # the last comes for free
        assert all(type(i) is int for i in tokens)


def test_draft_heads_are_as_wide_as_the_main_models():
    model, draft = random_model(53, 60, 24, 3, 1), random_model(53, 60, 16, 2, 1, seed=0)
    rounds = {}
    for n_head in (None, 2, 1):
        rounds[n_head] = []
        speculative(
            model, [1, 2], draft, 50, on_round=rounds[n_head].append, draft_n_head=n_head, temperature=1
        )
    drafted = {
        n_head: [(r.tokens, r.n_drafted, r.n_accepted) for r in found] for n_head, found in rounds.items()
    }
    assert drafted[None] == drafted[2] != drafted[1]


def test_auto_gives_up_drafts_that_are_always_wrong_and_uses_right_ones(pair):
    prompt = golden("7M")[0]["prompt_ids"]
    ids = plain(pair["7M"], prompt, 200, temperature=0.7)
    every = drafters(pair["7M"], prompt, ids, 4096)
    rounds = {}
    for name in ("wrong", "right"):
        rounds[name] = []
        assert (
            speculative(
                pair["7M"], prompt, every[name], 200, "auto", temperature=0.7, on_round=rounds[name].append
            )
            == ids
        )
    assert sum(r.n_drafted > 0 for r in rounds["wrong"][50:]) < 50
    assert len(rounds["right"]) < 120


def test_auto_seldom_asks_a_slow_drafter_that_finds_nothing(pair):
    prompt, asked = golden("7M")[0]["prompt_ids"], []

    def draft(tokens, n):
        asked.append(n)
        time.sleep(0.01)
        return []

    assert speculative(pair["7M"], prompt, draft, 100, "auto") == plain(pair["7M"], prompt, 100)
    assert len(asked) < 10


def test_slow_drafts_now_and_then_do_not_switch_drafting_off(pair):
    """A hiccup in the first drafted rounds, as on a busy machine."""
    large, rounds = pair["7M"], []
    ids = large.encoder.encode("Once upon a time there was a king")
    right = plain(large, ids, 200)

    def draft(tokens, n):
        if 3 < len(tokens) - len(ids) < 12:
            time.sleep(0.02)
        return right[len(tokens) - len(ids) :][:n]

    assert speculative(large, ids, draft, 200, "auto", on_round=rounds.append) == right
    assert len(rounds) < 100


def test_ngram_draft_copies_what_followed():
    assert ngram_draft([1, 2, 3, 4, 9, 1, 2, 3], 3) == [4, 9, 1]
    assert ngram_draft([7, 1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3], 2) == [5, 9]  # the latest occurrence
    assert (
        ngram_draft([1, 2, 3, 4, 5], 4)
        == ngram_draft([1], 4)
        == ngram_draft([], 4)
        == ngram_draft([1, 2, 1, 2], 0)
        == []
    )
    assert ngram_draft(np.array([50256, 55296, 50256, 55296, 50256]), 2) == [55296, 50256]


@given(st.lists(st.integers(0, 3) | st.sampled_from([0xD800, 0xDFFF, 50256]), max_size=30), st.integers(0, 8))
def test_ngram_draft_proposes_what_was_there(tokens, n):
    before = list(tokens)
    draft = ngram_draft(tokens, n)
    assert tokens == before and type(draft) is list and len(draft) <= n and set(draft) <= set(tokens)
    if draft:  # a bigram that was there before: its last occurrence goes on like this
        starts = [i for i in range(len(tokens) - 2) if tokens[i : i + 2] == tokens[-2:]]
        assert draft[0] in [tokens[i + 2] for i in starts]


# Sampling

N_SAMPLES = 5000
CUTS = [
    dict(temperature=0.7),
    dict(temperature=1.3),
    dict(temperature=1, top_k=5),
    dict(temperature=1.3, top_p=0.8),
    dict(temperature=0.7, top_k=7, top_p=0.85),
]


def constant_model(n_vocab=13, n_ctx=N_SAMPLES + 10):
    """A model with the same logits after every text, and these in float64."""
    model = random_model(n_vocab, n_ctx, 8, 2, 1, seed=5)
    zero = mapped(np.zeros_like, model.params)
    params = zero | {
        "wte": model.params["wte"],
        "ln_f": {"g": zero["ln_f"]["g"], "b": 1.5 * model.params["ln_f"]["b"]},
    }
    return Model(params, 2), params["wte"].astype(np.float64) @ params["ln_f"]["b"]


def probabilities(logits, temperature, top_k=None, top_p=None):
    """softmax(logits / temperature), of which the k likeliest stay, then the fewest that reach top_p."""
    p = np.exp(logits / temperature)
    order = np.argsort(-p)
    p[order[top_k:] if top_k else []] = 0
    p /= p.sum()
    kept = np.flatnonzero(np.cumsum(p[order]) >= (top_p or 1) - 1e-12)[0] + 1
    p[order[kept:]] = 0
    return p / p.sum()


def fits(counts, p):
    """Pearson's chi-square test at 1e-6, its quantile after Wilson and Hilferty 1931."""
    if counts[p == 0].any():
        return False
    counts, expected = counts[p > 0], (p * counts.sum())[p > 0]
    n, z = len(counts) - 1, statistics.NormalDist().inv_cdf(1 - 1e-6)
    return ((counts - expected) ** 2 / expected).sum() < n * (1 - 2 / (9 * n) + z * np.sqrt(2 / (9 * n))) ** 3


@pytest.mark.parametrize("settings", CUTS, ids=str)
def test_frequencies_of_samples_are_the_softmax(settings):
    model, constant_logits = constant_model()
    p = probabilities(constant_logits, **settings)
    over_seeds = np.array([plain(model, [1, 2], 1, seed=seed, **settings)[0] for seed in range(N_SAMPLES)])
    over_positions = np.array(plain(model, [1, 2], N_SAMPLES, seed=11, **settings))
    n_kept, likeliest, t = np.count_nonzero(p), np.argsort(-p)[:2], settings["temperature"]
    wrong = [probabilities(constant_logits, 1.3 * t, n_kept)] + [
        probabilities(constant_logits, t, n) for n in (n_kept - 1, n_kept + 1)
    ]
    groups = np.append(p[likeliest], 1 - p[likeliest].sum())
    for ids in (over_seeds, over_positions):
        counts = np.bincount(ids, minlength=13)
        assert fits(counts, p)
        assert not any(fits(counts, q) for q in wrong[: 3 if n_kept < 13 else 2])  # the test would notice
        group = np.where(ids == likeliest[0], 0, np.where(ids == likeliest[1], 1, 2))
        assert fits(
            np.bincount(3 * group[:-1:2] + group[1::2], minlength=9), np.outer(groups, groups).ravel()
        )  # no trace of the last
    assert (
        speculative(model, [1, 2], perturbed(model, 0.2), 300, 4, seed=11, **settings)
        == over_positions[:300].tolist()
    )
    assert [
        speculative(model, [1, 2], perturbed(model, 0.2), 2, 1, seed=seed, **settings)[0]
        for seed in range(50)
    ] == over_seeds[:50].tolist()


def test_noise_depends_on_seed_and_position_alone():
    model, _ = constant_model(n_ctx=100)
    ids = plain(model, [0, 0, 0], 40, temperature=1, seed=5)
    for n in (0, 1, 20):  # the same positions after other texts
        assert plain(model, [1, 2, 3] + [4] * n, 40 - n, temperature=1, seed=5) == ids[n:]
    assert (
        plain(model, [0, 0, 0], 40, temperature=1, seed=6)
        != ids
        != plain(model, [0, 0], 40, temperature=1, seed=5)
    )


def test_small_and_large_seeds_differ():
    model, _ = constant_model(n_ctx=100)
    seeds = (0, 1, 2, 2**31, 2**32, 2**63, 2**64 - 1, np.int64(77))
    assert len({tuple(plain(model, [0], 40, temperature=1, seed=seed)) for seed in seeds}) == len(seeds)


def test_equal_logits_are_all_sampled_and_the_limits_of_top_k_and_top_p():
    model, _ = constant_model(n_ctx=100)
    assert set(plain(model, [0], 30, temperature=1, top_k=1)) == set(plain(model, [0], 30))
    assert set(plain(model, [0], 30, temperature=1, top_p=1e-9)) == set(plain(model, [0], 30))
    assert plain(model, [0], 30, temperature=1, top_p=1, top_k=10**6) == plain(model, [0], 30, temperature=1)
    assert plain(model, [0], 30, temperature=1e-6) == plain(model, [0], 30)  # tends to greedy


# Bounded


@pytest.mark.parametrize("n_prompt", [1, 2, 19, 20])
def test_up_to_a_full_context_and_not_beyond(n_prompt):
    model, n_max = random_model(11, 20, 8, 2, 1), 20 - n_prompt
    for draft in (None, model, random_model(11, 6, 4, 1, 1), ngram_draft):  # one has a shorter context

        def run(n, **hook):
            prompt = [3] * n_prompt
            return (
                speculative(model, prompt, draft, n, 8, **hook) if draft else plain(model, prompt, n, **hook)
            )

        for n in {0, min(1, n_max), n_max}:
            ids = run(n)
            assert len(ids) == n and type(ids) is list and all(type(i) is int for i in ids)
        rounds = []
        with pytest.raises(ValueError, match="20"):
            run(n_max + 1, on_round=rounds.append)
        assert not rounds


def test_a_draft_model_with_a_shorter_context_stops_drafting(pair):
    model, short = random_model(11, 200, 8, 2, 1), random_model(11, 200, 8, 2, 1)
    short = short._replace(params=short.params | {"wpe": short.params["wpe"][:50]})
    for n_prompt in (1, 40, 49, 50, 51, 90):
        rounds, ids = [], plain(model, [1] * n_prompt, 100)
        assert speculative(model, [1] * n_prompt, short, 100, on_round=rounds.append) == ids
        ends = np.cumsum([n_prompt] + [len(r.tokens) for r in rounds])
        for start, r in zip(ends, rounds[1:]):  # the model of the first 50 positions is the main model
            assert r.n_drafted == r.n_accepted or start > 50
        assert all(r.n_drafted == 0 for start, r in zip(ends, rounds) if start > 51)
        assert n_prompt > 40 or any(r.n_drafted for r in rounds)


def test_stop_token(pair):
    prompt, ids = golden("7M")[2]["prompt_ids"], golden("7M")[2]["greedy_ids"][:40]
    for stop in {ids[0], ids[3], ids[10], ids[39], 4095}:
        expected = ids[: ids.index(stop) + 1] if stop in ids else ids
        assert plain(pair["7M"], prompt, 40, stop_token=stop) == expected
        every = drafters(pair["7M"], prompt, ids, 4096)
        for name, n_speculative in [
            ("the main model", 4),
            ("right", 8),
            ("too many", 3),
            ("wrong at the end", 2),
            ("n-gram", 5),
        ]:
            rounds = []
            found = speculative(
                pair["7M"],
                prompt,
                every[name],
                40,
                n_speculative,
                stop_token=np.int64(stop),
                on_round=rounds.append,
            )
            assert found == expected, name
            assert [i for r in rounds for i in r.tokens] == expected
            assert all(r.n_accepted <= min(r.n_drafted, len(r.tokens)) for r in rounds)
    assert plain(pair["7M"], prompt + [prompt[-1]], 3, stop_token=prompt[-1]) != []  # only what is new stops


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda ids: np.array(ids, np.uint8), lambda ids: range(4, 7)]
)
def test_inputs_are_any_sequence_and_stay_as_they_were(kind):
    model, ids = random_model(11, 30, 8, 2, 1), [4, 5, 6]
    expected = plain(model, ids, 9)
    inputs = kind(ids)
    assert (
        plain(model, inputs, 9)
        == speculative(model, inputs, model, 9)
        == speculative(model, inputs, ngram_draft, 9)
        == expected
    )
    assert list(inputs) == [4, 5, 6] and len(inputs) == 3
    np.testing.assert_array_equal(logits(model, inputs), logits(model, ids))


def test_counts_may_be_numpy_integers():
    """Small ones, which overflow where Python's do not."""
    model, small = random_model(50, 300, 8, 2, 1), np.int8
    settings = dict(temperature=1, top_k=3, seed=3)
    expected = plain(model, [1] * 100, 100, **settings)
    settings = dict(temperature=np.float16(1), top_k=small(3), seed=np.uint8(3))
    prompt = np.ones(100, np.uint8)
    assert generate(prompt, model.params, small(2), small(100), **settings) == expected
    for draft in (model.params, ngram_draft):
        assert expected == generate_speculative(
            prompt, model.params, draft, small(2), small(100), small(3), draft_n_head=small(2), **settings
        )


# Errors

NAN, INF = float("nan"), float("inf")
BAD = [
    *[
        dict(inputs=x)
        for x in (
            [],
            (),
            [11],
            [1, -1],
            [1.5],
            [2.0],
            "abc",
            ["1"],
            [None],
            None,
            5,
            [[1, 2]],
            np.zeros((2, 2), int),
            np.array([1.0]),
            [10**30],
        )
    ],
    *[dict(n_tokens_to_generate=x) for x in (-1, 28, 10**9, 2.5, "3", None, NAN)],
    *[dict(temperature=x) for x in (-0.1, NAN, INF, "hot", None, [1])],
    *[dict(temperature=1, top_k=x) for x in (0, -3, 2.5, "many")],
    *[dict(top_k=x) for x in (0, -3)],
    *[dict(temperature=1, top_p=x) for x in (0, -0.1, 1.1, NAN, "most")],
    *[dict(top_p=x) for x in (0, 1.1)],
    *[dict(temperature=1, seed=x) for x in (1.5, "lucky", None)],
    *[dict(n_head=x) for x in (0, 3, -2, 1.5, None)],
]
BAD_SPECULATIVE = [
    *[dict(n_speculative=x) for x in (0, -1, 2.5, "some", None, NAN)],
    *[dict(draft_n_head=x) for x in (0, 3, -1)],
    dict(draft_params=None),
    dict(draft_params="124M"),
    dict(draft_params=random_model(12, 30, 8, 2, 1).params),
    dict(draft_params=random_model(10, 30, 8, 2, 1).params),
]


def values(bad):
    return str([*bad.items()][-1] if "draft_params" not in bad else "draft_params")[:40]


@pytest.mark.parametrize("bad", BAD + BAD_SPECULATIVE, ids=values)
def test_what_makes_no_sense_is_refused_before_any_work(bad):
    model, work = random_model(11, 30, 8, 2, 1), []
    request = dict(
        inputs=[1, 2, 3], params=model.params, n_head=2, n_tokens_to_generate=5, on_round=work.append
    )
    calls = [
        lambda: generate_speculative(**dict(draft_params=model.params) | request | bad),
        lambda: generate_speculative(**dict(draft_params=lambda tokens, n: work.append(n)) | request | bad),
    ]
    if "draft_n_head" in bad or "draft_params" in bad:
        calls.pop()
    if not {"n_speculative", "draft_n_head", "draft_params"} & set(bad):
        calls.append(lambda: generate(**request | bad))
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        sentence = str(error.value)
        assert len(sentence) > 20 and "\n" not in sentence and not work
        value = [*bad.values()][-1]
        if isinstance(value, (int, float)) and value < 10**9:  # says which value
            assert str(value) in sentence


def test_vocabularies_that_differ_are_both_named():
    with pytest.raises(ValueError, match="(?s)11.*12|12.*11"):
        speculative(random_model(11, 30, 8, 2, 1), [1], random_model(12, 30, 8, 2, 1), 5)


def test_draft_heads_that_cannot_be_told_are_asked_for():
    with pytest.raises(ValueError, match="draft_n_head"):
        generate_speculative([1], *[random_model(11, 30, width, 1, 1).params for width in (8, 11)], 2, 5)


@pytest.mark.parametrize("ids", [[11], [-1], [1.0], ["a"], [1, 2**40]])
def test_a_pass_over_ids_outside_the_vocabulary_is_an_error(ids):
    with pytest.raises((ValueError, IndexError)):
        logits(random_model(11, 30, 8, 2, 1), ids)


# On company: hooks, exceptions, threads, forks


def blas_threads():
    return [
        library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"
    ]


@pytest.mark.parametrize("where", ["on_round", "drafter"])
def test_an_exception_of_the_callers_ends_the_generation_cleanly(pair, where):
    prompt, ids = golden("7M")[0]["prompt_ids"], golden("7M")[0]["greedy_ids"]
    seen = []

    def stop(*arguments):
        seen.append(arguments)
        if len(seen) == 3:
            raise KeyError("enough")
        return []

    with threadpoolctl.threadpool_limits(2):
        before = blas_threads()
        for _ in range(2):
            with pytest.raises(KeyError, match="enough"):
                if where == "drafter":
                    speculative(pair["7M"], prompt, stop, 20)
                else:
                    speculative(pair["7M"], prompt, pair["1M"], 20, on_round=stop)
            assert len(seen) == 3 and blas_threads() == before
            seen.clear()
        if where == "on_round":
            with pytest.raises(KeyError, match="enough"):
                plain(pair["7M"], prompt, 20, on_round=stop)
            assert len(seen) == 3 and blas_threads() == before
        assert plain(pair["7M"], prompt, 20) == speculative(pair["7M"], prompt, pair["1M"], 20) == ids[:20]
        assert blas_threads() == before


def test_generating_inside_a_hook(pair):
    prompt, ids = golden("7M")[0]["prompt_ids"], golden("7M")[0]["greedy_ids"]
    inner = []
    assert (
        plain(
            pair["7M"],
            prompt,
            5,
            on_round=lambda r: inner.append(speculative(pair["7M"], prompt, pair["1M"], 5)),
        )
        == ids[:5]
    )
    assert inner == [ids[:5]] * 5


def test_generations_in_several_threads_at_once(pair):
    large = random_model(50257, 60, 768, 12, 1, scale=0.1)  # its products are shared out to threads
    work = [(pair["7M"], line["prompt_ids"], pair["1M"], 40) for line in golden("7M")[:3]] + [
        (large, [1, 2, 3], perturbed(large, 0.01), 12)
    ]
    expected = [plain(model, prompt, n, temperature=1) for model, prompt, _, n in work]
    found = [[] for _ in work]

    def run(i):
        model, prompt, draft, n = work[i]
        for _ in range(2):
            found[i].append(plain(model, prompt, n, temperature=1))
            found[i].append(speculative(model, prompt, draft, n, temperature=1))

    with threadpoolctl.threadpool_limits(2):
        before = blas_threads()
        threads = [threading.Thread(target=run, args=[i]) for i in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[ids] * 4 for ids in expected]
        assert blas_threads() == before


def fork_while_generating(n_children=8):
    large = random_model(50257, 60, 768, 12, 1, scale=0.1)
    request = large, [1, 2, 3], perturbed(large, 0.01), 6
    expected, failed = speculative(*request), []
    busy = threading.Event()
    thread = threading.Thread(
        target=lambda: [
            failed.append(0) for _ in iter(busy.is_set, True) if speculative(*request) != expected
        ]
    )
    for n in range(n_children):
        if n == n_children // 2:
            thread.start()
        time.sleep(0.013 * n)
        child = os.fork()
        if not child:
            ok = speculative(*request) == expected == plain(large, [1, 2, 3], 6)
            os._exit(0 if ok else 3)
        deadline = time.monotonic() + 10
        while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        if status[1]:
            failed.append(f"child {n} hangs, or ends with {status[1]}")
            break
    busy.set()
    thread.join()
    return failed or "all the same"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_generations_in_forked_children():
    code = "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n"
    code += "import test_gpt2; print(test_gpt2.fork_while_generating())"
    assert in_own_process(code, timeout=100) == "all the same"


def interrupt_again_and_again(n_embd, n_times, longest):
    """Ctrl-C at any moment, as in a notebook: what runs next is right."""
    large = random_model(50257 if n_embd > 64 else 50, 60, n_embd, n_embd // 64, 1, scale=0.1)
    draft = perturbed(large, 0.01)
    with threadpoolctl.threadpool_limits(2):
        before, expected = blas_threads(), speculative(large, [1, 2, 3], draft, 4)
        rng, interrupted = np.random.default_rng(0), 0
        for _ in range(n_times):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0002, longest))
                while True:
                    speculative(large, [1, 2, 3], draft, 50)
            except KeyboardInterrupt:
                interrupted += 1
            if blas_threads() != before:
                return f"BLAS has {blas_threads()} threads after {interrupted} interrupts, not {before}"
            if speculative(large, [1, 2, 3], draft, 4) != expected:
                return "other ids after an interrupt"
    return "all the same" if interrupted == n_times else f"only {interrupted} interrupted"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timer on this system")
@pytest.mark.parametrize("size", [(768, 60, 0.05), (64, 1500, 0.0012)])  # busy in products; in Python
def test_interrupted_at_any_moment(size):
    code = (
        "import signal, test_gpt2; signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        f"print(test_gpt2.interrupt_again_and_again(*{size}))"
    )
    assert in_own_process(code) == "all the same"


def test_importing_is_quick_and_light():
    code = (
        "import sys, time; start = time.perf_counter(); import gpt2; print(time.perf_counter() - start)\n"
        "print(*{'tensorflow', 'requests', 'matplotlib', 'tqdm', 'fire', 'utils'} & set(sys.modules))"
    )
    found = [in_own_process(code).split() for _ in range(3)]
    assert min(float(seconds) for seconds, *_ in found) < 0.5
    assert [modules for _, *modules in found] == [[]] * 3
