"""The rules of a parameterization, and what they do to a model and its optimizer.

In: a model, its base (a factory or a Shape), and rules (SP, MUP, alpha(…), COMPLETEP). Out: a `Scaling`, which fills
the starting weights, makes optimizer groups and holds the multipliers of the forward pass, all by parameter name.

The files, in reading order:

    table.py         roles with their traits, powers, rows, sources: the only file with exponents
    weights.py       where a model's weights come from: constructor, init_, checkpoint; marks for saving
    multipliers.py   multipliers on a model's forward pass, as hooks
    fold.py          moves multipliers into weights, optimizers and schedulers, and back
    explain.py       `Explanation`: the resolved table as a result
    scaling.py       `Scaling`: the table, resolved for every parameter of one model
    placing.py       where the multipliers of a model act, and how large they are
    parametrize.py   `parametrize` and `explain`: anatomy × ratios × table → a Scaling
    measured.py      rules with measured rows, as a file: `load_rules`
    audit.py         `audit`: your model and optimizer compared with the table
"""
