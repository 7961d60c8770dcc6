"""`completep explain` and `completep audit`: what the rules do to a model, and whether a model keeps them."""

from pathlib import Path

from completep.cli.shared import RulesName, Style, Target, Words, console, models, print_json
from completep.config import Shape
from completep.errors import UserError
from completep.rules.table import rules_named


def explain(
    target: Target,
    /,
    args: Words = (),
    base: Words = (),
    base_shape: tuple[int, int] | None = None,
    rules: RulesName = "completep",
    style: Style = "multiplier",
    lr: float = 1.0,
    weight_decay: float = 1.0,
    eps: float = 1.0,
    std: float = 1.0,
    json: bool = False,
    html: Path | None = None,
) -> int:
    """Show, parameter by parameter, what the rules do to your model and why.

    The model is built on the meta device: any size costs nothing. Without --lr and its like, the numbers are factors.

    Example: completep explain completep.model.gpt:gpt --args width=1024 depth=24 --base width=256 depth=2 --lr 0.0039

    Args:
        target: your factory, as package.module:factory or file.py:factory.
        args: its arguments for the model to train.
        base: its arguments for the base model that was tuned (the others as in --args).
        base_shape: width and depth of the base, if a factory cannot build it.
        lr: tuned base learning rate.
        weight_decay: tuned base weight decay.
        eps: tuned base epsilon.
        std: tuned base init standard deviation.
        json: print JSON, one entry per parameter.
        html: also write the table to this file.
    """
    from completep.files import write_new
    from completep.rules import explain as view
    from completep.rules.examine import build
    from completep.rules.parametrize import parametrize

    make, chosen = models(target, args, base, base_shape)
    scaling = parametrize(
        build(make, "meta"), base=chosen, rules=rules_named(rules), style=style, specimen=None if base else make
    )
    rows = scaling.explain(std=std, lr=lr, weight_decay=weight_decay, eps=eps)
    if html is not None:
        write_new(html, view.to_html(scaling, rows))
    if json:
        print_json(view.to_json(scaling, rows))
    else:
        console().print(view.to_table(rows, view.summary(scaling)))
    return 0


def audit(
    target: Target,
    /,
    args: Words = (),
    base: Words = (),
    base_shape: tuple[int, int] | None = None,
    rules: RulesName = "completep",
    lr: float | None = None,
    weight_decay: float | None = None,
    eps: float | None = None,
    std: float | None = None,
    check_init: bool = True,
    json: bool = False,
) -> int:
    """Compare your own model and optimizer with the rules; exit code 1 if anything departs.

    The factory returns (model, optimizer). What you tuned is read off the embedding's group unless you give it.

    Example: completep audit examples/own_model.py:model_and_optimizer --args width=128 depth=8 --base width=64 depth=2

    Args:
        target: your factory, as package.module:factory or file.py:factory.
        args: its arguments for the model to train.
        base: its arguments for the base model that was tuned (the others as in --args).
        base_shape: width and depth of the base, if a factory cannot build it.
        lr: tuned base learning rate.
        weight_decay: tuned base weight decay.
        eps: tuned base epsilon.
        std: tuned base init standard deviation.
        check_init: compare starting values too; switch it off for a trained model.
        json: print JSON.
    """
    from completep.rules import audit as checker

    make, chosen = models(target, args, base, base_shape)
    pair = make()
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise UserError(f"{target} returned {type(pair).__name__}", fix="let it return (model, optimizer)")
    base_model = chosen if isinstance(chosen, Shape) else (lambda: chosen()[0])
    found = checker.audit(
        *pair,
        base=base_model,
        rules=rules_named(rules),
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        std=std,
        check_init=check_init,
    )
    if json:
        print_json(checker.to_json(found))
    else:
        for line in checker.to_lines(found):
            console().print(line)
    return 0 if found.passed else 1
