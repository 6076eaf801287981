"""Find a GPT-2 model, download it when it is missing, read it, and keep it in a form that opens at once.

A model is a directory in one of two layouts: OpenAI's (hparams.json, encoder.json, vocab.bpe, a TensorFlow
checkpoint) or Hugging Face's (config.json, vocab.json, merges.txt, safetensors). From either, the weights are
read tensor by tensor into one array, and the nested dictionary of parameters consists of views into it. Only
the first start reads a TensorFlow checkpoint, and imports TensorFlow for it: it leaves that array in a file
beside the checkpoint, which later starts map into memory.
"""
import contextlib
import difflib
import hashlib
import json
import math
import os
import re
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import requests
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from tqdm import tqdm
from urllib3.exceptions import NewConnectionError

from encoder import get_encoder

MODELS_DIR = Path(__file__).resolve().parent / "models"
BUNDLED_SIZES = ("1M", "7M")
OPENAI_SIZES = ("124M", "355M", "774M", "1558M")
OPENAI_URL = "https://openaipublic.blob.core.windows.net/gpt-2/models"
OPENAI_FILES = ("checkpoint", "hparams.json", "encoder.json", "vocab.bpe",
                "model.ckpt.index", "model.ckpt.meta", "model.ckpt.data-00000-of-00001")
RETRY_PAUSES = (1, 2, 4, 8, 16)  # seconds before the second try, the third, ...
TIMEOUTS = (10, 60)  # seconds for connecting, and for the next piece of an answer to arrive
KEPT_COPY = "model.float32.safetensors"
GET_ANEW = "get it anew (OpenAI's sizes: delete it and start again; bundled ones: `git checkout models`)"
NO_DOWNLOAD = "`--model_size 7M` is bundled and needs no download"


def load_encoder_hparams_and_params(model_size, models_dir=MODELS_DIR):
    """Open a GPT-2 model. OpenAI's sizes are downloaded when they are missing.

    `model_size` is a bundled size ("1M", "7M"), one of OpenAI's ("124M", "355M", "774M", "1558M"), the name
    of a directory in `models_dir`, or a path (it has a separator, or begins with "." or "~") of a directory.

    Returns encoder, hparams, params: the tokenizer; a dict of the integers n_vocab, n_ctx, n_embd, n_head and
    n_layer; picoGPT's nested dict of float32 arrays, wte [n_vocab, n_embd], wpe [n_ctx, n_embd], blocks and
    ln_f. Every "w" is [n_in, n_out] in Fortran order, so that w.T is contiguous, as matvec.py likes it.
    Raises ValueError or OSError, with one sentence, where there is no such model, or it is broken, or it
    cannot be downloaded.
    """
    directory, downloadable = find_model(model_size, models_dir)
    if downloadable and what_is_missing(directory):
        download_model(directory)
    if missing := what_is_missing(directory):
        raise ValueError(missing)
    from_openai = (directory / "hparams.json").is_file()
    hparams = openai_hparams(directory) if from_openai else huggingface_hparams(directory)
    encoder = get_encoder(directory, models_dir)
    if (largest := max(encoder.encoder.values())) >= hparams["n_vocab"]:
        raise ValueError(f"the vocabulary in {directory} goes up to id {largest}, but n_vocab is only "
                         f"{hparams['n_vocab']}: the files are of different models; {GET_ANEW}")
    memory = openai_weights(directory, hparams) if from_openai else huggingface_weights(directory, hparams)
    return encoder, hparams, nested(views(memory, hparams), hparams["n_layer"])


# Find


def find_model(model_size, models_dir):
    """Return the model's directory, and whether it can be downloaded if it is not there yet."""
    if not isinstance(model_size, (str, Path)) or not isinstance(models_dir, (str, Path)):
        raise ValueError("model_size and models_dir are names or paths, such as 7M or ./mine, not "
                         f"{model_size!r} and {models_dir!r}")
    model_size, models_dir = str(model_size), os.path.expanduser(models_dir)
    if model_size in OPENAI_SIZES:
        return Path(models_dir, model_size).absolute(), True
    is_path = model_size.startswith((".", "~")) or os.path.basename(model_size) != model_size
    directory = os.path.expanduser(model_size) if is_path else os.path.join(models_dir, model_size)
    if not model_size or not os.path.isdir(directory):
        near = difflib.get_close_matches(model_size.upper(), BUNDLED_SIZES + OPENAI_SIZES, n=1)
        guess = f": did you mean {near[0]}? What" if near else "; what"
        raise ValueError(f"there is no model {model_size!r} ({directory}){guess} works: "
                         f"{', '.join(BUNDLED_SIZES)} (bundled in {MODELS_DIR}), {', '.join(OPENAI_SIZES)} "
                         "(downloaded when missing), or the path of a directory with a GPT-2 model")
    return Path(directory).absolute(), False


def what_is_missing(directory):
    """Return a sentence about the files that a model's directory lacks, or None when they are all there."""
    if (directory / "hparams.json").is_file():
        needed = ["encoder.json", "vocab.bpe", *(path.name for path in checkpoint_files(directory))]
    elif (directory / "config.json").is_file():
        needed = ["vocab.json", "merges.txt"]
        if not (directory / "model.safetensors.index.json").is_file():
            needed.append("model.safetensors")
    else:
        return (f"{directory} holds no GPT-2 model: there is neither hparams.json (OpenAI's layout) nor "
                f"config.json (Hugging Face's); {NO_DOWNLOAD}")
    missing = [name for name in needed if not (directory / name).is_file()]
    if "model.safetensors" in missing and any(directory.glob("pytorch_model*.bin")):
        return (f"the weights in {directory} are in pytorch_model.bin only, a pickle, which can run any code "
                "and is never read; transformers converts it with GPT2LMHeadModel.from_pretrained(DIRECTORY)"
                ".save_pretrained(DIRECTORY)")
    return f"the model in {directory} lacks {', '.join(missing)}: {GET_ANEW}" if missing else None


def checkpoint_files(directory):
    """Return where TensorFlow's index and data are. The file `checkpoint` names other ones than OpenAI's."""
    prefix = "model.ckpt"
    with contextlib.suppress(OSError):
        text = (directory / "checkpoint").read_text(encoding="utf-8", errors="replace")
        named = re.match(r'model_checkpoint_path: "(?:.*[/\\])?([\w.-]+)"', text)
        if named and (directory / (named[1] + ".index")).is_file():
            prefix = named[1]
    return directory / (prefix + ".index"), directory / (prefix + ".data-00000-of-00001")


@contextlib.contextmanager
def alone_in(directory):
    """Let one process at a time download or convert. Where no lock can be made, nothing can be written."""
    lock = FileLock(directory / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another process, which is preparing {directory}", file=sys.stderr)
        lock.acquire()
    except OSError:
        pass
    try:
        yield
    finally:
        lock.release()


# Download


def download_model(directory):
    """Download what is missing of OpenAI's seven files, from GPT2_MODELS_URL (environment) if set."""
    base = (os.environ.get("GPT2_MODELS_URL") or OPENAI_URL).rstrip("/")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise OSError(f"cannot make {directory} ({problem.strerror}): choose another models_dir") from problem
    with alone_in(directory), requests.Session() as session:
        for name in OPENAI_FILES:
            if not (directory / name).exists():
                download(session, f"{base}/{directory.name}/{name}", directory / name)


def download(session, url, path):
    """Download into `path`.part, where a later try or start goes on; it becomes `path` when it is whole."""
    part, version = Path(f"{path}.part"), Path(f"{path}.part.version")
    furthest, pauses = 0, iter(RETRY_PAUSES)
    while True:
        try:
            fetch(session, url, part, version)
            os.replace(part, path)
            return version.unlink()
        except requests.RequestException as problem:
            got = part.stat().st_size if part.exists() else 0
            if got > furthest:  # a line that breaks often, but gets on, deserves patience
                furthest, pauses = got, iter(RETRY_PAUSES)
            pause = next(pauses, None) if may_pass(problem) else None
            if pause is None:
                raise OSError(f"cannot download {url}: {in_short(problem)}; {NO_DOWNLOAD}") from problem
            print(f"{path.name}: {in_short(problem)}; trying again in {pause} s", file=sys.stderr)
            time.sleep(pause)


def reason(problem):
    """What went wrong, out of the layers of libraries that wrap it."""
    return getattr(next(iter(problem.args), None), "reason", None) or problem


def in_short(problem):
    found = reason(problem)
    return "no server can be reached there" if isinstance(found, NewConnectionError) else str(found)


def may_pass(problem):
    """Whether another try may help: after timeouts, resets and 5xx, but not where no server is found."""
    if isinstance(problem, requests.HTTPError):
        return problem.response.status_code >= 500
    if isinstance(reason(problem), NewConnectionError):
        return False
    broken = requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError
    return isinstance(problem, broken) and not isinstance(problem, requests.exceptions.SSLError)


def fetch(session, url, part, version):
    """Fetch `url` into `part`, behind what it holds if the server still has the version in `version`."""
    have, known, headers = 0, "", {"Accept-Encoding": "identity"}
    with contextlib.suppress(OSError):
        have, known = part.stat().st_size, version.read_text(encoding="utf-8")
    if have and known:
        headers |= {"Range": f"bytes={have}-", "If-Range": known}
    with session.get(url, headers=headers, stream=True, timeout=TIMEOUTS) as answer:
        etag = answer.headers.get("ETag", "")
        current = etag if etag.startswith('"') else answer.headers.get("Last-Modified", "")  # W/"..." is weak
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        resumed = answer.status_code == 206
        if answer.status_code == 416 or resumed and not (span and int(span[1]) == have and current == known):
            part.unlink(missing_ok=True)
            raise requests.ConnectionError("the file changed on the server, so it starts over")
        answer.raise_for_status()
        kind, length = answer.headers.get("Content-Type", ""), answer.headers.get("Content-Length", "")
        if re.search("html|xml", kind) or "json" in kind and not url.endswith(".json"):
            raise OSError(f"{url} is answered with {kind} instead of the file: check GPT2_MODELS_URL, and "
                          "whether the network wants a login")
        have = have if resumed else 0
        length = int(span[2]) if resumed else int(length) if length.isdecimal() else None
        free = shutil.disk_usage(part.parent).free
        if length is not None and length - have > free:
            raise OSError(f"{url} has {length:,} bytes, but {part.parent} has room for {free:,}: make room")
        bar = tqdm(total=length, initial=have, desc=version.name[:-13], unit="B", unit_scale=True)
        try:
            with bar, open(part, "ab" if resumed else "wb") as f:
                version.write_text(current, encoding="utf-8")  # no old part any more, no new one yet
                for piece in answer.iter_content(2**16):
                    f.write(piece)
                    bar.update(len(piece))
        except requests.RequestException:
            raise
        except OSError as problem:
            raise OSError(f"cannot write {part} ({problem.strerror}): make room and start again, it goes on "
                          "from there") from problem
    check_download(url, part, length)


def check_download(url, part, length):
    """Raise where `part` is not the whole file, and remove it where going on behind it would not help."""
    with open(part, "rb") as f:
        head = f.read(100)
    size = part.stat().st_size
    if re.match(rb"(\xef\xbb\xbf)?\s*<(\?xml|!doctype|html|head|body|error)", head, re.IGNORECASE):
        part.unlink()
        raise OSError(f"{url} is answered with a web page instead of the file: check GPT2_MODELS_URL")
    if size < (length or 1):
        raise requests.ConnectionError(f"only {size} of {length or 'some'} bytes came")
    try:
        if url.endswith(".json"):  # where no length was announced, only this shows that it is whole
            read_json(part)
    except ValueError:
        part.unlink()
        raise requests.ConnectionError("what came is not whole") from None


# Read


def read_json(path):
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is broken, it is no JSON ({problem}): {GET_ANEW}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is broken, it is no JSON object: {GET_ANEW}")
    return content


def openai_hparams(directory):
    return check_hparams(read_json(directory / "hparams.json"), directory / "hparams.json")


IS_COMPUTED = "is computed here: choose a model with GPT-2's own architecture"
COMPUTED = {  # Hugging Face's options that change the result: the values that are GPT-2, the default first
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
}


def huggingface_hparams(directory):
    path = directory / "config.json"
    config = read_json(path)
    for option, values in COMPUTED.items():
        if config.get(option, values[0]) not in values:
            raise ValueError(f"{path} asks for {option} {config[option]!r}, only {values[0]!r} {IS_COMPUTED}")
    n_ctx = config.get("n_positions", config.get("n_ctx"))
    hparams = check_hparams(config | {"n_vocab": config.get("vocab_size"), "n_ctx": n_ctx}, path)
    if config.get("n_inner") not in (None, 4 * hparams["n_embd"]):
        raise ValueError(f"{path} asks for n_inner {config['n_inner']!r}, only 4 * n_embd {IS_COMPUTED}")
    return hparams


def check_hparams(found, path):
    hparams = {name: found.get(name) for name in ("n_vocab", "n_ctx", "n_embd", "n_head", "n_layer")}
    for name, value in hparams.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{path} is broken, {name} is {value!r}, no positive whole number: {GET_ANEW}")
    if hparams["n_embd"] % hparams["n_head"]:
        raise ValueError(f"{path} is broken, its n_embd {hparams['n_embd']} is no multiple of its n_head "
                         f"{hparams['n_head']}: {GET_ANEW}")
    return hparams


def tensor_shapes(n_vocab, n_ctx, n_embd, n_head, n_layer):
    """Yield OpenAI's name and the shape of every tensor of a GPT-2."""
    yield "wte", (n_vocab, n_embd)
    yield "wpe", (n_ctx, n_embd)
    for i in range(n_layer):
        for part, n_in, n_out in (("attn/c_attn", n_embd, 3 * n_embd), ("attn/c_proj", n_embd, n_embd),
                                  ("mlp/c_fc", n_embd, 4 * n_embd), ("mlp/c_proj", 4 * n_embd, n_embd)):
            yield f"h{i}/{part}/w", (n_in, n_out)
            yield f"h{i}/{part}/b", (n_out,)
        for part in ("ln_1/g", "ln_1/b", "ln_2/g", "ln_2/b"):
            yield f"h{i}/{part}", (n_embd,)
    yield "ln_f/g", (n_embd,)
    yield "ln_f/b", (n_embd,)


def n_weights(n_vocab, n_ctx, n_embd, n_head, n_layer):
    """The sizes of all tensor_shapes, added up without counting to n_layer, which may be nonsense."""
    return n_embd * (n_vocab + n_ctx + 2) + n_layer * n_embd * (12 * n_embd + 13)


def views(memory, hparams):
    """Cut an array of n_weights into {OpenAI's name: tensor}, with every "w" in Fortran order."""
    tensors, end = {}, 0
    for name, shape in tensor_shapes(**hparams):
        start, end = end, end + math.prod(shape)
        tensors[name] = memory[start:end].reshape(shape, order="F" if name.endswith("/w") else "C")
    return tensors


def nested(tensors, n_layer):
    """Turn {"wte": ..., "h0/attn/c_attn/w": ...} into picoGPT's nested dict."""
    params = {"blocks": [{} for _ in range(n_layer)]}
    for name, tensor in tensors.items():
        *path, leaf = name.split("/")
        node = params["blocks"][int(path.pop(0)[1:])] if name.startswith("h") else params
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = tensor
    return params


def read_tensors(stored, their_name, hparams, directory):
    """Read the tensors one at a time into one array for `views`, so that there is one copy of the weights.

    `stored` is {name in the files: (shape, function that reads it)}; `their_name` makes it of OpenAI's name.
    """
    def refuse(name, shape, found):
        raise ValueError(f"the settings of {directory} ask for {shape} as {their_name(name)}, but the files "
                         f"have {found}: they are of different models; {GET_ANEW}")

    for name, shape in tensor_shapes(**hparams):
        found = list(stored.get(their_name(name), [()])[0])
        if found not in ([*shape], [1, *shape]):  # OpenAI's are convolutions, [1, n_in, n_out]
            refuse(name, [*shape], found or "none")
    if (beyond := their_name(f"h{hparams['n_layer']}/ln_1/g")) in stored:
        refuse(f"h{hparams['n_layer']}/ln_1/g", "none", [*stored[beyond][0]])
    memory = np.empty(n_weights(**hparams) + 15, np.float32)
    memory = memory[-memory.ctypes.data % 64 // 4:][:n_weights(**hparams)]  # on cache lines, see copy_header
    for name, tensor in tqdm(views(memory, hparams).items(), f"loading {directory.name}", unit="tensor",
                             leave=False, delay=0.5, disable=None):
        source = stored[their_name(name)][1]().reshape(tensor.shape)
        for i in range(0, len(tensor), 64):  # in strips that stay in the cache, transposing is twice as fast
            tensor[i:i + 64] = source[i:i + 64]
    return memory


def openai_weights(directory, hparams):
    memory = map_copy(directory, hparams)
    if memory is None:
        with alone_in(directory):
            memory = map_copy(directory, hparams)  # another process may just have made it
            if memory is None:
                memory = read_tensorflow(directory, hparams)
                keep_copy(memory, directory, hparams)
    return memory


def read_tensorflow(directory, hparams):
    def one_line(problem):
        return " ".join(str(problem).split())[:200] or type(problem).__name__

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # oneDNN would announce itself on standard error
    try:
        import tensorflow as tf
    except Exception as problem:  # a broken installation fails in many ways
        raise ValueError(f"reading the checkpoint in {directory} needs TensorFlow, which cannot be imported "
                         f"({one_line(problem)}): `pip install -r requirements.txt` installs it") from problem
    index, _ = checkpoint_files(directory)
    try:
        reader = tf.train.load_checkpoint(str(index.with_suffix("")))
        shapes = reader.get_variable_to_shape_map()
        stored = {name: (shape, partial(reader.get_tensor, name)) for name, shape in shapes.items()}
        return read_tensors(stored, "model/{}".format, hparams, directory)
    except (ValueError, MemoryError):
        raise
    except Exception as problem:  # for a broken file TensorFlow raises OpError, IndexError and others
        raise ValueError(f"the checkpoint {index} or its data is broken, says TensorFlow "
                         f"({one_line(problem)}): {GET_ANEW}") from problem


STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # bfloat16 is the upper half of a float32


def huggingface_weights(directory, hparams):
    """Read safetensors. No copy is kept of them: 355M take about a second, most of it for the transposing."""
    index, names = directory / "model.safetensors.index.json", ["model.safetensors"]
    if not (directory / names[0]).is_file():
        shards = read_json(index).get("weight_map")
        names = list(shards.values()) if isinstance(shards, dict) else [None]
        if not all(isinstance(name, str) and os.path.basename(name) == name for name in names):
            raise ValueError(f"{index} is broken, it does not say which files the tensors are in: {GET_ANEW}")
    stored = {}
    for path in sorted({directory / name for name in names}):
        try:
            header, start = safetensors_header(path)
        except (SafetensorError, FileNotFoundError) as problem:
            raise ValueError(f"{path} is missing or broken ({problem}): {GET_ANEW}") from problem
        for name, entry in header.items():
            read = partial(read_safetensor, path, start, name, entry)
            stored[name.removeprefix("transformer.")] = entry["shape"], read
    if not read_json(directory / "config.json").get("tie_word_embeddings", True):
        output, tokens = (stored.get(name, ((), list))[1]() for name in ("lm_head.weight", "wte.weight"))
        if not np.array_equal(output, tokens):
            raise ValueError(f"{directory} has its own output layer, only tie_word_embeddings {IS_COMPUTED}")
    return read_tensors(stored, huggingface_name, hparams, directory)


def huggingface_name(name):
    """h0/attn/c_attn/w -> h.0.attn.c_attn.weight"""
    name = re.sub(r"^h(\d+)/", r"h.\1/", name).replace("/", ".")
    return name[:-2] + ".bias" if name.endswith(".b") else re.sub(r"\.[wg]$", "", name) + ".weight"


def safetensors_header(path):
    """Return {name: {"dtype", "shape", "data_offsets"}}, and where in the file the offsets begin."""
    with safe_open(path, "np"):  # checks the header, every offset and the length of the file
        pass
    with open(path, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def read_safetensor(path, start, name, entry):
    dtype, offset = entry["dtype"], start + entry["data_offsets"][0]
    if dtype not in STORED:
        raise ValueError(f"{name} in {path} is stored as {dtype}, but only {', '.join(STORED)} are read")
    array = np.fromfile(path, STORED[dtype], math.prod(entry["shape"]), offset=offset)
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array


# Keep


def keep_copy(memory, directory, hparams):
    path, part = directory / KEPT_COPY, directory / (KEPT_COPY + ".part")
    try:
        with open(part, "wb") as f:
            f.write(copy_header(directory, hparams, checksum(memory)))
            f.write(memory)
        os.replace(part, path)
    except OSError as problem:
        with contextlib.suppress(OSError):
            part.unlink()
        print(f"warning: {directory} keeps no copy for a faster start ({problem.strerror})", file=sys.stderr)


def map_copy(directory, hparams):
    """Map the kept copy into memory; None where there is none, or it is damaged or of another checkpoint.

    Passes over mapped weights take as long as over others, and two processes share them.
    """
    path = directory / KEPT_COPY
    try:
        start = path.stat().st_size - 4 * n_weights(**hparams)
        if start < 64:
            return None
        memory = np.asarray(np.memmap(path, np.float32, "c", start))  # what callers write stays in memory
        with open(path, "rb") as f:
            return memory if f.read(start) == copy_header(directory, hparams, checksum(memory)) else None
    except OSError:
        return None


def copy_header(directory, hparams, words):
    """Return the beginning of the kept copy, a safetensors file that holds every "w" as [n_out, n_in].

    The library would leave the alignment to chance: on cache lines a pass over four rows is 7% faster.
    """
    index, data = checkpoint_files(directory)  # the index has the checksums of all tensors
    data, digest = data.stat(), hashlib.sha256(index.read_bytes()).hexdigest()
    source = f"index {digest}, data {data.st_size} bytes, {data.st_mtime_ns} ns"
    header, end = {"__metadata__": {"checkpoint": source, "sum of 32-bit words": str(words)}}, 0
    for name, shape in tensor_shapes(**hparams):
        start, end = end, end + 4 * math.prod(shape)
        shape = shape[::-1] if name.endswith("/w") else shape
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(header).encode()
    header += b" " * (-(8 + len(header)) % 64)
    return len(header).to_bytes(8, "little") + header


def checksum(memory):
    """The sum of the 32-bit words modulo 2**32, which any flipped bit changes: 0.1 s for 355M."""
    return int(np.add.reduce(memory.view(np.uint32), dtype=np.uint32))
