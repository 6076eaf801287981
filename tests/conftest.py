"""What the tests share: the bundled pair, random models, Python in a process of its own."""

import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import hypothesis
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
sys.path.insert(0, str(ROOT))

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")

Model = namedtuple("Model", "params n_head encoder", defaults=[None])


def load(size):
    from utils import load_encoder_hparams_and_params

    encoder, hparams, params = load_encoder_hparams_and_params(size, ROOT / "models")
    return Model(params, hparams["n_head"], encoder)


@pytest.fixture(scope="session")
def pair():
    """The bundled 7M and 1M. Loading them leaves the copies with which later starts need no TensorFlow."""
    return {size: load(size) for size in ("7M", "1M")}


def golden(size):
    """A list of {"prompt", "prompt_ids", "top_ids", "top_logits", "greedy_ids", "smallest_gap"}."""
    return [
        json.loads(line) for line in (GOLDEN / f"pair_{size}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def random_model(n_vocab, n_ctx, n_embd, n_head, n_layer, seed=0, scale=0.5):
    """A model of random weights that nobody may write to, in the memory order of the loader."""
    rng = np.random.default_rng(seed)

    def array(*shape, around=0):
        a = (around + scale * rng.standard_normal(shape)).astype(np.float32)
        a.flags.writeable = False
        return a

    def norm():
        return {"g": array(n_embd, around=1), "b": array(n_embd)}

    def layer(n_in, n_out):
        return {"w": array(n_out, n_in).T, "b": array(n_out)}

    blocks = [
        {
            "attn": {"c_attn": layer(n_embd, 3 * n_embd), "c_proj": layer(n_embd, n_embd)},
            "ln_1": norm(),
            "mlp": {"c_fc": layer(n_embd, 4 * n_embd), "c_proj": layer(4 * n_embd, n_embd)},
            "ln_2": norm(),
        }
        for _ in range(n_layer)
    ]
    return Model(
        {"wte": array(n_vocab, n_embd), "wpe": array(n_ctx, n_embd), "blocks": blocks, "ln_f": norm()}, n_head
    )


def mapped(f, params):
    """The same nested parameters with f applied to every array."""
    if isinstance(params, dict):
        return {key: mapped(f, value) for key, value in params.items()}
    return [mapped(f, value) for value in params] if isinstance(params, list) else f(params)


def in_own_process(code, timeout=60, **env):
    """Run Python code where tests and repository can be imported; return what it prints."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths} | env,
        timeout=timeout,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
