"""Commands on Ray: tuned as on this machine, and a failing one shows its last lines."""

import pytest

from completep.errors import UserError
from tests.tuning.test_tune import WRITE, cp, script, tuned


@pytest.mark.slow
def test_a_script_is_tuned_on_ray(tmp_path):
    pytest.importorskip("ray", reason="needs the extra `ray`")
    import ray

    try:
        result = tuned(tmp_path / "ray", engine="ray", workers=2, seeds=1)
        assert result.failed == 0
        assert result.runs["loss"].is_finite().all()
        bad = script(tmp_path, "raise SystemExit('no data on this node')\n" + WRITE % "2.5")
        with pytest.raises(UserError, match=r"(?s)the first run failed.*no data on this node"):
            cp.tune(bad, space={"lr": "2^-9..2^-5"}, loss="{folder}/m.json:loss", out=tmp_path / "bad", engine="ray")
    finally:
        ray.shutdown()
    here = tuned(tmp_path / "here", seeds=1)
    assert here.to_json() == result.to_json()
