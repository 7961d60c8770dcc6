"""The second opinion, how far training moves the model: right models pass, wrong ones fail with the role named."""

import math

import numpy as np
import pytest
import torch

from completep import COMPLETEP, MUP, SP, Role, alpha
from completep.config import Shape
from completep.errors import UserError
from completep.measure import coordinates
from completep.measure.coordinates import measure, rms
from completep.measure.grid import Job, coordinate_check
from completep.measure.subject import Setting, Source, Subjects, make_batches, python_bytes
from completep.measure.verdict import culprits, judge_coordinates, overall
from tests.measure import pairs
from tests.measure.controls import CONTROLS, RIGHT, one_block_unscaled
from tests.rules import zoo

BASE = Shape(32, 2)
TINY = Setting(time=32)
DECODER = Source(pairs.model, BASE)
AXES = {"depth": [Shape(32, d) for d in (2, 4, 8, 16)], "width": [Shape(w, 2) for w in (32, 64, 128, 256)]}


def check(source, rules=COMPLETEP, axis="depth", setting=TINY, seeds=(0, 1, 2), shapes=None):
    return judge_coordinates(coordinate_check(source, [rules], shapes or AXES[axis], setting, seeds=seeds, workers=1))


def subject_of(shape, rules, setting, seed):
    """(the subject, its batches, the probe) of the decoder."""
    base = DECODER.base_model()
    return Subjects(DECODER, base, shape, rules, setting, None).start(seed), *make_batches(DECODER, base, setting, seed)


@pytest.mark.slow
@pytest.mark.parametrize("control", RIGHT, ids=lambda c: c.name)
def test_right_rules_pass(control):
    findings = check(DECODER, control.rules, control.axis, Setting(time=32, eps=control.eps))
    assert not culprits(findings)
    assert overall(findings) == "PASS", [f for f in findings if f.word != "PASS"]


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS, ids=lambda c: c.name)
def test_wrong_rules_fail_and_the_role_is_named(control):
    source = DECODER if control.factory is None else Source(control.factory, BASE)
    findings = check(source, control.rules, control.axis, Setting(time=32, eps=control.eps))
    assert overall(findings) == "FAIL"
    blamed = {role for role in Role for name in culprits(findings) if name.startswith(f"{role} →")}
    assert blamed >= set(control.blamed)
    if len(control.blamed) == 1 and "lr" in control.name:
        assert blamed == set(control.blamed)


@pytest.mark.slow
def test_a_pair_is_checked_as_it_is():
    findings = check(Source(pairs.right, BASE))
    assert overall(findings) == "PASS"
    assert {f.rules for f in findings} == {"as it is"}


@pytest.mark.slow
def test_the_block_that_is_wrong_is_named():
    findings = check(Source(one_block_unscaled, BASE))
    finding = next(f for f in findings if f.word == "FAIL" and "mlp.down" in f.quantity)
    assert "the largest is block 15" in finding.why


def test_a_factory_that_ignores_its_arguments_is_noticed():
    with pytest.raises(UserError, match="depth=16 is no larger than the base: the factory does not use depth"):
        check(Source(pairs.ignores_its_size, BASE), seeds=(0,))


@pytest.mark.slow
def test_divergence_does_not_blame_every_role():
    findings = check(Source(pairs.diverges_when_deep, BASE), seeds=(0,))
    assert not [f.role for f in findings if f.word == "FAIL" and f.role]


@pytest.mark.slow
def test_inconclusive_is_never_a_pass():
    assert {f.word for f in check(Source(pairs.diverges, BASE), seeds=(0,))} <= {"INCONCLUSIVE", "PASS"}
    assert overall(check(Source(pairs.diverges, BASE), seeds=(0,))) == "INCONCLUSIVE"
    findings = check(Source(pairs.diverges_when_deep, BASE), seeds=(0,))
    assert overall(findings) == "FAIL"
    assert any("not finite from depth 8 on" in f.why for f in findings)
    two = check(DECODER, shapes=AXES["depth"][:2])
    assert overall(two) == "INCONCLUSIVE"
    assert "2 depths are too few" in two[0].why
    assert any("nothing moved" in f.why for f in check(Source(pairs.frozen, BASE), seeds=(0,)))


@pytest.mark.slow
def test_special_batches_and_their_mistakes():
    keyed = Source(pairs.Keyed, BASE, batches=pairs.keyed_batches)
    assert overall(check(keyed)) == "PASS"
    for wrong, message in ((pairs.bad_batches, "returned list"), (pairs.misfitting_batches, "do not fit targets")):
        with pytest.raises(UserError, match=message):
            check(Source(pairs.Keyed, BASE, batches=wrong), seeds=(0,))


def test_the_numbers_are_what_plain_pytorch_gives():
    """Stream, branch and change against a run by hand, without hooks or samples."""
    shape = Shape(32, 3)
    subject, batches, probe = subject_of(shape, alpha(0.5), TINY, 4)
    rows, _ = measure(subject, batches, probe, 2)
    seen = {(r.step, r.quantity, r.layer): r for r in rows}
    twin, _, _ = subject_of(shape, alpha(0.5), TINY, 4)
    before = twin.model.stream(probe[0]).detach()
    for step in range(2):
        twin.zero_grad()
        twin.loss(batches(step)).backward()
        twin.step()
    with torch.no_grad():
        after = twin.model.stream(probe[0])
        block = twin.model.blocks[0]
        x = twin.model.embedding(probe[0])
        attention = block.multiplier * block.attention(block.attention_norm(x), *_mask(twin.model, probe[0]))
    assert seen[0, "stream", 3].rms == pytest.approx(rms(before), rel=1e-6)
    assert seen[2, "stream", 3].rms == pytest.approx(rms(after), rel=1e-6)
    assert seen[2, "stream", 3].change == pytest.approx(rms(after - before), rel=1e-6)
    assert seen[2, "branch blocks.*.attention.out", 0].rms == pytest.approx(rms(attention), rel=1e-5)
    assert block.multiplier < 0.9
    assert seen[0, "stream", 3].change == 0


def _mask(model, tokens):
    place = torch.arange(tokens.shape[1])[None]
    return model.mask(place, None, torch.float32), place


def test_role_effects_add_up_where_they_must():
    """With one role trained alone, its effect is the whole change."""
    subject, batches, probe = subject_of(Shape(32, 3), COMPLETEP, TINY, 0)
    subject.optimizers = (torch.optim.AdamW(subject.roles()[Role.HIDDEN_BIAS], lr=0.01),)
    rows, roles = measure(subject, batches, probe, 3)
    effect = {r.role: r.stream for r in roles}
    last = next(r for r in rows if (r.step, r.quantity, r.layer) == (3, "stream", 3))
    assert effect.pop(Role.HIDDEN_BIAS) == pytest.approx(last.change, rel=1e-5)
    assert set(effect.values()) == {0.0}


@pytest.mark.slow
def test_what_is_the_same_run_is_run_once():
    done = []
    rules = [SP, MUP, alpha(0.5), COMPLETEP]
    found = coordinate_check(
        DECODER,
        rules,
        AXES["depth"][:2],
        Setting(time=8, steps=1),
        seeds=(0,),
        workers=1,
        progress=lambda *a: done.append(a),
    )
    # The base once for all four; SP and muP are one at any depth.
    assert [total for _, total, _ in done] == [4] * 4
    assert found.stream["rules"].unique(maintain_order=True).to_list() == ["sp", "mup", "alpha=0.5", "completep"]
    wide = {Job(r, Shape(64, 2), 0).effect(BASE) for r in rules}
    assert len(wide) == 2  # SP apart; the others differ in depth only


@pytest.mark.slow
def test_processes_give_the_same_numbers():
    source = Source("completep.model.gpt:gpt", BASE, {"vocabulary": 256, "head_size": 16})
    shapes, setting = AXES["depth"][:2], Setting(time=16, steps=2)
    one, two = (coordinate_check(source, [COMPLETEP], shapes, setting, seeds=(0,), workers=n) for n in (1, 2))
    np.testing.assert_allclose(one.stream["rms"].to_numpy(), two.stream["rms"].to_numpy(), rtol=1e-5)
    np.testing.assert_allclose(one.roles["stream"].to_numpy(), two.roles["stream"].to_numpy(), rtol=1e-4, atol=1e-9)


@pytest.mark.slow
def test_a_users_file_is_executed_once_and_its_base_built_once_per_run(tmp_path):
    file = tmp_path / "counted.py"
    file.write_text(
        "import pathlib\n"
        "from completep.model.gpt import gpt\n"
        "def note(line):\n"
        f"    with open({str(tmp_path / 'log')!r}, 'a') as log: log.write(line + '\\n')\n"
        "note('executed')\n"
        "def model(width, depth):\n"
        "    note(f'{width}x{depth}')\n"
        "    return gpt(width, depth, 256, head_size=16)\n"
    )
    shapes, setting = [Shape(32, 4), Shape(32, 8)], Setting(time=8, steps=1)
    coordinate_check(Source(f"{file}:model", BASE), [COMPLETEP], shapes, setting, seeds=(0,), workers=1)
    lines = (tmp_path / "log").read_text().split()
    assert lines.count("executed") == 1
    assert lines.count("32x2") == 3  # once to see what the factory returns, and once per run
    assert lines.count("32x4") == lines.count("32x8") == 1


def test_the_text_is_real_and_the_same_every_time():
    data = python_bytes(5000)
    assert torch.equal(data, python_bytes(9000)[:5000])
    assert torch.equal(data[3000:], python_bytes(2000, 3000))
    assert len(data.unique()) > 40
    assert b"import" in bytes(data.tolist())


@pytest.mark.slow
def test_memory_does_not_grow_with_what_is_recorded():
    """What is kept of an activation is a bounded sample, however large it is."""
    subject, _, _ = subject_of(Shape(64, 2), COMPLETEP, Setting(), 0)
    tokens = torch.randint(256, (8, 128))
    seen = coordinates.observe(subject, (tokens, tokens))
    assert all(len(s.sample) <= coordinates.SAMPLE for s in seen.values())
    assert tokens.numel() * 64 > coordinates.SAMPLE
    full = rms(subject.model.stream(tokens).detach())
    sampled = rms(seen["stream", 2].sample)
    assert math.isclose(full, sampled, rel_tol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["olmo2", "timm-vit", "oddity"])
def test_real_models_by_their_factory(name):
    """Right under CompleteP, caught under muP: grouped keys, QK norms, norms after branches, images, bare tensors."""
    roles = {"storey*.mixer.*": Role.HIDDEN} if name == "oddity" else None
    source = Source(zoo.ZOO[name], BASE, roles=roles)
    shapes = [Shape(32, d) for d in (2, 4, 8, 16)]
    right = check(source, shapes=shapes, setting=Setting(time=24, steps=6))
    assert not culprits(right), [f for f in right if f.word == "FAIL"]
    assert sum(f.word == "PASS" for f in right) > len(right) / 2
    wrong = check(source, MUP, shapes=shapes, setting=Setting(time=24, steps=6))
    assert f"{Role.HIDDEN} → stream" in culprits(wrong)


@pytest.mark.slow
def test_a_model_with_dropout_is_refused_by_name():
    with pytest.raises(UserError, match=r"not deterministic: dropout is on in transformer\.drop"):
        check(Source(zoo.gpt2, BASE), seeds=(0,), setting=Setting(time=8))
