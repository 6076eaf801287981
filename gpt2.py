"""GPT-2 in NumPy, with speculative decoding that returns exactly what plain decoding returns, only sooner.

From top to bottom: the model, picking a token, plain decoding, drafting, speculative decoding, what is
accepted as an argument, the command line.
"""
import contextlib
import functools
import io
import itertools
import os
import re
import sys
import time
from collections import namedtuple

import numpy as np

from matvec import holding_blas_to_one_thread, in_parallel, matmul, matvec

# ---- The model: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
# Only attention mixes positions; all else treats each row of x by itself. product(x, w) is x @ w, see `gpt2`.

PART, QUERIES = 256, 64  # rows of a long prompt that ffn and mha compute at a time, to save memory


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def layer_norm(x, g, b, eps=np.float32(1e-5)):
    x = x - x.sum(axis=-1, keepdims=True) / np.float32(x.shape[-1])
    variance = (x * x).sum(axis=-1, keepdims=True) / np.float32(x.shape[-1])
    return x / np.sqrt(variance + eps) * g + b


def linear(x, w, b, product):  # [n_seq, n_in], [n_in, n_out], [n_out] -> [n_seq, n_out]
    return product(x, w) + b


def ffn(x, c_fc, c_proj, product):  # [n_seq, n_embd] -> [n_seq, 4*n_embd] -> [n_seq, n_embd]
    if len(x) > PART:
        parts = np.array_split(x, -(-len(x) // PART))
        return np.concatenate([ffn(part, c_fc, c_proj, product) for part in parts])
    return linear(gelu(linear(x, **c_fc, product=product)), **c_proj, product=product)


def attention(q, k, v, mask=0):  # q, result: [..., n_q, d_head], k, v: [..., n_kv, d_head], mask: [n_q, n_kv]
    return softmax(q @ k.swapaxes(-1, -2) + mask) @ v


def mha(x, c_attn, c_proj, keys, values, n_past, product):  # [n_seq, n_embd] -> [n_seq, n_embd]
    n_seq, (n_head, _, d_head) = len(x), keys.shape  # keys, values: [n_head, n_ctx, d_head]
    qkv = linear(x, **c_attn, product=product)  # [n_seq, n_embd] -> [n_seq, 3*n_embd]
    q, k, v = qkv.reshape(n_seq, 3, n_head, d_head).transpose(1, 2, 0, 3)  # 3 times [n_head, n_seq, d_head]
    q = q / np.float32(np.sqrt(d_head))
    keys[:, n_past : n_past + n_seq] = k
    values[:, n_past : n_past + n_seq] = v
    heads = np.empty((n_seq, n_head, d_head), np.float32)
    if n_past:  # row by row, each against its own past alone: in company, sums would be rounded differently
        for i in range(n_seq):
            n = n_past + i + 1

            def attend(a, b):
                heads[i, a:b] = attention(q[a:b, i : i + 1], keys[a:b, :n], values[a:b, :n])[:, 0]

            in_parallel(attend, n_head, 2 * n * d_head, n)
    else:  # the rows of a prompt together
        mask = np.triu(np.full((n_seq, n_seq), -np.inf, np.float32), 1)

        def attend(a, b):
            for i in range(0, n_seq, QUERIES):
                n = min(i + QUERIES, n_seq)
                part = attention(q[a:b, i:n], keys[a:b, :n], values[a:b, :n], mask[i:n, :n])
                heads[i:n, a:b] = part.swapaxes(0, 1)  # [n_heads, n_q, d_head] -> [n_q, n_heads, d_head]

        in_parallel(attend, n_head, n_seq * n_seq * d_head)
    return linear(heads.reshape(n_seq, -1), **c_proj, product=product)


def transformer_block(x, mlp, attn, ln_1, ln_2, keys, values, n_past, product):  # x, result: [n_seq, n_embd]
    x = x + mha(layer_norm(x, **ln_1), **attn, keys=keys, values=values, n_past=n_past, product=product)
    return x + ffn(layer_norm(x, **ln_2), **mlp, product=product)


@holding_blas_to_one_thread
def gpt2(inputs, wte, wpe, blocks, ln_f, n_head, kv_cache=None, n_logits=None, n_vocab=None):
    """Return the logits that follow each of the input ids: [n_seq] -> [n_seq, n_vocab].

    wte: [n_vocab, n_embd], wpe: [n_ctx, n_embd], blocks, ln_f: the parameters, named as in the checkpoints.
    With a `KVCache`, `inputs` are the ids that follow what it holds; they are added to it. On top of a cache
    that holds anything, every row of the result has the same bits as if its id had come alone.
    n_logits, n_vocab: compute only the last so many rows, only the first so many columns.
    Raises ValueError if there are no ids, more than the context holds, or any that the vocabulary lacks.
    """
    n_seq = len(inputs)
    cache = KVCache(dict(wpe=wpe, blocks=blocks), n_head, n_seq) if kv_cache is None else kv_cache
    n_past, n_ctx = len(cache), cache.keys.shape[2]
    require(0 < n_seq <= n_ctx - n_past,
            f"{n_seq} ids after {n_past} do not fit: the model takes 1 to {n_ctx} ids in all")
    check_ids(inputs, len(wte))
    product = matvec if n_past else matmul  # a prompt comes alone, so its rows need not be kept apart
    x = wte[np.asarray(inputs)] + wpe[n_past : n_past + n_seq]  # [n_seq] -> [n_seq, n_embd]
    for block, keys, values in zip(blocks, cache.keys, cache.values):
        x = transformer_block(x, **block, keys=keys, values=values, n_past=n_past, product=product)
    cache.n_seq += n_seq
    x = layer_norm(x[-(n_logits or n_seq) :], **ln_f)
    return (matvec if len(x) == 1 else product)(x, wte[:n_vocab].T)  # -> [n_seq, n_vocab]


class KVCache:
    """The keys and values of one sequence, at first empty: two arrays [n_layer, n_head, n_ctx, d_head].

    params, n_head: the model that it is for; n_ctx: room for fewer positions than its context has.
    len() tells how many positions are in use.
    """

    def __init__(self, params, n_head, n_ctx=None):
        n_most, n_embd = params["wpe"].shape
        shape = len(params["blocks"]), n_head, min(n_ctx or n_most, n_most), n_embd // n_head
        self.keys, self.values, self.n_seq = np.empty(shape, np.float32), np.empty(shape, np.float32), 0

    def __len__(self):
        return self.n_seq

    def truncate(self, n):
        """Forget all but the first n positions."""
        self.n_seq = max(0, min(self.n_seq, n))


# ---- Picking a token: a race that every model runs against the same noise.


@functools.lru_cache(maxsize=32)  # drafting and verifying meet the same noise: draw it once
def gumbel(seed, position, n_vocab):
    """Gumbel noise for one position: [n_vocab], from the seed and the position alone."""
    rng = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, position]))
    return -np.log(np.maximum(rng.standard_exponential(n_vocab).astype(np.float32), np.float32(1e-30)))


class Sampler:
    """Sampling with temperature, top-k and top-p as a race with shared noise.

    argmax(logits / temperature + gumbel noise) is distributed as softmax(logits / temperature) (Gumbel 1954).
    The noise of a position is the same for every model, so a draft model that is nearly right mostly draws
    the very token that the main model draws: Daliri, Musco and Suresh 2024, "Coupling without Communication
    and Drafter-Invariant Speculative Decoding", arXiv:2408.07978.
    """

    def __init__(self, n_vocab, temperature, top_k, top_p, seed):
        self.n_vocab, self.seed = n_vocab, seed
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p

    def race(self, logits, position):
        """Return the scores whose largest belongs to the token at this position: one for each of the logits.

        logits: [n_vocab], or the first of them, as of a draft model.
        """
        if self.temperature == 0:
            return logits
        scores = (logits - logits.max()) / np.float32(max(self.temperature, 1e-30))
        if self.top_k is not None:
            scores = largest(scores, int(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            p = np.sort(softmax(scores.astype(np.float64)))[::-1]
            scores = largest(scores, np.searchsorted(np.cumsum(p), self.top_p) + 1)  # the fewest to reach it
        return scores + gumbel(self.seed, position, self.n_vocab)[: len(scores)]

    def __call__(self, logits, position):
        return int(self.race(logits, position).argmax())


def largest(scores, n):
    """Return the scores with all but the n largest, and what ties with them, at minus infinity."""
    return scores if n >= len(scores) else np.where(scores < np.partition(scores, -n)[-n], -np.inf, scores)


# ---- Plain decoding.


class Round(namedtuple("Round", "tokens n_drafted n_accepted draft_seconds verify_seconds")):
    """What one pass of the main model came to.

    tokens: the ids it added; how many were drafted, and how many of these accepted; how long drafting took,
    and the pass with the picking of tokens. The attribute `draft` has all drafted ids, accepted or not.
    """

    draft = ()

    @property
    def n_judged(self):
        """How many drafts met the main model's picks: those up to the first that was refused."""
        return min(self.n_accepted + 1, self.n_drafted)


@holding_blas_to_one_thread
def generate(inputs, params, n_head, n_tokens_to_generate, *,
             temperature=0.0, top_k=None, top_p=None, seed=0, stop_token=None, on_round=None):
    """Return the ids that the model continues `inputs` with: one pass per token.

    inputs: a sequence of ids, not changed. params, n_head: the model. The result is a list of
    n_tokens_to_generate ids, or fewer when stop_token comes up, which is then the last one.
    temperature: 0 takes the likeliest token, else tokens are drawn from softmax(logits / temperature), of
    which top_k leaves the k likeliest and top_p the fewest that have this probability together (ties at the
    border stay). The draw depends on the integer `seed` alone.
    on_round(Round) is called after every pass; an exception that it raises ends the generation.
    Raises ValueError, before any work, for values that make no sense and for more tokens than the context
    holds.
    """
    tokens, n_head, end = checked(inputs, params, n_head, n_tokens_to_generate,
                                  temperature, top_k, top_p, seed, stop_token)
    params, n_prompt = in_kernel_order(params), len(tokens)
    pick, cache = Sampler(len(params["wte"]), temperature, top_k, top_p, seed), KVCache(params, n_head, end)
    while len(tokens) < end and (len(tokens) == n_prompt or tokens[-1] != stop_token):
        start = time.perf_counter()
        logits = gpt2(tokens[len(cache) :], **params, n_head=n_head, kv_cache=cache, n_logits=1)
        tokens.append(pick(logits[0], len(tokens)))
        if on_round is not None:
            on_round(Round((tokens[-1],), 0, 0, 0.0, time.perf_counter() - start))
    return tokens[n_prompt:]


# ---- Drafting.


def ngram_draft(tokens, n):
    """Propose at most n ids, free of charge: find how the last few tokens went on when they last occurred.

    tokens: a list of ids. This is prompt lookup decoding (Apoorv Saxena 2023). The copy may run into itself,
    so that a loop is drafted to any length.
    """
    text = "".join(map(chr, tokens))  # strings search at the speed of C
    for size in (3, 2):
        found = text.rfind(text[-size:], 0, -1) if size < len(text) else -1
        if found >= 0:
            draft = list(tokens)
            for i in range(found + size, found + size + n):
                draft.append(draft[i])
            return draft[len(tokens) :]
    return []


DRAFT_VOCAB = 24_576  # ids are in order of merging, so the first half of GPT-2's makes up 96% of a text


class ModelDraft:
    """A smaller model that drafts, with `pick`, the main model's `Sampler`, and a KV cache of its own."""

    def __init__(self, params, n_head, pick, n_ctx):
        self.params = in_kernel_order(params)
        self.n_head, self.pick = n_head, pick
        self.cache, self.cached = KVCache(params, n_head, n_ctx), []  # cached: the ids that the cache holds
        self.seconds = 0.0  # that the last draft took

    def __call__(self, tokens, n, worth=lambda chance: True):
        """Propose at most n ids, another only if `worth` it, given the chance that those before it hold."""
        self.cache.truncate(min(n_common(self.cached, tokens), len(tokens) - 1))
        n_ctx, chance, draft = len(self.params["wpe"]), 1.0, list(tokens)
        while len(draft) < len(tokens) + n and len(draft) <= n_ctx and worth(chance):
            start, new = time.perf_counter(), draft[len(self.cache) :]
            logits = gpt2(new, **self.params, n_head=self.n_head, kv_cache=self.cache,
                          n_logits=1, n_vocab=DRAFT_VOCAB)
            race = self.pick.race(logits[0], len(draft))
            draft.append(int(race.argmax()))
            chance /= np.exp(race - race.max()).sum()  # times the winner's share in the softmax of the race
            if len(new) < 3:  # else the cache has been catching up
                self.seconds = time.perf_counter() - start
        self.cached = draft[: len(self.cache)]
        return draft[len(tokens) :]


def n_common(a, b):
    """Return how many ids two sequences have in common before they part."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class Auto:
    """Draft as much as pays, by what was measured: how many drafts are accepted, what they and passes cost.

    With drafts accepted at the rate a, a round of n makes 1 + a + ... + a^n tokens (Leviathan et al. 2023,
    section 3.1) in the time of n drafts and one pass (section 3.3), which takes a little longer with every
    row. The n that makes most tokens per second is taken (section 3.5), be it 0. While nothing is drafted,
    the estimates drift back to where they began, so that drafting gets another try; what tries may lose in
    all is limited.
    """

    START = 2.6, 4.0  # accepted and judged drafts before there were any: drafting is given a try

    def __init__(self, drafters):
        self.counts = dict.fromkeys(drafters, self.START)  # of late
        self.draft_seconds = dict.fromkeys(drafters, 0.0)  # per draft
        self.pass_seconds, self.row_seconds = None, 0.0  # of a main-model pass; for each row beyond the first
        self.longest = 1  # the most drafts that a round has had
        self.credit = 2.0  # passes that drafting may lose before it has to pause
        self.drafter = None  # whose drafts the round has

    def plan(self, drafter, n_most):
        """Return the most tokens per second that this drafter promises, and with how many drafts."""
        (accepted, judged), n, n_tokens = self.counts[drafter], 0, 1.0
        seconds, chance = self.pass_seconds, accepted / judged
        rate = 1.03 / seconds  # of no draft: a promise of less gain is not worth a try
        while n < n_most:
            seconds += self.draft_seconds[drafter] + self.row_seconds
            n_tokens, chance = n_tokens + chance, chance * accepted / judged
            if n_tokens / seconds <= rate:
                break
            rate, n = n_tokens / seconds, n + 1
        return rate, n

    def __call__(self, tokens, n_most):
        """Propose at most n_most ids, from the drafter that promises most, else from the next."""
        if self.pass_seconds and self.credit > 0:
            most = min(n_most, 2 * self.longest, 15)
            plans = [(*self.plan(drafter, most), drafter) for drafter in self.counts]
            for rate, n, self.drafter in sorted(plans, key=lambda plan: plan[0], reverse=True):
                if n and isinstance(self.drafter, ModelDraft):  # knows how sure it is: may stop or go on
                    # Another draft adds chance * accepted / judged tokens: worth it at no less than the rate.
                    accepted, judged = self.counts[self.drafter]
                    least = rate * (self.draft_seconds[self.drafter] + self.row_seconds) * judged / accepted
                    draft = self.drafter(tokens, min(n_most, 2 * n), worth=lambda chance: chance > least)
                else:
                    draft = self.drafter(tokens, n) if n else []
                if draft:
                    return draft
        self.drafter = None
        return []

    def learn(self, round):
        """Take in what a round came to. The first, the prompt's, says nothing about the time of others."""
        n, drafter = round.n_drafted, self.drafter
        if self.pass_seconds is None:
            self.pass_seconds = 0.0
        elif n == 0:
            if not self.pass_seconds:
                self.row_seconds = 0.1 * round.verify_seconds  # a first guess
            self.pass_seconds = averaged(self.pass_seconds, round.verify_seconds)
            self.row_seconds *= 0.995
            lost = round.draft_seconds / self.pass_seconds  # by a drafter that found nothing
            self.credit += 0.005 - (lost if lost > 0.05 else 0)
            for drafter, (accepted, judged) in self.counts.items():
                at_first, of_first = self.START
                self.counts[drafter] = 0.995 * accepted + 0.005 * at_first, 0.995 * judged + 0.005 * of_first
                self.draft_seconds[drafter] *= 0.995
        else:
            accepted, judged = self.counts[drafter]
            self.counts[drafter] = 0.95 * accepted + round.n_accepted, 0.95 * judged + round.n_judged
            took = drafter.seconds if isinstance(drafter, ModelDraft) else round.draft_seconds / n
            self.draft_seconds[drafter] = averaged(self.draft_seconds[drafter], took)
            expected = self.pass_seconds + n * self.row_seconds
            took = averaged(expected, round.verify_seconds)
            self.row_seconds = max(0.0, took - self.pass_seconds) / n
            cost = (n * self.draft_seconds[drafter] + took) / self.pass_seconds
            self.credit = min(5.0, self.credit + len(round.tokens) - cost)
            self.longest = max(self.longest, n)


def averaged(old, new):
    """Return an average over time, in which a single hiccup counts little; old is 0 if there is none yet."""
    return 0.7 * old + 0.3 * min(new, 1.5 * old) if old else new


# ---- Speculative decoding.


@holding_blas_to_one_thread
def generate_speculative(inputs, params, draft_params, n_head, n_tokens_to_generate, n_speculative=3, *,
                         draft_n_head=None, temperature=0.0, top_k=None, top_p=None, seed=0,
                         stop_token=None, on_round=None):
    """Return exactly the ids that `generate` returns, in fewer passes of the main model.

    Each round drafts up to n_speculative tokens, checks them all in one pass, and keeps those that the main
    model picks too, plus the main model's own next token: Leviathan et al. 2023, "Fast Inference from
    Transformers via Speculative Decoding", section 2; here with shared noise in place of their rejection
    sampling, so that the text does not depend on the drafts.
    draft_params: the draft model's parameters, or any function draft(tokens, n) that returns ids, such as
    `ngram_draft`: what it returns is advice, and at worst costs time. draft_n_head: by default as many heads
    as make them as wide as the main model's. n_speculative="auto" drafts as much as pays, and beside a draft
    model it looks up n-grams, too. All else as in `generate`.
    Raises ValueError as `generate` does, and if n_speculative or the draft model makes no sense or the
    vocabularies differ.
    """
    tokens, n_head, end = checked(inputs, params, n_head, n_tokens_to_generate,
                                  temperature, top_k, top_p, seed, stop_token)
    check_draft(params, n_head, draft_params, draft_n_head, n_speculative)
    params, n_prompt = in_kernel_order(params), len(tokens)
    pick, cache = Sampler(len(params["wte"]), temperature, top_k, top_p, seed), KVCache(params, n_head, end)
    if callable(draft_params):
        drafters = [lambda tokens, n: as_advice(draft_params(tokens, n), n, len(params["wte"]))]
    else:
        draft_n_head = int(draft_n_head or heads_as_wide(draft_params, params, n_head))
        drafters = [ModelDraft(draft_params, draft_n_head, pick, end), ngram_draft]
    auto = Auto(drafters) if n_speculative == "auto" else None

    while len(tokens) < end and (len(tokens) == n_prompt or tokens[-1] != stop_token):
        # Draft. The prompt goes alone, as in `generate`; the last token comes anyway, without a draft.
        start, draft = time.perf_counter(), []
        if len(cache) and (n := end - len(tokens) - 1):
            n = n if auto else min(n, int(n_speculative))
            draft = (auto or drafters[0])(list(tokens), n)
        # Verify: one pass of the main model over all drafts.
        drafted, new = time.perf_counter(), tokens[len(cache) :] + draft
        logits = gpt2(new, **params, n_head=n_head, kv_cache=cache, n_logits=len(draft) + 1)
        # Accept: pick the main model's own tokens for as long as they are those drafted, and one more.
        picked = []
        for row, guess in zip(logits, draft + [None]):
            picked.append(pick(row, len(tokens) + len(picked)))
            if picked[-1] != guess or guess == stop_token:
                break
        tokens += picked
        # Roll back: forget the refused drafts.
        cache.truncate(len(tokens) - 1)

        round = Round(tuple(picked), len(draft), n_common(picked, draft),
                      draft_seconds=drafted - start, verify_seconds=time.perf_counter() - drafted)
        round.draft = tuple(draft)
        if auto:
            auto.learn(round)
        if on_round is not None:
            on_round(round)
    return tokens[n_prompt:]


def as_advice(draft, n, n_vocab):
    """Return what a drafter came up with as a list: at most n ids, up to the first thing that is no id."""
    draft = itertools.islice(draft, n) if np.iterable(draft) else []
    return [int(i) for i in itertools.takewhile(lambda i: whole(i) and 0 <= i < n_vocab, draft)]


def heads_as_wide(draft_params, params, n_head):
    """Return how many heads as wide as the main model's the draft model has."""
    return draft_params["wte"].shape[1] * n_head // params["wte"].shape[1]


# ---- What the functions above accept.


def in_kernel_order(params):
    """Return params in float32, every w in Fortran order for `matvec`, copying only what is not so yet."""
    if isinstance(params, dict):
        return {name: np.asarray(part, np.float32, order="F") if name == "w" else in_kernel_order(part)
                for name, part in params.items()}
    if isinstance(params, (list, tuple)):
        return [in_kernel_order(part) for part in params]
    return np.asarray(params, np.float32, order="C")


def checked(inputs, params, n_head, n_tokens_to_generate, temperature, top_k, top_p, seed, stop_token):
    """Return the ids in inputs as a list, n_head, and how many ids there will be in all at most.

    Raises ValueError about the first argument that is wrong.
    """
    check_options(n_tokens_to_generate, temperature, top_k, top_p, seed)
    (n_vocab, n_embd), n_ctx = params["wte"].shape, len(params["wpe"])
    require(hasattr(inputs, "__iter__") and not isinstance(inputs, (str, bytes)),
            f"inputs must be a sequence of token ids, not {inputs!r:.40}: text has to be encoded first")
    tokens = list(inputs)
    end = len(tokens) + int(n_tokens_to_generate)  # int: NumPy's small integers overflow
    require(tokens, "there is nothing to continue: give at least one token id, such as that of <|endoftext|>")
    check_ids(tokens, n_vocab)
    require(stop_token is None or whole(stop_token) and 0 <= stop_token < n_vocab,
            f"stop_token must be a token id from 0 to {n_vocab - 1}, not {stop_token!r}")
    require(whole(n_head) and n_head >= 1 and n_embd % int(n_head) == 0,
            f"n_head must divide the model's width {n_embd}, which {n_head!r} does not")
    require(end <= n_ctx,
            f"{len(tokens)} prompt tokens and {n_tokens_to_generate} new ones are more than the {n_ctx} "
            "of the model's context: "
            + (f"generate at most {n_ctx - len(tokens)}" if len(tokens) < n_ctx else "shorten the prompt"))
    return [int(i) for i in tokens], int(n_head), end


def check_options(n_tokens_to_generate, temperature, top_k, top_p, seed):
    require(whole(n_tokens_to_generate) and n_tokens_to_generate >= 0,
            f"n_tokens_to_generate must be a whole number from 0 on, not {n_tokens_to_generate!r}")
    require(number(temperature) and 0 <= float(temperature) <= 1e30,
            f"temperature must be 0 (always the likeliest token) or a larger number, not {temperature!r}")
    require(top_k is None or whole(top_k) and top_k >= 1,
            f"top_k must be a whole number from 1 on, not {top_k!r}")
    require(top_p is None or number(top_p) and 0 < top_p <= 1,
            f"top_p must be above 0 and at most 1, not {top_p!r}")
    require(whole(seed) and 0 <= seed < 2**64,
            f"seed must be a whole number from 0 to 2**64 - 1, not {seed!r}")


def check_ids(ids, n_vocab):
    for i in ids:
        require(whole(i) and 0 <= i < n_vocab,
                f"token ids must be whole numbers from 0 to {n_vocab - 1}, not {i!r}")


def check_n_speculative(n_speculative):
    require(n_speculative == "auto" or whole(n_speculative) and n_speculative >= 1,
            f'n_speculative must be "auto" or a whole number from 1 on, not {n_speculative!r}')


def check_draft(params, n_head, draft_params, draft_n_head, n_speculative):
    """Raise ValueError if speculative decoding cannot work with this draft model or number of drafts."""
    check_n_speculative(n_speculative)
    if callable(draft_params):
        return
    require(isinstance(draft_params, dict),
            "draft_params must be a model's parameters or a function draft(tokens, n)")
    n_vocab, n_draft_vocab = len(params["wte"]), len(draft_params["wte"])
    require(n_vocab == n_draft_vocab,
            f"the draft model's vocabulary has {n_draft_vocab} tokens and the main model's {n_vocab}: "
            "a draft model must share the main model's vocabulary")
    n_embd, d_head = draft_params["wte"].shape[1], params["wte"].shape[1] // n_head
    if draft_n_head is None:
        require(n_embd % d_head == 0,
                f"the draft model's width {n_embd} is not made of heads as wide as the main model's "
                f"{d_head}: say draft_n_head")
    else:
        require(whole(draft_n_head) and draft_n_head >= 1 and n_embd % int(draft_n_head) == 0,
                f"draft_n_head must divide the draft model's width {n_embd}, which {draft_n_head!r} does not")


def whole(x):
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def number(x):
    return whole(x) or isinstance(x, (float, np.floating))


def require(condition, sentence):
    if not condition:
        raise ValueError(sentence)


# ---- The command line.

COLOURS = {"accepted": "34", "refused": "9;90", "correction": "33", "free": "36"}  # ANSI codes
LEGEND = {"accepted": "drafted by {}, accepted by the large one",
          "refused": "drafted and refused",
          "correction": "what the large model picked instead",
          "free": "one more token from the large model, where it refused nothing"}


def main(prompt=None, *, n_tokens_to_generate=40, model_size="124M", models_dir=None,
         use_generate_speculative=True, draft_size=None, n_speculative="auto",
         temperature=0.0, top_k=None, top_p=None, seed=0, show_drafts=False):
    """Continue a text with GPT-2. The text goes to standard output, everything else to standard error.

    Args:
        prompt: the text to continue; "" starts from nothing, and - takes it from standard input
        n_tokens_to_generate: how many tokens to write; fewer if the model ends its text
        model_size: 124M, 355M, 774M, 1558M (downloaded when missing), 1M, 7M (bundled), or a directory's path
        models_dir: where the models are; by default the folder models beside this program
        use_generate_speculative: draft and verify: the same text, sooner (--nouse_generate_speculative: not)
        draft_size: what drafts: another model, ngram (look up how the text went on before) or none
        n_speculative: how many tokens to draft per round, or auto, as many as pay
        temperature: 0 always takes the likeliest token; 0.8 reads better
        top_k: draw from the k likeliest tokens only
        top_p: draw from the fewest tokens that have this probability together
        seed: another number, another text
        show_drafts: colour each token by where it came from; =always also where the output is no terminal
    """
    if prompt is None:
        raise ValueError("""there is no prompt. For example, with the bundled model:
    python gpt2.py "Once upon a time there was a king" --model_size 7M --temperature 0.8
  `python gpt2.py --help` tells all options.""")
    check_options(n_tokens_to_generate, temperature, top_k, top_p, seed)  # before a model is downloaded
    check_n_speculative(n_speculative)
    require(show_drafts in (False, True, "always"),
            f"show_drafts is given alone or as --show_drafts=always, not {show_drafts!r}")
    require(use_generate_speculative in (False, True),
            f"use_generate_speculative is True or False, not {use_generate_speculative!r}")
    from utils import MODELS_DIR, load_encoder_hparams_and_params as load  # late, as import is slow

    models_dir = models_dir or MODELS_DIR
    draft_size = "none" if not use_generate_speculative else draft_size or default_draft(model_size)
    if prompt == "-":
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as e:
            raise ValueError(f"standard input is no {e.encoding} text: its byte {e.start} is amiss") from None
    encoder, hparams, params = load(model_size, models_dir)
    n_head, draft, draft_n_head = hparams["n_head"], ngram_draft, None
    if draft_size not in ("none", "ngram"):
        draft_encoder, draft_hparams, draft = load(draft_size, models_dir)
        draft_n_head = draft_hparams["n_head"]
        require(draft_encoder.encoder == encoder.encoder,
                f"{draft_size} cannot draft for {model_size}: it has another vocabulary")
    end = encoder.encoder.get("<|endoftext|>")
    require(prompt or end is not None,
            f"{model_size} cannot start from nothing, as it has no <|endoftext|>: give a prompt")
    inputs = encoder.encode(prompt) or [end]
    kwargs = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop_token=end)

    rounds, decode, start = [], encoder.incremental_decoder(), time.perf_counter()
    coloured = show_drafts == "always" or show_drafts and sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def paint(text, origin):
        return f"\x1b[{COLOURS[origin]}m{text}\x1b[0m" if coloured and text else text

    if coloured:
        drafter = "n-gram lookup" if draft is ngram_draft else "the small model"
        drafter += " or n-gram lookup" if n_speculative == "auto" and draft is not ngram_draft else ""
        for origin, words in LEGEND.items():
            print(paint(words.format(drafter), origin), file=sys.stderr)

    def in_vocabulary(ids):  # some models have spare ids that stand for no text
        return [i for i in ids if i in encoder.token_bytes]

    def stream(round):
        rounds.append(round)
        for i, token in enumerate(round.tokens):
            if i == round.n_accepted and coloured:
                refused = re.sub("\r?\n|\r", "↵", encoder.decode(in_vocabulary(round.draft[i:])))
                sys.stdout.write(paint(refused, "refused"))
            origin = "accepted" if i < round.n_accepted else "correction" if i < round.n_drafted else "free"
            sys.stdout.write(paint(decode(in_vocabulary([token]) if token != end else []), origin))
        sys.stdout.flush()

    try:
        if draft_size == "none":
            generate(inputs, params, n_head, n_tokens_to_generate, **kwargs, on_round=stream)
        else:
            generate_speculative(inputs, params, draft, n_head, n_tokens_to_generate, n_speculative,
                                 draft_n_head=draft_n_head, **kwargs, on_round=stream)
    finally:
        if rounds:
            print(decode([], final=True), flush=True)
            print(statistics(rounds, time.perf_counter() - start), file=sys.stderr)


def default_draft(model_size):
    """Return what drafts for a model: the smallest of its family, or n-gram lookup if that is itself."""
    return {"7M": "1M", "355M": "124M", "774M": "124M", "1558M": "124M"}.get(model_size, "ngram")


def statistics(rounds, seconds):
    """Return a line about all rounds, which took so many seconds together."""
    counts = [(len(round.tokens), round.n_drafted, round.n_accepted) for round in rounds]
    n_tokens, n_drafted, n_accepted = map(sum, zip(*counts))
    line = (f"{n_tokens} tokens in {seconds:.2f} s ({n_tokens / seconds:.1f} tokens/s), "
            f"{len(rounds)} main-model passes, {n_drafted} drafted, {n_accepted} accepted")
    if n_drafted:
        line += f" ({n_accepted / n_drafted:.0%}), {n_tokens / len(rounds):.2f} tokens per pass"
    return line


def command_line(main, **parse):
    """Run main as a command line: its result is the exit code; what is wrong is a sentence and exit code 2.

    parse: functions that parse arguments, by name, where fire's guess would not do.
    """
    import fire

    fire.decorators.FIRE_METADATA = "_parse"  # under its own name it would show up in the help as a command
    calls = []  # fire calls first and complains about unknown options later: so let it only take notes
    note = functools.wraps(main)(lambda *args, **kwargs: calls.append((args, kwargs)))
    sys.stdin = sys.stdin or open(os.devnull)  # None where the caller closed them
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))
    sys.stdout.reconfigure(errors="replace")
    try:
        command = [*sys.argv[1:], "--", "--separator=\0"]  # so that a lone - is an argument
        asked_for_help, said = {"-h", "--help"} & set(command), io.StringIO()
        if asked_for_help:  # beside other arguments fire would explain main's result
            command = ["--", "--help", "--separator=\0"]
        with contextlib.nullcontext() if asked_for_help else contextlib.redirect_stderr(said):
            try:
                fire.Fire(fire.decorators.SetParseFns(**parse)(note), command=command)
            except (TypeError, ValueError, RecursionError, AttributeError) as e:
                raise ValueError(f"the options cannot be read ({e}): --help lists them") from None
        for args, kwargs in calls:
            sys.exit(main(*args, **kwargs))
    except fire.core.FireExit as e:
        if e.code:
            what = said.getvalue().partition("\n")[0].removeprefix("ERROR: ")
            print(f"error: {what}: a prompt needs quotes, and --help lists the options", file=sys.stderr)
        sys.exit(e.code)
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, MemoryError) as e:
        print(f"error: {e or 'there is not enough memory'}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    command_line(main, prompt=str, model_size=str, models_dir=str, draft_size=str)
