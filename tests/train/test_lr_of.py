"""A run's multipliers by role reach the optimizer, and are part of the run's identity and of its plan."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from completep import UserError, parametrize, plan
from completep.config import Shape, to_json
from completep.model.gpt import GPT
from completep.sweep.training import Training
from completep.train.loop import train
from tests.train.runs import EVERY_STEP, small_data, small_run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("corpus"))


def with_lr_of(run, lr_of):
    return replace(run, hyperparameters=replace(run.hyperparameters, lr_of=lr_of))


def weights(run, folder):
    train(run, folder, EVERY_STEP)
    return load_file(folder / "model.safetensors")


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys())


def test_sp_with_the_embeddings_rate_raised_is_the_rules_that_raise_it(data, tmp_path):
    """At twice the width, `sp-embedding` is SP with the embedding's learning rate × 2: the same bits."""
    sp = small_run(data, steps=4, rules="sp")
    raised = weights(with_lr_of(sp, {"embedding": 2.0}), tmp_path / "a")
    assert same(raised, weights(replace(sp, rules="sp-embedding"), tmp_path / "b"))
    assert not same(raised, weights(sp, tmp_path / "c"))


def test_a_role_that_the_model_lacks_is_refused_before_anything_is_written(data, tmp_path):
    with pytest.raises(UserError, match="no parameter here has the role 'QK norm'"):
        train(with_lr_of(small_run(data), {"QK norm": 2.0}), tmp_path / "a", EVERY_STEP)
    assert not (tmp_path / "a").exists()


def test_a_multiplier_of_one_is_the_run_without_it(data):
    run = small_run(data)
    plain, one = Training.of(run), Training.of(with_lr_of(run, {"embedding": 1.0}))
    two, both = Training.of(with_lr_of(run, {"embedding": 2.0})), {"embedding": 2.0, "unembedding": 1.0}
    assert one.id == plain.id != two.id == Training.of(with_lr_of(run, both)).id
    assert two.describe() == plain.describe() + ", embedding lr × 2"


def test_a_plan_carries_them_and_shows_the_rates_that_the_optimizer_gets(data, tmp_path):
    run = with_lr_of(small_run(data, base=Shape(32, 3)), {"embedding": 4.0, "hidden weight": 0.3})
    (tmp_path / "run.json").write_text(to_json(run))
    planned = plan(width=64, depth=12, tuned=tmp_path / "run.json")
    h = planned.run.hyperparameters
    assert h.lr_of == run.hyperparameters.lr_of
    base = replace(planned.run.model, width=32, depth=3)
    scaling = parametrize(GPT(planned.run.model), base=lambda: GPT(base)).init_()
    groups = scaling.param_groups(h.lr, weight_decay=h.weight_decay, eps=h.eps, lr_of=h.lr_of)
    rates = {role: g["lr"] for g in groups for role in g["roles"]}
    assert rates == {str(s.role): s.lr for s in planned.roles()}
    told = [(c.setting, c.before, c.after) for c in planned.changes if "multiplier" in c.setting]
    assert told == [("lr multiplier, embedding", 4.0, 4.0), ("lr multiplier, hidden weight", 0.3, 0.3)]
    assert {"4", "0.3"} <= {change["after"] for change in planned.to_json()["changes"]}
    assert "η of embedding" in str(planned.document())
    plain = plan(width=64, depth=12, tuned=with_lr_of(run, {}))
    assert {str(s.role): s.lr for s in plain.roles()}["embedding"] * 4 == rates["embedding"]
    assert "η of embedding" not in str(plain.document())


def test_a_plan_without_the_role_leaves_its_multiplier_out_and_says_so(data):
    experts = replace(small_run(data).model, experts=4)
    run = with_lr_of(small_run(data, base=Shape(32, 3), model=experts), {"embedding": 4.0, "router": 2.0})
    planned = plan(width=64, depth=12, tuned=run, experts=0)
    assert planned.run.hyperparameters.lr_of == {"embedding": 4.0}
    assert any("that this model does not have are left out: router × 2" in note for note in planned.notes)
    assert plan(width=64, depth=12, tuned=run).run.hyperparameters.lr_of == {"embedding": 4.0, "router": 2.0}
