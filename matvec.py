"""The product that decoding lives on: a few rows times a large matrix, for about the price of one row.

A forward pass over k tokens reads every weight once, whatever k is, so checking k drafts should take about
as long as making one token. NumPy's `x @ w` falls short twice. From two rows on, BLAS first repacks the whole
matrix, which takes longer than the product. And it sums a row in another order when the row has company, so
that near ties between tokens flip.

`matvec` walks the matrix in blocks that stay in a core's cache while every row uses them, and a row meets
each block through the same instructions whether it comes alone or not: its result is the same, bit for bit.
The threads are our own, since BLAS would cut a product up differently for every number of them, and its idle
threads keep a core busy.

From top to bottom: the product for a few rows, the one for many, the threads.
"""
import functools
import os
import queue
import threading
import time

import numpy as np
from threadpoolctl import ThreadpoolController

MAX_ROWS = 8  # rows that share one walk through the matrix
GEMM_BLOCK, GEMV_BLOCK = 32 * 1024, 64 * 1024  # weights in a block: 128 and 256 KB
GIL_RESULTS = 504  # np.matmul lets other threads run from about this many results on
PIECE = 128 * 1024  # the least number of weights worth handing to a thread: 512 KB


def matvec(x, w):
    """Return x @ w, each row bit for bit as if it were multiplied alone.

    x: [n_seq, n_in], w: [n_in, n_out], both float32 -> [n_seq, n_out]. A `w` in Fortran order (`w.T`
    contiguous) is used as it is, any other is copied first. Raises ValueError, as NumPy does, if the shapes
    do not fit.
    """
    if len(x) > MAX_ROWS:
        parts = np.array_split(x, -(-len(x) // MAX_ROWS))
        return np.concatenate([matvec(part, w) for part in parts])
    x, wt = np.ascontiguousarray(x), np.ascontiguousarray(w.T)  # [n_in, n_out] -> [n_out, n_in]
    with single_threaded_blas:
        if wt.size <= 2 * PIECE:  # too small for blocks: BLAS's product for one row, row after row
            return np.matmul(wt, x[:, :, None])[:, :, 0]
        return gemm(x, wt) if gemm_keeps_rows_apart(wt.shape[1]) else gemv(x, wt)


def gemm(x, wt):
    """Multiply all rows by one block after another, which is so small that BLAS does not repack it.

    x: [n_seq, n_in], wt: [n_out, n_in] -> [n_seq, n_out].
    """
    n_seq, (n_out, n_in) = len(x), wt.shape
    n_block = block_size(n_in, GEMM_BLOCK)
    if n_seq < 4:
        x = np.concatenate([x, np.zeros((4 - n_seq, n_in), np.float32)])  # one row takes the way of four
    y = np.empty((len(x), n_out), np.float32)
    n_whole = n_out // n_block * n_block
    blocks = wt[:n_whole].reshape(-1, n_block, n_in).transpose(0, 2, 1)  # [n_blocks, n_in, n_block]
    y_blocks = y[:, :n_whole].reshape(len(x), -1, n_block).transpose(1, 0, 2)  # [n_blocks, n_rows, n_block]

    def multiply(a, b):
        np.matmul(x, blocks[a:b], out=y_blocks[a:b])

    in_parallel(multiply, len(blocks), n_block * n_in, n_block * len(x))
    if n_whole < n_out:
        y[:n_seq, n_whole:] = gemv(x[:n_seq], wt[n_whole:])
    return y[:n_seq]


def gemv(x, wt):
    """Multiply row after row by the same block, while it is in the cache, with BLAS's product for one row.

    x: [n_seq, n_in], wt: [n_out, n_in] -> [n_seq, n_out].
    """
    n_seq, (n_out, n_in) = len(x), wt.shape
    n_block = block_size(n_in, GEMV_BLOCK)
    n_blocks = n_out // n_block
    n_whole = n_blocks * n_block
    y = np.empty((n_seq, n_out), np.float32)
    blocks = wt[:n_whole].reshape(-1, n_block, n_in)
    if n_seq == 1:  # straight into the result

        def multiply(a, b):
            for i in range(a, b):
                np.dot(blocks[i], x[0], out=y[0, i * n_block : (i + 1) * n_block])

        in_parallel(multiply, n_blocks, n_block * n_in)
    else:
        y_blocks = np.empty((n_blocks, n_seq, n_block, 1), np.float32)  # else NumPy would swap the loops

        def multiply(a, b):
            np.matmul(blocks[a:b, None], x[:, :, None], out=y_blocks[a:b])

        in_parallel(multiply, n_blocks, n_block * n_in, n_block * n_seq)
        y[:, :n_whole].reshape(n_seq, n_blocks, n_block)[:] = y_blocks[..., 0].transpose(1, 0, 2)
    if n_whole < n_out:
        for row, result in zip(x, y):
            np.dot(wt[n_whole:], row, out=result[n_whole:])
    return y


def block_size(n_in, n_weights):
    """Return how many outputs a block of about n_weights has: a multiple of four, as BLAS takes them."""
    return max(4, n_weights // n_in // 4 * 4)


@functools.cache
def gemm_keeps_rows_apart(n_in):
    """Return whether BLAS multiplies 4 to 8 rows by a block without repacking it, each row as if alone.

    OpenBLAS does on processors with AVX-512. The answer comes from trying, and within a process it stays:
    another would change bits.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((MAX_ROWS, n_in), np.float32)
    block = rng.standard_normal((block_size(n_in, GEMM_BLOCK), n_in), np.float32)
    alone = []
    for row in x:
        padded = np.zeros((4, n_in), np.float32)
        padded[0] = row
        alone.append((padded @ block.T)[0])
    if not all(np.array_equal(x[:k] @ block.T, alone[:k]) for k in range(4, MAX_ROWS + 1)):
        return False

    def seconds(product):
        start = time.perf_counter()
        product()
        return time.perf_counter() - start

    four = min(seconds(lambda: x[:4] @ block.T) for _ in range(9))
    one = min(seconds(lambda: block @ x[0]) for _ in range(9))
    return four < 4 * one


def matmul(x, w):
    """Return x @ w at full speed for many rows, which are not kept apart.

    x: [n_seq, n_in], w: [n_in, n_out], both float32 -> [n_seq, n_out]. Equal x and w give equal bits,
    however many threads there are. Raises ValueError, as NumPy does, if the shapes do not fit.
    """
    n_block, wt, few = 512, w.T, len(x) < 64
    if few:  # fewer rows than a block has: BLAS repacks less when the block comes first
        x = np.ascontiguousarray(x.T)
    y = np.empty((len(wt), x.shape[1]) if few else (len(x), len(wt)), np.float32)

    def multiply(a, b):
        for start in range(a * n_block, b * n_block, n_block):
            block = slice(start, start + n_block)
            if few:
                np.matmul(wt[block], x, out=y[block])
            else:
                np.matmul(x, w[:, block], out=y[:, block])

    with single_threaded_blas:
        in_parallel(multiply, -(-len(wt) // n_block), x.size * n_block)
    return np.ascontiguousarray(y.T) if few else y


class SingleThreadedBLAS:
    """A context in which BLAS uses one thread.

    The limit is the whole process's, so it is lifted when the last thread leaves.
    """

    def __init__(self):
        self.libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        self.lock, self.inside, self.n_inside = threading.Lock(), threading.local(), 0

    def start_over(self):
        """In a forked child, forget the threads that were inside but are missing now."""
        others, self.n_inside = self.n_inside, int(getattr(self.inside, "depth", 0) > 0)
        self.lock = threading.Lock()
        if others and not self.n_inside:
            self.set(self.before)

    def __enter__(self):
        self.inside.depth = getattr(self.inside, "depth", 0) + 1  # a thread that is inside may come again
        if self.inside.depth == 1:
            with self.lock:
                if self.n_inside == 0:
                    self.before = [library.num_threads for library in self.libraries]
                self.n_inside += 1
                self.set([1] * len(self.libraries))  # each time: some BLAS have a limit for every thread

    def __exit__(self, *exception):
        self.inside.depth -= 1
        if self.inside.depth == 0:
            with self.lock:
                self.n_inside -= 1
                if self.n_inside == 0:
                    self.set(self.before)

    def set(self, n_threads):
        for library, n in zip(self.libraries, n_threads):
            # threadpoolctl 3.8 obeys only the thread that came first; here the last to leave may be another.
            release = getattr(library, "clear_controlling_thread", lambda force: None)
            release(force=True)
            library.set_num_threads(n)
            release(force=True)


class Team:
    """The threads that share a product, one product at a time; whoever comes meanwhile works alone."""

    def __init__(self):
        as_blas = [library.num_threads for library in single_threaded_blas.libraries]
        self.n_threads = max(as_blas, default=os.cpu_count() or 1)  # OPENBLAS_NUM_THREADS limits ours, too
        self.start_over()

    def start_over(self):
        """Have no other threads: at first, and in a forked child, where they are missing."""
        self.taken, self.calls = threading.Lock(), []  # a queue of calls for each of the other threads

    def run(self, multiply, pieces):
        """Call multiply on all pieces, which are pairs (a, b); raise what it raised."""
        while len(self.calls) < self.n_threads - 1:
            self.calls.append(queue.SimpleQueue())
            threading.Thread(target=self.serve, args=self.calls[-1:], daemon=True).start()
        job, called = Job(multiply, pieces), []
        for calls in self.calls[: len(pieces) - 1]:
            ticket, done = threading.Lock(), threading.Lock()  # locks: the cheapest of signals
            done.acquire()
            called.append((ticket, done))
            calls.put((ticket, done, job))
        job.work()
        for ticket, done in called:
            if not ticket.acquire(blocking=False):  # whoever has the ticket has begun; others need not come
                done.acquire()
        if job.error:
            raise job.error

    def serve(self, calls):
        single_threaded_blas.set([1] * len(single_threaded_blas.libraries))  # where each thread has a limit
        while True:
            ticket, done, job = calls.get()
            if ticket.acquire(blocking=False):  # else the job was over before this thread woke up
                job.work()
                done.release()


class Job:
    """A function and the pieces that are left to call it on; each thread takes another when it is free."""

    def __init__(self, multiply, pieces):
        self.multiply, self.pieces, self.error = multiply, list(pieces), None

    def work(self):
        try:
            while True:
                try:
                    a, b = self.pieces.pop()  # without a look first: others pop, too
                except IndexError:
                    return
                self.multiply(a, b)
        except Exception as error:  # for the thread that waits
            self.error = error


def in_parallel(multiply, n, n_weights, n_results=GIL_RESULTS):
    """Call multiply(a, b) on ranges that make up range(n), on all threads; raise what it raises.

    n_weights, n_results: how many weights each of the n reads, and how many results it writes. Where
    these are too few to pay for threads, or another product has the team, it is one call, multiply(0, n).
    """
    least = max(-(-PIECE // n_weights), -(-GIL_RESULTS // n_results))
    if n < 2 * least or team.n_threads == 1 or not team.taken.acquire(blocking=False):
        multiply(0, n)
    else:
        try:
            team.run(multiply, cut(n, least, team.n_threads))
        finally:
            team.taken.release()


@functools.lru_cache(1000)
def cut(n, least, n_threads):
    """Cut range(n) into pieces (a, b), last piece first, as threads pop them from the end.

    Large pieces are taken first and small ones last, so that all threads end together.
    """
    bounds = [0]
    while bounds[-1] < n:
        left = n - bounds[-1]
        bounds.append(bounds[-1] + min(left, max(least, int(left / n_threads / 1.5))))
    return list(zip(bounds, bounds[1:]))[::-1]


single_threaded_blas = SingleThreadedBLAS()
team = Team()
if hasattr(os, "register_at_fork"):  # threads and held locks stay behind in the parent
    os.register_at_fork(after_in_child=single_threaded_blas.start_over)
    os.register_at_fork(after_in_child=team.start_over)
