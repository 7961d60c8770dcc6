"""Tune your own training at a small base, and verify that the optimum holds at larger proxies.

In: a command template, a Python function or the reference decoder; a space; a base and proxies. Out: `Tuned`, with the
best values, their intervals, the transfer verdict and tuned.json, which `plan` and `parametrize` take.

    space.py      `lr=2^-10..2^-5` → the values of a dimension
    template.py   `python train.py --lr {lr}` → the words of one run, without a shell
    reading.py    where a run's loss is: JSON, JSONL, CSV, output, TensorBoard
    scripts.py    the hashes of what a command runs
    hopeless.py   when a run is stopped early
    trial.py      what a Python function `train(trial)` is given
    tasks.py      a run of a command or of a function, as a task of the sweep machinery
    decoder.py    a run of the reference decoder, as a task that a search may stop early
    subject.py    what is tuned: makes the task of a run
    settings.py   all settings of a tuning, from TOML or from arguments
    record.py     what is remembered between two calls: versions of scripts, and their runs
    stopping.py   an engine that stops hopeless runs
    ignored.py    refuses a script that ignores its value, its seed or its shape
    precision.py  how many values and seeds a PASS needs, from the noise alone
    search.py     which runs, in four stages; how many to expect
    explore.py    a search over several dimensions: Optuna, or a trust region
    choices.py    the verdict on a dimension of words
    result.py     `Tuned`, its plan and its status
    prepare.py    settings → a tuning that is checked and can start; the frame of its results
    again.py      the command that repeats a tuning
    run.py        `tune`, `tune_plan` and `tune_status`: from settings to a result
"""
