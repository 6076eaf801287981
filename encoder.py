"""GPT-2's tokenizer: byte-level byte pair encoding (BPE).

Text is cut into words, and every word into single bytes. Of all neighbours in a word, the two that stand
first in a list of merges become one token, again and again, until the list has nothing left to join.

Merging by a learned list: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword
Units", section 3.2. Merging bytes, and never across words, so that a small vocabulary can spell any text:
Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
"""
import codecs
import heapq
import itertools
import json
import os

import regex

# A word takes along one space before it; a longer run of spaces leaves its last one to the word that follows.
WORD = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

# The files spell every byte as a visible character: its own in Latin-1 or, where that shows nothing, the next
# one from U+0100 on. So a space is "Ġ".
spare = itertools.count(0x100)
BYTE_OF = {chr(b) if chr(b).isprintable() and b != 0x20 else chr(next(spare)): b for b in range(256)}


class Encoder:
    """Text to token ids and back. `encoder` is the vocabulary, {token: id}, spelled as in the files."""

    def __init__(self, vocabulary, merges):
        """vocabulary: {token: id}, all 256 bytes included; merges: [(token, token)], in order of priority."""
        self.encoder = vocabulary
        self.byte_ids = [vocabulary[symbol] for symbol in BYTE_OF]
        self.token_bytes = {i: unspelled(token) for token, i in vocabulary.items()}
        self.merges = {(vocabulary[left], vocabulary[right]): (rank, vocabulary[left + right])
                       for rank, (left, right) in enumerate(merges)}

    def encode(self, text):
        """Return the token ids of any string as a list. `<|endoftext|>` in it is ordinary characters.

        Bytes that were not UTF-8, which Python keeps in command-line arguments and file names as lone
        surrogates (PEP 383), are encoded as those bytes; any other lone surrogate as U+FFFD.
        """
        ids, known = [], {}  # what is known is forgotten with the call, so that no cache grows without bound
        for word in WORD.findall(without_stray_surrogates(text)):
            if word not in known:
                known[word] = self.bpe(word.encode("utf-8", "surrogateescape"))
            ids += known[word]
        return ids

    def bpe(self, word):
        """Return the ids of one word, given as n bytes, in O(n log n) steps."""
        n = len(word)
        ids = [self.byte_ids[byte] for byte in word] + [None]  # None ends the word: it merges with nothing
        before, after = [n, *range(n)], [*range(1, n + 1), 0]  # a ring, so that neither end is a special case
        possible = []  # a heap of (rank of the merge, position of its left token)

        def propose(left):
            if merge := self.merges.get((ids[left], ids[after[left]])):
                heapq.heappush(possible, (merge[0], left))

        for left in range(n):
            propose(left)
        while possible:
            rank, left = heapq.heappop(possible)
            right = after[left]
            rank_now, merged = self.merges.get((ids[left], ids[right]), (None, None))
            if rank_now == rank:  # otherwise one of the two has merged with its other neighbour since
                ids[left], ids[right] = merged, None
                after[left] = after[right]
                before[after[left]] = left
                propose(before[left])
                propose(left)
        return [i for i in ids if i is not None]

    def decode(self, ids):
        """Return the text of token ids, U+FFFD for what is not UTF-8. ValueError for an id with no token."""
        return self.to_bytes(ids).decode("utf-8", "replace")

    def incremental_decoder(self):
        """Return `feed(ids, final=False)`, which returns the text of a stream of ids piece by piece.

        It holds back an unfinished character until its last byte or `final=True` comes, so that the pieces
        add up to what `decode` returns for all the ids at once.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda ids, final=False: decoder.decode(self.to_bytes(ids), final)

    def to_bytes(self, ids):
        try:
            return b"".join([self.token_bytes[i] for i in ids])
        except KeyError as error:
            n = len(self.token_bytes)
            raise ValueError(f"token id {error.args[0]} is not one of the {n} in the vocabulary") from None


def unspelled(token):
    try:
        return bytes([BYTE_OF[symbol] for symbol in token])
    except KeyError:
        return token.encode("utf-8", "replace")  # a token added by hand is plain text


def without_stray_surrogates(text):
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # a pair is one character
    text = regex.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text)  # the range between is escaped bytes,
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")  # maybe UTF-8 after all


def get_encoder(model_size, models_dir):
    """Return the Encoder of the folder `models_dir/model_size`, from OpenAI's `encoder.json` and `vocab.bpe`.

    The same files under Hugging Face's names, `vocab.json` and `merges.txt`, do as well. FileNotFoundError
    when one is missing, ValueError when one is damaged or does not belong to the other.
    """
    folder = os.path.join(models_dir, model_size)
    vocabulary = read(folder, ["encoder.json", "vocab.json"], parse_vocabulary)
    return Encoder(vocabulary, read(folder, ["vocab.bpe", "merges.txt"], parse_merges, vocabulary))


def read(folder, names, parse, *beside):
    path = next(filter(os.path.isfile, [os.path.join(folder, name) for name in names]), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has no {' or '.join(names)}; fetch the model or choose another")
    try:
        with open(path, encoding="utf-8-sig") as file:
            return parse(file.read(), *beside)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and fetch the model again") from None


def parse_vocabulary(text):
    vocabulary = json.loads(text)
    if not isinstance(vocabulary, dict) or not all(type(i) is int and i >= 0 for i in vocabulary.values()):
        raise ValueError("it is not a dictionary from tokens to ids")
    if len(set(vocabulary.values())) < len(vocabulary):
        raise ValueError("two tokens have the same id")
    if not vocabulary.keys() >= BYTE_OF.keys():
        raise ValueError("single bytes are missing from its tokens")
    return vocabulary


def parse_merges(text, vocabulary):
    lines = text.split("\n")
    if lines[0].startswith("#version"):
        del lines[0]
    merges = [tuple(line.split()) for line in lines if line]
    for merge in merges:
        if len(merge) != 2 or not vocabulary.keys() >= {*merge, "".join(merge)}:
            raise ValueError(f"{' '.join(merge)!r:.40} is no merge of the vocabulary beside it")
    unmade = vocabulary.keys() - BYTE_OF.keys() - {left + right for left, right in merges}
    if spaced := [token for token in unmade if "Ġ" in token]:  # one added by hand would have a plain space
        raise ValueError(f"no merge makes {min(spaced)!r}, which is in the vocabulary beside it")
    return merges
