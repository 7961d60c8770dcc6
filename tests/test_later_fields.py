"""Fields that were added later leave every older run as it was: its identity, its file, its numbers."""

import json
from dataclasses import replace

import pytest

from completep.config import GPTConfig, Hyperparameters, Run, Schedule, run_from_json, run_id, to_json
from completep.errors import UserError

BEFORE = "3568b72045c9"  # the identity of this run before mixtures of experts were added


def run(**options):
    return Run(GPTConfig(**options), Hyperparameters(1e-3, 0.02), Schedule(10, 1), 2, 8)


def test_a_run_keeps_its_identity_and_its_file():
    assert run_id(run()) == BEFORE
    assert (
        not {"experts", "active_experts", "expert_width", "shared_experts"} & json.loads(to_json(run()))["model"].keys()
    )
    assert run_from_json(to_json(run())) == run()


def test_a_multiplier_by_role_is_another_run_and_none_is_the_run_of_before():
    def with_lr_of(lr_of):
        return replace(run(), hyperparameters=Hyperparameters(1e-3, 0.02, lr_of=lr_of))

    assert run_id(with_lr_of({})) == BEFORE
    assert "lr_of" not in json.loads(to_json(run()))["hyperparameters"]
    several = [{"embedding": 4.0}, {"embedding": 2.0}, {"unembedding": 4.0}, {"embedding": 4.0, "unembedding": 2.0}]
    assert len({run_id(with_lr_of(lr_of)) for lr_of in several} | {BEFORE}) == 5
    both = {"unembedding": 2.0, "embedding": 4.0}
    assert run_id(with_lr_of(both)) == run_id(with_lr_of(several[-1]))  # in any order
    assert run_from_json(to_json(with_lr_of(both))) == with_lr_of(both)
    assert hash(with_lr_of(both)) == hash(with_lr_of(several[-1]))


@pytest.mark.parametrize(
    "lr_of", [{"embedding": 0}, {"embedding": -1.0}, {"embedding": "4"}, {"embedding": True}, [4.0], 4]
)
def test_what_is_no_multiplier_is_refused_in_a_file(lr_of):
    content = json.loads(to_json(run()))
    content["hyperparameters"]["lr_of"] = lr_of
    with pytest.raises(UserError, match=r"run\.json: .*lr_of"):
        run_from_json(json.dumps(content))


def test_a_mixture_is_another_run_and_is_read_again():
    sparse = run(experts=8, active_experts=2, expert_width=96, shared_experts=1)
    assert run_from_json(to_json(sparse)) == sparse
    changes = [{}, {"active_experts": 1}, {"expert_width": None}, {"shared_experts": 0}, {"experts": 4}]
    ids = {run_id(replace(sparse, model=replace(sparse.model, **change))) for change in changes}
    assert len(ids | {BEFORE}) == 6
