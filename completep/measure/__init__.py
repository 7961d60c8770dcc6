"""Measurements with a verdict: PASS, FAIL or INCONCLUSIVE, from slopes and intervals instead of plots.

In: a factory of models at several sizes, or the losses of a sweep. Out: `Check`, `Laziness` or `TransferCheck`, each a
`Result` with its numbers as fields.

    words.py          PASS, FAIL, INCONCLUSIVE, and which is the worst
    subject.py        a model and its optimizer at one shape, and its batches
    pool.py           a function over many items, one process per core
    coordinates.py    the coordinate check on one subject: the stream, and role by role
    grid.py           the same over shapes, parameterizations and seeds
    verdict.py        coordinates → findings with slopes and words
    linearization.py  laziness: one step of a block against its linearization, and the verdict
    curves.py         loss curves over a hyperparameter: drift, regret and the verdict
    figures.py        the figures of all three
    check.py, laziness.py, transfer.py   the public functions and their results
"""
