import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
import safetensors.numpy

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import utils  # noqa: E402
from faulty_server import FaultyServer  # noqa: E402
from utils import load_encoder_hparams_and_params as load  # noqa: E402

HUGGINGFACE = ROOT / "tests" / "golden" / "huggingface"
BUNDLED_FILES = utils.OPENAI_FILES
DATA = "model.ckpt.data-00000-of-00001"
TINY = dict(n_vocab=4096, n_ctx=8, n_embd=16, n_head=2, n_layer=2)


def copy_model(source, target):
    """A writable copy of a model without what other starts have kept beside it."""
    os.makedirs(target)
    for path in pathlib.Path(source).iterdir():
        if path.name[0] != "." and path.name != utils.KEPT_COPY:
            shutil.copyfile(path, os.path.join(target, path.name))
    return str(target)


@pytest.fixture
def small(tmp_path):
    return copy_model(ROOT / "models" / "1M", tmp_path / "small")


def random_tensors(n_vocab, n_ctx, n_embd, n_head, n_layer, seed=0):
    """{OpenAI's variable name: float32 array}, spelled out here from the list of the released ones."""
    rng = np.random.default_rng(seed)
    shapes = {"wte": (n_vocab, n_embd), "wpe": (n_ctx, n_embd), "ln_f/g": (n_embd,), "ln_f/b": (n_embd,)}
    for i in range(n_layer):
        shapes |= {
            f"h{i}/ln_1/g": (n_embd,),
            f"h{i}/ln_1/b": (n_embd,),
            f"h{i}/ln_2/g": (n_embd,),
            f"h{i}/ln_2/b": (n_embd,),
            f"h{i}/attn/c_attn/w": (1, n_embd, 3 * n_embd),
            f"h{i}/attn/c_attn/b": (3 * n_embd,),
            f"h{i}/attn/c_proj/w": (1, n_embd, n_embd),
            f"h{i}/attn/c_proj/b": (n_embd,),
            f"h{i}/mlp/c_fc/w": (1, n_embd, 4 * n_embd),
            f"h{i}/mlp/c_fc/b": (4 * n_embd,),
            f"h{i}/mlp/c_proj/w": (1, 4 * n_embd, n_embd),
            f"h{i}/mlp/c_proj/b": (n_embd,),
        }
    return {"model/" + name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_openai(directory, tensors, hparams, prefix="model.ckpt"):
    import tensorflow as tf

    copy_model(ROOT / "models" / "1M", directory)
    for name in BUNDLED_FILES:
        if name.startswith("model.ckpt"):
            os.remove(os.path.join(directory, name))
    tf.raw_ops.SaveV2(
        prefix=os.path.join(directory, prefix),
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=[tf.constant(t) for t in tensors.values()],
    )
    pathlib.Path(directory, "checkpoint").write_text(f'model_checkpoint_path: "{prefix}"\n')
    pathlib.Path(directory, "hparams.json").write_text(json.dumps(hparams))
    return str(directory)


def flat(params):
    """{"h0/attn/c_attn/w": array}, the way back from the nested dict."""
    found = {}

    def walk(node, path):
        for key, value in node.items():
            walk(value, f"{path}{key}/") if isinstance(value, dict) else found.update({path + key: value})

    walk({key: value for key, value in params.items() if key != "blocks"}, "")
    for i, block in enumerate(params["blocks"]):
        walk(block, f"h{i}/")
    return found


def assert_is(params, expected):
    """`expected` maps OpenAI's names to arrays; each tensor equals its own, float32, in order."""
    params = flat(params)
    assert params.keys() == expected.keys()
    for name, tensor in params.items():
        assert tensor.dtype == np.float32 and np.array_equal(
            tensor, np.squeeze(expected[name]).astype(np.float32)
        ), name
        assert (tensor.T if name.endswith("/w") else tensor).flags.c_contiguous, name


def flip(path, at):
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 4]))


def run(code, *args, limit=None, **env):
    """Run Python code in a process of its own, with utils imported and args in sys.argv."""
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import utils; " + code
    return subprocess.Popen(
        [sys.executable, "-c", code, str(ROOT), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
        preexec_fn=limit,
    )


# Sources


@pytest.mark.parametrize("size", ["1M", "7M"])
def test_bundled_sizes_are_what_tensorflow_reads(size):
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(ROOT / "models" / size / "model.ckpt"))
    expected = {name[len("model/") :]: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    for _ in range(2):  # the second time from the kept copy
        encoder, hparams, params = load(size)
        assert_is(params, expected)
        assert hparams == json.loads((ROOT / "models" / size / "hparams.json").read_text())
        assert encoder.decode(encoder.encode("Once upon a time")) == "Once upon a time"


def test_float32_checkpoint_with_the_name_of_a_fine_tuned_one(tmp_path):
    tensors = random_tensors(**TINY) | {"model/Adam/step": np.float32(3)}
    directory = write_openai(tmp_path / "model", tensors, TINY, prefix="model-1000")
    del tensors["model/Adam/step"]
    for _ in range(2):
        encoder, hparams, params = load(directory)
        assert hparams == TINY
        assert_is(params, {name[len("model/") :]: t for name, t in tensors.items()})
    assert os.path.exists(os.path.join(directory, utils.KEPT_COPY))


def huggingface_tensors(directory):
    """{OpenAI's name: array} by the safetensors library, which leaves unpacking bfloat16 to us."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, spec in safetensors.deserialize(path.read_bytes()):
            if spec["dtype"] == "BF16":
                data = b"".join(b"\0\0" + spec["data"][i : i + 2] for i in range(0, len(spec["data"]), 2))
                tensors[name] = np.frombuffer(data, np.float32).reshape(spec["shape"])
            elif spec["dtype"] != "U8":
                tensors[name] = np.frombuffer(
                    spec["data"], np.dtype(f"f{int(spec['dtype'][1:]) // 8}")
                ).reshape(spec["shape"])
    renamed = {}
    for name, tensor in tensors.items():
        parts = name.replace("transformer.", "").split(".")
        if parts[0] != "lm_head" and parts[-1] != "masked_bias":
            where = [f"h{parts[1]}", *parts[2:-1]] if parts[0] == "h" else parts[:-1]
            leaf = "b" if parts[-1] == "bias" else "g" if "ln_" in where[-1] else "w"
            renamed["/".join(where if where[0] in ("wte", "wpe") else [*where, leaf])] = tensor
    return renamed


@pytest.mark.parametrize("name", ["plain", "prefixed", "bfloat16_sharded"])
def test_huggingface_directories(name):
    from gpt2 import gpt2

    before = sorted(os.listdir(HUGGINGFACE / name))
    encoder, hparams, params = load(HUGGINGFACE / name)
    assert_is(params, huggingface_tensors(HUGGINGFACE / name))
    config = json.loads((HUGGINGFACE / name / "config.json").read_text())
    assert hparams == dict(
        n_vocab=config["vocab_size"],
        n_ctx=config["n_positions"],
        n_embd=config["n_embd"],
        n_head=config["n_head"],
        n_layer=config["n_layer"],
    )
    reference = json.loads((HUGGINGFACE / name / "reference.json").read_text())
    logits = gpt2(reference["ids"], **params, n_head=hparams["n_head"])[-1]
    assert np.argsort(-logits)[:8].tolist() == reference["top_ids"]
    assert np.allclose(logits[reference["top_ids"]], reference["top_logits"], rtol=0, atol=1e-3)
    assert sorted(os.listdir(HUGGINGFACE / name)) == before


def test_huggingface_float16(tmp_path):
    directory = pathlib.Path(copy_model(HUGGINGFACE / "plain", tmp_path / "half"))
    halves = {
        k: v.astype(np.float16)
        for k, v in safetensors.numpy.load_file(directory / "model.safetensors").items()
    }
    safetensors.numpy.save_file(halves, directory / "model.safetensors")
    assert_is(load(directory)[2], huggingface_tensors(directory))


# Which model


def test_a_path_opens_from_anywhere(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = load("1M")[2]["wte"]
    for path in ("./small", "small/", os.path.join("..", tmp_path.name, "small"), small, pathlib.Path(small)):
        assert np.array_equal(load(path, models_dir="nowhere")[2]["wte"], wanted)
    assert np.array_equal(load("small", models_dir=tmp_path)[2]["wte"], wanted)
    assert not os.path.exists("nowhere")


@pytest.mark.parametrize(
    "size",
    [
        "../x",
        "/etc",
        "124m",
        "",
        "124M/..",
        ".",
        "..",
        "~",
        "1m ",
        "gpt2",
        "a\0b",
        "C:x",
        "1M/../2M",
        "0" * 5000,
        None,
        124,
        True,
        ["124M"],
        b"124M",
    ],
)
def test_what_is_no_model_is_refused_and_nothing_is_made(size, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GPT2_MODELS_URL", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="."):
        load(size, models_dir=tmp_path / "models")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["here", "home"]


def test_unknown_sizes_name_what_works(tmp_path):
    with pytest.raises(ValueError, match="1M, 7M .bundled.*124M, 355M, 774M, 1558M .downloaded.*path"):
        load("2M", tmp_path)
    with pytest.raises(ValueError, match="7M.*bundled"):
        load("7M", tmp_path)
    with pytest.raises(ValueError, match="hparams.json.*config.json"):
        load(tmp_path)
    with pytest.raises(ValueError, match="models_dir"):
        load("124M", 5)


# Broken files


@pytest.mark.parametrize("name", BUNDLED_FILES)
@pytest.mark.parametrize("fault", ["missing", "empty", "cut", "flipped"])
def test_a_broken_file_is_named(small, name, fault):
    wanted = load("1M")[2]["wte"]
    path = os.path.join(small, name)
    size = os.path.getsize(path)
    if fault == "missing":
        os.remove(path)
    elif fault == "flipped":
        flip(path, 0 if name.endswith("json") else size // 3)
    else:
        os.truncate(path, 0 if fault == "empty" else size // 2)
    if name in ("checkpoint", "model.ckpt.meta"):  # say nothing that is needed
        return np.testing.assert_array_equal(load(small)[2]["wte"], wanted)
    with pytest.raises((ValueError, OSError)) as error:
        load(small)
    assert (name if "model.ckpt" not in name else "model.ckpt") in str(error.value) and "\n" not in str(
        error.value
    )
    assert not os.path.exists(os.path.join(small, utils.KEPT_COPY))


@pytest.mark.parametrize(
    "change",
    [
        {"n_vocab": 4097},
        {"n_ctx": 511},
        {"n_embd": 64},
        {"n_layer": 1},
        {"n_layer": 3},
        {"n_head": 3},
        {"n_layer": 10**12},
        {"n_embd": 0},
        {"n_head": "2"},
        {"n_ctx": None},
        {"n_vocab": True},
        {"n_ctx": 5.5},
    ],
)
@pytest.mark.parametrize("started_before", [False, True])
def test_hparams_that_do_not_fit(small, change, started_before):
    if started_before:
        load(small)
    path = pathlib.Path(small, "hparams.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="hparams.json|settings|vocabulary"):
        load(small)


def test_files_of_different_models(small, tmp_path):
    shutil.copyfile(ROOT / "models" / "7M" / "hparams.json", os.path.join(small, "hparams.json"))
    with pytest.raises(ValueError, match=r"\[4096, 256\] as model/wte.*\[4096, 128\].*different models"):
        load(small)
    for name in ("encoder.json", "vocab.bpe"):
        shutil.copyfile(ROOT / "tests" / "golden" / "gpt2_vocab" / name, os.path.join(small, name))
    shutil.copyfile(ROOT / "models" / "1M" / "hparams.json", os.path.join(small, "hparams.json"))
    with pytest.raises(ValueError, match="50256.*4096.*different models"):
        load(small)


@pytest.mark.parametrize(
    "option, value",
    [
        ("model_type", "gpt_neo"),
        ("activation_function", "relu"),
        ("activation_function", "gelu"),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("n_inner", 64),
        ("tie_word_embeddings", False),
        ("n_layer", 3),
        ("n_layer", 1),
        ("n_positions", 64),
        ("vocab_size", 4097),
        ("n_head", 5),
        ("n_embd", None),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_huggingface_options_that_are_not_computed_are_refused_by_name(tmp_path, option, value):
    directory = copy_model(HUGGINGFACE / "plain", tmp_path / "model")
    path = pathlib.Path(directory, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {option: value}))
    with pytest.raises(ValueError, match=f"{option}|settings|n_vocab|n_ctx"):
        load(directory)


def test_huggingface_options_that_change_nothing(tmp_path):
    directory = copy_model(HUGGINGFACE / "prefixed", tmp_path / "model")
    path = pathlib.Path(directory, "config.json")
    config = json.loads(path.read_text()) | {
        "activation_function": "gelu_pytorch_tanh",
        "n_inner": 256,
        "n_ctx": 128,
        "reorder_and_upcast_attn": True,
        "tie_word_embeddings": False,
    }
    del config["n_positions"]
    path.write_text(json.dumps(config))
    assert load(directory)[1]["n_ctx"] == 128  # the fixture's lm_head is a copy of wte, so it may be untied
    tensors = safetensors.numpy.load_file(os.path.join(directory, "model.safetensors"))
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    safetensors.numpy.save_file(tensors, os.path.join(directory, "model.safetensors"))
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        load(directory)


def test_broken_huggingface_files(tmp_path):
    def broken(break_it, match, source="plain"):
        directory = pathlib.Path(copy_model(HUGGINGFACE / source, tempfile.mkdtemp(dir=tmp_path) + "/model"))
        break_it(directory)
        with pytest.raises((ValueError, OSError), match=match):
            load(directory)

    weights, index = "model.safetensors", "model.safetensors.index.json"
    broken(lambda d: os.truncate(d / weights, 1000000), weights)
    broken(lambda d: os.truncate(d / weights, 5), weights)
    broken(lambda d: os.truncate(d / weights, 0), weights)
    broken(lambda d: flip(d / weights, 6), weights)  # the length of the header
    broken(lambda d: flip(d / weights, 9), weights)
    broken(lambda d: (d / weights).write_bytes((d / weights).read_bytes() + b"more"), weights)
    broken(lambda d: (d / weights).rename(d / "pytorch_model.bin"), "pickle.*save_pretrained")
    broken(lambda d: (d / weights).unlink(), weights)
    broken(lambda d: (d / "vocab.json").write_text("{}"), "vocab.json")
    broken(lambda d: (d / "merges.txt").unlink(), "merges.txt")
    broken(lambda d: (d / "config.json").write_text("[]"), "config.json")
    broken(lambda d: (d / "config.json").write_text("{}"), "config.json")
    broken(lambda d: (d / "model-00002-of-00002.safetensors").unlink(), "model-00002", "bfloat16_sharded")
    broken(lambda d: (d / index).write_text("{}"), index, "bfloat16_sharded")
    broken(
        lambda d: (d / index).write_text('{"weight_map": {"wte.weight": "../model.safetensors"}}'),
        index,
        "bfloat16_sharded",
    )
    broken(lambda d: (d / index).write_text('{"weight_map": {"wte.weight": 5}}'), index, "bfloat16_sharded")
    integers = {"wte.weight": np.zeros((4096, 64), np.int32)}
    broken(
        lambda d: safetensors.numpy.save_file(
            integers
            | {k: v for k, v in safetensors.numpy.load_file(d / weights).items() if k != "wte.weight"},
            d / weights,
        ),
        "wte.weight.*I32",
    )


def test_without_tensorflow_a_sentence_says_what_to_install(small, tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('built for another processor')")
    process = run("utils.load_encoder_hparams_and_params(sys.argv[1])", small, PYTHONPATH=str(tmp_path))
    assert (
        "TensorFlow, which cannot be imported (built for another processor)"
        in process.communicate()[1].splitlines()[-1]
    )


# The kept copy


def test_the_second_start_is_quiet_and_needs_no_tensorflow(small):
    code = "params = utils.load_encoder_hparams_and_params(sys.argv[1])[2]; "
    code += "print(params['wte'].sum(), 'tensorflow' in sys.modules)"
    first, second = (run(code, small).communicate() for _ in range(2))
    assert (
        first[0].split()[1] == "True"
        and second[0].split()[1] == "False"
        and first[0].split()[0] == second[0].split()[0]
    )
    assert first[1] == second[1] == ""


def test_the_kept_copy_is_a_safetensors_file_on_cache_lines(small):
    params = flat(load(small)[2])
    path = os.path.join(small, utils.KEPT_COPY)
    kept = safetensors.numpy.load_file(path)
    for name, tensor in params.items():
        assert np.array_equal(kept[name], tensor.T if name.endswith("/w") else tensor)
    with open(path, "rb") as f:
        assert int.from_bytes(f.read(8), "little") % 64 == 56
    assert all(tensor.ctypes.data % 64 == 0 for tensor in flat(load(small)[2]).values())


@pytest.mark.parametrize(
    "fault", ["flipped weight", "flipped header", "cut", "longer", "empty", "a directory"]
)
def test_a_damaged_kept_copy_is_made_anew(small, fault):
    wanted = load(small)[2]
    path = pathlib.Path(small, utils.KEPT_COPY)
    good = path.read_bytes()
    if fault == "a directory":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"cut": good[:-4], "longer": good + bytes(4), "empty": b""}.get(fault, good))
    if fault.startswith("flipped"):
        flip(path, len(good) - 100000 if fault == "flipped weight" else 200)
    assert_is(load(small)[2], flat(wanted))
    assert fault == "a directory" or path.read_bytes() == good


def test_another_checkpoint_replaces_the_kept_copy(tmp_path):
    directories = [
        write_openai(tmp_path / str(seed), random_tensors(**TINY, seed=seed), TINY) for seed in (1, 2)
    ]
    load(directories[0])
    for name in ("model.ckpt.index", DATA):  # the same size, and made to look as old
        old = os.stat(os.path.join(directories[0], name))
        shutil.copyfile(os.path.join(directories[1], name), os.path.join(directories[0], name))
        os.utime(os.path.join(directories[0], name), ns=(old.st_atime_ns, old.st_mtime_ns))
    assert_is(
        load(directories[0])[2],
        {name[len("model/") :]: t for name, t in random_tensors(**TINY, seed=2).items()},
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on file sizes")
def test_a_full_disk_costs_the_kept_copy_only(small):
    import resource

    code = "print(utils.load_encoder_hparams_and_params(sys.argv[1])[2]['wte'].shape)"
    out, err = run(
        code, small, limit=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
    ).communicate()
    assert (
        out == "(4096, 128)\n"
        and len(err.splitlines()) == 1
        and err.startswith("warning: ")
        and "keeps no copy" in err
    )
    assert not [name for name in os.listdir(small) if name.startswith(utils.KEPT_COPY)]


@pytest.mark.skipif(sys.platform == "win32", reason="needs directories that cannot be written")
def test_a_read_only_checkout(capfd):
    import tensorflow  # noqa: F401  (before the rights to read its files are gone)

    with tempfile.TemporaryDirectory() as outer:
        directory = copy_model(ROOT / "models" / "1M", os.path.join(outer, "1M"))
        os.chmod(outer, 0o755)
        os.chmod(directory, 0o555)
        root = os.geteuid() == 0
        try:
            if root:
                os.seteuid(65534)
            params = load("1M", outer)[2]
        finally:
            if root:
                os.seteuid(0)
            os.chmod(directory, 0o755)
        assert params["wte"].shape == (4096, 128) and sorted(os.listdir(directory)) == sorted(BUNDLED_FILES)
    assert capfd.readouterr().err.count("keeps no copy") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_copy_of_the_weights_in_memory(tmp_path):
    hparams = dict(n_vocab=4096, n_ctx=64, n_embd=1024, n_head=16, n_layer=5)  # 67 million weights
    tensors = random_tensors(**hparams)
    weights = sum(t.nbytes for t in tensors.values())
    openai = write_openai(tmp_path / "openai", tensors, hparams)
    huggingface = copy_model(HUGGINGFACE / "plain", tmp_path / "huggingface")
    config = json.loads(pathlib.Path(huggingface, "config.json").read_text())
    config |= {"n_positions": 64, "n_embd": 1024, "n_head": 16, "n_layer": 5}
    pathlib.Path(huggingface, "config.json").write_text(json.dumps(config))
    leaves = {"w": "weight", "g": "weight", "b": "bias", "wte": "wte.weight", "wpe": "wpe.weight"}
    their = {
        name: [name.split("/")[1].replace("h", "h."), *name.split("/")[2:-1], leaves[name.split("/")[-1]]]
        for name in tensors
    }
    their = {
        name: ".".join(parts if len(name.split("/")) > 2 else parts[1:]) for name, parts in their.items()
    }
    safetensors.numpy.save_file(
        {their[name]: np.squeeze(t) for name, t in tensors.items()}, huggingface + "/model.safetensors"
    )
    run("utils.load_encoder_hparams_and_params(sys.argv[1])", openai).communicate()
    code = (
        "import re; status = lambda: open('/proc/self/status').read(); "
        "peak = lambda: 1024 * int(re.search('VmHWM:(.*) kB', status())[1]); "
        "before = peak(); p = utils.load_encoder_hparams_and_params(sys.argv[1]); print(peak() - before)"
    )
    for directory in (openai, huggingface):
        assert 0.9 * weights < int(run(code, directory).communicate()[0]) < 1.15 * weights


# Downloads


@pytest.fixture
def server(tmp_path, monkeypatch):
    copy_model(ROOT / "models" / "1M", tmp_path / "served" / "124M")
    monkeypatch.setattr(utils, "RETRY_PAUSES", (0.01, 0.02, 0.03))
    monkeypatch.setattr(utils, "TIMEOUTS", (2, 0.5))
    with FaultyServer(tmp_path / "served") as server:
        monkeypatch.setenv("GPT2_MODELS_URL", server.url + "/")
        yield server


def assert_downloaded(server, models_dir):
    for name in BUNDLED_FILES:
        assert (models_dir / "124M" / name).read_bytes() == pathlib.Path(
            server.root, "124M", name
        ).read_bytes(), name
    assert sorted(os.listdir(models_dir / "124M")) == sorted({*BUNDLED_FILES, utils.KEPT_COPY, ".lock"})


def asked_for(server, name):
    return [span for asked, span in server.requests if asked == name]


def test_download(server, tmp_path):
    wanted = load("1M")[2]["wte"]
    assert np.array_equal(load("124M", tmp_path / "models")[2]["wte"], wanted)
    assert_downloaded(server, tmp_path / "models")
    assert len(server.requests) == 7
    load("124M", tmp_path / "models")
    assert len(server.requests) == 7


CUTS = (0, 1, 4095, 65535, 65536, 65537, 1973247)


@pytest.mark.parametrize(
    "name, faults, n_requests",
    [
        *[(DATA, [("cut", n)], 2) for n in CUTS],
        *[(DATA, [("reset", n)], 2) for n in (0, 65537)],
        *[(name, [("cut", 5)], 2) for name in BUNDLED_FILES],
        (DATA, [("cut", 300000)] * 5, 6),  # more often than there are pauses, but it gets on
        (DATA, [("cut", 300000), ("no ranges",)], 2),
        (DATA, [("status", 500), ("status", 502), ("status", 503)], 4),
        ("vocab.bpe", [("silent", 1)], 2),
        (DATA, [("drip", 0.001)], 1),
        (DATA, [("announce", 1973249)], 2),
        (DATA, [("no length",)], 1),
        ("encoder.json", [("no length",)], 1),
        ("encoder.json", [("announce", 74116)], 2),
        ("encoder.json", [("announce", 0)], 2),
        ("checkpoint", [("redirect", "/124M/hparams.json"), ("well",)], 1),
    ],
)
def test_download_that_recovers(server, tmp_path, name, faults, n_requests):
    if faults[0][0] == "redirect":  # to the same file under another name
        shutil.copyfile(pathlib.Path(server.root, "124M", name), pathlib.Path(server.root, "elsewhere"))
        faults = [("redirect", "/elsewhere")]
    server.faults[name] = list(faults)
    utils.download_model(tmp_path / "models" / "124M")
    assert len(asked_for(server, name)) == n_requests
    load("124M", tmp_path / "models")
    assert_downloaded(server, tmp_path / "models")


@pytest.mark.parametrize(
    "name, faults, sentence",
    [
        (DATA, [("status", 404)], "404"),
        ("checkpoint", [("status", 403)], "403"),
        (DATA, [("status", 500)] * 4, "500"),
        (DATA, [("reset", 0)] * 4, "cannot download"),
        (DATA, [("silent", 0.7)] * 4, "timed out"),
        (DATA, [("announce", 10**15)], "room"),
        (
            DATA,
            [("page", "application/xml", b"<?xml version='1.0'?><Error>BlobNotFound</Error>")],
            "GPT2_MODELS_URL",
        ),
        (
            DATA,
            [("page", "application/octet-stream", b"\xef\xbb\xbf<?xml version='1.0'?><Error/>")],
            "GPT2_MODELS_URL",
        ),
        (DATA, [("page", "application/json", b'{"error": "no"}')], "GPT2_MODELS_URL"),
        ("encoder.json", [("page", "text/plain", b"\n<!DOCTYPE html><p>Please log in")], "GPT2_MODELS_URL"),
        ("vocab.bpe", [("page", "text/html; charset=utf-8", b"<p>Please log in")], "GPT2_MODELS_URL"),
        ("hparams.json", [("announce", 84)] * 4, "whole"),
        ("vocab.bpe", [("page", "text/plain", b"")] * 4, "0 of some bytes"),
        ("vocab.bpe", [("redirect", "/124M/vocab.bpe")] * 50, "redirects"),
    ],
)
def test_download_that_cannot_succeed(server, tmp_path, name, faults, sentence):
    server.faults[name] = list(faults)
    with pytest.raises(OSError, match=sentence) as error:
        load("124M", tmp_path / "models")
    assert "\n" not in str(error.value)
    assert len(asked_for(server, name)) in (len(faults), 31)  # no try more, and requests follows 30 redirects
    assert not (tmp_path / "models" / "124M" / name).exists()
    server.faults[name] = []
    load("124M", tmp_path / "models")
    assert_downloaded(server, tmp_path / "models")


def test_no_server_at_all_is_told_at_once_with_what_works(tmp_path, monkeypatch):
    for url in ("http://127.0.0.1:9", "http://no.such.host.invalid", "nonsense", "ftp://127.0.0.1"):
        monkeypatch.setenv("GPT2_MODELS_URL", url)
        started = time.monotonic()
        with pytest.raises(OSError, match="cannot download .*--model_size 7M"):
            load("355M", tmp_path)
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("resumed_by", ["well", "careless"])
@pytest.mark.parametrize("length", [1973248, 700000])
def test_a_file_that_changes_between_two_requests_is_never_mixed(server, tmp_path, resumed_by, length):
    path = pathlib.Path(server.root, "124M", DATA)
    server.faults[DATA] = [("cut", 800000)] + [("status", 500)] * 3
    with pytest.raises(OSError):
        utils.download_model(tmp_path / "models" / "124M")
    path.write_bytes(np.random.default_rng(0).bytes(length))
    server.faults[DATA] = [(resumed_by,)]
    utils.download_model(tmp_path / "models" / "124M")
    assert asked_for(server, DATA)[4].startswith("bytes=7")  # it did try to go on
    assert (tmp_path / "models" / "124M" / DATA).read_bytes() == path.read_bytes()


def test_without_a_version_nothing_is_resumed(server, tmp_path):
    server.etags = False
    server.faults[DATA] = [("cut", 800000)]
    utils.download_model(tmp_path / "models" / "124M")
    assert asked_for(server, DATA) == [None, None]


def test_a_full_disk_in_the_middle_of_a_download(server, tmp_path):
    import resource

    code = "utils.load_encoder_hparams_and_params('124M', sys.argv[1])"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
    error = run(code, tmp_path / "models", limit=limit).communicate()[1].splitlines()[-1]
    assert error.startswith("OSError: cannot write") and "make room" in error
    assert not (tmp_path / "models" / "124M" / DATA).exists()
    load("124M", tmp_path / "models")
    assert asked_for(server, DATA)[1] == "bytes=1000000-"
    assert_downloaded(server, tmp_path / "models")


def start_and_stop(server, models_dir, signal_number):
    server.faults[DATA] = [("drip", 0.01)]
    process = run("utils.load_encoder_hparams_and_params('124M', sys.argv[1])", models_dir)
    part = models_dir / "124M" / (DATA + ".part")
    deadline = time.monotonic() + 20
    while not (part.exists() and part.stat().st_size > 200000):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal_number)
    process.communicate()
    assert process.returncode != 0 and not (models_dir / "124M" / DATA).exists()


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGINT"])
def test_the_next_start_goes_on_where_one_was_stopped(server, tmp_path, signal_name):
    start_and_stop(server, tmp_path / "models", getattr(signal, signal_name))
    load("124M", tmp_path / "models")
    assert int(asked_for(server, DATA)[1].strip("bytes=-")) > 200000
    assert_downloaded(server, tmp_path / "models")


def test_killed_while_the_copy_is_written(small):
    load(small)
    kept = pathlib.Path(small, utils.KEPT_COPY)
    good = kept.read_bytes()
    kept.rename(str(kept) + ".part")
    os.truncate(str(kept) + ".part", 1000000)
    load(small)
    assert kept.read_bytes() == good and not os.path.exists(str(kept) + ".part")


def test_two_processes_at_once(server, tmp_path):
    server.faults[DATA] = [("drip", 0.005)]
    code = "print(utils.load_encoder_hparams_and_params('124M', sys.argv[1])[2]['wte'].sum())"
    processes = [run(code, tmp_path / "models") for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert (
        outputs[0][0] == outputs[1][0] != ""
        and "waiting for another process" in outputs[0][1] + outputs[1][1]
    )
    assert len(server.requests) == 7
    assert_downloaded(server, tmp_path / "models")
