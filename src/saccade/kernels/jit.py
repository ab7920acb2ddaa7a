"""Triton where it is installed, and names that let the kernels' files load where it is not.

`compile_only` is for warm-up: kernels are compiled side by side instead of launched, by the processes of a
`CompilePool` if there is one.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import hashlib
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from saccade.kernels.compile_pool import CompilePool, current_pool

if TYPE_CHECKING:
    import triton
    import triton.language as tl

    TRITON = True
else:
    try:
        import triton
        import triton.language as tl

        TRITON = True
    except ImportError:  # CPU builds of torch come without it; every kernel has a reference
        triton, tl, TRITON = None, SimpleNamespace(constexpr=None), False


INTERPRETED: bool = TRITON and bool(triton.knobs.runtime.interpret)

__all__ = ["tl"]  # imported above for the kernels; all other names are defined here


COMPILERS = 16  # threads, without a compile pool
FEW = 16  # entries of a cold cache; a start needs 100
# The launches seen by `compile_only`. Without it Triton looks a kernel up at every launch: 83 us against 13,
# and a step has hundreds.
_COMPILING: ContextVar[set[Hashable] | None] = ContextVar("compiling", default=None)


def compiling() -> bool:
    """Whether launches only compile: outputs of kernels are then uninitialised."""
    return _COMPILING.get() is not None


def _specialization(args: tuple[Any, ...], options: dict[str, Any]) -> Hashable:
    """Equal for launches of one kernel that Triton compiles once."""
    parts: list[Hashable] = []
    for arg in args:
        if isinstance(arg, Tensor):
            parts.append((arg.dtype, arg.data_ptr() % 16 == 0))
        elif isinstance(arg, int):
            parts.append((arg == 1, arg % 16 == 0, arg.bit_length() > 31))
        else:
            parts.append(type(arg).__name__)
    return tuple(parts), tuple(sorted(options.items()))


@contextmanager
def compile_only() -> Iterator[None]:
    """Within: launches compile their kernels and do nothing else; at the end all are compiled. What does not
    compile raises when it is launched for real."""
    if not TRITON or INTERPRETED:
        yield
        return
    token = _COMPILING.set(set())
    helpers = current_pool()
    threads = helpers.count if helpers is not None and helpers.count else COMPILERS
    try:
        with (
            ThreadPoolExecutor(threads) as pool,
            triton.AsyncCompileMode(_ContextPool(pool), ignore_errors=True),
        ):
            try:
                yield
            except BaseException:  # e.g. an interrupt: do not wait for the rest
                pool.shutdown(wait=False, cancel_futures=True)
                if helpers is not None:
                    helpers.close()
                raise
    finally:
        _COMPILING.reset(token)


def device_properties(index: int) -> dict[str, int]:
    """Of a GPU: multiprocessor_count, max_shared_mem (bytes a program may have) and others."""
    found: dict[str, int] = triton.runtime.driver.active.utils.get_device_properties(index)
    return found


def cache_is_cold() -> bool:
    """Whether Triton's cache is almost empty; False if it cannot be read."""
    folder = Path(triton.knobs.cache.dir)
    try:
        return not folder.is_dir() or sum(1 for _ in islice(folder.iterdir(), FEW)) < FEW
    except OSError:
        return False


def hash_triton() -> None:
    """Make the hash of Triton itself (400 MB) that keys its cache: once per process, without the GIL."""
    with suppress(Exception):  # the first compilation makes it then
        triton.runtime.cache.triton_key()


class _ContextPool:
    """Threads with the context variables of the caller."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(copy_context().run, compile_kernel)


def _compile(
    plain: Callable[..., Any], source: Any, *, target: Any, options: dict[str, Any], **more: Any
) -> Any:
    """Triton's own `compile`. Within `compile_only` a worker is asked first, and the launcher is compiled
    too: up to Triton 3.6 that is C, one for each list of argument types, and takes a third of a second."""
    begun = _COMPILING.get()
    if begun is None:
        return plain(source, target=target, options=options, **more)
    types = tuple(source.signature.values())
    first = types not in begun
    begun.add(types)
    helpers = current_pool()
    if helpers is not None and helpers.count:
        with suppress(Exception):  # compiling here raises it again, or works
            _have_compiled(helpers, source, target, options, more["_env_vars"], launcher=first)
    kernel = plain(source, target=target, options=options, **more)
    if first:
        with suppress(Exception):  # the first launch tries again and raises
            triton.runtime.driver.active.launcher_cls(source, kernel.metadata)
    return kernel


def _have_compiled(
    helpers: CompilePool, source: Any, target: Any, options: dict[str, Any], settings: Any, *, launcher: bool
) -> None:
    """Have a worker put the kernel into Triton's cache."""

    def missing() -> bool:  # as Triton's `compile` looks it up
        backend = triton.compiler.make_backend(target)
        key = triton.compiler.get_cache_key(source, backend, backend.parse_options(dict(options)), settings)
        folder = triton.runtime.cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return folder.get_group(f"{source.name[:150]}.json") is None

    if missing():
        job = {"module": source.fn.module, "name": source.fn.__name__, "signature": source.signature}
        job |= {"constants": source.constants, "attrs": source.attrs, "options": options}
        job |= {"target": (target.backend, target.arch, target.warp_size), "launcher": launcher}
        if helpers.compile(job) and missing():
            helpers.dismiss()  # they fill another cache, or read other sources


if TYPE_CHECKING or not TRITON:

    class Kernel:
        def __init__(self, function: Callable[..., Any], *, do_not_specialize: tuple[str, ...] = ()) -> None:
            self.fn = function

else:

    class Kernel(triton.JITFunction):
        def create_binder(self):
            made = super().create_binder()
            self.compile = partial(_compile, self.compile)
            return made

        def run(self, *args, grid, warmup, **kwargs):
            begun = _COMPILING.get()
            if begun is None:
                return super().run(*args, grid=grid, warmup=warmup, **kwargs)
            launch = id(self), _specialization(args, kwargs)
            if launch in begun:
                return None
            begun.add(launch)
            return super().run(*args, grid=grid, warmup=True, **kwargs)


def jit(function: Callable[..., Any]) -> Any:
    """A Triton kernel, or the bare function without Triton (nothing calls it then)."""
    return jit_unspecialized()(function)


def jit_unspecialized(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """A kernel that is not specialised for the values or the alignment of these arguments."""

    def make(function: Callable[..., Any]) -> Any:
        if not TRITON:
            return function
        if INTERPRETED:
            return triton.jit(function, do_not_specialize=names)
        return Kernel(function, do_not_specialize=names)

    return make


def constant(value: float | str) -> Any:
    """A number or text that kernels of the module can read."""
    return tl.constexpr(value) if TRITON else value


def power_of_two(value: int) -> int:
    """The least power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def up(value: int, step: int) -> int:
    """value / step, rounded up."""
    return -(-value // step)


def pdl_options(pdl: bool) -> dict[str, Any]:
    """Of a launch whose kernel calls `wait_for_previous`."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@jit
def wait_for_previous(PDL: tl.constexpr):
    """With programmatic dependent launch: wait until the kernel before has ended and its writes are visible.

    Launch with `pdl_options`. The next kernel may start at once; it waits here, too.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@jit
def arrives_last(counter, expected):
    """Whether the other `expected` - 1 programs that share the counter came here before; what they stored is
    then visible. The counter is 0 before and after the kernel.

    Acquire and release for the whole GPU; stores of other programs are read from L2 (".cg"). No program waits
    for another. The last one resets the counter, and the next kernel that counts there does so behind its own
    `wait_for_previous`: each kernel of a chain ends after the one before, launched early or not.
    """
    tl.debug_barrier()  # one thread counts for the stores of all
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@jit
def prefetch_l2(pointers, mask, room, COUNT: tl.constexpr):
    """Prefetch the COUNT (at most `room`) 16-bit values from each pointer on to L2, without waiting."""
    LINES: tl.constexpr = COUNT // 64 if COUNT > 64 else 1  # of 128 bytes
    line = tl.arange(0, LINES)
    lines = pointers.to(tl.int64)[:, None] + line[None, :] * 128
    wanted = (mask[:, None] & (line * 64 < room)[None, :]).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [lines, wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
