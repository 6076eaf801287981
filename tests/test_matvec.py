import hashlib
import threading
import time

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given
from hypothesis import strategies as st

from conftest import in_own_process
from matvec import matvec, single_threaded_blas, team

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 29, 30, 31, 32, 33, 70)
SHAPES = [
    (1, 1),
    (1, 3),
    (3, 1),
    (3, 64),
    (64, 3),
    (64, 64),
    (1, 50257),
    (5, 4096),
    (100, 1001),
    (65, 4097),
    (255, 257),
    (257, 255),
    (4096, 3),
    (768, 2304),
    (1024, 4096),
    (4096, 1024),
    (1600, 1600),
    (6400, 1600),
    (768, 50257),
    (1280, 5003),
    (50257, 7),
]


def random_product(n_in, n_out, n_rows=70):
    """x [n_rows, n_in] and w [n_in, n_out] with w.T contiguous."""
    rng = np.random.default_rng([n_in, n_out])
    return rng.standard_normal((n_rows, n_in), np.float32), rng.standard_normal((n_out, n_in), np.float32).T


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def one_by_one(x, w):
    return np.concatenate([matvec(x[i : i + 1], w) for i in range(len(x))])


def fingerprint(shapes=SHAPES):
    """Check that rows do not mix in this process, and return a digest of all results."""
    digest = hashlib.sha256()
    for shape in shapes:
        x, w = random_product(*shape, n_rows=9)
        alone = one_by_one(x, w)
        for k in range(1, 10):
            assert same_bits(matvec(x[:k], w), alone[:k]), (shape, k)
        digest.update(alone.tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_every_row_has_the_bits_it_has_alone(shape):
    x, w = random_product(*shape)
    alone = one_by_one(x, w)
    for k in ROWS:
        assert same_bits(matvec(x[:k], w), alone[:k]), k
    assert same_bits(matvec(x[::-1], w), alone[::-1])  # whatever the place and the company
    assert same_bits(matvec(x[3::2], w), alone[3::2])


@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_values(shape):
    x, w = random_product(*shape, n_rows=8)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    error = 1e-6 * (1 + 0.1 * np.sqrt(shape[0])) * (np.abs(x) @ np.abs(w))  # rounding is proportional to this
    for k in (1, 3, 8):
        y = matvec(x[:k], w)
        assert y.dtype == np.float32 and y.shape == (k, shape[1])
        assert (np.abs(y - exact[:k]) <= error[:k]).all()


@given(st.integers(1, 150), st.integers(1, 150), st.integers(1, 12), st.integers(0, 2**32))
def test_any_small_shape(n_in, n_out, n_rows, seed):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((n_rows, n_in), np.float32), rng.standard_normal((n_out, n_in), np.float32).T
    assert same_bits(matvec(x, w), one_by_one(x, w))
    np.testing.assert_allclose(matvec(x, w), x.astype(np.float64) @ w, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 64), (100, 1001), (768, 2304)])
def test_memory_order_and_alignment_make_no_difference(shape):
    x, w = random_product(*shape)
    expected = matvec(x, w)

    def shifted(a, n_bytes):
        copy = np.empty(a.nbytes + n_bytes, np.uint8)[n_bytes:].view(np.float32).reshape(a.shape)
        copy[:] = a
        return copy

    assert same_bits(matvec(x, np.ascontiguousarray(w)), expected)
    assert same_bits(matvec(np.asfortranarray(x), w), expected)
    assert same_bits(matvec(np.repeat(x, 2, axis=0)[::2], np.repeat(w, 2, axis=1)[:, ::2]), expected)
    for n_bytes in (4, 20, 32):
        assert same_bits(matvec(shifted(x, n_bytes), shifted(w.T, n_bytes).T), expected)


def test_arguments_are_only_read():
    x, w = random_product(768, 2304)
    before = x.copy(), w.copy()
    x.flags.writeable = w.flags.writeable = False
    y = matvec(x[:3], w)
    kept = y.copy()
    matvec(x[3:6], w)  # does not write into what it returned before
    assert same_bits(x, before[0]) and same_bits(w, before[1]) and same_bits(y, kept)


def architecture():
    return [
        library["architecture"] for library in threadpoolctl.threadpool_info() if library.get("architecture")
    ]


def kernels():
    """This machine's, and older ones that OpenBLAS can be told to use."""
    newer = {"Haswell", "Zen", "SkylakeX", "Cooperlake", "SapphireRapids"}.intersection(architecture())
    return [None, "Haswell", "Nehalem"] if newer else [None]


@pytest.mark.parametrize("kernel", kernels())
def test_the_number_of_threads_makes_no_difference(kernel):
    shapes = [(3, 64), (100, 1001), (768, 2304), (4096, 1024), (768, 20001)]
    code = f"import test_matvec; print(test_matvec.fingerprint({shapes}), *test_matvec.architecture())"
    env = {"OPENBLAS_CORETYPE": kernel} if kernel else {}
    seen = {
        in_own_process(f"import numpy, threadpoolctl; threadpoolctl.threadpool_limits({n}); {code}", **env)
        for n in (2, 4)
    }
    seen.add(in_own_process(code, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", **env))
    assert len(seen) == 1 and (not kernel or seen.pop().endswith(kernel))


def limits():
    return [
        library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"
    ]


def test_nobody_lifts_the_limit_under_another():
    with threadpoolctl.threadpool_limits(2):
        before, entered, leave = limits(), threading.Event(), threading.Event()

        def stay():
            with single_threaded_blas():
                entered.set()
                leave.wait()

        other = threading.Thread(target=stay)
        with single_threaded_blas():
            other.start()
            entered.wait()
            with single_threaded_blas():
                pass
            assert set(limits()) <= {1}
        assert set(limits()) <= {1}
        leave.set()
        other.join()
        assert limits() == before


def test_every_thread_can_hold_blas_to_one_thread():
    """threadpoolctl 3.8 obeys only the thread that asked first, and ignores the others silently."""
    seen = []

    def work():
        with single_threaded_blas():
            seen.append(limits())
        seen.append(limits())

    for user in (
        threadpoolctl.threadpool_limits(2),
        single_threaded_blas,
    ):  # either makes the main thread the first
        with user:
            pass
        threadpoolctl.threadpool_limits(2)
        before = limits()
        other = threading.Thread(target=work)
        other.start()
        other.join()
        assert set(seen[-2]) <= {1} and seen[-1] == before


def test_blas_gets_its_threads_back():
    x, w = random_product(1024, 4096)
    for n in (3, 2, 1):
        with threadpoolctl.threadpool_limits(n):
            before = limits()
            matvec(x, w)
            assert limits() == before
            threads = [threading.Thread(target=lambda: [matvec(x, w) for _ in range(20)]) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert limits() == before


def products_by_new_threads():
    with threadpoolctl.threadpool_limits(2):
        before, (x, w) = limits(), random_product(1024, 1024, n_rows=1)
        for _ in range(300):
            team.start_over()  # as when the first product is made
            matvec(x, w)
            time.sleep(0.001)
            if limits() != before:
                return f"BLAS has {limits()} threads, not {before}"
    return "all the same"


def test_a_thread_that_starts_late_sets_no_limit():
    code = "import test_matvec; print(test_matvec.products_by_new_threads())"
    assert in_own_process(code) == "all the same"


def test_from_many_threads_at_once():
    cases = [
        (*random_product(*shape, n_rows=8), k)
        for shape in [(768, 50257), (1024, 4096), (4096, 1024), (100, 1001)]
        for k in (1, 5)
    ]
    expected = [matvec(x[:k], w) for x, w, k in cases]
    wrong = []

    def work(offset):
        for i in range(offset, offset + 30):
            x, w, k = cases[i % len(cases)]
            if not same_bits(matvec(x[:k], w), expected[i % len(cases)]):
                wrong.append(cases[i % len(cases)][1].shape)

    threads = [threading.Thread(target=work, args=[offset]) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def products_after_exceptions():
    with threadpoolctl.threadpool_limits(2):
        before, (x, w) = limits(), random_product(1024, 4096)
        expected = matvec(x, w)
        for k in (1, 2, 8) * 5:
            with pytest.raises(ValueError):
                matvec(x[:k, 1:], w)  # does not fit, which some see in the middle of the product
            assert limits() == before and same_bits(matvec(x[:k], w), expected[:k])
    return "all the same"


def test_an_exception_does_no_harm_to_later_products():
    assert (
        in_own_process("import test_matvec; print(test_matvec.products_after_exceptions())", timeout=20)
        == "all the same"
    )
