"""The product that decoding lives on: a few rows times a large matrix, for about the price of one row.

A forward pass over k tokens reads every weight once, whatever k is, so checking k drafts should take about
as long as making one token. NumPy's `x @ w` falls short twice. From two rows on, BLAS first repacks the whole
matrix, which takes longer than the product. And it sums a row in another order when the row has company, so
that near ties between tokens flip.

`matvec` walks the matrix in blocks that stay in a core's cache while every row uses them, and a row meets
each block through the same instructions whether it comes alone or not: its result is the same, bit for bit.
Where BLAS has a product for a few rows that repacks nothing and keeps rows apart, the blocks go there
(`gemm`), elsewhere row after row to its product for one row (`gemv`).
The threads are our own, since BLAS would cut a product up differently for every number of them, and its idle
threads keep a core busy.

From top to bottom: the product for a few rows, the one for many, the threads.
"""
import contextlib
import functools
import os
import queue
import threading
import time

import numpy as np
from threadpoolctl import ThreadpoolController

GEMM_ROWS, GEMV_ROWS = 32, 8  # rows that share one walk through the matrix, at most
GEMM_BLOCK, GEMV_BLOCK = 32 * 1024, 64 * 1024  # weights in a block: 128 and 256 KB
GIL_RESULTS = 504  # np.matmul lets other threads run from about this many results on
PIECE = 128 * 1024  # the least number of weights worth handing to a thread: 512 KB


def matvec(x, w):
    """Return x @ w, each row bit for bit as if it were multiplied alone.

    x: [n_seq, n_in], w: [n_in, n_out], both float32 -> [n_seq, n_out]. A `w` in Fortran order (`w.T`
    contiguous) is used as it is, any other is copied first. Raises ValueError, as NumPy does, if the shapes
    do not fit.
    """
    x, wt = np.ascontiguousarray(x), np.ascontiguousarray(w.T)  # [n_in, n_out] -> [n_out, n_in]
    with single_threaded_blas():
        n_apart = n_rows_apart(x.shape[1])
        product, n_rows = (gemm, n_apart) if n_apart else (gemv, GEMV_ROWS)
        if len(x) <= n_rows:
            return product(x, wt)
        return np.concatenate([product(x[i : i + n_rows], wt) for i in range(0, len(x), n_rows)])


def gemm(x, wt):
    """Multiply all rows by one block after another, which is so small that BLAS does not repack it.

    x: [n_seq, n_in], wt: [n_out, n_in] -> [n_seq, n_out].
    """
    n_seq, (n_out, n_in) = len(x), wt.shape
    if n_seq == 1:
        x = x.repeat(2, axis=0)  # a vector would go another way, so the row comes as two
    n_block = block_size(n_in, GEMM_BLOCK, most=64)
    n_whole = n_out // n_block * n_block
    y = np.empty((len(x), n_out), np.float32)
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
    if wt.size <= 2 * PIECE:  # all of it is one block
        return np.matmul(wt, x[:, :, None])[:, :, 0]
    n_block = block_size(n_in, GEMV_BLOCK)
    n_blocks = n_out // n_block
    n_whole = n_blocks * n_block
    y = np.empty((n_seq, n_out), np.float32)
    if n_seq == 1 and blocks_may_join(n_in):  # memory is read fastest in one go

        def multiply(a, b):
            outputs = slice(a * n_block, b * n_block)
            np.dot(wt[outputs], x[0], out=y[0, outputs])

        in_parallel(multiply, n_blocks, n_block * n_in)
    else:
        blocks = wt[:n_whole].reshape(-1, n_block, n_in)
        y_blocks = np.empty((n_blocks, n_seq, n_block, 1), np.float32)  # else NumPy would swap the loops

        def multiply(a, b):
            np.matmul(blocks[a:b, None], x[:, :, None], out=y_blocks[a:b])

        in_parallel(multiply, n_blocks, n_block * n_in, n_block * n_seq)
        y[:, :n_whole].reshape(n_seq, n_blocks, n_block)[:] = y_blocks[..., 0].transpose(1, 0, 2)
    if n_whole < n_out:
        for row, result in zip(x, y):
            np.dot(wt[n_whole:], row, out=result[n_whole:])
    return y


def block_size(n_in, n_weights, most=4096):
    """Return how many outputs a block of about n_weights has: a multiple of four, as BLAS takes them."""
    return min(most, max(4, n_weights // n_in // 4 * 4))


# What the BLAS at hand does is found out by trying. Within a process the answers stay, as others would change
# bits.


@functools.cache
def n_rows_apart(n_in):
    """Return how many rows BLAS multiplies by a block, each as if alone, without repacking the block; or 0.

    OpenBLAS has a product that does so for processors with AVX-512.
    """
    x, block = trial(n_in)
    alone = np.concatenate([(np.stack([row, row]) @ block.T)[:1] for row in x])
    n_rows = 1
    while n_rows < GEMM_ROWS and np.array_equal(x[: n_rows + 1] @ block.T, alone[: n_rows + 1]):
        n_rows += 1
    return n_rows if n_rows >= 8 and two_rows_are_cheap() else 0


def trial(n_in):
    """Return some x: [GEMM_ROWS, n_in] and one block: [n_block, n_in]."""
    rng, n_block = np.random.default_rng(0), block_size(n_in, GEMM_BLOCK, most=64)
    return [rng.standard_normal((n, n_in), np.float32) for n in (GEMM_ROWS, n_block)]


@functools.cache
def two_rows_are_cheap():
    """Return whether BLAS multiplies two rows by a block in less than twice the time of one.

    It takes 0.9 to 1.1 times as long where BLAS does not repack the block, and 3 to 6 times where it does:
    so far apart that the answer does not hang on the moment.
    """
    x, block = trial(1024)

    def seconds(product):
        start = time.perf_counter()
        product()
        return time.perf_counter() - start

    two = min(seconds(lambda: x[:2] @ block.T) for _ in range(20))
    return two < 2 * min(seconds(lambda: block @ x[0]) for _ in range(20))


@functools.cache
def blocks_may_join(n_in):
    """Return whether BLAS's product for one row gives an output the same bits however many come with it."""
    rng, n_block = np.random.default_rng(0), block_size(n_in, GEMV_BLOCK)
    wt, x = rng.random((8 * n_block, n_in), np.float32), rng.random(n_in, np.float32)
    one_by_one = np.concatenate([block @ x for block in wt.reshape(8, n_block, n_in)])
    return all(np.array_equal(wt[: n * n_block] @ x, one_by_one[: n * n_block]) for n in (2, 3, 8))


def matmul(x, w):
    """Return x @ w at full speed for many rows, which are not kept apart.

    x: [n_seq, n_in], w: [n_in, n_out], both float32 -> [n_seq, n_out]. Equal x and w give equal bits,
    however many threads there are. Raises ValueError, as NumPy does, if the shapes do not fit.
    """
    with single_threaded_blas():
        if len(x) <= n_rows_apart(len(w)):
            return matvec(x, w)
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

    with single_threaded_blas():
        in_parallel(multiply, -(-len(wt) // n_block), x.size * n_block)
    return np.ascontiguousarray(y.T) if few else y


class SingleThreadedBLAS:
    """`with single_threaded_blas():` holds BLAS to one thread.

    The limit is the whole process's, so it is lifted when the last thread leaves. A thread that is inside
    may come again, which changes nothing. Ctrl-C, which can strike at any moment, leaves no limit behind.
    """

    def __init__(self):
        self.libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        self.before = [library.num_threads for library in self.libraries]
        self.lock, self.inside = threading.Lock(), set()  # the threads that are inside

    def start_over(self):
        """In a forked child, forget the threads that were inside but are missing now."""
        self.lock, others = threading.Lock(), self.inside - {threading.get_ident()}
        self.inside -= others
        if others and not self.inside:
            self.set(self.before)

    def __call__(self):
        return contextlib.nullcontext() if threading.get_ident() in self.inside else self

    def __enter__(self):
        try:
            with self.lock:
                if not self.inside:
                    self.before = [library.num_threads for library in self.libraries]
                self.inside.add(threading.get_ident())
                self.set([1] * len(self.libraries))  # each time: some BLAS have a limit for every thread
        except BaseException:
            self.leave()
            raise

    def __exit__(self, *exception):
        try:
            self.leave()
        except BaseException:
            self.leave()
            raise

    def leave(self):
        with self.lock:
            self.inside.discard(threading.get_ident())
            if not self.inside:
                self.set(self.before)

    def set(self, n_threads):
        for library, n in zip(self.libraries, n_threads):
            # threadpoolctl 3.8 obeys only the thread that came first; here the last to leave may be another.
            release = getattr(library, "clear_controlling_thread", lambda force: None)
            release(force=True)
            library.set_num_threads(n)
            release(force=True)


def holding_blas_to_one_thread(function):
    """Decorate a function to run `with single_threaded_blas():`.

    That is safer than a `with` around its loops: from Python 3.12 on, Ctrl-C at the end of a loop can skip
    the context's exit.
    """

    @functools.wraps(function)
    def held(*args, **kwargs):
        with single_threaded_blas():
            return function(*args, **kwargs)

    return held


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
            calls, ready = queue.SimpleQueue(), threading.Event()
            threading.Thread(target=self.serve, args=(calls, ready), daemon=True).start()
            ready.wait()
            self.calls.append(calls)
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

    def serve(self, calls, ready):
        single_threaded_blas.set([1] * len(single_threaded_blas.libraries))  # where each thread has a limit
        ready.set()
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
    few = n < 2 * least or n * n_weights < 4 * PIECE
    if few or team.n_threads == 1 or not team.taken.acquire(blocking=False):
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
