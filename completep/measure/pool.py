"""A function over many items, in processes of one thread each: on small models two of those beat one with two threads."""

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int | None = None
) -> Iterator[tuple[Item, Result]]:
    """(item, result) as they are done; in this process where there is but one, or where they cannot be sent to another."""
    workers = min(len(items), workers or os.cpu_count() or 1)
    if workers <= 1 or not _can_be_sent(function):
        for item in items:
            yield item, function(item)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_alone_on_its_core) as pool:
        futures = {pool.submit(function, item): item for item in items}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _alone_on_its_core() -> None:
    import torch

    from completep.train.speed import tune_process

    tune_process()
    torch.set_num_threads(1)


def _can_be_sent(function: Any) -> bool:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
