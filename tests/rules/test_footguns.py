"""Ways to lose the rules without noticing: each is warned of, refused or marked."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from completep import COMPLETEP, SP, Shape, UserError, parametrize
from completep.model.gpt import gpt
from completep.rules.parametrize import explain
from tests.rules.models import Model, scale
from tests.rules.training import logits, step, tokens, worst
from tests.rules.zoo import ZOO

S = torch.optim.lr_scheduler


def reference(width=64, depth=8):
    return gpt(width, depth, 61, head_size=16)


@pytest.fixture(params=["own", "hooks", "transformers"])
def build(request):
    return {"own": reference, "hooks": Model, "transformers": ZOO["llama"]}[request.param]


def scaled(build, **options):
    model = build(64, 8)
    return model, parametrize(model, base=lambda: build(32, 2), **options)


# -- weights that nobody started ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("style", ["multiplier", "folded"])
def test_constructor_weights_are_warned_of(build, style):
    _, scaling = scaled(build, style=style)
    with pytest.warns(UserWarning, match=r"as the constructor made them.*scaling.init_\(std=…\)"):
        scaling.param_groups(1e-3)
    scaling.init_(0.1).param_groups(1e-3)


def loaded_before(build):
    model = build(64, 8)
    model.load_state_dict(build(64, 8).state_dict())
    return model, parametrize(model, base=lambda: build(32, 2))


def loaded_after(build):
    model, scaling = scaled(build)
    model.load_state_dict(build(64, 8).state_dict())
    return model, scaling


def assigned(build):
    model, scaling = scaled(build)
    model.load_state_dict(build(64, 8).state_dict(), assign=True)
    return model, scaling


def loaded_through_a_wrapper(build):
    model, scaling = scaled(build)
    wrapped = torch.compile(model, backend="eager")
    wrapped.load_state_dict({f"_orig_mod.{k}": v for k, v in build(64, 8).state_dict().items()})
    return model, scaling


def partly_loaded(build):
    """With a new head."""
    model, state = build(64, 8), build(64, 8).state_dict()
    last = list(state)[-1]
    model.load_state_dict({k: v for k, v in state.items() if k != last}, strict=False)
    return model, parametrize(model, base=lambda: build(32, 2))


def loaded_by_modules(build):
    model, scaling = scaled(build)
    for child, other in zip(model.children(), build(64, 8).children(), strict=True):
        child.load_state_dict(other.state_dict())
    return model, scaling


LOADED = [loaded_before, loaded_after, assigned, loaded_through_a_wrapper, partly_loaded, loaded_by_modules]


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADED)
def test_loaded_weights_are_not_warned_of_and_not_overwritten(build, load):
    model, scaling = load(build)
    scaling.param_groups(1e-3)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(UserError, match=r"were loaded or set after its constructor: init_ would") as e:
        scaling.init_(0.1)
    assert "overwrite=True" in e.value.fix
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    scaling.init_(0.1, overwrite=True).init_(0.2)  # the second time over its own numbers
    assert not all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def trained(build):
    """Training moves the gains of norms."""
    model = build(64, 8)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn(p.shape))
    return model


def assigned_before(build, base):
    model = build(64, 8)
    model.load_state_dict(trained(build).state_dict(), assign=True)
    return model, parametrize(model, base=base)


def assigned_to_meta(build, base):
    with torch.device("meta"):
        model = build(64, 8)
    model.load_state_dict(trained(build).state_dict(), assign=True)
    real = dict(build(64, 8).named_buffers())
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, real[name])
    return model, parametrize(model, base=base)


def from_a_file(build, base):
    model = pickle.loads(pickle.dumps(trained(build)))
    return model, parametrize(model, base=base)


def through_data(build, base):
    model = build(64, 8)
    scaling = parametrize(model, base=base)
    for p, other in zip(model.parameters(), trained(build).parameters(), strict=True):
        p.data.copy_(other)
    return model, scaling


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not checked.*a Shape does not say")
@pytest.mark.parametrize("by_shape", [False, True])
@pytest.mark.parametrize("load", [assigned_before, assigned_to_meta, from_a_file, through_data])
def test_trained_weights_that_leave_no_count_are_not_overwritten(build, load, by_shape):
    model, scaling = load(build, Shape(32, 2) if by_shape else lambda: build(32, 2))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(UserError, match="were loaded or set after its constructor"):
        scaling.init_(0.1)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    scaling.init_(0.1, overwrite=True)
    next(p for n, p in model.named_parameters() if "norm" in n).data.uniform_()  # a trial run, then a new start
    scaling.init_(0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*without the multipliers")
def test_pretrained_weights_are_not_overwritten(tmp_path):
    import transformers

    ZOO["llama"](64, 8).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    scaling = parametrize(model, base=lambda: ZOO["llama"](32, 2))
    scaling.param_groups(1e-3)
    with pytest.raises(UserError, match="were loaded"):
        scaling.init_(0.1)


@pytest.mark.slow
def test_weights_of_your_own_are_not_warned_of(build):
    model, scaling = scaled(build)
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    scaling.param_groups(1e-3)


def no_width(build):
    return parametrize(build(32, 8), base=lambda: build(32, 2))


def no_rules(build):
    return scaled(build, rules=SP)[1]


def a_copy(build):
    return parametrize(copy.deepcopy(build(64, 8)), base=lambda: build(32, 2))


def copied_base(build):
    small = build(32, 2)
    return parametrize(build(64, 8), base=lambda: copy.deepcopy(small))


def meta(build):
    with torch.device("meta"):
        model = build(64, 8)
    return parametrize(model, base=lambda: build(32, 2))


def a_shape(build):
    return parametrize(build(64, 8), base=Shape(32, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not checked.*a Shape does not say")
@pytest.mark.parametrize("case", [no_width, no_rules, a_copy, copied_base, meta, a_shape])
def test_no_false_alarm(build, case):
    scaling = case(build)
    scaling.param_groups(1e-3)
    if case is not meta:
        scaling.init_(0.1)


def test_resuming_a_run_is_no_false_alarm(build):
    model, scaling = scaled(build)
    scaling.init_(0.1)
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    scaling.param_groups(1e-3)
    with pytest.raises(UserError, match="were loaded"):
        scaling.init_(0.1)


def test_explain_leaves_no_trace():
    model = Model(64, 8)
    explain(model, base=lambda: Model(32, 2))
    assert not model._load_state_dict_post_hooks
    assert not model._state_dict_hooks


# -- saving ------------------------------------------------------------------------------------------


def test_saving_with_multipliers_is_warned_of_and_folding_for_it_is_one_line(tmp_path):
    import transformers

    model, scaling = scaled(ZOO["llama"])
    scaling.init_(0.1)
    expected = logits(model.eval(), tokens(0)).detach()

    def loaded(folder):
        return logits(transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), tokens(0))

    with pytest.warns(UserWarning, match=r"saved without the multipliers.*with scaling\.folded\(\): model\.save_pre"):
        model.save_pretrained(tmp_path / "wrong")
    assert worst(loaded(tmp_path / "wrong"), expected) > 0.1
    with scaling.folded():
        model.save_pretrained(tmp_path / "right")
    assert worst(loaded(tmp_path / "right"), expected) < 1e-4
    scaling.fold()
    model.save_pretrained(tmp_path / "folded")
    assert worst(loaded(tmp_path / "folded"), expected) < 1e-4


def test_a_model_without_factors_saves_quietly(tmp_path):
    model = ZOO["llama"](32, 2)
    parametrize(model, base=lambda: ZOO["llama"](32, 2))
    model.save_pretrained(tmp_path)


def test_the_warning_survives_copies(tmp_path):
    model, scaling = scaled(ZOO["llama"])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.save_pretrained.model is other
        with pytest.warns(UserWarning, match="without the multipliers"):
            other.save_pretrained(tmp_path / "copy")
        scaling.on(other).fold()
        other.save_pretrained(tmp_path / "folded")


@pytest.mark.slow
def test_folded_for_a_moment_is_bit_for_bit_the_same_run(build):
    runs = []
    for save in (False, True):
        model, scaling = scaled(build, rules=COMPLETEP)
        scaling.init_(0.1)
        optimizer = torch.optim.AdamW(scaling.param_groups(1e-2))

        def saving(scaling=scaling, save=save):
            if save:  # between backward and step, where gradients matter as well
                with scaling.folded() as plain:
                    assert scaling.style == "folded"
                    copy.deepcopy(plain.state_dict())

        for i in range(3):
            step(model, optimizer, i, clip=saving)
        assert scaling.style == "multiplier"
        runs.append(logits(model, tokens(9)).detach())
    assert torch.equal(*runs)


def test_folded_ends_in_the_style_it_began_with():
    model, scaling = scaled(Model, style="folded")
    scaling.init_(0.1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with scaling.folded():
        pass
    assert scaling.style == "folded"
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    model, scaling = scaled(Model)
    with pytest.raises(RuntimeError, match="disk full"), scaling.folded():
        raise RuntimeError("disk full")
    assert scaling.style == "multiplier"


def test_a_state_dict_says_which_multipliers_it_needs(tmp_path, build):
    model, scaling = scaled(build)
    state = model.state_dict()
    assert state._metadata[""]["completep"]["multipliers"] == {"branch": 0.25, "logits": 0.5}
    assert list(state) == list(build(64, 8).state_dict())  # no key that a loader could stumble over
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)._metadata[""]["completep"]["style"] == "multiplier"
    build(64, 8).load_state_dict(state)
    scaling.fold()
    assert "completep" not in model.state_dict()._metadata[""]


# -- schedulers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "floor",
    [
        lambda o: S.CosineAnnealingLR(o, 4, eta_min=1e-4),
        lambda o: S.CosineAnnealingWarmRestarts(o, 4, eta_min=1e-4),
        lambda o: S.OneCycleLR(o, 1e-2, total_steps=9),
        lambda o: S.CyclicLR(o, 1e-4, 1e-2, cycle_momentum=False),
    ],
)
def test_rates_that_lost_their_ratios_are_found(floor):
    _, scaling = scale(Model)
    scaling.init_(0.1)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-2))
    scaling.check_ratios(optimizer)
    scheduler = floor(optimizer)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    with pytest.raises(UserError, match="no longer have the rules' ratios") as e:
        scaling.check_ratios(optimizer)
    assert "LambdaLR" in e.value.fix


@pytest.mark.parametrize("style", ["multiplier", "folded"])
def test_a_lambda_with_a_floor_keeps_the_ratios(style):
    _, scaling = scale(Model, style=style)
    scaling.init_(0.1)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-2))
    scheduler = S.LambdaLR(optimizer, lambda t: max(0.1, 1 - t / 5))
    for _ in range(8):
        optimizer.step()
        scheduler.step()
        scaling.check_ratios(optimizer)


# -- a base that is larger ---------------------------------------------------------------------------


def test_a_base_larger_than_the_target_is_said():
    _, swapped = scale(Model, width=32, depth=2, base=(64, 8))
    assert "width 64 → 32 (m_N = 0.5, smaller than the base)" in repr(swapped)
    assert "m_L = 0.25, smaller than the base" in repr(swapped)
    assert "smaller than the base" in str(swapped.explain()).replace("\n", " ")
    assert "smaller" not in repr(scale(Model)[1])


def test_no_warning_of_ours_is_left_over():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, scaling = scale(Model)
        scaling.init_(0.1).param_groups(1e-3)
