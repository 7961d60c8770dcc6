"""`completep explain` and `completep audit`: what the rules do to a model, and whether a model follows them."""

from pathlib import Path

from completep.cli.shared import EXIT, RulesName, Style, Target, Words, models, multipliers, rules_from, show
from completep.errors import UserError


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
    lr_of: Words = (),
    json: bool = False,
    html: Path | None = None,
) -> int:
    """Show, parameter by parameter, what the rules do to your model and why.

    The model is built on the meta device, so even a very large one takes no memory. Without --lr and the other base
    values, the table shows the factors that the rules apply.

    Example: completep explain completep.model.gpt:gpt --args width=1024 depth=24 --base width=256 depth=2 --lr 0.0039

    Args:
        target: your factory, as package.module:factory or file.py:factory.
        args: arguments of the factory for the model to train.
        base: arguments of the factory for the base model, the one that you tuned. Others are as in --args.
        base_shape: width and depth of the base, if the factory cannot build it.
        lr: tuned base learning rate.
        weight_decay: tuned base weight decay.
        eps: tuned base epsilon.
        std: tuned base init standard deviation.
        lr_of: tuned multipliers of the learning rate by role, such as embedding=4.
        json: print JSON, one entry per parameter.
        html: also write the table to this file.
    """
    from completep import explain as run
    from completep.anatomy.specimen import build
    from completep.files import write_new
    from completep.report.html import page

    make, chosen = models(target, args, base, base_shape)
    explanation = run(
        build(make, "meta"), base=chosen, rules=rules_from(rules), style=style, specimen=None if base else make,
        std=std, lr=lr, weight_decay=weight_decay, eps=eps, lr_of=multipliers(lr_of),
    )  # fmt: skip
    if html is not None:
        write_new(html, page(explanation.document()))
    show(explanation, json)
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
    lr_of: Words = (),
    check_init: bool = True,
    json: bool = False,
) -> int:
    """Compare your own model and optimizer with the rules.

    The factory returns (model, optimizer). The values that you tuned are read from the base's own optimizer, unless you
    give them. Exit code: 0 PASS, 1 FAIL if a setting differs from the rules, 3 INCONCLUSIVE if none differs but not
    everything could be compared.

    Example: completep audit examples/own_model.py:model_and_optimizer --args width=128 depth=8 --base width=64 depth=2

    Args:
        target: your factory, as package.module:factory or file.py:factory.
        args: arguments of the factory for the model to train.
        base: arguments of the factory for the base model, the one that you tuned. Others are as in --args.
        base_shape: width and depth of the base, if the factory cannot build it.
        lr: tuned base learning rate.
        weight_decay: tuned base weight decay.
        eps: tuned base epsilon.
        std: tuned base init standard deviation.
        lr_of: tuned multipliers of the learning rate by role, such as embedding=4, if the base's optimizer has none.
        check_init: compare initial values too. Switch it off for a trained model.
        json: print JSON.
    """
    from completep import audit as run

    make, chosen = models(target, args, base, base_shape)
    pair = make()
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise UserError(f"{target} returned {type(pair).__name__}", fix="let it return (model, optimizer)")
    result = run(
        *pair,
        base=chosen,
        rules=rules_from(rules),
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        std=std,
        lr_of=multipliers(lr_of),
        check_init=check_init,
    )
    show(result, json)
    return EXIT[result.verdict]
