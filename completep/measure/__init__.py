"""Measurements with a verdict: PASS, FAIL or INCONCLUSIVE, from slopes and intervals instead of plots.

In: a factory of models at several sizes, or the losses of a sweep. Out: `Check`, `Derivation`, `Laziness` or
`TransferCheck`, each a `Result` with its numbers as fields.

    words.py          PASS, FAIL, INCONCLUSIVE, and which is the worst
    layout.py         the parameters and modules of a model, found once for all its seeds
    optimizers.py     torch's optimizers without its compiler
    subject.py        a model and its optimizer at one shape, and its batches
    pool.py           a function over many items, one process per core
    bare.py           gradients of bare vectors, added up without their signs
    conditions.py     gradients of what makes a condition, such as a DiT's class, summed over the blocks without signs
    outputs.py        the outputs of a matrix part by part, where the model splits them
    tensors.py        one backward pass and one step: gain, pull, epsilon ratio and decay of every parameter tensor
    survey.py         the same over shapes, parameterizations and seeds, near the limit of large depth
    kept.py           what a derivation has measured already, in a folder
    confirm.py        a derived rule at the level of the loss: short runs of training at two sizes
    diagnosis.py      survey → findings: which tensor has which exponent wrong, measured and expected
    solving.py        survey → exponents that a parameter's settings need, and whether they are decided
    coordinates.py    the second opinion, over a few training steps: the stream, and role by role
    grid.py           the same over shapes, parameterizations and seeds
    verdict.py        coordinates → findings with slopes and words
    linearization.py  laziness: one step of a block against its linearization, and the verdict
    stream_limit.py   the stream of an untrained network over depth, against its derived limit
    sweeps.py         a sweep as a frame: anybody's CSV, its columns by whatever names
    curves.py         loss curves over a hyperparameter: drift, regret and the verdict
    figures.py        the figures of all of these
    check.py, derive.py, laziness.py, transfer.py   the public functions and their results
"""
