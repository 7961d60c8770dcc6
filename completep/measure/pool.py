"""A function over many items, in processes with one thread each: for small models that beats several threads."""

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from completep.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

_function: Callable[..., object] | None = None  # of a worker process


def each(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int | None = None
) -> Iterator[tuple[Item, Result]]:
    """(item, result) as they finish. A single item, or a function that cannot be pickled, runs in this process."""
    if workers is not None and workers < 1:
        raise UserError(f"workers={workers}: must be at least 1", fix="leave workers out for one per core")
    workers = min(len(items), workers or os.cpu_count() or 1)
    if workers <= 1 or not _can_be_sent(function):
        for item in items:
            yield item, function(item)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start, initargs=(function,)) as pool:
        futures = {pool.submit(_call, item): item for item in items}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process died", fix="workers=1; in a script, put the call under `if __name__ == '__main__':`"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start(function: Callable[..., object]) -> None:
    """Each process is given the function once, so what the function remembers serves all items there."""
    global _function
    _function = function
    _one_thread()


def _call(item: object) -> Any:
    assert _function is not None
    return _function(item)


def _one_thread() -> None:
    import torch

    from completep.train.speed import tune_process

    tune_process()
    torch.set_num_threads(1)


def _can_be_sent(function: object) -> bool:
    try:
        sent = pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    notebook = not hasattr(sys.modules["__main__"], "__file__")  # no other process can import its functions
    return not (notebook and b"__main__" in sent)
