"""Fields that were added later leave every older run as it was: its identity, its file, its numbers."""

import json
from dataclasses import replace

from completep.config import GPTConfig, Hyperparameters, Run, Schedule, run_from_json, run_id, to_json

BEFORE = "3568b72045c9"  # the identity of this run before mixtures of experts were added


def run(**options):
    return Run(GPTConfig(**options), Hyperparameters(1e-3, 0.02), Schedule(10, 1), 2, 8)


def test_a_run_keeps_its_identity_and_its_file():
    assert run_id(run()) == BEFORE
    assert (
        not {"experts", "active_experts", "expert_width", "shared_experts"} & json.loads(to_json(run()))["model"].keys()
    )
    assert run_from_json(to_json(run())) == run()


def test_a_mixture_is_another_run_and_is_read_again():
    sparse = run(experts=8, active_experts=2, expert_width=96, shared_experts=1)
    assert run_from_json(to_json(sparse)) == sparse
    changes = [{}, {"active_experts": 1}, {"expert_width": None}, {"shared_experts": 0}, {"experts": 4}]
    ids = {run_id(replace(sparse, model=replace(sparse.model, **change))) for change in changes}
    assert len(ids | {BEFORE}) == 6
